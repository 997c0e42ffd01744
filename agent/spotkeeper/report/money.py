"""What a job cost, from its ledger and the prices the cloud told, and what it would have cost on-demand.

An attempt is paid from when its machine ran (`started`, where the cloud told; otherwise its
INTENT, an upper bound) until it was off (`ended`, where the cloud told; otherwise its GONE:
the look that found it gone, up to a minute late). A spot machine costs what the market said at each
moment; where the cloud told nothing of that time, and for the other models, the price its
INTENT names. One that the cloud refused, or that was never seen and left nothing behind,
costs nothing. What a cloud waives counts all the same (Google: a spot machine that it takes in the
first minute), and EC2 does not tell when a machine ran after it was ordered: the sum is above the
bill by seconds a machine, and by up to a minute for one of whose end EC2 did not tell the time.

There are two comparisons, and neither is called by the other's name. What was saved compares
like with like: the very same machine-hours, boots, overlaps and standstills with them, at
on-demand prices, which is what the cloud's own bill can be held against. ``undisturbed`` is
another run: on-demand machines that nothing ever interrupts would have had neither boots beside
a running machine nor the time between a stop and the next generation. It is told beside
``spent`` and never subtracted from it: it is no bill for these hours. Steps that were trained
twice do count in it (the ledger does not know them).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from spotkeeper.report.spans import Span, minus, seconds, union
from spotkeeper.spec.ledger import Entry, Event
from spotkeeper.spec.market import Prices
from spotkeeper.spec.model import Model
from spotkeeper.spec.stack import StackState

HOUR_S = 3600.0
ENDS = (Event.END, Event.DONE)
PricesByPool = Mapping[str, Prices]
NO_PRICES: PricesByPool = MappingProxyType({})
TELLS_S = 600.0  # of training (virtual): before that the share that was saved speaks of boots only
STOPS = (Event.STOP, Event.CRASH, Event.HOLD)  # a member's loss writes a STOP beside it


@dataclass(frozen=True)
class Attempt:
    """One machine's time for one rank. ``end`` is None while it is paid; times in virtual unix seconds."""

    rank: int
    attempt: int
    pool: str
    zone: str
    model: Model
    price: float  # USD per hour
    cause: str
    asked: float
    start: float  # of billing
    admitted: float | None
    end: float | None
    refused: bool = False
    listed: bool = False  # anything but its intent and its refusal is known of it

    def span(self, now: float) -> Span:
        """The paid time; empty where nothing was ever had."""
        if self.refused or not (self.listed or self.end is None):
            return (self.start, self.start)
        return (self.start, max(self.start, now if self.end is None else self.end))

    def cost(self, now: float, prices: PricesByPool = NO_PRICES) -> float:
        """USD so far."""
        start, end = self.span(now)
        told = prices.get(self.pool) if self.model is Model.SPOT else None
        price = self.price if told is None else told.mean(start, end, self.price, self.zone)
        return (end - start) / HOUR_S * price


@dataclass(frozen=True)
class Money:
    """USD. ``on_demand_only``: the same machine-hours at on-demand prices; ``undisturbed``: see above."""

    spent: float
    on_demand_only: float
    undisturbed: float
    spot: float
    on_demand: float
    static: float
    tells: bool = False  # the job has trained for long enough, or to its end

    @property
    def saved(self) -> float:
        return self.on_demand_only - self.spent

    @property
    def saved_percent(self) -> float | None:
        """Of ``on_demand_only``; None where that says nothing yet."""
        return 100.0 * self.saved / self.on_demand_only if self.tells and self.on_demand_only > 0 else None


# One pass writes all its events at one moment: causes come before what they lead to.
_FIRST = frozenset({Event.SUBMITTED, Event.NOTICE, Event.LOSS, Event.CRASH, Event.REFUSED, Event.ADMITTED})
_LAST = frozenset({Event.INTENT, Event.GENERATION, Event.DONE})


def _moment(entry: Entry) -> tuple[float, int, str]:
    return entry.at, 0 if entry.event in _FIRST else 2 if entry.event in _LAST else 1, entry.id


def first_of_each(ledger: Iterable[Entry]) -> tuple[Entry, ...]:
    """By time; of entries with one id only the first (a repeated round may write an event again)."""
    out: dict[str, Entry] = {}
    for entry in sorted(ledger, key=_moment):
        out.setdefault(entry.id, entry)
    return tuple(out.values())


def attempts(ledger: Iterable[Entry]) -> tuple[Attempt, ...]:
    """Every machine the job asked for, by rank and attempt."""
    entries = first_of_each(ledger)
    by_key: dict[tuple[int, int], list[Entry]] = defaultdict(list)
    for entry in entries:
        if entry.rank is not None and entry.attempt is not None:
            by_key[entry.rank, entry.attempt].append(entry)
    over = next((entry.at for entry in entries if entry.event is Event.DONE), None)
    found = (_attempt(rank, number, of, over) for (rank, number), of in sorted(by_key.items()))
    return tuple(one for one in found if one is not None)


