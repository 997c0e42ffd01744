"""`queue`, and what `status`, `watch` and `submit` say of a job that waits in the queue."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from spotkeeper.cli.jobs import status
from spotkeeper.cli.jobs.queue import told_once
from spotkeeper.client import find_target, lookup
from spotkeeper.contract.allocation import Allocation, Claim, Grant, Stop
from spotkeeper.contract.job import JobRequest
from spotkeeper.contract.record import Hold, Node, Phase
from spotkeeper.contract.stack import TeamState
from spotkeeper.reconcile.store import paths
from spotkeeper.reconcile.store.documents import Versioned
from spotkeeper.reconcile.store.store import Store
from spotkeeper.report.job.waiting import WaitingView
from spotkeeper.report.queue import SHOWN, QueueView, ReservedView, TeamView
from tests.cli.conftest import Cli
from tests.cli.records import JOB, a_job
from tests.contract.samples import STACK, pool

FIRST, PAUSED = "wwwwwww1", "wwwwwww2"
WAITS = Node()
NOW = time.time()


@pytest.fixture
def queued(store: Store) -> Store:
    """`first` trains on all four machines; `gpt` waits, and so does `old`, whose machines went to `first`."""
    workers = (pool("workers", max_machines=4),)
    stack = replace(STACK, pools=workers, max_machines=None, teams=(TeamState("nlp"), TeamState("vision")))
    store.put("stack/pools.json", msgspec.json.encode(stack))
    a_job(store)
    a_job(store, job=FIRST, name="gpt", nodes=(WAITS,) * 2, members=(), gen=0, reason="waiting in the queue: full")
    a_job(store, job=PAUSED, name="old", phase=Phase.HOLD, hold=Hold.QUEUE, nodes=(WAITS,), members=())
    claims = (
        Claim(JOB, 4, 4, 0.0, team="vision", reserved=4, started=1.0, stop=Stop.NEVER, ends=NOW + 7000.0),
        Claim(FIRST, 2, 2, NOW - 7200.0, team="nlp", waits=NOW - 7200.0, stop=Stop.SAVED),
        Claim(PAUSED, 1, 1, NOW - 60.0, team="vision", waits=NOW - 60.0, stop=Stop.SAVED, whom=JOB),
    )
    written(store, *claims)
    return store


def written(store: Store, *claims: Claim) -> None:
    grants = tuple(Grant(one.job, node, 1, "slot:workers") for one in claims for node in range(one.reserved))
    replaced(store, Allocation(1, "n", grants, claims))


def replaced(store: Store, allocation: Allocation) -> None:
    old = store.read_allocation()
    new = replace(allocation, ver=old.value.ver + 1, nonce=f"n{old.value.ver}")
    assert store.cas_allocation(new, old.token) is not None


def test_three_tables_tell_who_waits_who_runs_and_what_teams_have(cli: Cli, queued: Store) -> None:
    done = cli("queue")
    assert done.code == 0, done.err
    lines = [" ".join(line.split()) for line in done.out.splitlines()]
    assert lines[0] == "waiting: 2" and "running: 1, on 4 of 4 machines" in lines and "teams" in lines
    (gpt,) = (line for line in lines if line.startswith("1st gpt nlp"))
    assert "needs 2 machines, none is free" in gpt
    (old,) = (line for line in lines if line.startswith("2nd old vision"))
    assert "behind gpt; its machines went to first" in old
    (first,) = (line for line in lines if line.startswith("first vision normal 4"))
    assert "team borrows from nlp" in first
    assert any(line.startswith("nlp 1 0 2 1") for line in lines), lines


def test_json_has_every_field_and_names(cli: Cli, queued: Store) -> None:
    found = json.loads(cli("queue", "--json").out)
    assert set(found) == set(QueueView.__struct_fields__)
    for part, kind in (("waiting", WaitingView), ("running", ReservedView), ("teams", TeamView)):
        assert all(set(one) == set(kind.__struct_fields__) for one in found[part])
    assert [one["name"] for one in found["waiting"]] == ["gpt", "old"]
    assert found["running"][0]["borrows_from"] == ["nlp"]


def test_one_team(cli: Cli, queued: Store) -> None:
    found = json.loads(cli("queue", "--team", "vision", "--json").out)
    assert [(one["name"], one["position"]) for one in found["waiting"]] == [("old", 2)]
    done = cli("queue", "--team", "visoin")
    assert (done.code, done.out) == (3, "")
    assert done.err.splitlines() == [
        "error: visoin: no such team (did you mean vision?)",
        "  try: its teams: nlp, vision",
    ]


def test_an_empty_queue_and_an_unreadable_allocation(cli: Cli, store: Store) -> None:
    assert cli("queue").out.splitlines()[0] == "no job waits"
    store.put(paths.ALLOCATION, b"{")
    done = cli("queue")
    assert (done.code, done.out) == (1, "") and "spotkeeper repair allocation" in done.err


def test_only_records_of_shown_jobs_are_read(cli: Cli, queued: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    many = [Claim(f"many{n:04}", 1, 1, NOW - n, waits=NOW - n) for n in range(300)]
    written(queued, Claim(JOB, 4, 4, 0.0, team="vision", reserved=4, started=1.0, stop=Stop.NEVER), *many)
    read: list[str] = []
    whole = Store.read_record
    monkeypatch.setattr(Store, "read_record", lambda self, job: read.append(job) or whole(self, job))
    done = cli("queue")
    assert len(read) == len(set(read)) == SHOWN + 1
    assert done.out.splitlines()[-1] == "280 more wait: spotkeeper queue --all"
    read.clear()
    assert len(json.loads(cli("queue", "--all", "--json").out)["waiting"]) == 300 and len(read) == 301


def test_status_tells_place_reason_and_expected_start(cli: Cli, queued: Store) -> None:
    lines = cli("status", "gpt").out.splitlines()
    reason = "needs 2 machines, none is free; first is protected to its end (a stop would lose work)"
    assert lines[0].startswith(f"gpt ({FIRST})  queued (1st): {reason}  generation 0")
    assert " for 2 machines (team nlp, priority " in lines[1] and "expected start: " in lines[1]
    view = json.loads(cli("status", "gpt", "--json").out)
    assert (view["queue"]["position"], view["queue"]["job"]) == (1, FIRST)
    assert json.loads(cli("status", "first", "--json").out)["queue"] is None


def test_a_job_that_the_queue_paused_needs_no_resume(cli: Cli, queued: Store) -> None:
    out = cli("status", "old").out
    assert "queued (2nd): behind gpt; its machines went to first" in out
    assert "it goes on by itself; keep it from that:  spotkeeper pause old" in out
    assert "spotkeeper cancel old" in out and "spotkeeper resume" not in out


def test_the_list_of_jobs_has_places(cli: Cli, queued: Store) -> None:
    lines = cli("status").out.splitlines()
    assert any("gpt" in line and "queued (1st)" in line for line in lines)
    assert any("old" in line and "queued (2nd)" in line for line in lines)
    assert [line["queue"] and line["queue"]["position"] for line in json.loads(cli("status", "--json").out)] == [
        *(None, 1, 2),
    ]
    assert "old" in cli("status", "--filter", "queued went").out


def test_without_jobs_that_may_wait_no_allocation_is_read(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    record = a_job(store)
    monkeypatch.setattr(Store, "read_allocation", lambda _: pytest.fail("read"))
    assert status._queue(store, STACK, 0.0, record) is None


def test_the_next_job_says_whose_machines_leave(cli: Cli, queued: Store) -> None:
    victim = Claim(JOB, 2, 4, 0.0, reserved=2, started=1.0, whom=FIRST)
    grants = tuple(Grant(JOB, node, 1, "slot:workers") for node in range(4))
    allocation = Allocation(1, "n", grants, (victim, Claim(FIRST, 2, 2, 0.0, reserved=2)))
    replaced(queued, allocation)
    assert f"gpt ({FIRST})  starting (takes the room of first, whose machines leave)" in cli("status", "gpt").out


def test_watch_tells_a_place_again_only_when_it_changes(
    cli: Cli, queued: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []

    def wait(_: float) -> None:
        looks.append(1)
        read = queued.read_record(PAUSED)
        assert read is not None
        if len(looks) == 2:
            allocation = queued.read_allocation().value
            claims = tuple(claim for claim in allocation.claims if claim.job != FIRST)
            replaced(queued, replace(allocation, claims=claims))
        elif len(looks) == 3:
            assert queued.cas_record(replace(read.value, phase=Phase.DONE, hold=None, nonce="m", ver=9), read.token)

    whole = status.watch
    monkeypatch.setattr(status, "watch", lambda read, as_json, verbose: whole(read, as_json, wait, verbose=verbose))
    out = cli("watch", "old").out
    assert len(looks) == 3
    assert [line for line in out.splitlines() if "queued" in line] == [
        f"old ({PAUSED})  queued (2nd): behind gpt; its machines went to first",
        f"old ({PAUSED})  queued (1st): needs 1 machine, none is free; its machines went to first",
    ]


def test_submit_says_what_the_job_waits_for(
    cli: Cli, queued: Store, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def notified(target: object, store: Store, job: str) -> bool:
        allocation = store.read_allocation().value
        claim = Claim(job, 1, 1, NOW, team="nlp", waits=NOW)
        written(store, *allocation.claims, claim)
        reads.clear()
        return True

    reads: list[Versioned[Allocation]] = []
    whole = Store.read_allocation
    monkeypatch.setattr(Store, "read_allocation", lambda self: reads.append(found := whole(self)) or found)
    monkeypatch.setattr("spotkeeper.client.submit.notify", notified)
    (folder / "job.yaml").write_text("name: late\ncommand: [train.py]\nsource: code\n")
    lines = cli("submit", folder / "job.yaml").out.splitlines()
    assert len(reads) == 1
    assert lines[0].startswith("late: submitted, job ")
    assert lines[1] == "queued (2nd): behind gpt" and lines[2].startswith("has waited ")
    assert lines[3] == "follow it: spotkeeper watch late"
    assert json.loads(cli("submit", folder / "job.yaml", "--json").out)["queue"]["position"] == 2


def test_submitting_a_job_that_the_queue_paused_again_offers_no_resume(cli: Cli, store: Store, folder: Path) -> None:
    assert cli("submit", folder / "job.yaml").code == 0
    job = store.read_name("first")
    read = store.read_record(job or "")
    assert read is not None
    assert store.cas_record(replace(read.value, phase=Phase.HOLD, hold=Hold.QUEUE, nonce="m", ver=2), read.token)
    out = cli("submit", folder / "job.yaml").out
    assert "runs already" in out and "resume" not in out


@pytest.mark.parametrize("state", [{"phase": Phase.HOLD, "hold": Hold.QUEUE}, {"recalled": True, "pause": "recalled"}])
def test_a_job_in_the_queue_can_be_paused_and_needs_no_resume(cli: Cli, store: Store, state: dict[str, object]) -> None:
    record = a_job(store, **state)
    assert cli("pause", "first").code == 0
    (request,) = store.list_requests(JOB)
    store.delete_request(JOB, request.id)
    done = cli("resume", "first")
    assert done.code == 4 and "waits in the queue, and goes on by itself" in done.err
    files = JobRequest("resume-1", lookup.RequestKind.RESUME, 0.0, spec_sha256="0" * 64)
    assert lookup.send_request(store, record, files) is files, "other files are taken"


def test_a_command_that_waits_for_a_job_says_once_why_the_job_waits_in_the_queue(
    queued: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    slept: list[float] = []
    target = find_target(None)
    wait = told_once(target, queued, FIRST, slept.append)
    wait(1.0)
    wait(2.0)
    told_once(target, queued, JOB, slept.append)(3.0)
    assert slept == [1.0, 2.0, 3.0]
    assert "gpt (wwwwwww1): queued (1st): needs 2 machines, none is free" in (err := capsys.readouterr().err)
    assert err.count("\n") == 2 and re.search(r"has waited 2h\d\dm for 2 machines \(team nlp, priority normal\)", err)
