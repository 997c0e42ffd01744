"""A gang is bought whole or not at all: two gangs never starve each other, and waiting machines are released."""

from __future__ import annotations

import logging

import pytest
from msgspec.structs import replace

from spotkeeper.contract.job import Nodes
from spotkeeper.contract.ledger import Event
from spotkeeper.contract.record import Hold, Phase
from spotkeeper.contract.stack import Model
from spotkeeper.reconcile.decide.snapshot import Times
from tests.reconcile.world import ZONES, World, stack
from tests.sizes import size

SECOND = "wxyz2345"
GANG_S = Times().gang_s


def short(have: int, **more: object) -> World:
    """Each zone has machines for so many, and none on demand."""
    world = World(the_stack=stack(max_on_demand=0), **more)  # type: ignore[arg-type]
    for zone in ZONES:
        world.capacity[zone, Model.SPOT] = have
    world.submit()
    return world


def paid_s(world: World, seconds: float) -> int:
    """Machine-seconds of the next ``seconds``."""
    total, end = 0, world.t + seconds
    while world.t < end:
        world.step()
        total += len(world.dynamic())
    return total


def test_two_gangs_that_do_not_fit_together_run_one_after_the_other() -> None:
    """Half of the machines each, and both would be paid for waiting for ever."""
    world = World(nodes=3, the_stack=replace(stack(), max_machines=4), steps=400)
    world.submit()
    world.submit(SECOND)
    world.until(lambda: world.training() or world.training(SECOND), 300)
    assert len(world.dynamic()) == 3, "the other one has none that waits"
    waits = SECOND if world.training() else "abcd2345"
    assert "waiting in the queue" in world.record(waits).reason
    world.until(lambda: world.training(waits), 2400)


def test_an_elastic_gang_takes_the_room_that_is_left() -> None:
    world = World(nodes=Nodes(2, 4), the_stack=replace(stack(), max_machines=3))
    world.submit()
    world.until(world.training, 600)
    assert len(world.record().members) == 3


def test_machines_that_wait_too_long_for_the_rest_are_released() -> None:
    world = short(2, nodes=3)
    world.run(300)
    assert len(world.dynamic()) == 2
    world.until(lambda: world.record().phase is Phase.HOLD, GANG_S + 200)
    record = world.record()
    assert record.hold is Hold.CAPACITY
    assert record.reason.startswith("waiting for capacity in ")
    assert record.reason.endswith("; released 2 machines that waited for the other machines")
    world.run(60)
    assert world.dynamic() == []


def test_a_retrying_gang_raises_no_alarm(caplog: pytest.LogCaptureFixture) -> None:
    world = short(2, nodes=3)
    with caplog.at_level(logging.WARNING, "spotkeeper.reconcile"):
        world.until(lambda: world.record().phase is Phase.HOLD, GANG_S + 200)
        world.run(30)
    assert [entry.cause for entry in world.events(Event.HOLD)] == ["capacity"]
    assert [line for line in caplog.records if hasattr(line, "event")] == []


def test_what_a_gang_that_never_fits_wastes_is_bounded() -> None:
    world = short(2, nodes=3)
    first = paid_s(world, 4 * 3600)
    later_h = size(5, 10)
    later = paid_s(world, later_h * 3600)
    assert first <= 4 * 2 * (GANG_S + 300)
    assert later / (later_h * 3600 * 2) < 0.2, "ever more seldom"


def test_a_held_gang_starts_whole_when_there_is_room() -> None:
    world = short(2, nodes=3)
    world.until(lambda: world.record().phase is Phase.HOLD, GANG_S + 600)
    world.capacity.clear()
    world.until(world.training, GANG_S + 300)
    assert len(world.record().members) == 3


def test_survivors_of_a_loss_are_released_and_their_disks_kept() -> None:
    plain = stack(max_on_demand=0)
    one_zone = tuple(replace(pool, zones=ZONES[:1]) for pool in plain.pools)
    world = World(nodes=3, the_stack=replace(plain, pools=one_zone))
    world.submit()
    world.until(world.training, 600)
    world.run(200)
    newest = world.newest
    world.capacity[ZONES[0], Model.SPOT] = 0
    world.preempt(1)
    world.until(lambda: world.record().phase is Phase.HOLD, GANG_S + 600)
    world.capacity.clear()
    world.until(world.training, 2 * GANG_S + 600)
    assert newest is not None
    assert world.started[-1][1] is not None and world.started[-1][1] >= newest


def test_max_wait_is_waited_for() -> None:
    world = World(nodes=3, max_wait="1h")
    for zone in ZONES:
        world.capacity[zone, Model.SPOT] = 2
    world.submit()
    world.until(world.training, 3600 + 300)
    models = [machine.vm.model for machine in world.dynamic()]
    assert Model.ON_DEMAND in models
    assert world.record().hold_count == 0


def test_a_deadline_starts_on_demand_in_time() -> None:
    world = World(nodes=3, work="30m", deadline="3h")
    for zone in ZONES:
        world.capacity[zone, Model.SPOT] = 2
    world.submit()
    world.until(lambda: world.record().phase is Phase.HOLD, GANG_S + 600)
    world.until(world.training, 3 * 3600)
    assert world.t - world.record().created < 3 * 3600 - 30 * 60
