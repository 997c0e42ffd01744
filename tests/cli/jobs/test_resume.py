"""``spotkeeper resume NAME JOB.YAML``: what is written, in which order, and what is refused before anything is."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest

from spotkeeper.contract.job import RequestKind
from spotkeeper.contract.record import Hold, Outcome, Phase, Record
from spotkeeper.reconcile.store.objects import StoreError
from spotkeeper.reconcile.store.store import Store
from tests.cli.conftest import Cli

HOLDS = {"phase": Phase.HOLD, "hold": Hold.FAILURE, "reason": "node 0 exited with 1", "hold_ends": 9e9}


def held(cli: Cli, store: Store, folder: Path, **over: Any) -> Record:
    """The record of a submitted job that holds, or is in another state."""
    job = json.loads(cli("submit", folder / "job.yaml", "--json").out)["job"]
    found = store.read_record(job)
    assert found is not None
    record = msgspec.structs.replace(found.value, nonce="n2", **{**HOLDS, **over})
    assert store.cas_record(record, found.token)
    return record


def edit(folder: Path, text: str = "") -> None:
    (folder / "code" / "train.py").write_text("print('corrected')\n")
    if text:
        (folder / "job.yaml").write_text(text)


def test_other_files_are_stored_by_hash_and_named_in_the_request(cli: Cli, store: Store, folder: Path) -> None:
    record = held(cli, store, folder)
    submitted = store.read_spec(record.job)
    edit(folder, "name: first\ncommand: [train.py, --lr, '0.1']\nsource: code\nnodes: 2\n")
    done = cli("resume", "first", folder / "job.yaml")
    assert (done.code, done.out) == (
        0,
        f"first ({record.job}): requested: resume with other files (command, source)\n",
    )
    (request,) = store.list_requests(record.job)
    assert request.kind is RequestKind.RESUME and request.spec_sha256 is not None
    spec = store.read_spec(record.job, request.spec_sha256)
    assert spec is not None and spec.command == ("train.py", "--lr", "0.1")
    assert spec.source_sha256 is not None
    assert b"corrected" in (store.get(f"jobs/{record.job}/source/{spec.source_sha256}") or b"")
    assert store.read_spec(record.job) == submitted, "what was submitted stays"
    after = store.read_record(record.job)
    assert after is not None and after.value == record, "only reconcile writes the record"
    assert "a resume is requested" in cli("status", "first").out
    told = json.loads(cli("resume", record.job, folder / "job.yaml", "--json").out)
    assert (told["request"], told["changed"]) == ("resume", ["command", "source"])


def test_a_resumed_jobs_deadline_counts_from_its_submission(cli: Cli, store: Store, folder: Path) -> None:
    now = time.time()
    held(cli, store, folder, created=now - 30 * 3600)
    due = datetime.fromtimestamp(now + 15 * 3600, UTC).strftime("%Y-%m-%dT%H:%MZ")
    for deadline, code in ((due, 0), ("45h", 0), ("29h", 2), ("20h", 2)):
        work = "40h" if code == 0 else "10h"
        edit(folder, f"name: first\ncommand: [train.py]\nsource: code\nnodes: 2\nwork: {work}\ndeadline: {deadline}\n")
        done = cli("resume", "first", folder / "job.yaml")
        assert done.code == code, (deadline, done.err)
        assert ("counted from the job's submission, has passed" in done.err) == bool(code)


def test_unchanged_files_are_a_plain_resume(cli: Cli, store: Store, folder: Path) -> None:
    record = held(cli, store, folder)
    before = store.list("")
    done = cli("resume", "first", folder / "job.yaml")
    assert (done.code, done.out) == (0, f"first ({record.job}): requested: resume; its files are unchanged\n")
    (request,) = store.list_requests(record.job)
    assert request.spec_sha256 is None
    assert set(store.list("")) - set(before) == {f"jobs/{record.job}/requests/{request.id}"}


def test_a_paused_job_accepts_other_files(cli: Cli, store: Store, folder: Path) -> None:
    record = held(cli, store, folder, hold=Hold.PAUSE, reason="paused", hold_ends=None)
    edit(folder)
    assert "with other files (source)" in cli("resume", "first", folder / "job.yaml").out
    assert store.list_requests(record.job)[0].spec_sha256 is not None


@pytest.mark.parametrize(
    ("over", "told", "remedy"),
    [
        (
            {"phase": Phase.RUN, "hold": None},
            "is running, and only a job on hold accepts other files",
            "spotkeeper pause first, then spotkeeper resume first JOB.YAML",
        ),
        (
            {"phase": Phase.RUN, "hold": None, "pause": "paused by me"},
            "is not on hold yet: paused by me",
            "wait until `spotkeeper status` says that it is on hold",
        ),
        ({"phase": Phase.END, "hold": None, "outcome": Outcome.CANCELLED}, "is over: cancelled", ""),
    ],
)
def test_a_running_job_accepts_no_other_files(
    cli: Cli, store: Store, folder: Path, over: dict[str, Any], told: str, remedy: str
) -> None:
    record = held(cli, store, folder, **over)
    edit(folder)
    before = store.list("")
    done = cli("resume", "first", folder / "job.yaml")
    assert done.code == 4
    assert done.err.splitlines()[0] == f"error: first ({record.job}) {told}"
    assert done.err.splitlines()[1:] == ([f"  try: {remedy}"] if remedy else [])
    assert store.list("") == before


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("name: first\nnodes: 1\n", "nodes: cannot change, since the job has a disk for each present node"),
        ("name: other\nnodes: 2\n", "name: the job's name is first, the file says other"),
        ("name: first\nnodes: 2\nspread: true\n", "spread:"),
        ("name: first\nnodes: 2\nstatic: never\n", "static machines, since checkpoints stay"),
        ("name: first\nnodes: 2\ncheckpoint: {replicated: false}\n", "checkpoint.replicated:"),
    ],
)
def test_changes_that_do_not_fit_the_disks_are_refused_before_any_write(
    cli: Cli, store: Store, folder: Path, text: str, why: str
) -> None:
    record = held(cli, store, folder)
    edit(folder, text + "command: [train.py]\nsource: code\n")
    before = store.list("")
    done = cli("resume", "first", folder / "job.yaml")
    assert done.code == 4 and f"first ({record.job}) cannot resume with this job file: " in done.err
    assert why in done.err and "submit the file under another name" in done.err
    assert store.list("") == before


def test_problems_of_a_job_file_have_line_numbers(cli: Cli, store: Store, folder: Path) -> None:
    held(cli, store, folder)
    edit(folder, "name: first\ncommand: [trane.py]\nsource: code\nnodes: 2\n")
    before = store.list("")
    done = cli("resume", "first", folder / "job.yaml")
    assert done.code == 2 and "error: job.yaml:2: command[0]" in done.err and "did you mean train.py?" in done.err
    assert store.list("") == before


def test_a_problem_names_the_file_as_the_user_did(
    cli: Cli, store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit(folder, "name: first\ncommand: [trane.py]\nsource: code\nnodes: 2\n")
    monkeypatch.chdir(folder.parent)
    assert "error: work/job.yaml:2: command[0]" in cli("submit", Path("work/job.yaml")).err, "one of several job.yaml"


@pytest.mark.parametrize("verb", ["put_source", "put_spec", "put_request"])
def test_an_interrupted_resume_changes_nothing_and_can_be_repeated(
    cli: Cli, store: Store, folder: Path, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = held(cli, store, folder)
    edit(folder)

    def dies(*args: Any) -> Any:
        raise StoreError("cut off")

    with monkeypatch.context() as cut:
        cut.setattr(Store, verb, dies)
        done = cli("resume", "first", folder / "job.yaml")
    assert (done.code, done.err) == (1, "error: the bucket: cut off\n")
    after = store.read_record(record.job)
    assert after is not None and after.value == record and store.list_requests(record.job) == ()
    assert cli("resume", "first", folder / "job.yaml").code == 0
    (request,) = store.list_requests(record.job)
    assert request.spec_sha256 is not None and store.read_spec(record.job, request.spec_sha256) is not None


def test_submit_compares_with_the_resumed_files(cli: Cli, store: Store, folder: Path) -> None:
    record = held(cli, store, folder)
    old = (folder / "code" / "train.py").read_text()
    edit(folder)
    cli("resume", "first", folder / "job.yaml")
    (request,) = store.list_requests(record.job)
    found = store.read_record(record.job)
    assert found is not None and request.spec_sha256 is not None
    taken = msgspec.structs.replace(
        found.value, spec_sha256=request.spec_sha256, spec_replaced=True, phase=Phase.RUN, hold=None, nonce="n3"
    )
    assert store.cas_record(taken, found.token)
    assert "first: runs already" in cli("submit", folder / "job.yaml").out
    (folder / "code" / "train.py").write_text(old)
    done = cli("submit", folder / "job.yaml")
    assert done.code == 4 and "with other content: source" in done.err
