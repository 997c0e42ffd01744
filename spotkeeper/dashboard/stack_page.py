"""The page of the stack."""

from __future__ import annotations

from nicegui import Client

from spotkeeper.dashboard.feed import JobFeed
from spotkeeper.dashboard.frame import Page, html
from spotkeeper.report.html.markup import el


class StackPage(Page):
    def __init__(self, feed: JobFeed, client: Client) -> None:
        super().__init__(feed, client, "Stack", self._fill)
        with self.main:
            html(el("h1", "Stack"), classes="q-mb-md")

    def _fill(self) -> None:
        return
