"""The stack's network: a new private one whose machines reach each other and Google, or an existing one.

It has a subnetwork in each region of the stack.

There is no NAT, and there are no public addresses unless the stack file asks for them: machines reach storage and the
function through Private Google Access, which is free. The firewall admits no connection from outside except shells (if
the stack file has ``ssh``). In an existing network the stack declares only firewall rules: the network must have
Private Google Access, and the operator must be allowed to create firewall rules in the network's project.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import pulumi
import pulumi_gcp as gcp

from infra.settings.gcp import subnet_ranges
from infra.settings.model import Settings
from infra.shared import Component, key_in

# The proxy's connections come from here; it identifies people: https://cloud.google.com/iap/docs/using-tcp-forwarding
IAP_RANGE = "35.235.240.0/20"
GVNIC, RDMA_CARD = "GVNIC", "MRDMA"
_JUMBO, _JUMBO_RDMA = 8244, 8896  # MTUs that Google's guides to GPUDirect require
_PRIVATE = ("172.16.0.0/12", "10.0.0.0/8")  # each network of GPUDirect cards takes a /16 of these
_PROJECT = re.compile(r"(?:^|/)projects/([^/]+)/")


@dataclass(frozen=True)
class Fabric:
    """The additional network cards of a GPUDirect variant: ``plain`` ones, each in its own network, and RDMA cards."""

    plain: int
    rdma: int = 0


# https://cloud.google.com/compute/docs/gpus/gpu-network-bandwidth: one card per two GPUs (TCPX) or per GPU.
FABRICS: dict[str, Fabric] = {"tcpx": Fabric(4), "tcpxo": Fabric(8), "rdma": Fabric(1, rdma=8)}


@dataclass(frozen=True)
class Card:
    """An additional network card of a machine."""

    subnetwork: pulumi.Output[str]
    nic_type: str


class GcpNetwork(Component):
    """The network. ``subnetworks``: region -> the subnetwork of its machines; ``cards``: pool -> additional cards."""

    def __init__(self, settings: Settings) -> None:
        super().__init__("Network", settings)
        network, self.subnetworks = self._existing() if settings.network.exists() else self._own()
        self._firewall(network)
        self.cards = self._gpu_cards()
        self.register_outputs({"subnetwork": self.subnetworks[settings.region]})

    def _own(self) -> tuple[pulumi.Output[str], dict[str, pulumi.Output[str]]]:
        network = gcp.compute.Network(
            "network", name=self.prefix, auto_create_subnetworks=False, routing_mode="REGIONAL", opts=self.child
        )
        subnetworks = {
            region: gcp.compute.Subnetwork(
                key_in("subnetwork", region, self.settings),
                name=self.prefix,
                network=network.id,
                region=region,
                ip_cidr_range=addresses,
                private_ip_google_access=True,
                opts=self.child,
            )
            for region, addresses in subnet_ranges(self.settings).items()
        }
        self.parts += [network, *subnetworks.values()]
        return network.id, {region: made.self_link for region, made in subnetworks.items()}

    def _existing(self) -> tuple[pulumi.Output[str], dict[str, pulumi.Output[str]]]:
        """Return the links of the network and subnetworks that the stack file or another stack's outputs name."""
        given, regions = self.settings.network, self.settings.regions
        if not given.from_stack:
            links = {region: pulumi.Output.from_input(given.subnets[region]) for region in regions}
            return pulumi.Output.from_input(given.vpc), links
        other = pulumi.StackReference("network-of", stack_name=given.from_stack, opts=self.child)
        subnets: pulumi.Output[Mapping[str, str]] = other.require_output("subnets")

        def link(region: str) -> pulumi.Output[str]:
            return subnets.apply(lambda found: subnet_of(found, region, given.from_stack))

        return other.require_output("vpc"), {region: link(region) for region in regions}

    def _firewall(self, network: pulumi.Output[str]) -> None:
        """Open all ports between the stack's machines, since rendezvous, NCCL and state transfers use any port."""
        self._inside("inside", f"{self.prefix}-inside", network)
        if self.settings.ssh:
            ssh = gcp.compute.Firewall(
                "ssh-iap",
                name=f"{self.prefix}-ssh-iap",
                project=network.apply(lambda link: project_of(link, self.settings.project)),
                network=network,
                direction="INGRESS",
                source_ranges=[IAP_RANGE],
                target_tags=[self.prefix],
                allows=[gcp.compute.FirewallAllowArgs(protocol="tcp", ports=["22"])],
                opts=self.child,
            )
            self.parts.append(ssh)

    def _inside(self, key: str, called: str, network: pulumi.Output[str]) -> None:
        rule = gcp.compute.Firewall(
            key,
            name=called,
            project=network.apply(lambda link: project_of(link, self.settings.project)),
            network=network,
            direction="INGRESS",
            source_tags=[self.prefix],
            target_tags=[self.prefix],
            allows=[gcp.compute.FirewallAllowArgs(protocol=protocol) for protocol in ("tcp", "udp", "icmp")],
            opts=self.child,
        )
        self.parts.append(rule)

    # --- cards of GPUDirect -----------------------------------------------------------------

    def _gpu_cards(self) -> dict[str, list[Card]]:
        """Declare the networks of GPUDirect cards. All pools share the plain cards' networks; RDMA has one per zone."""
        pools = {pool.name: pool for pool in self.settings.pools if pool.machine.gpu_direct}
        fabrics = {name: FABRICS[pool.machine.gpu_direct or ""] for name, pool in pools.items()}
        ranges = free_ranges(self.settings.network.cidr)
        plain = [
            self._plain_card(index, next(ranges))
            for index in range(max((fabric.plain for fabric in fabrics.values()), default=0))
        ]
        zones = sorted({pools[name].zones[0] for name, fabric in fabrics.items() if fabric.rdma})
        rdma = {zone: self._rdma_cards(zone, [next(ranges) for _ in range(8)]) for zone in zones}
        return {
            name: plain[: fabric.plain] + (rdma[pools[name].zones[0]] if fabric.rdma else [])
            for name, fabric in fabrics.items()
        }

    def _plain_card(self, index: int, addresses: str) -> Card:
        key, called = f"card-{index}", f"{self.prefix}-card{index}"
        network = gcp.compute.Network(key, name=called, auto_create_subnetworks=False, mtu=_JUMBO, opts=self.child)
        self.parts.append(network)
        self._inside(f"{key}-inside", f"{called}-inside", network.id)
        return Card(self._subnetwork(key, called, network, addresses), GVNIC)

    def _rdma_cards(self, zone: str, ranges: list[str]) -> list[Card]:
        """Declare a network with eight subnetworks for a zone's RDMA cards; such a network allows no firewall rules."""
        key = f"rdma-{zone}"
        called = f"{self.prefix}-rdma-{zone.rsplit('-', 1)[1]}"
        network = gcp.compute.Network(
            key,
            name=called,
            auto_create_subnetworks=False,
            mtu=_JUMBO_RDMA,
            network_profile=f"projects/{self.settings.project}/global/networkProfiles/{zone}-vpc-roce",
            opts=self.child,
        )
        self.parts.append(network)
        return [
            Card(self._subnetwork(f"{key}-{index}", f"{called}{index}", network, addresses), RDMA_CARD)
            for index, addresses in enumerate(ranges)
        ]

    def _subnetwork(self, key: str, called: str, network: gcp.compute.Network, addresses: str) -> pulumi.Output[str]:
        made = gcp.compute.Subnetwork(
            key,
            name=called,
            network=network.id,
            region=self.settings.region,
            ip_cidr_range=addresses,
            opts=self.child,
        )
        self.parts.append(made)
        link: pulumi.Output[str] = made.self_link
        return link


def subnet_of(found: Mapping[str, str], region: str, stack: str) -> str:
    """Return a region's subnetwork from another stack's outputs.

    Raises:
        RunError: the outputs have no subnetwork for the region.
    """
    if region not in found:
        raise pulumi.RunError(f"network.from_stack: {stack} has no subnet in {region}, only in {', '.join(found)}")
    return found[region]


def project_of(link: str, otherwise: str) -> str:
    """Return the project in a network's link, maybe another than the stack's; ``otherwise`` if the link has none."""
    found = _PROJECT.search(link)
    return found[1] if found else otherwise


def free_ranges(taken: str) -> Iterator[str]:
    """Yield the private /16 ranges that do not overlap the range ``taken``."""
    main = ipaddress.ip_network(taken or "0.0.0.0/32")
    for block in map(ipaddress.ip_network, _PRIVATE):
        for part in block.subnets(new_prefix=16):
            if not part.overlaps(main):
                yield str(part)
