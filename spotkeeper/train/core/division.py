"""Which rank computes which micro-batches of a global batch, and when that changes while training continues.

A machine may slow down, or speed up, during a generation. All ranks get the same measured times after the same step
(``loop/lag.py``), so all find the same new division without asking each other. It begins with a global batch that no
rank's loader has begun to fetch. The micro-batches themselves stay the same (``microbatch.py``), so only the order in
which gradients are added changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median_low

from spotkeeper.train.core.errors import DataError
from spotkeeper.train.core.microbatch import EQUAL, MicroBatch, even, micro_batches, pace_of, shares

WINDOWS = 2  # windows in a row before the division changes: the first steps of a run, and single slow steps, are noise


class Division:
    """One rank's micro-batches of each global batch of a loop. Global batches count from the loop's beginning.

    Args:
        batch: samples of a global batch.
        micro: samples of a micro-batch; None: each rank always has one slice of ``batch`` / ``world`` samples.
        costs: seconds per sample by rank, as for ``shares``; () if all ranks count as equal.
        ahead: batches that this rank's loader fetches before the loop asks for them.
    """

    def __init__(
        self, batch: int, micro: int | None, rank: int, world: int, costs: Sequence[float] = (), ahead: int = 0
    ) -> None:
        self._batch, self._micro, self._rank, self._world, self._fetched = batch, micro, rank, world, ahead
        self._begun = -1  # newest global batch of which the loader knows this rank's micro-batches
        self._parts = [(0, self._part(costs))]  # first global batch, this rank's micro-batches from there on
        self.ahead = self._ahead()  # most global batches that the loader may have begun before the loop asks for them

    def _part(self, costs: Sequence[float]) -> tuple[MicroBatch, ...]:
        if self._micro is None:
            return even(self._batch, self._rank, self._world)
        return micro_batches(self._batch, self._micro, self._rank, self._world, costs)

    @property
    def count(self) -> int:
        """Micro-batches of a global batch."""
        return self._world if self._micro is None else -(-self._batch // self._micro)

    def _ahead(self) -> int:
        return -(-self._fetched // min(len(part) for _, part in self._parts))

    def begin(self, number: int) -> tuple[MicroBatch, ...]:
        """Return this rank's micro-batches of a global batch, which can no longer change."""
        self._begun = max(self._begun, number)
        return self.of(number)

    def of(self, number: int) -> tuple[MicroBatch, ...]:
        """Return this rank's micro-batches of a global batch."""
        first, part = self._parts[-1]
        return part if first <= number else next(part for first, part in reversed(self._parts) if first <= number)

    def change(self, number: int, ahead: int, costs: Sequence[float]) -> int:
        """Divide the work anew. All ranks call it between the same two global batches, with the same arguments.

        Args:
            number: the next global batch.
            ahead: the highest ``ahead`` of all ranks.

        Returns:
            The first global batch of the new division.

        Raises:
            DataError: this rank has already begun that global batch, so ranks would train on the wrong samples.
        """
        first = number + ahead
        if first <= self._begun:
            raise DataError(f"global batch {first} has begun, so it cannot be divided anew: please report this error")
        present = [at for at, _ in self._parts if at <= number][-1]
        self._parts = [(at, part) for at, part in self._parts if present <= at < first]
        self._parts.append((first, self._part(costs)))
        self.ahead = self._ahead()
        return first


class Speeds:
    """The speeds of all ranks that the present division assumes. ``costs``: seconds per sample; 0: unknown.

    A rank's speed has changed if its time differs by more than the ratio ``EQUAL``, each as a multiple of the median
    rank's: if all ranks are slower by the same factor, nothing is to be gained.
    """

    def __init__(self, costs: Sequence[float]) -> None:
        self.costs = tuple(costs)
        self._changed = 0  # windows in a row with other speeds

    def window(self, measured: Sequence[float], count: int) -> bool:
        """Take the times of a window. Return whether ``costs`` have changed, so that the work is to be divided anew.

        Args:
            measured: seconds per sample by rank; 0: not measured.
            count: micro-batches of a global batch.
        """
        if not all(cost > 0 for cost in measured):
            return False
        ratios = [now / before for now, before in zip(_relative(measured), _relative(self.costs), strict=True)]
        changed = any(not 1 / EQUAL <= ratio <= EQUAL for ratio in ratios)
        self._changed = self._changed + 1 if changed else 0
        if self._changed < WINDOWS or shares(count, measured) == shares(count, self.costs):
            return False
        self._changed, self.costs = 0, tuple(measured)
        return True


def _relative(costs: Sequence[float]) -> list[float]:
    """Return the ranks' times as multiples of the median rank's."""
    pace = pace_of(costs)
    middle = median_low(pace)
    return [cost / middle for cost in pace]
