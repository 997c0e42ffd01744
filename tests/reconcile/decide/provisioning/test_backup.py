"""A machine that boots slowly gets a second one beside it, told by whole stories."""

from __future__ import annotations

import random

import msgspec
from msgspec.structs import replace

from spotkeeper.contract.cloud import InsertVm, ResultKind, VmStatus
from spotkeeper.contract.job import JobRequest, RequestKind
from spotkeeper.contract.ledger import Event
from spotkeeper.contract.market import HOUR_S, MarketPast
from spotkeeper.contract.record import BACKUP, SlotState
from spotkeeper.contract.stack import Model
from spotkeeper.reconcile.decide import Times
from spotkeeper.reconcile.select import market
from spotkeeper.reconcile.select.zone_history import BOOTS, FEW_BOOTS, MANY_BOOTS, Boots
from spotkeeper.reconcile.store import paths
from spotkeeper.report.job.events import describe
from tests.reconcile.world import Machine, World, stack

NEVER = 1e9
BOOT_S, SLOW_S = 20.0, 30.0
DEADLINE_S = stack().boot_deadline_s


def known(world: World, boots: int = 20) -> World:
    """Before the job begins, the market has seen so many boots: 20 s in the median, 30 s at the 95th percentile."""
    seen = (BOOT_S,) * (boots - boots // 10) + (SLOW_S,) * (boots // 10)
    past = MarketPast("pool", int(world.t // HOUR_S) - 1, boots_s=seen)
    world.memory.put(paths.market_past("pool"), msgspec.json.encode(past))
    world.submit()
    return world


def backups(world: World) -> list[str]:
    return [entry.detail for entry in world.events(Event.INTENT) if entry.cause == BACKUP]


def only(world: World) -> Machine:
    (machine,) = world.dynamic()
    return machine


def test_a_backup_trains_before_the_boot_deadline_and_the_slow_machine_is_deleted() -> None:
    world = known(World(boot_s=NEVER))
    first = only(world)
    world.boot_s = BOOT_S
    world.until(world.training, 120)
    assert world.t - first.born < DEADLINE_S - 60
    cur = world.record().nodes[0].cur
    assert cur is not None and (cur.attempt, cur.cause) == (2, "start"), "what it is for is what the first was for"
    (told,) = backups(world)
    assert told.startswith("attempt 1 has been booting for ") and "a boot counts as slow after 30 s" in told
    line = describe(next(e for e in world.events(Event.INTENT) if e.cause == BACKUP))
    assert line.startswith("node 0: requesting a backup: a spot machine in z-a at $0.30/h"), line
    (loss,) = world.events(Event.LOSS)
    assert (loss.attempt, loss.cause, loss.detail) == (1, "never joined", "its backup was up first")
    world.run(90)
    assert only(world).vm.attempt == 2 and len(world.memory.read_allocation().value.grants) == 1


def test_a_machine_that_boots_after_all_keeps_its_node_and_the_backup_is_dropped() -> None:
    world = known(World(boot_s=70.0))
    world.boot_s = 60.0  # of the second, which is asked for by the tick after a minute
    world.until(world.training, 120)
    assert len(backups(world)) == 1
    cur = world.record().nodes[0].cur
    assert cur is not None and cur.attempt == 1 and world.record().nodes[0].next is None
    assert world.events(Event.LOSS, Event.PROMOTED) == []
    world.run(90)
    assert only(world).vm.attempt == 1 and len(world.memory.read_allocation().value.grants) == 1


def test_if_both_boot_between_two_rounds_one_trains() -> None:
    world = known(World(boot_s=NEVER))
    first = only(world)
    world.boot_s = NEVER
    world.until(lambda: len(world.dynamic()) == 2, 120)
    world.run(10)
    for machine in world.dynamic():
        machine.up_at = world.t
    world.until(world.training, 90)
    assert world.member(0).vm.uid == first.vm.uid
    world.run(90)
    assert only(world) is first


def test_a_backup_takes_over_at_the_boot_deadline() -> None:
    world = known(World(boot_s=NEVER))
    world.until(lambda: len(world.dynamic()) == 2, 120)
    world.until(lambda: bool(world.events(Event.LOSS)), DEADLINE_S)
    node = world.record().nodes[0]
    assert node.cur is not None and (node.cur.attempt, node.cur.state) == (2, SlotState.INTENT)
    assert node.cur.cause == "start"


def test_with_few_known_boots_a_boot_is_slow_after_one_and_a_half_times_the_slowest() -> None:
    assert Boots.of((30.0,) * (FEW_BOOTS - 1)) == Boots(30.0, None)
    assert Boots.of((20.0, 40.0, 30.0)) == Boots(30.0, 60.0)
    assert Boots.of((20.0,) * (MANY_BOOTS - 2) + (40.0,)).p95_s == 60.0
    assert Boots.of((20.0,) * (MANY_BOOTS - 1) + (40.0,)).p95_s == 40.0
    world = known(World(boot_s=NEVER), boots=FEW_BOOTS)
    world.until(lambda: bool(backups(world)), 1.5 * BOOT_S + 65.0)
    (told,) = backups(world)
    assert "a boot counts as slow after 30 s" in told and "95 %" not in told, "three boots have no 95th percentile"


def test_with_too_few_known_boots_there_is_no_backup() -> None:
    world = known(World(boot_s=NEVER), boots=FEW_BOOTS - 1)
    world.run(DEADLINE_S - 10)
    assert backups(world) == [] and only(world).vm.attempt == 1


def test_an_ordinary_start_of_a_large_gang_has_no_backups() -> None:
    """The slowest of 16 takes longer than the 95th percentile of one."""
    world = known(World(nodes=16, boot_s=SLOW_S + 5.0))
    world.until(world.training, 200)
    assert backups(world) == [] and len(world.inserts()) == 16


def test_without_room_under_the_caps_a_hopeless_boot_is_given_up() -> None:
    world = known(World(boot_s=NEVER, the_stack=stack(max_machines=1)))
    first = only(world)
    world.run(1.5 * SLOW_S - 1.0)
    world.round()
    assert backups(world) == [] and only(world) is first
    assert world.record().reason == "", "nothing is wrong with the job"
    world.boot_s = BOOT_S
    world.until(world.training, 60.0 + BOOT_S + 30.0)
    assert only(world).vm.attempt == 2 and backups(world) == []
    (loss,) = world.events(Event.LOSS)
    assert (loss.attempt, loss.cause) == (1, "never joined")
    assert loss.detail.endswith("the caps have no room for a backup")


def test_where_too_few_boots_are_known_the_boot_deadline_alone_counts_whatever_the_caps() -> None:
    world = known(World(boot_s=NEVER, the_stack=stack(max_machines=1)), boots=FEW_BOOTS - 1)
    world.run(DEADLINE_S - 10)
    assert only(world).vm.attempt == 1


def test_a_machine_of_on_demand_that_hangs_does_not_block_the_only_on_demand_machine_allowed() -> None:
    world = World(boot_s=NEVER, the_stack=stack(max_on_demand=1))
    for zone in world.stack.zones():
        world.capacity[zone, Model.SPOT] = 0
    known(world)
    world.run(10)
    world.boot_s = BOOT_S
    world.until(world.training, 1.5 * SLOW_S + 60.0 + BOOT_S + 30.0)
    assert world.member(0).vm.model is Model.ON_DEMAND and world.member(0).vm.attempt > 1


def test_spot_may_back_up_on_demand_at_its_cap() -> None:
    world = World(boot_s=NEVER, the_stack=stack(max_on_demand=1))
    world.options.times = Times(cold_s=SLOW_S)
    for zone in world.stack.zones():
        world.capacity[zone, Model.SPOT] = 0
    known(world)
    assert only(world).vm.model is Model.ON_DEMAND
    world.run(10)
    world.capacity.clear()
    world.boot_s = BOOT_S
    world.until(world.training, DEADLINE_S)
    assert world.member(0).vm.model is Model.SPOT and len(backups(world)) == 1


def test_a_refused_backup_changes_nothing() -> None:
    world = World(boot_s=NEVER, policy="spot")
    for zone in world.stack.zones():
        world.capacity[zone, Model.SPOT] = 1
    known(world)
    first = only(world)
    world.run(150)
    assert world.events(Event.REFUSED) != [] and only(world) is first
    first.up_at = world.t
    world.until(world.training, 90)
    assert world.member(0) is first


def test_backups_leave_half_of_the_hours_launches_for_losses() -> None:
    world = known(World(boot_s=NEVER))
    world.run(HOUR_S - 10)
    assert len(backups(world)) <= Times().launches_node / 2
    made = {(action.node, action.attempt) for action in world.inserts()}
    assert len(made) <= Times().launches_node


def test_a_hopeless_boot_has_a_backup_whatever_the_other_nodes_launches_were() -> None:
    world = known(World(nodes=2, boot_s=NEVER))
    first = world.dynamic()[0]
    for machine in world.dynamic()[1:]:
        machine.up_at = world.t
    world.options.times = Times(launches_node=8, launches_job=0)  # 8 an hour for the job: 4 are spare
    record = world.record()
    nodes = (record.nodes[0], replace(record.nodes[1], launches=4))
    read = world.memory.read_record(record.job)
    assert read is not None and world.memory.cas_record(replace(record, ver=record.ver + 1, nodes=nodes), read.token)
    world.run(1.5 * SLOW_S - 1.0)
    world.round()
    assert backups(world) == [], "half of the job's launches are for losses"
    world.until(lambda: bool(backups(world)), 60.0)
    assert first.vm in [machine.vm for machine in world.dynamic()]


def test_a_static_machine_has_no_backup() -> None:
    world = World(the_stack=stack(static=1))
    machine = next(m for m in world.machines.values() if not m.vm.job)
    world.run(10)
    machine.agent = None
    machine.up_at = NEVER
    known(world)
    world.run(100)
    assert backups(world) == [] and machine.status is VmStatus.RUNNING


# -- guards: in each story one of them decides alone


class Throttled(World):
    """The cloud takes no order before ``open_at``."""

    open_at = 0.0

    def _insert(self, action: InsertVm) -> tuple[ResultKind, str]:
        return (ResultKind.THROTTLED, "rateLimitExceeded") if self.t < self.open_at else super()._insert(action)


def test_a_boot_counts_from_the_clouds_own_time_of_the_order() -> None:
    """A throttled order is a minute late: the machine boots in its usual time, whenever the record asked for it."""
    world = Throttled(boot_s=SLOW_S - 5.0)
    world.open_at = world.t + 2 * SLOW_S
    known(world)
    world.until(lambda: world.dynamic() != [], 120)
    world.run(10)
    world.round()
    assert backups(world) == []
    world.until(world.training, 120)
    assert only(world).vm.attempt == 1


def test_a_gang_that_lacks_a_machine_gets_no_backup() -> None:
    """It cannot begin anyway: the second machine would only wait as well, and be paid for."""
    world = World(nodes=2, boot_s=NEVER, policy="spot")
    for zone in world.stack.zones():
        world.capacity[zone, Model.SPOT] = 1
    known(world)
    world.run(100)
    assert len(world.dynamic()) == 1 and [node.cur is None for node in world.record().nodes].count(True) == 1
    assert backups(world) == []
    world.capacity.clear()
    world.until(lambda: backups(world) != [], 300)
    assert len(world.dynamic()) == 3


def test_while_the_breaker_is_open_no_machine_has_a_backup() -> None:
    """Both machines vanish, and their successors boot slowly: nobody knows yet what it is that takes machines."""
    world = known(World(nodes=2, policy="on-demand"))
    world.until(world.training, 120)
    world.run(120)
    world.boot_s = NEVER
    for node in (0, 1):
        world.request(RequestKind.SWAP, node=node)
    assert len(world.dynamic()) == 4
    world.preempt(0)
    world.preempt(1)
    world.until(lambda: world.record().limits.closed_until > world.t, 90)
    assert all(node.cur is not None and node.next is None for node in world.record().nodes), "they took over"
    world.run(world.record().limits.closed_until - world.t - 1.0)
    assert backups(world) == []
    world.until(lambda: len(backups(world)) == 2, 90)


def test_a_backup_is_of_the_same_machine_type() -> None:
    """A gang waits for its slowest machine, so one of another type would be no replacement."""
    one = stack(max_machines=1)
    other = replace(one.pools[0], name="other", machine_type="n", max_machines=5)
    world = known(World(boot_s=NEVER, the_stack=replace(one, pools=(*one.pools, other))))
    cur = world.record().nodes[0].cur
    assert cur is not None and cur.pool == "pool"
    world.run(DEADLINE_S - 10)
    assert backups(world) == []
    alike = replace(other, machine_type="m")
    world = known(World(boot_s=NEVER, the_stack=replace(one, pools=(*one.pools, alike))))
    world.until(lambda: backups(world) != [], DEADLINE_S)
    assert {machine.vm.pool for machine in world.dynamic()} == {"pool", "other"}


def test_a_backup_in_a_left_zone_is_released() -> None:
    """The other machine is lost, and its zone has no more: the gang starts in another zone, without the backup."""
    world = known(World(nodes=2, boot_s=NEVER, policy="spot"))
    quick, _ = world.dynamic()
    quick.up_at = world.t
    world.until(lambda: len(backups(world)) == 1, 120)
    world.run(10)
    home = world.record().zone
    assert home is not None and len(world.dynamic()) == 3
    world.capacity[home, Model.SPOT] = 0
    world._remove(quick)
    world.until(lambda: world.record().zone != home, 90)
    world.run(2)
    nodes = world.record().nodes
    assert [node.cur.zone == home for node in nodes if node.cur is not None] == [False, False]
    assert all(node.next is None for node in nodes)
    world.run(90)
    assert {machine.vm.zone for machine in world.dynamic()} == {world.record().zone}


# -- what the boot history keeps of machines that were overtaken


def test_a_zone_where_one_boot_in_ten_takes_three_times_as_long_keeps_its_95th_percentile() -> None:
    """The slow ones are overtaken: without them the history would have quick boots alone, and ever more backups."""
    draw, usual_s = random.Random(1), 60.0  # noqa: S311  a seed, so that a story can be told again
    world = World(boot_s=usual_s)
    quick = MarketPast("pool", int(world.t // HOUR_S) - 1, boots_s=(usual_s,) * BOOTS)
    world.memory.put(paths.market_past("pool"), msgspec.json.encode(quick))
    p95_s: list[float] = []
    launched: list[int] = []
    for number in range(150):
        job = f"slow{number:04d}"
        world.boot_s = usual_s * draw.uniform(0.9, 1.1) * (3 if number % 10 == 9 else 1)
        world.submit(job)
        world.boot_s = usual_s
        world.until(lambda job=job: world.training(job), 240)
        world.store.put_request(job, JobRequest(id="end", kind=RequestKind.CANCEL, at=world.t, by="user"))
        world.round(job)
        world.until(lambda: world.dynamic() == [], 240)
        (seen, *_) = market.read(world.store, world, world.stack, world.t)
        p95_s.append(seen.slow_boot_s or 0.0)
        launched.append(len(world.inserts()))
    assert 2 * usual_s < min(p95_s[100:]) <= max(p95_s[100:]) < 3.3 * usual_s
    assert launched[-1] - launched[99] <= 53, "one boot in twenty has a backup, at most"
