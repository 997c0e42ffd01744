"""The cut of a global batch: whole micro-batches, each once, evenly, in any world."""

from __future__ import annotations

import random
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as some
from spotkeeper.train.gang import Solo
from spotkeeper.train.micro import Micro, Turn, even, find_micro, shares, turns
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
        (3, (1.0, 1.0, 50.0), (1, 1, 1)),  # its turn would be a copy otherwise
        (2, (9.0, 1.0, 1.0), (1, 1, 0)),
    ],
)
def test_micro_batches_go_by_measured_speed(count: int, costs: tuple[float, ...], plan: tuple[int, ...]) -> None:
    assert shares(count, costs) == plan


def test_no_other_split_in_whole_micro_batches_is_done_sooner() -> None:
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
def test_the_global_batch_is_the_same_whoever_trains_on_it(costs: tuple[float, ...]) -> None:
    mine = [turns(20, 3, rank, 3, costs) for rank in range(3)]
    places = [place for own in mine for turn in own if turn.samples for place in turn.places]
    assert places == list(range(20))
    assert sum(turn.scale(20, 3) for own in mine for turn in own) == pytest.approx(3.0)
    assert all(own[-1].last and not any(turn.last for turn in own[:-1]) for own in mine)


def test_what_each_machine_needed_is_agreed() -> None:
    class Three(Solo):
        world = 3

        def gather(self, blob: bytes) -> list[bytes]:
            return [blob, b"[null, 3, 0.0]", b"[null, 3, 0.02]"]

    assert find_micro(Three(), None, 3, 0.01) == Micro(None, 3, (0.01, 0.0, 0.02))
