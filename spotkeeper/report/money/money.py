"""Computes the cost of a job from its ledger and the prices that the cloud reported, and its cost on-demand.

A machine costs money from its start to its end. The start is `started`, if the cloud reported it, else the INTENT,
which can be too early; the end is `ended`, if the cloud reported it, else the GONE, which can be a minute late. A spot
machine costs the market price of each moment, if reported; if not, and for other models, it costs the price in its
INTENT. A machine that the cloud refused, or that was never seen, costs nothing. The sum exceeds the bill by seconds for
each machine, because EC2 does not report when a requested machine began to run, and because time that a cloud waives is
included (Google waives the first minute of a spot machine that is preempted in that minute). Egress between regions
(EGRESS entries) is a part of the sum; what the job is compared with has none.

The cost is compared in two ways. ``saved`` compares with the same machine-hours at on-demand prices, so that it can be
checked against the cloud's bill; it counts the time in which machines boot, overlap or stand still. Machines in
reserved capacity are left out on both sides: they cost nothing more, and save nothing. ``undisturbed`` is
the cost of another run, on uninterrupted on-demand machines and the same reserved ones. It omits replacements that boot
beside a running machine, and the time between a stop and the next generation; it includes the time of repeated steps,
because the ledger does not record this time. It is shown beside ``spent`` and never subtracted from it, since such a
run is not billed.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from msgspec import Struct

from spotkeeper.contract.ledger import Entry, Event
from spotkeeper.contract.market import Prices
from spotkeeper.contract.record import Record
from spotkeeper.contract.stack import Model, StackState

HOUR_S = 3600.0
ENDS = (Event.END, Event.DONE)
PricesByPool = Mapping[str, Prices]
NO_PRICES: PricesByPool = MappingProxyType({})
Span = tuple[float, float]  # start and end in seconds, start <= end
SETTLED_S = 600.0  # virtual seconds of training; before that, boot times dominate the saved share
STOPS = (Event.STOP, Event.CRASH, Event.HOLD)  # the loss of a member also writes a STOP
STILL = (*STOPS, Event.RUNG)  # after these nothing trains until the next generation


@dataclass(frozen=True)
class Attempt:
    """One machine requested for a node. Times are virtual unix seconds; ``end`` is None while the machine is billed."""

    node: int
    attempt: int
    pool: str
    zone: str
    model: Model
    price: float  # USD per hour
    cause: str
    asked: float
    start: float  # when billing starts
    admitted: float | None
    end: float | None
    refused: bool = False
    on_demand: float | None = None  # price of the same machine on-demand when requested, USD per hour
    listed: bool = False  # an entry of the ledger proves that the machine existed

    @property
    def bought(self) -> bool:
        """Whether the job caused its cost; in reserved capacity it costs the same without a job."""
        return self.model is not Model.RESERVED

    def span(self, now: float) -> Span:
        """The paid time; empty if the machine never existed."""
        if self.refused or not (self.listed or self.end is None):
            return (self.start, self.start)
        return (self.start, max(self.start, now if self.end is None else self.end))

    def cost(self, now: float, prices: PricesByPool = NO_PRICES) -> float:
        """The cost of the machine until ``now``, USD."""
        start, end = self.span(now)
        told = prices.get(self.pool) if self.model is Model.SPOT else None
        price = self.price if told is None else told.mean(start, end, self.price, self.zone)
        return (end - start) / HOUR_S * price


class Money(Struct, frozen=True):
    """The cost of a job, USD. ``on_demand_only``: the same bought machine-hours at on-demand prices.

    In a stack with several regions these are the prices of the cheapest region that the job allows.
    ``egress``: transfers between regions, a part of ``spent``.

    ``saved_percent`` is None until the job has trained for ten minutes, or ended. ``undisturbed``: the cost of
    uninterrupted on-demand machines for the time in which this job trained on machines that it bought.
    """

    spent: float
    on_demand_only: float
    saved: float
    saved_percent: float | None
    undisturbed: float = 0.0
    reserved_hours: float = 0.0  # machine-hours in reserved capacity
    egress: float = 0.0


# One pass writes all its events at one moment; causes come before their effects.
_FIRST = frozenset({Event.SUBMITTED, Event.NOTICE, Event.LOSS, Event.CRASH, Event.REFUSED, Event.ADMITTED})
_LAST = frozenset({Event.INTENT, Event.GENERATION, Event.DONE})


def _moment(entry: Entry) -> tuple[float, int, str]:
    return entry.at, 0 if entry.event in _FIRST else 2 if entry.event in _LAST else 1, entry.id


class _Ordered(tuple[Entry, ...]):
    """What ``first_of_each`` returns; a view of a job calls it a dozen times."""

    __slots__ = ()


def first_of_each(ledger: Iterable[Entry]) -> tuple[Entry, ...]:
    """Sort the entries by time and keep one for each id, since a repeated round can write an event again."""
    if isinstance(ledger, _Ordered):
        return ledger
    out: dict[str, Entry] = {}
    for entry in sorted(ledger, key=_moment):
        out.setdefault(entry.id, entry)
    return _Ordered(out.values())


def attempts(ledger: Iterable[Entry]) -> tuple[Attempt, ...]:
    """Every machine that the job requested, by node and attempt."""
    entries = first_of_each(ledger)
    by_key: dict[tuple[int, int], list[Entry]] = defaultdict(list)
    for entry in entries:
        if entry.node is not None and entry.attempt is not None:
            by_key[entry.node, entry.attempt].append(entry)
    over = next((entry.at for entry in entries if entry.event is Event.DONE), None)
    found = (_attempt(node, number, of, over) for (node, number), of in sorted(by_key.items()))
    return tuple(one for one in found if one is not None)


def _attempt(node: int, number: int, entries: list[Entry], over: float | None) -> Attempt | None:
    intent = next((entry for entry in entries if entry.event is Event.INTENT), None)
    if intent is None:
        return None
    at = {entry.event: entry.at for entry in reversed(entries)}  # the first of each kind
    ran = any(entry.started is not None for entry in entries)
    refused = Event.REFUSED in at and Event.ADMITTED not in at and not ran
    found = at.get(Event.GONE, at[Event.REFUSED] if refused else over)
    return Attempt(
        node=node,
        attempt=number,
        pool=intent.pool or "",
        zone=intent.zone or "",
        model=intent.model or Model.SPOT,
        price=intent.price or 0.0,
        on_demand=intent.on_demand,
        cause=intent.cause or "",
        start=_start(intent, entries),
        asked=intent.at,
        admitted=at.get(Event.ADMITTED),
        end=min((e.ended for e in entries if e.ended is not None), default=found),
        refused=refused,
        listed=any(_seen(entry) for entry in entries),
    )


def mean_price(machine: Attempt, now: float, prices: PricesByPool) -> float:
    """The mean price of a machine over its life, USD an hour."""
    start, end = machine.span(now)
    return machine.cost(now, prices) / (end - start) * HOUR_S if end > start else machine.price


def egress(ledger: Iterable[Entry], until: float = math.inf) -> float:
    """What transfers between regions have cost until a time, USD."""
    return sum(entry.usd or 0.0 for entry in first_of_each(ledger) if entry.event is Event.EGRESS and entry.at <= until)


def awaits_end(record: Record, ledger: Iterable[Entry]) -> bool:
    """Return whether the ledger still lacks the end of a machine that the record has dropped.

    The end (GONE) is written with the allocation, once the cloud lists the machine no longer, and the record need not
    change then. Until it is read, the machine seems to run and its cost grows.
    """
    live = {
        (number, slot.attempt)
        for number, node in enumerate(record.nodes)
        for slot in (node.cur, node.next)
        if slot is not None
    }
    return any(one.end is None and (one.node, one.attempt) not in live for one in attempts(ledger))


def _start(intent: Entry, entries: list[Entry]) -> float:
    """When billing begins, by the cloud's clock. A static machine ran before the job and counts from its INTENT."""
    started = min((entry.started for entry in entries if entry.started is not None), default=intent.at)
    return max(intent.at, started) if intent.model is Model.STATIC else started


