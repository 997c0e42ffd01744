"""The page of the stack."""

from __future__ import annotations

from nicegui import Client

from spotkeeper.dashboard import charts
from spotkeeper.dashboard.chart import Chart
from spotkeeper.dashboard.feed import JobFeed
from spotkeeper.dashboard.frame import Page, card, html, put
from spotkeeper.report.html import stack as parts
from spotkeeper.report.html.markup import el
from spotkeeper.report.html.queue import queue
from spotkeeper.report.stack import stack_view

DAYS = 90


class StackPage(Page):
    def __init__(self, feed: JobFeed, client: Client) -> None:
        super().__init__(feed, client, "Stack", self._fill)
        self.viewer.market = True
        with self.main:
            html(el("h1", "Stack ", el("span", feed.target.stack, class_="dim small")), classes="q-mb-md")
            with card():
                self._figures = html()
            with card("Queue"):
                self._queue = html()
            with card("Jobs on hold"):
                self._held = html()
            self._pools = html()
            self._prices = Chart("Spot prices", height=280)

    def _fill(self) -> None:
        feed = self.feed
        if feed.stack is None:
            return
        known = [(job.view, job.ledger) for job in list(feed.jobs.values()) if not job.view.over()]
        now = feed.now()
        view = stack_view(feed.stack, feed.allocation, known, now, feed.prices, feed.observed)
        put(self._figures, parts.figures(view))
        put(self._held, parts.held(view))
        if feed.queue is not None:
            put(self._queue, queue(feed.queue.view()))
        put(self._pools, parts.pools(view))
        series = charts.price_series(feed.prices, now, DAYS)
        self._prices.show(
            charts.prices(series, self.dark),
            ("pool and zone", "days_ago", "usd_per_hour"),
            [(name, round(0.0 - day, 4), round(usd, 4)) for name, points in series for day, usd in points],
            "The cloud has reported no spot price yet.",
        )
