"""What an agent must know again after it was killed: ``run/spotkeeper/agent.json``, gone with the boot.

It holds no decision of the function's: the document is asked for anew.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec
from msgspec import Struct

from spotkeeper.spec import codec
from spotkeeper.spec.generation import JobRun
from spotkeeper.vm.notice import Notice


class Assignment(Struct, frozen=True):
    """What this machine is, by the record."""

    job: str
    rank: int
    attempt: int
    disk: int | None = None

    def same_life(self, other: Assignment | None) -> bool:
        """Whether it is the same attempt; the disk may come later."""
        return other is not None and (self.job, self.rank, self.attempt) == (other.job, other.rank, other.attempt)


class Saved(Struct, frozen=True):
    """``started``: the newest generation started here; ``ended``: the newest whose end has been reported."""

    boot: str
    assignment: Assignment | None = None
    run: JobRun | None = None
    started: int = -1
    ended: int = -1
    notice: Notice | None = None

    def write(self, folder: Path) -> None:
        """Whole or not at all. Raises OSError."""
        temporary = folder / "agent.json.tmp"
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with open(fd, "wb") as file:  # noqa: PTH123 - a descriptor
            file.write(msgspec.json.encode(self))
        temporary.replace(folder / "agent.json")

    @classmethod
    def read(cls, folder: Path, boot: str) -> Saved:
        """What the agent before this one left; nothing where it was of another boot."""
        with contextlib.suppress(OSError, msgspec.DecodeError):
            saved = codec.decode((folder / "agent.json").read_bytes(), cls)
            if saved.boot == boot:
                return saved
        return cls(boot)
