"""When an agent says that its generation hangs, what it answers when the roll is called for it, and what is no hang."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spotkeeper.clock import Clock
from spotkeeper.contract.facts import Hung, WorkerState
from spotkeeper.contract.generation import DocState, Generation, HangRun, JobRun
from spotkeeper.train.agent_link import control
from spotkeeper.train.agent_link.control import Control, RunPhase
from spotkeeper_agent.agent import hang
from spotkeeper_agent.job.supervisor import NEED_MOST_S, Child
from spotkeeper_agent.launcher import stacks
from tests.agent.fakes import wait_until
from tests.module_time import replace_time

GEN = 3
LIMITS = HangRun(factor=30.0, floor_s=600.0, idle_s=3600.0)


@dataclass
class Node:
    """A machine with a generation that runs, seen by its watch alone; ``now``: monotonic seconds."""

    folder: Path
    monkeypatch: pytest.MonkeyPatch
    limits: HangRun | None = LIMITS
    now: float = 1000.0
    used_s: float = 0.0
    said: list[tuple[str, str]] = field(default_factory=list)
    asked: int = 0
    doc: Generation | None = None

    def __post_init__(self) -> None:
        self.control = Control.create(self.folder / "ctl")
        self.child: Child | None = Child(GEN, self.folder, 1, 5.0, self.control)
        replace_time(self.monkeypatch, hang, monotonic=lambda: self.now)
        self.monkeypatch.setattr(hang, "processor_s", lambda _: self.used_s)
        run = JobRun("job", ("train.py",), None, hang=self.limits)
        me: Any = SimpleNamespace(saved=SimpleNamespace(run=run), log=lambda *_, **__: None, say=self._say, doc=None)
        supervisor: Any = SimpleNamespace(child=self.child, show_stacks=self._asked)
        self.me, self.supervisor = me, supervisor
        self.watch = hang.HangWatch(me, supervisor, Clock())

    def _say(self, kind: Any, value: str, *, gen: int) -> None:
        assert gen == GEN
        self.said.append((kind.value, value))

    def _asked(self) -> None:
        self.asked += 1

    def write(self, *where: str) -> None:
        """What the launcher's program leaves; written at another time than the one before."""
        file = self.folder / stacks.SHORT
        file.write_text(json.dumps([{"local_rank": node, "where": word} for node, word in enumerate(where)]))
        os.utime(file, ns=(0, int(self.now * 1e9)))

    def train(self, step: int = 7, step_s: float = 0.5) -> None:
        self.control.state = RunPhase.TRAINING
        self.control.step_s = step_s
        self.control.stepped(step, at=self.now)
        self.after(0.5)

    def after(self, seconds: float) -> list[tuple[str, str]]:
        """What has been said by then."""
        self.now += seconds
        self.watch.go_on()
        return self.said

    def call(self, ver: int = 40) -> None:
        """The roll is called for a hang."""
        self.me.doc = Generation("j", "u", ver, GEN, DocState.ROLL_CALL, (), "", 0, "", stacks=True)


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    return Node(tmp_path, monkeypatch)


def test_a_step_of_many_times_the_usual_time_is_reported_once_as_a_hang(node: Node) -> None:
    node.train()
    assert node.after(600) == []
    assert [kind for kind, _ in node.after(1)] == ["hung"]
    told = Hung.parse(node.said[0][1])
    assert told is not None and told.step == 7
    assert abs(hang.HangWatch(node.me, node.supervisor, Clock()).clock.now() - told.since - 601) < 3
    assert node.asked == 1
    node.after(100)
    assert (len(node.said), node.asked) == (1, 1)
    node.train(8)
    assert len(node.after(700)) == 2, "of the next standstill anew"


def test_an_implausible_step_is_clamped_in_the_report(node: Node) -> None:
    """The job writes its control file, and may write anything."""
    node.train(2**63)
    node.after(601)
    assert Hung.parse(node.said[0][1]) is not None


def test_slow_steps_may_take_long(node: Node) -> None:
    node.train(step_s=100.0)
    assert node.after(2999) == []
    assert node.after(2) != []


@pytest.mark.parametrize(
    "state", [RunPhase.STARTING, RunPhase.RESTORING, RunPhase.TRAINING, RunPhase.FINISHING, RunPhase.DONE]
)
def test_outside_the_loop_only_an_idle_job_hangs(node: Node, state: RunPhase) -> None:
    """Imports, a restore, the first step with its compilation, an evaluation after the last one: they take as long as
    they take."""
    if state in (RunPhase.FINISHING, RunPhase.DONE):
        node.train()
    node.control.state = state
    for _ in range(40):
        node.used_s += 180 * 0.2
        assert node.after(180) == []
    for _ in range(19):
        assert node.after(180) == []
    node.after(180)
    assert [kind for kind, _ in node.after(181)] == ["hung"]


