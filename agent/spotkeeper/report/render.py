"""Views on a terminal: tables and the live view with ``rich``, plain lines without one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.filesize import decimal
from rich.markup import escape
from rich.measure import Measurement
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from spotkeeper.report.events import EventLine
from spotkeeper.report.view import JobView, NodeState, NodeView, OutputView
from spotkeeper.spec.ledger import Event
from spotkeeper.spec.record import Hold, Outcome, Phase

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
# What a resume brings, and what a person may want to change first.
_RESUMES = {
    Hold.FAILURE: (", with a fresh crash budget", "a mended script or job file"),
    Hold.SPEND: (", for as much again (max_usd)", "another max_usd, or other files"),
}
LOG_TITLE = "the last lines of the log:"
_QUIET = frozenset({Event.GONE, Event.ASK, Event.ROLL, Event.MIRRORED})


def duration(seconds: float | None) -> str:
    """``4s``, ``3m20s``, ``2h05m``, ``3d04h``; ``-`` for None."""
    if seconds is None:
        return "-"
    whole = round(max(0.0, seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def usd(amount: float) -> str:
    """``$1,234.50``; below a dollar ``$0.0123``."""
    return f"${amount:,.2f}" if abs(amount) >= 1 else f"${amount:.4f}"


def loss_word(loss: float) -> str:
    """``2.1130``, ``0.01234``, ``1.234e-05``: at least four digits that say something, however small it is."""
    return f"{loss:.4f}" if loss == 0.0 or abs(loss) >= 0.1 else f"{loss:.4g}"


def count(number: int, noun: str) -> str:
    """``1 crash``, ``2 crashes``, ``0 preemptions``."""
    plural = "" if number == 1 else "es" if noun.endswith("sh") else "s"
    return f"{number} {noun}{plural}"


def headline(view: JobView) -> str:
    """``storm (k3m9x2ab)  trains  generation 4  step 1200/4000  loss 2.1130  512 samples/s``."""
    return f"{title(view)}  {training_line(view)}"


def title(view: JobView) -> str:
    return f"{view.name} ({view.job})  {state_word(view)}"


def training_line(view: JobView) -> str:
    """``generation 4  step 1200/4000 (checkpoint: 1150)  loss 2.1130``.

    Of a job that is over, what it reported last, and that it did.
    """
    parts = [f"generation {view.gen}"]
    if view.step is not None:
        step = f"step {view.step}" + (f"/{view.total_steps}" if view.total_steps else "")
        saved_at = f" (checkpoint: {view.commit_step})" if view.commit_step is not None and not view.over() else ""
        parts.append(f"last reported: {step}" if _stale(view) else step + saved_at)
    if view.loss is not None:
        parts.append(f"loss {loss_word(view.loss)}")
    if view.samples_per_s is not None:
        parts.append(f"{view.samples_per_s:,.0f} samples/s" + (" (real time)" if view.site.scale != 1 else ""))
    if view.uploading_s is not None:
        parts.append("its output goes to the bucket")
    elif view.no_new_step_s is not None:
        parts.append(f"no new step for {duration(view.no_new_step_s)}")
    return "  ".join(parts)


def _on_its_clock(view: JobView) -> str:
    """What is to be known of durations where they are not those of the reader's own clock."""
    return f" on the cloud's clock, {view.site.scale:g}x" if view.site.scale != 1 else ""


def kept_lines(view: JobView) -> list[str]:
    """Which disks of a job that is over still bill, and how to delete them."""
    if not view.disks_kept:
        return []
    listed = f"gcloud compute disks list --uri --filter=labels.sk-job={view.job}"
    delete = f"gcloud compute disks delete $({listed})"
    end = "spotkeeper local down deletes them, with the cloud" if view.site.local else f"to delete them:  {delete}"
    return [f"{view.disks_kept}  (keep_disks)", end]


