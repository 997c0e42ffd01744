"""Views of a search as plain values: its plan before it is submitted, and its trials. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set

import msgspec
from msgspec import Struct

from spotkeeper.contract.job import JobSpec, span_s
from spotkeeper.contract.record import Hold, Outcome
from spotkeeper.contract.stack import Model, PoolState
from spotkeeper.contract.sweep import Params, SweepState, TrialReport, contenders, lacking, order, reports, value_at
from spotkeeper.contract.sweepfile import Cohort, SweepFile, SweepSpec, SweepStop, trial_name, trial_of
from spotkeeper.report.job.lines import phase_word
from spotkeeper.report.job.metrics import MetricColumns
from spotkeeper.report.job.view import JobView
from spotkeeper.report.text.words import sparkline

NOT_SUBMITTED, WAITS, NO_RECORD = "not submitted", "waiting", "no record"
CURVE_WIDTH = 24  # characters


class RungPlan(Struct, frozen=True):
    """A comparison of trials: at which step, of how many trials, and how many of them continue."""

    step: int
    trials: int
    continuing: int


class PlanView(Struct, frozen=True):
    """What a search will do.

    Attributes:
        steps_share: steps of all trials together, as a share of those that all would take to their ends; 1 without
            halving.
        whole_usd: what all trials to their ends would cost, by `work` and the highest on-demand price of their pools;
            None: the job file has no `work`.
        at_most_usd: the same for the share of the steps; None: unknown.
    """

    name: str
    sampler: str
    seed: int
    trials: int
    parallel: int
    metric: str
    goal: str
    rungs: tuple[RungPlan, ...]
    steps_share: float
    max_usd: float | None
    at_most_usd: float | None
    whole_usd: float | None
    values: tuple[Params, ...]


def plan(file: SweepFile, job: JobSpec, cohort: Cohort, parallel: int, pools: Iterable[PoolState]) -> PlanView:
    """Return the plan of a search. ``pools``: those from which its trials may take machines."""
    count = len(cohort.values)
    rungs = rung_plans(file, count)
    share = steps_share(file, count, rungs)
    prices = {pool.name: pool.dearest(Model.ON_DEMAND) for pool in pools}
    usd = job.size().max * max(prices.values(), default=0.0)
    if job.machines:
        usd = sum(group.nodes * prices.get(group.pool, 0.0) for group in job.machines)
    work = None if job.work is None else span_s(job.work)
    whole = None if work is None or not usd else count * usd * work / 3600.0
    return PlanView(
        name=file.name,
        sampler=file.sampler,
        seed=cohort.seed,
        trials=count,
        parallel=parallel,
        metric=file.metric,
        goal=file.goal,
        rungs=rungs,
        steps_share=share,
        max_usd=cohort.max_usd,
        at_most_usd=None if whole is None else whole * share,
        whole_usd=whole,
        values=cohort.values,
    )


def rung_plans(file: SweepFile, trials: int) -> tuple[RungPlan, ...]:
    """Return how many trials of a cohort reach each rung, and continue after it."""
    found: list[RungPlan] = []
    for step in file.rungs():
        there = found[-1].continuing if found else trials
        assert file.stop is not None
        found.append(RungPlan(step, there, max(1, there // file.stop.halving.eta)))
    return tuple(found)


def steps_share(file: SweepFile, trials: int, rungs: Sequence[RungPlan]) -> float:
    """Return the steps that halving leaves, as a share of those of all trials to their ends."""
    if file.stop is None or not rungs:
        return 1.0
    steps, at = 0, 0
    for rung in rungs:
        steps, at = steps + rung.trials * (rung.step - at), rung.step
    whole = file.stop.halving.max
    return (steps + rungs[-1].continuing * (whole - at)) / (trials * whole)


# -- trials


class TrialView(Struct, frozen=True):
    """A trial. Money is USD.

    Attributes:
        place: by what has been reported, 1 is best: trials that got further come first. None: no value yet.
        state: `training`, `queued (3rd)`, `waiting at step 100`, `succeeded`, `stopped`, `no record` and the like.
        rungs: comparisons that it has reached. ``rung``: step of the last one.
        step: newest step that is known.
        value: the metric at its end, else at its last rung, else the newest.
        trained: the part of ``spent`` for machines while they trained steps that are kept.
        on_demand_only: the same machine-hours at on-demand prices.
        curve: the metric over the steps, as block characters; "" if it was not read.
    """

    number: int
    name: str
    job: str
    params: Params
    state: str
    place: int | None = None
    rungs: int = 0
    rung: int | None = None
    step: int | None = None
    value: float | None = None
    spent: float = 0.0
    trained: float = 0.0
    on_demand_only: float = 0.0
    curve: str = ""


class RungView(Struct, frozen=True):
    """A comparison of the trials of one cohort.

    Attributes:
        first: the cohort's lowest number, and ``last`` its highest.
        reached: how many of the ``trials`` that are to reach it have reported. ``best``: the best value.
        lost: how many of the others never will: they have ended, or belong to a stopped search and are not submitted.
        waits_for: names of trials for which others wait there. ``held``: names of those that are on hold until a person
            resumes them; the others wait for these only while too few have a value.
    """

    first: int
    last: int
    step: int
    trials: int
    reached: int
    lost: int
    best: float | None
    waits_for: tuple[str, ...] = ()
    held: tuple[str, ...] = ()


class SweepView(Struct, frozen=True):
    """A search. Money is USD.

    Attributes:
        states: number of trials by state. ``rungs``: of one cohort after the other.
        best: number of the best trial; None: no value yet.
        whole_saved: what the trials that halving ended would still have cost to `halving.max`, each at its own cost
            per trained step, without further starts and losses; an estimate. None: the search does not halve.
        missing: number of trials that are not submitted. ``stops``: when persons stopped it, and which trials.
        rows: the trials, the best first.
    """

    name: str
    metric: str
    goal: str
    sampler: str
    trials: int
    states: dict[str, int]
    rungs: tuple[RungView, ...]
    best: int | None
    spent: float
    on_demand_only: float
    whole_saved: float | None
    max_usd: float | None
    missing: int
    stops: tuple[SweepStop, ...]
    rows: tuple[TrialView, ...]


class TrialFacts(Struct, frozen=True):
    """What is known of a trial's job beside its report: its view, and the metric's curve if it was read."""

    view: JobView
    curve: MetricColumns | None = None


def sweep_view(
    spec: SweepSpec,
    cohorts: Sequence[Cohort],
    state: SweepState,
    found: Mapping[int, TrialFacts],
    stops: tuple[SweepStop, ...] = (),
) -> SweepView:
    """Return the view of a search. ``found``: of the submitted trials, by number."""
    file = spec.file
    rows = [_trial(spec, cohort, number, state, found.get(number)) for cohort in cohorts for number in cohort.numbers()]
    ordered = sorted(rows, key=lambda row: (row.value is None, -row.rungs, order(row.value, file.goal), row.number))
    below = stops[-1].below if stops else 0
    never = {row.number for row in rows if not row.job and row.number < below}
    placed = [
        msgspec.structs.replace(row, place=None if row.value is None else place) for place, row in enumerate(ordered, 1)
    ]
    return SweepView(
        name=file.name,
        metric=file.metric,
        goal=file.goal,
        sampler=file.sampler,
        trials=len(rows),
        states=dict(Counter(_kind(row.state) for row in placed)),
        rungs=tuple(rung for cohort in cohorts for rung in _rungs(spec, cohort, state, never)),
        best=next((row.number for row in placed if row.place is not None), None),
        spent=sum(row.spent for row in rows),
        on_demand_only=sum(row.on_demand_only for row in rows),
        whole_saved=_whole_saved(file, rows),
        max_usd=cohorts[-1].max_usd if cohorts else None,
        missing=sum(not row.job for row in rows) - len(never),
        stops=stops,
        rows=tuple(placed),
    )


def _trial(spec: SweepSpec, cohort: Cohort, number: int, state: SweepState, found: TrialFacts | None) -> TrialView:
    file, report = spec.file, state.trial(number)
    name, params = trial_name(file.name, number), cohort.values[number - cohort.first]
    if found is None:  # a person deleted the record, or it is unreadable
        return TrialView(number, name, report.job, params, NO_RECORD if report.job else NOT_SUBMITTED)
    view, curve, rungs = found.view, found.curve, len(report.values)
    newest = None if curve is None or not curve.values else _finite(curve.values[-1])
    reported = report.final if report.final is not None else report.values[-1] if rungs else newest
    steps = [step for step in (view.step, curve.steps[-1] if curve and curve.steps else None) if step is not None]
    step = max(steps, default=None)
    passed = sum(rung <= step for rung in file.rungs()) if step is not None else 0  # the last trial stops at no rung
    return TrialView(
        number=number,
        name=name,
        job=view.job,
        params=params,
        state=_state(file, view, rungs),
        rungs=rungs if report.final is None else max(rungs, passed) + 1,
        rung=file.rungs()[rungs - 1] if 0 < rungs <= len(file.rungs()) else None,
        step=step,
        value=None if reported is None else _finite(reported),
        spent=view.money.spent,
        trained=view.trained_usd,
        on_demand_only=view.money.on_demand_only,
        curve="" if curve is None else sparkline(curve.steps, curve.values, CURVE_WIDTH),
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _state(file: SweepFile, view: JobView, rungs: int) -> str:
    if view.hold is None or view.hold.kind is not Hold.RUNG:
        return phase_word(view)
    return f"{WAITS} at step {file.rungs()[rungs - 1]}" if 0 < rungs <= len(file.rungs()) else WAITS


def _kind(state: str) -> str:
    """Return a state without its place in the queue or its step."""
    return state.partition(" (")[0].partition(" at step")[0]


def _rungs(spec: SweepSpec, cohort: Cohort, state: SweepState, never: Set[int]) -> Iterator[RungView]:
    """Yield the comparisons of a cohort. ``never``: numbers of trials that will not be submitted."""
    file, trial = spec.file, trial_of(spec, cohort, cohort.first)
    every = reports(state, cohort.numbers())
    for at, plan in enumerate(rung_plans(file, len(cohort.values))):
        compared = contenders(state, trial, at)
        known = [one for one in every if len(one.values) > at or one in (compared or ())]  # also those resumed later
        going = 0 if compared is not None else sum(not _ended(report, never) for report in every)
        there = [report for report in known if len(report.values) > at or report.final is not None]
        values = sorted(
            (value for report in there if (value := value_at(report, at)) is not None),
            key=lambda value: order(value, file.goal),
        )
        late = lacking(state, trial, at)
        waits_for, held = (
            tuple(trial_name(file.name, report.number) for report in late if report.held is on_hold)
            for on_hold in (False, True)
        )
        yield RungView(
            first=cohort.first,
            last=cohort.numbers()[-1],
            step=plan.step,
            trials=max(len(known), min(plan.trials, going)),
            reached=len(there),
            lost=sum(_ended(report, never) and report not in there for report in known),
            best=values[0] if values else None,
            waits_for=waits_for,
            held=held,
        )


def _ended(report: TrialReport, never: Set[int]) -> bool:
    return report.over or report.number in never


def _whole_saved(file: SweepFile, rows: Iterable[TrialView]) -> float | None:
    if file.stop is None:
        return None
    whole = file.stop.halving.max
    stopped = (row for row in rows if row.state == Outcome.STOPPED.value and row.rung)
    return sum(row.trained * (whole / row.rung - 1.0) for row in stopped if row.rung)
