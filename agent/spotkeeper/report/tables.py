"""Tables that fit the terminal: where it is narrow they lose columns, never a part of a word or a number."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from spotkeeper.report.events import EventLine
from spotkeeper.report.lines import node_word, on_its_clock, phase_word, reasons, state_word, step_word
from spotkeeper.report.view import JobView, NodeState, NodeView
from spotkeeper.report.words import duration, loss_word, saved, usd
from spotkeeper.spec.ledger import Event

_NODE_STYLE = {
    NodeState.TRAINING: "green",
    NodeState.SAVING: "cyan",
    NodeState.NOTICE: "bold yellow",
    NodeState.BOOTING: "blue",
    NodeState.READY: "blue",
    NodeState.STANDBY: "magenta",
    NodeState.WAITING: "red",
}
_EVENT_STYLE = {
    Event.NOTICE: "yellow",
    Event.LOSS: "red",
    Event.CRASH: "bold red",
    Event.FULL: "bold yellow",
    Event.UNSAVED: "bold yellow",
    Event.DAMAGED: "bold yellow",
    Event.AMISS: "bold yellow",
    Event.REFUSED: "yellow",
    Event.GENERATION: "green",
    Event.HOLD: "bold red",
    Event.END: "bold",
    Event.BOUT: "magenta",
}
_WIDE = 10_000  # more than any table wants


@dataclass(frozen=True)
class Fitting:
    """A table of which no word is cut: where it is narrow, its spare columns go, in their order. One that is too wide
    without them all is cut.

    ``make``: the table of some of its columns. ``elsewhere``: who has the columns that went; then a line says so.
    """

    make: Callable[[Collection[str]], Table]
    columns: tuple[str, ...]
    spare: tuple[str, ...]
    elsewhere: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        left = list(self.columns)
        for spare in self.spare:
            if _width(console, options, self.make(left)) <= options.max_width:
                break
            left.remove(spare)
        yield self.make(left)
        if self.elsewhere and len(left) < len(self.columns):
            gone = ", ".join(name for name in self.columns if name not in left)
            yield Text(f"no room here for {gone}: {self.elsewhere}", style="dim")


def fitting(
    rows: Iterable[Mapping[str, str]],
    columns: tuple[str, ...],
    spare: tuple[str, ...],
    right: Collection[str] = (),
    elsewhere: str = "",
) -> Fitting:
    """Rows by their columns' titles; those in ``right`` stand to the right."""
    rows = tuple(rows)

    def make(titles: Collection[str]) -> Table:
        table = Table(box=None, pad_edge=False, header_style="dim")
        for title in titles:
            table.add_column(title, justify="right" if title in right else "left", no_wrap=True)
        for row in rows:
            table.add_row(*(row[title] for title in titles))
        return table

    return Fitting(make, columns, spare, elsewhere)


def _width(console: Console, options: ConsoleOptions, table: Table) -> int:
    """How wide a table would be with nothing cut."""
    return Measurement.get(console, options.update(width=_WIDE), table).maximum


_NODE_COLUMNS = ("rank", "state", "zone", "model", "machine", "age")
_NODE_SPARE = ("age", "model", "zone")


def nodes_fitting(nodes: tuple[NodeView, ...]) -> Fitting:
    return Fitting(partial(node_table, nodes), _NODE_COLUMNS, _NODE_SPARE)


def node_table(nodes: Iterable[NodeView], columns: Collection[str] = _NODE_COLUMNS) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    nodes = tuple(nodes)
    slow = any(node.lag for node in nodes)
    for title in (*columns, *(["own time"] if slow else [])):
        table.add_column(title, justify="right" if title in ("rank", "age") else "left", no_wrap=True)
    for node in nodes:
        cells: dict[str, str | Text] = {
            "rank": str(node.rank),
            "state": Text(node_word(node), style=_NODE_STYLE[node.state]),
            "zone": node.zone or "-",
            "model": node.model.value if node.model else "-",
            "machine": _machine(node),
            "age": duration(node.age_s),
        }
        lag = [Text(node.lag, style="bold yellow")] if slow else []
        table.add_row(*(cells[title] for title in columns), *lag)
    return table


