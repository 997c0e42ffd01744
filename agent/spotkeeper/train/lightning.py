"""Lightning: ``Trainer(callbacks=[SpotkeeperCallback()])`` makes a run of ``trainer.fit()``.

Its state is all that Lightning itself puts into a checkpoint (``dump_checkpoint``), beside what
``attach()`` keeps of every run. Train loaders are rebuilt over the sampler of ``run.steps()``,
so Lightning's counts of batches name a place in the data.

A *save point* is where the trainer has stepped and nothing is half done: at the start of
the next batch, or of a validation in between. A resumed trainer comes to the same hook with the
same batch in hand. Only there its random state is put back, for Lightning draws on the way.
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

from spotkeeper.train import rng
from spotkeeper.train.errors import AttachError, CallError
from spotkeeper.train.parts import Stateful
from spotkeeper.train.run import Run, attach
from spotkeeper.train.sampler import is_map_style, rebuild
from spotkeeper.train.settings import Settings
from spotkeeper.train.ticks import Ticks, check_world

# One library in two distributions, whose classes do not know each other: of the one that the script has imported.
if "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
    from pytorch_lightning import Callback
else:
    from lightning.pytorch import Callback

_HOW = 'Trainer(strategy="ddp", devices=<processes of a node>, num_nodes=<nodes>); torchrun has set LOCAL_WORLD_SIZE '
_HOW += "and GROUP_WORLD_SIZE"


class Point(Enum):
    """Where the trainer is when its state is taken."""

    BATCH = 0  # the next batch is in hand, nothing of it is done
    VALIDATION = 1  # a validation is about to begin
    END = 2  # all is done


class SpotkeeperCallback(Callback):  # type: ignore[misc]
    """Makes ``trainer.fit()`` survive preemption: saves, restores, stops in order. One ``fit`` in a script.

    ``fit(ckpt_path=...)`` counts in the first generation only. Told to stop, ``fit`` ends the process
    with ``SystemExit(0)``: what follows it runs at the end of the training only.
    """

    def __init__(self) -> None:
        self.run: Run | None = None
        self._ticks: Ticks | None = None
        self._state: _State | None = None
        self._stepped = 0  # the trainer's steps at the last save point
        self._on_sigterm: Any = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage != "fit":
            return
        if self.run is not None:
            raise CallError("one trainer.fit() in a script: the checkpoint could not say which one it is of")
        check_world(trainer.world_size, _HOW)
        if trainer.strategy.restore_checkpoint_after_setup:
            raise AttachError(
                f"{type(trainer.strategy).__name__} shards the model, which this callback cannot save; "
                'use strategy="ddp", or spotkeeper.attach() in a loop of your own'
            )
        self._state = _State(trainer)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Model and optimizers are where they will be, the loops have not begun: restore."""
        assert self._state is not None
        self.run = attach(trainer.strategy.model, list(trainer.optimizers), lightning=self._state)
        self._state.attached()
        self._on_sigterm = signal.getsignal(signal.SIGTERM)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._own_sigterm(trainer)
        self._begin(trainer)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._save_point(trainer, Point.BATCH)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if self._ticks is not None and not trainer.sanity_checking:
            self._save_point(trainer, Point.VALIDATION)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if self.run is not None and loss is not None:
            self.run.report(loss=loss)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self._ticks is not None and self._state is not None:
            self._state.point = Point.END
            self._ticks.end()

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        if self._ticks is None:  # all was done in an earlier generation
            self._begin(trainer)
            self.on_train_end(trainer, pl_module)

    def _begin(self, trainer: Any) -> None:
        assert self.run is not None and self._state is not None
        self._stepped = trainer.global_step
        batch = self._state.batch * trainer.accumulate_grad_batches
        self._ticks = Ticks(self.run, batch=batch, total=_total(trainer))

    def _save_point(self, trainer: Any, point: Point) -> None:
        assert self._ticks is not None and self._state is not None
        self._state.arrive()
        if trainer.global_step != self._stepped:
            self._stepped = trainer.global_step
            self._state.point = point
            self._ticks.tick()

    def _own_sigterm(self, trainer: Any) -> None:
        """Take back SIGTERM: Lightning's handler waits in it for all ranks, which hangs where not all get one."""
        slurm = type(getattr(trainer.strategy, "cluster_environment", None)).__name__ == "SLURMEnvironment"
        if threading.current_thread() is threading.main_thread() and not slurm:
            signal.signal(signal.SIGTERM, self._on_sigterm)


