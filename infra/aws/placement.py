"""Placement groups: one for each pool and zone, since a group of close machines lives in one zone.

Reconcile names the zone's group when it launches a machine; in the template it would tie
the pool to one zone.
"""

from __future__ import annotations

from dataclasses import dataclass

import pulumi
import pulumi_aws as aws

from infra import naming
from infra.settings import Pool, Settings


@dataclass(frozen=True)
class PlacementArgs:
    settings: Settings


class Placement(pulumi.ComponentResource):
    """``groups``: pool -> zone -> the group's name."""

    def __init__(self, name: str, args: PlacementArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("spotkeeper:aws:Placement", name, None, opts)
        self._settings = args.settings
        self.parts: list[pulumi.Resource] = []
        self.groups: dict[str, dict[str, pulumi.Output[str]]] = {
            pool.name: {zone: self._group(pool, zone) for zone in pool.zones}
            for pool in args.settings.pools
            if pool.placement is not None
        }
        self.register_outputs({})

    def _group(self, pool: Pool, zone: str) -> pulumi.Output[str]:
        called = naming.placement(self._settings.stack, pool.name, zone)
        group = aws.ec2.PlacementGroup(
            called,
            name=called,
            strategy=pool.placement.strategy if pool.placement else "cluster",
            tags=naming.tags(self._settings.labels, self._settings.stack, called, pool.name),
            opts=pulumi.ResourceOptions(parent=self),
        )
        self.parts.append(group)
        found: pulumi.Output[str] = group.name
        return found
