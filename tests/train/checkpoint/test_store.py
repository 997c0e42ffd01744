"""Which checkpoint is the newest that holds, whatever happened to the others."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import mmap
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spotkeeper.train.agent_link.control import Commit
from spotkeeper.train.checkpoint import store
from spotkeeper.train.checkpoint.manifest import FileSum, Manifest, RankPlace, _digest, _file, _place, _time, count
from spotkeeper.train.checkpoint.store import COMMIT, SKELETON, STATE
from spotkeeper.train.core import beneath


def make(folder: Path, commit: Commit) -> Path:
    """A complete checkpoint of a few bytes."""
    home = folder / str(commit)
    home.mkdir(parents=True)
    sums = []
    for name in (STATE, SKELETON):
        data = f"{name} of {commit}".encode() * 50
        (home / name).write_bytes(data)
        sums.append(FileSum(name, len(data), hashlib.sha256(data).hexdigest()))
    store.publish(home, Manifest(commit, 1, (RankPlace(0, 0, 0, True),), tuple(sums), {"torch": "2"}, 1.5))
    return home


def test_a_manifest_round_trips(tmp_path: Path) -> None:
    make(tmp_path, Commit(3, 14))
    manifest = store.read(tmp_path, Commit(3, 14))
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest
    assert (manifest.commit, manifest.world, manifest.saved_at) == (Commit(3, 14), 1, 1.5)
    later = json.loads(manifest.to_bytes())
    later["body"]["format"] = 99
    later["sha256"] = _digest(later["body"])
    with pytest.raises(ValueError, match=r"^COMMIT has format 99, this library reads \d+$"):
        Manifest.from_bytes(json.dumps(later).encode())


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a\0b", 7])
def test_a_file_of_a_manifest_lies_in_its_folder(name: object) -> None:
    with pytest.raises(ValueError, match="is not a file name"):
        _file({"name": name, "bytes": 1, "sha256": "0"})


@pytest.mark.parametrize("value", [True, "1", None, float("inf"), float("nan")])
def test_the_time_of_a_manifest_is_a_finite_number(value: object) -> None:
    with pytest.raises(ValueError, match="is not a time"):
        _time(value)
    assert _time(2) == 2.0


@pytest.mark.parametrize("value", [1, None, "true"])
def test_whether_a_rank_writes_is_true_or_false(value: object) -> None:
    fields = {"rank": 1, "node": 2, "slot": 3, "writes": True}
    assert _place(fields) == RankPlace(1, 2, 3, True)
    with pytest.raises(ValueError, match=f"^COMMIT: `writes` is {value!r}, neither true nor false$"):
        _place(fields | {"writes": value})


def test_newest_is_by_generation_then_step(tmp_path: Path) -> None:
    for commit in (Commit(1, 900), Commit(2, 20), Commit(2, 100)):
        make(tmp_path, commit)
    assert store.newest(tmp_path).commit == Commit(2, 100)
    assert store.newest(tmp_path).skipped == ()


def test_an_empty_folder_has_no_checkpoint(tmp_path: Path) -> None:
    assert store.newest(tmp_path / "never-made").commit is None
    (tmp_path / "quarantine").mkdir()
    (tmp_path / "latest").write_text("1-1\n")
    assert store.newest(tmp_path) == store.NewestCheckpoint(None, ())


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "half-written": (lambda home: (home / COMMIT).unlink(), "no COMMIT: the save was not finished"),
    "empty COMMIT": (lambda home: (home / COMMIT).write_bytes(b""), "COMMIT is not readable"),
    "flipped COMMIT": (lambda home: flip(home / COMMIT, 150), "COMMIT"),
    "COMMIT without a hash": (lambda home: (home / COMMIT).write_text("{}"), "COMMIT is not readable"),
    "truncated": (lambda home: (home / STATE).write_bytes(b"s"), "state.bin has 1 bytes, but COMMIT says"),
    "missing": (lambda home: (home / SKELETON).unlink(), "skeleton.pkl: No such file"),
    "flipped": (lambda home: flip(home / STATE, 70), "state.bin does not match its hash"),
    "renamed": (
        lambda home: home.rename(home.with_name("2-11")),
        "COMMIT belongs to 2-10, but is in",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_newest_is_skipped_with_its_reason(tmp_path: Path, damage: str) -> None:
    make(tmp_path, Commit(1, 5))
    harm, why = DAMAGE[damage]
    harm(make(tmp_path, Commit(2, 10)))
    newest = store.newest(tmp_path)
    assert newest.commit == Commit(1, 5)
    assert len(newest.skipped) == 1
    assert why in newest.skipped[0].why
    assert newest.skipped[0].name in ("2-10", "2-11")


def test_checkpoints_damaged_later_are_reported(tmp_path: Path) -> None:
    """Not what was never finished: nobody counts on that."""
    make(tmp_path, Commit(1, 5))
    assert store.damaged(tmp_path, Commit(1, 5)) == []
    (make(tmp_path, Commit(2, 20)) / COMMIT).unlink()
    (make(tmp_path, Commit(2, 10)) / STATE).write_bytes(b"s")
    make(tmp_path, Commit(2, 9))
    store.quarantine(tmp_path, Commit(2, 9))  # whose hash did not match, when it was read
    assert store.damaged(tmp_path, Commit(1, 5)) == [Commit(2, 10), Commit(2, 9)]
    assert store.damaged(tmp_path, Commit(2, 9)) == [Commit(2, 10)]
    store.quarantine_incomplete(tmp_path)
    assert store.damaged(tmp_path, Commit(1, 5)) == [Commit(2, 10)], "only the last two are kept to be looked at"
    assert store.damaged(tmp_path / "none", None) == []


def test_an_unreadable_folder_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ended every generation at its start, and kept the agent from mounting the disk."""
    make(tmp_path, Commit(1, 5))
    make(tmp_path, Commit(2, 10))
    real = beneath._open

    def failing(path: Any, *words: Any, **named: Any) -> int:
        if "2-10" in str(path):
            raise OSError(errno.EUCLEAN, os.strerror(errno.EUCLEAN), str(path))
        return real(path, *words, **named)

    monkeypatch.setattr(beneath, "_open", failing)
    newest = store.newest(tmp_path, hashes=False)
    assert newest.commit == Commit(1, 5)
    assert "Structure needs cleaning" in newest.skipped[0].why
    assert store.complete(tmp_path) == [Commit(1, 5)] and store.partial(tmp_path) == []
    assert store.damaged(tmp_path, None) == [Commit(1, 5)]
    assert [each.name for each in store.quarantine_incomplete(tmp_path)] == ["2-10"]


