"""The bucket's promises, over every object layer: no lost update, no lost win, no silent nonsense."""

from __future__ import annotations

import gc
import inspect
import json
import multiprocessing
import sqlite3
import threading
import uuid
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import obstore
import pytest
from msgspec.structs import replace

from spotkeeper.contract.allocation import Allocation, Claim, Grant
from spotkeeper.contract.facts import Fact, Kind
from spotkeeper.contract.generation import Progress
from spotkeeper.contract.job import Checkpoint, JobRequest, JobSpec, Nodes, RequestKind
from spotkeeper.contract.ledger import Entry, Event
from spotkeeper.contract.market import Network, Observation, PriceRun, Prices
from spotkeeper.contract.record import Node, Record, Slot, SlotState
from spotkeeper.contract.stack import Model
from spotkeeper.contract.sweep import SweepState, TrialReport
from spotkeeper.contract.sweepfile import Cohort, SweepFile, SweepSpec
from spotkeeper.reconcile.store import bucket as bucket_module
from spotkeeper.reconcile.store import documents, objects_obstore, objects_sqlite, paths
from spotkeeper.reconcile.store.bucket import open_objects
from spotkeeper.reconcile.store.documents import StaticHello, encode_versioned
from spotkeeper.reconcile.store.market import HOURS_KEPT, MARKET_TRIES
from spotkeeper.reconcile.store.objects import (
    BadKeyError,
    Blob,
    BucketRefusedError,
    ConflictError,
    Objects,
    StoreError,
    UnavailableError,
    check_key,
)
from spotkeeper.reconcile.store.objects_obstore import DELETES, ObstoreObjects, open_bucket
from spotkeeper.reconcile.store.objects_sqlite import SqliteObjects
from spotkeeper.reconcile.store.store import CorruptError, Store, open_store
from tests.reconcile import gcs, s3
from tests.reconcile.memory import MemoryStore

JOB = "abcd2345"
UID = "0b5e9a52-8f0c-4b3e-9f9b-0f3b9a6f2f11"


def record(**changes: Any) -> Record:
    base = Record(job=JOB, uid=UID, name="train", spec_sha256="0" * 64, created=1.0, nonce="n1")
    return msgspec.structs.replace(base, **changes)


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    with s3.serve() as endpoint:
        yield endpoint


@pytest.fixture(params=["sqlite", "memory", "s3", "gcs"])
def objects(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[], Objects]]:
    """A factory of clients of one fresh bucket, as two processes would each have their own."""
    if request.param == "sqlite":
        yield lambda: SqliteObjects(tmp_path / "bucket.db")
    elif request.param == "memory":
        shared = obstore.store.MemoryStore()
        yield lambda: ObstoreObjects(shared)
    elif request.param == "gcs":
        with gcs.serve() as google:
            yield lambda: open_bucket("gs://sk-bucket", google.endpoint)
    else:
        yield s3.fresh_bucket(request.getfixturevalue("s3_endpoint"), tmp_path, monkeypatch)


@pytest.fixture
def store(objects: Callable[[], Objects]) -> Store:
    return Store(objects())


def held(bucket: Objects, key: str) -> tuple[bytes, str] | None:
    blob = bucket.get(key)
    return (blob.data, blob.tag) if blob is not None else None


