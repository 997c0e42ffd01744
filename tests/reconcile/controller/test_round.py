"""Whole stories of a job, against an in-memory cloud under virtual time.

``World.check`` asserts safety after every step: one member per node and generation, one writer per disk, no
live machine deleted, no node granted twice; and every generation starts from the newest commit there is.
"""

from __future__ import annotations

import threading
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from spotkeeper.contract.cloud import Action, CreateSnapshot, DeleteVm, InsertVm, Listing, Result, VmStatus
from spotkeeper.contract.facts import Fact, Kind
from spotkeeper.contract.job import Checkpoint, JobRequest, Nodes, RequestKind, Retry
from spotkeeper.contract.ledger import Event
from spotkeeper.contract.market import HOUR_S, Observation
from spotkeeper.contract.record import NO_SPOT_YET, Hold, Outcome, Phase, SlotState
from spotkeeper.contract.stack import Model, StackState
from spotkeeper.reconcile.controller import reconcile_job
from spotkeeper.reconcile.controller.reconcile_job import Ended, Prefetched, RoundOptions, run_round
from spotkeeper.reconcile.controller.tick import tick
from spotkeeper.reconcile.decide import Times
from spotkeeper.reconcile.store.store import open_store
from tests.reconcile.world import JOB, Machine, World, stack


def trained(world: World) -> World:
    world.run(5)  # static machines say hello
    world.submit()
    world.until(world.training, 300)
    return world


def finish(world: World, outcome: Outcome = Outcome.SUCCEEDED) -> None:
    """To DONE, and nothing is left."""
    world.until(lambda: world.record().phase is Phase.DONE, 1500)
    assert world.record().outcome is outcome
    assert world.dynamic() == []
    assert [name for (name, _), drive in world.drives.items() if drive.disk.job] == []
    assert world.shots == {}
    assert [g for g in world.memory.allocation[0].grants if g.resource.startswith("slot:")] == []
    assert world.memory.active == set()
    assert JOB in world.memory.tombs


def causes(world: World, event: Event) -> list[str | None]:
    return [entry.cause for entry in world.events(event)]


# -- start and end


def test_a_gang_starts_in_one_zone_and_ends_with_nothing_left() -> None:
    world = trained(World(nodes=3, steps=100))
    record = world.record()
    assert (record.gen, record.members, record.zone) == (1, (0, 1, 2), "z-a")
    assert {node.cur.zone for node in record.nodes if node.cur} == {"z-a"}
    finish(world)
    assert causes(world, Event.INTENT) == ["start"] * 3
    assert len(world.events(Event.GONE)) == 3
    assert world.record().gen == 1


def test_intents_carry_price_zone_model_and_are_written_before_the_call() -> None:
    world = trained(World(nodes=2))
    intents = {(e.node, e.attempt): e for e in world.events(Event.INTENT)}
    first = min(at for at, action, _ in world.made if isinstance(action, InsertVm))
    assert all(entry.at <= first and entry.model is Model.SPOT for entry in intents.values())
    assert {(entry.price, entry.on_demand, entry.zone) for entry in intents.values()} == {(0.30, 1.0, "z-a")}
    assert {(a.node, a.attempt) for a in world.inserts()} == set(intents)


def test_no_capacity_in_the_first_zone_starts_the_gang_in_the_next() -> None:
    world = World(nodes=2)
    world.capacity["z-a", Model.SPOT] = 0
    trained(world)
    assert world.record().zone == "z-b"
    assert {m.vm.zone for m in world.dynamic()} == {"z-b"}


def test_half_a_gangs_capacity_moves_the_whole_gang_before_it_has_data() -> None:
    world = World(nodes=2, steps=60)
    world.capacity["z-a", Model.SPOT] = 1
    world.stockout_lists = True
    trained(world)
    assert {m.vm.zone for m in world.dynamic() if m.agent and m.agent.alive} == {"z-b"}
    finish(world)


def test_no_spot_anywhere_starts_on_demand() -> None:
    world = World(nodes=2)
    for zone in ("z-a", "z-b", "z-c"):
        world.capacity[zone, Model.SPOT] = 0
    trained(world)
    assert {m.vm.model for m in world.dynamic()} == {Model.ON_DEMAND}
    assert world.events(Event.FALLBACK)


def test_without_capacity_a_job_waits_with_a_reason_and_starts_later() -> None:
    world = World(nodes=1, policy="spot")
    for zone in ("z-a", "z-b", "z-c"):
        world.capacity[zone, Model.SPOT] = 0
    world.submit()
    world.run(120)
    assert "waiting for capacity" in world.record().reason
    assert world.dynamic() == []
    world.capacity.clear()
    world.until(world.training, 400)
    assert world.record().reason == ""


def test_the_stacks_caps_make_a_second_job_wait() -> None:
    world = World(nodes=2, steps=60, the_stack=stack(max_machines=2))
    trained(world)
    world.submit("wxyz2345")
    world.run(30)
    assert len(world.dynamic()) == 2
    assert "waiting in the queue" in world.record("wxyz2345").reason
    world.until(lambda: world.record("wxyz2345").phase is Phase.DONE, 900)
    assert world.record().phase is Phase.DONE


# -- losses


@pytest.mark.parametrize("node", [0, 2])
def test_an_unannounced_loss_is_replaced_and_survivors_keep_their_machines(node: int) -> None:
    world = trained(World(nodes=3, steps=400))
    world.run(60)
    keep = [world.member(other).vm.uid for other in range(3) if other != node]
    world.preempt(node)
    world.until(lambda: world.record().gen == 2 and world.training())
    assert [world.member(other).vm.uid for other in range(3) if other != node] == keep
    assert causes(world, Event.LOSS) == ["loss"]
    assert world.record().budget.preemptions == 1
    assert world.record().budget.crashes == 0
    finish(world)


