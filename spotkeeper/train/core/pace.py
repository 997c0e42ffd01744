"""When the next save or image is due, from the measured times of steps and saves. Standard library only."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

IMAGE_S = 0.2  # shortest time between two images
_SAMPLES = 8  # images after which their cost is known: a few of the first are checked, and one may meet a hiccup
_SAMPLES_S = 5.0  # longest time between images before that
SHORTEST_S = 1.0
LONGEST_S = 3600.0
_IDLE = 4.0  # the saver may write a quarter of the time: while it writes, steps are slower


def young(stall_s: float, mean_life_s: float, save_s: float = 0.0) -> float:
    """Return the cheapest interval between saves, seconds: sqrt(2 x cost of a save x mean time between losses).

    J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974. The interval is
    never so short that the saver writes more than a quarter of the time.
    """
    best = math.sqrt(2.0 * stall_s * mean_life_s)
    return min(max(best, _IDLE * save_s, SHORTEST_S), LONGEST_S)


class RecentTimes(deque[float]):
    """The newest ``size`` values, and their ``median``, 0.0 without values: each step needs it, few change it.

    Values are appended, and replaced one at a time.
    """

    def __init__(self, size: int) -> None:
        super().__init__(maxlen=size)
        self._ordered: list[float] = []
        self.median = 0.0

    def append(self, value: float) -> None:
        ordered = self._ordered
        if len(self) == self.maxlen:
            del ordered[bisect_left(ordered, self[0])]
        insort(ordered, value)
        super().append(value)
        self._note()

    def extend(self, values: Iterable[float]) -> None:
        for value in values:
            self.append(value)

    def __setitem__(self, at: Any, value: Any) -> None:
        super().__setitem__(at, value)
        self._ordered = sorted(self)
        self._note()

    def _note(self) -> None:
        ordered = self._ordered
        middle, odd = divmod(len(ordered), 2)
        self.median = ordered[middle] if odd else (ordered[middle - 1] + ordered[middle]) / 2


@dataclass
class SavePace:
    """Measured times of one rank's steps and saves, and the interval between saves that follows from them, in seconds.

    A *stall* is the time that a save stops the loop. ``stalls`` can come from an older generation. If it is
    empty and the job file sets no interval, a save is due at once: this save tests the disk and measures a stall.
    """

    mean_life_s: float
    fixed_s: float | None = None  # interval set by the job file
    overhead: float = 0.01  # largest share of the training time that images may cost
    steps: RecentTimes = field(default_factory=lambda: RecentTimes(64))
    stalls: RecentTimes = field(default_factory=lambda: RecentTimes(8))
    saves: RecentTimes = field(default_factory=lambda: RecentTimes(8))
    since: float = 0.0  # start of the last save, or of the loop before any save; -inf: a save is due at once
    image_stalls: RecentTimes = field(default_factory=lambda: RecentTimes(8))
    image_steps: RecentTimes = field(default_factory=lambda: RecentTimes(16))  # times of steps that follow an image
    image_since: float = 0.0  # end of the last image's stall
    image_spacing: int = 0  # steps between the two newest images; 0: fewer than two
    image_step: int = -1  # step of the newest image; -1: none
    imaged: bool = False  # an image was begun at the last boundary, or is still being copied to another machine
    image_steps_each: int = 1  # steps that the newest image has slowed down
    plain: bool = False  # the last step followed no image

    @property
    def step_s(self) -> float:
        return self.steps.median

    @property
    def stall_s(self) -> float:
        return self.stalls.median

    @property
    def save_s(self) -> float:
        return self.saves.median

    @property
    def interval_s(self) -> float:
        if self.fixed_s is not None:
            return self.fixed_s
        return young(self.stall_s, self.mean_life_s, self.save_s) if self.stalls else 0.0

    def due(self, now: float, *, images: bool = False) -> bool:
        """Whether a save is due. With ``images``, a save is the next image, unless images are rarer than saves."""
        if now - self.since < self.interval_s:
            return False
        return not images or self.image_due(now) or max(self.image_interval_s, -self.since) > self.interval_s

    def add_step(self, seconds: float) -> None:
        """Add the time of a step, without the stall before it."""
        self.plain = not (self.imaged and self.steps)
        (self.steps if self.plain else self.image_steps).append(seconds)
        self.imaged = False

    @property
    def image_cost_s(self) -> float:
        """Seconds that keeping one image costs: its stall, and how much longer steps take until it is copied."""
        slower = self.image_steps.median - self.step_s if self.image_steps else 0.0
        return self.image_stalls.median + max(0.0, slower) * self.image_steps_each

    @property
    def image_interval_s(self) -> float:
        """Shortest time between two images, so that they cost at most the share ``overhead`` of the training time.

        The first images may cost more, because it takes some to measure what one costs.
        """
        wanted_s = max(IMAGE_S, self.image_cost_s / self.overhead)
        return wanted_s if len(self.image_steps) >= _SAMPLES else min(wanted_s, _SAMPLES_S)

    @property
    def image_share(self) -> float:
        """Share of the training time that images cost at their present spacing; 0.0 before the second image."""
        between_s = self.image_spacing * self.step_s
        return self.image_cost_s / (between_s + self.image_cost_s) if between_s else 0.0

    def add_image(self, began: float, ended: float, step: int) -> None:
        """Note that an image of ``step`` was begun at a boundary, which it stopped from ``began`` to ``ended``."""
        self.image_stalls.append(ended - began)
        self.image_since = ended
        if self.image_step >= 0:
            self.image_spacing = step - self.image_step
        self.image_step, self.imaged, self.image_steps_each = step, True, 1

    def add_copying(self) -> None:
        """Note that the newest image is still being copied, so it slows down another step."""
        if not self.imaged:
            self.imaged, self.image_steps_each = True, self.image_steps_each + 1

    def hurry(self) -> None:
        """Make an image due at once."""
        self.plain, self.image_since = True, -math.inf

    def image_due(self, now: float) -> bool:
        """Whether an image is due. Never after both of two steps: the steps between show what an image costs."""
        return self.plain and now - self.image_since >= self.image_interval_s
