"""Attaches disks to VMs, at an insert or while the VM runs.

A disk is in use from the start of its attach until its detach has ended or its VM is gone. Each disk is a folder.
"""

from __future__ import annotations

import msgspec

from spotkeeper.local.compute import validate
from spotkeeper.local.compute.disks import Disks
from spotkeeper.local.compute.operations import OpDoc, Operations
from spotkeeper.local.core import errors
from spotkeeper.local.core.errors import FailedOperationError
from spotkeeper.local.core.rest import Ref, last, parse_ref
from spotkeeper.local.core.schema import AttachedDisk
from spotkeeper.local.core.vm import LocalVm, VmTable
from spotkeeper.local.core.world import World
from spotkeeper.local.machines.host import Host


class Attachments:
    def __init__(self, world: World, operations: Operations, disks: Disks, host: Host, machines: VmTable) -> None:
        self._world = world
        self._operations = operations
        self._disks = disks
        self._host = host
        self._machines = machines
        operations.register("attachDisk", self._begin_attach, self._finish_attach)
        operations.register("detachDisk", lambda _: world.timing.detach_s, self._finish_detach)

    # Insert and removal of a VM

    def take(self, vm: LocalVm) -> LocalVm:
        """Create the VM's new disks and acquire its existing disks."""
        out: list[AttachedDisk] = []
        try:
            for index, disk in enumerate(vm.wire.disks or []):
                out.append(self._take_one(vm, disk, index))
        except FailedOperationError:
            for taken in out:
                self._disks.release(_path(taken.source), vm.path)
            raise
        return self._machines.put(vm, wire=msgspec.structs.replace(vm.wire, disks=out))

    def _take_one(self, vm: LocalVm, disk: AttachedDisk, index: int) -> AttachedDisk:
        if disk.source is None and disk.initialize_params is not None:
            params = disk.initialize_params
            name = params.disk_name or (vm.name if disk.boot else f"{vm.name}-{index}")
            ref = Ref(vm.project, f"zones/{vm.zone}", "disks", name)
            if self._disks.find(ref.path) is not None:
                raise errors.failed_in_use(ref.path, "another VM")
            self._disks.create_boot(ref, params)
            disk = msgspec.structs.replace(disk, source=self._world.self_link(ref.path), initialize_params=None)
        acquired = self._disks.acquire(_path(disk.source), vm.path)
        self._plug(vm, acquired.id, disk)
        return msgspec.structs.replace(
            disk, source=acquired.self_link, disk_size_gb=acquired.size_gb, index=index, kind="compute#attachedDisk"
        )

    def release(self, vm: LocalVm) -> None:
        """Release all disks of a deleted VM; delete the disks with autoDelete."""
        for disk in vm.wire.disks or []:
            if disk.source is None:
                continue
            path = _path(disk.source)
            found = self._disks.find(path)
            self._disks.release(path, vm.path)
            if found is not None and disk.auto_delete:
                self._disks.remove(path)
            elif found is not None and disk.device_name:
                self._unplug(vm, found.id, disk.device_name)

    # While the VM runs

    def attach(self, ref: Ref, body: AttachedDisk, request_id: str | None) -> OpDoc:
        """Attach an existing disk to a VM that is running or stopped."""
        vm = self._machines.get(ref)
        if body.force_attach:
            raise errors.invalid("resource.forceAttach", "true", "Only regional disks can be force-attached.")
        validate.attached_disk(body, "resource")
        if body.source is None:
            raise errors.required("resource.source")
        disk = self._disks.check_free(vm.project, vm.zone, body)
        if vm.wire.status not in ("RUNNING", "TERMINATED"):
            raise errors.not_ready(vm.path)
        device = body.device_name or f"persistent-disk-{len(vm.wire.disks or [])}"
        if _attached(vm, device) is not None:
            raise errors.invalid("resource.deviceName", device, "Another disk of this VM has that device name.")
        auto_delete = "true" if body.auto_delete else ""
        return self._operations.start(
            "attachDisk", vm.ref, vm.id, request_id, disk=disk.path, device=device, auto_delete=auto_delete
        )

    def _begin_attach(self, op: OpDoc) -> float | None:
        vm = self._same(op)
        self._disks.acquire(op.data["disk"], vm.path)
        return self._world.timing.attach_s

    def _finish_attach(self, op: OpDoc) -> None:
        try:
            vm = self._same(op)
        except FailedOperationError:
            self._disks.release(op.data["disk"], op.target)
            raise
        disk = self._disks.find(op.data["disk"])
        if disk is None:
            raise errors.failed_not_found(op.data["disk"])
        attached = AttachedDisk(
            kind="compute#attachedDisk",
            type="PERSISTENT",
            mode="READ_WRITE",
            source=disk.self_link,
            device_name=op.data["device"],
            index=len(vm.wire.disks or []),
            boot=False,
            auto_delete=bool(op.data["auto_delete"]),
            interface="SCSI",
            disk_size_gb=disk.size_gb,
        )
        self._machines.put(vm, wire=msgspec.structs.replace(vm.wire, disks=[*(vm.wire.disks or []), attached]))
        self._plug(vm, disk.id, attached)

    def _same(self, op: OpDoc) -> LocalVm:
        """Return the VM of an operation; FailedOperationError unless the VM is still RUNNING or TERMINATED."""
        vm = self._machines.find(op.target)
        if vm is None or vm.id != op.operation.target_id or vm.wire.status not in ("RUNNING", "TERMINATED"):
            raise errors.failed_not_found(op.target)
        return vm

    def detach(self, ref: Ref, device: str | None, request_id: str | None) -> OpDoc:
        vm = self._machines.get(ref)
        if not device:
            raise errors.required("deviceName")
        disk = _attached(vm, device)
        if disk is None:
            raise errors.invalid("deviceName", device, "No attached disk found with this device name.")
        if disk.boot and vm.wire.status != "TERMINATED":
            raise errors.invalid("deviceName", device, "The boot disk of a running VM cannot be detached.")
        if vm.wire.status not in ("RUNNING", "TERMINATED"):
            raise errors.not_ready(vm.path)
        return self._operations.start("detachDisk", vm.ref, vm.id, request_id, device=device)

    def _finish_detach(self, op: OpDoc) -> None:
        vm = self._same(op)
        device = op.data["device"]
        disk = _attached(vm, device)
        if disk is None:
            raise errors.failed_not_found(device)
        kept = [other for other in vm.wire.disks or [] if other is not disk]
        self._machines.put(vm, wire=msgspec.structs.replace(vm.wire, disks=kept))
        path = _path(disk.source)
        self._disks.release(path, vm.path)
        found = self._disks.find(path)
        if found is not None:
            self._unplug(vm, found.id, device)

    def _plug(self, vm: LocalVm, disk_id: int, disk: AttachedDisk) -> None:
        device = disk.device_name
        if not disk.boot and device is not None:  # the boot disk is the root folder
            self._world.state.after(lambda: self._host.attach(vm.id, disk_id, device))

    def _unplug(self, vm: LocalVm, disk_id: int, device: str) -> None:
        self._world.state.after(lambda: self._host.detach(vm.id, disk_id, device))


def _attached(vm: LocalVm, device: str) -> AttachedDisk | None:
    return next((disk for disk in vm.wire.disks or [] if disk.device_name == device), None)


def _path(link: str | None) -> str:
    ref = parse_ref(link or "", "")
    return ref.path if ref else last(link or "")
