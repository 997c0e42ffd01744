"""Compute Engine's ``advice.capacity`` and ``advice.capacityHistory``, as far as we read them. Pure; calls nothing.

What a spot machine costs, whether as many as a pool may have are to be had in a zone, for how long they would run,
and how often they were taken. Whatever the cloud does not say in so many words is unknown, never zero. Shapes:
compute v1 discovery document (prices are a region's; there are none of custom types, nor of N1 with accelerators).
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from spotkeeper.reconcile.gce_wire import Part, to_time
from spotkeeper.spec import codec
from spotkeeper.spec.market import HOUR_S, Guess, PriceRun
from spotkeeper.spec.stack import PoolState

RUNS_KEPT = 1000  # a year of changes, several times a day
DAYS = 7  # of the thirty that the cloud has: a market turns within days
MOST = 1000  # machines that a question may be about
_SECONDS = re.compile(r"([0-9]+(?:\.[0-9]+)?)s\Z")


class Money(Part, frozen=True):
    """``google.type.Money``."""

    currency_code: str = ""
    units: str = "0"
    nanos: int = 0


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
    """N1 may carry accelerators, without which it is another machine; custom types have no history."""
    return "custom" not in machine_type and not machine_type.startswith("n1-")


def question(machine_type: str) -> dict[str, object]:
    """Asks for the prices of a machine type in the whole region."""
    properties = {"machineType": machine_type, "scheduling": {"provisioningModel": "SPOT"}}
    return {"instanceProperties": properties, "types": ["PRICE"]}


def preemptions_question(machine_type: str, zone: str) -> dict[str, object]:
    """Asks how many of the machines that ended in a zone the cloud had taken, by day."""
    place = {"locationPolicy": {"location": f"zones/{zone}"}}
    return {**question(machine_type), "types": ["PREEMPTION"], **place}


def capacity_question(pool: PoolState, zone: str) -> dict[str, object]:
    """Asks whether all of the pool's machines are to be had in one zone."""
    return {
        "instanceProperties": {"scheduling": {"provisioningModel": "SPOT"}},
        "instanceFlexibilityPolicy": {"instanceSelections": {"pool": {"machineTypes": [pool.machine_type]}}},
        "distributionPolicy": {"targetShape": "ANY_SINGLE_ZONE", "zones": [{"zone": f"zones/{zone}"}]},
        "size": min(MOST, max(1, pool.max_nodes)),
    }


def obtainable(body: bytes, zone: str) -> Guess | None:
    """The scores of an answer about one zone; None where it is none, or about another one."""
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
    """Of the newest days of an answer; None where it tells of none."""
    try:
        told = codec.decode(body, History).preemption_history
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    rates = {to_time(record.interval.start_time): _share(record.preemption_rate) for record in told}
    days = [rate for start, rate in sorted(rates.items()) if start and rate is not None][-DAYS:]
    return Guess(kept=1.0 - sum(days) / len(days)) if days else None


def together(capacity: Guess | None, history: Guess | None) -> Guess | None:
    """One guess of two answers."""
    if capacity is None or history is None:
        return capacity or history
    return replace(capacity, kept=history.kept)


def price_runs(body: bytes) -> tuple[PriceRun, ...] | None:
    """The prices of an answer, by time; None where it is none, or tells none in dollars."""
    try:
        records = codec.decode(body, History).price_history
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    runs = sorted({run for record in records if (run := _run(record)) is not None}, key=lambda run: run.start)
    return joined(runs) or None


def joined(runs: Iterable[PriceRun]) -> tuple[PriceRun, ...]:
    """Without runs that repeat the price before them; only the newest are kept."""
    out: list[PriceRun] = []
    for run in runs:
        if not out or out[-1].usd != run.usd:
            out.append(run)
    return tuple(out[-RUNS_KEPT:])


def _run(record: PriceRecord) -> PriceRun | None:
    start, price = to_time(record.interval.start_time), record.list_price
    if not start or price.currency_code != "USD" or not price.units.isdigit():
        return None
    usd = int(price.units) + price.nanos / 1e9
    return PriceRun(start, usd) if usd > 0 else None


def _share(value: float | None) -> float | None:
    return value if value is not None and 0.0 <= value <= 1.0 else None


def _some(guess: Guess) -> Guess | None:
    return None if guess == Guess() else guess
