"""What a stack file says to the function: ``stack/pools.json`` without what only the cloud can tell.

The program of either cloud adds links and addresses; `spotkeeper check` reads job files against it as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from msgspec.structs import replace
from spotkeeper.spec.stack import PoolState, StackState, StaticNode

from infra import naming
from infra.catalog import DISK_PRICES
from infra.settings.model import Settings
from infra.settings.pool import Pool


def models(pool: Pool) -> tuple[str, ...]:
    """How machines of a spot pool may be bought: a template for each."""
    return ("spot", "on-demand") if pool.on_demand_nodes() else ("spot",)


def pool_state(
    settings: Settings,
    pool: Pool,
    templates: Mapping[str, str] | None = None,
    placement: Mapping[str, str] | None = None,
) -> PoolState:
    """A pool as reconcile reads it; ``templates`` by model, ``placement`` by zone."""
    static = range(pool.size if pool.kind == "static" else 0)
    return PoolState(
        name=pool.name,
        kind=pool.kind,
        machine_type=pool.machine.type,
        zones=pool.zones,
        nproc=pool.machine.processes(),
        max_nodes=pool.size,
        max_on_demand=pool.on_demand_nodes(),
        disk_gb=pool.disk.size_gb,
        disk_type=pool.disk.type,
        disk_iops=pool.disk.iops,
        disk_mbps=pool.disk.mb_s,
        prices={zone: price for zone in pool.zones if (price := pool.price(zone))},
        templates=dict(templates or {}),
        placement=dict(placement or {}),
        nodes=tuple(StaticNode(naming.node(settings.stack, pool.name, i), pool.node_zone(i)) for i in static),
        disk_usd_gb_month=DISK_PRICES.get(pool.disk.type),
    )


def stack_state(settings: Settings, pools: tuple[PoolState, ...]) -> StackState:
    """The stack as the function reads it, but for its own address, its bundle and its nodes' identity."""
    return StackState(
        stack=settings.stack,
        cloud=settings.cloud,
        project=settings.owner(),
        region=settings.region,
        bucket=settings.bucket_name(),
        pools=pools,
        lease_minutes=settings.limits.lease_minutes,
        boot_deadline_s=settings.limits.boot_deadline_s,
        fallback=settings.fallback.state(),
        max_run_s=settings.limits.max_run_s(),
        job_identity=settings.job_identity,
        max_machines=settings.limits.machines,
        max_usd_hour=settings.limits.usd_per_hour,
    )


def state_text(settings: Settings, pools: Sequence[PoolState], url: str, node_identity: str, bundle_sha256: str) -> str:
    """The whole text of ``stack/pools.json``; ``url``: where agents report."""
    known = stack_state(settings, tuple(pools))
    state = replace(known, function_url=url, node_identity=node_identity, bundle_sha256=bundle_sha256)
    return msgspec.json.format(msgspec.json.encode(state)).decode()
