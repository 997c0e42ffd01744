"""The bucket of one stack, document by document: ``store_api.Store`` over an object layer.

Knows how a lost answer is told from a lost race. Decides nothing. How documents are written down is in
``stored.py``, paths are in ``paths.py``; what S3, GCS and SQLite do differently is in ``objects_*.py``.
"""

from __future__ import annotations

import builtins
import hashlib
import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec
from msgspec import Struct

from spotkeeper.reconcile import paths
from spotkeeper.reconcile.deadline import Deadline
from spotkeeper.reconcile.objects import Blob, ConflictError, Objects, open_objects
from spotkeeper.reconcile.recent import Recent
from spotkeeper.reconcile.skew import SKEW_S
from spotkeeper.reconcile.store_api import HOURS_KEPT, CorruptError, Held, StaticHello, StoreError
from spotkeeper.reconcile.stored import (
    QUARANTINE_BYTES,
    cut,
    decode,
    decode_many,
    decode_versioned,
    encode_many,
    encode_versioned,
)
from spotkeeper.spec.facts import Fact
from spotkeeper.spec.generation import Progress
from spotkeeper.spec.job import Ask, JobSpec, spec_json
from spotkeeper.spec.ledger import Entry
from spotkeeper.spec.market import MarketHour, Prices, Sight
from spotkeeper.spec.names import JOB_ID
from spotkeeper.spec.record import Alloc, Record
from spotkeeper.spec.stack import StackState

T = TypeVar("T")
Nonced = TypeVar("Nonced", Record, Alloc)

SINGLY = 32  # entries of the ledger that one write may make objects of their own; more become one
MANY = "many-"  # begins the name of such an object
MARKET_TRIES = 5
QUARANTINE_KEPT = 200

log = logging.getLogger(__name__)


class _Lease(Struct, frozen=True, omit_defaults=True):
    """``until``: who holds it may take so long. ``due``: when time alone makes a round worthwhile."""

    nonce: str = ""
    until: float = 0.0
    due: float | None = None


def open_store(url: str, endpoint: str | None = None, brief: bool = False) -> ObjectStore:
    """The store behind ``SPOTKEEPER_BUCKET``; see :func:`spotkeeper.reconcile.objects.open_objects`."""
    return ObjectStore(open_objects(url, endpoint, brief))


