"""What a case would have cost somebody who knew the whole recording: the measure that policies are held against.

The cheapest course of spot, on-demand and waiting that does the work in time. The work is priced (a Lagrange
multiplier), so that one backward pass over the hours in which nothing changes finds the best course for a price of
work; the price that brings just enough work is searched. The result is a lower bound, and nearly always reached.
"""

from __future__ import annotations

from dataclasses import dataclass

from spotkeeper.replay.model import Case

ROUNDS = 40
CLOSE = 1e-7
NONE = float("inf")
Worth = tuple[float, float]  # cost less the price of the work it does; that work, hours


@dataclass(frozen=True)
class _Span:
    """Hours in which no zone and no price changes; ``price[z]`` None: the zone is not there."""

    hours: float
    price: tuple[float | None, ...]


def optimum(case: Case) -> float:
    """On-demand hours that the best course costs."""
    spans, work = _spans(case), case.terms.work_h
    low, high = 0.0, 4.0
    best = 0.0
    lines = {at: _course(case, spans, at) for at in (low, high)}
    for _ in range(ROUNDS):
        (cost_low, done_low), (cost_high, done_high) = lines[low], lines[high]
        best = max(best, cost_low + low * work, cost_high + high * work)
        if done_high - done_low < CLOSE:
            break
        # The tangents at both ends: where they meet the bound cannot be higher.
        paid_low, paid_high = cost_low + low * done_low, cost_high + high * done_high
        at = (paid_high - paid_low) / (done_high - done_low)
        if not low + CLOSE < at < high - CLOSE:
            break
        cost, done = lines[at] = _course(case, spans, at)
        best = max(best, cost + at * work)
        if abs(cost - (cost_low - (at - low) * done_low)) < CLOSE:
            break
        low, high = (at, high) if done < work else (low, at)
    return best


def _spans(case: Case) -> list[_Span]:
    recording, terms = case.recording, case.terms
    out: list[_Span] = []
    for tick in range(int(terms.horizon_h / terms.tick_h + 1e-9)):
        at = (case.begins + tick) % recording.ticks
        price = tuple(
            [zone.price[at] if up[at] else None for zone, up in zip(recording.zones, recording.up, strict=True)]
        )
        if out and out[-1].price == price:
            out[-1] = _Span(out[-1].hours + terms.tick_h, price)
        else:
            out.append(_Span(terms.tick_h, price))
    return out


def _course(case: Case, spans: list[_Span], worth: float) -> Worth:
    """The best course where an hour of work is worth so much: backwards, by what runs and where the checkpoint is."""
    terms, zones = case.terms, range(len(case.recording.zones))
    regions = [zone.region for zone in case.recording.zones]
    start = worth * terms.restart_h
    idle: list[Worth] = [(0.0, 0.0)] * len(zones)
    spot, demand = list(idle), list(idle)
    for span in reversed(spans):
        hours = span.hours
        runs: list[Worth] = [
            (NONE, 0.0) if price is None else (hours * (price - worth) + spot[z][0], hours + spot[z][1])
            for z, price in enumerate(span.price)
        ]
        near, far = _best(runs, regions)
        next_idle, next_spot, next_demand = [], [], []
        for home in zones:
            stays = hours * (terms.on_demand_price - worth) + demand[home][0], hours + demand[home][1]
            best = min(
                (0.0, 0.0),
                (hours * terms.delay_price + idle[home][0], idle[home][1]),
                _after(runs[home], start, terms.restart_h),
                _after(near[regions[home]], start + worth * terms.move_h, terms.restart_h + terms.move_h),
                _after(far, start + worth * terms.move_h + terms.move_price, terms.restart_h + terms.move_h),
                _after(stays, start, terms.restart_h),
            )
            next_idle.append(best)
            next_demand.append(min(best, stays))
            next_spot.append(min(best, runs[home]))
        idle, spot, demand = next_idle, next_spot, next_demand
    return idle[case.home]


def _best(runs: list[Worth], regions: list[str]) -> tuple[dict[str, Worth], Worth]:
    """The best launch by region, and of all."""
    near: dict[str, Worth] = {}
    for run, region in zip(runs, regions, strict=True):
        near[region] = min(run, near.get(region, run))
    return near, min(near.values())


def _after(run: Worth, cost: float, lost_h: float) -> Worth:
    return run[0] + cost, run[1] - lost_h
