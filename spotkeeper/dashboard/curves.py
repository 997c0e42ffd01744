"""Reads the metrics of jobs for all their open pages: each job once, one after the other, thinned to what charts draw.

So the memory of a job's metrics is that of one tab, however many tabs show it.
"""

from __future__ import annotations

import asyncio
import math
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import TypeAlias

from spotkeeper.client.metrics import MetricsReader
from spotkeeper.contract.generation import Progress
from spotkeeper.reconcile.store.store import Store
from spotkeeper.report.job.metrics import curves, drawable, in_order, pace

FRESH_S = 30.0  # real; half of the time from one read for a page to the next, so pages of one job share the reads
IDLE_S = 600.0  # real; the same for a job that does not train and whose last read brought nothing new
KEPT = 8  # jobs whose ended generations stay in memory, up to 6 MB each; with more, all would be read again and again
MOST_METRICS = 64  # curves of metrics: as many as a job has
FIRST_CHARTS = 24  # that a page draws until the user asks for all: each chart costs the browser time
DRAWN_POINTS = 1000  # of a chart
LOSS = "loss"
ROW_GENERATIONS, ROW_POINTS = 2, 80  # of a row's small charts: generations that are read, points that are kept
Points = list[tuple[int, float]]  # points (step, value)
Sample: TypeAlias = tuple[int, float | None, float | None]  # step, loss, throughput in training samples a second


@dataclass(frozen=True)
class JobCurves:
    """What the charts of a job's metrics draw; pages share it and change nothing in it.

    ``metrics``: the loss, if the job reports it, and the first others by name that have two finite values, of which
    the first ``FIRST_CHARTS`` are here and the others ``packed`` as columns of steps and values, in a seventh of the
    memory; ``few``: names of metrics with fewer values; ``more``: names of further ones; ``pace``: steps a second.
    """

    metrics: dict[str, Points] = field(default_factory=dict)
    packed: dict[str, tuple[array[int], array[float]]] = field(default_factory=dict)
    few: tuple[str, ...] = ()
    more: tuple[str, ...] = ()
    pace: Points = field(default_factory=list)

    @cached_property
    def unpacked(self) -> dict[str, Points]:
        return {name: list(zip(*columns, strict=True)) for name, columns in self.packed.items()}


@dataclass
class _Job:
    reader: MetricsReader
    curves: JobCurves
    read_at: float
    unchanged: bool  # since the read before


class CurvesReader:
    """The curves of the jobs that pages show, those read last for at most :data:`KEPT` jobs."""

    def __init__(self, store: Store, clock: Callable[[], float]) -> None:
        self._store, self._clock = store, clock
        self._jobs: dict[str, _Job] = {}  # those read last come last
        self._one = asyncio.Lock()

    async def read(self, job: str, *, trains: bool = True) -> JobCurves:
        """Return the curves of a job, read at most :data:`FRESH_S` ago, or :data:`IDLE_S` if nothing new is expected.

        Raises:
            StoreError: the bucket could not be read.
        """
        async with self._one:
            known = self._jobs.pop(job, None)  # not put back if the read fails, which can leave the reader incomplete
            fresh_s = IDLE_S if known is not None and known.unchanged and not trains else FRESH_S
            if known is None or self._clock() - known.read_at >= fresh_s:
                reader = known.reader if known is not None else reader_of(self._store, job)
                at = self._clock()
                curves = await asyncio.to_thread(drawn, reader)
                unchanged = known is not None and curves == known.curves
                if known is not None and unchanged:
                    curves = known.curves  # pages hold these points already
                known = _Job(reader, curves, at, unchanged)
            self._jobs[job] = known
            for oldest in list(self._jobs)[:-KEPT]:
                del self._jobs[oldest]
            return known.curves

    def keep(self, shown: set[str | None]) -> None:
        """Forget all jobs that no page shows."""
        self._jobs = {job: known for job, known in self._jobs.items() if job in shown}


def reader_of(store: Store, job: str) -> MetricsReader:
    """Return a reader that keeps no more of a job's ended generations than its page draws."""
    return MetricsReader(store, job, metrics=MOST_METRICS, points=DRAWN_POINTS)


def drawn(reader: MetricsReader) -> JobCurves:
    """Read a job's metrics and return what its page draws. One whole curve at a time is in memory."""
    metrics: dict[str, Points] = {}
    packed: dict[str, tuple[array[int], array[float]]] = {}
    few: list[str] = []
    speed: Points = []
    most = 0
    for name, curve in curves(reader.read()):
        if len(curve.steps) > most:
            most, speed = len(curve.steps), pace(curve)
        if name != LOSS and not drawable(curve):
            few.append(name)
        elif name == LOSS or len(metrics) + len(packed) - (LOSS in metrics) < MOST_METRICS - 1:
            points = zip(curve.steps, curve.values, strict=True)
            shown = thinned([(step, value) for step, value in points if math.isfinite(value)])
            if len(metrics) - (LOSS in metrics) < FIRST_CHARTS - 1 or name == LOSS:
                metrics[name] = shown
            else:
                packed[name] = array("q", (step for step, _ in shown)), array("d", (value for _, value in shown))
    more = reader.names - metrics.keys() - packed.keys() - set(few)
    return JobCurves(metrics, packed, tuple(few), tuple(sorted(more, key=in_order)), speed)


def history(store: Store, job: str, progress: Progress) -> list[Sample]:
    """Return what a row of the list draws of the steps before its first read, by step.

    It reads two generations at most. The throughput is known if the time and the samples of a step are.

    Raises:
        StoreError: the bucket could not be read.
    """
    reader = MetricsReader(store, job, most=ROW_GENERATIONS, metrics=1)
    name, curve = next(curves(reader.read()), ("", None))
    if curve is None:
        return []
    loss = [(step, value) for step, value in zip(curve.steps, curve.values, strict=True) if math.isfinite(value)]
    found: list[Sample] = [(step, value, None) for step, value in thinned(loss, ROW_POINTS) if name == LOSS]
    if progress.samples_per_s and progress.step_s:
        batch = progress.samples_per_s * progress.step_s
        found += [(step, None, batch * speed) for step, speed in pace(curve, ROW_POINTS)]
    return sorted((one for one in found if one[0] <= progress.step), key=lambda one: one[0])


def thinned(points: Points, most: int = DRAWN_POINTS) -> Points:
    """Thin a curve to at most ``most`` points (an even number): the lowest and the highest of each equal part of steps.

    So a run's older part, which is thinned already, looks as its newest part.
    """
    if not points:
        return points
    first, last = points[0][0], points[-1][0]
    size = -(-2 * (last - first + 1) // most)
    parts = (list(part) for _, part in groupby(points, lambda point: (point[0] - first) // size))
    return [
        point
        for part in parts
        for point in sorted({min(part, key=lambda one: one[1]), max(part, key=lambda one: one[1])})
    ]
