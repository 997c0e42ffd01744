"""The few things an object store must do for Spotkeeper, and the errors they may end in.

Two implementations: ``objects_obstore`` (S3 and GCS) and ``objects_sqlite`` (the local twin).
Bytes only: what the bytes mean is ``store.py``'s business.
"""

from __future__ import annotations

import builtins
import re
from collections.abc import Sequence
from typing import Protocol
from urllib.parse import urlsplit

from msgspec import Struct

from spotkeeper.reconcile.deadline import Deadline
from spotkeeper.reconcile.store_api import StoreError

# One alphabet for all stores, so that no store percent-encodes a name another takes as it is.
_KEY = re.compile(r"(?!.*(?:^|/)\.{1,2}(?:/|\Z))[-A-Za-z0-9._]+(?:/[-A-Za-z0-9._]+)*\Z")
MAX_KEY = 900  # S3 and GCS allow 1,024 bytes


class BadKeyError(StoreError, ValueError):
    """The key (or prefix) is none we ever write. A bug, or input that should have been checked earlier."""


class ConflictError(StoreError):
    """A conditional write was refused: read again, decide again (after looking whether our own write is there)."""


class UnavailableError(StoreError):
    """The store did not answer, twice. The write may or may not have happened: the next round reads it."""


class RefusedError(StoreError):
    """The store answered that we may not, or that the bucket does not exist: no retry helps."""


class Blob(Struct, frozen=True):
    """An object's bytes, and the tag that a conditional replacement must name (ETag or generation; opaque).

    ``etag``: what a conditional read must name, where that is something else.
    """

    data: bytes
    tag: str
    etag: str = ""


class Objects(Protocol):
    """Verbs of an object store. Every one may raise ``UnavailableError``, ``RefusedError`` or ``BadKeyError``.

    A read or write that fails for a passing reason is retried once. After a lost answer a conditional
    write can thereby meet itself: ``ConflictError`` does not prove that somebody else wrote.
    """

    def until(self, deadline: Deadline) -> Objects:
        """The same store, which begins no request after that (``UnavailableError``)."""

    def get(self, key: str) -> Blob | None:
        """The object, or None. Strongly consistent after a write."""

    def part(self, key: str, start: int, size: int) -> bytes | None:
        """Bytes of an object that may be too large to be read at once, fewer at its end; None where it is not there.

        ``start`` lies within it. Of two parts the object may have been another in between.
        """

    def refresh(self, key: str, known: Blob) -> Blob | None:
        """As ``get``; ``known`` itself where the object is still that version, and its bytes stay where they are."""

    def create(self, key: str, data: bytes) -> str:
        """Write a new object; its tag. Raises ConflictError where the key exists."""

    def create_many(self, blobs: Sequence[tuple[str, bytes]]) -> None:
        """As ``create``, for many small objects at once; those that exist stay as they are."""

    def replace(self, key: str, data: bytes, tag: str) -> str:
        """Overwrite exactly the version ``tag``; the new tag. Raises ConflictError where it changed or is gone."""

    def get_many(self, keys: Sequence[str]) -> builtins.list[Blob | None]:
        """As ``get``, for many small objects at once; in the order of the keys."""

    def put(self, key: str, data: bytes) -> str:
        """Overwrite without a condition (progress, logs); the new tag. Never for a decision."""

    def list(self, prefix: str, start: str = "") -> builtins.list[str]:
        """All keys under a folder, sorted; ``prefix`` ends with a slash, or is empty for everything.

        ``start``: only those whose name in the folder begins so, without listing the others.
        """

    def newest(self, prefix: str, most: int) -> builtins.list[str]:
        """Of the keys under a folder so many that were written last, the newest first. A listing of the folder."""

    def delete(self, key: str) -> None:
        """Delete; what is not there is deleted."""

    def delete_many(self, keys: Sequence[str]) -> None:
        """As ``delete``, for many objects at once."""


def check_key(key: str) -> str:
    if len(key) > MAX_KEY or not _KEY.match(key):
        raise BadKeyError(f"{key[:120]!r} is not a name Spotkeeper writes (letters, digits, '-', '.', '_' and '/')")
    return key


def check_prefix(prefix: str) -> str:
    """Only whole folders: obstore lists by path segment, SQLite would by character."""
    if prefix and not prefix.endswith("/"):
        raise BadKeyError(f"prefix {prefix[:120]!r} must end with '/'")
    if prefix:
        check_key(prefix[:-1])
    return prefix


def open_objects(url: str, endpoint: str | None = None, brief: bool = False) -> Objects:
    """The store behind ``SPOTKEEPER_BUCKET``: ``gs://name``, ``s3://name[/prefix]`` or ``sqlite:///path``.

    Args:
        endpoint: root of the store's HTTP API, where it is not the cloud's own.
        brief: for the function, whose requests have a deadline: a call ends within ``deadline.CALL_S``. Without
            it a call may take the time of an upload.

    Raises:
        ValueError: the address is none of these.
    """
    parts = urlsplit(url)
    if parts.scheme == "sqlite" and parts.path.startswith("/") and not parts.netloc:
        from spotkeeper.reconcile.objects_sqlite import SqliteObjects

        return SqliteObjects(parts.path)
    if parts.scheme in ("s3", "gs") and parts.netloc:
        from spotkeeper.reconcile.objects_obstore import open_bucket

        return open_bucket(url, endpoint, brief)
    raise ValueError(f"SPOTKEEPER_BUCKET={url!r}: want gs://<bucket>, s3://<bucket> or sqlite:///<absolute path>")
