"""A job's metrics as a table and as CSV."""

from __future__ import annotations

import csv
import io
from datetime import datetime, timezone

from rich.console import RenderableType

from spotkeeper.report.job.metrics import JobMetrics, metric_views
from spotkeeper.report.text.render import fitting
from spotkeeper.report.text.words import value_word


def metrics_table(found: JobMetrics) -> RenderableType:
    rows = [
        {
            "metric": view.name,
            "curve": view.curve,
            "last": value_word(view.last),
            "step": str(view.step),
            "lowest": "-" if view.low is None else value_word(view.low),
            "highest": "-" if view.high is None else value_word(view.high),
            "points": str(view.points),
        }
        for view in metric_views(found.metrics)
    ]
    return fitting(rows, ("points", "curve", "highest", "lowest"), {"last", "step", "lowest", "highest", "points"})


def metrics_csv(found: JobMetrics) -> str:
    """Return one line per point: metric, step, time (UTC), value."""
    out = io.StringIO()
    lines = csv.writer(out, lineterminator="\n")
    lines.writerow(("metric", "step", "time", "value"))
    for name, curve in found.metrics.items():
        for step, at, value in zip(curve.steps, curve.times, curve.values, strict=True):
            moment = datetime.fromtimestamp(at, timezone.utc).isoformat(timespec="milliseconds")
            lines.writerow((name if name[0] != "-" else f"'{name}", step, moment, value))  # "-" begins a formula
    return out.getvalue()
