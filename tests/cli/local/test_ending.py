"""`spotkeeper local down` names the jobs that would lose their checkpoints, and asks; `--yes` and `--force` do not."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from spotkeeper.clock import Clock
from spotkeeper.contract.generation import Progress
from spotkeeper.contract.job import JobRequest, RequestKind
from spotkeeper.contract.record import Hold, Node, Outcome, Phase, Record
from spotkeeper.local import deploy
from spotkeeper.local.core.world import Config
from spotkeeper.local.lifecycle.cloud import LocalCloud
from spotkeeper.reconcile.store.store import Store, open_store
from tests.cli.conftest import Cli
from tests.contract.samples import STACK

REACHED = "error: the stack local: the end of the stack has begun\n"
NAMED = [
    "error: the checkpoints of these unfinished jobs are deleted with the cloud:",
    "  works (bbbb2345)  training, step 306",
    "  waits (cccc2345)  on hold (paused), no step reported yet",
]


def record(job: str, name: str, **over: object) -> Record:
    made = Record(job=job, uid=job, name=name, spec_sha256="", created=1.0, nonce="n", nodes=(Node(),), port_base=20000)
    return msgspec.structs.replace(made, **over)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a cloud without any process, with a job that is over and one that somebody has cancelled."""
    folder = tmp_path / "my cloud"
    folder.mkdir()
    config = Config("0" * 12, 1, Clock(0.0, 0.0, 1.0).to_env())
    (folder / "cloud.json").write_bytes(msgspec.json.encode(config))

    def begun(*_: object) -> None:
        raise deploy.DeployError("the end of the stack has begun")

    monkeypatch.setattr(deploy, "destroy", begun)
    monkeypatch.setattr(LocalCloud, "up", LocalCloud.attach)
    put(bucket(folder), record("aaaa2345", "over", phase=Phase.DONE, outcome=Outcome.SUCCEEDED))
    put(bucket(folder), record("dddd2345", "cancelled", gen=1))
    bucket(folder).put_request("dddd2345", JobRequest("cancel-1", RequestKind.CANCEL, 2.0))
    return folder


def bucket(folder: Path) -> Store:
    return open_store(f"sqlite://{folder / 'bucket.sqlite'}")


def put(store: Store, made: Record) -> None:
    store.set_active(made.job, made.created)
    assert store.create_record(made)


def two_jobs(folder: Path) -> None:
    store = bucket(folder)
    put(store, record("bbbb2345", "works", gen=3, created=2.0))
    store.put_progress("bbbb2345", Progress(at=5.0, gen=3, step=306))
    put(store, record("cccc2345", "waits", phase=Phase.HOLD, hold=Hold.PAUSE, reason="paused", created=3.0))


def at_a_terminal(patch: pytest.MonkeyPatch, answer: Callable[..., bool]) -> None:
    for stream in (sys.stdin, sys.stderr):
        patch.setattr(stream, "isatty", lambda: True)
    patch.setattr("spotkeeper.cli.output.confirm", answer)


def test_a_cloud_without_unfinished_jobs_ends_without_a_question(cli: Cli, here: Path) -> None:
    done = cli("local", "down", "--folder", here)
    assert done.code == 1 and REACHED in done.err and "not over" not in done.err


@pytest.mark.parametrize("more", [(), ("--json",)])
def test_without_a_terminal_down_refuses_and_names_the_jobs(cli: Cli, here: Path, more: tuple[str, ...]) -> None:
    two_jobs(here)
    done = cli("local", "down", "--folder", here, *more)
    assert (done.code, done.out) == (4, "")
    yes = f"spotkeeper local down --yes --folder '{here}'"
    unasked = "nothing was changed, since asking needs a terminal"
    assert done.err.splitlines() == [*NAMED, unasked, f"  try: {yes}"]


