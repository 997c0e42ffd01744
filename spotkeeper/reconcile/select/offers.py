"""Ranks the offers to try next, each with its reason. Pure.

``decide()`` calls :func:`select` for jobs, ``player.py`` for ``spotkeeper policy`` and for replays. :func:`select`
applies the rule (:func:`rule.plan`) to a stack's offers and their observations. The job's policies: ``balanced`` (the
default) takes spot in the order of its expected worth, then, after ``max_wait``, on-demand. Every policy first takes
idle reserved capacity, which costs nothing more. During an on-demand
fallback, on-demand comes first. With a deadline, the rule decides when to wait. ``spot`` and ``on-demand`` buy only
that model. ``shuffle`` shuffles the zones once per job, tries them in that order, waits, and starts over. No policy
takes spot at or above the on-demand price of the same machine.

Spotkeeper does not know how much faster a more expensive machine type is. So if a job may use several types, an hour of
work is worth the on-demand price of the cheapest type, and spot at a higher price is tried after that on-demand offer.
"""

from __future__ import annotations

import math
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from typing import NamedTuple

from spotkeeper.contract.cloud import Offer
from spotkeeper.contract.job import JobSpec, pools_of, start_s
from spotkeeper.contract.market import Guess
from spotkeeper.contract.stack import Model, PoolState, StackState, region_of
from spotkeeper.reconcile.select.rule import RULE, Go, JobState, Plan, Rule, SpotZone, Work, guessed, plan, weigh
from spotkeeper.reconcile.select.zone_history import Track, common
from spotkeeper.reconcile.store.documents import OfferHistory

HOUR_S = 3600.0
FAR_H = 24.0  # assumed for work left that is unknown
LEAST_LEFT_H = 1 / 60  # less work left counts as this much
AMPLE_H = 1e6  # used as the slack without a deadline
NO_GUESS = Guess()


@dataclass(frozen=True)
class RankedOffer:
    """An offer and the reason for its place in the order, in one line."""

    offer: Offer
    why: str


@dataclass(frozen=True)
class Selection:
    """The offers, best first; if a machine runs, only offers that are better.

    Attributes:
        until: when on-demand joins the offers, virtual unix seconds; None: it has joined, or never will.
        leaves: the machine that runs costs more than on-demand, so the job leaves it for any of the offers.
        probe: offers whose availability is worth a probe.
    """

    choices: tuple[RankedOffer, ...]
    until: float | None = None
    leaves: bool = False
    probe: tuple[Offer, ...] = ()


class MoveCost(NamedTuple):
    """The cost of coming to a zone, without the cost of a start there: seconds, and USD of egress for each machine."""

    s: float
    usd: float = 0.0


HERE = MoveCost(0.0)


@dataclass(frozen=True)
class Runs:
    """A job's running machine, and for how long it has run. ``offer``: the key of its offer."""

    model: Model
    offer: str
    age_s: float = 0.0


