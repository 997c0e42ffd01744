"""Complete logs as readers see them: in order of time, each line once, bounded whatever somebody wrote there."""

from __future__ import annotations

import os
import time
import tracemalloc
import zlib
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spotkeeper.client import log_lines
from spotkeeper.client.log_lines import LogLine, NodeLines, in_order, shown
from spotkeeper.clock import Clock
from spotkeeper.contract.uploads import LogIndex, chunk_name, log_index
from spotkeeper.reconcile.store.store import Store, open_store
from spotkeeper_agent.launcher.spool import packed

JOB = "abcdefgh"
T = 1_764_000_000_000


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(f"sqlite://{tmp_path}/bucket.sqlite")


def put(store: Store, node: int, gen: int, at: int, *members: bytes) -> None:
    store.put(chunk_name(JOB, node, gen, at), b"".join(members))


def line(at: int, text: str, source: bytes = b"0o") -> bytes:
    return packed(at / 1000, source, text.encode())


def texts(lines: Iterator[LogLine]) -> list[str]:
    return [each.text for each in lines]


def test_lines_of_nodes_and_generations_are_in_order_of_time(store: Store) -> None:
    put(store, 0, 1, T, line(T, "a"), line(T + 4000, "c"))
    put(store, 0, 2, T + 9000, line(T + 9000, "e", b"3e"))
    put(store, 1, 1, T + 1000, line(T + 1000, "b"), line(T + 5000, "d", b"t"))
    put(store, 1, 2, T + 9500, line(T + 9500, "f", b"n"))
    found = list(in_order([NodeLines(store, JOB, node) for node in (0, 1)]))
    assert [each.text for each in found] == list("abcdef")
    assert [(each.node, each.gen, each.source, each.local_rank) for each in found[3:]] == [
        *((1, 1, "torchrun", 0), (0, 2, "stderr", 3), (1, 2, "spotkeeper", 0)),
    ]


def test_lines_of_one_nodes_workers_are_sorted(store: Store) -> None:
    """Each worker's files hold up to a second."""
    first = b"\n".join(b"%d" % number for number in range(0, 10, 2))
    members = [line(T + 10 * number, str(number), b"%do" % (number % 3)) for number in (2, 0, 1, 5, 3, 4)]
    put(store, 0, 1, T, *members)
    assert texts(in_order([NodeLines(store, JOB, 0)])) == ["0", "1", "2", "3", "4", "5"]
    assert first


def test_a_growing_log_is_read_once(store: Store) -> None:
    one = NodeLines(store, JOB, 0)
    assert texts(one.read()) == []
    put(store, 0, 1, T, line(T, "a"))
    assert texts(one.read()) == ["a"]
    assert texts(one.read()) == []
    put(store, 0, 1, T, line(T, "a"), line(T + 1, "b"))
    put(store, 0, 1, T + 2, line(T + 2, "c"))
    put(store, 0, 2, T + 3, line(T + 3, "d")[:-12])  # no object of a bucket is half written, but a file may be cut
    assert texts(one.read()) == ["b", "c"]
    put(store, 0, 2, T + 3, line(T + 3, "d"), line(T + 4, "e"))
    assert texts(one.read()) == ["d", "e"]
    store.delete(chunk_name(JOB, 0, 2, T + 3))
    assert texts(one.read()) == []


@settings(max_examples=40, deadline=None)
@given(cut=st.integers(1, 4000), first=st.integers(1, 3999))
def test_a_log_may_be_read_in_any_pieces(tmp_path_factory: pytest.TempPathFactory, cut: int, first: int) -> None:
    store = open_store(f"sqlite://{tmp_path_factory.mktemp('b')}/bucket.sqlite")
    whole = b"".join(line(T + number, f"line {number} {os.urandom(8).hex()}") for number in range(40))
    one = NodeLines(store, JOB, 0)
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log_lines, "PIECE", max(2, cut))
        for size in (min(first, len(whole)), len(whole)):
            store.put(chunk_name(JOB, 0, 1, T), whole[:size])
            found += texts(one.read())
    assert [text.split()[1] for text in found] == [str(number) for number in range(40)]


