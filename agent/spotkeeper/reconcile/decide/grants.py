"""Asking for machines: the grant first, then the intent with its number; what is not wanted is burnt.

``fill`` is the only place where an intent is written. ``plan`` makes the next allocation document: grants
that this pass wants, less those whose machine is gone or whose static node gave its word.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from spotkeeper.reconcile import alloc
from spotkeeper.reconcile.decide import course, ends, fuses, kept, stragglers, whole
from spotkeeper.reconcile.decide.draft import Draft
from spotkeeper.reconcile.select import Choice, Need, Selection, select, static_offers, time_of_day
from spotkeeper.spec.cloud import Offer, VmStatus
from spotkeeper.spec.facts import Kind
from spotkeeper.spec.ledger import Entry, Event
from spotkeeper.spec.model import Model
from spotkeeper.spec.record import Alloc, Grant, Phase, Rank, Slot, SlotState


def step(draft: Draft) -> None:
    """Vacant ranks, the highest first: static nodes fill the highest ranks."""
    if not draft.ranks and draft.seen.spec is not None:
        draft.set(ranks=(Rank(),) * draft.seen.spec.size().max)
    record = draft.record
    if record.phase is not Phase.RUN or record.move is not None or record.pause or draft.seen.spec is None:
        return
    if any(draft.ranks[index].cur is None for index in draft.filled()):
        if not draft.seen.blind:
            _zone(draft)
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
        _wait(draft, index, "waiting: who has which machine (stack/alloc) cannot be read; spotkeeper repair alloc")
        return False
    if why := fuses.bars(draft, index):
        fuses.tell(draft, index, why)
        return False
    options = _options(draft, index, which)
    allowed = kept.may_take if which == "cur" else kept.may_follow
    home = [offer for offer in options if allowed(draft, index, offer.node)]
    if kept.covered(draft) and which == "cur":
        options = [*home, *(offer for offer in options if offer not in home)]  # elsewhere it is fetched from the bucket
    elif home or not kept.given_up(draft):
        options = home
    attempt = draft.ranks[index].top + 1
    while (grant := draft.view.grant(index, attempt)) is not None:
        found = next((offer for offer in options if alloc.resource(offer) == grant.resource), None)
        if found is not None:
            _intent(draft, index, which, attempt, found)
            return False
        draft.put(index, top=attempt)  # no use for it any more: its number is burnt
        attempt += 1
    for offer in options:
        if draft.held.room(draft.seen.stack, offer):
            draft.want(Grant(draft.record.job, index, attempt, alloc.resource(offer), draft.now))
            return False
    return _waiting(draft, index, {offer.model for offer in options if offer.node is None})


def _intent(draft: Draft, index: int, which: str, attempt: int, offer: Offer) -> None:
    """Zone, model, pool and disk are fixed here, before any call (rule 8)."""
    rank = draft.ranks[index]
    cause = _cause(rank, which, offer)
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
    draft.put(index, top=attempt, zone=offer.zone)
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
    return "swap to spot" if offer.model is Model.SPOT and rank.wish == "spot" else "swap"


def _waiting(draft: Draft, index: int, capped: set[Model]) -> bool:
    """Nothing to be had: say so, remember since when, and let cold offers thaw.

    ``capped``: of which models there are offers that nobody refused, but no room under the stack's caps. Whether
    that is all that is in the way.
    """
    rank = draft.ranks[index]
    if rank.cur is not None:
        return False
    if node := kept.bound(draft, index):
        why = kept.only(draft, index)
        _wait(draft, index, f"waiting for static node {node}: {why}; to go on without it: {draft.record.go_back()}")
        return False
    if not capped and not _buys(draft):
        _wait(draft, index, "waiting for a static node: other jobs have them, or they are down")
        return False
    sold_out = not capped or (capped == {Model.ON_DEMAND} and _sold_out(draft, rank))
    if not sold_out:
        _wait(draft, index, "waiting: the stack's pools are at their caps")
        return True
    if not capped and rank.refused and draft.now >= rank.refused_at + draft.times.cold_s:
        draft.put(index, refused=())
    _wait(draft, index, _no_offers(draft, bool(capped)) + _until(draft, rank))
    if draft.record.dry_since is None:
        draft.set(dry_since=draft.now)
    return False


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
    spec, where = draft.seen.spec, _bound_to(draft) or "any zone"
    if out_of_pools(draft):
        return f"waiting: zone {where} is in none of the job's pools any more, so it moves as soon as it can"
    if capped:
        return f"waiting for spot capacity in {where}: the pools' max_on_demand are in use"
    if spec is None or spec.max_on_demand is None or spec.policy == "spot" or _on_demand_left(draft) > 0:
        return f"waiting for capacity in {where}"
    if spec.policy == "on-demand":
        return f"waiting: the job's own max_on_demand is {spec.max_on_demand}"
    return f"waiting for spot capacity in {where}: the job's own max_on_demand is {spec.max_on_demand}"


def on_demand_from(draft: Draft, index: int) -> float | None:
    """Until when on-demand waits for spot, virtual unix seconds; None: it does not."""
    rank = draft.ranks[index]
    return selection(draft, rank, _home_zone(draft, rank)).until


def _bound_to(draft: Draft) -> str | None:
    """The zone that the gang cannot leave for lack of capacity there: its data is in it, or a static node of it."""
    held = draft.record.gen or any(rank.cur is not None and rank.cur.node for rank in draft.ranks)
    return draft.record.zone if held else None


def out_of_pools(draft: Draft) -> bool:
    """Whether the gang is bound to a zone that has been taken out of every pool that it may use."""
    spec, zone = draft.seen.spec, _bound_to(draft)
    pools = (pool for pool in draft.seen.stack.pools if spec is None or not spec.pools or pool.name in spec.pools)
    return zone is not None and not any(zone in pool.zones for pool in pools)


def _until(draft: Draft, rank: Rank) -> str:
    """To the minute, so that the reason stays the same while on-demand waits."""
    until = selection(draft, rank, _home_zone(draft, rank)).until
    return "" if until is None else f"; on-demand from {time_of_day(until)} at the latest"


def _wait(draft: Draft, index: int, reason: str) -> None:
    if draft.ranks[index].cur is None and draft.record.reason != reason:
        draft.set(reason=reason)
        draft.log(Event.REFUSED, f"wait.v{draft.before.ver + 1}", rank=index, cause="wait", detail=reason)


# -- which offers


def _options(draft: Draft, index: int, which: str) -> list[Offer]:
    rank = draft.ranks[index]
    if which == "cur":
        home = None if draft.seen.spec and draft.seen.spec.spread else draft.record.zone
        return [*_static(draft, home), *(choice.offer for choice in choices(draft, rank, _home_zone(draft, rank)))]
    assert rank.cur is not None
    models = (Model.SPOT,) if rank.wish == "spot" and rank.cur.notice is None else ()
    return [*_static(draft, rank.cur.zone), *(choice.offer for choice in choices(draft, rank, rank.cur.zone, models))]


def _home_zone(draft: Draft, rank: Rank) -> str | None:
    """The zone a rank is bound to: its gang's, or that of its own disk in a job that spreads."""
    spec = draft.seen.spec
    if spec is not None and spec.spread:
        return rank.zone if draft.record.gen else None
    return draft.record.zone


