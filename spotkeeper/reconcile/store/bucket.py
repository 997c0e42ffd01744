"""How documents are read and written in the bucket of one stack: create-only, compare-and-swap, quarantine.

It recognises a write that succeeded although its answer was lost. ``documents.py`` encodes documents, and
``objects_*.py`` have the differences between S3, GCS and SQLite.
"""

from __future__ import annotations

import builtins
import hashlib
import logging
from collections.abc import Callable
from typing import TypeVar
from urllib.parse import urlsplit

from spotkeeper.contract.allocation import Allocation
from spotkeeper.contract.record import Record
from spotkeeper.contract.sweep import SweepState
from spotkeeper.reconcile.store import paths
from spotkeeper.reconcile.store.documents import (
    QUARANTINE_BYTES,
    CorruptError,
    Recent,
    Versioned,
    cut,
    decode,
    decode_many,
    decode_versioned,
    encode_versioned,
)
from spotkeeper.reconcile.store.objects import Blob, BucketRefusedError, ConflictError, Objects, StoreError

T = TypeVar("T")
Nonced = TypeVar("Nonced", Record, Allocation, SweepState)

MANY = "many-"  # begins the name of an object with several entries of the ledger
QUARANTINE_KEPT = 200

log = logging.getLogger(__name__)


def open_objects(url: str, endpoint: str | None, brief: bool) -> Objects:
    """Open the object store at ``gs://name``, ``s3://name[/prefix]`` or ``sqlite:///path`` (``SPOTKEEPER_BUCKET``).

    Args:
        endpoint: root of the store's HTTP API, if it is not the cloud's own.
        brief: True for the function, whose requests have a deadline: each call ends within ``objects.CALL_S`` seconds.
            False: a call has time for an upload.

    Raises:
        ValueError: the address has another form.
    """
    parts = urlsplit(url)
    if parts.scheme == "sqlite" and parts.path.startswith("/") and not parts.netloc:
        from spotkeeper.reconcile.store.objects_sqlite import SqliteObjects

        return SqliteObjects(parts.path)
    if parts.scheme in ("s3", "gs") and parts.netloc:
        from spotkeeper.reconcile.store.objects_obstore import open_bucket

        return open_bucket(url, endpoint, brief)
    raise ValueError(f"SPOTKEEPER_BUCKET={url!r}: want gs://<bucket>, s3://<bucket> or sqlite:///<absolute path>")


