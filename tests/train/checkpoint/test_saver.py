"""The saver as a process: what it makes durable, what it refuses, and what a crash leaves."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from spotkeeper.train.agent_link.control import Commit, Fault
from spotkeeper.train.checkpoint import connection, protocol, saver, store
from spotkeeper.train.checkpoint.client import Client, new_manifest
from spotkeeper.train.checkpoint.durable import PAGE, Buffer
from spotkeeper.train.checkpoint.manifest import RankPlace
from spotkeeper.train.checkpoint.protocol import SaveDurable, SaveFailed, SaverError, SaverSilentError, Stretch
from tests.train.crash.refusing_saver import GROUPS, MEMORY_FILES, no_memory_group

OLDER = "generation 3 is older than generation 4"
GANG = (RankPlace(0, 0, 0, True),)
ODD = 3 * PAGE + 17  # neither whole pages nor one chunk


def stage(client: Client, commit: Commit, size: int = ODD) -> dict[str, str]:
    """Stage two files of recognisable bytes and ask for them; their hashes by name."""
    first = os.urandom(size)
    second = f"skeleton of {commit}".encode()
    at = -(-size // PAGE) * PAGE
    memory = client.stage(at + PAGE)
    memory[:size], memory[at : at + len(second)] = first, second
    stretches = (Stretch(store.STATE, 0, size), Stretch(store.SKELETON, at, len(second)))
    client.save(new_manifest(commit, GANG, {"torch": "none"}), stretches)
    return {store.STATE: hashlib.sha256(first).hexdigest(), store.SKELETON: hashlib.sha256(second).hexdigest()}


@contextlib.contextmanager
def served(root: Path, *, wrapper: tuple[str, ...] = ()) -> Iterator[tuple[Path, subprocess.Popen[bytes]]]:
    path = root / "saver"
    argv = saver.command(path)
    argv = [sys.executable, *wrapper, *argv[3:]] if wrapper else argv
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
    try:
        yield path, process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    with served(tmp_path) as (path, _):
        client = Client.connect(path)
        yield client
        client.close()


def test_a_save_is_durable_and_hashed(client: Client, tmp_path: Path) -> None:
    folder = tmp_path / "ckpt"
    assert client.hello(folder, 1, 2).staged is None
    sums = stage(client, Commit(1, 5))
    assert client.pending == Commit(1, 5)
    event = client.wait(10)
    assert isinstance(event, SaveDurable) and event.commit == Commit(1, 5)
    assert client.pending is None and client.poll() is None
    newest = store.newest(folder)
    assert newest.commit == Commit(1, 5) and newest.manifest is not None
    assert {file.name: file.sha256 for file in newest.manifest.files} == sums
    assert (folder / store.LATEST).read_text() == "1-5\n"


def test_old_checkpoints_are_deleted_down_to_keep(client: Client, tmp_path: Path) -> None:
    client.hello(tmp_path / "ckpt", 1, 2)
    for step in (1, 2, 3, 4):
        stage(client, Commit(1, step))
        client.wait(10)
    client.hello(tmp_path / "ckpt", 1, 2)  # answered after the last pruning
    assert store.complete(tmp_path / "ckpt") == [Commit(1, 4), Commit(1, 3)]


def test_a_damaged_newest_checkpoint_displaces_no_older_one(tmp_path: Path, client: Client) -> None:
    folder = tmp_path / "ckpt"
    client.hello(folder, 1, 2)
    for step in (1, 2):
        stage(client, Commit(1, step))
        client.wait(10)
    (folder / "1-2" / store.STATE).write_bytes(b"")
    store.prune(folder, 1)
    assert store.newest(folder).commit == Commit(1, 1)


def test_an_older_generation_never_starts(client: Client, tmp_path: Path) -> None:
    folder = tmp_path / "ckpt"
    client.hello(folder, 3, 2)
    newer = Client.connect(tmp_path / "saver")
    newer.hello(folder, 4, 2)
    with pytest.raises(SaverError, match=OLDER) as refused:
        stage(client, Commit(3, 9))
        client.wait(10)
        client.hello(folder, 3, 2)
    assert refused.value.fault is Fault.FENCED
    assert store.scan(folder) == []


def test_an_older_writer_is_refused_after_a_newer_hello(client: Client, tmp_path: Path) -> None:
    folder = tmp_path / "ckpt"
    client.hello(folder, 3, 2)
    client.memory(1 << 16)
    newer = Client.connect(tmp_path / "saver")
    newer.hello(folder, 4, 2)
    stage(client, Commit(3, 9))
    event = client.wait(10)
    assert event == SaveFailed(Commit(3, 9), Fault.FENCED, OLDER)
    with pytest.raises(SaverError, match=OLDER) as refused:
        while client.image(0, PAGE) is None:
            client._read_soon()
    assert refused.value.fault is Fault.FENCED
    sums = stage(newer, Commit(4, 1))
    assert isinstance(newer.wait(10), SaveDurable)
    manifest = store.read(folder, Commit(4, 1))
    assert {file.name: file.sha256 for file in manifest.files} == sums, "the two have different memory"


def test_a_writer_that_has_not_said_its_folder_is_refused(client: Client) -> None:
    stage(client, Commit(1, 9))
    assert client.wait(10) == SaveFailed(Commit(1, 9), Fault.FENCED, "no hello")


def test_a_disk_with_a_newer_generation_is_not_written(client: Client, tmp_path: Path) -> None:
    folder = tmp_path / "ckpt"
    (folder / "7-1").mkdir(parents=True)
    (folder / "7-1" / store.COMMIT).write_bytes(
        new_manifest(Commit(7, 1), GANG, {}).to_bytes()  # complete, of no files
    )
    client.hello(folder, 6, 2)
    stage(client, Commit(6, 9))
    event = client.wait(10)
    assert isinstance(event, SaveFailed) and event.fault is Fault.FENCED and "7-1" in event.why


def test_a_save_outlives_its_trainer_and_stays_in_memory(tmp_path: Path) -> None:
    with served(tmp_path) as (path, _):
        first = Client.connect(path)
        first.hello(tmp_path / "ckpt", 1, 2)
        stage(first, Commit(1, 8), 8 << 20)
        first._sock.close()  # killed right after it asked
        second = Client.connect(path)
        hello = second.hello(tmp_path / "ckpt", 2, 2)
        assert store.newest(tmp_path / "ckpt").commit == Commit(1, 8)
        assert hello.staged is not None and hello.staged.commit == Commit(1, 8)
        part = hello.stretches[0]
        memory = second.memory(part.offset + part.bytes)
        digest = hashlib.sha256(memory[part.offset : part.offset + part.bytes]).hexdigest()
        assert digest == hello.staged.files[0].sha256
        second.close()


def test_memory_that_was_staged_into_counts_as_empty(client: Client, tmp_path: Path) -> None:
    client.hello(tmp_path / "ckpt", 1, 2)
    stage(client, Commit(1, 1))
    client.wait(10)
    client.stage(PAGE)
    assert client.hello(tmp_path / "ckpt", 2, 2).staged is None


def test_staging_memory_has_its_pages_before_the_first_save(client: Client, tmp_path: Path) -> None:
    client.hello(tmp_path / "ckpt", 1, 2)
    client.memory(64 * PAGE)
    lines = Path("/proc/self/smaps").read_text().splitlines()
    inode = str(os.fstat(client.fd).st_ino)
    begin = next(at for at, line in enumerate(lines) if "memfd:" in line and line.split()[4] == inode)
    resident = next(line for line in lines[begin:] if line.startswith("Rss:"))
    assert int(resident.split()[1]) << 10 == 64 * PAGE


def test_a_second_save_waits_for_the_first(client: Client, tmp_path: Path) -> None:
    client.hello(tmp_path / "ckpt", 1, 2)
    stage(client, Commit(1, 1), 8 << 20)
    with pytest.raises(SaverError, match="1-1 is not durable yet"):
        client.stage(PAGE)
    assert isinstance(client.wait(10), SaveDurable)


def test_sigterm_finishes_a_staged_save(tmp_path: Path) -> None:
    with served(tmp_path) as (path, process):
        client = Client.connect(path)
        client.hello(tmp_path / "ckpt", 1, 2)
        stage(client, Commit(1, 1), 32 << 20)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    assert store.newest(tmp_path / "ckpt").commit == Commit(1, 1)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_an_idle_saver(tmp_path: Path, number: signal.Signals) -> None:
    with served(tmp_path) as (path, process):
        client = Client.connect(path)
        client.hello(tmp_path / "ckpt", 1, 2)
        _await(lambda: ") S " in Path(f"/proc/{process.pid}/stat").read_text())  # it waits for requests
        process.send_signal(number)
        assert process.wait(20) == 0
        with pytest.raises(SaverError, match="the saver"):
            client.hello(tmp_path / "ckpt", 1, 2)


@pytest.mark.parametrize("heir", [False, True])
def test_a_private_saver_ends_after_its_trainers_last_save(tmp_path: Path, heir: bool) -> None:
    """``heir``: another process has a copy of the connection, which therefore does not end."""
    code = """
