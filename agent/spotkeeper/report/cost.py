"""What a stack can cost: each pool by the hour, and a month of it at full size. Pure.

List prices as the stack file and `infra/catalog.py` have them. What a stack really cost is in
``money``; this is for those who decide on a stack file before anything of it runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct

from spotkeeper.spec.stack import PoolState

MONTH_H = 730.0  # hours of a month, as both clouds reckon


class Range(Struct, frozen=True):
    """USD: in the cheapest zone, and in the dearest."""

    least: float
    most: float

    def __add__(self, other: Range) -> Range:
        return Range(self.least + other.least, self.most + other.most)

    def times(self, factor: float) -> Range:
        return Range(self.least * factor, self.most * factor)


NOTHING = Range(0.0, 0.0)


class BootDisk(Struct, frozen=True):
    """Of every machine of a pool, for as long as it lives. ``usd_gb_month`` None: unknown."""

    size_gb: int
    usd_gb_month: float | None


class PoolCost(Struct, frozen=True):
    """One pool. None: a price is not known; ``unknown`` says of what.

    Attributes:
        machines: at most so many at once; of a static pool, always.
        on_demand_machines: so many of them may be on-demand; of a static pool, all are.
        spot, on_demand: USD an hour for one machine.
        disks: USD a month for one machine's disks, the data disk and the boot disk.
        month: USD for a month in which all machines run: the least has every dynamic machine on spot,
            the most as many on-demand as may be.
    """

    name: str
    kind: str
    machine_type: str
    zones: tuple[str, ...]
    machines: int
    on_demand_machines: int
    spot: Range | None
    on_demand: Range | None
    disks: float | None
    month: Range | None
    unknown: tuple[str, ...] = ()

    @property
    def static(self) -> bool:
        return self.kind == "static"


def pool_cost(pool: PoolState, boot: BootDisk) -> PoolCost:
    """What a pool costs, by the prices that ``pool`` carries."""
    prices = [pool.prices.get(zone) for zone in pool.zones]
    spot = _range([price.spot if price else None for price in prices])
    on_demand = _range([price.on_demand if price else None for price in prices])
    static = pool.kind == "static"
    dear = pool.max_nodes if static else min(pool.max_on_demand, pool.max_nodes)
    disks = _disks(pool, boot)
    return PoolCost(
        name=pool.name,
        kind=pool.kind,
        machine_type=pool.machine_type,
        zones=pool.zones,
        machines=pool.max_nodes,
        on_demand_machines=dear,
        spot=None if static else spot,
        on_demand=on_demand if dear else None,
        disks=disks,
        month=_month(pool, dear, spot, on_demand, disks),
        unknown=_unknown(pool, boot, spot if not static else NOTHING, on_demand if dear else NOTHING),
    )


def _range(prices: list[float | None]) -> Range | None:
    """Over the pool's zones; None where one of them has no price: the dearest might be that one."""
    known = [price for price in prices if price is not None]
    return Range(min(known), max(known)) if known and len(known) == len(prices) else None


def _disks(pool: PoolState, boot: BootDisk) -> float | None:
    if pool.disk_usd_gb_month is None or boot.usd_gb_month is None:
        return None
    return pool.disk_gb * pool.disk_usd_gb_month + boot.size_gb * boot.usd_gb_month


def _month(
    pool: PoolState, dear: int, spot: Range | None, on_demand: Range | None, disks: float | None
) -> Range | None:
    if disks is None or (dear and on_demand is None) or (pool.kind != "static" and spot is None):
        return None
    stored = pool.max_nodes * disks
    if pool.kind == "static":
        assert on_demand is not None  # `dear` is all of them, and at least one
        return on_demand.times(pool.max_nodes * MONTH_H) + Range(stored, stored)
    assert spot is not None
    most = dear * (on_demand.most if on_demand else 0.0) + (pool.max_nodes - dear) * spot.most
    return Range(pool.max_nodes * spot.least * MONTH_H + stored, most * MONTH_H + stored)


def _unknown(pool: PoolState, boot: BootDisk, spot: Range | None, on_demand: Range | None) -> tuple[str, ...]:
    missing = []
    if spot is None or on_demand is None:
        missing.append(pool.machine_type)
    if pool.disk_usd_gb_month is None:
        missing.append(pool.disk_type)
    if boot.usd_gb_month is None:
        missing.append("its boot disk")
    return tuple(missing)


class StackCost(Struct, frozen=True):
    """All pools together, and what bounds them.

    Attributes:
        machines: dynamic machines at once, by the pools' sizes and the stack's own cap.
        usd_per_hour: what dynamic machines may cost together (``limits.usd_per_hour``); None: no such cap.
        always: USD a month that bills day and night: static nodes with their disks, jobs or not.
        month: USD for a month with all pools as full as both caps let them be. None (both): a price is not known.
    """

    pools: tuple[PoolCost, ...]
    machines: int
    usd_per_hour: float | None
    always: Range | None
    month: Range | None


def stack_cost(
    pools: Iterable[PoolState],
    boots: Mapping[str, BootDisk],
    machines: int | None = None,
    usd_per_hour: float | None = None,
) -> StackCost:
    """
    Args:
        boots: by pool.
        machines: ``limits.machines``.
        usd_per_hour: ``limits.usd_per_hour``.
    """
    costs = tuple(pool_cost(pool, boots[pool.name]) for pool in pools)
    dynamic = sum(cost.machines for cost in costs if not cost.static)
    at_once = dynamic if machines is None else min(machines, dynamic)
    return StackCost(
        pools=costs,
        machines=at_once,
        usd_per_hour=usd_per_hour,
        always=_sum(cost.month for cost in costs if cost.static),
        month=_capped(costs, at_once, usd_per_hour),
    )


def _capped(costs: tuple[PoolCost, ...], machines: int, usd_per_hour: float | None) -> Range | None:
    """Both caps bound machines, not their disks: those of a job that holds stay when its machines are another's."""
    always = _sum(cost.month for cost in costs if cost.static)
    dynamic = [cost for cost in costs if not cost.static]
    if always is None or any(cost.month is None for cost in dynamic):
        return None
    disks = sum(cost.machines * (cost.disks or 0.0) for cost in dynamic)
    cheapest = sorted(rate for cost in dynamic for rate in _rates(cost, dear=False))
    dearest = sorted((rate for cost in dynamic for rate in _rates(cost, dear=True)), reverse=True)
    most = min(sum(dearest[:machines]), float("inf") if usd_per_hour is None else usd_per_hour)
    least = min(sum(cheapest[:machines]), most)
    return always + Range(least, most).times(MONTH_H) + Range(disks, disks)


def _rates(cost: PoolCost, dear: bool) -> list[float]:
    """USD an hour of each machine that a dynamic pool may have at once."""
    on_demand = cost.on_demand_machines if dear and cost.on_demand else 0
    spot = (cost.spot.most if dear else cost.spot.least) if cost.spot else 0.0
    return [cost.on_demand.most if cost.on_demand else 0.0] * on_demand + [spot] * (cost.machines - on_demand)


def _sum(months: Iterable[Range | None]) -> Range | None:
    total = NOTHING
    for month in months:
        if month is None:
            return None
        total += month
    return total
