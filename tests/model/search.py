"""Breadth first through every state of a small world: the shortest story of what breaks, or none."""

from __future__ import annotations

import time
from collections import deque
from typing import NamedTuple

from tests.model.small_world import S, SmallWorld


class Found(NamedTuple):
    """``why`` is '' where everything held; ``whole``: no state was left unexplored."""

    why: str
    story: tuple[str, ...]
    states: int
    whole: bool


def search(world: SmallWorld, limit_s: float, states: int = 10_000_000, settle_every: int = 1) -> Found:
    """Explore until the end, a violation, or the limit (real seconds).

    ``settle_every``: from every n-th state a run without faults must end well.
    """
    begin = time.monotonic()
    first = world.start()
    parents: dict[S, tuple[S, str] | None] = {first: None}
    good: set[S] = set()
    queue = deque([first])
    count = 0
    while queue:
        state = queue.popleft()
        count += 1
        why = world.broken(state)
        if not why and count % settle_every == 0:
            why = world.settle(state, good)
        if why:
            return Found(why, _story(parents, state), len(parents), False)
        if time.monotonic() - begin > limit_s or len(parents) > states:
            return Found("", (), len(parents), False)
        for name, after in world.moves(state):
            if after not in parents and _bounded(world, after):
                parents[after] = (state, name)
                queue.append(after)
    return Found("", (), len(parents), True)


def _bounded(world: SmallWorld, state: S) -> bool:
    return all(rank.top <= world.story.left.attempts for rank in state.record.ranks)


def _story(parents: dict[S, tuple[S, str] | None], state: S) -> tuple[str, ...]:
    out = []
    step = parents[state]
    while step is not None:
        out.append(step[1])
        step = parents[step[0]]
    return tuple(reversed(out))
