"""Empty a stack in any cloud, or some of its regions: list and delete until nothing is left."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from spotkeeper.contract.stack import region_of

DRAIN_OBJECT = "stack/drain"
ACTIVE_FOLDER = "active/"  # one object for each unfinished job (spotkeeper.reconcile.store.paths)
DEADLINE_S = 1800.0  # real seconds; a machine's shutdown may take minutes
CLEAN_LISTINGS = 2  # an insert accepted just before the drain appears in the second listing
# A round that began before the mark may create machines and disks until its request ends (after at most 58 s, see
# ``reconcile/store/deadline``), and each is listed some seconds later.
SETTLE_S = 70.0


class DrainError(Exception):
    """The stack could not be emptied; the message names what is left and what to do."""


class LaterError(DrainError):
    """The cloud or a resource is busy; the drain tries again after the next listing."""


@dataclass(frozen=True)
class Thing:
    """A machine, disk or snapshot that the function created.

    ``where`` identifies it in calls of the cloud: its URL on Compute Engine, region and id on EC2.
    """

    kind: str
    name: str
    where: str
    leaving: bool = False  # still listed, but ends by itself or cannot be deleted yet
    job: str = ""
    zone: str = ""  # "": a snapshot of Compute Engine, which is in no region


class DrainCloud(Protocol):
    """A client of a cloud for the drain of one stack.

    Attributes:
        stack, bucket: the stack's name and its bucket.
        pause_s: seconds between two listings; a new resource is listed within this time.
        settle_s: for how many seconds after the write of ``stack/drain`` an earlier round can still create resources.
    """

    @property
    def stack(self) -> str: ...

    @property
    def bucket(self) -> str: ...

    @property
    def pause_s(self) -> float: ...

    @property
    def settle_s(self) -> float: ...

    def owner(self) -> str | None:
        """Return the stack that ``stack/pools.json`` in the bucket names; None if the object or bucket is missing."""

    def announce(self) -> None:
        """Write ``stack/drain``. Without a bucket do nothing: then the function has no records and launches nothing."""

    def lift(self) -> None:
        """Remove ``stack/drain`` if it exists."""

    def marked(self) -> bool:
        """Return whether ``stack/drain`` exists."""

    def active(self) -> Collection[str]:
        """Return the unfinished jobs (objects in ``active/``); only these have rounds."""

    def read(self, name: str) -> bytes | None:
        """Return an object of the bucket; None if it is missing."""

    def things(self) -> Iterable[Thing]:
        """List the stack's machines, disks and snapshots with a job's label."""

    def delete(self, things: Sequence[Thing]) -> None:
        """Request deletions. What is gone counts as deleted; what is busy is tried again after the next listing.

        Raises:
            DrainError: a refusal that is not temporary.
        """


def empty(
    cloud: DrainCloud,
    pause: Callable[[float], None] = time.sleep,
    now: Callable[[], float] = time.monotonic,
    regions: Collection[str] = (),
) -> Counter[str]:
    """Delete until two listings in a row show nothing; return the number of deleted things by kind.

    ``regions``: delete only what is in these, of a stack that stays in use. ``stack/pools.json`` names them no more, so
    no round that begins now creates anything there; (): write ``stack/drain`` and delete everything.

    Raises:
        DrainError: the bucket is another stack's, a deletion is refused, or half an hour was not enough.
    """
    _own(cloud)
    if not regions:
        cloud.announce()
    found: set[tuple[str, str]] = set()
    clean, listed_at = 0, now()
    end, settled = listed_at + DEADLINE_S, listed_at + (cloud.settle_s if cloud.active() else 0.0)
    while clean < CLEAN_LISTINGS or listed_at < settled:
        listed_at = now()
        try:
            if not regions:
                cloud.announce()  # repeated: without the mark the function would launch machines
            left = [thing for thing in cloud.things() if not regions or region_of(thing.zone) in regions]
        except LaterError as busy:
            clean, still = 0, f"the cloud still does not list the stack's resources ({busy})"
        else:
            found |= {(thing.kind, thing.where) for thing in left}
            clean, still = 0 if left else clean + 1, f"these are left: {', '.join(thing.name for thing in left[:10])}"
            cloud.delete([thing for thing in left if not thing.leaving])
        if clean < CLEAN_LISTINGS or listed_at < settled:
            if listed_at > end:
                run = "`pulumi up`" if regions else "the destroy"
                raise DrainError(f"after {DEADLINE_S:.0f} s {still}. Delete what is left, then run {run} again")
            pause(cloud.pause_s)
    return Counter(kind for kind, _ in found)


def _own(cloud: DrainCloud) -> None:
    """Refuse another stack's bucket. One without ``stack/pools.json`` is accepted: its function has created nothing."""
    owner = cloud.owner()
    if owner is not None and owner != cloud.stack:
        raise DrainError(
            f"bucket {cloud.bucket} belongs to the stack {owner!r}, not to {cloud.stack!r}: nothing was deleted"
        )
