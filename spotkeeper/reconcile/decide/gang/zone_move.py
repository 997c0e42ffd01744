"""Moves the whole gang to another zone: stops it, copies its disks by snapshots, and starts new attempts.

To another region its checkpoint may go by the bucket instead (``bucket_move``).

A gang moves because a user requests it, its zone has had no capacity for a time, or another zone is cheaper
(``zone_probe``). A disk is copied only when it is detached and both zones have answered. The disk number of a copy is
never used again, even if the move is cancelled. A move ends where it began if a copy is refused or the other zone falls
silent: the old disks are deleted only once the gang trains on the new ones.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from spotkeeper.contract.cloud import CreateDisk, CreateSnapshot, Offer
from spotkeeper.contract.job import pools_of
from spotkeeper.contract.ledger import Event
from spotkeeper.contract.record import Move, Moved, MoveTime, Node, Phase, SlotState, ZoneRequest
from spotkeeper.contract.stack import Model, region_of, within
from spotkeeper.reconcile.decide.checkpoint import location
from spotkeeper.reconcile.decide.draft import Draft
from spotkeeper.reconcile.decide.gang import bucket_move
from spotkeeper.reconcile.decide.job import progress, transfer
from spotkeeper.reconcile.decide.provisioning import offers
from spotkeeper.reconcile.decide.queue import takeover
from spotkeeper.reconcile.decide.snapshot import FINAL, admitted

TRIED_S = 1800.0  # for so long a zone that refused comes after one that did not
COPIES_S = 3600.0  # longest wait for the disk copies, while machines wait and cost money
BY_BUCKET = ", by a copy in the bucket"  # in the ledger
SILENT_S = 120.0  # a zone that has not answered for so long ends a move there: meanwhile nothing trains


def take(draft: Draft, zone: str | None) -> str:
    """Accept a request to move to a zone or region, or to cancel a move. Returns "" or in one line why it is refused.

    A gang with data moves once it has machines there (``zone_probe``).
    """
    record = draft.record
    if record.move is not None and zone in (None, record.move.origin or record.zone):
        cancel(draft)
        return ""
    if zone in (None, record.zone) and record.asked_zone is not None:
        _end(draft, "cancelled", record.asked_zone.zone)  # its probes are released, like those of no use
        return ""
    why = impossible(draft) or _wrong_zone(draft, zone)
    if why or zone is None:
        return why
    asked = ZoneRequest(zone, draft.now)
    if not record.gen:
        begin(draft, next(one for one in _zones(draft, zone) if one in draft.queries.answered), "asked")
        return ""
    nodes = (
        replace(node, refused=_others(node, asked), next=None if node.probing else node.next) for node in draft.nodes
    )
    draft.set(asked_zone=asked, nodes=tuple(nodes))
    return ""


def _others(node: Node, asked: ZoneRequest) -> tuple[str, ...]:
    """Return the refused offers of a node without those of the zone that a user requested: it is asked once more."""
    return tuple(key for key in node.refused if not asked.covers(key.split("/")[1]))


def refuse(draft: Draft, why: str) -> None:
    """End a user's move that has not begun; the gang stays where it is."""
    _end(draft, "refused", why)


def _end(draft: Draft, cause: str, detail: str) -> None:
    draft.set(asked_zone=None)
    draft.log(Event.MOVE, f"cancel.v{draft.before.ver + 1}", cause=cause, detail=detail[:200])


def impossible(draft: Draft) -> str:
    """Return why the gang cannot move at all; "" if it can."""
    spec, record = draft.snapshot.spec, draft.record
    if spec is None or spec.spread or record.zone is None:
        return "only a gang in one zone can move"
    if any(node.cur is not None and node.cur.model is Model.STATIC for node in draft.nodes):
        return "a static machine pins the gang to its zone"
    if record.phase is not Phase.RUN or record.pause:
        return "the job is on hold"
    if machine := location.pinned(draft):
        return f"the newest checkpoint is only on static machine {machine}, which cannot move"
    return f"the job is already moving to {record.move.zone}" if record.move is not None else ""


def _wrong_zone(draft: Draft, zone: str | None) -> str:
    if zone is not None and within(draft.record.zone or "", zone):
        return f"the job is in {draft.record.zone} already"
    found = [] if zone is None else _zones(draft, zone)
    if not found:
        return f"{zone} is not a zone of the job's pools ({', '.join(_zones(draft))})"
    if draft.queries.answered.isdisjoint(found):
        return f"the cloud does not answer for {zone}: request the move again later"
    return ""


