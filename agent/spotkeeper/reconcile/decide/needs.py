"""Make before break: successors for machines under notice, and for recorded wishes.

A rank in need gets a ``next`` of its zone at once; the gang saves and stops when the successors stand by,
or when the time left reaches the measured save time plus a margin; one CAS promotes.
"""

from __future__ import annotations

from spotkeeper.reconcile.decide import ends, grants, kept, offers, slots, stragglers
from spotkeeper.reconcile.decide.draft import Draft
from spotkeeper.reconcile.decide.seen import admitted
from spotkeeper.spec.model import Model
from spotkeeper.spec.record import Rank, Slot, SlotState

BARGAINS = ("spot", "on-demand", stragglers.WISH)  # wishes that nobody asked for


def step(draft: Draft) -> None:
    if kept.costs_nothing(draft):
        stragglers.step(draft, calm=not any(needed(rank) or rank.looks for rank in draft.ranks))
        _spot_again(draft)
    elif not draft.record.stop:
        _no_bargain(draft)
    for index, rank in enumerate(draft.ranks):
        if rank.next is not None and not needed(rank) and not rank.looks and not _follows(draft, rank.next):
            slots.drop_next(draft, index)
    if draft.record.pause or draft.record.move is not None:
        return
    _stop(draft)
    _promote(draft)
    for index in draft.filled():
        rank = draft.ranks[index]
        if needed(rank) and rank.next is None:
            grants.fill(draft, index, "next")


def needed(rank: Rank) -> bool:
    """A notice, a planned end or a wish, of a machine that is there."""
    cur = rank.cur
    return cur is not None and (rank.wish is not None or goes(cur)) and admitted(cur)  # rare first: of 10,000


def _follows(draft: Draft, slot: Slot) -> bool:
    """Whether the gang moves to where this machine is, and it waits for the rank's disk."""
    move = draft.record.move
    return move is not None and slot.zone == move.zone


def goes(slot: Slot) -> bool:
    """Whether its machine is about to go: somebody said so, or its longest run ends."""
    return slot.notice is not None or slot.ends is not None


def _spot_again(draft: Draft) -> None:
    """The bout is over, and nothing says that spot is cold, or a static node idles: wish for it."""
    record, spec = draft.record, draft.seen.spec
    if record.stop or not record.gen or spec is None or spec.policy not in ("balanced", "spot", "shuffle"):
        return
    if draft.now < record.bout_until or draft.now < record.gen_since + draft.times.settle_s or record.roll:
        return
    if record.pause or record.move or any(needed(rank) or rank.looks for rank in draft.ranks):
        return
    for index, rank in enumerate(draft.ranks):
        if not slots.is_model(rank.cur, Model.ON_DEMAND):
            continue
        if offers.warm_spot(draft, index) or offers.idle_node(draft, index):
            draft.put(index, wish="spot", refused=())


def _no_bargain(draft: Draft) -> None:
    """A wish for a cheaper machine, or a quicker one, is dropped; what a user asked for is not."""
    for index, rank in enumerate(draft.ranks):
        if rank.wish in BARGAINS:
            draft.put(index, wish=None)


def _stop(draft: Draft) -> None:
    record = draft.record
    if not record.gen:
        return
    needs = [rank for rank in draft.ranks if needed(rank)]
    deadlines = [at for rank in needs if (at := _deadline(draft, rank)) is not None]
    if record.stop:
        if deadlines:  # a stop that had time has less of it now
            draft.halt(max(draft.now, min(deadlines)), "notice")
        return
    standing = [rank for rank in needs if rank.next is not None and rank.next.state is SlotState.ADMITTED]
    waiting = [rank for rank in needs if rank not in standing and (rank.next is not None or _may_come(draft, rank))]
    urgent = bool(deadlines) and draft.now >= ends.urgent(draft, min(deadlines))
    if not urgent and (not standing or waiting):
        return
    limit = draft.now + draft.save_s() + draft.times.stop_s
    cut = any(rank.cur is not None and rank.cur.cut for rank in needs)
    draft.halt(max(draft.now, min([*deadlines, limit])), "loss" if cut else _why(needs, bool(deadlines)))


def _why(needs: list[Rank], pressed: bool) -> str:
    """What a stop is for. ``pressed``: a deadline is near."""
    if all(rank.cur is not None and ends.planned(rank.cur) for rank in needs):
        return ends.CAUSE
    return "notice" if pressed else "swap"


def _deadline(draft: Draft, rank: Rank) -> float | None:
    """When the notice says that the machine goes. One that outlived its deadline is in no hurry any more.

    It would stop, and start, a generation in every pass; its successor still comes.
    """
    notice = None if rank.cur is None else rank.cur.notice
    return None if notice is None or draft.now >= notice + draft.times.stop_s else notice


def _may_come(draft: Draft, rank: Rank) -> bool:
    """A machine that is about to go may still find a successor; a wish is not waited for."""
    return rank.cur is not None and goes(rank.cur) and not rank.refused


def _promote(draft: Draft) -> None:
    """cur = next, once cur trains no more: it was no member yet, or it has saved and stopped."""
    halted = draft.record.stop and draft.halted()
    for index, rank in enumerate(draft.ranks):
        following = rank.next
        if not needed(rank) or following is None or following.state is not SlotState.ADMITTED or rank.cur is None:
            continue
        if rank.cur.state is SlotState.MEMBER and not halted:
            continue
        if kept.may_follow(draft, index, following.node):
            draft.promote(index, following.cause or "notice")
        else:  # what was saved by now is not there
            slots.drop_next(draft, index)
