"""Compute Engine's ``advice.capacityHistory``, as far as we read it: what a spot machine costs. Pure; calls nothing.

Whatever the cloud does not say in so many words is unknown, never zero. Shapes: compute v1 discovery
document (prices are a region's; there are none of custom types, nor of N1 with accelerators).
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from msgspec import Struct

from spotkeeper.reconcile.gce_wire import Part, to_time
from spotkeeper.spec import codec
from spotkeeper.spec.market import PriceRun

RUNS_KEPT = 1000  # a year of changes, several times a day


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


class History(Part, frozen=True):
    price_history: tuple[PriceRecord, ...] = ()


def supported(machine_type: str) -> bool:
    """N1 may carry accelerators that its price does not tell, and custom types have no history."""
    return "custom" not in machine_type and not machine_type.startswith("n1-")


def question(machine_type: str) -> dict[str, object]:
    """The body that asks for the prices of a machine type."""
    properties = {"machineType": machine_type, "scheduling": {"provisioningModel": "SPOT"}}
    return {"instanceProperties": properties, "types": ["PRICE"]}


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
