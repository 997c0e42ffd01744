"""What reconcile sees of a cloud and what it asks of it: the same for every provider.

``decide()`` takes a :class:`Listing` and :class:`Result` values and returns
:data:`Action` values; an adapter (``reconcile/gce.py``, ``reconcile/ec2.py``)
implements :class:`Cloud` and nothing more.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import Protocol, Union, runtime_checkable

from msgspec import Struct

from spotkeeper.spec.market import Chances, PriceRun
from spotkeeper.spec.model import Model


class VmStatus(str, Enum):
    """PENDING is listed but proves nothing (a stockout lists a VM for seconds); only RUNNING counts."""

    PENDING = "pending"
    RUNNING = "running"
    STOPPING = "stopping"  # may still write
    REPAIRING = "repairing"  # its host failed: nothing runs there, and nobody says when anything will
    DEAD = "dead"  # listed, stopped for good


class Vm(Struct, frozen=True, gc=False):
    name: str
    uid: str
    zone: str
    status: VmStatus
    pool: str
    job: str  # "" for a static node
    rank: int
    attempt: int
    address: str
    disks: tuple[str, ...] = ()  # names of the attached data disks
    model: Model = Model.SPOT
    created: float = 0.0
    ends: float | None = None  # when the cloud ends it by its maxRunDuration; None: it does not, or did not say


class Disk(Struct, frozen=True, gc=False):
    name: str
    zone: str
    job: str
    rank: int
    number: int
    users: tuple[str, ...] = ()  # names of VMs that hold it
    ready: bool = True


NAMED = 8  # disks by name where all that stay are told of


def disks_kept(names: Iterable[str]) -> str:
    """How disks that stay are told of, in the ledger and in alarms; empty: there is none."""
    known = sorted(names)
    if not known:
        return ""
    more = f" and {len(known) - NAMED} more" if len(known) > NAMED else ""
    return f"{len(known)} disk{'s' * (len(known) > 1)} kept, which bill: {', '.join(known[:NAMED])}{more}"


class Snapshot(Struct, frozen=True):
    name: str  # that of the disk which is to be made from it
    job: str
    rank: int
    number: int
    ready: bool


class Ran(Struct, frozen=True, gc=False):
    """When a machine that is listed no more was on, as the cloud itself tells; 0: it does not. For the ledger alone."""

    name: str
    zone: str
    started: float = 0.0
    ended: float = 0.0


class Listing(Struct, frozen=True):
    """One look at the cloud. Absence proves something only in the zones that answered."""

    vms: tuple[Vm, ...]
    disks: tuple[Disk, ...]
    snapshots: tuple[Snapshot, ...] = ()
    answered: frozenset[str] = frozenset()
    results: tuple[Result, ...] = ()  # of operations that ended since (found by their idempotency key)
    ran: tuple[Ran, ...] = ()  # machines that ended lately, as far as they are known


class InsertVm(Struct, frozen=True, tag=True):
    job: str
    uid: str  # the job's
    rank: int
    attempt: int
    pool: str
    zone: str
    model: Model


class DeleteVm(Struct, frozen=True, tag=True):
    """By unique id: a name may have been taken over by a healthy machine."""

    name: str
    uid: str
    zone: str


class CreateDisk(Struct, frozen=True, tag=True):
    job: str
    uid: str
    rank: int
    number: int
    pool: str
    zone: str
    snapshot: str | None = None  # name of the snapshot to fill it from


class AttachDisk(Struct, frozen=True, tag=True):
    disk: str
    vm: str
    vm_uid: str
    zone: str


class DetachDisk(Struct, frozen=True, tag=True):
    disk: str
    vm: str
    vm_uid: str
    zone: str


class DeleteDisk(Struct, frozen=True, tag=True):
    disk: str
    zone: str


class CreateSnapshot(Struct, frozen=True, tag=True):
    job: str
    uid: str
    rank: int
    number: int  # of the disk
    zone: str
    copy: int = 0  # number of the disk that the move makes from it; it names the snapshot


class DeleteSnapshot(Struct, frozen=True, tag=True):
    name: str


Action = Union[InsertVm, DeleteVm, CreateDisk, AttachDisk, DetachDisk, DeleteDisk, CreateSnapshot, DeleteSnapshot]


class Class(str, Enum):
    """What an answer means, whatever the provider calls it."""

    ACCEPTED = "accepted"
    CAPACITY = "capacity"  # another offer
    QUOTA = "quota"  # long back-off, tell the user
    THROTTLED = "throttled"  # stop calling, keep the intents
    DEAD_KEY = "dead_key"  # this idempotency key's VM is gone: attempt + 1
    IN_USE = "in_use"  # wait, list again
    AMBIGUOUS = "ambiguous"  # timeout, 5xx: the next round lists and repeats
    PERMANENT = "permanent"  # hold, one alarm


class Result(Struct, frozen=True):
    """The outcome of an action, now or found later in the operations list."""

    action: Action
    kind: Class
    detail: str = ""
    at: float = 0.0


class Offer(Struct, frozen=True):
    """Something that can be had now; ``price`` in USD per machine-hour."""

    pool: str
    zone: str
    model: Model
    price: float
    node: str | None = None  # a static node's name

    def key(self) -> str:
        return f"{self.pool}/{self.zone}/{self.model.value}" + (f"/{self.node}" if self.node else "")


class Cloud(Protocol):
    """The verbs. Every call has a deadline; none retries by itself, but for a lost answer to one with EC2's token."""

    def list(self, stack: str) -> Listing:
        """One look over all zones of the stack, by label. A zone that fails is left out of ``answered``."""

    def price_history(self, pool: str, deadline_s: float) -> tuple[PriceRun, ...] | None:
        """What a spot machine of the pool cost and costs, by time. None: unknown, for whatever reason; never raises."""

    def perform(self, action: Action, deadline_s: float) -> Result:
        """Make one call; never raises for what a cloud can answer."""


@runtime_checkable
class Guesses(Protocol):
    """A cloud that says how likely its spot machines are to be had."""

    def chances(self, pool: str, deadline_s: float) -> Chances | None:
        """As the cloud guesses for all of the pool's machines at once. None: unknown, for whatever reason."""


def chances_of(cloud: Cloud, pool: str, deadline_s: float) -> Chances | None:
    return cloud.chances(pool, deadline_s) if isinstance(cloud, Guesses) else None
