"""Lightning: ``Trainer(callbacks=[SpotkeeperCallback()])`` makes ``trainer.fit()`` a run.

A checkpoint contains the state that every run saves (model, optimizers, random state) and the content of Lightning's
own checkpoints (``dump_checkpoint``). Train loaders are rebuilt over the sampler of ``run.steps()``, so Lightning's
counts of finished batches identify a place in the data.

A *save point* is the first hook after an optimizer step: the start of the next batch, or of a validation before that
batch. No step is half done there. A resumed trainer reaches the same hook with the same batch. The random state is
restored only there, because Lightning draws random numbers earlier.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
from collections.abc import Iterator
from enum import Enum
from itertools import islice
from typing import Any

from spotkeeper.train.core import rng
from spotkeeper.train.core.errors import AttachError, CallError
from spotkeeper.train.core.parts import Stateful
from spotkeeper.train.core.settings import RunSettings
from spotkeeper.train.data.sampler import is_map_style, rebuild
from spotkeeper.train.loop.attach import attach
from spotkeeper.train.loop.external import FrameworkLoop, check_world
from spotkeeper.train.loop.run import Run

# One library in two distributions with unrelated classes: use the one that the script has imported.
if "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
    from pytorch_lightning import Callback
else:
    from lightning.pytorch import Callback

_HOW = 'set Trainer(strategy="ddp", devices=<processes of a node>, num_nodes=<nodes>) to these numbers, which torchrun '
_HOW += "has put into LOCAL_WORLD_SIZE and GROUP_WORLD_SIZE"


class SavePoint(Enum):
    """The hook at which the trainer's state is taken."""

    BATCH = 0  # before the next batch
    VALIDATION = 1  # before a validation
    END = 2  # after the last step


class SpotkeeperCallback(Callback):  # type: ignore[misc]
    """Makes ``trainer.fit()`` survive preemption: saves and restores the training, and stops it when asked to.

    A script can call ``fit`` only once. Its ``ckpt_path`` is used only until the run has its own checkpoint. After a
    stop request ``fit`` saves and ends the process with ``SystemExit(0)``, so the code after ``fit`` runs only after
    the training is complete.

    Raises:
        CallError: a second ``fit``; or a trainer that counts fewer processes than were started, so that each would
            train alone.
        AttachError: the strategy shards the model, or the job's number of nodes may change.

    Example::

        trainer = Trainer(strategy="ddp", max_epochs=3, callbacks=[SpotkeeperCallback()])
        trainer.fit(module, loader)
    """

    def __init__(self) -> None:
        self.run: Run | None = None
        self._loop: FrameworkLoop | None = None
        self._state: _LightningState | None = None
        self._stepped = 0  # the trainer's steps at the last save point
        self._on_sigterm: Any = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage != "fit":
            return
        if self.run is not None:
            raise CallError("call trainer.fit() only once: a checkpoint does not say to which call it belongs")
        check_world(trainer.world_size, _HOW)
        if trainer.strategy.restore_checkpoint_after_setup:
            raise AttachError(
                f"{type(trainer.strategy).__name__} shards the model, which this callback cannot save; "
                'use strategy="ddp", or write your own loop with spotkeeper.attach()'
            )
        self._state = _LightningState(trainer)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach and restore. At this hook model and optimizers are on their devices, and the loops have not begun."""
        assert self._state is not None
        self.run = attach(trainer.strategy.model, list(trainer.optimizers), lightning=self._state)
        self._state.attached()
        self._report_logged(trainer._logger_connector)
        self._on_sigterm = signal.getsignal(signal.SIGTERM)

    def _report_logged(self, connector: Any) -> None:
        """Report what the script logs by ``self.log`` at the steps where Lightning logs it, also without a logger."""
        log_metrics, run = connector.log_metrics, self.run
        assert run is not None

        def log(metrics: dict[str, Any], step: int | None = None) -> None:
            run.report_at(run.steps_done, {name: value for name, value in metrics.items() if name != "step"})
            log_metrics(metrics, step)

        connector.log_metrics = log

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._own_sigterm(trainer)
        self._begin(trainer)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._save_point(trainer, SavePoint.BATCH)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Wait until a save in progress has copied the weights: batches that only accumulate gradients do not wait."""
        if self.run is not None:
            self.run.copied()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if self._loop is not None and self.run is not None and not trainer.sanity_checking:
            self._save_point(trainer, SavePoint.VALIDATION)
            self.run.copied()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if self.run is not None and loss is not None:
            self.run.report(loss=loss)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self._loop is not None and self._state is not None:
            self._state.point = SavePoint.END
            self._loop.end()

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        if self._loop is None:  # an earlier generation did all steps
            self._begin(trainer)
            self.on_train_end(trainer, pl_module)

    def _begin(self, trainer: Any) -> None:
        assert self.run is not None and self._state is not None
        self._stepped = trainer.global_step
        batch = self._state.batch * trainer.accumulate_grad_batches
        self._loop = FrameworkLoop(self.run, batch=batch, total=_total(trainer))

    def _save_point(self, trainer: Any, point: SavePoint) -> None:
        assert self._loop is not None and self._state is not None
        self._state.arrive()
        if trainer.global_step != self._stepped:
            self._stepped = trainer.global_step
            self._state.point = point
            self._loop.after_step()

    def _own_sigterm(self, trainer: Any) -> None:
        """Restore the former SIGTERM handler. (Lightning's waits for all ranks, even if only one got the signal.)"""
        slurm = type(getattr(trainer.strategy, "cluster_environment", None)).__name__ == "SLURMEnvironment"
        if threading.current_thread() is threading.main_thread() and not slurm:
            signal.signal(signal.SIGTERM, self._on_sigterm)


