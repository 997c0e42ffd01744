"""Disks and snapshots: folders that outlive machines. One VM at a time uses a disk.

A disk is in use from the start of its attach until its detach has ended or its VM is gone. An attach of a disk in use
fails, with 400 in the answer or with RESOURCE_IN_USE_BY_ANOTHER_RESOURCE in the operation.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from spotkeeper.local.compute import validate
from spotkeeper.local.compute.operations import OpDoc, Operations
from spotkeeper.local.core import catalog, errors
from spotkeeper.local.core import schema as w
from spotkeeper.local.core.errors import FailedOperationError
from spotkeeper.local.core.rest import Ref, fingerprint, last, parse_ref, timestamp
from spotkeeper.local.core.world import World
from spotkeeper.local.machines.host import Host
from spotkeeper.local.spot_market.bill import TRANSFERS, Transfer

DISKS = "disks"
SNAPSHOTS = "snapshots"
DEFAULT_GB = 10
COPY = "disk.copy"  # the timer that begins a copy between a disk and a snapshot


class Disks:
    def __init__(self, world: World, operations: Operations, host: Host) -> None:
        self._world = world
        self._operations = operations
        self._host = host
        operations.register("insertDisk", self._begin_insert, self._finish_insert)
        operations.register("deleteDisk", lambda _: world.timing.disk_s, lambda op: self.remove(op.target))
        operations.register("createSnapshot", self._begin_copy, self._finish_snapshot)
        operations.register("deleteSnapshot", lambda _: world.timing.quick_s, self._finish_delete_snapshot)
        operations.register("setLabels", lambda _: world.timing.quick_s, lambda _: None)
        world.handlers[COPY] = self._copy

    # Disks

    def find(self, path: str) -> w.Disk | None:
        return self._world.state.get(DISKS, path, w.Disk)

    def get(self, ref: Ref) -> w.Disk:
        """Find a disk; ApiError 404 if it does not exist."""
        found = self.find(ref.path)
        if found is None:
            raise errors.not_found(ref.path)
        return found

    def list(self, prefix: str) -> list[w.Disk]:
        return self._world.state.all(DISKS, w.Disk, prefix)

    def insert(self, ref: Ref, body: w.DiskBody, request_id: str | None) -> OpDoc:
        """Create a blank disk, or a copy of a snapshot; its status is CREATING until the operation ends."""
        validate.labels(body.labels)
        snapshot = self._source(ref.project, body.source_snapshot)
        if self.find(ref.path) is not None:
            raise errors.already_exists(ref.path)
        if snapshot is not None and body.size_gb is not None and body.size_gb < snapshot.disk_size_gb:
            raise errors.invalid(
                "resource.sizeGb", body.size_gb, f"Smaller than the snapshot ({snapshot.disk_size_gb} GB)."
            )
        disk = self._new(ref, body, snapshot)
        self._world.state.put(DISKS, ref.path, disk)
        source = parse_ref(snapshot.self_link, ref.project) if snapshot else None
        return self._operations.start("insertDisk", ref, disk.id, request_id, snapshot=source.path if source else "")

    def _new(self, ref: Ref, body: w.DiskBody, snapshot: w.Snapshot | None) -> w.Disk:
        world = self._world
        zone = f"projects/{ref.project}/{ref.scope}"
        kind = validate.disk_type(body.type, "resource.type")
        return w.Disk(
            kind="compute#disk",
            id=world.new_id(),
            name=ref.name,
            zone=world.self_link(zone),
            size_gb=body.size_gb or (snapshot.disk_size_gb if snapshot else DEFAULT_GB),
            type=world.self_link(f"{zone}/diskTypes/{kind}"),
            status="CREATING",
            creation_timestamp=timestamp(world.now()),
            self_link=world.self_link(ref.path),
            description=body.description,
            labels=body.labels or None,
            label_fingerprint=fingerprint(body.labels),
            source_image=body.source_image,
            source_snapshot=snapshot.self_link if snapshot else None,
            source_snapshot_id=snapshot.id if snapshot else None,
            physical_block_size_bytes=body.physical_block_size_bytes or 4096,
            provisioned_iops=body.provisioned_iops,
            provisioned_throughput=body.provisioned_throughput,
            access_mode=body.access_mode,
        )

    def create_boot(self, ref: Ref, params: w.InitializeParams) -> None:
        """Create a VM's boot disk, which is READY at once: its creation is a part of the VM's operation."""
        body = w.DiskBody(
            size_gb=params.disk_size_gb,
            type=params.disk_type,
            labels=params.labels,
            source_image=params.source_image,
            description=params.description,
        )
        self._world.state.put(DISKS, ref.path, msgspec.structs.replace(self._new(ref, body, None), status="READY"))

    def delete(self, ref: Ref, request_id: str | None) -> OpDoc:
        """Accept the deletion of a disk; refuse it while a VM uses the disk."""
        disk = self.get(ref)
        if disk.users:
            raise errors.in_use(ref.path, _short(disk.users[0]))
        if disk.status == "DELETING":
            raise errors.not_ready(ref.path)
        self._change(ref.path, disk, status="DELETING")
        return self._operations.start("deleteDisk", ref, disk.id, request_id)

    def set_labels(self, ref: Ref, body: w.SetLabels, request_id: str | None) -> OpDoc:
        disk = self.get(ref)
        validate.labels(body.labels)
        if body.label_fingerprint is not None and body.label_fingerprint != disk.label_fingerprint:
            raise errors.stale_fingerprint()
        self._change(ref.path, disk, labels=body.labels or None, label_fingerprint=fingerprint(body.labels))
        return self._operations.start("setLabels", ref, disk.id, request_id)

    def _source(self, project: str, link: str | None) -> w.Snapshot | None:
        if link is None:
            return None
        ref = parse_ref(link, project)
        found = self._find_snapshot(ref.path) if ref else None
        if found is None:
            raise errors.not_found(ref.path if ref else link)
        if found.status != "READY":
            raise errors.not_ready(ref.path if ref else link)
        return found

    def _change(self, path: str, disk: w.Disk, **changes: object) -> w.Disk:
        changed = msgspec.structs.replace(disk, **changes)
        self._world.state.put(DISKS, path, changed)
        return changed

    def _begin_insert(self, op: OpDoc) -> float | None:
        disk = self.find(op.target)
        if disk is None:
            raise errors.failed_not_found(op.target)
        if not op.data.get("snapshot"):
            self._host.disk_folder(disk.id)
            return self._world.timing.disk_s
        return self._begin_copy(op)

    def _finish_insert(self, op: OpDoc) -> None:
        disk = self.find(op.target)
        if disk is None or disk.status == "DELETING":
            raise errors.failed_not_found(op.target)
        self._change(op.target, disk, status="READY")
        snapshot = self._find_snapshot(op.data.get("snapshot", ""))
        if snapshot is not None:
            self._bill(disk.id, op.target, snapshot, _region(parse_ref(op.target, "")))

    def _bill(self, uid: int, what: str, snapshot: w.Snapshot, other: str) -> None:
        """Bill what goes between the snapshot's location and another region: the disk's from or to which it goes."""
        if other not in (snapshot.storage_locations or ()):
            self._world.state.put(TRANSFERS, str(uid), Transfer(what, snapshot.storage_bytes))

    def remove(self, path: str) -> None:
        disk = self.find(path)
        if disk is not None:
            self._world.state.delete(DISKS, path)
            self._world.state.after(lambda: self._host.drop_disk(disk.id))

    # Attachments

    def check_free(self, project: str, zone: str, disk: w.AttachedDisk) -> Ref:
        """Return the disk to attach; ApiError 400 or 404 unless it exists, is ready, is in this zone and is unused."""
        ref = parse_ref(disk.source or "", project)
        if ref is None or ref.kind != DISKS:
            raise errors.invalid("resource.source", disk.source, "Must be the URL of a disk.")
        if ref.scope != f"zones/{zone}":
            raise errors.invalid("resource.source", disk.source, f"The disk must be in zone '{zone}'.")
        found = self.get(ref)
        if found.users:
            raise errors.in_use(ref.path, _short(found.users[0]))
        if found.status != "READY":
            raise errors.not_ready(ref.path)
        return ref

    def acquire(self, path: str, vm_path: str) -> w.Disk:
        """Mark the disk as used by a VM; FailedOperationError if it is gone or another VM uses it."""
        disk = self.find(path)
        if disk is None or disk.status != "READY":
            raise errors.failed_not_found(path)
        if disk.users:
            raise errors.failed_in_use(path, _short(disk.users[0]))
        now = timestamp(self._world.now())
        return self._change(path, disk, users=[self._world.self_link(vm_path)], last_attach_timestamp=now)

    def release(self, path: str, vm_path: str) -> None:
        disk = self.find(path)
        if disk is not None and disk.users == [self._world.self_link(vm_path)]:
            self._change(path, disk, users=None, last_detach_timestamp=timestamp(self._world.now()))

    # Snapshots

    def _find_snapshot(self, path: str) -> w.Snapshot | None:
        return self._world.state.get(SNAPSHOTS, path, w.Snapshot)

    def get_snapshot(self, ref: Ref) -> w.Snapshot:
        """Find a snapshot; ApiError 404 if it does not exist."""
        found = self._find_snapshot(ref.path)
        if found is None:
            raise errors.not_found(ref.path)
        return found

    def snapshots(self, prefix: str) -> Iterable[w.Snapshot]:
        return self._world.state.all(SNAPSHOTS, w.Snapshot, prefix)

    def create_snapshot(self, source: Ref, body: w.SnapshotBody, request_id: str | None) -> OpDoc:
        """Create a snapshot of a disk. The disk is copied later, so a job must not write until the operation ends."""
        disk = self.get(source)
        called = validate.name(body.name)
        validate.labels(body.labels)
        ref = Ref(source.project, "global", SNAPSHOTS, called)
        if self._find_snapshot(ref.path) is not None:
            raise errors.already_exists(ref.path)
        snapshot = w.Snapshot(
            kind="compute#snapshot",
            id=self._world.new_id(),
            name=called,
            status="CREATING",
            creation_timestamp=timestamp(self._world.now()),
            self_link=self._world.self_link(ref.path),
            source_disk=disk.self_link,
            source_disk_id=disk.id,
            disk_size_gb=disk.size_gb,
            storage_bytes_status="UPDATING",
            storage_locations=body.storage_locations or [catalog.region_of(source.place)],
            description=body.description,
            labels=body.labels or None,
            label_fingerprint=fingerprint(body.labels),
        )
        self._world.state.put(SNAPSHOTS, ref.path, snapshot)
        # The operation is zonal, and its target is the disk, as in the API.
        return self._operations.start("createSnapshot", source, disk.id, request_id, snapshot=ref.path)

    def _begin_copy(self, op: OpDoc) -> float | None:
        self._world.soon(self._world.timing.snapshot_s, COPY, op.path)
        return None

    def _copy(self, op_path: str) -> None:
        """Copy a disk into a new snapshot or a snapshot into a new disk; the operation ends with the copy."""
        op = self._operations.get(op_path)
        if op is None:
            return
        disk, snapshot = self.find(op.target), self._find_snapshot(op.data["snapshot"])
        if disk is None or snapshot is None:
            self._abort_copy(op, errors.failed_not_found(op.target if disk is None else op.data["snapshot"]))
            return
        source, target = self._host.disk_folder(disk.id), self._host.snapshot_folder(snapshot.id)
        if op.verb == "insertDisk":
            source, target = target, source
        self._world.state.after(lambda: self._host.copy_tree(source, target, lambda why: self._copied(op_path, why)))

    def _copied(self, op_path: str, error: str | None) -> None:
        op = self._operations.get(op_path)
        if op is None:
            return
        with self._world.state.transaction():
            if error is not None:
                self._abort_copy(op, errors.failed_internal(error))
                return
            finish = self._finish_insert if op.verb == "insertDisk" else self._finish_snapshot
            finish(op)
            self._operations.end(op_path)

    def _abort_copy(self, op: OpDoc, failure: FailedOperationError) -> None:
        if op.verb == "insertDisk":
            self.remove(op.target)
        else:
            self._world.state.delete(SNAPSHOTS, op.data["snapshot"])
        self._operations.end(op.path, failure)

    def _finish_snapshot(self, op: OpDoc) -> None:
        snapshot = self._find_snapshot(op.data["snapshot"])
        if snapshot is not None:
            folder = self._host.snapshot_folder(snapshot.id)
            stored = sum(file.lstat().st_size for file in folder.rglob("*") if not file.is_dir())
            ready = msgspec.structs.replace(
                snapshot, status="READY", storage_bytes=stored, storage_bytes_status="UP_TO_DATE"
            )
            self._world.state.put(SNAPSHOTS, op.data["snapshot"], ready)
            self._bill(ready.id, op.data["snapshot"], ready, _region(parse_ref(ready.source_disk, "")))

    def delete_snapshot(self, ref: Ref, request_id: str | None) -> OpDoc:
        return self._operations.start("deleteSnapshot", ref, self.get_snapshot(ref).id, request_id)

    def _finish_delete_snapshot(self, op: OpDoc) -> None:
        snapshot = self._find_snapshot(op.target)
        if snapshot is not None:
            self._world.state.delete(SNAPSHOTS, op.target)
            self._world.state.after(lambda: self._host.drop_snapshot(snapshot.id))

    def resume_copies(self) -> None:
        """After a restart of the control plane, repeat interrupted copies from their start."""
        for op in self._operations.list("projects/"):
            if (
                op.operation.status == "RUNNING"
                and op.data.get("snapshot")
                and not self._world.state.has_timer(COPY, op.path)
            ):
                self._world.soon(0.0, COPY, op.path)


def _region(ref: Ref | None) -> str:
    return catalog.region_of(ref.place) if ref is not None else ""


def _short(link: str) -> str:
    ref = parse_ref(link, "")
    return ref.path if ref else last(link)
