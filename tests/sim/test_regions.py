"""Home runs dry and a gang goes abroad and comes back, also if the function is killed on the way.

No step is lost, and nothing is left in either region.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from spotkeeper.contract.job import RequestKind
from spotkeeper.contract.stack import StackState
from tests.sim.ec2 import Ec2Cloud, on_ec2
from tests.sim.scenarios import JOB, Play, Scenario, perform
from tests.sim.test_crash_points import effects, kill
from tests.sim.test_ledger import PERCENT, books
from tests.sim.world import World
from tests.sizes import WHOLE

Declared = Callable[[StackState], StackState]
HOME, ABROAD = "z", "y"
EVERY = 1 if WHOLE else 24  # effects at which the function is killed; a play on EC2 takes ten times as long


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


@pytest.mark.parametrize(("on", "every"), [(two_regions, EVERY), (two_regions_of_ec2, EVERY if WHOLE else 10 * EVERY)])
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
