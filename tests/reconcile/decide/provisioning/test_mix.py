"""A mix of machines: each node has its pool at the start, at a replacement and in another zone."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from spotkeeper.contract.allocation import Allocation, Grant
from spotkeeper.contract.cloud import CreateDisk
from spotkeeper.contract.job import JobRequest, MachineGroup, RequestKind
from spotkeeper.contract.ledger import Event
from spotkeeper.contract.record import Hold, Node
from spotkeeper.contract.stack import Model, PoolState, Price, ReservedCapacity, StackState
from spotkeeper.reconcile.decide.draft import Draft
from spotkeeper.reconcile.decide.gang import zone_probe
from spotkeeper.reconcile.decide.job import limits
from spotkeeper.reconcile.decide.provisioning import offers, pending, reservations
from spotkeeper.reconcile.decide.queue import claim
from spotkeeper.reconcile.decide.queue.room import of_running
from spotkeeper.report.html.job import machines
from spotkeeper.report.job.view import job_view
from spotkeeper.report.text.render import nodes_fitting
from tests.reconcile.decide.queue import situation
from tests.reconcile.decide.queue.situation import reserved, runs, waits
from tests.reconcile.decide.test_guards import calm, on_snapshot
from tests.reconcile.world import ZONES, World, stack

MINUTE = 60.0
MIX = (MachineGroup("l4", 2), MachineGroup("t4", 1))


def pools(usd: float = 3.0, **t4: Any) -> StackState:
    """Two pools; a machine of the first costs ``usd`` on-demand, of the second 1."""
    base = stack().pools[0]
    dear = {zone: Price(on_demand=usd, spot=0.3 * usd) for zone in ZONES}
    l4 = replace(base, name="l4", machine_type="big", prices=dear)
    return replace(stack(), pools=(l4, replace(base, name="t4", machine_type="small", **t4)))


def world(the_stack: StackState | None = None, **more: Any) -> World:
    return World(the_stack=the_stack or pools(), machines=MIX, **more)


def there(world: World) -> list[tuple[int, str, str]]:
    """Return the members' machines, as (node, pool, zone)."""
    slots = enumerate(node.cur for node in world.record().nodes)
    return [(index, slot.pool, slot.zone) for index, slot in slots if slot is not None]


def whole(zone: str) -> list[tuple[int, str, str]]:
    return [(0, "l4", zone), (1, "l4", zone), (2, "t4", zone)]


def test_each_node_gets_a_machine_of_its_pool_though_another_is_cheaper() -> None:
    one = world()
    one.submit()
    one.until(one.training, 5 * MINUTE)
    assert there(one) == whole("z-a")
    assert {machine.vm.pool for machine in one.dynamic()} == {"l4", "t4"}
    view = job_view(one.record(), None, one.events(), one.stack, one.now())
    assert nodes_fitting(view.nodes).columns[-1] == "pool"
    page = str(machines(view))
    assert all(f">{word}</" in page for word in ("Pool", "l4", "t4")), page
    alike = tuple(replace(node, pool="l4") for node in view.nodes)
    assert "pool" not in nodes_fitting(alike).columns
    one.request(RequestKind.RESIZE, nodes=2)
    assert "the job file says `machines`" in one.events(Event.REQUEST)[-1].detail


@pytest.mark.parametrize("notice_s", [None, 90.0])
@pytest.mark.parametrize("node", [0, 2])
def test_a_replacement_comes_from_the_nodes_own_pool(node: int, notice_s: float | None) -> None:
    one = world()
    one.submit()
    one.until(one.training, 5 * MINUTE)
    before, gen = one.member(node).vm.uid, one.record().gen
    one.preempt(node, notice_s)
    one.until(lambda: one.record().gen > gen and one.training(), 10 * MINUTE)
    assert one.member(node).vm.uid != before and there(one) == whole("z-a")


