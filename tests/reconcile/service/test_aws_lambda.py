"""The whole function on AWS, as Lambda calls it: requests of its URL, the schedule and EventBridge.

EC2 is the stand-in, where nothing is visible at once; the bucket is moto's S3, through obstore, in the story that
goes from the first tick to the end, and obstore's memory in the others (S3 costs ten times as much).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from dataclasses import replace as changed
from typing import Any

import msgspec
import obstore
import pytest
from msgspec.structs import replace

from spotkeeper.client.submit import submit
from spotkeeper.contract.job import JobRequest, JobSpec, RequestKind
from spotkeeper.contract.record import Outcome, Phase, Record, SlotState
from spotkeeper.contract.stack import Model
from spotkeeper.reconcile.service import aws_lambda
from spotkeeper.reconcile.service.aws_lambda import LambdaApp
from spotkeeper.reconcile.service.request_body import RequestRefusedError
from spotkeeper.reconcile.service.runtime import Runtime, settings_from_env
from spotkeeper.reconcile.store import paths
from spotkeeper.reconcile.store.documents import CorruptError
from spotkeeper.reconcile.store.objects_obstore import ObstoreObjects
from spotkeeper.reconcile.store.store import Store
from tests.reconcile import s3
from tests.reconcile.clouds.ec2.region import POOL, STACK, A, Region, region
from tests.reconcile.clouds.ec2.standin.site import Delays
from tests.reconcile.clouds.ec2.standin.things import OWNER, Instance, Run

TICK = {"source": "spotkeeper.tick"}
BUCKET = "sk-demo"


@dataclass
class Node:
    """The agent on one instance, as far as the function hears it."""

    instance: Instance
    job: str | None = None
    said: set[str] = field(default_factory=set)

    def event(self, facts: list[dict[str, Any]]) -> dict[str, Any]:
        uid = self.instance.id
        iam = {
            "accountId": OWNER,
            "userArn": f"arn:aws:sts::{OWNER}:assumed-role/sk-demo-vm/{uid}",
            "userId": f"AROAEXAMPLE:{uid}",
            "callerId": f"AROAEXAMPLE:{uid}",
            "accessKey": "ASIAEXAMPLE",
        }
        body = {"boot": f"boot-{uid[-6:]}", "ver": 0, "job": self.job, "facts": facts, "pending": True}
        return {
            "version": "2.0",
            "headers": {"content-type": "application/json"},
            "requestContext": {"http": {"method": "POST", "path": "/v1/sync"}, "authorizer": {"iam": iam}},
            "body": json.dumps({name: value for name, value in body.items() if value is not None}),
            "isBase64Encoded": False,
        }


class World:
    """A stack in a region, its bucket, and the function's one process."""

    def __init__(self, here: Region, app: LambdaApp) -> None:
        self.here, self.app, self.site = here, app, here.site
        self.store = app.runtime.store
        self.nodes: dict[str, Node] = {}
        self.job = ""

    def record(self) -> Record:
        held = self.store.read_record(self.job)
        assert held is not None
        return held.value

    def tick(self) -> dict[str, Any]:
        return self.app.event(dict(TICK))

    def run(self, seconds: float) -> None:
        """Agents ask every five seconds, the schedule every minute."""
        for _ in range(int(seconds // 5)):
            self.here.engine.run(self.here.engine.t + 5)
            self.app._looked = float("-inf")  # real seconds do not pass here
            for instance in list(self.site.instances.values()):
                if instance.state is Run.RUNNING and instance.visible_at + 10 < self.here.engine.t:
                    self.sync(self.nodes.setdefault(instance.id, Node(instance)))
            if int(self.here.engine.t) % 60 < 5:
                assert self.tick()["failed"] == 0

    def sync(self, machine: Node, *facts: dict[str, Any]) -> dict[str, Any]:
        told = list(facts)
        if "hello" not in machine.said:
            told.insert(0, {"kind": "hello"})
        answered = self.app.event(machine.event(told))
        assert answered["statusCode"] == 200, answered
        reply: dict[str, Any] = json.loads(answered["body"])
        if reply["role"] == "unknown":
            return reply
        machine.said.add("hello")
        machine.job = reply.get("job")
        if reply["role"] == "superseded" and machine.instance.state is Run.RUNNING:
            if "freed" not in machine.said:
                machine.said.add("freed")
                self.app.event(machine.event([{"kind": "freed", "value": "1"}]))
            self.site.stop(machine.instance, ("Client.InstanceInitiatedShutdown", "Instance initiated shutdown"), 5.0)
        elif (number := reply.get("disk")) and self.holds(machine) and f"disk {number}" not in machine.said:
            machine.said.add(f"disk {number}")
            self.app.event(machine.event([{"kind": "attached", "value": str(number)}]))
        if (
            (doc := reply.get("doc"))
            and doc["state"] == "save_stop"
            and (word := f"released {doc['gen']}") not in machine.said
        ):
            machine.said.add(word)
            self.app.event(machine.event([{"kind": "released", "gen": doc["gen"], "value": "10"}]))
        return reply

    def holds(self, machine: Node) -> bool:
        return any(v.holder == machine.instance.id and v.link == "attached" for v in self.site.volumes.values())

    def member(self, node: int) -> Node:
        slot = self.record().nodes[node].cur
        assert slot is not None and slot.uid is not None
        return self.nodes[slot.uid]

    @property
    def training(self) -> bool:
        record = self.record()
        return (
            all(node.cur is not None and node.cur.state is SlotState.MEMBER for node in record.nodes)
            and not record.stop
        )

    def bridge(self, kind: str, instance: Instance, **detail: str) -> dict[str, Any]:
        return self.app.event(
            {
                "version": "0",
                "id": "7bf73129-1428-4cd3-a780-95db273d1602",
                "detail-type": kind,
                "source": "aws.ec2",
                "account": OWNER,
                "time": "2026-11-21T12:00:00Z",
                "region": "us-x1",
                "resources": [f"arn:aws:ec2:us-x1:{OWNER}:instance/{instance.id}"],
                "detail": {"instance-id": instance.id, **detail},
            }
        )


@pytest.fixture
def s3_endpoint() -> Iterator[str]:
    with s3.serve() as endpoint:
        s3.make_bucket(endpoint, BUCKET)
        yield endpoint


@contextmanager
def begun(monkeypatch: pytest.MonkeyPatch, store: Store | None, s3_url: str = "") -> Iterator[World]:
    """The stack declared, the function configured as Lambda does it."""
    with region(monkeypatch, delays=Delays(seen=(1.0, 4.0), start=(5.0, 9.0), gone=(5.0, 9.0))) as here:
        here.site.throttling = False  # ticks here follow each other within no time
        env = {
            "SPOTKEEPER_STACK": "demo",
            "SPOTKEEPER_BUCKET": f"s3://{BUCKET}",
            "SPOTKEEPER_BUCKET_ENDPOINT": s3_url,
            "SPOTKEEPER_COMPUTE_ENDPOINT": here.endpoint,
        }
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        settings = changed(settings_from_env(), clock=here.engine)  # type: ignore[arg-type]
        made = World(here, LambdaApp(Runtime(settings, store)))
        made.app.runtime._options = changed(made.app.runtime.options(), settle_s=0.0, every=None)
        made.store.put(paths.STACK, msgspec.json.encode(replace(STACK, bucket=BUCKET, pools=(POOL,))))
        yield made


@pytest.fixture
def on_s3(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with begun(monkeypatch, None, s3_endpoint) as found:
        yield found


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with begun(monkeypatch, Store(ObstoreObjects(obstore.store.MemoryStore()))) as found:
        yield found


def begin(world: World, nodes: int = 2, **more: Any) -> None:
    spec = JobSpec(name="train", command=("train.py",), nodes=nodes, **more)
    world.job = submit(world.store, spec, None, world.here.engine.t).job
    assert world.tick() == {"jobs": 1, "failed": 0, "busy": False}
    world.run(60)


def test_a_whole_job_on_lambda_leaves_nothing(on_s3: World) -> None:
    world = on_s3
    _the_handler_itself()
    begin(world)
    assert world.training, world.record().nodes
    assert {one.tags["sk-job"] for one in world.site.instances.values()} == {world.job}
    assert all(volume.holder for volume in world.site.volumes.values()) and len(world.site.volumes) == 2

    lost = world.member(1).instance
    world.site.interrupt(lost, 120.0)
    assert world.bridge("EC2 Spot Instance Interruption Warning", lost, **{"instance-action": "terminate"})["jobs"] == 1
    deadline = str(int(world.here.engine.t + 120))
    world.app.event(world.nodes[lost.id].event([{"kind": "notice", "value": deadline}]))
    world.run(180)
    assert world.training and world.member(1).instance.id != lost.id and lost.state is Run.TERMINATED
    assert len(world.site.volumes) == 2, "its disk went over"

    world.store.put_request(world.job, JobRequest(id="cafe", kind=RequestKind.CANCEL, at=world.here.engine.t, by="ann"))
    world.run(240)
    record = world.record()
    assert (record.phase, record.outcome) == (Phase.DONE, Outcome.CANCELLED)
    assert not world.site.volumes and not any(one.there for one in world.site.instances.values())
    assert world.store.read_allocation().value.grants == () and world.store.active_jobs() == ()


def test_a_tick_that_succeeds_ends_with_a_line_that_the_alarm_counts(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """A schedule that is dead is hidden by agents, whose reports are invocations too."""
    caplog.set_level("INFO", "spotkeeper")
    begin(world)

    def ticks() -> int:
        return sum(getattr(record, "event", "") == "tick" for record in caplog.records)

    before = ticks()
    world.tick()
    assert ticks() == before + 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("spotkeeper.reconcile.controller.tick.run_round", lambda *_: 1 / 0)
        with pytest.raises(RequestRefusedError, match="the round of every job was interrupted: ZeroDivisionError"):
            world.tick()  # for Lambda an invocation that failed
    assert ticks() == before + 1, "no round could be made"


def test_events_of_an_ended_machine_start_a_round(world: World) -> None:
    """By then no listing shows it: it is asked for by its id."""
    begin(world)
    lost = world.member(0).instance
    attempts = world.record().nodes[0].top
    world.site.end(lost)
    world.app._known.clear()  # another process takes the event
    assert world.bridge("EC2 Instance State-change Notification", lost, state="terminated")["jobs"] == 1
    assert world.record().nodes[0].top == attempts + 1
    world.run(60)
    assert world.training


@pytest.mark.parametrize("kind", ["EC2 Instance Rebalance Recommendation", "EC2 Instance State-change Notification"])
def test_events_are_hints(
    world: World, kind: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(world)
    monkeypatch.setattr(logging.getLogger("spotkeeper"), "propagate", True)
    caplog.set_level(logging.INFO, "spotkeeper.lambda")
    before = world.record()
    known, stranger = world.member(0).instance, Instance("i-0fedcba9876543210", A, "", False, "m", {}, "", "", 0.0, 0.0)
    assert world.bridge(kind, known)["jobs"] == 1
    assert world.bridge(kind, stranger)["jobs"] == 0
    assert world.record() == before, "they say where to look, and nothing is to be seen"
    told = [record.getMessage() for record in caplog.records if record.name == "spotkeeper.lambda"]
    assert told == [f"event of {known.id}: {kind}"], "ours are written down, for whoever asks whether one arrived"


def test_without_spot_the_job_waits_or_buys_on_demand(world: World) -> None:
    world.site.market.capacity = lambda zone, spot: 0 if spot else None
    begin(world)
    world.run(120)
    assert world.training
    assert {slot.model for node in world.record().nodes if (slot := node.cur)} == {Model.ON_DEMAND}


def test_only_machines_of_the_stack_may_sync(world: World) -> None:
    begin(world)
    machine = world.member(0)
    event = machine.event([{"kind": "exit", "gen": 1, "value": "0"}])
    event["requestContext"]["authorizer"]["iam"]["userArn"] = (
        f"arn:aws:sts::{OWNER}:assumed-role/admin/{machine.instance.id}"
    )
    assert world.app.event(event)["statusCode"] == 401
    event = machine.event([])
    del event["requestContext"]["authorizer"]
    assert world.app.event(event)["statusCode"] == 401


def test_an_unreadable_stack_raises_an_alarm_and_fails_the_tick(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.store.put(paths.STACK, b"{")
    with pytest.raises(CorruptError):
        world.tick()
    assert any("ALARM" in line.getMessage() and paths.STACK in line.getMessage() for line in caplog.records)


def _the_handler_itself() -> None:
    """With the settings that Lambda gives it in its environment."""
    aws_lambda._app.cache_clear()
    try:
        assert aws_lambda.handler(dict(TICK)) == {"jobs": 0, "failed": 0, "busy": False}
    finally:
        aws_lambda._app.cache_clear()
