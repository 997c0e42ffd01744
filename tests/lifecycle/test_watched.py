"""One job that loses machines, in all that shows it: trace, exporter, shell, curve, and the dashboard in a browser."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from itertools import product
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from spotkeeper.cli.jobs import report
from spotkeeper.cli.main import run as cli
from spotkeeper.client.metrics import MetricsReader
from spotkeeper.client.target import FOLDER, local_target
from spotkeeper.contract.job import Checkpoint
from spotkeeper.contract.ledger import Event
from spotkeeper.contract.record import Outcome
from spotkeeper.exporter import families, reading
from spotkeeper.exporter.reading import StackReader, StackReading
from spotkeeper.local.core import procs
from spotkeeper.report.job.metrics import ancestors, joined
from spotkeeper.report.job.trace import RecoveryPart, job_trace
from spotkeeper.report.text.words import usd
from tests.dashboard.browser import CHROMIUM, WHY_NOT, Visitor, chromium, login
from tests.dashboard.served import Served, serving
from tests.lifecycle.stage import Run, Stage, tiny
from tests.sizes import size

pytestmark = pytest.mark.lifecycle

LOOKS = size([("dark", 390)], list(product(("light", "dark"), (1440, 390))))
STEPS = 20_000  # more than the story takes: it is cancelled


@pytest.fixture(scope="module")
def run(stage: Stage) -> Iterator[Run]:
    """A job of two spot machines, of which one was replaced after a notice."""
    spec = tiny("watched", STEPS, 0.1, nodes=2, static="never", checkpoint=Checkpoint(interval_s=1.0))
    with Run(stage, spec) as run:
        run.steady("at first")
        run.chaos.one(announced=True)
        run.until("the next generation's first step", lambda: len(run.ledger(Event.FIRST)) == 2)
        yield run
        if not run.record().over:
            run.cancel()


@pytest.fixture(scope="module")
def lose(run: Run) -> Callable[[], None]:
    """Take another machine away, this time without a notice; only the first call does."""
    return cache(lambda: run.chaos.one(announced=False))


@pytest.fixture(scope="module")
def served(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = str(run.stage.cloud.folder)
    with serving({"SPOTKEEPER_FOLDER": folder}, tmp_path_factory.mktemp("dashboard")) as served:
        yield served


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip(WHY_NOT)
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def window(browser: Browser, served: Served) -> Iterator[Visitor]:
    visitor = Visitor(browser, login(browser, served.url))
    yield visitor
    visitor.context.close()


@pytest.fixture
def visitor(window: Visitor) -> Iterator[Visitor]:
    """The window of all tests, light and wide at first."""
    window.look("light", 1440)
    yield window
    assert window.told == []


def test_a_recovery_leaves_its_parts_and_machines_their_use(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "USAGE_S", 0.0)
    run.until("the disk on the replacement", lambda: run.ledger(Event.MOUNTED))
    cloud = run.stage.cloud
    trace = job_trace(run.job, "watched", run.ledger(), cloud.clock.now(), "local", cloud.clock.scale)
    reader = StackReader(local_target(cloud.folder))
    busy = run.until("every node's use", lambda: (found := usage(reader.read())) and len(found) == 2 and found)
    (replaced,) = (number for number, node in enumerate(run.record().nodes) if node.cur and node.cur.attempt > 1)
    (one,) = trace.recoveries
    parts = {span.part: span for span in one.spans}
    # On busy cores a machine may go before its processes have ended; the lowest node's are what STOP tells of.
    gone = {RecoveryPart.STOP} if replaced == 0 else set()
    seldom = {RecoveryPart.NOTICE, RecoveryPart.ORDER, RecoveryPart.SAVE, RecoveryPart.NEVER}
    assert {*RecoveryPart} - set(parts) <= seldom | gone
    assert parts[RecoveryPart.BOOT].node == parts[RecoveryPart.MOUNT].node == replaced
    assert (parts[RecoveryPart.RESTORE].bytes or 0) > 0, "it continued from a checkpoint"
    ended = [span.end for span in one.spans]
    assert one.end is not None and all(end is not None for end in ended)
    assert parts[RecoveryPart.FIRST].end == one.end and one.slowest is not None
    assert all(0.0 <= share <= 1.0 for share in busy.values())


def usage(read: StackReading) -> dict[str, float]:
    """The CPU use of each node."""
    found = next(one for one in families.families(read) if one.name == "spotkeeper_node_cpu_usage_ratio")
    return {sample.labels["node"]: sample.value for sample in found.samples}


def test_ssh_runs_a_command_on_the_jobs_machine_and_logs_it(
    run: Run, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """In the job's folder, beside its logs; the command ends with the VM."""
    for name in ("SPOTKEEPER_STACK", "SPOTKEEPER_BUCKET"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(FOLDER, str(run.stage.cloud.folder))
    cur = run.record().nodes[0].cur
    assert cur is not None
    vm = f"sk-local-{run.job}-n0000-a{cur.attempt}"
    capfd.readouterr()
    look = f'ls slow.py; echo "$HOSTNAME"; env | grep -c "^{procs.VM}="; exit 3'
    assert cli(["ssh", "watched", "--node", "0", "--", "sh", "-c", look]) == 3
    assert capfd.readouterr().out.splitlines() == ["slow.py", vm, "1"], "the VM's mark: it ends with the VM"
    (start,) = run.ledger(Event.SHELL)
    assert start.node == 0 and start.detail.endswith(f"on {vm}")


@pytest.mark.parametrize(("theme", "width"), LOOKS)
def test_every_page_in_every_look(visitor: Visitor, served: Served, theme: str, width: int) -> None:
    visitor.look(theme, width)
    pages = {"/": "tbody a", "/jobs/watched": "canvas", "/stack": "section .bar"}
    for path, wait_for in pages.items():
        visitor.open(served.root + path, wait_for)
        visitor.page.wait_for_function("document.querySelector('.facts')?.textContent.includes('$') ?? true")
        assert visitor.serious() == [], path
        assert visitor.too_wide() == 0, path
    dark = visitor.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (dark == "rgb(16, 20, 27)") is (theme == "dark")


def test_each_tab_of_a_job_is_readable(visitor: Visitor, served: Served) -> None:
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


def test_a_browser_without_the_cookie_sees_nothing(browser: Browser, served: Served) -> None:
    visitor = Visitor(browser, None)
    visitor.page.goto(served.root)
    assert visitor.page.locator("body").inner_text().startswith("Open this dashboard by the address")
    visitor.context.close()


def test_the_keyboard_reaches_a_job_whose_page_follows_a_loss_without_a_reload(
    visitor: Visitor, served: Served, run: Run, lose: Callable[[], None]
) -> None:
    visitor.open(served.root, "tbody a")
    for _ in range(20):
        visitor.page.keyboard.press("Tab")
        if visitor.page.evaluate("document.activeElement.textContent") == "watched":
            break
    visitor.page.keyboard.press("Enter")
    visitor.page.wait_for_url("**/jobs/*")
    visitor.page.wait_for_selector("canvas")
    visitor.page.evaluate("window.unreloaded = true")
    before = run.record().gen
    lose()
    recoveries = visitor.page.get_by_role("table", name="Recoveries")
    expect(recoveries).to_contain_text("loss", timeout=60_000)
    assert run.record().gen > before and visitor.page.evaluate("window.unreloaded")


def test_a_machine_lost_without_notice_leaves_one_curve(run: Run, lose: Callable[[], None]) -> None:
    """Every step once, also those that were trained again."""
    lose()
    gen = run.record().gen
    reader = MetricsReader(run.stage.store, run.job)
    found = run.until(
        "an upload of the newest generation",
        lambda: (read := reader.read()) and max(one.gen for one in read) == gen and read,
    )
    assert [each for each, _ in ancestors(found)] == list(range(1, gen))
    last = max(found, key=lambda one: one.gen).metrics["loss"].steps[-1]
    assert joined(found)["loss"].steps == list(range(1, last + 1))


def test_the_page_cancels_a_job_and_its_amounts_are_the_commands(visitor: Visitor, served: Served, run: Run) -> None:
    visitor.open(f"{served.root}/jobs/watched", "canvas")
    visitor.page.get_by_role("button", name="Cancel").click()
    visitor.page.get_by_role("button", name="Yes").click()
    run.until("the job to be cancelled", lambda: run.record().outcome is Outcome.CANCELLED)
    record = run.over()
    target = local_target(run.stage.cloud.folder)
    _, account = report.account_of(target, run.stage.store, record, run.stage.store.read_stack())
    for amount in (account.money.spent, account.money.on_demand_only, account.money.saved):
        expect(visitor.page.locator(".facts").first).to_contain_text(usd(amount), timeout=90_000)


def test_the_file_opens_offline(browser: Browser, run: Run, tmp_path: Path) -> None:
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
