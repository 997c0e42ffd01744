"""Machine shapes: two templates for each spot pool, the nodes of each static pool.

Reconcile picks a template and a zone and nothing else. Both templates of a pool come from
one builder and differ in their scheduling only. The data disk is in neither: it is
attached once the machine runs, so that a replacement can boot while its predecessor dies.
"""

from __future__ import annotations

from dataclasses import dataclass

import pulumi
import pulumi_gcp as gcp
from spotkeeper.spec.stack import PoolState

from infra import naming
from infra.boot import BootArgs
from infra.bundle import Archive
from infra.gcp.disks import Disks
from infra.gcp.identity import Identity
from infra.gcp.network import GVNIC, Card, Network
from infra.gcp.placement import Placement
from infra.gcp.reconcile import Function
from infra.gcp.storage import Storage
from infra.settings import Pool, Settings
from infra.settings.state import models, pool_state, state_text

DATA_DEVICE = "sk-data"  # the agent finds the disk as /dev/disk/by-id/google-sk-data
SCOPE = "https://www.googleapis.com/auth/cloud-platform"  # narrowed by the identity's roles


@dataclass(frozen=True)
class PoolsArgs(BootArgs):
    network: Network
    identity: Identity
    storage: Storage
    function: Function
    placement: Placement
    disks: Disks