def phase_word(view: JobView) -> str:
    """One word."""
    if view.outcome is not None:
        return view.outcome.value
    if view.phase is Phase.HOLD:
        return "holds"
    if view.stopping:
        return "regroups"
    return "trains" if view.gen else "starts"


def _stale(view: JobView) -> bool:
    """Whether steps may have come after the last report: one comes a minute, and one where the script ends by itself.

    A script may end before its total, so the total says nothing of where a job that succeeded ended.
    """
    return view.over() and view.step is not None and view.step != view.total_steps


def step_word(view: JobView) -> str:
    """``1200``; ``586+`` where a job that succeeded reported that step last."""
    if view.step is None:
        return "-"
    return f"{view.step}+" if view.outcome is Outcome.SUCCEEDED and _stale(view) else str(view.step)


def state_word(view: JobView) -> str:
    """One word, and the reason where there is one."""
    word = phase_word(view)
    if view.reason.startswith(word):
        return view.reason
    return f"{word} ({view.reason})" if view.reason else word


def hold_lines(view: JobView) -> list[str]:
    """What a job that holds costs, what comes of it by itself, and the commands that leave the hold."""
    hold = view.hold
    if hold is None:
        return []
    lines = []
    if hold.disks:
        price = f"{usd(hold.usd_per_day)} a day" if hold.usd_per_day is not None else "the stack knows no price"
        lines.append(f"its machines are given back; {count(hold.disks, 'disk')} of {hold.disk_gb} GB in all: {price}")
    if hold.kind is Hold.SPEND:
        lines.append("what it spent above its max_usd: a look is a minute apart, and saving and giving back take time")
    if hold.tries_in_s is not None:
        lines.append(f"it tries again by itself in {duration(hold.tries_in_s)}")
    disks = "its disks stay (keep_disks)" if hold.keep_disks else "its disks and their checkpoints are deleted"
    if hold.ends_in_s is not None:
        lines.append(f"if nobody resumes it, it ends in {duration(hold.ends_in_s)}: {disks}")
    if hold.resuming:
        return [*lines, "asked to resume: the next round does it"]
    with_what, other = _RESUMES.get(hold.kind, ("", "other files"))
    if not hold.go_back:
        lines.append(f"{_from_where(view)}{with_what}:  {hold.resume}")
    lines.append(f"the same with {other}:  {hold.mend}")
    lines.append(f"to end it ({disks}):  {hold.cancel}")
    return lines


def _from_where(view: JobView) -> str:
    if view.step is not None and view.commit_step is None:
        return "to begin anew, for no checkpoint was reported"
    at = f" (step {view.commit_step})" if view.commit_step is not None else ""
    return f"to go on from the newest checkpoint{at}"


def money_line(view: JobView) -> str:
    """``spent $0.1234, the same machine-hours on demand $0.4321: 71 % saved``; before it has trained for a while,
    what was spent.
    """
    money = view.money
    if money.saved_percent is None:
        return f"spent {usd(money.spent)}, too early to say what was saved"
    hours = f"the same machine-hours on demand {usd(money.on_demand_only)}"
    return f"spent {usd(money.spent)}, {hours}: {saved(money.saved_percent)}"


def undisturbed_line(view: JobView) -> str:
    """What another run would have cost: it is told, and called nothing that was saved or lost."""
    return (
        f"on-demand machines that nothing interrupts, for as long as it trained: {usd(view.money.undisturbed)}"
        " (the figures above have boots, standstills and machines side by side in them, too)"
    )


def saved(percent: float) -> str:
    """``71 % saved``; where machines cost more than their on-demand price, ``9 % more``."""
    whole = round(percent)
    return f"{whole} % saved" if whole >= 0 else f"{-whole} % more"


def event_line(line: EventLine) -> str:
    return f"{duration(line.at):>7}  {line.text}"


def node_word(node: NodeView) -> str:
    return node.state.value + (f", {duration(node.left_s)} left" if node.left_s is not None else "")


