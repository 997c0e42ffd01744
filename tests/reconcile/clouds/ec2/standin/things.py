"""What an EC2 region holds: plain records. ``site.py`` moves them through their states, ``verbs.py`` shows them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import Enum
from typing import Any

OWNER = "123456789012"
BLOCK = 10**9  # bytes; EBS has blocks of 512 KiB, and tells their size


class Run(str, Enum):
    """pending -> running -> shutting-down -> terminated (listed for an hour); pending -> shutting-down, terminated."""

    PENDING = "pending"
    RUNNING = "running"
    SHUTTING_DOWN = "shutting-down"
    TERMINATED = "terminated"


CODE = {Run.PENDING: 0, Run.RUNNING: 16, Run.SHUTTING_DOWN: 32, Run.TERMINATED: 48}


class Vol(str, Enum):
    """creating -> available <-> in-use; available -> deleted; creating -> error."""

    CREATING = "creating"
    AVAILABLE = "available"
    IN_USE = "in-use"
    ERROR = "error"


@dataclass
class Template:
    """A launch template, by its versions: what each says (RunInstances' own parameters)."""

    id: str
    versions: dict[str, dict[str, Any]]
    default: str = "1"

    def spot(self, version: str) -> bool:
        return self.versions[version].get("InstanceMarketOptions", {}).get("MarketType") == "spot"


@dataclass(frozen=True)
class Reserved:
    """A targeted capacity reservation, or a capacity block."""

    id: str
    zone: str
    kind: str
    count: int
    block: bool = False
    active: bool = True


@dataclass
class Instance:
    id: str
    zone: str
    subnet: str
    spot: bool
    kind: str
    tags: dict[str, str]
    token: str
    address: str
    launched: float
    visible_at: float
    group: str = ""
    state: Run = Run.PENDING
    reason: tuple[str, str] = ("", "")
    ended: float = 0.0
    stopped: float = 0.0  # when it began to go down
    notice: float | None = None
    boot: dict[str, dict[str, str]] = field(default_factory=dict)  # tags of what came with it, by kind
    reservation: Reserved | None = None

    @property
    def there(self) -> bool:
        return self.state in (Run.PENDING, Run.RUNNING)


@dataclass
class Volume:
    id: str
    zone: str
    size: int
    kind: str
    tags: dict[str, str]
    token: str
    created: float
    visible_at: float
    snapshot: str = ""
    encrypted: bool = False
    key: str = ""
    state: Vol = Vol.CREATING
    holder: str = ""  # instance id
    device: str = ""
    link: str = ""  # attaching | attached | detaching
    contents: object = None  # what a simulation keeps on it
    blocks: dict[int, int] = field(default_factory=dict)  # number of each written block -> how often it was written


@dataclass
class Snapshot:
    id: str
    volume: str
    size: int
    tags: dict[str, str]
    started: float
    visible_at: float
    state: str = "pending"
    contents: object = None
    key: str = ""  # which encrypts it
    copied: bool = False  # from another region
    blocks: dict[int, int] = field(default_factory=dict)
    origin: str = ""  # the volume whose data it holds, of a copy too
    torn: bool = False  # the volume was attached when it was taken


def at(seconds: float) -> datetime:
    return datetime.fromtimestamp(int(seconds), UTC)


def tag_list(tags: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"Key": key, "Value": value} for key, value in tags.items()]


def show_instance(one: Instance) -> dict[str, Any]:
    """As DescribeInstances and RunInstances tell it; the fields that clients live on."""
    told: dict[str, Any] = {
        "InstanceId": one.id,
        "InstanceType": one.kind,
        "State": {"Code": CODE[one.state], "Name": one.state.value},
        "StateTransitionReason": _transition(one),
        "LaunchTime": at(one.launched),
        "ClientToken": one.token,
        "Placement": {"AvailabilityZone": one.zone, "GroupName": one.group, "Tenancy": "default"},
        "Tags": tag_list(one.tags),
        "EbsOptimized": False,
    }
    if one.spot:
        told["InstanceLifecycle"] = "spot"
    if one.reservation is not None:
        uid = one.reservation.id
        told["CapacityReservationId"] = uid
        told["CapacityReservationSpecification"] = {"CapacityReservationTarget": {"CapacityReservationId": uid}}
        told |= {"InstanceLifecycle": "capacity-block", "CapacityBlockId": uid} if one.reservation.block else {}
    if one.reason[0]:
        told["StateReason"] = {"Code": one.reason[0], "Message": one.reason[1]}
    if one.state is not Run.TERMINATED:
        told |= {"PrivateIpAddress": one.address, "SubnetId": one.subnet}
    return told


def _transition(one: Instance) -> str:
    """With its time where a call or the market ended it; of other ends nobody has seen what EC2 says."""
    by = {"Client.UserInitiatedShutdown": "User", "Server.SpotInstanceTermination": "Service"}.get(one.reason[0])
    when = one.stopped or one.ended
    return f"{by} initiated ({at(when):%Y-%m-%d %H:%M:%S} GMT)" if by and when else ""


def show_volume(one: Volume) -> dict[str, Any]:
    told: dict[str, Any] = {
        "VolumeId": one.id,
        "AvailabilityZone": one.zone,
        "Size": one.size,
        "VolumeType": one.kind,
        "State": one.state.value,
        "CreateTime": at(one.created),
        "Encrypted": one.encrypted,
        "SnapshotId": one.snapshot,
        "Tags": tag_list(one.tags),
        "Attachments": [show_attachment(one)] if one.holder else [],
    }
    return told


def show_attachment(one: Volume) -> dict[str, Any]:
    return {
        "VolumeId": one.id,
        "InstanceId": one.holder,
        "Device": one.device,
        "State": one.link,
        "DeleteOnTermination": False,
    }


def show_snapshot(one: Snapshot) -> dict[str, Any]:
    return {
        "SnapshotId": one.id,
        "VolumeId": one.volume,
        "VolumeSize": one.size,
        "FullSnapshotSizeInBytes": len(one.blocks) * BLOCK,
        "State": one.state,
        "StartTime": at(one.started),
        "OwnerId": OWNER,
        "Progress": "100%" if one.state == "completed" else "37%",
        "Tags": tag_list(one.tags),
    }
