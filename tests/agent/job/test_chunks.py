"""The complete log's way from the spool to the bucket: whatever a job puts there, and whoever is killed meanwhile."""

from __future__ import annotations

import gzip
import itertools
import os
import resource
import threading
import time
from pathlib import Path

import msgspec
import pytest

from spotkeeper.clock import Clock
from spotkeeper.contract import redact
from spotkeeper.contract.uploads import CHUNK_BYTES, LogIndex, log_index
from spotkeeper_agent.cloud.storage import StorageError
from spotkeeper_agent.core.log import Log
from spotkeeper_agent.job import chunks, logs
from spotkeeper_agent.job.chunks import LAUNCHER_LOG, NodeLog, NodeRun, left, make_spool
from spotkeeper_agent.launcher import spool, stacks
from spotkeeper_agent.launcher.spool import Spool, packed
from tests.agent.chunks import MemoryBucket, complete_log
from tests.agent.fakes import wait_until

JOB = "abcdefgh"
RUN = NodeRun(JOB, 2, 7)


SAID = itertools.count()


def say(folder: Path, *lines: str, rank: int = 0) -> None:
    one = Spool(folder, b"%d" % rank, [])
    one._files = next(SAID)  # all in this process: two within a millisecond must not have one name
    for line in lines:
        one.add(b"o", f"{line}\n".encode())
    one.end()


