"""How all ranks come to do the same thing after the same step.

Every rank has its own view: its agent's wish, its clock, whether its saver is busy. Acting
on it alone would leave one rank in the gather of a save and the others in their next
all-reduce. So every k steps each rank puts its view into one integer, the highest of all
wins, and all act on it after the next step; nobody waits, because the answer has had a
step's time to come. k is bounded by time and part of what is agreed.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum

from spotkeeper.train.gang import Gang

EVERY_S = 0.2  # a wish is heard within twice this, and one step
_MOST = 1000
_SHIFT = 40


class Call(IntEnum):
    """What a rank says, and what all then do; the highest wins.

    BUSY above SAVE: no second save while one is being written, anywhere. PUBLISH between
    them: of sharded state all nodes have written their parts once none is BUSY, and that
    comes before another save. STOP above BUSY: a stop waits for that save, then saves.
    """

    NOTHING = 0
    SAVE = 1
    PUBLISH = 2
    BUSY = 3
    STOP = 4


class Agreement:
    """One per run. ``after_step`` is collective: all ranks call it after the same steps."""

    def __init__(self, gang: Gang) -> None:
        self._gang = gang
        self._pending: Callable[[], int] | None = None
        self._every = 1
        self._steps = 0

    def after_step(self, view: Callable[[], Call], step_s: float) -> Call:
        """What all ranks do now.

        Args:
            view: this rank's; only asked when it is sent.
            step_s: this rank's usual time of a step, seconds.
        """
        if self._gang.world == 1:
            return view()
        self._steps += 1
        answer = Call.NOTHING
        if self._pending is not None:
            answer, slowest_s = _open(self._pending())
            self._pending = None
            self._every = max(1, min(_MOST, int(EVERY_S / slowest_s))) if slowest_s else 1
        # Where a save is about to begin, the view is not yet that of a rank that saves: it would ask for a second.
        if answer in (Call.NOTHING, Call.BUSY) and self._steps % self._every == 0:
            self._pending = self._gang.highest(_close(view(), step_s))
        return answer

    def drain(self) -> None:
        """The loop ends: leave nothing under way. Collective."""
        if self._pending is not None:
            self._pending()
            self._pending = None


def _close(call: Call, step_s: float) -> int:
    """One integer: the call above, the microseconds of a step below (of those with the highest call)."""
    return call << _SHIFT | min(int(step_s * 1e6), (1 << _SHIFT) - 1)


def _open(word: int) -> tuple[Call, float]:
    return Call(word >> _SHIFT), (word & ((1 << _SHIFT) - 1)) / 1e6
