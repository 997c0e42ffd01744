"""The rank's disk on this machine: mounted once it is there, and what it holds is said; or why it cannot be.

For the loop's thread. What takes time (mkfs, mount, reading the checkpoints' manifests) the helper does.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Protocol

from spotkeeper.clock import Clock
from spotkeeper.spec.facts import Kind
from spotkeeper.spec.names import JOB_ID
from spotkeeper.train.control import Commit
from spotkeeper.train.store import damaged, newest
from spotkeeper.vm.disk import Disk, Why
from spotkeeper.vm.events import Dropped, Mounted, Unmounted
from spotkeeper.vm.helper import Helper
from spotkeeper.vm.log import Log

DAMAGED = 4  # are told of, of one disk
TRIES = 3  # once may be chance: udev, a late device
ABSENT_S = 60.0  # virtual; a device appears within seconds of its attachment
ABSENT_FLOOR_S = 5.0  # real


class Say(Protocol):
    """A fact for the function; ``gen`` None is the newest generation that is known here."""

    def __call__(self, kind: Kind, value: str = "0", *, gen: int | None = None, again: bool = False) -> None: ...


class Mounting:
    """One machine's data disk. ``number``: of the mounted one; 0 is a static node's own.

    ``newest``: the newest complete checkpoint of the job on it, as far as it was read or written here.
    """

    def __init__(self, disk: Disk, helper: Helper, say: Say, clock: Clock, log: Log) -> None:
        self.number: int | None = None
        self.newest: Commit | None = None
        self._damaged: tuple[str, ...] = ()  # newer ones that hold no more
        self._disk = disk
        self._helper = helper
        self._say = say
        self._clock = clock
        self._log = log
        self._tries = 0
        self._absent_since: float | None = None  # monotonic

    def look(self, number: int, ckpt: Path, attached: bool) -> None:
        """Mount it when it is there. ``attached``: the function has seen it so. ``ckpt``: the job's folder on it."""
        if self.number is not None:
            return
        if not self._disk.present():
            self._absent(number, attached)
            return
        self._absent_since = None
        disk = self._disk

        def mount() -> Mounted:
            disk.mount()
            commit = newest(ckpt, hashes=False).commit
            broken = tuple(map(str, damaged(ckpt, commit)[:DAMAGED]))
            return Mounted(number, None if commit is None else str(commit), _jobs(disk.point), broken)

        self._helper.do("mount", mount)

    def _absent(self, number: int, attached: bool) -> None:
        """The round has seen it attached, so it should be here. If it comes after all, it is mounted."""
        if not attached:
            self._absent_since = None
            return
        self._absent_since = self._absent_since or time.monotonic()
        if time.monotonic() - self._absent_since > max(self._clock.real_s(ABSENT_S), ABSENT_FLOOR_S):
            self._log.once("absent", "disk.absent", device=str(self._disk.device))
            self._refuse(number, Why.MISSING)

    def failed(self, number: int | None, why: Why | None) -> None:
        """A try was in vain. Told after a few of them; trying goes on. ``number`` None: there is no job any more."""
        self._tries += 1
        if self._tries >= TRIES and number is not None:
            self._refuse(number, why or Why.MOUNT)

    def _refuse(self, number: int, why: Why) -> None:
        """Said as long as it is so: the function takes it only from a machine that is admitted."""
        self._say(Kind.NO_DISK, f"{number}-{why.value}", again=True)

    def mounted(self, event: Mounted) -> None:
        self.number = event.number
        self.newest = Commit.parse(event.newest) if event.newest else None
        self._damaged = event.damaged
        if event.damaged:
            self._log("disk.damaged", checkpoints=event.damaged, newest=event.newest)
        self.tell()

    def tell(self, *, again: bool = False) -> None:
        """What is mounted, and what it holds; the word for the mount last: who has it knows that all was said."""
        if self.number is not None:
            if self.newest is not None:
                self._say(Kind.HOLDS, str(self.newest), again=again)
            for commit in self._damaged:
                self._say(Kind.DAMAGED, commit, again=again)
            self._say(Kind.ATTACHED, str(self.number), again=again)

    def wrote(self, commit: Commit, gen: int) -> None:
        """A generation ended here, with this as its newest checkpoint."""
        if self.number is not None:
            self.newest = max(commit, self.newest or commit)
            self._say(Kind.HOLDS, str(self.newest), gen=gen)

    def unmount(self, over: Path | None = None) -> None:
        """For good; :class:`Unmounted` follows. ``over``: a folder on it that nobody wants any more."""
        disk, number = self._disk, self.number or 0

        def unmount() -> Unmounted:
            if over is not None:
                shutil.rmtree(over, ignore_errors=True)
            disk.unmount()
            return Unmounted(number)

        self._helper.do("unmount", unmount)

    def drop(self, jobs: tuple[str, ...]) -> None:
        """Delete what is left of jobs that are over; :class:`Dropped` follows. A disk that rests is woken for it."""
        disk = self._disk

        def drop() -> Dropped:
            mounted = disk.mounted()
            disk.mount()
            for job in jobs:
                shutil.rmtree(disk.point / job, ignore_errors=True)
            left = _jobs(disk.point)
            if not mounted:
                disk.unmount()
            return Dropped(tuple(job for job in jobs if job not in left))

        self._helper.do("drop", drop)

    def forget_job(self) -> None:
        """What is mounted stays so; what the last job had on it counts no more."""
        self.newest, self._damaged = None, ()
        self._tries, self._absent_since = 0, None


def _jobs(mount: Path) -> tuple[str, ...]:
    """Whose checkpoints a disk has. A folder of the user's own has none, whatever its name."""
    try:
        return tuple(
            sorted(path.name for path in mount.iterdir() if JOB_ID.match(path.name) and (path / "ckpt").is_dir())
        )
    except OSError:
        return ()
