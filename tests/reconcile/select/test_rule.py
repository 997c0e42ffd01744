"""The rule, by what it does on small markets and what it comes to on the shipped one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.market._cases import draw, optimum
from bench.market._rules import Tuned
from spotkeeper.reconcile.select.player import Player
from spotkeeper.reconcile.select.rule import RULE, Go, JobState, Plan, Rule, SpotZone, plan
from spotkeeper.reconcile.select.zone_history import SHAPE, Track, expected
from spotkeeper.replay.model import play
from spotkeeper.replay.recording import SHIPPED, read

JOB = JobState(
    now_h=0.0, left_h=40.0, slack_h=20.0, planned_h=18.0, restart_h=0.2, move_h=0.05, attempt_h=0.01,
    tick_h=0.1,
)  # fmt: skip


def seen(*looks: tuple[float, bool]) -> Track:
    track = Track(SHAPE)
    for at_h, up in looks:
        track.see(at_h, up)
    return track


def steady(hours: int = 10) -> Track:
    return seen(*((-float(h), True) for h in range(hours, 0, -1)))


def zone(name: str = "a", price: float = 0.3, track: Track | None = None, **more: float) -> SpotZone:
    return SpotZone(name, price, track or steady(), **more)


def says(job: JobState, *zones: SpotZone, rule: Rule = RULE) -> list[str]:
    return [
        step.go.value + (f":{step.zone}" if step.go is Go.SPOT else "") for step in asked(job, *zones, rule=rule).steps
    ]


def asked(job: JobState, *zones: SpotZone, rule: Rule = RULE) -> Plan:
    return plan(job, zones, rule)


# -- lives


def test_expected_life_grows_with_age_and_falls_with_hazard() -> None:
    young, old = (expected(SHAPE, age, 1.0, 0.2, 40.0) for age in (0.1, 8.0))
    assert old.hours > 3 * young.hours
    assert expected(SHAPE, 8.0, 4.0, 0.2, 40.0).hours < old.hours / 2
    assert young.work_h < young.hours - 0.1


def test_no_life_is_longer_than_the_work_that_is_left() -> None:
    life = expected(SHAPE, 30.0, 1e-9, 0.2, 3.0)
    assert life.hours == pytest.approx(3.2)
    assert life.work_h == pytest.approx(3.0)


def test_losses_count_only_while_a_machine_ran() -> None:
    track = seen((0.0, True), (1.0, True), (2.0, False), (3.0, False), (4.0, True))
    assert (track.losses, track.up, track.since_h) == (1, True, 3.5)
    far = seen((0.0, True), (9.0, False))
    assert far.losses == 0  # nobody knows how often it fell in between
    far.see(9.0, True)  # a clock that stands, or jumps back
    far.see(3.0, True)
    assert far.up is False


# -- the course


def test_spot_first_and_waiting_while_there_is_time() -> None:
    told = asked(JOB, zone())
    assert says(JOB, zone()) == ["spot:a"]
    assert told.patience_h == pytest.approx(20.0 - 0.1 - 0.14 * 40 - 0.22 * 18)


def test_on_demand_follows_where_slack_runs_short() -> None:
    assert says(replace(JOB, slack_h=5.0), zone()) == ["spot:a", "on-demand"]


def test_at_the_last_moment_only_on_demand_is_proposed() -> None:
    told = asked(replace(JOB, slack_h=0.4), zone())
    assert [step.go for step in told.steps] == [Go.ON_DEMAND]
    assert "deadline" in told.why


def test_a_zone_with_a_short_expected_life_is_no_offer() -> None:
    flaps = seen(*((-20 + n / 2, n % 2 == 0) for n in range(40)))
    assert says(replace(JOB, restart_h=0.5), zone("a", 0.5, flaps)) == []
    assert says(replace(JOB, restart_h=0.02), zone("a", 0.5, flaps)) == ["spot:a"]


def test_the_steadier_zone_goes_first_and_price_decides_between_equals() -> None:
    fresh = seen((-0.2, False), (-0.1, True))
    assert says(JOB, zone("a", 0.3, fresh), zone("b", 0.32)) == ["spot:b", "spot:a"]
    assert says(JOB, zone("a", 0.32), zone("b", 0.3)) == ["spot:b", "spot:a"]


def test_leaving_on_demand_must_pay_for_the_return() -> None:
    runs = replace(JOB, running=Go.ON_DEMAND, restart_h=0.33)
    fresh = seen((-2.2, True), (-2.1, False), (-0.2, True), (-0.15, False), (-0.1, True))
    assert says(runs, zone("a", 0.3, fresh)) == ["keep"]
    assert says(runs, zone()) == ["spot:a", "keep"]
    assert says(replace(runs, slack_h=1.0), zone()) == ["keep"]  # no time for it


def test_on_demand_probes_zones_that_were_not_tried_lately() -> None:
    runs = replace(JOB, running=Go.ON_DEMAND, slack_h=1.5)
    assert asked(runs, zone(), zone("b", track=seen((-0.2, False)))).probe == ("a",)


def test_an_expensive_zone_is_left_for_a_cheap_lasting_one() -> None:
    runs = replace(JOB, running=Go.SPOT, zone="dear")
    assert says(runs, zone("dear", 0.85), zone("a", 0.2)) == ["spot:a", "keep"]
    assert says(runs, zone("dear", 0.32), zone("a", 0.3)) == ["keep"]
    assert says(replace(runs, slack_h=1.0), zone("dear", 0.85), zone("a", 0.2)) == ["keep"]


def test_too_expensive_spot_is_given_up() -> None:
    """Its loss is bounded: a share of the work, a restart, and the start that goes beyond it."""
    lost = replace(JOB, done_h=8.0, excess_h=RULE.hope * 48.0 + 0.21)
    assert says(lost, zone()) == ["on-demand"]
    assert says(replace(lost, running=Go.ON_DEMAND), zone()) == ["keep"]
    assert says(replace(lost, running=Go.SPOT, zone="a"), zone("a", 0.85), zone("b", 0.1)) == ["keep"]
    assert says(replace(lost, excess_h=RULE.hope * 48.0), zone()) == ["spot:a"]


def test_without_zones_the_plan_is_on_demand_in_time() -> None:
    assert says(replace(JOB, running=Go.SPOT, zone="gone"), zone()) == ["keep"]
    assert says(JOB) == []
    assert says(replace(JOB, slack_h=3.0)) == ["on-demand"]


def test_rare_spot_is_not_waited_for_if_waiting_costs() -> None:
    soft = replace(JOB, delay_price=0.1, slack_h=90.0)
    rare = seen(*((-float(h), h == 24) for h in range(48, 0, -1)))
    assert says(soft, zone("a", 0.3, rare))[-1:] == ["on-demand"]
    assert says(soft, zone())[-1:] == ["spot:a"]


# -- the shipped market


def test_on_the_shipped_market_no_deadline_is_missed_and_the_tuned_lines_are_beaten() -> None:
    """A slice of what ``bench/market/policy.py`` measures."""
    drawn = list(draw(read(SHIPPED / "gcp-2025-10-h100.json"), 6))
    best = sum(optimum(case) for case in drawn)
    whole = sum(case.on_demand_only for case in drawn)
    ours, tuned = ([play(case, policy) for case in drawn] for policy in (Player(), Tuned(all_zones=True)))
    assert not any(out.missed for out in ours)
    way, theirs = ((whole - sum(out.cost for out in outs)) / (whole - best) for outs in (ours, tuned))
    assert way > theirs + 0.05
    assert way > 0.7


def test_cases_are_drawn_the_same_every_time() -> None:
    market = read(SHIPPED / "gcp-2025-10-h100.json")
    first, again = ([(c.name, c.begins, c.home, c.terms) for c in draw(market, 3)] for _ in range(2))
    assert first == again
    assert [(c.name, c.begins, c.home, c.terms) for c in draw(market, 3, "other")] != first


@pytest.mark.parametrize(
    ("there", "better", "left"),
    [
        (0.5, -9.0, False),  # cheaper by exactly what is asked for: not by more
        (0.4375, -9.0, True),
        (0.4375, 9.0, False),  # but not worth so much more an hour
    ],
)
def test_a_zone_is_left_only_for_one_that_is_cheaper_by_more_and_worth_more(
    there: float, better: float, left: bool
) -> None:
    rule = Rule(cheaper_by=0.25, better=better)
    job = replace(JOB, running=Go.SPOT, zone="a")
    zones = (zone("a", 0.75), zone("b", there), zone("c", 0.25))
    assert ("spot:b" in says(job, *zones, rule=rule)) is left
    why = "a cheaper zone is worth the move" if better < 0 else "spot runs"  # the third zone is the cheapest
    assert asked(job, *zones, rule=rule).why == why


def test_spot_above_on_demand_is_left_and_the_reason_names_its_price() -> None:
    found = asked(replace(JOB, running=Go.SPOT, zone="a"), zone("a", 1.25))
    assert [(step.go, step.why) for step in found.steps] == [(Go.ON_DEMAND, "spot costs 125 % of on-demand")]
    assert found.why == "spot costs 125 % of on-demand"
