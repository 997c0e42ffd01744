"""The queue as tables of the stack's page."""

from __future__ import annotations

from collections.abc import Iterable

from spotkeeper.report.html.markup import Child, Markup, el, join, table
from spotkeeper.report.queue import QueueView
from spotkeeper.report.text.queue import NOBODY_WAITS, NUMBERS, left_out, running_row, team_row, waiting_row


def queue(view: QueueView) -> Markup:
    """Jobs that wait, jobs that have machines, and teams; the same cells as `spotkeeper queue`."""
    waiting = [{**waiting_row(one), "job": _link(one.job, one.name)} for one in view.waiting]
    running = [{**running_row(one), "job": _link(one.job, one.name)} for one in view.running]
    more = left_out(view)
    return join(
        (
            _table(waiting, "Jobs that wait") or el("p", f"{NOBODY_WAITS.capitalize()}.", class_="dim"),
            _table(running, "Jobs that have machines"),
            _table([team_row(one) for one in view.teams], "Teams"),
            el("p", f"{more}: ", el("code", "spotkeeper queue --all"), class_="dim small") if more else None,
        )
    )


def _link(job: str, name: str) -> Markup:
    return el("a", name, href=f"/jobs/{job}")


def _table(rows: Iterable[dict[str, Child]] | Iterable[dict[str, str]], caption: str) -> Markup | None:
    cells = [dict(row) for row in rows]
    if not cells:
        return None
    head = list(cells[0])
    right = [at for at, word in enumerate(head) if word in NUMBERS]
    body = table([word.capitalize() for word in head], [list(row.values()) for row in cells], caption, right)
    return join([el("h2", caption), body])
