"""Requests machines: chooses the start zone, requests grants, writes intents; burns numbers of unwanted attempts.

Only ``_take`` writes intents. ``plan`` makes the next allocation document: it adds the grants that this pass wants, and
drops the grants whose machine is gone or whose static machine released them.
"""

from __future__ import annotations

from collections.abc import Sequence

from spotkeeper.contract.allocation import Allocation, Grant, resource
from spotkeeper.contract.cloud import Offer
from spotkeeper.contract.facts import Kind
from spotkeeper.contract.job import pools_of
from spotkeeper.contract.ledger import Entry, Event
from spotkeeper.contract.record import BACKUP, PROBE, Node, Phase, Slot, SlotState
from spotkeeper.contract.stack import Model
from spotkeeper.reconcile.decide.checkpoint import location
from spotkeeper.reconcile.decide.draft import Draft
from spotkeeper.reconcile.decide.job import limits
from spotkeeper.reconcile.decide.provisioning import machine_health, offers, pending
from spotkeeper.reconcile.decide.queue import claim

LEAVES_S = 300.0  # longest wait for a lost machine to leave its reserved capacity
SWAP = "swap to spot"  # the cause of an attempt


def step(draft: Draft) -> None:
    """Request machines for vacant nodes, from the highest node down: high nodes get the idle static machines."""
    record = draft.record
    if record.phase is not Phase.RUN or record.leaving or record.pause or draft.snapshot.spec is None:
        return
    if any(draft.nodes[index].cur is None for index in draft.filled()):
        if not draft.snapshot.blind and not claim.bars(draft):  # until its turn, what is idle may change
            _start_zone(draft)
        probing = {grant.node for grant in draft.wanted} | {i for i, node in enumerate(draft.nodes) if node.probing}
        vacant = [i for i in reversed(draft.filled()) if draft.nodes[i].cur is None and not _left_out(draft, i)]
        vacant = [index for index in vacant if index not in probing]  # until the other zone has answered
        capped = [fill(draft, index, "cur") for index in vacant]
        if any(capped):
            pending.forgo(draft)


# -- the zone in which a gang starts, or starts again while it has no data


def _start_zone(draft: Draft) -> None:
    """Choose one zone for the gang, unless it spreads: the zone of an idle static machine or of the best offer.

    Before its first generation the gang has no data, so it can still leave a zone that refused all spot offers, or go
    to an idle static machine or reserved capacity.
    """
    record, spec = draft.record, draft.snapshot.spec
    assert spec is not None
    if spec.spread:
        return
    if not record.gen and not any(node.cur for node in draft.nodes):
        zone = _idle_zone(draft) or _reserved_zone(draft)
        if zone is not None:
            _settle(draft, zone)
            return
    pinned = any(node.cur is not None and node.cur.machine for node in draft.nodes)
    if record.zone is not None and (record.gen or pinned or not _all_refused(draft)):
        return
    zone = _best_zone(draft)
    if zone not in (None, record.zone):
        _settle(draft, zone)


def _best_zone(draft: Draft) -> str | None:
    """Return the zone of the best offer; None: none.

    As with static machines, reserved capacity for only some of the nodes counts only in a zone with other offers.
    """
    found = [choice.offer for choice in offers.of_gang(draft, offers.gang_as_node(draft), None)]
    others = {(pool, offer.zone) for offer in found if offer.model is not Model.RESERVED for pool in ("", offer.pool)}
    spec, zones = draft.snapshot.spec, dict.fromkeys(offer.zone for offer in found)
    groups = [(group.pool, group.nodes) for group in spec.machines] if spec is not None else []

    def whole(zone: str) -> bool:
        each = groups or [("", draft.size())]
        return all((pool, zone) in others or offers.reserved_for(draft, zone, count, pool) for pool, count in each)

    return next(filter(whole, zones), None)


