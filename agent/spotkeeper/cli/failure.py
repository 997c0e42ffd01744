"""Why a generation failed, in a line or a few: the exception that began it, or where those stand that hang.

Read from the logs that the machines left in the bucket; where there is none, nothing is said.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from spotkeeper.reconcile import paths
from spotkeeper.reconcile.store_api import Store
from spotkeeper.spec.joblog import Part, split
from spotkeeper.spec.ledger import Entry
from spotkeeper.spec.record import Record
from spotkeeper.vm.launcher.stacks import TEXT

MOST_RANKS = 8  # whose logs are read
MOST_LINES = 16
LONGEST = 400  # of a line: some exceptions hold a tensor
_PLACE = re.compile(r"local rank \d+ \(pid \d+\): .*")
_DUMP = "--- "  # how each dump of stacks begins


def short(store: Store, record: Record, crash: Entry, *, hung: bool) -> tuple[str, ...]:
    """``rank 1: ValueError: the column 'label' is missing``; of a hang, each worker's innermost call."""
    gen = crash.gen or record.gen
    if hung:
        lines = tuple(_places(store, record, crash.rank, gen))[:MOST_LINES]
        return (f"generation {gen} hung; its workers' innermost calls:", *lines) if lines else ()
    data = None if crash.rank is None else store.get(paths.log(record.job, crash.rank, gen))
    words = _last_words(split(data)) if data else ""
    return (f"generation {gen} failed, rank {crash.rank}: {words}",) if words else ()


def _places(store: Store, record: Record, first: int | None, gen: int) -> Iterator[str]:
    """Of all ranks, the one that hangs before the others."""
    ranks = sorted(range(len(record.ranks)), key=lambda rank: (rank != first, rank))
    for rank in ranks[:MOST_RANKS]:
        for part in split(store.get(paths.log(record.job, rank, gen)) or b""):
            if part.path.endswith("/" + TEXT):
                dump = part.text.decode("utf-8", "replace").rpartition("\n" + _DUMP)[2]
                yield from (f"  rank {rank}, {line[:LONGEST]}" for line in dump.splitlines() if _PLACE.match(line))


def _last_words(parts: tuple[Part, ...]) -> str:
    """What the rank that failed first said last: its errors are the end of what is stored."""
    lines = parts[-1].text.decode("utf-8", "replace").split("\n") if parts else []
    return next((line.strip()[:LONGEST] for line in reversed(lines) if line.strip()), "")
