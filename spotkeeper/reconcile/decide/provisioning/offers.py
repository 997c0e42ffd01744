"""Lists the machines that a node may get: offers in the order of ``select()``, and idle static machines.

The functions read a draft and change nothing in it but its cache of ``select()``'s answers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from msgspec.structs import replace

from spotkeeper.contract.allocation import Grant, Tally, resource
from spotkeeper.contract.cloud import Offer, VmStatus
from spotkeeper.contract.job import JobSpec, named_pools, pools_of
from spotkeeper.contract.record import Node, Slot
from spotkeeper.contract.stack import Model, StackState, region_of
from spotkeeper.reconcile.decide.checkpoint import location
from spotkeeper.reconcile.decide.draft import Draft
from spotkeeper.reconcile.decide.job import limits, progress
from spotkeeper.reconcile.select.offers import Need, RankedOffer, Runs, Selection, select
from spotkeeper.reconcile.store.documents import StaticHello

_BY_PRICE = (Model.RESERVED, Model.SPOT, Model.ON_DEMAND)
REPLACED_BY = {"spot": (Model.RESERVED, Model.SPOT), "on-demand": (Model.ON_DEMAND,)}


def open_to(draft: Draft, index: int, which: str) -> list[Offer]:
    """Return the offers for ``cur`` or ``next`` of a node, best first."""
    node, pool = draft.nodes[index], draft.pool(index)
    if which == "cur":
        home = None if draft.snapshot.spec and draft.snapshot.spec.spread else draft.record.zone
        if pool and home is None and not (draft.snapshot.spec and draft.snapshot.spec.spread):
            return []  # no zone has offers for all pools of the mix: see ``of_gang``
        return [*static(draft, home), *_alike(draft, node, choices(draft, node, home_zone(draft, node), pool=pool))]
    assert node.cur is not None
    models = REPLACED_BY.get(node.replace_reason or "", ()) if node.cur.notice is None else ()
    if models == REPLACED_BY["on-demand"]:
        return [*static(draft, node.cur.zone), *cheaper(draft, node, node.cur)]
    found = choices(draft, node, node.cur.zone, models, pool)
    return [*static(draft, node.cur.zone), *_alike(draft, node, found)]


def beside(draft: Draft, index: int) -> list[Offer]:
    """Return offers for a backup of a machine that boots slowly, with the same zone and machine type."""
    node = draft.nodes[index]
    assert node.cur is not None
    kind = draft.types.get(node.cur.pool)
    found = choices(draft, node, node.cur.zone, pool=draft.pool(index))
    return [choice.offer for choice in found if draft.types[choice.offer.pool] == kind]


def _alike(draft: Draft, node: Node, found: Iterable[RankedOffer]) -> list[Offer]:
    """Put offers of the other nodes' machine types first, since all nodes wait for the slowest machine."""
    offers = [choice.offer for choice in found]
    own = draft.types.get(node.cur.pool) if node.cur is not None else None
    ours = {kind for kind, count in draft.kinds.items() if count > (kind == own)} or _one_type(draft, offers)
    return sorted(offers, key=lambda offer: draft.types[offer.pool] not in ours) if ours else offers


def _one_type(draft: Draft, found: list[Offer]) -> set[str]:
    """Choose a machine type for a gang without machines: its last one, else the first that the caps allow all nodes."""
    kinds = dict.fromkeys(draft.types[offer.pool] for offer in found)
    if len(kinds) < 2:
        return set()
    if draft.record.machine_type in kinds:
        return {draft.record.machine_type}
    of_kind = {kind: [offer for offer in found if draft.types[offer.pool] == kind] for kind in kinds}
    return next(({kind} for kind in kinds if fits(draft, draft.size(), of_kind[kind])), set())


def fits(draft: Draft, count: int, options: list[Offer], *, replaces: bool = False) -> bool:
    """Whether the stack's caps have room for ``count`` machines, each from one of these offers.

    A node of a mix counts only offers of its pool. The machines come in addition to the job's machines and intents or,
    with ``replaces``, instead of them.
    """
    job, tops = draft.record.job, [node.top for node in draft.nodes]
    tally = Tally(
        grant
        for grant in draft.snapshot.allocation.grants
        if grant.job != job or not (replaces or (grant.node < len(tops) and grant.attempt > tops[grant.node]))
    )
    for index in range(count):
        own = draft.pool(index)
        fitting = (one for one in options if own in ("", one.pool) and tally.fits(draft.snapshot.stack, one))
        offer = next(fitting, None)
        if offer is None:
            return False
        tally.add(Grant(job, index, 0, resource(offer)))
    return True


def gang_as_node(draft: Draft) -> Node:
    """Return a stand-in node with the refused offers of all nodes of the gang."""
    refused = tuple({key for node in draft.nodes for key in node.refused})
    return Node(refused=refused, refused_at=max((node.refused_at for node in draft.nodes), default=0.0))


