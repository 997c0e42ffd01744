"""A generation's metrics in the bucket, ``jobs/<job>/logs/metrics/<gen>``, and what a reader accepts of them.

The training library writes this file (``spotkeeper/train/loop/metrics.py``) and the agent of the generation's lowest
member uploads it. So a job can write anything here: readers bound and check it.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import msgspec
from msgspec import Struct

from spotkeeper.contract import codec

BYTES = 9 << 20  # of an object: 64 metrics with 4,000 points each take 7 MB
METRICS = 64
ANCESTORS = 4000
POINTS = 4000
_NAME = re.compile(r"[A-Za-z0-9_./-]{1,100}\Z")
_MOST_STEP = 1 << 40
_MOST_S = 1e11
_ROUNDED_S = 256.0  # rounding of a float32 offset from a clock that began at 0 to today, at most


class _Columns(Struct, frozen=True, forbid_unknown_fields=True):
    """Arrays, little-endian: int64, float32, float64. ``seconds``: since ``began``."""

    steps: bytes
    seconds: bytes
    values: bytes


class _Metrics(Struct, frozen=True, forbid_unknown_fields=True):
    gen: int
    ancestors: tuple[tuple[int, int], ...]
    began: float
    metrics: dict[str, _Columns]


@dataclass(frozen=True)
class MetricPoints:
    """The points of one metric; steps ascend. ``times``: real unix seconds."""

    steps: Sequence[int]
    times: Sequence[float]
    values: Sequence[float]


@dataclass(frozen=True)
class GenerationMetrics:
    """The metrics of one generation.

    ``ancestors``: (generation, step) of the checkpoints that led here, oldest first. The generation that saved a
    checkpoint had resumed from the checkpoint before it in this list; this generation resumed from the last one. The
    points of an ancestor after its checkpoint's step do not count, since a later generation trained those steps again.
    """

    gen: int
    ancestors: tuple[tuple[int, int], ...]
    metrics: dict[str, MetricPoints]


def folder_name(job: str) -> str:
    return f"jobs/{job}/logs/metrics/"


def object_name(job: str, gen: int) -> str:
    return f"{folder_name(job)}{gen}"


def read_metrics(data: bytes, gen: int) -> GenerationMetrics:
    """Decode the object of generation ``gen``.

    Raises:
        ValueError: a job has written something else.
    """
    if len(data) > BYTES:
        raise ValueError(f"more than {BYTES >> 20} MB")
    try:
        found = codec.decode(data, _Metrics)
    except msgspec.DecodeError as error:
        raise ValueError(f"no metrics: {error}") from None
    if found.gen != gen or not 0.0 <= found.began < _MOST_S or len(found.metrics) > METRICS:
        raise ValueError("no metrics of this generation")
    if any(not (0 <= of < gen and 0 <= step < _MOST_STEP) for of, step in found.ancestors):
        raise ValueError("the field ancestors has an invalid generation or step")
    gens = [of for of, _ in found.ancestors]
    if len(gens) > ANCESTORS or any(one >= other for one, other in pairwise(gens)):
        raise ValueError("the field ancestors is too long or not in order of generation")
    return GenerationMetrics(
        gen, found.ancestors, {name: _points(name, found.began, found.metrics[name]) for name in sorted(found.metrics)}
    )


def _points(name: str, began: float, columns: _Columns) -> MetricPoints:
    try:
        steps, seconds, values = array("q", columns.steps), array("f", columns.seconds), array("d", columns.values)
    except ValueError:
        raise ValueError("a column is cut off") from None
    if not _NAME.match(name) or not len(steps) == len(seconds) == len(values) <= POINTS:
        raise ValueError("a metric's name or length is invalid")
    if any(one >= other for one, other in pairwise(steps)) or any(not 0 <= step < _MOST_STEP for step in steps):
        raise ValueError(f"the steps of the metric {name} are invalid")
    times = array("d", [began + offset for offset in seconds])
    if any(not -_ROUNDED_S <= at < _MOST_S for at in times):
        raise ValueError(f"the times of the metric {name} are invalid")
    return MetricPoints(steps, array("d", [max(0.0, at) for at in times]), values)
