"""A run's position, saved with the attached objects: step, place in data, order in which gradients became ready."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from spotkeeper.train.checkpoint.strategy import ResumePoint
from spotkeeper.train.core import gradorder, rng
from spotkeeper.train.core.gang import Gang
from spotkeeper.train.core.pace import SavePace
from spotkeeper.train.core.parts import Attached
from spotkeeper.train.data.feed import DataPosition, Feed
from spotkeeper.train.loop.metrics import MetricHistory


@dataclass(frozen=True)
class EpochProgress:
    """Progress in the script's calls of ``epochs()``. Loops are calls of ``steps()``, counted over the whole run."""

    over: tuple[int, ...] = ()  # for each finished call of ``epochs()``: number of loops before its end
    epoch: int | None = None  # epoch of the running call; None: no call runs
    loops: int = 0  # number of loops before that epoch


class RunPosition:
    """All state of a run that is not an attached object."""

    def __init__(self, parts: Attached, gang: Gang, pace: SavePace, seed: int, metrics: MetricHistory) -> None:
        self._parts = parts
        self._metrics = metrics
        self._gang = gang
        self._pace = pace
        self._seed = seed
        self._orders: dict[str, gradorder.Recorder | gradorder.Replayed] = {}  # by name of the DDP module
        self.step = 0  # optimizer steps done
        self.data = DataPosition()  # at the end of the last loop, or where the next one resumes
        self.epochs = EpochProgress()
        self.feed: Feed | None = None  # data of the running loop
        self.loader_state: dict[str, Any] | None = None  # restored state, until a loop takes it
        self.stepped = False  # the optimizer has stepped on the current batch

    @property
    def place(self) -> DataPosition:
        """Place in the data at which to resume: after the current batch if its optimizer step is done, else before."""
        if self.feed is None:
            return self.data
        return self.feed.after() if self.stepped else self.feed.position

    @property
    def current_step(self) -> int:
        """The step that the script works on: in a loop the current batch's, done or not; elsewhere the last step."""
        return self.step if self.feed is None or self.stepped else self.step + 1

    @property
    def epoch(self) -> int:
        """Current epoch of ``epochs()`` if the script calls that, otherwise the epoch of the current batch."""
        data = self.data if self.feed is None else self.feed.position
        return data.epoch if self.epochs.epoch is None else self.epochs.epoch

    def begin(self) -> None:
        """Start at step 0."""
        self._orders = {name: gradorder.Recorder(ddp) for name, ddp in self._parts.ddps.items()}

    def load(self, found: ResumePoint) -> None:
        """Restore DDP's buckets, then the state, then the random state: each can change what the next one restores."""
        rest = found.rest
        for name, ddp in self._parts.ddps.items():
            order, synced = rest["orders"].get(name, ((), 0))
            if order:
                gradorder.replay(ddp, order, synced)
            self._orders[name] = gradorder.Replayed(order, synced) if order else gradorder.Recorder(ddp)
        self._parts.load(found.model, rest, found.local)
        self.step = rest["step"]
        self.data = DataPosition(**rest["data"])
        self.epochs = EpochProgress(**rest["epochs"])
        self.loader_state = found.local["loader"] if found.same_world else None
        self._pace.stalls.extend(rest["stalls"])
        self._metrics.restore(found.local.get("metrics", {}), found.manifest.commit)
        if found.same_world:
            rng.restore(found.local["rng"])
        else:
            rng.seed_all(self._seed, self.step, self._gang.rank)
            self._parts.reseed(self._seed, self.step, self._gang.rank)

    def count_step(self, *_: object) -> None:
        """Count an optimizer step. Registered as a hook of the optimizer."""
        self.step += 1
        self.stepped = True

    def end_step(self) -> None:
        """Note that a batch with an optimizer step has ended."""
        self.stepped = False
        for order in self._orders.values():
            order.stepped()

    def take_common(self) -> tuple[object, dict[str, object]]:
        model, rest = self._parts.take_common()
        rest |= {
            "step": self.step,
            "data": self.place._asdict(),
            "epochs": asdict(self.epochs),
            "orders": {name: (each.order, each.synced) for name, each in self._orders.items()},
            "stalls": list(self._pace.stalls),
        }
        return model, rest

    def optimizer_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._parts.optimizer_tensors()

    def take_local(self) -> dict[str, object]:
        loader = {} if self.feed is None else self.feed.local()
        return self._parts.take_local() | {"loader": loader, "metrics": self._metrics.take()}
