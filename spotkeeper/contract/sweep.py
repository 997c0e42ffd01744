"""Searches for the best parameters of a training script: what a trial's job file says, and what trials have reported.

A trial is a job. With successive halving it stops at the first of ``rungs`` (steps), and waits until each trial of its
*cohort* that got so far has reported its metric there. The best ``1/eta`` of them continue; the others end. The write
that brings the last report also brings the decision (:class:`Decided`). It follows from the reports alone, in whatever
order they came, and what trials report or do later does not change it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Annotated, Literal

from msgspec import Meta, Struct
from msgspec.structs import replace

MOST_TRIALS = 10_000  # a trial's number has four digits
Params = dict[str, bool | int | float | str]


class Trial(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A job's part in a search (``JobSpec.trial``); all trials of a cohort have the same, but for ``number``."""

    sweep: str  # the search's name
    number: Annotated[int, Meta(ge=0, lt=MOST_TRIALS)]
    metric: str  # as the script reports it
    goal: Literal["min", "max"] = "min"
    first: Annotated[int, Meta(ge=0, lt=MOST_TRIALS)] = 0  # the cohort's lowest number
    count: Annotated[int, Meta(ge=1, le=MOST_TRIALS)] = 1  # trials in the cohort
    rungs: tuple[Annotated[int, Meta(ge=1)], ...] = ()  # steps at which the cohort is halved, ascending; (): never
    eta: Annotated[int, Meta(ge=2)] = 3  # 1/eta of the trials at a rung continue
    parallel: Annotated[int, Meta(ge=1)] = 1  # most trials of the search that have machines
    max_usd: Annotated[float, Meta(gt=0)] | None = None  # what all machines of the search may cost


class TrialReport(Struct, frozen=True, omit_defaults=True):
    """What one trial has reported."""

    number: int
    values: tuple[float | None, ...] = ()  # the metric at each rung so far; None: no number
    final: float | None = None  # the metric's last value, of a trial that has trained to its end
    over: bool = False  # it has ended, and reports nothing more
    held: bool = False  # it is on hold until a person resumes it, so its cohort does not wait for it
    spent: float = 0.0  # USD, estimated
    job: str = ""
    first: int = 0  # the lowest number of its cohort


class Decided(Struct, frozen=True, omit_defaults=True):
    """A rung that a cohort has passed.

    Attributes:
        first: the cohort's lowest number. ``rung``: index into ``Trial.rungs``.
        order: the trials that were compared, the best first; those that were on hold are not among them.
        best: how many of them continue, from the first.
    """

    first: int
    rung: int
    order: tuple[int, ...] = ()
    best: int = 0

    def continuing(self) -> tuple[int, ...]:
        return self.order[: self.best]


class SweepState(Struct, frozen=True, omit_defaults=True):
    """``sweeps/<name>/state``, which rounds of trials write by compare-and-swap."""

    sweep: str = ""
    ver: int = 0
    nonce: str = ""
    trials: tuple[TrialReport, ...] = ()  # in the order of their numbers; a trial without a report is missing
    decided: tuple[Decided, ...] = ()  # each is written once

    def trial(self, number: int) -> TrialReport:
        return next((trial for trial in self.trials if trial.number == number), TrialReport(number))

    def decision(self, first: int, rung: int) -> Decided | None:
        """Return the decision on a rung of the cohort whose lowest number is ``first``; None if it is open."""
        return next((one for one in self.decided if (one.first, one.rung) == (first, rung)), None)

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


def decided(state: SweepState, trial: Trial) -> SweepState:
    """Return the state with all decisions that follow for ``trial``'s cohort; the same object if none does."""
    for rung in range(len(trial.rungs)):
        if state.decision(trial.first, rung) is None:
            made = _decision(state, trial, rung)
            if made is None:
                break
            state = replace(state, decided=(*state.decided, made))
    return state


