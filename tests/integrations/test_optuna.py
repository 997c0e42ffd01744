"""The objective, against a bucket in which each look at the job finds the next part of its story; the real Optuna."""

from __future__ import annotations

import base64
import json
import os
import socket
import subprocess
import sys
from array import array
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import optuna
import pytest
from msgspec.structs import replace
from optuna.storages import JournalStorage
from optuna.trial import TrialState

from spotkeeper.client.errors import CliError
from spotkeeper.client.target import Target
from spotkeeper.contract.job import RequestKind
from spotkeeper.contract.metrics import object_name
from spotkeeper.contract.names import JOB_NAME
from spotkeeper.contract.parse.problem import SpecError
from spotkeeper.contract.record import Hold, Outcome, Phase
from spotkeeper.integrations import programs
from spotkeeper.integrations.journal import SEGMENT
from spotkeeper.integrations.optuna import JOB, PROGRAM, BucketJournal, JobFailedError, SpotkeeperObjective
from spotkeeper.integrations.trial_job import TrialJob, job_name
from spotkeeper.reconcile.store import paths
from spotkeeper.reconcile.store.documents import CorruptError
from spotkeeper.reconcile.store.objects import UnavailableError
from spotkeeper.reconcile.store.objects_sqlite import SqliteObjects
from spotkeeper.reconcile.store.store import Store
from tests.cli.conftest import folder, store
from tests.integrations.conftest import Clients, Flaky

__all__ = ["folder", "store"]

Act = Callable[[], object]
DONE = {"phase": Phase.DONE, "outcome": Outcome.SUCCEEDED}


class Story:
    """A clock on which each wait is the next act."""

    scale = 1.0

    def __init__(self) -> None:
        self.acts: list[Act] = []

    def now(self) -> float:
        return 1000.0

    def wait(self, event: Event, virtual_s: float) -> bool:
        if not event.is_set():
            self.acts.pop(0)()
        return event.is_set()


class World:
    """A stack, and the newest job of the study ``lr`` in it."""

    def __init__(self, store: Store, bucket: str, file: Path) -> None:
        self.store, self.file, self.story = store, file, Story()
        self.target = Target("prod", bucket, self.story)  # type: ignore[arg-type]

    def study(self, **options: Any) -> optuna.Study:
        storage = JournalStorage(BucketJournal("lr", self.target))
        return optuna.create_study(study_name="lr", storage=storage, load_if_exists=True, **options)

    def objective(self, *acts: Act, **options: Any) -> SpotkeeperObjective:
        self.story.acts[:] = acts
        return SpotkeeperObjective(
            self.file, lambda trial: {"lr": trial.suggest_float("lr", 0.5, 2.0)}, target=self.target, **options
        )

    def job(self, trial: int = 0) -> str:
        job = self.store.read_name(f"lr-{trial}")
        assert job is not None
        return job

    def becomes(self, **fields: Any) -> Act:
        def act() -> None:
            held = self.store.read_record(self.job())
            assert held is not None
            value = replace(held.value, ver=held.value.ver + 1, nonce=f"n{held.value.ver}", **fields)
            assert self.store.cas_record(value, held.token)

        return act

    def reports(self, points: dict[int, float], name: str = "loss") -> Act:
        def column(kind: Any, values: Any) -> str:
            return base64.b64encode(array(kind, values).tobytes()).decode()

        curve = {"steps": column("q", points), "seconds": column("f", points), "values": column("d", points.values())}
        content = {"gen": 1, "ancestors": [], "began": 1000.0, "metrics": {name: curve}}
        return lambda: self.store.put(object_name(self.job(), 1), json.dumps(content).encode())

    def requests(self) -> list[RequestKind]:
        return [request.kind for request in self.store.list_requests(self.job())]


pytestmark = pytest.mark.filterwarnings("error:The reported value is ignored")  # Optuna's, of a point told twice


@pytest.fixture
def world(store: Store, folder: Path, tmp_path: Path) -> World:
    file = folder / "job.yaml"
    file.write_text('name: x\ncommand: [train.py, "--lr={lr}"]\nsource: code\nparams: {lr: 1.0, width: 8}\n')
    return World(store, f"sqlite://{tmp_path}/bucket.sqlite", file)


def test_a_trial_is_a_job_whose_metric_is_its_value(world: World) -> None:
    study = world.study()
    objective = world.objective(
        world.reports({0: 3.0}),
        world.reports({0: 3.0, 10: 2.0, 20: 1.5}),
        world.becomes(phase=Phase.END, outcome=Outcome.SUCCEEDED),  # its machine still sends the last points
        lambda: (world.reports({0: 3.0, 10: 2.0, 20: 1.5, 25: 1.0})(), world.becomes(**DONE)()),
    )
    study.optimize(objective, n_trials=1)
    (trial,) = study.trials
    assert trial.state is TrialState.COMPLETE and trial.value == 1.0
    assert trial.intermediate_values == {0: 3.0, 10: 2.0, 20: 1.5, 25: 1.0}
    assert trial.user_attrs == {PROGRAM: programs.own(), JOB: world.job()}
    spec = world.store.read_spec(world.job())
    lr = trial.params["lr"]
    assert spec is not None and spec.command == ("train.py", f"--lr={lr}") and spec.params == {"lr": lr, "width": 8}
    assert spec.source_sha256 is not None and world.requests() == []


