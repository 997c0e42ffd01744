"""World (a), combination by combination: each choice of at most two faults and one request, a world of its own.

``python -m tests.model.combine CLOUD EACH ALL`` (seconds) searches those of one cloud, from the small to the large, one
after the other in one process, because what the shipped code decides is the same in all of them. One line of
JSON for each. A combination that holds one that did not end within its limit would not end either (it has all
of its states): it stays open without being tried.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from itertools import combinations_with_replacement
from math import prod
from typing import NamedTuple

from tests.model.search import Found, Search
from tests.model.story import FAULTS, REQUESTS, Story

FIRST = 3  # times the limit, for one fault or request by itself


class Combination(NamedTuple):
    """``faults``: at most two kinds, in order; ``request``: one, or ''."""

    faults: tuple[str, ...] = ()
    request: str = ""

    @property
    def name(self) -> str:
        return " + ".join((*self.faults, *([self.request] if self.request else []))) or "all well"

    @property
    def size(self) -> int:
        return len(self.faults) + len(self.request[:1])

    def parts(self) -> Iterator[Combination]:
        """Those with one thing less."""
        if self.request:
            yield Combination(self.faults)
        for left_out in range(len(self.faults)):
            yield Combination(self.faults[:left_out] + self.faults[left_out + 1 :], self.request)

    def singles(self) -> Iterator[Combination]:
        """Each of its faults, and its request, by itself."""
        yield from (Combination((fault,)) for fault in self.faults)
        if self.request:
            yield Combination((), self.request)

    def story(self, cloud: str) -> Story:
        """Two rounds, each of these faults at most once (or twice, where it is named twice)."""
        pair = self.faults if len(set(self.faults)) == 2 else ()
        request_kinds = frozenset({self.request}) - {""}
        return Story(
            self.name,
            cloud,
            faults=len(self.faults),
            requests=len(request_kinds),
            kinds=frozenset(self.faults),
            request_kinds=request_kinds,
            pair=pair,
        )


def every() -> tuple[Combination, ...]:
    """All of them, so that each comes after its parts."""
    faults = [chosen for n in (0, 1, 2) for chosen in combinations_with_replacement(sorted(FAULTS), n)]
    found = [Combination(chosen, request) for chosen in faults for request in ("", *sorted(REQUESTS))]
    return tuple(sorted(found, key=lambda one: one.size))


class Tried(NamedTuple):
    """``found`` None: not tried, and ``why``."""

    one: Combination
    found: Found | None
    why: str = ""


class Work:
    """All combinations on one cloud, the (probably) small ones first, until ``total_s`` seconds have passed.

    How many states there will be is guessed from those of each fault and request by itself, which are searched
    first and may take longer.
    """

    def __init__(self, cloud: str, limit_s: float, total_s: float) -> None:
        self.cloud, self.limit_s, self.until = cloud, limit_s, time.monotonic() + total_s
        self.states: dict[Combination, int] = {}  # of those that were exhausted
        self.learnt: dict[tuple[bool, bool], Search] = {}

    def run(self) -> Iterator[Tried]:
        rest = [one for one in every() if one.size > 1]
        yield from (self._try(one) for one in every() if one.size < 2)
        yield from (self._try(one) for one in sorted(rest, key=lambda one: (self._guess(one), one.size)))

    def _guess(self, one: Combination) -> int:
        return prod(self.states.get(single, 1 << 40) for single in one.singles())

    def _try(self, one: Combination) -> Tried:
        if not self.states.keys() >= set(one.parts()):
            return Tried(one, None, "a part of it is open")
        left = self.until - time.monotonic()
        if left <= 0:
            return Tried(one, None, "no time was left")
        key = ("blind" in one.faults, "forgotten" in one.faults)
        search = Search(one.story(self.cloud), self.learnt.get(key))
        found = search.run(min(left, self.limit_s * (FIRST if one.size < 2 else 1)))
        self.learnt[key] = search
        if not search.roomy():
            self.learnt.clear()
        if found.whole:
            self.states[one] = found.states
        return Tried(one, found)


def main(cloud: str, limit_s: float, total_s: float) -> None:
    for one, found, why in Work(cloud, limit_s, total_s).run():
        row = {
            "name": one.name,
            "cloud": cloud,
            "states": found.states if found else 0,
            "exhausted": found is not None and found.whole,
            "stopped": found.stopped if found else why,
            "seconds": round(found.seconds, 1) if found else 0.0,
            "violation": found.why if found else "",
            "way": found.way if found else (),
        }
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), float(sys.argv[3]))
