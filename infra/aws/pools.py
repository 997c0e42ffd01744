"""The pools: two launch templates for each spot pool in each of its regions, and the machines of each static pool.

For a launch the function chooses only a template and a zone. A region's templates of a spot pool differ only in their
market options. A static pool has one template for each region, or with EFA one for each zone. No template contains the
data disk: it is attached to a running machine, so that a replacement can boot while its predecessor shuts down.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any, TypeVar

import pulumi
import pulumi_aws as aws
from msgspec.structs import replace

from infra import naming
from infra.aws.function import AwsFunction, own_endpoint
from infra.aws.identity import AwsIdentity
from infra.aws.network import AwsNetwork, abroad
from infra.aws.storage import AwsStorage
from infra.boot import Scripts
from infra.settings.aws import interfaces
from infra.settings.model import Settings, models, pool_state, state_text
from infra.settings.pool import Pool
from infra.shared import Component, Disks, PlacementGroups, key_in
from spotkeeper.contract.stack import Abroad, PoolState, region_of, template_key

STATIC = "static"
DATA_DEVICE = "/dev/sdf"  # the agent finds the volume by its id, or by this name where a machine shows no ids
TAGGED = ("instance", "network-interface", "volume")  # resources that a launch creates and tags


class AwsPools(Component):
    """The pools. ``templates``: pool -> provisioning model -> launch template; ``machines``: name -> static machine."""

    def __init__(
        self,
        scripts: Scripts,
        bundle_sha256: str,
        network: AwsNetwork,
        identity: AwsIdentity,
        storage: AwsStorage,
        function: AwsFunction,
        placement: PlacementGroups,
        disks: Disks,
        opts: pulumi.ResourceOptions | None = None,
    ) -> None:
        super().__init__("Pools", network.settings, opts)
        settings = self.settings
        self._scripts, self._bundle_sha256 = scripts, bundle_sha256
        self._network, self._identity, self._storage = network, identity, storage
        self._function, self._placement, self._disks = function, placement, disks
        # A machine without its rights to the bucket and the function would only wait, and cost money.
        self._needs = [storage.bundle, storage.boot, *identity.bindings, *function.access]
        self.templates = {
            pool.name: {
                template_key(model, region, settings.region): self._template(pool, model, region)
                for region in settings.regions_of(pool)
                for model in models(pool)
            }
            for pool in settings.dynamic()
        }
        self.machines: dict[str, aws.ec2.Instance] = {}
        self.parts += [template for found in self.templates.values() for template in found.values()]
        for pool in settings.static():
            self._static(pool)
        self.register_outputs({})

    # --- templates -----------------------------------------------------------------------

    def _template(self, pool: Pool, model: str, region: str, zone: str = "") -> aws.ec2.LaunchTemplate:
        """Declare a launch template. With ``zone`` it contains the zone's subnet, else each launch names a subnet."""
        settings = self.settings
        called = naming.launch_template(settings.stack, pool.name, model) + (f"-{zone}" if zone else "")
        plain = not pool.machine.efa
        return aws.ec2.LaunchTemplate(
            key_in(called, region, settings),
            name=called,
            update_default_version=True,
            image_id=settings.image_in(region, pool),
            instance_type=pool.machine.type,
            instance_market_options=market(model),
            instance_initiated_shutdown_behavior="stop" if model == STATIC else "terminate",
            iam_instance_profile=aws.ec2.LaunchTemplateIamInstanceProfileArgs(arn=self._identity.profile.arn),
            metadata_options=aws.ec2.LaunchTemplateMetadataOptionsArgs(
                http_endpoint="enabled",
                http_tokens="required",
                http_put_response_hop_limit=1,
                instance_metadata_tags="enabled",
            ),
            block_device_mappings=[root(pool, settings.kms_key_in(region))],
            # EC2 accepts security groups or whole interfaces; with EFA, a launch names interfaces.
            vpc_security_group_ids=[self._network.groups[region]] if plain else None,
            network_interfaces=self._cards(pool, zone) if zone and not plain else None,
            tag_specifications=[
                aws.ec2.LaunchTemplateTagSpecificationArgs(
                    resource_type=kind,
                    tags=self._machine_tags(pool, region) if kind == "instance" else self.labels(pool.name),
                )
                for kind in (*TAGGED, *(("spot-instances-request",) if model == "spot" else ()))
            ],
            user_data=base64.b64encode(self._scripts.user_data[pool.kind].encode()).decode(),
            tags=self.tags(called, pool.name),
            region=abroad(region, settings),
            opts=pulumi.ResourceOptions(parent=self, depends_on=self._needs),
        )

    def _cards(self, pool: Pool, zone: str) -> list[aws.ec2.LaunchTemplateNetworkInterfaceArgs]:
        return [
            aws.ec2.LaunchTemplateNetworkInterfaceArgs(
                network_card_index=each.card,
                device_index=each.device,
                interface_type=each.kind,
                subnet_id=self._network.subnets[zone],
                security_groups=[self._network.groups[region_of(zone)]],
                delete_on_termination="true",
            )
            for each in interfaces(pool)
        ]

    def _machine_tags(self, pool: Pool, region: str) -> Mapping[str, pulumi.Input[str]]:
        own = machine_tags(self.settings, pool, self._scripts.sha256, self._bundle_sha256, self._function.url)
        return {**own, **tags_abroad(region, self.settings)}

    # --- static machines --------------------------------------------------------------------

    def _static(self, pool: Pool) -> None:
        """Declare a pool's static machines, with a template for each region.

        With EFA a template contains a subnet, so each zone gets a template.
        """
        zones = [pool.machine_zone(index) for index in range(pool.size)]
        places = {(region_of(zone), zone if pool.machine.efa else "") for zone in zones}
        templates = {place: self._template(pool, STATIC, *place) for place in sorted(places)}
        for index, zone in enumerate(zones):
            node = self._machine(pool, index, templates[region_of(zone), zone if pool.machine.efa else ""])
            called = naming.static_machine(self.settings.stack, pool.name, index)
            self.machines[called] = node
            self.parts += [node, self._attached(called, node, region_of(zone))]

    def _machine(self, pool: Pool, index: int, template: aws.ec2.LaunchTemplate) -> aws.ec2.Instance:
        """Declare a static machine, which keeps running when a later `up` changes the template's image or user data.

        A new agent or startup script only changes a tag of the machine, which its agent or its next boot reads.
        """
        called = naming.static_machine(self.settings.stack, pool.name, index)
        zone = pool.machine_zone(index)
        return aws.ec2.Instance(
            called,
            # No version number, so that `pulumi up --replace` uses the template's version of that day.
            launch_template=aws.ec2.InstanceLaunchTemplateArgs(id=template.id, version="$Default"),
            instance_type=pool.machine.type,
            subnet_id=None if pool.machine.efa else self._network.subnets[zone],
            placement_group=self._placement.groups.get(pool.name, {}).get(zone),
            tags=pulumi.Output.all(**self._machine_tags(pool, region_of(zone))).apply(
                lambda tags: {**tags, "Name": called}
            ),
            region=region_of(zone),  # always named, as of its disk: the provider keeps a region that is left out later
            opts=pulumi.ResourceOptions(parent=self, depends_on=self._needs, ignore_changes=["launchTemplate"]),
        )

    def _attached(self, called: str, node: aws.ec2.Instance, region: str) -> aws.ec2.VolumeAttachment:
        return aws.ec2.VolumeAttachment(
            f"{called}-data",
            device_name=DATA_DEVICE,
            instance_id=node.id,
            volume_id=self._disks.ids[called],
            stop_instance_before_detaching=True,  # the machine has mounted its file system
            region=region,
            # A volume is attached to one machine at a time, so it is detached from the old machine first.
            opts=pulumi.ResourceOptions(parent=self, delete_before_replace=True),
        )

    # --- stack/pools.json ----------------------------------------------------------------

    def publish_state(self, regions: pulumi.Resource) -> aws.s3.BucketObjectv2:
        """Write ``stack/pools.json``, which the function reads on every tick, once ``regions`` has agreed to them."""
        identity, function = self._identity, self._function
        return aws.s3.BucketObjectv2(
            "pools",
            bucket=self._storage.bucket.bucket,
            key=naming.POOLS_OBJECT,
            content=pulumi.Output.all(self._states(), function.url, identity.machine.arn).apply(
                lambda found: state_text(self.settings, found[0], found[1], found[2], self._bundle_sha256)
            ),
            content_type="application/json",
            # The function must not read the object before the resources in it exist and the function may use them.
            opts=pulumi.ResourceOptions(
                parent=self._storage, depends_on=[regions, *identity.bindings, *self._placement.parts]
            ),
        )

    def _states(self) -> pulumi.Output[list[PoolState]]:
        templates = self.templates.items()
        late = pulumi.Output.all(
            ids={pool: {model: each.id for model, each in found.items()} for pool, found in templates},
            versions={pool: {model: each.latest_version for model, each in found.items()} for pool, found in templates},
            subnets=self._network.subnets,
            groups=self._network.groups,
            url=self._function.url,
        )
        return late.apply(lambda found: [self._state(pool, found) for pool in self.settings.pools])

    def _state(self, pool: Pool, found: Mapping[str, Any]) -> PoolState:
        zones = pool.zones if pool.placement else ()
        groups = {zone: naming.placement_group(self.settings.stack, pool.name, zone) for zone in zones}
        state = pool_state(self.settings, pool, found["ids"].get(pool.name), groups)
        if pool.kind == STATIC:
            return state
        cards, home, regions = interfaces(pool), self.settings.region, self.settings.regions_of(pool)
        return replace(
            state,
            # Pulumi gives a version as a float.
            template_versions={model: str(int(number)) for model, number in found["versions"][pool.name].items()},
            subnets={zone: found["subnets"][zone] for zone in pool.zones},
            interfaces=cards,
            security_groups=(found["groups"][home],) if cards else (),
            abroad={
                region: Abroad(
                    security_groups=(found["groups"][region],) if cards else (),
                    disk_key=self.settings.kms_key_in(region),
                    tags=tags_abroad(region, self.settings),
                )
                for region in regions
                if region != home
            },
            tags=machine_tags(self.settings, pool, self._scripts.sha256, self._bundle_sha256, found["url"]),
        )