def _machine(node: NodeView) -> str:
    attempt = f"attempt {node.attempt}" if node.attempt else "-"
    return (node.node or attempt) + (" (master)" if node.master else "")


def event_table(lines: Iterable[EventLine]) -> Table:
    """Where a line is too long its rest stands below its text, not below its time."""
    table = _hanging(right=True)
    for line in lines:
        style = _EVENT_STYLE.get(line.event, "")
        table.add_row(Text(duration(line.at), style=style), Text(line.text, style=style))
    return table


def reason_table(nodes: Iterable[NodeView]) -> Table:
    """Why each machine is what it is."""
    table = _hanging()
    for who, what in reasons(nodes):
        table.add_row(Text(who, style="dim"), Text(what, style="dim"))
    return table


def _hanging(*, right: bool = False) -> Table:
    """Two columns without titles: a word, and a text that may be longer than the line."""
    table = Table.grid(padding=(0, 2))
    table.add_column(justify="right" if right else "left", min_width=7, no_wrap=True)
    table.add_column(overflow="fold")
    return table


_COLUMNS = ("job", "name", "state", "nodes", "gen", "step", "loss", "preempted", "spent", "saved", "since")
_SPARE = ("loss", "preempted", "saved", "since")  # on a narrow terminal they go, in this order; `status JOB` says them


@dataclass(frozen=True)
class JobTable:
    """One line a job. Names and numbers are whole at any width: where it is narrow, the reasons go below, each
    on lines of its own, and then the spare columns; a terminal that is narrower still breaks the lines.
    """

    views: tuple[JobView, ...]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        whole = self._table(_COLUMNS, state_word)
        if _width(console, options, whole) <= options.max_width:
            yield whole
            yield from self._notes()
            return
        left, table = list(_COLUMNS), self._table(_COLUMNS, phase_word)
        for spare in _SPARE:
            if _width(console, options, table) <= options.max_width:
                break
            left.remove(spare)
            table = self._table(left, phase_word)
        width = max(options.max_width, _width(console, options, table))
        yield from console.render(table, options.update(width=width))
        for view in self.views:
            if state_word(view) != phase_word(view):
                yield Text(f"{view.name} ({view.job}): {view.reason}")
        yield from self._notes()

    def _notes(self) -> Iterable[Text]:
        if clocks := {on_its_clock(view) for view in self.views} - {""}:
            yield Text("since:" + clocks.pop(), style="dim")
        yield from (Text(f"{view.name} ({view.job}): {view.disks_kept}") for view in self.views if view.disks_kept)

    def _table(self, columns: Iterable[str], state: Callable[[JobView], str]) -> Table:
        table = Table(box=None, pad_edge=False, header_style="dim")
        for title in columns:
            table.add_column(title, justify="left" if title in ("job", "name", "state") else "right", no_wrap=True)
        for view in self.views:
            cells = {**_cells(view), "state": state(view)}
            table.add_row(*(cells[title] for title in columns))
        return table


def _cells(view: JobView) -> dict[str, str]:
    training = sum(node.state in (NodeState.TRAINING, NodeState.NOTICE) for node in view.nodes)
    return {
        "job": view.job,
        "name": view.name,
        "nodes": f"{training}/{view.size}",
        "gen": str(view.gen),
        "step": step_word(view),
        "loss": "-" if view.loss is None else loss_word(view.loss),
        "preempted": str(view.preemptions.total),
        "spent": usd(view.money.spent),
        "saved": "-" if view.money.saved_percent is None else saved(view.money.saved_percent).removesuffix(" saved"),
        "since": duration(view.elapsed_s),
    }


def job_table(views: Iterable[JobView]) -> RenderableType:
    """What ``spotkeeper status`` prints: one line a job."""
    return JobTable(tuple(views))
