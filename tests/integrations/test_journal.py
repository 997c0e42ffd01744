"""The journal: every log once and in one order, whoever writes at the same time and whatever answers are lost."""

from __future__ import annotations

import json
import random
import tracemalloc
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from spotkeeper.integrations import journal as module
from spotkeeper.integrations.journal import EMPTY, FAR, SEGMENT, TRIES, Journal
from spotkeeper.reconcile.store import paths
from spotkeeper.reconcile.store.documents import CorruptError, NewerError
from spotkeeper.reconcile.store.objects import BadKeyError, BucketRefusedError, UnavailableError
from spotkeeper.reconcile.store.objects_sqlite import SqliteObjects
from spotkeeper.reconcile.store.store import Store
from tests.integrations.conftest import Clients, Flaky
from tests.sizes import size

NAME = "lr-search"
SEGMENTS = f"{paths.study(NAME)}segments/"


def opened(objects: Any) -> Journal:
    return Journal(Store(objects), NAME, pause=lambda _: None)


@pytest.fixture
def bucket(tmp_path: Path) -> SqliteObjects:
    return SqliteObjects(tmp_path / "bucket.db")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> int:
    """A segment that a test fills quickly; its number of batches."""
    monkeypatch.setattr(module, "SEGMENT", 10)
    return 10


def filled(bucket: Any, batches: int) -> Journal:
    writer = opened(bucket)
    for number in range(batches):
        writer.append([{"n": number}])
    return writer


def numbers(logs: list[dict[str, Any]]) -> list[Any]:
    return [log["n"] for log in logs]


def test_logs_come_back_from_any_number_on(bucket: SqliteObjects) -> None:
    writer = opened(bucket)
    assert writer.read(0) == []
    writer.append([{"n": 0}, {"n": 1}])
    writer.append([])
    writer.append([{"n": 2, "nan": float("nan")}])
    for journal in (writer, opened(bucket)):
        assert [numbers(journal.read(first)) for first in range(5)] == [[0, 1, 2], [1, 2], [2], [], []]
    assert str(opened(bucket).read(2)[0]["nan"]) == "nan"


def test_logs_belong_to_their_reader(bucket: SqliteObjects) -> None:
    """Optuna keeps parts of them as its own and changes those."""
    writer = opened(bucket)
    writer.append([{"n": 0, "attrs": {}}])
    writer.read(0)[0]["attrs"]["changed"] = True
    assert writer.read(0) == [{"n": 0, "attrs": {}}]


@pytest.mark.parametrize("seed", range(size(4, 100)))
def test_two_writers_that_lose_answers_write_each_batch_once(clients: Clients, seed: int, small: int) -> None:
    """One comes in between the other's writes, and a fifth of all writes fails, half of them after it was done."""
    rng = random.Random(seed)  # noqa: S311
    buckets = [Flaky(clients(), rng, fails=0.2) for _ in range(2)]
    writers = [opened(bucket) for bucket in buckets]
    sent: list[tuple[int, int]] = []
    sure: set[tuple[int, int]] = set()

    def append(who: int) -> None:
        log = (who, sum(one == who for one, _ in sent))
        sent.append(log)
        try:
            writers[who].append([{"n": log}])
        except UnavailableError:  # nobody knows: it may be there once
            return
        sure.add(log)

    def cut_in() -> None:
        if rng.random() < 0.3:
            buckets[1].between = lambda: None
            append(1)

    for _ in range(12 if isinstance(buckets[0]._inner, SqliteObjects) else 6):
        buckets[0].between = cut_in
        append(0)
        if rng.random() < 0.5:
            append(1)
    found = [tuple(each) for each in numbers(opened(clients()).read(0))]
    assert max(Counter(found).values()) == 1 and sure <= set(found) <= set(sent)
    for who, writer in enumerate(writers):
        assert [number for one, number in found if one == who] == sorted(number for one, number in found if one == who)
        writer.read(0)
        assert [tuple(each) for each in numbers(writer.read(0))] == found, "all readers see one order"


def test_two_writers_of_the_same_log_both_write_it(bucket: SqliteObjects) -> None:
    one, other = Flaky(bucket), opened(bucket)

    def first() -> None:
        one.between = lambda: None
        other.append([{"n": 0}])

    one.between = first
    opened(one).append([{"n": 0}])
    assert numbers(opened(bucket).read(0)) == [0, 0]


