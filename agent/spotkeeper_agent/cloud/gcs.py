"""Cloud Storage: a :class:`~spotkeeper_agent.cloud.storage.Bucket` over the JSON API with the machine's token."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import quote

import msgspec
import requests
from msgspec import Struct

from spotkeeper.contract import codec
from spotkeeper_agent.cloud.metadata import MetadataError
from spotkeeper_agent.cloud.storage import ANSWER_S, CHUNK, CONNECT_S, MissingError, Readable, StorageError, Stored

TEXT = "text/plain; charset=utf-8"


class _Object(Struct, frozen=True):
    """The fields of an object's metadata that the agent uses."""

    size: str = ""
    md5: str = msgspec.field(default="", name="md5Hash")  # base64


class Gcs:
    """One bucket; every call opens its own connection."""

    def __init__(self, root: str, bucket: str, token: Callable[[], str]) -> None:
        self._root = root
        self._bucket = quote(bucket, safe="")
        self._token = token

    def read(self, name: str) -> Iterator[bytes]:
        with self._ask("GET", name, self._url(name), params={"alt": "media"}, stream=True) as answer:
            if answer.status_code == 404:
                raise MissingError(f"{name}: it does not exist")
            if answer.status_code != 200:
                raise StorageError(f"{name}: HTTP {answer.status_code}")
            try:
                yield from answer.iter_content(CHUNK)
            except requests.RequestException as error:
                raise StorageError(f"{name}: {type(error).__name__}") from None

    def find(self, name: str) -> Stored | None:
        answer = self._ask("GET", name, self._url(name), params={"fields": "size,md5Hash"})
        return None if answer.status_code == 404 else _stored(name, answer)

    def send(self, name: str, content: Readable) -> Stored:
        return _stored(name, self._post(name, content, "application/octet-stream"))

    def write(self, name: str, content: bytes) -> None:
        answer = self._post(name, content, TEXT)
        if answer.status_code != 200:
            raise StorageError(f"{name}: HTTP {answer.status_code}")

    def create(self, name: str, content: bytes) -> bool:
        answer = self._post(name, content, TEXT, ifGenerationMatch="0")
        if answer.status_code not in (200, 412):
            raise StorageError(f"{name}: HTTP {answer.status_code}")
        return answer.status_code == 200

    def delete(self, name: str) -> None:
        answer = self._ask("DELETE", name, self._url(name))
        if answer.status_code not in (200, 204, 404):
            raise StorageError(f"{name}: HTTP {answer.status_code}")

    def _post(self, name: str, content: Readable | bytes, kind: str, **condition: str) -> requests.Response:
        url = f"{self._root}/upload/storage/v1/b/{self._bucket}/o"
        query = {"uploadType": "media", "name": name} | condition
        return self._ask("POST", name, url, params=query, data=content, headers={"Content-Type": kind})

    def _ask(self, method: str, name: str, url: str, **options: Any) -> requests.Response:
        try:
            headers = options.pop("headers", {}) | {"Authorization": f"Bearer {self._token()}"}
            return requests.request(method, url, headers=headers, timeout=(CONNECT_S, ANSWER_S), **options)
        except MetadataError as error:
            raise StorageError(str(error)) from None
        except requests.RequestException as error:
            raise StorageError(f"{name}: {type(error).__name__}") from None

    def _url(self, name: str) -> str:
        return f"{self._root}/storage/v1/b/{self._bucket}/o/{quote(name, safe='')}"


def _stored(name: str, answer: requests.Response) -> Stored:
    """Return the object that an answer describes.

    Raises:
        StorageError: the request was refused, or the answer is invalid.
    """
    if answer.status_code != 200:
        raise StorageError(f"{name}: HTTP {answer.status_code}")
    try:
        said = codec.decode(answer.content, _Object)
        return Stored(int(said.size), base64.b64decode(said.md5, validate=True).hex())
    except (msgspec.DecodeError, ValueError, binascii.Error):
        raise StorageError(f"{name}: the answer is invalid") from None
