"""One rank's machines: what became of ``next``, what became of ``cur``.

The order within a rank is the protocol's: next dead, next refused, next said hello; cur's intent dead,
refused, said hello; cur not there; cur rebooted. Losses are read from an answered zone only.
"""

from __future__ import annotations

from msgspec.structs import replace

from spotkeeper.reconcile.decide import ends, fuses, kept
from spotkeeper.reconcile.decide.draft import Draft
from spotkeeper.reconcile.decide.seen import admitted
from spotkeeper.spec.cloud import Class, CreateDisk, InsertVm, Offer, Result, VmStatus
from spotkeeper.spec.facts import Kind
from spotkeeper.spec.ledger import Event
from spotkeeper.spec.model import Model
from spotkeeper.spec.record import Hold, Phase, Slot, SlotState

BAD_DISK = 3  # machines in a row
EARLY_S = 180.0  # rights take two minutes at the most, as a rule
BAD_DISK_HOLDS = 8  # times hold_s: three machines are paid for at every try
OWN = ("disk", "host", ends.CAUSE)  # causes of a loss that the cloud's market has no part in
REFUSED = (Class.CAPACITY, Class.QUOTA)


def step(draft: Draft) -> None:
    for index in range(len(draft.ranks)):
        ends.note(draft, index)
        _notices(draft, index)
        _next(draft, index)
        _cur(draft, index)
        if draft.record.phase is not Phase.RUN:
            return


def _notices(draft: Draft, index: int) -> None:
    """Take a notice down in the record, or strike it out after a reprieve."""
    cur = draft.ranks[index].cur
    if cur is None or not admitted(cur):
        return
    view = draft.view
    deadline = view.notice(index, cur)
    if deadline == cur.notice or (deadline is None and not view.running(index, cur)):
        return  # a machine that is gone has not been spared
    cut = deadline is not None and not view.warned(index, cur)
    draft.put_slot(index, "cur", notice=deadline, cut=cut)
    if deadline is not None and cur.notice is None:
        draft.put(index, refused=())  # a new need: offers refused before may be asked again
        key = f"r{index}.a{cur.attempt}.{deadline:.0f}"
        if cut:  # nobody said so, but it stops: for the ledger that is the loss, its end only the proof of it
            draft.log(Event.LOSS, f"r{index}.a{cur.attempt}", rank=index, slot=cur, cause="loss")
        else:
            draft.log(Event.NOTICE, key, rank=index, slot=cur, detail=f"{deadline - draft.now:.0f} s ahead")
    elif deadline is None and cur.notice is not None and not cur.cut:
        draft.log(Event.REPRIEVE, f"r{index}.a{cur.attempt}.{cur.notice:.0f}", rank=index, slot=cur)


def _next(draft: Draft, index: int) -> None:
    slot = draft.ranks[index].next
    if slot is None:
        return
    view = draft.view
    if slot.state is SlotState.INTENT:
        result = view.insert_result(index, slot)
        if view.hello(index, slot):
            admit(draft, index, "next")
        elif result is not None and result.kind in (*REFUSED, Class.PERMANENT):
            _refuse(draft, index, slot, result)
            _next_refused(draft, index)
        elif view.stillborn(index, slot):
            _log_dead(draft, index, slot, view.stillborn(index, slot) or "")
            draft.put(index, next=None)
    elif view.gone(index, slot) or view.notice(index, slot) is not None:
        cause = "standby" if view.gone(index, slot) else "noticed standby"
        draft.log(Event.LOSS, f"r{index}.a{slot.attempt}", rank=index, slot=slot, cause=cause)
        draft.put(index, next=None)
    elif view.hello(index, slot):
        admit(draft, index, "next")


def _next_refused(draft: Draft, index: int) -> None:
    """Without capacity a wish is dropped; a notice asks the next offer, and then waits for the loss."""
    wish = draft.ranks[index].wish
    draft.put(index, next=None, wish=None)
    if wish == "spot":
        draft.bout("no spot yet")


def _refuse(draft: Draft, index: int, slot: Slot, result: Result) -> None:
    key = Offer(slot.pool, slot.zone, slot.model, 0.0).key()
    rank = draft.ranks[index]
    # What was refused longer ago has thawed: with this one it would be cold again, and no zone be left to go to.
    lately = rank.refused if draft.now < rank.refused_at + draft.times.cold_s else ()
    draft.put(index, refused=(*(r for r in lately if r != key), key), refused_at=draft.now)
    fuses.refused(draft, index, slot)
    key, cause = f"r{index}.a{slot.attempt}", result.kind.value
    draft.log(Event.REFUSED, key, rank=index, slot=slot, cause=cause, detail=(result.detail or cause)[:200])


def _log_dead(draft: Draft, index: int, slot: Slot, why: str) -> None:
    draft.log(Event.LOSS, f"r{index}.a{slot.attempt}", rank=index, slot=slot, cause="never joined", detail=why)


def admit(draft: Draft, index: int, which: str) -> None:
    """Store the unique id and the boot id of a machine that is listed and said hello (rule 2)."""
    slot: Slot = getattr(draft.ranks[index], which)
    found = draft.view.hello(index, slot)
    assert found is not None
    vm, fact = found
    past = slot.past if slot.boot is None else (*slot.past, slot.boot)
    new = replace(
        slot, state=SlotState.ADMITTED, since=draft.now, uid=vm.uid, boot=fact.boot, address=vm.address, past=past
    )
    draft.install(index, which, new)
    key = f"r{index}.a{slot.attempt}" + (f".b{len(past)}" if past else "")
    draft.log(
        Event.ADMITTED, key, rank=index, slot=new, cause=slot.cause, started=vm.created or None, detail=slot.node or ""
    )


