"""Which trials of a search continue after a rung."""

from __future__ import annotations

import itertools
import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotkeeper.contract import codec
from spotkeeper.contract.sweep import (
    Decided,
    SweepState,
    Trial,
    TrialReport,
    alone,
    continues,
    decided,
    joined,
    value_at,
)
from spotkeeper.contract.sweepfile import SweepStop

NAN = math.nan


def trial(number: int = 0, *, first: int = 0, count: int = 9, goal: str = "min", eta: int = 3) -> Trial:
    return Trial("s", number, "loss", goal, first=first, count=count, rungs=(10, 30, 90), eta=eta)  # type: ignore[arg-type]


def state(*values: tuple[float | None, ...], over: tuple[int, ...] = (), first: int = 0) -> SweepState:
    reports = [TrialReport(first + n, of, over=first + n in over) for n, of in enumerate(values)]
    return SweepState("s", trials=tuple(reports))


@pytest.mark.parametrize("more", [{"count": 10_001}, {"number": 10_000}, {"first": 10_000}])
def test_a_job_file_can_claim_no_huge_cohort(more: dict[str, int]) -> None:
    """Anybody who submits can write one, and each round lists the cohort's reports."""
    whole = {"sweep": "s", "number": 9999, "metric": "loss", "first": 9999, "count": 10_000}
    assert codec.decode(msgspec.json.encode(whole), Trial).count == 10_000
    with pytest.raises(msgspec.ValidationError, match="Expected `int` <"):
        codec.decode(msgspec.json.encode(whole | more), Trial)


def decision(found: SweepState, of: Trial, rung: int = 0) -> Decided | None:
    return decided(found, of).decision(of.first, rung)


def continuing(found: SweepState, of: Trial, rung: int) -> set[int] | None:
    made = decision(found, of, rung)
    return None if made is None else set(made.continuing())


def order(found: SweepState, of: Trial) -> tuple[int, ...]:
    made = decision(found, of)
    assert made is not None
    return made.order


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
    assert order(state(*values), trial(count=4, goal="max")) == (1, 2, 3, 0)


def test_no_number_never_continues() -> None:
    assert continuing(state((NAN,), (None,), (5.0,)), trial(count=3, eta=2), 0) == {2}
    assert continuing(state((NAN,), (None,), (math.inf,)), trial(count=3), 0) == {2}
    assert continuing(state((NAN,), (None,), (None,)), trial(count=3), 0) == set()
    assert continuing(state((None,), (None,), (None,)), trial(count=3), 1) == set(), "nobody is at the next rung"


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


# -- decisions are made once


def later(found: SweepState, *reports: TrialReport, of: Trial) -> SweepState:
    for report in reports:
        found = decided(found.told(report), of)
    return found


def test_what_happens_after_a_decision_does_not_change_it() -> None:
    of = trial(count=3)
    made = decided(state((1.0,), (2.0,), (3.0,)), of)
    assert made.decided == (Decided(0, 0, (0, 1, 2), 1),)
    assert later(made, TrialReport(0, (1.0,), over=True), TrialReport(2, (3.0,), held=True), of=of).decision(
        0, 0
    ) == made.decision(0, 0)
    assert decided(made, of) is made


def test_the_place_of_a_trial_that_was_cancelled_at_its_rung_is_anothers() -> None:
    of = trial(count=3)
    assert continuing(state((1.0,), (2.0,), (3.0,), over=(0,)), of, 0) == {1}
    ended = state((1.0,), (2.0,), (3.0,)).told(TrialReport(0, (1.0,), 0.5, over=True))
    assert continuing(ended, of, 0) == {0}, "it has trained to its end"
    assert order(state((1.0,), (2.0,), (3.0,), over=(0,)), of) == (1, 2, 0)


def held(*numbers: int) -> list[TrialReport]:
    return [TrialReport(number, held=True) for number in numbers]


def test_a_rung_does_not_wait_for_trials_on_hold_if_enough_others_have_a_value() -> None:
    of = trial(count=6)
    there = [TrialReport(number, (float(number),)) for number in range(6)]
    made = later(SweepState("s"), *there[:4], *held(4, 5), of=of).decision(0, 0)
    assert made == Decided(0, 0, (0, 1, 2, 3), 2), "2 of 6 continue, as if all were there"
    assert later(SweepState("s"), there[0], *held(1, 2, 3, 4, 5), of=of).decided == (), "one value for two places"
    two = later(SweepState("s"), *there[:2], *held(2, 3, 4, 5), of=of)
    assert two.decision(0, 0) == Decided(0, 0, (0, 1), 2)
    assert later(SweepState("s"), *there[:4], *held(5), of=of).decided == (), "number 4 trains"
    nan = later(SweepState("s"), TrialReport(0, (NAN,)), there[1], *held(2, 3, 4, 5), of=of)
    assert nan.decided == (), "one value for two places"


