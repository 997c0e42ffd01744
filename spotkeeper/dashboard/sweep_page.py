"""The page of a search: its trials as a table, their curves, and their values side by side."""

from __future__ import annotations

import math

from nicegui import Client, run, ui

from spotkeeper.client.errors import CliError
from spotkeeper.client.sweep_status import Sweep, find_sweep, read_facts
from spotkeeper.dashboard import sweep_charts as charts
from spotkeeper.dashboard.chart import Chart
from spotkeeper.dashboard.curves import Points, thinned
from spotkeeper.dashboard.feed import JobFeed
from spotkeeper.dashboard.frame import Page, card, html, put
from spotkeeper.reconcile.store.objects import StoreError
from spotkeeper.report.html import sweep as parts
from spotkeeper.report.html.markup import el
from spotkeeper.report.sweep import SweepView, TrialFacts, sweep_view

EVERY = 3  # updates of the page, 10 s each, from one read of all trials to the next
PER_PAGE = 25
MOST_POINTS = 200  # of a curve


class SweepPage(Page):
    def __init__(self, feed: JobFeed, client: Client, name: str) -> None:
        super().__init__(feed, client, "", self._fill)
        self._name = name
        self.viewer.lists = False
        self._updates, self._first, self._reading = 0, 0, False
        self._sweep: Sweep | None = None
        self._view: SweepView | None = None
        self._found: dict[int, TrialFacts] = {}
        self._points: dict[int, Points] = {}
        with self.main:
            html(el("h1", "Search ", el("span", name)), classes="q-mb-md")
            self._notes = html()
            with card():
                self._figures = html()
                self._best = html()
                self._stops = html()
            self._curves = Chart("Curves", height=300)
            self._parallel = Chart("Parameters", height=320)
            with card("Comparisons"):
                self._rungs = html()
            with card("Trials"):
                self._table = html()
                with ui.row().classes("items-center w-full justify-end"):
                    self._before = ui.button("Previous", on_click=lambda: self._go(-1)).props("flat dense no-caps")
                    self._after = ui.button("Next", on_click=lambda: self._go(1)).props("flat dense no-caps")

    def _fill(self) -> None:
        if self._updates % EVERY == 0:
            ui.timer(0.0, self._again, once=True)
        self._updates += 1
        self._show_view()

    def _go(self, by: int) -> None:
        self._first = max(0, self._first + by * PER_PAGE)
        self._show_view()

    async def _again(self) -> None:
        """Read the search's trials again, unless a read is under way."""
        if self._reading or self.viewer.hidden or self.feed.stack is None:
            self._updates = 0
            return
        self._reading = True
        try:
            told = await run.io_bound(self._read)
        finally:
            self._reading = False
        put(self._notes, el("div", told, class_="note bad") if told else "")
        self._show_view()

    def _read(self) -> str:
        """Read the search. Returns why that failed, or ""."""
        feed = self.feed
        try:
            sweep = find_sweep(feed.store, self._name)
            found = read_facts(feed.store, sweep, feed.stack, feed.now(), feed.site, known=self._found)
            view = sweep_view(sweep.spec, sweep.cohorts, feed.store.read_sweep(self._name).value, found, sweep.stops)
        except (CliError, StoreError) as error:
            return str(error)
        self._sweep, self._view, self._found = sweep, view, found
        self._points = {number: _drawn(one) for number, one in found.items()}
        return ""

    def _show_view(self) -> None:
        view, sweep = self._view, self._sweep
        if view is None or sweep is None:
            return
        put(self._figures, parts.figures(view))
        put(self._best, parts.best_values(view) or "")
        put(self._stops, parts.stops(view) or "")
        put(self._rungs, parts.rungs(view) or el("p", "This search trains every trial to its end.", class_="dim"))
        self._first = min(self._first, max(0, (view.trials - 1) // PER_PAGE * PER_PAGE))
        put(self._table, parts.trials(view, self._first, PER_PAGE))
        self._before.set_enabled(self._first > 0)
        self._after.set_enabled(self._first + PER_PAGE < view.trials)
        self._curves.show(
            charts.curves(view, self._points, self.dark),
            ("trial", "step", view.metric),
            charts.curve_rows(view, self._points),
            f"No trial has reported {view.metric} yet.",
        )
        names = list(sweep.spec.file.space)
        self._parallel.show(
            charts.parallel(view, sweep.spec.file.space, self.dark),
            ("trial", *names, view.metric),
            charts.trial_table(view, names),
            f"No trial has a value of {view.metric} yet.",
        )


def _drawn(found: TrialFacts) -> Points:
    curve = found.curve
    if curve is None:
        return []
    points = zip(curve.steps, curve.values, strict=True)
    return thinned([(step, value) for step, value in points if math.isfinite(value)], MOST_POINTS)
