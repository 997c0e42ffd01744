"""When to save: Young's interval from what was measured. Pure but for the clock it is given."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median

# Six hours: between losses of one spot machine, where nobody has measured yet.
MEAN_LIFE_S = 6 * 3600.0
SHORTEST_S = 1.0
LONGEST_S = 3600.0
_IDLE = 4.0  # the saver may work a quarter of the time: while it writes, steps are slower


def young(stall_s: float, mean_life_s: float, save_s: float = 0.0) -> float:
    """Seconds between saves that cost least: sqrt(2 x cost of a save x mean time between losses).

    J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974.
    Never so often that the saver works more than a quarter of the time.
    """
    best = math.sqrt(2.0 * stall_s * mean_life_s)
    return min(max(best, _IDLE * save_s, SHORTEST_S), LONGEST_S)


@dataclass
class Pace:
    """Times of steps and saves of one rank, and what follows from them. Seconds, by one monotonic clock.

    ``fixed_s``: an interval that was asked for. ``stalls`` may come from an older
    generation; without any, the first save is due at once: it proves the disk, and gives
    the figure the interval follows from.
    """

    mean_life_s: float
    fixed_s: float | None = None
    steps: deque[float] = field(default_factory=lambda: deque(maxlen=64))
    stalls: deque[float] = field(default_factory=lambda: deque(maxlen=8))
    saves: deque[float] = field(default_factory=lambda: deque(maxlen=8))
    since: float = 0.0  # when the last save began, or the loop

    @property
    def step_s(self) -> float:
        return median(self.steps) if self.steps else 0.0

    @property
    def stall_s(self) -> float:
        return median(self.stalls) if self.stalls else 0.0

    @property
    def save_s(self) -> float:
        return median(self.saves) if self.saves else 0.0

    @property
    def interval_s(self) -> float:
        if self.fixed_s is not None:
            return self.fixed_s
        return young(self.stall_s, self.mean_life_s, self.save_s) if self.stalls else 0.0

    def due(self, now: float) -> bool:
        return now - self.since >= self.interval_s
