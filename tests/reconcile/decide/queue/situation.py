"""Small situations of the queue: a stack with one pool, jobs that run and jobs that wait."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from spotkeeper.contract.allocation import Allocation, Claim, Grant, Stop, TeamUse
from spotkeeper.contract.stack import PoolState, Price, StackState, StaticMachine, TeamState
from spotkeeper.reconcile.decide.queue.scheduler import schedule

NOW = 1_800_000_000.0
MIN_S, HOUR_S, DAY_S = 60.0, 3600.0, 86_400.0


def pool(name: str = "p", cap: int = 8, usd: float = 1.0, static: int = 0, **more: Any) -> PoolState:
    """Return a pool whose machines all cost ``usd`` an hour."""
    kind = "static" if static else "spot"
    machines = tuple(StaticMachine(f"{name}-{number}", "a") for number in range(static))
    prices = {"a": Price(on_demand=usd, spot=usd)}
    on_demand = more.pop("max_on_demand", cap)
    return PoolState(name, kind, "m", ("a",), 1, cap, on_demand, 10, "d", prices, machines=machines, **more)


def stack(*pools: PoolState, teams: Iterable[TeamState] = (), cap: int = 8, **more: Any) -> StackState:
    return StackState("s", "gcp", "p", "r", "b", pools or (pool(cap=cap),), teams=tuple(teams), **more)


def shares(**share: float) -> tuple[TeamState, ...]:
    return tuple(TeamState(name, share=value) for name, value in share.items())


def runs(job: str, count: int, team: str = "default", ago_s: float = 6 * HOUR_S, **more: Any) -> Claim:
    """Return a job that trains since ``ago_s`` and can be taken from."""
    given = {"min": count, "max": count, "since": NOW - ago_s, "stop": Stop.SAVED, "started": NOW - ago_s, **more}
    return Claim(job, team=team, reserved=count, **{"reserved_at": NOW - ago_s, **given})


def waits(job: str, count: int, team: str = "default", ago_s: float = MIN_S, **more: Any) -> Claim:
    given = {"min": count, "max": count, "since": NOW - ago_s, "waits": NOW - ago_s, **more}
    return Claim(job, team=team, **given)


def grants(*claims: Claim) -> tuple[Grant, ...]:
    """Return the grants of jobs that have had all their machines since their reservation, in their first pool."""
    return tuple(
        Grant(claim.job, node, 1, f"slot:{(*claim.pools, 'p')[0]}", claim.reserved_at)
        for claim in claims
        for node in range(claim.reserved)
    )


def used(**usd: float) -> tuple[TeamUse, ...]:
    return tuple(TeamUse(team, value, NOW) for team, value in usd.items())


Use = tuple[TeamUse, ...]


def after(*claims: Claim, on: StackState | None = None, use: Use = (), now: float = NOW) -> dict[str, Claim]:
    """Schedule these claims, with grants for all reservations; return the claims by job."""
    allocation = Allocation(grants=grants(*claims), claims=claims, use=use)
    return {claim.job: claim for claim in schedule(allocation, on or stack(), now).claims}


def reserved(*claims: Claim, on: StackState | None = None, use: Use = (), now: float = NOW) -> dict[str, int]:
    return {job: claim.reserved for job, claim in after(*claims, on=on, use=use, now=now).items()}
