"""``spotkeeper report``: its forms of output, and who a job is of."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from spotkeeper.client.errors import Exit
from spotkeeper.contract.ledger import Entry, Event
from spotkeeper.contract.record import Outcome, Phase
from spotkeeper.contract.stack import Model
from spotkeeper.reconcile.store.store import Store
from tests.cli.conftest import Cli
from tests.cli.records import JOB, a_job

A = "us-central1-a"


@pytest.fixture
def ended(store: Store) -> Store:
    """One machine for an hour, of which a minute was its boot; and one that never joined."""
    a_job(store, phase=Phase.DONE, outcome=Outcome.SUCCEEDED, reason="all processes exited with 0")
    where = {"pool": "workers", "zone": A, "model": Model.SPOT, "price": 1.0}
    for entry in (
        Entry(at=0.0, id="submitted.job", event=Event.SUBMITTED, by="ada"),
        Entry(at=0.0, id="i1", event=Event.INTENT, node=0, attempt=1, cause="start", **where),
        Entry(at=0.0, id="i2", event=Event.INTENT, node=1, attempt=1, cause="start", **where),
        Entry(at=60.0, id="a1", event=Event.ADMITTED, node=0, attempt=1, started=0.0),
        Entry(at=60.0, id="g1", event=Event.GENERATION, gen=1),
        Entry(at=500.0, id="l2", event=Event.LOSS, node=1, attempt=1, cause="never joined"),
        Entry(at=520.0, id="x2", event=Event.GONE, node=1, attempt=1, ended=510.0),
        Entry(at=3600.0, id="end", event=Event.END, cause="succeeded"),
        Entry(at=3620.0, id="x1", event=Event.GONE, node=0, attempt=1, ended=3600.0),
        Entry(at=3620.0, id="done", event=Event.DONE),
    ):
        store.append_ledger(JOB, entry)
    store.put_tomb(JOB, 3620.0)
    return store


def test_the_account_of_a_job(cli: Cli, ended: Store) -> None:
    view = json.loads(cli("report", "first", "--json").out)
    assert (view["user"], view["never_joined"]) == ("ada", 1)
    assert view["goodput"] == pytest.approx(3540 / (3600 + 510))
    assert [(line["node"], line["ended"], round(line["usd"], 4)) for line in view["attempts"]] == [
        (0, "succeeded", 1.0),
        (1, "never joined", round(510 / 3600, 4)),
    ]
    text = cli("report", "first").out
    assert "training was never interrupted; 1 machine never joined" in text and "submitted by ada" in text
    rows = list(csv.DictReader(io.StringIO(cli("report", "first", "--csv").out)))
    assert [row["ended"] for row in rows] == ["succeeded", "never joined"]


def test_the_totals_of_a_stack(cli: Cli, ended: Store) -> None:
    sums = json.loads(cli("report", "--all", "--json").out)
    assert [row["key"] for row in sums["users"]] == ["ada"]
    assert [row["key"] for row in sums["months"]] == ["1970-01"]
    assert sums["total"]["usd"] == pytest.approx(1.0 + 510 / 3600)
    assert "first" in cli("report", "--all").out
    rows = list(csv.DictReader(io.StringIO(cli("report", "--all", "--csv").out)))
    assert [row["by"] for row in rows] == ["job", "user", "month"]


def test_a_stack_without_jobs_has_no_totals(cli: Cli, store: Store) -> None:
    assert "has had no jobs" in cli("report", "--all").out
    assert json.loads(cli("report", "--all", "--json").out)["total"]["usd"] == 0


@pytest.mark.parametrize("argv", [(), ("first", "--all"), ("first", "--csv", "--json")])
def test_conflicting_options_are_refused(cli: Cli, ended: Store, argv: tuple[str, ...]) -> None:
    done = cli("report", *argv)
    assert (done.code, done.out) == (Exit.USAGE, "")


def test_the_submitter_is_recorded(cli: Cli, store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGNAME", "grace")
    job = json.loads(cli("submit", folder / "job.yaml", "--json").out)["job"]
    assert json.loads(cli("report", job, "--json").out)["user"] == "grace"


def test_the_page_of_a_job_as_a_file(cli: Cli, ended: Store, tmp_path: Path) -> None:
    file = tmp_path / "first.html"
    assert cli("report", "first", "--html", file).out == f"first ({JOB}): wrote {file}\n"
    text = file.read_text("utf-8")
    assert " · ada · as of " in text and "$1.14" in text and "<script" not in text
    assert cli("report", "--all", "--html", file).code == Exit.USAGE
    assert cli("report", "first", "--html", tmp_path / "no" / "file").code == Exit.FAILED