@pytest.mark.parametrize("agreed", [True, False])
def test_at_a_terminal_down_asks(cli: Cli, here: Path, monkeypatch: pytest.MonkeyPatch, agreed: bool) -> None:
    two_jobs(here)
    at_a_terminal(monkeypatch, lambda *_, **__: agreed)
    done = cli("local", "down", "--folder", here)
    assert [line for line in done.err.splitlines() if "2345" in line] == NAMED[1:]
    assert (REACHED in done.err) == agreed
    assert done.code == (1 if agreed else 4)
    assert agreed or done.err.endswith("error: nothing was changed\n")


def test_down_with_yes_does_not_ask(cli: Cli, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    two_jobs(here)
    at_a_terminal(monkeypatch, lambda *_, **__: pytest.fail("asked"))
    assert REACHED in cli("local", "down", "--yes", "--folder", here).err


def test_ctrl_c_during_down_names_the_rest_and_the_next_command(
    cli: Cli, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken_off(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(deploy, "destroy", broken_off)
    done = cli("local", "down", "--yes", "--folder", here)
    assert done.code != 0
    assert "is partly down: 0 VMs and 0 disks exist" in done.err
    for command in ("down --yes", "up"):
        assert f"spotkeeper local {command} --folder '{here}'" in done.err


def test_a_half_destroyed_stack_names_the_command_that_restores_it(
    cli: Cli, here: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPOTKEEPER_FOLDER", str(here))
    for name in ("SPOTKEEPER_BUCKET", "SPOTKEEPER_STACK"):
        monkeypatch.delenv(name, raising=False)
    store = bucket(here)
    missing = cli("submit", folder / "job.yaml")
    assert missing.err.endswith(f"try: bring it up: spotkeeper local up --folder '{here}'\n")
    store.put("stack/pools.json", msgspec.json.encode(msgspec.structs.replace(STACK, stack="local")))
    store.put("stack/drain", b"{}")
    done = cli("submit", folder / "job.yaml")
    assert (done.code, "being destroyed" in done.err) == (4, True)
    assert f"try: bring it up again: spotkeeper local up --folder '{here}'\n" in done.err


def test_the_environment_names_a_cloud_in_another_folder(
    cli: Cli, here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SPOTKEEPER_BUCKET", "SPOTKEEPER_STACK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    two_jobs(here)
    bucket(here).put("stack/pools.json", msgspec.json.encode(msgspec.structs.replace(STACK, stack="local")))
    assert cli("status").code == 3
    monkeypatch.setenv("SPOTKEEPER_FOLDER", str(here))
    assert "works" in cli("status").out
    assert str(here) in cli("local", "down").err
    monkeypatch.setenv("SPOTKEEPER_FOLDER", str(tmp_path / "nowhere"))
    assert "nowhere: no cloud here" in cli("status").err


def test_up_in_another_folder_prints_the_variable_to_set(cli: Cli, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalCloud, "up", lambda folder, **_: LocalCloud.attach(folder))
    monkeypatch.setattr(deploy, "up", lambda *_: deploy.DeployResult("in-process", {}, (), {}))
    advice = f"export SPOTKEEPER_FOLDER='{here}'\n"
    assert cli("local", "up", "--json", "--folder", here).err.endswith(advice)
    monkeypatch.setenv("SPOTKEEPER_FOLDER", str(here))
    assert "export" not in cli("local", "up", "--json").err


def test_a_job_with_an_unreadable_record_is_named(cli: Cli, here: Path) -> None:
    two_jobs(here)
    bucket(here).put("jobs/cccc2345/rec", b"{")
    done = cli("local", "down", "--folder", here)
    assert done.code == 4 and "  cccc2345: its record cannot be read" in done.err.splitlines()


def test_an_unreadable_bucket_names_the_force_option(cli: Cli, here: Path) -> None:
    for path in here.glob("bucket.sqlite*"):
        path.write_bytes(b"no database" * 1000)
    done = cli("local", "down", "--folder", here)
    assert done.code == 1 and f"spotkeeper local down --force --folder '{here}'" in done.err
    done = cli("local", "down", "--force", "--folder", here)
    assert (done.code, here.exists()) == (0, False)
