"""Make before break: requests a ``next`` beside each machine that will go, should be replaced, or boots slowly.

**Replacement.** A node whose machine has a notice, a planned end or a replacement reason gets a ``next`` in its zone
at once. The gang saves and stops when these new machines stand by, or when the time left is the measured time of a save
plus a margin. Then one write promotes them.

**Backup**, as in a hedged request:

=============== ================ =======================================================================
cur             next             then
=============== ================ =======================================================================
INTENT, slow    none             ``next`` becomes an intent for the same zone and machine type
INTENT          ADMITTED         ``next`` is promoted; the slow machine, no member yet, is deleted
ADMITTED        any              ``next`` is dropped, and deleted
dead or refused any              ``next`` takes over in the state it is in (``slots.replace_cur``)
=============== ================ =======================================================================

Neither machine is a member yet, so deleting the one that boots later loses no work. A backup needs its grant and counts
as a launch; half of the hour's launches are reserved for losses.

A boot is slow once it takes longer than the slowest boot in 95 % of the starts of whole gangs of this size.
``_usual_s`` computes this limit from the boots of single machines that were observed in the pool. (A machine given up
because its backup was up first counts with the time that it had booted.) If only 3 to 9 boots were observed, 1.5 times
the slowest of them replaces the 95th percentile of single boots. With fewer, only the boot deadline counts.

A boot is hopeless once it takes 1.5 times as long as a slow boot: its backup may use the launches reserved for losses.
If the caps have no room for a backup, the hopeless machine itself is given up, and another one gets its place.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import log

from spotkeeper.contract.cloud import Offer
from spotkeeper.contract.record import BACKUP, Node, Slot, SlotState
from spotkeeper.contract.stack import Model
from spotkeeper.reconcile.decide.checkpoint import location
from spotkeeper.reconcile.decide.draft import Draft
from spotkeeper.reconcile.decide.job import limits
from spotkeeper.reconcile.decide.provisioning import machine_health, offers, reservations, slots
from spotkeeper.reconcile.decide.snapshot import admitted

HOPELESS = 1.5  # times a slow boot
NOTICES_S = 5.0  # within which all machines of a gang get their notices, if they all go
VOLUNTARY = ("spot", "on-demand", machine_health.STRAGGLER)  # replacement reasons that no user requested


def step(draft: Draft) -> None:
    draft.back_on_spot()
    if location.costs_nothing(draft):
        machine_health.swap_straggler(draft, calm=not any(needed(node) or node.probing for node in draft.nodes))
        _back_to_spot(draft)
    elif not draft.record.stop:
        for index, node in enumerate(draft.nodes):
            if node.replace_reason in VOLUNTARY:
                draft.put(index, replace_reason=None)
    for index, node in enumerate(draft.nodes):
        if node.next is not None and not _serves(draft, node):
            slots.drop_next(draft, index)
    if draft.record.pause or draft.record.move is not None:
        return
    _stop(draft)
    _promote(draft)
    probed = {grant.node for grant in draft.wanted}
    for index in draft.filled():
        node = draft.nodes[index]
        if needed(node) and node.next is None and index not in probed and not _holds_back(draft, node):
            reservations.fill(draft, index, "next")
    _back_up(draft)


def _holds_back(draft: Draft, node: Node) -> bool:
    """Whether a node that was refused spot waits before it requests something else.

    A gang with several regions that loses all machines goes where spot is (``zone_probe.seek``), if its own zone
    refuses all nodes. So a node waits for the others' notices, and for the answers to their requests for spot.
    """
    spec, nodes = draft.snapshot.spec, [(index, draft.nodes[index]) for index in draft.filled()]
    if spec is None or len(spec.regions) < 2 or len(nodes) < 2 or not node.refused:
        return False
    if not all(each.cur is not None and goes(each.cur) for _, each in nodes):
        return draft.now < node.refused_at + NOTICES_S
    asked = [(index, each.next) for index, each in nodes if each.next is not None]
    return any(slot.state is SlotState.INTENT and draft.queries.vm(index, slot) is None for index, slot in asked)


def _serves(draft: Draft, node: Node) -> bool:
    """Whether this node's ``next`` is still needed: as replacement, probe or backup, or in the zone of a move."""
    move, following = draft.record.move, node.next
    moves_there = following is not None and move is not None and following.zone == move.zone
    return needed(node) or node.probing or backed(node) or moves_there


