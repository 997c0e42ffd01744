"""Documents as last decoded, by path and version, and answers as last given, by record.

Thousands of agents ask about one record: it is decoded once. Whether a version is still the newest is asked
of the bucket every time.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import update_wrapper
from typing import Any, Concatenate, ParamSpec, TypeVar

from msgspec import Struct

from spotkeeper.reconcile.objects import Blob
from spotkeeper.spec.record import Record

P = ParamSpec("P")
T = TypeVar("T")

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


ANSWERS_KEPT = 256  # jobs


def once(ask: Callable[Concatenate[Record, P], T]) -> Callable[Concatenate[Record, P], T]:
    """The last answer of a pure function of a record, for each job. The same version gives the same answer.

    Thousands of agents ask about one version, and its documents name every member.
    """
    kept: dict[str, tuple[Record, tuple[object, ...], T]] = {}

    def asked(record: Record, /, *rest: P.args, **named: P.kwargs) -> T:
        found = kept.get(record.job)
        if found is not None and not named and _same(found[0], record) and found[1] == rest:
            return found[2]
        answer = ask(record, *rest, **named)
        if not named:
            if len(kept) >= ANSWERS_KEPT:
                kept.clear()
            kept[record.job] = record, rest, answer
        return answer

    update_wrapper(asked, ask)
    return asked


def _same(one: Record, two: Record) -> bool:
    """Whether it is one version: every write has a nonce of its own."""
    return one is two or bool(one.nonce and (one.uid, one.ver, one.nonce) == (two.uid, two.ver, two.nonce))
