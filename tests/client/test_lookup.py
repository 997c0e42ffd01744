"""The earlier job of a name, on a stack on which many have ended."""

from __future__ import annotations

import pytest

from spotkeeper.client import lookup
from spotkeeper.contract.job import JobSpec
from spotkeeper.contract.ledger import Event
from spotkeeper.contract.record import Hold, Outcome, Phase, Record
from spotkeeper.contract.stack import Model
from spotkeeper.reconcile.store.store import Store
from tests.report.ledgers import HOUR, entry, held, priced


def ended(store: Store, job: str, name: str, created: float) -> None:
    uid = "6f0f9a52-4a0d-4c5e-8d1b-0d8f4d1f1a11"
    end = Record(job, uid, name, "", created, nonce="n", phase=Phase.DONE, outcome=Outcome.SUCCEEDED)
    assert store.create_record(end)
    store.put_tomb(job, created)


def test_a_running_job_comes_before_the_newest_ended_one(store: Store) -> None:
    ended(store, "zzzzzzz1", "first", 10.0)
    ended(store, "aaaaaaa1", "first", 20.0)
    ended(store, "mmmmmmm1", "other", 30.0)
    assert lookup.earlier(store, "first") == "aaaaaaa1"
    assert lookup.earlier(store, "none") is None
    store.put_name("first", "bbbbbbb1")
    assert lookup.earlier(store, "first") == "bbbbbbb1"


def test_an_unreadable_record_is_skipped(store: Store) -> None:
    ended(store, "zzzzzzz1", "first", 10.0)
    store.put("jobs/aaaaaaa1/rec", b"{")
    store.put_tomb("aaaaaaa1", 11.0)
    assert lookup.earlier(store, "first") == "zzzzzzz1"
    assert [one.job for one in lookup.all_jobs(store, finished=True).unreadable] == ["aaaaaaa1"]


def test_only_the_newest_ended_jobs_are_searched(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(5):
        ended(store, f"jjjjjjj{number}", "first", float(number))
    monkeypatch.setattr(lookup, "MOST_ENDED", 3)
    assert lookup.earlier(store, "first") == "jjjjjjj4", "those that ended last"
    ended(store, "kkkkkkk1", "other", 9.0)
    monkeypatch.setattr(lookup, "MOST_ENDED", 1)
    assert lookup.earlier(store, "first") is None


def test_a_held_jobs_disks_cost_their_scratch_folders_too(store: Store) -> None:
    record = held(Hold.CLOUD)
    up = [entry(Event.ADMITTED, 60.0, node, 1, pool="workers", model=Model.SPOT) for node in (0, 1)]
    for size in (200, 302):  # its job file cannot be read; it can
        hold = lookup.view_of(store, record, priced(0.10), HOUR, ledger=up, prices={}).hold
        assert hold is not None and hold.disk_gb == size
        assert hold.usd_per_day == pytest.approx(size * 0.10 * 12 / 365)
        if size == 200:
            store.put_spec(record.job, JobSpec(name="first", command=("train.py",), scratch_gb=50), record.spec_key())