def test_a_trial_on_hold_with_a_value_is_compared() -> None:
    assert continuing(state((1.0,), (2.0,), (3.0,)).told(TrialReport(0, (1.0,), held=True)), trial(count=3), 0) == {0}


@pytest.mark.parametrize(
    ("number", "value", "goal", "goes"),
    [
        (5, 0.5, "min", True),
        (5, 2.5, "min", False),
        (5, 1.0, "min", False),
        (0, 1.0, "min", True),
        (5, None, "min", False),
        (5, NAN, "min", False),
        (5, 9.0, "max", True),
        (5, 1.0, "max", False),
    ],
)
def test_a_trial_that_was_on_hold_continues_if_it_beats_the_last_that_did(
    number: int, value: float | None, goal: str, goes: bool
) -> None:
    values = {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0}
    reports = [TrialReport(at, (of,)) for at, of in values.items()]
    of = trial(number, count=6, goal=goal, eta=6)
    found = later(SweepState("s"), *held(0, 5), *reports, of=of)
    assert continues(found, of, 0, value) is goes
    others = {at: continues(found, trial(at, count=6, goal=goal, eta=6), 0, values[at]) for at in values}
    assert [at for at, one in others.items() if one] == [1 if goal == "min" else 4]
    assert continues(found, of, 1, value) is None, "the next rung is open"


def test_where_no_trial_had_a_value_one_that_was_on_hold_continues() -> None:
    found = SweepState("s", decided=(Decided(0, 0, (1, 2), 0),))
    assert continues(found, trial(0, count=3), 0, 1.0) and not continues(found, trial(1, count=3), 0, None)


def test_a_trial_that_was_on_hold_is_no_contender_later() -> None:
    of = trial(count=6, eta=2)
    first = [TrialReport(number, (float(number),)) for number in range(1, 6)]
    found = later(SweepState("s"), *held(0), *first, TrialReport(0, (0.0,)), of=of)
    second = [TrialReport(number, (float(number),) * 2) for number in (1, 2, 3)]
    assert later(found, *second, of=of).decision(0, 1) == Decided(0, 1, (1, 2, 3), 1), "nobody waits for number 0"


@given(
    st.lists(
        st.sampled_from([(1.0,), (2.0,), (3.0,), (None,), "held", "over", "ended", "cancelled"]), min_size=6, max_size=6
    ),
    st.permutations(range(6)),
    st.integers(2, 4),
)
def test_no_order_of_reports_changes_a_decision(kinds: list[object], orders: list[int], eta: int) -> None:
    def report(number: int) -> TrialReport:
        match kinds[number]:
            case "held":
                return TrialReport(number, held=True)
            case "over":
                return TrialReport(number, over=True)
            case "ended":
                return TrialReport(number, (), 1.5, over=True)
            case "cancelled":
                return TrialReport(number, (0.5,), over=True)
            case values:
                return TrialReport(number, values)  # type: ignore[arg-type]

    of = trial(count=6, eta=eta)
    one = later(SweepState("s"), *(report(number) for number in orders), of=of)
    other = later(SweepState("s"), *(report(number) for number in range(6)), of=of)
    assert set(one.decided) == set(other.decided)


@pytest.mark.parametrize("by", ["ann\nresumed by ann", "ann\n", "\x1b[2J", "a" * 257])
def test_a_stops_author_is_one_line(by: str) -> None:
    """Whoever submits jobs may write it, and people read it."""
    with pytest.raises(ValueError, match="by"):
        codec.decode(msgspec.json.encode({"below": 3, "at": 1.0, "by": by}), SweepStop)
    assert codec.decode(b'{"below":3,"at":1.0,"by":"arn:aws:iam::1:user/\xc3\xa4nn"}', SweepStop).by.endswith("änn")


def test_a_trial_is_alone_once_no_other_can_be_compared_with_it() -> None:
    first = trial(count=3)
    there = state((1.0,), (2.0,), (3.0,))
    assert alone(SweepState(), trial(count=1)) and not alone(there, first)
    one = Decided(0, 0, (0, 1, 2), 1)
    assert alone(msgspec.structs.replace(there, decided=(one,)), first), "both others have lost"
    assert not alone(msgspec.structs.replace(there, decided=(Decided(0, 0, (0, 1), 1),)), first), "2 may return"
    assert not alone(msgspec.structs.replace(there, decided=(Decided(3, 0, (0, 1, 2), 1),)), first), "of others"
    assert alone(state((1.0,), (2.0,), (), over=(1, 2)), first)
    two = TrialReport(2, final=0.5, over=True)
    assert not alone(state((1.0,), (2.0,), over=(1,)).told(two), first), "it trained to its end before the rung"
    assert alone(state((), (9.0,), over=(4,), first=3).told(two), trial(3, first=3, count=2)), "another cohort"
