"""The zone in which a gang starts, and starts over while it has no data: one for all ranks, unless the job spreads."""

from __future__ import annotations

from spotkeeper.reconcile import alloc
from spotkeeper.reconcile.decide import offers
from spotkeeper.reconcile.decide.draft import Draft
from spotkeeper.spec.ledger import Event
from spotkeeper.spec.model import Model
from spotkeeper.spec.record import Rank


def step(draft: Draft) -> None:
    """One zone for the gang, unless it spreads: a static node's, else that of the best offer.

    Before the first generation there is no data: a zone that refused is left for the next one, and any for a node.
    """
    record, spec = draft.record, draft.seen.spec
    assert spec is not None
    if spec.spread:
        return
    if not record.gen and not any(rank.cur for rank in draft.ranks) and (zone := _idle_zone(draft)) is not None:
        _settle(draft, zone)
        return
    pinned = any(rank.cur is not None and rank.cur.node for rank in draft.ranks)
    if record.zone is not None and (record.gen or pinned or not _all_refused(draft)):
        return
    zone = _best_zone(draft)
    if zone is not None and zone != record.zone:
        _settle(draft, zone)


def _idle_zone(draft: Draft) -> str | None:
    """Where a gang that has nothing yet had better begin: at a static node that idles; None: where it was going to.

    It may have gone where offers are since the node was busy or not up yet. Nodes that do not do for the whole gang
    call it back only while the rest may be had beside them: it is bound to their zone then.
    """
    record, ranks = draft.record, draft.ranks
    live = [one for one in draft.view.own_grants() if one.rank < len(ranks) and one.attempt > ranks[one.rank].top]
    ours = {grant.resource for grant in live}  # granted in this very round: still to be taken
    nodes = offers.static(draft, None)
    zones = [o.zone for o in nodes if alloc.resource(o) in ours or draft.held.room(draft.seen.stack, o)]
    if record.zone in zones or not zones:
        return None
    refused = {key for rank in draft.ranks for key in rank.refused}
    if record.zone is None or zones.count(zones[-1]) >= draft.size():
        return zones[-1]
    rest = offers.choices(draft, Rank(), zones[-1])
    return zones[-1] if any(choice.offer.key() not in refused for choice in rest) else None


def _all_refused(draft: Draft) -> bool:
    """Whether some vacant rank was refused every spot offer of the gang's zone lately."""
    for rank in draft.ranks:
        if rank.cur is None and rank.refused:
            models = (Model.SPOT,) if _spot_somewhere(draft, rank) else ()
            if not offers.choices(draft, rank, draft.record.zone, models):
                return True
    return False


def _spot_somewhere(draft: Draft, rank: Rank) -> bool:
    spec = draft.seen.spec
    return spec is not None and spec.policy != "on-demand" and bool(offers.choices(draft, rank, None, (Model.SPOT,)))


def _best_zone(draft: Draft) -> str | None:
    """The zone of the best offer that no rank was refused."""
    refused = tuple({key for rank in draft.ranks for key in rank.refused})
    at = max((rank.refused_at for rank in draft.ranks), default=0.0)
    probe = Rank(refused=refused, refused_at=at)
    found = offers.choices(draft, probe, None)
    return found[0].offer.zone if found else None


def _settle(draft: Draft, zone: str) -> None:
    """The whole gang starts in this zone; machines and (blank) disks in another are given up, numbers burnt."""
    moved = draft.record.zone is not None
    draft.set(zone=zone)
    if not moved:
        return
    for index, rank in enumerate(draft.ranks):
        if rank.cur is not None and rank.cur.zone != zone:
            draft.vacate(index, "stockout")
        draft.put(index, disk=rank.disk_top + 1, disk_top=rank.disk_top + 1, cause="stockout")
    draft.log(Event.MOVE, f"v{draft.before.ver + 1}", cause="stockout", detail=f"starting in {zone} instead")
