"""A whole stack on AWS, composed from the components of this package.

The order of declaration is the order of creation; its reverse is that of destruction:
schedule and event routes go first, then the drain (which empties the stack of what
reconcile made), then what those machines stood on.
"""

from __future__ import annotations

from pathlib import Path

import pulumi
import pulumi_aws as aws

from infra import boot, bundle
from infra.aws.alerts import Alerts, AlertsArgs
from infra.aws.disks import Disks, DisksArgs
from infra.aws.identity import Identity, IdentityArgs
from infra.aws.network import Network, NetworkArgs
from infra.aws.placement import Placement, PlacementArgs
from infra.aws.pools import Pools, PoolsArgs, publish_state
from infra.aws.reconcile import Function, FunctionArgs, Triggers, TriggersArgs, drain_args, python
from infra.aws.storage import Storage, StorageArgs
from infra.drain import Drained, DrainedArgs, HasParts
from infra.exports import Exports
from infra.settings import Settings


def declare(settings: Settings, build: Path) -> Exports:
    """Declare every resource of the stack; ``build`` is the folder for archives."""
    agent = bundle.bundle(build, settings.agent.python, settings.agent.arch)
    source = bundle.lambda_source(build, python(settings))
    scripts = boot.render(settings)
    there = pulumi.ResourceOptions(providers={"aws": provider(settings)})
    network = Network("network", NetworkArgs(settings), there)
    identity = Identity("identity", IdentityArgs(settings, network), there)
    storage = Storage("storage", StorageArgs(settings, agent, source, scripts), there)
    function = Function("function", FunctionArgs(settings, storage, identity), there)
    placement = Placement("placement", PlacementArgs(settings), there)
    disks = Disks("disks", DisksArgs(settings), there)
    pools = Pools(
        "pools",
        PoolsArgs(settings, scripts, agent.sha256, network, identity, storage, function, placement, disks),
        there,
    )
    descriptor = publish_state(settings, storage, function, identity, agent, placement, pools)
    stands_on: list[HasParts] = [network, function, placement, pools]
    drained = Drained("drained", DrainedArgs(drain_args(settings, storage), descriptor, stands_on), there)
    Triggers("triggers", TriggersArgs(settings, function, identity, drained), there)
    Alerts("alerts", AlertsArgs(settings, function), there)
    return Exports(
        bucket=storage.bucket.bucket,
        function_url=function.url,
        bundle_sha256=agent.sha256,
        pools=[pool.name for pool in settings.pools],
        static_nodes=sorted(pools.nodes),
        kept_disks=disks.kept,
        ready=drained.drain,
    )


def provider(settings: Settings) -> aws.Provider:
    """AWS as the stack file means it: whatever the shell's region is, and in no other account."""
    return aws.Provider(
        "aws",
        region=settings.region,
        allowed_account_ids=[settings.account],
        profile=pulumi.Config("aws").get("profile"),
    )
