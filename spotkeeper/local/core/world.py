"""The state that all parts of the control plane share: settings, clock, database, market, and the timer loop.

Documents and timers are in one SQLite file; a kill -9 at any time loses nothing. Each request and each timer runs in
one transaction, so a document, its operation and the operation's timer exist together or not at all. Effects outside
the database (processes, folders, sockets) are queued with ``after`` and run after the commit; each can be repeated.
VMs and disks register the handlers of their timers here.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import Struct

from spotkeeper.clock import Clock
from spotkeeper.contract import codec
from spotkeeper.local.core import catalog
from spotkeeper.local.core.catalog import Timing
from spotkeeper.local.core.market import Market

T = TypeVar("T", bound=Struct)

_SCHEMA = """
CREATE TABLE IF NOT EXISTS docs (kind TEXT, key TEXT, body BLOB NOT NULL, PRIMARY KEY (kind, key)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS timers (id INTEGER PRIMARY KEY AUTOINCREMENT, due REAL NOT NULL, kind TEXT NOT NULL,
                                   arg TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS timers_due ON timers (due, id);
CREATE TABLE IF NOT EXISTS numbers (name TEXT PRIMARY KEY, value INTEGER NOT NULL);
"""


class Timer(Struct, frozen=True):
    """An action at a set time. ``due``: virtual unix seconds; ``arg``: the handler's argument, mostly a key."""

    id: int
    due: float
    kind: str
    arg: str


class Database:
    """The control plane's documents, timers and counters in SQLite.

    It is single-threaded and synchronous. It needs no cache, since a read takes only tens of microseconds.
    """

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
        """Begin a transaction or join the outer one. Queued effects run after the outermost commit."""
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
        """Run ``effect`` after the commit, or at once if no transaction is open."""
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

    # Counters

    def next_number(self, name: str, start: int = 1) -> int:
        self._db.execute("INSERT OR IGNORE INTO numbers VALUES (?, ?)", (name, start - 1))
        self._db.execute("UPDATE numbers SET value = value + 1 WHERE name = ?", (name,))
        (value,) = self._db.execute("SELECT value FROM numbers WHERE name = ?", (name,)).fetchone()
        return int(value)


log = logging.getLogger("spotkeeper.local")

MAX_SLEEP_S = 30.0  # longest sleep, so that overdue timers run soon after a laptop wakes up
RETRY_S = 5.0


class Config(Struct, frozen=True):
    """The settings of a cloud, ``cloud.json`` in its folder; ``up`` writes them once."""

    uid: str  # the mark of every process of this cloud
    port: int  # the control plane's at 127.0.0.1, and the metadata servers' at the VMs' addresses
    clock: str  # the value of SPOTKEEPER_CLOCK
    market: str = "gcp-2025-10-h100"
    zones: tuple[str, ...] = catalog.ZONES
    seed: int = 0
    per_zone: int = 4
    calm_s: float = 0.0  # virtual; for this long from the start, each zone has capacity for half of `per_zone`
    project: str = catalog.PROJECT
    timing: Timing = Timing()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def compute_endpoint(self) -> str:
        return f"{self.endpoint}/compute/v1"

    @property
    def virtual_clock(self) -> Clock:
        return Clock(*(float(part) for part in self.clock.split(":")))

    def regions(self) -> tuple[str, ...]:
        return tuple(sorted({catalog.region_of(zone) for zone in self.zones}))


Handler = Callable[[str], None]


@dataclass
class World:
    """The shared state of one control plane. ``folder`` contains all files of the cloud."""

    folder: Path
    config: Config
    clock: Clock
    state: Database
    market: Market
    handlers: dict[str, Handler] = field(default_factory=dict)
    rearm: Callable[[], None] = lambda: None

    @property
    def timing(self) -> Timing:
        return self.config.timing

    def now(self) -> float:
        return self.clock.now()

    def at(self, due: float, kind: str, arg: str) -> None:
        """Set a timer in the current transaction. When it fires, ``handlers`` must have a handler of this kind."""
        self.state.at(due, kind, arg)
        self.state.after(self.rearm)

    def soon(self, delay_s: float, kind: str, arg: str) -> None:
        self.at(self.now() + delay_s, kind, arg)

    def new_id(self) -> int:
        """Return a random 64-bit id, like Google's."""
        return (1 << 60) | secrets.randbits(60)

    def self_link(self, path: str) -> str:
        return f"{self.config.compute_endpoint}/{path}"


class TimerLoop:
    """Runs due timers, one transaction each, and sleeps until the next, without polling."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._wake = asyncio.Event()
        world.rearm = self._wake.set

    async def run(self) -> None:
        while True:
            self._wake.clear()
            delay = self._run_due()
            try:
                await asyncio.wait_for(self._wake.wait(), delay)
            except TimeoutError:
                continue

    def _run_due(self) -> float:
        """Run due timers, and return the real seconds until the next."""
        world = self._world
        while True:
            timer = world.state.first_timer()
            if timer is None:
                return MAX_SLEEP_S
            wait_s = world.clock.real_s(timer.due - world.now())
            if wait_s > 0:
                return min(wait_s, MAX_SLEEP_S)
            self._fire(timer)

    def _fire(self, timer: Timer) -> None:
        world = self._world
        try:
            with world.state.transaction():
                world.state.drop_timer(timer)
                world.handlers[timer.kind](timer.arg)
        except OSError:
            # A full disk or a missing folder may be temporary: the timer is rolled back and tried again later.
            log.exception("timer %s %s failed, trying again in %.0f virtual seconds", timer.kind, timer.arg, RETRY_S)
            with world.state.transaction():
                world.state.drop_timer(timer)
                world.state.at(world.now() + RETRY_S, timer.kind, timer.arg)
        except Exception:
            log.exception("timer %s %s failed and is dropped: a bug of the one-machine cloud", timer.kind, timer.arg)
            with world.state.transaction():
                world.state.drop_timer(timer)