def test_many_threads_of_many_clients_append_at_once(clients: Clients, small: int) -> None:
    writers = [opened(clients()) for _ in range(3)]

    def write(who: int) -> None:
        for number in range(8):
            writers[who % 3].append([{"n": [who, number]}])

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(write, range(6)))
    found = numbers(opened(clients()).read(0))
    assert sorted(found) == [[who, number] for who in range(6) for number in range(8)]
    for who in range(6):
        assert [number for one, number in found if one == who] == list(range(8)), "what a thread wrote is in its order"


def test_a_writer_that_was_asleep_appends_at_the_end(bucket: SqliteObjects, small: int) -> None:
    asleep = opened(bucket)
    asleep.append([{"n": "first"}])
    awake = opened(bucket)
    for number in range(3 * small):
        awake.append([{"n": number}])
    asleep.append([{"n": "last"}])
    expected = ["first", *range(3 * small), "last"]
    awake.read(0)
    assert numbers(asleep.read(0)) == numbers(awake.read(0)) == numbers(opened(bucket).read(0)) == expected


def test_a_write_without_an_answer_is_given_up(bucket: SqliteObjects) -> None:
    waited: list[float] = []
    gone = Flaky(bucket, fails=1.0)
    with pytest.raises(UnavailableError, match="batches/00000000: not sent"):
        Journal(Store(gone), NAME, pause=waited.append).append([{"n": 0}])
    assert gone.calls["create"] == TRIES and len(waited) == TRIES - 1
    assert all(0.5 * 2**at <= pause <= 2**at for at, pause in enumerate(waited))
    assert opened(bucket).read(0) == []


def test_what_is_not_json_is_not_written(bucket: SqliteObjects) -> None:
    writer = opened(bucket)
    with pytest.raises(TypeError):
        writer.append([{"n": object()}])
    assert bucket.list(paths.study(NAME)) == []


def test_a_first_read_takes_segments(bucket: SqliteObjects) -> None:
    filled(bucket, 3 * SEGMENT + 7)
    assert len(bucket.list(SEGMENTS)) == 3
    counted = Flaky(bucket)
    assert numbers(opened(counted).read(0)) == list(range(3 * SEGMENT + 7))
    assert counted.calls == {"list": 1, "get": 3 + 7}
    writer = opened(counted)
    writer.read(0)
    counted.calls.clear()
    writer.append([{"n": -1}])
    assert counted.calls == {"create": 1}, "segments that exist are not written again"


def test_readers_take_batches_where_a_segment_is_missing(bucket: SqliteObjects, small: int) -> None:
    filled(bucket, 4 * small)
    bucket.delete(paths.segment(NAME, 1))
    counted = Flaky(bucket)
    writer = opened(counted)
    assert numbers(writer.read(0)) == list(range(4 * small))
    assert counted.calls == {"list": 1, "get": 3 + small}
    before = bucket.list(SEGMENTS)
    writer.append([{"n": 4 * small}])
    assert sorted({*before, paths.segment(NAME, 1)}) == bucket.list(SEGMENTS), "a lost one is written again"
    assert numbers(opened(bucket).read(0)) == list(range(4 * small + 1))


def test_a_segment_that_is_not_written_stops_nothing(bucket: SqliteObjects, small: int) -> None:
    class NoSegments(Flaky):
        def create(self, key: str, data: bytes) -> str:
            if "/segments/" in key:
                raise BucketRefusedError(key)
            return super().create(key, data)

    filled(NoSegments(bucket), 2 * small)
    assert numbers(opened(bucket).read(0)) == list(range(2 * small))
    opened(bucket).append([{"n": 2 * small}])
    assert len(bucket.list(SEGMENTS)) == 2


def test_a_reader_far_behind_lists_instead_of_reading_each(bucket: SqliteObjects, small: int) -> None:
    counted = Flaky(bucket)
    behind = opened(counted)
    assert behind.read(0) == []
    filled(bucket, 10 * small)
    counted.calls.clear()
    assert numbers(behind.read(0)) == list(range(10 * small))
    assert counted.calls == {"list": 1, "get": FAR + (small - FAR) + 9}