def test_only_the_asked_generation_and_time_are_read(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for gen in (1, 2):
        for number in range(4):
            at = T + 1000 * (4 * gen + number)
            put(store, 0, gen, at, line(at, f"{gen}.{number}"), line(at + 500, f"{gen}.{number}+"))
    assert texts(NodeLines(store, JOB, 0, 1).read()) == [f"1.{n}{more}" for n in range(4) for more in ("", "+")]
    read = []
    part = Store.part
    monkeypatch.setattr(Store, "part", lambda self, path, *rest: (read.append(path), part(self, path, *rest))[1])
    assert texts(NodeLines(store, JOB, 0, None, T + 10_200).read()) == ["2.2+", "2.3", "2.3+"]
    assert set(read) == {chunk_name(JOB, 0, 2, T + 1000 * at) for at in (10, 11)}, "older chunks are not fetched"


DAMAGED = "a part of the log is damaged and left out"


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (b"not packed at all", True),
        (line(T, "half")[:-9], True),
        (line(T, "bytes changed" * 20)[:40] + b"\xff" * 20 + line(T, "bytes changed" * 20)[60:], True),
        (b"\x1f\x8b\x08", True),
        (b"", False),
    ],
)
def test_what_is_damaged_is_skipped_and_said(store: Store, bad: bytes, said: bool) -> None:
    put(store, 0, 1, T, line(T, "before"), bad, line(T + 1, "after"))
    found = texts(NodeLines(store, JOB, 0).read())
    assert (found[0], found[-1]) == ("before", "after")
    assert (DAMAGED in found) == said


def test_a_bomb_takes_no_memory(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """4 MB of it would unpack to 4 GB."""
    bomb = zlib.compressobj(9, wbits=31)
    data = b"".join(bomb.compress(b"\0" * (1 << 20)) for _ in range(64)) + bomb.flush()
    put(store, 0, 1, T, line(T, "before"), data, line(T + 1, "after"))
    tracemalloc.start()
    found = 0
    for each in NodeLines(store, JOB, 0).read():
        assert len(each.text) <= log_lines.LINE_BYTES
        found += each.text in ("before", "after", DAMAGED)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found == 3
    assert peak < 8 << 20, peak


def test_lines_that_no_output_worker_wrote_are_shown_as_they_are(store: Store) -> None:
    forged = zlib.compressobj(1, wbits=31)
    text = b"no stamp\n99 0o short\n%d 0o real\n%d xx unknown\n\xff\xfe\n" % (T + 5, T + 6)
    put(store, 0, 1, T, forged.compress(text) + forged.flush())
    found = list(NodeLines(store, JOB, 0).read())
    assert [(each.at, each.text) for each in found] == [
        *((T, "no stamp"), (T, "99 0o short"), (T + 5, "real")),
        *((T + 5, f"{T + 6} xx unknown"), (T + 5, "\ufffd\ufffd")),
    ]


def test_foreign_objects_beside_the_chunks_are_no_log(store: Store) -> None:
    for name in ("1.log", "1/x.gz", "1/1.gz", f"1/{T}.gz.tmp", f"a/{T}.gz", f"1/2/{T}.gz"):
        store.put(f"jobs/{JOB}/logs/0/{name}", line(T, name))
    put(store, 0, 1, T, line(T, "log"))
    assert texts(NodeLines(store, JOB, 0).read()) == ["log"]


@pytest.mark.parametrize("content", [None, b"", b"{", b'{"deleted": -1}', b"[" * 100_000])
def test_a_list_of_chunks_that_is_damaged_says_nothing(store: Store, content: bytes | None) -> None:
    one = NodeLines(store, JOB, 0)
    if content is not None:
        store.put(log_index(JOB, 0), content)
    assert one.deleted() == 0
    store.put(log_index(JOB, 0), msgspec.json.encode(LogIndex((), 812)))
    assert one.deleted() == 812


def test_a_large_log_is_sorted_in_bounded_memory(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_lines, "WAITING_BYTES", 4 << 20)
    text = "\n".join("x" * 1000 for _ in range(1000))  # all at one instant
    put(store, 0, 1, T, *(line(T, text) for _ in range(20)))
    tracemalloc.start()
    count = sum(1 for _ in in_order([NodeLines(store, JOB, 0)]))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 20_000 and peak < 8 << 20, peak


@pytest.mark.parametrize("at", [0, 1, 9_999_999_999_999])
def test_a_line_of_any_time_can_be_shown(at: int) -> None:
    """With a fast clock these times are before the year 1 and after the year 9999."""
    now = time.time()
    text = shown(LogLine(at, 0, 1, "stdout", 0, "x"), Clock(now, now, 600.0))
    assert text.endswith("Z node 0: x")


def test_empty_lines_that_wait_count_with_the_memory_they_take(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_lines, "WAITING_BYTES", 4 << 20)
    put(store, 0, 1, T, line(T, "\n" * 100_000))
    tracemalloc.start()
    try:
        assert sum(1 for _ in in_order([NodeLines(store, JOB, 0)])) == 100_001
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 8 << 20, "what waits, and a piece"


def test_reading_stops_at_its_end_for_good(store: Store) -> None:
    put(store, 0, 1, T, line(T, "a"))
    put(store, 0, 1, T + 9, line(T + 9, "b"))
    one = NodeLines(store, JOB, 0, ends=time.monotonic() - 1)
    assert (texts(one.read()), one.stopped, texts(one.read())) == ([], True, [])
    assert texts(NodeLines(store, JOB, 0, ends=time.monotonic() + 60).read()) == ["a", "b"]
