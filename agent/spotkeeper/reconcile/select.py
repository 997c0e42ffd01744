"""What to ask for next, and where: an ordered list of offers, each with its reason. Pure.

``balanced`` (the default): the cheapest spot first, by price and by what was refused lately; on-demand
only as a bout (many losses, short lives, no spot to be had) and within ``max_on_demand``; never a spot
price at or above the on-demand price of the same machine. ``spot`` and ``on-demand`` buy nothing else.
``shuffle`` mixes the zones once per job, tries them in that order, waits, and starts over.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass

from spotkeeper.reconcile.store_api import OfferSeen, StaticHello
from spotkeeper.spec.cloud import Offer
from spotkeeper.spec.job import JobSpec
from spotkeeper.spec.model import Model
from spotkeeper.spec.stack import PoolState, StackState


@dataclass(frozen=True)
class Choice:
    """An offer and why it stands where it stands, in one line."""

    offer: Offer
    why: str


@dataclass(frozen=True)
class Need:
    """One machine that is wanted, and what is known about the market.

    Attributes:
        zone: the only zone that will do, or None.
        models: what may be bought; () leaves it to the job's policy.
        refused: keys of offers refused since the need arose.
        bout: on-demand is preferred for now, spot comes after it.
        on_demand_left: how many more on-demand machines the job may have.
        cold_s: how long an offer refused to anybody stays cold.
    """

    now: float
    zone: str | None = None
    models: tuple[Model, ...] = ()
    refused: frozenset[str] = frozenset()
    bout: bool = False
    on_demand_left: int = 0
    market: tuple[OfferSeen, ...] = ()
    cold_s: float = 180.0
    salt: str = ""  # of the shuffle: the job's uid


def select(spec: JobSpec, stack: StackState, need: Need) -> tuple[Choice, ...]:
    """Dynamic offers, best first. Refused ones are left out; cold ones come last of their kind of model.

    Under ``balanced`` on-demand comes after warm spot offers (before them in a bout), and spot offers
    that went cold elsewhere come at the very end: asking again is free, waiting is not.
    """
    seen = {(m.pool, m.zone, m.model): m for m in need.market}
    rows: list[tuple[tuple[float, ...], Choice]] = []
    for offer in _offers(spec, stack, need, seen):
        observed = seen.get((offer.pool, offer.zone, offer.model))
        cold = observed is not None and observed.refused_at > 0 and need.now - observed.refused_at < need.cold_s
        rows.append((_order(spec, need, offer, cold), Choice(offer, _why(need, offer, cold))))
    rows.sort(key=lambda row: (row[0], row[1].offer.key()))
    return tuple(choice for _, choice in rows)


def static_offers(
    spec: JobSpec, stack: StackState, hellos: Iterable[StaticHello], zone: str | None
) -> tuple[Offer, ...]:
    """Idle static nodes this job may use, by name. The caller checks that they are listed and not granted."""
    if spec.static == "never":
        return ()
    up = {hello.node for hello in hellos}
    out = []
    for pool in _pools(spec, stack):
        if pool.kind != "static":
            continue
        for node in pool.nodes:
            if node.name in up and zone in (None, node.zone):
                price = pool.prices.get(node.zone)
                out.append(Offer(pool.name, node.zone, Model.STATIC, price.on_demand if price else 0.0, node.name))
    return tuple(sorted(out, key=lambda offer: offer.node or ""))


def _pools(spec: JobSpec, stack: StackState) -> tuple[PoolState, ...]:
    return tuple(pool for pool in stack.pools if not spec.pools or pool.name in spec.pools)


def _models(spec: JobSpec, need: Need) -> tuple[Model, ...]:
    if need.models:
        return need.models
    if spec.policy == "spot":
        return (Model.SPOT,)
    if spec.policy == "on-demand":
        return (Model.ON_DEMAND,)
    return (Model.SPOT, Model.ON_DEMAND)


def _offers(
    spec: JobSpec, stack: StackState, need: Need, seen: dict[tuple[str, str, Model], OfferSeen]
) -> Iterable[Offer]:
    for pool in _pools(spec, stack):
        if pool.kind == "static":
            continue
        for zone in pool.zones:
            if need.zone not in (None, zone):
                continue
            for model in _models(spec, need):
                if model is Model.ON_DEMAND and (need.on_demand_left <= 0 or pool.max_on_demand <= 0):
                    continue
                price = _price(pool, zone, model, seen)
                if price is None:
                    continue
                offer = Offer(pool.name, zone, model, price)
                if offer.key() not in need.refused:
                    yield offer


def _price(pool: PoolState, zone: str, model: Model, seen: dict[tuple[str, str, Model], OfferSeen]) -> float | None:
    """USD per machine-hour, or None where the offer does not exist or costs no less than on-demand."""
    listed = pool.prices.get(zone)
    if listed is None:
        return None
    observed = seen.get((pool.name, zone, model))
    price = observed.price if observed is not None and observed.price is not None else listed.of(model)
    if price is None or (model is Model.SPOT and price >= listed.on_demand):
        return None
    return price


def _order(spec: JobSpec, need: Need, offer: Offer, cold: bool) -> tuple[float, ...]:
    spot = offer.model is Model.SPOT
    if spec.policy == "shuffle":
        return (float(not spot), float(zlib.crc32(f"{need.salt}/{offer.zone}".encode())), offer.price)
    if need.bout:
        return (float(cold), float(spot), offer.price)
    return (float(cold), float(not spot), offer.price)


def _why(need: Need, offer: Offer, cold: bool) -> str:
    where = f"{offer.model.value} in {offer.zone} at ${offer.price:.3f}/h"
    if cold:
        return f"{where}: refused within {need.cold_s:.0f} s, so last"
    if offer.model is Model.ON_DEMAND:
        return f"{where}: a bout of on-demand" if need.bout else f"{where}: if no spot is to be had"
    return f"{where}: after on-demand while the bout lasts" if need.bout else f"{where}: cheapest first"