def needed(node: Node) -> bool:
    """Whether to replace the node's admitted machine: it has a notice, a planned end or a replacement reason."""
    cur = node.cur
    return cur is not None and (node.replace_reason is not None or goes(cur)) and admitted(cur)  # rarest first


def goes(slot: Slot) -> bool:
    """Whether a slot's machine will go soon: it has a notice or a planned end."""
    return slot.notice is not None or slot.ends is not None


def _back_to_spot(draft: Draft) -> None:
    """After an on-demand fallback, request replacements of on-demand machines.

    A machine is replaced if its zone has a better spot offer that is not cold, an idle static machine, or idle
    reserved capacity.
    """
    record, spec = draft.record, draft.snapshot.spec
    if record.stop or not record.gen or spec is None or spec.policy not in ("balanced", "spot", "shuffle"):
        return
    if draft.now < record.fallback_until or draft.now < record.gen_since + draft.times.settle_s or record.roll:
        return
    if record.pause or record.move or any(needed(node) or node.probing for node in draft.nodes):
        return
    for index, node in enumerate(draft.nodes):
        if node.cur is None or node.cur.model is not Model.ON_DEMAND:
            continue
        if any(find(draft, index) for find in (offers.idle_reservation, offers.warm_spot, offers.idle_machine)):
            draft.put(index, replace_reason="spot", refused=())


def _stop(draft: Draft) -> None:
    record = draft.record
    if not record.gen:
        return
    needs = [node for node in draft.nodes if needed(node)]
    deadlines = [at for node in needs if (at := _deadline(draft, node)) is not None]
    if record.stop:
        if deadlines:  # a stop without a deadline gets one now
            draft.halt(max(draft.now, min(deadlines)), "notice")
        return
    stand_by = [node for node in needs if not node.probing]
    standing = [node for node in stand_by if node.next is not None and node.next.state is SlotState.ADMITTED]
    to_come = [node for node in needs if node.cur is not None and goes(node.cur) and not node.refused]
    waiting = [node for node in needs if node not in standing and (node.next is not None or node in to_come)]
    urgent = bool(deadlines) and draft.now >= machine_health.urgent(draft, min(deadlines))
    if not urgent and (not standing or waiting):
        return
    limit = draft.now + draft.save_s() + draft.times.stop_s
    cut = any(node.cur is not None and node.cur.cut for node in needs)
    draft.halt(max(draft.now, min([*deadlines, limit])), "loss" if cut else _why(needs, bool(deadlines)))


def _why(needs: list[Node], pressed: bool) -> str:
    """Return why a gang stops, for the ledger.

    ``needs``: the nodes whose machines are replaced; ``pressed``: whether one of these machines has a notice.
    """
    if all(node.cur is not None and machine_health.planned(node.cur) for node in needs):
        return machine_health.PLANNED_END
    return "notice" if pressed else "swap"


def _deadline(draft: Draft, node: Node) -> float | None:
    """Return the deadline of the node's notice; None without a notice, or if the machine has long outlived it.

    Such a machine is replaced all the same, but its old deadline must not stop the gang in every pass.
    """
    notice = None if node.cur is None else node.cur.notice
    return None if notice is None or draft.now >= notice + draft.times.stop_s else notice


def _promote(draft: Draft) -> None:
    """Promote each admitted ``next`` if its ``cur`` does not train: it is not a member, or has saved and stopped."""
    halted = draft.record.stop and draft.halted()
    for index, node in enumerate(draft.nodes):
        following = node.next
        if node.probing:  # in another zone, perhaps, where the gang goes only as a whole
            continue
        if following is None or following.state is not SlotState.ADMITTED or node.cur is None:
            continue
        if backed(node):
            slots.overtaken(draft, index, node.cur)
            continue
        if not needed(node) or (node.cur.state is SlotState.MEMBER and not halted):
            continue
        if location.may_follow(draft, index, following.machine):
            draft.promote(index, following.cause or "notice")
        else:  # ``next`` cannot have the checkpoint saved meanwhile
            slots.drop_next(draft, index)


# -- backups


def backed(node: Node) -> bool:
    """Whether ``next`` is a backup of ``cur``: both boot, and the first to be up takes the node."""
    cur, following = node.cur, node.next
    if cur is None or following is None or cur.state is not SlotState.INTENT:
        return False
    return following.cause == BACKUP and following.zone == cur.zone


