"""What ``status JOB`` prints, and the live view of ``watch``: a job's lines and tables put together with ``rich``."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.panel import Panel
from rich.text import Text

from spotkeeper.report.lines import (
    deadline_lines,
    headline,
    hold_lines,
    kept_lines,
    money_line,
    on_its_clock,
    output_line,
    preempted,
    title,
    training_line,
)
from spotkeeper.report.tables import event_table, nodes_fitting, reason_table
from spotkeeper.report.view import JobView
from spotkeeper.report.words import count, duration
from spotkeeper.spec.ledger import Event
from spotkeeper.spec.record import Outcome

LOG_TITLE = "the last lines of the log:"
_QUIET = frozenset({Event.GONE, Event.ASK, Event.ROLL, Event.MIRRORED})


def live(view: JobView, rows: int = 8) -> RenderableType:
    """The live view: state, nodes, money, the last ``rows`` events."""
    lines = [line for line in view.events if line.event not in _QUIET][-rows:]
    facts = ", ".join(
        (
            preempted(view),
            count(view.crashes, "crash"),
            f"{duration(view.elapsed_s)} since submission" + on_its_clock(view),
        )
    )
    style = "green" if view.outcome is Outcome.SUCCEEDED else "red" if view.outcome or view.stands() else "blue"
    body: list[RenderableType] = [
        Text(training_line(view), style="bold"),
        Text(f"{money_line(view)}; {facts}", style="dim"),
        *(Text(line, style="red" if view.late() else "dim") for line in deadline_lines(view)),
    ]
    if view.nodes:
        body += [Text(), nodes_fitting(view.nodes)]
    body += [Text(), event_table(lines)]
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
    parts += [Text(line, style="red" if view.late() else "") for line in deadline_lines(view)]
    parts += [Text(warning, style="bold yellow") for warning in view.warnings]
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
