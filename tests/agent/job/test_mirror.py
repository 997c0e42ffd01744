"""A copy of a checkpoint is whole or not there, in the bucket and on the disk, wherever its helper is killed.

The kills are enumerated: before, in the middle of and after every request of an upload, and of a download.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from spotkeeper.clock import Clock
from spotkeeper.contract import uploads
from spotkeeper.contract.facts import Kind
from spotkeeper.contract.generation import DocState, FetchOrder, JobRun, Member, MirrorRun, Role, SyncReply
from spotkeeper.contract.uploads import MirrorFile, MirrorList, list_name, part_names
from spotkeeper.reconcile.store import paths
from spotkeeper.reconcile.store.objects import check_key
from spotkeeper.train.agent_link.control import Commit, Fault
from spotkeeper.train.checkpoint import store
from spotkeeper.train.checkpoint.manifest import FileSum, Manifest, RankPlace
from spotkeeper.train.core import beneath
from spotkeeper_agent.cloud.storage import Bucket, MissingError, Readable, StorageError, Stored
from spotkeeper_agent.core.events import Failed, Fetched, Helped, HelperThread, MirrorThere, NoCopy, Unfit
from spotkeeper_agent.core.log import Log
from spotkeeper_agent.core.state import AgentState
from spotkeeper_agent.host.disk import Why
from spotkeeper_agent.job import mirror_transfer
from spotkeeper_agent.job.mirror import DOWN, PATIENCE_S, UP, Mirroring
from spotkeeper_agent.job.mirror_transfer import (
    FOLDER,
    CheckpointDownload,
    CheckpointUpload,
    NoCopyError,
    Pace,
    RottenError,
    Source,
)
from tests.agent.fakes import JOB, Fake, Machine, document, source, wait_until

Make = Callable[..., Machine]
PART = 1000
FAST = 1e12
FILES = {"state.bin": 2500, "skeleton.pkl": 700, "empty": 0}
SIZE = sum(FILES.values())


@pytest.fixture(autouse=True)
def _no_nicer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here it works in the tests' own thread, which has more to do, and begins processes, after it."""
    monkeypatch.setattr(mirror_transfer, "NICE", os.getpriority(os.PRIO_PROCESS, 0))


