"""The rule as a player of the selection protocol (``spec.policy``): keeps what each zone was seen to do, asks the rule.

The replay and ``spotkeeper policy`` drive it. Every case is played by itself: what a zone did in another case is of
other times.
"""

from __future__ import annotations

from spotkeeper.reconcile.select_plan import RULE, Course, Go, Plan, Rule, Zone, plan
from spotkeeper.reconcile.select_track import Track
from spotkeeper.spec.policy import KEEP, ON_DEMAND, SPOT, Answer, End, Place, Start, Tick

_STAY = Answer((KEEP,))
_WORDS = {Go.KEEP: KEEP, Go.ON_DEMAND: ON_DEMAND}


class Player:
    """One policy over any number of cases, one after the other."""

    def __init__(self, rule: Rule = RULE) -> None:
        self.rule = rule
        self.plan: Plan | None = None  # the newest answer, for whoever wants its reasons

    def start(self, start: Start) -> None:
        self._terms, self._places = start.job, start.zones
        self._regions = {place.id: place.region for place in start.zones}
        self._tracks = {place.id: self._past(place) for place in start.zones}
        self._ran = start.home  # the zone that spot ran in last

    def end(self, end: End) -> None:
        pass

    def tick(self, tick: Tick) -> Answer:
        """
        Raises:
            KeyError: it speaks of a zone that the case does not have.
        """
        self._look(tick)
        if tick.on is not None and tick.on.kind == "spot" and self._cheapest(tick):
            return _STAY
        priced = ((place, tick.spot_price.get(place.id)) for place in self._places)
        zones = tuple(self._zone(tick, place, price) for place, price in priced if price is not None)
        self.plan = plan(self._course(tick), zones, self.rule)
        attempts = tuple(_WORDS.get(step.go) or SPOT + step.zone for step in self.plan.steps)
        return Answer(attempts, self.plan.probe)

    def _past(self, place: Place) -> Track:
        track = Track(self.rule.shape)
        for before_h, up in place.history:
            track.see(-before_h, bool(up))
        track.unhide()
        return track

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

    def _cheapest(self, tick: Tick) -> bool:
        """Whether no zone is so much cheaper than the one that runs that the rule has to be asked."""
        assert tick.on is not None
        whole = self._terms.on_demand_price
        here = tick.spot_price.get(tick.on.zone)
        if here is None or here > whole:
            return here is None
        return all(other is None or other >= here - self.rule.dearer * whole for other in tick.spot_price.values())

    def _zone(self, tick: Tick, place: Place, price: float) -> Zone:
        terms, home = self._terms, tick.home
        return Zone(
            place.id,
            price / terms.on_demand_price,
            self._tracks[place.id],
            0.0 if place.id == home else terms.move_h,
            0.0 if place.region == self._regions[home] else terms.move_price / terms.on_demand_price,
        )

    def _course(self, tick: Tick) -> Course:
        terms, on = self._terms, tick.on
        left = terms.horizon_h - tick.now_h if tick.time_left_h is None else tick.time_left_h
        return Course(
            now_h=tick.now_h,
            left_h=tick.left_h,
            slack_h=left - tick.left_h,
            planned_h=(terms.horizon_h - terms.work_h) * tick.left_h / terms.work_h,
            deadline=tick.time_left_h is not None,
            restart_h=terms.restart_h,
            move_h=terms.move_h,
            attempt_h=terms.attempt_h,
            tick_h=terms.tick_h,
            delay_price=terms.delay_price,
            running=None if on is None else Go.SPOT if on.kind == "spot" else Go.ON_DEMAND,
            zone="" if on is None else on.zone,
            age_h=0.0 if on is None else on.age_h,
            done_h=tick.done_h,
            excess_h=tick.cost / terms.on_demand_price - tick.done_h,
        )
