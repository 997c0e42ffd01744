"""A drill: one machine of a job is preempted, and each phase of the job's recovery is compared with a target.

Times are seconds of the cloud's clock since the preemption. The target of a phase counts from the phases before it, so
that a slow boot misses only one target. The ledger gives the times of most phases. A save, the end of the processes and
a mounted disk get the time at which the command first saw them. The second part of this module formats the view.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from spotkeeper.contract.facts import Fact, Kind
from spotkeeper.contract.generation import Progress
from spotkeeper.contract.ledger import Entry, Event
from spotkeeper.contract.record import Record
from spotkeeper.report.money.money import first_of_each
from spotkeeper.report.text.words import count, duration

if TYPE_CHECKING:
    from rich.console import RenderableType


AGAIN_S = 900.0  # most work that a loss without a notice may cost, unless the job file sets a checkpoint interval


class DrillStep(str, Enum):
    """The phases of a recovery in the order in which they are shown; some run side by side.

    ======== ============================================= =========================
    step     reached when                                  its target counts from
    ======== ============================================= =========================
    HEARD    the notice (or the loss) is in the ledger     the preemption
    ASKED    a replacement is decided                      HEARD
    SAVED    a new checkpoint exists (only with a notice)  HEARD
    BOOTED   the replacement runs, as the cloud reports    ASKED
    HELLO    its agent is admitted                         ASKED
    STOPPED  the old generation's processes have ended     the order to stop
    DISK     the node's disk is mounted on the replacement HELLO, STOPPED
    STARTED  the next generation is published              HELLO, STOPPED
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


class Victim(Struct, frozen=True):
    """The machine that a drill preempts, and the state of the job just before. ``at``: virtual unix seconds."""

    job: str
    name: str
    vm: str
    uid: str
    zone: str
    node: int
    attempt: int
    gen: int
    announced: bool
    at: float
    commit: tuple[int, int] | None
    members: tuple[tuple[int, int], ...]  # (node, attempt)


class PhaseView(Struct, frozen=True):
    """One phase of a recovery. ``at_s`` and ``took_s`` are None until the phase is reached.

    ``at_s``: time since the preemption; ``took_s``: time since the last phase that this phase depends on;
    ``limit_s``: the target for ``took_s``.
    """

    step: DrillStep
    limit_s: float
    at_s: float | None = None
    took_s: float | None = None
    missed: bool = False


class DrillView(Struct, frozen=True):
    """The result of a drill, as ``spotkeeper drill --json`` prints it. ``passed``: every target was met."""

    victim: Victim
    phases: tuple[PhaseView, ...]
    elapsed_s: float
    over: bool
    passed: bool
    steps_lost: int | None = None
    lost_s: float | None = None
    lost_limit_s: float = 0.0
    failed: str = ""  # why the recovery cannot complete


class Targets(Struct, frozen=True):
    """The target of each phase, and of the lost work (``again_s``), in virtual seconds.

    On a faster clock, real work (starting processes, saving, booting) takes more virtual seconds; see :meth:`scaled`.
    """

    heard_s: float = 15.0
    found_s: float = 90.0  # HEARD without a notice: the cloud's event or the next tick finds the loss
    asked_s: float = 15.0
    saved_s: float = 110.0  # within a notice of 120 s
    boot_s: float = 480.0
    stopped_s: float = 90.0
    disk_s: float = 180.0
    started_s: float = 60.0
    first_s: float = 120.0
    again_s: float = AGAIN_S

    def scaled(self, scale: float) -> Targets:
        """The targets on a clock ``scale`` times as fast as real time. SAVED keeps its target: the notice sets it."""
        extra = max(0.0, scale - 1.0)
        return replace(
            self,
            heard_s=self.heard_s + 3.0 * extra,
            found_s=self.found_s + 3.0 * extra,
            asked_s=self.asked_s + 3.0 * extra,
            boot_s=self.boot_s + 60.0 * extra,
            stopped_s=self.stopped_s + 10.0 * extra,
            disk_s=self.disk_s + 5.0 * extra,
            started_s=self.started_s + 10.0 * extra,
            first_s=self.first_s + 20.0 * extra,
        )


class Evidence(Struct, frozen=True):
    """The documents of a job as the bucket shows them at ``now`` (virtual unix seconds)."""

    record: Record
    ledger: tuple[Entry, ...]
    facts: tuple[Fact, ...]
    progress: Progress | None
    now: float