class Bucket:
    """The objects of one stack's bucket, by their paths.

    * A *token* is what the backend compares (ETag, generation, row version); callers do not interpret it.
    * Each ``cas_*`` write stores a fresh ``nonce``. After "precondition failed" the object is read again: if it has
      this nonce, the write succeeded and only its answer was lost.
    * A *create-only* write leaves an existing object untouched and returns ``False``.
    * Any other failure raises :class:`StoreError`; no method retries for longer than a few seconds.
    """

    def __init__(self, objects: Objects, recent: Recent | None = None) -> None:
        self._objects = objects
        self._recent = recent or Recent()

    def get(self, path: str) -> bytes | None:
        blob = self._objects.get(path)
        return blob.data if blob else None

    def get_all(self, paths: tuple[str, ...]) -> tuple[bytes | None, ...]:
        """Read several small objects at once, in the order of the paths. None for a missing object."""
        return tuple(blob.data if blob else None for blob in self._objects.get_many(list(paths)))

    def part(self, path: str, start: int, size: int) -> bytes | None:
        """Read up to ``size`` bytes of a large object from ``start``; None if it is missing."""
        return self._objects.part(path, start, size)

    def create(self, path: str, data: bytes) -> bool:
        """Create an object; return False if it exists with other bytes. No other writer may write these bytes."""
        return self._create(path, data, own=True) is not None

    def put(self, path: str, data: bytes) -> None:
        self._objects.put(path, data)

    def delete(self, path: str) -> None:
        """Delete an object. A missing object is not an error."""
        self._objects.delete(path)

    def list(self, prefix: str) -> tuple[str, ...]:
        """Return the paths under a prefix, sorted."""
        folder = prefix[: prefix.rfind("/") + 1]
        return tuple(path for path in self._objects.list(folder) if path.startswith(prefix))

    def newest(self, folder: str, most: int) -> tuple[str, ...]:
        """Return the ``most`` paths of a folder that were written last, newest first."""
        return tuple(self._objects.newest(folder, most))

    def quarantine(self, text: str) -> None:
        """Store the beginning of unreadable content under its hash, unless the quarantine is full."""
        data = text.encode("utf-8", "backslashreplace")[:QUARANTINE_BYTES]
        if len(self._objects.list(paths.QUARANTINE)) < QUARANTINE_KEPT:
            self._create(paths.quarantine(hashlib.sha256(data).hexdigest()), data)

    # -- how documents are read and written

    def _read(self, path: str, kind: type[T]) -> Versioned[T] | None:
        blob = self._objects.get(path)
        return _versioned(blob, decode, kind, path) if blob else None

    def _value(self, path: str, kind: type[T]) -> T | None:
        read = self._read(path, kind)
        return read.value if read else None

    def _read_versioned(self, path: str, kind: type[T]) -> Versioned[T] | None:
        known = self._recent.blob(path)
        blob = self._objects.refresh(path, known) if known is not None else self._objects.get(path)
        if blob is None:
            return None
        value = self._recent.value(path, blob)
        if isinstance(value, kind):
            return Versioned(value, blob.tag)
        if blob is known:  # the cached value was evicted meanwhile, and the answer had no bytes
            blob = self._objects.get(path)
            if blob is None:
                return None
        read = _versioned(blob, decode_versioned, kind, path)
        self._recent.keep(path, blob, read.value)
        return read

    def _read_all(
        self, prefix: str, kind: type[T], deep: bool = False, believed: Callable[[str, T], bool] = lambda _, __: True
    ) -> builtins.list[T]:
        """Read every document of a folder. Unreadable ones go to quarantine, so that they do not stop a job.

        ``deep``: also read subfolders. Otherwise subfolders are skipped, because a machine could write to one that is
        called ``logs``: its rights allow ``jobs/*/logs/*``, and the clouds' ``*`` matches slashes too.
        ``believed``: by path and value, whether to return it.
        """
        out: builtins.list[T] = []
        keys = [path for path in self._objects.list(prefix) if deep or "/" not in path.removeprefix(prefix)]
        for path, blob in zip(keys, self._objects.get_many(keys), strict=True):
            if blob is None:  # deleted since the listing
                continue
            try:
                many = f".{MANY}" in path
                values = decode_many(blob.data, kind, path) if many else (decode(blob.data, kind, path),)
                out += [value for value in values if believed(path, value)]
            except CorruptError as error:
                log.warning("skipped %s", error)
                self._set_aside(path, blob)
        return out

    def _set_aside(self, path: str, blob: Blob) -> None:
        """Copy an object to quarantine, if this identity has the right to do so; submitters do not have it."""
        try:
            self.quarantine(f"{path}\n{cut(blob.data)}")
        except BucketRefusedError as error:
            log.info("not set aside: %s", error)

    def _create(self, path: str, data: bytes, own: bool = False) -> str | None:
        """Create an object. Returns its token, or None if it exists already.

        ``own``: only this writer writes these bytes, so an object that has them counts as created by this call.

        A refusal (403) also means that the object exists, if it can be read: Google refuses so if the identity has the
        right to create objects but not to replace them.
        """
        try:
            return self._objects.create(path, data)
        except ConflictError:
            return self._ours(path, data) if own else None
        except BucketRefusedError:
            if self._objects.get(path) is None:
                raise
            return self._ours(path, data) if own else None

    def _replace(self, path: str, data: bytes, token: str, own: bool = True) -> str | None:
        try:
            return self._objects.replace(path, data, token)
        except ConflictError:
            return self._ours(path, data) if own else None

    def _ours(self, path: str, data: bytes) -> str | None:
        """Return the token if the object has these bytes: only this writer writes them, so its write had succeeded."""
        blob = self._objects.get(path)
        return blob.tag if blob is not None and blob.data == data else None

    def _create_versioned(self, path: str, document: Nonced) -> str | None:
        return self._create(path, _encoded(document, path), own=True)

    def _replace_versioned(self, path: str, document: Nonced, token: str) -> str | None:
        return self._replace(path, _encoded(document, path), token)

    def _put_large(self, path: str, data: bytes) -> None:
        """Store an object under its hash. It is uploaded in parts, which a conditional write cannot be."""
        if path not in self.list(path):
            self._objects.put(path, data)


def _versioned(blob: Blob, decoded: Callable[[bytes, type[T], str], T], kind: type[T], path: str) -> Versioned[T]:
    """Return the decoded document with its token. A ``CorruptError`` gets the token too."""
    try:
        return Versioned(decoded(blob.data, kind, path), blob.tag)
    except CorruptError as error:
        error.token = blob.tag
        raise


def _encoded(document: Nonced, path: str) -> bytes:
    """Encode a document for a write by compare-and-swap.

    Raises:
        StoreError: it has no nonce; or all jobs share it, and none could read it. What a submitter wrote may have led
            to it, and so only the round of that job fails.
    """
    if not document.nonce:
        raise StoreError(f"{path}: a document written by compare-and-swap needs a fresh nonce")
    data = encode_versioned(document)
    if not isinstance(document, Record):
        try:
            decode_versioned(data, type(document), path)
        except CorruptError as error:
            raise StoreError(f"not written: {error}") from None
    return data
