"""Decides what one pass of a round does, from one snapshot. Pure: no I/O, no clock, no randomness.

A pass results in exactly one of: a new allocation document, a new record, or calls made from the record that was read.
The steps run in the order of the protocol. They are in these folders and files:

``gang/`` membership, users' requests, roll calls, size and zone · ``queue/`` how many machines each job may have ·
``provisioning/`` which machine a node has, gets or gives up · ``checkpoint/`` where the newest checkpoint is · ``job/``
limits and progress · ``calls.py`` calls to the cloud · ``snapshot.py`` what a pass reads · ``draft.py`` the decision in
the making.

``docs/protocol.md`` states the nine rules and names the function that enforces each.
"""

from __future__ import annotations

from msgspec.structs import replace

from spotkeeper.contract.record import Phase, Record
from spotkeeper.reconcile.decide import calls
from spotkeeper.reconcile.decide.checkpoint import mirrors, warm
from spotkeeper.reconcile.decide.draft import Decision, Draft
from spotkeeper.reconcile.decide.gang import exits, generation, requests, resize, rungs, zone_move, zone_probe
from spotkeeper.reconcile.decide.job import egress, limits
from spotkeeper.reconcile.decide.provisioning import pending, replacement, reservations, slots
from spotkeeper.reconcile.decide.queue import claim
from spotkeeper.reconcile.decide.snapshot import Queries, Snapshot, Times

# In the order of the protocol. A step that leaves the phase RUN ends the pass.
RUNNING = (
    rungs.step,
    exits.step,
    slots.step,
    limits.step,
    claim.step,
    requests.paused,
    zone_move.step,
    resize.step,
    zone_probe.settle,
    zone_probe.seek,
    replacement.step,
    zone_probe.step,
    warm.step,
    reservations.step,
    pending.limit_wait,
    pending.give_back,
    generation.step,
)

__all__ = ["Decision", "Draft", "Queries", "Snapshot", "Times", "decide"]


def decide(record: Record, snapshot: Snapshot) -> Decision:
    """Decide what one pass over this snapshot does.

    If nodes need new machines, the first pass returns an allocation with their grants. The next pass returns the
    record: a loss and the intent for the new machine are thus written together.

    ``snapshot`` must have been read in the order of ``steps.READS`` or ``steps.TICK_READS``: the record first.
    The new record has ``ver + 1``; the writer sets its nonce.
    """
    draft = Draft(record, snapshot)
    _decide(draft)
    changed = draft.changed
    if changed and not (draft.wanted and snapshot.grants_first):
        return _write(draft)
    allocation, gone = reservations.plan(draft)
    if allocation is not None:
        return Decision(grants=allocation, noted=gone)
    actions = calls.plan(draft)
    told = None if changed else rungs.report(draft)  # of what the record says already
    return Decision(actions=actions, sweep=told, stale=calls.stale(draft), due=calls.due(draft, actions))


def _decide(draft: Draft) -> None:
    egress.settle(draft)
    rungs.begin(draft)
    requests.step(draft)
    requests.expire_hold(draft)
    claim.resume(draft)
    rungs.resume(draft)
    if not draft.record.over:
        mirrors.step(draft)
    if draft.record.phase is Phase.RUN:
        _running(draft)
    if draft.record.over:
        if not draft.record.owed:
            requests.finish(draft)
    elif not draft.changed:
        reservations.burn(draft)


def _running(draft: Draft) -> None:
    for step in RUNNING:
        if draft.record.phase is not Phase.RUN:
            return
        step(draft)


def _write(draft: Draft) -> Decision:
    warm.owe(draft)
    egress.count(draft)
    limits.accrue(draft)
    record = replace(draft.whole(), ver=draft.before.ver + 1, outbox=tuple(draft.entries))
    return Decision(record=record)
