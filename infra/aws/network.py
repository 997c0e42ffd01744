"""The stack's network: a subnet in each zone, whose machines talk to each other, to S3, and out by IPv6.

No NAT: an egress-only gateway (IPv6) reaches the function and the internet, a gateway
endpoint (IPv4) reaches S3, and neither costs anything for being there. Nobody from
outside may connect. A network that exists is used as it is: how it reaches S3 and the
function is its own affair, and only the security group is ours.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

import pulumi
import pulumi_aws as aws

from infra import naming
from infra.settings import Settings
from infra.settings.aws import subnet_range

ANYWHERE_4, ANYWHERE_6 = "0.0.0.0/0", "::/0"


@dataclass(frozen=True)
class NetworkArgs:
    settings: Settings


class Network(pulumi.ComponentResource):
    """``subnets``: zone -> id. ``group``: the security group's id. ``parts``: what machines stand on."""

    def __init__(self, name: str, args: NetworkArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("spotkeeper:aws:Network", name, None, opts)
        self._settings = args.settings
        self._called = naming.stack(args.settings.stack)
        self._child = pulumi.ResourceOptions(parent=self)
        self.parts: list[pulumi.Resource] = []
        self.vpc, self.subnets = self._existing() if args.settings.network.exists() else self._own()
        self.group = self._security_group()
        self.register_outputs({"vpc": self.vpc, "subnets": self.subnets})

    def _existing(self) -> tuple[pulumi.Output[str], dict[str, pulumi.Output[str]]]:
        """Named in the stack file, or among the outputs ``vpc`` and ``subnets`` (by zone) of another stack."""
        network, zones = self._settings.network, self._settings.zones
        if not network.from_stack:
            return pulumi.Output.from_input(network.vpc), {
                zone: pulumi.Output.from_input(subnet) for zone, subnet in network.subnets.items()
            }
        other = pulumi.StackReference(network.from_stack, opts=self._child)
        subnets = other.require_output("subnets")
        return other.require_output("vpc"), {zone: subnets[zone] for zone in zones}

    def _own(self) -> tuple[pulumi.Output[str], dict[str, pulumi.Output[str]]]:
        settings = self._settings
        vpc = aws.ec2.Vpc(
            "vpc",
            cidr_block=settings.network.cidr,
            assign_generated_ipv6_cidr_block=True,
            enable_dns_support=True,
            enable_dns_hostnames=True,
            tags=self._tags(),
            opts=self._child,
        )
        routes = aws.ec2.RouteTable("routes", vpc_id=vpc.id, tags=self._tags(), opts=self._child)
        subnets = {zone: self._subnet(zone, vpc, routes) for zone in settings.zones}
        self._way_out(vpc, routes)
        s3 = aws.ec2.VpcEndpoint(
            "s3",
            vpc_id=vpc.id,
            service_name=f"com.amazonaws.{settings.region}.s3",
            vpc_endpoint_type="Gateway",
            route_table_ids=[routes.id],
            tags=self._tags("s3"),
            opts=self._child,
        )
        self.parts += [vpc, routes, s3]
        return vpc.id, {zone: subnet.id for zone, subnet in subnets.items()}

    def _subnet(self, zone: str, vpc: aws.ec2.Vpc, routes: aws.ec2.RouteTable) -> aws.ec2.Subnet:
        ours = subnet_range(self._settings.network.cidr, zone)
        subnet = aws.ec2.Subnet(
            f"subnet-{zone}",
            vpc_id=vpc.id,
            availability_zone=zone,
            cidr_block=ours,
            ipv6_cidr_block=vpc.ipv6_cidr_block.apply(lambda whole: subnet_range_6(whole, zone)),
            assign_ipv6_address_on_creation=True,
            map_public_ip_on_launch=self._settings.network.public_ip,
            tags=self._tags(zone),
            opts=self._child,
        )
        joined = aws.ec2.RouteTableAssociation(
            f"routes-{zone}", subnet_id=subnet.id, route_table_id=routes.id, opts=self._child
        )
        self.parts += [subnet, joined]
        return subnet

    def _way_out(self, vpc: aws.ec2.Vpc, routes: aws.ec2.RouteTable) -> None:
        egress = aws.ec2.EgressOnlyInternetGateway("egress", vpc_id=vpc.id, tags=self._tags(), opts=self._child)
        self.parts.append(
            aws.ec2.Route(
                "out-6",
                route_table_id=routes.id,
                destination_ipv6_cidr_block=ANYWHERE_6,
                egress_only_gateway_id=egress.id,
                opts=self._child,
            )
        )
        if self._settings.network.public_ip:
            gateway = aws.ec2.InternetGateway("gateway", vpc_id=vpc.id, tags=self._tags(), opts=self._child)
            self.parts.append(
                aws.ec2.Route(
                    "out-4",
                    route_table_id=routes.id,
                    destination_cidr_block=ANYWHERE_4,
                    gateway_id=gateway.id,
                    opts=self._child,
                )
            )

    def _security_group(self) -> pulumi.Output[str]:
        """Ranks meet on ports of their own choice; EFA asks for the group itself as source and as destination."""
        group = aws.ec2.SecurityGroup(
            "inside",
            name=self._called,
            description=f"Spotkeeper {self._settings.stack}: machines among themselves",
            vpc_id=self.vpc,
            tags=self._tags(),
            opts=self._child,
        )
        come = aws.vpc.SecurityGroupIngressRule(
            "from-inside",
            security_group_id=group.id,
            referenced_security_group_id=group.id,
            ip_protocol="-1",
            tags=self._tags("from-inside"),
            opts=self._child,
        )
        go = [
            self._may_go("to-inside", group, referenced_security_group_id=group.id),
            self._may_go("to-anywhere-4", group, cidr_ipv4=ANYWHERE_4),
            self._may_go("to-anywhere-6", group, cidr_ipv6=ANYWHERE_6),
        ]
        self.parts += [group, come, *go]
        found: pulumi.Output[str] = group.id
        return found

    def _may_go(
        self, name: str, group: aws.ec2.SecurityGroup, **where: pulumi.Input[str]
    ) -> aws.vpc.SecurityGroupEgressRule:
        return aws.vpc.SecurityGroupEgressRule(
            name, security_group_id=group.id, ip_protocol="-1", tags=self._tags(name), opts=self._child, **where
        )

    def _tags(self, which: str = "") -> dict[str, str]:
        name = f"{self._called}-{which}" if which else self._called
        return naming.tags(self._settings.labels, self._settings.stack, name)


def subnet_range_6(whole: str, zone: str) -> str:
    """The /64 of a zone, by its letter as :func:`subnet_range`; ``whole``: the /56 that AWS gave the network."""
    network = ipaddress.IPv6Network(whole)
    step = 1 << 64
    return f"{network.network_address + (ord(zone[-1]) - ord('a')) * step}/64"
