"""Finds the machine that slows a gang down: times each rank's own work and compares the ranks.

In a synchronous gang every rank's step takes as long as the slowest rank's, so step times alone do not tell ranks
apart. A rank's *own time* runs from the end of the previous step to the last gradient of its backward, before DDP waits
for the all-reduce. It consists of waiting for data, copying to the device, forward and backward. If parameters are on a
GPU, two CUDA events on the compute stream measure the own time, because the host runs ahead of the GPU; the events are
read after both have passed.

Blind spots: collectives inside forward or backward (SyncBatchNorm; DDP's broadcast of rank 0's buffers, when rank 0
waits for data) make all own times as long as the slowest rank's, and the optimizer's step is not included. Both can
hide a slow rank; neither makes a rank look slower than the others. Sharded models gather weights all the time and are
not measured.

After each *window* of some seconds the ranks exchange these times while training continues. All ranks get the same
list after the same step, and each machine judges itself. The agent reports this verdict from the control file to the
function, which decides whether to replace the machine (``reconcile/decide``). The work is divided by the same times
(``core/division.py``).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median, median_low
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from spotkeeper.train.agent_link.control import NAME, Control, ControlError
from spotkeeper.train.core.gang import Gang

EVERY_S = 0.05  # shortest time between samples: a sample takes 11 us, 0.02 % of such a step
SLOWER = 1.3  # a machine slows the others down if its own time is above this multiple of the median rank's
WINDOWS = 5  # windows in a row before a verdict changes
WINDOW_S = 10.0
_FIRST = 16  # steps of the first window, while the step time is unknown
_MOST = 10_000


class Stopwatch:
    """Measures a rank's own time for some of its steps. Call ``begin`` before and ``end`` after each step; they
    never block."""

    def __init__(self, ddp: DistributedDataParallel | None, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._armed = False
        self._began: Any = None
        self._marked: Any = None
        self._at = self._sampled = float("-inf")  # start of the step being sampled, and of the last sampled step
        self._passed: tuple[Any, Any] | None = None  # two CUDA events that may not have passed yet
        param = None if ddp is None else _first_ready(ddp.module)
        self._cuda = param is not None and param.is_cuda
        if param is not None:
            param.register_post_accumulate_grad_hook(self._backward)

    def begin(self) -> None:
        """Start the measurement of a step, before the loop waits for its data."""
        now = self._now()
        self._marked = None
        self._armed = self._passed is None and now - self._sampled >= EVERY_S
        if self._armed:
            self._at, self._began = now, self._mark_of()

    def end(self) -> float | None:
        """End a step. Return the seconds of its own work, without waits for other ranks, or None if unknown.

        A GPU runs behind the host, so its measurement of a step is read, and returned, at the end of a later step.
        """
        began, marked, armed, self._armed = self._began, self._marked, self._armed, False
        if armed and marked is not None:
            self._sampled = self._at
            if not self._cuda:
                return float(marked - began)
            self._passed = began, marked
        if self._passed is None or not self._passed[1].query():
            return None
        (first, last), self._passed = self._passed, None
        return float(first.elapsed_time(last)) / 1e3

    def _backward(self, _: torch.Tensor) -> None:
        # At the end of backward the engine calls this callback first, then DDP's, which waits.
        if self._armed:
            torch.autograd.Variable._execution_engine.queue_callback(self._mark)

    def _mark(self) -> None:
        self._marked = self._mark_of()

    def _mark_of(self) -> Any:
        if not self._cuda:
            return self._now()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _first_ready(module: nn.Module) -> nn.Parameter | None:
    """Return a parameter whose hook runs early in backward, before DDP's: usually the one declared last."""
    trained = [param for param in module.parameters() if param.requires_grad]
    return trained[-1] if trained else None


@dataclass(frozen=True)
class WindowTimes:
    """A rank's times in a window: own time per step, own time per sample, time of a whole step; 0: not measured.

    ``ahead``: global batches that its loader may have begun before the loop asks for them.
    """

    own_s: float = 0.0
    sample_s: float = 0.0
    step_s: float = 0.0
    ahead: float = 0.0


