"""`status`: one job or all of them, with the reason of a crash and the deadline."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from spotkeeper.clock import Clock
from spotkeeper.contract.generation import Progress
from spotkeeper.contract.job import JobSpec, span_s
from spotkeeper.contract.ledger import Entry, Event
from spotkeeper.contract.record import Budget, Hold, Outcome, Phase
from spotkeeper.reconcile.store.store import Store
from tests.cli.conftest import Cli
from tests.cli.records import JOB, a_job


def test_status_of_a_job(cli: Cli, store: Store) -> None:
    a_job(store)
    images = {"image_steps": 12, "image_share": 0.0063}
    store.put_progress(JOB, Progress(gen=2, step=40, at=1.0, loss=2.5, samples_per_s=100.0, total_steps=300, **images))
    done = cli("status", "first")
    assert done.code == 0
    assert "an image every 12 steps costs 0.63 % of the time" in done.out
    assert "step 40/300  loss 2.5000  100 samples/s" in done.out
    assert f"us-central1-a  on-demand  sk-prod-{JOB}-n0001-a2" in done.out
    view = json.loads(cli("status", JOB, "--json").out)
    assert (view["step"], view["nodes"][0]["state"], view["nodes"][0]["master"]) == (40, "training", True)


@pytest.mark.parametrize(
    ("deadline", "over", "line"),
    [
        ("2h", {}, "deadline in 1h23m, about 8m20s of training left"),
        ("40m", {}, "deadline in 3m20s, about 8m20s of training left"),
        ("20m", {}, "its deadline was 16m40s ago, about 8m20s of training left"),
        ("2h", {"phase": Phase.DONE, "outcome": Outcome.SUCCEEDED}, "done 1h23m before its deadline"),
        ("20m", {"phase": Phase.DONE, "outcome": Outcome.SUCCEEDED}, "done 16m40s after its deadline"),
        (None, {}, "deadline"),
    ],
)
def test_status_and_report_show_the_deadline(
    cli: Cli, store: Store, monkeypatch: pytest.MonkeyPatch, deadline: str | None, over: dict[str, Any], line: str
) -> None:
    monkeypatch.setattr(Clock, "now", lambda _: 2200.0)
    record = a_job(store, **over)
    store.put_spec(JOB, JobSpec("first", ("train.py",), deadline=deadline), record.spec_key())
    if over:
        store.append_ledger(JOB, Entry(at=2200.0, id="end", event=Event.END, cause="succeeded"))
    store.put_progress(JOB, Progress(gen=2, step=50, at=2199.0, step_s=10.0, total_steps=100))
    for command in ("status", "report"):
        assert (line in cli(command, "first").out) == (deadline is not None)
        told = json.loads(cli(command, "first", "--json").out)["deadline_in_s"]
        assert told == (None if deadline is None else span_s(deadline) - 2200.0)


def test_status_shows_the_end_of_the_log_of_a_job_that_crashed(cli: Cli, store: Store) -> None:
    a_job(store, phase=Phase.HOLD, reason="4 crashes", budget=Budget(crashes=4))
    store.append_ledger(JOB, Entry(at=50.0, id="crash.g2", event=Event.CRASH, gen=2, node=1, cause="crash"))
    store.put(f"jobs/{JOB}/logs/1/2.log", b"\n".join(b"line %d" % n for n in range(30)) + b"\nZeroDivisionError\n")
    out = cli("status", "first").out
    assert "on hold (4 crashes)" in out
    assert "ZeroDivisionError" in out
    assert "line 29" in out
    assert "line 5 " not in out
    assert json.loads(cli("status", "first", "--json").out)["crash_log"][-1] == "ZeroDivisionError"


@pytest.mark.parametrize("command", ["status", "watch"])
@pytest.mark.parametrize("terminal", [True, False])
def test_long_log_lines_are_not_broken(
    cli: Cli, store: Store, monkeypatch: pytest.MonkeyPatch, command: str, terminal: bool
) -> None:
    line = '  File "/srv/' + "a-long-folder/" * 20 + 'train.py", line 7, in <module>'
    a_job(store, phase=Phase.HOLD, hold=Hold.FAILURE, hold_ends=9e9, budget=Budget(crashes=4))
    store.append_ledger(JOB, Entry(at=50.0, id="crash.g2", event=Event.CRASH, gen=2, node=1, cause="crash"))
    store.put(f"jobs/{JOB}/logs/1/2.log", f"{line}\nboom\n".encode())
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    lines = cli(command, "first").out.splitlines()
    assert [lines.count(each) for each in (line, "boom")] == [1, 1]
    assert sum("boom" in each for each in lines) == 1, "it is told once"


def test_an_overcome_crash_is_not_shown(cli: Cli, store: Store) -> None:
    """The last generation's is, for it may come again; not one of which others have come and gone since."""
    a_job(store, gen=3)
    store.append_ledger(JOB, Entry(at=50.0, id="crash.g1", event=Event.CRASH, gen=1, node=0))
    store.put(f"jobs/{JOB}/logs/0/1.log", b"ZeroDivisionError\n")
    assert "ZeroDivisionError" not in cli("status", "first").out
    store.append_ledger(JOB, Entry(at=60.0, id="crash.g2", event=Event.CRASH, gen=2, node=0))
    store.put(f"jobs/{JOB}/logs/0/2.log", b"RuntimeError: again\n")
    assert "generation 2 failed, node 0: RuntimeError: again" in cli("status", "first").out


def test_status_lists_unfinished_jobs_and_all_of_them_on_request(cli: Cli, store: Store) -> None:
    assert "no unfinished job in prod" in cli("status").out
    a_job(store, phase=Phase.DONE, outcome=Outcome.SUCCEEDED)
    store.clear_active(JOB)
    store.delete_name("first", JOB)
    store.put_tomb(JOB, 5.0)  # as the last round leaves it
    assert "no unfinished job" in cli("status").out
    assert "succeeded" in cli("status", "first").out
    assert json.loads(cli("status", "--json").out) == []
    out = cli("status", "--all").out
    assert "first" in out
    assert "succeeded" in out


def test_the_list_shows_owners_and_is_filtered(cli: Cli, store: Store) -> None:
    a_job(store)
    store.append_ledger(JOB, Entry(at=0.0, id="submitted", event=Event.SUBMITTED, by="ada"))
    a_job(store, job="bbbbbbbb", name="second", phase=Phase.HOLD, hold=Hold.PAUSE)
    assert "ada" in cli("status").out and "second" in cli("status").out
    assert [view["name"] for view in json.loads(cli("status", "--filter", "ADA training", "--json").out)] == ["first"]
    assert [view["user"] for view in json.loads(cli("status", "--filter", "on hold", "--json").out)] == [""]
    assert cli("status", "--filter", "nobody").out == "no job in prod matches nobody\n"
    assert cli("status", "first", "--filter", "ada").code == 2
    assert cli("status", "--watch").code == 2, "without a terminal"
