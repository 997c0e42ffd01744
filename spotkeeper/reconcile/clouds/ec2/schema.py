"""EC2's requests and answers, as far as they are used, and their conversion to the contract's types. Pure."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime

from msgspec import Struct

from spotkeeper.contract import names
from spotkeeper.contract.cloud import (
    CreateDisk,
    CreateSnapshot,
    Disk,
    InsertVm,
    MachineTimes,
    Result,
    Vm,
    VmStatus,
)
from spotkeeper.contract.stack import Model, PoolState, StackState
from spotkeeper.reconcile.clouds.base import Addresses, label_number
from spotkeeper.reconcile.clouds.ec2.errors import REASONS, detail_of

log = logging.getLogger(__name__)

NAME = "Name"
COPIED = "vol-ffffffff"  # the volume of a snapshot that was copied from another region
Owned = tuple[str, int, int]  # job, node, number
TERMINATED = "terminated"  # such a machine is listed for about an hour and has no disks: it counts as gone
ENDED = re.compile(r"\((\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) (?:GMT|UTC)\)")
STATUS = {
    "pending": VmStatus.PENDING,
    "running": VmStatus.RUNNING,
    "shutting-down": VmStatus.STOPPING,
    "stopping": VmStatus.STOPPING,
    "stopped": VmStatus.DEAD,
    TERMINATED: VmStatus.DEAD,
}
THERE = ("creating", "available", "in-use")  # states of a usable volume; in other states it ends or has failed
HOLDING = ("attaching", "attached", "detaching", "busy")


class Part(Struct, frozen=True, gc=False, rename="pascal"):
    """The base class of the parts of an answer; fields that are not declared are ignored."""


class Tag(Part, frozen=True, gc=False):
    key: str = ""
    value: str = ""


class State(Part, frozen=True, gc=False):
    name: str = ""


class Placed(Part, frozen=True, gc=False):
    availability_zone: str = ""


class Reason(Part, frozen=True, gc=False):
    code: str = ""
    message: str = ""


class ReservationTarget(Part, frozen=True, gc=False):
    capacity_reservation_id: str = ""


class ReservationUse(Part, frozen=True, gc=False):
    """Which reserved capacity a launch named, whatever else the machine may use."""

    capacity_reservation_target: ReservationTarget = ReservationTarget()


class InstanceIn(Part, frozen=True, gc=False):
    instance_id: str
    state: State = State()
    tags: tuple[Tag, ...] = ()
    placement: Placed = Placed()
    private_ip_address: str = ""
    launch_time: datetime | None = None
    instance_lifecycle: str = ""
    capacity_reservation_specification: ReservationUse = ReservationUse()
    state_reason: Reason = Reason()
    state_transition_reason: str = ""  # "Service initiated (2026-11-21 10:00:00 GMT)"

    @property
    def status(self) -> VmStatus:
        """Return the machine's status; an unknown state counts as PENDING, neither running nor gone."""
        return STATUS.get(self.state.name, VmStatus.PENDING)

    @property
    def reservation(self) -> str | None:
        return self.capacity_reservation_specification.capacity_reservation_target.capacity_reservation_id or None

    @property
    def model(self) -> Model:
        """Return how a machine of a job was bought."""
        if self.instance_lifecycle == "spot":
            return Model.SPOT
        return Model.ON_DEMAND if self.reservation is None else Model.RESERVED

    @property
    def labels(self) -> dict[str, str]:
        return {tag.key: tag.value for tag in self.tags}


class Reservation(Part, frozen=True, gc=False):
    instances: tuple[InstanceIn, ...] = ()


class Attachment(Part, frozen=True, gc=False):
    instance_id: str = ""
    state: str = ""


class VolumeIn(Part, frozen=True, gc=False):
    volume_id: str
    state: str = ""
    availability_zone: str = ""
    tags: tuple[Tag, ...] = ()
    attachments: tuple[Attachment, ...] = ()
    create_time: datetime | None = None


