"""A drill: how a job gets over the loss of one machine, phase by phase, each against its target. Pure.

Times are seconds of the cloud's clock since the machine was struck. A phase's target counts from the phase it waits
for, so that a slow boot is blamed once. What the ledger does not date (a save, processes that ended, a mounted disk)
has the time at which whoever follows the drill first saw it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum

from msgspec import Struct

from spotkeeper.report.money import first_of_each
from spotkeeper.spec.facts import Fact, Kind
from spotkeeper.spec.generation import Progress
from spotkeeper.spec.ledger import Entry, Event
from spotkeeper.spec.record import Record

AGAIN_S = 900.0  # of work that an unannounced loss may cost, where the job file sets no interval of its own


class Step(str, Enum):
    """What happens, in the order in which it is shown; several of them side by side.

    ======== ============================================= =========================
    step     when                                          its target counts from
    ======== ============================================= =========================
    HEARD    the notice (or the loss) is in the ledger     the strike
    ASKED    a replacement is decided                      HEARD
    SAVED    a checkpoint newer than before (announced)    HEARD
    BOOTED   the replacement runs, as the cloud tells      ASKED
    HELLO    its agent is admitted                         ASKED
    STOPPED  the old generation's processes have ended     the order to stop
    DISK     the rank's disk is mounted on the replacement HELLO, STOPPED
    STARTED  the next generation is ordered                HELLO, STOPPED
    FIRST    its first step is reported                    STARTED
    ======== ============================================= =========================
    """

    HEARD = "heard"
    ASKED = "replacement asked"
    SAVED = "saved"
    BOOTED = "booted"
    HELLO = "hello"
    STOPPED = "stopped"
    DISK = "disk moved"
    STARTED = "started"
    FIRST = "first step"


class Struck(Struct, frozen=True):
    """The machine that is taken, and the job as it was just before. ``at``: virtual unix seconds."""

    job: str
    name: str
    vm: str
    uid: str
    zone: str
    rank: int
    attempt: int
    gen: int
    announced: bool
    at: float
    commit: tuple[int, int] | None
    members: tuple[tuple[int, int], ...]  # (rank, attempt)


class PhaseView(Struct, frozen=True):
    """``at_s``: since the strike; None: not yet. ``took_s``, ``limit_s``: from what it waits for."""

    step: Step
    limit_s: float
    at_s: float | None = None
    took_s: float | None = None
    missed: bool = False


class DrillView(Struct, frozen=True):
    """What ``spotkeeper drill --json`` prints. ``holds``: every target was met."""

    struck: Struck
    phases: tuple[PhaseView, ...]
    elapsed_s: float
    over: bool
    holds: bool
    steps_lost: int | None = None
    lost_s: float | None = None
    lost_limit_s: float = 0.0
    failed: str = ""  # why it cannot come to its end


class Targets(Struct, frozen=True):
    """Virtual seconds. What is real work (processes, saves, boots) takes longer on a clock that runs faster."""

    heard_s: float = 15.0
    found_s: float = 90.0  # a loss that nobody announced: the provider's event, or the next tick
    asked_s: float = 15.0
    saved_s: float = 110.0  # of a notice of 120 s
    boot_s: float = 480.0
    stopped_s: float = 90.0
    disk_s: float = 180.0
    started_s: float = 60.0
    first_s: float = 120.0
    again_s: float = AGAIN_S

    def scaled(self, scale: float) -> Targets:
        extra = max(0.0, scale - 1.0)
        return Targets(
            heard_s=self.heard_s + 3.0 * extra,
            found_s=self.found_s + 3.0 * extra,
            asked_s=self.asked_s + 3.0 * extra,
            saved_s=self.saved_s,  # the cloud does not wait for slow work
            boot_s=self.boot_s + 60.0 * extra,
            stopped_s=self.stopped_s + 10.0 * extra,
            disk_s=self.disk_s + 5.0 * extra,
            started_s=self.started_s + 10.0 * extra,
            first_s=self.first_s + 20.0 * extra,
            again_s=self.again_s,
        )


class Evidence(Struct, frozen=True):
    """What the bucket says at one look, at ``now``."""

    record: Record
    ledger: tuple[Entry, ...]
    facts: tuple[Fact, ...]
    progress: Progress | None
    now: float


def witness(struck: Struck, look: Evidence, seen: Mapping[Step, float]) -> dict[Step, float]:
    """``seen``, with what this look shows for the first time of all that the ledger does not date."""
    out = dict(seen)
    shown = {Step.SAVED: _saved(struck, look), Step.STOPPED: _stopped(struck, look), Step.DISK: _mounted(struck, look)}
    for step, there in shown.items():
        if there:
            out.setdefault(step, look.now)
    return out


def _saved(struck: Struck, look: Evidence) -> bool:
    told = look.progress
    commits = [(told.commit_gen, told.commit_step)] if told and told.commit_gen is not None else []
    commits += [(f.gen, int(f.value)) for f in look.facts if f.kind is Kind.RELEASED and f.value.isdigit()]
    return any((step or 0) > (struck.commit[1] if struck.commit else 0) for _, step in commits)


def _stopped(struck: Struck, look: Evidence) -> bool:
    """Of a machine that is gone nobody can say it; nor need anybody."""
    ended = {(f.rank, f.attempt) for f in look.facts if f.kind in (Kind.RELEASED, Kind.EXIT) and f.gen == struck.gen}
    wanted = {member for member in struck.members if member[0] != struck.rank}
    return look.record.gen > struck.gen or (bool(ended) and wanted <= ended)


def _mounted(struck: Struck, look: Evidence) -> bool:
    return any(f.kind is Kind.ATTACHED and f.rank == struck.rank and f.attempt > struck.attempt for f in look.facts)


def drill_view(struck: Struck, look: Evidence, seen: Mapping[Step, float], targets: Targets) -> DrillView:
    """How far it is. ``seen``: of :func:`witness`, this look included."""
    entries = tuple(entry for entry in first_of_each(look.ledger) if entry.at >= struck.at - 1.0)
    at = _moments(struck, entries) | dict(seen)
    if Step.STARTED in at:  # what was never seen by itself is over by then
        at.setdefault(Step.STOPPED, at[Step.STARTED])
    phases = tuple(_phase(struck, step, at, entries, targets, look.now) for step in _steps(struck))
    again = next((e for e in entries if e.event is Event.GENERATION and e.gen > struck.gen), None)
    lost_s = again.again * (again.step_s or 0.0) if again is not None and again.again is not None else None
    limit_s = 0.0 if struck.announced else targets.again_s
    reached = all(phase.at_s is not None for phase in phases)
    failed = _failed(look.record, entries, reached)
    late = lost_s is not None and lost_s > limit_s
    return DrillView(
        struck=struck,
        phases=phases,
        elapsed_s=look.now - struck.at,
        over=reached or bool(failed),
        holds=reached and not late and not any(phase.missed for phase in phases),
        steps_lost=again.again if again is not None else None,
        lost_s=lost_s,
        lost_limit_s=limit_s,
        failed=failed,
    )


def _steps(struck: Struck) -> Iterable[Step]:
    return (step for step in Step if struck.announced or step is not Step.SAVED)


def _failed(record: Record, entries: Sequence[Entry], reached: bool) -> str:
    if reached or record.outcome is None:
        return ""
    end = next((entry for entry in entries if entry.event is Event.END), None)
    return f"the job ended meanwhile: {end.detail or end.cause if end is not None else record.outcome.value}"


def _moments(struck: Struck, entries: Sequence[Entry]) -> dict[Step, float]:
    """The first of each that the ledger dates. A replacement that never came is followed by another."""
    at: dict[Step, float] = {}
    for entry in entries:
        own = entry.rank == struck.rank and entry.attempt is not None
        if own and entry.attempt == struck.attempt and entry.event in (Event.NOTICE, Event.LOSS):
            at.setdefault(Step.HEARD, entry.at)
        elif own and (entry.attempt or 0) > struck.attempt and entry.event is Event.INTENT:
            at.setdefault(Step.ASKED, entry.at)
        elif own and (entry.attempt or 0) > struck.attempt and entry.event is Event.ADMITTED:
            at.setdefault(Step.BOOTED, entry.at if entry.started is None else entry.started)
            at.setdefault(Step.HELLO, entry.at)
        elif entry.event is Event.GENERATION and entry.gen > struck.gen:
            at.setdefault(Step.STARTED, entry.at)
        elif entry.event is Event.FIRST and entry.gen > struck.gen:
            at.setdefault(Step.FIRST, entry.at)
    return at


def _phase(
    struck: Struck, step: Step, at: Mapping[Step, float], entries: Sequence[Entry], targets: Targets, now: float
) -> PhaseView:
    limit_s, after = _target(struck, step, targets)
    base = max((at.get(one, now) for one in after), default=struck.at)
    if step is Step.STOPPED:
        base = next((entry.at for entry in entries if entry.event in (Event.STOP, Event.CRASH)), now)
    moment = at.get(step)
    took_s = max(0.0, (now if moment is None else moment) - base)
    return PhaseView(
        step=step,
        limit_s=limit_s,
        at_s=None if moment is None else max(0.0, moment - struck.at),
        took_s=None if moment is None else took_s,
        missed=took_s > limit_s,
    )


def _target(struck: Struck, step: Step, targets: Targets) -> tuple[float, tuple[Step, ...]]:
    """How long it may take, and after which steps."""
    heard = targets.heard_s if struck.announced else targets.found_s
    return {
        Step.HEARD: (heard, ()),
        Step.ASKED: (targets.asked_s, (Step.HEARD,)),
        Step.SAVED: (targets.saved_s, (Step.HEARD,)),
        Step.BOOTED: (targets.boot_s, (Step.ASKED,)),
        Step.HELLO: (targets.boot_s, (Step.ASKED,)),
        Step.STOPPED: (targets.stopped_s, ()),
        Step.DISK: (targets.disk_s, (Step.HELLO, Step.STOPPED)),
        Step.STARTED: (targets.started_s, (Step.HELLO, Step.STOPPED)),
        Step.FIRST: (targets.first_s, (Step.STARTED,)),
    }[step]


def patience_s(targets: Targets) -> float:
    """After which nobody waits any more, virtual seconds since the strike."""
    return (
        targets.found_s
        + targets.asked_s
        + 2 * targets.boot_s
        + targets.stopped_s
        + targets.disk_s
        + targets.started_s
        + targets.first_s
    )
