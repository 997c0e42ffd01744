"""Moves a gang to another region by its checkpoint's copy in the bucket, if that is cheaper than copies of its disks.

The stopped gang uploads its last checkpoint. Once the copy is complete, the gang gets blank disks in the new zone, and
its machines there download the checkpoint (``checkpoint/mirrors.py``). Until they train, the old disks stay, and the
record has their numbers (``Move.left``): a move that fails ends on them, as if nothing had been. If the copy does not
get complete, the disks are copied by snapshots instead.
"""

from __future__ import annotations

from msgspec.structs import replace

from spotkeeper.contract.ledger import Event
from spotkeeper.contract.record import LeftDisk, Moved, MoveTime
from spotkeeper.contract.stack import region_of
from spotkeeper.reconcile.decide.checkpoint import location
from spotkeeper.reconcile.decide.draft import Draft
from spotkeeper.reconcile.decide.job import transfer
from spotkeeper.reconcile.decide.provisioning import replacement

AWAY_S = 3600.0  # longest time from the stop to the first generation in the new zone
UPLOAD_S = 900.0  # longest wait for the copy, while machines in both zones cost money


def chosen(draft: Draft, zone: str) -> bool:
    """Whether a move that begins goes by the bucket: all nodes train, with a disk, and will live to upload it."""
    members = draft.members()
    if len(members) < draft.size() or not all(slot.disk and slot.machine is None for _, slot in members):
        return False
    stays = not draft.record.stop and not any(replacement.goes(slot) for _, slot in members)
    return stays and transfer.prefers_bucket(draft, zone)


def step(draft: Draft) -> None:
    """Wait for the copy, then leave; or go on by snapshots if a machine that uploads is lost, or takes too long."""
    move, record = draft.record.move, draft.record
    if move is None or not move.bucket or move.origin or not draft.halted():
        return
    members = draft.members()
    if len(members) < len(record.members) or not all(
        draft.queries.ended(index, slot, record.gen) for index, slot in members
    ):
        _by_disks(draft, "a machine was lost before its copy in the bucket was complete")
    elif location.covered(draft):
        if move.zone in draft.queries.answered:
            _leave(draft)
    elif draft.now >= move.since + UPLOAD_S:
        transfer.learn(draft, MoveTime(bucket=True, s=UPLOAD_S))
        _by_disks(draft, f"the copy in the bucket was not complete within {UPLOAD_S / 60:.0f} min")


def _by_disks(draft: Draft, why: str) -> None:
    move = draft.record.move
    assert move is not None
    draft.set(move=replace(move, bucket=False, since=draft.now))  # how long disks take is measured from here
    draft.log(Event.MOVE, f"disks.v{draft.before.ver + 1}", cause="snapshots", detail=f"{why}: the disks are copied")


def _leave(draft: Draft) -> None:
    """Give each node a blank disk in the new zone, and the machine that waits for it there."""
    record, move = draft.record, draft.record.move
    assert move is not None and record.zone is not None
    left = tuple(LeftDisk(n.disk, n.machine, n.wrote, n.newest_generation) for n in draft.nodes)
    draft.set(
        move=replace(move, origin=record.zone, left=left),
        zone=move.zone,
        fallback_until=min(record.fallback_until, draft.now),
        dry_since=None,
    )
    for index, node in enumerate(draft.nodes):
        if node.cur is not None:
            draft.vacate(index, "move")
        draft.new_disk(index)
        draft.put(index, zone=move.zone, refused=())
        if node.next is not None and node.next.zone == move.zone:
            draft.promote(index, "move")


def failed(draft: Draft) -> str:
    """Return why a gang that has left must go back; "": it need not, or has not left."""
    move, record = draft.record.move, draft.record
    if move is None or not move.origin:
        return ""
    if not location.covered(draft) and location.lacks(draft, draft.filled()):
        return "the checkpoint's copy in the bucket cannot be had"
    vacant = any(draft.nodes[index].cur is None for index in draft.filled())
    if vacant and record.dry_since is not None and draft.now >= record.dry_since + draft.times.dry_s:
        return f"{move.zone} has no capacity"
    return f"the gang did not train there within {AWAY_S / 60:.0f} min" if draft.now >= move.since + AWAY_S else ""


def go_back(draft: Draft) -> None:
    """Return the gang to the zone and the disks that it has left. Its machines are released."""
    move = draft.record.move
    assert move is not None and move.origin
    for index, old in enumerate(move.left):
        if draft.nodes[index].cur is not None:
            draft.vacate(index, "move")
        draft.put(
            index,
            disk=old.disk,
            machine=old.machine,
            wrote=old.wrote,
            newest_generation=old.newest_generation,
            zone=move.origin,
            refused=(),
        )
    draft.set(zone=move.origin, fetch=None, dry_since=None)


def end(draft: Draft) -> None:
    """End the move, once the gang trains in the new zone."""
    move, moved = draft.record.move, draft.record.moved
    if move is None:
        return
    for index in range(len(draft.nodes)):
        draft.put(index, warm=None, warms=0)  # copies of the old disks
    took = max(0.0, draft.now - move.since)
    draft.set(move=None, moved=Moved(draft.now, took, moved.gb if moved is not None else 0.0))
    transfer.learn(draft, MoveTime(bucket=True, s=took))
    detail = f"the checkpoint is in {region_of(move.zone)}, by its copy in the bucket"
    draft.log(Event.MOVE, f"done.v{draft.before.ver + 1}", cause="move", detail=detail)