def choices(draft: Draft, rank: Rank, zone: str | None, models: tuple[Model, ...] = ()) -> tuple[Choice, ...]:
    return selection(draft, rank, zone, models).choices


def selection(
    draft: Draft, rank: Rank, zone: str | None, models: tuple[Model, ...] = (), *, leaves: bool = False
) -> Selection:
    """Once for all ranks that are in the same position. ``leaves``: spot is to be worth leaving on-demand for."""
    refused = rank.refused if draft.now < rank.refused_at + draft.times.cold_s else ()
    bout, left = draft.now < draft.record.bout_until, _on_demand_left(draft)
    max_wait_s = course.max_wait_s(draft)
    since = 0.0 if max_wait_s is None else course.waits_since(draft)
    key = (zone, models, refused, bout, left > 0, leaves, since)
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
                leaves=leaves,
                work=course.work(draft),
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


def _on_demand_left(draft: Draft) -> int:
    spec = draft.seen.spec
    limit = spec.max_on_demand if spec and spec.max_on_demand is not None else 1_000_000
    return limit - draft.on_demand


def warm_spot(draft: Draft, index: int) -> bool:
    """Whether a spot machine can be hoped for in the zone of this rank's machine."""
    rank = draft.ranks[index]
    if rank.cur is None or draft.seen.spec is None or draft.seen.draining:
        return False
    found = selection(draft, replace(rank, refused=()), rank.cur.zone, (Model.SPOT,), leaves=True).choices
    return any(not cold(draft, choice.offer) for choice in found)


def idle_node(draft: Draft, index: int) -> bool:
    """Whether a static node idles in the zone of this rank's machine that may take the rank."""
    rank = draft.ranks[index]
    if rank.cur is None or draft.seen.spec is None or draft.seen.draining or draft.seen.blind:
        return False
    nodes = [offer for offer in _static(draft, rank.cur.zone) if draft.held.room(draft.seen.stack, offer)]
    return any(kept.may_follow(draft, index, offer.node) for offer in nodes)


def cold(draft: Draft, offer: Offer) -> bool:
    """Whether it was refused to any job of the stack lately."""
    return any(
        (seen.pool, seen.zone, seen.model) == (offer.pool, offer.zone, offer.model)
        and seen.refused_at > 0
        and draft.now - seen.refused_at < draft.times.cold_s
        for seen in draft.seen.market
    )


def _static(draft: Draft, zone: str | None) -> list[Offer]:
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


# -- the gang's zone


def _zone(draft: Draft) -> None:
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
    nodes = _static(draft, None)
    zones = [o.zone for o in nodes if alloc.resource(o) in ours or draft.held.room(draft.seen.stack, o)]
    if record.zone in zones or not zones:
        return None
    refused = {key for rank in draft.ranks for key in rank.refused}
    if record.zone is None or zones.count(zones[-1]) >= draft.size():
        return zones[-1]
    offers = choices(draft, Rank(), zones[-1])
    return zones[-1] if any(choice.offer.key() not in refused for choice in offers) else None


def _all_refused(draft: Draft) -> bool:
    """Whether some vacant rank was refused every spot offer of the gang's zone lately."""
    for rank in draft.ranks:
        if rank.cur is None and rank.refused:
            models = (Model.SPOT,) if _spot_somewhere(draft, rank) else ()
            if not choices(draft, rank, draft.record.zone, models):
                return True
    return False


def _spot_somewhere(draft: Draft, rank: Rank) -> bool:
    spec = draft.seen.spec
    return spec is not None and spec.policy != "on-demand" and bool(choices(draft, rank, None, (Model.SPOT,)))


def _best_zone(draft: Draft) -> str | None:
    """The zone of the best offer that no rank was refused."""
    refused = tuple({key for rank in draft.ranks for key in rank.refused})
    at = max((rank.refused_at for rank in draft.ranks), default=0.0)
    probe = Rank(refused=refused, refused_at=at)
    found = choices(draft, probe, None)
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
