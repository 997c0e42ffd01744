"""Answers the selection protocol (``contract.policy``) with `select()`, for ``spotkeeper policy`` and the replay.

A market is represented by a stack with one pool, and a gang by one machine of that pool. The observations of each zone
are kept during a case, as in ``market/`` of a stack.
"""

from __future__ import annotations

from spotkeeper.contract.cloud import Offer
from spotkeeper.contract.job import JobSpec
from spotkeeper.contract.policy import KEEP, ON_DEMAND, SPOT, End, On, PolicyAnswer, PolicyZone, Start, Tick
from spotkeeper.contract.stack import Model, PoolState, Price, StackState
from spotkeeper.reconcile.select.offers import HERE, HOUR_S, MoveCost, Need, Runs, Selection, select
from spotkeeper.reconcile.select.rule import RULE, Rule, Work
from spotkeeper.reconcile.select.zone_history import Track
from spotkeeper.reconcile.store.documents import OfferHistory

POOL = "market"
JOB = JobSpec("job", ("train",))
MODELS = {"spot": Model.SPOT, "od": Model.ON_DEMAND}


class Player:
    """Plays the selection rule in replayed jobs ("cases"), one after another. ``found``: the newest selection."""

    def __init__(self, rule: Rule = RULE) -> None:
        self.rule = rule
        self.found = Selection(())

    def start(self, start: Start) -> None:
        self._terms, self._places = start.job, start.zones
        self._tracks = {place.id: self._past(place) for place in start.zones}
        self._ran = start.home  # the zone of the last spot machine
        self._stack = market(self._places, start.job.on_demand_price)
        regions = {place.id: place.region for place in start.zones}
        self._move_costs = {home: self._move_costs_from(home, regions) for home in regions}

    def end(self, end: End) -> None:
        """End the case. A tick or an end before the next start raises AttributeError."""
        del self._terms

    def tick(self, tick: Tick) -> PolicyAnswer:
        """Return what to try in this tick of the simulator, in order of preference.

        Raises:
            KeyError: the tick names a zone that the case does not have.
        """
        self._observe(tick)
        self.found = found = select(JOB, self._stack, self._need(tick), self.rule)
        words = [ON_DEMAND if c.offer.model is Model.ON_DEMAND else SPOT + c.offer.zone for c in found.choices]
        if tick.on is not None and not found.leaves:
            words.append(KEEP)
        if ON_DEMAND in words:
            del words[words.index(ON_DEMAND) + 1 :]  # on-demand is always available, so later steps are never reached
        return PolicyAnswer(tuple(words), tuple(offer.zone for offer in found.probe))

    def _past(self, place: PolicyZone) -> Track:
        track = Track(self.rule.shape)
        for before_h, up in place.history:
            track.see(-before_h, bool(up))
        track.unhide()
        return track

    def _move_costs_from(self, home: str, regions: dict[str, str]) -> dict[str, MoveCost]:
        terms, near = self._terms, regions[home]
        return {
            zone: HERE if zone == home else MoveCost(terms.move_h * HOUR_S, 0.0 if region == near else terms.move_price)
            for zone, region in regions.items()
        }

    def _observe(self, tick: Tick) -> None:
        before_h = tick.now_h - self._terms.tick_h
        for name, up in (tick.probed | tick.tried).items():
            self._tracks[name].see(before_h, up)
        self._ran = next((name for name, up in tick.tried.items() if up), self._ran)
        if tick.on is not None and tick.on.kind == "spot":
            self._tracks[tick.on.zone].see(tick.now_h, True)
            self._ran = tick.on.zone
        elif tick.event == "preempted":
            self._tracks[self._ran].see(tick.now_h, False)

    def _need(self, tick: Tick) -> Need:
        terms = self._terms
        return Need(
            now=tick.now_h * HOUR_S,
            on_demand_left=1,
            market=tuple([self._seen(zone, usd) for zone, usd in tick.spot_price.items() if usd is not None]),
            runs=None if tick.on is None else _runs(tick.on),
            work=self._work(tick),
            move_costs=self._move_costs[tick.home],
            hung_s=(terms.restart_h + terms.move_h) * HOUR_S,
            save_s=0.0,
            begin_s=0.0,
            attempt_s=terms.attempt_h * HOUR_S,
            tick_s=terms.tick_h * HOUR_S,
        )

    def _seen(self, zone: str, usd: float) -> OfferHistory:
        watch = self._tracks[zone].watch(zone)
        return OfferHistory(POOL, zone, Model.SPOT, price=usd, watch=watch, boot_s=self._terms.restart_h * HOUR_S)

    def _work(self, tick: Tick) -> Work:
        terms = self._terms
        left = terms.horizon_h - tick.now_h if tick.time_left_h is None else tick.time_left_h
        return Work(
            left_h=tick.left_h,
            slack_h=left - tick.left_h,
            planned_h=(terms.horizon_h - terms.work_h) * tick.left_h / terms.work_h,
            done_h=tick.done_h,
            excess_h=tick.cost / terms.on_demand_price - tick.done_h,
            delay_price=terms.delay_price if tick.time_left_h is None else None,
        )


def market(places: tuple[PolicyZone, ...], on_demand_price: float) -> StackState:
    """Return a stack with one pool that has these zones and this on-demand price."""
    zones = tuple(place.id for place in places)
    pool = PoolState(POOL, "spot", "", zones, 1, 1, 1, 1, "", dict.fromkeys(zones, Price(on_demand_price)))
    return StackState("replay", "gcp", "", "", "", (pool,))


def _runs(on: On) -> Runs:
    model = MODELS[on.kind]
    return Runs(model, Offer(POOL, on.zone, model, 0.0).key(), on.age_h * HOUR_S)
