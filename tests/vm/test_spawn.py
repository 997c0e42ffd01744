"""How a helper that outlives the agent is started where systemd runs: a scope, stopped only after the agent."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from spotkeeper.vm import launch
from spotkeeper.vm.settings import templates_path

UNITS = templates_path().parent / "boot"


@pytest.fixture
def said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What a machine's ``systemd-run`` was told."""
    said = tmp_path / "said"
    program = tmp_path / "systemd-run"
    program.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >{said}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(launch, "has_systemd", lambda: True)
    return said


def test_a_machine_that_goes_down_stops_the_agent_before_the_job(said: Path, tmp_path: Path) -> None:
    """Units stop in the inverse of their order of start, and all at once where there is none."""
    process = launch.spawn("spotkeeper-launcher", ["true"], dict(os.environ), tmp_path / "log", delegate=True)
    assert process.wait(10) == 0
    options = said.read_text().splitlines()
    assert "--property=Before=spotkeeper.service" in options
    assert options.index("--scope") < options.index("true")
    assert (UNITS / f"{launch.SERVICE}.j2").is_file(), "the name of the agent's own unit"
