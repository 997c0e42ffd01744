"""What one search is about: how much may go wrong, what may be asked, and where it ends."""

from __future__ import annotations

from typing import NamedTuple

from tests.model.values import Moment

FAULTS = frozenset(
    {"killed", "noticed", "hangs", "reboots", "refused", "forgotten", "blind", "crashes"}
    | {moment.name for moment in (Moment.PAST, Moment.BOOT, Moment.SILENT, Moment.ROLL, Moment.DISK)}
)
# Beyond those, and for good: the cloud refuses the copies of disks; the other region is lost with all that is there.
ABROAD = frozenset({"uncopied", "dead"})
# A copy in the bucket is found damaged, or lost, where it is fetched.
ROTTEN = frozenset({"rotten"})
REQUESTS = frozenset({"swap", "move", "pause", "cancel", "finish"})
BOTH = 3


class Story(NamedTuple):
    """Bounds of one search. ``split``: a round may stall between any two reads, not only after the record."""

    name: str
    cloud: str = "gce"
    jobs: int = 1
    nodes: int = 1
    zones: tuple[str, ...] = ("a", "b")
    rounds: int = 2
    replicated: bool = True
    static: bool = False
    cap: int = 3
    faults: int = 2
    requests: int = 1
    deaths: int = 0  # rounds that end in the middle; any may stall for ever besides, which is a death too
    kinds: frozenset[str] = FAULTS
    request_kinds: frozenset[str] = REQUESTS
    split: bool = True
    ticks: bool = False  # a round may be a tick's, which looks at the cloud before it reads facts and grants
    spread: bool = False
    lost_records: bool = False
    cas: bool = True  # False: the store's compare-and-swap is taken away (a mutant's story)
    states: int = 0  # stop there; 0: to the end
    least: int = 0  # an elastic job's smallest size; 0: it is fixed
    mirror: bool = False  # checkpoints are copied to the bucket, and disks may be "wiped" (a fault) once there is one
    recall: bool = False  # the first of two jobs has a lower priority, so the second takes its machines
    trial: bool = False  # the job is one of two trials of a search: both stop at a rung, and the better one continues
    regions: bool = False  # each zone is a region, and the job may use both; the first is home
    toll: bool = False  # what moves between its regions transfer costs more than any machine
    dear: bool = False  # spot in the first zone costs three times what it costs in the second
    pair: tuple[str, ...] = ()  # two kinds of fault, of which each may happen once; else any of ``kinds``

    @property
    def numbers(self) -> int:
        """The highest number that an attempt may have.

        Two rounds that race for ever, each granting what the other burns, use up one number after the other,
        and nothing else changes; so numbers end a little above what faults and requests use up.
        """
        return 2 + self.faults + self.requests + self.trial + (2 if self.dear else 0)  # a look, and after the move

    @property
    def budget(self) -> int:
        """The faults that are left at the start: how many, or one bit for each of a pair."""
        return BOTH if self.pair else self.faults

    def may(self, left: int) -> tuple[tuple[str, int], ...]:
        """(kind, what it takes from the budget) of every fault that may still happen."""
        if self.pair:
            return tuple((kind, bit) for bit, kind in zip((1, 2), self.pair, strict=True) if left & bit)
        return tuple((kind, 1) for kind in sorted(self.kinds)) if left else ()

    def wanted(self, left: int) -> tuple[str, ...]:
        """The requests that may still be made."""
        return tuple(sorted(self.request_kinds)) if left else ()
