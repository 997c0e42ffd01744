"""``python -m tests.model.explore NUMBER SECONDS``: search one world. Prints one line of JSON."""

from __future__ import annotations

import json
import sys

from tests.model.search import search
from tests.model.worlds import WORLDS


def main(number: int, limit_s: float) -> None:
    found = search(WORLDS[number], limit_s)
    answer = {
        "states": found.states,
        "worlds": found.worlds,
        "exhausted": found.whole,
        "stopped": found.stopped,
        "seconds": round(found.seconds, 1),
        "violation": found.why,
        "way": found.way,
    }
    print(json.dumps(answer))


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