def noise(size: int) -> bytes:
    """A file of the spool that does not get smaller."""
    return packed(time.time(), b"0o", os.urandom(size // 2).hex().encode())


def names(bucket: MemoryBucket) -> list[str]:
    return sorted(name for name in bucket.objects if name.endswith(".gz"))


@pytest.fixture
def bucket() -> MemoryBucket:
    return MemoryBucket()


@pytest.fixture
def log(bucket: MemoryBucket, tmp_path: Path) -> NodeLog:
    make_spool(tmp_path, RUN)
    return NodeLog(bucket, tmp_path, RUN)


def test_the_newest_chunk_grows_and_then_the_next_begins(
    bucket: MemoryBucket, log: NodeLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NodeRun, "chunk_bytes", 3000)
    for number in range(6):
        say(log.folder / "spool", f"step {number}")
        (log.folder / "spool" / f"{9 * 10**12 + number}-0-1-00000001.gz").write_bytes(noise(1000))
        log.collect(None)
        log.upload()
        log.upload()
        assert f"step {number}\n" in complete_log(bucket.objects, JOB, 2, 7)
    assert 2 <= len(names(bucket)) <= 3
    assert all(name.startswith(f"jobs/{JOB}/logs/2/7/") for name in names(bucket))
    assert not list((log.folder / "spool").glob("*.gz"))
    log.upload(last=True)
    index = msgspec.json.decode(bucket.objects[log_index(JOB, 2)], type=LogIndex)
    assert [chunk.size for chunk in index.chunks] == [len(bucket.objects[name]) for name in names(bucket)]
    assert sorted(path.name for path in log.folder.iterdir()) == ["spool"]
    text = complete_log(bucket.objects, JOB, 2, 7)
    assert [text.count(f"0o step {number}\n") for number in range(6)] == [1] * 6


def test_what_a_job_puts_into_the_spool_is_neither_followed_nor_waited_for_nor_unpacked(
    bucket: MemoryBucket, log: NodeLog, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(packed(1.0, b"0o", b"another's secret"))
    there = log.folder / "spool"
    say(there, "honest")
    (there / f"{1:013d}-0-1-00000001.gz").symlink_to(secret)
    os.mkfifo(there / f"{2:013d}-0-1-00000001.gz")
    (there / f"{3:013d}-0-1-00000001.gz").mkdir()
    with (there / f"{4:013d}-0-1-00000001.gz").open("wb") as large:
        large.truncate(1 << 40)
    (there / "..gz").write_bytes(b"no such name")
    (there / f"{5:013d}-0-1-00000001.gz").write_bytes(gzip.compress(b"\0" * (64 << 20)))  # a bomb
    (there / f"{6:013d}-0-1-00000001.gz").write_bytes(packed(1.0, b"0o", b"cut off")[:-9])
    took = threading.Thread(target=log.collect, args=(None,))
    took.start()
    took.join(10)
    assert not took.is_alive()
    log.upload()
    (name,) = names(bucket)
    assert b"another's" not in bucket.objects[name]
    assert len(bucket.objects[name]) < 100_000, "the bomb stays packed"
    honest = bucket.objects[name][bucket.objects[name].rindex(b"\x1f\x8b\x08\0\0") :]
    assert gzip.decompress(honest).endswith(b"0o honest\n")
    log.forget()
    assert not log.folder.exists() and secret.exists()


def test_a_spool_that_is_a_link_is_not_followed(bucket: MemoryBucket, log: NodeLog, tmp_path: Path) -> None:
    (tmp_path / "else").mkdir()
    say(tmp_path / "else", "not this job's")
    (log.folder / "spool").rmdir()
    (log.folder / "spool").symlink_to(tmp_path / "else")
    with pytest.raises(OSError, match=r"spool|Not a directory|symbolic"):
        log.collect(None)
    assert list((tmp_path / "else").glob("*.gz"))


@pytest.mark.parametrize("killed", ["before the file is gone", "during the copy", "after the upload"])
def test_an_agent_that_is_killed_loses_no_line_and_repeats_none(
    bucket: MemoryBucket, log: NodeLog, tmp_path: Path, killed: str
) -> None:
    there = log.folder / "spool"
    say(there, "step 1")
    log.collect(None)
    log.upload()
    say(there, "step 2")
    (file,) = there.glob("*.gz")
    data = file.read_bytes()
    log.collect(None)
    (chunk,) = (path for path in log.folder.iterdir() if path.name.isdigit())
    if killed == "before the file is gone":
        file.write_bytes(data)
    elif killed == "during the copy":
        file.write_bytes(data)
        os.truncate(chunk, chunk.stat().st_size - len(data) // 2)
    else:
        log.upload()
    after = NodeLog(bucket, tmp_path, RUN)
    say(there, "step 3")
    after.collect(None)
    after.upload()
    assert len(names(bucket)) == 1, "the same chunk grows"
    text = bucket.objects[names(bucket)[0]]
    if killed == "during the copy":  # readers skip the half and find the whole behind it
        assert data in text
    else:
        assert complete_log(bucket.objects, JOB, 2, 7) == "0o step 1\n0o step 2\n0o step 3\n"


def test_a_bucket_that_is_away_loses_nothing_until_the_disk_has_enough(
    bucket: MemoryBucket, log: NodeLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NodeRun, "chunk_bytes", 2000)
    monkeypatch.setattr(chunks, "UNSENT_BYTES", 8000)
    bucket.away = True
    there = log.folder / "spool"
    for number in range(12):
        say(there, f"step {number}")
        (there / f"{9 * 10**12 + number}-0-1-00000001.gz").write_bytes(noise(1500))
        log.collect(None)
        with pytest.raises(StorageError):
            log.upload()
    held = sum(path.stat().st_size for path in log.folder.iterdir() if path.is_file())
    assert held < 8000 + 2 * 2000 and list(there.glob("*.gz")), "the rest waits in the spool, which has its own bound"
    bucket.away = False
    while not log.collect(None):
        log.upload()
    log.upload(last=True)
    text = complete_log(bucket.objects, JOB, 2, 7)
    assert [text.count(f"0o step {number}\n") for number in range(12)] == [1] * 12


def test_a_node_keeps_to_its_share_of_the_bucket_across_machines(
    bucket: MemoryBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "LEAST_CHUNK", 2000)
    deleted = 0
    for gen in range(1, 7):
        run = NodeRun(JOB, 2, gen, share=9000)
        machine = tmp_path / str(gen)  # each generation on another machine, whose last one was killed
        there = make_spool(machine, run)
        one = NodeLog(bucket, machine, run)
        for number in range(3):
            (there / f"{9 * 10**12 + number}-0-1-00000001.gz").write_bytes(noise(2000))
            one.collect(None)
            one.upload(last=False)
        held = sum(len(bucket.objects[name]) for name in names(bucket))
        assert held <= 9000 + 2500
        index = msgspec.json.decode(bucket.objects[log_index(JOB, 2)], type=LogIndex)
        assert {f"jobs/{JOB}/logs/2/{each.gen}/{each.at:013d}.gz" for each in index.chunks} == set(names(bucket))
        assert index.deleted >= deleted
        deleted = index.deleted
    assert deleted > 10_000
    assert {int(name.split("/")[4]) for name in names(bucket)} <= {5, 6}, "the oldest are gone"


# Of another job that writes this folder: with a name of more than 13 digits, chunks on the disk would never be found.
FAR = b'{"chunks": [{"gen": 7, "at": 10000000000000, "size": 1}]}'


@pytest.mark.parametrize(
    "content", [b"", b"{", b'{"chunks": [{"gen": -1, "at": 0}]}', b" " * (2 << 20), b"[" * 10_000, FAR]
)
def test_a_damaged_list_of_chunks_stops_no_log(bucket: MemoryBucket, log: NodeLog, content: bytes) -> None:
    bucket.objects[log_index(JOB, 2)] = content
    say(log.folder / "spool", "step 1")
    log.collect(None)
    log.upload()
    assert complete_log(bucket.objects, JOB, 2, 7) == "0o step 1\n"
    assert len(msgspec.json.decode(bucket.objects[log_index(JOB, 2)], type=LogIndex).chunks) == 1


def test_shares_of_many_nodes_are_small_and_their_chunks_too() -> None:
    assert NodeRun(JOB, 0, 1, 1024 << 20).chunk_bytes == CHUNK_BYTES
    assert NodeRun(JOB, 0, 1, 2 << 20).chunk_bytes == 512 << 10
    assert NodeRun(JOB, 0, 1, 1000).chunk_bytes == chunks.LEAST_CHUNK


def test_torchruns_messages_stacks_and_notes_are_in_the_log_once(
    bucket: MemoryBucket, log: NodeLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redact, "_known", {"hush-hush"})
    run = tmp_path / "run"
    run.mkdir()
    (run / LAUNCHER_LOG).write_text("torchrun begins\nwith hush-hu")
    log.collect(run)
    (run / LAUNCHER_LOG).write_text("torchrun begins\nwith hush-hush\nends with")
    (run / stacks.TEXT).write_text("--- stacks\n")
    after = NodeLog(bucket, tmp_path, RUN)  # another agent
    after.collect(run)
    after.note("spotkeeper: no hush-hush here\nsecond line\n")
    after.collect(run, last=True)
    after.upload(last=True)
    assert complete_log(bucket.objects, JOB, 2, 7).splitlines() == [
        *("t torchrun begins", "t with *********", "s --- stacks"),
        *("n spotkeeper: no ********* here", "n second line", "t ends with"),
    ]


HUSH = "hush-hush"


@pytest.mark.parametrize("before", range(chunks.PIECE - len(HUSH), chunks.PIECE + 1))
@pytest.mark.parametrize("lines", [True, False])
def test_a_secret_across_two_pieces_of_torchruns_log_is_hidden(
    bucket: MemoryBucket, log: NodeLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: int, lines: bool
) -> None:
    monkeypatch.setattr(redact, "_known", {HUSH})
    text = ("begins\n" if lines else "begins ").ljust(before, ".") + HUSH + " ends"
    (tmp_path / LAUNCHER_LOG).write_text(text)
    log.collect(tmp_path)
    log.collect(tmp_path, last=True)
    log.upload(last=True)
    found = complete_log(bucket.objects, JOB, 2, 7).replace("\nt ", "").replace("\n", "")
    assert found == "t " + text.replace("\n", "").replace(HUSH, "*" * len(HUSH))


@pytest.mark.parametrize("behind", range(len(HUSH)))
def test_a_secret_is_hidden_where_a_flood_is_cut(
    bucket: MemoryBucket, log: NodeLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, behind: int
) -> None:
    monkeypatch.setattr(redact, "_known", {HUSH})
    text = "." * (chunks.BEHIND + 1) + HUSH + "." * (chunks.PIECE - behind)
    (tmp_path / LAUNCHER_LOG).write_text(text)
    log.collect(tmp_path, last=True)
    log.upload(last=True)
    assert set(complete_log(bucket.objects, JOB, 2, 7).splitlines()[1]) <= set("t *.")


def test_a_flood_in_torchruns_log_is_cut_and_said(bucket: MemoryBucket, log: NodeLog, tmp_path: Path) -> None:
    (tmp_path / LAUNCHER_LOG).write_bytes(b"%07d\n" % 5 * (1 << 19))
    log.collect(tmp_path)
    log.upload()
    text = complete_log(bucket.objects, JOB, 2, 7)
    assert text.startswith("n 4.1 MB of torchrun.log left out here\nt 0000005\n") and len(text) < 200_000


def test_sending_a_chunk_takes_no_memory_for_it(bucket: MemoryBucket, log: NodeLog) -> None:
    there = log.folder / "spool"
    for number in range(24):
        (there / f"{number:013d}-0-1-00000001.gz").write_bytes(noise(250_000))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    log.collect(None)
    log.upload()
    assert len(bucket.objects[names(bucket)[0]]) > 3 << 20
    assert bucket.most <= 64 << 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 16_000, "KB; the bucket's own copies included"


# -- the thread


@pytest.fixture
def uploader(bucket: MemoryBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> logs.Uploader:
    monkeypatch.setattr(logs, "FLOOR_S", 0.02)
    one = logs.Uploader(bucket, tmp_path / "logs", Clock(scale=1000.0), Log(write=lambda _: None))
    one.start()
    return one


def test_an_ended_generation_leaves_nothing_on_the_disk(
    bucket: MemoryBucket, uploader: logs.Uploader, tmp_path: Path
) -> None:
    for gen in (1, 2):
        run = NodeRun(JOB, 0, gen)
        there = make_spool(tmp_path / "logs", run)
        uploader.follow(logs.Task(run, tmp_path / "run"))
        say(there, f"generation {gen}")
        wait_until(lambda gen=gen: f"generation {gen}" in complete_log(bucket.objects, JOB, 0, gen))
        say(there, "its last words")
    uploader.follow(logs.Task(NodeRun(JOB, 0, 2), tmp_path / "run", "spotkeeper: a note"))
    uploader.rest()
    wait_until(lambda: not left(tmp_path / "logs"))
    assert complete_log(bucket.objects, JOB, 0, 1) == "0o generation 1\n0o its last words\n"
    assert "n spotkeeper: a note\n" in complete_log(bucket.objects, JOB, 0, 2)
    assert not list((tmp_path / "logs").iterdir())


def test_what_an_earlier_agent_could_not_send_is_sent_and_what_still_runs_is_left_alone(
    bucket: MemoryBucket, uploader: logs.Uploader, tmp_path: Path
) -> None:
    old, new = NodeRun(JOB, 0, 1), NodeRun(JOB, 1, 2, share=1 << 30)
    say(make_spool(tmp_path / "logs", old), "old")
    there = make_spool(tmp_path / "logs", new)
    uploader.follow(logs.Task(new, tmp_path / "run"))
    wait_until(lambda: left(tmp_path / "logs") == [new])
    assert complete_log(bucket.objects, JOB, 0, 1) == "0o old\n"
    assert there.is_dir()


def test_a_bucket_that_refuses_is_given_up_after_a_day(
    bucket: MemoryBucket, uploader: logs.Uploader, tmp_path: Path
) -> None:
    bucket.away = True
    old = NodeRun(JOB, 0, 1)
    say(make_spool(tmp_path / "logs", old), "old")
    uploader.rest()
    wait_until(lambda: not list((old.folder(tmp_path / "logs") / "spool").glob("*.gz")))
    assert left(tmp_path / "logs") == [old]
    os.utime(old.folder(tmp_path / "logs"), (1.0, 1.0))
    wait_until(lambda: not left(tmp_path / "logs"))


def test_the_agent_makes_no_chunks_on_a_disk_that_is_nearly_full(
    bucket: MemoryBucket, log: NodeLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    say(log.folder / "spool", "step 1")
    monkeypatch.setattr(chunks, "has_room", lambda _: False)
    assert not log.collect(None)
    assert not any(path.name.isdigit() for path in log.folder.iterdir())
    assert spool.has_room("/proc/self") in (True, False)
