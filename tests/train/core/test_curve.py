"""A curve stays short, and keeps its extremes and its last point, however it grows."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spotkeeper.contract import metrics
from spotkeeper.train.core import curve
from spotkeeper.train.core.curve import Curve
from spotkeeper.train.loop import metrics as history

RANDOM = [math.sin(step * step) for step in range(100_000)]


def grown(values: list[float], batch: int, most: int, stride: int = 1) -> Curve:
    one = Curve(most)
    for at in range(0, len(values), batch):
        steps = [stride * step for step in range(at, min(at + batch, len(values)))]
        one.add(steps, [float(step) for step in steps], values[at : at + batch])
    return one


def test_library_and_readers_agree_on_the_limits() -> None:
    assert (curve.MOST, history.NAMES) == (metrics.POINTS, metrics.METRICS)


def test_a_short_curve_keeps_every_point() -> None:
    values = RANDOM[: curve.MOST]
    one = grown(values, 7, curve.MOST)
    assert (one.steps, one.values) == (list(range(curve.MOST)), values)


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.floats(allow_nan=False), min_size=1, max_size=600),
    st.integers(1, 50),
    st.integers(8, 64),
    st.integers(1, 5),
)
def test_a_thinned_curve_keeps_extremes_and_the_last_point(
    values: list[float], batch: int, most: int, stride: int
) -> None:
    one = grown(values, batch, most, stride)
    assert len(one) <= most
    assert one.steps == sorted(set(one.steps)) and one.steps[-1] == stride * (len(values) - 1)
    assert {(step, value) for step, value in zip(one.steps, one.values, strict=True)} <= {
        (stride * at, value) for at, value in enumerate(values)
    }, "no point is invented"
    assert (min(one.values), max(one.values), one.values[-1]) == (min(values), max(values), values[-1])
    assert one.times == list(map(float, one.steps))


def test_a_thinned_curve_is_not_thinner_than_needed() -> None:
    assert len(grown(RANDOM, 256, curve.MOST)) > curve.MOST / 4


def test_a_repeated_step_replaces_its_point_and_later_ones() -> None:
    one = grown([1.0, 2.0, 3.0, 4.0], 4, 100)
    one.add([2, 5], [9.0, 9.0], [7.0, 8.0])
    assert (one.steps, one.values) == ([0, 1, 2, 5], [1.0, 2.0, 7.0, 8.0])
    one.cut(2)
    assert (one.steps, one.times) == ([0, 1, 2], [0.0, 1.0, 9.0])
    one.cut(-1)
    assert not one.steps


@pytest.mark.parametrize("place", [0, 1, 30, 63])
def test_nan_hides_no_extremes(place: int) -> None:
    values = [float(number) for number in range(64)]
    values[place] = math.nan
    one = grown(values, 64, 16)
    numbers = [value for value in one.values if not math.isnan(value)]
    want = [value for value in values if not math.isnan(value)]
    assert (min(numbers), max(numbers)) == (min(want), max(want))


def test_nan_alone_is_kept() -> None:
    one = grown([math.nan] * 100, 10, 16)
    assert one.values and all(map(math.isnan, one.values))