class Pools(pulumi.ComponentResource):
    """``templates``: pool -> model -> self link. ``nodes``: name -> the static instance."""

    def __init__(self, name: str, args: PoolsArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("spotkeeper:gcp:Pools", name, None, opts)
        self._args = args
        # A machine that boots before it may read the bucket, or call the function, only waits: but it bills.
        self._opts = pulumi.ResourceOptions(
            parent=self, depends_on=[args.storage.bundle, *args.storage.access, *args.function.access]
        )
        spot = [pool for pool in args.settings.pools if pool.kind == "spot"]
        static = [pool for pool in args.settings.pools if pool.kind == "static"]
        self.templates = {
            pool.name: {model: self._template(pool, model).self_link for model in models(pool)} for pool in spot
        }
        self.nodes = {
            naming.node(args.settings.stack, pool.name, index): self._node(pool, index)
            for pool in static
            for index in range(pool.size)
        }
        self.parts: list[pulumi.Resource] = list(self.nodes.values())
        self.register_outputs({})

    def _template(self, pool: Pool, model: str) -> gcp.compute.RegionInstanceTemplate:
        settings = self._args.settings
        labels = naming.labels(settings.labels, settings.stack, pool.name)
        return gcp.compute.RegionInstanceTemplate(
            naming.template(settings.stack, pool.name, model),
            region=settings.region,
            machine_type=pool.machine.type,
            scheduling=scheduling(pool, model, pool.max_run_s()),
            guest_accelerators=[
                gcp.compute.RegionInstanceTemplateGuestAcceleratorArgs(type=kind, count=count)
                for kind, count in accelerators(pool)
            ],
            disks=[
                gcp.compute.RegionInstanceTemplateDiskArgs(
                    boot=True,
                    auto_delete=True,
                    device_name="boot",
                    source_image=pool.image,
                    disk_size_gb=pool.boot_disk.size_gb,
                    disk_type=pool.boot_disk.type,
                    labels=labels,
                )
            ],
            network_interfaces=[
                gcp.compute.RegionInstanceTemplateNetworkInterfaceArgs(
                    subnetwork=card.subnetwork,
                    nic_type=card.nic_type or None,
                    access_configs=[gcp.compute.RegionInstanceTemplateNetworkInterfaceAccessConfigArgs()]
                    if public
                    else [],
                )
                for card, public in self._cards(pool)
            ],
            service_account=gcp.compute.RegionInstanceTemplateServiceAccountArgs(
                email=self._args.identity.node.email, scopes=[SCOPE]
            ),
            shielded_instance_config=gcp.compute.RegionInstanceTemplateShieldedInstanceConfigArgs(
                enable_vtpm=True, enable_integrity_monitoring=True
            ),
            labels=labels,
            tags=[naming.stack(settings.stack)],
            metadata=self._metadata(pool),
            opts=self._opts,
        )

    def _node(self, pool: Pool, index: int) -> gcp.compute.Instance:
        """Not made from a template: a new agent, a new image, another label must not replace the floor.

        The provider can change nothing of a boot disk but by another machine, so what a node booted from it keeps until
        somebody has it replaced (`docs/operate.md`, Rotating images).
        """
        settings = self._args.settings
        called = naming.node(settings.stack, pool.name, index)
        labels = naming.labels(settings.labels, settings.stack, pool.name)
        zone = pool.node_zone(index)
        return gcp.compute.Instance(
            called,
            name=called,
            zone=zone,
            machine_type=pool.machine.type,
            allow_stopping_for_update=True,
            scheduling=gcp.compute.InstanceSchedulingArgs(
                provisioning_model="STANDARD",
                automatic_restart=True,
                on_host_maintenance=on_host_maintenance(pool),
            ),
            guest_accelerators=[
                gcp.compute.InstanceGuestAcceleratorArgs(type=kind, count=count) for kind, count in accelerators(pool)
            ],
            boot_disk=gcp.compute.InstanceBootDiskArgs(
                auto_delete=True,
                device_name="boot",
                initialize_params=gcp.compute.InstanceBootDiskInitializeParamsArgs(
                    image=pool.image, size=pool.boot_disk.size_gb, type=pool.boot_disk.type, labels=labels
                ),
            ),
            attached_disks=[
                gcp.compute.InstanceAttachedDiskArgs(
                    source=self._args.disks.links[called], device_name=DATA_DEVICE, mode="READ_WRITE"
                )
            ],
            network_interfaces=[
                gcp.compute.InstanceNetworkInterfaceArgs(
                    subnetwork=card.subnetwork,
                    nic_type=card.nic_type or None,
                    access_configs=[gcp.compute.InstanceNetworkInterfaceAccessConfigArgs()] if public else [],
                )
                for card, public in self._cards(pool)
            ],
            service_account=gcp.compute.InstanceServiceAccountArgs(
                email=self._args.identity.node.email, scopes=[SCOPE]
            ),
            shielded_instance_config=gcp.compute.InstanceShieldedInstanceConfigArgs(
                enable_vtpm=True, enable_integrity_monitoring=True
            ),
            resource_policies=self._args.placement.policies.get(pool.name, {}).get(zone),
            labels=labels,
            tags=[naming.stack(settings.stack)],
            metadata=self._metadata(pool),
            opts=pulumi.ResourceOptions.merge(self._opts, pulumi.ResourceOptions(ignore_changes=["bootDisk"])),
        )

    def _cards(self, pool: Pool) -> list[tuple[Card, bool]]:
        """Each with whether it has a public address: only the first may."""
        first = Card(self._args.network.subnetwork, nic_type(pool))
        further = [(card, False) for card in self._args.network.cards.get(pool.name, ())]
        return [(first, self._args.settings.network.public_ip), *further]

    def _metadata(self, pool: Pool) -> dict[str, pulumi.Input[str]]:
        """Constants of the stack; what a job says never travels here."""
        args = self._args
        return {
            "enable-oslogin": "TRUE",
            "shutdown-script": args.scripts.shutdown,
            "sk-bucket": args.storage.bucket.name,
            "sk-bundle": args.bundle_sha256,
            "sk-function": args.function.url,
            **({"sk-job-identity": args.settings.job_identity} if args.settings.job_identity else {}),
            "sk-notice-s": str(pool.notice_seconds()),
            "sk-stack": args.settings.stack,
            "sk-storage": args.settings.endpoints.storage,
            "startup-script": args.scripts.startup,
        }


def accelerators(pool: Pool) -> list[tuple[str, int]]:
    """Those that are added; what a machine type brings is not named."""
    added = pool.machine.accelerator
    return [(added.type, added.count)] if added else []


def nic_type(pool: Pool) -> str:
    """Of the first card; "": what the machine type and the image agree on."""
    if pool.machine.gpu_direct:
        return GVNIC
    return {"gvnic": GVNIC, "virtio": "VIRTIO_NET", None: ""}[pool.machine.nic]


def on_host_maintenance(pool: Pool) -> str:
    """A machine with accelerators cannot move while it runs, nor one that has its place beside others."""
    near = pool.placement is not None and pool.placement.strategy != "spread"
    return "TERMINATE" if pool.machine.has_accelerator() or near else "MIGRATE"


def scheduling(pool: Pool, model: str, max_run_s: int | None) -> gcp.compute.RegionInstanceTemplateSchedulingArgs:
    """How a machine is bought. For spot, five fields go together: Compute Engine refuses any four of them.

    Its longest run is limited whatever it costs: the fuse that needs nobody. It wants to know what to do at the end.
    """
    duration = gcp.compute.RegionInstanceTemplateSchedulingMaxRunDurationArgs(seconds=max_run_s) if max_run_s else None
    if model == "on-demand":
        # No restart after a host error: it would be another boot, which reconcile replaces anyway.
        return gcp.compute.RegionInstanceTemplateSchedulingArgs(
            provisioning_model="STANDARD",
            automatic_restart=False,
            on_host_maintenance=on_host_maintenance(pool),
            instance_termination_action="DELETE" if max_run_s else None,
            max_run_duration=duration,
        )
    notice = gcp.compute.RegionInstanceTemplateSchedulingPreemptionNoticeDurationArgs(seconds=pool.notice_seconds())
    return gcp.compute.RegionInstanceTemplateSchedulingArgs(
        provisioning_model="SPOT",
        preemptible=True,
        automatic_restart=False,
        on_host_maintenance="TERMINATE",
        instance_termination_action="DELETE",
        max_run_duration=duration,
        preemption_notice_duration=notice if pool.notice_seconds() else None,
    )


def pool_states(settings: Settings, pools: Pools, placement: Placement) -> pulumi.Output[list[PoolState]]:
    """The pools as reconcile reads them."""
    links = pulumi.Output.all(templates=pools.templates, placement=placement.policies)
    return links.apply(
        lambda v: [
            pool_state(settings, pool, v["templates"].get(pool.name, {}), v["placement"].get(pool.name, {}))
            for pool in settings.pools
        ]
    )


def publish_state(
    settings: Settings,
    storage: Storage,
    function: Function,
    identity: Identity,
    bundle: Archive,
    pools: pulumi.Output[list[PoolState]],
) -> gcp.storage.BucketObject:
    """Write ``stack/pools.json``: what the function reads on every tick."""
    return gcp.storage.BucketObject(
        "pools",
        bucket=storage.bucket.name,
        name=naming.POOLS_OBJECT,
        content=pulumi.Output.all(pools, function.url, identity.node.email).apply(
            lambda made: state_text(settings, made[0], made[1], made[2], bundle.sha256)
        ),
        content_type="application/json",
        opts=pulumi.ResourceOptions(parent=storage),
    )
