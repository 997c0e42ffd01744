"""A gang that had better be in another zone: it asks there before it gives up what it has, and then it moves."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from spotkeeper.contract.cloud import InsertVm, ResultKind
from spotkeeper.contract.job import RequestKind
from spotkeeper.contract.ledger import Entry, Event
from spotkeeper.contract.market import PriceRun
from spotkeeper.contract.record import PROBE
from spotkeeper.contract.stack import Fallback, Model, PoolState, Price
from spotkeeper.reconcile.decide.gang.zone_probe import PROBE_EVERY_S
from spotkeeper.reconcile.select.offers import HOUR_S
from tests.reconcile.decide.gang.test_resize import trained
from tests.reconcile.decide.gang.test_voluntary_stops import after_its_loop, without_savings
from tests.reconcile.world import ZONES, World, stack
from tests.sizes import size

SPOT, ON_DEMAND = Model.SPOT, Model.ON_DEMAND
HOME, NEXT, LAST = ZONES
ELSEWHERE = (NEXT, LAST)


def on_demand(*dry: str, **more: object) -> World:
    """Two machines that lost spot in their zone, and went on on-demand. ``dry``: zones that have no spot either."""
    world = trained(World(**({"nodes": 2} | more)))  # type: ignore[arg-type]
    for zone in (HOME, *dry):
        world.capacity[zone, SPOT] = 0
    for node in range(len(world.record().nodes)):
        world.preempt(node)
    world.until(lambda: world.training() and models(world) == {ON_DEMAND}, 900)
    return world


def models(world: World) -> set[Model | None]:
    return {machine.vm.model for machine in world.dynamic()}


def probes(world: World) -> list[Entry]:
    return [entry for entry in world.events(Event.INTENT) if entry.cause == PROBE]


def moved(world: World) -> list[str]:
    return [entry.detail for entry in world.events(Event.MOVE)]


def gone(world: World) -> bool:
    return world.training() and world.record().zone != HOME


def test_spot_is_found_in_another_zone_and_no_step_is_lost() -> None:
    world = on_demand()
    steps = max(agent.step_no for agent in world.agents())
    world.until(lambda: gone(world) and models(world) == {SPOT}, 900)
    assert moved(world) == [f"{HOME} -> {NEXT}", f"the disks are in {NEXT}"]
    assert [(entry.zone, entry.node) for entry in probes(world)] == [(NEXT, 0), (NEXT, 1)]
    assert [entry.cause for entry in world.events(Event.INTENT)][-2:] == [PROBE] * 2, "the probes train there"
    assert world.started[-1][1] is not None and world.started[-1][1][1] >= steps
    assert sum(agent.gen == world.record().gen for agent in world.agents()) == 2
    world.run(300)
    assert len(world.dynamic()) == 2 and len(world.drives) == 2, "nothing is left over"


def test_a_probe_is_in_the_other_zone_and_the_nodes_disk_stays_in_its_own() -> None:
    world = on_demand()
    world.until(lambda: all(node.next for node in world.record().nodes), 900)
    for node in world.record().nodes:
        assert node.cur is not None and node.next is not None
        assert (node.zone, node.cur.zone, node.next.zone, node.next.cause) == (HOME, HOME, NEXT, PROBE)
    world.until(lambda: gone(world), 900)
    assert {node.zone for node in world.record().nodes} == {NEXT}


def test_a_move_waits_for_a_machine_for_every_node() -> None:
    world = on_demand()
    gen = world.record().gen
    world.until(lambda: any(node.probing for node in world.record().nodes), 600)
    while world.record().move is None:
        assert world.training() and world.record().gen == gen
        world.step()
    assert [e.zone for e in world.events(Event.ADMITTED) if e.cause == PROBE] == [NEXT, NEXT]


def test_booted_probes_are_not_released_for_their_boots_cost() -> None:
    """The work that is left when they are up would not be worth another boot; theirs is paid."""
    world = on_demand(boot_s=220.0, work="20m")
    world.until(lambda: gone(world) and models(world) == {SPOT}, 1800)
    assert [(entry.zone, entry.node) for entry in probes(world)] == [(NEXT, 0), (NEXT, 1)]


def test_no_move_to_a_zone_without_room_for_all() -> None:
    world = on_demand(LAST)
    world.capacity[NEXT, SPOT] = 1
    gen = world.record().gen
    world.run(3600)
    assert world.record().gen == gen and moved(world) == [] and models(world) == {ON_DEMAND}
    assert {machine.vm.zone for machine in world.dynamic()} == {HOME}, "the one that was had is given back"


def test_zones_without_capacity_are_probed_rarely() -> None:
    world = on_demand(*ELSEWHERE)
    gen, hours = world.record().gen, 3
    world.run(hours * 3600)
    assert world.record().gen == gen and moved(world) == []
    asked = Counter(entry.zone for entry in probes(world) if entry.node == 0)
    assert set(asked) == set(ELSEWHERE)
    assert all(2 <= count <= hours * 3600 / PROBE_EVERY_S + 1 for count in asked.values()), asked


@pytest.mark.parametrize(("usd", "more"), [(0.3, {}), (0.9, {}), (0.9, {"max_price": 0.5})])
def test_expensive_spot_is_left_for_a_cheap_zone(usd: float, more: dict[str, object]) -> None:
    world = World(nodes=1, **more)  # type: ignore[arg-type]
    world.prices["pool"] = tuple(PriceRun(0.0, 0.3, zone) for zone in ZONES)
    trained(world)
    world.run(60)
    world.prices["pool"] = tuple(PriceRun(0.0, usd if zone == HOME else 0.3, zone) for zone in ZONES)
    world.run(2 * 3600)
    assert (world.record().zone == HOME) is (usd == 0.3)
    assert bool(probes(world)) is (usd == 0.9)
    assert models(world) == {SPOT} and world.training()


def two_pools(policy: str = "balanced", **more: object) -> World:
    """Two machines of the cheaper one of two pools, in its first zone; the other costs 0.95 everywhere."""
    one = stack().pools[0]
    both = replace(stack(), pools=(one, replace(one, name="other")))
    world = World(nodes=2, the_stack=both, policy=policy, **more)  # type: ignore[arg-type]
    world.prices["pool"] = tuple(PriceRun(0.0, 0.9, zone) for zone in ZONES)
    world.prices["other"] = tuple(PriceRun(0.0, 0.95, zone) for zone in ZONES)
    return trained(world)


@pytest.mark.parametrize("policy", ["balanced", "spot"])
def test_cheap_spot_of_another_pool_in_the_zone_needs_no_disk_copy(policy: str) -> None:
    world = two_pools(policy)
    world.prices["other"] = tuple(PriceRun(0.0, 0.3 if zone == HOME else 0.95, zone) for zone in ZONES)
    world.until(lambda: {machine.vm.pool for machine in world.dynamic()} == {"other"} and world.training(), 2 * 3600)
    assert [(entry.zone, entry.pool) for entry in probes(world)] == [(HOME, "other")] * 2 and moved(world) == []
    assert [node.disk_top for node in world.record().nodes] == [0, 0]
    gen = world.record().gen
    world.run(2 * 3600)
    assert world.record().gen == gen and len(world.dynamic()) == 2


def test_a_gang_on_spot_keeps_its_machine_type() -> None:
    """A slower one for less is no bargain."""
    world = two_pools()
    slow_and_cheap(world)
    world.run(2 * 3600)
    assert {machine.vm.pool for machine in world.dynamic()} == {"pool"} and not probes(world)


def slow_and_cheap(world: World) -> None:
    """The other pool is of another machine type, for a sixth of the price."""
    ours, other = world.stack.pools
    other = replace(other, machine_type="slow", prices={z: replace(p, on_demand=0.5) for z, p in other.prices.items()})
    world.stack = world.memory.stack = replace(world.stack, pools=(ours, other))
    world.prices["other"] = tuple(PriceRun(0.0, 0.05, zone) for zone in ZONES)


def test_a_gang_keeps_its_machine_type_while_any_of_it_is_left() -> None:
    """All would wait for the slow one."""
    world = two_pools()
    slow_and_cheap(world)
    world.run(3600)
    world.preempt(0)
    world.until(lambda: world.training() and world.record().gen == 2, 900)
    assert {machine.vm.pool for machine in world.dynamic()} == {"pool"}
    world.preempt(0)
    world.preempt(1)
    world.until(lambda: world.training() and world.record().gen > 2, 900)
    assert {machine.vm.pool for machine in world.dynamic()} == {"pool"}, "nor where nothing of it is left"


@pytest.mark.parametrize("policy", ["balanced", "shuffle", "on-demand"])
def test_a_gang_starts_on_one_machine_type(policy: str) -> None:
    world = two_types(policy, cheap=2)
    world.until(world.training, 300)
    assert {machine.vm.pool for machine in world.dynamic()} == {"other"}, "two of the cheap one are not enough"


def test_machine_types_are_mixed_if_none_has_room_for_all() -> None:
    world = two_types("shuffle", cheap=2, dear=2)
    world.until(world.training, 300)
    assert Counter(machine.vm.pool for machine in world.dynamic()) == {"pool": 2, "other": 1}


def two_types(policy: str, *, cheap: int, dear: int = 9) -> World:
    """A job of three nodes that may use either pool."""
    ours = replace(stack().pools[0], max_machines=cheap)
    prices = dict.fromkeys(ZONES, Price(on_demand=1.2, spot=0.4))
    other = replace(ours, name="other", machine_type="quick", max_machines=dear, prices=prices)
    world = World(nodes=3, policy=policy, the_stack=replace(stack(), pools=(ours, other)))
    world.submit()
    return world


def test_no_change_to_a_pool_without_room_for_all() -> None:
    world = two_pools()
    world.prices["other"] = tuple(PriceRun(0.0, 0.3 if zone == HOME else 0.95, zone) for zone in ZONES)
    world.capacity[HOME, SPOT] = 3
    gen = world.record().gen
    world.run(2 * 3600)
    assert world.record().gen == gen and {machine.vm.pool for machine in world.dynamic()} == {"pool"}
    assert models(world) == {SPOT} and len(probes(world)) >= 2


def test_spot_above_the_on_demand_price_is_left() -> None:
    world = World(nodes=2)
    world.prices["pool"] = tuple(PriceRun(0.0, 0.3, zone) for zone in ZONES)
    trained(world)
    world.prices["pool"] = tuple(PriceRun(0.0, 1.4, zone) for zone in ZONES)
    world.until(lambda: models(world) == {ON_DEMAND} and world.training(), 2 * 3600)
    gen = world.record().gen
    world.run(2 * 3600)
    assert world.record().gen == gen and models(world) == {ON_DEMAND}, "and it stays, while that is so"


def test_expensive_spot_is_not_left_for_dearer_on_demand() -> None:
    dear = PoolState("big", "spot", "huge", ZONES, 1, 20, 20, 10, "pd", dict.fromkeys(ZONES, Price(88.0, 22.0)))
    small = stack(max_on_demand=0)
    world = World(nodes=2, the_stack=replace(small, pools=(*small.pools, dear)))
    world.prices["pool"] = tuple(PriceRun(0.0, 0.3, zone) for zone in ZONES)
    trained(world)
    world.prices["pool"] = tuple(PriceRun(0.0, 1.4, zone) for zone in ZONES)
    world.run(2 * 3600)
    assert {entry.pool for entry in world.events(Event.INTENT)} == {"pool"} and models(world) == {SPOT}


def test_spots_extra_cost_is_limited() -> None:
    """What it cost beyond on-demand for what is done is more than 15 % of the whole work: on-demand to the end."""
    world = on_demand(*ELSEWHERE)
    world.step_s = 1.0
    world.run(120)
    held = world.store.read_record("abcd2345")
    assert held is not None
    world.capacity.clear()
    spent = replace(held.value.limits, spent=held.value.limits.spent + 1000.0)
    assert world.store.cas_record(replace(held.value, ver=held.value.ver + 1, limits=spent), held.token)
    world.run(3 * 3600)
    assert models(world) == {ON_DEMAND} and world.training()
    world.preempt(0)
    world.run(60)
    assert world.events(Event.INTENT)[-1].detail.startswith("on-demand to the end: spot has cost ")


def test_a_dearer_machine_type_is_no_loss_of_spot() -> None:
    """A static machine, or another machine type: it is paid for, and spot beside it is as cheap as ever."""
    world = two_pools()
    ours, other = world.stack.pools
    dear = replace(other, machine_type="big", prices={z: replace(p, on_demand=9.0) for z, p in other.prices.items()})
    world.stack = world.memory.stack = replace(world.stack, pools=(ours, dear))
    world.prices["other"] = tuple(PriceRun(0.0, 8.0, zone) for zone in ZONES)
    world.step_s = 1.0
    world.run(3600)
    held = world.store.read_record("abcd2345")
    assert held is not None
    spent = replace(held.value.limits, spent=held.value.limits.spent + 2 * 4.0)  # an hour of two that cost 4 each
    assert world.store.cas_record(replace(held.value, ver=held.value.ver + 1, limits=spent), held.token)
    world.preempt(0)
    world.run(60)
    assert world.events(Event.INTENT)[-1].model is SPOT


def swinging(world: World, period_s: float, hours: float, *usd: float) -> None:
    """Spot costs the one in the first zone and the other in the rest, and then the other way round."""
    for turn in range(int(hours * 3600 / period_s)):
        one, other = usd if turn % 2 else usd[::-1]
        world.prices["pool"] = tuple(PriceRun(0.0, one if zone == HOME else other, zone) for zone in ZONES)
        world.run(period_s)


def test_changing_prices_do_not_make_a_gang_move_again_and_again() -> None:
    """Its disks take half an hour to follow. What the last move took is known, and so much a gang stays at least."""
    world = World(nodes=2)
    world.prices["pool"] = tuple(PriceRun(0.0, 0.3, zone) for zone in ZONES)
    trained(world)
    world.shot_s = 1800.0
    steps = max(agent.step_no for agent in world.agents())
    swinging(world, 3600.0, 12.0, 0.3, 0.5)
    done = max(agent.step_no for agent in world.agents()) - steps
    assert 1 <= len(moved(world)) // 2 <= 3
    assert done > 0.88 * 12 * 3600, "a tenth of its time at most is lost to moves"


def test_a_move_is_cancelled_if_its_disks_take_over_an_hour() -> None:
    """A snapshot that failed is never ready."""
    world = on_demand()
    world.shot_s = math.inf
    world.until(lambda: world.record().move is not None, 900)
    world.until(lambda: world.record().move is None and world.training(), 3900)
    assert world.record().zone == HOME and models(world) == {ON_DEMAND}
    assert moved(world)[-1] == "the disks were not copied within 60 min"


def mute_probes(world: World) -> None:
    """Machines in other zones run and say nothing."""
    insert = world._insert

    def inserted(action: InsertVm) -> tuple[ResultKind, str]:
        told = insert(action)
        for machine in world.dynamic():
            if machine.vm.zone != HOME:
                machine.up_at = math.inf
        return told

    world._insert = inserted  # type: ignore[method-assign]


def test_a_probe_that_never_boots_is_released_and_not_repeated_soon() -> None:
    world = on_demand()
    mute_probes(world)
    gen = world.record().gen
    world.run(PROBE_EVERY_S - 60)
    assert world.record().gen == gen
    assert set(Counter((entry.zone, entry.node) for entry in probes(world)).values()) == {1}
    world.until(lambda: {machine.vm.zone for machine in world.dynamic()} == {HOME}, 600)


def while_probing(**more: object) -> World:
    world = on_demand(boot_s=90.0, **more)
    world.until(lambda: any(node.probing for node in world.record().nodes), 900)
    return world


def lost(world: World) -> None:
    world.preempt(0)


def noticed(world: World) -> None:
    world.preempt(0, 120.0)


def swapped(world: World) -> None:
    world.request(RequestKind.SWAP, node=0)


def crashed(world: World) -> None:
    world.crashing = 1
    world.reboot(1)


@pytest.mark.parametrize("what", [lost, noticed, swapped, crashed])
def test_a_loss_during_a_probe_is_replaced_in_the_own_zone(what: Callable[[World], None]) -> None:
    world = while_probing()
    gen = world.record().gen
    for zone in ELSEWHERE:
        world.capacity[zone, SPOT] = 0
    what(world)
    world.until(lambda: world.record().gen > gen and world.training(), 1200)
    assert world.record().zone == HOME
    world.until(lambda: {machine.vm.zone for machine in world.dynamic()} == {HOME}, 300)


def test_spot_in_the_own_zone_is_preferred() -> None:
    """Its disks are there."""
    world = on_demand(*ELSEWHERE)
    world.until(lambda: world.t >= world.record().fallback_until - 1, 3600)
    world.capacity.clear()
    world.until(lambda: models(world) == {SPOT} and world.training(), 3600)
    assert world.record().zone == HOME and moved(world) == []


def test_a_fallback_that_ends_during_a_probe_waits_for_its_result() -> None:
    """Asking at home gave them back, and home had none: both came to nothing, time after time."""
    world = on_demand(boot_s=220.0, the_stack=replace(stack(), fallback=Fallback(on_demand_s=60.0)))
    world.until(lambda: gone(world) and models(world) == {SPOT}, 1200)
    assert [(entry.zone, entry.node) for entry in probes(world)] == [(NEXT, 0), (NEXT, 1)]


@pytest.mark.parametrize("asked", [RequestKind.CANCEL, RequestKind.PAUSE])
def test_ending_or_pausing_a_job_releases_its_probes(asked: RequestKind) -> None:
    world = while_probing()
    world.request(asked)
    world.until(lambda: not world.dynamic(), 600)


@pytest.mark.parametrize(
    "make",
    [
        lambda: on_demand(policy="shuffle"),
        lambda: without_savings(World(nodes=1)),
        lambda: after_its_loop(World(nodes=1)),
        lambda: World(nodes=1, policy="on-demand"),
    ],
)
def test_a_gang_without_a_better_offer_does_not_probe(make: Callable[[], World]) -> None:
    world = make()
    if not world.memory.active:
        for zone in ZONES:
            world.capacity[zone, SPOT] = 0
        trained(world)
        world.run(200)
        world.capacity = {(HOME, SPOT): 0}
    gen = world.record().gen
    world.run(2 * 3600)
    assert probes(world) == [] and (world.record().gen == gen or world.spec.policy == "shuffle")


def test_a_gang_does_not_move_beyond_the_caps() -> None:
    """It takes room for the gang twice, for what it has is given up last."""
    world = on_demand(the_stack=stack(max_machines=3))
    world.run(2 * 3600)
    assert world.record().zone == HOME and models(world) == {ON_DEMAND}
    assert {(entry.node, entry.zone in ELSEWHERE) for entry in probes(world)} <= {(0, True)}, "one probe is allowed"


@pytest.mark.parametrize("seed", range(size(3, 12)))
def test_a_function_that_dies_during_a_move_leaves_nothing_and_loses_no_work(seed: int) -> None:
    world = on_demand(*(ELSEWHERE if seed % 3 == 2 else ()), seed=seed)
    world.crash_rate, world.stall_rate, world.lost_answers = 0.05, 0.02, 0.1
    steps = max(agent.step_no for agent in world.agents())
    world.run(1500)
    world.crash_rate = world.stall_rate = world.lost_answers = 0.0
    world.until(lambda: world.training() and (seed % 3 == 2 or gone(world)), 3600)
    assert max(agent.step_no for agent in world.agents()) >= steps
    world.capacity = {(zone, SPOT): 0 for zone in ZONES}
    world.run(600)
    assert len(world.dynamic()) == 2


@pytest.mark.parametrize("seed", range(size(3, 12)))
def test_a_function_that_dies_during_a_change_of_pool_leaves_nothing(seed: int) -> None:
    world = two_pools(seed=seed)
    world.prices["other"] = tuple(PriceRun(0.0, 0.3 if zone == HOME else 0.95, zone) for zone in ZONES)
    world.until(lambda: world.t % HOUR_S > HOUR_S - 10, HOUR_S)  # prices are asked for once an hour
    world.crash_rate, world.stall_rate, world.lost_answers = 0.05, 0.02, 0.1
    steps = max(agent.step_no for agent in world.agents())
    world.run(900)
    world.crash_rate = world.stall_rate = world.lost_answers = 0.0
    world.until(lambda: world.training() and {machine.vm.pool for machine in world.dynamic()} == {"other"}, 3600)
    assert max(agent.step_no for agent in world.agents()) >= steps
    world.run(120)
    assert len(world.dynamic()) == 2 and moved(world) == []
