"""The jobs' unit and the agent's end of it: programs, signals, marks; here without systemd, in the same user."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from spotkeeper.train.core import beneath
from spotkeeper_agent.core.settings import job_path
from spotkeeper_agent.host import systemd
from spotkeeper_agent.job import jobhost, launcher_client
from spotkeeper_agent.launcher import host, pyenv, server
from spotkeeper_agent.launcher.process import MARK
from tests.agent.fakes import REPO, alive, wait_until

JOB = "abcd2345"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A host that runs, and an agent that believes to be a unit beside it."""
    env = {"HOME": str(tmp_path / "home"), "PATH": os.environ["PATH"]}
    process = subprocess.Popen([sys.executable, "-IBS", str(host.__file__), str(tmp_path)], env=env)
    monkeypatch.setattr(jobhost, "HOST", tmp_path / host.SOCKET)
    monkeypatch.setenv(systemd.UNITS, "1")
    jobhost.begin(JOB)
    yield tmp_path
    process.kill()
    process.wait()


def test_the_unit_starts_a_program_and_reports_its_end(folder: Path) -> None:
    log = folder / "log"
    started = jobhost.spawn("launcher", ["sh", "-c", "echo $HOME $WHO; exit 7"], {"WHO": "job", "HOME": "/agent"}, log)
    wait_until(lambda: started.poll() is not None)
    assert started.poll() == 7
    assert log.read_text() == f"{folder}/home/{JOB} job\n"
    assert (folder / host.SOCKET).stat().st_mode & 0o007 == 0, "for the group only"


def test_the_unit_signals_and_sweeps_the_jobs_processes(folder: Path) -> None:
    sleeper = jobhost.spawn("saver", ["sleep", "60"], {}, folder / "log")
    assert sleeper.poll() is None
    sleeper.terminate()
    wait_until(lambda: sleeper.poll() is not None)
    assert sleeper.poll() == 128 + signal.SIGTERM
    marked = jobhost.spawn("launcher", ["sleep", "61"], {MARK: str(folder / "run")}, folder / "log")
    kept = jobhost.spawn("launcher", ["sleep", "62"], {MARK: str(folder / "run")}, folder / "log")
    wait_until(lambda: jobhost.sweep(folder / "run", {kept.pid}) == 1)
    wait_until(lambda: marked.poll() is not None)
    assert alive(kept.pid)
    jobhost.send_signal(kept.pid, signal.SIGKILL)
    wait_until(lambda: kept.poll() == 128 + signal.SIGKILL)
    jobhost.send_signal(kept.pid, signal.SIGKILL)  # gone already: nobody misses it


def test_programs_outlive_the_agent_that_started_them(folder: Path) -> None:
    started = jobhost.spawn("launcher", ["sleep", "63"], {}, folder / "log")
    assert isinstance(started, jobhost.Hosted)
    started._sock.close()  # as the end of the agent would
    assert jobhost.sweep(folder / "none", set()) == 0, "the host answers on"
    assert alive(started.pid)
    jobhost.send_signal(started.pid, signal.SIGKILL)


def test_a_job_finds_no_files_of_another(folder: Path) -> None:
    """The unit ends where another job begins, and systemd starts it anew; here the test does."""
    mine = folder / "home" / JOB
    (mine / "locked/deep").mkdir(parents=True)
    (mine / "locked").chmod(0)
    (mine / "link").symlink_to(folder / "kept")
    (folder / "kept").mkdir()
    jobhost.begin(JOB)
    assert mine.is_dir(), "the same job goes on with what it has"
    with pytest.raises(OSError, match="unit"):
        jobhost._once({"op": "begin", "job": "bcde2345"})
    env = {"HOME": str(folder / "home"), "PATH": os.environ["PATH"]}
    again = subprocess.Popen([sys.executable, "-IBS", str(host.__file__), str(folder)], env=env)
    try:
        jobhost.begin("bcde2345")
        assert [path.name for path in (folder / "home").iterdir()] == ["bcde2345"]
        assert (folder / "kept").is_dir(), "links are not followed"
    finally:
        again.kill()
        again.wait()


def test_nothing_starts_before_a_job_has_begun(folder: Path) -> None:
    with pytest.raises(OSError):
        jobhost._once({"op": "begin", "job": ""})
    process = subprocess.Popen(
        [sys.executable, "-IBS", str(host.__file__), str(folder)], env={"HOME": str(folder / "home")}
    )
    try:
        jobhost.begin("")
        with pytest.raises(OSError, match="no job has begun"):
            jobhost.spawn("launcher", ["true"], {}, folder / "log")
    finally:
        process.kill()
        process.wait()


NONSENSE = [
    b"{}", b"[]", b"7", b"nonsense", b'{"op": "start"}', b'{"op": "signal", "pid": "x"}', b'{"op": "sweep", "keep": 7}',
    b'{"op": "signal", "pid": 1e99, "signal": 9}', b'{"op": "signal", "pid": -1, "signal": 9}',
    b'{"op": "signal", "pid": 0, "signal": 9}', b'{"op": "begin", "job": "../x"}', b'{"op": "begin", "job": 7}',
    b'{"op": "begin"}', b'{"op": "shell", "argv": ["id"]}',
]  # fmt: skip


