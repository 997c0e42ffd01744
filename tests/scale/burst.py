"""Everybody reports at once: N agents' hellos within two seconds, through the shipped HTTP interface, store and rounds.

Only time is a stand-in: the platform's instances and their concurrency, the bucket's limits, the listing's
pages. What is counted is what the promise names: rounds, writes of the record, and how long after the last
accepted report every node was in the record.
"""

from __future__ import annotations

import io
import random
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from unittest.mock import patch

import msgspec
from greenlet import getcurrent, greenlet
from msgspec import Struct

from spotkeeper.contract import names
from spotkeeper.contract.allocation import Allocation, Grant
from spotkeeper.contract.cloud import Action, Disk, Listing, Result, ResultKind, Vm, VmStatus
from spotkeeper.contract.facts import Kind
from spotkeeper.contract.generation import FactIn, Sync
from spotkeeper.contract.job import JobSpec
from spotkeeper.contract.record import Node, Record, Slot, SlotState
from spotkeeper.contract.stack import Model, PoolState, Price, StackState
from spotkeeper.reconcile.controller import reconcile_job as rounds
from spotkeeper.reconcile.select import market
from spotkeeper.reconcile.service.http import HttpApp
from spotkeeper.reconcile.service.runtime import FunctionSettings, Runtime
from spotkeeper.reconcile.store import paths
from spotkeeper.reconcile.store.documents import decode, decode_versioned
from spotkeeper.reconcile.store.store import Store
from tests.properties.actors import Inline
from tests.scale.bucket import Bucket, DeadError
from tests.scale.virtual import Hub

JOB, STACK, ZONE, UID = "abcd2345", "scale", "z-a", "00000000-0000-0000-0000-000000000001"
SPREAD_S = 2.0  # within which all report
INSTANCES, CONCURRENCY = 4, 80  # of Cloud Run, as infra declares them
CPU_S = 0.002  # of an instance for one request
RECORD, LEASE = f"jobs/{JOB}/rec", f"jobs/{JOB}/lease"
ROUND_S = 4.0  # about; all its reads and writes with them
LIST_S = 3.0  # a listing over all zones
POLL_S = 0.5  # of an agent that waits (vm.sync)


def stack_of(nodes: int) -> StackState:
    pool = PoolState("pool", "spot", "m", (ZONE,), 1, nodes, 0, 100, "pd", {ZONE: Price(on_demand=1.0, spot=0.3)})
    return StackState(STACK, "gcp", "p", "z", "b", (pool,), node_identity="node@p")


def starting(nodes: int, now: float) -> tuple[Record, Allocation]:
    """A job whose machines are all asked for."""
    slot = Slot(1, SlotState.INTENT, "pool", ZONE, Model.SPOT, now)
    record = Record(
        JOB, UID, "scale", "", now, nonce="first", zone=ZONE, nodes=(Node(top=1, cur=slot, zone=ZONE),) * nodes
    )
    return record, Allocation(1, "first", tuple(Grant(JOB, n, 1, "slot:pool", now) for n in range(nodes)))


def listing_of(nodes: int) -> Listing:
    machines = [names.vm_name(STACK, JOB, n, 1) for n in range(nodes)]
    vms = tuple(
        Vm(name, str(10**18 + n), ZONE, VmStatus.RUNNING, "pool", JOB, n, 1, f"10.{n >> 16}.{n >> 8 & 255}.{n & 255}")
        for n, name in enumerate(machines)
    )
    disks = tuple(Disk(names.disk_name(STACK, JOB, n, 0), ZONE, JOB, n, 0, (name,)) for n, name in enumerate(machines))
    return Listing(vms, disks, (), frozenset({ZONE}))


class Cloud:
    """Lists; nothing else is asked of it while machines only say hello."""

    def __init__(self, hub: Hub, nodes: int) -> None:
        self.hub, self.listing, self.lists = hub, listing_of(nodes), 0

    def list(self, stack: str) -> Listing:
        self.lists += 1
        self.hub.sleep(LIST_S)
        return self.listing

    def price_history(self, pool: str, deadline_s: float) -> None:
        return None

    def perform(self, action: Action, deadline_s: float) -> Result:
        return Result(action, ResultKind.DONE)


class Believed:
    """In place of the verifier: the header is the machine's name and its unique id (identity has tests of its own)."""

    def agent(self, header: str | None, *_: object) -> object:
        name, uid = (header or " ").split(" ")
        return SimpleNamespace(name=name, uid=uid, zone=ZONE)


class Held(Struct):
    """What a lease says that is of interest here."""

    nonce: str = ""


@dataclass
class Report:
    """What one agent says, again and again until the record has it."""

    name: str
    uid: str
    boot: str
    told: bool = False
    ver: int = 0  # of the document it has

    def request(self) -> SimpleNamespace:
        facts = () if self.told else (FactIn(Kind.HELLO),)
        body = msgspec.json.encode(Sync(self.boot, self.ver, facts=facts, pending=True))
        headers = {"Authorization": f"{self.name} {self.uid}", "Content-Type": "application/json"}
        return SimpleNamespace(
            method="POST", path="/v1/sync", headers=headers, content_length=len(body), stream=io.BytesIO(body)
        )


@dataclass
class Instance:
    """One process of the function: its HTTP app, its free places, its one processor."""

    app: HttpApp
    free: int = CONCURRENCY
    busy_until: float = 0.0
    tasks: dict[greenlet, Report] = field(default_factory=dict)


@dataclass
class Outcome:
    nodes: int
    accepted: float = 0.0  # the moment of the last accepted report
    covered: float = 0.0  # the moment of the record's write that had them all; 0: never
    rounds: int = 0
    record_writes: int = 0
    killed: int = 0
    throttled: int = 0
    longest_s: float = 0.0  # of all requests

    @property
    def seconds(self) -> float:
        return self.covered - self.accepted if self.covered else float("inf")


