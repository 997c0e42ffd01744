"""The view of a stack as plain values: pools with their limits, zones with prices and interruptions, what it costs now.

It is made from documents alone. Times are virtual unix seconds, money is USD.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from spotkeeper.contract.allocation import Allocation
from spotkeeper.contract.ledger import Entry
from spotkeeper.contract.market import Observation, Prices
from spotkeeper.contract.record import Phase
from spotkeeper.contract.stack import Model, PoolState, StackState
from spotkeeper.report.job.view import JobView
from spotkeeper.report.market import ReservationUse, ZoneSeen, reservation_uses
from spotkeeper.report.money.money import NO_PRICES, PricesByPool, attempts


class PoolZone(Struct, frozen=True):
    """A pool's market in one zone; counts are of the last 90 days, over all jobs.

    Attributes:
        spot, on_demand: the price now, USD per machine-hour; None: unknown. ``reported``: the cloud reported ``spot``.
        machines: dynamic machines that jobs have there now.
        served, refused: requests for spot machines that the cloud served, and that it refused.
        interruptions: spot machines that the cloud took. ``hours``: how long spot machines ran.
    """

    zone: str
    spot: float | None
    on_demand: float | None
    reported: bool = False
    machines: int = 0
    served: int = 0
    refused: int = 0
    interruptions: int = 0
    hours: float = 0.0

    @property
    def availability(self) -> float | None:
        """The share of requests that the cloud served, 0 to 1; None without a request."""
        asked = self.served + self.refused
        return self.served / asked if asked else None


class PoolView(Struct, frozen=True):
    """A pool with its limits.

    Attributes:
        used: the number of machines that jobs have or are about to get, at most ``max_machines``.
        used_on_demand: how many of these are on-demand, at most ``max_on_demand``.
        used_reserved: how many of these are in the pool's reserved capacity, which has ``reserved`` machines now.
    """

    name: str
    kind: str
    machine_type: str
    used: int
    used_on_demand: int
    max_machines: int
    max_on_demand: int
    zones: tuple[PoolZone, ...]
    used_reserved: int = 0
    reserved: int = 0
    reservations: tuple[ReservationUse, ...] = ()


class HeldJob(Struct, frozen=True):
    job: str
    name: str
    reason: str
    usd_per_day: float | None = None


class StackView(Struct, frozen=True):
    """A stack at one moment.

    Attributes:
        usd_hour: what all machines cost an hour at present prices, including static machines without a job.
        listed_usd_hour: what the granted dynamic machines would cost an hour at list prices in each pool's most
            expensive zone; ``max_usd_hour`` limits this.
    """

    stack: str
    cloud: str
    region: str
    pools: tuple[PoolView, ...]
    held: tuple[HeldJob, ...]
    machines: int
    max_machines: int | None
    usd_hour: float
    listed_usd_hour: float
    max_usd_hour: float | None
    jobs: int = 0
    training: int = 0


def stack_view(
    stack: StackState,
    allocation: Allocation,
    jobs: Iterable[tuple[JobView, Sequence[Entry]]],
    now: float,
    prices: PricesByPool = NO_PRICES,
    observed: Mapping[str, Sequence[Observation]] | None = None,
) -> StackView:
    """Return the view of a stack at ``now``.

    Args:
        jobs: the unfinished jobs, each with its ledger.
        observed: what the pools' machines did in the last 90 days, by pool.
    """
    known = list(jobs)
    taken = Counter(grant.pool for grant in allocation.grants if grant.machine is None)
    dear = Counter(grant.pool for grant in allocation.grants if grant.on_demand)
    paid = Counter(grant.pool for grant in allocation.grants if grant.reservation is not None)
    static = Counter(grant.machine for grant in allocation.grants if grant.machine is not None)
    there = Counter(
        (node.pool, node.zone) for view, _ in known for node in view.nodes if node.model not in (None, Model.STATIC)
    )
    pools = tuple(
        PoolView(
            name=pool.name,
            kind=pool.kind,
            machine_type=pool.machine_type,
            used=taken[pool.name] if pool.kind == "spot" else sum(static[machine.name] for machine in pool.machines),
            used_on_demand=dear[pool.name],
            max_machines=pool.max_machines if pool.kind == "spot" else len(pool.machines),
            max_on_demand=pool.max_on_demand,
            used_reserved=paid[pool.name],
            reserved=sum(one.count for one in pool.reservations if one.usable(now)),
            reservations=reservation_uses(pool, allocation.grants, now),
            zones=tuple(_zones(pool, there, now, prices.get(pool.name), (observed or {}).get(pool.name, ()))),
        )
        for pool in stack.pools
    )
    views = [view for view, _ in known]
    return StackView(
        stack=stack.stack,
        cloud=stack.cloud,
        region=", ".join(stack.regions or (stack.region,)),
        pools=pools,
        held=tuple(
            HeldJob(view.job, view.name, view.reason, view.hold.usd_per_day if view.hold else None)
            for view in views
            if view.phase is Phase.HOLD and not view.queued()
        ),
        machines=sum(taken.values()),
        max_machines=stack.max_machines,
        usd_hour=_always(stack) + sum(usd_per_hour(ledger, now, prices) for _, ledger in known),
        listed_usd_hour=sum(
            _listed(pool, taken[pool.name] - dear[pool.name] - paid[pool.name], dear[pool.name]) for pool in stack.pools
        ),
        max_usd_hour=stack.max_usd_hour,
        jobs=len(views),
        training=sum(view.phase is Phase.RUN and view.gen > 0 and not view.stopping for view in views),
    )


def _zones(
    pool: PoolState,
    there: Mapping[tuple[str, str], int],
    now: float,
    told: Prices | None,
    observed: Sequence[Observation],
) -> Iterable[PoolZone]:
    for zone in pool.zones:
        price = pool.prices.get(zone)
        reported = told.now(now, zone) if told is not None and pool.kind == "spot" else None
        seen = ZoneSeen(observed, zone)
        yield PoolZone(
            zone=zone,
            spot=None if pool.kind != "spot" else reported if reported is not None else price.spot if price else None,
            on_demand=price.on_demand if price else None,
            reported=reported is not None,
            machines=there.get((pool.name, zone), 0),
            served=seen.served(0.0, now),
            refused=seen.refused(0.0, now),
            interruptions=seen.interruptions(0.0, now),
            hours=seen.hours(0.0, now),
        )


def _always(stack: StackState) -> float:
    """What static machines cost an hour, whether a job uses them or not."""
    return sum(
        pool.prices[machine.zone].on_demand
        for pool in stack.pools
        for machine in pool.machines
        if machine.zone in pool.prices
    )


def usd_per_hour(ledger: Sequence[Entry], now: float, prices: PricesByPool) -> float:
    """Return what a job's dynamic machines cost an hour at ``now``."""
    total = 0.0
    for machine in attempts(ledger):
        if machine.end is not None or machine.refused or machine.model is Model.STATIC:
            continue
        told = prices.get(machine.pool) if machine.model is Model.SPOT else None
        reported = told.at(now, machine.zone) if told is not None else None
        total += machine.price if reported is None else reported
    return total


def _listed(pool: PoolState, spot: int, on_demand: int) -> float:
    return spot * pool.dearest(Model.SPOT) + on_demand * pool.dearest(Model.ON_DEMAND)
