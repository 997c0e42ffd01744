"""`--json`: one document, or for streams one a line, and nothing else on standard output."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from spotkeeper.cli.stacks import reconcile
from spotkeeper.contract.allocation import Allocation, Grant
from spotkeeper.contract.ledger import Entry, Event
from spotkeeper.contract.record import Hold, Outcome, Phase
from spotkeeper.contract.stack import Model
from spotkeeper.contract.uploads import chunk_name
from spotkeeper.reconcile.store.store import Store
from spotkeeper.report.drill import DrillView, PhaseView
from spotkeeper.report.job.hold import HoldView
from spotkeeper.report.job.recovery import Recovery
from spotkeeper.report.job.view import JobView, NodeView, Site
from spotkeeper.report.money.account import Account, AttemptLine
from spotkeeper_agent.launcher.spool import packed
from tests.cli.conftest import Cli, Done
from tests.cli.records import JOB, a_job

# What a process may print: quotes, a NUL, a colour, a byte that is no UTF-8, no end of line.
LOG = b'say "hi"\n\x00\x1b[31mred\x1b[0m \xff \xe2\x82\xac\\\ncut of'
TEXT = LOG.decode("utf-8", "replace")


def document(done: Done, code: int = 0) -> Any:
    assert done.code == code, done.err
    return json.loads(done.out)


@pytest.fixture
def ended(store: Store) -> Store:
    a_job(store, phase=Phase.DONE, outcome=Outcome.SUCCEEDED, reason="all processes exited with 0")
    store.append_ledger(JOB, Entry(at=1.0, id="a", event=Event.SUBMITTED))
    store.append_ledger(JOB, Entry(at=2.0, id="b", event=Event.END, cause="succeeded", detail='"quoted"\n'))
    store.put(chunk_name(JOB, 0, 2, 5000), packed(5.0, b"1e", LOG))
    return store


@pytest.mark.parametrize("more", [(), ("--follow",)])
def test_logs_are_one_document_per_line(cli: Cli, ended: Store, more: tuple[str, ...]) -> None:
    done = cli("logs", "first", "--json", *more)
    assert (done.code, done.err) == (0, "")
    told = [json.loads(line) for line in done.out.split("\n")[:-1]]
    assert "\n".join(one.pop("text") for one in told) == TEXT
    assert told == [{"at": 5000, "node": 0, "gen": 2, "source": "stderr", "local_rank": 1}] * len(told)


@pytest.mark.parametrize("more", [(), ("--follow",)])
def test_events_are_one_document_per_line(cli: Cli, ended: Store, more: tuple[str, ...]) -> None:
    done = cli("events", "first", "--json", *more)
    assert (done.code, done.err) == (0, "")
    assert [json.loads(line)["event"] for line in done.out.splitlines()] == ["submitted", "end"]


def test_watch(cli: Cli, ended: Store) -> None:
    done = cli("watch", "first", "--json")
    assert (done.code, done.err) == (0, "")
    *events, view = [json.loads(line) for line in done.out.split("\n")[:-1]]
    assert [event["event"] for event in events] == ["submitted", "end"]
    assert view["outcome"] == "succeeded"


def test_json_documents_have_every_field(cli: Cli, store: Store) -> None:
    """A program that reads `.preemptions` of a job that had none is to find 0, and no hole."""
    a_job(store)
    intent = Entry(0.0, "i", Event.INTENT, node=0, attempt=1, pool="workers", zone="us-central1-a", model=Model.SPOT)
    store.append_ledger(JOB, intent)
    view = document(cli("status", "first", "--json"))
    account = document(cli("report", "first", "--json"))
    assert set(view) == set(JobView.__struct_fields__) and set(view["site"]) == set(Site.__struct_fields__)
    assert all(set(node) == set(NodeView.__struct_fields__) for node in view["nodes"])
    assert set(account) == set(Account.__struct_fields__)
    assert [set(line) for line in account["attempts"]] == [set(AttemptLine.__struct_fields__)]
    for view_of_a_part in (HoldView, Recovery, DrillView, PhaseView):
        assert not view_of_a_part.__struct_config__.omit_defaults


def test_submit_with_watch_prints_watchs_json(cli: Cli, store: Store, folder: Path) -> None:
    job = document(cli("submit", folder / "job.yaml", "--json"))["job"]
    held = store.read_record(job)
    assert held is not None
    over = msgspec.structs.replace(held.value, phase=Phase.HOLD, hold=Hold.FAILURE, hold_ends=9e9, nonce="n2")
    assert store.cas_record(over, held.token)
    done = cli("submit", folder / "job.yaml", "--watch", "--json")
    *events, view = [json.loads(line) for line in done.out.splitlines()]
    assert (done.code, [event["event"] for event in events], view["phase"]) == (1, ["submitted"], "hold")


def test_render_of_a_stack_and_of_a_job(cli: Cli, folder: Path) -> None:
    stack = document(cli("render", "--json"))
    job = document(cli("render", folder / "job.yaml", "--json"))
    assert [one["name"] for one in (*stack, *job)] == ["startup-script", "shutdown-script", "command", "environment"]
    assert all(one["text"] for one in (*stack, *job))


@pytest.mark.parametrize("failed", [(), (JOB,)])
def test_reconcile(cli: Cli, store: Store, monkeypatch: pytest.MonkeyPatch, failed: tuple[str, ...]) -> None:
    """A round that was cut off is told in the document, and is no success."""
    monkeypatch.setattr(reconcile, "tick", lambda target: reconcile.ShellTick(2, ("orphaned",), failed))
    done = cli("reconcile", "--once", "--json")
    found = document(done, code=1 if failed else 0)
    assert (found["jobs"], found["orphans"], found["failed"]) == (2, ["orphaned"], list(failed))
    assert ("rounds failed: abcdefgh" in done.err) == bool(failed)


def test_repair(cli: Cli, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Allocation(3, "n", (Grant(JOB, 0, 1, "slot:workers"),))
    monkeypatch.setattr(reconcile, "repair_allocation", lambda target: made)
    assert document(cli("repair", "allocation", "--json"))["grants"][0]["job"] == JOB


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (("logs", "first", "--node", "9"), 3),
        (("logs", "first", "--generation", "9"), 3),
        (("logs", "first", "--node", "9", "--follow"), 3),
        (("watch", "nobody"), 3),
        (("render", "absent.yaml"), 2),
        (("render", "Pulumi.absent.yaml"), 2),
        (("reconcile",), 2),
        (("reconcile", "--once"), 1),
        (("repair", "record"), 2),
        (("repair", "allocation"), 1),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_an_error_leaves_standard_output_empty(cli: Cli, ended: Store, argv: tuple[str, ...], code: int) -> None:
    """Nobody is logged in here, so the cloud does not answer."""
    done = cli(*argv, "--json")
    assert (done.code, done.out) == (code, "")
    assert done.err.startswith("error: ")
