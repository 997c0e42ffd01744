"""A stack on Google Cloud, composed from the components of this package.

Resources are declared in the order of their creation. A destroy deletes them in reverse: first the schedule and the
event route, then the ``Drain`` (which deletes what the function made), then what the function's machines need.
"""

from __future__ import annotations

from pathlib import Path

from infra import boot, bundle
from infra.drain import Drained, Regions
from infra.gcp import pools as pool_resources
from infra.gcp.alerts import GcpAlerts
from infra.gcp.function import GcpFunction, GcpTriggers, drain_args
from infra.gcp.identity import GcpIdentity, GcpShells
from infra.gcp.network import GcpNetwork
from infra.gcp.pools import GcpPools
from infra.gcp.storage import GcpStorage
from infra.settings.gcp import is_local
from infra.settings.model import Settings
from infra.shared import Disks, Exports, PlacementGroups


def declare(settings: Settings, build: Path) -> Exports:
    """Declare every resource of the stack; ``build`` is the folder for archives."""
    # All machines of a one-machine cloud would compile the agent on the same cores.
    agent = bundle.bundle(build, settings.agent.python, settings.agent.arch, compiled=is_local(settings))
    source = bundle.function_source(build, f"3.{settings.reconcile.runtime.removeprefix('python3')}")
    network = GcpNetwork(settings)
    identity = GcpIdentity(settings, network)
    if settings.ssh:
        GcpShells(settings, identity)
    storage = GcpStorage(settings, agent, source, identity)
    function = GcpFunction(settings, storage, identity)
    placement = PlacementGroups(settings, pool_resources.placement_policy)
    disks = Disks(settings, pool_resources.disk)
    scripts = boot.render(settings)
    pools = GcpPools(scripts, agent.sha256, network, identity, storage, function, placement, disks)
    args = drain_args(settings, storage)
    descriptor = pools.publish_state(Regions(args, storage.child))
    drained = Drained(settings, args, descriptor, [network, function, placement, pools])
    triggers = GcpTriggers(settings, function, identity, drained)
    if settings.alerts.email or settings.budget:
        GcpAlerts(settings, triggers)
    return Exports(
        bucket=storage.bucket.name,
        function_url=function.url,
        bundle_sha256=agent.sha256,
        pools=[pool.name for pool in settings.pools],
        static_machines=sorted(pools.machines),
        kept_disks=disks.kept,
        ready=drained.drain,
    )
