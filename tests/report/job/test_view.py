"""The view of a job: the state of each machine, and the warnings that still hold."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace

from spotkeeper.contract.generation import Progress
from spotkeeper.contract.ledger import Entry, Event
from spotkeeper.contract.record import Node, Outcome, Phase, Record
from spotkeeper.contract.stack import Model
from spotkeeper.report.job.events import describe
from spotkeeper.report.job.lines import reasons
from spotkeeper.report.job.view import JobView, NodeState, job_view
from spotkeeper.report.money.account import account
from spotkeeper.report.money.money import money
from spotkeeper.report.text.render import job_table, status
from tests.contract.samples import STACK
from tests.report.ledgers import (
    HOUR,
    NOTICED,
    A,
    a_record,
    entry,
    intent,
    printed,
    slot,
    states,
)


def test_the_states_of_machines() -> None:
    view = job_view(a_record(), None, NOTICED, STACK, now=600.0)
    assert states(view) == [(0, "training"), (1, "notice"), (1, "standby"), (2, "booting"), (3, "waiting")]
    assert [node.node for node in view.nodes if node.master] == [1]
    assert view.nodes[1].left_s == 100.0
    assert view.nodes[0].age_s == 600.0  # since its intent, not since it became a member


def test_a_node_saves_until_it_has_stopped_and_not_as_long_as_the_job_waits() -> None:
    def first_two(now: float, *entries: Entry, **over: object) -> list[tuple[int, str]]:
        record = a_record(stop=True, **{"stop_since": 590.0, "stop_deadline": 650.0} | over)
        return states(job_view(record, None, entries, STACK, now=now))[:2]

    saving, stopped = [(0, "saving"), (1, "saving")], [(0, "stopped"), (1, "stopped")]
    earlier = (entry(Event.STOPPED, 400.0, 0, 1, gen=3), entry(Event.STOPPED, 600.0, 0, 1, gen=2))
    assert first_two(600.0, *earlier) == saving
    assert first_two(610.0, entry(Event.STOPPED, 605.0, 0, 1, gen=3)) == stopped
    assert first_two(650.0) == stopped, "the function waits no longer"
    assert first_two(600.0, stop_deadline=None) == stopped


def test_a_warning_lasts_until_that_node_saves_again() -> None:
    def told(*entries: Entry) -> list[str]:
        return [line.partition(":")[0] for line in job_view(a_record(), None, entries, STACK, now=99.0).warnings]

    def of(event: Event, at: float, node: int, attempt: int = 1, which: str = "0", gen: int = 3) -> Entry:
        name = f"{event.value}.r{node}.a{attempt}.g{gen}.{which}"
        return Entry(at=at, id=name, event=event, gen=gen, node=node, attempt=attempt)

    full, unsaved = of(Event.FULL, 10.0, 0), of(Event.UNSAVED, 11.0, 1, which="saver-lost")
    assert told(full, unsaved) == ["node 0", "node 1"]
    assert told(full, unsaved, of(Event.SAVED, 20.0, 0)) == ["node 1"], "node 0's commit says nothing of node 1's disk"
    assert told(full, of(Event.SAVED, 20.0, 0), of(Event.FULL, 30.0, 0, which="1")) == ["node 0"], "and again"
    assert told(of(Event.SAVED, 5.0, 0), full) == ["node 0"]
    assert told(full, of(Event.SAVED, 20.0, 0, attempt=2)) == ["node 0"], "another machine's word"
    assert told(of(Event.FULL, 10.0, 0, gen=2)) == [], "a new generation begins anew"


def test_a_channel_that_was_not_told_is_a_warning() -> None:
    entries = tuple(
        entry(Event.UNDELIVERED, at, cause=f"channel {name}", detail=f"hold: HTTP {status}")
        for at, name, status in ((1.0, "ops", 500), (2.0, "ops", 404), (3.0, "ml", 410))
    )
    text = "a notification could not be sent for six hours, and is given up"
    assert job_view(a_record(), None, entries, STACK, now=99.0).warnings == (
        f"{text} (channel ops): hold: HTTP 404",
        f"{text} (channel ml): hold: HTTP 410",
    )


def test_an_ended_job_has_no_waiting_nodes() -> None:
    over = a_record(phase=Phase.DONE, outcome=Outcome.SUCCEEDED, nodes=(Node(), Node()), members=())
    view = job_view(over, None, NOTICED, STACK, now=99 * HOUR)
    assert view.nodes == ()
    assert view.elapsed_s == 2 * HOUR
    assert view.over()


def test_the_view_carries_progress_money_and_recoveries() -> None:
    view = job_view(a_record(), Progress(gen=3, step=7, at=1.0, loss=0.5, total_steps=9), NOTICED, STACK, 9 * HOUR)
    assert (view.step, view.total_steps, view.loss) == (7, 9, 0.5)
    assert view.money.spent == pytest.approx(money(NOTICED, STACK, 9 * HOUR).spent)
    assert len(view.recoveries) == 1
    assert [line.event for line in view.events] == [one.event for one in NOTICED]
    assert msgspec.json.decode(msgspec.json.encode(view), type=JobView) == view


def test_a_waiting_node_shows_its_reason() -> None:
    waits = entry(Event.REFUSED, 5.0, 1, cause="wait", detail="waiting for static machine n1: only its disk has it")
    assert describe(waits) == "node 1: waiting for static machine n1: only its disk has it"
    refused = entry(Event.REFUSED, 5.0, 1, 2, cause="capacity", zone=A, model=Model.SPOT, detail="none left")
    assert describe(refused) == f"node 1: the cloud refused a spot machine in {A} (capacity): none left"


def test_a_reason_to_wait_is_over_once_every_node_has_a_machine() -> None:
    waits = a_record(reason="waiting for capacity in us-central1-a")
    assert job_view(waits, None, (), STACK, 9.0).reason == waits.reason, "node 3 has none"
    boots = replace(waits, nodes=waits.nodes[:3])
    assert job_view(boots, None, (), STACK, 9.0).reason == ""
    assert job_view(replace(waits, parked=(3,), size=3), None, (), STACK, 9.0).reason == "", "parked nodes get none"
    held = replace(boots, phase=Phase.HOLD)
    assert job_view(held, None, (), STACK, 9.0).reason == waits.reason


def test_crashes_are_counted_over_the_whole_life_and_once() -> None:
    """A resume renews the budget, and the newest entries are in the ledger and in the record's outbox."""
    crashes = [entry(Event.CRASH, float(gen), 0, gen=gen) for gen in (1, 2, 3)]
    crashes = [replace(one, id=f"crash.g{one.gen}") for one in crashes]
    assert job_view(a_record(), None, (*crashes, crashes[-1]), STACK, 9.0).crashes == 3


