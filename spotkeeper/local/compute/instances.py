"""Implements the methods of ``instances``: insert, start, stop, delete, labels, metadata, simulated maintenance.

PROVISIONING -> STAGING -> RUNNING        ``power.py`` has the states after RUNNING
PROVISIONING -> STAGING -> (gone)         stockout: the VM is listed for seconds, then the insert fails
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from spotkeeper.local.compute import validate
from spotkeeper.local.compute.attachments import Attachments
from spotkeeper.local.compute.disks import Disks
from spotkeeper.local.compute.operations import OpDoc, Operations
from spotkeeper.local.compute.reservations import Reservations
from spotkeeper.local.compute.stored import StoredResources
from spotkeeper.local.core import catalog, errors
from spotkeeper.local.core import schema as w
from spotkeeper.local.core.errors import FailedOperationError
from spotkeeper.local.core.rest import Ref, fingerprint, parse_body, parse_ref, timestamp, to_json
from spotkeeper.local.core.vm import Ending, LocalVm, Quota, VmTable
from spotkeeper.local.core.world import World
from spotkeeper.local.spot_market.power import Power


class InstanceBuilder:
    """Builds, from an insert's body and template, the instance that the API will show; it stores nothing."""

    def __init__(self, world: World, stored: StoredResources, disks: Disks, reservations: Reservations) -> None:
        self._world = world
        self.reservations = reservations
        self._stored = stored
        self._disks = disks

    def build(self, ref: Ref, body: w.InstanceBody, template: Ref | None) -> w.Instance:
        """Resolve every reference and fill in every default; ApiError if ``instances.insert`` must refuse the body."""
        merged = self.merged(body, template)
        validate.properties(merged, in_template=False)
        self.reservations.check(ref, merged)
        machine = validate.machine_type(merged.machine_type)
        accelerated = bool(merged.guest_accelerators) or machine.accelerators > 0
        values = merged.metadata.values() if merged.metadata else {}
        return w.Instance(
            kind="compute#instance",
            name=ref.name,
            zone=self._world.self_link(f"projects/{ref.project}/{ref.scope}"),
            self_link=self._world.self_link(ref.path),
            machine_type=self._world.self_link(f"projects/{ref.project}/{ref.scope}/machineTypes/{machine.name}"),
            description=merged.description,
            can_ip_forward=bool(merged.can_ip_forward),
            cpu_platform="Unknown CPU Platform",
            tags=w.Tags(items=merged.tags.items if merged.tags else None, fingerprint=fingerprint(None)),
            labels=merged.labels or None,
            label_fingerprint=fingerprint(merged.labels),
            metadata=w.Metadata(
                "compute#metadata", fingerprint(values), merged.metadata.items if merged.metadata else None
            ),
            disks=[self._disk(ref, disk, index) for index, disk in enumerate(merged.disks or [])],
            network_interfaces=[
                self._interface(ref, item, i) for i, item in enumerate(merged.network_interfaces or [])
            ],
            service_accounts=[self._account(item) for item in merged.service_accounts or []] or None,
            scheduling=validate.scheduling(merged.scheduling, accelerated),
            guest_accelerators=merged.guest_accelerators,
            resource_policies=[self._policy(ref, link) for link in merged.resource_policies or []] or None,
            shielded_instance_config=merged.shielded_instance_config,
            min_cpu_platform=merged.min_cpu_platform,
            reservation_affinity=merged.reservation_affinity,
            advanced_machine_features=merged.advanced_machine_features,
            deletion_protection=bool(body.deletion_protection),
            hostname=body.hostname,
            start_restricted=False,
            fingerprint=fingerprint(ref.path),
        )

    def merged(self, body: w.InstanceBody, template: Ref | None) -> w.InstanceProperties:
        """Merge the body into the template by RFC 7396: maps merge key by key, a list replaces the template's list."""
        if template is None:
            return body
        base = to_json(self._stored.template(template))
        names = {item.encode_name for item in msgspec.structs.fields(w.InstanceProperties)}
        change = {key: value for key, value in to_json(body).items() if key in names}
        return parse_body(validate.merge_patch(base, change), w.InstanceProperties)

    def _disk(self, ref: Ref, disk: w.AttachedDisk, index: int) -> w.AttachedDisk:
        at = f"resource.disks[{index}]"
        if disk.source is not None:
            link = disk.source if "/" in disk.source else f"{ref.scope}/disks/{disk.source}"
            path = self._disks.check_free(ref.project, ref.place, msgspec.structs.replace(disk, source=link))
            disk = msgspec.structs.replace(disk, source=self._world.self_link(path.path))
        elif disk.initialize_params is not None:
            self._image(disk.initialize_params.source_image, f"{at}.initializeParams.sourceImage")
            if disk.initialize_params.source_snapshot is not None:
                raise errors.not_built("an insert of a VM cannot create a disk from a snapshot (create the disk first)")
            boot_name = disk.initialize_params.disk_name or (ref.name if disk.boot else f"{ref.name}-{index}")
            boot = Ref(ref.project, ref.scope, "disks", boot_name)
            if self._disks.find(boot.path) is not None:
                raise errors.already_exists(boot.path)
        return msgspec.structs.replace(
            disk,
            type="PERSISTENT",
            mode="READ_WRITE",
            boot=bool(disk.boot),
            auto_delete=bool(disk.auto_delete),
            interface=disk.interface or "SCSI",
            device_name=disk.device_name or f"persistent-disk-{index}",
        )

    def _image(self, link: str | None, at: str) -> None:
        """Accept any well-formed image link, since this cloud stores no images."""
        if link is None:
            return
        path = link.split("/compute/v1/")[-1].split("/compute/beta/")[-1]
        parts = path.split("/")
        if "images" not in parts or not parts[-1] or not catalog.NAME.match(parts[-1]):
            raise errors.invalid(at, link, "The referenced image resource cannot be found.")

    def _interface(self, ref: Ref, item: w.NetworkInterface, index: int) -> w.NetworkInterface:
        at = f"resource.networkInterfaces[{index}]"
        subnet = self._existing(ref, item.subnetwork, "subnetworks", f"{at}.subnetwork")
        network = self._existing(ref, item.network, "networks", f"{at}.network")
        if subnet is None:
            network = network or Ref(ref.project, "global", "networks", "default")
            subnet = Ref(ref.project, f"regions/{catalog.region_of(ref.place)}", "subnetworks", "default")
            subnet = subnet if network.name == "default" else None
        elif network is None:
            link = self._stored.get(subnet).body["network"]
            network = parse_ref(str(link), ref.project)
        if subnet is not None and subnet.place != catalog.region_of(ref.place):
            raise errors.invalid(f"{at}.subnetwork", subnet.path, "The subnetwork is in another region.")
        return msgspec.structs.replace(
            item,
            kind="compute#networkInterface",
            name=f"nic{index}",
            network=self._world.self_link(network.path) if network else None,
            subnetwork=self._world.self_link(subnet.path) if subnet else None,
            stack_type=item.stack_type or "IPV4_ONLY",
        )

    def _existing(self, ref: Ref, link: str | None, kind: str, at: str) -> Ref | None:
        if link is None:
            return None
        found = parse_ref(link, ref.project)
        if found is None or found.kind != kind or self._stored.find(found) is None:
            raise errors.invalid(at, link, "The referenced resource cannot be found.")
        return found

    def _policy(self, ref: Ref, link: str) -> str:
        at = "resource.resourcePolicies[0]"
        found = self._existing(ref, link, "resourcePolicies", at)
        if found is None or found.place != catalog.region_of(ref.place):
            raise errors.invalid(at, link, "The policy is in another region.")
        return self._world.self_link(found.path)

    def _account(self, item: w.ServiceAccount) -> w.ServiceAccount:
        return item if item.email != "default" else w.ServiceAccount(catalog.DEFAULT_SERVICE_ACCOUNT, item.scopes)


