"""The agent's rooms one by one: disk, source, notice, spool, logs, lease, settings, stop order's small parts."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import socket
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from dataclasses import replace as changed
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from spotkeeper.clock import Clock
from spotkeeper.reconcile.intake import MAX_FACTS
from spotkeeper.spec import codec, joblog
from spotkeeper.spec.facts import Kind
from spotkeeper.spec.generation import FactIn, JobRun, Member, Progress, Role, Sync, SyncReply
from spotkeeper.spec.redact import redact
from spotkeeper.train.control import Commit, Control, Fault, State
from spotkeeper.train.store import STATE
from spotkeeper.vm import disk as disks
from spotkeeper.vm import failures, logs, notice, recipe, report, roothelper, settings, supervisor, sync
from spotkeeper.vm.agent import Agent
from spotkeeper.vm.disk import Disk, DiskError
from spotkeeper.vm.events import Dropped
from spotkeeper.vm.gce import Gce
from spotkeeper.vm.kept import EVERY_S, Kept
from spotkeeper.vm.launcher import output
from spotkeeper.vm.lease import BootWatch, Lease
from spotkeeper.vm.log import Log
from spotkeeper.vm.metadata import Instance, MetadataError
from spotkeeper.vm.mounting import Mounting
from spotkeeper.vm.notice import Cause, Change, Notice, Sign
from spotkeeper.vm.saved import Assignment, Saved
from spotkeeper.vm.sdnotify import notify
from spotkeeper.vm.settings import Settings
from spotkeeper.vm.source import SourceError, fetch, forget_all
from spotkeeper.vm.storage import Bucket, StorageError

from tests.train.test_store import make
from tests.vm.fakes import JOB, Fake, document, source, wait_until

QUIET = Log(write=lambda _: None)


class KilledError(BaseException):
    """At this very moment."""


# ---------------------------------------------------------------- disk


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
        ("echo xfs", ["blkid"], "holds xfs"),
        ("echo dos", ["blkid"], "holds dos"),
        ("echo half a thing; exit 2", ["blkid"], "blkid ends with 2"),
        ("echo ambivalent >&2; exit 8", ["blkid"], "blkid ends with 8"),
        ("exit 0", ["blkid"], "something without a type"),
    ],
)
def test_only_a_disk_that_is_surely_blank_is_formatted(
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
def test_a_disk_with_a_byte_where_anything_leaves_its_mark_is_not_formatted(tools: Tools, block: Disk, at: int) -> None:
    """blkid ends with 2 for what it does not know, and for a device that it cannot read."""
    tools.tool("blkid", "exit 2")
    size = roothelper.BACKUP_AT + (8 << 20)
    with block.device.open("wb") as image:
        image.truncate(size)
        image.seek(at % size)
        image.write(b"x")
    with pytest.raises(DiskError, match="holds data of no known kind") as error:
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
def test_what_failed_is_told_in_a_word(tools: Tools, block: Disk, tool: str, calls: list[str], why: disks.Why) -> None:
    tools.tool("blkid", "exit 2")
    tools.tool(tool, "echo no such luck >&2; exit 32")
    with pytest.raises(DiskError, match="no such luck") as error:
        block.mount()
    assert error.value.why is why
    assert tools.calls() == calls


def test_real_blkid_tells_blank_from_formatted(tmp_path: Path) -> None:
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
    one.unmount()
    assert not one.mounted()
    assert (tmp_path / "store/x").read_text() == "kept"
    one.unmount()  # again: nothing to do


class AtOnce:
    """A helper that does what it is asked before it returns."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def do(self, what: str, work: Any) -> None:
        self.events.append(work())


def test_a_checkpoint_that_holds_no_more_is_said_with_the_older_one_that_does(tmp_path: Path) -> None:
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
    told = [(Kind.HOLDS, "1-5"), (Kind.DAMAGED, "2-10"), (Kind.ATTACHED, "0")]
    assert said == told
    mounting.tell()
    assert said == told * 2
    mounting.forget_job()
    mounting.tell()
    assert said == [*told * 2, told[-1]]


@pytest.mark.parametrize("serving", [True, False])
def test_what_is_left_of_jobs_that_are_over_goes_and_a_disk_at_rest_rests_again(tmp_path: Path, serving: bool) -> None:
    store = tmp_path / "store"
    for folder in ("over2222/ckpt/1-5", "lives222/ckpt/1-5", "datasets/ours", "lost+found"):
        (store / folder).mkdir(parents=True)
    (tmp_path / "dev").symlink_to(store)
    one, helper = Disk(tmp_path / "dev", tmp_path / "mnt/sk-data", QUIET), AtOnce()
    mounting = Mounting(one, helper, lambda *_, **__: None, Clock(), QUIET)  # type: ignore[arg-type]
    if serving:
        mounting.look(0, one.point / JOB / "ckpt", True)
        assert helper.events.pop().jobs == ("lives222", "over2222")
    mounting.drop(("over2222",))
    assert helper.events == [Dropped(("over2222",))]
    assert one.mounted() == serving
    assert sorted(path.name for path in store.iterdir()) == ["datasets", "lives222", "lost+found"]


# ---------------------------------------------------------------- source


@pytest.fixture
def bucket(fake: Fake) -> Iterator[Bucket]:
    fake.instance("7", "sk-test-x")
    yield Bucket(fake.url, "bucket", Gce(Clock(), fake.listen("7")))


def test_source_is_fetched_once_by_its_hash(fake: Fake, bucket: Bucket, tmp_path: Path) -> None:
    sha256 = source(fake, {"train.py": "print(1)", "sub/data.txt": "d"})
    folder = fetch(bucket, JOB, sha256, tmp_path / "src")
    assert (folder / "sub/data.txt").read_text() == "d"
    fake.objects.clear()
    assert fetch(bucket, JOB, sha256, tmp_path / "src") == folder
    assert sorted(path.name for path in (tmp_path / "src").iterdir()) == [sha256]
    assert list(fetch(bucket, JOB, None, tmp_path / "src").iterdir()) == []


