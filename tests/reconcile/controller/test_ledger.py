"""Which ledger entries are logged, so that the stack's alarms see them."""

from __future__ import annotations

import logging

import pytest

from spotkeeper.contract.ledger import Entry, Event
from spotkeeper.contract.record import Hold
from spotkeeper.reconcile.controller.ledger import LedgerWriter
from tests.reconcile.memory import MemoryStore


@pytest.mark.parametrize("why", list(Hold))
def test_holds_that_end_without_a_person_raise_no_alarm(why: Hold, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        LedgerWriter().write(MemoryStore(), "abcdefgh", (Entry(1.0, "hold.v1", Event.HOLD, cause=why.value),))
    assert [record.getMessage() for record in caplog.records if "hold of job" in record.getMessage()] == (
        [] if why in (Hold.CAPACITY, Hold.QUEUE, Hold.RUNG) else [f"hold of job abcdefgh: {why.value}"]
    )
