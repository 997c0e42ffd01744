"""The tail of a job's output, carried to ``jobs/<job>/logs/<rank>/<gen>.log`` by a thread of its own.

Bounded on purpose: what a person wants first is the end, and a job that prints a
gigabyte must not fill the bucket; nor ``/run``, which is memory, and in which job and agent
keep all that they must write to go on. More of it stays on the machine until it goes.
"""

from __future__ import annotations

import contextlib
import os
import queue
import stat
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from spotkeeper.clock import Clock
from spotkeeper.spec.failure import Failure
from spotkeeper.spec.joblog import Part, join
from spotkeeper.spec.redact import hide
from spotkeeper.vm.failures import failures
from spotkeeper.vm.launcher import output, stacks
from spotkeeper.vm.log import Log
from spotkeeper.vm.storage import Bucket, StorageError

TAIL_BYTES = 64 << 10  # of each file
TOTAL_BYTES = 512 << 10  # of one upload, shared out evenly where there are many files
EVERY_S = 15.0  # virtual, while the job prints
FLOOR_S = 1.0  # real
LAUNCHER_LOG = "torchrun.log"


@dataclass(frozen=True)
class Task:
    """``who``: the machine, for people. ``extra``: text that no file holds, such as why the job could not start."""

    name: str
    folder: Path
    extra: str = ""
    who: str = "this machine"


def object_name(job: str, rank: int, gen: int) -> str:
    return f"jobs/{job}/logs/{rank}/{gen}.log"


def whose(rank: int, node: str) -> str:
    return f"rank {rank} ({node})"


def collect(folder: Path, extra: str = "", who: str = "this machine") -> bytes:
    """What torchrun and the ranks of this node printed last (``spec.joblog``).

    Errors come last, where a reader looks first; of several ranks' errors, those of the rank that failed
    before the others, and not for a peer's sake: theirs tell only that it is gone.
    """
    failed = failures(folder)
    ranks = sorted((folder / "logs").rglob("*/stdout.log"), key=_local_rank)
    errors = sorted((folder / "logs").rglob("*/stderr.log"), key=lambda path: _first_to_fail_last(failed, path))
    files = (folder / LAUNCHER_LOG, *ranks, folder / stacks.TEXT, *errors)
    limit = min(TAIL_BYTES, TOTAL_BYTES // len(files))
    parts = [_end(path, _title(path, who, len(ranks)), limit) for path in files]
    if extra:
        parts.append(Part("", extra.encode()))
    return join(part for part in parts if part.text.strip())


def _without_children(log: bytes) -> bytes:
    """torchrun's log less the thirty lines by which it says that a child failed: the child says why, and how it
    ended stands in a line before them."""
    end = log.find(b".ChildFailedError:")
    start = log.rfind(b"Traceback (most recent call last):", 0, max(0, end))
    return log if end < 0 or start < 0 else log[:start]


def _local_rank(path: Path) -> int:
    return int(path.parent.name) if path.parent.name.isdigit() else 0


def _first_to_fail_last(failed: Mapping[int, Failure], path: Path) -> tuple[bool, bool, int, int]:
    """Ranks that did not fail, by number; those that failed for a peer's sake; those that did of themselves. The
    earliest last."""
    rank = _local_rank(path)
    failure = failed.get(rank)
    return (False, False, 0, rank) if failure is None else (True, not failure.follows, -failure.at_ms, rank)


def _title(path: Path, who: str, ranks: int) -> str:
    if path.name in (LAUNCHER_LOG, stacks.TEXT):
        return f"{who} {path.stem}"
    return f"{who}, local rank {path.parent.name}, {path.stem}" if ranks > 1 else f"{who} {path.stem}"


def _end(path: Path, title: str, limit: int) -> Part:
    """The last whole lines of a file; of a line that is longer than ``limit`` bytes, its end."""
    try:
        with path.open("rb") as file:
            start = max(0, file.seek(0, 2) - limit)
            file.seek(start)
            text = file.read(limit)
    except OSError:
        return Part(title, b"")
    text = hide(text)
    begins = text.find(b"\n", 0, -1) + 1 if start else 0
    text = text[begins:]
    if path.name == LAUNCHER_LOG:
        text = _without_children(text)
    return Part(title, text, start + begins, str(path))


def trim(folder: Path) -> None:
    """Give back what long logs take, but for their ends: torchrun's, and what is written past the pipes."""
    for path in (folder / LAUNCHER_LOG, *(folder / "logs").rglob("std*.log")):
        with contextlib.suppress(OSError):  # gone meanwhile; a file system without holes
            fd = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                found = os.fstat(fd)
                if stat.S_ISREG(found.st_mode) and found.st_blocks * 512 > 2 * output.KEPT_BYTES:
                    output.keep_end(fd, found.st_size, output.KEPT_BYTES)
            finally:
                os.close(fd)


class Uploader(threading.Thread):
    """Uploads what it is given, and again while it changes, until it is given something else."""

    def __init__(self, bucket: Bucket, clock: Clock, log: Log) -> None:
        super().__init__(name="logs", daemon=True)
        self._bucket = bucket
        self._clock = clock
        self._log = log
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()

    def follow(self, task: Task) -> None:
        """Upload this now and then from now on; a last time before the next one."""
        self._idle.clear()
        self._tasks.put(task)

    def rest(self) -> None:
        """One last upload of what is being followed, then nothing."""
        self._idle.clear()
        self._tasks.put(None)

    def flush(self, timeout_s: float) -> None:
        """Wait until the last upload is through, real seconds."""
        self._idle.wait(timeout_s)

    def run(self) -> None:
        task: Task | None = None
        sent = b""
        while True:
            following = task
            try:
                task = self._tasks.get(timeout=max(FLOOR_S, self._clock.real_s(EVERY_S)) if following else None)
            except queue.Empty:
                assert following is not None
                sent = self._upload(following, sent)
                continue
            if following is not None and (task is None or task.name != following.name):
                self._upload(following, sent)
                sent = b""
            if task is not None:
                sent = self._upload(task, sent)
            if self._tasks.empty():
                self._idle.set()

    def _upload(self, task: Task, sent: bytes) -> bytes:
        try:
            trim(task.folder)
            content = collect(task.folder, task.extra, task.who)
        except OSError:  # the job's folder goes while it is being read
            return sent
        if content == sent or not content:
            return sent
        try:
            self._bucket.write(task.name, content)
        except StorageError as error:
            self._log.once("logs", "logs.trouble", error=str(error))
            return sent
        self._log.over("logs", "logs.well")
        return content
