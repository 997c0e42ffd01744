"""Writes the ledger: what happened and what it cost, each event once.

A write of the record also writes the ledger entries of its change, into the record's ``outbox``. They are copied to the
ledger before the record is written again. So a crash before they are copied loses none of them; copying them twice
changes nothing. What the entries say about offers is copied to ``market/`` in the same way.

Notifications are stored before the entries that they are about: if the entries are in the ledger, the notifications
were stored, and are perhaps sent and deleted by now.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable

from spotkeeper.contract.ledger import Entry, Event
from spotkeeper.contract.notification import Outgoing
from spotkeeper.contract.record import Hold, Record
from spotkeeper.contract.stack import StackState
from spotkeeper.reconcile.notifications.message import notifications
from spotkeeper.reconcile.select import market
from spotkeeper.reconcile.store.store import Store

log = logging.getLogger("spotkeeper.reconcile")
# Events that are logged: the stack's alarms look for ``event`` and ``reason`` in the log (``infra/*/alerts.py``).
_TOLD = (Event.HOLD, Event.LIMIT)
_BY_ITSELF = [hold.value for hold in Hold if hold.passes or hold is Hold.CAPACITY]  # no person must do anything
_OWED = 256  # most entries of a job kept for ``market/`` after a failed write; the market is advisory
_REMEMBERED = 4096  # most (job, time, id) of written entries kept, to save repeated writes


class LedgerWriter:
    """Appends ledger entries. Remembers which ones this process has written, to save repeated writes."""

    def __init__(self) -> None:
        self._written: OrderedDict[tuple[str, float, str], None] = OrderedDict()
        self._owed: dict[str, list[Entry]] = {}  # by job, entries that are not in ``market/`` yet
        self.announced = False  # notifications were stored, and a request of this process should send them

    def flush(self, store: Store, record: Record, stack: StackState | None) -> None:
        """Write the entries of a record's outbox to the ledger, before the record is replaced."""
        new = self._new(record.job, record.outbox)
        if stack is not None and stack.channels:
            found = notifications(new, record, stack)
            if found and not store.appended(record.job, new):
                for each in found:
                    store.put_notification(Outgoing(each))
                self.announced = True
        self.write(store, record.job, record.outbox)

    def _new(self, job: str, entries: Iterable[Entry]) -> list[Entry]:
        return [entry for entry in entries if (job, entry.at, entry.id) not in self._written]

    def write(self, store: Store, job: str, entries: Iterable[Entry]) -> None:
        new = self._new(job, entries)
        if new:
            store.append_all(job, new)
            _tell(job, new)
        owed = [*self._owed.pop(job, ()), *new]
        if not market.feed(store, job, owed):
            self._owed[job] = owed[-_OWED:]
        for entry in new:
            self._written[job, entry.at, entry.id] = None
            if len(self._written) > _REMEMBERED:
                self._written.popitem(last=False)


def _tell(job: str, entries: Iterable[Entry]) -> None:
    """Log a line for each entry that people should see. After a crash another process can log the same line again."""
    for entry in entries:
        if entry.event in _TOLD and entry.cause not in _BY_ITSELF:
            what = {"event": entry.event.value, "reason": entry.cause, "job": job}
            log.warning("%s of job %s: %s", entry.event.value, job, entry.detail or entry.cause, extra=what)
