"""The agent's entry point: wrong settings are said and end it, a lost thread ends it, so that it is started anew."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.agent.fakes import Fake, Machine, wait_until


def test_missing_stack_settings_are_a_setup_error(fake: Fake, tmp_path: Path) -> None:
    vm = Machine(fake, tmp_path / "vm")
    try:
        fake.instance(vm.uid, vm.name, attributes={"sk-stack": "s"})
        vm.start()
        assert vm.agent is not None and vm.agent.wait(20) == 78
        assert "the metadata lacks sk-function, sk-bucket" in vm.log()
    finally:
        vm.end()


def test_an_invalid_clock_is_a_setup_error(fake: Fake, tmp_path: Path) -> None:
    vm = Machine(fake, tmp_path / "vm", clock="1:2")
    try:
        vm.start()
        assert vm.agent is not None and vm.agent.wait(20) == 78
        assert "want <real epoch>:<virtual epoch>:<scale>" in vm.log()
    finally:
        vm.end()


def test_a_lost_thread_ends_the_agent() -> None:
    code = (
        "import threading\n"
        "from spotkeeper_agent.__main__ import _exit_on_lost_thread\n"
        "from spotkeeper_agent.core.log import Log\n"
        "threading.excepthook = lambda died: _exit_on_lost_thread(Log(), died)\n"
        "threading.Thread(target=lambda: 1 / 0, name='sync').start()\n"
        "threading.Event().wait(20)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 70
    assert "ZeroDivisionError" in done.stdout and '"thread": "sync"' in done.stdout


def test_arguments_are_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "spotkeeper_agent", "unit"], capture_output=True, timeout=30, check=False
    )
    assert done.returncode == 64


def test_the_agent_waits_for_a_late_metadata_server(fake: Fake, tmp_path: Path) -> None:
    vm = Machine(fake, tmp_path / "vm")
    try:
        fake.metadata_status = 503
        vm.start()
        wait_until(lambda: "HTTP 503" in vm.log())
        fake.metadata_status = 200
        fake.wait_sync(vm.uid)
    finally:
        vm.end()