import os, signal, subprocess, sys
from pathlib import Path
from tests.train.checkpoint.test_saver import Client, Commit, stage
client = Client.private()
client.hello(Path(sys.argv[1]), 0, 2)
stage(client, Commit(0, 3), 32 << 20)
heir = 0
if sys.argv[2] == "True":
    fd = client._sock.fileno()
    heir = subprocess.Popen(["sleep", "100"], pass_fds=[fd], stdout=subprocess.DEVNULL).pid
print(client.pid, heir, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "ckpt", str(heir)],
        env=env,
        stdout=subprocess.PIPE,
        timeout=60,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    pid, other = map(int, done.stdout.split())
    try:
        _await(lambda: not Path(f"/proc/{pid}/fd").exists() or _zombie(pid))
    finally:
        if other:
            os.kill(other, signal.SIGKILL)
    assert store.newest(tmp_path / "ckpt").commit == Commit(0, 3)


def test_closing_waits_for_a_private_saver(tmp_path: Path) -> None:
    client = Client.private()
    client.hello(tmp_path / "ckpt", 0, 2)
    pid = client.pid
    assert Path(f"/proc/{pid}").exists()
    client.close()
    assert client.pid == 0
    assert not Path(f"/proc/{pid}").exists(), "reaped, so it is no zombie either"


