"""Mounts the data disk, reports its content or why it cannot be mounted, and deletes files of jobs that are over.

Only the agent's loop may call this module. A helper thread does the slow work: mkfs, mount, reading checkpoints.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from spotkeeper.clock import Clock
from spotkeeper.contract.facts import Kind
from spotkeeper.contract.generation import MAX_OLD_JOBS
from spotkeeper.contract.names import JOB_ID
from spotkeeper.train.agent_link.control import Commit
from spotkeeper.train.checkpoint.store import damaged, newest
from spotkeeper.train.core import beneath
from spotkeeper_agent.core.events import Dropped, HelperThread, Mounted, Unmounted
from spotkeeper_agent.core.log import Log
from spotkeeper_agent.host.disk import LOCAL_VOLUME, Disk, Why
from spotkeeper_agent.host.roothelper import VOLUME
from spotkeeper_agent.job.jobhost import share

DAMAGED = 4  # maximum number of damaged checkpoints reported per disk
TRIES = 3  # tries before a failure is reported: udev or the device may be late
ABSENT_S = 60.0  # virtual; a device usually appears within seconds of its attachment
ABSENT_FLOOR_S = 5.0  # real
EVERY_S = 3600.0  # steady virtual seconds between two queries


class ReportFact(Protocol):
    """Reports a fact to the function, as :meth:`MachineState.say` does."""

    def __call__(self, kind: Kind, value: str = "0", *, gen: int | None = None, again: bool = False) -> None: ...


class Mounting:
    """One machine's data disk. ``number``: the mounted disk's number, 0 for a static machine's own; None: not mounted.

    ``newest``: the job's newest complete checkpoint on the disk, as far as this agent knows. ``scratch_made``: whether
    the job's scratch folder was made at the mount, so that it is empty.
    """

    def __init__(self, disk: Disk, helper: HelperThread, say: ReportFact, clock: Clock, log: Log) -> None:
        self.number: int | None = None
        self.newest: Commit | None = None
        self.scratch_made = False
        self._damaged: tuple[str, ...] = ()  # newer checkpoints that are damaged
        self._disk = disk
        self._helper = helper
        self._say = say
        self._clock = clock
        self._log = log
        self._tries = 0
        self._absent_since: float | None = None  # monotonic

    def look(self, number: int, ckpt: Path, attached: bool, scratch_gb: int = 0) -> None:
        """Mount the disk, and the job's scratch volume, if the device exists; if ``attached``, report a missing one.

        ``ckpt``: checkpoint folder. ``scratch_gb``: size of the volume; 0: none.
        """
        if self.number is not None:
            return
        if not self._disk.present():
            self._absent(number, attached)
            return
        self._absent_since = None
        disk = self._disk

        def mount() -> Mounted:
            disk.mount()
            make_job_folders(disk.point, ckpt.parent.name)
            made = scratch_gb > 0 and disk.mount_scratch(ckpt.parent.name, scratch_gb)
            commit = newest(ckpt, hashes=False).commit
            broken = tuple(map(str, damaged(ckpt, commit)[:DAMAGED]))
            return Mounted(number, None if commit is None else str(commit), _jobs(disk.point), broken, made)

        self._helper.do("mount", mount)

    def _absent(self, number: int, attached: bool) -> None:
        """Report a disk that is attached but whose device does not appear for a while. Mounting is tried again."""
        if not attached:
            self._absent_since = None
            return
        self._absent_since = self._absent_since or time.monotonic()
        if time.monotonic() - self._absent_since > max(self._clock.real_s(ABSENT_S), ABSENT_FLOOR_S):
            self._log.once("absent", "disk.absent", device=str(self._disk.device))
            self._refuse(number, Why.MISSING)

    def failed(self, number: int | None, why: Why | None) -> None:
        """Count a failed try to mount, and report it from the third on.

        ``number``: the disk's number; None if no job is assigned: then nothing is reported.
        """
        self._tries += 1
        if self._tries >= TRIES and number is not None:
            self._refuse(number, why or Why.MOUNT)

    def _refuse(self, number: int, why: Why) -> None:
        """Report an unusable disk at every try: the function ignores such reports until this machine is admitted."""
        self._say(Kind.NO_DISK, f"{number}-{why.value}", again=True)

    def mounted(self, event: Mounted) -> None:
        self.number = event.number
        self.newest = Commit.parse(event.newest) if event.newest else None
        self._damaged = event.damaged
        self.scratch_made = event.scratch_made
        if event.damaged:
            self._log("disk.damaged", checkpoints=event.damaged, newest=event.newest)
        self.tell()

    def tell(self, *, again: bool = False) -> None:
        """Report the disk's checkpoints, then ATTACHED: when ATTACHED arrives, the function knows all checkpoints."""
        if self.number is not None:
            if self.newest is not None:
                self._say(Kind.CHECKPOINT, str(self.newest), again=again)
            for commit in self._damaged:
                self._say(Kind.DAMAGED, commit, again=again)
            self._say(Kind.ATTACHED, str(self.number), again=again)

    def wrote(self, commit: Commit, gen: int) -> None:
        """Record the newest checkpoint of a generation that ended here, and report it."""
        if self.number is not None:
            self.newest = max(commit, self.newest or commit)
            self._say(Kind.CHECKPOINT, str(self.newest), gen=gen)

    def unmount(self, over: Path | None = None, scratch_of: str | None = None) -> None:
        """Unmount for good, then post the event :class:`Unmounted`.

        ``over``: a folder to delete before the unmount. ``scratch_of``: a job whose scratch folder to delete before.
        """
        disk = self._disk

        def unmount() -> Unmounted:
            if over is not None:
                beneath.remove(over.parent, over.name)
            if scratch_of is not None and disk.mounted():
                for name in (LOCAL_VOLUME, VOLUME):
                    beneath.remove(disk.point / scratch_of, name)
            disk.unmount()
            return Unmounted()

        self._helper.do("unmount", unmount)

    def drop(self, jobs: tuple[str, ...]) -> None:
        """Mount the disk if needed, delete the folders of jobs that are over, then post the event :class:`Dropped`."""
        disk = self._disk

        def drop() -> Dropped:
            mounted = disk.mounted()
            disk.mount()
            for job in jobs:
                beneath.remove(disk.point, job)
            left = _jobs(disk.point)
            if not mounted:
                disk.unmount()
            return Dropped(tuple(job for job in jobs if job not in left))

        self._helper.do("drop", drop)

    def forget_job(self) -> None:
        """Forget the previous job's checkpoints; the disk stays mounted."""
        self.newest, self._damaged, self.scratch_made = None, (), False
        self._tries, self._absent_since = 0, None


