"""The history of the metrics that a script reports: collected on rank 0, written for the agent, saved in checkpoints.

``report`` only puts values into a list. A few times a second the list is sorted into curves (``core/curve.py``). A
value on a GPU is first copied to the CPU in the background and read once the copy is there, so no report waits for a
device.

Every few seconds the curves of this generation replace ``metrics.json`` in the run folder. Each of these files has a
number, counted from 1, which goes into the control file (``metrics_file``). The agent uploads the newest file once a
minute and then writes its number into the control file too (``metrics_stored``). A checkpoint carries the points that
are not uploaded yet. So if the machine is lost, the next generation begins with them. Each file also names the
checkpoints from which this generation and its ancestors resumed, so that readers can join the files of all generations
to one curve.
"""

from __future__ import annotations

import atexit
import base64
import json
import math
import operator
import os
import re
import time
from array import array
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from spotkeeper.train.agent_link.control import METRICS, Commit, Control
from spotkeeper.train.core.curve import MOST, Curve
from spotkeeper.train.core.errors import say

NAMES = 64  # most metrics of a run
CARRIED = 256  # most points of a metric that a checkpoint carries
ANCESTORS = 4000  # most generations that a file names
WRITE_S = 10.0  # shortest time between two files
SORT_S = 0.5  # shortest time between two updates of the control file's loss
_BATCH = 256  # reports that are sorted at once
_REFUSED = 100  # most names of which the log says that they are not kept
_UNSTORED = 8  # most groups of points that are not uploaded yet
_NAME = re.compile(r"[A-Za-z0-9_./-]{1,100}\Z")
_PLAIN = frozenset({float})

# A call of ``run.report``: step, real unix seconds, values by name, and those values that a device still computes.
_Report = tuple[int, float, dict[str, Any], "dict[str, DeviceRead] | None"]


class DeviceRead:
    """Copies a value from a GPU to the CPU in the background, after the work that the GPU has queued."""

    def __init__(self, tensor: torch.Tensor) -> None:
        stream = torch.cuda.current_stream(tensor.device)
        self._copy = tensor.to("cpu", non_blocking=True)  # into pinned memory
        self._event = torch.cuda.Event()
        self._event.record(stream)

    def ready(self) -> bool:
        return bool(self._event.query())

    def value(self) -> float:
        """Return the value; wait for the device unless ``ready``."""
        self._event.synchronize()
        return float(self._copy.item())


class _Curves(dict[str, Curve]):
    """Curves by metric. A new curve is thinned to the width of that metric's curve in ``like``, if there is one."""

    def __init__(self, most: int = MOST, like: _Curves | None = None) -> None:
        super().__init__()
        self._most, self._like = most, like

    def __missing__(self, name: str) -> Curve:
        like = None if self._like is None else self._like.get(name)
        curve = self[name] = Curve(self._most, 1 if like is None else like.width)
        return curve

    def join(self, later: _Curves) -> None:
        """Add the points of curves that continue these."""
        for name, curve in later.items():
            self[name].join(curve)


