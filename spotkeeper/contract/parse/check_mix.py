"""Rules on a declared mix of machines (``machines``), and what counts and prices of machines mean for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from spotkeeper.contract.job import JobSpec
from spotkeeper.contract.parse.check_run import JobContext
from spotkeeper.contract.parse.problem import Problem, join, nearest, problem
from spotkeeper.contract.stack import PoolState, StackState


def size_path(spec: JobSpec, end: str = "min") -> str:
    """Return the field that says how many nodes the job has. ``end``: of its range, ``min`` or ``max``."""
    return "machines" if spec.machines else "nodes" if isinstance(spec.nodes, int) else f"nodes.{end}"


def gang_price(
    spec: JobSpec, pools: Iterable[PoolState], count: int, price: Callable[[PoolState], float | None]
) -> float | None:
    """Return what ``count`` machines of a job cost at least, USD per hour; None: a pool has no such machine.

    A mix costs the sum of its groups, whatever ``count``; another job fills the cheapest of its pools first, each up to
    its size. ``price``: returns a pool's price, USD per machine-hour; None: it has no such machine.
    """
    usd = {pool.name: (found, pool.max_machines) for pool in pools if (found := price(pool)) is not None}
    if spec.machines:
        parts = [(usd[group.pool][0], group.nodes) for group in spec.machines if group.pool in usd]
        return sum(each * nodes for each, nodes in parts) if len(parts) == len(spec.machines) else None
    total, left, each = 0.0, count, 0.0
    for each, size in sorted(usd.values()):
        total, left = total + each * min(left, size), left - min(left, size)
    return total + each * left if usd else None  # ``check.capacity`` reports machines that no pool may have


def mix_alone(job: JobContext) -> Iterator[Problem]:
    """Check that no other field contradicts ``machines``: work is divided by the library, at a fixed size."""
    spec = job.spec
    if not spec.machines:
        return
    if spec.nodes != 1:
        yield problem("nodes", "contradicts `machines`, which says how many nodes each pool has: remove `nodes`")
    if spec.pools:
        yield problem("pools", "contradicts `machines`, which names the pools: remove `pools`")
    if len(spec.machines) == 1:
        only = spec.machines[0]
        yield problem(
            "machines", f"names a single pool: write `pools: [{only.pool}]` and `nodes: {only.nodes}` instead"
        )
    if spec.stop == "signal":
        yield problem("stop", "`signal` excludes `machines`: only the library divides work by the machines' speeds")
    if not spec.checkpoint.replicated:
        yield problem(
            "checkpoint.replicated", "excludes `machines`: all ranks of a sharded model do the same work", False
        )
    if spec.stragglers == "replace":
        yield problem(
            "stragglers",
            "`replace` excludes `machines`: it would replace the slower type again and again; use `report`",
        )


def mix_pools(job: JobContext) -> Iterator[Problem]:
    """Check that each group's pool exists, buys its machines, and allows enough of them in a zone of all pools."""
    names = [group.pool for group in job.spec.machines]
    for index, group in enumerate(job.spec.machines):
        place = join("machines", index)
        path = join(place, "pool")
        if group.pool in names[:index]:
            yield problem(path, "is named twice", group.pool)
        elif job.stack is not None:
            yield from _pool(job.stack, path, join(place, "nodes"), group.pool, group.nodes)
    found = job.pools()
    if len(found) == len(names) > 1 and not found[0].zones and not job.spec.spread:
        yield problem("machines", "no zone has all of these pools: add `spread: true`, or name other pools")


def _pool(stack: StackState, path: str, count: str, name: str, nodes: int) -> Iterator[Problem]:
    pool = stack.pool(name)
    if pool is None:
        known = [one.name for one in stack.pools]
        hint = nearest(name, known)
        told = "" if hint else f" (it has {', '.join(known) or 'none'})"
        yield problem(path, f"the stack {stack.stack} has no such pool{told}", name, hint)
    elif pool.kind == "static":
        yield problem(path, "has static machines: a mix takes only spot and on-demand machines", name)
    elif nodes > pool.max_machines:
        yield problem(count, f"is more machines than pool {name} may have ({pool.max_machines})", nodes)
