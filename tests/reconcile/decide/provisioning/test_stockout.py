"""Spot is gone everywhere and comes back in one zone alone: the job finds it, wherever it has asked in vain before."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from spotkeeper.contract.allocation import Allocation, Grant
from spotkeeper.contract.cloud import Offer
from spotkeeper.contract.ledger import Event
from spotkeeper.contract.record import Node
from spotkeeper.contract.stack import Model
from spotkeeper.reconcile.decide.draft import Draft
from spotkeeper.reconcile.decide.provisioning import reservations
from tests.reconcile.decide.test_decide import NOW
from tests.reconcile.decide.test_guards import calm, on_node, on_record, on_snapshot
from tests.sim.world import ZONES, Job, World, small_stack

JOB = "abcdefgh"


def dry(world: World, *zones: str) -> None:
    for zone in zones:
        world.cloud.limits[zone, Model.SPOT] = 0


def found(world: World, job: Job) -> str:
    """The zone in which it trains; capacity has come back in one that it did not ask last."""
    back = next(zone for zone in ZONES if zone != world.record(JOB).zone)
    del world.cloud.limits[back, Model.SPOT]
    assert world.until(lambda: job.training, 3600.0), [entry.zone for entry in world.store.list_ledger(JOB)]
    assert world.violations == [] and world.record(JOB).zone == back
    return back


@pytest.mark.parametrize(
    ("nodes", "hours", "policy"), [(1, 3.0, "balanced"), (1, 0.5, "spot"), (3, 0.5, "spot"), (3, 1.0, "shuffle")]
)
def test_a_job_that_has_not_begun_tries_every_zone_again(nodes: int, hours: float, policy: str) -> None:
    """It asked the last zone for ever: what the others had refused long ago was cold again with each refusal."""
    world = World(stack=small_stack(nodes))
    dry(world, *ZONES)
    job = world.submit(JOB, nodes=nodes, policy=policy)
    world.run(hours * 3600.0)
    assert not job.training
    assert world.record(JOB).reason.startswith("waiting for capacity in any zone"), "it is bound to none yet"
    found(world, job)


def test_a_job_that_has_trained_moves_to_a_zone_with_spot() -> None:
    world = World(stack=small_stack(2))
    job = world.submit(JOB, nodes=2)
    assert world.until(lambda: job.training, 1800.0)
    dry(world, *ZONES)
    for machine in list(world.cloud.of(JOB)):
        world.preempt(machine, -1.0)
    world.run(2 * 3600.0)
    assert not job.training
    found(world, job)


def test_a_job_whose_zone_left_its_pool_moves_at_once() -> None:
    """Its machines stay until they are lost; after that the zone has no capacity, however long the job waits."""
    world = World(stack=small_stack(2))
    job = world.submit(JOB, nodes=2)
    assert world.until(lambda: job.training, 1800.0)
    home, (pool,) = world.record(JOB).zone, world.stack.pools
    zones = tuple(zone for zone in pool.zones if zone != home)
    prices = {zone: pool.prices[zone] for zone in zones}
    world.store.stack = replace(world.stack, pools=(replace(pool, zones=zones, prices=prices),))
    world.run(600.0)
    assert job.training, "what runs there goes on"
    for machine in list(world.cloud.of(JOB)):
        world.preempt(machine, -1.0)
    reasons: set[str] = set()
    assert world.until(lambda: bool(reasons.add(world.record(JOB).reason)) or not job.training, 300.0)
    assert world.until(lambda: bool(reasons.add(world.record(JOB).reason)) or world.record(JOB).zone in zones, 200.0)
    assert f"waiting: zone {home} was removed from the job's pools, so the job moves as soon as it can" in reasons
    assert world.until(lambda: job.training, 600.0) and world.violations == []


def test_an_on_demand_fallback_ends_with_a_move_to_another_zone() -> None:
    """A gang that moved to a zone with spot bought on-demand there until the end of the fallback."""
    world = World(stack=small_stack(2, on_demand=2))
    job = world.submit(JOB, nodes=2)
    assert world.until(lambda: job.training, 1800.0)
    home = world.record(JOB).zone
    assert home is not None
    for model in (Model.SPOT, Model.ON_DEMAND):
        world.cloud.limits[home, model] = 0
    for machine in list(world.cloud.of(JOB)):
        world.preempt(machine, -1.0)
    world.run(60.0)
    assert world.until(lambda: world.record(JOB).fallback_until > world.engine.t, 600.0), "the zone has no spot"
    until = world.record(JOB).fallback_until
    assert world.until(lambda: job.training, 3600.0) and world.record(JOB).zone != home
    assert world.engine.t < until, "the fallback would last"
    assert {node.cur.model for node in world.record(JOB).nodes if node.cur} == {Model.SPOT}
    assert world.violations == []


@pytest.mark.parametrize(
    ("policy", "refused", "model", "zone"),
    [
        ("balanced", ("spot z-b",), Model.SPOT, "z-a"),
        ("balanced", ("spot z-a", "spot z-b"), Model.SPOT, "z-c"),
        ("balanced", ("spot z-a", "spot z-b", "spot z-c"), Model.ON_DEMAND, "z-b"),
        ("on-demand", ("on-demand z-a",), Model.ON_DEMAND, "z-b"),
        ("on-demand", ("on-demand z-b",), Model.ON_DEMAND, "z-a"),
        ("spot", ("spot z-b", "spot z-c"), Model.SPOT, "z-a"),
    ],
)
def test_a_gang_without_data_leaves_its_zone_for_spot_but_not_for_on_demand_that_it_has_there(
    policy: str, refused: tuple[str, ...], model: Model, zone: str
) -> None:
    record, seen = calm(1, policy=policy)
    offers = tuple("pool/{1}/{0}".format(*one.split()) for one in refused)
    node = Node(top=1, zone="z-b", refused=offers, refused_at=NOW)
    draft = Draft(replace(record, gen=0, members=(), zone="z-b", nodes=(node,)), seen)
    reservations.step(draft)
    assert draft.record.zone == zone
    (grant,) = draft.wanted
    assert (grant.attempt, grant.on_demand) == (2, model is Model.ON_DEMAND)
    assert draft.nodes[0].disk_top == (zone != "z-b"), "a disk number serves in one zone only"


def test_a_gang_that_starts_in_another_zone_gives_up_its_machines_and_disks_of_the_first() -> None:
    draft = Draft(*on_node(1, cur=None, disk_top=4)(*calm(2)))
    reservations._settle(draft, "z-b")
    assert draft.record.zone == "z-b"
    assert [(n.cur, n.cause, n.disk, n.disk_top) for n in draft.nodes] == [(None, "stockout", k, k) for k in (1, 5)]
    entry = draft.entries[-1]
    assert (entry.id, entry.event, entry.cause) == ("move.v41", Event.MOVE, "stockout")
    assert entry.detail == "starting in z-b instead"


def test_a_gang_without_a_zone_only_takes_one() -> None:
    draft = Draft(*on_record(zone=None)(*calm(2)))
    reservations._settle(draft, "z-b")
    assert draft.record.zone == "z-b"
    assert (draft.nodes, draft.entries) == (list(draft.before.nodes), [])


@pytest.mark.parametrize("granted", [False, True])
def test_a_node_that_has_a_grant_or_may_get_one_does_not_wait_for_the_caps(granted: bool) -> None:
    record, snapshot = calm(2)
    grants = (Grant(record.job, 1, 2, "slot:pool"),) if granted else ()
    case = on_node(1, cur=None)(*on_snapshot(allocation=Allocation(1, "", grants))(record, snapshot))
    draft = Draft(*case)
    assert reservations._take(draft, 1, "cur", [Offer("pool", "z-a", Model.SPOT, 0.3)]) is False
    assert (draft.nodes[1].cur is not None) is granted
