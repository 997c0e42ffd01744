"""A stop that nobody asked for, for a cheaper machine or to grow, is made only where it costs no work."""

from __future__ import annotations

import pytest

from spotkeeper.contract.job import Nodes, RequestKind
from spotkeeper.contract.ledger import Event
from spotkeeper.contract.stack import Model
from tests.reconcile.decide.gang.test_resize import refused, trained
from tests.reconcile.world import ZONES, World

LOOP = 200


def without_savings(world: World) -> World:
    """A script without the two lines."""
    world.saves = False
    return world


def after_its_loop(world: World) -> World:
    """Its steps are done after 200 s, and saved; an evaluation goes on and on."""
    world.loop_steps = LOOP
    return world


def on_demand(world: World) -> World:
    """It began on demand, for there was no spot; now there is."""
    for zone in ZONES:
        world.capacity[zone, Model.SPOT] = 0
    trained(world)
    world.run(LOOP)
    world.capacity.clear()
    return world


def smaller(world: World) -> World:
    """It began with one node of two, for there was no more room; now there is."""
    for zone in ZONES:
        world.capacity |= {(zone, Model.SPOT): 1, (zone, Model.ON_DEMAND): 0}
    trained(world)
    world.run(LOOP)
    assert world.record().members == (0,)
    world.capacity.clear()
    return world


@pytest.mark.parametrize("kind", [without_savings, after_its_loop])
def test_no_swap_to_spot_loses_work(kind: object) -> None:
    world = on_demand(kind(World(nodes=1)))  # type: ignore[operator]
    wanted = len(world.events(Event.INTENT))
    world.run(3600)
    assert world.record().gen == 1 and world.training()
    assert len(world.events(Event.INTENT)) == wanted, "no machine boots for nothing"


@pytest.mark.parametrize("kind", [without_savings, after_its_loop])
def test_no_growth_loses_work(kind: object) -> None:
    world = smaller(kind(World(nodes=Nodes(1, 2))))  # type: ignore[operator]
    world.run(1200)
    assert world.record().gen == 1 and world.training()
    assert len(world.dynamic()) == 1, "no machine idles beside it"


def test_a_swap_is_given_up_when_the_loop_ends() -> None:
    world = on_demand(World(nodes=1, boot_s=100.0))
    world.until(lambda: world.record().nodes[0].next is not None, 3600)
    agent = world.member(0).agent
    assert agent is not None
    world.loop_steps = agent.step_no + 5
    world.run(400)
    assert world.record().gen == 1 and world.training()
    assert [machine.vm.model for machine in world.dynamic()] == [Model.ON_DEMAND]


@pytest.mark.parametrize("kind", [without_savings, after_its_loop])
@pytest.mark.parametrize(
    ("verb", "more"),
    [
        (RequestKind.SWAP, {"node": 0}),
        (RequestKind.MOVE, {"zone": "z-b"}),
        (RequestKind.RESIZE, {"nodes": 3}),
        (RequestKind.PAUSE, {}),
    ],
)
def test_a_users_request_may_lose_work(kind: object, verb: RequestKind, more: dict[str, object]) -> None:
    world = kind(World(nodes=Nodes(1, 3)))  # type: ignore[operator]
    trained(world)
    if verb is RequestKind.RESIZE:
        world.request(RequestKind.RESIZE, nodes=1)
        world.until(lambda: world.training() and world.record().members == (0,), 600)
    world.run(LOOP)
    before = world.record().gen
    world.request(verb, **more)
    assert "refused" not in refused(world)
    if verb is RequestKind.PAUSE:
        world.request(RequestKind.RESUME)
    world.until(lambda: world.record().gen > before and world.training(), 600)
