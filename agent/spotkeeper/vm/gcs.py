"""Cloud Storage, through its JSON API with the machine's token. Knows no job; ``storage.py`` is what others use."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Iterator
from urllib.parse import quote

import msgspec
import requests
from msgspec import Struct

from spotkeeper.spec import codec
from spotkeeper.vm.metadata import MetadataError
from spotkeeper.vm.storage import ANSWER_S, CHUNK, CONNECT_S, MissingError, Readable, StorageError, Stored


class _Object(Struct, frozen=True):
    """What the API says of an object, as far as it matters here."""

    size: str = ""
    md5: str = msgspec.field(default="", name="md5Hash")  # base64


class Gcs:
    """One bucket; every call is a connection of its own."""

    def __init__(self, root: str, bucket: str, token: Callable[[], str]) -> None:
        self._root = root
        self._bucket = quote(bucket, safe="")
        self._token = token

    def read(self, name: str) -> Iterator[bytes]:
        try:
            with requests.get(
                self._url(name),
                params={"alt": "media"},
                headers=self._headers(),
                stream=True,
                timeout=(CONNECT_S, ANSWER_S),
            ) as answer:
                if answer.status_code == 404:
                    raise MissingError(f"{name}: it is not there")
                if answer.status_code != 200:
                    raise StorageError(f"{name}: HTTP {answer.status_code}")
                yield from answer.iter_content(CHUNK)
        except requests.RequestException as error:
            raise StorageError(f"{name}: {type(error).__name__}") from None

    def find(self, name: str) -> Stored | None:
        query = {"fields": "size,md5Hash"}
        try:
            answer = requests.get(self._url(name), params=query, headers=self._headers(), timeout=(CONNECT_S, ANSWER_S))
        except requests.RequestException as error:
            raise StorageError(f"{name}: {type(error).__name__}") from None
        return None if answer.status_code == 404 else _stored(name, answer)

    def send(self, name: str, content: Readable) -> Stored:
        return _stored(name, self._post(name, content, "application/octet-stream"))

    def write(self, name: str, content: bytes) -> None:
        answer = self._post(name, content, "text/plain; charset=utf-8")
        if answer.status_code != 200:
            raise StorageError(f"{name}: HTTP {answer.status_code}")

    def create(self, name: str, content: bytes) -> bool:
        answer = self._post(name, content, "text/plain; charset=utf-8", {"ifGenerationMatch": "0"})
        if answer.status_code not in (200, 412):
            raise StorageError(f"{name}: HTTP {answer.status_code}")
        return answer.status_code == 200

    def _post(
        self, name: str, content: Readable | bytes, kind: str, condition: dict[str, str] | None = None
    ) -> requests.Response:
        url = f"{self._root}/upload/storage/v1/b/{self._bucket}/o"
        query = {"uploadType": "media", "name": name} | (condition or {})
        headers = self._headers() | {"Content-Type": kind}
        try:
            return requests.post(url, params=query, data=content, headers=headers, timeout=(CONNECT_S, ANSWER_S))
        except requests.RequestException as error:
            raise StorageError(f"{name}: {type(error).__name__}") from None

    def _url(self, name: str) -> str:
        return f"{self._root}/storage/v1/b/{self._bucket}/o/{quote(name, safe='')}"

    def _headers(self) -> dict[str, str]:
        try:
            return {"Authorization": f"Bearer {self._token()}"}
        except MetadataError as error:
            raise StorageError(str(error)) from None


def _stored(name: str, answer: requests.Response) -> Stored:
    """
    Raises:
        StorageError: it was refused, or the answer makes no sense.
    """
    if answer.status_code != 200:
        raise StorageError(f"{name}: HTTP {answer.status_code}")
    try:
        said = codec.decode(answer.content, _Object)
        return Stored(int(said.size), base64.b64decode(said.md5, validate=True).hex())
    except (msgspec.DecodeError, ValueError, binascii.Error):
        raise StorageError(f"{name}: an answer that is none") from None