class SnapshotIn(Part, frozen=True, gc=False):
    snapshot_id: str
    volume_id: str = ""
    state: str = ""
    tags: tuple[Tag, ...] = ()
    start_time: datetime | None = None
    full_snapshot_size_in_bytes: int = 0

    @property
    def complete(self) -> bool:
        return self.state == "completed"

    @property
    def copied(self) -> bool:
        """Whether it was copied from another region: EC2 names no real volume then."""
        return self.volume_id == COPIED

    @property
    def age(self) -> tuple[float, str]:
        """Return a key that sorts snapshots by age. The id decides if times are equal, so all processes sort alike."""
        return (to_time(self.start_time), self.snapshot_id)


# A missing list is not an empty one, so the field has no default: an answer without it is refused.
class Instances(Part, frozen=True):
    reservations: tuple[Reservation, ...]
    next_token: str = ""


class Volumes(Part, frozen=True):
    volumes: tuple[VolumeIn, ...]
    next_token: str = ""


class Snapshots(Part, frozen=True):
    snapshots: tuple[SnapshotIn, ...]
    next_token: str = ""


# -- requests


def launch(stack: StackState, pool: PoolState, action: InsertVm) -> dict[str, object]:
    """Return the request for one machine.

    A field of the request replaces the same field of the launch template: EC2 does not merge the two. So each field
    here is complete.

    Raises:
        KeyError: the pool has no template for this provisioning model in the zone's region.
    """
    key, abroad = stack.template_key(action.model, action.zone), pool.abroad.get(stack.region_of(action.zone))
    template, version = pool.templates[key], pool.template_versions.get(key, "$Default")
    tags = {**pool.tags, **(abroad.tags if abroad is not None else {})}
    name = names.vm_name(stack.stack, action.job, action.node, action.attempt)
    labels = names.labels(stack.stack, pool.name, action.job, action.node, action.attempt)
    kinds: tuple[str, ...] = ("instance", "volume", "network-interface")
    if action.model is Model.SPOT:
        kinds += ("spot-instances-request",)
    placement: dict[str, object] = {"AvailabilityZone": action.zone}
    if (group := pool.placement.get(action.zone)) and action.reservation is None:
        placement["GroupName"] = group
    return {
        "LaunchTemplate": {"LaunchTemplateId": template, "Version": version},
        "MinCount": 1,
        "MaxCount": 1,
        "ClientToken": names.idempotency_key(
            action.job, action.uid, "insert", action.node, action.attempt, action.zone
        ),
        "Placement": placement,
        "TagSpecifications": [
            tagged(kind, {**(tags if kind == "instance" else {}), **labels, NAME: name}) for kind in kinds
        ],
        **_network(pool, action.zone, pool.security_groups if abroad is None else abroad.security_groups),
        **_reserved(pool, action),
    }


def _reserved(pool: PoolState, action: InsertVm) -> dict[str, object]:
    """Return the fields of a launch into reserved capacity; {} for other launches.

    Such a launch names no placement group: EC2 looks for the reservation in that group, and a block is close together
    anyway.
    """
    if action.reservation is None:
        return {}
    found = pool.reservation(action.zone, action.reservation)
    target = {"CapacityReservationTarget": {"CapacityReservationId": action.reservation}}
    block = {"InstanceMarketOptions": {"MarketType": "capacity-block"}} if found is not None and found.block else {}
    return {"CapacityReservationSpecification": target, **block}


def _network(pool: PoolState, zone: str, groups: Sequence[str]) -> dict[str, object]:
    """Return the network fields of a launch request: the pool's interfaces, each with the zone's subnet.

    A pool without interfaces gets the field ``SubnetId`` instead, because EC2 refuses both together, or no field if
    the zone has no subnet.
    """
    subnet = pool.subnets.get(zone, "")
    if not pool.interfaces:
        return {"SubnetId": subnet} if subnet else {}
    return {
        "NetworkInterfaces": [
            {
                "NetworkCardIndex": one.card,
                "DeviceIndex": one.device,
                "InterfaceType": one.kind,
                "SubnetId": subnet,
                "Groups": list(groups),
                "DeleteOnTermination": True,
            }
            for one in pool.interfaces
        ]
    }


