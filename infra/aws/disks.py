"""Retained disks of static nodes. The disks of ranks are reconcile's and never in Pulumi's state."""

from __future__ import annotations

from dataclasses import dataclass

import pulumi
import pulumi_aws as aws

from infra import naming
from infra.places import Places
from infra.protection import protection
from infra.settings import Pool, Settings


@dataclass(frozen=True)
class DisksArgs:
    settings: Settings


class Disks(pulumi.ComponentResource):
    """``ids``: node -> its volume's id. ``kept``: disks that stay in the cloud, and bill, after a destroy."""

    def __init__(self, name: str, args: DisksArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("spotkeeper:aws:Disks", name, None, opts)
        self._settings = args.settings
        child = pulumi.ResourceOptions(parent=self)
        self._after = [Places(args.settings, child)] if args.settings.static() else []
        nodes = [(pool, index) for pool in args.settings.static() for index in range(pool.size)]
        stack = args.settings.stack
        self.ids = {naming.node(stack, pool.name, i): self._disk(pool, i).id for pool, i in nodes}
        self.kept = [naming.node_disk(stack, p.name, i) for p, i in nodes if p.disk.on_destroy != "delete"]
        self.register_outputs({})

    def _disk(self, pool: Pool, index: int) -> aws.ebs.Volume:
        called = naming.node_disk(self._settings.stack, pool.name, index)
        return aws.ebs.Volume(
            called,
            availability_zone=pool.node_zone(index),
            size=pool.disk.size_gb,
            type=pool.disk.type,
            iops=pool.disk.iops,
            throughput=pool.disk.mb_s,
            encrypted=True,
            tags=naming.tags(self._settings.labels, self._settings.stack, called, pool.name),
            opts=pulumi.ResourceOptions.merge(
                pulumi.ResourceOptions(parent=self, depends_on=self._after), protection(pool.disk.on_destroy)
            ),
        )
