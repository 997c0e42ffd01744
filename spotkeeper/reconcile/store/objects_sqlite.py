"""The one-machine cloud's bucket: a SQLite file that many processes may use; it raises the same errors as the clouds'.

A plain folder would have no compare-and-swap. What is written survives kill -9 of any process (WAL,
synchronous=NORMAL), but not always a power cut.
"""

from __future__ import annotations

import builtins
import os
import sqlite3
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from spotkeeper.reconcile.store.objects import (
    Blob,
    BucketRefusedError,
    ConflictError,
    Deadline,
    UnavailableError,
    check_key,
    check_prefix,
)

BUSY_S = 10.0  # a writer needs the lock for milliseconds; more means a stopped process
CONNECTIONS = 4  # most open connections of a process; idle ones are kept; each needs two descriptors
# A search in a table WITHOUT ROWID reads the whole rows that it compares: a large object slows its neighbours down.
# `data` comes last, since SQLite reads through a value to get to the next one.
_SCHEMA = """
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS objects (
    key TEXT PRIMARY KEY NOT NULL,
    generation INTEGER NOT NULL,
    data BLOB NOT NULL
);
CREATE TABLE IF NOT EXISTS counter (one INTEGER PRIMARY KEY CHECK (one = 1), generation INTEGER NOT NULL);
INSERT OR IGNORE INTO counter VALUES (1, 0);
COMMIT;
"""
_INSERT = "INSERT OR {} INTO objects (key, data, generation) VALUES (?, ?, ?)"


