"""``Run``, what ``attach()`` returns: with it, two lines are all that a training script needs.

::

    run = spotkeeper.attach(model=ddp, optimizer=optimizer, scheduler=scheduler)
    for batch in run.steps(loader, epochs=3):
        loss = ddp(batch).mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        run.report(loss=loss)

A run saves and stops only between two batches, after an optimizer step (``boundary.py``). If the number of ranks may
change, ``run.backward(loss)`` and ``run.step()`` replace the lines from ``loss.backward()`` (``core/microbatch.py``).
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from spotkeeper.train.agent_link.control import Commit, RunPhase, untimed_section
from spotkeeper.train.checkpoint.restore import EarlyRead
from spotkeeper.train.core import rng
from spotkeeper.train.core.division import Speeds
from spotkeeper.train.core.errors import CallError, say
from spotkeeper.train.core.gang import find_gang
from spotkeeper.train.core.microbatch import Clip, Update, find_plan
from spotkeeper.train.core.pace import SavePace
from spotkeeper.train.core.parts import Attached
from spotkeeper.train.core.settings import ARGV, RunSettings, make_output, params
from spotkeeper.train.core.signals import StopSignals
from spotkeeper.train.data.feed import DataPosition, Feed, open_feed
from spotkeeper.train.loop import diagnostics
from spotkeeper.train.loop.boundary import Boundary
from spotkeeper.train.loop.lag import remembered
from spotkeeper.train.loop.metrics import MetricHistory
from spotkeeper.train.loop.position import EpochProgress, RunPosition
from spotkeeper.train.loop.rendezvous import measure_bandwidth, rendezvous
from spotkeeper.train.loop.reporter import BatchesLeft, RunReporter, StepEstimate, open_control

_MICRO = 3  # purpose number mixed into a seed; 1 and 2 are the sampler's


class Run:
    """A training run, made by ``attach``: yields batches, saves, stops and resumes."""

    def __init__(
        self, parts: Attached, checkpoint_dir: Path | str | None, seed: int | None, global_batch: int | None
    ) -> None:
        settings = RunSettings.from_env(os.environ, folder=Path(checkpoint_dir) if checkpoint_dir else None)
        settings.alone()
        early = EarlyRead.begin(settings) if settings.managed and not parts.sharded else None
        gang = self._gang = find_gang()
        self._parts, self._settings = parts, settings
        self._seed = settings.seed if seed is None else seed
        self._plan = find_plan(gang, global_batch, settings.max_world, remembered(settings.run))
        self._speeds = Speeds(self._plan.costs) if self._plan and gang.world > 1 else None
        self._update = Update(parts, gang.world, elastic=self._plan is not None)
        self._control = open_control(settings.run)
        self._control.state = RunPhase.RESTORING
        self._signals = StopSignals(self._control, gang.world, managed=settings.managed)
        pace = SavePace(settings.mean_life_s, settings.interval_s, settings.overhead, since=time.monotonic())
        folder = None if gang.rank else settings.run
        metrics = MetricHistory(self._control, folder, settings.gen or 0, settings.metric)
        self._position = RunPosition(parts, gang, pace, self._seed, metrics)
        self._loops = 0  # calls of steps()
        self._calls = 0  # calls of epochs()
        self._more = False  # epochs() will yield another epoch
        self._skipped = False  # the message about a skipped loop was logged
        self._between = contextlib.ExitStack()  # untimed section, open between the loops of two epochs
        self._epochs: int | None = None  # length of the current loop, if given in epochs
        self._idle = True  # the current or last loop has yielded nothing
        self._advice = ""  # message for a failure after the loop
        self._reporter = RunReporter(self._control, settings.run, pace, metrics, tells=not gang.local_rank)
        self._info = rendezvous(gang, settings)
        self._reporter.bandwidth(measure_bandwidth(gang, settings.gen))
        self._reporter.met()
        shared = (self._control, pace, self._position, self._reporter)
        self._boundary = Boundary(parts, gang, settings, self._info, *shared, speeds=self._speeds)
        found = self._boundary.restore(early)
        self._earlier = "" if found is None else found.manifest.versions.get(ARGV, "")  # command line that saved it
        settings.attached()
        if not gang.rank:
            diagnostics.on_exit(settings.unlooped)
        diagnostics.on_failure(self, Run._failed)

    # ------------------------------------------------------------ public

    @property
    def steps_done(self) -> int:
        """Optimizer steps done since the run began, over all generations."""
        return self._position.step

    @property
    def epoch(self) -> int:
        """Current epoch, from 0: of ``epochs()`` if the script calls that, otherwise of the current batch."""
        return self._position.epoch

    @property
    def rank(self) -> int:
        """This process's rank, 0 to ``world`` - 1."""
        return self._gang.rank

    @property
    def world(self) -> int:
        """Number of ranks in this generation."""
        return self._gang.world

    @property
    def generation(self) -> int:
        """Number of this generation; each restart of the job's processes begins a new one."""
        return self._info.gen

    @property
    def params(self) -> dict[str, bool | int | float | str]:
        """The values that the job file or a search gives the script; {} outside a job."""
        return params()

    @property
    def output(self) -> Path:
        """Folder for results, such as the final model. It is uploaded to the bucket once the job has succeeded.

        ``spotkeeper download`` fetches the folder of each machine. The files in the folder survive preemptions, as
        checkpoints do. Outside Spotkeeper the folder is ``./output``.
        """
        return make_output(self._settings.output, self._settings.managed)

    def steps(
        self, loader: Iterable[Any], *positional: Any, epochs: int | None = None, steps: int | None = None
    ) -> Iterator[Any]:
        """Yield batches, starting at the run's place in the data. Collective: every rank must run the loop.

        Every rank gets its own slice of each global batch, in an order that depends only on the seed and the epoch. If
        the number of ranks may change, each batch is one micro-batch of this rank, and ranks may get different numbers
        of them: code that all ranks run together belongs under ``if run.step():``.

        Args:
            loader: a DataLoader (rebuilt over a resumable order), or any object that can be iterated repeatedly.
            epochs: length of the loop in passes over the data. Default 1 if ``steps`` is not given.
            steps: length of the loop in optimizer steps, counted from the beginning of the run.

        Raises:
            CallError: ``epochs`` or ``steps`` is not a whole number from 1; or no step is left to do, because an
                earlier run of the script, with other arguments, has done them all.
            DataError: the run cannot keep its place in this loader; the message says what to use instead.
            SystemExit: 0, after the save, if the agent, SIGTERM or Ctrl-C asked the run to stop.

        Example::

            for batch in run.steps(loader, steps=10_000):
                ...
        """
        diagnostics.check_loop(positional, epochs, steps)
        self._settings.looped()
        loop, self._loops = self._loops, self._loops + 1
        position = self._position
        if loop < position.data.loop:  # the checkpoint was made after this loop
            self._tell_skipped()
            return
        if loop > position.data.loop:
            position.data, position.loader_state = DataPosition(loop), None
        epochs = 1 if epochs is None and steps is None else epochs
        plan = self._plan
        if plan is not None and self._speeds is not None:
            plan = replace(plan, costs=self._speeds.costs)
        feed = open_feed(loader, position.data, position.loader_state, self._gang, self._seed, plan)
        position.feed, position.loader_state = feed, None
        self._start_loop(feed, epochs, steps)
        self._signals.install()
        try:
            yield from self._loop(feed, epochs, steps)
        finally:
            self._boundary.copied()
            self._signals.restore()

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the numbers of the unfinished epochs, around loops over ``steps()``. Collective.

        ::

            for epoch in run.epochs(8):
                for batch in run.steps(loader):
                    ...
                scheduler.step()
                validate()

        The state is saved at the end of each inner loop. A run that is stopped after that save resumes with the code
        after the loop. Finished epochs, including the code after their loops, are not repeated.

        Args:
            count: epochs of the whole run.
        """
        call, self._calls = self._calls, self._calls + 1
        position = self._position
        before = position.epochs
        if call < len(before.over):
            self._loops = before.over[call]
            return
        first, resumed = before.epoch or 0, before.epoch is not None
        self._loops = before.loops if resumed else self._loops
        try:
            for epoch in range(first, count):
                position.epochs = replace(position.epochs, epoch=epoch, loops=self._loops)
                self._more = epoch + 1 < count
                self._reporter.estimate.epoch(count - epoch - 1, None if resumed else position.step)
                yield epoch
                self._reporter.estimate.epoch_over(position.step)
                resumed = False
        except GeneratorExit:  # `break`: no further step is expected
            self._reporter.left_early()
            raise
        finally:
            self._more, self._reporter.estimate = False, StepEstimate()
            self._between.close()
            position.epochs = EpochProgress((*position.epochs.over, max(self._loops, position.data.loop + 1)))

    def backward(self, loss: torch.Tensor) -> None:
        """Use instead of ``loss.backward()``. Weights the loss by the batch's samples; DDP reduces once per step.

        Args:
            loss: scalar, the mean over the samples of the current batch. An attached scaler scales it.

        Raises:
            CallError: called outside the loop, or twice for a batch.
        """
        self._update.backward(loss)

    def step(self, *, clip: Clip | None = None) -> bool:
        """Step optimizer, scaler and scheduler, and zero the gradients. Call it after ``backward``.

        Do not call the ``step`` methods of these objects yourself.

        Args:
            clip: largest norm of all gradients together, or a function to call once they are complete and unscaled.

        Returns:
            Whether the global batch is complete; all ranks return True after the same steps.

        Raises:
            CallError: called without ``backward`` before it.
        """
        return self._update.step(clip)

    def loss(self) -> float:
        """Return the mean loss, over all ranks, of the last global batch that ``step`` completed. Collective.

        Raises:
            CallError: ``step`` has not returned True yet.
        """
        share = self._update.loss
        if share is None:
            raise CallError("call run.loss() later: the loss is known once run.step() has returned True")
        shares = self._gang.gather(float(share).hex().encode())
        return sum(float.fromhex(each.decode()) for each in shares) / self._gang.world

    def report(self, /, **values: float | torch.Tensor | None) -> None:
        """Report metrics of the current step, such as ``loss``; rank 0's values are kept (docs/metrics.md).

        A report never waits for a GPU, and never fails: a value that cannot be kept is named in the log once.

        Args:
            values: numbers or tensors of one element, under at most 64 names of letters, digits and ``_ . / -``. Pass
                names that are not Python names as ``**{"val/loss": value}``. None is left out.

        Example::

            run.report(loss=loss, lr=scheduler.get_last_lr()[0], **{"val/accuracy": accuracy})
        """
        self._reporter.report(self._position.current_step, values)

    def report_at(self, step: int, values: dict[str, Any]) -> None:
        """Report metrics of ``step``, the last step or an earlier one: a framework may log them late."""
        self._reporter.report(step, values)

    def save(self, *, wait: bool = True) -> Commit | None:
        """Save a checkpoint now. Collective: every rank calls it after the same step.

        Args:
            wait: whether to return only after the checkpoint is durable.

        Returns:
            This node's newest durable checkpoint, as (generation, step); None if it has none.
        """
        self._boundary.settle()
        self._boundary.save()
        return self.wait() if wait else self._boundary.writer.commit

    @contextlib.contextmanager
    def untimed(self) -> Iterator[None]:
        """Exclude long work between two steps, such as an evaluation, from step times and from hang detection.

        It is enough that one rank uses it: while other ranks wait for that rank, the job does not count as hung.
        """
        began = time.monotonic()
        self._boundary.copied()  # evaluations often swap the weights for an average
        with untimed_section(self._settings.run, self._gang.local_rank):
            yield
        self._boundary.last_end += time.monotonic() - began
        self._boundary.watch.begin()

    def copied(self) -> None:
        """Wait until the last save no longer needs the state.

        Call it before code between two optimizer steps that changes weights, such as a swap with their average.
        ``untimed`` and the frameworks' callbacks do so themselves.
        """
        self._boundary.copied()

    def wait(self) -> Commit | None:
        """Wait until no save runs on this node; return its newest durable checkpoint.

        Collective with sharded state only.
        """
        return self._boundary.settle()

    # ------------------------------------------------------------ the loop

    def _loop(self, feed: Feed, epochs: int | None, steps: int | None) -> Iterator[Any]:
        position = self._position
        if steps is None or position.step < steps:
            if self._boundary.reached:
                self._boundary.reach()
            for batch in feed.batches(epochs):
                self._begin_batch(feed)
                self._idle = False
                try:
                    yield batch
                except GeneratorExit:  # `break`: other ranks may still be in the loop, so no save
                    self._reporter.phase(RunPhase.FINISHING)  # the code after the loop may take long
                    raise
                self._update.done()
                if not feed.micro_batch.last:
                    continue
                feed.done()
                self._boundary.after_batch(feed, self._batches_left(feed))
                if steps is not None and position.step >= steps:
                    break
        self._update.end()
        position.data, position.feed = feed.position, None
        self._finish()

    def _tell_skipped(self) -> None:
        """Log once that the code between skipped loops runs again."""
        if not self._skipped and not self._gang.rank:
            say(diagnostics.SKIPPED)
        self._skipped = True

    def _start_loop(self, feed: Feed, epochs: int | None, steps: int | None) -> None:
        self._between.close()
        self._idle, self._advice = True, ""
        self._epochs = epochs if steps is None else None
        self._boundary.start_loop()
        self._reporter.begin(self._position.step, self._batches_left(feed), steps)

    def _batches_left(self, feed: Feed) -> BatchesLeft | None:
        """Count the batches to the end of a loop; None if unknown, or if the loop's length is a number of steps."""
        if self._epochs is None or feed.epoch_batches is None:
            return None
        every = self._epochs * feed.epoch_batches
        return BatchesLeft(every - feed.position.epoch * feed.epoch_batches - feed.position.number, every)

    def _begin_batch(self, feed: Feed) -> None:
        self._update.begin(feed.micro_batch, feed.position.batch)
        self._boundary.add_samples(len(feed.micro_batch.places))
        if self._plan is not None:  # random numbers depend on the micro-batch, not on the rank that trains on it
            where = feed.position
            rng.seed_all(self._seed, where.loop, where.consumed, feed.micro_batch.number, _MICRO)

    def _finish(self) -> None:
        """Save the last state at the loop's end; after the last loop, end the run."""
        managed = self._settings.managed
        self._boundary.end_loop(more=self._more)
        self._signals.restore()  # before the check below: later signals end the process
        if (self._more or not managed) and self._gang.highest(self._signals.asked)():
            self._boundary.leave()
        if self._more:
            self._between.enter_context(untimed_section(self._settings.run, self._gang.local_rank))
            return
        step, folder = self._position.step, None if managed else str(self._settings.folder)
        if self._idle and folder is not None:
            diagnostics.check_rerun(step, self._earlier, folder)
        if self._idle and not self._gang.rank:
            say(diagnostics.nothing_left(step, folder))
        self._boundary.end("done")
        self._advice = diagnostics.failed_after(step, self._idle)

    def _failed(self) -> str:
        """Return the message to log when an exception ends the script, or ""."""
        asked = self._signals.asked and not self._advice and not self._settings.managed
        self._signals.restore()
        return diagnostics.not_saved(self._position.step, self._boundary.writer.commit) if asked else self._advice
