"""Computes the possible cost of a stack: of each pool per hour and, at full size, per month. Pure.

It uses the list prices of the stack file and `infra/catalog.py`, so that a stack file can be judged before anything
runs. The module ``money`` computes what jobs really cost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct

from spotkeeper.contract.stack import PoolState, TeamState

MONTH_H = 730.0  # hours of a month, as both clouds count


class Range(Struct, frozen=True):
    """The lowest and the highest amount of USD, since zones and price models differ."""

    least: float
    most: float

    def __add__(self, other: Range) -> Range:
        return Range(self.least + other.least, self.most + other.most)

    def times(self, factor: float) -> Range:
        return Range(self.least * factor, self.most * factor)


NOTHING = Range(0.0, 0.0)


class BootDisk(Struct, frozen=True):
    """The boot disk of each machine of a pool. ``usd_gb_month`` is None if its price is unknown."""

    size_gb: int
    usd_gb_month: float | None


class PoolCost(Struct, frozen=True):
    """The cost of one pool. An amount is None if a price is unknown; ``unknown`` lists what has no price.

    Attributes:
        machines: the most machines at once; in a static pool, the number that always runs.
        on_demand_machines: how many of the machines may be on-demand; in a static pool, all.
        spot, on_demand: USD an hour for one machine.
        disks: USD a month for one machine's data disk and boot disk.
        month: USD for a month in which all machines run: least with spot machines only, most with as many on-demand
            machines as allowed.
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
    prices = [pool.prices.get(zone) for zone in pool.zones]
    spot = _range([price.spot if price else None for price in prices])
    on_demand = _range([price.on_demand if price else None for price in prices])
    static = pool.kind == "static"
    dear = pool.max_machines if static else min(pool.max_on_demand, pool.max_machines)
    disks = _disks(pool, boot)
    return PoolCost(
        name=pool.name,
        kind=pool.kind,
        machine_type=pool.machine_type,
        zones=pool.zones,
        machines=pool.max_machines,
        on_demand_machines=dear,
        spot=None if static else spot,
        on_demand=on_demand if dear else None,
        disks=disks,
        month=_month(pool, dear, spot, on_demand, disks),
        unknown=_unknown(pool, boot, spot if not static else NOTHING, on_demand if dear else NOTHING),
    )


def _range(prices: list[float | None]) -> Range | None:
    """The range of prices over the pool's zones; None if a zone has no price, as it might be the most expensive."""
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
    stored = pool.max_machines * disks
    if pool.kind == "static":
        assert on_demand is not None  # in a static pool `dear` counts all machines, at least one
        return on_demand.times(pool.max_machines * MONTH_H) + Range(stored, stored)
    assert spot is not None
    most = dear * (on_demand.most if on_demand else 0.0) + (pool.max_machines - dear) * spot.most
    return Range(pool.max_machines * spot.least * MONTH_H + stored, most * MONTH_H + stored)


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
    """The cost of all pools together, within the stack's limits.

    Attributes:
        machines: the largest number of dynamic machines at once, by the pools' sizes and the stack's limit.
        usd_per_hour: the most that dynamic machines may cost together (``limits.usd_per_hour``); None: no limit.
        always: USD a month for static machines with their disks, which are always billed; None: unknown price.
        month: USD for a month with all pools as full as the limits allow; None: unknown price.
    """

    pools: tuple[PoolCost, ...]
    machines: int
    usd_per_hour: float | None
    always: Range | None
    month: Range | None
    teams: tuple[TeamState, ...] = ()


def stack_cost(
    pools: Iterable[PoolState],
    boots: Mapping[str, BootDisk],
    machines: int | None = None,
    usd_per_hour: float | None = None,
    teams: tuple[TeamState, ...] = (),
) -> StackCost:
    """Return the cost of a stack's pools together, within its limits.

    Args:
        boots: the boot disk of each pool, by the pool's name.
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
        teams=teams,
    )


def _capped(costs: tuple[PoolCost, ...], machines: int, usd_per_hour: float | None) -> Range | None:
    """Return USD for a month within the limits; None: a price is unknown.

    The limits apply to machines. All disks count, because a job on hold keeps its disks.
    """
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
    """USD an hour of each machine of a full dynamic pool: at the highest prices if ``dear``, else at the lowest."""
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
