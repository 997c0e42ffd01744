"""Processes of this machine, known by a mark in their environment. Standard library only; Linux only.

A process group is not enough: what a user's script starts may leave the group, and a double fork leaves
the tree. The mark is inherited by all of it; a process that cleared its environment is still found as a
descendant of the VM's init, which is a subreaper.
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

_SWEEPS = 50  # a fork bomb could outrun us; a job cannot


def mark(name: str, value: str) -> bytes:
    return f"{name}={value}".encode()


def marked(wanted: bytes) -> set[int]:
    """Living processes with this variable in the environment they were started with."""
    return {pid for pid in living() if wanted in _read(pid, "environ")}


def environment(pid: int) -> dict[str, str]:
    """The variables it was started with."""
    pairs = (item.decode(errors="replace").partition("=") for item in _read(pid, "environ"))
    return {name: value for name, _, value in pairs}


def arguments(pid: int) -> list[str]:
    """Its command line."""
    return [word.decode(errors="replace") for word in _read(pid, "cmdline")]


def descendants(root: int) -> set[int]:
    """All living children of children of ``root``, itself not included."""
    children: dict[int, list[int]] = {}
    for pid in living():
        fields = _stat(pid)
        if fields is not None and fields[0] != "Z":
            children.setdefault(int(fields[1]), []).append(pid)
    found: set[int] = set()
    queue = [root]
    while queue:
        for child in children.get(queue.pop(), ()):
            if child not in found:
                found.add(child)
                queue.append(child)
    return found


def start_time(pid: int) -> int | None:
    """Clock ticks since boot at which the process started: with the pid, an identity. None: gone, or a zombie."""
    fields = _stat(pid)
    return None if fields is None or fields[0] == "Z" else int(fields[19])


def is_same(pid: int, started: int) -> bool:
    """Whether that very process still lives: pids are used again."""
    return pid > 0 and start_time(pid) == started


def kill_all(wanted: bytes, root: int | None = None, spare: Iterable[int] = ()) -> int:
    """SIGKILL everything with the mark and below ``root``, until none is left; how many were hit.

    Children are found before their parents die, and sweeps are repeated, so that no fork escapes.
    """
    kept = {os.getpid(), *spare}
    hit: set[int] = set()
    for _ in range(_SWEEPS):
        victims = (marked(wanted) | (descendants(root) if root else set())) - kept
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
    """Until the kernel has taken them, at most a second in all: a killed process may still hold a port."""
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
    """The parts of /proc/<pid>/``name``, which NULs end; none of a process that is gone or another user's."""
    try:
        with open(f"/proc/{pid}/{name}", "rb") as file:  # noqa: PTH123 - hot path
            return file.read().removesuffix(b"\0").split(b"\0")
    except OSError:
        return []


def _stat(pid: int) -> list[str] | None:
    """Fields of /proc/<pid>/stat from the state on (the name before may hold anything)."""
    try:
        with open(f"/proc/{pid}/stat") as file:  # noqa: PTH123
            return file.read().rpartition(")")[2].split()
    except OSError:
        return None


def living() -> Iterator[int]:
    for entry in os.listdir("/proc"):  # noqa: PTH208 - hot path
        if entry.isdigit():
            yield int(entry)
