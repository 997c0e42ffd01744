"""The allocation document: who may have what, for the whole stack. Pure.

Grant before intent; release after the machine is gone, or the static node said that it dropped
the attempt. One writer wins by compare-and-swap, so two jobs can never hold one slot or node.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable

from msgspec.structs import replace

from spotkeeper.spec.cloud import Offer
from spotkeeper.spec.record import Alloc, Grant, Model
from spotkeeper.spec.stack import StackState

PORT_LOW, PORT_HIGH, PORT_BLOCK = 10_240, 32_768, 64  # below the kernel's ephemeral ports


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


def room(grants: Iterable[Grant], stack: StackState, offer: Offer) -> bool:
    """Whether the stack's caps leave room for one more of this."""
    name = resource(offer)
    taken = list(grants)
    if offer.node is not None:
        return all(grant.resource != name for grant in taken)
    pool = stack.pool(offer.pool)
    if pool is None:
        return False
    held = [grant for grant in taken if pool_of(grant) == offer.pool]
    if offer.model is Model.ON_DEMAND and sum(g.resource == name for g in held) >= pool.max_on_demand:
        return False
    return len(held) < pool.max_nodes


def change(alloc: Alloc, add: Iterable[Grant], drop: Iterable[Grant]) -> Alloc:
    """The next version of the document (the nonce is the writer's)."""
    gone = {(grant.job, grant.rank, grant.attempt) for grant in drop}
    kept = tuple(grant for grant in alloc.grants if (grant.job, grant.rank, grant.attempt) not in gone)
    return replace(alloc, ver=alloc.ver + 1, grants=(*kept, *add))


def port_base(job: str, taken: Iterable[int] = ()) -> int:
    """A block of 64 ports of the job's own: by hash, then the next that no other job has.

    ``taken``: the ``port_base`` of other unfinished jobs. With all 352 blocks taken the hash decides.
    """
    blocks = (PORT_HIGH - PORT_LOW) // PORT_BLOCK
    used = set(taken)
    first = zlib.crc32(job.encode()) % blocks
    for step in range(blocks):
        port = PORT_LOW + (first + step) % blocks * PORT_BLOCK
        if port not in used:
            return port
    return PORT_LOW + first * PORT_BLOCK
