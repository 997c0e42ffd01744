"""A gang that had better be elsewhere: spot is there and it pays for on-demand, or spot is much cheaper there.

What runs is given up for nothing that is not there yet. Each rank gets a machine there beside the one that trains:
``next``, which looks (``Rank.looks``), is no successor and stops nothing. When all of them have said hello the gang
moves to that zone, and they wait for its disks; in its own zone, in another pool, they become successors. When one is
refused, or anything else is the matter, all are given back, and training has not noticed. Where it is only worth
knowing whether spot is there, one rank's machine looks, and goes.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from spotkeeper.reconcile import alloc
from spotkeeper.reconcile.decide import course, fuses, grants, kept, moves, offers
from spotkeeper.reconcile.decide.draft import Draft
from spotkeeper.reconcile.decide.seen import admitted
from spotkeeper.reconcile.select import Selection
from spotkeeper.spec.cloud import Offer
from spotkeeper.spec.model import Model
from spotkeeper.spec.record import Grant, Look, Rank, SlotState

LOOK_S = 1800.0  # a zone is not asked again sooner; as ``select_plan.Rule.probe_every_h``
POLICIES = ("balanced", "spot")
SELDOM = 6  # times twice as long
STAY = 10.0  # times as long as a move took: prices that go up and down must not keep a gang on its way
SHARE = 0.5  # of the launches that an hour allows: the rest is for machines that are needed


def settle(draft: Draft) -> None:
    """Before needs are looked at: what became of machines that look."""
    looking = [index for index in range(len(draft.ranks)) if draft.ranks[index].looks]
    if not looking:
        return
    slots = [slot for index in looking if (slot := draft.ranks[index].next) is not None]
    whole = len(looking) == draft.size()
    sent = [look.machines for look in draft.record.looked[-1:]]
    if sent != [len(looking)] or not _calm(draft):
        _give_back(draft, looking)
    elif all(slot.state is not SlotState.INTENT for slot in slots):
        zone, key = slots[0].zone, course.key(slots[0])
        answered = {zone, draft.record.zone} <= draft.view.answered  # else the disks could not follow yet
        if whole and answered and any(choice.offer.key() == key for choice in _found(draft, frozenset({key})).choices):
            _take(draft, zone, looking)
        elif answered or draft.now >= max(slot.since for slot in slots) + draft.times.settle_s:
            _give_back(draft, looking)


def step(draft: Draft) -> None:
    """After them: if nobody needs or wishes for anything."""
    if any(rank.wish is not None or rank.looks for rank in draft.ranks) or not _calm(draft):
        return
    found = _found(draft)
    if found.leaves and _leave_spot(draft):
        return
    everyone, anyone = list(draft.filled()), list(draft.filled()[:1])
    good = _elsewhere(draft, (choice.offer for choice in found.choices))
    probes = (offer for offer in found.look if offer.zone != draft.record.zone)
    for offer, ranks in (*((o, everyone) for o in good), *((o, anyone) for o in probes)):
        if _due(draft, offer, ranks) and _room(draft, offer, ranks):
            _look(draft, offer, ranks)
            return


def _calm(draft: Draft) -> bool:
    """Whether the whole gang trains, and may leave its zone without losing work or what binds it there."""
    record, spec = draft.record, draft.seen.spec
    if spec is None or spec.spread or spec.policy not in POLICIES or record.zone is None or not record.gen:
        return False
    if record.stop or record.roll or record.pause or record.move or draft.seen.draining or draft.seen.blind:
        return False
    if draft.now < record.gen_since + draft.times.settle_s or len(draft.members()) < draft.size():
        return False
    if record.moved is not None and draft.now < record.moved.at + STAY * record.moved.s:
        return False
    members = [slot for _, slot in draft.members()]
    if any(slot.model is Model.STATIC or slot.notice is not None or slot.ends is not None for slot in members):
        return False
    return all(map(admitted, members)) and kept.costs_nothing(draft) and kept.pinned(draft) is None


def _found(draft: Draft, there: frozenset[str] = frozenset()) -> Selection:
    """Spot in all zones, against what the gang has: on-demand, if none of it is on spot."""
    index, slot = next(((n, s) for n, s in draft.members() if s.model is Model.SPOT), draft.members()[0])
    rank = replace(draft.ranks[index], refused=())
    return offers.selection(draft, rank, None, (Model.SPOT,), course.runs(draft, slot), there)


def _elsewhere(draft: Draft, good: Iterator[Offer]) -> Iterator[Offer]:
    """The best first. From on-demand, as good a one at home comes by a swap (``needs``), unless a bout is on there.

    A gang on spot keeps its machine type: nobody knows how much less a cheaper one does of its work.
    """
    ours = {draft.types.get(slot.pool) for _, slot in draft.members() if slot.model is Model.SPOT}
    if ours:
        yield from (offer for offer in good if draft.types[offer.pool] in ours)
        return
    for offer in good:
        if offer.zone != draft.record.zone:
            yield offer
        elif draft.now >= draft.record.bout_until:
            return


def _due(draft: Draft, offer: Offer, ranks: list[int]) -> bool:
    """Whether nobody has asked there for a time: this job for as many, or any job of the stack that was refused.

    Ever more seldom after moves that came to nothing: each has burnt the number of a disk, and stood still for it.
    """
    failed = max(rank.disk_top - rank.disk for rank in draft.ranks)
    asked = [look.at for look in draft.record.looked if look.zone == offer.zone and look.machines >= len(ranks)]
    for seen in draft.seen.market:
        if (seen.pool, seen.zone, seen.model) == (offer.pool, offer.zone, offer.model) and seen.refused_at > 0:
            asked.append(seen.refused_at)
    return all(draft.now - at >= LOOK_S * 2.0 ** min(failed, SELDOM) for at in asked)


def _room(draft: Draft, offer: Offer, ranks: list[int]) -> bool:
    """Whether caps and fuses let these have one more machine each, beside all that there is."""
    if not _spare(draft, ranks):
        return False
    ours = {index: draft.ranks[index].top for index in ranks}
    of = draft.record.job
    held = alloc.Tally(g for g in draft.seen.alloc.grants if g.job != of or g.attempt <= ours.get(g.rank, g.attempt))
    for index in ranks:
        if fuses.bars(draft, index) or not held.room(draft.seen.stack, offer):
            return False
        held.add(Grant(of, index, 0, alloc.resource(offer)))
    return True


def _spare(draft: Draft, ranks: list[int]) -> bool:
    """Whether the launch fuse keeps its larger part for machines that are needed."""
    of, times, size = draft.record.fuses, draft.times, len(draft.ranks)
    if draft.now >= of.hour + fuses.HOUR_S:
        return True
    mine = max(draft.ranks[index].launches for index in ranks) + 1
    every = sum(rank.launches for rank in draft.ranks) + len(ranks)
    return mine <= SHARE * times.launches_rank and every <= SHARE * (times.launches_rank + times.launches_job * size)


def _look(draft: Draft, offer: Offer, ranks: list[int]) -> None:
    for index in ranks:
        grants.look(draft, index, offer)
    if any(draft.ranks[index].next is None for index in ranks):  # the grants come first
        _give_back(draft, ranks)
        return
    others = tuple(look for look in draft.record.looked if look.zone != offer.zone or look.machines > len(ranks))
    draft.set(looked=(*others, Look(offer.zone, draft.now, len(ranks))))


def _take(draft: Draft, zone: str, ranks: list[int]) -> None:
    """All have what they looked for, and take it."""
    home = zone == draft.record.zone
    for index in ranks:
        draft.put_slot(index, "next", cause=grants.SWAP if home else "move")
        draft.put(index, wish="spot" if home else None)
    if not home:
        moves.begin(draft, zone, "cheaper", taken=True)


def _give_back(draft: Draft, ranks: list[int]) -> None:
    for index in ranks:
        draft.put(index, next=None, wish=None)


def _leave_spot(draft: Draft) -> bool:
    """Spot costs more than on-demand by now; each rank that is on it gets a successor, if all of them may have one."""
    spec, spot = draft.seen.spec, {index: slot for index, slot in draft.members() if slot.model is Model.SPOT}
    ranks = list(spot)
    if not ranks or spec is None or spec.policy == "spot" or offers.on_demand_left(draft) < len(ranks):
        return False
    refused = tuple({key for rank in draft.ranks for key in rank.refused})
    probe = Rank(refused=refused, refused_at=max(rank.refused_at for rank in draft.ranks))
    found = offers.cheaper(draft, probe, min(spot.values(), key=lambda slot: fuses.price(draft, slot)))
    if not any(_room(draft, offer, ranks) for offer in found):
        return False
    for index in ranks:
        draft.put(index, wish="on-demand")
        grants.fill(draft, index, "next")
    if any(draft.ranks[index].next is None for index in ranks):  # as for a look
        _give_back(draft, ranks)
    return True