def _attempt(rank: int, number: int, entries: list[Entry], over: float | None) -> Attempt | None:
    intent = next((entry for entry in entries if entry.event is Event.INTENT), None)
    if intent is None:
        return None
    at = {entry.event: entry.at for entry in reversed(entries)}  # the first of each kind
    ran = any(entry.started is not None for entry in entries)
    refused = Event.REFUSED in at and Event.ADMITTED not in at and not ran
    found = at.get(Event.GONE, at[Event.REFUSED] if refused else over)
    return Attempt(
        rank=rank,
        attempt=number,
        pool=intent.pool or "",
        zone=intent.zone or "",
        model=intent.model or Model.SPOT,
        price=intent.price or 0.0,
        cause=intent.cause or "",
        start=_start(intent, entries),
        asked=intent.at,
        admitted=at.get(Event.ADMITTED),
        end=min((e.ended for e in entries if e.ended is not None), default=found),
        refused=refused,
        listed=any(_seen(entry) for entry in entries),
    )


def _start(intent: Entry, entries: list[Entry]) -> float:
    """When billing begins: as the cloud says, whose clock is its own. A static node was there before."""
    started = min((entry.started for entry in entries if entry.started is not None), default=intent.at)
    return max(intent.at, started) if intent.model is Model.STATIC else started


def _seen(entry: Entry) -> bool:
    """Whether it proves that there was a machine."""
    return entry.started is not None or entry.event not in (Event.INTENT, Event.REFUSED, Event.GONE)


def stopped(ledger: Iterable[Entry], now: float) -> tuple[Span, ...]:
    """When the job did not train: from a stop, crash or hold to the next generation."""
    out: list[Span] = []
    since: float | None = None
    for entry in first_of_each(ledger):
        if entry.event in STOPS and since is None:
            since = entry.at
        elif entry.event in (Event.GENERATION, *ENDS) and since is not None:
            out.append((since, entry.at))
            since = None
    if since is not None:
        out.append((since, max(since, now)))
    return tuple(out)


def money(ledger: Iterable[Entry], stack: StackState | None, now: float, prices: PricesByPool = NO_PRICES) -> Money:
    """What was spent until ``now``, and what on-demand machines would have cost."""
    entries = first_of_each(ledger)
    machines = attempts(entries)
    listed = _list_prices(machines, stack)
    by_model = dict.fromkeys(Model, 0.0)
    for machine in machines:
        by_model[machine.model] += machine.cost(now, prices)
    return Money(
        spent=sum(by_model.values()),
        on_demand_only=sum(seconds([machine.span(now)]) / HOUR_S * price for machine, price in listed.items()),
        undisturbed=_undisturbed(entries, listed, now),
        spot=by_model[Model.SPOT],
        on_demand=by_model[Model.ON_DEMAND],
        static=by_model[Model.STATIC],
        tells=_tells(entries, now),
    )


def _tells(entries: tuple[Entry, ...], now: float) -> bool:
    began = next((entry.at for entry in entries if entry.event is Event.GENERATION), None)
    if began is None:
        return False
    over = next((entry.at for entry in entries if entry.event in ENDS), None)
    trained_s = seconds(minus([(began, now if over is None else over)], stopped(entries, now)))
    return trained_s >= (TELLS_S if over is None else 1.0)


def _undisturbed(entries: tuple[Entry, ...], listed: Mapping[Attempt, float], now: float) -> float:
    idle = stopped(entries, now)
    total = 0.0
    for rank in {machine.rank for machine in listed}:
        of_rank = [machine for machine in listed if machine.rank == rank]
        needed = seconds(minus(union(machine.span(now) for machine in of_rank), idle))
        total += needed / HOUR_S * min(listed[machine] for machine in of_rank)
    return total


def _list_prices(machines: tuple[Attempt, ...], stack: StackState | None) -> dict[Attempt, float]:
    """The on-demand price of every machine, USD an hour: one that has none of its own takes its rank's, or any."""
    own = {machine: _list_price(machine, stack) for machine in machines}
    least = min((price for price in own.values() if price is not None), default=None)

    def likely(machine: Attempt) -> float:
        of_rank = [told for one, told in own.items() if one.rank == machine.rank and told is not None]
        return min(of_rank, default=machine.price if least is None else least)

    return {machine: likely(machine) if price is None else price for machine, price in own.items()}


def _list_price(machine: Attempt, stack: StackState | None) -> float | None:
    """The on-demand price of such a machine. None: one on spot, of a pool that the stack has no longer.

    Its spot price would be no comparison. What the rank's other machines cost is one, or those of another rank.
    """
    pool = stack.pool(machine.pool) if stack else None
    price = pool.prices.get(machine.zone) if pool else None
    if price is None:
        return None if machine.model is Model.SPOT else machine.price
    return price.on_demand
