"""How much memory a save may take, as the kernel's files tell it: of the machine and of its control groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from spotkeeper.train.checkpoint import durable
from spotkeeper.train.core import headroom

MB = 1 << 20
VERSION_1 = {"memory.limit_in_bytes": 300, "memory.usage_in_bytes": 190}
VERSION_2 = {"memory.max": 300, "memory.current": 190}


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with memory to spare; the hierarchy's top, of either version, which has no limit."""
    proc, top = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    top.mkdir()
    (proc / "meminfo").write_text("MemTotal: 9000000 kB\nMemAvailable: 8000000 kB\n")
    monkeypatch.setattr(headroom, "_PROC", proc)
    return top


def within(top: Path, group: str, version: int) -> None:
    """Have this process be in a group of the hierarchy."""
    own, kind = ("0::", "cgroup2 none rw") if version == 2 else ("7:memory:", "cgroup none rw,memory")
    proc = top.parent / "proc/self"
    (proc / "cgroup").write_text(f"3:cpu:/elsewhere\n{own}{group}\n")
    (proc / "mountinfo").write_text(f"30 23 0:26 / {top} rw,nosuid shared:4 - {kind}\n")


def limit(folder: Path, version: int, **changed: str) -> None:
    """190 MB of 300 are used, 40 MB of them by files."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, size in (VERSION_2 if version == 2 else VERSION_1).items():
        (folder / name).write_text(f"{changed.get(name.partition('.')[2], size * MB)}\n")
    prefix = "" if version == 2 else "total_"
    (folder / "memory.stat").write_text(f"{prefix}active_file {10 * MB}\n{prefix}inactive_file {30 * MB}\n")


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("group", ["/job", "/job/inner"])
def test_memory_limits_of_all_control_groups_count(groups: Path, version: int, group: str) -> None:
    within(groups, group, version)
    limit(groups / "job", version)
    assert headroom.memory_refusal(86 * MB) == "", "64 MB stay free"
    assert headroom.memory_refusal(75 * MB, 4) == "" and headroom.memory_refusal(76 * MB, 4), "a quarter"
    refused = headroom.memory_refusal(87 * MB)
    assert f"needs 87 MB more memory, but the memory limit of control group {groups}/job leaves only 86 MB" in refused


def test_without_a_limit_the_machines_memory_counts(groups: Path) -> None:
    within(groups, "/job", 2)
    limit(groups / "job", 2, max="max")
    assert headroom.memory_refusal(4000 * MB) == ""
    # Of 7812 MB that are available, a 50th of all stays free.
    assert "but this machine leaves only 7636 MB of 8789 MB: raise" in headroom.memory_refusal(8000 * MB)


def test_a_table_of_mounts_that_cannot_be_read_is_no_limit(groups: Path) -> None:
    within(groups, "/job", 2)
    limit(groups / "job", 2)
    (groups.parent / "proc/self/mountinfo").write_text("30 23 0:26 / without a dash\n")
    assert headroom.memory_refusal(87 * MB) == ""


def test_memory_that_is_refused_is_an_error_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable, "memory_refusal", lambda wanted, share: f"{wanted} of which 1/{share} stays free")
    buffer = durable.Buffer()
    with pytest.raises(OSError, match=r"^.Errno 12. 4096 of which 1/8 stays free$"):
        buffer.reserve(4096, 8)
    assert buffer.size == 0
    buffer.close()