def _zones(draft: Draft, place: str | None = None) -> list[str]:
    """Return the zones in which the job may buy machines; only those of ``place``, a zone or region, if it is given."""
    spec = draft.snapshot.spec
    pools = pools_of(spec, draft.snapshot.stack) if spec is not None else ()
    zones = {zone for pool in pools if pool.kind == "spot" for zone in pool.zones}
    return sorted(zone for zone in zones if place is None or within(zone, place))


def begin(draft: Draft, zone: str, cause: str, *, taken: bool = False) -> None:
    """Stop the gang for a move to ``zone``.

    ``taken``: if True, keep each node's ``next``: a probe, which runs in the new zone already and waits for its disk.
    """
    nodes = tuple(replace(node, next=node.next if taken else None, replace_reason=None) for node in draft.nodes)
    asked, bucket = draft.record.asked_zone, bucket_move.chosen(draft, zone)
    draft.set(
        move=Move(zone, draft.now, dry=cause == "stockout", bucket=bucket),
        asked_zone=None if asked is not None and asked.covers(zone) else asked,
        nodes=nodes,
        roll=None,
        dry_since=None,
    )
    draft.halt(draft.now + (draft.save_s() + draft.times.stop_s if draft.members() else 0.0), "move")
    draft.log(
        Event.MOVE, f"v{draft.before.ver + 1}", cause=cause, detail=f"{draft.record.zone} -> {zone}{BY_BUCKET * bucket}"
    )


def cancel(draft: Draft, cause: str = "cancelled", detail: str = "") -> None:
    """Cancel a move: the gang stays with its disks, and remaining members continue in a new generation.

    Machines in the other zone are dropped; otherwise a node with a notice would use one of them as its replacement.
    """
    if draft.record.move is not None and draft.record.move.origin:
        bucket_move.go_back(draft)
    nodes = tuple(replace(node, copy=None) for node in draft.nodes)
    draft.set(move=None, nodes=nodes)
    for index in range(len(draft.nodes)):
        draft.put(index, next=None)
    draft.log(Event.MOVE, f"cancel.v{draft.before.ver + 1}", cause=cause, detail=detail)


def step(draft: Draft) -> None:
    record = draft.record
    if record.phase is not Phase.RUN or record.pause:
        return
    if record.move is None:
        _dry(draft)
        return
    if (
        why := bucket_move.failed(draft) or _refused(draft) or _silent(draft)
    ):  # a retry gets the same answer, and nothing trains meanwhile
        cancel(draft, "refused", why[:200])
        return
    bucket_move.step(draft)
    if draft.record.move is None or draft.record.move.bucket:
        return
    for index, node in enumerate(draft.nodes):
        if node.cur is not None and (node.cur.state is not SlotState.MEMBER or draft.halted()):
            draft.vacate(index, "move")
    if any(node.cur is not None for node in draft.nodes) or not _both_answered(draft):
        return
    for index, node in enumerate(draft.nodes):
        if node.copy is None:
            draft.put(index, copy=node.disk_top + 1, disk_top=node.disk_top + 1)
    if all(copied(draft, index, node) for index, node in enumerate(draft.nodes)):
        _arrive(draft)


def _refused(draft: Draft) -> str:
    """Return why the move must end: copying a disk is refused, or takes too long while machines wait; "": go on.

    A gang that left a zone without capacity tries again for a time: staying gains little.
    """
    move = draft.record.move
    if move is None or move.bucket:
        return ""
    zone = move.zone
    waits = any(node.next is not None and node.next.zone == zone for node in draft.nodes)
    if waits and draft.now > move.since + COPIES_S:
        return f"the disks were not copied within {COPIES_S / 60:.0f} min"
    if move.dry and not waits and draft.now < move.since + draft.times.dry_s:
        return ""
    copies = {(index, node.copy) for index, node in enumerate(draft.nodes) if not copied(draft, index, node)}
    for told in draft.queries.results:
        action = told.action
        if told.kind not in FINAL or not isinstance(action, (CreateDisk, CreateSnapshot)):
            continue
        number = action.copy if isinstance(action, CreateSnapshot) else action.number
        made = draft.queries.disk(action.node, number, zone) or (
            isinstance(action, CreateSnapshot) and (action.node, number) in draft.queries.snapshots
        )
        if action.job == draft.record.job and (action.node, number) in copies and not made:
            return told.detail or told.kind.value
    return ""