def witness(victim: Victim, look: Evidence, seen: Mapping[DrillStep, float]) -> dict[DrillStep, float]:
    """Return when the phases without a ledger entry were first seen: ``seen``, completed from ``look``.

    A phase that ``look`` shows and ``seen`` lacks gets the time ``look.now``.
    """
    out = dict(seen)
    shown = {
        DrillStep.SAVED: _saved(victim, look),
        DrillStep.STOPPED: _stopped(victim, look),
        DrillStep.DISK: _mounted(victim, look),
    }
    for step, there in shown.items():
        if there:
            out.setdefault(step, look.now)
    return out


def _saved(victim: Victim, look: Evidence) -> bool:
    told = look.progress
    commits = [(told.commit_gen, told.commit_step)] if told and told.commit_gen is not None else []
    commits += [(f.gen, int(f.value)) for f in look.facts if f.kind is Kind.RELEASED and f.value.isdecimal()]
    return any((step or 0) > (victim.commit[1] if victim.commit else 0) for _, step in commits)


def _stopped(victim: Victim, look: Evidence) -> bool:
    """Whether all members have ended their processes; the preempted machine is left out, as it cannot report."""
    ended = {(f.node, f.attempt) for f in look.facts if f.kind in (Kind.RELEASED, Kind.EXIT) and f.gen == victim.gen}
    wanted = {member for member in victim.members if member[0] != victim.node}
    return look.record.gen > victim.gen or (bool(ended) and wanted <= ended)


def _mounted(victim: Victim, look: Evidence) -> bool:
    return any(f.kind is Kind.ATTACHED and f.node == victim.node and f.attempt > victim.attempt for f in look.facts)


def drill_view(victim: Victim, look: Evidence, seen: Mapping[DrillStep, float], targets: Targets) -> DrillView:
    """Return the state of the recovery. ``seen``: the result of :func:`witness` for this ``look``."""
    entries = tuple(entry for entry in first_of_each(look.ledger) if entry.at >= victim.at - 1.0)
    at = _moments(victim, entries) | dict(seen)
    if DrillStep.STARTED in at:  # all processes of the old generation had ended before, even if no look showed it
        at.setdefault(DrillStep.STOPPED, at[DrillStep.STARTED])
    phases = tuple(_phase(victim, step, at, entries, targets, look.now) for step in _steps(victim))
    again = next((e for e in entries if e.event is Event.GENERATION and e.gen > victim.gen), None)
    lost_s = again.again * (again.step_s or 0.0) if again is not None and again.again is not None else None
    limit_s = 0.0 if victim.announced else targets.again_s
    reached = all(phase.at_s is not None for phase in phases)
    failed = _failed(look.record, entries, reached)
    late = lost_s is not None and lost_s > limit_s
    return DrillView(
        victim=victim,
        phases=phases,
        elapsed_s=look.now - victim.at,
        over=reached or bool(failed),
        passed=reached and not late and not any(phase.missed for phase in phases),
        steps_lost=again.again if again is not None else None,
        lost_s=lost_s,
        lost_limit_s=limit_s,
        failed=failed,
    )


def _steps(victim: Victim) -> Iterable[DrillStep]:
    return (step for step in DrillStep if victim.announced or step is not DrillStep.SAVED)


def _failed(record: Record, entries: Sequence[Entry], reached: bool) -> str:
    if reached or record.outcome is None:
        return ""
    end = next((entry for entry in entries if entry.event is Event.END), None)
    return f"the job ended meanwhile: {end.detail or end.cause if end is not None else record.outcome.value}"


def _moments(victim: Victim, entries: Sequence[Entry]) -> dict[DrillStep, float]:
    """The first time of each phase in the ledger. Every later attempt of the node counts, as a replacement can fail."""
    at: dict[DrillStep, float] = {}
    for entry in entries:
        own = entry.node == victim.node and entry.attempt is not None
        if own and entry.attempt == victim.attempt and entry.event in (Event.NOTICE, Event.LOSS):
            at.setdefault(DrillStep.HEARD, entry.at)
        elif own and (entry.attempt or 0) > victim.attempt and entry.event is Event.INTENT:
            at.setdefault(DrillStep.ASKED, entry.at)
        elif own and (entry.attempt or 0) > victim.attempt and entry.event is Event.ADMITTED:
            at.setdefault(DrillStep.BOOTED, entry.at if entry.started is None else entry.started)
            at.setdefault(DrillStep.HELLO, entry.at)
        elif entry.event is Event.GENERATION and entry.gen > victim.gen:
            at.setdefault(DrillStep.STARTED, entry.at)
        elif entry.event is Event.FIRST and entry.gen > victim.gen:
            at.setdefault(DrillStep.FIRST, entry.at)
    return at


