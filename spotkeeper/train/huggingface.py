"""Hugging Face: ``Trainer(callbacks=[SpotkeeperCallback()])`` makes ``trainer.train()`` a run.

A callback's hooks do not get the trainer as an argument, so the callback finds the trainer among the callers of
``on_init_end`` and wraps the trainer's ``train()``. The wrapper calls ``attach()``, which reads the saved state. The
trainer reads its place in the epochs from a checkpoint folder before it has made an optimizer. So the wrapper gives
``train()`` a folder with only ``trainer_state.json``, and ``on_train_begin`` restores model, optimizer and the rest.

A *save point* is ``on_step_begin``: everything that follows a step (a log, an evaluation, the trainer's own save) is
done, and the next batches are loaded. A resumed trainer's random state is restored only at the first save point,
because the trainer draws random numbers before it. The trainer orders the samples itself, by its seed and the epoch.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState, TrainerState
from transformers.trainer_utils import TrainOutput

from spotkeeper.train.core import gradorder, rng
from spotkeeper.train.core.errors import AttachError, CallError
from spotkeeper.train.core.parts import FrameworkState
from spotkeeper.train.loop.attach import attach
from spotkeeper.train.loop.external import FrameworkLoop, check_world
from spotkeeper.train.loop.run import Run

_STATE = "trainer_state.json"  # the file from which a trainer reads its place
_SUMS = ("_tr_loss", "_total_loss_scalar", "_globalstep_last_logged", "_initial_global_step")  # for the trainer's log


class SpotkeeperCallback(TrainerCallback):  # type: ignore[misc]
    """Makes ``trainer.train()`` survive preemption: saves and restores the training, and stops it when asked to.

    A script can call ``train()`` only once. Its ``resume_from_checkpoint`` is used until the run has a checkpoint.
    After a stop request ``train`` saves and ends the process with ``SystemExit(0)``, so the code after ``train`` runs
    only after the training is complete.

    Raises:
        CallError: a second ``train()``; a callback added to an existing trainer; or a trainer that counts fewer
            processes than were started, so that each would train alone.
        AttachError: the trainer uses DeepSpeed, FSDP or ``auto_find_batch_size``; or the checkpoint was saved by
            another number of processes.

    Example::

        trainer = Trainer(model, args, train_dataset=data, callbacks=[SpotkeeperCallback()])
        trainer.train()
    """

    def __init__(self) -> None:
        self.run: Run | None = None
        self._state: _TrainerState | None = None
        self._loop: FrameworkLoop | None = None
        self._stepped = 0  # the trainer's steps at the last save point

    def on_init_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        trainer = _calling_trainer()
        self._state = _TrainerState(trainer)
        trainer.train = functools.wraps(trainer.train)(functools.partial(self._train, trainer, trainer.train))

    def _train(
        self, trainer: Any, train: Callable[..., TrainOutput], resume_from_checkpoint: Any = None, *args: Any, **kw: Any
    ) -> TrainOutput:
        """Replace the trainer's ``train()``: attach, restore and train."""
        assert self._state is not None
        self._check(trainer)
        before = rng.capture()
        self.run = attach(huggingface=self._state)
        self._state.random = rng.capture()
        rng.restore(before)
        restored = self._state.restored
        if restored is None:
            output = train(resume_from_checkpoint, *args, **kw)
        elif restored["output"] is not None:
            return self._done_before(trainer, restored)
        else:
            output = self._resume(trainer, train, restored, *args, **kw)
        self._state.output = tuple(output)
        assert self._loop is not None
        self._loop.end()
        return output

    def _check(self, trainer: Any) -> None:
        if self.run is not None:
            raise CallError("call trainer.train() only once: a checkpoint does not say to which call it belongs")
        check_world(trainer.args.world_size, "without GPUs, set TrainingArguments(use_cpu=True)")
        if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
            raise AttachError(
                "this callback cannot save a model that DeepSpeed or FSDP shards; train without them, or write your "
                "own loop with spotkeeper.attach()"
            )
        if trainer.args.auto_find_batch_size:
            raise AttachError("auto_find_batch_size is not supported; set per_device_train_batch_size instead")

    def _resume(
        self, trainer: Any, train: Callable[..., TrainOutput], restored: dict[str, Any], *args: Any, **kw: Any
    ) -> TrainOutput:
        with tempfile.TemporaryDirectory(prefix="spotkeeper-") as folder:
            TrainerState(**restored["state"]).save_to_json(str(Path(folder) / _STATE))
            trainer._load_from_checkpoint = lambda *_, **__: None  # the weights come with on_train_begin
            try:
                return train(folder, *args, **kw)
            finally:
                del trainer._load_from_checkpoint

    def _done_before(self, trainer: Any, restored: dict[str, Any]) -> TrainOutput:
        """Restore a trainer whose training an earlier generation has completed; the code after ``train`` needs it."""
        assert self.run is not None and self._state is not None
        if trainer.model_init is not None:
            trainer.model = trainer.call_model_init()
        trainer.model.load_state_dict(restored["model"])
        trainer.state = TrainerState(**restored["state"])
        FrameworkLoop(self.run, batch=1, total=None).end()
        self._state.arrive()
        return TrainOutput(*restored["output"])

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._state is None or self.run is None:
            raise CallError(
                "give the callback to the trainer when it is made: Trainer(callbacks=[SpotkeeperCallback()])"
            )
        self._state.fill()
        self._stepped = state.global_step
        batch = args.train_batch_size * args.gradient_accumulation_steps
        self._loop = FrameworkLoop(self.run, batch=batch, total=state.max_steps or None)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        assert self._loop is not None and self._state is not None
        self._state.arrive()
        if state.global_step != self._stepped:
            self._stepped = state.global_step
            self._state.order_known()
            self._loop.after_step()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Wait until a save in progress has copied the weights, since callbacks after this one may change them."""
        if self.run is not None:
            self.run.copied()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if self.run is not None and logs:
            self.run.report_at(state.global_step, dict(logs))


class _TrainerState(FrameworkState):
    """The trainer's state, attached to the run. After a restore ``fill`` loads it, once model and optimizer exist."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._order: gradorder.Recorder | gradorder.Replayed | None = None
        self.restored: dict[str, Any] | None = None
        self.random: dict[str, Any] | None = None
        self.output: tuple[Any, ...] | None = None  # result of train()

    @property
    def optimizers(self) -> tuple[Any, ...]:  # type: ignore[override]
        return () if self._trainer.optimizer is None else (self._trainer.optimizer,)

    def state_dict(self) -> dict[str, Any]:
        trainer, scaler = self._trainer, self._scaler
        callbacks = [each for each in self._callbacks if isinstance(each, ExportableState)]
        known = TrainerState(stateful_callbacks=[*callbacks, trainer.control]).stateful_callbacks
        return {
            "world": trainer.args.world_size,
            "state": {**dataclasses.asdict(trainer.state), "stateful_callbacks": known},
            "sums": {name: getattr(trainer, name) for name in _SUMS if hasattr(trainer, name)},
            "model": trainer.model.state_dict(),
            "optimizer": trainer.optimizer.state_dict(),
            "scheduler": trainer.lr_scheduler.state_dict(),
            "scaler": None if scaler is None else scaler.state_dict(),
            "order": self._order.order if self._order else (),
            "synced": self._order.synced if self._order else 0,
            "output": self.output,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["world"] != self._trainer.args.world_size:
            raise AttachError(
                f"{state['world']} processes saved the checkpoint, but this trainer has "
                f"{self._trainer.args.world_size}, so its place in the data would be lost: keep the number of processes"
            )
        self.restored = state

    def fill(self) -> None:
        """Rebuild DDP's buckets, then load the state into model, optimizer and scheduler, which exist now."""
        trainer, state = self._trainer, self.restored
        ddp = gradorder.find_ddp(trainer.model_wrapped)
        if state is None:
            self._order = None if ddp is None else gradorder.Recorder(ddp)
            return
        if ddp is not None and state["order"]:
            gradorder.replay(ddp, state["order"], state["synced"])
            self._order = gradorder.Replayed(state["order"], state["synced"])
        trainer.model.load_state_dict(state["model"])
        trainer.optimizer.load_state_dict(state["optimizer"])
        trainer.lr_scheduler.load_state_dict(state["scheduler"])
        if self._scaler is not None and state["scaler"] is not None:
            self._scaler.load_state_dict(state["scaler"])
        for name, value in state["sums"].items():
            setattr(trainer, name, value)
        self._fill_callbacks(state["state"]["stateful_callbacks"])

    def _fill_callbacks(self, known: dict[str, Any]) -> None:
        """Restore stateful callbacks, such as early stopping. The trainer does so only if the script asks for it."""
        left = {name: list(each) if isinstance(each, list) else [each] for name, each in known.items()}
        for callback in self._callbacks:
            if isinstance(callback, ExportableState) and (states := left.get(type(callback).__name__)):
                for name, value in states.pop(0)["attributes"].items():
                    setattr(callback, name, value)

    def arrive(self) -> None:
        """Called at each save point. At the first save point, a resumed run restores its random state."""
        if self.restored is not None:
            assert self.random is not None
            rng.restore(self.random)
            self.restored = self.random = None

    def order_known(self) -> None:
        if self._order is not None:
            self._order.stepped()

    @property
    def _callbacks(self) -> list[Any]:
        callbacks: list[Any] = self._trainer.callback_handler.callbacks
        return callbacks

    @property
    def _scaler(self) -> Any:
        return getattr(self._trainer.accelerator, "scaler", None)


def _calling_trainer() -> Any:
    """Find the calling trainer in the call stack: the hook does not get the trainer as an argument."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if isinstance(found := frame.f_locals.get("self"), Trainer):
            return found
        frame = frame.f_back
    raise CallError("give this callback to a transformers.Trainer: Trainer(callbacks=[SpotkeeperCallback()])")
