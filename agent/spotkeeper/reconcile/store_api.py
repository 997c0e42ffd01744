"""What reconcile needs from the bucket: one typed verb per document, no path and no cloud in sight.

``store.py`` implements it over objects (S3, GCS) and SQLite; the tests over dictionaries. Rules for
implementers:

* a *token* is whatever the backend compares (ETag, generation, row version); it means nothing to callers;
* ``cas_*`` carry a fresh ``nonce`` in the document. When the backend says "precondition failed", read the
  object again: if it holds this very nonce, the write won and only its answer was lost; return its token;
* ``put_*`` described as create-only leave an existing object untouched and answer ``False``;
* anything else that goes wrong raises :class:`StoreError`; no verb retries for longer than a few seconds.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from msgspec import Struct

from spotkeeper.reconcile.deadline import Deadline
from spotkeeper.spec.facts import Fact
from spotkeeper.spec.generation import Progress
from spotkeeper.spec.job import Ask, JobSpec
from spotkeeper.spec.ledger import Entry
from spotkeeper.spec.market import Guess, Prices, Sight, Watch
from spotkeeper.spec.model import Model
from spotkeeper.spec.record import Alloc, Record
from spotkeeper.spec.stack import StackState

T = TypeVar("T")
HOURS_KEPT = 90 * 24  # of the market's history


class StoreError(Exception):
    """The bucket could not be read or written. Nothing was decided on it; the next round tries again."""


class CorruptError(StoreError):
    """An object is there and makes no sense: somebody wrote it by hand, or it came to harm.

    Nothing is decided on it and nothing of it is deleted. ``token`` is of the object as read, for whoever
    mends it; ``said``: what it holds, cut.
    """

    def __init__(self, message: str, path: str = "", token: str = "", said: str = "") -> None:
        super().__init__(message)
        self.path, self.token, self.said = path, token, said

    @property
    def remedy(self) -> str:
        """What a person can do, one line."""
        name = re.sub(r"\Aspec-[0-9a-f]{64}", "spec", self.path.rpartition("/")[2])
        return _REMEDIES.get(self.path) or _JOB_REMEDIES.get(name, "delete the object")


class NewerError(CorruptError):
    """A document of a version that this program does not know yet: whole, and left alone."""

    @property
    def remedy(self) -> str:
        return "bring the stack up with the Spotkeeper that wrote it (pulumi up), or use that version here"


_JOB_REMEDIES = {
    "rec": "mend the object, or delete it: the next tick then ends the job, deletes its VMs and keeps its disks",
    "progress": "delete the object: the job's lowest member writes it again within a minute",
    "spec.json": "mend the object: it is the job file as submitted, in JSON",
}
_REMEDIES = {
    "stack/alloc": "spotkeeper repair alloc (makes it anew from the jobs' ledgers, their records and the cloud)",
    "stack/pools.json": "have it written again: pulumi up --refresh (on this machine: spotkeeper local up)",
}


class Held(Struct, Generic[T], frozen=True):
    """A document as read, with the token that a compare-and-swap of it needs."""

    value: T
    token: str


class StaticHello(Struct, frozen=True):
    """``static/<node>/<boot>``: a static node is up and has no job. Content: this struct."""

    node: str
    uid: str  # unique instance id, from the identity token
    boot: str
    zone: str
    at: float  # virtual unix seconds of the first hello of this boot


class OfferSeen(Struct, frozen=True, omit_defaults=True):
    """What was last observed of an offer, made of ``market/`` by ``market.look``. Advisory."""

    pool: str
    zone: str
    model: Model
    refused_at: float = 0.0  # virtual unix seconds; 0: never
    launched_at: float = 0.0
    lost_at: float = 0.0
    price: float | None = None  # USD per machine-hour, where a market tells more than the stack file
    guess: Guess | None = None  # of spot: the cloud's own
    watch: Watch | None = None  # of a spot offer: how it was there, and how long
    boot_s: float | None = None  # from the order to the hello, as machines of the pool have it


class Store(Protocol):
    """The bucket of one stack."""

    def until(self, deadline: Deadline) -> Store:
        """This bucket for one request: what is asked of it after that is not asked (:class:`StoreError`).

        What is asked before may take ``deadline.CALL_S`` longer.
        """

    # -- the record of a job: jobs/<job>/rec
    def read_record(self, job: str) -> Held[Record] | None: ...

    def create_record(self, record: Record) -> bool:
        """Create-only. True also where the object there carries this record's nonce."""

    def cas_record(self, record: Record, token: str) -> str | None:
        """Replace the record read with ``token``. The new token, or None: somebody else was first."""

    # -- facts: jobs/<job>/facts/<key>, the key is the content
    def list_facts(self, job: str) -> tuple[Fact, ...]:
        """All of them, in the order of their keys. Keys that make no sense are skipped."""

    def facts_of(self, job: str, uid: str) -> tuple[Fact, ...]:
        """Those of one machine: one page of a listing, however large the gang."""

    def put_fact(self, job: str, fact: Fact) -> bool:
        """Create-only. True where it is new."""

    def delete_facts(self, job: str, facts: tuple[Fact, ...]) -> None:
        """Missing ones are no error."""

    # -- stack/alloc
    def read_alloc(self) -> Held[Alloc]:
        """An empty document with the token ``""`` where there is none yet."""

    def cas_alloc(self, alloc: Alloc, token: str) -> str | None:
        """As :meth:`cas_record`; the token ``""`` means create."""

    # -- asks: jobs/<job>/ask/<id>
    def list_asks(self, job: str) -> tuple[Ask, ...]:
        """By time, then id."""

    def put_ask(self, job: str, ask: Ask) -> bool:
        """Create-only."""

    def delete_ask(self, job: str, ask_id: str) -> None: ...

    # -- active/<job>
    def active_jobs(self) -> tuple[str, ...]: ...

    def set_active(self, job: str, since: float | None = None) -> None:
        """Create-only. ``since``: of a submission, when it began."""

    def active_since(self, job: str) -> float | None:
        """When its submission began; None where the marker does not say, or is not there."""

    def clear_active(self, job: str) -> None: ...

    # -- jobs/<job>/lease: {nonce, until, due}. Saves money, carries no safety
    def take_lease(self, job: str, nonce: str, now: float, ttl_s: float) -> bool:
        """True when it was free, past its ``until``, or ours."""

    def drop_lease(self, job: str, nonce: str, due: float | None) -> None:
        """Give it back (no error when it is no longer ours) and note when time alone makes a round worthwhile."""

    def read_due(self, job: str) -> float | None:
        """What the last :meth:`drop_lease` noted; while it is held, when its holder must have renewed it.

        None: nothing is waiting for the clock.
        """

    # -- jobs/<job>/ledger/<time>.<id>
    def append_ledger(self, job: str, entry: Entry) -> bool:
        """Create-only by (time, id). Readers take the first entry of an id."""

    def append_all(self, job: str, entries: Sequence[Entry]) -> None:
        """As :meth:`append_ledger`, for all of them at once."""

    def list_ledger(self, job: str) -> tuple[Entry, ...]:
        """By time, then id."""

    # -- documents written by others
    def read_stack(self) -> StackState | None:
        """``stack/pools.json``."""

    def draining(self) -> bool:
        """Whether ``stack/drain`` is there: the stack is being destroyed, nothing may be inserted."""

    # -- jobs/<job>/spec.json as submitted; spec-<sha256>.json: one that a resume brought (Record.spec_key)
    def read_spec(self, job: str, sha256: str = "") -> JobSpec | None: ...

    def put_spec(self, job: str, spec: JobSpec, sha256: str = "") -> None: ...

    def read_progress(self, job: str) -> Progress | None: ...

    def put_progress(self, job: str, progress: Progress) -> None: ...

    # -- static/<node>/<boot>
    def list_static_hellos(self) -> tuple[StaticHello, ...]: ...

    def put_static_hello(self, hello: StaticHello) -> bool:
        """Create-only. An implementation drops older boots of the same node."""

    # -- market/...: advisory, and never needed for a decision
    def read_prices(self, pools: tuple[str, ...]) -> dict[str, Held[Prices]]:
        """``market/prices/<pool>`` of these pools, where there is one."""

    def cas_prices(self, prices: Prices, token: str) -> str | None:
        """The new token, or None: somebody else was first. The token ``""`` means create."""

    def read_sights(self, pools: tuple[str, ...], hours: tuple[int, ...]) -> dict[str, tuple[Sight, ...]]:
        """What machines of these pools lived through in these hours (since 1970); by pool, by time."""

    def add_sights(self, pool: str, hour: int, sights: tuple[Sight, ...]) -> bool:
        """Add to ``market/hours/<pool>/<hour>`` what is not there yet. False: others wrote all the time.

        A new hour's first writer drops the hours that are older than ``HOURS_KEPT``.
        """

    # -- tomb/<job>, names/<name>, quarantine/<hash>
    def put_tomb(self, job: str, at: float) -> None: ...

    def read_tomb(self, job: str) -> float | None: ...

    def read_name(self, name: str) -> str | None:
        """The job id a name points to."""

    def put_name(self, name: str, job: str) -> bool:
        """Create-only."""

    def delete_name(self, name: str, job: str) -> None:
        """Only where it points to this job."""

    def quarantine(self, text: str) -> None:
        """Keep something that made no sense, by its hash, capped in size and number."""

    # -- anything else (sources, bundles, logs), by its path in the bucket
    def get(self, path: str) -> bytes | None: ...

    def get_all(self, paths: tuple[str, ...]) -> tuple[bytes | None, ...]:
        """Several small ones at once, in their order."""

    def part(self, path: str, start: int, size: int) -> bytes | None:
        """Of something large: up to ``size`` bytes from ``start`` on, which lies within it."""

    def put(self, path: str, data: bytes) -> None: ...

    def delete(self, path: str) -> None:
        """Missing is no error."""

    def list(self, prefix: str) -> tuple[str, ...]:
        """Paths under a prefix, sorted."""

    def newest(self, folder: str, most: int) -> tuple[str, ...]:
        """Of the paths in a folder so many that were written last, the newest first."""
