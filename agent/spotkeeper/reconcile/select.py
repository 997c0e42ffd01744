"""What to ask for next, and where: an ordered list of offers, each with its reason. Pure.

``decide()`` asks it for jobs, ``select_play`` for ``spotkeeper policy`` and for replays. The rule itself is
:func:`select_plan.plan`; here a stack's offers and what was observed of them are brought before it. ``balanced`` (the
default): spot by what its expected life is worth, on-demand after it (before it in a bout), or not before
``max_wait``; with a deadline the rule says when to wait. ``spot`` and ``on-demand`` buy nothing else. ``shuffle`` mixes
the zones once per job, tries them in that order, waits, and starts over. Never a spot price at or above the on-demand
price of the same machine.

Nobody knows how much more a dearer machine type does of a job. So where a job may use several, an hour of its work is
worth what the cheapest of them costs on-demand; spot that costs more than that comes after it.
"""

from __future__ import annotations

import math
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import NamedTuple

from spotkeeper.reconcile.select_plan import RULE, Course, Go, Plan, Rule, Zone, guessed, plan, weigh
from spotkeeper.reconcile.select_track import Track, common
from spotkeeper.reconcile.store_api import OfferSeen
from spotkeeper.spec.cloud import Offer
from spotkeeper.spec.context import pools_of
from spotkeeper.spec.job import JobSpec
from spotkeeper.spec.market import Guess
from spotkeeper.spec.model import Model
from spotkeeper.spec.stack import PoolState, StackState
from spotkeeper.spec.start import start_s

HOUR_S = 3600.0
FAR_H = 24.0  # of work, where nobody knows how much is left
AMPLE_H = 1e6  # of slack, without a deadline
SAYS_NOTHING = Guess()


@dataclass(frozen=True)
class Choice:
    """An offer and why it stands where it stands, in one line."""

    offer: Offer
    why: str


@dataclass(frozen=True)
class Selection:
    """Offers, best first; where something runs, those that are better than it.

    Attributes:
        until: on-demand is among them from then on, virtual unix seconds; None: it is, or it never will be.
        leaves: what runs is given up for one of them whatever it takes, for it costs more than on-demand.
        look: offers of which it would pay to know whether they are there.
    """

    choices: tuple[Choice, ...]
    until: float | None = None
    leaves: bool = False
    look: tuple[Offer, ...] = ()


class Way(NamedTuple):
    """What it takes to bring the checkpoint to a zone, beside a start: seconds, and USD for the whole of it."""

    s: float
    usd: float = 0.0


HERE = Way(0.0)


@dataclass(frozen=True)
class Work:
    """How far a job is, where that is known; hours.

    Attributes:
        left_h, done_h: of its work.
        slack_h: the time until its deadline, less the work that is left; None: it has none.
        planned_h: what the slack would be, had the job kept to its schedule from the start.
        excess_h: what the job has cost beyond on-demand for the work that is done, in on-demand hours.
        delay_price: None: the slack ends with a deadline. Else it ends when on-demand is due anyway, and an hour of
            waiting until then costs this, in on-demand hours.
    """

    left_h: float
    slack_h: float | None
    planned_h: float = 0.0
    done_h: float = 0.0
    excess_h: float = 0.0
    delay_price: float | None = None


@dataclass(frozen=True)
class Runs:
    """What a job has now, and for how long. ``offer``: by its key."""

    model: Model
    offer: str
    age_s: float = 0.0


@dataclass(frozen=True)
class Need:
    """One machine that is wanted, and what is known about the market.

    Attributes:
        zone: the only zone that will do, or None.
        models: what may be bought; () leaves it to the job's policy.
        refused: keys of offers refused since the need arose.
        bout: on-demand is preferred for now, spot comes after it.
        on_demand_left: how many more on-demand machines the job may have.
        cold_s: how long an offer refused to anybody stays cold.
        runs: what it is to be better than; None: nothing runs.
        work: None: nobody knows how much is left.
        ways: to zones that are not the checkpoint's.
        there: keys of offers whose machines have booted, and wait for a word: their boot costs nothing any more.
        since: since when it waits; on-demand counts ``max_wait`` from there.
        hung_s: how long a machine that never comes up is waited for: a deadline must bear one of these.
        save_s: how long a save takes, as measured.
        begin_s: from a generation to its first step, as this job had it last; None: it has not begun yet.
        attempt_s: what an offer that is refused delays the next one by.
        tick_s: how soon this is asked again at the latest.
    """

    now: float
    zone: str | None = None
    models: tuple[Model, ...] = ()
    refused: frozenset[str] = frozenset()
    bout: bool = False
    on_demand_left: int = 0
    market: tuple[OfferSeen, ...] = ()
    cold_s: float = 180.0
    salt: str = ""  # of the shuffle: the job's uid
    runs: Runs | None = None
    work: Work | None = None
    ways: Mapping[str, Way] = field(default_factory=dict)
    there: frozenset[str] = frozenset()
    since: float = 0.0
    max_wait_s: float | None = None
    hung_s: float = 0.0
    save_s: float = 20.0
    begin_s: float | None = None
    attempt_s: float = 30.0
    tick_s: float = 60.0

    @property
    def dated(self) -> bool:
        """Whether there is a time by which it must be on-demand, or done."""
        return self.work is not None and self.work.slack_h is not None


