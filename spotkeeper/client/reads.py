"""Conditional, counted reads of the bucket, for a program that reads the same objects again and again.

A request for an object that was read before names its tag, so the object is sent again only if it has changed. An entry
of a ledger never changes and is read once. :class:`Meter` adds up what the reads cost.
"""

from __future__ import annotations

import builtins
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence

from msgspec import Struct

from spotkeeper.reconcile.store.bucket import open_objects
from spotkeeper.reconcile.store.objects import Blob, Deadline, Objects
from spotkeeper.reconcile.store.store import Store

# USD, Google Cloud Storage (standard, one region) and S3 alike: https://cloud.google.com/storage/pricing,
# https://aws.amazon.com/s3/pricing. A byte that leaves the cloud costs by the larger of both first tiers.
USD_GET, USD_LIST, USD_BYTE = 0.4e-6, 5e-6, 0.12e-9
KEPT_BYTES = 32 << 20
WINDOW_S = 300.0  # real; the cost per hour is computed from this much time


class Spending(Struct, frozen=True):
    """Reads in an hour at the present pace, and their cost in USD."""

    reads: int
    usd: float


class Meter:
    """Counts reads of the last minutes. Thread-safe."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._lock = now, threading.Lock()
        self._began = now()
        self._reads: deque[tuple[float, float]] = deque()

    def count(self, usd: float, size: int = 0) -> None:
        with self._lock:
            now = self._now()
            self._reads.append((now, usd + size * USD_BYTE))
            while self._reads[0][0] < now - WINDOW_S:
                self._reads.popleft()

    def hour(self) -> Spending:
        with self._lock:
            now = self._now()
            while self._reads and self._reads[0][0] < now - WINDOW_S:
                self._reads.popleft()
            factor = 3600.0 / max(60.0, min(WINDOW_S, now - self._began))
            return Spending(round(len(self._reads) * factor), sum(usd for _, usd in self._reads) * factor)


def metered_store(bucket: str, meter: Meter) -> Store:
    """Open a bucket for repeated reads with the user's own login."""
    return Store(MeteredObjects(open_objects(bucket, None, False), meter))


class MeteredObjects:
    """``Objects`` whose reads are conditional and counted. Writes are passed on and not counted."""

    def __init__(self, inner: Objects, meter: Meter) -> None:
        self._inner, self._meter, self._lock = inner, meter, threading.Lock()
        self._known: OrderedDict[str, Blob] = OrderedDict()
        self._size = 0

    def until(self, deadline: Deadline) -> Objects:
        return self

    def get(self, key: str) -> Blob | None:
        with self._lock:
            known = self._known.get(key)
        if known is not None and "/ledger/" in key:
            return known
        blob = self._inner.get(key) if known is None else self._inner.refresh(key, known)
        self._meter.count(USD_GET, 0 if blob is None or blob is known else len(blob.data))
        self._keep(key, blob)
        return blob

    def refresh(self, key: str, known: Blob) -> Blob | None:
        blob = self._inner.refresh(key, known)
        self._meter.count(USD_GET, 0 if blob is None or blob is known else len(blob.data))
        return blob

    def _keep(self, key: str, blob: Blob | None) -> None:
        with self._lock:
            old = self._known.pop(key, None)
            self._size -= len(old.data) if old is not None else 0
            if blob is None:
                return
            self._known[key] = blob
            self._size += len(blob.data)
            while self._size > KEPT_BYTES:
                self._size -= len(self._known.popitem(last=False)[1].data)

    def get_many(self, keys: Sequence[str]) -> builtins.list[Blob | None]:
        with self._lock:
            fresh = [key for key in keys if key not in self._known]
        read = dict(zip(fresh, self._inner.get_many(fresh), strict=True))
        for key, blob in read.items():
            self._meter.count(USD_GET, 0 if blob is None else len(blob.data))
            self._keep(key, blob)
        return [read[key] if key in read else self.get(key) for key in keys]

    def list(self, prefix: str, start: str = "") -> builtins.list[str]:
        found = self._inner.list(prefix, start)
        self._meter.count(USD_LIST * (1 + len(found) // 1000))
        return found

    def newest(self, prefix: str, most: int) -> builtins.list[str]:
        found = self._inner.newest(prefix, most)
        self._meter.count(USD_LIST)
        return found

    def part(self, key: str, start: int, size: int) -> bytes | None:
        data = self._inner.part(key, start, size)
        self._meter.count(USD_GET, len(data or b""))
        return data

    def create(self, key: str, data: bytes) -> str:
        return self._inner.create(key, data)

    def replace(self, key: str, data: bytes, tag: str) -> str:
        return self._inner.replace(key, data, tag)

    def put(self, key: str, data: bytes) -> str:
        return self._inner.put(key, data)

    def delete(self, key: str) -> None:
        self._inner.delete(key)

    def delete_many(self, keys: Sequence[str]) -> None:
        self._inner.delete_many(keys)
