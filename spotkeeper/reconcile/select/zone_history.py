"""Estimates how long spot lasts in a zone, from the usual hazard by age and from observations of the zone. Pure.

:class:`HazardShape` has the usual losses per hour by a zone's *age*, the time since spot became available in it: after
six hours a zone is twelve times safer than at first. It was fitted on all recorded markets (``docs/selection.md``).
A zone's own losses, which :class:`Track` counts, scale this hazard, with a gamma prior that counts as
``HazardShape.weight`` losses and has the mean of all zones of the job. ``fold`` and ``now`` make tracks from a pool's
observations. Only spot machines count. A machine that its job gives up is not a loss, and shows that spot was available
until then.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from spotkeeper.contract.ledger import Event
from spotkeeper.contract.market import (
    HOUR_S,
    LOST_ANNOUNCED,
    LOST_SILENTLY,
    NEVER_JOINED,
    Alive,
    MarketPast,
    Observation,
    Watch,
)
from spotkeeper.contract.stack import Model

LEAST = 1e-4  # a smaller survival probability counts as 0
TOGETHER_H = 1.1  # two observations of "up" in a zone, no further apart than this, belong to one uninterrupted period
JUST_H = 0.05  # the age of a zone that is up since an unknown time
UNKNOWN_H = 1.0  # the age of a zone without an observation
MOST_HIDDEN = 0.95
HALF_H = 48.0  # an observation of this age counts half
GHOST_H = 7 * 24.0  # a machine without a reported end is forgotten after this time
BOOTS = 60  # boots remembered per pool
FEW_BOOTS = 3  # fewer boots say nothing about the slowest ones
MANY_BOOTS = 10  # fewer boots have no 95th percentile: the slowest one times WIDER replaces it
WIDER = 1.5
LONGEST_BOOT_S = 3600.0


@dataclass(frozen=True)
class HazardShape:
    """The usual losses per hour by a zone's age: ``hazard[i]`` up to the age ``until_h[i]``, hours."""

    until_h: tuple[float, ...] = (0.5, 2.0, 6.0, 24.0, math.inf)
    hazard: tuple[float, ...] = (1.2, 0.6, 0.2, 0.1, 0.03)
    weight: float = 2.0  # the prior counts as this many losses

    def losses(self, start_h: float, end_h: float) -> float:
        """Return the expected losses of a machine while its zone's age grows from ``start_h`` to ``end_h``."""
        total, begin = 0.0, 0.0
        for until, hazard in zip(self.until_h, self.hazard, strict=True):
            low, high = max(begin, start_h), min(until, end_h)
            if high > low:
                total += (high - low) * hazard
            if until >= end_h:
                break
            begin = until
        return total


SHAPE = HazardShape()


@dataclass(frozen=True)
class Expected:
    """What to expect of a launch: hours until the machine is lost or the job done, and how many of them are work."""

    hours: float
    work_h: float


def expected(shape: HazardShape, age_h: float, factor: float, start_h: float, left_h: float) -> Expected:
    """Return the expected life of a launch in a zone of this age, whose hazard is ``factor`` times the usual.

    Args:
        start_h: the launch's start-up time, without work.
        left_h: the work left; later hours do not count.

    Survival is exp(-factor x cumulative hazard), integrated piece by piece.
    """
    end = left_h + start_h
    hours = work = at = 0.0
    survival = 1.0
    for until, hazard in zip(shape.until_h, shape.hazard, strict=True):
        stop = min(end, until - age_h)
        while at < stop and survival > LEAST:
            to = min(stop, start_h) if at < start_h else stop
            rate = hazard * factor * (to - at)
            part = math.exp(-rate)
            area = survival * (to - at) * ((1.0 - part) / rate if rate > 1e-9 else 1.0)
            hours += area
            if at >= start_h:
                work += area
            survival *= part
            at = to
        if at >= end or survival <= LEAST:
            break
    return Expected(hours, work)


