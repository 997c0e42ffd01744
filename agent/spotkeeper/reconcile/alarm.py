"""A document that cannot be read is told once a round: a line of severity ERROR, and its bytes in quarantine.

Nothing is mended here, and nothing raised: whoever met it goes on with what can be read.
"""

from __future__ import annotations

import logging

from spotkeeper.reconcile.store_api import CorruptError, Held, NewerError, Store, StoreError
from spotkeeper.spec.record import Alloc

log = logging.getLogger("spotkeeper.reconcile")


def unreadable(store: Store, error: CorruptError, job: str = "") -> None:
    """One alarm line with the remedy; what makes no sense is kept (a newer version's document makes sense)."""
    log.error("ALARM: %s; %s", error, error.remedy, extra={"job": job or None})
    if isinstance(error, NewerError):
        return
    try:
        store.quarantine(f"{error.path}\n{error.said}")
    except StoreError as trouble:
        log.warning("quarantine: %s", trouble)


def readable_alloc(store: Store) -> Held[Alloc] | None:
    """The allocation; None, after an alarm, where it makes no sense: grants are then unknown, not none."""
    try:
        return store.read_alloc()
    except CorruptError as error:
        unreadable(store, error)
        return None
