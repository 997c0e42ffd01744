"""Probes zones in which a gang would do better: spot for one on on-demand or without machines, or much cheaper spot.

A training machine is never given up for a machine that does not exist yet. So each node first gets a probe as its
``next``, while the gang trains on. When all probes have said hello, the gang moves to their zone, where they wait for
the disks; probes in the gang's own zone (another pool) become replacements. If a probe is refused or another event
comes first, all probes are released, and training is not affected. If the gang only wants to learn whether a zone has
capacity, a single node gets a probe.

A gang of a job with several regions that lost all machines, or has a notice for each, probes other zones too, once its
own has no spot: before it buys on-demand there, and before its disks leave, since a zone that refuses would have cost a
copy of them.

A user's move (``Record.asked_zone``) is probed in the same way, but its offers need not be better than what the gang
has. A gang on spot does not move to on-demand.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from spotkeeper.contract.cloud import Offer
from spotkeeper.contract.record import SlotState, ZoneProbe, ZoneRequest
from spotkeeper.contract.stack import Model
from spotkeeper.reconcile.decide.checkpoint import location
from spotkeeper.reconcile.decide.draft import Draft
from spotkeeper.reconcile.decide.gang import zone_move
from spotkeeper.reconcile.decide.job import limits, progress
from spotkeeper.reconcile.decide.provisioning import offers, replacement, reservations
from spotkeeper.reconcile.decide.queue import claim
from spotkeeper.reconcile.decide.snapshot import admitted
from spotkeeper.reconcile.select.offers import Selection

PROBE_EVERY_S = 1800.0  # interval of a zone's probes; equals ``rule.Rule.probe_every_h``
POLICIES = ("balanced", "spot")
ASKED_S = 1800.0  # a user's move ends if the gang has no machines there after so long
SELDOM = 6  # number of times the interval may double
PAID = (Model.STATIC, Model.RESERVED)  # machines that cost nothing more: no gang leaves them for cheaper ones
STAY = 10.0  # minimum stay in a zone, in durations of the last move, so that price swings do not cause repeated moves


def settle(draft: Draft) -> None:
    """Use or release the probes, before replacements are considered."""
    probing = [index for index in range(len(draft.nodes)) if draft.nodes[index].probing]
    if not probing:
        return
    slots = [slot for index in probing if (slot := draft.nodes[index].next) is not None]
    sent = [probe.machines for probe in draft.record.probes[-1:]]
    lost, asked = _lost_all(draft), draft.record.asked_zone
    wanted = asked is not None and asked.covers(slots[0].zone) and _may_go(draft)
    if sent != [len(probing)] or not (lost or wanted or (asked is None and _calm(draft))):
        _give_back(draft, probing)
    elif all(slot.state is not SlotState.INTENT for slot in slots):
        zone, key = slots[0].zone, progress.key(slots[0])
        answered = {zone, draft.record.zone} <= draft.queries.answered  # moving the disks needs both zones
        whole = len(probing) == draft.size()
        better = lost or wanted or any(choice.offer.key() == key for choice in _found(draft, frozenset({key})).choices)
        if whole and answered and better:
            _take(draft, zone, probing)
        elif answered or draft.now >= max(slot.since for slot in slots) + draft.times.settle_s:
            _give_back(draft, probing)


def seek(draft: Draft) -> None:
    """Probe other zones for a gang that lost or loses all machines, before replacements are requested at home."""
    busy = any(node.replace_reason is not None or node.probing for node in draft.nodes)
    if not busy and draft.record.asked_zone is None and _lost_all(draft):
        _seek(draft)


def step(draft: Draft) -> None:
    """Send probes, if no replacement or probe is in progress."""
    if any(node.replace_reason is not None or node.probing for node in draft.nodes):
        return
    if draft.record.asked_zone is not None:
        _go(draft, draft.record.asked_zone)
        return
    if not _calm(draft):
        return
    found = _found(draft)
    if found.leaves and _leave_spot(draft):
        return
    every, first = list(draft.filled()), list(draft.filled()[:1])
    better = _better(draft, (choice.offer for choice in found.choices))
    unknown = (offer for offer in found.probe if offer.zone != draft.record.zone)
    for offer, nodes in (*((o, every) for o in better), *((o, first) for o in unknown)):
        if _due(draft, offer, nodes) and _fits(draft, offer, nodes):
            _probe(draft, [offer], nodes)
            return


def _free(draft: Draft) -> bool:
    """Whether the gang may look for other zones.

    A mix does not: an offer is compared with a single machine type.
    """
    record, spec = draft.record, draft.snapshot.spec
    if spec is None or spec.spread or spec.machines or spec.policy not in POLICIES:
        return False
    if record.zone is None or not record.gen or location.pinned(draft) is not None:
        return False
    return not (record.roll or record.pause or record.move or draft.snapshot.draining or draft.snapshot.blind)


def _lost_all(draft: Draft) -> bool:
    """Whether each machine of a gang with several regions is lost or will go; new ones are requests for spot."""
    spec = draft.snapshot.spec
    if spec is None or len(spec.regions) < 2 or not _free(draft):
        return False
    slots = [draft.nodes[index].cur for index in draft.filled()]
    if None in slots and not draft.record.stop:
        return False  # a smaller gang trains
    stay = [one for one in slots if one is not None and not replacement.goes(one)]
    return len(stay) < len(slots) and all(one.state is SlotState.INTENT and one.model is Model.SPOT for one in stay)


def _seek(draft: Draft) -> None:
    """Probe the best zone with the whole gang, unless spot in its own zone or on-demand anywhere comes first."""
    zone, node, every = draft.record.zone, offers.gang_as_node(draft), list(draft.filled())
    if claim.bars(draft) or any(draft.nodes[index].next is not None for index in every):
        return
    if any(not offers.cold(draft, one.offer) for one in offers.choices(draft, node, zone, (Model.SPOT,))):
        return
    for choice in offers.choices(draft, node, None):
        offer = choice.offer
        if offer.model is not Model.SPOT:
            return
        failed = max(each.disk_top - each.disk for each in draft.nodes)
        soon = failed and not _due(draft, offer, every)  # a failed move kept the gang from training
        if offer.zone != zone and not soon and not offers.cold(draft, offer) and _fits(draft, offer, every):
            _probe(draft, [offer], every)
            return


# -- a move that a user requested


def _go(draft: Draft, asked: ZoneRequest) -> None:
    """Probe the zone that a user requested with the whole gang, or end the request and say why.

    If the caps have no room for the gang twice, the move begins without machines there.
    """
    every = list(draft.filled())
    if why := zone_move.impossible(draft) or _too_late(draft, asked):
        zone_move.refuse(draft, why)
    if why or not _may_go(draft) or draft.wanted or any(node.next is not None for node in draft.nodes):
        return  # also while a node requests another machine: its attempt can have only one grant
    found = _offers_there(draft, asked)
    for options in found.values():
        if not offers.fits(draft, len(every), options):
            continue
        if not any(limits.bars(draft, index) for index in every):
            _probe(draft, options, every)
        return
    full = next((zone for zone, options in found.items() if offers.fits(draft, len(every), options, replaces=True)), "")
    if full:
        zone_move.begin(draft, full, "asked")
    else:
        zone_move.refuse(draft, _not_there(draft, asked, bool(found)))


def _offers_there(draft: Draft, asked: ZoneRequest) -> dict[str, list[Offer]]:
    """Return the offers that the gang would take, by zone, the best zone first."""
    spot = all(slot.model in (Model.SPOT, *PAID) for _, slot in draft.members()) and not draft.record.stop
    out: dict[str, list[Offer]] = {}
    for choice in offers.of_gang(draft, offers.gang_as_node(draft), None):
        zone, model = choice.offer.zone, choice.offer.model
        if asked.covers(zone) and zone != draft.record.zone and not (spot and model is Model.ON_DEMAND):
            out.setdefault(zone, []).append(choice.offer)
    return {zone: found for zone, found in out.items() if zone in draft.queries.answered}


def _too_late(draft: Draft, asked: ZoneRequest) -> str:
    """Return why a request has waited for too long; "": it has not."""
    if draft.now < asked.since + ASKED_S:
        return ""
    return f"the gang had no machine for each node there within {ASKED_S / 60:.0f} min"


def _not_there(draft: Draft, asked: ZoneRequest, offered: bool) -> str:
    if offered:
        return f"the stack's limits have no room for the gang in {asked.zone}"
    refused = any(asked.covers(key.split("/")[1]) for node in draft.nodes for key in node.refused)
    quota = next((node.quota for node in draft.nodes if node.quota), "")
    why = quota or "the cloud has no capacity for all nodes" if refused else "no offer that the job's file allows"
    return f"{asked.zone}: {why}"


def _may_go(draft: Draft) -> bool:
    """Whether the gang trains with machines that stay, or stands still because a node has no machine."""
    record = draft.record
    if record.roll or record.pause or record.move or draft.snapshot.draining or draft.snapshot.blind:
        return False
    if record.stop:
        return any(draft.nodes[index].cur is None for index in draft.filled())
    members = [slot for _, slot in draft.members()]
    return len(members) == len(record.members) and not any(replacement.goes(slot) for slot in members)


# -- moves that nobody requested


def _calm(draft: Draft) -> bool:
    """Whether the whole gang trains undisturbed and may leave its zone without losing work."""
    record = draft.record
    if record.stop or not _free(draft):
        return False
    if draft.now < record.gen_since + draft.times.settle_s or len(draft.members()) < draft.size():
        return False
    if record.moved is not None and draft.now < record.moved.at + STAY * record.moved.s:
        return False
    members = [slot for _, slot in draft.members()]
    if any(slot.model in PAID or slot.notice is not None or slot.ends is not None for slot in members):
        return False
    return all(map(admitted, members)) and location.costs_nothing(draft)


def _found(draft: Draft, there: frozenset[str] = frozenset()) -> Selection:
    """Return the spot offers of all zones that are better than a machine of the gang.

    They are compared with the first member on spot, or if no member is on spot with the first member. ``there``: keys
    of offers whose machines, the probes, have booted and wait.
    """
    index, slot = next(((n, s) for n, s in draft.members() if s.model is Model.SPOT), draft.members()[0])
    node = replace(draft.nodes[index], refused=())
    return offers.selection(draft, node, None, (Model.SPOT,), progress.runs(draft, slot), there)


def _better(draft: Draft, found: Iterator[Offer]) -> Iterator[Offer]:
    """Yield the offers that are worth a move, best first.

    A gang on spot keeps its machine type, since a cheaper type can be much slower. A gang on on-demand ignores all
    offers that are worse than an offer in its own zone, since ``replacement`` swaps its machines for the latter without
    a move. During an on-demand fallback ``replacement`` does not swap, so offers in the gang's own zone do not count.
    """
    ours = {draft.types.get(slot.pool) for _, slot in draft.members() if slot.model is Model.SPOT}
    if ours:
        yield from (offer for offer in found if draft.types[offer.pool] in ours)
        return
    for offer in found:
        if offer.zone != draft.record.zone:
            yield offer
        elif draft.now >= draft.record.fallback_until:
            return


def _due(draft: Draft, offer: Offer, nodes: list[int]) -> bool:
    """Whether to probe an offer: this job has not probed it recently, and it was not refused to any job recently.

    Intervals grow after failed moves, since each failed move stopped training.
    """
    failed = max(node.disk_top - node.disk - node.warms for node in draft.nodes)
    sent = [probe.at for probe in draft.record.probes if probe.zone == offer.zone and probe.machines >= len(nodes)]
    known = draft.queries.known(offer)
    if known is not None and known.denied_at > 0:
        sent.append(known.denied_at)
    return all(draft.now - at >= PROBE_EVERY_S * 2.0 ** min(failed, SELDOM) for at in sent)


def _fits(draft: Draft, offer: Offer, nodes: list[int]) -> bool:
    spare = limits.spare(draft, nodes) and not any(limits.bars(draft, index) for index in nodes)
    return spare and offers.fits(draft, len(nodes), [offer])


def _probe(draft: Draft, options: list[Offer], nodes: list[int]) -> None:
    """Request a machine of one zone for each of the nodes: the first of ``options`` that the caps allow it."""
    for index in nodes:
        reservations.probe(draft, index, [offer for offer in options if draft.pool(index) in ("", offer.pool)])
    if any(draft.nodes[index].next is None for index in nodes):  # the grants come first
        _give_back(draft, nodes)
        return
    zone = options[0].zone
    others = tuple(probe for probe in draft.record.probes if probe.zone != zone or probe.machines > len(nodes))
    draft.set(probes=(*others, ZoneProbe(zone, draft.now, len(nodes))))


def _take(draft: Draft, zone: str, nodes: list[int]) -> None:
    """Use the probes: in the gang's zone as replacements, in another zone by a move."""
    home = zone == draft.record.zone
    for index in nodes:
        draft.put_slot(index, "next", cause=reservations.SWAP if home else "move")
        draft.put(index, replace_reason="spot" if home else None)
    if not home:
        why = "asked" if draft.record.asked_zone is not None else "stockout" if _lost_all(draft) else "cheaper"
        zone_move.begin(draft, zone, why, taken=True)


def _give_back(draft: Draft, nodes: list[int]) -> None:
    for index in nodes:
        draft.put(index, next=None, replace_reason=None)


def _leave_spot(draft: Draft) -> bool:
    """Replace all spot machines by cheaper on-demand ones, if the caps and limits have room for all of them."""
    spec, spot = draft.snapshot.spec, {index: slot for index, slot in draft.members() if slot.model is Model.SPOT}
    nodes = list(spot)
    if not nodes or spec is None or spec.policy == "spot" or offers.on_demand_left(draft) < len(nodes):
        return False
    cheapest = min(spot.values(), key=lambda slot: limits.price(draft, slot))
    found = offers.cheaper(draft, offers.gang_as_node(draft), cheapest)
    if not any(_fits(draft, offer, nodes) for offer in found):
        return False
    for index in nodes:
        draft.put(index, replace_reason="on-demand")
        reservations.fill(draft, index, "next")
    if any(draft.nodes[index].next is None for index in nodes):  # the grants come first
        _give_back(draft, nodes)
    return True
