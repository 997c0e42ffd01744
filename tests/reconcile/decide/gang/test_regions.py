"""A gang goes abroad when home is dry, if its file allows it; a region that does not answer stops no other's jobs."""

from __future__ import annotations

import math

import pytest
from msgspec.structs import replace

from spotkeeper.contract.cloud import DeleteDisk, InsertVm, ResultKind
from spotkeeper.contract.job import RequestKind
from spotkeeper.contract.ledger import Event
from spotkeeper.contract.record import PROBE, Outcome, Phase, SlotState
from spotkeeper.contract.stack import Model, Price, StackState
from tests.reconcile.world import JOB, World, stack

ACCEPTED = ResultKind.ACCEPTED
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


@pytest.mark.parametrize(
    ("policy", "told"), [("balanced", ["z-a -> y-b"]), ("on-demand", ["z-a -> z-b", "z-b -> y-b"])]
)
def test_a_gang_does_not_go_to_and_fro_between_dry_zones(policy: str, told: list[str]) -> None:
    """Home is cheaper, but refused a few minutes ago; abroad has not been asked. On spot it asks before it moves."""
    near, far = ("z-a", "z-b"), "y-b"
    world = World(2, the_stack=both((*near, far)), regions=(HOME, ABROAD), policy=policy)
    world.submit()
    world.until(lambda: world.training() and world.newest is not None)
    for zone in near:
        dry(world, zone)
    for node in (0, 1):
        world.preempt(node, 120.0)
    world.until(lambda: world.record().zone == far and world.training(), 3600)
    moves = [entry.detail for entry in world.events(Event.MOVE) if "->" in entry.detail]
    assert moves == told


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


def test_a_lost_region_keeps_only_the_grants_of_its_own_machines() -> None:
    """However many machines home loses meanwhile; nothing is requested in the lost region, since that may come late."""
    world = begun(regions=(HOME, ABROAD))
    world.request(RequestKind.MOVE, zone="y-b")
    world.until(lambda: all(node.next for node in world.record().nodes))
    world.blind |= {"y-b", "y-c"}
    at = len(requested(world))
    for gen in range(1, 4):
        world.until(lambda gen=gen: world.training() and world.record().gen >= gen, 2400)  # type: ignore[misc]
        world.preempt(gen % 2)
        world.run(120)
    lost(world)
    world.run(600)
    grants = world.store.read_allocation().value.grants
    assert sum(grant.zone == "y-b" for grant in grants) == 2 and len(grants) <= 4, grants
    assert {zone for zone, *_ in requested(world)[at:]} == {"z-a"}
    world.blind.clear()
    world.until(lambda: len(world.store.read_allocation().value.grants) == 2, 1200)


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
    perform = world._perform
    world._perform = lambda action: (ACCEPTED, "") if isinstance(action, DeleteDisk) else perform(action)  # type: ignore[method-assign]
    world.request(RequestKind.MOVE, zone="z-a")
    world.until(lambda: world.record().zone == "z-a")
    world.blind |= {"y-b", "y-c"}
    world._perform = perform  # type: ignore[method-assign]
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


@pytest.mark.parametrize("notice_s", [30.0, 120.0, 600.0])
def test_a_gang_with_notices_for_all_machines_goes_where_spot_is_before_it_buys_on_demand(notice_s: float) -> None:
    """It trains on until the machines there stand by, or until its own go."""
    world = begun(regions=(HOME, ABROAD))
    before, gen = len(requested(world)), world.record().gen
    lost(world, notice_s)
    world.until(lambda: world.training() and world.record().gen > gen, 1200)
    assert zones(world) == {"y-b"} and {zone for _, zone in world.drives} == {"y-b"}
    assert set(requested(world)[before:]) == {("z-a", Model.SPOT, "notice"), ("y-b", Model.SPOT, "probe")}
    assert [entry.cause for entry in world.events(Event.MOVE)] == ["stockout", "move"]
    assert sum(entry.again or 0 for entry in world.events(Event.GENERATION)) == 0
    world.run(300)
    assert len(world.dynamic()) == 2 and len(world.drives) == 2


def test_a_machine_abroad_takes_no_place_before_the_whole_gang_goes() -> None:
    """One of two is up there before its node's machine goes, the other one after."""
    world = begun(regions=(HOME, ABROAD))
    lost(world, 60.0)
    world.until(lambda: len([one for one in world.dynamic() if one.vm.zone == "y-b"]) == 2)
    next(one for one in world.dynamic() if one.vm.zone == "y-b" and one.vm.node == 1).up_at += 120.0
    while world.record().move is None:
        assert zones(world) <= {"z-a", None} and all(node.probing for node in world.record().nodes)
        world.step()
    world.until(lambda: world.record().zone == "y-b" and world.training())


def test_where_no_region_has_spot_a_gang_with_notices_buys_on_demand_at_home() -> None:
    world = begun(regions=(HOME, ABROAD))
    gen = world.record().gen
    for zone in ZONES:
        world.capacity[zone, Model.SPOT] = 0
    lost(world, 120.0)
    world.until(lambda: world.training() and world.record().gen > gen, 300)
    slots = [node.cur for node in world.record().nodes]
    assert {(slot.zone, slot.model) for slot in slots if slot} == {("z-a", Model.ON_DEMAND)}


