"""In which order the queue serves claims, and what keeps each waiting beside the claims before it. Pure.

First the higher class, then the team that has used less of its share, then the older job. A job's class is its
priority, one higher for each 24 h that it has waited.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from datetime import datetime, timezone
from functools import cached_property
from heapq import heapify, heappop, heappush

from spotkeeper.contract.allocation import Allocation, Claim, Stop
from spotkeeper.contract.months import next_month
from spotkeeper.contract.stack import StackState
from spotkeeper.reconcile.decide.queue import takeover, use
from spotkeeper.reconcile.decide.queue.reclaim import DAY_S, HOUR_S, LAPSE_S
from spotkeeper.reconcile.decide.queue.room import Room, of_running

HIGH = 2
KEPT_CLASS_S = 2 * HOUR_S  # a job keeps the class that it had reached by waiting
CHARGED_S = 2 * HOUR_S  # this much of a job's use is charged to its team as soon as it starts

Shape = tuple[object, ...]


def rank(claim: Claim, now: float) -> int:
    """Return a claim's class: its priority, one higher for each day that it has waited, at most high."""
    if claim.reserved or claim.waits is None:
        waited = claim.waited_s if now - claim.reserved_at < KEPT_CLASS_S else 0.0
    else:
        waited = max(0.0, now - claim.waits)
    return min(HIGH, claim.priority + int(waited // DAY_S)) if claim.priority < HIGH else claim.priority


def reasons(allocation: Allocation, stack: StackState, now: float) -> dict[str, str]:
    """Return the waiting jobs in the order of their turns, and what keeps each waiting beside the jobs before it."""
    order = Order(allocation, stack, now)
    return {claim.job: order.why(claim) for claim in order.charged()}


def why(allocation: Allocation, stack: StackState, claim: Claim, now: float) -> str:
    """Return what keeps a claim waiting beside the jobs before it; "" if only they do."""
    return Order(allocation, stack, now).why(claim)


class Order:
    """The claims of all jobs at one moment, the room that they leave, and the order of those that wait."""

    def __init__(self, allocation: Allocation, stack: StackState, now: float) -> None:
        self.allocation, self.stack, self.now = allocation, stack, now
        self.running = {claim.job: claim for claim in allocation.claims if claim.reserved}
        self.waiting = [claim for claim in allocation.claims if claim.waiting]
        self.granted = Counter(grant.job for grant in allocation.grants)
        self.ranks = {claim.job: rank(claim, now) for claim in allocation.claims}
        self.share = {team: stack.team(team).share for team in {claim.team for claim in allocation.claims}}
        teams = {one.team: one for one in use.current(allocation, stack, now)}
        month = {team: one.month_usd for team, one in teams.items()}
        self.over = {
            team.name: f"team {team.name} has spent its max_usd_per_month of ${team.max_usd_month:g}"
            f", so it waits until {datetime.fromtimestamp(next_month(now), timezone.utc):%Y-%m-%d} (UTC)"
            for team in stack.teams
            if team.max_usd_month is not None and month.get(team.name, 0.0) >= team.max_usd_month
        }
        self.empty = Room(stack, self.over, now)
        self.room = of_running(allocation, stack, self.over, now)
        self.spent: dict[str, float] = defaultdict(float, {team: one.usd for team, one in teams.items()})
        self.have: Counter[str] = Counter()
        self.in_gap: dict[str, list[Claim]] = defaultdict(list)
        self.steps = 0  # of charges, so that turns follow them
        for claim in self.running.values():
            self.have[claim.team] += claim.reserved
            self.in_gap[claim.gap].append(claim)
            self.charge(claim, claim.reserved, max(0.0, now - claim.reserved_at))
        self._fits_alone: dict[Shape, bool] = {}

    def charge(self, claim: Claim, count: int, age_s: float = 0.0) -> None:
        """Charge the team for machines that were just reserved: less and less while their cost is real."""
        self.spent[claim.team] += self.ahead(claim, count, age_s)
        self.steps += 1

    def ahead(self, claim: Claim, count: int, age_s: float = 0.0) -> float:
        return count * (self.room.usd(claim) or 1.0) * max(0.0, CHARGED_S - age_s) / HOUR_S

    # -- the order

    def turns(self) -> Iterator[Claim]:
        """Yield the waiting claims in the order of their turns; a team's use counts what this run reserved for it."""
        lines: dict[int, dict[str, list[Claim]]] = defaultdict(lambda: defaultdict(list))
        for claim in sorted(self.waiting, key=lambda claim: (claim.since, claim.job), reverse=True):
            lines[self._line(claim)][claim.team].append(claim)
        for line in sorted(lines, reverse=True):
            yield from self._of_line(lines[line])

    def charged(self) -> Iterator[Claim]:
        """Yield the waiting claims in the order of their turns, each charged as if it were served."""
        for claim in self.turns():
            yield claim
            self.charge(claim, claim.min)

    def _of_line(self, teams: dict[str, list[Claim]]) -> Iterator[Claim]:
        def key(team: str) -> tuple[float, float, str, str]:
            first = teams[team][-1]
            return self.spent[team] / self.share[team], first.since, first.job, team

        heap, steps = [key(team) for team in teams], self.steps
        heapify(heap)
        while heap:
            team = heappop(heap)[-1]
            yield teams[team].pop()
            if not teams[team]:
                del teams[team]
            if steps != self.steps:
                heap, steps = [key(team) for team in teams], self.steps
                heapify(heap)
            elif team in teams:
                heappush(heap, key(team))

    def _line(self, claim: Claim) -> int:
        """Return the claim's class; a claim that could not use its reservation comes after all others for a while."""
        return -1 if self.now < claim.lapsed + LAPSE_S and claim.lapsed else self.ranks[claim.job]

    def why(self, claim: Claim) -> str:
        """Return what keeps this claim waiting beside the jobs before it; "" if only they do."""
        if self.leaves(claim):
            return "it saves, and gives its machines back first"
        if taker := self.taker(claim):
            return f"job {taker.name or taker.job} takes over machines first, since the cloud has no others for it"
        return self.room.limit(claim, claim.min) or self.hopeless(claim)

    def leaves(self, claim: Claim) -> bool:
        """Whether machines that the job gave up to others are still there."""
        return bool(claim.whom) and self.granted[claim.job] > claim.reserved

    def hopeless(self, claim: Claim) -> str:
        """Return why the claim would not get its machines even if no other job had any; "" if it would."""
        if over := self.over.get(claim.team):
            return over
        if not self._possible(claim):
            return self.empty.impossible(claim)
        if self._never_returns(claim):
            return f"team {claim.team} has its share, and a job that would lose work cannot borrow from other teams"
        return ""

    def _possible(self, claim: Claim) -> bool:
        shape = claim.team, claim.min, claim.pools, claim.mix, claim.on_demand
        if shape not in self._fits_alone:
            self._fits_alone[shape] = self.empty.fits(claim, claim.min)
        return self._fits_alone[shape]

    def _never_returns(self, claim: Claim) -> bool:
        """Whether this claim would borrow machines that it could not give back when their owner asks for them."""
        if claim.stop is not Stop.NEVER:
            return False
        same = [other for other in self.running.values() if other.team == claim.team and other.stop is Stop.NEVER]
        return sum(other.reserved for other in same) + claim.min > self.stack.nominal(claim.team)

    def taker(self, claim: Claim) -> Claim | None:
        """Return a job of at least this one's class that is taking over machines which this one could get."""
        for one in self._takers:
            if one.job != claim.job and self.ranks[claim.job] <= self.ranks[one.job] and takeover.meet(claim, one):
                return one
        return None

    @cached_property
    def _takers(self) -> list[Claim]:
        return [claim for claim in self.running.values() if takeover.under_way(claim, self.now)]
