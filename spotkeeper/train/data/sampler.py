"""An order of samples that depends neither on the number of ranks nor on preemptions.

The place in the data is one integer: samples consumed by all ranks together. Epoch e visits a permutation that depends
only on (seed, e). Each global batch is the next stretch of this permutation, and each rank takes its slice or its
micro-batches of the global batch (``microbatch.py``). So training can continue from any place on any number of ranks.
The last batch of an epoch is filled up from the epoch's beginning, or dropped if the loader has ``drop_last``.

``rebuild`` puts this order under the user's loader and keeps its other settings.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

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

from spotkeeper.train.core import rng
from spotkeeper.train.core.division import Division
from spotkeeper.train.core.errors import DataError
from spotkeeper.train.core.microbatch import MicroBatch, MicroPlan

_ORDER, _SAMPLE = 1, 2  # purposes of a seed


@dataclass(frozen=True)
class SampleOrder:
    """The order of one data set's samples."""

    size: int  # samples of an epoch, without those that fill up its last batch
    batch: int  # samples of a global batch
    seed: int
    shuffle: bool = False
    drop_last: bool = False
    sampler: Iterable[int] | None = None  # the loader's sampler, which lists an epoch's indices; None: use ``shuffle``

    @property
    def batches(self) -> int:
        """Number of global batches per epoch."""
        return self.size // self.batch if self.drop_last else -(-self.size // self.batch)

    def epoch(self, epoch: int) -> Sequence[int]:
        """Return the indices of one epoch, without those that fill up its last batch."""
        if self.sampler is not None:
            return _listed(self.sampler, rng.mix(self.seed, epoch, _ORDER))
        if not self.shuffle:
            return range(self.size)
        generator = torch.Generator().manual_seed(rng.mix(self.seed, epoch, _ORDER))
        order: list[int] = torch.randperm(self.size, generator=generator).tolist()
        return order


class SeededIndices(NamedTuple):
    """The request for one batch that a worker gets: the seed to set first, and the indices of the samples to load."""

    seed: int
    indices: list[Any]


class RankBatches(Sampler[SeededIndices]):  # type: ignore[misc]
    """This rank's batches of one epoch, starting at a position.

    Args:
        micro: samples of a micro-batch, if the number of ranks may change; None: one slice per rank.
        costs: seconds per sample of each rank.
        ahead: batches that the loader fetches before the loop asks for them.

    Attributes:
        division: this rank's batches of each global batch.
        epoch, start: the epoch, and the global batch in it, at which iteration begins.
    """

    def __init__(
        self,
        order: SampleOrder,
        rank: int,
        world: int,
        *,
        micro: int | None = None,
        costs: tuple[float, ...] = (),
        ahead: int = 0,
    ) -> None:
        if micro is None and order.batch % world:
            raise DataError(
                f"the global batch of {order.batch} samples does not divide over {world} ranks: choose another batch "
                "size or number of nodes, or give attach() a global_batch and call run.backward(loss) and run.step()"
            )
        self._order = order
        self.division = Division(order.batch, micro, rank, world, costs, ahead)
        self.epoch = 0
        self.start = 0

    def __len__(self) -> int:
        return sum(len(self.division.of(number)) for number in self._numbers(0))

    def __iter__(self) -> Iterator[SeededIndices]:
        indices = self._order.epoch(self.epoch)
        size, before = len(indices), self.epoch * self._order.batches
        for number in self._numbers(self.start):
            first = (number - before) * self._order.batch
            for micro_batch in self.division.begin(number):
                places = micro_batch.places
                start, stop = first + places.start, first + places.stop
                whole = stop <= size
                chosen = list(indices[start:stop]) if whole else [indices[at % size] for at in range(start, stop)]
                seed = rng.mix(self._order.seed, self.epoch, start, _SAMPLE)
                yield SeededIndices(seed, chosen)

    def micro_batches(self) -> Iterator[MicroBatch]:
        """Yield the micro-batches in the order in which iteration yields their indices."""
        for number in self._numbers(self.start):
            yield from self.division.of(number)

    def _numbers(self, start: int) -> range:
        """Return the epoch's global batches from ``start`` on, counted from the loop's beginning."""
        before = self.epoch * self._order.batches
        return range(before + start, before + self._order.batches)


