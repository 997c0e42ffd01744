"""What the in-process runner has made: one JSON file, replaced whole after every step.

A create is noted before its call and confirmed after it, so that a run killed in between
leaves a trace that the next one follows.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from spotkeeper.spec import codec


class Entry(Struct, frozen=True, omit_defaults=True):
    """A resource; ``id`` is empty for a component. ``inputs`` and ``outputs`` carry Pulumi's names."""

    urn: str
    type: str
    name: str  # logical
    id: str = ""
    inputs: dict[str, Any] = {}
    outputs: dict[str, Any] = {}
    parent: str = ""
    protect: bool = False
    retain: bool = False
    ignore: tuple[str, ...] = ()  # inputs that stay as they were made, whatever the program says now
    custom: bool = True
    pending: bool = False  # noted, not known to exist


class _File(Struct, frozen=True):
    stack: str
    project: str
    region: str
    entries: tuple[Entry, ...] = ()
    outputs: dict[str, Any] = {}


class State:
    """Entries in the order in which they were made. Safe between the threads of one process."""

    def __init__(self, path: Path, stack: str, project: str, region: str) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._file = _File(stack, project, region)

    @classmethod
    def load(cls, path: Path) -> State | None:
        """What stands in the file, or None where there is none.

        Raises:
            msgspec.DecodeError, msgspec.ValidationError: the file is no state.
        """
        if not path.exists():
            return None
        read = codec.decode(path.read_bytes(), _File)
        state = cls(path, read.stack, read.project, read.region)
        state._file = read
        return state

    @property
    def stack(self) -> str:
        return self._file.stack

    @property
    def project(self) -> str:
        return self._file.project

    @property
    def region(self) -> str:
        return self._file.region

    @property
    def outputs(self) -> dict[str, Any]:
        return self._file.outputs

    def entries(self) -> tuple[Entry, ...]:
        return self._file.entries

    def get(self, urn: str) -> Entry | None:
        return next((entry for entry in self._file.entries if entry.urn == urn and not entry.pending), None)

    def put(self, entry: Entry) -> None:
        """Add it, or put it in its old one's place in the order of creation."""
        with self._lock:
            kept = list(self._file.entries)
            index = next((i for i, old in enumerate(kept) if old.urn == entry.urn), None)
            if index is None:
                kept.append(entry)
            else:
                kept[index] = entry
            self._write(entries=tuple(kept))

    def move_last(self, entry: Entry) -> None:
        """As if it had been made now: what it waits for may be younger than what it replaces."""
        with self._lock:
            others = [old for old in self._file.entries if old.urn != entry.urn]
            self._write(entries=(*others, entry))

    def arrange(self, first: Sequence[str], last: Sequence[str]) -> None:
        """Put the URNs of ``first`` before all others, and those of ``last`` behind them."""
        with self._lock:
            entries = {entry.urn: entry for entry in self._file.entries}
            between = [urn for urn in entries if urn not in first and urn not in last]
            order = [entries[urn] for urn in (*first, *between, *last) if urn in entries]
            if tuple(order) != self._file.entries:
                self._write(entries=tuple(order))

    def drop(self, urn: str) -> None:
        with self._lock:
            self._write(entries=tuple(entry for entry in self._file.entries if entry.urn != urn))

    def export(self, outputs: dict[str, Any]) -> None:
        with self._lock:
            self._write(outputs=outputs)

    def remove(self) -> None:
        """Forget the file: nothing stands any more."""
        self._path.unlink(missing_ok=True)

    def _write(self, **changes: Any) -> None:
        self._file = msgspec.structs.replace(self._file, **changes)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        part = self._path.with_suffix(".part")
        part.write_bytes(msgspec.json.encode(self._file))
        part.replace(self._path)
