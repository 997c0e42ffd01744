"""Two processes in one folder: the second one gets an error that names the first, and changes nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from spotkeeper.cli.main import run
from spotkeeper.local.core.world import Config
from spotkeeper.local.demo.__main__ import clear, main
from spotkeeper.local.lifecycle.cloud import LocalCloud
from spotkeeper.local.lifecycle.folder import (
    KEEPER,
    BusyError,
    LocalCloudError,
    end_control_plane,
    end_keeper,
    only_one,
    remove,
    write_config,
)
from spotkeeper.local.lifecycle.keeper import PID_FILE, read_pid, write_pid
from spotkeeper.local.server.server import load_world
from spotkeeper.local.server.wiring import CloudParts

HOLD = """
import sys
from pathlib import Path
from spotkeeper.local.lifecycle.folder import only_one
with only_one(Path(sys.argv[1]), "the first", ""):
    print("held", flush=True)
    sys.stdin.read()
"""


def files(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_second_demo_refuses_and_names_the_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "demo"
    clear(folder)
    (folder / "cloud").mkdir()
    (folder / "cloud" / "cloud.json").write_text("the first's")
    with only_one(folder, "make demo", ""):
        before = files(tmp_path)
        assert main(["--folder", str(folder)]) == 2
        assert files(tmp_path) == before
    said = " ".join(capsys.readouterr().out.split())
    assert f"(pid {os.getpid()})" in said
    assert f"kill {os.getpid()}" in said
    assert "make demo ARGS=--folder=" in said


def test_a_folder_has_one_lock_by_whichever_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with only_one(Path(), "", ""), pytest.raises(BusyError), only_one(tmp_path, "", ""):
        pass


@pytest.mark.parametrize("command", ["up", "down"])
def test_concurrent_up_and_down_refuse(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "local"
    folder.mkdir()
    if command == "down":
        monkeypatch.setattr(
            "spotkeeper.cli.local.localcloud.attach", lambda folder: type("Cloud", (), {"folder": folder})
        )
    with only_one(folder, "spotkeeper local up", ""):
        assert run(["local", command, "--folder", str(folder)]) == 4
    assert f"spotkeeper local up is at work in {folder} (pid {os.getpid()})" in capsys.readouterr().err
    assert list(folder.iterdir()) == []


def test_the_lock_survives_the_folders_removal(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    first = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert first.stdout is not None
        assert first.stdout.readline() == "held\n"
        folder.mkdir()
        folder.rmdir()
        with (
            pytest.raises(BusyError, match=rf"the first is at work in .* \(pid {first.pid}\)"),
            only_one(folder, "", ""),
        ):
            pass
    finally:
        first.kill()
        first.communicate()
    with only_one(folder, "the next", ""):
        assert (tmp_path / "demo.lock").read_text().split()[0] == str(os.getpid())


def test_a_file_in_place_of_a_clouds_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for act in (LocalCloud.attach, LocalCloud.up):
        with pytest.raises(LocalCloudError, match="file: this is not a folder: use another --folder"):
            act(tmp_path / "file")


def test_a_control_plane_that_starts_while_its_cloud_is_removed_does_not_make_the_folder_again(tmp_path: Path) -> None:
    """A process in the middle of exec has no environment yet, so the end of its cloud cannot find and kill it."""
    folder = tmp_path / "cloud"
    folder.mkdir()
    write_config(folder, Config(uid="abcdef012345", port=9100, clock="0:0:1", seed=1, per_zone=4))
    world = load_world(folder)
    remove(folder)
    with pytest.raises(FileNotFoundError):
        CloudParts(world)
    world.state.close()
    assert not folder.exists()


@pytest.mark.parametrize(
    ("end", "file"), [(end_keeper, KEEPER), (end_control_plane, PID_FILE)], ids=["keeper", "plane"]
)
def test_what_was_killed_has_ended(tmp_path: Path, end: Callable[[Path], object], file: str) -> None:
    """An ``up`` right after a Ctrl-C took the killed keeper for running, started no other, and waited in vain."""
    large = "held = b'x' * 200_000_000; print(1, flush=True); input()"  # its end takes milliseconds
    command = [sys.executable, "-S", "-c", large]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"1\n"
        write_pid(tmp_path / file, process.pid)
        end(tmp_path)
        assert read_pid(tmp_path / file) is None
        assert process.wait() == -signal.SIGKILL
    end(tmp_path)
