"""``market/``: fed once with what happens to machines, read for choices, and never in the way of a round."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from spotkeeper.clock import Clock
from spotkeeper.contract.cloud import DeleteVm, InsertVm, Result, ResultKind
from spotkeeper.contract.ledger import Entry, Event
from spotkeeper.contract.market import FRESH_S, HOUR_S, Fate, Observation, PriceRun, Prices, fate, lives
from spotkeeper.contract.record import Phase
from spotkeeper.contract.stack import Model
from spotkeeper.reconcile.clouds.gce.advice import joined, price_question, price_runs
from spotkeeper.reconcile.clouds.gce.cloud import open_gce
from spotkeeper.reconcile.controller import ledger
from spotkeeper.reconcile.controller.ledger import LedgerWriter
from spotkeeper.reconcile.controller.reconcile_job import run_round
from spotkeeper.reconcile.controller.tick import tick
from spotkeeper.reconcile.select import market
from spotkeeper.reconcile.store.objects import StoreError
from spotkeeper.report.job.recovery import Preemptions, preemptions
from spotkeeper.report.job.view import job_view
from tests import discovery
from tests.reconcile.clouds.gce.compute import STACK as GCE_STACK
from tests.reconcile.clouds.gce.compute import Google, Raw, serve
from tests.reconcile.clouds.gce.test_gce import silent_server
from tests.reconcile.memory import MemoryStore
from tests.reconcile.world import JOB, World, stack

POOL = "pool"


def trained(world: World) -> World:
    world.submit()
    world.until(world.training, 600)
    return world


def told(world: World) -> list[tuple[str, Event, str]]:
    observations = itertools.chain.from_iterable(
        world.memory.observations[key] for key in sorted(world.memory.observations)
    )
    return [(observation.machine, observation.event, observation.cause) for observation in observations]


# -- feeding


def test_new_prices_replace_old_ones_of_their_zone_alone() -> None:
    old = (PriceRun(1.0, 0.1, "a"), PriceRun(2.0, 0.2, "b"), PriceRun(5.0, 0.5, "a"), PriceRun(6.0, 0.6, "b"))
    told = (PriceRun(5.0, 0.55, "a"), PriceRun(7.0, 0.7, "a"))
    assert market._merged(old, told) == (old[0], old[1], told[0], old[3], told[1])


def test_launches_losses_and_returns_are_noted_by_machine_and_hour() -> None:
    world = trained(World(nodes=1, steps=4000))
    world.run(60)
    world.preempt(0)
    world.until(lambda: world.record().gen == 2 and world.training())
    one, two = f"{JOB}-n0-a1", f"{JOB}-n0-a2"
    assert told(world) == [
        (one, Event.ADMITTED, "start"),
        (one, Event.LOSS, "loss"),
        (one, Event.GONE, ""),
        (two, Event.ADMITTED, "loss"),
    ]
    assert all(
        int(s.at // HOUR_S) == hour
        for (_, hour), observations in world.memory.observations.items()
        for s in observations
    )
    seen = market.read(world.store, world, world.stack, world.t)
    (offer,) = [o for o in seen if o.zone == "z-a" and o.model is Model.SPOT]
    assert offer.launched_at >= offer.lost_at > 0 and offer.refused_at == 0


def test_one_jobs_refusals_make_the_offer_cold_for_others() -> None:
    world = World(nodes=1)
    world.capacity["z-a", Model.SPOT] = 0
    trained(world)
    assert (f"{JOB}-n0-a1", Event.REFUSED, "capacity") in told(world)
    world.submit("wxyz2345")
    other = world.record("wxyz2345").nodes[0].cur
    assert other is not None and other.zone != "z-a", "the cheapest was refused to the other job a moment ago"


def test_a_permanent_refusal_is_no_observation() -> None:
    entries = [
        Entry(world_t, f"refused.r0.a{n}", Event.REFUSED, 0, 0, n, POOL, "z-a", Model.SPOT, cause=cause)
        for n, (world_t, cause) in enumerate([(10.0, "permanent"), (20.0, "quota"), (15.0, "capacity")])
    ]
    observations = {POOL: tuple(market.observations_of(JOB, entries)[POOL, 0])}
    (offer,) = market.offers_seen(stack().pools, {}, observations, 30.0)
    assert (offer.refused_at, offer.quota_at, offer.denied_at) == (15.0, 20.0, 20.0)


def test_a_result_that_refuses_no_offer_hides_no_later_refusal() -> None:
    def answer(kind: ResultKind, pool: str = "pool", zone: str = "z-a") -> Result:
        return Result(InsertVm(JOB, "", 0, 1, pool, zone, Model.SPOT), kind, at=7.0)

    results = (
        Result(DeleteVm("vm", "u", "z-a"), ResultKind.CAPACITY, at=7.0),
        answer(ResultKind.ACCEPTED),
        answer(ResultKind.CAPACITY, pool=""),
        answer(ResultKind.CAPACITY, zone="z-b"),
    )
    (found,) = market.refused((), results)
    assert (found.pool, found.zone, found.model) == ("pool", "z-b", Model.SPOT)


def test_static_machines_and_second_boots_are_no_launches() -> None:
    base = Entry(10.0, "admitted.r0.a1", Event.ADMITTED, 0, 0, 1, POOL, "z-a", Model.SPOT)
    again = replace(base, id="admitted.r0.a1.b1", at=20.0)
    static = replace(base, id="admitted.r1.a1", node=1, model=Model.STATIC)
    gone = Entry(30.0, "gone.r1.a1", Event.GONE, 0, 1, 1, None, detail="machine:n0")
    waits = replace(base, event=Event.REFUSED, id="refused.wait.v3", attempt=None)
    (observations,) = market.observations_of(JOB, [base, again, static, gone, waits]).values()
    assert [(observation.machine, observation.at) for observation in observations] == [(f"{JOB}-n0-a1", 10.0)]


@pytest.mark.parametrize("seed", range(3))
def test_repeated_rounds_store_each_observation_once(seed: int) -> None:
    """What is under ``market/`` is what the ledger tells, whatever was cut off."""
    world = World(nodes=2, seed=seed, lost_answers=0.1)
    world.crash_rate = 0.1
    world.submit()
    world.until(world.training, 1500)
    world.preempt(random.Random(seed).randrange(2))  # noqa: S311
    world.until(lambda: world.record().gen >= 2 and world.training(), 3000)
    world.crash_rate = 0.0
    run_round(world.store, world, JOB, world, world.options)
    noted = [observation for observations in world.memory.observations.values() for observation in observations]
    assert len(noted) == len(set(noted))
    ledger = [
        observation
        for observations in market.observations_of(JOB, world.events()).values()
        for observation in observations
    ]
    assert set(noted) == set(ledger)


def test_an_unwritable_market_stops_nothing_and_is_completed_later() -> None:
    world = World(nodes=1)
    real, fails = world.memory.add_observations, [True]

    def add_observations(*args: object) -> bool:
        if fails[0]:
            raise StoreError("the bucket does not answer")
        return real(*args)  # type: ignore[arg-type]

    world.memory.add_observations = add_observations  # type: ignore[method-assign]
    trained(world)
    assert told(world) == []
    fails[0] = False
    tick(world.store, world, world, world.options)  # the process that could not tell it then
    assert (f"{JOB}-n0-a1", Event.ADMITTED, "start") in told(world)


def test_a_writer_remembers_the_entries_written_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "_REMEMBERED", 2)
    store, writer = MemoryStore(), LedgerWriter()
    first, second, third = (
        Entry(10.0, f"admitted.r0.a{attempt}", Event.ADMITTED, 0, 0, attempt, POOL, "z-a", Model.SPOT)
        for attempt in (1, 2, 3)
    )
    calls: list[object] = []
    real = store.add_observations
    store.add_observations = lambda *args: calls.append(args) or real(*args)  # type: ignore[assignment, func-returns-value]
    told = []
    for entry in (first, first, second, third, second, third, first):
        writer.write(store, JOB, [entry])
        told.append(len(calls))
    assert told == [1, 1, 2, 3, 3, 3, 4]


# -- prices


def test_an_intent_carries_the_observed_price_and_the_cheapest_zone_is_still_chosen_by_it() -> None:
    world = World(nodes=1)
    world.prices[POOL] = (PriceRun(world.t - 5 * HOUR_S, 0.40), PriceRun(world.t - HOUR_S, 0.21))
    trained(world)
    (intent,) = world.events(Event.INTENT)
    assert intent.price == 0.21


@pytest.mark.parametrize("answer", [None, ()])
def test_without_prices_the_list_prices_are_used(answer: tuple[PriceRun, ...] | None) -> None:
    world = World(nodes=1)
    if answer is not None:
        world.prices[POOL] = answer
    trained(world)
    assert [entry.price for entry in world.events(Event.INTENT)] == [0.30]


@pytest.mark.parametrize("usd", [1.0, 1.5])
def test_spot_that_costs_as_much_as_on_demand_is_not_bought(usd: float) -> None:
    world = World(nodes=1)
    world.prices[POOL] = (PriceRun(0.0, usd),)
    trained(world)
    assert {entry.model for entry in world.events(Event.INTENT)} == {Model.ON_DEMAND}


def test_prices_are_requested_hourly_whatever_the_answer() -> None:
    for answer in (None, (PriceRun(0.0, 0.2),)):
        world = World(nodes=1)
        if answer:
            world.prices[POOL] = answer
        start = world.t
        world.submit()
        world.submit("wxyz2345")
        world.run(2 * HOUR_S + 120)
        assert world.price_questions == 3
        assert world.t - start > 2 * HOUR_S


def test_one_of_two_processes_requests_prices() -> None:
    store, world = MemoryStore(), World(nodes=1)
    ends = time.monotonic() + 60.0
    assert market._ask(store, world, POOL, None, 10.0, ends) is not None
    assert market._ask(store, world, POOL, None, 10.0, ends) is None
    assert world.price_questions == 1


def test_prices_older_than_a_day_choose_nothing() -> None:
    store, world = MemoryStore(), World(nodes=1)
    pools = stack().pools
    world.prices[POOL] = (PriceRun(100.0, 0.2), PriceRun(200.0, 0.25))
    assert market._prices(store, world, pools, 300.0)[POOL].now(300.0) == 0.25
    world.prices[POOL] = (PriceRun(200.0, 0.25), PriceRun(4000.0, 0.3))  # it looks back less far now
    later = market._prices(store, world, pools, 5000.0)[POOL]
    assert later.runs == (PriceRun(100.0, 0.2), PriceRun(200.0, 0.25), PriceRun(4000.0, 0.3))
    del world.prices[POOL]
    silent = market._prices(store, world, pools, 5000.0 + FRESH_S + 1)[POOL]
    assert (silent.now(5001.0 + FRESH_S), silent.at(150.0), silent.told) == (None, 0.2, 5000.0)


def test_the_mean_price_weighs_by_time_and_takes_the_intents_before_the_first_run() -> None:
    prices = Prices(POOL, 0.0, 1.0, (PriceRun(100.0, 0.2), PriceRun(200.0, 0.4)))
    assert prices.mean(100.0, 300.0, 9.0) == pytest.approx(0.3)
    assert prices.mean(0.0, 200.0, 0.6) == pytest.approx(0.4)
    assert prices.mean(250.0, 250.0, 9.0) == 0.4
    assert Prices(POOL, 0.0).mean(0.0, 10.0, 0.3) == 0.3


def test_an_unreadable_market_is_unknown() -> None:
    world = World(nodes=1)

    def broken(*_: object) -> dict[str, object]:
        raise StoreError("the bucket does not answer")

    world.memory.read_observations = broken  # type: ignore[method-assign, assignment]
    assert market.read(world.store, world, world.stack, world.t) == ()
    trained(world)


def test_a_tick_reads_the_market_once_for_all_jobs() -> None:
    world = trained(World(nodes=1))
    for job in ("wxyz2345", "stuv2345"):
        world.submit(job)
    looks: list[object] = []
    real = world.memory.read_observations
    world.memory.read_observations = lambda *args: looks.append(args) or real(*args)  # type: ignore[method-assign, assignment, func-returns-value]
    assert tick(world.store, world, world, world.options).jobs == 3
    assert len(looks) == 1


# -- Compute Engine's answer


ADVICE = "advice.capacityHistory"


def answer(*prices: tuple[str, str, int], currency: str = "USD") -> dict[str, object]:
    records = [
        {"interval": {"startTime": start}, "listPrice": {"currencyCode": currency, "units": units, "nanos": nanos}}
        for start, units, nanos in prices
    ]
    return {"location": "x", "machineType": "g2-standard-4", "priceHistory": records}


def asked(script: object, pool: str = "gpu") -> tuple[tuple[PriceRun, ...] | None, Google]:
    with serve() as google:
        google.script[ADVICE] = script
        return open_gce(GCE_STACK, Clock(), google.endpoint).price_history(pool, 60.0), google


def test_the_price_request_is_valid_for_the_stacks_region() -> None:
    discovery.validate_request(f"compute.{ADVICE}", price_question("g2-standard-4"))
    body = answer(("1970-01-01T00:10:00Z", "1", 250000000), ("1970-01-01T00:00:10+00:00", "0", 500000000))
    runs, google = asked(body)
    assert runs == (PriceRun(10.0, 0.5), PriceRun(600.0, 1.25))
    (one,) = google.of(ADVICE)
    assert one.params == {"project": GCE_STACK.project, "region": GCE_STACK.region}


REFUSED = {"error": {"code": 400, "message": "no", "errors": [{"message": "no", "domain": "global", "reason": "x"}]}}


@pytest.mark.parametrize(
    "script",
    [
        REFUSED | {"_status": 400},
        Raw(403, b"{}"),
        Raw(404, b"<html>"),
        Raw(429, b"{}"),
        Raw(501, b"{}"),
        Raw(503, b""),
        Raw(200, b"half an answ"),
        Raw(200, b'{"priceHistory": 3}'),
        {},
        answer(),
        answer(("1970-01-01T00:00:10Z", "0", 0)),
        answer(("1970-01-01T00:00:10Z", "1", 0), currency="EUR"),
        answer(("yesterday", "1", 0)),
    ],
)
def test_invalid_prices_are_unknown_and_never_zero(script: object) -> None:
    assert asked(script)[0] is None


def test_types_without_prices_are_not_requested() -> None:
    for machine in ("n1-standard-8", "n2-custom-4-8192"):
        pools = (replace(GCE_STACK.pools[0], machine_type=machine),)
        with serve() as google:
            there = open_gce(replace(GCE_STACK, pools=pools), Clock(), google.endpoint)
            assert there.price_history("gpu", 2.0) is None
            assert google.asked == []


@pytest.mark.parametrize("drip", [True, False])
def test_a_silent_cloud_is_abandoned_at_the_deadline(drip: bool) -> None:
    with silent_server(drip) as endpoint:
        assert open_gce(GCE_STACK, Clock(), endpoint).price_history("gpu", 0.2) is None


def test_repeated_prices_are_joined() -> None:
    runs = [PriceRun(1.0, 0.2), PriceRun(2.0, 0.2), PriceRun(3.0, 0.3), PriceRun(4.0, 0.2)]
    assert joined(runs) == (runs[0], runs[2], runs[3])
    assert price_runs(b"[]") is None


# -- preemptions: one definition


N, R, L, G = Event.NOTICE, Event.REPRIEVE, Event.LOSS, Event.GONE


@pytest.mark.parametrize(
    ("story", "is_"),
    [
        ([], Fate.KEPT),
        ([(G, "")], Fate.KEPT),
        ([(N, ""), (R, ""), (G, "")], Fate.KEPT),
        ([(N, ""), (G, "")], Fate.ANNOUNCED),
        ([(N, ""), (L, "notice"), (G, "")], Fate.ANNOUNCED),
        ([(L, "notice")], Fate.ANNOUNCED),
        ([(L, "loss"), (G, "")], Fate.UNANNOUNCED),
        ([(N, ""), (R, ""), (L, "loss")], Fate.UNANNOUNCED),
        ([(N, ""), (R, ""), (N, ""), (G, "")], Fate.ANNOUNCED),
        ([(L, "standby")], Fate.UNANNOUNCED),
        ([(L, "noticed standby")], Fate.ANNOUNCED),
        ([(L, "silence"), (G, "")], Fate.KEPT),
        ([(L, "never joined")], Fate.KEPT),
    ],
)
def test_the_fate_of_a_machine(story: list[tuple[Event, str]], is_: Fate) -> None:
    assert fate(story) is is_


def test_lives_have_a_beginning_an_end_and_a_fate() -> None:
    world = trained(World(nodes=1))
    world.run(60)
    lost_at = world.t
    world.preempt(0)
    world.until(lambda: world.record().gen == 2 and world.training())
    (observations,) = world.store.read_observations(
        (POOL,), tuple(int(world.t // HOUR_S) - back for back in range(2))
    ).values()
    one, two = lives(observations)
    assert (one.zone, one.model, one.fate) == ("z-a", Model.SPOT, Fate.UNANNOUNCED)
    assert one.began is not None and one.ended is not None and one.began < lost_at <= one.ended
    assert (two.fate, two.ended) == (Fate.KEPT, None)
    without_its_launch = [observation for observation in observations if observation.event is not Event.ADMITTED]
    assert [(life.began, life.fate) for life in lives(without_its_launch)] == [(None, Fate.UNANNOUNCED)]


def test_refused_or_unjoined_machines_have_no_life() -> None:
    refused = Observation("j-n0-a1", Event.REFUSED, 1.0, "z-a", Model.SPOT, "capacity")
    never = Observation("j-n0-a2", L, 2.0, "z-a", Model.SPOT, "never joined")
    gone = Observation("j-n0-a3", G, 3.0)
    assert lives([refused, never, gone, Observation("j-n0-a2", G, 4.0)]) == ()


def test_a_withdrawn_notice_is_no_loss_of_the_offer() -> None:
    up = Observation("j-n0-a1", Event.ADMITTED, 1.0, "z-a", Model.SPOT)
    notice, reprieve = replace(up, event=N, at=50.0), replace(up, event=R, at=60.0)

    def lost_at(*observations: Observation) -> float:
        (offer,) = market.offers_seen(stack().pools, {}, {POOL: observations}, 100.0)
        return offer.lost_at

    assert lost_at(up, notice) == 50.0
    assert lost_at(up, notice, reprieve) == 0.0
    assert lost_at(up, notice, replace(up, event=L, at=90.0, cause="notice")) == 90.0


def told_off(world: World, node: int) -> None:
    """The agent says that the notice was withdrawn."""
    agent = world.member(node).agent
    assert agent is not None and agent.notice is not None
    agent.reprieved = agent.notice
    world.member(node).dies_at = None


def test_fates_of_noticed_and_silently_lost_machines() -> None:
    world = trained(World(nodes=3))
    world.run(70)
    world.preempt(0, notice_s=100.0)
    world.until(lambda: bool(world.events(Event.NOTICE)), 60)
    told_off(world, 0)
    world.until(lambda: bool(world.events(Event.REPRIEVE)) and world.training(), 300)
    assert count(world) == Preemptions(0, 0)
    calm(world)
    world.preempt(1, notice_s=30.0)
    world.until(lambda: count(world).announced == 1 and world.training(), 600)
    calm(world)
    world.preempt(2)
    world.until(lambda: count(world).unannounced == 1 and world.training(), 600)
    calm(world)
    assert count(world) == Preemptions(1, 1)
    world.steps = 0
    world.until(lambda: world.record().phase is Phase.DONE, 2000)
    assert count(world) == Preemptions(1, 1), "the end of a job takes nothing away"


def calm(world: World) -> None:
    world.run(120)
    steady: Callable[[], bool] = lambda: world.training() and not world.record().stop  # noqa: E731
    world.until(steady, 600)


def count(world: World) -> Preemptions:
    """As the report, the view, ``status`` and the demo's report have it."""
    found = preemptions(world.events())
    assert job_view(world.record(), None, world.events(), world.stack, world.t).preemptions == found
    return found


def test_only_spot_machines_are_preempted() -> None:
    world = trained(World(nodes=1, policy="on-demand"))
    world.run(60)
    world.preempt(0)
    world.until(lambda: world.record().gen == 2 and world.training())
    assert [entry.cause for entry in world.events(Event.LOSS)] == ["loss"]
    assert count(world) == Preemptions(0, 0)


def test_the_spending_limit_counts_market_prices() -> None:
    """At the stack's 0.30 an hour it would blow after 40 minutes, at the market's 0.60 it does after 20."""
    world = World(nodes=1, max_usd=0.2)
    world.prices[POOL] = (PriceRun(0.0, 0.6),)
    trained(world)
    began = world.t
    world.until(lambda: world.record().phase is Phase.HOLD, 2400)
    assert 900 < world.t - began < 1800
