"""Data in an order that depends neither on the world's size nor on preemptions.

The position in the data is one integer: samples consumed by all ranks together. Epoch e
visits a permutation that follows from (seed, e) alone; every global batch is the next
stretch of it, and each rank takes its slice or its micro-batches of each (see ``micro``). So
any rank can go on anywhere, and the last batch of an epoch is filled up from the epoch's
beginning (or dropped, as the loader says).

``rebuild`` puts this under a loader that the user has made, keeping all else of it.
"""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from spotkeeper.train import rng
from spotkeeper.train.errors import DataError
from spotkeeper.train.micro import Micro, even, turns

_ORDER, _SAMPLE = 1, 2  # what a seed is for


@dataclass(frozen=True)
class Order:
    """The order of samples of one data set.

    ``size``: samples an epoch visits before it is filled up. ``sampler``: lists an epoch's
    indices in its own way, under our seed; None for ``shuffle`` or plain order.
    """

    size: int
    batch: int  # samples of all ranks together
    seed: int
    shuffle: bool = False
    drop_last: bool = False
    sampler: Iterable[int] | None = None

    @property
    def batches(self) -> int:
        """Global batches of an epoch."""
        return self.size // self.batch if self.drop_last else -(-self.size // self.batch)

    def epoch(self, epoch: int) -> Sequence[int]:
        """The indices of one epoch, before filling up."""
        if self.sampler is not None:
            return _listed(self.sampler, rng.mix(self.seed, epoch, _ORDER))
        if not self.shuffle:
            return range(self.size)
        generator = torch.Generator().manual_seed(rng.mix(self.seed, epoch, _ORDER))
        order: list[int] = torch.randperm(self.size, generator=generator).tolist()
        return order


class Batches(Sampler[Any]):  # type: ignore[misc]
    """This rank's batches of one epoch from a position on: lists of (seed, index) pairs.

    ``micro``: samples of a micro-batch, where the world may change; None: one slice for each rank.
    ``costs``: seconds a sample of each rank, where micro-batches go by speed.
    ``turns``: what it yields for each global batch.
    """

    def __init__(
        self,
        order: Order,
        rank: int,
        world: int,
        *,
        micro: int | None = None,
        costs: tuple[float, ...] = (),
        single: bool = False,
    ) -> None:
        if micro is None and order.batch % world:
            raise DataError(
                f"the global batch of {order.batch} samples does not divide over {world} ranks; choose a batch size "
                "that does, or a number of nodes that divides it, or give attach() a global_batch and write "
                "run.backward(loss) and run.step()"
            )
        self._order, self._single = order, single
        self.turns = even(order.batch, rank, world) if micro is None else turns(order.batch, micro, rank, world, costs)
        self.epoch = 0
        self.start = 0

    def __len__(self) -> int:
        return self._order.batches * len(self.turns)

    def __iter__(self) -> Iterator[Any]:
        indices = self._order.epoch(self.epoch)
        for number in range(self.start, self._order.batches):
            for turn in self.turns:
                places = [number * self._order.batch + place for place in turn.places]
                pairs = [(self._seed(place), indices[place % len(indices)]) for place in places]
                yield pairs[0] if self._single else pairs

    def _seed(self, place: int) -> int:
        return rng.mix(self._order.seed, self.epoch, place, _SAMPLE)


