"""From outcomes of replays to a band that holds 80 % of what happens. Pure.

The next market is taken for one more of those that were recorded: each counts alike, however often it was replayed.
A band is the shortest that holds a share of the recorded outcomes, and more of them than the 80 % that are promised,
because a market that was not recorded differs from all that were. Conformal prediction over groups (Lee, Barber and
Willett, "Distribution-free inference with hierarchical data") would have it hold 0.8 (1 + 1/K) of K markets to be safe
in the worst case; where markets were left out in turn some 0.6 of that addition did, and where the job's own market
was known and only its hours were left out, none was needed (``bench/forecast.py`` measures both).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from msgspec import Struct

PROMISED = 0.80
ADDED = 0.5  # divided by the number of markets
DIGITS = 9  # values that differ by less are one
Weighted = tuple[float, float]  # a value and its weight


class Band(Struct, frozen=True):
    """``mid`` is expected (the mean); four of five outcomes are from ``low`` to ``high``, these included."""

    low: float
    mid: float
    high: float

    def holds(self, value: float) -> bool:
        return self.low - 1e-6 <= value <= self.high + 1e-6

    def times(self, factor: float) -> Band:
        return Band(self.low * factor, self.mid * factor, self.high * factor)


class Values(Struct, frozen=True):
    """Outcomes with their weights; ``level``: of them, the share that a band is to hold."""

    weighted: tuple[Weighted, ...]
    level: float

    def share(self) -> float:
        """Of outcomes that are 0 or 1."""
        return sum(weight * value for value, weight in self.weighted)


def weigh(others: Sequence[Sequence[float]], own: Sequence[Sequence[float]] = ()) -> Values:
    """All markets alike, but the job's own together as much as all others."""
    kinds = [markets for markets in (others, own) if markets]
    weighted = tuple(
        (value, 1.0 / len(kinds) / len(markets) / len(market))
        for markets in kinds
        for market in markets
        for value in market
    )
    return Values(weighted, PROMISED if own else min(1.0, PROMISED + ADDED / max(1, len(others))))


def band(values: Values) -> Band:
    """The band of one quantity; a mean that lies outside (a few dear outcomes) stretches it.

    Raises:
        ValueError: there are no values.
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
