"""Published policies to compare with, on the same replay as the shipped one."""

from __future__ import annotations

import math

from spotkeeper.contract.policy import KEEP, ON_DEMAND, SPOT, End, PolicyAnswer, Start, Terms, Tick

DEMAND, STAY = PolicyAnswer((ON_DEMAND,)), PolicyAnswer((KEEP,))


class Known:
    """Common parts. ``all_zones``: use all zones, cheapest first, instead of the home zone."""

    def __init__(self, *, all_zones: bool = False) -> None:
        self.all_zones = all_zones

    def start(self, start: Start) -> None:
        self.terms: Terms = start.job
        self.home, self.regions = start.home, {place.id: place.region for place in start.zones}
        self.down = {p.id: 1 - sum(up for _, up in p.history) / max(1, len(p.history)) for p in start.zones}

    def end(self, end: End) -> None:
        pass

    def spot(self, tick: Tick, *last: str, unavailable: float = 0.0) -> PolicyAnswer:
        if not self.all_zones:
            return PolicyAnswer((SPOT + self.home, *last))
        egress = self.terms.move_price / 6.0

        def dear(zone: str) -> float:
            away, price = self.regions[zone] != self.regions[tick.home], tick.spot_price[zone]
            return (math.inf if price is None else price) + egress * away + unavailable * self.down[zone]

        return PolicyAnswer((*(SPOT + zone for zone in sorted(tick.spot_price, key=dear)), *last))

    def left(self, tick: Tick) -> float:
        return self.terms.horizon_h - tick.now_h if tick.time_left_h is None else tick.time_left_h

    def must(self, tick: Tick) -> bool:
        terms = self.terms
        need = tick.left_h + 2 * terms.restart_h + terms.move_h + len(self.regions) * terms.attempt_h
        return math.ceil(need / terms.tick_h - 1e-9) >= math.floor(self.left(tick) / terms.tick_h + 1e-9)


class OnDemand(Known):
    def tick(self, tick: Tick) -> PolicyAnswer:
        return DEMAND


class SpotOnly(Known):
    """Spot in the home zone only."""

    def tick(self, tick: Tick) -> PolicyAnswer:
        return self.spot(tick)


class Greedy(Known):
    """Spot while there is time, then on-demand (NSDI'24, "Can't Be Late")."""

    def tick(self, tick: Tick) -> PolicyAnswer:
        if tick.on is not None:
            return STAY
        return DEMAND if self.must(tick) else self.spot(tick)


class Uniform(Known):
    """Uniform Progress (NSDI'24): on-demand whenever the job is behind a straight line to its deadline."""

    def tick(self, tick: Tick) -> PolicyAnswer:
        terms = self.terms
        planned = tick.now_h * terms.work_h / terms.horizon_h
        if tick.on is not None and tick.on.kind == "spot":
            return STAY
        if tick.on is not None:
            ahead = tick.done_h >= planned + 2 * terms.restart_h
            return self.spot(tick, KEEP) if ahead and not self.must(tick) else STAY
        if self.must(tick):
            return DEMAND
        return self.spot(tick, ON_DEMAND) if tick.done_h < planned else self.spot(tick)


class Tuned(Known):
    """Fifteen tuned lines: a proportional wait, six restarts on on-demand, zones by price and unavailability."""

    def tick(self, tick: Tick) -> PolicyAnswer:
        terms, left = self.terms, tick.left_h
        slack = self.left(tick) - left
        planned = (terms.horizon_h - terms.work_h) * left / terms.work_h
        if tick.on is not None and tick.on.kind == "spot":
            return STAY
        if tick.on is not None:
            short = tick.on.age_h < 6 * terms.restart_h or slack < 2 * terms.restart_h + 0.05 * left
            return STAY if short or self.must(tick) else self.spot(tick, KEEP, unavailable=0.1)
        if self.must(tick):
            return DEMAND
        waits = slack > 2 * terms.tick_h + 0.15 * left + 0.3 * planned
        return self.spot(tick, *(() if waits else (ON_DEMAND,)), unavailable=0.1)
