"""Another region becomes the home: the old function stops first, no number is used twice, and never two decide."""

from __future__ import annotations

from dataclasses import replace as changed

import pytest
from msgspec.structs import replace

from spotkeeper.contract.cloud import Disk
from spotkeeper.contract.record import Phase, Record
from spotkeeper.reconcile.controller.home import RAISE, AwayError, check_home, raised
from spotkeeper.reconcile.controller.reconcile_job import Ended, run_round
from spotkeeper.reconcile.controller.tick import TickResult, tick
from spotkeeper.reconcile.service.runtime import Runtime, settings_from_env
from tests.reconcile.world import JOB, CrashError, World, stack
from tests.sim.test_regions import ABROAD, HOME, two_regions


@pytest.fixture
def world() -> World:
    world = World(nodes=2, the_stack=two_regions(stack()), regions=(HOME, ABROAD))
    world.options = changed(world.options, region=HOME)
    world.submit()
    world.until(world.training, 300)
    world.run(120)
    assert world.store.read_allocation().value.home == HOME
    return world


def move_home(world: World, region: str = ABROAD) -> None:
    """What `up` writes. The world's rounds are then those of the function there."""
    world.stack = world.memory.stack = replace(world.stack, region=region)
    world.options = changed(world.options, region=region)


def at(world: World, region: str) -> TickResult:
    return tick(world.store, world, world, changed(world.options, region=region))


def test_one_write_stops_the_old_home_and_a_tick_lets_the_new_one_decide(world: World) -> None:
    before, names = world.record(), {world.store.read_allocation().value.nonce}
    with pytest.raises(AwayError, match=f"the home of stack .* is {HOME}: the function in {ABROAD} does nothing"):
        at(world, ABROAD)
    move_home(world)
    for use in (at, lambda w, region: run_round(w.store, w, JOB, w, changed(w.options, region=region))):
        with pytest.raises(AwayError):
            use(world, HOME)
    assert run_round(world.store, world, JOB, world, world.options).ended is Ended.BUSY, "it has not taken over"
    assert world.record() == before
    assert at(world, ABROAD).trouble == ""
    names.add(world.store.read_allocation().value.nonce)
    assert len(names) == 2, "a writer whose answer was lost knows its own write by it"
    after = world.record()
    assert [node.top for node in after.nodes] == [node.top + RAISE for node in before.nodes]
    assert [node.cur for node in after.nodes] == [node.cur for node in before.nodes], "what trains, trains on"
    assert (after.gen, after.stop, world.training()) == (before.gen, False, True)
    world.preempt(0)
    world.until(lambda: world.training() and world.record().gen > before.gen, 600)
    assert world.record().nodes[0].cur.attempt > RAISE  # type: ignore[union-attr]


def test_a_takeover_that_is_killed_anywhere_is_done_again(world: World) -> None:
    """Between any two of its writes; the old home is away all the time."""
    move_home(world)
    store, before = world.store, world.record()
    for name in ("cas_record", "cas_allocation"):
        real = getattr(store, name)

        def killed(*_: object) -> None:
            raise CrashError

        setattr(store, name, killed)
        with pytest.raises(CrashError):
            at(world, ABROAD)
        setattr(store, name, real)
        assert store.read_allocation().value.home == HOME
        assert run_round(store, world, JOB, world, world.options).ended is Ended.BUSY
        with pytest.raises(AwayError):
            at(world, HOME)
    assert at(world, ABROAD).trouble == ""
    assert store.read_allocation().value.home == ABROAD
    assert world.record().nodes[0].top >= before.nodes[0].top + 2 * RAISE
    world.run(300)
    assert world.training() and world.record().gen == before.gen, "nothing that trained was touched"


def test_a_region_that_does_not_answer_delays_the_takeover_but_not_the_old_home(world: World) -> None:
    move_home(world)
    world.blind = {"y-b"}
    assert at(world, ABROAD).trouble == f"{ABROAD} takes over from {HOME} once y-b answers"
    assert world.store.read_allocation().value.home == HOME
    world.blind = {"z-a"}
    assert at(world, ABROAD).trouble == ""
    world.blind = set()
    world.run(180)
    assert world.training()


