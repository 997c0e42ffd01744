"""The dashboard with 200 jobs in a real Chromium: the first page, an update, and memory with ten tabs open.

The tabs are the pages of five jobs with the most metrics that a job can have, each open twice.
``SPOTKEEPER_BENCH_MINUTES=60`` keeps the ten tabs open for an hour; otherwise two minutes.
"""

from __future__ import annotations

import os
import tempfile
import time
from array import array
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import msgspec

from spotkeeper.contract.generation import Progress
from spotkeeper.contract.ledger import Entry, Event
from spotkeeper.contract.metrics import METRICS, POINTS, object_name
from spotkeeper.contract.stack import Model
from spotkeeper.reconcile.store.store import Store, open_store
from tests.cli.records import a_job
from tests.contract.samples import STACK
from tests.dashboard.browser import CHROMIUM, WHY_NOT, chromium, login
from tests.dashboard.served import Served, serving

JOBS = 200
RECOVERIES = 20  # of each job
UPDATES = 6  # of which one reads all jobs
ROW_S = 10.0
TABS = 10
HEAVY = 5  # jobs with METRICS metrics of POINTS points each
MINUTES = float(os.environ.get("SPOTKEEPER_BENCH_MINUTES", "2"))


def figures() -> list[dict[str, object]]:
    if CHROMIUM is None:
        return [
            figure(name, None, unit, goal, WHY_NOT)
            for name, unit, goal in (
                ("dashboard.first_page_s", "s", 2.0),
                ("dashboard.update_ms_200_jobs", "ms", 200.0),
                ("dashboard.rss_mb", "MB", 250.0),
            )
        ]
    with tempfile.TemporaryDirectory() as folder, running(Path(folder)) as (served, pid):
        first_s, update_ms = seen(served, pid)
        most_mb = tabs(served, pid)
    about = f"{JOBS} jobs of two machines and {RECOVERIES} recoveries, a bucket on disk"
    heavy = f"{TABS} tabs on {HEAVY} jobs with {METRICS} metrics of {POINTS} points"
    return [
        figure("dashboard.first_page_s", first_s, "s", 2.0, f"from the address to the rows, a cold browser; {about}"),
        figure("dashboard.update_ms_200_jobs", update_ms, "ms", 200.0, f"the server's CPU time, one tab; {about}"),
        figure("dashboard.rss_mb", most_mb, "MB", 250.0, f"the most within {MINUTES:g} min of {heavy}; {about}"),
    ]


@contextmanager
def running(folder: Path) -> Iterator[tuple[Served, int]]:
    bucket = f"sqlite://{folder}/bucket.sqlite"
    fill(open_store(bucket))
    mine = {"SPOTKEEPER_STACK": STACK.stack, "SPOTKEEPER_BUCKET": bucket, "SPOTKEEPER_CLOCK": "0:0:1"}
    with serving(mine, folder) as served:
        yield served, served.pid


def fill(store: Store) -> None:
    store.put("stack/pools.json", msgspec.json.encode(STACK))
    where = {"pool": "workers", "zone": STACK.pools[0].zones[0], "model": Model.SPOT, "price": 1.0, "on_demand": 3.0}
    for index in range(JOBS):
        job = f"bench{index:03}"
        a_job(store, job=job, name=f"job-{index}")
        entries = [Entry(at=0.0, id="submitted", event=Event.SUBMITTED, by=f"user{index % 7}")]
        for number in range(1, RECOVERIES + 1):
            at, key = 600.0 * number, {"node": 0, "attempt": number}
            entries += [
                Entry(at=at, id=f"i{number}", event=Event.INTENT, cause="loss", **key, **where),  # type: ignore[arg-type]
                Entry(at=at + 60, id=f"a{number}", event=Event.ADMITTED, started=at, **key),  # type: ignore[arg-type]
                Entry(at=at + 90, id=f"g{number}", event=Event.GENERATION, gen=number, step=number * 100),
                Entry(at=at + 500, id=f"l{number}", event=Event.LOSS, cause="loss", **key),  # type: ignore[arg-type]
                Entry(at=at + 500, id=f"s{number}", event=Event.STOP, cause="loss"),
                Entry(at=at + 510, id=f"x{number}", event=Event.GONE, ended=at + 500, **key),  # type: ignore[arg-type]
            ]
        store.append_all(job, entries)
        if index < HEAVY:
            for gen in (1, 2):
                store.put(object_name(job, gen), many_metrics(index, gen))
        store.put_progress(job, Progress(gen=2, step=2000, at=9e4, loss=2.0, total_steps=4000, samples_per_s=50.0))


def many_metrics(seed: int, gen: int) -> bytes:
    """The second generation resumes after the last point of the first."""
    random, last = Random(seed), POINTS * (gen - 1)  # noqa: S311
    steps = array("q", range(last + 1, last + POINTS + 1))
    columns: dict[str, array[int] | array[float]] = {"steps": steps, "seconds": array("f", steps)}
    metrics = {
        f"metric/{number:02}": columns | {"values": array("d", (random.gauss(2.0, 0.5) for _ in steps))}
        for number in range(METRICS)
    }
    packed = {
        name: {key: b64encode(column.tobytes()).decode() for key, column in of.items()} for name, of in metrics.items()
    }
    return msgspec.json.encode({"gen": gen, "ancestors": [(1, last)][: gen - 1], "began": 0.0, "metrics": packed})


def seen(served: Served, pid: int) -> tuple[float, float]:
    """Seconds to the first page in a cold browser, and milliseconds of the server's CPU time for each update."""
    with chromium() as browser:
        page = browser.new_page()
        began = time.perf_counter()
        page.goto(served.url)
        page.wait_for_selector("tbody a")
        first_s = time.perf_counter() - began
        page.wait_for_timeout(1000 * ROW_S)
        before = cpu_s(pid)
        page.wait_for_timeout(1000 * ROW_S * UPDATES)
        return first_s, 1000 * (cpu_s(pid) - before) / UPDATES


def tabs(served: Served, pid: int) -> float:
    """The most MB that the server has in memory while ten tabs are open, each on the page of a heavy job."""
    most = 0.0
    with chromium() as browser:
        context = browser.new_context(storage_state=login(browser, served.next_url()))
        for number in range(TABS):
            page = context.new_page()
            page.goto(f"{served.root}/jobs/bench{number % HEAVY:03}")
            page.wait_for_selector("canvas")
        ends = time.monotonic() + 60 * MINUTES
        while time.monotonic() < ends:
            page.wait_for_timeout(5000)
            most = max(most, rss_mb(pid))
    return most


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rss_mb(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def figure(name: str, value: float | None, unit: str, goal: float, against: str) -> dict[str, object]:
    return {
        "name": name,
        "value": None if value is None else round(value, 2 if unit == "s" else 0),
        "unit": unit,
        "goal": f"<= {goal:g}",
        "holds": None if value is None else value <= goal,
        "against": against,
    }