def test_a_fork_keeps_no_copy_of_the_connection_and_its_memory(client: Client, tmp_path: Path) -> None:
    client.hello(tmp_path / "ckpt", 0, 2)
    stage(client, Commit(0, 1))
    kept = client.fd
    assert kept >= 0
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(OSError):
            os.fstat(kept)
            os._exit(2)
        os._exit(0 if (client._sock.fileno(), client.fd) == (-1, -1) else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert client.fd == kept
    assert client.wait(20.0) is not None


def test_a_lost_saver_is_reported(tmp_path: Path) -> None:
    with served(tmp_path) as (path, process):
        client = Client.connect(path)
        client.hello(tmp_path / "ckpt", 1, 2)
        process.kill()
        process.wait()
        with pytest.raises(SaverError, match="the saver") as lost:
            stage(client, Commit(1, 1))
            client.wait(10)
        assert lost.value.fault is Fault.SAVER_LOST
        assert client.pending is None
        assert str(client._lost("the saver ended")) == "the saver ended", "it wrote nothing"


@pytest.mark.parametrize(
    "ask",
    [
        lambda client: client.wait(),
        lambda client: client.hello(Path("/x"), 1, 2),
        lambda client: client.memory(1 << 20),
    ],
    ids=["wait", "hello", "memory"],
)
def test_a_stopped_saver_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ask: Callable[[Client], object]
) -> None:
    monkeypatch.setattr(connection, "_POLL_S", 0.01)
    limits: list[float] = []
    client = Client.private(lambda: limits[-1] if limits else None)
    client.hello(tmp_path / "ckpt", 1, 2)
    client.stage(PAGE)
    pid = client.pid
    ended = os.pidfd_open(pid)
    os.kill(pid, signal.SIGSTOP)
    client.save(new_manifest(Commit(1, 1), GANG, {}), (Stretch(store.STATE, 0, 5),))
    assert client.wait(0.03) is None and client.pending == Commit(1, 1), "for two minutes it may be silent"
    limits.append(0.1)
    with pytest.raises(SaverSilentError) as silent:
        ask(client)
    assert silent.value.fault is Fault.SAVER_LOST
    assert str(silent.value) == (
        "the saver has done nothing for 0 s (a hanging disk, or a stopped process) while it wrote 1-1"
    )
    assert (client.pid, client.pending) == (0, None) and select.select([ended], [], [], 10)[0], "killed"
    os.close(ended)
    client.close()


