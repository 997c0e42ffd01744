"""Which machines a rank may be given: offers of the market, as ``select()`` orders them, and static nodes that idle.

Reads a draft and changes nothing of it but what it remembers of ``select()``'s answers within this pass.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from spotkeeper.reconcile.decide import course, fuses, kept
from spotkeeper.reconcile.decide.draft import Draft
from spotkeeper.reconcile.select import Choice, Need, Runs, Selection, select
from spotkeeper.reconcile.store_api import StaticHello
from spotkeeper.spec.cloud import Offer, VmStatus
from spotkeeper.spec.context import pools_of
from spotkeeper.spec.job import JobSpec
from spotkeeper.spec.model import Model
from spotkeeper.spec.record import Rank, Slot
from spotkeeper.spec.stack import StackState

WISHED = {"spot": (Model.SPOT,), "on-demand": (Model.ON_DEMAND,)}


def open_to(draft: Draft, index: int, which: str) -> list[Offer]:
    rank = draft.ranks[index]
    if which == "cur":
        home = None if draft.seen.spec and draft.seen.spec.spread else draft.record.zone
        return [*static(draft, home), *_alike(draft, rank, choices(draft, rank, home_zone(draft, rank)))]
    assert rank.cur is not None
    models = WISHED.get(rank.wish or "", ()) if rank.cur.notice is None else ()
    if models == WISHED["on-demand"]:
        return [*static(draft, rank.cur.zone), *cheaper(draft, rank, rank.cur)]
    return [*static(draft, rank.cur.zone), *_alike(draft, rank, choices(draft, rank, rank.cur.zone, models))]


def _alike(draft: Draft, rank: Rank, found: Iterable[Choice]) -> list[Offer]:
    """What the rest of the gang is made of first: all wait for the slowest machine, so a slower one is no bargain."""
    offers = [choice.offer for choice in found]
    own = draft.types.get(rank.cur.pool) if rank.cur is not None else None
    ours = {kind for kind, count in draft.kinds.items() if count > (kind == own)}
    return sorted(offers, key=lambda offer: draft.types[offer.pool] not in ours) if ours else offers


def cheaper(draft: Draft, rank: Rank, slot: Slot) -> list[Offer]:
    """On-demand in its zone that costs less than this machine: of another machine type it may cost far more."""
    most = fuses.price(draft, slot)
    found = choices(draft, rank, slot.zone, WISHED["on-demand"])
    return [choice.offer for choice in found if choice.offer.price < most]


def home_zone(draft: Draft, rank: Rank) -> str | None:
    """The zone a rank is bound to: its gang's, or that of its own disk in a job that spreads."""
    spec = draft.seen.spec
    if spec is not None and spec.spread:
        return rank.zone if draft.record.gen else None
    return draft.record.zone


def bound_to(draft: Draft) -> str | None:
    """The zone that the gang cannot leave for lack of capacity there: its data is in it, or a static node of it."""
    held = draft.record.gen or any(rank.cur is not None and rank.cur.node for rank in draft.ranks)
    return draft.record.zone if held else None


def out_of_pools(draft: Draft) -> bool:
    """Whether the gang is bound to a zone that has been taken out of every pool that it may use."""
    spec, zone = draft.seen.spec, bound_to(draft)
    pools = (pool for pool in draft.seen.stack.pools if spec is None or not spec.pools or pool.name in spec.pools)
    return zone is not None and not any(zone in pool.zones for pool in pools)


def choices(draft: Draft, rank: Rank, zone: str | None, models: tuple[Model, ...] = ()) -> tuple[Choice, ...]:
    return selection(draft, rank, zone, models).choices


