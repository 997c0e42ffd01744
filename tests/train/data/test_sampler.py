"""The order of samples: the same for any number of ranks, from any position, with any workers."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy
import pytest
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
    TensorDataset,
    WeightedRandomSampler,
)

from spotkeeper.train.core import rng
from spotkeeper.train.core.errors import DataError
from spotkeeper.train.core.gang import SoloGang
from spotkeeper.train.data.feed import DataPosition, open_feed
from spotkeeper.train.data.sampler import RankBatches, SampleOrder, SeededDataset, rebuild


class Noise(Dataset[tuple[int, float, float]]):
    """What a sample draws from torch, Python and numpy."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> tuple[int, float, float]:
        return index, float(torch.rand(())), random.random() + float(numpy.random.rand())  # noqa: S311


def seats(world: int, order: SampleOrder, *, start: int = 0, epoch: int = 0) -> list[list[int]]:
    """Global batches, put together from every rank's slice."""
    ranks = []
    for rank in range(world):
        batches = RankBatches(order, rank, world)
        batches.start, batches.epoch = start, epoch
        ranks.append([batch.indices for batch in batches])
    return [[*chain(*slices)] for slices in zip(*ranks, strict=True)]


@pytest.mark.parametrize("world", [2, 3, 4, 6, 12])
def test_the_order_does_not_depend_on_the_number_of_ranks(world: int) -> None:
    order = SampleOrder(50, 12, seed=3, shuffle=True)
    assert seats(world, order) == seats(1, order)


def test_each_epoch_visits_all_in_an_order_of_its_own() -> None:
    order = SampleOrder(48, 12, seed=3, shuffle=True)
    first, second = ([*chain(*seats(3, order, epoch=epoch))] for epoch in (0, 1))
    assert sorted(first) == sorted(second) == list(range(48))
    assert first != second
    assert [*chain(*seats(1, SampleOrder(48, 12, seed=4, shuffle=True)))] != first


