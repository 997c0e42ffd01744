"""Machine shapes: two launch templates for each spot pool, the nodes of each static pool.

Reconcile picks a template and a zone and nothing else. All templates come from one
builder: those of a spot pool differ in how they are bought only, and a static pool has
one from which its nodes were made. The data disk is in none: it is attached once the
machine runs, so that a replacement can boot while its predecessor dies.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import pulumi
import pulumi_aws as aws
from msgspec.structs import replace
from spotkeeper.spec.stack import Interface, PoolState

from infra import naming
from infra.aws.disks import Disks
from infra.aws.identity import Identity
from infra.aws.network import Network
from infra.aws.placement import Placement
from infra.aws.reconcile import Function, elsewhere
from infra.aws.storage import Storage
from infra.boot import BootArgs
from infra.bundle import Archive
from infra.settings import Pool, Settings
from infra.settings.state import models, pool_state, state_text

STATIC = "static"
DATA_DEVICE = "/dev/sdf"  # the agent finds the volume by its id; where machines know no ids, by this name (a udev rule)
MARKED = ("instance", "network-interface", "volume")  # what a launch makes, and bears the stack's tags from the start


@dataclass(frozen=True)
class PoolsArgs(BootArgs):
    network: Network
    identity: Identity
    storage: Storage
    function: Function
    placement: Placement
    disks: Disks


class Pools(pulumi.ComponentResource):
    """``templates``: pool -> model -> launch template. ``nodes``: name -> the static instance."""

    def __init__(self, name: str, args: PoolsArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("spotkeeper:aws:Pools", name, None, opts)
        self._args = args
        self._child = pulumi.ResourceOptions(parent=self)
        # A machine that boots before it may read the bucket, or call the function, only waits: but it bills.
        self._ready = pulumi.ResourceOptions(
            parent=self,
            depends_on=[args.storage.bundle, args.storage.boot, *args.identity.bindings, *args.function.access],
        )
        settings = args.settings
        self.templates = {
            pool.name: {model: self._template(pool, model) for model in models(pool)} for pool in settings.dynamic()
        }
        self.nodes: dict[str, aws.ec2.Instance] = {}
        self.parts: list[pulumi.Resource] = [each for found in self.templates.values() for each in found.values()]
        for pool in settings.static():
            self._static(pool)
        self.register_outputs({})

    # --- templates -----------------------------------------------------------------------

    def _template(self, pool: Pool, model: str, zone: str = "") -> aws.ec2.LaunchTemplate:
        """``zone``: of the interfaces that the template names; without one, a launch names its subnet."""
        settings = self._args.settings
        called = naming.launch_template(settings.stack, pool.name, model) + (f"-{zone}" if zone else "")
        tags = naming.labels(settings.labels, settings.stack, pool.name)
        plain = not pool.machine.efa
        return aws.ec2.LaunchTemplate(
            called,
            name=called,
            update_default_version=True,
            image_id=pool.image,
            instance_type=pool.machine.type,
            instance_market_options=market(model),
            instance_initiated_shutdown_behavior="stop" if model == STATIC else "terminate",
            iam_instance_profile=aws.ec2.LaunchTemplateIamInstanceProfileArgs(arn=self._args.identity.profile.arn),
            metadata_options=aws.ec2.LaunchTemplateMetadataOptionsArgs(
                http_endpoint="enabled",
                http_tokens="required",
                http_put_response_hop_limit=1,
                instance_metadata_tags="enabled",
            ),
            block_device_mappings=[root(pool)],
            # EC2 takes either groups or whole interfaces, and a launch of ours with EFA names the latter.
            vpc_security_group_ids=[self._args.network.group] if plain else None,
            network_interfaces=self._cards(pool, zone) if zone and not plain else None,
            tag_specifications=[
                aws.ec2.LaunchTemplateTagSpecificationArgs(
                    resource_type=kind, tags=self._told(pool) if kind == "instance" else tags
                )
                for kind in (*MARKED, *(("spot-instances-request",) if model == "spot" else ()))
            ],
            user_data=base64.b64encode(self._args.scripts.user_data[pool.kind].encode()).decode(),
            tags=naming.tags(settings.labels, settings.stack, called, pool.name),
            opts=self._ready,
        )

    def _cards(self, pool: Pool, zone: str) -> list[aws.ec2.LaunchTemplateNetworkInterfaceArgs]:
        return [
            aws.ec2.LaunchTemplateNetworkInterfaceArgs(
                network_card_index=each.card,
                device_index=each.device,
                interface_type=each.kind,
                subnet_id=self._args.network.subnets[zone],
                security_groups=[self._args.network.group],
                delete_on_termination="true",
            )
            for each in interfaces(pool)
        ]

    def _told(self, pool: Pool) -> Mapping[str, pulumi.Input[str]]:
        args = self._args
        return told(args.settings, pool, args.scripts.sha256, args.bundle_sha256, args.function.url)

    # --- static nodes --------------------------------------------------------------------

    def _static(self, pool: Pool) -> None:
        """Each node, and its disk in it. EFA takes a template for each zone, whose interfaces name its subnet."""
        zones = {pool.node_zone(index) for index in range(pool.size)} if pool.machine.efa else {""}
        templates = {zone: self._template(pool, STATIC, zone) for zone in sorted(zones)}
        for index in range(pool.size):
            zone = pool.node_zone(index)
            node = self._node(pool, index, templates[zone if pool.machine.efa else ""])
            called = naming.node(self._args.settings.stack, pool.name, index)
            self.nodes[called] = node
            self.parts += [node, self._attached(called, node)]

    def _node(self, pool: Pool, index: int, template: aws.ec2.LaunchTemplate) -> aws.ec2.Instance:
        """Its template says how it is made, and no more once it is: a new image or user data must not stop the floor.

        A new agent or startup script is a changed tag, which the node reads while it runs, or when it boots.
        """
        settings, network = self._args.settings, self._args.network
        called = naming.node(settings.stack, pool.name, index)
        zone = pool.node_zone(index)
        return aws.ec2.Instance(
            called,
            # Not by number: made anew on purpose (`pulumi up --replace`), it is made as the template says then.
            launch_template=aws.ec2.InstanceLaunchTemplateArgs(id=template.id, version="$Default"),
            instance_type=pool.machine.type,
            subnet_id=None if pool.machine.efa else network.subnets[zone],
            placement_group=self._args.placement.groups.get(pool.name, {}).get(zone),
            tags=pulumi.Output.all(**self._told(pool)).apply(lambda told: {**told, "Name": called}),
            opts=pulumi.ResourceOptions.merge(self._ready, pulumi.ResourceOptions(ignore_changes=["launchTemplate"])),
        )

    def _attached(self, called: str, node: aws.ec2.Instance) -> aws.ec2.VolumeAttachment:
        return aws.ec2.VolumeAttachment(
            f"{called}-data",
            device_name=DATA_DEVICE,
            instance_id=node.id,
            volume_id=self._args.disks.ids[called],
            stop_instance_before_detaching=True,  # it would be taken from under a file system that is mounted
            # A volume is in one machine at a time: it leaves the old node before it comes to the new one.
            opts=pulumi.ResourceOptions.merge(self._child, pulumi.ResourceOptions(delete_before_replace=True)),
        )

    # --- what reconcile reads ------------------------------------------------------------

    def states(self) -> pulumi.Output[list[PoolState]]:
        """The pools as reconcile reads them."""
        made = [each for found in self.templates.values() for each in found.values()]
        network = self._args.network
        late = pulumi.Output.all(
            pulumi.Output.all(*(each.id for each in made)),
            pulumi.Output.all(*(each.latest_version for each in made)),
            pulumi.Output.all(**network.subnets),
            network.group,
            self._args.function.url,
        )
        return late.apply(lambda found: self._states(*found))

    def _states(
        self, ids: Sequence[str], versions: Sequence[float], subnets: Mapping[str, str], group: str, url: str
    ) -> list[PoolState]:
        """``ids``, ``versions``: of the templates, in their order. Numbers come from the engine as floats."""
        keys = [(pool, model) for pool, found in self.templates.items() for model in found]
        found = {key: (id_, str(int(version))) for key, id_, version in zip(keys, ids, versions, strict=True)}
        return [self._state(pool, found, subnets, group, url) for pool in self._args.settings.pools]

    def _state(
        self,
        pool: Pool,
        found: Mapping[tuple[str, str], tuple[str, str]],
        subnets: Mapping[str, str],
        group: str,
        url: str,
    ) -> PoolState:
        args = self._args
        mine = {model: found[pool.name, model] for model in self.templates.get(pool.name, ())}
        near = pool.zones if pool.placement else ()
        state = pool_state(
            args.settings,
            pool,
            {model: id_ for model, (id_, _) in mine.items()},
            {zone: naming.placement(args.settings.stack, pool.name, zone) for zone in near},
        )
        if pool.kind == STATIC:
            return state
        cards = interfaces(pool)
        return replace(
            state,
            template_versions={model: version for model, (_, version) in mine.items()},
            subnets={zone: subnets[zone] for zone in pool.zones},
            interfaces=cards,
            security_groups=(group,) if cards else (),
            tags=told(args.settings, pool, args.scripts.sha256, args.bundle_sha256, url),
        )


Text = TypeVar("Text", bound="str | pulumi.Input[str]")


def told(settings: Settings, pool: Pool, boot_sha256: str, bundle_sha256: str, url: Text) -> dict[str, str | Text]:
    """The tags of a machine: the stack's, and what an agent reads. What a job says never travels here."""
    words: dict[str, str | Text] = {
        "sk-boot": boot_sha256,
        "sk-bucket": settings.bucket_name(),
        "sk-bundle": bundle_sha256,
        "sk-function": url,
        "sk-notice-s": str(pool.notice_seconds()),
    }
    given = {"sk-job-identity": settings.job_identity, "sk-storage": elsewhere(settings, "s3")}
    words |= {name: value for name, value in given.items() if value}
    return {**naming.labels(settings.labels, settings.stack, pool.name), **words}