class SqliteObjects:
    """``Objects`` over a SQLite file. Thread-safe; its connections close when it is garbage-collected."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._pool = _Pool(self._path)
        self._local = threading.local()  # ``large`` of the thread that reads a file in parts
        weakref.finalize(self, self._pool.close)

    def until(self, deadline: Deadline) -> SqliteObjects:
        """Return this store itself: its calls have no deadline. Only a wait for a lock has a timeout (``BUSY_S``)."""
        return self

    def get(self, key: str) -> Blob | None:
        check_key(key)
        with self._read() as db:
            row = db.execute("SELECT data, generation FROM objects WHERE key = ?", (key,)).fetchone()
        return Blob(bytes(row[0]), str(row[1])) if row else None

    def part(self, key: str, start: int, size: int) -> bytes | None:
        """Read a part of an object.

        SQLite reads whole values, so this thread caches the object in memory until it has read the last part.
        """
        known: tuple[str, Blob] | None = getattr(self._local, "large", None)
        blob = self.refresh(key, known[1]) if known is not None and known[0] == key else self.get(key)
        self._local.large = (key, blob) if blob is not None and start + size < len(blob.data) else None
        return blob.data[start : start + size] if blob is not None else None

    def refresh(self, key: str, known: Blob) -> Blob | None:
        check_key(key)
        with self._read() as db:
            row = db.execute("SELECT generation FROM objects WHERE key = ?", (key,)).fetchone()
        return known if row is not None and str(row[0]) == known.tag else self.get(key)

    def get_many(self, keys: Sequence[str]) -> builtins.list[Blob | None]:
        return [self.get(key) for key in keys]

    def create(self, key: str, data: bytes) -> str:
        check_key(key)
        with self._write() as (db, generation):
            done = db.execute(_INSERT.format("IGNORE"), (key, data, generation))
            if done.rowcount == 0:
                raise ConflictError(f"{key}: exists")
        return str(generation)

    def replace(self, key: str, data: bytes, tag: str) -> str:
        check_key(key)
        with self._write() as (db, generation):
            done = db.execute(
                "UPDATE objects SET data = ?, generation = ? WHERE key = ? AND generation = ?",
                (data, generation, key, int(tag) if tag.isdecimal() else -1),
            )
            if done.rowcount == 0:
                raise ConflictError(f"{key}: changed since it was read")
        return str(generation)

    def put(self, key: str, data: bytes) -> str:
        check_key(key)
        with self._write() as (db, generation):
            db.execute(_INSERT.format("REPLACE"), (key, data, generation))
        return str(generation)

    def list(self, prefix: str, start: str = "") -> builtins.list[str]:
        check_prefix(prefix)
        # '0' is the character after '/', so this range is exactly the folder.
        bounds = (prefix, prefix[:-1] + "0") if prefix else ("", "\U0010ffff")
        if start:
            bounds = (prefix + start, prefix + start + "\x7f")  # keys are ASCII letters, digits and "-._/"
        with self._read() as db:
            rows = db.execute("SELECT key FROM objects WHERE key >= ? AND key < ? ORDER BY key", bounds).fetchall()
        return [str(row[0]) for row in rows]

    def newest(self, prefix: str, most: int) -> builtins.list[str]:
        check_prefix(prefix)
        query = "SELECT key FROM objects WHERE key >= ? AND key < ? ORDER BY generation DESC, key LIMIT ?"
        with self._read() as db:
            rows = db.execute(query, (prefix, prefix[:-1] + "0", most)).fetchall()
        return [str(row[0]) for row in rows]

    def delete(self, key: str) -> None:
        check_key(key)
        with self._write() as (db, _):
            db.execute("DELETE FROM objects WHERE key = ?", (key,))

    def delete_many(self, keys: Sequence[str]) -> None:
        with self._write() as (db, _):
            db.executemany("DELETE FROM objects WHERE key = ?", [(check_key(key),) for key in keys])

    @contextmanager
    def _read(self) -> Iterator[sqlite3.Connection]:
        with _translated(self._path), self._pool.connection() as db:
            yield db

    @contextmanager
    def _write(self) -> Iterator[tuple[sqlite3.Connection, int]]:
        """Begin a transaction with the write lock; yield its connection and the generation number of the next write."""
        with _translated(self._path), self._pool.connection() as db:
            db.execute("BEGIN IMMEDIATE")
            try:
                # No number is used twice in the file, so a key that is deleted and created again gets no old tag.
                query = "UPDATE counter SET generation = generation + 1 RETURNING generation"
                (generation,) = db.execute(query).fetchone()
                yield db, int(generation)
            except BaseException:
                db.execute("ROLLBACK")
                raise
            db.execute("COMMIT")


class _Pool:
    """A few connections for all threads of a process; one thread at a time uses each.

    A connection per thread would leak: a connection refers to itself through its cache of statements, so after its
    thread has ended only the garbage collector closes it, and rounds start new threads all the time.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._free = threading.BoundedSemaphore(CONNECTIONS)
        self._idle: list[sqlite3.Connection] = []

    @contextmanager
    def connection(self) -> Iterator[sqlite3.Connection]:
        """Lend a connection for one call. A connection that failed is closed, since its state is unknown."""
        if self._pid != os.getpid():
            self._begin()  # SQLite's connections do not survive a fork
        with self._free:
            db = self._opened()
            try:
                yield db
            except ConflictError:
                self._idle.append(db)
                raise
            except BaseException:
                db.close()
                raise
            self._idle.append(db)

    def _opened(self) -> sqlite3.Connection:
        try:
            return self._idle.pop()
        except IndexError:
            return _open(self._path)

    def close(self) -> None:
        """Close the idle connections."""
        while self._pid == os.getpid() and self._idle:
            self._idle.pop().close()


def _open(path: Path) -> sqlite3.Connection:
    path.parent.mkdir(parents=True, exist_ok=True)
    # The pool passes a connection from thread to thread, never to two at once.
    db = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
    try:
        _prepare(db)
    except BaseException:
        db.close()
        raise
    return db


def _prepare(db: sqlite3.Connection) -> None:
    give_up = time.monotonic() + BUSY_S
    # The switch to WAL ignores the busy timeout: of several processes that open a new file, all but one get "locked" at
    # once.
    while db.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
        try:
            db.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError:
            if time.monotonic() > give_up:
                raise
            time.sleep(0.005)
    db.execute("PRAGMA synchronous = NORMAL")
    if db.execute("SELECT count(*) FROM sqlite_master WHERE name = 'counter'").fetchone()[0] == 0:
        db.executescript(_SCHEMA)


@contextmanager
def _translated(path: Path) -> Iterator[None]:
    """Translate SQLite's errors to those of ``objects``. SQLite itself waits for a lock, until its timeout."""
    try:
        yield
    except sqlite3.OperationalError as error:
        if "locked" in str(error) or "busy" in str(error):
            raise UnavailableError(f"{path}: locked for more than {BUSY_S:.0f} s by another process") from error
        raise BucketRefusedError(f"{path}: {error}") from error
    except (sqlite3.DatabaseError, OSError) as error:
        raise BucketRefusedError(f"{path}: {error}") from error
