"""A thread that uploads the end of a job's logs to ``jobs/<job>/logs/<node>/<gen>.log``.

Only the end of a log is uploaded, because readers look there first and a job can print gigabytes. The machine keeps
more of each log, but not all, since logs lie in ``/run``, in memory that job and agent need.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from spotkeeper.clock import Clock
from spotkeeper.contract.facts import Failure
from spotkeeper.contract.redact import hide
from spotkeeper.contract.uploads import LogPart, join_log
from spotkeeper.train.core import beneath
from spotkeeper_agent.cloud.storage import Bucket, StorageError
from spotkeeper_agent.core.log import Log
from spotkeeper_agent.job.failures import failures, printed
from spotkeeper_agent.launcher import output, stacks

TAIL_BYTES = 64 << 10  # per file
TOTAL_BYTES = 512 << 10  # per upload, shared evenly by its files
EVERY_S = 15.0  # virtual; interval while the job prints
FLOOR_S = 1.0  # real
LAUNCHER_LOG = "torchrun.log"


@dataclass(frozen=True)
class Task:
    """An upload. ``who``: this machine's name in the log; ``extra``: more text, such as the error of a failed start."""

    name: str
    folder: Path
    extra: str = ""
    who: str = "this machine"


def object_name(job: str, node: int, gen: int) -> str:
    return f"jobs/{job}/logs/{node}/{gen}.log"


def whose(node: int, machine: str) -> str:
    return f"node {node} ({machine})"


def collect(folder: Path, extra: str = "", who: str = "this machine") -> bytes:
    """Return the last output of torchrun and this node's ranks (``contract.uploads``).

    Errors come last, where a reader looks first. At the very end are the errors of the rank that probably caused the
    crash: the first rank that failed for a reason of its own, and not because a peer had ended.
    """
    failed = failures(folder)
    logs = [Path(name) for name in printed(folder)]
    ranks = sorted((path for path in logs if path.name == "stdout.log"), key=_local_rank)
    errors = [path for path in logs if path.name == "stderr.log"]
    errors.sort(key=lambda path: _first_to_fail_last(failed, path))
    files = (Path(LAUNCHER_LOG), *ranks, Path(stacks.TEXT), *errors)
    limit = min(TAIL_BYTES, TOTAL_BYTES // len(files))
    parts = [_end(folder, path, _title(path, who, len(ranks)), limit) for path in files]
    if extra:
        parts.append(LogPart("", extra.encode()))
    return join_log(part for part in parts if part.text.strip())


def _without_children(log: bytes) -> bytes:
    """Cut the thirty lines about a failed worker from torchrun's log, because the worker's own log tells more."""
    end = log.find(b".ChildFailedError:")
    start = log.rfind(b"Traceback (most recent call last):", 0, max(0, end))
    return log if end < 0 or start < 0 else log[:start]


def _local_rank(path: Path) -> int:
    return int(path.parent.name) if path.parent.name.isdigit() else 0


def _first_to_fail_last(failed: Mapping[int, Failure], path: Path) -> tuple[bool, bool, int, int]:
    """Return a sort key: ranks without a failure, then failures that a peer caused, then others; the earliest last."""
    rank = _local_rank(path)
    failure = failed.get(rank)
    return (False, False, 0, rank) if failure is None else (True, not failure.follows, -failure.at_ms, rank)


def _title(path: Path, who: str, ranks: int) -> str:
    if path.name in (LAUNCHER_LOG, stacks.TEXT):
        return f"{who} {path.stem}"
    return f"{who}, local rank {path.parent.name}, {path.stem}" if ranks > 1 else f"{who} {path.stem}"


def _printable(name: str) -> str:
    """Return a file's name as text; a job can use names that are not UTF-8."""
    return name.encode("utf-8", "backslashreplace").decode()


def _end(folder: Path, path: Path, title: str, limit: int) -> LogPart:
    """Return a file's last whole lines, at most ``limit`` bytes. If the last line alone is longer, return its end."""
    try:
        text, start = beneath.tail(folder, str(path), limit)
    except OSError:
        return LogPart(title, b"")
    text = hide(text)
    begins = text.find(b"\n", 0, -1) + 1 if start else 0
    text = text[begins:]
    if path.name == LAUNCHER_LOG:
        text = _without_children(text)
    return LogPart(_printable(title), text, start + begins, _printable(str(folder / path)))


def trim(folder: Path) -> None:
    """Free the space of all but the end of each long log, for logs that ``launcher/output.py`` does not keep short."""
    for name in printed(folder):
        with contextlib.suppress(OSError):  # it is gone, or the file system has no holes
            fd = beneath.open_file(folder, name, os.O_WRONLY)
            try:
                found = os.fstat(fd)
                if found.st_blocks * 512 > 2 * output.KEPT_BYTES:
                    output.keep_end(fd, found.st_size, output.KEPT_BYTES)
            finally:
                os.close(fd)


class Uploader(threading.Thread):
    """Uploads one task's logs whenever they change, until it gets another task."""

    def __init__(self, bucket: Bucket, clock: Clock, log: Log) -> None:
        super().__init__(name="logs", daemon=True)
        self._bucket = bucket
        self._clock = clock
        self._log = log
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()

    def follow(self, task: Task) -> None:
        """Upload the previous task a last time, and this task from now on."""
        self._idle.clear()
        self._tasks.put(task)

    def rest(self) -> None:
        """Upload the current task a last time, then pause."""
        self._idle.clear()
        self._tasks.put(None)

    def flush(self, timeout_s: float) -> None:
        """Wait until the last upload has ended, at most ``timeout_s`` real seconds."""
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
        except (OSError, ValueError):  # the job's folder was deleted meanwhile, or has odd contents
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