def _cur(draft: Draft, index: int) -> None:
    slot = draft.ranks[index].cur
    if slot is None:
        return
    if slot.state is SlotState.INTENT:
        _cur_intent(draft, index, slot)
    elif draft.view.gone(index, slot):
        warned = "notice" if slot.notice is not None and not slot.cut else "loss"
        lose(draft, index, ends.CAUSE if ends.over(slot) else warned)
    elif draft.view.hello(index, slot):
        draft.halt(draft.now, "reboot")
        admit(draft, index, "cur")
    elif why := draft.view.unmountable(index, draft.ranks[index].disk, slot):
        _disk_bad(draft, index, slot, why)
    else:
        _disk_well(draft, index, slot)
        _disk_refused(draft, index)


def _cur_intent(draft: Draft, index: int, slot: Slot) -> None:
    view = draft.view
    result = view.insert_result(index, slot)
    if view.hello(index, slot):
        admit(draft, index, "cur")
    elif result is not None and result.kind in REFUSED:
        _refuse(draft, index, slot, result)
        replace_cur(draft, index, slot.cause or "start")
    elif result is not None and result.kind is Class.PERMANENT:
        _permanent(draft, result.detail, result.action)
    elif why := view.stillborn(index, slot):
        _log_dead(draft, index, slot, why)
        if view.running(index, slot):  # it runs and nobody has heard of it
            fuses.doubt(draft)
        replace_cur(draft, index, slot.cause or "start")


def _permanent(draft: Draft, detail: str, action: object) -> None:
    """Asking again gives the same answer: hold, with one alarm, and try rarely.

    But soon the first time: what an `up` has just allowed, a cloud may know minutes later.
    """
    what = "insert a machine" if isinstance(action, InsertVm) else "create a disk"
    wait = draft.times.hold_s * min(8, 2 ** (draft.record.holds - 1))
    wait = wait if draft.record.holds else min(EARLY_S, draft.times.hold_s)
    draft.hold(Hold.CLOUD, f"the cloud refuses to {what}: {detail[:200]}", until=draft.now + wait)


def _disk_refused(draft: Draft, index: int) -> None:
    """A data disk that cannot be made holds the job; its number is burnt, for the key of the call is used up.

    So it is where the disk was made once, and somebody has destroyed it: then a new number is all that it needs.
    """
    rank = draft.ranks[index]
    result = draft.view.creates.get((index, rank.disk))
    refused = result is not None and result.kind in (Class.PERMANENT, Class.DEAD_KEY)
    if result is None or not refused or not isinstance(result.action, CreateDisk):
        return
    if rank.cur is None or draft.view.attached(index, rank.disk, rank.cur):
        return
    if draft.view.disk(index, rank.disk, rank.cur.zone) is None:
        draft.put(index, disk=rank.disk_top + 1, disk_top=rank.disk_top + 1)
        if result.kind is Class.PERMANENT:
            _permanent(draft, result.detail, result.action)


def _disk_bad(draft: Draft, index: int, slot: Slot, why: str) -> None:
    """The machine is suspect first, and replaced. Where several could not mount it, it is the disk: hold."""
    bad = draft.ranks[index].bad + 1
    if bad < BAD_DISK:
        draft.put(index, bad=bad)
        lose(draft, index, "disk")
        return
    name = f"the own disk of {slot.node}" if slot.node else draft.view.disk_name(index, draft.ranks[index].disk)
    draft.put(index, bad=0)
    reason = f"rank {index}: {name} cannot be mounted ({why}), on {bad} machines in a row; look at it, then resume"
    draft.hold(Hold.CLOUD, reason, until=draft.now + BAD_DISK_HOLDS * draft.times.hold_s, rank=index)


def _disk_well(draft: Draft, index: int, slot: Slot) -> None:
    rank = draft.ranks[index]
    mine = "0" if slot.node is not None else str(rank.disk)
    if rank.bad and any(fact.value == mine for fact in draft.view.said(index, slot, Kind.ATTACHED)):
        draft.put(index, bad=0)


def lose(draft: Draft, index: int, cause: str) -> None:
    """An admitted machine is given up for a fact. Its successor is next, whatever its state, or a new intent."""
    slot = draft.ranks[index].cur
    assert slot is not None
    member = slot.state is SlotState.MEMBER
    if cause not in OWN:  # no preemption, and no word about the market
        draft.count_loss(index, slot)
    if fuses.is_doubtful(slot, cause):
        fuses.doubt(draft)
    vm = draft.view.vm(index, slot)
    detail = "REPAIRING: its host has failed" if vm is not None and vm.status is VmStatus.REPAIRING else ""
    draft.log(Event.LOSS, f"r{index}.a{slot.attempt}", rank=index, slot=slot, cause=cause, detail=detail)
    draft.put(index, refused=())
    replace_cur(draft, index, cause if cause in ("notice", "host", ends.CAUSE) else "loss")
    if member and draft.record.gen:
        draft.set(roll=None)
        draft.halt(draft.now, "loss" if cause == "notice" else cause)


def replace_cur(draft: Draft, index: int, cause: str) -> None:
    rank = draft.ranks[index]
    following = rank.next if rank.cur is not None and rank.next and rank.next.zone == rank.cur.zone else None
    if following is not None and kept.may_follow(draft, index, following.node):
        draft.promote(index, following.cause or cause)
    else:
        draft.vacate(index, cause)


def drop_next(draft: Draft, index: int) -> None:
    """Nobody needs it any more; only an answered zone lets us be sure what we drop."""
    slot = draft.ranks[index].next
    if slot is not None and slot.zone in draft.view.answered:
        draft.put(index, next=None)


def is_model(slot: Slot | None, model: Model) -> bool:
    return slot is not None and slot.model is model
