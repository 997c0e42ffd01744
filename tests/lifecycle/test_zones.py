"""A gang of two spot machines starts in a zone, loses it, and moves its disks to another."""

from __future__ import annotations

import pytest

from spotkeeper.contract.ledger import Entry, Event
from spotkeeper.contract.record import PROBE, Outcome
from spotkeeper.contract.stack import Model
from spotkeeper.reconcile.select.offers import Need, select
from tests.lifecycle.stage import ROOM, STEPS, Run, Stage, tiny

MARKET = round(0.23 * 11.061, 5)  # what the recorded market asks of the on-demand price; the catalogue says 40 %

pytestmark = pytest.mark.lifecycle


def dry(stage: Stage, zone: str, *, reclaim: bool) -> None:
    """Remove the zone's spot and on-demand capacity; ``reclaim``: preempt its machines too, with notice."""
    stage.cloud.set_capacity(zone, 0, model="on-demand")
    stage.cloud.set_capacity(zone, 0, reclaim=reclaim)


@pytest.mark.matrix  # tests/sim moves gangs in `make test`
def test_a_gang_moves_with_its_disks_when_its_zone_loses_capacity(stage: Stage) -> None:
    spec = tiny("nomad", STEPS, nodes=2, static="never")
    state = stage.store.read_stack()
    assert state is not None
    choices = select(spec, state, Need(now=stage.cloud.clock.now())).choices
    *firsts, second = dict.fromkeys(choice.offer.zone for choice in choices)  # the market may reorder them meanwhile
    for zone in firsts:
        dry(stage, zone, reclaim=False)
    with Run(stage, spec) as run:
        run.steady("in the second zone")
        assert run.record().zone == second
        refused = {entry.zone for entry in run.ledger(Event.REFUSED) if entry.zone}  # none, if the market told in time
        assert refused <= set(firsts)
        assert {disk.zone for disk in disks(stage, run)} == {second}

        for zone in firsts:
            stage.fill(zone)
        dry(stage, second, reclaim=True)
        run.until(f"the gang to leave {second}", lambda: run.record().zone != second and not run.record().move)
        run.steady("in the third zone")
        third = run.record().zone
        here = [node.cur for node in run.record().nodes]
        assert {slot.zone for slot in here if slot} == {third} and {slot.model for slot in here if slot} == {Model.SPOT}
        assert [node.disk for node in run.record().nodes] == [node.disk_top for node in run.record().nodes]
        restored = run.watcher.traces()[run.record().gen].restored
        assert restored is not None and restored.step > 0, "the new disks hold what the old ones held"

        # A job's first round does not wait for a market that another process is reading for the first time.
        asked = [entry for entry in run.ledger(Event.INTENT) if entry.model is Model.SPOT and entry.gen]
        assert {price(entry) for entry in asked} == {MARKET}
        record = run.over()
        weights = run.weights()
    assert record.outcome is Outcome.SUCCEEDED, run.story()
    *before, last = [entry.cause for entry in run.ledger(Event.MOVE)]
    assert set(before) <= {"stockout"} and last == "move", run.story()
    assert record.budget.crashes == 0
    assert weights == run.weights_left_alone(2)


@pytest.mark.matrix
def test_a_gang_on_demand_moves_only_once_machines_wait_in_the_other_zone(stage: Stage) -> None:
    """The remaining hours of work must be worth the move."""
    spec = tiny("finder", 100 * STEPS, nodes=2, static="never")
    with Run(stage, spec) as run:
        run.steady("on spot")
        home = run.record().zone
        assert home is not None
        stage.fill()
        stage.cloud.set_capacity(home, 0, reclaim=True)
        run.until("the gang to find spot elsewhere", lambda: run.record().zone != home and not run.record().move)
        run.steady("in the other zone")
        here = [node.cur for node in run.record().nodes if node.cur]
        assert {slot.zone for slot in here} == {run.record().zone} and {slot.model for slot in here} == {Model.SPOT}
        assert [slot.cause for slot in here] == ["move"] * 2
        restored = run.watcher.traces()[run.record().gen].restored
        assert restored is not None and restored.step > 0, "the new disks hold what the old ones held"
        run.cancel()
    stage.cloud.set_capacity(home, ROOM)
    assert [entry.cause for entry in run.ledger(Event.MOVE)] == ["cheaper", "move"], run.story()
    (stop,) = [entry for entry in run.ledger(Event.STOP) if entry.cause == "move"]
    came = [(entry.at, entry.node, entry.zone) for entry in run.ledger(Event.ADMITTED) if entry.cause == PROBE]
    assert max(came)[0] <= stop.at and {(0, here[0].zone), (1, here[0].zone)} <= {it[1:] for it in came}, run.story()


def price(entry: Entry) -> float:
    return round(entry.price or 0.0, 5)


def disks(stage: Stage, run: Run) -> list[object]:
    return [disk for disk in stage.cloud.status().disks if disk.labels.get("sk-job") == run.job]
