"""How many machines the cloud took away, from a ledger alone: the one count that everything shows.

A preemption is a spot machine that had joined and that the cloud took, or was about to take when the job
gave it up: ``spec.market.fate`` says which, and whether it was announced. It is no preemption that a notice
was withdrawn, that a machine was given up because it did not answer, or that it never joined.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from msgspec import Struct

from spotkeeper.report.money import first_of_each
from spotkeeper.spec.ledger import Entry, Event
from spotkeeper.spec.market import Fate, fate
from spotkeeper.spec.model import Model


class Preemptions(Struct, frozen=True):
    announced: int = 0
    unannounced: int = 0

    @property
    def total(self) -> int:
        return self.announced + self.unannounced


def preemptions(ledger: Iterable[Entry]) -> Preemptions:
    stories: dict[tuple[int, int], list[Entry]] = defaultdict(list)
    for entry in first_of_each(ledger):
        if entry.rank is not None and entry.attempt is not None:
            stories[entry.rank, entry.attempt].append(entry)
    fates = [fate((entry.event, entry.cause or "") for entry in story) for story in stories.values() if _spot(story)]
    return Preemptions(fates.count(Fate.ANNOUNCED), fates.count(Fate.UNANNOUNCED))


def _spot(story: list[Entry]) -> bool:
    """Whether it is a spot machine that had joined."""
    joined = any(entry.event is Event.ADMITTED for entry in story)
    return joined and any(entry.model is Model.SPOT for entry in story)
