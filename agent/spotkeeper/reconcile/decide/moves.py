"""A zone move of the whole gang: stop, release, snapshot, new disks, new attempts.

Wanted by a user, when the zone has run dry for a time, or for money's sake (``elsewhere``). The copy of a disk is
made only when nobody holds the old one and both zones answered; numbers of disks are burnt also when a move is given
up.
"""

from __future__ import annotations

from msgspec.structs import replace

from spotkeeper.reconcile import alloc
from spotkeeper.reconcile.decide import kept, offers
from spotkeeper.reconcile.decide.draft import Draft
from spotkeeper.reconcile.decide.seen import admitted
from spotkeeper.spec.cloud import Class, CreateDisk, CreateSnapshot, Offer
from spotkeeper.spec.job import JobSpec
from spotkeeper.spec.ledger import Event
from spotkeeper.spec.model import Model
from spotkeeper.spec.record import Grant, Move, Moved, Phase, Rank, SlotState

COPIES_S = 3600.0  # machines that wait for disks are paid for
NEVER = (Class.PERMANENT, Class.QUOTA, Class.DEAD_KEY)  # of disks' copies: a move that waits for one may wait for ever


def ask(draft: Draft, zone: str | None) -> str:
    """Begin or cancel a move; why not, in one line, or ''."""
    record = draft.record
    if record.move is not None and zone in (None, record.zone):
        cancel(draft)
        return ""
    why = _impossible(draft) or _wrong_zone(draft, zone)
    if not why and zone is not None:
        begin(draft, zone, "asked")
    return why


def _impossible(draft: Draft) -> str:
    spec, record = draft.seen.spec, draft.record
    if spec is None or spec.spread or record.zone is None:
        return "only a gang in one zone can move"
    if any(rank.cur is not None and rank.cur.model is Model.STATIC for rank in draft.ranks):
        return "a static node pins the gang to its zone"
    if record.phase is not Phase.RUN or record.pause:
        return "the job is on hold"
    if node := kept.pinned(draft):
        return f"its newest checkpoint is on static node {node}"
    return f"a move to {record.move.zone} is under way" if record.move is not None else ""


def _wrong_zone(draft: Draft, zone: str | None) -> str:
    spec = draft.seen.spec
    allowed = spec.pools if spec is not None else ()
    pools = [p for p in draft.seen.stack.pools if p.kind == "spot" and (not allowed or p.name in allowed)]
    zones = {zone for pool in pools for zone in pool.zones}
    if zone not in zones:
        return f"{zone} is not one of {', '.join(sorted(zones))}"
    return f"the job is in {zone} already" if zone == draft.record.zone else ""


def begin(draft: Draft, zone: str, cause: str, *, taken: bool = False) -> None:
    """``taken``: the ranks' machines are there already, as ``next`` (``elsewhere``); they wait for the disks."""
    ranks = tuple(replace(rank, next=rank.next if taken else None, wish=None) for rank in draft.ranks)
    draft.set(move=Move(zone, draft.now), ranks=ranks, roll=None, dry_since=None)
    draft.halt(draft.now + (draft.save_s() + draft.times.stop_s if draft.members() else 0.0), "move")
    draft.log(Event.MOVE, f"v{draft.before.ver + 1}", cause=cause, detail=f"{draft.record.zone} -> {zone}")


def cancel(draft: Draft, cause: str = "cancelled", detail: str = "") -> None:
    """Back to where the disks are: members that still are there go on in a new generation.

    Machines in the other zone are nobody's successors: beside a notice they would be taken for such.
    """
    ranks = tuple(replace(rank, copy=None) for rank in draft.ranks)
    draft.set(move=None, ranks=ranks)
    for index in range(len(ranks)):
        draft.put(index, next=None)
    draft.log(Event.MOVE, f"cancel.v{draft.before.ver + 1}", cause=cause, detail=detail)


def step(draft: Draft) -> None:
    record = draft.record
    if record.phase is not Phase.RUN or record.pause:
        return
    if record.move is None:
        _dry(draft)
        return
    if why := _refused(draft):  # asking again gives the same answer, and nothing trains meanwhile
        cancel(draft, "refused", why[:200])
        return
    for index, rank in enumerate(draft.ranks):
        if rank.cur is not None and _may_leave(draft, rank):
            draft.vacate(index, "move")
    if any(rank.cur is not None for rank in draft.ranks) or not _both_answered(draft):
        return
    for index, rank in enumerate(draft.ranks):
        if rank.copy is None:
            draft.put(index, copy=rank.disk_top + 1, disk_top=rank.disk_top + 1)
    if all(copied(draft, index, rank) for index, rank in enumerate(draft.ranks)):
        _arrive(draft)