def test_connecting_without_a_saver_fails(tmp_path: Path) -> None:
    with pytest.raises(SaverError, match="no saver at"):
        Client.connect(tmp_path / "saver", timeout_s=0.05)


def test_a_long_socket_path_is_usable(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100) / ("e" * 100)
    deep.mkdir(parents=True)
    with served(deep) as (path, _):
        assert len(str(path)) > 108
        client = Client.connect(path)
        client.hello(tmp_path / "ckpt", 1, 2)
        client.close()


def test_a_sockets_address_needs_no_right_to_read_its_folder(tmp_path: Path) -> None:
    with protocol.address(tmp_path / "saver") as name:
        fd = int(name.split("/")[4])
        assert name == f"/proc/self/fd/{fd}/saver" and not os.get_inheritable(fd)
        assert Path(f"/proc/self/fd/{fd}").readlink() == tmp_path
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.listdir(fd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(NotADirectoryError), protocol.address(tmp_path / "pipe" / "saver"):
        pass


def test_the_staging_memory_has_a_name_and_no_program_inherits_it() -> None:
    with contextlib.closing(Buffer()) as buffer:
        assert not os.get_inheritable(buffer.fd)
        assert str(Path(f"/proc/self/fd/{buffer.fd}").readlink()) == "/memfd:spotkeeper (deleted)"


def test_a_socket_has_one_saver_and_a_dead_ones_is_reused(tmp_path: Path) -> None:
    with served(tmp_path) as (path, _):
        Client.connect(path).close()
        with pytest.raises(FileExistsError):
            protocol.listen(path)
    with served(tmp_path) as (path, _):
        Client.connect(path).close()


def test_the_saver_is_small_and_needs_no_site_packages(tmp_path: Path) -> None:
    with served(tmp_path) as (path, process):
        Client.connect(path).close()
        status = Path(f"/proc/{process.pid}/status").read_text()
        anonymous_kb = int(next(line for line in status.splitlines() if line.startswith("RssAnon")).split()[1])
    assert anonymous_kb < 16_000
    assert "-S" in saver.command(path)


def _small_disk(root: Path) -> bool:
    """A real file system of 8 MB; False where we may not mount."""
    root.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(root)], capture_output=True, check=False
    )
    return done.returncode == 0


def test_a_full_disk_is_reported_at_once_and_keeps_the_older_checkpoint(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    if not _small_disk(disk):
        pytest.skip("needs the right to mount; the next test needs none")
    try:
        with served(tmp_path) as (path, _):
            client = Client.connect(path)
            client.hello(disk / "ckpt", 1, 2)
            stage(client, Commit(1, 1), 3 << 20)
            assert isinstance(client.wait(10), SaveDurable)
            stage(client, Commit(1, 2), 6 << 20)
            event = client.wait(10)
            assert isinstance(event, SaveFailed) and event.fault is Fault.DISK_FULL
            assert store.scan(disk / "ckpt") == [Commit(1, 1)], "nothing of the failed one stays"
            stage(client, Commit(1, 3), 3 << 20)
            assert isinstance(client.wait(10), SaveDurable), "and the next that fits is saved"
            client.close()
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_an_exceeded_quota_counts_as_a_full_disk(tmp_path: Path) -> None:
    with served(tmp_path) as (path, process):
        client = Client.connect(path)
        client.hello(tmp_path / "ckpt", 1, 2)
        stage(client, Commit(1, 1), 1 << 20)
        assert isinstance(client.wait(10), SaveDurable)
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (2 << 20, 2 << 20))
        stage(client, Commit(1, 2), (1 << 20) + 1)
        assert isinstance(client.wait(10), SaveDurable)
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (PAGE, PAGE))
        stage(client, Commit(1, 3), (1 << 20) + 2)
        event = client.wait(10)
        assert isinstance(event, SaveFailed) and event.fault is Fault.DISK_FULL
    assert store.newest(tmp_path / "ckpt").commit == Commit(1, 2)


