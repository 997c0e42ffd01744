"""The division of work while training continues: each sample once a step, at a step that no loader has begun."""

from __future__ import annotations

import random
from itertools import chain

import pytest

from spotkeeper.train.core.division import Division, Speeds
from spotkeeper.train.core.errors import DataError
from spotkeeper.train.core.microbatch import shares
from spotkeeper.train.data.sampler import RankBatches, SampleOrder

WORLD, MICRO = 3, 3


def test_an_epoch_stays_whole_while_loaders_fetch_ahead() -> None:
    """Ranks whose loaders are 0, 2 and 7 batches ahead, and new speeds at random steps, across two epochs."""
    chance = random.Random(3)  # noqa: S311
    order = SampleOrder(130, 20, seed=3, shuffle=True)
    alone = RankBatches(order, 0, 1)
    fetched = (0, 2, 7)
    ranks = [RankBatches(order, rank, WORLD, micro=MICRO, ahead=fetched[rank]) for rank in range(WORLD)]
    seen: set[tuple[int, ...]] = set()
    for epoch in (0, 1):
        for batches in (alone, *ranks):
            batches.epoch = epoch
        queues: list[list[list[int]]] = [[] for _ in ranks]
        sources, cuts = [iter(batches) for batches in ranks], [batches.micro_batches() for batches in ranks]
        for number, whole in enumerate(alone):
            got: dict[int, list[int]] = {}
            for rank, (source, cut) in enumerate(zip(sources, cuts, strict=True)):
                last = False
                while not last:
                    while len(queues[rank]) <= fetched[rank] and (draw := next(source, None)):
                        queues[rank].append(draw.indices)
                    micro_batch = next(cut)
                    indices, last = queues[rank].pop(0), micro_batch.last
                    if micro_batch.samples:
                        assert got.setdefault(micro_batch.number, indices) is indices, "no other rank has it"
                while len(queues[rank]) < fetched[rank] and (draw := next(source, None)):
                    queues[rank].append(draw.indices)
            assert [*chain(*(got[key] for key in sorted(got)))] == whole.indices
            seen.add(tuple(len(batches.division.of(epoch * order.batches + number)) for batches in ranks))
            if chance.random() < 0.7:
                costs = [chance.choice((1.0, 2.0, 5.0)) for _ in ranks]
                ahead, next_one = max(own.division.ahead for own in ranks), epoch * order.batches + number + 1
                begins = {own.division.change(next_one, ahead, costs) for own in ranks}
                assert len(begins) == 1
    assert len(seen) > 3, "the division changed"


def test_a_batch_that_has_begun_is_never_divided_anew() -> None:
    division = Division(20, MICRO, 0, 2, ahead=4)
    division.begin(2)
    with pytest.raises(DataError, match="global batch 2 has begun"):
        division.change(1, 1, (1.0, 2.0))
    assert division.change(1, division.ahead + 1, (1.0, 2.0)) == 3
    assert [len(division.of(number)) for number in (2, 3)] == [4, 5]


def test_a_fetched_batch_counts_with_the_fewest_micro_batches() -> None:
    division = Division(20, MICRO, 0, 2, ahead=4)
    assert division.ahead == 1
    division.change(5, 1, (9.0, 1.0))
    assert division.ahead == 4, "from global batch 6 on this rank has one micro-batch each"
    division.change(20, 4, (1.0, 1.0))
    assert division.ahead == 4, "not yet: the new division begins at 24"
    division.change(40, 4, (1.0, 1.0))
    assert division.ahead == 1


def test_a_later_change_replaces_one_that_has_not_begun() -> None:
    division = Division(20, MICRO, 0, 2)
    assert division.change(5, 4, (9.0, 1.0)) == 9
    assert division.change(6, 1, (1.0, 9.0)) == 7
    assert [len(division.of(number)) for number in (6, 7, 9)] == [4, 6, 6]


def windows(speeds: Speeds, *rows: tuple[float, ...], count: int = 12) -> list[bool]:
    return [speeds.window(row, count) for row in rows]


def test_two_windows_with_other_speeds_divide_the_work_anew() -> None:
    speeds = Speeds((0.0, 0.0))
    assert windows(speeds, (1.0, 2.0), (1.0, 1.0), (1.0, 2.0)) == [False, False, False]
    assert windows(speeds, (1.0, 2.1)) == [True]
    assert speeds.costs == (1.0, 2.1)
    assert windows(speeds, *[(3.0, 6.3)] * 3) == [False] * 3, "all ranks are slower by the same factor"
    assert windows(speeds, (1.0, 4.0), (1.0, 4.0), (1.0, 1.0), (1.0, 1.0)) == [False, True] * 2


@pytest.mark.parametrize(("cost", "divided"), [(1.8, True), (1.83, False), (2.0, False), (2.18, False), (2.25, True)])
def test_a_change_of_at_most_a_tenth_changes_nothing(cost: float, divided: bool) -> None:
    assert windows(Speeds((1.0, 2.0)), *[(3.0, 3.0 * cost)] * 2, count=100) == [False, divided]


def test_a_rank_that_was_not_measured_or_an_equal_division_changes_nothing() -> None:
    assert windows(Speeds((1.0, 1.0, 1.0)), *[(0.0, 5.0, 1.0)] * 3) == [False] * 3
    assert shares(2, (1.0, 3.0)) == shares(2, (1.0, 1.0))
    assert windows(Speeds((1.0, 1.0)), *[(1.0, 3.0)] * 3, count=2) == [False] * 3
