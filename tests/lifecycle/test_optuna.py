"""The example's Optuna study on a real stack: a killed program, another that goes on, and a pruned trial."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.trial import TrialState

from spotkeeper.client.target import FOLDER, local_target
from spotkeeper.contract.ledger import Event
from spotkeeper.contract.record import Outcome, Record
from spotkeeper.integrations.optuna import JOB, BucketJournal, SpotkeeperObjective
from spotkeeper.reconcile.store import paths
from tests.lifecycle.stage import Stage
from tests.no_dynamo import NO_DYNAMO

pytestmark = pytest.mark.lifecycle

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "optuna"
STUDY = "spirals"
STEPS = 120  # of 0.1 s


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example's job with fewer steps and without what only slows its start."""
    home = tmp_path_factory.mktemp("example")
    (home / "train.py").write_bytes((EXAMPLE / "train.py").read_bytes())
    env = "".join(f'\n  {name}: "{value}"' for name, value in NO_DYNAMO.items())
    text = (EXAMPLE / "job.yaml").read_text().replace('"300"', f'"{STEPS}"')
    (home / "job.yaml").write_text(f"{text.rstrip()}{env}\n")
    return home / "job.yaml"


@pytest.fixture(scope="module", autouse=True)
def gone(stage: Stage) -> Iterator[None]:
    yield
    stage.until("all jobs to be gone", lambda: not stage.store.active_jobs())


def reopened(stage: Stage, job: Path, **options: object) -> tuple[optuna.Study, SpotkeeperObjective]:
    """Open study and objective as a program on another laptop would."""
    target = local_target(stage.cloud.folder)
    study = optuna.load_study(study_name=STUDY, storage=JournalStorage(BucketJournal(STUDY, target)), **options)
    return study, SpotkeeperObjective(
        job, lambda trial: {"lr": trial.suggest_float("lr", 1e-3, 1e3, log=True)}, target=target
    )


def record_of(stage: Stage, job: str) -> Record:
    held = stage.store.read_record(job)
    assert held is not None
    return held.value


def names(stage: Stage) -> dict[str, list[str]]:
    """Name -> the ids of all jobs that ever had it and were submitted to the end."""
    found: dict[str, list[str]] = {}
    for job in sorted({path.split("/")[1] for path in stage.store.list("jobs/")}):
        if (held := stage.store.read_record(job)) is not None:
            found.setdefault(held.value.name, []).append(job)
    return found


def own(stage: Stage) -> dict[str, list[str]]:
    """Return the study's jobs by name; other tests run theirs in the same cloud."""
    return {name: ids for name, ids in names(stage).items() if name.startswith(STUDY)}


@pytest.mark.matrix  # tests/integrations/test_optuna.py goes on in `make test`
def test_another_laptop_goes_on_with_the_jobs_of_a_killed_program(stage: Stage, job: Path) -> None:
    command = [sys.executable, str(EXAMPLE / "search.py"), "--study", STUDY, "--trials", "2", "--parallel", "2"]
    env = os.environ | {FOLDER: str(stage.cloud.folder), "PYTHONFAULTHANDLER": "1"}
    with subprocess.Popen([*command, "--job", str(job)], env=env) as program:
        try:
            stage.until("both jobs to be submitted", lambda: program.poll() is not None or len(own(stage)) == 2)
            assert program.poll() is None, "the program has ended"
            both = [ids[0] for _, ids in sorted(own(stage).items())]
            stage.until(
                "a job's first step",
                lambda: any(entry.event is Event.FIRST for id in both for entry in stage.store.list_ledger(id)),
            )
        finally:
            program.kill()
    study, objective = reopened(stage, job)
    assert [trial.state for trial in study.trials] == [TrialState.RUNNING] * 2
    done = objective.resume(study)
    assert [trial.state for trial in done] == [TrialState.COMPLETE] * 2
    assert own(stage) == {f"{STUDY}-{trial.number}": [trial.user_attrs[JOB]] for trial in done}, (
        "no job was submitted twice"
    )
    for trial in done:
        assert sorted(trial.intermediate_values) == list(range(25, STEPS, 25))
        assert trial.value == trial.intermediate_values[100]
        spec = stage.store.read_spec(trial.user_attrs[JOB])
        assert spec is not None
        assert spec.params == trial.params and f"--lr={trial.params['lr']}" in spec.command
        assert record_of(stage, trial.user_attrs[JOB]).outcome is Outcome.SUCCEEDED
    assert len(stage.store.list(paths.study(STUDY))) > 20


@pytest.mark.matrix  # tests/integrations/test_optuna.py prunes in `make test`
def test_a_pruned_trials_job_is_cancelled(stage: Stage, job: Path) -> None:
    job.write_text(job.read_text().replace(f'"{STEPS}"', '"3000"'))
    study, objective = reopened(stage, job, pruner=optuna.pruners.ThresholdPruner(upper=5.0))
    study.enqueue_trial({"lr": 1000.0})
    study.optimize(objective, n_trials=1)
    trial = study.trials[-1]
    assert trial.state is TrialState.PRUNED and trial.last_step is not None and trial.last_step < 3000
    stage.until("the job to be cancelled", lambda: record_of(stage, trial.user_attrs[JOB]).outcome is Outcome.CANCELLED)
