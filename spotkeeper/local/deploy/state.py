"""The in-process runner's state: one JSON file, replaced as a whole after every step.

A create is recorded before its call and confirmed after it, so that the next run can clean up after a run that was
killed in between.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from spotkeeper.contract import codec


class StateEntry(Struct, frozen=True, omit_defaults=True):
    """A recorded resource. ``id`` is empty for a component; ``inputs`` and ``outputs`` have Pulumi's names."""

    urn: str
    type: str
    name: str  # the logical name, from the program
    id: str = ""
    inputs: dict[str, Any] = {}
    outputs: dict[str, Any] = {}
    parent: str = ""
    protect: bool = False
    retain: bool = False
    ignore: tuple[str, ...] = ()  # names of inputs whose changes are ignored
    custom: bool = True
    pending: bool = False  # recorded, but not known to exist


class _File(Struct, frozen=True):
    stack: str
    project: str
    region: str
    entries: tuple[StateEntry, ...] = ()
    outputs: dict[str, Any] = {}


class DeployState:
    """The recorded resources, in the order of their creation. Thread-safe."""

    def __init__(self, path: Path, stack: str, project: str, region: str) -> None:
        self._path = path
        self._lock = threading.Lock()
        self.stack, self.project, self.region = stack, project, region
        self._file = _File(stack, project, region)

    @classmethod
    def load(cls, path: Path) -> DeployState | None:
        """Read the file; None if it is missing; msgspec's DecodeError or ValidationError if it is damaged."""
        if not path.exists():
            return None
        read = codec.decode(path.read_bytes(), _File)
        state = cls(path, read.stack, read.project, read.region)
        state._file = read
        return state

    def entries(self) -> tuple[StateEntry, ...]:
        return self._file.entries

    def get(self, urn: str) -> StateEntry | None:
        return next((entry for entry in self._file.entries if entry.urn == urn and not entry.pending), None)

    def put(self, entry: StateEntry) -> None:
        """Append the entry, or replace its old version in place."""
        with self._lock:
            entries = {old.urn: old for old in self._file.entries} | {entry.urn: entry}
            self._write(entries=tuple(entries.values()))

    def move_last(self, entry: StateEntry) -> None:
        """Move the entry to the end, because it may depend on entries that were created after its old version."""
        with self._lock:
            others = [old for old in self._file.entries if old.urn != entry.urn]
            self._write(entries=(*others, entry))

    def arrange(self, first: Sequence[str], last: Sequence[str]) -> None:
        """Put the entries with the URNs in ``first`` before all others, and the entries in ``last`` after them."""
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
        """Delete the file, after a destroy."""
        self._path.unlink(missing_ok=True)

    def _write(self, **changes: Any) -> None:
        self._file = msgspec.structs.replace(self._file, **changes)
        part = self._path.with_suffix(".part")
        part.write_bytes(msgspec.json.encode(self._file))
        part.replace(self._path)
