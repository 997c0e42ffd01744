"""The parts of a job's page: what `status` and `report` print, from the same values, as HTML."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from spotkeeper.contract.ledger import Event
from spotkeeper.report.html.jobs import progress_bar, state_badge
from spotkeeper.report.html.markup import Child, Markup, badge, el, fact, join, table
from spotkeeper.report.job.lines import (
    deadline_lines,
    hold_lines,
    image_lines,
    kept_lines,
    no_saving,
    node_word,
    on_its_clock,
    queue_lines,
    undisturbed_line,
)
from spotkeeper.report.job.view import JobView, NodeState, several_pools
from spotkeeper.report.money import account_text
from spotkeeper.report.money.account import Account
from spotkeeper.report.text.words import count, duration, saved, usd, value_word

_NODE_KIND = {
    NodeState.TRAINING: "good",
    NodeState.NOTICE: "warn",
    NodeState.WAITING: "bad",
    NodeState.SAVING: "warn",
}
_EVENT_KIND = {
    Event.NOTICE: "warn",
    Event.LOSS: "bad",
    Event.CRASH: "bad",
    Event.HOLD: "bad",
    Event.REFUSED: "warn",
    Event.FALLBACK: "warn",
    Event.GENERATION: "good",
}


def notes(view: JobView) -> Markup:
    """What needs attention: reasons, warnings, the deadline, a hold and its commands, the end of the crash log."""
    lines = [*view.warnings]
    if view.reason and not (view.over() and view.outcome and view.outcome.value == "succeeded"):
        lines.insert(0, view.reason)
    lines += deadline_lines(view) if view.late() else []
    parts: list[Child] = [el("div", line, class_="note") for line in dict.fromkeys(lines)]
    parts += [el("div", line, class_="note bad") for line in view.failed]
    if view.crash_log:
        parts.append(el("div", el("b", "The last lines of the log"), class_="note bad"))
        parts.append(el("pre", "\n".join(view.crash_log), class_="log", tabindex="0", aria_label="End of the log"))
    more = [*queue_lines(view), *hold_lines(view), *kept_lines(view)]
    parts += [el("p", line, class_="small") for line in more]
    return join(parts)


def figures(view: JobView, found: Account) -> Markup:
    """The job in figures."""
    money = view.money
    early = money.saved_percent is None
    rest = [line for line in deadline_lines(view) if not view.late()]
    done = progress_bar(view)
    return el(
        "div",
        fact("State", state_badge(view), f"generation {view.gen}"),
        fact("Progress", done or "-", "; ".join(rest[:1] + image_lines(view)) or None),
        fact(
            "Spent",
            usd(money.spent),
            no_saving(view) if early else f"on demand {usd(money.on_demand_only)}",
        ),
        *([fact("Egress", usd(money.egress), "between regions, in what is spent")] if money.egress else []),
        fact("Saved", "-" if early else usd(money.saved), None if early else saved(money.saved_percent or 0.0)),
        fact(
            "Goodput",
            "-" if found.goodput is None else f"{100 * found.goodput:.1f} %",
            f"of {found.node_hours:.2f} node-hours",
        ),
        fact("Loss", "-" if view.loss is None else value_word(view.loss), _speed(view)),
        fact(
            "Preemptions",
            str(view.preemptions.total),
            f"{view.preemptions.announced} with a notice; {count(view.crashes, 'crash')}",
        ),
        fact("Age", duration(view.elapsed_s), _who_and_clock(view)),
        class_="facts",
    )


def _who_and_clock(view: JobView) -> str:
    parts = (f"by {view.user}" if view.user else "", on_its_clock(view).strip())
    return "; ".join(part for part in parts if part)


def _speed(view: JobView) -> str | None:
    return None if view.samples_per_s is None else f"{view.samples_per_s:,.0f} samples a second"


def machines(view: JobView) -> Markup:
    mixed = several_pools(view.nodes)
    rows = [
        (
            f"{node.node}{' (master)' if node.master else ''}",
            badge(node_word(node), _NODE_KIND.get(node.state, "plain")),
            badge(node.model.value, node.model.value) if node.model else None,
            el("span", node.zone, class_="nobreak"),
            *((node.pool,) if mixed else ()),
            node.vm,
            el("span", duration(node.age_s), class_="nobreak"),
            el("span", why, class_="small") if (why := node.lag or node.reason) else None,
        )
        for node in view.nodes
    ]
    head = ("Node", "State", "Model", "Zone", *(("Pool",) if mixed else ()), "Machine", "Age", "Why")
    return table(head, rows, "Machines now", (head.index("Age"),), "No machine now.")


def recoveries(found: Account) -> Markup:
    cells = (account_text.recovery_row(one) for one in found.recoveries)
    rows = [{"steps repeated" if name == "repeated" else name: cell for name, cell in row.items()} for row in cells]
    return _rows(rows, "Recoveries", account_text.RECOVERY_WORDS, f"{account_text.quiet_line(found)}.")


def all_machines(found: Account) -> Markup:
    rows = [account_text.machine_row(one) for one in found.attempts]
    text = ("model", "zone", "asked for", "ended by", "start", "end")
    return _rows(rows, "Every machine and what it cost", text, "No machine was requested yet.")


def lost_work(found: Account) -> Markup:
    rows = list(account_text.lost_rows(found)) if found.lost else []
    return _rows(rows, "Paid time without lasting progress", ("lost work", "cause"), "No paid time was lost.")


def _rows(rows: Sequence[dict[str, str]], caption: str, text: Iterable[str], empty: str) -> Markup:
    if not rows:
        return el("p", empty.capitalize() if empty[0].islower() else empty, class_="dim")
    head = list(rows[0])
    right = [at for at, word in enumerate(head) if word not in text]
    return table([word.capitalize() for word in head], [list(row.values()) for row in rows], caption, right)


def events(view: JobView, created: float, most: int = 0) -> Markup:
    """The job's events, newest first. ``created``: virtual unix seconds; ``most``: 0 for all."""
    lines = list(reversed(view.events))[: most or None]
    rows = [
        (
            el("span", account_text.clock(created + line.at), class_="nobreak"),
            duration(line.at),
            join([el("span", line.text, class_=_EVENT_KIND.get(line.event)), _detail(line.detail)]),
        )
        for line in lines
    ]
    return table(("Time (UTC)", "After", "Event"), rows, "Events, newest first", (1,), "No event yet.", log=True)


def _detail(text: str) -> Markup | None:
    return el("div", text, class_="small dim") if text else None


def sums(view: JobView) -> Markup:
    """The comparison with a run on uninterrupted machines."""
    said = undisturbed_line(view)
    return el("p", f"{said[0].upper()}{said[1:]}.", class_="small dim")
