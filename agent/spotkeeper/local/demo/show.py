"""What the demo shows: the live view with the storm's own words, and the table at the end."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from spotkeeper.local.demo.proof import Report
from spotkeeper.report.lines import event_line
from spotkeeper.report.render import live
from spotkeeper.report.view import JobView
from spotkeeper.report.words import duration, saved, usd


class Screen:
    """A live panel on a terminal; elsewhere a line for every event."""

    def __init__(self, console: Console, notes: list[str]) -> None:
        self._console = console
        self._notes = notes
        self._told: set[str] = set()
        self._noted = 0

    def update(self, view: JobView, screen: Live | None) -> None:
        if screen is not None:
            words = Text("\n".join(f"  storm: {note}" for note in self._notes[-3:]), style="bold yellow")
            screen.update(Group(live(view, rows=12), words), refresh=True)
            return
        for note in self._notes[self._noted :]:
            self._console.print(f"  storm: {note}", style="bold yellow", highlight=False)
        self._noted = len(self._notes)
        for line in view.events:
            if line.id not in self._told:
                self._told.add(line.id)
                self._console.print(f"{event_line(line)}   (step {view.step or 0})", highlight=False)

    def last(self, view: JobView) -> None:
        """The panel as it was at the end, to stay in the scrollback."""
        if self._console.is_terminal:
            self._console.print(live(view, rows=100))


def report(console: Console, done: Report, weights: str | None, seconds: float, path: Path) -> None:
    table = Table(
        title="every recovery (real seconds, boots apart)",
        title_justify="left",
        box=None,
        pad_edge=False,
        header_style="dim",
    )
    for title in ("cause", "announced", "steps lost", "s to next step", "boot s", "replaced by"):
        table.add_column(title, justify="left" if title in ("cause", "replaced by") else "right", no_wrap=True)
    for one in done.recoveries:
        by = f"{one.replacement} in {one.zone}" if one.replacement else "-"
        table.add_row(
            one.cause,
            "yes" if one.announced else "no",
            str(one.steps_lost),
            f"{one.seconds:.2f}",
            f"{one.boot_seconds:.1f}" if one.boot_seconds else "-",
            by,
        )
    console.print()
    console.print(table)
    cost, left = done.cost, done.left_over
    percent = 100 * cost.saved / cost.on_demand_only if cost.on_demand_only else 0.0
    lost = sum(one.steps_lost for one in done.recoveries)
    lines = [
        f"{done.steps} steps in {done.generations} generations; lost work: {lost} steps trained twice",
        f"billed {usd(cost.spent)}, the same machine-hours on demand {usd(cost.on_demand_only)}: {saved(percent)}"
        " (the static node's time before and after the job is in both)",
        f"weights {weights or '(none)'}",
        ("identical, bit by bit, to those of the run left alone" if done.weights_identical else "NOT THE SAME")
        + f"; left over: {left.vms} VMs, {left.disks} disks, {left.processes} processes",
        f"{duration(seconds)} in all, stack by the {done.engine} engine; {path}",
    ]
    console.print("\n" + "\n".join(lines), highlight=False)
