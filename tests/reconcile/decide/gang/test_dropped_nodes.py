"""A user chooses which nodes go when a job shrinks, but never the only ones with the newest checkpoint."""

from __future__ import annotations

import pytest

from spotkeeper.contract.facts import Kind
from spotkeeper.contract.generation import Progress
from spotkeeper.contract.job import Nodes, RequestKind
from spotkeeper.contract.ledger import Event
from spotkeeper.contract.record import Phase
from spotkeeper.reconcile.decide.draft import Draft
from spotkeeper.reconcile.decide.gang import resize
from tests.reconcile.decide.gang.test_resize import trained
from tests.reconcile.decide.test_decide import NOW
from tests.reconcile.decide.test_guards import calm, on_cur, on_record, on_snapshot
from tests.reconcile.world import World


def test_a_user_chooses_the_nodes_that_go() -> None:
    world = trained(World(nodes=Nodes(1, 3)))
    world.request(RequestKind.RESIZE, nodes=1, drop=(0, 2))
    world.until(lambda: world.training() and world.record().members == (1,), 600)
    world.run(180)
    assert world.record().parked == (0, 2)
    assert [machine.vm.node for machine in world.dynamic()] == [1]
    assert [entry.again for entry in world.events(Event.GENERATION) if entry.again] == [], "no step is trained twice"


def test_a_dropped_node_that_alone_saves_at_last_stays_and_the_ledger_says_so() -> None:
    world = trained(World(nodes=Nodes(1, 2)))
    for drive in world.drives.values():
        drive.broken = drive.disk.node == 1
    agent = world.member(1).agent
    assert agent is not None
    world.request(RequestKind.RESIZE, nodes=1, drop=(0,))
    assert world.record().parked == (0,)
    agent.say(Kind.FULL, world.record().gen)
    world.run(120)
    assert world.training() and world.record().members == (0,)
    told = "node 0 stays in place of node 1, because only it has the newest checkpoint"
    assert told in [entry.detail for entry in world.events(Event.REQUEST)]


def test_a_job_on_hold_keeps_the_disk_with_the_newest_checkpoint() -> None:
    world = trained(World(nodes=Nodes(1, 3)))
    world.request(RequestKind.PAUSE)
    world.until(lambda: world.record().phase is Phase.HOLD)
    world.request(RequestKind.RESIZE, nodes=1, drop=(0, 1))
    assert world.record().parked == (0, 1)
    world.request(RequestKind.RESUME)
    world.until(world.training, 600)
    assert world.record().members == (2,)
    assert [entry.again for entry in world.events(Event.GENERATION) if entry.again] == []


@pytest.mark.parametrize(
    ("nodes", "drop", "parked", "why"),
    [
        (2, (0,), (0, 3), ""),
        (1, (0, 2), (0, 2, 3), ""),
        (2, (3,), (3,), "the job has no node 3: its nodes are 0, 1, 2"),  # it is parked already
        (2, (7,), (3,), "the job has no node 7: its nodes are 0, 1, 2"),
        (2, (0, 1), (3,), "the job has 3, so a size of 2 drops 1, but 2 were named"),
        (1, (2,), (3,), "the job has 3, so a size of 1 drops 2, but 1 were named"),
        (4, (2,), (3,), "the job has 3, so a size of 4 drops no node: only a smaller size does"),
        (3, (2,), (3,), "the job has 3 already"),
    ],
)
def test_which_nodes_a_user_may_drop(nodes: int, drop: tuple[int, ...], parked: tuple[int, ...], why: str) -> None:
    draft = Draft(*on_record(parked=(3,), size=3, asked=3)(*calm(4, nodes=Nodes(1, 4))))
    assert resize.take(draft, nodes, drop) == why
    assert draft.record.parked == parked


@pytest.mark.parametrize(
    ("holders", "drop", "refused"),
    [({0}, (0,), True), ({0}, (1,), False), ({0, 1}, (0, 1), True), ({0, 1}, (0, 2), False), (set(), (0,), False)],
)
def test_a_drop_that_would_lose_the_newest_checkpoint_is_refused(
    holders: set[int], drop: tuple[int, ...], refused: bool
) -> None:
    case = on_snapshot(progress=Progress(3, 100, NOW, commit_gen=2, commit_step=90))(*calm(3, nodes=Nodes(1, 3)))
    for index in range(3):
        case = on_cur(index, has_newest=index in holders)(*case)
    draft = Draft(*case)
    told = f"only node {', '.join(map(str, sorted(holders)))} has the newest checkpoint: name another node to drop"
    assert resize.take(draft, 3 - len(drop), drop) == (told if refused else "")
    assert draft.record.parked == (() if refused else drop)
