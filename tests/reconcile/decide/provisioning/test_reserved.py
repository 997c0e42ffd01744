"""Reserved capacity that idles costs the same without a job: it comes before spot, and is left before it ends."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from spotkeeper.contract.cloud import ResultKind, VmStatus
from spotkeeper.contract.ledger import Event
from spotkeeper.contract.market import PriceRun
from spotkeeper.contract.record import PROBE, Phase
from spotkeeper.contract.stack import Model, ReservedCapacity, StackState
from spotkeeper.reconcile.controller.repair import live_grants
from spotkeeper.report.job.recovery import preemptions
from spotkeeper.report.money.money import attempts, money
from tests.reconcile.controller.test_round import causes, trained
from tests.reconcile.world import JOB, ZONES, World, stack

SECOND = "bcde2345"
HOUR_S = 3600.0


def reserved(*reservations: ReservedCapacity, of: StackState | None = None) -> StackState:
    plain = of or stack()
    pool, *others = plain.pools
    return replace(plain, pools=(replace(pool, reservations=reservations), *others))


def has(zone: str = "z-c", count: int = 2, name: str = "res", **more: object) -> StackState:
    return reserved(ReservedCapacity(name, zone, count, **more))  # type: ignore[arg-type]


def wants(world: World, job: str = JOB) -> list[tuple[Model | None, str | None]]:
    return [(entry.model, entry.zone) for entry in world.events(Event.INTENT, job=job)]


def in_use(world: World) -> list[str]:
    return sorted(one.resource for one in world.memory.read_allocation().value.grants)


@pytest.mark.parametrize("policy", ["balanced", "spot", "on-demand", "shuffle"])
def test_idle_reserved_capacity_comes_first_whatever_the_policy(policy: str) -> None:
    """It is in the zone whose spot machines cost most."""
    world = trained(World(nodes=2, the_stack=has(), policy=policy))
    assert wants(world) == [(Model.RESERVED, "z-c")] * 2
    assert {call.reservation for call in world.inserts()} == {"res"}
    assert in_use(world) == ["slot:pool/reserved/z-c/res"] * 2


def test_a_gang_takes_what_is_reserved_and_buys_the_rest_beside_it() -> None:
    world = trained(World(nodes=3, the_stack=has(count=2)))
    assert sorted(wants(world)) == [(Model.RESERVED, "z-c"), (Model.RESERVED, "z-c"), (Model.SPOT, "z-c")]


def test_a_gang_does_not_leave_a_reserved_machine_for_spot_in_another_zone() -> None:
    """Its own zone has no spot at times, and the spot machine beside the reserved one costs more than elsewhere."""
    world = trained(World(nodes=2, the_stack=has(count=1)))
    at = world.now()
    world.prices["pool"] = (PriceRun(at, 0.9, "z-c"), PriceRun(at, 0.1, "z-a"), PriceRun(at, 0.1, "z-b"))
    alone = trained(World(nodes=1, the_stack=has(count=1)))
    alone.capacity["z-c", Model.SPOT] = 0
    for one in (world, alone):
        one.run(3 * HOUR_S)
        assert one.record().zone == "z-c" and one.record().gen == 1
        assert not [entry for entry in one.events(Event.INTENT) if entry.cause == PROBE]


def test_a_second_job_gets_no_machine_of_a_reservation_that_is_used_up() -> None:
    world = trained(World(nodes=2, the_stack=has(count=2)))
    world.submit(SECOND)
    world.until(lambda: world.training(SECOND), 300)
    assert wants(world, SECOND) == [(Model.SPOT, "z-a")] * 2


def test_without_other_machines_in_its_zone_too_small_a_reservation_is_left_alone() -> None:
    """Otherwise a gang would start there, wait for the rest in vain, and start there again."""
    world = World(nodes=2, the_stack=has(count=1))
    world.capacity = {("z-c", Model.SPOT): 0, ("z-c", Model.ON_DEMAND): 0}
    world.submit()
    world.until(world.training, 600)
    assert {vm.vm.zone for vm in world.dynamic() if vm.agent} == {"z-a"}


@pytest.mark.parametrize("full", [True, False])
def test_a_refused_reservation_makes_way_for_the_next_offer(full: bool) -> None:
    """It is full of other machines, or was deleted: the stack file says more than there is."""
    world = World(nodes=1, the_stack=has())
    if full:
        world.capacity = {("z-c", Model.RESERVED): 0}
    else:
        world.unreserved = {"res"}
    trained(world)
    assert wants(world) == [(Model.RESERVED, "z-c"), (Model.SPOT, "z-c")]
    assert causes(world, Event.REFUSED) == [ResultKind.CAPACITY.value], "so that other jobs try it later, too"
    assert world.record().phase is Phase.RUN and world.record().hold_count == 0
    world.submit(SECOND)
    world.until(lambda: world.training(SECOND), 300)
    assert wants(world, SECOND)[0] == (Model.SPOT, "z-a"), "it was refused a moment ago"


@pytest.mark.parametrize("when", [{"starts": 1_003_600.0}, {"ends": 1_000_600.0}])
def test_capacity_that_has_not_started_or_ends_soon_is_not_used(when: dict[str, float]) -> None:
    assert wants(trained(World(nodes=1, the_stack=has(**when)))) == [(Model.SPOT, "z-a")]


def test_a_job_moves_before_its_reserved_capacity_ends() -> None:
    """All machines go at one time, so one stop replaces them all; no step is lost, and none is preempted."""
    world = trained(World(nodes=2, the_stack=has(ends=1_000_000.0 + 3 * HOUR_S)))
    first = {world.member(node).vm.uid for node in range(2)}
    world.run(2.5 * HOUR_S)
    assert {world.member(node).vm.uid for node in range(2)} == first
    world.until(lambda: world.record().gen == 2 and world.training(), 0.5 * HOUR_S)
    assert {world.member(node).vm.model for node in range(2)} == {Model.SPOT}
    assert causes(world, Event.ENDING) == ["planned end"] * 2
    assert [entry.detail.split(",")[0] for entry in world.events(Event.ENDING)] == ["its reserved capacity ends"] * 2
    assert causes(world, Event.STOP) == ["planned end"]
    assert world.started[1][1] is not None and world.started[1][1][0] == 1, "it began with what the last stop saved"
    assert preemptions(world.events()).total == 0 and world.record().budget.preemptions == 0


def test_a_job_without_other_machines_trains_to_the_end_of_its_block() -> None:
    world = World(nodes=1, the_stack=has(ends=1_000_000.0 + 2 * HOUR_S, block=True))
    world.capacity = {(zone, model): 0 for zone in ZONES for model in (Model.SPOT, Model.ON_DEMAND)}
    trained(world)
    world.until(lambda: world.record().stop, 2 * HOUR_S)
    assert world.now() > 1_000_000.0 + 2 * HOUR_S - 120
    world.run(60)
    assert world.newest is not None, "it saved in time"


def test_an_on_demand_machine_is_replaced_once_reserved_capacity_is_idle() -> None:
    (pool,) = has(count=1).pools
    world = World(nodes=1, the_stack=replace(has(count=1), pools=(replace(pool, zones=("z-c",)),)))
    world.capacity = {("z-c", Model.SPOT): 0, ("z-c", Model.RESERVED): 0}
    trained(world)
    assert world.member(0).vm.model is Model.ON_DEMAND
    world.capacity["z-c", Model.RESERVED] = 1
    world.until(lambda: world.training() and world.member(0).vm.model is Model.RESERVED, 2 * HOUR_S)


def test_what_is_reserved_costs_a_job_nothing_and_saves_it_nothing() -> None:
    """Its owner pays for it whether the job runs or not. The spot machine beside it costs and saves as ever."""
    world = trained(World(nodes=2, the_stack=has(zone="z-a", count=1), max_usd=100.0))
    world.run(HOUR_S)
    ledger = world.events()
    by_model = {one.model: one for one in attempts(ledger)}
    assert by_model[Model.RESERVED].cost(world.now()) == 0.0 < by_model[Model.SPOT].cost(world.now())
    told = money(ledger, world.stack, world.now())
    assert told.spent == pytest.approx(0.3, rel=0.05) and told.on_demand_only == pytest.approx(1.0, rel=0.05)
    assert told.undisturbed == pytest.approx(1.0, rel=0.05), "another run would have the same reservation"
    assert world.record().limits.usd_hour == pytest.approx(0.3)


def test_reserved_machines_count_in_no_limit_on_dollars() -> None:
    """The stack's limit has room for one spot machine, so the gang of three needs its two reserved ones."""
    world = trained(World(nodes=3, the_stack=replace(has(count=2), max_usd_hour=0.4)))
    assert sorted(wants(world))[:2] == [(Model.RESERVED, "z-c")] * 2


