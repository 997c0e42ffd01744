"""Finds searches, and reads what is known of their trials: their reports, jobs and curves."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType

from msgspec import Struct

from spotkeeper.client import lookup
from spotkeeper.client.errors import CliError, Exit
from spotkeeper.client.metrics import MetricsReader
from spotkeeper.contract.names import JOB_NAME
from spotkeeper.contract.parse.problem import nearest
from spotkeeper.contract.record import Phase, Record
from spotkeeper.contract.stack import StackState
from spotkeeper.contract.sweep import TrialReport
from spotkeeper.contract.sweepfile import Cohort, SweepSpec, SweepStop
from spotkeeper.reconcile.store.documents import CorruptError
from spotkeeper.reconcile.store.objects import StoreError
from spotkeeper.reconcile.store.store import Store
from spotkeeper.report.job.metrics import MetricColumns, joined
from spotkeeper.report.job.view import CLOUD, Site
from spotkeeper.report.job.waiting import TrialPart, trial_part
from spotkeeper.report.sweep import SweepView, TrialFacts, sweep_view

ATTEMPTS = 8  # most submissions of a trial that :func:`trials_among` knows
GENERATIONS = 16  # newest generations whose metrics are read
_TRIAL = re.compile(r"(.+)-(\d{4})\Z")


class Sweep(Struct, frozen=True):
    """A search as the bucket has it. ``jobs``: the ids of the submitted trials' jobs, by number."""

    spec: SweepSpec
    cohorts: tuple[Cohort, ...]
    jobs: dict[int, str]
    stops: tuple[SweepStop, ...] = ()

    @property
    def name(self) -> str:
        return self.spec.file.name

    def missing(self) -> list[int]:
        """Return the numbers of the trials that are not submitted yet, but for stopped ones."""
        below = self.stops[-1].below if self.stops else 0
        every = (number for cohort in self.cohorts for number in cohort.numbers() if number >= below)
        return [number for number in every if number not in self.jobs]

    def count(self) -> int:
        """Return the number of trials of all cohorts; the next cohort begins with it."""
        return sum(len(cohort.values) for cohort in self.cohorts)

    def cohort(self, number: int) -> Cohort:
        return next(cohort for cohort in self.cohorts if number in cohort.numbers())


def find_sweep(store: Store, name: str) -> Sweep:
    """Return the search of this name.

    Raises:
        CliError: no such search exists, or its submission stopped before it had trials.
        StoreError: the bucket failed.
    """
    spec = store.read_sweep_spec(name) if JOB_NAME.match(name) else None
    cohorts = store.list_cohorts(name) if spec is not None else ()
    if spec is None or not cohorts:
        names = store.list_sweeps()
        if name in names:
            raise CliError(f"{name}: its submission stopped at the start", Exit.MISSING, "submit its file again")
        near = nearest(name, names)
        hint = f" (did you mean {near}?)" if near else ""
        raise CliError(f"{name}: no such search{hint}", Exit.MISSING, f"searches: {', '.join(names) or 'none'}")
    jobs = {number: job for number, job in store.list_trials(name).items() if _is_trial(spec, number, job)}
    return Sweep(spec, cohorts, jobs, store.list_stops(name))


def _is_trial(spec: SweepSpec, number: int, job: str) -> bool:
    """Whether a job has an id of this trial: any submitter can name another job as one that is not submitted yet."""
    return any(job == spec.job_id(number, attempt) for attempt in range(ATTEMPTS))


def trials_among(store: Store, records: Iterable[Record]) -> dict[str, str]:
    """Return the jobs that are trials of searches, with the search of each. It reads a document of each search."""
    named = [(found[1], int(found[2]), record) for record in records if (found := _TRIAL.match(record.name))]
    specs = {name: store.read_sweep_spec(name) for name in {name for name, _, _ in named}}
    return {
        record.job: name
        for name, number, record in named
        if (spec := specs[name]) is not None and _is_trial(spec, number, record.job)
    }


def read_view(
    store: Store, sweep: Sweep, stack: StackState | None, now: float, site: Site = CLOUD, curves: bool = True
) -> SweepView:
    """Return the view of a search at ``now``, virtual unix seconds.

    Args:
        curves: whether to read the curves of all trials; otherwise only of those that have reported nothing.

    Raises:
        StoreError: the bucket failed.
    """
    return sweep_view(
        sweep.spec,
        sweep.cohorts,
        store.read_sweep(sweep.name).value,
        read_facts(store, sweep, stack, now, site, curves),
        sweep.stops,
    )


def read_facts(
    store: Store,
    sweep: Sweep,
    stack: StackState | None,
    now: float,
    site: Site = CLOUD,
    curves: bool = True,
    known: Mapping[int, TrialFacts] = MappingProxyType({}),
) -> dict[int, TrialFacts]:
    """Return what is known of each submitted trial's job; a job whose record cannot be read is left out.

    Args:
        known: the result of an earlier call; what has ended is not read again.
    """
    settled = {number: one for number, one in known.items() if one.view.phase is Phase.DONE}
    records = trial_records(store, sweep, sweep.jobs.keys() - settled.keys())
    waiting = {record.job: record.name for record in records.values() if lookup.may_wait(record)}
    queue, prices = lookup.queue_of(store, stack, now, waiting), lookup.prices_of(store, stack)
    state = store.read_sweep(sweep.name).value

    def facts(number: int) -> TrialFacts:
        view = lookup.view_of(store, records[number], stack, now, site, prices=prices, queue=queue)
        wanted = curves or state.trial(number) == TrialReport(number)
        return TrialFacts(view, read_curve(store, view.job, sweep.spec.file.metric) if wanted else None)

    with ThreadPoolExecutor(lookup.READS) as pool:
        return settled | dict(zip(records, pool.map(facts, records), strict=True))


def trial_records(store: Store, sweep: Sweep, numbers: Iterable[int]) -> dict[int, Record]:
    """Return the records of these trials, by number, but for those that cannot be read."""

    def read(number: int) -> Record | None:
        with contextlib.suppress(CorruptError):
            found = store.read_record(sweep.jobs[number])
            return found.value if found is not None else None
        return None

    wanted = sorted(numbers)
    with ThreadPoolExecutor(lookup.READS) as pool:
        found = zip(wanted, pool.map(read, wanted), strict=True)
        return {number: record for number, record in found if record is not None}


def trial_part_of(store: Store, record: Record) -> TrialPart | None:
    """Return a job's part in a search; None if it is no trial, or its job file is gone."""
    spec = store.read_spec(record.job, record.spec_key())
    if spec is None or spec.trial is None:
        return None
    return trial_part(spec.trial, store.read_sweep(spec.trial.sweep).value)


def read_curve(store: Store, job: str, metric: str) -> MetricColumns | None:
    """Return the curve of one metric of a job; None if it has none, or it cannot be read."""
    with contextlib.suppress(StoreError):
        return joined(MetricsReader(store, job, GENERATIONS).read()).get(metric)
    return None
