"""Reads and writes the documents in the bucket of one stack; makes no decisions.

It recognises a write that succeeded although its answer was lost. ``documents.py`` encodes documents, ``paths.py``
names them, and ``objects_*.py`` have the differences between S3, GCS and SQLite.
"""

from __future__ import annotations

import builtins
import hashlib
import logging
import random
from collections.abc import Callable, Sequence
from typing import TypeVar
from urllib.parse import urlsplit
from uuid import uuid4

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from spotkeeper.contract.allocation import Allocation
from spotkeeper.contract.facts import Fact
from spotkeeper.contract.generation import Progress
from spotkeeper.contract.job import JobRequest, JobSpec, spec_json
from spotkeeper.contract.ledger import Entry
from spotkeeper.contract.market import MarketHour, Network, Observation, Prices
from spotkeeper.contract.names import JOB_ID
from spotkeeper.contract.notification import Outgoing
from spotkeeper.contract.record import Record
from spotkeeper.contract.stack import StackState
from spotkeeper.contract.sweep import SweepState
from spotkeeper.contract.sweepfile import Cohort, SweepSpec, SweepStop
from spotkeeper.reconcile.store import paths
from spotkeeper.reconcile.store.clock_skew import SKEW_S
from spotkeeper.reconcile.store.documents import (
    QUARANTINE_BYTES,
    CorruptError,
    Recent,
    StaticHello,
    Versioned,
    cut,
    decode,
    decode_many,
    decode_versioned,
    encode_many,
    encode_versioned,
)
from spotkeeper.reconcile.store.objects import Blob, BucketRefusedError, ConflictError, Deadline, Objects, StoreError

T = TypeVar("T")
Nonced = TypeVar("Nonced", Record, Allocation, SweepState)

MANY = "many-"  # begins the name of an object with several entries of the ledger
MARKET_TRIES = 5
HOURS_KEPT = 90 * 24  # of the market's history
QUARANTINE_KEPT = 200
NOTIFICATIONS_READ = 500

log = logging.getLogger(__name__)


class _Lease(Struct, frozen=True, omit_defaults=True):
    """The lease document. ``until``: when it expires. ``due``: when the next round is due even without new reports."""

    nonce: str = ""
    until: float = 0.0
    due: float | None = None


def open_objects(url: str, endpoint: str | None, brief: bool) -> Objects:
    """Open the object store at ``gs://name``, ``s3://name[/prefix]`` or ``sqlite:///path`` (``SPOTKEEPER_BUCKET``).

    Args:
        endpoint: root of the store's HTTP API, if it is not the cloud's own.
        brief: True for the function, whose requests have a deadline: each call ends within ``objects.CALL_S`` seconds.
            False: a call has time for an upload.

    Raises:
        ValueError: the address has another form.
    """
    parts = urlsplit(url)
    if parts.scheme == "sqlite" and parts.path.startswith("/") and not parts.netloc:
        from spotkeeper.reconcile.store.objects_sqlite import SqliteObjects

        return SqliteObjects(parts.path)
    if parts.scheme in ("s3", "gs") and parts.netloc:
        from spotkeeper.reconcile.store.objects_obstore import open_bucket

        return open_bucket(url, endpoint, brief)
    raise ValueError(f"SPOTKEEPER_BUCKET={url!r}: want gs://<bucket>, s3://<bucket> or sqlite:///<absolute path>")


def open_store(url: str, endpoint: str | None = None, brief: bool = False) -> Store:
    """Open the typed store at the address in ``SPOTKEEPER_BUCKET``; see :func:`open_objects`."""
    return Store(open_objects(url, endpoint, brief))