@pytest.mark.parametrize("call", ["mkdir", "pwrite", "fsync", "replace", "scandir"])
@pytest.mark.parametrize("number", ["EIO", "EROFS"])
def test_after_a_write_error_the_next_save_is_tried(tmp_path: Path, call: str, number: str) -> None:
    flag = tmp_path / "flag"
    wrapper = (str(Path(__file__).with_name("failing_saver.py")), call, number, str(flag))
    with served(tmp_path, wrapper=wrapper) as (path, process):
        client = Client.connect(path)
        client.hello(tmp_path / "ckpt", 1, 2)
        stage(client, Commit(1, 1))
        assert isinstance(client.wait(10), SaveDurable)
        flag.touch()
        for step in (2, 3):
            stage(client, Commit(1, step))
            event = client.wait(10)
            assert isinstance(event, SaveFailed) and event.fault is Fault.WRITE_FAILED
            assert os.strerror(getattr(errno, number)) in event.why
            assert store.newest(tmp_path / "ckpt").commit == Commit(1, 1)
        flag.unlink()
        sums = stage(client, Commit(1, 4))
        assert isinstance(client.wait(10), SaveDurable)
        newest = store.newest(tmp_path / "ckpt")
        assert newest.commit == Commit(1, 4) and newest.manifest is not None
        assert {file.name: file.sha256 for file in newest.manifest.files} == sums
        assert process.poll() is None
        client.close()


def test_an_unwritable_disk_at_hello_is_reported_and_retried(tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    flag.touch()
    wrapper = (str(Path(__file__).with_name("failing_saver.py")), "mkdir", "EROFS", str(flag))
    with served(tmp_path, wrapper=wrapper) as (path, process):
        with pytest.raises(SaverError, match="Read-only") as refused:
            Client.connect(path).hello(tmp_path / "ckpt", 1, 2)
        assert refused.value.fault is Fault.WRITE_FAILED and process.poll() is None
        flag.unlink()
        client = Client.connect(path)
        client.hello(tmp_path / "ckpt", 1, 2)
        stage(client, Commit(1, 1))
        assert isinstance(client.wait(10), SaveDurable)
        client.close()


_RESERVES = """
import os, sys
from pathlib import Path
from spotkeeper.train.checkpoint import durable
(Path(sys.argv[1]) / "cgroup.procs").write_text(str(os.getpid()))
if sys.argv[2] == "unasked":
    durable.memory_refusal = lambda *_: ""  # another process took the memory right after it was asked for
ballast = bytearray(os.urandom(1 << 20)) * 64  # the trainer's, far more than the saver has
if saver := os.fork():
    print(os.waitpid(saver, 0)[1])
else:
    try:
        durable.Buffer().reserve(256 << 20)
    except OSError as error:
        print(error, flush=True)
"""


@pytest.mark.parametrize("asks", ["asked", "unasked"])
def test_a_memory_limit_fails_a_save_and_never_the_trainer(tmp_path: Path, asks: str) -> None:
    """What a control group allows is asked first, for the kernel answers with a kill; and that hits the saver."""
    if why := no_memory_group():
        pytest.skip(why)
    group = GROUPS / f"saver-test-{os.getpid()}"
    group.mkdir()
    try:
        (group / MEMORY_FILES[0]).write_text(str(200 << 20))
        env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        argv = [sys.executable, "-c", _RESERVES, str(group), asks]
        done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60, check=False)
    finally:
        group.rmdir()
    assert done.returncode == 0, done.stderr
    if asks == "asked":
        assert "needs 256 MB more memory, but the memory limit of control group" in done.stdout
        assert done.stdout.endswith("\n0\n")
    else:
        assert done.stdout == f"{int(signal.SIGKILL)}\n", "the saver, though it is the smaller one"


