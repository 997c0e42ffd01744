"""From whom machines are taken, how many, and what protects a job."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from spotkeeper.contract.allocation import Allocation, Claim, Stop
from spotkeeper.contract.stack import TeamState
from spotkeeper.reconcile.decide.queue import order
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


def low(job: str, count: int, **more: Any) -> Claim:
    return runs(job, count, **{"priority": 0, **more})


def taken(victim: Claim, now: float = NOW) -> bool:
    """Whether an urgent job gets this job's machines."""
    return reserved(victim, waits("urgent", 8, priority=2), now=now)["urgent"] == 8


# -- protection: both sides of each bound


def test_nothing_is_taken_within_fifteen_minutes_of_a_start() -> None:
    assert not taken(low("v", 8, started=NOW - 15 * MIN_S + 1))
    assert taken(low("v", 8, started=NOW - 15 * MIN_S))


def test_nor_within_fifteen_minutes_of_its_last_growth() -> None:
    assert not taken(low("v", 8, reserved_at=NOW - 15 * MIN_S + 1))
    assert taken(low("v", 8, reserved_at=NOW - 15 * MIN_S))


@pytest.mark.parametrize("early", [{"stop": Stop.EARLY}, {"started": None}], ids=["no commit", "not started"])
def test_a_job_without_a_commit_is_protected_for_an_hour(early: dict[str, Any]) -> None:
    victim = low("v", 8, ago_s=HOUR_S - 1, **early)
    assert not taken(victim)
    assert taken(victim, now=NOW + 1)


def test_a_job_that_would_lose_work_is_never_taken_from() -> None:
    assert not taken(low("v", 8, stop=Stop.NEVER))


def test_a_job_that_is_about_to_end_is_left_alone() -> None:
    assert not taken(low("v", 8, ends=NOW + 10 * MIN_S - 1))
    assert taken(low("v", 8, ends=NOW + 10 * MIN_S))


def test_but_not_if_it_says_so_for_more_than_an_hour() -> None:
    """A script tells itself how many steps are left: it could keep its machines by always saying one."""
    assert not taken(low("v", 8, ends=NOW + 5, ending=NOW - HOUR_S + 1))
    assert taken(low("v", 8, ends=NOW + 5, ending=NOW - HOUR_S))


def test_nothing_is_taken_within_six_hours_of_a_jobs_last_step() -> None:
    assert not taken(low("v", 8, ago_s=DAY_S, stop=Stop.NEVER, ending=NOW - 6 * HOUR_S + 1))
    assert taken(low("v", 8, ago_s=DAY_S, stop=Stop.NEVER, ending=NOW - 6 * HOUR_S))


@pytest.mark.parametrize(
    ("recalls_s", "spared"),
    [
        ((HOUR_S - 2, HOUR_S - 1), True),
        ((HOUR_S - 1, HOUR_S), False),
        ((2, 3, 4, 5, 6, 24), False),
        ((2, 3, 4, 5, 6, 23), True),
        ((2, 3, 4, 5, 6), False),
    ],
)
def test_at_most_two_recalls_an_hour_and_six_a_day(recalls_s: tuple[float, ...], spared: bool) -> None:
    hours = HOUR_S if len(recalls_s) > 2 else 1.0
    recalls = tuple(sorted(NOW - ago * hours for ago in recalls_s))
    assert taken(low("v", 8, ago_s=DAY_S, recalls=recalls)) is not spared


def test_a_job_takes_no_machines_from_one_of_its_class_that_took_its_own() -> None:
    use = used(b=1000.0)
    victim, claim = runs("v", 8, "b"), waits("w", 8, "a", barred=("v",))
    assert reserved(victim, claim, use=use)["w"] == 0
    assert reserved(victim, replace(claim, barred=("other",)), use=use)["w"] == 8
    assert reserved(replace(victim, priority=0), claim, use=use)["w"] == 8  # of a lower class


@pytest.mark.parametrize(("gap", "priority", "barred"), [("", 1, ("w",)), ("w", 1, ("w",)), ("", 0, ())])
def test_a_recalled_job_remembers_who_of_its_class_took_its_machines(
    gap: str, priority: int, barred: tuple[str, ...]
) -> None:
    got = after(runs("v", 8, "b", gap=gap, priority=priority), waits("w", 8, "a"), use=used(b=1000.0))
    assert (got["v"].reserved, got["v"].barred, got["v"].whom, got["v"].waits) == (0, barred, "w", NOW)


def test_recalls_of_more_than_a_day_ago_are_forgotten() -> None:
    got = after(low("v", 8, recalls=(NOW - DAY_S, NOW - DAY_S + 1)), waits("w", 8, priority=2))
    assert got["v"].recalls == (NOW - DAY_S + 1, NOW)


