"""A rank's own time of a step: what it takes without waiting for the others. Measures; agrees on nothing.

In a synchronous gang every rank's step takes as long as the slowest one's, so the step says
nothing of the rank. Its own time runs from the end of the step before to the last gradient
of its backward, before DDP waits for the sums: the loader's wait, the copy to the device,
forward and backward. Where parameters are on a GPU it is taken on the GPU's own clock (two
events on the stream it computes on, read when they have passed), for the host runs ahead.

What is not seen: collectives within forward or backward (SyncBatchNorm; DDP's copy of
rank 0's buffers, where rank 0's loader is slow) make all look as slow as the slowest, and
the optimizer's step is left out. Both can hide a slow rank; neither makes a quick one look
slow. Sharded models gather weights all the time: of them nothing is measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

EVERY_S = 0.05  # a sample at most so often: 11 us each, 0.02 % of such a step


class Stopwatch:
    """One rank's. ``begin`` and ``end`` are called between two steps; none of it waits for anything."""

    def __init__(self, ddp: DistributedDataParallel | None, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._armed = False
        self._began: Any = None
        self._marked: Any = None
        self._at = self._sampled = float("-inf")  # when the step began that is sampled, or was last
        self._passed: tuple[Any, Any] | None = None  # two events of a GPU that may not have passed yet
        param = None if ddp is None else _first_ready(ddp.module)
        self._cuda = param is not None and param.is_cuda
        if param is not None:
            param.register_post_accumulate_grad_hook(self._backward)

    def begin(self) -> None:
        """A step begins, or the loop's wait for its data."""
        now = self._now()
        self._marked = None
        self._armed = self._passed is None and now - self._sampled >= EVERY_S
        if self._armed:
            self._at, self._began = now, self._mark_of()

    def end(self) -> float | None:
        """The step is done: a step's own time, of this or an earlier one; None where none was taken."""
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
        # The engine calls back in this order at the end of backward: us, then DDP, which waits there.
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
    """A parameter whose gradient comes early in backward: by rule, the last one that is declared."""
    trained = [param for param in module.parameters() if param.requires_grad]
    return trained[-1] if trained else None
