"""A gang goes abroad when home is dry, if its file allows it; a region that does not answer stops no other's jobs."""

from __future__ import annotations

import math

import pytest
from msgspec.structs import replace

from spotkeeper.contract.cloud import InsertVm, ResultKind
from spotkeeper.contract.job import RequestKind
from spotkeeper.contract.ledger import Event
from spotkeeper.contract.record import Outcome, Phase
from spotkeeper.contract.stack import Model, Price, StackState
from tests.reconcile.world import JOB, World, stack

HOME, ABROAD = "z", "y"
ZONES = ("z-a", "y-b", "y-c")


def both(zones: tuple[str, ...] = ZONES) -> StackState:
    """A stack whose zones at home are cheaper than those abroad."""
    found = stack()
    prices = {zone: Price(on_demand=1.0, spot=0.30 + 0.01 * n) for n, zone in enumerate(zones)}
    return replace(found, regions=(HOME, ABROAD), pools=(replace(found.pools[0], zones=zones, prices=prices),))


def begun(**spec: object) -> World:
    """A gang of two that trains at home, with a checkpoint."""
    world = World(2, the_stack=both(), **spec)
    world.submit()
    world.until(lambda: world.training() and world.newest is not None)
    assert world.record().zone == "z-a"
    return world


def dry(world: World, region: str, machines: int = 0) -> None:
    """``region``: or one of its zones."""
    for zone in (zone for zone in world.stack.zones() if zone.startswith(region)):
        for model in (Model.SPOT, Model.ON_DEMAND):
            world.capacity[zone, model] = machines


def zones(world: World) -> set[str | None]:
    return {node.cur.zone if node.cur else None for node in world.record().nodes}


def test_a_gang_goes_abroad_with_its_disks_and_returns_without_a_step_lost() -> None:
    world = begun(regions=(HOME, ABROAD))
    left = world.newest
    assert left is not None
    dry(world, HOME)
    for node in (0, 1):
        world.preempt(node, 120.0)
    world.until(lambda: world.record().zone == "y-b" and world.training())
    assert zones(world) == {"y-b"} and {zone for _, zone in world.drives} == {"y-b"}
    assert [entry.detail for entry in world.events(Event.MOVE)] == ["z-a -> y-b", "the disks are in y-b"]
    assert world.started[-1][1] is not None and world.started[-1][1] >= left
    world.run(120)
    abroad = world.newest
    assert abroad is not None and abroad > left

    dry(world, HOME, machines=100)
    world.request(RequestKind.MOVE, zone="z-a")
    world.until(lambda: world.record().zone == "z-a" and world.training())
    assert zones(world) == {"z-a"} and {zone for _, zone in world.drives} == {"z-a"}
    assert world.started[-1][1] is not None and world.started[-1][1] >= abroad


def test_a_gang_does_not_go_to_and_fro_between_dry_zones() -> None:
    """Home is cheaper, but refused a few minutes ago; abroad has not been asked."""
    near, far = ("z-a", "z-b"), "y-b"
    world = World(2, the_stack=both((*near, far)), regions=(HOME, ABROAD))
    world.submit()
    world.until(lambda: world.training() and world.newest is not None)
    for zone in near:
        dry(world, zone)
    for node in (0, 1):
        world.preempt(node, 120.0)
    world.until(lambda: world.record().zone == far and world.training(), 3600)
    moves = [entry.detail for entry in world.events(Event.MOVE) if "->" in entry.detail]
    assert moves == ["z-a -> z-b", "z-b -> y-b"]


def test_a_gang_stays_at_home_unless_its_file_names_another_region() -> None:
    world = begun()
    dry(world, HOME)
    for node in (0, 1):
        world.preempt(node, 120.0)
    world.run(1800)
    assert world.record().zone == "z-a" and zones(world) == {None}
    assert {action.zone for action in world.inserts()} == {"z-a"}
    world.request(RequestKind.MOVE, zone="y-b")
    world.run(60)
    (refused,) = world.events(Event.REQUEST)
    assert "y-b is not a zone of the job's pools (z-a)" in (refused.detail or "")