def _seen(entry: Entry) -> bool:
    return entry.started is not None or entry.event not in (Event.INTENT, Event.REFUSED, Event.GONE)


def stopped(ledger: Iterable[Entry], now: float) -> tuple[Span, ...]:
    """The spans without training: from a stop, crash or hold to the next generation."""
    out: list[Span] = []
    since: float | None = None
    for entry in first_of_each(ledger):
        if entry.event in STILL and since is None:
            since = entry.at
        elif entry.event in (Event.GENERATION, *ENDS) and since is not None:
            out.append((since, entry.at))
            since = None
    if since is not None:
        out.append((since, max(since, now)))
    return tuple(out)


def money(ledger: Iterable[Entry], stack: StackState | None, now: float, prices: PricesByPool = NO_PRICES) -> Money:
    """Return a job's cost until ``now``, with the comparisons that the module's docstring explains."""
    entries = first_of_each(ledger)
    machines = attempts(entries)
    listed = _list_prices(machines, stack)
    moved = egress(entries)
    spent = sum(machine.cost(now, prices) for machine in machines) + moved
    whole = sum(seconds([one.span(now)]) / HOUR_S * price for one, price in listed.items() if one.bought)
    percent = 100.0 * (whole - spent) / whole if whole > 0 and _settled(entries, now) else None
    reserved = sum(seconds([one.span(now)]) / HOUR_S for one in machines if not one.bought)
    return Money(spent, whole, whole - spent, percent, _undisturbed(entries, listed, now), reserved, moved)