def test_a_notice_for_one_of_two_machines_is_no_reason_to_go_abroad() -> None:
    world = begun(regions=(HOME, ABROAD))
    gen = world.record().gen
    world.capacity["z-a", Model.SPOT] = 0
    world.preempt(0, 120.0)
    world.until(lambda: world.training() and world.record().gen > gen, 300)
    assert zones(world) == {"z-a"}


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
    gen = world.record().gen
    mute(world)
    lost(world)
    world.until(lambda: all(node.probing for node in world.record().nodes))
    world.capacity["z-a", Model.SPOT] = 100
    world.until(lambda: world.training() and world.record().gen > gen, 1200)
    assert zones(world) == {"z-a"}
    world.run(300)
    assert {machine.vm.zone for machine in world.dynamic()} == {"z-a"}


# -- a user's move: machines are there first


@pytest.mark.parametrize(("asked", "zone"), [("y-c", "y-c"), (ABROAD, "y-b")])
def test_a_requested_move_has_machines_there_before_the_gang_stops(asked: str, zone: str) -> None:
    """It stands still for one save, the copies and one restore: for no boot."""
    world = begun(regions=(HOME, ABROAD))
    gen = world.record().gen
    world.request(RequestKind.MOVE, zone=asked)
    while world.record().move is None:
        assert world.training() and world.record().gen == gen
        world.step()
    assert {(n.next.zone, n.next.state) for n in world.record().nodes if n.next} == {(zone, SlotState.ADMITTED)}
    world.until(lambda: world.record().zone == zone and world.training())
    assert [entry.detail for entry in world.events(Event.MOVE)] == [f"z-a -> {zone}", f"the disks are in {zone}"]
    assert [entry.cause for entry in world.events(Event.MOVE)] == ["asked", "move"]
    assert sum(entry.again or 0 for entry in world.events(Event.GENERATION)) == 0
    world.run(300)
    assert len(world.dynamic()) == 2 and len(world.drives) == 2 and world.record().asked_zone is None


@pytest.mark.parametrize("machines", [0, 1])
def test_a_requested_move_that_the_cloud_refuses_ends_at_home(machines: int) -> None:
    """All or none; and spot is not left for on-demand."""
    world = begun(regions=(HOME, ABROAD))
    gen = world.record().gen
    world.capacity["y-b", Model.SPOT] = machines
    world.request(RequestKind.MOVE, zone="y-b")
    world.until(lambda: bool(world.events(Event.MOVE)))
    assert world.training() and world.record().gen == gen
    (ended,) = world.events(Event.MOVE)
    assert (ended.cause, ended.detail) == ("refused", "y-b: the cloud has no capacity for all nodes")
    world.run(120)
    assert world.record().gen == gen and {machine.vm.zone for machine in world.dynamic()} == {"z-a"}


def test_a_region_that_refuses_in_one_zone_is_asked_in_the_next() -> None:
    world = begun(regions=(HOME, ABROAD))
    world.capacity["y-b", Model.SPOT] = 1
    world.request(RequestKind.MOVE, zone=ABROAD)
    world.until(lambda: world.record().zone == "y-c" and world.training())
    assert [entry.cause for entry in world.events(Event.MOVE)] == ["asked", "move"]


@pytest.mark.parametrize(("notice_s", "then"), [(120.0, "z-a"), (None, "y-b")])
def test_a_requested_move_begins_after_a_replacement_and_at_once_if_the_gang_stands(
    notice_s: float | None, then: str
) -> None:
    world = begun(regions=(HOME, ABROAD))
    world.request(RequestKind.MOVE, zone="y-b")
    world.until(lambda: all(node.probing for node in world.record().nodes))
    world.preempt(0, notice_s)
    world.until(lambda: world.training() and world.record().gen == 2)
    assert zones(world) == {then}
    world.until(lambda: world.record().zone == "y-b" and world.training())


def test_a_requested_move_is_cancelled_before_it_begins() -> None:
    world = begun(regions=(HOME, ABROAD))
    world.request(RequestKind.MOVE, zone="y-b")
    world.until(lambda: all(node.probing for node in world.record().nodes))
    world.request(RequestKind.MOVE, zone="z-a")
    world.run(60)
    assert [(one.cause, one.detail) for one in world.events(Event.MOVE)] == [("cancelled", "y-b")]
    assert world.training() and world.record().gen == 1 and len(world.dynamic()) == 2


def test_without_room_for_the_gang_twice_the_new_machines_follow_the_copies() -> None:
    world = begun(regions=(HOME, ABROAD))
    pool = replace(world.stack.pools[0], max_machines=3)
    world.stack = world.memory.stack = replace(world.stack, pools=(pool,))
    world.request(RequestKind.MOVE, zone="y-b")
    world.until(lambda: world.record().zone == "y-b" and world.training())
    assert PROBE not in {cause for *_, cause in requested(world)}


def test_a_requested_move_without_machines_there_ends_after_half_an_hour() -> None:
    """Nothing there says hello."""
    world = begun(regions=(HOME, ABROAD))
    mute(world)
    gen = world.record().gen
    world.request(RequestKind.MOVE, zone="y-b")
    world.until(lambda: bool(world.events(Event.MOVE)), 3600)
    assert [one.detail for one in world.events(Event.MOVE)] == [
        "the gang had no machine for each node there within 30 min"
    ]
    assert world.record().gen == gen and world.training()


def mute(world: World) -> None:
    """Machines outside the home zone run and say nothing."""
    insert = world._insert

    def inserted(action: InsertVm) -> tuple[ResultKind, str]:
        told = insert(action)
        for machine in world.dynamic():
            if machine.vm.zone != "z-a":
                machine.up_at = math.inf
        return told

    world._insert = inserted  # type: ignore[method-assign]
