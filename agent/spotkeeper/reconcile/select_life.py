"""How long a spot machine may live, from its zone's age and what was lost there. Pure.

The hazard of a zone falls with the time since when it has been there: one that has lasted six hours is twenty times
safer than a new one. The shape is that of every recorded market; a zone's own losses scale it (a gamma prior worth
``Shape.weight`` losses, whose mean is what all zones of the job came to).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

LEAST = 1e-4  # of survival: what lies behind it counts for nothing


@dataclass(frozen=True)
class Shape:
    """Losses an hour by age: ``hazard[i]`` until ``until_h[i]`` hours, the last one for ever."""

    until_h: tuple[float, ...] = (0.5, 2.0, 6.0, 24.0, math.inf)
    hazard: tuple[float, ...] = (1.2, 0.6, 0.2, 0.1, 0.03)
    weight: float = 2.0  # losses that the prior is worth

    def losses(self, start_h: float, end_h: float) -> float:
        """Losses to be expected of a machine that lives from one age to another."""
        total, begin = 0.0, 0.0
        for until, hazard in zip(self.until_h, self.hazard, strict=True):
            low, high = max(begin, start_h), min(until, end_h)
            if high > low:
                total += (high - low) * hazard
            if until >= end_h:
                break
            begin = until
        return total


SHAPE = Shape()


@dataclass(frozen=True)
class Life:
    """What a launch may come to: hours until it is lost (or done), and those of them that are work."""

    hours: float
    work_h: float


def expected(shape: Shape, age_h: float, factor: float, start_h: float, left_h: float) -> Life:
    """Of a launch in a zone of this age, whose hazard is ``factor`` times the usual.

    Args:
        start_h: what its start-up takes; no work is done in it.
        left_h: the work that is left: what comes after it is of no use.

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
    return Life(hours, work)