def test_sources_go_whole_or_not_at_all(
    fake: Fake, bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent that dies between two files leaves nothing that passes for a source, and the next one ends it."""
    sha256 = source(fake, {"train.py": "print(1)", "sub/data.txt": "d"})
    fetch(bucket, JOB, sha256, tmp_path / "src")
    (tmp_path / "src/tmpx.tar").write_bytes(b"a fetch that was cut short")

    def rmtree(path: Path, **_: object) -> None:
        for left in path.rglob("train.py"):
            left.unlink()
            raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", rmtree)
        with pytest.raises(KilledError):
            forget_all(tmp_path / "src")
    assert (fetch(bucket, JOB, sha256, tmp_path / "src") / "train.py").read_text() == "print(1)"
    forget_all(tmp_path / "src")
    forget_all(tmp_path / "src")
    assert list(tmp_path.iterdir()) == []


def test_source_of_another_hash_is_not_used(fake: Fake, bucket: Bucket, tmp_path: Path) -> None:
    sha256 = source(fake, {"train.py": "good"})
    fake.objects[f"jobs/{JOB}/source/{sha256}"] += b"x"
    with pytest.raises(SourceError, match="not unpacked"):
        fetch(bucket, JOB, sha256, tmp_path / "src")
    assert list((tmp_path / "src").iterdir()) == []
    with pytest.raises(StorageError, match="it is not there"):
        fetch(bucket, JOB, "0" * 64, tmp_path / "src")


@pytest.fixture(params=["as it is", "before 3.11.4"])
def tar_filters(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian 12 has Python 3.11.2, whose tarfile knows no filters."""
    if request.param == "before 3.11.4":
        monkeypatch.delattr(tarfile, "data_filter", raising=False)
        monkeypatch.delattr(tarfile.TarFile, "extractall")  # its ``filter`` would be a TypeError there


@pytest.mark.usefixtures("tar_filters")
def test_source_is_unpacked_by_every_python(fake: Fake, bucket: Bucket, tmp_path: Path) -> None:
    sha256 = source(fake, {"train.py": "print(1)", "sub/data.txt": "d"})
    folder = fetch(bucket, JOB, sha256, tmp_path / "src")
    assert (folder / "sub/data.txt").read_text() == "d"


def _member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


@pytest.mark.usefixtures("tar_filters")
@pytest.mark.parametrize(
    "members",
    [
        [_member("link", tarfile.SYMTYPE, "../outside")],
        [_member("link", tarfile.SYMTYPE, "/etc/outside")],
        [_member("link", tarfile.LNKTYPE, "../outside")],
        [_member("../outside")],
        [_member("pipe", tarfile.FIFOTYPE)],
        [_member("null", tarfile.CHRTYPE)],
        [  # each looks harmless by its name
            _member("a/b/up", tarfile.SYMTYPE, "../.."),
            _member("a/b/up/link", tarfile.SYMTYPE, "../../.."),
            _member("link/outside"),
        ],
    ],
)
def test_source_cannot_write_outside(
    fake: Fake, bucket: Bucket, tmp_path: Path, members: list[tarfile.TarInfo]
) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for member in members:
            tar.addfile(member)
    sha256 = hashlib.sha256(buffer.getvalue()).hexdigest()
    fake.objects[f"jobs/{JOB}/source/{sha256}"] = buffer.getvalue()
    with pytest.raises(SourceError, match="cannot unpack"):
        fetch(bucket, JOB, sha256, tmp_path / "src")
    assert list((tmp_path / "src").iterdir()) == []
    assert not (tmp_path / "outside").exists()


# ---------------------------------------------------------------- notices and lease


def seen(sign: Sign | None = None) -> Instance:
    return Instance("1", "n", "z", sign=sign)


PREEMPTED = Notice(Cause.PREEMPTED, 1120, 1000.0)
MAINTENANCE = Notice(Cause.MAINTENANCE, 1060, 1000.0)


NEAR = Notice(Cause.MAINTENANCE, 1030, 1000.0)
RISK = Notice(Cause.REBALANCE, 4600, 1000.0)


@pytest.mark.parametrize(
    ("known", "sign", "given", "withdrawn"),
    [
        (None, None, None, None),
        (None, Sign(Cause.PREEMPTED), PREEMPTED, None),
        (PREEMPTED, Sign(Cause.PREEMPTED), None, None),
        (PREEMPTED, None, None, PREEMPTED),
        (None, Sign(Cause.MAINTENANCE), MAINTENANCE, None),
        (NEAR, Sign(Cause.PREEMPTED), changed(PREEMPTED, deadline=1030), None),  # the nearer end, said once
        (PREEMPTED, Sign(Cause.MAINTENANCE), None, None),
        (Notice(Cause.SHUTDOWN, 1025, 1000.0), None, None, None),
        # EC2 says when: the same deadline is no news, another one is
        (None, Sign(Cause.PREEMPTED, 1090.4), changed(PREEMPTED, deadline=1090), None),
        (changed(PREEMPTED, deadline=1090), Sign(Cause.PREEMPTED, 1090.4), None, None),
        (PREEMPTED, Sign(Cause.PREEMPTED, 1090.4), changed(PREEMPTED, deadline=1090), PREEMPTED),
        (None, Sign(Cause.MAINTENANCE, 1030.0), NEAR, None),
        # nobody knows when a machine at risk ends; once it is known, that counts, and nothing else does
        (None, Sign(Cause.REBALANCE), RISK, None),
        (RISK, Sign(Cause.REBALANCE), None, None),
        (RISK, Sign(Cause.PREEMPTED, 1120.0), PREEMPTED, RISK),
        (PREEMPTED, Sign(Cause.REBALANCE), None, None),
        (NEAR, Sign(Cause.REBALANCE), None, None),
        (RISK, None, None, RISK),
    ],
)
def test_notices(known: Notice | None, sign: Sign | None, given: Notice | None, withdrawn: Notice | None) -> None:
    change = notice.observe(known, seen(sign), 120.0, 1000.0)
    assert (change.given, change.withdrawn) == (given, withdrawn)


def test_a_machine_at_risk_is_never_at_its_end() -> None:
    """Its deadline moves on long before anybody would stop for it; no other deadline does."""
    assert notice.prolong(RISK, 1000.0) == notice.prolong(None, 1000.0) == notice.prolong(PREEMPTED, 1119.0) == Change()
    assert notice.prolong(RISK, 2800.0) == Change(Notice(Cause.REBALANCE, 6400, 2800.0), RISK)


def test_maintenance_weeks_ahead_is_none_yet() -> None:
    assert notice.scheduled(1000.0 + 2 * 86400, 1000.0) is None
    assert notice.scheduled(4600.0, 1000.0) == Sign(Cause.MAINTENANCE, 4600.0)


def test_shutdown_never_gives_more_time_than_the_notice_before_it() -> None:
    assert notice.shutdown(None, 25, 1000).deadline == 1025
    assert notice.shutdown(Notice(Cause.PREEMPTED, 1010, 900), 25, 1000).deadline == 1010


@pytest.mark.parametrize(("text", "seconds"), [(None, 120), ("30", 30), ("0", 30), ("soon", 30), ("90.5", 90.5)])
def test_notice_length(text: str | None, seconds: float) -> None:
    assert settings.notice_s(text) == seconds


def test_lease() -> None:
    lease = Lease(1000.0)
    assert not lease.over(1000.0 + 120 * 60 - 1)
    assert lease.over(1000.0 + 120 * 60)
    lease.renew(5000.0, 1)
    assert lease.over(5060.0) and not lease.over(5059.0)


def test_boot_watchdog(tmp_path: Path) -> None:
    watch = BootWatch(1000.0, 1.0, tmp_path / "known")
    assert watch.over(1000.0 + 900) and not watch.over(1000.0 + 899)
    assert not BootWatch(1000.0, 60.0, tmp_path / "known").over(1000.0 + 900), "a fast clock, a slow boot"
    watch.disarm()
    assert not watch.over(1e12)
    assert (tmp_path / "known").exists(), "the startup script's timer sees it too"


def an_agent(folder: Path) -> Agent:
    settings_ = Settings("s", "http://f", "b", "http://b", "1", f"sk-s-{JOB}-r0000-a1", "z", "127.0.0.1", 120.0, False,
                         folder, "boot")  # fmt: skip
    settings_.run.mkdir(parents=True)
    clock = Clock()
    return Agent(settings_, Gce(clock, "127.0.0.1:1"), clock, QUIET)


@pytest.mark.parametrize("what", ["its job ended", "its launcher is gone", "its notice is withdrawn"])
def test_what_an_agent_has_not_said_when_it_is_killed_is_said_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Written down as said, and not yet in the spool, an end was never heard of: its job stood still for good."""
    agent = an_agent(tmp_path)
    agent._me.save(assignment=Assignment(JOB, 0, 1), started=3, notice=PREEMPTED)

    def say(*_: object, **__: object) -> None:
        raise KilledError

    monkeypatch.setattr(agent._sync, "say", say)
    with pytest.raises(KilledError):
        if what == "its job ended":
            (tmp_path / "gen").mkdir()
            agent._super.child = supervisor.Child(3, tmp_path / "gen", 1, 5.0, Control.create(tmp_path / "gen/ctl"))
            agent._membership.child_ended(3, 0, 0)
        elif what == "its launcher is gone":
            agent._membership.lost(3)
        else:
            agent._heed.observed(seen())
    saved = Saved.read(agent._set.run, "boot")
    assert (saved.ended, saved.notice) == (-1, PREEMPTED)


@pytest.mark.parametrize("by_s", [-1e6, 1e6])
def test_a_wall_clock_that_is_set_is_no_outage_and_no_longer_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_s: float
) -> None:
    """Set right after a boot, it powered the machine off: alone for longer than its lease, it seemed."""
    agent = an_agent(tmp_path)
    real, steady = time.time, time.monotonic
    monkeypatch.setattr(time, "time", lambda: real() + by_s)
    agent._orders.heed_silence()
    assert agent._farewell.leaving is None
    monkeypatch.setattr(time, "monotonic", lambda: steady() + 2 * 120 * 60)
    agent._orders.heed_silence()
    assert agent._farewell.leaving is not None


@pytest.mark.parametrize("by_s", [-3600.0, 3600.0])
def test_a_stop_takes_its_time_whatever_the_wall_clock_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_s: float
) -> None:
    """Set back, nobody ended a job that hung, for as long as it had been set back; set on, no job could save."""
    sent: list[int] = []
    launcher: Any = SimpleNamespace(signal=lambda _, number: sent.append(number), kill=lambda _: sent.append(9))
    one = supervisor.Supervisor(tmp_path, tmp_path, launcher, QUIET)
    with Control.create(tmp_path / "ctl") as control:
        control.state = State.TRAINING
        one.child = supervisor.Child(1, tmp_path, 1, 25.0, control)
        one.save_and_stop(None)
        real, steady = time.time, time.monotonic
        monkeypatch.setattr(time, "time", lambda: real() + by_s)
        one.tick()
        assert sent == []
        for late_s, number in ((24.5, 15), (60.0, 9)):
            monkeypatch.setattr(time, "monotonic", lambda late_s=late_s: steady() + late_s)
            one.tick()
            assert sent[-1] == number


@pytest.mark.parametrize(
    ("gen", "state", "saved", "told"),
    [
        (2, State.STARTING, False, 1),
        (1, State.STARTING, False, 0),  # the first one began where it had to
        (2, State.RESTORING, False, 0),
        (2, State.STARTING, True, 0),  # it takes its time, but has attached before
    ],
)
def test_a_script_that_begins_anew_each_time_is_told_so_in_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gen: int, state: State, saved: bool, told: int
) -> None:
    """Without the two lines it went back to step 0 after every loss, and nothing said so anywhere."""
    launcher: Any = SimpleNamespace(start=lambda *_: None)
    one = supervisor.Supervisor(tmp_path, settings.templates_path(), launcher, QUIET)
    if saved:
        (tmp_path / "ckpt/1-7").mkdir(parents=True)
    node = recipe.Node(0, 0, "127.0.0.1", tmp_path, tmp_path / "s", tmp_path / "ckpt", tmp_path / "out")
    run = JobRun(name="job", command=("train.py",), source_sha256=None)
    one.start(document(1, gen, (Member(0, 1, "1", "b", "127.0.0.1", 1),)), run, node)
    assert one.child is not None
    one.child.control.state = state
    log, steady = one.child.folder / logs.LAUNCHER_LOG, time.monotonic
    one.tick()
    assert not log.exists(), "it imports"
    monkeypatch.setattr(time, "monotonic", lambda: steady() + 20.0)
    one.tick()
    one.tick()
    text = log.read_text() if log.exists() else ""
    assert text.count("A script that never does begins anew after every loss: docs/train.md") == told
    one.child.control.close()


def test_a_saver_that_does_not_answer_yet_is_not_taken_for_gone(tmp_path: Path) -> None:
    """Its machine said "freed", and the saver came up after that word."""
    agent = an_agent(tmp_path)
    starting = agent._parts.ready._saver = subprocess.Popen(["sleep", "60"])
    try:
        assert not agent._parts.ready.end_saver(hurry=False)
        starting.wait(10)
        assert agent._parts.ready.end_saver(hurry=False)
    finally:
        starting.kill()
        starting.wait()


# ---------------------------------------------------------------- spool


def test_spool_keeps_facts_over_a_restart_but_not_over_a_reboot(tmp_path: Path) -> None:
    first = sync.Outbox(tmp_path, "boot-a", QUIET)
    first.assigned("job")
    first.add(FactIn(Kind.NOTICE, 3, "1000"))
    first.add(FactIn(Kind.RELEASED, 3, "7"))
    assert not first.add(FactIn(Kind.RELEASED, 3, "7"))
    first.told((FactIn(Kind.NOTICE, 3, "1000"),))
    assert sync.Outbox(tmp_path, "boot-a", QUIET).waiting() == (FactIn(Kind.RELEASED, 3, "7"),)
    assert sync.Outbox(tmp_path, "boot-b", QUIET).waiting() == ()


def test_spool_forgets_an_old_job_but_not_the_word_that_drops_it(tmp_path: Path) -> None:
    box = sync.Outbox(tmp_path, "b", QUIET)
    box.assigned("one")
    box.add(FactIn(Kind.FREED, 3, "0"))
    box.add(FactIn(Kind.DROPPED, 3, attempt=4))
    box.assigned("two")
    assert box.waiting() == (FactIn(Kind.DROPPED, 3, attempt=4),)


def test_spool_keeps_what_the_cloud_said_of_the_machine_when_a_job_takes_it_in(tmp_path: Path) -> None:
    box = sync.Outbox(tmp_path, "b", QUIET)
    box.assigned("old")
    box.add(FactIn(Kind.RELEASED, 7, "70"))
    box.add(FactIn(Kind.REPRIEVE, 7, "1795286127"))
    box.assigned("new")
    assert box.waiting() == (FactIn(Kind.REPRIEVE, 0, "1795286127"),)


# What a power cut, another program or a flipped bit leaves of a small file.
DAMAGED = [b"", b'{"boot": "b", "fac', b'{"boot": "\xff"}', bytes(64), b"[" * 100_000, b"null", b"\xff\xfe"]


@pytest.mark.parametrize("left", DAMAGED)
def test_damaged_spool_is_no_obstacle(tmp_path: Path, left: bytes) -> None:
    (tmp_path / "facts.json").write_bytes(left)
    box = sync.Outbox(tmp_path, "b", QUIET)
    assert box.waiting() == ()
    assert box.add(FactIn(Kind.HELLO))


def test_full_disk_loses_no_fact_that_can_still_be_said(tmp_path: Path) -> None:
    (tmp_path / "spool").write_text("a file where the folder should be")
    lines: list[str] = []
    box = sync.Outbox(tmp_path / "spool", "b", Log(write=lines.append))
    box.add(FactIn(Kind.NOTICE, 1, "5"))
    box.add(FactIn(Kind.NOTICE, 1, "6"))
    assert len(box.waiting()) == 2
    assert len(lines) == 1, "said once"


def test_what_the_function_refuses_does_not_hold_up_the_rest(fake: Fake, tmp_path: Path) -> None:
    fake.instance("9", "n")
    clock = Clock(time.time(), time.time(), 20.0)
    box = sync.Outbox(tmp_path, "b", QUIET)
    answers: list[SyncReply] = []
    client = sync.FunctionClient(f"{fake.url}/fn", Gce(clock, fake.listen("9")))
    syncer = sync.Syncer(client, box, "b", lambda event: answers.append(event.reply), clock, QUIET)
    fake.function_status = 400
    syncer.say(FactIn(Kind.FULL, 1))
    syncer._exchange()
    assert box.waiting() == ()
    fake.function_status = 500
    syncer.say(FactIn(Kind.FULL, 2))
    syncer._exchange()
    assert len(box.waiting()) == 1, "anything but a refusal is tried again"
    fake.function_status = 200
    syncer._exchange()
    assert box.waiting() == () and answers[0].role is Role.UNKNOWN
    assert [fact.gen for _, fact in fake.facts] == [2]


class Deaf:
    """Answers nobody for a while; ``again``: whether it was told, each time, that the last exchange had no answer."""

    def __init__(self) -> None:
        self.silent = False
        self.again: list[bool] = []

    def sync(self, body: Sync) -> SyncReply:
        self.again.append(body.again)
        if self.silent:
            raise sync.SyncError("ReadTimeout")
        return SyncReply(Role.UNKNOWN)


def test_it_says_that_it_had_no_answer(tmp_path: Path) -> None:
    """Whoever heard it may have died before its round: a fact that is stored is no news by itself."""
    client, clock = Deaf(), Clock(time.time(), time.time(), 20.0)
    box = sync.Outbox(tmp_path, "b", QUIET)
    syncer = sync.Syncer(client, box, "b", lambda _: None, clock, QUIET)  # type: ignore[arg-type]
    syncer.say(FactIn(Kind.RELEASED, 1))
    client.silent = True
    syncer._exchange()
    syncer._exchange()
    client.silent = False
    syncer._exchange()
    syncer._exchange()
    assert client.again == [False, True, True, False]
    syncer.say(FactIn(Kind.EXIT, 1))  # and this agent dies: who comes after it can't know whether it was heard
    heir = sync.Syncer(client, sync.Outbox(tmp_path, "b", QUIET), "b", lambda _: None, clock, QUIET)  # type: ignore[arg-type]
    heir._exchange()
    assert client.again[-1]


class Picky:
    """Looks at no more facts than the real function; refuses all that is new to it, a progress, the ``bad`` fact."""

    def __init__(self, bad: FactIn | None = None) -> None:
        self.bad = bad
        self.heard: list[FactIn] = []

    def sync(self, body: Sync) -> SyncReply:
        if body.progress is not None or body.kept or body.again or self.bad in body.facts:
            raise sync.RefusedError("HTTP 400")
        self.heard += body.facts[:MAX_FACTS]
        return SyncReply(Role.UNKNOWN)


def picky_syncer(folder: Path, function: Picky) -> tuple[sync.Syncer, sync.Outbox]:
    box = sync.Outbox(folder, "b", QUIET)
    client: Any = function
    return sync.Syncer(client, box, "b", lambda _: None, Clock(), QUIET), box


def test_a_long_outages_facts_are_all_heard(tmp_path: Path) -> None:
    """Those beyond what the function looks at counted as told."""
    assert sync.AT_ONCE == MAX_FACTS
    function = Picky()
    syncer, box = picky_syncer(tmp_path, function)
    facts = [FactIn(Kind.SLOW, 1, str(step)) for step in range(2 * MAX_FACTS + 1)]
    for fact in facts:
        syncer.say(fact)
    while box.waiting():
        syncer._exchange()
    assert function.heard == facts


def test_a_refusal_costs_only_what_was_wrong(tmp_path: Path) -> None:
    """An exit beside a progress that the function cannot believe was never heard of."""
    function = Picky(bad=FactIn(Kind.FULL, 1))
    syncer, box = picky_syncer(tmp_path, function)
    facts = [FactIn(Kind.EXIT, 1, "7"), FactIn(Kind.FULL, 1), FactIn(Kind.RELEASED, 1, "9")]
    for fact in facts:
        syncer.say(fact)
    syncer.want(1, JOB, True, Progress(gen=1, step=1, at=0.0))
    syncer.ask((JOB,))  # a function of before it could be asked knows no such key
    for _ in range(6):
        syncer._exchange()
    assert box.waiting() == () and function.heard == [facts[0], facts[2]]


def test_what_says_nothing_is_not_sent() -> None:
    """A newer agent is understood by the function of before, which takes no key that it does not know."""
    assert msgspec.json.encode(Sync("b")) == b'{"boot":"b"}'


def test_what_a_disk_keeps_is_asked_about_in_turn_and_seldom() -> None:
    kept = Kept()
    jobs = [f"job{number:05d}" for number in range(70)]
    assert kept.question(0.0, None) == ()
    kept.found(jobs)
    first = kept.question(10.0, jobs[3])
    assert first == tuple(job for job in jobs if job != jobs[3])[:32]
    assert kept.question(10.0 + EVERY_S - 1, None) == ()
    later = [kept.question(10.0 + EVERY_S * hour, None) for hour in (1, 2)]
    assert set().union(first, *later) == set(jobs), "each of them in its turn"
    kept.found(jobs)
    assert kept.question(10.0 + EVERY_S * 2 + 1, None), "a disk that is looked at anew is asked about at once"


def test_an_answer_deletes_nothing_but_what_was_asked_about_and_is_not_served() -> None:
    kept = Kept()
    kept.found(["a0000000", "b0000000"])
    kept.left("c0000000")
    asked = ("a0000000", "b0000000")
    assert kept.over(asked, ("a0000000", "c0000000", "..", "", "d0000000"), None) == ("a0000000",)
    assert kept.over(asked, asked, "a0000000") == ("b0000000",)
    kept.gone(("b0000000",))
    assert kept.over(asked, asked, None) == ("a0000000",)


def test_what_takes_long_is_asked_for_less_often_and_another_document_is_another_wait(tmp_path: Path) -> None:
    class Hands(Clock):
        at = 1000.0

        def now(self) -> float:
            return Hands.at

    clock = Hands(0.0, 0.0, 1.0)
    box = sync.Outbox(tmp_path, "b", QUIET)
    syncer = sync.Syncer(sync.FunctionClient("", Gce(clock, "")), box, "b", lambda _: None, clock, QUIET)
    syncer.want(3, "job", True)
    pauses = []
    for waited in (0, 10, 20, 60, 3600):
        Hands.at = 1000.0 + waited
        pauses.append(syncer._pause_s())
    assert pauses == [0.5, 0.5, 1.0, 3.0, sync.POLL_S]
    syncer.want(4, "job", True)
    assert syncer._pause_s() == 0.5
    syncer.want(4, "job", False)
    assert syncer._pause_s() == sync.POLL_S
    syncer.want(4, "job", True)
    assert syncer._pause_s() == 0.5


# ---------------------------------------------------------------- metadata


def test_tokens_are_kept_until_shortly_before_they_expire(fake: Fake) -> None:
    fake.instance("7", "n")
    now = time.time()
    hours = Clock(now, now, 1.0)
    one = Gce(hours, fake.listen("7"))
    token = one.identity_token("https://f")
    fake.metadata_status = 503
    assert one.identity_token("https://f") == token
    with pytest.raises(MetadataError, match="HTTP 503"):
        one.identity_token("https://another")
    later = Gce(Clock(now, now + 3400, 1.0), fake.listen("7"))
    fake.metadata_status = 200
    later.identity_token("https://f")
    fake.metadata_status = 503
    with pytest.raises(MetadataError):  # 200 s are left, less than the margin
        later.identity_token("https://f")


def test_an_answer_that_is_no_instance_is_an_error(fake: Fake) -> None:
    fake.instances["7"] = {"id": 1}
    with pytest.raises(MetadataError, match="instance/"):
        Gce(Clock(), fake.listen("7")).instance()


def test_settings_name_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(settings.SettingsError, match="sk-function, sk-bucket"):
        settings.read(Instance("1", "n", "z", attributes={"sk-stack": "s"}), tmp_path)


def test_a_boot_has_one_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPOTKEEPER_INIT_PID", "41")
    first = settings.boot_id(tmp_path)
    assert settings.boot_id(tmp_path) == first
    monkeypatch.setenv("SPOTKEEPER_INIT_PID", "42")
    assert settings.boot_id(tmp_path) != first
    (tmp_path / "boot").unlink()


@pytest.mark.parametrize("left", DAMAGED)
def test_damaged_state_and_boot_id_are_made_anew(tmp_path: Path, left: bytes) -> None:
    (tmp_path / "agent.json").write_bytes(left)
    assert Saved.read(tmp_path, "b") == Saved("b")
    (tmp_path / "boot").write_bytes(left)
    boot = settings.boot_id(tmp_path)
    assert boot == settings.boot_id(tmp_path) != ""


def test_saved_state_is_of_one_boot(tmp_path: Path) -> None:
    saved = Saved("a", Assignment("job", 1, 2, 3), None, 4, 3, PREEMPTED)
    saved.write(tmp_path)
    assert Saved.read(tmp_path, "a") == saved
    assert Saved.read(tmp_path, "b") == Saved("b")
    assert (tmp_path / "agent.json").stat().st_mode & 0o077 == 0, "a job's variables are nobody else's business"


# ---------------------------------------------------------------- logs


def test_secrets_do_not_reach_the_log() -> None:
    text = "Authorization: Bearer abc.def and eyJhbGciOiJSUzI1NiJ9.eyJhdWQiOiJ4In0.sig and ya29.a0Af-x"
    assert redact(text) == "[removed] and [removed] and [removed]"
    lines: list[str] = []
    Log(write=lines.append)("x", detail=text)
    assert "ya29" not in lines[0] and json.loads(lines[0])["event"] == "x"


def test_logs_are_the_ends_and_bounded(tmp_path: Path) -> None:
    for rank in range(2):
        home = tmp_path / f"logs/run_x/attempt_0/{rank}"
        home.mkdir(parents=True)
        (home / "stdout.log").write_bytes(b"o" * (1 << 20) + f"end {rank}".encode())
        (home / "stderr.log").write_bytes(f"trouble {rank}".encode())
    (tmp_path / logs.LAUNCHER_LOG).write_bytes(b"torchrun says")
    text = logs.collect(tmp_path, "why").decode()
    assert len(text) < 3 * logs.TAIL_BYTES
    order = ["torchrun says", "local rank 0, stdout", "end 0", "end 1", "trouble 0", "trouble 1", "why"]
    assert [text.index(part) for part in order] == sorted(text.index(part) for part in order)


def test_a_log_says_which_bytes_of_which_file_of_whom_it_has(tmp_path: Path) -> None:
    path = tmp_path / "logs/run_x/attempt_0/0/stdout.log"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"".join(b"line %d\n" % number for number in range(20_000)) + b"--- no heading: \xff")
    for extra in ("", "why"):
        (found, *rest) = joblog.split(logs.collect(tmp_path, extra, logs.whose(2, "sk-x-r0002-a1")))
        assert (found.title, found.path) == ("rank 2 (sk-x-r0002-a1) stdout", str(path))
        assert found.text == path.read_bytes()[found.start :] and found.text.startswith(b"line "), "whole lines"
        assert [part.text.decode() for part in rest] == [extra] * bool(extra)


def test_many_ranks_share_an_upload(tmp_path: Path) -> None:
    for rank in range(16):
        path = tmp_path / f"logs/run_x/attempt_0/{rank}/stdout.log"
        path.parent.mkdir(parents=True)
        path.write_bytes(b"line\n" * 20_000)
    data = logs.collect(tmp_path)
    assert len(joblog.split(data)) == 16, "none is cut off, nor its heading"
    assert len(data) < logs.TOTAL_BYTES * 1.05


TORCHRUN = """W1121 05:58 api.py:1028] Sending process 26 closing signal SIGTERM
E1121 05:58 api.py:1002] failed (exitcode: 1) local_rank: 0 (pid: 27) of binary: python
Traceback (most recent call last):
  File "torch/distributed/run.py", line 1142, in <module>
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
train.py FAILED
"""


def test_a_job_that_prints_for_weeks_does_not_fill_the_machines_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``/run`` is memory; once it was full, the job's next line failed, and so did all that the agent writes."""
    monkeypatch.setattr(output, "KEPT_BYTES", 1 << 20)
    path = tmp_path / "logs/x/attempt_0/0/stdout.log"
    path.parent.mkdir(parents=True)
    (tmp_path / logs.LAUNCHER_LOG).symlink_to(path)  # what is no log of ours is not touched
    uploads: list[bytes] = []
    bucket: Any = SimpleNamespace(write=lambda _, content: uploads.append(content))
    uploader = logs.Uploader(bucket, Clock(), QUIET)
    with path.open("wb") as job:
        for number in range(8):
            job.write(b"%07d\n" % number * (1 << 17))
            job.flush()
            uploader._upload(logs.Task("log", tmp_path), b"")
    assert path.stat().st_size == 8 << 20, "its writer goes on where it was"
    assert path.stat().st_blocks * 512 <= 3 << 20
    assert path.read_bytes().endswith(b"0000006\n" + b"0000007\n" * (1 << 17))
    assert uploads[-1].endswith(b"0000007\n") and b"\0" not in uploads[-1]


