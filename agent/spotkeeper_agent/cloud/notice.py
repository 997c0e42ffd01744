"""Turns the cloud's warnings into one notice with one deadline. Pure: no I/O, no clock.

The metadata clients turn a warning into a :class:`CloudWarning`, which is the same in both clouds; a shutdown arrives
as SIGTERM. Warning and shutdown become a :class:`Notice`. The cloud can withdraw a warning.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from msgspec import Struct

MAINTENANCE_S = 60.0  # the least warning before TERMINATE_ON_HOST_MAINTENANCE
HORIZON_S = 3600.0  # maintenance may be announced weeks ahead, but a replacement needs only minutes
WINDOW_S = 86_400.0  # windows last hours, so a day after its start a maintenance is over or did not happen
REBALANCE_S = 3600.0  # assumed time to the end; the recommendation itself has none, see prolong()


class Cause(str, Enum):
    """Causes of a notice, the least certain first. A less certain cause never replaces a more certain one."""

    REBALANCE = "rebalance"  # a higher risk of preemption: save soon, boot a replacement
    MAINTENANCE = "maintenance"
    PREEMPTED = "preempted"
    SHUTDOWN = "shutdown"


_SURER = tuple(Cause)


class CloudWarning(Struct, frozen=True):
    """A warning by the cloud. ``deadline``: the machine's end in unix seconds; None if the cloud gives none."""

    cause: Cause
    deadline: float | None = None


class Instance(Struct, frozen=True):
    """This machine, now. ``uid``: the cloud's unique id; ``attributes``: the stack's settings (``sk-...``)."""

    uid: str
    name: str
    zone: str
    attributes: dict[str, str] = {}
    warning: CloudWarning | None = None


@dataclass(frozen=True)
class Notice:
    """A machine's expected end: ``deadline`` in whole virtual unix seconds; ``at``: when the warning was seen."""

    cause: Cause
    deadline: int
    at: float

    @property
    def urgent(self) -> bool:
        """Whether the machine will end at the deadline. A machine that is only at risk can run on for days."""
        return self.cause is not Cause.REBALANCE


@dataclass(frozen=True)
class Change:
    """Notices to report: a new one, and one that no longer holds.

    If both are set, the new notice must be reported first. The function would cancel the machine's replacement if it
    knew of no notice for a moment.
    """

    given: Notice | None = None
    withdrawn: Notice | None = None


def observe(known: Notice | None, instance: Instance, notice_s: float, now: float) -> Change:
    """Compare the known notice with the metadata server's current state.

    ``notice_s``: seconds from a preemption's first warning to the machine's end, used if the cloud gives no deadline.
    """
    warning = instance.warning
    if known is not None and known.cause is Cause.SHUTDOWN:
        return Change()  # a shutdown that has begun cannot be withdrawn
    if warning is None:
        return Change(withdrawn=known)
    given = Notice(warning.cause, _deadline(warning, notice_s, now), now)
    return Change(given) if known is None else _replace(known, given, exact=warning.deadline is not None)


def _replace(known: Notice, given: Notice, *, exact: bool) -> Change:
    """Choose between the known and a new notice. ``exact``: whether the cloud itself gave the new notice's deadline."""
    if _SURER.index(given.cause) < _SURER.index(known.cause):
        return Change()  # maintenance does not soften a preemption that has begun
    same = given.cause is known.cause
    if same and (not exact or given.deadline == known.deadline):
        return Change()
    if not same and known.cause is not Cause.REBALANCE:
        given = replace(given, deadline=min(given.deadline, known.deadline))
    # The deadline identifies a notice: withdrawing the old one would withdraw a new one with the same deadline.
    return Change(given, None if given.deadline == known.deadline else known)


def prolong(known: Notice | None, now: float) -> Change:
    """Postpone the deadline of a rebalance recommendation, so that it never stops the job.

    AWS gives no deadline, so this one is Spotkeeper's guess. The job has saved and continues to train until the
    requested replacement is ready.
    """
    if known is None or known.cause is not Cause.REBALANCE or known.deadline - now > REBALANCE_S / 2:
        return Change()
    return Change(Notice(Cause.REBALANCE, int(now + REBALANCE_S), now), known)


def scheduled(start: float, now: float) -> CloudWarning | None:
    """Return maintenance as a :class:`CloudWarning`; None if ``start`` is more than an hour ahead or a day past."""
    return CloudWarning(Cause.MAINTENANCE, start) if -WINDOW_S <= start - now <= HORIZON_S else None


def shutdown(known: Notice | None, left_s: float, now: float) -> Notice:
    """Return the notice of a shutdown that has begun; its deadline is never later than the known notice's."""
    deadline = int(now + left_s)
    return Notice(Cause.SHUTDOWN, min(deadline, known.deadline) if known else deadline, now)


def _deadline(warning: CloudWarning, notice_s: float, now: float) -> int:
    if warning.deadline is not None:
        return int(warning.deadline)
    return int(now + {Cause.PREEMPTED: notice_s, Cause.REBALANCE: REBALANCE_S}.get(warning.cause, MAINTENANCE_S))
