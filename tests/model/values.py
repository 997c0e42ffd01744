"""The values a modelled world is made of, and what the shipped code is shown of them.

Everything is small and hashable; equal worlds are the same world. Times have no place here: a record is kept
without the moments written in it, and which deadlines have passed is chosen at each look (``Moment``).
"""

from __future__ import annotations

from enum import Enum, IntEnum
from functools import lru_cache
from typing import Any, Generic, NamedTuple, TypeVar

from msgspec.structs import replace

from spotkeeper.contract import names
from spotkeeper.contract.allocation import Allocation, Claim
from spotkeeper.contract.cloud import Disk, DiskSnapshot, Listing, Result, Vm, VmStatus
from spotkeeper.contract.facts import Fact
from spotkeeper.contract.generation import Progress
from spotkeeper.contract.job import JobRequest
from spotkeeper.contract.record import Budget, Limits, Move, Moved, Node, Record, Slot
from spotkeeper.contract.stack import Fallback, Model
from spotkeeper.contract.sweep import SweepState, Trial, TrialReport, decided
from spotkeeper.reconcile.decide import Times
from spotkeeper.reconcile.store.documents import StaticHello

TRIAL = Trial("s", 0, "loss", count=2, rungs=(1,), eta=2)
VALUE, BETTER, WORSE = 0.5, 0.25, 0.75  # of its metric at the rung, and what the other trial may report
STACK, POOL, STATIC_POOL = "m", "p", "s"
JOBS = ("abcd2345", "efgh2345")
UIDS = ("00000000-0000-0000-0000-000000000001", "00000000-0000-0000-0000-000000000002")
NODE = names.static_machine_name(STACK, STATIC_POOL, 0)
NOW, URGENT, DEADLINE, PAST = 0.0, 495.0, 500.0, 1000.0
LONG_AGO = -1e6
USUAL_BOOT_S = 1.0
TORN = -1  # the commit of a copy that was made while its disk was being written: nothing can be had from it
T = TypeVar("T")


class Life(IntEnum):
    """COMING (not running, or not listed yet) -> RUNNING -> STOPPING (may still write) -> DEAD (EC2 lists it on)."""

    COMING = 0
    RUNNING = 1
    STOPPING = 2
    DEAD = 3


class V(NamedTuple):
    """A machine of a job. ``gen``: the generation its processes are of; ``alive``: they run."""

    job: int
    node: int
    attempt: int
    zone: str
    twin: int = 0  # how many machines had this name before
    life: Life = Life.COMING
    boot: int = 0
    gen: int = 0
    alive: bool = False
    writes: bool = False  # its generation began with its disk attached
    noticed: int = 0  # 1: under notice; 2: its deadline has passed, and the machine is still there
    hung: bool = False
    planned: bool = False  # it goes because its longest run ends, which its listing says, and nobody takes back

    @property
    def uid(self) -> str:
        return f"u{self.job}{self.node}-{self.attempt}{self.zone}{self.twin}"

    @property
    def name(self) -> str:
        return names.vm_name(STACK, JOBS[self.job], self.node, self.attempt)

    @property
    def healthy(self) -> bool:
        return self.life in (Life.COMING, Life.RUNNING) and not self.hung


class D(NamedTuple):
    """A disk: who holds it (a unique id), and the newest commit on it (a generation; 0: blank; or ``TORN``)."""

    job: int
    node: int
    number: int
    zone: str
    user: str = ""
    commit: int = 0

    @property
    def name(self) -> str:
        return names.disk_name(STACK, JOBS[self.job], self.node, self.number)


class P(NamedTuple):
    """A snapshot, named after the disk that is to be made from it."""

    job: int
    node: int
    number: int
    commit: int

    @property
    def name(self) -> str:
        return names.disk_name(STACK, JOBS[self.job], self.node, self.number)