class MetricHistory:
    """The metrics of one generation.

    Args:
        folder: the run folder; None (ranks other than 0, runs without an agent): keep no history, only the last loss.
        compared: the metric by which a search compares its trials; "": none.
    """

    def __init__(self, control: Control, folder: Path | None, gen: int, compared: str = "") -> None:
        self._control = control
        self._path = None if folder is None else folder / METRICS
        self._gen = gen
        self._compared = compared
        self._last: tuple[int, float] | None = None  # step and value of ``compared``, the newest
        self._began = time.time()
        self._epoch = self._began - time.monotonic()
        self._reports: list[_Report] = []
        self._waits = False  # some of them wait for a device
        self._names: set[str] = set()
        self._refused: set[str] = set()  # names in the log, each with the reason why it is not kept
        self._file_failed = False
        self._sort_at = 0.0  # monotonic
        self._write_at = time.monotonic() + WRITE_S
        self._curves = _Curves()  # as in the last file
        self._fresh = _Curves()  # points that are in no file yet
        self._unstored: list[tuple[int, _Curves]] = []  # points of files that the agent has not uploaded yet
        self._number = 0  # of the last file
        self._ancestors: list[tuple[int, int]] = []  # checkpoints (generation, step) that led here, oldest first
        if folder is not None:
            atexit.register(self._at_exit, os.getpid())

    # ------------------------------------------------------------ what the script reports

    def report(self, step: int, values: dict[str, Any]) -> None:
        """Take values that belong to ``step``. A later report of the same step replaces them."""
        reads = None
        if not _PLAIN.issuperset(map(type, values.values())):
            values, reads = self._read(values)
        now = time.monotonic()
        self._reports.append((step, self._epoch + now, values, reads))
        if now >= self._sort_at or len(self._reports) >= _BATCH:
            self._sort_at = now + SORT_S
            self._sort()
            self.poll(now)

    def _named(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return the values whose names are allowed, and remember these names."""
        if values.keys() <= self._names:
            return values
        return {name: values[name] for name in sorted(values, key=str) if self._allowed(name)}

    def _allowed(self, name: str) -> bool:
        if name in self._names:
            return True
        if not isinstance(name, str) or not _NAME.match(name):
            self._refuse(name, "a metric's name has at most 100 letters, digits and _ . / -")
        elif len(self._names) >= NAMES:
            self._refuse(name, f"a run has at most {NAMES} metrics; this one is not kept")
        else:
            self._names.add(name)
            return True
        return False

    def _read(self, values: dict[str, Any]) -> tuple[dict[str, Any], dict[str, DeviceRead] | None]:
        """Return all values as numbers, except those that a GPU holds, which are returned apart.

        A name that is new is taken only if its value can be kept.
        """
        found: dict[str, Any] = {}
        reads: dict[str, DeviceRead] = {}
        for name in values if values.keys() <= self._names else sorted(values, key=str):
            value = values[name]
            if value is None:
                continue
            try:
                number = _number(value)
            except Exception as error:  # a value's own code can raise anything; a report never fails
                self._refuse(name, f"want a number or a tensor of one element: {error!s:.200}")
                continue
            if not self._allowed(name):
                continue
            if number is None:
                reads[name] = DeviceRead(value.detach())
            else:
                found[name] = number
        self._waits |= bool(reads)
        return found, reads or None

    def _refuse(self, name: str, why: str) -> None:
        """Say once of a name why it is not kept."""
        if name in self._refused or len(self._refused) > _REFUSED:
            return
        self._refused.add(name)
        if len(self._refused) > _REFUSED:
            say("run.report: more names cannot be kept; the log names no more of them")
        else:
            word = name if isinstance(name, str) and _NAME.match(name) else f"{name!r:.120}"
            say(f"run.report: {word}: {why}")

    # ------------------------------------------------------------ curves

    def _sort(self, *, wait: bool = False) -> None:
        """Move reports into curves, up to the first report with a value that a device still computes."""
        done = self._ready(wait) if self._waits else len(self._reports)
        reports = self._reports[:done]
        del self._reports[:done]
        if not reports:
            return
        steps, times, values, _ = zip(*reports, strict=True)
        columns = _columns(values)
        if not columns or not columns.keys() <= self._names:  # checked here, once for many reports
            values = tuple(map(self._named, values))
            columns = _columns(values)
        losses = columns.get("loss", ()) if columns else [found["loss"] for found in values if "loss" in found]
        if losses:
            self._control.loss = losses[-1]
        if self._path is None:
            return
        if self._compared:
            self._note(steps, values)
        if columns and all(map(operator.lt, steps, steps[1:])):
            for name, column in columns.items():
                self._fresh[name].add(steps, times, column)
        else:
            _add(self._fresh, steps, times, values)

    def _note(self, steps: Sequence[int], values: Sequence[dict[str, Any]]) -> None:
        """Remember the newest value of the metric that a search compares."""
        for step, found in zip(steps, values, strict=True):
            if self._compared in found and (self._last is None or step >= self._last[0]):
                self._last = step, found[self._compared]

    def value(self) -> float | None:
        """Return the newest value of the metric that a search compares; None if it is no finite number."""
        self._sort(wait=True)
        return self._last[1] if self._last is not None and math.isfinite(self._last[1]) else None

    def _ready(self, wait: bool) -> int:
        """Read the values that a device has computed. ``wait``: wait until it has computed all of them.

        Returns the number of complete reports before the first incomplete report.
        """
        for done, (_, _, values, reads) in enumerate(self._reports):
            if reads:
                if not wait and not all(read.ready() for read in reads.values()):
                    return done
                values |= {name: read.value() for name, read in reads.items()}
        self._waits = False
        return len(self._reports)

    def poll(self, now: float) -> None:
        """Write the next file if it is due. ``now``: monotonic."""
        if now >= self._write_at:
            self._write_at = now + WRITE_S
            self.write()

    # ------------------------------------------------------------ files

    def write(self, *, wait: bool = False) -> None:
        """Write all points to the run folder. ``wait``: whether to wait for values that a device still computes."""
        self._sort(wait=wait)
        if self._path is None or not (self._fresh or (self._ancestors and not self._number)):
            return
        self._forget_stored()
        self._number += 1
        self._curves.join(self._fresh)
        self._unstored.append((self._number, self._fresh))
        self._fresh = _Curves(like=self._curves)
        if len(self._unstored) > _UNSTORED:
            (_, older), (number, newer) = self._unstored[:2]
            older.join(newer)
            self._unstored[:2] = [(number, older)]
        temporary = self._path.with_suffix(f".tmp{os.getpid()}")
        try:
            temporary.write_text(self._encoded())
            temporary.replace(self._path)
        except OSError as error:
            if not self._file_failed:
                say(f"run.report: {self._path}: {error}; the next file has the metrics too")
            self._file_failed = True
        else:
            self._control.metrics_file = self._number

    def _encoded(self) -> str:
        metrics = {name: _encoded(curve, self._began) for name, curve in self._curves.items()}
        return json.dumps({"gen": self._gen, "ancestors": self._ancestors, "began": self._began, "metrics": metrics})

    def _forget_stored(self) -> None:
        stored = self._control.metrics_stored
        self._unstored = [(number, curves) for number, curves in self._unstored if number > stored]

    def _at_exit(self, pid: int) -> None:
        if os.getpid() == pid and self._path is not None and self._path.parent.is_dir():
            self.write()

    # ------------------------------------------------------------ checkpoints

    def take(self) -> dict[str, Any]:
        """Return what a checkpoint carries: all names, and points not uploaded yet. Waits for values on a device."""
        if self._path is None:
            return {}
        self._sort(wait=True)
        self._forget_stored()
        carried = _Curves(CARRIED)
        for curves in (*(curves for _, curves in self._unstored), self._fresh):
            carried.join(curves)
        points = {name: (curve.steps, curve.times, curve.values) for name, curve in carried.items()}
        taken = {"ancestors": self._ancestors, "points": points, "names": sorted(self._names)}
        return taken | ({"last": self._last} if self._last else {})

    def restore(self, state: Mapping[str, Any], commit: Commit) -> None:
        """Begin with the points that the checkpoint ``commit`` carries."""
        if self._path is None:
            return
        known = [(int(gen), int(step)) for gen, step in state.get("ancestors", ())]
        self._ancestors = [*known, (commit.gen, commit.step)][-ANCESTORS:]
        self._last = state.get("last")
        self._names |= set(state.get("names", ()))
        for name, columns in state.get("points", {}).items():
            curve = Curve()
            curve.add(*columns)
            curve.cut(commit.step)
            if curve:
                self._names.add(name)
                self._fresh[name] = curve


def _number(value: Any) -> float | None:
    """Return a value as a number; None for a tensor that a GPU holds. Raises what the value's own code raises."""
    if not isinstance(value, torch.Tensor):
        return float(value)
    if value.numel() != 1:
        raise ValueError(f"a tensor of shape {tuple(value.shape)}")
    if value.is_complex():
        raise ValueError("a complex tensor")
    return None if on_gpu(value) else float(value.detach().item())


def on_gpu(tensor: torch.Tensor) -> bool:
    return bool(tensor.is_cuda)


def _columns(values: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """Return the values of each name, if all reports have the same names, else {}."""
    first = values[0]
    if sum(map(len, values)) != len(first) * len(values):
        return {}
    try:
        return {name: list(map(operator.itemgetter(name), values)) for name in first}
    except KeyError:
        return {}


def _add(curves: _Curves, steps: Sequence[int], times: Sequence[float], values: Sequence[dict[str, Any]]) -> None:
    """Add reports to their metrics' curves. Of several reports of a step the last one counts."""
    for name in dict.fromkeys(chain.from_iterable(values)):
        rows = zip(steps, times, values, strict=True)
        last = {step: (step, at, found[name]) for step, at, found in rows if name in found}
        curves[name].add(*zip(*sorted(last.values()), strict=True))


def _encoded(curve: Curve, began: float) -> dict[str, str]:
    """Return points as three arrays in base64: steps (int64), seconds since ``began`` (float32), values (float64)."""
    columns: dict[str, array[Any]] = {
        "steps": array("q", curve.steps),
        "seconds": array("f", [at - began for at in curve.times]),
        "values": array("d", curve.values),
    }
    return {word: base64.b64encode(column.tobytes()).decode() for word, column in columns.items()}