class TestObjects:
    def test_a_known_version_is_not_sent_again(self, objects: Callable[[], Objects]) -> None:
        bucket = objects()
        assert bucket.refresh("a", Blob(b"", "1", "1")) is None
        bucket.create("a", b"one")
        known = bucket.get("a")
        assert known is not None
        known = Blob(b"", known.tag, known.etag)
        assert bucket.refresh("a", known) is known
        bucket.replace("a", b"two", known.tag)
        newer = bucket.refresh("a", known)
        assert newer is not None and newer.data == b"two"
        bucket.delete("a")
        assert bucket.refresh("a", known) is None

    def test_create_get_replace_delete(self, objects: Callable[[], Objects]) -> None:
        bucket = objects()
        assert bucket.get("a/b") is None
        tag = bucket.create("a/b", b"one")
        assert held(bucket, "a/b") == (b"one", tag)
        with pytest.raises(ConflictError):
            bucket.create("a/b", b"two")
        newer = bucket.replace("a/b", b"two", tag)
        with pytest.raises(ConflictError):
            bucket.replace("a/b", b"three", tag)
        assert held(bucket, "a/b") == (b"two", newer)
        bucket.delete("a/b")
        bucket.delete("a/b")
        assert bucket.get("a/b") is None
        with pytest.raises(ConflictError):
            bucket.replace("a/b", b"three", newer)

    def test_a_large_object_can_be_read_in_parts(self, objects: Callable[[], Objects]) -> None:
        bucket = objects()
        assert bucket.part("a", 0, 4) is None
        bucket.put("a", b"0123456789")
        assert [bucket.part("a", start, 4) for start in (0, 4, 8, 10, 99)] == [b"0123", b"4567", b"89", b"", b""]
        bucket.create("empty", b"")
        assert bucket.part("empty", 0, 4) == b""

    def test_empty_objects_and_unconditional_puts(self, objects: Callable[[], Objects]) -> None:
        bucket = objects()
        bucket.create("active/x", b"")
        bucket.put("active/x", b"1")
        tag = bucket.put("active/x", b"2")
        assert held(bucket, "active/x") == (b"2", tag)

    def test_threads_that_come_and_go_leave_no_descriptor(self, objects: Callable[[], Objects]) -> None:
        """A round's threads end with it, and nobody may count on the garbage collector to tidy up behind them."""
        bucket = objects()

        def use(number: int) -> None:
            bucket.put(f"k/{number}", b"1")
            bucket.list("k/")
            with pytest.raises(ConflictError):
                bucket.create(f"k/{number}", b"2")

        def rounds(first: int) -> int:
            for number in range(first, first + 3):
                with ThreadPoolExecutor(8) as pool:
                    list(pool.map(use, range(10 * number, 10 * number + 8)))
            return len(list(Path("/proc/self/fd").iterdir()))

        gc.disable()
        try:
            warm = rounds(0)
            assert rounds(10) <= warm + 20  # kept connections may come and go; each of 24 threads would leak one
        finally:
            gc.enable()

    def test_only_the_folder_is_listed_completely(self, objects: Callable[[], Objects]) -> None:
        bucket = objects()
        wanted = sorted(f"f/{number:04d}" for number in range(30))
        for key in [*wanted, "f", "f-2/a", "fa/a", "e/a"]:
            bucket.put(key, b"x")
        assert bucket.list("f/") == wanted
        assert bucket.list("none/") == []
        assert len(bucket.list("")) == 34
        assert [blob and blob.data for blob in bucket.get_many([*wanted[:3], "none"])] == [b"x", b"x", b"x", None]

    def test_the_newest_keys_of_a_folder(self, objects: Callable[[], Objects]) -> None:
        """Stores of clouds tell it to the second: of what was written in one, any may be first."""
        bucket = objects()
        for key in ("f/b", "f/a", "f/c", "g/a"):
            bucket.put(key, b"x")
        assert set(bucket.newest("f/", 9)) == {"f/a", "f/b", "f/c"}
        assert len(bucket.newest("f/", 2)) == 2
        assert bucket.newest("none/", 2) == []
        with pytest.raises(ValueError):
            bucket.newest("f", 2)

    def test_the_keys_of_a_folder_that_begin_alike(self, objects: Callable[[], Objects]) -> None:
        bucket = objects()
        for number in range(130):
            bucket.put(f"f/{number // 10}.x{number % 10}", b"")
        bucket.put("f/1", b"")
        bucket.put("g/1.x", b"")
        assert bucket.list("f/", "1.") == [f"f/1.x{n}" for n in range(10)]
        assert bucket.list("f/", "12.x3") == ["f/12.x3"]
        assert bucket.list("f/", "9.") == [f"f/9.x{n}" for n in range(10)]
        assert bucket.list("f/", "99.") == []

    def test_only_the_named_objects_are_deleted(self, objects: Callable[[], Objects]) -> None:
        bucket = objects()
        for number in range(5):
            bucket.create(f"f/{number}", b"")
        bucket.delete_many(["f/1", "f/3", "f/9"])
        bucket.delete_many(["f/4"])
        bucket.delete_many([])
        assert bucket.list("f/") == ["f/0", "f/2"]

    def test_threads_lose_no_update(self, objects: Callable[[], Objects]) -> None:
        objects().create("n", b"0")

        def add(times: int) -> None:
            bucket = objects()
            for _ in range(times):
                increment(bucket)

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(add, [5] * 8))
        final = objects().get("n")
        assert final is not None and int(final.data) == 40

    def test_one_of_several_creators_wins(self, objects: Callable[[], Objects]) -> None:
        gate = threading.Barrier(8)

        def create(number: int) -> bool:
            bucket = objects()
            gate.wait(10)
            try:
                bucket.create("one", str(number).encode())
            except ConflictError:
                return False
            return True

        with ThreadPoolExecutor(8) as pool:
            assert sum(pool.map(create, range(8))) == 1

    @pytest.mark.parametrize(
        "key", ["", "/a", "a/", "a//b", "../a", "a/../b", "a/./b", ".", "a b", "a%2f", "a\n", "é", "x" * 901, "a?b"]
    )
    def test_invalid_keys_are_refused(self, objects: Callable[[], Objects], key: str) -> None:
        bucket = objects()
        for verb in (bucket.get, bucket.delete, lambda k: bucket.put(k, b""), lambda k: bucket.create(k, b"")):
            with pytest.raises(BadKeyError):
                verb(key)

    @pytest.mark.parametrize("prefix", ["jobs/a", "/", "jobs//", "jobs/a b/", "jobs/../"])
    def test_a_prefix_is_a_whole_folder(self, objects: Callable[[], Objects], prefix: str) -> None:
        with pytest.raises(BadKeyError):
            objects().list(prefix)

    def test_a_refused_key_is_shown_in_part(self, objects: Callable[[], Objects]) -> None:
        form = "is not a key in Spotkeeper's form (letters, digits, '-', '.', '_' and '/')"
        for name, told in (("x" * 901, form), ("x" * 901 + "/", form)):
            with pytest.raises(BadKeyError) as refused:
                objects().list(name) if name.endswith("/") else objects().get(name)
            assert str(refused.value) == f"{'x' * 120!r} {told}"
        with pytest.raises(BadKeyError) as refused:
            objects().list("x" * 901)
        assert str(refused.value) == f"prefix {'x' * 120!r} must end with '/'"


def increment(bucket: Objects) -> None:
    while True:
        blob = bucket.get("n")
        assert blob is not None
        try:
            bucket.replace("n", str(int(blob.data) + 1).encode(), blob.tag)
        except ConflictError:
            continue
        return


def increment_in_process(path: str, times: int) -> None:
    bucket = SqliteObjects(path)
    for _ in range(times):
        increment(bucket)


@pytest.mark.parametrize("written", ["logs", "ckpt", "out", "source"])
def test_objects_that_machines_may_write_are_never_documents(store: Store, written: str) -> None:
    """Their right to ``jobs/*/logs/*`` is also one to ``jobs/<job>/facts/x/logs/<whatever another node might say>``."""
    said = Fact("6666666666666666666", "boot-1", 1, 1, 1, Kind.EXIT, "0")
    store.put(f"{paths.facts(JOB)}x/{written}/{said.key()}", b"")
    cancel = msgspec.json.encode(JobRequest("a-1", RequestKind.CANCEL, 1.0, "nobody"))
    store.put(f"{paths.requests(JOB)}x/{written}/a-1", cancel)
    store.put(f"{paths.ledger(JOB)}x/{written}/{'0' * 16}.a", msgspec.json.encode(Entry(1.0, "a", Event.GONE)))
    assert store.list_facts(JOB) == store.facts_of(JOB, said.uid) == ()
    assert store.list_requests(JOB) == ()
    assert store.list_ledger(JOB) == ()
    assert store.put_fact(JOB, said) and store.list_facts(JOB) == store.facts_of(JOB, said.uid) == (said,)


