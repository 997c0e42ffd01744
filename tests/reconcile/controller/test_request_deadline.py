"""A request ends by itself before the platform ends it, whatever comes in meanwhile and however slow the bucket is.

Time is virtual: every sleep and every call of the bucket adds to it, and nothing else does.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import obstore
import pytest

from infra.settings.model import Reconcile
from spotkeeper.clock import Clock
from spotkeeper.contract.cloud import Action, Listing, Result, ResultKind
from spotkeeper.contract.facts import Fact, Kind
from spotkeeper.contract.job import JobSpec
from spotkeeper.contract.record import Node, Record
from spotkeeper.reconcile.clouds.ec2 import cloud as ec2
from spotkeeper.reconcile.clouds.gce import cloud as gce
from spotkeeper.reconcile.clouds.gce.api import MetadataToken, NoAnswerError
from spotkeeper.reconcile.controller.reconcile_job import Ended, RoundOptions, run_round
from spotkeeper.reconcile.service.rounds import Flights
from spotkeeper.reconcile.service.runtime import FunctionSettings, Runtime
from spotkeeper.reconcile.store import objects_obstore
from spotkeeper.reconcile.store.objects import AGAIN_S, CALL_S, LISTING_S, PLATFORM_S, REQUEST_S, Deadline, StoreError
from spotkeeper.reconcile.store.objects_obstore import BRIEF, ObstoreObjects
from spotkeeper.reconcile.store.store import Store
from tests.reconcile.world import JOB, World
from tests.scale.burst import STACK, ZONE, stack_of

SETTLE_S = 1.1
LOOKED_S = 3.0


class Time:
    """The clock of one request, in real seconds."""

    scale = 1.0

    def __init__(self) -> None:
        self.at = 1_800_000_000.0

    def now(self) -> float:
        return self.at

    def sleep(self, seconds: float) -> None:
        self.at += seconds


def test_the_request_time_limits_add_up() -> None:
    assert BRIEF.answer_s + BRIEF.again_s < CALL_S
    assert REQUEST_S + CALL_S <= PLATFORM_S
    assert AGAIN_S >= LISTING_S == gce.LISTING_S == ec2.LISTING_S


def test_the_least_function_timeout_covers_a_request() -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"timeout_s": PLATFORM_S - 1}, Reconcile, strict=False)
    assert msgspec.convert({"timeout_s": int(PLATFORM_S)}, Reconcile).timeout_s == PLATFORM_S


# -- reports that never end


class Besieged:
    """A job that somebody reports of whenever anybody looks."""

    def __init__(self, at_once: int = 20) -> None:
        self.world = World(nodes=1)
        self.world.submit()
        self.world.until(self.world.training, 200)
        self.time, self.said, self.at_once = Time(), 0, at_once
        self.store = self.world.store
        real_facts, real_look = self.world.memory.list_facts, self.world.list

        def list_facts(job: str) -> tuple[Fact, ...]:
            found = real_facts(job)
            self.report()
            return found

        def look(stack: str) -> Listing:
            self.time.sleep(LOOKED_S)
            return real_look(stack)

        self.world.memory.list_facts = list_facts  # type: ignore[method-assign]
        self.world.list = look  # type: ignore[method-assign]
        self.deadline = Deadline(REQUEST_S, self.time.now)
        self.options = RoundOptions(sleep=self.time.sleep, parallel=1, settle_s=SETTLE_S, deadline=self.deadline)

    def report(self) -> None:
        for _ in range(self.at_once):
            self.said += 1
            self.world.memory.put_fact(JOB, Fact("u0", f"b{self.said}", 0, 1, 1, Kind.HERE, "1"))


@pytest.mark.parametrize("at_once", [1, 20])
def test_endless_reports_do_not_extend_a_request(at_once: int) -> None:
    besieged = Besieged(at_once)
    began = besieged.time.now()
    result = run_round(besieged.store, besieged.world, JOB, besieged.world, besieged.options)
    assert result.ended is Ended.QUIET
    assert besieged.time.now() - began <= REQUEST_S - AGAIN_S + 4 * SETTLE_S + LOOKED_S + 2 * SETTLE_S
    assert set(besieged.world.memory.facts[JOB].values()) - result.facts, "somebody is not covered"
    due = besieged.store.read_due(JOB)
    assert due is not None and due <= besieged.world.now(), "whoever asks next makes the round that was left"
    assert run_round(besieged.store, besieged.world, JOB, besieged.world, besieged.options).ended is not Ended.BUSY


def test_a_rounds_result_survives_a_failed_hand_on() -> None:
    besieged = Besieged(1)
    real = besieged.world.memory.list_facts

    def list_facts(job: str) -> tuple[Fact, ...]:
        if besieged.deadline.left() < AGAIN_S and besieged.store.read_due(JOB) is None:
            raise StoreError("503")
        return real(job)

    real_look = besieged.world.list

    def look(stack: str) -> Listing:
        besieged.time.sleep(REQUEST_S)
        return real_look(stack)

    besieged.world.memory.list_facts, besieged.world.list = list_facts, look  # type: ignore[method-assign]
    assert run_round(besieged.store, besieged.world, JOB, besieged.world, besieged.options).ended is Ended.QUIET


def test_a_busy_process_hands_its_work_on() -> None:
    flights, time = Flights(), Time()
    deadline = Deadline(REQUEST_S, time.now)
    runs: list[float] = []

    def work() -> int:
        runs.append(time.now())
        time.sleep(4.0)
        assert flights.run("a", work, lambda _: True) is None, "one more is sent away"
        return len(runs)

    def covered(_: int) -> bool:
        flights.run("a", work, lambda _: True)
        return len(runs) % 2 == 0

    tired: list[bool] = []

    def out_of_time() -> bool:
        tired.append(deadline.left() < AGAIN_S)
        time.sleep(1.0)
        return tired[-1]

    assert flights.run("a", work, covered, out_of_time) == len(runs)
    assert tired[-1] and not any(tired[:-1])
    assert flights.run("a", lambda: 7, lambda _: True) == 7, "the turn was given back"


def test_a_round_that_lost_a_race_is_due_again_soon() -> None:
    """Who found the lease taken went away, and relied on it."""
    world = World(nodes=1)
    world.submit()
    world.until(world.training, 200)
    real = world.memory.cas_record

    def down(*_: object) -> str | None:
        raise StoreError("429")

    for broken, ended in ((lambda *_: None, Ended.LOST), (down, None)):
        world.memory.cas_record = broken  # type: ignore[method-assign]
        world._remove(world.member(0)) if ended is Ended.LOST else None
        if ended is None:
            with pytest.raises(StoreError):
                run_round(world.store, world, JOB, world, world.options)
        else:
            assert run_round(world.store, world, JOB, world, world.options).ended is ended
        due = world.store.read_due(JOB)
        assert due is not None and due <= world.now() + 5.0
    world.memory.cas_record = real  # type: ignore[method-assign]


# -- a bucket that is slow


class SlowBucket:
    """The shipped client on a store in memory; every request takes so long, up to the client's own limit."""

    def __init__(self, time: Time, latency_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
        self.time, self.latency_s, self.requests, self.slow = time, latency_s, 0, False
        for verb in ("get", "put", "delete", "list"):
            monkeypatch.setattr(objects_obstore.obstore, verb, self._slowly(getattr(obstore, verb)))
        self.store = Store(ObstoreObjects(obstore.store.MemoryStore()))

    def _slowly(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            self.requests += 1
            if self.slow:
                self.time.sleep(min(self.latency_s, BRIEF.answer_s + BRIEF.again_s))
            return real(*args, **more)

        return call


class NoRoom:
    """A cloud without anything, at once."""

    def list(self, stack: str) -> Listing:
        return Listing((), (), (), frozenset({ZONE}))

    def price_history(self, pool: str, deadline_s: float) -> None:
        return None

    def perform(self, action: Action, deadline_s: float) -> Result:
        return Result(action, ResultKind.CAPACITY)


@pytest.mark.parametrize("latency_s", [0.1, 1.0, 3.0, 30.0])
def test_a_tick_ends_before_the_platform_ends_it(latency_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    time = Time()
    bucket = SlowBucket(time, latency_s, monkeypatch)
    store = bucket.store
    store.put("stack/pools.json", msgspec.json.encode(stack_of(1000)))
    for number in range(40):
        job = f"jjjjjj{number:02d}".translate(str.maketrans("0123456789", "abcdefghij"))
        store.put_spec(job, JobSpec("n", ("train.py",), 1))
        store.set_active(job)
        assert store.create_record(Record(job, "u", "n", "", 1.0, nonce="first", nodes=(Node(),)))
    runtime = Runtime(FunctionSettings(STACK, "", clock=time), store, NoRoom())  # type: ignore[arg-type]
    runtime._options = RoundOptions(sleep=time.sleep, parallel=1)
    bucket.slow, began = True, time.now()
    try:
        done = runtime.tick(Deadline(REQUEST_S, time.now))
        assert latency_s >= 1.0 or done.rounds
    except StoreError as error:
        assert "time is up" in str(error)
    assert time.now() - began <= REQUEST_S + CALL_S <= PLATFORM_S


class Hung(MetadataToken):
    """A metadata server that answers when told to. Keeps the time that each question was given."""

    def __init__(self) -> None:
        super().__init__(Clock(), "metadata.invalid")
        self.asked, self.answer = threading.Event(), threading.Event()
        self.given: list[float] = []

    def _fetch(self, deadline_s: float) -> None:
        self.given.append(deadline_s)
        self.asked.set()
        assert self.answer.wait(60)
        self._value, self._until = "token", math.inf


def test_waiting_for_an_access_token_ends_at_the_calls_deadline() -> None:
    token = Hung()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(token, 20.0)
        assert token.asked.wait(60)
        for left_s in (0.0, -1.0, 0.01):
            with pytest.raises(NoAnswerError):
                token(left_s)
        token.answer.set()
        assert first.result(60) == "token" == token(5.0)
    assert len(token.given) == 1 and token.given[0] <= 20.0
