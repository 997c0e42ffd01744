"""The whole matrix, ``python -m tests.train.crash`` (``make crash``); fails if a row is wrong.

Prints a table, and writes ``.spotkeeper/crash.json``. Crashes that a bound in time left out are
counted there; what is wrong keeps its folder, to be looked at.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from tests.train.crash import fiu, flips, handover, images, peers, plan, refusals, rivals
from tests.train.crash.gang import NODES, Cell, Outcome, crash
from tests.train.crash.points import KILL

OUT = Path(__file__).parents[3] / ".spotkeeper" / "crash.json"
MINUTES = 20.0
PARTS = ("flips", "rivals", "fiu", "refusals", "images", "handovers", "peers", "cells")
REFUSAL_POINTS = 6  # of each kind, in each slot


@dataclass
class Row:
    """One line of the table. ``found``: how often what was the case; ``skipped``: why it was not tried."""

    what: str
    tried: int = 0
    planned: int = 0
    found: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    skipped: str = ""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Crash saves at every point, and see what loads.")
    parser.add_argument("--seed", type=int, default=0, help="of the order")
    parser.add_argument("--jobs", type=int, default=min(4, len(os.sched_getaffinity(0))), help="at once")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="no crash begins after these")
    parser.add_argument("--part", choices=PARTS, action="append", help="only this one; may be repeated")
    options = parser.parse_args(argv)
    began = time.monotonic()
    root = Path(tempfile.mkdtemp(prefix="crash-", dir=os.environ.get("TMPDIR")))
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool, Progress() as progress:
        run = _Run(pool, progress, root, began + options.minutes * 60)
        parts: dict[str, Callable[[], Iterable[Row]]] = {
            "flips": run.flips,
            "rivals": run.rivals,
            "fiu": run.fiu,
            "refusals": run.refusals,
            "images": run.images,
            "handovers": run.handovers,
            "peers": run.peers,
            "cells": partial(run.cells, options.seed),
        }
        rows = [row for part in options.part or PARTS for row in parts[part]()]
    Console().print(_table(rows))
    _write(rows, run.points, options.seed, time.monotonic() - began)
    wrong = [line for row in rows for line in row.wrong]
    for line in wrong[:20]:
        print(line, file=sys.stderr)
    if not wrong:
        shutil.rmtree(root)
    return 1 if wrong else 0


class _Run:
    """All parts of the matrix, one after the other, each of them in all processes."""

    def __init__(self, pool: ProcessPoolExecutor, progress: Progress, root: Path, end: float) -> None:
        self._pool, self._progress, self._root, self._end = pool, progress, root, end
        self.points: dict[str, int] = {}

    def flips(self) -> Iterator[Row]:
        prepared = {world: self._root / f"whole{world}" for world in NODES}
        list(self._pool.map(flips.prepare, prepared.values(), prepared))
        for world in NODES:
            every = [flip for flip in flips.flips() if flip.world == world]
            tasks = [(prepared[world], self._root / f"flip{world}-{n}", flip) for n, flip in enumerate(every)]
            yield self._row(f"a flipped byte, {_ranks(world)}", flips.try_flip, tasks)

    def rivals(self) -> list[Row]:
        points = self._pool.submit(rivals.survey, self._root / "rivals").result()
        tasks = [(self._root / f"rival{point}", point) for point in range(1, points + 1)]
        row = self._row("two generations at once", rivals.meet, tasks)
        row.wrong += self._pool.submit(_safely, rivals.one_saver, self._root / "one").result()
        return [row]

    def fiu(self) -> list[Row]:
        tasks = [(self._root / f"fiu{number}", fault) for number, fault in enumerate(fiu.FAULTS)]
        if not fiu.installed():
            return [Row("errors by libfiu", 0, len(tasks), skipped=fiu.MISSING)]
        return [self._row("errors by libfiu", fiu.hurt, tasks)]

    def refusals(self) -> Iterator[Row]:
        for slot in refusals.SLOTS:
            names = self._pool.submit(refusals.survey, self._root / f"refusals-{slot}", slot).result()
            for world in refusals.WORLDS:
                cells = list(refusals.cells(world, slot, names, REFUSAL_POINTS))
                for what, why in {cell.what: why for cell in cells if (why := refusals.missing(cell.what))}.items():
                    planned = sum(cell.what == what for cell in cells)
                    yield Row(f"{what} refused, {_ranks(world)}, {slot}", 0, planned, skipped=why)
                can = [cell for cell in cells if not refusals.missing(cell.what)]
                tasks = [(self._root / f"refused-{slot}-{world}-{number}", cell) for number, cell in enumerate(can)]
                yield self._row(f"a save is refused something, {_ranks(world)}, {slot}", refusals.refuse, tasks)

    def images(self) -> Iterator[Row]:
        for world, cells in self._pool.submit(images.whole, self._root).result().items():
            tasks = [(self._root / f"image{world}-{number}", cell) for number, cell in enumerate(cells)]
            yield self._row(f"a kill or an error at an image, {_ranks(world)}", images.attack, tasks)

    def handovers(self) -> Iterator[Row]:
        for world, cells in self._pool.submit(handover.whole, self._root).result().items():
            tasks = [(self._root / f"handover{world}-{number}", cell) for number, cell in enumerate(cells)]
            yield self._row(f"a kill at a hand-over, {_ranks(world)}", handover.attack, tasks)

    def peers(self) -> Iterator[Row]:
        for (world, nodes), cells in self._pool.submit(peers.whole, self._root).result().items():
            tasks = [(self._root / f"peers{world}-{nodes}-{number}", cell) for number, cell in enumerate(cells)]
            what = f"a loss at an image of sharded state, {_ranks(world)}, {nodes} machines"
            yield self._row(what, peers.attack, tasks)

        cuts = [(self._root / f"cut{world}-{nodes}", world, nodes) for world, nodes in peers.SIZES]
        yield self._row("a cut link at an image of sharded state", peers.cut, cuts)

    def cells(self, seed: int) -> list[Row]:
        cells, self.points = self._pool.submit(plan.whole, seed, self._root / "points").result()
        rows = {name: Row(name, planned=count) for name, count in sorted(Counter(map(_name, cells)).items())}
        bar = self._progress.add_task("kills and errors", total=len(cells))
        for outcome in self._pool.map(_cell, *zip(*self._dated(cells), strict=True)):
            self._progress.advance(bar)
            if outcome is not None:
                _note(rows[_name(outcome.cell)], outcome)
        return list(rows.values())

    def _dated(self, cells: list[Cell]) -> list[tuple[Path, Cell, float]]:
        end = time.time() + self._end - time.monotonic()
        return [(self._root / f"cell{number}", cell, end) for number, cell in enumerate(cells)]

    def _row(self, what: str, call: Callable[..., list[str]], tasks: list[tuple[object, ...]]) -> Row:
        row = Row(what, len(tasks), len(tasks))
        bar = self._progress.add_task(what, total=len(tasks))
        for task, wrong in zip(tasks, self._pool.map(partial(_safely, call), *zip(*tasks, strict=True)), strict=True):
            row.wrong += [f"{task[-1]}: {line}" for line in wrong]
            row.found["as it must"] += not wrong
            self._progress.advance(bar)
        return row


def _cell(root: Path, cell: Cell, end: float) -> Outcome | None:
    """None: the time was up."""
    if time.time() > end:
        return None
    try:
        return crash(root, cell)
    except Exception as error:  # of the test itself: one row is wrong, and the others go on
        return Outcome(cell, "", "nothing", (f"{type(error).__name__}: {error}",), 0)


def _safely(call: Callable[..., list[str]], *args: object) -> list[str]:
    try:
        return call(*args)
    except Exception as error:
        return [f"{type(error).__name__}: {error}"]


def _name(cell: Cell) -> str:
    if cell.what != KILL:
        return f"{cell.what} on a disk, {_ranks(cell.world)}"
    return f"kill -9 of a {cell.victim.what}, {_ranks(cell.world)}, {cell.slot}"


def _ranks(world: int) -> str:
    return "1 rank" if world == 1 else f"{world} ranks"


def _note(row: Row, outcome: Outcome) -> None:
    row.tried += 1
    row.found[f"loads {outcome.loaded}"] += 1
    row.found["told"] += outcome.skipped
    row.found["died or failed"] += bool(outcome.where)
    row.wrong += [f"{outcome.cell} at {outcome.where!r}: {line}" for line in outcome.wrong]


def _table(rows: list[Row]) -> Table:
    table = Table("what", "tried", "of", "found", "wrong")
    for row in rows:
        found = row.skipped or ", ".join(f"{name} {count}" for name, count in sorted(row.found.items()) if count)
        table.add_row(row.what, str(row.tried), str(row.planned), found, str(len(row.wrong)))
    total = (sum(row.tried for row in rows), sum(row.planned for row in rows), sum(len(row.wrong) for row in rows))
    table.add_row("all", str(total[0]), str(total[1]), "", str(total[2]))
    return table


def _write(rows: list[Row], points: dict[str, int], seed: int, seconds: float) -> None:
    OUT.parent.mkdir(exist_ok=True)
    body = {
        "seed": seed,
        "seconds": round(seconds),
        "tried": sum(row.tried for row in rows),
        "planned": sum(row.planned for row in rows),
        "wrong": sum(len(row.wrong) for row in rows),
        "points_of_a_save": points,
        "rows": [vars(row) for row in rows],
    }
    OUT.write_text(json.dumps(body, indent=1) + "\n")
    print(OUT)