def test_replicated_state_does_not_wait_for_the_lost_nodes_disk() -> None:
    world = trained(World(nodes=2))
    world.run(40)
    gone = world.preempt(1)
    name = next(d.disk.name for d in world.drives.values() if d.disk.node == 1)
    drive = world.drives[name, "z-a"]
    drive.user = gone.vm.uid  # the cloud is slow to let go
    world.machines[gone.vm.uid] = gone
    gone.dies_at = world.t + 100

    gone.status, gone.agent = VmStatus.STOPPING, None
    world.until(lambda: world.record().gen == 2 and world.training(), 90)
    cur = world.record().nodes[1].cur
    assert cur is not None and not cur.disk
    world.run(60)
    assert world.member(1).agent and world.member(1).agent.mounted is drive


def test_sharded_state_waits_for_the_disk() -> None:
    world = trained(World(nodes=2, checkpoint=Checkpoint(replicated=False)))
    world.run(40)
    world.preempt(1)
    world.until(lambda: world.record().gen == 2 and world.training())
    cur = world.record().nodes[1].cur
    assert cur is not None and cur.disk


def test_two_losses_at_once_are_recovered() -> None:
    world = trained(World(nodes=3, steps=400))
    world.run(45)
    world.preempt(0)
    world.preempt(1)
    world.until(lambda: world.record().gen == 2 and world.training())
    assert len(world.events(Event.GENERATION)) == 2
    finish(world)


def test_after_the_loss_of_all_machines_their_disks_are_awaited() -> None:
    world = trained(World(nodes=3, steps=400))
    world.run(45)
    for node in range(3):
        world.preempt(node)
    world.until(lambda: world.record().gen == 2 and world.training())
    assert all(node.cur and node.cur.disk for node in world.record().nodes)
    assert world.started[-1][1] is not None
    finish(world)


def test_a_loss_right_after_a_replacement_does_not_start_from_a_stale_disk() -> None:
    """Node 1's disk comes back late and old; then node 0, which has the newest, goes."""
    world = trained(World(nodes=2, boot_s=10))
    world.run(35)
    world.preempt(1)
    world.until(lambda: world.record().gen == 2 and world.training())
    world.run(3)
    world.preempt(0)
    world.until(lambda: world.record().gen == 3 and world.training())
    world.run(2)
    world.preempt(1)
    world.until(lambda: world.record().gen == 4 and world.training())


def test_a_disk_that_is_never_released_does_not_stop_the_job_for_ever() -> None:
    world = trained(World(nodes=2))
    world.run(60)
    stuck = world.preempt(0)
    world.preempt(1)
    stuck.status, stuck.agent = VmStatus.STOPPING, None
    world.machines[stuck.vm.uid] = stuck
    next(d for d in world.drives.values() if d.disk.node == 0).user = stuck.vm.uid
    began = world.t
    world.until(lambda: world.record().gen == 2 and world.training(), 600)
    assert world.t - began > 300, "only after all disks had their time"
    assert world.started[-1][1] == world.newest


def test_a_reboot_makes_a_new_generation_with_the_same_machine() -> None:
    world = trained(World(nodes=2))
    world.run(30)
    uid = world.member(1).vm.uid
    world.reboot(1)
    world.until(lambda: world.record().gen == 2 and world.training())
    assert world.member(1).vm.uid == uid
    assert len(world.inserts()) == 2


def test_a_silent_machine_is_replaced_after_a_roll_call() -> None:
    world = trained(World(nodes=2))
    world.run(30)
    hung = world.member(1)
    assert hung.agent
    hung.agent.hung = True
    world.member(0).agent.hung = False  # type: ignore[union-attr]
    # a gang of which one hangs makes no progress: the lowest member's reports stop to move
    agent = world.member(0).agent
    assert agent
    agent._progress = lambda: None  # type: ignore[method-assign]
    world.until(lambda: world.record().gen >= 2 and world.training(), 900)
    assert causes(world, Event.ROLL) == ["silence"]
    assert world.record().budget.crashes == 0
    assert hung.vm.uid not in world.machines


def test_a_zone_that_does_not_answer_proves_nothing() -> None:
    world = trained(World(nodes=2))
    before = len(world.made)
    world.blind.add("z-a")
    world.run(200)
    assert world.record().gen == 1
    assert len(world.made) == before
    world.blind.clear()
    world.run(100)
    assert world.training()


# -- notices: make before break


def test_a_long_notice_loses_no_step_and_boots_the_replacement_first() -> None:
    world = trained(World(nodes=2, steps=500))
    world.run(33)
    step = world.member(0).agent.step_no  # type: ignore[union-attr]
    old = world.preempt(1, notice_s=120)
    world.until(lambda: world.record().gen == 2 and world.training())
    gen, start = world.started[-1]
    assert start is not None and gen == 2
    assert start[1] >= step + 20  # it went on training while the successor booted
    assert old.agent and start[1] == old.agent.step_no  # and nothing was done twice
    assert causes(world, Event.PROMOTED) == ["notice"]
    assert world.events(Event.LOSS) == []
    finish(world)


def test_a_short_notice_saves_before_the_deadline_and_continues_with_the_replacement() -> None:
    world = trained(World(nodes=2, boot_s=60))
    world.run(33)
    old = world.preempt(0, notice_s=25)
    world.until(lambda: world.record().gen == 2 and world.training())
    assert old.agent and world.started[-1][1] is not None
    assert world.started[-1][1][1] == old.agent.step_no
    assert len(world.inserts()) == 3


def test_two_notices_including_the_masters_are_handled() -> None:
    world = trained(World(nodes=3, steps=500))
    world.run(33)
    world.preempt(0, notice_s=120)
    world.run(5)
    world.preempt(2, notice_s=100)
    world.until(lambda: world.record().gen == 2 and world.training())
    assert len(world.events(Event.PROMOTED)) == 2
    finish(world)


