"""Views of a search as plain values: its plan before it is submitted, and its trials. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import Struct

from spotkeeper.contract.job import JobSpec, span_s
from spotkeeper.contract.stack import Model, PoolState
from spotkeeper.contract.sweep import Params
from spotkeeper.contract.sweepfile import Cohort, SweepFile


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
    dearest = max((pool.dearest(Model.ON_DEMAND) for pool in pools), default=0.0)
    work = None if job.work is None else span_s(job.work)
    whole = None if work is None or not dearest else count * job.size().max * dearest * work / 3600.0
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
