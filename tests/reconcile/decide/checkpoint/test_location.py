"""A job goes on from its newest checkpoint or says why it cannot: an older one is never taken without a word.

A node's checkpoints lie on its own disk, or on the static machine's that it trained on. Where a gang comes back
after all of its machines were given up, a machine that costs nothing is no bargain if it holds the past.
"""

from __future__ import annotations

import itertools

import pytest

from spotkeeper.contract.cloud import VmStatus
from spotkeeper.contract.generation import Progress
from spotkeeper.contract.job import Checkpoint, Mirror, Nodes, RequestKind
from spotkeeper.contract.ledger import Event
from spotkeeper.contract.record import Phase
from spotkeeper.reconcile.decide.checkpoint import location
from spotkeeper.reconcile.decide.draft import Draft
from tests.reconcile.decide.gang.test_resize import refused, resized, trained
from tests.reconcile.decide.test_decide import NOW
from tests.reconcile.decide.test_guards import calm, on_node, on_snapshot
from tests.reconcile.world import JOB, Commit, Drive, Machine, World, stack


def paused(world: World) -> None:
    world.request(RequestKind.PAUSE)
    world.until(lambda: world.record().phase is Phase.HOLD)
    world.run(90)


def paused_without_its_node(world: World) -> Machine:
    """The static machine on which it trained alone is gone for good while it pauses."""
    paused(world)
    (machine,) = (machine for machine in world.machines.values() if not machine.vm.job)
    machine.status, machine.agent = VmStatus.DEAD, None
    return machine


def beside_a_stale_node() -> World:
    """A job of one node on its own disk; an idle static machine has an older checkpoint of it."""
    world = trained(World(nodes=Nodes(1, 2), the_stack=stack(static=1)))
    world.run(70)
    (machine,) = (machine for machine in world.machines.values() if not machine.vm.job)
    machine.status, machine.agent = VmStatus.DEAD, None
    world.until(lambda: world.training() and world.record().gen > 1 and len(world.record().members) == 2, 900)
    resized(world, 1)
    assert world.record().members == (0,)
    machine.status, machine.boot = VmStatus.RUNNING, "again"
    world.run(70)
    assert machine.agent is not None
    return world


def resumed(world: World) -> None:
    """It trains again, from the newest commit that there ever was."""
    newest = world.newest
    world.request(RequestKind.RESUME)
    world.until(world.training, 1200)
    world.run(5)
    assert world.started[-1][1] == newest


def test_a_static_machine_with_an_older_checkpoint_is_not_used() -> None:
    """Node 0 trained on alone, on its own disk; the node that node 1 had left held the checkpoint of that day."""
    world = beside_a_stale_node()
    paused(world)
    resumed(world)


def test_a_static_machine_without_a_checkpoint_is_not_used() -> None:
    world = World(nodes=1, the_stack=stack(static=1))
    machine = next(machine for machine in world.machines.values() if not machine.vm.job)
    machine.up_at = world.t + 200  # not up yet: the job begins on a machine of its own
    world.submit()
    world.until(world.training, 300)
    world.run(200)
    assert machine.agent is not None
    paused(world)
    resumed(world)
    assert world.record().nodes[0].cur.machine is None  # type: ignore[union-attr]


def test_go_back_continues_without_the_newest_checkpoint() -> None:
    world = trained(World(nodes=1, the_stack=stack(static=1)))
    paused_without_its_node(world)
    world.request(RequestKind.RESUME)
    world.run(300)
    assert not world.training()
    assert "--go-back" in world.record().reason
    lost = world.newest
    world.request(RequestKind.RESUME, go_back=True)
    assert "refused" not in refused(world)
    world.until(world.training, 600)
    world.run(5)
    assert world.started[-1][1] is None, "it begins anew"
    world.run(60)
    assert world.newest is not None and lost is not None and world.newest > lost
    paused(world)
    resumed(world)


def forgotten(world: World) -> None:
    """Every copy of every checkpoint is damaged: no disk holds any that is complete."""
    for drive in world.drives.values():
        drive.held.clear()


def test_a_hold_for_a_checkpoint_names_the_remedy_and_retries_at_growing_intervals() -> None:
    """Each try boots machines for nothing: only a person, or a disk that comes back, can change it."""
    world = trained(World(nodes=1))
    paused(world)
    forgotten(world)
    world.request(RequestKind.RESUME)
    waits = []
    for _ in range(8):
        world.until(lambda: world.record().phase is Phase.HOLD, 1200)
        assert world.record().reason.endswith("To continue without it: spotkeeper resume job-abcd2345 --go-back")
        until = world.record().hold_until
        assert until is not None
        waits.append(until - world.t)
        world.run(90)
        world.t = until - 1
        world.until(lambda: world.record().phase is Phase.RUN, 120)
    assert [round(b / a) for a, b in itertools.pairwise(waits)][:3] == [2, 2, 2]
    assert waits[-1] == waits[-2] == 86400.0
    world.request(RequestKind.RESUME, go_back=True)
    assert "refused" not in refused(world)
    world.until(world.training, 600)


