"""Charts as ECharts options. Values are plain; the value of a key that begins with a colon is JavaScript."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spotkeeper.contract.ledger import Event
from spotkeeper.report.html.markup import escape
from spotkeeper.report.html.style import DARK, LIGHT
from spotkeeper.report.html.svg import KIND_COLOR, LOSS_UP, MODEL_COLOR, bar_text
from spotkeeper.report.job.timeline import Bar, Timeline
from spotkeeper.report.money.money import PricesByPool

Options = dict[str, Any]
DAY_S = 86400.0
MS = 1000.0  # a time axis of ECharts counts milliseconds, and then finds round minutes, hours and days
MOST_BARS = 4000  # ECharts draws custom series of more in pieces, badly (echarts #14144)
# data: [lane, from, to, row, rows, style, color, text]; a lane with two machines at once is split
_BAR = """(params, api) => {
  const from = api.coord([api.value(1), api.value(0)]), to = api.coord([api.value(2), api.value(0)]);
  const lane = api.size([0, 1])[1] * 0.72, rows = api.value(4), high = lane / rows, area = params.coordSys;
  const left = Math.max(from[0], area.x), right = Math.min(Math.max(to[0], from[0] + 1), area.x + area.width);
  if (right <= left) return;
  const shape = {x: left, y: from[1] - lane / 2 + api.value(3) * high, width: right - left,
    height: Math.max(2, high - 1)};
  const kind = api.value(5), color = api.value(6), boots = kind === 'boot' || kind === 'never';
  const style = {fill: color, stroke: color, lineWidth: 0};
  if (boots) { style.opacity = 0.45; style.decal = null; }
  if (kind === 'ready') { style.opacity = 0.25; style.lineWidth = 1; }
  if (kind === 'leave') style.opacity = 0.35;
  if (kind === 'refused') { style.fill = 'transparent'; style.lineWidth = 1; style.lineDash = [3, 2]; }
  const parts = [{type: 'rect', shape, style}];
  if (boots) {
    const step = 6;
    for (let x = shape.x + step / 2; x < shape.x + shape.width; x += step)
      parts.push({type: 'line', silent: true, style: {stroke: color, lineWidth: 1, opacity: 0.8},
        shape: {x1: x, y1: shape.y, x2: x, y2: shape.y + shape.height}});
  }
  return {type: 'group', children: parts.slice(0, 120)};
}"""


_SYMBOL = {Event.LOSS: "path://M2 0L5 3L8 0L10 2L7 5L10 8L8 10L5 7L2 10L0 8L3 5L0 2Z", Event.NOTICE: "triangle"}
_MARK_COLOR = {Event.LOSS: "bad", Event.NOTICE: "notice"}


def colors(dark: bool) -> dict[str, str]:
    return DARK if dark else LIGHT


def _clock(at: str) -> str:
    """JavaScript that writes milliseconds since the job's start as ``2h05m``."""
    return f"""({at}) => {{ const s = Math.max(0, Math.round({at} / 1000)), two = n => String(n).padStart(2, '0');
      if (s < 60) return s + 's';
      if (s < 3600) return Math.floor(s / 60) + 'm' + two(s % 60) + 's';
      if (s < 86400) return Math.floor(s / 3600) + 'h' + two(Math.floor(s % 3600 / 60)) + 'm';
      return Math.floor(s / 86400) + 'd' + two(Math.floor(s % 86400 / 3600)) + 'h'; }}"""


def _base(dark: bool, title: str) -> Options:
    paint = colors(dark)
    return {
        "animation": False,
        "useUTC": True,
        "backgroundColor": "transparent",
        "textStyle": {"color": paint["ink"], "fontFamily": "system-ui, sans-serif"},
        "aria": {"enabled": True, "label": {"description": title}},
        "tooltip": {
            "trigger": "axis",
            "confine": True,
            "backgroundColor": paint["card"],
            "borderColor": paint["line"],
            "textStyle": {"color": paint["ink"], "fontSize": 12},
        },
    }


def _axis(dark: bool, **more: Any) -> Options:
    paint = colors(dark)
    return {
        "axisLabel": {"color": paint["dim"], "fontSize": 11, "hideOverlap": True},
        "axisLine": {"lineStyle": {"color": paint["line"]}},
        "axisTick": {"show": False},
        "splitLine": {"lineStyle": {"color": paint["line"], "opacity": 0.6}},
        **more,
    }