def test_a_machine_under_notice_dies_before_its_replacement_is_ready() -> None:
    world = trained(World(nodes=2, boot_s=60))
    world.run(33)
    old = world.preempt(1, notice_s=120)
    world.run(10)
    world._remove(old)
    world.until(lambda: world.record().gen == 2 and world.training())
    assert len(world.inserts()) == 3, "next takes over in whatever state it is"


def test_a_reprieve_drops_the_replacement_and_training_continues() -> None:
    world = trained(World(nodes=2, boot_s=60))
    world.run(33)
    old = world.preempt(1, notice_s=120)
    world.run(20)
    world.reprieve(old)
    world.run(60)
    assert world.record().gen == 1
    assert world.training()
    assert world.record().nodes[1].next is None
    assert len(world.dynamic()) == 2
    assert len(world.events(Event.REPRIEVE)) == 1


def test_a_reprieve_after_the_stop_continues_in_a_new_generation() -> None:
    world = trained(World(nodes=2, boot_s=60))
    world.run(33)
    old = world.preempt(1, notice_s=25)
    world.until(lambda: world.record().stop)
    world.run(4)
    world.reprieve(old)
    world.until(lambda: world.record().gen == 2 and world.training())
    assert world.member(1) is old


def test_a_lost_replacement_is_requested_again() -> None:
    world = trained(World(nodes=1, boot_s=30))
    world.run(30)
    world.preempt(0, notice_s=200)
    world.run(10)
    following = world.record().nodes[0].next
    assert following is not None
    machine = next(m for m in world.dynamic() if m.vm.attempt == following.attempt)
    world._remove(machine)
    world.until(lambda: world.record().gen == 2 and world.training())
    assert [a.attempt for a in world.inserts()] == [1, 2, 3]


def test_without_a_replacement_a_noticed_machine_trains_until_its_loss() -> None:
    world = trained(World(nodes=2, policy="spot"))
    world.run(33)
    world.capacity["z-a", Model.SPOT] = 2
    world.preempt(1, notice_s=60)
    world.run(30)
    assert world.record().nodes[1].next is None
    world.until(lambda: world.record().gen >= 2 and world.training(), 400)


# -- the crash budget


def test_a_crash_restarts_in_a_new_generation_and_counts() -> None:
    world = trained(World(nodes=2, steps=200))
    world.run(30)
    world.crashing = 1
    world.until(lambda: world.record().gen == 2 and world.training())
    assert world.record().budget.crashes == 1
    assert world.record().budget.preemptions == 0
    assert causes(world, Event.GENERATION) == ["start", "crash"]
    assert len(world.inserts()) == 2
    finish(world)


def holding(world: World) -> None:
    """The job holds for a failure: no machine, no grant (static machines' neither), only its disks."""
    world.until(lambda: world.record().phase is Phase.HOLD, 300)
    world.until(lambda: not world.dynamic() and not world.memory.allocation[0].grants, 100)
    assert world.record().hold is Hold.FAILURE and world.record().outcome is None
    disks = {name: drive.held for (name, _), drive in world.drives.items() if drive.disk.job}
    calls = len(world.made)
    world.run(3600)
    assert len(world.made) == calls, "nothing more is asked of the cloud"
    assert {name: drive.held for (name, _), drive in world.drives.items() if drive.disk.job} == disks != {}


def fatal(world: World, node: int) -> None:
    agent = world.member(node).agent
    assert agent
    agent.say(Kind.EXIT, world.record().gen, "93")


def test_a_used_up_crash_budget_holds_the_job_and_resume_renews_it() -> None:
    world = trained(World(nodes=2, steps=400, retry=Retry(crashes=1)))
    world.run(33)
    world.crashing = 2
    holding(world)
    assert world.record().reason == "node 0 exited with 1; the crash budget of 1 is used up"
    assert len(world.events(Event.CRASH)) == 2
    newest = world.newest
    assert newest is not None

    world.request(RequestKind.RESUME)
    assert (world.record().hold, world.record().reason, world.record().budget.crashes) == (None, "", 0)
    world.until(world.training, 300)
    assert (world.record().gen, world.started[-1][1]) == (3, newest), "a new generation from the newest checkpoint"
    world.run(5)
    world.crashing = 1
    world.until(lambda: world.record().gen == 4 and world.training(), 300)
    assert world.record().budget.crashes == 1, "the budget is a fresh one"
    assert causes(world, Event.GENERATION) == ["start", "crash", "resume", "crash"]
    finish(world)


def test_exit_93_holds_the_job_at_once_and_releases_its_static_machine() -> None:
    world = trained(World(nodes=2, the_stack=stack(static=1)))
    world.run(33)
    fatal(world, 0)
    holding(world)
    assert world.record().reason == "node 0 exited with 93: a restart cannot help"
    assert world.record().budget.crashes == 0 and not world.events(Event.CRASH)
    assert [entry.node for entry in world.events(Event.HOLD)] == [0], "whose log a person wants to see"


def test_exit_93_counts_although_the_gang_saves_and_stops() -> None:
    world = trained(World(nodes=2))
    world.run(33)
    world.request(RequestKind.PAUSE)
    assert world.record().stop and world.record().phase is Phase.RUN
    fatal(world, 1)
    holding(world)


def test_a_failed_job_on_hold_can_be_cancelled() -> None:
    world = trained(World(nodes=2))
    fatal(world, 1)
    holding(world)
    world.request(RequestKind.CANCEL)
    finish(world, Outcome.CANCELLED)


@pytest.mark.parametrize("keep_disks", [False, True])
def test_a_failed_job_ends_without_a_resume_in_time(keep_disks: bool) -> None:
    world = trained(World(nodes=1, hold_days=0.125, keep_disks=keep_disks))
    fatal(world, 0)
    holding(world)
    assert world.record().hold_ends == world.events(Event.HOLD)[0].at + 0.125 * 86_400
    world.until(lambda: world.record().phase is Phase.DONE, 0.125 * 86_400 + Times().sure_s)
    assert world.record().outcome is Outcome.FAILED
    [end] = world.events(Event.END)
    assert end.detail == "no resume in time: node 0 exited with 93: a restart cannot help"
    assert bool([1 for drive in world.drives.values() if drive.disk.job]) is keep_disks


