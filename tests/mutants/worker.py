"""``python -m tests.mutants.worker``: pytest that has collected its tests and then forks for every request.

Imports and collection take half a minute, so they happen once. The child puts the mutant into the functions that exist
already; whatever is imported later, and every process that a test starts, reads it from the file. Requests and answers
are lines of JSON on two inherited descriptors.
"""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import coverage
import pytest

from tests.mutants import areas

ROOT = Path.cwd()
SUBREAPER = 36  # prctl(2): orphans of a test become children of this process
OPTIONS = ("-p", "no:cacheprovider", "-p", "no:xdist")
FIXTURE = "fixture "  # and its name: what runs in the set-up of a fixture of many tests
Json = dict[str, Any]
Reached = dict[str, dict[int, list[str]]]  # file -> line -> who reaches it


class Worker:
    def __init__(self, requests: int, answers: int, recorder: coverage.Coverage | None) -> None:
        self._requests, self._answers = os.fdopen(requests), os.fdopen(answers, "w")
        self._recorder = recorder
        self._reports: list[pytest.TestReport] = []
        self._context = ""  # to which lines that run now are attributed
        self._temporary = ROOT / ".t"  # short, since sockets' paths are below it
        self._count = 0

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        imported: dict[str, dict[int, list[str]]] = {}
        if self._recorder is not None:
            imported = self._stop_recording()
        self._items = {item.nodeid: item for item in session.items}
        self._answer({"ready": len(session.items), "imported": {file: list(lines) for file, lines in imported.items()}})
        gc.freeze()
        for line in self._requests:
            self._answer(self._serve(json.loads(line)))
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._reports.append(report)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Iterator[Any]:
        """What a fixture of many tests reaches, all of them reach, not only the first."""
        before = self._context
        if not before or fixturedef.scope == "function":
            return (yield)
        self._enter(FIXTURE + fixturedef.argname)
        try:
            return (yield)
        finally:
            self._enter(before)

    def _enter(self, context: str) -> None:
        assert self._recorder is not None
        self._context = context
        self._recorder.switch_context(context)

    # -- the parent

    def _answer(self, answer: Json) -> None:
        self._answers.write(json.dumps(answer) + "\n")
        self._answers.flush()

    def _serve(self, request: Json) -> Json:
        """Run the request in a child; end whatever it leaves."""
        self._count += 1
        folder = self._temporary / str(self._count)
        folder.mkdir(parents=True)
        result = folder / "result"
        began = time.monotonic()
        original = _write(request)
        try:
            pid = os.fork()
            if pid == 0:
                self._child(request, folder, result)
            ended = _ended(pid, request["limit_s"])
            _kill_children()
            answer: Json = json.loads(result.read_text()) if result.exists() else {"failed": None}
        finally:
            if original is not None:
                _replace(ROOT / request["file"], original)
        answer |= {"timeout": not ended, "seconds": time.monotonic() - began}
        shutil.rmtree(folder, ignore_errors=True)
        return answer

    # -- the child

    def _child(self, request: Json, folder: Path, result: Path) -> None:
        try:
            os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
            answer = self._work(request)
            (folder / "part").write_text(json.dumps(answer))
            (folder / "part").rename(result)
        except BaseException:
            traceback.print_exc(file=sys.__stderr__)
        finally:
            os._exit(0)

    def _work(self, request: Json) -> Json:
        if request.get("alone"):
            return _alone(request)
        if "mutated" in request and not _swap(ROOT / request["file"], request["source"], request["mutated"]):
            return _alone(request)
        if "record" in request:
            items = [item for name, item in self._items.items() if name.partition("::")[0] == request["record"]]
            return self._record(items, request["until_s"], lines=request["lines"])
        items = [self._items[name] for name in request["tests"] if name in self._items]
        for item, after in zip_longest(items, items[1:]):
            if self._run(item, after)[0] == "failed":
                return {"failed": item.nodeid}
        return {"failed": "", "ran": len(items)}

    def _run(self, item: pytest.Item, after: pytest.Item | None) -> tuple[str, float]:
        self._reports.clear()
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
        outcomes = {report.outcome for report in self._reports}
        outcome = "failed" if "failed" in outcomes else "skipped" if "skipped" in outcomes else "passed"
        return outcome, sum(report.duration for report in self._reports)

    def _record(self, items: list[pytest.Item], until_s: float, *, lines: bool) -> Json:
        """How each test ends and how long it takes; ``lines``: also which lines it reaches."""
        recorder, began = self._recorder, time.monotonic()
        assert recorder is not None
        outcomes = {}
        if lines:
            recorder.start()
        for item, after in zip_longest(items, items[1:]):
            if time.monotonic() > began + until_s:
                break
            if lines:
                self._enter(item.nodeid)
            outcomes[item.nodeid] = self._run(item, after)
        reached = with_users(self._stop_recording(), items) if lines else {}
        self._context = ""
        return {"outcomes": outcomes, "lines": reached, "left_out": len(items) - len(outcomes)}

    def _stop_recording(self) -> Reached:
        assert self._recorder is not None
        self._recorder.stop()
        data = self._recorder.get_data()
        found = {
            str(Path(file).relative_to(ROOT)): {line: [name for name in names if name] or [""] for line, names in lines}
            for file in data.measured_files()
            for lines in [data.contexts_by_lineno(file).items()]
        }
        self._recorder.erase()
        return found


