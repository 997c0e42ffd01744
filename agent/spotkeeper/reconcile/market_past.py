"""Own history in short: hours of sights folded into one small object a pool, and what it says of each zone now. Pure.

A tick reads this object and the hours since; whoever folds the same hours comes to the same. Only spot counts, and
only what the cloud did: machines that a job gave up had been there until then.
"""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median

from spotkeeper.reconcile.select_track import Track
from spotkeeper.spec.ledger import Event
from spotkeeper.spec.market import HOUR_S, LOST_ANNOUNCED, LOST_SILENTLY, Alive, Past, Sight, Watch
from spotkeeper.spec.model import Model

HALF_H = 48.0  # after so many hours a sight counts half
GHOST_H = 7 * 24.0  # a machine whose end nobody told for so long is none
BOOTS = 20  # machines whose boots are remembered
LONGEST_BOOT_S = 3600.0


def fold(past: Past, sights: Iterable[Sight], hour: int) -> Past:
    """``past`` with all sights before ``hour``, which is its end from now on."""
    if hour <= past.hour:
        return past
    seen = _Seen(past)
    seen.take(sight for sight in sights if past.hour * HOUR_S <= sight.at < hour * HOUR_S)
    share = 0.5 ** ((hour - past.hour) / HALF_H)
    for track in seen.tracks.values():
        track.fade(share)
    zones = tuple(track.watch(zone) for zone, track in sorted(seen.tracks.items()))
    alive = tuple(one for _, one in sorted(seen.alive.items()) if hour - one.since_h < GHOST_H)
    return Past(past.pool, hour, zones, alive, tuple(seen.boots[-BOOTS:]))


def now(past: Past, sights: Iterable[Sight], at: float) -> tuple[dict[str, Watch], float | None]:
    """Of each zone that anything is known of, and how long a machine takes to its hello, seconds.

    ``sights``: of the hours from ``past.hour`` on; earlier ones are passed over.
    """
    seen = _Seen(past)
    seen.take(sight for sight in sights if past.hour * HOUR_S <= sight.at <= at)
    for one in seen.alive.values():
        if at / HOUR_S - one.since_h < GHOST_H:
            seen.track(one.zone).see(at / HOUR_S, True, watched=True)
    return {zone: track.watch(zone) for zone, track in seen.tracks.items()}, median(seen.boots) if seen.boots else None


class _Seen:
    def __init__(self, past: Past) -> None:
        self.tracks = {watch.zone: Track.of(watch) for watch in past.zones}
        self.alive = {one.machine: one for one in past.alive}
        self.boots = list(past.boots_s)

    def track(self, zone: str) -> Track:
        return self.tracks.setdefault(zone, Track.of(None))

    def take(self, sights: Iterable[Sight]) -> None:
        for sight in sorted(sights, key=lambda sight: (sight.at, sight.machine)):
            self._one(sight, sight.at / HOUR_S)

    def _one(self, sight: Sight, at_h: float) -> None:
        if sight.event is Event.ADMITTED:
            self._came(sight, at_h)
        elif sight.event is Event.REFUSED:
            if sight.cause == "capacity" and sight.model is Model.SPOT:
                self.track(sight.zone).see(at_h, False)
        elif sight.machine in self.alive:
            self._lived(sight, self.alive[sight.machine], at_h)

    def _came(self, sight: Sight, at_h: float) -> None:
        if sight.started is not None and 0.0 <= sight.at - sight.started < LONGEST_BOOT_S:
            self.boots.append(sight.at - sight.started)
        if sight.model is Model.SPOT:
            self.track(sight.zone).see(at_h if sight.started is None else min(at_h, sight.started / HOUR_S), True)
            self.alive[sight.machine] = Alive(sight.machine, sight.zone, at_h)

    def _lived(self, sight: Sight, one: Alive, at_h: float) -> None:
        """A notice is the market's word already; a machine that a job gave up was there until then."""
        taken = sight.event is Event.NOTICE or (
            sight.event is Event.LOSS and sight.cause in (*LOST_ANNOUNCED, *LOST_SILENTLY)
        )
        self.track(one.zone).see(at_h, not taken, watched=True)
        if sight.event in (Event.LOSS, Event.GONE):
            del self.alive[sight.machine]
