"""The interface between reconcile and a cloud, the same for every provider.

``decide()`` takes a :class:`Listing` and :class:`Result` values and returns
:data:`Action` values; an adapter (``reconcile/clouds/gce/cloud.py``, ``reconcile/clouds/ec2/cloud.py``)
implements :class:`Cloud` and nothing more.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import Protocol, Union, runtime_checkable

from msgspec import Struct

from spotkeeper.contract.market import Chances, PriceRun
from spotkeeper.contract.stack import Model


class VmStatus(str, Enum):
    """The state of a listed machine. A PENDING machine can fail to run: without capacity it vanishes after seconds."""

    PENDING = "pending"
    RUNNING = "running"
    STOPPING = "stopping"  # may still write
    REPAIRING = "repairing"  # its host failed: nothing runs there until the cloud repairs it
    DEAD = "dead"  # listed, stopped for good


class Vm(Struct, frozen=True, gc=False):
    name: str
    uid: str
    zone: str
    status: VmStatus
    pool: str
    job: str  # "" for a static machine
    node: int
    attempt: int
    address: str
    disks: tuple[str, ...] = ()  # names of the attached data disks
    model: Model = Model.SPOT
    created: float = 0.0
    ends: float | None = None  # when the cloud ends it by its maxRunDuration; None: never, or unknown
    reservation: str | None = None  # the reserved capacity that its launch named


class Disk(Struct, frozen=True, gc=False):
    name: str
    zone: str
    job: str
    node: int
    number: int
    users: tuple[str, ...] = ()  # names of the VMs that it is attached to
    ready: bool = True


NAMED = 8  # number of disks that a message names


def disks_kept(names: Iterable[str]) -> str:
    """Return the text about kept disks for the ledger and for alarms; "" if there are none."""
    known = sorted(names)
    if not known:
        return ""
    more = f" and {len(known) - NAMED} more" if len(known) > NAMED else ""
    return f"{len(known)} disk{'s' * (len(known) > 1)} kept and billed: {', '.join(known[:NAMED])}{more}"


class DiskSnapshot(Struct, frozen=True):
    name: str  # of the disk that will be created from it
    job: str
    node: int
    number: int
    ready: bool
    gb: float = 0.0  # what it stores, and what a copy of it in another region transfers; 0: unknown
    # Where it is stored -> whether it is complete there. {}: unknown; a disk in any region can be made of it.
    regions: dict[str, bool] = {}

    def in_region(self, region: str) -> bool:
        """Return whether a complete snapshot is stored in this region, as far as is known."""
        return self.regions.get(region, not self.regions and self.ready)


class MachineTimes(Struct, frozen=True, gc=False):
    """When the cloud started and ended a machine that it no longer lists; 0: unknown. Used only in the ledger."""

    name: str
    zone: str
    started: float = 0.0
    ended: float = 0.0


class Listing(Struct, frozen=True):
    """The cloud's machines and disks. A machine counts as absent only if its zone answered."""

    vms: tuple[Vm, ...]
    disks: tuple[Disk, ...]
    snapshots: tuple[DiskSnapshot, ...] = ()
    answered: frozenset[str] = frozenset()
    results: tuple[Result, ...] = ()  # of calls whose operation has ended meanwhile (found by idempotency key)
    ran: tuple[MachineTimes, ...] = ()  # machines that ended recently, as far as known


class InsertVm(Struct, frozen=True, tag=True):
    job: str
    uid: str  # the job's
    node: int
    attempt: int
    pool: str
    zone: str
    model: Model
    reservation: str | None = None  # the reserved capacity to use


class DeleteVm(Struct, frozen=True, tag=True):
    """Delete a machine by its unique id, since a newer machine can have the same name."""

    name: str
    uid: str
    zone: str


class CreateDisk(Struct, frozen=True, tag=True):
    job: str
    uid: str
    node: int
    number: int
    pool: str
    zone: str
    snapshot: str | None = None  # name of the snapshot to fill it from
    more_gb: int = 0  # added to the pool's size of a disk


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
    node: int
    number: int  # of the disk
    zone: str
    copy: int = 0  # number of the disk to create from the snapshot; part of the snapshot's name
    region: str = ""  # where to store it; "": where the cloud does by itself


class DeleteSnapshot(Struct, frozen=True, tag=True):
    name: str


Action = Union[InsertVm, DeleteVm, CreateDisk, AttachDisk, DetachDisk, DeleteDisk, CreateSnapshot, DeleteSnapshot]


class ResultKind(str, Enum):
    """The meaning of the answer to a cloud call, and the reaction to it; the same for every provider."""

    ACCEPTED = "accepted"
    CAPACITY = "capacity"  # no machine available: try another offer
    QUOTA = "quota"  # over the account's quota: back off for long, tell the user
    THROTTLED = "throttled"  # too many calls: stop calling, keep the intents
    DEAD_KEY = "dead_key"  # the machine of this idempotency key is gone: use the next attempt number
    IN_USE = "in_use"  # the object is in use: wait, list again
    AMBIGUOUS = "ambiguous"  # timeout or 5xx: the next round lists, then repeats the call
    PERMANENT = "permanent"  # a retry cannot help: hold the job, raise one alarm


class Result(Struct, frozen=True):
    """The outcome of an action, from the answer to the call or found later in the cloud's list of operations."""

    action: Action
    kind: ResultKind
    detail: str = ""
    at: float = 0.0


class Offer(Struct, frozen=True):
    """A machine that can be requested now; ``price`` in USD per machine-hour."""

    pool: str
    zone: str
    model: Model
    price: float
    machine: str | None = None  # a static machine's name
    reservation: str | None = None  # the name of reserved capacity

    def key(self) -> str:
        name = self.machine or self.reservation
        return f"{self.pool}/{self.zone}/{self.model.value}" + (f"/{name}" if name else "")


class Cloud(Protocol):
    """A cloud. Every call has a deadline. Only EC2 calls with a client token are retried when their answer is lost."""

    def list(self, stack: str) -> Listing:
        """List the stack's machines and disks, found by label. A zone that fails is missing from ``answered``."""

    def price_history(self, pool: str, deadline_s: float) -> tuple[PriceRun, ...] | None:
        """Return the pool's spot prices over time; None if they are unknown for any reason. Never raises."""

    def perform(self, action: Action, deadline_s: float) -> Result:
        """Make one call and return its result. Never raises, whatever the cloud answers."""


@runtime_checkable
class Guesses(Protocol):
    """A cloud that estimates the availability of its spot machines."""

    def chances(self, pool: str, deadline_s: float) -> Chances | None:
        """Return a guess for each zone: can the pool's ``max_machines`` start now, and how long would they run?

        None: unknown. ``deadline_s``: the longest wait for the cloud's answers, real seconds.
        """


def chances_of(cloud: Cloud, pool: str, deadline_s: float) -> Chances | None:
    return cloud.chances(pool, deadline_s) if isinstance(cloud, Guesses) else None