def cheaper(draft: Draft, node: Node, slot: Slot) -> list[Offer]:
    """Return the on-demand offers in the machine's zone that cost less than the machine."""
    most = limits.price(draft, slot)
    found = choices(draft, node, slot.zone, REPLACED_BY["on-demand"])
    return [choice.offer for choice in found if choice.offer.price < most]


def home_zone(draft: Draft, node: Node) -> str | None:
    """Return the zone to which a node is bound: its gang's zone, or with ``spread`` its disk's; None: unbound."""
    spec = draft.snapshot.spec
    if spec is not None and spec.spread:
        return node.zone if draft.record.gen else None
    return draft.record.zone


def bound_to(draft: Draft) -> str | None:
    """Return the zone to which data or a static machine binds the gang, whatever its capacity; None: unbound."""
    bound = draft.record.gen or any(node.cur is not None and node.cur.machine for node in draft.nodes)
    return draft.record.zone if bound else None


def out_of_pools(draft: Draft) -> bool:
    """Whether the gang is bound to a zone that was removed from all of its pools."""
    spec, zone = draft.snapshot.spec, bound_to(draft)
    pools = draft.snapshot.stack.pools if spec is None else named_pools(spec, draft.snapshot.stack)
    enough = all if spec is not None and spec.machines else any  # each node of a mix needs its pool
    return zone is not None and not enough(zone in pool.zones for pool in pools)


def choices(
    draft: Draft, node: Node, zone: str | None, models: tuple[Model, ...] = (), pool: str = ""
) -> tuple[RankedOffer, ...]:
    return selection(draft, node, zone, models, pool=pool).choices


def of_gang(draft: Draft, node: Node, zone: str | None) -> tuple[RankedOffer, ...]:
    """Return the offers for the whole gang, the best zone first. ``node``: as ``gang_as_node``.

    A mix starts only in a zone with offers for each of its pools. Zones in which more pools have cheap models come
    first, then those in which the pool that is worst off is better off.
    """
    spec = draft.snapshot.spec
    if spec is None or not spec.machines:
        return choices(draft, node, zone)
    found = [choices(draft, node, zone, pool=group.pool) for group in spec.machines]
    firsts: list[dict[str, int]] = [{} for _ in found]
    for of, first in zip(found, firsts, strict=True):
        for rank, choice in enumerate(of):
            first.setdefault(choice.offer.zone, rank)

    def key(zone: str) -> tuple[int, int, int, str]:
        ranks = [first[zone] for first in firsts]
        dear = sum(_BY_PRICE.index(of[rank].offer.model) for of, rank in zip(found, ranks, strict=True))
        return dear, max(ranks), sum(ranks), zone

    zones = sorted(set.intersection(*map(set, firsts)), key=key)
    return tuple(choice for zone in zones for of in found for choice in of if choice.offer.zone == zone)


def selection(
    draft: Draft,
    node: Node,
    zone: str | None,
    models: tuple[Model, ...] = (),
    runs: Runs | None = None,
    there: frozenset[str] = frozenset(),
    pool: str = "",
) -> Selection:
    """Return ``select()``'s answer, computed once in a pass for all nodes with the same needs.

    Args:
        zone: the only zone allowed; None: all.
        models: the provisioning models allowed; (): those that the job's policy allows.
        runs: the running machine that an offer must improve on; None: no machine runs.
        there: keys of the offers whose probes have said hello.
        pool: the only pool allowed; "": every pool of the job.
    """
    refused = node.refused if draft.now < node.refused_at + draft.times.cold_s else ()
    fallback, left = draft.now < draft.record.fallback_until, on_demand_left(draft)
    max_wait_s = progress.max_wait_s(draft)
    since = 0.0 if max_wait_s is None else progress.waits_since(draft)
    key = (zone, models, refused, fallback, left > 0, runs, there, since, pool)
    if key not in draft.offers:
        draft.offers[key] = _select(
            draft,
            Need(
                now=draft.now,
                zone=zone,
                pool=pool,
                models=models,
                refused=frozenset(refused),
                fallback=fallback,
                on_demand_left=left,
                idle=_idle(draft),
                market=draft.snapshot.market,
                cold_s=draft.times.cold_s,
                salt=draft.record.uid,
                runs=runs,
                work=progress.work(draft),
                move_costs={} if zone is not None else progress.move_costs(draft),
                there=there,
                since=since,
                max_wait_s=max_wait_s,
                hung_s=draft.queries.boot_s,
                save_s=draft.save_s(),
                begin_s=draft.snapshot.begin_s,
            ),
        )
    return draft.offers[key]


def _idle(draft: Draft) -> dict[tuple[str, str], int]:
    """Return how many machines of each reserved capacity no other job has, by its pool and key."""
    job, pools = draft.record.job, [pool for pool in draft.snapshot.stack.pools if pool.reservations]
    grants = draft.snapshot.allocation.grants if pools else ()
    taken = Counter((one.pool, one.reservation) for one in grants if one.job != job)
    return {(pool.name, one.key): one.count - taken[pool.name, one.key] for pool in pools for one in pool.reservations}


