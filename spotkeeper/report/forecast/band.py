"""Computes, from the outcomes of replays, a band that holds 80 % of future outcomes. Pure.

The next market is treated as one more recorded market. All markets weigh the same, however often each was replayed. A
band is the shortest interval that holds a given share of the recorded outcomes. That share is above the promised 80 %,
because an unrecorded market differs from the recorded ones. Conformal prediction over groups (Lee, Barber and Willett,
"Distribution-free inference with hierarchical data") requires 0.8 (1 + 1/K) for K markets in the worst case. When each
market was left out in turn, about 0.6 of that addition was enough; when the job's own market was known and only hours
of it were left out, no addition was needed (``bench/market/forecast.py`` measures both).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from msgspec import Struct

PROMISED = 0.80
ADDED = 0.5  # divided by the number of markets, this is added to PROMISED
DIGITS = 9  # values that agree to so many digits are equal
Weighted = tuple[float, float]  # a value and its weight


class Band(Struct, frozen=True):
    """The range of a quantity: four of five outcomes are from ``low`` to ``high``; ``mid`` is the mean."""

    low: float
    mid: float
    high: float

    def holds(self, value: float) -> bool:
        return self.low - 1e-6 <= value <= self.high + 1e-6

    def times(self, factor: float) -> Band:
        return Band(self.low * factor, self.mid * factor, self.high * factor)


class Values(Struct, frozen=True):
    """Outcomes with their weights; ``level``: the share of the weight that a band must hold."""

    weighted: tuple[Weighted, ...]
    level: float

    def share(self) -> float:
        """The weighted share of outcomes that are 1, if all are 0 or 1."""
        return sum(weight * value for value, weight in self.weighted)


def weigh(others: Sequence[Sequence[float]], own: Sequence[Sequence[float]] = ()) -> Values:
    """Weigh all markets alike; the job's ``own`` markets together weigh as much as all others."""
    kinds = [markets for markets in (others, own) if markets]
    weighted = tuple(
        (value, 1.0 / len(kinds) / len(markets) / len(market))
        for markets in kinds
        for market in markets
        for value in market
    )
    return Values(weighted, PROMISED if own else min(1.0, PROMISED + ADDED / max(1, len(others))))


def band(values: Values) -> Band:
    """Return the band of one quantity, extended to its mean if a few extreme outcomes put the mean outside.

    Raises:
        ValueError: no values.
    """
    found: dict[float, float] = {}
    for value, weight in values.weighted:
        found[round(value, DIGITS)] = found.get(round(value, DIGITS), 0.0) + weight
    if not found:
        raise ValueError("a band needs outcomes")
    points = sorted(found)
    sums = [0.0, *accumulate(found[point] for point in points)]
    mean = sum(point * weight for point, weight in found.items()) / sums[-1]
    low, high = _shortest(points, sums, values.level * sums[-1])
    return Band(min(low, mean), mean, max(high, mean))


def _shortest(points: list[float], sums: list[float], wanted: float) -> tuple[float, float]:
    best = points[0], points[-1]
    for first, point in enumerate(points):
        last = bisect_left(sums, sums[first] + wanted - 1e-9, first + 1)
        if last > len(points):
            break
        if points[last - 1] - point < best[1] - best[0] - 1e-12:
            best = point, points[last - 1]
    return best
