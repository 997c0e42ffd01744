"""The agent's loop in this process: what a killed agent has not said, and a wall clock that is set."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from spotkeeper import clock
from spotkeeper.clock import Clock
from spotkeeper.train.agent_link.control import Control
from spotkeeper_agent.agent.agent import Agent
from spotkeeper_agent.cloud.gce import Gce
from spotkeeper_agent.cloud.notice import Cause, CloudWarning, Instance, Notice
from spotkeeper_agent.core.log import Log
from spotkeeper_agent.core.settings import Settings
from spotkeeper_agent.core.state import Assignment, Saved
from spotkeeper_agent.job import supervisor
from tests.agent.fakes import JOB
from tests.module_time import replace_time

QUIET = Log(write=lambda _: None)


class KilledError(BaseException):
    """At this very moment."""


PREEMPTED = Notice(Cause.PREEMPTED, 1120, 1000.0)


def seen(warning: CloudWarning | None = None) -> Instance:
    return Instance("1", "n", "z", warning=warning)


def an_agent(folder: Path) -> Agent:
    settings_ = Settings("http://f", "b", "http://b", "1", f"sk-s-{JOB}-n0000-a1", "z", 120.0, False,
                         folder, "boot")  # fmt: skip
    settings_.node.mkdir(parents=True)
    clock = Clock()
    return Agent(settings_, Gce(clock, "127.0.0.1:1"), clock, QUIET)


@pytest.mark.parametrize("what", ["its job ended", "its launcher is gone", "its notice is withdrawn"])
def test_unsent_facts_of_a_killed_agent_are_sent_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Written down as said, and not yet in the spool, an end was never heard of: its job stood still for good."""
    agent = an_agent(tmp_path)
    agent._machine.save(assignment=Assignment(JOB, 0, 1), started=3, notice=PREEMPTED)

    def say(*_: object, **__: object) -> None:
        raise KilledError

    monkeypatch.setattr(agent._sync, "say", say)
    with pytest.raises(KilledError):
        if what == "its job ended":
            (tmp_path / "gen").mkdir()
            agent._super.child = supervisor.Child(3, tmp_path / "gen", 1, 5.0, Control.create(tmp_path / "gen/ctl"))
            agent._membership.child_ended(3, 0, 0)
        elif what == "its launcher is gone":
            agent._membership.lost(3)
        else:
            agent._notices.observed(seen())
    saved = Saved.read(agent._set.run, "boot")
    assert (saved.ended, saved.notice) == (-1, PREEMPTED)


@pytest.mark.parametrize("by_s", [-1e6, 1e6])
def test_setting_the_wall_clock_changes_no_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_s: float) -> None:
    """Set right after a boot, it powered the machine off: alone for longer than its lease, it seemed."""
    agent = an_agent(tmp_path)
    real, steady = time.time, time.monotonic
    replace_time(monkeypatch, clock, time=lambda: real() + by_s)
    agent._replies.check_silence()
    assert agent._teardown.departure is None
    replace_time(monkeypatch, clock, monotonic=lambda: steady() + 2 * 120 * 60)
    agent._replies.check_silence()
    assert agent._teardown.departure is not None


def test_a_saver_that_does_not_answer_yet_is_waited_for(tmp_path: Path) -> None:
    """Its machine said "freed", and the saver came up after that word."""
    agent = an_agent(tmp_path)
    starting = agent._components.preparation._saver = subprocess.Popen(["sleep", "60"])
    try:
        assert not agent._components.preparation.end_saver(hurry=False)
        starting.wait(10)
        assert agent._components.preparation.end_saver(hurry=False)
    finally:
        starting.kill()
        starting.wait()
