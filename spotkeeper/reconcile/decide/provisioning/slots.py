"""Updates each node's ``cur`` and ``next`` by the reports and the listing of this round.

For each node these are checked in this order: planned end and notices of ``cur``, then ``next``, then ``cur``.

* An intent is admitted if its machine said hello, refused if the cloud refused the request, and dead if its machine
  cannot join any more (``Queries.stillborn``).
* An admitted machine is lost if it is gone (``Queries.gone``), and admitted again if it has rebooted. A ``next`` is
  also given up at a notice, and a ``cur`` if it cannot mount its disk.
"""

from __future__ import annotations

from msgspec.structs import replace

from spotkeeper.contract.cloud import CreateDisk, InsertVm, Result, ResultKind, VmStatus
from spotkeeper.contract.facts import Kind
from spotkeeper.contract.ledger import Event
from spotkeeper.contract.record import BACKUP, Hold, Phase, Slot, SlotState
from spotkeeper.contract.stack import Model
from spotkeeper.reconcile.decide.checkpoint import location
from spotkeeper.reconcile.decide.draft import Draft
from spotkeeper.reconcile.decide.job import limits, progress
from spotkeeper.reconcile.decide.provisioning import machine_health
from spotkeeper.reconcile.decide.snapshot import admitted

BAD_DISK = 3  # consecutive machines that failed to mount the node's disk
EARLY_S = 180.0  # new IAM permissions usually take effect within two minutes
BAD_DISK_HOLDS = 8  # multiple of hold_s to wait: each retry costs three machines
OWN = ("disk", machine_health.HOST, machine_health.PLANNED_END)  # causes of a loss that say nothing about the market
REFUSED = (ResultKind.CAPACITY, ResultKind.QUOTA)
QUOTA_CHARS = 160  # kept length of the cloud's message: it names the quota, its limit and its region


def step(draft: Draft) -> None:
    for index in range(len(draft.nodes)):
        machine_health.note_end(draft, index)
        _notices(draft, index)
        _next(draft, index)
        _cur(draft, index)
        if draft.record.phase is not Phase.RUN:
            return


def _notices(draft: Draft, index: int) -> None:
    cur = draft.nodes[index].cur
    if cur is None or not admitted(cur):
        return
    queries = draft.queries
    deadline = queries.notice(index, cur)
    if deadline == cur.notice or (deadline is None and not queries.running(index, cur)):
        return  # the machine is gone, so a missing notice is not a reprieve
    cut = deadline is not None and not queries.warned(index, cur)
    draft.put_slot(index, "cur", notice=deadline, cut=cut)
    if deadline is not None and cur.notice is None:
        draft.put(index, refused=())  # a new need: offers refused earlier may be requested again
        key = f"r{index}.a{cur.attempt}.{deadline:.0f}"
        if cut:  # the machine stops without a notice: record the loss now
            draft.log(Event.LOSS, f"r{index}.a{cur.attempt}", node=index, slot=cur, cause="loss")
        else:
            draft.log(Event.NOTICE, key, node=index, slot=cur, detail=f"machine ends in {deadline - draft.now:.0f} s")
    elif deadline is None and cur.notice is not None and not cur.cut:
        draft.log(Event.REPRIEVE, f"r{index}.a{cur.attempt}.{cur.notice:.0f}", node=index, slot=cur)


def _next(draft: Draft, index: int) -> None:
    slot = draft.nodes[index].next
    if slot is None:
        return
    queries = draft.queries
    if slot.state is SlotState.INTENT:
        result = queries.insert_result(index, slot)
        if queries.hello(index, slot):
            admit(draft, index, "next")
        elif result is not None and result.kind in (*REFUSED, ResultKind.PERMANENT):
            _refuse(draft, index, slot, result)
            _next_refused(draft, index)
        elif queries.stillborn(index, slot):
            _log_dead(draft, index, slot, queries.stillborn(index, slot) or "")
            draft.put(index, next=None)
    elif queries.gone(index, slot) or queries.notice(index, slot) is not None:
        cause = "standby" if queries.gone(index, slot) else "noticed standby"
        draft.log(Event.LOSS, f"r{index}.a{slot.attempt}", node=index, slot=slot, cause=cause)
        draft.put(index, next=None)
    elif queries.hello(index, slot):
        admit(draft, index, "next")


def _next_refused(draft: Draft, index: int) -> None:
    """Drop a refused ``next`` and the replacement reason. If ``cur`` has a notice, a later step tries another offer."""
    replace_reason = draft.nodes[index].replace_reason
    draft.put(index, next=None, replace_reason=None)
    if replace_reason == "spot":
        draft.fall_back()


