"""What a decision is made from: plain values, read in the order the nine rules ask for.

No I/O and no clock. :class:`Seen` is the snapshot; :class:`View` answers questions about it
("is the machine of this slot there?") and is where "a zone that did not answer proves nothing" lives.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

from msgspec import Struct
from msgspec.structs import replace

from spotkeeper.reconcile.store_api import OfferSeen, StaticHello
from spotkeeper.spec import names
from spotkeeper.spec.cloud import Class, CreateDisk, Disk, InsertVm, Listing, Ran, Result, Vm, VmStatus
from spotkeeper.spec.facts import Fact, Kind
from spotkeeper.spec.generation import Progress
from spotkeeper.spec.job import Ask, JobSpec
from spotkeeper.spec.record import Alloc, Grant, Record, Slot, SlotState
from spotkeeper.spec.stack import Fallback, StackState

T = TypeVar("T")
Commit = tuple[int, int]  # generation, step
BROKEN = (VmStatus.DEAD, VmStatus.REPAIRING)  # listed, and nothing of ours runs there


class Times(Struct, frozen=True):
    """How long things may take, virtual seconds. Defaults are those of a real cloud."""

    cold_s: float = 180.0  # a refused offer is not asked again before (as Karpenter's)
    quota_s: float = 300.0
    margin_s: float = 10.0  # between the end of a save and a notice's deadline
    save_s: float = 20.0  # where none was measured yet
    stop_s: float = 60.0  # a stop without a notice may take this long beyond the save
    stopping_s: float = 25.0  # a machine found stopping without a notice: GCE gives it 30 s
    roll_s: float = 60.0  # to answer a roll call
    silence_s: float = 180.0  # no progress for three reports
    free_s: float = 20.0  # a superseded machine may take this long to unmount before it is deleted
    disk_s: float = 300.0  # a gang waits this long for all of its disks, then the newest known commit will do
    static_s: float = 120.0  # a granted static node must say hello
    dry_s: float = 300.0  # a gang that waits this long for capacity moves to another zone
    copy_s: float = 300.0  # disks follow to another zone by snapshots: what that takes beside a start
    gang_s: float = 600.0  # machines of a gang wait this long for the rest, then they are given back
    bout_s: float = 1800.0  # on-demand, before spot is tried again
    window_s: float = 3600.0  # losses within it count towards a bout
    losses: int = 3  # this many beyond one per rank
    short_life_s: float = 600.0  # a spot machine that lived shorter was not worth its restart
    short_lives: int = 3
    shrink_s: float = 60.0  # an elastic job waits this long for the missing before it goes on smaller
    settle_s: float = 60.0  # a generation is left alone this long before a wish disturbs it
    hold_s: float = 1800.0
    soon_s: float = 2.0  # when a cloud is expected to have moved on
    swaps_hour: int = 2  # of stragglers, for the whole job
    launches_rank: int = 12  # machines for a rank within an hour: more is no market, it is a fault
    launches_job: int = 3  # and for the whole job: this many a rank beyond that
    breaker_s: float = 120.0  # no replacements for so long when too many vanish at once
    breaker_window_s: float = 60.0  # "at once"
    work_s: float = 0.0  # a boot's own work, where the clock runs faster than that

    def under(self, fallback: Fallback) -> Times:
        """With the stack's own rules for on-demand bouts."""
        return replace(
            self,
            losses=fallback.losses,
            window_s=fallback.window_s,
            short_life_s=fallback.short_life_s,
            short_lives=fallback.short_lives,
            bout_s=fallback.bout_s,
        )

    def scaled(self, scale: float) -> Times:
        """The same for a scaled clock: what waits for real work (processes, saves) keeps its real seconds.

        On one machine with a clock 30 times as fast, 60 virtual seconds are two real ones, too short for
        a busy agent to answer a roll call.
        """
        extra = max(0.0, scale - 1.0)
        return replace(
            self,
            margin_s=self.margin_s + 1.0 * extra,
            save_s=self.save_s + 1.0 * extra,
            stop_s=self.stop_s + 10.0 * extra,
            roll_s=self.roll_s + 10.0 * extra,
            silence_s=self.silence_s + 30.0 * extra,
            free_s=self.free_s + 2.0 * extra,
            static_s=self.static_s + 20.0 * extra,
            soon_s=self.soon_s + 0.3 * extra,
            work_s=self.work_s + 60.0 * extra,
        )