def test_a_gang_starts_in_a_zone_that_all_pools_have() -> None:
    one = world(pools(zones=("z-b", "z-c")))
    one.submit()
    one.until(one.training, 5 * MINUTE)
    assert there(one) == whole("z-b")


def test_a_gang_starts_where_every_pool_has_capacity() -> None:
    one = world()
    one.sold_out = {("t4", "z-a"), ("l4", "z-b")}
    one.submit()
    one.until(one.training, 15 * MINUTE)
    assert there(one) == whole("z-c")


def test_without_a_zone_for_all_pools_no_machine_is_kept() -> None:
    """It tries now and then, and starts once one zone has both; in between nothing is paid for."""
    one = world()
    one.sold_out = {("t4", "z-a"), ("l4", "z-b"), ("t4", "z-c")}
    one.submit()
    one.until(lambda: one.record().hold is Hold.CAPACITY, 60 * MINUTE)
    assert "pool t4" in one.record().reason or "pool l4" in one.record().reason, one.record().reason
    one.until(lambda: not one.dynamic(), 5 * MINUTE)
    one.sold_out.clear()
    one.until(one.training, 60 * MINUTE)
    assert len({zone for _, _, zone in there(one)}) == 1


def test_the_whole_gang_leaves_a_zone_without_capacity_for_one_pool() -> None:
    one = world()
    one.submit()
    one.until(one.training, 5 * MINUTE)
    one.run(MINUTE)
    one.sold_out = {("t4", "z-a")}
    one.preempt(2)
    one.until(lambda: one.training() and one.record().zone != "z-a", 60 * MINUTE)
    assert there(one) == whole("z-b")
    disks = {drive.disk.node: key[1] for key, drive in one.drives.items() if drive.user}
    assert disks == {0: "z-b", 1: "z-b", 2: "z-b"}


def test_a_gang_leaves_a_dry_zone_for_the_one_that_is_best_for_all_of_it() -> None:
    """The cheapest machine of all is in the zone that is the worst for the gang's other pool."""
    l4, t4 = pools().pools
    spot = {"l4": {"z-b": 0.1, "z-c": 0.15, "z-a": 0.2}, "t4": {"z-a": 0.3, "z-c": 0.35, "z-b": 0.4}}
    on = (replace(pool, prices={zone: Price(3.0, usd) for zone, usd in spot[pool.name].items()}) for pool in (l4, t4))
    one = world(replace(pools(), pools=tuple(on)), policy="spot")
    one.submit()
    one.until(one.training, 5 * MINUTE)
    assert there(one) == whole("z-c")
    one.run(MINUTE)
    one.sold_out = {("l4", "z-c")}
    one.preempt(0)
    one.until(lambda: one.training() and one.record().zone != "z-c", 60 * MINUTE)
    assert there(one) == whole("z-a")


def test_a_gang_goes_to_no_zone_and_back_that_lacks_one_of_its_pools() -> None:
    """Each of two zones lacks another pool: its machines of the other one are of no use."""
    one = world()
    one.submit()
    one.until(one.training, 5 * MINUTE)
    one.run(MINUTE)
    one.sold_out = {("t4", "z-a"), ("l4", "z-b")}
    one.preempt(2)
    one.until(lambda: one.training() and one.record().zone not in ("z-a", "z-b"), 90 * MINUTE)
    moves = [entry.detail for entry in one.events(Event.MOVE) if entry.cause == "stockout"]
    assert moves == ["z-a -> z-b", "z-b -> z-c"]
    assert there(one) == whole("z-c")


def test_a_user_moves_the_gang_only_to_a_zone_of_all_pools() -> None:
    one = world(pools(zones=("z-a", "z-b")))
    one.submit()
    one.until(one.training, 5 * MINUTE)
    one.request(RequestKind.MOVE, zone="z-c")
    assert "z-c is not a zone of the job's pools (z-a, z-b)" in one.events(Event.REQUEST)[-1].detail
    one.request(RequestKind.MOVE, zone="z-b")
    one.until(lambda: one.training() and one.record().zone == "z-b", 30 * MINUTE)
    assert there(one) == whole("z-b")
    copies = {
        (action.node, action.pool) for _, action, _ in one.made if isinstance(action, CreateDisk) and action.snapshot
    }
    assert copies == {(0, "l4"), (1, "l4"), (2, "t4")}


