"""What a person must know of a job that holds: what it costs meanwhile, what ends the hold, and the two ways out."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from spotkeeper.spec.ledger import Entry, Event
from spotkeeper.spec.model import Model
from spotkeeper.spec.record import Hold, Phase, Record
from spotkeeper.spec.stack import StackState

DAYS_A_MONTH = 365 / 12


class HoldView(Struct, frozen=True):
    """A hold; times are virtual seconds. ``usd_per_day`` is None where the stack names no price of its disks."""

    kind: Hold
    resume: str  # the command that goes on
    mend: str  # the command that goes on with other files
    cancel: str  # the command that ends it
    disks: int = 0  # they bill on
    disk_gb: int = 0  # of all of them
    usd_per_day: float | None = None
    tries_in_s: float | None = None  # until it tries again by itself
    ends_in_s: float | None = None  # until it ends by itself
    keep_disks: bool = False  # the disks stay when it ends
    resuming: bool = False  # somebody asked to resume; the next round takes it in
    go_back: bool = False  # the newest checkpoint cannot be had: only an older one, or none; the reason says `resume`


def mend(name: str) -> str:
    """The command that goes on with a job, from its checkpoints, with other files."""
    return f"spotkeeper resume {name} JOB.YAML"


def resume(record: Record) -> str:
    """The command that goes on with a job that holds, with the files it has."""
    return record.go_back() if goes_back(record) else f"spotkeeper resume {record.name}"


def goes_back(record: Record) -> bool:
    """Whether its newest checkpoint cannot be had, as the reason says, with the command: a plain resume holds again."""
    return record.hold in (Hold.CLOUD, Hold.CAPACITY) and record.go_back() in record.reason


def hold_view(
    record: Record, entries: Iterable[Entry], stack: StackState | None, now: float, resuming: bool
) -> HoldView | None:
    """None for a job that does not hold. ``entries``: its ledger, in order."""
    if record.phase is not Phase.HOLD or record.hold is None:
        return None
    sizes, prices = _disks(entries, stack)
    return HoldView(
        kind=record.hold,
        resume=resume(record),
        mend=mend(record.name) + (" --go-back" if goes_back(record) else ""),
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
    """GB and USD a day of the data disks: one for each rank that ever had a machine of its own (no static node)."""
    pools: dict[int, str] = {}
    for entry in entries:
        if entry.event is Event.ADMITTED and entry.rank is not None and entry.model is not Model.STATIC:
            pools[entry.rank] = entry.pool or ""
    found = [stack.pool(name) if stack is not None else None for name in pools.values()]
    sizes = [pool.disk_gb if pool is not None else None for pool in found]
    prices = [
        pool.disk_gb * pool.disk_usd_gb_month / DAYS_A_MONTH
        if pool is not None and pool.disk_usd_gb_month is not None
        else None
        for pool in found
    ]
    return sizes, prices