class Burst:
    """One burst. ``deaths``: the share of lease holders whose process ends in the middle of their round."""

    def __init__(self, nodes: int, deaths: float = 0.0, seed: int = 0, spread_s: float = SPREAD_S) -> None:
        self.hub, self.random, self.deaths = Hub(), random.Random(seed), deaths  # noqa: S311 - repeatable
        self.spread_s = spread_s
        self.bucket = Bucket(self.hub)
        self.cloud = Cloud(self.hub, nodes)
        self.outcome = Outcome(nodes)
        record, allocation = starting(nodes, self.hub.now())
        store = Store(self.bucket)
        store.put("stack/pools.json", msgspec.json.encode(stack_of(nodes)))
        store.put_spec(JOB, JobSpec("scale", ("train.py",), nodes))
        store.set_active(JOB)
        assert store.create_record(record)
        store.put(paths.lease(JOB), b"{}")  # the record is the function's own
        assert store.cas_allocation(allocation, "")
        self.bucket.forget()
        self.bucket.written = self._written
        self.instances = [self._instance() for _ in range(INSTANCES)]
        self.waiting: deque[Report] = deque()
        self.done, self.holder = False, ""

    def run(self, limit_s: float = 900.0) -> Outcome:
        for node in range(self.outcome.nodes):
            report = Report(names.vm_name(STACK, JOB, node, 1), str(10**18 + node), f"boot-{node}")
            self.hub.spawn(lambda report=report: self._arrive(report), self.random.uniform(0.0, self.spread_s))
        with patch.object(rounds, "ThreadPoolExecutor", Inline), patch.object(market, "ThreadPoolExecutor", Inline):
            self.hub.run(limit_s)
        self.outcome.throttled = self.bucket.throttled
        return self.outcome

    # -- the platform: instances, their places, a queue before them

    def _instance(self) -> Instance:
        runtime = Runtime(FunctionSettings(STACK, "sim", clock=self.hub), Store(self.bucket), self.cloud)  # type: ignore[arg-type]
        runtime.monotonic = self.hub.now
        runtime._verifier = Believed()  # type: ignore[assignment]
        runtime._options = rounds.RoundOptions(sleep=self.hub.sleep, every=self._beat)
        return Instance(HttpApp(runtime))

    def _arrive(self, report: Report) -> None:
        if self.done:
            return
        instance = max(self.instances, key=lambda one: one.free)
        if instance.free:
            self._serve(instance, report)
        else:
            self.waiting.append(report)

    def _serve(self, instance: Instance, report: Report) -> None:
        task = self.hub.spawn(lambda: self._request(instance, report))
        instance.free -= 1
        instance.tasks[task] = report

    def _request(self, instance: Instance, report: Report) -> None:
        me = getcurrent()
        instance.busy_until = max(instance.busy_until, self.hub.now()) + CPU_S
        self.hub.sleep(instance.busy_until - self.hub.now())
        status, began = 599, self.hub.now()
        with suppress(DeadError):
            body, status, _ = instance.app.handle(report.request())
            _, found, after = body[:500].partition(b'"ver":')
            report.ver = int(after.split(b",", 1)[0]) if found else report.ver
        if me in self.bucket.dead:
            return
        self.outcome.longest_s = max(self.outcome.longest_s, self.hub.now() - began)
        instance.tasks.pop(me, None)
        instance.free += 1
        if self.waiting:
            self._serve(instance, self.waiting.popleft())
        self._again(report, status)

    def _again(self, report: Report, status: int) -> None:
        """An agent asks on: at once after an error (with jitter), else as often as it polls."""
        report.told = report.told or status == 200
        pause = self.random.uniform(0.5, 1.5) * (POLL_S if status == 200 else 1.0)
        self.hub.spawn(lambda: self._arrive(report), pause)

    def _beat(self, seconds: float, work: Callable[[], object]) -> Callable[[], None]:
        """The thread that renews a lease, as a task that dies with its process."""
        holder = getcurrent()
        ended = False

        def beat() -> None:
            while not ended and holder not in self.bucket.dead:
                self.hub.sleep(seconds)
                if not ended and holder not in self.bucket.dead:
                    work()

        def stop() -> None:
            nonlocal ended
            ended = True

        self.hub.spawn(beat)
        return stop

    # -- deaths, and what the bucket tells

    def _written(self, key: str, data: bytes) -> None:
        now = self.hub.now()
        if "/facts/" in key:
            self.outcome.accepted = now
        elif key == LEASE:
            self._taken(decode(data, Held, key).nonce)
        elif key == RECORD:
            nodes = decode_versioned(data, Record, key).nodes
            if all(node.cur is not None and node.cur.state is not SlotState.INTENT for node in nodes):
                self.outcome.covered, self.done = now, True
                self.outcome.rounds, self.outcome.record_writes = self.cloud.lists, self.bucket.writes[key]

    def _taken(self, nonce: str) -> None:
        if nonce in ("", self.holder):
            return
        self.holder, task = nonce, getcurrent()
        instance = next((one for one in self.instances if task in one.tasks), None)
        if instance is not None and self.random.random() < self.deaths:
            self.hub.spawn(lambda: self._die(instance), self.random.uniform(0.0, ROUND_S))

    def _die(self, instance: Instance) -> None:
        if instance not in self.instances or self.done:
            return
        self.outcome.killed += 1
        self.instances[self.instances.index(instance)] = self._instance()
        self.bucket.dead.update(instance.tasks)
        for report in instance.tasks.values():
            self._again(report, 503)
