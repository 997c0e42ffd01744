"""How a gang's checkpoint goes to another region: in snapshots of the gang's disks, or as a copy in the bucket.

Both ways cost egress and time in which nothing trains. The egress follows from sizes, which are known after the first
copy of each kind; the time is that of the last such move. A way that was not measured yet counts as if it took no time:
so each is tried once, if its egress alone does not make it more expensive than the other.
"""

from __future__ import annotations

from msgspec import Struct

from spotkeeper.contract.record import MoveTime
from spotkeeper.contract.stack import region_of
from spotkeeper.reconcile.decide.draft import HOUR_S, Draft
from spotkeeper.reconcile.decide.job import limits

GB = 1e9


class WayCost(Struct, frozen=True):
    """What a transfer of the whole gang's checkpoint takes: egress in USD, and seconds; None: never measured."""

    usd: float
    s: float | None


def by_disks(draft: Draft, zone: str) -> WayCost:
    """Return what snapshots of the disks take; warm copies in that region shrink them to what has changed since."""
    record, here, there = draft.record, region_of(draft.record.zone or zone), region_of(zone)
    usd = draft.size() * draft.snapshot.stack.egress_usd(here, there, disk_gb(draft))
    if record.warm is not None and record.warm.region == there and record.warm.usd is not None:
        usd = min(usd, record.warm.usd)
    return WayCost(usd, _measured(draft, bucket=False))


def by_bucket(draft: Draft, zone: str) -> WayCost | None:
    """Return what a copy in the bucket takes; None without one.

    It is uploaded once and downloaded once: by all nodes together, or by one, from which the others have it.
    """
    record, stack, spec = draft.record, draft.snapshot.stack, draft.snapshot.spec
    copied = max((one.bytes for one in record.mirror), default=0)
    if spec is None or spec.checkpoint.mirror is None or not record.gen or record.zone is None or not copied:
        return None
    here, there, bucket = region_of(record.zone), region_of(zone), stack.bucket_regions or stack.regions[:1]
    if here == there or not bucket:
        return None
    up = 0.0 if here in bucket else stack.egress_usd(here, bucket[0], copied / GB)
    down = 0.0 if there in bucket else stack.egress_usd(bucket[0], there, copied / GB)
    return WayCost(up + down, _measured(draft, bucket=True))


def prefers_bucket(draft: Draft, zone: str) -> bool:
    """Whether the bucket's copy is the cheaper way to a zone: egress, and the gang's price while nothing trains."""
    disks, bucket = by_disks(draft, zone), by_bucket(draft, zone)
    if bucket is None:
        return False
    usd_hour = sum(limits.price(draft, slot) for _, slot in draft.members())
    return _worth(bucket, usd_hour) < _worth(disks, usd_hour)


def usd(draft: Draft, zone: str) -> float:
    """Return the egress of the cheaper way for the whole gang, USD."""
    disks, bucket = by_disks(draft, zone), by_bucket(draft, zone)
    return min(disks.usd, bucket.usd) if bucket is not None else disks.usd


def learn(draft: Draft, took: MoveTime) -> None:
    others = (one for one in draft.record.move_times if one.bucket is not took.bucket)
    draft.set(move_times=(*others, took))


def disk_gb(draft: Draft) -> float:
    """Return the GB that a copy of a node's disk transfers: as in the last move, else as reported, else all of it."""
    moved, progress, spec = draft.record.moved, draft.snapshot.progress, draft.snapshot.spec
    if moved is not None and moved.gb > 0:
        return moved.gb
    if progress is not None and progress.disk_bytes:
        return progress.disk_bytes / GB
    named = spec.pool_names() if spec is not None else ()
    sizes = (pool.disk_gb for pool in draft.snapshot.stack.pools if not named or pool.name in named)
    return float(max(sizes, default=0))


def _worth(price: WayCost, usd_hour: float) -> float:
    return price.usd + (price.s or 0.0) / HOUR_S * usd_hour


def _measured(draft: Draft, *, bucket: bool) -> float | None:
    return next((one.s for one in draft.record.move_times if one.bucket is bucket), None)
