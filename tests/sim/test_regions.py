"""Home runs dry and a gang goes abroad, also if the function is killed on the way: no step is lost, nothing is left."""

from __future__ import annotations

from msgspec.structs import replace

from spotkeeper.contract.stack import StackState
from tests.sim.scenarios import JOB, Play, Scenario, perform
from tests.sim.test_crash_points import effects, kill
from tests.sizes import WHOLE

HOME, ABROAD = "z", "y"
EVERY = 1 if WHOLE else 12  # effects at which the function is killed


def two_regions(stack: StackState) -> StackState:
    """One zone at home and two abroad, which are a little more expensive."""
    (pool,) = stack.pools
    zones = dict(zip(pool.zones, ("z-a", "y-b", "y-c"), strict=True))
    prices = {zones[zone]: price for zone, price in pool.prices.items()}
    there = replace(pool, zones=tuple(zones.values()), prices=prices)
    return replace(stack, region=HOME, regions=(HOME, ABROAD), pools=(there,))


def _runs_dry(play: Play) -> None:
    play.spot(0)
    for node in (0, 1):
        play.preempt(node, 120)


def _is_abroad(play: Play) -> bool:
    record = play.world.record(JOB)
    return play.on and record.zone == "y-b" and record.move is None


STORY = Scenario("abroad", _runs_dry, _is_abroad, regions=(HOME, ABROAD))


def test_a_gang_goes_abroad_without_a_step_lost_and_leaves_nothing() -> None:
    told = perform(STORY, on=two_regions)
    assert (told.why, told.lost) == ("", 0)
    points = effects(told)
    assert len(points) >= 15
    why = {at: again.why for at in points[3::EVERY] if (again := perform(STORY, kill(at), on=two_regions)).why}
    assert why == {}
