"""The classes for preflight's checks and findings, and the code that runs checks in bounded time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from msgspec import Struct

from spotkeeper_agent.cloud.metadata import Metadata


class Level(str, Enum):
    """A finding's severity, in rising order."""

    OK = "ok"
    SKIPPED = "skipped"  # cannot be checked here; the finding says where it can
    WARNING = "warning"
    ERROR = "error"


class Finding(Struct, frozen=True, omit_defaults=True):
    """A check's result. ``found``: the facts; ``remedy``: what to do, or ""; ``figures``: measured values by name."""

    check: str
    level: Level
    found: str
    remedy: str = ""
    figures: dict[str, float] = {}


class Report(Struct, frozen=True):
    """All findings; ``level`` is the level of the worst finding."""

    level: Level
    findings: tuple[Finding, ...]

    @classmethod
    def of(cls, findings: Iterable[Finding]) -> Report:
        found, order = tuple(findings), tuple(Level)
        return cls(max((one.level for one in found), key=order.index, default=Level.OK), found)

    def wrong(self) -> str:
        """The names of checks that found an error, comma-separated."""
        return ", ".join(one.check for one in self.findings if one.level is Level.ERROR)


@dataclass(frozen=True)
class Machine:
    """The machine as the checks see it, and the requirements that it must meet.

    Attributes:
        metadata: the machine's metadata client; None outside a cloud.
        folder: the folder for checkpoints.
        notice_s: real seconds from a preemption notice to the machine's end.
        peers: addresses (``host`` or ``host:port``) that must be reachable.
        python: the interpreter that runs the job.
        fabric: network of the GPUs (``sk-fabric``); "": plain TCP.
        root: the folder that holds ``/proc``, ``/sys`` and ``/dev``.
    """

    metadata: Metadata | None = None
    folder: Path = Path()
    notice_s: float = 120.0
    peers: tuple[str, ...] = ()
    python: str = "python3"
    fabric: str = ""
    environ: dict[str, str] = field(default_factory=dict)
    root: Path = Path("/")

    def text(self, path: str) -> str:
        """Return a kernel file's stripped text; "" if it cannot be read."""
        try:
            return (self.root / path).read_text(errors="replace").strip()
        except OSError:
            return ""

    def names(self, path: str) -> list[str]:
        """Return the sorted names in a folder of ``/proc``, ``/sys`` or ``/dev``; [] if it does not exist."""
        try:
            return sorted(entry.name for entry in (self.root / path).iterdir())
        except OSError:
            return []


@dataclass(frozen=True)
class Check:
    """One check. If ``look`` takes longer than ``limit_s`` real seconds, the finding says that no answer came.

    ``boot``: whether it is cheap enough for every boot; ``alone``: it measures a speed, so nothing else runs beside it.
    """

    name: str
    look: Callable[[Machine], Finding]
    limit_s: float
    late: str  # the remedy if the check does not end in time
    boot: bool = False
    alone: bool = False


def examine(checks: Iterable[Check], machine: Machine) -> Iterator[Finding]:
    """Run checks, those without ``alone`` at the same time; yield their findings in order."""
    chosen = tuple(checks)
    begun = {check.name: _RunningCheck(check, machine) for check in chosen if not check.alone}
    for check in chosen:
        yield (begun.get(check.name) or _RunningCheck(check, machine)).finding()


class _RunningCheck:
    """A check that runs in its own thread. A check that hangs is abandoned."""

    def __init__(self, check: Check, machine: Machine) -> None:
        self._check = check
        self._place = machine
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
            why = f"cannot check this: {error}"
            self._found = Finding(self._check.name, Level.WARNING, why, "run preflight as a user who may read this")