def volume(stack: StackState, pool: PoolState, action: CreateDisk, snapshot: str | None) -> dict[str, object]:
    """Return the request for a disk. ``snapshot``: the id of the snapshot that fills it; None: an empty disk."""
    name = names.disk_name(stack.stack, action.job, action.node, action.number)
    labels = names.labels(stack.stack, pool.name, action.job, action.node)
    more = {
        "Iops": pool.disk_iops,
        "Throughput": pool.disk_mbps,
        "KmsKeyId": pool.disk_key_in(stack.region_of(action.zone)) or None,
        "SnapshotId": snapshot,
    }
    return {
        "AvailabilityZone": action.zone,
        "Size": pool.disk_gb + action.more_gb,
        "VolumeType": pool.disk_type,
        "Encrypted": True,
        "ClientToken": names.idempotency_key(action.job, action.uid, "disk", action.node, action.number, action.zone),
        "TagSpecifications": [tagged("volume", {NAME: name, **labels})],
        **{name: value for name, value in more.items() if value is not None},
    }


def snapshot_of(stack: str, action: CreateSnapshot, volume_id: str) -> dict[str, object]:
    name = names.disk_name(stack, action.job, action.node, action.copy)
    labels = {names.LABEL_STACK: stack, names.LABEL_JOB: action.job, names.LABEL_NODE: str(action.node)}
    return {"VolumeId": volume_id, "TagSpecifications": [tagged("snapshot", {NAME: name, **labels})]}


def copy_of(shot: SnapshotIn, region: str, key: str) -> dict[str, object]:
    """Return the request for a copy of a snapshot of ``region``. ``key``: of the copy's region; "": its default key."""
    return {
        "SourceRegion": region,
        "SourceSnapshotId": shot.snapshot_id,
        "Encrypted": True,
        "TagSpecifications": [tagged("snapshot", {tag.key: tag.value for tag in shot.tags if ":" not in tag.key})],
        **({"KmsKeyId": key} if key else {}),
    }


def tagged(kind: str, tags: Mapping[str, str]) -> dict[str, object]:
    return {"ResourceType": kind, "Tags": [{"Key": key, "Value": value} for key, value in tags.items()]}


def by_tag(stack: str, **more: str) -> list[dict[str, object]]:
    """Return EC2's filters for the stack's resources. In ``more``, the key ``Name`` means the tag of that name."""
    found: list[dict[str, object]] = [{"Name": f"tag:{names.LABEL_STACK}", "Values": [stack]}]
    for name, value in more.items():
        key = f"tag:{NAME}" if name == NAME else name.replace("_", "-")
        found.append({"Name": key, "Values": [value]})
    return found


# -- answers


def to_vm(
    item: InstanceIn, stack: str, addresses: Addresses, disks: tuple[str, ...] = (), ended: bool = False
) -> Vm | None:
    """Return a listed machine; None if its tag or name is not the stack's, or it is gone. A static machine has no job.

    ``disks``: the names of its attached disks. ``ended``: return the machine even if it is terminated.
    """
    labels = item.labels
    if labels.get(names.LABEL_STACK) != stack or (item.state.name == TERMINATED and not ended):
        return None
    name, job = labels.get(NAME, ""), labels.get(names.LABEL_JOB, "")
    node, attempt = label_number(labels, names.LABEL_NODE), label_number(labels, names.LABEL_ATTEMPT)
    if job and name != names.vm_name(stack, job, node, attempt):
        log.warning("%s has labels of this stack that do not match its name: the machine is ignored", item.instance_id)
        return None
    status, address = item.status, item.private_ip_address
    if not addresses.holds(address):
        if status is VmStatus.RUNNING:
            log.warning("%s runs, but has no address in SPOTKEEPER_ADDRESSES: it does not count as running", name)
            status = VmStatus.PENDING
        address = ""
    return Vm(
        name=name,
        uid=item.instance_id,
        zone=item.placement.availability_zone,
        status=status,
        pool=labels.get(names.LABEL_POOL, ""),
        job=job,
        node=node if job else 0,
        attempt=attempt if job else 0,
        address=address,
        disks=disks,
        model=item.model if job else Model.STATIC,
        created=to_time(item.launch_time),
        reservation=item.reservation if job else None,
    )


