"""Is this machine fit to train and to be preempted? What is examined, in bounded time, and what to do about it.

On a machine of a stack: ``python -m spotkeeper.vm.preflight``; elsewhere ``spotkeeper preflight`` does the same. It
changes nothing (the probe of a disk's speed writes a file and deletes it), needs no rights, and where it cannot
look, says why. ``checks.py`` looks at the machine, ``checks_gpu.py`` at what accelerators need.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import msgspec
from msgspec import Struct

from spotkeeper.clock import Clock
from spotkeeper.vm import metadata as machines
from spotkeeper.vm.metadata import Metadata, MetadataError
from spotkeeper.vm.settings import NOTICE_S, notice_s


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


class Report(Struct, frozen=True):
    """All findings; ``level``: of the worst."""

    level: Level
    findings: tuple[Finding, ...]

    @classmethod
    def of(cls, findings: Iterable[Finding]) -> Report:
        found, order = tuple(findings), tuple(Level)
        return cls(max((one.level for one in found), key=order.index, default=Level.OK), found)

    def wrong(self) -> str:
        """The names of the checks that found an error."""
        return ", ".join(one.check for one in self.findings if one.level is Level.ERROR)


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


MOUNT = Path("/mnt/sk-data")


def here(folder: Path | None, peers: tuple[str, ...], notice: float | None, python: str) -> Place:
    """This machine. ``folder``: None is the data disk, or where it is asked; ``notice``: None is what the pool has."""
    metadata = _metadata()
    return Place(
        metadata=metadata,
        folder=folder or (MOUNT if MOUNT.is_dir() else Path.cwd()),
        notice_s=_notice_s(metadata) if notice is None else notice,
        peers=peers,
        python=python,
        environ=dict(os.environ),
    )


def _metadata() -> Metadata | None:
    """None where neither the firmware nor the environment speaks of a cloud: nobody waits for an address then."""
    named = machines.GCE_HOST in os.environ or machines.EC2_ENDPOINT in os.environ
    if not named and not machines.vendor().startswith(("Google", "Amazon")):
        return None
    return machines.here(Clock.from_env())


def _notice_s(metadata: Metadata | None) -> float:
    try:
        return notice_s(metadata.instance().attributes.get("sk-notice-s")) if metadata else NOTICE_S
    except MetadataError:
        return NOTICE_S


def main(argv: list[str]) -> int:
    """Print the findings as they come; 1 where something will fail."""
    import argparse  # the agent imports this module, and has no use for it

    parser = argparse.ArgumentParser(prog="spotkeeper.vm.preflight", description="Look whether this machine is fit.")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="where checkpoints go")
    parser.add_argument("--peer", action="append", default=[], metavar="ADDRESS", help="must be reachable")
    parser.add_argument("--notice", type=float, metavar="SECONDS", help="that a preemption gives")
    parser.add_argument("--python", default="python3", metavar="PROGRAM", help="the interpreter that runs the job")
    parser.add_argument("--quick", action="store_true", help="only what every boot looks at")
    parser.add_argument("--json", action="store_true", help="one document instead of text")
    asked = parser.parse_args(argv)
    place = here(asked.folder, tuple(asked.peer), asked.notice, asked.python)
    findings: list[Finding] = []
    for one in examine(boot_checks() if asked.quick else all_checks(), place):
        findings.append(one)
        if not asked.json:
            remedy = f"\n{'':23} do: {one.remedy}" if one.remedy else ""
            print(f"{one.check:13} {one.level.value:8} {one.found}{remedy}", flush=True)
    report = Report.of(findings)
    if asked.json:
        print(msgspec.json.encode(report).decode())
    return 1 if report.level is Level.ERROR else 0


if __name__ == "__main__":
    from spotkeeper.vm import preflight  # noqa: PLW0406 - the module that the checks know; this is another copy

    sys.exit(preflight.main(sys.argv[1:]))