class SeededDataset(Dataset[Any]):  # type: ignore[misc]
    """A data set that seeds random numbers by a batch's place in the run, whatever worker or rank loads the batch."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)  # for the user's worker_init_fn and collate_fn

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, draw: SeededIndices) -> Any:
        return self.__getitems__(draw)[0]

    def __getitems__(self, draw: SeededIndices) -> list[Any]:
        """Load one batch. In the training process the random state is restored afterwards."""
        if torch.utils.data.get_worker_info() is None:
            return rng.aside(draw.seed, self._items, draw.indices)
        rng.seed_cpu(draw.seed)
        return self._items(draw.indices)

    def _items(self, indices: list[Any]) -> list[Any]:
        dataset = self.dataset
        if hasattr(dataset, "__getitems__"):
            items: list[Any] = dataset.__getitems__(indices)
            return items
        return [dataset[index] for index in indices]


def rebuild(
    loader: DataLoader[Any], seed: int, batch: int | None, rank: int, world: int, plan: MicroPlan | None = None
) -> tuple[Any, RankBatches, SampleOrder]:
    """Rebuild a loader over this rank's batches.

    Args:
        loader: map-style, with a batch size or without automatic batching.
        batch: samples of the run's global batch. None in a new run: ``plan`` sets the number or, without a plan, it is
            the loader's batch size times the number of ranks.
        plan: how batches are cut, if the number of ranks may change.

    Returns:
        The new loader, its sampler, the order.

    Raises:
        DataError: the loader's order cannot be kept.
    """
    _check(loader)
    single = loader.batch_size is None
    local = 1 if loader.batch_size is None else loader.batch_size
    wanted = local * world if plan is None else plan.batch_of(local)
    order = _order(loader, seed, batch or wanted)
    costs = () if plan is None else plan.costs
    ahead = loader.num_workers * (loader.prefetch_factor or 0)
    batches = RankBatches(order, rank, world, micro=None if plan is None else local, costs=costs, ahead=ahead)
    if batch is not None and batch != wanted and (plan is None or plan.batch is not None):
        what = f"attach() now gives {wanted}" if plan else f"the loader now gives {local} per rank"
        each = "" if plan else f" ({batch // world} per rank)"
        size = f"{batch} samples per global batch{each}"
        warnings.warn(f"the run began with {size} and keeps this size, although {what}", stacklevel=4)
    names = ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context")
    kept = {name: getattr(loader, name) for name in (*names, "persistent_workers", "in_order") if hasattr(loader, name)}
    if loader.num_workers:
        kept["prefetch_factor"] = loader.prefetch_factor
    if plan is not None and "in_order" in kept:
        kept["in_order"] = True  # batches are identified by their order
    # Each new iterator draws a seed. It comes from this generator, so that the training's random state is unchanged.
    kept["generator"] = torch.Generator().manual_seed(rng.mix(seed, rank))
    if single:
        return DataLoader(SeededDataset(loader.dataset), batch_size=None, sampler=batches, **kept), batches, order
    return DataLoader(SeededDataset(loader.dataset), batch_sampler=batches, **kept), batches, order


def _check(loader: DataLoader[Any]) -> None:
    if type(loader).__iter__ is not DataLoader.__iter__ and not hasattr(loader, "state_dict"):
        raise DataError(f"{type(loader).__name__} has its own __iter__, so the run cannot rebuild it; use a DataLoader")
    batch_sampler = loader.batch_sampler
    if batch_sampler is not None and not _is(batch_sampler, BatchSampler):
        raise DataError(
            f"the loader has a custom batch sampler ({type(batch_sampler).__name__}), so the run cannot find its "
            "place in the data again; give the loader a sampler and a batch_size instead"
        )


def _is(part: object, kind: type) -> bool:
    """Whether ``part`` is of exactly the class ``kind``, or of the class that torchdata has under the same name."""
    own = type(part).__module__.startswith("torchdata.") and type(part).__name__ == kind.__name__
    return type(part) is kind or own


def _order(loader: DataLoader[Any], seed: int, batch: int) -> SampleOrder:
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
            f"{type(sampler).__name__} gives each rank a part that depends on the number of ranks; give the loader a "
            "sampler over the whole data set, because run.steps() divides the batches among the ranks"
        )
    try:
        size = len(sampler)
    except TypeError:
        raise DataError(f"{type(sampler).__name__} has no length, so the run cannot keep its place in it") from None
    return _sized(size, sampler=sampler, **common)


def _sized(size: int, **rest: Any) -> SampleOrder:
    order = SampleOrder(size, **rest)
    if order.batches == 0:
        raise DataError(f"{size} samples are fewer than a global batch of {order.batch}: the data set is too small")
    return order


def _listed(sampler: Iterable[int], seed: int) -> list[int]:
    """Return the indices of any finite sampler, drawn under ``seed``; the random state is restored afterwards."""
    before = rng.capture()
    own: Any = getattr(sampler, "generator", None)
    own_before = own.get_state() if isinstance(own, torch.Generator) else None
    try:
        rng.seed_all(seed)
        if own_before is not None:
            own.manual_seed(seed)
        return list(sampler)
    finally:
        rng.restore(before)
        if own_before is not None:
            own.set_state(own_before)


def is_map_style(loader: object) -> bool:
    return isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
