"""The points of a save: each call that changes something. At one of them a process dies, or its disk fails.

A call that moves bytes is two points, one before it and one when it has done a half. The
calls are counted from ``arm`` on, so the same save has the same numbers each time; no
clock decides where something happens. Standard library only: the saver runs under this too.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

PAGE = 4096
KILL, STOP, SHORT = "kill", "stop", "short"
Call = Callable[..., Any]


class Points:
    """Of one process.

    Args:
        last: the point at which something happens; 0: never.
        told: where it says which point that was; or, by ``count``, the names of all.
        what: ``kill``; ``stop``, until somebody lets it go on; ``short``, a write that does a
            half; or the name of an error, with a ``+`` where every later call of the disk
            fails as well, until ``disarm``.
    """

    def __init__(self, last: int, told: Path, what: str = KILL) -> None:
        self._last, self._what = last, what
        self._names: list[str] = []
        self._armed = self._broken = False
        self._thread = 0  # the only one whose calls count; 0: all
        # Opened now: once calls are wrapped, telling must not count.
        self._told = os.open(told, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._write, self._kill = os.write, os.kill

    def arm(self, *, alone: bool = False) -> None:
        """Count calls from now on. ``alone``: only those of this thread."""
        self._armed, self._thread = True, threading.get_ident() if alone else 0

    def disarm(self) -> None:
        self._armed = self._broken = False

    def count(self) -> None:
        """Tell the names of all points that were reached, where nothing happened at one."""
        if len(self._names) < self._last or not self._last:
            self._write(self._told, json.dumps(self._names).encode())

    def reach(self, name: str) -> None:
        if self._hit(name):
            self._act(name)

    def before(self, owner: object, name: str, label: str = "", *, disk: bool = False) -> None:
        """Make every call of ``owner.name`` a point."""
        real: Call = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._hit(label or name) or (disk and self._broken):
                self._act(label or name)
            return real(*args, **kwargs)

        setattr(owner, name, call)

    def within(self, owner: object, name: str, halve: Callable[[Call, tuple[Any, ...]], object]) -> None:
        """The same, and another point when ``halve(real, args)`` has done a half of it."""
        real: Call = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._hit(name) or self._broken:
                self._act(name)
            if self._hit(half := f"{name}, half"):
                done = halve(real, args)
                if self._what == SHORT:
                    self._tell(half)
                    return done
                self._act(half)
            return real(*args, **kwargs)

        setattr(owner, name, call)

    def _hit(self, name: str) -> bool:
        counts = self._armed and self._thread in (0, threading.get_ident())
        if counts:
            self._names.append(name)
        return counts and len(self._names) == self._last

    def _act(self, name: str) -> None:
        if not self._broken:
            self._tell(name)
        if self._what in (KILL, STOP):
            self._kill(os.getpid(), signal.SIGKILL if self._what == KILL else signal.SIGSTOP)
            return
        number = getattr(errno, self._what.rstrip("+"))
        self._broken = self._what.endswith("+")
        raise OSError(number, os.strerror(number))

    def _tell(self, name: str) -> None:
        self._write(self._told, f"{name}\n".encode())


def half_of(size: int) -> int:
    """Whole pages where there are any: O_DIRECT takes nothing else."""
    return size // 2 // PAGE * PAGE or size // 2