LOUD = """
import os, subprocess, sys
from spotkeeper.vm.launcher import output
output.KEPT_BYTES = 1 << 20
output.bound()
try:
    os.wait()
except ChildProcessError:
    print("no child but its own")
for number in range(16):
    os.write(1, b"%07d\\n" % number * (1 << 17))
subprocess.run(["sh", "-c", "echo from a child; echo an error >&2"])
print("the last line", flush=True)
"""


def test_a_job_that_prints_a_gigabyte_a_second_is_kept_short_while_it_prints(tmp_path: Path) -> None:
    """Nobody looks here: a log that is cut every 15 s had filled the memory before the first look."""
    out, err = tmp_path / "stdout.log", tmp_path / "stderr.log"
    with out.open("wb") as stdout, err.open("wb") as stderr:
        env = os.environ | {"PYTHONPATH": str(settings.job_path())}
        subprocess.run([sys.executable, "-c", LOUD], stdout=stdout, stderr=stderr, env=env, check=True)
    wait_until(lambda: out.read_bytes().endswith(b"the last line\n") and err.read_text())
    assert out.stat().st_size > 16 << 20
    assert out.stat().st_blocks * 512 <= 3 << 20
    assert out.read_bytes().endswith(b"0000015\n" * 1000 + b"from a child\nthe last line\n")
    assert err.read_text() == "an error\n"


