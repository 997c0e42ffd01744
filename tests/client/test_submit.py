"""Submitting: idempotent by content, refused on a clash, finished after a crash at any point."""

from __future__ import annotations

import io
import json
import tarfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from spotkeeper.client.submit import PORT_BLOCK, PORT_END, PORT_FIRST, free_port_block
from spotkeeper.contract.cloud import Action, Listing, Result, ResultKind
from spotkeeper.contract.ledger import Entry, Event
from spotkeeper.contract.record import Hold, Outcome, Phase, Record
from spotkeeper.reconcile.controller import tick
from spotkeeper.reconcile.controller.reconcile_job import RoundOptions
from spotkeeper.reconcile.store.objects import StoreError
from spotkeeper.reconcile.store.store import Store
from tests.cli.conftest import STACK, Cli


def submitted(cli: Cli, file: Path) -> str:
    done = cli("submit", file, "--json")
    assert done.code == 0, done.err
    return str(json.loads(done.out)["job"])


def test_a_submission_writes_its_objects_in_order(cli: Cli, store: Store, folder: Path) -> None:
    job = submitted(cli, folder / "job.yaml")
    held = store.read_record(job)
    assert held is not None
    record = held.value
    assert (record.name, record.phase, record.gen, len(record.nodes)) == ("first", Phase.RUN, 0, 2)
    assert store.active_jobs() == (job,)
    assert store.read_name("first") == job
    spec = store.read_spec(job)
    assert spec is not None and spec.source_sha256 is not None
    data = store.get(f"jobs/{job}/source/{spec.source_sha256}")
    assert data is not None
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        assert tar.getnames() == ["train.py"]
    assert [entry.event for entry in record.outbox] == [Event.SUBMITTED], "the function writes the ledger"
    assert store.list_ledger(job) == ()


def test_resubmitting_the_same_content_returns_the_same_job(cli: Cli, store: Store, folder: Path) -> None:
    first = submitted(cli, folder / "job.yaml")
    (folder / "code" / "train.py").touch()  # times are no content
    done = cli("submit", folder / "job.yaml")
    assert done.code == 0
    assert f"first: runs already, job {first}" in done.out
    assert store.active_jobs() == (first,)


def test_other_content_under_the_name_of_a_running_job_is_refused(cli: Cli, store: Store, folder: Path) -> None:
    job = submitted(cli, folder / "job.yaml")
    (folder / "code" / "train.py").write_text("print(2)\n")
    done = cli("submit", folder / "job.yaml")
    assert done.code == 4
    assert done.err.splitlines() == [
        f"error: first: a job of this name runs already ({job}), with other content: source",
        "  try: give this job another `name`, or give the old job these files (spotkeeper pause first, then "
        "spotkeeper resume first JOB.YAML), or end it: spotkeeper cancel first",
    ]
    assert store.active_jobs() == (job,)


def test_a_held_job_is_returned_and_other_content_refused(cli: Cli, store: Store, folder: Path) -> None:
    job = submitted(cli, folder / "job.yaml")
    held = store.read_record(job)
    assert held is not None
    over = {"phase": Phase.HOLD, "hold": Hold.FAILURE, "reason": "node 0 exited with 93", "nonce": "n2"}
    over |= {"hold_ends": 9e9}
    assert store.cas_record(msgspec.structs.replace(held.value, **over), held.token)
    done = cli("submit", folder / "job.yaml")
    assert (done.code, done.out.splitlines()) == (
        0,
        [
            f"first: on hold (node 0 exited with 93), job {job}",
            "to resume it: spotkeeper resume first; to delete it and its checkpoints: spotkeeper cancel first",
        ],
    )
    told = json.loads(cli("submit", folder / "job.yaml", "--json").out)
    assert (told["new"], told["on_hold"]) == (False, "node 0 exited with 93")
    watched = cli("submit", folder / "job.yaml", "--watch")
    assert watched.code == 1 and "failed and is on hold" in watched.err

    (folder / "code" / "train.py").write_text("print(2)\n")
    done = cli("submit", folder / "job.yaml")
    assert done.code == 4
    assert done.err.splitlines() == [
        f"error: first: a job of this name is on hold because it failed ({job}), with other content: source",
        "  try: give this job another `name`, or give the old job these files (spotkeeper resume first JOB.YAML), "
        "or end it and delete its checkpoints: spotkeeper cancel first",
    ]


def test_the_name_of_a_finished_job_is_free(cli: Cli, store: Store, folder: Path) -> None:
    first = submitted(cli, folder / "job.yaml")
    held = store.read_record(first)
    assert held is not None
    over = msgspec.structs.replace(held.value, phase=Phase.DONE, outcome=Outcome.SUCCEEDED, nonce="n2")
    assert store.cas_record(over, held.token)
    second = submitted(cli, folder / "job.yaml")
    assert second != first
    assert store.read_name("first") == second


def before_the_record(patch: pytest.MonkeyPatch, what: Callable[[], object]) -> None:
    """A submission's last write, its record's, is late: that happens once before it."""
    real, todo = Store.create_record, [what]

    def late(self: Store, record: Record) -> bool:
        if todo:
            todo.pop()()
        return real(self, record)

    patch.setattr(Store, "create_record", late)


