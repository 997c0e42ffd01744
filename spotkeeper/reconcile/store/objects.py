"""The interface of an object store, its time limits and its errors.

Implementations: ``objects_obstore`` (S3 and GCS) and ``objects_sqlite`` (the one-machine cloud). They handle bytes;
``store.py`` reads and writes documents.

Cloud Run and Lambda kill a request that takes too long. A round that is killed does not release its job's lease, so no
other round can begin until the lease expires. So a request stops earlier by itself and leaves the rest to the next::

    REQUEST_S + CALL_S <= PLATFORM_S     no call begins after REQUEST_S, and each ends within CALL_S
    AGAIN_S >= LISTING_S                 one more round begins only if AGAIN_S is left: time to list the cloud
"""

from __future__ import annotations

import builtins
import math
import re
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from msgspec import Struct

# One alphabet for all stores, so that no store percent-encodes a name that another takes literally.
_KEY = re.compile(r"(?!.*(?:^|/)\.{1,2}(?:/|\Z))[-A-Za-z0-9._]+(?:/[-A-Za-z0-9._]+)*\Z")
MAX_KEY = 900  # S3 and GCS allow 1,024 bytes

PLATFORM_S = 60.0  # the smallest timeout of the function that a stack file may set; these are all real seconds
REQUEST_S = 50.0  # from a request's beginning; no call to the bucket or the cloud begins after it
CALL_S = 8.0  # the longest call to the bucket, which may end after REQUEST_S
LISTING_S = 24.0  # the longest listing of the cloud, all its calls together
AGAIN_S = 36.0  # with less time left, no further round begins for reports that arrived meanwhile: agents wait 30 s
BEGIN_S = 10.0  # with less time left, a tick begins no further round


class Deadline:
    """The time at which one request must end. ``now``: a monotonic clock, seconds."""

    def __init__(self, seconds: float, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._ends = now, now() + seconds

    def left(self) -> float:
        return self._ends - self._now()

    @property
    def up(self) -> bool:
        return self.left() <= 0.0


NEVER = Deadline(math.inf, lambda: 0.0)


class StoreError(Exception):
    """The bucket could not be read or written. The next round tries again."""


class BadKeyError(StoreError, ValueError):
    """A key (or prefix) that Spotkeeper never writes: the caller has a bug, or has not checked its input."""


class ConflictError(StoreError):
    """A conditional write was refused. Check whether this writer's own write is there, then read and decide again."""


class UnavailableError(StoreError):
    """The store answered neither a request nor its retry. A write perhaps happened: the next round checks this."""


class BucketRefusedError(StoreError):
    """The store refused access, or the bucket does not exist: no retry helps."""


class Blob(Struct, frozen=True):
    """An object's bytes, and the ``tag`` that a conditional replacement names (ETag or generation; opaque).

    ``etag``: the tag that a conditional read names; "" if the store gave none.
    """

    data: bytes
    tag: str
    etag: str = ""


class Objects(Protocol):
    """An object store. Each method can raise ``UnavailableError``, ``BucketRefusedError`` or ``BadKeyError``.

    A read or write that fails for a transient reason is retried once. So after a lost answer a conditional write can
    conflict with itself: ``ConflictError`` does not prove that another writer was first.
    """

    def until(self, deadline: Deadline) -> Objects:
        """Return this store for one request: after the deadline, a new call raises ``UnavailableError``."""

    def get(self, key: str) -> Blob | None:
        """Read an object; None if it is missing. Strongly consistent after a write."""

    def part(self, key: str, start: int, size: int) -> bytes | None:
        """Read ``size`` bytes of a large object, fewer at its end; None if it is missing.

        A part that starts at or after the object's end is empty. The object can change between the reads of two parts.
        """

    def refresh(self, key: str, known: Blob) -> Blob | None:
        """Read an object; returns ``known`` itself, without a download, if the object is still that version."""

    def create(self, key: str, data: bytes) -> str:
        """Write a new object and return its tag. Raises ``ConflictError`` if the key exists."""

    def replace(self, key: str, data: bytes, tag: str) -> str:
        """Overwrite the version ``tag``; return the new tag. Raises ``ConflictError`` if the stored version differs."""

    def get_many(self, keys: Sequence[str]) -> builtins.list[Blob | None]:
        """Read many small objects at once, in the order of the keys."""

    def put(self, key: str, data: bytes) -> str:
        """Overwrite without a condition and return the new tag. For progress and logs, never for a decision."""

    def list(self, prefix: str, start: str = "") -> builtins.list[str]:
        """Return all keys under a folder, sorted; ``prefix`` ends with a slash, or is empty for all keys.

        ``start``: return only keys that begin with ``prefix + start``.
        """

    def newest(self, prefix: str, most: int) -> builtins.list[str]:
        """Return the ``most`` keys of a folder that were written last, newest first. This lists the whole folder."""

    def delete(self, key: str) -> None:
        """Delete an object. A missing object is not an error."""

    def delete_many(self, keys: Sequence[str]) -> None:
        """Delete many objects at once. A missing object is not an error."""


def check_key(key: str) -> str:
    if len(key) > MAX_KEY or not _KEY.match(key):
        raise BadKeyError(f"{key[:120]!r} is not a key in Spotkeeper's form (letters, digits, '-', '.', '_' and '/')")
    return key


def check_prefix(prefix: str) -> str:
    """Return the prefix. Raises ``BadKeyError`` unless it is empty or a valid key with a slash at its end.

    Without the slash the stores would differ: ``a/b`` would match ``a/bc`` in SQLite, but not in obstore.
    """
    if prefix and not prefix.endswith("/"):
        raise BadKeyError(f"prefix {prefix[:120]!r} must end with '/'")
    if prefix:
        check_key(prefix[:-1])
    return prefix