# -- who may take machines from whom


def test_a_lower_class_gives_way_even_within_a_team_and_within_its_share() -> None:
    assert reserved(low("v", 8), waits("w", 8))["w"] == 8
    assert reserved(runs("v", 8), waits("w", 8))["w"] == 0
    assert reserved(runs("v", 8, priority=2), waits("w", 8))["w"] == 0


def test_a_team_at_its_own_limit_takes_machines_from_its_own_lower_class() -> None:
    """Else its urgent job would wait behind its own long one."""
    teams = [TeamState("t", max_machines=4)]
    claims = low("v", 4, team="t", cost_s=9.0), low("other", 4), waits("w", 4, "t", priority=2)
    assert reserved(*claims, on=stack(teams=teams)) == {"v": 0, "other": 4, "w": 4}


def test_a_team_beyond_its_entitlement_gives_way_to_one_that_has_used_less() -> None:
    victims = runs("v1", 4, "b"), runs("v2", 4, "b")
    claim = waits("w", 4, "a")
    assert reserved(*victims, claim) == {"v1": 0, "v2": 4, "w": 4}
    assert reserved(*victims, waits("w", 5, "a"))["w"] == 0  # v2 would leave b below its entitlement
    assert reserved(runs("v1", 4, "b"), runs("v2", 4, "a"), waits("w", 4, "a"))["w"] == 0  # b has just its entitlement


def test_a_job_that_cannot_shrink_enough_pauses() -> None:
    """What its team has beyond its entitlement is not used up by the shrinking that was tried first."""
    assert reserved(runs("v", 8, "b", min=4), waits("w", 5, "a")) == {"v": 0, "w": 5}


def test_a_job_takes_the_machines_in_its_gap_though_the_one_before_it_can_take_none() -> None:
    claims = runs("f", 4, gap="second"), waits("first", 4, ago_s=HOUR_S), waits("second", 4)
    assert reserved(*claims, on=stack(cap=4)) == {"f": 0, "first": 0, "second": 4}


def test_what_the_job_will_use_in_its_first_two_hours_counts_before_it_starts() -> None:
    """Of the two teams, the one that waits must be the one with less use also after it has started."""
    victim, claim = runs("v", 8, "b", ago_s=DAY_S), waits("w", 4, "a")
    spent_by_b = 8 * (1 - 0.5) * 24 / 0.6931471805599453  # 8 USD an hour for a day, halved every 24 h
    assert reserved(victim, claim, use=used(a=spent_by_b - 4 * 2 - 0.01))["w"] == 4
    assert reserved(victim, claim, use=used(a=spent_by_b - 4 * 2 + 0.01))["w"] == 0


def test_entitlements_fill_higher_classes_first() -> None:
    """Team b's high jobs entitle it to all eight machines, so its seven are not beyond its entitlement."""
    use = used(b=1000.0)
    running = runs("n", 8, "b")
    assert reserved(running, waits("w", 4, "a"), use=use)["w"] == 4
    high = replace(running, job="h", priority=2, waits=None)
    assert reserved(high, waits("w", 4, "a", priority=2), use=use)["w"] == 4
    assert reserved(high, waits("w", 4, "a"), use=use)["w"] == 0


def test_a_team_is_entitled_to_no_more_than_its_own_limit() -> None:
    """What team c may not use, b is entitled to: b's six machines are its own."""
    teams = [TeamState("a"), TeamState("b"), TeamState("c", max_machines=1)]
    claims = runs("b1", 3, "b"), runs("c1", 1, "c"), waits("c2", 8, "c", min=1), waits("w", 4, "a")
    assert reserved(*claims, runs("b2", 4, "b"), on=stack(teams=teams))["w"] == 4
    assert reserved(*claims, runs("x", 4, "a"), on=stack(teams=teams))["w"] == 0


# -- which and how many


def test_elastic_jobs_shrink_before_others_pause_and_only_as_far_as_needed() -> None:
    claims = low("elastic", 6, min=2, cost_s=9.0), low("fixed", 2, cost_s=1.0)
    got = after(*claims, waits("w", 3, priority=2))
    assert {job: claim.reserved for job, claim in got.items()} == {"elastic": 3, "fixed": 2, "w": 3}
    assert got["elastic"].waits is None
    assert got["elastic"].recalls == (NOW,)
    assert reserved(*claims, waits("w", 5, priority=2)) == {"elastic": 3, "fixed": 0, "w": 5}
    assert reserved(*claims, waits("w", 8, priority=2)) == {"elastic": 0, "fixed": 0, "w": 8}