def _idle_zone(draft: Draft) -> str | None:
    """Return the zone of an idle static machine in which a gang without machines should start; None: no change.

    The gang can have chosen its zone while the static machine was busy or down. A zone with too few static machines for
    the whole gang counts only if it has offers for the other nodes, since the gang is bound to its zone from then on.
    """
    record, nodes = draft.record, draft.nodes
    live = [one for one in draft.queries.own_grants() if one.node < len(nodes) and one.attempt > nodes[one.node].top]
    ours = {grant.resource for grant in live}  # granted, but no slot uses them yet
    machines = offers.static(draft, None)
    zones = [o.zone for o in machines if resource(o) in ours or draft.tally.fits(draft.snapshot.stack, o)]
    if record.zone in zones or not zones:
        return None
    refused = set(offers.gang_as_node(draft).refused)
    if record.zone is None or zones.count(zones[-1]) >= draft.size():
        return zones[-1]
    rest = offers.choices(draft, Node(), zones[-1])
    return zones[-1] if any(choice.offer.key() not in refused for choice in rest) else None


def _reserved_zone(draft: Draft) -> str | None:
    """Return the zone of reserved capacity that became idle since a gang without machines chose its zone, or None."""
    chosen = draft.record.zone
    if chosen is None or offers.reserved_for(draft, chosen, 1):
        return None
    zone = _best_zone(draft)
    return zone if zone not in (None, chosen) and offers.reserved_for(draft, zone, 1) else None


def _all_refused(draft: Draft) -> bool:
    for index, node in enumerate(draft.nodes):
        if node.cur is None and node.refused:
            models, pool = (Model.SPOT,) if _spot_somewhere(draft, index) else (), draft.pool(index)
            if not offers.choices(draft, node, draft.record.zone, models, pool):
                return True
    return False


def _spot_somewhere(draft: Draft, index: int) -> bool:
    spec, pool = draft.snapshot.spec, draft.pool(index)
    if spec is None or spec.policy == "on-demand":
        return False
    return bool(offers.choices(draft, draft.nodes[index], None, (Model.SPOT,), pool))


def _settle(draft: Draft, zone: str) -> None:
    """Start the whole gang in this zone.

    If another zone was chosen before, give up the machines and the blank disks there: nodes get new disk numbers.
    """
    moved = draft.record.zone is not None
    draft.set(zone=zone)
    if not moved:
        return
    for index, node in enumerate(draft.nodes):
        if node.cur is not None and node.cur.zone != zone:
            draft.vacate(index, "stockout")
        draft.put(index, disk=node.disk_top + 1, disk_top=node.disk_top + 1, cause="stockout")
    draft.log(Event.MOVE, f"v{draft.before.ver + 1}", cause="stockout", detail=f"starting in {zone} instead")


# -- intents


def _left_out(draft: Draft, index: int) -> bool:
    """Whether a generation trains without this node and will not stop for it, so that its machine would idle."""
    record = draft.record
    trains = record.gen > 0 and not record.stop and index not in record.members
    return trains and draft.nodes[index].cause != "resize" and not location.costs_nothing(draft)


def burn(draft: Draft) -> None:
    """Burn the attempt numbers of grants that are not wanted now (raise ``top``), before the grants are released."""
    for grant in draft.queries.own_grants():
        if grant.node >= len(draft.nodes):
            continue
        node = draft.nodes[grant.node]
        if grant.attempt > node.top and grant not in draft.wanted:
            draft.put(grant.node, top=grant.attempt)


def fill(draft: Draft, index: int, which: str) -> bool:
    """Write an intent if its grant exists, otherwise request the grant. Returns whether only the caps prevent both."""
    if draft.snapshot.draining or draft.snapshot.spec is None:
        return False
    if draft.snapshot.blind:
        why = "waiting: stack/allocation (which job has which machine) is unreadable: run spotkeeper repair allocation"
        pending.say(draft, index, why)
        return False
    if why := limits.bars(draft, index):
        limits.tell(draft, index, why)
        return False
    if why := claim.bars(draft):
        pending.say(draft, index, why)
        return False
    options = offers.open_to(draft, index, which)
    allowed = location.may_take if which == "cur" else location.may_follow
    home = [offer for offer in options if allowed(draft, index, offer.machine)]
    if location.covered(draft) and which == "cur":
        options = [*home, *(offer for offer in options if offer not in home)]  # the others download the checkpoint
    elif home or not location.given_up(draft):
        options = home
    return _take(draft, index, which, options)


