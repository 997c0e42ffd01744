"""How long a start of a job takes, as an earlier job of its name and the machines of its pools had it. Reads alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import TYPE_CHECKING

from spotkeeper.cli.jobs import earlier
from spotkeeper.reconcile.store_api import StoreError
from spotkeeper.spec.start import START_S, start_s

if TYPE_CHECKING:
    from spotkeeper.reconcile.store_api import Store
    from spotkeeper.spec.job import JobSpec
    from spotkeeper.spec.stack import StackState


def starts_of(store: Store | None, stack: StackState, now: float) -> Callable[[JobSpec], float]:
    """For :func:`~spotkeeper.spec.jobfile.read_job`; looked up once. ``store`` None: nobody measured."""

    @cache
    def measured(name: str, pools: tuple[str, ...]) -> float:
        return START_S if store is None else measured_s(store, name, pools, now)

    def starts(job: JobSpec) -> float:
        return measured(job.name, tuple(p.name for p in stack.pools if not job.pools or p.name in job.pools))

    return starts


def measured_s(store: Store, name: str, pools: Iterable[str], now: float) -> float:
    """Seconds; ``START_S`` where nobody measured one. The slowest pool counts: nobody knows yet which it will be.

    A job of the name that is over tells it as well.
    """
    from spotkeeper.reconcile import market

    try:
        job = earlier(store, name)
        told = None if job is None else store.read_progress(job)
        if told is None or told.begin_s is None:
            return START_S
        boots = market.boots(store, tuple(pools), now)
    except StoreError:
        return START_S
    return start_s(max(boots.values(), default=None), told.begin_s, told.save_s or 0.0)
