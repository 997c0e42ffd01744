"""A static machine that idles costs the same without a job: who begins takes it before anything is bought."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from spotkeeper.contract import names
from spotkeeper.contract.allocation import Allocation, Grant
from spotkeeper.contract.cloud import Vm, VmStatus
from spotkeeper.contract.job import Nodes, RequestKind
from spotkeeper.contract.ledger import Event
from spotkeeper.contract.record import Node
from spotkeeper.contract.stack import Model, Price, StackState
from spotkeeper.reconcile.decide.draft import Draft
from spotkeeper.reconcile.decide.provisioning import offers, reservations
from spotkeeper.reconcile.store.documents import StaticHello
from tests.reconcile.decide.gang.test_resize import resized, trained
from tests.reconcile.decide.test_decide import NOW
from tests.reconcile.decide.test_guards import Case, Change, calm, on_node, on_record, on_snapshot
from tests.reconcile.world import JOB, STACK, ZONES, World, stack

SECOND = "bcde2345"
TAKEN = "waiting in the queue: the machines that it may use are taken; spotkeeper queue shows its place"
TOO_LARGE = (
    "waiting in the queue: the job wants 2 machines, and its pools (pool) have 1 in all (`size`): submit it with "
    "fewer, or raise this limit in the stack file; spotkeeper queue shows its place"
)


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


def test_an_idle_static_machine_is_used_before_cheaper_spot() -> None:
    """Its grant and the zone are not one write: between them the node is no longer free, but ours."""
    world = World(nodes=1, the_stack=dear_at_home())
    world.run(10)
    world.submit()
    world.until(world.training)
    assert wants(world) == [(Model.STATIC, "z-a")]


def test_a_gang_starts_in_the_zone_of_its_static_machines() -> None:
    world = World(nodes=2, the_stack=dear_at_home())
    world.run(10)
    world.submit()
    world.until(world.training)
    assert sorted(wants(world)) == [(Model.SPOT, "z-a"), (Model.STATIC, "z-a")]


@pytest.mark.parametrize(
    ("prices", "noted"), [({"z-a": Price(on_demand=1.5, spot=0.3)}, (1.5, 1.5)), ({}, (0.0, None))]
)
def test_an_intent_for_a_static_machine_has_its_prices_if_any_are_listed(
    prices: dict[str, Price], noted: tuple[float, float | None]
) -> None:
    spot, fix = stack(static=1).pools
    world = trained(World(nodes=1, the_stack=replace(stack(), pools=(spot, replace(fix, prices=prices)))))
    (entry,) = world.events(Event.INTENT)
    assert (entry.model, entry.pool, entry.zone) == (Model.STATIC, "fix", "z-a")
    assert (entry.price, entry.on_demand) == noted


def test_a_waiting_gang_returns_to_a_free_static_machine() -> None:
    world = full(World(nodes=1, the_stack=stack(static=1), steps=100, max_on_demand=0))
    world.run(10)
    world.submit()
    world.until(world.training)
    world.submit(SECOND)
    world.run(30)
    assert world.record(SECOND).zone != "z-a"
    world.until(lambda: world.training(SECOND), 240)
    assert wants(world, SECOND)[-1] == (Model.STATIC, "z-a")


def test_too_few_static_machines_do_not_bring_a_gang_back() -> None:
    """Once it has a node there it is bound to it; where it is now there may be room for all of it sooner."""
    world = full(World(nodes=2, the_stack=stack(static=1), max_on_demand=0))
    world.submit()  # before the node says hello
    before = world.record().zone
    assert before != "z-a"
    world.run(120)
    assert world.record().zone == before and all(model is Model.SPOT for model, _ in wants(world))


def test_a_waiting_job_names_the_busy_static_machine() -> None:
    """A node that is taken is no cap of a pool; and a job that waits for capacity remembers since when."""
    world = full(World(nodes=1, the_stack=stack(static=1)))
    world.run(10)
    world.submit()
    world.until(world.training)
    for number, (spec, reason) in enumerate(
        (
            ({"max_on_demand": 0}, "waiting for spot capacity in any zone: the job's max_on_demand of 0 is reached"),
            ({"policy": "on-demand", "max_on_demand": 0}, "waiting: the job's max_on_demand of 0 is reached"),
            ({"policy": "spot", "max_on_demand": 0}, "waiting for capacity in any zone"),
            ({"pools": ("fix",)}, TAKEN),
        ),
        start=2,
    ):
        job = f"bcde234{number}"
        world.spec = replace(world.spec, **{"max_on_demand": None, "policy": "balanced", "pools": (), **spec})
        world.submit(job)
        world.run(30)
        assert world.record(job).reason == reason
        assert (world.record(job).dry_since is None) is ("pools" in spec)


def taken(world: World, since: int) -> list[tuple[int | None, Model | None]]:
    """What was wanted after the first few, and not refused."""
    refused = {(entry.node, entry.attempt) for entry in world.events(Event.REFUSED)}
    wanted = world.events(Event.INTENT)[since:]
    return sorted((e.node, e.model) for e in wanted if (e.node, e.attempt) not in refused)  # type: ignore[type-var]


def beside_an_idle_node(nodes: int) -> World:
    """An elastic job of so many nodes; the node that it trained on was down, and idles since it is back."""
    world = trained(World(nodes=Nodes(1, 4), the_stack=stack(static=1)))
    (machine,) = (machine for machine in world.machines.values() if not machine.vm.job)
    machine.status, machine.agent = VmStatus.DEAD, None
    world.until(lambda: world.training() and world.record().gen > 1 and len(world.record().members) == 4, 900)
    resized(world, nodes)
    machine.status, machine.boot = VmStatus.RUNNING, "again"
    world.run(100)
    assert all(node.cur is None or node.cur.machine is None for node in world.record().nodes)
    return world


def test_returning_nodes_take_the_idle_static_machine() -> None:
    """The round that takes the resize in sees the node, though no node was vacant when it began to read."""
    world = beside_an_idle_node(2)
    before = len(world.events(Event.INTENT))
    resized(world, 4)
    assert taken(world, before) == [(2, Model.SPOT), (3, Model.STATIC)]


@pytest.mark.parametrize("notice_s", [None, 20.0, 120.0])
def test_a_node_that_lost_its_machine_takes_the_idle_static_machine(notice_s: float | None) -> None:
    """Spot is gone everywhere, with and without a notice: one node may leave its disk, the other keeps the newest."""
    world = beside_an_idle_node(2)
    before, newest, gen = len(world.events(Event.INTENT)), world.newest, world.record().gen
    for zone in ZONES:
        world.capacity[zone, Model.SPOT] = 0
    for node in (0, 1):
        world.preempt(node, notice_s)
    world.until(lambda: world.training() and world.record().gen > gen and len(world.record().members) == 2, 600)
    assert sorted(model for _, model in taken(world, before)) == [Model.ON_DEMAND, Model.STATIC]
    world.run(5)
    assert newest is not None and world.started[-1][1] is not None and world.started[-1][1] >= newest


def test_the_only_node_with_the_newest_checkpoint_does_not_change_to_a_static_machine() -> None:
    world = beside_an_idle_node(1)
    before, gen = len(world.events(Event.INTENT)), world.record().gen
    world.preempt(0, 60.0)
    world.until(lambda: world.training() and world.record().gen > gen, 600)
    assert taken(world, before) == [(0, Model.SPOT)]


def test_a_node_on_demand_changes_to_an_idle_static_machine() -> None:
    """Another job had it; spot stays sold out."""
    world = full(World(nodes=1, the_stack=stack(static=1)))
    world.run(10)
    world.submit()
    world.until(world.training)
    world.spec = replace(world.spec, nodes=2)
    world.capacity["z-a", Model.ON_DEMAND] = 9
    world.submit(SECOND)
    world.until(lambda: world.training(SECOND))
    assert {m.vm.model for m in world.dynamic()} == {Model.ON_DEMAND}
    world.request(RequestKind.CANCEL)
    world.until(lambda: any(r.cur and r.cur.machine for r in world.record(SECOND).nodes), 3600)
    world.until(lambda: world.training(SECOND))
    assert sorted(world.member(node, SECOND).vm.model for node in (0, 1)) == [Model.ON_DEMAND, Model.STATIC]


def test_pools_at_their_caps_are_named_as_the_reason() -> None:
    world = World(nodes=2, the_stack=stack(max_machines=1))
    world.submit()
    world.run(30)
    assert world.record().reason == TOO_LARGE


def test_missing_spot_is_named_as_the_reason() -> None:
    """No cap keeps this job from spot: it waits for the market, and may go to another zone."""
    world = full(World(nodes=1, the_stack=stack(max_on_demand=1)))
    world.capacity["z-a", Model.ON_DEMAND] = 9
    world.submit()
    world.until(world.training)
    world.submit(SECOND)
    world.run(30)
    assert world.record(SECOND).reason == "waiting for spot capacity in any zone: the pools' max_on_demand is reached"
    assert world.record(SECOND).dry_since is not None
    world.capacity["z-b", Model.SPOT] = 1
    world.until(lambda: world.training(SECOND), 600)


# -- one pass with an idle static machine in z-a


def idling(count: int, **record: object) -> Case:
    """A gang of so many that has trained on its own disks in z-a, each with the newest commit."""
    case, seen = on_snapshot(stack=stack(static=1))(*on_record(**record)(*calm(count)))
    vm = Vm(names.static_machine_name(STACK, "fix", 0), "s0", "z-a", VmStatus.RUNNING, "fix", "", 0, 0, "10.0.1.0")
    nodes = tuple(replace(node, wrote=3) for node in case.nodes)
    listing = replace(seen.listing, vms=(*seen.listing.vms, vm))
    return on_snapshot(listing=listing, hellos=(StaticHello(vm.name, "s0", "b", "z-a", NOW),))(
        replace(case, nodes=nodes), seen
    )


@pytest.mark.parametrize(
    ("change", "idle"),
    [
        (on_record(), True),
        (on_node(1, wrote=2), False),  # node 0 has the only copy of the newest commit
        (on_snapshot(hellos=()), False),
        (on_snapshot(allocation=Allocation(1, "", (Grant(SECOND, 0, 1, "machine:sk-t-fix-s0"),))), False),
        (on_snapshot(draining=True), False),
        (on_snapshot(blind=True), False),
        (on_snapshot(spec=None), False),
        (on_node(0, cur=None), False),
    ],
)
def test_a_machine_idles_for_a_node_that_may_leave_its_disk(change: Change, idle: bool) -> None:
    assert offers.idle_machine(Draft(*change(*idling(2))), 0) is idle


NONE_IN_ITS_ZONE = Node(refused=("pool/z-a/spot", "pool/z-a/on-demand"), refused_at=NOW)


@pytest.mark.parametrize(
    ("zone", "nodes", "starts"),
    [
        ("z-b", (Node(), Node()), "z-a"),
        ("z-b", (Node(), NONE_IN_ITS_ZONE), None),
        ("z-b", (NONE_IN_ITS_ZONE,), "z-a"),  # the static machine is enough
        (None, (Node(), NONE_IN_ITS_ZONE), "z-a"),
        ("z-a", (Node(), Node()), None),
    ],
)
def test_a_gang_starts_in_the_zone_of_an_idle_machine_if_that_has_offers_for_the_rest(
    zone: str | None, nodes: tuple[Node, ...], starts: str | None
) -> None:
    record, seen = idling(len(nodes), gen=0, members=(), zone=zone)
    assert reservations._idle_zone(Draft(replace(record, nodes=nodes), seen)) == starts
