"""The stack's network: one private subnetwork, whose machines talk to each other and to Google; or one that exists.

No NAT and no public address unless asked for: private access reaches storage and the
function, and costs nothing. Nobody from outside may connect, unless people's log-in is asked for.
Of an existing network only the walls are ours: it needs private access itself, and whoever runs
`pulumi up` the right to make firewall rules in its project.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import pulumi
import pulumi_gcp as gcp

from infra import naming
from infra.settings import Settings

# https://cloud.google.com/iap/docs/using-tcp-forwarding: what its connections come from. It asks who somebody is.
IAP_RANGE = "35.235.240.0/20"
GVNIC, RDMA_CARD = "GVNIC", "MRDMA"
_JUMBO, _JUMBO_RDMA = 8244, 8896  # what Google's guides to GPUDirect ask for
_PRIVATE = ("172.16.0.0/12", "10.0.0.0/8")  # of which networks of cards take a /16 each
_PROJECT = re.compile(r"(?:^|/)projects/([^/]+)/")


@dataclass(frozen=True)
class Fabric:
    """What a kind of GPUDirect wants beside the first card: plain cards, each in a network of its own, and RDMA's."""

    plain: int
    rdma: int = 0


# https://cloud.google.com/compute/docs/gpus/gpu-network-bandwidth: a card for each two GPUs (TCPX), or each GPU.
FABRICS: dict[str, Fabric] = {"tcpx": Fabric(4), "tcpxo": Fabric(8), "rdma": Fabric(1, rdma=8)}


@dataclass(frozen=True)
class Card:
    """A network card beside the first one."""

    subnetwork: pulumi.Output[str]
    nic_type: str


@dataclass(frozen=True)
class NetworkArgs:
    settings: Settings


class Network(pulumi.ComponentResource):
    """``subnetwork``: for templates and nodes. ``cards``: pool -> the further cards of its machines, in their order."""

    def __init__(self, name: str, args: NetworkArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("spotkeeper:gcp:Network", name, None, opts)
        self._settings = args.settings
        self._called = naming.stack(args.settings.stack)
        self._child = pulumi.ResourceOptions(parent=self)
        self.parts: list[pulumi.Resource] = []
        found = self._existing() if args.settings.network.exists() else self._own()
        network, self.subnetwork = found
        self._walls(network)
        self.cards = self._gpu_cards()
        self.register_outputs({"subnetwork": self.subnetwork})

    def _own(self) -> tuple[pulumi.Output[str], pulumi.Output[str]]:
        """Network and subnetwork of the stack's own."""
        network = gcp.compute.Network(
            "network", name=self._called, auto_create_subnetworks=False, routing_mode="REGIONAL", opts=self._child
        )
        subnetwork = gcp.compute.Subnetwork(
            "subnetwork",
            name=self._called,
            network=network.id,
            region=self._settings.region,
            ip_cidr_range=self._settings.network.cidr,
            private_ip_google_access=True,
            opts=self._child,
        )
        self.parts += [network, subnetwork]
        return network.id, subnetwork.self_link

    def _existing(self) -> tuple[pulumi.Output[str], pulumi.Output[str]]:
        """Those that the stack file names, or that another stack says it made."""
        given, region = self._settings.network, self._settings.region
        if not given.from_stack:
            return pulumi.Output.from_input(given.vpc), pulumi.Output.from_input(given.subnets[region])
        theirs = pulumi.StackReference("network-of", stack_name=given.from_stack, opts=self._child)
        subnets: pulumi.Output[Mapping[str, str]] = theirs.require_output("subnets")
        return theirs.require_output("vpc"), subnets.apply(lambda found: subnet_of(found, region, given.from_stack))

    def _walls(self, network: pulumi.Output[str]) -> None:
        """Ranks meet on ports of their own choice (rendezvous, NCCL, state from a peer): all of them, inside only."""
        self._inside("inside", f"{self._called}-inside", network)
        if self._settings.network.ssh == "iap":
            ssh = gcp.compute.Firewall(
                "ssh-iap",
                name=f"{self._called}-ssh-iap",
                project=network.apply(lambda link: project_of(link, self._settings.project)),
                network=network,
                direction="INGRESS",
                source_ranges=[IAP_RANGE],
                target_tags=[self._called],
                allows=[gcp.compute.FirewallAllowArgs(protocol="tcp", ports=["22"])],
                opts=self._child,
            )
            self.parts.append(ssh)

    def _inside(self, key: str, called: str, network: pulumi.Output[str]) -> None:
        wall = gcp.compute.Firewall(
            key,
            name=called,
            project=network.apply(lambda link: project_of(link, self._settings.project)),
            network=network,
            direction="INGRESS",
            source_tags=[self._called],
            target_tags=[self._called],
            allows=[gcp.compute.FirewallAllowArgs(protocol=protocol) for protocol in ("tcp", "udp", "icmp")],
            opts=self._child,
        )
        self.parts.append(wall)

    # --- GPUs that reach the network by themselves ------------------------------------------

    def _gpu_cards(self) -> dict[str, list[Card]]:
        """Pools share the networks of plain cards; a network for RDMA is of one zone."""
        pools = {pool.name: pool for pool in self._settings.pools if pool.machine.gpu_direct}
        fabrics = {name: FABRICS[pool.machine.gpu_direct or ""] for name, pool in pools.items()}
        ranges = free_ranges(self._settings.network.cidr)
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
        key, called = f"card-{index}", f"{self._called}-card{index}"
        network = gcp.compute.Network(key, name=called, auto_create_subnetworks=False, mtu=_JUMBO, opts=self._child)
        self.parts.append(network)
        self._inside(f"{key}-inside", f"{called}-inside", network.id)
        return Card(self._subnetwork(key, called, network, addresses), GVNIC)

    def _rdma_cards(self, zone: str, ranges: list[str]) -> list[Card]:
        """Eight subnetworks of one network, whose profile is the zone's and knows no firewall rules."""
        key = f"rdma-{zone}"
        called = f"{self._called}-rdma-{zone.rsplit('-', 1)[1]}"
        network = gcp.compute.Network(
            key,
            name=called,
            auto_create_subnetworks=False,
            mtu=_JUMBO_RDMA,
            network_profile=f"projects/{self._settings.project}/global/networkProfiles/{zone}-vpc-roce",
            opts=self._child,
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
            region=self._settings.region,
            ip_cidr_range=addresses,
            opts=self._child,
        )
        self.parts.append(made)
        link: pulumi.Output[str] = made.self_link
        return link


def subnet_of(found: Mapping[str, str], region: str, stack: str) -> str:
    """A region's subnetwork among another stack's outputs.

    Raises:
        RunError: it has none there.
    """
    if region not in found:
        raise pulumi.RunError(f"network.from_stack: {stack} has no subnet in {region}, only in {', '.join(found)}")
    return found[region]


def project_of(link: str, otherwise: str) -> str:
    """Whose a network is: a shared one is of another project than the stack's machines."""
    found = _PROJECT.search(link)
    return found[1] if found else otherwise


def free_ranges(taken: str) -> Iterator[str]:
    """Private ranges of 65,536 addresses that have none in common with ``taken``, each one once."""
    main = ipaddress.ip_network(taken or "0.0.0.0/32")
    for block in map(ipaddress.ip_network, _PRIVATE):
        for part in block.subnets(new_prefix=16):
            if not part.overlaps(main):
                yield str(part)
