"""Why a generation failed: the exception that began it with its traceback, or where those stand that hang.

Read from the logs that the machines left in the bucket; where there is none, nothing is said.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from spotkeeper.cli import logtext
from spotkeeper.reconcile import paths
from spotkeeper.reconcile.store_api import Store
from spotkeeper.spec.joblog import Part, split
from spotkeeper.spec.ledger import Entry
from spotkeeper.spec.record import Record
from spotkeeper.vm.launcher.stacks import TEXT

MOST_RANKS = 8  # whose logs are read
MOST_LINES = 16
LONGEST = 400  # of a line: some exceptions hold a tensor
LAST_LINES = 12  # of a log that ends in no traceback
TRACEBACK_LINES = 40  # a longer one loses its middle
_BEGINS = re.compile(r"(?: *\+ Exception Group )?Traceback \(most recent call last\):$")
_RANK = re.compile(r"\[rank\d+\]: ?")  # torch's own, before each line
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
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


def end_of_log(data: bytes) -> tuple[str, ...]:
    """The traceback that a failed rank's log ends in, below the heading of its file; without one, the last lines.

    The errors of the rank that failed first are the end of what is stored; torchrun's own words stand before them.
    """
    parts = split(data)
    lines = parts[-1].text.decode("utf-8", "replace").rstrip().split("\n") if parts else []
    if (begins := _traceback(lines)) is None:
        return tuple(logtext.whole(data).rstrip().splitlines()[-LAST_LINES:])
    told = lines[begins:]
    if (more := len(told) - TRACEBACK_LINES) > 0:
        head = TRACEBACK_LINES // 4
        told = [*told[:head], f"  ... {more} lines left out", *told[head + more :]]
    return (f"--- {parts[-1].title}", *told) if parts[-1].title else tuple(told)


def _traceback(lines: Sequence[str]) -> int | None:
    """The line with which the last traceback begins, or that of the first exception that led to it."""
    bare = [_RANK.sub("", line, count=1).rstrip() for line in lines]
    begins = [number for number, line in enumerate(bare) if _BEGINS.match(line)]
    while len(begins) > 1 and any(line.startswith(_CHAINED) for line in bare[begins[-2] : begins[-1]]):
        del begins[-1]
    return begins[-1] if begins else None


def _last_words(parts: tuple[Part, ...]) -> str:
    """The exception of what the rank that failed first said last; without a traceback, its last line."""
    lines = parts[-1].text.decode("utf-8", "replace").split("\n") if parts else []
    bare = [_RANK.sub("", line, count=1).rstrip()[:LONGEST] for line in lines]
    last = next((number for number in reversed(range(len(bare))) if _BEGINS.match(bare[number])), None)
    if last is not None:
        said = next((line for line in bare[last + 1 :] if line and not line[0].isspace()), "")
        if said:
            return said
    return next((line.strip() for line in reversed(bare) if line.strip()), "")
