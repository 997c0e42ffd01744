"""The cut of a global batch: whole micro-batches, each once, evenly, in any world."""

from __future__ import annotations

from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as some
from spotkeeper.train.micro import Micro, Turn, even, turns
from spotkeeper.train.sampler import Batches, Order

COUNTS = {"batch": some.integers(1, 200), "micro": some.integers(1, 50), "world": some.integers(1, 40)}


@given(**COUNTS)
def test_every_sample_counts_once_whatever_the_world(batch: int, micro: int, world: int) -> None:
    ranks = [turns(batch, micro, rank, world) for rank in range(world)]
    counted = [turn for turn in chain(*ranks) if turn.samples]
    assert [*chain(*(turn.places for turn in counted))] == [*range(batch)]
    assert all(turn.samples == len(turn.places) for turn in counted)
    # The cut is that of one rank: the same micro-batches, under the same numbers.
    assert {turn.number: turn.places for turn in chain(*ranks)} == {
        turn.number: turn.places for turn in turns(batch, micro, 0, 1)
    }
    assert sum(turn.scale(batch, world) for turn in counted) == pytest.approx(world)


@given(**COUNTS)
def test_ranks_differ_by_one_micro_batch_at_most_and_each_has_one(batch: int, micro: int, world: int) -> None:
    ranks = [turns(batch, micro, rank, world) for rank in range(world)]
    assert max(map(len, ranks)) - min(map(len, ranks)) <= 1
    for mine in ranks:
        assert [turn.last for turn in mine] == [False] * (len(mine) - 1) + [True]


def test_a_rank_without_a_micro_batch_takes_part_in_anothers() -> None:
    assert turns(6, 3, 1, 4) == (Turn(1, range(3, 6), 3, True),)
    assert turns(6, 3, 3, 4) == (Turn(1, range(3, 6), 0, True),)
    assert turns(6, 3, 3, 4)[0].scale(6, 4) == 0.0


@pytest.mark.parametrize("world", [1, 3, 7, 49])
def test_one_micro_batch_a_rank_is_plain_ddp(world: int) -> None:
    """Scaled by exactly 1.0, and the slices that a fixed world has."""
    for rank in range(world):
        (turn,) = turns(4 * world, 4, rank, world)
        assert turn.scale(4 * world, world) == 1.0
        assert (turn,) == even(4 * world, rank, world)


def test_the_global_batch_is_what_was_asked_for_or_the_largest_worlds() -> None:
    assert Micro(20, 4).batch_of(3) == 20
    assert Micro(None, 4).batch_of(3) == 12


@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("start", [0, 2])
def test_micro_batches_hold_the_same_samples_in_every_world(world: int, start: int) -> None:
    order = Order(50, 14, seed=3, shuffle=True)
    whole = Batches(order, 0, 1)
    whole.start = start
    expected = [*whole]
    ranks = [Batches(order, rank, world, micro=4) for rank in range(world)]
    for batches in ranks:
        batches.start = start
    lists = [iter(batches) for batches in ranks]
    for pairs in expected:
        got = []
        for batches, own in zip(ranks, lists, strict=True):
            parts = [next(own) for _ in batches.turns]
            got += [part for part, turn in zip(parts, batches.turns, strict=True) if turn.samples]
        assert [*chain(*got)] == pairs
    assert all(next(own, None) is None for own in lists)
    assert [len(batches) for batches in ranks] == [order.batches * len(batches.turns) for batches in ranks]