def test_the_lowest_class_comes_first_then_the_gap_then_teams_beyond_their_share() -> None:
    def victim(*claims: Claim, **more: Any) -> set[str]:
        got = reserved(*claims, waits("w", 4, "a", priority=2), **more)
        return {job for job, count in got.items() if not count}

    low_, normal = low("low", 4, cost_s=9.0), runs("normal", 4)
    assert victim(low_, normal) == {"low"}
    assert victim(low_, replace(normal, gap="w")) == {"low"}
    assert victim(low_, low("filler", 4, gap="w", cost_s=99.0)) == {"filler"}
    over = runs("x", 4, "b", cost_s=9.0), runs("y", 8, "b", cost_s=9.0)
    assert victim(*over, runs("z", 4, "c", cost_s=1.0), on=stack(cap=16)) == {"x"}  # c is within its entitlement


def test_the_cheapest_loss_first_and_each_recall_of_the_day_makes_it_dearer() -> None:
    cheap, dear = low("cheap", 4, cost_s=10.0), low("dear", 4, cost_s=15.0)
    claim = waits("w", 4, priority=2)
    assert reserved(cheap, dear, claim) == {"cheap": 0, "dear": 4, "w": 4}
    again = replace(cheap, recalls=(NOW - 2 * HOUR_S,))
    assert reserved(again, dear, claim) == {"cheap": 4, "dear": 0, "w": 4}
    assert reserved(replace(cheap, recalls=(NOW - DAY_S,)), dear, claim)["cheap"] == 0


def test_no_machine_is_taken_in_vain() -> None:
    assert reserved(low("v", 4), runs("r", 4, stop=Stop.NEVER), waits("w", 8, priority=2))["v"] == 4


def test_victims_that_turn_out_to_be_needless_keep_their_machines() -> None:
    """The cheap ones are picked first, then one that suffices alone."""
    victims = low("one", 1, cost_s=1.0), low("two", 2, cost_s=2.0), low("five", 5, cost_s=3.0)
    assert reserved(*victims, waits("w", 5, priority=2)) == {"one": 1, "two": 2, "five": 0, "w": 5}


def test_free_machines_are_used_before_others_are_taken() -> None:
    assert reserved(low("v1", 2, cost_s=2.0), low("v2", 2, cost_s=1.0), waits("w", 6, priority=2)) == {
        "v1": 2,
        "v2": 0,
        "w": 6,
    }


def test_machines_in_pools_that_the_claim_cannot_use_are_left_alone() -> None:
    pools = pool("p", 4), pool("q", 4)
    victims = low("p1", 4, pools=("p",), cost_s=1.0), low("q1", 4, pools=("q",), cost_s=9.0)
    assert reserved(*victims, waits("w", 4, priority=2, pools=("q",)), on=stack(*pools)) == {"p1": 4, "q1": 0, "w": 4}


def test_a_job_that_gave_up_machines_gets_others_only_once_these_are_gone() -> None:
    """It notices only that it has no reservation; with one, it would keep its machines where others need them."""
    on = stack(pool("p", 4), pool("q", 4))
    normal, urgent = runs("normal", 4, pools=("p", "q")), waits("w", 4, priority=2, pools=("p",))
    now = Allocation(grants=grants(normal), claims=(normal, urgent))
    recalled = schedule(now, on, NOW)
    assert [claim.reserved for claim in recalled.claims] == [0, 4]
    assert order.why(recalled, on, recalled.claims[0], NOW) == "it saves, and gives its machines back first"
    gone = replace(recalled, grants=())
    assert [claim.reserved for claim in schedule(gone, on, NOW).claims] == [4, 4]


def test_a_job_that_shrank_grows_only_once_its_machines_are_gone() -> None:
    shrunk = runs("e", 2, min=1, max=6, whom="w")
    late = Allocation(grants=grants(replace(shrunk, reserved=3)), claims=(shrunk,))
    assert schedule(late, stack(), NOW) is late
    assert schedule(replace(late, grants=grants(shrunk)), stack(), NOW).claims[0].reserved == 6


def test_shares_decide_between_teams_of_one_class() -> None:
    teams = shares(a=3, b=1)
    victims = runs("b1", 2, "b", cost_s=2.0), runs("b2", 2, "b", cost_s=1.0), runs("b3", 4, "b")
    assert reserved(*victims, waits("w", 6, "a"), on=stack(teams=teams)) == {"b1": 2, "b2": 0, "b3": 0, "w": 6}
    assert reserved(*victims, waits("w", 6, "a"))["w"] == 0
