"""How the supervisor stops a generation, and what it makes of a generation's end."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spotkeeper.contract.generation import JobRun, Member
from spotkeeper.train.agent_link.control import NAME, Control, RunPhase, RunResult, write_result
from spotkeeper_agent.core import settings
from spotkeeper_agent.core.log import Log
from spotkeeper_agent.job import launch_spec, supervisor
from spotkeeper_agent.job.chunks import LAUNCHER_LOG
from spotkeeper_agent.job.supervisor import Ending, Supervisor
from tests.agent.fakes import document
from tests.module_time import replace_time

QUIET = Log(write=lambda _: None)


def ending(folder: Path, control: Control, code: int = 0) -> Ending:
    child: Any = SimpleNamespace(
        folder=folder, gen=3, control=control, nproc=1, saving=False, discarded=False, stop=None
    )
    return Supervisor._ending(None, child, code)  # type: ignore[arg-type]


@pytest.fixture
def control(tmp_path: Path) -> Control:
    made = Control.create(tmp_path / NAME)
    made.state = RunPhase.TRAINING  # attach() has returned
    return made


def test_a_job_that_attached_and_never_looped_is_reported(tmp_path: Path, control: Control) -> None:
    found = ending(tmp_path, control)
    assert found.well and found.unlooped


def test_a_job_that_stepped_failed_or_never_attached_is_not_reported(tmp_path: Path, control: Control) -> None:
    assert not ending(tmp_path, control, code=1).unlooped
    control.state = RunPhase.STARTING
    assert not ending(tmp_path, control).unlooped
    control.state = RunPhase.TRAINING
    control.stepped(1)
    assert not ending(tmp_path, control).unlooped


def test_a_job_with_nothing_left_to_do_is_not_reported(tmp_path: Path, control: Control) -> None:
    write_result(tmp_path, RunResult("done", 3, 8, None))
    assert not ending(tmp_path, control).unlooped


@pytest.mark.parametrize("by_s", [-3600.0, 3600.0])
def test_a_stop_is_timed_by_a_steady_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_s: float) -> None:
    """Set back, nobody ended a job that hung, for as long as it had been set back; set on, no job could save."""
    sent: list[int] = []
    launcher: Any = SimpleNamespace(signal=lambda _, number: sent.append(number), kill=lambda _: sent.append(9))
    one = supervisor.Supervisor(tmp_path, tmp_path, launcher, QUIET)
    with Control.create(tmp_path / "ctl") as control:
        control.state = RunPhase.TRAINING
        one.child = supervisor.Child(1, tmp_path, 1, 25.0, control)
        one.save_and_stop(None)
        real, steady = time.time, time.monotonic
        replace_time(monkeypatch, supervisor, time=lambda: real() + by_s)
        one.tick()
        assert sent == []
        for late_s, number in ((24.5, 15), (60.0, 9)):
            replace_time(monkeypatch, supervisor, monotonic=lambda late_s=late_s: steady() + late_s)
            one.tick()
            assert sent[-1] == number


@pytest.mark.parametrize(
    ("gen", "state", "saved", "told"),
    [
        (2, RunPhase.STARTING, False, 1),
        (1, RunPhase.STARTING, False, 0),  # the first one began where it had to
        (2, RunPhase.RESTORING, False, 0),
        (2, RunPhase.STARTING, True, 0),  # it takes its time, but has attached before
    ],
)
def test_a_script_that_always_starts_over_is_warned_in_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gen: int, state: RunPhase, saved: bool, told: int
) -> None:
    """Without the two lines it went back to step 0 after every loss, and nothing said so anywhere."""
    launcher: Any = SimpleNamespace(start=lambda *_: None)
    one = supervisor.Supervisor(tmp_path, settings.templates_path(), launcher, QUIET)
    if saved:
        (tmp_path / "ckpt/1-7").mkdir(parents=True)
    node = launch_spec.LaunchSpec(0, 0, "127.0.0.1", tmp_path, tmp_path / "s", tmp_path / "ckpt", tmp_path / "out")
    run = JobRun(name="job", command=("train.py",), source_sha256=None)
    one.start(document(1, gen, (Member(0, 1, "1", "b", "127.0.0.1", 1),)), run, node)
    assert one.child is not None
    one.child.control.state = state
    log, steady = one.child.folder / LAUNCHER_LOG, time.monotonic
    one.tick()
    assert not log.exists(), "it imports"
    replace_time(monkeypatch, supervisor, monotonic=lambda: steady() + 20.0)
    one.tick()
    one.tick()
    text = log.read_text() if log.exists() else ""
    assert text.count("Without this call a script starts over after every loss: docs/train.md") == told
    one.child.control.close()


def test_a_stop_without_a_result_is_reported_as_a_stop(tmp_path: Path) -> None:
    """On a full /run, of a node whose peers were told first: exit 0 alone would say that the job is through."""
    launcher: Any = SimpleNamespace(pid=0, folder=tmp_path)
    one = supervisor.Supervisor(tmp_path, tmp_path, launcher, QUIET)
    for state, stopped in ((RunPhase.STOPPED, True), (RunPhase.STOPPING, False), (RunPhase.DONE, False)):
        control = Control.create(tmp_path / "ctl")
        control.state = state
        one.child = supervisor.Child(1, tmp_path, 1, 25.0, control)
        ending = one.ended(1, 0)
        assert ending is not None and (ending.stopped, ending.well) == (stopped, not stopped)
