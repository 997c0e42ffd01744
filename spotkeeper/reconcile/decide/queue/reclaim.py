"""Which machines are taken from others for a claim: all that it lacks or none, at the least loss. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Generic, NamedTuple, Protocol, TypeVar

from spotkeeper.contract.allocation import Claim, Stop
from spotkeeper.reconcile.decide.queue.room import Spread

HOUR_S, DAY_S = 3600.0, 86_400.0
PROTECTED_S = 900.0  # after a job's start nothing is taken from it
EARLY_S = 3600.0  # nor from a job that has not started to train, or has no commit, for so long
HOURLY, DAILY = 2, 6  # most recalls of a job within an hour and a day
ENDING_S = 600.0  # a job that ends so soon is left alone,
LINGERS_S = 3600.0  # for so long at most: its script says itself how many steps are left
TAIL_S = 6 * HOUR_S  # so long at most is one left alone that has passed its last step
LAPSE_S = 900.0  # a reservation that finds no machine for so long is given to others


class Recallable(NamedTuple):
    """A job that may give up machines; in the order in which they are taken."""

    way: int  # LAPSES, SHRINKS, PAUSES
    rank: int
    beside: bool  # whether it runs elsewhere than in the claim's gap
    within: bool  # whether its team has no more than its entitlement
    loss: float  # machine-seconds
    left: int  # machines that it keeps
    job: str
    claim: Claim
    fair: bool  # whether only its team's excess may be taken


LAPSES, SHRINKS, PAUSES = range(3)


class Space(Protocol):
    """What machines become free in: the limits (``room.Room``) or the market (``takeover.Freed``)."""

    def copy(self: R) -> R: ...

    def fits(self, claim: Claim, count: int) -> bool: ...

    def free(self, job: str, count: int) -> Spread: ...

    def take(self, claim: Claim, spread: Spread, sign: int = 1) -> None: ...


R = TypeVar("R", bound=Space)


class Taken(Generic[R]):
    """Machines taken from others for one claim, one victim after the other. ``room``: what is left then."""

    def __init__(self, room: R, claim: Claim) -> None:
        self.room, self.claim = room.copy(), claim
        self.victims: dict[str, Recallable] = {}
        self._freed: dict[str, Spread] = {}

    @property
    def fits(self) -> bool:
        return self.room.fits(self.claim, self.claim.min)

    def kept(self, victim: Claim) -> int:
        """Return how many machines this job keeps."""
        return self.victims[victim.job].left if victim.job in self.victims else victim.reserved

    def take(self, victim: Recallable) -> None:
        """Take this job's machines; one that shrank before pauses now."""
        freed = self.room.free(victim.job, self.kept(victim.claim) - victim.left)
        self._freed[victim.job] = self._freed.get(victim.job, ()) + freed
        self.victims[victim.job] = victim

    def give_back(self) -> None:
        """Leave the claim only victims and machines that it needs: the highest class first, then the dearest."""
        for victim in sorted(self.victims.values(), key=lambda victim: (-victim.rank, -victim.loss, victim.job)):
            whole = self._freed[victim.job]
            self._try(victim, whole)
            if victim.way == SHRINKS and victim.job in self.victims:
                for part in _ones(whole):
                    self._try(self.victims[victim.job], (part,))

    def _try(self, victim: Recallable, spread: Spread) -> None:
        """Give this job these machines back, if the claim fits without them."""
        self.room.take(victim.claim, spread)
        if not self.fits:
            self.room.take(victim.claim, spread, -1)
            return
        left = victim.left + sum(number for _, number in spread)
        self.victims[victim.job] = victim._replace(left=left)
        if left == victim.claim.reserved:
            del self.victims[victim.job]


def _ones(spread: Spread) -> Iterable[tuple[str, int]]:
    return [(pool, 1) for pool, number in spread for _ in range(number)]


def needed(room: R, claim: Claim, victims: Iterable[Recallable], excess: Mapping[str, float]) -> Taken[R] | None:
    """Return what is taken from these victims so that the claim fits; None if it would not fit.

    ``excess``: by team, machines beyond its entitlement; fair victims lose no more than until none is left.
    """
    taken = collected(room, claim, victims, excess, enough=True)
    if not taken.fits:
        return None
    taken.give_back()
    return taken


def collected(
    room: R, claim: Claim, victims: Iterable[Recallable], excess: Mapping[str, float], enough: bool
) -> Taken[R]:
    """Take from one victim after the other; ``enough``: only until the claim fits."""
    taken, left = Taken(room, claim), dict(excess)
    for victim in victims:
        team, kept = victim.claim.team, taken.kept(victim.claim)
        before = left.get(team, 0.0) + victim.claim.reserved - kept
        if victim.fair and before <= 1e-6:
            continue
        left[team] = left.get(team, 0.0) - (kept - victim.left)
        taken.take(victim)
        if enough and taken.fits:
            break
    return taken


# -- protection


class Shield(NamedTuple):
    """Why nothing is taken from a job, and until when; ``inf``: to its end."""

    until: float
    why: str


def takeable(victim: Claim, now: float, at: float) -> bool:
    """Whether machines may be taken from this job at ``at``, as known ``now``."""
    return all(shield.until <= at for shield in shields(victim, now))


def shields(victim: Claim, now: float) -> Iterator[Shield]:
    """Yield what protects this job, as known ``now``; also what has passed."""
    ending = now if victim.ending is None else victim.ending
    if victim.stop is Stop.NEVER:
        yield Shield(math.inf if victim.ending is None else ending + TAIL_S, "a stop would lose work")
    if victim.ends is not None and victim.ends - now < ENDING_S:
        yield Shield(ending + LINGERS_S, "about to end")
    if victim.started is None or victim.stop is Stop.EARLY:
        yield Shield(victim.reserved_at + EARLY_S, "no checkpoint yet")
    else:
        yield Shield(max(victim.started, victim.reserved_at) + PROTECTED_S, "just started")
    yield from _recalled(victim)


def _recalled(claim: Claim) -> Iterator[Shield]:
    for most, span_s, span in ((HOURLY, HOUR_S, "hour"), (DAILY, DAY_S, "day")):
        if len(claim.recalls) >= most:
            yield Shield(sorted(claim.recalls)[-most] + span_s, f"made room {most} times within the {span}")


def recalls_left(claim: Claim, now: float) -> bool:
    """Whether machines may be taken once more from this job, within its limits of an hour and a day."""
    return all(shield.until <= now for shield in _recalled(claim))


def dry(claim: Claim, now: float) -> bool:
    """Whether the job has found no machine for a while; then its reservation may go to others."""
    return claim.dry_since is not None and now - max(claim.dry_since, claim.reserved_at, claim.took) >= LAPSE_S


def ending(claim: Claim, now: float) -> bool:
    return claim.ends is not None and now <= claim.ends < now + ENDING_S


def loss(victim: Claim, now: float) -> float:
    """Return what taking this job's machines costs, machine-seconds; each recall of the last day counts once more."""
    return victim.cost_s * (1 + sum(now - at < DAY_S for at in victim.recalls))