def _refuse(draft: Draft, index: int, slot: Slot, result: Result) -> None:
    key = progress.key(slot)
    node = draft.nodes[index]
    # Drop expired refusals: the new refused_at would make them count again and block every zone.
    lately = node.refused if draft.now < node.refused_at + draft.times.cold_s else ()
    quota = result.detail[:QUOTA_CHARS] if result.kind is ResultKind.QUOTA else ""
    draft.put(index, refused=(*(r for r in lately if r != key), key), refused_at=draft.now, quota=quota)
    limits.refused(draft, index, slot)
    # A permanent refusal of reserved capacity is stored like one for capacity, so that other jobs wait too.
    key, cause = f"r{index}.a{slot.attempt}", (result.kind if result.kind in REFUSED else ResultKind.CAPACITY).value
    draft.log(Event.REFUSED, key, node=index, slot=slot, cause=cause, detail=(result.detail or cause)[:200])


def _reservation_over(slot: Slot, result: Result) -> bool:
    """Whether reserved capacity refuses a machine for good: it was deleted, or never had this type or zone.

    The other offers do not need it, so the job takes one of them instead of going on hold.
    """
    return slot.model is Model.RESERVED and result.kind is ResultKind.PERMANENT


def _log_dead(draft: Draft, index: int, slot: Slot, why: str, started: float | None = None) -> None:
    key = f"r{index}.a{slot.attempt}"
    draft.log(Event.LOSS, key, node=index, slot=slot, cause="never joined", detail=why, started=started)


def admit(draft: Draft, index: int, which: str) -> None:
    """Admit a machine that is listed and said hello: store its unique id and boot id (``docs/protocol.md``, rule 2)."""
    slot: Slot = getattr(draft.nodes[index], which)
    found = draft.queries.hello(index, slot)
    assert found is not None
    vm, fact = found
    past = slot.past if slot.boot is None else (*slot.past, slot.boot)
    new = replace(
        slot, state=SlotState.ADMITTED, since=draft.now, uid=vm.uid, boot=fact.boot, address=vm.address, past=past
    )
    draft.install(index, which, new)
    key = f"r{index}.a{slot.attempt}" + (f".b{len(past)}" if past else "")
    draft.log(
        Event.ADMITTED,
        key,
        node=index,
        slot=new,
        cause=slot.cause,
        started=vm.created or None,
        detail=slot.machine or "",
    )


def _cur(draft: Draft, index: int) -> None:
    slot = draft.nodes[index].cur
    if slot is None:
        return
    if slot.state is SlotState.INTENT:
        _cur_intent(draft, index, slot)
    elif draft.queries.gone(index, slot):
        warned = "notice" if slot.notice is not None and not slot.cut else "loss"
        lose(draft, index, machine_health.PLANNED_END if machine_health.over(slot) else warned)
    elif draft.queries.hello(index, slot):
        draft.halt(draft.now, "reboot")
        admit(draft, index, "cur")
    elif why := draft.queries.unmountable(index, draft.nodes[index].disk, slot):
        _disk_bad(draft, index, slot, why)
    else:
        _disk_well(draft, index, slot)
        _disk_refused(draft, index)


def _cur_intent(draft: Draft, index: int, slot: Slot) -> None:
    queries = draft.queries
    result = queries.insert_result(index, slot)
    if queries.hello(index, slot):
        admit(draft, index, "cur")
    elif result is not None and (result.kind in REFUSED or _reservation_over(slot, result)):
        _refuse(draft, index, slot, result)
        replace_cur(draft, index, slot.cause or "start")
    elif result is not None and result.kind is ResultKind.PERMANENT:
        _permanent(draft, result.detail, result.action)
    elif why := queries.stillborn(index, slot):
        if queries.running(index, slot):  # the machine runs but its agent sent no hello
            limits.count_unexplained(draft)
        give_up_boot(draft, index, why)


def give_up_boot(draft: Draft, index: int, why: str) -> None:
    """Replace a machine that sent no hello, by its backup if it has one."""
    slot = draft.nodes[index].cur
    assert slot is not None
    _log_dead(draft, index, slot, why)
    replace_cur(draft, index, slot.cause or "start")


