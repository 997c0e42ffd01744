"""Events that the agent's threads post to its loop, and helper threads for slow work.

Events are plain values; only the loop acts on them.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Union

from spotkeeper.contract.generation import SyncReply
from spotkeeper.train.agent_link.control import Commit
from spotkeeper_agent.cloud.identity import IdentityError
from spotkeeper_agent.cloud.metadata import MetadataError
from spotkeeper_agent.cloud.notice import Instance
from spotkeeper_agent.cloud.storage import StorageError
from spotkeeper_agent.core.log import Log
from spotkeeper_agent.host.disk import DiskError, Why
from spotkeeper_agent.job.source import SourceError

RETRY_S = 1.0  # real; pause after a failure


@dataclass(frozen=True)
class Observed:
    """The metadata server shows a new state."""

    instance: Instance


@dataclass(frozen=True)
class Answered:
    """The function answered. ``asked``: the old jobs that the request listed (``Sync.old_jobs``)."""

    reply: SyncReply
    asked: tuple[str, ...] = ()


@dataclass(frozen=True)
class LauncherUp:
    """A launcher answers. ``gen``: the generation that it ran last; ``code``: the exit code, None while it runs."""

    gen: int | None
    code: int | None


@dataclass(frozen=True)
class LauncherLost:
    """The launcher ended, or could not be started; ``log``: the end of its log."""

    reason: str
    log: str = ""


@dataclass(frozen=True)
class ChildEnded:
    """All processes of a generation have ended, except for ``left`` processes that survived SIGKILL."""

    gen: int
    code: int
    left: int = 0


@dataclass(frozen=True)
class SourceReady:
    """The job's source is fetched and unpacked."""

    folder: Path


@dataclass(frozen=True)
class BundleReady:
    """A newer agent's bundle is verified and unpacked."""

    folder: Path


@dataclass(frozen=True)
class SecretsRead:
    """The job's secrets are read. ``values``: by the names of their environment variables; never printed."""

    values: dict[str, str] = field(repr=False)


@dataclass(frozen=True)
class SourcesGone:
    """The sources of this machine's former jobs are deleted."""


@dataclass(frozen=True)
class Mounted:
    """A disk is mounted: its number, its newest complete checkpoint (``<gen>-<step>``), and the jobs on it.

    ``damaged``: newer checkpoints that were complete once but are damaged now, newest first. ``scratch_made``: whether
    the job's scratch folder is new.
    """

    number: int
    newest: str | None
    jobs: tuple[str, ...] = ()
    damaged: tuple[str, ...] = ()
    scratch_made: bool = False


@dataclass(frozen=True)
class Unmounted:
    """The disk is unmounted."""


@dataclass(frozen=True)
class Dropped:
    """The files of these jobs, which are over, were deleted from a static machine's disk."""

    jobs: tuple[str, ...]


@dataclass(frozen=True)
class OutputThere:
    """A generation's output is in the bucket. ``left_out``: for each file that was left out, a line with the reason."""

    gen: int
    files: int
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True)
class MetricsThere:
    """A generation's metrics are in the bucket. ``number``: the file's number; 0: the generation's last file."""

    gen: int
    number: int


@dataclass(frozen=True)
class MirrorThere:
    """This node's part of a checkpoint is in the bucket. ``complete``: all other nodes' parts are there too."""

    commit: Commit
    complete: bool
    bytes: int = 0  # of all nodes' parts, taken to be as large as this one's


@dataclass(frozen=True)
class Unfit:
    """A checkpoint on this disk does not match its COMMIT, so it is not copied."""

    commit: Commit
    why: str


@dataclass(frozen=True)
class Fetched:
    """A checkpoint was fetched from the bucket onto the mounted disk. ``bytes``: how many arrived."""

    commit: Commit
    bytes: int = 0


@dataclass(frozen=True)
class NoCopy:
    """A checkpoint's copy in the bucket is damaged or gone."""

    commit: Commit
    why: str


@dataclass(frozen=True)
class Failed:
    """A helper thread's work with the name ``what`` failed. ``why``: why a disk cannot be used, or None."""

    what: str
    error: str
    why: Why | None = None


@dataclass(frozen=True)
class WorkEnded:
    """A helper thread's work has ended with this event."""

    helper: HelperThread
    what: str
    event: Event


@dataclass(frozen=True)
class Terminated:
    """The agent received SIGTERM."""


Helped = Union[
    SourceReady,
    SourcesGone,
    Mounted,
    Unmounted,
    Dropped,
    OutputThere,
    MetricsThere,
    MirrorThere,
    Unfit,
    Fetched,
    NoCopy,
    Failed,
]
Event = Union[
    BundleReady, SecretsRead, Observed, Answered, LauncherUp, LauncherLost, ChildEnded, Helped, WorkEnded, Terminated
]


class HelperThread(threading.Thread):
    """A thread for slow work, so that the loop never blocks. Only the loop's thread may call its methods.

    Each piece of work has a name. While it runs, and shortly after it failed, no other work of this name starts.
    """

    def __init__(self, post: Callable[[Event], None], log: Log, name: str = "helper") -> None:
        super().__init__(name=name, daemon=True)
        self._post = post
        self._log = log
        self._work: queue.SimpleQueue[tuple[str, Callable[[], Event]]] = queue.SimpleQueue()
        self._busy: set[str] = set()
        self._not_before: dict[str, float] = {}

    def do(self, what: str, work: Callable[[], Event]) -> None:
        """Start ``work``, which ends with the event that it returns, or with :class:`Failed`."""
        if what in self._busy or time.monotonic() < self._not_before.get(what, 0.0):
            return
        self._busy.add(what)
        self._work.put((what, work))

    def busy(self, what: str) -> bool:
        return what in self._busy

    def done(self, what: str, event: Event) -> None:
        """Mark this work as ended, so that work of the same name may start again."""
        self._busy.discard(what)
        if isinstance(event, Failed):
            self._not_before[what] = time.monotonic() + RETRY_S
            self._log.once(what, f"{what}.trouble", error=event.error)
        else:
            self._log.over(what, f"{what}.well")

    def run(self) -> None:
        while True:
            what, work = self._work.get()
            try:
                event = work()
            except (DiskError, SourceError, StorageError, IdentityError, MetadataError, OSError) as error:
                event = Failed(what, str(error), error.why if isinstance(error, DiskError) else None)
            self._post(WorkEnded(self, what, event))
