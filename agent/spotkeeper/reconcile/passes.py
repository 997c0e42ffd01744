"""What a round does next: the order of its reads, and its passes. Pure: no I/O, no clock.

``round`` carries these steps out against a store and a cloud; the exhaustive search carries out the very
same ones against a modelled world, and may stall or end a round between any two of them.

A round reads in the order of :data:`READS`, which is a safety rule. Then it makes passes; what a
:class:`Pass` wants next is its ``todo``, and what came of that makes the next one::

    WRITE  compare-and-swap the record       won: wrote()      lost: the round ends, another one goes on
    GRANT  compare-and-swap the allocation   granted()         lost: granted() too, with what is there now
    CALL   calls from the record it read     called()
    REST   nothing is left but tidying
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property

from spotkeeper.reconcile.decide import Decision, Seen, decide
from spotkeeper.reconcile.store_api import OfferSeen
from spotkeeper.spec.cloud import Action, Result
from spotkeeper.spec.job import Ask
from spotkeeper.spec.record import Alloc, Phase, Record


class Read(str, Enum):
    """What a round reads before it decides anything."""

    RECORD = "record"
    FACTS = "facts"
    ALLOC = "alloc"  # and everything else that lies in the bucket
    LISTING = "listing"


# To declare a loss, the record must be older than the look at the cloud (rule 3): what it names was there then.
READS = (Read.RECORD, Read.FACTS, Read.ALLOC, Read.LISTING)
# A tick looks at the cloud once, for all its jobs; each of its rounds then reads its facts and the allocation.
TICK_READS = (Read.RECORD, Read.LISTING, Read.FACTS, Read.ALLOC)


class Todo(str, Enum):
    """What a pass does; exactly one of these."""

    WRITE = "write"
    GRANT = "grant"
    CALL = "call"
    REST = "rest"


@dataclass(frozen=True)
class Pass:
    """A round between two effects: the record it holds, all it has seen, and the calls it has made."""

    record: Record
    seen: Seen

    @cached_property
    def decision(self) -> Decision:
        return decide(self.record, self.seen)

    @cached_property
    def calls(self) -> tuple[Action, ...]:
        """Those that this round has not made yet."""
        made = {result.action for result in self.seen.results}
        return tuple(action for action in dict.fromkeys(self.decision.actions) if action not in made)

    @property
    def todo(self) -> Todo:
        if self.decision.record is not None:
            return Todo.WRITE
        if self.decision.grants is not None:
            return Todo.GRANT
        return Todo.CALL if self.calls else Todo.REST

    def wrote(self, record: Record) -> Pass:
        """The record was written."""
        spec = self.seen.files.get(record.spec_sha256, self.seen.spec)  # a resume may have brought another
        return Pass(record, replace(self.seen, spec=spec, grants_first=True))

    def granted(self, alloc: Alloc, won: bool) -> Pass:
        """``alloc`` is what is there now. After a lost race, what was decided must not wait for a grant."""
        return Pass(self.record, replace(self.seen, alloc=alloc, grants_first=won))

    def called(self, results: tuple[Result, ...], market: tuple[OfferSeen, ...]) -> Pass:
        return Pass(self.record, replace(self.seen, results=(*self.seen.results, *results), market=market))

    @property
    def asks_over(self) -> tuple[Ask, ...]:
        """Asks that the record has taken in, or that come too late."""
        record = self.record
        return tuple(a for a in self.seen.asks if a.id in record.asks_done or record.phase is Phase.DONE)