class N(NamedTuple):
    """The static machine, with its own disk. ``serves``: the (job, node, attempt) its agent works for."""

    up: bool = True
    boot: int = 0
    serves: tuple[int, int, int] | None = None
    gen: int = 0
    alive: bool = False
    commits: tuple[int, int] = (0, 0)  # by job
    hung: bool = False

    @property
    def uid(self) -> str:
        return "n0"


class Sky(NamedTuple):
    """What is in the cloud. ``keys``: idempotency keys used; ``ops``: failed operations that can be listed."""

    vms: frozenset[V] = frozenset()
    disks: frozenset[D] = frozenset()
    snaps: frozenset[P] = frozenset()
    keys: frozenset[tuple[int, int, int, str]] = frozenset()
    ops: frozenset[Result] = frozenset()
    machine: N | None = None
    uncopied: bool = False  # from now on, no disk is copied
    dead: str = ""  # a zone that is lost: what was there is gone, and it never answers

    def vm(self, uid: str) -> V | None:
        return next((v for v in self.vms if v.uid == uid), None)


class Nowhere(dict[str, bool]):
    """The regions of a snapshot, which no story tells; hashable, so that listings are."""

    def __hash__(self) -> int:  # type: ignore[override]
        return 0


REFUSED = -1  # the bucket takes no copies any more


class Papers(NamedTuple):
    """What lies in the bucket of one job beside its record.

    ``newest``: the generation of the newest commit; ``copy``: of the newest that the bucket has a copy of, or REFUSED.
    ``sweep``: the state of the search of which the job is a trial.
    """

    facts: frozenset[Fact] = frozenset()
    requests: tuple[JobRequest, ...] = ()
    newest: int = 0
    copy: int = 0
    sweep: SweepState | None = None


class World(NamedTuple):
    """All but the rounds. A job without a record was deleted by hand, or is not submitted yet."""

    records: tuple[Record | None, ...]
    papers: tuple[Papers, ...]
    allocation: Allocation
    sky: Sky


class Interner(Generic[T]):
    """Equal values get one small number; a state is then a few numbers."""

    def __init__(self) -> None:
        self.ids: dict[T, int] = {}
        self.values: list[T] = []

    def __call__(self, value: T) -> int:
        found = self.ids.get(value)
        if found is None:
            found = self.ids[value] = len(self.values)
            self.values.append(value)
        return found

    def __getitem__(self, number: int) -> T:
        return self.values[number]


# -- time


class Moment(Enum):
    """Which deadlines have passed at a look. No safety may rest on a clock, so any look may be at any moment."""

    FRESH = "in time"
    URGENT = "shortly before the notice's deadline"
    PAST = "after the deadlines of notice, stop and hold"
    THAWED = "when refused offers may be asked again"
    DRY = "when the zone has been dry for long"
    SLOW = "when a boot takes longer than usual"
    BOOT = "after the boot deadline"
    SILENT = "after a long silence"
    ROLL = "after the roll call's deadline"
    DISK = "after waiting long for disks"
    FREE = "after waiting for the unmount"
    LAST = "after hold_days"


_LONG, _GONE = 1e12, -1e9
CALM = Times(
    cold_s=_LONG,
    margin_s=10.0,
    save_s=1.0,
    stop_s=60.0,
    roll_s=_LONG,
    lone_roll_s=_LONG,
    silence_s=_LONG,
    lone_silence_s=_LONG,
    free_s=_LONG,
    disk_s=_LONG,
    static_s=_LONG,
    dry_s=_LONG,
    gang_s=_LONG,
    fallback=Fallback(on_demand_s=0.0, losses=1_000_000, short_lives=1_000_000),
    shrink_s=_LONG,
    settle_s=0.0,
    hold_s=10.0,
)
_CLOCKS: dict[Moment, float] = {
    Moment.SLOW: 2 * USUAL_BOOT_S,
    Moment.URGENT: URGENT,
    Moment.PAST: PAST,
    Moment.LAST: 1e11,
}
_PASSED: dict[Moment, dict[str, float]] = {
    Moment.THAWED: {"cold_s": _GONE},
    Moment.DRY: {"dry_s": _GONE, "gang_s": _GONE},
    Moment.BOOT: {"work_s": _GONE * 10, "static_s": _GONE},
    Moment.SILENT: {"silence_s": _GONE, "lone_silence_s": _GONE},
    Moment.ROLL: {"roll_s": _GONE, "lone_roll_s": _GONE},
    Moment.DISK: {"disk_s": _GONE, "shrink_s": _GONE},
    Moment.FREE: {"free_s": _GONE},
}
BOOT_S = 1_000_000_000