def test_exit_files_of_no_sense_and_folders_that_go_do_not_end_the_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "logs/x/0").mkdir(parents=True)
    (tmp_path / "logs/x/0/stderr.log").write_text("its last words")
    (tmp_path / "exit.0").write_bytes(b"\xff\xfe")
    (tmp_path / "exit.1").write_text("9" * 4000)
    assert all(0 <= code < 256 for code in failures.exit_codes(tmp_path)), "a longer number makes no fact"
    assert b"its last words" in logs.collect(tmp_path)
    uploader = logs.Uploader(Any, Clock(), QUIET)  # type: ignore[arg-type]

    def gone(*_: object) -> bytes:
        raise FileNotFoundError("logs/x")

    monkeypatch.setattr(logs, "collect", gone)
    assert uploader._upload(logs.Task("log", tmp_path), b"sent") == b"sent"


def test_a_failed_jobs_log_ends_with_what_the_first_to_fail_said(tmp_path: Path) -> None:
    said = {0: "ValueError: the data is wrong", 1: "Connection closed by peer", 2: "", 10: "Connection closed by peer"}
    for rank, words in said.items():
        home = tmp_path / f"logs/run_x/attempt_0/{rank}"
        home.mkdir(parents=True)
        (home / "stderr.log").write_text(words)
    for at, rank in enumerate((1, 0, 10)):  # 2 goes on
        (tmp_path / f"error.{rank}").write_text(json.dumps({"at": at, "follows": rank != 0}))
    (tmp_path / logs.LAUNCHER_LOG).write_text(TORCHRUN)
    text = logs.collect(tmp_path).decode()
    assert text.endswith("ValueError: the data is wrong")
    assert "failed (exitcode: 1) local_rank: 0" in text
    assert "ChildFailedError" not in text and "run.py" not in text