def test_a_pause_has_no_time_limit() -> None:
    world = trained(World(nodes=1, hold_days=0.05))
    world.request(RequestKind.PAUSE)
    world.run(0.1 * 86_400)
    assert (world.record().phase, world.record().hold) == (Phase.HOLD, Hold.PAUSE)


def test_without_hold_days_a_failure_ends_the_job() -> None:
    world = trained(World(nodes=2, hold_days=0))
    fatal(world, 1)
    finish(world, Outcome.FAILED)


def test_a_death_because_of_a_loss_is_no_crash() -> None:
    world = trained(World(nodes=2))
    world.run(30)
    world.preempt(1)
    survivor = world.member(0).agent
    assert survivor

    survivor.alive = False
    survivor.say(Kind.EXIT, 1, "1")  # its collective failed
    world.until(lambda: world.record().gen == 2 and world.training())
    assert world.record().budget.crashes == 0
    assert world.record().budget.preemptions == 1


# -- what to buy


def test_on_demand_replaces_missing_spot_until_spot_returns() -> None:
    world = trained(World(nodes=2, steps=5000))
    world.run(33)
    world.capacity["z-a", Model.SPOT] = 1
    world.preempt(1)
    world.until(lambda: world.record().gen == 2 and world.training())
    assert world.member(1).vm.model is Model.ON_DEMAND
    assert causes(world, Event.FALLBACK) == ["no spot in the zone"]
    world.capacity.clear()
    world.until(lambda: world.member(1).vm.model is Model.SPOT and world.training(), 2400)
    assert "swap to spot" in causes(world, Event.PROMOTED)
    assert {m.vm.model for m in world.dynamic() if m.agent and m.agent.alive} == {Model.SPOT}
    world.run(60)
    world.capacity.update({(zone, Model.SPOT): 0 for zone in ("z-a", "z-b", "z-c")})
    world.preempt(1)
    world.until(lambda: len(world.events(Event.FALLBACK)) > 1, 7200)
    assert set(causes(world, Event.FALLBACK)) == {"no spot in the zone"}, "it was back on spot: announced again"


def test_a_long_shortage_is_one_fallback_that_continues() -> None:
    """Its first entry alone is announced, whichever node needs a machine later."""
    world = trained(World(nodes=2, steps=50_000))
    world.capacity.update({(zone, Model.SPOT): 0 for zone in ("z-a", "z-b", "z-c")})
    world.preempt(1)
    world.until(lambda: len(world.events(Event.FALLBACK)) == 2, 7200)
    world.preempt(0)
    world.until(lambda: len(world.events(Event.FALLBACK)) == 4, 14_400)
    assert causes(world, Event.FALLBACK) == ["no spot in the zone", *[NO_SPOT_YET] * 3]


def test_max_on_demand_of_the_job_is_kept() -> None:
    world = World(nodes=2, max_on_demand=1)
    for zone in ("z-a", "z-b", "z-c"):
        world.capacity[zone, Model.SPOT] = 0
    world.submit()
    world.run(100)
    assert [m.vm.model for m in world.dynamic()] == [Model.ON_DEMAND]


def test_many_losses_start_an_on_demand_fallback() -> None:
    world = trained(World(nodes=1, boot_s=5))
    for gen in range(2, 5):
        world.run(5)
        world.preempt(0)
        world.until(lambda g=gen: world.record().gen == g and world.training())
    assert world.member(0).vm.model is Model.ON_DEMAND
    assert world.events(Event.FALLBACK)


def test_a_requested_swap_is_promoted_at_a_checkpoint() -> None:
    world = trained(World(nodes=2))
    world.run(30)
    uid = world.member(1).vm.uid
    world.request(RequestKind.SWAP, node=1)
    world.until(lambda: world.record().gen == 2 and world.training())
    assert world.member(1).vm.uid != uid
    assert world.record().nodes[1].replace_reason is None
    world.run(60)
    assert len(world.dynamic()) == 2


# -- static machines


def test_static_machines_get_the_highest_nodes_and_use_their_own_disks() -> None:
    world = trained(World(nodes=3, steps=300, the_stack=stack(static=1)))
    record = world.record()
    assert [node.cur.model for node in record.nodes if node.cur] == [Model.SPOT, Model.SPOT, Model.STATIC]
    assert {d.disk.node for d in world.drives.values() if d.disk.job} == {0, 1}
    world.run(40)
    world.preempt(0)
    world.until(lambda: world.record().gen == 2 and world.training())
    finish(world)
    world.run(30)
    assert world.memory.allocation[0].grants == (), "the node's own word released it"
    static = next(m for m in world.machines.values() if m.vm.model is Model.STATIC)
    assert static.agent and static.agent.job is None


def test_a_static_machine_serves_the_next_job_after_dropped() -> None:
    world = trained(World(nodes=1, steps=60, the_stack=stack(static=1)))
    assert world.dynamic() == []
    world.submit("wxyz2345")
    world.run(20)
    assert len([g for g in world.memory.allocation[0].grants if g.resource.startswith("machine:")]) == 1
    world.until(lambda: world.record("wxyz2345").phase is Phase.DONE, 900)
    assert world.record().outcome is Outcome.SUCCEEDED


def test_a_hung_static_machine_does_not_keep_its_job_from_ending() -> None:
    world = trained(World(nodes=2, steps=10**6, the_stack=stack(static=1)))
    static = world.member(1)
    assert static.agent
    static.agent.hung = True
    world.request(RequestKind.CANCEL)
    finish(world, Outcome.CANCELLED)
    assert [g.resource for g in world.memory.allocation[0].grants] == ["machine:sk-t-fix-s0"]
    static.agent.hung = False
    world.run(90)
    assert world.memory.allocation[0].grants == ()