def clock(moment: Moment) -> float:
    return _CLOCKS.get(moment, NOW)


@lru_cache(maxsize=64)
def times(moment: Moment) -> Times:
    return replace(CALM, **_PASSED.get(moment, {}))


def plain(record: Record, old: Record | None, now: float) -> Record:
    """Without what no decision reads, and its moments as "now" or "later".

    The limits on spending are not searched: launches are not counted, nothing is spent, and no breaker stays open
    (``tests/reconcile`` blows each). Nor are on-demand fallbacks: the stories' jobs buy spot only.
    ``ver`` counts the roll calls: answers must be of the newest one or a later one.
    """
    ver = 0 if old is None else old.ver
    roll = record.roll
    if roll is not None and (old is None or old.roll is None or old.roll.cause != roll.cause):
        ver += 1
    if roll is not None:
        roll = replace(roll, ver=ver, since=0.0)
    return replace(
        record,
        ver=ver,
        nonce="",
        outbox=(),
        nodes=tuple(_plain_rank(node) for node in record.nodes),
        gen_since=0.0,
        stop_since=0.0,
        stop_deadline=_class(record.stop_deadline, now),
        roll=roll,
        move=_plain_move(record.move),
        asked_zone=None if record.asked_zone is None else replace(record.asked_zone, since=NOW),
        budget=Budget(crashes=record.budget.crashes, crashed_gen=record.budget.crashed_gen),
        fallback_until=0.0,
        dry_since=None if record.dry_since is None else NOW,
        short_since=None if record.short_since is None else NOW,
        roll_at=0.0,
        busy_at=0.0,
        pause="p" if record.pause else "",
        hold_until=_class(record.hold_until, now),
        hold_ends=None if record.hold_ends is None else 1e10,
        hold_late=None if record.hold_late is None else NOW,
        hold_count=0,
        limits=Limits(),
        trial=None if record.trial is None else replace(record.trial, reached_at=NOW),
        mirror=tuple(replace(one, at=0.0) for one in record.mirror),
        probes=tuple(replace(look, at=NOW) for look in record.probes),
        moved=None if record.moved is None else Moved(NOW, 0.0),
        move_times=(),  # they decide only between moves by the bucket and by disks, and a story has one move
    )


def other_reports(papers: Papers, value: float) -> Papers:
    """The other trial reports its rung."""
    assert papers.sweep is not None
    return papers._replace(sweep=plain_sweep(decided(papers.sweep.told(TrialReport(1, (value,))), TRIAL)))


def plain_sweep(state: SweepState) -> SweepState:
    return replace(state, ver=0, nonce="")


def _plain_move(move: Move | None) -> Move | None:
    return None if move is None else replace(move, since=0.0, silent_since=None if move.silent_since is None else NOW)


def _class(moment: float | None, now: float) -> float | None:
    return None if moment is None else NOW if moment <= now else DEADLINE


def _plain_rank(node: Node) -> Node:
    return replace(
        node,
        cur=_plain_slot(node.cur),
        next=_plain_slot(node.next),
        refused=tuple(sorted(node.refused)),
        refused_at=0.0,
        vacant_since=0.0,
        launches=0,
    )


def _plain_slot(slot: Slot | None) -> Slot | None:
    if slot is None:
        return None
    at = {"notice": slot.notice, "ends": slot.ends}
    return replace(slot, since=0.0, **{name: None if told is None else DEADLINE for name, told in at.items()})


