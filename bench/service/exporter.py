"""Duration of a scrape of 200 jobs, as Prometheus sees it."""

from __future__ import annotations

import gzip
import statistics
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from spotkeeper.client.target import Target
from spotkeeper.clock import Clock
from spotkeeper.contract.generation import Progress
from spotkeeper.contract.ledger import Entry, Event
from spotkeeper.contract.record import Node
from spotkeeper.exporter import server
from spotkeeper.exporter.reading import StackReader
from spotkeeper.reconcile.store.store import Store, open_store
from tests.cli.records import a_job, slot
from tests.contract.samples import STACK, ZONES

JOBS = 200
NODES = 4
RECOVERIES = 10
RUNS = 20
T = TypeVar("T")


def figures() -> list[dict[str, object]]:
    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite://{folder}/bucket.sqlite"
        fill(open_store(url))
        reader = StackReader(Target(STACK.stack, url, Clock(), Path(folder)))
        first_s, reading = timed(reader.read)
        again_s, reading = timed(reader.read)
    pages = server.Pages()
    render_s, _ = timed(lambda: pages.show(reading))
    http = server.serve("127.0.0.1", 0, pages)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    took = [timed(lambda: scrape(http.server_address[1]))[0] for _ in range(RUNS)]
    http.shutdown()
    http.server_close()
    value, goal = round(1000.0 * statistics.median(took), 1), 200.0
    against = (
        f"median of {RUNS} scrapes as OpenMetrics, worst {1000 * max(took):.0f} ms; beforehand, for each reading: "
        f"{1000 * render_s:.0f} ms to render both formats, {again_s:.1f} s to read the bucket (first {first_s:.1f} s)"
    )
    name, holds = "exporter.scrape_ms_200_jobs", value <= goal
    return [{"name": name, "value": value, "unit": "ms", "goal": f"<= {goal:g}", "holds": holds, "against": against}]


def timed(call: Callable[[], T]) -> tuple[float, T]:
    began = time.perf_counter()
    done = call()
    return time.perf_counter() - began, done


def scrape(port: int) -> bytes:
    headers = {"Accept": server.USUAL[0], "Accept-Encoding": "gzip"}
    with urllib.request.urlopen(urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers=headers)) as answer:
        return gzip.decompress(answer.read())


def fill(store: Store) -> None:
    """Two hundred jobs of four machines, each of which has been replaced some times."""
    store.put("stack/pools.json", msgspec.json.encode(STACK))
    nodes = tuple(Node(cur=slot(attempt=RECOVERIES)) for _ in range(NODES))
    for index in range(JOBS):
        job = f"bench{index:03}"
        a_job(store, job=job, name=f"job-{index}", nodes=nodes, members=tuple(range(NODES)), gen=RECOVERIES + 1)
        store.append_all(job, story())
        told = Progress(RECOVERIES + 1, 500, 9000.0, 100.0, 0.5, 2.5, RECOVERIES, 480, total_steps=9000)
        store.put_progress(job, told)


def story() -> tuple[Entry, ...]:
    where = {"pool": "workers", "zone": ZONES[0], "model": "spot", "price": 1.0}
    base = msgspec.convert(where | {"at": 0.0, "id": "", "event": "intent"}, Entry)
    out = [Entry(0.0, "submitted.job", Event.SUBMITTED, by="ada")]
    for number in range(1, RECOVERIES + 1):
        at = 800.0 * number
        for node in range(NODES if number == 1 else 1):
            one = replace(base, at=at, id=f"intent.r{node}.a{number}", node=node, attempt=number, cause="notice")
            up = {"at": at + 60, "id": f"admitted.r{node}.a{number}", "event": Event.ADMITTED, "started": at + 20}
            out += [one, replace(one, **up)]
        out.append(Entry(at + 70, f"generation.g{number}", Event.GENERATION, gen=number, step=10 * number, again=0))
        out.append(Entry(at + 90, f"first.g{number}", Event.FIRST, gen=number))
        if number < RECOVERIES:
            out.append(Entry(at + 790, f"notice.{number}", Event.NOTICE, gen=number, node=0, attempt=number))
            out.append(Entry(at + 795, f"stop.g{number}", Event.STOP, gen=number, cause="notice"))
    return tuple(out)
