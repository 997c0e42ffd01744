"""Ctrl-C during ``make demo`` leaves nothing behind, and the next run starts cleanly."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import pytest

from spotkeeper.local.core import procs
from spotkeeper.local.core.world import Config
from spotkeeper.local.demo.chaos import ticks
from tests.sizes import WHOLE

pytestmark = pytest.mark.lifecycle

PATIENCE_S = 90.0
END_S = 45.0  # from Ctrl-C to the end of the process
INTERRUPTED = 130


class Demo:
    """A run of the demo, in a session of its own as a terminal's foreground job is in a group of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        command = [sys.executable, "-m", "spotkeeper.local.demo", "--folder", str(folder), "--engine", "in-process"]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(self.process.stdout)  # one by one, as they come

    def says(self, words: str, *, more: int = 0) -> None:
        """Wait for a line with these words and for so many more after it."""
        for _ in ticks(PATIENCE_S, 0.02):
            found = next((at for at, line in enumerate(self.lines) if words in line), None)
            if found is not None and len(self.lines) > found + more:
                return
            assert self.process.poll() is None, self.text()
        raise AssertionError(f"waited {PATIENCE_S:.0f} s for {words!r}\n{self.text()}")

    def text(self) -> str:
        return "".join(self.lines[-60:])

    def cloud_uid(self) -> str:
        """The settings of its cloud, as soon as they exist."""
        path = self.folder / "cloud" / "cloud.json"
        for _ in ticks(PATIENCE_S, 0.002):
            with suppress(FileNotFoundError, msgspec.DecodeError):
                return msgspec.json.decode(path.read_bytes(), type=Config).uid
            assert self.process.poll() is None, self.text()
        raise AssertionError(f"waited {PATIENCE_S:.0f} s for {path}\n{self.text()}")

    def interrupt(self) -> int:
        """Ctrl-C; the exit code."""
        os.killpg(self.process.pid, signal.SIGINT)
        code = self.process.wait(END_S)
        self._reader.join(5)
        return code


@contextmanager
def demo(folder: Path) -> Iterator[Demo]:
    """Kill the run's processes after the test."""
    run = Demo(folder)
    uids: set[str] = set()
    try:
        uids.add(run.cloud_uid())
        yield run
    finally:
        if run.process.poll() is None:
            run.process.kill()
            run.process.wait()
        for uid in uids:
            procs.kill_all(procs.mark(procs.CLOUD, uid))


def test_ctrl_c_leaves_nothing_and_the_next_run_begins_cleanly(tmp_path: Path) -> None:
    with demo(tmp_path / "demo") as first:
        ended_well(first)  # its cloud is just coming up
    with demo(tmp_path / "demo") as second:
        second.says("pulumi up", more=12)
        assert "submit a job" not in second.text(), "it is in the middle of pulumi up"
        ended_well(second)
    if WHOLE:
        with demo(tmp_path / "demo") as third:
            third.says("generation 1 trains")
            ended_well(third)


def ended_well(run: Demo) -> None:
    uid = run.cloud_uid()
    assert run.interrupt() in (INTERRUPTED, -signal.SIGINT), run.text()  # one thing to a shell; CPython picks
    left = {pid: cmdline(pid) for pid in procs.marked(procs.mark(procs.CLOUD, uid))}
    assert not left, left
    assert "Traceback" not in run.text(), run.text()
    assert not (run.folder / "cloud").exists()


def cmdline(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return "(gone)"