def test_a_lost_reserved_machine_is_no_preemption() -> None:
    world = trained(World(nodes=1, the_stack=has()))
    world._remove(world.member(0))
    world.until(lambda: world.record().gen == 2 and world.training(), 900)
    assert world.record().budget.preemptions == 0 and world.record().budget.loss_times == ()
    assert wants(world) == [(Model.RESERVED, "z-c")] * 2


@pytest.mark.parametrize("stops", [False, True])
def test_the_only_reserved_machine_is_replaced_by_itself(stops: bool) -> None:
    """Until the lost machine is gone its capacity is not idle, and a job that buys spot meanwhile stays there."""
    world = trained(World(nodes=1, the_stack=has(count=1)))
    if stops:
        world.member(0).status, world.member(0).dies_at = VmStatus.STOPPING, world.t + 40
        world.member(0).agent = None
    else:
        world.preempt(0)
    world.until(lambda: world.record().gen == 2 and world.training(), 900)
    assert wants(world) == [(Model.RESERVED, "z-c")] * 2
    waits = [entry.detail for entry in world.events(Event.REFUSED) if entry.cause == "wait"]
    assert waits == ["waiting until its lost machine has left reservation res"]


def test_a_lost_machine_that_stays_in_its_reservation_makes_way_for_spot(monkeypatch: pytest.MonkeyPatch) -> None:
    world = trained(World(nodes=1, the_stack=has(count=1)))
    monkeypatch.setattr(world, "_delete", lambda _: (ResultKind.ACCEPTED, ""))
    lost, at = world.member(0), world.now()
    lost.status, lost.agent = VmStatus.STOPPING, None
    world.until(lambda: len(wants(world)) == 2, 600)
    assert wants(world)[1] == (Model.SPOT, "z-c") and world.now() >= at + 300


