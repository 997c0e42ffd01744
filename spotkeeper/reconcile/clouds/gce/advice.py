"""Compute Engine's ``advice.capacity`` and ``advice.capacityHistory``: spot prices, obtainability, uptime, preemptions.

A value that the cloud does not give is unknown, never zero; no answer in time, a refusal (403, 404, 429) or a malformed
answer is unknown too. ``select/market.py`` keeps the answers and asks again after an hour at the earliest. The forms
of requests and answers are from the discovery document of compute v1. Prices are per region.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from spotkeeper.clock import Clock
from spotkeeper.contract import codec
from spotkeeper.contract.market import HOUR_S, Chances, Guess, PriceRun
from spotkeeper.contract.stack import PoolState, StackState, region_of
from spotkeeper.reconcile.clouds.gce.api import Api
from spotkeeper.reconcile.clouds.gce.errors import parse_error
from spotkeeper.reconcile.clouds.gce.schema import Part, to_time
from spotkeeper.reconcile.clouds.http_client import NoAnswerError

RUNS_KEPT = 1000  # a year of price changes, several a day
DAYS = 7  # the newest of the cloud's thirty days, as a market changes within days
MOST = 1000  # most machines in one request
AT_ONCE = 4  # parallel requests of one pool
VERSIONS = ("beta", "v1")  # v1 has the methods, but refused SPOT
UNKNOWN = (400, 404)  # the version lacks the method or a field
_SECONDS = re.compile(r"([0-9]+(?:\.[0-9]+)?)s\Z")

log = logging.getLogger(__name__)


class Money(Part, frozen=True):
    """An amount of money, as ``google.type.Money``."""

    currency_code: str = ""
    units: str = "0"  # int64
    nanos: int | str = 0  # int32, in JSON a number; some answers have a string


class Interval(Struct, frozen=True, rename="camel"):
    start_time: str = ""


class PriceRecord(Part, frozen=True):
    interval: Interval = Interval()
    list_price: Money = Money()


class PreemptionRecord(Part, frozen=True):
    interval: Interval = Interval()
    preemption_rate: float | None = None


class History(Part, frozen=True):
    price_history: tuple[PriceRecord, ...] = ()
    preemption_history: tuple[PreemptionRecord, ...] = ()


class Scores(Part, frozen=True):
    obtainability: float | None = None
    estimated_uptime: str = ""  # "3600s" or "600s"


class Shard(Part, frozen=True):
    zone: str = ""


class Recommendation(Part, frozen=True):
    scores: Scores = Scores()
    shards: tuple[Shard, ...] = ()


class Advised(Part, frozen=True):
    recommendations: tuple[Recommendation, ...] = ()


def supported(machine_type: str) -> bool:
    """Return whether a machine type has a price history; custom types and N1 (priced by accelerators) have none."""
    return "custom" not in machine_type and not machine_type.startswith("n1-")


def price_question(machine_type: str) -> dict[str, object]:
    """Return the request for the prices of a machine type in the whole region."""
    properties = {"machineType": machine_type, "scheduling": {"provisioningModel": "SPOT"}}
    return {"instanceProperties": properties, "types": ["PRICE"]}


def preemptions_question(machine_type: str, zone: str) -> dict[str, object]:
    """Return the request for the share of a zone's ended machines that were preempted, by day."""
    place = {"locationPolicy": {"location": f"zones/{zone}"}}
    return {**price_question(machine_type), "types": ["PREEMPTION"], **place}


def capacity_question(pool: PoolState, zone: str) -> dict[str, object]:
    """Return the request for the chance to obtain the pool's ``max_machines`` (at most MOST) in one zone."""
    return {
        "instanceProperties": {"scheduling": {"provisioningModel": "SPOT"}},
        "instanceFlexibilityPolicy": {"instanceSelections": {"pool": {"machineTypes": [pool.machine_type]}}},
        "distributionPolicy": {"targetShape": "ANY_SINGLE_ZONE", "zones": [{"zone": f"zones/{zone}"}]},
        "size": min(MOST, max(1, pool.max_machines)),
    }


def obtainable(body: bytes, zone: str) -> Guess | None:
    """Return an answer's scores for this zone; None if the answer has none."""
    try:
        told = codec.decode(body, Advised).recommendations[:1]
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    if not told or any(shard.zone.rpartition("/")[2] not in ("", zone) for shard in told[0].shards):
        return None
    scores = told[0].scores
    uptime = _SECONDS.match(scores.estimated_uptime)
    seconds = float(uptime[1]) if uptime else 0.0
    return _some(Guess(_share(scores.obtainability), min(1.0, seconds / HOUR_S) if seconds else None))


def kept(body: bytes) -> Guess | None:
    """Return the mean share of machines not preempted in an answer's newest ``DAYS`` days; None if it has no days."""
    try:
        told = codec.decode(body, History).preemption_history
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    rates = {to_time(record.interval.start_time): _share(record.preemption_rate) for record in told}
    days = [rate for start, rate in sorted(rates.items()) if start and rate is not None][-DAYS:]
    return Guess(kept=1.0 - sum(days) / len(days)) if days else None


def together(capacity: Guess | None, history: Guess | None) -> Guess | None:
    """Combine two estimates, of capacity and of preemptions, into one."""
    if capacity is None or history is None:
        return capacity or history
    return replace(capacity, kept=history.kept)