def test_a_lost_static_machine_is_replaced_by_a_spot_machine() -> None:
    world = trained(World(nodes=2, the_stack=stack(static=1)))
    world.run(30)
    world._remove(world.member(1))
    world.until(lambda: world.record().gen == 2 and world.training())
    assert world.member(1).vm.model is Model.SPOT


def without_static(world: World) -> None:
    """The stack no longer names its static pool."""
    pools = tuple(pool for pool in world.stack.pools if not pool.machines)
    world.stack = replace(world.stack, pools=pools)
    world.memory.stack = world.stack


def machine_of(world: World) -> Machine:
    (machine,) = (machine for machine in world.machines.values() if not machine.vm.job)
    return machine


def nodes_granted(world: World) -> list[str]:
    return [grant.resource for grant in world.memory.allocation[0].grants if grant.resource.startswith("machine:")]


def test_a_static_machine_that_was_removed_from_the_stack_leaves_no_grant() -> None:
    world = trained(World(nodes=2, the_stack=stack(static=1)))
    assert nodes_granted(world)
    machine = machine_of(world)
    without_static(world)
    world.run(200)
    assert nodes_granted(world), "it is listed: it may train, and can give its word itself"
    world._remove(machine)
    world.until(lambda: world.training() and world.record().gen == 2, 300)
    world.run(70)
    assert not nodes_granted(world)


def test_a_missing_but_declared_static_machine_keeps_its_grant_until_dropped() -> None:
    """Pulumi will make it again, or say that it is gone: a machine that is not listed for a while proves nothing."""
    world = trained(World(nodes=2, the_stack=stack(static=1)))
    machine = machine_of(world)
    world._remove(machine)
    world.until(lambda: world.training() and world.record().gen == 2, 300)
    world.run(200)
    assert nodes_granted(world)
    world.machines["again"] = Machine(
        replace(machine.vm, uid="again"), world.t, VmStatus.RUNNING, boot="new", up_at=world.t + 3
    )
    world.run(100)
    assert not nodes_granted(world), "made anew, it has nothing of that attempt, and says so"


def test_a_removed_static_machine_keeps_its_grant_while_a_zone_is_silent() -> None:
    world = trained(World(nodes=2, the_stack=stack(static=1)))
    machine = machine_of(world)
    without_static(world)
    world.blind.add("z-c")
    world._remove(machine)
    world.run(200)
    assert nodes_granted(world), "an answer with a hole proves nothing"
    world.blind.clear()
    world.until(lambda: world.training() and world.record().gen == 2, 300)
    world.run(70)
    assert not nodes_granted(world)


def test_a_machine_whose_last_save_failed_is_not_the_source() -> None:
    """Its disk was as new as any when the generation began; what it said at the end is older than another's."""
    world = trained(World(nodes=2))
    world.run(33)
    failing = world.member(0).agent
    assert failing and failing.mounted
    failing.mounted.broken = True
    world.run(20)
    world.preempt(1, notice_s=120)
    world.until(lambda: world.record().gen == 2 and world.training())
    world.run(3)  # the world compares what it starts from with the newest commit there is
    assert world.started[-1] == (2, world.newest)


def test_a_job_waits_for_the_static_machine_with_its_only_checkpoint() -> None:
    world = World(nodes=1, the_stack=stack(static=1))
    trained(world)
    world.run(60)
    (machine,) = (machine for machine in world.machines.values() if not machine.vm.job)
    newest = world.newest
    world.request(RequestKind.PAUSE)
    world.until(lambda: world.record().phase is Phase.HOLD, 200)
    world.run(30)
    saved = world.newest
    assert newest and saved and saved >= newest
    machine.status, machine.agent = VmStatus.DEAD, None
    made = len(world.made)
    world.request(RequestKind.RESUME)
    world.run(900)
    assert f"waiting for static machine {machine.vm.name}" in world.record().reason
    assert world.record().gen == 1, "it did not start"
    assert len(world.made) == made, "and nothing is paid for while it waits"
    machine.status, machine.boot, machine.up_at = VmStatus.RUNNING, "back", world.t
    world.until(lambda: world.training() and world.record().gen == 2, 900)
    world.run(3)
    assert world.started[-1] == (2, saved)


# -- a move of the whole gang


def test_a_gang_moves_with_its_disks_when_asked() -> None:
    world = trained(World(nodes=2, steps=400))
    world.run(33)
    world.request(RequestKind.MOVE, zone="z-c")
    world.until(lambda: world.record().zone == "z-c" and world.training(), 300)
    assert world.started[-1][1] == world.newest or world.newest is not None
    assert {m.vm.zone for m in world.dynamic() if m.agent and m.agent.alive} == {"z-c"}
    world.run(90)
    assert {zone for (_, zone), d in world.drives.items() if d.disk.job} == {"z-c"}
    assert world.shots == {}
    assert all(node.disk == 1 for node in world.record().nodes)
    finish(world)


def test_a_gang_moves_when_its_zone_has_no_capacity() -> None:
    world = trained(World(nodes=2, max_on_demand=0))
    world.run(33)
    world.capacity["z-a", Model.SPOT] = 0
    world.preempt(0)
    world.until(lambda: world.record().zone == "z-b" and world.training(), 1200)
    assert "stockout" in causes(world, Event.MOVE)


def three_pools(cap: int) -> StackState:
    """A pool in each zone; that of the second zone has room for ``cap`` machines only."""
    one = stack()
    pools = tuple(
        replace(one.pools[0], name=f"pool-{zone}", zones=(zone,), max_machines=cap if zone == "z-b" else 20)
        for zone in ("z-a", "z-b", "z-c")
    )
    return replace(one, pools=pools)


