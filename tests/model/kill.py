"""``python -m tests.model.kill NUMBER SECONDS``: search one mutant's world, in a process of its own.

Prints one line of JSON: the verdict and the way to it.
"""

from __future__ import annotations

import json
import sys

from tests.model import mutants, mutate


def main(number: int, limit_s: float) -> None:
    mutant = mutants.MUTANTS[number]
    mutate.infect(mutant)
    from tests.model.search import search
    from tests.model.story import Story

    found = search(Story(*mutant.story), limit_s)
    print(json.dumps({"why": found.why, "way": found.way, "states": found.states, "seconds": round(found.seconds, 1)}))


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