def over_time(
    ledger: Iterable[Entry], stack: StackState | None, now: float, prices: PricesByPool = NO_PRICES, points: int = 120
) -> tuple[tuple[float, float, float], ...]:
    """Return (time, spent, on_demand_only) at points since the first request; the last is equal to :func:`money`."""
    entries = first_of_each(ledger)
    machines = attempts(entries)
    listed = _list_prices(machines, stack)
    spans = {machine: machine.span(now) for machine in machines}
    start = min((span[0] for span in spans.values()), default=now)
    end = max((span[1] for span in spans.values()), default=now)
    out = []
    for number in range(points + 1):
        at = start + (end - start) * number / points
        spent, whole = egress(entries, at), 0.0
        for machine, (began, ended) in spans.items():
            if at > began and ended > began:
                spent += replace(machine, end=min(at, ended), listed=True).cost(now, prices)
                whole += (min(at, ended) - began) / HOUR_S * listed[machine] if machine.bought else 0.0
        out.append((at, spent, whole))
    return tuple(out)


def _settled(entries: tuple[Entry, ...], now: float) -> bool:
    began = next((entry.at for entry in entries if entry.event is Event.GENERATION), None)
    if began is None:
        return False
    over = next((entry.at for entry in entries if entry.event in ENDS), None)
    trained_s = seconds(minus([(began, now if over is None else over)], stopped(entries, now)))
    return trained_s >= (SETTLED_S if over is None else 1.0)


def _undisturbed(entries: tuple[Entry, ...], listed: Mapping[Attempt, float], now: float) -> float:
    idle = stopped(entries, now)
    reserved = [machine for machine in listed if not machine.bought]
    total = 0.0
    for node in {machine.node for machine in listed if machine.bought}:
        of_node = [machine for machine in listed if machine.node == node and machine.bought]
        paid_for = [machine.span(now) for machine in reserved if machine.node == node]
        needed = seconds(minus(union(machine.span(now) for machine in of_node), [*idle, *paid_for]))
        total += needed / HOUR_S * min(listed[machine] for machine in of_node)
    return total


def _list_prices(machines: tuple[Attempt, ...], stack: StackState | None) -> dict[Attempt, float]:
    """The on-demand price of every machine, USD an hour.

    For a machine whose own on-demand price is unknown: the lowest known price of its node's machines, else the lowest
    of all machines, else the price at which the machine was bought.
    """
    own = {machine: _list_price(machine, stack) for machine in machines}
    least = min((price for price in own.values() if price is not None), default=None)

    def likely(machine: Attempt) -> float:
        of_node = [told for one, told in own.items() if one.node == machine.node and told is not None]
        return min(of_node, default=machine.price if least is None else least)

    return {machine: likely(machine) if price is None else price for machine, price in own.items()}


def _list_price(machine: Attempt, stack: StackState | None) -> float | None:
    """The on-demand price of a machine, USD an hour; None for a spot machine whose price is unknown.

    The price recorded with the request comes before the stack's present price for the machine's pool and zone, so that
    later changes of the stack do not change past savings. A price is unknown if the request recorded none and the stack
    no longer has the pool in that zone.
    """
    if machine.on_demand is not None:
        return machine.on_demand
    pool = stack.pool(machine.pool) if stack else None
    price = pool.prices.get(machine.zone) if pool else None
    if price is None:
        return None if machine.model is Model.SPOT else machine.price
    return price.on_demand


# -- spans


def union(spans: Iterable[Span]) -> tuple[Span, ...]:
    """The same spans without overlaps, in order."""
    out: list[Span] = []
    for start, end in sorted(span for span in spans if span[1] > span[0]):
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], end))
        else:
            out.append((start, end))
    return tuple(out)


def minus(spans: Iterable[Span], holes: Iterable[Span]) -> tuple[Span, ...]:
    """The parts of ``spans`` outside ``holes``, in order."""
    cut = union(holes)
    out: list[Span] = []
    for start, end in union(spans):
        at = start
        for hole_start, hole_end in cut:
            if hole_end <= at or hole_start >= end:
                continue
            if hole_start > at:
                out.append((at, hole_start))
            at = max(at, hole_end)
        if at < end:
            out.append((at, end))
    return tuple(out)


def seconds(spans: Iterable[Span]) -> float:
    """The total length of the spans in seconds; overlaps count each time."""
    return sum(end - start for start, end in spans)
