"""Uploads a job's logs in a thread: all output as chunks (``chunks.py``), the end of each log as ``<node>/<gen>.log``.

The ends of all logs, sorted so that the probable cause of a crash comes last, let ``status`` tell why a generation
failed. They are uploaded once a minute and when the generation has ended. On the machine the log files are kept short:
they lie in ``/run``, a file system in memory, and job and agent need this memory.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from spotkeeper.clock import Clock
from spotkeeper.contract.facts import Failure
from spotkeeper.contract.redact import known
from spotkeeper.contract.uploads import LogPart, join_log, log_folder
from spotkeeper.train.core import beneath
from spotkeeper_agent.cloud.storage import Bucket, StorageError
from spotkeeper_agent.core.log import Log
from spotkeeper_agent.job.chunks import LAUNCHER_LOG, LEFT_S, NodeLog, NodeRun, left
from spotkeeper_agent.job.failures import failures, printed
from spotkeeper_agent.launcher import output, stacks
from spotkeeper_agent.launcher.spool import hide, reach

TAIL_BYTES = 64 << 10  # per file
TOTAL_BYTES = 512 << 10  # per upload, shared evenly by its files
EVERY_S = 7.0  # virtual; with the second in the output worker and the upload's own, a machine's last 10 s may be lost
FLOOR_S = 1.0  # real
ENDS_S = 60.0  # virtual; interval of the ends


@dataclass(frozen=True)
class Task:
    """A generation's log. ``folder``: the run folder; ``who``: this machine's name in the log.

    ``extra``: more text, such as the error of a failed start.
    """

    run: NodeRun
    folder: Path
    extra: str = ""
    who: str = "this machine"

    @property
    def name(self) -> str:
        return f"{log_folder(self.run.job, self.run.node)}{self.run.gen}.log"


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
    return int(path.parent.name) if path.parent.name.isdecimal() else 0


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
    secrets = known()
    try:
        text, start = beneath.tail(folder, str(path), limit + reach(secrets))
    except OSError:
        return LogPart(title, b"")
    more = max(0, len(text) - limit)
    text, start = hide(text, secrets)[more:], start + more
    begins = text.find(b"\n", 0, -1) + 1 if start else 0
    text = text[begins:]
    if path.name == LAUNCHER_LOG:
        text = _without_children(text)
    return LogPart(_printable(title), text, start + begins, _printable(str(folder / path)))


def trim(folder: Path) -> None:
    """Free the space of all but the end of each long log, such as torchrun's: not all are kept short as they grow."""
    for name in printed(folder):
        with contextlib.suppress(OSError):  # it is gone, or the file system has no holes
            fd = beneath.open_file(folder, name, os.O_WRONLY)
            try:
                found = os.fstat(fd)
                if found.st_blocks * 512 > 2 * output.KEPT_BYTES:
                    output.keep_end(fd, found.st_size, output.KEPT_BYTES)
            finally:
                os.close(fd)


@dataclass(frozen=True)
class _Message:
    """What to do from now on; ``ended``: generations with a folder here that have ended."""

    task: Task | None
    ended: list[NodeRun]


class Uploader(threading.Thread):
    """Uploads the current task's logs whenever they change, and what ended generations have left on the disk."""

    def __init__(self, bucket: Bucket, logs: Path, clock: Clock, log: Log) -> None:
        super().__init__(name="logs", daemon=True)
        self._bucket = bucket
        self._logs = logs
        self._clock = clock
        self._log = log
        self._messages: queue.SimpleQueue[_Message] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._ended: list[NodeRun] = []  # generations that have left something on the disk
        self._ends = b""  # the ends that were uploaded last
        self._ends_at = 0.0

    def follow(self, task: Task) -> None:
        """Upload the previous task a last time, then this one. Call it once all other generations here have ended."""
        self._idle.clear()
        self._messages.put(_Message(task, [run for run in left(self._logs) if run != task.run]))

    def rest(self) -> None:
        """Upload the current task a last time, then pause. Call it once all generations here have ended."""
        self._idle.clear()
        self._messages.put(_Message(None, left(self._logs)))

    def flush(self, timeout_s: float) -> None:
        """Wait until the last upload has ended, at most ``timeout_s`` real seconds."""
        self._idle.wait(timeout_s)

    def run(self) -> None:
        task: Task | None = None
        log: NodeLog | None = None
        while True:
            following = task
            busy = following is not None or self._ended
            try:
                message = self._messages.get(timeout=max(FLOOR_S, self._clock.real_s(EVERY_S)) if busy else None)
            except queue.Empty:
                self._round(following, log)
                continue
            task = message.task
            if following is not None and (task is None or task.run != following.run):
                self._round(following, log, last=True)
                log, self._ends = None, b""
            self._ended = message.ended
            if task is not None:
                log = log or NodeLog(self._bucket, self._logs, task.run)
                log.note(task.extra)
                self._ends_at = 0.0
            self._round(task, log)
            if self._messages.empty():
                self._idle.set()

    def _round(self, task: Task | None, log: NodeLog | None, *, last: bool = False) -> None:
        if task is not None and log is not None:
            now = self._clock.steady()
            if last or now - self._ends_at >= ENDS_S or not self._ends:
                self._ends, self._ends_at = self._upload(task, self._ends), now
            self._send(log, task.folder, last=last)
        self._ended = [run for run in self._ended if not self._finish(NodeLog(self._bucket, self._logs, run))]

    def _finish(self, log: NodeLog) -> bool:
        """Send what an ended generation has left here; give it up after a day. Return whether nothing is left."""
        try:
            done = self._send(log, None, last=True) or time.time() - log.folder.stat().st_mtime > LEFT_S
        except OSError:
            return False
        if done:
            log.forget()
        return done

    def _send(self, log: NodeLog, folder: Path | None, *, last: bool) -> bool:
        try:
            taken = log.collect(folder, last=last)
            log.upload(last=last)
        except (OSError, StorageError) as error:
            self._log.once("chunks", "logs.chunks.trouble", error=str(error))
            return False
        self._log.over("chunks", "logs.chunks.well")
        return taken

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
