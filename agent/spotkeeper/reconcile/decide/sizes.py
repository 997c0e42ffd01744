"""A job's size: a resize adds ranks, or ends those whose loss costs least at the boundary of a generation.

The record keeps all ranks that the job file allows, for their counters only rise; ``parked`` says which of them
are not wanted: no machine, no wish, their disk given up. A rank is parked when its member has saved and stopped;
it comes back as any vacant rank does, on a blank disk.
"""

from __future__ import annotations

from spotkeeper.reconcile.decide import fuses, kept, stragglers
from spotkeeper.reconcile.decide.draft import Draft
from spotkeeper.spec.job import JobSpec
from spotkeeper.spec.ledger import Event
from spotkeeper.spec.model import Model
from spotkeeper.spec.record import SlotState


def ask(draft: Draft, nodes: int | None) -> str:
    """Take a new size in; why not, in one line, or ''."""
    spec = draft.seen.spec
    if spec is None or nodes is None:
        return "no size was named"
    why = refusal(spec, nodes)
    if not why and draft.record.move is not None:
        why = f"a move to {draft.record.move.zone} is under way"
    if not why and nodes == draft.size():
        why = f"it has {nodes} already"
    if why or nodes is None:
        return why
    filled = draft.filled()
    parked = [index for index in range(len(draft.ranks)) if index not in filled]
    for index in parked[: max(0, nodes - len(filled))]:
        draft.put(index, cause="resize")
    gone = _cheapest(draft, len(filled) - nodes) if nodes < len(filled) else ()
    draft.set(size=nodes, parked=tuple(sorted({*parked[max(0, nodes - len(filled)) :], *gone})))
    return ""


def _cheapest(draft: Draft, count: int) -> tuple[int, ...]:
    """The ranks whose loss costs least; one that holds the newest checkpoint stays, where there is any."""
    order = sorted(draft.filled(), key=lambda index: _loss(draft, index))
    gone, stays = order[:count], order[count:]
    holders = {i for i, slot in draft.members() if kept.holds(draft, i, slot)}
    if holders and not holders & set(stays):
        gone[-1 if gone[-1] in holders else next(at for at, i in enumerate(gone) if i in holders)] = stays[0]
    return tuple(gone)


def _loss(draft: Draft, index: int) -> tuple[float, ...]:
    """What a rank's loss costs, least first: no machine, none that trains, one that goes anyway, a slow one.

    Of the others the dearest goes first, for what it costs an hour is saved; a static node is paid in any case. Of
    equal ones the highest goes; the lowest is the master, whose place stays.
    """
    cur = draft.ranks[index].cur
    if cur is None:
        return 0.0, 0.0, 0.0, -index
    trains = cur.state is SlotState.MEMBER
    goes = cur.notice is not None or cur.ends is not None or cur.sick > 0
    price = 0.0 if cur.model is Model.STATIC else fuses.price(draft, cur)
    slow = stragglers.lag(draft, index, cur)
    return 1.0 + trains, float(not goes), -float(slow), -price, -index


def refusal(spec: JobSpec, nodes: int) -> str:
    """Why a job of this file cannot have this size, whatever it does now; or ''."""
    size = spec.size()
    if size.min == size.max:
        return f"its job file says nodes: {size.max}; nodes: {{min, max}} would let it change"
    if not spec.checkpoint.replicated:
        return "its state is sharded: a checkpoint of one size does not fit another"
    if not size.min <= nodes <= size.max:
        return f"{nodes} is not within nodes: {{min: {size.min}, max: {size.max}}} of its job file"
    return ""


def step(draft: Draft) -> None:
    """Park what is not wanted; a member of the newest generation saves and stops first."""
    above = [index for index in range(len(draft.ranks)) if draft.parked(index)]
    training = [index for index, _ in draft.members() if index in above]
    if training and not draft.record.stop:
        draft.halt(draft.now + draft.save_s() + draft.times.stop_s, "resize")
    if training and draft.halted() and not _kept(draft):
        parked = tuple(index for index in above if index not in training)
        draft.set(size=len(draft.ranks) - len(parked), parked=parked)
        draft.log(Event.ASK, f"resize.v{draft.before.ver + 1}", cause="resize", detail="given up: see the checkpoint")
        return
    for index in above:
        rank = draft.ranks[index]
        if rank.cur is not None and index in training and not draft.halted():
            continue
        if rank.cur is not None or rank.next is not None or rank.refused:
            _park(draft, index)


def _kept(draft: Draft) -> bool:
    """Whether somebody who stays has the newest commit, or nobody has any: no step is lost by a resize."""
    if kept.newest(draft) is None:
        return True
    staying = [(index, slot) for index, slot in draft.members() if not draft.parked(index)]
    return any(
        draft.view.attached(index, draft.ranks[index].disk, slot) and kept.holds(draft, index, slot)
        for index, slot in staying
    )


def _park(draft: Draft, index: int) -> None:
    """Superseded; the disk's number is burnt, for what it holds is the past when the rank comes back."""
    rank = draft.ranks[index]
    number = rank.disk_top + 1
    draft.put(index, next=None, wish=None, refused=(), refused_at=0.0, disk=number, disk_top=number)
    draft.put(index, node=None, wrote=0, held=0)
    if rank.cur is not None:
        draft.vacate(index, "resize")


def left(draft: Draft, index: int) -> bool:
    """Whether a rank's old disks may go before it trains with its own: the newest commit is on another's.

    It is parked, and a generation runs without it; or it came back, and trains while its new disk is on its way.
    """
    record = draft.record
    parked = draft.parked(index) and index not in record.members
    if record.stop or not record.gen or not (parked or any(index == member for member, _ in draft.members())):
        return False
    return any(kept.holds(draft, member, slot) for member, slot in draft.members())
