"""The pools: two machine templates for each spot pool in each of its regions, and the machines of each static pool.

For a launch the function chooses only a template and a zone. A pool's templates differ only in scheduling. None has the
data disk: it is attached to a running machine, so that a replacement can boot while its predecessor ends.
"""

from __future__ import annotations

from typing import Any

import pulumi
import pulumi_gcp as gcp

from infra import naming
from infra.boot import Scripts
from infra.gcp.function import GcpFunction
from infra.gcp.identity import GcpIdentity
from infra.gcp.network import GVNIC, Card, GcpNetwork
from infra.gcp.storage import GcpStorage
from infra.settings.model import models, pool_state, state_text
from infra.settings.pool import Pool
from infra.shared import Component, Disks, PlacementGroups, key_in
from spotkeeper.contract.stack import region_of, template_key

DATA_DEVICE = "sk-data"  # the agent mounts /dev/disk/by-id/google-sk-data
SCOPE = "https://www.googleapis.com/auth/cloud-platform"  # narrowed by the identity's roles
_DOMAINS = 8  # availability domains, the maximum of a spread policy; more machines share them


class GcpPools(Component):
    """The pools. ``templates``: pool -> ``template_key`` -> self link; ``machines``: name -> static machine."""

    def __init__(
        self,
        scripts: Scripts,
        bundle_sha256: str,
        network: GcpNetwork,
        identity: GcpIdentity,
        storage: GcpStorage,
        function: GcpFunction,
        placement: PlacementGroups,
        disks: Disks,
    ) -> None:
        super().__init__("Pools", network.settings)
        self._scripts, self._bundle_sha256 = scripts, bundle_sha256
        self._network, self._identity, self._storage = network, identity, storage
        self._function, self._placement, self._disks = function, placement, disks
        # A machine without its rights to the bucket and the function would only wait, and cost money.
        self._needs = [storage.bundle, *storage.access, *function.access]
        self.templates = {
            pool.name: {
                template_key(model, region, self.settings.region): self._template(pool, model, region).self_link
                for region in self.settings.regions_of(pool)
                for model in models(pool)
            }
            for pool in self.settings.dynamic()
        }
        self.machines = {
            naming.static_machine(self.settings.stack, pool.name, index): self._machine(pool, index)
            for pool in self.settings.static()
            for index in range(pool.size)
        }
        self.parts += self.machines.values()
        self.register_outputs({})

    def _template(self, pool: Pool, model: str, region: str) -> gcp.compute.RegionInstanceTemplate:
        disk = gcp.compute.RegionInstanceTemplateDiskArgs(
            boot=True,
            auto_delete=True,
            device_name="boot",
            source_image=pool.image,
            disk_size_gb=pool.boot_disk.size_gb,
            disk_type=pool.boot_disk.type,
            labels=self.labels(pool.name),
        )
        return gcp.compute.RegionInstanceTemplate(
            naming.template(self.settings.stack, pool.name, model, region, self.settings.region),
            region=region,
            scheduling=scheduling(pool, model, pool.max_run_s()),
            disks=[disk],
            opts=pulumi.ResourceOptions(parent=self, depends_on=self._needs),
            **self._shape(pool, region),
        )

    def _machine(self, pool: Pool, index: int) -> gcp.compute.Instance:
        """Declare a static machine without a template, so that a new agent, image or label does not replace it.

        A boot disk changes only if its machine is replaced, so a static machine keeps its image until an operator has
        the machine replaced (docs/day-two.md, "Rotating images").
        """
        called = naming.static_machine(self.settings.stack, pool.name, index)
        zone = pool.machine_zone(index)
        return gcp.compute.Instance(
            called,
            name=called,
            zone=zone,
            allow_stopping_for_update=True,
            scheduling=gcp.compute.InstanceSchedulingArgs(
                provisioning_model="STANDARD",
                automatic_restart=True,
                on_host_maintenance=on_host_maintenance(pool),
            ),
            boot_disk=gcp.compute.InstanceBootDiskArgs(
                auto_delete=True,
                device_name="boot",
                initialize_params=gcp.compute.InstanceBootDiskInitializeParamsArgs(
                    image=pool.image,
                    size=pool.boot_disk.size_gb,
                    type=pool.boot_disk.type,
                    labels=self.labels(pool.name),
                ),
            ),
            attached_disks=[
                gcp.compute.InstanceAttachedDiskArgs(
                    source=self._disks.ids[called], device_name=DATA_DEVICE, mode="READ_WRITE"
                )
            ],
            resource_policies=self._placement.groups.get(pool.name, {}).get(zone),
            opts=pulumi.ResourceOptions(parent=self, depends_on=self._needs, ignore_changes=["bootDisk"]),
            **self._shape(pool, region_of(zone)),
        )

    def _shape(self, pool: Pool, region: str) -> dict[str, Any]:
        """Return the properties that templates and static machines share; both accept dictionaries for nested ones."""
        added = pool.machine.accelerator
        return {
            "machine_type": pool.machine.type,
            # Accelerators that are built into a machine type are not declared.
            "guest_accelerators": [{"type": added.type, "count": added.count}] if added else [],
            "network_interfaces": [
                {
                    "subnetwork": card.subnetwork,
                    "nic_type": card.nic_type or None,
                    "access_configs": [{}] if public else [],
                }
                for card, public in self._cards(pool, region)
            ],
            "service_account": {"email": self._identity.machine.email, "scopes": [SCOPE]},
            "shielded_instance_config": {"enable_vtpm": True, "enable_integrity_monitoring": True},
            "labels": self.labels(pool.name),
            "tags": [self.prefix],
            "metadata": self._metadata(pool),
        }

    def _cards(self, pool: Pool, region: str) -> list[tuple[Card, bool]]:
        """Return (card, whether it has a public address) for each network card; only the first can have one."""
        first = Card(self._network.subnetworks[region], nic_type(pool))
        further = [(card, False) for card in self._network.cards.get(pool.name, ())]
        return [(first, self.settings.network.public_ip), *further]

    def _metadata(self, pool: Pool) -> dict[str, pulumi.Input[str]]:
        """Return a machine's metadata, which consists of constants of the stack. No value depends on a job."""
        return {
            "enable-oslogin": "TRUE",
            "shutdown-script": self._scripts.shutdown,
            "sk-bucket": self._storage.bucket.name,
            "sk-bundle": self._bundle_sha256,
            **({"sk-fabric": pool.machine.gpu_direct} if pool.machine.gpu_direct else {}),
            "sk-function": self._function.url,
            **({"sk-job-identity": self.settings.job_identity} if self.settings.job_identity else {}),
            "sk-notice-s": str(pool.notice_seconds()),
            "sk-stack": self.settings.stack,
            "sk-storage": self.settings.endpoints.storage,
            "startup-script": self._scripts.startup,
        }

    def publish_state(self, regions: pulumi.Resource) -> gcp.storage.BucketObject:
        """Write ``stack/pools.json``, which the function reads on every tick, once ``regions`` has agreed to them."""
        links = pulumi.Output.all(templates=self.templates, placement=self._placement.groups)
        states = links.apply(
            lambda found: [
                pool_state(
                    self.settings, pool, found["templates"].get(pool.name, {}), found["placement"].get(pool.name, {})
                )
                for pool in self.settings.pools
            ]
        )
        return gcp.storage.BucketObject(
            "pools",
            bucket=self._storage.bucket.name,
            name=naming.POOLS_OBJECT,
            content=pulumi.Output.all(states, self._function.url, self._identity.machine.email).apply(
                lambda found: state_text(self.settings, found[0], found[1], found[2], self._bundle_sha256)
            ),
            content_type="application/json",
            opts=pulumi.ResourceOptions(parent=self._storage, depends_on=[regions]),
        )


