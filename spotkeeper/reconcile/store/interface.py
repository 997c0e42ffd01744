"""The interface to the bucket: typed methods for each document, without paths or clouds.

``store.py`` implements it over objects (S3, GCS) and SQLite; the tests over dictionaries. Rules for
implementers:

* A *token* is what the backend compares (ETag, generation, row version); callers do not interpret it.
* Documents of ``cas_*`` carry a fresh ``nonce``. After "precondition failed" read the object again: if it has this
  nonce, the write succeeded and only its answer was lost; return its token.
* A *create-only* write leaves an existing object untouched and returns ``False``.
* Any other failure raises :class:`StoreError`; no method retries for longer than a few seconds.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from msgspec import Struct

from spotkeeper.contract.allocation import Allocation
from spotkeeper.contract.facts import Fact
from spotkeeper.contract.generation import Progress
from spotkeeper.contract.job import JobRequest, JobSpec
from spotkeeper.contract.ledger import Entry
from spotkeeper.contract.market import Guess, Network, Observation, Prices, Watch
from spotkeeper.contract.record import Record
from spotkeeper.contract.stack import Model, StackState
from spotkeeper.reconcile.store.objects import Deadline, StoreError

T = TypeVar("T")
HOURS_KEPT = 90 * 24  # of the market's history


class CorruptError(StoreError):
    """An object exists and is unreadable: it was edited by hand or damaged.

    Spotkeeper decides nothing from it and does not delete it. ``token``: of the object as read, for a repair;
    ``said``: the beginning of its content.
    """

    def __init__(self, message: str, path: str = "", token: str = "", said: str = "") -> None:
        super().__init__(message)
        self.path, self.token, self.said = path, token, said

    @property
    def remedy(self) -> str:
        """Return what a person can do about it, in one line."""
        name = re.sub(r"\Aspec-[0-9a-f]{64}", "spec", self.path.rpartition("/")[2])
        return _REMEDIES.get(self.path) or _JOB_REMEDIES.get(name, "delete the object")


class NewerError(CorruptError):
    """A document in a format newer than this program knows. It is intact, and left alone."""

    @property
    def remedy(self) -> str:
        return "bring the stack up with the Spotkeeper that wrote it (pulumi up), or use that version here"


_JOB_REMEDIES = {
    "rec": "repair the object, or delete it: the next tick then ends the job, deletes its VMs and keeps its disks",
    "progress": "delete the object: the job's lowest member writes it again within a minute",
    "spec.json": "repair the object: it is the job file as submitted, in JSON",
}
_REMEDIES = {
    "stack/allocation": "spotkeeper repair allocation (rebuilds it from the jobs' ledgers, records and the cloud)",
    "stack/pools.json": "have it written again: pulumi up --refresh (on this machine: spotkeeper local up)",
}


class Versioned(Struct, Generic[T], frozen=True):
    """A document as read, with the token that a compare-and-swap of it needs."""

    value: T
    token: str


class StaticHello(Struct, frozen=True):
    """The document ``static/<node>/<boot>``: a static machine is up and has no job."""

    machine: str
    uid: str  # unique instance id, from the identity token
    boot: str
    zone: str
    at: float  # virtual unix seconds of the first hello of this boot


class OfferHistory(Struct, frozen=True, omit_defaults=True):
    """The newest observations of an offer, which ``market.read`` collects from ``market/``. Advisory."""

    pool: str
    zone: str
    model: Model
    refused_at: float = 0.0  # for capacity, virtual unix seconds; 0: never
    quota_at: float = 0.0  # refused for the account's quota, which says nothing about capacity
    launched_at: float = 0.0
    lost_at: float = 0.0
    price: float | None = None  # USD per machine-hour, where a market tells more than the stack file
    guess: Guess | None = None  # of spot: the cloud's own
    watch: Watch | None = None  # of a spot offer: how it was there, and how long
    boot_s: float | None = None  # from the order to the hello, the median of the pool's machines
    slow_boot_s: float | None = None  # the 95th percentile of the same; None: too few machines of the pool have booted

    @property
    def denied_at(self) -> float:
        """Return when it was last refused, for any reason, virtual unix seconds; 0: never."""
        return max(self.refused_at, self.quota_at)


class Store(Protocol):
    """The bucket of one stack."""

    def until(self, deadline: Deadline) -> Store:
        """Return this store for one request: after the deadline, a new call raises :class:`StoreError`.

        A call that has begun may take ``objects.CALL_S`` longer.
        """

    # -- the record of a job: jobs/<job>/rec
    def read_record(self, job: str) -> Versioned[Record] | None: ...

    def create_record(self, record: Record) -> bool:
        """Create a record, create-only. True also if the existing object has this record's nonce."""

    def cas_record(self, record: Record, token: str) -> str | None:
        """Replace the record that was read with ``token``. Returns the new token; None if another writer was first."""

    # -- facts: jobs/<job>/facts/<key>, the key is the content
    def list_facts(self, job: str) -> tuple[Fact, ...]:
        """Return all facts of a job in the order of their keys. Invalid keys are skipped."""

    def facts_of(self, job: str, uid: str) -> tuple[Fact, ...]:
        """Return the facts of one machine. This lists one page, however large the gang."""

    def put_fact(self, job: str, fact: Fact) -> bool:
        """Store a fact, create-only. True if it is new."""

    def delete_facts(self, job: str, facts: tuple[Fact, ...]) -> None:
        """Delete these facts. A missing fact is no error."""

    # -- stack/allocation
    def read_allocation(self) -> Versioned[Allocation]:
        """Read the allocation; an empty one with the token ``""`` if none exists yet."""

    def cas_allocation(self, allocation: Allocation, token: str) -> str | None:
        """Replace the allocation, as :meth:`cas_record` does; the token ``""`` means create."""

    # -- requests: jobs/<job>/requests/<id>
    def list_requests(self, job: str) -> tuple[JobRequest, ...]:
        """By time, then id."""

    def put_request(self, job: str, request: JobRequest) -> bool:
        """Create-only."""

    def delete_request(self, job: str, request_id: str) -> None: ...

    # -- active/<job>
    def active_jobs(self) -> tuple[str, ...]: ...

    def set_active(self, job: str, since: float | None = None) -> None:
        """Create a job's marker in ``active/``, create-only. ``since``: when a submission began."""

    def active_since(self, job: str) -> float | None:
        """Return when the job's submission began; None if the marker does not say or is missing."""

    def clear_active(self, job: str) -> None: ...

    # -- jobs/<job>/lease: {nonce, until, due}. Saves money, carries no safety
    def take_lease(self, job: str, nonce: str, now: float, ttl_s: float) -> bool:
        """Take a job's lease. True if it was free, expired, or already had this nonce."""

    def drop_lease(self, job: str, nonce: str, due: float | None) -> None:
        """Release a lease and note when the next round is due without new reports. No error if it has another nonce."""

    def read_due(self, job: str) -> float | None:
        """Return when the next round is due, as :meth:`drop_lease` noted; during a round, when the lease expires."""

    # -- jobs/<job>/ledger/<time>.<id>
    def append_ledger(self, job: str, entry: Entry) -> bool:
        """Append an entry, create-only by (time, id). Readers take the first entry of an id."""

    def append_all(self, job: str, entries: Sequence[Entry]) -> None:
        """Append several entries at once, as :meth:`append_ledger` does."""

    def list_ledger(self, job: str) -> tuple[Entry, ...]:
        """By time, then id."""

    # -- documents written by others
    def read_stack(self) -> StackState | None:
        """Read ``stack/pools.json``; None if it does not exist."""

    def draining(self) -> bool:
        """Whether ``stack/drain`` exists: the stack is being destroyed, and no machine may be inserted."""

    # -- jobs/<job>/spec.json as submitted; spec-<sha256>.json: one that a resume brought (Record.spec_key)
    def read_spec(self, job: str, sha256: str = "") -> JobSpec | None: ...

    def put_spec(self, job: str, spec: JobSpec, sha256: str = "") -> None:
        """Store a job file, create-only. Raises :class:`StoreError` if another job file is there."""

    # -- jobs/<job>/source/<sha256>
    def put_source(self, job: str, sha256: str, tar: bytes) -> None:
        """Store a source tar, create-only: an existing object has the same hash, which agents verify."""

    def read_progress(self, job: str) -> Progress | None: ...

    def put_progress(self, job: str, progress: Progress) -> None: ...

    # -- static/<node>/<boot>
    def list_static_hellos(self) -> tuple[StaticHello, ...]: ...

    def put_static_hello(self, hello: StaticHello) -> bool:
        """Store a static machine's hello, create-only. Hellos of its older boots are deleted."""

    # -- market/...: advisory, and never needed for a decision
    def read_prices(self, pools: tuple[str, ...]) -> dict[str, Versioned[Prices]]:
        """Return ``market/prices/<pool>`` by pool. Pools without prices are left out."""

    def cas_prices(self, prices: Prices, token: str) -> str | None:
        """Replace a pool's prices. Returns the new token; None if another writer was first. Token ``""``: create."""

    def read_observations(self, pools: tuple[str, ...], hours: tuple[int, ...]) -> dict[str, tuple[Observation, ...]]:
        """Return the observations of these pools in these hours (since 1970), by pool, in order of time."""

    def add_observations(self, pool: str, hour: int, observations: tuple[Observation, ...]) -> bool:
        """Add observations that ``market/hours/<pool>/<hour>`` lacks. False if another writer interfered.

        The first writer of a new hour deletes hours older than ``HOURS_KEPT``.
        """

    def read_networks(self) -> tuple[Network, ...]: ...

    def put_network(self, network: Network) -> None:
        """Store a measured bandwidth. It overwrites the older one."""

    # -- tomb/<job>, names/<name>, quarantine/<hash>
    def put_tomb(self, job: str, at: float) -> None: ...

    def read_tomb(self, job: str) -> float | None: ...

    def read_name(self, name: str) -> str | None:
        """Return the id of the job that has this name, or None."""

    def put_name(self, name: str, job: str) -> bool:
        """Create-only."""

    def delete_name(self, name: str, job: str) -> None:
        """Delete a name, if it belongs to this job."""

    def quarantine(self, text: str) -> None:
        """Store unreadable content by its hash, limited in size and number."""

    # -- anything else (sources, bundles, logs), by its path in the bucket
    def get(self, path: str) -> bytes | None: ...

    def get_all(self, paths: tuple[str, ...]) -> tuple[bytes | None, ...]:
        """Read several small objects at once, in the order of the paths. None for a missing one."""

    def part(self, path: str, start: int, size: int) -> bytes | None:
        """Read up to ``size`` bytes of a large object from ``start``, which is less than its size."""

    def put(self, path: str, data: bytes) -> None: ...

    def delete(self, path: str) -> None:
        """Delete an object. A missing one is no error."""

    def list(self, prefix: str) -> tuple[str, ...]:
        """Return the paths under a prefix, sorted."""

    def newest(self, folder: str, most: int) -> tuple[str, ...]:
        """Return the ``most`` paths of a folder that were written last, newest first."""
