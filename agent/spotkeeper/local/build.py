"""From an insert's body, and perhaps a template, to the instance the API will show. Validates; has no effects."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from spotkeeper.local import catalog, errors, validate
from spotkeeper.local.disks import Disks
from spotkeeper.local.paths import Ref, parse
from spotkeeper.local.stored import Storeroom
from spotkeeper.local.tags import fingerprint
from spotkeeper.local.wire import (
    AttachedDisk,
    Instance,
    InstanceBody,
    InstanceProperties,
    Metadata,
    NetworkInterface,
    ServiceAccount,
    Tags,
    to_json,
)
from spotkeeper.local.wire import parse as parse_body
from spotkeeper.local.world import World


class Built(NamedTuple):
    """``machine``: the type's bare name, for the bill."""

    wire: Instance
    machine: str


class InstanceBuilder:
    def __init__(self, world: World, storeroom: Storeroom, disks: Disks) -> None:
        self._world = world
        self._storeroom = storeroom
        self._disks = disks

    def build(self, ref: Ref, body: InstanceBody, template: Ref | None) -> Built:
        """The instance, with every reference resolved and every default filled in.

        Raises:
            ApiError: as instances.insert answers.
        """
        merged = self._merge(body, template)
        validate.properties(merged, in_template=False)
        machine = validate.machine_type(merged.machine_type)
        accelerated = bool(merged.guest_accelerators) or machine.accelerators > 0
        values = merged.metadata.values() if merged.metadata else {}
        wire = Instance(
            kind="compute#instance",
            name=ref.name,
            zone=self._link(f"projects/{ref.project}/{ref.scope}"),
            self_link=self._link(ref.path),
            machine_type=self._link(f"projects/{ref.project}/{ref.scope}/machineTypes/{machine.name}"),
            description=merged.description,
            can_ip_forward=bool(merged.can_ip_forward),
            cpu_platform="Unknown CPU Platform",
            tags=Tags(items=merged.tags.items if merged.tags else None, fingerprint=fingerprint(None)),
            labels=merged.labels or None,
            label_fingerprint=fingerprint(merged.labels),
            metadata=Metadata(
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
        return Built(wire, machine.name)

    def _merge(self, body: InstanceBody, template: Ref | None) -> InstanceProperties:
        """Template and body as RFC 7396 has it: maps merge key by key, lists replace."""
        if template is None:
            return body
        base = to_json(self._storeroom.template(template))
        names = {item.encode_name for item in msgspec.structs.fields(InstanceProperties)}
        change = {key: value for key, value in to_json(body).items() if key in names}
        return parse_body(validate.merge_patch(base, change), InstanceProperties)

    def _disk(self, ref: Ref, disk: AttachedDisk, index: int) -> AttachedDisk:
        at = f"resource.disks[{index}]"
        if disk.source is not None:
            link = disk.source if "/" in disk.source else f"{ref.scope}/disks/{disk.source}"
            path = self._disks.check_free(ref.project, ref.place, msgspec.structs.replace(disk, source=link))
            disk = msgspec.structs.replace(disk, source=self._link(path.path))
        elif disk.initialize_params is not None:
            self._image(disk.initialize_params.source_image, f"{at}.initializeParams.sourceImage")
            if disk.initialize_params.source_snapshot is not None:
                raise errors.not_built("a VM's disk from a snapshot (create the disk, then attach it)")
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
        """Images are not kept: any of a public project, in the right form, is taken."""
        if link is None:
            return
        path = link.split("/compute/v1/")[-1].split("/compute/beta/")[-1]
        parts = path.split("/")
        if "images" not in parts or not parts[-1] or not catalog.NAME.match(parts[-1]):
            raise errors.invalid(at, link, "The referenced image resource cannot be found.")

    def _interface(self, ref: Ref, item: NetworkInterface, index: int) -> NetworkInterface:
        at = f"resource.networkInterfaces[{index}]"
        subnet = self._existing(ref, item.subnetwork, "subnetworks", f"{at}.subnetwork")
        network = self._existing(ref, item.network, "networks", f"{at}.network")
        if subnet is None:
            network = network or Ref(ref.project, "global", "networks", "default")
            subnet = Ref(ref.project, f"regions/{catalog.region_of(ref.place)}", "subnetworks", "default")
            subnet = subnet if network.name == "default" else None
        elif network is None:
            link = self._storeroom.get(subnet).body["network"]
            network = parse(str(link), ref.project)
        if subnet is not None and subnet.place != catalog.region_of(ref.place):
            raise errors.invalid(f"{at}.subnetwork", subnet.path, "The subnetwork is in another region.")
        return msgspec.structs.replace(
            item,
            kind="compute#networkInterface",
            name=f"nic{index}",
            network=self._link(network.path) if network else None,
            subnetwork=self._link(subnet.path) if subnet else None,
            stack_type=item.stack_type or "IPV4_ONLY",
        )

    def _existing(self, ref: Ref, link: str | None, kind: str, at: str) -> Ref | None:
        if link is None:
            return None
        found = parse(link, ref.project)
        if found is None or found.kind != kind or self._storeroom.find(found) is None:
            raise errors.invalid(at, link, "The referenced resource cannot be found.")
        return found

    def _policy(self, ref: Ref, link: str) -> str:
        at = "resource.resourcePolicies[0]"
        found = self._existing(ref, link, "resourcePolicies", at)
        if found is None or found.place != catalog.region_of(ref.place):
            raise errors.invalid(at, link, "The policy is in another region.")
        return self._link(found.path)

    def _account(self, item: ServiceAccount) -> ServiceAccount:
        return item if item.email != "default" else ServiceAccount(catalog.DEFAULT_SERVICE_ACCOUNT, item.scopes)

    def _link(self, path: str) -> str:
        return self._world.self_link(path)
