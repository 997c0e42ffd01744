"""Deadlines, patience and prices through the shipped rounds: what is bought when, and what is said of it."""

from __future__ import annotations

import math
import time
from dataclasses import replace as with_

import pytest
from msgspec.structs import replace

from spotkeeper.contract.cloud import InsertVm, ResultKind
from spotkeeper.contract.generation import Progress
from spotkeeper.contract.job import JobSpec
from spotkeeper.contract.ledger import Event
from spotkeeper.contract.market import Guess, Watch
from spotkeeper.contract.stack import Model, Price
from spotkeeper.reconcile.select.offers import MoveCost, Need, Runs, select, time_of_day
from spotkeeper.reconcile.select.rule import RULE, Work
from spotkeeper.reconcile.store.documents import OfferHistory
from tests.reconcile.world import ZONES, World, stack

NOW_H = 500.0
NOW = NOW_H * 3600.0
SPOT, ON_DEMAND = Model.SPOT, Model.ON_DEMAND
DEMAND = Runs(ON_DEMAND, "pool/z-a/on-demand")


def submitted(**spec: object) -> World:
    """A job on a market without spot."""
    world = World(nodes=1, **spec)  # type: ignore[arg-type]
    for zone in ZONES:
        world.capacity[zone, SPOT] = 0
    world.submit()
    return world


def models(world: World) -> list[Model | None]:
    return [machine.vm.model for machine in world.dynamic()]


def test_a_job_without_a_deadline_takes_on_demand_at_once() -> None:
    world = submitted()
    world.run(100)
    assert models(world) == [ON_DEMAND]


def test_with_a_deadline_it_waits_while_there_is_time_and_says_until_when() -> None:
    world = submitted(work="30m", deadline="80m")
    world.run(600)
    assert models(world) == []
    said = world.record().reason
    assert "; on-demand from " in said and said.endswith(" UTC at the latest")
    told = len(world.events(Event.REFUSED))
    world.run(300)
    assert world.record().reason == said, "it is the same until then, and no write a minute"
    assert told <= len(world.events(Event.REFUSED)) <= told + 10
    world.until(lambda: ON_DEMAND in models(world), 3000)
    begun = world.t - world.record().created
    assert 25 * 60 < begun < 45 * 60, "with 80 min for 30 of work, it leaves room for a start that fails"


def test_the_ledger_has_the_reason_for_each_machine() -> None:
    world = submitted(work="30m", deadline="45m")
    world.until(lambda: ON_DEMAND in models(world), 900)
    (*_, intent) = world.events(Event.INTENT)
    assert intent.detail.startswith("on-demand to meet the deadline") or "slack" in intent.detail


def test_max_wait_is_how_long_on_demand_waits() -> None:
    world = submitted(max_wait="10m")
    world.run(540)
    assert models(world) == []
    world.until(lambda: ON_DEMAND in models(world), 200)


def test_the_earlier_limit_ends_the_wait() -> None:
    world = submitted(max_wait="5m", work="30m", deadline="20h")
    world.until(lambda: ON_DEMAND in models(world), 500)


def test_returning_spot_is_taken() -> None:
    world = submitted(work="30m", deadline="5h")
    world.run(400)
    world.capacity.clear()
    world.until(world.training, 600)
    assert models(world) == [SPOT]


def test_spot_above_max_price_is_no_offer() -> None:
    world = World(nodes=1, max_price=0.305)
    world.capacity["z-a", SPOT] = 0
    world.submit()
    world.run(100)
    assert models(world) == [ON_DEMAND]


# -- the choice


def job(**more: object) -> JobSpec:
    return JobSpec("job", ("x",), **more)  # type: ignore[arg-type]


def chosen(spec: JobSpec, **need: object) -> list[tuple[str, Model]]:
    asked = Need(now=NOW, **{"on_demand_left": 9, **need})  # type: ignore[arg-type]
    return [(choice.offer.zone[-1], choice.offer.model) for choice in select(spec, stack(), asked).choices]


def steady(zone: str, hours: float = 10.0) -> OfferHistory:
    return OfferHistory("pool", zone, SPOT, watch=Watch(zone, True, NOW_H, NOW_H - hours, 0.0, 2.0, hours, hours))


def stormy(zone: str, losses: float = 6.0) -> OfferHistory:
    return OfferHistory("pool", zone, SPOT, watch=Watch(zone, True, NOW_H, NOW_H - 0.1, losses, 1.0, 10.0, 3.0))


def test_a_zone_with_losses_comes_after_one_without() -> None:
    assert chosen(job(), market=(stormy("z-a"), steady("z-b")))[0] == ("b", SPOT)