def _back_up(draft: Draft) -> None:
    """Request a backup of every machine that boots slowly, if the gang waits only for boots."""
    vacant = any(draft.nodes[index].cur is None for index in draft.filled())
    if vacant or draft.now < draft.record.limits.closed_until:
        return
    boots = [(*boot, at) for boot in _booting(draft) if (at := _slow_and_hopeless_at(draft, *boot))]
    for index, slot, (slow_at, hopeless_at) in boots:
        hopeless = draft.now > hopeless_at and limits.node_spare(draft, index)
        if draft.now <= slow_at or limits.bars(draft, index) or not (hopeless or limits.spare(draft, [index])):
            continue
        options = offers.beside(draft, index)
        if hopeless and _no_room_for_backup(draft, slot, options):
            slots.give_up_boot(draft, index, f"{_told(draft, index)}; the caps have no room for a backup")
        else:
            reservations.backup(draft, index, options, _told(draft, index))


def _no_room_for_backup(draft: Draft, slow: Slot, options: list[Offer]) -> bool:
    """Whether the caps have no room for a backup of the machine in ``slow``.

    They must lack room for each of ``options``, and for another machine of the pool, zone and model of ``slow``, which
    ``options`` does not contain if the cloud refused it.
    """
    alike = Offer(slow.pool, slow.zone, slow.model, 0.0, reservation=slow.reservation)
    return not any(draft.tally.fits(draft.snapshot.stack, offer) for offer in (*options, alike))


def due(draft: Draft) -> Iterator[float]:
    """Yield when boots in progress will count as slow, then as hopeless, and waits for notices end, unix seconds."""
    held = (node for node in draft.nodes if needed(node) and node.next is None and _holds_back(draft, node))
    yield from (max(node.refused_at + NOTICES_S, draft.now + draft.times.soon_s) for node in held)
    for index, slot in _booting(draft):
        ats = _slow_and_hopeless_at(draft, index, slot) or ()
        yield from (at + draft.times.soon_s for at in ats if at >= draft.now)


def _booting(draft: Draft) -> Iterator[tuple[int, Slot]]:
    """Yield the listed dynamic machines that have sent no hello and have no backup, by node."""
    for index in draft.filled():
        node = draft.nodes[index]
        cur = node.cur
        if cur is None or cur.state is not SlotState.INTENT or cur.machine is not None or node.next is not None:
            continue
        if draft.queries.vm(index, cur) is not None:
            yield index, cur


def _slow_and_hopeless_at(draft: Draft, index: int, slot: Slot) -> tuple[float, float] | None:
    """Return when a boot counts as slow, then as hopeless, virtual unix seconds; None: too few boots are known."""
    usual, since = _usual_s(draft, slot.pool), _since(draft, index, slot)
    return None if usual is None else (since + usual, since + HOPELESS * usual)


def _since(draft: Draft, index: int, slot: Slot) -> float:
    vm = draft.queries.vm(index, slot)
    return slot.since if vm is None else vm.created or slot.since


def _usual_s(draft: Draft, pool: str) -> float | None:
    """Return the 95th percentile of the boot time of a gang's slowest machine, seconds; None: too few boots observed.

    If boot times have an exponential tail, the slowest of n machines has the 95th percentile p95 + ln(n) (p95 - median)
    / ln(10), with p95 and median of one machine's boot. Without this correction every start of a large gang would
    request backups.
    """
    seen = next((one for one in draft.snapshot.market if one.pool == pool and one.slow_boot_s is not None), None)
    if seen is None or seen.slow_boot_s is None or seen.boot_s is None:
        return None
    tail_s = (seen.slow_boot_s - seen.boot_s) / log(10)
    return seen.slow_boot_s + tail_s * log(draft.size())


def _told(draft: Draft, index: int) -> str:
    slot = draft.nodes[index].cur
    assert slot is not None
    age_s = draft.now - _since(draft, index, slot)
    usual_s = _usual_s(draft, slot.pool) or 0.0
    limit = f"judging by the pool's earlier boots, a boot counts as slow after {usual_s:.0f} s"
    return f"attempt {slot.attempt} has been booting for {age_s:.0f} s; {limit}"
