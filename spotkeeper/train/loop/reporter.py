"""Reports a run to its agent: progress in the control file, the outcome in ``result.json``.

One rank per node reports; on the others the methods do nothing.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, NamedTuple

from spotkeeper.train.agent_link.control import (
    NAME,
    RESULT,
    AgentRequest,
    Commit,
    Control,
    Outcome,
    RunPhase,
    RunResult,
    write_result,
)
from spotkeeper.train.core.errors import say
from spotkeeper.train.core.pace import SavePace
from spotkeeper.train.loop.metrics import MetricHistory

UNSTEPPED = 1000  # batches without a step before the log says so; gradients accumulate over fewer


def open_control(run: Path | None) -> Control:
    """Open the agent's control file in the run folder; without an agent, a private one for signals."""
    if run is not None:
        return Control.open(run / NAME)
    return Control.private()


class BatchesLeft(NamedTuple):
    """Number of batches to the end of a loop, and in the whole loop."""

    batches: int
    of: int


class StepEstimate:
    """Estimates a run's total steps, from the current loop and the epochs of ``run.epochs`` after it.

    A future epoch is assumed to have as many steps as the last complete epoch or, before that, as the current loop.
    """

    def __init__(self) -> None:
        self._epochs = 0  # epochs after the current one
        self._began: int | None = None  # first step of the current epoch; None: it began in an earlier generation
        self._steps: int | None = None  # steps per epoch

    def epoch(self, epochs: int, began: int | None) -> None:
        """Begin an epoch that starts at step ``began`` and is followed by ``epochs`` more."""
        self._epochs, self._began = epochs, began

    def epoch_over(self, step: int) -> None:
        if self._began is not None:
            self._steps = step - self._began

    def total(self, end: int, steps: int) -> int:
        """Return the run's total steps. ``end``: step at the end of the current loop, which has ``steps`` steps."""
        if self._steps is None:
            return end + self._epochs * steps
        if self._began is not None:
            end = max(end, self._began + self._steps)
        return end + self._epochs * self._steps


_PHASES: dict[Outcome, RunPhase] = {
    "stopped": RunPhase.STOPPED,
    "done": RunPhase.DONE,
    "reached": RunPhase.REACHED,
}
_WORDS = {"stopped": "stopped after", "reached": "the search compares its trials after"}


class RunReporter:
    """Reports the progress of one process. ``tells``: whether this process reports for its node."""

    def __init__(
        self, control: Control, run: Path | None, pace: SavePace, metrics: MetricHistory, *, tells: bool
    ) -> None:
        self._control = control
        self._metrics = metrics
        self._run = run
        self._pace = pace
        self._tells = tells
        self._batches = 0  # batches since the last step
        self._trained = self._steps = 0  # batches and steps of the current loop
        self.estimate = StepEstimate()

    def phase(self, phase: RunPhase) -> None:
        if self._tells:
            self._control.state = phase

    def left_early(self) -> None:
        """Report that the script left the loop over epochs early. Do nothing if a stop was the cause."""
        if self._tells and self._control.state is RunPhase.TRAINING:
            self._control.state = RunPhase.FINISHING

    def bandwidth(self, gbit_s: float) -> None:
        """Report the bandwidth between machines, Gbit/s; 0: not measured."""
        if self._tells and gbit_s:
            self._control.gbit_s = gbit_s
            say(f"network: all-reduces reach {gbit_s:.1f} Gbit/s between the machines")

    def met(self) -> None:
        """Report that all ranks of this generation have met."""
        if self._tells:
            self._control.met_at = time.time()

    def begin(self, step: int, left: BatchesLeft | None, total_steps: int | None) -> None:
        """Report the beginning of a loop. ``total_steps``: the step at which the loop ends, if the script gave it."""
        self._batches = self._trained = self._steps = 0
        if self._tells:
            self._control.state = RunPhase.TRAINING
            self._control.total_steps = total_steps or (0 if left is None else self._total(step, left))
            if self._run is not None:
                (self._run / RESULT).unlink(missing_ok=True)

    def batch(self) -> None:
        self._batches += 1
        if self._batches == UNSTEPPED and self._tells:
            say(
                f"no optimizer step in {UNSTEPPED} batches, so nothing is saved: pass attach(optimizer=...) the "
                "optimizer whose own step() changes the weights, not one that wraps it"
            )

    def stepped(self, step: int, batch: int, left: BatchesLeft | None = None) -> None:
        """Report a step.

        ``batch``: samples of all ranks per batch. ``left``: batches left; None if the script gave the number of steps.
        """
        batches, self._batches = self._batches, 0
        if not self._tells:
            return
        self._trained, self._steps = self._trained + batches, self._steps + 1
        if left is not None:
            self._control.total_steps = self._total(step, left)
        control, step_s = self._control, self._pace.step_s
        control.stepped(step)
        control.step_s = step_s
        control.samples_per_s = batches * batch / step_s if step_s else 0.0
        control.interval_s = self._pace.interval_s
        control.image_steps, control.image_share = self._pace.image_spacing, self._pace.image_share
        self._metrics.poll(time.monotonic())

    def _total(self, step: int, left: BatchesLeft) -> int:
        """Estimate the run's total steps, with as many batches per step as so far: several if gradients accumulate."""
        batches = max(1, round(self._trained / self._steps)) if self._steps else 1
        return self.estimate.total(step + left.batches // batches, left.of // batches)

    def stalled(self) -> None:
        """Report how long saves stop training (median, seconds)."""
        if self._tells:
            self._control.stall_s = self._pace.stall_s

    def report(self, step: int, values: dict[str, Any]) -> None:
        """Report the script's metrics of a step."""
        if self._tells:
            self._metrics.report(step, values)

    def end(self, outcome: Outcome, gen: int, step: int, commit: Commit | None) -> None:
        if not self._tells:
            return
        self._metrics.write(wait=True)
        if self._run is not None:
            try:
                write_result(self._run, RunResult(outcome, gen, step, commit, self._metrics.value()))
            except OSError as error:  # a full /run must not turn a stop into a crash; the control file has the outcome
                say(f"result.json: {error}")
        self._control.state = _PHASES[outcome]
        if outcome != "done":
            say(f"generation {gen}: {_WORDS[outcome]} step {step}, newest checkpoint {commit}")

    def time_left_s(self) -> float | None:
        """Return the seconds to the agent's deadline, at least 1; None without a deadline."""
        deadline = self._control.deadline
        return (
            max(1.0, deadline - time.time()) if deadline and self._control.requested is AgentRequest.SAVE_STOP else None
        )
