"""Virtual time for many invocations at once: each is a greenlet that sleeps in the hub's time, not in ours.

Deterministic: one runs at a time, in the order of its moment and then of its arrival.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

from greenlet import GreenletExit, greenlet


class Hub:
    """The clock and the queue. ``Clock``'s ``now`` and ``scale`` are here, so rounds take it for theirs."""

    scale = 1.0

    def __init__(self, start: float = 1_800_000_000.0) -> None:
        self._now = start
        self._queue: list[tuple[float, int, greenlet]] = []
        self._order = itertools.count()
        self._hub = greenlet.getcurrent()

    def now(self) -> float:
        return self._now

    def spawn(self, work: Callable[[], object], after: float = 0.0) -> greenlet:
        task = greenlet(work, parent=self._hub)
        self._push(after, task)
        return task

    def sleep(self, seconds: float) -> None:
        """For a task: come back that much later. Outside of tasks (set-up) nothing waits."""
        current = greenlet.getcurrent()
        if current is self._hub:
            return
        self._push(seconds, current)
        self._hub.switch()

    def kill(self, task: greenlet) -> None:
        """Where it stands: what it wrote is written, its ``finally`` blocks do not reach the store any more."""
        if not task.dead:
            task.throw(GreenletExit)

    def run(self, limit: float) -> None:
        """Until nothing is left to do, or that many virtual seconds have passed."""
        end = self._now + limit
        while self._queue and self._queue[0][0] <= end:
            moment, _, task = heapq.heappop(self._queue)
            self._now = max(self._now, moment)
            if not task.dead:
                task.switch()

    def _push(self, after: float, task: greenlet) -> None:
        heapq.heappush(self._queue, (self._now + after, next(self._order), task))