def probe(draft: Draft, index: int, options: list[Offer]) -> None:
    """Request a probe: a machine that tests an offer and becomes the node's ``next`` (``zone_probe``)."""
    _take(draft, index, "next", options, PROBE)


def backup(draft: Draft, index: int, options: list[Offer], why: str) -> None:
    """Request a second machine for a node whose machine boots slowly (``replacement``)."""
    if not (draft.snapshot.draining or draft.snapshot.blind or limits.bars(draft, index) or claim.bars(draft)):
        _take(draft, index, "next", options, BACKUP, why)


def _take(draft: Draft, index: int, which: str, options: list[Offer], cause: str = "", why: str = "") -> bool:
    attempt = draft.nodes[index].top + 1
    while (grant := draft.queries.grant(index, attempt)) is not None:
        found = next((offer for offer in options if _permits(grant, offer)), None)
        if found is not None:
            _intent(draft, index, which, attempt, found, cause or _cause(draft.nodes[index], which, found), why)
            return False
        draft.put(index, top=attempt)  # the granted offer is gone: skip this attempt number
        attempt += 1
    later_usd = _later_usd(draft)
    for offer in options:
        if draft.tally.fits(draft.snapshot.stack, offer, later_usd):
            draft.want(Grant.of(draft.record.job, index, attempt, offer, draft.now))
            return False
        if _frees(draft, index, which, offer):
            pending.say(draft, index, f"waiting until its lost machine has left reservation {offer.reservation}")
            return False
    capped = (one for one in options if one.machine is None and not draft.tally.used_up(draft.snapshot.stack, one))
    return pending.nothing(draft, index, {offer.model for offer in capped})


def _permits(grant: Grant, offer: Offer) -> bool:
    return resource(offer) == grant.resource and grant.zone in ("", offer.zone)


def _frees(draft: Draft, index: int, which: str, offer: Offer) -> bool:
    """Whether reserved capacity is used up only until the job's own lost machine is gone, which takes a minute or so.

    A machine bought meanwhile would stay, since jobs on spot do not move to reserved capacity.
    """
    node, stack = draft.nodes[index], draft.snapshot.stack
    late = draft.now >= node.vacant_since + LEAVES_S if which == "cur" else node.cur is None or not node.cur.cut
    if late or not draft.tally.used_up(stack, offer):
        return False
    lost = [one for one in draft.queries.own_grants() if one.resource == resource(offer) and _lost(draft, one)]
    return bool(lost) and not draft.tally.used_up(stack, offer, less=len(lost))


def _lost(draft: Draft, grant: Grant) -> bool:
    """Whether no slot has the machine of this grant any more, or it was found stopping."""
    if grant.node >= len(draft.nodes):
        return True
    live = [slot.attempt for slot in live_slots(draft.nodes, grant.node) if not slot.cut]
    return grant.attempt <= draft.nodes[grant.node].top and grant.attempt not in live


def _later_usd(draft: Draft) -> float:
    """Return what the job's further machines will cost at least, USD per hour, if its team's USD an hour are limited.

    Else the first ones could be so dear that the last ones exceed the limit.
    """
    if draft.team is None or draft.team.max_usd_hour is None:
        return 0.0
    if draft.lacking is None:
        live = [one for one in draft.queries.own_grants() if one.node < len(draft.nodes)]
        live = [one for one in live if one.attempt > draft.nodes[one.node].top]
        draft.lacking = sum(draft.nodes[index].cur is None for index in draft.filled()) - len(live)
    return max(0, draft.lacking - len(draft.wanted) - 1) * claim.least_usd(draft)