@dataclass(frozen=True)
class Need:
    """A machine that a job needs, with the known market.

    Attributes:
        zone: the only zone allowed, or None.
        pool: the only pool allowed; "": every pool of the job.
        models: the provisioning models allowed; (): those that the job's policy allows.
        refused: keys of offers refused since the need arose.
        fallback: an on-demand fallback is active: on-demand comes first, then spot.
        on_demand_left: how many more on-demand machines the job may have.
        idle: how many machines of each reserved capacity other jobs do not use, by its pool and key.
        cold_s: how long an offer stays cold after a refusal to any job.
        salt: the seed of the shuffle; the job's uid.
        runs: the machine that an offer must be better than; None: no machine runs.
        work: the job's progress; None: unknown.
        move_costs: the cost of coming to each zone but that of the checkpoint.
        there: keys of offers whose machines have booted and wait, so that their boot costs nothing more.
        since: when the wait began that ``max_wait_s`` limits.
        hung_s: how long the job waits for a machine that never boots; a deadline must leave time for one.
        save_s: the measured time of a save.
        begin_s: the measured time from a generation's start to its first step; None: no generation has made a step yet.
        attempt_s: the delay that a refused offer causes.
        tick_s: the longest time until :func:`select` is called again.
    """

    now: float
    zone: str | None = None
    pool: str = ""
    models: tuple[Model, ...] = ()
    refused: frozenset[str] = frozenset()
    fallback: bool = False
    on_demand_left: int = 0
    idle: Mapping[tuple[str, str], int] = field(default_factory=dict)
    market: tuple[OfferHistory, ...] = ()
    cold_s: float = 180.0
    salt: str = ""
    runs: Runs | None = None
    work: Work | None = None
    move_costs: Mapping[str, MoveCost] = field(default_factory=dict)
    there: frozenset[str] = frozenset()
    since: float = 0.0
    max_wait_s: float | None = None
    hung_s: float = 0.0
    save_s: float = 20.0
    begin_s: float | None = None
    attempt_s: float = 30.0
    tick_s: float = 60.0

    def egress_usd_hour(self, zone: str) -> float:
        """Return the egress of coming to a zone, spread over the work left, USD per machine-hour."""
        left_h = self.work.left_h if self.work is not None else FAR_H
        return self.move_costs.get(zone, HERE).usd / max(left_h, LEAST_LEFT_H)

    @property
    def dated(self) -> bool:
        """Whether the job's slack is limited: the job must be done, or be on-demand, by a certain time."""
        return self.work is not None and self.work.slack_h is not None


@dataclass(frozen=True)
class _Market:
    """The observations of the market, and the prices with which offers are compared."""

    need: Need
    listed: dict[tuple[str, str], float]  # on-demand price by pool and zone
    worth: float  # USD of an hour of work: on-demand on what runs, or on the cheapest machine allowed, with egress
    rule: Rule
    seen: dict[tuple[str, str, Model], OfferHistory] = field(default_factory=dict)
    usual: dict[str, Guess] = field(default_factory=dict)  # by pool, the mean of the cloud's estimates, for each field
    home: str = ""  # the home region, if the stack has several

    @classmethod
    def observed(cls, spec: JobSpec, need: Need, stack: StackState, rule: Rule) -> _Market:
        listed = {(pool.name, zone): price.on_demand for pool in stack.pools for zone, price in pool.prices.items()}
        seen = {(m.pool, m.zone, m.model): m for m in need.market}
        home = stack.region if stack.regions else ""
        return cls(need, listed, _worth(spec, need, stack, listed), rule, seen, _usual(need.market), home)

    def on_demand_price(self, offer: Offer) -> float:
        """Return the on-demand price of the same machine, USD per hour."""
        return self.listed.get((offer.pool, offer.zone)) or 1.0

    def price(self, offer: Offer) -> float:
        """Return the offer's price with the egress of coming there, spread over the work left, USD per hour."""
        return offer.price + self.need.egress_usd_hour(offer.zone)

    def by_price(self, offer: Offer) -> tuple[float, bool, str]:
        """Order offers by price; of equal ones, the home region's come first, since the bucket is there."""
        return self.price(offer), bool(self.home) and region_of(offer.zone) != self.home, offer.key()

    def costly(self, offer: Offer) -> bool:
        """Whether another allowed machine type costs less on-demand than this spot machine."""
        return self.price(offer) >= self.worth

    def of(self, offer: Offer) -> OfferHistory | None:
        return self.seen.get((offer.pool, offer.zone, offer.model))

    def cold(self, offer: Offer) -> bool:
        seen = self.of(offer)
        return seen is not None and seen.denied_within(self.need.cold_s, self.need.now)


def _worth(spec: JobSpec, need: Need, stack: StackState, listed: Mapping[tuple[str, str], float]) -> float:
    """Return what an hour of work costs on the cheapest on-demand machine, egress included, USD.

    If a machine runs, only machines of its pool count, or that one alone if the job left its zone or pool.
    """
    ran, pools = "", _dynamic(spec, stack, need)
    if need.runs is not None:
        ran, zone, *_ = need.runs.offer.split("/")
        usd = listed.get((ran, zone))
        if usd and not any(pool.name == ran and zone in pool.prices for pool in pools):
            return usd
        pools = [pool for pool in pools if not usd or pool.name == ran]
    found = (
        price.on_demand + need.egress_usd_hour(zone)
        for pool in pools
        for zone, price in pool.prices.items()
        if need.zone in (None, zone) and price.on_demand > 0
    )
    return min(found, default=1.0)