Text = TypeVar("Text", bound="str | pulumi.Input[str]")


def machine_tags(
    settings: Settings, pool: Pool, boot_sha256: str, bundle_sha256: str, url: Text
) -> dict[str, str | Text]:
    """Return a machine's tags: the stack's tags and those that the agent reads. No tag depends on a job."""
    given = {
        "sk-fabric": "efa" if pool.machine.efa else "",
        "sk-job-identity": settings.job_identity,
        "sk-storage": own_endpoint(settings, "s3"),
    }
    return {
        **naming.labels(settings.labels, settings.stack, pool.name),
        "sk-boot": boot_sha256,
        "sk-bucket": settings.bucket_name(),
        "sk-bundle": bundle_sha256,
        "sk-function": url,
        "sk-notice-s": str(pool.notice_seconds()),
        **{name: value for name, value in given.items() if value},
    }


def tags_abroad(region: str, settings: Settings) -> dict[str, str]:
    """Return a machine's tags in addition to :func:`machine_tags`, in their place where names are equal.

    From another region S3 is reached by IPv6, since S3's gateway endpoint is for buckets of its own region only.
    """
    if region == settings.region or own_endpoint(settings, "s3"):
        return {}
    return {"sk-storage": f"https://s3.dualstack.{settings.region}.amazonaws.com"}


