"""What the cloud says about this machine's future, as one deadline. Pure: no I/O, no clock.

The metadata server's warnings come as a :class:`Sign`, whichever cloud they are of; the end of a shutdown comes as
SIGTERM. Each is a notice with a deadline, and may be withdrawn.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    from spotkeeper.vm.metadata import Instance

MAINTENANCE_S = 60.0  # the warning that TERMINATE_ON_HOST_MAINTENANCE gives where nothing longer is said
HORIZON_S = 3600.0  # maintenance may be announced weeks ahead; a successor needs minutes
WINDOW_S = 86_400.0  # hours, says the cloud; whoever runs a day after it began is through, or it never was
REBALANCE_S = 3600.0  # no end is said; see prolong()


class Cause(str, Enum):
    """From the mildest to the surest; a milder one never takes the place of a surer one."""

    REBALANCE = "rebalance"  # likelier than others to be taken away: save soon, and boot a successor
    MAINTENANCE = "maintenance"
    PREEMPTED = "preempted"
    SHUTDOWN = "shutdown"


_SURER = tuple(Cause)


class Sign(Struct, frozen=True):
    """A warning of the cloud's. ``deadline``: when the machine ends, unix seconds; None where that is not said."""

    cause: Cause
    deadline: float | None = None


@dataclass(frozen=True)
class Notice:
    """``deadline``: when the machine is expected to end, whole virtual unix seconds; ``at``: when it was seen."""

    cause: Cause
    deadline: int
    at: float

    @property
    def urgent(self) -> bool:
        """Whether the machine ends then; one at risk may stay for days."""
        return self.cause is not Cause.REBALANCE


@dataclass(frozen=True)
class Change:
    """What to report. Where both are set, another deadline replaces the first: ``given`` is said before
    ``withdrawn``, so that at no moment there is no notice."""

    given: Notice | None = None
    withdrawn: Notice | None = None


def observe(known: Notice | None, instance: Instance, notice_s: float, now: float) -> Change:
    """Compare what is known with what the metadata server says now.

    ``notice_s``: from a preemption's first sign to the end, where the cloud does not say when.
    """
    sign = instance.sign
    if known is not None and known.cause is Cause.SHUTDOWN:
        return Change()  # nothing takes back a shutdown that has begun
    if sign is None:
        return Change(withdrawn=known)
    given = Notice(sign.cause, _deadline(sign, notice_s, now), now)
    return Change(given) if known is None else _exchange(known, given, said=sign.deadline is not None)


def _exchange(known: Notice, given: Notice, *, said: bool) -> Change:
    """What becomes of a notice when another one is seen; ``said``: whether its deadline is the cloud's own word."""
    if _SURER.index(given.cause) < _SURER.index(known.cause):
        return Change()  # a preemption under way is not softened by maintenance
    same = given.cause is known.cause
    if same and (not said or given.deadline == known.deadline):
        return Change()
    if not same and known.cause is not Cause.REBALANCE:
        given = replace(given, deadline=min(given.deadline, known.deadline))
    # A fact is known by its deadline: taking back the one would take back the other.
    return Change(given, None if given.deadline == known.deadline else known)


def prolong(known: Notice | None, now: float) -> Change:
    """A recommendation to rebalance has no end: its deadline moves on before anybody stops for it.

    The job is saved, a successor is asked for and takes over when it stands by; where none can be had, training goes
    on.
    """
    if known is None or known.cause is not Cause.REBALANCE or known.deadline - now > REBALANCE_S / 2:
        return Change()
    return Change(Notice(Cause.REBALANCE, int(now + REBALANCE_S), now), known)


def scheduled(start: float, now: float) -> Sign | None:
    """Maintenance that is announced for ``start``, once it is near, and while its window may last."""
    return Sign(Cause.MAINTENANCE, start) if -WINDOW_S <= start - now <= HORIZON_S else None


def shutdown(known: Notice | None, left_s: float, now: float) -> Notice:
    """The machine is going down now: the nearer of the two deadlines."""
    deadline = int(now + left_s)
    return Notice(Cause.SHUTDOWN, min(deadline, known.deadline) if known else deadline, now)


def _deadline(sign: Sign, notice_s: float, now: float) -> int:
    if sign.deadline is not None:
        return int(sign.deadline)
    return int(now + {Cause.PREEMPTED: notice_s, Cause.REBALANCE: REBALANCE_S}.get(sign.cause, MAINTENANCE_S))