def _phase(
    victim: Victim,
    step: DrillStep,
    at: Mapping[DrillStep, float],
    entries: Sequence[Entry],
    targets: Targets,
    now: float,
) -> PhaseView:
    limit_s, after = _target(victim, step, targets)
    base = max((at.get(one, now) for one in after), default=victim.at)
    if step is DrillStep.STOPPED:
        base = next((entry.at for entry in entries if entry.event in (Event.STOP, Event.CRASH)), now)
    moment = at.get(step)
    took_s = max(0.0, (now if moment is None else moment) - base)
    return PhaseView(
        step=step,
        limit_s=limit_s,
        at_s=None if moment is None else max(0.0, moment - victim.at),
        took_s=None if moment is None else took_s,
        missed=took_s > limit_s,
    )


def _target(victim: Victim, step: DrillStep, targets: Targets) -> tuple[float, tuple[DrillStep, ...]]:
    """Return a phase's target in virtual seconds, and the phases before it: the target counts from the last of them."""
    heard = targets.heard_s if victim.announced else targets.found_s
    return {
        DrillStep.HEARD: (heard, ()),
        DrillStep.ASKED: (targets.asked_s, (DrillStep.HEARD,)),
        DrillStep.SAVED: (targets.saved_s, (DrillStep.HEARD,)),
        DrillStep.BOOTED: (targets.boot_s, (DrillStep.ASKED,)),
        DrillStep.HELLO: (targets.boot_s, (DrillStep.ASKED,)),
        DrillStep.STOPPED: (targets.stopped_s, ()),
        DrillStep.DISK: (targets.disk_s, (DrillStep.HELLO, DrillStep.STOPPED)),
        DrillStep.STARTED: (targets.started_s, (DrillStep.HELLO, DrillStep.STOPPED)),
        DrillStep.FIRST: (targets.first_s, (DrillStep.STARTED,)),
    }[step]


def patience_s(targets: Targets) -> float:
    """Virtual seconds since the preemption after which a drill stops waiting."""
    prepared = targets.found_s + targets.asked_s + 2 * targets.boot_s + targets.stopped_s
    return prepared + targets.disk_s + targets.started_s + targets.first_s


# --- for people -------------------------------------------------------------------------------

LEGEND = "after: time since the preemption; took: time since the last phase it depends on; target: limit of took"


def table(view: DrillView) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    from spotkeeper.report.text.render import fitting

    rows = (
        {
            "phase": phase.step.value,
            "after": "..." if phase.at_s is None else duration(phase.at_s),
            "took": "-" if phase.took_s is None else duration(phase.took_s),
            "target": f"<= {duration(phase.limit_s)}",
            "": _mark(phase),
        }
        for phase in view.phases
    )
    return Group(
        Text(title(view), style="bold"),
        fitting(rows, right={"after", "took", "target"}),
        Text(LEGEND, style="dim"),
        Text(verdict(view), style=("green" if view.passed else "red") if view.over else "dim"),
    )


def title(view: DrillView) -> str:
    return f"{opening(view.victim)}, {duration(view.elapsed_s)} ago"


def opening(victim: Victim) -> str:
    how = "with a notice" if victim.announced else "without a notice"
    return f"{victim.name} ({victim.job}): {victim.vm} (node {victim.node}) is preempted {how}"


def _mark(phase: PhaseView) -> str:
    return "MISSED" if phase.missed else "" if phase.at_s is None else "ok"


def phase_line(phase: PhaseView) -> str:
    """A phase as one line: ``hello  after 1m20s  took 58s (target 8m00s)  ok``."""
    return (
        f"{phase.step.value:<18} after {duration(phase.at_s):>7}  took {duration(phase.took_s):>7}"
        f" (target {duration(phase.limit_s)})  {_mark(phase)}"
    )


def lost_line(view: DrillView) -> str:
    if view.steps_lost is None:
        return "the number of lost steps is unknown"
    least = duration(view.lost_limit_s)
    time = f", {duration(view.lost_s)} of work" if view.steps_lost and view.lost_s else ""
    return f"{count(view.steps_lost, 'step')} lost{time} (target {'0' if not view.lost_limit_s else least})"


def verdict(view: DrillView) -> str:
    if not view.over:
        return "..."
    return f"{lost_line(view)}; " + ("every target is met" if view.passed else "; ".join(misses(view)))


def misses(view: DrillView) -> list[str]:
    """A short text for each missed target; the caller joins them to one line."""
    found = [
        f"{phase.step.value} took {duration(phase.took_s)} (target {duration(phase.limit_s)})"
        if phase.took_s is not None
        else f"{phase.step.value} was not reached"
        for phase in view.phases
        if phase.missed or phase.at_s is None
    ]
    if view.failed:
        return [view.failed]
    if view.lost_s is not None and view.lost_s > view.lost_limit_s:
        found.append(lost_line(view))
    return found
