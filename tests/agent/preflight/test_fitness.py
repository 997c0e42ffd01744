"""The look at boot: in the log, in the facts once somebody hears them, and in nobody's way."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from spotkeeper.clock import Clock
from spotkeeper.contract.facts import PREFLIGHT_CHECKS, Kind
from spotkeeper.contract.generation import Member
from spotkeeper_agent.cloud.gce import Gce
from spotkeeper_agent.core.log import Log
from spotkeeper_agent.core.settings import Settings
from spotkeeper_agent.core.state import MachineState
from spotkeeper_agent.core.sync import FunctionClient, Outbox, Syncer
from spotkeeper_agent.preflight import Fitness, boot_checks
from spotkeeper_agent.preflight.findings import Check, Finding, Level
from tests.agent.fakes import document, wait_until

ME = Member(0, 1, "17", "boot", "10.0.0.7", 1, False)
OTHER = Member(1, 1, "18", "boot", "10.0.0.8", 1, False)


class Machine:
    """An agent's machine state, whose reports a test reads."""

    def __init__(self, tmp_path: Path, looks: Callable[[], tuple[Check, ...]]) -> None:
        self.said: list[str] = []
        self.log: list[str] = []
        log, clock = Log(write=self.log.append), Clock()
        settings = Settings("", "b", "", "17", "n", "z", 120.0, False, tmp_path, "boot")
        settings.run.mkdir(parents=True)
        metadata = Gce(clock, "127.0.0.1:1")
        outbox = Outbox(tmp_path / "spool", "boot", log)
        sync = Syncer(FunctionClient("", metadata), outbox, "boot", lambda _: None, clock, log)
        self.me = MachineState(settings, sync, clock, log)
        self.me.say = self._say  # type: ignore[method-assign]
        self.fitness = Fitness(self.me, metadata, looks)

    def _say(self, kind: Kind, value: str = "0", **_: Any) -> None:
        assert kind is Kind.PREFLIGHT_FAILED
        self.said.append(value)

    def look(self) -> None:
        self.fitness.begin()
        wait_until(lambda: any("preflight.done" in line for line in self.log))


def finds(*findings: Finding) -> Callable[[], tuple[Check, ...]]:
    return lambda: tuple(Check(one.check, lambda _, one=one: cast(Finding, one), 5.0, "") for one in findings)


WRONG = Finding("driver", Level.ERROR, "2 GPUs, no driver", "install it")
ODD = Finding("tcp_retries2", Level.WARNING, "15", "sysctl")
FINE = Finding("space", Level.OK, "20 GB")


def test_a_member_reports_findings_once_per_generation(tmp_path: Path) -> None:
    machine = Machine(tmp_path, finds(FINE, ODD, WRONG))
    machine.look()
    wait_until(lambda: machine.fitness._errors)
    machine.fitness.go_on()
    machine.me.doc = document(1, 1, (OTHER,), port=20000)
    machine.fitness.go_on()
    assert machine.said == [], "nobody hears a machine that is no member"
    for ver, gen in ((2, 1), (3, 1), (4, 2)):
        machine.me.doc = document(ver, gen, (ME, OTHER), port=20000)
        machine.fitness.go_on()
    assert machine.said == ["driver", "driver"]
    told = [line for line in machine.log if '"preflight"' in line]
    assert len(told) == 2 and "sysctl" in told[0] and "install it" in told[1], "warnings go to the log only"


def test_a_hanging_check_blocks_nothing(tmp_path: Path) -> None:
    never = threading.Event()

    def hangs() -> tuple[Check, ...]:
        never.wait()
        return ()

    machine = Machine(tmp_path, hangs)
    machine.fitness.begin()
    machine.me.doc = document(1, 1, (ME,), port=20000)
    machine.fitness.go_on()
    assert machine.said == machine.log == []
    never.set()


@pytest.mark.parametrize("silent", [True, False])
def test_a_member_that_cannot_reach_the_master_reports_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, silent: bool
) -> None:
    asked: list[tuple[str, int]] = []
    reported = threading.Event()  # what was known before

    def connect(address: tuple[str, int], timeout: float) -> Any:
        reported.wait(60)
        asked.append(address)
        raise TimeoutError("timed out") if silent else ConnectionRefusedError

    monkeypatch.setattr(socket, "create_connection", connect)
    machine = Machine(tmp_path, finds(WRONG))
    machine.look()
    wait_until(lambda: machine.fitness._errors)
    monkeypatch.setattr(MachineState, "job", "abcdefgh")
    machine.me.doc = document(1, 1, (ME, OTHER), port=20000)
    machine.fitness.go_on()
    assert asked == [], "the first one need not reach itself"
    machine.me.doc = document(2, 2, (OTHER, ME), port=20002)
    machine.fitness.go_on()
    reported.set()
    wait_until(lambda: asked)
    wait_until(lambda: not any(thread.name == "reach" for thread in threading.enumerate()))
    for _ in range(3):
        machine.fitness.go_on()
    assert asked == [(OTHER.address, 20001)], "once a job, and beside the port that it meets on"
    assert machine.said == ["driver", "driver", *(["driver", "peers"] if silent else [])]
    assert any("firewall" in line for line in machine.log) is silent


@pytest.mark.parametrize("check", [check.name for check in boot_checks()])
def test_every_boot_finding_is_a_valid_fact(check: str) -> None:
    only_warns = {"tcp_retries2", "nccl"}  # of a boot; PEERS is looked at once there are some
    assert (check in PREFLIGHT_CHECKS) is (check not in only_warns)