def test_torchruns_own_trouble_is_kept_whole(tmp_path: Path) -> None:
    trouble = 'Traceback (most recent call last):\n  File "x"\ntorch.distributed.DistNetworkError: EADDRINUSE'
    (tmp_path / logs.LAUNCHER_LOG).write_text(trouble)
    assert trouble in logs.collect(tmp_path).decode()


# ---------------------------------------------------------------- reports


def test_only_the_lowest_member_reports_at_commits_and_once_a_minute(tmp_path: Path) -> None:
    with Control.create(tmp_path / "ctl") as control:
        lowest, other = report.Reporter(1, True), report.Reporter(1, False)
        assert lowest.progress(control, 0.0) is None, "nothing to say before training"
        control.state = State.TRAINING
        control.stepped(5)
        control.loss = 1.5
        told = lowest.progress(control, 0.0)
        assert told is not None and (told.gen, told.step, told.loss, told.commit_step) == (1, 5, 1.5, None)
        assert other.progress(control, 0.0) is None
        assert lowest.progress(control, 59.0) is None
        assert lowest.progress(control, 60.0) is not None
        control.committed(Commit(1, 5))
        news = lowest.progress(control, 61.0)
        assert news is not None and (news.commit_gen, news.commit_step) == (1, 5)


@pytest.mark.parametrize("byte", [0x00, 0x7F, 0xBF, 0xFF])
@pytest.mark.parametrize("word", range(8, 25))
def test_a_job_that_tramples_on_its_control_file_is_no_trouble_to_others(tmp_path: Path, word: int, byte: int) -> None:
    """The agent ended at every look; and a progress that the function refuses takes the facts beside it along."""
    with Control.create(tmp_path / "ctl") as control:
        control.state = State.TRAINING
        control.stepped(5)
        with (tmp_path / "ctl").open("r+b") as file:
            file.seek(8 * word)
            file.write(bytes([byte]) * 8)
        reporter = report.Reporter(1, True)
        told = reporter.progress(control, 1.0, last=True)
        if told is not None:
            codec.decode(msgspec.json.encode(told), Progress)
        reporter.facts(control, 1.0)
        reporter.late(control, 2.0)