def _decision(state: SweepState, trial: Trial, rung: int) -> Decided | None:
    """Compare the trials that are to reach a rung; None while it waits for one of them.

    They are sorted by their value there, the best first, then by number. The first 1/eta of all of them continue, at
    least one. A trial without a value, or with NaN, does not, nor one that has ended before its end: its place is
    another's. Trials on hold are left out if enough others have a value.
    """
    every = contenders(state, trial, rung) or ()
    late = [one for one in every if waited_for(one, rung)]
    there = [(one.number, _worth(one, rung)) for one in every if not waited_for(one, rung)]
    places, valued = max(1, len(every) // trial.eta), sum(value is not None for _, value in there)
    if late and (valued < places or not all(one.held for one in late)):
        return None
    there.sort(key=lambda one: (*order(one[1], trial.goal), one[0]))
    return Decided(trial.first, rung, tuple(number for number, _ in there), min(places, valued))


def contenders(state: SweepState, trial: Trial, rung: int) -> list[TrialReport] | None:
    """Return the reports of the trials of ``trial``'s cohort that are compared at a rung; None if that is open.

    Args:
        rung: index into ``trial.rungs``.
    """
    if not rung:
        return reports(state, range(trial.first, trial.first + trial.count))
    before = state.decision(trial.first, rung - 1)
    return None if before is None else reports(state, before.continuing())


def lacking(state: SweepState, trial: Trial, rung: int) -> list[TrialReport]:
    """Return the reports of the trials for which others of ``trial``'s cohort wait at a rung."""
    if state.decision(trial.first, rung) is not None:
        return []
    every = contenders(state, trial, rung) or []
    late = [one for one in every if waited_for(one, rung)]
    return late if any(len(one.values) > rung and not one.over for one in every) else []


def reports(state: SweepState, numbers: Iterable[int]) -> list[TrialReport]:
    """Return the reports of these trials, in this order."""
    known = {report.number: report for report in state.trials}  # a search of all for each would be quadratic
    return [known.get(number) or TrialReport(number) for number in numbers]


def alone(state: SweepState, trial: Trial) -> bool:
    """Whether no other trial of its cohort can be compared with ``trial`` any more: each has lost, or ended early.

    A trial that has trained to its end before a rung still counts there, and one on hold may come back.
    """
    known = [one for one in state.decided if one.first == trial.first]
    lost = {number for one in known for number in one.order[one.best :]}
    others = reports(state, (trial.first + n for n in range(trial.count) if trial.first + n != trial.number))
    return all(one.number in lost or (one.over and one.final is None) for one in others)


def waited_for(report: TrialReport, rung: int) -> bool:
    """Whether a trial has neither reported a rung nor ended."""
    return len(report.values) <= rung and not report.over


def continues(state: SweepState, trial: Trial, rung: int, value: float | None) -> bool | None:
    """Whether a trial continues after a rung; None while that is open.

    A trial that was on hold when its cohort passed this rung, or an earlier one, was not compared. It continues too if
    it is better than the last one that did; so trials that are resumed do not depend on each other.

    Args:
        value: its metric at this rung.
    """
    known = state.decision(trial.first, rung)
    if known is None or trial.number in known.order:
        return None if known is None else trial.number in known.continuing()
    if value is None or math.isnan(value):
        return False
    if not known.best:
        return True
    last = state.trial(known.order[known.best - 1])
    return (*order(value, trial.goal), trial.number) < (*order(value_at(last, rung), trial.goal), last.number)


def _worth(report: TrialReport, rung: int) -> float | None:
    """Return what a trial's place is worth: nothing if it has ended and not trained to its end."""
    return None if report.over and report.final is None else value_at(report, rung)


def value_at(report: TrialReport, rung: int) -> float | None:
    """Return a trial's value at a rung: the last one, if it ended before the rung; None if it is no number."""
    value = report.values[rung] if rung < len(report.values) else report.final if report.over else None
    return None if value is None or math.isnan(value) else value


def order(value: float | None, goal: str) -> tuple[bool, float]:
    """Return a sort key of values of the metric: the best first, no number last."""
    if value is None or math.isnan(value):
        return True, 0.0
    return False, -value if goal == "max" else value
