"""The few Linux calls that make sure no process outlives its generation.

Standard library only; Linux only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import time
import zlib
from pathlib import Path

from spotkeeper.vm.launcher.output import is_carrier

NODE = "SPOTKEEPER_NODE"  # mark of all that a launcher starts: the agent's sweep finds it in /proc/*/environ
_BRAND = resource.RLIMIT_RTTIME  # and the other mark; without real-time scheduling nothing reads this limit
_BRAND_LINE = "Max realtime timeout"  # in /proc/*/limits
GUARD = "SPOTKEEPER_GUARD"  # the pid of the launcher's parent, where that is a guard
DRAIN_S = 1.0  # a pipe holds 64 KB
REAP_S = 5.0  # a process in uninterruptible sleep must not hold up the report of an exit
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}, {value}): {os.strerror(number)}")


def die_with_parent(parent: int | None = None) -> None:
    """SIGKILL for this process when the *thread* that forked it ends.

    ``parent``: who that is; if it is gone already, this process ends here, because the
    signal of a death that has happened never comes.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def become_subreaper() -> None:
    """Orphans among all descendants become children of this process, so it can end them."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def children() -> list[int]:
    """Pids of the living and dead children of this process."""
    found = []
    with contextlib.suppress(OSError):
        for task in Path("/proc/self/task").iterdir():
            found += [int(pid) for pid in (task / "children").read_text().split()]
        return found
    return [pid for pid in _all_pids() if _parent_of(pid) == os.getpid()]  # a kernel without CONFIG_PROC_CHILDREN


def reap_dead() -> dict[int, int]:
    """Exit codes (negative: signal) of the children that have ended, by pid."""
    ended: dict[int, int] = {}
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            ended[found[0]] = os.waitstatus_to_exitcode(found[1])
    return ended


def kill_children() -> int:
    """End and reap every child, and the orphans that become ours meanwhile. Returns how many are left.

    Last those that carry what the others have printed: they come to its end by themselves.
    """
    began = time.monotonic()
    while (left := children()) and time.monotonic() < began + REAP_S:
        patient = time.monotonic() < began + DRAIN_S
        for pid in left:
            if patient and is_carrier(pid):
                continue
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not reap_dead():
            time.sleep(0.002)
    return len(left)


def _all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208 - no Path per process


def _parent_of(pid: int) -> int:
    try:
        # The name, in brackets, may hold anything, so count from its end.
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError, ValueError):
        return -1


def brand(pid: int, folder: Path | str) -> None:
    """Mark a process, and all that it will start, as this node's: by a limit with a number of its own.

    Limits pass to every descendant, through a blank environment, other sessions and exec, whoever dies in between;
    and only root can raise one again. This one says how long, in microseconds, a real-time program may hold a
    processor; the number stands for 146,000 years or more.
    """
    with contextlib.suppress(OSError, ValueError):  # it has ended; this machine's limit is lower
        resource.prlimit(pid, _BRAND, (_number(folder), _number(folder)))


def _number(folder: Path | str) -> int:
    name = os.fsencode(folder)
    return 1 << 62 | zlib.crc32(name) << 30 ^ zlib.crc32(name[::-1])


def sweep(folder: Path, keep: set[int]) -> int:
    """SIGKILL to every process that bears this node's mark, but for ``keep``. Returns how many there were.

    A process group is not enough: a user's program may have left it. The environment that a process was executed
    with cannot be left behind, but a daemon may have been given another one: it is still branded.
    """
    mark, number = f"{NODE}={folder}".encode(), str(_number(folder))
    killed = 0
    for name in os.listdir("/proc"):  # noqa: PTH208 - no Path per process
        if not name.isdigit() or int(name) in keep:
            continue
        with contextlib.suppress(OSError):
            handle = os.pidfd_open(int(name))  # so that a number used anew is not hit
            try:
                if _branded(name, number) or mark in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
                    killed += 1
            finally:
                os.close(handle)
    return killed


def _branded(name: str, number: str) -> bool:
    limits = Path(f"/proc/{name}/limits").read_text()
    return limits.partition(_BRAND_LINE)[2].split(maxsplit=1)[:1] == [number]


def shell_code(code: int) -> int:
    """As a shell shows it: a process killed by signal n gives 128 + n."""
    return 128 - code if code < 0 else code
