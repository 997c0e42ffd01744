"""Keeps the control plane running: starts it, waits for its end without polling, starts it again.

    python -m spotkeeper.local.keeper <folder>

A laptop has no regional redundancy; this is all there is of it. SIGTERM ends the control plane first.
Standard library only, and nothing else to do: 10 MB for the peace of a kill -9.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

from spotkeeper.local import procs

AGAIN_S = 0.1
LONGEST_S = 5.0
STEADY_S = 5.0
PID_FILE = "server.pid"


class Keeper:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._log = folder / "server.log"
        self._wait = AGAIN_S

    def run(self) -> None:
        """For ever; a SIGTERM leaves through SystemExit."""
        signal.signal(signal.SIGTERM, self._stop)
        while True:
            began = time.monotonic()
            pid = self._running() or self._start()
            _wait_end(pid)
            lived = time.monotonic() - began
            self._wait = AGAIN_S if lived > STEADY_S else min(LONGEST_S, 2 * self._wait)
            time.sleep(self._wait)

    def _running(self) -> int | None:
        """A control plane that an earlier keeper left behind is as good as a new one."""
        try:
            pid, started = (int(word) for word in (self._folder / PID_FILE).read_text().split())
        except (OSError, ValueError):
            return None
        return pid if procs.is_same(pid, started) else None

    def _start(self) -> int:
        with self._log.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "spotkeeper.local.server", str(self._folder)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        write_pid(self._folder / PID_FILE, process.pid)
        return process.pid

    def _stop(self, _signum: int, _frame: object) -> None:
        pid = self._running()
        if pid is not None:
            os.kill(pid, signal.SIGTERM)
        sys.exit(0)


def write_pid(path: Path, pid: int) -> None:
    """The pid with its start time: pids are used again, the pair is not."""
    temporary = path.with_name(path.name + ".new")
    temporary.write_text(f"{pid} {procs.start_time(pid) or 0}\n")
    temporary.replace(path)


def _wait_end(pid: int) -> None:
    """Until the process is gone, our child or not."""
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
        return  # an earlier keeper's child


if __name__ == "__main__":
    Keeper(Path(sys.argv[1]).resolve()).run()
