"""``python -m tests.model`` (``make model``): combinations, worlds, mutants, queue; fails if one is broken or lives.

Prints a line for each, and writes ``.spotkeeper/model.json``. Every search of a world and every mutant has a
process of its own, and so have the combinations of each cloud; two at a time, each below 3 GB. A search ends at
its world's end, or at a bound that is printed with it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from tests.model.mutants import MUTANTS
from tests.model.mutants import verdict as killed_by
from tests.model.queue import STORIES as QUEUES
from tests.model.queue_mutants import MUTANTS as QUEUE_MUTANTS
from tests.model.worlds import CLOUDS, WORLDS

ROOT = Path(__file__).parents[2]
OUT = ROOT / ".spotkeeper" / "model.json"
# Seconds of a processor.
LIMIT_S = 60.0  # of one world
EACH_S = 30.0  # of one combination
TOTAL_S = 2400.0  # of the clock, for all combinations of one cloud; the small ones come first
KILL_S = 180.0  # of one mutant
BOUND = (
    "1 node, 2 zones, 2 rounds at once that may stall for ever between any two steps; each fault as often as it is "
    "named, the request once; attempts numbered up to 2 + faults + requests"
)
Json = dict[str, Any]


def _run(module: str, number: int, limit_s: float) -> Json:
    """One search in a process of its own; its last line is the answer."""
    argv = [sys.executable, "-m", module, str(number), str(limit_s)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(argv)}: exit status {done.returncode}\n{done.stderr[-3000:]}")
    answer: Json = json.loads(done.stdout.splitlines()[-1])
    return answer


def combinations(cloud: str, limit_s: float, total_s: float) -> Iterator[Json]:
    """One process for all of a cloud; a line of JSON for each."""
    argv = [sys.executable, "-m", "tests.model.combine", cloud, str(limit_s), str(total_s)]
    with subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            row: Json = json.loads(line)
            yield row
    if process.returncode:
        raise SystemExit(f"{' '.join(argv)}: exit status {process.returncode}")


def combined(limit_s: float, total_s: float) -> Json:
    """World (a): what became of every combination, on both clouds at once."""
    rows: list[Json] = []

    def all_of(cloud: str) -> None:
        for row in combinations(cloud, limit_s, total_s):
            rows.append(row)
            if row["exhausted"] or row["states"]:
                print(told(row), flush=True)

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(all_of, cloud) for cloud in CLOUDS]:
            done.result()
    rows.sort(key=lambda row: (row["cloud"], row["name"]))
    return {
        "bound": BOUND,
        "total": len(rows),
        "exhausted": sum(row["exhausted"] for row in rows),
        "states": sum(row["states"] for row in rows),
        "seconds": round(sum(row["seconds"] for row in rows), 1),
        "limit_s": limit_s,
        "total_s": total_s,
        "violations": sum(row["violation"] != "" for row in rows),
        "tried": [row for row in rows if row["states"]],
        "untried": dict(Counter(row["stopped"] for row in rows if not row["states"])),
        "open": [f"{row['cloud']}: {row['name']}" for row in rows if not row["exhausted"]],
    }


def world(number: int, limit_s: float) -> Json:
    story = WORLDS[number]
    found = _run("tests.model.explore", number, limit_s)
    violations = int(found["violation"] != "")
    return {"name": story.name, "cloud": story.cloud, "bound": bound(number), **found, "violations": violations}


def bound(number: int) -> str:
    """What a story is bounded by, in words."""
    s = WORLDS[number]
    parts = [
        f"{s.jobs} job(s)" if s.jobs > 1 else "",
        f"{s.nodes} node(s)",
        f"{len(s.zones)} zone(s)",
        f"{s.rounds} round(s) at once, any may stall for ever",
        f"{s.deaths} more may die" if s.deaths else "",
        f"at most {s.faults} fault(s), {s.requests} request(es)",
        f"attempts numbered up to {s.numbers}",
        "stalls between all reads" if s.split else "stalls after the first read",
        "rounds of ticks as well" if s.ticks else "",
    ]
    return ", ".join(part for part in parts if part)


def mutant(number: int, limit_s: float) -> Json:
    found = _run("tests.model.kill", number, limit_s)
    return {
        "mutant": MUTANTS[number].name,
        "world": MUTANTS[number].story.name,
        "killed": killed_by(number, found),
        **found,
    }


def queue(number: int) -> Json:
    """Search a world of the queue; or, beyond them, run its tests with a rule taken away."""
    story = number < len(QUEUES)
    module, at = ("queue", number) if story else ("queue_mutants", number - len(QUEUES))
    argv = [sys.executable, "-m", f"tests.model.{module}", str(at)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    last = (done.stdout.splitlines() or [done.stderr[-300:]])[-1]
    return {"name": QUEUES[at].name if story else QUEUE_MUTANTS[at].name, "holds": done.returncode == 0, "found": last}


def queue_told(row: Json) -> str:
    return f"queue  {'holds ' if row['holds'] else 'BROKEN'}  {row['name']}: {row['found']}"


def each(what: str, numbers: list[int], one: Callable[[int], Json], say: Callable[[Json], str]) -> list[Json]:
    """Two at a time, with a bar on a terminal; in order of their numbers."""
    console = Console(highlight=False, soft_wrap=True)
    out: dict[int, Json] = {}
    with (
        Progress(console=console, transient=True, disable=not console.is_terminal) as bar,
        ThreadPoolExecutor(2) as pool,
    ):
        task = bar.add_task(what, total=len(numbers))
        running = {pool.submit(one, number): number for number in numbers}
        for done in as_completed(running):
            out[running[done]] = done.result()
            bar.advance(task)
            bar.console.print(say(done.result()), markup=False)
    return [out[number] for number in numbers]


def told(row: Json) -> str:
    end = "exhausted" if row["exhausted"] else f"stopped: {row['stopped']}"
    line = f"{row['cloud']}  {row['name']}: {row['states']:,} states, {end}, {row['seconds']:.0f} s"
    if not row["violation"]:
        return f"{line}, nothing broken"
    way = "".join(f"\n  {at:3}. {step}" for at, step in enumerate(row["way"], start=1))
    return f"{line}\n  BROKEN: {row['violation']}\n  The shortest way there, from a job just submitted:{way}"


def killed(row: Json) -> str:
    return (
        f"{'killed' if row['killed'] else 'ALIVE '}  {row['mutant']} [{row['world']}]: {row['why'] or 'nothing broken'}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="make model", description="Search all worlds, then all mutants.")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds of a processor for one world")
    parser.add_argument("--each", type=float, default=EACH_S, help="seconds of a processor for one combination")
    parser.add_argument("--total", type=float, default=TOTAL_S, help="seconds for all combinations of a cloud")
    parser.add_argument("--only", choices=("combinations", "worlds", "mutants", "queue"), help="a part of the work")
    args = parser.parse_args()
    summary: Json = {}
    if args.only in (None, "combinations"):
        summary["combinations"] = combined(args.each, args.total)
    if args.only in (None, "worlds"):
        summary["worlds"] = each("worlds", list(range(len(WORLDS))), lambda n: world(n, args.limit), told)
    if args.only in (None, "mutants"):
        mutants = each("mutants", list(range(len(MUTANTS))), lambda n: mutant(n, KILL_S), killed)
        alive = [row["mutant"] for row in mutants if not row["killed"]]
        summary["mutants"] = {"total": len(mutants), "killed": len(mutants) - len(alive), "alive": alive}
    if args.only in (None, "queue"):
        summary["queue"] = each("queue", list(range(len(QUEUES) + len(QUEUE_MUTANTS))), queue, queue_told)
    return finish(summary)


def finish(part: Json) -> int:
    """Into the file, beside the parts that were not run now; and in a few lines."""
    summary = {**(json.loads(OUT.read_text()) if OUT.exists() else {}), **part}
    combos, worlds = summary.get("combinations", {}), summary.get("worlds", [])
    mutants = summary.get("mutants", {"total": 0, "killed": 0, "alive": []})
    summary["states"] = combos.get("states", 0) + sum(row["states"] for row in worlds)
    summary["violations"] = combos.get("violations", 0) + sum(row["violations"] for row in worlds)
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps(summary, indent=1) + "\n")
    if combos:
        print(f"combinations: {combos['exhausted']} of {combos['total']} exhausted ({combos['bound']})")
        tried = [f"{row['cloud']}: {row['name']}" for row in combos["tried"] if not row["exhausted"]]
        print(f"  open after {combos['limit_s']:.0f} s each: {'; '.join(tried) or 'none'}")
        for why, count in combos.get("untried", {}).items():
            print(f"  and {count} more that were not tried: {why}")
    whole = sum(row["exhausted"] for row in worlds)
    print(
        f"{len(worlds)} more worlds, {whole} exhausted; {summary['states']:,} states in all, "
        f"{summary['violations']} broken; {mutants['total']} mutants, {len(mutants['alive'])} alive; "
        f"{OUT.relative_to(ROOT)}"
    )
    queues = [row["name"] for row in summary.get("queue", []) if not row["holds"]]
    print(f"queue: {len(summary.get('queue', []))} worlds and mutants, broken or alive: {'; '.join(queues) or 'none'}")
    return 1 if summary["violations"] or mutants["alive"] or queues else 0


if __name__ == "__main__":
    sys.exit(main())
