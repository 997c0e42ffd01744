"""Jobs by git: what a stack names is submitted once, never changed while it runs, cancelled only where that is said."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from infra import jobs
from infra.jobs import JobError, JobProvider
from infra.settings.read import read_jobs
from spotkeeper.client import lookup as ledger
from spotkeeper.client.submit import with_source
from spotkeeper.contract.job import RequestKind, spec_sha256
from spotkeeper.contract.parse.jobfile import read_job
from spotkeeper.contract.parse.problem import SpecError
from spotkeeper.contract.record import Outcome, Phase
from spotkeeper.local import deploy
from spotkeeper.local.deploy import DeployError, DeployOp
from spotkeeper.local.deploy.config import read_config
from spotkeeper.reconcile.store import credentials
from spotkeeper.reconcile.store.store import Store, open_store
from tests.contract.samples import STACK
from tests.infra.cloud import Cloud, serve
from tests.infra.conftest import STACKS, run_program
from tests.infra.settings import stackfiles

LOCAL = STACKS / "Pulumi.local.yaml"
JOB = "pulumi-python:dynamic/spotkeeper:Job"


@dataclass(frozen=True)
class Repository:
    """A checkout with one job file, and the bucket of the one-machine cloud that it is submitted to."""

    root: Path
    store: Store

    def write(self, lr: str = "0.1", name: str = "first") -> None:
        text = f"# {name}\nname: {name}\ncommand: [train.py, --lr, '{lr}']\nsource: code\nnodes: 2\n"
        (self.root / "jobs" / "first.yaml").write_text(text)

    def props(self, on_remove: str = "keep") -> dict[str, Any]:
        path = self.root / "jobs" / "first.yaml"
        spec = read_job(path, None, 0.0)
        return {
            "stack": "local", "bucket": "gs://sk-local", "here": True, "file": "jobs/first.yaml", "job": spec.name,
            "content": jobs.content(path, spec), "on_remove": on_remove,
        }  # fmt: skip

    def end(self, job: str) -> None:
        held = self.store.read_record(job)
        assert held is not None
        done = msgspec.structs.replace(held.value, phase=Phase.DONE, outcome=Outcome.SUCCEEDED, nonce="over")
        assert self.store.cas_record(done, held.token) is not None

    def config(self, *names: str, cancel: bool = False) -> Path:
        document = msgspec.yaml.decode(LOCAL.read_bytes())
        document["config"]["spotkeeper:jobs"] = list(names)
        document["config"]["spotkeeper:cancel_removed_jobs"] = cancel
        path = self.root / "Pulumi.local.yaml"
        path.write_bytes(msgspec.yaml.encode(document))
        return path


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Repository:
    url = f"sqlite://{tmp_path}/bucket.sqlite"
    for name, value in {"STACK": "local", "BUCKET": url, "CLOCK": "0:0:1"}.items():
        monkeypatch.setenv(f"SPOTKEEPER_{name}", value)
    monkeypatch.setattr(jobs, "ROOT", tmp_path)
    monkeypatch.setattr(
        "spotkeeper.client.target.identity_token", lambda *_: ""
    )  # nobody hears of it but the next tick
    (tmp_path / "jobs" / "code").mkdir(parents=True)
    (tmp_path / "jobs" / "code" / "train.py").write_text("print(1)\n")
    store = open_store(url)
    store.put("stack/pools.json", msgspec.json.encode(msgspec.structs.replace(STACK, stack="local")))
    made = Repository(tmp_path, store)
    made.write()
    return made


def made(repository: Repository, **props: Any) -> dict[str, Any]:
    """The outputs of a job that was just created."""
    outs = JobProvider().create({**repository.props(), **props}).outs
    assert outs is not None
    return outs


def failures(olds: dict[str, Any], news: dict[str, Any]) -> list[str]:
    return [failure.reason for failure in JobProvider().check(olds, news).failures]


# --- the resource ---------------------------------------------------------------------------


def test_a_declared_job_is_submitted_as_by_the_command(repository: Repository) -> None:
    job = made(repository)["submitted"]
    held = repository.store.read_record(job)
    assert held is not None and held.value.name == "first" and held.value.phase is Phase.RUN
    path = repository.root / "jobs" / "first.yaml"
    spec = repository.store.read_spec(job)
    assert spec is not None and spec_sha256(spec) == repository.props()["content"] == held.value.spec_sha256
    assert spec_sha256(with_source(read_job(path, None, 0.0), None)) != repository.props()["content"], "with its source"
    assert made(repository)["submitted"] == job, "an up that was cut off after the submission finds its job again"


def test_comments_are_no_change_and_ended_jobs_are_not_resubmitted(repository: Repository) -> None:
    before = made(repository)
    path = repository.root / "jobs" / "first.yaml"
    path.write_text(f"# another comment\n{path.read_text()}")
    assert not JobProvider().diff("first/local", before, repository.props()).changes
    repository.end(before["submitted"])
    assert not JobProvider().diff("first/local", before, repository.props()).changes


def test_changing_a_running_job_is_refused_with_the_remedies(
    repository: Repository,
) -> None:
    before = made(repository)
    repository.write(lr="0.2")
    news = repository.props()
    assert JobProvider().diff("first/local", before, news).changes
    (told,) = failures(before, news)
    assert "a job of this name runs already" in told and "command" in told
    assert "another `name`" in told and "spotkeeper cancel first" in told
    with pytest.raises(JobError, match="another `name`"):
        JobProvider().update("first/local", before, news)
    assert repository.store.active_jobs() == (before["submitted"],)
    spec = repository.store.read_spec(before["submitted"])
    assert spec is not None and "0.1" in spec.command


def test_a_changed_file_of_an_ended_job_is_submitted_again(repository: Repository) -> None:
    before = made(repository)
    repository.end(before["submitted"])
    repository.write(lr="0.2")
    news = repository.props()
    assert failures(before, news) == []
    after = JobProvider().update("first/local", before, news).outs
    assert after is not None and after["submitted"] != before["submitted"]
    held = repository.store.read_record(after["submitted"])
    assert held is not None and held.value.phase is Phase.RUN


def test_a_name_in_use_with_other_content_is_refused(repository: Repository) -> None:
    made(repository)
    repository.write(lr="0.2")
    assert len(failures({}, repository.props())) == 1


def test_a_preview_needs_no_bucket_rights(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    before = made(repository)
    repository.write(lr="0.2")
    monkeypatch.setenv("SPOTKEEPER_BUCKET", "sqlite:///nonexistent/bucket.sqlite")
    assert failures(before, repository.props()) == []
    with pytest.raises(JobError):
        JobProvider().update("first/local", before, repository.props())


@pytest.mark.parametrize(("on_remove", "asked"), [("keep", []), ("cancel", [RequestKind.CANCEL])])
def test_removing_a_file_cancels_only_with_cancel_removed_jobs(
    repository: Repository, on_remove: str, asked: list[RequestKind]
) -> None:
    before = made(repository, on_remove=on_remove)
    JobProvider().delete("first/local", before)
    assert [request.kind for request in repository.store.list_requests(before["submitted"])] == asked


def test_a_later_job_of_the_same_name_is_not_cancelled(repository: Repository) -> None:
    before = made(repository, on_remove="cancel")
    repository.end(before["submitted"])
    repository.write(lr="0.3")
    later = made(repository)["submitted"]
    JobProvider().delete("first/local", before)
    assert not repository.store.list_requests(later)


def test_jobs_are_submitted_with_the_programs_login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the shell's, another account's bucket would be asked for."""
    told = tmp_path / "config"
    told.write_text("[profile acme]\naws_access_key_id = ACME\naws_secret_access_key = x\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(told))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.setenv(name, "shell")
    props = {"stack": "dev", "bucket": "s3://sk-123456789012-dev", "here": False, "profile": "acme"}
    assert jobs.target_of(props).stack == "dev"
    keys = credentials.s3()[1]
    assert keys is not None and keys()["access_key_id"] == "ACME"


def test_a_stack_that_is_being_destroyed_refuses_declared_jobs(repository: Repository) -> None:
    repository.store.put("stack/drain", b"{}")
    with pytest.raises(JobError, match="is being destroyed; bring it up again"):
        made(repository)


# --- the program, and the in-process runner --------------------------------------------------


@pytest.fixture
def cloud(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    monkeypatch.setattr("infra.drain.gcp._PAUSE_LOCAL_S", 0.01)
    with serve() as cloud:
        yield cloud


@pytest.fixture
def up(cloud: Cloud, tmp_path: Path) -> Callable[[Path], deploy.DeployResult]:
    return lambda config: deploy.up("local", config, cloud, tmp_path / "deploy", engine="in-process")


def test_a_job_is_declared_after_all_that_it_needs(repository: Repository) -> None:
    config = read_config(repository.config("jobs/first.yaml", cancel=True), "http://127.0.0.1:9")
    declared = run_program("local", config)
    job = declared[f"{JOB}::first"]
    assert job.parent == "jobs" and job.properties["on_remove"] == "cancel" and job.properties["here"]
    assert job.properties["content"] == repository.props()["content"]
    assert "pulumi-python:dynamic:Resource::drain" in declared["spotkeeper:all:Jobs::jobs"].depends_on
    private = json.dumps({key: value for key, value in job.properties.items() if key != "__provider"})
    assert str(repository.root) not in private, "a state is not of one machine"


def test_up_submits_once_refuses_changes_and_keeps_removed_jobs(
    repository: Repository, up: Callable[[Path], deploy.DeployResult]
) -> None:
    config = repository.config("jobs/first.yaml")
    first = up(config)
    (job,) = repository.store.active_jobs()
    assert ledger.find_job(repository.store, "first").job == job
    assert up(config).empty
    repository.write(lr="0.2")
    with pytest.raises(DeployError, match=r"runs already .* with other content: command; give this job another `name`"):
        up(config)
    assert repository.store.active_jobs() == (job,)
    repository.write()
    gone = up(repository.config())
    assert gone.changes[DeployOp.DELETE] == 2, "the job and the component around it"  # nothing else
    assert repository.store.active_jobs() == (job,) and not repository.store.list_requests(job)
    assert first.changes[DeployOp.CREATE] == gone.changes[DeployOp.SAME] + 2


def test_a_preview_refuses_a_changed_running_job(
    repository: Repository, up: Callable[[Path], deploy.DeployResult], cloud: Cloud, tmp_path: Path
) -> None:
    config = repository.config("jobs/first.yaml")
    up(config)
    repository.write(lr="0.2")
    with pytest.raises(DeployError, match="another `name`"):
        deploy.preview("local", config, cloud, tmp_path / "deploy", engine="in-process")


def test_a_wrong_job_file_is_reported_before_anything_is_made(
    repository: Repository, up: Callable[[Path], deploy.DeployResult], cloud: Cloud
) -> None:
    (repository.root / "jobs" / "first.yaml").write_text("name: first\ncomand: [train.py]\n")
    with pytest.raises(DeployError, match=r"jobs/first.yaml:2: comand: unknown key .*command"):
        up(repository.config("jobs/first.yaml"))
    assert not repository.store.active_jobs()


@pytest.mark.parametrize("source", ["../tests/data", "../docs", "../bench/x/../y"])
def test_a_source_in_an_unwatched_folder_is_refused(tmp_path: Path, source: str) -> None:
    """A change of it would reach machines by whatever `up` came next, read by nobody."""
    (tmp_path / "jobs").mkdir()
    job = tmp_path / "jobs" / "a.yaml"

    def told(folder: str) -> str:
        (job.parent / folder).resolve().mkdir(parents=True, exist_ok=True)
        (job.parent / folder / "train.py").resolve().write_text("")
        job.write_text(f"name: a\ncommand: [train.py]\nnodes: 1\nsource: {folder}\n")
        try:
            read_jobs(stackfiles.read("gcp", {"jobs": ["jobs/a.yaml"]}), tmp_path, 0.0)
        except SpecError as error:
            return str(error)
        return ""

    assert told("code") == told("..") == ""
    assert told(source).splitlines()[-1].strip() == (
        f'jobs/a.yaml:4: source: "{source}": is in one of the folders bench, docs, tests, whose changes start neither '
        "a preview nor an `up`: move it"
    )