class ObjectStore:
    """Implements ``store_api.Store``; the rules there hold here."""

    def __init__(self, objects: Objects, recent: Recent | None = None) -> None:
        self._objects = objects
        self._recent = recent or Recent()

    def until(self, deadline: Deadline) -> ObjectStore:
        objects = self._objects.until(deadline)
        return self if objects is self._objects else ObjectStore(objects, self._recent)

    # -- the record

    def read_record(self, job: str) -> Held[Record] | None:
        held = self._read_versioned(paths.record(job), Record)
        if held is not None and held.value.job != job:
            path = paths.record(job)
            raise CorruptError(f"{path}: the record of another job ({held.value.job[:40]!r})", path, held.token)
        return held

    def create_record(self, record: Record) -> bool:
        return self._create_versioned(paths.record(record.job), record) is not None

    def cas_record(self, record: Record, token: str) -> str | None:
        return self._replace_versioned(paths.record(record.job), record, token)

    # -- facts

    def list_facts(self, job: str) -> tuple[Fact, ...]:
        folder = paths.facts(job)
        # The whole rest of the path: what a machine may write lies deeper (``_read_all``), and is nobody's word.
        keys = (path.removeprefix(folder) for path in self._objects.list(folder))
        return tuple(fact for key in keys if (fact := Fact.parse(key)) is not None)

    def facts_of(self, job: str, uid: str) -> tuple[Fact, ...]:
        folder = paths.facts(job)
        keys = (path.removeprefix(folder) for path in self._objects.list(folder, f"{uid}."))
        return tuple(fact for key in keys if (fact := Fact.parse(key)) is not None)

    def put_fact(self, job: str, fact: Fact) -> bool:
        return self._create(paths.fact(job, fact), b"") is not None

    def delete_facts(self, job: str, facts: tuple[Fact, ...]) -> None:
        self._objects.delete_many([paths.fact(job, fact) for fact in facts])

    # -- allocation

    def read_alloc(self) -> Held[Alloc]:
        return self._read_versioned(paths.ALLOC, Alloc) or Held(Alloc(), "")

    def cas_alloc(self, alloc: Alloc, token: str) -> str | None:
        if not token:
            return self._create_versioned(paths.ALLOC, alloc)
        return self._replace_versioned(paths.ALLOC, alloc, token)

    # -- asks

    def list_asks(self, job: str) -> tuple[Ask, ...]:
        return tuple(sorted(self._read_all(paths.asks(job), Ask), key=lambda ask: (ask.at, ask.id)))

    def put_ask(self, job: str, ask: Ask) -> bool:
        return self._create(paths.ask(job, ask.id), msgspec.json.encode(ask)) is not None

    def delete_ask(self, job: str, ask_id: str) -> None:
        self._objects.delete(paths.ask(job, ask_id))

    # -- active jobs

    def active_jobs(self) -> tuple[str, ...]:
        found = (path.removeprefix(paths.ACTIVE) for path in self._objects.list(paths.ACTIVE))
        return tuple(job for job in found if JOB_ID.match(job))

    def set_active(self, job: str, since: float | None = None) -> None:
        self._create(paths.active(job), b"" if since is None else msgspec.json.encode(since))

    def active_since(self, job: str) -> float | None:
        blob = self._objects.get(paths.active(job))
        try:
            return decode(blob.data, float, paths.active(job)) if blob is not None and blob.data else None
        except CorruptError:  # as good as none
            return None

    def clear_active(self, job: str) -> None:
        self._objects.delete(paths.active(job))

    # -- lease

    def take_lease(self, job: str, nonce: str, now: float, ttl_s: float) -> bool:
        path = paths.lease(job)
        try:
            held = self._read(path, _Lease)
        except CorruptError as error:  # it only saves money: what makes no sense is held by nobody
            held = Held(_Lease(), error.token)
        if held is None:
            mine = _Lease(nonce, now + ttl_s)
            return self._create(path, msgspec.json.encode(mine), own=True) is not None
        # One until far from now is of a clock that had jumped ahead: whoever it was, others go on.
        if held.value.nonce not in ("", nonce) and now < held.value.until <= now + ttl_s + SKEW_S:
            return False
        mine = _Lease(nonce, now + ttl_s, held.value.due)
        return self._replace(path, msgspec.json.encode(mine), held.token) is not None

    def drop_lease(self, job: str, nonce: str, due: float | None) -> None:
        path = paths.lease(job)
        held = self._read(path, _Lease)
        if held is not None and held.value.nonce == nonce:
            self._replace(path, msgspec.json.encode(_Lease(due=due)), held.token)

    def read_due(self, job: str) -> float | None:
        held = self._read(paths.lease(job), _Lease)
        if held is None:
            return None
        return held.value.until if held.value.nonce else held.value.due

    # -- ledger

    def append_ledger(self, job: str, entry: Entry) -> bool:
        return self._create(paths.entry(job, entry.at, entry.id), msgspec.json.encode(entry)) is not None

    def append_all(self, job: str, entries: Sequence[Entry]) -> None:
        if len(entries) > SINGLY:  # a large gang's start or loss: one object for all that one write of the record says
            said = "\n".join(f"{entry.at}.{entry.id}" for entry in entries)
            name = f"{MANY}{hashlib.sha256(said.encode()).hexdigest()[:16]}"
            self._create(paths.entry(job, entries[0].at, name), encode_many(entries))
            return
        self._objects.create_many(
            [(paths.entry(job, entry.at, entry.id), msgspec.json.encode(entry)) for entry in entries]
        )

    def list_ledger(self, job: str) -> tuple[Entry, ...]:
        found = {(entry.at, entry.id): entry for entry in self._read_all(paths.ledger(job), Entry)}
        return tuple(entry for _, entry in sorted(found.items()))

    # -- documents written by others

    def read_stack(self) -> StackState | None:
        return self._value(paths.STACK, StackState)

    def draining(self) -> bool:
        return self._objects.get(paths.DRAIN) is not None

    def read_spec(self, job: str, sha256: str = "") -> JobSpec | None:
        return self._value(paths.spec(job, sha256), JobSpec)

    def put_spec(self, job: str, spec: JobSpec, sha256: str = "") -> None:
        self._objects.put(paths.spec(job, sha256), spec_json(spec))

    def read_progress(self, job: str) -> Progress | None:
        return self._value(paths.progress(job), Progress)

    def put_progress(self, job: str, progress: Progress) -> None:
        self._objects.put(paths.progress(job), msgspec.json.encode(progress))

    # -- static nodes and market

    def list_static_hellos(self) -> tuple[StaticHello, ...]:
        return tuple(self._read_all(paths.STATIC, StaticHello, deep=True))

    def put_static_hello(self, hello: StaticHello) -> bool:
        mine = paths.static_hello(hello.node, hello.boot)
        new = self._create(mine, msgspec.json.encode(hello)) is not None
        for path in self._objects.list(paths.static_node(hello.node)) if new else ():
            if path != mine:
                self._objects.delete(path)
        return new

    def read_prices(self, pools: tuple[str, ...]) -> dict[str, Held[Prices]]:
        blobs = zip(pools, self._objects.get_many([paths.prices(pool) for pool in pools]), strict=True)
        return {pool: self._advisory(paths.prices(pool), blob, Prices(pool, 0.0)) for pool, blob in blobs if blob}

    def cas_prices(self, prices: Prices, token: str) -> str | None:
        path, data = paths.prices(prices.pool), msgspec.json.encode(prices)
        return self._replace(path, data, token, own=False) if token else self._create(path, data)

    def read_sights(self, pools: tuple[str, ...], hours: tuple[int, ...]) -> dict[str, tuple[Sight, ...]]:
        wanted = [(pool, hour) for pool in pools for hour in sorted(hours)]
        blobs = self._objects.get_many([paths.market_hour(pool, hour) for pool, hour in wanted])
        out: dict[str, tuple[Sight, ...]] = dict.fromkeys(pools, ())
        for (pool, hour), blob in zip(wanted, blobs, strict=True):
            if blob is not None:
                out[pool] += self._advisory(paths.market_hour(pool, hour), blob, MarketHour()).value.sights
        return out

    def add_sights(self, pool: str, hour: int, sights: tuple[Sight, ...]) -> bool:
        path = paths.market_hour(pool, hour)
        for _ in range(MARKET_TRIES):
            blob = self._objects.get(path)
            there = self._advisory(path, blob, MarketHour()).value.sights if blob else ()
            new = tuple(sight for sight in dict.fromkeys(sights) if sight not in there)
            if not new:
                return True
            merged = MarketHour(tuple(sorted((*there, *new), key=lambda sight: (sight.at, sight.machine))))
            data = msgspec.json.encode(merged)
            done = self._replace(path, data, blob.tag) if blob else self._create(path, data)
            if done is not None:
                if blob is None:
                    self._forget_hours(pool, hour - HOURS_KEPT)
                return True
        log.warning("%s: others wrote all the time; %d sights are left out", path, len(sights))
        return False

    def _forget_hours(self, pool: str, before: int) -> None:
        for path in self._objects.list(paths.market_hours(pool)):
            if path < paths.market_hour(pool, before):
                self._objects.delete(path)

    def _advisory(self, path: str, blob: Blob, blank: T) -> Held[T]:
        """A document nobody depends on: one that makes no sense is set aside and counts as blank."""
        try:
            return Held(decode(blob.data, type(blank), path), blob.tag)
        except CorruptError as error:
            log.warning("skipped %s", error)
            self._set_aside(path, blob)
            return Held(blank, blob.tag)

    # -- tombs, names, quarantine

    def put_tomb(self, job: str, at: float) -> None:
        self._objects.put(paths.tomb(job), msgspec.json.encode(at))

    def read_tomb(self, job: str) -> float | None:
        return self._value(paths.tomb(job), float)

    def read_name(self, name: str) -> str | None:
        path = paths.name(name)
        blob = self._objects.get(path)
        if blob is None:
            return None
        job = blob.data.decode("ascii", "replace")
        if not JOB_ID.match(job):
            raise CorruptError(f"{path}: {job[:40]!r} is not a job id")
        return job

    def put_name(self, name: str, job: str) -> bool:
        # Job ids are random, so a name that holds this very id was written by us.
        return self._create(paths.name(name), job.encode(), own=True) is not None

    def delete_name(self, name: str, job: str) -> None:
        if self.read_name(name) == job:
            self._objects.delete(paths.name(name))

    def quarantine(self, text: str) -> None:
        data = text.encode("utf-8", "backslashreplace")[:QUARANTINE_BYTES]
        if len(self._objects.list(paths.QUARANTINE)) < QUARANTINE_KEPT:
            self._create(paths.quarantine(hashlib.sha256(data).hexdigest()), data)

    # -- by path

    def get(self, path: str) -> bytes | None:
        blob = self._objects.get(path)
        return blob.data if blob else None

    def get_all(self, paths: tuple[str, ...]) -> tuple[bytes | None, ...]:
        return tuple(blob.data if blob else None for blob in self._objects.get_many(list(paths)))

    def part(self, path: str, start: int, size: int) -> bytes | None:
        return self._objects.part(path, start, size)

    def put(self, path: str, data: bytes) -> None:
        self._objects.put(path, data)

    def delete(self, path: str) -> None:
        self._objects.delete(path)

    def list(self, prefix: str) -> tuple[str, ...]:
        folder = prefix[: prefix.rfind("/") + 1]
        return tuple(path for path in self._objects.list(folder) if path.startswith(prefix))

    def newest(self, folder: str, most: int) -> tuple[str, ...]:
        return tuple(self._objects.newest(folder, most))

    # -- how documents are read and written

    def _read(self, path: str, kind: type[T]) -> Held[T] | None:
        blob = self._objects.get(path)
        return _held(blob, decode, kind, path) if blob else None

    def _value(self, path: str, kind: type[T]) -> T | None:
        held = self._read(path, kind)
        return held.value if held else None

    def _read_versioned(self, path: str, kind: type[T]) -> Held[T] | None:
        known = self._recent.blob(path)
        blob = self._objects.refresh(path, known) if known is not None else self._objects.get(path)
        if blob is None:
            return None
        value = self._recent.value(path, blob)
        if isinstance(value, kind):
            return Held(value, blob.tag)
        if blob is known:  # it is forgotten by now, and its bytes were not sent
            blob = self._objects.get(path)
            if blob is None:
                return None
        held = _held(blob, decode_versioned, kind, path)
        self._recent.keep(path, blob, held.value)
        return held

    def _read_all(self, prefix: str, kind: type[T], deep: bool = False) -> builtins.list[T]:
        """Every document of a folder. One that makes no sense must not stop a job: it goes into quarantine.

        ``deep``: also of folders within it. Elsewhere there are none of ours, and machines could write there: their
        right to ``jobs/<job>/logs/`` is to every name with ``/logs/`` in it, since no cloud's condition knows a slash.
        """
        out: builtins.list[T] = []
        keys = [path for path in self._objects.list(prefix) if deep or "/" not in path.removeprefix(prefix)]
        for path, blob in zip(keys, self._objects.get_many(keys), strict=True):
            if blob is None:  # deleted since the listing
                continue
            try:
                if f".{MANY}" in path:
                    out += decode_many(blob.data, kind, path)
                else:
                    out.append(decode(blob.data, kind, path))
            except CorruptError as error:
                log.warning("skipped %s", error)
                self._set_aside(path, blob)
        return out

    def _set_aside(self, path: str, blob: Blob) -> None:
        self.quarantine(f"{path}\n{cut(blob.data)}")

    def _create(self, path: str, data: bytes, own: bool = False) -> str | None:
        """The new token, or None where the object exists. ``own``: these bytes can be nobody else's."""
        try:
            return self._objects.create(path, data)
        except ConflictError:
            return self._ours(path, data) if own else None

    def _replace(self, path: str, data: bytes, token: str, own: bool = True) -> str | None:
        try:
            return self._objects.replace(path, data, token)
        except ConflictError:
            return self._ours(path, data) if own else None

    def _ours(self, path: str, data: bytes) -> str | None:
        """The token of our own write whose answer was lost. The bytes carry a nonce, so equal means ours."""
        blob = self._objects.get(path)
        return blob.tag if blob is not None and blob.data == data else None

    def _create_versioned(self, path: str, document: Nonced) -> str | None:
        return self._create(path, encode_versioned(_checked(document, path)), own=True)

    def _replace_versioned(self, path: str, document: Nonced, token: str) -> str | None:
        return self._replace(path, encode_versioned(_checked(document, path)), token)


def _held(blob: Blob, decoded: Callable[[bytes, type[T], str], T], kind: type[T], path: str) -> Held[T]:
    """The document with its token, which an error carries too."""
    try:
        return Held(decoded(blob.data, kind, path), blob.tag)
    except CorruptError as error:
        error.token = blob.tag
        raise


def _checked(document: Nonced, path: str) -> Nonced:
    if not document.nonce:
        raise StoreError(f"{path}: a document that is compared and swapped needs a fresh nonce")
    return document
