"""Reads and writes observations of the market under ``market/``: prices from the cloud, and events of machines.

All of it is advisory: if reading fails, this is logged, the values count as unknown, and the round loses at most two
seconds. A tick or a round calls :func:`read`; :func:`feed` stores what new ledger entries say about the market.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import msgspec
from msgspec.structs import replace

from spotkeeper.contract import codec
from spotkeeper.contract.cloud import Cloud, InsertVm, Result, ResultKind, chances_of
from spotkeeper.contract.ledger import Entry, Event
from spotkeeper.contract.market import HOUR_S, Fate, MarketPast, Observation, PriceRun, Prices, lives
from spotkeeper.contract.stack import Model, PoolState, StackState
from spotkeeper.reconcile.select import zone_history
from spotkeeper.reconcile.store import paths
from spotkeeper.reconcile.store.clock_skew import SKEW_S
from spotkeeper.reconcile.store.documents import OfferHistory, Versioned
from spotkeeper.reconcile.store.objects import StoreError
from spotkeeper.reconcile.store.store import Store

ASK_S = 2.0  # real seconds for all requests of a read
ASKERS = 4  # pools asked in parallel
ASK_EVERY_S = HOUR_S
RECENT_H = 2  # newest hours that each tick reads as observations, not as history: longer than an offer stays cold
FOLD_BACK_H = 72  # earlier hours that are read to make a history if none exists yet
FOLDS = 20  # most pools whose history one read extends

FED = frozenset({Event.ADMITTED, Event.REFUSED, Event.NOTICE, Event.REPRIEVE, Event.LOSS, Event.GONE})

# The field of OfferHistory that a refusal sets, by its cause. A permanent refusal says nothing about the market.
REFUSALS = {ResultKind.CAPACITY.value: "refused_at", ResultKind.QUOTA.value: "quota_at"}

log = logging.getLogger("spotkeeper.market")


def read(store: Store, cloud: Cloud, stack: StackState, now: float) -> tuple[OfferHistory, ...]:
    """Return the observations of all dynamic offers. Called once in a tick or round; never raises."""
    pools = tuple(pool for pool in stack.pools if pool.kind == "spot")
    try:
        prices = _prices(store, cloud, pools, now)
        hours = tuple(int(now // HOUR_S) - back for back in range(RECENT_H))
        observations = store.read_observations(tuple(pool.name for pool in pools), hours)
        pasts = _pasts(store, tuple(pool.name for pool in pools), hours[-1])
    except StoreError as error:
        log.warning("the market's observations could not be read: %s", error)
        return ()
    return offers_seen(pools, prices, observations, now, pasts)


def boots(store: Store, pools: tuple[str, ...], now: float) -> dict[str, float]:
    """Return the median time from a machine's insertion to its hello, seconds, by pool; only pools with known boots.

    Raises:
        StoreError: the bucket failed.
    """
    hours = tuple(int(now // HOUR_S) - back for back in range(RECENT_H))
    pasts, observations = _as_folded(store, pools, hours[-1]), store.read_observations(pools, hours)
    found = {
        pool: zone_history.now(pasts[pool] or MarketPast(pool, 0), observations.get(pool, ()), now)[1] for pool in pools
    }
    return {pool: boots.median_s for pool, boots in found.items() if boots.median_s is not None}


def offers_seen(
    pools: Iterable[PoolState],
    prices: Mapping[str, Prices],
    observations: Mapping[str, tuple[Observation, ...]],
    now: float,
    pasts: Mapping[str, MarketPast] | None = None,
) -> tuple[OfferHistory, ...]:
    """Return for each offer the newest observation of each kind. Pure.

    Offers without observations are left out, and so are zones that no longer belong to their pool.
    """
    out: list[OfferHistory] = []
    for pool in pools:
        seen = _hints(pool, prices.get(pool.name), now)
        for key, changes in _told(observations.get(pool.name, ())):
            offer = seen.get(key) or OfferHistory(pool.name, *key)
            # A time written by a clock that was ahead would count as recent until it is reached.
            newer = {name: at for name, at in changes.items() if getattr(offer, name) < at <= now + SKEW_S}
            seen[key] = replace(offer, **newer)
        past = (pasts or {}).get(pool.name, MarketPast(pool.name, 0))
        watches, boots = zone_history.now(past, observations.get(pool.name, ()), now)
        for zone, watch in watches.items():
            key = (zone, Model.SPOT)
            seen[key] = replace(seen.get(key) or OfferHistory(pool.name, *key), watch=watch)
        booted = {"boot_s": boots.median_s, "slow_boot_s": boots.p95_s}
        if boots.median_s is not None:  # where only on-demand ran, no other observation lasts
            seen = {(zone, Model.SPOT): OfferHistory(pool.name, zone, Model.SPOT) for zone in pool.zones} | seen
        out += (replace(seen[key], **booted) for key in sorted(seen) if key[0] in pool.zones)
    return tuple(out)


def _hints(pool: PoolState, told: Prices | None, now: float) -> dict[tuple[str, Model], OfferHistory]:
    out: dict[tuple[str, Model], OfferHistory] = {}
    if told is None:
        return out
    for zone in pool.zones:
        usd, guess = told.now(now, zone), told.guess(now, zone)
        if usd is not None or guess is not None:
            out[zone, Model.SPOT] = OfferHistory(pool.name, zone, Model.SPOT, price=usd, guess=guess)
    return out


def _pasts(store: Store, pools: tuple[str, ...], hour: int) -> dict[str, MarketPast]:
    """Return each pool's history. At most 20 (``FOLDS``) are extended up to ``hour``, the others stay as stored."""
    found = _as_folded(store, pools, hour)
    due = [pool for pool, past in found.items() if past is None or past.hour < hour]
    folded = {pool: _folded(store, pool, found[pool], hour) for pool in due[:FOLDS]}
    return {pool: past for pool, past in found.items() if past is not None} | folded


