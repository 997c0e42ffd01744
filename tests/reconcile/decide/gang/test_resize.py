"""A resize adds nodes, or ends those whose loss costs least once all have saved and stopped: no step lost, nothing
left over.
"""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from spotkeeper.contract.facts import Kind
from spotkeeper.contract.generation import Progress
from spotkeeper.contract.job import Checkpoint, Nodes, RequestKind
from spotkeeper.contract.ledger import Event
from spotkeeper.contract.record import Move, Node, Phase, SlotState
from spotkeeper.contract.stack import Model
from spotkeeper.reconcile.decide import Times
from spotkeeper.reconcile.decide.draft import Draft
from spotkeeper.reconcile.decide.gang import resize
from spotkeeper.reconcile.decide.provisioning import offers
from spotkeeper.reconcile.decide.queue import claim
from tests.reconcile.decide.test_decide import NOW, fact, gang, intent
from tests.reconcile.decide.test_guards import Case, calm, on_cur, on_node, on_record, on_snapshot
from tests.reconcile.world import World, stack


def trained(world: World) -> World:
    world.run(10)  # a static machine says hello
    world.submit()
    world.until(world.training, 300)
    world.run(70)
    return world


def resized(world: World, nodes: int) -> None:
    world.request(RequestKind.RESIZE, nodes=nodes)
    world.until(lambda: world.training() and len(world.record().members) == nodes, 600)


def refused(world: World) -> str:
    return world.events(Event.REQUEST)[-1].detail


def test_a_resize_parks_the_highest_nodes_without_losing_a_step() -> None:
    world = trained(World(nodes=Nodes(1, 3)))
    steps = max(agent.step_no for agent in world.agents())
    resized(world, 1)
    assert world.record().members == (0,)
    assert [entry.cause for entry in world.events(Event.STOP)] == ["resize"]
    assert world.started[-1][1] is not None
    assert world.started[-1][1][1] >= steps, "it goes on from where all had stopped"
    world.run(180)
    assert [machine.vm.node for machine in world.dynamic()] == [0]
    assert [key for key, drive in world.drives.items() if drive.disk.node > 0] == [], "the parked nodes' disks are gone"
    assert [grant.node for grant in world.memory.allocation[0].grants] == [0]


def test_returning_nodes_have_new_numbers_and_join_in_one_stop() -> None:
    world = trained(World(nodes=Nodes(1, 3)))
    resized(world, 1)
    world.run(180)
    before = world.record()
    resized(world, 3)
    record = world.record()
    assert record.members == (0, 1, 2)
    assert record.gen == before.gen + 1
    for index in (1, 2):
        assert record.nodes[index].top > before.nodes[index].top - 1
        assert record.nodes[index].cur is not None
        assert record.nodes[index].cur.attempt == before.nodes[index].top + 1
        assert record.nodes[index].disk == before.nodes[index].disk_top, "a number that was never used"


@pytest.mark.parametrize(
    ("nodes", "to", "why"),
    [(2, 1, "the job file says `nodes: 2`"), (Nodes(1, 3), 4, "not within"), (Nodes(1, 3), 3, "has 3 already")],
)
def test_a_size_outside_the_job_file_is_refused(nodes: int | Nodes, to: int, why: str) -> None:
    world = trained(World(nodes=nodes))
    before = world.record().gen
    world.request(RequestKind.RESIZE, nodes=to)
    assert why in refused(world)
    world.run(60)
    assert (world.record().gen, world.training()) == (before, True)


def test_sharded_state_keeps_its_size() -> None:
    world = trained(World(nodes=Nodes(1, 2), checkpoint=Checkpoint(replicated=False)))
    world.request(RequestKind.RESIZE, nodes=1)
    assert "sharded" in refused(world)


def test_a_job_on_hold_resumes_in_its_new_size() -> None:
    world = trained(World(nodes=Nodes(1, 3)))
    world.request(RequestKind.PAUSE)
    world.until(lambda: world.record().phase is Phase.HOLD)
    world.request(RequestKind.RESIZE, nodes=2)
    world.request(RequestKind.RESUME)
    world.until(world.training, 600)
    assert world.record().members == (0, 1)


def test_a_node_to_be_parked_is_not_replaced() -> None:
    world = trained(World(nodes=Nodes(1, 3)))
    inserts = len(world.inserts())
    world.preempt(2)
    resized(world, 2)
    world.run(120)
    assert len(world.inserts()) <= inserts + 1
    assert len(world.dynamic()) == 2


