"""VMs: from an insert to the last process being gone.

    PROVISIONING -> STAGING -> RUNNING -> STOPPING -> (gone) | TERMINATED
    PROVISIONING -> STAGING -> (gone)                    stockout: listed for seconds, then an error
    RUNNING -> REPAIRING -> STAGING -> RUNNING           host error with automaticRestart

``Ending`` says why a VM leaves RUNNING, and with that whether it is deleted. A disk is free only once the
VM's last process is dead. Everything waits on timers and on processes ending; nothing polls.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from enum import Enum
from typing import Protocol

import msgspec
from msgspec import Struct

from spotkeeper.local import errors, validate
from spotkeeper.local.bill import Billing, Line
from spotkeeper.local.build import Built, InstanceBuilder
from spotkeeper.local.disks import Disks
from spotkeeper.local.errors import ApiError, FailedOperationError
from spotkeeper.local.host import Host
from spotkeeper.local.operations import OpDoc, Operations
from spotkeeper.local.paths import Ref, last, parse, timestamp
from spotkeeper.local.tags import fingerprint
from spotkeeper.local.wire import (
    AttachedDisk,
    Instance,
    InstanceBody,
    Metadata,
    ResourceStatus,
    ScheduleStatus,
    Scheduling,
    SetLabels,
    SetMetadata,
)
from spotkeeper.local.world import World

log = logging.getLogger("spotkeeper.local")
KIND = "instances"
EVENT_S = 3.0  # an audit log entry takes seconds to arrive


class Ending(str, Enum):
    """Why a VM stops. DELETE and a PREEMPT or EXPIRE whose termination action says so free the name and the disks."""

    NONE = ""
    PREEMPT = "preempt"
    EXPIRE = "expire"  # maxRunDuration
    DELETE = "delete"
    STOP = "stop"
    GUEST = "guest"  # it powered itself off
    CRASH = "crash"  # the host is gone and nothing restarts it
    STOCKOUT = "stockout"


class Vm(Struct, frozen=True):
    """``wire`` is what the API shows; the rest is how this machine plays it."""

    path: str
    project: str
    zone: str
    wire: Instance
    address: str
    machine: str
    accepted: bool = False  # capacity is taken
    boots: int = 0
    pid: int = 0
    started: int = 0
    preempted: bool = False
    notice_until: float | None = None
    maintenance: str = "NONE"
    maintenance_at: float = 0.0  # when it is announced for; 0: nothing is
    ending: Ending = Ending.NONE
    ops: tuple[str, ...] = ()  # operations that end when the VM is off or gone
    insert_op: str = ""

    @property
    def name(self) -> str:
        return self.wire.name

    @property
    def id(self) -> int:
        return self.wire.id

    @property
    def spot(self) -> bool:
        return self.scheduling.spot

    @property
    def scheduling(self) -> Scheduling:
        return self.wire.scheduling or Scheduling()

    @property
    def deletes_itself(self) -> bool:
        return self.scheduling.instance_termination_action == "DELETE"

    @property
    def ref(self) -> Ref:
        return Ref(self.project, f"zones/{self.zone}", KIND, self.name)


class Sites(Protocol):
    """The VMs' metadata addresses."""

    def open(self, path: str, address: str) -> None: ...
    def close(self, path: str) -> None: ...
    def changed(self, path: str) -> None: ...


class Capacity(Protocol):
    def has_room(self, vm: Vm) -> bool:
        """Whether one more VM like this may start in its zone now."""


