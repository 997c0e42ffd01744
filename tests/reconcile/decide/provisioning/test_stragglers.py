"""Slow machines: said once, shown, and swapped one at a time where the job file wants that."""

from __future__ import annotations

from dataclasses import replace as with_

import pytest
from msgspec.structs import replace

from spotkeeper.contract.facts import Kind
from spotkeeper.contract.generation import Progress
from spotkeeper.contract.ledger import Event
from spotkeeper.contract.stack import Model
from spotkeeper.reconcile.decide import decide
from spotkeeper.reconcile.decide.provisioning.machine_health import STRAGGLER, STRAGGLER_SWAP
from spotkeeper.report.job.recovery import recoveries
from spotkeeper.report.job.view import job_view
from spotkeeper.report.text.render import nodes_fitting
from tests.reconcile.controller.test_round import causes, trained
from tests.reconcile.decide.test_decide import NOW, fact, gang
from tests.reconcile.world import World

SAVED = Progress(3, 100, NOW, commit_gen=3, commit_step=90)


def slow(world: World, node: int, value: str = "0-163") -> str:
    """The agent of a node says that it holds the others up; its machine."""
    machine = world.member(node)
    assert machine.agent is not None
    machine.agent.say(Kind.LAGS, world.record().gen, value)
    return machine.vm.uid


def fine(world: World, node: int, which: str = "0") -> None:
    agent = world.member(node).agent
    assert agent is not None
    agent.say(Kind.KEEPS_UP, world.record().gen, which)


def uids(world: World) -> list[str]:
    return [world.member(node).vm.uid for node in range(3)]


def settled(**spec: object) -> World:
    """A gang of three that has trained for a while."""
    world = trained(World(nodes=3, **spec))  # type: ignore[arg-type]
    world.run(120)
    return world


def test_by_default_a_slow_machine_is_only_reported() -> None:
    world = settled()
    before = uids(world)
    slow(world, 1)
    world.run(600)
    assert uids(world) == before and world.record().gen == 1
    view = job_view(world.record(), None, world.events(), world.stack, world.now())
    assert view.warnings == ("node 1: its machine is slow and delays the others: 1.6x the median",)
    assert [machine.lag for machine in view.nodes] == ["", "1.6x the median", ""]
    assert nodes_fitting(view.nodes).columns[-1] == "own time"
    fine(world, 1)
    world.run(30)
    view = job_view(world.record(), None, world.events(), world.stack, world.now())
    assert view.warnings == () and [machine.lag for machine in view.nodes] == [""] * 3
    assert "own time" not in nodes_fitting(view.nodes).columns


def test_stragglers_replace_swaps_a_slow_machine_at_a_checkpoint() -> None:
    world = settled(stragglers="replace")
    before = uids(world)
    slow(world, 1)
    world.until(lambda: world.record().gen == 2 and world.training(), 300)
    after = uids(world)
    assert [a == b for a, b in zip(before, after, strict=True)] == [True, False, True]
    assert causes(world, Event.PROMOTED) == [STRAGGLER_SWAP] and causes(world, Event.LOSS) == []
    assert world.started[-1][1] is not None and world.started[-1][1][0] == 1, "from what was saved at the stop"
    (told,) = recoveries(world.events(), world.now())
    assert (told.cause, told.announced, told.nodes) == ("swap", True, (1,))
    world.run(600)
    assert uids(world) == after, "what the old machine said counts no more"


def test_the_slowest_machine_is_swapped_first_and_alone() -> None:
    record, seen = gang(3)
    said = [fact(0, Kind.LAGS, "0-140"), fact(2, Kind.LAGS, "0-190"), fact(2, Kind.LAGS, "1-150")]
    spec = replace(seen.spec, stragglers="replace")
    calm = with_(seen, spec=spec, facts=(*seen.facts, *said), now=NOW + 100, progress=SAVED, grants_first=False)
    found = decide(record, calm)
    assert found.record is not None and [node.replace_reason for node in found.record.nodes] == [None, None, STRAGGLER]
    assert decide(record, with_(calm, spec=seen.spec)).quiet, "by default nothing follows"
    noticed = with_(calm, facts=(*calm.facts, fact(1, Kind.NOTICE, f"{NOW + 200:.0f}")))
    found = decide(record, noticed)
    found = decide(found.record or record, noticed)
    assert [node.replace_reason for node in (found.record or record).nodes] == [None] * 3


def test_a_job_that_is_slow_by_nature_gets_two_machines_an_hour() -> None:
    world = settled(stragglers="replace")
    for _ in range(16):  # each new machine is as slow as the one before
        for node in range(3):
            slow(world, node)
        world.run(200)
        assert sum(node.next is not None for node in world.record().nodes) <= 1, "one at a time"
    assert causes(world, Event.INTENT).count(STRAGGLER_SWAP) == 2
    world.run(3600)
    assert causes(world, Event.INTENT).count(STRAGGLER_SWAP) in (3, 4)


def test_a_machine_that_keeps_up_again_is_not_swapped() -> None:
    world = settled(stragglers="replace")
    before = uids(world)
    slow(world, 1)
    world.until(lambda: world.record().nodes[1].next is not None, 60)
    fine(world, 1)
    world.run(300)
    assert uids(world) == before and world.record().gen == 1
    assert world.record().nodes[1].next is None and len(world.dynamic()) == 3


def test_without_capacity_the_slow_machine_trains_on() -> None:
    world = settled(stragglers="replace")
    before = uids(world)
    world.capacity = {(zone, model): 0 for zone in ("z-a", "z-b", "z-c") for model in Model}
    slow(world, 1)
    world.run(1200)
    assert uids(world) == before and world.record().gen == 1
    assert len([e for e in world.events(Event.REFUSED) if e.attempt is not None]) <= 2


def test_a_script_that_never_saves_is_not_stopped_for_a_swap() -> None:
    world = World(nodes=3, stragglers="replace")
    world.saves = False
    trained(world)
    world.run(120)
    slow(world, 1)
    world.run(600)
    assert causes(world, Event.INTENT).count(STRAGGLER_SWAP) == 0


@pytest.mark.parametrize("value", ["0", "x-150", "0-99999999", "-150", "0-12"])
def test_invalid_lag_reports_go_to_quarantine(value: str) -> None:
    world = settled(stragglers="replace")
    slow(world, 1, value)
    world.run(60)
    assert world.events(Event.LAG) == [] and causes(world, Event.INTENT).count(STRAGGLER_SWAP) == 0
