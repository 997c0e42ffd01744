"""What reservations leave in the limits of pools, stack and teams."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from spotkeeper.contract.allocation import Allocation, Claim, Grant, Stop
from spotkeeper.contract.stack import PoolState, Price, ReservedCapacity, TeamState
from spotkeeper.reconcile.decide.queue.room import of_running, reserved_elsewhere, usd_elsewhere
from spotkeeper.reconcile.decide.queue.scheduler import schedule
from tests.reconcile.decide.queue.situation import NOW, grants, pool, runs, stack, waits


def most(claim: Claim, *others: Claim, **more: Any) -> int:
    """Return how many machines of this claim fit beside these reservations."""
    pools = more.pop("pools", (pool(),))
    on = stack(*pools, **more)
    return of_running(Allocation(grants=grants(*others), claims=others), on).most(claim, 0, 100)


def test_machines_spread_over_all_pools_or_those_of_the_job() -> None:
    pools = pool("p", 3), pool("q", 4)
    assert most(waits("w", 1), pools=pools) == 7
    assert most(waits("w", 1, pools=("q",)), runs("r", 2, pools=("q",)), pools=pools) == 2
    assert most(waits("w", 1), runs("r", 2, pools=("q",)), pools=pools) == 5


def test_a_job_of_few_pools_is_placed_before_one_that_may_use_any() -> None:
    pools = pool("p", 4), pool("q", 4)
    any_, only = runs("a", 4), runs("b", 4, pools=("p",))
    room = of_running(Allocation(claims=(any_, only)), stack(*pools))
    assert dict(room.placed("b")) == {"p": 4}
    assert dict(room.placed("a")) == {"q": 4}


def test_a_job_is_placed_where_its_grants_are() -> None:
    pools = pool("p", 4), pool("q", 4)
    claim = runs("a", 3)
    held = tuple(Grant("a", node, 1, "slot:q") for node in range(2))
    room = of_running(Allocation(grants=held, claims=(claim,)), stack(*pools))
    assert dict(room.placed("a")) == {"q": 2, "p": 1}
    leaving = of_running(Allocation(grants=held, claims=(replace(claim, reserved=1),)), stack(*pools))
    assert dict(leaving.placed("a")) == {"q": 1}  # machines that leave count as gone


def test_idle_static_machines_come_first() -> None:
    pools = pool("p", 4), pool("s", static=2)
    room = of_running(Allocation(claims=(runs("a", 3),)), stack(*pools))
    assert dict(room.placed("a")) == {"s": 2, "p": 1}
    granted = Allocation(grants=(Grant("a", 0, 1, "machine:s-1"),), claims=(runs("a", 1),))
    assert dict(of_running(granted, stack(*pools)).placed("a")) == {"s": 1}


def test_the_stacks_own_limits_hold_for_dynamic_machines() -> None:
    pools = pool("p", 4, usd=3.0), pool("q", 4, usd=1.0), pool("s", static=2)
    assert most(waits("w", 1), pools=pools, max_machines=5) == 7
    assert most(waits("w", 1), runs("r", 2, pools=("p",)), pools=pools, max_machines=5) == 5
    assert most(waits("w", 1, pools=("p",)), pools=pools, max_usd_hour=3 * 1.2) == 1
    assert most(waits("w", 1, pools=("q",)), runs("r", 1, pools=("p",)), pools=pools, max_usd_hour=5.0) == 2
    assert most(waits("w", 1, pools=("q",)), pools=(pool("q", 4, usd=1.2),), max_usd_hour=3 * 1.2) == 3


def test_reserved_machines_count_in_no_limit_on_dollars() -> None:
    paid = replace(pool("p", 6, usd=1.0), reservations=(ReservedCapacity("res", "z", 2),))
    held = tuple(Grant("a", node, 1, "slot:p/reserved/z/res") for node in range(2))
    limited = stack(paid, max_usd_hour=2.0)
    assert of_running(Allocation(), limited).most(waits("w", 1), 0, 100) == 4
    room = of_running(Allocation(grants=held, claims=(runs("a", 2),)), limited)
    assert dict(room.placed("a")) == {"p": 2} and room.most(waits("w", 1), 0, 100) == 2


@pytest.mark.parametrize(
    ("times", "reserved"),
    [({}, 4), ({"starts": NOW - 1.0, "ends": NOW + 1.0}, 4), ({"starts": NOW + 1.0}, 0), ({"ends": NOW}, 0)],
)
def test_reserved_machines_are_paid_for_only_while_they_can_be_used(times: dict[str, float], reserved: int) -> None:
    paid = replace(pool("p", 6, usd=1.0), reservations=(ReservedCapacity("res", "z", 2, **times),))
    limited = stack(paid, max_usd_hour=2.0)
    (claim,) = schedule(Allocation(claims=(waits("w", 4),)), limited, NOW).claims
    assert claim.reserved == reserved
    others = Allocation(claims=(runs("w", 4), runs("own", 1)))
    assert reserved_elsewhere(others, limited, "own", NOW) == {"p": 4}


@pytest.mark.parametrize("limits", [{}, {"teams": (TeamState("default", max_usd_hour=99.0),)}])
def test_a_mix_whose_pool_left_the_stack_file_stops_no_other_job(limits: dict[str, Any]) -> None:
    mix, other = {"pools": ("p",), "mix": (("p", 1), ("gone", 1))}, waits("w", 1)
    held = Grant("a", 0, 1, "slot:p"), Grant("a", 1, 1, "slot:gone")
    running = Allocation(grants=held, claims=(runs("a", 2, **mix), other))
    found = schedule(running, stack(pool("p", 4), **limits), NOW).claims
    assert {claim.job: claim.reserved for claim in found} == {"a": 2, "w": 1}
    assert dict(of_running(running, stack(pool("p", 4), **limits)).placed("a")) == {"p": 1}
    waiting = Allocation(claims=(waits("a", 2, **mix), other))
    found = schedule(waiting, stack(pool("p", 4), **limits), NOW).claims
    assert {claim.job: claim.reserved for claim in found} == {"a": 0, "w": 1}


def test_on_demand_jobs_stay_within_the_pools_limit_of_on_demand_machines() -> None:
    pools = (pool("p", 6, max_on_demand=4),)
    assert most(waits("w", 1, on_demand=True), pools=pools) == 4
    assert most(waits("w", 1, on_demand=True), runs("r", 3, on_demand=True), pools=pools) == 1
    assert most(waits("w", 1, on_demand=True), runs("r", 3), pools=pools) == 3


def test_on_demand_jobs_cost_their_own_price() -> None:
    dear = PoolState("p", "spot", "m", ("a",), 1, 8, 8, 10, "d", {"a": Price(on_demand=4.0, spot=1.0)})
    assert most(waits("w", 1, on_demand=True), pools=(dear,), max_usd_hour=9.0) == 2
    assert most(waits("w", 1), runs("r", 2, on_demand=True), pools=(dear,), max_usd_hour=9.0) == 1


@pytest.mark.parametrize(
    ("limits", "count"), [({"max_machines": 5}, 3), ({"max_usd_hour": 4.0}, 2), ({"max_machines": 3}, 1), ({}, 6)]
)
def test_a_teams_limits(limits: dict[str, Any], count: int) -> None:
    teams = [TeamState("t", **limits)]
    assert most(waits("w", 1, "t"), runs("r", 2, "t"), teams=teams) == count
    assert most(waits("w", 1), runs("r", 2, "t"), teams=teams) == 6


def test_a_teams_money_counts_the_cheapest_machines_that_a_job_could_get() -> None:
    """At the price of the dearest it would never start."""
    pools = pool("dear", 8, usd=5.0), pool("p", 2, usd=1.0), pool("q", 8, usd=2.0)
    teams = [TeamState("t", max_usd_hour=7.0)]
    assert most(waits("w", 1, "t"), pools=pools, teams=teams) == 4  # 1 + 1 + 2 + 2
    assert most(waits("w", 1, "t", pools=("dear",)), pools=pools, teams=teams) == 1
    assert most(waits("w", 1, "t", usd=2.0), pools=pools, teams=teams) == 3  # its zone has none for less
    assert most(waits("w", 1, "t"), runs("r", 1, "t", pools=("dear",)), pools=pools, teams=teams) == 2


def test_a_teams_machines_count_at_their_own_price() -> None:
    """A spot job may have on-demand machines, until it finds spot again."""
    on = stack(
        PoolState("p", "spot", "m", ("a",), 1, 8, 3, 10, "d", {"a": Price(on_demand=4.0, spot=1.0)}),
        teams=[TeamState("t", max_usd_hour=7.0)],
    )
    held = Grant("r", 0, 1, "slot:p/on-demand"), Grant("r", 1, 1, "slot:p")
    room = of_running(Allocation(grants=held, claims=(runs("r", 2, "t"),)), on)
    assert room.most(waits("w", 1, "t"), 0, 100) == 2
    assert room.most(waits("w", 1, on_demand=True), 0, 100) == 2  # of three
    assert room.free("r", 2) == (("p", 1), ("p/on-demand", 1))
    assert room.most(waits("w", 1, "t"), 0, 100) == 7


def test_what_a_teams_other_jobs_will_cost() -> None:
    on = stack(pool("p", 4, usd=3.0), pool("q", 4))
    own, other = (runs(job, 2, "t", pools=("p",)) for job in ("own", "other"))
    third = runs("third", 2, pools=("p",))
    allocation = Allocation(grants=grants(other)[:1], claims=(own, other, third))
    assert usd_elsewhere(allocation, on, "own", "t") == 3.0
    assert usd_elsewhere(allocation, on, "other", "t") == 6.0


def test_static_machines_count_in_a_teams_limit() -> None:
    pools = pool("p", 4), pool("s", static=4)
    teams = [TeamState("t", max_machines=5)]
    claim = waits("w", 1, "t")
    assert most(claim, runs("r", 3, "t", pools=("s",)), pools=pools, teams=teams) == 2


def test_the_size_of_a_stack() -> None:
    pools = pool("p", 4), pool("q", 4), pool("s", static=3)
    assert stack(*pools).size == 11
    assert stack(*pools, max_machines=6).size == 9
    assert stack(*pools, max_machines=20).size == 11


def test_freed_machines_are_the_last_placed_and_can_be_put_back() -> None:
    room = of_running(Allocation(claims=(runs("a", 6),)), stack(pool("p", 4), pool("q", 4)))
    copy = room.copy()
    freed = copy.free("a", 3)
    assert freed == (("q", 2), ("p", 1))
    assert dict(copy.placed("a")) == {"p": 3}
    copy.take(runs("a", 6), freed)
    assert dict(copy.placed("a")) == dict(room.placed("a")) == {"p": 4, "q": 2}
    assert copy.free("unknown", 3) == ()


def test_a_job_that_has_machines_and_no_claim_takes_room() -> None:
    allocation = Allocation(grants=grants(runs("r", 5)))
    assert of_running(allocation, stack()).most(waits("w", 1), 0, 100) == 3


def test_reservations_beyond_lowered_limits_leave_no_room() -> None:
    assert most(waits("w", 1), runs("r", 9)) == 0
    assert most(waits("w", 1), runs("r", 9, pools=("gone",))) == 8


def test_a_grant_counts_what_is_reserved_for_others_and_not_granted_yet() -> None:
    on = stack(pool("p", 4), pool("q", 4))
    own, other = runs("own", 2, pools=("p",)), runs("other", 3, pools=("p",))
    allocation = Allocation(grants=grants(other)[:1], claims=(own, other))
    assert reserved_elsewhere(allocation, on, "own") == {"p": 2}
    assert reserved_elsewhere(allocation, on, "other") == {"p": 2}
    whole = replace(allocation, grants=grants(other))
    assert reserved_elsewhere(whole, on, "own") == {}


def test_a_search_has_as_many_jobs_with_machines_as_its_parallel_allows() -> None:
    def trial(claim: Claim, parallel: int = 2) -> Claim:
        return replace(claim, sweep="lr", parallel=parallel)

    two = trial(runs("a", 1)), trial(runs("b", 1))
    assert most(trial(waits("w", 1)), two[0]) == 7, "it may have the rest of the pool"
    assert most(trial(waits("w", 1)), *two) == 0
    assert most(trial(waits("w", 1), 3), *two) == 6
    assert most(waits("w", 1), *two) == 6, "no limit of other jobs"
    assert most(replace(trial(waits("w", 1)), sweep="other"), *two) == 6
    assert most(two[0], *two) == 6, "a trial that has machines may grow"
    full = of_running(Allocation(claims=two[:1]), stack(pool()))
    assert full.limit(trial(waits("w", 1), 1), 1).startswith("search lr has 1 trial at work")
    room = of_running(Allocation(claims=two), stack(pool()))
    room.free("a", 1)
    assert room.fits(trial(waits("w", 1)), 1), "one has ended"
    assert not of_running(Allocation(claims=two), stack(pool())).copy().fits(trial(waits("w", 1)), 1)


def test_a_trial_whose_machines_are_being_deleted_counts_for_parallel_and_uses_no_room() -> None:
    def trial(claim: Claim) -> Claim:
        return replace(claim, sweep="lr", parallel=2)

    leaves = trial(Claim("gone", 0, 0, 0.0))
    waiting, trains = trial(waits("w", 1)), trial(runs("r", 1))

    def limit(*granted: Grant, claims: tuple[Claim, ...]) -> str:
        held = (*grants(trains), *granted)
        return of_running(Allocation(grants=held, claims=claims), stack(pool("p", 2))).limit(waiting, 1)

    vm, machine = Grant("gone", 0, 1, "slot:p"), Grant("gone", 0, 1, "machine:s-1")
    assert "search lr has 2 trials at work" in limit(vm, claims=(trains, leaves, waiting))
    assert not limit(claims=(trains, leaves, waiting)), "it waits at a rung"
    assert not limit(machine, claims=(trains, leaves, waiting)), "a static machine may never answer"
    back = replace(waiting, job="gone")
    room = of_running(Allocation(grants=(*grants(trains), vm), claims=(trains, back)), stack(pool("p", 2)))
    assert not room.limit(back, 1), "the same trial continues"
    room.place(back, 1)
    assert room.limit(waiting, 1) and not room.limit(replace(waiting, parallel=3), 1), "and counts once"
    room.free("gone", 1)
    assert room.limit(waiting, 1), "its old machine is there yet"
    room = of_running(Allocation(grants=(*grants(trains), vm), claims=(trains, leaves)), stack(pool("p", 2)))
    assert room.most(waits("other", 1), 0, 100) == 1


@pytest.mark.parametrize(
    ("age_s", "held", "limits", "waits"),
    [
        (900.0, 0, {"max_usd_hour": 2.0}, True),
        (900.0, 0, {"max_machines": 2}, True),
        (899.0, 0, {"max_machines": 2}, False),  # its machines may be about to leave others
        (900.0, 1, {"max_machines": 2}, False),  # it has machines
        (900.0, 0, {"max_machines": 4}, False),
    ],
)
def test_a_job_without_machines_waits_again_where_limits_were_lowered(
    age_s: float, held: int, limits: dict[str, Any], waits: bool
) -> None:
    """It has its turn to take machines of a lower class: with a reservation it would wait for their jobs' ends."""
    low = runs("low", 2, priority=0, reserved_at=NOW - 7200.0, started=NOW - 7000.0, stop=Stop.SAVED)
    high = runs("high", 2, priority=2, reserved_at=NOW - age_s, waited_s=60.0)
    had = (*grants(low), *(Grant("high", node, 1, "slot:p") for node in range(held)))
    after = schedule(Allocation(grants=had, claims=(low, high)), stack(pool("p", 4, usd=1.0), **limits), NOW)
    found = {claim.job: claim for claim in after.claims}
    assert (found["low"].whom == "high") is waits
    assert found["high"].reserved == 2
    assert (found["high"].reserved_at == NOW) is waits
    if waits:
        assert (found["high"].waited_s, found["high"].gap) == (60.0 + age_s, "")
