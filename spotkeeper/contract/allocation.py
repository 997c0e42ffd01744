"""``stack/allocation``: the grants of the whole stack, which permit attempts of jobs to have a machine. Pure.

A grant is written before the intent. It is released after the machine is gone, or after the static machine has reported
that it dropped the attempt. By compare-and-swap only one writer succeeds, so two jobs never get the same machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from msgspec import Struct
from msgspec.structs import replace

from spotkeeper.contract.cloud import Offer
from spotkeeper.contract.stack import Model, StackState


class Grant(Struct, frozen=True, omit_defaults=True, gc=False):
    """An entry of the allocation: permits this attempt to have a machine of this ``resource``.

    ``resource`` is ``slot:<pool>`` for a spot machine under the pool's limit,
    ``slot:<pool>/on-demand`` for an on-demand machine (which also counts under the
    pool's limit), or ``machine:<name>`` for a static machine.
    """

    job: str
    node: int
    attempt: int
    resource: str
    since: float = 0.0

    @property
    def machine(self) -> str | None:
        """The static machine's name; None for a dynamic machine."""
        return self.resource.removeprefix("machine:") if self.resource.startswith("machine:") else None

    @property
    def pool(self) -> str | None:
        """The pool of a dynamic machine; None for a static one."""
        if not self.resource.startswith("slot:"):
            return None
        return self.resource.removeprefix("slot:").removesuffix("/on-demand")

    @property
    def on_demand(self) -> bool:
        return self.resource.endswith("/on-demand")


class Allocation(Struct, frozen=True, omit_defaults=True):
    """The document of all grants, written by compare-and-swap."""

    ver: int = 0
    nonce: str = ""
    grants: tuple[Grant, ...] = ()

    def changed(self, add: Iterable[Grant], drop: Iterable[Grant]) -> Allocation:
        """Return the next version with these changes; the writer sets its nonce."""
        gone = {(grant.job, grant.node, grant.attempt) for grant in drop}
        kept = tuple(grant for grant in self.grants if (grant.job, grant.node, grant.attempt) not in gone)
        return replace(self, ver=self.ver + 1, grants=(*kept, *add))


def resource(offer: Offer) -> str:
    if offer.machine is not None:
        return f"machine:{offer.machine}"
    return f"slot:{offer.pool}" + ("/on-demand" if offer.model is Model.ON_DEMAND else "")


class Tally:
    """Counts of grants by resource and pool. Counting anew for each check would be slow with 10,000 nodes."""

    def __init__(self, grants: Iterable[Grant]) -> None:
        self._resources: Counter[str] = Counter()
        self._pools: Counter[str | None] = Counter()
        for grant in grants:
            self.add(grant)

    def add(self, grant: Grant) -> None:
        self._resources[grant.resource] += 1
        self._pools[grant.pool] += 1

    def fits(self, stack: StackState, offer: Offer) -> bool:
        """Whether the stack's limits allow one more machine of this offer."""
        taken = self._resources[resource(offer)]
        if offer.machine is not None:
            return not taken
        pool = stack.pool(offer.pool)
        if pool is None or (offer.model is Model.ON_DEMAND and taken >= pool.max_on_demand):
            return False
        return self._pools[offer.pool] < pool.max_machines and self._under_the_stacks(stack, pool.dearest(offer.model))

    def _under_the_stacks(self, stack: StackState, usd: float) -> bool:
        """Whether all dynamic machines, and one more at ``usd`` an hour, stay within the stack's own limits."""
        if stack.max_machines is not None:
            taken = sum(count for name, count in self._pools.items() if name is not None)
            if taken >= stack.max_machines:
                return False
        if stack.max_usd_hour is None:
            return True
        for pool in stack.pools:
            usd += self._resources[f"slot:{pool.name}"] * pool.dearest(Model.SPOT)
            usd += self._resources[f"slot:{pool.name}/on-demand"] * pool.dearest(Model.ON_DEMAND)
        return usd <= stack.max_usd_hour + 1e-9  # in floating point, 3 x 1.2 is more than 3.6
