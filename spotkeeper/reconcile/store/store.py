"""Reads and writes the documents in the bucket of one stack; makes no decisions.

``bucket.py`` has what all documents share, ``market.py`` and ``sweeps.py`` the documents of these two, ``paths.py`` the
names of all.
"""

from __future__ import annotations

import hashlib
import logging
import random
from collections.abc import Callable, Sequence
from uuid import uuid4

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from spotkeeper.contract.allocation import Allocation
from spotkeeper.contract.facts import Fact
from spotkeeper.contract.generation import Progress
from spotkeeper.contract.job import JobRequest, JobSpec, spec_json
from spotkeeper.contract.ledger import Entry, Event
from spotkeeper.contract.names import JOB_ID
from spotkeeper.contract.notification import Outgoing
from spotkeeper.contract.record import Record
from spotkeeper.contract.stack import StackState
from spotkeeper.reconcile.store import paths
from spotkeeper.reconcile.store.bucket import MANY, open_objects
from spotkeeper.reconcile.store.clock_skew import SKEW_S
from spotkeeper.reconcile.store.documents import (
    CorruptError,
    StaticHello,
    Versioned,
    decode,
    encode_many,
)
from spotkeeper.reconcile.store.market import MarketDocuments
from spotkeeper.reconcile.store.objects import Deadline, StoreError
from spotkeeper.reconcile.store.sweeps import SweepDocuments

NOTIFICATIONS_READ = 500

log = logging.getLogger(__name__)


class _Lease(Struct, frozen=True, omit_defaults=True):
    """The lease document. ``until``: when it expires. ``due``: when the next round is due even without new reports."""

    nonce: str = ""
    until: float = 0.0
    due: float | None = None


def open_store(url: str, endpoint: str | None = None, brief: bool = False) -> Store:
    """Open the typed store at the address in ``SPOTKEEPER_BUCKET``; see :func:`open_objects`."""
    return Store(open_objects(url, endpoint, brief))


class Store(SweepDocuments, MarketDocuments):
    """The bucket of one stack; :class:`Bucket` says what its methods promise."""

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

    def take_lease(
        self, job: str, nonce: str, now: float, ttl_s: float, begin: Callable[[], bool] = lambda: True
    ) -> bool:
        """Take a job's lease. True if it was free, expired, or already had this nonce.

        ``begin`` is called before the job's first lease is created; if it returns False, none is.
        """
        path = paths.lease(job)
        try:
            read = self._read(path, _Lease)
        except CorruptError as error:  # a lease only saves money: an unreadable one counts as free
            read = Versioned(_Lease(), error.token)
        if read is None:
            if not begin():
                return False
            mine = _Lease(nonce, now + ttl_s)
            return self._create(path, msgspec.json.encode(mine), own=True) is not None
        # A far ``until`` was written by a clock that had jumped ahead: other rounds need not wait for it.
        if read.value.nonce not in ("", nonce) and now < read.value.until <= now + ttl_s + SKEW_S:
            return False
        mine = _Lease(nonce, now + ttl_s, read.value.due)
        return self._replace(path, msgspec.json.encode(mine), read.token) is not None

    def has_begun(self, job: str) -> bool:
        """Whether a round of the job ever ran: it has a lease, or (if that was lost) a ledger by the function."""
        if self._objects.get(paths.lease(job)) is not None:
            return True
        return any(map(paths.by_function, self._objects.list(paths.ledger(job))))

    def begin(self, job: str) -> None:
        """Create a job's lease, which nobody holds, unless it has one."""
        self._create(paths.lease(job), msgspec.json.encode(_Lease()), own=True)

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
        """Return a job's entries, by time, then id. People with shells may only add entries that one was opened."""
        folder = paths.ledger(job)
        found = {(entry.at, entry.id): entry for entry in self._read_all(folder, Entry, believed=_believed)}
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

    def read_progress(self, job: str) -> Progress | None:
        return self._value(paths.progress(job), Progress)

    def put_progress(self, job: str, progress: Progress) -> None:
        self._objects.put(paths.progress(job), msgspec.json.encode(progress))

    # -- static/<node>/<boot>

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

    # -- tomb/<job>, names/<name>

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


def _ledger_path(job: str, entries: Sequence[Entry]) -> str:
    if len(entries) == 1:
        return paths.entry(job, entries[0].at, entries[0].id)
    said = "\n".join(f"{entry.at}.{entry.id}" for entry in entries)
    return paths.entry(job, entries[0].at, f"{MANY}{hashlib.sha256(said.encode()).hexdigest()[:16]}")


def swap_allocation(store: Store, new: Allocation, token: str) -> Versioned[Allocation] | None:
    """Replace the allocation, with a nonce of this write; None if another writer was first."""
    new = replace(new, nonce=uuid4().hex)
    written = store.cas_allocation(new, token)
    return Versioned(new, written) if written is not None else None


def _believed(path: str, entry: Entry) -> bool:
    return paths.by_function(path) or (entry.event is Event.SHELL and entry.id.startswith(Event.SHELL.value))
