"""Charts of a search as ECharts options: its trials' curves, and their values side by side."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from spotkeeper.contract.sweepfile import Dimension, Value, text
from spotkeeper.dashboard.charts import Options, colors, lines
from spotkeeper.dashboard.curves import Points
from spotkeeper.report.sweep import SweepView, TrialView

BEST, OTHERS = 3.0, 1.0  # widths of lines, pixels


def curves(view: SweepView, points: Mapping[int, Points], dark: bool) -> Options:
    """Return the metric of all trials over their steps; the best trial's line is thick. ``points``: by number."""
    rows = [row for row in reversed(view.rows) if points.get(row.number)]  # the best is drawn last
    options = lines(f"{view.metric} of all trials", [(row.name, "dim", points[row.number]) for row in rows], dark)
    paint = colors(dark)
    for one, row in zip(options["series"], rows, strict=True):
        best = row.number == view.best
        color = paint["good"] if best else paint["spot"]
        one["lineStyle"] = {"width": BEST if best else OTHERS, "color": color, "opacity": 1.0 if best else 0.45}
        one["itemStyle"] = {"color": color}
        one["triggerLineEvent"] = True
    options["legend"] = {**options["legend"], "show": False}
    options["grid"] = {**options["grid"], "top": 14}
    options["tooltip"] = {**options["tooltip"], "trigger": "item", "formatter": "{a}"}
    return options


def curve_rows(view: SweepView, points: Mapping[int, Points]) -> list[tuple[object, ...]]:
    """Return the data of :func:`curves`, for a download."""
    return [(row.name, step, value) for row in view.rows for step, value in points.get(row.number, ())]


def parallel(view: SweepView, space: Mapping[str, Dimension], dark: bool) -> Options:
    """Return parallel coordinates: an axis for each parameter and one for the metric, a line for each trial."""
    paint = colors(dark)
    rows = [row for row in view.rows if row.value is not None]
    names = list(space)
    values = [row.value for row in rows if row.value is not None]
    low, high = min(values, default=0.0), max(values, default=1.0)
    ends = [paint["good"], paint["demand"]] if view.goal == "min" else [paint["demand"], paint["good"]]
    base = lines(f"Parameters and {view.metric}", [], dark)
    label = {"color": paint["dim"], "fontSize": 11}
    axes = [_axis(at, name, space[name]) for at, name in enumerate(names)]
    axes.append({"dim": len(names), "name": view.metric, "type": "value", "scale": True})
    return {
        **{key: base[key] for key in ("animation", "backgroundColor", "textStyle", "aria", "tooltip")},
        "tooltip": {**base["tooltip"], "trigger": "item", "formatter": "{b}"},
        "parallel": {
            "left": 48,
            "right": 64,
            "top": 34,
            "bottom": 24,
            "parallelAxisDefault": {
                "nameTextStyle": {"color": paint["ink"], "fontSize": 12},
                "axisLabel": label,
                "axisLine": {"lineStyle": {"color": paint["dim"]}},
                "axisTick": {"show": False},
            },
        },
        "parallelAxis": axes,
        "visualMap": {
            "show": False,
            "dimension": len(names),
            "min": low,
            "max": high if high > low else low + 1.0,
            "inRange": {"color": ends},
        },
        "series": [
            {
                "type": "parallel",
                "name": "trials",
                "lineStyle": {"width": 1.5, "opacity": 0.7},
                "data": [{"name": row.name, "value": _coordinates(row, space)} for row in rows],
            }
        ],
    }


def _axis(at: int, name: str, dimension: Dimension) -> Options:
    axis: dict[str, Any] = {"dim": at, "name": name}
    if dimension.choice is not None:
        return {**axis, "type": "category", "data": [text(value) for value in dimension.choice]}
    low, high = dimension.integers or dimension.uniform or dimension.loguniform or (0, 1)
    if dimension.loguniform is None:
        return {**axis, "type": "value", "min": low, "max": high}
    return {
        **axis,
        "type": "log",
        "min": 10.0 ** math.floor(math.log10(low)),
        "max": 10.0 ** math.ceil(math.log10(high)),
    }


def _coordinates(row: TrialView, space: Mapping[str, Dimension]) -> list[Value | None]:
    """Return a trial's values in the order of the axes; None, which breaks the line, for one that does not apply."""
    found: list[Value | None] = []
    for name, dimension in space.items():
        value = row.params.get(name)
        found.append(value if value is None or dimension.choice is None else text(value))
    return [*found, row.value]


def trial_table(view: SweepView, names: Sequence[str]) -> list[tuple[object, ...]]:
    """Return the data of :func:`parallel`, for a download."""
    return [
        (row.name, *(row.params.get(name, "") for name in names), row.value)
        for row in view.rows
        if row.value is not None
    ]
