"""Documents as last decoded, by path and version: thousands of agents ask about one record, and it is decoded once.

A cache of decoding only. Whether a version is still the newest is asked of the bucket every time.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any

from msgspec import Struct

from spotkeeper.reconcile.objects import Blob

KEPT_BYTES = 8 << 20  # as encoded; decoded they take about ten times as much


class _Entry(Struct, frozen=True):
    blob: Blob  # without its bytes
    size: int
    value: Any


class Recent:
    """Thread-safe. The values are frozen, so they may be shared."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._size = 0

    def blob(self, path: str) -> Blob | None:
        """What the bucket is asked about: the version that is known here."""
        with self._lock:
            entry = self._entries.get(path)
        return entry.blob if entry is not None else None

    def value(self, path: str, blob: Blob) -> object | None:
        """The document of exactly this version, or None."""
        with self._lock:
            entry = self._entries.get(path)
            if entry is None or entry.blob.tag != blob.tag:
                return None
            self._entries.move_to_end(path)
            value: object = entry.value
            return value

    def keep(self, path: str, blob: Blob, value: object) -> None:
        size = len(blob.data)
        if size > KEPT_BYTES:
            return
        with self._lock:
            old = self._entries.pop(path, None)
            self._size += size - (old.size if old is not None else 0)
            self._entries[path] = _Entry(Blob(b"", blob.tag, blob.etag), size, value)
            while self._size > KEPT_BYTES:
                self._size -= self._entries.popitem(last=False)[1].size
