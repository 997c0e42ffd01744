"""What a run tells its agent: where it is, through the control file, and how it ended, in ``result.json``.

One rank of each node tells; to all others these are no-ops.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Literal

import torch

from spotkeeper.train.control import NAME, RESULT, Commit, Control, Result, Want, write_result
from spotkeeper.train.control import State as Phase
from spotkeeper.train.pace import Pace
from spotkeeper.train.signals import stop_on_signals
from spotkeeper.train.writer import say

_REPORT_S = 0.5  # a loss on a GPU is waited for at most this often


def open_control(run: Path | None) -> Control:
    """The agent's, in its run folder; or one of our own, that signals write to."""
    if run is not None:
        return Control.open(run / NAME)
    control = Control.private()
    stop_on_signals(control)
    return control


class Teller:
    """Of one process. ``tells``: it is the one of its node."""

    def __init__(self, control: Control, run: Path | None, pace: Pace, *, tells: bool) -> None:
        self._control = control
        self._run = run
        self._pace = pace
        self._tells = tells
        self._batches = 0  # since the last step
        self._trained = self._steps = 0  # batches and steps of the loop
        self._loss: float | torch.Tensor | None = None
        self._loss_at = 0.0

    def phase(self, phase: Phase) -> None:
        if self._tells:
            self._control.state = phase

    def begin(self, total_steps: int) -> None:
        """A loop begins; 0: nobody knows when it will end."""
        self._batches = self._trained = self._steps = 0
        if self._tells:
            self._control.state = Phase.TRAINING
            self._control.total_steps = total_steps
            if self._run is not None:
                (self._run / RESULT).unlink(missing_ok=True)

    def batch(self) -> None:
        """Another one was trained on."""
        self._batches += 1

    def stepped(self, step: int, batch: int, left: int | None = None) -> None:
        """``batch``: samples of all ranks in a batch. ``left``: batches to the loop's end, where they decide it.

        A script that adds up gradients by itself says nowhere how many batches it takes for a step: it is seen.
        """
        batches, self._batches = self._batches, 0
        if not self._tells:
            return
        self._trained, self._steps = self._trained + batches, self._steps + 1
        if left is not None:
            self._control.total_steps = step + left // max(1, round(self._trained / self._steps))
        control, step_s = self._control, self._pace.step_s
        control.stepped(step)
        control.step_s = step_s
        control.samples_per_s = batches * batch / step_s if step_s else 0.0
        control.interval_s = self._pace.interval_s

    def stalled(self) -> None:
        """A save has been staged."""
        if self._tells:
            self._control.stall_s = self._pace.stall_s

    def loss(self, loss: float | torch.Tensor | None) -> None:
        """Looked at twice a second at most: on a GPU that waits for it."""
        if loss is None or not self._tells:
            return
        self._loss = loss.detach() if isinstance(loss, torch.Tensor) else loss
        if time.monotonic() - self._loss_at >= _REPORT_S:
            self._show_loss()

    def end(self, outcome: Literal["stopped", "done"], gen: int, step: int, commit: Commit | None) -> None:
        if not self._tells:
            return
        self._show_loss()
        if self._run is not None:
            try:
                write_result(self._run, Result(outcome, gen, step, commit))
            except OSError as error:  # a full /run must not turn a stop into a crash: the control file says as much
                say(f"result.json: {error}")
        self._control.state = Phase.STOPPED if outcome == "stopped" else Phase.DONE
        if outcome == "stopped":
            say(f"generation {gen}: stopped after step {step}, newest checkpoint {commit}")

    def left_s(self) -> float | None:
        """Until the agent's deadline; a second at least, to hear of what is durable already."""
        deadline = self._control.deadline
        return max(1.0, deadline - time.time()) if deadline and self._control.want is Want.SAVE_STOP else None

    def _show_loss(self) -> None:
        if self._loss is not None:
            self._loss_at = time.monotonic()
            self._control.loss = float(self._loss)
