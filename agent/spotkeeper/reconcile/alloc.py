"""The allocation document: who may have what, for the whole stack. Pure.

Grant before intent; release after the machine is gone, or the static node said that it dropped
the attempt. One writer wins by compare-and-swap, so two jobs can never hold one slot or node.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from msgspec.structs import replace

from spotkeeper.spec.cloud import Offer
from spotkeeper.spec.model import Model
from spotkeeper.spec.record import Alloc, Grant
from spotkeeper.spec.stack import StackState


def resource(offer: Offer) -> str:
    """The name of what an offer takes from the stack."""
    if offer.node is not None:
        return f"node:{offer.node}"
    return f"slot:{offer.pool}" + ("/on-demand" if offer.model is Model.ON_DEMAND else "")


def node_of(grant: Grant) -> str | None:
    return grant.resource.removeprefix("node:") if grant.resource.startswith("node:") else None


def pool_of(grant: Grant) -> str | None:
    """The pool of a dynamic machine's grant."""
    if not grant.resource.startswith("slot:"):
        return None
    return grant.resource.removeprefix("slot:").removesuffix("/on-demand")


def is_on_demand(grant: Grant) -> bool:
    return grant.resource.endswith("/on-demand")


class Tally:
    """Grants counted by resource and by pool: the caps are asked once a rank, and a stack may have 10,000 grants."""

    def __init__(self, grants: Iterable[Grant]) -> None:
        self._resources: Counter[str] = Counter()
        self._pools: Counter[str | None] = Counter()
        for grant in grants:
            self.add(grant)

    def add(self, grant: Grant) -> None:
        self._resources[grant.resource] += 1
        self._pools[pool_of(grant)] += 1

    def room(self, stack: StackState, offer: Offer) -> bool:
        """Whether the stack's caps leave room for one more of this."""
        taken = self._resources[resource(offer)]
        if offer.node is not None:
            return not taken
        pool = stack.pool(offer.pool)
        if pool is None or (offer.model is Model.ON_DEMAND and taken >= pool.max_on_demand):
            return False
        return self._pools[offer.pool] < pool.max_nodes and self._under_the_stacks(stack, pool.dearest(offer.model))

    def _under_the_stacks(self, stack: StackState, usd: float) -> bool:
        """Whether all dynamic machines together, and one more of that price, keep to what the stack may have."""
        if stack.max_machines is not None:
            taken = sum(count for name, count in self._pools.items() if name is not None)
            if taken >= stack.max_machines:
                return False
        if stack.max_usd_hour is None:
            return True
        for pool in stack.pools:
            usd += self._resources[f"slot:{pool.name}"] * pool.dearest(Model.SPOT)
            usd += self._resources[f"slot:{pool.name}/on-demand"] * pool.dearest(Model.ON_DEMAND)
        return usd <= stack.max_usd_hour + 1e-9  # three times 1.2 are not above 3.6


def change(alloc: Alloc, add: Iterable[Grant], drop: Iterable[Grant]) -> Alloc:
    """The next version of the document (the nonce is the writer's)."""
    gone = {(grant.job, grant.rank, grant.attempt) for grant in drop}
    kept = tuple(grant for grant in alloc.grants if (grant.job, grant.rank, grant.attempt) not in gone)
    return replace(alloc, ver=alloc.ver + 1, grants=(*kept, *add))
