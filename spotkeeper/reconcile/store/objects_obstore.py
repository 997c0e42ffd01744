"""Implements ``Objects`` for S3 and GCS through obstore.

obstore imports in 10 ms and supports both clouds' conditional writes. A call is repeated once after a transient error;
a conditional write can then conflict with itself (``objects.ConflictError``).
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit

import obstore
from obstore import exceptions

from spotkeeper.reconcile.store import credentials
from spotkeeper.reconcile.store.objects import (
    NEVER,
    Blob,
    BucketRefusedError,
    ConflictError,
    Deadline,
    UnavailableError,
    check_key,
    check_prefix,
)

if TYPE_CHECKING:
    from obstore import GetOptions, ObjectMeta
    from obstore.store import ClientConfig, GCSConfig, ObjectStore, RetryConfig, S3Config

T = TypeVar("T")
PARALLEL = 8  # reads of small objects at once
DELETES = 32  # deletes at once: a large gang's end leaves thousands of facts, and a round has a minute
TRIES = 5  # tries of a refused request, with pauses from 0.1 s on: Google allows one write per second to an object


@dataclass(frozen=True)
class Patience:
    """Time limits of a call, seconds. With its retry a call ends within ``answer_s + again_s`` of its beginning."""

    answer_s: float  # for one request, to its last byte
    again_s: float  # from a call's beginning; after this time a failed request is not repeated


BRIEF = Patience(5.0, 2.0)
LONG = Patience(15.0, 10.0)


def open_bucket(url: str, endpoint: str | None = None, brief: bool = False) -> ObstoreObjects:
    """Open ``s3://bucket[/prefix]`` or ``gs://bucket[/prefix]`` with the machine's or the logged-in user's identity.

    Args:
        endpoint: another root of the same API (a test's S3, a private endpoint). With plain ``http://`` GCS requests
            are not signed, since a token must not travel unencrypted.
        brief: see ``store.open_objects``.
    """
    parts = urlsplit(url)
    patience = BRIEF if brief else LONG
    options: ClientConfig = {"timeout": timedelta(seconds=patience.answer_s), "connect_timeout": timedelta(seconds=5)}
    retry: RetryConfig = {"max_retries": TRIES - 1, "retry_timeout": timedelta(seconds=patience.again_s)}
    if endpoint and endpoint.startswith("http://"):
        options["allow_http"] = True
    prefix = parts.path.strip("/") or None
    if parts.scheme == "s3":
        s3: S3Config = {"endpoint": endpoint} if endpoint else {}
        region, keys = credentials.s3()
        if region:
            s3["region"] = region
        bucket = obstore.store.S3Store(
            parts.netloc, prefix=prefix, config=s3, client_options=options, retry_config=retry, credential_provider=keys
        )
        return ObstoreObjects(bucket, "e_tag")
    gcs: GCSConfig = {"base_url": endpoint} if endpoint else {}
    unsigned = endpoint is not None and endpoint.startswith("http://")
    if unsigned:
        gcs["skip_signature"] = True  # only reads respect it: a write would still fetch a token and send it
    store = obstore.store.GCSStore(
        parts.netloc,
        prefix=prefix,
        config=gcs,
        client_options=options,
        retry_config=retry,
        credential_provider=(lambda: {"token": "", "expires_at": None}) if unsigned else credentials.gcs(),
    )
    return ObstoreObjects(store, "version")


class ObstoreObjects:
    """``Objects`` over any obstore store. ``field``: the name of an object's version (S3: ``e_tag``, GCS: ``version``).

    S3's ETag is a hash of the content, so identical bytes have an identical tag. Documents written by compare-and-swap
    therefore contain a version and a nonce.
    """

    def __init__(self, store: ObjectStore, field: str = "e_tag") -> None:
        self._store = store
        self._field = field
        self._deadline = NEVER

    def until(self, deadline: Deadline) -> ObstoreObjects:
        mine = copy(self)
        mine._deadline = deadline
        return mine

    def get(self, key: str) -> Blob | None:
        return self._get(key, {})

    def part(self, key: str, start: int, size: int) -> bytes | None:
        def read() -> bytes:
            return bytes(obstore.get_range(self._store, check_key(key), start=start, length=size))

        try:
            return self._twice(key, read)
        except FileNotFoundError:
            return None
        except UnavailableError:  # stores refuse a range behind the object's end, as of an empty object
            about = self._about(key)
            if about is not None and about["size"] > start:
                raise
            return None if about is None else b""

    def _about(self, key: str) -> ObjectMeta | None:
        """Return an object's metadata; None if it is missing."""
        try:
            return self._twice(key, lambda: obstore.get(self._store, check_key(key)).meta)
        except FileNotFoundError:
            return None

    def refresh(self, key: str, known: Blob) -> Blob | None:
        if not known.etag:
            return self._get(key, {})
        try:
            return self._get(key, {"if_none_match": known.etag})
        except exceptions.NotModifiedError:
            return known

    def _get(self, key: str, options: GetOptions) -> Blob | None:
        def read() -> Blob:
            result = obstore.get(self._store, check_key(key), options=options)
            return Blob(bytes(result.bytes()), self._tag(key, result.meta), str(result.meta["e_tag"] or ""))

        try:
            return self._twice(key, read)
        except FileNotFoundError:
            return None

    def get_many(self, keys: Sequence[str]) -> builtins.list[Blob | None]:
        if len(keys) < 2:
            return [self.get(key) for key in keys]
        with ThreadPoolExecutor(max_workers=min(PARALLEL, len(keys))) as pool:
            return list(pool.map(self.get, keys))

    def create(self, key: str, data: bytes) -> str:
        """Write a new object. If S3 refuses the write although the object does not exist, the write is repeated.

        S3 refuses (409) also while it still deletes the key, and obstore then reports that the object exists.
        """
        for _ in range(TRIES):
            try:
                return self._put(key, data, "create")
            except ConflictError:
                if not isinstance(self._store, obstore.store.S3Store) or self._exists(key):
                    raise
        raise UnavailableError(f"{key}: {TRIES} writes of a new object were refused, but the object does not exist")

    def _exists(self, key: str) -> bool:
        try:
            self._twice(key, lambda: obstore.head(self._store, check_key(key)))
        except FileNotFoundError:
            return False
        return True

    def replace(self, key: str, data: bytes, tag: str) -> str:
        return self._put(key, data, {self._field: tag})

    def put(self, key: str, data: bytes) -> str:
        return self._put(key, data, "overwrite")

    def list(self, prefix: str, start: str = "") -> builtins.list[str]:
        check_prefix(prefix)
        return self._twice(prefix, lambda: self._listed(prefix, prefix + start) if start else self._folder(prefix))

    def newest(self, prefix: str, most: int) -> builtins.list[str]:
        check_prefix(prefix)
        found = self._twice(prefix, lambda: list(self._metas(prefix)))
        found.sort(key=lambda meta: (meta["last_modified"], meta["path"]), reverse=True)
        return [str(meta["path"]) for meta in found[:most]]

    def _folder(self, prefix: str) -> builtins.list[str]:
        return sorted(str(meta["path"]) for meta in self._metas(prefix))

    def _metas(self, prefix: str) -> Iterator[ObjectMeta]:
        for page in obstore.list(self._store, prefix=prefix or None, chunk_size=1000):
            yield from page
            self._in_time(prefix)

    def _listed(self, prefix: str, begin: str) -> builtins.list[str]:
        """Return the sorted keys in the folder ``prefix`` that begin with ``begin``: obstore lists only folders."""
        found = []
        before = begin[:-1] + chr(ord(begin[-1]) - 1)  # the offset itself is left out
        for page in obstore.list(self._store, prefix=prefix or None, offset=before, chunk_size=50):
            keys = sorted(str(meta["path"]) for meta in page)
            found += [key for key in keys if key.startswith(begin)]
            if keys and keys[-1] > begin and not keys[-1].startswith(begin):
                break
            self._in_time(prefix)
        return sorted(found)

    def delete(self, key: str) -> None:
        try:
            self._twice(key, lambda: obstore.delete(self._store, check_key(key)))
        except FileNotFoundError:
            return

    def delete_many(self, keys: Sequence[str]) -> None:
        if len(keys) < 2:
            for key in keys:
                self.delete(key)
            return
        with ThreadPoolExecutor(max_workers=min(DELETES, len(keys))) as pool:
            list(pool.map(self.delete, keys))

    def _put(self, key: str, data: bytes, mode: str | dict[str, str]) -> str:
        # A multipart upload has no condition and costs three requests: only for large, unconditional writes.
        multipart = None if mode == "overwrite" else False

        def write() -> str:
            return self._tag(key, obstore.put(self._store, check_key(key), data, mode=mode, use_multipart=multipart))

        try:
            return self._twice(key, write)
        except FileNotFoundError as error:  # S3 answers 404 to If-Match on a missing key
            raise ConflictError(f"{key}: deleted since it was read") from error

    def _twice(self, key: str, call: Callable[[], T]) -> T:
        """Make a call, and retry once after a transient error. obstore retries only before an answer's first byte."""
        self._in_time(key)
        try:
            with _translated(key):
                return call()
        except UnavailableError:
            self._in_time(key)
            with _translated(key):
                return call()

    def _in_time(self, key: str) -> None:
        if self._deadline.up:
            raise UnavailableError(f"{key}: not requested, because this request's time is up")

    def _tag(self, key: str, meta: object) -> str:
        tag = meta[self._field]  # type: ignore[index]
        if not tag:
            raise BucketRefusedError(f"{key}: the store gave no {self._field}, so conditional writes are impossible")
        return str(tag)


@contextmanager
def _translated(key: str) -> Iterator[None]:
    """Translate obstore's errors to those of ``objects``, except FileNotFoundError and NotModifiedError."""
    try:
        yield
    except exceptions.NotModifiedError:
        raise
    except (exceptions.AlreadyExistsError, exceptions.PreconditionError) as error:
        raise ConflictError(f"{key}: exists, or changed since it was read") from error
    except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError, exceptions.NotSupportedError) as error:
        raise BucketRefusedError(
            f"{key}: {type(error).__name__}: this identity lacks a permission, or the store does not support it"
        ) from error
    except exceptions.BaseError as error:
        raise UnavailableError(f"{key}: {_short(error)}") from error


def _short(error: Exception) -> str:
    """Return the first line of an error; obstore's further lines are dumps of the request."""
    return str(error).strip().split("\n", 1)[0][:300]
