"""What reconcile does on EC2: a call for each kind of action.

A launch says its name, tags, placement and subnet; everything else comes from the launch template that Pulumi
declared. What is hard about it: names are tags, so a volume is found by its name first; a launch is known by its
``ClientToken`` for a day and more after its machine is gone, and then is that dead machine (rule 7); a snapshot has
no token, so it is looked for before it is made; what was just made may not be visible yet, so "not found" proves
nothing unless it is old.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from spotkeeper.clock import Clock
from spotkeeper.reconcile import ec2_wire
from spotkeeper.reconcile.adapter import Meaning
from spotkeeper.reconcile.ec2_api import Api, RefusedError
from spotkeeper.reconcile.ec2_calls import Calls
from spotkeeper.reconcile.ec2_errors import GONE, classify
from spotkeeper.reconcile.ec2_lists import pages, snapshots
from spotkeeper.reconcile.ec2_wire import (
    THERE,
    InstanceIn,
    Instances,
    Reservation,
    SnapshotIn,
    VolumeIn,
    Volumes,
    by_tag,
)
from spotkeeper.reconcile.wire import NoAnswerError
from spotkeeper.spec import codec, names
from spotkeeper.spec.cloud import (
    AttachDisk,
    Class,
    CreateDisk,
    CreateSnapshot,
    DeleteDisk,
    DeleteSnapshot,
    DeleteVm,
    DetachDisk,
    InsertVm,
)
from spotkeeper.spec.stack import StackState

DEVICE = "/dev/sdf"  # no template's own; the agent looks for the volume, not for this name
OLD_S = 120.0  # what was made so long ago is visible, so if it cannot be found it is gone


class Ec2Verbs:
    """:class:`~spotkeeper.reconcile.adapter.Verbs`.

    Raises (all):
        RefusedError: EC2 said no to something that it usually does.
    """

    def __init__(self, stack: StackState, api: Api, clock: Clock) -> None:
        self._stack = stack
        self._api, self._calls = api, Calls(api)
        self._clock = clock
        self._volumes: dict[tuple[str, str], tuple[str, ...]] = {}  # (name, zone) -> ids, as last seen

    def remember(self, volumes: Iterable[VolumeIn]) -> None:
        """Names are tags: an id by its name costs a call, but for what has just been listed."""
        found: dict[tuple[str, str], tuple[str, ...]] = {}
        for item in volumes:
            name = next((tag.value for tag in item.tags if tag.key == ec2_wire.NAME), "")
            if item.state in THERE:
                key = (name, item.availability_zone)
                found[key] = (*found.get(key, ()), item.volume_id)
        self._volumes = found

    def insert_vm(self, action: InsertVm, ends: float) -> Meaning:
        """The token makes it one machine however often it is asked for; what it is now says if it is used up."""
        pool = self._stack.pool(action.pool)
        if pool is None or not pool.templates.get(action.model.value):
            return Class.PERMANENT, f"pool {action.pool!r} has no {action.model.value} template"
        answer = self._calls.again("run_instances", ec2_wire.launch(self._stack, pool, action), ends)
        made = codec.convert(answer, Reservation).instances
        if len(made) != 1:
            return Class.AMBIGUOUS, f"{len(made)} machines for one"
        return self._launched(made[0], ends)

    def _launched(self, made: InstanceIn, ends: float) -> Meaning:
        if self._is_old(made.launch_time):
            query: dict[str, object] = {"InstanceIds": [made.instance_id]}
            try:
                found = codec.convert(self._calls.once("describe_instances", query, ends), Instances)
            except RefusedError as error:
                if error.code in GONE:
                    return Class.DEAD_KEY, f"the token's {made.instance_id} is gone"
                raise
            made = next((item for one in found.reservations for item in one.instances), made)
        if made.state.name in (ec2_wire.TERMINATED, "shutting-down"):
            return Class.DEAD_KEY, f"the token's {made.instance_id} is {made.state.name}"
        return Class.ACCEPTED, made.instance_id

    def delete_vm(self, action: DeleteVm, ends: float) -> Meaning:
        return self._calls.gone("terminate_instances", {"InstanceIds": [action.uid]}, ends)

    def create_disk(self, action: CreateDisk, ends: float) -> Meaning:
        pool = self._stack.pool(action.pool)
        if pool is None:
            return Class.PERMANENT, f"no pool {action.pool!r} in the stack"
        source = None
        if action.snapshot is not None:
            shots = self._shots(action.snapshot, ends)
            if not shots:
                return Class.AMBIGUOUS, f"the snapshot {action.snapshot} is not there, or not visible yet"
            source = shots[0].snapshot_id
        try:
            answer = self._calls.again("create_volume", ec2_wire.volume(self._stack, pool, action, source), ends)
        except RefusedError as error:
            # Its pool was declared anew since it was made: it may be there, with data, and only not have been listed.
            name = names.disk_name(self._stack.stack, action.job, action.rank, action.number)
            if classify(error.code, error.status) is Class.DEAD_KEY and self._found(name, action.zone, ends):
                return Class.ACCEPTED, "is there already"
            raise
        return self._created(codec.convert(answer, VolumeIn), ends)

    def _created(self, made: VolumeIn, ends: float) -> Meaning:
        """A disk holds data, so its number is burnt for a proof only: it has failed, or is old and not there."""
        if self._is_old(made.create_time):
            try:
                found = codec.convert(
                    self._calls.once("describe_volumes", {"VolumeIds": [made.volume_id]}, ends), Volumes
                )
            except RefusedError as error:
                if error.code in GONE:
                    return Class.DEAD_KEY, f"the token's {made.volume_id} is gone"
                raise
            made = next(iter(found.volumes), made)
        if made.state == "error":
            self._calls.gone("delete_volume", {"VolumeId": made.volume_id}, ends)
        if made.state not in THERE:
            return Class.DEAD_KEY, f"the token's {made.volume_id} is {made.state}"
        return Class.ACCEPTED, made.volume_id

    def attach_disk(self, action: AttachDisk, ends: float) -> Meaning:
        found = self._ids(action.disk, action.zone, ends)
        if not found:
            return Class.IN_USE, f"{action.disk} is not there, or not visible yet"
        query = {"VolumeId": found[0], "InstanceId": action.vm_uid, "Device": DEVICE}
        self._calls.once("attach_volume", query, ends)
        return Class.ACCEPTED, ""

    def detach_disk(self, action: DetachDisk, ends: float) -> Meaning:
        for found in self._ids(action.disk, action.zone, ends):
            try:
                self._calls.once("detach_volume", {"VolumeId": found, "InstanceId": action.vm_uid}, ends)
            except RefusedError as error:
                if error.code not in (*GONE, "IncorrectState", "InvalidAttachment.NotFound"):
                    raise
                return Class.ACCEPTED, "was not attached"
        return Class.ACCEPTED, ""

    def delete_disk(self, action: DeleteDisk, ends: float) -> Meaning:
        for found in self._ids(action.disk, action.zone, ends):
            self._calls.gone("delete_volume", {"VolumeId": found}, ends)
        return Class.ACCEPTED, ""

    def create_snapshot(self, action: CreateSnapshot, ends: float) -> Meaning:
        stack = self._stack.stack
        for shot in self._shots(names.disk_name(stack, action.job, action.rank, action.copy), ends, failed=True):
            if shot.state != "error":
                return Class.ACCEPTED, "is there already"
            self._calls.gone("delete_snapshot", {"SnapshotId": shot.snapshot_id}, ends)
        source = names.disk_name(stack, action.job, action.rank, action.number)
        found = self._ids(source, action.zone, ends)
        if not found:
            return Class.IN_USE, f"{source} is not there, or not visible yet"
        self._calls.once("create_snapshot", ec2_wire.snapshot_of(stack, action, found[0]), ends)
        return Class.ACCEPTED, ""

    def delete_snapshot(self, action: DeleteSnapshot, ends: float) -> Meaning:
        for shot in self._shots(action.name, ends, failed=True):
            self._calls.gone("delete_snapshot", {"SnapshotId": shot.snapshot_id}, ends)
        return Class.ACCEPTED, ""

    # -- by name

    def _ids(self, name: str, zone: str, ends: float) -> tuple[str, ...]:
        """Of the volumes of this name (one, unless somebody meddled), as listed last, else as asked for now."""
        return self._volumes.get((name, zone)) or self._found(name, zone, ends)

    def _found(self, name: str, zone: str, ends: float) -> tuple[str, ...]:
        query = by_tag(self._stack.stack, Name=name, availability_zone=zone)
        found = pages(self._api, Volumes, query, ends)
        return tuple(item.volume_id for page in found for item in page.volumes if item.state in THERE)

    def _shots(self, name: str, ends: float, failed: bool = False) -> list[SnapshotIn]:
        """Snapshots of this name, the first first. ``failed``: also those that came to nothing.

        Raises:
            NoAnswerError: they could not be asked for.
        """
        found = snapshots(self._api, self._stack.stack, ends, Name=name)
        if found is None:
            raise NoAnswerError(f"snapshots named {name}")
        return sorted((item for item in found if failed or item.state != "error"), key=lambda item: item.age)

    def _is_old(self, made: datetime | None) -> bool:
        return made is not None and self._clock.now() - made.timestamp() > OLD_S