@dataclass(frozen=True)
class _Market:
    """What was observed, by offer."""

    need: Need
    listed: dict[tuple[str, str], float]  # on-demand's price by pool and zone
    worth: float  # USD of an hour of work: on-demand's price of what runs, or of the cheapest machine that may
    rule: Rule
    seen: dict[tuple[str, str, Model], OfferSeen] = field(default_factory=dict)
    usual: dict[str, Guess] = field(default_factory=dict)  # by pool, the mean of the cloud's guesses, word by word

    @classmethod
    def told(cls, spec: JobSpec, need: Need, stack: StackState, rule: Rule) -> _Market:
        listed = {(pool.name, zone): price.on_demand for pool in stack.pools for zone, price in pool.prices.items()}
        seen = {(m.pool, m.zone, m.model): m for m in need.market}
        return cls(need, listed, _worth(spec, need, stack, listed), rule, seen, _usual(need.market))

    def whole(self, offer: Offer) -> float:
        """USD an hour of the same machine on-demand."""
        return self.listed.get((offer.pool, offer.zone)) or 1.0

    def dear(self, offer: Offer) -> bool:
        """Spot of a machine type that is cheaper on-demand in another pool."""
        return offer.price >= self.worth

    def of(self, offer: Offer) -> OfferSeen | None:
        return self.seen.get((offer.pool, offer.zone, offer.model))

    def cold(self, offer: Offer) -> bool:
        seen = self.of(offer)
        return seen is not None and seen.refused_at > 0 and self.need.now - seen.refused_at < self.need.cold_s


def _worth(spec: JobSpec, need: Need, stack: StackState, listed: Mapping[tuple[str, str], float]) -> float:
    if need.runs is not None:
        pool, zone, *_ = need.runs.offer.split("/")
        if usd := listed.get((pool, zone)):
            return usd
    dynamic = [pool.name for pool in pools_of(spec, stack) if pool.kind != "static"]
    here = (usd for (pool, zone), usd in listed.items() if pool in dynamic and need.zone in (None, zone) and usd > 0)
    return min(here, default=1.0)


def select(spec: JobSpec, stack: StackState, need: Need, rule: Rule = RULE) -> Selection:
    """Dynamic offers, best first. Refused ones are left out; cold ones come last of their kind of model.

    Spot that went cold elsewhere, or whose expected life is not worth a start, comes after on-demand: asking
    again is free, waiting is not.
    """
    market = _Market.told(spec, need, stack, rule)
    every = list(_offers(spec, stack, need, market))
    offers = [offer for offer in every if offer.key() not in need.refused]
    spot = [offer for offer in offers if offer.model is Model.SPOT]
    demand = sorted((o for o in offers if o.model is Model.ON_DEMAND), key=lambda o: (market.cold(o), o.price, o.key()))
    if spec.policy == "shuffle":
        return _shuffled([offer for offer in spot if offer.price < market.whole(offer)], demand, need)
    here = need.runs.offer if need.runs is not None else ""
    warm = [offer for offer in spot if offer.key() == here or not market.cold(offer)]
    zones = {offer.key(): _zone(offer, market) for offer in warm}
    told = plan(_course(need, warm, market), tuple(zones.values()), rule)
    by_key = {offer.key(): offer for offer in spot}
    steps = [(by_key[step.zone], step.why) for step in told.steps if step.go is Go.SPOT]
    mean = common([zone.track for zone in zones.values()], rule.shape.weight)
    good = tuple(Choice(offer, f"{_where(offer)}: {why}{_guess_why(zones[offer.key()], mean)}") for offer, why in steps)
    last = tuple(Choice(offer, _demand_why(offer, spec, need, told)) for offer in demand)
    look = tuple(by_key[key] for key in told.probe)
    if need.runs is not None:
        leaves = any(step.go is Go.ON_DEMAND for step in told.steps)
        return Selection((*good, *last) if leaves else good, leaves=leaves, look=look)
    taken = {offer.key() for offer, _ in steps}
    cheap = [offer for offer in spot if offer.price < market.whole(offer)]
    order = _by_worth(cheap, market) if len(cheap) > len(taken) else []
    rest = tuple(Choice(offer, _rest_why(offer, market)) for offer in order if offer.key() not in taken)
    patience_s = _patience_s(need, told) if any(offer.model is Model.SPOT for offer in every) else 0.0
    if demand and patience_s > 0:  # with a deadline, spot that is not worth a start is waited out
        return Selection((*good, *(() if need.dated else rest)), need.now + patience_s, look=look)
    dear = [Choice(offer, _dear_why(offer)) for offer in cheap if market.dear(offer)]
    least = min((choice.offer.price for choice in dear), default=math.inf)
    soon = tuple(choice for choice in last if choice.offer.price < least)
    late = sorted((*dear, *(choice for choice in last if choice not in soon)), key=lambda choice: choice.offer.price)
    before = (soon, good) if need.bout and not need.dated else (good, soon)
    return Selection((*before[0], *before[1], *rest, *late))


