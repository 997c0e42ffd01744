"""A run whose loop belongs to somebody else: a framework that calls back after its own optimizer steps.

``Run`` saves, stops and is asked between two batches of ``run.steps()``. Here its batches are
ticks, one for each optimizer step of the framework, which keeps its own place in the data.
Uses nothing of ``Run`` that scripts may not use.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from spotkeeper.train.errors import AttachError, CallError
from spotkeeper.train.run import Run


class Ticks:
    """The loop of a run, one step at a time."""

    def __init__(self, run: Run, *, batch: int, total: int | None) -> None:
        """Begin. Collective.

        Args:
            batch: samples of this rank in one optimizer step.
            total: optimizer steps at the run's end, where known.
        """
        self._clock = _Clock(batch) if total is None else _Counted(batch, total)
        self._steps = run.steps(self._clock, epochs=1)
        self._begun = next(self._steps, None) is not None  # else an earlier generation has done all

    def tick(self) -> None:
        """The framework has stepped, and its state is whole. Collective.

        Raises:
            SystemExit: 0, when the run was asked to stop, after the save.
        """
        if self._begun:
            next(self._steps)

    def end(self) -> None:
        """The framework's loop is over: the last state is saved. Collective."""
        self._clock.over = True
        if self._begun:
            next(self._steps, None)
        self._begun = False


class _Clock:
    """What ``run.steps`` iterates over. It has a state, so that nothing is skipped when a run is resumed."""

    def __init__(self, batch: int) -> None:
        self.batch_size = batch
        self.over = False

    def __iter__(self) -> Iterator[bool]:
        while not self.over:
            yield True

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing: the framework's state has the place."""


class _Counted(_Clock):
    """One whose end is known."""

    def __init__(self, batch: int, total: int) -> None:
        super().__init__(batch)
        self._total = total

    def __len__(self) -> int:
        return self._total


def check_world(world: int, how: str) -> None:
    """Compare the framework's number of processes with torchrun's, and refuse a job that may change its size.

    Raises:
        CallError: each process would train alone, without a sign of it.
        AttachError: the framework divides batches itself.
    """
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if world != started:
        raise CallError(f"{started} processes were started, but this trainer counts {world}: {how}")
    if os.environ.get("SPOTKEEPER_MAX_WORLD"):
        raise AttachError(
            "this job's number of nodes may change, which only run.backward() and run.step() can follow "
            '(docs/train.md, "A world that changes"); submit it under another name with one number of nodes'
        )
