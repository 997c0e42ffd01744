"""What the API does to VMs: from an insert to a machine that runs, and what is asked of it then.

PROVISIONING -> STAGING -> RUNNING        from here on ``power.py`` has it
PROVISIONING -> STAGING -> (gone)         stockout: listed for seconds, then an error
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from spotkeeper.local import errors, validate
from spotkeeper.local.attachments import Attachments
from spotkeeper.local.build import Built, InstanceBuilder
from spotkeeper.local.errors import FailedOperationError
from spotkeeper.local.operations import OpDoc, Operations
from spotkeeper.local.paths import Ref, timestamp
from spotkeeper.local.power import Power
from spotkeeper.local.tags import fingerprint
from spotkeeper.local.vm import Ending, Machines, Quota, Vm
from spotkeeper.local.wire import InstanceBody, Metadata, SetLabels, SetMetadata
from spotkeeper.local.world import World


class Capacity(Protocol):
    def has_room(self, vm: Vm) -> bool:
        """Whether one more VM like this may start in its zone now."""


class Instances:
    def __init__(
        self,
        world: World,
        operations: Operations,
        builder: InstanceBuilder,
        machines: Machines,
        attachments: Attachments,
        power: Power,
    ) -> None:
        self._world = world
        self._operations = operations
        self._builder = builder
        self._machines = machines
        self._attachments = attachments
        self._power = power
        self.capacity: Capacity
        operations.register("insertInstance", self._begin_insert, self._finish_insert)
        operations.register("deleteInstance", self._begin_delete, lambda _: None)
        operations.register("stop", self._begin_stop, lambda _: None)
        operations.register("start", self._begin_start, self._finish_insert)
        operations.register("setMetadata", lambda _: world.timing.quick_s, lambda _: None)
        world.handlers["vm.stage"] = self._stage

    # Insert

    def insert(self, ref: Ref, body: InstanceBody, template: Ref | None, request_id: str | None) -> OpDoc:
        """Accept a VM: it is listed at once, and that proves nothing.

        Raises:
            ApiError: 400, 403 quota, 404 of something it refers to, 409.
        """
        if self._machines.find(ref.path) is not None:
            raise errors.already_exists(ref.path)
        built = self._builder.build(ref, body, template)
        self._check_quota(ref)
        number = self._world.state.next_number("address", start=2)
        vm = self._new(ref, built, self._address(number))
        op = self._operations.start("insertInstance", ref, vm.id, request_id)
        vm = msgspec.structs.replace(vm, insert_op=op.path)
        self._machines.add(vm)
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
        used = len(self._machines.list(ref.folder()))
        if quota is not None and used >= quota.instances:
            raise errors.quota_exceeded("INSTANCES", quota.instances, f"zone {ref.place}")

    def _begin_insert(self, op: OpDoc) -> float | None:
        vm = self._machines.find(op.target)
        if vm is None or vm.id != op.operation.target_id or vm.ending is not Ending.NONE:
            raise errors.failed_preempted_while_created(op.target)
        timing = self._world.timing
        if not self.capacity.has_room(vm):
            self._machines.put(vm, ending=Ending.STOCKOUT)
            self._operations.show_error(op.path, errors.stockout(vm.project, vm.zone))
            return timing.stockout_s
        try:
            vm = self._attachments.take(vm)
        except FailedOperationError:
            self._power.remove(vm)
            raise
        self._machines.put(vm, accepted=True)
        self._world.soon(timing.stage_s, "vm.stage", vm.path)
        return timing.stage_s + timing.start_s

    def _stage(self, path: str) -> None:
        vm = self._machines.find(path)
        if vm is not None and vm.wire.status == "PROVISIONING":
            self._machines.show(vm, "STAGING")

    def _finish_insert(self, op: OpDoc) -> None:
        """The machine runs; what its guest makes of that is another matter."""
        vm = self._machines.find(op.target)
        if vm is None or vm.id != op.operation.target_id:
            raise errors.failed_preempted_while_created(op.target)
        if vm.ending is Ending.STOCKOUT:
            self._power.remove(vm)
            raise errors.stockout(vm.project, vm.zone)
        if vm.ending is not Ending.NONE:
            raise errors.failed_preempted_while_created(op.target)
        self._power.run(vm)

    # Delete, stop, start

    def delete(self, ref: Ref, request_id: str | None) -> OpDoc:
        """Accept a deletion, by name or id; the disk is free once the operation is done."""
        vm = self._machines.get(ref)
        if vm.wire.deletion_protection:
            raise errors.invalid("resource", vm.path, "Deletion protection is on.")
        return self._operations.start("deleteInstance", vm.ref, vm.id, request_id)

    def _begin_delete(self, op: OpDoc) -> float | None:
        vm = self._machines.find(op.target)
        if vm is None or vm.id != op.operation.target_id:
            return 0.0  # gone meanwhile: what was asked for holds
        self._power.leave(vm, Ending.DELETE, op.path)
        return None

    def stop(self, ref: Ref, request_id: str | None) -> OpDoc:
        vm = self._machines.get(ref)
        if vm.wire.status not in ("RUNNING", "TERMINATED"):
            raise errors.not_ready(vm.path)
        return self._operations.start("stop", vm.ref, vm.id, request_id)

    def _begin_stop(self, op: OpDoc) -> float | None:
        vm = self._machines.find(op.target)
        if vm is None or vm.wire.status == "TERMINATED":
            return 0.0
        self._power.leave(vm, Ending.STOP, op.path)
        return None

    def start(self, ref: Ref, request_id: str | None) -> OpDoc:
        vm = self._machines.get(ref)
        if vm.wire.status != "TERMINATED":
            raise errors.not_ready(vm.path)
        return self._operations.start("start", vm.ref, vm.id, request_id)

    def _begin_start(self, op: OpDoc) -> float | None:
        vm = self._machines.find(op.target)
        if vm is None or vm.wire.status != "TERMINATED" or vm.ending is Ending.DELETE:
            raise errors.failed_not_found(op.target)
        vm = self._machines.put(vm, ending=Ending.NONE, preempted=False, accepted=False)
        if not self.capacity.has_room(vm):
            raise errors.stockout(vm.project, vm.zone)
        self._machines.show(self._machines.put(vm, accepted=True), "STAGING")
        return self._world.timing.start_s

    # Labels and metadata

    def set_labels(self, ref: Ref, body: SetLabels, request_id: str | None) -> OpDoc:
        vm = self._machines.get(ref)
        validate.labels(body.labels)
        if body.label_fingerprint != vm.wire.label_fingerprint:
            raise errors.stale_fingerprint()
        wire = msgspec.structs.replace(vm.wire, labels=body.labels or None, label_fingerprint=fingerprint(body.labels))
        self._machines.put(vm, wire=wire)
        return self._operations.start("setLabels", vm.ref, vm.id, request_id)

    def set_metadata(self, ref: Ref, body: SetMetadata, request_id: str | None) -> OpDoc:
        vm = self._machines.get(ref)
        old = vm.wire.metadata or Metadata()
        if body.fingerprint != old.fingerprint:
            raise errors.stale_fingerprint()
        values = {item.key: item.value or "" for item in body.items or []}
        validate.metadata(values)
        new = Metadata(kind="compute#metadata", items=body.items, fingerprint=fingerprint(values))
        self._machines.put(vm, wire=msgspec.structs.replace(vm.wire, metadata=new))
        return self._operations.start("setMetadata", vm.ref, vm.id, request_id)

    def set_maintenance(self, vm: Vm, event: str, at: float = 0.0) -> None:
        """``maintenance-event`` in metadata: NONE, or what the host is about to do; ``at``: as it is announced."""
        self._machines.put(vm, maintenance=event, maintenance_at=at)