def _patience_s(need: Need, told: Plan) -> float:
    """For how long on-demand is not to be had yet: as the rule says under a deadline, ``max_wait`` at most."""
    patience = told.patience_h * HOUR_S if need.dated else 0.0 if need.max_wait_s is None else math.inf
    if need.max_wait_s is None:
        return patience
    return min(patience, need.max_wait_s - max(0.0, need.now - need.since))


def _by_worth(spot: list[Offer], market: _Market) -> list[Offer]:
    by_key = {offer.key(): offer for offer in sorted(spot, key=lambda offer: (offer.price, offer.key()))}
    zones = tuple(_zone(offer, market) for offer in by_key.values())
    order = [by_key[zone.id] for _, _, _, zone in weigh(_course(market.need, spot, market), zones, market.rule)]
    return sorted(order, key=market.cold)


def _course(need: Need, offers: list[Offer], market: _Market) -> Course:
    """The rule's view of the need. Without a deadline there is time for everything."""
    boots = [seen.boot_s for offer in offers if (seen := market.of(offer)) and seen.boot_s is not None]
    restart = start_s(max(boots, default=None), need.begin_s, need.save_s) / HOUR_S
    work, runs = need.work or Work(FAR_H, None), need.runs
    return Course(
        now_h=need.now / HOUR_S,
        left_h=work.left_h,
        slack_h=AMPLE_H if work.slack_h is None else work.slack_h,
        planned_h=work.planned_h,
        deadline=work.delay_price is None,
        restart_h=restart,
        move_h=max(0.0, need.hung_s / HOUR_S - restart),
        attempt_h=need.attempt_s / HOUR_S,
        tick_h=need.tick_s / HOUR_S,
        delay_price=work.delay_price or 0.0,
        running=None if runs is None else Go.SPOT if runs.model is Model.SPOT else Go.ON_DEMAND,
        age_h=0.0 if runs is None else runs.age_s / HOUR_S,
        zone="" if runs is None else runs.offer,
        done_h=work.done_h,
        excess_h=work.excess_h,
    )


def _zone(offer: Offer, market: _Market) -> Zone:
    seen, worth, way = market.of(offer), market.worth, market.need.ways.get(offer.zone, HERE)
    track = Track.of(seen.watch if seen is not None else None, market.rule.shape)
    if seen is not None and seen.refused_at:
        track.see(seen.refused_at / HOUR_S, False)
    booted_s = (seen.boot_s or 0.0) if seen is not None and offer.key() in market.need.there else 0.0
    move_h = (way.s - booted_s) / HOUR_S
    return Zone(offer.key(), offer.price / worth, track, move_h, way.usd / worth, _doubt(offer, market))


def _doubt(offer: Offer, market: _Market) -> float:
    """By how much the cloud's own guess raises the hazard that is believed before anything was seen: a half to twice.

    Only against its guesses of the pool's other zones: of one machine type a cloud guesses low everywhere.
    """
    seen = market.of(offer)
    own = seen.guess if seen is not None and seen.guess is not None else SAYS_NOTHING
    zones = market.usual.get(offer.pool, SAYS_NOTHING)
    worse = [
        usual - mine
        for word in Guess.__struct_fields__
        if (mine := getattr(own, word)) is not None and (usual := getattr(zones, word)) is not None
    ]
    return 2.0 ** (sum(worse) / len(worse)) if worse else 1.0