def test_a_parked_nodes_static_machine_is_released() -> None:
    world = trained(World(nodes=Nodes(1, 2), the_stack=stack(static=2)))
    assert world.record().nodes[1].cur.machine is not None  # type: ignore[union-attr]
    resized(world, 1)
    world.run(120)
    assert [grant.node for grant in world.memory.allocation[0].grants] == [0]
    assert not [fact for fact in world.store.list_facts("abcd2345") if fact.kind is Kind.HELLO and fact.node == 1]


def test_the_only_node_with_the_newest_checkpoint_is_not_parked() -> None:
    """The disk of the node that was to stay fails at the last save: the other one stays."""
    world = trained(World(nodes=Nodes(1, 2)))
    for drive in world.drives.values():
        drive.broken = drive.disk.node == 0
    agent = world.member(0).agent
    assert agent is not None
    world.request(RequestKind.RESIZE, nodes=1)
    assert world.record().parked == (1,)
    agent.say(Kind.FULL, world.record().gen)
    world.run(120)
    assert world.training()
    assert world.record().members == (1,)
    assert [entry.again for entry in world.events(Event.GENERATION) if entry.again] == [], "no step is trained twice"


# -- whom a smaller job gives up


def members_after(world: World, nodes: int) -> tuple[int, ...]:
    resized(world, nodes)
    assert world.started[-1][1] is not None
    world.run(180)
    kept = {machine.vm.node for machine in world.dynamic()}
    assert kept <= set(world.record().members), "nothing of the others is left"
    return world.record().members


def test_the_most_expensive_machine_is_parked_first() -> None:
    world = trained(World(nodes=Nodes(1, 3)))
    world.capacity = {(zone, Model.SPOT): 2 for zone in ("z-a", "z-b", "z-c")}
    world.preempt(0)
    world.until(lambda: world.training() and len(world.record().members) == 3, 600)
    models = [node.cur.model for node in world.record().nodes if node.cur]
    assert models == [Model.ON_DEMAND, Model.SPOT, Model.SPOT]
    assert members_after(world, 2) == (1, 2)
    assert world.record().parked == (0,)
    world.capacity = {}
    before = world.record().nodes[0]
    assert members_after(world, 3) == (0, 1, 2)
    after = world.record().nodes[0]
    assert after.cur is not None and after.cur.attempt > before.top - 1 and after.disk == before.disk_top
    assert world.record().parked == ()


def test_a_static_machine_is_parked_last() -> None:
    world = trained(World(nodes=Nodes(1, 2), the_stack=stack(static=1)))
    machine = next(at for at, node in enumerate(world.record().nodes) if node.cur and node.cur.machine)
    assert members_after(world, 1) == (machine,)


def test_ending_machines_are_parked_first_then_slow_ones() -> None:
    world = trained(World(nodes=Nodes(1, 4)))
    agent = world.member(1).agent
    assert agent is not None
    agent.say(Kind.LAGS, world.record().gen, "0-180")
    world.run(20)
    assert members_after(world, 3) == (0, 2, 3)
    world.capacity = {(zone, model): 0 for zone in ("z-a", "z-b", "z-c") for model in Model}
    world.preempt(0, notice_s=900)
    world.run(20)
    assert members_after(world, 2) == (2, 3)


def test_a_vacant_node_is_parked_first() -> None:
    world = trained(World(nodes=Nodes(1, 3)))
    world.capacity = {(zone, model): 0 for zone in ("z-a", "z-b", "z-c") for model in Model}
    world.preempt(1)
    world.until(lambda: world.training() and world.record().members == (0, 2), 600)
    gen = world.record().gen
    world.request(RequestKind.RESIZE, nodes=2)
    world.run(120)
    assert (world.record().gen, world.record().members, world.record().parked) == (gen, (0, 2), (1,))


def test_another_node_is_parked_instead_of_the_one_with_the_newest_checkpoint() -> None:
    world = trained(World(nodes=Nodes(1, 3)))
    for node in (0, 1):
        agent = world.member(node).agent
        assert agent is not None
        agent.say(Kind.FULL, world.record().gen)
        for drive in world.drives.values():
            drive.broken = drive.broken or drive.disk.node == node
    world.run(30)
    assert members_after(world, 1) == (2,)


def test_a_record_without_nodes_parks_the_highest() -> None:
    world = trained(World(nodes=Nodes(1, 3)))
    record = replace(world.record(), size=2)
    assert (record.filled(), record.wanted()) == ((0, 1), 2)
    assert replace(record, parked=(0,)).filled() == (1, 2)
    assert replace(record, size=None).filled() == (0, 1, 2)


