"""Whether a machine shuts down, as ``systemctl`` says it."""

from __future__ import annotations

from pathlib import Path

import pytest

from spotkeeper_agent.host import systemd


@pytest.mark.parametrize(
    ("systemctl", "stops"),
    [("echo stopping; exit 1", True), ("echo running", False), ("exec sleep 60", False), (None, False)],
)
def test_only_a_machine_that_stops_shuts_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, systemctl: str | None, stops: bool
) -> None:
    """D-Bus, which systemctl asks, may not run yet: then the agent is only restarted."""
    monkeypatch.setattr(systemd, "is_init", lambda: True)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin" if systemctl else str(tmp_path))
    if systemctl:
        monkeypatch.setattr(systemd, "ANSWER_S", 0.2 if "sleep" in systemctl else 60.0)
        (tmp_path / "systemctl").write_text(f"#!/bin/sh\n{systemctl}\n")
        (tmp_path / "systemctl").chmod(0o755)
    assert systemd.shutting_down() is stops


def test_the_one_machine_clouds_agent_is_stopped_with_its_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(systemd, "is_init", lambda: False)
    assert systemd.shutting_down()
