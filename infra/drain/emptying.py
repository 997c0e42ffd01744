"""How a stack is emptied, whatever the cloud: announce, delete, look again. Knows no cloud and no Pulumi."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

DRAIN_OBJECT = "stack/drain"
ACTIVE_FOLDER = "active/"  # one object for each unfinished job (spotkeeper.reconcile.paths)
DEADLINE_S = 1800.0  # real seconds; a machine may use its whole shutdown
CLEAN_LOOKS = 2  # an insert accepted just before the drain shows up in the second look
# A round that began before the mark may make machines and disks until its request ends (``reconcile/deadline``: 58 s,
# a gang's launches one after the other), and each is listed some seconds later.
SETTLE_S = 70.0


class DrainError(Exception):
    """The stack could not be emptied; what is left, and what to do, is in the message."""


class LaterError(DrainError):
    """The cloud is busy, or the thing is: the same may be asked again after the next look."""


@dataclass(frozen=True)
class Thing:
    """Something of this stack that reconcile made. ``where``: what the cloud needs to find it again."""

    kind: str
    name: str
    where: str
    leaving: bool = False  # it goes by itself, or with another thing: not to be deleted now, but still there


class Cloud(Protocol):
    """One stack in one cloud.

    Attributes:
        stack: whose things these are.
        bucket: where its state is.
        pause_s: from one look to the next: as long as a new thing may take to be listed.
        settle_s: how long after the mark a round may still make something, where jobs are unfinished.
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
        """The stack that the bucket's descriptor names; None where there is no bucket, or no descriptor."""

    def announce(self) -> None:
        """Write ``stack/drain``. A bucket that is gone needs none: no function can read a record either."""

    def lift(self) -> None:
        """Remove ``stack/drain``, if it is there."""

    def marked(self) -> bool:
        """Whether ``stack/drain`` is there."""

    def busy(self) -> bool:
        """Whether jobs are unfinished (``active/``): only for those rounds are begun."""

    def things(self) -> Iterable[Thing]:
        """One look at whatever of this stack carries a job's label: machines, rank disks, snapshots."""

    def delete(self, things: Sequence[Thing]) -> None:
        """Ask for their deletion. What is gone is deleted; what cannot go yet is left for the next look.

        Raises:
            DrainError: refused, for a reason that time does not mend.
        """


def empty(
    cloud: Cloud, pause: Callable[[float], None] = time.sleep, now: Callable[[], float] = time.monotonic
) -> Counter[str]:
    """Until two looks in a row find nothing; how many things of each kind there were.

    Raises:
        DrainError: another stack's bucket, a refusal, or still not empty at the deadline.
    """
    _own(cloud)
    cloud.announce()
    found: set[tuple[str, str]] = set()
    clean, looked = 0, now()
    end, settled = looked + DEADLINE_S, looked + (cloud.settle_s if cloud.busy() else 0.0)
    while clean < CLEAN_LOOKS or looked < settled:
        looked = now()
        try:
            cloud.announce()  # again: where somebody took the mark away, what is emptied would fill up behind us
            left = list(cloud.things())
        except LaterError as busy:
            clean, still = 0, f"the cloud does not list what is there ({busy})"
        else:
            found |= {(thing.kind, thing.where) for thing in left}
            clean, still = 0 if left else clean + 1, f"still there: {', '.join(thing.name for thing in left[:10])}"
            cloud.delete([thing for thing in left if not thing.leaving])
        if clean < CLEAN_LOOKS or looked < settled:
            if looked > end:
                raise DrainError(f"after {DEADLINE_S:.0f} s {still}. Delete what is left, then destroy again")
            pause(cloud.pause_s)
    return Counter(kind for kind, _ in found)


def _own(cloud: Cloud) -> None:
    """Whether this bucket is this stack's. Without the descriptor nothing can have been made."""
    owner = cloud.owner()
    if owner is not None and owner != cloud.stack:
        raise DrainError(
            f"bucket {cloud.bucket} belongs to the stack {owner!r}, not to {cloud.stack!r}: nothing was deleted"
        )
