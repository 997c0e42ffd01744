"""The list of jobs with filter, search and sorting.

The browser gets only the rows of one page of the list, and the feed reads these jobs more often than the others.
"""

from __future__ import annotations

from nicegui import Client, ui

from spotkeeper.contract.record import Phase
from spotkeeper.dashboard.feed import JobFeed, KnownJob
from spotkeeper.dashboard.frame import Page, card, html, put
from spotkeeper.report.html import jobs as rows
from spotkeeper.report.html.markup import el, fact, join
from spotkeeper.report.html.sweep import links
from spotkeeper.report.job.lines import matches, phase_word
from spotkeeper.report.job.view import JobView
from spotkeeper.report.text.words import count, saved, usd

PER_PAGE = 25
STATES = ("unfinished", "training", "waiting", "on hold", "ended", "all")
NEWEST = "Newest"
ORDERS = (NEWEST, *(column.name for column in rows.COLUMNS if column.key))


def in_state(state: KnownJob, wanted: str) -> bool:
    view = state.view
    match wanted:
        case "unfinished":
            return not view.over()
        case "training":
            return phase_word(view) == "training"
        case "waiting":
            return view.queued() or phase_word(view) in ("starting", "regrouping")
        case "on hold":
            return _on_hold(view)
        case "ended":
            return view.over()
    return True


def _on_hold(view: JobView) -> bool:
    return view.phase is Phase.HOLD and not view.queued()


class JobsPage(Page):
    def __init__(self, feed: JobFeed, client: Client) -> None:
        super().__init__(feed, client, "Jobs", self._fill)
        self._words, self._state, self._order, self._down, self._at = "", STATES[0], NEWEST, True, 0
        with self.main:
            html(el("h1", "Jobs"), classes="q-mb-md")
            with card():
                self._sums = html(classes="facts")
                self._sweeps = html(classes="small")
            with card():
                with ui.row().classes("items-center w-full q-mb-sm"):
                    ui.input("Search", placeholder="name, owner, zone, model", on_change=self._search).props(
                        "dense outlined clearable debounce=300 input-id=search"
                    )
                    ui.select(list(STATES), label="State", value=STATES[0], on_change=self._filter).props(
                        "dense outlined options-dense"
                    ).style("min-width:140px")
                    ui.select(list(ORDERS), label="Sort by", value=NEWEST, on_change=self._sort).props(
                        "dense outlined options-dense"
                    ).style("min-width:140px")
                    self._turn = ui.button("Descending", on_click=self._reverse).props("flat dense no-caps")
                self._unreadable = html()
                with ui.element("table").classes("rows"):
                    html("Jobs", "caption", "unseen")
                    with ui.element("thead"), ui.element("tr"):
                        for column in rows.COLUMNS:
                            html(column.name, "th", "right" if column.right else "").props("scope=col")
                    self._body = html("", "tbody")
                self._empty = html(classes="dim")
                with ui.row().classes("items-center w-full justify-end q-mt-sm"):
                    self._range = html(classes="dim small").props("role=status")
                    self._before = ui.button("Previous", on_click=lambda: self._go(-1)).props("flat dense no-caps")
                    self._after = ui.button("Next", on_click=lambda: self._go(1)).props("flat dense no-caps")

    # -- what the user asks for

    def _search(self, event: object) -> None:
        self._words = str(getattr(event, "value", "") or "")[:200]
        self._again()

    def _filter(self, event: object) -> None:
        self._state = str(getattr(event, "value", STATES[0]))
        self.viewer.ended = self._state in ("ended", "all")
        self._again()

    def _sort(self, event: object) -> None:
        self._order = str(getattr(event, "value", NEWEST))
        self._again()

    def _reverse(self) -> None:
        self._down = not self._down
        self._turn.text = "Descending" if self._down else "Ascending"
        self._again()

    def _go(self, by: int) -> None:
        self._at = max(0, self._at + by)
        self._again(first=False)

    def _again(self, *, first: bool = True) -> None:
        self._at = 0 if first else self._at
        self._fill()
        self.feed.wake()

    # -- what it shows

    def _chosen(self) -> list[KnownJob]:
        found = [
            state
            for state in list(self.feed.jobs.values())
            if in_state(state, self._state) and matches(state.view, self._words)
        ]
        column = next((column for column in rows.COLUMNS if column.name == self._order), None)
        found.sort(key=lambda state: state.record.created, reverse=self._down if column is None else True)
        if column is not None and (key := column.key) is not None:
            found.sort(key=lambda state: key(state.view), reverse=self._down)  # type: ignore[arg-type, return-value]
        return found

    def _fill(self) -> None:
        found = self._chosen()
        self._at = min(self._at, max(0, (len(found) - 1) // PER_PAGE))
        first = self._at * PER_PAGE
        shown = found[first : first + PER_PAGE]
        self.viewer.rows = frozenset(state.record.job for state in shown if not state.settled)
        self.viewer.charts = frozenset(state.record.job for state in shown)
        put(self._body, join(rows.row(state.view, tuple(state.samples)) for state in shown))
        put(self._empty, "" if found else self._nothing())
        put(self._range, f"{first + 1} to {first + len(shown)} of {len(found)}" if found else "")
        self._before.set_enabled(self._at > 0)
        self._after.set_enabled(first + PER_PAGE < len(found))
        put(self._sums, self._totals(found))
        put(self._sweeps, links(self.feed.sweeps) or "")
        lost = [
            el("div", f"{job}: unreadable, so not reconciled: {why}", class_="note bad") for job, why in self._lost()
        ]
        put(self._unreadable, join(lost))

    def _lost(self) -> list[tuple[str, str]]:
        return sorted(self.feed.unreadable.items())

    def _nothing(self) -> str:
        if self.feed.stack is None:
            return el("p", "Reading the bucket ...")
        if self._words or self._state != STATES[0]:
            return el("p", "No job matches.")
        return el(
            "p",
            "No unfinished job. Ended jobs: choose the state “ended”. To start one: ",
            el("code", "spotkeeper submit job.yaml"),
        )

    @staticmethod
    def _totals(found: list[KnownJob]) -> str:
        views = [state.view for state in found]
        spent, whole = sum(view.money.spent for view in views), sum(view.money.on_demand_only for view in views)
        training = sum(phase_word(view) == "training" for view in views)
        machines = sum(node.model is not None for view in views for node in view.nodes)
        held = sum(map(_on_hold, views))
        percent = 100 * (whole - spent) / whole if whole > 0 else None
        return join(
            (
                fact("Jobs", str(len(views)), f"{training} training"),
                fact("On hold", str(held)),
                fact("Machines", str(machines), count(len({n.zone for v in views for n in v.nodes if n.zone}), "zone")),
                fact("Spent", usd(spent), f"on demand {usd(whole)}"),
                fact(
                    "Saved", "-" if percent is None else usd(whole - spent), None if percent is None else saved(percent)
                ),
            )
        )
