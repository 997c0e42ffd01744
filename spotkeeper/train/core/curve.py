"""The curve of a metric: a value for each of some steps, in order, at most a given number. Standard library only.

A curve that becomes too long is thinned: of every ``width`` steps only the smallest value, the largest and the last one
stay, and the width doubles until the curve fits. So extremes survive, however long a run is. Widths are powers of two,
so a curve that is thinned in several rounds keeps what it would keep in one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from math import isnan

MOST = 4000  # points of a curve


class Curve:
    """The points of one metric, as three columns. ``times``: seconds."""

    def __init__(self, most: int = MOST) -> None:
        self.steps: list[int] = []
        self.times: list[float] = []
        self.values: list[float] = []
        self._most = most
        self._width = 1

    def __len__(self) -> int:
        return len(self.steps)

    def add(self, steps: Sequence[int], times: Sequence[float], values: Sequence[float]) -> None:
        """Add points whose steps ascend. They replace the points of their first step and of later ones."""
        if not steps:
            return
        self.cut(steps[0] - 1)
        begin = len(self)
        self.steps += steps
        self.times += times
        self.values += values
        if self._width > 1:
            self._thin(bisect_left(self.steps, steps[0] // self._width * self._width, 0, begin))
        while (excess := len(self) / self._most) > 1:
            self._width *= 2 << int(excess).bit_length() - 1
            self._thin(0)

    def join(self, later: Curve) -> None:
        """Add the points of a curve that continues this one."""
        self.add(later.steps, later.times, later.values)

    def cut(self, last: int) -> None:
        """Remove all points after the step ``last``."""
        if self.steps and self.steps[-1] > last:
            end = bisect_left(self.steps, last + 1)
            for column in (self.steps, self.times, self.values):
                del column[end:]

    def _thin(self, begin: int) -> None:
        """Thin the points from index ``begin`` on, which must be the first point of its bucket."""
        kept: list[int] = []
        first, count, width = begin, len(self), self._width
        while begin < count:
            after = (self.steps[begin] // width + 1) * width
            end = bisect_left(self.steps, after, begin, min(count, begin + width))
            kept += range(begin, end) if end - begin <= 2 else self._extremes(begin, end)
            begin = end
        self.steps[first:] = [self.steps[index] for index in kept]
        self.times[first:] = [self.times[index] for index in kept]
        self.values[first:] = [self.values[index] for index in kept]

    def _extremes(self, begin: int, end: int) -> list[int]:
        """Return the indices of the smallest, the largest and the last of these points, in order."""
        values = self.values[begin:end]
        low, high = min(values), max(values)
        if isnan(low):  # only if the first value is NaN; other NaNs are neither the smallest nor the largest
            numbers = [value for value in values if not isnan(value)]
            low, high = min(numbers, default=low), max(numbers, default=high)
        return sorted({begin + values.index(low), begin + values.index(high), end - 1})