def test_a_swap_and_a_backup_keep_the_pool() -> None:
    """Also where both pools have the same machine type, as pools with different disks do."""
    one = world(replace(pools(), pools=tuple(replace(pool, machine_type="m") for pool in pools().pools)))
    one.submit()
    one.until(one.training, 5 * MINUTE)
    one.request(RequestKind.SWAP, node=2)
    gen = one.record().gen
    one.until(lambda: one.record().gen > gen and one.training(), 10 * MINUTE)
    assert there(one) == whole("z-a")
    made = draft(one.stack)
    for index, pool in enumerate(("l4", "l4", "t4")):
        assert {offer.pool for offer in offers.beside(made, index)} == {pool}


def test_a_spread_mix_takes_each_pool_where_it_has_capacity() -> None:
    one = world(spread=True)
    one.sold_out = {("t4", zone) for zone in ZONES[:2]} | {("l4", "z-c")}
    one.submit()
    one.until(one.training, 15 * MINUTE)
    assert [pool for _, pool, _ in there(one)] == ["l4", "l4", "t4"]
    assert there(one)[2][2] == "z-c"


def test_on_demand_follows_per_pool() -> None:
    one = world()
    one.capacity = {(zone, Model.SPOT): 0 for zone in ZONES}
    one.submit()
    one.until(one.training, 15 * MINUTE)
    assert {machine.vm.model for machine in one.dynamic()} == {Model.ON_DEMAND}
    assert [pool for _, pool, _ in there(one)] == ["l4", "l4", "t4"]


def test_nothing_is_bought_while_one_pool_costs_more_than_max_price() -> None:
    one = world(policy="spot", max_price=0.5)
    one.submit()
    one.run(2 * MINUTE)
    assert not one.dynamic()
    assert (
        one.record().reason
        == "waiting: max_price is $0.5, and the cheapest spot machine in pool l4 costs $0.90 an hour"
    )


def test_reserved_capacity_serves_only_nodes_of_its_pool() -> None:
    """Three reserved L4 in z-b: the gang starts there, and its T4 is bought."""
    on = pools()
    on = replace(on, pools=(replace(on.pools[0], reservations=(ReservedCapacity("res", "z-b", 3),)), on.pools[1]))
    one = world(on)
    one.submit()
    one.until(one.training, 5 * MINUTE)
    assert there(one) == whole("z-b")
    models = {machine.vm.node: machine.vm.model for machine in one.dynamic()}
    assert models == {0: Model.RESERVED, 1: Model.RESERVED, 2: Model.SPOT}
    assert [offers.idle_reservation(draft(on), index) for index in range(3)] == [False] * 3, "not in z-a"


def test_reserved_capacity_for_a_part_of_a_group_is_no_start() -> None:
    """Without spot or on-demand L4 in z-b, one reserved L4 there would bind a gang that needs two."""
    base = pools(zones=ZONES[1:2])
    for count, starts in ((1, False), (2, True)):
        capacity = (ReservedCapacity("res", "z-b", count),)
        l4 = replace(base.pools[0], max_on_demand=0, reservations=capacity, prices={"z-b": Price(3.0, None)})
        one = world(replace(base, pools=(l4, base.pools[1])))
        one.submit()
        one.run(2 * MINUTE)
        assert bool(one.dynamic()) is starts


# -- decisions about one node or zone


