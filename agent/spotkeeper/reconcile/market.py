"""What is known of offers, kept under ``market/``: prices as the cloud tells them, and what machines lived through.

Advisory from end to end: whatever fails here is logged, means "unknown", and delays a round by ``ASK_S`` at
most. :func:`look` reads for a tick or a round, :func:`feed` writes what the ledger has just been told. Nothing
is decided here; ``select`` decides.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import msgspec
from msgspec.structs import replace

from spotkeeper.reconcile import market_past, paths
from spotkeeper.reconcile.skew import SKEW_S
from spotkeeper.reconcile.store_api import Held, OfferSeen, Store, StoreError
from spotkeeper.spec import codec
from spotkeeper.spec.cloud import Class, Cloud, InsertVm, Result, chances_of
from spotkeeper.spec.ledger import Entry, Event
from spotkeeper.spec.market import HOUR_S, Fate, Past, PriceRun, Prices, Sight, lives
from spotkeeper.spec.model import Model
from spotkeeper.spec.stack import PoolState, StackState

ASK_S = 2.0  # real seconds for all questions of a look
ASKERS = 4  # pools at once
ASK_EVERY_S = HOUR_S
LOOK_BACK = 2  # hours of history that are read as they are, each tick: longer than anything stays cold
FOLD_BACK = 72  # hours read for what came before them, where nobody has folded them yet
FOLDS = 20  # pools at a look

FED = frozenset({Event.ADMITTED, Event.REFUSED, Event.NOTICE, Event.REPRIEVE, Event.LOSS, Event.GONE})

REFUSALS = ("capacity", "quota")  # causes; a permanent refusal is no word of the market

log = logging.getLogger("spotkeeper.market")


def look(store: Store, cloud: Cloud, stack: StackState, now: float) -> tuple[OfferSeen, ...]:
    """What is known of every dynamic offer, by name; once a tick, or once for a round of its own. Never raises."""
    pools = tuple(pool for pool in stack.pools if pool.kind == "spot")
    try:
        prices = _prices(store, cloud, pools, now)
        hours = tuple(int(now // HOUR_S) - back for back in range(LOOK_BACK))
        sights = store.read_sights(tuple(pool.name for pool in pools), hours)
        pasts = _pasts(store, tuple(pool.name for pool in pools), hours[-1])
    except StoreError as error:
        log.warning("what is known of the market could not be read: %s", error)
        return ()
    return offers_seen(pools, prices, sights, now, pasts)


def boots(store: Store, pools: tuple[str, ...], now: float) -> dict[str, float]:
    """By pool, how long its machines took from the order to the hello, seconds; of those that anybody saw boot.

    Raises:
        StoreError: the bucket.
    """
    hours = tuple(int(now // HOUR_S) - back for back in range(LOOK_BACK))
    pasts, sights = _as_folded(store, pools, hours[-1]), store.read_sights(pools, hours)
    found = {pool: market_past.now(pasts[pool] or Past(pool, 0), sights.get(pool, ()), now)[1] for pool in pools}
    return {pool: boot_s for pool, boot_s in found.items() if boot_s is not None}


def offers_seen(
    pools: Iterable[PoolState],
    prices: Mapping[str, Prices],
    sights: Mapping[str, tuple[Sight, ...]],
    now: float,
    pasts: Mapping[str, Past] | None = None,
) -> tuple[OfferSeen, ...]:
    """Pure: the newest of each kind, by offer. An offer of which nothing is known is left out.

    A zone that is no more of its pool is passed over, whatever is known of it.
    """
    out: list[OfferSeen] = []
    for pool in pools:
        seen = _hints(pool, prices.get(pool.name), now)
        for key, changes in _told(sights.get(pool.name, ())):
            offer = seen.get(key) or OfferSeen(pool.name, *key)
            # What a clock wrote that was ahead of ours would be "lately" until then.
            newer = {name: at for name, at in changes.items() if getattr(offer, name) < at <= now + SKEW_S}
            seen[key] = replace(offer, **newer)
        past = (pasts or {}).get(pool.name, Past(pool.name, 0))
        watches, boot_s = market_past.now(past, sights.get(pool.name, ()), now)
        for zone, watch in watches.items():
            key = (zone, Model.SPOT)
            seen[key] = replace(seen.get(key) or OfferSeen(pool.name, *key), watch=watch)
        out += (replace(seen[key], boot_s=boot_s) for key in sorted(seen) if key[0] in pool.zones)
    return tuple(out)


def _hints(pool: PoolState, told: Prices | None, now: float) -> dict[tuple[str, Model], OfferSeen]:
    """What the cloud itself says of spot, by zone; a zone of which it says nothing is left out."""
    out: dict[tuple[str, Model], OfferSeen] = {}
    if told is None:
        return out
    for zone in pool.zones:
        usd, guess = told.now(now, zone), told.guess(now, zone)
        if usd is not None or guess is not None:
            out[zone, Model.SPOT] = OfferSeen(pool.name, zone, Model.SPOT, price=usd, guess=guess)
    return out


def _pasts(store: Store, pools: tuple[str, ...], hour: int) -> dict[str, Past]:
    """By pool, what came before ``hour``, folded up to there: by whoever comes first, a few pools at a look.

    Of a pool whose turn has not come what was folded before counts meanwhile.
    """
    found = _as_folded(store, pools, hour)
    due = [pool for pool, past in found.items() if past is None or past.hour < hour]
    folded = {pool: _folded(store, pool, found[pool], hour) for pool in due[:FOLDS]}
    return {pool: past for pool, past in found.items() if past is not None} | folded


def _as_folded(store: Store, pools: tuple[str, ...], hour: int) -> dict[str, Past | None]:
    """By pool, what lies in the bucket. ``hour``: up to which it may be folded by now."""
    kept = store.get_all(tuple(map(paths.market_past, pools)))
    return {pool: _kept(data, pool, hour) for pool, data in zip(pools, kept, strict=True)}


def _folded(store: Store, pool: str, past: Past | None, hour: int) -> Past:
    first = max(hour - FOLD_BACK, past.hour if past is not None else 0)
    wanted = range(first, hour)
    if len(wanted) > LOOK_BACK:  # most of them have nothing
        there = set(store.list(paths.market_hours(pool)))
        hours = tuple(each for each in wanted if paths.market_hour(pool, each) in there)
    else:
        hours = tuple(wanted)
    folded = market_past.fold(past or Past(pool, first), store.read_sights((pool,), hours)[pool], hour)
    store.put(paths.market_past(pool), msgspec.json.encode(folded))
    return folded


def _kept(data: bytes | None, pool: str, hour: int) -> Past | None:
    """None: there is none, or it makes no sense. One of a time to come (a clock had jumped) would hide all of now."""
    try:
        past = None if data is None else codec.decode(data, Past)
    except msgspec.DecodeError as error:
        log.warning("%s makes no sense, and is made anew: %s", paths.market_past(pool), error)
        return None
    if past is not None and (past.pool != pool or past.hour > hour + LOOK_BACK):
        said = f"it is of pool {past.pool}, hour {past.hour}"
        log.warning("%s makes no sense, and is made anew: %s", paths.market_past(pool), said)
        return None
    return past


def _told(sights: tuple[Sight, ...]) -> Iterator[tuple[tuple[str, Model], dict[str, float]]]:
    """What there is to say of offers (zone, model), as fields of :class:`OfferSeen`."""
    for sight in sights:
        if sight.event is Event.REFUSED and sight.cause in REFUSALS and sight.model is not None:
            yield (sight.zone, sight.model), {"refused_at": sight.at}
    newest = {sight.machine: sight.at for sight in sights}
    for life in lives(sights):
        if life.began is not None:
            yield (life.zone, life.model), {"launched_at": life.began}
        if life.fate is not Fate.KEPT:
            yield (life.zone, life.model), {"lost_at": newest[life.machine] if life.ended is None else life.ended}


def refused(market: tuple[OfferSeen, ...], results: Iterable[Result]) -> tuple[OfferSeen, ...]:
    """Pure: the same with refusals of this very round, which the ledger has not told yet."""
    seen = {(offer.pool, offer.zone, offer.model): offer for offer in market}
    for result in results:
        action = result.action
        if not isinstance(action, InsertVm) or result.kind not in (Class.CAPACITY, Class.QUOTA):
            continue
        if not action.pool:  # an operation that another process began: it does not say which offer
            continue
        key = action.pool, action.zone, action.model
        offer = seen.get(key) or OfferSeen(*key)
        seen[key] = replace(offer, refused_at=max(offer.refused_at, result.at))
    return tuple(seen[key] for key in sorted(seen))


# -- hints


def _prices(store: Store, cloud: Cloud, pools: tuple[PoolState, ...], now: float) -> dict[str, Prices]:
    """By pool, as kept; those that are an hour old are asked for anew, all of them within ``ASK_S``."""
    held = store.read_prices(tuple(pool.name for pool in pools))
    old = [pool for pool in pools if pool.name not in held or abs(now - held[pool.name].value.asked) >= ASK_EVERY_S]
    found = {name: one.value for name, one in held.items()}
    if old:
        ends = time.monotonic() + ASK_S
        with ThreadPoolExecutor(min(ASKERS, len(old))) as threads:
            asked = threads.map(lambda pool: _ask(store, cloud, pool.name, held.get(pool.name), now, ends), old)
            found.update({prices.pool: prices for prices in asked if prices is not None})
    return found


def _ask(store: Store, cloud: Cloud, pool: str, held: Held[Prices] | None, now: float, ends: float) -> Prices | None:
    """Ask the cloud, if nobody else has just begun to: the question is noted before it is put.

    So a cloud that refuses, throttles or does not answer is asked once an hour as well, and what it told before
    stays. A pool for which no time is left is not asked, and its turn comes with the next look.
    """
    if time.monotonic() >= ends:
        return None
    noted = replace(held.value, asked=now) if held else Prices(pool, asked=now)
    token = store.cas_prices(noted, held.token if held else "")
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
    """What is told now of a zone goes before what was told earlier, and what is told no more stays."""
    first: dict[str, float] = {}
    for run in told:
        first.setdefault(run.zone, run.start)
    kept = [run for run in old if run.start < first.get(run.zone, float("inf"))]
    return tuple(sorted((*kept, *told), key=lambda run: run.start))


# -- what machines live through


def feed(store: Store, job: str, entries: Iterable[Entry]) -> bool:
    """Note what ledger entries say of offers. Whether all of it is kept; what is repeated is kept once."""
    kept = True
    for (pool, hour), sights in sights_of(job, entries).items():
        try:
            kept = store.add_sights(pool, hour, tuple(sights)) and kept
        except StoreError as error:
            log.warning("market of pool %s: %s", pool, error)
            kept = False
    return kept


def sights_of(job: str, entries: Iterable[Entry]) -> dict[tuple[str, int], list[Sight]]:
    """Pure: by pool and hour. Static nodes are no offers, and a machine that boots again was launched once."""
    out: dict[tuple[str, int], list[Sight]] = defaultdict(list)
    for entry in entries:
        if entry.event not in FED or entry.rank is None or entry.attempt is None or not entry.pool:
            continue
        again = entry.event is Event.ADMITTED and ".b" in entry.id
        if again or entry.model is Model.STATIC:
            continue
        machine = f"{job}-r{entry.rank}-a{entry.attempt}"
        sight = Sight(machine, entry.event, entry.at, entry.zone or "", entry.model, entry.cause or "", entry.started)
        out[entry.pool, int(entry.at // HOUR_S)].append(sight)
    return out
