"""The pages without a browser: what a simulated user sees and does."""

from __future__ import annotations

import asyncio
import base64
import gc
import sys
import time
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from operator import is_
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import pytest
from msgspec.structs import replace

from spotkeeper.cli.jobs.dashboard import commands
from spotkeeper.client.errors import CliError
from spotkeeper.client.target import Target
from spotkeeper.clock import Clock
from spotkeeper.contract.allocation import Allocation, Claim, Grant, Stop
from spotkeeper.contract.generation import Progress
from spotkeeper.contract.job import JobSpec, RequestKind
from spotkeeper.contract.ledger import Entry, Event
from spotkeeper.contract.metrics import object_name
from spotkeeper.contract.record import Hold, Phase, Record
from spotkeeper.contract.stack import Model
from spotkeeper.contract.uploads import chunk_name
from spotkeeper.dashboard import feed as feeding
from spotkeeper.dashboard import log_panel
from spotkeeper.dashboard.curves import FIRST_CHARTS, thinned
from spotkeeper.dashboard.feed import JobFeed, KnownJob
from spotkeeper.reconcile.store.store import Store
from spotkeeper.report.job.view import job_view
from spotkeeper_agent.launcher.spool import packed
from tests.cli.records import JOB, a_job
from tests.dashboard.conftest import complete

if TYPE_CHECKING:  # NiceGUI is imported where it runs: every process that runs tests collects this file
    from nicegui import ui
    from nicegui.testing import User

Bucket = tuple[Store, dict[str, str]]
Kind = TypeVar("Kind")
Story = Callable[["User"], Awaitable[None]]
WHERE = {"pool": "workers", "zone": "us-central1-a", "model": Model.SPOT, "price": 1.0}
LEDGER = (
    Entry(at=0.0, id="submitted", event=Event.SUBMITTED, by="ada"),
    Entry(at=0.0, id="i1", event=Event.INTENT, node=0, attempt=1, cause="start", **WHERE),
    Entry(at=60.0, id="a1", event=Event.ADMITTED, node=0, attempt=1, started=0.0),
    Entry(at=60.0, id="g1", event=Event.GENERATION, gen=1),
)