def test_facts_are_deleted_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand of them took most of a round's minute."""
    together = threading.Barrier(DELETES, timeout=20)
    monkeypatch.setattr(ObstoreObjects, "delete", lambda self, key: together.wait())
    ObstoreObjects(obstore.store.MemoryStore()).delete_many([f"f/{number}" for number in range(2 * DELETES)])


def test_sqlite_processes_lose_no_update(tmp_path: Path) -> None:
    """From an empty file: the schema's creation races too."""
    path = str(tmp_path / "sub" / "bucket.db")
    context = multiprocessing.get_context("fork")
    first = SqliteObjects(path)
    first.create("n", b"0")  # the children inherit this connection and must not use it
    children = [context.Process(target=increment_in_process, args=(path, 25)) for _ in range(8)]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
    assert [child.exitcode for child in children] == [0] * 8
    final = first.get("n")
    assert final is not None and int(final.data) == 200


def test_sqlite_new_file_is_opened_by_many_threads(tmp_path: Path) -> None:
    path = tmp_path / "bucket.db"
    gate = threading.Barrier(8)

    def first_touch(number: int) -> str:
        gate.wait(10)
        return SqliteObjects(path).create(f"k/{number}", b"x")

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(first_touch, range(8)))) == 8


def test_sqlite_never_reuses_a_tag(tmp_path: Path) -> None:
    bucket = SqliteObjects(tmp_path / "b.db")
    old = bucket.create("a", b"1")
    bucket.delete("a")
    bucket.create("a", b"1")
    with pytest.raises(ConflictError):
        bucket.replace("a", b"2", old)


def test_sqlite_reads_no_large_neighbour(tmp_path: Path) -> None:
    """A search for a small object read whole large ones: 3 ms for each read of a job whose metrics are there."""
    writer = SqliteObjects(tmp_path / "b.db")
    known = {key: Blob(key.encode(), writer.put(key, key.encode())) for key in ("a", "m", "z")}
    for number in range(20):
        writer.put(f"large/{number}", bytes(1_000_000))
    large = Blob(b"", writer.put("large/0", bytes(1_000_000)))
    reader = SqliteObjects(tmp_path / "b.db")
    assert reader.get("b") is None  # opens the file
    before = bytes_read()
    assert all(reader.get(key) == blob for key, blob in known.items())
    assert reader.refresh("large/0", large) is large
    assert bytes_read() - before < 200_000


def bytes_read() -> int:
    """What this process has read from files so far."""
    lines = Path("/proc/self/io").read_text("ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("rchar"))


def test_sqlite_opens_a_file_of_before(tmp_path: Path) -> None:
    """Its columns were in another order."""
    with closing(sqlite3.connect(tmp_path / "b.db")) as old:
        old.execute("PRAGMA journal_mode = WAL")
        old.executescript(
            "CREATE TABLE objects (key TEXT PRIMARY KEY, data BLOB NOT NULL, generation INTEGER NOT NULL)"
            "WITHOUT ROWID;"
            "CREATE TABLE counter (one INTEGER PRIMARY KEY CHECK (one = 1), generation INTEGER NOT NULL);"
            "INSERT INTO counter VALUES (1, 1); INSERT INTO objects VALUES ('a', x'31', 1);"
        )
    bucket = SqliteObjects(tmp_path / "b.db")
    assert bucket.get("a") == Blob(b"1", "1")
    tag = bucket.create("b", b"2")
    assert bucket.get("b") == Blob(b"2", tag) == Blob(b"2", "2")
    assert bucket.get("a") == Blob(b"1", "1")
    assert bucket.put("b", b"3") == "3" and bucket.get("b") == Blob(b"3", "3")


def test_sqlite_errors_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "b.db"
    path.write_bytes(b"this is no database at all, not even a small one" * 10)
    with pytest.raises(BucketRefusedError, match=r"b\.db"):
        SqliteObjects(path).get("a")


def test_a_missing_bucket_and_a_dead_server_are_distinguished(
    s3_endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_REGION": "us-east-1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises((BucketRefusedError, UnavailableError, ConflictError)):
        open_bucket("s3://no-such-bucket", s3_endpoint).create("a", b"")
    with pytest.raises(UnavailableError):
        open_bucket("s3://b", "http://127.0.0.1:1").get("a")


def test_a_create_during_a_delete_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """S3 refuses it with 409, and obstore reports that as an object that exists."""
    for name, value in {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_REGION": "us-east-1"}.items():
        monkeypatch.setenv(name, value)
    deleting: s3.Deleting = Counter({"late": 2, "never": 10**6})
    with s3.serve(deleting) as endpoint:
        s3.make_bucket(endpoint, "racing")
        bucket = open_bucket("s3://racing", endpoint)
        tag = bucket.create("late", b"new")
        assert deleting["late"] == 0, "obstore itself repeats nothing here: the stand-in was met twice"
        assert held(bucket, "late") == (b"new", tag)
        with pytest.raises(ConflictError):
            bucket.create("late", b"other")
        with pytest.raises(UnavailableError, match="the object does not exist"):
            bucket.create("never", b"new")


@pytest.mark.parametrize("url", ["", "file:///x", "sqlite://host/x", "sqlite:x", "s3://", "gs:///x", "http://b", "/x"])
def test_other_addresses_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match="SPOTKEEPER_BUCKET"):
        open_objects(url, None, brief=False)


def test_a_stores_options_reach_its_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, ...]] = []
    monkeypatch.setattr(objects_obstore, "open_bucket", lambda *args: asked.append(args))
    open_store("gs://b")
    open_store("s3://b", "https://s3.example", brief=True)
    open_objects("gs://b", "https://gcs.example", brief=False)
    assert asked == [
        ("gs://b", None, False),
        ("s3://b", "https://s3.example", True),
        ("gs://b", "https://gcs.example", False),
    ]


