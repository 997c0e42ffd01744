"""Plays the function's purchasing policy, `select()`, in a replay; the gang counts as one machine. Pure.

`select()` alone decides what to buy. The replay repeats the rules of ``decide()`` that affect cost: a gang that lost
its machines stays in its zone until the zone has no capacity, or if it has several regions, asks all zones before it
buys on-demand; an on-demand fallback lasts for its set time; a move keeps the old machines until it has new ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from msgspec.structs import replace

from spotkeeper.contract.cloud import Offer
from spotkeeper.contract.job import JobSpec, span_s
from spotkeeper.contract.policy import KEEP, ON_DEMAND, SPOT, End, On, PolicyAnswer, Start, Tick
from spotkeeper.contract.stack import Model, PoolState, StackState, region_of
from spotkeeper.reconcile.decide.gang.zone_probe import STAY
from spotkeeper.reconcile.decide.snapshot import Times
from spotkeeper.reconcile.select.offers import HOUR_S, MoveCost, Need, Runs, Selection, select
from spotkeeper.reconcile.select.rule import Work
from spotkeeper.reconcile.select.zone_history import Track
from spotkeeper.reconcile.store.documents import OfferHistory

BEGIN_S = 1e6 * HOUR_S  # the time at which a replay begins, on the clock that the policy sees
AS_IT_IS = PolicyAnswer((KEEP,))
TIMES = Times()


@dataclass(frozen=True)
class Shop:
    """The offers open to a job: one pool, its zones in order.

    ``on_demand``: whether the job is allowed to have all its machines on-demand.
    """

    stack: StackState
    pool: PoolState
    on_demand: bool

    @classmethod
    def of(cls, spec: JobSpec, stack: StackState, pool: PoolState) -> Shop:
        whole = spec.policy != "spot" and most_on_demand(spec, pool) >= spec.size().max
        return cls(replace(stack, pools=(pool,)), pool, whole)

    def only(self, zones: int) -> Shop:
        pool = replace(self.pool, zones=self.pool.zones[:zones])
        return Shop(replace(self.stack, pools=(pool,)), pool, self.on_demand)


def most_on_demand(spec: JobSpec, pool: PoolState) -> int:
    """The number of on-demand machines of the pool that the job may have at once."""
    return pool.max_on_demand if spec.max_on_demand is None else min(pool.max_on_demand, spec.max_on_demand)


class Chooser:
    """`select()` as the policy of a replay. It starts without knowledge of the zones, as in a new stack.

    ``start_usd``: by region, the egress of the job's data at the first start there, USD for each machine.
    """

    def __init__(self, spec: JobSpec, shop: Shop, start_usd: Mapping[str, float] | None = None) -> None:
        self.spec, self.shop, self.start_usd = spec, shop, start_usd or {}
        self.nodes = spec.size().max
        self.max_wait_s = None if spec.max_wait is None else span_s(spec.max_wait)

    def start(self, start: Start) -> None:
        self.terms = start.job
        self.boot_s = start.job.restart_h * HOUR_S - TIMES.save_s  # billed time of a launch, less the save
        self.names = {place.id: zone for place, zone in zip(start.zones, self.shop.pool.zones, strict=True)}
        self.ids = {zone: id_ for id_, zone in self.names.items()}
        self.regions = {place.id: place.region for place in start.zones}
        self.tracks = {id_: Track.of(None) for id_ in self.names}
        self.refused_at = dict.fromkeys(self.names, 0.0)
        self.losses: list[float] = []
        self.fallback_until = self.idle_since = self.moved_at = 0.0
        self.ran, self.before = "", ""  # the last zone with a spot gang; what ran at the previous tick

    def end(self, end: End) -> None:
        pass

    def tick(self, tick: Tick) -> PolicyAnswer:
        now = BEGIN_S + tick.now_h * HOUR_S
        self._look(tick, now)
        if tick.on is None:
            return self._idle(tick, now)
        if self.spec.policy == "on-demand":
            return AS_IT_IS
        found = self._select(tick, now, None, self._runs(tick.on))
        words = self._words(found)
        home = SPOT + tick.home
        if now < self.fallback_until or tick.on.kind == "spot":  # spot in the home zone is not available now
            words = tuple(word for word in words if word != home)
        if now < self.moved_at + STAY * self.terms.move_h * HOUR_S:
            words = tuple(word for word in words if word == home)
        return PolicyAnswer((*words, KEEP), tuple(self.ids[offer.zone] for offer in found.probe))

    def _look(self, tick: Tick, now: float) -> None:
        """Record the result of the previous tick's requests, and the gang that runs or was lost now."""
        tried = now - self.terms.tick_h * HOUR_S
        for id_, up in tick.probed.items():
            self.tracks[id_].see(tried / HOUR_S, up)
        for id_, up in tick.tried.items():
            self.tracks[id_].see(tried / HOUR_S, up)
            self.refused_at[id_] = self.refused_at[id_] if up else tried
            self.moved_at = tried if up and self.ran not in ("", id_) else self.moved_at
            self.ran = id_ if up else self.ran
        runs = tick.on.kind if tick.on is not None else ""
        if runs == "spot":
            self.tracks[self.ran].see(now / HOUR_S, True, watched=True)
        elif tick.event == "preempted":
            self.tracks[self.ran].see(now / HOUR_S, False, watched=True)
            self._lost(now)
        if runs == "od" and self.before != "od":
            self.fallback_until = max(self.fallback_until, tried + self.shop.stack.fallback.on_demand_s)
        if not runs and (self.before or tick.event != "tick"):
            self.idle_since = now
        self.before = runs

    def _lost(self, now: float) -> None:
        fallback = self.shop.stack.fallback
        self.losses = [*(at for at in self.losses if now - at < fallback.window_s), now]
        if len(self.losses) >= self.nodes + fallback.losses:
            self.fallback_until = now + fallback.on_demand_s

    def _idle(self, tick: Tick, now: float) -> PolicyAnswer:
        dry = now - self.idle_since >= TIMES.dry_s
        home = tick.home if self.ran and not dry else None
        words = self._words(self._select(tick, now, home))
        if home is not None and len(set(self.regions.values())) > 1:
            own = tuple(word for word in words if word == SPOT + home)
            every = self._words(self._select(tick, now, None))
            words = (*own, *(word for word in every if word not in own))
        return PolicyAnswer(words)

    def _runs(self, on: On) -> Runs:
        model = Model.SPOT if on.kind == "spot" else Model.ON_DEMAND
        return Runs(model, Offer(self.shop.pool.name, self.names[on.zone], model, 0.0).key(), on.age_h * HOUR_S)

    def _select(self, tick: Tick, now: float, home: str | None, runs: Runs | None = None) -> Selection:
        need = Need(
            now=now,
            zone=None if home is None else self.names[home],
            models=() if runs is None else (Model.SPOT,),
            fallback=now < self.fallback_until,
            on_demand_left=self.nodes if self.shop.on_demand else 0,
            market=tuple(self._seen(id_, usd) for id_, usd in tick.spot_price.items()),
            cold_s=TIMES.cold_s,
            runs=runs,
            work=self._work(tick),
            move_costs=self._move_costs(tick.home) if self.ran else self._start_costs(),
            since=self.idle_since,
            max_wait_s=self.max_wait_s,
            save_s=TIMES.save_s,
            begin_s=0.0,
        )
        return select(self.spec, self.shop.stack, need)

    def _seen(self, id_: str, usd: float | None) -> OfferHistory:
        zone = self.names[id_]
        watch = self.tracks[id_].watch(zone)
        return OfferHistory(
            self.shop.pool.name, zone, Model.SPOT, self.refused_at[id_], price=usd, watch=watch, boot_s=self.boot_s
        )

    def _start_costs(self) -> dict[str, MoveCost]:
        usd = {zone: self.start_usd.get(region_of(zone), 0.0) for zone in self.ids}
        return {zone: MoveCost(0.0, price) for zone, price in usd.items() if price}

    def _move_costs(self, home: str) -> dict[str, MoveCost]:
        near, s = self.regions[home], self.terms.move_h * HOUR_S
        return {
            zone: MoveCost(s, 0.0 if self.regions[id_] == near else self.terms.move_price)
            for id_, zone in self.names.items()
            if id_ != home
        }

    def _work(self, tick: Tick) -> Work:
        """Return the work that is left, and the slack: the time until the deadline, less this work and one tick.

        The tick is subtracted because a replay reacts only at ticks.
        """
        whole, left = self.terms.work_h, tick.left_h
        excess = tick.cost / self.terms.on_demand_price - tick.done_h
        if tick.time_left_h is None:
            return Work(left, None, 0.0, tick.done_h, excess)
        planned = max(0.0, self.terms.horizon_h - whole) * left / whole
        return Work(left, tick.time_left_h - left - self.terms.tick_h, planned, tick.done_h, excess)

    def _words(self, found: Selection) -> tuple[str, ...]:
        return tuple(
            SPOT + self.ids[choice.offer.zone] if choice.offer.model is Model.SPOT else ON_DEMAND
            for choice in found.choices
        )
