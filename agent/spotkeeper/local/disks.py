"""Disks and snapshots: folders that outlive machines. One writer at a time: the attachment is the mutex.

A disk is held from the moment an attach begins until its detach has ended or its VM is gone; whoever
else asks for it meanwhile gets 400 in the answer, or RESOURCE_IN_USE_BY_ANOTHER_RESOURCE in the operation.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from spotkeeper.local import catalog, errors, validate
from spotkeeper.local.host import Host
from spotkeeper.local.operations import OpDoc, Operations
from spotkeeper.local.paths import Ref, last, parse, timestamp
from spotkeeper.local.tags import fingerprint
from spotkeeper.local.wire import AttachedDisk, Disk, DiskBody, InitializeParams, SetLabels, Snapshot, SnapshotBody
from spotkeeper.local.world import World

DISKS = "disks"
SNAPSHOTS = "snapshots"
DEFAULT_GB = 10


class Disks:
    def __init__(self, world: World, operations: Operations, host: Host) -> None:
        self._world = world
        self._operations = operations
        self._host = host
        operations.register("insertDisk", self._begin_insert, self._finish_insert)
        operations.register("deleteDisk", lambda _: world.timing.disk_s, self._finish_delete)
        operations.register("createSnapshot", self._begin_snapshot, self._finish_snapshot)
        operations.register("deleteSnapshot", lambda _: world.timing.quick_s, self._finish_delete_snapshot)
        operations.register("setLabels", lambda _: world.timing.quick_s, lambda _: None)
        world.handlers["snapshot.copy"] = self._copy_snapshot
        world.handlers["disk.fill"] = self._fill

    # Disks

    def find(self, path: str) -> Disk | None:
        return self._world.state.get(DISKS, path, Disk)

    def get(self, ref: Ref) -> Disk:
        """
        Raises:
            ApiError: 404.
        """
        found = self.find(ref.path)
        if found is None:
            raise errors.not_found(ref.path)
        return found

    def list(self, prefix: str) -> list[Disk]:
        return self._world.state.all(DISKS, Disk, prefix)

    def insert(self, ref: Ref, body: DiskBody, request_id: str | None) -> OpDoc:
        """Create a blank disk, or one from a snapshot; CREATING until the operation ends."""
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
        source = parse(snapshot.self_link, ref.project) if snapshot else None
        return self._operations.start("insertDisk", ref, disk.id, request_id, snapshot=source.path if source else "")

    def _new(self, ref: Ref, body: DiskBody, snapshot: Snapshot | None) -> Disk:
        world = self._world
        zone = f"projects/{ref.project}/{ref.scope}"
        kind = validate.disk_type(body.type, "resource.type")
        return Disk(
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

    def create_boot(self, ref: Ref, params: InitializeParams, size_default: int = DEFAULT_GB) -> Disk:
        """A disk made with its VM: ready at once, for the VM's own operation stands for it."""
        body = DiskBody(
            size_gb=params.disk_size_gb or size_default,
            type=params.disk_type,
            labels=params.labels,
            source_image=params.source_image,
            description=params.description,
        )
        disk = msgspec.structs.replace(self._new(ref, body, None), status="READY")
        self._world.state.put(DISKS, ref.path, disk)
        return disk

    def delete(self, ref: Ref, request_id: str | None) -> OpDoc:
        """Accept the deletion; refused while a VM holds the disk."""
        disk = self.get(ref)
        if disk.users:
            raise errors.in_use(ref.path, _short(disk.users[0]))
        if disk.status == "DELETING":
            raise errors.not_ready(ref.path)
        self._change(ref.path, disk, status="DELETING")
        return self._operations.start("deleteDisk", ref, disk.id, request_id)

    def set_labels(self, ref: Ref, body: SetLabels, request_id: str | None) -> OpDoc:
        disk = self.get(ref)
        validate.labels(body.labels)
        if body.label_fingerprint is not None and body.label_fingerprint != disk.label_fingerprint:
            raise errors.stale_fingerprint()
        self._change(ref.path, disk, labels=body.labels or None, label_fingerprint=fingerprint(body.labels))
        return self._operations.start("setLabels", ref, disk.id, request_id)

    def _source(self, project: str, link: str | None) -> Snapshot | None:
        if link is None:
            return None
        ref = parse(link, project)
        found = self._world.state.get(SNAPSHOTS, ref.path, Snapshot) if ref else None
        if found is None:
            raise errors.not_found(ref.path if ref else link)
        if found.status != "READY":
            raise errors.not_ready(ref.path if ref else link)
        return found

    def _change(self, path: str, disk: Disk, **changes: object) -> Disk:
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
        self._world.soon(self._world.timing.snapshot_s, "disk.fill", op.path)
        return None

    def _fill(self, op_path: str) -> None:
        """Copy the snapshot's content; the operation ends when the copy has."""
        op = self._operations.get(op_path)
        disk = self.find(op.target) if op else None
        snapshot = self._world.state.get(SNAPSHOTS, op.data["snapshot"], Snapshot) if op else None
        if op is None or disk is None or snapshot is None:
            self._operations.end(op_path, errors.failed_not_found(op.data["snapshot"] if op else op_path))
            return
        source, target = self._host.snapshot_folder(snapshot.id), self._host.disk_folder(disk.id)
        self._world.state.after(lambda: self._host.copy_tree(source, target, lambda why: self._filled(op_path, why)))

    def _filled(self, op_path: str, trouble: str | None) -> None:
        op = self._operations.get(op_path)
        if op is None:
            return
        with self._world.state.transaction():
            if trouble is not None:
                self.remove(op.target)
                self._operations.end(op_path, errors.failed_internal(trouble))
            else:
                self._finish_insert(op)
                self._operations.end(op_path)

    def _finish_insert(self, op: OpDoc) -> None:
        disk = self.find(op.target)
        if disk is None or disk.status == "DELETING":
            raise errors.failed_not_found(op.target)
        self._change(op.target, disk, status="READY")

    def _finish_delete(self, op: OpDoc) -> None:
        self.remove(op.target)

    def remove(self, path: str) -> None:
        disk = self.find(path)
        if disk is not None:
            self._world.state.delete(DISKS, path)
            self._world.state.after(lambda: self._host.drop_disk(disk.id))

    # Attachments

    def check_free(self, project: str, zone: str, disk: AttachedDisk) -> Ref:
        """The disk an attachment names, if it is there, ready, in this zone and free.

        Raises:
            ApiError: 400 or 404, as attachDisk answers.
        """
        ref = parse(disk.source or "", project)
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

    def hold(self, path: str, vm_path: str) -> Disk:
        """Take the disk for a VM.

        Raises:
            FailedOperationError: somebody else holds it, or it is gone.
        """
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

    def find_snapshot(self, ref: Ref) -> Snapshot:
        found = self._world.state.get(SNAPSHOTS, ref.path, Snapshot)
        if found is None:
            raise errors.not_found(ref.path)
        return found

    def snapshots(self, prefix: str) -> Iterable[Snapshot]:
        return self._world.state.all(SNAPSHOTS, Snapshot, prefix)

    def create_snapshot(self, source: Ref, body: SnapshotBody, request_id: str | None) -> OpDoc:
        """A copy of the disk as it is when the copy runs; a job must have stopped writing before."""
        disk = self.get(source)
        called = validate.name(body.name)
        validate.labels(body.labels)
        ref = Ref(source.project, "global", SNAPSHOTS, called)
        if self._world.state.get(SNAPSHOTS, ref.path, Snapshot) is not None:
            raise errors.already_exists(ref.path)
        snapshot = Snapshot(
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
        # The operation is the disk's and zonal, as in the API.
        return self._operations.start("createSnapshot", source, disk.id, request_id, snapshot=ref.path)

    def _begin_snapshot(self, op: OpDoc) -> float | None:
        self._world.soon(self._world.timing.snapshot_s, "snapshot.copy", op.path)
        return None

    def _copy_snapshot(self, op_path: str) -> None:
        op = self._operations.get(op_path)
        disk = self.find(op.target) if op else None
        snapshot = self._world.state.get(SNAPSHOTS, op.data["snapshot"], Snapshot) if op else None
        if op is None or disk is None or snapshot is None:
            if op is not None:
                self._world.state.delete(SNAPSHOTS, op.data["snapshot"])
            self._operations.end(op_path, errors.failed_not_found(op.target if op else op_path))
            return
        source, target = self._host.disk_folder(disk.id), self._host.snapshot_folder(snapshot.id)
        self._world.state.after(lambda: self._host.copy_tree(source, target, lambda why: self._copied(op_path, why)))

    def _copied(self, op_path: str, trouble: str | None) -> None:
        op = self._operations.get(op_path)
        if op is None:
            return
        with self._world.state.transaction():
            if trouble is not None:
                self._world.state.delete(SNAPSHOTS, op.data["snapshot"])
                self._operations.end(op_path, errors.failed_internal(trouble))
            else:
                self._finish_snapshot(op)
                self._operations.end(op_path)

    def _finish_snapshot(self, op: OpDoc) -> None:
        snapshot = self._world.state.get(SNAPSHOTS, op.data["snapshot"], Snapshot)
        if snapshot is not None:
            ready = msgspec.structs.replace(snapshot, status="READY", storage_bytes_status="UP_TO_DATE")
            self._world.state.put(SNAPSHOTS, op.data["snapshot"], ready)

    def delete_snapshot(self, ref: Ref, request_id: str | None) -> OpDoc:
        return self._operations.start("deleteSnapshot", ref, self.find_snapshot(ref).id, request_id)

    def _finish_delete_snapshot(self, op: OpDoc) -> None:
        snapshot = self._world.state.get(SNAPSHOTS, op.target, Snapshot)
        if snapshot is not None:
            self._world.state.delete(SNAPSHOTS, op.target)
            self._world.state.after(lambda: self._host.drop_snapshot(snapshot.id))

    def resume_copies(self) -> None:
        """After a restart: a copy that was under way begins again from scratch."""
        for op in self._operations.list("projects/"):
            if op.operation.status != "RUNNING":
                continue
            timer = {"createSnapshot": "snapshot.copy", "insertDisk": "disk.fill"}.get(op.verb)
            copying = timer is not None and (op.verb == "createSnapshot" or op.data.get("snapshot"))
            if timer is not None and copying and not self._world.state.has_timer(timer, op.path):
                self._world.soon(0.0, timer, op.path)


def _short(link: str) -> str:
    """``projects/...`` of a self link, as Google's messages have it."""
    ref = parse(link, "")
    return ref.path if ref else last(link)
