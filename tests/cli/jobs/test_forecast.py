"""`spotkeeper forecast` and `compare`: what they rest on, and what they say where something is not known."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from spotkeeper.cli.jobs import forecast as forecasting
from spotkeeper.cli.jobs.compare import measured_step_s as step_s
from spotkeeper.cli.jobs.ground import Ground, ground, of_settings, recorded_stack, shape_of
from spotkeeper.client.errors import CliError
from spotkeeper.client.lookup import starts_of
from spotkeeper.contract.allocation import Allocation, Grant
from spotkeeper.contract.generation import Progress
from spotkeeper.contract.job import JobSpec, MachineGroup
from spotkeeper.contract.ledger import Entry, Event
from spotkeeper.contract.market import HOUR_S, Observation, PriceRun, Prices
from spotkeeper.contract.record import Outcome, Phase
from spotkeeper.contract.stack import Model, Price, ReservedCapacity
from spotkeeper.reconcile.store.store import Store
from spotkeeper.report.forecast import forecast as report
from tests.cli.conftest import Cli
from tests.cli.records import JOB, a_job
from tests.contract.samples import STACK
from tests.infra.conftest import STACKS

EXAMPLE = STACKS / "Pulumi.example-gcp.yaml"


@pytest.fixture(autouse=True)
def few_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "REPLAYS", 12)
    monkeypatch.setattr(report, "LEAST", 1)
    monkeypatch.delenv(forecasting.MARKETS, raising=False)


def job(folder: Path, more: str = "") -> Path:
    file = folder / "job.yaml"
    file.write_text(f"name: first\ncommand: [train.py]\nsource: code\n{more}")
    return file


def said(document: str) -> str:
    return "\n".join(json.loads(document)["assumptions"])


def test_a_stack_s_own_pool_and_prices(cli: Cli, store: Store, folder: Path) -> None:
    done = cli("forecast", job(folder, "work: 5h"), "--json")
    made = json.loads(done.out)
    assert (done.code, made["work_h"], made["pool"]) == (0, 5.0, "workers")
    assert made["expected"]["usd"]["low"] <= made["expected"]["usd"]["mid"] <= made["expected"]["usd"]["high"]
    assert made["on_demand"]["finish_h"]["mid"] == pytest.approx(5 + 1 / 6)


def test_idle_reserved_capacity_is_counted_as_paid_and_named(cli: Cli, store: Store, folder: Path) -> None:
    workers, *others = STACK.pools
    now = time.time()
    ours = (
        ReservedCapacity("few", "us-central1-a", 2),
        ReservedCapacity("over-soon", "us-central1-a", 9, ends=now + 3600),
        ReservedCapacity("most", "us-central1-b", 3),
    )
    state = replace(STACK, pools=(replace(workers, max_machines=9, reservations=ours), *others))
    store.put("stack/pools.json", msgspec.json.encode(state))
    assert store.cas_allocation(Allocation(1, "n", (Grant(JOB, 0, 1, "slot:workers/reserved/us-central1-b/most"),)), "")
    words = said(cli("forecast", job(folder, "work: 5h\nnodes: 3"), "--json").out)
    other = "costs are those of the other 1"
    assert f"reserved: 2 of its machines in idle reserved capacity in us-central1-a, paid for already; {other}" in words
    made = json.loads(cli("forecast", job(folder, "work: 5h\nnodes: 2"), "--json").out)
    assert (made["expected"]["usd"]["mid"], made["bought"]) == (0.0, 0)
    rows = json.loads(cli("compare", job(folder, "work: 5h\nnodes: 2"), "--json").out)["rows"]
    assert {(row["pool"], row["bought"]) for row in rows if row["pool"] == "workers"} == {("workers", "reserved")}


@pytest.mark.parametrize(("told_h", "usd"), [(None, "$1.00"), (-25.0, "$1.00"), (-1.0, "$0.70")])
def test_without_reported_prices_list_prices_are_used_and_named(
    told_h: float | None, usd: str, cli: Cli, store: Store, folder: Path
) -> None:
    if told_h is not None:
        at = time.time() + told_h * HOUR_S
        assert store.cas_prices(Prices("workers", at, at, (PriceRun(at, 0.7),)), "")
    words = said(cli("forecast", job(folder, "work: 5h"), "--json").out)
    assert f"spot {usd} a machine-hour" in words
    assert ("reported none for us-central1-a, us-central1-b, us-central1-c within a day" in words) == (usd == "$1.00")


def test_table_and_markdown_show_the_same_values(cli: Cli, store: Store, folder: Path) -> None:
    file = job(folder, "work: 5h")
    table, markdown = cli("forecast", file).out, cli("forecast", file, "--markdown").out
    for word in ("cost", "done after", "preemptions", "share on spot", "80 % range"):
        assert word in table and word in markdown
    assert markdown.startswith("**`first` on `workers`**")


def test_without_a_stack_the_shipped_market_is_used_and_named(
    cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SPOTKEEPER_STACK", "SPOTKEEPER_BUCKET", "SPOTKEEPER_FOLDER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(folder)
    told = said(cli("forecast", job(folder), "--json").out)
    assert "no stack is named" in told
    assert "training time is unknown" in told
    assert "us-central1 is the market in which the job would run" in told


def test_a_forecast_needs_no_running_stack(cli: Cli, folder: Path) -> None:
    done = cli("forecast", job(folder, "nodes: 3\nwork: 5h"), "--stack-file", EXAMPLE, "--json")
    assert json.loads(done.out)["machine_type"] == "a2-highgpu-1g"
    assert "at most 2 of its 3 machines may be on-demand" in said(done.out)


def test_static_machines_of_a_job_are_noted_with_their_cost(cli: Cli, folder: Path) -> None:
    told = said(cli("forecast", job(folder, "work: 5h"), "--stack-file", EXAMPLE, "--json").out)
    assert "static: " in told and "the forecast leaves out its 1 x" in told
    none = said(cli("forecast", job(folder, "work: 5h\nstatic: never"), "--stack-file", EXAMPLE, "--json").out)
    assert "static: " not in none


def test_a_risky_deadline_gets_submits_caution(cli: Cli, folder: Path) -> None:
    short = cli("forecast", job(folder, "nodes: 3\nwork: 5h\ndeadline: 30h"), "--stack-file", EXAMPLE, "--json")
    assert "deadline: 30h may be missed if no spot machine is available: only 2 of its 3 machines may be" in said(
        short.out
    )
    held = cli("forecast", job(folder, "nodes: 2\nwork: 5h\ndeadline: 30h"), "--stack-file", EXAMPLE, "--json")
    assert "may be missed" not in said(held.out)


def test_an_impossible_deadline_names_the_earliest_one_and_its_price(cli: Cli, store: Store, folder: Path) -> None:
    done = cli("forecast", job(folder, "deadline: 3h"), "--work", "10h")
    assert done.code == 2
    assert "the earliest possible deadline is" in done.err and "on-demand" in done.err and "$" in done.err


@pytest.mark.parametrize(
    ("more", "options", "words"),
    [
        ("deadline: 30h", (), "training time is unknown"),
        ("", ("--work", "often"), "want a length of time"),
        ("nodes: 5000", (), "5000"),
        ("", ("--markets", "/nonexistent"), "no recording"),
    ],
)
def test_an_impossible_forecast_is_explained(
    more: str, options: tuple[str, ...], words: str, cli: Cli, store: Store, folder: Path
) -> None:
    done = cli("forecast", job(folder, more), *options)
    assert done.code != 0
    assert words in done.err


def test_the_work_comes_from_an_earlier_job_of_the_name(
    cli: Cli, store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put_name("first", "abcdefgh")
    store.put_progress("abcdefgh", Progress(1, 10, 1.0, step_s=2.0, total_steps=9000))
    made = json.loads(cli("forecast", job(folder), "--json").out)
    assert made["work_h"] == 5.0
    due = json.loads(cli("forecast", job(folder, "deadline: 30h"), "--json").out)
    assert (due["work_h"], due["expected"]["late"]) == (5.0, 0.0), "with a deadline too"
    monkeypatch.setenv("SPOTKEEPER_CLOCK", "0:0:20")  # its steps take real time, and all else the cloud's
    assert json.loads(cli("forecast", job(folder), "--json").out)["work_h"] == 100.0


def test_the_work_may_come_from_an_ended_job(cli: Cli, store: Store, folder: Path) -> None:
    """Its name is free again, and what it told is there until it is forgotten."""
    over(store)
    store.put_progress(JOB, Progress(1, 10, 1.0, step_s=2.0, total_steps=9000))
    made = json.loads(cli("forecast", job(folder), "--json").out)
    assert made["work_h"] == 5.0
    told = said(cli("compare", job(folder), "--json").out)
    assert f"step: 2.000 s on 1 x n2-standard-8, as an earlier job of this name ({JOB}) reported" in told


def over(store: Store, name: str = "first") -> None:
    """A job that succeeded, as its burial leaves it."""
    a_job(store, name=name, phase=Phase.DONE, outcome=Outcome.SUCCEEDED)
    store.clear_active(JOB)
    store.put_tomb(JOB, 1.0)
    store.delete_name(name, JOB)


@pytest.mark.parametrize(("nodes", "step_s", "work_h"), [(2, 2.0, 5.0), (1, 4.0, 10.0), (4, 1.0, 2.5)])
def test_an_earlier_jobs_work_is_scaled_to_the_new_machines(
    nodes: int, step_s: float, work_h: float, cli: Cli, store: Store, folder: Path
) -> None:
    """It ran on two: one has the arithmetic of both to do, and four have half of it each."""
    over(store)
    store.put_spec(JOB, JobSpec("first", ("train.py",), nodes=2))
    store.put_progress(JOB, Progress(1, 10, 1.0, step_s=2.0, total_steps=9000))
    for at, event in ((1.0, Event.INTENT), (2.0, Event.ADMITTED)):
        store.append_ledger(JOB, Entry(at, f"{event.value}.r0.a1", event, node=0, attempt=1, pool="workers"))
    made = json.loads(cli("forecast", job(folder, f"nodes: {nodes}"), "--json").out)
    assert made["work_h"] == work_h
    assert any("on 2 x n2-standard-8, recomputed" in line for line in made["assumptions"]) == (nodes != 2)
    found = json.loads(cli("compare", job(folder, f"nodes: {nodes}"), "--json").out)
    assert "step: 2.000 s on 2 x n2-standard-8, as an earlier job" in "\n".join(found["assumptions"])
    own = next(row for row in found["rows"] if row["pool"] == "workers")
    assert (own["step_s"], own["work_h"]) == (step_s, work_h)


@pytest.mark.parametrize("finished", [False, True])
def test_a_starts_duration_comes_from_earlier_jobs(
    finished: bool, cli: Cli, store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One number where nobody measured, and the measured one for the forecast and for what a deadline can hold."""
    monkeypatch.setenv("SPOTKEEPER_CLOCK", f"0:{3000 * HOUR_S}:1")
    now = ground("prod", None).now
    tight = job(folder, "work: 5h\ndeadline: 5.1h")
    assert "starting takes 10 min" in cli("forecast", tight).err
    if finished:
        over(store)
    else:
        store.put_name("first", JOB)
    store.put_progress(JOB, Progress(1, 10, 1.0, save_s=4.0, begin_s=26.0))
    assert "starting takes 10 min" in cli("forecast", tight).err, "no machine of the pool was seen to boot"
    came = Observation("abcdefgh-n0-a1", Event.ADMITTED, now - 60.0, "us-central1-a", Model.SPOT, started=now - 150.0)
    store.add_observations("workers", int(came.at // HOUR_S), (came,))
    told = cli("forecast", tight, "--json")
    assert told.code == 0, told.err
    assert "start: 120 s, as measured by a job of this name" in said(told.out)
    assert "cannot be met" in cli("submit", job(folder, "work: 5h\ndeadline: 5.02h")).err
    dear = cli("submit", job(folder, "max_usd: 0.02")).err
    assert "is below what one start costs (about $0.03 by list prices)" in dear


def test_a_start_counts_a_save_in_the_time_of_the_clock(store: Store) -> None:
    """A save is measured in real seconds; a one-machine cloud's clock runs faster."""
    stack, now = recorded_stack(), 1000 * HOUR_S
    (pool,) = stack.pools
    store.put_name("first", JOB)
    store.put_progress(JOB, Progress(1, 10, 1.0, save_s=4.0, begin_s=26.0))
    came = Observation("abcdefgh-n0-a1", Event.ADMITTED, now, pool.zones[0], Model.SPOT, started=now - 90.0)
    store.add_observations(pool.name, int(now // HOUR_S), (came,))
    starts = starts_of(store, stack, now, 60.0)
    assert starts(JobSpec("first", ("train.py",))) == 90.0 + 26.0 + 240.0


def test_the_stack_s_own_history_is_replayed(
    cli: Cli, store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPOTKEEPER_CLOCK", f"0:{3000 * HOUR_S}:1")
    for hour, event in ((2000, Event.ADMITTED), (2100, Event.GONE)):
        observation = Observation("abcdefgh-n0-a1", event, hour * HOUR_S, "us-central1-a", Model.SPOT)
        store.add_observations("workers", hour, (observation,))
    now = ground("prod", None).now / HOUR_S
    monkeypatch.setattr(forecasting, "HISTORY_HOURS", now)
    told = said(cli("forecast", job(folder, "work: 5h"), "--json").out)
    assert "own history.workers us-central1 is the market in which the job would run" in told


def test_an_on_demand_job_is_forecast_on_an_allowed_pool(folder: Path) -> None:
    """The pool that is cheapest on spot may allow no on-demand machine: there it would wait for ever."""
    (pool,) = recorded_stack().pools
    never = replace(pool, name="never", max_on_demand=0, prices=dict.fromkeys(pool.zones, Price(1.0, 0.1)))
    dear = replace(pool, name="dear", prices=dict.fromkeys(pool.zones, Price(9.0, 0.2)))
    cheap = replace(pool, name="cheap", prices=dict.fromkeys(pool.zones, Price(8.0, 0.3)))
    stack = replace(recorded_stack(), pools=(never, dear, cheap))
    for policy, wanted in (("on-demand", "cheap"), ("balanced", "never")):
        spec = JobSpec("first", ("train.py",), policy=policy)  # type: ignore[arg-type]
        assert forecasting.pool_of(spec, stack, []).name == wanted


def test_a_mix_is_forecast_at_the_mean_price_in_the_market_of_its_dearest_group() -> None:
    """Three machines: two at 3 and 0.9 dollars, one at 1 and 0.3; of the latter, none may be on-demand."""
    (pool,) = recorded_stack().pools
    zones, now = pool.zones, 1e6
    l4 = replace(pool, name="l4", max_on_demand=9, prices=dict.fromkeys(zones, Price(3.0, 0.9)))
    t4 = replace(
        pool, name="t4", machine_type="t4-small", max_on_demand=0, prices=dict.fromkeys(zones, Price(1.0, 0.3))
    )
    stack = replace(recorded_stack(), pools=(t4, l4))
    mix = JobSpec("first", ("train.py",), machines=(MachineGroup("t4", 1), MachineGroup("l4", 2)))
    said: list[str] = []
    spec, known = forecasting._unmixed(mix, Ground(stack, now=now), said)
    task = forecasting.task_of(spec, known, "10h", said)
    assert (task.shop.pool.name, task.nodes, task.shop.on_demand) == ("l4", 3, False)
    assert task.shop.pool.machine_type == f"{pool.machine_type} and t4-small"
    assert shape_of(spec, task.shop.pool, ()).nodes == 3
    assert task.on_demand == pytest.approx(7 / 3) and task.spot == pytest.approx((0.7,) * len(zones))
    assert said[0].startswith("machines: all 3 as if of l4's market, at the mean price of the mix")
    told = {name: Prices(name, now, now, (PriceRun(0.0, usd),)) for name, usd in (("l4", 0.6), ("t4", 0.3))}
    spec, known = forecasting._unmixed(mix, Ground(stack, now=now, prices=told), said)
    assert forecasting.task_of(spec, known, "10h", said).spot == pytest.approx((0.5,) * len(zones))
    with pytest.raises(CliError, match="has no pool 'a3', or no price for it"):
        forecasting._unmixed(replace(mix, machines=(MachineGroup("a3", 1),)), known, said)
    with pytest.raises(CliError, match="compares pools that have all machines of the job"):
        forecasting.pool_of(mix, stack, said)


def test_recordings_without_spot_are_refused(cli: Cli, store: Store, folder: Path) -> None:
    zones = [{"zone": "us-east-1a", "capacity": [0] * 100}]
    recording = {"collection": "c", "market": "m", "gap_seconds": 600, "gang": 1, "zones": zones}
    (folder / "never.json").write_text(json.dumps(recording))
    done = cli("forecast", job(folder, "work: 5h"), "--markets", folder)
    assert done.code != 0 and "had spot capacity" in done.err and "Traceback" not in done.err


def test_a_job_that_can_never_run_has_no_price(cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spotkeeper.report.forecast.forecast.REPLAYS", 24)
    file = job(folder, "work: 5h\npolicy: spot\nmax_price: 0.001\nnproc: 1\nspread: true")
    done = cli("forecast", file, "--stack-file", EXAMPLE)
    assert done.code == 4 and "since max_price is 0.001" in done.err and "try: a higher `max_price`" in done.err
    text = "\n".join(forecasting.comments([file], of_settings(EXAMPLE, None)))
    assert "the job gets no machine" in text and "$" not in text
    options = ("--step-time", "1", "--work", "5h", "--stack-file", EXAMPLE, "--json")
    made = json.loads(cli("compare", file, *options).out)
    assert {row["bought"] for row in made["rows"]} <= {"on-demand"}
    assert "the job gets no machine" in "".join(made["skipped"])


def test_the_comment_names_jobs_without_a_forecast(folder: Path) -> None:
    known = of_settings(EXAMPLE, None)
    wrong = folder / "wrong.yaml"
    wrong.write_text("name: 7\n")
    text = "\n".join(forecasting.comments([job(folder, "work: 5h"), wrong], known))
    assert "**`first` on `burst`**" in text
    assert "`wrong.yaml`: `" in text


def test_compare_lists_each_pool_by_cost_and_by_time(cli: Cli, folder: Path) -> None:
    aws = STACKS / "Pulumi.example-aws.yaml"
    options = ("--work", "10h", "--step-time", "0.5", "--gradients-gb", "1", "--stack-file", aws)
    made = json.loads(cli("compare", job(folder, "nodes: 8\nnproc: 1\nspread: true"), *options, "--json").out)
    costs = [row["outlook"]["usd"]["mid"] for row in made["rows"]]
    assert costs == sorted(costs)
    assert {(row["pool"], row["shape"]["nodes"]) for row in made["rows"]} >= {("burst", 2), ("fabric", 1)}
    text = cli("compare", job(folder, "nodes: 8\nnproc: 1\nspread: true"), *options).out
    assert text.index("by cost") < text.index("by time")
    assert "network: g5.12xlarge 40 Gbit/s" in text


def test_shapes_that_miss_the_deadline_are_skipped(cli: Cli, folder: Path) -> None:
    options = ("--step-time", "1", "--stack-file", STACKS / "Pulumi.example-aws.yaml")
    fast = cli("compare", job(folder, "deadline: 6h\nspread: true\nnproc: 1"), "--work", "10h", *options, "--json")
    made = json.loads(fast.out)
    assert {row["pool"] for row in made["rows"]} == {"burst", "fabric"}
    assert len(made["skipped"]) == 2 and "cannot be met" in made["skipped"][0]
    assert made["skipped"][1] == "fabric on-demand: at most 0 of its 1 machines may be on-demand"
    none = cli("compare", job(folder, "deadline: 15m\nspread: true"), "--work", "100h", *options)
    assert none.code == 4 and "fits no pool of the stack" in none.err and "try: another `deadline`" in none.err
    barred = job(folder, "policy: on-demand\nnodes: {min: 1, max: 4}\nmax_on_demand: 2")
    none = cli("compare", barred, "--work", "10h", *options)
    assert none.code == 4 and "at most 2 of its 4 machines may be on-demand" in none.err
    both = cli("compare", job(folder), "--step-time", "1", "--measure")
    assert both.code == 2 and "exclude each other" in both.err


STEPS = """
import os, time
from spotkeeper.train.agent_link.control import Control
with Control.open(os.environ["SPOTKEEPER_RUN"] + "/ctl") as control:
    control.stepped(20)
    control.step_s = 0.25
    {then}
"""


def test_a_calibration_run_ends_as_soon_as_its_steps_are_known(folder: Path) -> None:
    (folder / "code" / "train.py").write_text(STEPS.format(then="time.sleep(600)"))
    spec = JobSpec("first", ("train.py",), source="code")
    assert step_s(folder / "job.yaml", spec) == 0.25


def test_a_calibration_run_is_a_gang_of_one(folder: Path) -> None:
    """As torchrun would have it: without, `init_process_group` ends the most usual script at once."""
    wanted = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    check = f"import os\nassert {wanted!r}.items() <= os.environ.items() and int(os.environ['MASTER_PORT'])\n"
    (folder / "code" / "train.py").write_text(check + STEPS.format(then="time.sleep(600)"))
    assert step_s(folder / "job.yaml", JobSpec("first", ("train.py",), source="code")) == 0.25


def test_a_failed_calibration_run_shows_its_output(folder: Path) -> None:
    (folder / "code" / "train.py").write_text("raise SystemExit('no data')")
    with pytest.raises(CliError, match="no data"):
        step_s(folder / "job.yaml", JobSpec("first", ("train.py",), source="code"))


def test_the_comment_on_a_change_has_the_forecasts_of_the_stack_s_jobs(cli: Cli, folder: Path) -> None:
    file = folder / "Pulumi.demo.yaml"
    file.write_text(EXAMPLE.read_text() + "  spotkeeper:jobs: [examples/gpt/job.yaml]\n")
    preview = Path(__file__).parents[2] / "report" / "review" / "previews" / "fresh.json"
    out = cli("review", "--preview", preview, "--stack-file", file).out
    assert out.index("#### Cost") < out.index("#### Its jobs") < out.index("**`gpt` on `burst`**")


def test_a_bar_on_a_terminal_and_the_answer_alone_on_standard_output(folder: Path, tmp_path: Path) -> None:
    """The bar goes to standard error, where that is a terminal, and is gone when the answer is there."""
    ups = [1, 1, 1, 0, 1, 1, 0, 1] * 40
    zones = [{"zone": "us-east-1a", "capacity": ups}, {"zone": "us-east-1b", "capacity": ups[::-1]}]
    (tmp_path / "markets").mkdir()
    recording = {"collection": "c", "market": "m", "gap_seconds": 600, "gang": 1, "zones": zones}
    (tmp_path / "markets" / "m.json").write_text(json.dumps(recording))
    argv = [sys.executable, "-m", "spotkeeper.cli.main", "forecast", str(job(folder, "work: 1h")), "--json"]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SPOTKEEPER_")}
    terminal, end = pty.openpty()
    child = subprocess.Popen(
        [*argv, "--markets", str(tmp_path / "markets")],
        stdout=subprocess.PIPE,
        stderr=end,
        env=clean | {"TERM": "xterm", "COLUMNS": "100"},
    )
    os.close(end)
    shown = b""
    with contextlib.suppress(OSError):  # EIO: nobody has the other end any more
        while piece := os.read(terminal, 65536):
            shown += piece
    out, _ = child.communicate(timeout=120)
    os.close(terminal)
    assert child.returncode == 0, shown
    assert b"replaying first" in shown and b"100%" in shown
    assert json.loads(out)["work_h"] == 1.0