def test_stall_and_full_disk_are_facts(tmp_path: Path) -> None:
    with Control.create(tmp_path / "ctl") as control:
        reporter = report.Reporter(2, False)
        control.state = State.TRAINING
        control.step_s = 4.0
        control.stepped(9, 1e9)
        assert not reporter.late(control, 100.0)
        assert reporter.late(control, 113.0)
        assert reporter.facts(control, 113.0) == []
        assert reporter.facts(control, 141.0) == [FactIn(Kind.SLOW, 2, "9")]
        control.state = State.STOPPING  # the save takes its time; nothing stalls
        assert reporter.facts(control, 141.0) == []
        control.fault = Fault.DISK_FULL
        assert reporter.facts(control, 141.0) == [FactIn(Kind.FULL, 2)]
        control.fault = Fault.WRITE_FAILED
        assert reporter.facts(control, 141.0) == [FactIn(Kind.UNSAVED, 2, "write-failed")]
        control.fault = Fault.SAVER_LOST
        assert reporter.facts(control, 141.0) == [FactIn(Kind.UNSAVED, 2, "saver-lost")]
        control.fault = Fault.FENCED  # a newer generation has the folder: no news for anybody
        assert reporter.facts(control, 141.0) == []


def test_a_stop_without_a_result_is_none_the_less_a_stop(tmp_path: Path) -> None:
    """On a full /run, of a node whose peers were told first: exit 0 alone would say that the job is through."""
    launcher: Any = SimpleNamespace(pid=0)
    one = supervisor.Supervisor(tmp_path, tmp_path, launcher, QUIET)
    for state, stopped in ((State.STOPPED, True), (State.STOPPING, False), (State.DONE, False)):
        control = Control.create(tmp_path / "ctl")
        control.state = state
        one.child = supervisor.Child(1, tmp_path, 1, 25.0, control)
        ending = one.ended(1, 0)
        assert ending is not None and (ending.stopped, ending.well) == (stopped, not stopped)


