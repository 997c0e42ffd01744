"""The drain on EC2, through botocore with the operator's own credentials.

For an hour EC2 still lists an instance that has ended; the drain ignores it. An instance that shuts down is not
ignored, since its volumes are still in use.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from infra import naming
from infra.drain.emptying import ACTIVE_FOLDER, DRAIN_OBJECT, SETTLE_S, DrainError, LaterError, Thing
from spotkeeper.contract.names import LABEL_JOB, LABEL_STACK

_PAUSE_S = 10.0  # EC2's listings lag by seconds
_BATCH = 50  # instances per call; a single protected instance fails the whole call
_ALIVE = ("pending", "running", "shutting-down", "stopping", "stopped")
_GONE = ("InvalidInstanceID.NotFound", "InvalidVolume.NotFound", "InvalidSnapshot.NotFound")
_LATER = (
    "VolumeInUse",
    "InvalidSnapshot.InUse",
    "IncorrectState",
    "IncorrectInstanceState",
    "IncorrectSpotRequestState",
)
_THROTTLED = ("RequestLimitExceeded", "Throttling", "ThrottlingException", "RequestThrottled")
_NO_OBJECT = ("NoSuchBucket", "NoSuchKey", "404")


@dataclass(frozen=True)
class Ec2:
    """A client of AWS for the drain of one stack; implements :class:`infra.drain.emptying.DrainCloud`.

    ``ec2`` (one for each region) and ``s3`` are botocore clients.
    """

    stack: str
    bucket: str
    ec2: Mapping[str, Any] = field(repr=False)
    s3: Any = field(repr=False)
    pause_s: float = _PAUSE_S

    @classmethod
    def of(cls, props: Mapping[str, Any]) -> Ec2:
        """Return a client for the stack that a drain's properties name; an empty address means AWS's own."""
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError
        from botocore.session import Session

        patient = Config(retries={"max_attempts": 10, "mode": "standard"})  # many calls are throttled
        session, home = Session(profile=props.get("profile") or None), str(props["region"])

        def client(name: str, region: str) -> Any:
            return session.create_client(name, region, endpoint_url=props.get(name) or None, config=patient)

        try:
            ec2 = {str(region): client("ec2", region) for region in props.get("regions") or [home]}
            s3 = client("s3", home)
        except BotoCoreError as error:  # a missing profile
            raise DrainError(f"cannot call AWS: {error}") from None
        return cls(stack=str(props["stack"]), bucket=str(props["bucket"]), pause_s=_PAUSE_S, ec2=ec2, s3=s3)

    def owner(self) -> str | None:
        found = self.read(naming.POOLS_OBJECT)
        return None if found is None else str(json.loads(found).get("stack"))

    def announce(self) -> None:
        self._object("put_object", DRAIN_OBJECT, Body=b"{}")

    def lift(self) -> None:
        self._object("delete_object", DRAIN_OBJECT)

    def marked(self) -> bool:
        return self._object("head_object", DRAIN_OBJECT) is not None

    def active(self) -> list[str]:
        found, more = list[str](), dict[str, str]()
        while page := self._s3("list_objects_v2", Prefix=ACTIVE_FOLDER, **more):
            found += [item["Key"].removeprefix(ACTIVE_FOLDER) for item in page.get("Contents", ())]
            if not page.get("IsTruncated"):
                break
            more = {"ContinuationToken": page["NextContinuationToken"]}
        return found

    def read(self, name: str) -> bytes | None:
        found = self._object("get_object", name)
        return None if found is None else bytes(found["Body"].read())

    @property
    def settle_s(self) -> float:
        return SETTLE_S

    def things(self) -> Iterator[Thing]:
        for region in self.ec2:
            yield from self._things_in(region)

    def _things_in(self, region: str) -> Iterator[Thing]:
        filters = [{"Name": f"tag:{LABEL_STACK}", "Values": [self.stack]}]
        alive = {"Name": "instance-state-name", "Values": list(_ALIVE)}
        for page in self._pages(region, "describe_instances", Filters=[*filters, alive]):
            for instance in (each for group in page["Reservations"] for each in group["Instances"]):
                state = instance["State"]["Name"]
                if self._is_own(instance) and state in _ALIVE:
                    yield _thing("machine", region, instance["InstanceId"], instance, leaving=state == "shutting-down")
        for page in self._pages(region, "describe_volumes", Filters=filters):
            for volume in filter(self._is_own, page["Volumes"]):
                if volume["State"] != "deleted":
                    leaving = volume["State"] in ("in-use", "deleting")
                    yield _thing("disk", region, volume["VolumeId"], volume, leaving)
        for page in self._pages(region, "describe_snapshots", Filters=filters, OwnerIds=["self"]):
            for snapshot in filter(self._is_own, page["Snapshots"]):
                yield _thing("snapshot", region, snapshot["SnapshotId"], snapshot)

    def delete(self, things: Sequence[Thing]) -> None:
        """Request all deletions before raising the first refusal, so that one refusal leaves nothing else behind."""
        refused: list[DrainError] = []
        for region, ec2 in self.ec2.items():
            ids = [thing.where.split("/") for thing in things if thing.kind == "machine"]
            refused += self._terminate(ec2, [id_ for where, id_ in ids if where == region])
        for thing in things:
            region, id_ = thing.where.split("/")
            if thing.kind == "disk":
                refused += self._ask(self.ec2[region].delete_volume, VolumeId=id_)[1]
            elif thing.kind == "snapshot":
                refused += self._ask(self.ec2[region].delete_snapshot, SnapshotId=id_)[1]
        if refused:
            raise refused[0]

    def _terminate(self, ec2: Any, ids: list[str]) -> Iterator[DrainError]:
        """Terminate instances in batches. If one missing or protected instance fails a batch, terminate one by one."""
        for start in range(0, len(ids), _BATCH):
            batch = ids[start : start + _BATCH]
            taken, refused = self._ask(ec2.terminate_instances, InstanceIds=batch)
            if taken or len(batch) == 1:
                yield from refused
                continue
            for each in batch:
                yield from self._ask(ec2.terminate_instances, InstanceIds=[each])[1]

    def _ask(self, call: Callable[..., object], **params: object) -> tuple[bool, list[DrainError]]:
        """Make a call; return (whether AWS accepted it, a list with the error if AWS refused it permanently).

        (False, []): the resource is gone or busy, or AWS did not answer; the next listing shows which.
        """
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            call(**params)
        except ClientError as error:
            passes = _code(error) in (*_GONE, *_LATER) or _busy(error)
            return False, [] if passes else [DrainError(f"{next(iter(params.values()))}: {error}")]
        except BotoCoreError:  # no answer: the next listing shows the outcome
            return False, []
        return True, []

    def _pages(self, region: str, operation: str, **params: object) -> Iterator[dict[str, Any]]:
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            yield from self.ec2[region].get_paginator(operation).paginate(**params)
        except ClientError as error:
            raise (LaterError if _busy(error) else DrainError)(f"{operation}: {error}") from None
        except BotoCoreError as error:
            raise LaterError(f"{operation}: {error}") from None

    def _object(self, operation: str, key: str, **params: object) -> dict[str, Any] | None:
        return self._s3(operation, Key=key, **params)

    def _s3(self, operation: str, **params: object) -> dict[str, Any] | None:
        from botocore.exceptions import BotoCoreError, ClientError

        where = f"s3://{self.bucket}/{params.get('Key', params.get('Prefix'))}"
        try:
            answer: dict[str, Any] = getattr(self.s3, operation)(Bucket=self.bucket, **params)
        except ClientError as error:
            if _code(error) in _NO_OBJECT:
                return None
            raise (LaterError if _busy(error) else DrainError)(f"{where}: {error}") from None
        except BotoCoreError as error:
            raise LaterError(f"{where}: {error}") from None
        return answer

    def _is_own(self, item: Mapping[str, Any]) -> bool:
        """Return whether the tags show that the function made the item for this stack.

        The listing is filtered already, but a mistake would delete another team's machines.
        """
        tags = _tags(item)
        return tags.get(LABEL_STACK) == self.stack and bool(tags.get(LABEL_JOB))


def _tags(item: Mapping[str, Any]) -> dict[str, str]:
    return {tag["Key"]: tag["Value"] for tag in item.get("Tags", ())}


def _thing(kind: str, region: str, id_: str, item: Mapping[str, Any], leaving: bool = False) -> Thing:
    tags = _tags(item)
    zone = item.get("AvailabilityZone") or item.get("Placement", {}).get("AvailabilityZone")
    name = f"{id_} ({tags['Name']})" if tags.get("Name") else id_
    # A snapshot is in a region, which any of its zones tells.
    return Thing(kind, name, f"{region}/{id_}", leaving, tags[LABEL_JOB], zone or f"{region}a")


def _busy(error: Any) -> bool:
    """Return whether AWS still throttled or failed when botocore had used up its retries."""
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return status >= 500 or _code(error) in _THROTTLED


def _code(error: Any) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))
