"""Reads that count themselves: what is unchanged has no bytes, and an entry of a ledger is read once."""

from __future__ import annotations

from pathlib import Path

import pytest

from spotkeeper.client.reads import USD_BYTE, USD_GET, USD_LIST, Meter, MeteredObjects
from spotkeeper.reconcile.store.objects_sqlite import SqliteObjects


class Clock:
    def __init__(self) -> None:
        self.at = 1000.0

    def __call__(self) -> float:
        return self.at


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def inner(tmp_path: Path) -> SqliteObjects:
    return SqliteObjects(tmp_path / "bucket.sqlite")


@pytest.fixture
def objects(inner: SqliteObjects, clock: Clock) -> MeteredObjects:
    return MeteredObjects(inner, Meter(clock))


def cost(objects: MeteredObjects) -> tuple[int, float]:
    """Reads and USD in the first minute, of which an hour has sixty."""
    hour = objects._meter.hour()
    return hour.reads // 60, hour.usd / 60


def test_an_unchanged_object_is_asked_for_and_not_fetched_again(objects: MeteredObjects, inner: SqliteObjects) -> None:
    inner.put("jobs/a/rec", b"x" * 1000)
    first = objects.get("jobs/a/rec")
    assert objects.get("jobs/a/rec") is first
    assert cost(objects) == (2, pytest.approx(2 * USD_GET + 1000 * USD_BYTE))
    inner.put("jobs/a/rec", b"new")
    again = objects.get("jobs/a/rec")
    assert again is not None and again.data == b"new"
    inner.delete("jobs/a/rec")
    assert objects.get("jobs/a/rec") is None


def test_an_entry_of_a_ledger_is_read_once(objects: MeteredObjects, inner: SqliteObjects) -> None:
    keys = ["jobs/a/ledger/1.x", "jobs/a/ledger/2.y"]
    for key in keys:
        inner.put(key, b"entry")
    assert [blob and blob.data for blob in objects.get_many(keys)] == [b"entry", b"entry"]
    assert [blob and blob.data for blob in objects.get_many([*keys, "jobs/a/ledger/3.z"])] == [b"entry", b"entry", None]
    assert cost(objects)[0] == 3


def test_an_hour_is_told_from_the_last_minutes(objects: MeteredObjects, inner: SqliteObjects, clock: Clock) -> None:
    inner.put("a", b"")
    clock.at += 600
    for _ in range(10):
        objects.list("")
    assert objects._meter.hour().reads == 120
    assert objects._meter.hour().usd == pytest.approx(120 * USD_LIST)
    clock.at += 301
    assert objects._meter.hour().reads == 0
