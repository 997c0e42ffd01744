"""The cloud's memory: documents and timers in one SQLite file. A kill -9 between two lines loses nothing.

One transaction per request and per timer, so a document, its operation and the timer that ends it exist
together or not at all. Effects outside (processes, folders, sockets) are queued with ``after`` and run once
the transaction holds; every one of them can be repeated.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import Struct

from spotkeeper.spec import codec

T = TypeVar("T", bound=Struct)

_SCHEMA = """
CREATE TABLE IF NOT EXISTS docs (kind TEXT, key TEXT, body BLOB NOT NULL, PRIMARY KEY (kind, key)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS timers (id INTEGER PRIMARY KEY AUTOINCREMENT, due REAL NOT NULL, kind TEXT NOT NULL,
                                   arg TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS timers_due ON timers (due, id);
CREATE TABLE IF NOT EXISTS numbers (name TEXT PRIMARY KEY, value INTEGER NOT NULL);
"""


class Timer(Struct, frozen=True):
    """Something that is to happen at a virtual time; ``arg`` is the handler's business (a key, mostly)."""

    id: int
    due: float
    kind: str
    arg: str


class State:
    """Single-threaded, synchronous: reads cost tens of microseconds, and there is no cache to go stale."""

    def __init__(self, path: Path) -> None:
        self._db = sqlite3.connect(path, isolation_level=None)
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = NORMAL")
        self._db.executescript(_SCHEMA)
        self._effects: list[Callable[[], None]] = []
        self._depth = 0

    def close(self) -> None:
        self._db.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All or nothing; nested uses join the outer one. Queued effects run after the outermost commit."""
        if self._depth:
            yield
            return
        self._db.execute("BEGIN IMMEDIATE")
        self._depth = 1
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            self._effects.clear()
            raise
        else:
            self._db.execute("COMMIT")
        finally:
            self._depth = 0
        effects, self._effects = self._effects, []
        for effect in effects:
            effect()

    def after(self, effect: Callable[[], None]) -> None:
        """Run once the transaction holds (at once, outside of one)."""
        if self._depth:
            self._effects.append(effect)
        else:
            effect()

    # Documents

    def put(self, kind: str, key: str, body: Struct) -> None:
        self._db.execute("INSERT OR REPLACE INTO docs VALUES (?, ?, ?)", (kind, key, msgspec.json.encode(body)))

    def get(self, kind: str, key: str, type_: type[T]) -> T | None:
        row = self._db.execute("SELECT body FROM docs WHERE kind = ? AND key = ?", (kind, key)).fetchone()
        return codec.decode(row[0], type_) if row else None

    def delete(self, kind: str, key: str) -> None:
        self._db.execute("DELETE FROM docs WHERE kind = ? AND key = ?", (kind, key))

    def all(self, kind: str, type_: type[T], prefix: str = "") -> list[T]:
        """All documents of a kind whose key starts with ``prefix``, in key order."""
        rows = self._db.execute(
            "SELECT body FROM docs WHERE kind = ? AND key >= ? AND key < ? ORDER BY key",
            (kind, prefix, prefix + "\U0010ffff"),
        )
        return [codec.decode(row[0], type_) for row in rows.fetchall()]

    def count(self, kind: str) -> int:
        (count,) = self._db.execute("SELECT count(*) FROM docs WHERE kind = ?", (kind,)).fetchone()
        return int(count)

    # Timers

    def at(self, due: float, kind: str, arg: str) -> None:
        self._db.execute("INSERT INTO timers (due, kind, arg) VALUES (?, ?, ?)", (due, kind, arg))

    def first_timer(self) -> Timer | None:
        row = self._db.execute("SELECT id, due, kind, arg FROM timers ORDER BY due, id LIMIT 1").fetchone()
        return Timer(*row) if row else None

    def drop_timer(self, timer: Timer) -> None:
        self._db.execute("DELETE FROM timers WHERE id = ?", (timer.id,))

    def drop_timers(self, kind: str, arg: str) -> None:
        self._db.execute("DELETE FROM timers WHERE kind = ? AND arg = ?", (kind, arg))

    def has_timer(self, kind: str, arg: str) -> bool:
        row = self._db.execute("SELECT 1 FROM timers WHERE kind = ? AND arg = ? LIMIT 1", (kind, arg)).fetchone()
        return row is not None

    # Numbers that only rise

    def next_number(self, name: str, start: int = 1) -> int:
        self._db.execute("INSERT OR IGNORE INTO numbers VALUES (?, ?)", (name, start - 1))
        self._db.execute("UPDATE numbers SET value = value + 1 WHERE name = ?", (name,))
        (value,) = self._db.execute("SELECT value FROM numbers WHERE name = ?", (name,)).fetchone()
        return int(value)
