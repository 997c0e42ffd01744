"""The local twin of a bucket: one SQLite file, safe between processes, same errors as the clouds'.

A plain folder has no compare-and-swap, which is why this exists. Durable against kill -9 of any
process (WAL, synchronous=NORMAL), not against a power cut of the laptop it runs on.
"""

from __future__ import annotations

import builtins
import os
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from spotkeeper.reconcile.deadline import Deadline
from spotkeeper.reconcile.objects import Blob, ConflictError, RefusedError, UnavailableError, check_key, check_prefix

BUSY_S = 10.0  # a writer holds the lock for milliseconds; more means a stopped process
_SCHEMA = """
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS objects (
    key TEXT PRIMARY KEY,
    data BLOB NOT NULL,
    generation INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS counter (one INTEGER PRIMARY KEY CHECK (one = 1), generation INTEGER NOT NULL);
INSERT OR IGNORE INTO counter VALUES (1, 0);
COMMIT;
"""


class SqliteObjects:
    """``Objects`` over a file. One connection per thread and process: SQLite's survive neither."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._local = threading.local()

    def until(self, deadline: Deadline) -> SqliteObjects:
        """Itself: nobody ends a request of the cloud on one machine, and a lock is waited for ``BUSY_S`` at most."""
        return self

    def get(self, key: str) -> Blob | None:
        check_key(key)
        with self._read() as db:
            row = db.execute("SELECT data, generation FROM objects WHERE key = ?", (key,)).fetchone()
        return Blob(bytes(row[0]), str(row[1])) if row else None

    def part(self, key: str, start: int, size: int) -> bytes | None:
        """Until its last part, the whole is kept: SQLite cannot read some of these bytes without reading all."""
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
            done = db.execute("INSERT OR IGNORE INTO objects VALUES (?, ?, ?)", (key, data, generation))
            if done.rowcount == 0:
                raise ConflictError(f"{key}: exists")
        return str(generation)

    def create_many(self, blobs: Sequence[tuple[str, bytes]]) -> None:
        for key, _ in blobs:
            check_key(key)
        with self._write() as (db, generation):
            db.executemany(
                "INSERT OR IGNORE INTO objects VALUES (?, ?, ?)", [(key, data, generation) for key, data in blobs]
            )

    def replace(self, key: str, data: bytes, tag: str) -> str:
        check_key(key)
        with self._write() as (db, generation):
            done = db.execute(
                "UPDATE objects SET data = ?, generation = ? WHERE key = ? AND generation = ?",
                (data, generation, key, int(tag) if tag.isdigit() else -1),
            )
            if done.rowcount == 0:
                raise ConflictError(f"{key}: changed since it was read")
        return str(generation)

    def put(self, key: str, data: bytes) -> str:
        check_key(key)
        with self._write() as (db, generation):
            db.execute("INSERT OR REPLACE INTO objects VALUES (?, ?, ?)", (key, data, generation))
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

    def close(self) -> None:
        """Close this thread's connection (tests; others close with their thread)."""
        db: sqlite3.Connection | None = getattr(self._local, "db", None)
        if db is not None:
            db.close()
            self._local.db = None

    def _connection(self) -> sqlite3.Connection:
        db: sqlite3.Connection | None = getattr(self._local, "db", None)
        if db is None or self._local.pid != os.getpid():
            db = _open(self._path)
            self._local.db, self._local.pid = db, os.getpid()
        return db

    @contextmanager
    def _read(self) -> Iterator[sqlite3.Connection]:
        with _translated(self._path):
            yield self._connection()

    @contextmanager
    def _write(self) -> Iterator[tuple[sqlite3.Connection, int]]:
        """One transaction that holds the write lock from its start, with a fresh generation."""
        with _translated(self._path):
            db = self._connection()
            db.execute("BEGIN IMMEDIATE")
            try:
                # Generations are unique over the whole file, so a key deleted and made again never meets an old tag.
                query = "UPDATE counter SET generation = generation + 1 RETURNING generation"
                (generation,) = db.execute(query).fetchone()
                yield db, int(generation)
            except BaseException:
                db.execute("ROLLBACK")
                raise
            db.execute("COMMIT")


def _open(path: Path) -> sqlite3.Connection:
    path.parent.mkdir(parents=True, exist_ok=True)
    db = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None)
    give_up = time.monotonic() + BUSY_S
    # The switch to WAL ignores the busy timeout: of several first openers, all but one are told "locked" at once.
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
    return db


@contextmanager
def _translated(path: Path) -> Iterator[None]:
    """SQLite's own errors as ours. ``timeout=`` is the retry: SQLite waits for the lock itself."""
    try:
        yield
    except sqlite3.OperationalError as error:
        if "locked" in str(error) or "busy" in str(error):
            raise UnavailableError(f"{path}: locked for more than {BUSY_S:.0f} s by another process") from error
        raise RefusedError(f"{path}: {error}") from error
    except (sqlite3.DatabaseError, OSError) as error:
        raise RefusedError(f"{path}: {error}") from error
