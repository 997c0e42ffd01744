"""Every chart of every page downloads in a real Chromium: as PNG that shows something, and its data as CSV."""

from __future__ import annotations

import base64
import csv
import io
import struct
from array import array
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from playwright.sync_api import Locator, Page, expect

from spotkeeper.contract.generation import Progress
from spotkeeper.contract.ledger import Entry, Event
from spotkeeper.contract.market import PriceRun, Prices
from spotkeeper.contract.metrics import object_name
from spotkeeper.contract.stack import Model
from spotkeeper.dashboard import charts
from spotkeeper.reconcile.store.store import Store
from tests.cli.records import JOB, a_job
from tests.contract.samples import STACK
from tests.dashboard.browser import CHROMIUM, WHY_NOT, Visitor, chromium, login
from tests.dashboard.conftest import a_bucket
from tests.dashboard.served import serving

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


def seed(store: Store) -> None:
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


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Page, str, Store]]:
    folder = tmp_path_factory.mktemp("dashboard")
    store, environment = a_bucket(folder)
    seed(store)
    with serving(environment, folder) as served, chromium() as browser:
        visitor = Visitor(browser, login(browser, served.url))
        yield visitor.page, served.root, store
        visitor.context.close()
        assert visitor.told == []


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
