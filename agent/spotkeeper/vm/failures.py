"""How the workers of this machine ended: what they returned, and which failed first, by what they and torchrun noted
(``launcher/failure.py``).
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Struct

from spotkeeper.spec import codec
from spotkeeper.spec.failure import Failure
from spotkeeper.vm.launcher.failure import NAME

MOST_RANKS = 10_000  # of one machine, as ``Failure`` tells them


class _Note(Struct, frozen=True):
    at: Annotated[float, msgspec.Meta(ge=0.0, lt=1e11)]  # unix seconds; anybody's, and no other makes a fact
    what: str = ""
    follows: bool = False


def failures(folder: Path) -> dict[int, Failure]:
    """Of each worker that failed, by local rank."""
    found = {}
    for path in folder.glob(f"{NAME}.*"):
        with contextlib.suppress(OSError, ValueError, msgspec.DecodeError):
            local_rank = int(path.suffix[1:])
            note = codec.decode(path.read_bytes(), _Note)
            if 0 <= local_rank < MOST_RANKS:
                found[local_rank] = Failure(note.follows, int(note.at * 1000), local_rank)
    return found


def first(folder: Path) -> Failure | None:
    """The earliest that is no peer's doing; else the earliest."""
    return min(failures(folder).values(), key=Failure.order, default=None)


def exit_codes(folder: Path) -> list[int]:
    """What the workers that ended in order returned (``exit.<local rank>``)."""
    codes = []
    for path in folder.glob("exit.*"):
        with contextlib.suppress(OSError, ValueError):
            if path.suffix != ".tmp":
                codes.append(int(path.read_text()) & 0xFF)  # as exit(3) has it: a job may write anything
    return codes
