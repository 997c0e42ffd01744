"""Calls that keep processes from outliving their generation. Standard library only; Linux only.

A launcher and its descendants have an environment variable, the mark, and inherit a resource limit, the tag. A sweep
finds them by either and kills them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import subprocess
import time
import zlib
from pathlib import Path
from typing import Any

from spotkeeper_agent.launcher.output import is_output_worker

MARK = "SPOTKEEPER_MARK"  # in the environment of a launcher's processes: a sweep finds it in /proc/*/environ
_TAG = resource.RLIMIT_RTTIME  # the tag: a limit that matters only to real-time scheduling
_TAG_LINE = "Max realtime timeout"  # in /proc/*/limits
GUARD = "SPOTKEEPER_GUARD"  # pid of the launcher's parent, if that is a guard
DRAIN_S = 4.0  # time to drain a pipe and to write the end of the log: long only for a busy machine
REAP_S = 5.0  # longest wait: a process in uninterruptible sleep must not delay the report of an exit
_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_CHILD_SUBREAPER = 36


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}, {value}): {os.strerror(number)}")


def die_with_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process when the *thread* that forked it ends.

    ``parent``: the forking process's pid. If the parent has already ended, this process ends here, because the kernel
    would send no signal.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def become_subreaper() -> None:
    """Make this process a subreaper: it becomes the parent of descendants whose parent ends, so it can end them."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def refuse_inspection() -> None:
    """Until the next exec, forbid all users but root to trace this process or to take its descriptors."""
    _prctl(_PR_SET_DUMPABLE, 0)


def children() -> list[int]:
    """Return the pids of this process's children, dead ones included."""
    found = []
    with contextlib.suppress(OSError):
        for task in Path("/proc/self/task").iterdir():
            found += [int(pid) for pid in (task / "children").read_text().split()]
        return found
    return [pid for pid in _all_pids() if parent_of(pid) == os.getpid()]  # a kernel without CONFIG_PROC_CHILDREN


def start_program(command: list[str], **options: Any) -> int:
    """Start a program with the options of :class:`subprocess.Popen`; return its pid. :func:`reap_dead` reports its end.

    Raises:
        OSError: the program cannot be started.
    """
    process = subprocess.Popen(command, **options)
    process.returncode = 0  # else its destructor reaps a program that has already ended, and nobody learns of its end
    return process.pid


def reap_dead() -> dict[int, int]:
    """Reap the children that have ended; return their exit codes by pid (-n for a child killed by signal n)."""
    ended: dict[int, int] = {}
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            ended[found[0]] = os.waitstatus_to_exitcode(found[1])
    return ended


def kill_children() -> int:
    """Kill and reap every child, also those that this process inherits meanwhile; return how many are left.

    Output workers are killed last, because they end by themselves once they have drained their pipes.
    """
    began = time.monotonic()
    while (left := children()) and time.monotonic() < began + REAP_S:
        patient = time.monotonic() < began + DRAIN_S
        for pid in left:
            if patient and is_output_worker(pid):
                continue
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not reap_dead():
            time.sleep(0.002)
    return len(left)


def _all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]  # noqa: PTH208 - no Path per process


def parent_of(pid: int) -> int:
    """Return the pid of a process's parent; -1 if the process has ended."""
    try:
        # The name, in brackets, may contain any characters, so fields are counted from its end.
        return int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])
    except (OSError, IndexError, ValueError):
        return -1


def tag(pid: int, folder: Path | str) -> None:
    """Tag a process and all its future descendants with a resource limit whose value is derived from ``folder``.

    Descendants inherit limits even with an emptied environment or in another session, and only root can raise a limit.
    The limit is how many microseconds a real-time program may occupy a processor. A tag's value is over 146,000 years,
    so it restricts no program.
    """
    with contextlib.suppress(OSError, ValueError):  # the process has ended, or this machine's limit is lower
        resource.prlimit(pid, _TAG, (_number(folder), _number(folder)))


def _number(folder: Path | str) -> int:
    name = os.fsencode(folder)
    return 1 << 62 | zlib.crc32(name) << 30 ^ zlib.crc32(name[::-1])


def sweep(folder: Path, keep: set[int]) -> int:
    """Kill every process that has this folder's mark or tag, except ``keep``; return how many there were.

    The mark is the environment variable ``MARK`` with which a process was executed. The tag is a resource limit that
    every descendant inherits (:func:`tag`), so a daemon that was executed with another environment still has the tag.
    Killing the process group would not suffice, because a program can leave its group.
    """
    mark, number = f"{MARK}={folder}".encode(), str(_number(folder))
    killed = 0
    for name in os.listdir("/proc"):  # noqa: PTH208 - no Path per process
        if not name.isdecimal() or int(name) in keep:
            continue
        with contextlib.suppress(OSError):
            handle = os.pidfd_open(int(name))  # so that a process that reuses the pid is not killed
            try:
                if _tagged(name, number) or mark in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
                    killed += 1
            finally:
                os.close(handle)
    return killed


def _tagged(name: str, number: str) -> bool:
    limits = Path(f"/proc/{name}/limits").read_text()
    return limits.partition(_TAG_LINE)[2].split(maxsplit=1)[:1] == [number]


def shell_code(code: int) -> int:
    """Return an exit code as a shell shows it: 128 + n for a process killed by signal n."""
    return 128 - code if code < 0 else code


def own_cgroup() -> Path | None:
    """Return this process's cgroup if the process may divide it (in a unit with ``Delegate=``), otherwise None."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        if line.startswith("0::") and line[3:].strip() != "/":
            path = Path("/sys/fs/cgroup") / line[3:].strip().lstrip("/")
            return path if os.access(path / "cgroup.procs", os.W_OK) and os.access(path, os.W_OK) else None
    return None
