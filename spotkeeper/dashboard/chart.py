"""A chart on a page."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence

from nicegui import ui

from spotkeeper.dashboard import charts
from spotkeeper.dashboard.frame import html, put
from spotkeeper.report.html.markup import el
from spotkeeper.report.money.account_text import safe_cell

Row = Sequence[object]


# A canvas has no address, so the browser makes one of its content and a link to it. The background is the page's.
_PNG = """() => {
  const chart = getElement(%d), link = document.createElement('a');
  const backgroundColor = getComputedStyle(chart.$el.closest('.card')).backgroundColor;
  link.href = chart.chart.getDataURL({pixelRatio: 2, backgroundColor});
  link.download = '%s.png';
  link.click();
}"""


class Chart:
    """A chart with a title, a key, and buttons that download it as PNG and its data as CSV."""

    def __init__(self, title: str, key: str = "", height: int = 240) -> None:
        self._file = re.sub(r"[^A-Za-z0-9_.-]+", "-", title.lower())
        self._card = ui.element("section").classes("card")
        with self._card:
            with ui.row().classes("chart-head items-center w-full no-wrap"):
                html(el("h2", title), classes="col")
                self._buttons = ui.row().classes("items-center no-wrap").style("gap:4px")
            if key:
                html(key)
            self._chart = ui.echart({"series": []}).classes("chart").style(f"height:{height}px")
            self._chart.props(f'role=img aria-label="{title}"')
            self._none = html(classes="dim")
        with self._buttons:
            png, data = (
                ui.button(kind).props(f'flat dense no-caps size=sm aria-label="{title} as {kind}"')
                for kind in ("PNG", "CSV")
            )
        png.on("click", js_handler=_PNG % (self._chart.id, self._file))
        data.on_click(self._download)
        self._rows: tuple[Sequence[str], Sequence[Row]] = ((), ())
        self._shown: object = None

    def show(self, options: charts.Options, head: Sequence[str], rows: Sequence[Row], none: str = "") -> None:
        """Draw the data. Options that have not changed are not sent again, so the user's zoom stays.

        Args:
            head, rows: the table to download.
            none: the text to show if ``rows`` is empty.
        """
        self._rows = head, rows
        self._chart.set_visibility(bool(rows))
        self._buttons.set_visibility(bool(rows))
        put(self._none, "" if rows else el("p", none))
        if options == self._shown:
            return
        self._shown = options
        self._chart.options.clear()
        self._chart.options.update(options)
        self._chart.update()

    def hide(self, *, hidden: bool) -> None:
        self._card.set_visibility(not hidden)

    def height(self, pixels: int) -> None:
        self._chart.style(f"height:{pixels}px")

    def _download(self) -> None:
        head, rows = self._rows
        text = io.StringIO()
        csv.writer(text).writerows(map(safe_cell, row) for row in (head, *rows))
        ui.download.content(text.getvalue(), f"{self._file}.csv", "text/csv")
