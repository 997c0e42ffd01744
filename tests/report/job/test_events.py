"""The text of each event."""

from __future__ import annotations

import pytest

from spotkeeper.contract.ledger import Entry, Event
from spotkeeper.contract.stack import Model
from spotkeeper.report.job.events import describe
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


@pytest.mark.parametrize("event", list(Event))
def test_every_event_has_a_line(event: Event) -> None:
    text = describe(
        Entry(at=0.0, id="x", event=event, gen=4, node=2, zone=A, model=Model.SPOT, cause="why", detail="d")
    )
    hidden = (Event.GONE, Event.INTENT)  # the grant, and the reason that --verbose shows
    assert text.endswith(": d") == (event not in hidden)
    assert "{" not in text
    assert describe(Entry(at=0.0, id="x", event=event))
