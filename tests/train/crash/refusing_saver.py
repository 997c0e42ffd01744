"""A private saver that is refused something in one save; see ``refusals``. Its plan is in the environment.

``REFUSAL``: POINT KIND TOLD LIFTED TANK, see :class:`Refusal`; ``REFUSAL_AT``: the request for memory, or the save of
a step, from which points are counted until ``LIFTED`` is there.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import resource
import socket
import sys
import threading
from pathlib import Path
from typing import Any

from spotkeeper.train.checkpoint import saver

if __package__:
    from tests.train.crash.points import PAGE, Points
    from tests.train.crash.saver_main import CHANGES
else:  # run as a file, without site-packages
    from points import PAGE, Points
    from saver_main import CHANGES

FSIZE, DISK, MEMORY, THREAD, STOP, KILL = "RLIMIT_FSIZE", "disk", "memory", "thread", "stop", "kill"
# Where a control group with a memory limit can be made, its files of limit and use, and what stands for no limit.
GROUPS, UNLIMITED = Path("/sys/fs/cgroup/memory"), "-1"
MEMORY_FILES = ("memory.limit_in_bytes", "memory.usage_in_bytes")
if not GROUPS.is_dir():  # version 2
    GROUPS, UNLIMITED = Path("/sys/fs/cgroup"), "max"
    MEMORY_FILES = ("memory.max", "memory.current")


def no_memory_group() -> str:
    """Why no such group can be made here; "" if one can."""
    probe = GROUPS / f"probe-{os.getpid()}"
    try:
        probe.mkdir()
        limited = (probe / MEMORY_FILES[0]).exists()
        probe.rmdir()
    except OSError as error:
        return f"no control group with a memory limit can be made: {error}"
    return "" if limited else f"{GROUPS} limits no memory of groups below it (+memory in cgroup.subtree_control)"


class Refusal(Points):
    """Points at which something is refused, until it is lifted.

    Args:
        kind: an error, as for ``Points``; a limit of this process; ``disk``, which is filled up; ``memory``, a limit of
            its control group; ``thread``, none can be started; or the process is stopped or killed.
        lifted: a file that is there once the cause is gone.
        tank: what is filled or limited: a folder of the disk, or the control group.
    """

    def __init__(self, last: int, kind: str, told: Path, lifted: Path, tank: Path) -> None:
        super().__init__(last, told, kind)
        self._lifted, self._tank = lifted, tank

    @classmethod
    def planned(cls) -> Refusal:
        point, kind, *paths = os.environ["REFUSAL"].split()
        return cls(int(point), kind, *map(Path, paths))

    def _hit(self, name: str) -> bool:
        return not self._gone() and super()._hit(name)

    def _gone(self) -> bool:
        return os.access(self._lifted, os.F_OK)  # no call that is a point

    def _act(self, name: str) -> None:
        if self._gone():
            return
        if self._what == FSIZE:
            self._tell(name)
            resource.setrlimit(resource.RLIMIT_FSIZE, (PAGE, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        elif self._what == DISK:
            self._tell(name)
            fill(self._tank)
        elif self._what == MEMORY:
            self._tell(name)
            limit, used = (self._tank / each for each in MEMORY_FILES)
            limit.write_text(str(int(used.read_text()) + (8 << 20)))
        elif self._what == THREAD:
            if not self._broken:
                self._tell(name)
            self._broken = True
            if name == THREAD:
                raise RuntimeError("can't start new thread")
        else:
            super()._act(name)


def fill(folder: Path) -> None:
    """Take all room that its file system has left."""
    fd = os.open(folder / "fill", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    with contextlib.suppress(OSError):
        while True:
            os.write(fd, bytes(PAGE))
    os.close(fd)


def main() -> int:
    points = Refusal.planned()
    at = os.environ["REFUSAL_AT"]
    for name in CHANGES:
        points.before(os, name, disk=True)
    for name in ("pwrite", "write"):
        points.before(os, name, disk=True)
    points.before(mmap, "mmap", disk=True)
    points.before(socket.socket, "sendmsg", "answer")
    points.before(threading.Thread, "start", THREAD, disk=True)
    real = saver.SaverServer._handle

    def handle(self: Any, peer: Any, message: Any) -> None:
        if type(message).__name__ == at or str(getattr(getattr(message, "manifest", None), "commit", "")) == at:
            points.arm()
        real(self, peer, message)

    saver.SaverServer._handle = handle  # type: ignore[method-assign]
    code = saver.main(sys.argv[1:])
    points.count()
    return code


if __name__ == "__main__":
    raise SystemExit(main())
