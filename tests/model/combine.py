"""World (a), combination by combination: every choice of at most two faults and at most one wish, each its own world.

``python -m tests.model.combine CLOUD SECONDS`` searches those of one cloud, from the small to the large, one
after the other in one process, because what the shipped code decides is the same in all of them. One line of
JSON for each. A combination that holds one that did not end within its limit would not end either (it has all
of its states): it stays open without being tried.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import combinations_with_replacement
from typing import NamedTuple

from tests.model.search import Found, Search
from tests.model.story import FAULTS, WISHES, Story


class Combination(NamedTuple):
    """``faults``: at most two kinds, in order; ``wish``: one, or ''."""

    faults: tuple[str, ...] = ()
    wish: str = ""

    @property
    def name(self) -> str:
        return " + ".join((*self.faults, *([self.wish] if self.wish else []))) or "all well"

    @property
    def size(self) -> int:
        return len(self.faults) + len(self.wish[:1])

    def parts(self) -> Iterator[Combination]:
        """Those with one thing less."""
        if self.wish:
            yield Combination(self.faults)
        for left_out in range(len(self.faults)):
            yield Combination(self.faults[:left_out] + self.faults[left_out + 1 :], self.wish)

    def story(self, cloud: str) -> Story:
        """Two rounds, each of these faults at most once (or twice, where it is named twice)."""
        pair = self.faults if len(set(self.faults)) == 2 else ()
        asks = frozenset({self.wish}) - {""}
        return Story(
            self.name,
            cloud,
            faults=len(self.faults),
            wishes=len(asks),
            kinds=frozenset(self.faults),
            asks=asks,
            pair=pair,
        )


def every() -> tuple[Combination, ...]:
    """All of them, so that each comes after its parts; and beside others with which it can share what was learnt."""
    faults = [chosen for n in (0, 1, 2) for chosen in combinations_with_replacement(sorted(FAULTS), n)]
    found = [Combination(chosen, wish) for chosen in faults for wish in ("", *sorted(WISHES))]
    return tuple(sorted(found, key=lambda one: (one.size, "blind" in one.faults, "forgotten" in one.faults)))


def run(cloud: str, limit_s: float) -> Iterator[tuple[Combination, Found | None]]:
    """Each with what was found; None: not tried, because a part of it is open."""
    ended: set[Combination] = set()
    before: Search | None = None
    for one in every():
        if not ended.issuperset(one.parts()):
            yield one, None
            continue
        search = Search(one.story(cloud), before)
        found = search.run(limit_s)
        before = search if search.roomy() else None
        if found.whole:
            ended.add(one)
        yield one, found


def main(cloud: str, limit_s: float) -> None:
    for one, found in run(cloud, limit_s):
        row = {
            "name": one.name,
            "cloud": cloud,
            "states": found.states if found else 0,
            "exhausted": found is not None and found.whole,
            "stopped": found.stopped if found else "a part of it is open",
            "seconds": round(found.seconds, 1) if found else 0.0,
            "violation": found.why if found else "",
            "way": found.way if found else (),
        }
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
