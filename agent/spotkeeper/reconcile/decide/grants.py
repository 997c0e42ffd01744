"""Asking for machines: the grant first, then the intent with its number; what is not wanted is burnt.

``fill`` is the only place where an intent is written. ``plan`` makes the next allocation document: grants
that this pass wants, less those whose machine is gone or whose static node gave its word.
"""

from __future__ import annotations

from collections.abc import Sequence

from spotkeeper.reconcile import alloc
from spotkeeper.reconcile.decide import ends, fuses, kept, offers, place, stragglers, waits, whole
from spotkeeper.reconcile.decide.draft import Draft
from spotkeeper.spec.cloud import Offer
from spotkeeper.spec.facts import Kind
from spotkeeper.spec.ledger import Entry, Event
from spotkeeper.spec.model import Model
from spotkeeper.spec.record import LOOK, Alloc, Grant, Phase, Rank, Slot, SlotState

SWAP = "swap to spot"  # the cause of an attempt


def step(draft: Draft) -> None:
    """Vacant ranks, the highest first: static nodes fill the highest ranks."""
    if not draft.ranks and draft.seen.spec is not None:
        draft.set(ranks=(Rank(),) * draft.seen.spec.size().max)
    record = draft.record
    if record.phase is not Phase.RUN or record.move is not None or record.pause or draft.seen.spec is None:
        return
    if any(draft.ranks[index].cur is None for index in draft.filled()):
        if not draft.seen.blind:
            place.step(draft)
        vacant = [i for i in reversed(draft.filled()) if draft.ranks[i].cur is None and not _left_out(draft, i)]
        capped = [fill(draft, index, "cur") for index in vacant]
        if any(capped):
            whole.forgo(draft)


def _left_out(draft: Draft, index: int) -> bool:
    """A generation trains without this rank, and would not be stopped to take it in: its machine would idle."""
    record = draft.record
    trains = record.gen > 0 and not record.stop and index not in record.members
    return trains and draft.ranks[index].cause != "resize" and not kept.costs_nothing(draft)


def burn(draft: Draft) -> None:
    """A grant for top + 1 that nobody wants now: its number is burnt before it is released."""
    for grant in draft.view.own_grants():
        if grant.rank >= len(draft.ranks):
            continue
        rank = draft.ranks[grant.rank]
        if grant.attempt > rank.top and grant not in draft.wanted:
            draft.put(grant.rank, top=grant.attempt)


def fill(draft: Draft, index: int, which: str) -> bool:
    """Write an intent for which a grant is there, or ask for the grant. Whether only the stack's caps forbid it."""
    if draft.seen.draining or draft.seen.spec is None:
        return False
    if draft.seen.blind:
        waits.say(draft, index, "waiting: who has which machine (stack/alloc) cannot be read; spotkeeper repair alloc")
        return False
    if why := fuses.bars(draft, index):
        fuses.tell(draft, index, why)
        return False
    options = offers.open_to(draft, index, which)
    allowed = kept.may_take if which == "cur" else kept.may_follow
    home = [offer for offer in options if allowed(draft, index, offer.node)]
    if kept.covered(draft) and which == "cur":
        options = [*home, *(offer for offer in options if offer not in home)]  # elsewhere it is fetched from the bucket
    elif home or not kept.given_up(draft):
        options = home
    return _take(draft, index, which, options)


def look(draft: Draft, index: int, offer: Offer) -> None:
    """A machine in the place of a successor, that is none yet (``elsewhere``)."""
    _take(draft, index, "next", [offer], LOOK)


def _take(draft: Draft, index: int, which: str, options: list[Offer], cause: str = "") -> bool:
    attempt = draft.ranks[index].top + 1
    while (grant := draft.view.grant(index, attempt)) is not None:
        found = next((offer for offer in options if alloc.resource(offer) == grant.resource), None)
        if found is not None:
            _intent(draft, index, which, attempt, found, cause or _cause(draft.ranks[index], which, found))
            return False
        draft.put(index, top=attempt)  # no use for it any more: its number is burnt
        attempt += 1
    for offer in options:
        if draft.held.room(draft.seen.stack, offer):
            draft.want(Grant(draft.record.job, index, attempt, alloc.resource(offer), draft.now))
            return False
    return waits.nothing(draft, index, {offer.model for offer in options if offer.node is None})