class Capacity(Protocol):
    def has_capacity(self, vm: LocalVm) -> bool:
        """Whether the zone has capacity for this VM."""


@dataclass
class InstanceApi:
    _world: World
    _operations: Operations
    _builder: InstanceBuilder
    _machines: VmTable
    _attachments: Attachments
    _power: Power
    capacity: Capacity = field(init=False)

    def __post_init__(self) -> None:
        world, operations = self._world, self._operations
        operations.register("insertInstance", self._begin_insert, self._finish_insert)
        operations.register("deleteInstance", self._begin_delete, lambda _: None)
        operations.register("stop", self._begin_stop, lambda _: None)
        operations.register("start", self._begin_start, self._finish_insert)
        operations.register("setMetadata", lambda _: world.timing.quick_s, lambda _: None)
        operations.register("simulateMaintenanceEvent", self._begin_simulate, lambda _: None)
        world.handlers["vm.stage"] = self._stage

    # Insert

    def insert(self, ref: Ref, body: w.InstanceBody, template: Ref | None, request_id: str | None) -> OpDoc:
        """Accept a VM, which the API lists from now on. ApiError 400, 403 (quota), 404 or 409 if it is refused."""
        if self._machines.find(ref.path) is not None:
            raise errors.already_exists(ref.path)
        wire = self._builder.build(ref, body, template)
        self._check_quota(ref)
        number = self._world.state.next_number("address", start=2)
        vm = self._new(ref, wire, self._address(number))
        op = self._operations.start("insertInstance", ref, vm.id, request_id)
        self._machines.add(msgspec.structs.replace(vm, insert_op=op.path))
        return op

    def _new(self, ref: Ref, wire: w.Instance, address: str) -> LocalVm:
        wire = msgspec.structs.replace(
            wire,
            id=self._world.new_id(),
            status="PROVISIONING",
            creation_timestamp=timestamp(self._world.now()),
            network_interfaces=[
                msgspec.structs.replace(interface, network_ip=address, fingerprint=fingerprint(address))
                for interface in wire.network_interfaces or []
            ],
        )
        return LocalVm(ref.path, ref.project, ref.place, wire, address)

    def _address(self, number: int) -> str:
        """Return an address of this cloud's block of 127/8; other clouds on this machine have other blocks."""
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
        if not self._has_room(vm):
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

    def _has_room(self, vm: LocalVm) -> bool:
        if vm.reservation is not None:
            return self._builder.reservations.has_room(vm)
        return self.capacity.has_capacity(vm)

    def _stage(self, path: str) -> None:
        vm = self._machines.find(path)
        if vm is not None and vm.wire.status == "PROVISIONING":
            self._machines.show(vm, "STAGING")

    def _finish_insert(self, op: OpDoc) -> None:
        """Make the VM RUNNING; after that its guest boots."""
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
        """Accept the deletion of a VM, by name or id; its disks are free once the operation is done."""
        vm = self._machines.get(ref)
        if vm.wire.deletion_protection:
            raise errors.invalid("resource", vm.path, "Deletion protection is on.")
        return self._operations.start("deleteInstance", vm.ref, vm.id, request_id)

    def _begin_delete(self, op: OpDoc) -> float | None:
        vm = self._machines.find(op.target)
        if vm is None or vm.id != op.operation.target_id:
            return 0.0  # gone already
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
        if not self._has_room(vm):
            raise errors.stockout(vm.project, vm.zone)
        self._machines.show(self._machines.put(vm, accepted=True), "STAGING")
        return self._world.timing.start_s

    def simulate(self, ref: Ref, request_id: str | None) -> OpDoc:
        """Simulate maintenance. As on Compute Engine this preempts a spot VM."""
        vm = self._machines.get(ref)
        return self._operations.start("simulateMaintenanceEvent", vm.ref, vm.id, request_id)

    def _begin_simulate(self, op: OpDoc) -> float | None:
        vm = self._machines.find(op.target)
        if vm is not None and vm.spot:
            self._power.preempt(vm)
        return self._world.timing.quick_s

    # Labels and metadata

    def set_labels(self, ref: Ref, body: w.SetLabels, request_id: str | None) -> OpDoc:
        vm = self._machines.get(ref)
        validate.labels(body.labels)
        if body.label_fingerprint != vm.wire.label_fingerprint:
            raise errors.stale_fingerprint()
        wire = msgspec.structs.replace(vm.wire, labels=body.labels or None, label_fingerprint=fingerprint(body.labels))
        self._machines.put(vm, wire=wire)
        return self._operations.start("setLabels", vm.ref, vm.id, request_id)

    def set_metadata(self, ref: Ref, body: w.SetMetadata, request_id: str | None) -> OpDoc:
        vm = self._machines.get(ref)
        old = vm.wire.metadata or w.Metadata()
        if body.fingerprint != old.fingerprint:
            raise errors.stale_fingerprint()
        new = w.Metadata(kind="compute#metadata", items=body.items)
        validate.metadata(new.values())
        new = msgspec.structs.replace(new, fingerprint=fingerprint(new.values()))
        self._machines.put(vm, wire=msgspec.structs.replace(vm.wire, metadata=new))
        return self._operations.start("setMetadata", vm.ref, vm.id, request_id)

    def set_maintenance(self, vm: LocalVm, event: str, at: float = 0.0) -> None:
        """Set ``maintenance-event`` in metadata to NONE or the host's next action. ``at``: the action's time."""
        self._machines.put(vm, maintenance=event, maintenance_at=at)
