"""The stack's network: a subnet in each zone whose machines reach each other, S3, and the internet by IPv6.

There is no NAT. The function and the internet are reached through an egress-only gateway (IPv6), S3 through a gateway
endpoint (IPv4); neither is billed by the hour. The security group admits no connection from outside. In an existing
network the stack declares only its security group; the network's owner provides the routes to S3 and to the function.
"""

from __future__ import annotations

import ipaddress

import pulumi
import pulumi_aws as aws

from infra.settings.aws import subnet_range
from infra.settings.model import Settings
from infra.shared import Component

ANYWHERE_4, ANYWHERE_6 = "0.0.0.0/0", "::/0"


class AwsNetwork(Component):
    """The network; ``subnets`` maps a zone to its subnet's id, ``group`` is the security group's id."""

    def __init__(self, settings: Settings, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("Network", settings, opts)
        self.vpc, self.subnets = self._existing() if settings.network.exists() else self._own()
        self.group = self._security_group()
        self.register_outputs({"vpc": self.vpc, "subnets": self.subnets})

    def _existing(self) -> tuple[pulumi.Output[str], dict[str, pulumi.Output[str]]]:
        """Return (vpc id, subnet ids by zone), from the stack file or the outputs of another stack."""
        network, zones = self.settings.network, self.settings.zones
        if not network.from_stack:
            return pulumi.Output.from_input(network.vpc), {
                zone: pulumi.Output.from_input(subnet) for zone, subnet in network.subnets.items()
            }
        other = pulumi.StackReference(network.from_stack, opts=self.child)
        subnets = other.require_output("subnets")
        return other.require_output("vpc"), {zone: subnets[zone] for zone in zones}

    def _own(self) -> tuple[pulumi.Output[str], dict[str, pulumi.Output[str]]]:
        settings = self.settings
        vpc = aws.ec2.Vpc(
            "vpc",
            cidr_block=settings.network.cidr,
            assign_generated_ipv6_cidr_block=True,
            enable_dns_support=True,
            enable_dns_hostnames=True,
            tags=self.tags(self.prefix),
            opts=self.child,
        )
        routes = aws.ec2.RouteTable("routes", vpc_id=vpc.id, tags=self.tags(self.prefix), opts=self.child)
        subnets = {zone: self._subnet(zone, vpc, routes) for zone in settings.zones}
        self._internet(vpc, routes)
        s3 = aws.ec2.VpcEndpoint(
            "s3",
            vpc_id=vpc.id,
            service_name=f"com.amazonaws.{settings.region}.s3",
            vpc_endpoint_type="Gateway",
            route_table_ids=[routes.id],
            tags=self._tags("s3"),
            opts=self.child,
        )
        self.parts += [vpc, routes, s3]
        return vpc.id, {zone: subnet.id for zone, subnet in subnets.items()}

    def _subnet(self, zone: str, vpc: aws.ec2.Vpc, routes: aws.ec2.RouteTable) -> aws.ec2.Subnet:
        subnet = aws.ec2.Subnet(
            f"subnet-{zone}",
            vpc_id=vpc.id,
            availability_zone=zone,
            cidr_block=subnet_range(self.settings.network.cidr, zone),
            ipv6_cidr_block=vpc.ipv6_cidr_block.apply(lambda whole: subnet_range_6(whole, zone)),
            assign_ipv6_address_on_creation=True,
            map_public_ip_on_launch=self.settings.network.public_ip,
            tags=self._tags(zone),
            opts=self.child,
        )
        joined = aws.ec2.RouteTableAssociation(
            f"routes-{zone}", subnet_id=subnet.id, route_table_id=routes.id, opts=self.child
        )
        self.parts += [subnet, joined]
        return subnet

    def _internet(self, vpc: aws.ec2.Vpc, routes: aws.ec2.RouteTable) -> None:
        tags = self.tags(self.prefix)
        egress = aws.ec2.EgressOnlyInternetGateway("egress", vpc_id=vpc.id, tags=tags, opts=self.child)
        self.parts.append(
            aws.ec2.Route(
                "out-6",
                route_table_id=routes.id,
                destination_ipv6_cidr_block=ANYWHERE_6,
                egress_only_gateway_id=egress.id,
                opts=self.child,
            )
        )
        if self.settings.network.public_ip:
            gateway = aws.ec2.InternetGateway("gateway", vpc_id=vpc.id, tags=tags, opts=self.child)
            self.parts.append(
                aws.ec2.Route(
                    "out-4",
                    route_table_id=routes.id,
                    destination_cidr_block=ANYWHERE_4,
                    gateway_id=gateway.id,
                    opts=self.child,
                )
            )

    def _security_group(self) -> pulumi.Output[str]:
        """Declare the security group, which opens all ports between machines (for gangs and EFA); return its id."""
        group = aws.ec2.SecurityGroup(
            "inside",
            name=self.prefix,
            description=f"Spotkeeper {self.settings.stack}: machines among themselves",
            vpc_id=self.vpc,
            tags=self.tags(self.prefix),
            opts=self.child,
        )
        inbound = aws.vpc.SecurityGroupIngressRule(
            "from-inside",
            security_group_id=group.id,
            referenced_security_group_id=group.id,
            ip_protocol="-1",
            tags=self._tags("from-inside"),
            opts=self.child,
        )
        outbound = [
            self._egress("to-inside", group, referenced_security_group_id=group.id),
            self._egress("to-anywhere-4", group, cidr_ipv4=ANYWHERE_4),
            self._egress("to-anywhere-6", group, cidr_ipv6=ANYWHERE_6),
        ]
        self.parts += [group, inbound, *outbound]
        found: pulumi.Output[str] = group.id
        return found

    def _egress(
        self, name: str, group: aws.ec2.SecurityGroup, **where: pulumi.Input[str]
    ) -> aws.vpc.SecurityGroupEgressRule:
        return aws.vpc.SecurityGroupEgressRule(
            name, security_group_id=group.id, ip_protocol="-1", tags=self._tags(name), opts=self.child, **where
        )

    def _tags(self, which: str) -> dict[str, str]:
        return self.tags(f"{self.prefix}-{which}")


def subnet_range_6(whole: str, zone: str) -> str:
    """Return a zone's /64 in ``whole``, the network's /56; the zone's letter chooses it, as in :func:`subnet_range`."""
    network = ipaddress.IPv6Network(whole)
    step = 1 << 64
    return f"{network.network_address + (ord(zone[-1]) - ord('a')) * step}/64"
