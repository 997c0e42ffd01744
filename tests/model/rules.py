"""The safety properties, S1 to S10, by name, as checks of single steps. They share no code with what they check.

``docs/protocol.md`` states them. S9 (a report changes its own node only) is held by ``agents``, which can do no more.
"""

from __future__ import annotations

from spotkeeper.contract.allocation import Allocation, Grant
from spotkeeper.contract.cloud import Action, DeleteVm, InsertVm, VmStatus
from spotkeeper.contract.facts import Kind
from spotkeeper.contract.record import Node, Outcome, Phase, Record, Slot, SlotState
from spotkeeper.contract.stack import StackState
from spotkeeper.reconcile.controller.steps import Pass
from tests.model.values import JOBS, PAST, Life, Sky, World, live_slots, slot_of

OVER = (Phase.END, Phase.DONE)


def change(old: Record, new: Record) -> str:
    """What a write changes, in words."""
    out = []
    if old.phase is not new.phase:
        out.append(f"{old.phase.value} -> {new.phase.value}")
    if old.gen != new.gen:
        out.append(f"generation {new.gen}")
    if old.stop != new.stop:
        out.append("save and stop" if new.stop else "stop is over")
    for index, (a, b) in enumerate(zip(old.nodes, new.nodes, strict=False)):
        for which in ("cur", "next"):
            before, after = _brief(getattr(a, which)), _brief(getattr(b, which))
            if before != after:
                out.append(f"node {index} {which} {before} -> {after}")
        if a.disk != b.disk:
            out.append(f"node {index} has disk {b.disk}")
    for what in ("roll", "move", "asked_zone", "zone", "requests_done", "dry_since", "pause"):
        if getattr(old, what) != getattr(new, what):
            out.append(what)
    return ", ".join(out) or "details"


def _brief(slot: Slot | None) -> str:
    return "none" if slot is None else f"{slot.state.value} {slot.attempt}" + (" under notice" if slot.notice else "")


def grants(allocation: Allocation) -> str:
    return ", ".join(f"{g.job[:1]}.r{g.node}.a{g.attempt}={g.resource}" for g in allocation.grants) or "none"


# -- of a record's change


def judged(at: Pass, new: Record | None) -> str:
    """What can be said of a change from what its round saw: was there a reason to give a member up?"""
    old = at.record
    if new is None or new.phase is not Phase.RUN:
        return "" if new is None else _ended(at, new)
    if why := _left_early(at, new):
        return why
    fixed = at.snapshot.spec is not None and at.snapshot.spec.size().min == len(new.nodes)
    if new.gen > old.gen and fixed and len(new.members) < len(new.nodes):
        return "S6: a generation that is not all of the job"
    for index, (before, after) in enumerate(zip(old.nodes, new.nodes, strict=False)):
        if why := _admitted(at, index, before, after):
            return why
        if before.cur is not None and before.cur.state is SlotState.MEMBER and _given_up(before, after):
            why = _reason(at, index, before, new)
            if why:
                return why
    return ""


def _left_early(at: Pass, new: Record) -> str:
    """Why a gang that trains must not be stopped for a move: what that costs, or machines there that do not stand by.

    Without room in the caps none can stand by. A user's move may cost what it will.
    """
    old, (pool, *_) = at.record, at.snapshot.stack.pools
    if new.move is None or old.move is not None or old.stop or not old.gen:
        return ""
    nodes = [new.nodes[index] for index in new.filled()]
    if at.snapshot.stack.egress and not new.move.dry and old.asked_zone is None:
        return "S8: pays more egress for a move than it saves"
    room = len(at.snapshot.allocation.grants) + len(nodes) <= pool.max_machines
    stand_by = all(node.next is not None and node.next.state is not SlotState.INTENT for node in nodes)
    return "S4: stops a gang for a move before its machines there stand by" if room and not stand_by else ""


