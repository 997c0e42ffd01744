"""A resize adds ranks, or ends the highest ones once all have saved and stopped: no step lost, nothing left over."""

from __future__ import annotations

import pytest
from spotkeeper.spec.facts import Kind
from spotkeeper.spec.job import AskKind, Checkpoint, Nodes
from spotkeeper.spec.ledger import Event
from spotkeeper.spec.record import Phase

from tests.reconcile.world import World, stack


def trained(world: World) -> World:
    world.run(10)  # a static node says hello
    world.submit()
    world.until(world.training, 300)
    world.run(70)
    return world


def resized(world: World, nodes: int) -> None:
    world.ask(AskKind.RESIZE, nodes=nodes)
    world.until(lambda: world.training() and len(world.record().members) == nodes, 600)


def refused(world: World) -> str:
    return world.events(Event.ASK)[-1].detail


def test_the_highest_ranks_end_and_no_step_is_lost() -> None:
    world = trained(World(nodes=Nodes(1, 3)))
    steps = max(agent.step_no for agent in world.agents())
    resized(world, 1)
    assert world.record().members == (0,)
    assert world.started[-1][1] is not None
    assert world.started[-1][1][1] >= steps, "it goes on from where all had stopped"
    world.run(180)
    assert [machine.vm.rank for machine in world.dynamic()] == [0]
    assert [key for key, drive in world.drives.items() if drive.disk.rank > 0] == [], "the parked ranks' disks are gone"
    assert [grant.rank for grant in world.memory.alloc[0].grants] == [0]


def test_ranks_that_come_back_have_new_numbers_and_one_stop_takes_them_all_in() -> None:
    world = trained(World(nodes=Nodes(1, 3)))
    resized(world, 1)
    world.run(180)
    before = world.record()
    resized(world, 3)
    record = world.record()
    assert record.members == (0, 1, 2)
    assert record.gen == before.gen + 1
    for index in (1, 2):
        assert record.ranks[index].top > before.ranks[index].top - 1
        assert record.ranks[index].cur is not None
        assert record.ranks[index].cur.attempt == before.ranks[index].top + 1
        assert record.ranks[index].disk == before.ranks[index].disk_top, "a number that was never used"


@pytest.mark.parametrize(
    ("nodes", "to", "why"),
    [(2, 1, "its job file says nodes: 2"), (Nodes(1, 3), 4, "not within"), (Nodes(1, 3), 3, "has 3 already")],
)
def test_what_the_job_file_does_not_allow_is_refused(nodes: int | Nodes, to: int, why: str) -> None:
    world = trained(World(nodes=nodes))
    before = world.record().gen
    world.ask(AskKind.RESIZE, nodes=to)
    assert why in refused(world)
    world.run(60)
    assert (world.record().gen, world.training()) == (before, True)


def test_sharded_state_keeps_its_size() -> None:
    world = trained(World(nodes=Nodes(1, 2), checkpoint=Checkpoint(replicated=False)))
    world.ask(AskKind.RESIZE, nodes=1)
    assert "sharded" in refused(world)


def test_a_job_that_holds_goes_on_in_its_new_size() -> None:
    world = trained(World(nodes=Nodes(1, 3)))
    world.ask(AskKind.PAUSE)
    world.until(lambda: world.record().phase is Phase.HOLD)
    world.ask(AskKind.RESIZE, nodes=2)
    world.ask(AskKind.RESUME)
    world.until(world.training, 600)
    assert world.record().members == (0, 1)


def test_a_rank_that_is_to_go_is_not_replaced_when_it_is_lost() -> None:
    world = trained(World(nodes=Nodes(1, 3)))
    inserts = len(world.inserts())
    world.preempt(2)
    resized(world, 2)
    world.run(120)
    assert len(world.inserts()) <= inserts + 1
    assert len(world.dynamic()) == 2


def test_a_static_node_of_a_parked_rank_is_given_back() -> None:
    world = trained(World(nodes=Nodes(1, 2), the_stack=stack(static=1)))
    assert world.record().ranks[1].cur.node is not None  # type: ignore[union-attr]
    resized(world, 1)
    world.run(120)
    assert [grant.resource for grant in world.memory.alloc[0].grants] == ["slot:pool"]
    assert not [fact for fact in world.store.list_facts("abcd2345") if fact.kind is Kind.HELLO and fact.rank == 1]


def test_who_alone_holds_the_newest_checkpoint_is_not_parked() -> None:
    """Rank 0's disk takes no writes, so the newest commit is rank 1's: the resize is given up, and says so."""
    world = trained(World(nodes=Nodes(1, 2)))
    for drive in world.drives.values():
        drive.broken = drive.disk.rank == 0
    agent = world.member(0).agent
    assert agent is not None
    agent.say(Kind.FULL, world.record().gen)
    world.run(30)
    world.ask(AskKind.RESIZE, nodes=1)
    world.run(120)
    assert world.training()
    assert world.record().members == (0, 1)
    assert "given up" in refused(world)