def test_a_gang_comes_home_if_its_region_is_taken_from_the_stack() -> None:
    world = begun(regions=(HOME, ABROAD))
    world.request(RequestKind.MOVE, zone="y-b")
    world.until(lambda: world.record().zone == "y-b" and world.training())
    pool = world.stack.pools[0]
    world.stack = world.memory.stack = replace(world.stack, regions=(), pools=(pool.only(("z-a",)),))
    world.preempt(0, 120.0)
    world.until(lambda: world.record().zone == "z-a" and world.training())


@pytest.mark.parametrize("regions", [(), (HOME,)])
def test_a_silent_region_delays_no_job_of_another_one(regions: tuple[str, ...]) -> None:
    """The job's lost machine is replaced, its grant returned, and its end complete, though abroad is unknown."""
    world = begun(regions=regions)
    world.blind |= {"y-b", "y-c"}
    world.preempt(1)
    world.until(lambda: world.training() and world.record().gen > 1)
    world.run(180)
    assert len(world.store.read_allocation().value.grants) == 2
    world.request(RequestKind.CANCEL)
    world.until(lambda: world.record().phase is Phase.DONE)
    assert world.record().outcome is Outcome.CANCELLED and not world.drives


def test_a_job_that_may_be_abroad_keeps_its_grants_until_abroad_answers() -> None:
    world = begun(regions=(HOME, ABROAD))
    world.blind |= {"y-b", "y-c"}
    world.preempt(1)
    world.until(lambda: world.training() and world.record().gen > 1)
    world.run(180)
    assert len(world.store.read_allocation().value.grants) == 3
    world.blind.clear()
    world.until(lambda: len(world.store.read_allocation().value.grants) == 2)


def test_what_a_silent_region_has_of_a_job_is_unknown() -> None:
    world = begun(regions=(HOME, ABROAD))
    world.request(RequestKind.MOVE, zone="y-b")
    world.until(lambda: world.record().zone == "y-b" and world.training())
    gen = world.record().gen
    world.blind |= {"y-b", "y-c"}
    world.run(300)
    assert world.record().gen == gen and world.training(), "no listing is no loss"
    world.request(RequestKind.CANCEL)
    world.run(300)
    assert world.record().phase is Phase.END, "its machines and disks there are not known to be gone"
    world.blind.clear()
    world.until(lambda: world.record().phase is Phase.DONE)
    assert not world.drives and not world.dynamic()


def test_what_a_job_left_in_a_silent_region_is_deleted_once_it_answers() -> None:
    world = begun(regions=(HOME, ABROAD))
    world.request(RequestKind.MOVE, zone="y-b")
    world.until(lambda: world.record().zone == "y-b" and world.training())
    world.store.put_spec(JOB, replace(world.spec, regions=()))
    world.request(RequestKind.MOVE, zone="z-a")
    world.until(lambda: world.record().zone == "z-a")
    world.blind |= {"y-b", "y-c"}
    assert {zone for _, zone in world.drives} == {"z-a", "y-b"}, "the old disks are still there"
    world.request(RequestKind.CANCEL)
    world.until(lambda: world.record().phase is Phase.DONE)
    world.blind.clear()
    world.until(lambda: not world.drives and not world.dynamic())


def test_a_job_abroad_whose_file_no_longer_names_the_region_is_still_known_there() -> None:
    """The zones where it is count as its own whatever its file says."""
    world = begun(regions=(HOME, ABROAD))
    world.request(RequestKind.MOVE, zone="y-b")
    world.until(lambda: world.record().zone == "y-b" and world.training())
    world.store.put_spec(JOB, replace(world.spec, regions=(HOME,)))
    world.blind |= {"y-b", "y-c"}
    world.request(RequestKind.CANCEL)
    world.run(300)
    assert world.record().phase is Phase.END


