"""Data disks: mounting, formatting only what is blank, and what a mounted disk says of its checkpoints."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from spotkeeper.clock import Clock
from spotkeeper.contract.facts import Kind
from spotkeeper.train.agent_link.control import Commit
from spotkeeper.train.checkpoint.store import STATE
from spotkeeper_agent.core.events import Dropped
from spotkeeper_agent.core.log import Log
from spotkeeper_agent.host import disk as disks
from spotkeeper_agent.host import roothelper
from spotkeeper_agent.host.disk import Disk, DiskError
from spotkeeper_agent.host.mounting import Mounting
from spotkeeper_agent.host.systemd import notify
from tests.agent.fakes import JOB
from tests.train.checkpoint.test_store import make

QUIET = Log(write=lambda _: None)


class Tools:
    """Stand-ins for blkid, mkfs.ext4, mount and umount that write down how they were called."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log = folder / "calls"
        self.folder = folder / "bin"
        self.folder.mkdir()
        for name in ("mkfs.ext4", "mount", "umount"):
            self.tool(name, "exit 0")
        monkeypatch.setenv("PATH", f"{self.folder}:{os.environ['PATH']}")

    def tool(self, name: str, does: str) -> None:
        path = self.folder / name
        path.write_text(f'#!/bin/sh\necho {name} "$@" >>{self.log}\n{does}\n')
        path.chmod(0o755)

    def calls(self) -> list[str]:
        return [line.split()[0] for line in self.log.read_text().splitlines()] if self.log.exists() else []


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tools:
    return Tools(tmp_path, monkeypatch)


@pytest.fixture
def block(tmp_path: Path) -> Disk:
    device = tmp_path / "google-sk-data"
    device.write_bytes(bytes(1 << 20))  # no folder, so treated as a block device
    return Disk(device, tmp_path / "mnt/sk-data", QUIET)


@pytest.mark.parametrize(
    ("blkid", "calls", "error"),
    [
        ("exit 2", ["blkid", "mkfs.ext4", "mount"], None),
        ("echo ext4", ["blkid", "mount"], None),
        ("echo xfs", ["blkid"], "contains xfs"),
        ("echo dos", ["blkid"], "contains dos"),
        ("echo half a thing; exit 2", ["blkid"], "blkid ends with 2"),
        ("echo ambivalent >&2; exit 8", ["blkid"], "blkid ends with 8"),
        ("exit 0", ["blkid"], "something without a type"),
    ],
)
def test_only_a_certainly_blank_disk_is_formatted(
    tools: Tools, block: Disk, blkid: str, calls: list[str], error: str | None
) -> None:
    tools.tool("blkid", blkid)
    if error is None:
        block.mount()
    else:
        with pytest.raises(DiskError, match=error):
            block.mount()
    assert tools.calls() == calls


@pytest.mark.parametrize("at", [0, 512, 4096, (1 << 20) - 1, roothelper.BACKUP_AT + 1080, -1])
def test_a_disk_with_a_byte_in_a_signature_region_is_not_formatted(tools: Tools, block: Disk, at: int) -> None:
    """blkid ends with 2 for what it does not know, and for a device that it cannot read."""
    tools.tool("blkid", "exit 2")
    size = roothelper.BACKUP_AT + (8 << 20)
    with block.device.open("wb") as image:
        image.truncate(size)
        image.seek(at % size)
        image.write(b"x")
    with pytest.raises(DiskError, match="contains unknown data") as error:
        block.mount()
    assert error.value.why is disks.Why.FOREIGN
    assert tools.calls() == ["blkid"]


def test_a_disk_that_cannot_be_read_is_not_formatted(tools: Tools, tmp_path: Path) -> None:
    tools.tool("blkid", "exit 2")
    one = Disk(Path("/proc/self/mem"), tmp_path / "mnt", QUIET)  # reading it at 0 is EIO
    with pytest.raises(DiskError) as error:
        one.mount()
    assert error.value.why is disks.Why.PROBE
    assert tools.calls() == ["blkid"]


@pytest.mark.parametrize(
    ("tool", "calls", "why"),
    [
        ("mkfs.ext4", ["blkid", "mkfs.ext4"], disks.Why.MKFS),
        ("mount", ["blkid", "mkfs.ext4", "mount"], disks.Why.MOUNT),
    ],
)
def test_a_mount_failure_names_its_kind(tools: Tools, block: Disk, tool: str, calls: list[str], why: disks.Why) -> None:
    tools.tool("blkid", "exit 2")
    tools.tool(tool, "echo no such luck >&2; exit 32")
    with pytest.raises(DiskError, match="no such luck") as error:
        block.mount()
    assert error.value.why is why
    assert tools.calls() == calls


def test_real_blkid_distinguishes_blank_from_formatted(tmp_path: Path) -> None:
    image = tmp_path / "image"
    image.write_bytes(bytes(4 << 20))
    try:
        assert roothelper.kind(image) is None
    except roothelper.RefusedError as error:
        pytest.skip(str(error))
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
    assert roothelper.kind(image) == "ext4"


