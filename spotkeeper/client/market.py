"""Read what a stack's pools have seen of their market: prices and the lives of machines."""

from __future__ import annotations

from spotkeeper.contract.market import HOUR_S, Observation
from spotkeeper.contract.stack import StackState
from spotkeeper.reconcile.store import paths
from spotkeeper.reconcile.store.market import HOURS_KEPT
from spotkeeper.reconcile.store.store import Store


def observations(store: Store, stack: StackState, now: float) -> dict[str, tuple[Observation, ...]]:
    """Return what spot and on-demand machines of each pool did in the hours that the bucket keeps, in order of time.

    It lists a folder for each pool and reads one object for each hour in which something happened.
    """
    newest = int(now // HOUR_S)
    out = {}
    for pool in (pool.name for pool in stack.pools if pool.kind == "spot"):
        names = (path.rpartition("/")[2] for path in store.list(paths.market_hours(pool)))
        hours = (int(name) for name in names if name.isdecimal())
        kept = tuple(hour for hour in hours if newest - HOURS_KEPT <= hour <= newest)
        out.update(store.read_observations((pool,), kept))
    return out
