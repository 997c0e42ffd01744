"""The dashboard in a real browser, while a job of the one-machine cloud trains and loses machines."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, expect

from spotkeeper.cli.jobs import report
from spotkeeper.client.target import local_target
from spotkeeper.contract.record import Outcome
from spotkeeper.report.text.words import usd
from tests.dashboard.browser import CHROMIUM, WHY_NOT, Visitor, chromium, login
from tests.dashboard.served import Served, serving
from tests.lifecycle.stage import Run, Stage, tiny

pytestmark = [pytest.mark.lifecycle, pytest.mark.skipif(CHROMIUM is None, reason=WHY_NOT)]

LOOKS = list(product(("light", "dark"), (1440, 390)))
STEPS = 20_000  # more than the story takes: it is cancelled


@pytest.fixture(scope="module")
def run(stage: Stage) -> Iterator[Run]:
    """A job of two spot machines, of which one was replaced after a notice."""
    with Run(stage, tiny("watched", STEPS, nodes=2, static="never")) as run:
        run.steady("at first")
        run.chaos.one(announced=True)
        yield run
        if not run.record().over:
            run.cancel()


@pytest.fixture(scope="module")
def served(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = str(run.stage.cloud.folder)
    with serving({"SPOTKEEPER_FOLDER": folder}, tmp_path_factory.mktemp("dashboard")) as served:
        yield served


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def state(browser: Browser, served: Served) -> Any:
    return login(browser, served.url)


@pytest.mark.parametrize(("theme", "width"), LOOKS)
def test_every_page_in_every_look(
    browser: Browser, served: Served, state: Any, run: Run, theme: str, width: int, tmp_path: Path
) -> None:
    visitor = Visitor(browser, state, theme, width)
    pages = {"/": "tbody a", "/jobs/watched": "canvas", "/stack": "section .bar"}
    for path, wait_for in pages.items():
        visitor.open(served.root + path, wait_for)
        visitor.page.wait_for_function("document.querySelector('.facts')?.textContent.includes('$') ?? true")
        assert visitor.serious() == [], path
        assert visitor.too_wide() == 0, path
        visitor.page.screenshot(path=tmp_path / f"{path.strip('/').replace('/', '-')}.png", full_page=True)
    dark = visitor.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (dark == "rgb(16, 20, 27)") is (theme == "dark")
    visitor.context.close()
    assert visitor.told == []


def test_each_tab_of_a_job_is_readable(browser: Browser, served: Served, state: Any) -> None:
    visitor = Visitor(browser, state)
    visitor.open(f"{served.root}/jobs/watched", "canvas")
    shown = {
        "Recoveries": "spot in us-central1",
        "Machines": "us-central1",
        "Checkpoints": "disk of node 0",
        "Events": "job submitted",
        "Job file": "name: watched",
        "Logs": "generation",
    }
    for tab, text in shown.items():
        visitor.page.get_by_role("tab", name=tab, exact=True).click()
        expect(visitor.page.locator(".nicegui-tab-panel:visible")).to_contain_text(text, timeout=30_000)
        assert visitor.serious() == [], tab
    visitor.context.close()
    assert visitor.told == []


def test_a_browser_without_the_cookie_sees_nothing(browser: Browser, served: Served) -> None:
    visitor = Visitor(browser, None)
    visitor.page.goto(served.root)
    assert visitor.page.locator("body").inner_text().startswith("Open this dashboard by the address")
    visitor.context.close()


def test_the_keyboard_reaches_a_job(browser: Browser, served: Served, state: Any) -> None:
    visitor = Visitor(browser, state)
    visitor.open(served.root, "tbody a")
    for _ in range(20):
        visitor.page.keyboard.press("Tab")
        if visitor.page.evaluate("document.activeElement.textContent") == "watched":
            break
    visitor.page.keyboard.press("Enter")
    visitor.page.wait_for_url("**/jobs/*")
    visitor.context.close()


def test_the_page_follows_a_loss_without_a_reload_and_its_amounts_are_the_commands(
    browser: Browser, served: Served, state: Any, run: Run
) -> None:
    visitor = Visitor(browser, state)
    visitor.open(f"{served.root}/jobs/watched", "canvas")
    visitor.page.evaluate("window.unreloaded = true")
    before = run.record().gen
    run.chaos.one(announced=False)
    recoveries = visitor.page.get_by_role("table", name="Recoveries")
    expect(recoveries).to_contain_text("loss", timeout=60_000)
    assert run.record().gen > before and visitor.page.evaluate("window.unreloaded")
    assert visitor.told == []

    visitor.page.get_by_role("button", name="Cancel").click()
    visitor.page.get_by_role("button", name="Yes").click()
    run.until("the job to be cancelled", lambda: run.record().outcome is Outcome.CANCELLED)
    record = run.over()
    target = local_target(run.stage.cloud.folder)
    _, account = report.account_of(target, run.stage.store, record, run.stage.store.read_stack())
    for amount in (account.money.spent, account.money.on_demand_only, account.money.saved):
        expect(visitor.page.locator(".facts").first).to_contain_text(usd(amount), timeout=90_000)
    visitor.context.close()


def test_the_file_opens_offline(browser: Browser, run: Run, served: Served, tmp_path: Path) -> None:
    target, store = local_target(run.stage.cloud.folder), run.stage.store
    file = tmp_path / "watched.html"
    state = target.state(store)
    report.write(target, store, run.record(), state, file)
    for theme, width in LOOKS:
        visitor = Visitor(browser, None, theme, width)
        visitor.context.set_offline(True)
        visitor.open(file.as_uri(), "svg")
        visitor.told = [line for line in visitor.told if file.as_uri() not in line]
        assert visitor.page.get_by_role("img", name="Machines of the job over time").is_visible()
        assert visitor.too_wide() == 0
        assert visitor.page.evaluate("performance.getEntriesByType('resource').length") == 0
        visitor.context.close()
        assert visitor.told == []
