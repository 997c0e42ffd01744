"""What teams have used, and what they are entitled to."""

from __future__ import annotations

import math
from datetime import UTC, datetime

import pytest
from msgspec.structs import replace

from spotkeeper.contract.allocation import Allocation, Grant, TeamUse
from spotkeeper.contract.stack import PoolState, Price, StackState, TeamState
from spotkeeper.reconcile.decide.queue import use
from tests.reconcile.decide.queue.situation import (
    DAY_S,
    HOUR_S,
    NOW,
    grants,
    pool,
    runs,
    shares,
    stack,
)


def month(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


def decayed(allocation: Allocation, on: StackState, now: float) -> dict[str, float]:
    return {one.team: one.usd for one in use.current(allocation, on, now)}


def of_month(allocation: Allocation, on: StackState, now: float) -> dict[str, float]:
    return {one.team: one.month_usd for one in use.current(allocation, on, now)}


def test_use_halves_in_a_day() -> None:
    allocation = Allocation(use=(TeamUse("t", 10.0, NOW - DAY_S),))
    assert decayed(allocation, stack(), NOW) == {"t": pytest.approx(5.0)}
    assert decayed(allocation, stack(), NOW - DAY_S) == {"t": 10.0}


def test_a_clock_that_is_behind_changes_nothing() -> None:
    end = month("2026-12-01T00:00:00")
    allocation = Allocation(use=(TeamUse("t", 10.0, end, "2026-12", 3.0),))
    assert decayed(allocation, stack(), end - 5) == {"t": 10.0}
    assert of_month(allocation, stack(), end - 5) == {"t": 3.0}


def test_a_clock_that_is_behind_charges_no_earlier_month_to_the_one_that_has_begun() -> None:
    end = month("2026-12-01T00:00:00")
    ran = Grant("r", 0, 1, "slot:p", end - 20 * DAY_S)
    allocation = Allocation(
        grants=(ran,), claims=(runs("r", 1, "t"),), use=(TeamUse("t", 9.0, end + 5, "2026-12", 3.0),)
    )
    assert of_month(allocation, stack(), end - 5) == {"t": 3.0}
    assert of_month(allocation, stack(), end + HOUR_S) == {"t": pytest.approx(4.0)}


def test_a_job_that_changes_teams_leaves_its_cost_to_the_first() -> None:
    job, other = runs("r", 2, "a", ago_s=3 * HOUR_S), runs("s", 1, "a", ago_s=2 * HOUR_S)
    before = Allocation(grants=grants(job, other), claims=(job, other))
    after = use.settled(before, "r", stack(), NOW)
    after = replace(after, claims=(replace(job, team="b"), other))
    assert of_month(after, stack(), NOW) == {"a": pytest.approx(8.0), "b": 0.0}
    assert of_month(after, stack(), NOW + HOUR_S) == {"a": pytest.approx(9.0), "b": pytest.approx(2.0)}


def test_a_grant_costs_its_list_price_since_its_start_decayed() -> None:
    ran_h = 12
    claim = runs("r", 2, "t", ago_s=ran_h * HOUR_S)
    allocation = Allocation(grants=grants(claim), claims=(claim,))
    each_hour = sum(2 * 3.0 * 0.5 ** ((hour + 0.5) / 24) for hour in range(ran_h))
    assert decayed(allocation, stack(pool(usd=3.0)), NOW) == {"t": pytest.approx(each_hour, rel=1e-4)}


def test_folding_a_grant_changes_no_sum() -> None:
    claim = runs("r", 3, "t", ago_s=30 * HOUR_S)
    before = Allocation(grants=grants(claim), claims=(claim,), use=(TeamUse("t", 7.0, NOW - 9 * HOUR_S),))
    after = Allocation(
        grants=before.grants[1:], claims=(claim,), use=use.folded(before, before.grants[:1], stack(), NOW)
    )
    for later_s in (0.0, 5 * HOUR_S):
        then = NOW + later_s
        # The released grant's cost stops, and decays.
        expected = decayed(before, stack(), then)["t"] - _cost(then - before.grants[0].since)
        expected += _cost(NOW - before.grants[0].since) * 0.5 ** (later_s / DAY_S)
        assert decayed(after, stack(), then)["t"] == pytest.approx(expected)


def _cost(ran_s: float) -> float:
    rate = math.log(2) / 24
    return (1 - math.exp(-rate * ran_s / HOUR_S)) / rate


def test_jobs_without_a_claim_belong_to_the_default_team() -> None:
    folded = use.folded(Allocation(), [Grant("x", 0, 1, "slot:p", NOW - HOUR_S)], stack(), NOW)
    assert [(one.team, round(one.usd, 2)) for one in folded] == [("default", 0.99)]


def test_a_month_is_a_calendar_month_in_utc_and_does_not_decay() -> None:
    end = month("2026-12-01T00:00:00")
    claim = runs("r", 1, "t", reserved_at=end - 10 * HOUR_S)
    allocation = Allocation(
        grants=grants(claim), claims=(claim,), use=(TeamUse("t", 5.0, end - DAY_S, "2026-11", 5.0),)
    )
    assert of_month(allocation, stack(), end - 1) == {"t": pytest.approx(15.0, abs=0.01)}
    assert of_month(allocation, stack(), end) == {"t": 0.0}
    assert of_month(allocation, stack(), end + 2 * HOUR_S) == {"t": pytest.approx(2.0)}


@pytest.mark.parametrize("ahead_s", [3 * DAY_S, 400 * DAY_S], ids=["the next month", "another year"])
def test_a_clock_that_jumps_past_the_end_of_the_month_and_back_resets_nothing(ahead_s: float) -> None:
    at = month("2026-11-29T00:00:00")
    allocation = Allocation(use=(TeamUse("t", 10.0, at, "2026-11", 900.0),))
    grant = Grant("r", 0, 1, "slot:p", at)
    claims = (runs("r", 1, "t"),)
    jumped = replace(allocation, use=use.folded(replace(allocation, claims=claims), [grant], stack(), at + ahead_s))
    assert of_month(jumped, stack(), at + ahead_s)["t"] < 100.0
    assert of_month(jumped, stack(), at + HOUR_S) == {"t": 900.0}
    back = replace(jumped, use=use.folded(replace(jumped, claims=claims), [grant], stack(), at + HOUR_S))
    assert of_month(back, stack(), at + HOUR_S) == {"t": pytest.approx(901.0)}
    assert of_month(back, stack(), month("2026-12-01T00:00:00")) == {"t": 0.0}


@pytest.mark.parametrize("at", [NOW + 61, NOW + DAY_S, 1e18, float("inf"), float("nan"), -1e18, float("-inf")])
def test_an_absurd_time_counts_as_now(at: float) -> None:
    (one,) = use.current(Allocation(use=(TeamUse("t", 8.0, at, "2027-01", 3.0),)), stack(), NOW)
    assert (one.at, one.usd) == (NOW, 0.0 if at < 0 else 8.0)
    assert one.month_usd == 3.0
    grant = Grant("r", 0, 1, "slot:p", at)
    (one,) = use.folded(Allocation(), [grant], stack(), NOW)
    assert 0.0 <= one.usd < 24 * 1.5


@pytest.mark.parametrize(
    ("resource", "usd"),
    [("slot:p", 2.0), ("slot:p/on-demand", 5.0), ("machine:s-0", 7.0), ("machine:gone", 1.0), ("slot:gone", 1.0)],
)
def test_list_prices(resource: str, usd: float) -> None:
    """A machine without a known price counts its time, as if it cost 1 USD an hour."""
    dynamic = PoolState("p", "spot", "m", ("a",), 1, 8, 8, 10, "d", {"a": Price(on_demand=5.0, spot=2.0)})
    assert use.price(stack(dynamic, pool("s", usd=7.0, static=1)), Grant("r", 0, 1, resource)) == usd


# -- entitlements


@pytest.mark.parametrize(
    ("demand", "share", "level"),
    [
        ({"a": 8, "b": 8}, {}, {"a": 4, "b": 4}),
        ({"a": 8, "b": 8}, {"a": 3}, {"a": 6, "b": 2}),
        ({"a": 1, "b": 8}, {}, {"a": 1, "b": 7}),
        ({"a": 1, "b": 2, "c": 9}, {"c": 0.5}, {"a": 1, "b": 2, "c": 5}),
        ({"a": 4, "b": 8, "c": 8}, {"a": 2}, {"a": 4, "b": 2, "c": 2}),
        ({"a": 2}, {}, {"a": 2}),
        ({}, {}, {}),
    ],
)
def test_what_a_team_does_not_need_goes_to_the_others(
    demand: dict[str, float], share: dict[str, float], level: dict[str, float]
) -> None:
    assert use.waterfill(8, demand, stack(teams=shares(**share))) == level


def test_higher_classes_are_filled_first() -> None:
    demand = [(2, "a", 5), (1, "a", 8), (1, "b", 8), (0, "c", 8)]
    assert use.entitled(8, demand, stack()) == {"a": 6.5, "b": 1.5, "c": 0.0}


def test_a_team_is_entitled_to_its_own_limit_at_most() -> None:
    demand = [(2, "a", 2), (1, "a", 8), (1, "b", 8)]
    assert use.entitled(8, demand, stack(teams=[TeamState("a", max_machines=3)])) == {"a": 3.0, "b": 5.0}
