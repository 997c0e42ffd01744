"""The output of `status` and `watch`: the lines of a job, and tables that fit the terminal.

A table drops columns on a narrow terminal and never cuts a word or a number.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.markup import escape
from rich.measure import Measurement
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from spotkeeper.contract.ledger import Event
from spotkeeper.contract.record import Outcome
from spotkeeper.report.job.events import EventLine
from spotkeeper.report.job.lines import (
    deadline_lines,
    event_text,
    headline,
    hold_lines,
    image_lines,
    kept_lines,
    left_line,
    metric_lines,
    money_line,
    node_word,
    on_its_clock,
    output_line,
    phase_word,
    preempted,
    queue_lines,
    reasons,
    search_lines,
    share,
    state_word,
    step_word,
    training_line,
)
from spotkeeper.report.job.view import JobView, NodeState, NodeView, several_pools
from spotkeeper.report.text.words import count, duration, saved, usd, value_word

LOG_TITLE = "the last lines of the log:"
_QUIET = frozenset({Event.GONE, Event.REQUEST, Event.ROLL, Event.MIRRORED, Event.STOPPED, Event.MOUNTED})


def live(view: JobView, rows: int = 8, *, verbose: bool = False) -> RenderableType:
    """The live view of a job: state, nodes, money, and the last ``rows`` events."""
    lines = [line for line in view.events if line.event not in _QUIET][-rows:]
    facts = ", ".join(
        (
            preempted(view),
            count(view.crashes, "crash"),
            f"{duration(view.elapsed_s)} since submission" + on_its_clock(view),
        )
    )
    bad = view.stands() and view.outcome is not Outcome.STOPPED
    style = "green" if view.outcome is Outcome.SUCCEEDED else "red" if bad else "blue"
    short = f"{view.name} ({view.job})  {phase_word(view)}"  # a panel cuts a title that is too long
    body: list[RenderableType] = [
        *([Text(view.reason, style="bold yellow")] if state_word(view) != phase_word(view) else []),
        *(Text(line) for line in (*search_lines(view), *queue_lines(view))),
        Text(training_line(view), style="bold"),
        *_progress(view),
        Text(f"{money_line(view)}; {facts}", style="dim"),
        *(Text(line, style="red" if view.late() else "dim") for line in deadline_lines(view)),
        *(Text(line, style="dim") for line in image_lines(view)),
        *([Text(view.site.no_tick, style="bold yellow")] if view.site.no_tick and not view.over() else []),
    ]
    body += [Text(line, style="dim", no_wrap=True) for line in metric_lines(view.metrics)]
    if view.nodes:
        body += [Text(), nodes_fitting(view.nodes)]
    body += [Text(), event_table(lines, verbose=verbose)]
    body += [Text(line, style="red", no_wrap=True, overflow="ellipsis") for line in view.failed]
    if view.crash_log and not view.stands():  # otherwise `crash_log` is printed below the panel
        body.append(Text(LOG_TITLE, style="bold red"))
        body += [Text(line, no_wrap=True, overflow="ellipsis") for line in view.crash_log]
    body += [Text(line) for line in (*hold_lines(view), *kept_lines(view))]
    return Panel(Group(*body), title=escape(short), title_align="left", border_style=style)


def _progress(view: JobView) -> list[RenderableType]:
    """A progress bar with the remaining time; [] if the number of steps is unknown."""
    if not (words := left_line(view)):
        return []
    row = Table.grid(padding=(0, 2))
    row.add_row(ProgressBar(total=1.0, completed=share(view), width=30), Text(words, style="dim"))
    return [row]


def crash_log(view: JobView) -> RenderableType:
    """The end of the job's log as it was written, without a box or line breaks, so that paths can be copied.

    Print it with ``crop=False``.
    """
    lines = (Text(line, no_wrap=True, overflow="ignore") for line in view.crash_log)
    return Group(Text(LOG_TITLE, style="bold red"), *lines, Text())


def status(view: JobView) -> RenderableType:
    parts: list[RenderableType] = [Text(headline(view), style="bold")]
    parts += [Text(line) for line in (*search_lines(view), *queue_lines(view))]
    parts += [*_progress(view), Text(money_line(view))]
    parts += [Text(line, style="red" if view.late() else "") for line in deadline_lines(view)]
    parts += [Text(line) for line in image_lines(view)]
    parts += [Text(warning, style="bold yellow") for warning in view.warnings]
    parts += [Text(line, style="dim", no_wrap=True) for line in metric_lines(view.metrics)]
    if view.nodes:
        parts.append(nodes_fitting(view.nodes))
        parts.append(reason_table(view.nodes))
    parts += [Text(line, style="red", no_wrap=True, overflow="ignore") for line in view.failed]
    if view.crash_log:
        parts.append(crash_log(view))
    parts += [Text(line) for line in (*hold_lines(view), *kept_lines(view))]
    if view.output is not None:
        parts.append(Text(output_line(view.output, view.name)))
    return Group(*parts)


_NODE_STYLE = {
    NodeState.TRAINING: "green",
    NodeState.SAVING: "cyan",
    NodeState.STOPPED: "blue",
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
    Event.UNLOOPED: "bold yellow",
    Event.DAMAGED: "bold yellow",
    Event.PREFLIGHT_FAILED: "bold yellow",
    Event.REFUSED: "yellow",
    Event.GENERATION: "green",
    Event.HOLD: "bold red",
    Event.END: "bold",
    Event.FALLBACK: "magenta",
}
_LEAST = 30  # characters of a wrapped column
_WIDE = 10_000  # characters: wider than any table


@dataclass(frozen=True)
class Fitting:
    """A table that drops its spare columns one by one, in the order given, until it fits, so that no word is cut.

    ``make`` returns the table with given columns. ``elsewhere`` tells the reader where to find dropped columns.
    ``slack``: by how many characters a column of longer texts may become narrower; its lines are then wrapped.
    """

    make: Callable[[Collection[str]], Table]
    columns: tuple[str, ...]
    spare: tuple[str, ...]
    elsewhere: str = ""
    slack: int = 0

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        left = self.left(console, options)
        yield self.make(left)
        if self.elsewhere and len(left) < len(self.columns):
            yield self.no_room(left)

    def left(self, console: Console, options: ConsoleOptions) -> list[str]:
        """The columns that remain when spare ones are dropped one by one, in the order given, until the table fits."""
        left = list(self.columns)
        for spare in self.spare:
            if _width(console, options, self.make(left)) - self.slack <= options.max_width:
                break
            left.remove(spare)
        return left

    def no_room(self, left: Collection[str]) -> Text:
        """The line about columns that do not fit, and where they are shown."""
        names = (name for name in self.columns if name not in left)
        gone = ", ".join(f'"{name}"' if " " in name else name for name in names)
        return Text(f"no room here for {gone}: {self.elsewhere}", style="dim")


@dataclass(frozen=True)
class NoRoom:
    """One line about the columns that some of several tables drop, in place of a line below each; else nothing."""

    tables: tuple[Fitting, ...]
    elsewhere: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.tables:
            narrowest = min((table.left(console, options) for table in self.tables), key=len)
            if len(narrowest) < len(self.tables[0].columns):
                yield replace(self.tables[0], elsewhere=self.elsewhere).no_room(narrowest)


def fitting(
    rows: Iterable[Mapping[str, str | Text]],
    spare: tuple[str, ...] = (),
    right: Collection[str] = (),
    elsewhere: str = "",
    columns: tuple[str, ...] = (),
    wrapped: str = "",
) -> Fitting:
    """A table of rows given by column title; columns in ``right`` are aligned to the right.

    ``columns``: by default the first row's titles; a table that can be without rows must pass them. ``wrapped``: a
    column whose texts are wrapped before spare columns are dropped.
    """
    rows = tuple(rows)
    columns = columns or tuple(rows[0] if rows else ())

    def make(titles: Collection[str]) -> Table:
        table = Table(box=None, pad_edge=False, header_style="dim")
        for title in titles:
            table.add_column(title, justify="right" if title in right else "left", no_wrap=title != wrapped)
        for row in rows:
            table.add_row(*(row[title] for title in titles))
        return table

    longest = max((len(row[wrapped]) for row in rows), default=0) if wrapped else 0
    return Fitting(make, columns, spare, elsewhere, max(0, longest - _LEAST))


def _width(console: Console, options: ConsoleOptions, table: Table) -> int:
    """The width at which a table cuts nothing, in characters."""
    return Measurement.get(console, options.update(width=_WIDE), table).maximum


_NODE_SPARE = ("age", "zone", "model", "machine")  # users copy names of machines, so these are dropped last


def nodes_fitting(nodes: tuple[NodeView, ...]) -> Fitting:
    slow, mixed = any(node.lag for node in nodes), several_pools(nodes)
    rows = (
        _node(node)
        | ({"pool": node.pool or "-"} if mixed else {})
        | ({"own time": Text(node.lag, style="bold yellow")} if slow else {})
        for node in nodes
    )
    spare = ("age", "zone", "pool", *_NODE_SPARE[2:]) if mixed else _NODE_SPARE
    return fitting(rows, spare, {"age"}, "spotkeeper status JOB --json")


def _node(node: NodeView) -> dict[str, str | Text]:
    return {
        "node": f"{node.node} (master)" if node.master else str(node.node),
        "state": Text(node_word(node), style=_NODE_STYLE[node.state]),
        "zone": node.zone or "-",
        "model": node.model.value if node.model else "-",
        "machine": node.vm or (f"attempt {node.attempt}" if node.attempt else "-"),
        "age": duration(node.age_s),
    }


def event_table(lines: Iterable[EventLine], *, verbose: bool = False) -> Table:
    table = _hanging(right=True)
    for line in lines:
        style = _EVENT_STYLE.get(line.event, "")
        table.add_row(Text(duration(line.at), style=style), Text(event_text(line, verbose=verbose), style=style))
    return table


def reason_table(nodes: Iterable[NodeView]) -> Table:
    table = _hanging()
    for who, what in reasons(nodes):
        table.add_row(Text(who, style="dim"), Text(what, style="dim"))
    return table


def _hanging(*, right: bool = False) -> Table:
    """An empty table of two columns without titles: a word, and a text with a hanging indent."""
    table = Table.grid(padding=(0, 2))
    table.add_column(justify="right" if right else "left", min_width=7, no_wrap=True)
    table.add_column(overflow="fold")
    return table


_COLUMNS = ("job", "name", "owner", "state", "nodes", "gen", "step", "loss", "preempted", "spent", "saved", "since")
_SPARE = (
    "owner",
    "loss",
    "preempted",
    "saved",
    "since",
)  # dropped on a narrow terminal, in this order; `status JOB` shows them


@dataclass(frozen=True)
class JobTable:
    """A table with a line for each job, which never cuts names and numbers.

    On a narrow terminal it first moves the reasons of states below the table, then drops spare columns; if it is still
    too wide, the terminal wraps the lines.
    """

    views: tuple[JobView, ...]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        whole = self._fitting(state_word).make(_COLUMNS)
        if _width(console, options, whole) <= options.max_width:
            yield whole
            yield from self._notes()
            return
        fits = self._fitting(phase_word)
        left = fits.left(console, options)
        table = fits.make(left)
        width = max(options.max_width, _width(console, options, table))
        yield from console.render(table, options.update(width=width))
        for view in self.views:
            if state_word(view) != phase_word(view):
                yield Text(f"{view.name} ({view.job}): {view.reason}")
        if len(left) < len(_COLUMNS):
            yield fits.no_room(left)
        yield from self._notes()

    def _notes(self) -> Iterable[Text]:
        if clocks := {on_its_clock(view) for view in self.views} - {""}:
            yield Text("since:" + clocks.pop(), style="dim")
        yield from (Text(f"{view.name} ({view.job}): {view.disks_kept}") for view in self.views if view.disks_kept)

    def _fitting(self, state: Callable[[JobView], str]) -> Fitting:
        rows = [{**_cells(view), "state": state(view)} for view in self.views]
        return fitting(
            rows, _SPARE, set(_COLUMNS) - {"job", "name", "owner", "state"}, "spotkeeper status JOB", _COLUMNS
        )


def _cells(view: JobView) -> dict[str, str]:
    training = sum(node.state in (NodeState.TRAINING, NodeState.NOTICE) for node in view.nodes)
    return {
        "job": view.job,
        "name": view.name,
        "owner": view.user or "-",
        "nodes": f"{training}/{view.size}",
        "gen": str(view.gen),
        "step": step_word(view),
        "loss": "-" if view.loss is None else value_word(view.loss),
        "preempted": str(view.preemptions.total),
        "spent": usd(view.money.spent),
        "saved": "-" if view.money.saved_percent is None else saved(view.money.saved_percent).removesuffix(" saved"),
        "since": duration(view.elapsed_s),
    }


def job_table(views: Iterable[JobView]) -> RenderableType:
    return JobTable(tuple(views))
