"""Requests for EC2's spot prices and placement scores by zone, and the reading of the answers. Pure.

A value that EC2 does not give is unknown, never zero. A score names its zone by id (``use1-az1``), because zone names
differ from account to account.

Source: AWS, ``DescribeSpotPriceHistory`` and ``GetSpotPlacementScores``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta, timezone
from math import isfinite

import msgspec

from spotkeeper.contract import codec
from spotkeeper.contract.market import Chances, Guess, PriceRun
from spotkeeper.contract.stack import PoolState
from spotkeeper.reconcile.clouds.ec2.schema import Part, to_time

BACK = timedelta(days=2)  # EC2 includes the price in force at the beginning
SYSTEM = "Linux/UNIX"
RUNS_KEPT = 1000
PAGE = 1000
OF_REGION = [{"Name": "zone-type", "Values": ["availability-zone"]}]


class Told(Part, frozen=True):
    availability_zone: str = ""
    spot_price: str = ""
    product_description: str = ""
    timestamp: datetime | None = None


class History(Part, frozen=True):
    spot_price_history: tuple[Told, ...] = ()


class Score(Part, frozen=True):
    availability_zone_id: str = ""
    score: int = 0


class ScoreList(Part, frozen=True):
    spot_placement_scores: tuple[Score, ...] = ()


class Zone(Part, frozen=True):
    zone_name: str = ""
    zone_id: str = ""


class Zones(Part, frozen=True):
    availability_zones: tuple[Zone, ...] = ()


def question(pool: PoolState, now: float) -> dict[str, object]:
    """Return the request for the prices of the pool's machine type in the whole region."""
    return {
        "InstanceTypes": [pool.machine_type],
        "ProductDescriptions": [SYSTEM],
        "StartTime": datetime.fromtimestamp(now, timezone.utc) - BACK,
        "MaxResults": PAGE,
    }


def price_runs(answer: Mapping[str, object], zones: frozenset[str]) -> tuple[PriceRun, ...] | None:
    """Return the prices in these zones from an answer, sorted by time; None if the answer has no such price."""
    try:
        told = codec.convert(answer, History).spot_price_history
    except msgspec.ValidationError:
        return None
    runs = {run for one in told if one.availability_zone in zones and (run := _run(one)) is not None}
    return _joined(sorted(runs, key=lambda run: (run.start, run.zone))) or None


def score_question(pool: PoolState, region: str) -> dict[str, object]:
    """Return the request that scores each zone for ``pool.max_machines`` machines.

    It never varies, because EC2 limits how many different requests an account may send.
    """
    return {
        "InstanceTypes": [pool.machine_type],
        "TargetCapacity": max(1, pool.max_machines),
        "TargetCapacityUnitType": "units",
        "SingleAvailabilityZone": True,
        "RegionNames": [region],
    }


def zone_names(answer: Mapping[str, object]) -> dict[str, str]:
    """Return this account's zone names by zone id."""
    try:
        told = codec.convert(answer, Zones).availability_zones
    except msgspec.ValidationError:
        return {}
    return {one.zone_id: one.zone_name for one in told if one.zone_id and one.zone_name}


def chances(
    answer: Mapping[str, object], names: Mapping[str, str], zones: frozenset[str], now: float
) -> Chances | None:
    """Return an answer's scores (1: unlikely, 10: likely) as estimates by zone; None if these zones have no score."""
    try:
        told = codec.convert(answer, ScoreList).spot_placement_scores
    except msgspec.ValidationError:
        return None
    scores = {names.get(one.availability_zone_id, ""): one.score for one in told if 1 <= one.score <= 10}
    known = {zone: Guess(had=score / 10) for zone, score in scores.items() if zone in zones}
    return Chances(now, known) if known else None


def _run(told: Told) -> PriceRun | None:
    start = to_time(told.timestamp)
    try:
        usd = float(told.spot_price)
    except ValueError:
        return None
    if not start or not isfinite(usd) or usd <= 0 or not told.product_description.startswith(SYSTEM):
        return None
    return PriceRun(start, usd, told.availability_zone)


def _joined(runs: Iterable[PriceRun]) -> tuple[PriceRun, ...]:
    """Return the prices that differ from the previous one of their zone, at most the newest ``RUNS_KEPT``."""
    last: dict[str, float] = {}
    out: list[PriceRun] = []
    for run in runs:
        if last.get(run.zone) != run.usd:
            last[run.zone] = run.usd
            out.append(run)
    return tuple(out[-RUNS_KEPT:])
