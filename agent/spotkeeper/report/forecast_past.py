"""What a forecast replays: recorded markets cut into parts, each a region, and a job put into one of them. No I/O.

A stack is in one region, and regions differ far more than hours do; so a region is what is drawn, and what is left
out where it is measured how far forecasts hold.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from spotkeeper.replay.cases import ATTEMPT_H, LEAST_UP, PROBE_H
from spotkeeper.replay.model import Case, Outcome, play
from spotkeeper.replay.recording import Recording, Zone
from spotkeeper.report.forecast_play import TIMES, Chooser, Shop
from spotkeeper.spec.job import JobSpec
from spotkeeper.spec.policy import Terms

UNENDING = 10.0  # times the work: a job without a deadline that is not done by then is not replayed further
UNENDING_H = 240.0  # and so much more
MOVE_H = TIMES.copy_s / 3600.0  # as jobs reckon with it; the judge of rules has its own


@dataclass(frozen=True)
class Part:
    """A region of one recording, or some of its hours. ``recording`` has that region's zones only."""

    name: str
    recording: Recording


@dataclass(frozen=True)
class Task:
    """A job as it is replayed. Prices are USD per machine-hour, by zone of the shop's pool.

    Attributes:
        deadline_h: from its beginning; None: none.
        restart_h: billed start-up of every launch.
    """

    spec: JobSpec
    shop: Shop
    spot: tuple[float, ...]
    on_demand: float
    work_h: float
    restart_h: float
    deadline_h: float | None = None

    @property
    def nodes(self) -> int:
        return self.spec.size().max

    def terms(self, tick_h: float) -> Terms:
        """Where the gang may not be on-demand there is none to end on at its deadline: it goes on on spot, late."""
        ends_h = self.deadline_h if self.shop.on_demand else None
        return Terms(
            work_h=self.work_h,
            deadline_h=self.deadline_h,
            horizon_h=ends_h or UNENDING * self.work_h + UNENDING_H,
            restart_h=self.restart_h,
            move_h=MOVE_H,
            move_price=0.0,
            attempt_h=ATTEMPT_H,
            probe_h=PROBE_H,
            delay_price=0.0,
            tick_h=tick_h,
            on_demand_price=self.on_demand,
        )


def parts(recordings: Iterable[Recording]) -> tuple[Part, ...]:
    """Every region where some zone was there now and then."""
    out = []
    for recording in recordings:
        for region in dict.fromkeys(zone.region for zone in recording.zones):
            zones = tuple(index for index, zone in enumerate(recording.zones) if zone.region == region)
            part = recording.only(zones)
            if any(_lives(part, index) for index in range(len(zones))):
                out.append(Part(f"{recording.name} {region}", part))
    return tuple(out)


def halves(part: Part) -> tuple[Part, Part] | None:
    """The first half of its hours and the second; None: in one of them spot was never there."""
    middle = part.recording.ticks // 2
    both = _cut(part, slice(0, middle)), _cut(part, slice(middle, None))
    lives = all(any(_lives(half.recording, zone) for zone in range(len(half.recording.zones))) for half in both)
    return both if lives else None


def _cut(part: Part, ticks: slice) -> Part:
    zones = tuple(
        replace(zone, capacity=zone.capacity[ticks], price=zone.price[ticks]) for zone in part.recording.zones
    )
    return Part(part.name, replace(part.recording, zones=zones))


def outcomes(task: Task, part: Part, count: int, seed: str = "") -> Iterator[Outcome]:
    """The job, begun at ``count`` moments of a part, evenly spread; which of its zones are the job's is drawn."""
    rng = random.Random(f"{part.name}/{seed}")  # noqa: S311 - a replay, not a secret
    for number in range(count):
        recording = _met(task, part.recording, rng)
        begins = int(recording.ticks * (number + rng.random()) / count)
        shop = task.shop.only(len(recording.zones))
        case = Case(part.name, recording, begins, 0, task.terms(recording.tick_h))
        yield play(case, Chooser(task.spec, shop))


def _met(task: Task, recording: Recording, rng: random.Random) -> Recording:
    """As many of the recorded zones as the job has, at its prices; one of them at least was there now and then."""
    every = range(len(recording.zones))
    first = rng.choice([index for index in every if _lives(recording, index)])
    others = [index for index in every if index != first]
    chosen = [first, *rng.sample(others, min(len(others), len(task.spot) - 1))]
    rng.shuffle(chosen)
    zones = tuple(_priced(recording.zones[index], usd) for index, usd in zip(chosen, task.spot, strict=False))
    return replace(recording, gang=min(recording.gang, task.nodes), zones=zones)


def _priced(zone: Zone, usd: float) -> Zone:
    """The zone's price moves as it did, around ``usd``."""
    mean = sum(zone.price) / len(zone.price)
    known: dict[float, float] = {}
    return replace(zone, price=tuple([known.setdefault(price, usd * price / mean) for price in zone.price]))


def _lives(recording: Recording, zone: int) -> bool:
    up = recording.up[zone]
    return sum(up) > LEAST_UP * len(up)