def guessed(zone: str, *words: float | None) -> OfferHistory:
    return OfferHistory("pool", zone, SPOT, guess=Guess(*words))


def spots(*market: OfferHistory) -> list[str]:
    return [zone for zone, model in chosen(job(), market=market) if model is SPOT]


def test_the_clouds_estimate_counts_only_without_observations() -> None:
    """Against its other guesses: a cloud that guesses low everywhere says nothing. No guess is unknown."""
    assert spots(guessed("z-a", 0.1), guessed("z-b", 0.9)) == ["b", "c", "a"]
    assert spots(*(guessed(zone, 0.1) for zone in ZONES)) == ["a", "b", "c"]
    assert spots(guessed("z-a", None, 0.2), guessed("z-c", None, 1.0)) == ["c", "b", "a"]
    assert spots(guessed("z-a", None, None, 0.3), guessed("z-b", 0.9, 1.0, 0.8)) == ["b", "c", "a"]
    proven = replace(steady("z-a", 40.0), guess=Guess(0.1))
    assert spots(proven, guessed("z-b", 0.9))[0] == "a"


def test_a_starts_duration_is_assumed_until_it_is_measured() -> None:
    """The longer a start, the more a loss costs, and the less a cheaper zone that is likelier to die is worth."""
    market = [replace(guessed("z-a", 0.1), boot_s=60.0), guessed("z-b", 0.9)]

    def order(**need: float) -> list[str]:
        return [zone for zone, model in chosen(job(), market=tuple(market), **need) if model is SPOT]

    assert order() == ["b", "c", "a"], "its machines boot in a minute, and nobody knows what comes after that"
    assert order(begin_s=20.0) == ["b", "a", "c"]
    assert order(begin_s=900.0) == ["b", "c", "a"]
    late = Work(left_h=10.0, slack_h=0.25, planned_h=2.0)
    assert chosen(job(deadline="20h"), work=late, market=tuple(market))[0][1] is ON_DEMAND
    assert chosen(job(deadline="20h"), work=late, market=tuple(market), begin_s=20.0)[0][1] is SPOT


def test_estimates_are_compared_only_within_a_pool() -> None:
    low = [guessed(zone, 0.1) for zone in ZONES]
    others = [replace(guessed(zone, 0.9), pool="other") for zone in ZONES]
    found = select(job(), stack(), Need(NOW, on_demand_left=9, market=(*low, *others))).choices
    assert found and not any("estimate" in choice.why for choice in found)


def test_an_estimate_changes_the_losses_by_at_most_a_factor_of_two() -> None:
    def why(*market: OfferHistory) -> str:
        asked = Need(now=NOW, models=(SPOT,), market=market)
        return next(one.why for one in select(job(), stack(), asked).choices if one.offer.zone == "z-a")

    every = [guessed(zone, 1.0, 1.0, 1.0) for zone in ZONES[1:]]
    assert "1.6 times the usual losses are expected, and without the cloud's estimate 1.0 times" in why(
        guessed("z-a", 0.0, 0.0, 0.0), *every
    )
    assert "estimate" not in why(guessed("z-a", 1.0, 1.0, 1.0), guessed("z-b", 1.0, 1.0, 1.0))
    assert "estimate" not in why(guessed("z-a"), *every), "no word of it is unknown, and never zero"
    watched = Watch("z-a", True, NOW_H, NOW_H - 90.0, 0.0, 24.0, 90.0, 90.0)
    unexplained_since = replace(guessed("z-a", 0.0, 0.0, 0.0), watch=watched)
    assert "estimate" not in why(unexplained_since, *every), "what was seen outweighs it"


def test_on_demand_comes_before_spot_that_is_not_worth_its_start() -> None:
    bad = tuple(replace(stormy(zone, 60.0), boot_s=900.0) for zone in ZONES)
    order = chosen(job(), market=bad)
    assert order[0][1] is ON_DEMAND
    assert order[-1][1] is SPOT


def test_on_demand_is_left_only_for_a_lasting_zone() -> None:
    bad = tuple(replace(stormy(zone, 60.0), boot_s=900.0) for zone in ZONES)
    assert chosen(job(), models=(SPOT,), runs=DEMAND, market=bad) == []
    assert chosen(job(), models=(SPOT,), runs=DEMAND, market=(stormy("z-a"), steady("z-b")))[0] == ("b", SPOT)


def test_on_demand_is_not_left_when_the_deadline_is_near() -> None:
    late = Work(left_h=10.0, slack_h=0.15, planned_h=2.0)
    assert chosen(job(deadline="20h"), models=(SPOT,), runs=DEMAND, work=late, market=(steady("z-b"),)) == []
    assert chosen(job(deadline="20h"), work=late)[0][1] is ON_DEMAND


