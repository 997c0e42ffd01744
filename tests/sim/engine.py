"""Virtual time: a queue of things to come, taken in order. Knows nothing of clouds.

Deterministic: what is due at one moment happens in the order in which it was arranged. ``run`` may be called
from inside an event, so that a function that waits (or freezes) lets the world go on meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush

START = 1_000_000.0


class Timer:
    """Something to come; ``off`` forgets it."""

    __slots__ = ("what", "when")

    def __init__(self, when: float, what: Callable[[], None]) -> None:
        self.when = when
        self.what: Callable[[], None] | None = what

    def off(self) -> None:
        self.what = None


class Engine:
    """``scale`` and ``now`` make it the clock that rounds and the function's HTTP interface ask for."""

    scale = 1.0

    def __init__(self) -> None:
        self.t = START
        self.events = 0
        self._queue: list[tuple[float, int, Timer]] = []
        self._count = 0

    def now(self) -> float:
        return self.t

    def at(self, when: float, what: Callable[[], None]) -> Timer:
        timer = Timer(when, what)
        self._count += 1
        heappush(self._queue, (when, self._count, timer))
        return timer

    def after(self, seconds: float, what: Callable[[], None]) -> Timer:
        return self.at(self.t + seconds, what)

    def step(self, until: float) -> bool:
        """The next event, if it comes by then."""
        while self._queue and self._queue[0][0] <= until:
            when, _, timer = heappop(self._queue)
            what = timer.what
            if what is None:
                continue
            self.t = max(self.t, when)  # an event inside another may have taken time
            self.events += 1
            timer.what = None
            what()
            return True
        return False

    def run(self, until: float) -> None:
        while self.step(until):
            pass
        self.t = max(self.t, until)
