"""The jobs' unit and the agent's end of it: programs, signals, marks; here without systemd, in the same user."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from spotkeeper.vm import jobhost, power
from spotkeeper.vm.launcher import host
from spotkeeper.vm.launcher.process import NODE

from tests.vm.fakes import alive, wait_until


def answers() -> bool:
    try:
        jobhost.spawn("try", ["true"], {}, Path("/dev/null"))
    except OSError:
        return False
    return True


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A host that runs, and an agent that believes to be a unit beside it."""
    process = subprocess.Popen([sys.executable, "-IBS", str(host.__file__), str(tmp_path)], env={"HOME": "/of/jobs"})
    monkeypatch.setattr(jobhost, "HOST", tmp_path / host.SOCKET)
    monkeypatch.setenv(power.UNITS, "1")
    wait_until(answers)
    yield tmp_path
    process.kill()
    process.wait()


def test_a_program_is_started_as_the_jobs_user_would_and_its_end_is_told(folder: Path) -> None:
    log = folder / "log"
    started = jobhost.spawn("launcher", ["sh", "-c", "echo $HOME $WHO; exit 7"], {"WHO": "job", "HOME": "/agent"}, log)
    wait_until(lambda: started.poll() is not None)
    assert started.poll() == 7
    assert log.read_text() == "/of/jobs job\n"
    assert (folder / host.SOCKET).stat().st_mode & 0o007 == 0, "for the group only"


def test_signals_and_sweeps_reach_what_the_agent_may_not_signal_itself(folder: Path) -> None:
    sleeper = jobhost.spawn("saver", ["sleep", "60"], {}, folder / "log")
    assert sleeper.poll() is None
    sleeper.terminate()
    wait_until(lambda: sleeper.poll() is not None)
    assert sleeper.poll() == 128 + signal.SIGTERM
    marked = jobhost.spawn("launcher", ["sleep", "61"], {NODE: str(folder / "run")}, folder / "log")
    kept = jobhost.spawn("launcher", ["sleep", "62"], {NODE: str(folder / "run")}, folder / "log")
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


NONSENSE = [
    b"{}", b"[]", b"7", b"nonsense", b'{"op": "start"}', b'{"op": "signal", "pid": "x"}', b'{"op": "sweep", "keep": 7}',
    b'{"op": "signal", "pid": 1e99, "signal": 9}', b'{"op": "signal", "pid": -1, "signal": 9}',
    b'{"op": "signal", "pid": 0, "signal": 9}', b'{"op": "shell", "argv": ["id"]}',
]  # fmt: skip


@pytest.mark.parametrize("line", NONSENSE)
def test_what_makes_no_sense_is_answered_and_ends_nothing(folder: Path, line: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(folder / host.SOCKET))
        sock.sendall(line + b"\n")
        assert json.loads(sock.makefile("rb").readline())["ok"] is False
    assert jobhost.sweep(folder / "none", set()) == 0


def test_a_program_that_is_not_there_ends_with_a_word_in_its_log(folder: Path) -> None:
    started = jobhost.spawn("launcher", ["/no/such/program"], {}, folder / "log")
    wait_until(lambda: started.poll() == 127)
    assert "/no/such/program: " in (folder / "log").read_text()


def test_without_its_unit_no_job_is_started_as_the_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fence could not be raised, so the unit is not there: its user's programs must not run as somebody else."""
    monkeypatch.setenv(power.UNITS, "1")
    monkeypatch.setattr(jobhost, "HOST", tmp_path / "none")
    with pytest.raises(OSError, match="the jobs' unit does not answer"):
        jobhost.spawn("launcher", ["touch", str(tmp_path / "ran")], dict(os.environ), tmp_path / "log")
    assert not (tmp_path / "ran").exists()
