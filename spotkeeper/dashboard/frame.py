"""What all pages share: the heading, the theme, and their registration as viewers of the feed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from nicegui import ui

from spotkeeper.dashboard.feed import JobFeed, Viewer
from spotkeeper.report.html.markup import Markup, el, join
from spotkeeper.report.html.style import PAGE_STYLE
from spotkeeper.report.text.words import usd

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nicegui import Client
    from nicegui.events import GenericEventArguments

# Tells the server whether the page is visible and which theme is on; gives the focus back to an element that was
# replaced; colors the charts' PNG as the page.
SCRIPT = """<script>
(() => {
  let last = '';
  const look = () => window.emitEvent && emitEvent('look',
    {hidden: document.hidden, dark: document.body.classList.contains('body--dark')});
  document.addEventListener('visibilitychange', look);
  window.spotkeeperLook = look;
  document.addEventListener('focusin', event => { last = event.target.id || ''; });
  document.addEventListener('pointerdown', () => { last = ''; });
  const begin = () => {
    new MutationObserver(look).observe(document.body, {attributes: true, attributeFilter: ['class']});
    new MutationObserver(() => {
      if (last && document.activeElement === document.body)
        document.getElementById(last)?.focus({preventScroll: true});
    }).observe(document.body, {childList: true, subtree: true});
  };
  document.body ? begin() : document.addEventListener('DOMContentLoaded', begin);
})();
</script>"""
OWN_STYLE = """
.nicegui-content{padding:0;align-items:stretch;gap:0}
.q-page-container,.q-layout{min-height:0}
body.body--light,body.body--dark{background:var(--ground);color:var(--ink);--q-primary:var(--link)!important;
  --q-negative:var(--bad)!important}
.sk .nicegui-tab-panel{align-items:stretch}
.top{background:var(--card);border-bottom:1px solid var(--line)}
.top .wide{display:flex;align-items:center;gap:8px 20px;flex-wrap:wrap;padding-top:10px;padding-bottom:10px}
.top nav{display:flex;gap:16px} .top nav a[aria-current]{color:var(--ink);font-weight:650}
.top .grow{flex:1}
.sk .q-btn{text-transform:none;letter-spacing:0}
.sk .q-field__label,.sk .q-field__native,.sk .q-field__input,.sk .q-select__dropdown-icon{color:var(--ink)}
.sk .q-tab{text-transform:none}
.chart{width:100%} .chart-head{margin-bottom:.6rem} .sk .chart-head h2{margin:0}
"""


def html(content: str = "", tag: str = "div", classes: str = "") -> ui.html:
    """Return an element for markup in which :mod:`spotkeeper.report.html` has escaped all texts; shown as it is."""
    return ui.html(content, sanitize=False, tag=tag).classes(classes)


def put(element: ui.html, content: str) -> None:
    """Set an element's markup; unchanged markup is not sent to the browser again."""
    if element.content != content:
        element.set_content(content)


CONNECT_S = 60.0  # real; the longest wait for a browser's websocket


class Page:
    """The frame of an open page, updated by the feed. ``dark``: whether the browser's theme is dark."""

    def __init__(self, feed: JobFeed, client: Client, name: str, show: Callable[[], None]) -> None:
        self.feed, self.client, self.dark = feed, client, False
        self._show = show
        self.viewer = Viewer(self._update, hidden=True)
        ui.add_head_html(f"<style>{PAGE_STYLE}{OWN_STYLE}</style>{SCRIPT}")
        self._theme = ui.dark_mode(value=None)
        with ui.element("header").classes("sk top"), ui.element("div").classes("wide"):
            html(join([el("b", "Spotkeeper"), " ", el("span", feed.target.stack, class_="dim")]))
            with ui.element("nav").props('aria-label="Pages"'):
                for word, path in (("Jobs", "/"), ("Stack", "/stack")):
                    link = ui.link(word, path)
                    if word == name:
                        link.props('aria-current="page"')
            ui.element("div").classes("grow")
            self._reads = html("", classes="dim small")
            ui.button("Theme", on_click=self._other_theme).props("flat dense no-caps color=inherit").classes("small")
        self.main = ui.element("div").classes("sk wide")
        with self.main:
            self._trouble = html()
        ui.on("look", self._look)
        client.on_delete(lambda: feed.remove(self.viewer))

    async def ready(self) -> bool:
        """Wait for the browser's websocket, then register the page with the feed. False: no websocket was opened.

        A program that only fetches the page, such as a crawler, opens no websocket, so nothing is read for it.
        """
        try:
            await self.client.connected(CONNECT_S)
        except TimeoutError:
            return False
        self.viewer.hidden = False  # until the browser tells otherwise
        self.feed.add(self.viewer)
        self.client.run_javascript("spotkeeperLook()")
        return True

    def _look(self, event: GenericEventArguments) -> None:
        told: Any = event.args
        if not isinstance(told, dict):
            return
        dark, hidden = bool(told.get("dark")), bool(told.get("hidden"))
        changed = dark != self.dark
        self.dark = dark
        woken = self.viewer.hidden and not hidden
        self.viewer.hidden = hidden
        if changed and not hidden:
            self._update()
        if woken:
            self.feed.wake()

    def _other_theme(self) -> None:
        self._theme.value = not self.dark

    def _update(self) -> None:
        if self.client.is_deleted:
            self.feed.remove(self.viewer)
            return
        with self.client:
            hour = self.feed.meter.hour()
            free = " (free here)" if self.feed.site.local else ""
            put(self._reads, el("span", f"{hour.reads:,} reads/h: {_cents(hour.usd)}{free}", title=READS))
            lines = [line for line in (self.feed.trouble, self.feed.site.no_tick) if line]
            put(self._trouble, join(el("div", line, class_="note bad", role="alert") for line in lines))
            self._show()


READS = "What this dashboard's reads of the bucket cost an hour at the present pace"


def _cents(amount: float) -> str:
    return usd(amount) if amount >= 0.005 else f"${amount:.4f}"


@contextmanager
def card(title: str = "", right: Markup | None = None) -> Iterator[None]:
    with ui.element("section").classes("card"):
        if title:
            html(join([el("h2", title), right]) if right else el("h2", title))
        yield
