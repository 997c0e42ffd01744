"""Jobs by git through Pulumi's own engine: submitted once, refused while they run. Needs the ``pulumi`` command."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from spotkeeper.local import deploy
from spotkeeper.local.deploy import DeployError, DeployEvent, DeployOp
from spotkeeper.reconcile.store.store import Store, open_store
from tests.contract.samples import STACK
from tests.engine.conftest import needs_pulumi
from tests.infra.cloud import Cloud, serve
from tests.infra.conftest import ROOT, STACKS

pytestmark = needs_pulumi


@pytest.fixture
def cloud() -> Iterator[Cloud]:
    with serve() as cloud:
        yield cloud


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """Of the one-machine cloud; the provider is a process of the engine's, so the environment names it."""
    url = f"sqlite://{tmp_path}/bucket.sqlite"
    for name, value in {"STACK": "local", "BUCKET": url, "CLOCK": "0:0:1", "TOKEN": ""}.items():
        monkeypatch.setenv(f"SPOTKEEPER_{name}", value)
    made = open_store(url)
    made.put("stack/pools.json", msgspec.json.encode(msgspec.structs.replace(STACK, stack="local")))
    return made


@pytest.fixture
def job() -> Iterator[Path]:
    """A job file in this repository, where a stack's jobs are."""
    ignored = ROOT / ".spotkeeper"
    ignored.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ignored) as folder:
        yield Path(folder) / "job.yaml"


def config(folder: Path, *jobs: Path) -> Path:
    document = msgspec.yaml.decode((STACKS / "Pulumi.local.yaml").read_bytes())
    document["config"]["spotkeeper:jobs"] = [str(job.relative_to(ROOT)) for job in jobs]
    path = folder / "Pulumi.local.yaml"
    path.write_bytes(msgspec.yaml.encode(document))
    return path


def test_up_submits_a_job_once_and_refuses_to_change_it_while_it_runs(
    cloud: Cloud, store: Store, job: Path, tmp_path: Path
) -> None:
    job.write_text("name: first\ncommand: [/bin/true]\n")

    seen: list[DeployEvent] = []

    def up(*jobs: Path) -> deploy.DeployResult:
        seen.clear()
        file = config(tmp_path, *jobs)
        return deploy.up("local", file, cloud, tmp_path / "deploy", seen.append, engine="pulumi")

    up(job)
    assert [event.op for event in seen if event.name == "first" and event.done] == [DeployOp.CREATE]
    submitted = store.active_jobs()
    assert len(submitted) == 1
    up(job)
    assert not [event for event in seen if event.name == "first" and event.op is not DeployOp.SAME]
    job.write_text("name: first\ncommand: [/bin/false]\n")
    with pytest.raises(DeployError) as caught:
        up(job)
    told = str(caught.value)
    assert "with other content: command; give this job another `name`" in told and "cancel first" in told
    assert "Traceback" not in told
    job.write_text("name: second\ncommand: [/bin/false]\n")  # the way out
    up(job)
    done = {(event.name, event.op) for event in seen if event.done}
    assert {("second", DeployOp.CREATE), ("first", DeployOp.DELETE)} <= done
    assert len(store.active_jobs()) == 2, "the first goes on: leaving the list cancels nothing"
    assert all(not store.list_requests(each) for each in store.active_jobs())
    assert set(submitted) < set(store.active_jobs())
    deploy.destroy("local", config(tmp_path), cloud, tmp_path / "deploy", engine="pulumi")
    assert cloud.things == {}
