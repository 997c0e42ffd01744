"""Jobs to replay on a recording, drawn once and the same every time, and the least that each could have cost.

As in the published comparisons: 48 h of work; a restart of 4, 12, 12 or 20 min; deadlines of 52, 60 and 70 h, and jobs
without one, for which a waiting hour costs a tenth of an on-demand hour.

``optimum`` is the cost for a policy that knows the whole recording: the cheapest sequence of spot, on-demand and
waiting that does the work in time. The work is priced (a Lagrange multiplier), so that one backward pass over spans
without changes finds the best sequence for a price of work; the price that brings just enough work is searched. The
result is a lower bound, and nearly always reached.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from spotkeeper.contract.policy import Terms
from spotkeeper.replay.model import ATTEMPT_H, HISTORY_H, LEAST_UP, PROBE_H, Case
from spotkeeper.replay.recording import Recording

WORK_H = 48.0
LONGEST_H = 70.0
DEADLINES_H = {"tight": 52.0, "mid": 60.0, "loose": LONGEST_H, "soft": None}
RESTARTS_H = (4 / 60, 12 / 60, 12 / 60, 20 / 60)
MOVE_H = 3 / 60
CHECKPOINT_GB, EGRESS_USD_GB = 50.0, 0.02
FORCED = 3.0  # times the work: the horizon of a job without a deadline
DELAY_PRICE = 0.1
SCOPES = ("all", "region", "one")
USD_H = {
    "k80_1": 0.9,
    "k80_8": 7.2,
    "v100_1": 3.06,
    "v100_8": 24.48,
    "r5_64": 4.032,
    "v100_16n": 48.96,
    "v100_4n": 12.24,
    "c3_88": 4.6,
    "a3_h100": 16 * 88.0,
}  # on-demand, of the gang


def terms(recording: Recording, restart_h: float, deadline_h: float | None, work_h: float = WORK_H) -> Terms:
    return Terms(
        work_h=work_h,
        deadline_h=deadline_h,
        horizon_h=deadline_h or FORCED * work_h,
        restart_h=restart_h,
        move_h=MOVE_H,
        move_price=CHECKPOINT_GB * EGRESS_USD_GB / USD_H.get(recording.market, 3.06),
        attempt_h=ATTEMPT_H,
        probe_h=PROBE_H,
        delay_price=0.0 if deadline_h else DELAY_PRICE,
        tick_h=recording.tick_h,
    )


def draw(recording: Recording, starts: int, seed: str = "") -> Iterator[Case]:
    """Draw ``starts`` times four cases, evenly over the recording; zones, home and restart are drawn for each start.

    A job may use all zones, those of its home's region, or its home alone. A recording too short for the history before
    a job and the longest deadline after it gets a third of the cases.
    """
    rng = random.Random(f"{recording.name}/{seed}")  # noqa: S311 - a replay, not a secret
    looks = round(HISTORY_H / recording.tick_h)
    room = recording.ticks - looks - round(LONGEST_H / recording.tick_h)
    if room < 1:
        room, starts = recording.ticks, max(1, starts // 3)
    homes = [index for index, up in enumerate(recording.up) if sum(up) > LEAST_UP * len(up)]
    for number in range(starts):
        begins = looks + int(room * (number + rng.random()) / starts)
        zone, restart = rng.choice(homes), rng.choice(RESTARTS_H)
        zones = _zones(recording, zone, SCOPES[number % len(SCOPES)])
        part = recording.only(zones)
        for kind, deadline in DEADLINES_H.items():
            name = f"{recording.name}/{number}/{kind}"
            yield Case(name, part, begins % recording.ticks, zones.index(zone), terms(recording, restart, deadline))


def _zones(recording: Recording, home: int, scope: str) -> tuple[int, ...]:
    region = recording.zones[home].region
    return tuple(
        index
        for index, zone in enumerate(recording.zones)
        if scope == "all" or index == home or (scope == "region" and zone.region == region)
    )


ROUNDS = 40
CLOSE = 1e-7
NONE = float("inf")
Worth = tuple[float, float]  # cost less the price of the work it does; that work, hours


@dataclass(frozen=True)
class _Span:
    """Hours in which no zone and no price changes; ``price[z]`` None: the zone has no capacity."""

    hours: float
    price: tuple[float | None, ...]


def optimum(case: Case) -> float:
    """On-demand hours that the best sequence costs."""
    spans, work = _spans(case), case.terms.work_h
    low, high = 0.0, 4.0
    best = 0.0
    lines = {at: _best_sequence(case, spans, at) for at in (low, high)}
    for _ in range(ROUNDS):
        (cost_low, done_low), (cost_high, done_high) = lines[low], lines[high]
        best = max(best, cost_low + low * work, cost_high + high * work)
        if done_high - done_low < CLOSE:
            break
        # The bound is at most where the tangents at both ends meet.
        paid_low, paid_high = cost_low + low * done_low, cost_high + high * done_high
        at = (paid_high - paid_low) / (done_high - done_low)
        if not low + CLOSE < at < high - CLOSE:
            break
        cost, done = lines[at] = _best_sequence(case, spans, at)
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


def _best_sequence(case: Case, spans: list[_Span], worth: float) -> Worth:
    """The best sequence at a price per hour of work: backwards, by what runs and where the checkpoint is."""
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
