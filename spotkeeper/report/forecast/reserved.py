"""Which machines of a job a forecast takes from reserved capacity: they are paid for already, and never preempted."""

from __future__ import annotations

from collections import Counter

from spotkeeper.contract.job import JobSpec
from spotkeeper.contract.stack import PoolState
from spotkeeper.reconcile.store.store import Store


def reserved_machines(
    spec: JobSpec, pool: PoolState, store: Store | None, now: float, hours: float, said: list[str]
) -> int:
    """Return for how many of the job's machines one zone of the pool has idle reserved capacity during ``hours``.

    It appends to ``said`` what this assumes. Without ``store`` all reserved capacity counts as idle.
    """
    if not pool.reservations:
        return 0
    grants = store.read_allocation().value.grants if store is not None else ()
    taken = Counter(one.reservation for one in grants if one.pool == pool.name)
    idle: Counter[str] = Counter()
    for one in pool.reservations:
        if one.usable(now, 3600.0 * hours):
            idle[one.zone] += max(0, one.count - taken[one.key])
    zone, most = max(idle.items(), key=lambda item: item[1], default=("", 0))
    found = min(most, spec.size().max)
    if found:
        rest = spec.size().max - found
        other = f"costs are those of the other {rest}" if rest else "so the job costs nothing more"
        said.append(f"reserved: {found} of its machines in idle reserved capacity in {zone}, paid for already; {other}")
    else:
        said.append("reserved: no reserved capacity of the pool is idle for that long, so the job buys all machines")
    return found