def reserved_for(draft: Draft, zone: str, count: int, pool: str = "") -> bool:
    """Whether the idle reserved capacity in this zone has a machine for ``count`` nodes. ``pool``: as for ``Need``."""
    idle, found = _idle(draft), choices(draft, gang_as_node(draft), zone, (Model.RESERVED,), pool)
    return sum(idle[one.offer.pool, f"{zone}/{one.offer.reservation}"] for one in found) >= count


def _select(draft: Draft, need: Need) -> Selection:
    spec = draft.snapshot.spec
    assert spec is not None
    found = select(spec, draft.snapshot.stack, need)
    if need.zone is None and (silent := _silent(draft)):  # a request there is made when it answers, perhaps never
        choices = tuple(one for one in found.choices if region_of(one.offer.zone) not in silent)
        found = Selection(
            choices, found.until, found.leaves, probe=tuple(o for o in found.probe if region_of(o.zone) not in silent)
        )
    draft.whys.update((choice.offer.key(), choice.why) for choice in found.choices)
    return found


def _silent(draft: Draft) -> set[str]:
    """Return the regions of which no zone answered, unless none answered at all."""
    answered = {region_of(zone) for zone in draft.queries.answered}
    return set(draft.snapshot.stack.regions) - answered if answered else set()


def on_demand_left(draft: Draft) -> int:
    spec = draft.snapshot.spec
    limit = spec.max_on_demand if spec and spec.max_on_demand is not None else 1_000_000
    return limit - draft.on_demand


def warm_spot(draft: Draft, index: int) -> bool:
    """Whether the zone of this node's machine has a better spot offer that is not cold."""
    node = draft.nodes[index]
    if node.cur is None or draft.snapshot.spec is None or draft.snapshot.draining:
        return False
    now = progress.runs(draft, node.cur)
    calm = replace(node, refused=())
    found = selection(draft, calm, node.cur.zone, (Model.SPOT,), now, pool=draft.pool(index)).choices
    return any(not cold(draft, choice.offer) for choice in found)


def idle_machine(draft: Draft, index: int) -> bool:
    """Whether the zone of this node's machine has an idle static machine on which the node may train."""
    node = draft.nodes[index]
    if node.cur is None or draft.snapshot.spec is None or draft.snapshot.draining or draft.snapshot.blind:
        return False
    nodes = [offer for offer in static(draft, node.cur.zone) if draft.tally.fits(draft.snapshot.stack, offer)]
    return any(location.may_follow(draft, index, offer.machine) for offer in nodes)


def idle_reservation(draft: Draft, index: int) -> bool:
    """Whether the zone of this node's machine has reserved capacity with an idle machine, which is not cold."""
    node = draft.nodes[index]
    if node.cur is None or draft.snapshot.spec is None or draft.snapshot.draining or draft.snapshot.blind:
        return False
    found = choices(draft, replace(node, refused=()), node.cur.zone, (Model.RESERVED,), draft.pool(index))
    open_ = [choice.offer for choice in found if draft.tally.fits(draft.snapshot.stack, choice.offer)]
    return any(not cold(draft, offer) for offer in open_)


def cold(draft: Draft, offer: Offer) -> bool:
    """Whether the cloud recently refused this offer to any job of the stack."""
    known = draft.queries.known(offer)
    return known is not None and known.denied_within(draft.times.cold_s, draft.now)


def static(draft: Draft, zone: str | None) -> list[Offer]:
    """Return the static machines of a zone (None: of all) that run and said hello, including those granted to a job."""
    spec, queries = draft.snapshot.spec, draft.queries
    assert spec is not None
    boots = {hello.machine: hello.uid for hello in draft.snapshot.hellos}
    out = []
    for offer in static_offers(spec, draft.snapshot.stack, draft.snapshot.hellos, zone):
        vm = queries.static_machines.get(offer.machine or "")
        if vm is not None and vm.status is VmStatus.RUNNING and boots.get(vm.name) == vm.uid:
            out.append(offer)
    return out


def static_offers(
    spec: JobSpec, stack: StackState, hellos: Iterable[StaticHello], zone: str | None
) -> tuple[Offer, ...]:
    """Return the static machines that a job may use and that said hello, sorted by name."""
    up = {hello.machine for hello in hellos}
    out = []
    for pool in pools_of(spec, stack):
        if pool.kind != "static":
            continue
        for machine in pool.machines:
            if machine.name in up and zone in (None, machine.zone):
                price = pool.prices.get(machine.zone)
                out.append(
                    Offer(pool.name, machine.zone, Model.STATIC, price.on_demand if price else 0.0, machine.name)
                )
    return tuple(sorted(out, key=lambda offer: offer.machine or ""))
