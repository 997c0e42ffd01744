"""A rank for which nothing is to be had: why, said once in the record and the ledger, and since when."""

from __future__ import annotations

from spotkeeper.reconcile.decide import kept, offers
from spotkeeper.reconcile.decide.draft import Draft
from spotkeeper.reconcile.select import time_of_day
from spotkeeper.spec.ledger import Event
from spotkeeper.spec.model import Model
from spotkeeper.spec.record import Rank


def nothing(draft: Draft, index: int, capped: set[Model]) -> bool:
    """Nothing to be had: say so, remember since when, and let cold offers thaw.

    ``capped``: of which models there are offers that nobody refused, but no room under the stack's caps. Whether
    that is all that is in the way.
    """
    rank = draft.ranks[index]
    if rank.cur is not None:
        return False
    if node := kept.bound(draft, index):
        why = kept.only(draft, index)
        say(draft, index, f"waiting for static node {node}: {why}; to go on without it: {draft.record.go_back()}")
        return False
    if not capped and not _buys(draft):
        say(draft, index, "waiting for a static node: other jobs have them, or they are down")
        return False
    sold_out = not capped or (capped == {Model.ON_DEMAND} and _sold_out(draft, rank))
    if not sold_out:
        say(draft, index, "waiting: the stack's pools are at their caps, or the stack at its limits")
        return True
    if not capped and rank.refused and draft.now >= rank.refused_at + draft.times.cold_s:
        draft.put(index, refused=())
    say(draft, index, _no_offers(draft, bool(capped)) + _until(draft, rank))
    if draft.record.dry_since is None:
        draft.set(dry_since=draft.now)
    return False


def say(draft: Draft, index: int, reason: str) -> None:
    if draft.ranks[index].cur is None and draft.record.reason != reason:
        draft.set(reason=reason)
        draft.log(Event.REFUSED, f"wait.v{draft.before.ver + 1}", rank=index, cause="wait", detail=reason)


def on_demand_from(draft: Draft, index: int) -> float | None:
    """Until when on-demand waits for spot, virtual unix seconds; None: it does not."""
    rank = draft.ranks[index]
    return offers.selection(draft, rank, offers.home_zone(draft, rank)).until


def _until(draft: Draft, rank: Rank) -> str:
    """To the minute, so that the reason stays the same while on-demand waits."""
    until = offers.selection(draft, rank, offers.home_zone(draft, rank)).until
    return "" if until is None else f"; on-demand from {time_of_day(until)} at the latest"


def _buys(draft: Draft) -> bool:
    """Whether the job may have machines other than static nodes at all."""
    spec, pools = draft.seen.spec, draft.seen.stack.pools
    return spec is not None and any(
        pool.kind != "static" and (not spec.pools or pool.name in spec.pools) for pool in pools
    )


def _sold_out(draft: Draft, rank: Rank) -> bool:
    """Whether the zone refused this rank spot lately, so that on-demand alone is left."""
    spot = f"/{Model.SPOT.value}"
    return draft.now < rank.refused_at + draft.times.cold_s and any(key.endswith(spot) for key in rank.refused)


def _no_offers(draft: Draft, capped: bool) -> str:
    """No offer is left: all were refused, or a limit leaves none but spot. ``capped``: that limit is the stack's."""
    spec, where = draft.seen.spec, offers.bound_to(draft) or "any zone"
    if offers.out_of_pools(draft):
        return f"waiting: zone {where} is in none of the job's pools any more, so it moves as soon as it can"
    if capped:
        return f"waiting for spot capacity in {where}: the pools' max_on_demand are in use"
    if spec is None or spec.max_on_demand is None or spec.policy == "spot" or offers.on_demand_left(draft) > 0:
        return f"waiting for capacity in {where}"
    if spec.policy == "on-demand":
        return f"waiting: the job's own max_on_demand is {spec.max_on_demand}"
    return f"waiting for spot capacity in {where}: the job's own max_on_demand is {spec.max_on_demand}"
