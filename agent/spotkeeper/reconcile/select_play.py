"""`select()` as a player of the selection protocol (``spec.policy``): a market is brought before it as a stack.

``spotkeeper policy`` and the replay drive it. A market is one pool with its zones, a gang is one machine of it; what
each zone was seen to do is kept here, as ``market/`` keeps it for a stack. Every case is played by itself: what a zone
did in another case is of other times.
"""

from __future__ import annotations

from spotkeeper.reconcile.select import HERE, HOUR_S, Need, Runs, Selection, Way, Work, select
from spotkeeper.reconcile.select_plan import RULE, Rule
from spotkeeper.reconcile.select_track import Track
from spotkeeper.reconcile.store_api import OfferSeen
from spotkeeper.spec.cloud import Offer
from spotkeeper.spec.job import JobSpec
from spotkeeper.spec.model import Model
from spotkeeper.spec.policy import KEEP, ON_DEMAND, SPOT, Answer, End, On, Place, Start, Tick
from spotkeeper.spec.stack import PoolState, Price, StackState

POOL = "market"
JOB = JobSpec("job", ("train",))
MODELS = {"spot": Model.SPOT, "od": Model.ON_DEMAND}


class Player:
    """`select()` over any number of cases, one after the other. ``found``: its newest answer, with its reasons."""

    def __init__(self, rule: Rule = RULE) -> None:
        self.rule = rule
        self.found = Selection(())

    def start(self, start: Start) -> None:
        self._terms, self._places = start.job, start.zones
        self._tracks = {place.id: self._past(place) for place in start.zones}
        self._ran = start.home  # the zone that spot ran in last
        self._stack = market(self._places, start.job.on_demand_price)
        regions = {place.id: place.region for place in start.zones}
        self._ways = {home: self._ways_from(home, regions) for home in regions}

    def end(self, end: End) -> None:
        pass

    def tick(self, tick: Tick) -> Answer:
        """
        Raises:
            KeyError: it speaks of a zone that the case does not have.
        """
        self._look(tick)
        self.found = found = select(JOB, self._stack, self._need(tick), self.rule)
        words = [ON_DEMAND if c.offer.model is Model.ON_DEMAND else SPOT + c.offer.zone for c in found.choices]
        if tick.on is not None and not found.leaves:
            words.append(KEEP)
        if ON_DEMAND in words:
            del words[words.index(ON_DEMAND) + 1 :]  # it is always to be had
        return Answer(tuple(words), tuple(offer.zone for offer in found.look))

    def _past(self, place: Place) -> Track:
        track = Track(self.rule.shape)
        for before_h, up in place.history:
            track.see(-before_h, bool(up))
        track.unhide()
        return track

    def _ways_from(self, home: str, regions: dict[str, str]) -> dict[str, Way]:
        """From the zone with the checkpoint to the others."""
        terms, near = self._terms, regions[home]
        return {
            zone: HERE if zone == home else Way(terms.move_h * HOUR_S, 0.0 if region == near else terms.move_price)
            for zone, region in regions.items()
        }

    def _look(self, tick: Tick) -> None:
        """What was tried and probed is of the tick before; what runs, or was lost, is of now."""
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
            ways=self._ways[tick.home],
            hung_s=(terms.restart_h + terms.move_h) * HOUR_S,
            save_s=0.0,
            begin_s=0.0,
            attempt_s=terms.attempt_h * HOUR_S,
            tick_s=terms.tick_h * HOUR_S,
        )

    def _seen(self, zone: str, usd: float) -> OfferSeen:
        watch = self._tracks[zone].watch(zone)
        return OfferSeen(POOL, zone, Model.SPOT, price=usd, watch=watch, boot_s=self._terms.restart_h * HOUR_S)

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


def market(places: tuple[Place, ...], on_demand_price: float) -> StackState:
    """A pool of which nothing is known but its zones, and what on-demand costs."""
    zones = tuple(place.id for place in places)
    pool = PoolState(POOL, "spot", "", zones, 1, 1, 1, 1, "", dict.fromkeys(zones, Price(on_demand_price)))
    return StackState("replay", "gcp", "", "", "", (pool,))


def _runs(on: On) -> Runs:
    model = MODELS[on.kind]
    return Runs(model, Offer(POOL, on.zone, model, 0.0).key(), on.age_h * HOUR_S)
