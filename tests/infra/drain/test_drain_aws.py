"""The drain on EC2 empties a stack of what reconcile made, touches nothing else, and waits for what is on its way out.

Against moto, which keeps tags and terminates at once; what moto does not do (instances that shut down for a while,
volumes in use, refusals) comes from :class:`Slow`, botocore's own errors in front of it.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError
from botocore.loaders import create_loader

from infra.drain import DrainProvider
from infra.drain.aws import Ec2
from infra.drain.emptying import DrainError, empty

BUCKET, REGION, ZONE = "sk-123456789012-dev", "us-east-1", "us-east-1a"
LOADER = functools.cache(create_loader)  # each client would read EC2's description anew, which takes half a second
JOB = {"sk-stack": "dev", "sk-pool": "burst", "sk-job": "abcdefgh", "sk-node": "0"}


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    yield "http://{}:{}".format(*server.get_host_and_port())
    server.stop()


@pytest.fixture
def stack(server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ec2]:
    for name, value in (("AWS_ACCESS_KEY_ID", "x"), ("AWS_SECRET_ACCESS_KEY", "x"), ("AWS_ENDPOINT_URL", server)):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_CONFIG_FILE", "/dev/null")
    monkeypatch.setattr("infra.drain.aws._PAUSE_S", 0.01)
    monkeypatch.setattr("botocore.session.create_loader", LOADER)
    found = Ec2.of({"stack": "dev", "bucket": BUCKET, "region": REGION})
    found.s3.create_bucket(Bucket=BUCKET)
    found.s3.put_object(Bucket=BUCKET, Key="stack/pools.json", Body=json.dumps({"stack": "dev"}))
    yield found
    import requests

    requests.post(f"{server}/moto-api/reset", timeout=30)


PROPS = {"stack": "dev", "bucket": BUCKET, "region": REGION, "ec2": "", "s3": "", "cloud": "aws"}


def tagged(kind: str, tags: dict[str, str]) -> dict[str, Any]:
    return {"TagSpecifications": [{"ResourceType": kind, "Tags": [{"Key": k, "Value": v} for k, v in tags.items()]}]}


def machine(stack: Ec2, **tags: str) -> str:
    answer = stack.ec2[REGION].run_instances(ImageId="ami-12c6146b", MinCount=1, MaxCount=1, **tagged("instance", tags))
    return str(answer["Instances"][0]["InstanceId"])


def volume(stack: Ec2, **tags: str) -> str:
    return str(stack.ec2[REGION].create_volume(AvailabilityZone=ZONE, Size=10, **tagged("volume", tags))["VolumeId"])


def living(stack: Ec2) -> set[str]:
    """Whatever carries a tag of ours and bills."""
    found = {
        each["InstanceId"]
        for group in stack.ec2[REGION].describe_instances()["Reservations"]
        for each in group["Instances"]
        if each["State"]["Name"] != "terminated"
    }
    found |= {each["VolumeId"] for each in stack.ec2[REGION].describe_volumes()["Volumes"] if each.get("Tags")}
    snapshots = stack.ec2[REGION].describe_snapshots(OwnerIds=["self"])["Snapshots"]
    return found | {each["SnapshotId"] for each in snapshots if each.get("Tags")}


def drained(stack: Ec2) -> bool:
    return "stack/drain" in {each["Key"] for each in stack.s3.list_objects_v2(Bucket=BUCKET).get("Contents", ())}


def props(**changes: str) -> dict[str, Any]:
    return {**PROPS, **changes}


def test_destroy_empties_the_stack_and_nothing_else(stack: Ec2, capsys: pytest.CaptureFixture[str]) -> None:
    machine(stack, **JOB, Name="sk-dev-abcdefgh-n0000-a1")
    machine(stack, **{**JOB, "sk-node": "1"})
    disk = volume(stack, **JOB, Name="sk-dev-abcdefgh-n0000-d0")
    stack.ec2[REGION].create_snapshot(VolumeId=disk, **tagged("snapshot", JOB))
    kept = {
        machine(stack, **{"sk-stack": "dev", "sk-pool": "floor"}),
        volume(stack, **{"sk-stack": "dev", "sk-pool": "floor"}),
        machine(stack, **{**JOB, "sk-stack": "dev2"}),
        volume(stack, owner="ops"),
    }
    DrainProvider().delete("drain/dev", props())
    assert living(stack) == kept
    assert drained(stack)
    assert capsys.readouterr().err == "drain of dev: deleted 1 disk, 2 machines, 1 snapshot\n"


def test_the_profile_of_the_stack_wins_over_the_shells_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The drain deletes what bears the stack's tag in whatever account it is logged in to."""
    told = tmp_path / "config"
    told.write_text("[profile acme]\naws_access_key_id = ACME\naws_secret_access_key = x\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(told))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "SHELL")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")

    def keys(profile: str) -> set[str]:
        found = Ec2.of(props(profile=profile))
        return {client._request_signer._credentials.access_key for client in (*found.ec2.values(), found.s3)}

    assert keys("acme") == {"ACME"} and keys("") == {"SHELL"}
    with pytest.raises(DrainError, match="cannot call AWS: The config profile"):
        keys("nobody")