def test_node_states_are_all_drawn() -> None:
    from spotkeeper.report.text.render import _NODE_STYLE

    assert set(_NODE_STYLE) == set(NodeState)


def test_only_a_job_without_any_round_shows_a_warning() -> None:
    fresh = Record("abcdefgh", "u", "first", "", 0.0, nodes=(Node(), Node()))
    assert not job_view(fresh, None, (), STACK, 599.0).warnings
    (line,) = job_view(fresh, None, (), STACK, 720.0).warnings
    assert "12 min ago" in line and "spotkeeper reconcile --once" in line
    assert not job_view(replace(fresh, ver=1), None, (), STACK, 720.0).warnings
    assert "0/2" in printed(job_table([job_view(fresh, None, (), STACK, 720.0)]))


def test_status_shows_why_each_machine_was_chosen() -> None:
    """What was chosen alike is one line; of on-demand fallback, what brought it about and when it ends."""
    spot = "33 % of the on-demand price, expected to last 9.1 h"
    ledger = (
        replace(intent(0.0, 0, 1), detail=spot),
        replace(intent(0.0, 1, 1), detail=spot),
        entry(
            Event.FALLBACK, 100.0, cause="too many losses", detail=f"3 losses in 41 min in {A}, spot again at 14:20 UTC"
        ),
        replace(intent(100.0, 1, 2, model=Model.ON_DEMAND), detail="on-demand fallback"),
        replace(intent(100.0, 2, 4), detail="machine:sk-prod-always-s0"),
    )
    record = a_record(
        nodes=(
            Node(cur=slot()),
            Node(cur=slot(), next=slot(attempt=2, model=Model.ON_DEMAND)),
            Node(cur=slot(attempt=4, model=Model.STATIC, machine="sk-prod-always-s0")),
        )
    )
    view = job_view(record, None, ledger, STACK, 200.0)
    assert [node.reason for node in view.nodes] == [
        spot,
        spot,
        f"on-demand fallback: 3 losses in 41 min in {A}, spot again at 14:20 UTC",
        "",
    ]
    lines = account(view, ledger, 200.0).attempts
    assert [line.reason for line in lines if line.node < 2] == [spot, spot, view.nodes[2].reason], "as in the report"
    assert reasons(view.nodes) == [
        ("nodes 0, 1", f"spot in {A}: {spot}"),
        ("node 1", f"on-demand in {A}: on-demand fallback: 3 losses in 41 min in {A}, spot again at 14:20 UTC"),
    ]
    first, second, third = (line.rstrip() for line in printed(status(view)).splitlines()[-3:])
    assert first.split("  ") == ["nodes 0, 1", f"spot in {A}: {spot}"]
    assert second.startswith("node 1") and third.startswith("            ") and third.endswith("UTC")
