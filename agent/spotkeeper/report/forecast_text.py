"""A forecast for people: as a table, and as Markdown for the comment on a pull request. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from spotkeeper.report import markdown as md
from spotkeeper.report.forecast import Course, Forecast
from spotkeeper.report.forecast_band import Band

if TYPE_CHECKING:
    from rich.console import RenderableType

HEAD = ("", "expected", "80 % band", "on-demand only")


def rows(made: Forecast) -> Iterator[tuple[str, str, str, str]]:
    """What, expected, its band, and the same on on-demand only."""
    ours, whole = made.expected, made.on_demand
    yield "cost", usd(ours.usd.mid), span(ours.usd, usd), usd(whole.usd.mid)
    yield "done after", hours(ours.finish_h.mid), span(ours.finish_h, hours), hours(whole.finish_h.mid)
    yield "preemptions", f"{ours.preemptions.mid:.1f}", span(ours.preemptions, lambda n: f"{n:.0f}"), "0"
    yield "share on spot", f"{ours.spot_share.mid:.0%}", span(ours.spot_share, lambda n: f"{n:.0%}"), "0%"
    for name, share in risks(ours):
        yield name, f"{share:.0%}", "", f"{dict(risks(whole)).get(name, 0.0):.0%}"


def risks(of: Course) -> Iterator[tuple[str, float]]:
    """What may go wrong, with the share of replays in which it did."""
    if of.late is not None:
        yield "after its deadline", of.late
    if of.over_budget is not None:
        yield "over its max_usd", of.over_budget
    if of.unfinished:
        yield "not done by the end", of.unfinished


def headline(made: Forecast) -> str:
    saved = f"{made.saves:.0%} less than on-demand" if made.saves >= 0.005 else "no less than on-demand"
    until = "" if made.deadline_h is None else f", deadline in {hours(made.deadline_h)}"
    return f"{made.nodes} x {made.machine_type}, {hours(made.work_h)} of training{until}: {saved}"


def table(made: Forecast) -> RenderableType:
    """As the command prints it; each assumption is a line below it."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=None, pad_edge=False, header_style="bold")
    for at, name in enumerate(HEAD):
        grid.add_column(name, justify="right" if at else "left", no_wrap=True)
    for row in rows(made):
        grid.add_row(*row)
    title = Text(f"{made.job} on {made.pool}: {headline(made)}", "bold")
    return Group(title, grid, Text(f"assumed ({made.replays} replays):", "dim"), below(made.assumptions))


def below(lines: Iterable[str]) -> RenderableType:
    """Lines that stand in by two columns, their rest too where they are too long."""
    from rich.padding import Padding
    from rich.text import Text

    return Padding(Text("\n".join(lines), "dim"), (0, 0, 0, 2), expand=False)


def markdown(made: Forecast) -> str:
    """For a comment: names that somebody wrote are code, the assumptions fold."""
    title = f"**{md.code(made.job)} on {md.code(made.pool)}**: {md.code(headline(made))}"
    cells = [list(row) for row in rows(made)]
    lines = [title, "", *md.table(list(HEAD), cells, right=(1, 2, 3)), ""]
    return "\n".join((*lines, *folded(f"{made.replays} replays; what is assumed", made.assumptions))) + "\n"


def folded(title: str, lines: Iterable[str]) -> Iterator[str]:
    yield f"<details><summary>{title}</summary>\n"
    yield from (f"- {md.code(line, 1000)}" for line in lines)
    yield "\n</details>"


def span(of: Band, say: Callable[[float], str]) -> str:
    low, high = say(of.low), say(of.high)
    return low if low == high else f"{low} to {high}"


def usd(amount: float) -> str:
    return f"${amount:,.2f}" if amount < 1000 else f"${amount:,.0f}"


def hours(hours: float) -> str:
    return f"{hours:.1f} h" if hours < 100 else f"{hours / 24:.1f} d"
