"""A job's metrics as one curve each, joined from the files of its generations. Pure.

Each generation's file names the checkpoints from which it and its ancestors resumed. The steps that an ancestor trained
after such a checkpoint were lost and trained again, so its points of these steps are cut off. A checkpoint carries the
points that were not uploaded yet, and the generation that resumes from it has them in its file.
"""

from __future__ import annotations

import math
import re
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec import Struct

from spotkeeper.contract.metrics import GenerationMetrics, MetricPoints
from spotkeeper.report.text.words import sparkline
from spotkeeper.train.core.curve import MOST, Curve

NAMES = 256  # curves of a job, those of newer generations first: each generation can use other names
SHOWN = 6  # metrics that `status` and `watch` show


class MetricView(Struct, frozen=True):
    """One metric as `status` shows it. ``last``: None for NaN; ``low``, ``high``: None if no value is finite.

    JSON has null for an infinite ``last`` too.
    """

    name: str
    step: int
    points: int
    last: float | None
    low: float | None
    high: float | None
    curve: str  # as block characters; "" for fewer than two finite values


class MetricColumns(Struct, frozen=True):
    """The points of one metric, by ascending step. ``times``: real unix seconds; NaN is null in JSON."""

    steps: list[int]
    times: list[float]
    values: list[float]


class JobMetrics(Struct, frozen=True):
    """The metrics of a job as joined curves; ``resumed``: the checkpoints that :func:`ancestors` returns."""

    job: str
    name: str
    resumed: tuple[tuple[int, int], ...]
    metrics: dict[str, MetricColumns]


def joined(found: Iterable[GenerationMetrics]) -> dict[str, MetricColumns]:
    """Return one curve per metric, joined from the newest generation and its ancestors; others are ignored."""
    return dict(curves(found))


def curves(found: Iterable[GenerationMetrics]) -> Iterator[tuple[str, MetricColumns]]:
    """Yield what :func:`joined` returns, one metric at a time: together they can take 30 MB."""
    by_gen = {one.gen: one for one in found}
    if by_gen:
        newest = by_gen[max(by_gen)]
        yield from _joined(by_gen, (*newest.ancestors, (newest.gen, None)))


def pace(curve: MetricColumns, parts: int = 120) -> list[tuple[int, float]]:
    """Return (step, steps a second before it) for up to ``parts`` equal parts of a run, from the times of a curve.

    Real seconds. A part with a recovery in it is as slow as the run was there. Where the curve was thinned, a part can
    be longer.
    """
    steps, times = curve.steps, curve.times
    size = max(1, -(-(steps[-1] - steps[0]) // parts)) if steps else 1
    found, begin = [], 0
    for at, step in enumerate(steps):
        if step - steps[begin] >= size:
            if (took := times[at] - times[begin]) > 0.0:
                found.append((step, (step - steps[begin]) / took))
            begin = at
    return found


def condensed(
    found: Iterable[GenerationMetrics], chain: Sequence[tuple[int, int]], most: int = MOST
) -> GenerationMetrics:
    """Join the files of the ancestors ``chain`` (generation, step) to one: it stands for all of them in :func:`joined`.

    The one that this function returned for an earlier part of the chain can stand for that part here too.
    ``most``: points of a curve.
    """
    return GenerationMetrics(
        chain[-1][0],
        tuple(chain[:-1]),
        {
            name: MetricPoints(array("q", curve.steps), array("d", curve.times), array("d", curve.values))
            for name, curve in _joined({one.gen: one for one in found}, chain, most)
        },
    )


def _joined(
    by_gen: Mapping[int, GenerationMetrics], chain: Iterable[tuple[int, int | None]], most: int = MOST
) -> Iterator[tuple[str, MetricColumns]]:
    parts = [(by_gen[gen].metrics, last) for gen, last in chain if gen in by_gen]
    every = dict.fromkeys(name for metrics, _ in reversed(parts) for name in metrics)
    names = sorted(list(every)[:NAMES], key=in_order)
    for name in names:
        curve = _curve([(metrics[name], last) for metrics, last in parts if name in metrics], most)
        if curve:
            yield name, MetricColumns(curve.steps, curve.times, curve.values)


def _curve(parts: Iterable[tuple[MetricPoints, int | None]], most: int) -> Curve:
    """Join the points of one metric; of each part those up to a step, or all."""
    points: dict[int, tuple[float, float]] = {}
    for columns, last in parts:
        end = len(columns.steps) if last is None else bisect_right(columns.steps, last)
        rows = zip(columns.times[:end], columns.values[:end], strict=True)
        points.update(zip(columns.steps[:end], rows, strict=True))
    curve, steps = Curve(most), sorted(points)
    curve.add(steps, [points[step][0] for step in steps], [points[step][1] for step in steps])
    return curve


def ancestors(found: Iterable[GenerationMetrics]) -> tuple[tuple[int, int], ...]:
    """Return the checkpoints (generation, step) from which the newest generation and its ancestors resumed.

    They are in order of age, the oldest first. An ancestor is a generation whose checkpoint a later one resumed from.
    """
    return max(found, key=lambda one: one.gen, default=GenerationMetrics(0, (), {})).ancestors


def drawable(curve: MetricColumns) -> bool:
    """Whether a chart of the curve shows more than a dot: two finite values."""
    finite = filter(math.isfinite, curve.values)
    return next(finite, None) is not None and next(finite, None) is not None


def not_drawn(names: Iterable[str], job: str) -> str:
    """Name the metrics that have no chart; "" for none."""
    said = ", ".join(names)
    return f"Too few values for a chart: {said}. All values: spotkeeper metrics {job}" if said else ""


def job_metrics(job: str, name: str, found: Iterable[GenerationMetrics]) -> JobMetrics:
    found = tuple(found)
    return JobMetrics(job, name, ancestors(found), joined(found))


def in_order(name: str) -> tuple[bool, tuple[tuple[str, int], ...], str]:
    """The sort key of a metric's name: ``loss`` is first, and ``m2`` before ``m10``."""
    parts = re.findall(r"([^0-9]*)([0-9]*)", name)
    return name != "loss", tuple((words, int(digits or -1)) for words, digits in parts), name


def metric_views(curves: Mapping[str, MetricColumns], most: int | None = None) -> tuple[MetricView, ...]:
    """Return the metrics for people, ``loss`` first, then by name."""
    names = sorted(curves, key=in_order)[:most]
    return tuple(_view(name, curves[name]) for name in names)


def _view(name: str, curve: MetricColumns) -> MetricView:
    numbers = [value for value in curve.values if math.isfinite(value)]
    last = None if math.isnan(curve.values[-1]) else curve.values[-1]
    drawn = sparkline(curve.steps, curve.values) if drawable(curve) else ""
    low, high = min(numbers, default=None), max(numbers, default=None)
    return MetricView(name, curve.steps[-1], len(curve.steps), last, low, high, drawn)