@dataclass(frozen=True)
class Seen:
    """Everything a pass looks at, read record first, then facts and allocation, then the cloud."""

    stack: StackState
    spec: JobSpec | None  # None: the record was made by the sweep, or the object is gone
    listing: Listing
    now: float  # virtual unix seconds
    facts: tuple[Fact, ...] = ()
    asks: tuple[Ask, ...] = ()
    files: Mapping[str, JobSpec] = field(default_factory=dict)  # job files that asks bring, by their hash
    results: tuple[Result, ...] = ()  # of calls made in this round; the listing carries those of earlier ones
    alloc: Alloc = field(default_factory=Alloc)
    hellos: tuple[StaticHello, ...] = ()
    market: tuple[OfferSeen, ...] = ()
    progress: Progress | None = None
    save_s: float | None = None  # measured, virtual seconds
    step_s: float | None = None  # the usual time of a step, virtual seconds
    left_s: float | None = None  # of its work, by its steps and their measured time, virtual seconds
    begin_s: float | None = None  # from a generation to its first step, as measured, virtual seconds
    draining: bool = False
    blind: bool = False  # the allocation cannot be read (`alloc` is empty then): nothing is granted or given back
    grants_first: bool = True  # False after a lost race for the allocation: what was decided must not wait for it
    times: Times = field(default_factory=Times)


