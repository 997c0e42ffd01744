"""Which trials of a search continue after a rung."""

from __future__ import annotations

import itertools
import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotkeeper.contract import codec
from spotkeeper.contract.sweep import SweepState, Trial, TrialReport, continuing, joined, ranking, value_at

NAN = math.nan


def trial(number: int = 0, *, first: int = 0, count: int = 9, goal: str = "min", eta: int = 3) -> Trial:
    return Trial("s", number, "loss", goal, first=first, count=count, rungs=(10, 30, 90), eta=eta)  # type: ignore[arg-type]


def state(*values: tuple[float | None, ...], over: tuple[int, ...] = (), first: int = 0) -> SweepState:
    reports = [TrialReport(first + n, of, over=first + n in over) for n, of in enumerate(values)]
    return SweepState("s", trials=tuple(reports))


def test_a_rung_waits_for_every_trial_of_its_cohort() -> None:
    there = [(float(n),) for n in range(9)]
    assert continuing(state(*there[:-1]), trial(), 0) is None
    assert continuing(state(*there[:-1], ()), trial(), 0) is None
    assert continuing(state(*there), trial(), 0) == {0, 1, 2}
    assert continuing(state(*there, (-1.0,)), trial(), 0) == {0, 1, 2}, "number 9 is of another cohort"


def test_a_trial_that_is_over_holds_nobody_up_and_comes_last() -> None:
    assert continuing(state((1.0,), (), (2.0,), over=(1,)), trial(count=3), 0) == {0}
    ended = SweepState("s", trials=(TrialReport(0, (), 0.5, over=True), TrialReport(1, (1.0,)), TrialReport(2, (2.0,))))
    assert continuing(ended, trial(count=3), 0) == {0}, "it ended before the rung: its last value counts there"
    assert value_at(TrialReport(0, (), 0.5), 0) is None, "a last value of a trial that goes on is none"


def test_the_goal_says_what_is_best_and_numbers_break_ties() -> None:
    values = [(1.0,), (3.0,), (3.0,), (2.0,)]
    assert continuing(state(*values), trial(count=4, goal="max", eta=4), 0) == {1}
    assert continuing(state(*values), trial(count=4, eta=4), 0) == {0}
    assert ranking(state(*values), trial(count=4, goal="max"), 0) == [(1, 3.0), (2, 3.0), (3, 2.0), (0, 1.0)]


def test_no_number_never_continues() -> None:
    assert continuing(state((NAN,), (None,), (5.0,)), trial(count=3, eta=2), 0) == {2}
    assert continuing(state((NAN,), (None,), (math.inf,)), trial(count=3), 0) == {2}
    assert continuing(state((NAN,), (None,), (None,)), trial(count=3), 0) == frozenset()
    assert continuing(state((None,), (None,), (None,)), trial(count=3), 1) == frozenset(), "nobody is at the next rung"


def test_each_rung_halves_those_that_got_there() -> None:
    values: list[tuple[float, ...]] = [(float(n),) for n in range(9)]
    values[0], values[1], values[2] = (0.0, 7.0), (1.0, 6.0), (2.0, 5.0)
    assert continuing(state(*values), trial(), 1) == {2}
    assert continuing(state(*values[:2], (2.0,), *values[3:]), trial(), 1) is None


def test_a_cohort_counts_from_its_first_number() -> None:
    there = state((9.0,), (1.0,), (2.0,), first=4)
    assert continuing(there, trial(first=4, count=3), 0) == {5}
    assert continuing(there, trial(first=3, count=3), 0) is None


@given(st.permutations(range(6)), st.lists(st.floats(), min_size=6, max_size=6))
def test_the_order_of_reports_does_not_matter(orders: list[int], values: list[float]) -> None:
    found = SweepState("s")
    for number in orders:
        assert continuing(found, trial(count=6), 0) is None
        found = found.told(TrialReport(number, (values[number],)))
    assert found.ver == 6 and [one.number for one in found.trials] == list(range(6))
    best = continuing(found, trial(count=6), 0)
    assert best is not None and len(best) <= 2
    kept = [values[number] for number in best]
    left = [value for number, value in enumerate(values) if number not in best and not math.isnan(value)]
    assert all(a <= b for a, b in itertools.product(kept, left))


@pytest.mark.parametrize("value", [1.5, -0.0, None])
def test_a_report_is_the_same_once_decoded(value: float | None) -> None:
    before = SweepState("s", 1, "n", (TrialReport(3, (value,), spent=0.25),))
    assert codec.decode(msgspec.json.encode(before), SweepState) == before


def test_a_later_report_replaces_an_earlier_one() -> None:
    found = SweepState("s", 4).told(TrialReport(1, (1.0,), spent=2.0)).told(TrialReport(0, spent=1.0))
    found = found.told(TrialReport(1, (1.0, 2.0), spent=3.0))
    assert (found.ver, found.spent()) == (7, 4.0)
    assert [(one.number, one.values) for one in found.trials] == [(0, ()), (1, (1.0, 2.0))]


def test_an_older_report_of_a_trial_takes_nothing_back() -> None:
    began, waits = TrialReport(0, spent=1.0), TrialReport(0, (0.5,), spent=2.0)
    ended = TrialReport(0, (0.5,), 0.25, over=True, spent=3.0)
    assert joined(began, waits) == waits
    assert joined(waits, began) == TrialReport(0, (0.5,), spent=1.0)
    assert joined(waits, ended) == ended
    assert joined(ended, waits) == joined(ended, began) == ended
    later = TrialReport(0, (0.5,), 0.25, over=True, spent=4.0)
    assert joined(ended, later) == later, "its machines went after its end"
