"""The page of a search in a real Chromium: table, curves, parallel coordinates, downloads."""

from __future__ import annotations

import base64
import csv
import io
from array import array
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from playwright.sync_api import Browser, Page, expect

from spotkeeper.client.space import values_of
from spotkeeper.client.sweep import begin, submit_missing
from spotkeeper.contract.job import JobSpec
from spotkeeper.contract.metrics import object_name
from spotkeeper.contract.parse.typed import load_yaml
from spotkeeper.contract.record import Phase
from spotkeeper.contract.sweep import SweepState, TrialReport
from spotkeeper.contract.sweepfile import Cohort, SweepFile, SweepSpec
from spotkeeper.dashboard import sweep_charts
from spotkeeper.reconcile.store.store import Store
from spotkeeper.report.html.jobs import row
from spotkeeper.report.html.style import FILE_STYLE
from spotkeeper.report.sweep import TrialView
from tests.dashboard.browser import CHROMIUM, WHY_NOT, Visitor, chromium, login
from tests.dashboard.conftest import a_bucket
from tests.dashboard.served import Served, serving
from tests.dashboard.test_downloads import image
from tests.report.html.test_html import a_view

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason=WHY_NOT)

TRIALS = 30
FILE = """
name: lr
job: ""
space:
  lr: {loguniform: [1e-5, 1e-1]}
  optimizer: {choice: [adam, sgd]}
  momentum: {uniform: [0, 1], when: {optimizer: sgd}}
  layers: {int: [1, 8]}
trials: 30
metric: val/loss
goal: min
stop: {halving: {min: 10, max: 90}}
"""


def seed(store: Store) -> dict[int, str]:
    """A search whose trials have reported step 10; trial n has the value n/10, but trial 0 has none."""
    file = load_yaml(FILE, SweepFile)
    spec = SweepSpec(file, JobSpec("x", ("/opt/train.py",)), 4, "nonce", 0.0)
    sweep = begin(store, spec, None, Cohort(0, values_of(file, 0, 0, TRIALS), 0))
    jobs = dict(submit_missing(store, sweep, None, 0.0, "ada", lambda _: None))
    for number, job in jobs.items():
        steps = range(1, 11)
        columns = {
            "steps": array("q", steps),
            "seconds": array("f", range(10)),
            "values": array("d", [number / step for step in steps]),
        }
        packed = {name: base64.b64encode(column.tobytes()).decode() for name, column in columns.items()}
        written = {"gen": 1, "ancestors": [], "began": 0.0, "metrics": {"val/loss": packed}}
        store.put(object_name(job, 1), msgspec.json.encode(written))
    reports = tuple(TrialReport(number, (number / 10 or None,)) for number in jobs)
    assert store.cas_sweep(SweepState("lr", 1, "n", reports), "")
    return jobs


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Browser, Any, Served, dict[int, str]]]:
    folder = tmp_path_factory.mktemp("dashboard")
    store, environment = a_bucket(folder)
    jobs = seed(store)
    with serving(environment, folder) as served, chromium() as browser:
        yield browser, login(browser, served.url), served, jobs


def rows_of(page: Page, chart: str) -> list[list[str]]:
    with page.expect_download() as download:
        page.get_by_role("button", name=f"{chart} as CSV").click()
    return list(csv.reader(io.StringIO(download.value.path().read_text("utf-8"))))


def test_the_page_of_a_search(seen: tuple[Browser, Any, Served, dict[int, str]]) -> None:
    browser, state, served, jobs = seen
    visitor = Visitor(browser, state)
    page = visitor.page
    visitor.open(served.root, "text=Searches:")
    page.get_by_role("link", name="lr", exact=True).click()
    table = page.get_by_role("table", name="Trials")
    expect(table.locator("tbody tr")).to_have_count(25)
    first = table.locator("tbody tr").first
    expect(first).to_contain_text("lr-0001")
    expect(first.get_by_role("link")).to_have_attribute("href", f"/jobs/{jobs[1]}")
    expect(page.get_by_role("table", name="Comparisons")).to_contain_text("0.1000")
    expect(page.get_by_text("Best: lr-0001: lr ")).to_be_visible()
    cards = page.locator("section.card").filter(has=page.locator(".chart"))
    expect(cards.locator("canvas:visible")).to_have_count(2)
    for title in ("Curves", "Parameters"):
        chart = cards.filter(has=page.get_by_role("heading", name=title, exact=True))
        file, (width, height), drawn = image(page, chart)
        assert file == f"{title.lower()}.png" and width > 400 and height > 200 and drawn > 5000, title
    head, *lines = rows_of(page, "Curves")
    assert head == ["trial", "step", "val/loss"] and len(lines) == TRIALS * 10
    assert lines[9] == ["lr-0001", "10", "0.1"]
    head, *lines = rows_of(page, "Parameters")
    assert head == ["trial", "lr", "optimizer", "momentum", "layers", "val/loss"] and len(lines) == TRIALS - 1
    page.get_by_role("button", name="Next").click()
    expect(table.locator("tbody tr")).to_have_count(TRIALS - 25)
    expect(table).to_contain_text("lr-0000")
    first.get_by_role("link").click()
    page.wait_for_url(f"{served.root}/jobs/*")
    assert visitor.told == []
    visitor.context.close()


@pytest.mark.parametrize(("theme", "width"), [("dark", 1440), ("light", 390)])
def test_the_page_is_accessible_and_fits(
    seen: tuple[Browser, Any, Served, dict[int, str]], theme: str, width: int
) -> None:
    browser, state, served, _ = seen
    visitor = Visitor(browser, state, theme, width)
    visitor.open(f"{served.root}/sweeps/lr", "text=lr-0001")
    assert visitor.serious() == [] and visitor.too_wide() == 0 and visitor.told == []
    visitor.open(f"{served.root}/sweeps/rl", "text=no such search")
    view = a_view(phase=Phase.RUN, outcome=None, step=39_000, total_steps=40_000, left_s=6600.0)
    visitor.page.set_content(f"<style>{FILE_STYLE}</style><main class='sk wide'><table class=rows>{row(view)}</table>")
    assert visitor.overflowing() == [], "a row of the list of jobs"
    visitor.context.close()


def test_parallel_coordinates_leave_out_what_does_not_apply() -> None:
    space = load_yaml(FILE, SweepFile).space
    row = TrialView(3, "lr-0003", "", {"lr": 1e-3, "optimizer": "adam", "layers": 2}, "training", value=0.5)
    assert sweep_charts._coordinates(row, space) == [1e-3, "adam", None, 2, 0.5]
    axes = [sweep_charts._axis(at, name, one) for at, (name, one) in enumerate(space.items())]
    assert [axis["type"] for axis in axes] == ["log", "category", "value", "value"]
    assert (axes[0]["min"], axes[0]["max"]) == (1e-5, 1e-1) and axes[1]["data"] == ["adam", "sgd"]