def test_records_that_lack_the_last_minutes_lose_no_checkpoint_and_use_no_number_twice(world: World) -> None:
    """The bucket's other half has what was written before the gang lost a machine and moved on."""
    stale, allocation = world.memory.records[JOB], world.memory.allocation
    used = {(one.node, one.attempt) for one in world.inserts()}
    world.preempt(0)
    world.until(lambda: world.training() and world.record().gen > stale[0].gen, 600)
    world.run(120)
    newest = world.newest
    used |= {(one.node, one.attempt) for one in world.inserts()}
    lost = world.record()
    world.memory.records[JOB], world.memory.allocation = stale, allocation
    move_home(world)
    assert at(world, ABROAD).trouble == ""
    record = world.record()
    assert record.gen > lost.gen and all(node.top > RAISE for node in record.nodes)
    assert [node.disk for node in record.nodes] == [node.disk for node in lost.nodes]
    world.until(lambda: world.training() and world.record().gen > lost.gen, 900)
    fresh = {(one.node, one.attempt) for one in world.inserts()} - used
    assert len(fresh) >= 2 and all(attempt > RAISE for _, attempt in fresh)
    assert world.started[-1][1] is not None and newest is not None and world.started[-1][1] >= newest
    world.run(300)
    assert {(vm.vm.node, vm.vm.attempt) for vm in world.dynamic()} <= fresh, "the old machines are gone"


def test_a_node_without_its_last_writes_goes_on_from_the_disk_that_it_used_last(world: World) -> None:
    """The attached one, else its own, else the oldest: a disk whose first use was not recorded may be empty."""
    record, (own, *_) = world.record(), [disk for disk in world.list(world.stack.stack).disks if disk.node == 0]
    later = [replace(own, name=f"disk-{number}", number=number, users=(), zone=f"{number}") for number in (8, 7)]
    listing = world.list(world.stack.stack)

    def found(*disks: Disk) -> tuple[int, str | None]:
        node = raised(record, replace(listing, disks=disks), 0.0).nodes[0]
        assert node.disk_top == max(disk.number for disk in disks)
        return node.disk, node.zone

    assert found(replace(later[0], users=("a-machine",)), replace(own, users=()), later[1]) == (8, "8")
    assert found(*later, replace(own, users=())) == (own.number, own.zone)
    assert found(*later) == (7, "7")


def test_machines_of_other_jobs_and_of_nodes_that_are_no_more_raise_no_number(world: World) -> None:
    record, listing = world.record(), world.list(world.stack.stack)
    (first, *rest) = listing.vms
    other, beyond = replace(first, job="wxyz2345", attempt=70), replace(first, node=len(record.nodes), attempt=80)
    known = raised(record, listing, 0.0)
    assert raised(record, replace(listing, vms=(first, *rest, other, beyond)), 0.0) == known
    later = raised(record, replace(listing, vms=(replace(first, attempt=90), *rest)), 0.0)
    assert later.nodes[first.node].top == 90 + RAISE


def test_an_ended_job_stays_as_it_is(world: World) -> None:
    ended = replace(world.record(), phase=Phase.DONE)
    assert raised(ended, world.list(world.stack.stack), 0.0) is ended


def test_one_region_has_one_home() -> None:
    check_home(stack(), "elsewhere")
    world = World(nodes=1)
    world.submit()
    world.until(world.training, 300)
    assert world.store.read_allocation().value.home == ""
    assert isinstance(world.record(), Record)


def test_a_function_abroad_answers_no_agent(world: World) -> None:
    env = {"SPOTKEEPER_STACK": "t", "SPOTKEEPER_BUCKET": "gs://b", "SPOTKEEPER_REGION": ABROAD}
    abroad = Runtime(settings_from_env(env), store=world.store, cloud=world)
    with pytest.raises(AwayError):
        abroad.stack()
    assert abroad.options().region == ABROAD
    move_home(world)
    assert abroad.stack() == world.stack
