"""The stack's network: one subnetwork, private, whose machines talk to each other and to Google.

No NAT and no public address unless asked for: private access reaches storage and the
function, and costs nothing. Nobody from outside may connect, unless people's log-in is asked for.
"""

from __future__ import annotations

from dataclasses import dataclass

import pulumi
import pulumi_gcp as gcp

from infra import naming
from infra.settings import Settings

# https://cloud.google.com/iap/docs/using-tcp-forwarding: what its connections come from. It asks who somebody is.
IAP_RANGE = "35.235.240.0/20"


@dataclass(frozen=True)
class NetworkArgs:
    settings: Settings


class Network(pulumi.ComponentResource):
    """``subnetwork``: its self link, for templates and nodes."""

    def __init__(self, name: str, args: NetworkArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("spotkeeper:gcp:Network", name, None, opts)
        settings = args.settings
        called = naming.stack(settings.stack)
        child = pulumi.ResourceOptions(parent=self)
        network = gcp.compute.Network(
            "network", name=called, auto_create_subnetworks=False, routing_mode="REGIONAL", opts=child
        )
        subnetwork = gcp.compute.Subnetwork(
            "subnetwork",
            name=called,
            network=network.id,
            region=settings.region,
            ip_cidr_range=settings.network.cidr,
            private_ip_google_access=True,
            opts=child,
        )
        # Ranks meet on ports of their own choice (rendezvous, NCCL, state from a peer): all of them, inside only.
        inside = gcp.compute.Firewall(
            "inside",
            name=f"{called}-inside",
            network=network.id,
            direction="INGRESS",
            source_tags=[called],
            target_tags=[called],
            allows=[
                gcp.compute.FirewallAllowArgs(protocol="tcp"),
                gcp.compute.FirewallAllowArgs(protocol="udp"),
                gcp.compute.FirewallAllowArgs(protocol="icmp"),
            ],
            opts=child,
        )
        self.subnetwork = subnetwork.self_link
        self.parts: list[pulumi.Resource] = [network, subnetwork, inside]
        if settings.network.ssh == "iap":
            ssh = gcp.compute.Firewall(
                "ssh-iap",
                name=f"{called}-ssh-iap",
                network=network.id,
                direction="INGRESS",
                source_ranges=[IAP_RANGE],
                target_tags=[called],
                allows=[gcp.compute.FirewallAllowArgs(protocol="tcp", ports=["22"])],
                opts=child,
            )
            self.parts.append(ssh)
        self.register_outputs({"subnetwork": self.subnetwork})
