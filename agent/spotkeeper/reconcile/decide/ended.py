"""The end of a job: everything deleted, then DONE, and the record stays as its tombstone.

The deletions themselves are ordinary calls (``calls``): an ended job has no live attempt, so every
machine and every disk of it is superfluous.
"""

from __future__ import annotations

from spotkeeper.reconcile import alloc
from spotkeeper.reconcile.decide.draft import Draft
from spotkeeper.spec.cloud import disks_kept
from spotkeeper.spec.ledger import Event
from spotkeeper.spec.record import Phase


def step(draft: Draft) -> None:
    """END -> DONE when every zone answered and nothing is left; a hung static node is not waited for."""
    record, view = draft.record, draft.view
    if record.phase is not Phase.END or not view.complete or draft.seen.blind:
        return
    slots = [grant for grant in view.own_grants() if alloc.node_of(grant) is None]
    disks = () if record.keep_disks else view.disks
    if view.vms or disks or view.snapshots or slots:
        return
    draft.set(phase=Phase.DONE)
    cause = record.outcome.value if record.outcome else None
    draft.log(Event.DONE, "job", cause=cause, detail=_kept(draft))


def _kept(draft: Draft) -> str:
    told = disks_kept(disk.name for same in draft.view.disks.values() for disk in same)
    return f"but {told}" if told else ""
