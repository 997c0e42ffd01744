"""What closes a run of all tests, however many processes they ran in."""

from __future__ import annotations

import gc
import json
import logging
import os
from collections import Counter, defaultdict
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.security.tally import TALLY
from tests.sizes import size

# Torch imports it once. On models this small its threads mostly wait for each other, which costs three times as much.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Seconds of the longest files: begun first, they do not run alone at the end, when other processes have no file left.
# `SPOTKEEPER_TESTS_RECORD=1 make test` records them anew.
RECORDED = Path(__file__).parent / "durations.json"
LEAST_S = 3.0  # of a file that is recorded
WAITING = "lifecycle"  # whole runs, which wait more than they compute
LANES = size(2, 4)  # processes that have these files: each starts a cloud of its own, which computes until the end
# Other files that share a process: each process that imports both providers' SDKs takes seconds to do so.
# So does each that has imported torch for a server of forks (tests/train/forks.py).
TOGETHER = {
    "pulumi": ("infra/", "local/deploy/", "cli/stacks/test_plan.py"),
    "loop": ("train/loop/",),
    "checkpoint": ("train/checkpoint/", "train/core/", "train/crash/"),
}
RARELY = 50_000, 20, 100  # as gc.set_threshold has them
QUIET = {"sim", "properties", "scale"}  # a function that fails thousands of times: formatting tracebacks takes 15 %
HERE = Path(__file__).parent


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """``-n logical``: one for each core. ``auto``: two and one more, as tests of whole machines wait; five at most."""
    cores = len(os.sched_getaffinity(0))
    return min(5, cores if config.getoption("numprocesses") == "logical" else 2 * cores + 1)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Modules and tests live as long as the process: the garbage collector need not look at them again and again.

    Tests make little garbage with cycles, and import much: collections as often as by default take a sixth of the time.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(*RARELY)
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    seconds = _recorded()
    taken: defaultdict[str, float] = defaultdict(float)
    for path in files:
        taken[_lane(_name(path))] += seconds.get(_name(path), 0.0)

    def key(path: Path) -> tuple[bool, float, float]:
        return _folder(path) != WAITING, -taken[_lane(_name(path))], -seconds.get(_name(path), 0.0)

    longest = sorted(files, key=key)
    items[:] = [item for path in longest for item in files[path]]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """``--dist loadfile``, but the files of whole runs share :data:`LANES` processes, and ``TOGETHER`` one."""
    from xdist.scheduler import LoadFileScheduling

    lanes = _lanes()

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = str(super()._split_scope(nodeid)).removeprefix("tests/")
            return lanes.get(file) or _lane(file)

    return Scheduling(config, log) if config.getoption("dist") == "loadfile" else None


def _lanes() -> dict[str, str]:
    """The files of whole runs -> their lane; the lanes take about as long as each other."""
    seconds, lanes, taken = _recorded(), {}, [0.0] * LANES
    files = {_name(path): seconds.get(_name(path), 0.0) for path in sorted((HERE / WAITING).glob("test_*.py"))}
    for file in sorted(files, key=lambda file: -files[file]):
        lane = taken.index(min(taken))
        taken[lane] += files[file] or LEAST_S
        lanes[file] = f"{WAITING}-{lane}"
    return lanes


def _lane(file: str) -> str:
    """What shares a process with this file, other than whole runs; the file itself if nothing does."""
    return next((lane for lane, places in TOGETHER.items() if file.startswith(places)), file)


def _recorded() -> dict[str, float]:
    found: dict[str, float] = json.loads(RECORDED.read_text())
    return found


def _folder(path: Path) -> str:
    return path.relative_to(HERE).parts[0] if path.is_relative_to(HERE) else ""


def _name(path: Path) -> str:
    return path.relative_to(HERE).as_posix() if path.is_relative_to(HERE) else ""


def pytest_sessionfinish(session: pytest.Session) -> None:
    """One of several processes hands over what it has counted."""
    output: dict[str, object] | None = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["tally"] = TALLY.told()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    TALLY.add(getattr(node, "workeroutput", {}).get("tally"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if os.environ.get("SPOTKEEPER_TESTS_RECORD"):
        _record(report for each in terminalreporter.stats.values() for report in each)
    if TALLY.classes or TALLY.bodies.sent:
        from tests.security.table import TABLE

        terminalreporter.write_line(TALLY.line())
        terminalreporter.write_line(TALLY.write(len(TABLE)))


def _record(reports: Iterable[object]) -> None:
    seconds: Counter[str] = Counter()
    for report in reports:
        if isinstance(report, pytest.TestReport):
            seconds[report.nodeid.partition("::")[0].removeprefix("tests/")] += report.duration
    long = {file: round(spent, 1) for file, spent in sorted(seconds.items()) if spent >= LEAST_S}
    RECORDED.write_text(json.dumps(long, indent=2) + "\n")


@pytest.fixture(autouse=True)
def _every_logger_speaks(request: pytest.FixtureRequest) -> None:
    """Libraries that set logging up, and tests of ours, may silence loggers for all that run after them here."""
    logging.disable(logging.CRITICAL if _folder(request.path) in QUIET else logging.NOTSET)
    for name, logger in logging.root.manager.loggerDict.items():
        if name.partition(".")[0] == "spotkeeper" and isinstance(logger, logging.Logger):
            logger.disabled, logger.propagate = False, True
            if name != "spotkeeper":
                logger.setLevel(logging.NOTSET)