@pytest.mark.parametrize("set_by", [-1e8, -3600.0, 3600.0, 1e8])
def test_a_wall_clock_that_is_set_makes_no_step_late_and_hides_no_stall(tmp_path: Path, set_by: float) -> None:
    with Control.create(tmp_path / "ctl") as control:
        reporter = report.Reporter(2, False)
        control.state = State.TRAINING
        control.step_s = 1.0
        for second in range(3):
            control.stepped(second, time.time())
            assert not reporter.late(control, 100.0 + second) and not reporter.facts(control, 100.0 + second)
        control.stepped(3, time.time() + set_by)
        assert not reporter.late(control, 103.0) and not reporter.facts(control, 103.0)
        assert not reporter.late(control, 104.0)
        assert reporter.late(control, 107.0)
        assert reporter.facts(control, 134.0) == [FactIn(Kind.SLOW, 2, "3")]
        control.stepped(4, time.time() + set_by)
        assert not reporter.late(control, 135.0)


def test_the_end_of_trouble_with_saving_is_a_fact_a_few_times(tmp_path: Path) -> None:
    with Control.create(tmp_path / "ctl") as control:
        reporter = report.Reporter(2, False)
        control.state = State.TRAINING
        said: list[FactIn] = []
        for _ in range(report.TIMES + 2):
            for fault in (Fault.DISK_FULL, Fault.FENCED, Fault.NONE, Fault.NONE):
                control.fault = fault
                said += reporter.facts(control, 141.0)
        told = [(fact.kind, fact.value) for fact in dict.fromkeys(said)]
        want = [(kind, str(which)) for which in range(report.TIMES) for kind in (Kind.FULL, Kind.SAVED)]
        assert told == [*want, (Kind.FULL, str(report.TIMES))], "then it stays told: no two facts for every save"
        assert len(said) == 2 * report.TIMES + 2
        control.fault = Fault.SAVER_LOST
        assert reporter.facts(control, 141.0) == [FactIn(Kind.UNSAVED, 2, f"saver-lost-{report.TIMES}")]