def _intent(draft: Draft, index: int, which: str, attempt: int, offer: Offer, cause: str) -> None:
    """Zone, model, pool and disk are fixed here, before any call (rule 8)."""
    slot = Slot(
        attempt=attempt,
        state=SlotState.INTENT,
        pool=offer.pool,
        zone=offer.zone,
        model=offer.model,
        since=draft.now,
        node=offer.node,
        cause=cause,
    )
    draft.put(index, top=attempt, zone=draft.ranks[index].zone if cause == LOOK else offer.zone)
    draft.install(index, which, slot)
    if offer.node is None:
        fuses.launched(draft, index)
    if offer.model is Model.ON_DEMAND and draft.seen.spec and draft.seen.spec.policy != "on-demand":
        draft.bout("no spot in the zone")
    key = f"r{index}.a{attempt}"
    draft.log(Event.INTENT, key, rank=index, slot=slot, price=offer.price, cause=cause, detail=_why(draft, offer))


def _why(draft: Draft, offer: Offer) -> str:
    """Why this offer, for people: in the ledger, and in what ``status`` shows of it."""
    return offer.node or draft.whys.get(offer.key(), "").partition(": ")[2]


def _cause(rank: Rank, which: str, offer: Offer) -> str:
    if which == "cur":
        return rank.cause
    if rank.cur is not None and ends.planned(rank.cur):
        return f"swap at {ends.CAUSE}"
    if rank.cur is not None and rank.cur.notice is not None:
        return "loss" if rank.cur.cut else "notice"
    if rank.wish == stragglers.WISH:
        return stragglers.CAUSE
    return SWAP if offer.model is Model.SPOT and rank.wish == "spot" else "swap"


# -- the allocation document


def plan(draft: Draft) -> tuple[Alloc | None, tuple[Entry, ...]]:
    """The allocation after this pass, if it changes, and GONE for every machine whose slot is given back."""
    drop = [grant for grant in draft.view.own_grants() if _over(draft, grant)]
    if not drop and not draft.wanted:
        return None, ()
    return alloc.change(draft.seen.alloc, draft.wanted, drop), tuple(_gone(draft, grant) for grant in drop)


def _gone(draft: Draft, grant: Grant) -> Entry:
    """With the times that the cloud bills, where it tells them: this look is up to a minute late."""
    ran = draft.view.ran.get((grant.rank, grant.attempt)) if alloc.node_of(grant) is None else None
    return Entry(
        at=draft.now,
        id=f"{Event.GONE.value}.r{grant.rank}.a{grant.attempt}",
        event=Event.GONE,
        gen=draft.record.gen,
        rank=grant.rank,
        attempt=grant.attempt,
        pool=alloc.pool_of(grant),
        detail=grant.resource,
        started=(ran.started or None) if ran else None,
        ended=(ran.ended or None) if ran else None,
    )


def _over(draft: Draft, grant: Grant) -> bool:
    """Its attempt is not live, and the machine is gone, or the static node said so or was removed from the stack."""
    live = [s.attempt for ranks in (draft.before.ranks, draft.ranks) for s in live_slots(ranks, grant.rank)]
    ended = draft.before.phase in (Phase.END, Phase.DONE)
    if grant.attempt in live or (grant.attempt > _written_top(draft, grant) and not ended):
        return False
    facts = draft.view.facts.get((grant.rank, grant.attempt), ())
    node = alloc.node_of(grant)
    if node is not None:
        return any(fact.kind is Kind.DROPPED for fact in facts) or draft.view.removed(node)
    return draft.view.complete and not draft.view.vms.get((grant.rank, grant.attempt))


def _written_top(draft: Draft, grant: Grant) -> int:
    """As the record has it by now: another round may still write the intent of a number burnt in this draft alone."""
    if grant.rank < len(draft.before.ranks):
        return draft.before.ranks[grant.rank].top
    return 0 if grant.rank < len(draft.ranks) else grant.attempt


def live_slots(ranks: Sequence[Rank], index: int) -> list[Slot]:
    if index >= len(ranks):
        return []
    return [slot for slot in (ranks[index].cur, ranks[index].next) if slot is not None]