def select(spec: JobSpec, stack: StackState, need: Need, rule: Rule = RULE) -> Selection:
    """Return the dynamic offers, best first, without refused offers.

    Reserved capacity with the most idle machines comes first. If its cloud refused a machine lately, or the job must
    improve on a machine that runs, it comes last or not at all: the stack file may say more than there is.
    """
    market = _Market.observed(spec, need, stack, rule)
    found = _bought(spec, stack, need, market)
    if need.runs is not None:
        return found
    offers = [offer for offer in _reserved(spec, stack, need) if offer.key() not in need.refused]
    idle = tuple(RankedOffer(offer, f"{_where(offer)}: reserved, and paid for already") for offer in offers)
    cold = {choice for choice in idle if market.cold(choice.offer)}
    first, last = (tuple(one for one in idle if (one in cold) is late) for late in (False, True))
    return replace(found, choices=(*first, *found.choices, *last))


def _reserved(spec: JobSpec, stack: StackState, need: Need) -> list[Offer]:
    """Return the offers of reserved capacity that has started, lasts long enough and has idle machines."""
    if need.models and Model.RESERVED not in need.models:
        return []
    least_s = 2 * (need.hung_s + need.cold_s + need.save_s)  # a machine that boots late would have to go at once
    found = [
        (-idle, Offer(pool.name, one.zone, Model.RESERVED, 0.0, reservation=one.name))
        for pool in _dynamic(spec, stack, need)
        for one in pool.reservations
        if one.zone in pool.zones and need.zone in (None, one.zone) and one.usable(need.now, least_s)
        if (idle := need.idle.get((pool.name, one.key), 0)) > 0
    ]
    return [offer for _, offer in sorted(found, key=lambda one: (one[0], one[1].key()))]


def _bought(spec: JobSpec, stack: StackState, need: Need, market: _Market) -> Selection:
    """Return the offers of spot and on-demand machines, best first; cold ones come last within on-demand.

    Spot that is cold, or whose expected life is too short to be worth a start, is a last resort after on-demand: if
    on-demand is refused too, requesting this spot costs nothing, but waiting for better offers costs time. It is left
    out if a machine runs, or if a job with a deadline waits for better spot.
    """
    rule = market.rule
    every = list(_offers(spec, stack, need, market))
    offers = [offer for offer in every if offer.key() not in need.refused]
    spot = [offer for offer in offers if offer.model is Model.SPOT]
    demand = sorted(
        (o for o in offers if o.model is Model.ON_DEMAND), key=lambda o: (market.cold(o), market.by_price(o))
    )
    if spec.policy == "shuffle":
        return _shuffled([offer for offer in spot if offer.price < market.on_demand_price(offer)], demand, need)
    here = need.runs.offer if need.runs is not None else ""
    warm = [offer for offer in spot if offer.key() == here or not market.cold(offer)]
    zones = {offer.key(): _zone(offer, market) for offer in warm}
    chosen = plan(_job_state(need, warm, market), tuple(zones.values()), rule)
    by_key = {offer.key(): offer for offer in spot}
    steps = [(by_key[step.zone], step.why) for step in chosen.steps if step.go is Go.SPOT]
    mean = common([zone.track for zone in zones.values()], rule.shape.weight)
    good = tuple(
        RankedOffer(offer, f"{_where(offer)}: {why}{_guess_why(zones[offer.key()], mean)}") for offer, why in steps
    )
    last = tuple(RankedOffer(offer, _demand_why(offer, spec, need, chosen)) for offer in demand)
    probe = tuple(by_key[key] for key in chosen.probe)
    if need.runs is not None:
        leaves = any(step.go is Go.ON_DEMAND for step in chosen.steps)
        return Selection((*good, *last) if leaves else good, leaves=leaves, probe=probe)
    taken = {offer.key() for offer, _ in steps}
    cheap = [offer for offer in spot if offer.price < market.on_demand_price(offer)]
    order = _by_worth(cheap, market) if len(cheap) > len(taken) else []
    rest = tuple(RankedOffer(offer, _rest_why(offer, market)) for offer in order if offer.key() not in taken)
    patience_s = _patience_s(need, chosen) if any(offer.model is Model.SPOT for offer in every) else 0.0
    if demand and patience_s > 0:  # under a deadline the job waits for better spot
        return Selection((*good, *(() if need.dated else rest)), need.now + patience_s, probe=probe)
    why = "comes after the on-demand machine of another pool, which costs less"
    costly = [RankedOffer(offer, f"{_where(offer)}: {why}") for offer in cheap if market.costly(offer)]
    least = min((market.price(choice.offer) for choice in costly), default=math.inf)
    soon = tuple(choice for choice in last if market.price(choice.offer) < least)
    late = sorted((*costly, *(one for one in last if one not in soon)), key=lambda one: market.price(one.offer))
    before = (soon, good) if need.fallback and not need.dated else (good, soon)
    return Selection((*before[0], *before[1], *rest, *late))