def test_a_parked_nodes_refusals_keep_no_other_nodes_refusals_alive() -> None:
    """The whole gang looks for a zone: what was refused long ago may be requested again."""
    record, snapshot = gang(2, size=1, parked=(1,), stop=True, stop_since=NOW, stop_deadline=NOW)
    old = Node(refused=("pool/z-a/spot",), refused_at=NOW - Times().cold_s)
    draft = Draft(replace(record, nodes=(old, replace(old, refused=("pool/z-b/spot",), refused_at=NOW))), snapshot)
    resize.step(draft)
    assert (draft.nodes[1].refused, draft.nodes[1].refused_at) == ((), 0.0) and draft.nodes[0] == old
    found = offers.choices(draft, offers.gang_as_node(draft), None, (Model.SPOT,))
    assert {choice.offer.zone for choice in found} == {"z-a", "z-b", "z-c"}


# -- values of each step, and each guard alone


@pytest.mark.parametrize(
    ("case", "nodes", "why"),
    [
        (on_snapshot(spec=None)(*calm(3, nodes=Nodes(1, 4))), 2, "no size was named"),
        (calm(3, nodes=Nodes(1, 4)), None, "no size was named"),
        (
            on_record(move=Move("z-b", NOW))(*calm(3, nodes=Nodes(1, 4))),
            2,
            "the job is moving to z-b: resize it afterwards",
        ),
        (on_record(move=Move("z-b", NOW))(*calm(3)), 2, "the job file says `nodes: 3`; only `nodes: {min, max}` lets a "
         "job change its size"),
        (calm(3, nodes=Nodes(1, 4)), 3, "the job has 3 already"),
        (calm(3, nodes=Nodes(1, 4)), 2, ""),
    ],
)  # fmt: skip
def test_why_a_size_is_refused(case: Case, nodes: int | None, why: str) -> None:
    draft = Draft(*case)
    assert resize.take(draft, nodes) == why
    assert (draft.record.size is None) is bool(why), "a refused size changes nothing"


@pytest.mark.parametrize(
    ("parked", "nodes", "then", "grows"),
    [
        ((2, 3, 4), 3, (3, 4), {2}),
        ((2, 3, 4), 5, (), {2, 3, 4}),
        ((4,), 3, (3, 4), set()),
        ((0,), 2, (0, 3, 4), set()),
        ((), 2, (2, 3, 4), set()),
    ],
)
def test_a_size_names_who_is_parked_and_the_others_return(
    parked: tuple[int, ...], nodes: int, then: tuple[int, ...], grows: set[int]
) -> None:
    draft = Draft(*on_record(parked=parked, size=5 - len(parked))(*calm(5, nodes=Nodes(1, 5))))
    assert resize.take(draft, nodes) == ""
    claim.step(draft)  # the queue has room
    assert (draft.record.size, draft.record.parked) == (nodes, then)
    assert {index for index, node in enumerate(draft.nodes) if node.cause == "resize"} == grows


@pytest.mark.parametrize(
    ("holders", "parked"),
    [({0}, (1, 2, 3)), ({1}, (0, 2, 3)), ({2}, (0, 1, 3)), ({3}, (0, 1, 2)), ({1, 2}, (0, 2, 3)), (set(), (1, 2, 3))],
)
def test_a_node_with_the_newest_checkpoint_stays_in_place_of_another(
    holders: set[int], parked: tuple[int, ...]
) -> None:
    case = on_snapshot(progress=None)(*calm(4, nodes=Nodes(1, 4)))
    for index in range(4):
        case = on_cur(index, has_newest=index in holders)(*case)
    draft = Draft(*case)
    assert resize.take(draft, 1) == ""
    assert draft.record.parked == parked


def test_without_members_the_node_whose_disk_has_the_newest_checkpoint_is_not_parked() -> None:
    """The others had no disk yet when the last generation ended, and all machines have gone since."""
    case = on_record(stop=True)(*calm(3, nodes=Nodes(1, 3)))
    for index in range(3):
        case = on_node(index, cur=None, wrote=3 if index == 2 else 2, newest_generation=0)(*case)
    draft = Draft(*case)
    assert resize.take(draft, 2) == ""
    assert draft.record.parked == (1,)


