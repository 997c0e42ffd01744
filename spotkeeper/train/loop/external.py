"""Drives a run from a framework's own loop, which calls this module after each optimizer step.

``Run`` acts between two batches of ``run.steps()``. Here these batches have no data: each stands for one optimizer step
of the framework. The framework itself keeps its place in the data. Uses only the public interface of ``Run``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from spotkeeper.train.core.errors import AttachError, CallError
from spotkeeper.train.loop.run import Run


class FrameworkLoop:
    """A run's loop that advances when the framework has done an optimizer step."""

    def __init__(self, run: Run, *, batch: int, total: int | None) -> None:
        """Begin the loop. Collective.

        Args:
            batch: samples of this rank per optimizer step.
            total: optimizer steps at the run's end, if known.
        """
        self._loader = _StepLoader(batch) if total is None else _CountedStepLoader(batch, total)
        self._steps = run.steps(self._loader, epochs=1)
        self._begun = next(self._steps, None) is not None  # False if an earlier generation did all steps

    def after_step(self) -> None:
        """Let the run act after an optimizer step of the framework, while no state is half changed. Collective.

        Raises:
            SystemExit: 0, after the save, if the run was asked to stop.
        """
        if self._begun:
            next(self._steps)

    def end(self) -> None:
        """End the run's loop once the framework's loop has ended, and save the last state. Collective."""
        self._loader.over = True
        if self._begun:
            next(self._steps, None)
        self._begun = False


class _StepLoader:
    """Gives ``run.steps`` one batch without data for each optimizer step, so that the run acts after the step.

    It has a ``state_dict`` because a resumed run reads and skips the first batches of any loader without one.
    """

    def __init__(self, batch: int) -> None:
        self.batch_size = batch
        self.over = False

    def __iter__(self) -> Iterator[bool]:
        while not self.over:
            yield True

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing: the framework's own state contains its place in the data."""


class _CountedStepLoader(_StepLoader):
    def __init__(self, batch: int, total: int) -> None:
        super().__init__(batch)
        self._total = total

    def __len__(self) -> int:
        return self._total


def check_world(world: int, how: str) -> None:
    """Check that the framework counts as many processes as torchrun, and refuse a job that may change its size.

    Raises:
        CallError: the numbers differ. Without this error each process would train alone.
        AttachError: the job's number of nodes may change, but the framework divides batches itself.
    """
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if world != started:
        raise CallError(f"{started} processes were started, but the framework's Trainer counts {world}: {how}")
    if os.environ.get("SPOTKEEPER_MAX_WORLD"):
        raise AttachError(
            "this job's division of work may change (`nodes: {min, max}` or `machines`), so its script must call "
            "run.backward() and run.step() "
            '(docs/train.md, "A world that changes"), but the framework\'s Trainer does not call them; submit the job '
            "under another name with a fixed number of nodes and no `machines`"
        )
