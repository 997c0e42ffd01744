"""Pages in a real Chromium: every chart downloads as PNG that shows something, and its data as CSV; a search's page.

One browser and one dashboard serve all tests: to start both takes as long as several tests.
"""

from __future__ import annotations

import base64
import csv
import io
import struct
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
from playwright.sync_api import Locator, Page, expect

from spotkeeper.client.space import values_of
from spotkeeper.client.sweep import begin, submit_missing
from spotkeeper.contract.generation import Progress
from spotkeeper.contract.job import JobSpec
from spotkeeper.contract.ledger import Entry, Event
from spotkeeper.contract.market import PriceRun, Prices
from spotkeeper.contract.metrics import object_name
from spotkeeper.contract.parse.typed import load_yaml
from spotkeeper.contract.record import Phase
from spotkeeper.contract.stack import Model
from spotkeeper.contract.sweep import SweepState, TrialReport
from spotkeeper.contract.sweepfile import Cohort, SweepFile, SweepSpec
from spotkeeper.dashboard import charts, sweep_charts
from spotkeeper.reconcile.store.store import Store
from spotkeeper.report.html.jobs import row
from spotkeeper.report.html.style import FILE_STYLE
from spotkeeper.report.sweep import TrialView
from tests.cli.records import JOB, a_job
from tests.contract.samples import STACK
from tests.dashboard.browser import CHROMIUM, WHY_NOT, Visitor, chromium, login
from tests.dashboard.conftest import a_bucket
from tests.dashboard.served import serving
from tests.report.html.test_html import a_view

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason=WHY_NOT)

ZONE = "us-central1-a"
POINTS = 3000  # of a metric: more than a chart draws
CHARTS = {
    "Timeline": ["node", "attempt", "what", "from_s", "to_s", "model", "zone", "usd_per_hour"],
    "Money": ["seconds", "spent_usd", "on_demand_usd"],
    "Throughput": ["step", "steps_a_second"],
    "Loss": ["step", "loss"],
    "val/accuracy": ["step", "val/accuracy"],
}


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


def seed(store: Store) -> None:
    """A job with metrics, and a price."""
    a_job(store)
    where = {"pool": "workers", "zone": ZONE, "model": Model.SPOT, "price": 1.0, "on_demand": 3.0}
    for entry in (
        Entry(at=0.0, id="submitted", event=Event.SUBMITTED, by="ada"),
        Entry(at=0.0, id="i1", event=Event.INTENT, node=0, attempt=1, cause="start", **where),  # type: ignore[arg-type]
        Entry(at=60.0, id="a1", event=Event.ADMITTED, node=0, attempt=1, started=0.0),
        Entry(at=60.0, id="g1", event=Event.GENERATION, gen=2),
    ):
        store.append_ledger(JOB, entry)
    columns = {
        "steps": array("q", range(1, POINTS + 1)),
        "seconds": array("f", range(POINTS)),
        "values": array("d", [-1.0 / (1 + at) for at in range(POINTS)]),
    }
    packed = {name: base64.b64encode(column.tobytes()).decode() for name, column in columns.items()}
    written = {"gen": 2, "ancestors": [], "began": 0.0, "metrics": {"loss": packed, "val/accuracy": packed}}
    store.put(object_name(JOB, 2), msgspec.json.encode(written))
    assert store.cas_prices(Prices("workers", 9.0, 9.0, (PriceRun(0.0, 0.5, ZONE),)), "")


def seed_search(store: Store) -> dict[int, str]:
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


@dataclass(frozen=True)
class Seen:
    """A browser on a dashboard; ``trials``: the jobs of the search."""

    visitor: Visitor
    root: str
    store: Store
    trials: dict[int, str]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    folder = tmp_path_factory.mktemp("dashboard")
    store, environment = a_bucket(folder)
    seed(store)
    trials = seed_search(store)
    with serving(environment, folder) as served, chromium() as browser:
        visitor = Visitor(browser, login(browser, served.url))
        yield Seen(visitor, served.root, store, trials)
        visitor.context.close()


@pytest.fixture
def page(seen: Seen) -> Iterator[tuple[Page, str, Store]]:
    seen.visitor.look("light", 1440)
    yield seen.visitor.page, seen.root, seen.store
    assert seen.visitor.told == []


def image(page: Page, chart: Locator) -> tuple[str, tuple[int, int], int]:
    """Click a chart's PNG; return the file's name, the image's size in pixels, and how many of its pixels are drawn."""
    with page.expect_download() as download:
        chart.get_by_role("button", name="PNG").click()
    data = Path(download.value.path()).read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    drawn = page.evaluate(
        """async data => {
             const image = new Image();
             image.src = 'data:image/png;base64,' + data;
             await image.decode();
             const context = new OffscreenCanvas(image.width, image.height).getContext('2d');
             context.drawImage(image, 0, 0);
             const pixels = new Uint32Array(context.getImageData(0, 0, image.width, image.height).data.buffer);
             return pixels.reduce((found, pixel) => found + (pixel !== pixels[0]), 0);
           }""",
        base64.b64encode(data).decode(),
    )
    return download.value.suggested_filename, struct.unpack(">II", data[16:24]), drawn


def table(page: Page, chart: Locator) -> tuple[str, list[list[str]]]:
    with page.expect_download() as download:
        chart.get_by_role("button", name="CSV").click()
    return download.value.suggested_filename, list(csv.reader(io.StringIO(Path(download.value.path()).read_text())))