def test_policy_on_demand_never_waits_and_spot_buys_only_spot() -> None:
    ample = Work(left_h=10.0, slack_h=50.0, planned_h=50.0)
    assert {model for _, model in chosen(job(policy="on-demand", deadline="9d"), work=ample)} == {ON_DEMAND}
    assert {model for _, model in chosen(job(policy="spot", deadline="9d"), work=ample)} == {SPOT}
    assert {model for _, model in chosen(job(deadline="9d"), work=ample)} == {SPOT}


def test_a_pool_without_spot_is_not_waited_for() -> None:
    ample = Work(left_h=10.0, slack_h=50.0, planned_h=50.0)
    pool = replace(stack().pools[0], prices={zone: Price(on_demand=1.0) for zone in ZONES})
    found = select(job(deadline="9d"), replace(stack(), pools=(pool,)), Need(NOW, on_demand_left=9, work=ample))
    assert found.until is None
    assert {choice.offer.model for choice in found.choices} == {ON_DEMAND}


@pytest.mark.parametrize("policy", ["balanced", "shuffle"])
def test_a_wait_with_a_future_start_is_at_most_max_wait(policy: str) -> None:
    """A clock that jumped back."""
    found = select(job(policy=policy), stack(), Need(NOW, on_demand_left=9, max_wait_s=600.0, since=NOW + 9e6))
    assert {choice.offer.model for choice in found.choices} == {SPOT}
    assert found.until is not None and (policy == "shuffle" or found.until <= NOW + 600.0)


def test_probes_dated_in_the_future_or_long_ago_are_ignored() -> None:
    ahead = OfferHistory("pool", "z-a", SPOT, watch=Watch("z-a", True, NOW_H + 50, NOW_H + 40, 1.0, 1.0, 5.0, 5.0))
    old = OfferHistory("pool", "z-b", SPOT, watch=Watch("z-b", False, NOW_H - 999, 0.0, 3.0, 2.0, 9.0, 4.0))
    assert len(chosen(job(), market=(ahead, old))) == 6


def test_the_work_left_follows_from_steps_and_their_time() -> None:
    progress = Progress(gen=1, step=40, at=0.0, step_s=2.0, total_steps=100)
    assert progress.left_s == 120.0
    assert replace(progress, total_steps=None).left_s is None
    assert replace(progress, step_s=None).left_s is None
    assert replace(progress, step=200).left_s == 0.0