def _silent(draft: Draft) -> str:
    """Note since when the move's zone does not answer; return why the move must end, or ""."""
    move, answered = draft.record.move, draft.queries.answered
    if move is None:
        return ""
    if move.zone in answered:
        if move.silent_since is not None:
            draft.set(move=replace(move, silent_since=None))
    elif (move.origin or draft.record.zone) not in answered:
        return ""  # the cloud answers for nothing
    elif move.silent_since is None:
        draft.set(move=replace(move, silent_since=draft.now))
    elif draft.now >= move.silent_since + SILENT_S:
        return f"{move.zone} has not answered for {SILENT_S / 60:.0f} min"
    return ""


def _both_answered(draft: Draft) -> bool:
    move = draft.record.move
    return move is not None and {move.zone, draft.record.zone} <= draft.queries.answered


def copied(draft: Draft, index: int, node: Node) -> bool:
    """Whether the node's disk has been copied, or the node has nothing to copy."""
    move = draft.record.move
    if move is None or node.copy is None:
        return False
    copy = draft.queries.disk(index, node.copy, move.zone)
    if copy is not None:
        return copy.ready
    return not draft.queries.disks.get((index, node.disk)) and (index, node.copy) not in draft.queries.snapshots


def _arrive(draft: Draft) -> None:
    move = draft.record.move
    assert move is not None
    nodes = tuple(
        replace(
            node,
            disk=node.copy if node.copy is not None else node.disk,
            copy=None,
            zone=move.zone,
            refused=(),
            warm=None,
            warms=0,
        )
        for node in draft.nodes
    )
    took = Moved(draft.now, max(0.0, draft.now - move.since))
    if region_of(move.zone) != region_of(draft.record.zone or move.zone):
        transfer.learn(draft, MoveTime(bucket=False, s=took.s))
    until = min(draft.record.fallback_until, draft.now)  # ends a fallback, which losses in the old zone had started
    draft.set(move=None, zone=move.zone, nodes=nodes, fallback_until=until, moved=took)
    for index, node in enumerate(draft.nodes):
        if node.next is not None and node.next.zone == move.zone:
            draft.promote(index, "move")
    draft.log(Event.MOVE, f"done.v{draft.before.ver + 1}", cause="move", detail=f"the disks are in {move.zone}")


def _dry(draft: Draft) -> None:
    """Leave a zone without capacity, if another zone has offers that fit the caps and are not cold.

    A zone is left once it has had no capacity for ``Times.dry_s``, or when it was removed from the job's pools.
    """
    record, spec = draft.record, draft.snapshot.spec
    vacant = [draft.nodes[index] for index in draft.filled() if draft.nodes[index].cur is None]
    if not vacant or record.dry_since is None or not record.gen or spec is None or spec.spread:
        return
    takes_over = takeover.under_way(draft.snapshot.allocation.claim(record.job), draft.now)
    if draft.snapshot.draining or draft.snapshot.blind or takes_over or any(node.probing for node in draft.nodes):
        return
    early = draft.now < record.dry_since + draft.times.dry_s and not offers.out_of_pools(draft)
    if early or progress.spot_wait_over(draft):  # then it goes on hold in this pass
        return
    if any(admitted(node.cur) and node.cur and node.cur.model is Model.STATIC for node in draft.nodes):
        return
    if location.pinned(draft) or (not record.stop and not location.costs_nothing(draft)):
        return
    found = [choice.offer for choice in offers.of_gang(draft, offers.gang_as_node(draft), None)]
    there = draft.queries.answered - {record.zone}
    zones = dict.fromkeys(offer.zone for offer in found if offer.zone in there)  # the best zone first
    for zone in sorted(zones, key=lambda zone: _reluctance(draft, zone, found)):
        warm = [offer for offer in found if offer.zone == zone and not offers.cold(draft, offer)]
        if offers.fits(draft, spec.size().min, warm, replaces=True):
            begin(draft, zone, "stockout")
            return


def _reluctance(draft: Draft, zone: str, found: Iterable[Offer]) -> tuple[bool, bool]:
    """Return the order in which a gang leaves a dry zone: for zones of its region, then others; tried ones come last.

    A zone was tried if the cloud refused each of its offers recently, or those of one pool of a mix: a gang must not go
    to and fro between dry zones. A copy of the disks to another region costs money.
    """
    refused: dict[str, bool] = {}  # whether all offers were, by the pool of a mix
    mix = draft.snapshot.spec is not None and bool(draft.snapshot.spec.machines)
    for offer in (offer for offer in found if offer.zone == zone):
        seen, pool = draft.queries.known(offer), offer.pool if mix else ""
        denied = seen is not None and seen.denied_within(TRIED_S, draft.now)
        refused[pool] = denied and refused.get(pool, True)
    return any(refused.values()), region_of(zone) != region_of(draft.record.zone or zone)