@pytest.fixture
def play(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Run a story of a user with the pages of this bucket."""
    from nicegui import background_tasks
    from nicegui.testing.user_simulation import user_simulation

    from spotkeeper.dashboard import pages

    store, environment = bucket
    monkeypatch.setattr(feeding, "OPEN_S", 0.05)
    monkeypatch.setattr(feeding, "ROW_S", 0.05)
    target = Target("prod", environment["SPOTKEEPER_BUCKET"], Clock.from_env(), function_url="http://127.0.0.1:9")
    monkeypatch.setenv("SPOTKEEPER_TOKEN", "none")

    @asynccontextmanager
    async def simulated(read_only: bool) -> AsyncIterator[User]:
        async with user_simulation() as user:
            feed = JobFeed(target)
            pages.register(feed, commands(target, store, read_only=read_only))
            task = background_tasks.create(feed.run())
            try:
                yield user
            finally:
                while not task.done():  # Python 3.11's wait_for can swallow a cancellation that meets its event
                    task.cancel()
                    await asyncio.sleep(0.01)

    def run(story: Story, *, read_only: bool = False) -> None:
        async def whole() -> None:
            async with simulated(read_only) as user:
                await story(user)

        modules = dict(sys.modules)
        gc.freeze()  # NiceGUI collects garbage five times, which takes a second with all that the tests have imported
        try:
            complete(whole())
        finally:
            sys.modules.update(modules)  # NiceGUI removes those with pages, and their parents

    return run


def seeded(store: Store) -> None:
    a_job(store)
    for entry in LEDGER:
        store.append_ledger(JOB, entry)
    store.put_spec(JOB, JobSpec(name="first", command=("train.py",)))
    store.put_progress(JOB, Progress(gen=2, step=120, at=70.0, loss=2.5, total_steps=400, image_steps=1))


async def until(look: Callable[[], object]) -> None:
    """Wait for something that a round of reads or a background task brings."""
    async with asyncio.timeout(20):
        while not look():
            await asyncio.sleep(0.02)


def text(user: User) -> str:
    """All markup on the page."""
    from nicegui import ui

    with user:
        return " ".join(element.content for element in _elements(user, ui.html))


def open_tab(user: User, name: str) -> None:
    from nicegui import ui

    user.find(kind=ui.tab, content=name).click()


def _elements(user: User, kind: type[Kind]) -> list[Kind]:
    client = user.current_layout.client
    return [element for element in client.elements.values() if isinstance(element, kind)]


def test_the_list_shows_filters_and_searches_jobs(bucket: Bucket, play: Callable[..., None]) -> None:
    seeded(bucket[0])
    a_job(bucket[0], job="bbbbbbbb", name="second", phase=Phase.HOLD, hold=Hold.PAUSE, reason="paused by ada")

    async def story(user: User) -> None:
        await user.open("/")
        await until(lambda: "first" in text(user) and "second" in text(user))
        assert "step 120 of 400" in text(user) and "30 %" in text(user) and "2.5000" in text(user)
        user.find("Search").type("ada first")
        await until(lambda: "second" not in text(user))
        assert "/jobs/abcdefgh" in text(user)
        user.find("Search").clear()
        await until(lambda: "second" in text(user))

    play(story)


def test_the_page_of_a_job(bucket: Bucket, play: Callable[..., None]) -> None:
    seeded(bucket[0])

    async def story(user: User) -> None:
        await user.open("/jobs/first")
        await until(lambda: "Every machine and what it cost" in text(user))
        assert "sk-prod-abcdefgh-n0000-a1" in text(user) and ">by ada<" in text(user)
        assert "an image every step costs 0.00 % of the time" in text(user)
        for name, shown in (
            ("Checkpoints", "No checkpoint is known"),
            ("Job file", "- train.py"),
            ("Logs", "no lines in the last hour; older ones: Last, all"),
        ):
            open_tab(user, name)
            await until(lambda shown=shown: shown in text(user))

    play(story)


def test_named_metrics_are_charts_with_the_recoveries_marked(bucket: Bucket, play: Callable[..., None]) -> None:
    store = bucket[0]
    seeded(store)
    store.append_ledger(JOB, Entry(at=90.0, id="g2", event=Event.GENERATION, gen=2, step=2))
    columns = {"steps": array("q", [1, 2, 3]), "seconds": array("f", [0, 1, 2]), "values": array("d", [1.5, 0.5, 2.5])}
    packed = {name: base64.b64encode(column.tobytes()).decode() for name, column in columns.items()}
    once = {word: base64.b64encode(column[:1].tobytes()).decode() for word, column in columns.items()}
    many = {f"z{number:02}": packed for number in range(FIRST_CHARTS)}
    metrics = {"accuracy": packed, "a-once": once} | many
    written = {"gen": 2, "ancestors": [], "began": 0.0, "metrics": metrics}
    store.put(object_name(JOB, 2), msgspec.json.encode(written))

    async def accuracy(user: User) -> dict[str, Any]:
        from nicegui import ui

        await user.open("/jobs/first")
        await until(lambda: "accuracy" in text(user))
        drawn = [element.options for element in _elements(user, ui.echart) if element.options.get("series")]
        axes = {one["series"][0]["name"]: (one["xAxis"].get("name"), one["yAxis"].get("name")) for one in drawn}
        assert axes["accuracy"] == ("step", None), "the title names the values"
        assert axes["steps a second"] == ("step", "steps a second")
        assert axes["spent"] == ("since submission", None)
        (found,) = [one for options in drawn for one in options["series"] if one["name"] == "accuracy"]
        return found

    async def story(user: User) -> None:
        found = await accuracy(user)
        assert "Too few values for a chart: a-once." in text(user) and "A-once" not in text(user)
        assert "z22" not in text(user), "the loss and 23 others"
        user.find("Show 2 more metrics").click()
        await until(lambda: "z22" in text(user) and "z23" in text(user))
        assert found["data"] == [(1, 1.5), (2, 0.5), (3, 2.5)]
        assert found["markLine"]["data"] == [{"xAxis": 2.0}]
        assert all(map(is_, (await accuracy(user))["data"], found["data"])), "another tab's points are the same objects"

    play(story)


def test_logs_of_all_nodes_are_searched(
    bucket: Bucket, play: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = bucket[0]
    seeded(store)
    monkeypatch.setattr(log_panel, "_BLOCK_LINES", 1)

    def printed(node: int, words: str, ago: float) -> None:
        at = time.time() - ago
        store.put(chunk_name(JOB, node, 1, round(at * 1000)), packed(at, b"0o", words.encode()))

    printed(0, "<b>the first node</b>", 60.0)
    printed(1, "\x1b[31mthe\rsecond\x1b[0m", 60.0)

    def blocks(user: User) -> list[ui.html]:
        from nicegui import ui

        return [element for element in _elements(user, ui.html) if "Z node " in element.content]

    async def story(user: User) -> None:
        await user.open("/jobs/first")
        open_tab(user, "Logs")
        await until(lambda: "node 1: the second" in text(user))
        assert "&lt;b&gt;the first node&lt;/b&gt;" in text(user) and "2 lines" in text(user)
        before = blocks(user)
        printed(0, "the third", 30.0)
        await until(lambda: "3 lines" in text(user))
        assert blocks(user)[:2] == before and len(before) == 2, "only the new line is sent"
        user.find("Search").type("second")
        await until(lambda: "1 line" in text(user) and "<mark>second</mark>" in text(user))

    play(story)


def test_a_long_curve_keeps_its_extremes() -> None:
    points = [(float(step), float(step % 7)) for step in range(4000)]
    points[1234] = (1234.0, 99.0)
    kept = thinned(points)
    assert len(kept) <= 1001 and (1234.0, 99.0) in kept and kept == sorted(kept) and set(kept) <= set(points)
    older, newest = points[:3000:6], points[3000:]
    kept = [step for step, _ in thinned(older + newest)]
    assert kept == [step for step, _ in older] + [step for step in kept if step >= 3000.0]
    assert all(sum(begin <= step < begin + 80 for step in kept) <= 20 for begin in range(3000, 3920, 80)), "no denser"
    assert thinned([]) == [] and thinned(points[:7]) == points[:7]


def test_a_job_that_does_not_exist(bucket: Bucket, play: Callable[..., None]) -> None:
    async def story(user: User) -> None:
        await user.open("/jobs/nobody")
        await until(lambda: "nobody: no such job" in text(user))
        assert "spotkeeper status --all" in text(user) and 'href="/"' in text(user)
        await user.should_not_see("Timeline")  # nor the other empty parts

    play(story)


def test_a_job_that_saves_by_itself_is_not_said_to_have_too_few_values_yet(
    bucket: Bucket, play: Callable[..., None]
) -> None:
    seeded(bucket[0])
    a_job(bucket[0], job="bbbbbbbb", name="signalled")
    bucket[0].put_spec("bbbbbbbb", JobSpec(name="signalled", command=("train.py",), stop="signal"))

    async def story(user: User) -> None:
        await user.open("/jobs/signalled")
        await until(lambda: "A script with stop: signal reports no steps, so no curve: throughput, loss." in text(user))
        assert "Too few values" not in text(user)
        user.find(kind=ui.button, content="Pause").click()
        await until(lambda: "with stop: signal the script gets the signal" in text(user))

    from nicegui import ui

    play(story)


def test_the_page_of_the_stack(bucket: Bucket, play: Callable[..., None]) -> None:
    seeded(bucket[0])

    async def story(user: User) -> None:
        await user.open("/stack")
        await until(lambda: "workers" in text(user))
        assert "us-central1-c" in text(user) and "Cost per hour now" in text(user)
        assert "<h2>Queue</h2>" in text(user) and "No job waits." in text(user)

    play(story)


def test_the_queue_is_on_the_stacks_page_and_on_the_pages_of_its_jobs(
    bucket: Bucket, play: Callable[..., None]
) -> None:
    store = bucket[0]
    seeded(store)
    a_job(store, job="bbbbbbbb", name="gpt", phase=Phase.HOLD, hold=Hold.QUEUE, nodes=(), members=())
    claims = (
        Claim(JOB, 5, 5, 0.0, reserved=5, started=1.0, stop=Stop.NEVER),
        Claim("bbbbbbbb", 2, 2, 0.0, team="nlp", waits=1.0, whom=JOB),
    )
    grants = tuple(Grant(JOB, node, 1, "slot:workers") for node in range(5))
    assert store.cas_allocation(Allocation(1, "n", grants, claims), "")

    async def story(user: User) -> None:
        await user.open("/stack")
        await until(lambda: "Jobs that wait" in text(user) and ">gpt<" in text(user))
        why = "first is protected to its end (a stop would lose work); its machines went to first"
        assert f"needs 2 machines, 1 is free; {why}" in text(user)
        assert "No job is on hold." in text(user)
        await user.open("/jobs/gpt")
        await until(lambda: "queued (1st)" in text(user) and "its machines went to first" in text(user))
        assert " for 2 machines (team nlp, " in text(user)
        await user.should_see("Pause")
        await user.should_not_see("Resume")

    play(story)


def test_a_queued_job_waits_and_is_not_on_hold() -> None:
    from spotkeeper.dashboard.jobs_page import STATES, in_state

    record = Record(job=JOB, uid="u", name="gpt", spec_sha256="", created=0.0, nonce="n", phase=Phase.HOLD)
    for hold, states in ((Hold.QUEUE, ["unfinished", "waiting"]), (Hold.PAUSE, ["unfinished", "on hold"])):
        held = replace(record, hold=hold)
        state = KnownJob(held, "", job_view(held, None, (), None, 0.0), (), None, 0.0, 0.0)
        assert [word for word in STATES if word != "all" and in_state(state, word)] == states


def test_pause_asks_and_is_the_commands_own_request(bucket: Bucket, play: Callable[..., None]) -> None:
    store = bucket[0]
    seeded(store)

    async def story(user: User) -> None:
        await user.open(f"/jobs/{JOB}")
        await until(lambda: "machine" in text(user))
        await user.should_see("Pause")
        user.find("Pause").click()
        await user.should_see("The job saves a checkpoint")
        assert "Pause first?" in text(user)
        user.find("No").click()
        assert store.list_requests(JOB) == ()
        user.find("Pause").click()
        await user.should_see("Yes")
        user.find("Yes").click()
        await until(lambda: store.list_requests(JOB))
        assert [request.kind for request in store.list_requests(JOB)] == [RequestKind.PAUSE]
        await user.should_see("requested: pause", retries=100)

    play(story)


def test_a_read_only_page_offers_no_action(bucket: Bucket, play: Callable[..., None]) -> None:
    seeded(bucket[0])

    async def story(user: User) -> None:
        await user.open("/jobs/first")
        await until(lambda: "Every machine and what it cost" in text(user))
        await user.should_not_see("Cancel")

    play(story, read_only=True)


def test_the_server_refuses_actions_if_read_only(bucket: Bucket) -> None:
    """Whatever a page was made to send."""
    store, environment = bucket
    seeded(store)
    read = store.read_record(JOB)
    assert read is not None
    target = Target("prod", environment["SPOTKEEPER_BUCKET"], Clock())
    offered = commands(target, store, read_only=True)
    for name in offered.actions:
        with pytest.raises(CliError, match="read-only"):
            offered.run(name, read.value, "1")
    assert store.list_requests(JOB) == ()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("resize", "two"),
        ("resize", "0"),
        ("resize", "\u00b2"),
        ("resize", "9" * 5000),
        ("move", "mars-a"),
        ("nothing", ""),
    ],
)
def test_a_wrong_value_is_refused_as_by_the_command(bucket: Bucket, name: str, value: str) -> None:
    store, environment = bucket
    seeded(store)
    read = store.read_record(JOB)
    assert read is not None
    offered = commands(Target("prod", environment["SPOTKEEPER_BUCKET"], Clock()), store, read_only=False)
    with pytest.raises(CliError):
        offered.run(name, read.value, value)
    assert store.list_requests(JOB) == ()