def test_every_flipped_bit_of_commit_is_detected(tmp_path: Path) -> None:
    home = make(tmp_path, Commit(2, 10))
    good = (home / COMMIT).read_bytes()
    whole = store.read(tmp_path, Commit(2, 10))
    for at in range(len(good)):
        flip(home / COMMIT, at)
        with contextlib.suppress(ValueError):
            assert store.read(tmp_path, Commit(2, 10)) == whole, f"byte {at}"  # white space may differ
        (home / COMMIT).write_bytes(good)


@pytest.mark.parametrize("value", [0, 2**63 - 1, -1, 2**63, 1.0, True, "7", None])
def test_a_count_is_a_whole_number_of_63_bits(value: Any) -> None:
    """What fits a file's offset."""
    if type(value) is int and value in (0, 2**63 - 1):
        assert count(value) == value
        return
    with pytest.raises(ValueError) as told:
        count(value, "PART")
    assert str(told.value) == f"PART: {value!r} is not a whole number from 0"


def test_a_report_checks_sizes_and_a_load_checks_hashes(tmp_path: Path) -> None:
    make(tmp_path, Commit(1, 5))
    flip(make(tmp_path, Commit(1, 6)) / STATE, 3)
    assert store.newest(tmp_path, hashes=False).commit == Commit(1, 6)
    assert store.newest(tmp_path).commit == Commit(1, 5)
    manifest = store.read(tmp_path, Commit(1, 6))
    with pytest.raises(ValueError, match=r"state\.bin does not match its hash"):
        store.read_into(tmp_path, manifest, STATE, memoryview(bytearray(manifest.files[0].bytes)))


def cached(file: Path, at: int) -> bool:
    """Whether the page cache has the file's byte at offset ``at``."""
    with file.open("rb") as opened:
        try:
            return bool(os.preadv(opened.fileno(), [bytearray(1)], at, os.RWF_NOWAIT))
        except BlockingIOError:
            return False


@pytest.mark.parametrize("cold", [True, False])
def test_a_load_fills_no_page_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cold: bool) -> None:
    """A file that is in the cache is read from there, also the last page of another, which is not whole."""
    data = os.urandom((4 << 20) + 7)
    home = tmp_path / "1-5"
    home.mkdir()
    (home / STATE).write_bytes(data)
    sums = FileSum(STATE, len(data), hashlib.sha256(data).hexdigest())
    with (home / STATE).open("rb") as file:
        os.fsync(file.fileno())
        if cold:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    middle = 2 << 20
    if cached(home / STATE, middle) is cold:
        pytest.skip("this file system keeps all files in the page cache")
    monkeypatch.setattr(store, "_CHUNK", 1 << 20)
    memory = mmap.mmap(-1, len(data))
    store.read_into(tmp_path, Manifest(Commit(1, 5), 1, (), (sums,), {}, 0.0), STATE, memoryview(memory))
    assert memory[:] == data
    assert cached(home / STATE, 3 << 20) is not cold


