"""The bucket, through its JSON API with the machine's token: read sources, write logs. Nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import quote

import requests

from spotkeeper.vm.metadata import Metadata, MetadataError

CONNECT_S = 5.0
ANSWER_S = 60.0
CHUNK = 1 << 18


class StorageError(Exception):
    """No usable answer; try again."""


class Bucket:
    """One bucket. For the helper threads: every call is a connection of its own."""

    def __init__(self, root: str, bucket: str, metadata: Metadata) -> None:
        self._root = root
        self._bucket = quote(bucket, safe="")
        self._metadata = metadata

    def read(self, name: str) -> Iterator[bytes]:
        """An object's content, in pieces.

        Raises:
            StorageError: it is not there, or the answer broke off.
        """
        url = f"{self._root}/storage/v1/b/{self._bucket}/o/{quote(name, safe='')}"
        try:
            with requests.get(
                url, params={"alt": "media"}, headers=self._headers(), stream=True, timeout=(CONNECT_S, ANSWER_S)
            ) as answer:
                if answer.status_code != 200:
                    raise StorageError(f"{name}: HTTP {answer.status_code}")
                yield from answer.iter_content(CHUNK)
        except requests.RequestException as error:
            raise StorageError(f"{name}: {type(error).__name__}") from None

    def write(self, name: str, content: bytes) -> None:
        """Make or replace an object.

        Raises:
            StorageError: it was not taken.
        """
        url = f"{self._root}/upload/storage/v1/b/{self._bucket}/o"
        query = {"uploadType": "media", "name": name}
        headers = self._headers() | {"Content-Type": "text/plain; charset=utf-8"}
        try:
            answer = requests.post(url, params=query, data=content, headers=headers, timeout=(CONNECT_S, ANSWER_S))
        except requests.RequestException as error:
            raise StorageError(f"{name}: {type(error).__name__}") from None
        if answer.status_code != 200:
            raise StorageError(f"{name}: HTTP {answer.status_code}")

    def _headers(self) -> dict[str, str]:
        try:
            return {"Authorization": f"Bearer {self._metadata.access_token()}"}
        except MetadataError as error:
            raise StorageError(str(error)) from None
