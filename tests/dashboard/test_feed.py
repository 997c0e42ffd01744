"""What is read, and how often: by what the open pages show, and nothing while none is visible."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
from msgspec.structs import replace

from spotkeeper.client import lookup
from spotkeeper.client.target import Target
from spotkeeper.clock import Clock
from spotkeeper.contract.generation import Progress
from spotkeeper.contract.ledger import Entry, Event
from spotkeeper.contract.record import Phase, Record
from spotkeeper.dashboard.curves import (
    DRAWN_POINTS,
    FIRST_CHARTS,
    FRESH_S,
    IDLE_S,
    KEPT,
    MOST_METRICS,
    drawn,
    reader_of,
)
from spotkeeper.dashboard.feed import BATCH, ROW_S, JobFeed, Viewer
from spotkeeper.reconcile.store import paths
from spotkeeper.reconcile.store.store import Store
from spotkeeper.report.job.view import JobView
from tests.cli.jobs.test_metrics import put, reads_of_metrics
from tests.cli.records import JOB, a_job
from tests.dashboard.conftest import complete

Bucket = tuple[Store, dict[str, str]]
OTHER = "bbbbbbbb"


class Ticks:
    at = 0.0

    def __call__(self) -> float:
        return self.at


@pytest.fixture
def ticks() -> Ticks:
    return Ticks()


@pytest.fixture
def feed(bucket: Bucket, ticks: Ticks) -> JobFeed:
    store, environment = bucket
    a_job(store)
    a_job(store, job=OTHER, name="second")
    store.append_ledger(JOB, Entry(at=0.0, id="submitted", event=Event.SUBMITTED, by="ada"))
    return JobFeed(Target("prod", environment["SPOTKEEPER_BUCKET"], Clock(0.0, 0.0, 1.0)), ticks)


def rounds(feed: JobFeed, ticks: Ticks, seconds: int) -> dict[str, int]:
    """How often each job was read within so many seconds, a round each second."""
    counts: dict[str, int] = {}
    for _ in range(seconds):
        before = {job: known.read_at for job, known in feed.jobs.items()}
        feed.round()
        for job, known in feed.jobs.items():
            counts[job] = counts.get(job, 0) + (before.get(job) != known.read_at)
        ticks.at += 1.0
    return counts


def test_the_open_job_is_read_every_2_s_a_row_every_10_and_others_once_a_minute(feed: JobFeed, ticks: Ticks) -> None:
    feed.add(Viewer(lambda: None))
    assert rounds(feed, ticks, 60) == {JOB: 1, OTHER: 1}
    feed.add(Viewer(lambda: None, rows=frozenset({OTHER})))
    assert rounds(feed, ticks, 60) == {JOB: 1, OTHER: 6}
    feed.add(Viewer(lambda: None, job=JOB))
    assert rounds(feed, ticks, 60) == {JOB: 30, OTHER: 6}


@pytest.mark.parametrize("ended", [False, True])
def test_a_job_that_ends_while_nobody_looks_is_read_once_more(
    feed: JobFeed, ticks: Ticks, bucket: Bucket, ended: bool
) -> None:
    """It was listed as training for ever, and one submitted meanwhile never came under the ended jobs."""
    store, early, late = bucket[0], "cccccccc", "dddddddd"

    def end(job: str) -> None:
        store.delete(paths.active(job))
        store.put(paths.tomb(job), b"")

    a_job(store, job=early, name="early", phase=Phase.DONE)
    end(early)
    watch = Viewer(lambda: None, ended=ended)
    feed.add(watch)
    assert rounds(feed, ticks, 60) == {JOB: 1, OTHER: 1, **({early: 1} if ended else {})}
    watch.hidden = True
    read = store.read_record(OTHER)
    assert read is not None
    assert store.cas_record(replace(read.value, phase=Phase.DONE, ver=read.value.ver + 1), read.token)
    a_job(store, job=late, name="late", phase=Phase.DONE)
    end(OTHER)
    end(late)
    ticks.at += 300.0
    watch.hidden = False
    shown = {JOB: 1, OTHER: 1, **({early: 0, late: 1} if ended else {})}
    assert rounds(feed, ticks, 60) == shown
    assert [job for job, known in feed.jobs.items() if not known.settled] == [JOB]
    assert rounds(feed, ticks, 120) == {job: 2 * (job == JOB) for job in shown}


def test_nothing_is_read_for_hidden_pages(feed: JobFeed, ticks: Ticks) -> None:
    viewer = Viewer(lambda: None, job=JOB, hidden=True)
    feed.add(viewer)
    assert feed.looking() == []

    async def watched() -> int:
        task = asyncio.create_task(feed.run())
        for _ in range(20):
            await asyncio.sleep(0)
        reads = feed.meter.hour().reads
        viewer.hidden = False
        shown = asyncio.Event()
        viewer.show = shown.set
        feed.wake()
        await asyncio.wait_for(shown.wait(), 20)
        task.cancel()
        return reads

    assert complete(watched()) == 0
    assert JOB in feed.jobs


def test_a_ledger_is_listed_again_only_after_its_record_changed(feed: JobFeed, ticks: Ticks, bucket: Bucket) -> None:
    store = bucket[0]
    feed.add(Viewer(lambda: None, job=JOB, lists=False))
    feed.round()
    listed = feed.jobs[JOB].listed_at
    store.append_ledger(JOB, Entry(at=5.0, id="crash", event=Event.CRASH))
    store.put_progress(JOB, Progress(gen=2, step=7, at=0.0, loss=1.5, samples_per_s=3.0))
    ticks.at += 2
    feed.round()
    known = feed.jobs[JOB]
    assert (known.listed_at, known.view.step, known.view.user) == (listed, 7, "ada")
    read = store.read_record(JOB)
    assert read is not None
    assert store.cas_record(replace(read.value, ver=1, nonce="m"), read.token)
    ticks.at += 2
    feed.round()
    assert feed.jobs[JOB].listed_at == ticks.at
    assert Event.CRASH in {entry.event for entry in feed.jobs[JOB].ledger}
    assert list(known.samples) == [(7, 1.5, 3.0)]


def test_the_small_charts_of_rows_begin_with_the_history_in_the_bucket_which_is_read_once(
    feed: JobFeed, ticks: Ticks, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = bucket[0]
    put(store, 1, [], loss={1: 9.0, 2: 8.0, 3: 99.0})
    put(store, 2, [(1, 2)], loss={3: 7.0, 4: 6.0})
    put(store, 3, [(1, 2), (2, 4)], loss={5: 5.0, 7: math.nan})
    store.put_progress(JOB, Progress(gen=2, step=6, at=0.0, loss=4.5, samples_per_s=30.0, step_s=0.5))
    read = reads_of_metrics(monkeypatch)
    watch = Viewer(lambda: None)
    feed.add(watch)
    feed.round()
    assert read == [] and list(feed.jobs[JOB].samples) == [(6, 4.5, 30.0)], "no row shows it"
    watch.charts = frozenset({JOB, OTHER})
    feed.round()
    samples = list(feed.jobs[JOB].samples)
    assert [(step, loss) for step, loss, _ in samples if loss is not None] == [(3, 7.0), (4, 6.0), (5, 5.0), (6, 4.5)]
    assert [(step, speed) for step, _, speed in samples if speed is not None] == [(4, 15.0), (5, 15.0), (6, 30.0)]
    assert sorted(read) == ["2", "3"], "two generations"
    ticks.at += 600
    feed.round()
    assert len(read) == 2 and list(feed.jobs[JOB].samples) == samples
    store.put_progress(JOB, Progress(gen=2, step=5, at=0.0, loss=5.5))
    ticks.at += 600
    feed.round()
    steps = [step for step, _, _ in feed.jobs[JOB].samples]
    assert steps == [3, 4, 4, 5], "step 6 was lost and is trained again"


def test_the_history_of_the_first_rows_is_shown_at_once(feed: JobFeed, bucket: Bucket) -> None:
    put(bucket[0], 1, [], loss={1: 9.0, 2: 8.0, 3: 7.0})
    bucket[0].put_progress(JOB, Progress(gen=1, step=3, at=0.0, loss=7.0))

    async def shown_twice() -> None:
        twice, shows = asyncio.Event(), []

        def show() -> None:
            viewer.charts = frozenset(feed.jobs)
            shows.append(len(feed.jobs[JOB].samples))
            if len(shows) == 2:
                twice.set()

        viewer = Viewer(show)
        feed.add(viewer)
        task = asyncio.create_task(feed.run())
        await asyncio.wait_for(twice.wait(), ROW_S / 2)
        task.cancel()
        assert shows == [1, 3]

    complete(shown_twice())


def test_the_end_of_a_deleted_machine_appears_though_no_record_tells_of_it(
    feed: JobFeed, ticks: Ticks, bucket: Bucket
) -> None:
    store = bucket[0]
    for node, attempt in ((0, 1), (1, 1), (1, 2)):  # the record has dropped node 1's first machine
        key = f"r{node}.a{attempt}"
        store.append_ledger(JOB, Entry(at=1.0, id=f"intent.{key}", event=Event.INTENT, node=node, attempt=attempt))
    store.append_ledger(JOB, Entry(at=2.0, id="first.g2", event=Event.FIRST, gen=2))
    feed.add(Viewer(lambda: None, job=JOB, lists=False))
    rounds(feed, ticks, 5)
    store.append_ledger(JOB, Entry(at=9.0, id="gone.r1.a1", event=Event.GONE, node=1, attempt=1))
    rounds(feed, ticks, 10)
    known = feed.jobs[JOB]
    assert Event.GONE in {entry.event for entry in known.ledger}
    rounds(feed, ticks, 60)
    assert feed.jobs[JOB].listed_at == known.listed_at  # nothing is due any more


def test_a_generations_first_step_appears_though_no_record_tells_of_it(
    feed: JobFeed, ticks: Ticks, bucket: Bucket
) -> None:
    read = bucket[0].read_record(JOB)
    assert read is not None
    assert bucket[0].cas_record(replace(read.value, ver=1, nonce="m", gen_since=feed.now()), read.token)
    feed.add(Viewer(lambda: None, job=JOB, lists=False))
    rounds(feed, ticks, 5)
    bucket[0].append_ledger(JOB, Entry(at=9.0, id="first.g2", event=Event.FIRST, gen=2))
    rounds(feed, ticks, 10)
    assert Event.FIRST in {entry.event for entry in feed.jobs[JOB].ledger}


def test_a_bucket_that_fails_is_said_and_tried_again(feed: JobFeed, bucket: Bucket) -> None:
    store = bucket[0]
    stack = store.get("stack/pools.json")
    assert stack is not None
    store.delete("stack/pools.json")
    feed.add(Viewer(lambda: None))
    feed.round()
    assert "contains no stack" in feed.trouble
    store.put("stack/pools.json", stack)
    feed.round()
    assert feed.trouble == "" and set(feed.jobs) == {JOB, OTHER}


def test_an_unreadable_job_is_told_beside_the_others(feed: JobFeed, bucket: Bucket) -> None:
    bucket[0].put(f"jobs/{OTHER}/rec", b"{")
    feed.add(Viewer(lambda: None))
    feed.round()
    assert set(feed.jobs) == {JOB} and OTHER in feed.unreadable


def test_a_job_is_found_by_name_and_id(feed: JobFeed) -> None:
    assert feed.find("second") == OTHER and feed.find(JOB) == JOB and feed.find("third") == ""


def test_many_jobs_are_read_in_batches(feed: JobFeed, ticks: Ticks, bucket: Bucket) -> None:
    for number in range(BATCH):
        a_job(bucket[0], job=f"many{number:04}", name=f"many-{number}")
    feed.add(Viewer(lambda: None, job=JOB))
    feed.round()
    assert len(feed.jobs) == BATCH and JOB in feed.jobs, "the open job comes first"
    feed.round()
    assert len(feed.jobs) == BATCH + 2


def test_one_job_that_cannot_be_shown_stops_no_other(
    feed: JobFeed, ticks: Ticks, monkeypatch: pytest.MonkeyPatch
) -> None:
    view_of = lookup.view_of

    def view(store: Store, record: Record, *rest: Any) -> JobView:
        if record.job == JOB:
            raise ValueError("absurd")
        return view_of(store, record, *rest)

    monkeypatch.setattr(lookup, "view_of", view)
    feed.add(Viewer(lambda: None))
    feed.round()
    assert (set(feed.jobs), feed.trouble, feed.unreadable) == ({OTHER}, "", {JOB: "unexpected: ValueError"})


def test_an_unexpected_error_is_said_and_ends_no_updates(feed: JobFeed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "prices_of", lambda *_: 1 // 0)
    feed.add(Viewer(lambda: None))
    feed.round()
    assert feed.trouble == "unexpected: ZeroDivisionError"


def test_all_pages_of_a_job_share_its_metrics_which_are_forgotten_with_the_last_one(
    feed: JobFeed, ticks: Ticks, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, read = bucket[0], reads_of_metrics(monkeypatch)
    put(store, 1, [], loss={1: 2.0, 2: float("nan"), 3: 1.0, 4: 9.0})
    put(store, 2, [(1, 3)], loss={4: 0.5}, acc={4: 0.9})
    pages = [Viewer(lambda: None, job=JOB) for _ in range(2)]
    for page in pages:
        feed.add(page)

    async def story() -> None:
        first, second = await asyncio.gather(feed.curves(JOB), feed.curves(JOB))
        assert first is second and sorted(read) == ["1", "2"]
        assert first.metrics == {"loss": [(1, 2.0), (3, 1.0), (4, 0.5)]} and first.few == ("acc",)
        ticks.at += FRESH_S
        assert await feed.curves(JOB) is first, "pages hold these points, and nothing is new"
        assert read[2:] == ["2"], "generation 1 has ended and is known"
        feed.remove(pages[0])
        assert await feed.curves(JOB) and len(read) == 3
        record = store.read_record(JOB)
        assert record is not None
        assert store.cas_record(replace(record.value, phase=Phase.HOLD, ver=record.value.ver + 1), record.token)
        await asyncio.to_thread(feed.round)
        ticks.at += FRESH_S
        assert await feed.curves(JOB) is first and len(read) == 3, "it does not train, and nothing was new"
        ticks.at += IDLE_S
        assert await feed.curves(JOB) is first and len(read) == 4
        feed.remove(pages[1])
        feed.add(Viewer(lambda: None, job=JOB))
        await feed.curves(JOB)
        assert sorted(read[4:]) == ["1", "2"]

    complete(story())


def test_the_metrics_of_few_jobs_are_kept_those_read_last(
    feed: JobFeed, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(bucket[0], 1, [], loss={1: 2.0})
    read = reads_of_metrics(monkeypatch)
    others = [f"many{number:04}" for number in range(KEPT)]
    for job in (JOB, *others):
        feed.add(Viewer(lambda: None, job=job))

    async def story() -> None:
        for job in (JOB, *others[1:], JOB, others[0]):
            await feed.curves(job)
        assert read == ["1"]
        for job in (*others, JOB):
            await feed.curves(job)
        assert read == ["1", "1"]

    complete(story())


def test_curves_are_those_of_the_charts_of_a_page(feed: JobFeed, bucket: Bucket) -> None:
    curves = {f"m{number:02}": {step: float(step) for step in range(1, 4001)} for number in range(63)}
    put(bucket[0], 1, [], loss={1: 2.0}, **curves)
    feed.add(Viewer(lambda: None, job=JOB))
    found = complete(feed.curves(JOB))
    every = found.metrics | found.unpacked
    assert list(every) == ["loss", *curves] and len(every) == MOST_METRICS
    assert len(found.metrics) == FIRST_CHARTS, "the memory of the others is that of their columns"
    assert found.few == found.more == ()
    assert max(map(len, every.values())) <= 1001 and found.pace
    assert every["m62"] == every["m00"] and every["m00"][:2] == [(1, 1.0), (8, 8.0)]


def test_metrics_with_few_values_take_no_chart(bucket: Bucket) -> None:
    few = {f"a{number:02}": {1: 1.0, 2: math.nan} for number in range(30)}
    full = {f"z{number:02}": {1: 1.0, 2: 2.0} for number in range(30)}
    put(bucket[0], 1, [], **few, **full)
    found = drawn(reader_of(bucket[0], JOB))
    assert [*found.metrics, *found.packed] == sorted(full) and found.few == tuple(sorted(few))
    put(bucket[0], 2, [(1, 2)], **{f"b{number:02}": {3: 1.0, 4: 2.0} for number in range(64)})
    found = drawn(reader_of(bucket[0], JOB))
    assert len(found.metrics) + len(found.packed) == MOST_METRICS - 1 and found.more, "the loss keeps its place"


def test_of_ended_generations_only_what_charts_draw_stays_in_memory(bucket: Bucket) -> None:
    curve = {step: float(step % 1000) for step in range(1, 4001)}
    put(bucket[0], 1, [], loss=curve)
    put(bucket[0], 2, [(1, 4000)], loss={4001: 5.0, 4002: -1.0})
    reader = reader_of(bucket[0], JOB)
    found = drawn(reader)
    ended, newest = reader.read()
    assert len(ended.metrics["loss"].steps) <= DRAWN_POINTS and len(newest.metrics["loss"].steps) == 2
    points = found.metrics["loss"]
    assert (999, 999.0) in points and (1000, 0.0) in points and points[-1] == (4002, -1.0), "extremes stay"