def market(model: str) -> aws.ec2.LaunchTemplateInstanceMarketOptionsArgs | None:
    """How a machine is bought. No highest price: spot costs at most what on-demand does, and a cap loses it sooner.

    Once: a persistent request would launch again by itself.
    """
    if model != "spot":
        return None
    return aws.ec2.LaunchTemplateInstanceMarketOptionsArgs(
        market_type="spot",
        spot_options=aws.ec2.LaunchTemplateInstanceMarketOptionsSpotOptionsArgs(
            spot_instance_type="one-time", instance_interruption_behavior="terminate"
        ),
    )


def root(pool: Pool) -> aws.ec2.LaunchTemplateBlockDeviceMappingArgs:
    return aws.ec2.LaunchTemplateBlockDeviceMappingArgs(
        device_name=pool.boot_disk.device,
        ebs=aws.ec2.LaunchTemplateBlockDeviceMappingEbsArgs(
            volume_size=pool.boot_disk.size_gb,
            volume_type=pool.boot_disk.type,
            encrypted="true",
            delete_on_termination="true",
        ),
    )


def interfaces(pool: Pool) -> tuple[Interface, ...]:
    """An Elastic Fabric Adapter on each network card: the first carries all else too, the others have no address.

    A machine type of many cards (P5) has addresses to give on every fourth only, and one address is enough.
    """
    return tuple(
        Interface(card, device=0, kind="efa") if card == 0 else Interface(card, device=1, kind="efa-only")
        for card in range(pool.machine.efa)
    )


def publish_state(
    settings: Settings,
    storage: Storage,
    function: Function,
    identity: Identity,
    bundle: Archive,
    placement: Placement,
    pools: Pools,
) -> aws.s3.BucketObjectv2:
    """Write ``stack/pools.json``: what the function reads on every tick."""
    return aws.s3.BucketObjectv2(
        "pools",
        bucket=storage.bucket.bucket,
        key=naming.POOLS_OBJECT,
        content=pulumi.Output.all(pools.states(), function.url, identity.node.arn).apply(
            lambda made: state_text(settings, made[0], made[1], made[2], bundle.sha256)
        ),
        content_type="application/json",
        # What it names is there, and the function may use it.
        opts=pulumi.ResourceOptions(parent=storage, depends_on=[*identity.bindings, *placement.parts]),
    )
