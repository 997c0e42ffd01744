"""A job's size: a resize adds ranks, or ends the highest ones at the boundary of a generation.

The record keeps all ranks that the job file allows, for their counters only rise; ``size`` says how many of
them, the lowest, are wanted. The others are *parked*: no machine, no wish, their disk given up. A rank is
parked when its member has saved and stopped; it comes back as any vacant rank does, on a blank disk.
"""

from __future__ import annotations

from spotkeeper.reconcile.decide import kept
from spotkeeper.reconcile.decide.draft import Draft
from spotkeeper.spec.job import JobSpec
from spotkeeper.spec.ledger import Event


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
    for index in range(draft.size(), nodes):
        draft.put(index, cause="resize")
    draft.set(size=nodes)
    return ""


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
    """Park what is above the size; a member of the newest generation saves and stops first."""
    above = range(draft.size(), len(draft.ranks))
    training = [index for index, _ in draft.members() if index in above]
    if training and not draft.record.stop:
        draft.halt(draft.now + draft.save_s() + draft.times.stop_s, "resize")
    if training and draft.halted() and not _kept(draft):
        draft.set(size=max(training) + 1)
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
    staying = [(index, slot) for index, slot in draft.members() if index < draft.size()]
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
    parked = index >= draft.size() and index not in record.members
    if record.stop or not record.gen or not (parked or any(index == member for member, _ in draft.members())):
        return False
    return any(kept.holds(draft, member, slot) for member, slot in draft.members())
