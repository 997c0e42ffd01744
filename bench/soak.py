"""The soak: 10,000 virtual days of jobs on recorded markets with every fault at once (``tests/sim/soak.py``).

    make soak                                 all of it, on all cores; prints its figures at the end
    make soak ARGS="--days 200 --seed 5"      another part of it

Writes ``.spotkeeper/soak.json`` and merges its figures into ``bench/results.json``. A violation of a safety property,
or a resource left over, fails it; the seed in the message repeats the run.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import multiprocessing
import os
import sys
import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))  # the simulation lies with the tests

from bench import run as table  # noqa: E402
from tests.sim.soak import Run, run  # noqa: E402

REPORT = HERE.parent / ".spotkeeper" / "soak.json"
DAYS = 10_000.0
# Of all days, and of one run. A day of 64 nodes costs a hundred times one of a single node, and shows more in it.
SHARES = {1: 0.80, 8: 0.19, 64: 0.01}
RUN_DAYS = {1: 8.0, 8: 3.0, 64: 1.0}
SLICE = 24.0  # days of a short trial
TOLD = 20  # violations kept in full
GOAL_S = {"p50": 120.0, "p95": 240.0}
GOAL_CENTS = 1.0  # of 64 nodes


@dataclass
class Spread:
    """Values of one figure, eight bytes each."""

    values: array[float] = field(default_factory=lambda: array("d"))

    def at(self, share: float) -> float:
        """The quantile at this share; 0 without values."""
        ordered = sorted(self.values)
        return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0


MEASURED = ("stood_s", "given_capacity_s", "wasted_min", "rounds", "writes", "cents")


@dataclass
class Sum:
    """Sum over all runs of one size."""

    days: float = 0.0
    runs: int = 0
    recoveries: int = 0
    launches: int = 0
    refusals: int = 0
    duplicates: int = 0
    left_over: int = 0
    violations: int = 0
    trained: float = 0.0
    faults: dict[str, int] = field(default_factory=dict)
    spread: dict[str, Spread] = field(default_factory=lambda: {name: Spread() for name in MEASURED})

    def add(self, done: Run) -> None:
        self.days += done.days
        self.runs += 1
        self.recoveries += len(done.recoveries)
        self.launches += done.launches
        self.refusals += done.refusals
        self.duplicates += done.duplicates
        self.left_over += len(done.left_over)
        self.violations += len(done.violations)
        self.trained += done.trained * done.days
        for fault, count in done.faults.items():
            self.faults[fault] = self.faults.get(fault, 0) + count
        for one in done.recoveries:
            for name in MEASURED:
                if name != "given_capacity_s":
                    self.spread[name].values.append(getattr(one, name))
            if not one.dry and one.awaited:
                self.spread["given_capacity_s"].values.append(one.stood_s)


def plan(days: float, seed: int) -> list[tuple[int, int, float]]:
    """(seed, nodes, days) of every run, sizes mixed evenly, so that a part is like the whole."""
    rows: list[tuple[float, int, float]] = []
    for nodes, share in SHARES.items():
        left, length = days * share, RUN_DAYS[nodes]
        while left > 1e-6:
            rows.append((1 - left / (days * share), nodes, min(length, left)))
            left -= length
    rows.sort()
    return [(seed + number, nodes, length) for number, (_, nodes, length) in enumerate(rows)]


def one(job: tuple[int, int, float]) -> Run:
    logging.disable(logging.CRITICAL)  # logs of the injected faults
    return run(*job)


def runs(jobs: list[tuple[int, int, float]], cores: int) -> Iterator[Run]:
    if cores == 1:
        yield from map(one, jobs)
        return
    with multiprocessing.get_context("spawn").Pool(cores, maxtasksperchild=200) as pool:
        yield from pool.imap_unordered(one, jobs)


def soak(days: float, seed: int, cores: int, minutes: float = math.inf) -> dict[str, object]:
    """Run all, or as much as fits into ``minutes``; return the report."""
    jobs, began = plan(days, seed), time.monotonic()
    sums = {nodes: Sum() for nodes in SHARES}
    told: list[str] = []
    progress = Progress(sum(job[2] * _weight(job[1]) for job in jobs))
    try:
        for done in runs(jobs, cores):
            sums[done.nodes].add(done)
            bad = [f"seed {done.seed}, {done.nodes} nodes: {what}" for what in (*done.violations, *done.left_over)]
            for line in bad:
                print(line, file=sys.stderr, flush=True)
            told += bad
            del told[TOLD:]
            progress.step(done.days * _weight(done.nodes), sums)
            if time.monotonic() - began > 60 * minutes:
                break
    except KeyboardInterrupt:
        print("stopped: the report is of what was done by now", file=sys.stderr)
    progress.end()
    took = time.monotonic() - began
    total = {name: sum(getattr(each, name) for each in sums.values()) for name in TOTALS}
    return {
        "virtual_days": round(total["days"], 1),
        "violations": total["violations"],
        "runs": total["runs"],
        "launches": total["launches"],
        "duplicates": total["duplicates"],
        "left_over": total["left_over"],
        "recoveries": total["recoveries"],
        "machine_days": round(sum(each.days * nodes for nodes, each in sums.items())),
        "seed": seed,
        "took_s": round(took, 1),
        "cores": cores,
        "told": told,
        "by_ranks": {str(nodes): _size(each) for nodes, each in sorted(sums.items())},
        "figures": list(_figures(sums, total)),
    }


TOTALS = ("days", "violations", "runs", "launches", "duplicates", "left_over", "recoveries")


def _weight(nodes: int) -> float:
    """Cost of a day with ``nodes`` nodes, in days of one node."""
    return math.pow(nodes, 1.2)


def _size(each: Sum) -> dict[str, object]:
    return {
        "virtual_days": round(each.days, 1),
        "runs": each.runs,
        "recoveries": each.recoveries,
        "launches": each.launches,
        "refusals": each.refusals,
        "trained_share": round(each.trained / each.days, 4) if each.days else None,
        "faults": dict(sorted(each.faults.items())),
        **{name: {"p50": round(s.at(0.5), 3), "p95": round(s.at(0.95), 3)} for name, s in each.spread.items()},
    }


# -- figures


def _figures(sums: dict[int, Sum], total: dict[str, float]) -> Iterator[dict[str, object]]:
    over = f"over {total['days']:.0f} virtual days on recorded markets, {total['recoveries']} recoveries"
    for name, unit in (("violations", "violations"), ("left_over", "things"), ("duplicates", "machines")):
        yield _figure(f"soak.{name}", total[name], unit, "0", total[name] == 0, over)
    yield _figure("soak.launches", total["launches"], "machines", "-", True, over)
    for nodes, each in sorted(sums.items()):
        about = f"{nodes} nodes, {each.recoveries} recoveries in {each.days:.0f} virtual days"
        for which, share in (("p50", 0.5), ("p95", 0.95)):
            yield from _spreads(nodes, each, which, share, about)


def _spreads(nodes: int, each: Sum, which: str, share: float, about: str) -> Iterator[dict[str, object]]:
    goal_s, end = GOAL_S[which], f"{nodes}_ranks_{which}"
    stood = each.spread["given_capacity_s"].at(share)
    given = f"{about}; standing still, where a machine was awaited, was to be had, and function and zones answered"
    yield _figure(f"soak.recovery_s.{end}", stood, "s", f"<= {goal_s:.0f}", stood <= goal_s, given)
    always = f"{about}; also those without need of a machine, and those that waited for capacity"
    yield _figure(f"soak.stood_s.{end}", each.spread["stood_s"].at(share), "s", "-", True, always)
    for name, unit in (("wasted_min", "machine-minutes"), ("rounds", "looks at the cloud"), ("writes", "writes")):
        yield _figure(f"soak.{name}.{end}", each.spread[name].at(share), unit, "-", True, f"{about}; per recovery")
    cents = each.spread["cents"].at(share)
    yield _figure(
        f"soak.cents.{end}",
        cents,
        "cents",
        f"<= {GOAL_CENTS:.0f}",
        cents <= GOAL_CENTS,
        f"{about}; bucket and function",
    )


def _figure(name: str, value: float, unit: str, goal: str, holds: bool, against: str) -> dict[str, object]:
    shown = value if isinstance(value, int) else round(value, 3)
    return {"name": name, "value": shown, "unit": unit, "goal": goal, "holds": holds, "against": against}


def figures() -> list[dict[str, object]]:
    """For ``bench/run.py``: of the last soak, else of a slice."""
    try:
        report = json.loads(REPORT.read_text())
    except (OSError, ValueError):
        report = soak(SLICE, 1, 1)
    return list(report["figures"])


# -- the terminal


class Progress:
    """A progress bar on a terminal, a line per tenth elsewhere."""

    def __init__(self, whole: float) -> None:
        self._whole, self._done, self._tenth = whole, 0.0, 0
        self._began = time.monotonic()
        self._bar = None
        if sys.stderr.isatty():
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (BarColumn(), TextColumn("{task.percentage:.0f} %  {task.description}"), TimeRemainingColumn())
            self._bar = Progress(*columns)
            self._bar.start()
            self._task = self._bar.add_task("", total=whole)

    def step(self, done: float, sums: dict[int, Sum]) -> None:
        self._done += done
        days, bad = sum(each.days for each in sums.values()), sum(each.violations for each in sums.values())
        text = f"{days:.0f} days, {sum(each.recoveries for each in sums.values())} recoveries, {bad} violations"
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done, description=text)
        elif int(10 * self._done / self._whole) > self._tenth:
            self._tenth = int(10 * self._done / self._whole)
            print(f"{self._tenth * 10} %: {text}, {time.monotonic() - self._began:.0f} s", file=sys.stderr, flush=True)

    def end(self) -> None:
        if self._bar is not None:
            self._bar.stop()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Days of jobs on recorded markets, with everything going wrong.")
    parser.add_argument("--days", type=float, default=DAYS, help="virtual days in all")
    parser.add_argument("--seed", type=int, default=1, help="of the first run; each run has the next")
    parser.add_argument("--cores", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="end after this many minutes and report what is done"
    )
    options = parser.parse_args(argv)
    report = soak(options.days, options.seed, max(1, options.cores), options.minutes)
    REPORT.parent.mkdir(exist_ok=True)
    REPORT.write_text(json.dumps(report, indent=2) + "\n")
    measured = list(report["figures"])  # type: ignore[call-overload]
    results = {"machine": table.machine(), "figures": table.merged(table.known(table.RESULTS), measured)}
    table.RESULTS.write_text(json.dumps(results, indent=2) + "\n")
    print(table.table(measured))
    for what in report["told"]:  # type: ignore[attr-defined]
        print(what)
    print(
        f"{report['virtual_days']} virtual days ({report['machine_days']} machine-days), {report['runs']} runs, "
        f"{report['launches']} launches: {report['violations']} violations, {report['left_over']} left over, "
        f"{report['duplicates']} duplicates; {report['took_s']} s on {report['cores']} cores"
    )
    return 1 if report["violations"] or report["left_over"] else 0


if __name__ == "__main__":
    sys.exit(main())
