"""A tick over many jobs: one listing, bounded in time, none for jobs that have ended. ``make burst`` has the most."""

from __future__ import annotations

import threading
from collections import Counter

import msgspec
import pytest
from msgspec.structs import replace

from spotkeeper.contract import names
from spotkeeper.contract.allocation import Allocation, Grant
from spotkeeper.contract.cloud import Action, Disk, Listing, Result, ResultKind, Vm, VmStatus
from spotkeeper.contract.job import JobSpec
from spotkeeper.contract.record import Node, Phase, Record, Slot, SlotState
from spotkeeper.contract.stack import Model
from spotkeeper.reconcile.controller.reconcile_job import Ended, RoundOptions
from spotkeeper.reconcile.controller.tick import tick
from spotkeeper.reconcile.store import paths
from spotkeeper.reconcile.store.objects import BEGIN_S, REQUEST_S, Deadline
from spotkeeper.reconcile.store.store import Store
from tests.scale.burst import STACK, ZONE, stack_of
from tests.security.cases_store import Shelf
from tests.sizes import size

JOBS = size(25, 200)
WAITING = size(15, 30)


class Clock:
    scale = 1.0

    def __init__(self) -> None:
        self.at = 1_800_000_000.0

    def now(self) -> float:
        return self.at


class Cloud:
    """It has no capacity. Counts its listings, keeps its calls."""

    def __init__(self) -> None:
        self.lists = 0
        self.listing = Listing((), (), (), frozenset({ZONE}))
        self.lock = threading.Lock()
        self.calls: list[Action] = []

    def list(self, stack: str) -> Listing:
        self.lists += 1
        return self.listing

    def price_history(self, pool: str, deadline_s: float) -> None:
        return None

    def perform(self, action: Action, deadline_s: float) -> Result:
        with self.lock:
            self.calls.append(action)
        return Result(action, ResultKind.CAPACITY)


def name(number: int) -> str:
    return "".join("abcdefghij"[int(digit)] for digit in f"{number:08d}")


def site(jobs: int, ended: int = 0) -> tuple[Shelf, Store]:
    shelf = Shelf()
    store = Store(shelf)
    store.put("stack/pools.json", msgspec.json.encode(stack_of(4 * jobs)))
    record = Record("x", "u", "n", "", 1.0, nonce="first")
    for number in range(jobs + ended):
        job = name(number)
        done = number >= jobs
        store.put_spec(job, JobSpec("n", ("train.py",), 2))
        if not done:
            store.set_active(job)
        assert store.create_record(replace(record, job=job, phase=Phase.DONE if done else Phase.RUN))
    return shelf, store


def training(jobs: int, now: float) -> tuple[Store, Cloud]:
    """So many jobs of one node each, in whose rounds nothing is to be done."""
    store, cloud = Store(Shelf()), Cloud()
    store.put("stack/pools.json", msgspec.json.encode(stack_of(jobs)))
    vms, disks, grants = [], [], []
    for number in range(jobs):
        job, uid = name(number), str(10**18 + number)
        slot = Slot(1, SlotState.MEMBER, "pool", ZONE, Model.SPOT, now, None, uid, "boot", "10.0.0.1", disk=True)
        node = Node(top=1, cur=slot, zone=ZONE)
        store.put_spec(job, JobSpec("n", ("train.py",), 1))
        store.set_active(job)
        record = Record(job, "u", "n", "", now, nonce="first", gen=1, gen_since=now, zone=ZONE, members=(0,))
        assert store.create_record(replace(record, nodes=(node,)))
        store.put(paths.lease(job), b"{}")  # the record is the function's own
        machine = names.vm_name(STACK, job, 0, 1)
        vms.append(Vm(machine, uid, ZONE, VmStatus.RUNNING, "pool", job, 0, 1, "10.0.0.1"))
        disks.append(Disk(names.disk_name(STACK, job, 0, 0), ZONE, job, 0, 0, (machine,)))
        grants.append(Grant(job, 0, 1, "slot:pool", now))
    assert store.cas_allocation(Allocation(1, "first", tuple(grants)), "")
    cloud.listing = Listing(tuple(vms), tuple(disks), (), frozenset({ZONE}))
    return store, cloud


def test_many_jobs_are_served_in_one_tick_from_one_listing() -> None:
    clock = Clock()
    store, cloud = training(JOBS, clock.now())
    result = tick(store, cloud, clock, RoundOptions(settle_s=0.0))
    assert (result.jobs, len(result.rounds)) == (JOBS, JOBS)
    assert not result.late
    assert not result.failed
    assert {one.ended for one in result.rounds} == {Ended.QUIET}
    assert cloud.lists == 1
    assert not cloud.calls


def test_many_jobs_get_machines_in_turn() -> None:
    """They meet at one document of grants; who loses a race there is served by the next tick at the latest."""
    _, store = site(JOBS)
    clock, cloud = Clock(), Cloud()
    for _ in range(4):
        result = tick(store, cloud, clock, RoundOptions(settle_s=0.0))
        assert not result.failed
        clock.at += 60.0
    assert {action.job for action in cloud.calls} == {name(number) for number in range(JOBS)}


def test_rounds_without_time_are_left_to_the_next_tick() -> None:
    """Time passes with every look at the clock; a tick has enough of it for a third of the jobs."""
    _, store = site(WAITING)
    clock, cloud = Clock(), Cloud()
    served: Counter[str] = Counter()
    for _ in range(24):
        passed = [0.0]

        def monotonic(passed: list[float] = passed) -> float:
            passed[0] += (REQUEST_S - BEGIN_S) / (1.1 * WAITING)
            return passed[0]

        result = tick(
            store, cloud, clock, RoundOptions(settle_s=0.0, parallel=1, deadline=Deadline(REQUEST_S, monotonic))
        )
        assert 0 < len(result.late) < WAITING
        assert len(result.late) + len(result.rounds) == WAITING
        assert not result.failed
        served.update(one.record.job for one in result.rounds if one.record)
        clock.at += 60.0
    assert set(served) == {name(number) for number in range(WAITING)}
    assert min(served.values()) >= 4


def test_an_ended_job_without_a_name_is_cleaned_up() -> None:
    """An id stands for the name then; one that begins with a digit made every tick fail from there on."""
    _, store = site(1)
    for job in ("2hxst234", "ghxst234"):
        store.set_active(job)
        assert store.create_record(Record(job, "u", job, "", 1.0, nonce="n", phase=Phase.DONE, nodes=(Node(),)))
    result = tick(store, Cloud(), Clock(), RoundOptions(settle_s=0.0, parallel=1))
    assert not result.failed
    assert store.active_jobs() == (name(0),)


@pytest.mark.parametrize("ended", [200, size(800, 20_000)])
def test_ended_jobs_cost_a_tick_nothing(ended: int) -> None:
    shelf, store = site(3, ended)
    asked: Counter[str] = Counter()
    shelf.before = lambda verb, key: asked.update([f"{verb} {key.split('/')[0]}"])
    listed: list[int] = []
    real = shelf.list
    shelf.list = lambda prefix, start="": listed.append(len(found := real(prefix, start))) or found  # type: ignore[method-assign]
    result = tick(store, Cloud(), Clock(), RoundOptions(settle_s=0.0, parallel=1))
    assert result.jobs == 3
    assert sum(asked.values()) < 150, asked
    assert max(listed) <= 3, "no listing goes over the jobs that ever were"
