"""Who is served first, in front of whom jobs run, and what never starts."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from msgspec.structs import replace

from spotkeeper.contract.allocation import Allocation, Claim, Stop
from spotkeeper.contract.stack import TeamState
from spotkeeper.reconcile.decide.queue import order
from spotkeeper.reconcile.decide.queue.order import rank
from spotkeeper.reconcile.decide.queue.scheduler import schedule
from tests.reconcile.decide.queue.situation import (
    DAY_S,
    HOUR_S,
    MIN_S,
    NOW,
    after,
    grants,
    pool,
    reserved,
    runs,
    shares,
    stack,
    used,
    waits,
)


def first(*claims: Claim, **more: object) -> str:
    """Return which job is served when the stack has room for only one."""
    got = [job for job, count in reserved(*claims, **more).items() if count]  # type: ignore[arg-type]
    assert len(got) == 1
    return got[0]


def test_nothing_changes_without_a_reason() -> None:
    allocation = Allocation(claims=(runs("a", 8), waits("b", 8)))
    assert schedule(allocation, stack(), NOW) is allocation


# -- the order


@pytest.mark.parametrize(("low", "high"), [(0, 1), (1, 2), (0, 2)])
def test_the_higher_priority_comes_first(low: int, high: int) -> None:
    assert first(waits("a", 8, ago_s=HOUR_S, priority=low), waits("b", 8, priority=high)) == "b"


def test_the_team_with_less_use_against_its_share_comes_first() -> None:
    claims = waits("a", 8, "a", ago_s=HOUR_S), waits("b", 8, "b")
    assert first(*claims, use=used(a=10.0, b=9.0)) == "b"
    assert first(*claims, use=used(a=10.0, b=9.0), on=stack(teams=shares(a=2, b=1))) == "a"


def test_then_the_older_job_then_its_name() -> None:
    assert first(waits("a", 8), waits("b", 8, ago_s=HOUR_S)) == "b"
    assert first(waits("b", 8), waits("a", 8)) == "a"


def test_a_team_is_charged_for_what_it_just_got() -> None:
    """Else one team would get all machines that become free at the same moment."""
    claims = [waits(f"a{number}", 2, "a") for number in range(4)] + [waits(f"b{number}", 2, "b") for number in range(4)]
    got = reserved(*claims, use=used(a=1.0))
    assert sum(got[f"a{number}"] for number in range(4)) == sum(got[f"b{number}"] for number in range(4)) == 4


def test_the_order_that_is_shown_charges_each_job_before_the_next() -> None:
    claims = [waits(f"{team}{number}", 8, team) for team in "ab" for number in range(3)]
    shown = order.reasons(Allocation(claims=(runs("r", 8, "c"), *claims)), stack(), NOW)
    assert [job[0] for job in shown] == list("ababab")


@pytest.mark.parametrize(
    ("priority", "waited_s", "class_"),
    [
        (0, DAY_S - 1, 0),
        (0, DAY_S, 1),
        (0, 2 * DAY_S, 2),
        (0, 9 * DAY_S, 2),
        (1, DAY_S - 1, 1),
        (1, DAY_S, 2),
        (2, DAY_S, 2),
    ],
)
def test_a_day_of_waiting_raises_the_class_to_high_at_most(priority: int, waited_s: float, class_: int) -> None:
    assert rank(waits("a", 1, ago_s=waited_s, priority=priority), NOW) == class_


def test_a_wait_that_began_at_time_zero_counts() -> None:
    assert rank(Claim("a", 1, 1, since=0.0, waits=0.0), DAY_S) == 2


def test_a_job_keeps_the_class_that_it_reached_for_two_hours() -> None:
    claim = runs("a", 1, ago_s=2 * HOUR_S - 1, waited_s=DAY_S)
    assert rank(claim, NOW) == 2
    assert rank(claim, NOW + 1) == 1


def test_a_high_job_may_take_its_machines_only_after_these_two_hours() -> None:
    old, new = runs("old", 8, ago_s=2 * HOUR_S - 1, waited_s=DAY_S), waits("new", 8, priority=2)
    assert reserved(old, new) == {"old": 8, "new": 0}
    assert reserved(old, new, now=NOW + 1) == {"old": 0, "new": 8}


# -- gangs and elastic jobs


def test_a_gang_starts_whole_or_not_at_all() -> None:
    assert reserved(runs("a", 5), waits("b", 4)) == {"a": 5, "b": 0}
    assert reserved(runs("a", 5), waits("b", 3)) == {"a": 5, "b": 3}


def test_an_elastic_job_gets_what_is_there_up_to_its_most() -> None:
    assert reserved(runs("a", 5), waits("b", 2, max=6)) == {"a": 5, "b": 3}
    assert reserved(waits("b", 2, max=6)) == {"b": 6}


def test_elastic_jobs_grow_while_no_job_waits_for_machines() -> None:
    small = runs("a", 2, max=6)
    assert reserved(small) == {"a": 6}
    assert reserved(small, waits("b", 7)) == {"a": 2, "b": 0}
    limited = stack(teams=[TeamState("t", max_machines=1)])
    assert reserved(small, waits("b", 2, "t"), on=limited) == {"a": 6, "b": 0}  # it waits for its own team


def test_a_job_that_shrank_grows_again_after_fifteen_minutes() -> None:
    assert reserved(runs("a", 2, max=6, recalls=(NOW - 15 * MIN_S + 1,))) == {"a": 2}
    assert reserved(runs("a", 2, max=6, recalls=(NOW - 15 * MIN_S,))) == {"a": 6}


def test_the_highest_class_grows_first() -> None:
    assert reserved(runs("a", 2, max=4), runs("b", 2, max=8, priority=2)) == {"a": 2, "b": 6}


# -- the gap in front of a gang that waits


def test_a_small_job_runs_in_the_gap_and_says_in_whose() -> None:
    got = after(runs("r", 4, stop=Stop.NEVER), waits("big", 8, ago_s=HOUR_S), waits("small", 2))
    assert (got["big"].reserved, got["small"].reserved, got["small"].gap) == (0, 2, "big")


@pytest.mark.parametrize(
    "never",
    [
        {"stop": Stop.NEVER},
        {"recalls": (NOW - 60, NOW - 30)},
        {"recalls": tuple(NOW - HOUR_S * n for n in range(6, 0, -1))},
    ],
    ids=["would lose work", "recalled twice within the hour", "recalled six times within the day"],
)
def test_a_job_that_could_not_give_it_back_does_not_start_in_the_gap(never: dict[str, object]) -> None:
    running = runs("r", 4, stop=Stop.NEVER)
    assert reserved(running, waits("big", 8, ago_s=HOUR_S), waits("small", 2, **never))["small"] == 0
    assert reserved(running, waits("small", 2, **never))["small"] == 2


def test_the_head_takes_its_gap_back_as_soon_as_it_fits_with_it() -> None:
    filler = runs("small", 4, gap="big")
    got = after(filler, waits("big", 8, ago_s=HOUR_S))
    assert (got["small"].reserved, got["big"].reserved) == (0, 8)
    assert got["small"].whom == "big"
    assert reserved(replace(filler, gap="other"), waits("big", 8, ago_s=HOUR_S))["big"] == 0


def test_the_head_takes_no_gap_back_from_a_job_of_a_higher_class() -> None:
    assert reserved(runs("small", 4, gap="big", priority=2), waits("big", 8))["big"] == 0


def test_the_gap_is_gone_once_the_head_has_its_machines() -> None:
    """Else the head could take the room back again later, without being entitled to it."""
    got = after(runs("small", 4, gap="big"), waits("big", 4))
    assert (got["big"].reserved, got["small"].gap) == (4, "")


def test_no_job_starts_in_a_gap_if_the_head_would_wait_longer_for_it() -> None:
    """Small jobs that come one after the other, each protected at first, would keep the head waiting for ever."""
    young = runs("r", 4, "other", ago_s=10 * MIN_S, priority=0)  # protected, for five minutes more
    claims = young, waits("big", 8, ago_s=HOUR_S), waits("small", 2)
    assert reserved(*claims) == {"r": 4, "big": 0, "small": 0}
    assert reserved(*claims, now=NOW + 5 * MIN_S) == {"r": 0, "big": 8, "small": 0}
    assert reserved(*claims, on=stack(cap=10)) == {"r": 4, "big": 0, "small": 2}  # both fit side by side


def test_nor_takes_a_job_machines_that_the_head_will_need() -> None:
    young, old = runs("young", 4, ago_s=10 * MIN_S, priority=0), runs("old", 4, priority=0)
    claims = young, old, waits("big", 8, ago_s=HOUR_S), waits("small", 4)
    assert reserved(*claims) == {"young": 4, "old": 4, "big": 0, "small": 0}


def test_no_job_starts_in_a_gap_that_the_end_of_a_job_will_complete_soon() -> None:
    claims = waits("big", 8, ago_s=HOUR_S), waits("small", 2)
    ends = runs("r", 4, ends=NOW + 9 * MIN_S)
    assert reserved(ends, *claims)["small"] == 0
    assert reserved(replace(ends, ends=NOW + 11 * MIN_S, stop=Stop.NEVER), *claims)["small"] == 2
    assert reserved(replace(ends, ends=NOW - 1, stop=Stop.NEVER), *claims)["small"] == 2  # its end is overdue: unknown


def test_a_head_in_another_pool_is_in_nobodys_way() -> None:
    pools = pool("p", 4), pool("q", 4)
    claims = runs("r", 4, pools=("p",), stop=Stop.NEVER), waits("big", 4, ago_s=HOUR_S, pools=("p",))
    other = waits("other", 4, pools=("q",), stop=Stop.NEVER)
    got = after(*claims, other, on=stack(*pools))
    assert (got["other"].reserved, got["other"].gap) == (4, "")
    limited = stack(*pools, max_machines=6)  # of both pools, so the head is in its way
    assert reserved(*claims, replace(other, min=2, max=2), on=limited)["other"] == 0


# -- what never starts

FEWER = "submit it with fewer, or raise this limit in the stack file"


def test_a_job_that_fits_nowhere_stops_no_other() -> None:
    assert reserved(waits("big", 9, ago_s=HOUR_S), waits("small", 8, stop=Stop.NEVER)) == {"big": 0, "small": 8}


def test_a_team_beyond_its_own_limit_stops_no_other() -> None:
    teams = [TeamState("t", max_machines=4)]
    claims = runs("r", 4, "t"), waits("big", 4, "t", ago_s=HOUR_S), waits("small", 4, stop=Stop.NEVER)
    assert reserved(*claims, on=stack(teams=teams)) == {"r": 4, "big": 0, "small": 4}


@pytest.mark.parametrize(
    ("claim", "why"),
    [
        (waits("w", 4, "t"), "team t is at its max_machines of 6"),
        (waits("w", 9), f"the job wants 9 machines, and its pools (p) have 8 in all (`size`): {FEWER}"),
        (waits("w", 7, "t"), "team t is at its max_machines of 6"),
        (
            waits("w", 5, stop=Stop.NEVER),
            "team default has its share, and a job that would lose work cannot borrow from other teams",
        ),
        (waits("w", 1, "u"), "team u is at its max_usd_per_hour of $1"),
        (waits("w", 1, "m"), "team m has spent its max_usd_per_month of $5, so it waits until 2027-02-01 (UTC)"),
        (waits("w", 2, "default"), ""),
    ],
)
def test_why_a_job_waits(claim: Claim, why: str) -> None:
    teams = TeamState("t", max_machines=6), TeamState("u", max_usd_hour=1.0), TeamState("m", max_usd_month=5.0)
    running = runs("r", 3, "t"), runs("s", 1, "u"), runs("x", 1, "m")
    allocation = Allocation(grants=grants(*running), claims=(*running, claim))
    assert order.why(allocation, stack(teams=teams), claim, NOW) == why
    assert order.reasons(allocation, stack(teams=teams), NOW) == {"w": why}


@pytest.mark.parametrize(
    ("claim", "over", "why"),
    [
        (waits("w", 6), {"max_machines": 4}, "6 machines, and the stack may have 4 (`limits.machines`)"),
        (waits("w", 6), {"max_usd_hour": 1.5}, "6 machines, and the stack may spend $1.5 an hour (`limits.usd_per_h"),
        (waits("w", 10, mix=(("p", 9), ("q", 1))), {}, "9 machines of pool p, and its `size` is 8: "),
        (waits("w", 9, pools=("q",)), {}, "9 machines, and its pools (q) have 2 in all (`size`): "),
        (waits("w", 6, on_demand=True), {}, "6 machines, and its pools (p, q) may have 5 on demand (`max_on_demand`)"),
    ],
)
def test_a_job_that_can_never_start_is_told_the_limit_its_value_and_what_to_change(
    claim: Claim, over: dict[str, float], why: str
) -> None:
    pools = pool("p", 8, max_on_demand=3), pool("q", 2, max_on_demand=2)
    told = order.why(Allocation(claims=(claim,)), stack(*pools, **over), claim, NOW)
    assert told.startswith(f"the job wants {why}") and told.endswith(FEWER)


def test_a_job_that_would_lose_work_never_borrows() -> None:
    """Not even while its team is the only one with jobs: it could not give the machines back when another comes."""
    teams = shares(a=1, b=1)
    assert reserved(waits("w", 5, "a", stop=Stop.NEVER), on=stack(teams=teams))["w"] == 0
    assert reserved(waits("w", 4, "a", stop=Stop.NEVER), on=stack(teams=teams))["w"] == 4
    assert reserved(waits("w", 5, "a"), on=stack(teams=teams))["w"] == 5
    both = runs("r", 2, "a", stop=Stop.NEVER), waits("w", 3, "a", stop=Stop.NEVER)
    assert reserved(*both, on=stack(teams=teams))["w"] == 0
    assert reserved(waits("w", 8, stop=Stop.NEVER))["w"] == 8  # a stack without teams has nobody to borrow from


def test_the_nominal_share_counts_a_team_that_the_stack_file_does_not_name() -> None:
    assert stack(teams=shares(a=3)).nominal("a") == 8
    assert stack(teams=shares(a=3)).nominal("default") == 2


def test_a_team_that_has_spent_its_month_pauses_and_starts_nothing() -> None:
    teams = [TeamState("t", max_usd_month=24.0)]
    claims = runs("r", 4, "t", ago_s=6 * HOUR_S - 1), waits("w", 1, "t")
    assert reserved(*claims, on=stack(teams=teams)) == {"r": 4, "w": 1}
    got = after(*claims, on=stack(teams=teams), now=NOW + 1)
    assert [claim.reserved for claim in got.values()] == [0, 0]
    assert got["r"].waits == NOW + 1


def test_the_machines_of_such_a_team_go_to_others() -> None:
    teams = [TeamState("t", max_usd_month=1.0)]
    assert reserved(runs("r", 8, "t"), waits("w", 8), on=stack(teams=teams)) == {"r": 0, "w": 8}


# -- a reservation that finds no machine


def test_a_reservation_without_machines_goes_to_the_next_job_after_fifteen_minutes() -> None:
    dry = runs(
        "dry", 8, started=None, stop=Stop.EARLY, dry_since=NOW - 15 * MIN_S + 1, ago_s=HOUR_S / 2, waited_s=HOUR_S
    )
    assert reserved(dry, waits("w", 8)) == {"dry": 8, "w": 0}
    got = after(dry, waits("w", 8), now=NOW + 1)
    assert (got["dry"].reserved, got["w"].reserved) == (0, 8)
    assert (got["dry"].lapsed, got["dry"].recalls, got["dry"].barred) == (NOW + 1, (), ())
    assert got["dry"].waits == dry.reserved_at - dry.waited_s  # it has waited all that time


def test_it_lapses_only_for_a_job_that_fits_then() -> None:
    dry = runs("dry", 4, started=None, stop=Stop.EARLY, dry_since=NOW - HOUR_S, ago_s=HOUR_S)
    assert reserved(dry)["dry"] == 4
    assert reserved(dry, waits("w", 4)) == {"dry": 4, "w": 4}
    assert reserved(runs("r", 4, stop=Stop.NEVER), dry, waits("w", 8))["dry"] == 4


def test_the_fifteen_minutes_begin_with_the_reservation() -> None:
    dry = runs("dry", 8, started=None, stop=Stop.EARLY, dry_since=NOW - DAY_S, ago_s=15 * MIN_S - 1)
    assert reserved(dry, waits("w", 8))["w"] == 0
    assert reserved(dry, waits("w", 8), now=NOW + 1)["w"] == 8


def test_a_job_that_trained_before_the_market_took_its_machines_lapses_too() -> None:
    assert reserved(runs("dry", 8, dry_since=NOW - HOUR_S, stop=Stop.NEVER), waits("w", 8))["w"] == 8


def test_for_fifteen_minutes_it_comes_after_all_others() -> None:
    lapsed = waits("lapsed", 8, ago_s=HOUR_S, priority=2, lapsed=NOW - 15 * MIN_S + 1)
    assert first(lapsed, waits("w", 8, priority=0)) == "w"
    assert first(lapsed, waits("w", 8, priority=0), now=NOW + 1) == "lapsed"


def test_the_worked_example() -> None:
    """Cap 8, shares A:B:C 2:1:1: B borrows all, gives half to A and a quarter to C, and keeps its own quarter."""
    teams = shares(a=2, b=1, c=1)
    claims = [runs("b1", 4, "b", min=2, cost_s=1.0), runs("b2", 4, "b")]
    got = after(*claims, waits("a1", 4, "a"), on=stack(teams=teams))
    # b1 could only give two: b2 pauses for A, and b1 keeps what it has.
    assert {job: claim.reserved for job, claim in got.items()} == {"b1": 4, "b2": 0, "a1": 4}
    got = after(*got.values(), waits("c1", 2, "c"), on=stack(teams=teams), now=NOW + MIN_S)
    assert {job: claim.reserved for job, claim in got.items()} == {"b1": 2, "b2": 0, "a1": 4, "c1": 2}
    assert {job: claim.whom for job, claim in got.items()} == {"b1": "c1", "b2": "a1", "a1": "", "c1": ""}
    later = after(*got.values(), on=stack(teams=teams), now=NOW + HOUR_S)  # and b2 waits for an end
    assert {job: claim.reserved for job, claim in later.items()} == {"b1": 2, "b2": 0, "a1": 4, "c1": 2}


def trained(claims: Iterable[Claim]) -> list[Claim]:
    """Return the claims after their rounds: who has machines trains, and has saved."""
    return [
        replace(one, started=one.started or one.reserved_at, stop=Stop.SAVED) if one.reserved else one for one in claims
    ]


def test_many_small_jobs_cannot_starve_a_gang() -> None:
    """Every ten minutes a small job of half an hour comes; the gang is served within its protections."""
    claims = [runs("old", 6, "s", ago_s=HOUR_S), waits("gang", 8, "g", since=NOW, waits=NOW)]
    for minute in range(60):
        now = NOW + minute * MIN_S
        claims = [one for one in claims if one.job == "gang" or not one.reserved or now < one.reserved_at + HOUR_S / 2]
        if minute % 10 == 0:
            claims.append(Claim(f"s{minute:03}", 2, 2, since=now - DAY_S / 2, team="s", waits=now))
        got = schedule(Allocation(claims=tuple(claims), use=used(g=1.0)), stack(), now)
        claims = trained(got.claims)
        if any(one.job == "gang" and one.reserved for one in claims):
            return
    raise AssertionError("the gang starves")


def test_two_jobs_never_take_turns() -> None:
    """Two teams with one large job each: each becomes the one with less use, again and again."""
    claims = [runs("a", 8, "a", ago_s=HOUR_S), waits("b", 8, "b", since=NOW, waits=NOW)]
    holders = ["a"]
    for minute in range(0, 23 * 60, 15):
        now = NOW + minute * MIN_S
        claims = trained(after(*claims, now=now).values())
        holders += [claim.job for claim in claims if claim.reserved and claim.job != holders[-1]]
    assert holders == ["a", "b"]
