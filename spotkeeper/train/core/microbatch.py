"""How a global batch is cut into micro-batches, and how their gradients become one optimizer step.

The cut does not depend on the number of ranks: micro-batch m of global batch n always has the same samples. Its loss,
batch statistics and dropout (seeded by the micro-batch's place in the run) are always the same as well. So gradients
at different numbers of ranks differ only in the order of a sum. Faster machines get more micro-batches, in proportion
to their measured speeds (``division.py``).

A gang may split a batch unevenly. So a rank's gradient is weighted by its number of samples, and DDP reduces once per
global batch, in each rank's last backward. A script that calls ``loss.backward`` and ``optimizer.step`` itself instead
of the run's methods would silently train wrongly at some numbers of ranks. So if the number of ranks may change, the
script's first call of ``optimizer.step`` raises an error.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from statistics import median_low
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from spotkeeper.train.core.errors import AttachError, CallError
from spotkeeper.train.core.gang import Gang
from spotkeeper.train.core.parts import Attached

EQUAL = 1.1  # machines whose times differ by less than this ratio count as equal: the difference is noise
Clip = float | Callable[[], object]
_OWN_STEP = (
    "this run's division of work may change, but the script calls optimizer.step() itself: gradients would be wrong "
    "where the batch does not divide evenly. Write run.backward(loss) for loss.backward(), and run.step() for "
    "optimizer.step(), scheduler.step() and optimizer.zero_grad(); or submit the job under another name with a "
    "fixed number of nodes and no `machines`"
)


@dataclass(frozen=True)
class MicroPlan:
    """How the global batches of a run are cut, if its number of ranks may change."""

    batch: int | None  # samples of a global batch; None: the loader's batch size times ``ranks`` is used
    ranks: int  # ranks of the largest world, as far as known
    costs: tuple[float, ...] = ()  # seconds per sample of each rank in this world; 0: not measured

    def batch_of(self, local: int) -> int:
        """Return the samples of a global batch. ``local``: the loader's batch size, used if ``batch`` is None."""
        return self.batch or local * self.ranks


@dataclass(frozen=True)
class MicroBatch:
    """What the loop yields to a rank: a micro-batch or, if the number of ranks is fixed, the rank's slice."""

    number: int  # index in the global batch
    places: range  # indices of its samples in the global batch
    samples: int  # weight of its gradient; 0: a copy of another rank's batch, to take part in collectives
    last: bool  # whether this is the rank's last micro-batch of the global batch

    def scale(self, batch: int, world: int) -> float:
        """Return the factor by which to multiply a micro-batch's mean loss.

        It makes DDP's mean over ranks the mean over the global batch. The formula has a single division, of integers,
        so with one micro-batch per rank the factor is exactly 1.0 and the bits are those of plain DDP.
        """
        return self.samples * world / batch


def even(batch: int, rank: int, world: int) -> tuple[MicroBatch, ...]:
    """Cut a global batch into one slice per rank, of ``batch`` / ``world`` samples."""
    size = batch // world
    return (MicroBatch(rank, range(rank * size, (rank + 1) * size), size, last=True),)


