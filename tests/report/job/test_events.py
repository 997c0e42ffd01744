"""The text of each event."""

from __future__ import annotations

import pytest

from spotkeeper.contract.facts import HANG
from spotkeeper.contract.ledger import Entry, Event
from spotkeeper.contract.record import BACKUP, PROBE
from spotkeeper.contract.stack import Model
from spotkeeper.report.job.events import describe, event_lines
from spotkeeper.report.job.view import job_view
from tests.contract.samples import STACK
from tests.report.ledgers import (
    A,
    a_record,
    entry,
)


def test_a_released_machine_is_named() -> None:
    gone = (
        entry(Event.GONE, 5.0, 1, 1, detail="slot:workers"),
        entry(Event.GONE, 5.0, 1, 2, detail="machine:sk-prod-s0"),
    )
    told = [line.text for line in job_view(a_record(), None, gone, STACK, now=9.0).events]
    assert told == [
        "node 1: old machine deleted: sk-prod-abcdefgh-n0001-a1",
        "node 1: old machine deleted: sk-prod-s0",
    ]
    assert describe(gone[0]) == "node 1: old machine deleted (attempt 1)", "of a stack that cannot be read"


@pytest.mark.parametrize(
    ("cause", "text"),
    [
        ("notice", "all nodes save and stop (notice)"),
        ("swap", "all nodes save and stop (swap)"),
        ("loss", "all nodes stop (loss)"),
        ("silence", "all nodes stop (silence)"),
    ],
)
def test_an_unannounced_loss_shows_no_save(cause: str, text: str) -> None:
    assert describe(entry(Event.STOP, 1.0, cause=cause)) == text


SPOT, ON_DEMAND = ({"model": model, "price": 1.0, "on_demand": 4.0} for model in (Model.SPOT, Model.ON_DEMAND))


@pytest.mark.parametrize(
    ("told", "text"),
    [
        (entry(Event.INTENT, 1.0, 1, 2, **SPOT), "node 1: requesting a spot machine at $1.00/h (25 % of on-demand)"),
        (entry(Event.INTENT, 1.0, 1, 2, **ON_DEMAND), "node 1: requesting an on-demand machine at $1.00/h"),
        (
            entry(Event.INTENT, 1.0, 1, 2, cause=BACKUP, detail="the first one boots slowly"),
            "node 1: requesting a backup: a machine: the first one boots slowly",
        ),
        (entry(Event.INTENT, 1.0, 1, 2, cause=PROBE), "node 1: probing another zone with a machine"),
        (
            entry(Event.ADMITTED, 1.0, 1, 2, cause=PROBE, zone=A),
            f"node 1: {A} has capacity: the probing machine is ready (probe)",
        ),
        (
            entry(Event.INTENT, 1.0, 1, 2, model=Model.RESERVED, price=0.0, on_demand=4.0),
            "node 1: requesting a reserved machine, paid for already",
        ),
        (entry(Event.CRASH, 1.0, 1, cause=HANG, detail="node 1 hangs in forward"), "node 1 hangs in forward"),
        (entry(Event.CRASH, 1.0, 1, cause="exit 1"), "the job's own code failed (exit 1)"),
        (entry(Event.NOTICE, 1.0, 1, cause="preemption"), "node 1: preemption notice"),
        (entry(Event.REQUEST, 1.0, cause="hold"), "request to hold"),
    ],
)
def test_what_an_event_says(told: Entry, text: str) -> None:
    assert describe(told) == text


def test_a_stop_names_the_nodes_lost_since_the_generation_began() -> None:
    def loss(at: float, node: int) -> Entry:
        return entry(Event.LOSS, at, node, 1, cause="loss")

    stop = entry(Event.STOP, 9.0, cause="loss")
    ledger = (loss(1.0, 0), entry(Event.GENERATION, 2.0, gen=2), loss(3.0, 2), loss(3.0, 1), stop)
    assert event_lines(ledger, 0.0)[-1].text == "all nodes stop: nodes 1, 2 lost their machines"


def test_the_reason_for_a_machine_is_a_detail_unless_its_line_has_it() -> None:
    chosen = entry(Event.INTENT, 1.0, 1, 2, cause="loss", detail="cheapest")
    backup = entry(Event.INTENT, 1.0, 1, 3, cause=BACKUP, detail="slow")
    assert [line.detail for line in event_lines((chosen, backup), 0.0)] == ["loss: cheapest", ""]


@pytest.mark.parametrize("event", list(Event))
def test_every_event_has_a_line(event: Event) -> None:
    text = describe(
        Entry(at=0.0, id="x", event=event, gen=4, node=2, zone=A, model=Model.SPOT, cause="why", detail="d")
    )
    hidden = (Event.GONE, Event.INTENT)  # the grant, and the reason that --verbose shows
    assert text.endswith(": d") == (event not in hidden)
    assert "{" not in text
    assert describe(Entry(at=0.0, id="x", event=event))