@pytest.mark.parametrize(("cap", "zone"), [(2, "z-b"), (1, "z-c")])
def test_a_gang_moves_only_within_the_caps(cap: int, zone: str) -> None:
    world = trained(World(nodes=2, max_on_demand=0, the_stack=three_pools(cap)))
    world.run(33)
    world.capacity["z-a", Model.SPOT] = 0
    world.preempt(0)
    world.until(lambda: world.record().gen == 2 and world.training(), 1200)
    assert world.record().zone == zone
    assert world.events(Event.MOVE)[0].detail == f"z-a -> {zone}"


def test_a_gang_does_not_move_where_others_were_just_refused() -> None:
    world = trained(World(nodes=2, max_on_demand=0))
    world.run(33)
    world.capacity["z-a", Model.SPOT] = 0
    world.preempt(0)
    for _ in range(15):
        for zone in ("z-b", "z-c"):
            observation = Observation(f"other-n0-a{world.t:.0f}", Event.REFUSED, world.t, zone, Model.SPOT, "capacity")
            world.store.add_observations("pool", int(world.t // HOUR_S), (observation,))
        world.run(60)
    assert world.record().zone == "z-a" and not world.events(Event.MOVE)
    world.until(lambda: world.record().zone == "z-b" and world.training(), 2400)  # its survivor was given back


def test_a_move_to_a_zone_of_no_pool_of_the_job_is_refused() -> None:
    world = trained(World(nodes=1, the_stack=three_pools(20), pools=("pool-z-a", "pool-z-b")))
    world.request(RequestKind.MOVE, zone="z-c")
    told = [entry.detail for entry in world.events(Event.REQUEST)]
    assert told == ["refused: z-c is not a zone of the job's pools (z-a, z-b)"]


def test_a_cancelled_move_continues_in_the_old_zone_and_burns_the_disk_number() -> None:
    world = trained(World(nodes=2))
    world.run(33)
    world.request(RequestKind.MOVE, zone="z-c")
    world.until(lambda: any(node.copy for node in world.record().nodes), 100)
    world.request(RequestKind.MOVE, zone="z-a")
    world.until(world.training, 300)
    record = world.record()
    assert record.zone == "z-a"
    assert all(node.disk == 0 and node.disk_top >= 1 and node.copy is None for node in record.nodes)
    world.request(RequestKind.MOVE, zone="z-b")
    world.until(lambda: world.record().zone == "z-b" and world.training(), 300)
    assert all(node.disk == 2 for node in world.record().nodes)


def test_a_cancelled_moves_snapshot_is_not_used_by_the_next() -> None:
    """It could not be deleted: as the source of another move's disk it would take the job back to where it was then."""
    world = trained(World(nodes=1))
    world.run(33)
    world.request(RequestKind.MOVE, zone="z-c")
    world.until(lambda: world.shots, 100)
    world.shots_stay = True
    world.request(RequestKind.MOVE, zone="z-a")
    world.until(world.training, 300)
    world.run(100)
    newest = world.newest
    assert newest and newest > (2, 0)
    world.request(RequestKind.MOVE, zone="z-c")
    world.until(lambda: world.record().zone == "z-c" and world.training(), 300)
    world.run(5)
    start = world.started[-1][1]
    assert start is not None and start >= newest


def test_a_hold_during_a_move_makes_one_copy() -> None:
    world = trained(World(nodes=1))
    world.shot_s = 200.0
    world.run(33)
    world.request(RequestKind.MOVE, zone="z-c")
    world.until(lambda: world.shots, 100)
    world.request(RequestKind.PAUSE)
    assert world.record().phase is Phase.HOLD
    world.run(900)
    assert [type(action) for _, action, _ in world.made].count(CreateSnapshot) == 1
    world.request(RequestKind.RESUME)
    world.until(lambda: world.record().zone == "z-c" and world.training(), 300)
    world.until(lambda: not world.shots, 100)


# -- holds and asks


def test_each_of_many_requests_is_handled_once() -> None:
    world = trained(World(nodes=1))
    for number in range(100):
        world.store.put_request(JOB, JobRequest(f"move-{number:03}", RequestKind.MOVE, world.t, zone="nowhere"))
    result = run_round(world.store, world, JOB, world, world.options)
    assert result.writes == 1, "a second one means that some were taken in again"
    assert len(world.events(Event.REQUEST)) == 100
    assert world.store.list_requests(JOB) == ()


def test_pause_saves_and_keeps_disks_and_resume_continues() -> None:
    world = trained(World(nodes=2, steps=300))
    world.run(33)
    world.request(RequestKind.PAUSE)
    world.until(lambda: world.record().phase is Phase.HOLD, 100)
    world.run(100)
    assert world.dynamic() == []
    assert len([d for d in world.drives.values() if d.disk.job]) == 2
    assert world.memory.allocation[0].grants == ()
    newest = world.newest
    world.request(RequestKind.RESUME)
    world.until(world.training, 200)
    assert world.started[-1][1] == newest
    assert [(e.cause, e.detail) for e in world.events(Event.GENERATION)] == [
        ("start", "2 nodes"),
        ("resume", "2 nodes"),
    ]
    assert {entry.cause for entry in world.events(Event.INTENT)} == {"start", "resume"}
    finish(world)


def test_a_generations_event_has_cause_and_number_of_nodes() -> None:
    world = trained(World(nodes=1))
    world.run(5)
    world.reboot(0)
    world.until(lambda: world.record().gen == 2 and world.training(), 300)
    world.run(33)
    world.request(RequestKind.PAUSE)
    world.request(RequestKind.RESUME)
    world.until(lambda: world.record().gen == 3 and world.training(), 300)
    told = [(entry.cause, entry.detail) for entry in world.events(Event.GENERATION)]
    assert told == [("start", "1 node"), ("reboot", "1 node"), ("stop withdrawn", "1 node")]


def test_a_resumed_elastic_job_waits_for_its_machines_before_it_shrinks() -> None:
    world = trained(World(nodes=Nodes(2, 3), steps=1000, max_on_demand=0))
    world.run(33)
    world.request(RequestKind.PAUSE)
    world.until(lambda: world.record().phase is Phase.HOLD, 100)
    world.run(600)
    assert world.record().zone is not None
    world.capacity[world.record().zone or "", Model.SPOT] = 2
    since = world.t
    world.request(RequestKind.RESUME)
    world.until(world.training, 300)
    assert len(world.record().members) == 2 and world.record().gen_since >= since + 60


def test_a_permanent_error_holds_with_a_reason_and_is_retried() -> None:
    world = World(nodes=2)
    world.permanent = "the template is gone"
    world.submit()
    world.run(60)
    assert world.record().phase is Phase.HOLD
    assert "the template is gone" in world.record().reason
    calls = len(world.made)
    world.run(1500)
    assert len(world.made) <= 2 * calls, "no storm of retries: one, soon, and then none for half an hour"
    world.permanent = ""
    world.until(world.training, 4000)


def test_a_right_that_takes_effect_late_costs_minutes() -> None:
    """An `up` gives the function its rights, and submits the stack's first job: the cloud is told later."""
    world = World(nodes=1)
    world.permanent = "may not use the machines' identity"
    world.submit()
    world.run(100)
    assert world.record().phase is Phase.HOLD
    world.permanent = ""
    world.until(world.training, 300)


def test_cancel_at_any_moment_leaves_nothing() -> None:
    for moment in (1, 3, 8, 24, 27, 31):
        world = World(nodes=2)
        world.submit()
        world.run(moment)
        world.request(RequestKind.CANCEL)
        finish(world, Outcome.CANCELLED)


def test_a_refused_request_has_a_reason() -> None:
    world = trained(World(nodes=1, the_stack=stack(static=1)))
    world.request(RequestKind.MOVE, zone="z-b")
    world.request(RequestKind.RESIZE, nodes=4)
    details = [entry.detail for entry in world.events(Event.REQUEST)]
    assert details[0] == "refused: a static machine pins the gang to its zone"
    assert details[1].startswith("refused: ")
    assert world.memory.requests[JOB] == {}


def test_a_round_under_way_inserts_nothing_into_a_stack_that_is_drained_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A round may take most of a minute; who empties a stack looks twice within seconds."""
    world = World(nodes=2)
    looks: list[bool] = []

    def draining() -> bool:
        looks.append(len(looks) > 0)
        return looks[-1]

    monkeypatch.setattr(world.memory, "draining", draining)
    world.submit()
    assert world.record().nodes[0].cur is not None, "it had decided to, before"
    assert world.inserts() == []


def test_drain_inserts_nothing() -> None:
    world = World(nodes=2)
    world.memory.drain = True
    world.submit()
    world.run(130)
    assert world.made == []
    assert world.memory.allocation[0].grants == ()


# -- elastic jobs


def test_an_elastic_job_shrinks_and_grows_again() -> None:
    world = trained(World(nodes=Nodes(1, 2), policy="spot"))
    world.run(33)
    world.capacity["z-a", Model.SPOT] = 1
    world.preempt(1)
    world.until(lambda: world.record().gen == 2 and world.training(), 200)
    assert world.record().members == (0,)
    world.capacity.clear()
    world.until(lambda: world.record().members == (0, 1) and world.training(), 900)


# -- bad luck


def test_lost_answers_change_no_outcome() -> None:
    world = trained(World(nodes=3, steps=300, lost_answers=0.5, seed=3))
    world.run(30)
    world.preempt(1)
    world.until(lambda: world.record().gen == 2 and world.training(), 400)
    finish(world)


def test_an_orphan_of_an_unknown_job_is_ended_and_deleted() -> None:
    world = trained(World(nodes=1))
    world.memory.records.clear()  # deleted by hand
    world.memory.active.clear()
    world.run(200)
    assert world.dynamic() == []
    record = world.record()
    assert record.phase is Phase.DONE
    assert record.keep_disks
    assert world.memory.allocation[0].grants == ()


def test_an_impostor_with_the_right_name_is_deleted_by_its_own_id() -> None:
    world = trained(World(nodes=1))
    real = world.member(0)

    fake = replace(real.vm, uid="feedfacecafe", zone="z-b")
    world.machines["feedfacecafe"] = Machine(fake, world.t, VmStatus.RUNNING, boot="b0", up_at=world.t + 1e6)
    world.run(120)
    assert [m.vm.uid for m in world.dynamic()] == [real.vm.uid]
    assert [a.uid for _, a, _ in world.made if isinstance(a, DeleteVm)] == ["feedfacecafe"]
    assert world.record().gen == 1


def test_a_steady_job_causes_no_writes() -> None:
    world = trained(World(nodes=3))
    world.run(120)
    ver, calls = world.record().ver, len(world.made)
    world.run(300)
    assert world.record().ver == ver
    assert len(world.made) == calls


def test_members_are_admitted_with_boot_and_address() -> None:
    world = trained(World(nodes=2))
    for index, node in enumerate(world.record().nodes):
        assert node.cur is not None
        machine = world.member(index)
        assert node.cur.state is SlotState.MEMBER
        assert (node.cur.uid, node.cur.boot, node.cur.address) == (machine.vm.uid, machine.boot, machine.vm.address)


# -- the round itself


def test_a_whole_job_runs_on_the_real_store(tmp_path: Path) -> None:
    """Against the SQLite twin: documents survive being written down, and tokens are what they should be."""
    store = open_store(f"sqlite:///{tmp_path}/bucket.db")
    world = World(nodes=2, steps=40, store=store)
    store.put("stack/pools.json", msgspec.json.encode(world.stack))
    trained(world)
    world.preempt(0)
    world.until(lambda: world.record().phase is Phase.DONE, 600)
    assert world.record().outcome is Outcome.SUCCEEDED
    assert world.dynamic() == []
    assert store.read_allocation().value.grants == ()
    assert [e.event for e in store.list_ledger(JOB)].count(Event.LOSS) == 1


@pytest.mark.parametrize("reports", [10, 10_000])
def test_simultaneous_reports_cost_two_rounds(reports: int) -> None:
    """All but the first find the lease taken and may go: the holder lists the facts again before it returns."""
    world = trained(World(nodes=1))
    facts = [Fact("u0", f"b{n}", 0, 1, 1, Kind.HERE, "1") for n in range(reports)]
    listed = 0
    busy = 0
    real = world.list

    def list_and_report(name: str) -> Listing:
        nonlocal listed, busy
        listed += 1
        if listed == 1:
            for fact in facts[1:]:
                assert world.store.put_fact(JOB, fact)
                busy += run_round(world.store, world, JOB, world, world.options).ended is Ended.BUSY
        return real(name)

    world.list = list_and_report  # type: ignore[method-assign]
    world.store.put_fact(JOB, facts[0])
    result = run_round(world.store, world, JOB, world, world.options)
    assert (result.ended, result.rounds, listed, busy) == (Ended.QUIET, 2, 2, reports - 1)


def test_a_report_during_the_leases_release_is_handled() -> None:
    world = trained(World(nodes=2))
    late = Fact("u9", "b9", 0, 1, 1, Kind.HERE, "1")
    naps: list[float] = []

    def sleep(seconds: float) -> None:
        naps.append(seconds)
        world.store.put_fact(JOB, late)

    world.options.sleep, world.options.settle_s = sleep, 1.1
    world._remove(world.member(1))
    result = run_round(world.store, world, JOB, world, world.options)
    assert naps[:1] == [1.1]
    assert late in result.facts


def test_a_new_generation_is_not_kept_waiting_though_a_report_came_meanwhile() -> None:
    """A further round under the same lease handles the report, and has nothing to publish."""
    world, naps = World(nodes=1), list[int]()
    world.options.sleep, world.options.settle_s = lambda _: naps.append(world.record().gen), 1.1
    late = Fact("u9", "b9", 0, 1, 1, Kind.HERE, "1")
    real = world.memory.list_facts
    listed: list[bool] = []

    def list_facts(job: str) -> tuple[Fact, ...]:
        if world.record().gen:
            world.memory.put_fact(JOB, late)
            listed.append(True)
        return real(job)

    world.memory.list_facts = list_facts  # type: ignore[method-assign]
    world.submit()
    world.until(lambda: world.record().gen == 1)
    assert len(listed) == 3, "after the round, in the next one, and after the release of the lease"
    assert naps and set(naps) == {0}


def test_calls_run_in_parallel_each_with_a_deadline() -> None:
    world = World(nodes=8)
    world.options.parallel = 16
    deadlines: list[float] = []
    gate = threading.Barrier(8, timeout=10)
    real = world.perform

    def perform(action: Action, deadline_s: float) -> Result:
        deadlines.append(deadline_s)
        if isinstance(action, InsertVm):
            gate.wait()  # passes only when all eight are in flight
        return real(action, deadline_s)

    world.perform = perform  # type: ignore[method-assign]
    world.submit()
    assert len(world.dynamic()) == 8
    assert set(deadlines) == {20.0}


def test_a_lost_race_for_the_record_leaves_the_job_to_the_winner() -> None:
    world = trained(World(nodes=1))
    held = world.store.read_record(JOB)
    assert held is not None
    listing = world.list(world.stack.stack)
    world._remove(world.member(0))
    world.round()  # the other round: it supersedes
    ver = world.record().ver
    world.memory.leases.clear()
    prefetched = Prefetched(held, world.list(world.stack.stack))
    result = run_round(world.store, world, JOB, world, world.options, prefetched)
    assert result.ended is Ended.LOST
    assert world.record().ver == ver
    assert listing.vms


def test_one_listing_serves_a_tick_of_many_jobs() -> None:
    world = trained(World(nodes=1))
    world.submit("wxyz2345")
    world.run(60)
    seen = 0
    real = world.list

    def count(name: str) -> Listing:
        nonlocal seen
        seen += 1
        return real(name)

    world.list = count  # type: ignore[method-assign]
    result = tick(world.store, world, world, world.options)
    assert (result.jobs, seen) == (2, 1)


def test_a_report_that_finds_the_lease_taken_is_handled_by_its_holder() -> None:
    """It was sent away, so the round looks once more when the lease is back and late reports can be seen."""
    world = trained(World(nodes=2))
    world.run(60)
    world.preempt(1)
    late = Fact("u", "b", 0, 1, 0, Kind.HELLO, "0")
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        world.store.put_fact(JOB, late)

    result = run_round(world.store, world, JOB, world, RoundOptions(settle_s=1.1, sleep=sleep, parallel=1))
    assert slept[:1] == [1.1]
    assert late in result.facts


def test_a_round_decides_by_the_time_after_its_last_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cloud's answer may take long, and what it says is of its end."""
    world = trained(World(nodes=1))
    real = world.list

    def slowly(name: str) -> Listing:
        world.t += 7.0
        return real(name)

    monkeypatch.setattr(world, "list", slowly)
    made = reconcile_job.Round(world.store, world, JOB, world, world.options)
    before = world.now()
    made.run()
    assert made.snapshot is not None and made.snapshot.now == world.now() == before + 7.0


def test_a_round_that_used_up_its_passes_is_due_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    world = trained(World(nodes=1))
    world._remove(world.member(0))
    monkeypatch.setattr(reconcile_job, "PASSES", 1)
    result = reconcile_job.Round(world.store, world, JOB, world, world.options).run()
    assert (result.ended, result.due) == (Ended.UNFINISHED, world.now() + Times().soon_s)
