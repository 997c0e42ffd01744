"""`spotkeeper local` against a real one-machine cloud: up, found again, hurt, down, nothing left."""

from __future__ import annotations

import io
import json
import os
import select
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest

from spotkeeper.cli.local import localcloud
from spotkeeper.cli.main import run
from spotkeeper.cli.stack import note_upkeep
from spotkeeper.client.errors import CliError
from spotkeeper.clock import Clock
from spotkeeper.local.core import procs
from spotkeeper.local.core.world import Config
from spotkeeper.local.deploy import DeployError
from spotkeeper.local.lifecycle.cloud import LocalCloud
from spotkeeper.local.lifecycle.folder import LocalCloudError

pytestmark = pytest.mark.timeout(180)


class Shell:
    """Commands as a user gives them, in a working folder of their own.

    They run in this process, which has imported the providers' SDKs already; ``real``: in a process of their own.
    """

    def __init__(self, folder: Path, *, real: bool = False) -> None:
        self.folder = folder
        self.real = real

    def __call__(self, *argv: str) -> subprocess.CompletedProcess[str]:
        env = {name: value for name, value in os.environ.items() if not name.startswith("SPOTKEEPER_")}
        if self.real:
            return subprocess.run(
                [sys.executable, "-m", "spotkeeper.cli.main", *argv],
                cwd=self.folder, env=env, capture_output=True, text=True, timeout=120, check=False,
            )  # fmt: skip
        out, err = io.StringIO(), io.StringIO()
        outputs = redirect_stdout(out), redirect_stderr(err)
        with mock.patch.dict(os.environ, env, clear=True), chdir(self.folder), outputs[0], outputs[1]:
            code = run(list(argv))
        return subprocess.CompletedProcess(argv, code, out.getvalue(), err.getvalue())

    def json(self, *argv: str) -> Any:
        done = self(*argv, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    shell = Shell(tmp_path_factory.mktemp("here"))
    up = Shell(shell.folder, real=True).json("local", "up")
    assert up["stack"] == "local"
    assert up["changes"]["create"] > 20
    yield shell
    left = shell.json("local", "down")
    assert left == {"vms": 0, "disks": 0, "processes": 0}
    assert not (shell.folder / ".spotkeeper" / "local").exists()


def test_up_again_changes_nothing(shell: Shell) -> None:
    again = shell("local", "up", "--scale", "4", "--json")
    changes = json.loads(again.stdout)["changes"]
    assert again.stderr.startswith("--scale 4 is ignored, since this cloud already runs")
    assert {what for what, count in changes.items() if count} == {"same"}


def test_up_prints_a_summary_and_resources_on_request(shell: Shell) -> None:
    short = shell("local", "up")
    assert short.returncode == 0, short.stderr
    assert len(short.stdout.splitlines()) == 1 and "unchanged (--verbose lists them)" in short.stdout
    assert "reconcileUrl" in shell("local", "up", "--verbose").stdout


def test_the_suggested_job_file_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert Path(localcloud._example()).is_file() and Path(localcloud._example()).is_absolute()
    monkeypatch.chdir(localcloud.STACK_FILE.parents[2])
    assert localcloud._example() == "examples/gpt/job.yaml"


def test_a_given_stack_file_is_kept_for_later_ups(shell: Shell, tmp_path: Path) -> None:
    own = tmp_path / "Pulumi.mine.yaml"
    own.write_text(localcloud.STACK_FILE.read_text().replace("size: 8", "size: 3"))
    try:
        assert shell.json("local", "up", "--stack-file", str(own))["changes"].get("update")
        again = shell.json("local", "up")["changes"]
        assert {what for what, count in again.items() if count} == {"same"}, "a later up takes the same file"
    finally:
        (shell.folder / ".spotkeeper" / "local" / "Pulumi.local.yaml").unlink()
        shell.json("local", "up")
    text = own.read_text().replace("region: us-central1", "regions: [us-central1, us-east1]")
    own.write_text(text.replace("us-central1-c]", "us-east1-b]"))
    abroad = shell("local", "up", "--stack-file", str(own))
    assert abroad.returncode == 4 and "this cloud has no us-east1-b" in abroad.stderr
    wrong = shell("local", "up", "--stack-file", str(tmp_path / "none.yaml"))
    assert wrong.returncode == 2 and "no such stack file" in wrong.stderr


def test_a_wrong_stack_file_starts_no_cloud(tmp_path: Path) -> None:
    own, folder = tmp_path / "Pulumi.mine.yaml", tmp_path / "cloud"
    own.write_text(localcloud.STACK_FILE.read_text().replace("region: us-central1", "region: us-centrel1"))
    done = Shell(tmp_path)("local", "up", "--folder", str(folder), "--stack-file", str(own))
    assert done.returncode == 2 and not folder.exists()
    assert done.stderr.startswith('error: Pulumi.mine.yaml:5: region: "us-centrel1": is not a region of gcp')


def test_the_remedy_for_a_wrong_stack_file_names_that_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The program reads a copy and its errors have the copy's name; a plain `up` would read the old copy again."""

    def wrong(*_: object, **__: object) -> None:
        raise DeployError("Pulumi.local.yaml: region: no such region")

    own, folder = tmp_path / "Pulumi.mine.yaml", tmp_path / "cloud"
    own.write_text(localcloud.STACK_FILE.read_text())
    monkeypatch.setattr("spotkeeper.local.deploy.up", wrong)
    try:
        with pytest.raises(CliError) as raised:
            localcloud.up(folder, localcloud.UpOptions(stack_file=own))
        assert f"fix the error in {own}, then run spotkeeper local up --stack-file {own} again" in raised.value.remedy
        assert f"the cloud in {folder} runs; to end it: spotkeeper local down --yes --folder {folder}" in (
            raised.value.remedy
        )
    finally:
        LocalCloud.attach(folder).down(purge=True)


def test_a_refused_up_writes_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An ``up`` writes the pools before the drain refuses it, so a changed file is previewed before anything."""
    (tmp_path / localcloud.DEPLOYMENT).mkdir()
    kept, given = tmp_path / localcloud.STACK_FILE.name, tmp_path / "mine.yaml"
    kept.write_text("of the last up")
    given.write_text("without a region")
    previewed, changed = mock.Mock(side_effect=DeployError("job a is in us-east1-b")), mock.Mock()
    monkeypatch.setattr("spotkeeper.local.deploy.preview", previewed)
    monkeypatch.setattr("spotkeeper.local.deploy.up", changed)
    cloud = mock.Mock(spec=LocalCloud, folder=tmp_path)
    with pytest.raises(DeployError, match="us-east1-b"):
        localcloud._deployed(cloud, localcloud.UpOptions(stack_file=given, as_json=True))
    assert previewed.call_args.args[1] == given and not changed.called and kept.read_text() == "of the last up"
    given.write_bytes(kept.read_bytes())
    localcloud._deployed(cloud, localcloud.UpOptions(stack_file=given, as_json=True))
    assert previewed.call_count == 1 == changed.call_count, "an unchanged file needs no preview"


def test_ctrl_c_during_up_names_what_exists(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def breaks(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    folder = tmp_path / "cloud"
    monkeypatch.setattr("spotkeeper.local.deploy.up", breaks)
    try:
        with pytest.raises(KeyboardInterrupt):
            localcloud.up(folder, localcloud.UpOptions())
        told = capsys.readouterr().err
        assert f"the cloud in {folder} is partly up: 0 VMs and 0 disks exist" in told
        assert f"try: spotkeeper local up --folder {folder}, or to end it: spotkeeper local down --yes" in told
    finally:
        LocalCloud.attach(folder).down(purge=True)


def test_the_cloud_is_found_from_a_folder_below(shell: Shell) -> None:
    below = shell.folder / "a" / "b"
    below.mkdir(parents=True, exist_ok=True)
    assert json.loads(Shell(below)("status", "--json").stdout) == []
    assert Shell(below).json("local", "status")["vms"]


def test_status_lists_machines_disks_and_zones(shell: Shell) -> None:
    found = shell.json("local", "status")
    assert [vm["name"] for vm in found["vms"]] == ["sk-local-floor-s0"]
    assert len(found["zones"]) == 3
    assert "sk-local-floor-s0" in shell("local", "status").stdout


def test_capacity_is_set_and_returned_to_the_market(shell: Shell) -> None:
    zone = "us-central1-b"
    shell.json("local", "capacity", zone, "0")
    (found,) = [one for one in shell.json("local", "status")["zones"] if one["zone"] == zone]
    assert (found["capacity"], found["overridden"]) == (0, True)
    shell.json("local", "capacity", zone, "market")
    (found,) = [one for one in shell.json("local", "status")["zones"] if one["zone"] == zone]
    assert not found["overridden"]


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (("preempt", "nobody"), 1, "no such VM"),
        (("capacity", "us-east9-z", "1"), 1, "no such zone"),
        (("capacity", "us-central1-a", "some"), 2, "must be a number of spot VMs, or the word market"),
        (("capacity", "us-central1-a", "\u00b2"), 2, "must be a number of spot VMs, or the word market"),
        (("capacity", "us-central1-a", "9" * 5000), 2, "must be a number of spot VMs, or the word market"),
        (("status", "--folder", "elsewhere"), 3, "no cloud here"),
        (("status", "--folder", "/dev/null"), 3, "/dev/null: this is not a folder: use another --folder"),
        (("down", "--force", "--folder", "/dev/null"), 3, "/dev/null: this is not a folder: use another --folder"),
    ],
)
def test_impossible_commands_are_explained(shell: Shell, argv: tuple[str, ...], code: int, words: str) -> None:
    done = shell("local", *argv)
    assert done.returncode == code
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_a_tick_from_the_shell_launches_a_jobs_machines(shell: Shell) -> None:
    (shell.folder / "train.py").write_text("import time\ntime.sleep(600)\n")
    (shell.folder / "job.yaml").write_text("name: one\ncommand: [train.py]\nsource: .\nstatic: never\n")
    (shell.folder / ".spotkeeperignore").write_text("*\n!train.py\n")
    job = shell.json("submit", "job.yaml")["job"]
    for _ in range(3):  # grants, record, calls: the function may be doing the same beside us
        shell.json("reconcile", "--once")
    names = [vm["name"] for vm in shell.json("local", "status")["vms"]]
    assert any(name.startswith(f"sk-local-{job}-n0000-a") for name in names)
    assert shell("cancel", "one", "--yes").returncode == 0


def test_a_cloud_without_keeper_and_control_plane_names_the_remedy(shell: Shell) -> None:
    folder = shell.folder / ".spotkeeper" / "local"
    before = [(vm["name"], vm["id"]) for vm in shell.json("local", "status")["vms"] if "floor" in vm["name"]]
    for name in ("keeper.pid", "server.pid"):
        done = shell("status")
        assert (name == "keeper.pid") == ("lost its keeper" not in done.stderr), done.stderr
        pid = int((folder / name).read_text().split()[0])
        with os.fdopen(os.pidfd_open(pid)) as ended:  # a kill returns before its process ends
            os.kill(pid, 9)
            select.select([ended], [], [], 60)
    done = shell("status")
    assert done.returncode == 0, "jobs are read from the bucket, which needs no cloud"
    assert "is not running" in done.stderr and f"try: spotkeeper local up --folder {folder}" in done.stderr
    done = shell("local", "status")
    assert done.returncode == 1 and "is not running" in done.stderr and "spotkeeper local up" in done.stderr
    shell.json("local", "up")
    assert "try:" not in shell("status").stderr
    after = shell.json("local", "status")["vms"]
    assert [(vm["name"], vm["id"]) for vm in after if "floor" in vm["name"]] == before
    assert [vm["status"] for vm in after if "floor" in vm["name"]] == ["RUNNING"]


def test_a_damaged_allocation_is_rebuilt(shell: Shell) -> None:
    import sqlite3

    assert shell("repair", "allocation").returncode == 4, "it is well, or was never written"
    with sqlite3.connect(shell.folder / ".spotkeeper" / "local" / "bucket.sqlite") as bucket:
        bucket.execute("INSERT OR REPLACE INTO objects VALUES ('stack/allocation', 1000000, ?)", (b"{",))
    assert "spotkeeper repair allocation" in shell("status").stderr
    assert shell.json("repair", "allocation")["ver"] >= 1
    assert "allocation" not in shell("status").stderr


def test_suggested_commands_quote_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "my cloud; it's $HOME"
    folder.mkdir()
    config = Config("0" * 8, 1, Clock(0.0, 0.0, 1.0).to_env())
    (folder / "cloud.json").write_bytes(msgspec.json.encode(config))
    (folder / "state.sqlite").write_text("no books " * 99)
    said: list[str] = []
    note_upkeep(folder)
    said.append(capsys.readouterr().err)
    for call in (LocalCloud.status, LocalCloud.left_over):
        with pytest.raises(LocalCloudError) as caught:
            call(LocalCloud.attach(folder))
        said.append(str(caught.value))
    for text in said:
        command = text[text.rindex("spotkeeper local") :]
        assert shlex.split(command)[-2:] == ["--folder", str(folder)]


@pytest.mark.parametrize("scale", ["0", "-1", "nan"])
def test_an_invalid_scale_starts_no_cloud(tmp_path: Path, scale: str) -> None:
    done = Shell(tmp_path)("local", "up", "--scale", scale)
    assert (done.returncode, done.stderr) == (2, f"error: scale {float(scale)}: must be a number above 0\n")
    assert Shell(tmp_path)("local", "status").returncode == 3


@pytest.mark.parametrize("scale", ["121", "100000", "inf"])
def test_a_scale_too_high_for_notices_is_refused(tmp_path: Path, scale: str) -> None:
    done = Shell(tmp_path)("local", "up", "--scale", scale)
    assert (done.returncode, "must be at most 120; at 120 a notice of 120 s is one real second" in done.stderr) == (
        2,
        True,
    )
    assert not (tmp_path / ".spotkeeper").exists()


def test_without_a_cloud_here_the_message_says_how_to_start_one(tmp_path: Path) -> None:
    done = Shell(tmp_path)("local", "status")
    assert done.returncode == 3
    assert "spotkeeper local up" in done.stderr


@pytest.mark.parametrize("harmed", ["bucket.sqlite", "cloud.json"])
def test_a_cloud_that_cannot_destroy_its_stack_any_more_ends_by_force(tmp_path: Path, harmed: str) -> None:
    """With a damaged bucket `down` failed at every try, and a folder removed by hand left its processes."""
    folder = tmp_path / ".spotkeeper" / "local"
    cloud = LocalCloud.up(folder)
    mark = procs.mark(procs.CLOUD, cloud.config.uid)
    try:
        assert folder.stat().st_mode & 0o077 == 0, "other users of this machine have no business in jobs' variables"
        (folder / harmed).write_bytes(b"no database" * 1000)
        assert procs.marked(mark)
        done = Shell(tmp_path)("local", "down")
        assert done.returncode in (1, 3) and f"local down --force --folder {folder}" in done.stderr
        done = Shell(tmp_path)("local", "down", "--force")
        assert (done.returncode, done.stderr) == (0, "")
        assert not folder.exists() and not procs.marked(mark)
    finally:
        procs.kill_all(mark)
