"""The actions on EC2, each by one call.

A launch gives name, tags, placement and subnet; everything else comes from the launch template that Pulumi declared.
EC2's calls need ids, and a name is only a tag, so a volume's id is first looked up by its name. A launch that
is repeated with its ``ClientToken`` makes no second machine: for more than a day after the first one is gone, EC2 still
answers with the first one (rule 7 of ``docs/protocol.md``). A snapshot has no token, so a search for its name comes
first. A snapshot is in one region: the request for a disk in another region begins with a copy. EC2 sometimes does not
show a new resource for seconds, so its answer "not found" means "gone" only if the resource is old.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
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
from spotkeeper.contract.stack import PoolState, StackState
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
THERE_ALREADY = "is there already"
COPIED_AT_ONCE = "ResourceLimitExceeded"  # EC2's code if too many snapshots are being copied into a region


class Ec2Verbs:
    """The implementation of :class:`~spotkeeper.reconcile.clouds.base.Verbs` on EC2.

    Raises (all):
        Ec2RefusedError: EC2 refused the call.
    """

    def __init__(self, stack: StackState, apis: Mapping[str, Api], clock: Clock) -> None:
        self._stack = stack
        self._apis = apis
        self._clock = clock
        self._volumes: dict[tuple[str, str], tuple[str, ...]] = {}  # (name, zone) -> ids, as last seen
        self._begun: dict[tuple[str, str], float] = {}  # (name, region) -> when a copy of a snapshot began

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
        if pool is None or not self._stack.template(action.pool, action.model, action.zone):
            told = f"pool {action.pool!r} has no {action.model.template} template for {action.zone}"
            return ResultKind.PERMANENT, told
        answer = self._at(action.zone).again("run_instances", schema.launch(self._stack, pool, action), ends)
        made = codec.convert(answer, Reservation).instances
        if len(made) != 1:
            return ResultKind.AMBIGUOUS, f"EC2 launched {len(made)} machines instead of one"
        return self._launched(made[0], self._at(action.zone), ends)

    def _launched(self, made: InstanceIn, api: Api, ends: float) -> Meaning:
        if self._is_old(made.launch_time):
            query: dict[str, object] = {"InstanceIds": [made.instance_id]}
            try:
                found = codec.convert(api.once("describe_instances", query, ends), Instances)
            except Ec2RefusedError as error:
                if error.code in GONE:
                    return ResultKind.DEAD_KEY, f"machine {made.instance_id} of this client token no longer exists"
                raise
            made = next((item for one in found.reservations for item in one.instances), made)
        if made.state.name in (schema.TERMINATED, "shutting-down"):
            return ResultKind.DEAD_KEY, f"machine {made.instance_id} of this client token is {made.state.name}"
        return ResultKind.ACCEPTED, made.instance_id

    def delete_vm(self, action: DeleteVm, ends: float) -> Meaning:
        return self._at(action.zone).gone("terminate_instances", {"InstanceIds": [action.uid]}, ends)

    def create_disk(self, action: CreateDisk, ends: float) -> Meaning:
        pool = self._stack.pool(action.pool)
        if pool is None:
            return ResultKind.PERMANENT, f"no pool {action.pool!r} in the stack"
        source, api = None, self._at(action.zone)
        if action.snapshot is not None:
            shots = self._shots(api, action.snapshot, ends)
            usable = [shot.snapshot_id for shot in shots if shot.state != "error"]
            if not usable:
                self._forget(shots, action.snapshot, self._stack.region_of(action.zone), ends)
                return self._copied(action, pool, ends)
            source = usable[0]
        try:
            answer = api.again("create_volume", schema.volume(self._stack, pool, action, source), ends)
        except Ec2RefusedError as error:
            # The pool was changed since. The disk may exist, with data, although the listing lacks it.
            name = names.disk_name(self._stack.stack, action.job, action.node, action.number)
            if classify(error.code, error.status) is ResultKind.DEAD_KEY and self._found(name, action.zone, ends):
                return ResultKind.ACCEPTED, THERE_ALREADY
            raise
        return self._created(codec.convert(answer, VolumeIn), api, ends)

    def _copied(self, action: CreateDisk, pool: PoolState, ends: float) -> Meaning:
        """Begin to copy a disk's snapshot, which another region has, into the disk's region.

        A copy has the name and tags of the original, and no client token: a search for its name has come first, and is
        repeated until the copy is complete and the disk can be made from it.
        """
        name, region = action.snapshot or "", self._stack.region_of(action.zone)
        found = self._everywhere(name, [other for other in self._apis if other != region], ends)
        whole = [(where, shot) for where, shots in found.items() for shot in shots if shot.complete]
        if not whole:
            return ResultKind.AMBIGUOUS, f"the snapshot {name} does not exist, is not complete, or not visible yet"
        source, original = whole[0]
        return self._copy(name, source, original, region, pool.disk_key_in(region), ends)

    def _copy(self, name: str, source: str, original: SnapshotIn, region: str, key: str, ends: float) -> Meaning:
        told = ResultKind.IN_USE, f"{name} is being copied from {source} to {region}"
        if self._clock.now() < self._begun.get((name, region), -OLD_S) + OLD_S:
            return told  # not visible yet, and a second copy would be billed too
        request = schema.copy_of(original, source, key)
        try:
            self._apis[region].once("copy_snapshot", request, ends)
        except Ec2RefusedError as error:
            if error.code != COPIED_AT_ONCE:
                raise
            return ResultKind.IN_USE, f"{name} waits, since too many snapshots are being copied to {region}"
        self._begun[name, region] = self._clock.now()
        return told

    def _forget(self, failed: Iterable[SnapshotIn], name: str, region: str, ends: float) -> None:
        for shot in failed:
            self._apis[region].gone("delete_snapshot", {"SnapshotId": shot.snapshot_id}, ends)
            self._begun.pop((name, region), None)

    def _created(self, made: VolumeIn, api: Api, ends: float) -> Meaning:
        """Return the result of a request to create a disk.

        DEAD_KEY, so that the next request uses another client token, only if this token's disk was certainly not
        created, or no longer exists.
        """
        if self._is_old(made.create_time):
            try:
                found = codec.convert(api.once("describe_volumes", {"VolumeIds": [made.volume_id]}, ends), Volumes)
            except Ec2RefusedError as error:
                if error.code in GONE:
                    return ResultKind.DEAD_KEY, f"disk {made.volume_id} of this client token no longer exists"
                raise
            made = next(iter(found.volumes), made)
        if made.state == "error":
            api.gone("delete_volume", {"VolumeId": made.volume_id}, ends)
        if made.state not in THERE:
            return ResultKind.DEAD_KEY, f"disk {made.volume_id} of this client token is {made.state}"
        return ResultKind.ACCEPTED, made.volume_id

    def attach_disk(self, action: AttachDisk, ends: float) -> Meaning:
        found = self._ids(action.disk, action.zone, ends)
        if not found:
            return ResultKind.IN_USE, f"the disk {action.disk} does not exist, or is not visible yet"
        query = {"VolumeId": found[0], "InstanceId": action.vm_uid, "Device": DEVICE}
        self._at(action.zone).once("attach_volume", query, ends)
        return ResultKind.ACCEPTED, ""

    def detach_disk(self, action: DetachDisk, ends: float) -> Meaning:
        for found in self._ids(action.disk, action.zone, ends):
            try:
                self._at(action.zone).once("detach_volume", {"VolumeId": found, "InstanceId": action.vm_uid}, ends)
            except Ec2RefusedError as error:
                if error.code not in (*GONE, "IncorrectState", "InvalidAttachment.NotFound"):
                    raise
                return ResultKind.ACCEPTED, "was not attached"
        return ResultKind.ACCEPTED, ""

    def delete_disk(self, action: DeleteDisk, ends: float) -> Meaning:
        for found in self._ids(action.disk, action.zone, ends):
            self._at(action.zone).gone("delete_volume", {"VolumeId": found}, ends)
        return ResultKind.ACCEPTED, ""

    def create_snapshot(self, action: CreateSnapshot, ends: float) -> Meaning:
        stack, api = self._stack.stack, self._at(action.zone)
        name, home = names.disk_name(stack, action.job, action.node, action.copy), self._stack.region_of(action.zone)
        for shot in self._shots(api, name, ends):
            if shot.state != "error":
                abroad = bool(action.region) and action.region != home
                return self._stored(name, home, action.region, ends) if abroad else (ResultKind.ACCEPTED, THERE_ALREADY)
            api.gone("delete_snapshot", {"SnapshotId": shot.snapshot_id}, ends)
        source = names.disk_name(stack, action.job, action.node, action.number)
        found = self._ids(source, action.zone, ends)
        if not found:
            return ResultKind.IN_USE, f"the disk {source} does not exist, or is not visible yet"
        api.once("create_snapshot", schema.snapshot_of(stack, action, found[0]), ends)
        return ResultKind.ACCEPTED, ""

    def _stored(self, name: str, home: str, region: str, ends: float) -> Meaning:
        """Copy a snapshot that is to lie in another region than its disk, unless it is there or not complete."""
        found = self._everywhere(name, (home, region), ends)
        if region not in found:
            return ResultKind.AMBIGUOUS, f"{region} did not answer"
        if any(shot.state != "error" for shot in found[region]):
            return ResultKind.ACCEPTED, THERE_ALREADY
        whole = [shot for shot in found.get(home, ()) if shot.complete]
        if not whole:
            return ResultKind.ACCEPTED, "is not complete yet"
        self._forget(found[region], name, region, ends)
        keys = (pool.disk_key_in(region) for pool in self._stack.pools if pool.kind != "static")
        return self._copy(name, home, whole[0], region, next(keys, ""), ends)

    def delete_snapshot(self, action: DeleteSnapshot, ends: float) -> Meaning:
        """Delete the snapshot and its copies in other regions; a region that does not answer keeps only its own."""
        found = self._everywhere(action.name, self._apis, ends)
        for region, shots in found.items():
            for shot in shots:
                self._apis[region].gone("delete_snapshot", {"SnapshotId": shot.snapshot_id}, ends)
        silent = [region for region in self._apis if region not in found]
        return (ResultKind.AMBIGUOUS, f"{' and '.join(silent)} did not answer") if silent else (ResultKind.ACCEPTED, "")

    def _at(self, zone: str) -> Api:
        return self._apis[self._stack.region_of(zone)]

    # -- by name

    def _ids(self, name: str, zone: str, ends: float) -> tuple[str, ...]:
        """Return the ids of volumes of this name (normally one), from the last listing or a new lookup."""
        return self._volumes.get((name, zone)) or self._found(name, zone, ends)

    def _found(self, name: str, zone: str, ends: float) -> tuple[str, ...]:
        query = by_tag(self._stack.stack, Name=name, availability_zone=zone)
        found = pages(self._at(zone), Volumes, query, ends)
        return tuple(item.volume_id for page in found for item in page.volumes if item.state in THERE)

    def _everywhere(self, name: str, regions: Collection[str], ends: float) -> dict[str, list[SnapshotIn]]:
        """Return the snapshots of this name by region, without the regions that do not answer."""
        half = (ends + time.monotonic()) / 2  # the other half is for the calls that follow
        found: dict[str, list[SnapshotIn]] = {}
        with ThreadPoolExecutor(len(regions) or 1) as threads:
            asked = {region: threads.submit(self._shots, self._apis[region], name, half) for region in regions}
        for region, answer in asked.items():
            with suppress(NoAnswerError):  # the list has logged it
                found[region] = answer.result()
        return found

    def _shots(self, api: Api, name: str, ends: float) -> list[SnapshotIn]:
        """Return the snapshots of this name in a region, oldest first, failed ones too.

        Raises:
            NoAnswerError: the list failed.
        """
        found = snapshots(api, self._stack.stack, ends, Name=name)
        if found is None:
            raise NoAnswerError(f"snapshots named {name}")
        return sorted(found, key=lambda item: item.age)

    def _is_old(self, made: datetime | None) -> bool:
        return made is not None and self._clock.now() - made.timestamp() > OLD_S
