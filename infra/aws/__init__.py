"""A stack on AWS, composed from the components of this package.

Resources are declared in the order of their creation. A destroy deletes them in reverse: first the schedule and the
event routes, then the ``Drain`` (which deletes what the function made), then what the function's machines need.
"""

from __future__ import annotations

from pathlib import Path

import pulumi
import pulumi_aws as aws

from infra import boot, bundle
from infra.aws import pools as pool_resources
from infra.aws.alerts import AwsAlerts
from infra.aws.function import AwsFunction, AwsTriggers, drain_args, profile, python
from infra.aws.identity import AwsIdentity, AwsShells
from infra.aws.network import AwsNetwork
from infra.aws.pools import AwsPools
from infra.aws.storage import AwsStorage
from infra.drain import Drained, Regions
from infra.settings.model import Settings
from infra.shared import Component, Disks, Exports, PlacementGroups


def declare(settings: Settings, build: Path) -> Exports:
    """Declare every resource of the stack; ``build`` is the folder for archives."""
    agent = bundle.bundle(build, settings.agent.python, settings.agent.arch)
    source = bundle.lambda_source(build, python(settings))
    scripts = boot.render(settings)
    opts = pulumi.ResourceOptions(providers={"aws": provider(settings)})
    network = AwsNetwork(settings, opts)
    identity = AwsIdentity(settings, network, opts)
    storage = AwsStorage(settings, agent, source, scripts, opts)
    function = AwsFunction(settings, storage, identity, opts)
    placement = PlacementGroups(settings, pool_resources.placement_group, opts)
    disks = Disks(settings, pool_resources.volume, opts)
    pools = AwsPools(scripts, agent.sha256, network, identity, storage, function, placement, disks, opts)
    args = drain_args(settings, storage)
    descriptor = pools.publish_state(Regions(args, storage.child))
    needed: list[Component] = [network, function, placement, pools]
    if settings.ssh:
        needed.append(AwsShells(settings, identity, opts))
    drained = Drained(settings, args, descriptor, needed, opts)
    AwsTriggers(settings, function, identity, drained, opts)
    if settings.alerts.email or settings.budget:
        AwsAlerts(settings, function, opts)
    return Exports(
        bucket=storage.bucket.bucket,
        function_url=function.url,
        bundle_sha256=agent.sha256,
        pools=[pool.name for pool in settings.pools],
        static_machines=sorted(pools.machines),
        kept_disks=disks.kept,
        ready=drained.drain,
    )


def provider(settings: Settings) -> aws.Provider:
    """Return the AWS provider for the stack file's region and account; the shell's region has no effect."""
    return aws.Provider(
        "aws",
        region=settings.region,
        allowed_account_ids=[settings.account],
        profile=profile() or None,
    )