class View:
    """Answers about one job's machines, disks and reports in one snapshot."""

    def __init__(self, record: Record, seen: Seen) -> None:
        self.seen = seen
        self.job = record.job
        self.answered = seen.listing.answered
        self.complete = set(seen.stack.zones()) <= seen.listing.answered
        self.vms = _group((vm.rank, vm.attempt, vm) for vm in seen.listing.vms if vm.job == record.job)
        self.nodes = {vm.name: vm for vm in seen.listing.vms if vm.job == ""}
        self.disks = _group((disk.rank, disk.number, disk) for disk in seen.listing.disks if disk.job == record.job)
        self._by: dict[tuple[int, int, str | None, str | None], list[Fact]] = {}
        self._kinds = {fact.kind for fact in seen.facts}
        self.facts = _group((fact.rank, fact.attempt, fact) for fact in seen.facts)
        self.results = (*seen.listing.results, *seen.results)
        self.snapshots = {(s.rank, s.number): s for s in seen.listing.snapshots if s.job == record.job}
        self.inserts = {
            (r.action.rank, r.action.attempt): r
            for r in self.results
            if isinstance(r.action, InsertVm) and r.action.job == record.job
        }
        self.creates = {
            (r.action.rank, r.action.number): r
            for r in self.results
            if isinstance(r.action, CreateDisk) and r.action.job == record.job
        }

    # -- machines

    @property
    def boot_s(self) -> float:
        """From an intent to its hello at the latest, virtual seconds."""
        return self.seen.stack.boot_deadline_s + self.seen.times.work_s

    def vm(self, rank: int, slot: Slot) -> Vm | None:
        """The slot's machine as listed. Another unique id or another zone is not ours (rule 6)."""
        if slot.node is not None:
            found = self.nodes.get(slot.node)
            return found if found and slot.uid in (None, found.uid) else None
        for vm in self.vms.get((rank, slot.attempt), ()):
            if vm.zone == slot.zone and slot.uid in (None, vm.uid):
                return vm
        return None

    @cached_property
    def ran(self) -> Mapping[tuple[int, int], Ran]:
        """When machines of the job that are listed no more were on, by rank and attempt."""
        found: dict[tuple[int, int], Ran] = {}
        for ran in self.seen.listing.ran:
            owned = names.parse_vm_name(ran.name)
            if owned is not None and owned.job == self.job:
                found[owned.rank, owned.number] = ran
        return found

    def running(self, rank: int, slot: Slot) -> bool:
        vm = self.vm(rank, slot)
        return vm is not None and vm.status is VmStatus.RUNNING

    def gone(self, rank: int, slot: Slot) -> bool:
        """An admitted machine that trains no more. Only an answered zone proves it."""
        if slot.node is not None and self.removed(slot.node):
            return True
        if slot.zone not in self.answered:
            return False
        if slot.node is not None and self.said(rank, slot, Kind.DROPPED):
            return True
        vm = self.vm(rank, slot)
        if vm is None or vm.status in BROKEN:
            return True
        if vm.status is VmStatus.STOPPING:  # it may still be saving
            return slot.notice is not None and self.seen.now > slot.notice + self.seen.times.margin_s
        return False

    def removed(self, node: str) -> bool:
        """A static node that the stack declares no more and that is not listed: it will never give its word.

        Its zone may have left the stack with it, so the whole answer must be there.
        """
        declared = any(one.name == node for pool in self.seen.stack.pools for one in pool.nodes)
        return not declared and self.complete and node not in self.nodes

    def stillborn(self, rank: int, slot: Slot) -> str | None:
        """Why an intent will come to nothing, or None: dead at birth, its key used up, or no hello in time."""
        vm = self.vm(rank, slot)
        if vm is not None and slot.node is None and vm.status in (VmStatus.STOPPING, *BROKEN):
            return "died before its hello"
        result = self.insert_result(rank, slot)
        if result is not None and result.kind is Class.DEAD_KEY:
            return "its idempotency key is used up"
        limit = self.seen.times.static_s if slot.node else self.boot_s
        if self.seen.now > slot.since + limit:
            return "no hello in time"
        if slot.node is not None and any(
            fact.kind is Kind.DROPPED for fact in self.facts.get((rank, slot.attempt), ())
        ):
            return "the node dropped it"
        return None

    def insert_result(self, rank: int, slot: Slot) -> Result | None:
        return None if slot.node is not None else self.inserts.get((rank, slot.attempt))

    # -- reports

    def by(self, rank: int, slot: Slot) -> list[Fact]:
        """Facts of the admitted machine and boot, nobody else's. Asked a dozen times a pass: sorted out once."""
        key = rank, slot.attempt, slot.uid, slot.boot
        found = self._by.get(key)
        if found is None:
            every = self.facts.get((rank, slot.attempt), ())
            self._by[key] = found = [f for f in every if f.uid == slot.uid and f.boot == slot.boot]
        return found

    def said(self, rank: int, slot: Slot, kind: Kind, gen: int | None = None) -> list[Fact]:
        if kind not in self._kinds:  # in a quiet gang nobody said anything of most kinds
            return []
        return [f for f in self.by(rank, slot) if f.kind is kind and (gen is None or f.gen == gen)]

    def every(self, kind: Kind) -> list[Fact]:
        """What any machine of the job said of this, also one that is given up by now."""
        return [f for facts in self.facts.values() for f in facts if f.kind is kind] if kind in self._kinds else []

    def hello(self, rank: int, slot: Slot) -> tuple[Vm, Fact] | None:
        """A hello of a machine that is listed running, from a boot that was not admitted before."""
        vm = self.vm(rank, slot)
        if vm is None or vm.status is not VmStatus.RUNNING:
            return None
        for fact in self.facts.get((rank, slot.attempt), ()):
            fresh = fact.boot != slot.boot and fact.boot not in slot.past
            if fact.kind is Kind.HELLO and fact.uid == vm.uid and fresh:
                return vm, fact
        return None

    def notice(self, rank: int, slot: Slot) -> float | None:
        """The deadline of the earliest notice that was not withdrawn; a machine found stopping has one of its own."""
        deadlines = self._notices(rank, slot)
        if deadlines:
            return min(deadlines)
        vm = self.vm(rank, slot)
        if vm is not None and vm.status is VmStatus.STOPPING and slot.zone in self.answered:
            return slot.notice if slot.notice is not None else self.seen.now + self.seen.times.stopping_s
        return None

    def warned(self, rank: int, slot: Slot) -> bool:
        """Whether it was known before, by its agent's notice or its planned end, that it would go."""
        return bool(self._notices(rank, slot))

    def _notices(self, rank: int, slot: Slot) -> list[float]:
        taken_back = {f.value for f in self.said(rank, slot, Kind.REPRIEVE)}
        # A planned end that was made a notice (``ends``) stands: nobody takes it back.
        ends = [slot.ends] if slot.ends is not None and slot.ends == slot.notice else []
        return ends + [float(f.value) for f in self.said(rank, slot, Kind.NOTICE) if f.value not in taken_back]

    def ended(self, rank: int, slot: Slot, gen: int) -> bool:
        """Its processes of this generation have ended, after a save or by themselves."""
        return any(self.said(rank, slot, kind, gen) for kind in (Kind.RELEASED, Kind.EXIT))

    # -- disks

    def disk(self, rank: int, number: int, zone: str) -> Disk | None:
        return next((disk for disk in self.disks.get((rank, number), ()) if disk.zone == zone), None)

    def attached(self, rank: int, number: int, slot: Slot) -> bool:
        """Whether the rank's disk is on this machine. A static node trains on its own."""
        if slot.node is not None:
            return True
        if slot.zone not in self.answered:
            return any(f.value == str(number) for f in self.said(rank, slot, Kind.ATTACHED))
        disk = self.disk(rank, number, slot.zone)
        return disk is not None and self.vm_name(rank, slot) in disk.users

    def unmountable(self, rank: int, number: int, slot: Slot) -> str | None:
        """Why this machine cannot mount the rank's disk (a static node: its own), if it says so and has not since."""
        mine = 0 if slot.node is not None else number
        words = [f.value.partition("-") for f in self.said(rank, slot, Kind.NO_DISK)]
        if not words or any(f.value == str(mine) for f in self.said(rank, slot, Kind.ATTACHED)):
            return None
        return next((word for told, _, word in words if told == str(mine)), None)

    def holds(self, rank: int, slot: Slot) -> Commit | None:
        """The newest complete checkpoint that this machine reported on its mounted disk."""
        found = [parse_commit(f.value) for f in self.said(rank, slot, Kind.HOLDS)]
        return max((commit for commit in found if commit), default=None)

    @cached_property
    def newest_held(self) -> Commit | None:
        """The newest commit that any machine of the job reported, also one that is given up by now."""
        every = (f for facts in self.facts.values() for f in facts if f.kind is Kind.HOLDS)
        return max((commit for fact in every if (commit := parse_commit(fact.value))), default=None)

    def vm_name(self, rank: int, slot: Slot) -> str:
        return slot.node or names.vm_name(self.seen.stack.stack, self.job, rank, slot.attempt)

    def disk_name(self, rank: int, number: int) -> str:
        return names.disk_name(self.seen.stack.stack, self.job, rank, number)

    def vms_of(self, rank: int) -> list[Vm]:
        """Every machine of the rank that is listed, whatever its attempt: any of them may still write."""
        return self._by_rank.get(rank, [])

    @cached_property
    def _by_rank(self) -> dict[int, list[Vm]]:
        out: dict[int, list[Vm]] = defaultdict(list)
        for (rank, _), vms in self.vms.items():
            out[rank] += vms
        return out

    # -- grants

    def grant(self, rank: int, attempt: int) -> Grant | None:
        return self._grants.get((rank, attempt))

    def own_grants(self) -> list[Grant]:
        return [grant for grant in self.seen.alloc.grants if grant.job == self.job]

    @cached_property
    def _grants(self) -> dict[tuple[int, int], Grant]:
        return {(grant.rank, grant.attempt): grant for grant in reversed(self.own_grants())}


def parse_commit(text: str) -> Commit | None:
    gen, _, step = text.partition("-")
    return (int(gen), int(step)) if gen.isdigit() and step.isdigit() else None


def admitted(slot: Slot | None) -> bool:
    return slot is not None and slot.state is not SlotState.INTENT


def _group(rows: Iterable[tuple[int, int, T]]) -> dict[tuple[int, int], list[T]]:
    out: dict[tuple[int, int], list[T]] = defaultdict(list)
    for rank, number, thing in rows:
        out[rank, number].append(thing)
    return out