def with_users(reached: Reached, items: Sequence[pytest.Item]) -> Reached:
    """Put the tests that use a fixture in its place."""
    users: dict[str, list[str]] = {}
    for item in items:
        for name in getattr(item, "fixturenames", ()):
            users.setdefault(FIXTURE + name, []).append(item.nodeid)

    def expanded(names: list[str]) -> list[str]:
        return sorted({user for name in names for user in users.get(name, [name])})

    return {file: {line: expanded(names) for line, names in found.items()} for file, found in reached.items()}


def _alone(request: Json) -> Json:
    """Run the tests in a new process, for code that runs when it is imported."""
    listed = Path(tempfile.gettempdir()) / "tests"
    listed.write_text("\n".join(request["tests"]))
    command = [sys.executable, "-m", "pytest", "-x", *OPTIONS, f"@{listed}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    failed = [line.split(" ")[1] for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return {"failed": failed[0] if failed else "collection" if done.returncode else "", "alone": True}


def _write(request: Json) -> str | None:
    if "mutated" not in request:
        return None
    _replace(ROOT / request["file"], request["mutated"])
    source: str = request["source"]
    return source


def _replace(path: Path, source: str) -> None:
    path.write_text(source)
    Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)  # it may have the same size and second


def _swap(path: Path, source: str, mutated: str) -> bool:
    """Put the mutant's code into the live functions; return whether that can be done."""
    pairs = _pairs(compile(source, str(path), "exec"), compile(mutated, str(path), "exec"))
    codes = {(old.co_qualname, old.co_firstlineno): new for old, new in pairs}
    gc.unfreeze()
    for function in gc.get_objects():
        if type(function) is FunctionType and function.__code__.co_filename == str(path):
            code = function.__code__
            try:
                function.__code__ = codes[code.co_qualname, code.co_firstlineno]
            except (KeyError, ValueError):  # ValueError: it refers to other variables of the function around it
                return False
    return True


def _pairs(old: CodeType, new: CodeType) -> Iterator[tuple[CodeType, CodeType]]:
    yield old, new
    within, other = ([const for const in code.co_consts if isinstance(const, CodeType)] for code in (old, new))
    if [code.co_name for code in within] == [code.co_name for code in other]:
        for one, two in zip(within, other, strict=True):
            yield from _pairs(one, two)


# -- processes


def _ended(pid: int, limit_s: float) -> bool:
    """Wait for a child; whether it ended in time."""
    descriptor = os.pidfd_open(pid)
    try:
        return bool(select.select([descriptor], [], [], limit_s)[0])
    finally:
        os.close(descriptor)


def _kill_children() -> None:
    """Kill all that descends from this process. Killing one hands its children to this process."""
    while pids := _children():
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        for pid in pids:
            os.waitpid(pid, 0)


def _children() -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            pid, _, rest = stat.read_text().partition(" (")
        except OSError:
            continue
        if int(rest.rpartition(") ")[2].split()[1]) == os.getpid():
            found.append(int(pid))
    return found


def _terminated(*_: object) -> None:
    _kill_children()
    os._exit(1)


def main() -> None:
    requests, answers, record, *files = sys.argv[1:]
    ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGTERM, _terminated)
    recorder = None
    if record == "record":
        include = [str(ROOT / file) for file in areas.sources(ROOT, [])]
        recorder = coverage.Coverage(
            data_file=None, include=include, concurrency=["thread", "greenlet"], config_file=False
        )
        recorder.start()
    pytest.main(["-q", *OPTIONS, *files], plugins=[Worker(int(requests), int(answers), recorder)])


if __name__ == "__main__":
    main()