def test_the_last_batch_is_filled_up_or_dropped() -> None:
    assert seats(2, SampleOrder(10, 4, seed=0)) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 1]]
    assert seats(2, SampleOrder(10, 4, seed=0, drop_last=True)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert seats(2, SampleOrder(3, 8, seed=0)) == [[0, 1, 2, 0, 1, 2, 0, 1]]


@pytest.mark.parametrize("start", range(6))
def test_the_order_continues_from_any_position(start: int) -> None:
    order = SampleOrder(50, 10, seed=1, shuffle=True)
    assert seats(2, order, start=start) == seats(5, order)[start:]


def test_a_batch_that_does_not_divide_is_refused() -> None:
    with pytest.raises(DataError, match="global batch of 8 samples does not divide over 3 ranks"):
        RankBatches(SampleOrder(10, 8, seed=0), 0, 3)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("epoch_start", [(0, 0), (1, 2)])
def test_random_draws_of_samples_depend_on_their_place(workers: int, epoch_start: tuple[int, int]) -> None:
    """Augmentation does not depend on the worker that loads a sample or on the samples loaded before it."""
    loader = DataLoader(Noise(), 4, shuffle=True, num_workers=workers)
    rebuilt, batches, _ = rebuild(loader, 7, None, 0, 1)
    batches.epoch, batches.start = epoch_start
    whole, whole_batches, _ = rebuild(DataLoader(Noise(), 4, shuffle=True), 7, None, 0, 1)
    whole_batches.epoch = epoch_start[0]
    expected = [[part.tolist() for part in batch] for batch in whole][epoch_start[1] :]
    torch.manual_seed(99)
    assert [[part.tolist() for part in batch] for batch in rebuilt] == expected


@pytest.mark.parametrize("workers", [0, 2])
def test_loading_does_not_change_the_trainings_random_state(workers: int) -> None:
    rebuilt, _, _ = rebuild(DataLoader(Noise(), 4, shuffle=True, num_workers=workers), 7, None, 0, 1)
    numpy.random.seed(3)
    before = [torch.get_rng_state().tolist(), random.getstate(), numpy.random.get_state()[1].tolist()]
    assert len(list(rebuilt)) == 5
    assert [torch.get_rng_state().tolist(), random.getstate(), numpy.random.get_state()[1].tolist()] == before


def test_the_loaders_other_settings_are_kept() -> None:
    def collate(items: list[Any]) -> list[Any]:
        return ["mine", *items]

    def init(worker: int) -> None:
        pass

    loader = DataLoader(
        Noise(), 4, num_workers=1, collate_fn=collate, prefetch_factor=3, persistent_workers=True, timeout=9.0,
        worker_init_fn=init, multiprocessing_context="fork",
    )  # fmt: skip
    rebuilt, _, _ = rebuild(loader, 0, None, 0, 1)
    assert (rebuilt.num_workers, rebuilt.prefetch_factor, rebuilt.persistent_workers) == (1, 3, True)
    assert (rebuilt.timeout, rebuilt.collate_fn, rebuilt.worker_init_fn) == (9.0, collate, init)
    assert rebuilt.multiprocessing_context is loader.multiprocessing_context is not None
    assert next(iter(rebuilt))[0] == "mine"
    assert len(rebuilt) == 5


def test_samplers_of_all_kinds() -> None:
    data = Noise()
    generator = torch.Generator().manual_seed(5)
    kinds: dict[str, Any] = {
        "plain": SequentialSampler(data),
        "random": RandomSampler(data),
        "some": RandomSampler(data, num_samples=8),
        "weighted": WeightedRandomSampler([1.0] * 19 + [100.0], 20, generator=generator),
        "distributed": DistributedSampler(data, num_replicas=4, rank=2, shuffle=True),
    }
    before, own = torch.get_rng_state().tolist(), generator.get_state().tolist()
    orders = {}
    for name, sampler in kinds.items():
        _, batches, order = rebuild(DataLoader(data, 4, sampler=sampler), 3, None, 0, 1)
        orders[name] = [index for batch in batches for index in batch.indices]
        assert orders[name] == [index for batch in batches for index in batch.indices], "the same again"
        assert order.batches == (2 if name == "some" else 5)
    assert orders["plain"] == list(range(20))
    assert orders["random"] == orders["distributed"] != orders["plain"], "a rank's part is ours to give"
    assert sorted(orders["random"]) == list(range(20))
    assert orders["weighted"].count(19) > 10
    assert (torch.get_rng_state().tolist(), generator.get_state().tolist()) == (before, own)


class Seed(Sampler[int]):
    """Draws nothing: its one index is the seed that its generator gets."""

    def __init__(self) -> None:
        self.generator = torch.Generator()

    def __iter__(self) -> Iterator[int]:
        return iter([self.generator.initial_seed()])


def test_a_runs_seeds_are_the_same_in_every_version() -> None:
    """A run that continued with a newer library would see some samples twice in an epoch, and others never."""
    seeds = [4700158633028311966, 5842971948457200900]
    assert [list(SampleOrder(8, 4, seed=3, sampler=Seed()).epoch(epoch)) for epoch in (0, 1)] == [[s] for s in seeds]
    order = SampleOrder(8, 4, seed=3, shuffle=True)
    assert [order.epoch(epoch) for epoch in (0, 1)] == [
        torch.randperm(8, generator=torch.Generator().manual_seed(seed)).tolist() for seed in seeds
    ]
    batches = RankBatches(order, 0, 1, micro=2)
    batches.epoch = batches.start = 1
    assert [batch.seed for batch in batches] == [4637356303580638400, 8332984345944258854], "of the samples' own draws"


@pytest.mark.parametrize(
    ("batch", "told"),
    [
        (None, []),
        (8, []),
        (
            16,
            [
                "the run began with 16 samples per global batch (8 per rank) and keeps this size, although the loader "
                "now gives 4 per rank"
            ],
        ),
    ],
)
def test_another_batch_size_than_the_runs_is_told(
    batch: int | None, told: list[str], recwarn: pytest.WarningsRecorder
) -> None:
    _, _, order = rebuild(DataLoader(TensorDataset(torch.arange(32)), 4), 0, batch, 0, 2)
    assert [str(one.message) for one in recwarn.list] == told
    assert order.batches == 32 // (batch or 8)


def test_loaders_without_automatic_batching() -> None:
    loader = DataLoader(TensorDataset(torch.arange(6)), batch_size=None, shuffle=False)
    rebuilt, batches, _ = rebuild(loader, 0, None, 1, 2)
    batches.start = 1
    assert [int(item[0]) for item in rebuilt] == [3, 5]


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10**9))


class NoLength:
    def __iter__(self) -> Iterator[int]:
        return iter(range(10**9))


class Own(DataLoader[Any]):
    def __iter__(self) -> Any:
        return iter([1])


