"""The cut of a global batch: whole micro-batches, each once, evenly, in any world."""

from __future__ import annotations

import random
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as some

from spotkeeper.train.core.gang import SoloGang
from spotkeeper.train.core.microbatch import MicroBatch, MicroPlan, even, find_plan, micro_batches, shares
from spotkeeper.train.data.sampler import RankBatches, SampleOrder

COUNTS = {"batch": some.integers(1, 200), "micro": some.integers(1, 50), "world": some.integers(1, 40)}


@given(**COUNTS)
def test_every_sample_counts_once_whatever_the_world(batch: int, micro: int, world: int) -> None:
    ranks = [micro_batches(batch, micro, rank, world) for rank in range(world)]
    counted = [micro_batch for micro_batch in chain(*ranks) if micro_batch.samples]
    assert [*chain(*(micro_batch.places for micro_batch in counted))] == [*range(batch)]
    assert all(micro_batch.samples == len(micro_batch.places) for micro_batch in counted)
    # The cut is that of one rank: the same micro-batches, under the same numbers.
    assert {micro_batch.number: micro_batch.places for micro_batch in chain(*ranks)} == {
        micro_batch.number: micro_batch.places for micro_batch in micro_batches(batch, micro, 0, 1)
    }
    assert sum(micro_batch.scale(batch, world) for micro_batch in counted) == pytest.approx(world)


@given(**COUNTS)
def test_ranks_differ_by_at_most_one_micro_batch(batch: int, micro: int, world: int) -> None:
    ranks = [micro_batches(batch, micro, rank, world) for rank in range(world)]
    assert max(map(len, ranks)) - min(map(len, ranks)) <= 1
    for mine in ranks:
        assert [micro_batch.last for micro_batch in mine] == [False] * (len(mine) - 1) + [True]


def test_a_rank_without_a_micro_batch_gets_a_copy_of_weight_0() -> None:
    assert micro_batches(6, 3, 1, 4) == (MicroBatch(1, range(3, 6), 3, True),)
    assert micro_batches(6, 3, 3, 4) == (MicroBatch(1, range(3, 6), 0, True),)
    assert micro_batches(6, 3, 3, 4)[0].scale(6, 4) == 0.0


@pytest.mark.parametrize("world", [1, 3, 7, 49])
def test_one_micro_batch_per_rank_equals_plain_ddp(world: int) -> None:
    """Scaled by exactly 1.0, and the slices that a fixed world has."""
    for rank in range(world):
        (micro_batch,) = micro_batches(4 * world, 4, rank, world)
        assert micro_batch.scale(4 * world, world) == 1.0
        assert (micro_batch,) == even(4 * world, rank, world)


def test_the_global_batch_is_given_or_that_of_the_largest_world() -> None:
    assert MicroPlan(20, 4).batch_of(3) == 20
    assert MicroPlan(None, 4).batch_of(3) == 12


@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("start", [0, 2])
def test_micro_batches_hold_the_same_samples_in_every_world(world: int, start: int) -> None:
    order = SampleOrder(50, 14, seed=3, shuffle=True)
    whole = RankBatches(order, 0, 1)
    whole.start = start
    expected = [draw.indices for draw in whole]
    ranks = [RankBatches(order, rank, world, micro=4) for rank in range(world)]
    for batches in ranks:
        batches.start = start
    lists = [iter(batches) for batches in ranks]
    for pairs in expected:
        got = []
        for batches, own in zip(ranks, lists, strict=True):
            division = batches.division.of(0)
            parts = [next(own).indices for _ in division]
            got += [part for part, micro_batch in zip(parts, division, strict=True) if micro_batch.samples]
        assert [*chain(*got)] == pairs
    assert all(next(own, None) is None for own in lists)
    assert [len(batches) for batches in ranks] == [order.batches * len(batches.division.of(0)) for batches in ranks]


# -- machines of different speeds


@pytest.mark.parametrize(
    ("count", "costs", "plan"),
    [
        (5, (1.0, 1.0, 2.0), (2, 2, 1)),  # speeds 1, 1, 0.5
        (10, (1.0, 1.0, 2.0), (4, 4, 2)),
        (7, (1.0, 1.0, 2.0), (3, 3, 1)),
        (12, (1.0, 3.0), (9, 3)),
        (6, (1.0, 0.0, 2.0), (3, 2, 1)),  # the second is new: taken for the middle one
        (8, (0.0, 0.0, 0.0), (3, 3, 2)),
        (8, (1.0, 1.09, 1.0), (3, 3, 2)),  # noise
        (3, (1.0, 1.0, 50.0), (1, 1, 1)),  # its micro_batch would be a copy otherwise
        (2, (9.0, 1.0, 1.0), (1, 1, 0)),
    ],
)
def test_micro_batches_go_by_measured_speed(count: int, costs: tuple[float, ...], plan: tuple[int, ...]) -> None:
    assert shares(count, costs) == plan


def test_the_split_is_optimal() -> None:
    chance = random.Random(4)  # noqa: S311
    for _ in range(200):
        costs = tuple(chance.choice((1.0, 1.5, 2.0, 3.0)) for _ in range(3))
        count = chance.randrange(3, 12)
        done = max(n * cost for n, cost in zip(shares(count, costs), costs, strict=True))
        best = min(
            max(a * costs[0], b * costs[1], (count - a - b) * costs[2])
            for a in range(1, count - 1)
            for b in range(1, count - a)
        )
        assert done == best or max(costs) <= 1.1 * min(costs)


@pytest.mark.parametrize("costs", [(1.0, 1.0, 2.0), (4.0, 1.0, 2.0), (0.0, 1.0, 1.0)])
def test_the_global_batch_is_independent_of_the_split(costs: tuple[float, ...]) -> None:
    mine = [micro_batches(20, 3, rank, 3, costs) for rank in range(3)]
    places = [place for own in mine for micro_batch in own if micro_batch.samples for place in micro_batch.places]
    assert places == list(range(20))
    assert sum(micro_batch.scale(20, 3) for own in mine for micro_batch in own) == pytest.approx(3.0)
    assert all(own[-1].last and not any(micro_batch.last for micro_batch in own[:-1]) for own in mine)


def test_measured_times_are_exchanged() -> None:
    class Three(SoloGang):
        world = 3

        def gather(self, blob: bytes) -> list[bytes]:
            return [blob, b"[null, 3, 0.0]", b"[null, 3, 0.02]"]

    assert find_plan(Three(), None, 3, 0.01) == MicroPlan(None, 3, (0.01, 0.0, 0.02))


def test_one_sample_is_a_global_batch() -> None:
    assert find_plan(SoloGang(), 1, None) == MicroPlan(1, 1, (0.0,))