def plain_allocation(allocation: Allocation) -> Allocation:
    grants = (replace(grant, since=0.0) for grant in allocation.grants)
    return Allocation(
        grants=tuple(sorted(grants, key=lambda g: (g.job, g.node, g.attempt, g.resource))),
        claims=tuple(sorted(map(_plain_claim, allocation.claims), key=lambda c: c.job)),
    )


def _plain_claim(claim: Claim) -> Claim:
    """As the scheduler is shown it: every protection is over, so machines are taken as soon as a rule allows it."""
    return replace(
        claim,
        since=NOW,
        waits=None if claim.waits is None else NOW,
        waited_s=0.0,
        reserved_at=LONG_AGO if claim.max else 0.0,
        started=None if claim.started is None else LONG_AGO,
        dry_since=None if claim.dry_since is None else NOW,
        lapsed=0.0,
        recalls=(),
    )


# -- what the shipped code is shown


@lru_cache(maxsize=1 << 17)
def listed_vm(v: V, disk: str) -> Vm:
    status = {
        Life.COMING: VmStatus.PENDING,
        Life.RUNNING: VmStatus.RUNNING,
        Life.STOPPING: VmStatus.STOPPING,
        Life.DEAD: VmStatus.DEAD,
    }[v.life]
    disks = (disk,) if disk else ()
    vm = Vm(v.name, v.uid, v.zone, status, POOL, JOBS[v.job], v.node, v.attempt, "a", disks, Model.SPOT)
    return replace(vm, created=-1e12, ends=DEADLINE) if v.planned else vm


def listing(sky: Sky, answered: frozenset[str], hidden: bool, home: str) -> Listing:
    """One look. ``hidden``: machines that are coming up are not listed yet (EC2). ``home``: the node's zone."""
    held = {d.user: d for d in sky.disks if d.user}
    by_uid = {v.uid: v.name for v in sky.vms}
    vms = [
        listed_vm(v, held[v.uid].name if v.uid in held else "")
        for v in sorted(sky.vms)
        if v.zone in answered and not (hidden and v.life is Life.COMING)
    ]
    if sky.machine is not None and sky.machine.up and home in answered:
        vms.append(Vm(NODE, sky.machine.uid, home, VmStatus.RUNNING, STATIC_POOL, "", 0, 0, "a", (), Model.STATIC))
    disks = tuple(
        Disk(d.name, d.zone, JOBS[d.job], d.node, d.number, (by_uid[d.user],) if d.user else ())
        for d in sorted(sky.disks)
        if d.zone in answered
    )
    snaps = tuple(
        DiskSnapshot(p.name, JOBS[p.job], p.node, p.number, True, regions=Nowhere()) for p in sorted(sky.snaps)
    )
    ops = tuple(sorted(sky.ops, key=repr))
    return Listing(tuple(vms), disks, snaps, answered, ops)


def progress(newest: int) -> Progress | None:
    """What the lowest member reported last; a generation's commit is known at once."""
    return Progress(newest, 0, NOW, commit_gen=newest, commit_step=0, save_s=1.0) if newest else None


def hello(machine: N | None, home: str) -> tuple[StaticHello, ...]:
    return () if machine is None else (StaticHello(NODE, machine.uid, f"b{machine.boot}", home, NOW),)


def live_slots(record: Record | None, node: int) -> list[Slot]:
    if record is None or node >= len(record.nodes):
        return []
    return [slot for slot in (record.nodes[node].cur, record.nodes[node].next) if slot is not None]


def slot_of(record: Record | None, v: V) -> Slot | None:
    """The live slot that this very machine fills, or would fill."""
    for slot in live_slots(record, v.node):
        if slot.machine is None and slot.attempt == v.attempt and slot.zone == v.zone and slot.uid in (None, v.uid):
            return slot
    return None


def changed(things: tuple[Any, ...], index: int, thing: object) -> tuple[Any, ...]:
    """With another one in that place."""
    return (*things[:index], thing, *things[index + 1 :])