def market(model: str) -> aws.ec2.LaunchTemplateInstanceMarketOptionsArgs | None:
    """Return a template's market options: a one-time request without a price cap.

    A persistent request would launch again by itself. Spot never costs more than on-demand, so a price cap would only
    add preemptions.
    """
    if model != "spot":
        return None
    return aws.ec2.LaunchTemplateInstanceMarketOptionsArgs(
        market_type="spot",
        spot_options=aws.ec2.LaunchTemplateInstanceMarketOptionsSpotOptionsArgs(
            spot_instance_type="one-time", instance_interruption_behavior="terminate"
        ),
    )


def root(pool: Pool, key: str) -> aws.ec2.LaunchTemplateBlockDeviceMappingArgs:
    return aws.ec2.LaunchTemplateBlockDeviceMappingArgs(
        device_name=pool.boot_disk.device,
        ebs=aws.ec2.LaunchTemplateBlockDeviceMappingEbsArgs(
            volume_size=pool.boot_disk.size_gb,
            volume_type=pool.boot_disk.type,
            encrypted="true",
            kms_key_id=key or None,
            delete_on_termination="true",
        ),
    )


def volume(disks: Component, pool: Pool, name: str, zone: str, opts: pulumi.ResourceOptions) -> pulumi.Output[str]:
    """Declare the data volume of a static machine; return its id."""
    made = aws.ebs.Volume(
        name,
        availability_zone=zone,
        size=pool.disk.size_gb,
        type=pool.disk.type,
        iops=pool.disk.iops,
        throughput=pool.disk.mb_s,
        encrypted=True,
        kms_key_id=disks.settings.kms_key_in(region_of(zone)) or None,
        tags=disks.tags(name, pool.name),
        region=region_of(zone),
        opts=opts,
    )
    id_: pulumi.Output[str] = made.id
    return id_


def placement_group(component: Component, pool: Pool, zone: str) -> tuple[pulumi.Resource, pulumi.Output[str]]:
    """Declare the placement group of a pool in a zone; return the group and its name."""
    name = naming.placement_group(component.settings.stack, pool.name, zone)
    group = aws.ec2.PlacementGroup(
        key_in(name, region_of(zone), component.settings),
        name=name,
        strategy=pool.placement.strategy if pool.placement else "cluster",
        tags=component.tags(name, pool.name),
        region=abroad(region_of(zone), component.settings),
        opts=component.child,
    )
    return group, group.name
