"""Counts what transfers between regions cost: of a gang's disks, of its copies in the bucket, and of its data.

``usd`` estimates the transfer of a move for the choice of machines. Each transfer that happened is charged once:

* A copy of a disk, when a move ends, if the cloud shows that the other region has it. A copy that the cloud does not
  show yet, or whose region does not answer, is owed (``Record.owed``) until it does.
* A warm copy, once it is complete (``warm``). If a move or the job's end comes first, it is owed as well.
* A checkpoint's copy, when a machine abroad has uploaded it to the bucket or downloaded it, also for a move in vain.
* The job's data (``data_gb``), when the gang comes to another region than the data's.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from spotkeeper.contract.facts import BucketCopy
from spotkeeper.contract.ledger import Event
from spotkeeper.contract.record import Fetch, Owed, Slot
from spotkeeper.contract.stack import region_of
from spotkeeper.reconcile.decide.draft import Draft
from spotkeeper.reconcile.decide.job import transfer
from spotkeeper.reconcile.decide.job.transfer import GB

SEEN_S = 60.0  # a copy that the cloud does not show for so long was never made


def usd(draft: Draft, zone: str) -> float:
    """Return what coming to this zone costs, USD for each machine.

    A job with ``spread`` needs its data once in each region, so its first machine there pays for it.
    """
    record = draft.record
    copied = 0.0
    if record.gen and record.zone is not None:
        copied = transfer.usd(draft, zone) / max(1, draft.size())
    data = _data_usd(draft, region_of(zone))
    if draft.snapshot.spec is not None and draft.snapshot.spec.spread:
        return 0.0 if region_of(zone) in {region_of(slot.zone) for slot in _slots(draft)} else data
    return copied + data / max(1, draft.size())


def _slots(draft: Draft) -> list[Slot]:
    return [node.cur for node in draft.nodes if node.cur is not None]


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
        _owe_disks(draft)
    settle(draft)
    if before.fetch is not None:
        _from_bucket(draft, before.fetch)
    arrived = before.move is not None and record.zone == before.move.zone != before.zone
    if not (arrived or (record.gen and not before.gen)):
        return
    source = before.zone if arrived and before.zone is not None else ""
    spec, stack = draft.snapshot.spec, draft.snapshot.stack
    if spec is None or not spec.data_gb:
        return
    origin = spec.data_region or stack.region
    zones = [record.zone] if record.zone is not None else [slot.zone for slot in _slots(draft)]
    for there in sorted({region_of(zone) for zone in zones} - {region_of(source)}):
        if usd := stack.egress_usd(origin, there, spec.data_gb):
            key = f"data.{there}.v{before.ver + 1}" if spec.spread else f"data.v{before.ver + 1}"
            charge(draft, key, spec.data_gb, usd, cause="data", detail=f"{origin} -> {there}")


# -- copies of disks


def _owe_disks(draft: Draft) -> None:
    before = draft.before
    assert before.move is not None and before.zone is not None
    target, whole = region_of(before.move.zone), transfer.disk_gb(draft)
    sizes, copies = [0.0], []
    for index, node in enumerate(before.nodes):
        if node.copy is None:
            continue
        snapshot = draft.queries.snapshots.get((index, node.copy))
        sizes.append(snapshot.gb if snapshot is not None else 0.0)
        copies.append(Owed(index, node.copy, region_of(before.zone), target, draft.now, sizes[-1] or whole))
    owe(draft, copies)
    if draft.record.moved is not None and draft.record.moved != before.moved:
        draft.set(moved=replace(draft.record.moved, gb=max(sizes)))


def owe(draft: Draft, copies: Iterable[Owed]) -> None:
    """Add copies to those that are charged once the cloud shows them."""
    owed = tuple(one for one in copies if one.source != one.target)
    if owed:
        draft.set(owed=(*draft.record.owed, *owed))


def settle(draft: Draft) -> None:
    """Charge the copies owed that the cloud shows. Forget those that it does not show, and whose region answers."""
    left = [one for one in draft.record.owed if not _settled(draft, one)]
    if len(left) < len(draft.record.owed):
        draft.set(owed=tuple(left))


def _settled(draft: Draft, one: Owed) -> bool:
    stack, queries = draft.snapshot.stack, draft.queries
    snapshot = queries.snapshots.get((one.node, one.number))
    disks = queries.disks.get((one.node, one.number), ())
    stored = snapshot is not None and one.target in snapshot.regions
    if not stored and not any(region_of(disk.zone) == one.target for disk in disks):
        zones = {zone for zone in stack.zones() if region_of(zone) == one.target}
        return draft.now >= one.since + SEEN_S and zones <= queries.answered
    gb = snapshot.gb if snapshot is not None and snapshot.gb else one.gb
    if cost := stack.egress_usd(one.source, one.target, gb):
        key, cause = ("w", "warm copy") if one.warm else ("d", "checkpoint")
        detail = f"{one.source} -> {one.target}"
        charge(draft, f"r{one.node}.{key}{one.number}", gb, cost, node=one.node, cause=cause, detail=detail)
    return True


# -- copies in the bucket


def to_bucket(draft: Draft, sent: BucketCopy) -> None:
    """Charge the upload of a checkpoint's copy; the report of it is read once."""
    _through_bucket(draft, sent, draft.record.zone, f"up.{sent.commit}", out=True)


def _from_bucket(draft: Draft, fetch: Fetch) -> None:
    """Charge what machines have downloaded, once a generation begins, or the copy or the machine is given up."""
    record, before = draft.record, draft.before
    over = record.gen > before.gen or record.fetch is None or record.fetch.commit != fetch.commit
    for index in fetch.nodes:
        slot = before.nodes[index].cur if index < len(before.nodes) else None
        now = draft.nodes[index].cur if index < len(draft.nodes) else None
        if slot is None or (not over and now is not None and now.attempt == slot.attempt):
            continue
        if (told := draft.queries.fetched(index, slot, fetch.commit)) is not None:
            _through_bucket(draft, told, slot.zone, f"r{index}.a{slot.attempt}.{fetch.commit}", out=False)


def _through_bucket(draft: Draft, told: BucketCopy, zone: str | None, key: str, *, out: bool) -> None:
    stack = draft.snapshot.stack
    if not stack.regions or zone is None:
        return
    here, bucket = region_of(zone), stack.bucket_regions or stack.regions[:1]
    if here in bucket:
        return
    source, target = (here, bucket[0]) if out else (bucket[0], here)
    gb = told.bytes / GB
    if cost := stack.egress_usd(source, target, gb):
        charge(draft, key, gb, cost, cause="bucket", detail=f"{source} -> {target}")


def charge(draft: Draft, key: str, gb: float, usd: float, *, node: int | None = None, cause: str, detail: str) -> None:
    """Log a transfer between regions, and add its price to what the job has spent."""
    draft.log(Event.EGRESS, key, node=node, cause=cause, detail=detail, gb=gb, usd=usd)
    limits = draft.record.limits
    draft.set(limits=replace(limits, spent=limits.spent + usd))
