"""A gang that had better be in another zone: spot is there and it pays for on-demand, or spot is much cheaper there.

What runs is given up for a move, before anything of the other zone is had. So a zone is left only for one where a
machine of the same offer is, or has just been. Where nobody has been for a time, one machine goes to look: ``next`` of
one rank, in a zone that is not its gang's. It never trains. It is given back as soon as it has said hello; where it is
refused that costs nothing. What it came to is in ``market/`` then, for every job of the stack.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from spotkeeper.reconcile.decide import course, grants, kept, moves, offers
from spotkeeper.reconcile.decide.draft import Draft
from spotkeeper.reconcile.decide.seen import admitted
from spotkeeper.reconcile.select import Selection
from spotkeeper.spec.cloud import Offer
from spotkeeper.spec.model import Model
from spotkeeper.spec.record import LOOK, Rank, SlotState

SURE_S = 900.0  # a zone in which a machine was so lately is known to have some
LOOK_S = 1800.0  # one in which somebody asked so lately is not asked again; as ``select_plan.Rule.probe_every_h``
POLICIES = ("balanced", "spot")


def settle(draft: Draft) -> None:
    """Before needs are looked at: what became of a machine that looks."""
    for index, rank in enumerate(draft.ranks):
        if rank.wish == LOOK:
            _looks(draft, index, rank, calm=_calm(draft))
            return


def step(draft: Draft) -> None:
    """After them: if nobody needs or wishes for anything."""
    if any(rank.wish is not None for rank in draft.ranks) or not _calm(draft):
        return
    index, rank = next((n, rank) for n in draft.filled() if (rank := draft.ranks[n]).cur is not None)
    found = _found(draft, rank)
    if found.leaves and offers.on_demand_left(draft) > 0:
        _wish_for_on_demand(draft)
        return
    for offer in _elsewhere(draft, found):
        if sure(draft, offer):
            if _go(draft, offer, found):
                return
        elif _due(draft, offer):
            _look(draft, index, offer)
            return


def _looks(draft: Draft, index: int, rank: Rank, *, calm: bool) -> None:
    """A machine is on its way to look, is there, or came to nothing."""
    slot = rank.next
    if calm and slot is not None and slot.state is SlotState.INTENT:
        return
    draft.put(index, next=None, wish=None)
    if calm and slot is not None:
        found = _found(draft, rank)
        offer = next((o for o in _elsewhere(draft, found) if (o.pool, o.zone) == (slot.pool, slot.zone)), None)
        if offer is not None:
            _go(draft, offer, found)


def _go(draft: Draft, offer: Offer, found: Selection) -> bool:
    """Move to where spot is known to be, if it pays, and there is room for the gang under the caps."""
    good = [choice.offer for choice in found.choices]
    if offer not in good or not moves.fits(draft, offer.zone, good):
        return False
    moves.begin(draft, offer.zone, "cheaper")
    return True


def _calm(draft: Draft) -> bool:
    """Whether the whole gang trains, and may leave its zone without losing work or what binds it there."""
    record, spec = draft.record, draft.seen.spec
    if spec is None or spec.spread or spec.policy not in POLICIES or record.zone is None or not record.gen:
        return False
    if record.stop or record.roll or record.pause or record.move or draft.seen.draining or draft.seen.blind:
        return False
    if draft.now < record.gen_since + draft.times.settle_s or len(draft.members()) < draft.size():
        return False
    members = [slot for _, slot in draft.members()]
    if any(slot.model is Model.STATIC or slot.notice is not None or slot.ends is not None for slot in members):
        return False
    return all(map(admitted, members)) and kept.costs_nothing(draft) and kept.pinned(draft) is None


def _found(draft: Draft, rank: Rank) -> Selection:
    """Spot in all zones, against what the gang has: on-demand, if none of it is on spot."""
    members = [slot for _, slot in draft.members()]
    slot = next((slot for slot in members if slot.model is Model.SPOT), members[0])
    return offers.selection(draft, replace(rank, refused=()), None, (Model.SPOT,), course.runs(draft, slot))


def _elsewhere(draft: Draft, found: Selection) -> Iterator[Offer]:
    """The best first. As good a one at home comes by a swap (``needs``), unless a bout of on-demand is on there."""
    home, bout = draft.record.zone, draft.now < draft.record.bout_until
    for choice in found.choices:
        if choice.offer.zone != home:
            yield choice.offer
        elif not bout:
            return
    yield from (offer for offer in found.look if offer.zone != home)


def sure(draft: Draft, offer: Offer) -> bool:
    """Whether a machine of this offer is there, or was until just now, and none has been refused since."""
    for seen in draft.seen.market:
        if (seen.pool, seen.zone, seen.model) == (offer.pool, offer.zone, offer.model) and seen.watch is not None:
            at = seen.watch.seen_h * 3600.0
            return bool(seen.watch.up) and seen.refused_at <= at and abs(draft.now - at) <= SURE_S
    return False


def _due(draft: Draft, offer: Offer) -> bool:
    """Whether nobody has asked there for a time: this job, or any job of the stack that was refused."""
    asked = [at for zone, at in draft.record.looked if zone == offer.zone]
    for seen in draft.seen.market:
        if (seen.pool, seen.zone, seen.model) == (offer.pool, offer.zone, offer.model) and seen.refused_at > 0:
            asked.append(seen.refused_at)
    return all(draft.now - at >= LOOK_S for at in asked)


def _look(draft: Draft, index: int, offer: Offer) -> None:
    draft.put(index, wish=LOOK)
    grants.send(draft, index, offer)
    if draft.ranks[index].next is None:  # it waits for its grant, or nothing may be asked for
        draft.put(index, wish=None)
        return
    others = tuple((zone, at) for zone, at in draft.record.looked if zone != offer.zone)
    draft.set(looked=(*others, (offer.zone, draft.now)))


def _wish_for_on_demand(draft: Draft) -> None:
    """Spot costs more than on-demand by now; each rank that is on it gets a successor."""
    for index, slot in draft.members():
        if slot.model is Model.SPOT:
            draft.put(index, wish="on-demand", refused=())