def price_runs(body: bytes) -> tuple[PriceRun, ...] | None:
    """Return an answer's prices by time; None if the answer has none in dollars."""
    try:
        records = codec.decode(body, History).price_history
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    runs = sorted({run for record in records if (run := _run(record)) is not None}, key=lambda run: run.start)
    return joined(runs) or None


def joined(runs: Iterable[PriceRun]) -> tuple[PriceRun, ...]:
    """Return the runs whose price differs from that of the run before, at most the newest ``RUNS_KEPT``."""
    out: list[PriceRun] = []
    for run in runs:
        if not out or out[-1].usd != run.usd:
            out.append(run)
    return tuple(out[-RUNS_KEPT:])


def _run(record: PriceRecord) -> PriceRun | None:
    start, price = to_time(record.interval.start_time), record.list_price
    units, nanos = price.units, str(price.nanos)
    if not start or price.currency_code != "USD" or not (units.isdecimal() and nanos.isdecimal()):
        return None
    usd = int(units) + int(nanos) / 1e9
    return PriceRun(start, usd) if usd > 0 else None


def _share(value: float | None) -> float | None:
    return value if value is not None and 0.0 <= value <= 1.0 else None


def _some(guess: Guess) -> Guess | None:
    return None if guess == Guess() else guess


# -- requests


class Hints:
    """The part of a cloud's adapter that requests prices and estimates for a stack's pools. Thread-safe."""

    def __init__(self, stack: StackState, api: Api, clock: Clock) -> None:
        self._stack, self._clock = stack, clock
        self._versions = {name: api.version(name) for name in VERSIONS}
        self._answering: dict[str, str] = {}  # method -> the API version that has answered it

    def price_history(self, pool: str, deadline_s: float) -> tuple[PriceRun, ...] | None:
        """Return spot prices of the pool's machine type; None: unknown.

        In a stack with several regions each run names a zone, and the zones of a region without an answer have none.
        """
        found, ends = self._pool(pool), time.monotonic() + deadline_s
        if found is None:
            return None
        if not self._stack.regions:
            return self._prices(found, self._stack.region, ends)
        regions = list(dict.fromkeys(map(region_of, found.zones)))
        with ThreadPoolExecutor(AT_ONCE) as threads:
            told = dict(
                zip(regions, threads.map(lambda region: self._prices(found, region, ends), regions), strict=True)
            )
        runs = [replace(run, zone=zone) for zone in found.zones for run in told[region_of(zone)] or ()]
        return tuple(sorted(runs, key=lambda run: (run.start, run.zone))) or None

    def _prices(self, pool: PoolState, region: str, ends: float) -> tuple[PriceRun, ...] | None:
        question, what = price_question(pool.machine_type), f"prices of pool {pool.name} in {region}"
        body = self._ask(region, "capacityHistory", question, ends, what)
        return None if body is None else price_runs(body)

    def chances(self, pool: str, deadline_s: float) -> Chances | None:
        """Return by zone how likely a machine is to be obtained and to survive; None: unknown.

        Each zone has its own requests, because one score covers all zones of a request.
        """
        found, ends = self._pool(pool), time.monotonic() + deadline_s
        if found is None:
            return None
        with ThreadPoolExecutor(AT_ONCE) as threads:
            now = [threads.submit(self._capacity, found, zone, ends) for zone in found.zones]
            before = [threads.submit(self._preemptions, found, zone, ends) for zone in found.zones]
        told = (together(one.result(), two.result()) for one, two in zip(now, before, strict=True))
        by_zone = {zone: guess for zone, guess in zip(found.zones, told, strict=True) if guess is not None}
        return Chances(self._clock.now(), by_zone) if by_zone else None

    def _capacity(self, pool: PoolState, zone: str, ends: float) -> Guess | None:
        question, what = capacity_question(pool, zone), f"pool {pool.name} in {zone}"
        body = self._ask(self._region(zone), "capacity", question, ends, what)
        return None if body is None else obtainable(body, zone)

    def _preemptions(self, pool: PoolState, zone: str, ends: float) -> Guess | None:
        question, what = preemptions_question(pool.machine_type, zone), f"preemptions of pool {pool.name} in {zone}"
        body = self._ask(self._region(zone), "capacityHistory", question, ends, what)
        return None if body is None else kept(body)

    def _pool(self, pool: str) -> PoolState | None:
        found = self._stack.pool(pool)
        return found if found is not None and supported(found.machine_type) else None

    def _region(self, zone: str) -> str:
        return region_of(zone) if self._stack.regions else self._stack.region

    def _ask(self, region: str, method: str, question: dict[str, object], ends: float, what: str) -> bytes | None:
        """Send a request to the API version that answered before, otherwise to each version until one answers."""
        known = self._answering.get(method)
        path = f"projects/{self._stack.project}/regions/{region}/advice/{method}"
        for version in (known,) if known else VERSIONS:
            left = ends - time.monotonic()
            if left <= 0:
                return None
            try:
                answer = self._versions[version].call("POST", path, left, {}, question)
            except NoAnswerError as error:
                log.info("%s: %s", what, error)
                return None
            if answer.status == 200:
                if self._answering.setdefault(method, version) != known:
                    log.info("advice.%s: %s answers", method, version)
                return answer.body
            log.info("%s: %s: %s", what, version, parse_error(answer.status, answer.body)[1])
            if answer.status not in UNKNOWN:
                return None
        return None
