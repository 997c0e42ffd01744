"""Calls, made only by a pass with nothing to write, from the record it read. In any order; all repeatable.

Delete a machine whose attempt is at most ``top`` and that is neither cur nor next, or that bears their
attempt with another unique id; by unique id (rules 4 to 6). A disk goes to cur only, and only when nobody
holds it: the attachment is the mutex.
"""

from __future__ import annotations

from collections.abc import Iterator

from spotkeeper.reconcile.decide import fuses, grants, mirrors, sizes
from spotkeeper.reconcile.decide.draft import Draft
from spotkeeper.reconcile.decide.seen import admitted
from spotkeeper.spec.cloud import (
    Action,
    AttachDisk,
    CreateDisk,
    CreateSnapshot,
    DeleteDisk,
    DeleteSnapshot,
    DeleteVm,
    DetachDisk,
    Disk,
    InsertVm,
    Vm,
    VmStatus,
)
from spotkeeper.spec.facts import Fact, Kind
from spotkeeper.spec.record import Phase, Rank, Slot, SlotState


def plan(draft: Draft) -> tuple[Action, ...]:
    actions = [*_delete_vms(draft)]
    for index, rank in enumerate(draft.ranks):
        actions += _rank_disk(draft, index, rank)
        for slot in (rank.cur, rank.next):
            if slot is not None:
                actions += _insert(draft, index, slot)
    actions += _copies(draft)
    actions += _delete_disks(draft)
    actions += _delete_snapshots(draft)
    return tuple(actions)


# -- machines


def _delete_vms(draft: Draft) -> Iterator[Action]:
    for (index, attempt), vms in draft.view.vms.items():
        for vm in vms:
            if _superfluous(draft, index, attempt, vm):
                yield from _let_go(draft, index, attempt, vm)


def _superfluous(draft: Draft, index: int, attempt: int, vm: Vm) -> bool:
    if draft.record.phase in (Phase.END, Phase.DONE):
        return True
    if index >= len(draft.ranks):
        return True
    for slot in grants.live_slots(draft.ranks, index):
        if slot.attempt == attempt:
            return vm.zone != slot.zone or (slot.uid is not None and vm.uid != slot.uid)
    return attempt <= draft.ranks[index].top


def _let_go(draft: Draft, index: int, attempt: int, vm: Vm) -> Iterator[Action]:
    """Detach early from one that says it has unmounted; give one that is asked to a moment to say so."""
    if vm.status is VmStatus.STOPPING:
        return
    rank = draft.ranks[index] if index < len(draft.ranks) else Rank()
    disk = draft.view.disk_name(index, rank.disk)
    if rank.cur is not None and disk in vm.disks and vm.status is VmStatus.RUNNING and vm.zone == rank.cur.zone:
        freed = [f for f in draft.view.facts.get((index, attempt), ()) if f.kind is Kind.FREED and f.uid == vm.uid]
        if any(fact.value == str(rank.disk) for fact in freed):
            yield DetachDisk(disk, vm.name, vm.uid, vm.zone)
            return
        if waits_for_disk(rank) and draft.now < rank.cur.since + draft.times.free_s:
            return
    yield DeleteVm(vm.name, vm.uid, vm.zone)


def waits_for_disk(rank: Rank) -> bool:
    """A planned hand-over: the successor stood by, so the old machine is there to unmount."""
    cur = rank.cur
    return cur is not None and admitted(cur) and (cur.cause or "").startswith(("notice", "swap"))


def _insert(draft: Draft, index: int, slot: Slot) -> Iterator[Action]:
    """Repeat the intent as it is (rule 8); its key makes the repetition harmless."""
    if slot.state is not SlotState.INTENT or slot.node is not None or draft.seen.draining:
        return
    if slot.zone not in draft.view.answered or draft.view.vm(index, slot) is not None:
        return
    record = draft.record
    yield InsertVm(record.job, record.uid, index, slot.attempt, slot.pool, slot.zone, slot.model)


# -- the rank's disk


def _rank_disk(draft: Draft, index: int, rank: Rank) -> Iterator[Action]:
    """Create it where the machine runs (a stockout lists a machine for seconds), attach it when it is free."""
    cur = rank.cur
    if cur is None or cur.node is not None or cur.zone not in draft.view.answered:
        return
    vm = draft.view.vm(index, cur)
    if vm is None or vm.status is not VmStatus.RUNNING:
        return
    disk = draft.view.disk(index, rank.disk, cur.zone)
    record = draft.record
    if disk is None:
        if not _held_elsewhere(draft, index, rank):
            yield CreateDisk(record.job, record.uid, index, rank.disk, cur.pool, cur.zone)
    elif admitted(cur) and disk.ready and not disk.users:
        yield AttachDisk(disk.name, vm.name, vm.uid, cur.zone)


def _held_elsewhere(draft: Draft, index: int, rank: Rank) -> bool:
    """The disk exists in another zone: a blank twin here would pass for it."""
    return bool(draft.view.disks.get((index, rank.disk)))


# -- a zone move's copies


def _copies(draft: Draft) -> Iterator[Action]:
    move, record = draft.record.move, draft.record
    if move is None or not {move.zone, record.zone} <= draft.view.answered:
        return
    for index, rank in enumerate(draft.ranks):
        if rank.cur is not None or rank.copy is None or draft.view.disk(index, rank.copy, move.zone) is not None:
            continue
        snapshot = draft.view.snapshots.get((index, rank.copy))  # of this move: an older one's is stale
        source = draft.view.disk(index, rank.disk, record.zone or "")
        if snapshot is None:
            here = [vm for vm in draft.view.vms_of(index) if vm.zone == record.zone]  # no other can have the disk
            if source is not None and not source.users and not here:
                yield CreateSnapshot(record.job, record.uid, index, rank.disk, source.zone, rank.copy)
        elif snapshot.ready:
            pool = _pool(draft, move.zone)
            name = draft.view.disk_name(index, rank.copy)
            yield CreateDisk(record.job, record.uid, index, rank.copy, pool, move.zone, snapshot=name)


