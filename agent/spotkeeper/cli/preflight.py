"""``preflight``: whether this machine is fit to train and to be preempted; a laptop is told what only a machine can."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from spotkeeper.cli.errors import CliError, Exit
from spotkeeper.cli.output import emit
from spotkeeper.vm import metadata as machines
from spotkeeper.vm import preflight
from spotkeeper.vm.metadata import Metadata, MetadataError
from spotkeeper.vm.preflight import Check, Finding, Level, Place

if TYPE_CHECKING:
    from rich.console import RenderableType

MOUNT = Path("/mnt/sk-data")
STYLES = {Level.OK: "green", Level.SKIPPED: "dim", Level.WARNING: "yellow", Level.ERROR: "bold red"}


class Report(Struct, frozen=True):
    """What ``--json`` prints. ``level``: of the worst finding."""

    level: Level
    findings: tuple[Finding, ...]


def run(
    folder: Path | None, peers: tuple[str, ...], notice_s: float | None, python: str, *, quick: bool, as_json: bool
) -> None:
    """Look, print, and fail where something will fail.

    Raises:
        CliError: a finding is an error (it is printed before), or there is no such folder.
    """
    if folder is not None and not folder.is_dir():
        raise CliError(f"{folder}: no such folder", Exit.USAGE, "name the folder where checkpoints go")
    checks = preflight.boot_checks() if quick else preflight.all_checks()
    findings = tuple(_told(checks, _place(folder, peers, notice_s, python)))
    worst = preflight.worst(findings)
    emit(Report(worst, findings), as_json, _table(findings))
    if worst is Level.ERROR:
        wrong = ", ".join(finding.check for finding in findings if finding.level is Level.ERROR)
        raise CliError(f"preflight: {wrong}", Exit.FAILED)


def _place(folder: Path | None, peers: tuple[str, ...], notice_s: float | None, python: str) -> Place:
    metadata = _metadata()
    return Place(
        metadata=metadata,
        folder=folder or (MOUNT if MOUNT.is_dir() else Path.cwd()),
        notice_s=notice_s if notice_s is not None else _notice_s(metadata),
        peers=peers,
        python=python,
        environ=dict(os.environ),
    )


def _metadata() -> Metadata | None:
    """None where neither the firmware nor the environment speaks of a cloud: nobody waits for an address then."""
    named = machines.GCE_HOST in os.environ or machines.EC2_ENDPOINT in os.environ
    if not named and not machines.vendor().startswith(("Google", "Amazon")):
        return None
    from spotkeeper.clock import Clock

    return machines.here(Clock.from_env())


def _notice_s(metadata: Metadata | None) -> float:
    from spotkeeper.vm.settings import NOTICE_S, notice_s

    try:
        return notice_s(metadata.instance().attributes.get("sk-notice-s")) if metadata else NOTICE_S
    except MetadataError:
        return NOTICE_S


def _told(checks: tuple[Check, ...], place: Place) -> Iterator[Finding]:
    """The findings; a terminal is shown what is being looked at meanwhile."""
    found = preflight.examine(checks, place)
    if not sys.stderr.isatty():
        yield from found
        return
    from rich.console import Console

    with Console(stderr=True).status("preflight") as status:
        for check in checks:
            status.update(f"preflight: {check.name}")
            yield next(found)


def _table(findings: Iterable[Finding]) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in ("check", "", "found", "what to do"):
        table.add_column(title, no_wrap=title in ("check", ""), overflow="fold")
    for one in findings:
        table.add_row(one.check, Text(one.level.value, style=STYLES[one.level]), one.found, one.remedy)
    return table