def _admitted(at: Pass, index: int, before: Node, after: Node) -> str:
    """Whoever is admitted is listed as running, and has said hello from that boot."""
    known = {(s.attempt, s.uid, s.boot) for s in (before.cur, before.next) if s is not None}
    for slot in (after.cur, after.next):
        if slot is None or slot.state is SlotState.INTENT or (slot.attempt, slot.uid, slot.boot) in known:
            continue
        if slot.uid is None or slot.boot is None:
            return "S6: admits somebody without saying whom"
        if not any(vm.uid == slot.uid and vm.status is VmStatus.RUNNING for vm in at.snapshot.listing.vms):
            return "S6: admits a machine that is not listed as running"
        hello = (slot.uid, slot.boot, index, slot.attempt, Kind.HELLO)
        if not any((f.uid, f.boot, f.node, f.attempt, f.kind) == hello for f in at.snapshot.facts):
            return "S6: admits a machine that has not said hello"
    return ""


def _ended(at: Pass, new: Record) -> str:
    """A job may be called done, or succeeded, only for what was seen."""
    snapshot, old = at.snapshot, at.record
    if new.phase is Phase.DONE and old.phase is not Phase.DONE:
        if not set(snapshot.stack.zones()) <= snapshot.listing.answered:
            return "L2: done, though a zone did not answer"
        if any(vm.job == old.job for vm in snapshot.listing.vms):
            return "L2: done, while a machine is there"
    if new.outcome is Outcome.SUCCEEDED and old.outcome is None:
        for index in old.members:
            cur = old.nodes[index].cur
            said = [f for f in snapshot.facts if f.kind is Kind.EXIT and f.value == "0" and f.gen == old.gen]
            if cur is None or not any((f.node, f.uid) == (index, cur.uid) for f in said):
                return "S6: success without every member's word"
    return ""


def _given_up(before: Node, after: Node) -> bool:
    return after.cur is None or before.cur is None or after.cur.attempt != before.cur.attempt


def _reason(  # noqa: PLR0911
    at: Pass, index: int, before: Node, new: Record
) -> str:
    cur, old, snapshot, after = before.cur, at.record, at.snapshot, new.nodes[index]
    assert cur is not None
    said = [f for f in snapshot.facts if (f.node, f.attempt, f.uid, f.boot) == (index, cur.attempt, cur.uid, cur.boot)]
    listed = [vm for vm in snapshot.listing.vms if vm.uid == cur.uid and vm.zone == cur.zone]
    if cur.zone in snapshot.listing.answered and not any(vm.status is VmStatus.RUNNING for vm in listed):
        return ""
    if any(f.kind is Kind.DROPPED for f in said):
        return ""
    if any(f.kind is Kind.HELLO and f.uid == cur.uid and f.boot != cur.boot for f in snapshot.facts):
        return ""  # it has rebooted: its processes are gone
    if old.roll is not None and snapshot.times.roll_s < 0:
        here = any(f.kind is Kind.HERE and f.value.isdecimal() and int(f.value) >= old.roll.ver for f in said)
        return "S4: gives up a member that answered the roll call" if here else ""
    stopped = any(f.kind in (Kind.RELEASED, Kind.EXIT) and f.gen == old.gen for f in said)
    stopped = stopped or _broken(at)  # a gang that has lost one cannot save any more
    late = old.stop_deadline is not None and old.stop_deadline <= snapshot.now
    if not (stopped or (old.stop and late)):
        return "S4: gives up a member that has not saved and stopped"
    if any((old.move, new.move, old.pause, new.pause)) or index not in new.filled():
        return ""
    promoted = after.cur is not None and before.next is not None and after.cur.attempt == before.next.attempt
    if (
        not promoted or after.cur.state is SlotState.INTENT
    ):  # a static machine may be a member at once: S6 asks its hello
        return "S4: gives up a member before its successor stands by"
    return ""


