"""A drill for people: one line a phase, a table of them, and what was missed."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from spotkeeper.report.drill import DrillView, PhaseView, Struck
from spotkeeper.report.tables import fitting
from spotkeeper.report.words import count, duration

_COLUMNS = ("phase", "after", "took", "target", "")


def table(view: DrillView) -> RenderableType:
    """The live view, and the last one."""
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
        fitting(rows, _COLUMNS, (), {"after", "took", "target"}),
        Text(verdict(view), style=("green" if view.holds else "red") if view.over else "dim"),
    )


def title(view: DrillView) -> str:
    return f"{opening(view.struck)}, {duration(view.elapsed_s)} ago"


def opening(struck: Struck) -> str:
    how = "with its notice" if struck.announced else "without a word"
    return f"{struck.name} ({struck.job}): {struck.vm} (rank {struck.rank}) is taken {how}"


def _mark(phase: PhaseView) -> str:
    return "MISSED" if phase.missed else "" if phase.at_s is None else "holds"


def phase_line(phase: PhaseView) -> str:
    """``hello  after 1m20s  took 58s (target 8m00s)  holds``."""
    return (
        f"{phase.step.value:<18} after {duration(phase.at_s):>7}  took {duration(phase.took_s):>7}"
        f" (target {duration(phase.limit_s)})  {_mark(phase)}"
    )


def lost_line(view: DrillView) -> str:
    if view.steps_lost is None:
        return "what it cost in steps is not known"
    least = duration(view.lost_limit_s)
    time = f", {duration(view.lost_s)} of work" if view.steps_lost and view.lost_s else ""
    return f"{count(view.steps_lost, 'step')} lost{time} (target {'0' if not view.lost_limit_s else least})"


def verdict(view: DrillView) -> str:
    if not view.over:
        return "..."
    return f"{lost_line(view)}; " + ("every target is met" if view.holds else "; ".join(misses(view)))


def misses(view: DrillView) -> list[str]:
    """What went wrong, for one line."""
    found = [
        f"{phase.step.value} took {duration(phase.took_s)}, {duration(phase.limit_s)} is the target"
        if phase.took_s is not None
        else f"{phase.step.value} never came"
        for phase in view.phases
        if phase.missed or phase.at_s is None
    ]
    if view.failed:
        return [view.failed]
    if view.lost_s is not None and view.lost_s > view.lost_limit_s:
        found.append(lost_line(view))
    return found
