"""The job's own environment: made once, with a real pip, from wheels that come with the source (no network)."""

from __future__ import annotations

import os
import queue
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from msgspec.structs import replace

from spotkeeper.contract.generation import JobRun
from spotkeeper_agent.core.events import LauncherUp
from spotkeeper_agent.core.log import Log
from spotkeeper_agent.core.settings import job_path
from spotkeeper_agent.job.launch_spec import launcher_kind
from spotkeeper_agent.job.launcher_client import Launcher
from spotkeeper_agent.launcher import pyenv
from tests.agent.fakes import wait_until

PROGRAM = Path(pyenv.__file__)
UV = shutil.which("uv", path=str(Path(sys.executable).parent)) or shutil.which("uv")


def wheel(folder: Path, version: str = "1.0") -> Path:
    """A package ``toffee`` with one module, as an index would serve it."""
    path = folder / f"toffee-{version}-py3-none-any.whl"
    info = f"toffee-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("toffee.py", f"VERSION = {version!r}\n")
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: toffee\nVersion: {version}\n")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", f"toffee.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
    return path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """(source, run, home) after an environment was made on the boot disk; venv and pip take seconds."""
    folder = tmp_path_factory.mktemp("pyenv")
    source, run, home = (folder / each for each in ("source", "run", "home"))
    source.mkdir()
    run.mkdir()
    wheel(source)
    (source / "requirements.txt").write_text("./toffee-1.0-py3-none-any.whl\nmsgspec  # the image has it\n")
    pyenv.find(run, source, "requirements.txt", home)
    return source, run, home


def python(place: Path, code: str) -> str:
    command = [str(place / "bin" / "python"), "-c", code]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_an_environment_has_the_requirements_and_the_images_packages(made: tuple[Path, Path, Path]) -> None:
    source, run, home = made
    place = pyenv.find(run, source, "requirements.txt", home)
    assert python(place, "import toffee; print(toffee.VERSION)") == "1.0"
    import msgspec

    assert python(place, "import msgspec; print(msgspec.__file__)") == msgspec.__file__, "installed once more"
    assert not (run / pyenv.BUILDING).exists()


def test_an_environment_is_made_once(made: tuple[Path, Path, Path], capfd: pytest.CaptureFixture[str]) -> None:
    source, run, home = made
    first = pyenv.find(run, source, "requirements.txt", home)
    mark = (first / pyenv.READY).stat()
    assert pyenv.find(run, source, "requirements.txt", home) == first
    assert (first / pyenv.READY).stat() == mark
    assert "made" not in capfd.readouterr().out


def test_the_launcher_runs_in_the_environment(made: tuple[Path, Path, Path]) -> None:
    """Its first start makes the environment, which may take long: the agent knows, and another kind is another."""
    source, run, home = made
    events: queue.SimpleQueue[object] = queue.SimpleQueue()
    job = JobRun("job", ("train.py",), None, python=sys.executable, launcher="exec", requirements="requirements.txt")
    kind = launcher_kind(job, source, home)
    assert kind.key() != launcher_kind(replace(job, requirements=""), source, home).key()
    launcher = Launcher(run, job_path(), events.put, Log(write=lambda line: None))
    launcher.begin(kind)
    try:
        assert isinstance(events.get(timeout=60), LauncherUp)
        program = Path(f"/proc/{launcher.pid}/cmdline").read_bytes().split(b"\0")[0].decode()
        assert program == str(pyenv.find(run, source, "requirements.txt", home) / "bin" / "python")
        assert not launcher.building
    finally:
        launcher.quit()
        wait_until(lambda: launcher.gone, 30)


def test_the_disks_environment_is_preferred(made: tuple[Path, Path, Path], tmp_path: Path) -> None:
    source, _, home = made
    disk, run = tmp_path / "disk", tmp_path / "run"
    run.mkdir()
    there = disk / pyenv.name(source, "requirements.txt")
    there.mkdir(parents=True)
    (there / pyenv.READY).touch()
    assert pyenv.find(run, source, "requirements.txt", home).parent == home
    (run / pyenv.DISK).write_text(f"{disk}\n")
    assert pyenv.find(run, source, "requirements.txt", home) == there