@pytest.mark.parametrize("line", NONSENSE)
def test_invalid_requests_are_answered_and_end_nothing(folder: Path, line: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(folder / host.SOCKET))
        sock.sendall(line + b"\n")
        assert json.loads(sock.makefile("rb").readline())["ok"] is False
    assert jobhost.sweep(folder / "none", set()) == 0


def test_a_missing_program_is_named_in_the_log(folder: Path) -> None:
    started = jobhost.spawn("launcher", ["/no/such/program"], {}, folder / "log")
    wait_until(lambda: started.poll() == 127)
    assert "/no/such/program: " in (folder / "log").read_text()


def test_without_the_unit_no_job_runs_as_the_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fence could not be raised, so the unit is not there: its user's programs must not run as somebody else."""
    monkeypatch.setenv(systemd.UNITS, "1")
    monkeypatch.setattr(jobhost, "HOST", tmp_path / "none")
    with pytest.raises(OSError, match="the jobs' unit does not answer"):
        jobhost.spawn("launcher", ["touch", str(tmp_path / "ran")], dict(os.environ), tmp_path / "log")
    assert not (tmp_path / "ran").exists()


IMPOSTOR = """
import os, socket, sys
os.chmod(sys.argv[1].rpartition("/")[0], 0o777)
os.setuid(65534)
sock = socket.socket(socket.AF_UNIX)
sock.bind(sys.argv[1])
sock.listen()
print("listens", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="a process of another user needs root")
def test_a_job_that_listens_in_the_units_place_receives_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    path = folder / host.SOCKET
    monkeypatch.setenv(systemd.UNITS, "1")
    monkeypatch.setattr(jobhost, "HOST", path)
    argv = [sys.executable, "-IS", "-c", IMPOSTOR, str(path)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as impostor:
        assert impostor.stdout is not None and impostor.stdout.readline() == "listens\n"
        with pytest.raises(OSError, match="user 65534 listens on it, not systemd"):
            jobhost.spawn("launcher", ["true"], {"SECRET": "hunter2"}, tmp_path / "log")
    shutil.rmtree(folder)


def test_root_restarts_a_silent_unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(systemd, "request_root", asked.append)
    monkeypatch.setenv(systemd.UNITS, "1")
    monkeypatch.setattr(jobhost, "HOST", tmp_path / host.SOCKET)
    monkeypatch.setattr(jobhost, "ANSWER_S", 0.05)
    monkeypatch.setattr(jobhost, "BEGIN_S", 0.2)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(jobhost.HOST))
        silent.listen(16)
        assert jobhost.sweep(tmp_path, set()) == 0
        jobhost.send_signal(4711, signal.SIGTERM)
        with pytest.raises(jobhost.SilentError):
            jobhost.spawn("launcher", ["true"], {}, tmp_path / "log")
        assert asked == ["restart-jobs"] * 3
        with pytest.raises(jobhost.SilentError):
            jobhost.begin(JOB)
        assert asked == ["restart-jobs"] * 4, "once it has had the time to delete what another job has left"


def _link(at: Path) -> None:
    (at.parent / "agent.json").write_text("{}")
    at.symlink_to(at.parent / "agent.json")


def _locked(at: Path) -> None:
    (at / "below").mkdir(parents=True)
    at.chmod(0)


TRAPS = {
    "a link": _link,
    "a pipe": os.mkfifo,
    "a folder": _locked,
    "a dangling link": lambda at: at.symlink_to("/no/x"),
}


@pytest.mark.parametrize("units", [True, False])
@pytest.mark.parametrize("trap", TRAPS)
def test_a_jobs_leftovers_do_not_block_the_next_saver(
    folder: Path, monkeypatch: pytest.MonkeyPatch, trap: str, units: bool
) -> None:
    """Under the names of the saver's log and socket, and where the agent writes for the job's Python."""
    if not units:
        monkeypatch.delenv(systemd.UNITS)
    node = folder / "node"
    node.mkdir()
    for name in ("saver.log", launcher_client.SAVER_SOCKET, pyenv.DISK):
        TRAPS[trap](node / name)
    assert launcher_client.saver_pid(node) is None
    saver = launcher_client.start_saver(node, job_path().saver)
    try:
        wait_until(lambda: launcher_client.saver_pid(node) == saver.pid)
        assert (node / "saver.log").is_file() and not (node / "saver.log").is_symlink()
        beneath.replace(node, pyenv.DISK, b"/disk")
        assert (node / pyenv.DISK).read_text() == "/disk"
        assert trap != "a link" or (node / "agent.json").read_text() == "{}"
    finally:
        jobhost.send_signal(saver.pid, signal.SIGKILL)
        wait_until(lambda: saver.poll() is not None)


@pytest.mark.parametrize("trap", TRAPS)
def test_a_jobs_leftovers_do_not_block_the_next_launcher(tmp_path: Path, trap: str) -> None:
    for name in (server.LOCK, server.SOCKET):
        TRAPS[trap](tmp_path / name)
    light = REPO / "tests/agent/light_launcher.py"
    env = os.environ | {"PYTHONPATH": str(job_path())}
    with subprocess.Popen([sys.executable, str(light), str(tmp_path)], env=env) as process:
        wait_until((tmp_path / server.SOCKET).is_socket)
        assert not (tmp_path / server.LOCK).is_symlink()
        process.kill()
