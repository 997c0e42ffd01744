"""Compute Engine's JSON, as far as it is used, and its conversion to the contract's types. Pure."""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Generic, TypeVar

import msgspec
from msgspec import Struct

from spotkeeper.contract import names
from spotkeeper.contract.cloud import (
    Action,
    CreateDisk,
    Disk,
    DiskSnapshot,
    InsertVm,
    MachineTimes,
    Result,
    Vm,
    VmStatus,
)
from spotkeeper.contract.stack import Model, PoolState, StackState
from spotkeeper.reconcile.clouds.base import Addresses, label_number
from spotkeeper.reconcile.clouds.gce.errors import OperationErrors, classify, detail_of

T = TypeVar("T")
log = logging.getLogger(__name__)

STATUS = {
    "PENDING": VmStatus.PENDING,
    "PROVISIONING": VmStatus.PENDING,
    "STAGING": VmStatus.PENDING,
    "RUNNING": VmStatus.RUNNING,
    "REPAIRING": VmStatus.REPAIRING,
    "PENDING_STOP": VmStatus.STOPPING,
    "STOPPING": VmStatus.STOPPING,
    "SUSPENDING": VmStatus.STOPPING,
    "DEPROVISIONING": VmStatus.STOPPING,
    "SUSPENDED": VmStatus.DEAD,
    "STOPPED": VmStatus.DEAD,
    "TERMINATED": VmStatus.DEAD,
}

SPECIFIC = "SPECIFIC_RESERVATION"
ENDINGS = ("delete", "compute.instances.preempted", "compute.instances.hostError")  # operations that end machines


class Part(Struct, frozen=True, gc=False, rename="camel"):
    """The base class of the parts of an answer; fields that are not declared are ignored."""


class Span(Part, frozen=True, gc=False):
    seconds: str | int = 0  # int64: a string in JSON


class Scheduling(Part, frozen=True, gc=False):
    provisioning_model: str = "STANDARD"
    max_run_duration: Span | None = None


class Affinity(Part, frozen=True, gc=False):
    """Which reservations a machine may use; ``values``: the name of the one, if it is specific."""

    consume_reservation_type: str = ""
    values: tuple[str, ...] = ()


class ScheduleStatus(Part, frozen=True, gc=False):
    termination_timestamp: str = ""  # set from RUNNING on if the machine's run is limited


class ResourceStatus(Part, frozen=True, gc=False):
    scheduling: ScheduleStatus = ScheduleStatus()


class Nic(Part, frozen=True, gc=False):
    network_ip: str = msgspec.field(default="", name="networkIP")


class Attached(Part, frozen=True, gc=False):
    source: str = ""
    boot: bool = False


class InstanceIn(Part, frozen=True, gc=False):
    name: str
    id: str
    status: str = ""
    labels: dict[str, str] = {}
    zone: str = ""
    creation_timestamp: str = ""
    last_start_timestamp: str = ""
    scheduling: Scheduling = Scheduling()
    resource_status: ResourceStatus = ResourceStatus()
    reservation_affinity: Affinity = Affinity()
    network_interfaces: tuple[Nic, ...] = ()
    disks: tuple[Attached, ...] = ()


class DiskIn(Part, frozen=True, gc=False):
    name: str
    status: str = ""
    labels: dict[str, str] = {}
    zone: str = ""
    users: tuple[str, ...] = ()


class SnapshotIn(Part, frozen=True):
    name: str
    status: str = ""
    labels: dict[str, str] = {}
    storage_bytes: str | int = 0  # int64: a string in JSON
    storage_locations: tuple[str, ...] = ()  # one: a region, or a multi-region such as "us"


class OperationIn(Part, frozen=True):
    name: str = ""
    status: str = ""
    operation_type: str = ""
    target_link: str = ""
    target_id: str = ""
    client_operation_id: str = ""
    http_error_status_code: int = 0
    insert_time: str = ""
    end_time: str = ""
    error: OperationErrors | None = None


class WarningIn(Part, frozen=True):
    code: str = ""


class Scope(Part, Generic[T], frozen=True):
    """One zone's part of an aggregated list. An answer lists either ``instances`` or ``disks``."""

    instances: tuple[T, ...] = ()
    disks: tuple[T, ...] = ()
    warning: WarningIn | None = None


