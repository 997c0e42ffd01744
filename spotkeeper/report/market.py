"""The market of a stack over time: prices, served and refused requests, and interruptions of each pool and zone. Pure.

The time is cut into equal parts, oldest first. Prices are those that the cloud reported. All else is what the machines
of all jobs saw: a part in which no machine ran and none was requested is unknown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from itertools import pairwise

from msgspec import Struct

from spotkeeper.contract.allocation import Grant
from spotkeeper.contract.ledger import Event
from spotkeeper.contract.market import HOUR_S, Fate, MachineLife, Observation, Prices, lives
from spotkeeper.contract.stack import Model, PoolState, StackState

REFUSED = "capacity"  # the cause of a refusal that says something about the market; others concern the account


class ZoneMarket(Struct, frozen=True):
    """The market of one pool in one zone. Tuples have one value for each part of the time; None: unknown.

    Attributes:
        spot, on_demand: the price now, USD per machine-hour. ``reported``: the cloud reported ``spot``.
        served, refused: requests for spot machines that the cloud served, and that it refused for lack of capacity.
        availability: the share of these requests that it served, 0 to 1; None without a request.
        interruptions: spot machines that the cloud took. ``hours``: how long spot machines ran.
        last_interruption: virtual unix seconds.
        prices: mean spot price, USD per machine-hour.
        available: as ``availability``; 1 if machines ran and none was requested.
        interrupted: spot machines that the cloud took.
    """

    pool: str
    zone: str
    spot: float | None
    on_demand: float | None
    reported: bool
    served: int
    refused: int
    availability: float | None
    interruptions: int
    hours: float
    last_interruption: float | None
    prices: tuple[float | None, ...]
    available: tuple[float | None, ...]
    interrupted: tuple[int, ...]

    @property
    def per_100_hours(self) -> float | None:
        """Interruptions in 100 machine-hours; None if machines ran for less than an hour."""
        return 100.0 * self.interruptions / self.hours if self.hours >= 1.0 else None


class ReservationUse(Struct, frozen=True):
    """Reserved capacity of a pool: ``used`` of its ``count`` machines are granted to jobs.

    ``starts``, ``ends``: virtual unix seconds; None: it has started, its end is unknown. ``usable``: between them.
    """

    pool: str
    zone: str
    name: str
    count: int
    used: int
    usable: bool
    starts: float | None = None
    ends: float | None = None

    @property
    def idle(self) -> int:
        return max(0, self.count - self.used) if self.usable else 0


class MarketView(Struct, frozen=True):
    """The market of a stack from ``since`` to ``until`` (virtual unix seconds), in parts of ``part_s`` seconds.

    ``reservations``: what use jobs make of reserved capacity at ``until``.
    """

    stack: str
    since: float
    until: float
    part_s: float
    zones: tuple[ZoneMarket, ...]
    reservations: tuple[ReservationUse, ...] = ()


def reservation_uses(pool: PoolState, grants: Iterable[Grant], now: float) -> tuple[ReservationUse, ...]:
    """Return the pool's reserved capacity in the stack file's order. ``grants``: those of all jobs."""
    used = Counter(grant.reservation for grant in grants if grant.pool == pool.name)
    return tuple(
        ReservationUse(pool.name, one.zone, one.name, one.count, used[one.key], one.usable(now), one.starts, one.ends)
        for one in pool.reservations
    )


def reservation_line(one: ReservationUse) -> str:
    """Say how much of reserved capacity is used, and from when to when it can be."""
    when = f" from {_moment(one.starts)}" if one.starts is not None else ""
    when += f" to {_moment(one.ends)}" if one.ends is not None else ""
    idle = f"{one.idle} idle" if one.usable else "not open"
    return f"reservation {one.name} in {one.zone}{when}: {one.used} of {one.count} used, {idle}"


def _moment(at: float) -> str:
    return f"{datetime.fromtimestamp(at, timezone.utc):%Y-%m-%d %H:%M} UTC"


def market_view(
    stack: StackState,
    prices: Mapping[str, Prices],
    observed: Mapping[str, Sequence[Observation]],
    since: float,
    until: float,
    parts: int,
    grants: Sequence[Grant] = (),
) -> MarketView:
    """Return the market between two times.

    Args:
        observed: by pool, in order of time, also from before ``since``.
        grants: those of all jobs, for the use of reserved capacity.
    """
    length = (until - since) / parts
    edges = [since + length * number for number in range(parts + 1)]
    zones = (
        _zone(pool, zone, prices.get(pool.name), ZoneSeen(observed.get(pool.name, ()), zone), edges)
        for pool in stack.pools
        if pool.kind == "spot"
        for zone in pool.zones
    )
    reserved = (use for pool in stack.pools for use in reservation_uses(pool, grants, until))
    return MarketView(stack.stack, since, until, length, tuple(zones), tuple(reserved))


class ZoneSeen:
    """What a pool's spot machines saw in one zone.

    ``observed``: the pool's observations in all zones, in order of time.
    """

    def __init__(self, observed: Sequence[Observation], zone: str) -> None:
        self._lives = [life for life in lives(observed) if life.zone == zone and life.model is Model.SPOT]
        self._served = [life.began for life in self._lives if life.began is not None]
        self._refused = [one.at for one in observed if one.zone == zone and _refusal(one)]
        self._lost = [life.ended for life in self._lives if life.fate is not Fate.KEPT and life.ended is not None]

    def served(self, start: float, end: float) -> int:
        return _count(self._served, start, end)

    def refused(self, start: float, end: float) -> int:
        return _count(self._refused, start, end)

    def availability(self, start: float, end: float) -> float | None:
        """Return the share of requests that the cloud served; None without a request."""
        served, refused = self.served(start, end), self.refused(start, end)
        return served / (served + refused) if served + refused else None

    def interruptions(self, start: float, end: float) -> int:
        return _count(self._lost, start, end)

    def last_interruption(self, start: float, end: float) -> float | None:
        return max((at for at in self._lost if start <= at <= end), default=None)

    def hours(self, start: float, end: float) -> float:
        return sum(_overlap(life, start, end) for life in self._lives) / HOUR_S


def _refusal(one: Observation) -> bool:
    return one.event is Event.REFUSED and one.model is Model.SPOT and one.cause == REFUSED


def _overlap(life: MachineLife, start: float, end: float) -> float:
    if life.began is None:
        return 0.0
    return max(0.0, min(end, end if life.ended is None else life.ended) - max(start, life.began))


def _count(times: Iterable[float], start: float, end: float) -> int:
    return sum(start <= at < end for at in times)


def _zone(pool: PoolState, zone: str, told: Prices | None, seen: ZoneSeen, edges: Sequence[float]) -> ZoneMarket:
    since, until = edges[0], edges[-1]
    spans = list(pairwise(edges))
    listed = pool.prices.get(zone)
    now = None if told is None else told.now(until, zone)
    return ZoneMarket(
        pool=pool.name,
        zone=zone,
        spot=now if now is not None else listed.spot if listed else None,
        on_demand=listed.on_demand if listed else None,
        reported=now is not None,
        served=seen.served(since, until),
        refused=seen.refused(since, until),
        availability=seen.availability(since, until),
        interruptions=seen.interruptions(since, until),
        hours=seen.hours(since, until),
        last_interruption=seen.last_interruption(since, until),
        prices=tuple(_mean(told, zone, start, end) for start, end in spans),
        available=tuple(_available(seen, start, end) for start, end in spans),
        interrupted=tuple(seen.interruptions(start, end) for start, end in spans),
    )


def _mean(told: Prices | None, zone: str, start: float, end: float) -> float | None:
    """Return a zone's mean price from ``start`` to ``end``; None if no price before ``end`` is known.

    If its first known price is later than ``start``, the mean begins there.
    """
    if told is None or (last := told.at(end, zone)) is None:
        return None
    first = min(run.start for run in told.runs if run.zone in ("", zone))
    return told.mean(max(start, first), end, last, zone)


def _available(seen: ZoneSeen, start: float, end: float) -> float | None:
    share = seen.availability(start, end)
    return 1.0 if share is None and seen.hours(start, end) > 0 else share
