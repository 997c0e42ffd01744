"""A destroy in bad company: rounds under way, marks left behind, lists that lack a zone, refusals, stacks that move."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from infra.drain import DrainProvider, opened
from infra.drain.emptying import SETTLE_S, DrainError, LaterError, Thing, empty
from spotkeeper.reconcile.store.objects import PLATFORM_S
from tests.infra.cloud import BUCKET, Cloud, props_of

JOB = {"sk-stack": "dev", "sk-job": "abcdefgh"}
AWS = {"stack": "dev", "bucket": "sk-123456789012-dev", "region": "us-east-1", "cloud": "aws"}


@pytest.fixture
def props(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr("infra.drain.gcp._PAUSE_LOCAL_S", 0.01)
    return {**props_of(cloud, "us-central1-a"), "cloud": "gcp"}


# --- rounds under way -----------------------------------------------------------------------


@dataclass
class Launching:
    """A stack in which a round was under way when the mark was written: what it makes comes later, by the clock."""

    later: dict[float, str]  # seconds after the mark -> a machine that is listed from then on
    unfinished: bool = True
    stack: str = "dev"
    bucket: str = "b"
    pause_s: float = 10.0
    settle_s: float = SETTLE_S
    now: float = 0.0
    there: set[str] = field(default_factory=set)
    mark: bool = False

    def owner(self) -> str | None:
        return "dev"

    def announce(self) -> None:
        self.mark = True

    def lift(self) -> None:
        self.mark = False

    def marked(self) -> bool:
        return self.mark

    def active(self) -> list[str]:
        return ["abcdefgh"] if self.unfinished else []

    def read(self, name: str) -> bytes | None:
        raise NotImplementedError(name)  # no drain of these tests reads an object

    def things(self) -> list[Thing]:
        for at in [at for at in self.later if at <= self.now]:
            self.there.add(self.later.pop(at))
        return [Thing("machine", name, name) for name in sorted(self.there)]

    def delete(self, things: Sequence[Thing]) -> None:
        self.there -= {thing.name for thing in things}

    def pause(self, seconds: float) -> None:
        self.now += seconds


def test_the_drain_waits_for_rounds_that_began_before_its_mark() -> None:
    """It read that there is no mark, and then launches a gang's machines one after the other until its time is up."""
    cloud = Launching({at: f"vm-{at}" for at in (5.0, 31.0, 58.0)})
    assert empty(cloud, pause=cloud.pause, now=lambda: cloud.now) == {"machine": 3}
    assert not cloud.there and not cloud.later
    assert SETTLE_S > PLATFORM_S, "a request, and then until the last machine is listed"


def test_a_removed_mark_is_written_again() -> None:
    cloud, marks = Launching({}), []

    def pause(seconds: float) -> None:
        marks.append(cloud.mark)
        cloud.lift()
        cloud.pause(seconds)

    empty(cloud, pause=pause, now=lambda: cloud.now)
    assert len(marks) > 2 and all(marks)


def test_a_short_outage_of_the_bucket_ends_no_drain() -> None:
    """Half of a destroy is the worst of places to stop at: the schedule is gone, and machines bill."""

    class Busy(Launching):
        asked = 0

        def announce(self) -> None:
            self.asked += 1
            if self.asked == 3:
                raise LaterError("503 Slow Down")
            super().announce()

    cloud = Busy({5.0: "vm"})
    assert empty(cloud, pause=cloud.pause, now=lambda: cloud.now) == {"machine": 1}
    assert cloud.asked > 3 and not cloud.there


def test_without_unfinished_jobs_the_drain_does_not_wait() -> None:
    cloud = Launching({}, unfinished=False)
    empty(cloud, pause=cloud.pause, now=lambda: cloud.now)
    assert cloud.now == cloud.pause_s, "two looks"


# --- what the bucket says ---------------------------------------------------------------------


def test_unfinished_jobs_are_those_with_a_marker(cloud: Cloud, props: dict[str, Any]) -> None:
    assert opened(props).active() == []
    cloud.things[f"{BUCKET}/active/abcdefgh"] = "1.0"
    assert opened(props).active() == ["abcdefgh"]


