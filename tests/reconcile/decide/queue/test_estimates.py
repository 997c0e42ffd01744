"""What a job's claim tells the queue of it, and when it is told anew."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from spotkeeper.contract.allocation import Claim, Stop
from spotkeeper.contract.stack import Model, TeamState
from tests.reconcile.world import JOB, World, stack

SECOND = "wxyz2345"
MINUTE = 60.0


def claim_of(world: World, job: str = JOB) -> Claim:
    found = world.memory.allocation[0].claim(job)
    assert found is not None
    return found


@pytest.mark.parametrize(("stop", "told"), [("save", Stop.SAVED), ("signal", Stop.NEVER)])
def test_a_claim_tells_whether_a_stop_loses_steps(stop: str, told: Stop) -> None:
    """A script that saves only by itself may lose all; the others have saved, once they have trained for a while."""
    world = World(the_stack=stack(max_machines=4), nodes=2)
    world.spec = replace(world.spec, stop=stop)
    world.submit(JOB)
    world.until(world.training)
    world.submit(SECOND)
    world.until(lambda: world.training(SECOND))
    world.spec = replace(world.spec, stop="save")
    world.submit("third222")
    world.run(20 * MINUTE)
    assert claim_of(world, "third222").waiting
    assert claim_of(world).stop is told


def written_in(world: World, minutes: float) -> int:
    """How often the allocation is written in this time."""
    before = world.memory.allocation[0].ver
    world.run(minutes * MINUTE)
    return world.memory.allocation[0].ver - before


def long_runs(machines: int) -> World:
    world = World(the_stack=stack(max_machines=machines), nodes=2, steps=20_000)
    world.loop_steps, world.step_s = 20_000, 1.0
    return world


def waited_for() -> World:
    """A long job has all machines, and another one waits for them."""
    world = long_runs(2)
    world.submit(JOB)
    world.until(world.training)
    world.submit(SECOND)
    world.run(20 * MINUTE)
    return world


def test_estimates_are_written_anew_only_where_another_job_may_need_them() -> None:
    world = long_runs(4)
    for job in (JOB, SECOND):
        world.submit(job)
        world.until(lambda job=job: world.training(job))
    world.run(20 * MINUTE)
    world.step_s = 3.0
    assert written_in(world, 60) == 0, "nobody waits"


def test_an_estimate_is_written_again_when_it_has_changed_much() -> None:
    world = waited_for()
    before = claim_of(world)
    assert claim_of(world, SECOND).waiting and before.ends is not None
    world.step_s = 1.01
    assert written_in(world, 5) == 0
    world.step_s = 3.0
    assert written_in(world, 5) == 1
    after = claim_of(world).ends
    assert after is not None and after - world.t > 2.5 * (before.ends - world.t)


def test_a_job_whose_team_is_not_known_yet_says_so() -> None:
    team = TeamState("vision", ("ann",), max_machines=4)
    world = World(the_stack=replace(stack(max_machines=4), teams=(team,)), nodes=2)
    world.submit(JOB)
    world.step()
    world.step()
    assert world.record().reason == "waiting to hear whose job it is"
    assert not world.memory.allocation[0].claims


def test_a_job_that_waits_only_for_others_says_that_the_machines_are_taken() -> None:
    world = World(the_stack=stack(max_machines=2), nodes=2)
    world.submit(JOB)
    world.until(world.training)
    world.submit(SECOND)
    world.run(2 * MINUTE)
    assert world.record(SECOND).reason == (
        "waiting in the queue: the machines that it may use are taken; spotkeeper queue shows its place"
    )


def test_a_claim_tells_which_machines_the_cloud_refuses_until_all_have_come() -> None:
    world = World(the_stack=stack(max_machines=8), nodes=2)
    for zone in world.stack.pools[0].zones:
        for model in Model:
            world.capacity[zone, model] = 0
    world.submit(JOB)
    world.run(5 * MINUTE)
    found = claim_of(world)
    assert found.short is not None and found.dry_since == found.short.since
    assert found.short.count == 2
    assert found.short.offers == tuple(f"pool/{zone}" for zone in world.stack.pools[0].zones)
    world.capacity.clear()
    world.until(world.training)
    world.run(2 * MINUTE)
    assert (claim_of(world).short, claim_of(world).dry_since) == (None, None)


def test_a_job_is_about_to_end_since_it_first_said_so() -> None:
    """Else one that always says that a few steps are left would keep its machines forever."""
    world = waited_for()
    assert claim_of(world).ending is None
    world.step_s = 0.01
    world.run(5 * MINUTE)
    since = claim_of(world).ending
    assert since is not None and 0 <= world.t - since <= 5 * MINUTE
    world.step_s = 5.0
    world.run(5 * MINUTE)
    assert (claim_of(world).ends or 0.0) > world.t + 60 * MINUTE and claim_of(world).ending == since
