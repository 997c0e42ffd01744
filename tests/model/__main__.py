"""``python -m tests.model`` (``make model``): all worlds, then all mutants; fails if one is broken or one lives.

Prints a line for each, and writes ``.spotkeeper/model.json``. Every search and every mutant has a process of
its own, two at a time, each below 3 GB; a search ends at its world's end, or at a bound that is printed with it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from tests.model.mutants import MUTANTS
from tests.model.mutants import verdict as killed_by
from tests.model.worlds import WORLDS

ROOT = Path(__file__).parents[2]
OUT = ROOT / ".spotkeeper" / "model.json"
LIMIT_S = 90.0  # of one world, two at a time; more than half of them end by themselves
KILL_S = 180.0  # of one mutant
Json = dict[str, Any]


def _run(module: str, number: int, limit_s: float) -> Json:
    """One search in a process of its own; its last line is the answer."""
    argv = [sys.executable, "-m", module, str(number), str(limit_s)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(argv)}: exit status {done.returncode}\n{done.stderr[-3000:]}")
    answer: Json = json.loads(done.stdout.splitlines()[-1])
    return answer


def world(number: int, limit_s: float) -> Json:
    story = WORLDS[number]
    found = _run("tests.model.explore", number, limit_s)
    return {"world": story.name, "cloud": story.cloud, "bound": bound(number), **found}


def bound(number: int) -> str:
    """What a story is bounded by, in words."""
    s = WORLDS[number]
    parts = [
        f"{s.jobs} job(s)" if s.jobs > 1 else "",
        f"{s.ranks} rank(s)",
        f"{len(s.zones)} zone(s)",
        f"{s.rounds} round(s) at once, any may stall for ever",
        f"{s.deaths} more may die" if s.deaths else "",
        f"at most {s.faults} fault(s), {s.wishes} wish(es)",
        "stalls between all reads" if s.split else "stalls after the first read",
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
    size = f"{row['states']:,} states, {row['worlds']:,} worlds"
    line = f"{row['cloud']}  {row['world']}: {size}, {end}, {row['seconds']:.0f} s"
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
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for one world")
    parser.add_argument("--only", choices=("worlds", "mutants"), help="one half of the work")
    args = parser.parse_args()
    worlds: list[Json] = []
    mutants: list[Json] = []
    if args.only != "mutants":
        worlds = each("worlds", list(range(len(WORLDS))), lambda n: world(n, args.limit), told)
    if args.only != "worlds":
        mutants = each("mutants", list(range(len(MUTANTS))), lambda n: mutant(n, KILL_S), killed)
    alive = [row["mutant"] for row in mutants if not row["killed"]]
    broken = [row for row in worlds if row["violation"]]
    summary = {
        "worlds": worlds,
        "states": sum(row["states"] for row in worlds),
        "violations": len(broken),
        "mutants": {"total": len(mutants), "killed": len(mutants) - len(alive), "alive": alive},
    }
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps(summary, indent=1) + "\n")
    whole = sum(row["exhausted"] for row in worlds)
    print(
        f"{len(worlds)} worlds, {whole} exhausted, {summary['states']:,} states, {len(broken)} broken; "
        f"{len(mutants)} mutants, {len(alive)} alive; {OUT.relative_to(ROOT)}"
    )
    return 1 if broken or alive else 0


if __name__ == "__main__":
    sys.exit(main())
