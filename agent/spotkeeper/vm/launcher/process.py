"""The few Linux calls that make sure no process outlives its generation.

Standard library only; Linux only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from pathlib import Path

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


def _all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208 - no Path per process


def _parent_of(pid: int) -> int:
    try:
        # The name, in brackets, may hold anything, so count from its end.
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError, ValueError):
        return -1