def priced(l4: tuple[float | None, ...], t4: tuple[float | None, ...]) -> StackState:
    """Both pools with these spot prices in the three zones; None: no spot there."""
    base = stack().pools[0]

    def of(name: str, spot: tuple[float | None, ...]) -> PoolState:
        return replace(base, name=name, prices={zone: Price(1.0, usd) for zone, usd in zip(ZONES, spot, strict=True)})

    return replace(stack(), pools=(of("l4", l4), of("t4", t4)))


def draft(the_stack: StackState | None = None, **spec: object) -> Draft:
    """A gang that trains in z-a."""
    made = Draft(*on_snapshot(stack=the_stack or pools())(*calm(3, machines=MIX, **spec)))
    for index in range(3):
        made.put_slot(index, "cur", pool=made.pool(index))
    return made


NONE = (None, None, None)


@pytest.mark.parametrize(
    ("l4", "t4", "zones"),
    [
        ((0.1, 0.2, 0.3), (0.3, 0.2, 0.1), ["z-b", "z-a", "z-c"]),  # the second best of both before the worst of one
        ((0.1, 0.2, 0.3), (None, None, 0.1), ["z-c", "z-a", "z-b"]),  # spot in both pools before on-demand in one
    ],
)
def test_the_best_zone_is_the_best_for_the_whole_gang(l4: Any, t4: Any, zones: list[str]) -> None:
    found = offers.of_gang(draft(priced(l4, t4)), Node(), None)
    assert list(dict.fromkeys(choice.offer.zone for choice in found)) == zones


def test_room_for_a_gang_is_room_in_each_pool() -> None:
    made = draft()
    options = [choice.offer for choice in offers.of_gang(made, Node(), "z-b")]
    assert offers.fits(made, 3, options)
    assert not offers.fits(made, 3, [offer for offer in options if offer.pool == "l4"])


def test_a_node_goes_back_to_spot_only_within_its_pool() -> None:
    made = draft(priced((0.1, 0.1, 0.1), NONE))
    for index in range(3):
        made.put_slot(index, "cur", model=Model.ON_DEMAND)
    assert [offers.warm_spot(made, index) for index in range(3)] == [True, True, False]


def test_on_demand_joins_at_once_in_a_pool_without_spot() -> None:
    made = draft(priced((0.1, 0.1, 0.1), NONE), max_wait="30m")
    made.set(stop_since=made.now)
    assert [pending.on_demand_from(made, index) is None for index in range(3)] == [False, False, True]


def test_a_zone_is_not_given_up_for_a_pool_that_has_no_spot_anywhere() -> None:
    made = draft(priced((0.1, 0.1, 0.1), NONE))
    made.put(2, cur=None, refused=("t4/z-b/on-demand",), refused_at=made.now)
    assert not reservations._all_refused(made)
    made.put(2, refused=tuple(f"t4/{zone}/on-demand" for zone in ZONES))
    assert reservations._all_refused(made)


def test_a_zone_that_one_pool_has_no_more_is_left() -> None:
    assert not offers.out_of_pools(draft())
    assert offers.out_of_pools(draft(pools(zones=ZONES[1:])))


def test_a_mix_does_not_look_for_cheaper_zones() -> None:
    case = on_snapshot(stack=pools())
    assert zone_probe._calm(Draft(*case(*calm(3))))
    assert not zone_probe._calm(Draft(*case(*calm(3, machines=MIX))))


def test_a_claim_says_what_is_missing_of_which_pool() -> None:
    made = draft()
    own = claim.claim(made)
    assert own is not None and own.mix == (("l4", 2), ("t4", 1)) and own.pools == ()
    made.set(dry_since=made.now - 10)
    made.put(2, cur=None)
    short = claim._short(made)
    assert short is not None and {offer.partition("/")[0] for offer in short.offers} == {"t4"}
    made.put(0, cur=None)
    assert claim._short(made) is None


# -- the queue


def small(*named: PoolState) -> StackState:
    return situation.stack(*named or (situation.pool("l4", 4), situation.pool("t4", 2)))


MIXED = {"pools": ("l4", "t4"), "mix": (("l4", 2), ("t4", 1))}