class _LightningState:
    """The trainer's state, attached to the run: Lightning's own checkpoint without the parts that the run saves."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._connector = trainer._checkpoint_connector
        self._loop = trainer.fit_loop.epoch_loop
        self._restored: int | None = None  # step count for loggers
        self._random: dict[str, Any] | None = None
        self.batch = 1  # samples of this rank per batch
        self.point = SavePoint.END
        self._global_batches: list[int] = []
        self._setup, self._loaders = -1, 0
        self._prepare = trainer._data_connector._prepare_dataloader
        trainer._data_connector._prepare_dataloader = self._prepare_loader

    # ------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        whole: dict[str, Any] = self._connector.dump_checkpoint(False)
        del whole["optimizer_states"]
        if _same(whole["state_dict"], self._weights()):
            del whole["state_dict"]  # the run saves the weights; a callback may put others here, such as an average
        for name in [name for name in whole if "hyper_parameters" in name or "hparams" in name]:
            del whole[name]  # the script sets these, and they may hold classes or functions
        self._tidy(whole["loops"]["fit_loop"])
        return {"checkpoint": whole, "batches": self._global_batches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore in Lightning's order. The run has already restored model and optimizers."""
        connector = self._connector
        whole = {"state_dict": self._weights()} | self._hyper_parameters() | state["checkpoint"]
        self._global_batches = state["batches"]
        connector._loaded_checkpoint = whole
        connector.restore_model()
        connector.restore_datamodule()
        connector.restore_callbacks()
        connector.restore_precision_plugin_state()
        connector.restore_loops()
        connector.restore_lr_schedulers()
        connector._loaded_checkpoint = {}  # also drops the older one of fit(ckpt_path=)
        self._restored = self._loop._batches_that_stepped

    def _hyper_parameters(self) -> dict[str, Any]:
        """Return the hyperparameters, for hooks that expect them in a checkpoint."""
        owners = (self._trainer.lightning_module, self._trainer.datamodule)
        return {each.CHECKPOINT_HYPER_PARAMS_KEY: dict(each.hparams) for each in owners if each and each.hparams}

    def _weights(self) -> dict[str, Any]:
        weights: dict[str, Any] = self._trainer.strategy.lightning_module_state_dict()
        return weights

    def _tidy(self, loops: dict[str, Any]) -> None:
        """Correct the batch counts in a checkpoint: at a save point they include the next batch, which is not done."""
        if self.point is SavePoint.BATCH:
            batches = loops["epoch_loop.batch_progress"]
            batches["is_last_batch"] = False
            for count in (batches["total"], batches["current"]):
                count["ready"] = count["completed"]
        elif self.point is SavePoint.VALIDATION:  # as if its first batch had begun: Lightning repeats the validation
            batches = loops["epoch_loop.val_loop.batch_progress"]
            batches["is_last_batch"] = False
            batches["current"] = {"ready": 1, "started": 1, "processed": 0, "completed": 0}
            done = batches["total"]["completed"]
            batches["total"] = {"ready": done + 1, "started": done + 1, "processed": done, "completed": done}

    # ------------------------------------------------------------ resuming

    def attached(self) -> None:
        """Prepare a resumed trainer for training. Called after ``attach()`` has loaded the state."""
        if self._restored is not None:
            self._random = rng.capture()
            self._trainer.fit_loop._combined_loader = None  # drop iterators that were made to estimate the steps
            self._setup = -1

    def arrive(self) -> None:
        """Called at each save point. At the first save point, a resumed run restores its random state."""
        if self._random is not None:
            rng.restore(self._random)
            self._loop._batches_that_stepped = self._restored
            self._trainer.fit_loop._restarting = False  # otherwise this epoch's end skips schedulers with a monitor
            self._random = None

    # ------------------------------------------------------------ data

    def _prepare_loader(self, dataloader: Any, shuffle: bool, mode: Any) -> Any:
        """Rebuild a loader over the run's sampler. Replaces Lightning's method, which adds a distributed sampler."""
        if getattr(mode, "value", mode) != "train":
            return self._prepare(dataloader, shuffle=shuffle, mode=mode)
        if not is_map_style(dataloader):
            loader = self._prepare(dataloader, shuffle=shuffle, mode=mode)
            return loader if isinstance(loader, Stateful) else _Skipping(self, loader)
        spread = self._trainer._accelerator_connector.use_distributed_sampler
        own = hasattr(dataloader.sampler, "num_replicas")  # the script's own distributed sampler
        rank, world = self._trainer.global_rank, self._trainer.world_size
        if not (spread or own):
            rank, world = 0, 1  # each rank has its own data
        number, seed = self._number(), RunSettings.from_env(os.environ).seed
        known = self._global_batches[number] if number < len(self._global_batches) else None
        loader, batches, order = rebuild(dataloader, rng.mix(seed, number), known, rank, world)
        self._global_batches[number:] = [order.batch]
        self.batch = order.batch // world
        return _Placed(self, loader, batches)

    def _number(self) -> int:
        """Return this loader's index among the loaders that Lightning prepares together."""
        setup = self._trainer.fit_loop.epoch_progress.current.ready
        self._loaders = self._loaders + 1 if setup == self._setup else 0
        self._setup = setup
        return self._loaders

    @property
    def place(self) -> tuple[int, int]:
        """The current epoch and the number of its finished batches. Correct only in a loader's ``__iter__``."""
        epochs = self._trainer.fit_loop.epoch_progress.current
        under_way = epochs.ready > epochs.processed
        return epochs.processed, self._loop.batch_progress.current.completed if under_way else 0