def test_a_foreign_stack_is_refused(stack: Ec2) -> None:
    theirs = machine(stack, **JOB)
    stack.s3.put_object(Bucket=BUCKET, Key="stack/pools.json", Body=json.dumps({"stack": "prod"}))
    with pytest.raises(DrainError, match="belongs to the stack 'prod', not to 'dev': nothing was deleted"):
        DrainProvider().delete("drain/dev", props())
    with pytest.raises(DrainError, match="drain/prod belongs to another stack than dev"):
        DrainProvider().delete("drain/prod", props())
    assert living(stack) == {theirs} and not drained(stack)


def test_a_stack_without_a_bucket_is_emptied_too(stack: Ec2) -> None:
    """A destroy that was cut off behind the bucket's deletion goes on."""
    machine(stack, **JOB)
    DrainProvider().delete("drain/dev", props(bucket="sk-123456789012-never"))
    assert living(stack) == set()


def test_a_stack_that_is_built_again_may_insert_again(stack: Ec2) -> None:
    stack.announce()
    assert drained(stack)
    assert DrainProvider().create(props()).id == "drain/dev"
    assert not drained(stack)
    DrainProvider().create(props())  # the usual case: there is none


@dataclass
class Slow:
    """EC2 in front of moto's. ``refuse``: operation -> error codes, one a call. ``dying``: for so many looks."""

    behind: Any
    refuse: dict[str, list[str]] = field(default_factory=dict)
    dying: int = 0
    calls: list[tuple[str, Any]] = field(default_factory=list)

    def __getattr__(self, operation: str) -> Any:
        def call(**params: Any) -> Any:
            self.calls.append((operation, params))
            if codes := self.refuse.get(operation):
                raise ClientError({"Error": {"Code": codes.pop(0), "Message": "said no"}}, operation)
            return getattr(self.behind, operation)(**params)

        return call

    def get_paginator(self, operation: str) -> Any:
        pages = self.behind.get_paginator(operation)
        if operation != "describe_instances":
            return pages
        return _Dying(self, pages)


@dataclass
class _Dying:
    slow: Slow
    pages: Any

    def paginate(self, **params: Any) -> Iterator[dict[str, Any]]:
        for page in self.pages.paginate(Filters=params["Filters"][:1]):
            for each in (each for group in page["Reservations"] for each in group["Instances"]):
                if each["State"]["Name"] == "terminated" and self.slow.dying:
                    self.slow.dying -= 1
                    each["State"]["Name"] = "shutting-down"
            yield page


def test_a_machine_that_shuts_down_is_waited_for_and_not_asked_twice(stack: Ec2) -> None:
    machine(stack, **JOB)
    slow, looks = Slow(stack.ec2[REGION], dying=3), []
    empty(Ec2("dev", BUCKET, {REGION: slow}, stack.s3), pause=looks.append)
    asked = [operation for operation, _ in slow.calls if operation == "terminate_instances"]
    assert asked == ["terminate_instances"]
    assert len(looks) == 1 + 3 + 1, "deleted, three times on its way out, clean twice"


def test_a_used_volume_is_deleted_after_a_later_listing(stack: Ec2) -> None:
    disk = volume(stack, **JOB)
    slow = Slow(stack.ec2[REGION], refuse={"delete_volume": ["VolumeInUse", "IncorrectState"]})
    assert empty(Ec2("dev", BUCKET, {REGION: slow}, stack.s3), pause=lambda _: None) == {"disk": 1}
    assert disk not in living(stack)


def test_a_missing_machine_blocks_no_other_deletion(stack: Ec2) -> None:
    """EC2 refuses a whole call for one id that it does not know any more."""
    machine(stack, **JOB)
    machine(stack, **JOB)
    slow = Slow(
        stack.ec2[REGION], refuse={"terminate_instances": ["InvalidInstanceID.NotFound", "InvalidInstanceID.NotFound"]}
    )
    empty(Ec2("dev", BUCKET, {REGION: slow}, stack.s3), pause=lambda _: None)
    assert living(stack) == set()
    assert [len(params["InstanceIds"]) for name, params in slow.calls if name == "terminate_instances"] == [2, 1, 1, 1]


def test_a_refused_deletion_shows_the_clouds_message(stack: Ec2) -> None:
    disk = volume(stack, **JOB)
    slow = Slow(stack.ec2[REGION], refuse={"delete_volume": ["UnauthorizedOperation"]})
    with pytest.raises(DrainError, match=rf"{disk}: .*UnauthorizedOperation.*said no"):
        empty(Ec2("dev", BUCKET, {REGION: slow}, stack.s3), pause=lambda _: None)


def test_no_message_contains_a_key(stack: Ec2) -> None:
    assert repr(stack) == f"Ec2(stack='dev', bucket='{BUCKET}', pause_s=0.01)"
