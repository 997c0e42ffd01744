"""EC2's answers and requests, as far as we read and write them, and what they say in our words. Pure; calls nothing."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from datetime import datetime

from msgspec import Struct

from spotkeeper.reconcile.addresses import Addresses
from spotkeeper.reconcile.ec2_errors import REASONS, detail_of
from spotkeeper.spec import names
from spotkeeper.spec.cloud import CreateDisk, CreateSnapshot, Disk, InsertVm, Ran, Result, Snapshot, Vm, VmStatus
from spotkeeper.spec.model import Model
from spotkeeper.spec.stack import PoolState, StackState

log = logging.getLogger(__name__)

NAME = "Name"
TERMINATED = "terminated"  # listed for about an hour, and holds nothing: for us it is not there
ENDED = re.compile(r"\((\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) (?:GMT|UTC)\)")
STATUS = {
    "pending": VmStatus.PENDING,
    "running": VmStatus.RUNNING,
    "shutting-down": VmStatus.STOPPING,
    "stopping": VmStatus.STOPPING,
    "stopped": VmStatus.DEAD,
    TERMINATED: VmStatus.DEAD,
}
THERE = ("creating", "available", "in-use")  # of a volume: any other state is on its way out, or was never in
HOLDING = ("attaching", "attached", "detaching", "busy")


class Part(Struct, frozen=True, gc=False, rename="pascal"):
    """Part of an answer: the fields we read, everything else passed over."""


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


class InstanceIn(Part, frozen=True, gc=False):
    instance_id: str
    state: State = State()
    tags: tuple[Tag, ...] = ()
    placement: Placed = Placed()
    private_ip_address: str = ""
    launch_time: datetime | None = None
    instance_lifecycle: str = ""
    state_reason: Reason = Reason()
    state_transition_reason: str = ""  # "Service initiated (2026-11-21 10:00:00 GMT)"

    @property
    def status(self) -> VmStatus:
        """A state this version does not know proves nothing either way."""
        return STATUS.get(self.state.name, VmStatus.PENDING)

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
    state: str = ""
    tags: tuple[Tag, ...] = ()
    start_time: datetime | None = None

    @property
    def age(self) -> tuple[float, str]:
        """By which the first of several of one name is found, whoever looks."""
        return (to_time(self.start_time), self.snapshot_id)


# A list that does not come is no empty list, so the field has no default: an answer without it is refused.
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
    """One machine by its template. What differs from it is said whole: EC2's rules for merging are not relied on.

    Raises:
        KeyError: the pool has no template of this model.
    """
    template = pool.templates[action.model.value]
    version = pool.template_versions.get(action.model.value, "$Default")
    name = names.vm_name(stack.stack, action.job, action.rank, action.attempt)
    labels = names.labels(stack.stack, pool.name, action.job, action.rank, action.attempt)
    kinds: tuple[str, ...] = ("instance", "volume", "network-interface")
    if action.model is Model.SPOT:
        kinds += ("spot-instances-request",)
    placement: dict[str, object] = {"AvailabilityZone": action.zone}
    if group := pool.placement.get(action.zone):
        placement["GroupName"] = group
    return {
        "LaunchTemplate": {"LaunchTemplateId": template, "Version": version},
        "MinCount": 1,
        "MaxCount": 1,
        "ClientToken": names.idempotency_key(action.uid, "insert", action.rank, action.attempt, action.zone),
        "Placement": placement,
        "TagSpecifications": [
            tagged(kind, {**(pool.tags if kind == "instance" else {}), **labels, NAME: name}) for kind in kinds
        ],
        **_network(pool, action.zone),
    }


def _network(pool: PoolState, zone: str) -> dict[str, object]:
    """A subnet, or whole interfaces that name it; EC2 refuses both together."""
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
                "Groups": list(pool.security_groups),
                "DeleteOnTermination": True,
            }
            for one in pool.interfaces
        ]
    }


def volume(stack: StackState, pool: PoolState, action: CreateDisk, snapshot: str | None) -> dict[str, object]:
    """``snapshot``: id of the one that fills it."""
    name = names.disk_name(stack.stack, action.job, action.rank, action.number)
    labels = names.labels(stack.stack, pool.name, action.job, action.rank)
    more = {
        "Iops": pool.disk_iops,
        "Throughput": pool.disk_mbps,
        "KmsKeyId": pool.disk_key or None,
        "SnapshotId": snapshot,
    }
    return {
        "AvailabilityZone": action.zone,
        "Size": pool.disk_gb,
        "VolumeType": pool.disk_type,
        "Encrypted": True,
        "ClientToken": names.idempotency_key(action.uid, "disk", action.rank, action.number, action.zone),
        "TagSpecifications": [tagged("volume", {NAME: name, **labels})],
        **{name: value for name, value in more.items() if value is not None},
    }


def snapshot_of(stack: str, action: CreateSnapshot, volume_id: str) -> dict[str, object]:
    name = names.disk_name(stack, action.job, action.rank, action.copy)
    labels = {names.LABEL_STACK: stack, names.LABEL_JOB: action.job, names.LABEL_RANK: str(action.rank)}
    return {"VolumeId": volume_id, "TagSpecifications": [tagged("snapshot", {NAME: name, **labels})]}


def tagged(kind: str, tags: Mapping[str, str]) -> dict[str, object]:
    return {"ResourceType": kind, "Tags": [{"Key": key, "Value": value} for key, value in tags.items()]}


def by_tag(stack: str, **more: str) -> list[dict[str, object]]:
    """Filters: ours, and more of EC2's own by name (``availability_zone``; ``Name`` is the tag's)."""
    found: list[dict[str, object]] = [{"Name": f"tag:{names.LABEL_STACK}", "Values": [stack]}]
    for name, value in more.items():
        key = f"tag:{NAME}" if name == NAME else name.replace("_", "-")
        found.append({"Name": key, "Values": [value]})
    return found


# -- answers


def to_vm(
    item: InstanceIn, stack: str, addresses: Addresses, disks: tuple[str, ...] = (), ended: bool = False
) -> Vm | None:
    """Ours by label and name, and still there; or None. Without a job it is a static node.

    ``disks``: names of those that it holds. ``ended``: one that is terminated will do as well.
    """
    labels = item.labels
    if labels.get(names.LABEL_STACK) != stack or (item.state.name == TERMINATED and not ended):
        return None
    name, job = labels.get(NAME, ""), labels.get(names.LABEL_JOB, "")
    rank, attempt = _number(labels, names.LABEL_RANK), _number(labels, names.LABEL_ATTEMPT)
    if job and name != names.vm_name(stack, job, rank, attempt):
        log.warning("%s bears our labels for another machine: not ours, left alone", item.instance_id)
        return None
    status, address = item.status, item.private_ip_address
    if not addresses.holds(address):
        if status is VmStatus.RUNNING:
            log.warning("%s runs without an address of ours: nobody may be sent there, so it does not count", name)
            status = VmStatus.PENDING
        address = ""
    bought = Model.SPOT if item.instance_lifecycle == "spot" else Model.ON_DEMAND
    return Vm(
        name=name,
        uid=item.instance_id,
        zone=item.placement.availability_zone,
        status=status,
        pool=labels.get(names.LABEL_POOL, ""),
        job=job,
        rank=rank if job else 0,
        attempt=attempt if job else 0,
        address=address,
        disks=disks,
        model=bought if job else Model.STATIC,
        created=to_time(item.launch_time),
    )


def to_ran(item: InstanceIn, stack: str) -> Ran | None:
    """When a machine of ours that ended was on, to the second.

    EC2 says when it began to go down, which is where its bill ends: "User initiated (...)" after a call, "Service
    initiated (...)" after an interruption. It may also say nothing.
    """
    name = item.labels.get(NAME, "")
    if item.labels.get(names.LABEL_STACK) != stack or item.state.name != TERMINATED or not name:
        return None
    told = ENDED.search(item.state_transition_reason)
    ended = to_time(datetime.fromisoformat(f"{told[1]}+00:00")) if told else 0.0
    return Ran(name, item.placement.availability_zone, to_time(item.launch_time), ended)


def to_disk(item: VolumeIn, stack: str, names_of: Mapping[str, str]) -> Disk | None:
    """A rank's data disk, or None: boot volumes and static nodes' bear the stack's tag too.

    ``names_of``: machines' names by id. A holder that nobody lists is told by its id: it holds all the same.
    """
    owned = _owned(item.tags, stack)
    if owned is None or item.state not in THERE:
        return None
    users = tuple(
        names_of.get(one.instance_id, one.instance_id) for one in item.attachments if one.state in HOLDING
    ) or (("in-use",) if item.state == "in-use" else ())
    name = names.disk_name(stack, *owned)
    return Disk(name, item.availability_zone, *owned, users, item.state != "creating")


def to_snapshots(items: Iterable[SnapshotIn], stack: str) -> tuple[Snapshot, ...]:
    """One by name: the first that was made, since EC2 has no token for them and two rounds may have made one each."""
    first: dict[tuple[str, int, int], SnapshotIn] = {}
    for item in sorted(items, key=lambda one: one.age):
        owned = _owned(item.tags, stack)
        if owned is not None and item.state != "error":
            first.setdefault(owned, item)
    return tuple(
        Snapshot(names.disk_name(stack, *owned), *owned, item.state == "completed") for owned, item in first.items()
    )


def to_result(item: InstanceIn, stack: str) -> Result | None:
    """A launch of ours that was accepted and came to nothing, where EC2 says why; or None."""
    kind = REASONS.get(item.state_reason.code)
    owned = names.parse_vm_name(item.labels.get(NAME, ""))
    if item.state.name != TERMINATED or kind is None or owned is None or owned.stack != stack:
        return None
    spot = item.instance_lifecycle == "spot"
    action = InsertVm(
        job=owned.job,
        uid="",
        rank=owned.rank,
        attempt=owned.number,
        pool=item.labels.get(names.LABEL_POOL, ""),
        zone=item.placement.availability_zone,
        model=Model.SPOT if spot else Model.ON_DEMAND,
    )
    said = detail_of(item.state_reason.code, item.state_reason.message)
    return Result(action, kind, said, to_time(item.launch_time))


def to_time(at: datetime | None) -> float:
    """Unix seconds; 0 where there is none."""
    return at.timestamp() if at is not None else 0.0


def _owned(tags: Iterable[Tag], stack: str) -> tuple[str, int, int] | None:
    """Job, rank and number of a rank's disk (or of the snapshot for it), where name and tags agree."""
    labels = {tag.key: tag.value for tag in tags}
    owned = names.parse_disk_name(labels.get(NAME, ""))
    ours = owned is not None and owned.stack == stack == labels.get(names.LABEL_STACK)
    if owned is None or not ours or labels.get(names.LABEL_JOB) != owned.job:
        return None
    return owned.job, owned.rank, owned.number


def _number(labels: Mapping[str, str], name: str) -> int:
    text = labels.get(name, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else -1