def test_a_read_after_an_append_asks_for_nothing(bucket: SqliteObjects) -> None:
    counted = Flaky(bucket)
    writer = opened(counted)
    writer.append([{"n": 0}])
    counted.calls.clear()
    assert numbers(writer.read(0)) == [0] and not counted.calls
    opened(bucket).append([{"n": 1}])
    assert numbers(writer.read(0)) == [0, 1], "the next read asks"


V2 = b'{"v":2,"nonce":"","logs":[]}'


@pytest.mark.parametrize(
    ("path", "data", "says"),
    [
        (paths.batch(NAME, 1), b"{", "batches/00000001: is no batch of a journal; restore the object; if it is lost"),
        (paths.batch(NAME, 1), b"[]", "is no batch of a journal"),
        (paths.batch(NAME, 1), b'{"v":1,"logs":[1]}', "is no batch of a journal"),
        (paths.batch(NAME, 1), V2, "batches/00000001: format 2: a newer Spotkeeper wrote it; use that version here"),
        (paths.segment(NAME, 0), b"{}\n", "segments/00000000: is no segment of a journal; delete the object, which is"),
        (paths.segment(NAME, 0), V2 + b"\n", "segments/00000000: format 2: a newer Spotkeeper wrote it"),
        (paths.batch(NAME, 1), None, "batches/00000001: is missing, but later batches exist; restore the object"),
        (f"{paths.study(NAME)}batches/x", b"", "batches/x: belongs to no journal; move or delete the object"),
        (f"{paths.study(NAME)}notes.txt", b"", "notes.txt: belongs to no journal"),
        (f"{paths.study(NAME)}batches/0000000a", b"", "belongs to no journal"),
    ],
)
def test_what_is_no_journal_is_named_with_the_remedy(
    bucket: SqliteObjects, path: str, data: bytes | None, says: str, small: int
) -> None:
    filled(bucket, 3 if "/segments/" not in path else small)
    bucket.delete(path)
    if data is not None:
        bucket.put(path, data)
    for call in (lambda journal: journal.read(0), lambda journal: journal.append([{"n": 9}])):
        with pytest.raises(CorruptError, match=says) as caught:
            call(opened(bucket))
        assert caught.value.path == path
        assert isinstance(caught.value, NewerError) == (data is not None and data.startswith(V2))


def test_a_number_far_ahead_takes_no_memory(bucket: SqliteObjects) -> None:
    """Anybody who may add to studies can create such an object."""
    bucket.put(paths.batch(NAME, 99_999_999), EMPTY.encode())
    tracemalloc.start()
    with pytest.raises(CorruptError, match="00000000: is missing, but later batches exist"):
        opened(bucket).read(0)
    assert tracemalloc.get_traced_memory()[1] < 10e6
    tracemalloc.stop()


def test_the_remedies_help(bucket: SqliteObjects, small: int) -> None:
    filled(bucket, small - 1)
    bucket.put(paths.batch(NAME, 2), json.dumps(json.loads(EMPTY), indent=1).encode())  # as an editor would leave it
    writer = opened(bucket)
    writer.append([{"n": "last"}])
    expected = [0, 1, *range(3, small - 1), "last"]
    assert numbers(writer.read(0)) == numbers(opened(bucket).read(0)) == expected
    bucket.put(paths.segment(NAME, 0), b"x")
    bucket.delete(paths.segment(NAME, 0))
    assert numbers(opened(bucket).read(0)) == expected


def test_a_batch_that_a_listing_left_out_is_read(bucket: SqliteObjects) -> None:
    class Late(Flaky):
        def list(self, prefix: str, start: str = "") -> list[str]:
            return [key for key in super().list(prefix, start) if key != paths.batch(NAME, 1)]

    filled(bucket, 3)
    assert numbers(opened(Late(bucket)).read(0)) == [0, 1, 2]


@pytest.mark.parametrize("name", ["", "a/b", "..", "Upper", "x" * 65])
def test_a_journals_name_is_one_word(bucket: SqliteObjects, name: str) -> None:
    with pytest.raises(BadKeyError):
        Journal(Store(bucket), name)