class LagVerdict:
    """One machine's verdict on whether it slows the gang down.

    ``lag``: the machine's own time as a multiple of the median rank's; 0 while the machine keeps up.
    """

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=WINDOWS)
        self.lag = 0.0

    def window(self, ranks: Sequence[WindowTimes], mine: Sequence[int]) -> None:
        """Update the verdict with all ranks' times in the newest window. ``mine``: the ranks of this machine."""
        ratio = max((ratio_of(ranks, rank) for rank in mine), default=0.0)
        if not ratio:
            return  # not measured
        self._last.append(ratio)
        if len(self._last) < WINDOWS:
            return
        if all(each > SLOWER for each in self._last):
            self.lag = median(self._last)
        elif all(each <= SLOWER for each in self._last):
            self.lag = 0.0


def ratio_of(ranks: Sequence[WindowTimes], rank: int) -> float:
    """Return a rank's own time as a multiple of the median rank's; 0 if unknown.

    This is the lower of two ratios, of the times per step and of the times per sample: a rank with more samples takes
    longer per step without being slow, and a slow rank with fewer samples delays no other rank. The median of an even
    number of ranks is the lower middle one, so of two ranks it is the faster one.
    """
    found = []
    for of in ("own_s", "sample_s"):
        values: list[float] = [getattr(told, of) for told in ranks]
        known, mine = [value for value in values if value > 0], values[rank]
        if len(known) < 2 or mine <= 0:
            return 0.0
        found.append(mine / median_low(known))
    return min(found)


class LagMonitor:
    """Exchanges times between ranks and writes this machine's verdict on whether it slows the gang down.

    Args:
        mine: ranks of this machine.
        control: the control file; this machine's first rank writes the verdict there.
    """

    def __init__(self, gang: Gang, mine: Sequence[int], control: Control) -> None:
        self._gang, self._mine, self._control = gang, tuple(mine), control
        self._verdict = LagVerdict()
        self._own: list[float] = []
        self._samples = 0
        self._steps = 0
        self._left = _FIRST
        self._pending: Callable[[], list[tuple[float, ...]]] | None = None

    def after_step(self, own_s: float | None, samples: int, step_s: float, ahead: int = 0) -> list[WindowTimes] | None:
        """Add a step. Return all ranks' times if a window is complete. Collective: all ranks call it after the same
        steps, and get the same list.

        Args:
            own_s: seconds of this rank's own work in a recent step, without waits for other ranks; None: not measured.
            samples: samples that this rank computed in this step, also those of a copied micro-batch.
            step_s: this rank's usual step time, seconds.
            ahead: as ``WindowTimes.ahead``.
        """
        if self._gang.world == 1:
            return None
        told = self.drain()
        if own_s is not None:
            self._own.append(own_s)
        self._samples += samples
        self._steps += 1
        if self._steps >= self._left:
            self._send(step_s, ahead)
        return told

    def drain(self) -> list[WindowTimes] | None:
        """Finish the pending exchange, and return its times. Collective."""
        if self._pending is None:
            return None
        told, self._pending = [WindowTimes(*each) for each in self._pending()], None
        self._receive(told)
        return told

    def _send(self, step_s: float, ahead: int) -> None:
        own_s = mean(self._own) if self._own else 0.0
        sample_s = own_s * self._steps / self._samples if self._samples else 0.0
        self._pending = self._gang.share((own_s, sample_s, step_s, ahead))
        self._own, self._samples, self._steps = [], 0, 0

    def _receive(self, ranks: list[WindowTimes]) -> None:
        slowest_s = max(each.step_s for each in ranks)
        self._left = max(1, min(_MOST, int(WINDOW_S / slowest_s))) if slowest_s > 0 else _FIRST
        if self._gang.local_rank:
            return
        self._verdict.window(ranks, self._mine)
        self._control.lag = self._verdict.lag
        self._control.sample_s = max(ranks[rank].sample_s for rank in self._mine)


def remembered(run: Path | None) -> float:
    """Return the seconds per sample that this machine needed in its last measured generation; 0 if unknown.

    Args:
        run: this generation's run folder. The run folders of earlier generations, with control files, are beside it.
    """
    if run is None or not run.name.isdecimal():
        return 0.0
    older = [path for path in run.parent.iterdir() if path.name.isdecimal() and int(path.name) < int(run.name)]
    for folder in sorted(older, key=lambda path: int(path.name), reverse=True):
        try:
            with Control.open(folder / NAME) as control:
                if control.sample_s > 0:
                    return control.sample_s
        except (OSError, ControlError):
            continue
    return 0.0