class Aggregated(Part, Generic[T], frozen=True):
    items: dict[str, Scope[T]] = {}
    error: object = None  # a proxy's error with HTTP 200, which would look like an empty list
    next_page_token: str = ""
    unreachables: tuple[str, ...] = ()
    warning: WarningIn | None = None


class Page(Part, Generic[T], frozen=True):
    items: tuple[T, ...] = ()
    error: object = None
    next_page_token: str = ""
    warning: WarningIn | None = None


class Id(Part, frozen=True):
    id: str = ""


def instance_body(stack: str, pool: PoolState, action: InsertVm) -> dict[str, object]:
    """Return an insert's values that differ from the template's. ``labels`` is complete: it replaces the template's.

    A machine that names a reservation gets no placement policy: its policy must be that of the reservation, if any.
    """
    body: dict[str, object] = {
        "name": names.vm_name(stack, action.job, action.node, action.attempt),
        "labels": names.labels(stack, pool.name, action.job, action.node, action.attempt),
    }
    if action.reservation is not None:
        body["reservationAffinity"] = {
            "consumeReservationType": SPECIFIC,
            "key": "compute.googleapis.com/reservation-name",
            "values": [action.reservation],
        }
    elif policy := pool.placement.get(action.zone):
        body["resourcePolicies"] = [partial_url(policy)]
    return body


def disk_body(stack: StackState, pool: PoolState, action: CreateDisk) -> dict[str, object]:
    project = f"projects/{stack.project}"
    body: dict[str, object] = {
        "name": names.disk_name(stack.stack, action.job, action.node, action.number),
        "sizeGb": str(pool.disk_gb + action.more_gb),
        "type": f"{project}/zones/{action.zone}/diskTypes/{pool.disk_type}",
        "labels": names.labels(stack.stack, pool.name, action.job, action.node),
    }
    if pool.disk_iops is not None:
        body["provisionedIops"] = str(pool.disk_iops)
    if pool.disk_mbps is not None:
        body["provisionedThroughput"] = str(pool.disk_mbps)
    if action.snapshot:
        body["sourceSnapshot"] = f"{project}/global/snapshots/{action.snapshot}"
    return body


def to_vm(item: InstanceIn, stack: str, addresses: Addresses) -> Vm | None:
    """Return a listed machine; None if its label or name is not the stack's. A static machine has no job."""
    job = item.labels.get(names.LABEL_JOB, "")
    node, attempt = label_number(item.labels, names.LABEL_NODE), label_number(item.labels, names.LABEL_ATTEMPT)
    if job and item.name != names.vm_name(stack, job, node, attempt):
        log.warning("%s has labels of this stack that do not match its name: the machine is ignored", item.name)
        return None
    spot, uses = item.scheduling.provisioning_model == "SPOT", item.reservation_affinity
    reservation = next(iter(uses.values), None) if job and uses.consume_reservation_type == SPECIFIC else None
    bought = Model.SPOT if spot else Model.ON_DEMAND if reservation is None else Model.RESERVED
    # An unknown status counts as neither running nor gone.
    status = STATUS.get(item.status, VmStatus.PENDING)
    address = next((nic.network_ip for nic in item.network_interfaces), "")
    if not addresses.holds(address):
        if status is VmStatus.RUNNING:
            log.warning("%s runs, but has no address in SPOTKEEPER_ADDRESSES: it does not count as running", item.name)
            status = VmStatus.PENDING
        address = ""
    return Vm(
        name=item.name,
        uid=item.id,
        zone=last_part(item.zone),
        status=status,
        pool=item.labels.get(names.LABEL_POOL, ""),
        job=job,
        node=node if job else 0,
        attempt=attempt if job else 0,
        address=address,
        disks=tuple(last_part(disk.source) for disk in item.disks if not disk.boot and disk.source),
        model=bought if job else Model.STATIC,
        # Billing begins with RUNNING, at the start time; before that the machine is only requested.
        created=to_time(item.last_start_timestamp or item.creation_timestamp),
        ends=_end(item),
        reservation=reservation,
    )


