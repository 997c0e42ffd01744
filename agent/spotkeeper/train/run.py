"""``attach()`` and ``Run``: the two lines a training script needs.

::

    run = spotkeeper.attach(model=ddp, optimizer=optimizer, scheduler=scheduler)
    for batch in run.steps(loader, epochs=3):
        loss = ddp(batch).mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        run.report(loss=loss)

Between two batches, once the optimizer has stepped, is the only place where a run saves,
stops or is asked anything: there its state is whole. A batch that only accumulates
gradients is not such a place.

Where the world may change, ``run.backward(loss)`` and ``run.step()`` take the place of the
four lines in the middle (see ``update``), and batches are micro-batches (see ``micro``).
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch

from spotkeeper.train import after, rng, untimed
from spotkeeper.train.agree import Agreement, Call
from spotkeeper.train.control import Commit, Want
from spotkeeper.train.control import State as Phase
from spotkeeper.train.course import Course
from spotkeeper.train.errors import AttachError, CallError
from spotkeeper.train.feed import Feed, Position, open_feed
from spotkeeper.train.gang import Gang, find_gang
from spotkeeper.train.keep import Found, Keeper, Replicated
from spotkeeper.train.lag import Lag, remembered
from spotkeeper.train.meet import Met, meet
from spotkeeper.train.micro import find_micro
from spotkeeper.train.pace import Pace
from spotkeeper.train.parts import Parts
from spotkeeper.train.settings import Settings, make_output
from spotkeeper.train.sharded import Sharded
from spotkeeper.train.stopwatch import Stopwatch
from spotkeeper.train.tell import Teller, open_control
from spotkeeper.train.update import Clip, Update
from spotkeeper.train.writer import Writer, say

_MICRO = 3  # what a seed is for; 1 and 2 are the sampler's


def attach(
    model: torch.nn.Module | None = None,
    optimizer: Any = None,
    scheduler: Any = None,
    *,
    scaler: Any = None,
    ema: Any = None,
    checkpoint_dir: Path | str | None = None,
    seed: int | None = None,
    global_batch: int | None = None,
    **parts: Any,
) -> Run:
    """Restore the newest state any rank holds, and return the run. Collective.

    Call it once, after the process group, DDP and the optimizer exist.

    Args:
        model: the module as trained: wrapped in DDP, sharded by ``fully_shard``, compiled, or as it is.
        optimizer: one, or a list or dict, always in the same order; the first one's steps are the run's.
        scheduler, scaler, ema, **parts: anything with ``state_dict`` and ``load_state_dict``.
        checkpoint_dir: where to save outside Spotkeeper; default ``.spotkeeper/ckpt/<script>``.
        seed: of the data's order; default ``SPOTKEEPER_SEED``, else 0.
        global_batch: samples of all ranks for one optimizer step, whatever their number; the loader's
            batches become micro-batches, and the script calls ``run.backward`` and ``run.step``. Default in
            a job that may change its size: the loader's batch size x the ranks of its largest size.

    Raises:
        PartError: a part has no state.
        AttachError: the checkpoint is of another model, or other parts; or what a changing world needs is missing.
        CallError: no process group though there are several ranks.
        RuntimeError: another run has the folder.
    """
    named = {"scheduler": scheduler, "ema": ema} | parts
    return Run(Parts.of(model, optimizer, scaler, named), checkpoint_dir, seed, global_batch)


class Run:
    """A training run: its position, its saves, its end. Made by ``attach``."""

    def __init__(
        self, parts: Parts, checkpoint_dir: Path | str | None, seed: int | None, global_batch: int | None
    ) -> None:
        self._parts = parts
        self._gang: Gang = find_gang()
        self._settings = Settings.from_env(os.environ, folder=Path(checkpoint_dir) if checkpoint_dir else None)
        self._settings.alone()
        self._seed = self._settings.seed if seed is None else seed
        self._micro = find_micro(self._gang, global_batch, self._settings.max_world, remembered(self._settings.run))
        self._update = Update(parts, self._gang.world, elastic=self._micro is not None)
        self._control = open_control(self._settings.run)
        self._control.state = Phase.RESTORING
        self._pace = Pace(self._settings.mean_life_s, self._settings.interval_s, since=time.monotonic())
        self._agreement = Agreement(self._gang)
        self._course = Course(parts, self._gang, self._pace, self._seed)
        self._loops = 0  # calls of steps()
        self._epochs: int | None = None  # of the loop under way, where they end it
        self._idle = True  # the loop under way, or the last one, has yielded nothing
        self._advice = ""  # for a failure after the loop; none in it
        self._stepped = False
        self._saved: int | None = None  # step of the last save that was staged
        self._asked = 0
        self._ended = 0.0
        self._tell = Teller(self._control, self._settings.run, self._pace, tells=not self._gang.local_rank)
        self._met: Met = meet(self._gang, self._settings)
        self._watch = Stopwatch(parts.ddp)
        self._lag = Lag(self._gang, self._met.beside(self._gang.node), self._control)
        self._samples = 0  # that this rank trained on in the step under way
        self._writer = Writer(self._settings, self._own_folder(), self._control, self._pace)
        self._keeper = self._find_keeper()
        self._begin()
        self._settings.attached()
        after.on_failure(self, lambda run: run._advice)

    # ------------------------------------------------------------ what users call

    @property
    def steps_done(self) -> int:
        """Optimizer steps done since the run began, over all its generations."""
        return self._course.step

    @property
    def epoch(self) -> int:
        """Of the batch in hand, from 0."""
        return self._course.epoch

    @property
    def rank(self) -> int:
        return self._gang.rank

    @property
    def world(self) -> int:
        return self._gang.world

    @property
    def generation(self) -> int:
        return self._met.gen

    @property
    def output(self) -> Path:
        """A folder for what is to be kept: the model. In the bucket once the job has ended well.

        ``spotkeeper download`` fetches it, each machine's own. Outside Spotkeeper it is ``./output``. Like a
        checkpoint it outlives the machine, so what was written there once is there again after a preemption.
        """
        return make_output(self._settings.output, self._settings.managed)

    def steps(self, loader: Iterable[Any], *, epochs: int | None = None, steps: int | None = None) -> Iterator[Any]:
        """Batches, from where the run is; collective, and the loop must run on every rank.

        Where the world may change, each is one micro-batch of this rank, and ranks may have different
        numbers of them: what ranks do together belongs under ``if run.step():``.

        Args:
            loader: a DataLoader (rebuilt over a sampler of ours), or anything that can be iterated anew.
            epochs: over the data; default one, where ``steps`` is not given either.
            steps: end when this many optimizer steps are done, counted over the whole run.

        Raises:
            DataError: a place in this loader's data cannot be kept; the message says what would do.
            SystemExit: 0, when the agent (or SIGTERM, SIGINT) asked to stop, after the save.
        """
        loop, self._loops = self._loops, self._loops + 1
        course = self._course
        if loop < course.position.loop:
            return  # this loop was over when the checkpoint was made
        if loop > course.position.loop:
            course.position, course.data = Position(loop), None
        epochs = 1 if epochs is None and steps is None else epochs
        feed = course.feed = open_feed(loader, course.position, course.data, self._gang, self._seed, self._micro)
        course.data = None
        self._start_loop(feed, epochs, steps)
        if steps is None or course.step < steps:
            for batch in feed.batches(epochs):
                self._begin_batch(feed)
                self._idle = False
                try:
                    yield batch
                except GeneratorExit:  # `break`: nobody knows whether all ranks have come here, so nothing is saved
                    self._tell.phase(Phase.FINISHING)  # but no step is awaited any more: what follows takes its time
                    raise
                self._update.done()
                if not feed.turn.last:
                    continue
                feed.done()
                self._after_batch(feed)
                if steps is not None and course.step >= steps:
                    break
        self._update.end()
        course.position, course.feed = feed.position, None
        self._finish()

    def backward(self, loss: torch.Tensor) -> None:
        """Instead of ``loss.backward()``: weighs the batch by its samples, and lets DDP add up over ranks once.

        Args:
            loss: the mean over the samples of the batch in hand; an attached scaler scales it.

        Raises:
            CallError: called outside the loop, or twice for a batch.
        """
        self._update.backward(loss)

    def step(self, *, clip: Clip | None = None) -> bool:
        """Instead of the steps of optimizer, scaler and scheduler, and ``zero_grad()``; after each ``backward``.

        Args:
            clip: the largest norm of all gradients together, or what to call once they are whole and unscaled.

        Returns:
            Whether the global batch is over: on all ranks as often, and the place for what they do together.

        Raises:
            CallError: called without ``backward`` before it.
        """
        return self._update.step(clip)

    def loss(self) -> float:
        """The mean loss over the global batch that ``step`` ended, whoever trained on it. Collective.

        Raises:
            CallError: there is none yet.
        """
        share = self._update.loss
        if share is None:
            raise CallError("run.loss() is known once run.step() has returned True")
        shares = self._gang.gather(float(share).hex().encode())
        return sum(float.fromhex(each.decode()) for each in shares) / self._gang.world

    def report(self, *, loss: float | torch.Tensor | None = None) -> None:
        """For the live view. Cheap: a tensor is looked at twice a second at most."""
        self._tell.loss(loss)

    def save(self, *, wait: bool = True) -> Commit | None:
        """Save now. Collective: every rank calls it, after the same step.

        Returns:
            The newest durable checkpoint of this node; None where it has none.
        """
        self._keeper.settle()
        self._save()
        return self.wait() if wait else self._writer.commit

    @contextlib.contextmanager
    def untimed(self) -> Iterator[None]:
        """Around what may take long between two steps, such as an evaluation: it counts for no step, and is no hang.

        On one rank or on all; a job whose other ranks wait for this one does not hang either.
        """
        began = time.monotonic()
        with untimed.section(self._settings.run, self._gang.local_rank):
            yield
        self._ended += time.monotonic() - began  # the step that it falls into did not take that long
        self._watch.begin()

    def wait(self) -> Commit | None:
        """Until nothing is being written on this node; its newest durable checkpoint. Collective where sharded only."""
        self._keeper.settle()
        return self._writer.commit

    # ------------------------------------------------------------ beginning

    def _own_folder(self) -> Path | None:
        """Where this rank writes: one of each node does."""
        return None if self._gang.local_rank else self._met.folder

    def _find_keeper(self) -> Keeper:
        settings, places = self._settings, self._met.places
        if not self._parts.sharded:
            return Replicated(self._gang, self._writer, self._control, places, settings.late)
        if settings.replicated:
            raise AttachError(
                "attach(model=): this model is sharded, so each machine has a part of its state, but the job is one of "
                "replicated state: write `checkpoint: {replicated: false}` in the job file and submit it under "
                "another name"
            )
        return Sharded(self._gang, self._writer, places, self._parts, managed=settings.managed)

    def _begin(self) -> None:
        hello = self._writer.greet(self._met.gen)
        self._gang.gather(b"")  # all folders are quiet now: savers have finished what older generations staged
        found, skipped = self._keeper.begin(self._met.folder, hello)
        for each in skipped:
            say(f"skipped checkpoint {each}")
        if found is not None:
            self._load(found)
        else:
            self._course.begin()
        for optimizer in self._parts.optimizers[:1]:
            optimizer.register_step_post_hook(self._on_step)
        if self._gang.local_rank == 0:
            self._control.pid = os.getpid()
            self._control.state = Phase.TRAINING

    def _load(self, found: Found) -> None:
        self._course.load(found)
        self._saved = self._course.step
        if self._gang.local_rank == 0:
            then = found.manifest
            self._control.resumed(then.commit)
            resized = "" if found.same_world else f", {_ranks(then.world)} then, {self._gang.world} now: reseeded"
            say(f"generation {self._met.gen}: resumed from {then.commit} ({found.source}{resized})")

    # ------------------------------------------------------------ the loop

    def _start_loop(self, feed: Feed, epochs: int | None, steps: int | None) -> None:
        self._pace.since = self._ended = time.monotonic()
        self._stepped = False
        self._idle, self._advice = True, ""
        self._samples = 0
        self._watch.begin()
        self._epochs = epochs if steps is None else None
        left = self._batches_left(feed)
        self._tell.begin(steps or (0 if left is None else self._course.step + left))

    def _batches_left(self, feed: Feed) -> int | None:
        """To the end of a loop over epochs; None where steps end it, or nobody knows."""
        if self._epochs is None or feed.epoch_batches is None:
            return None
        return (self._epochs - feed.position.epoch) * feed.epoch_batches - feed.position.number

    def _begin_batch(self, feed: Feed) -> None:
        self._update.begin(feed.turn, feed.position.batch)
        self._samples += len(feed.turn.places)
        if self._micro is not None:  # random numbers follow the micro-batch, whoever trains on it
            where = feed.position
            rng.seed_all(self._seed, where.loop, where.consumed, feed.turn.number, _MICRO)

    def _on_step(self, *_: object) -> None:
        self._course.step += 1
        self._stepped = True

    def _after_batch(self, feed: Feed) -> None:
        """The boundary: between two batches, after an optimizer step."""
        self._tell.batch()
        if not self._parts.optimizers:
            self._on_step()
        if not self._stepped:
            return
        self._stepped = False
        now = time.monotonic()
        first = not self._pace.steps
        self._pace.steps.append(now - self._ended)
        self._ended = now
        self._course.stepped()
        self._writer.poll()
        self._tell.stepped(self._course.step, feed.position.batch, self._batches_left(feed))
        if first:
            self._keeper.warm(self._course)
        self._lag.after_step(self._watch.end(), self._samples, self._pace.step_s)
        self._samples = 0
        call = self._agreement.after_step(self._view, self._pace.step_s)
        if call is Call.STOP:
            self._stop(feed)
        elif call is Call.SAVE:
            self._save()
            self._ended = time.monotonic()  # a stall is not a slow step
        elif call is Call.PUBLISH:
            self._keeper.publish()
        self._watch.begin()

    def _view(self) -> Call:
        """What this rank sees; what happens is agreed."""
        control = self._control
        if control.want is Want.SAVE_STOP:
            return Call.STOP
        if self._writer.busy:
            return Call.BUSY
        if self._keeper.ready():
            return Call.PUBLISH
        if control.want is Want.SAVE and control.ask > self._asked:
            return Call.SAVE
        return Call.SAVE if self._writer.writes and self._pace.due(time.monotonic()) else Call.NOTHING

    # ------------------------------------------------------------ saving and ending

    def _save(self) -> None:
        """Collective. Returns when the state may change again; durable comes later."""
        began = time.monotonic()
        self._asked = self._control.ask
        self._saved = self._course.step
        self._keeper.save(self._course, Commit(self._met.gen, self._course.step))
        self._pace.since = time.monotonic()
        self._pace.stalls.append(self._pace.since - began)
        self._tell.stalled()

    def _stop(self, feed: Feed) -> None:
        """Save, wait until it is durable, leave. The user's code after the loop does not run.

        Raises:
            SystemExit: 0.
        """
        self._lag.drain()
        self._tell.phase(Phase.STOPPING)
        self._keeper.settle(self._tell.left_s())
        self._save()
        self._end("stopped")
        self._writer.close()
        raise SystemExit(0)

    def _finish(self) -> None:
        """The loop has reached its end: the last state is saved, whether or not a save was due."""
        self._lag.drain()
        self._agreement.drain()
        self._tell.phase(Phase.FINISHING)
        self._keeper.settle()
        if self._saved != self._course.step:
            self._save()
        if self._idle and not self._gang.rank:
            say(after.nothing_left(self._course.step, None if self._settings.managed else str(self._settings.folder)))
        self._end("done")
        self._advice = after.failed_after(self._course.step, self._idle)

    def _end(self, outcome: Literal["stopped", "done"]) -> None:
        self._keeper.settle(self._tell.left_s())
        self._tell.end(outcome, self._met.gen, self._course.step, self._writer.commit)


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"