def _broken(at: Pass) -> bool:
    """Whether a member's machine runs no more, as listed, or has rebooted: its processes are gone."""
    running = {vm.uid for vm in at.snapshot.listing.vms if vm.status is VmStatus.RUNNING}
    hellos = {(fact.node, fact.uid, fact.boot) for fact in at.snapshot.facts if fact.kind is Kind.HELLO}
    for index in at.record.members:
        slot = at.record.nodes[index].cur
        if slot is None or (slot.zone in at.snapshot.listing.answered and slot.uid not in running):
            return True
        if any((node, uid) == (index, slot.uid) and boot not in (slot.boot, *slot.past) for node, uid, boot in hellos):
            return True
    return False


def written(world: World, job: int, old: Record, new: Record) -> str:
    """A compare-and-swap of the record that was won."""
    return (
        _backwards(old, new)
        or _membership(world, job, old, new)
        or _unjust(world, job, old, new)
        or _bare(world, job, old, new)
    )


def _backwards(old: Record, new: Record) -> str:
    if new.gen < old.gen:
        return "S5: the generation goes back"
    if (old.phase in OVER and new.phase not in OVER) or (old.phase is Phase.DONE and new.phase is not Phase.DONE):
        return "S5: an ended job runs again"
    for before, after in zip(old.nodes, new.nodes, strict=False):
        if after.top < before.top or after.disk_top < before.disk_top:
            return "S5: a counter goes back"
    return ""


def _membership(world: World, job: int, old: Record, new: Record) -> str:
    if new.gen > old.gen + 1:
        return "S6: a generation is left out"
    if new.gen == old.gen and new.members != old.members:
        return "S6: members change within a generation"
    for index, after in enumerate(new.nodes):
        before = old.nodes[index].cur if index < len(old.nodes) else None
        cur = after.cur
        if cur is None or cur.state is not SlotState.MEMBER:
            continue
        same = before is not None and (before.attempt, before.uid, before.boot) == (cur.attempt, cur.uid, cur.boot)
        if new.gen == old.gen and not (same and before is not None and before.state is SlotState.MEMBER):
            return "S1: a member is made, or exchanged, without a new generation"
    return ""


def _unjust(world: World, job: int, old: Record, new: Record) -> str:
    """A member that is well is given up: what was seen is not what is there."""
    if new.phase is not Phase.RUN or old.roll is not None or any((old.move, new.move, old.pause, new.pause)):
        return ""
    for index in new.filled():  # the others are parked
        before, after = old.nodes[index], new.nodes[index]
        cur = before.cur
        if (
            cur is None
            or cur.state is not SlotState.MEMBER
            or not _given_up(before, after)
            or before.replace_reason is not None
        ):
            continue
        vm = None if cur.uid is None else world.sky.vm(cur.uid)
        warned = cur.notice is not None or any(
            f.kind is Kind.NOTICE and f.uid == cur.uid for f in world.papers[job].facts
        )
        warned = warned or cur.ends is not None
        if vm is not None and vm.life is Life.RUNNING and not vm.noticed and not warned:
            return f"S4: gives up the healthy member {vm.uid}"
    return ""


def _bare(world: World, job: int, old: Record, new: Record) -> str:
    """An intent needs its grant; a number is used once."""
    held = {(g.node, g.attempt) for g in world.allocation.grants if g.job == JOBS[job]}
    for index, node in enumerate(new.nodes):
        before = {s.attempt for s in live_slots(old, index)}
        for slot in live_slots(new, index):
            if slot.attempt in before:
                continue
            if (index, slot.attempt) not in held:
                return "S10: an intent without its grant"
            used = any(key[:3] == (job, index, slot.attempt) for key in world.sky.keys)
            if used or (index < len(old.nodes) and slot.attempt <= old.nodes[index].top):
                return "S5: the number of an attempt is used again"
        if node.next is not None and node.cur is not None and node.next.attempt == node.cur.attempt:
            return "S1: cur and next are one attempt"
    return ""


# -- of grants