def test_a_queued_job_starts_where_reserved_capacity_became_idle() -> None:
    """All of the pool's machines were taken when it was submitted."""
    (pool,) = has(count=1).pools
    world = World(nodes=1, the_stack=replace(has(count=1), pools=(replace(pool, max_machines=1),)), steps=600)
    trained(world)
    world.submit(SECOND)
    world.run(60)
    assert world.record(SECOND).reason.startswith("waiting in the queue") and world.record(SECOND).zone is None
    world.until(lambda: world.record().phase is Phase.DONE, 3 * HOUR_S)
    world.until(lambda: world.training(SECOND), 600)
    assert wants(world, SECOND) == [(Model.RESERVED, "z-c")]


def test_a_job_that_takes_over_a_reserved_machine_starts_there() -> None:
    """The queue reserves it a machine while the other job still leaves, so at first its zone is the cheapest one."""
    (pool,) = has(count=1).pools
    world = World(nodes=1, the_stack=replace(has(count=1), pools=(replace(pool, max_machines=1),)), priority="low")
    trained(world)
    world.run(20 * 60)
    world.spec = replace(world.spec, priority="normal")
    world.submit(SECOND)
    world.until(lambda: world.training(SECOND), 900)
    assert wants(world, SECOND) == [(Model.RESERVED, "z-c")]


def test_a_repair_of_the_allocation_finds_what_each_machine_uses() -> None:
    world = trained(World(nodes=2, the_stack=has()))
    assert [grant.resource for grant in live_grants([world.record()])] == ["slot:pool/reserved/z-c/res"] * 2
    assert all(grant.pool == "pool" and grant.reservation == "z-c/res" for grant in live_grants([world.record()]))
