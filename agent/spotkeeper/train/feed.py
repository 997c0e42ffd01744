"""Where a run is in its data, and the batches from there on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Protocol

from torch.utils.data import DataLoader

from spotkeeper.train import rng
from spotkeeper.train.errors import DataError
from spotkeeper.train.gang import Gang
from spotkeeper.train.micro import Micro, Turn
from spotkeeper.train.parts import Stateful
from spotkeeper.train.sampler import is_map_style, rebuild
from spotkeeper.train.writer import say


@dataclass(frozen=True)
class Position:
    """Of the whole gang. ``consumed`` is the truth for map-style data, ``epoch`` and ``number`` for any other.

    ``loop``: which call of ``steps()`` this is about, counted from 0; earlier ones are over.
    """

    loop: int = 0
    consumed: int = 0  # samples, by all ranks, in this loop
    batch: int = 0  # samples of all ranks in one batch; 0 until known
    epoch: int = 0
    number: int = 0  # batches done in this epoch

    def next(self) -> Position:
        return replace(self, consumed=self.consumed + self.batch, number=self.number + 1)


class Feed(Protocol):
    """One loop's data. ``position`` is after the global batch that was yielded last, once it is done."""

    position: Position
    turn: Turn  # of the batch that was yielded last
    epoch_batches: int | None  # global batches of an epoch, where known

    def batches(self, epochs: int | None) -> Iterator[Any]:
        """From the position on; ``done`` is called between."""

    def done(self) -> None:
        """The global batch whose last batch was yielded has been trained on."""

    def local(self) -> dict[str, Any]:
        """This rank's own part of the position."""


def open_feed(
    loader: Iterable[Any],
    position: Position,
    local: dict[str, Any] | None,
    gang: Gang,
    seed: int,
    micro: Micro | None = None,
) -> Feed:
    """The data of a loop, from ``position`` on.

    Args:
        micro: the world may change: batches are micro-batches, of which ranks may have different numbers.
        local: what ``Feed.local`` of this rank gave, in a resumed run with as many ranks; else None.

    Raises:
        DataError: the position cannot be found again in such a loader.
    """
    if is_map_style(loader):
        assert isinstance(loader, DataLoader)
        return _Mapped(loader, position, gang, seed, micro)
    if micro is not None:
        raise DataError(
            f"{type(loader).__name__} has no indices to divide among ranks whose number may change; "
            "use a map-style data set, or submit it under another name with one number of nodes and no global_batch"
        )
    return _Iterated(loader, position, local, gang)


class _Mapped:
    """A DataLoader with indices: rebuilt over our sampler."""

    def __init__(self, loader: DataLoader[Any], position: Position, gang: Gang, seed: int, micro: Micro | None) -> None:
        seed = rng.mix(seed, position.loop)
        batch = position.batch or None
        self._loader, self._sampler, order = rebuild(loader, seed, batch, gang.rank, gang.world, micro)
        self.turn = self._sampler.turns[0]
        self.epoch_batches: int | None = order.batches
        epoch, number = divmod(position.consumed // order.batch, order.batches)
        self.position = replace(position, batch=order.batch, epoch=epoch, number=number)

    def batches(self, epochs: int | None) -> Iterator[Any]:
        while epochs is None or self.position.epoch < epochs:
            self._sampler.epoch, self._sampler.start = self.position.epoch, self.position.number
            turns = self._sampler.turns
            for count, batch in enumerate(self._loader):
                self.turn = turns[count % len(turns)]
                yield batch

    def done(self) -> None:
        self.position = self.position.next()
        if self.position.number == self.epoch_batches:
            self.position = replace(self.position, epoch=self.position.epoch + 1, number=0)

    def local(self) -> dict[str, Any]:
        return {}


class _Iterated:
    """Anything else that can be iterated: its own state where it has one, else batches are skipped."""

    def __init__(self, loader: Iterable[Any], position: Position, local: dict[str, Any] | None, gang: Gang) -> None:
        if isinstance(loader, Iterator):
            raise DataError(
                f"{type(loader).__name__} can be iterated only once, so a place in it cannot be found again; "
                "give run.steps() the loader itself"
            )
        self._loader = loader
        size = getattr(loader, "batch_size", None) or 1
        self.epoch_batches = len(loader) if isinstance(loader, Sized) and not isinstance(loader, DataLoader) else None
        self.position = replace(position, batch=size * gang.world)
        self.turn = Turn(gang.rank, range(gang.rank * size, (gang.rank + 1) * size), size, last=True)
        self._resume: dict[str, Any] | None = None
        self._before: dict[str, Any] = {}
        if not position.number:
            return
        if local is None:
            raise DataError(
                "the number of ranks has changed, and this loader has no indices to divide anew; "
                "use a map-style data set, or keep the number of ranks"
            )
        self._resume = local

    def batches(self, epochs: int | None) -> Iterator[Any]:
        while epochs is None or self.position.epoch < epochs:
            yield from self._epoch()
            self.position = replace(self.position, epoch=self.position.epoch + 1, number=0)

    def _epoch(self) -> Iterator[Any]:
        resume, self._resume = self._resume, None
        if resume is None:
            self._before = rng.capture(devices=False)
            return iter(self._loader)
        self._before = resume["before"]
        own = self._own_state()
        now = rng.capture(devices=False)
        if own is not None and resume["own"] is not None:
            own.load_state_dict(resume["own"])
            iterator = iter(self._loader)
            rng.restore(now)  # an iterator draws a seed when it is made: the run left alone made this one long ago
            return iterator
        say(f"skipping {self.position.number} batches: the loader has no state_dict() to resume from")
        rng.restore(self._before)  # so that whatever the loader draws for its order is drawn again
        iterator = iter(self._loader)
        for _ in islice(iterator, self.position.number):
            pass
        rng.restore(now)
        return iterator

    def done(self) -> None:
        self.position = self.position.next()

    def local(self) -> dict[str, Any]:
        own = self._own_state()
        return {"before": self._before, "own": None if own is None else own.state_dict()}

    def _own_state(self) -> Stateful | None:
        """The loader's, or its data set's where no worker has a copy of it."""
        if isinstance(self._loader, Stateful):
            return self._loader
        dataset = getattr(self._loader, "dataset", None)
        return dataset if isinstance(dataset, Stateful) and not getattr(self._loader, "num_workers", 0) else None
