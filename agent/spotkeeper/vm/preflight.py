"""Is this machine fit to train and to be preempted? What is examined, in bounded time, and what to do about it.

It changes nothing (the probe of a disk's speed writes a file and deletes it), needs no rights, and where it cannot
look, says why. ``checks.py`` looks at the machine, ``checks_gpu.py`` at what accelerators need.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from msgspec import Struct

from spotkeeper.vm.metadata import Metadata


class Level(str, Enum):
    """From what needs nothing to what will fail."""

    OK = "ok"
    SKIPPED = "skipped"  # cannot be looked at here; the finding says where it can
    WARNING = "warning"
    ERROR = "error"


class Finding(Struct, frozen=True, omit_defaults=True):
    """``found``: what is so; ``remedy``: what to do, "" where nothing needs doing; ``figures``: for programs."""

    check: str
    level: Level
    found: str
    remedy: str = ""
    figures: dict[str, float] = {}


@dataclass(frozen=True)
class Place:
    """What is examined, and with what in mind.

    Attributes:
        metadata: this machine's; None where it is no cloud machine.
        folder: where checkpoints go.
        notice_s: from a preemption's notice to the end, real seconds.
        peers: addresses (``host`` or ``host:port``) that must be reachable.
        python: the interpreter that runs the job.
        root: of ``/proc``, ``/sys`` and ``/dev``.
    """

    metadata: Metadata | None = None
    folder: Path = Path()
    notice_s: float = 120.0
    peers: tuple[str, ...] = ()
    python: str = "python3"
    environ: dict[str, str] = field(default_factory=dict)
    root: Path = Path("/")

    def text(self, path: str) -> str:
        """What a file of the kernel's says, without the white space around; "" where it cannot be read."""
        try:
            return (self.root / path).read_text(errors="replace").strip()
        except OSError:
            return ""

    def names(self, path: str) -> list[str]:
        """What is in a folder of the kernel's, in order; nothing where there is none."""
        try:
            return sorted(entry.name for entry in (self.root / path).iterdir())
        except OSError:
            return []


@dataclass(frozen=True)
class Check:
    """One thing that is looked at. ``look`` is given ``limit_s`` real seconds; what takes longer is a finding.

    ``boot``: cheap enough for every boot; ``alone``: it measures, and nothing else runs meanwhile.
    """

    name: str
    look: Callable[[Place], Finding]
    limit_s: float
    late: str  # the remedy where it does not end in time
    boot: bool = False
    alone: bool = False


def examine(checks: Iterable[Check], place: Place) -> Iterator[Finding]:
    """The checks' findings in their order, each as soon as it is there."""
    chosen = tuple(checks)
    begun = {check.name: _Looking(check, place) for check in chosen if not check.alone}
    for check in chosen:
        yield (begun.get(check.name) or _Looking(check, place)).finding()


class _Looking:
    """A check under way, in a thread of its own: one that hangs is left behind, not waited for."""

    def __init__(self, check: Check, place: Place) -> None:
        self._check = check
        self._place = place
        self._found: Finding | None = None
        self._until = time.monotonic() + check.limit_s
        self._thread = threading.Thread(target=self._look, name=f"preflight-{check.name}", daemon=True)
        self._thread.start()

    def finding(self) -> Finding:
        self._thread.join(max(0.0, self._until - time.monotonic()))
        check = self._check
        late = f"no answer within {check.limit_s:g} s"
        return self._found or Finding(check.name, Level.WARNING, late, check.late)

    def _look(self) -> None:
        try:
            self._found = self._check.look(self._place)
        except OSError as error:
            why = f"cannot look: {error}"
            self._found = Finding(self._check.name, Level.WARNING, why, "run it as a user who may read that")


def all_checks() -> tuple[Check, ...]:
    """In the order in which they are told."""
    from spotkeeper.vm import checks, checks_gpu

    return (*checks.CHECKS, *checks_gpu.CHECKS)


def boot_checks() -> tuple[Check, ...]:
    return tuple(check for check in all_checks() if check.boot)


def worst(findings: Iterable[Finding]) -> Level:
    order = tuple(Level)
    return max((finding.level for finding in findings), key=order.index, default=Level.OK)
