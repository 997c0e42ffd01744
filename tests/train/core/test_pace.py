"""When to save."""

from __future__ import annotations

import math
from collections import deque
from random import Random
from statistics import median

import pytest

from spotkeeper.train.core.pace import LONGEST_S, SHORTEST_S, RecentTimes, SavePace, young


@pytest.mark.parametrize(("stall_s", "life_s"), [(0.5, 2700.0), (0.05, 21600.0), (2.0, 600.0)])
def test_youngs_interval_is_the_cheapest(stall_s: float, life_s: float) -> None:
    """Cost per second of an interval: its save's stall, and half of it lost at each loss."""

    def cost(interval_s: float) -> float:
        return stall_s / interval_s + interval_s / 2 / life_s

    best = young(stall_s, life_s)
    assert cost(best) <= min(cost(best * 0.9), cost(best * 1.1))
    assert best == pytest.approx(math.sqrt(2 * stall_s * life_s))


def test_youngs_interval_is_bounded() -> None:
    assert young(1e-6, 60.0) == SHORTEST_S
    assert young(60.0, 1e9) == LONGEST_S
    assert young(0.01, 60.0, save_s=5.0) == 20.0, "the saver rests three quarters of the time"


def test_more_losses_mean_more_saves() -> None:
    calm, storm = (SavePace(life_s, stalls=_times(0.2)) for life_s in (21600.0, 600.0))
    assert storm.interval_s < calm.interval_s


def test_the_first_save_is_due_at_once_and_sets_the_rest() -> None:
    pace = SavePace(mean_life_s=2700.0, since=100.0)
    assert pace.due(100.0)
    pace.stalls.append(0.5)
    pace.since = 101.0
    assert not pace.due(101.0 + 51.0)
    assert pace.due(101.0 + 52.0)


def test_a_fixed_interval_is_kept() -> None:
    pace = SavePace(2700.0, fixed_s=7.0, stalls=_times(0.5))
    assert not pace.due(6.9) and pace.due(7.0)


def test_figures_are_medians() -> None:
    pace = SavePace(1.0)
    assert (pace.step_s, pace.stall_s, pace.save_s) == (0.0, 0.0, 0.0)
    for seconds in (9.0, 0.1, 0.1):
        pace.add_step(seconds)
    assert pace.step_s == 0.1


def test_the_median_of_recent_times_is_that_of_the_newest() -> None:
    random, recent, newest = Random(1), RecentTimes(6), deque[float](maxlen=6)  # noqa: S311 - reproducible
    for _ in range(60):
        value = random.choice((0.1, 0.2, 0.3, random.random()))
        recent.append(value)
        newest.append(value)
        assert recent == newest and recent.median == median(newest)
        newest[-1] += 0.2  # a wait, known later
        recent[-1] += 0.2
        assert recent == newest and recent.median == median(newest)


def _times(*values: float) -> RecentTimes:
    times = RecentTimes(8)
    times.extend(values)
    return times
