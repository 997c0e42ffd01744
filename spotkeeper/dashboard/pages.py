"""The addresses of the pages."""

from __future__ import annotations

from fastapi import Request
from fastapi.responses import HTMLResponse
from nicegui import Client, ui

from spotkeeper.dashboard.actions import Commands
from spotkeeper.dashboard.feed import JobFeed
from spotkeeper.dashboard.job_page import JobPage
from spotkeeper.dashboard.jobs_page import JobsPage
from spotkeeper.dashboard.stack_page import StackPage
from spotkeeper.dashboard.sweep_page import SweepPage
from spotkeeper.report.html.markup import Markup, el, join
from spotkeeper.report.html.style import FILE_STYLE

ICON = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 32 32"><rect width="32" height="32" rx="7" fill="#2f6fed"/>'
    '<path d="M6 11h13M6 16h8m4 0h8M6 21h20" stroke="#fff" stroke-width="3.2" stroke-linecap="round"/></svg>'
)


async def missing(_: Request, __: Exception) -> HTMLResponse:
    """Answer a request for an address without a page."""
    said = el(
        "p",
        "No such page. The pages of this dashboard: ",
        el("a", "Jobs", href="/", class_="inline"),
        ", ",
        el("a", "Stack", href="/stack", class_="inline"),
        ".",
    )
    head = join(
        [el("meta", charset="utf-8"), el("title", "No such page - Spotkeeper"), el("style", Markup(FILE_STYLE))]
    )
    page = el("html", el("head", head), el("body", el("main", said, class_="sk wide")), lang="en")
    return HTMLResponse(f"<!doctype html>\n{page}\n", 404)


def register(feed: JobFeed, commands: Commands) -> None:
    """Declare the pages. Each waits for its browser before it reads or shows anything."""

    @ui.page("/", title="Jobs - Spotkeeper")
    async def jobs(client: Client) -> None:
        page = JobsPage(feed, client)
        await page.ready()

    @ui.page("/jobs/{word}", title="Job - Spotkeeper")
    async def job(client: Client, word: str) -> None:
        page = JobPage(feed, client, commands, word[:64])
        await page.ready()

    @ui.page("/sweeps/{name}", title="Search - Spotkeeper")
    async def sweep(client: Client, name: str) -> None:
        page = SweepPage(feed, client, name[:64])
        await page.ready()

    @ui.page("/stack", title="Stack - Spotkeeper")
    async def stack(client: Client) -> None:
        page = StackPage(feed, client)
        await page.ready()
