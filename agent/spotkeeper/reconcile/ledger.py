"""Writing the ledger: what happened and what it cost, once each.

Entries of a change travel in the record's ``outbox``, in the same compare-and-swap as the change itself,
and are copied out before the next change is written. So a crash between the two loses nothing, and a
repeated copy finds the object there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from spotkeeper.reconcile.store_api import Store
from spotkeeper.spec.ledger import Entry
from spotkeeper.spec.record import Record

_REMEMBERED = 4096  # (job, time, id) of entries this process wrote, to spare the bucket repeats


class Writer:
    """Appends entries; remembers, within one process, which are there already."""

    def __init__(self) -> None:
        self._written: OrderedDict[tuple[str, float, str], None] = OrderedDict()

    def flush(self, store: Store, record: Record) -> None:
        """Copy the outbox of a record out. Must happen before the record is replaced."""
        self.write(store, record.job, record.outbox)

    def write(self, store: Store, job: str, entries: Iterable[Entry]) -> None:
        for entry in entries:
            key = (job, entry.at, entry.id)
            if key in self._written:
                continue
            store.append_ledger(job, entry)
            self._written[key] = None
            if len(self._written) > _REMEMBERED:
                self._written.popitem(last=False)