class Seeded(Dataset[Any]):  # type: ignore[misc]
    """A data set whose samples draw random numbers by their place, not by who draws them when."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)  # worker_init_fn and collate_fn see what they know

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, pair: tuple[int, Any]) -> Any:
        return self.__getitems__([pair])[0]

    def __getitems__(self, pairs: list[tuple[int, Any]]) -> list[Any]:
        """One batch. In the training process its own random state is left as it was."""
        alone = torch.utils.data.get_worker_info() is None
        before = rng.capture(devices=False) if alone else None
        try:
            if hasattr(self.dataset, "__getitems__"):
                _seed(pairs[0][0])
                items: list[Any] = self.dataset.__getitems__([index for _, index in pairs])
                return items
            return [self._one(seed, index) for seed, index in pairs]
        finally:
            if before is not None:
                rng.restore(before)

    def _one(self, seed: int, index: Any) -> Any:
        _seed(seed)
        return self.dataset[index]


def _seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)  # the CPU's only: 8 us, where torch.manual_seed visits devices
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed & 0xFFFFFFFF)


def rebuild(
    loader: DataLoader[Any], seed: int, batch: int | None, rank: int, world: int, micro: Micro | None = None
) -> tuple[Any, Batches, Order]:
    """The same loader over our batches.

    Args:
        loader: map-style, with a batch size or without automatic batching.
        batch: the global batch of the run so far; None for a new one (batch size x world).
        micro: the world may change: the loader's batches are micro-batches.

    Raises:
        DataError: its order cannot be kept.
    """
    _check(loader)
    single = loader.batch_size is None
    local = 1 if loader.batch_size is None else loader.batch_size
    wanted = local * world if micro is None else micro.batch_of(local)
    order = _order(loader, seed, batch or wanted)
    costs = () if micro is None else micro.costs
    batches = Batches(order, rank, world, micro=None if micro is None else local, costs=costs, single=single)
    if batch is not None and batch != wanted and (micro is None or micro.batch is not None):
        what = f"attach() says {wanted}" if micro else f"the loader says {local} a rank"
        each = "" if micro else f" ({batch // world} a rank)"
        warnings.warn(
            f"the run began with a global batch of {batch}; it goes on with it{each}, although {what}", stacklevel=4
        )
    names = ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context")
    kept = {name: getattr(loader, name) for name in (*names, "persistent_workers", "in_order") if hasattr(loader, name)}
    if loader.num_workers:
        kept["prefetch_factor"] = loader.prefetch_factor
    if micro is not None and "in_order" in kept:
        kept["in_order"] = True  # a batch is known by its place
    # A generator of its own: making an iterator draws a seed, otherwise from the training's random state.
    kept["generator"] = torch.Generator().manual_seed(rng.mix(seed, rank))
    if single:
        return DataLoader(Seeded(loader.dataset), batch_size=None, sampler=batches, **kept), batches, order
    return DataLoader(Seeded(loader.dataset), batch_sampler=batches, **kept), batches, order


def _check(loader: DataLoader[Any]) -> None:
    if type(loader).__iter__ is not DataLoader.__iter__ and not hasattr(loader, "state_dict"):
        raise DataError(f"{type(loader).__name__} iterates in its own way; give run.steps() a plain DataLoader")
    batch_sampler = loader.batch_sampler
    if batch_sampler is not None and not _is(batch_sampler, BatchSampler):
        raise DataError(
            f"the loader has a batch sampler of its own ({type(batch_sampler).__name__}), so a place in its data "
            "cannot be found again; give the loader a sampler and a batch_size instead"
        )


def _is(part: object, kind: type) -> bool:
    """Exactly one of these, or torchdata's own of the same name (a StatefulDataLoader makes such)."""
    own = type(part).__module__.startswith("torchdata.") and type(part).__name__ == kind.__name__
    return type(part) is kind or own


def _order(loader: DataLoader[Any], seed: int, batch: int) -> Order:
    sampler = loader.sampler
    size = len(loader.dataset)
    common: dict[str, Any] = {"batch": batch, "seed": seed, "drop_last": bool(loader.drop_last)}
    if type(sampler) is SequentialSampler:
        return _sized(size, **common)
    if type(sampler) is DistributedSampler:
        return _sized(size, shuffle=sampler.shuffle, **(common | {"drop_last": loader.drop_last or sampler.drop_last}))
    if _is(sampler, RandomSampler) and not sampler.replacement and len(sampler) == size:
        return _sized(size, shuffle=True, **common)
    if hasattr(sampler, "num_replicas"):
        raise DataError(
            f"{type(sampler).__name__} gives each rank its own part, which would change with the number of ranks; "
            "give the loader a sampler over the whole data set: run.steps() divides the batches"
        )
    try:
        size = len(sampler)
    except TypeError:
        raise DataError(f"{type(sampler).__name__} has no length; a place in endless data cannot be kept") from None
    return _sized(size, sampler=sampler, **common)


def _sized(size: int, **rest: Any) -> Order:
    order = Order(size, **rest)
    if order.batches == 0:
        raise DataError(f"{size} samples make no global batch of {order.batch}; the data set is too small or empty")
    return order


def _listed(sampler: Iterable[int], seed: int) -> list[int]:
    """All indices of any finite sampler, drawn under ``seed``; random state stays as it was."""
    before = rng.capture()
    own = getattr(sampler, "generator", None)
    own_before = own.get_state() if isinstance(own, torch.Generator) else None
    try:
        rng.seed_all(seed)
        if isinstance(own, torch.Generator):
            own.manual_seed(seed)
        return list(sampler)
    finally:
        rng.restore(before)
        if isinstance(own, torch.Generator) and own_before is not None:
            own.set_state(own_before)


def is_map_style(loader: object) -> bool:
    return isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
