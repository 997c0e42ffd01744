"""The actions on EC2, each by one call.

A launch gives name, tags, placement and subnet; everything else comes from the launch template that Pulumi declared.
EC2's calls need ids, and a name is only a tag, so a volume's id is first looked up by its name. A launch that
is repeated with its ``ClientToken`` makes no second machine: for more than a day after the first one is gone, EC2 still
answers with the first one (rule 7 of ``docs/protocol.md``). A snapshot has no token, so a search for its name comes
first. EC2 sometimes does not show a new resource for seconds, so its answer "not found" means "gone" only if the
resource is old.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from spotkeeper.clock import Clock
from spotkeeper.contract import codec, names
from spotkeeper.contract.cloud import (
    AttachDisk,
    CreateDisk,
    CreateSnapshot,
    DeleteDisk,
    DeleteSnapshot,
    DeleteVm,
    DetachDisk,
    InsertVm,
    ResultKind,
)
from spotkeeper.contract.stack import StackState
from spotkeeper.reconcile.clouds.base import Meaning
from spotkeeper.reconcile.clouds.ec2 import schema
from spotkeeper.reconcile.clouds.ec2.api import Api, Ec2RefusedError
from spotkeeper.reconcile.clouds.ec2.errors import GONE, classify
from spotkeeper.reconcile.clouds.ec2.listing import pages, snapshots
from spotkeeper.reconcile.clouds.ec2.schema import (
    THERE,
    InstanceIn,
    Instances,
    Reservation,
    SnapshotIn,
    VolumeIn,
    Volumes,
    by_tag,
)
from spotkeeper.reconcile.clouds.http_client import NoAnswerError

DEVICE = "/dev/sdf"  # no template uses this name; the agent finds the volume by its id
OLD_S = 120.0  # a resource of this age is visible: if it is not found, it is gone


class Ec2Verbs:
    """The implementation of :class:`~spotkeeper.reconcile.clouds.base.Verbs` on EC2.

    Raises (all):
        Ec2RefusedError: EC2 refused the call.
    """

    def __init__(self, stack: StackState, api: Api, clock: Clock) -> None:
        self._stack = stack
        self._api = api
        self._clock = clock
        self._volumes: dict[tuple[str, str], tuple[str, ...]] = {}  # (name, zone) -> ids, as last seen

    def remember(self, volumes: Iterable[VolumeIn]) -> None:
        """Remember the ids of listed volumes by name, since each lookup by the tag ``Name`` costs a call."""
        found: dict[tuple[str, str], tuple[str, ...]] = {}
        for item in volumes:
            name = next((tag.value for tag in item.tags if tag.key == schema.NAME), "")
            if item.state in THERE:
                key = (name, item.availability_zone)
                found[key] = (*found.get(key, ()), item.volume_id)
        self._volumes = found

    def insert_vm(self, action: InsertVm, ends: float) -> Meaning:
        """Launch a machine, at most one per attempt. If EC2 answers with a dead machine, the result is ``DEAD_KEY``."""
        pool = self._stack.pool(action.pool)
        if pool is None or not pool.templates.get(action.model.template):
            return ResultKind.PERMANENT, f"pool {action.pool!r} has no {action.model.template} template"
        answer = self._api.again("run_instances", schema.launch(self._stack, pool, action), ends)
        made = codec.convert(answer, Reservation).instances
        if len(made) != 1:
            return ResultKind.AMBIGUOUS, f"EC2 launched {len(made)} machines instead of one"
        return self._launched(made[0], ends)

    def _launched(self, made: InstanceIn, ends: float) -> Meaning:
        if self._is_old(made.launch_time):
            query: dict[str, object] = {"InstanceIds": [made.instance_id]}
            try:
                found = codec.convert(self._api.once("describe_instances", query, ends), Instances)
            except Ec2RefusedError as error:
                if error.code in GONE:
                    return ResultKind.DEAD_KEY, f"machine {made.instance_id} of this client token no longer exists"
                raise
            made = next((item for one in found.reservations for item in one.instances), made)
        if made.state.name in (schema.TERMINATED, "shutting-down"):
            return ResultKind.DEAD_KEY, f"machine {made.instance_id} of this client token is {made.state.name}"
        return ResultKind.ACCEPTED, made.instance_id

    def delete_vm(self, action: DeleteVm, ends: float) -> Meaning:
        return self._api.gone("terminate_instances", {"InstanceIds": [action.uid]}, ends)

    def create_disk(self, action: CreateDisk, ends: float) -> Meaning:
        pool = self._stack.pool(action.pool)
        if pool is None:
            return ResultKind.PERMANENT, f"no pool {action.pool!r} in the stack"
        source = None
        if action.snapshot is not None:
            shots = self._shots(action.snapshot, ends)
            if not shots:
                return ResultKind.AMBIGUOUS, f"the snapshot {action.snapshot} does not exist, or is not visible yet"
            source = shots[0].snapshot_id
        try:
            answer = self._api.again("create_volume", schema.volume(self._stack, pool, action, source), ends)
        except Ec2RefusedError as error:
            # The pool was changed since. The disk may exist, with data, although the listing lacks it.
            name = names.disk_name(self._stack.stack, action.job, action.node, action.number)
            if classify(error.code, error.status) is ResultKind.DEAD_KEY and self._found(name, action.zone, ends):
                return ResultKind.ACCEPTED, "is there already"
            raise
        return self._created(codec.convert(answer, VolumeIn), ends)

    def _created(self, made: VolumeIn, ends: float) -> Meaning:
        """Return the result of a request to create a disk.

        DEAD_KEY, so that the next request uses another client token, only if this token's disk was certainly not
        created, or no longer exists.
        """
        if self._is_old(made.create_time):
            try:
                found = codec.convert(
                    self._api.once("describe_volumes", {"VolumeIds": [made.volume_id]}, ends), Volumes
                )
            except Ec2RefusedError as error:
                if error.code in GONE:
                    return ResultKind.DEAD_KEY, f"disk {made.volume_id} of this client token no longer exists"
                raise
            made = next(iter(found.volumes), made)
        if made.state == "error":
            self._api.gone("delete_volume", {"VolumeId": made.volume_id}, ends)
        if made.state not in THERE:
            return ResultKind.DEAD_KEY, f"disk {made.volume_id} of this client token is {made.state}"
        return ResultKind.ACCEPTED, made.volume_id

    def attach_disk(self, action: AttachDisk, ends: float) -> Meaning:
        found = self._ids(action.disk, action.zone, ends)
        if not found:
            return ResultKind.IN_USE, f"the disk {action.disk} does not exist, or is not visible yet"
        query = {"VolumeId": found[0], "InstanceId": action.vm_uid, "Device": DEVICE}
        self._api.once("attach_volume", query, ends)
        return ResultKind.ACCEPTED, ""

    def detach_disk(self, action: DetachDisk, ends: float) -> Meaning:
        for found in self._ids(action.disk, action.zone, ends):
            try:
                self._api.once("detach_volume", {"VolumeId": found, "InstanceId": action.vm_uid}, ends)
            except Ec2RefusedError as error:
                if error.code not in (*GONE, "IncorrectState", "InvalidAttachment.NotFound"):
                    raise
                return ResultKind.ACCEPTED, "was not attached"
        return ResultKind.ACCEPTED, ""

    def delete_disk(self, action: DeleteDisk, ends: float) -> Meaning:
        for found in self._ids(action.disk, action.zone, ends):
            self._api.gone("delete_volume", {"VolumeId": found}, ends)
        return ResultKind.ACCEPTED, ""

    def create_snapshot(self, action: CreateSnapshot, ends: float) -> Meaning:
        stack = self._stack.stack
        for shot in self._shots(names.disk_name(stack, action.job, action.node, action.copy), ends, failed=True):
            if shot.state != "error":
                return ResultKind.ACCEPTED, "is there already"
            self._api.gone("delete_snapshot", {"SnapshotId": shot.snapshot_id}, ends)
        source = names.disk_name(stack, action.job, action.node, action.number)
        found = self._ids(source, action.zone, ends)
        if not found:
            return ResultKind.IN_USE, f"the disk {source} does not exist, or is not visible yet"
        self._api.once("create_snapshot", schema.snapshot_of(stack, action, found[0]), ends)
        return ResultKind.ACCEPTED, ""

    def delete_snapshot(self, action: DeleteSnapshot, ends: float) -> Meaning:
        for shot in self._shots(action.name, ends, failed=True):
            self._api.gone("delete_snapshot", {"SnapshotId": shot.snapshot_id}, ends)
        return ResultKind.ACCEPTED, ""

    # -- by name

    def _ids(self, name: str, zone: str, ends: float) -> tuple[str, ...]:
        """Return the ids of volumes of this name (normally one), from the last listing or a new lookup."""
        return self._volumes.get((name, zone)) or self._found(name, zone, ends)

    def _found(self, name: str, zone: str, ends: float) -> tuple[str, ...]:
        query = by_tag(self._stack.stack, Name=name, availability_zone=zone)
        found = pages(self._api, Volumes, query, ends)
        return tuple(item.volume_id for page in found for item in page.volumes if item.state in THERE)

    def _shots(self, name: str, ends: float, failed: bool = False) -> list[SnapshotIn]:
        """Return the snapshots of this name, oldest first; with ``failed``, failed snapshots too.

        Raises:
            NoAnswerError: the list failed.
        """
        found = snapshots(self._api, self._stack.stack, ends, Name=name)
        if found is None:
            raise NoAnswerError(f"snapshots named {name}")
        return sorted((item for item in found if failed or item.state != "error"), key=lambda item: item.age)

    def _is_old(self, made: datetime | None) -> bool:
        return made is not None and self._clock.now() - made.timestamp() > OLD_S
