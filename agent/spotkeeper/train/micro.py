"""How a global batch is cut into micro-batches, and which rank trains on which. Knows no tensors.

The cut knows nothing of the world: micro-batch m of global batch n is the same samples
however many ranks there are. So its loss, its batch statistics and (because its random
numbers are seeded by its place) its dropout are the same in every world, and the gradient
of a global batch differs between worlds by nothing but the order of a sum.

Machines may differ in speed. Then each gets whole micro-batches in proportion, by what was
measured in the generations before on these very machines, for the slowest sets the pace.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low

from spotkeeper.train.errors import AttachError
from spotkeeper.train.gang import Gang

EQUAL = 1.1  # times the fastest: below it machines are as good as equal, and what was measured is noise


@dataclass(frozen=True)
class Micro:
    """What a run whose world may change was asked for.

    ``batch``: samples of a global batch; None: as many as ``ranks`` ranks take by the
    loader's batch size. ``ranks``: of the largest world, as far as that is known.
    ``costs``: of each rank of this world, seconds a sample; 0 where nothing was measured.
    """

    batch: int | None
    ranks: int
    costs: tuple[float, ...] = ()

    def batch_of(self, local: int) -> int:
        """Samples of a global batch, where the loader's batches have ``local``."""
        return self.batch or local * self.ranks


@dataclass(frozen=True)
class Turn:
    """One batch as a rank is given it.

    ``number``: of the micro-batch in its global batch. ``places``: of its samples there.
    ``samples``: how many it counts for; 0 where another rank trains on it and this one only
    takes part in what all ranks do together. ``last``: this rank's last of the global batch.
    """

    number: int
    places: range
    samples: int
    last: bool

    def scale(self, batch: int, world: int) -> float:
        """What its mean loss is multiplied by, so that DDP's mean over ranks is the global batch's mean.

        Whole numbers up to the one division: an even split is scaled by exactly 1.0 over the
        micro-batches of a rank, so one micro-batch a rank is plain DDP to the last bit.
        """
        return self.samples * world / batch


def even(batch: int, rank: int, world: int) -> tuple[Turn, ...]:
    """One slice for each rank, ``batch`` / ``world`` samples long."""
    size = batch // world
    return (Turn(rank, range(rank * size, (rank + 1) * size), size, last=True),)


def turns(batch: int, micro: int, rank: int, world: int, costs: Sequence[float] = ()) -> tuple[Turn, ...]:
    """A rank's turns in each global batch; never none.

    Args:
        batch: samples of the global batch.
        micro: samples of a micro-batch; the last one has what is left.
        costs: see ``Micro``; () where all ranks are as good as equal.

    Returns:
        Consecutive micro-batches, as many as ``shares`` says. A rank for which none is left
        gets a copy of another's that counts for nothing: it would have to wait for the
        others anyway, and DDP needs a backward of every rank.
    """
    count = -(-batch // micro)
    plan = shares(count, costs or (0.0,) * world)
    first = sum(plan[:rank])
    mine = range(first, first + plan[rank])
    if not mine:
        number = rank % count
        return (Turn(number, _places(batch, micro, number), 0, last=True),)
    places = [_places(batch, micro, number) for number in mine]
    return tuple(
        Turn(number, place, len(place), number == mine[-1]) for number, place in zip(mine, places, strict=True)
    )


def shares(count: int, costs: Sequence[float]) -> tuple[int, ...]:
    """How many of ``count`` micro-batches each rank trains on, so that the last one is done soonest.

    Each goes to the rank that would be done with it first, which is optimal for equal pieces; of
    several the lowest. None goes without while there is one for each: a rank without a
    micro-batch trains on a copy, so its first costs nothing.

    Args:
        costs: seconds a sample, by rank; 0: not known, taken for what the middle one needs.
    """
    known = [cost for cost in costs if cost > 0]
    if not known or max(known) <= EQUAL * min(known):
        known = [1.0]
        costs = (0.0,) * len(costs)
    middle = median_low(known)
    pace = [cost if cost > 0 else middle for cost in costs]
    plan = [1 if rank < count else 0 for rank in range(len(pace))]
    heap = [(2 * cost, rank) for rank, cost in enumerate(pace)]
    heapq.heapify(heap)
    for _ in range(count - sum(plan)):
        _, rank = heap[0]
        plan[rank] += 1
        heapq.heapreplace(heap, ((plan[rank] + 1) * pace[rank], rank))
    return tuple(plan)


def _places(batch: int, micro: int, number: int) -> range:
    return range(number * micro, min((number + 1) * micro, batch))


def find_micro(gang: Gang, batch: int | None, largest: int | None, cost: float = 0.0) -> Micro | None:
    """What the run was asked for; None where its world stays as it is. Collective.

    Args:
        batch: this rank's word on the global batch.
        largest: ranks of the largest world, as this rank's machine was told; rank 0's counts, for machines differ.
        cost: seconds a sample that this machine needed before; 0: not known.

    Raises:
        AttachError: ranks want different global batches, or one of less than a sample.
    """
    if batch is not None and batch < 1:
        raise AttachError(f"attach(global_batch={batch}): want at least 1 sample")
    words = [json.loads(blob) for blob in gang.gather(json.dumps([batch, largest, cost]).encode())]
    if len(batches := {each for each, *_ in words}) > 1:
        raise AttachError(f"attach(global_batch=): ranks differ: {', '.join(sorted(map(str, batches)))}")
    most = words[0][1]
    costs = tuple(float(each) for *_, each in words)
    return None if batch is None and most is None else Micro(batch, max(most or 0, gang.world), costs)
