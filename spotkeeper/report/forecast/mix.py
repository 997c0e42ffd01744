"""A mix of machines as a job of one pool, for a replay: recordings are of a single machine type's market. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from spotkeeper.contract.job import JobSpec, pools_of
from spotkeeper.contract.market import PriceRun, Prices
from spotkeeper.contract.stack import PoolState, Price, StackState


def as_one_pool(
    spec: JobSpec, stack: StackState, prices: Mapping[str, Prices], now: float
) -> tuple[JobSpec, StackState, dict[str, Prices], str]:
    """Return the job, stack and spot prices as if all machines of a mix came from the pool that costs most of it.

    Each machine costs the mean of the mix, so the gang costs the same. The market is that of this pool.

    Args:
        prices: the spot prices that the cloud reported, by pool.

    Returns:
        Job, stack, prices, and a line that says what this assumes.

    Raises:
        KeyError: the stack has no such pool, or one of the pools has no price in a zone.
    """
    pools = {pool.name: pool for pool in pools_of(spec, stack)}
    groups = [(pools[group.pool], group.nodes) for group in spec.machines]
    first, count = groups[0][0], spec.size().max

    def mean(listed: str) -> dict[str, float]:
        return {
            zone: sum(nodes * _usd(pool, zone, listed, prices, now) for pool, nodes in groups) / count
            for zone in first.zones
        }

    bought, spot, told = mean("on-demand"), mean("spot"), mean("told")
    lead = max(groups, key=lambda group: group[1] * max(price.on_demand for price in group[0].prices.values()))[0]
    pool = replace(
        lead,
        machine_type=" and ".join(dict.fromkeys([lead.machine_type, *(pool.machine_type for pool, _ in groups)])),
        zones=first.zones,
        prices={zone: Price(on_demand=bought[zone], spot=spot[zone]) for zone in first.zones},
        max_machines=count,
        max_on_demand=sum(min(nodes, pool.max_on_demand) for pool, nodes in groups),
        reservations=(),
    )
    runs = tuple(PriceRun(0.0, usd, zone) for zone, usd in told.items()) if _all_told(groups, prices, now) else ()
    known = {lead.name: Prices(lead.name, asked=now, told=now, runs=runs)} if runs else {}
    plain = replace(spec, machines=(), nodes=count, pools=(lead.name,))
    said = (
        f"machines: all {count} as if of {lead.name}'s market, at the mean price of the mix; without reserved capacity"
    )
    return plain, replace(stack, pools=(pool,)), known, said


def _usd(pool: PoolState, zone: str, listed: str, prices: Mapping[str, Prices], now: float) -> float:
    price = pool.prices[zone]
    if listed == "on-demand":
        return price.on_demand
    reported = prices[pool.name].now(now, zone) if listed == "told" and pool.name in prices else None
    return next(usd for usd in (reported, price.spot, price.on_demand) if usd is not None)


def _all_told(groups: list[tuple[PoolState, int]], prices: Mapping[str, Prices], now: float) -> bool:
    return all(
        pool.name in prices and prices[pool.name].now(now, zone) is not None
        for pool, _ in groups
        for zone in pool.zones
    )