# ---------------------------------------------------------------- small parts


def test_commands_name_the_script_in_the_source(tmp_path: Path) -> None:
    boot = Path("/b/boot.py")
    assert recipe.command(boot, ("t.py", "--x"), tmp_path) == ["/b/boot.py", f"{tmp_path}/t.py", "--x"]
    assert recipe.command(boot, ("-m", "mod", "x"), tmp_path) == ["/b/boot.py", "-m", "mod", "x"]


def test_interface_is_named_only_where_gloo_needs_it() -> None:
    assert recipe.interface_of("127.0.1.9") is None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # no packet is sent: it only chooses a route
        except OSError:
            pytest.skip("no route beyond the loopback")
        own = probe.getsockname()[0]
    name = recipe.interface_of(own)
    assert name in [name for _, name in socket.if_nameindex()]
    assert recipe.interface_of("203.0.113.77") is None


def test_exit_files_half_written_do_not_count(tmp_path: Path) -> None:
    (tmp_path / "exit.0").write_text("0\n")
    (tmp_path / "exit.1.tmp").write_text("93\n")
    (tmp_path / "exit.2").write_text("")
    assert failures.exit_codes(tmp_path) == [0]


def test_notify_speaks_to_systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "n"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(path))
        monkeypatch.setenv("NOTIFY_SOCKET", str(path))
        notify("READY=1", "STATUS=x")
        assert listener.recv(100) == b"READY=1\nSTATUS=x"
    notify("WATCHDOG=1")  # nobody listens: no error


def test_torchrun_arguments(tmp_path: Path) -> None:
    from spotkeeper.spec.generation import JobRun, Member

    members = tuple(Member(rank, 1, str(rank), "b", f"10.0.0.{rank}", 4) for rank in (2, 5))
    doc = document(9, 7, members, port=20007)
    run = JobRun("j", ("train.py", "--say", 'a "b" {{ c }}'), None, nproc=4, grace_s=25.5)
    node = recipe.Node(5, 1, "10.0.0.5", tmp_path, tmp_path / "s", tmp_path / "ckpt", tmp_path / "out", late=True)
    args = recipe.torchrun_args(settings.templates_path(), doc, run, node, tmp_path / "r")
    for want in (
        "--nnodes=2",
        "--node-rank=1",
        "--nproc-per-node=4",
        "--rdzv-backend=static",
        "--master-addr=10.0.0.2",
        "--master-port=20007",
        "--local-addr=10.0.0.5",
        "--max-restarts=0",
        "--shutdown-timeout=25",
        f"--rdzv-id={doc.run_id}",
        f"--log-dir={tmp_path}/r/logs",
    ):
        assert want in args
    assert args[-3:] == [f"{tmp_path}/train.py", "--say", 'a "b" {{ c }}']
    env = recipe.environment(doc, run, node, tmp_path / "r")
    assert "SPOTKEEPER_CKPT" not in env and "SPOTKEEPER_INTERVAL_S" not in env and "SPOTKEEPER_MEAN_LIFE_S" not in env
    assert (env["SPOTKEEPER_GEN"], env["SPOTKEEPER_SLOT"], env["SPOTKEEPER_JOB"]) == ("7", "5", JOB)
    assert "SPOTKEEPER_MAX_WORLD" not in env
    assert env["SPOTKEEPER_REPLICATED"] == "1", "a sharded model is refused before it trains"
    run = msgspec.structs.replace(run, max_world=12)
    assert recipe.environment(doc, run, node, tmp_path / "r")["SPOTKEEPER_MAX_WORLD"] == "12"
