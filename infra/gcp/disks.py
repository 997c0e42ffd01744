"""Retained disks of static nodes. The disks of ranks are reconcile's and never in Pulumi's state."""

from __future__ import annotations

from dataclasses import dataclass

import pulumi
import pulumi_gcp as gcp

from infra import naming
from infra.places import Places
from infra.protection import protection
from infra.settings import Pool, Settings


@dataclass(frozen=True)
class DisksArgs:
    settings: Settings


class Disks(pulumi.ComponentResource):
    """``links``: node -> its disk's self link. ``kept``: disks that stay in the cloud, and bill, after a destroy."""

    def __init__(self, name: str, args: DisksArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("spotkeeper:gcp:Disks", name, None, opts)
        self._settings = args.settings
        child = pulumi.ResourceOptions(parent=self)
        self._after = [Places(args.settings, child)] if args.settings.static() else []
        nodes = [(pool, index) for pool in args.settings.static() for index in range(pool.size)]
        stack = args.settings.stack
        self.links = {naming.node(stack, pool.name, i): self._disk(pool, i).self_link for pool, i in nodes}
        self.kept = [naming.node_disk(stack, p.name, i) for p, i in nodes if p.disk.on_destroy != "delete"]
        self.register_outputs({})

    def _disk(self, pool: Pool, index: int) -> gcp.compute.Disk:
        called = naming.node_disk(self._settings.stack, pool.name, index)
        return gcp.compute.Disk(
            called,
            name=called,
            zone=pool.node_zone(index),
            size=pool.disk.size_gb,
            type=pool.disk.type,
            provisioned_iops=pool.disk.iops,
            provisioned_throughput=pool.disk.mb_s,
            labels=naming.labels(self._settings.labels, self._settings.stack, pool.name),
            opts=pulumi.ResourceOptions.merge(
                pulumi.ResourceOptions(parent=self, depends_on=self._after), protection(pool.disk.on_destroy)
            ),
        )