def selection(
    draft: Draft,
    rank: Rank,
    zone: str | None,
    models: tuple[Model, ...] = (),
    runs: Runs | None = None,
    there: frozenset[str] = frozenset(),
) -> Selection:
    """Once for all ranks that are in the same position. ``runs``: what it is to be better than; ``there``: offers
    whose machines wait."""
    refused = rank.refused if draft.now < rank.refused_at + draft.times.cold_s else ()
    bout, left = draft.now < draft.record.bout_until, on_demand_left(draft)
    max_wait_s = course.max_wait_s(draft)
    since = 0.0 if max_wait_s is None else course.waits_since(draft)
    key = (zone, models, refused, bout, left > 0, runs, there, since)
    if key not in draft.offers:
        draft.offers[key] = _select(
            draft,
            Need(
                now=draft.now,
                zone=zone,
                models=models,
                refused=frozenset(refused),
                bout=bout,
                on_demand_left=left,
                market=draft.seen.market,
                cold_s=draft.times.cold_s,
                salt=draft.record.uid,
                runs=runs,
                work=course.work(draft),
                ways={} if zone is not None else course.ways(draft),
                there=there,
                since=since,
                max_wait_s=max_wait_s,
                hung_s=draft.view.boot_s,
                save_s=draft.save_s(),
                begin_s=draft.seen.begin_s,
            ),
        )
    return draft.offers[key]


def _select(draft: Draft, need: Need) -> Selection:
    spec = draft.seen.spec
    assert spec is not None
    found = select(spec, draft.seen.stack, need)
    draft.whys.update((choice.offer.key(), choice.why) for choice in found.choices)
    return found


def on_demand_left(draft: Draft) -> int:
    spec = draft.seen.spec
    limit = spec.max_on_demand if spec and spec.max_on_demand is not None else 1_000_000
    return limit - draft.on_demand


def warm_spot(draft: Draft, index: int) -> bool:
    """Whether a spot machine can be hoped for in the zone of this rank's machine."""
    rank = draft.ranks[index]
    if rank.cur is None or draft.seen.spec is None or draft.seen.draining:
        return False
    now = course.runs(draft, rank.cur)
    found = selection(draft, replace(rank, refused=()), rank.cur.zone, (Model.SPOT,), now).choices
    return any(not cold(draft, choice.offer) for choice in found)


def idle_node(draft: Draft, index: int) -> bool:
    """Whether a static node idles in the zone of this rank's machine that may take the rank."""
    rank = draft.ranks[index]
    if rank.cur is None or draft.seen.spec is None or draft.seen.draining or draft.seen.blind:
        return False
    nodes = [offer for offer in static(draft, rank.cur.zone) if draft.held.room(draft.seen.stack, offer)]
    return any(kept.may_follow(draft, index, offer.node) for offer in nodes)


def cold(draft: Draft, offer: Offer) -> bool:
    """Whether it was refused to any job of the stack lately."""
    return any(
        (seen.pool, seen.zone, seen.model) == (offer.pool, offer.zone, offer.model)
        and seen.refused_at > 0
        and draft.now - seen.refused_at < draft.times.cold_s
        for seen in draft.seen.market
    )


def static(draft: Draft, zone: str | None) -> list[Offer]:
    """Static nodes of a zone that are listed and running; whom they are granted to is the caller's to look at."""
    spec, view = draft.seen.spec, draft.view
    assert spec is not None
    boots = {hello.node: hello.uid for hello in draft.seen.hellos}
    out = []
    for offer in static_offers(spec, draft.seen.stack, draft.seen.hellos, zone):
        vm = view.nodes.get(offer.node or "")
        if vm is not None and vm.status is VmStatus.RUNNING and boots.get(vm.name) == vm.uid:
            out.append(offer)
    return out


def static_offers(
    spec: JobSpec, stack: StackState, hellos: Iterable[StaticHello], zone: str | None
) -> tuple[Offer, ...]:
    """Static nodes that a job may use and that have said hello, by name."""
    up = {hello.node for hello in hellos}
    out = []
    for pool in pools_of(spec, stack):
        if pool.kind != "static":
            continue
        for node in pool.nodes:
            if node.name in up and zone in (None, node.zone):
                price = pool.prices.get(node.zone)
                out.append(Offer(pool.name, node.zone, Model.STATIC, price.on_demand if price else 0.0, node.name))
    return tuple(sorted(out, key=lambda offer: offer.node or ""))
