"""A job's page as one file: no script, nothing to fetch, light and dark, opens offline and prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from types import MappingProxyType

from spotkeeper.contract.ledger import Entry
from spotkeeper.contract.stack import StackState
from spotkeeper.report.html import job as parts
from spotkeeper.report.html import svg
from spotkeeper.report.html.markup import Markup, el, join
from spotkeeper.report.html.style import FILE_STYLE
from spotkeeper.report.job.metrics import MetricColumns, drawable, not_drawn
from spotkeeper.report.job.timeline import resumed_steps, timeline
from spotkeeper.report.job.view import JobView
from spotkeeper.report.money.account import Account
from spotkeeper.report.money.money import NO_PRICES, PricesByPool, over_time

# A file from somebody else must not run anything, whatever a job wrote into it.
POLICY = "default-src 'none'; style-src 'unsafe-inline'"
NO_METRICS: Mapping[str, MetricColumns] = MappingProxyType({})
MORE_STYLE = ".scroll{overflow-x:auto} .sk h1{margin-bottom:4px}"


def job_file(
    view: JobView,
    found: Account,
    ledger: Sequence[Entry],
    stack: StackState | None,
    now: float,
    prices: PricesByPool = NO_PRICES,
    job_yaml: str = "",
    metrics: Mapping[str, MetricColumns] = NO_METRICS,
) -> str:
    """Return the page of a job at ``now`` (virtual unix seconds) as a whole document."""
    marks = resumed_steps(ledger)
    line = timeline(ledger, now)
    money = over_time(ledger, stack, line.end, prices)
    spent = ("spent", "spot", [(at - line.start, paid) for at, paid, _ in money])
    whole = ("the same machine-hours on demand", "demand", [(at - line.start, paid) for at, _, paid in money])
    charts = [name for name, curve in metrics.items() if drawable(curve)]
    few = not_drawn((name for name in metrics if name not in charts), view.name)
    made = f"{datetime.fromtimestamp(now, timezone.utc):%Y-%m-%d %H:%M} UTC"
    body = (
        el("h1", view.name),
        el("p", f"{view.job}{f' · {view.user}' if view.user else ''} · as of {made}", class_="dim"),
        parts.notes(view),
        _card("", parts.figures(view, found), parts.sums(view)),
        _card("Timeline", svg.key(), svg.timeline(line)),
        _card("Money", svg.lines("Money over time", [spent, whole], unit="$", on_time=True, from_zero=True)),
        *(_card(name[:1].upper() + name[1:], _curve(name, metrics[name], marks)) for name in charts),
        _card("Other metrics", el("p", few, class_="dim")) if few else None,
        _card("Recoveries", parts.recoveries(found)),
        _card("Lost work", parts.lost_work(found)),
        _card("Machines now", parts.machines(view)) if view.nodes else None,
        _card("Every machine", parts.all_machines(found)),
        _card("Events", parts.events(view, found.created)),
        _card("Job file", el("pre", job_yaml, class_="log", tabindex=0)) if job_yaml else None,
    )
    head = (
        el("meta", charset="utf-8"),
        el("meta", http_equiv="Content-Security-Policy", content=POLICY),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("title", f"{view.name} - Spotkeeper"),
        el("style", Markup(FILE_STYLE + MORE_STYLE)),
    )
    page = el("html", el("head", *head), el("body", el("main", *body, class_="sk wide")), lang="en")
    return f"<!doctype html>\n{page}\n"


def _curve(name: str, curve: MetricColumns, marks: Sequence[float]) -> Markup:
    points = list(zip(map(float, curve.steps), curve.values, strict=True))
    return svg.lines(name, [(name, "spot", points)], marks=marks)


def _card(title: str, *content: Markup) -> Markup:
    return el("section", el("h2", title) if title else None, join(content), class_="card")
