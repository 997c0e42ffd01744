"""What the cloud says about this machine's future, as one deadline. Pure: no I/O, no clock.

``preempted`` and ``maintenance-event`` come from the metadata server; the end of a
shutdown comes as SIGTERM. Each is a warning with a deadline, and may be withdrawn.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from spotkeeper.vm.metadata import Instance

MAINTENANCE_S = 60.0  # the warning that TERMINATE_ON_HOST_MAINTENANCE gives where nothing longer is said


class Cause(str, Enum):
    PREEMPTED = "preempted"
    MAINTENANCE = "maintenance"
    SHUTDOWN = "shutdown"


@dataclass(frozen=True)
class Notice:
    """``deadline``: when the machine is expected to end, whole virtual unix seconds; ``at``: when it was seen."""

    cause: Cause
    deadline: int
    at: float


@dataclass(frozen=True)
class Change:
    """What to report. ``given`` and ``withdrawn`` may both be set: another deadline replaces the first."""

    given: Notice | None = None
    withdrawn: Notice | None = None


def observe(known: Notice | None, instance: Instance, notice_s: float, now: float) -> Change:
    """Compare what is known with what the metadata server says now."""
    cause = _cause(instance)
    if known is not None and known.cause is Cause.SHUTDOWN:
        return Change()  # nothing takes back a shutdown that has begun
    if cause is None:
        return Change(withdrawn=known)
    if known is not None and (known.cause is cause or known.cause is Cause.PREEMPTED):
        return Change()  # a preemption under way is not softened by maintenance
    wait_s = notice_s if cause is Cause.PREEMPTED else MAINTENANCE_S
    return Change(given=Notice(cause, int(now + wait_s), now))


def shutdown(known: Notice | None, left_s: float, now: float) -> Notice:
    """The machine is going down now: the nearer of the two deadlines."""
    deadline = int(now + left_s)
    return Notice(Cause.SHUTDOWN, min(deadline, known.deadline) if known else deadline, now)


def _cause(instance: Instance) -> Cause | None:
    if instance.preempted.upper() == "TRUE":
        return Cause.PREEMPTED
    if instance.maintenance_event.upper().startswith("TERMINATE"):
        return Cause.MAINTENANCE
    return None
