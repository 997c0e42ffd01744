"""The end of maxRunDuration is known: each node's successor boots in time, and no step is lost."""

from __future__ import annotations

from dataclasses import replace as with_

import pytest
from msgspec.structs import replace

from spotkeeper.contract.ledger import Event
from spotkeeper.contract.stack import Model
from spotkeeper.reconcile.decide import decide
from spotkeeper.report.job.recovery import preemptions, recoveries
from spotkeeper.report.job.view import job_view
from tests.reconcile.controller.test_round import causes, trained
from tests.reconcile.decide.test_decide import events, gang
from tests.reconcile.world import World

LONGEST_S = 7200.0


def bounded(nodes: int = 3, **more: object) -> World:
    world = World(nodes=nodes, **more)  # type: ignore[arg-type]
    world.max_run_s = LONGEST_S
    return trained(world)


def test_a_gang_of_equal_age_is_replaced_one_by_one() -> None:
    world = bounded()
    first = {node: world.member(node).vm.uid for node in range(3)}
    world.run(LONGEST_S)
    assert world.training()
    assert {node: world.member(node).vm.uid for node in range(3)}.keys() == first.keys()
    assert not {world.member(node).vm.uid for node in range(3)} & set(first.values()), "all were replaced"
    turns = [entry.at for entry in world.events(Event.ENDING)]
    assert len(turns) == 3 and min(b - a for a, b in zip(sorted(turns), sorted(turns)[1:], strict=False)) > 100
    assert causes(world, Event.PROMOTED) == ["swap at planned end"] * 3
    assert causes(world, Event.STOP) == ["planned end"] * 3
    assert world.events(Event.LOSS) == []
    # Each generation began from what the one before it had saved at its stop: no step is lost.
    assert all(commit is not None and commit[0] == gen - 1 for gen, commit in world.started[1:])


def test_a_planned_end_is_no_preemption() -> None:
    world = bounded()
    world.until(lambda: world.events(Event.ENDING), LONGEST_S)
    record = world.record()
    view = job_view(record, None, world.events(), world.stack, world.now())
    (machine,) = [machine for machine in view.nodes if machine.left_s is not None]
    assert 600 < machine.left_s < LONGEST_S / 2  # type: ignore[operator]
    assert any("nears its planned end" in line.text for line in view.events)
    world.run(LONGEST_S)
    ledger = world.events()
    assert preemptions(ledger).total == 0
    assert world.record().budget.preemptions == 0
    told = recoveries(ledger, world.now())
    assert {(one.cause, one.announced) for one in told} == {("planned end", True)}
    assert all(one.seconds is not None and one.seconds < 60 for one in told), "the boot beside it is no standstill"


def test_without_capacity_it_trains_to_the_end_and_the_loss_is_no_preemption() -> None:
    world = bounded(1)
    world.capacity = {(zone, model): 0 for zone in ("z-a", "z-b", "z-c") for model in Model}
    world.until(lambda: world.events(Event.ENDING), LONGEST_S)
    ends = world.record().nodes[0].cur.ends  # type: ignore[union-attr]
    assert ends is not None
    world.until(lambda: world.record().nodes[0].cur is None, LONGEST_S)
    assert world.now() >= ends - 60
    assert causes(world, Event.LOSS) == ["planned end"]
    assert world.record().budget.preemptions == 0 and preemptions(world.events()).total == 0
    world.capacity = {}
    world.until(world.training, 1200)


def test_a_regroup_for_another_reason_takes_a_machine_whose_end_is_far() -> None:
    """Without an available successor, the loss of another node must not stop the gang until that planned end."""
    world = bounded(2)
    world.capacity = {("z-a", Model.SPOT): 2, ("z-a", Model.ON_DEMAND): 0}  # room for the gang, none beside it
    world.until(lambda: world.events(Event.ENDING), LONGEST_S)
    world.until(lambda: world.events(Event.REFUSED), 60)
    (ending,) = [node for node in world.record().nodes if node.cur and node.cur.ends]
    assert ending.cur is not None and ending.cur.ends is not None
    world.preempt(0 if ending is world.record().nodes[1] else 1)
    world.until(lambda: world.record().gen == 2 and world.training(), 300)
    assert ending.cur.ends - world.now() > 120


def test_a_notice_before_the_planned_end_is_a_preemption() -> None:
    world = bounded(2)
    world.until(lambda: world.events(Event.ENDING), LONGEST_S)
    node = world.events(Event.ENDING)[0].node
    assert node is not None
    world.preempt(node, notice_s=30)
    world.run(300)
    assert world.training()
    assert preemptions(world.events()).announced == 1


@pytest.mark.parametrize("ends", [None, 1e9])
def test_machines_without_a_near_end_are_left_alone(ends: float | None) -> None:
    record, seen = gang()
    vms = tuple(replace(vm, ends=ends, created=0.0) for vm in seen.listing.vms)
    assert decide(record, with_(seen, listing=replace(seen.listing, vms=vms))).quiet


def test_each_nodes_replacement_has_its_own_time() -> None:
    """Of two machines that end at the same moment, the higher node goes first."""
    record, seen = gang()
    for left, wanted in ((1400.0, [Event.ENDING]), (900.0, [Event.ENDING, Event.ENDING])):
        ends = seen.now + left
        vms = tuple(replace(vm, ends=ends, created=ends - 10_000.0) for vm in seen.listing.vms)
        seen = with_(seen, listing=replace(seen.listing, vms=vms), grants_first=False)
        found = decide(record, seen)
        assert [event for event in events(found) if event is Event.ENDING] == wanted
        assert found.record is not None
        endings = [entry for entry in found.record.outbox if entry.event is Event.ENDING]
        told = [(entry.id, entry.node, entry.attempt, entry.cause, entry.detail) for entry in endings]
        at = range(2 - len(wanted), 2)
        assert told == [(f"ending.r{n}.a1", n, 1, "planned end", f"machine ends in {left:.0f} s") for n in at]