def test_up_after_an_interrupted_destroy_allows_inserts_again(cloud: Cloud, props: dict[str, Any]) -> None:
    """Its mark is under no resource that changed: an `up` would find nothing to do, and no machine ever start."""
    provider = DrainProvider()
    assert not provider.diff("drain/dev", props, props).changes
    opened(props).announce()
    assert provider.diff("drain/dev", props, props).changes
    provider.update("drain/dev", props, props)
    assert f"{BUCKET}/stack/drain" not in cloud.things
    assert not provider.diff("drain/dev", props, props).changes


def test_a_preview_without_bucket_rights_shows_no_change(
    props: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    nowhere = {**props, "storage": "http://127.0.0.1:9"}
    assert not DrainProvider().diff("drain/dev", nowhere, nowhere).changes
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/dev/null")
    assert not DrainProvider().diff("drain/dev", AWS, AWS).changes


def test_a_stack_cannot_change_cloud_name_project_or_region(props: dict[str, Any]) -> None:
    """From another name, project or region nobody would look for the machines and disks of its jobs any more."""
    check = DrainProvider().check
    assert check(props, props).failures == check({}, props).failures == []
    for name in ("stack", "project", "region"):
        (failure,) = check(props, {**props, name: "other"}).failures
        assert failure.property == name and "`pulumi destroy` first" in failure.reason
    assert [each.property for each in check(AWS, {**AWS, "region": "eu-west-1"}).failures] == ["region"]
    assert check(props, {**props, "zones": ["us-east1-b"], "bucket": "another"}).failures == []
    older = {name: value for name, value in props.items() if name != "cloud"}  # made before there were two
    assert check(older, props).failures == []


# --- lists and refusals -----------------------------------------------------------------------


def test_a_zone_that_does_not_answer_is_not_empty(
    cloud: Cloud, props: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a list over all zones Google leaves out the one that it cannot reach, and says so beside it."""
    listed, pauses = cloud._listed, list[float]()

    def partial(path: str) -> Any:
        silent = {"zones/us-central1-f": {"warning": {"code": "UNREACHABLE"}}} if not pauses else {}
        elsewhere = {"zones/asia-east1-a": {"warning": {"code": "UNREACHABLE"}}}
        return {**listed(path), **silent, **elsewhere} if "/aggregated/" in path else listed(path)

    monkeypatch.setattr(cloud, "_listed", partial)
    empty(opened(props), pause=pauses.append)
    assert len(pauses) == 2, "asked again, then clean twice; another region's outage is none of ours"


@dataclass
class Refusing:
    """botocore's EC2: what is there, and error codes (with their status) that the next calls of an operation meet."""

    there: dict[str, list[dict[str, Any]]]
    refuse: dict[str, list[tuple[str, int]]] = field(default_factory=dict)
    held: frozenset[str] = frozenset()  # ids that may not be terminated

    def __getattr__(self, operation: str) -> Callable[..., Any]:
        return lambda **params: self._call(operation, params)

    def get_paginator(self, operation: str) -> Any:
        pages = type("Pages", (), {})()
        pages.paginate = lambda **params: iter([self._call(operation, params)])
        return pages

    def _call(self, operation: str, params: dict[str, Any]) -> dict[str, Any]:
        from botocore.exceptions import ClientError

        codes = self.refuse.get(operation)
        refused = codes.pop(0) if codes else None
        if operation == "terminate_instances" and self.held & set(params["InstanceIds"]):
            refused = ("OperationNotPermitted", 400)
        if refused is not None:
            answer = {"Error": {"Code": refused[0], "Message": ""}, "ResponseMetadata": {"HTTPStatusCode": refused[1]}}
            raise ClientError(answer, operation)
        ids = {*params.get("InstanceIds", ()), params.get("VolumeId"), params.get("SnapshotId")}
        for kind, items in self.there.items():
            self.there[kind] = [item for item in items if not ids & _ids(item)]
        return {
            "describe_instances": {"Reservations": [{"Instances": self.there["machines"]}]},
            "describe_volumes": {"Volumes": self.there["disks"]},
            "describe_snapshots": {"Snapshots": self.there.get("snapshots", [])},
        }.get(operation, {})


def _ids(item: dict[str, Any]) -> set[str]:
    return {item[name] for name in ("InstanceId", "VolumeId", "SnapshotId") if name in item}


def refusing(machines: int, **changes: Any) -> Refusing:
    tags = [{"Key": key, "Value": value} for key, value in JOB.items()]
    running = [{"InstanceId": f"i-{at}", "State": {"Name": "running"}, "Tags": tags} for at in range(machines)]
    disks = [{"VolumeId": "vol-1", "State": "available", "Tags": tags}]
    return Refusing({"machines": running, "disks": disks}, **changes)


@pytest.fixture
def s3() -> Any:
    """A bucket that is there, and empty but for its descriptor."""

    class Bucket:
        def __getattr__(self, operation: str) -> Callable[..., Any]:
            body = type("Body", (), {"read": lambda self: b'{"stack": "dev"}'})()
            return lambda **_: {"Body": body}

    return Bucket()


def test_a_protected_machine_blocks_no_other_deletion(s3: Any) -> None:
    """One with termination protection refuses its whole call; what nobody asks for bills on."""
    from infra.drain.aws import Ec2

    ec2 = refusing(3, held=frozenset({"i-1"}))
    with pytest.raises(DrainError, match=r"i-1.*OperationNotPermitted"):
        empty(Ec2("dev", "b", {"us-east-1": ec2}, s3), pause=lambda _: None)
    assert [each["InstanceId"] for each in ec2.there["machines"]] == ["i-1"] and not ec2.there["disks"]


@pytest.mark.parametrize("leaving", [(), ("us-west-2",)])
def test_each_region_of_ec2_is_emptied_by_its_own_api(s3: Any, leaving: tuple[str, ...]) -> None:
    """Equal ids in both regions are two things. Of a region that leaves the stack, its snapshots go too."""
    from infra.drain.aws import Ec2

    both = {"us-east-1": refusing(2), "us-west-2": refusing(1)}
    for region, ec2 in both.items():
        tags = [{"Key": key, "Value": value} for key, value in JOB.items()]
        ec2.there["snapshots"] = [{"SnapshotId": "snap-1", "Tags": tags}]
        for disk in ec2.there["disks"]:
            disk["AvailabilityZone"] = f"{region}b"
        for machine in ec2.there["machines"]:
            machine["Placement"] = {"AvailabilityZone": f"{region}b"}
    gone = empty(Ec2("dev", "b", both, s3), pause=lambda _: None, regions=leaving)
    assert not any(both["us-west-2"].there.values())
    if leaving:
        assert gone == {"machine": 1, "disk": 1, "snapshot": 1}
        assert [len(items) for items in both["us-east-1"].there.values()] == [2, 1, 1]
    else:
        assert gone == {"machine": 3, "disk": 2, "snapshot": 2} and not any(both["us-east-1"].there.values())


@pytest.mark.parametrize("refused", [("RequestLimitExceeded", 503), ("Throttling", 400), ("InternalError", 500)])
def test_a_busy_ec2_is_retried(s3: Any, refused: tuple[str, int]) -> None:
    from infra.drain.aws import Ec2

    ec2, pauses = refusing(0, refuse={"delete_volume": [refused], "describe_instances": [refused]}), list[float]()
    assert empty(Ec2("dev", "b", {"us-east-1": ec2}, s3), pause=pauses.append) == {"disk": 1}
    assert len(pauses) == 4, "no look, a deletion that was put off, one that was not, clean twice"


@pytest.mark.parametrize(("refused", "kind"), [(("SlowDown", 503), LaterError), (("AccessDenied", 403), DrainError)])
def test_a_busy_s3_is_retried_and_a_refusal_is_not(refused: tuple[str, int], kind: type[DrainError]) -> None:
    from infra.drain.aws import Ec2

    ec2 = Ec2("dev", "b", {"us-east-1": refusing(0)}, refusing(0, refuse={"put_object": [refused]}))
    with pytest.raises(DrainError, match=refused[0]) as told:
        ec2.announce()
    assert told.type is kind