def _time_axis(dark: bool, most: float) -> Options:
    axis = _axis(dark, type="time", min=0, max=max(1.0, most) * MS)
    axis["axisLabel"] = {**axis["axisLabel"], ":formatter": _clock("v")}
    return axis


def timeline_height(view: Timeline) -> int:
    return 76 + 40 * max(1, len(view.nodes))


def timeline(view: Timeline, dark: bool) -> Options:
    """The machines of a job: one lane a node, bars by what a machine does, colors by its price model."""
    paint = colors(dark)
    lanes = {node: at for at, node in enumerate(view.nodes)}
    options = _base(dark, "Machines of the job over time")
    data = [_bar(bar, lanes[bar.node], view.start, paint) for bar in view.bars]
    marks = [
        {
            "value": [
                (mark.at - view.start) * MS,
                lanes[mark.node],
                escape(f"{mark.event.value}: {mark.text}".rstrip(": ")),
            ],
            "symbol": _SYMBOL.get(mark.event, "circle"),
            "symbolOffset": [0, -LOSS_UP if mark.event is Event.LOSS else 0],
            "itemStyle": {
                "color": paint[_MARK_COLOR.get(mark.event, "good")],
                "borderColor": paint["card"],
                "borderWidth": 1,
            },
        }
        for mark in view.marks
        if mark.node in lanes
    ]
    generations = [{"xAxis": (at - view.start) * MS, "name": f"generation {number}"} for at, number, _ in view.starts]
    tooltip = {**options["tooltip"], "trigger": "item"}
    return {
        **options,
        "tooltip": tooltip,
        "grid": {"left": 64, "right": 16, "top": 10, "bottom": 58},
        "xAxis": _time_axis(dark, view.end - view.start),
        "yAxis": _axis(dark, type="category", inverse=True, data=[f"node {node}" for node in view.nodes]),
        "dataZoom": [
            {"type": "inside", "filterMode": "weakFilter", "zoomOnMouseWheel": "ctrl", "moveOnMouseWheel": False},
            {
                "type": "slider",
                "filterMode": "weakFilter",
                "height": 18,
                "bottom": 8,
                "borderColor": paint["line"],
                "textStyle": {"color": paint["dim"], "fontSize": 11},
                "fillerColor": f"{paint['spot']}33",
                "brushSelect": False,
                "showDataShadow": False,
                ":labelFormatter": _clock("v"),
            },
        ],
        "series": [
            {
                "type": "custom",
                "name": "machines",
                "progressive": 0,
                ":renderItem": _BAR,
                "encode": {"x": [1, 2], "y": 0},
                "data": data[-MOST_BARS:],
                "tooltip": {":formatter": "p => p.value[7]"},
                "markLine": {
                    "silent": True,
                    "symbol": "none",
                    "animation": False,
                    "lineStyle": {"color": paint["dim"], "type": "dotted", "opacity": 0.7},
                    "label": {"show": False},
                    "data": generations[-200:],
                },
            },
            {
                "type": "scatter",
                "name": "events",
                "symbolSize": 10,
                "data": marks[-400:],
                "z": 5,
                "tooltip": {":formatter": "p => p.value[2]"},
            },
        ],
    }


def _bar(bar: Bar, lane: int, start: float, paint: dict[str, str]) -> list[Any]:
    text = escape(bar_text(bar)).replace("; ", "<br>", 1)
    color = paint[KIND_COLOR.get(bar.kind, MODEL_COLOR[bar.model])]
    times = (bar.start - start) * MS, (bar.end - start) * MS
    return [lane, *times, bar.row, 1 + bar.shared, bar.kind.value, color, text]


def timeline_rows(view: Timeline) -> list[tuple[object, ...]]:
    """The data of :func:`timeline`, for a download."""
    return [
        (
            bar.node,
            bar.attempt,
            bar.kind.value,
            round(bar.start - view.start),
            round(bar.end - view.start),
            bar.model.value,
            bar.zone,
            round(bar.price, 4),
        )
        for bar in view.bars
    ]


TIMELINE_HEAD = ("node", "attempt", "what", "from_s", "to_s", "model", "zone", "usd_per_hour")