@pytest.mark.parametrize(
    ("case", "loss"),
    [
        (calm(2), (2.0, 1.0, 0.0, -0.3, -1)),
        (on_node(1, cur=None)(*calm(2)), (0.0, 0.0, 0.0, -1)),
        (on_cur(1, state=SlotState.ADMITTED)(*calm(2)), (1.0, 1.0, 0.0, -0.3, -1)),
        (on_cur(1, notice=NOW + 60)(*calm(2)), (2.0, 0.0, 0.0, -0.3, -1)),
        (on_cur(1, ends=NOW + 60)(*calm(2)), (2.0, 0.0, 0.0, -0.3, -1)),
        (on_cur(1, hardware_faults=1)(*calm(2)), (2.0, 0.0, 0.0, -0.3, -1)),
        (on_cur(1, model=Model.STATIC)(*calm(2)), (2.0, 1.0, 0.0, -0.0, -1)),
        (on_cur(1, model=Model.ON_DEMAND)(*calm(2)), (2.0, 1.0, 0.0, -1.0, -1)),
        (calm(2, fact(1, Kind.LAGS, "0-140")), (2.0, 1.0, -140.0, -0.3, -1)),
    ],
)
def test_what_the_loss_of_a_node_costs(case: Case, loss: tuple[float, ...]) -> None:
    assert resize._loss(Draft(*case), 1) == loss


def to_two(**changes: object) -> Case:
    """Nodes 2 and 3 are to be parked; node 2 is a member, node 3 has a machine that boots."""
    case = on_node(3, cur=intent(1), next=intent(2), replace_reason="user", refused=("x",), refused_at=NOW)(*calm(4))
    return on_record(**{"size": 2, "parked": (2, 3), "members": (0, 1, 2), **changes})(*case)


def test_all_save_and_stop_before_a_member_is_parked_and_another_node_is_parked_at_once() -> None:
    record, seen = to_two()
    swapped = replace(record, nodes=(*record.nodes[:2], record.nodes[3], record.nodes[2]), members=(0, 1, 3))
    for draft, member, other in ((Draft(record, seen), 2, 3), (Draft(swapped, seen), 3, 2)):
        resize.step(draft)
        assert (draft.record.stop, draft.record.stop_deadline) == (True, NOW + 5 + Times().stop_s)
        assert draft.nodes[member] == draft.before.nodes[member]
        parked = Node(top=1, disk=1, disk_top=1, zone="z-a", cause="resize", vacant_since=NOW)
        assert draft.nodes[other] == parked
        assert [(entry.id, entry.cause) for entry in draft.entries] == [("stop.g3", "resize")]


@pytest.mark.parametrize(("asked", "after"), [(2, 3), (None, None), (4, 4)], ids=["a user's", "the queue's", "both"])
def test_a_resize_that_is_given_up_parks_only_who_does_not_train(asked: int | None, after: int | None) -> None:
    stopped = {"stop": True, "stop_since": NOW - 9, "stop_deadline": NOW}
    case = on_snapshot(progress=Progress(3, 100, NOW, commit_gen=2, commit_step=90))(*to_two(**stopped))
    for index in (0, 1):
        case = on_cur(index, has_newest=False)(*case)
    draft = Draft(*case)
    resize.step(draft)
    assert (draft.record.size, draft.record.parked) == (2, (1, 3)), "node 2 stays instead"
    assert [entry.detail for entry in draft.entries] == [
        "node 2 stays in place of node 1, because only it has the newest checkpoint"
    ]
    draft = Draft(*on_record(asked=asked)(*on_cur(2, has_newest=False)(*case)))
    resize.step(draft)
    assert (draft.record.size, draft.record.asked, draft.record.parked) == (3, after, (3,))
    (entry,) = draft.entries
    assert (entry.id, entry.event, entry.cause) == ("request.resize.v41", Event.REQUEST, "resize")
    assert entry.detail == "the resize is given up, because no node has the newest checkpoint"


@pytest.mark.parametrize(
    ("case", "index", "free"),
    [
        (calm(3), 1, True),  # a member can train without a disk
        (on_record(parked=(1,), size=2, members=(0, 2))(*calm(3)), 1, True),
        (on_record(members=(0, 2))(*calm(3)), 1, False),  # neither parked nor a member
        (on_record(stop=True, stop_since=NOW)(*calm(3)), 1, False),
        (on_record(gen=0)(*calm(3)), 1, False),
        (on_snapshot(progress=None)(*on_cur(0, has_newest=False)(*calm(1))), 0, False),
        (calm(2, fact(1, Kind.UNSAVED)), 1, True),  # the other member has the newest commit
        (calm(1, fact(0, Kind.UNSAVED)), 0, False),
    ],
)
def test_an_old_disk_goes_only_while_a_member_has_the_newest_commit(case: Case, index: int, free: bool) -> None:
    assert resize.left(Draft(*case), index) is free
