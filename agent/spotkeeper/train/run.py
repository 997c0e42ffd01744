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

import json
import os
import platform
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import torch

from spotkeeper import __version__
from spotkeeper.train import after, gradorder, rng
from spotkeeper.train.agree import Agreement, Call
from spotkeeper.train.checkpoint import State, pack, unpack
from spotkeeper.train.client import new_manifest
from spotkeeper.train.control import NAME, RESULT, Commit, Control, Result, Want, write_result
from spotkeeper.train.control import State as Phase
from spotkeeper.train.errors import CallError
from spotkeeper.train.feed import Feed, Position, open_feed
from spotkeeper.train.gang import Gang, find_gang
from spotkeeper.train.micro import find_micro
from spotkeeper.train.pace import Pace
from spotkeeper.train.parts import Parts
from spotkeeper.train.restore import Restored, restore
from spotkeeper.train.settings import Settings, lock, make_output
from spotkeeper.train.signals import stop_on_signals
from spotkeeper.train.store import Place, scan
from spotkeeper.train.update import Clip, Update
from spotkeeper.train.writer import Writer, say

_REPORT_S = 0.5  # a loss on a GPU is waited for at most this often
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
        model: the module as trained, wrapped in DDP if it is.
        optimizer: one, or a list; the first one's steps are the run's.
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
        self._seed = self._settings.seed if seed is None else seed
        self._micro = find_micro(self._gang, global_batch, self._settings.max_world)
        self._update = Update(parts, self._gang.world, elastic=self._micro is not None)
        self._control = self._open_control()
        self._control.state = Phase.RESTORING
        self._pace = Pace(self._settings.mean_life_s, self._settings.interval_s, since=time.monotonic())
        self._agreement = Agreement(self._gang)
        self._step = 0
        self._loops = 0  # calls of steps()
        self._idle = True  # the loop under way, or the last one, has yielded nothing
        self._advice = ""  # for a failure after the loop; none in it
        self._position = Position()
        self._feed: Feed | None = None
        self._local_data: dict[str, Any] | None = None
        self._order: gradorder.Recorder | gradorder.Replayed | None = None
        self._stepped = False
        self._saved: int | None = None  # step of the last save that was staged
        self._asked = 0
        self._batches = 0
        self._ended = 0.0
        self._loss: float | torch.Tensor | None = None
        self._loss_at = 0.0
        self._lock: IO[str] | None = None
        self._begin()
        after.on_failure(self, lambda run: run._advice)

    # ------------------------------------------------------------ what users call

    @property
    def steps_done(self) -> int:
        """Optimizer steps done since the run began, over all its generations."""
        return self._step

    @property
    def epoch(self) -> int:
        """Of the batch in hand, from 0."""
        return self._position.epoch if self._feed is None else self._feed.position.epoch

    @property
    def rank(self) -> int:
        return self._gang.rank

    @property
    def world(self) -> int:
        return self._gang.world

    @property
    def generation(self) -> int:
        return self._gen

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
        if loop < self._position.loop:
            return  # this loop was over when the checkpoint was made
        if loop > self._position.loop:
            self._position, self._local_data = Position(loop), None
        epochs = 1 if epochs is None and steps is None else epochs
        feed = self._feed = open_feed(loader, self._position, self._local_data, self._gang, self._seed, self._micro)
        self._local_data = None
        self._start_loop(feed, epochs, steps)
        if steps is None or self._step < steps:
            for batch in feed.batches(epochs):
                self._begin_batch(feed)
                self._idle = False
                yield batch
                self._update.done()
                if not feed.turn.last:
                    continue
                feed.done()
                self._after_batch(feed)
                if steps is not None and self._step >= steps:
                    break
        self._update.end()
        self._position, self._feed = feed.position, None
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
        if loss is None or self._gang.local_rank:
            return
        self._loss = loss.detach() if isinstance(loss, torch.Tensor) else loss
        if time.monotonic() - self._loss_at >= _REPORT_S:
            self._show_loss()

    def save(self, *, wait: bool = True) -> Commit | None:
        """Save now. Collective: every rank calls it, after the same step.

        Returns:
            The newest durable checkpoint of this node; None where it has none.
        """
        self._writer.settle()
        self._save()
        return self.wait() if wait else self._writer.commit

    def wait(self) -> Commit | None:
        """Until nothing is being written on this node; its newest durable checkpoint. Not collective."""
        self._writer.settle()
        return self._writer.commit

    # ------------------------------------------------------------ beginning

    def _open_control(self) -> Control:
        if self._settings.run is not None:
            return Control.open(self._settings.run / NAME)
        control = Control.private()
        stop_on_signals(control)
        return control

    def _begin(self) -> None:
        folder = self._own_folder()
        found = self._gang.gather(json.dumps(self._introduce(folder)).encode())
        peers = [json.loads(blob) for blob in found]
        self._gen = self._settings.gen if self._settings.gen is not None else 1 + max(peer["top"] for peer in peers)
        self._gang_places = tuple(Place(**peer["place"]) for peer in peers)
        writes = folder is not None and self._gang.local_rank == 0
        self._writer = Writer(self._settings, folder if writes else None, self._control, self._pace)
        hello = self._writer.greet(self._gen)
        self._gang.gather(b"")  # all folders are quiet now: savers have finished what older generations staged
        restored, skipped = restore(self._gang, folder, self._writer.client, hello)
        for each in skipped:
            say(f"skipped checkpoint {each}")
        if restored is not None:
            self._load(restored)
        elif (ddp := self._parts.ddp) is not None:
            self._order = gradorder.Recorder(ddp)
        for optimizer in self._parts.optimizers[:1]:
            optimizer.register_step_post_hook(self._on_step)
        if self._gang.local_rank == 0:
            self._control.pid = os.getpid()
            self._control.state = Phase.TRAINING

    def _own_folder(self) -> Path | None:
        folder = self._settings.folder
        if self._settings.managed or folder is None:
            return folder
        if self._gang.node or any(flag == b"1" for flag in self._gang.gather(b"1" if self._gang.node else b"0")):
            folder = folder / f"node{self._gang.node}"  # several machines may share this file system
        if self._gang.local_rank == 0:
            self._lock = lock(folder)
        return folder

    def _introduce(self, folder: Path | None) -> dict[str, Any]:
        there = scan(folder) if folder else []
        slot = self._gang.node if self._settings.slot is None else self._settings.slot
        place = Place(self._gang.rank, self._gang.node, slot, folder is not None)
        return {"top": there[0].gen if there else -1, "place": asdict(place)}

    def _load(self, restored: Restored) -> None:
        """In this order: DDP's buckets, state, random state; each would disturb the one after it."""
        state, manifest = restored.state, restored.manifest
        rest: Any = state.rest
        ddp = self._parts.ddp
        if ddp is not None and rest["order"]:
            gradorder.replay(ddp, rest["order"], rest["synced"])
            self._order = gradorder.Replayed(rest["order"], rest["synced"])
        elif ddp is not None:
            self._order = gradorder.Recorder(ddp)
        same_world = manifest.world == self._gang.world
        local = unpack(state.local[self._gang.rank if same_world else 0])
        self._parts.load(state.model, rest, local)
        self._step = self._saved = rest["step"]
        self._position = Position(**rest["position"])
        self._local_data = local["data"] if same_world else None
        self._pace.stalls.extend(rest["stalls"])
        if same_world:
            rng.restore(local["rng"])
        else:
            rng.seed_all(self._seed, self._step, self._gang.rank)
        received = restored.source.startswith("rank")
        if restored.lost is not None:
            self._writer.lose(restored.lost)
        elif received:
            self._writer.copy(manifest, restored.stretches)
        if self._writer.writes and not received:
            self._writer.commit = manifest.commit
            self._control.committed(manifest.commit, manifest.saved_at)
        if self._gang.local_rank == 0:
            self._control.resumed(manifest.commit)
            resized = "" if same_world else f", {_ranks(manifest.world)} then, {self._gang.world} now: reseeded"
            say(f"generation {self._gen}: resumed from {manifest.commit} ({restored.source}{resized})")

    # ------------------------------------------------------------ the loop

    def _start_loop(self, feed: Feed, epochs: int | None, steps: int | None) -> None:
        self._pace.since = self._ended = time.monotonic()
        self._batches, self._stepped = 0, False
        self._idle, self._advice = True, ""
        if self._gang.local_rank:
            return
        self._control.state = Phase.TRAINING
        if self._settings.run is not None:
            (self._settings.run / RESULT).unlink(missing_ok=True)
        if steps is None and epochs is not None and feed.epoch_batches is not None:
            steps = self._step + (epochs - feed.position.epoch) * feed.epoch_batches - feed.position.number
        self._control.total_steps = steps or 0

    def _begin_batch(self, feed: Feed) -> None:
        self._update.begin(feed.turn, feed.position.batch)
        if self._micro is not None:  # random numbers follow the micro-batch, whoever trains on it
            where = feed.position
            rng.seed_all(self._seed, where.loop, where.consumed, feed.turn.number, _MICRO)

    def _on_step(self, *_: object) -> None:
        self._step += 1
        self._stepped = True

    def _after_batch(self, feed: Feed) -> None:
        """The boundary: between two batches, after an optimizer step."""
        self._batches += 1
        if not self._parts.optimizers:
            self._on_step()
        if not self._stepped:
            return
        self._stepped = False
        now = time.monotonic()
        first = not self._pace.steps
        self._pace.steps.append(now - self._ended)
        self._ended = now
        if self._order is not None:
            self._order.stepped()
        self._writer.poll()
        self._write_progress(feed)
        if first:
            self._warm()
        call = self._agreement.after_step(self._view, self._pace.step_s)
        if call is Call.STOP:
            self._stop(feed)
        elif call is Call.SAVE:
            self._save()
            self._ended = time.monotonic()  # a stall is not a slow step

    def _view(self) -> Call:
        """What this rank sees; what happens is agreed."""
        control = self._control
        if control.want is Want.SAVE_STOP:
            return Call.STOP
        if self._writer.busy:
            return Call.BUSY
        if control.want is Want.SAVE and control.ask > self._asked:
            return Call.SAVE
        return Call.SAVE if self._writer.writes and self._pace.due(time.monotonic()) else Call.NOTHING

    def _write_progress(self, feed: Feed) -> None:
        if self._gang.local_rank:
            self._batches = 0
            return
        control, step_s = self._control, self._pace.step_s
        control.stepped(self._step)
        control.step_s = step_s
        control.samples_per_s = self._batches * feed.position.batch / step_s if step_s else 0.0
        control.interval_s = self._pace.interval_s
        self._batches = 0

    def _show_loss(self) -> None:
        if self._loss is not None:
            self._loss_at = time.monotonic()
            self._control.loss = float(self._loss)

    def _warm(self) -> None:
        if self._writer.writes:
            local = pack(self._take_local())
            self._writer.warm(self._take((local,) * self._gang.world))

    # ------------------------------------------------------------ saving and ending

    def _save(self) -> None:
        """Collective. Returns when the state may change again; durable comes later."""
        began = time.monotonic()
        self._asked = self._control.ask
        local = self._gang.gather(pack(self._take_local()))
        self._saved = self._step
        self._adopt_late_disk()
        if self._writer.writes:
            commit = Commit(self._gen, self._step)
            self._writer.save(self._take(tuple(local)), new_manifest(commit, self._gang_places, _versions()))
        self._pace.since = time.monotonic()
        self._pace.stalls.append(self._pace.since - began)
        if self._gang.local_rank == 0:
            self._control.stall_s = self._pace.stall_s

    def _adopt_late_disk(self) -> None:
        """A member may begin without its disk; its first save after the disk came makes a full copy there."""
        late = self._settings.late
        if late is not None and not self._writer.writes and not self._gang.local_rank and self._control.disk:
            self._writer.adopt(late)
            say(f"generation {self._gen}: the disk is here, checkpoints go to it from step {self._step} on")

    def _take(self, local: tuple[bytes, ...]) -> State:
        model, rest = self._parts.take_common()
        feed = self._feed
        rest |= {
            "step": self._step,
            "position": asdict(self._position if feed is None else feed.position),
            "order": self._order.order if self._order else (),
            "synced": self._order.synced if self._order else 0,
            "stalls": list(self._pace.stalls),
        }
        return State(model, rest, local)

    def _take_local(self) -> dict[str, object]:
        return self._parts.take_local() | {"data": {} if self._feed is None else self._feed.local()}

    def _stop(self, feed: Feed) -> None:
        """Save, wait until it is durable, leave. The user's code after the loop does not run.

        Raises:
            SystemExit: 0.
        """
        self._set_state(Phase.STOPPING)
        self._writer.settle(self._left_s())
        self._save()
        self._end("stopped", Phase.STOPPED)
        self._writer.close()
        raise SystemExit(0)

    def _finish(self) -> None:
        """The loop has reached its end: the last state is saved, whether or not a save was due."""
        self._agreement.drain()
        self._set_state(Phase.FINISHING)
        self._writer.settle()
        if self._saved != self._step:
            self._save()
        if self._idle and not self._gang.rank:
            say(after.nothing_left(self._step, None if self._settings.managed else str(self._settings.folder)))
        self._end("done", Phase.DONE)
        self._advice = after.failed_after(self._step, self._idle)

    def _end(self, outcome: Any, phase: Phase) -> None:
        self._writer.settle(self._left_s())
        if self._gang.local_rank:
            return
        self._show_loss()
        if self._settings.run is not None:
            write_result(self._settings.run, Result(outcome, self._gen, self._step, self._writer.commit))
        self._control.state = phase
        if outcome == "stopped":
            say(f"generation {self._gen}: stopped after step {self._step}, newest checkpoint {self._writer.commit}")

    def _left_s(self) -> float | None:
        """Until the agent's deadline; a second at least, to hear of what is durable already."""
        deadline = self._control.deadline
        return max(1.0, deadline - time.time()) if deadline and self._control.want is Want.SAVE_STOP else None

    def _set_state(self, phase: Phase) -> None:
        if self._gang.local_rank == 0:
            self._control.state = phase


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def _versions() -> dict[str, str]:
    return {"spotkeeper": __version__, "torch": str(torch.__version__), "python": platform.python_version()}
