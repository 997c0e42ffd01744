"""The curve of a metric: points of ascending steps, at most a given number of them. Standard library only.

A curve that becomes too long is thinned: of every ``width`` steps only the smallest value, the largest and the last one
stay, and the width doubles until the curve fits. So extremes survive, however long a run is. Widths are powers of two,
so a curve that is thinned in several rounds keeps what it would keep in one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from math import isnan

MOST = 4000  # points of a curve
_FIRST = 4  # first width of a curve that is thinned: buckets of two steps keep both


class Curve:
    """The points of one metric, as three columns. ``times``: seconds. ``width``: steps per bucket, a power of two."""

    def __init__(self, most: int = MOST, width: int = 1) -> None:
        self.steps: list[int] = []
        self.times: list[float] = []
        self.values: list[float] = []
        self._most = most
        self.width = width

    def __len__(self) -> int:
        return len(self.steps)

    def add(self, steps: Sequence[int], times: Sequence[float], values: Sequence[float]) -> None:
        """Add points whose steps ascend. Old points from the first of these steps on are removed."""
        self._add(steps, times, values, 1)

    def join(self, later: Curve) -> None:
        """Add the points of a curve that continues this one."""
        self._add(later.steps, later.times, later.values, later.width)

    def _add(self, steps: Sequence[int], times: Sequence[float], values: Sequence[float], width: int) -> None:
        """Add points that are thinned to ``width`` already."""
        if not steps:
            return
        self.cut(steps[0] - 1)
        begin = len(self)
        self.steps += steps
        self.times += times
        self.values += values
        if self.width > 1:
            bucket = steps[0] // self.width * self.width
            end = bisect_left(self.steps, bucket + self.width, begin) if width >= self.width else len(self)
            self._thin(bisect_left(self.steps, bucket, 0, begin), end)
        while (excess := len(self) / self._most) > 1:
            self.width = max(_FIRST, self.width * (2 << int(excess).bit_length() - 1))
            self._thin(0, len(self))

    def cut(self, last: int) -> None:
        """Remove all points after the step ``last``."""
        if self.steps and self.steps[-1] > last:
            end = bisect_left(self.steps, last + 1)
            for column in (self.steps, self.times, self.values):
                del column[end:]

    def _thin(self, begin: int, end: int) -> None:
        """Thin the points with index ``begin`` to ``end``, which fill whole buckets."""
        kept: list[int] = []
        first, steps, width = begin, self.steps, self.width
        while begin < end:
            after = (steps[begin] // width + 1) * width
            at = bisect_left(steps, after, begin, min(end, begin + width))
            kept += range(begin, at) if at - begin <= 2 else self._extremes(begin, at)
            begin = at
        self.steps[first:end] = [steps[index] for index in kept]
        self.times[first:end] = [self.times[index] for index in kept]
        self.values[first:end] = [self.values[index] for index in kept]

    def _extremes(self, begin: int, end: int) -> tuple[int, ...]:
        """Return the ascending indices of the smallest, the largest and the last of these points."""
        values = self.values[begin:end]
        low, high = min(values), max(values)
        if low != low:  # noqa: PLR0124 - NaN, as the first value is; other NaNs are neither smallest nor largest
            numbers = [value for value in values if not isnan(value)]
            low, high = min(numbers, default=low), max(numbers, default=high)
        one, other, last = begin + values.index(low), begin + values.index(high), end - 1
        if one > other:
            one, other = other, one
        if other in (one, last):
            return (one, last) if one != last else (last,)
        return one, other, last
