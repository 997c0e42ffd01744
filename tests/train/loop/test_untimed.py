"""What a script calls long: seen in the run folder while it lasts, and counted for no step."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from spotkeeper.train.agent_link import control
from spotkeeper.train.agent_link.control import Control
from spotkeeper.train.loop import boundary, reporter
from spotkeeper.train.loop import run as run_module
from tests.module_time import replace_time
from tests.train.loop.test_run import Things, agent, laptop

__all__ = ["agent", "laptop"]


def test_an_untimed_evaluation_counts_in_no_step_time(agent: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    late_s, steady = 0.0, time.monotonic
    replace_time(monkeypatch, run_module, boundary, reporter, monotonic=lambda: steady() + late_s)
    things = Things()
    run = things.attach()
    seen = []
    for step, batch in enumerate(run.steps(things.loader, steps=6)):
        things.train(batch)
        if step >= 1:
            with run.untimed():
                seen.append(control.in_untimed_section(agent.path.parent))
                late_s += 1000.0
        assert not control.in_untimed_section(agent.path.parent)
    assert seen == [True] * 5
    assert 0.0 < agent.step_s < 500.0


def test_an_untimed_section_ends_with_its_block(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), control.untimed_section(tmp_path, 1):
        assert control.in_untimed_section(tmp_path)
        _ = 1 / 0
    assert not control.in_untimed_section(tmp_path)


def test_untimed_has_no_effect_without_an_agent(tmp_path: Path) -> None:
    with control.untimed_section(None, 0):
        pass
    run = Things().attach()
    with run.untimed():
        pass
    with control.untimed_section(tmp_path / "gone", 0):
        assert not control.in_untimed_section(tmp_path / "gone")