class Parts(SequentialSampler):
    num_replicas = 4


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (
            lambda: DataLoader(Noise(), batch_sampler=type("Mine", (BatchSampler,), {})(range(20), 4, False)),
            "the loader has a custom batch sampler (Mine), so the run cannot find its place in the data again; give "
            "the loader a sampler and a batch_size instead",
        ),
        (lambda: Own(Noise(), 4), "Own has its own __iter__, so the run cannot rebuild it; use a DataLoader"),
        (
            lambda: DataLoader(Noise(), 4, sampler=Parts(Noise())),
            "Parts gives each rank a part that depends on the number of ranks; give the loader a sampler over the "
            "whole data set, because run.steps() divides the batches among the ranks",
        ),
        (
            lambda: DataLoader(Noise(), 4, sampler=NoLength()),
            "NoLength has no length, so the run cannot keep its place in it",
        ),
        (
            lambda: DataLoader(TensorDataset(torch.empty(0, 1)), 4),
            "0 samples are fewer than a global batch of 4: the data set is too small",
        ),
        (
            lambda: DataLoader(Noise(), 32, drop_last=True),
            "20 samples are fewer than a global batch of 32: the data set is too small",
        ),
        (
            lambda: iter([1, 2]),
            "list_iterator can be iterated only once, so a place in it cannot be found again; give run.steps() the "
            "loader itself",
        ),
    ],
)
def test_loaders_that_cannot_resume_are_refused_with_a_reason(loader: Any, message: str) -> None:
    with pytest.raises(DataError) as refused:
        open_feed(loader(), DataPosition(), None, SoloGang(), 0)
    assert str(refused.value) == message


# ---------------------------------------------------------------- data without indices


class Stream(IterableDataset[float]):
    """Draws as it goes, from the training's own random state."""

    def __iter__(self) -> Iterator[float]:
        for _ in range(10):
            yield float(torch.rand(()))


class Counting(IterableDataset[int]):
    """Knows where it is."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        while self.at < 10:
            self.at += 1
            yield self.at
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Counted(IterableDataset[int]):
    """Without a state."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(40))


def resume(make: Any, stop: int) -> tuple[list[Any], list[Any]]:
    """(all of two epochs left alone, the same with a restart after ``stop`` batches)."""
    torch.manual_seed(4)
    feed = open_feed(make(), DataPosition(), None, SoloGang(), 0)
    alone = []
    for batch in feed.batches(2):
        alone.append(batch)
        feed.done()
    torch.manual_seed(4)
    feed, got = open_feed(make(), DataPosition(), None, SoloGang(), 0), []
    for batch in feed.batches(2):
        got.append(batch)
        feed.done()
        if len(got) == stop:
            break
    saved, state = (feed.position, feed.local()), rng.capture()
    torch.manual_seed(1234)
    rng.restore(state)
    feed = open_feed(make(), *saved, SoloGang(), 0)
    for batch in feed.batches(2):
        got.append(batch)
        feed.done()
    return alone, got


@pytest.mark.parametrize("stop", [1, 4, 9, 10, 11, 19])
@pytest.mark.parametrize("make", [lambda: [*range(10)], Counting, lambda: DataLoader(Counting(), None), Stream])
def test_a_loader_without_indices_continues(make: Any, stop: int) -> None:
    alone, got = resume(make, stop)
    assert len(alone) == 20
    assert got == alone


def test_without_indices_the_number_of_ranks_is_fixed() -> None:
    with pytest.raises(DataError, match="number of ranks has changed"):
        open_feed(DataLoader(Endless(), 4), DataPosition(number=3), None, SoloGang(), 0)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("workers", [0, 1])
def test_a_stateful_loader_without_data_state_resumes_correctly(workers: int) -> None:
    """Its own count of what it has skipped is wrong from the second one on."""
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    position, local, got = DataPosition(), None, []
    for count in (3, 3, 2, 99):
        feed = open_feed(stateful(Counted(), 4, num_workers=workers), position, local, SoloGang(), 0)
        for taken, batch in enumerate(feed.batches(1), start=1):
            got += batch.tolist()
            feed.done()
            if taken == count:
                break
        position, local = feed.position, feed.local()
    assert got == list(range(40))


def test_a_seeded_dataset_is_copied_and_shows_what_the_users_own_has() -> None:
    """A copy asks for attributes before it has a data set."""
    users = Noise()
    users.path = "shards"  # type: ignore[attr-defined]
    again = copy.copy(SeededDataset(users))
    assert (again.dataset, again.path) == (users, "shards")
    with pytest.raises(AttributeError, match="__slots_of_others__"):
        getattr(again, "__slots_of_others__")  # noqa: B009