def _patience_s(need: Need, chosen: Plan) -> float:
    """Return for how many more seconds on-demand is not offered; 0 or less: it is offered now.

    ``max_wait`` limits this time, and so does the rule if the job has a deadline. With neither it is 0.
    """
    patience = chosen.patience_h * HOUR_S if need.dated else 0.0 if need.max_wait_s is None else math.inf
    if need.max_wait_s is None:
        return patience
    return min(patience, need.max_wait_s - max(0.0, need.now - need.since))


def _by_worth(spot: list[Offer], market: _Market) -> list[Offer]:
    by_key = {offer.key(): offer for offer in sorted(spot, key=market.by_price)}
    zones = tuple(_zone(offer, market) for offer in by_key.values())
    order = [by_key[zone.id] for _, _, _, zone in weigh(_job_state(market.need, spot, market), zones, market.rule)]
    return sorted(order, key=market.cold)


def _job_state(need: Need, offers: list[Offer], market: _Market) -> JobState:
    """Convert the need to the rule's input. Without a deadline the slack is practically unlimited."""
    boots = [seen.boot_s for offer in offers if (seen := market.of(offer)) and seen.boot_s is not None]
    restart = start_s(max(boots, default=None), need.begin_s, need.save_s) / HOUR_S
    work, runs = need.work or Work(FAR_H, None), need.runs
    slack = {"slack_h": AMPLE_H} if work.slack_h is None else {}
    return JobState(
        **vars(work) | slack,
        now_h=need.now / HOUR_S,
        restart_h=restart,
        move_h=max(0.0, need.hung_s / HOUR_S - restart),
        attempt_h=need.attempt_s / HOUR_S,
        tick_h=need.tick_s / HOUR_S,
        running=None if runs is None else Go.SPOT if runs.model is Model.SPOT else Go.ON_DEMAND,
        age_h=0.0 if runs is None else runs.age_s / HOUR_S,
        zone="" if runs is None else runs.offer,
    )


def _zone(offer: Offer, market: _Market) -> SpotZone:
    seen, worth, cost = market.of(offer), market.worth, market.need.move_costs.get(offer.zone, HERE)
    track = Track.of(seen.watch if seen is not None else None, market.rule.shape)
    if seen is not None and seen.refused_at:
        track.see(seen.refused_at / HOUR_S, False)
    booted_s = (seen.boot_s or 0.0) if seen is not None and offer.key() in market.need.there else 0.0
    move_h = (cost.s - booted_s) / HOUR_S
    return SpotZone(offer.key(), offer.price / worth, track, move_h, cost.usd / worth, _hazard_factor(offer, market))


def _hazard_factor(offer: Offer, market: _Market) -> float:
    """Return the factor, 0.5 to 2, by which the cloud's own estimate changes the prior hazard of a zone.

    The estimate is compared only with the estimates for the pool's other zones, since a cloud rates some machine types
    low everywhere.
    """
    seen = market.of(offer)
    own = seen.guess if seen is not None and seen.guess is not None else NO_GUESS
    zones = market.usual.get(offer.pool, NO_GUESS)
    worse = [
        usual - mine
        for word in Guess.__struct_fields__
        if (mine := getattr(own, word)) is not None and (usual := getattr(zones, word)) is not None
    ]
    return 2.0 ** (sum(worse) / len(worse)) if worse else 1.0