def to_ran(item: InstanceIn, stack: str) -> MachineTimes | None:
    """Return when a machine started and ended, to the second; None if it has not ended or is not of this stack.

    The end is the time at which its shutdown began, because EC2 bills until then. EC2 reports this time in a text,
    such as "User initiated (TIME)" or "Service initiated (TIME)". If the text has no time, the end is 0.
    """
    name = item.labels.get(NAME, "")
    if item.labels.get(names.LABEL_STACK) != stack or item.state.name != TERMINATED or not name:
        return None
    told = ENDED.search(item.state_transition_reason)
    ended = to_time(datetime.fromisoformat(f"{told[1]}+00:00")) if told else 0.0
    return MachineTimes(name, item.placement.availability_zone, to_time(item.launch_time), ended)


def to_disk(item: VolumeIn, stack: str, names_of: Mapping[str, str]) -> Disk | None:
    """Return a node's data disk; None for boot volumes and static machines' disks, which have the tag too.

    ``names_of``: machines' names by id. The machines that use the disk are given by name, unknown machines by id.
    """
    owned = _owned(item.tags, stack)
    if owned is None or item.state not in THERE:
        return None
    users = tuple(
        names_of.get(one.instance_id, one.instance_id) for one in item.attachments if one.state in HOLDING
    ) or (("in-use",) if item.state == "in-use" else ())
    name = names.disk_name(stack, *owned)
    return Disk(name, item.availability_zone, *owned, users, item.state != "creating")


def by_name(items: Iterable[SnapshotIn], stack: str) -> dict[Owned, list[SnapshotIn]]:
    """Return a region's snapshots of each name, oldest first: two can exist, as they have no idempotency token."""
    found: dict[Owned, list[SnapshotIn]] = {}
    for item in sorted(items, key=lambda one: one.age):
        owned = _owned(item.tags, stack)
        if owned is not None and item.state != "error":
            found.setdefault(owned, []).append(item)
    return found


def to_result(item: InstanceIn, stack: str) -> Result | None:
    """Return why the launch of this machine failed after EC2 had accepted it.

    None: the launch did not fail, EC2 gives no reason that is known here, or the machine is not the stack's.
    """
    kind = REASONS.get(item.state_reason.code)
    owned = names.parse_vm_name(item.labels.get(NAME, ""))
    if item.state.name != TERMINATED or kind is None or owned is None or owned.stack != stack:
        return None
    action = InsertVm(
        job=owned.job,
        uid="",
        node=owned.node,
        attempt=owned.number,
        pool=item.labels.get(names.LABEL_POOL, ""),
        zone=item.placement.availability_zone,
        model=item.model,
        reservation=item.reservation,
    )
    said = detail_of(item.state_reason.code, item.state_reason.message)
    return Result(action, kind, said, to_time(item.launch_time))


def to_time(at: datetime | None) -> float:
    return at.timestamp() if at is not None else 0.0


def _owned(tags: Iterable[Tag], stack: str) -> Owned | None:
    """Return (job, node, number) of a node's disk or snapshot, if name and tags agree; else None."""
    labels = {tag.key: tag.value for tag in tags}
    owned = names.parse_disk_name(labels.get(NAME, ""))
    ours = owned is not None and owned.stack == stack == labels.get(names.LABEL_STACK)
    if owned is None or not ours or labels.get(names.LABEL_JOB) != owned.job:
        return None
    return owned.job, owned.node, owned.number
