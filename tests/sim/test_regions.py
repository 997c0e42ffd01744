"""Home runs dry and a gang goes abroad and comes back, also if the function is killed on the way.

No step is lost, and nothing is left in either region.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from spotkeeper.contract.job import RequestKind
from spotkeeper.contract.ledger import Event
from spotkeeper.contract.stack import StackState
from spotkeeper.report.money.money import money
from tests.reconcile.clouds.ec2.standin.site import Fault, LostError
from tests.sim.ec2 import Ec2Cloud, on_ec2
from tests.sim.scenarios import JOB, Play, Scenario, perform
from tests.sim.test_crash_points import effects, kill
from tests.sim.test_ledger import PERCENT, books
from tests.sim.world import World, small_stack
from tests.sizes import WHOLE

Declared = Callable[[StackState], StackState]
HOME, ABROAD = "z", "y"
EVERY = 1 if WHOLE else 48  # effects at which the function is killed; a play on EC2 takes ten times as long


def two_regions(stack: StackState) -> StackState:
    """One zone at home and two abroad, which are a little more expensive."""
    (pool,) = stack.pools
    zones = dict(zip(pool.zones, ("z-a", "y-b", "y-c"), strict=True))
    prices = {zones[zone]: price for zone, price in pool.prices.items()}
    there = replace(pool, zones=tuple(zones.values()), prices=prices)
    egress = {HOME: {ABROAD: 0.02}, ABROAD: {HOME: 0.02}}
    return replace(stack, region=HOME, regions=(HOME, ABROAD), pools=(there,), egress=egress)


def two_regions_of_ec2(stack: StackState) -> StackState:
    """There a snapshot is in one region, and goes along as a copy."""
    return on_ec2(two_regions(stack))


def _runs_dry(play: Play) -> None:
    play.spot(0)
    for node in (0, 1):
        play.preempt(node, 120)
    play.world.engine.after(5.0, lambda: _recovers(play))


def _recovers(play: Play) -> None:
    """Home has machines again, once the gang trains abroad."""
    if play.on and _there(play, "y-b"):
        play.spot(None)
        play.world.request(JOB, RequestKind.MOVE, zone="z-a")
    else:
        play.world.engine.after(5.0, lambda: _recovers(play))


def _there(play: Play, zone: str) -> bool:
    record = play.world.record(JOB)
    return record.zone == zone and record.move is None


def _is_back(play: Play) -> bool:
    return play.on and _there(play, "z-a") and play.world.record(JOB).gen >= play.gen + 2


STORY = Scenario("abroad and back", _runs_dry, _is_back, regions=(HOME, ABROAD))


@pytest.mark.parametrize(("on", "every"), [(two_regions, EVERY), (two_regions_of_ec2, EVERY if WHOLE else 30 * EVERY)])
def test_a_gang_goes_abroad_and_back_without_a_step_lost_and_leaves_nothing(on: Declared, every: int) -> None:
    worlds: list[World] = []
    told = perform(STORY, worlds.append, on=on)
    assert (told.why, told.lost) == ("", 0)
    if isinstance(cloud := worlds[0].cloud, Ec2Cloud):
        copies = {region: site.calls["CopySnapshot"] for region, site in cloud.sites.items()}
        # Of two nodes' disks, in both directions. Two rounds at once may copy one twice: EC2 has no key for copies.
        assert all(2 <= copies[region] <= 4 for region in (HOME, ABROAD)), copies
        assert not any(site.snapshots for site in cloud.sites.values())
    points = effects(told)
    assert len(points) >= 30
    why = {at: again.why for at in points[3::every] if (again := perform(STORY, kill(at), on=on)).why}
    assert why == {}


def test_the_ledger_equals_the_bill_with_its_egress() -> None:
    """Also where the function is killed while the disks are copied."""
    points = effects(perform(STORY, on=two_regions))
    for at in (None, *points[5::EVERY]):
        found = books(STORY, at, two_regions)
        assert found.moved > 0 and found.told == pytest.approx(found.moved), at
        assert found.error_percent <= PERCENT, at


def _trains_at_home(world: World, gen: int) -> bool:
    record = world.record(JOB)
    return record.move is None and record.zone == "z-a" and world.jobs[JOB].training and record.gen > gen


def _broken(fault: Callable[[Ec2Cloud], None]) -> tuple[World, Ec2Cloud]:
    """A gang on EC2 is asked to go abroad, and once its snapshots are complete, something happens to the copies."""
    world = World(stack=two_regions_of_ec2(small_stack(3)), seed=3)
    cloud = world.cloud
    assert isinstance(cloud, Ec2Cloud)
    world.submit(JOB, nodes=2, interval_s=60.0, regions=(HOME, ABROAD))
    assert world.until(lambda: world.jobs[JOB].training, 600)
    world.run(90)
    gen, disks = world.record(JOB).gen, [node.disk for node in world.record(JOB).nodes]
    world.request(JOB, RequestKind.MOVE, zone="y-b")
    assert world.until(lambda: len(cloud.sites[HOME].snapshots) == 2, 600)
    fault(cloud)
    assert world.until(lambda: _trains_at_home(world, gen), 1200), world.record(JOB)
    assert [node.disk for node in world.record(JOB).nodes] == disks
    assert sum(steps for _, steps in world.jobs[JOB].lost) == 0
    assert [entry.cause for entry in world.store.list_ledger(JOB) if entry.event is Event.MOVE] == ["asked", "refused"]
    return world, cloud


def _ends_clean(world: World, cloud: Ec2Cloud) -> None:
    """Nothing is left in either region, and what went abroad is in the ledger."""
    world.request(JOB, RequestKind.CANCEL)
    assert world.until(lambda: not world.left_over(), 900), world.left_over()
    billed = sum(world.stack.egress_usd(one.source, one.target, one.gb) for one in cloud.transfers)
    assert money(world.store.list_ledger(JOB), world.stack, world.engine.t).egress == pytest.approx(billed)
    assert world.violations == []


@pytest.mark.parametrize("copies", [0, 1])
def test_a_move_whose_copy_ec2_refuses_ends_at_home(copies: int) -> None:
    """Of the first disk, or of the second one while the first is being copied."""

    def refused(cloud: Ec2Cloud) -> None:
        site = cloud.sites[ABROAD]
        fault = Fault("CopySnapshot", "SnapshotCopyUnsupported.InterRegion", times=0)
        site.faults.append(fault)

        def begin() -> None:
            fault.times = 999

        cloud.world.until(lambda: site.calls["CopySnapshot"] >= copies, 300)
        begin()

    world, cloud = _broken(refused)
    assert len(cloud.sites[ABROAD].copied) == copies
    _ends_clean(world, cloud)


def test_a_move_to_a_region_that_stops_answering_ends_at_home() -> None:
    """In the middle of the copies; what it has of them is deleted once it answers again."""
    silent: list[bool] = [False]

    def silence(cloud: Ec2Cloud) -> None:
        service = cloud.services[ABROAD]
        handle = service.handle

        def unless_silent(body: bytes) -> tuple[int, bytes]:
            if silent[0]:
                raise LostError("silent")
            return handle(body)

        service.handle = unless_silent  # type: ignore[method-assign]
        assert cloud.world.until(lambda: bool(cloud.sites[ABROAD].copied), 300)
        silent[0] = True
        cloud.changed()

    world, cloud = _broken(silence)
    assert cloud.sites[ABROAD].snapshots
    silent[0] = False
    cloud.changes += 1
    assert world.until(lambda: not cloud.sites[ABROAD].snapshots, 300)
    _ends_clean(world, cloud)