def lines(
    title: str,
    series: Sequence[tuple[str, str, Sequence[tuple[float, float]]]],
    dark: bool,
    *,
    unit: str = "",
    axis_name: str = "",
    on_time: bool = False,
    marks: Sequence[float] = (),
    from_zero: bool = False,
) -> Options:
    """Return a chart of lines over training steps, or with ``on_time`` over seconds since the job's start.

    Args:
        series: of each line (its name, its color's name, its points).
        marks: where a recovery happened, on the x axis.
        axis_name: what the values are, shown above their axis.
    """
    paint = colors(dark)
    most = max((x for _, _, points in series for x, _ in points), default=1.0)
    axis = _time_axis(dark, most) if on_time else _axis(dark, type="value", min="dataMin", max="dataMax")
    axis |= {"name": "since submission" if on_time else "step", "nameLocation": "middle", "nameGap": 24}
    axis["nameTextStyle"] = {"color": paint["dim"], "fontSize": 11}
    value = _axis(dark, type="value", scale=not from_zero)
    if unit:
        value["axisLabel"] = {**value["axisLabel"], "formatter": f"{unit}{{value}}"}
    if axis_name:
        value |= {"name": axis_name, "nameGap": 8, "nameTextStyle": {"color": paint["dim"], "align": "left"}}
    drawn: list[Options] = [
        {
            "type": "line",
            "name": name,
            "showSymbol": False,
            "sampling": "lttb",
            "lineStyle": {"width": 2, "color": paint[color], "type": "dashed" if at else "solid"},
            "itemStyle": {"color": paint[color]},
            "data": [(x * MS, y) for x, y in points] if on_time else points,  # no copies: pages share their points
        }
        for at, (name, color, points) in enumerate(series)
    ]
    if marks and drawn:
        drawn[0]["markLine"] = {
            "silent": True,
            "symbol": "none",
            "animation": False,
            "label": {"show": False},
            "lineStyle": {"color": paint["bad"], "type": "dotted", "opacity": 0.8},
            "data": [{"xAxis": at} for at in marks[-200:]],
        }
    legend = {"top": 0, "left": 0, "textStyle": {"color": paint["ink"]}, "itemWidth": 18, "icon": "roundRect"}
    return {
        **_base(dark, title),
        "legend": {**legend, "show": len(series) > 1},
        "grid": {
            "left": 8,
            "right": 16,
            "top": 34 if len(series) > 1 or axis_name else 14,
            "bottom": 22,
            "containLabel": True,
        },
        "xAxis": axis,
        "yAxis": value,
        "dataZoom": [{"type": "inside", "zoomOnMouseWheel": "ctrl", "moveOnMouseWheel": False}],
        "series": drawn,
    }


_HUES = ("spot", "demand", "static", "save", "good", "bad", "notice", "dim")
Series = list[tuple[str, list[tuple[float, float]]]]


def price_series(prices: PricesByPool, now: float, days: float) -> Series:
    """Return the spot prices of each pool and zone as points: x in days (0: now, -1: a day ago), y in USD per hour."""
    out: Series = []
    for pool, told in sorted(prices.items()):
        for zone in sorted({run.zone for run in told.runs}):
            runs = [run for run in told.runs if run.zone == zone]
            points = [((run.start - now) / DAY_S, run.usd) for run in runs if run.start <= now]
            old = [point for point in points if point[0] < -days]
            kept = [point for point in points if point[0] >= -days]
            kept = [(-days, old[-1][1]), *kept] if old else kept
            if kept:
                out.append((f"{pool} {zone}".strip(), [*kept, (0.0, kept[-1][1])]))
    return out


def prices(series: Series, dark: bool) -> Options:
    """Return a chart of spot prices over the last days: each line stays level until the next reported price."""
    drawn = [(name, _HUES[at % len(_HUES)], points) for at, (name, points) in enumerate(series)]
    options = lines("Spot prices", drawn, dark, unit="$")
    for one in options["series"]:
        one["step"] = "end"
        one["lineStyle"]["type"] = "solid"
        del one["sampling"]
    options["xAxis"] = {**options["xAxis"], "max": 0, "name": "days ago"}
    options["xAxis"]["axisLabel"] = {**options["xAxis"]["axisLabel"], ":formatter": "v => Math.round(-100 * v) / 100"}
    options["legend"] = {**options["legend"], "show": True, "type": "scroll"}
    options["grid"] = {**options["grid"], "top": 34}
    return options