def _as_folded(store: Store, pools: tuple[str, ...], hour: int) -> dict[str, MarketPast | None]:
    kept = store.get_all(tuple(map(paths.market_past, pools)))
    return {pool: _kept(data, pool, hour) for pool, data in zip(pools, kept, strict=True)}


def _folded(store: Store, pool: str, past: MarketPast | None, hour: int) -> MarketPast:
    first = max(hour - FOLD_BACK_H, past.hour if past is not None else 0)
    wanted = range(first, hour)
    if len(wanted) > RECENT_H:  # most hours have no object
        there = set(store.list(paths.market_hours(pool)))
        hours = tuple(each for each in wanted if paths.market_hour(pool, each) in there)
    else:
        hours = tuple(wanted)
    folded = zone_history.fold(past or MarketPast(pool, first), store.read_observations((pool,), hours)[pool], hour)
    store.put(paths.market_past(pool), msgspec.json.encode(folded))
    return folded


def _kept(data: bytes | None, pool: str, hour: int) -> MarketPast | None:
    """Decode a stored history; None if it is missing, invalid or later than ``hour`` (its writer's clock was ahead)."""
    try:
        past = None if data is None else codec.decode(data, MarketPast)
    except msgspec.DecodeError as error:
        log.warning("%s is invalid and is rebuilt: %s", paths.market_past(pool), error)
        return None
    if past is not None and (past.pool != pool or past.hour > hour + RECENT_H):
        said = f"it is the history of pool {past.pool} until hour {past.hour}"
        log.warning("%s is invalid and is rebuilt: %s", paths.market_past(pool), said)
        return None
    return past


def _told(observations: tuple[Observation, ...]) -> Iterator[tuple[tuple[str, Model], dict[str, float]]]:
    """Yield what these observations say about offers: (zone, model), and fields of :class:`OfferHistory`.

    The fields have the times of refusals, launches and losses.
    """
    for observation in observations:
        if observation.event is Event.REFUSED and observation.cause in REFUSALS and observation.model is not None:
            yield (observation.zone, observation.model), {REFUSALS[observation.cause]: observation.at}
    newest = {observation.machine: observation.at for observation in observations}
    for life in lives(observations):
        if life.began is not None:
            yield (life.zone, life.model), {"launched_at": life.began}
        if life.fate is not Fate.KEPT:
            yield (life.zone, life.model), {"lost_at": newest[life.machine] if life.ended is None else life.ended}


