"""``max_usd`` holds a job at the sum that its status shows: boots, crashes and static machines included."""

from __future__ import annotations

import logging

import pytest

from spotkeeper.contract.job import RequestKind, Retry
from spotkeeper.contract.ledger import Event
from spotkeeper.contract.market import PriceRun
from spotkeeper.contract.record import Hold, Phase
from spotkeeper.contract.stack import Model
from tests.reconcile.world import ZONES, World, stack


def holding(world: World) -> bool:
    return world.record().phase is Phase.HOLD


@pytest.mark.parametrize("static", [0, 1], ids=["spot", "static"])
def test_a_crashing_job_is_held_by_max_usd(static: int) -> None:
    """Static machines cost by their list price, as in the job's report: a crash loop on one is no free loop."""
    world = World(nodes=1, the_stack=stack(static=static), max_usd=0.01, retry=Retry(crashes=1000))
    world.crashing = 1000
    world.run(10)
    world.submit()
    world.until(lambda: holding(world), 600)
    record = world.record()
    assert record.hold is Hold.SPEND and record.budget.crashes > 0
    assert 0.01 <= record.limits.spent < 0.015


def test_a_hold_writes_the_log_line_that_alarms_match(caplog: pytest.LogCaptureFixture) -> None:
    world = World(nodes=1, max_usd=0.01, boot_s=100_000.0)
    world.submit()
    with caplog.at_level(logging.WARNING, "spotkeeper.reconcile"):
        world.until(lambda: holding(world), 300)
        world.run(120)
    told = [line for line in caplog.records if getattr(line, "event", "") == "hold"]
    assert [(line.levelname, line.reason, line.job) for line in told] == [("WARNING", "spend", world.record().job)]
    limits = [line.reason for line in caplog.records if getattr(line, "event", "") == "limit"]
    assert limits == ["spend"], "and the limit that was reached before it"


def test_a_machine_that_never_boots_counts_as_spending() -> None:
    world = World(nodes=1, max_usd=0.01, boot_s=100_000.0)
    world.submit()
    world.until(lambda: holding(world), 300)  # at 0.30 an hour after two minutes; ticks look once a minute
    assert world.record().hold is Hold.SPEND and world.record().gen == 0


def test_a_hold_names_the_allowance_and_not_the_growing_total() -> None:
    world = World(nodes=1, max_usd=0.1)
    world.submit()
    world.until(lambda: holding(world), 2400)
    assert world.record().reason == "max_usd: $0.10 is spent"
    assert world.record().hold_ends == pytest.approx(world.t + world.spec.hold_days * 86_400, abs=5.0)
    world.request(RequestKind.RESUME)
    world.until(world.training, 600)
    world.until(lambda: holding(world), 2400)
    assert world.record().hold is Hold.SPEND
    assert world.record().reason == "max_usd: $0.10 is spent since the last resume, when the job had cost $0.10"


def test_past_high_prices_count_after_a_fall() -> None:
    """What an hour cost is what it cost then: at today's price the sum would have fallen by half."""
    world = World(nodes=1, max_usd=2.0)
    world.prices["pool"] = (PriceRun(world.t - 100.0, 0.9),)
    world.submit()
    world.until(world.training, 600)
    began, at = world.t, world.t + 3600
    world.run(3600)
    world.prices["pool"] = (PriceRun(at - 7200.0, 0.9), PriceRun(at, 0.3))
    world.until(lambda: holding(world), 5 * 3600)
    assert world.t - began < 4.75 * 3600, "0.90 in the first hour, 0.30 in each after it"
    assert 2.0 <= world.record().limits.spent < 2.02


def test_a_released_machine_counts_until_it_is_off() -> None:
    world = World(nodes=1, max_usd=10.0)
    world.submit()
    world.until(world.training, 600)
    old = world.member(0)
    world.clumsy.add(old.vm.name)
    before = world.record().limits
    world.preempt(0, notice_s=600.0)
    world.until(lambda: world.record().gen == 2 and world.training(), 900)
    world.run(120)
    spent = world.record().limits
    assert spent.usd_hour == pytest.approx(0.3, rel=0.2), "two machines no more"
    assert spent.spent > before.spent


def test_waiting_for_capacity_spends_nothing() -> None:
    """A cloud that has none lists a machine for seconds each time, and bills none of them."""
    world = World(nodes=1, max_usd=0.2, policy="spot")
    world.stockout_lists = True
    for zone in ZONES:
        world.capacity[zone, Model.SPOT] = 0
    world.submit()
    world.run(2 * 3600)
    assert len(world.events(Event.REFUSED)) > 20
    assert world.record().phase is Phase.RUN and world.record().limits.spent == pytest.approx(0.0, abs=1e-3)
    world.capacity.clear()
    world.until(world.training, 900)
    world.run(600)
    assert world.record().phase is Phase.RUN, "and what it then has counts from then on"
