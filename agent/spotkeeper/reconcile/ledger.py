"""Writing the ledger: what happened and what it cost, once each.

Entries of a change travel in the record's ``outbox``, in the same compare-and-swap as the change itself,
and are copied out before the next change is written. So a crash between the two loses nothing, and a
repeated copy finds the object there. What they say of offers goes to ``market/`` by the same way.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable

from spotkeeper.reconcile import market
from spotkeeper.reconcile.store_api import Store
from spotkeeper.spec.ledger import Entry, Event
from spotkeeper.spec.record import Hold, Record

log = logging.getLogger("spotkeeper.reconcile")
# Those that people are told of: the stack's alarms look for ``event`` and ``reason`` in the log (infra, alerts).
_TOLD = (Event.HOLD, Event.FUSE)
_OWED = 256  # entries of a job that are told to the market later; it is advisory
_REMEMBERED = 4096  # (job, time, id) of entries this process wrote, to spare the bucket repeats


class Writer:
    """Appends entries; remembers, within one process, which are there already."""

    def __init__(self) -> None:
        self._written: OrderedDict[tuple[str, float, str], None] = OrderedDict()
        self._owed: dict[str, list[Entry]] = {}  # by job, what the market could not be told yet

    def flush(self, store: Store, record: Record) -> None:
        """Copy the outbox of a record out. Must happen before the record is replaced."""
        self.write(store, record.job, record.outbox)

    def write(self, store: Store, job: str, entries: Iterable[Entry]) -> None:
        new = [entry for entry in entries if (job, entry.at, entry.id) not in self._written]
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
    """One line for each; a repeated copy by another process tells it again, which is better than never."""
    for entry in entries:
        if entry.event in _TOLD and entry.cause != Hold.CAPACITY.value:  # a gang that tries again waits for no person
            what = {"event": entry.event.value, "reason": entry.cause, "job": job}
            log.warning("%s of job %s: %s", entry.event.value, job, entry.detail or entry.cause, extra=what)
