"""The steps of a round: the order of its reads, and its passes. Pure: no I/O, no clock.

``reconcile_job.py`` carries these steps out against a store and a cloud. The exhaustive search (``tests/model``)
carries out the same steps against a modelled world, where it stalls and ends rounds between any two steps.

A round reads in the order of :data:`READS`, which is a safety rule. Then it makes passes: ``todo`` of a :class:`Pass`
says what to do, and the method in the third column takes the result and returns the next pass::

    WRITE  compare-and-swap the record       wrote()    if another round wrote the record first, this round ends
    GRANT  compare-and-swap the allocation   granted()  takes the new allocation, even if another round wrote it first
    CALL   make calls to the cloud           called()
    REST   delete obsolete facts and requests; the round ends
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property

from spotkeeper.contract.allocation import Allocation
from spotkeeper.contract.cloud import Action, Result
from spotkeeper.contract.job import JobRequest
from spotkeeper.contract.record import Phase, Record
from spotkeeper.contract.sweep import SweepState
from spotkeeper.reconcile.decide import Decision, Snapshot, decide
from spotkeeper.reconcile.store.documents import OfferHistory


class ReadStep(str, Enum):
    """What a round reads before it decides."""

    RECORD = "record"
    FACTS = "facts"
    ALLOCATION = "allocation"  # and everything else that is in the bucket
    LISTING = "listing"


# A loss is proven only if the record is older than the listing (rule 3): the machines it names existed before.
READS = (ReadStep.RECORD, ReadStep.FACTS, ReadStep.ALLOCATION, ReadStep.LISTING)
# A tick lists the cloud once for all jobs; each of its rounds then reads its facts and the allocation.
TICK_READS = (ReadStep.RECORD, ReadStep.LISTING, ReadStep.FACTS, ReadStep.ALLOCATION)


class Todo(str, Enum):
    """What a pass does: exactly one of these."""

    WRITE = "write"
    REPORT = "report"
    GRANT = "grant"
    CALL = "call"
    REST = "rest"


@dataclass(frozen=True)
class Pass:
    """The state of a round between two steps: the record, all that was read, and the results of calls."""

    record: Record
    snapshot: Snapshot

    @cached_property
    def decision(self) -> Decision:
        return decide(self.record, self.snapshot)

    @cached_property
    def calls(self) -> tuple[Action, ...]:
        """Return the decided calls that this round has not made yet."""
        made = {result.action for result in self.snapshot.results}
        return tuple(action for action in dict.fromkeys(self.decision.actions) if action not in made)

    @property
    def todo(self) -> Todo:
        if self.decision.record is not None:
            return Todo.WRITE
        if self.decision.grants is not None:
            return Todo.GRANT
        if self.calls:
            return Todo.CALL
        return Todo.REST if self.decision.sweep is None else Todo.REPORT

    def wrote(self, record: Record) -> Pass:
        """Return the next pass, after the record was written."""
        spec = self.snapshot.files.get(record.spec_sha256, self.snapshot.spec)  # a resume may have brought another file
        return Pass(record, replace(self.snapshot, spec=spec, grants_first=True))

    def granted(self, allocation: Allocation, won: bool) -> Pass:
        """Return the next pass, which reads this ``allocation``.

        ``won``: whether this round wrote it. If another round did, the next pass writes the record without new grants.
        """
        return Pass(self.record, replace(self.snapshot, allocation=allocation, grants_first=won))

    def reported(self, state: SweepState) -> Pass:
        """Return the next pass, which reads this ``state`` of the job's search."""
        return Pass(self.record, replace(self.snapshot, sweep=state))

    def called(self, results: tuple[Result, ...], market: tuple[OfferHistory, ...]) -> Pass:
        return Pass(self.record, replace(self.snapshot, results=(*self.snapshot.results, *results), market=market))

    @property
    def requests_over(self) -> tuple[JobRequest, ...]:
        """Return requests that the record has taken in, or that came after the job's end."""
        record = self.record
        return tuple(a for a in self.snapshot.requests if a.id in record.requests_done or record.phase is Phase.DONE)