def make_job_folders(mount: Path, job: str) -> None:
    """Make the folders on the disk that a job writes: its checkpoints, output and Python environment.

    The agent owns their parent folder, so no job can replace one of them by a link. Errors are ignored here, for
    example of a full disk: the job's first write fails then.
    """
    with contextlib.suppress(OSError):
        for name in ("ckpt", "out", "env"):
            folder = mount / job / name
            folder.mkdir(parents=True, exist_ok=True)
            if not folder.is_symlink():
                share(folder)


def _jobs(mount: Path) -> tuple[str, ...]:
    """Return the jobs on a disk: its folders that contain ``ckpt`` and have a job's id as name."""
    try:
        return tuple(
            sorted(path.name for path in mount.iterdir() if JOB_ID.match(path.name) and (path / "ckpt").is_dir())
        )
    except OSError:
        return ()


class OldJobs:
    """The jobs with files on this static machine's disk, and when to ask the function which of them are over.

    The function reports a job's end only to machines that serve the job; this machine can serve another job by then
    (``core/__init__.py``). ``serving``: the job that this machine serves, which is never asked about.
    """

    def __init__(self) -> None:
        self._jobs: set[str] = set()
        self._last = ""  # the job asked about last: the next question begins after it
        self._not_before = float("-inf")

    def found(self, jobs: Iterable[str]) -> None:
        """Set the jobs found on the disk, and make the next question due at once."""
        self._jobs = set(jobs)
        self._not_before = float("-inf")

    def left(self, job: str) -> None:
        """Add a job that this machine has left and whose files stay."""
        self._jobs.add(job)

    def gone(self, jobs: Iterable[str]) -> None:
        self._jobs.difference_update(jobs)

    def question(self, now: float, serving: str | None) -> tuple[str, ...]:
        """Return the jobs to ask about in this request: at most 32, in rotation; none until a question is due."""
        jobs = sorted(self._jobs - {serving})
        if not jobs or now < self._not_before:
            return ()
        self._not_before = now + EVERY_S
        chosen = [job for job in jobs if job > self._last] + [job for job in jobs if job <= self._last]
        self._last = chosen[:MAX_OLD_JOBS][-1]
        return tuple(chosen[:MAX_OLD_JOBS])

    def over(self, asked: Iterable[str], ended: Iterable[str], serving: str | None) -> tuple[str, ...]:
        """Return the jobs whose files to delete: asked about, ended, still on the disk, and not ``serving``."""
        return tuple(sorted(self._jobs.intersection(asked, ended) - {serving}))
