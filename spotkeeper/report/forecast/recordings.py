"""The recorded markets that a forecast replays, including the stack's own history, one part per region. Pure.

A stack is in one region, and markets differ far more between regions than between hours. So each replay draws zones of
one region, and the benchmark tests forecasts on regions that they did not use.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from spotkeeper.contract.job import JobSpec
from spotkeeper.contract.ledger import Event
from spotkeeper.contract.market import HOUR_S, Fate, Observation, lives
from spotkeeper.contract.policy import Terms
from spotkeeper.contract.stack import Model, region_of
from spotkeeper.replay.model import ATTEMPT_H, LEAST_UP, PROBE_H, Case, PlayedOutcome, play
from spotkeeper.replay.recording import RecordedZone, Recording
from spotkeeper.report.forecast.player import TIMES, Chooser, Shop

UNENDING = 10.0  # a replay without a deadline stops after this many times the work, plus UNENDING_H
UNENDING_H = 240.0
MOVE_H = TIMES.copy_s / 3600.0  # the duration of a move that jobs expect; the evaluation of policies uses another value


@dataclass(frozen=True)
class RecordingPart:
    """The zones of one region, cut out of a recording (see ``spotkeeper/replay/recording.py``)."""

    name: str
    recording: Recording


@dataclass(frozen=True)
class Task:
    """A job to replay. Prices are USD per machine-hour; ``spot`` has one for each zone of the shop's pool.

    Attributes:
        deadline_h: hours from the job's start; None without a deadline.
        restart_h: hours from each launch until it trains; they are billed.
        reserved: how many of its machines are in reserved capacity, which is paid for already.
        move_usd: the egress of going to another of the job's regions, for each machine.
        start_usd: by region, the egress of the job's data at the first start there, for each machine.
    """

    spec: JobSpec
    shop: Shop
    spot: tuple[float, ...]
    on_demand: float
    work_h: float
    restart_h: float
    deadline_h: float | None = None
    reserved: int = 0
    move_usd: float = 0.0
    start_usd: Mapping[str, float] = field(default_factory=dict)

    @property
    def bought(self) -> int:
        """The machines whose cost the job causes."""
        return self.nodes - self.reserved

    @property
    def nodes(self) -> int:
        return self.spec.size().max

    def terms(self, tick_h: float) -> Terms:
        """Return the job's work, deadline and costs for a replay with ticks of ``tick_h`` hours.

        A job that may not use on-demand machines runs on after its deadline.
        """
        ends_h = self.deadline_h if self.shop.on_demand else None
        return Terms(
            work_h=self.work_h,
            deadline_h=self.deadline_h,
            horizon_h=ends_h or UNENDING * self.work_h + UNENDING_H,
            restart_h=self.restart_h,
            move_h=MOVE_H,
            move_price=self.move_usd,
            attempt_h=ATTEMPT_H,
            probe_h=PROBE_H,
            delay_price=0.0,
            tick_h=tick_h,
            on_demand_price=self.on_demand,
        )


def parts(recordings: Iterable[Recording]) -> tuple[RecordingPart, ...]:
    """Return a part for every recorded region in which a zone had spot capacity at least some of the time."""
    out = []
    for recording in recordings:
        for region in dict.fromkeys(zone.region for zone in recording.zones):
            zones = tuple(index for index, zone in enumerate(recording.zones) if zone.region == region)
            part = recording.only(zones)
            if any(has_spot(part, index) for index in range(len(zones))):
                out.append(RecordingPart(f"{recording.name} {region}", part))
    return tuple(out)


def outcomes(task: Task, part: RecordingPart, count: int, seed: str = "") -> Iterator[PlayedOutcome]:
    """Replay the job ``count`` times, started at evenly spread times of the recording, in randomly drawn zones."""
    rng = random.Random(f"{part.name}/{seed}")  # noqa: S311 - a replay, not a secret
    for number in range(count):
        recording = _drawn(task, part.recording, rng)
        begins = int(recording.ticks * (number + rng.random()) / count)
        shop = task.shop.only(len(recording.zones))
        if task.move_usd or task.start_usd:
            pairs = zip(recording.zones, shop.pool.zones, strict=True)
            recording = replace(recording, zones=tuple(replace(one, region=region_of(name)) for one, name in pairs))
        terms = task.terms(recording.tick_h)
        case = Case(part.name, recording, begins, 0, terms, begun=False, start_price=task.start_usd)
        yield play(case, Chooser(task.spec, shop, task.start_usd))


def _drawn(task: Task, recording: Recording, rng: random.Random) -> Recording:
    """Draw a recorded zone for each zone of the job (fewer if fewer are recorded), at least one with spot capacity.

    A drawn zone stands for one of the job's zones: its prices are scaled, so that their mean is the job's price there.
    """
    every = range(len(recording.zones))
    first = rng.choice([index for index in every if has_spot(recording, index)])
    others = [index for index in every if index != first]
    chosen = [first, *rng.sample(others, min(len(others), len(task.spot) - 1))]
    rng.shuffle(chosen)
    zones = tuple(_priced(recording.zones[index], usd) for index, usd in zip(chosen, task.spot, strict=False))
    return replace(recording, gang=min(recording.gang, task.nodes), zones=zones)


def _priced(zone: RecordedZone, usd: float) -> RecordedZone:
    mean = sum(zone.price) / len(zone.price)
    known: dict[float, float] = {}
    return replace(zone, price=tuple([known.setdefault(price, usd * price / mean) for price in zone.price]))


def has_spot(recording: Recording, zone: int) -> bool:
    up = recording.up[zone]
    return sum(up) > LEAST_UP * len(up)


# -- a stack's own history

# A stack learns about capacity only from its machines: a zone with a running spot machine had capacity; a zone that
# preempted or refused a machine had none, for at most an hour. In between, a zone keeps its last state. Hours without
# information about any zone are left out.
TICK_S = 600.0
GONE_S = HOUR_S  # a zone that preempted or refused a machine counts as without capacity for at most this long
LEAST_H = 48.0  # hours with information that a history needs
Span = tuple[float, float, bool]  # from, to, whether spot was there


def own_recording(pool: str, region: str, observations: Iterable[Observation]) -> Recording | None:
    """Make a market recording of a pool's zones in a region from the stack's own history; None if too little is known.

    The history shows only whether a zone had capacity for one machine. So each zone's capacity is 1 or 0, and a zone
    counts as available if it has capacity for one machine (``gang`` is 1).
    """
    told = sorted(observations, key=lambda observation: observation.at)
    spans: dict[str, list[Span]] = {}
    for zone, span in _spans(told):
        if region_of(zone) == region:
            spans.setdefault(zone, []).append(span)
    if not spans:
        return None
    begin = min(span[0] for zone in spans.values() for span in zone)
    ticks = math.ceil((max(span[1] for zone in spans.values() for span in zone) - begin) / TICK_S)
    states = {zone: _states(found, begin, ticks) for zone, found in sorted(spans.items())}
    kept = [tick for tick in range(ticks) if any(known[tick] is not None for known in states.values())]
    if len(kept) * TICK_S < LEAST_H * HOUR_S:
        return None
    filled = {zone: _filled(known) for zone, known in states.items()}
    zones = tuple(
        RecordedZone(zone, region, tuple(series[tick] for tick in kept), (1.0,) * len(kept))
        for zone, series in filled.items()
    )
    return Recording("own history", pool, TICK_S / HOUR_S, 1, zones)


def _spans(observations: list[Observation]) -> Iterable[tuple[str, Span]]:
    last = observations[-1].at if observations else 0.0
    for life in lives(observations):
        if life.model is not Model.SPOT or life.began is None:
            continue
        ended = last if life.ended is None else life.ended
        yield life.zone, (life.began, ended, True)
        if life.fate is not Fate.KEPT:
            yield life.zone, (ended, ended + GONE_S, False)
    for observation in observations:
        if observation.event is Event.REFUSED and observation.cause == "capacity" and observation.model is Model.SPOT:
            yield observation.zone, (observation.at, observation.at + GONE_S, False)


def _states(spans: list[Span], begin: float, ticks: int) -> list[bool | None]:
    """Return for each tick whether the zone had capacity; None: unknown.

    A machine that ran throughout a tick outweighs a refusal or loss in that tick.
    """
    known: list[bool | None] = [None] * ticks
    for start, end, up in sorted(spans, key=lambda span: span[2]):
        first, last = (start - begin) / TICK_S, (end - begin) / TICK_S
        ran = range(math.ceil(first), min(ticks, int(last))) if up else range(int(first), min(ticks, math.ceil(last)))
        for tick in ran:
            known[tick] = up
    return known


def _filled(known: list[bool | None]) -> list[int]:
    """Fill gaps: an unknown state becomes the last known state before it; without one, the first known state."""
    last = next((state for state in known if state is not None), False)
    out = []
    for state in known:
        last = last if state is None else state
        out.append(int(last))
    return out