def test_every_chart_of_a_job(page: tuple[Page, str, Store]) -> None:
    tab, root, store = page
    store.put_progress(JOB, Progress(gen=2, step=120, at=70.0, loss=2.5, total_steps=400, samples_per_s=50.0))
    tab.goto(f"{root}/jobs/first")
    expect(tab.get_by_role("progressbar", name="first: step 120 of 400")).to_be_visible()
    store.put_progress(JOB, Progress(gen=2, step=130, at=80.0, loss=2.4, total_steps=400, samples_per_s=55.0))
    cards = tab.locator("section.card").filter(has=tab.locator(".chart"))
    expect(cards.locator("canvas:visible")).to_have_count(len(CHARTS))
    assert cards.locator("h2").all_inner_texts() == list(CHARTS)
    rows = {}
    for title, head in CHARTS.items():
        chart = cards.filter(has=tab.get_by_role("heading", name=title, exact=True))
        stem = title.lower().replace("/", "-")
        file, (width, height), drawn = image(tab, chart)
        assert file == f"{stem}.png"
        assert width > 400 and height > 200 and drawn > 1000, title
        file, rows[title] = table(tab, chart)
        assert (file, rows[title][0]) == (f"{stem}.csv", head)
    assert rows["Timeline"][1][:4] == ["0", "1", "boot", "0"] and rows["Timeline"][1][-1] == "1.0"
    assert rows["Throughput"][1] == ["26", "1.0"], "of the whole run, though the page has just been opened"
    assert rows["Throughput"][-1] == ["2976", "1.0"]
    assert rows["Loss"][1] == ["1", "-1.0"] and rows["Loss"][-1][0] == str(POINTS)
    assert float(rows["Money"][-1][2]) > float(rows["Money"][-1][1]) > 0


def test_every_chart_of_the_stack(page: tuple[Page, str, Store]) -> None:
    tab, root, _ = page
    tab.goto(f"{root}/stack")
    chart = tab.locator("section.card").filter(has=tab.locator(".chart"))
    expect(chart.locator("canvas:visible")).to_have_count(1)
    file, _, drawn = image(tab, chart)
    assert file == "spot-prices.png" and drawn > 1000
    assert table(tab, chart) == (
        "spot-prices.csv",
        [
            ["pool and zone", "days_ago", "usd_per_hour"],
            [f"workers {ZONE}", "90.0", "0.5"],
            [f"workers {ZONE}", "0.0", "0.5"],
        ],
    )
    assert STACK.pools[0].name == "workers"
    label = charts.prices([("workers", [(-1.56923003660308, 0.5), (0.0, 0.5)])], dark=False)["xAxis"]["axisLabel"]
    assert tab.evaluate(f"({label[':formatter']})(-1.56923003660308)") == 1.57


def test_the_list_of_jobs_has_no_chart_to_download(page: tuple[Page, str, Store]) -> None:
    tab, root, _ = page
    tab.goto(root)
    tab.wait_for_selector("tbody a")
    assert tab.locator("canvas").count() == 0


def rows_of(page: Page, chart: str) -> list[list[str]]:
    with page.expect_download() as download:
        page.get_by_role("button", name=f"{chart} as CSV").click()
    return list(csv.reader(io.StringIO(download.value.path().read_text("utf-8"))))


def test_the_page_of_a_search(seen: Seen) -> None:
    seen.visitor.look("light", 1440)
    visitor, page = seen.visitor, seen.visitor.page
    visitor.open(seen.root, "text=Searches:")
    page.get_by_role("link", name="lr", exact=True).click()
    table = page.get_by_role("table", name="Trials")
    expect(table.locator("tbody tr")).to_have_count(25)
    first = table.locator("tbody tr").first
    expect(first).to_contain_text("lr-0001")
    expect(first.get_by_role("link")).to_have_attribute("href", f"/jobs/{seen.trials[1]}")
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
    page.wait_for_url(f"{seen.root}/jobs/*")
    visitor.open(f"{seen.root}/sweeps/rl", "text=no such search")
    assert visitor.told == []


@pytest.mark.parametrize(("theme", "width"), [("dark", 1440), ("light", 390)])
def test_the_page_of_a_search_is_accessible_and_fits(seen: Seen, theme: str, width: int) -> None:
    seen.visitor.look(theme, width)
    visitor = seen.visitor
    visitor.open(f"{seen.root}/sweeps/lr", "text=lr-0001")
    dark = visitor.page.evaluate("document.body.classList.contains('body--dark')")
    assert dark is (theme == "dark")
    assert visitor.serious() == [] and visitor.too_wide() == 0 and visitor.told == []
    view = a_view(phase=Phase.RUN, outcome=None, step=39_000, total_steps=40_000, left_s=6600.0)
    visitor.page.goto("about:blank")
    visitor.page.set_content(f"<style>{FILE_STYLE}</style><main class='sk wide'><table class=rows>{row(view)}</table>")
    assert visitor.overflowing() == [], "a row of the list of jobs"


def test_parallel_coordinates_leave_out_what_does_not_apply() -> None:
    space = load_yaml(FILE, SweepFile).space
    row = TrialView(3, "lr-0003", "", {"lr": 1e-3, "optimizer": "adam", "layers": 2}, "training", value=0.5)
    assert sweep_charts._coordinates(row, space) == [1e-3, "adam", None, 2, 0.5]
    axes = [sweep_charts._axis(at, name, one) for at, (name, one) in enumerate(space.items())]
    assert [axis["type"] for axis in axes] == ["log", "category", "value", "value"]
    assert (axes[0]["min"], axes[0]["max"]) == (1e-5, 1e-1) and axes[1]["data"] == ["adam", "sgd"]