def _usual(market: Iterable[OfferHistory]) -> dict[str, Guess]:
    by_pool: dict[str, list[Guess]] = defaultdict(list)
    for seen in market:
        if seen.guess is not None:
            by_pool[seen.pool].append(seen.guess)
    words = Guess.__struct_fields__
    return {pool: Guess(*(_mean(getattr(one, word) for one in of) for word in words)) for pool, of in by_pool.items()}


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _shuffled(spot: list[Offer], demand: list[Offer], need: Need) -> Selection:
    def place(offer: Offer) -> tuple[int, float, str]:
        return zlib.crc32(f"{need.salt}/{offer.zone}".encode()), offer.price, offer.key()

    rows = [RankedOffer(offer, f"{_where(offer)}: the job shuffles its zones") for offer in sorted(spot, key=place)]
    waited = max(0.0, need.now - need.since)
    if need.max_wait_s is not None and waited < need.max_wait_s and demand:
        return Selection(tuple(rows), need.since + need.max_wait_s)
    after = sorted(demand, key=place)
    return Selection((*rows, *(RankedOffer(offer, f"{_where(offer)}: no zone has spot") for offer in after)))


def _models(spec: JobSpec, need: Need) -> tuple[Model, ...]:
    if need.models:
        return need.models
    if spec.policy == "spot":
        return (Model.SPOT,)
    if spec.policy == "on-demand":
        return (Model.ON_DEMAND,)
    return (Model.SPOT, Model.ON_DEMAND)


def _dynamic(spec: JobSpec, stack: StackState, need: Need) -> list[PoolState]:
    return [pool for pool in pools_of(spec, stack) if pool.kind != "static" and need.pool in ("", pool.name)]


def _offers(spec: JobSpec, stack: StackState, need: Need, market: _Market) -> Iterator[Offer]:
    for pool in _dynamic(spec, stack, need):
        for zone in pool.zones:
            if need.zone not in (None, zone):
                continue
            for model in _models(spec, need):
                if model is Model.RESERVED:
                    continue
                if model is Model.ON_DEMAND and (need.on_demand_left <= 0 or pool.max_on_demand <= 0):
                    continue
                runs = need.runs is not None and need.runs.offer == Offer(pool.name, zone, model, 0.0).key()
                # The machine that runs stays in the comparison even if it now costs more than max_price.
                price = _price(pool, zone, model, market, None if runs else spec.max_price)
                if price is not None:
                    yield Offer(pool.name, zone, model, price)


def _price(pool: PoolState, zone: str, model: Model, market: _Market, most: float | None) -> float | None:
    """Return the offer's price, USD per machine-hour; None if the zone lacks it, or spot costs more than ``most``."""
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


def _guess_why(zone: SpotZone, mean: float) -> str:
    believed, seen = guessed(zone, mean)
    if abs(believed - seen) < 0.05:
        return ""
    return f"; {believed:.1f} times the usual losses are expected, and without the cloud's estimate {seen:.1f} times"


def _rest_why(offer: Offer, market: _Market) -> str:
    if market.cold(offer):
        return f"{_where(offer)}: refused in the last {market.need.cold_s:.0f} s, so this offer comes last"
    return f"{_where(offer)}: not worth starting, because its expected life is too short"


def _demand_why(offer: Offer, spec: JobSpec, need: Need, chosen: Plan) -> str:
    if spec.policy == "on-demand":
        return f"{_where(offer)}: the job's policy"
    if need.dated or need.runs is not None or (chosen.steps and chosen.steps[0].go is Go.ON_DEMAND):
        return f"{_where(offer)}: {chosen.why}"
    return f"{_where(offer)}: {'on-demand fallback' if need.fallback else 'spot is unavailable or not worth starting'}"


def time_of_day(at: float) -> str:
    """Format a time as ``14:20 UTC``, after adding half a second, so that rounding errors do not change the text."""
    return datetime.fromtimestamp(at + 0.5, timezone.utc).strftime("%H:%M UTC")