class _State:
    """The trainer's own state, as a part of the run's: ``dump_checkpoint()`` without what the run keeps itself."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._connector = trainer._checkpoint_connector
        self._loop = trainer.fit_loop.epoch_loop
        self._restored: int | None = None  # its count of steps for loggers
        self._random: dict[str, Any] | None = None
        self.batch = 1  # samples of a batch of this rank
        self.point = Point.END
        self._global_batches: list[int] = []
        self._setup, self._loaders = -1, 0
        self._prepare = trainer._data_connector._prepare_dataloader
        trainer._data_connector._prepare_dataloader = self._prepare_loader

    # ------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        whole: dict[str, Any] = self._connector.dump_checkpoint(False)
        del whole["optimizer_states"]
        if _same(whole["state_dict"], self._weights()):
            del whole["state_dict"]  # else a callback keeps other weights there, such as an average
        self._tidy(whole["loops"]["fit_loop"])
        return {"checkpoint": whole, "batches": self._global_batches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """As Lightning restores, in its order; model and optimizers have their state already."""
        connector = self._connector
        whole = {"state_dict": self._weights()} | state["checkpoint"]
        self._global_batches = state["batches"]
        connector._loaded_checkpoint = whole
        connector.restore_model()
        connector.restore_datamodule()
        connector.restore_callbacks()
        connector.restore_precision_plugin_state()
        connector.restore_loops()
        connector.restore_lr_schedulers()
        connector._loaded_checkpoint = {}  # that of fit(ckpt_path=) too: it is older
        self._restored = self._loop._batches_that_stepped

    def _weights(self) -> dict[str, Any]:
        weights: dict[str, Any] = self._trainer.strategy.lightning_module_state_dict()
        return weights

    def _tidy(self, loops: dict[str, Any]) -> None:
        """The counts as they are between two batches: the hooks of save points run when the next count has begun."""
        if self.point is Point.BATCH:
            batches = loops["epoch_loop.batch_progress"]
            batches["is_last_batch"] = False
            for count in (batches["total"], batches["current"]):
                count["ready"] = count["completed"]
        elif self.point is Point.VALIDATION:  # as if its first batch had begun: then Lightning does it anew
            batches = loops["epoch_loop.val_loop.batch_progress"]
            batches["is_last_batch"] = False
            batches["current"] = {"ready": 1, "started": 1, "processed": 0, "completed": 0}
            done = batches["total"]["completed"]
            batches["total"] = {"ready": done + 1, "started": done + 1, "processed": done, "completed": done}

    # ------------------------------------------------------------ resuming

    def attached(self) -> None:
        """The run is there, and what it restored is loaded."""
        if self._restored is not None:
            self._random = rng.capture()
            self._trainer.fit_loop._combined_loader = None  # who asked for the number of steps has made iterators
            self._setup = -1

    def arrive(self) -> None:
        """At a save point: the first one of a resumed run is where it was saved."""
        if self._random is not None:
            rng.restore(self._random)
            self._loop._batches_that_stepped = self._restored
            self._trainer.fit_loop._restarting = False  # else this epoch's end leaves out schedulers with a monitor
            self._random = None

    # ------------------------------------------------------------ data

    def _prepare_loader(self, dataloader: Any, shuffle: bool, mode: Any) -> Any:
        """In place of Lightning's own, which adds a distributed sampler: so do we, to the loaders we rebuild."""
        if getattr(mode, "value", mode) != "train":
            return self._prepare(dataloader, shuffle=shuffle, mode=mode)
        if not is_map_style(dataloader):
            loader = self._prepare(dataloader, shuffle=shuffle, mode=mode)
            return loader if isinstance(loader, Stateful) else _Skipping(self, loader)
        spread = self._trainer._accelerator_connector.use_distributed_sampler
        own = hasattr(dataloader.sampler, "num_replicas")  # the script's own distributed sampler
        rank, world = self._trainer.global_rank, self._trainer.world_size
        if not (spread or own):
            rank, world = 0, 1  # each rank has data of its own
        number, seed = self._number(), Settings.from_env(os.environ).seed
        known = self._global_batches[number] if number < len(self._global_batches) else None
        loader, batches, order = rebuild(dataloader, rng.mix(seed, number), known, rank, world)
        self._global_batches[number:] = [order.batch]
        self.batch = order.batch // world
        return _Placed(self, loader, batches)

    def _number(self) -> int:
        """Of this loader among those that are made ready together."""
        setup = self._trainer.fit_loop.epoch_progress.current.ready
        self._loaders = self._loaders + 1 if setup == self._setup else 0
        self._setup = setup
        return self._loaders

    @property
    def place(self) -> tuple[int, int]:
        """(epoch, batches of it that are done), when an iterator is made."""
        epochs = self._trainer.fit_loop.epoch_progress.current
        under_way = epochs.ready > epochs.processed
        return epochs.processed, self._loop.batch_progress.current.completed if under_way else 0


class _Placed:
    """A rebuilt loader that begins where the trainer is. Lightning asks for a state; its own counts have it."""

    def __init__(self, state: _State, loader: Any, batches: Any) -> None:
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
        """Nothing: see above."""


class _Skipping:
    """A loader that only knows how to begin: what is done is read again, and left out."""

    def __init__(self, state: _State, loader: Any) -> None:
        self._state, self._loader = state, loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        _, done = self._state.place
        return islice(iter(self._loader), done, None)


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether these are the same tensors."""
    return one.keys() == other.keys() and all(
        one[name] is other[name] or _at(one[name]) == _at(other[name]) for name in one
    )


def _at(value: Any) -> object:
    return value.data_ptr() if hasattr(value, "data_ptr") else value


def _total(trainer: Any) -> int | None:
    """Optimizer steps of the whole fit, where that is known."""
    if trainer.max_steps != -1:
        return int(trainer.max_steps)
    batches, epochs = trainer.num_training_batches, trainer.max_epochs
    if not epochs or epochs < 0 or not batches or math.isinf(batches):
        return None
    return int(math.ceil(batches / trainer.accumulate_grad_batches) * epochs)