def test_go_back_is_accepted_while_the_job_regroups() -> None:
    """A pause, every copy damaged, a resume: it boots machines, and its user knows better. Where it begins is told."""
    world = trained(World(nodes=1))
    paused(world)
    forgotten(world)
    world.request(RequestKind.RESUME)
    world.run(60)
    assert world.record().phase is Phase.RUN and not world.training()
    world.request(RequestKind.RESUME, go_back=True)
    assert "refused" not in refused(world)
    world.until(world.training, 100)
    without = f"without checkpoint {world.record().given_up}"
    assert world.events(Event.RESUME)[-1].detail == f"{without} unless a machine has it"
    assert world.events(Event.GENERATION)[-1].detail == f"1 node, {without}, anew, from step 0"


def out_of_reach(world: World, node: int) -> None:
    """Another machine holds the disk of this node, and never lets go."""
    (machine,) = (machine for machine in world.machines.values() if not machine.vm.job)
    (drive,) = (drive for drive in world.drives.values() if drive.disk.job and drive.disk.node == node)
    drive.user = machine.vm.uid


@pytest.mark.parametrize("nodes", [1, 2])
def test_go_back_helps_if_the_newest_disk_is_unreachable(nodes: int) -> None:
    world = trained(World(nodes=nodes, the_stack=stack(static=1), static="never"))
    paused(world)
    newest = world.newest
    assert newest is not None
    for (_, _), drive in world.drives.items():
        if drive.disk.node == 1 and drive.disk.job:
            drive.held[JOB] = [commit for commit in drive.held[JOB] if commit <= (1, 20)]
    out_of_reach(world, 0)
    world.request(RequestKind.RESUME)
    world.run(900)
    assert not world.training()
    world.request(RequestKind.RESUME, go_back=True)
    assert "refused" not in refused(world)
    world.until(world.training, 900)
    world.run(100)
    origin = world.started[-1][1]
    assert (origin is None) if nodes == 1 else (origin is not None and origin < newest)
    words = "anew, from step 0" if origin is None else f"from {origin[0]}-{origin[1]}"
    assert world.events(Event.GENERATION)[-1].detail.endswith(f", {words}")
    assert world.newest is not None and world.newest > newest


def test_a_plain_resume_gives_up_no_checkpoint() -> None:
    """A job that trains is not told to go back: the word is refused, and changes nothing."""
    world = trained(World(nodes=1))
    world.request(RequestKind.RESUME, go_back=True)
    assert "does not wait for a checkpoint" in refused(world)
    assert world.record().given_up == ""
    assert world.training()
    paused(world)
    resumed(world)


def test_go_back_keeps_an_available_newest_checkpoint() -> None:
    """Said of a pause: its own disk has the newest, and an idle static machine an older one."""
    world = beside_a_stale_node()
    paused(world)
    newest = world.newest
    world.request(RequestKind.RESUME, go_back=True)
    world.until(world.training, 1200)
    world.run(5)
    assert world.started[-1][1] == newest


def test_a_gang_whose_newest_checkpoint_is_on_a_static_machine_stays_in_its_zone() -> None:
    world = trained(World(nodes=1, the_stack=stack(static=1)))
    machine = paused_without_its_node(world)
    world.request(RequestKind.RESUME)
    world.run(60)
    world.request(RequestKind.MOVE, zone="z-b")
    assert f"on static machine {machine.vm.name}" in refused(world)
    world.run(900)
    assert world.record().move is None


def test_a_node_whose_static_machine_is_taken_trains_on_another() -> None:
    """Both have the newest checkpoint. The node was node 0's; after a pause the highest node takes it first."""
    world = World(nodes=2, the_stack=stack(static=1))
    (machine,) = world.machines.values()
    machine.status = VmStatus.DEAD  # it comes up late
    trained(world)
    machine.status = VmStatus.RUNNING
    world.run(100)
    world.preempt(0, 60.0)
    world.until(lambda: world.training() and world.record().gen > 1, 600)
    assert [node.machine is not None for node in world.record().nodes] == [True, False]
    world.run(70)
    paused(world)
    resumed(world)
    assert len(world.record().members) == 2
    told = [entry.detail for entry in world.events(Event.REFUSED)]
    assert not any("is only on this machine's disk" in words for words in told)


