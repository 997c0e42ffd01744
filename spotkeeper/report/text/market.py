"""The output of `market`: a table for each pool, with charts of block characters, oldest on the left."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from spotkeeper.contract.stack import StackState
from spotkeeper.report.market import MarketView, ZoneMarket, reservation_line
from spotkeeper.report.text.render import Fitting, NoRoom, fitting
from spotkeeper.report.text.words import bar, duration, percent, usd

UNKNOWN = "·"
SPARE = ("last", "per 100 h", "low to high", "requests over time", "interrupted over time", "of on-demand")
SPAN = 1.5  # a price chart's highest price is at least this many times its lowest, so that small changes look small
LAST_SPARE = "price over time"
LEGEND = (
    "charts: oldest on the left; price: one scale for all zones of a pool, up to at least "
    f"{SPAN} times its lowest price; requests: a full block if all were served, "
    f"the lowest if all were refused, {UNKNOWN} if none was made; interrupted: spot machines that the cloud took"
)


def market(view: MarketView, stack: StackState) -> RenderableType:
    span = duration(view.until - view.since)
    part = duration(view.part_s)
    tables: list[Fitting] = []
    parts: list[RenderableType] = [Text(f"market of {view.stack}: the last {span}, {part} per character", style="bold")]
    for pool in stack.pools:
        zones = [zone for zone in view.zones if zone.pool == pool.name]
        if zones:
            tables.append(_table(zones, view.until))
            parts += [Text(), Text(f"{pool.name}  {pool.machine_type}", style="bold"), tables[-1]]
            if not all(zone.reported for zone in zones):
                parts.append(Text("* the stack file's price, since the cloud has reported none today", style="dim"))
            parts += [Text(reservation_line(one)) for one in view.reservations if one.pool == pool.name]
    if len(parts) == 1:
        return Group(*parts, Text("no pool of this stack has spot machines"))
    return Group(*parts, Text(), NoRoom(tuple(tables), "spotkeeper market --json"), Text(LEGEND, style="dim"))


def _table(zones: Sequence[ZoneMarket], now: float) -> Fitting:
    known = [price for zone in zones for price in zone.prices if price is not None]
    most = max((count for zone in zones for count in zone.interrupted), default=0)
    low = min(known, default=0.0)
    scale = (low, max([*known, SPAN * low]))
    rows = (_row(zone, now, scale, most) for zone in zones)
    right = {"spot", "of on-demand", "served", "interrupted", "per 100 h", "last"}
    return fitting(rows, (*SPARE, LAST_SPARE), right)


def _row(zone: ZoneMarket, now: float, scale: tuple[float, float], most: int) -> dict[str, str | Text]:
    """Return a zone's cells. The charts of all zones of a pool have the same scale.

    ``scale``: the lowest and the highest price; ``most``: the most interruptions of a zone in one part of the time.
    """
    return {
        "zone": zone.zone,
        "spot": "-" if zone.spot is None else usd(zone.spot) + ("" if zone.reported else "*"),
        "of on-demand": percent(zone.spot / zone.on_demand) if zone.spot is not None and zone.on_demand else "-",
        "low to high": _range(zone.prices),
        "price over time": Text(bars(zone.prices, *scale), style="cyan"),
        "served": "-" if zone.availability is None else f"{zone.served}/{zone.served + zone.refused}",
        "requests over time": _requests(zone.available),
        "interrupted": str(zone.interruptions),
        "per 100 h": "-" if zone.per_100_hours is None else f"{zone.per_100_hours:.1f}",
        "interrupted over time": Text(bars([count or None for count in zone.interrupted], 0.0, most), style="red"),
        "last": "-" if zone.last_interruption is None else f"{duration(now - zone.last_interruption)} ago",
    }


def _range(prices: Iterable[float | None]) -> str:
    known = [price for price in prices if price is not None]
    return f"{usd(min(known))} to {usd(max(known))}" if known else "-"


def bars(values: Iterable[float | None], low: float, high: float) -> str:
    """Draw each value as a block between ``low`` and ``high``, an unknown one as a dot."""
    return "".join(UNKNOWN if value is None else bar(value, low, high) for value in values)


def _requests(available: Iterable[float | None]) -> Text:
    text = Text()
    for share in available:
        style = "dim" if share is None else "green" if share >= 1.0 else "red" if share <= 0.0 else "yellow"
        text.append(bars([share], 0.0, 1.0), style=style)
    return text
