"""Which machine holds the gang up: own times of all ranks, told to all now and then, and held against the middle one.

Every rank tells three numbers for each window of some seconds, while training goes on; all
see the same list at the same step, and each machine judges itself by it. Nothing else
travels, and nobody decides here: the agent says what the control file has, and reconcile
what follows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median, median_low

from spotkeeper.train.control import NAME, Control, ControlError
from spotkeeper.train.gang import Gang

SLOWER = 1.3  # times the middle rank's own time: that machine holds the others up
WINDOWS = 5  # in a row, before it is said; and as many below it before it is taken back
WINDOW_S = 10.0
_FIRST = 16  # steps of the first window, while nobody knows how long a step takes
_MOST = 10_000


@dataclass(frozen=True)
class Told:
    """One rank's window: seconds of its own for a step, and for a sample; of a whole step. 0: not measured."""

    own_s: float = 0.0
    sample_s: float = 0.0
    step_s: float = 0.0


class Verdict:
    """What one machine makes of the windows. Pure.

    ``lag``: how many times the middle rank's time it needs; 0 as long as it keeps up.
    """

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=WINDOWS)
        self.lag = 0.0

    def window(self, ranks: Sequence[Told], mine: Sequence[int]) -> None:
        """``mine``: this machine's ranks."""
        ratio = max((ratio_of(ranks, rank) for rank in mine), default=0.0)
        if not ratio:
            return  # nothing was measured
        self._last.append(ratio)
        if len(self._last) < WINDOWS:
            return
        if all(each > SLOWER for each in self._last):
            self.lag = median(self._last)
        elif all(each <= SLOWER for each in self._last):
            self.lag = 0.0


def ratio_of(ranks: Sequence[Told], rank: int) -> float:
    """How many times the middle rank's own time this one needs; 0 where that is not known.

    By step and by sample, the lower of both: who has more samples than others needs longer, and a
    slow machine that was given fewer holds nobody up. Of two ranks the quicker one is the middle.
    """
    found = []
    for of in ("own_s", "sample_s"):
        values: list[float] = [getattr(told, of) for told in ranks]
        known, mine = [value for value in values if value > 0], values[rank]
        if len(known) < 2 or mine <= 0:
            return 0.0
        found.append(mine / median_low(known))
    return min(found)


class Lag:
    """One per run and rank. ``after_step`` is collective: all ranks call it after the same steps.

    Args:
        mine: ranks of this machine.
        control: where its first rank writes what comes of it.
    """

    def __init__(self, gang: Gang, mine: Sequence[int], control: Control) -> None:
        self._gang, self._mine, self._control = gang, tuple(mine), control
        self._verdict = Verdict()
        self._own: list[float] = []
        self._samples = 0
        self._steps = 0
        self._left = _FIRST
        self._pending: Callable[[], list[tuple[float, ...]]] | None = None

    def after_step(self, own_s: float | None, samples: int, step_s: float) -> None:
        """
        Args:
            own_s: a step's own time, where one was taken.
            samples: that this rank trained on in this step, counting or not.
            step_s: this rank's usual time of a step, seconds.
        """
        if self._gang.world == 1:
            return
        if self._pending is not None:
            self._heard(self._pending())
            self._pending = None
        if own_s is not None:
            self._own.append(own_s)
        self._samples += samples
        self._steps += 1
        if self._steps >= self._left:
            self._tell(step_s)

    def drain(self) -> None:
        """The loop ends or stops: leave nothing under way. Collective."""
        if self._pending is not None:
            self._heard(self._pending())
            self._pending = None

    def _tell(self, step_s: float) -> None:
        own_s = mean(self._own) if self._own else 0.0
        sample_s = own_s * self._steps / self._samples if self._samples else 0.0
        self._pending = self._gang.share((own_s, sample_s, step_s))
        self._own, self._samples, self._steps = [], 0, 0

    def _heard(self, told: list[tuple[float, ...]]) -> None:
        ranks = [Told(*each) for each in told]
        slowest_s = max(each.step_s for each in ranks)
        self._left = max(1, min(_MOST, int(WINDOW_S / slowest_s))) if slowest_s > 0 else _FIRST
        if self._gang.local_rank:
            return
        self._verdict.window(ranks, self._mine)
        self._control.lag = self._verdict.lag
        self._control.sample_s = max(ranks[rank].sample_s for rank in self._mine)


def remembered(run: Path | None) -> float:
    """Seconds a sample that this machine needed in the newest generation before, by its control file; 0: not known.

    Args:
        run: the generation's run folder; those of the ones before are beside it while the machine lives.
    """
    if run is None or not run.name.isdecimal():
        return 0.0
    older = [path for path in run.parent.iterdir() if path.name.isdecimal() and int(path.name) < int(run.name)]
    for folder in sorted(older, key=lambda path: int(path.name), reverse=True):
        try:
            with Control.open(folder / NAME) as control:
                if control.sample_s > 0:
                    return control.sample_s
        except (OSError, ControlError):
            continue
    return 0.0
