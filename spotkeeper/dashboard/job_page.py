"""The page of one job."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from nicegui import Client, run, ui

from spotkeeper.client import lookup
from spotkeeper.client.errors import CliError
from spotkeeper.contract.record import Record
from spotkeeper.dashboard import charts
from spotkeeper.dashboard.actions import Action, Commands
from spotkeeper.dashboard.chart import Chart
from spotkeeper.dashboard.curves import FIRST_CHARTS, LOSS, MOST_METRICS, JobCurves, Points
from spotkeeper.dashboard.feed import JobFeed, KnownJob
from spotkeeper.dashboard.frame import Page, card, html, put
from spotkeeper.dashboard.log_panel import LogPanel
from spotkeeper.reconcile.store.objects import StoreError
from spotkeeper.report.html import job as parts
from spotkeeper.report.html import svg
from spotkeeper.report.html.markup import el, join, table
from spotkeeper.report.job.metrics import not_drawn
from spotkeeper.report.job.timeline import Timeline, resumed_steps, timeline
from spotkeeper.report.money.account import account
from spotkeeper.report.money.money import over_time
from spotkeeper.report.text.words import count

LOG_EVERY, METRICS_EVERY = 5, 30  # updates of the page from one read for its open tab, or of its metrics, to the next
NO_STEPS = "A script with stop: signal reports no steps, so no curve"
TABS = ("Recoveries", "Machines", "Checkpoints", "Events", "Logs", "Job file")


class JobPage(Page):
    def __init__(self, feed: JobFeed, client: Client, commands: Commands, word: str) -> None:
        super().__init__(feed, client, "", self._fill)
        self._commands, self._word, self._job = commands, word, ""
        self.viewer.lists = False
        self._updates = 0
        self._silent = False  # its script saves by itself, and reports nothing
        self._curves = JobCurves()
        self._log = LogPanel(feed)
        with self.main, ui.element("div") as self._body:
            with ui.row().classes("items-center w-full q-mb-md"):
                self._title = html(el("h1", word))
                ui.element("div").classes("col")
                self._buttons = ui.row().classes("items-center").style("gap:4px")
            self._notes = html()
            with card():
                self._figures = html()
                self._sums = html()
            self._timeline = Chart("Timeline", svg.key())
            with card("Machines now"):
                self._now = html()
            self._tiles = ui.element("div").classes("tiles")
            with self._tiles:
                self._money = Chart("Money")
                self._speed = Chart("Throughput")
                self._metrics = {LOSS: Chart("Loss")}
            self._more = html(classes="dim q-mb-md")
            self._all = ui.button("Show all", on_click=self._show_all).props("outline dense no-caps").classes("q-px-sm")
            self._all.set_visibility(False)
            self._most = FIRST_CHARTS
            with card():
                with ui.tabs().props("dense no-caps align=left inline-label outside-arrows") as tabs:
                    made = [ui.tab(name) for name in TABS]
                with ui.tab_panels(tabs, value=made[0], animated=False).classes("w-full").props("keep-alive") as panels:
                    panels.style("background:transparent;color:inherit")
                    fills: list[ui.html] = []
                    for tab in made:
                        with ui.tab_panel(tab).style("padding:12px 0 0"):
                            if tab.props["name"] == "Logs":
                                self._log.build()
                            else:
                                fills.append(html())
                self._recoveries, self._machines, self._checkpoints, self._events, self._file = fills
            self._tabs = tabs
        tabs.on_value_change(self._tab)

    async def ready(self) -> bool:
        if not await super().ready():
            return False
        self._job = await run.io_bound(self.feed.find, self._word) or ""
        if not self._job:
            self._missing()
            return False
        self._silent = await run.io_bound(self._saves_by_itself) or False
        self.viewer.job = self._job
        self.feed.wake()
        return True

    def _saves_by_itself(self) -> bool:
        with suppress(CliError, StoreError):
            record = lookup.find_job(self.feed.store, self._job)
            spec = self.feed.store.read_spec(record.job, record.spec_key())
            return spec is not None and spec.stop == "signal"
        return False

    def _missing(self) -> None:
        """Show that there is no such job, in place of the empty parts of the page."""
        self._body.set_visibility(False)
        link, all_jobs = el("a", "Jobs", href="/", class_="inline"), el("code", "spotkeeper status --all")
        with self.client, self.main:
            html(el("h1", self._word), classes="q-mb-md")
            html(el("div", f"{self._word}: no such job", class_="note bad", role="alert"))
            html(el("p", "Unfinished and ended jobs: the page ", link, ", or ", all_jobs, "."))

    def _tab(self) -> None:
        self._updates = 0
        self._fill()

    @property
    def _state(self) -> KnownJob | None:
        return self.feed.jobs.get(self._job)

    def _fill(self) -> None:
        state = self._state
        if state is None:
            return
        view, now = state.view, self.feed.now()
        found = account(view, state.ledger, now, self.feed.prices)
        line = timeline(state.ledger, now)
        put(self._title, el("h1", f"{view.name} ", el("span", view.job, class_="dim small")))
        put(self._notes, parts.notes(view))
        put(self._figures, parts.figures(view, found))
        put(self._sums, parts.sums(view))
        put(self._now, parts.machines(view))
        self._charts(state, line)
        put(
            self._recoveries,
            join(
                [
                    el("h2", "Recoveries"),
                    parts.recoveries(found),
                    el("h2", "Lost work", class_="q-mt-md"),
                    parts.lost_work(found),
                ]
            ),
        )
        put(self._machines, parts.all_machines(found))
        put(self._events, parts.events(view, state.record.created, 300))
        self._actions(state.record)
        if self._updates % LOG_EVERY == 0:
            ui.timer(0.0, self._fill_tab, once=True)
        if self._updates % METRICS_EVERY == 0:
            ui.timer(0.0, self._read_metrics, once=True)
        self._updates += 1

    def _charts(self, state: KnownJob, line: Timeline) -> None:
        dark = self.dark
        self._timeline.height(charts.timeline_height(line))
        self._timeline.show(
            charts.timeline(line, dark),
            charts.TIMELINE_HEAD,
            charts.timeline_rows(line),
            "No machine was requested yet.",
        )
        money = over_time(state.ledger, self.feed.stack, line.end, self.feed.prices)
        spent = [(at - line.start, round(paid, 4)) for at, paid, _ in money]
        whole = [(at - line.start, round(paid, 4)) for at, _, paid in money]
        self._money.show(
            charts.lines(
                "Money",
                [("spent", "spot", spent), ("the same machine-hours on demand", "demand", whole)],
                dark,
                unit="$",
                on_time=True,
                from_zero=True,
            ),
            ("seconds", "spent_usd", "on_demand_usd"),
            [(round(at - line.start), round(paid, 4), round(other, 4)) for at, paid, other in money]
            if spent[-1][1]
            else [],
            "Nothing was spent yet.",
        )
        marks = resumed_steps(state.ledger)
        speeds = [(step, speed) for step, _, speed in state.samples if speed is not None]
        empty: list[str] = []  # their cards would be holes among the others
        if len(self._curves.pace) > 1:  # of the whole run; samples are those since the dashboard first read the job
            drawn = _draw(self._speed, "steps a second", self._curves.pace, marks, dark, speed=True)
        else:
            drawn = _draw(self._speed, "samples a second", speeds, marks, dark, speed=True)
        empty += [] if drawn else ["throughput"]
        losses = [(step, loss) for step, loss, _ in state.samples if loss is not None]
        curves = {LOSS: losses, **self._curves.metrics}
        names = list(dict.fromkeys((*self._metrics, *curves, *self._curves.packed)))  # a chart keeps its place
        if not self._curves.packed.keys().isdisjoint(names[: self._most]):
            curves |= self._curves.unpacked
        for name in names[: self._most]:
            if name not in self._metrics:
                with self._tiles:
                    self._metrics[name] = Chart(name)
            empty += [] if _draw(self._metrics[name], name, curves.get(name, []), marks, dark) else [name]
        self._all.set_visibility(len(names) > self._most)
        self._all.text = f"Show {count(len(names) - self._most, 'more metric')}"
        why = NO_STEPS if self._silent else "Too few values" if state.record.over else "Too few values yet"
        lines = [f"{why}: {', '.join(empty)}." if empty else "", not_drawn(self._curves.few, state.view.name)]
        if self._curves.more:
            lines.append(f"Also: {', '.join(self._curves.more)}: spotkeeper metrics {state.view.name}")
        put(self._more, join(el("p", line) for line in lines if line))

    def _show_all(self) -> None:
        self._most = MOST_METRICS
        self._fill()

    async def _read_metrics(self) -> None:
        """Read the job's metrics again. They are uploaded once a minute."""
        with suppress(StoreError):
            self._curves = await self.feed.curves(self._job)

    async def _fill_tab(self) -> None:
        """Read and show what the open tab needs: checkpoints, the job file or logs. Closed tabs cause no reads."""
        state = self._state
        name = self._tabs.value
        if state is None or self.viewer.hidden:
            return
        if name == "Checkpoints":
            rows = await run.io_bound(self._checkpoint_rows, state.record)
            put(
                self._checkpoints,
                table(
                    ("Checkpoint", "Where", "Size", "Age", "Note"),
                    rows or (),
                    "Checkpoints and copies",
                    (2, 3),
                    "No checkpoint is known.",
                ),
            )
        elif name == "Job file":
            put(self._file, await run.io_bound(self._job_file, state.record) or "")
        elif name == "Logs":
            await self._log.read(state.record)

    def _checkpoint_rows(self, record: Record) -> Sequence[Sequence[str]]:
        try:
            return self._commands.checkpoints(record)
        except (CliError, StoreError) as error:
            return [("", str(error), "", "", "")]

    def _job_file(self, record: Record) -> str:
        try:
            text = lookup.job_yaml(self.feed.store, record)
        except StoreError as error:
            return el("p", str(error))
        if not text:
            return el("p", "The job file is gone.")
        return el("pre", text, class_="log", tabindex="0", aria_label="Job file")

    # -- actions

    def _actions(self, record: Record) -> None:
        actions = {} if self._commands.read_only or record.over else self._commands.actions
        wanted = [name for name, action in actions.items() if action.offered(record)]
        if getattr(self, "_offered", None) == wanted:
            return
        self._offered = wanted
        self._buttons.clear()
        with self._buttons:
            for name in wanted:
                ui.button(actions[name].name, on_click=lambda _, name=name: self._ask(name, record)).props(
                    "outline dense no-caps" + (" color=negative" if actions[name].danger else " color=primary")
                ).classes("q-px-sm")

    def _ask(self, name: str, record: Record) -> None:
        action = self._commands.actions[name]
        with self.client, ui.dialog() as dialog, ui.card().classes("sk"):
            html(el("h2", f"{action.name} {record.name}?"))
            html(el("p", action.consequence))
            value = ui.input(action.asks).props("dense outlined autofocus") if action.asks else None
            with ui.row().classes("justify-end w-full"):
                ui.button("No", on_click=dialog.close).props("flat no-caps")
                ui.button("Yes", on_click=lambda: self._do(action, name, value.value if value else "", dialog)).props(
                    "no-caps" + (" color=negative" if action.danger else "")
                )
        dialog.open()

    async def _do(self, action: Action, name: str, value: str, dialog: Any) -> None:
        dialog.close()
        state = self._state
        if state is None:
            return
        done = await run.io_bound(self._carry_out, name, state.record, str(value or ""))
        ui.notify(done, multi_line=True, timeout=8000)
        self.feed.wake()

    def _carry_out(self, name: str, record: Record, value: str) -> str:
        try:
            return self._commands.run(name, record, value)
        except (CliError, StoreError) as error:
            remedy = getattr(error, "remedy", "")
            return f"{error}" + (f" (try: {remedy})" if remedy else "")


def _draw(chart: Chart, name: str, data: Points, marks: list[float], dark: bool, *, speed: bool = False) -> bool:
    """Draw a curve over steps, with the recoveries marked; hide the chart of fewer than two points and return False.

    ``speed``: its axis begins at 0 and has the curve's name.
    """
    title, series, label = name[:1].upper() + name[1:], [(name, "spot", data)], name if speed else ""
    options = charts.lines(title, series, dark, marks=marks, from_zero=speed, axis_name=label)
    chart.hide(hidden=len(data) < 2)
    chart.show(options, ("step", name.replace(" ", "_")), data)
    return len(data) > 1