class TestStore:
    def test_record(self, store: Store) -> None:
        assert store.read_record(JOB) is None
        slot = Slot(1, SlotState.INTENT, "gpu", "us-x1-a", Model.SPOT, 5.0)
        full = record(nodes=(Node(top=1, cur=slot),), members=(0,))
        assert store.create_record(full)
        assert not store.create_record(record(nonce="other"))
        held = store.read_record(JOB)
        assert held is not None and held.value == full
        token = store.cas_record(record(ver=1, nonce="n2"), held.token)
        assert token is not None
        assert store.cas_record(record(ver=1, nonce="n3"), held.token) is None
        assert store.cas_record(record(ver=2, nonce="n4"), token) is not None

    def test_allocation(self, store: Store) -> None:
        held = store.read_allocation()
        assert held.token == "" and held.value == Allocation()
        token = store.cas_allocation(Allocation(ver=1, nonce="a", grants=(Grant(JOB, 0, 1, "slot:gpu"),)), "")
        assert token and store.cas_allocation(Allocation(ver=1, nonce="b"), "") is None
        assert store.read_allocation().value.grants[0].resource == "slot:gpu"
        beyond = Allocation(ver=2, nonce="c", claims=(Claim(JOB, min=1, max=10_001, since=0.0),))
        with pytest.raises(StoreError, match=r"not written: stack/allocation: .* `int` <= 10000"):
            store.cas_allocation(beyond, token)
        assert store.cas_allocation(Allocation(ver=2, nonce="c"), token)
        assert store.cas_allocation(Allocation(ver=2, nonce="d"), token) is None

    def test_sweep(self, store: Store) -> None:
        read = store.read_sweep("lr")
        assert read.token == "" and read.value == SweepState("lr")
        token = store.cas_sweep(SweepState("lr", 1, "a", (TrialReport(3, (0.5,)),)), "")
        assert token and store.cas_sweep(SweepState("lr", 1, "b"), "") is None
        assert store.read_sweep("lr").value.trial(3).values == (0.5,)
        assert store.cas_sweep(SweepState("lr", 2, "c"), token)
        assert store.cas_sweep(SweepState("lr", 2, "d"), token) is None

    def test_what_a_search_is_made_of_is_never_replaced(self, store: Store) -> None:
        spec = SweepSpec(
            SweepFile("lr", "", {}, "loss", "min"), JobSpec("x", ("a.py",), params={"on": True}), 2, "n", 1.0
        )
        assert store.read_sweep_spec("lr") is None and store.list_cohorts("lr") == () and store.list_trials("lr") == {}
        assert store.create_sweep_spec(spec) and store.create_sweep_spec(spec), "the same bytes are this writer's"
        assert not store.create_sweep_spec(msgspec.structs.replace(spec, nonce="m"))
        assert store.read_sweep_spec("lr") == spec
        later, first = Cohort(2, ({"lr": 1.0},), 5), Cohort(0, ({"lr": 0.1}, {"lr": "a"}), 5, max_usd=3.0)
        assert store.create_cohort("lr", later) and store.create_cohort("lr", first)
        assert not store.create_cohort("lr", msgspec.structs.replace(first, seed=6))
        assert store.list_cohorts("lr") == (first, later)
        assert store.create_trial("lr", 11, JOB) and store.create_trial("lr", 0, "abcdefgh")
        assert not store.create_trial("lr", 0, JOB)
        store.put(paths.sweep_trials("lr") + "x", b"abcdefgh")
        store.put(paths.sweep_trial("lr", 5), b"no job")
        assert store.list_trials("lr") == {0: "abcdefgh", 11: JOB}
        store.put_sweep_source("lr", "a" * 64, b"tar")
        store.put_sweep_source("lr", "a" * 64, b"again")
        assert store.get(paths.sweep_source("lr", "a" * 64)) == b"tar"
        assert store.cas_sweep(SweepState("wd", 1, "a"), "")
        assert store.list_sweeps() == ("lr", "wd")

    def test_facts(self, store: Store) -> None:
        fact = Fact("123", "b-1", 3, 2, 1, Kind.HELLO)
        assert store.put_fact(JOB, fact)
        assert not store.put_fact(JOB, fact)
        other = Fact("123", "b-1", 3, 2, 1, Kind.CHECKPOINT, "1-500")
        store.put_fact(JOB, other)
        store.put(paths.facts(JOB) + "nonsense", b"")
        store.put(paths.facts(JOB) + "1.b.x.1.1.hello.0", b"")
        assert set(store.list_facts(JOB)) == {fact, other}
        store.delete_facts(JOB, (fact, fact))
        assert store.list_facts(JOB) == (other,)
        with pytest.raises(BadKeyError):
            store.put_fact(JOB, Fact("../..", "b", 0, 0, 0, Kind.HELLO))

    def test_requests_are_ordered_by_time(self, store: Store) -> None:
        late, early = JobRequest("a1", RequestKind.CANCEL, 9.0), JobRequest("z1", RequestKind.PAUSE, 2.0)
        assert store.put_request(JOB, late) and store.put_request(JOB, early) and not store.put_request(JOB, early)
        assert store.list_requests(JOB) == (early, late)
        store.delete_request(JOB, "z1")
        assert store.list_requests(JOB) == (late,)

    def test_an_unreadable_request_stops_nothing(self, store: Store, caplog: pytest.LogCaptureFixture) -> None:
        good = JobRequest("a1", RequestKind.CANCEL, 9.0)
        store.put_request(JOB, good)
        store.put(paths.requests(JOB) + "bad", b'{"id":"bad","kind":"explode","at":1}')
        assert store.list_requests(JOB) == (good,)
        assert f"skipped {paths.requests(JOB)}bad: " in caplog.text
        (aside,) = store.list("quarantine/")
        assert (store.get(aside) or b"").startswith(f"{paths.requests(JOB)}bad\n".encode() + b'{"id":"bad"')

    @pytest.mark.parametrize(
        ("path", "read", "blank"),
        [
            (paths.prices("p"), lambda s: s.read_prices(("p",))["p"].value, Prices("p", 0.0)),
            (paths.market_hour("p", 7), lambda s: s.read_observations(("p",), (7,)), {"p": ()}),
            (paths.notification("a"), lambda s: s.list_notifications(), ()),
        ],
    )
    def test_an_unreadable_document_that_no_decision_needs_is_kept_aside(
        self, store: Store, path: str, read: Callable[[Store], object], blank: object
    ) -> None:
        store.put(path, b"[")
        assert read(store) == blank
        assert [store.get(aside) for aside in store.list("quarantine/")] == [f"{path}\n[".encode()]

    def test_active_markers_names_and_tombstones(self, store: Store) -> None:
        store.set_active(JOB)
        store.set_active(JOB)
        assert store.active_jobs() == (JOB,)
        store.clear_active(JOB)
        assert store.active_jobs() == ()
        assert store.put_name("train", JOB)
        assert store.put_name("train", JOB), "our own write whose answer was lost is a win"
        assert not store.put_name("train", "zzzz9999")
        store.delete_name("train", "zzzz9999")
        assert store.read_name("train") == JOB
        store.delete_name("train", JOB)
        assert store.read_name("train") is None
        assert store.read_tomb(JOB) is None
        store.put_tomb(JOB, 12.5)
        assert store.read_tomb(JOB) == 12.5

    def test_when_a_submission_began(self, store: Store) -> None:
        assert store.active_since(JOB) is None, "there is no marker"
        store.set_active(JOB)
        assert store.active_since(JOB) is None, "the marker does not say"
        store.clear_active(JOB)
        store.set_active(JOB, 12.5)
        store.set_active(JOB, 99.0)
        assert store.active_since(JOB) == 12.5
        store.put(paths.active(JOB), b"yesterday")
        assert store.active_since(JOB) is None

    def test_lease(self, store: Store) -> None:
        assert store.read_due(JOB) is None
        assert store.take_lease(JOB, "a", 100.0, 60.0)
        assert store.take_lease(JOB, "a", 110.0, 60.0), "ours"
        assert not store.take_lease(JOB, "b", 120.0, 60.0)
        store.drop_lease(JOB, "b", 1.0)
        assert not store.take_lease(JOB, "b", 121.0, 60.0), "only its holder gives it back"
        assert store.take_lease(JOB, "b", 171.0, 60.0), "past its time"
        store.drop_lease(JOB, "b", 500.0)
        assert store.read_due(JOB) == 500.0
        assert store.take_lease(JOB, "c", 172.0, 60.0)
        assert store.read_due(JOB) == 232.0, "while it is held: when its holder is late"
        store.drop_lease(JOB, "c", None)
        assert store.read_due(JOB) is None

    @pytest.mark.parametrize("count", [1, 2, 32, 3000])
    def test_events_of_one_write_are_one_object_and_are_read_once(self, store: Store, count: int) -> None:
        entries = tuple(Entry(10.0, f"intent.r{n}.a1", Event.INTENT, node=n, attempt=1) for n in range(count))
        early = Entry(9.5, "submitted", Event.SUBMITTED)
        assert store.append_ledger(JOB, early)
        for _ in range(2):
            store.append_all(JOB, entries)
        store.append_all(JOB, entries[: count // 2 or 1])  # by a process that remembers half of them
        assert sorted(store.list_ledger(JOB), key=lambda one: one.node or 0) == [early, *entries]
        partial = count > 1  # the process that remembered half of them wrote an object of its own
        assert len(store.list(paths.ledger(JOB))) == 2 + partial

    def test_two_large_changes_of_one_moment_are_both_kept(self, store: Store) -> None:
        said = [
            tuple(Entry(10.0, f"{kind.value}.r{n}", kind, node=n) for n in range(50))
            for kind in (Event.LOSS, Event.GONE)
        ]
        for entries in said:
            store.append_all(JOB, entries)
        assert len(store.list_ledger(JOB)) == 100

    def test_ledger_writes_an_event_once(self, store: Store) -> None:
        first = Entry(10.0, "intent-0-1", Event.INTENT, node=0, attempt=1)
        second = Entry(9.5, "submitted", Event.SUBMITTED)
        assert store.append_ledger(JOB, first) and store.append_ledger(JOB, second)
        assert not store.append_ledger(JOB, first)
        odd = Entry(11.0, "../../loss:0/1", Event.LOSS)
        assert store.append_ledger(JOB, odd)
        assert store.list_ledger(JOB) == (second, first, odd)

    def test_documents(self, store: Store) -> None:
        assert store.read_stack() is None and store.read_spec(JOB) is None and store.read_progress(JOB) is None
        spec = JobSpec("train", ("train.py",), nodes=3)
        store.put_spec(JOB, spec)
        assert store.read_spec(JOB) == spec
        corrected = msgspec.structs.replace(spec, command=("other.py",))
        store.put_spec(JOB, corrected, "a" * 64)
        assert (store.read_spec(JOB), store.read_spec(JOB, "a" * 64)) == (spec, corrected)
        assert store.read_spec(JOB, "b" * 64) is None
        store.put_progress(JOB, Progress(1, 20, 5.0, loss=0.5))
        assert store.read_progress(JOB) == Progress(1, 20, 5.0, loss=0.5)
        assert not store.draining()
        store.put(paths.DRAIN, b"")
        assert store.draining()

    def test_static_hellos_of_older_boots_are_deleted(self, store: Store) -> None:
        first = StaticHello("sk-s-p-s0", "77", "boot-1", "us-x1-a", 1.0)
        other = StaticHello("sk-s-p-s1", "78", "boot-9", "us-x1-a", 1.0)
        newer = StaticHello("sk-s-p-s0", "77", "boot-2", "us-x1-a", 2.0)
        assert store.put_static_hello(first) and store.put_static_hello(other)
        assert not store.put_static_hello(first)
        assert store.put_static_hello(newer)
        assert set(store.list_static_hellos()) == {other, newer}

    def test_market(self, store: Store) -> None:
        one = Observation("j-n0-a1", Event.ADMITTED, 3600.0, "us-x1-a", Model.SPOT, "start", 3590.0)
        two = Observation("j-n0-a1", Event.LOSS, 3700.0, "us-x1-a", Model.SPOT, "loss")
        assert store.add_observations("gpu", 1, (two, two)) and store.add_observations("gpu", 1, (one, two))
        assert store.read_observations(("gpu", "cpu"), (0, 1)) == {"gpu": (one, two), "cpu": ()}
        assert store.list(paths.market_hours("gpu")) == (paths.market_hour("gpu", 1),)

    def test_market_hours_are_kept_for_90_days(self, store: Store) -> None:
        for hour in (1, 2, 1 + HOURS_KEPT, 2 + HOURS_KEPT):
            assert store.add_observations("gpu", hour, (Observation("j-n0-a1", Event.GONE, hour * 3600.0),))
        kept = (2, 1 + HOURS_KEPT, 2 + HOURS_KEPT)
        assert store.list(paths.market_hours("gpu")) == tuple(paths.market_hour("gpu", hour) for hour in kept)

    def test_prices_are_compared_and_swapped(self, store: Store) -> None:
        first = Prices("gpu", 5.0, 5.0, (PriceRun(1.0, 0.25),))
        token = store.cas_prices(first, "")
        assert token and store.cas_prices(first, "") is None
        assert store.cas_prices(Prices("gpu", 6.0), token) and store.cas_prices(Prices("gpu", 7.0), token) is None
        held = store.read_prices(("gpu", "cpu"))
        assert {pool: one.value for pool, one in held.items()} == {"gpu": Prices("gpu", 6.0)}

    def test_the_newest_bandwidth_of_a_machine_type_in_a_zone_stays(self, store: Store) -> None:
        assert store.read_networks() == ()
        networks = [Network("a3", "z-a", 100.0, 5.0), Network("a3", "z-b", 90.0, 6.0), Network("a2", "z-a", 80.0, 7.0)]
        for network in (Network("a3", "z-a", 1.0, 1.0), *networks):
            store.put_network(network)
        assert sorted(store.read_networks(), key=lambda one: one.at) == networks

    def test_an_unreadable_market_is_unknown_and_replaced(self, store: Store) -> None:
        store.put(paths.market_hour("gpu", 1), b"[]")
        store.put(paths.prices("gpu"), b'{"pool": 3}')
        assert store.read_observations(("gpu",), (1,)) == {"gpu": ()}
        held = store.read_prices(("gpu",))["gpu"]
        assert held.value == Prices("gpu", 0.0)
        assert store.cas_prices(Prices("gpu", 6.0), held.token)
        assert store.add_observations("gpu", 1, (Observation("j-n0-a1", Event.GONE, 3600.0),))
        assert len(store.read_observations(("gpu",), (1,))["gpu"]) == 1

    def test_quarantine_is_capped(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("spotkeeper.reconcile.store.bucket.QUARANTINE_KEPT", 3)
        for number in range(6):
            store.quarantine(f"{number}" + "x" * 10_000)
        kept = store.list("quarantine/")
        assert len(kept) == 3
        assert all(len(store.get(path) or b"") == 4096 for path in kept)

    def test_what_is_no_utf8_is_quarantined_too(self, store: Store) -> None:
        store.quarantine("a\udc80b")
        assert [store.get(path) for path in store.list("quarantine/")] == [b"a\\udc80b"]

    @pytest.mark.parametrize(
        ("path", "data", "says"),
        [
            (paths.record(JOB), b"", "jobs/abcd2345/rec"),
            (paths.record(JOB), b"\xff\xfe", "jobs/abcd2345/rec"),
            (paths.record(JOB), b'{"v":1,"job":"abcd2345"', "jobs/abcd2345/rec"),
            (paths.record(JOB), b'{"v":1,"job":"abcd2345"}', "uid"),
            (paths.record(JOB), encode_versioned(record()).replace(b'"v":1', b'"v":2'), "format 2.*knows format 1"),
            (paths.record(JOB), encode_versioned(record()).replace(b'"v":1,', b""), "format None"),
            (paths.record(JOB), encode_versioned(record()).replace(b'"created":1.0', b'"created":"x"'), r"\$\.created"),
            (paths.ALLOCATION, b"[]", "stack/allocation"),
            (paths.STACK, b'{"stack":1}', "stack/pools.json"),
            (paths.lease(JOB), b"null", "lease"),
            (paths.name("train"), b"../../x", "names/train"),
        ],
    )
    def test_corrupt_documents_are_named(self, store: Store, path: str, data: bytes, says: str) -> None:
        store.put(path, data)
        read = {
            paths.record(JOB): lambda: store.read_record(JOB),
            paths.ALLOCATION: store.read_allocation,
            paths.STACK: store.read_stack,
            paths.lease(JOB): lambda: store.read_due(JOB),
            paths.name("train"): lambda: store.read_name("train"),
        }[path]
        with pytest.raises(CorruptError, match=says):
            read()

    @pytest.mark.parametrize(
        ("data", "why"),
        [
            (b"", "not a Document: Input data was truncated"),
            (b'{"v":0}', "has format 0, not 1 as it should"),
            (b'{"v":1}', "not a Record: Object missing required field `job`"),
            (b"\x78\x00", "does not unpack: Error -3 while decompressing data: incorrect header check"),
            (zlib.compress(b"{}")[:-1], "is cut short, or larger than 67108864 bytes"),
        ],
    )
    def test_a_corrupt_document_is_shown_with_its_token(self, store: Store, data: bytes, why: str) -> None:
        store.put(paths.record(JOB), data)
        with pytest.raises(CorruptError) as refused:
            store.read_record(JOB)
        error, blob = refused.value, store._objects.get(paths.record(JOB))
        assert str(error) == f"{paths.record(JOB)}: {why}"
        assert (error.path, error.said, error.token) == (paths.record(JOB), documents.cut(data), blob.tag)

    def test_a_document_without_a_nonce_is_not_written(self, store: Store) -> None:
        with pytest.raises(StoreError, match="nonce"):
            store.create_record(record(nonce=""))


class Unsteady:
    """An object layer that does the write and loses the answer, then meets itself, as a retrying client does."""

    def __init__(self, inner: Objects) -> None:
        self.inner = inner
        self.lose = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def create(self, key: str, data: bytes) -> str:
        tag = self.inner.create(key, data)
        return self.inner.create(key, data) if self.lose else tag

    def replace(self, key: str, data: bytes, tag: str) -> str:
        new = self.inner.replace(key, data, tag)
        return self.inner.replace(key, data, tag) if self.lose else new


def test_a_lost_answer_to_an_own_write_is_recognised(tmp_path: Path) -> None:
    objects = Unsteady(SqliteObjects(tmp_path / "b.db"))
    store = Store(objects)
    objects.lose = True
    assert store.create_record(record())
    held = store.read_record(JOB)
    assert held is not None
    token = store.cas_record(record(ver=1, nonce="n2"), held.token)
    assert token is not None
    objects.lose = False
    assert store.cas_record(record(ver=2, nonce="n3"), token) is not None, "the token of the won write is the right one"
    assert store.cas_allocation(Allocation(ver=1, nonce="x"), "") is not None
    objects.lose = True
    assert store.take_lease(JOB, "a", 1.0, 9.0)


def nodes(count: int) -> Record:
    slot = Slot(1, SlotState.MEMBER, "pool", "z-a", Model.SPOT, 1_800_000_000.0, address="10.0.0.1", disk=True)
    named = [
        msgspec.structs.replace(slot, uid=str(10**18 + 7919 * n), boot=str(uuid.UUID(int=(n + 1) * 2**97 // 10007)))
        for n in range(count)
    ]
    return record(nodes=tuple(Node(top=1, cur=each, zone="z-a") for each in named), members=tuple(range(count)))


def test_only_large_records_are_compressed(tmp_path: Path) -> None:
    objects = SqliteObjects(tmp_path / "b.db")
    store = Store(objects)
    for count in (3, 10_000):
        document = nodes(count)
        objects.delete(paths.record(JOB))
        assert store.create_record(document)
        blob = objects.get(paths.record(JOB))
        assert blob is not None and len(blob.data) < 1_000_000
        assert (blob.data[:1] == b"{") is (count == 3)
        assert Store(objects).read_record(JOB).value == document


@pytest.mark.parametrize("cut", [1, 2, 10, -1, -5])
def test_a_truncated_compressed_record_is_corrupt(tmp_path: Path, cut: int) -> None:
    objects = SqliteObjects(tmp_path / "b.db")
    objects.put(paths.record(JOB), encode_versioned(nodes(1000))[:cut])
    with pytest.raises(CorruptError):
        Store(objects).read_record(JOB)


def test_a_decompression_bomb_is_corrupt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(SqliteObjects(tmp_path / "b.db"))
    store.put(paths.record(JOB), zlib.compress(encode_versioned(record()) + b" " * 10_000))
    assert store.read_record(JOB).value == record()
    monkeypatch.setattr(documents, "UNPACKED_BYTES", 5_000)
    with pytest.raises(CorruptError, match="larger than 5000 bytes"):
        open_store(f"sqlite://{tmp_path}/b.db").read_record(JOB)


def test_a_record_is_decoded_once_a_version_and_never_served_stale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = SqliteObjects(tmp_path / "b.db")
    reader, writer = Store(objects), Store(SqliteObjects(tmp_path / "b.db"))
    decoded: list[str] = []
    real = bucket_module.decode_versioned
    monkeypatch.setattr(bucket_module, "decode_versioned", lambda *a: (decoded.append(a[2]), real(*a))[1])
    assert writer.create_record(nodes(3))
    assert reader.read_record(JOB).value.ver == 0
    with monkeypatch.context() as patch:
        patch.delattr(SqliteObjects, "get")  # an unchanged record's bytes are not read again
        for _ in range(4):
            assert reader.read_record(JOB).value.ver == 0
    assert len(decoded) == 1
    token = reader.read_record(JOB).token
    assert writer.cas_record(msgspec.structs.replace(nodes(3), ver=1, nonce="n2"), token)
    assert reader.read_record(JOB).value.ver == 1
    objects.delete(paths.record(JOB))
    assert reader.read_record(JOB) is None
    assert writer.create_record(msgspec.structs.replace(nodes(2), nonce="n3"))
    assert len(reader.read_record(JOB).value.nodes) == 2


def test_observations_are_given_up_if_others_always_write_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tries: list[str] = []

    def create(_: SqliteObjects, key: str, data: bytes) -> str:
        tries.append(key)
        raise ConflictError(f"{key}: exists")

    monkeypatch.setattr(SqliteObjects, "create", create)
    path = paths.market_hour("gpu", 1)
    assert not open_store(f"sqlite://{tmp_path}/b.db").add_observations("gpu", 1, (Observation("a", Event.GONE, 1.0),))
    assert tries == [path] * MARKET_TRIES
    assert caplog.messages == [f"{path}: other writers were first each time; 1 observations are not stored"]


def test_a_document_evicted_during_a_read_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(SqliteObjects(tmp_path / "b.db"))
    assert store.create_record(record())
    first = store.read_record(JOB)
    real = SqliteObjects.refresh

    def refresh(self: SqliteObjects, key: str, known: Blob) -> Blob | None:
        store._recent = documents.Recent()  # other threads read so much meanwhile
        return real(self, key, known)

    monkeypatch.setattr(SqliteObjects, "refresh", refresh)
    assert store.read_record(JOB) == first


def test_gcs_sends_known_versions_only_once_and_gets_no_token_over_http() -> None:
    with gcs.serve() as google:
        bucket = open_bucket("gs://sk-bucket", google.endpoint)
        known = Blob(b"", bucket.create("a", b"one"), "")
        held = bucket.get("a")
        assert held is not None and held.tag == known.tag
        before = google.bodies_sent
        assert bucket.refresh("a", held) is held
        assert google.bodies_sent == before
        bucket.put("b", b"small")
        assert google.puts == 2, "one request each"
        bucket.delete("a")
        assert bucket.list("") == ["b"]
        assert google.tokens == {""}


def test_evicted_documents_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "KEPT_BYTES", 1000)
    store = Store(SqliteObjects(tmp_path / "b.db"))
    jobs = [f"abcd234{n}" for n in range(8)]
    for job in jobs:
        assert store.create_record(msgspec.structs.replace(record(), job=job))
    for job in (*jobs, *jobs):
        assert store.read_record(job).value.job == job
    assert len(store._recent._entries) < len(jobs)


def test_the_store_of_the_tests_has_the_same_methods() -> None:
    def methods(of: type) -> dict[str, int]:
        found = inspect.getmembers(of, inspect.isfunction)
        return {name: len(inspect.signature(value).parameters) for name, value in found if name[0] != "_"}

    assert dict(methods(Store).items() - methods(MemoryStore).items()) == {"newest": 3}


@pytest.mark.parametrize("job", ["", "ABCD2345", "../x", "abcd234", "abcd23456", "abcd234\n"])
def test_a_job_id_from_outside_cannot_leave_its_folder(job: str) -> None:
    for path in (paths.record, paths.active, paths.facts, paths.lease, paths.tomb, paths.progress):
        with pytest.raises(BadKeyError) as refused:
            path(job)
        assert str(refused.value) == f"{job!r} is not a job id (8 characters of a-z and 0-9)"


@pytest.mark.parametrize(
    ("path", "why"),
    [
        (paths.bundle, "is not a SHA-256 in lower-case hex"),
        (paths.name, "is not a job name ([a-z][-a-z0-9]*, at most 40 characters)"),
        (paths.static_machine, "cannot be part of a name in the bucket (1 to 64 characters of [-a-z0-9])"),
    ],
)
def test_a_refused_part_of_a_path_is_named_with_the_right_form(path: Callable[[str], str], why: str) -> None:
    for text in ("", "../x", "A" * 100):
        with pytest.raises(BadKeyError) as refused:
            path(text)
        assert str(refused.value) == f"{text[:80]!r} {why}"


def test_an_entrys_path_is_cut() -> None:
    assert paths.entry(JOB, 1.5, "a:b" + "x" * 300) == f"jobs/{JOB}/ledger/0000000000001500.a-b" + "x" * 197


def test_every_path_is_a_key() -> None:
    sha = "a" * 64
    for path in (
        paths.bundle(sha), paths.active(JOB), paths.name("n"), paths.spec(JOB), paths.source(JOB, sha),
        paths.record(JOB), paths.lease(JOB), paths.request(JOB, "x"), paths.progress(JOB), paths.entry(JOB, 1.5, "a:b"),
        paths.log(JOB, 3, 2), paths.static_hello("n", "b"), paths.tomb(JOB),
        paths.prices("p"), paths.market_hour("p", 1),
        paths.quarantine(sha), paths.fact(JOB, Fact("1", "b", 0, 1, 0, Kind.HELLO)),
        paths.STACK, paths.ALLOCATION, paths.DRAIN,
    ):  # fmt: skip
        assert check_key(path) == path


def test_a_stored_job_omits_defaults(tmp_path: Path) -> None:
    """A function that is older than the shell that submits refuses fields that it does not know."""
    store = Store(SqliteObjects(tmp_path / "b.sqlite"))
    spec = JobSpec("first", ("train.py",), nodes=Nodes(1, 2), checkpoint=Checkpoint(keep=7), seed=3)
    store.put_spec("abcdefgh", spec)
    assert json.loads(store.get(paths.spec("abcdefgh")) or b"") == {
        "name": "first",
        "command": ["train.py"],
        "nodes": {"min": 1, "max": 2},
        "checkpoint": {"keep": 7},
        "seed": 3,
    }
    assert store.read_spec("abcdefgh") == spec


def test_a_locked_database_is_unavailable_and_a_broken_one_refused(tmp_path: Path) -> None:
    path = tmp_path / "made" / "on the way" / "b.db"
    bucket = SqliteObjects(path)
    bucket.put("a", b"x")
    for told, error in (
        ("database is locked", UnavailableError),
        ("database is busy", UnavailableError),
        ("no such table: objects", BucketRefusedError),
    ):
        with pytest.raises(error, match=f"{path}: "), objects_sqlite._translated(path):
            raise sqlite3.OperationalError(told)


@pytest.mark.parametrize("name", ["0000000000001000.shell-1", "0.shell-1/0.admitted-1", "logs/0.admitted-1"])
def test_a_ledger_proves_nothing_by_what_others_may_write(tmp_path: Path, name: str) -> None:
    """People with shells may create what is named like a shell's entry, and a machine what is in a folder `logs`."""
    store = open_store(f"sqlite://{tmp_path}/bucket.sqlite")
    forged = Entry(1.0, "admitted.1", Event.ADMITTED, node=0, attempt=1)
    store.put(f"{paths.ledger(JOB)}{name}", msgspec.json.encode(forged))
    assert store.list_ledger(JOB) == () and not store.has_begun(JOB)
    opened = Entry(2.0, "shell.ab", Event.SHELL, by="kim")
    assert store.append_ledger(JOB, opened)
    assert store.list_ledger(JOB) == (opened,) and not store.has_begun(JOB), "its record is not believed yet"
    assert store.append_ledger(JOB, replace(forged, at=3.0)) and store.has_begun(JOB)
    assert [entry.event for entry in store.list_ledger(JOB)] == [Event.SHELL, Event.ADMITTED]
