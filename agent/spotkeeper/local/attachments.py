"""Disks of VMs: those that a VM starts with, and those that come and go while it runs.

A disk is held from the moment an operation begins until its VM has let go of it; a folder of the host plays the device.
"""

from __future__ import annotations

import msgspec

from spotkeeper.local import errors, validate
from spotkeeper.local.disks import Disks
from spotkeeper.local.errors import FailedOperationError
from spotkeeper.local.host import Host
from spotkeeper.local.operations import OpDoc, Operations
from spotkeeper.local.paths import Ref, last, parse
from spotkeeper.local.vm import Machines, Vm
from spotkeeper.local.wire import AttachedDisk
from spotkeeper.local.world import World


class Attachments:
    def __init__(self, world: World, operations: Operations, disks: Disks, host: Host, machines: Machines) -> None:
        self._world = world
        self._operations = operations
        self._disks = disks
        self._host = host
        self._machines = machines
        operations.register("attachDisk", self._begin_attach, self._finish_attach)
        operations.register("detachDisk", lambda _: world.timing.detach_s, self._finish_detach)

    # Of a VM that starts, or is gone

    def take(self, vm: Vm) -> Vm:
        """Make the boot disk, hold the disks that are there already."""
        out: list[AttachedDisk] = []
        held: list[str] = []
        try:
            for index, disk in enumerate(vm.wire.disks or []):
                taken = self._take_one(vm, disk, index)
                out.append(taken)
                held.append(_path(taken.source))
        except FailedOperationError:
            for path in held:
                self._disks.release(path, vm.path)
            raise
        return self._machines.put(vm, wire=msgspec.structs.replace(vm.wire, disks=out))

    def _take_one(self, vm: Vm, disk: AttachedDisk, index: int) -> AttachedDisk:
        if disk.source is None and disk.initialize_params is not None:
            params = disk.initialize_params
            name = params.disk_name or (vm.name if disk.boot else f"{vm.name}-{index}")
            ref = Ref(vm.project, f"zones/{vm.zone}", "disks", name)
            if self._disks.find(ref.path) is not None:
                raise errors.failed_in_use(ref.path, "another VM")
            self._disks.create_boot(ref, params)
            disk = msgspec.structs.replace(disk, source=self._world.self_link(ref.path), initialize_params=None)
        held = self._disks.hold(_path(disk.source), vm.path)
        self._plug(vm, held.id, disk)
        return msgspec.structs.replace(
            disk, source=held.self_link, disk_size_gb=held.size_gb, index=index, kind="compute#attachedDisk"
        )

    def release(self, vm: Vm) -> None:
        """All of a VM that is gone; those with autoDelete go with it."""
        for disk in vm.wire.disks or []:
            if disk.source is None:
                continue
            path = _path(disk.source)
            held = self._disks.find(path)
            self._disks.release(path, vm.path)
            if held is not None and disk.auto_delete:
                self._disks.remove(path)
            elif held is not None and disk.device_name:
                self._unplug(vm, held.id, disk.device_name)

    # While it runs

    def attach(self, ref: Ref, body: AttachedDisk, request_id: str | None) -> OpDoc:
        """Late attach of an existing disk to a VM that runs (or is stopped)."""
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
        if any(other.device_name == device for other in vm.wire.disks or []):
            raise errors.invalid("resource.deviceName", device, "Another disk of this VM has that device name.")
        kept = "true" if body.auto_delete else ""
        return self._operations.start(
            "attachDisk", vm.ref, vm.id, request_id, disk=disk.path, device=device, auto_delete=kept
        )

    def _begin_attach(self, op: OpDoc) -> float | None:
        vm = self._same(op)
        self._disks.hold(op.data["disk"], vm.path)
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

    def _same(self, op: OpDoc) -> Vm:
        """The VM the operation was accepted for, if it is still there and not on its way out."""
        vm = self._machines.find(op.target)
        if vm is None or vm.id != op.operation.target_id or vm.wire.status not in ("RUNNING", "TERMINATED"):
            raise errors.failed_not_found(op.target)
        return vm

    def detach(self, ref: Ref, device: str | None, request_id: str | None) -> OpDoc:
        vm = self._machines.get(ref)
        if not device:
            raise errors.required("deviceName")
        disk = next((disk for disk in vm.wire.disks or [] if disk.device_name == device), None)
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
        disk = next((disk for disk in vm.wire.disks or [] if disk.device_name == device), None)
        if disk is None:
            raise errors.failed_not_found(device)
        kept = [other for other in vm.wire.disks or [] if other is not disk]
        self._machines.put(vm, wire=msgspec.structs.replace(vm.wire, disks=kept))
        path = _path(disk.source)
        self._disks.release(path, vm.path)
        held = self._disks.find(path)
        if held is not None:
            self._unplug(vm, held.id, device)

    def _plug(self, vm: Vm, disk_id: int, disk: AttachedDisk) -> None:
        device = disk.device_name
        if not disk.boot and device is not None:  # the boot disk is the VM's root folder
            self._world.state.after(lambda: self._host.attach(vm.id, disk_id, device))

    def _unplug(self, vm: Vm, disk_id: int, device: str) -> None:
        self._world.state.after(lambda: self._host.detach(vm.id, disk_id, device))


def _path(link: str | None) -> str:
    ref = parse(link or "", "")
    return ref.path if ref else last(link or "")
