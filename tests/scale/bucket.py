"""A bucket with a bucket's limits, in virtual time: what a write to one object and all puts together may cost.

Google: one write a second to one object, then 429 and the client's own retries; S3: 3,500 puts a second to one
prefix, then 503. Both are modelled as their clients behave, so a refused write comes back later, not never.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from greenlet import getcurrent

from spotkeeper.reconcile.store.objects import Blob, ConflictError, Deadline, UnavailableError
from tests.scale.virtual import Hub

LATENCY_S = 0.030
PARALLEL = 8  # of many small writes at once
PAGE = 1000  # keys of one page of a listing
OBJECT_WRITE_S = 1.0
PUTS_PER_S = 3500.0
RETRY_S = (0.1, 0.2, 0.4, 0.8)  # a client's back-off, without its jitter


class DeadError(BaseException):
    """The process that called is gone: it reaches nothing any more."""


class Bucket:
    """``Objects`` of all instances. Counts what it does: ``puts``, ``throttled``, and writes by key."""

    def __init__(self, hub: Hub) -> None:
        self.hub = hub
        self.blobs: dict[str, Blob] = {}
        self.writes: dict[str, int] = {}
        self.reads = self.lists = self.throttled = 0
        self.dead: set[object] = set()  # tasks of killed instances
        self.written: Callable[[str, bytes], None] = lambda key, data: None
        self._tags = itertools.count(1)
        self._written: dict[str, float] = {}
        self._credit, self._credit_at = PUTS_PER_S, hub.now()

    # -- Objects

    def until(self, deadline: Deadline) -> Bucket:
        return self

    def get(self, key: str) -> Blob | None:
        self._wait()
        self.reads += 1
        return self.blobs.get(key)

    def refresh(self, key: str, known: Blob) -> Blob | None:
        found = self.get(key)
        return known if found is not None and found.tag == known.tag else found

    def get_many(self, keys: Sequence[str]) -> list[Blob | None]:
        self._wait()
        self.reads += len(keys)
        return [self.blobs.get(key) for key in keys]

    def create(self, key: str, data: bytes) -> str:
        self._write(key)
        if key in self.blobs:
            raise ConflictError(key)
        return self._store(key, data)

    def replace(self, key: str, data: bytes, tag: str) -> str:
        self._write(key)
        held = self.blobs.get(key)
        if held is None or held.tag != tag:
            raise ConflictError(key)
        return self._store(key, data)

    def put(self, key: str, data: bytes) -> str:
        self._write(key)
        return self._store(key, data)

    def list(self, prefix: str, start: str = "") -> list[str]:
        found = sorted(key for key in self.blobs if key.startswith(prefix + start))
        for _ in range(1 + len(found) // PAGE):
            self._wait()
            self.lists += 1
        return found

    def delete(self, key: str) -> None:
        self._wait()
        self.blobs.pop(key, None)

    def delete_many(self, keys: Sequence[str]) -> None:
        for start in range(0, len(keys), PARALLEL):
            self._wait()
            for key in keys[start : start + PARALLEL]:
                self.blobs.pop(key, None)

    def forget(self) -> None:
        """What was written so far was long ago."""
        self.writes.clear()
        self._written.clear()
        self._credit = PUTS_PER_S

    # -- limits

    def _wait(self) -> None:
        self.hub.sleep(LATENCY_S)
        if getcurrent() in self.dead:
            raise DeadError

    def _write(self, key: str) -> None:
        for pause in (*RETRY_S, None):
            self._wait()
            if self._allowed(key):
                return
            self.throttled += 1
            if pause is None:
                raise UnavailableError(f"{key}: too many writes")
            self.hub.sleep(pause)

    def _allowed(self, key: str) -> bool:
        now = self.hub.now()
        self._credit = min(PUTS_PER_S, self._credit + (now - self._credit_at) * PUTS_PER_S)
        self._credit_at = now
        if self._credit < 1.0 or now - self._written.get(key, 0.0) < OBJECT_WRITE_S:
            return False
        self._credit -= 1.0
        return True

    def _store(self, key: str, data: bytes) -> str:
        self.blobs[key] = blob = Blob(data, str(next(self._tags)))
        self._written[key] = self.hub.now()
        self.writes[key] = self.writes.get(key, 0) + 1
        self.written(key, data)
        return blob.tag
