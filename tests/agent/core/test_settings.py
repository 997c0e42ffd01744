"""Settings from metadata, the boot id, and the state that an agent keeps over a restart."""

from __future__ import annotations

from pathlib import Path

import pytest

from spotkeeper_agent.cloud.notice import Cause, Instance, Notice
from spotkeeper_agent.core import settings
from spotkeeper_agent.core.state import Assignment, Saved

# What a power cut, another program or a flipped bit leaves of a small file.
DAMAGED = [b"", b'{"boot": "b", "fac', b'{"boot": "\xff"}', bytes(64), b"[" * 100_000, b"null", b"\xff\xfe"]


def test_settings_name_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(settings.SettingsError, match="sk-function, sk-bucket"):
        settings.read(Instance("1", "n", "z", attributes={"sk-stack": "s"}), tmp_path)


@pytest.mark.parametrize(("text", "seconds"), [(None, 120), ("30", 30), ("0", 30), ("soon", 30), ("90.5", 90.5)])
def test_notice_length(text: str | None, seconds: float) -> None:
    assert settings.notice_s(text) == seconds


def test_a_boot_has_one_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPOTKEEPER_INIT_PID", "41")
    first = settings.boot_id(tmp_path)
    assert settings.boot_id(tmp_path) == first
    monkeypatch.setenv("SPOTKEEPER_INIT_PID", "42")
    assert settings.boot_id(tmp_path) != first
    (tmp_path / "boot").unlink()


@pytest.mark.parametrize("left", DAMAGED)
def test_damaged_state_and_boot_id_are_replaced(tmp_path: Path, left: bytes) -> None:
    (tmp_path / "agent.json").write_bytes(left)
    assert Saved.read(tmp_path, "b") == Saved("b")
    (tmp_path / "boot").write_bytes(left)
    boot = settings.boot_id(tmp_path)
    assert boot == settings.boot_id(tmp_path) != ""


def test_saved_state_belongs_to_one_boot(tmp_path: Path) -> None:
    saved = Saved("a", Assignment("job", 1, 2, 3), None, 4, 3, Notice(Cause.PREEMPTED, 1120, 1000.0))
    saved.write(tmp_path)
    assert Saved.read(tmp_path, "a") == saved
    assert Saved.read(tmp_path, "b") == Saved("b")
    assert (tmp_path / "agent.json").stat().st_mode & 0o077 == 0, "a job's variables are nobody else's business"
