"""The handlers of stop signals one by one, within this process; ``tests/train/loop/`` has whole scripts."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from multiprocessing import forkserver
from types import SimpleNamespace

import pytest
from torch.utils.data import DataLoader

from spotkeeper.train.agent_link.control import Commit, Control
from spotkeeper.train.core import signals
from spotkeeper.train.core.signals import STOPS, ShieldedInit, StopSignals, shielded_start
from tests.train.forks import FORKS


@pytest.fixture(autouse=True)
def usual_handlers() -> Iterator[None]:
    """The handlers of an interpreter that was just started; afterwards those of the tests."""
    numbers = (*STOPS, signal.SIGCHLD)
    kept = {number: signal.getsignal(number) for number in numbers}
    for number in numbers:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signals.unshield_workers()
    for number, handler in kept.items():
        signal.signal(number, handler)


@pytest.fixture
def stops() -> Iterator[StopSignals]:
    made = StopSignals(Control.private(), 1, managed=False)
    yield made
    made.restore()


def send(number: int) -> bool:
    """Send this process a signal; return whether it interrupts the program."""
    try:
        os.kill(os.getpid(), number)
    except KeyboardInterrupt:
        return True
    return False


def shielded() -> bool:
    return bool(signals._Shield.flag.value)


def blocked() -> set[int]:
    return set(signal.pthread_sigmask(signal.SIG_BLOCK, ())) & set(STOPS)


def test_a_signal_that_the_script_handles_stays_the_scripts(stops: StopSignals) -> None:
    stops.install()
    assert shielded()
    stops.restore()
    assert not shielded(), "a second loop follows"
    caught: list[int] = []

    def mine(number: int, frame: object) -> None:
        caught.append(number)

    signal.signal(signal.SIGTERM, mine)
    stops.install()
    assert not shielded(), "the script may end its workers by SIGTERM"
    send(signal.SIGTERM)
    assert caught == [signal.SIGTERM] and not stops.asked
    signal.signal(signal.SIGHUP, mine)
    stops.restore()
    assert signal.getsignal(signal.SIGHUP) is mine, "set within the loop, it stays after the loop"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_only_a_second_ctrl_c_interrupts(stops: StopSignals, capfd: pytest.CaptureFixture[str]) -> None:
    stops.install()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        assert not send(number)
    assert stops.asked and shielded()
    assert capfd.readouterr().err.count("saving and stopping") == 1
    assert send(signal.SIGINT)


def test_torchrun_forwards_a_ctrl_c_that_the_terminal_has_sent_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    stops = StopSignals(Control.private(), 2, managed=False)
    stops.install()
    for now in (100.0, 100.1, 100.9):
        monkeypatch.setattr(signals, "time", SimpleNamespace(monotonic=lambda now=now: now))
        assert not send(signal.SIGINT)
    monkeypatch.setattr(signals, "time", SimpleNamespace(monotonic=lambda: 101.1))
    assert send(signal.SIGINT)
    stops.restore()


def test_a_gang_is_told_its_newest_checkpoint(capfd: pytest.CaptureFixture[str]) -> None:
    control = Control.private()
    stops = StopSignals(control, 2, managed=False)
    assert stops._promise() == "saving and stopping once all 2 ranks have ended a step"
    control.committed(Commit(1, 5))
    assert stops._promise().endswith("ended a step; until then the newest checkpoint is 1-5")


def test_under_an_agent_and_in_a_thread_no_handler_changes(stops: StopSignals) -> None:
    StopSignals(Control.private(), 1, managed=True).install()
    failed: list[BaseException] = []

    def install() -> None:
        try:
            stops.install()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=install)
    thread.start()
    thread.join()
    assert failed == [] and not shielded()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_fork_has_the_usual_handlers_from_its_first_moment(stops: StopSignals) -> None:
    stops.install()
    signals._block()
    held = blocked()
    signals._unblock()
    assert held == set(STOPS), "CPython drops what reaches a child within os.fork"
    child = os.fork()
    if not child:
        try:
            send(signal.SIGTERM)
        finally:
            os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    assert not blocked() and shielded()


def test_a_worker_ignores_stop_signals_while_its_trainer_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    begun: list[int] = []
    flag, parent = SimpleNamespace(value=1), os.getppid()
    monkeypatch.setattr(os, "_exit", ended.append)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    try:
        ShieldedInit(begun.append, flag)(3)
        still_blocked = blocked()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert begun == [3], "the script's own worker_init_fn"
    assert not still_blocked
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN, "as nohup wants it"
    send(signal.SIGTERM)
    assert ended == []
    flag.value = 0
    send(signal.SIGTERM)
    send(signal.SIGINT)
    assert ended == [0, 0]
    flag.value = 1
    monkeypatch.setattr(os, "getppid", lambda: parent + 1)
    send(signal.SIGTERM)
    assert ended == [0, 0, 0], "a trainer that was killed has left its flag as it was"


def test_workers_start_with_stop_signals_blocked_and_their_server_without(
    stops: StopSignals, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[set[int]] = []
    monkeypatch.setattr(forkserver, "ensure_running", lambda: served.append(blocked()))
    loader = DataLoader([0], num_workers=1, worker_init_fn=print, multiprocessing_context="forkserver")
    for _ in range(2):
        with shielded_start(loader):
            assert blocked() == set(STOPS)
        assert not blocked()
    assert served == [set(), set()]
    assert isinstance(loader.worker_init_fn, ShieldedInit)
    assert loader.worker_init_fn._then is print, "an epoch adds no second wrapper"


@pytest.mark.parametrize(("stopped", "code"), [(False, -signal.SIGTERM), (True, -signal.SIGKILL)])
@pytest.mark.parametrize("main", [True, False])
def test_workers_that_outlive_their_loader_are_ended(
    stops: StopSignals, monkeypatch: pytest.MonkeyPatch, *, main: bool, stopped: bool, code: int
) -> None:
    stops.install()
    loader = DataLoader([0], num_workers=1)
    with shielded_start(loader):
        worker = FORKS.Process(target=time.sleep, args=(600,))
        worker.start()
    if stopped:
        os.kill(worker.pid or 0, signal.SIGSTOP)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # as torch does
    monkeypatch.setattr(signals, "_LEAVE_S", 0.0)
    monkeypatch.setattr(signals, "_DIE_S", 0.0 if stopped else 60.0)
    before = set(threading.enumerate())
    if main:
        signals.end_workers()
    else:
        caller = threading.Thread(target=signals.end_workers)
        caller.start()
        caller.join()
    for thread in set(threading.enumerate()) - before:
        thread.join()
    worker.join(30)
    ended = worker.exitcode
    worker.kill()
    assert ended == code
    assert (signal.getsignal(signal.SIGCHLD) is signal.SIG_DFL) == main, "torch's would raise an error"
    assert not shielded()
