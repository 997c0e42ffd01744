"""Prints a deployment as ``pulumi up`` does: a line for every resource, then outputs and totals."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from spotkeeper.local.deploy.result import DeployResult, Event, Op

_MARK = {
    Op.SAME: ("  ", "dim"),
    Op.CREATE: ("+ ", "green"),
    Op.UPDATE: ("~ ", "yellow"),
    Op.REPLACE: ("+-", "magenta"),
    Op.DELETE: ("- ", "red"),
}
_PAST = {
    Op.SAME: "unchanged", Op.CREATE: "created", Op.UPDATE: "updated", Op.REPLACE: "replaced", Op.DELETE: "deleted",
}  # fmt: skip
_SHOW_S = 1.0  # as in Pulumi, only what took noticeable time says how long


class Printer:
    """An ``on_event`` that prints what is done. Of a quiet kind where nothing changes."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def __call__(self, event: Event) -> None:
        if not event.done or event.op is Op.SAME:
            return
        mark, style = ("! ", "bold red") if event.error else _MARK[event.op]
        took = f" ({event.seconds:.1f}s)" if event.seconds >= _SHOW_S else ""
        what = f"failed: {event.error}" if event.error else f"{_PAST[event.op]}{took}"
        thing = f"{escape(type_words(event.type)):<42} {escape(event.name):<28}"
        self._console.print(f" [{style}]{mark}[/] {thing} [{style}]{escape(what)}[/]", highlight=False)


def type_words(type_: str) -> str:
    """``gcp:compute/disk:Disk`` -> ``gcp:compute:Disk``, as Pulumi shows it."""
    package, module, name = type_.split(":")
    return f"{package}:{module.partition('/')[0]}:{name}"


def summary(result: DeployResult, console: Console) -> None:
    """Outputs and totals."""
    if result.outputs:
        console.print("\n[bold]Outputs:[/]")
        table = Table.grid(padding=(0, 2))
        for name in sorted(result.outputs):
            table.add_row(f"    {name}", escape(str(result.outputs[name])))
        console.print(table, highlight=False)
    console.print(f"\n[bold]Resources:[/] {totals(result.changes)}", highlight=False)


def totals(changes: Mapping[Op, int]) -> str:
    """``50 created, 3 unchanged``; what did not happen is left out."""
    words = [f"{count} {_PAST[op]}" for op in _MARK if (count := changes.get(op, 0))]
    return ", ".join(words) or "nothing to do"