def nic_type(pool: Pool) -> str:
    """Return the type of the first network card; "" if the cloud chooses it by machine type and image."""
    if pool.machine.gpu_direct:
        return GVNIC
    return {"gvnic": GVNIC, "virtio": "VIRTIO_NET", None: ""}[pool.machine.nic]


def on_host_maintenance(pool: Pool) -> str:
    """Return the policy for host maintenance. Machines with accelerators or compact placement cannot migrate."""
    close = pool.placement is not None and pool.placement.strategy != "spread"
    return "TERMINATE" if pool.machine.has_accelerator() or close else "MIGRATE"


def scheduling(pool: Pool, model: str, max_run_s: int | None) -> gcp.compute.RegionInstanceTemplateSchedulingArgs:
    """Return a template's scheduling.

    After ``max_run_s`` Compute Engine ends a machine even if function and agent fail. It accepts this limit only with a
    termination action.
    """
    duration = gcp.compute.RegionInstanceTemplateSchedulingMaxRunDurationArgs(seconds=max_run_s) if max_run_s else None
    if model == "on-demand":
        # No restart after a host error: the function replaces the machine anyway.
        return gcp.compute.RegionInstanceTemplateSchedulingArgs(
            provisioning_model="STANDARD",
            automatic_restart=False,
            on_host_maintenance=on_host_maintenance(pool),
            instance_termination_action="DELETE" if max_run_s else None,
            max_run_duration=duration,
        )
    notice = gcp.compute.RegionInstanceTemplateSchedulingPreemptionNoticeDurationArgs(seconds=pool.notice_seconds())
    return gcp.compute.RegionInstanceTemplateSchedulingArgs(
        # Compute Engine requires the first five fields together.
        provisioning_model="SPOT",
        preemptible=True,
        automatic_restart=False,
        on_host_maintenance="TERMINATE",
        instance_termination_action="DELETE",
        max_run_duration=duration,
        preemption_notice_duration=notice if pool.notice_seconds() else None,
    )


def disk(disks: Component, pool: Pool, name: str, zone: str, opts: pulumi.ResourceOptions) -> pulumi.Output[str]:
    """Declare the data disk of a static machine; return its self link."""
    made = gcp.compute.Disk(
        name,
        name=name,
        zone=zone,
        size=pool.disk.size_gb,
        type=pool.disk.type,
        provisioned_iops=pool.disk.iops,
        provisioned_throughput=pool.disk.mb_s,
        labels=disks.labels(pool.name),
        opts=opts,
    )
    link: pulumi.Output[str] = made.self_link
    return link


def placement_policy(component: Component, pool: Pool, zone: str) -> tuple[pulumi.Resource, pulumi.Output[str]]:
    """Declare the placement policy of a pool in a zone; return the policy and its self link."""
    name, region = naming.placement(component.settings.stack, pool.name, zone), region_of(zone)
    policy = gcp.compute.ResourcePolicy(
        key_in(name, region, component.settings),
        name=name,
        region=region,
        group_placement_policy=group(pool),
        opts=component.child,
    )
    return policy, policy.self_link


def group(pool: Pool) -> gcp.compute.ResourcePolicyGroupPlacementPolicyArgs:
    """Return a pool's placement. A ``vm_count`` would demand exactly that number of machines, so none is set."""
    if pool.placement and pool.placement.strategy == "spread":
        return gcp.compute.ResourcePolicyGroupPlacementPolicyArgs(availability_domain_count=min(_DOMAINS, pool.size))
    return gcp.compute.ResourcePolicyGroupPlacementPolicyArgs(
        collocation="COLLOCATED", max_distance=pool.placement.max_distance if pool.placement else None
    )