class Track:
    """Availability of spot in one zone as observed: by launches, refusals, losses, probes and running machines.

    ``up``: whether spot was available at ``seen_h``; None before the first observation. Times are hours of any clock.
    An observation older than the newest is ignored, so a clock that jumps back does no harm.
    """

    __slots__ = ("exposure", "losses", "observed_h", "seen_h", "shape", "since_h", "up", "up_h")

    def __init__(self, shape: HazardShape) -> None:
        self.shape = shape
        self.up: bool | None = None
        self.seen_h = -math.inf
        self.since_h = 0.0  # since when the zone is up, if it is
        self.losses = 0.0
        self.exposure = 0.0  # losses that the shape predicts for the observed time
        self.observed_h = 0.0
        self.up_h = 0.0  # hours of ``observed_h`` in which the zone was up

    @classmethod
    def of(cls, watch: Watch | None, shape: HazardShape = SHAPE) -> Track:
        """Restore a track stored as ``watch``; None gives an empty track. Invalid negative numbers become 0."""
        track = cls(shape)
        if watch is not None and watch.up is not None:
            track.up, track.seen_h, track.since_h = watch.up, watch.seen_h, watch.since_h
            track.losses, track.exposure = max(0.0, watch.losses), max(0.0, watch.exposure)
            track.observed_h, track.up_h = max(0.0, watch.observed_h), max(0.0, watch.up_h)
        return track

    def watch(self, zone: str) -> Watch:
        if self.up is None:
            return Watch(zone)
        return Watch(zone, self.up, self.seen_h, self.since_h, self.losses, self.exposure, self.observed_h, self.up_h)

    def fade(self, share: float) -> None:
        """Multiply the weight of all observations so far by ``share``."""
        self.losses *= share
        self.exposure *= share
        self.observed_h *= share
        self.up_h *= share

    def see(self, at_h: float, up: bool, *, watched: bool = False) -> None:
        """Add an observation.

        ``watched``: whether a machine has run in the zone since the last observation, so that no loss was missed.
        """
        if at_h <= self.seen_h:
            return
        gap = at_h - self.seen_h
        one_spell = self.up is True and (watched or gap <= TOGETHER_H)
        whole = gap if watched and self.up is not None else min(gap, 1.0)
        if one_spell:
            age = self.seen_h - self.since_h
            losses = self.shape.losses(age, age + gap)
            self.exposure += losses if up else losses / 2
            self.losses += not up
        if up and not one_spell:
            self.since_h = at_h - (min(gap, 1.0) / 2 if self.up is False else JUST_H)
        self.observed_h += whole
        self.up_h += whole * up
        self.up, self.seen_h = up, at_h

    def unhide(self) -> None:
        """Add to ``losses`` an estimate of the losses that went unobserved, in a track with one observation an hour.

        A zone that lost spot and has it again at the next observation shows no loss. The estimate assumes that a zone
        draws its state anew at random moments, ``rate`` times an hour, and that a share ``up`` of the draws gives spot.
        While the zone has spot, it then loses it ``(1 - up) * rate`` times an hour, and an hourly observation sees a
        loss with probability ``(1 - up) * (1 - exp(-rate))``. This method takes that probability from the observed
        losses, solves it for ``rate``, and scales ``losses`` to the true number.
        """
        if self.losses <= 0 or self.up_h <= 0:
            return
        seen = self.losses / max(1.0, self.up_h)
        share = min(MOST_HIDDEN, seen / max(0.05, 1.0 - self.up_h / self.observed_h))
        self.losses *= -math.log(1.0 - share) / share

    def age_h(self, now_h: float) -> float:
        """Return how long spot has been available in the zone, hours, if it is available now."""
        if self.up is None:
            return UNKNOWN_H
        gap = max(0.0, now_h - self.seen_h)
        if self.up and gap <= TOGETHER_H:
            return now_h - self.since_h
        return JUST_H if self.up else min(gap, 1.0) / 2

    @property
    def share(self) -> float:
        """Return the share of the observed time in which the zone had spot; 0.5 without observations."""
        return (self.up_h + 0.5) / (self.observed_h + 1.0)


def common(tracks: list[Track], weight: float) -> float:
    """Return the losses in all these zones together, relative to the usual losses, drawn towards 1 with this weight."""
    losses = sum(track.losses for track in tracks)
    return (weight + losses) / (weight + sum(track.exposure for track in tracks))


def factor(track: Track, mean: float, weight: float) -> float:
    """Return one zone's losses relative to the usual losses, drawn towards ``mean`` with this weight."""
    return (weight * mean + track.losses) / (weight + track.exposure)


# -- a pool's history, folded hour by hour


