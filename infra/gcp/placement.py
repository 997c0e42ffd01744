"""Placement: one policy for each pool and zone, since a group of close machines lives in one zone.

Reconcile names the zone's policy when it inserts a machine; in the template it would tie
the pool to one zone.
"""

from __future__ import annotations

from dataclasses import dataclass

import pulumi
import pulumi_gcp as gcp

from infra import naming
from infra.settings import Pool, Settings

_DOMAINS = 8  # the most that a spread policy may have; further machines share them


@dataclass(frozen=True)
class PlacementArgs:
    settings: Settings


class Placement(pulumi.ComponentResource):
    """``policies``: pool -> zone -> the policy's self link."""

    def __init__(self, name: str, args: PlacementArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("spotkeeper:gcp:Placement", name, None, opts)
        self._settings = args.settings
        self.parts: list[pulumi.Resource] = []
        self.policies: dict[str, dict[str, pulumi.Output[str]]] = {
            pool.name: {zone: self._policy(pool, zone) for zone in pool.zones}
            for pool in args.settings.pools
            if pool.placement is not None
        }
        self.register_outputs({})

    def _policy(self, pool: Pool, zone: str) -> pulumi.Output[str]:
        called = naming.placement(self._settings.stack, pool.name, zone)
        policy = gcp.compute.ResourcePolicy(
            called,
            name=called,
            region=self._settings.region,
            group_placement_policy=group(pool),
            opts=pulumi.ResourceOptions(parent=self),
        )
        self.parts.append(policy)
        link: pulumi.Output[str] = policy.self_link
        return link


def group(pool: Pool) -> gcp.compute.ResourcePolicyGroupPlacementPolicyArgs:
    """Near each other, or on hardware apart. No vm_count: with it, a group exists only at exactly that size."""
    if pool.placement and pool.placement.strategy == "spread":
        return gcp.compute.ResourcePolicyGroupPlacementPolicyArgs(availability_domain_count=min(_DOMAINS, pool.size))
    return gcp.compute.ResourcePolicyGroupPlacementPolicyArgs(
        collocation="COLLOCATED", max_distance=pool.placement.max_distance if pool.placement else None
    )
