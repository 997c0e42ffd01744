"""``run.backward`` and ``run.step``: one optimizer step for each global batch, each sample weighing the same.

A gang may split a batch unevenly, so a rank's gradient counts by its samples, and DDP may
add up over ranks only once per global batch, in each rank's last backward. A script that
does either by itself would train wrongly, without a sign of it, in some worlds; so where
the world may change, it is told at its first own step.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from spotkeeper.train.errors import AttachError, CallError
from spotkeeper.train.micro import Turn
from spotkeeper.train.parts import Parts

Clip = float | Callable[[], object]

_OWN_STEP = (
    "this run's world may change, but the script calls optimizer.step() itself: where the batch does not divide "
    "evenly, gradients would be wrong. Write run.backward(loss) for loss.backward(), and run.step() for "
    "optimizer.step(), scheduler.step() and optimizer.zero_grad(); or submit it under another name with one "
    "number of nodes"
)


class Phase(Enum):
    """Of the micro-batch in hand.

    IDLE   begin    FRESH
    FRESH  backward ADDED
    ADDED  step     STEPPED   (of the rank's last one of a global batch the optimizer steps, else nothing does)
    ADDED, STEPPED  done  IDLE
    """

    IDLE = 0
    FRESH = 1
    ADDED = 2
    STEPPED = 3


class Update:
    """A run's gradients. ``elastic``: its world may change, so nobody else may step the optimizers."""

    def __init__(self, parts: Parts, world: int, *, elastic: bool) -> None:
        """
        Raises:
            AttachError: the world may change, and what was attached cannot follow.
        """
        self._parts = parts
        self._ddp = parts.ddp
        self._world = world
        self._elastic = elastic
        self._phase = Phase.IDLE
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

    def begin(self, turn: Turn, batch: int) -> None:
        """A micro-batch is about to be given to the script; ``batch``: samples of the global batch."""
        self._phase, self._last = Phase.FRESH, turn.last
        self._scale = turn.scale(batch, self._world)
        if self._elastic and self._ddp is not None:
            self._ddp.require_backward_grad_sync = turn.last  # what DDP.no_sync() does; its forward looks at it too

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradient of the mean loss of the micro-batch in hand.

        Raises:
            CallError: there is none, or this was done for it.
        """
        if self._phase is not Phase.FRESH:
            raise CallError(
                "run.backward(loss) goes inside the loop over run.steps(), once for each batch; add several losses up"
            )
        self._phase = Phase.ADDED
        loss = loss * self._scale
        self._sum = loss.detach() if self._sum is None else self._sum + loss.detach()
        scaler: Any = self._parts.scaler
        whole = loss if scaler is None else scaler.scale(loss)
        whole.backward()

    def step(self, clip: Clip | None) -> bool:
        """Step, where the global batch is whole; else nothing. See ``Run.step``."""
        if self._phase is not Phase.ADDED:
            raise CallError("run.step() comes once after each run.backward(loss), inside the loop over run.steps()")
        self._phase = Phase.STEPPED
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
        # A scaler that met an overflow steps nothing, so the learning rate stays as well.
        if self._stepped and isinstance(scheduler, LRScheduler) and not isinstance(scheduler, ReduceLROnPlateau):
            scheduler.step()
        for optimizer in self._parts.optimizers:
            optimizer.zero_grad()
        return True

    def done(self) -> None:
        """The script wants the next batch.

        Raises:
            CallError: the world may change, and the script has not trained on this one, so the others
                would wait for it for ever, or sum something else.
        """
        missing = self._phase is Phase.FRESH or (self._last and self._phase is not Phase.STEPPED)
        if self._elastic and missing:
            name = "run.backward(loss)" if self._phase is Phase.FRESH else "run.step()"
            raise CallError(f"{name} was not called for a batch; where the world may change, each needs both")
        self._phase = Phase.IDLE

    def end(self) -> None:
        """The loop is over: DDP is as it was."""
        self._phase, self._sum = Phase.IDLE, None
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


def _check(parts: Parts, world: int) -> None:
    if not parts.optimizers:
        raise AttachError("attach(optimizer=): a run whose world may change needs its optimizer: run.step() steps it")
    if parts.sharded or (world > 1 and parts.ddp is None):
        raise AttachError(
            "attach(model=): a run whose world may change needs the model wrapped in DistributedDataParallel; "
            "sharded models keep their number of ranks"
        )
    if parts.ddp is not None and parts.ddp.static_graph:
        raise AttachError(
            "attach(model=): DistributedDataParallel(static_graph=True) cannot accumulate gradients, which a run "
            "whose world may change must"
        )