def refused(market: tuple[OfferHistory, ...], results: Iterable[Result]) -> tuple[OfferHistory, ...]:
    """Return ``market`` with this round's refusals, which the ledger does not have yet. Pure."""
    seen = {(offer.pool, offer.zone, offer.model): offer for offer in market}
    for result in results:
        action = result.action
        if not isinstance(action, InsertVm) or result.kind.value not in REFUSALS:
            continue
        if not action.pool:  # an operation begun by another process does not name its offer
            continue
        key = action.pool, action.zone, action.model
        offer = seen.get(key) or OfferHistory(*key)
        name = REFUSALS[result.kind.value]
        seen[key] = replace(offer, **{name: max(getattr(offer, name), result.at)})
    return tuple(seen[key] for key in sorted(seen))


# -- hints


def _prices(store: Store, cloud: Cloud, pools: tuple[PoolState, ...], now: float) -> dict[str, Prices]:
    """Return the prices by pool. Prices older than an hour are requested from the cloud again, all within ``ASK_S``."""
    known = store.read_prices(tuple(pool.name for pool in pools))
    old = [pool for pool in pools if pool.name not in known or abs(now - known[pool.name].value.asked) >= ASK_EVERY_S]
    found = {name: one.value for name, one in known.items()}
    if old:
        ends = time.monotonic() + ASK_S
        with ThreadPoolExecutor(min(ASKERS, len(old))) as threads:
            asked = threads.map(lambda pool: _ask(store, cloud, pool.name, known.get(pool.name), now, ends), old)
            found.update({prices.pool: prices for prices in asked if prices is not None})
    return found


def _ask(
    store: Store, cloud: Cloud, pool: str, known: Versioned[Prices] | None, now: float, ends: float
) -> Prices | None:
    """Request a pool's prices from the cloud, unless another process is doing so.

    The request is recorded before it is sent. So a cloud that refuses, throttles or does not answer also gets at most
    one request an hour, and its earlier answer stays. If no time is left for a pool, the next read requests its prices.
    """
    if time.monotonic() >= ends:
        return None
    noted = replace(known.value, asked=now) if known else Prices(pool, asked=now)
    token = store.cas_prices(noted, known.token if known else "")
    if token is None:
        return None
    told = cloud.price_history(pool, _left(ends))
    guessed = chances_of(cloud, pool, _left(ends))
    if not told and guessed is None:
        return noted
    prices = replace(noted, guesses=guessed or noted.guesses)
    if told:
        prices = replace(prices, told=now, runs=_merged(noted.runs, told))
    store.cas_prices(prices, token)
    return prices


def _left(ends: float) -> float:
    return max(0.0, ends - time.monotonic())


def _merged(old: tuple[PriceRun, ...], told: tuple[PriceRun, ...]) -> tuple[PriceRun, ...]:
    """Merge old and new prices. In each zone, an old price is dropped if it is not older than the first new price."""
    first: dict[str, float] = {}
    for run in told:
        first.setdefault(run.zone, run.start)
    kept = [run for run in old if run.start < first.get(run.zone, float("inf"))]
    return tuple(sorted((*kept, *told), key=lambda run: run.start))


# -- what happens to machines


def feed(store: Store, job: str, entries: Iterable[Entry]) -> bool:
    """Store each observation in these ledger entries once. Returns whether all are stored."""
    kept = True
    for (pool, hour), observations in observations_of(job, entries).items():
        try:
            kept = store.add_observations(pool, hour, tuple(observations)) and kept
        except StoreError as error:
            log.warning("market of pool %s: %s", pool, error)
            kept = False
    return kept


def observations_of(job: str, entries: Iterable[Entry]) -> dict[tuple[str, int], list[Observation]]:
    """Return the observations in ledger entries, by pool and hour. Pure.

    Static machines are left out, and a reboot does not count as a second launch.
    """
    out: dict[tuple[str, int], list[Observation]] = defaultdict(list)
    for entry in entries:
        if entry.event not in FED or entry.node is None or entry.attempt is None or not entry.pool:
            continue
        again = entry.event is Event.ADMITTED and ".b" in entry.id
        if again or entry.model is Model.STATIC:
            continue
        machine = f"{job}-n{entry.node}-a{entry.attempt}"
        observation = Observation(
            machine, entry.event, entry.at, entry.zone or "", entry.model, entry.cause or "", entry.started
        )
        out[entry.pool, int(entry.at // HOUR_S)].append(observation)
    return out
