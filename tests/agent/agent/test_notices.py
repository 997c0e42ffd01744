"""What is done about a notice, in this process: which words leave the machine, and in which order."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from spotkeeper.clock import Clock
from spotkeeper.contract.facts import Kind
from spotkeeper_agent.agent import notices
from spotkeeper_agent.agent.notices import LATE_S, NoticeHandler
from spotkeeper_agent.cloud.gce import Gce
from spotkeeper_agent.cloud.notice import REBALANCE_S, Cause, CloudWarning, Instance, Notice
from spotkeeper_agent.core.log import Log
from spotkeeper_agent.core.settings import Settings
from spotkeeper_agent.core.state import AgentState, MachineState, Saved
from spotkeeper_agent.core.sync import FunctionClient, Outbox, Syncer
from spotkeeper_agent.job.supervisor import Supervisor
from tests.module_time import replace_time

NOW = 1_800_000_000.0


class Still(Clock):
    """A clock that a test sets."""

    at = NOW

    def now(self) -> float:
        return Still.at


@pytest.fixture
def me(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MachineState:
    monkeypatch.setattr(Still, "at", NOW)
    clock, log = Still(), Log(write=lambda _: None)
    settings = Settings("", "b", "", "17", "n", "z", 120.0, False, tmp_path, "boot")
    settings.run.mkdir(parents=True)
    outbox = Outbox(tmp_path / "spool", "boot", log)
    metadata = Gce(clock, "127.0.0.1:1")
    return MachineState(
        settings, Syncer(FunctionClient("", metadata), outbox, "boot", lambda _: None, clock, log), clock, log
    )


def said(me: MachineState) -> list[tuple[Kind, str]]:
    return [(fact.kind, fact.value) for fact in me.sync._outbox.waiting()]


def seen(cause: Cause | None, deadline: float | None = None) -> Instance:
    return Instance("17", "n", "z", warning=CloudWarning(cause, deadline) if cause is not None else None)


def handler_of(me: MachineState) -> NoticeHandler:
    return NoticeHandler(me, cast(Supervisor, SimpleNamespace(child=None)))


def test_a_rebalance_notice_lasts_until_it_is_withdrawn(me: MachineState) -> None:
    """Also one on which nothing trains: a standby's notice runs out as any other's."""
    handler, first = handler_of(me), str(int(NOW + REBALANCE_S))
    handler.observed(seen(Cause.REBALANCE))
    handler.act()
    assert said(me) == [(Kind.NOTICE, first)]
    Still.at = NOW + REBALANCE_S / 2
    handler.act()
    handler.act()
    moved = str(int(Still.at + REBALANCE_S))
    assert said(me) == [(Kind.NOTICE, first), (Kind.NOTICE, moved), (Kind.REPRIEVE, first)], "at no time without any"
    assert Saved.read(me.settings.run, "boot").notice == Notice(Cause.REBALANCE, int(moved), Still.at)
    handler.observed(seen(None))
    assert said(me)[3:] == [(Kind.REPRIEVE, moved)] and me.saved.notice is None


def test_a_more_certain_cause_replaces_a_less_certain_one(me: MachineState) -> None:
    handler = handler_of(me)
    handler.observed(seen(Cause.REBALANCE))
    handler.observed(seen(Cause.PREEMPTED, NOW + 119.5))
    words: list[tuple[Kind, Any]] = [
        (Kind.NOTICE, str(int(NOW + REBALANCE_S))),
        (Kind.NOTICE, str(int(NOW + 119))),
        (Kind.REPRIEVE, str(int(NOW + REBALANCE_S))),
    ]
    assert said(me) == words
    handler.observed(seen(Cause.REBALANCE))
    handler.act()
    assert said(me) == words


@pytest.mark.parametrize(("need_s", "given_s"), [(30.0, 30.0), (0.0, LATE_S)])
def test_a_machine_that_outlives_its_deadline_still_saves(
    me: MachineState, monkeypatch: pytest.MonkeyPatch, need_s: float, given_s: float
) -> None:
    """Maintenance whose window has begun, seen only now: the job was killed in the moment it was told to save."""
    asked: list[float] = []
    child = SimpleNamespace(gen=1, saving=False, signals=False, need_s=need_s)
    handler = NoticeHandler(me, cast(Supervisor, SimpleNamespace(child=child, save_and_stop=asked.append)))
    replace_time(monkeypatch, notices, time=lambda: NOW)
    handler.observed(seen(Cause.MAINTENANCE, NOW - 600))
    handler.act()
    assert asked == [NOW + given_s]


class Training:
    """A job that takes 4 s to stop and 3 s to save; a notice of 40 s leaves a reserve of 8 s."""

    def __init__(self, me: MachineState, monkeypatch: pytest.MonkeyPatch) -> None:
        self.saves = 0
        self.stops: list[float] = []
        self.states: list[AgentState] = []
        self.child = SimpleNamespace(
            gen=1, saving=False, signals=False, need_s=4.0, control=SimpleNamespace(save_s=3.0)
        )
        replace_time(monkeypatch, notices, time=lambda: Still.at)
        monkeypatch.setattr(me, "become", self.states.append)
        supervisor = SimpleNamespace(child=self.child, save=self._save, save_and_stop=self._stop)
        self.handler = NoticeHandler(me, cast(Supervisor, supervisor))

    def _save(self) -> None:
        self.saves += 1

    def _stop(self, deadline: float) -> None:
        self.child.saving = True
        self.stops.append(deadline - Still.at)

    def act(self, left_s: float) -> None:
        """What the handler does ``left_s`` seconds before the deadline of a notice of 40 s."""
        Still.at = NOW + 40.0 - left_s
        self.handler.act()


@pytest.fixture
def training(me: MachineState, monkeypatch: pytest.MonkeyPatch) -> Training:
    made = Training(me, monkeypatch)
    made.handler.observed(seen(Cause.PREEMPTED, NOW + 40.0))
    return made


def test_a_notice_saves_once_and_stops_once_just_in_time(training: Training) -> None:
    for left_s in (40.0, 30.0, 12.1):
        training.act(left_s)
    assert (training.saves, training.stops, training.states) == (1, [], [])
    training.act(12.0)
    training.act(11.0)
    assert training.saves == 1
    assert training.stops == [12.0 - 0.25 * 8.0], "and a quarter of the reserve stays"
    assert training.states == [AgentState.SAVING]


def test_a_notice_that_leaves_time_for_one_save_only_stops(training: Training) -> None:
    training.act(15.0)
    assert training.saves == 0
    training.act(12.0)
    assert len(training.stops) == 1


def test_each_generation_and_each_notice_saves(training: Training) -> None:
    training.act(40.0)
    training.child.gen = 2
    training.act(39.0)
    training.handler.observed(seen(Cause.PREEMPTED, NOW + 60.0))
    training.act(38.0)
    assert training.saves == 3


def test_a_script_that_saves_by_itself_is_asked_only_to_stop(training: Training) -> None:
    training.child.signals = True
    training.act(40.0)
    training.act(12.0)
    assert (training.saves, len(training.stops)) == (0, 1)


def test_a_short_notice_has_a_shorter_reserve(me: MachineState, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(me, monkeypatch)
    training.handler.observed(seen(Cause.PREEMPTED, NOW + 8.0))
    Still.at = NOW + 1.9
    training.handler.act()
    assert training.stops == []
    Still.at = NOW + 2.0
    training.handler.act()
    assert training.stops == [6.0 - 0.25 * 2.0]


def test_a_notice_of_two_seconds_leaves_half_a_second(me: MachineState, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(me, monkeypatch)
    training.handler.observed(seen(Cause.PREEMPTED, NOW + 2.0))
    training.handler.act()
    assert training.stops == [2.0 - 0.25 * 0.5]


def test_a_notice_and_its_end_are_logged_with_the_time_that_is_left(me: MachineState) -> None:
    lines: list[dict[str, object]] = []
    me.log._write = lambda line: lines.append(json.loads(line))
    handler = handler_of(me)
    handler.observed(seen(Cause.REBALANCE))
    handler.observed(seen(None))
    told = [line for line in lines if line["event"] != "fact"]
    assert [{key: line[key] for key in line if key != "at"} for line in told] == [
        {"event": "notice", "cause": Cause.REBALANCE.value, "within_s": REBALANCE_S},
        {"event": "notice.withdrawn", "cause": Cause.REBALANCE.value},
    ]
