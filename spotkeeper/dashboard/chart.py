"""A chart on a page."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

from nicegui import ui

from spotkeeper.dashboard import charts
from spotkeeper.dashboard.frame import html, put
from spotkeeper.report.html.markup import el


class Chart:
    """A chart with a title, a key, and a button that downloads its data as CSV.

    An icon in the top right corner of the plot downloads it as PNG.
    """

    def __init__(self, title: str, key: str = "", height: int = 240) -> None:
        with ui.element("section").classes("card"):
            with ui.row().classes("items-center w-full no-wrap"):
                html(el("h2", title), classes="col")
                ui.button("Data (CSV)", on_click=self._download).props("flat dense no-caps size=sm")
            if key:
                html(key)
            self._chart = ui.echart({"series": []}).classes("chart").style(f"height:{height}px")
            self._chart.props(f'role=img aria-label="{title}"')
            self._none = html(classes="dim")
        self._title, self._rows = title, (("",), [])  # type: tuple[str, tuple[Sequence[str], Sequence[Sequence[str]]]]
        self._shown: object = None

    def show(self, options: charts.Options, head: Sequence[str], rows: Sequence[Sequence[str]], none: str = "") -> None:
        """Draw the data. Options that have not changed are not sent again, so the user's zoom stays.

        Args:
            head, rows: the table to download.
            none: the text to show if ``rows`` is empty.
        """
        self._rows = head, rows
        self._chart.set_visibility(bool(rows))
        put(self._none, "" if rows else el("p", none))
        if options == self._shown:
            return
        self._shown = options
        self._chart.options.clear()
        self._chart.options.update(options)
        self._chart.update()

    def height(self, pixels: int) -> None:
        self._chart.style(f"height:{pixels}px")

    def _download(self) -> None:
        head, rows = self._rows
        text = io.StringIO()
        csv.writer(text).writerows([head, *rows])
        ui.download.content(text.getvalue(), f"{self._title.lower().replace(' ', '-')}.csv", "text/csv")