def _usual(market: Iterable[OfferSeen]) -> dict[str, Guess]:
    told: dict[str, list[Guess]] = defaultdict(list)
    for seen in market:
        if seen.guess is not None:
            told[seen.pool].append(seen.guess)
    words = Guess.__struct_fields__
    return {pool: Guess(*(_mean(getattr(one, word) for one in of) for word in words)) for pool, of in told.items()}


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _shuffled(spot: list[Offer], demand: list[Offer], need: Need) -> Selection:
    def place(offer: Offer) -> tuple[int, float, str]:
        return zlib.crc32(f"{need.salt}/{offer.zone}".encode()), offer.price, offer.key()

    rows = [Choice(offer, f"{_where(offer)}: the zones are shuffled") for offer in sorted(spot, key=place)]
    waited = max(0.0, need.now - need.since)
    if need.max_wait_s is not None and waited < need.max_wait_s and demand:
        return Selection(tuple(rows), need.since + need.max_wait_s)
    after = sorted(demand, key=place)
    return Selection((*rows, *(Choice(offer, f"{_where(offer)}: no zone has spot") for offer in after)))


def _models(spec: JobSpec, need: Need) -> tuple[Model, ...]:
    if need.models:
        return need.models
    if spec.policy == "spot":
        return (Model.SPOT,)
    if spec.policy == "on-demand":
        return (Model.ON_DEMAND,)
    return (Model.SPOT, Model.ON_DEMAND)


def _offers(spec: JobSpec, stack: StackState, need: Need, market: _Market) -> Iterator[Offer]:
    for pool in pools_of(spec, stack):
        if pool.kind == "static":
            continue
        for zone in pool.zones:
            if need.zone not in (None, zone):
                continue
            for model in _models(spec, need):
                if model is Model.ON_DEMAND and (need.on_demand_left <= 0 or pool.max_on_demand <= 0):
                    continue
                runs = need.runs is not None and need.runs.offer == Offer(pool.name, zone, model, 0.0).key()
                # What runs and has become dearer than that is what others are compared with.
                price = _price(pool, zone, model, market, None if runs else spec.max_price)
                if price is not None:
                    yield Offer(pool.name, zone, model, price)


def _price(pool: PoolState, zone: str, model: Model, market: _Market, most: float | None) -> float | None:
    """USD per machine-hour, or None where the offer does not exist, or is spot above ``most``."""
    listed = pool.prices.get(zone)
    if listed is None:
        return None
    observed = market.seen.get((pool.name, zone, model))
    price = observed.price if observed is not None and observed.price is not None else listed.of(model)
    if price is None or model is not Model.SPOT:
        return price
    return price if price >= 0.0 and listed.on_demand > 0 and (most is None or price <= most) else None


# -- reasons


def _where(offer: Offer) -> str:
    return f"{offer.model.value} in {offer.zone} at ${offer.price:.3f}/h"


def _guess_why(zone: Zone, mean: float) -> str:
    """What the cloud's own guess weighs in the choice; "" where it makes no odds."""
    believed, seen = guessed(zone, mean)
    if abs(believed - seen) < 0.05:
        return ""
    return f"; by the cloud's guess {believed:.1f} times the losses, not {seen:.1f}"


def _rest_why(offer: Offer, market: _Market) -> str:
    if market.cold(offer):
        return f"{_where(offer)}: refused within {market.need.cold_s:.0f} s, so last"
    return f"{_where(offer)}: its expected life is not worth a start"


def _dear_why(offer: Offer) -> str:
    return f"{_where(offer)}: a machine of another pool costs less on-demand, so after that"


def _demand_why(offer: Offer, spec: JobSpec, need: Need, told: Plan) -> str:
    if spec.policy == "on-demand":
        return f"{_where(offer)}: the job's policy"
    if need.dated or need.runs is not None or (told.steps and told.steps[0].go is Go.ON_DEMAND):
        return f"{_where(offer)}: {told.why}"
    return f"{_where(offer)}: {'a bout of on-demand' if need.bout else 'no spot that is worth a start is to be had'}"


def time_of_day(at: float) -> str:
    """``14:20 UTC``. Half a second early is the minute: a rounding error must not make two texts of one time."""
    return datetime.fromtimestamp(at + 0.5, timezone.utc).strftime("%H:%M UTC")