def test_a_pruned_trials_job_is_cancelled(world: World) -> None:
    study = world.study(pruner=optuna.pruners.ThresholdPruner(upper=2.5))
    study.optimize(world.objective(world.reports({0: 1.0, 10: 3.0, 20: 1.0})), n_trials=1)
    (trial,) = study.trials
    assert trial.state is TrialState.PRUNED and trial.intermediate_values == {0: 1.0, 10: 3.0}
    assert world.requests() == [RequestKind.CANCEL]


def test_only_some_steps_are_reported_to_the_pruner(world: World) -> None:
    study = world.study()
    acts = [world.reports({step: float(step) for step in range(30)}), world.becomes(**DONE)]
    study.optimize(world.objective(*acts, every=10), n_trials=1)
    assert study.trials[0].intermediate_values == {0: 0.0, 10: 10.0, 20: 20.0} and study.best_value == 29.0


HELD = {"phase": Phase.HOLD, "hold": Hold.FAILURE, "reason": "node 0 exited with 93"}


@pytest.mark.parametrize(
    ("fields", "says", "cancels"),
    [
        (HELD, "failed: node 0 exited with 93; see spotkeeper logs", [RequestKind.CANCEL]),
        (HELD | {"hold": Hold.SPEND, "reason": "spent $5"}, "failed: spent \\$5", [RequestKind.CANCEL]),
        ({"phase": Phase.END, "outcome": Outcome.FAILED}, "failed; see spotkeeper logs", []),
        ({"phase": Phase.END, "outcome": Outcome.CANCELLED, "reason": "by lee"}, "cancelled: by lee", []),
        (DONE, r"reported no metric loss: it reported accuracy", []),
    ],
)
def test_a_job_without_a_value_fails_its_trial(
    world: World, fields: dict[str, Any], says: str, cancels: list[RequestKind]
) -> None:
    study = world.study()
    acts = [world.reports({0: 1.0}, "accuracy"), world.becomes(**fields)]
    with pytest.raises(JobFailedError, match=says) as caught:
        study.optimize(world.objective(*acts), n_trials=1)
    assert caught.value.job == world.job() and f"job lr-0 ({world.job()})" in str(caught.value)
    assert study.trials[0].state is TrialState.FAIL and world.requests() == cancels