@contextmanager
def dying_at(verb: str) -> Iterator[None]:
    """The connection to the bucket ends with this call of it."""

    def dies(*_: object) -> None:
        raise StoreError("cut off")

    with pytest.MonkeyPatch.context() as cut:
        cut.setattr(Store, verb, dies)
        yield


@pytest.mark.parametrize("verb", ["put_spec", "put_source", "put_name", "set_active", "create_record"])
def test_resubmitting_completes_an_interrupted_submission(cli: Cli, store: Store, folder: Path, verb: str) -> None:
    with dying_at(verb):
        done = cli("submit", folder / "job.yaml")
    assert (done.code, done.err) == (1, "error: the bucket: cut off\n")
    job = submitted(cli, folder / "job.yaml")
    assert store.read_name("first") == job
    assert job in store.active_jobs()
    assert store.read_record(job) is not None
    _tick(store, tick.GIVEN_UP_S + 1.0)
    assert store.active_jobs() == (job,), "a day later, what is left of the one that was cut off is gone"
    assert folders(store) == {job} | done_records(store)


@pytest.mark.parametrize("verb", ["put_spec", "put_source", "put_name", "create_record"])
def test_an_unfinished_submission_is_deleted_after_a_day(cli: Cli, store: Store, folder: Path, verb: str) -> None:
    with dying_at(verb):
        assert cli("submit", folder / "job.yaml").code == 1
    (job,) = store.active_jobs()
    before = [store.list(folder) for folder in ("jobs/", "names/", "active/")]
    _tick(store, tick.GIVEN_UP_S - 100.0)
    assert [store.list(folder) for folder in ("jobs/", "names/", "active/")] == before, "it may still be finished"
    _tick(store, tick.GIVEN_UP_S + 100.0)
    assert store.list("jobs/") == (f"jobs/{job}/rec",), "the record of its end: a shell that wakes up finds it there"
    assert store.list("names/") == store.list("active/") == ()
    assert submitted(cli, folder / "job.yaml") != job