class Store:
    """The bucket of one stack.

    * A *token* is what the backend compares (ETag, generation, row version); callers do not interpret it.
    * Each ``cas_*`` write stores a fresh ``nonce``. After "precondition failed" the object is read again: if it has
      this nonce, the write succeeded and only its answer was lost.
    * A *create-only* write leaves an existing object untouched and returns ``False``.
    * Any other failure raises :class:`StoreError`; no method retries for longer than a few seconds.
    """

    def __init__(self, objects: Objects, recent: Recent | None = None) -> None:
        self._objects = objects
        self._recent = recent or Recent()

    def until(self, deadline: Deadline) -> Store:
        """Return this store for one request: after the deadline, a new call raises :class:`StoreError`.

        A call that began before the deadline ends at most ``objects.CALL_S`` seconds after the deadline.
        """
        objects = self._objects.until(deadline)
        return self if objects is self._objects else Store(objects, self._recent)

    # -- the record of a job: jobs/<job>/rec

    def read_record(self, job: str) -> Versioned[Record] | None:
        read = self._read_versioned(paths.record(job), Record)
        if read is not None and read.value.job != job:
            path = paths.record(job)
            raise CorruptError(f"{path}: has the record of another job ({read.value.job[:40]!r})", path, read.token)
        return read

    def create_record(self, record: Record) -> bool:
        """Create a record, create-only. True also if it exists with this nonce, because then this writer created it."""
        return self._create_versioned(paths.record(record.job), record) is not None

    def cas_record(self, record: Record, token: str) -> str | None:
        """Replace the record that was read with ``token``. Returns the new token; None if another writer was first."""
        return self._replace_versioned(paths.record(record.job), record, token)

    # -- facts: jobs/<job>/facts/<key>, the key is the content

    def list_facts(self, job: str) -> tuple[Fact, ...]:
        """Return all facts of a job in the order of their keys. Invalid keys are skipped."""
        folder = paths.facts(job)
        # The whole rest of the path: what machines themselves write is in subfolders (``_read_all``) and is not a fact.
        keys = (path.removeprefix(folder) for path in self._objects.list(folder))
        return tuple(fact for key in keys if (fact := Fact.parse(key)) is not None)

    def facts_of(self, job: str, uid: str) -> tuple[Fact, ...]:
        """Return the facts of one machine. This lists one page, however large the gang."""
        folder = paths.facts(job)
        keys = (path.removeprefix(folder) for path in self._objects.list(folder, f"{uid}."))
        return tuple(fact for key in keys if (fact := Fact.parse(key)) is not None)

    def put_fact(self, job: str, fact: Fact) -> bool:
        """Store a fact, create-only. True if it is new."""
        return self._create(paths.fact(job, fact), b"") is not None

    def delete_facts(self, job: str, facts: tuple[Fact, ...]) -> None:
        """Delete these facts. A missing fact is not an error."""
        self._objects.delete_many([paths.fact(job, fact) for fact in facts])

    # -- stack/allocation

    def read_allocation(self) -> Versioned[Allocation]:
        """Read the allocation; an empty one with the token ``""`` if none exists yet."""
        return self._read_versioned(paths.ALLOCATION, Allocation) or Versioned(Allocation(), "")

    def cas_allocation(self, allocation: Allocation, token: str) -> str | None:
        """Replace the allocation, as :meth:`cas_record` does; the token ``""`` means create."""
        if not token:
            return self._create_versioned(paths.ALLOCATION, allocation)
        return self._replace_versioned(paths.ALLOCATION, allocation, token)

    # -- searches: sweeps/<name>/state

    def read_sweep(self, name: str) -> Versioned[SweepState]:
        """Read what a search's trials have reported; an empty state with the token ``""`` if none has yet."""
        read = self._read_versioned(paths.sweep_state(name), SweepState)
        return read or Versioned(SweepState(sweep=name), "")

    def cas_sweep(self, state: SweepState, token: str) -> str | None:
        """Replace a search's state, as :meth:`cas_allocation` does."""
        path = paths.sweep_state(state.sweep)
        return self._replace_versioned(path, state, token) if token else self._create_versioned(path, state)

    def read_sweep_spec(self, name: str) -> SweepSpec | None:
        return self._value(paths.sweep_spec(name), SweepSpec)

    def create_sweep_spec(self, spec: SweepSpec) -> bool:
        """Store what a search is, create-only."""
        return self._create(paths.sweep_spec(spec.file.name), msgspec.json.encode(spec), own=True) is not None

    def list_cohorts(self, name: str) -> tuple[Cohort, ...]:
        """Return a search's cohorts, the oldest first."""
        return tuple(sorted(self._read_all(paths.sweep_cohorts(name), Cohort), key=lambda cohort: cohort.first))

    def create_cohort(self, name: str, cohort: Cohort) -> bool:
        """Store a cohort, create-only. True also if the same one is there."""
        path = paths.sweep_cohort(name, cohort.first)
        return self._create(path, msgspec.json.encode(cohort), own=True) is not None

    def list_trials(self, name: str) -> dict[int, str]:
        """Return the ids of the jobs of a search's submitted trials, by number."""
        folder = paths.sweep_trials(name)
        keys = [path for path in self._objects.list(folder) if path.removeprefix(folder).isdecimal()]
        blobs = zip(keys, self._objects.get_many(keys), strict=True)
        found = {int(path.removeprefix(folder)): blob.data.decode("ascii", "replace") for path, blob in blobs if blob}
        return {number: job for number, job in found.items() if JOB_ID.match(job)}

    def create_trial(self, name: str, number: int, job: str) -> bool:
        """Note that a trial is submitted, and as which job, create-only."""
        return self._create(paths.sweep_trial(name, number), job.encode(), own=True) is not None

    def list_stops(self, name: str) -> tuple[SweepStop, ...]:
        """Return when a search was stopped, the first time first."""
        return tuple(sorted(self._read_all(paths.sweep_stops(name), SweepStop), key=lambda stop: stop.below))

    def create_stop(self, name: str, stop: SweepStop) -> bool:
        """Note that a search was stopped, create-only. False if these trials were stopped already."""
        return self._create(paths.sweep_stop(name, stop.below), msgspec.json.encode(stop), own=True) is not None

    def list_sweeps(self) -> tuple[str, ...]:
        """Return the names of all searches."""
        found = {path.removeprefix(paths.SWEEPS).partition("/")[0] for path in self._objects.list(paths.SWEEPS)}
        return tuple(sorted(found))

    def put_sweep_source(self, name: str, sha256: str, tar: bytes) -> None:
        """Store the source of a search's trials; that of a job goes when the job ends."""
        self._put_large(paths.sweep_source(name, sha256), tar)

    # -- requests: jobs/<job>/requests/<id>

    def list_requests(self, job: str) -> tuple[JobRequest, ...]:
        """Return the requests to a job, by time, then id."""
        return tuple(
            sorted(self._read_all(paths.requests(job), JobRequest), key=lambda request: (request.at, request.id))
        )

    def put_request(self, job: str, request: JobRequest) -> bool:
        """Store a request, create-only."""
        return self._create(paths.request(job, request.id), msgspec.json.encode(request)) is not None

    def delete_request(self, job: str, request_id: str) -> None:
        self._objects.delete(paths.request(job, request_id))

    # -- active/<job>

    def active_jobs(self) -> tuple[str, ...]:
        found = (path.removeprefix(paths.ACTIVE) for path in self._objects.list(paths.ACTIVE))
        return tuple(job for job in found if JOB_ID.match(job))

    def set_active(self, job: str, since: float | None = None) -> None:
        """Create a job's marker in ``active/``, create-only. ``since``: when a submission began."""
        self._create(paths.active(job), b"" if since is None else msgspec.json.encode(since))

    def active_since(self, job: str) -> float | None:
        """Return when the job's submission began, as ``active/<job>`` says; None if unknown."""
        blob = self._objects.get(paths.active(job))
        try:
            return decode(blob.data, float, paths.active(job)) if blob is not None and blob.data else None
        except CorruptError:  # an unreadable lease counts as free
            return None

    def clear_active(self, job: str) -> None:
        self._objects.delete(paths.active(job))

    # -- jobs/<job>/lease: {nonce, until, due}. Saves money, carries no safety

    def take_lease(self, job: str, nonce: str, now: float, ttl_s: float) -> bool:
        """Take a job's lease. True if it was free, expired, or already had this nonce."""
        path = paths.lease(job)
        try:
            read = self._read(path, _Lease)
        except CorruptError as error:  # a lease only saves money: an unreadable one counts as free
            read = Versioned(_Lease(), error.token)
        if read is None:
            mine = _Lease(nonce, now + ttl_s)
            return self._create(path, msgspec.json.encode(mine), own=True) is not None
        # A far ``until`` was written by a clock that had jumped ahead: other rounds need not wait for it.
        if read.value.nonce not in ("", nonce) and now < read.value.until <= now + ttl_s + SKEW_S:
            return False
        mine = _Lease(nonce, now + ttl_s, read.value.due)
        return self._replace(path, msgspec.json.encode(mine), read.token) is not None

    def drop_lease(self, job: str, nonce: str, due: float | None) -> None:
        """Release a lease; note when the next round is due even without reports. A lease with another nonce stays."""
        path = paths.lease(job)
        read = self._read(path, _Lease)
        if read is not None and read.value.nonce == nonce:
            self._replace(path, msgspec.json.encode(_Lease(due=due)), read.token)

    def read_due(self, job: str) -> float | None:
        """Return when the next round is due, as :meth:`drop_lease` noted; None if it noted none, or no round ever ran.

        During a round, return when the lease expires.
        """
        read = self._read(paths.lease(job), _Lease)
        if read is None:
            return None
        return read.value.until if read.value.nonce else read.value.due

    # -- jobs/<job>/ledger/<time>.<id>

    def append_ledger(self, job: str, entry: Entry) -> bool:
        """Append an entry, unless there is one with its time and id. Readers take the first entry of an id."""
        return self._create(paths.entry(job, entry.at, entry.id), msgspec.json.encode(entry)) is not None

    def append_all(self, job: str, entries: Sequence[Entry]) -> None:
        if len(entries) == 1:
            self.append_ledger(job, entries[0])
        elif entries:  # one object for all entries of one write of the record
            self._create(_ledger_path(job, entries), encode_many(entries))

    def appended(self, job: str, entries: Sequence[Entry]) -> bool:
        """Return whether :meth:`append_all` has written exactly these entries."""
        return bool(entries) and self._objects.get(_ledger_path(job, entries)) is not None

    def list_ledger(self, job: str) -> tuple[Entry, ...]:
        """Return a job's entries, by time, then id."""
        found = {(entry.at, entry.id): entry for entry in self._read_all(paths.ledger(job), Entry)}
        return tuple(entry for _, entry in sorted(found.items()))

    # -- notifications/<id>: messages that are not yet sent to every channel

    def put_notification(self, outgoing: Outgoing) -> bool:
        """Store a notification to send, create-only."""
        path = paths.notification(outgoing.notification.id)
        return self._create(path, msgspec.json.encode(outgoing)) is not None

    def list_notifications(self) -> tuple[Versioned[Outgoing], ...]:
        """Return the notifications to send, oldest first, 500 at most.

        If more wait, the 500 are chosen at random at each call, so that every notification gets a turn.
        """
        keys = self._objects.list(paths.NOTIFICATIONS)
        if len(keys) > NOTIFICATIONS_READ:
            keys = random.sample(keys, NOTIFICATIONS_READ)
        found = []
        for path, blob in zip(keys, self._objects.get_many(keys), strict=True):
            if blob is None:  # sent since the listing
                continue
            try:
                found.append(Versioned(decode(blob.data, Outgoing, path), blob.tag))
            except CorruptError as error:
                log.warning("skipped %s", error)
                self._set_aside(path, blob)
                self._objects.delete(path)
        return tuple(sorted(found, key=lambda each: each.value.notification.at))

    def cas_notification(self, outgoing: Outgoing, token: str) -> str | None:
        """Replace a notification that was read with ``token``. Returns the new token; None if another was first."""
        path = paths.notification(outgoing.notification.id)
        return self._replace(path, msgspec.json.encode(outgoing), token, own=False)

    def delete_notification(self, outgoing: Outgoing) -> None:
        self._objects.delete(paths.notification(outgoing.notification.id))

    # -- documents written by others

    def read_stack(self) -> StackState | None:
        """Read ``stack/pools.json``; None if it does not exist."""
        return self._value(paths.STACK, StackState)

    def draining(self) -> bool:
        """Whether the stack is being destroyed (``stack/drain`` exists): then no machine may be inserted."""
        return self._objects.get(paths.DRAIN) is not None

    def read_spec(self, job: str, sha256: str = "") -> JobSpec | None:
        return self._value(paths.spec(job, sha256), JobSpec)

    def put_spec(self, job: str, spec: JobSpec, sha256: str = "") -> None:
        """Store a job file, create-only. Raises :class:`StoreError` if another job file is there."""
        path = paths.spec(job, sha256)
        if self._create(path, spec_json(spec), own=True) is None:
            raise StoreError(f"{path}: another job file is there, and job files are never replaced")

    def put_source(self, job: str, sha256: str, tar: bytes) -> None:
        """Store a source tar, unless an object with this hash exists. Agents verify the hash of what they download."""
        self._put_large(paths.source(job, sha256), tar)

    def _put_large(self, path: str, data: bytes) -> None:
        """Store an object under its hash. It is uploaded in parts, which a conditional write cannot be."""
        if path not in self.list(path):
            self._objects.put(path, data)

    def read_progress(self, job: str) -> Progress | None:
        return self._value(paths.progress(job), Progress)

    def put_progress(self, job: str, progress: Progress) -> None:
        self._objects.put(paths.progress(job), msgspec.json.encode(progress))

    # -- static/<node>/<boot>; market/..., which is advisory and never needed for a decision

    def list_static_hellos(self) -> tuple[StaticHello, ...]:
        return tuple(self._read_all(paths.STATIC, StaticHello, deep=True))

    def put_static_hello(self, hello: StaticHello) -> bool:
        """Store a static machine's hello, create-only, and delete the hellos of its earlier starts."""
        mine = paths.static_hello(hello.machine, hello.boot)
        new = self._create(mine, msgspec.json.encode(hello)) is not None
        for path in self._objects.list(paths.static_machine(hello.machine)) if new else ():
            if path != mine:
                self._objects.delete(path)
        return new

    def read_prices(self, pools: tuple[str, ...]) -> dict[str, Versioned[Prices]]:
        """Return ``market/prices/<pool>`` by pool. Pools without prices are left out."""
        blobs = zip(pools, self._objects.get_many([paths.prices(pool) for pool in pools]), strict=True)
        return {pool: self._advisory(paths.prices(pool), blob, Prices(pool, 0.0)) for pool, blob in blobs if blob}

    def cas_prices(self, prices: Prices, token: str) -> str | None:
        """Replace a pool's prices (token ``""``: create). Returns the new token; None if another writer was first."""
        path, data = paths.prices(prices.pool), msgspec.json.encode(prices)
        return self._replace(path, data, token, own=False) if token else self._create(path, data)

    def read_networks(self) -> tuple[Network, ...]:
        return tuple(self._read_all(paths.NETWORKS, Network, deep=True))

    def put_network(self, network: Network) -> None:
        """Store a measured bandwidth in place of the older measurement."""
        self._objects.put(paths.network(network.machine_type, network.zone), msgspec.json.encode(network))

    def read_observations(self, pools: tuple[str, ...], hours: tuple[int, ...]) -> dict[str, tuple[Observation, ...]]:
        """Return the observations of these pools in these hours (since 1970), by pool, in order of time."""
        wanted = [(pool, hour) for pool in pools for hour in sorted(hours)]
        blobs = self._objects.get_many([paths.market_hour(pool, hour) for pool, hour in wanted])
        out: dict[str, tuple[Observation, ...]] = dict.fromkeys(pools, ())
        for (pool, hour), blob in zip(wanted, blobs, strict=True):
            if blob is not None:
                out[pool] += self._advisory(paths.market_hour(pool, hour), blob, MarketHour()).value.observations
        return out

    def add_observations(self, pool: str, hour: int, observations: tuple[Observation, ...]) -> bool:
        """Add observations that ``market/hours/<pool>/<hour>`` lacks. False if others wrote first at every try.

        The first writer of a new hour deletes the hours that are too old (``HOURS_KEPT``).
        """
        path = paths.market_hour(pool, hour)
        for _ in range(MARKET_TRIES):
            blob = self._objects.get(path)
            there = self._advisory(path, blob, MarketHour()).value.observations if blob else ()
            new = tuple(observation for observation in dict.fromkeys(observations) if observation not in there)
            if not new:
                return True
            merged = MarketHour(
                tuple(sorted((*there, *new), key=lambda observation: (observation.at, observation.machine)))
            )
            data = msgspec.json.encode(merged)
            done = self._replace(path, data, blob.tag) if blob else self._create(path, data)
            if done is not None:
                if blob is None:
                    self._forget_hours(pool, hour - HOURS_KEPT)
                return True
        log.warning("%s: other writers were first each time; %d observations are not stored", path, len(observations))
        return False

    def _forget_hours(self, pool: str, before: int) -> None:
        for path in self._objects.list(paths.market_hours(pool)):
            if path < paths.market_hour(pool, before):
                self._objects.delete(path)

    def _advisory(self, path: str, blob: Blob, blank: T) -> Versioned[T]:
        """Decode a document that no decision needs. If unreadable, it is quarantined and ``blank`` is returned."""
        try:
            return Versioned(decode(blob.data, type(blank), path), blob.tag)
        except CorruptError as error:
            log.warning("skipped %s", error)
            self._set_aside(path, blob)
            return Versioned(blank, blob.tag)

    # -- tomb/<job>, names/<name>, quarantine/<hash>

    def put_tomb(self, job: str, at: float) -> None:
        self._objects.put(paths.tomb(job), msgspec.json.encode(at))

    def read_tomb(self, job: str) -> float | None:
        return self._value(paths.tomb(job), float)

    def read_name(self, name: str) -> str | None:
        """Return the id of the job that has this name, or None."""
        path = paths.name(name)
        blob = self._objects.get(path)
        if blob is None:
            return None
        job = blob.data.decode("ascii", "replace")
        if not JOB_ID.match(job):
            raise CorruptError(f"{path}: {job[:40]!r} is not a job id")
        return job

    def put_name(self, name: str, job: str) -> bool:
        """Store a job's name, create-only. True also if the name exists with this id, which only this writer knows."""
        return self._create(paths.name(name), job.encode(), own=True) is not None

    def delete_name(self, name: str, job: str) -> None:
        """Delete a name, if it belongs to this job."""
        if self.read_name(name) == job:
            self._objects.delete(paths.name(name))

    def quarantine(self, text: str) -> None:
        """Store the beginning of unreadable content under its hash, unless the quarantine is full."""
        data = text.encode("utf-8", "backslashreplace")[:QUARANTINE_BYTES]
        if len(self._objects.list(paths.QUARANTINE)) < QUARANTINE_KEPT:
            self._create(paths.quarantine(hashlib.sha256(data).hexdigest()), data)

    # -- anything else (sources, bundles, logs), by its path in the bucket

    def get(self, path: str) -> bytes | None:
        blob = self._objects.get(path)
        return blob.data if blob else None

    def get_all(self, paths: tuple[str, ...]) -> tuple[bytes | None, ...]:
        """Read several small objects at once, in the order of the paths. None for a missing object."""
        return tuple(blob.data if blob else None for blob in self._objects.get_many(list(paths)))

    def part(self, path: str, start: int, size: int) -> bytes | None:
        """Read up to ``size`` bytes of a large object from ``start``; None if it is missing."""
        return self._objects.part(path, start, size)

    def create(self, path: str, data: bytes) -> bool:
        """Create an object; return False if it exists with other bytes. No other writer may write these bytes."""
        return self._create(path, data, own=True) is not None

    def put(self, path: str, data: bytes) -> None:
        self._objects.put(path, data)

    def delete(self, path: str) -> None:
        """Delete an object. A missing object is not an error."""
        self._objects.delete(path)

    def list(self, prefix: str) -> tuple[str, ...]:
        """Return the paths under a prefix, sorted."""
        folder = prefix[: prefix.rfind("/") + 1]
        return tuple(path for path in self._objects.list(folder) if path.startswith(prefix))

    def newest(self, folder: str, most: int) -> tuple[str, ...]:
        """Return the ``most`` paths of a folder that were written last, newest first."""
        return tuple(self._objects.newest(folder, most))

    # -- how documents are read and written

    def _read(self, path: str, kind: type[T]) -> Versioned[T] | None:
        blob = self._objects.get(path)
        return _versioned(blob, decode, kind, path) if blob else None

    def _value(self, path: str, kind: type[T]) -> T | None:
        read = self._read(path, kind)
        return read.value if read else None

    def _read_versioned(self, path: str, kind: type[T]) -> Versioned[T] | None:
        known = self._recent.blob(path)
        blob = self._objects.refresh(path, known) if known is not None else self._objects.get(path)
        if blob is None:
            return None
        value = self._recent.value(path, blob)
        if isinstance(value, kind):
            return Versioned(value, blob.tag)
        if blob is known:  # the cached value was evicted meanwhile, and the answer had no bytes
            blob = self._objects.get(path)
            if blob is None:
                return None
        read = _versioned(blob, decode_versioned, kind, path)
        self._recent.keep(path, blob, read.value)
        return read

    def _read_all(self, prefix: str, kind: type[T], deep: bool = False) -> builtins.list[T]:
        """Read every document of a folder. Unreadable ones go to quarantine, so that they do not stop a job.

        ``deep``: also read subfolders. Otherwise subfolders are skipped, because a machine could write to one that is
        called ``logs``: its rights allow ``jobs/*/logs/*``, and the clouds' ``*`` matches slashes too.
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
        """Copy an object to quarantine, if this identity has the right to do so; submitters do not have it."""
        try:
            self.quarantine(f"{path}\n{cut(blob.data)}")
        except BucketRefusedError as error:
            log.info("not set aside: %s", error)

    def _create(self, path: str, data: bytes, own: bool = False) -> str | None:
        """Create an object. Returns its token, or None if it exists already.

        ``own``: only this writer writes these bytes, so an object that has them counts as created by this call.

        A refusal (403) also means that the object exists, if it can be read: Google refuses so if the identity has the
        right to create objects but not to replace them.
        """
        try:
            return self._objects.create(path, data)
        except ConflictError:
            return self._ours(path, data) if own else None
        except BucketRefusedError:
            if self._objects.get(path) is None:
                raise
            return self._ours(path, data) if own else None

    def _replace(self, path: str, data: bytes, token: str, own: bool = True) -> str | None:
        try:
            return self._objects.replace(path, data, token)
        except ConflictError:
            return self._ours(path, data) if own else None

    def _ours(self, path: str, data: bytes) -> str | None:
        """Return the token if the object has these bytes: only this writer writes them, so its write had succeeded."""
        blob = self._objects.get(path)
        return blob.tag if blob is not None and blob.data == data else None

    def _create_versioned(self, path: str, document: Nonced) -> str | None:
        return self._create(path, encode_versioned(_checked(document, path)), own=True)

    def _replace_versioned(self, path: str, document: Nonced, token: str) -> str | None:
        return self._replace(path, encode_versioned(_checked(document, path)), token)


def _ledger_path(job: str, entries: Sequence[Entry]) -> str:
    if len(entries) == 1:
        return paths.entry(job, entries[0].at, entries[0].id)
    said = "\n".join(f"{entry.at}.{entry.id}" for entry in entries)
    return paths.entry(job, entries[0].at, f"{MANY}{hashlib.sha256(said.encode()).hexdigest()[:16]}")


def _versioned(blob: Blob, decoded: Callable[[bytes, type[T], str], T], kind: type[T], path: str) -> Versioned[T]:
    """Return the decoded document with its token. A ``CorruptError`` gets the token too."""
    try:
        return Versioned(decoded(blob.data, kind, path), blob.tag)
    except CorruptError as error:
        error.token = blob.tag
        raise


def _checked(document: Nonced, path: str) -> Nonced:
    if not document.nonce:
        raise StoreError(f"{path}: a document written by compare-and-swap needs a fresh nonce")
    return document


def swap_allocation(store: Store, new: Allocation, token: str) -> Versioned[Allocation] | None:
    """Replace the allocation, with a nonce of this write; None if another writer was first."""
    new = replace(new, nonce=uuid4().hex)
    written = store.cas_allocation(new, token)
    return Versioned(new, written) if written is not None else None