@dataclass(frozen=True)
class Boots:
    """A pool's boot times from insertion to hello, seconds; None: too few boots."""

    median_s: float | None
    p95_s: float | None

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Boots:
        ordered = sorted(seconds)
        if len(ordered) < FEW_BOOTS:
            return cls(median(ordered) if ordered else None, None)
        slow_s = ordered[math.ceil(0.95 * len(ordered)) - 1]
        return cls(median(ordered), slow_s if len(ordered) >= MANY_BOOTS else slow_s * WIDER)


def fold(past: MarketPast, observations: Iterable[Observation], hour: int) -> MarketPast:
    """Extend ``past`` to ``hour`` (exclusive). Folding the same hours always gives the same result."""
    if hour <= past.hour:
        return past
    pool = _Pool(past, observations, hour * HOUR_S)
    for track in pool.tracks.values():
        track.fade(0.5 ** ((hour - past.hour) / HALF_H))
    zones = tuple(track.watch(zone) for zone, track in sorted(pool.tracks.items()))
    alive = tuple(one for _, one in sorted(pool.alive.items()) if hour - one.since_h < GHOST_H)
    return MarketPast(past.pool, hour, zones, alive, tuple(pool.boots[-BOOTS:]))


def now(past: MarketPast, observations: Iterable[Observation], at: float) -> tuple[dict[str, Watch], Boots]:
    """Return what is known of each observed zone at ``at``, virtual unix seconds, and the pool's boot times.

    Both are ``past``, extended by the observations since ``past.hour``. Observations of earlier hours are ignored,
    since ``past`` contains them already.
    """
    pool = _Pool(past, observations, math.nextafter(at, math.inf))
    for one in pool.alive.values():
        if at / HOUR_S - one.since_h < GHOST_H:
            pool.track(one.zone).see(at / HOUR_S, True, watched=True)
    return {zone: track.watch(zone) for zone, track in pool.tracks.items()}, Boots.of(pool.boots[-BOOTS:])


class _Pool:
    """Tracks, running machines and boots of a pool, from ``past`` and from later observations before ``until``."""

    def __init__(self, past: MarketPast, observations: Iterable[Observation], until: float) -> None:
        self.tracks = {watch.zone: Track.of(watch) for watch in past.zones}
        self.alive = {one.machine: one for one in past.alive}
        self.boots = list(past.boots_s)
        fresh = (one for one in observations if past.hour * HOUR_S <= one.at < until)
        for one in sorted(fresh, key=lambda one: (one.at, one.machine)):
            self._take(one, one.at / HOUR_S)

    def track(self, zone: str) -> Track:
        return self.tracks.setdefault(zone, Track.of(None))

    def _take(self, one: Observation, at_h: float) -> None:
        if one.event is Event.ADMITTED:
            self._came(one, at_h)
        elif one.event is Event.REFUSED:
            if one.cause == "capacity" and one.model is Model.SPOT:
                self.track(one.zone).see(at_h, False)
        elif one.machine in self.alive:
            self._lived(one, at_h)
        elif one.event is Event.LOSS and one.cause == NEVER_JOINED:
            self._booted(one)

    def _booted(self, one: Observation) -> None:
        """Add a boot time. A machine given up because its backup was up first counts with its time until then.

        Otherwise the slowest boots would be missing, the 95th percentile would sink, and more and more machines would
        get backups. Other machines that never joined (they died or hung) have no ``started`` and do not count.
        """
        if one.started is not None and 0.0 <= one.at - one.started < LONGEST_BOOT_S:
            self.boots.append(one.at - one.started)

    def _came(self, one: Observation, at_h: float) -> None:
        self._booted(one)
        if one.model is Model.SPOT:
            self.track(one.zone).see(at_h if one.started is None else min(at_h, one.started / HOUR_S), True)
            self.alive[one.machine] = Alive(one.machine, one.zone, at_h)

    def _lived(self, one: Observation, at_h: float) -> None:
        """Note that the machine's zone has no spot if this event is a notice or preemption, else that it has spot."""
        taken = one.event is Event.NOTICE or (
            one.event is Event.LOSS and one.cause in (*LOST_ANNOUNCED, *LOST_SILENTLY)
        )
        self.track(self.alive[one.machine].zone).see(at_h, not taken, watched=True)
        if one.event in (Event.LOSS, Event.GONE):
            del self.alive[one.machine]
