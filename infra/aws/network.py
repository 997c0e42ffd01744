"""The stack's networks, one for each region, with a subnet in each zone.

Machines reach each other, S3, and the internet. There is no NAT. The function and the internet are reached through an
egress-only gateway (IPv6), S3 of the same region through a gateway endpoint (IPv4); neither is billed by the hour. From
another region, S3 of the home region is reached by IPv6 as well. The networks are not connected with each other: a
job's machines are in one region at a time. The security groups admit no connection from outside. In an existing network
the stack declares only its security group; the network's owner provides the routes to S3 and to the function.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping

import pulumi
import pulumi_aws as aws

from infra.settings.aws import subnet_range
from infra.settings.model import Settings
from infra.shared import Component, key_in
from spotkeeper.contract.stack import region_of

ANYWHERE_4, ANYWHERE_6 = "0.0.0.0/0", "::/0"
Text = pulumi.Output[str]


def abroad(region: str, settings: Settings) -> str | None:
    """Return the option ``region`` of a resource: None in the first region, where the provider creates resources."""
    return None if region == settings.region else region


def at_home(settings: Settings) -> str | None:
    """Return the option ``region`` of a resource that is where the function is: None in the first region."""
    return abroad(settings.home_region(), settings)


class AwsNetwork(Component):
    """The networks. ``subnets``: zone -> id of its subnet; ``groups``: region -> id of its security group."""

    def __init__(self, settings: Settings, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("Network", settings, opts)
        self.vpcs, self.subnets = self._existing() if settings.network.exists() else self._own()
        self.groups = {region: self._security_group(region) for region in settings.regions}
        self.register_outputs({"vpc": self.vpcs[settings.region], "subnets": self.subnets})

    def _existing(self) -> tuple[dict[str, Text], dict[str, Text]]:
        """Return ids from the stack file or another stack's outputs: networks by region, subnets by zone."""
        network, home, others = self.settings.network, self.settings.region, self.settings.regions[1:]
        if not network.from_stack:
            given = {home: network.vpc} | {region: network.vpcs[region] for region in others}
            return (
                {region: pulumi.Output.from_input(vpc) for region, vpc in given.items()},
                {zone: pulumi.Output.from_input(subnet) for zone, subnet in network.subnets.items()},
            )
        other = pulumi.StackReference(network.from_stack, opts=self.child)
        subnets, vpcs = other.require_output("subnets"), other.require_output("vpcs") if others else None
        found = {home: other.require_output("vpc")}
        return (
            found | {region: vpcs[region] for region in others if vpcs is not None},
            {zone: subnets[zone] for zone in self.settings.zones},
        )

    def _own(self) -> tuple[dict[str, Text], dict[str, Text]]:
        vpcs: dict[str, Text] = {}
        subnets: dict[str, Text] = {}
        for region in self.settings.regions:
            vpcs[region], of_zones = self._own_in(region)
            subnets |= of_zones
        return vpcs, subnets

    def _own_in(self, region: str) -> tuple[Text, dict[str, Text]]:
        """Declare a region's network. All have the same range, since no machine reaches one of another network."""
        settings = self.settings
        vpc = aws.ec2.Vpc(
            key_in("vpc", region, settings),
            cidr_block=settings.network.cidr,
            assign_generated_ipv6_cidr_block=True,
            enable_dns_support=True,
            enable_dns_hostnames=True,
            tags=self.tags(self.prefix),
            region=abroad(region, settings),
            opts=self.child,
        )
        routes = aws.ec2.RouteTable(
            key_in("routes", region, settings),
            vpc_id=vpc.id,
            tags=self.tags(self.prefix),
            region=abroad(region, settings),
            opts=self.child,
        )
        zones = [zone for zone in settings.zones if region_of(zone) == region]
        subnets = {zone: self._subnet(zone, vpc, routes) for zone in zones}
        self._internet(region, vpc, routes)
        s3 = aws.ec2.VpcEndpoint(
            key_in("s3", region, settings),
            vpc_id=vpc.id,
            service_name=f"com.amazonaws.{region}.s3",
            vpc_endpoint_type="Gateway",
            route_table_ids=[routes.id],
            tags=self._tags("s3"),
            region=abroad(region, settings),
            opts=self.child,
        )
        self.parts += [vpc, routes, s3]
        return vpc.id, {zone: subnet.id for zone, subnet in subnets.items()}

    def _subnet(self, zone: str, vpc: aws.ec2.Vpc, routes: aws.ec2.RouteTable) -> aws.ec2.Subnet:
        where = abroad(region_of(zone), self.settings)
        subnet = aws.ec2.Subnet(
            f"subnet-{zone}",
            vpc_id=vpc.id,
            availability_zone=zone,
            cidr_block=subnet_range(self.settings.network.cidr, zone),
            ipv6_cidr_block=vpc.ipv6_cidr_block.apply(lambda whole: subnet_range_6(whole, zone)),
            assign_ipv6_address_on_creation=True,
            map_public_ip_on_launch=self.settings.network.public_ip,
            tags=self._tags(zone),
            region=where,
            opts=self.child,
        )
        joined = aws.ec2.RouteTableAssociation(
            f"routes-{zone}", subnet_id=subnet.id, route_table_id=routes.id, region=where, opts=self.child
        )
        self.parts += [subnet, joined]
        return subnet

    def _internet(self, region: str, vpc: aws.ec2.Vpc, routes: aws.ec2.RouteTable) -> None:
        tags, where = self.tags(self.prefix), abroad(region, self.settings)
        egress = aws.ec2.EgressOnlyInternetGateway(
            key_in("egress", region, self.settings), vpc_id=vpc.id, tags=tags, region=where, opts=self.child
        )
        self.parts.append(
            aws.ec2.Route(
                key_in("out-6", region, self.settings),
                route_table_id=routes.id,
                destination_ipv6_cidr_block=ANYWHERE_6,
                egress_only_gateway_id=egress.id,
                region=where,
                opts=self.child,
            )
        )
        if self.settings.network.public_ip:
            gateway = aws.ec2.InternetGateway(
                key_in("gateway", region, self.settings), vpc_id=vpc.id, tags=tags, region=where, opts=self.child
            )
            self.parts.append(
                aws.ec2.Route(
                    key_in("out-4", region, self.settings),
                    route_table_id=routes.id,
                    destination_cidr_block=ANYWHERE_4,
                    gateway_id=gateway.id,
                    region=where,
                    opts=self.child,
                )
            )

    def _security_group(self, region: str) -> Text:
        """Declare a region's security group, which opens all ports between machines (for gangs and EFA)."""
        group = aws.ec2.SecurityGroup(
            key_in("inside", region, self.settings),
            name=self.prefix,
            description=f"Spotkeeper {self.settings.stack}: machines among themselves",
            vpc_id=self.vpcs[region],
            tags=self.tags(self.prefix),
            region=abroad(region, self.settings),
            opts=self.child,
        )
        inbound = aws.vpc.SecurityGroupIngressRule(
            key_in("from-inside", region, self.settings),
            security_group_id=group.id,
            referenced_security_group_id=group.id,
            ip_protocol="-1",
            tags=self._tags("from-inside"),
            region=abroad(region, self.settings),
            opts=self.child,
        )
        outbound = [
            self._egress("to-inside", region, group, {"referenced_security_group_id": group.id}),
            self._egress("to-anywhere-4", region, group, {"cidr_ipv4": ANYWHERE_4}),
            self._egress("to-anywhere-6", region, group, {"cidr_ipv6": ANYWHERE_6}),
        ]
        self.parts += [group, inbound, *outbound]
        found: Text = group.id
        return found

    def _egress(
        self, name: str, region: str, group: aws.ec2.SecurityGroup, to: Mapping[str, pulumi.Input[str]]
    ) -> aws.vpc.SecurityGroupEgressRule:
        return aws.vpc.SecurityGroupEgressRule(
            key_in(name, region, self.settings),
            security_group_id=group.id,
            ip_protocol="-1",
            tags=self._tags(name),
            region=abroad(region, self.settings),
            opts=self.child,
            **to,
        )

    def _tags(self, which: str) -> dict[str, str]:
        return self.tags(f"{self.prefix}-{which}")


def subnet_range_6(whole: str, zone: str) -> str:
    """Return a zone's /64 in ``whole``, the network's /56; the zone's letter chooses it, as in :func:`subnet_range`."""
    network = ipaddress.IPv6Network(whole)
    step = 1 << 64
    return f"{network.network_address + (ord(zone[-1]) - ord('a')) * step}/64"
