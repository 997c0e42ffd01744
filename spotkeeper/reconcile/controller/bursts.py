"""Reports that arrive during a round: when it waits for more, and who handles those that come too late.

A large gang's machines boot together, and each of their reports would cost a round.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from spotkeeper.clock import Now
from spotkeeper.contract.facts import Fact
from spotkeeper.contract.record import Phase, Record, SlotState
from spotkeeper.reconcile.controller.lease import Every, Lease
from spotkeeper.reconcile.store.objects import AGAIN_S, Deadline, StoreError
from spotkeeper.reconcile.store.store import Store

log = logging.getLogger("spotkeeper.reconcile")
BURST = 8  # this many new facts during a round are a burst: more will follow; small gangs never wait
BURST_WAITS = 4
GATHER_S = 2.0  # real; pause between two rounds while BURST machines or more are still to report


def to_come(record: Record | None) -> int:
    """Count the nodes of a large gang that have no admitted machine yet; 0 if the gang trains or is small.

    The gang cannot train before every node has a machine. So until then a round waits for more machines' reports.
    """
    if record is None or record.phase is not Phase.RUN or (record.gen and not record.stop):
        return 0
    if len(record.filled()) < BURST:
        return 0
    slots = (record.nodes[index].cur for index in record.filled() if index < len(record.nodes))
    return sum(slot is None or slot.state is SlotState.INTENT for slot in slots)


def let_in(store: Store, job: str, known: int, new: int, wait: Callable[[], None], deadline: Deadline) -> None:
    """Wait for the end of a burst of reports; otherwise every few hundred reports would cost a round."""
    for _ in range(BURST_WAITS):
        if new < BURST or deadline.left() < AGAIN_S:
            return
        wait()
        now = len(store.list_facts(job))
        new, known = now - known, now


def hand_on(store: Store, job: str, clock: Now, every: Every | None, covered: frozenset[Fact]) -> None:
    """Make the next round due immediately, if reports arrived too late for this one.

    If another round has the lease, that round checks for new reports when it releases the lease. ``store`` has the
    deadline of the request; ``every``: how the lease is renewed; ``covered``: the facts that this round has read.
    """
    try:
        if set(store.list_facts(job)) <= covered:
            return
        lease = Lease(store, job, clock, every)
        if lease.take():
            with lease.renewed():
                lease.due = clock.now()
    except StoreError as error:  # the finished work stays valid
        log.warning("reports of job %s may wait for the next tick: %s", job, error)
