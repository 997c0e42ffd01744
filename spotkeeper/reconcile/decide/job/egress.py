"""Counts what transfers between regions cost: of a gang's disks when it moves, and of its data when it comes there.

``usd`` estimates a transfer for the choice of machines, ``count`` logs those that happened: a disk was created from a
snapshot of another region, or the gang came to another region than the job's data (``data_gb``).
"""

from __future__ import annotations

from msgspec.structs import replace

from spotkeeper.contract.ledger import Event
from spotkeeper.contract.stack import region_of
from spotkeeper.reconcile.decide.draft import Draft

GB = 1e9


def usd(draft: Draft, zone: str) -> float:
    """Return what coming to this zone costs, USD for each machine."""
    stack, record = draft.snapshot.stack, draft.record
    copied = 0.0
    if record.gen and record.zone is not None:
        copied = stack.egress_usd(region_of(record.zone), region_of(zone), disk_gb(draft))
    return copied + _data_usd(draft, region_of(zone)) / max(1, draft.size())


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


def _data_usd(draft: Draft, region: str) -> float:
    """Return what the whole job's data costs in this region, USD; 0 if the gang is in it already."""
    spec, stack, record = draft.snapshot.spec, draft.snapshot.stack, draft.record
    if (
        spec is None
        or not spec.data_gb
        or (record.gen and record.zone is not None and region_of(record.zone) == region)
    ):
        return 0.0
    return stack.egress_usd(spec.data_region or stack.region, region, spec.data_gb)


def count(draft: Draft) -> None:
    """Before a write of the record, log and add to the job's cost what has gone to another region since the last one.

    A move that was cancelled, or that the job did not survive, counts with the copies that it made.
    """
    record, before = draft.record, draft.before
    if not draft.snapshot.stack.regions:
        return
    if before.move is not None and record.move is None:
        _count_disks(draft)
    arrived = before.move is not None and record.zone == before.move.zone != before.zone
    if record.zone is None or not (arrived or (record.gen and not before.gen)):
        return
    source = before.zone if arrived and before.zone is not None else ""
    there = region_of(record.zone)
    spec, stack = draft.snapshot.spec, draft.snapshot.stack
    if spec is None or not spec.data_gb or region_of(source) == there:
        return
    origin = spec.data_region or stack.region
    if usd := stack.egress_usd(origin, there, spec.data_gb):
        charge(draft, f"data.v{before.ver + 1}", spec.data_gb, usd, cause="data", detail=f"{origin} -> {there}")


def _count_disks(draft: Draft) -> None:
    before, stack = draft.before, draft.snapshot.stack
    assert before.move is not None and before.zone is not None
    source, target = region_of(before.zone), region_of(before.move.zone)
    sizes = []
    for index, node in enumerate(before.nodes):
        if node.copy is None or draft.queries.disk(index, node.copy, before.move.zone) is None:
            continue
        snapshot = draft.queries.snapshots.get((index, node.copy))
        sizes.append(snapshot.gb if snapshot is not None else 0.0)
        gb = sizes[-1] or disk_gb(draft)
        if usd := stack.egress_usd(source, target, gb):
            key, way = f"r{index}.d{node.copy}", f"{source} -> {target}"
            charge(draft, key, gb, usd, node=index, cause="checkpoint", detail=way)
    if draft.record.moved is not None and draft.record.moved != before.moved:
        draft.set(moved=replace(draft.record.moved, gb=max(sizes, default=0.0)))


def charge(draft: Draft, key: str, gb: float, usd: float, *, node: int | None = None, cause: str, detail: str) -> None:
    """Log a transfer between regions, and add its price to what the job has spent."""
    draft.log(Event.EGRESS, key, node=node, cause=cause, detail=detail, gb=gb, usd=usd)
    limits = draft.record.limits
    draft.set(limits=replace(limits, spent=limits.spent + usd))
