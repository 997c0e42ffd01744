"""Reads what is known of a search's trials: their reports, jobs and curves."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType

from spotkeeper.client import lookup
from spotkeeper.client.metrics import MetricsReader
from spotkeeper.client.sweep import Sweep
from spotkeeper.contract.record import Phase, Record
from spotkeeper.contract.stack import StackState
from spotkeeper.contract.sweep import TrialReport
from spotkeeper.reconcile.store.documents import CorruptError
from spotkeeper.reconcile.store.objects import StoreError
from spotkeeper.reconcile.store.store import Store
from spotkeeper.report.job.metrics import MetricColumns, joined
from spotkeeper.report.job.view import CLOUD, Site
from spotkeeper.report.sweep import SweepView, TrialFacts, sweep_view

GENERATIONS = 16  # newest generations whose metrics are read


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


def read_curve(store: Store, job: str, metric: str) -> MetricColumns | None:
    """Return the curve of one metric of a job; None if it has none, or it cannot be read."""
    with contextlib.suppress(StoreError):
        return joined(MetricsReader(store, job, GENERATIONS).read()).get(metric)
    return None
