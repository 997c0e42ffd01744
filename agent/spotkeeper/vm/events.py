"""What the agent's threads tell its loop. Plain values; the loop alone acts on them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Union

from spotkeeper.spec.generation import SyncReply
from spotkeeper.train.control import Commit
from spotkeeper.vm.disk import Why
from spotkeeper.vm.metadata import Instance


@dataclass(frozen=True)
class Observed:
    """The metadata server shows something new."""

    instance: Instance


@dataclass(frozen=True)
class Answered:
    """The function answered. ``asked``: the jobs of which it was asked whether they are over."""

    reply: SyncReply
    asked: tuple[str, ...] = ()


@dataclass(frozen=True)
class LauncherUp:
    """A launcher answers. ``gen`` and ``code``: the generation it ran last; a code of None means that it runs."""

    gen: int | None
    code: int | None


@dataclass(frozen=True)
class LauncherLost:
    """The launcher died, or could not be started; ``log``: its last words."""

    reason: str
    log: str = ""


@dataclass(frozen=True)
class ChildEnded:
    """All processes of a generation are gone; ``left``: how many resisted."""

    gen: int
    code: int
    left: int = 0


@dataclass(frozen=True)
class SourceReady:
    sha256: str | None
    folder: Path


@dataclass(frozen=True)
class BundleReady:
    """The agent that this one is to become, verified and unpacked."""

    folder: Path


@dataclass(frozen=True)
class SecretsRead:
    """By their variables' names. Never shown."""

    values: dict[str, str] = field(repr=False)


@dataclass(frozen=True)
class SourcesGone:
    """Of the job that this machine let go of, and of those before it."""


@dataclass(frozen=True)
class Mounted:
    """``number`` of the disk, the newest complete checkpoint on it (``<gen>-<step>``), and all jobs that have some.

    ``damaged``: newer ones that were complete once, newest first.
    """

    number: int
    newest: str | None
    jobs: tuple[str, ...] = ()
    damaged: tuple[str, ...] = ()


@dataclass(frozen=True)
class Unmounted:
    number: int


@dataclass(frozen=True)
class Dropped:
    """A static node's disk has nothing of these jobs any more."""

    jobs: tuple[str, ...]


@dataclass(frozen=True)
class OutputThere:
    """All that a generation left in its output folder is in the bucket; ``left_out``: but for that, and why."""

    gen: int
    files: int
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True)
class MirrorThere:
    """This rank's part of a checkpoint is in the bucket; ``complete``: and so are those of all others."""

    commit: Commit
    complete: bool


@dataclass(frozen=True)
class Unfit:
    """What this disk has of a checkpoint is not what was committed: no copy is made of it."""

    commit: Commit
    why: str


@dataclass(frozen=True)
class Fetched:
    """A checkpoint's copy is on the mounted disk."""

    commit: Commit


@dataclass(frozen=True)
class NoCopy:
    """A checkpoint's copy in the bucket is damaged or gone."""

    commit: Commit
    why: str


@dataclass(frozen=True)
class Failed:
    """A piece of the helper's work failed; ``what`` names the piece, which is tried again. ``why``: of a disk."""

    what: str
    error: str
    why: Why | None = None


@dataclass(frozen=True)
class Terminated:
    """SIGTERM to the agent itself."""


Helped = Union[
    SourceReady, SourcesGone, Mounted, Unmounted, Dropped, OutputThere, MirrorThere, Unfit, Fetched, NoCopy, Failed
]
Event = Union[BundleReady, SecretsRead, Observed, Answered, LauncherUp, LauncherLost, ChildEnded, Helped, Terminated]