@pytest.mark.parametrize("refused", ["RWF_NOWAIT", "O_DIRECT", "its reads"])
def test_a_file_system_may_refuse_to_read_past_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    make(tmp_path, Commit(1, 5))
    manifest = store.read(tmp_path, Commit(1, 5))
    read, control = os.preadv, fcntl.fcntl

    def preadv(fd: int, into: Any, at: int, flags: int = 0) -> int:
        if flags:
            raise OSError(errno.EOPNOTSUPP, "") if refused == "RWF_NOWAIT" else BlockingIOError
        if control(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "")
        return read(fd, into, at)

    def set_flags(fd: int, what: int, flags: int) -> int:
        if flags and refused == "O_DIRECT":
            raise OSError(errno.EINVAL, "")
        return control(fd, what, flags)

    monkeypatch.setattr(os, "preadv", preadv)
    monkeypatch.setattr(store.fcntl, "fcntl", set_flags)
    memory = bytearray(manifest.files[0].bytes)
    store.read_into(tmp_path, manifest, STATE, memoryview(memory))
    assert memory == (tmp_path / "1-5" / STATE).read_bytes()


def test_a_partial_write_is_a_full_disk_without_commit(tmp_path: Path) -> None:
    """A disk that fills up, like this limit, takes the first bytes without a word: half a COMMIT was published."""
    make(tmp_path, Commit(1, 5))
    code = (
        "import resource, signal, sys; from pathlib import Path; from spotkeeper.train.checkpoint import store; "
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100)); "
        "store.replace(Path(sys.argv[1]), bytes(150))"
    )
    target = tmp_path / "1-5" / COMMIT
    done = subprocess.run([sys.executable, "-c", code, target], capture_output=True, text=True, check=False)
    assert "File too large" in done.stderr
    assert store.newest(tmp_path).commit == Commit(1, 5), "the older one stays as it was"


@pytest.mark.parametrize("name", ["007-5", "7-05", "\u00b2-1", "\u0667-1", "7-5 ", "-7-5", "7--5", "+7-5", "7_0-5"])
def test_folders_with_other_names_are_no_checkpoints(tmp_path: Path, name: str) -> None:
    """``007-5`` was taken for ``7-5``, which could then not be moved away: no generation could save there again."""
    (tmp_path / name).mkdir()
    make(tmp_path, Commit(1, 5))
    assert store.scan(tmp_path) == [Commit(1, 5)]
    assert store.quarantine_incomplete(tmp_path) == []


def test_quarantine_keeps_the_last_few(tmp_path: Path) -> None:
    for step in range(4):
        (make(tmp_path, Commit(1, step)) / COMMIT).unlink()
        assert [each.name for each in store.quarantine_incomplete(tmp_path)] == [f"1-{step}"]
    assert sorted(path.name for path in (tmp_path / "quarantine").iterdir()) == ["3.1-2", "4.1-3"]
    assert store.empty_quarantine(tmp_path) and not store.empty_quarantine(tmp_path)


@pytest.mark.parametrize("name", ["notes", "x.1-2", ".1-2", "\u00b2.1-2", "-3.1-2", "1234567890.1-2"])
def test_other_names_in_quarantine_count_as_the_oldest(tmp_path: Path, name: str) -> None:
    """A stray name must neither stop the next save nor outlast checkpoints."""
    home = tmp_path / store.QUARANTINE
    (home / "8.1-1").mkdir(parents=True)
    (home / name).mkdir()
    make(tmp_path, Commit(1, 5))
    store.quarantine(tmp_path, Commit(1, 5))
    assert sorted(path.name for path in home.iterdir()) == ["8.1-1", "9.1-5"]


def test_the_agent_reads_the_folder_without_torch(tmp_path: Path) -> None:
    make(tmp_path, Commit(4, 2))
    code = (
        "import sys; from spotkeeper.train.checkpoint import client, store; "
        "print(store.newest(sys.argv[1], hashes=False).commit); "
        "assert not {'torch', 'numpy', 'msgspec'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path], check=True, capture_output=True, text=True)
    assert done.stdout == "4-2\n"


def test_an_interrupted_deletion_is_no_unfinished_checkpoint(tmp_path: Path) -> None:
    """A saver killed in the middle of dropping an old one left a folder without COMMIT, and the next one said so."""
    for step in (1, 2, 3):
        make(tmp_path, Commit(1, step))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(beneath, "remove", lambda *_: False)  # killed before the first file went
        assert store.prune(tmp_path, 2) == [Commit(1, 1)]
    assert store.quarantine_incomplete(tmp_path) == []
    assert store.complete(tmp_path) == [Commit(1, 3), Commit(1, 2)]
    store.sweep(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1-2", "1-3", "latest"]
