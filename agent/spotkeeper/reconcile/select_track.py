"""What is known of one zone: when it was seen there or not, since when, and how often it was lost. No I/O.

Made of looks: a launch, a refusal, a loss, a probe, a machine that runs. Hours on any clock that only rises; a look
that is older than the newest one is passed over, so a clock that jumps back harms nothing.
"""

from __future__ import annotations

import math

from spotkeeper.reconcile.select_life import SHAPE, Shape
from spotkeeper.spec.market import Watch

TOGETHER_H = 1.1  # two looks no further apart are of one spell, where both saw the zone up
JUST_H = 0.05  # the age of a zone of which nothing says since when it is there
UNKNOWN_H = 1.0  # of one that nobody has looked at
MOST_HIDDEN = 0.95


class Track:
    """A zone's past, as far as anybody looked. ``up``: how it was at ``seen_h``, None before the first look."""

    __slots__ = ("exposure", "looked_h", "losses", "seen_h", "shape", "since_h", "up", "up_h")

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.up: bool | None = None
        self.seen_h = -math.inf
        self.since_h = 0.0  # since when it is up, while it is
        self.losses = 0.0
        self.exposure = 0.0  # losses that the shape made expect while it was watched
        self.looked_h = 0.0
        self.up_h = 0.0  # of ``looked_h``

    @classmethod
    def of(cls, watch: Watch | None, shape: Shape = SHAPE) -> Track:
        """As it was kept; None: nobody has looked."""
        track = cls(shape)
        if watch is not None and watch.up is not None:
            track.up, track.seen_h, track.since_h = watch.up, watch.seen_h, watch.since_h
            track.losses, track.exposure = max(0.0, watch.losses), max(0.0, watch.exposure)  # it was read: believe
            track.looked_h, track.up_h = max(0.0, watch.looked_h), max(0.0, watch.up_h)  # nothing that cannot be
        return track

    def watch(self, zone: str) -> Watch:
        if self.up is None:
            return Watch(zone)
        seen = self.losses, self.exposure, self.looked_h, self.up_h
        return Watch(zone, self.up, self.seen_h, self.since_h, *seen)

    def fade(self, share: float) -> None:
        """The past counts for this much from now on."""
        self.losses *= share
        self.exposure *= share
        self.looked_h *= share
        self.up_h *= share

    def see(self, at_h: float, up: bool, *, watched: bool = False) -> None:
        """One look. ``watched``: a machine ran there since the last one, so nothing is hidden between the two."""
        if at_h <= self.seen_h:
            return
        gap = at_h - self.seen_h
        one_spell = self.up is True and (watched or gap <= TOGETHER_H)
        whole = gap if watched and self.up is not None else min(gap, 1.0)
        if one_spell:
            age = self.seen_h - self.since_h
            expected = self.shape.losses(age, age + gap)
            self.exposure += expected if up else expected / 2
            self.losses += not up
        if up and not one_spell:
            self.since_h = at_h - (min(gap, 1.0) / 2 if self.up is False else JUST_H)
        self.looked_h += whole
        self.up_h += whole * up
        self.up, self.seen_h = up, at_h

    def unhide(self) -> None:
        """After looks an hour apart: count the losses between them that nobody saw.

        A zone that is up ``share`` of the time and flips at random is seen to fall with probability
        ``(1 - share)(1 - exp(-rate))`` an hour; ``rate`` is what is wanted.
        """
        if self.losses <= 0 or self.up_h <= 0:
            return
        seen = self.losses / max(1.0, self.up_h)
        share = min(MOST_HIDDEN, seen / max(0.05, 1.0 - self.up_h / self.looked_h))
        self.losses *= -math.log(1.0 - share) / share

    def age_h(self, now_h: float) -> float:
        """For how long the zone may have been there, if it is there now."""
        if self.up is None:
            return UNKNOWN_H
        gap = max(0.0, now_h - self.seen_h)
        if self.up and gap <= TOGETHER_H:
            return now_h - self.since_h
        return JUST_H if self.up else min(gap, 1.0) / 2

    @property
    def share(self) -> float:
        """Of the time, up; a half where nobody has looked."""
        return (self.up_h + 0.5) / (self.looked_h + 1.0)


def common(tracks: list[Track], weight: float) -> float:
    """How much more is lost in these zones than the shape makes expect, all together."""
    losses = sum(track.losses for track in tracks)
    return (weight + losses) / (weight + sum(track.exposure for track in tracks))


def factor(track: Track, mean: float, weight: float) -> float:
    """The same of one zone, drawn towards that ``mean``."""
    return (weight * mean + track.losses) / (weight + track.exposure)