class _Placed:
    """A rebuilt loader that starts at the trainer's place. It needs no state: Lightning saves the counts of batches."""

    def __init__(self, state: _LightningState, loader: Any, batches: Any) -> None:
        self._state, self._loader, self._batches = state, loader, batches

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        epoch, done = self._state.place
        self._batches.epoch, self._batches.start = epoch, done % len(self._batches)
        return iter(self._loader)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing: Lightning's own counts tell where the data continues."""


class _Skipping:
    """A loader that can start only at its beginning: finished batches are read again and skipped."""

    def __init__(self, state: _LightningState, loader: Any) -> None:
        self._state, self._loader = state, loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        _, done = self._state.place
        return islice(iter(self._loader), done, None)


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        one[name] is other[name] or _at(one[name]) == _at(other[name]) for name in one
    )


def _at(value: Any) -> object:
    return value.data_ptr() if hasattr(value, "data_ptr") else value


def _total(trainer: Any) -> int | None:
    if trainer.max_steps != -1:
        return int(trainer.max_steps)
    batches, epochs = trainer.num_training_batches, trainer.max_epochs
    if not epochs or epochs < 0 or not batches or math.isinf(batches):
        return None
    return int(math.ceil(batches / trainer.accumulate_grad_batches) * epochs)