def test_with_sharded_state_each_node_needs_its_part() -> None:
    world = trained(World(nodes=2, the_stack=stack(static=1), checkpoint=Checkpoint(replicated=False)))
    machine = paused_without_its_node(world)
    world.request(RequestKind.RESUME)
    world.run(60)
    part = "node 1's part of the newest checkpoint"
    told = f"static machine {machine.vm.name}: {part} is only on this machine's disk"
    assert told in world.record().reason


def rot(world: World, *drives: Drive) -> Commit:
    """The newest commit that the function knows of is damaged there, and all that came after it. That commit."""
    progress = world.store.read_progress(JOB)
    assert progress is not None and progress.commit_gen is not None and progress.commit_step is not None
    known = progress.commit_gen, progress.commit_step
    for drive in drives:
        while max(drive.held[JOB]) >= known:
            drive.damage(JOB)
        assert known in drive.damaged[JOB]
    return known


def test_a_checkpoint_damaged_on_every_disk_falls_back_to_the_older_one() -> None:
    world = trained(World(nodes=2))
    world.run(200)
    paused(world)
    lost = rot(world, *world.drives.values())
    older = max(next(iter(world.drives.values())).held[JOB])
    world.request(RequestKind.RESUME)
    world.until(world.training, 1200)
    world.run(5)
    assert world.started[-1][1] == older < lost
    told = [entry.detail for entry in world.events(Event.DAMAGED)]
    assert told.count("{}-{}".format(*lost)) == 2
    assert "without checkpoint {}-{}, from {}-{}".format(*lost, *older) in world.events(Event.GENERATION)[-1].detail
    world.run(120)
    paused(world)
    resumed(world)


def test_a_checkpoint_damaged_on_one_disk_is_read_from_the_other() -> None:
    world = trained(World(nodes=2))
    world.run(200)
    paused(world)
    rot(world, next(iter(world.drives.values())))
    resumed(world)
    assert world.record().given_up == ""


def test_a_checkpoint_damaged_on_one_disk_waits_for_the_other() -> None:
    world = trained(World(nodes=2))
    world.run(200)
    paused(world)
    first, second = world.drives.values()
    rot(world, first)
    second.broken = True
    world.request(RequestKind.RESUME)
    world.run(1200)
    assert not world.training()
    assert world.record().given_up == ""


def test_a_damaged_part_makes_the_other_parts_useless() -> None:
    world = trained(World(nodes=2, checkpoint=Checkpoint(replicated=False)))
    world.run(200)
    paused(world)
    first, second = world.drives.values()
    lost = rot(world, first)
    second.held[JOB] = list(first.held[JOB])  # where they begin is the library's agreement, and not the world's
    world.request(RequestKind.RESUME)
    world.until(world.training, 1200)
    assert world.record().given_up == "{}-{}".format(*lost)


@pytest.mark.parametrize(
    ("gen", "step", "commit"), [(3, 90, (3, 90)), (0, 0, (0, 0)), (3, None, None), (None, 90, None), (None, None, None)]
)
def test_only_a_report_with_generation_and_step_tells_of_a_commit(
    gen: int | None, step: int | None, commit: Commit | None
) -> None:
    told = Progress(3, 100, NOW, commit_gen=gen, commit_step=step)
    assert location.committed(Draft(*on_snapshot(progress=told)(*calm(1)))) == commit


@pytest.mark.parametrize(("wrote", "follows"), [(3, True), (2, False)])
def test_a_node_leaves_its_disk_only_if_another_member_has_the_newest_commit_on_its_own(
    wrote: int, follows: bool
) -> None:
    draft = Draft(*on_node(1, wrote=wrote)(*on_node(0, wrote=3)(*calm(2))))
    assert location.may_follow(draft, 0, None)
    assert location.may_follow(draft, 0, "sk-t-fix-s0") is follows


def test_a_silent_member_of_sharded_state_does_not_count_as_blank() -> None:
    """Its disk may have the newest checkpoint: an older copy in the bucket is not fetched instead."""
    world = trained(World(2, checkpoint=Checkpoint(replicated=False, mirror=Mirror(every_min=1.0))))
    world.until(lambda: bool(world.record().mirror), 400)
    world.copies = False
    world.run(30)
    left, agent = world.newest, world.member(0).agent
    assert agent is not None
    agent.hung = True
    world.preempt(1, 30.0)
    world.until(lambda: world.training() and world.record().gen > 1, 1200)
    assert world.events(Event.FETCH) == []
    assert world.started[-1][1] is not None and left is not None and world.started[-1][1] >= left