def test_a_submission_that_continues_after_being_given_up_runs_nothing(
    cli: Cli, store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before_the_record(monkeypatch, lambda: _tick(store, tick.GIVEN_UP_S + 100.0))
    done = cli("submit", folder / "job.yaml")
    assert done.code == 4
    assert store.active_jobs() == ()
    assert store.read_name("first") is None


def test_a_job_with_a_deleted_record_is_not_given_up(cli: Cli, store: Store, folder: Path) -> None:
    job = submitted(cli, folder / "job.yaml")
    store.append_ledger(job, Entry(at=2.0, id="g1", event=Event.GENERATION))
    store.delete(f"jobs/{job}/rec")
    before = store.list("jobs/")
    _tick(store, tick.GIVEN_UP_S + 100.0)
    assert store.list("jobs/") == before


class Nothing:
    """A cloud without anything in it, where all zones answer."""

    def list(self, stack: str) -> Listing:
        return Listing((), (), (), frozenset(STACK.zones()))

    def price_history(self, pool: str, deadline_s: float) -> None:
        return None

    def perform(self, action: Action, deadline_s: float) -> Result:
        return Result(action, ResultKind.CAPACITY)


class Later:
    """So many seconds from now."""

    scale = 1.0

    def __init__(self, seconds: float) -> None:
        self.at = time.time() + seconds

    def now(self) -> float:
        return self.at


def _tick(store: Store, later_s: float) -> None:
    tick.tick(store, Nothing(), Later(later_s), RoundOptions(settle_s=0.0, parallel=1))


def folders(store: Store) -> set[str]:
    return {path.split("/")[1] for path in store.list("jobs/")}


def done_records(store: Store) -> set[str]:
    """Jobs of which nothing is there but the record of their end."""
    jobs = folders(store)
    return {job for job in jobs if store.list(f"jobs/{job}/") == (f"jobs/{job}/rec",)}


def test_two_simultaneous_submissions_make_one_job(
    cli: Cli, store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other: list[str] = []
    with monkeypatch.context() as meanwhile:
        before_the_record(meanwhile, lambda: other.append(submitted(cli, folder / "job.yaml")))
        assert submitted(cli, folder / "job.yaml") == other[0]
    assert store.active_jobs() == (other[0],)


def test_a_job_that_is_cancelled_while_it_is_submitted_never_runs(
    cli: Cli, store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cancel comes after everything but the record: a record written after it would run, and have no name."""
    said: list[str] = []
    with monkeypatch.context() as meanwhile:
        before_the_record(meanwhile, lambda: said.append(cli("cancel", "first").out))
        done = cli("submit", folder / "job.yaml")
    assert said[0].endswith("cancelled its unfinished submission\n")
    assert done.code == 4
    assert "was cancelled meanwhile" in done.err
    _tick(store, 0.0)
    assert store.active_jobs() == ()
    assert store.read_name("first") is None
    assert submitted(cli, folder / "job.yaml") in store.active_jobs()


def test_a_wrong_job_file_writes_nothing(cli: Cli, store: Store, folder: Path) -> None:
    before = store.list("")
    (folder / "job.yaml").write_text("name: first\ncommand: [train.py]\nsource: cod\nnodes: 99\n")
    done = cli("submit", folder / "job.yaml")
    assert done.code == 2
    assert done.err.splitlines() == [
        "error: 2 problems:",
        '  job.yaml:3: source: "cod": no such folder (relative to the job file) (did you mean code?)',
        "  job.yaml:4: nodes: 99: is more machines than pools workers, always, gpus may have (7)",
    ]
    assert store.list("") == before


def test_a_wrong_job_file_is_reported_without_a_stack(
    cli: Cli, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("SPOTKEEPER_STACK", "SPOTKEEPER_BUCKET"):
        monkeypatch.delenv(name, raising=False)
    (folder / "job.yaml").write_text("name: First\ncommand: [train.py]\nsource: cod\n")
    done = cli("submit", folder / "job.yaml")
    assert done.code == 3
    head, first, second, third, remedy = done.err.splitlines()
    assert head == "error: 2 problems:"
    assert first.startswith('  job.yaml:1: name: "First"') and second.startswith('  job.yaml:3: source: "cod"')
    assert third.startswith("error: no stack") and remedy.startswith("  try: ")


def test_check_writes_nothing(cli: Cli, store: Store, folder: Path) -> None:
    before = store.list("")
    done = cli("submit", folder / "job.yaml", "--check")
    assert (done.code, done.out.strip()) == (0, f"{folder}/job.yaml: job file is valid (first, 1 file to send)")
    assert store.list("") == before


def test_a_stack_that_is_being_destroyed_refuses_jobs(cli: Cli, store: Store, folder: Path) -> None:
    store.put("stack/drain", b"")
    done = cli("submit", folder / "job.yaml")
    assert done.code == 4
    assert "is being destroyed" in done.err


def test_each_job_gets_its_own_port_block(cli: Cli, store: Store, folder: Path) -> None:
    bases = set()
    for name in ("one", "two", "three"):
        (folder / "job.yaml").write_text(f"name: {name}\ncommand: [train.py]\nsource: code\n")
        held = store.read_record(submitted(cli, folder / "job.yaml"))
        assert held is not None
        bases.add(held.value.port_base)
    assert len(bases) == 3


def test_port_blocks_are_below_the_ephemeral_range() -> None:
    used: list[int] = []
    while (base := free_port_block(used)) not in used:
        used.append(base)
        assert base % PORT_BLOCK == PORT_FIRST % PORT_BLOCK
        assert base + PORT_BLOCK <= PORT_END
    assert len(used) == 199


@pytest.mark.parametrize("harm", [b"{", b"\xff\xfe", b'{"v":2}', b"[]", b""])
def test_another_jobs_unreadable_record_blocks_no_submission(cli: Cli, store: Store, folder: Path, harm: bytes) -> None:
    broken = submitted(cli, folder / "job.yaml")
    store.put(f"jobs/{broken}/rec", harm)
    (folder / "job.yaml").write_text("name: second\ncommand: [train.py]\nsource: code\n")
    second = submitted(cli, folder / "job.yaml")
    done = cli("status")
    assert done.code == 0 and second in done.out and "second" in done.out
    assert f"{broken}: unreadable, so not reconciled: jobs/{broken}/rec" in done.err and "  try: " in done.err
    listed = json.loads(cli("status", "--json").out)
    assert [one["job"] for one in listed] == [second, broken]
    assert listed[1]["unreadable"].startswith(f"jobs/{broken}/rec: ") and listed[1]["remedy"]
    for argv in (("status", "first"), ("cancel", broken, "--yes"), ("submit", folder / "first.yaml")):
        (folder / "first.yaml").write_text("name: first\ncommand: [train.py]\nsource: code\nnodes: 2\n")
        done = cli(*argv)
        assert done.code == 1 and f"jobs/{broken}/rec" in done.err and "  try: " in done.err, argv
    assert store.get(f"jobs/{broken}/rec") == harm


def test_an_unreadable_allocation_or_stack_names_the_remedy(cli: Cli, store: Store, folder: Path) -> None:
    job = submitted(cli, folder / "job.yaml")
    store.put("stack/allocation", b"{")
    done = cli("status")
    assert done.code == 0 and job in done.out
    assert "stack/allocation: not a" in done.err and "no machine is created or deleted" in done.err
    assert "try: spotkeeper repair allocation" in done.err
    store.put("stack/pools.json", b'{"stack": 1}')
    done = cli("status")
    assert done.code == 0 and job in done.out
    assert "stack/pools.json: not a StackState" in done.err and "pulumi up --refresh" in done.err
    done = cli("submit", folder / "job.yaml")
    assert done.code == 1 and "pulumi up --refresh" in done.err


def test_only_the_allocation_can_be_repaired(cli: Cli, store: Store, folder: Path) -> None:
    submitted(cli, folder / "job.yaml")
    assert cli("repair", "record").code == 2