@pytest.mark.parametrize("state", [RunPhase.STOPPING, RunPhase.STOPPED])
def test_an_ending_generation_is_not_a_hang(node: Node, state: RunPhase) -> None:
    node.train()
    node.control.state = state
    assert [node.after(10_000) for _ in range(5)][-1] == []


def test_an_untimed_section_is_no_hang_and_counts_in_no_step_time(node: Node) -> None:
    node.train()
    with control.untimed_section(node.folder, 2):
        with control.untimed_section(node.folder, 2):
            node.after(5000)
        assert control.in_untimed_section(node.folder), "the inner one does not end the outer one"
        assert node.after(5000) == []
    assert node.after(599) == []
    assert node.after(2) != []


def test_no_hang_is_reported_when_switched_off_or_stopping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    off = Node(tmp_path, monkeypatch, limits=None)
    off.train()
    assert off.after(1e6) == []
    off.me.saved.run = JobRun("job", ("train.py",), None, hang=LIMITS)
    assert off.child is not None
    off.child.discarded = True
    assert off.after(1e6) == []


def test_the_roll_call_answer_waits_for_stacks_and_names_the_worst_worker(node: Node) -> None:
    node.train()
    node.after(601)
    node.call()
    node.after(0.5)
    assert node.watch.waits and len(node.said) == 1
    node.write("waits", "elsewhere", "gone")
    assert node.after(0.5)[1:] == [("stacks", f"40-{WorkerState.ELSEWHERE.value}-1")]
    assert not node.watch.waits
    node.after(0.5)
    assert len(node.said) == 2, "once a roll call"
    node.call(44)
    assert node.after(0.5)[2:] == [("stacks", "44-elsewhere-1")]


def test_the_answer_does_not_wait_for_overdue_stacks(node: Node) -> None:
    node.write("waits")  # of an older standstill
    node.train()
    node.after(601)
    node.call()
    assert len(node.after(hang.STACKS_S - 1)) == 1
    assert node.after(2)[1:] == [("stacks", "40-unknown-0")]


def test_a_hang_on_another_machine_requests_stacks_here_too(node: Node) -> None:
    node.train()
    node.after(500)
    node.call()
    node.after(0.5)
    assert node.asked == 1
    node.write("waits")
    assert node.after(0.5) == [("stacks", "40-waits-0")]


@pytest.mark.parametrize("how", ["a step has come", "evaluates after the loop", "says that it takes long"])
def test_a_machine_whose_steps_go_on_answers_busy(node: Node, how: str) -> None:
    node.train()
    node.after(500)
    if how == "a step has come":
        node.train(8)
    elif how == "evaluates after the loop":
        node.control.state = RunPhase.DONE
    node.call()
    with control.untimed_section(node.folder, 0) if how == "says that it takes long" else contextlib.nullcontext():
        node.after(0.5)
    assert node.said == [("stacks", "40-busy-0")]
    assert node.asked == 0


def test_a_worker_that_visibly_works_has_an_hour(node: Node) -> None:
    """An evaluation in the loop that nobody marked."""
    node.train()
    node.after(601)
    node.write("works", "waits")
    node.call()
    assert node.after(0.5)[1:] == [("stacks", "40-busy-0")]
    node.after(3000)
    node.call(44)
    node.after(0.5)
    assert node.asked == 2, "old stacks are no answer"
    node.write("works", "waits")
    assert node.after(0.5)[2:] == [("stacks", "44-elsewhere-0")]


def test_processor_time_of_workers_and_their_children_counts(tmp_path: Path) -> None:
    assert hang.processor_s(tmp_path) == 0.0
    (tmp_path / "pid.0").write_text(f"{os.getpid()}\n")
    least = stacks.processor_s(os.getpid())
    assert hang.processor_s(tmp_path) >= least > 0.0


def test_a_process_with_an_undecodable_name_is_counted(tmp_path: Path) -> None:
    """A job names its processes, and the agent reads the list of all of them."""
    name = "import ctypes, sys; ctypes.CDLL(None).prctl(15, bytes([255, 41, 254])); print(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", name], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        (tmp_path / "pid.0").write_text(str(process.pid))
        assert hang.processor_s(tmp_path) > 0.0
        wait_until(lambda: stacks._state(process.pid) == "sleeping", 10)
        process.communicate()


def test_a_job_that_claims_endless_saves_is_ended(tmp_path: Path) -> None:
    child = Child(GEN, tmp_path, 1, 30.0, Control.private())
    child.control.save_s = 9e10
    assert child.need_s == NEED_MOST_S
