"""Searches for the best parameters of a training script: what a trial's job file says, and what trials have reported.

A trial is a job. With successive halving it stops at the first of ``rungs`` (steps), and waits until each trial of its
*cohort* that got so far has reported its metric there. The best ``1/eta`` of them continue; the others end. A decision
is a pure function of the reports, which never change, so it does not depend on their order, and no process makes it.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

from msgspec import Meta, Struct
from msgspec.structs import replace

Params = dict[str, bool | int | float | str]


class Trial(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A job's part in a search (``JobSpec.trial``); all trials of a cohort have the same, but for ``number``."""

    sweep: str  # the search's name
    number: Annotated[int, Meta(ge=0)]
    metric: str  # as the script reports it
    goal: Literal["min", "max"] = "min"
    first: Annotated[int, Meta(ge=0)] = 0  # the cohort's lowest number
    count: Annotated[int, Meta(ge=1)] = 1  # trials in the cohort
    rungs: tuple[Annotated[int, Meta(ge=1)], ...] = ()  # steps at which the cohort is halved, ascending; (): never
    eta: Annotated[int, Meta(ge=2)] = 3  # 1/eta of the trials at a rung continue
    parallel: Annotated[int, Meta(ge=1)] = 1  # most trials of the search that have machines
    max_usd: Annotated[float, Meta(gt=0)] | None = None  # what all machines of the search may cost


class TrialReport(Struct, frozen=True, omit_defaults=True):
    """What one trial has reported."""

    number: int
    values: tuple[float | None, ...] = ()  # the metric at each rung so far; None: no number
    final: float | None = None  # the metric's last value, of a trial that is over
    over: bool = False  # it has ended, and reports nothing more
    spent: float = 0.0  # USD, estimated
    job: str = ""


class SweepState(Struct, frozen=True, omit_defaults=True):
    """``sweeps/<name>/state``, which rounds of trials write by compare-and-swap."""

    sweep: str = ""
    ver: int = 0
    nonce: str = ""
    trials: tuple[TrialReport, ...] = ()  # in the order of their numbers; a trial without a report is missing

    def trial(self, number: int) -> TrialReport:
        return next((trial for trial in self.trials if trial.number == number), TrialReport(number))

    def spent(self) -> float:
        """Return what all trials have cost, USD."""
        return sum(trial.spent for trial in self.trials)

    def told(self, report: TrialReport) -> SweepState:
        """Return the next version with a trial's report; the writer sets its nonce."""
        others = (trial for trial in self.trials if trial.number != report.number)
        trials = tuple(sorted((*others, report), key=lambda trial: trial.number))
        return replace(self, ver=self.ver + 1, trials=trials)


def joined(old: TrialReport, new: TrialReport) -> TrialReport:
    """Return what both reports of a trial say: a round that read an old record takes nothing back."""
    if old.over and not new.over:
        return old
    return replace(new, values=max(old.values, new.values, key=len))


def continuing(state: SweepState, trial: Trial, rung: int) -> frozenset[int] | None:
    """Return the trials of ``trial``'s cohort that continue after a rung; None while reports are missing.

    The trials at the rung are sorted by their value there, the best first, then by number. The first 1/eta continue, at
    least one; a trial without a value, or with NaN, never does.

    Args:
        rung: index into ``trial.rungs``.
    """
    there = ranking(state, trial, rung)
    if there is None:
        return None
    valued = [number for number, value in there if value is not None]
    return frozenset(valued[: max(1, len(there) // trial.eta)])


def ranking(state: SweepState, trial: Trial, rung: int) -> list[tuple[int, float | None]] | None:
    """Return the cohort's trials at a rung with their values there, the best first; None while reports are missing."""
    numbers = range(trial.first, trial.first + trial.count) if not rung else continuing(state, trial, rung - 1)
    if numbers is None:
        return None
    reports = {report.number: report for report in state.trials}  # a search of all for each would be quadratic
    found: list[tuple[int, float | None]] = []
    for number in numbers:
        report = reports.get(number, TrialReport(number))
        if len(report.values) <= rung and not report.over:
            return None
        found.append((number, value_at(report, rung)))
    return sorted(found, key=lambda one: (*order(one[1], trial.goal), one[0]))


def value_at(report: TrialReport, rung: int) -> float | None:
    """Return a trial's value at a rung: the last one, if it ended before the rung; None if it is no number."""
    value = report.values[rung] if rung < len(report.values) else report.final if report.over else None
    return None if value is None or math.isnan(value) else value


def order(value: float | None, goal: str) -> tuple[bool, float]:
    """Return a sort key of values of the metric: the best first, no number last."""
    if value is None or math.isnan(value):
        return True, 0.0
    return False, -value if goal == "max" else value