def content(name: str, size: int, commit: Commit) -> bytes:
    seed = hashlib.sha256(f"{name} {commit}".encode()).digest()
    return (seed * (size // len(seed) + 1))[:size]


def checkpoint(ckpt: Path, commit: Commit, slots: tuple[int, ...] = (0,)) -> Manifest:
    """Make one; ``slots``: the nodes that write."""
    home = ckpt / str(commit)
    home.mkdir(parents=True)
    sums = []
    for name, size in FILES.items():
        data = content(name, size, commit)
        (home / name).write_bytes(data)
        sums.append(FileSum(name, size, hashlib.sha256(data).hexdigest()))
    gang = tuple(RankPlace(node, node, slot, True) for node, slot in enumerate(slots))
    manifest = Manifest(commit, len(slots), gang, tuple(sums), {"torch": "2"}, 1.5)
    store.publish(home, manifest)
    return manifest


class Killed(BaseException):
    """The process ends here."""


@dataclass
class Shelf:
    """A bucket in memory. ``die``: called before and after each request's effect, and in the middle of a body."""

    objects: dict[str, bytes] = field(default_factory=dict)
    sent: list[str] = field(default_factory=list)
    die: Callable[[], None] = lambda: None

    def read(self, name: str) -> Iterator[bytes]:
        self.die()
        if name not in self.objects:
            raise MissingError(f"{name}: it does not exist")
        data = self.objects[name]
        yield data[: len(data) // 2]
        self.die()
        yield data[len(data) // 2 :]
        self.die()

    def find(self, name: str) -> Stored | None:
        self.die()
        data = self.objects.get(name)
        return None if data is None else Stored(len(data), hashlib.md5(data, usedforsecurity=False).hexdigest())

    def send(self, name: str, body: Readable) -> Stored:
        self.die()
        data = body.read(len(body) // 2)
        self.die()
        while piece := body.read(300):
            data += piece
        self.sent.append(name)
        self.objects[name] = data
        self.die()
        found = self.find(name)
        assert found is not None
        return found

    def create(self, name: str, data: bytes) -> bool:
        self.die()
        new = name not in self.objects
        if new:
            self.sent.append(name)
            self.objects[name] = data
        self.die()
        return new


class Executioner:
    """Kills at the n-th moment; counts them."""

    def __init__(self, at: int) -> None:
        self.at, self.count = at, 0

    def __call__(self) -> None:
        self.count += 1
        if self.count == self.at:
            raise Killed


def upload(shelf: Shelf, ckpt: Path, commit: Commit, node: int = 0, *, replicated: bool = True) -> MirrorThere:
    """As an agent that has just been started."""
    made = CheckpointUpload(shelf, JOB, node, Source(ckpt, commit, node, replicated=replicated), FAST, PART)  # type: ignore[arg-type]
    try:
        return made.work()
    finally:
        made.close()


def download(shelf: Shelf, ckpt: Path, commit: Commit, node: int = 0) -> Fetched:
    ckpt.mkdir(exist_ok=True)
    return CheckpointDownload(shelf, JOB, commit, node, ckpt).work()  # type: ignore[arg-type]


def listed(shelf: Shelf, commit: Commit, node: int = 0) -> MirrorList | None:
    data = shelf.objects.get(list_name(JOB, str(commit), node))
    return None if data is None else msgspec.json.decode(data, type=MirrorList)


def same(a: Path, b: Path) -> bool:
    names = {path.name for path in a.iterdir()}
    return names == {path.name for path in b.iterdir()} and all(
        (a / name).read_bytes() == (b / name).read_bytes() for name in names
    )


COMMIT = Commit(3, 40)


@pytest.fixture
def ckpt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(os, "fsync", lambda _: None)  # no power fails here, and disks are slow
    checkpoint(tmp_path / "ckpt", COMMIT)
    return tmp_path / "ckpt"


# ---------------------------------------------------------------- there and back


def test_an_uploaded_and_fetched_checkpoint_is_identical(ckpt: Path, tmp_path: Path) -> None:
    shelf = Shelf()
    assert upload(shelf, ckpt, COMMIT) == MirrorThere(COMMIT, True, SIZE)
    assert shelf.sent[-1] == list_name(JOB, "3-40", 0), "a list that is there is whole"
    home = f"jobs/{JOB}/ckpt/3-40/0"
    assert set(shelf.objects) == {
        *(f"{home}/state.bin.part-{number:05d}" for number in range(3)),
        f"{home}/skeleton.pkl",
        f"{home}/empty",
        f"{home}.json",
    }
    assert b"".join(shelf.objects[name] for name in shelf.sent[:3]) == (ckpt / "3-40/state.bin").read_bytes()
    blank = tmp_path / "blank"
    assert download(shelf, blank, COMMIT) == Fetched(COMMIT, SIZE)
    assert same(ckpt / "3-40", blank / "3-40")
    assert store.newest(blank).commit == COMMIT and not (blank / FOLDER).exists()


def test_object_names_are_valid_in_every_store_and_name_the_checkpoint() -> None:
    file = MirrorFile("__0_0.distcp", 5 * uploads.PART_BYTES, "")
    for name in (*part_names(JOB, "3-40", 12, file), list_name(JOB, "3-40", 12)):
        check_key(name)
        assert name.startswith(paths.copies(JOB)) and paths.copy_of(name) == "3-40"
    assert len(part_names(JOB, "3-40", 12, file)) == 5


def test_a_checkpoint_deleted_during_the_upload_is_copied(ckpt: Path, tmp_path: Path) -> None:
    shelf, taken = Shelf(), Source(ckpt, COMMIT, 0, replicated=True)
    checkpoint(ckpt, Commit(3, 50))
    assert store.prune(ckpt, 1) == [COMMIT]
    made = CheckpointUpload(shelf, JOB, 0, taken, FAST, PART)  # type: ignore[arg-type]
    assert made.work().complete
    made.close()
    assert download(shelf, tmp_path / "blank", COMMIT).commit == COMMIT


# ---------------------------------------------------------------- killed at every moment of every request


def test_an_upload_killed_anywhere_continues_and_never_looks_complete(ckpt: Path, tmp_path: Path) -> None:
    for at in count(1):
        shelf, die = Shelf(), Executioner(at)
        shelf.die = die
        try:
            upload(shelf, ckpt, COMMIT)
        except Killed:
            pass
        else:
            break
        shelf.die = lambda: None
        if listed(shelf, COMMIT) is not None:
            assert download(shelf, tmp_path / f"half{at}", COMMIT).commit == COMMIT
        before = set(shelf.objects)
        shelf.sent.clear()
        assert upload(shelf, ckpt, COMMIT).complete
        assert not before & set(shelf.sent), "what has arrived is not sent again"
        assert download(shelf, tmp_path / f"whole{at}", COMMIT).commit == COMMIT
    assert at > 25, "before, in the middle of and after each request"


def test_a_download_killed_anywhere_continues_and_never_looks_complete(ckpt: Path, tmp_path: Path) -> None:
    shelf = Shelf()
    upload(shelf, ckpt, COMMIT)
    for at in count(1):
        blank = tmp_path / f"blank{at}"
        shelf.die = Executioner(at)
        try:
            download(shelf, blank, COMMIT)
        except Killed:
            assert store.complete(blank) == [] and store.scan(blank) == []
        else:
            break
        shelf.die = lambda: None
        assert download(shelf, blank, COMMIT).commit == COMMIT
        assert same(ckpt / "3-40", blank / "3-40")
    assert at > 15


def test_a_download_killed_between_two_writes_continues(
    ckpt: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At its publication: COMMIT is written, the folder gets its name."""
    shelf = Shelf()
    upload(shelf, ckpt, COMMIT)
    for number, (module, name) in enumerate(((os, "fsync"), (os, "replace"), (Path, "rename"), (store, "sync_folder"))):
        blank = tmp_path / f"blank{number}"
        with monkeypatch.context() as patched, pytest.raises(Killed):
            patched.setattr(module, name, _killed)
            download(shelf, blank, COMMIT)
        assert store.newest(blank).commit in (None, COMMIT)
        assert download(shelf, blank, COMMIT).commit == COMMIT
        assert same(ckpt / "3-40", blank / "3-40")


def _killed(*_: object) -> None:
    raise Killed


def test_a_download_follows_no_link_of_a_job(ckpt: Path, tmp_path: Path) -> None:
    """A link at the folder of the fetch had the agent overwrite its own code, or delete it."""
    shelf = Shelf()
    upload(shelf, ckpt, COMMIT)
    ours, theirs = tmp_path / "ours", tmp_path / "job/ckpt"
    (ours / "3-40").mkdir(parents=True)
    (ours / "code.py").write_text("code")
    theirs.mkdir(parents=True)
    for name in (".fetch", "3-40", "3-41"):
        (theirs / name).symlink_to(ours)
    assert download(shelf, theirs, COMMIT).commit == COMMIT
    assert same(ckpt / "3-40", theirs / "3-40")
    (theirs / "3-40/COMMIT").unlink()
    beneath.remove(theirs, store.QUARANTINE)
    (theirs / store.QUARANTINE).symlink_to(ours)
    with pytest.raises(OSError):
        download(shelf, theirs, COMMIT)
    assert sorted(path.name for path in ours.iterdir()) == ["3-40", "code.py"]
    assert list((ours / "3-40").iterdir()) == [] and (ours / "code.py").read_text() == "code"


# ---------------------------------------------------------------- what is damaged


def _truncated(data: bytes) -> bytes:
    return data[: len(data) // 2]


def _flipped(data: bytes) -> bytes:
    return data[:-2] + bytes([data[-2] ^ 1]) + data[-1:]


def _grown(data: bytes) -> bytes:
    return data + b"\0"


@pytest.mark.parametrize("harm", [_truncated, _flipped, _grown, None], ids=["truncated", "flipped", "grown", "gone"])
def test_every_damaged_object_is_detected(ckpt: Path, tmp_path: Path, harm: Callable[[bytes], bytes] | None) -> None:
    whole = Shelf()
    upload(whole, ckpt, COMMIT)
    for number, (name, data) in enumerate(whole.objects.items()):
        if not data and harm is not _grown and harm is not None:
            continue
        rest = {other: bytes_ for other, bytes_ in whole.objects.items() if other != name}
        shelf = Shelf(rest | ({name: harm(data)} if harm else {}))
        blank = tmp_path / str(number) / "ckpt"
        blank.mkdir(parents=True)
        with pytest.raises(NoCopyError):
            download(shelf, blank, COMMIT)
        assert store.complete(blank) == []


def test_a_part_damaged_in_transit_is_fetched_again(ckpt: Path, tmp_path: Path) -> None:
    shelf = Shelf()
    upload(shelf, ckpt, COMMIT)
    name = f"jobs/{JOB}/ckpt/3-40/0/skeleton.pkl"
    good, tries = shelf.objects[name], count()
    read = shelf.read
    shelf.read = lambda asked: iter([_flipped(good)]) if asked == name and not next(tries) else read(asked)  # type: ignore[method-assign]
    assert download(shelf, tmp_path / "blank", COMMIT).commit == COMMIT


def test_a_list_with_wrong_names_or_files_is_refused(ckpt: Path, tmp_path: Path) -> None:
    shelf = Shelf()
    upload(shelf, ckpt, COMMIT)
    whole = listed(shelf, COMMIT)
    assert whole is not None
    other = checkpoint(tmp_path / "other", Commit(9, 9))
    lies = [
        msgspec.structs.replace(whole, commit=other.to_bytes().decode()),
        msgspec.structs.replace(whole, files=(MirrorFile("../x", 0, hashlib.sha256().hexdigest()),)),
        msgspec.structs.replace(whole, commit="{}"),
        msgspec.structs.replace(whole, files=whole.files[:1]),
    ]
    for number, lie in enumerate(lies):
        shelf.objects[list_name(JOB, "3-40", 0)] = msgspec.json.encode(lie)
        with pytest.raises(NoCopyError):
            download(shelf, tmp_path / f"blank{number}", COMMIT)
        assert not (tmp_path / "x").exists()


def test_a_damaged_checkpoint_is_not_copied(ckpt: Path) -> None:
    state = ckpt / "3-40/state.bin"
    state.write_bytes(_flipped(state.read_bytes()))
    shelf = Shelf()
    with pytest.raises(RottenError, match=r"state.bin of 3-40 does not match its hash"):
        upload(shelf, ckpt, COMMIT)
    assert listed(shelf, COMMIT) is None


def test_a_part_that_arrived_damaged_is_sent_again(ckpt: Path) -> None:
    """A part of the same length but with other bytes is uploaded again too."""
    shelf = Shelf()
    name = f"jobs/{JOB}/ckpt/3-40/0/skeleton.pkl"
    shelf.objects[name] = bytes(FILES["skeleton.pkl"])
    upload(shelf, ckpt, COMMIT)
    assert shelf.objects[name] == (ckpt / "3-40/skeleton.pkl").read_bytes()
    find = shelf.find
    shelf.find = lambda asked: Stored(FILES["skeleton.pkl"], "0" * 32) if asked == name else find(asked)  # type: ignore[method-assign]
    with pytest.raises(StorageError, match="differs from what was sent"):
        upload(shelf, ckpt, COMMIT)


def test_without_an_md5_a_parts_size_is_trusted(ckpt: Path, tmp_path: Path) -> None:
    shelf = Shelf()
    upload(shelf, ckpt, COMMIT)
    find = shelf.find
    shelf.find = lambda name: (found := find(name)) and Stored(found.size, "")  # type: ignore[method-assign]
    shelf.sent.clear()
    assert upload(shelf, ckpt, COMMIT).complete and shelf.sent == []


def test_a_list_is_never_replaced(ckpt: Path) -> None:
    shelf = Shelf()
    upload(shelf, ckpt, COMMIT)
    first = shelf.objects[list_name(JOB, "3-40", 0)]
    made = CheckpointUpload(shelf, JOB, 0, Source(ckpt, COMMIT, 0, replicated=True), FAST, 2 * PART)  # type: ignore[arg-type]
    assert made.work().complete
    made.close()
    assert shelf.objects[list_name(JOB, "3-40", 0)] == first


def test_a_damaged_checkpoint_with_the_same_name_is_quarantined(ckpt: Path, tmp_path: Path) -> None:
    shelf = Shelf()
    upload(shelf, ckpt, COMMIT)
    (ckpt / "3-40/state.bin").write_bytes(b"")
    assert download(shelf, ckpt, COMMIT).commit == COMMIT
    assert store.newest(ckpt).commit == COMMIT
    assert [path.name for path in (ckpt / store.QUARANTINE).iterdir()] == ["1.3-40"]


# ---------------------------------------------------------------- sharded state, pace, being broken off


def test_of_sharded_state_the_last_node_reports_the_complete_copy(tmp_path: Path) -> None:
    shelf = Shelf()
    for node in (0, 1, 2):
        checkpoint(tmp_path / str(node), COMMIT, (0, 1, 2))
    told = [upload(shelf, tmp_path / str(node), COMMIT, node, replicated=False).complete for node in (2, 0, 1)]
    assert told == [False, False, True]
    for node in (0, 1, 2):
        known = listed(shelf, COMMIT, node)
        assert known is not None and known.whole == (0, 1, 2)
        assert download(shelf, tmp_path / f"blank{node}", COMMIT, node).commit == COMMIT


def test_the_rate_limit_holds_over_all_transfers() -> None:
    """By what it asks to be waited for, not by a clock on a wall."""
    waits: list[float] = []

    class Counting(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waits.append(timeout or 0.0)
            return False

    pace = Pace(1000.0, Counting())
    for _ in range(10):
        pace.take(500)
    assert 4.9 < waits[-1] <= 5.0, "5,000 bytes at 1,000 a second"


def test_a_stop_interrupts_a_transfer_at_its_next_piece(ckpt: Path) -> None:
    shelf = Shelf()
    made = CheckpointUpload(shelf, JOB, 0, Source(ckpt, COMMIT, 0, replicated=True), FAST, PART)  # type: ignore[arg-type]
    seen = count()
    shelf.die = lambda: made.stop.set() if next(seen) == 5 else None
    with pytest.raises(StorageError, match="interrupted"):
        made.work()
    assert listed(shelf, COMMIT) is None
    there = set(shelf.sent)
    made.stop.clear()
    assert made.work().complete
    assert len(shelf.sent) == len(set(shelf.sent)) and there
    made.close()


def test_a_silent_bucket_does_not_block_the_unmount(ckpt: Path) -> None:
    """At every moment of an upload: closed, it reads nothing more, and shows no half."""
    for at in count(1):
        shelf, seen = Shelf(), count(1)
        made = CheckpointUpload(shelf, JOB, 0, Source(ckpt, COMMIT, 0, replicated=True), FAST, PART)  # type: ignore[arg-type]

        def give_up(made: CheckpointUpload = made, seen: Iterator[int] = seen, at: int = at) -> None:
            if next(seen) == at:
                made.close()

        shelf.die = give_up
        try:
            made.work()
        except StorageError as error:
            assert "interrupted" in str(error)
        if next(seen) <= at:
            break
        assert not open_below(ckpt)


def open_below(folder: Path) -> list[str]:
    """What this process has open there."""
    links = [path.readlink() for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return [str(link) for link in links if str(link).startswith(str(folder))]


# ---------------------------------------------------------------- the agent's loop, without its helper thread

NEWER, EVERY_S = Commit(3, 50), 3600.0


class Still(Clock):
    """A clock that a test sets."""

    at = 2 * EVERY_S

    def now(self) -> float:
        return Still.at

    steady = now


class Loop:
    """One machine's loop, which trains. Its helper takes work and does none: the test says how each work ends."""

    def __init__(self, ckpt: Path, node: int = 0, *, replicated: bool = True) -> None:
        self.lines: list[dict[str, Any]] = []
        self.said: list[tuple[Kind, str]] = []
        log = Log(write=lambda line: self.lines.append(json.loads(line)))
        self.helper = HelperThread(lambda _: None, log)
        self.mirroring = Mirroring(cast(Bucket, Shelf()), self.helper, Still(), log)
        self.child: Any = SimpleNamespace(control=SimpleNamespace(fault=Fault.NONE, commit=COMMIT), saving=False)
        self.mounting: Any = SimpleNamespace(
            number=0, newest=COMMIT, wrote=lambda commit, gen: self.said.append((Kind.CHECKPOINT, f"{commit} of {gen}"))
        )
        members = (Member(node, 1, str(node), "boot", "", 1, disk) for node, disk in enumerate((False, True, True)))
        self.machine: Any = SimpleNamespace(
            saved=SimpleNamespace(
                run=SimpleNamespace(mirror=MirrorRun(EVERY_S, FAST), until=None), notice=None, started=4, ended=3
            ),
            doc=document(4, 4, tuple(members), port=1, replicated=replicated),
            gen=4,
            node=node,
            job=JOB,
            state=AgentState.RUNNING,
            ckpt=lambda _: ckpt,
            say=lambda kind, value: self.said.append((kind, value)),
        )

    def turn(self) -> list[dict[str, Any]]:
        """What one turn of the loop logs."""
        return self._logged(lambda: self.mirroring.advance(self.machine, self.child, self.mounting))

    def ended(self, what: str, event: Helped) -> list[dict[str, Any]]:
        """What is logged when the helper's work ends."""
        self.helper.done(what, event)
        return self._logged(lambda: self.mirroring.helped(event, self.machine, self.mounting))

    def _logged(self, act: Callable[[], None]) -> list[dict[str, Any]]:
        self.lines.clear()
        act()
        return [{key: value for key, value in line.items() if key != "at"} for line in self.lines]


@pytest.fixture
def loops(ckpt: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Loop]]:
    monkeypatch.setattr(Still, "at", 2 * EVERY_S)
    made: list[Loop] = []

    def make(node: int = 1, *, replicated: bool = True) -> Loop:
        made.append(Loop(ckpt, node, replicated=replicated))
        return made[-1]

    yield make
    for loop in made:
        loop.mirroring.stop()


@pytest.mark.parametrize(("replicated", "nodes"), [(True, {1}), (False, {1, 2})])
def test_of_the_nodes_with_disks_one_copies_replicated_state_and_all_copy_sharded_state(
    loops: Callable[..., Loop], replicated: bool, nodes: set[int]
) -> None:
    begun = {node: loops(node, replicated=replicated).turn() for node in range(4)}
    assert {node: lines for node, lines in begun.items() if lines} == {
        node: [{"event": "mirror.begin", "commit": "3-40"}] for node in nodes
    }


@pytest.mark.parametrize("complete", [True, False])
def test_a_copied_checkpoint_is_logged_and_the_next_copy_begins_in_the_next_interval(
    loops: Callable[..., Loop], ckpt: Path, complete: bool
) -> None:
    loop = loops()
    loop.turn()
    assert loop.ended(UP, MirrorThere(NEWER, True)) == [] and loop.said == [], "no copy of this one runs here"
    assert loop.ended(UP, MirrorThere(COMMIT, complete, 70)) == [
        {"event": "mirror.there", "commit": "3-40", "complete": complete}
    ]
    assert loop.said == ([(Kind.MIRRORED, "3-40-70")] if complete else [])
    checkpoint(ckpt, NEWER)
    loop.child.control.commit = NEWER
    Still.at += EVERY_S - 1
    assert loop.turn() == []
    Still.at += 1
    assert loop.turn() == [{"event": "mirror.begin", "commit": "3-50"}]


def test_a_trial_that_has_reached_its_rung_is_copied_at_once(loops: Callable[..., Loop]) -> None:
    """Its machines stay only for that, so no interval counts; a second copy of the same checkpoint is none."""
    loop = loops()
    loop.mirroring.told(SyncReply(Role.MEMBER, mirrored=str(Commit(2, 30)), mirrored_at=Still.at))
    assert loop.turn() == [], "the interval has its copy"
    loop.child, loop.machine.saved.ended = None, 4
    assert loop.turn() == [], "an ordinary job's copy waits for its next generation"
    loop.machine.saved.run.until = COMMIT.step
    assert loop.turn() == [{"event": "mirror.begin", "commit": str(COMMIT)}]
    loop.ended(UP, MirrorThere(COMMIT, complete=True))
    assert (Kind.MIRRORED, f"{COMMIT}-0") in loop.said
    assert loop.turn() == []


def test_a_gang_that_stopped_for_a_move_copies_its_last_checkpoint_at_once_and_at_full_speed(
    loops: Callable[..., Loop], ckpt: Path
) -> None:
    """Instead of the older one that it was copying; a notice is no reason to wait, since nothing else is to be done."""
    loop = loops()
    assert loop.turn() == [{"event": "mirror.begin", "commit": str(COMMIT)}]
    older = loop.mirroring._upload
    checkpoint(ckpt, NEWER)
    stop = msgspec.structs.replace(loop.machine.doc, state=DocState.SAVE_STOP, upload=True)
    loop.machine.doc = stop
    assert loop.turn() == [] and older is not None and older.stop.is_set(), "the processes still save"
    loop.child, loop.mounting.newest = None, NEWER
    assert loop.turn() == [], "their end is not reported yet"
    loop.machine.saved.ended, loop.machine.saved.notice = 4, 1.0
    loop.helper.done(UP, Failed(UP, "interrupted", None))
    assert loop.turn() == [{"event": "mirror.begin", "commit": str(NEWER)}]
    assert loop.mirroring._upload is not None and loop.mirroring._upload._bytes_s == math.inf
    assert loop.ended(UP, MirrorThere(NEWER, True, 70)) != [] and (Kind.MIRRORED, "3-50-70") in loop.said


@pytest.mark.parametrize("what", ["notice", "no end", "stop", "other generation"])
def test_a_trials_last_copy_waits_while_something_else_matters_more(loops: Callable[..., Loop], what: str) -> None:
    loop = loops()
    loop.child, loop.machine.saved.ended, loop.machine.saved.run.until = None, 4, COMMIT.step
    if what == "notice":
        loop.machine.saved.notice = 1.0
    elif what == "no end":
        loop.machine.saved.ended = 3
    else:
        change = {"state": DocState.SAVE_STOP} if what == "stop" else {"gen": 5}
        loop.machine.doc = msgspec.structs.replace(loop.machine.doc, **change)
    assert loop.turn() == []


@pytest.mark.parametrize("what", ["", "roll call", "saves", "recovers"])
def test_a_job_that_trains_is_copied(loops: Callable[..., Loop], what: str) -> None:
    loop = loops()
    if what == "roll call":
        loop.machine.doc = msgspec.structs.replace(loop.machine.doc, state=DocState.ROLL_CALL)
    elif what == "saves":
        loop.child.saving = True
    elif what == "recovers":
        loop.machine.state = AgentState.SAVING
    assert bool(loop.turn()) == (what in ("", "roll call"))


def test_a_damaged_checkpoint_is_logged_and_the_next_one_copied_at_once(loops: Callable[..., Loop], ckpt: Path) -> None:
    loop = loops()
    loop.turn()
    assert loop.ended(UP, Unfit(COMMIT, "state.bin of 3-40 does not match")) == [
        {"event": "mirror.unfit", "commit": "3-40", "why": "state.bin of 3-40 does not match"}
    ]
    assert loop.turn() == [] and loop.said == []
    loop.child.control.commit = NEWER
    lost = {"event": "mirror.source", "commit": "3-50", "error": "no COMMIT: the save was not finished"}
    assert loop.turn() == [lost]
    assert loop.turn() == [], "logged once"
    checkpoint(ckpt, NEWER)
    assert loop.turn() == [{"event": "mirror.begin", "commit": "3-50"}]


def fetching(loops: Callable[..., Loop]) -> Loop:
    loop = loops()
    loop.child = None
    loop.mirroring.told(SyncReply(Role.MEMBER, JOB, 1, 1, fetch=FetchOrder("3-40", 2)))
    assert loop.turn() == [{"event": "fetch.begin", "commit": "3-40"}] and loop.helper.busy(DOWN)
    return loop


def test_a_fetched_checkpoint_is_logged_and_reported(loops: Callable[..., Loop]) -> None:
    loop = fetching(loops)
    assert loop.ended(DOWN, Fetched(NEWER)) == [] and loop.said == [], "this one is not fetched here"
    assert loop.ended(DOWN, Fetched(COMMIT, 50)) == [{"event": "fetch.there", "commit": "3-40"}]
    assert loop.said == [(Kind.FETCHED, "3-40-50"), (Kind.CHECKPOINT, "3-40 of 4")]
    assert loop.turn() == [] and not loop.helper.busy(DOWN)


def test_a_missing_copy_is_logged_and_reported(loops: Callable[..., Loop]) -> None:
    loop = fetching(loops)
    assert loop.ended(DOWN, NoCopy(NEWER, "gone")) == [] and loop.said == [], "this one is not fetched here"
    assert loop.ended(DOWN, NoCopy(COMMIT, "gone")) == [{"event": "fetch.nothing", "commit": "3-40", "why": "gone"}]
    assert loop.said == [(Kind.UNMIRRORED, "3-40")]
    assert loop.turn() == [] and not loop.helper.busy(DOWN)


def test_a_copy_of_which_nothing_arrives_counts_as_missing(loops: Callable[..., Loop]) -> None:
    loop, silent = fetching(loops), Failed(DOWN, "no route")
    Still.at += PATIENCE_S
    assert loop.ended(DOWN, silent) == [] and loop.said == []
    Still.at += 1
    assert loop.ended(DOWN, Failed(DOWN, "full", Why.WRITE)) == [] and loop.said == [], "the disk's fault"
    assert loop.ended(DOWN, silent) == [
        {"event": "fetch.nothing", "commit": "3-40", "why": "no data for 15 minutes: no route"}
    ]
    assert loop.said == [(Kind.UNMIRRORED, "3-40")]


# ---------------------------------------------------------------- the agent

WRITES = '''
"""Has a checkpoint on its disk, and trains on."""
import os, pathlib, time
from spotkeeper.train.agent_link.control import Commit, Control, RunResult, RunPhase, AgentRequest, write_result
run, gen = os.environ["SPOTKEEPER_RUN"], int(os.environ["SPOTKEEPER_GEN"])
control = Control.open(run + "/ctl")
for path in pathlib.Path(os.environ["SPOTKEEPER_CKPT"]).glob("*/COMMIT"):
    control.committed(Commit.parse(path.parent.name))
for step in range(10**9):
    time.sleep(0.02)
    control.state = RunPhase.TRAINING
    control.step_s = 0.02
    control.stepped(step)
    if control.requested is AgentRequest.SAVE_STOP:
        write_result(run, RunResult("stopped", gen, step, None))
        raise SystemExit(0)
'''


def writes(vm: Machine, **fields: object) -> JobRun:
    sha256 = source(vm.fake, {"train.py": WRITES})
    many = MirrorRun(3600.0, 1e9)
    return JobRun(  # type: ignore[arg-type]
        name="job", command=("train.py",), source_sha256=sha256, python=vm.light_python(), mirror=many, **fields
    )


def begin(fake: Fake, vm: Machine, run: JobRun) -> Path:
    """Boot, with a disk that has a checkpoint; its folder."""
    ckpt = vm.attach_disk() / JOB / "ckpt"
    checkpoint(ckpt, COMMIT)
    vm.stand_by(run)
    vm.start()
    fake.wait_sync(vm.uid)
    vm.serve(document(4, 4, (vm.member(disk=True),)), run, disk=0)
    return ckpt


def test_the_agent_copies_a_checkpoint_though_it_is_killed_at_every_request(
    fake: Fake, machine: Make, tmp_path: Path
) -> None:
    """SIGKILL before the bucket has taken it, or after: each upload in turn, and the list both ways."""
    vm = machine()
    kills = {"state.bin": [503], "skeleton.pkl": [200], "empty": [503], "0.json": [503, 200]}
    down = threading.Event()

    def status(name: str) -> int:
        left = kills.get(name.rpartition("/")[2], []) if "/ckpt/" in name else []
        if not left or vm.agent is None:
            return 200
        vm.agent.kill()
        down.set()
        return left.pop(0)

    fake.storage_status = status
    ckpt = begin(fake, vm, writes(vm))
    for _ in range(5):
        assert down.wait(60)
        down.clear()
        assert vm.agent is not None
        vm.agent.wait()
        vm.start()
    assert fake.wait_fact(vm.uid, Kind.MIRRORED).value == f"3-40-{SIZE}"
    shelf = Shelf({name: data for name, data in fake.objects.items() if "/ckpt/" in name})
    assert download(shelf, tmp_path / "blank", COMMIT).commit == COMMIT
    assert same(ckpt / "3-40", tmp_path / "blank/3-40")


def test_a_notice_and_a_stop_come_before_any_copy(fake: Fake, machine: Make) -> None:
    vm = machine()
    fake.storage_status = lambda name: 503 if "/ckpt/" in name else 200
    run = writes(vm)
    begin(fake, vm, run)
    fake.wait(lambda: any("/ckpt/" in name for name in fake.sent))
    doc = document(5, 4, (vm.member(disk=True),), DocState.SAVE_STOP, deadline=time.time() + 20)
    vm.serve(doc, run, disk=0)
    fake.wait_fact(vm.uid, Kind.RELEASED, 4)
    fake.storage_status = lambda name: 200
    fake.sent.clear()
    fake.instance(vm.uid, vm.name, preempted="TRUE")
    vm.serve(document(6, 5, (vm.member(disk=True),)), run, disk=0)
    fake.wait_fact(vm.uid, Kind.NOTICE)
    wait_until(lambda: vm.log().count('"job.start"') == 2, 40)
    seen = len(fake.syncs)
    fake.wait(lambda: len(fake.syncs) > seen + 3)
    assert not [name for name in fake.sent if "/ckpt/" in name]
    fake.instance(vm.uid, vm.name, preempted="FALSE")
    assert fake.wait_fact(vm.uid, Kind.MIRRORED).value == f"3-40-{SIZE}"


def test_the_agent_fetches_what_it_is_told_before_it_trains_though_it_is_killed(
    fake: Fake, machine: Make, tmp_path: Path
) -> None:
    vm = machine()
    shelf = Shelf()
    checkpoint(tmp_path / "ckpt", COMMIT)
    upload(shelf, tmp_path / "ckpt", COMMIT)
    last = f"jobs/{JOB}/ckpt/3-40/0/empty"
    fake.objects |= {name: data for name, data in shelf.objects.items() if name != last}
    ckpt = vm.attach_disk() / JOB / "ckpt"
    run = writes(vm)
    vm.stand_by(run, disk=0, fetch=FetchOrder("3-40", 0))
    vm.start()
    wait_until(lambda: (ckpt / FOLDER / "3-40" / "state.bin").exists() or Kind.UNMIRRORED in said(fake), 30)
    vm.kill()
    assert store.scan(ckpt) == []
    fake.objects[last] = shelf.objects[last]
    with fake.changed:
        fake.facts.clear()
    vm.start()
    fake.wait_fact(vm.uid, Kind.FETCHED)
    assert fake.wait_fact(vm.uid, Kind.CHECKPOINT).value == "3-40"
    assert same(tmp_path / "ckpt/3-40", ckpt / "3-40")


def said(fake: Fake) -> set[Kind]:
    return {fact.kind for _, fact in fake.facts}


def test_a_missing_copy_is_reported_and_another_fetched(fake: Fake, machine: Make, tmp_path: Path) -> None:
    vm = machine()
    shelf, older = Shelf(), Commit(3, 30)
    checkpoint(tmp_path / "ckpt", older)
    upload(shelf, tmp_path / "ckpt", older)
    fake.objects |= shelf.objects
    vm.attach_disk()
    run = writes(vm)
    vm.stand_by(run, disk=0, fetch=FetchOrder("3-40", 0))
    vm.start()
    assert fake.wait_fact(vm.uid, Kind.UNMIRRORED).value == "3-40"
    vm.stand_by(run, disk=0, fetch=FetchOrder("3-30", 0))
    assert fake.wait_fact(vm.uid, Kind.FETCHED).value == f"3-30-{SIZE}"


@pytest.mark.parametrize(("busy", "free"), [({UP}, False), ({DOWN}, False), (set(), True), ({"bundle"}, True)])
def test_the_disk_is_free_once_neither_upload_nor_download_uses_it(busy: set[str], free: bool) -> None:
    left: list[str] = []
    helper = SimpleNamespace(busy=lambda what: what in busy)
    part = SimpleNamespace(
        helper=helper, _give_up=lambda: left.append("upload"), _leave_fetch=lambda: left.append("download")
    )
    assert Mirroring.stop(cast(Any, part)) is free
    assert left == ["upload", "download"]
