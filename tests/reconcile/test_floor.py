"""A static node that idles costs the same without a job: who begins takes it before anything is bought."""

from __future__ import annotations

from msgspec.structs import replace
from spotkeeper.spec.ledger import Event
from spotkeeper.spec.model import Model
from spotkeeper.spec.stack import Price, StackState

from tests.reconcile.world import JOB, ZONES, World, stack

SECOND = "bcde2345"


def dear_at_home(static: int = 1) -> StackState:
    """The nodes are in z-a, where spot costs more than elsewhere."""
    plain = stack(static=static)
    pools = tuple(replace(pool, prices={**pool.prices, "z-a": Price(on_demand=1.0, spot=0.9)}) for pool in plain.pools)
    return replace(plain, pools=pools)


def full(world: World) -> World:
    for zone in ZONES:
        world.capacity |= {(zone, Model.SPOT): 0, (zone, Model.ON_DEMAND): 0}
    return world


def wants(world: World, job: str = JOB) -> list[tuple[Model | None, str | None]]:
    return [(entry.model, entry.zone) for entry in world.events(Event.INTENT, job=job)]


def test_an_idle_node_is_taken_though_spot_is_cheaper_in_another_zone() -> None:
    """Its grant and the zone are not one write: between them the node is no longer free, but ours."""
    world = World(nodes=1, the_stack=dear_at_home())
    world.run(10)
    world.submit()
    world.until(world.training)
    assert wants(world) == [(Model.STATIC, "z-a")]


def test_a_gang_with_too_few_nodes_still_begins_in_their_zone() -> None:
    world = World(nodes=2, the_stack=dear_at_home())
    world.run(10)
    world.submit()
    world.until(world.training)
    assert sorted(wants(world)) == [(Model.SPOT, "z-a"), (Model.STATIC, "z-a")]


def test_a_gang_that_went_elsewhere_comes_back_to_a_node_that_is_free_by_now() -> None:
    world = full(World(nodes=1, the_stack=stack(static=1), steps=100, max_on_demand=0))
    world.run(10)
    world.submit()
    world.until(world.training)
    world.submit(SECOND)
    world.run(30)
    assert world.record(SECOND).zone != "z-a"
    world.until(lambda: world.training(SECOND), 240)
    assert wants(world, SECOND)[-1] == (Model.STATIC, "z-a")


def test_nodes_that_are_too_few_do_not_call_a_gang_back_to_a_zone_that_refused_the_rest() -> None:
    """Once it has a node there it is bound to it; where it is now there may be room for all of it sooner."""
    world = full(World(nodes=2, the_stack=stack(static=1), max_on_demand=0))
    world.submit()  # before the node says hello
    before = world.record().zone
    assert before != "z-a"
    world.run(120)
    assert world.record().zone == before and all(model is Model.SPOT for model, _ in wants(world))


def test_a_job_that_waits_says_for_what_though_another_has_the_node() -> None:
    """A node that is taken is no cap of a pool; and a job that waits for capacity remembers since when."""
    world = full(World(nodes=1, the_stack=stack(static=1)))
    world.run(10)
    world.submit()
    world.until(world.training)
    for number, (spec, reason) in enumerate(
        (
            ({"max_on_demand": 0}, "waiting for spot capacity in z-c: the job's own max_on_demand is 0"),
            ({"policy": "on-demand", "max_on_demand": 0}, "waiting: the job's own max_on_demand is 0"),
            ({"policy": "spot", "max_on_demand": 0}, "waiting for capacity in z-c"),
            ({"pools": ("fix",)}, "waiting for a static node: other jobs have them, or they are down"),
        ),
        start=2,
    ):
        job = f"bcde234{number}"
        world.spec = replace(world.spec, **{"max_on_demand": None, "policy": "balanced", "pools": (), **spec})
        world.submit(job)
        world.run(30)
        assert world.record(job).reason == reason
        assert (world.record(job).dry_since is None) is ("pools" in spec)


def test_pools_at_their_caps_are_told_as_such() -> None:
    world = World(nodes=2, the_stack=stack(max_nodes=1))
    world.submit()
    world.run(30)
    assert world.record().reason == "waiting: the stack's pools are at their caps"
