"""A lease saves money only: it is renewed while its round runs, and a silent holder is nobody."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from spotkeeper.contract.record import Record
from spotkeeper.reconcile.controller.lease import BEAT_S, SHORT_S, WHOLE_S, Lease, in_thread
from spotkeeper.reconcile.controller.reconcile_job import RoundOptions, run_round
from spotkeeper.reconcile.store.objects import UnavailableError
from tests.reconcile.memory import MemoryStore
from tests.reconcile.world import World

JOB = "abcd2345"


def bucket(store: MemoryStore | None = None) -> MemoryStore:
    """A bucket with a job's record: without one, nobody gets its lease."""
    out = store or MemoryStore()
    assert out.create_record(Record(JOB, "u", "first", "", 1000.0, nonce="n"))
    return out


class Clock:
    scale = 1.0

    def __init__(self) -> None:
        self.at = 1000.0

    def now(self) -> float:
        return self.at


class Beats:
    """``every`` by hand."""

    def __init__(self) -> None:
        self.works: list[Callable[[], object]] = []

    def __call__(self, seconds: float, work: Callable[[], object]) -> Callable[[], None]:
        assert seconds == BEAT_S
        self.works.append(work)
        return self.works.clear


def test_a_renewed_lease_lasts_as_long_as_its_round() -> None:
    store, clock, beats = bucket(), Clock(), Beats()
    mine = Lease(store, JOB, clock, beats)
    other = Lease(store, JOB, clock, beats)
    assert mine.take()
    with mine.renewed():
        for _ in range(10):
            clock.at += SHORT_S - 1.0
            beats.works[0]()
            assert not other.take()
            assert store.read_due(JOB) == clock.at + SHORT_S, "by then its holder has spoken, or is no more"
        mine.due = 5000.0
    assert not beats.works
    assert store.read_due(JOB) == 5000.0
    assert other.take()


def test_a_round_renews_its_lease_as_its_options_say() -> None:
    world, begun = World(), list[float]()
    world.submit()

    def every(seconds: float, work: Callable[[], object]) -> Callable[[], None]:
        begun.append(seconds)
        due = world.store.read_due(JOB)
        assert due is not None and due - world.t == pytest.approx(SHORT_S + 10.0 * (world.scale - 1.0))
        return lambda: None

    world.run(10)
    run_round(world.store, world, JOB, world, RoundOptions(settle_s=0.0, every=every))
    assert begun and set(begun) == {BEAT_S}


def test_an_unrenewed_lease_expires() -> None:
    store, clock, beats = bucket(), Clock(), Beats()
    dead, other = Lease(store, JOB, clock, beats), Lease(store, JOB, clock, beats)
    assert dead.take()
    clock.at += SHORT_S + 0.1
    due = store.read_due(JOB)
    assert due is not None and due <= clock.at
    assert other.take()
    assert not dead.take(), "a late beat takes nothing back"


def test_without_renewal_a_lease_outlives_the_platforms_limit() -> None:
    store, clock = bucket(), Clock()
    silent, other = Lease(store, JOB, clock, None), Lease(store, JOB, clock, None)
    assert silent.take()
    clock.at += WHOLE_S - 1.0
    assert not other.take()
    clock.at += 1.1
    assert other.take()


def test_a_failed_round_releases_its_lease() -> None:
    store, clock, beats = bucket(), Clock(), Beats()
    mine = Lease(store, JOB, clock, beats)
    assert mine.take()
    with pytest.raises(RuntimeError), mine.renewed():
        raise RuntimeError
    assert not beats.works
    assert Lease(store, JOB, clock, beats).take()


class Deaf(MemoryStore):
    """A bucket that refuses to give leases back: one object is written once a second at the most."""

    def drop_lease(self, job: str, nonce: str, due: float | None) -> None:
        raise UnavailableError("429")


def test_a_round_succeeds_even_if_its_lease_cannot_be_released() -> None:
    store, clock, beats = bucket(Deaf()), Clock(), Beats()
    mine = Lease(store, JOB, clock, beats)
    assert mine.take()
    with mine.renewed():
        pass
    assert not beats.works
    with pytest.raises(RuntimeError), mine.renewed():
        raise RuntimeError
    clock.at += SHORT_S + 0.1
    assert Lease(store, JOB, clock, beats).take(), "it ends by itself"


def test_the_renewing_thread_survives_a_silent_bucket() -> None:
    beaten = threading.Semaphore(0)

    def work() -> None:
        beaten.release()
        raise UnavailableError("no answer")

    before = threading.active_count()
    stop = in_thread(0.001, work)
    assert beaten.acquire(timeout=10)
    assert beaten.acquire(timeout=10)
    stop()
    assert threading.active_count() == before


def test_a_lease_that_cannot_be_released_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = bucket()
    lease = Lease(store, JOB, Clock(), Beats())
    assert lease.take()

    def drop(*_: object) -> None:
        raise UnavailableError("the bucket is away")

    monkeypatch.setattr(store, "drop_lease", drop)
    lease._give_back()
    assert caplog.messages == ["the lease was not released: the bucket is away"]