class Instances:
    def __init__(
        self,
        world: World,
        operations: Operations,
        disks: Disks,
        host: Host,
        billing: Billing,
        builder: InstanceBuilder,
    ) -> None:
        self._world = world
        self._operations = operations
        self._disks = disks
        self._host = host
        self._billing = billing
        self._builder = builder
        self.sites: Sites
        self.capacity: Capacity
        self.on_preempted: Callable[[Vm], None] = lambda _: None
        operations.register("insertInstance", self._begin_insert, self._finish_insert)
        operations.register("deleteInstance", self._begin_delete, lambda _: None)
        operations.register("stop", self._begin_stop, lambda _: None)
        operations.register("start", self._begin_start, self._finish_insert)
        operations.register("attachDisk", self._begin_attach, self._finish_attach)
        operations.register("detachDisk", lambda _: world.timing.detach_s, self._finish_detach)
        operations.register("setMetadata", lambda _: world.timing.quick_s, lambda _: None)
        world.handlers |= {
            "vm.stage": self._stage,
            "vm.acpi": self._press_power,
            "vm.cut": self._cut_power,
            "vm.gone": self._gone,
            "vm.expire": self._expire,
            "vm.restart": self._restart,
            "vm.event": self._tell,
            "vm.host": self._host_fails,
        }

    # Reading

    def find(self, path: str) -> Vm | None:
        return self._world.state.get(KIND, path, Vm)

    def list(self, prefix: str = "projects/") -> list[Vm]:
        return self._world.state.all(KIND, Vm, prefix)

    def get(self, ref: Ref) -> Vm:
        """By name or numeric id.

        Raises:
            ApiError: 404.
        """
        found = self.find(ref.path)
        if found is None and ref.name.isdigit():
            found = next((vm for vm in self.list(ref.folder()) if vm.id == int(ref.name)), None)
        if found is None:
            raise errors.not_found(ref.path)
        return found

    def find_by_name(self, name: str) -> Vm | None:
        """Across zones, by name or id: what people type."""
        return next((vm for vm in self.list() if name in (vm.name, str(vm.id))), None)

    # Insert

    def insert(self, ref: Ref, body: InstanceBody, template: Ref | None, request_id: str | None) -> OpDoc:
        """Accept a VM: it is listed at once, and that proves nothing.

        Raises:
            ApiError: 400, 403 quota, 404 of something it refers to, 409.
        """
        if self.find(ref.path) is not None:
            raise errors.already_exists(ref.path)
        built = self._builder.build(ref, body, template)
        self._check_quota(ref)
        number = self._world.state.next_number("address", start=2)
        vm = self._new(ref, built, self._address(number))
        op = self._operations.start("insertInstance", ref, vm.id, request_id)
        vm = msgspec.structs.replace(vm, insert_op=op.path)
        self._world.state.put(KIND, ref.path, vm)
        self._world.state.after(lambda: self.sites.open(ref.path, vm.address))
        return op

    def _new(self, ref: Ref, built: Built, address: str) -> Vm:
        wire = msgspec.structs.replace(
            built.wire,
            id=self._world.new_id(),
            status="PROVISIONING",
            creation_timestamp=timestamp(self._world.now()),
            network_interfaces=[
                msgspec.structs.replace(interface, network_ip=address, fingerprint=fingerprint(address))
                for interface in built.wire.network_interfaces or []
            ],
        )
        return Vm(ref.path, ref.project, ref.place, wire, address, built.machine)

    def _address(self, number: int) -> str:
        """In 127/8: a block per cloud, so that two clouds on one machine share no address."""
        block = 10 + int(self._world.config.uid[:4], 16) % 200
        return f"127.{block}.{number // 250 % 250}.{number % 250 + 1}"

    def _check_quota(self, ref: Ref) -> None:
        quota = self._world.state.get("quotas", ref.place, Quota)
        used = len(self.list(ref.folder()))
        if quota is not None and used >= quota.instances:
            raise errors.quota_exceeded("INSTANCES", quota.instances, f"zone {ref.place}")

    def _begin_insert(self, op: OpDoc) -> float | None:
        vm = self.find(op.target)
        if vm is None or vm.id != op.operation.target_id or vm.ending is not Ending.NONE:
            raise errors.failed_preempted_while_created(op.target)
        timing = self._world.timing
        if not self.capacity.has_room(vm):
            self._put(vm, ending=Ending.STOCKOUT)
            self._operations.show_error(op.path, errors.stockout(vm.project, vm.zone))
            return timing.stockout_s
        try:
            vm = self._take_disks(vm)
        except FailedOperationError:
            self._remove(vm)
            raise
        self._put(vm, accepted=True)
        self._world.soon(timing.stage_s, "vm.stage", vm.path)
        return timing.stage_s + timing.start_s

    def _take_disks(self, vm: Vm) -> Vm:
        """Make the boot disk, hold the disks that are there already."""
        out: list[AttachedDisk] = []
        held: list[str] = []
        try:
            for index, disk in enumerate(vm.wire.disks or []):
                taken = self._take(vm, disk, index)
                out.append(taken)
                held.append(_path(taken.source))
        except FailedOperationError:
            for path in held:
                self._disks.release(path, vm.path)
            raise
        return self._put(vm, wire=msgspec.structs.replace(vm.wire, disks=out))

    def _take(self, vm: Vm, disk: AttachedDisk, index: int) -> AttachedDisk:
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

    def _plug(self, vm: Vm, disk_id: int, disk: AttachedDisk) -> None:
        device = disk.device_name
        if not disk.boot and device is not None:  # the boot disk is the VM's root folder
            self._world.state.after(lambda: self._host.attach(vm.id, disk_id, device))

    def _stage(self, path: str) -> None:
        vm = self.find(path)
        if vm is not None and vm.wire.status == "PROVISIONING":
            self._show(vm, "STAGING")

    def _finish_insert(self, op: OpDoc) -> None:
        """The machine runs; what its guest makes of that is another matter."""
        vm = self.find(op.target)
        if vm is None or vm.id != op.operation.target_id:
            raise errors.failed_preempted_while_created(op.target)
        if vm.ending is Ending.STOCKOUT:
            self._remove(vm)
            raise errors.stockout(vm.project, vm.zone)
        if vm.ending is not Ending.NONE:
            raise errors.failed_preempted_while_created(op.target)
        self._run(vm)

    def _run(self, vm: Vm) -> None:
        now = self._world.now()
        vm = self._show(vm, "RUNNING", last_start_timestamp=timestamp(now), resource_status=_until(vm.scheduling, now))
        vm = self._put(vm, boots=vm.boots + 1, pid=0, started=0)
        self._billing.begin(Line(vm.path, vm.id, vm.zone, vm.machine, vm.spot, now))
        limit = vm.scheduling.max_run_duration
        if limit is not None:
            self._world.state.drop_timers("vm.expire", vm.path)
            self._world.soon(limit.seconds, "vm.expire", vm.path)
        self._world.state.after(lambda: self._power_on(vm.path))

    def _power_on(self, path: str) -> None:
        vm = self.find(path)
        if vm is None or vm.wire.status != "RUNNING" or vm.pid:
            return
        pid, started = self._host.power_on(vm.id, vm.name, vm.address)
        with self._world.state.transaction():
            self._put(vm, pid=pid, started=started)
        self._watch(vm.path, pid, started)

    def _watch(self, path: str, pid: int, started: int) -> None:
        self._host.watch(pid, started, lambda: self._guest_ended(path, pid))

    # Ending

    def delete(self, ref: Ref, request_id: str | None) -> OpDoc:
        """Accept a deletion, by name or id; the disk is free once the operation is done."""
        vm = self.get(ref)
        if vm.wire.deletion_protection:
            raise errors.invalid("resource", vm.path, "Deletion protection is on.")
        return self._operations.start("deleteInstance", vm.ref, vm.id, request_id)

    def _begin_delete(self, op: OpDoc) -> float | None:
        vm = self.find(op.target)
        if vm is None or vm.id != op.operation.target_id:
            return 0.0  # gone meanwhile: what was asked for holds
        self._leave(vm, Ending.DELETE, op.path)
        return None

    def stop(self, ref: Ref, request_id: str | None) -> OpDoc:
        vm = self.get(ref)
        if vm.wire.status not in ("RUNNING", "TERMINATED"):
            raise errors.not_ready(vm.path)
        return self._operations.start("stop", vm.ref, vm.id, request_id)

    def _begin_stop(self, op: OpDoc) -> float | None:
        vm = self.find(op.target)
        if vm is None or vm.wire.status == "TERMINATED":
            return 0.0
        self._leave(vm, Ending.STOP, op.path)
        return None

    def start(self, ref: Ref, request_id: str | None) -> OpDoc:
        vm = self.get(ref)
        if vm.wire.status != "TERMINATED":
            raise errors.not_ready(vm.path)
        return self._operations.start("start", vm.ref, vm.id, request_id)

    def _begin_start(self, op: OpDoc) -> float | None:
        vm = self.find(op.target)
        if vm is None or vm.wire.status != "TERMINATED" or vm.ending is Ending.DELETE:
            raise errors.failed_not_found(op.target)
        vm = self._put(vm, ending=Ending.NONE, preempted=False, accepted=False)
        if not self.capacity.has_room(vm):
            raise errors.stockout(vm.project, vm.zone)
        self._show(self._put(vm, accepted=True), "STAGING")
        return self._world.timing.start_s

    def _leave(self, vm: Vm, why: Ending, op_path: str = "") -> None:
        """Begin the end of a VM, or join the end that is under way. DELETE outranks what only stops."""
        ending = why if why is Ending.DELETE or vm.ending is Ending.NONE else vm.ending
        vm = self._put(vm, ops=(*vm.ops, op_path) if op_path else vm.ops, ending=ending)
        if vm.wire.status == "RUNNING":
            self._power_off(vm)
        elif vm.wire.status == "TERMINATED":
            self._world.soon(self._world.timing.delete_s, "vm.gone", vm.path)
        elif vm.wire.status != "STOPPING":
            self._off(vm)  # nothing has booted yet

    def _power_off(self, vm: Vm) -> None:
        """ACPI off now, power cut when the guest has had its time."""
        self._show(vm, "STOPPING")
        timing = self._world.timing
        limit = timing.spot_off_s if vm.spot else timing.standard_off_s
        for kind in ("vm.acpi", "vm.cut", "vm.expire"):
            self._world.state.drop_timers(kind, vm.path)
        self._world.soon(limit, "vm.cut", vm.path)
        self._world.state.after(lambda: self._host.press_power(vm.pid, vm.started))

    def preempt(self, vm: Vm, *, notice: bool = True) -> None:
        """Take a spot VM away: metadata first, ACPI off after its notice, power off 30 s later. Or all at once."""
        if vm.preempted or vm.ending not in (Ending.NONE, Ending.STOCKOUT):
            return
        if vm.wire.status != "RUNNING":
            self._leave(vm, Ending.PREEMPT)
            return
        if not notice:
            self.lose(vm)
            return
        wait = vm.scheduling.preemption_notice_duration
        wait_s = float(wait.seconds) if wait else 0.0
        self._put(vm, preempted=True, notice_until=self._world.now() + wait_s)
        self._world.soon(wait_s, "vm.acpi", vm.path)

    def _press_power(self, path: str) -> None:
        vm = self.find(path)
        if vm is None or vm.wire.status != "RUNNING" or not vm.preempted:
            return
        vm = self._put(vm, ending=Ending.PREEMPT)
        self._announce(vm)
        self._power_off(vm)

    def lose(self, vm: Vm) -> None:
        """The host is gone, without a word: kill -9 of everything in the VM."""
        self._host.cut_power(vm.id, vm.pid)
        self._lost(vm)

    def _lost(self, vm: Vm) -> None:
        """What the provider makes of it: spot is taken away, standard restarts where it may."""
        if vm.spot:
            vm = self._put(vm, ending=Ending.PREEMPT, preempted=True)
            self._announce(vm)
            self._off(self._show(vm, "STOPPING"))
        elif vm.scheduling.automatic_restart:
            self._billing.end(vm.id, preempted=False)
            self._operations.note("compute.instances.hostError", vm.ref, vm.id)
            self._show(self._put(vm, pid=0, started=0), "REPAIRING")
            self._world.soon(self._world.timing.host_error_s, "vm.restart", vm.path)
        else:
            vm = self._put(vm, ending=Ending.CRASH)
            self._operations.note("compute.instances.hostError", vm.ref, vm.id)
            self._off(self._show(vm, "STOPPING"))

    def _host_fails(self, path: str) -> None:
        vm = self.find(path)
        if vm is not None and vm.wire.status == "RUNNING":
            self.lose(vm)

    def _restart(self, path: str) -> None:
        vm = self.find(path)
        if vm is not None and vm.wire.status == "REPAIRING":
            self._run(self._put(vm, maintenance="NONE", maintenance_at=0.0))

    def _expire(self, path: str) -> None:
        vm = self.find(path)
        if vm is not None and vm.wire.status == "RUNNING":
            self._leave(vm, Ending.EXPIRE)

    def _cut_power(self, path: str) -> None:
        vm = self.find(path)
        if vm is not None and vm.wire.status == "STOPPING":
            self._host.cut_power(vm.id, vm.pid)
            self._off(vm)

    def _guest_ended(self, path: str, pid: int) -> None:
        """The VM's init is gone: by its own power-off, by ours, or by a crash."""
        with self._world.state.transaction():
            vm = self.find(path)
            if vm is None or vm.pid != pid:
                return
            self._host.cut_power(vm.id, 0)  # stragglers: a dead machine runs nothing
            if vm.wire.status == "STOPPING":
                self._off(vm)
            elif vm.wire.status == "RUNNING" and self._host.was_clean(vm.id):
                self._off(self._show(self._put(vm, ending=Ending.GUEST), "STOPPING"))
            elif vm.wire.status == "RUNNING":
                self._lost(vm)

    def _off(self, vm: Vm) -> None:
        """The last process is dead; what is left is bookkeeping, which takes the provider seconds."""
        self._billing.end(vm.id, vm.ending is Ending.PREEMPT)
        for kind in ("vm.acpi", "vm.cut", "vm.expire", "vm.stage", "vm.gone"):
            self._world.state.drop_timers(kind, vm.path)
        if vm.wire.status != "STOPPING":
            vm = self._show(vm, "STOPPING")
        self._put(vm, pid=0, started=0)
        self._world.soon(self._world.timing.delete_s, "vm.gone", vm.path)

    def _gone(self, path: str) -> None:
        """Deleted, or kept TERMINATED with its disks, as the reason says."""
        vm = self.find(path)
        if vm is None or vm.wire.status not in ("STOPPING", "TERMINATED"):
            return
        deleted = vm.ending is Ending.DELETE or (
            vm.ending in (Ending.PREEMPT, Ending.EXPIRE) and (vm.deletes_itself or vm.boots == 0)
        )
        if deleted:
            self._remove(vm)
        else:
            kept = self._put(vm, ops=(), accepted=False)
            self._show(kept, "TERMINATED", last_stop_timestamp=timestamp(self._world.now()))
        insert = self._operations.get(vm.insert_op)
        if insert is not None and insert.operation.status != "DONE":
            self._operations.end(insert.path, errors.failed_preempted_while_created(vm.path))
        for op in vm.ops:
            self._operations.end(op)

    def _remove(self, vm: Vm) -> None:
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
        self._world.state.delete(KIND, vm.path)
        self._world.state.after(lambda: self.sites.close(vm.path))
        self._world.state.after(lambda: self._host.drop_vm(vm.id))

    def _unplug(self, vm: Vm, disk_id: int, device: str) -> None:
        self._world.state.after(lambda: self._host.detach(vm.id, disk_id, device))

    def _announce(self, vm: Vm) -> None:
        self._operations.note("compute.instances.preempted", vm.ref, vm.id)
        self._world.soon(EVENT_S, "vm.event", f"{vm.path} {vm.id}")

    def _tell(self, arg: str) -> None:
        path, _, number = arg.partition(" ")
        ref = parse(path, "")
        if ref is not None:
            vm = self.find(path)
            gone = Vm(path, ref.project, ref.place, Instance(id=int(number), name=ref.name), "", "")
            self.on_preempted(vm if vm is not None and vm.id == int(number) else gone)

    # Attachments

    def attach(self, ref: Ref, body: AttachedDisk, request_id: str | None) -> OpDoc:
        """Late attach of an existing disk to a VM that runs (or is stopped)."""
        vm = self.get(ref)
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
        self._put(vm, wire=msgspec.structs.replace(vm.wire, disks=[*(vm.wire.disks or []), attached]))
        self._plug(vm, disk.id, attached)

    def _same(self, op: OpDoc) -> Vm:
        """The VM the operation was accepted for, if it is still there and not on its way out."""
        vm = self.find(op.target)
        if vm is None or vm.id != op.operation.target_id or vm.wire.status not in ("RUNNING", "TERMINATED"):
            raise errors.failed_not_found(op.target)
        return vm

    def detach(self, ref: Ref, device: str | None, request_id: str | None) -> OpDoc:
        vm = self.get(ref)
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
        self._put(vm, wire=msgspec.structs.replace(vm.wire, disks=kept))
        path = _path(disk.source)
        self._disks.release(path, vm.path)
        held = self._disks.find(path)
        if held is not None:
            self._unplug(vm, held.id, device)

    # Labels and metadata

    def set_labels(self, ref: Ref, body: SetLabels, request_id: str | None) -> OpDoc:
        vm = self.get(ref)
        validate.labels(body.labels)
        if body.label_fingerprint != vm.wire.label_fingerprint:
            raise errors.stale_fingerprint()
        wire = msgspec.structs.replace(vm.wire, labels=body.labels or None, label_fingerprint=fingerprint(body.labels))
        self._put(vm, wire=wire)
        return self._operations.start("setLabels", vm.ref, vm.id, request_id)

    def set_metadata(self, ref: Ref, body: SetMetadata, request_id: str | None) -> OpDoc:
        vm = self.get(ref)
        old = vm.wire.metadata or Metadata()
        if body.fingerprint != old.fingerprint:
            raise errors.stale_fingerprint()
        values = {item.key: item.value or "" for item in body.items or []}
        validate.metadata(values)
        new = Metadata(kind="compute#metadata", items=body.items, fingerprint=fingerprint(values))
        self._put(vm, wire=msgspec.structs.replace(vm.wire, metadata=new))
        return self._operations.start("setMetadata", vm.ref, vm.id, request_id)

    def set_maintenance(self, vm: Vm, event: str, at: float = 0.0) -> None:
        """``maintenance-event`` in metadata: NONE, or what the host is about to do; ``at``: as it is announced."""
        self._put(vm, maintenance=event, maintenance_at=at)

    # After a restart of the control plane

    def resume(self) -> None:
        """Find every machine again: they went on. Those that ended meanwhile end now."""
        for vm in self.list():
            self.sites.open(vm.path, vm.address)
            if vm.pid:
                self._watch(vm.path, vm.pid, vm.started)
            elif vm.wire.status == "RUNNING":
                self._resume_boot(vm)

    def _resume_boot(self, vm: Vm) -> None:
        """The control plane died between "RUNNING" and the pid of its init: perhaps it had started one."""
        found = self._host.find_init(vm.id)
        if found is None:
            self._power_on(vm.path)
            return
        with self._world.state.transaction():
            self._put(vm, pid=found[0], started=found[1])
        self._watch(vm.path, *found)

    def _show(self, vm: Vm, status: str, **changes: object) -> Vm:
        return self._put(vm, wire=msgspec.structs.replace(vm.wire, status=status, **changes))

    def _put(self, vm: Vm, **changes: object) -> Vm:
        changed = msgspec.structs.replace(vm, **changes)
        self._world.state.put(KIND, vm.path, changed)
        self._world.state.after(lambda: self.sites.changed(vm.path))
        return changed


class Quota(Struct, frozen=True):
    instances: int


def _until(scheduling: Scheduling, began: float) -> ResourceStatus | None:
    """When a machine of limited run that began now will be ended, as the API shows it."""
    limit = scheduling.max_run_duration
    return None if limit is None else ResourceStatus(ScheduleStatus(timestamp(began + limit.seconds)))


def _path(link: str | None) -> str:
    ref = parse(link or "", "")
    return ref.path if ref else last(link or "")


__all__ = ["ApiError", "Ending", "Instances", "Quota", "Vm"]