def _end(item: InstanceIn) -> float | None:
    """Return when Compute Engine ends a machine of limited run time: the reported time, otherwise start + duration."""
    if told := to_time(item.resource_status.scheduling.termination_timestamp):
        return told
    span = item.scheduling.max_run_duration
    if span is None or not str(span.seconds).isdecimal():
        return None
    began = to_time(item.last_start_timestamp)
    return began + int(span.seconds) if began else None


def to_disk(item: DiskIn, stack: str) -> Disk | None:
    """Return a node's data disk; None for boot disks and static machines' disks, which have the label too."""
    owned = names.parse_disk_name(item.name)
    if owned is None or owned.stack != stack or item.labels.get(names.LABEL_JOB) != owned.job:
        return None
    users = tuple(last_part(user) for user in item.users)
    return Disk(item.name, last_part(item.zone), owned.job, owned.node, owned.number, users, item.status == "READY")


def to_snapshot(item: SnapshotIn, stack: str) -> DiskSnapshot | None:
    owned = names.parse_disk_name(item.name)
    if owned is None or owned.stack != stack or item.labels.get(names.LABEL_JOB) != owned.job:
        return None
    told = str(item.storage_bytes)
    gb = int(told) / 1e9 if told.isdecimal() else 0.0
    ready = item.status == "READY"
    regions = dict.fromkeys(item.storage_locations, ready)
    return DiskSnapshot(item.name, owned.job, owned.node, owned.number, ready, gb, regions)


def to_result(
    operation: OperationIn, stack: str, zone: str, asked: Mapping[str, InsertVm | CreateDisk]
) -> Result | None:
    """Return the result of an operation that failed to create a machine or disk of the stack; else None.

    ``asked``: this process's requests by idempotency key. Of another process's request only the resource's name and
    zone are known. The result's action then lacks the uid and the pool, and its provisioning model is a guess.
    """
    if operation.error is None or not operation.error.errors or not _is_key(operation.client_operation_id):
        return None
    status, errors = operation.http_error_status_code, operation.error.errors
    name = last_part(operation.target_link)
    action: Action
    if (vm := names.parse_vm_name(name)) and vm.stack == stack:
        action = InsertVm(vm.job, "", vm.node, vm.number, "", zone, Model.SPOT)
    elif (disk := names.parse_disk_name(name)) and disk.stack == stack:
        action = CreateDisk(disk.job, "", disk.node, disk.number, "", zone)
    else:
        return None
    action = asked.get(operation.client_operation_id, action)
    return Result(action, classify(status, errors), detail_of(status, errors), to_time(operation.insert_time))


def to_ran(operations: Iterable[OperationIn], stack: str, zone: str) -> tuple[MachineTimes, ...]:
    """Return the start and end times of the stack's machines that have ended.

    A machine's end is the end of the operation that deleted it. Google records a preemption at its beginning, so the
    machine's last seconds, at most 30, are billed but are not counted here.
    """
    began: dict[str, float] = {}
    over: dict[str, float] = {}
    for operation in operations:
        name, at = last_part(operation.target_link), to_time(operation.end_time)
        owned = names.parse_vm_name(name)
        if not at or operation.error is not None or owned is None or owned.stack != stack:
            continue
        if operation.operation_type == "insert":
            began[name] = at
        elif operation.operation_type in ENDINGS:
            over[name] = min(at, over.get(name, at))
    return tuple(MachineTimes(name, zone, began.get(name, 0.0), at) for name, at in over.items())


def to_time(text: str) -> float:
    if not text:  # true for most of 10,000 machines; an exception for each would be slow
        return 0.0
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return 0.0


def _is_key(text: str) -> bool:
    try:
        return uuid.UUID(text).version == 5
    except ValueError:
        return False


def is_partial(warning: WarningIn | None) -> bool:
    return warning is not None and warning.code != "NO_RESULTS_ON_PAGE"


def by_label(stack: str) -> str:
    return f'labels.{names.LABEL_STACK} = "{stack}"'


def last_part(link: str) -> str:
    return link.rstrip("/").rpartition("/")[2]


def partial_url(link: str) -> str:
    """Return the part ``projects/...`` of a self link, without the endpoint."""
    found = re.search(r"projects/.*\Z", link)
    return found[0] if found else link