# -- a gang that lost all machines asks all its regions before it buys on-demand


def lost(world: World, notice_s: float | None = None) -> None:
    """The gang loses all machines, and its zone has no more spot."""
    world.capacity["z-a", Model.SPOT] = 0
    for node in range(len(world.record().nodes)):
        world.preempt(node, notice_s)


def requested(world: World) -> list[tuple[str | None, Model | None, str | None]]:
    return [(entry.zone, entry.model, entry.cause) for entry in world.events(Event.INTENT)]


def test_a_gang_without_machines_goes_where_spot_is_before_it_buys_on_demand() -> None:
    world = begun(regions=(HOME, ABROAD))
    before, gen = len(requested(world)), world.record().gen
    lost(world)
    world.until(lambda: world.training() and world.record().gen > gen)
    assert zones(world) == {"y-b"} and {zone for _, zone in world.drives} == {"y-b"}
    home, abroad = ("z-a", Model.SPOT, "loss"), ("y-b", Model.SPOT, "probe")
    asked = requested(world)[before:]
    assert asked[0] == home and asked.count(abroad) == 2, "its own zone comes first"
    assert set(asked) == {home, abroad}, "and no machine on-demand"
    assert [entry.cause for entry in world.events(Event.MOVE)] == ["stockout", "move"]
    assert sum(entry.again or 0 for entry in world.events(Event.GENERATION)) == 0
    world.run(600)
    assert len(world.dynamic()) == 2 and len(world.drives) == 2, "nothing is left over"


def test_zones_that_refuse_are_asked_in_turn_and_cost_no_copy() -> None:
    world = begun(regions=(HOME, ABROAD))
    world.capacity["y-b", Model.SPOT] = 1  # one of two: all or none
    lost(world)
    world.until(lambda: world.record().zone == "y-c" and world.training())
    assert [entry.detail for entry in world.events(Event.MOVE)] == ["z-a -> y-c", "the disks are in y-c"]
    world.run(300)
    assert {machine.vm.zone for machine in world.dynamic()} == {"y-c"}


def test_where_no_region_has_spot_on_demand_at_home_follows_within_two_minutes() -> None:
    world = begun(regions=(HOME, ABROAD))
    gen = world.record().gen
    for zone in ZONES:
        world.capacity[zone, Model.SPOT] = 0
    lost(world)
    world.until(lambda: world.training() and world.record().gen > gen, 120)
    assert zones(world) == {"z-a"} and world.events(Event.MOVE) == []
    assert {machine.vm.model for machine in world.dynamic()} == {Model.ON_DEMAND}


def test_a_job_of_one_region_buys_on_demand_at_home_at_once() -> None:
    world = begun()
    gen = world.record().gen
    lost(world)
    world.until(lambda: world.training() and world.record().gen > gen)
    assert zones(world) == {"z-a"} and {machine.vm.model for machine in world.dynamic()} == {Model.ON_DEMAND}


def test_a_gang_whose_zone_recovers_meanwhile_stays_and_releases_its_probes() -> None:
    """A machine abroad that never boots keeps the gang from nothing for longer than a boot may take."""
    world = begun(regions=(HOME, ABROAD))
    gen, insert = world.record().gen, world._insert

    def mute(action: InsertVm) -> tuple[ResultKind, str]:
        told = insert(action)
        for machine in world.dynamic():
            if machine.vm.zone != "z-a":
                machine.up_at = math.inf
        return told

    world._insert = mute  # type: ignore[method-assign]
    lost(world)
    world.until(lambda: all(node.probing for node in world.record().nodes))
    world.capacity["z-a", Model.SPOT] = 100
    world.until(lambda: world.training() and world.record().gen > gen, 1200)
    assert zones(world) == {"z-a"}
    world.run(300)
    assert {machine.vm.zone for machine in world.dynamic()} == {"z-a"}