def _intent(draft: Draft, index: int, which: str, attempt: int, offer: Offer, cause: str, why: str = "") -> None:
    """Write an intent: it fixes an attempt's zone, model and pool before any call (rule 8 of ``docs/protocol.md``)."""
    slot = Slot(
        attempt=attempt,
        state=SlotState.INTENT,
        pool=offer.pool,
        zone=offer.zone,
        model=offer.model,
        since=draft.now,
        machine=offer.machine,
        reservation=offer.reservation,
        cause=cause,
    )
    if offer.model is Model.ON_DEMAND and draft.snapshot.spec and draft.snapshot.spec.policy != "on-demand":
        draft.fall_back()
    draft.put(index, top=attempt, zone=draft.nodes[index].zone if cause == PROBE else offer.zone)
    draft.install(index, which, slot)
    if offer.machine is None:
        limits.launched(draft, index)
    key = f"r{index}.a{attempt}"
    why = why or _why(draft, offer)
    pool = draft.snapshot.stack.pool(offer.pool)
    listed = pool.prices.get(offer.zone) if pool is not None else None
    prices = {"price": offer.price, "on_demand": listed.on_demand if listed is not None else None}
    if draft.snapshot.stack.regions and draft.snapshot.spec is not None:  # compared with the cheapest of its regions
        same = (one for one in pools_of(draft.snapshot.spec, draft.snapshot.stack) if one.name == offer.pool)
        prices["on_demand"] = min((usd.on_demand for one in same for usd in one.prices.values()), default=None)
    draft.log(Event.INTENT, key, node=index, slot=slot, cause=cause, detail=why, **prices)


def _why(draft: Draft, offer: Offer) -> str:
    return offer.machine or draft.whys.get(offer.key(), "").partition(": ")[2]


def _cause(node: Node, which: str, offer: Offer) -> str:
    if which == "cur":
        return node.cause
    if node.cur is not None and machine_health.planned(node.cur):
        return f"swap at {machine_health.PLANNED_END}"
    if node.cur is not None and node.cur.notice is not None:
        return "loss" if node.cur.cut else "notice"
    if node.replace_reason == machine_health.STRAGGLER:
        return machine_health.STRAGGLER_SWAP
    return SWAP if offer.model is Model.SPOT and node.replace_reason == "spot" else "swap"


# -- the allocation document


def plan(draft: Draft) -> tuple[Allocation | None, tuple[Entry, ...]]:
    """Return the next allocation (None: no change), and a GONE entry for each grant that it drops."""
    drop = [grant for grant in draft.queries.own_grants() if _over(draft, grant)]
    read, new = draft.snapshot.allocation, claim.planned(draft)
    if not drop and not draft.wanted and new is read:
        return None, ()
    if drop:
        new = claim.released(draft, drop)
    return new.changed(draft.wanted, drop), tuple(_gone(draft, grant) for grant in drop)


def _gone(draft: Draft, grant: Grant) -> Entry:
    ran = draft.queries.ran.get((grant.node, grant.attempt)) if grant.machine is None else None
    return Entry(
        at=draft.now,
        id=f"{Event.GONE.value}.r{grant.node}.a{grant.attempt}",
        event=Event.GONE,
        gen=draft.record.gen,
        node=grant.node,
        attempt=grant.attempt,
        pool=grant.pool,
        detail=grant.resource,
        started=(ran.started or None) if ran else None,
        ended=(ran.ended or None) if ran else None,
    )


def _over(draft: Draft, grant: Grant) -> bool:
    """Whether a grant's attempt is over and its machine is gone.

    Only the grant's zone can have it, so a region that does not answer keeps no grant of another one. A static machine
    counts as gone once it dropped the attempt or was removed from the stack.
    """
    live = [s.attempt for nodes in (draft.before.nodes, draft.nodes) for s in live_slots(nodes, grant.node)]
    ended = draft.before.over
    if grant.attempt in live or (grant.attempt > _written_top(draft, grant) and not ended):
        return False
    facts = draft.queries.facts.get((grant.node, grant.attempt), ())
    if grant.machine is not None:
        return any(fact.kind is Kind.DROPPED for fact in facts) or draft.queries.removed(grant.machine)
    answered = draft.queries.complete or grant.zone in draft.queries.answered
    return answered and not draft.queries.vms.get((grant.node, grant.attempt))


def _written_top(draft: Draft, grant: Grant) -> int:
    """Return the node's ``top`` in the record as it was read, before this draft's changes.

    An attempt number that this draft burns can still be used, if another round writes the record before this draft.
    """
    if grant.node < len(draft.before.nodes):
        return draft.before.nodes[grant.node].top
    return 0 if grant.node < len(draft.nodes) else grant.attempt


def live_slots(nodes: Sequence[Node], index: int) -> list[Slot]:
    if index >= len(nodes):
        return []
    return [slot for slot in (nodes[index].cur, nodes[index].next) if slot is not None]