def test_a_claim_needs_room_in_each_of_its_pools() -> None:
    assert reserved(waits("w", 3, **MIXED), on=small()) == {"w": 3}
    busy = runs("r", 2, pools=("t4",), started=situation.NOW)
    assert reserved(busy, waits("w", 3, **MIXED), on=small()) == {"r": 2, "w": 0}
    assert reserved(runs("r", 2, pools=("l4",)), waits("w", 3, **MIXED), on=small()) == {"r": 2, "w": 3}


def test_a_mix_of_other_numbers_is_another_claim() -> None:
    """The same pools and the same number of machines: one fits, the other does not."""
    other = MIXED | {"mix": (("l4", 1), ("t4", 2))}
    on = small(situation.pool("l4", 4), situation.pool("t4", 1))
    assert reserved(waits("v", 3, **other), waits("w", 3, ago_s=1.0, **MIXED), on=on) == {"v": 0, "w": 3}


def test_a_mix_is_placed_by_pool_beside_its_grants_and_replacements() -> None:
    mixed = runs("a", 3, **MIXED)
    held = tuple(Grant("a", 0, attempt, "slot:l4/on-demand") for attempt in (1, 2, 3))
    room = of_running(Allocation(grants=held, claims=(mixed,)), small())
    assert dict(room.placed("a")) == {"l4/on-demand": 2, "t4": 1}
    none = small(situation.pool("l4", 1), situation.pool("t4", 1))
    assert dict(of_running(Allocation(claims=(mixed,)), none).placed("a")) == {"l4": 2, "t4": 1}, "beyond lowered caps"


def test_a_mix_is_placed_before_a_job_that_may_use_any_pool() -> None:
    """A job of any pool would take the L4 first."""
    claims = runs("a", 2), runs("b", 3, **MIXED)
    room = of_running(Allocation(claims=claims), small(situation.pool("l4", 3), situation.pool("t4", 2)))
    assert [dict(room.placed(job)) for job in "ab"] == [{"l4": 1, "t4": 1}, {"l4": 2, "t4": 1}]


def test_machines_are_taken_for_a_mix_though_another_one_cannot_have_them() -> None:
    low = runs("r", 2, pools=("l4",), priority=0)
    same = runs("x", 1, pools=("t4",))
    other = waits("v", 3, ago_s=9 * MINUTE, **MIXED | {"mix": (("l4", 1), ("t4", 2))})
    on = small(situation.pool("l4", 2), situation.pool("t4", 2))
    found = reserved(low, same, other, waits("w", 3, **MIXED), on=on)
    assert found == {"r": 0, "x": 1, "v": 0, "w": 3}


def test_two_mixes_share_the_pools_without_half_a_gang() -> None:
    """Three L4 and two T4: the second mix waits whole until the first has ended."""
    one = world(pools(max_machines=2))
    one.stack = replace(one.stack, pools=(replace(one.stack.pools[0], max_machines=3), one.stack.pools[1]))
    one.memory.stack = one.stack
    one.submit()
    one.submit("efgh2345", replace(one.spec, name="other"))
    for _ in range(int(10 * MINUTE)):
        one.step()
        live = [grant.job for grant in one.memory.allocation[0].grants]
        assert set(live) != {"abcd2345", "efgh2345"}, "no machine is held for a gang that cannot start"
    (runs_,) = {machine.vm.job for machine in one.dynamic()}
    one.store.put_request(runs_, JobRequest(id="c", kind=RequestKind.CANCEL, at=one.t, by="user"))
    one.round(runs_)
    rest = ({"abcd2345", "efgh2345"} - {runs_}).pop()
    one.until(lambda: one.training(rest), 20 * MINUTE)


def test_the_gangs_on_demand_price_is_the_sum_of_its_groups() -> None:
    assert limits.on_demand(Draft(*on_snapshot(stack=pools())(*calm(3, machines=MIX)))) == 2 * 3.0 + 1.0
