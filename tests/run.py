"""``python -m tests.run TARGET PYTEST...``: runs pytest, ends what it leaves behind, and notes what it took.

However pytest ends, also when it is cut off, no process of a test stays: this process is their subreaper. It writes
wall and processor seconds, with those of all processes, to ``.spotkeeper/tests.json`` where the run passed; ``make
bench ARGS=suite`` reads them there.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

OUT = Path(__file__).resolve().parents[1] / ".spotkeeper" / "tests.json"
SUBREAPER, DEATH_SIGNAL = 36, 1  # of prctl
ENDS_S = 10.0  # for a pytest that is told to end
LINGER_S = 3.0  # for processes that end by themselves


def main(target: str, argv: list[str]) -> int:
    began = time.monotonic()
    _prctl(SUBREAPER, 1)

    def in_child() -> None:
        _prctl(DEATH_SIGNAL, signal.SIGKILL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background job ignores it, and so would all tests

    pytest = subprocess.Popen(
        [sys.executable, "-m", "pytest", *argv],
        env=os.environ
        | {"PYTHONDONTWRITEBYTECODE": ""},  # rewriting every test's assertions takes half of a collection
        preexec_fn=in_child,  # noqa: PLW1509 - one thread
    )
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal tells pytest too

    def cut_off(number: int, frame: FrameType | None) -> None:
        pytest.send_signal(signal.SIGINT)
        signal.signal(signal.SIGALRM, lambda *_: pytest.kill())
        signal.setitimer(signal.ITIMER_REAL, ENDS_S)

    signal.signal(signal.SIGTERM, cut_off)
    signal.signal(signal.SIGHUP, cut_off)
    code = _reap(pytest.pid)
    signal.setitimer(signal.ITIMER_REAL, 0)
    end_all()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    took = {"wall_s": round(time.monotonic() - began, 1), "processor_s": round(used.ru_utime + used.ru_stime, 1)}
    if sys.stderr.isatty():  # pytest's own summary is the last line of a log
        print(f"{target or 'tests'}: {took['wall_s']:.0f} s, {took['processor_s']:.0f} s of processor", file=sys.stderr)
    if code == 0 and target:
        note(target, took)
    return code


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):  # not Linux
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _reap(pid: int) -> int:
    """Wait for a process, and for the orphans that end before it. Returns its exit code, as a shell shows it."""
    while True:
        ended, status = os.wait()
        if ended == pid:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def end_all() -> None:
    """End all children, and theirs, which become children of this process."""
    ends, told = time.monotonic() + LINGER_S, set[int]()
    with contextlib.suppress(ChildProcessError):
        while True:
            if os.waitpid(-1, os.WNOHANG)[0]:
                continue
            if time.monotonic() < ends:
                time.sleep(0.02)
                continue
            for pid in children():
                if pid not in told:
                    told.add(pid)
                    print(f"left behind: {pid} {_command(pid)}", file=sys.stderr)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            os.waitpid(-1, 0)


def children() -> list[int]:
    with contextlib.suppress(OSError):
        return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
    return []


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")[:200]
    return ""


def note(target: str, took: dict[str, float]) -> None:
    found = json.loads(OUT.read_text()) if OUT.exists() else {}
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps(found | {target: took | {"cores": os.cpu_count() or 1}}, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
