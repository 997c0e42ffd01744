"""A job on hold: its cost during the hold, what ends the hold, and the commands that resume or end the job."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from spotkeeper.contract.ledger import Entry, Event
from spotkeeper.contract.record import Hold, Phase, Record
from spotkeeper.contract.stack import Model, StackState

DAYS_A_MONTH = 365 / 12


class HoldView(Struct, frozen=True):
    """A job's hold. Times are virtual seconds; ``usd_per_day`` is None if the price of its disks is unknown."""

    kind: Hold
    resume: str  # the command that resumes the job
    resume_with: str  # the command that resumes the job with another job file
    cancel: str  # the command that ends the job
    disks: int = 0  # number of disks that are still billed
    disk_gb: int = 0  # their total size
    usd_per_day: float | None = None
    tries_in_s: float | None = None  # until the job tries again by itself
    ends_in_s: float | None = None  # until the job ends by itself
    keep_disks: bool = False  # the disks stay when the job ends
    resuming: bool = False  # a request to resume waits for the next round
    go_back: bool = False  # the newest checkpoint is lost; `resume` continues from an older one, or from the start


def resume_with(name: str) -> str:
    """The command that resumes a job with another job file and with the source folder that this file names."""
    return f"spotkeeper resume {name} JOB.YAML"


def resume(record: Record) -> str:
    """The command that resumes a job without changing its job file or source."""
    return record.go_back() if goes_back(record) else f"spotkeeper resume {record.name}"


def goes_back(record: Record) -> bool:
    """Whether the job is on hold because its newest checkpoint is lost; a plain resume would put it on hold again."""
    return record.hold in (Hold.CLOUD, Hold.CAPACITY) and record.go_back() in record.reason


def hold_view(
    record: Record, entries: Iterable[Entry], stack: StackState | None, now: float, resuming: bool
) -> HoldView | None:
    """Return the hold of a job; None if it is not on hold. ``entries``: the job's ledger, in order."""
    if record.phase is not Phase.HOLD or record.hold is None:
        return None
    sizes, prices = _disks(entries, stack)
    return HoldView(
        kind=record.hold,
        resume=resume(record),
        resume_with=resume_with(record.name) + (" --go-back" if goes_back(record) else ""),
        cancel=f"spotkeeper cancel {record.name}",
        disks=len(sizes),
        disk_gb=sum(size or 0 for size in sizes),
        usd_per_day=None if None in prices else sum(price or 0.0 for price in prices),
        tries_in_s=_left(record.hold_until, now),
        ends_in_s=_left(record.hold_ends, now),
        keep_disks=record.keep_disks,
        resuming=resuming,
        go_back=goes_back(record),
    )


def _left(moment: float | None, now: float) -> float | None:
    return None if moment is None else max(0.0, moment - now)


def _disks(entries: Iterable[Entry], stack: StackState | None) -> tuple[list[int | None], list[float | None]]:
    """The sizes (GB) and prices (USD a day) of a job's data disks; None for an unknown one.

    Each node that ever had a spot or on-demand machine has one disk.
    """
    pools: dict[int, str] = {}
    for entry in entries:
        if entry.event is Event.ADMITTED and entry.node is not None and entry.model is not Model.STATIC:
            pools[entry.node] = entry.pool or ""
    found = [stack.pool(name) if stack is not None else None for name in pools.values()]
    sizes = [pool.disk_gb if pool is not None else None for pool in found]
    prices = [
        pool.disk_gb * pool.disk_usd_gb_month / DAYS_A_MONTH
        if pool is not None and pool.disk_usd_gb_month is not None
        else None
        for pool in found
    ]
    return sizes, prices