@dataclass(frozen=True)
class Fitting:
    """A table of which no word is cut: where it is narrow, its spare columns go, in their order. One that is too wide
    without them all is cut.

    ``make``: the table of some of its columns.
    """

    make: Callable[[Collection[str]], Table]
    columns: tuple[str, ...]
    spare: tuple[str, ...]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        left = list(self.columns)
        for spare in self.spare:
            if _width(console, options, self.make(left)) <= options.max_width:
                break
            left.remove(spare)
        yield self.make(left)


def fitting(
    rows: Iterable[Mapping[str, str]], columns: tuple[str, ...], spare: tuple[str, ...], right: Collection[str] = ()
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

    return Fitting(make, columns, spare)


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


def _width(console: Console, options: ConsoleOptions, table: Table) -> int:
    """How wide a table would be with nothing cut."""
    return Measurement.get(console, options.update(width=_WIDE), table).maximum


def preempted(view: JobView) -> str:
    """``3 preemptions (2 announced)``."""
    told = view.preemptions
    return count(told.total, "preemption") + (f" ({told.announced} announced)" if told.total else "")


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
        if clocks := {_on_its_clock(view) for view in self.views} - {""}:
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


_WIDE = 10_000  # more than any table wants


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


def live(view: JobView, rows: int = 8) -> RenderableType:
    """The live view: state, nodes, money, the last ``rows`` events."""
    lines = [line for line in view.events if line.event not in _QUIET][-rows:]
    events = Text("\n").join(Text(event_line(line), style=_EVENT_STYLE.get(line.event, "")) for line in lines)
    facts = ", ".join(
        (
            preempted(view),
            count(view.crashes, "crash"),
            f"{duration(view.elapsed_s)} since submission" + _on_its_clock(view),
        )
    )
    style = "green" if view.outcome is Outcome.SUCCEEDED else "red" if view.outcome or view.stands() else "blue"
    body: list[RenderableType] = [
        Text(training_line(view), style="bold"),
        Text(f"{money_line(view)}; {facts}", style="dim"),
    ]
    if view.nodes:
        body += [Text(), nodes_fitting(view.nodes)]
    body += [Text(), events]
    body += [Text(line, style="red", no_wrap=True, overflow="ellipsis") for line in view.failed]
    if view.crash_log and not view.stands():  # then `crash_log` follows the box, whole
        body.append(Text(LOG_TITLE, style="bold red"))
        body += [Text(line, no_wrap=True, overflow="ellipsis") for line in view.crash_log]
    body += [Text(line) for line in (*hold_lines(view), *kept_lines(view))]
    return Panel(Group(*body), title=escape(title(view)), title_align="left", border_style=style)


def crash_log(view: JobView) -> RenderableType:
    """The end of the log as it was written: no box and no break of ours, so that a path can be copied whole.

    To be printed with ``crop=False``.
    """
    lines = (Text(line, no_wrap=True, overflow="ignore") for line in view.crash_log)
    return Group(Text(LOG_TITLE, style="bold red"), *lines, Text())


def status(view: JobView) -> RenderableType:
    """What ``spotkeeper status JOB`` prints."""
    parts: list[RenderableType] = [Text(headline(view), style="bold"), Text(money_line(view))]
    parts += [Text(warning, style="bold yellow") for warning in view.warnings]
    if view.nodes:
        parts.append(nodes_fitting(view.nodes))
    parts += [Text(line, style="red", no_wrap=True, overflow="ignore") for line in view.failed]
    if view.crash_log:
        parts.append(crash_log(view))
    parts += [Text(line) for line in (*hold_lines(view), *kept_lines(view))]
    if view.output is not None:
        parts.append(Text(output_line(view.output, view.name)))
    return Group(*parts)


def output_line(output: OutputView, name: str) -> str:
    """What the job left, and how to have it."""
    return f"output: {count(output.files, 'file')}, {decimal(output.bytes)}; fetch it: spotkeeper download {name}"
