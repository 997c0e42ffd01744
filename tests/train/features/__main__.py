"""``make features``: all that people train with, stopped and killed, in 1, 2 and 3 ranks.

It writes .spotkeeper/features.json.
``--world 2`` and ``--only fsdp`` (a part of the names) take less.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from tests.train.features import gangs
from tests.train.features.trainings import FEATURES

TABLE = Path(".spotkeeper/features.json")


def main() -> int:
    parser = argparse.ArgumentParser(prog="make features", description=__doc__)
    parser.add_argument("--world", type=int, action="append", help="ranks; may be given more than once")
    parser.add_argument("--only", action="append", help="a part of the names; may be given more than once")
    args = parser.parse_args()
    names = tuple(name for name in FEATURES if any(part in name for part in args.only or [""]))
    table: dict[str, dict[str, str]] = {name: {} for name in names}
    for world in args.world or [1, 2, 3]:
        with tempfile.TemporaryDirectory() as root:
            outcomes, cpu_s = gangs.run(world, names, Path(root))
        for name, outcome in outcomes.items():
            fault = table[name][str(world)] = outcome.fault()
            print(f"{world} ranks, {name}: {fault or 'the same bits'}", flush=True)
        print(f"{world} ranks: {cpu_s:.0f} s of processor", flush=True)
    TABLE.parent.mkdir(exist_ok=True)
    TABLE.write_text(json.dumps(table, indent=1) + "\n")
    return 1 if any(fault for worlds in table.values() for fault in worlds.values()) else 0


if __name__ == "__main__":
    raise SystemExit(main())