def _pool(draft: Draft, zone: str) -> str:
    """A pool of the target zone, for the size and type of the disk."""
    allowed = draft.seen.spec.pools if draft.seen.spec else ()
    fitting = [p for p in draft.seen.stack.pools if zone in p.zones and p.kind == "spot"]
    return next((p.name for p in fitting if not allowed or p.name in allowed), fitting[0].name if fitting else "")


# -- what is left over


def _delete_disks(draft: Draft) -> Iterator[Action]:
    for (index, number), disks in draft.view.disks.items():
        for disk in disks:
            if not disk.users and disk.zone in draft.view.answered and _disk_over(draft, index, number, disk):
                yield DeleteDisk(disk.name, disk.zone)


def _disk_over(draft: Draft, index: int, number: int, disk: Disk) -> bool:
    """Not the rank's, not the move's, numbered at most disk_top, and the rank trains again without it."""
    record = draft.record
    if record.phase in (Phase.END, Phase.DONE):
        return not record.keep_disks and not draft.view.vms_of(index)
    if index >= len(draft.ranks):
        return False
    rank = draft.ranks[index]
    if number in (rank.disk, rank.copy):
        stray = number == rank.disk and rank.cur is not None and rank.cur.node is None and disk.zone != rank.cur.zone
        return stray and _settled(draft, rank)
    return number <= rank.disk_top and (_settled(draft, rank) or sizes.left(draft, index))


def _settled(draft: Draft, rank: Rank) -> bool:
    """cur is a member with its disk (or will never need one), so nothing older is needed."""
    return rank.cur is not None and rank.cur.state is SlotState.MEMBER and rank.cur.disk and not draft.record.move


def _delete_snapshots(draft: Draft) -> Iterator[Action]:
    """A snapshot serves one move; it goes when its copy is there or nobody wants it."""
    record = draft.record
    for (index, number), snapshot in draft.view.snapshots.items():
        rank = draft.ranks[index] if index < len(draft.ranks) else Rank()
        serving = record.move is not None and number == rank.copy and record.phase in (Phase.RUN, Phase.HOLD)
        if not serving:
            yield DeleteSnapshot(snapshot.name)


# -- facts of attempts that are over


def stale(draft: Draft) -> tuple[Fact, ...]:
    """Facts of dropped attempts, but for those that still have a word to say (freed, dropped)."""
    if draft.seen.blind:  # a static node's word may be all that can release its grant
        return ()
    out = []
    granted = {(grant.rank, grant.attempt) for grant in draft.view.own_grants()}
    for (index, attempt), facts in draft.view.facts.items():
        if any(slot.attempt == attempt for slot in grants.live_slots(draft.ranks, index)):
            continue
        if index < len(draft.ranks) and attempt > draft.ranks[index].top:
            continue
        if (index, attempt) in granted or draft.view.vms.get((index, attempt)):
            continue
        out += facts
    return tuple(dict.fromkeys((*out, *mirrors.stale(draft))))


# -- when to look again


def due(draft: Draft, actions: tuple[Action, ...]) -> float | None:
    """When time alone would change the decision; for agents that ask before the tick does."""
    record, times, now = draft.record, draft.times, draft.now
    at: list[float] = []
    if actions or _unsettled(draft):
        at.append(now + times.soon_s)
    if record.phase is Phase.HOLD:
        at += [moment for moment in (record.hold_until, record.hold_ends) if moment is not None]
    if record.phase is Phase.RUN:
        at += _timers(draft)
        at += fuses.due(draft)
    return min(at, default=None)


def _timers(draft: Draft) -> Iterator[float]:
    record, times = draft.record, draft.times
    if record.stop_deadline is not None and record.stop_deadline > draft.now:
        yield record.stop_deadline
    if record.roll is not None:
        yield record.roll.since + times.roll_s
    if record.dry_since is not None:
        yield max(record.dry_since + times.dry_s, draft.now + times.soon_s)
    if record.bout_until > draft.now:
        yield record.bout_until
    for rank in draft.ranks:
        if rank.cur is None and rank.refused_at:
            yield max(rank.refused_at + times.cold_s, draft.now + times.soon_s)
        for slot in (rank.cur, rank.next):
            if slot is not None and slot.state is SlotState.INTENT:
                yield slot.since + draft.view.boot_s
        for goes in (rank.cur.notice, rank.cur.ends) if rank.cur is not None and not record.stop else ():
            if goes is not None:
                yield max(goes - draft.save_s() - times.margin_s, draft.now + times.soon_s)


def _unsettled(draft: Draft) -> bool:
    """Something is under way in the cloud whose end nobody reports."""
    record = draft.record
    if record.phase in (Phase.END, Phase.HOLD):
        return bool(draft.view.vms)
    if record.phase is not Phase.RUN:
        return False
    if record.move is not None:
        return True
    return any(_awaited(draft, index, rank) for index, rank in enumerate(draft.ranks))


def _awaited(draft: Draft, index: int, rank: Rank) -> bool:
    """A disk on its way to cur, or a hello of a machine that is not listed yet."""
    for slot in (rank.cur, rank.next):
        if slot is not None and slot.state is SlotState.INTENT:
            said = draft.view.facts.get((index, slot.attempt), ())
            if any(fact.kind is Kind.HELLO for fact in said):
                return True
    return rank.cur is not None and admitted(rank.cur) and not draft.view.attached(index, rank.disk, rank.cur)