def test_a_full_dev_shm_prevents_no_save(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from tests.train.checkpoint.test_saver import Client, Commit, stage
client = Client.private()
client.hello(Path(sys.argv[1]), 0, 2)
stage(client, Commit(0, 3), 32 << 20)
print(type(client.wait(20)).__name__)
client.close()
"""
    full = 'mount -t tmpfs -o size=64k none /dev/shm && { head -c 1M /dev/zero >/dev/shm/full; exec "$@"; }'
    argv = ["unshare", "--mount", "sh", "-c", full, "sh", sys.executable, "-c", code, str(tmp_path / "ckpt")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode and ("unshare" in done.stderr or "mount" in done.stderr):
        pytest.skip(f"needs the right to mount: {done.stderr}")
    assert done.stdout == "SaveDurable\n", done.stderr


def _zombie(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return ") Z " in Path(f"/proc/{pid}/stat").read_text()
    return True


def _await(condition, limit_s: float = 20.0) -> None:  # type: ignore[no-untyped-def]
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.005)


def _asks_to_save(commit: Commit, *stretches: dict[str, object]) -> bytes:
    manifest = new_manifest(commit, GANG, {}).to_bytes().decode()
    return json.dumps({"op": "save", "manifest": manifest, "stretches": stretches}).encode()


GARBAGE = (
    b"\xff\x00 no JSON",
    b"[" * 100_000,
    b"7",
    b"{}",
    b'{"op": "dance"}',
    b'{"op": ["hello"]}',
    b'{"op": "hello", "folder": "/x", "gen": "7", "keep": 2}',
    b'{"op": "hello", "folder": 5, "gen": 7, "keep": 2}',
    b'{"op": "hello", "folder": "a\\u0000b", "gen": 7, "keep": 2}',
    b'{"op": "hello", "folder": "/x", "gen": 7, "keep": true}',
    b'{"op": "reserve", "bytes": -1}',
    b'{"op": "reserve", "bytes": 1e9}',
    b'{"op": "reserve", "bytes": 9999999999999999999999}',
    b'{"op": "save", "manifest": 1, "stretches": []}',
    b'{"op": "save", "manifest": "{}", "stretches": []}',
    _asks_to_save(Commit("../../x", 1)),  # type: ignore[arg-type]
    _asks_to_save(Commit(9, 1), {"name": "../x", "offset": 0, "bytes": 1}),
    _asks_to_save(Commit(9, 1), {"name": "x", "offset": 0, "bytes": "1"}),
    _asks_to_save(Commit(9, 1), {"name": "x"}),
    _asks_to_save(Commit(9, 1), {"name": "x", "offset": PAGE // 2, "bytes": 1}),
    _asks_to_save(Commit(9, 1), {"name": "x", "offset": 0, "bytes": 1 << 62}),
)


def test_an_invalid_packet_ends_only_its_connection(client: Client, tmp_path: Path) -> None:
    """A saver that ended would take the staged state, and the save in hand, with it."""
    folder = tmp_path / "ckpt"
    client.hello(folder, 1, 2)
    stage(client, Commit(1, 1))
    client.wait(10)
    for garbage in GARBAGE:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
            with protocol.address(tmp_path / "saver") as name:
                other.connect(name)
            other.settimeout(20)
            if b'"save"' in garbage:  # fenced like any other writer, it would not even be looked at
                hello = {"op": "hello", "folder": str(tmp_path / "other"), "gen": 1, "keep": 2}
                other.send(json.dumps(hello).encode())
                assert json.loads(other.recv(1 << 20))["event"] == "hello"
                other.send(b'{"op": "reserve", "bytes": 4096}')
                assert json.loads(other.recv(1 << 20))["event"] == "buffer"
            other.send(garbage)
            assert other.recv(100) == b"", garbage[:80]
    assert store.complete(folder) == [Commit(1, 1)]
    with contextlib.closing(Client.connect(tmp_path / "saver")) as another:
        another.hello(folder, 2, 2)
        stage(another, Commit(2, 2))
        another.wait(10)
    assert store.complete(folder) == [Commit(2, 2), Commit(1, 1)]
    assert store.complete(tmp_path / "other") == []


def test_a_connection_that_cannot_be_accepted_is_printed_with_the_cause(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def accept() -> object:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(saver, "_RETRY_S", 0.0)
    server = saver.SaverServer(peer=None)
    server._accept(SimpleNamespace(accept=accept))  # type: ignore[arg-type]
    assert capfd.readouterr().err == "saver: cannot accept a connection: [Errno 24] Too many open files\n"


def test_a_refused_request_is_printed_up_to_200_characters(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with served(tmp_path) as (path, _):
        Client.connect(path).close()
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
            with protocol.address(path) as name:
                other.connect(name)
            other.settimeout(20)
            other.send(json.dumps({"op": "x" * 999}).encode())
            assert other.recv(100) == b""
    said = capfd.readouterr().err.removeprefix("saver: closing a connection after an invalid request: ")
    assert "x" * 99 in said and len(said) == 201, "with the line's end"


def test_only_the_agents_user_and_the_jobs_group_may_connect(tmp_path: Path) -> None:
    with contextlib.closing(protocol.listen(tmp_path / "s")) as sock:
        assert sock.type == socket.SOCK_SEQPACKET
        assert (tmp_path / "s").stat().st_mode & 0o007 == 0
