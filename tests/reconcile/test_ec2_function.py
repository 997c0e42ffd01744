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
from spotkeeper.cli.submit import submit
from spotkeeper.reconcile import lambda_, paths
from spotkeeper.reconcile.lambda_ import LambdaDoor
from spotkeeper.reconcile.objects_obstore import ObstoreObjects
from spotkeeper.reconcile.runtime import Runtime, settings_from_env
from spotkeeper.reconcile.store import ObjectStore
from spotkeeper.reconcile.store_api import CorruptError, Store
from spotkeeper.spec.job import Ask, AskKind, JobSpec
from spotkeeper.spec.model import Model
from spotkeeper.spec.record import Outcome, Phase, Record, SlotState

from tests.reconcile import s3
from tests.reconcile.ec2_region import POOL, STACK, A, Region, region
from tests.reconcile.ec2_standin.site import Delays
from tests.reconcile.ec2_standin.things import OWNER, Instance, Run

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

    def __init__(self, here: Region, door: LambdaDoor) -> None:
        self.here, self.door, self.site = here, door, here.site
        self.store = door.runtime.store
        self.nodes: dict[str, Node] = {}
        self.job = ""

    def record(self) -> Record:
        held = self.store.read_record(self.job)
        assert held is not None
        return held.value

    def tick(self) -> dict[str, Any]:
        return self.door.event(dict(TICK))

    def run(self, seconds: float) -> None:
        """Agents ask every five seconds, the schedule every minute."""
        for _ in range(int(seconds // 5)):
            self.here.engine.run(self.here.engine.t + 5)
            self.door._looked = float("-inf")  # real seconds do not pass here
            for instance in list(self.site.instances.values()):
                if instance.state is Run.RUNNING and instance.visible_at + 10 < self.here.engine.t:
                    self.sync(self.nodes.setdefault(instance.id, Node(instance)))
            if int(self.here.engine.t) % 60 < 5:
                assert self.tick()["failed"] == 0

    def sync(self, node: Node, *facts: dict[str, Any]) -> dict[str, Any]:
        told = list(facts)
        if "hello" not in node.said:
            told.insert(0, {"kind": "hello"})
        answered = self.door.event(node.event(told))
        assert answered["statusCode"] == 200, answered
        reply: dict[str, Any] = json.loads(answered["body"])
        if reply["role"] == "unknown":
            return reply
        node.said.add("hello")
        node.job = reply.get("job")
        if reply["role"] == "superseded" and node.instance.state is Run.RUNNING:
            if "freed" not in node.said:
                node.said.add("freed")
                self.door.event(node.event([{"kind": "freed", "value": "1"}]))
            self.site.stop(node.instance, ("Client.InstanceInitiatedShutdown", "Instance initiated shutdown"), 5.0)
        elif (number := reply.get("disk")) and self.holds(node) and f"disk {number}" not in node.said:
            node.said.add(f"disk {number}")
            self.door.event(node.event([{"kind": "attached", "value": str(number)}]))
        if (
            (doc := reply.get("doc"))
            and doc["state"] == "save_stop"
            and (word := f"released {doc['gen']}") not in node.said
        ):
            node.said.add(word)
            self.door.event(node.event([{"kind": "released", "gen": doc["gen"], "value": "10"}]))
        return reply

    def holds(self, node: Node) -> bool:
        return any(v.holder == node.instance.id and v.link == "attached" for v in self.site.volumes.values())

    def member(self, rank: int) -> Node:
        slot = self.record().ranks[rank].cur
        assert slot is not None and slot.uid is not None
        return self.nodes[slot.uid]

    @property
    def training(self) -> bool:
        record = self.record()
        return (
            all(rank.cur is not None and rank.cur.state is SlotState.MEMBER for rank in record.ranks)
            and not record.stop
        )

    def bridge(self, kind: str, instance: Instance, **detail: str) -> dict[str, Any]:
        return self.door.event(
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
        made = World(here, LambdaDoor(Runtime(settings, store)))
        made.door.runtime._options = changed(made.door.runtime.options(), settle_s=0.0, every=None)
        made.store.put(paths.STACK, msgspec.json.encode(replace(STACK, bucket=BUCKET, pools=(POOL,))))
        yield made


@pytest.fixture
def on_s3(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with begun(monkeypatch, None, s3_endpoint) as found:
        yield found


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with begun(monkeypatch, ObjectStore(ObstoreObjects(obstore.store.MemoryStore()))) as found:
        yield found


def begin(world: World, nodes: int = 2, **more: Any) -> None:
    spec = JobSpec(name="train", command=("train.py",), nodes=nodes, **more)
    world.job = submit(world.store, spec, None, world.here.engine.t).job
    assert world.tick() == {"jobs": 1, "failed": 0, "busy": False}
    world.run(60)


def test_a_gang_from_its_first_tick_to_its_end_leaves_nothing(on_s3: World) -> None:
    world = on_s3
    _the_handler_itself()
    begin(world)
    assert world.training, world.record().ranks
    assert {one.tags["sk-job"] for one in world.site.instances.values()} == {world.job}
    assert all(volume.holder for volume in world.site.volumes.values()) and len(world.site.volumes) == 2

    lost = world.member(1).instance
    world.site.interrupt(lost, 120.0)
    assert world.bridge("EC2 Spot Instance Interruption Warning", lost, **{"instance-action": "terminate"})["jobs"] == 1
    deadline = str(int(world.here.engine.t + 120))
    world.door.event(world.nodes[lost.id].event([{"kind": "notice", "value": deadline}]))
    world.run(180)
    assert world.training and world.member(1).instance.id != lost.id and lost.state is Run.TERMINATED
    assert len(world.site.volumes) == 2, "its disk went over"

    world.store.put_ask(world.job, Ask(id="cafe", kind=AskKind.CANCEL, at=world.here.engine.t, by="ann"))
    world.run(240)
    record = world.record()
    assert (record.phase, record.outcome) == (Phase.DONE, Outcome.CANCELLED)
    assert not world.site.volumes and not any(one.there for one in world.site.instances.values())
    assert world.store.read_alloc().value.grants == () and world.store.active_jobs() == ()


def test_the_events_of_a_machine_that_has_ended_bring_a_round(world: World) -> None:
    """By then no listing shows it: it is asked for by its id."""
    begin(world)
    lost = world.member(0).instance
    attempts = world.record().ranks[0].top
    world.site.end(lost)
    world.door._known.clear()  # another process takes the event
    assert world.bridge("EC2 Instance State-change Notification", lost, state="terminated")["jobs"] == 1
    assert world.record().ranks[0].top == attempts + 1
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


def test_where_there_is_no_spot_it_waits_or_buys_as_it_may(world: World) -> None:
    world.site.market.capacity = lambda zone, spot: 0 if spot else None
    begin(world)
    world.run(300)
    assert world.training
    assert {slot.model for rank in world.record().ranks if (slot := rank.cur)} == {Model.ON_DEMAND}


def test_nobody_but_a_node_of_the_stack_is_heard(world: World) -> None:
    begin(world)
    node = world.member(0)
    event = node.event([{"kind": "exit", "gen": 1, "value": "0"}])
    event["requestContext"]["authorizer"]["iam"]["userArn"] = (
        f"arn:aws:sts::{OWNER}:assumed-role/admin/{node.instance.id}"
    )
    assert world.door.event(event)["statusCode"] == 401
    event = node.event([])
    del event["requestContext"]["authorizer"]
    assert world.door.event(event)["statusCode"] == 401


def test_a_stack_that_makes_no_sense_is_an_alarm_and_a_failed_tick(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.store.put(paths.STACK, b"{")
    with pytest.raises(CorruptError):
        world.tick()
    assert any("ALARM" in line.getMessage() and paths.STACK in line.getMessage() for line in caplog.records)


def _the_handler_itself() -> None:
    """With the settings that Lambda gives it in its environment."""
    lambda_._door.cache_clear()
    try:
        assert lambda_.handler(dict(TICK)) == {"jobs": 0, "failed": 0, "busy": False}
    finally:
        lambda_._door.cache_clear()
