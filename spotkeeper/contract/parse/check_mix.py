"""Rules on a declared mix of machines (``machines``), and what counts and prices of machines mean for it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator

from spotkeeper.contract.job import JobSpec, MachineGroup, UnknownError
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
    """Check that a mix has several pools, and that no other field contradicts it."""
    groups = job.spec.machines
    if len(groups) == 1:
        only = groups[0]
        yield problem(
            "machines", f"names a single pool: write `pools: [{only.pool}]` and `nodes: {only.nodes}` instead"
        )
    if groups:
        yield from contradictions(job.spec)


# Work is divided by the library, at a fixed size.
_CONTRADICTIONS: tuple[tuple[str, Callable[[JobSpec], bool], str], ...] = (
    (
        "nodes",
        lambda spec: spec.nodes != 1,
        "contradicts `machines`, which says how many nodes each pool has: remove `nodes`",
    ),
    ("pools", lambda spec: bool(spec.pools), "contradicts `machines`, which names the pools: remove `pools`"),
    (
        "stop",
        lambda spec: spec.stop == "signal",
        "`signal` excludes `machines`: only the library divides work by the machines' speeds",
    ),
    (
        "checkpoint.replicated",
        lambda spec: not spec.checkpoint.replicated,
        "`false` excludes `machines`: all ranks of a sharded model do the same work",
    ),
    (
        "stragglers",
        lambda spec: spec.stragglers == "replace",
        "`replace` excludes `machines`: it would replace the slower type again and again; use `report`",
    ),
)


def contradictions(spec: JobSpec) -> Iterator[Problem]:
    """Yield a problem for each other field that contradicts `machines`; fields that are invalid are skipped."""
    for path, contradicts, message in _CONTRADICTIONS:
        with contextlib.suppress(UnknownError):
            if contradicts(spec):
                yield problem(path, message)


def mix_pools(job: JobContext) -> Iterator[Problem]:
    """Check each group's pool, and that a zone has all pools."""
    groups = job.spec.machines
    yield from group_problems(job.stack, enumerate(groups))
    found = job.pools()
    if len(found) == len(groups) > 1 and not found[0].zones and not job.spec.spread:
        yield problem("machines", "no zone has all of these pools: add `spread: true`, or name other pools")


def group_problems(stack: StackState | None, groups: Iterable[tuple[int, MachineGroup]]) -> Iterator[Problem]:
    """Check that each group's pool is named once, exists, buys its machines, and allows enough of them.

    ``groups``: with their places in the file, which may have others that are invalid. ``stack``: None: unknown.
    """
    names: set[str] = set()
    for index, group in groups:
        place = join("machines", index)
        pool = stack.pool(group.pool) if stack is not None else None
        if group.pool in names:
            yield problem(join(place, "pool"), "is named twice", group.pool)
        elif stack is not None:
            yield from _pool(stack, join(place, "pool"), group.pool)
        names.add(group.pool)
        if pool is not None and pool.kind != "static" and group.nodes > pool.max_machines:
            message = f"is more machines than pool {pool.name} may have ({pool.max_machines})"
            yield problem(join(place, "nodes"), message, group.nodes)


def _pool(stack: StackState, path: str, name: str) -> Iterator[Problem]:
    pool = stack.pool(name)
    if pool is None:
        known = [one.name for one in stack.pools]
        hint = nearest(name, known)
        told = "" if hint else f" (it has {', '.join(known) or 'none'})"
        yield problem(path, f"the stack {stack.stack} has no such pool{told}", name, hint)
    elif pool.kind == "static":
        yield problem(path, "has static machines: a mix takes only spot and on-demand machines", name)