def test_times_of_day_are_utc(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever the machine is."""
    monkeypatch.setenv("TZ", "HERE-5")
    time.tzset()
    try:
        assert time_of_day(1_800_000_000.0) == time_of_day(1_800_000_000.0 - 1e-4) == "08:00 UTC"
        assert time_of_day(1_800_000_000.0 - 0.6) == "07:59 UTC"
    finally:
        monkeypatch.undo()
        time.tzset()


def late_od(world: World) -> float:
    """When on-demand was asked for, seconds after the submission."""
    (*_, intent) = [entry for entry in world.events(Event.INTENT) if entry.model is ON_DEMAND]
    return intent.at - world.record().created


@pytest.mark.parametrize("deadline_min", range(44, 64, 3))
def test_a_spot_machine_that_never_boots_misses_no_deadline(deadline_min: int) -> None:
    """It is waited for until its boot deadline: twenty minutes here, and nobody has seen such a machine boot."""
    world = World(
        nodes=1, the_stack=replace(stack(), boot_deadline_s=1200), work="20m", deadline=f"{deadline_min}m", boot_s=20.0
    )
    mute(world)
    world.submit()
    world.until(world.training, deadline_min * 60)
    assert world.t - world.record().created + 20 * 60 <= deadline_min * 60


def mute(world: World) -> None:
    """Spot machines run and say nothing."""
    insert = world._insert

    def inserted(action: InsertVm) -> tuple[ResultKind, str]:
        told = insert(action)
        for machine in world.dynamic():
            if machine.vm.model is SPOT:
                machine.up_at = math.inf
        return told

    world._insert = inserted  # type: ignore[method-assign]


@pytest.mark.parametrize("usd", [math.nan, -0.1, math.inf])
def test_an_offer_needs_a_price(usd: float) -> None:
    seen = OfferHistory("pool", ZONES[0], SPOT, price=usd)
    found = select(JobSpec("job", ("train.py",)), stack(), Need(NOW, market=(seen,), on_demand_left=9))
    assert (ZONES[0], SPOT) not in {(choice.offer.zone, choice.offer.model) for choice in found.choices}
    assert found.choices


# -- against what runs


def priced(*usd: float) -> tuple[OfferHistory, ...]:
    """Spot in each zone, there for long."""
    return tuple(replace(steady(zone), price=price) for zone, price in zip(ZONES, usd, strict=True))


def runs_spot(
    market: tuple[OfferHistory, ...], max_price: float | None = None, **more: object
) -> tuple[list[str], bool]:
    need = Need(NOW, models=(SPOT,), market=market, runs=Runs(SPOT, "pool/z-a/spot"), begin_s=60.0, **more)  # type: ignore[arg-type]
    found = select(job(max_price=max_price), stack(), need)
    return [choice.offer.zone[-1] for choice in found.choices], found.leaves


def test_running_spot_is_left_only_for_much_cheaper_spot() -> None:
    assert runs_spot(priced(0.3, 0.29, 0.31)) == ([], False)
    assert runs_spot(priced(0.9, 0.2, 0.3)) == (["b", "c"], False)
    late = Work(left_h=10.0, slack_h=0.2)
    assert runs_spot(priced(0.9, 0.2, 0.3), work=late) == ([], False), "no time for another start"


def test_spot_above_the_on_demand_price_is_left_for_any_offer() -> None:
    assert runs_spot(priced(1.4, 1.2, 1.3)) == ([], True)
    assert runs_spot(priced(1.4, 0.3, 1.3)) == (["b"], True)


def test_a_running_machine_above_max_price_is_compared_with_those_below() -> None:
    """Left out, it would stay whatever it costs."""
    assert runs_spot(priced(1.4, 0.3, 1.3), 0.5) == (["b"], True)
    assert runs_spot(priced(0.9, 0.2, 0.6), 0.5) == (["b"], False)


def test_the_cost_of_a_move_counts() -> None:
    """An hour of work is left: what it takes to bring the disks there decides."""
    market, short = priced(0.9, 0.6, 0.95), Work(left_h=1.0, slack_h=None)
    assert runs_spot(market, work=short) == (["b"], False)
    assert runs_spot(market, work=short, move_costs={"z-b": MoveCost(1800.0)}) == ([], False)
    assert runs_spot(market, work=short, move_costs={"z-b": MoveCost(60.0, usd=0.5)}) == ([], False)


def test_booted_machines_cost_no_boot() -> None:
    market = tuple(replace(seen, boot_s=600.0) for seen in priced(0.9, 0.6, 0.95))
    short: dict[str, object] = {"models": (SPOT,), "runs": DEMAND, "market": market, "begin_s": 60.0}
    short["work"] = Work(left_h=0.8, slack_h=None)
    assert chosen(job(), **short) == []
    assert chosen(job(), **short, there=frozenset({"pool/z-b/spot"})) == [("b", SPOT)]


@pytest.mark.parametrize(("age_s", "left"), [(599.0, False), (600.0, True)])
def test_a_rule_may_set_the_least_stay_on_demand(age_s: float, left: bool) -> None:
    """Two starts of 300 s."""
    runs, market = Runs(ON_DEMAND, DEMAND.offer, age_s), (replace(steady("z-b"), boot_s=240.0),)
    asked = Need(NOW, models=(SPOT,), market=market, runs=runs, begin_s=50.0, save_s=10.0)
    found = select(job(), stack(), asked, rule=with_(RULE, stay_restarts=2.0))
    assert bool(found.choices) is left
    assert select(job(), stack(), asked).choices, "the shipped rule sets none"


def test_on_demand_probes_zones_without_recent_observations() -> None:
    bad = [replace(stormy(zone, 60.0), boot_s=900.0) for zone in ZONES]
    old = replace(bad[1], watch=replace(bad[1].watch, seen_h=NOW_H - 0.6, since_h=NOW_H - 0.7))
    found = select(job(), stack(), Need(NOW, models=(SPOT,), market=(bad[0], old, bad[2]), runs=DEMAND))
    assert [offer.zone for offer in found.probe] == ["z-b"] and found.choices == ()


def test_too_expensive_spot_ends_on_demand() -> None:
    lost = Work(left_h=40.0, slack_h=None, done_h=8.0, excess_h=9.0)
    assert chosen(job(), work=lost)[0][1] is ON_DEMAND
    assert chosen(job(), work=replace_work(lost, 1.0))[0][1] is SPOT
    assert chosen(job(), models=(SPOT,), runs=DEMAND, work=lost) == []
    why = select(job(), stack(), Need(NOW, on_demand_left=9, work=lost)).choices[0].why
    assert why.endswith("on-demand to the end: spot has cost 9.0 on-demand hours more than it was worth")


def replace_work(work: Work, excess_h: float) -> Work:
    return Work(work.left_h, work.slack_h, work.planned_h, work.done_h, excess_h)
