"""Keeps the control plane running: starts it, waits for its end without polling, restarts it.

    python -m spotkeeper.local.lifecycle.keeper <folder>

A real cloud's control plane survives by redundancy, this one by the keeper. A SIGTERM to the keeper also ends the
control plane. The keeper imports only the standard library, so it needs only 10 MB of memory.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

from spotkeeper.local.core import procs

AGAIN_S = 0.1
LONGEST_S = 5.0
STEADY_S = 5.0
PID_FILE = "server.pid"


class ControlPlaneKeeper:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._log = folder / "server.log"
        self._wait = AGAIN_S

    def run(self) -> None:
        """Run until a SIGTERM, which raises SystemExit."""
        signal.signal(signal.SIGTERM, self._stop)
        while True:
            began = time.monotonic()
            pid = read_pid(self._folder / PID_FILE) or self._start()  # an earlier keeper's may still run
            _wait_end(pid)
            lived = time.monotonic() - began
            self._wait = AGAIN_S if lived > STEADY_S else min(LONGEST_S, 2 * self._wait)
            time.sleep(self._wait)

    def _start(self) -> int:
        with self._log.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "spotkeeper.local.server.server", str(self._folder)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        write_pid(self._folder / PID_FILE, process.pid)
        return process.pid

    def _stop(self, _signum: int, _frame: object) -> None:
        pid = read_pid(self._folder / PID_FILE)
        if pid is not None:
            os.kill(pid, signal.SIGTERM)
        sys.exit(0)


def read_pid(path: Path) -> int | None:
    """Return the recorded pid if the same process still runs, else None."""
    try:
        pid, started = (int(word) for word in path.read_text().split())
    except (OSError, ValueError):
        return None
    return pid if procs.is_same(pid, started) else None


def write_pid(path: Path, pid: int) -> None:
    """Record a pid with its process's start time: the system may reuse the pid, but not with the same start time."""
    temporary = path.with_name(path.name + ".new")
    temporary.write_text(f"{pid} {procs.start_time(pid) or 0}\n")
    temporary.replace(path)


def _wait_end(pid: int) -> None:
    """Wait for the end of a process, which need not be a child."""
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return
    try:
        select.select([fd], [], [])
    finally:
        os.close(fd)
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return  # it is an earlier keeper's child


if __name__ == "__main__":
    ControlPlaneKeeper(Path(sys.argv[1]).resolve()).run()
