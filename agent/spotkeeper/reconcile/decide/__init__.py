"""decide(): one snapshot in, one pass out. Pure: no I/O, no clock, no randomness.

A pass asks for exactly one of: a new allocation document, a new record, or calls made from the record that
was read. The rooms run in the order of the protocol; each is one concern:

``asks`` what users want · ``slots`` a rank's cur and next, losses · ``exits`` success, crash, roll call ·
``needs`` notices and wishes, stop, promotion · ``moves`` a gang's change of zone, ``elsewhere`` whether one pays ·
``sizes`` how many ranks ·
``grants`` intents and the allocation (``place`` the gang's zone, ``offers`` what a rank may have, ``waits`` why it has
nothing) · ``whole`` gangs that lack machines · ``generation`` membership · ``calls`` what is asked of the cloud ·
``ended`` the way out · ``fuses`` what stops spending · ``files`` other files for a job that holds · ``mirrors`` copies
of checkpoints in the bucket.

The nine rules live where they bind: 1 in ``round`` (every write is a CAS), 2 ``slots.admit``, 3 ``round`` and
``sweep`` (the order of reading), 4 to 6 ``calls`` and ``View.vm``, 7 ``View.stillborn``, 8 ``grants._intent``
and ``calls._insert``, 9 ``ended`` and ``sweep``.
"""

from __future__ import annotations

from msgspec.structs import replace

from spotkeeper.reconcile.decide import (
    asks,
    calls,
    elsewhere,
    ended,
    exits,
    fuses,
    generation,
    grants,
    mirrors,
    moves,
    needs,
    sizes,
    slots,
    whole,
)
from spotkeeper.reconcile.decide.draft import Decision, Draft
from spotkeeper.reconcile.decide.seen import Seen, Times, View
from spotkeeper.spec.record import Phase, Record

# In the order of the protocol; what one of them says of the phase ends the pass.
RUNNING = (
    exits.step,
    slots.step,
    fuses.step,
    asks.paused,
    moves.step,
    sizes.step,
    elsewhere.settle,
    needs.step,
    elsewhere.step,
    grants.step,
    whole.step,
    generation.step,
)

__all__ = ["Decision", "Draft", "Seen", "Times", "View", "decide"]


def decide(record: Record, seen: Seen) -> Decision:
    """What one pass over this snapshot does.

    Grants come before the record that needs them, so that a loss and its new intent are one write.

    ``seen`` must have been read in the order of ``passes.READS`` or ``passes.TICK_READS``: the record first.
    The new record has ``ver + 1``; its nonce is the writer's to set.
    """
    draft = Draft(record, seen)
    _rooms(draft)
    changed = draft.changed
    if changed and not (draft.wanted and seen.grants_first):
        return _write(draft)
    allocation, gone = grants.plan(draft)
    if allocation is not None:
        return Decision(grants=allocation, noted=gone)
    actions = calls.plan(draft)
    return Decision(actions=actions, stale=calls.stale(draft), due=calls.due(draft, actions))


def _rooms(draft: Draft) -> None:
    asks.step(draft)
    asks.held(draft)
    if draft.record.phase in (Phase.RUN, Phase.HOLD):
        mirrors.step(draft)
    if draft.record.phase is Phase.RUN:
        _running(draft)
    if draft.record.phase in (Phase.END, Phase.DONE):
        ended.step(draft)
    elif not draft.changed:
        grants.burn(draft)


def _running(draft: Draft) -> None:
    for step in RUNNING:
        if draft.record.phase is not Phase.RUN:
            return
        step(draft)


def _write(draft: Draft) -> Decision:
    fuses.accrue(draft)
    record = replace(draft.whole(), ver=draft.before.ver + 1, outbox=tuple(draft.entries))
    return Decision(record=record)