def test_busy_disk_is_never_unmounted_lazily(tools: Tools, block: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disks, "BUSY_S", 0.0)
    monkeypatch.setattr(Disk, "mounted", lambda _: True)
    tools.tool("umount", "echo target is busy >&2; exit 32")
    with pytest.raises(DiskError, match="target is busy"):
        block.unmount()
    assert "-l" not in tools.log.read_text()


def test_folder_of_the_local_cloud_is_linked_and_unlinked(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    device = tmp_path / "dev/google-sk-data"
    device.parent.mkdir()
    one = Disk(device, tmp_path / "mnt/sk-data", QUIET)
    assert not one.present()
    device.symlink_to(tmp_path / "store")
    assert one.present() and not one.mounted()
    one.mount()
    (one.point / "x").write_text("kept")
    assert one.mounted() and one.free_bytes() > 0
    assert one.mount_scratch("abcd2345", 1)
    (one.scratch / "y").write_text("kept")
    one.unmount()
    assert not one.mounted() and not one.scratch.exists()
    assert (tmp_path / "store/x").read_text() == "kept"
    one.unmount()  # again: nothing to do
    one.mount()
    assert not one.mount_scratch("abcd2345", 1), "as it was"
    assert (one.scratch / "y").read_text() == "kept"
    assert one.mount_scratch("bcde2345", 1) and not list(one.scratch.iterdir()), "another job's"


class AtOnce:
    """A helper that does what it is asked before it returns."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def do(self, what: str, work: Any) -> None:
        self.events.append(work())


def test_a_damaged_checkpoint_is_reported_with_the_newest_intact_one(tmp_path: Path) -> None:
    """So that nobody waits for it: the function knows of it, and cannot know that it is gone."""
    ckpt = tmp_path / "store" / JOB / "ckpt"
    ckpt.mkdir(parents=True)
    make(ckpt, Commit(1, 5))
    (make(ckpt, Commit(2, 10)) / STATE).write_bytes(b"s")
    (tmp_path / "dev").symlink_to(tmp_path / "store")
    said: list[tuple[Kind, str]] = []
    one, helper = Disk(tmp_path / "dev", tmp_path / "mnt/sk-data", QUIET), AtOnce()
    mounting = Mounting(one, helper, lambda kind, value="0", **_: said.append((kind, value)), Clock(), QUIET)  # type: ignore[arg-type]
    mounting.look(0, one.point / JOB / "ckpt", True)
    mounting.mounted(helper.events.pop())
    told = [(Kind.CHECKPOINT, "1-5"), (Kind.DAMAGED, "2-10"), (Kind.ATTACHED, "0")]
    assert said == told
    mounting.tell()
    assert said == told * 2
    mounting.forget_job()
    mounting.tell()
    assert said == [*told * 2, told[-1]]


@pytest.mark.parametrize("moves", [False, True])
def test_a_scratch_folder_follows_its_disk_but_for_a_move_to_another_zone(tmp_path: Path, moves: bool) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "dev").symlink_to(tmp_path / "store")
    one, helper = Disk(tmp_path / "dev", tmp_path / "mnt/sk-data", QUIET), AtOnce()
    mounting = Mounting(one, helper, lambda *_, **__: None, Clock(), QUIET)  # type: ignore[arg-type]
    for again in (False, True):
        mounting.look(0, one.point / JOB / "ckpt", True, 1)
        mounting.mounted(helper.events.pop())
        assert mounting.scratch_made is (not again or moves)
        (one.scratch / "file").write_text("x")
        mounting.unmount(scratch_of=JOB if moves else None)
        mounting.number = None
        helper.events.clear()
    assert (tmp_path / "store" / JOB / "scratch").exists() is not moves
    assert (tmp_path / "store" / JOB / "ckpt").is_dir()


@pytest.mark.parametrize("serving", [True, False])
def test_files_of_ended_jobs_are_deleted_and_the_disk_is_unmounted_again(tmp_path: Path, serving: bool) -> None:
    store = tmp_path / "store"
    for folder in ("over2222/ckpt/1-5", "lives222/ckpt/1-5", "datasets/ours", "lost+found"):
        (store / folder).mkdir(parents=True)
    (tmp_path / "dev").symlink_to(store)
    one, helper = Disk(tmp_path / "dev", tmp_path / "mnt/sk-data", QUIET), AtOnce()
    mounting = Mounting(one, helper, lambda *_, **__: None, Clock(), QUIET)  # type: ignore[arg-type]
    if serving:
        mounting.look(0, one.point / JOB / "ckpt", True)
        assert helper.events.pop().jobs == (JOB, "lives222", "over2222")
    mounting.drop(("over2222",))
    assert helper.events == [Dropped(("over2222",))]
    assert one.mounted() == serving
    ours = [JOB] if serving else []
    assert sorted(path.name for path in store.iterdir()) == [*ours, "datasets", "lives222", "lost+found"]


def test_notify_speaks_to_systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "n"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(path))
        monkeypatch.setenv("NOTIFY_SOCKET", str(path))
        notify("READY=1", "STATUS=x")
        assert listener.recv(100) == b"READY=1\nSTATUS=x"
    notify("WATCHDOG=1")  # nobody listens: no error