def micro_batches(batch: int, micro: int, rank: int, world: int, costs: Sequence[float] = ()) -> tuple[MicroBatch, ...]:
    """Return a rank's micro-batches of each global batch; every rank gets at least one.

    Args:
        batch: samples of the global batch.
        micro: samples of a micro-batch; the global batch's last micro-batch may be smaller.
        costs: seconds per sample by rank, as for ``shares``; () if all ranks count as equal.

    Returns:
        Consecutive micro-batches, as many as ``shares`` says. If ``shares`` says 0, the rank gets a copy of another
        rank's micro-batch with ``samples`` 0, because DDP needs a backward from every rank.
    """
    count = -(-batch // micro)
    plan = shares(count, costs or (0.0,) * world)
    first = sum(plan[:rank])
    mine = range(first, first + plan[rank])
    if not mine:
        number = rank % count
        return (MicroBatch(number, _places(batch, micro, number), 0, last=True),)
    places = [_places(batch, micro, number) for number in mine]
    return tuple(
        MicroBatch(number, place, len(place), number == mine[-1]) for number, place in zip(mine, places, strict=True)
    )


def shares(count: int, costs: Sequence[float]) -> tuple[int, ...]:
    """Divide ``count`` micro-batches among the ranks so that the last rank finishes as early as possible.

    Each micro-batch goes to the rank that would finish it first (the lowest rank if several would), which is optimal
    for pieces of equal size. If there are enough micro-batches, every rank gets one first: a rank without any would
    have to compute a copy of another rank's micro-batch, which takes just as long.

    Args:
        costs: seconds per sample by rank; 0 means unknown and counts as the median.

    Returns:
        Number of micro-batches by rank.
    """
    pace = pace_of(costs)
    if max(pace) <= EQUAL * min(pace):
        pace = [1.0] * len(pace)
    plan = [1 if rank < count else 0 for rank in range(len(pace))]
    heap = [(2 * cost, rank) for rank, cost in enumerate(pace)]
    heapq.heapify(heap)
    for _ in range(count - sum(plan)):
        _, rank = heap[0]
        plan[rank] += 1
        heapq.heapreplace(heap, ((plan[rank] + 1) * pace[rank], rank))
    return tuple(plan)


def pace_of(costs: Sequence[float]) -> list[float]:
    """Return the ranks' seconds per sample, with the median of the known ones for a rank whose speed is unknown."""
    middle = median_low([cost for cost in costs if cost > 0] or [1.0])
    return [cost if cost > 0 else middle for cost in costs]


def _places(batch: int, micro: int, number: int) -> range:
    return range(number * micro, min((number + 1) * micro, batch))


def find_plan(gang: Gang, batch: int | None, largest: int | None, cost: float = 0.0) -> MicroPlan | None:
    """Return the run's plan; None if its number of ranks is fixed. Collective.

    Args:
        batch: the ``global_batch`` given to ``attach()`` on this rank; None if it was not given.
        largest: most ranks that the job can have, as this machine's agent says; all ranks use rank 0's value.
        cost: seconds per sample that this machine needed in an earlier generation; 0: unknown.

    Raises:
        AttachError: ranks give different global batches, or a global batch of less than one sample.
    """
    if batch is not None and batch < 1:
        raise AttachError(f"attach(global_batch={batch}): want at least 1 sample")
    words = [json.loads(blob) for blob in gang.gather(json.dumps([batch, largest, cost]).encode())]
    if len(batches := {each for each, *_ in words}) > 1:
        raise AttachError(f"attach(global_batch=): ranks give different values: {', '.join(sorted(map(str, batches)))}")
    most = words[0][1]
    costs = tuple(float(each) for *_, each in words)
    return None if batch is None and most is None else MicroPlan(batch, max(most or 0, gang.world), costs)


class BatchPhase(Enum):
    """Progress of the current micro-batch. ``on`` is the method of ``Update`` that causes the change.

    ===== ============== =======
    from  on             to
    ===== ============== =======
    IDLE  ``begin``      FRESH
    FRESH ``backward``   ADDED
    ADDED ``step``       STEPPED
    any   ``done``       IDLE
    ===== ============== =======

    ``step`` steps the optimizers at the rank's last micro-batch of a global batch.
    """

    IDLE = 0
    FRESH = 1
    ADDED = 2
    STEPPED = 3


class Update:
    """A run's gradients and optimizer steps. ``elastic``: whether the number of ranks may change."""

    def __init__(self, parts: Attached, world: int, *, elastic: bool) -> None:
        """Register hooks on the optimizers.

        Raises:
            AttachError: the number of ranks may change, but an attached object does not support that.
        """
        self._parts = parts
        self._ddp = parts.ddp
        self._world = world
        self._elastic = elastic
        self._phase = BatchPhase.IDLE
        self._scale = 1.0
        self._last = True
        self._stepping = False
        self._stepped = False
        self._sum: torch.Tensor | None = None
        self.loss: torch.Tensor | None = None  # this rank's share of the mean loss of the last global batch
        if elastic:
            _check(parts, world)
        for optimizer in parts.optimizers:
            optimizer.register_step_pre_hook(self._before_step)

    def begin(self, micro_batch: MicroBatch, batch: int) -> None:
        """Prepare for the next micro-batch; ``batch``: samples of the global batch."""
        self._phase, self._last = BatchPhase.FRESH, micro_batch.last
        self._scale = micro_batch.scale(batch, self._world)
        if self._elastic and self._ddp is not None:
            self._ddp.require_backward_grad_sync = (
                micro_batch.last
            )  # as DDP.no_sync() does; DDP's forward reads this flag too

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradient of the current micro-batch's mean loss.

        Raises:
            CallError: outside the loop, or called twice for a batch.
        """
        if self._phase is not BatchPhase.FRESH:
            raise CallError(
                "inside the loop over run.steps(), call run.backward() once for each batch, with the sum of all losses"
            )
        self._phase = BatchPhase.ADDED
        loss = loss * self._scale
        self._sum = loss.detach() if self._sum is None else self._sum + loss.detach()
        scaler: Any = self._parts.scaler
        whole = loss if scaler is None else scaler.scale(loss)
        whole.backward()

    def step(self, clip: Clip | None) -> bool:
        """Step the optimizers if the global batch is complete. See ``Run.step``."""
        if self._phase is not BatchPhase.ADDED:
            raise CallError("call run.step() once after each run.backward(loss), inside the loop over run.steps()")
        self._phase = BatchPhase.STEPPED
        if not self._last:
            return False
        self.loss, self._sum = self._sum, None
        if clip is not None:
            self._clip(clip)
        self._stepped, self._stepping = False, True
        try:
            self._step_all()
        finally:
            self._stepping = False
        scheduler: Any = self._parts.common.get("scheduler")
        # After an overflow the scaler skips the step, so the learning rate stays as well.
        if self._stepped and isinstance(scheduler, LRScheduler) and not isinstance(scheduler, ReduceLROnPlateau):
            scheduler.step()
        for optimizer in self._parts.optimizers:
            optimizer.zero_grad()
        return True

    def done(self) -> None:
        """End the current micro-batch. Called when the script requests the next one.

        Raises:
            CallError: the number of ranks may change, and the script has skipped ``backward`` or ``step``, so that
                other ranks would wait forever or the sum of gradients would be wrong.
        """
        missing = self._phase is BatchPhase.FRESH or (self._last and self._phase is not BatchPhase.STEPPED)
        if self._elastic and missing:
            name = "run.backward(loss)" if self._phase is BatchPhase.FRESH else "run.step()"
            raise CallError(
                f"{name} was not called for a batch; each batch needs it, because the division of work may change"
            )
        self._phase = BatchPhase.IDLE

    def end(self) -> None:
        """Restore DDP's settings after the loop."""
        self._phase, self._sum = BatchPhase.IDLE, None
        if self._elastic and self._ddp is not None:
            self._ddp.require_backward_grad_sync = True

    def _clip(self, clip: Clip) -> None:
        scaler: Any = self._parts.scaler
        if scaler is not None:
            for optimizer in self._parts.optimizers:
                scaler.unscale_(optimizer)
        if callable(clip):
            clip()
        else:
            groups = [group for optimizer in self._parts.optimizers for group in optimizer.param_groups]
            torch.nn.utils.clip_grad_norm_([param for group in groups for param in group["params"]], clip)

    def _step_all(self) -> None:
        scaler: Any = self._parts.scaler
        for optimizer in self._parts.optimizers:
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
        if scaler is not None:
            scaler.update()

    def _before_step(self, *_: object) -> None:
        self._stepped = True
        if self._elastic and not self._stepping:
            raise CallError(_OWN_STEP)


def _check(parts: Attached, world: int) -> None:
    if not parts.optimizers:
        raise AttachError(
            "attach(optimizer=) is missing: this run's division of work may change, so run.step() steps the optimizer"
        )
    if parts.sharded or (world > 1 and parts.ddp is None):
        raise AttachError(
            "attach(model=): this run's division of work may change, so wrap the model in DistributedDataParallel; "
            "a sharded model needs a fixed number of nodes and no `machines`"
        )
    if parts.ddp is not None and parts.ddp.static_graph:
        raise AttachError(
            "attach(model=): DistributedDataParallel(static_graph=True) cannot accumulate gradients, which this run "
            "must do because its division of work may change"
        )