def test_a_study_goes_on_after_a_failed_trial(world: World) -> None:
    study = world.study()
    objective = world.objective(world.becomes(**HELD), lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        study.optimize(objective, n_trials=2, catch=(JobFailedError,))
    assert [trial.state for trial in study.trials] == [TrialState.FAIL] * 2
    assert [request.kind for request in world.store.list_requests(world.job(1))] == [RequestKind.CANCEL], "no orphan"


def test_a_trial_waits_with_its_job_and_says_so_once(world: World, caplog: pytest.LogCaptureFixture) -> None:
    study, seen = world.study(), len(caplog.records)
    waits = {"phase": Phase.HOLD, "hold": Hold.PAUSE, "reason": "paused by lee"}
    acts = [world.becomes(**waits), lambda: None, world.becomes(phase=Phase.RUN, hold=None), world.reports({0: 1.0})]
    study.optimize(world.objective(*acts, world.becomes(**DONE)), n_trials=1)
    told = [record.getMessage() for record in caplog.records[seen:] if record.levelname == "WARNING"]
    assert told == [f"Trial 0, job {world.job()}, waits: paused by lee"] and study.best_value == 1.0


def test_a_laptop_that_is_offline_for_a_while_goes_on(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    real, lost = SqliteObjects.list, UnavailableError("offline")

    def gone(*_: object) -> None:
        raise lost

    study = world.study()
    acts = [
        world.reports({0: 1.0, 10: 0.5}),
        lambda: monkeypatch.setattr(SqliteObjects, "list", gone),
        lambda: None,
        lambda: (world.becomes(**DONE)(), monkeypatch.setattr(SqliteObjects, "list", real)),
    ]
    study.optimize(world.objective(*acts), n_trials=1)
    assert study.trials[0].state is TrialState.COMPLETE and study.best_value == 0.5


def interrupted() -> None:
    raise KeyboardInterrupt


def test_an_interrupted_trial_is_resumed_with_the_same_job(world: World) -> None:
    with pytest.raises(SystemExit, match=r"trial 0 is left running, and so is its job: resume\(study\)"):
        world.study().optimize(world.objective(world.reports({0: 2.0}), interrupted), n_trials=1)
    job, study = world.job(), world.study()
    assert [trial.state for trial in study.trials] == [TrialState.RUNNING]
    objective = world.objective(world.reports({0: 9.0, 10: 1.0}), world.becomes(**DONE))
    (done,) = objective.resume(study)
    assert done.state is TrialState.COMPLETE and done.value == 1.0
    assert done.intermediate_values == {0: 2.0, 10: 1.0}, "a point that was reported stays"
    assert done.user_attrs[JOB] == job and len(world.store.active_jobs()) == 1 and world.requests() == []
    assert objective.resume(study) == []


def test_a_program_killed_before_it_noted_the_job_finds_it_by_name(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(optuna.trial.Trial, "set_user_attr", lambda _, key, __: key == JOB and interrupted())
        with pytest.raises(SystemExit):
            world.study().optimize(world.objective(), n_trials=1)
    job, study = world.job(), world.study()
    (world.file.parent / "code" / "new.py").touch()  # another checkout: a submission would be refused
    (done,) = world.objective(world.reports({0: 1.0}), world.becomes(**DONE)).resume(study)
    assert done.user_attrs[JOB] == job and len(world.store.active_jobs()) == 1


def test_a_job_with_other_values_is_no_trials_job(world: World) -> None:
    world.study().optimize(world.objective(world.reports({0: 1.0}), world.becomes(**DONE)), n_trials=1)
    for values, found in (({"lr": 0.1}, None), ({}, world.job())):
        job = TrialJob.found(world.target, world.store, "lr-0", values)
        assert (job.job if job is not None else None) == found
    assert TrialJob.found(world.target, world.store, "lr-1", {}) is None


PROGRAM_OF_ITS_OWN = """
import os, sys
from spotkeeper.integrations import programs
name = programs.own()
if child := os.fork():
    os.waitpid(child, 0)
    print(name, flush=True)
    sys.stdin.read()
elif programs.own() != name and programs.lives(name):
    print("a fork is another", flush=True)
"""


def test_a_program_that_lives_on_this_machine_keeps_its_trials(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    study, command = world.study(), [sys.executable, "-c", PROGRAM_OF_ITS_OWN]
    env = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "a fork is another\n"
        name = other.stdout.readline().strip()
        study.ask().set_user_attr(PROGRAM, name)
        assert world.objective().resume(study) == []
        assert not programs.lives(f"elsewhere-{name}")
        other.kill()
    assert not programs.lives(name)
    (done,) = world.objective(world.reports({0: 1.0}), world.becomes(**DONE)).resume(study)
    assert (done.state, done.user_attrs[PROGRAM]) == (TrialState.COMPLETE, programs.own())


@pytest.mark.parametrize("name", [None, "", "x", "{host}/../../etc/passwd", "{host}/spotkeeper-program-none", "{own}"])
def test_nothing_else_is_a_living_program(name: str | None) -> None:
    name = name and name.format(host=socket.gethostname(), own=programs.own())
    assert not programs.lives(name)


def test_a_program_without_a_folder_for_temporary_files_has_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/proc/none")
    assert programs.own.__wrapped__() == ""


def test_a_job_that_cannot_be_noted_is_cancelled(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(_: object, key: str, __: object) -> None:
        if key == JOB:
            raise UnavailableError("offline")

    monkeypatch.setattr(optuna.trial.Trial, "set_user_attr", lost)
    with pytest.raises(UnavailableError):
        world.study().optimize(world.objective(), n_trials=1)
    assert world.requests() == [RequestKind.CANCEL]


def test_an_unreadable_record_fails_the_trial(world: World) -> None:
    with pytest.raises(CorruptError, match="/rec: not a"):
        world.study().optimize(world.objective(lambda: world.store.put(paths.record(world.job()), b"{")), n_trials=1)
    assert world.study().trials[0].state is TrialState.FAIL


@pytest.mark.parametrize(
    ("act", "state"), [(HELD, TrialState.FAIL), (DONE, TrialState.PRUNED)], ids=["failed", "pruned"]
)
def test_resumed_trials_end_as_others_do(world: World, act: dict[str, Any], state: TrialState) -> None:
    with pytest.raises(SystemExit):
        world.study().optimize(world.objective(interrupted), n_trials=1)
    study = world.study(pruner=optuna.pruners.ThresholdPruner(upper=2.5))
    points = {0: 1.0} if state is TrialState.FAIL else {0: 3.0}
    (done,) = world.objective(lambda: (world.reports(points)(), world.becomes(**act)())).resume(study)
    assert done.state is state and world.study().trials[0].state is state


def test_a_trial_that_another_program_ended_stays_as_it_is(world: World) -> None:
    with pytest.raises(SystemExit):
        world.study().optimize(world.objective(interrupted), n_trials=1)
    other = world.study()
    acts = [world.reports({0: 1.0}), lambda: (other.tell(0, 7.0), world.becomes(**DONE)())]
    (done,) = world.objective(*acts).resume(world.study())
    assert done.state is TrialState.COMPLETE and done.value == 7.0


def test_a_trial_that_another_program_ends_at_the_same_moment_stays_as_that_says(world: World, tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        world.study().optimize(world.objective(interrupted), n_trials=1)
    bucket, other = Flaky(SqliteObjects(tmp_path / "bucket.sqlite")), world.study()

    def ends() -> None:
        bucket.between = lambda: None
        other.tell(0, 7.0)

    def ended() -> None:
        world.becomes(**DONE)()
        bucket.between = ends

    (done,) = world.objective(world.reports({0: 1.0}), ended).resume(
        optuna.load_study(study_name="lr", storage=opened(bucket))
    )
    assert bucket.between is not ends and done.state is TrialState.COMPLETE and done.value == 7.0


def test_a_bad_job_file_fails_before_anything_is_submitted(world: World) -> None:
    world.file.write_text("name: x\ncommand: [train.py]\nsource: code\nnods: 2\n")
    with pytest.raises(SpecError, match="nods"):
        world.study().optimize(world.objective(), n_trials=1)
    assert world.store.active_jobs() == ()


def test_a_jobs_name_is_valid_and_one_for_each_trial() -> None:
    studies = ["lr", "lr-search", "LR search", "lr search", "2026", "Ünïcode", "", "-", "x" * 80, "x" * 81, "a/b"]
    names = [job_name(study, trial) for study in studies for trial in (0, 7, 10**6)]
    assert len(set(names)) == len(names) and all(JOB_NAME.match(name) for name in names)
    assert names[1] == "lr-7" and names[7].startswith("lr-search-") and names[7].endswith("-7")


# --- the storage


def opened(objects: Any) -> JournalStorage:
    return JournalStorage(BucketJournal("lr", Store(objects)))


def test_programs_share_a_study_and_claim_each_trial_once(clients: Clients) -> None:
    studies = [optuna.create_study(study_name="lr", storage=opened(clients()), load_if_exists=True) for _ in range(3)]
    for number in range(6):
        studies[0].enqueue_trial({"x": number / 10})

    def work(study: optuna.Study) -> None:
        study.optimize(lambda trial: trial.suggest_float("x", 0.0, 1.0), n_trials=4)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(work, studies))
    trials = optuna.load_study(study_name="lr", storage=opened(clients())).trials
    assert [trial.number for trial in trials] == list(range(12))
    assert {trial.state for trial in trials} == {TrialState.COMPLETE}
    values = Counter(trial.params["x"] for trial in trials)
    assert all(values[number / 10] == 1 for number in range(6))
    assert [trial.values for trial in studies[0].trials] == [trial.values for trial in trials]


def test_a_trial_costs_a_bounded_number_of_requests(tmp_path: Path) -> None:
    """Three values and five reports; docs/searches.md says how many."""
    bucket = Flaky(SqliteObjects(tmp_path / "bucket.db"))
    study = optuna.create_study(study_name="lr", storage=opened(bucket), pruner=optuna.pruners.MedianPruner())

    def train(trial: optuna.Trial) -> float:
        lr = sum(trial.suggest_float(name, 0.0, 1.0) for name in ("lr", "width", "momentum"))
        for step in range(5):
            trial.report(lr, step)
            trial.should_prune()
        trial.set_user_attr(PROGRAM, "host/spotkeeper-program-x")
        trial.set_user_attr(JOB, "abcd2345")
        return lr

    trials = 40
    bucket.calls.clear()
    study.optimize(train, n_trials=trials)
    whole = len(bucket.list("studies/lr/batches/")) // SEGMENT
    assert bucket.calls["create"] <= 13 * trials + whole and bucket.calls["get"] <= 14 * trials, bucket.calls
    counted = Flaky(bucket)
    assert len(optuna.load_study(study_name="lr", storage=opened(counted)).trials) == trials
    assert counted.calls["get"] <= whole + SEGMENT + 10 and counted.calls["list"] == 1


def test_a_journal_is_named_by_store_address_target_or_environment(
    store: Store, tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    BucketJournal("lr", store).append_logs([{"n": 1}])
    for target in (store, f"sqlite://{tmp_path}/bucket.sqlite", world.target, "prod", None):
        assert list(BucketJournal("lr", target).read_logs(0)) == [{"n": 1}]
    monkeypatch.delenv("SPOTKEEPER_BUCKET")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CliError, match="SPOTKEEPER_BUCKET is not set"):
        BucketJournal("lr")
