"""The input of a decision: plain values, read in the order of rule 3 (``docs/protocol.md``). No I/O, no clock.

:class:`Snapshot` has the values. :class:`Queries` answers questions about them ("is this slot's machine gone?"), and
treats a zone that did not answer as unknown.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

from msgspec import Struct
from msgspec.structs import replace

from spotkeeper.contract import names
from spotkeeper.contract.allocation import Allocation, Grant
from spotkeeper.contract.cloud import (
    CreateDisk,
    Disk,
    InsertVm,
    Listing,
    MachineTimes,
    Offer,
    Result,
    ResultKind,
    Vm,
    VmStatus,
)
from spotkeeper.contract.facts import BucketCopy, Commit, Fact, Kind, parse_commit
from spotkeeper.contract.generation import Progress
from spotkeeper.contract.job import JobRequest, JobSpec
from spotkeeper.contract.record import Record, Slot, SlotState
from spotkeeper.contract.stack import Fallback, Model, StackState, region_of
from spotkeeper.contract.sweep import SweepState
from spotkeeper.reconcile.store.documents import OfferHistory, StaticHello

T = TypeVar("T")
FINAL = (ResultKind.PERMANENT, ResultKind.QUOTA, ResultKind.DEAD_KEY)  # refusals that a retry does not change
BROKEN = (VmStatus.DEAD, VmStatus.REPAIRING)  # listed, but nothing of the job runs there


class Times(Struct, frozen=True):
    """Time limits and counts of the protocol, virtual seconds. The defaults suit a real cloud."""

    cold_s: float = 180.0  # before a refused offer may be requested again (Karpenter's default)
    margin_s: float = 10.0  # a save ends this long before a notice's deadline
    save_s: float = 20.0  # assumed duration of a save until one is measured
    stop_s: float = 60.0  # a stop without a notice may take this long beyond the save
    stopping_s: float = 25.0  # assumed life of a machine found stopping without a notice: GCE gives it 30 s
    roll_s: float = 45.0  # to answer a roll call: above an agent's wait for the answer to a report (30 s)
    lone_roll_s: float = 30.0  # the same in a one-machine job, whose tick waits for it: two lost polls and a third
    silence_s: float = 120.0  # without progress (two missed reports) before a roll call, which costs two writes
    lone_silence_s: float = 36.0  # the same in a one-machine job, which reports twice a minute: it has no peers
    free_s: float = 20.0  # a replaced machine may take this long to unmount before it is deleted
    disk_s: float = 300.0  # a gang waits this long for all of its disks, then settles for the newest reported commit
    static_s: float = 120.0  # a granted static machine must say hello within this time
    dry_s: float = 300.0  # a gang waits this long for capacity, then moves to another zone
    copy_s: float = 300.0  # assumed time to copy disks to another zone by snapshots, on top of a start
    gang_s: float = 600.0  # a gang's machines wait this long for the rest, then are released
    fallback: Fallback = Fallback()  # the stack's rules for on-demand fallbacks
    shrink_s: float = 60.0  # an elastic job waits this long for missing nodes before it goes on smaller
    owner_s: float = 30.0  # a new job waits this long for the call that tells whose it is, if the stack has teams
    settle_s: float = 60.0  # a new generation trains at least this long before a voluntary replacement
    hold_s: float = 1800.0  # before a hold retries by itself
    sure_s: float = 3600.0  # two rounds this far apart must find a hold over before the job ends
    soon_s: float = 2.0  # before an unfinished cloud operation is checked again
    swaps_hour: int = 2  # stragglers replaced per hour, for the whole job
    launches_node: int = 12  # machines per node and hour; more means a fault, not the market
    launches_job: int = 3  # machines per hour for the whole job: launches_node plus this many per node
    breaker_s: float = 120.0  # pause of replacements after too many nodes vanish at once
    breaker_window_s: float = 60.0  # nodes that vanish within this time vanish "at once"
    work_s: float = 0.0  # extra time for a boot's real work on a scaled clock

    def silence(self, members: int) -> float:
        """Return after how long without reported progress a gang of this size gets a roll call, virtual seconds."""
        return self.silence_s if members > 1 else self.lone_silence_s

    def roll(self, members: int) -> float:
        """Return how long a gang of this size may take to answer a roll call, virtual seconds."""
        return self.roll_s if members > 1 else self.lone_roll_s

    def scaled(self, scale: float) -> Times:
        """Return these times for a scaled clock: limits on real work (processes, saves) keep enough real seconds."""
        extra = max(0.0, scale - 1.0)
        return replace(self, **{name: getattr(self, name) + real_s * extra for name, real_s in REAL_S.items()})


REAL_S = {  # real seconds of real work within each time
    "margin_s": 1.0,
    "save_s": 1.0,
    "stop_s": 10.0,
    "roll_s": 10.0,
    "lone_roll_s": 10.0,
    "silence_s": 30.0,
    "lone_silence_s": 24.0,
    "free_s": 2.0,
    "static_s": 20.0,
    "owner_s": 5.0,
    "soon_s": 0.3,
    "work_s": 60.0,
}


@dataclass(frozen=True)
class Snapshot:
    """Everything that a pass reads besides the record, which is read first."""

    stack: StackState
    spec: JobSpec | None  # None: the sweep made the record, or the object is gone
    listing: Listing
    now: float  # virtual unix seconds
    facts: tuple[Fact, ...] = ()
    requests: tuple[JobRequest, ...] = ()
    files: Mapping[str, JobSpec] = field(default_factory=dict)  # job files that requests bring, by hash
    results: tuple[Result, ...] = ()  # of this round's calls; earlier calls' results are in the listing
    allocation: Allocation = field(default_factory=Allocation)
    hellos: tuple[StaticHello, ...] = ()
    market: tuple[OfferHistory, ...] = ()
    progress: Progress | None = None
    save_s: float | None = None  # measured, virtual seconds
    step_s: float | None = None  # the usual time of a step, virtual seconds
    left_s: float | None = None  # remaining work: steps times measured step time, virtual seconds
    begin_s: float | None = None  # measured time from a generation's start to its first step, virtual seconds
    user: str = ""  # who asked for this round, as the function verified; "": nobody
    draining: bool = False
    sweep: SweepState | None = None  # what the trials of the job's search have reported; None: no trial, or unreadable
    listed: bool = True  # whether the job is no trial, or its search names it as this trial
    blind: bool = False  # the allocation is unreadable (`allocation` is empty): nothing is granted or released
    grants_first: bool = True  # False after a lost write race for the allocation: decisions do not wait for new grants
    times: Times = field(default_factory=Times)


class Queries:
    """Answers about one job's machines, disks and reports in one snapshot."""

    def __init__(self, record: Record, snapshot: Snapshot) -> None:
        listing = snapshot.listing
        self.snapshot = snapshot
        self.job = job = record.job
        self.answered = listing.answered
        self.complete = _own_zones(record, snapshot) <= listing.answered
        self.vms = _group((vm.node, vm.attempt, vm) for vm in listing.vms if vm.job == job)
        self.static_machines = {vm.name: vm for vm in listing.vms if vm.job == ""}
        self.disks = _group((disk.node, disk.number, disk) for disk in listing.disks if disk.job == job)
        self.snapshots = {(s.node, s.number): s for s in listing.snapshots if s.job == job}
        self.facts = _group((fact.node, fact.attempt, fact) for fact in snapshot.facts)
        self._by: dict[tuple[int, int, str | None, str | None], list[Fact]] = {}
        self._kinds = {fact.kind for fact in snapshot.facts}
        self.results = (*listing.results, *snapshot.results)
        self.inserts: dict[tuple[int, int], Result] = {}
        self.creates: dict[tuple[int, int], Result] = {}
        for result in self.results:
            action = result.action
            if isinstance(action, InsertVm) and action.job == job:
                self.inserts[action.node, action.attempt] = result
            elif isinstance(action, CreateDisk) and action.job == job:
                self.creates[action.node, action.number] = result

    # -- machines

    @property
    def boot_s(self) -> float:
        """Return the longest allowed time from an intent to its machine's hello, virtual seconds."""
        return self.snapshot.stack.boot_deadline_s + self.snapshot.times.work_s

    def vm(self, node: int, slot: Slot) -> Vm | None:
        """Return the slot's machine from the listing, or None.

        A machine in another zone or with another unique id is not the slot's (rule 6 of ``docs/protocol.md``).
        """
        if slot.machine is not None:
            found = self.static_machines.get(slot.machine)
            return found if found and slot.uid in (None, found.uid) else None
        for vm in self.vms.get((node, slot.attempt), ()):
            if vm.zone == slot.zone and slot.uid in (None, vm.uid):
                return vm
        return None

    @cached_property
    def ran(self) -> Mapping[tuple[int, int], MachineTimes]:
        """Return start and end of the job's machines that are no longer listed, by node and attempt."""
        found: dict[tuple[int, int], MachineTimes] = {}
        for ran in self.snapshot.listing.ran:
            owned = names.parse_vm_name(ran.name)
            if owned is not None and owned.job == self.job:
                found[owned.node, owned.number] = ran
        return found

    def running(self, node: int, slot: Slot) -> bool:
        vm = self.vm(node, slot)
        return vm is not None and vm.status is VmStatus.RUNNING

    def gone(self, node: int, slot: Slot) -> bool:
        """Whether an admitted machine is gone or broken; False (unknown) if its zone did not answer.

        A static machine that dropped the attempt counts as gone, and so does a machine that is still stopping after the
        deadline of its notice.
        """
        if slot.machine is not None and self.removed(slot.machine):
            return True
        if slot.zone not in self.answered:
            return False
        if slot.machine is not None and self.said(node, slot, Kind.DROPPED):
            return True
        vm = self.vm(node, slot)
        if vm is None or vm.status in BROKEN:
            return True
        if vm.status is VmStatus.STOPPING:  # it may still be saving
            return slot.notice is not None and self.snapshot.now > slot.notice + self.snapshot.times.margin_s
        return False

    def removed(self, machine: str) -> bool:
        """Whether a static machine is neither declared nor listed any more, so that it will never report.

        Its zone can be removed from the stack too, so only a listing in which all zones answered proves this.
        """
        declared = any(one.name == machine for pool in self.snapshot.stack.pools for one in pool.machines)
        return not declared and self.complete and machine not in self.static_machines

    def stillborn(self, node: int, slot: Slot) -> str | None:
        """Return why an intent has failed (machine dead, idempotency key refused, no hello in time); else None."""
        vm = self.vm(node, slot)
        if vm is not None and slot.machine is None and vm.status in (VmStatus.STOPPING, *BROKEN):
            return "died before its hello"
        result = self.insert_result(node, slot)
        if result is not None and result.kind is ResultKind.DEAD_KEY:
            return "the cloud no longer accepts the idempotency key of its request"
        limit = self.snapshot.times.static_s if slot.machine else self.boot_s
        if self.snapshot.now > slot.since + limit:
            return "no hello in time"
        if slot.machine is not None and any(
            fact.kind is Kind.DROPPED for fact in self.facts.get((node, slot.attempt), ())
        ):
            return "the static machine dropped the attempt"
        return None

    def insert_result(self, node: int, slot: Slot) -> Result | None:
        return None if slot.machine is not None else self.inserts.get((node, slot.attempt))

    # -- reports

    def by(self, node: int, slot: Slot) -> list[Fact]:
        """Return the facts of a slot's admitted machine and boot. Cached, since a pass needs them a dozen times."""
        key = node, slot.attempt, slot.uid, slot.boot
        found = self._by.get(key)
        if found is None:
            every = self.facts.get((node, slot.attempt), ())
            self._by[key] = found = [f for f in every if f.uid == slot.uid and f.boot == slot.boot]
        return found

    def said(self, node: int, slot: Slot, kind: Kind, gen: int | None = None) -> list[Fact]:
        if kind not in self._kinds:  # fast path: most kinds have no fact
            return []
        return [f for f in self.by(node, slot) if f.kind is kind and (gen is None or f.gen == gen)]

    def every(self, kind: Kind) -> list[Fact]:
        """Return the facts of this kind from all machines of the job, superseded ones included."""
        return [f for facts in self.facts.values() for f in facts if f.kind is kind] if kind in self._kinds else []

    def hello(self, node: int, slot: Slot) -> tuple[Vm, Fact] | None:
        """Return the slot's machine and its hello, if the machine runs and this boot was not admitted before."""
        vm = self.vm(node, slot)
        if vm is None or vm.status is not VmStatus.RUNNING:
            return None
        for fact in self.facts.get((node, slot.attempt), ()):
            fresh = fact.boot != slot.boot and fact.boot not in slot.past
            if fact.kind is Kind.HELLO and fact.uid == vm.uid and fresh:
                return vm, fact
        return None

    def notice(self, node: int, slot: Slot) -> float | None:
        """Return when the machine goes, virtual unix seconds: the earliest deadline of its notices; None: no notice.

        A machine listed as stopping without a notice goes at the deadline in the record, or if that has none, after
        ``Times.stopping_s``.
        """
        deadlines = self._notices(node, slot)
        if deadlines:
            return min(deadlines)
        vm = self.vm(node, slot)
        if vm is not None and vm.status is VmStatus.STOPPING and slot.zone in self.answered:
            return slot.notice if slot.notice is not None else self.snapshot.now + self.snapshot.times.stopping_s
        return None

    def warned(self, node: int, slot: Slot) -> bool:
        """Whether a notice from the agent or a planned end has announced that the slot's machine will go."""
        return bool(self._notices(node, slot))

    def _notices(self, node: int, slot: Slot) -> list[float]:
        taken_back = {f.value for f in self.said(node, slot, Kind.REPRIEVE)}
        # A planned end that became a notice (``ends``) is never withdrawn.
        ends = [slot.ends] if slot.ends is not None and slot.ends == slot.notice else []
        return ends + [float(f.value) for f in self.said(node, slot, Kind.NOTICE) if f.value not in taken_back]

    def ended(self, node: int, slot: Slot, gen: int) -> bool:
        """Whether the machine's processes of this generation have ended, after a save or by themselves."""
        return any(self.said(node, slot, kind, gen) for kind in (Kind.RELEASED, Kind.EXIT))

    # -- disks

    def disk(self, node: int, number: int, zone: str) -> Disk | None:
        return next((disk for disk in self.disks.get((node, number), ()) if disk.zone == zone), None)

    def attached(self, node: int, number: int, slot: Slot) -> bool:
        """Whether the node's disk is attached to this machine; always true for a static machine, which uses its own."""
        if slot.machine is not None:
            return True
        if slot.zone not in self.answered:
            return any(f.value == str(number) for f in self.said(node, slot, Kind.ATTACHED))
        disk = self.disk(node, number, slot.zone)
        return disk is not None and self.vm_name(node, slot) in disk.users

    def unmountable(self, node: int, number: int, slot: Slot) -> str | None:
        """Return why this machine cannot mount the node's disk (a static machine: its own); None if it can."""
        mine = 0 if slot.machine is not None else number
        words = [f.value.partition("-") for f in self.said(node, slot, Kind.NO_DISK)]
        if not words or any(f.value == str(mine) for f in self.said(node, slot, Kind.ATTACHED)):
            return None
        return next((word for told, _, word in words if told == str(mine)), None)

    def fetched(self, node: int, slot: Slot, commit: str) -> BucketCopy | None:
        """Return what a machine reports of its download of this checkpoint; None: nothing yet."""
        told = (BucketCopy.parse(fact.value) for fact in self.said(node, slot, Kind.FETCHED))
        return next((one for one in told if one is not None and one.commit == commit), None)

    def checkpoint(self, node: int, slot: Slot) -> Commit | None:
        """Return the newest complete checkpoint that this machine reported on its mounted disk, or None."""
        found = [parse_commit(f.value) for f in self.said(node, slot, Kind.CHECKPOINT)]
        return max((commit for commit in found if commit), default=None)

    @cached_property
    def newest_reported(self) -> Commit | None:
        """Return the newest commit that any machine of the job reported, superseded ones included, or None."""
        commits = (parse_commit(fact.value) for fact in self.every(Kind.CHECKPOINT))
        return max(filter(None, commits), default=None)

    def vm_name(self, node: int, slot: Slot) -> str:
        return slot.machine or names.vm_name(self.snapshot.stack.stack, self.job, node, slot.attempt)

    def disk_name(self, node: int, number: int) -> str:
        return names.disk_name(self.snapshot.stack.stack, self.job, node, number)

    def vms_of(self, node: int) -> list[Vm]:
        """Return all listed machines of a node, of any attempt: each may still write to the node's disk."""
        return self._by_node.get(node, [])

    @cached_property
    def _by_node(self) -> dict[int, list[Vm]]:
        out: dict[int, list[Vm]] = defaultdict(list)
        for (node, _), vms in self.vms.items():
            out[node] += vms
        return out

    # -- the market and grants

    def known(self, of: Offer | Slot) -> OfferHistory | None:
        """Return the market's observations of this offer, or of the slot's offer; None: unknown."""
        return self._market.get((of.pool, of.zone, of.model))

    @cached_property
    def _market(self) -> dict[tuple[str, str, Model], OfferHistory]:
        return {(one.pool, one.zone, one.model): one for one in self.snapshot.market}

    def grant(self, node: int, attempt: int) -> Grant | None:
        return self._grants.get((node, attempt))

    def own_grants(self) -> list[Grant]:
        return [grant for grant in self.snapshot.allocation.grants if grant.job == self.job]

    @cached_property
    def _grants(self) -> dict[tuple[int, int], Grant]:
        return {(grant.node, grant.attempt): grant for grant in reversed(self.own_grants())}


def _own_zones(record: Record, snapshot: Snapshot) -> set[str]:
    """Return the zones that must answer before something of the job counts as gone.

    They are those of the home region, of the job's regions, and of the regions where the record has it. So another
    region that does not answer delays no job. What a job left there, and no record tells, is deleted once it is listed.
    """
    stack, spec = snapshot.stack, snapshot.spec
    if not stack.regions or (spec is None and not record.over):
        return set(stack.zones())
    slots = [slot for node in record.nodes for slot in (node.cur, node.next) if slot is not None]
    here = record.zones() | {slot.zone for slot in slots}
    regions = {stack.region, *(spec.regions if spec else ()), *(region_of(zone) for zone in here if zone)}
    return {zone for zone in stack.zones() if region_of(zone) in regions}


def admitted(slot: Slot | None) -> bool:
    return slot is not None and slot.state is not SlotState.INTENT


def _group(rows: Iterable[tuple[int, int, T]]) -> dict[tuple[int, int], list[T]]:
    out: dict[tuple[int, int], list[T]] = defaultdict(list)
    for node, number, thing in rows:
        out[node, number].append(thing)
    return out