def _refused(draft: Draft) -> str:
    """Why the disks of a gang that left for money's sake do not follow: the cloud will not copy one, or it takes too
    long (a snapshot that failed is never ready); "" else.
    """
    zone = draft.record.move.zone if draft.record.move is not None else ""
    if not any(rank.next is not None and rank.next.zone == zone for rank in draft.ranks):
        return ""  # there was nothing better at home
    if draft.record.move is not None and draft.now > draft.record.move.since + COPIES_S:
        return f"the disks have not followed within {COPIES_S / 60:.0f} min"
    copies = {(index, rank.copy) for index, rank in enumerate(draft.ranks) if not copied(draft, index, rank)}
    for told in draft.view.results:
        action = told.action
        if told.kind not in NEVER or not isinstance(action, (CreateDisk, CreateSnapshot)):
            continue
        number = action.copy if isinstance(action, CreateSnapshot) else action.number
        made = draft.view.disk(action.rank, number, zone) or (
            isinstance(action, CreateSnapshot) and (action.rank, number) in draft.view.snapshots
        )
        if action.job == draft.record.job and (action.rank, number) in copies and not made:
            return told.detail or told.kind.value
    return ""


def _may_leave(draft: Draft, rank: Rank) -> bool:
    """No member yet, or the generation has stopped after its save (or had its time)."""
    return rank.cur is not None and (rank.cur.state is not SlotState.MEMBER or draft.halted())


def _both_answered(draft: Draft) -> bool:
    move = draft.record.move
    return move is not None and {move.zone, draft.record.zone} <= draft.view.answered


def copied(draft: Draft, index: int, rank: Rank) -> bool:
    """The copy is ready, or there is nothing to copy."""
    move = draft.record.move
    if move is None or rank.copy is None:
        return False
    copy = draft.view.disk(index, rank.copy, move.zone)
    if copy is not None:
        return copy.ready
    return not has_data(draft, index, rank)


def has_data(draft: Draft, index: int, rank: Rank) -> bool:
    return bool(draft.view.disks.get((index, rank.disk))) or (index, rank.copy) in draft.view.snapshots


def _arrive(draft: Draft) -> None:
    move = draft.record.move
    assert move is not None
    ranks = tuple(
        replace(rank, disk=rank.copy if rank.copy is not None else rank.disk, copy=None, zone=move.zone, refused=())
        for rank in draft.ranks
    )
    # A bout is on-demand's for what spot did in the zone that is left.
    bout_until, took = min(draft.record.bout_until, draft.now), Moved(draft.now, max(0.0, draft.now - move.since))
    draft.set(move=None, zone=move.zone, ranks=ranks, bout_until=bout_until, moved=took)
    for index, rank in enumerate(draft.ranks):
        if rank.next is not None and rank.next.zone == move.zone:
            draft.promote(index, "move")
    draft.log(Event.MOVE, f"done.v{draft.before.ver + 1}", cause="move", detail=f"the disks are in {move.zone}")


def _dry(draft: Draft) -> None:
    """The zone has offered nothing for a time: go where there may be room, which the allocation must tell."""
    record, spec = draft.record, draft.seen.spec
    vacant = [draft.ranks[index] for index in draft.filled() if draft.ranks[index].cur is None]
    if not vacant or record.dry_since is None or not record.gen or spec is None or spec.spread:
        return
    if draft.seen.draining or draft.seen.blind:
        return
    if draft.now < record.dry_since + draft.times.dry_s and not offers.out_of_pools(draft):
        return
    if any(admitted(rank.cur) and rank.cur and rank.cur.model is Model.STATIC for rank in draft.ranks):
        return
    if kept.pinned(draft) or (not record.stop and not kept.costs_nothing(draft)):
        return
    here = record.zone
    refused = tuple({key for rank in draft.ranks for key in rank.refused})
    probe = Rank(refused=refused, refused_at=max(rank.refused_at for rank in draft.ranks))
    found = [choice.offer for choice in offers.choices(draft, probe, None)]
    zones = dict.fromkeys(offer.zone for offer in found if offer.zone != here)  # the best first
    zone = next((zone for zone in zones if _fits(draft, spec, zone, found)), None)
    if zone is not None:
        begin(draft, zone, "stockout")


def _fits(draft: Draft, spec: JobSpec, zone: str, found: list[Offer]) -> bool:
    """Whether the gang may find room there: under the caps, once its own grants are back, and not just refused."""
    warm = [offer for offer in found if offer.zone == zone and not offers.cold(draft, offer)]
    held = alloc.Tally(grant for grant in draft.seen.alloc.grants if grant.job != draft.record.job)
    for index in range(spec.size().min):
        offer = next((offer for offer in warm if held.room(draft.seen.stack, offer)), None)
        if offer is None:
            return False
        held.add(Grant(draft.record.job, index, 0, alloc.resource(offer)))
    return True
