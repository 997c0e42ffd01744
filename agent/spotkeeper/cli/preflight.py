"""``preflight``: whether this machine is fit to train and to be preempted; a laptop is told what only a machine can."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from spotkeeper.cli.errors import CliError, Exit
from spotkeeper.cli.output import emit
from spotkeeper.vm import preflight
from spotkeeper.vm.preflight import Check, Finding, Level, Place, Report

if TYPE_CHECKING:
    from rich.console import RenderableType

STYLES = {Level.OK: "green", Level.SKIPPED: "dim", Level.WARNING: "yellow", Level.ERROR: "bold red"}


def run(
    folder: Path | None, peers: tuple[str, ...], notice: float | None, python: str, *, quick: bool, as_json: bool
) -> None:
    """Look, print, and fail where something will fail.

    Raises:
        CliError: a finding is an error (it is printed before), or there is no such folder.
    """
    if folder is not None and not folder.is_dir():
        raise CliError(f"{folder}: no such folder", Exit.USAGE, "name the folder where checkpoints go")
    checks = preflight.boot_checks() if quick else preflight.all_checks()
    report = Report.of(_told(checks, preflight.here(folder, peers, notice, python)))
    emit(report, as_json, _table(report.findings))
    if report.level is Level.ERROR:
        raise CliError(f"preflight: {report.wrong()}", Exit.FAILED)


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
