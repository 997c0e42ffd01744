"""A real Chromium on the dashboard, that notes errors, requests to other machines, and what axe-core finds."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import axe_playwright_python
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, Request, sync_playwright

CHROMIUM = shutil.which("chromium")
WHY_NOT = "no chromium here (Debian: apt-get install chromium)"
AXE = Path(axe_playwright_python.__file__).parent / "axe.min.js"
SERIOUS = ("serious", "critical")
WAIT_MS = 30_000.0


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        options = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=options)
        try:
            yield browser
        finally:
            browser.close()


class Visitor:
    """A browser window with a theme and a width. ``told``: all that must not be."""

    def __init__(self, browser: Browser, state: Any, theme: Any = "light", width: int = 1440) -> None:
        self.context: BrowserContext = browser.new_context(
            storage_state=state, color_scheme=theme, viewport={"width": width, "height": 900}
        )
        self.context.set_default_timeout(WAIT_MS)
        self.told: list[str] = []
        self.page: Page = self.context.new_page()
        self.page.on("console", self._console)
        self.page.on("pageerror", lambda error: self.told.append(f"error: {error}"))
        self.page.on("request", self._request)

    def _console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.told.append(f"console: {message.text}")

    def _request(self, request: Request) -> None:
        parts = urlsplit(request.url)
        if parts.scheme not in ("data", "blob") and parts.hostname != "127.0.0.1":
            self.told.append(f"a request elsewhere: {request.url}")

    def look(self, theme: Any, width: int) -> None:
        """Another theme and width for the pages opened next. A new window would compile all scripts again."""
        self.page.emulate_media(color_scheme=theme)
        self.page.set_viewport_size({"width": width, "height": 900})

    def open(self, address: str, wait_for: str) -> None:
        self.page.goto(address)
        self.page.wait_for_selector(wait_for)

    def serious(self) -> list[str]:
        """What axe-core finds on the page that is serious."""
        self.page.evaluate(AXE.read_text("utf-8"))
        found = self.page.evaluate("axe.run()")
        return [
            f"{one['id']}: {node['html'][:200]}"
            for one in found["violations"]
            if one["impact"] in SERIOUS
            for node in one["nodes"]
        ]

    def too_wide(self) -> int:
        """How many pixels the page is wider than the window."""
        return max(0, int(self.page.evaluate("document.documentElement.scrollWidth - innerWidth")))

    def overflowing(self) -> list[str]:
        """The cells of tables whose text reaches into the next cell."""
        cells = "[...document.querySelectorAll('td')].filter(cell => cell.scrollWidth > cell.clientWidth + 1)"
        return list(self.page.evaluate(f"{cells}.map(cell => cell.textContent)"))


def login(browser: Browser, url: str) -> Any:
    """Open the one-time address, and return what the browser got by it."""
    context = browser.new_context()
    context.new_page().goto(url)
    state = context.storage_state()
    context.close()
    return state
