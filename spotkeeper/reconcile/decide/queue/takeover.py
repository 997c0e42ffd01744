"""Takes over machines that run, for a job that the cloud refuses machines while the limits have room for it. Pure.

A machine that is deleted leaves its zone what the cloud can give to the next request. So a job that has asked in vain
for a while takes machines from the jobs from which it could take them if the limits were short (``scheduler``), where
all of their machines are in pools and a zone that it would take. Jobs of no higher class request no machine there until
it has its machines. The cloud may still give them to somebody else: so a job does this once an hour at most.
"""

from __future__ import annotations

from collections.abc import Mapping

from spotkeeper.contract.allocation import Claim
from spotkeeper.reconcile.decide.queue.room import Spread

SHORT_S = 420.0  # a job takes over machines once it has had none for so long: later than a gang leaves a dry zone
HANDOVER_S = 900.0  # so long the others leave the market to it
AGAIN_S = 3600.0  # between two times that a job does so


class Freed:
    """Machines that become free in the market. ``count``: how many are needed."""

    def __init__(self, count: int) -> None:
        self.count = count

    def copy(self) -> Freed:
        return Freed(self.count)

    def fits(self, claim: Claim, count: int) -> bool:
        """Whether enough machines are free."""
        return self.count <= 0

    def free(self, job: str, count: int) -> Spread:
        self.count -= count
        return ((job, count),)

    def take(self, claim: Claim, spread: Spread, sign: int = 1) -> None:
        self.count += sign * sum(number for _, number in spread)


def lacks(claim: Claim, now: float) -> int:
    """Return for how many machines the job may take over others now; 0: none."""
    short = claim.short
    if short is None or not short.count or now - claim.took < AGAIN_S:
        return 0
    if now - max(short.since, claim.reserved_at) < SHORT_S:
        return 0
    return max(0, claim.min - (claim.reserved - short.count))


def under_way(claim: Claim | None, now: float) -> bool:
    """Whether the job took over machines and may still get them."""
    return claim is not None and claim.short is not None and now - claim.took < HANDOVER_S


def leaves(victim: Claim, granted: Mapping[str, int], claim: Claim) -> bool:
    """Whether each machine that this victim gives up is one that the claim would take.

    ``granted``: the victim's machines, as ``room.granted_by`` counts them.
    """
    wanted = claim.short.offers if claim.short is not None else ()
    pools = (name.partition("/")[0] for name, count in granted.items() if count)
    found = [f"{pool}/{victim.zone}" in wanted for pool in pools]
    return all(found) and sum(granted.values()) >= victim.reserved


def meet(claim: Claim, taker: Claim) -> bool:
    """Whether the claim may ask for machines that become free for ``taker``."""
    pools = {offer.partition("/")[0] for offer in taker.short.offers} if taker.short is not None else set()
    return not claim.pools or not pools.isdisjoint(claim.pools)
