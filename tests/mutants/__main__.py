"""``make mutants``: small faults put into the code one at a time, each against the tests that reach it.

``--seed 1 2 3 --sample 200`` draws a sample for each seed, uniformly over all mutants of the areas; the same seed
draws the same sample on the same tree, and a smaller one is the beginning of a larger. ``--minutes`` ends early; the
next run goes on there. Writes ``.spotkeeper/mutants.json`` after each mutant.

A mutant is killed if a test fails or takes three times as long as recorded. A survivor is either a hole in the tests
or changes nothing that matters: then ``equivalent.toml`` says why.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.mutants import areas, reach
from tests.mutants.lane import Lane, copy_tree
from tests.mutants.reach import Reach, code, digest

if TYPE_CHECKING:
    from tests.mutants.operators import Mutant

ROOT = Path(__file__).parents[2]
OUT = ROOT / ".spotkeeper" / "mutants.json"
RECORDS = ROOT / ".spotkeeper" / "reach"
EQUIVALENT = Path(__file__).with_name("equivalent.toml")
LANES = 2
BUDGET_S = 60.0  # of tests for one mutant, by their recorded times
SLACK_S = 10.0
ALONE_S = 60.0  # more for a process of its own
SAVES = threading.Lock()
Json = dict[str, Any]


def main() -> int:
    from tests.mutants.operators import mutants

    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__)
    parser.add_argument("--seed", type=int, nargs="+", default=[1], help="one sample for each")
    parser.add_argument("--sample", type=int, default=200, help="mutants in a sample")
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no mutant after so many")
    parser.add_argument("--area", action="append", default=[], choices=list(areas.AREAS), help="default: all")
    parser.add_argument("--record", action="store_true", help="record anew which tests reach which line")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the workers end, too
    until = time.monotonic() + 60 * options.minutes
    if options.record:
        shutil.rmtree(RECORDS, ignore_errors=True)
    with lanes() as (tree, workers):
        files = areas.sources(tree, options.area)
        everything = [mutant for file in files for mutant in mutants(file, (tree / file).read_text("utf-8"))]
        samples = {seed: drawn(everything, seed, options.sample) for seed in options.seed}
        print(f"{len(everything)} mutants in {len(files)} files", flush=True)
        records = Reach(tree, RECORDS, options.area)
        record(workers, records, until)
        if left := records.outdated():
            print(f"time is up: the next run records the other {len(left)} files of tests first")
            return 0
        records.load()
        known = Verdicts(tree, options.area)
        try:
            run(workers, records, known, [one for sample in samples.values() for one in sample], until)
        finally:
            report = written(samples, known, files, len(everything), options.area)
    told(report)
    return 0


def drawn(everything: list[Mutant], seed: int, size: int) -> list[Mutant]:
    order = list(range(len(everything)))
    random.Random(seed).shuffle(order)  # noqa: S311 - a sample
    return [everything[at] for at in order[:size]]


@contextmanager
def lanes() -> Iterator[tuple[Path, list[Lane]]]:
    """A copy of the tree, which may change meanwhile, and workers with a copy each; all of it ends with the block."""
    folder = Path(tempfile.mkdtemp(prefix="mutants"))
    folder.chmod(0o755)  # some tests work as another user
    workers: list[Lane] = []
    try:
        tree = folder / "tree"
        copy_tree(ROOT, tree)
        workers += [Lane(ROOT, folder / str(number)) for number in range(LANES)]
        yield tree, workers
    finally:
        for lane in workers:
            lane.kill()
        shutil.rmtree(folder, ignore_errors=True)


def spread(workers: list[Lane], things: list[Any], work: Callable[[Lane, Any], None], until: float) -> None:
    """Give every thing to whichever worker is free."""
    left, lock, errors = iter(things), threading.Lock(), list[BaseException]()

    def loop(lane: Lane) -> None:
        try:
            while not errors and time.monotonic() < until:
                with lock:
                    thing = next(left, None)
                if thing is None:
                    return
                work(lane, thing)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=loop, args=(lane,)) for lane in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


# -- what reaches what


def record(workers: list[Lane], records: Reach, until: float) -> None:
    files = records.outdated()
    if not files:
        return
    print(f"recording what {len(files)} files of tests reach", flush=True)
    ready: list[Json] = []
    spread(workers, [files] * len(workers), lambda lane, each: ready.append(lane.start(each, record=True)), math.inf)
    records.keep_imported(ready[0]["imported"], workers[0].folder)

    def one(lane: Lane, test: str) -> None:
        request = {"record": test, "until_s": reach.FILE_S, "limit_s": 3 * reach.FILE_S}
        runs = [lane.ask(request | {"lines": lines}) for lines in (True, False)]
        if all("outcomes" in each for each in runs):
            kept = reach.record(*runs)
        else:
            kept = {"tests": [], "seconds": {}, "lines": {}, "dropped": [test], "left_out": 0}
        records.keep(test, kept, lane.folder)
        names = "".join(f"\n  left out: {name}" for name in kept["dropped"])
        more = f", {kept['left_out']} more left out" if kept["left_out"] else ""
        print(f"{test}: {len(kept['tests'])} tests, {sum(kept['seconds'].values()):.0f} s{more}{names}", flush=True)

    spread(workers, files, one, until)


# -- the mutants


class Verdicts:
    """What became of mutants, also in earlier runs.

    A kill stays valid while the code of the mutated file and of the file of the test that killed it is unchanged, a
    survival while no test has changed. Comments and docstrings may change.
    """

    def __init__(self, tree: Path, names: Sequence[str] = ()) -> None:
        self._tree = tree
        try:
            self.known: dict[str, Json] = json.loads(OUT.read_text())["verdicts"]
        except (OSError, ValueError, KeyError):
            self.known = {}
        self._tests = digest(tree, areas.tests(tree, names), code)
        rows = tomllib.loads(EQUIVALENT.read_text("utf-8")).get("equivalent", ())
        self.equivalent = {(row["file"], row["function"], row["diff"].strip()): row["reason"] for row in rows}

    def reason(self, mutant: Mutant) -> str | None:
        """Why it is equivalent."""
        return self.equivalent.get((mutant.file, mutant.function, mutant.diff.strip()))

    def of(self, mutant: Mutant) -> Json | None:
        verdict = self.known.get(mutant.key)
        return verdict if verdict is not None and verdict["valid"] == self._valid(mutant, verdict["by"]) else None

    def add(self, mutant: Mutant, verdict: Json) -> None:
        self.known[mutant.key] = verdict | {"valid": self._valid(mutant, verdict["by"])}

    def _valid(self, mutant: Mutant, by: str) -> str:
        test = by.partition("::")[0]
        if by and (self._tree / test).is_file():
            return digest(self._tree, [mutant.file, test], code)
        return digest(self._tree, [mutant.file], code) + self._tests


def run(workers: list[Lane], records: Reach, known: Verdicts, sample: Iterable[Mutant], until: float) -> None:
    todo = {one.key: one for one in sample if known.reason(one) is None and known.of(one) is None}
    if not todo:
        return
    plans = {key: planned(records, one) for key, one in todo.items()}
    files = sorted({name.partition("::")[0] for tests, _ in plans.values() for name in tests})
    print(f"{len(todo)} mutants to try, against tests of {len(files)} files", flush=True)
    spread(workers, [files] * len(workers), lambda lane, each: void(lane.start(each, record=False)), math.inf)
    done = 0

    def one(lane: Lane, mutant: Mutant) -> None:
        nonlocal done
        verdict = tried(lane, records, mutant, *plans[mutant.key])
        known.add(mutant, verdict)
        done += 1
        what = f"killed by {verdict['by']}" if verdict["by"] else "SURVIVED"
        print(f"{done}/{len(todo)} {mutant.file} {mutant.function}: {what}, {verdict['seconds']:.1f} s", flush=True)
        save({"verdicts": known.known})

    spread(workers, list(todo.values()), one, until)


def void(_: object) -> None:
    pass


def planned(records: Reach, mutant: Mutant) -> tuple[list[str], int]:
    """Return the tests that a mutant meets, and how many its budget leaves out: those of other folders first."""
    tests = records.tests(mutant.file, mutant.first, mutant.last)
    spent, met = 0.0, set[str]()
    for name in sorted(tests, key=lambda name: -areas.nearness(mutant.file, name)):
        if spent + records.seconds[name] <= BUDGET_S:
            spent += records.seconds[name]
            met.add(name)
    return [name for name in tests if name in met], len(tests) - len(met)


def tried(lane: Lane, records: Reach, mutant: Mutant, tests: list[str], left_out: int) -> Json:
    verdict: Json = {"by": "", "tests": len(tests), "left_out": left_out, "seconds": 0.0}
    if tests:
        alone = mutant.signature or records.imported(mutant.file, mutant.first, mutant.last)
        limit_s = 3 * sum(records.seconds[name] for name in tests) + SLACK_S + ALONE_S * alone
        request = {"file": mutant.file, "source": mutant.source, "mutated": mutant.mutated, "tests": tests}
        answer = lane.ask(request | {"limit_s": limit_s, "alone": alone})
        verdict["seconds"] = round(answer["seconds"], 2)
        # A child that ended without an answer was ended by the mutant.
        verdict["by"] = "time" if answer["timeout"] else "exit" if answer["failed"] is None else answer["failed"]
    return verdict


# -- the report


def save(values: Json) -> None:
    with SAVES:  # each lane has a thread
        OUT.parent.mkdir(exist_ok=True)
        try:
            before = json.loads(OUT.read_text())
        except (OSError, ValueError):
            before = {}
        part = OUT.with_suffix(".part")
        part.write_text(json.dumps(before | values, indent=1) + "\n")
        part.replace(OUT)


def written(
    samples: dict[int, list[Mutant]], known: Verdicts, files: dict[str, str], population: int, areas_: list[str]
) -> Json:
    rows = [_row(seed, sample, known, files) for seed, sample in samples.items()]
    tried_, killed = (sum(row[name] for row in rows) for name in ("tried", "killed"))
    report = {
        "areas": areas_ or list(areas.AREAS),
        "mutants": population,
        "tried": tried_,
        "killed": killed,
        "killed_percent": _percent(killed, tried_),
        "samples": rows,
        "verdicts": known.known,
    }
    save(report)
    return report


def _row(seed: int, sample: list[Mutant], known: Verdicts, files: dict[str, str]) -> Json:
    equal = [(one, reason) for one in sample if (reason := known.reason(one)) is not None]
    found = [(one, verdict) for one in sample if known.reason(one) is None and (verdict := known.of(one)) is not None]
    living = [(one, verdict) for one, verdict in found if not verdict["by"]]
    return {
        "seed": seed,
        "sample": len(sample),
        "tried": len(found),
        "killed": len(found) - len(living),
        "killed_percent": _percent(len(found) - len(living), len(found)),
        "seconds": round(sum(verdict["seconds"] for _, verdict in found), 1),
        "survivors": [
            {**_named(one, files), "tests": verdict["tests"], "left_out": verdict["left_out"]}
            for one, verdict in living
        ],
        "equivalent": [{**_named(one, files), "reason": reason} for one, reason in equal],
    }


def _named(mutant: Mutant, files: dict[str, str]) -> Json:
    return {
        "area": files[mutant.file],
        "file": mutant.file,
        "function": mutant.function,
        "line": mutant.first,
        "diff": mutant.diff,
    }


def _percent(part: int, whole: int) -> float | None:
    return round(100 * part / whole, 1) if whole else None


def told(report: Json) -> None:
    for row in report["samples"]:
        for each in row["survivors"]:
            met = f"survives {each['tests']} tests" if each["tests"] else "no test reaches it"
            print(f"\n{each['file']}:{each['line']} {each['function']}: {met}\n{each['diff']}")
        print(
            f"\nseed {row['seed']}: {row['killed']} of {row['tried']} killed ({row['killed_percent']} %), "
            f"{len(row['equivalent'])} equivalent, of {row['sample']}"
        )


if __name__ == "__main__":
    sys.exit(main())
