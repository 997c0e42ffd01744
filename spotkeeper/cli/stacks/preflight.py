"""``preflight``: checks whether this machine can train and survive a preemption."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from spotkeeper.cli.output import console, emit
from spotkeeper.client.errors import CliError, Exit
from spotkeeper_agent import preflight
from spotkeeper_agent.preflight.findings import Check, Finding, Level, Machine, Report, examine

if TYPE_CHECKING:
    from rich.console import RenderableType

STYLES = {Level.OK: "green", Level.SKIPPED: "dim", Level.WARNING: "yellow", Level.ERROR: "bold red"}


def run(
    folder: Path | None, peers: tuple[str, ...], notice: float | None, python: str, *, quick: bool, as_json: bool
) -> None:
    """Run the checks, print their findings, and fail if one is an error.

    Raises:
        CliError: a finding is an error (after all findings are printed), or no such folder.
    """
    if folder is not None and not folder.is_dir():
        raise CliError(f"{folder}: no such folder", Exit.USAGE, "name the folder for checkpoints")
    checks = preflight.boot_checks() if quick else preflight.all_checks()
    report = Report.of(_told(checks, preflight.here(folder, peers, notice, python)))
    emit(report, as_json, _table(report.findings))
    if report.level is Level.ERROR:
        raise CliError(f"preflight: {report.wrong()}", Exit.FAILED)


def _told(checks: tuple[Check, ...], place: Machine) -> Iterator[Finding]:
    """Yield the findings of the checks; a terminal shows the running check."""
    found = examine(checks, place)
    if not sys.stderr.isatty():
        yield from found
        return

    with console(stderr=True).status("preflight") as status:
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