def released(at: Pass, new: Allocation) -> str:
    """A grant may be released if its machine is not listed and every zone answered, or if it reported DROPPED."""
    kept = {(g.job, g.node, g.attempt) for g in new.grants}
    for grant in at.snapshot.allocation.grants:
        if (grant.job, grant.node, grant.attempt) in kept:
            continue
        if grant.job != at.record.job:
            return "S8: gives back another job's grant"
        if grant.resource.startswith("machine:"):
            word = (f for f in at.snapshot.facts if f.kind is Kind.DROPPED and f.attempt == grant.attempt)
            if not any(word):
                return "S8: takes a static machine back without its word for this attempt"
        elif not ({grant.zone} if grant.zone else set(at.snapshot.stack.zones())) <= at.snapshot.listing.answered:
            return "S8: gives a slot back though its zone did not answer"
        elif any((v.job, v.node, v.attempt) == (grant.job, grant.node, grant.attempt) for v in at.snapshot.listing.vms):
            return "S8: gives a slot back while its machine is there"
    return ""


def granted(world: World, new: Allocation, stack: StackState) -> str:
    """A compare-and-swap of the allocation that was won."""
    keys = [(g.job, g.node, g.attempt) for g in new.grants]
    if len(set(keys)) != len(keys):
        return "S8: a grant is doubled"
    for pool in stack.pools:
        taken = [g for g in new.grants if g.resource.startswith(f"slot:{pool.name}")]
        if len(taken) > pool.max_machines and len(taken) > len(_slots(world.allocation, pool.name)):
            return "S8: more grants than the pool's cap"
    for grant in new.grants:
        if grant.resource.startswith("machine:") and sum(g.resource == grant.resource for g in new.grants) > 1:
            return "S8: a static machine is granted twice"
    kept = set(keys)
    for grant in world.allocation.grants:
        job = JOBS.index(grant.job)
        if (grant.job, grant.node, grant.attempt) not in kept:
            if any(s.attempt == grant.attempt for s in live_slots(world.records[job], grant.node)):
                return "S8: gives back the grant of a live attempt"
            machine = world.sky.machine
            trains = machine is not None and machine.alive and machine.serves == (job, grant.node, grant.attempt)
            if grant.resource.startswith("machine:") and trains:
                return "S8: takes a static machine back that still trains for it"
    return ""


def _slots(allocation: Allocation, pool: str) -> list[Grant]:
    return [g for g in allocation.grants if g.resource.startswith(f"slot:{pool}")]


# -- of calls


def called(world: World, job: int, action: Action) -> str:
    """Before a call is made."""
    record = world.records[job]
    if isinstance(action, DeleteVm) and record is not None and record.phase is Phase.RUN:
        for v in world.sky.vms:
            hit = action.uid in (v.uid, v.name) and v.life in (Life.COMING, Life.RUNNING)
            if hit and slot_of(world.records[v.job], v) is not None:
                return f"S3: deletes {v.uid}, which is not superseded"
    if isinstance(action, InsertVm) and record is not None:
        if action.node < len(record.nodes) and action.attempt > record.nodes[action.node].top:
            return "S10: inserts a machine without an intent"
        for slot in live_slots(record, action.node):
            if slot.attempt == action.attempt and (slot.zone, slot.pool, slot.model) != (
                action.zone,
                action.pool,
                action.model,
            ):
                return "S10: inserts something else than the intent says"
    return ""


def swept(world: World, after: Sky, job: int, action: Action) -> str:
    """After a call: the newest checkpoint must still be somewhere while the job may want it."""
    record, newest = world.records[job], world.papers[job].newest
    if record is None or record.phase in OVER or not newest or len(after.disks) == len(world.sky.disks):
        return ""
    kept = any(d.job == job and d.commit == newest for d in after.disks) or any(
        p.job == job and p.commit == newest for p in after.snaps
    )
    machine = after.machine
    copied = world.papers[job].copy == newest
    if (
        kept
        or copied
        or (machine is not None and machine.commits[job] == newest)
        or len(after.disks) > len(world.sky.disks)
    ):
        return ""
    return f"S7: deletes the only disk with commit {newest}"


__all__ = ["PAST", "called", "change", "granted", "grants", "judged", "released", "swept", "written"]