def test_a_disk_that_arrives_ends_the_work_on_the_boot_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has one already; or the work goes on there, where it lasts."""
    source, run, disk = tmp_path / "source", tmp_path / "run", tmp_path / "disk"
    source.mkdir()
    run.mkdir()
    (source / "requirements.txt").write_text("")
    there = disk / pyenv.name(source, "requirements.txt")

    def slow(source: Path, file: str, target: Path) -> list[list[str]]:
        there.mkdir(parents=True)
        (there / pyenv.READY).touch()
        (run / pyenv.DISK).write_text(f"{disk}\n")
        return [["sleep", "1000"]]

    monkeypatch.setattr(pyenv, "_commands", slow)
    assert pyenv.find(run, source, "requirements.txt", tmp_path / "home") == there
    assert list((tmp_path / "home").iterdir()) == [], "what was begun is in nobody's way"


def test_an_incomplete_environment_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, run, home = tmp_path / "source", tmp_path / "run", tmp_path / "home"
    source.mkdir()
    run.mkdir()
    (source / "requirements.txt").write_text("")
    half = home / pyenv.name(source, "requirements.txt")
    half.mkdir(parents=True)
    (half / "rubbish").touch()
    (home / "of-another-file").mkdir()
    monkeypatch.setattr(pyenv, "_commands", lambda source, file, target: [["mkdir", str(target)]])
    assert pyenv.find(run, source, "requirements.txt", home) == half
    assert [path.name for path in half.iterdir()] == [pyenv.READY]
    assert list(home.iterdir()) == [half]


def test_a_failed_installation_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "requirements.txt").write_text("")
    monkeypatch.setattr(pyenv, "_commands", lambda *_: [["sh", "-c", "echo no toffee >&2; exit 3"]])
    with pytest.raises(pyenv.EnvError, match="requirements: sh ended with 3; its last lines are above"):
        pyenv.find(tmp_path, tmp_path, "requirements.txt", tmp_path / "home")
    assert "no toffee" in capfd.readouterr().err
    assert not (tmp_path / pyenv.BUILDING).exists()


def test_a_missing_requirements_file_is_reported(tmp_path: Path) -> None:
    command = [sys.executable, "-B", str(PROGRAM), str(tmp_path), str(tmp_path), "needs.txt", "home", "exec"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (1, "requirements: no needs.txt in the job's source\n")


def test_uv_lock_needs_uv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "uv.lock").touch()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(pyenv.EnvError, match="needs uv on the machine"):
        pyenv.find(tmp_path, tmp_path, "uv.lock", tmp_path / "home")


@pytest.mark.skipif(not UV, reason="no uv beside this Python: `make setup` brings it")
def test_uv_lock_is_installed_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing else: what the image has is not seen."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "pyproject.toml").write_text(
        '[project]\nname = "job"\nversion = "0"\nrequires-python = ">=3.11"\ndependencies = ["toffee"]\n'
        f'[tool.uv.sources]\ntoffee = {{path = "{wheel(source).name}"}}\n'
    )
    assert UV is not None
    monkeypatch.setenv("PATH", f"{Path(UV).parent}:/usr/bin:/bin")
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "cache"))
    subprocess.run([UV, "lock", "--offline", "-q"], cwd=source, check=True)
    place = pyenv.find(tmp_path, source, "uv.lock", tmp_path / "home")
    assert python(place, "import toffee; print(toffee.VERSION)") == "1.0"
    assert python(place, "import importlib.util; print(importlib.util.find_spec('msgspec'))") == "None"


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("requirements.txt", "other\n"),
        ("more.txt", "other\n"),  # named by -r
        ("pins.txt", "other\n"),  # named by -c, in that one
        ("base.txt", "other\n"),  # named without a space
        ("toffee-1.0-py3-none-any.whl", "other"),
    ],
)
def test_a_change_of_any_input_is_another_environment(tmp_path: Path, file: str, text: str) -> None:
    (tmp_path / "requirements.txt").write_text("-r more.txt\n-rbase.txt\n./toffee-1.0-py3-none-any.whl\n")
    (tmp_path / "base.txt").write_text("")
    (tmp_path / "more.txt").write_text("--constraint=pins.txt\n")
    (tmp_path / "pins.txt").write_text("toffee<2\n")
    wheel(tmp_path)
    (tmp_path / "train.py").write_text("")
    before = pyenv.contents(tmp_path, "requirements.txt")
    (tmp_path / "train.py").write_text("pass\n")
    assert pyenv.contents(tmp_path, "requirements.txt") == before, "what it is not made of"
    (tmp_path / file).write_text(text)
    assert pyenv.contents(tmp_path, "requirements.txt") != before


@pytest.mark.parametrize(
    "text",
    [
        b"-r requirements.txt\n" * 100,  # a file that names itself took a minute with four such lines, hours with five
        b"-r a\0b\n./a\0b\n-r .\n-r\n",
        b"-r wheels/" + b"x" * 300 + b"\n./wheels/" + b"x" * 300 + b"\n",
        b"-r pipe.txt\n./pipe.txt\n-r /dev/zero\n",
        b"\xff\xfe\x00-\x00r\x00",
    ],
    ids=["itself", "nul", "long", "pipe", "no text"],
)
def test_an_invalid_requirements_file_does_not_block_the_agent(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "wheels").mkdir()
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "requirements.txt").write_bytes(text)
    assert pyenv.contents(tmp_path, "requirements.txt") == pyenv.contents(tmp_path, "requirements.txt")
