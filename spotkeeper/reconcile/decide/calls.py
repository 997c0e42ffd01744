"""Plans the calls to the cloud. Only a pass with nothing to write makes calls, and every call may be repeated.

A machine is deleted, by its unique id, if the record has given up its attempt (the number is at most ``Node.top``, and
neither ``cur`` nor ``next`` has it), or if the record names another machine for its attempt (rules 4 to 6 of
``docs/protocol.md``). A disk is attached only to ``cur``, and only while no other machine has it, so two machines never
write to it.
"""

from __future__ import annotations

from collections.abc import Iterator

from spotkeeper.contract.cloud import (
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
from spotkeeper.contract.facts import Fact, Kind
from spotkeeper.contract.record import Node, Phase, Slot, SlotState
from spotkeeper.reconcile.decide.checkpoint import mirrors, warm
from spotkeeper.reconcile.decide.draft import Draft
from spotkeeper.reconcile.decide.gang import resize, rungs
from spotkeeper.reconcile.decide.job import limits, progress
from spotkeeper.reconcile.decide.provisioning import replacement, reservations
from spotkeeper.reconcile.decide.snapshot import admitted

LARGE = 8  # nodes of a gang in which some operation is always unfinished, so that it is checked half as often


def plan(draft: Draft) -> tuple[Action, ...]:
    actions = [*_delete_vms(draft)]
    for index, node in enumerate(draft.nodes):
        actions += _node_disk(draft, index, node)
        for slot in (node.cur, node.next):
            if slot is not None:
                actions += _insert(draft, index, slot)
    actions += _copies(draft)
    actions += warm.wanted(draft)
    actions += _delete_disks(draft)
    actions += _delete_snapshots(draft)
    return tuple(actions)


# -- machines


def _delete_vms(draft: Draft) -> Iterator[Action]:
    for (index, attempt), vms in draft.queries.vms.items():
        for vm in vms:
            if _superfluous(draft, index, attempt, vm):
                yield from _let_go(draft, index, attempt, vm)


def _superfluous(draft: Draft, index: int, attempt: int, vm: Vm) -> bool:
    if draft.record.over:
        return True
    if index >= len(draft.nodes):
        return True
    for slot in reservations.live_slots(draft.nodes, index):
        if slot.attempt == attempt:
            return vm.zone != slot.zone or (slot.uid is not None and vm.uid != slot.uid)
    return attempt <= draft.nodes[index].top


def _let_go(draft: Draft, index: int, attempt: int, vm: Vm) -> Iterator[Action]:
    """Delete a superseded machine. In a planned replacement it first gets ``Times.free_s`` to unmount its disk."""
    if vm.status is VmStatus.STOPPING:
        return
    node = draft.nodes[index] if index < len(draft.nodes) else Node()
    disk = draft.queries.disk_name(index, node.disk)
    if node.cur is not None and disk in vm.disks and vm.status is VmStatus.RUNNING and vm.zone == node.cur.zone:
        freed = [f for f in draft.queries.facts.get((index, attempt), ()) if f.kind is Kind.FREED and f.uid == vm.uid]
        if any(fact.value == str(node.disk) for fact in freed):
            yield DetachDisk(disk, vm.name, vm.uid, vm.zone)
            return
        if waits_for_disk(node) and draft.now < node.cur.since + draft.times.free_s:
            return
    yield DeleteVm(vm.name, vm.uid, vm.zone)


def waits_for_disk(node: Node) -> bool:
    """Whether ``cur`` replaced a machine that still ran, and that therefore gets time to unmount the node's disk."""
    cur = node.cur
    return cur is not None and admitted(cur) and (cur.cause or "").startswith(("notice", "swap"))


def _insert(draft: Draft, index: int, slot: Slot) -> Iterator[Action]:
    """Insert the machine of an intent. Every round may repeat the call, with the same idempotency key.

    A repeated call is the same call, since the intent fixes zone, pool and model (rule 8 of ``docs/protocol.md``). An
    intent without a grant is skipped: a submitter wrote it, not a round, and it would bypass the stack's caps.
    """
    if slot.state is not SlotState.INTENT or slot.machine is not None or draft.snapshot.draining:
        return
    if slot.zone not in draft.queries.answered or draft.queries.vm(index, slot) is not None:
        return
    if draft.queries.grant(index, slot.attempt) is None and not draft.snapshot.blind:
        return
    record = draft.record
    yield InsertVm(record.job, record.uid, index, slot.attempt, slot.pool, slot.zone, slot.model, slot.reservation)


# -- the node's disk


def _node_disk(draft: Draft, index: int, node: Node) -> Iterator[Action]:
    """Create the node's disk in the zone in which its machine runs, and attach the disk when no machine has it.

    The disk is created only once the machine runs. In a zone without capacity a machine can be listed for seconds and
    then vanish. The node then gets a machine in another zone, which cannot use a disk of this zone.
    """
    cur = node.cur
    if cur is None or cur.machine is not None or cur.zone not in draft.queries.answered:
        return
    vm = draft.queries.vm(index, cur)
    if vm is None or vm.status is not VmStatus.RUNNING:
        return
    disk = draft.queries.disk(index, node.disk, cur.zone)
    record = draft.record
    if disk is None:
        if not draft.queries.disks.get((index, node.disk)):  # in another zone: a blank one would be taken for it
            yield CreateDisk(record.job, record.uid, index, node.disk, cur.pool, cur.zone, more_gb=_more_gb(draft))
    elif admitted(cur) and disk.ready and not disk.users:
        yield AttachDisk(disk.name, vm.name, vm.uid, cur.zone)


# -- a zone move's copies


def _copies(draft: Draft) -> Iterator[Action]:
    move, record = draft.record.move, draft.record
    if move is None or not {move.zone, record.zone} <= draft.queries.answered:
        return
    for index, node in enumerate(draft.nodes):
        if node.cur is not None or node.copy is None or draft.queries.disk(index, node.copy, move.zone) is not None:
            continue
        snapshot = draft.queries.snapshots.get((index, node.copy))  # the present move's; other snapshots are stale
        source = draft.queries.disk(index, node.disk, record.zone or "")
        if snapshot is None:
            here = [vm for vm in draft.queries.vms_of(index) if vm.zone == record.zone]  # these may use the disk
            if source is not None and not source.users and not here:
                where = warm.region_for(draft, move.zone)
                yield CreateSnapshot(record.job, record.uid, index, node.disk, source.zone, node.copy, where)
        elif snapshot.ready:
            pool = _pool(draft, index, move.zone)
            name = draft.queries.disk_name(index, node.copy)
            yield CreateDisk(
                record.job, record.uid, index, node.copy, pool, move.zone, snapshot=name, more_gb=_more_gb(draft)
            )


def _more_gb(draft: Draft) -> int:
    return draft.snapshot.spec.more_disk_gb() if draft.snapshot.spec is not None else 0


def _pool(draft: Draft, index: int, zone: str) -> str:
    """Return a spot pool of this zone, which determines the size and type of a node's disk; "" if none exists."""
    allowed = draft.snapshot.spec.pools if draft.snapshot.spec else ()
    allowed = (draft.pool(index),) if draft.pool(index) else allowed
    fitting = [p for p in draft.snapshot.stack.pools if zone in p.zones and p.kind == "spot"]
    return next((p.name for p in fitting if not allowed or p.name in allowed), fitting[0].name if fitting else "")


# -- what is left over


def _delete_disks(draft: Draft) -> Iterator[Action]:
    for (index, number), disks in draft.queries.disks.items():
        for disk in disks:
            if not disk.users and disk.zone in draft.queries.answered and _disk_over(draft, index, number, disk):
                yield DeleteDisk(disk.name, disk.zone)


def _disk_over(draft: Draft, index: int, number: int, disk: Disk) -> bool:
    """Whether a disk is obsolete: its number is at most ``disk_top``, and neither the node nor a move needs it."""
    record = draft.record
    if record.over:
        return not record.keep_disks and not draft.queries.vms_of(index)
    if index >= len(draft.nodes):
        return False
    node = draft.nodes[index]
    if number in (node.disk, node.copy):
        stray = number == node.disk and node.cur is not None and node.cur.machine is None and disk.zone != node.cur.zone
        return stray and _settled(draft, node)
    return number <= node.disk_top and (
        _settled(draft, node) or resize.left(draft, index) or rungs.gives_up_disks(draft)
    )


def _settled(draft: Draft, node: Node) -> bool:
    """Whether ``cur`` is a member with its disk, so that older disks are not needed."""
    return node.cur is not None and node.cur.state is SlotState.MEMBER and node.cur.disk and not draft.record.move


def _delete_snapshots(draft: Draft) -> Iterator[Action]:
    """Delete snapshots that the present move, if any, does not need: each snapshot serves only one move."""
    record = draft.record
    for (index, number), snapshot in draft.queries.snapshots.items():
        node = draft.nodes[index] if index < len(draft.nodes) else Node()
        serving = record.move is not None and number == node.copy and not record.over
        if not serving and not warm.kept(draft, index, number):
            yield DeleteSnapshot(snapshot.name)


# -- facts of attempts that are over


def stale(draft: Draft) -> tuple[Fact, ...]:
    """Return facts to delete: the facts of attempts that are over and have neither machine nor grant left.

    All other attempts can still report FREED or DROPPED.
    """
    if draft.snapshot.blind:  # only a static machine's report can release its grant
        return ()
    out = []
    granted = {(grant.node, grant.attempt) for grant in draft.queries.own_grants()}
    for (index, attempt), facts in draft.queries.facts.items():
        if any(slot.attempt == attempt for slot in reservations.live_slots(draft.nodes, index)):
            continue
        if index < len(draft.nodes) and attempt > draft.nodes[index].top:
            continue
        if (index, attempt) in granted or draft.queries.vms.get((index, attempt)):
            continue
        out += facts
    return tuple(dict.fromkeys((*out, *mirrors.stale(draft))))


# -- when the next round is due


def due(draft: Draft, actions: tuple[Action, ...]) -> float | None:
    """Return when the decision can next change without new reports, virtual unix seconds; None: never."""
    record, times, now = draft.record, draft.times, draft.now
    at: list[float] = []
    if actions or _unsettled(draft):
        at.append(now + times.soon_s * (1 if len(draft.nodes) < LARGE else 2))
    if record.phase is Phase.HOLD:
        ends = record.hold_ends if record.hold_late is None else record.hold_late + times.sure_s
        at += [moment for moment in (record.hold_until, ends) if moment is not None]
    if record.phase is Phase.RUN:
        at += _timers(draft)
        at += limits.due(draft)
    return min(at, default=None)


def _timers(draft: Draft) -> Iterator[float]:
    record, times = draft.record, draft.times
    if record.stop_deadline is not None and record.stop_deadline > draft.now:
        yield record.stop_deadline
    if record.roll is not None:
        yield record.roll.since + times.roll(len(record.members))
    if record.dry_since is not None and any(draft.nodes[index].cur is None for index in draft.filled()):
        yield max(record.dry_since + times.dry_s, draft.now + times.soon_s)
    if record.fallback_until > draft.now:
        yield record.fallback_until
    if (ends := progress.spot_wait_ends(draft)) is not None:
        yield max(ends, draft.now + times.soon_s)
    yield from replacement.due(draft)
    for node in draft.nodes:
        if node.cur is None and node.refused_at:
            yield max(node.refused_at + times.cold_s, draft.now + times.soon_s)
        for slot in (node.cur, node.next):
            if slot is not None and slot.state is SlotState.INTENT:
                yield slot.since + draft.queries.boot_s
        for goes in (node.cur.notice, node.cur.ends) if node.cur is not None and not record.stop else ():
            if goes is not None:
                yield max(goes - draft.save_s() - times.margin_s, draft.now + times.soon_s)


def _unsettled(draft: Draft) -> bool:
    """Whether the cloud is carrying out an operation whose end no agent reports."""
    record = draft.record
    if record.phase in (Phase.END, Phase.HOLD):
        return bool(draft.queries.vms)
    if record.phase is not Phase.RUN:
        return False
    if record.move is not None:
        return True
    return any(_awaited(draft, index, node) for index, node in enumerate(draft.nodes))


def _awaited(draft: Draft, index: int, node: Node) -> bool:
    """Whether the node's ``cur`` has no disk yet, or a machine of the node has said hello and is not admitted yet."""
    for slot in (node.cur, node.next):
        if slot is not None and slot.state is SlotState.INTENT:
            said = draft.queries.facts.get((index, slot.attempt), ())
            if any(fact.kind is Kind.HELLO for fact in said):
                return True
    return node.cur is not None and admitted(node.cur) and not draft.queries.attached(index, node.disk, node.cur)