def _permanent(draft: Draft, detail: str, action: object) -> None:
    """Hold the job after a permanent refusal, and retry rarely, since a new request gets the same answer."""
    what = "insert a machine" if isinstance(action, InsertVm) else "create a disk"
    wait = draft.times.hold_s * min(8, 2 ** (draft.record.hold_count - 1))
    wait = wait if draft.record.hold_count else min(EARLY_S, draft.times.hold_s)  # new rights need minutes
    draft.hold(Hold.CLOUD, f"the cloud refuses to {what}: {detail[:200]}", until=draft.now + wait)


def _disk_refused(draft: Draft, index: int) -> None:
    """Give the node a new disk number if the cloud refuses to create its disk; after a permanent refusal, hold the job.

    The disk's number is in the idempotency key, and a key serves for one disk only. So the cloud also refuses to make a
    disk again that existed and was destroyed. In this case the new number suffices, without a hold.
    """
    node = draft.nodes[index]
    result = draft.queries.creates.get((index, node.disk))
    refused = result is not None and result.kind in (ResultKind.PERMANENT, ResultKind.DEAD_KEY)
    if result is None or not refused or not isinstance(result.action, CreateDisk):
        return
    if node.cur is None or draft.queries.attached(index, node.disk, node.cur):
        return
    if draft.queries.disk(index, node.disk, node.cur.zone) is None:
        draft.put(index, disk=node.disk_top + 1, disk_top=node.disk_top + 1)
        if result.kind is ResultKind.PERMANENT:
            _permanent(draft, result.detail, result.action)


def _disk_bad(draft: Draft, index: int, slot: Slot, why: str) -> None:
    """Replace a machine that cannot mount its disk. Hold the job if three in a row cannot mount it: the disk is bad."""
    bad = draft.nodes[index].bad + 1
    if bad < BAD_DISK:
        draft.put(index, bad=bad)
        lose(draft, index, "disk")
        return
    name = f"the disk of {slot.machine}" if slot.machine else draft.queries.disk_name(index, draft.nodes[index].disk)
    draft.put(index, bad=0)
    reason = f"node {index}: {name} cannot be mounted ({why}), on {bad} machines in a row; check this disk, then resume"
    draft.hold(Hold.CLOUD, reason, until=draft.now + BAD_DISK_HOLDS * draft.times.hold_s, node=index)


def _disk_well(draft: Draft, index: int, slot: Slot) -> None:
    node = draft.nodes[index]
    mine = "0" if slot.machine is not None else str(node.disk)
    if node.bad and any(fact.value == mine for fact in draft.queries.said(index, slot, Kind.ATTACHED)):
        draft.put(index, bad=0)


def lose(draft: Draft, index: int, cause: str) -> None:
    """Record the loss of an admitted machine. The node's ``next`` becomes ``cur``; without one the node is vacant."""
    slot = draft.nodes[index].cur
    assert slot is not None
    member = slot.state is SlotState.MEMBER
    if cause not in OWN:  # the other causes say something about the market
        draft.count_loss(index, slot)
    if limits.is_unexplained(slot, cause):
        limits.count_unexplained(draft)
    vm = draft.queries.vm(index, slot)
    detail = "REPAIRING: its host has failed" if vm is not None and vm.status is VmStatus.REPAIRING else ""
    draft.log(Event.LOSS, f"r{index}.a{slot.attempt}", node=index, slot=slot, cause=cause, detail=detail)
    draft.put(index, refused=())
    replace_cur(draft, index, cause if cause in ("notice", machine_health.HOST, machine_health.PLANNED_END) else "loss")
    if member and draft.record.gen:
        draft.set(roll=None)
        draft.halt(draft.now, "loss" if cause == "notice" else cause)


def replace_cur(draft: Draft, index: int, cause: str) -> None:
    node = draft.nodes[index]
    following = node.next if node.cur is not None and node.next and node.next.zone == node.cur.zone else None
    if following is not None and location.may_follow(draft, index, following.machine):
        draft.promote(index, cause if following.cause == BACKUP else following.cause or cause)
    else:
        draft.vacate(index, cause)


def overtaken(draft: Draft, index: int, slow: Slot) -> None:
    """Replace a machine that sent no hello by its backup, which was up first.

    The ledger entry says when the slow boot began, so that ``market/`` counts the time spent waiting for it.
    """
    vm = draft.queries.vm(index, slow)
    _log_dead(draft, index, slow, "its backup was up first", started=(vm.created or None) if vm else None)
    replace_cur(draft, index, slow.cause or "start")


def drop_next(draft: Draft, index: int) -> None:
    """Drop a ``next`` that is not needed any more, if its zone answered in the listing."""
    slot = draft.nodes[index].next
    if slot is not None and slot.zone in draft.queries.answered:
        draft.put(index, next=None)
