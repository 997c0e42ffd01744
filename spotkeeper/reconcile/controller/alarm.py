"""Reports which documents cannot be read, and whether ticks succeed.

For an unreadable document each round logs one line of severity ERROR and puts its bytes into quarantine. Each tick ends
with one log line, which the clouds' alerts count, and updates ``stack/tick`` in the bucket, which the command reads.
This module repairs nothing. If one of these writes fails it logs a warning, and the round or tick continues.
"""

from __future__ import annotations

import logging

import msgspec

from spotkeeper.contract import codec
from spotkeeper.contract.allocation import Allocation
from spotkeeper.contract.redact import redact
from spotkeeper.contract.stack import TICK_PATH, TickNote, tick_note
from spotkeeper.contract.sweep import SweepState
from spotkeeper.reconcile.store.documents import CorruptError, NewerError, Versioned
from spotkeeper.reconcile.store.objects import StoreError
from spotkeeper.reconcile.store.store import Store

TICK, TICK_FAILED = "tick", "tick_failed"  # ``event`` of the line that each tick ends with
log = logging.getLogger("spotkeeper.reconcile")


def unreadable(store: Store, error: CorruptError, job: str = "") -> None:
    """Log one alarm with the remedy. Quarantine the bytes, unless a newer version of Spotkeeper wrote them."""
    log.error("ALARM: %s; %s", error, error.remedy, extra={"job": job or None})
    if isinstance(error, NewerError):
        return
    try:
        store.quarantine(f"{error.path}\n{error.said}")
    except StoreError as trouble:
        log.warning("quarantine: %s", trouble)


def readable_allocation(store: Store) -> Versioned[Allocation] | None:
    """Return the allocation. If it is unreadable, log an alarm and return None: which grants exist is then unknown."""
    try:
        return store.read_allocation()
    except CorruptError as error:
        unreadable(store, error)
        return None


def readable_sweep(store: Store, name: str) -> Versioned[SweepState] | None:
    """Return a search's state. If it is unreadable, log an alarm and return None: its trials then wait as they are."""
    try:
        return store.read_sweep(name)
    except CorruptError as error:
        unreadable(store, error)
        return None


def note_tick(store: Store, now: float, trouble: str, **counts: int) -> None:
    """Log a tick's result and update ``stack/tick``. ``trouble``: why it failed, or ""; ``counts``: for the log."""
    level, event = (logging.WARNING, TICK_FAILED) if trouble else (logging.INFO, TICK)
    log.log(level, "tick", extra={"event": event, "reason": trouble or None, **counts})
    try:
        note = tick_note(read_note(store), now, redact(trouble))
        if note is not None:
            store.put(TICK_PATH, msgspec.json.encode(note))
    except (StoreError, OSError) as error:  # readers notice a note that is too old
        log.warning("the tick's result was not written to the bucket: %s", error)


def read_note(store: Store) -> TickNote | None:
    """Return what ``stack/tick`` says about the last ticks; None if it is missing or unreadable.

    Raises:
        StoreError: the bucket failed.
    """
    data = store.get(TICK_PATH)
    try:
        return None if data is None else codec.decode(data, TickNote)
    except msgspec.DecodeError:
        return None
