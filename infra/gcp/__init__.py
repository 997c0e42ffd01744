"""A whole stack on Google Cloud, composed from the components of this package.

The order of declaration is the order of creation; its reverse is that of destruction:
schedule and event route go first, then the drain (which empties the stack of what
reconcile made), then what those machines stood on.
"""

from __future__ import annotations

from pathlib import Path

from infra import boot, bundle
from infra.drain import Drained, DrainedArgs, HasParts
from infra.exports import Exports
from infra.gcp.alerts import Alerts, AlertsArgs
from infra.gcp.disks import Disks, DisksArgs
from infra.gcp.identity import Identity, IdentityArgs
from infra.gcp.network import Network, NetworkArgs
from infra.gcp.placement import Placement, PlacementArgs
from infra.gcp.pools import Pools, PoolsArgs, pool_states, publish_state
from infra.gcp.reconcile import Function, FunctionArgs, Triggers, TriggersArgs, drain_args
from infra.gcp.storage import Storage, StorageArgs
from infra.settings import Settings


def declare(settings: Settings, build: Path) -> Exports:
    """Declare every resource of the stack; ``build`` is the folder for archives."""
    agent = bundle.bundle(build, settings.agent.python, settings.agent.arch)
    source = bundle.function_source(build)
    network = Network("network", NetworkArgs(settings))
    identity = Identity("identity", IdentityArgs(settings, network))
    storage = Storage("storage", StorageArgs(settings, agent, source, identity))
    function = Function("function", FunctionArgs(settings, storage, identity))
    placement = Placement("placement", PlacementArgs(settings))
    disks = Disks("disks", DisksArgs(settings))
    pools = Pools(
        "pools",
        PoolsArgs(
            settings, boot.render(settings), agent.sha256, network, identity, storage, function, placement, disks
        ),
    )
    descriptor = publish_state(settings, storage, function, identity, agent, pool_states(settings, pools, placement))
    stands_on: list[HasParts] = [network, function, placement, pools]
    drained = Drained("drained", DrainedArgs(drain_args(settings, storage), descriptor, stands_on))
    triggers = Triggers("triggers", TriggersArgs(settings, function, identity, drained))
    Alerts("alerts", AlertsArgs(settings, function, triggers))
    return Exports(
        bucket=storage.bucket.name,
        function_url=function.url,
        bundle_sha256=agent.sha256,
        pools=[pool.name for pool in settings.pools],
        static_nodes=sorted(pools.nodes),
        kept_disks=disks.kept,
        ready=drained.drain,
    )
