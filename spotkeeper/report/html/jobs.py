"""The rows of the list of jobs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from msgspec import Struct

from spotkeeper.contract.ledger import Event
from spotkeeper.contract.record import Outcome, Phase
from spotkeeper.report.html.markup import Markup, badge, cell, el, join
from spotkeeper.report.job.lines import phase_word, share
from spotkeeper.report.job.view import JobView
from spotkeeper.report.text.words import duration, percent, saved, usd, value_word

Samples = Sequence[tuple[int, float | None, float | None]]  # step, loss, samples a second
_QUIET = frozenset({Event.GONE, Event.REQUEST, Event.ROLL, Event.MIRRORED})


class Column(Struct, frozen=True):
    """A column of the list of jobs. ``key``: the sort key; None: the list cannot be sorted by this column."""

    name: str
    key: Callable[[JobView], object] | None = None
    right: bool = False


COLUMNS = (
    Column("Job", lambda view: view.name),
    Column("State", phase_word),
    Column("Progress", share),
    Column("Machines", lambda view: len(view.nodes)),
    Column("Spent", lambda view: view.money.spent, right=True),
    Column("Saved", lambda view: view.money.saved, right=True),
    Column("Speed", lambda view: view.samples_per_s or 0.0, right=True),
    Column("Loss", lambda view: float("inf") if view.loss is None else view.loss),
    Column("Last event", lambda view: -(last_event_ago(view) or 0.0)),
)


def state_badge(view: JobView) -> Markup:
    """The job's state: a word, never a color alone."""
    word = phase_word(view)
    if view.outcome is Outcome.SUCCEEDED or word == "training":
        kind = "good"
    elif view.queued() or (view.hold is not None and view.hold.kind.passes):
        kind = "warn"
    elif view.outcome is not None or view.phase is Phase.HOLD:
        kind = "bad"
    else:
        kind = "warn"
    return badge(word, "plain" if view.outcome in (Outcome.CANCELLED, Outcome.STOPPED) else kind)


def progress_bar(view: JobView) -> Markup | None:
    if not view.total_steps:
        return el("span", f"step {view.step}", class_="num") if view.step is not None else None
    done = view.outcome is Outcome.SUCCEEDED
    part = 1.0 if done else share(view)
    left = f", {duration(view.left_s)} left" if view.left_s is not None and not view.over() else ""
    name = f"step {view.step or 0:,} of {view.total_steps:,}"
    meter = el(
        "div",
        el("div", style=f"width:{100 * part:.1f}%"),
        class_="bar done" if done else "bar",
        role="progressbar",
        aria_valuenow=round(100 * part),
        aria_valuemin=0,
        aria_valuemax=100,
        aria_label=f"{view.name}: {name}",
    )
    return join([meter, el("div", f"{percent(part)}{left}", class_="small dim num nobreak", title=name)])


def machine_badges(view: JobView) -> Markup | None:
    """The machines by price model and zone: ``2 spot us-central1-a``."""
    found = Counter((node.model.value, node.zone) for node in view.nodes if node.model is not None)
    lines = [
        el("div", badge(f"{number} {model}", model), " ", el("span", zone, class_="small"), class_="nobreak")
        for (model, zone), number in sorted(found.items(), reverse=True)
    ]
    waiting = sum(node.model is None for node in view.nodes)
    lines += [el("div", badge(f"{waiting} waiting", "plain"))] * bool(waiting)
    return join(lines) if lines else None


def last_event_ago(view: JobView) -> float | None:
    shown = [line for line in view.events if line.event not in _QUIET]
    return view.elapsed_s - shown[-1].at if shown else None


def spark(curve: Sequence[tuple[int, float]], label: str) -> Markup | None:
    """A small line over the steps of a curve, which ascend; None for fewer than three points."""
    if len(curve) < 3:
        return None
    values = [value for _, value in curve]
    low, high, first = min(values), max(values), curve[0][0]
    height, width = (high - low) or 1.0, (curve[-1][0] - first) or 1
    points = " ".join(
        f"{100 * (step - first) / width:.1f},{22 - 20 * (value - low) / height:.1f}" for step, value in curve
    )
    line = el("polyline", points=points)
    return el(
        "svg", line, class_="spark", viewBox="0 0 100 24", preserveAspectRatio="none", role="img", aria_label=label
    )


def row(view: JobView, samples: Samples = ()) -> Markup:
    """One job of the list."""
    events = [line for line in view.events if line.event not in _QUIET]
    ago = last_event_ago(view)
    last = (
        join([el("div", events[-1].text, class_="small"), el("div", f"{duration(ago)} ago", class_="small dim")])
        if events and not view.over()
        else el("div", events[-1].text, class_="small")
        if events
        else None
    )
    losses = [(step, loss) for step, loss, _ in samples if loss is not None]
    speeds = [(step, speed) for step, _, speed in samples if speed is not None]
    reason = view.reason if not view.over() or view.outcome in (Outcome.FAILED, Outcome.STOPPED) else ""
    cells = (
        ("lead", join([el("a", view.name, href=f"/jobs/{view.job}", id=f"job-{view.job}"), _owner(view)])),
        ("", join([state_badge(view), el("div", reason, class_="small dim") if reason else None])),
        ("", progress_bar(view)),
        ("", machine_badges(view)),
        ("right", usd(view.money.spent)),
        ("right nobreak", None if view.money.saved_percent is None else saved(view.money.saved_percent)),
        (
            "right",
            None
            if view.samples_per_s is None
            else join([f"{view.samples_per_s:,.0f}/s", spark(speeds, f"{view.name}: samples a second")]),
        ),
        ("nobreak", None if view.loss is None else join([value_word(view.loss), spark(losses, f"{view.name}: loss")])),
        ("", last),
    )
    return el(
        "tr",
        *(
            cell(content, column.name, f"{kind} num".strip())
            for column, (kind, content) in zip(COLUMNS, cells, strict=True)
        ),
    )


def _owner(view: JobView) -> Markup:
    return join(el("div", line, class_="small dim") for line in (view.job, view.user) if line)
