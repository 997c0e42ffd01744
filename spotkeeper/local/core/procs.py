"""Finds and kills processes of this machine by a mark in their environment. Standard library only; Linux only.

Every child inherits the mark, even if it leaves its process group or, by a double fork, its parent's process tree.
A process that cleared its environment is found as a descendant of the VM's init, which adopts orphans (a subreaper).
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Iterable, Iterator

CLOUD = "SPOTKEEPER_CLOUD"  # every process of one cloud
VM = "SPOTKEEPER_VM"  # every process of one VM
FUNCTION = "SPOTKEEPER_FUNCTION"  # every process of one function

_SWEEPS = 50  # most sweeps; only a fork bomb survives this many


def mark(name: str, value: str) -> bytes:
    return f"{name}={value}".encode()


def marked(wanted: bytes) -> set[int]:
    """Return the living processes that were started with ``wanted`` (``NAME=value``) in their environment."""
    return {pid for pid in living() if wanted in _read(pid, "environ")}


def environment(pid: int) -> dict[str, str]:
    """The environment that the process was started with."""
    pairs = (item.decode(errors="replace").partition("=") for item in _read(pid, "environ"))
    return {name: value for name, _, value in pairs}


def arguments(pid: int) -> list[str]:
    """The process's command line."""
    return [word.decode(errors="replace") for word in _read(pid, "cmdline")]


def descendants(*roots: int) -> set[int]:
    """All living descendants of ``roots``, without ``roots``."""
    children: dict[int, list[int]] = {}
    for pid in living():
        fields = _stat(pid)
        if fields is not None and fields[0] != "Z":
            children.setdefault(int(fields[1]), []).append(pid)
    found: set[int] = set()
    queue = list(roots)
    while queue:
        for child in children.get(queue.pop(), ()):
            if child not in found:
                found.add(child)
                queue.append(child)
    return found


def start_time(pid: int) -> int | None:
    """Return the start time of a process in clock ticks since boot; None if it is gone or a zombie.

    Pid and start time together identify a process.
    """
    fields = _stat(pid)
    return None if fields is None or fields[0] == "Z" else int(fields[19])


def is_same(pid: int, started: int) -> bool:
    """Whether the process with this pid started at this time; if not, the pid was reused."""
    return pid > 0 and start_time(pid) == started


def kill_all(wanted: bytes, root: int | None = None, spare: Iterable[int] = ()) -> int:
    """SIGKILL the processes with the mark ``wanted``, and all descendants of these and of ``root``; return how many.

    The process ``root`` itself is killed only if it has the mark. This process and the pids in ``spare`` are never
    killed. Descendants need no mark: a process can clear its environment, or make it unreadable for this user.

    Children are found before their parents are killed, and the search repeats until it finds no process, so that no
    fork escapes.
    """
    kept = {os.getpid(), *spare}
    hit: set[int] = set()
    for _ in range(_SWEEPS):
        own = marked(wanted)
        victims = (own | descendants(*own, *([root] if root else []))) - kept
        if root and start_time(root) is not None and wanted in _read(root, "environ"):
            victims |= {root} - kept
        if not victims:
            return len(hit)
        for pid in victims:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        hit |= victims
        _wait_gone(victims)
    return len(hit)


def _wait_gone(pids: set[int]) -> None:
    """Wait at most a second for the end of each process, since until its end a process may occupy a port."""
    for pid in pids:
        try:
            fd = os.pidfd_open(pid)
        except OSError:
            continue
        try:
            select.select([fd], [], [], 1.0)
        finally:
            os.close(fd)


def _read(pid: int, name: str) -> list[bytes]:
    """The NUL-terminated parts of /proc/<pid>/``name``; [] if the process is gone or belongs to another user."""
    try:
        with open(f"/proc/{pid}/{name}", "rb") as file:  # noqa: PTH123 - hot path
            return file.read().removesuffix(b"\0").split(b"\0")
    except OSError:
        return []


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/<pid>/stat from the state on; the process name before the state may contain any character."""
    try:
        with open(f"/proc/{pid}/stat") as file:  # noqa: PTH123
            return file.read().rpartition(")")[2].split()
    except OSError:
        return None


def living() -> Iterator[int]:
    for entry in os.listdir("/proc"):  # noqa: PTH208 - hot path
        if entry.isdecimal():
            yield int(entry)
