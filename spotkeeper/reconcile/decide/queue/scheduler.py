"""Orders the claims of all jobs, reserves machines for them and takes machines from others. Pure.

``schedule`` computes the next claims from the last ones. Its order: first the higher class, then the team that has used
less of its share, then the older job. A job's class is its priority, one higher for each 24 h that it has waited.

* **Gangs start whole**: a claim gets ``min`` machines or none, and more, up to ``max``, if there is room.
* **The gap**: the first claim that does not fit is the head. Jobs behind it run in the room that it cannot use yet,
  if they lose nothing when it takes the room back. None starts there if the head would fit within the hour without it:
  a job that has just started is protected, so the head would wait longer.
* **Reclaim**: if a claim does not fit, machines are taken from jobs of a lower class, from teams beyond their
  entitlement that have used more than the claim's team will have, and from jobs in its gap. Elastic jobs shrink first;
  then the cheapest loss. Nothing is taken unless it makes the claim fit, and nothing that is not needed.
* **Protection**: nothing is taken within 15 minutes of a job's start (an hour without a commit), more than twice an
  hour or six times a day, from a job that would lose work, or by a job from one of its class that took its machines.
* A job that gave up machines gets none before these are gone: it must have noticed, since they may be needed elsewhere.
* A reservation that finds no machine for 15 minutes goes to the next job that fits with it.

Machines are reserved for the claim at the moment when others are told to give them up, in one write. So nobody else
can take the room, and none is lost if this process dies. Nobody starves: after at most 48 h a job is of the highest
class, and its team's use halves every day; so it comes first among jobs that may take machines from all lower ones.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from functools import cached_property
from heapq import heapify, heappop, heappush

from msgspec.structs import replace

from spotkeeper.contract.allocation import Allocation, Claim, Stop
from spotkeeper.contract.stack import StackState
from spotkeeper.reconcile.decide.queue import reclaim, use
from spotkeeper.reconcile.decide.queue.reclaim import DAY_S, HOUR_S, LAPSE_S, LAPSES, PAUSES, SHRINKS, Recallable
from spotkeeper.reconcile.decide.queue.room import Room, of_running

HIGH = 2
EPSILON = 1e-6
KEPT_CLASS_S = 2 * HOUR_S  # a job keeps the class that it had reached by waiting
CHARGED_S = 2 * HOUR_S  # this much of a job's use is charged to its team as soon as it starts
BARRED = 12  # jobs that a job remembers for having taken its machines
MOST_RUNS = 100  # a job gains or loses machines at most three times in one schedule

Shape = tuple[object, ...]


def schedule(allocation: Allocation, stack: StackState, now: float) -> Allocation:
    """Return the allocation with its claims as they should be now; the same object if none changes."""
    for _ in range(MOST_RUNS):  # a job that gave up its reservation may be entitled to another one
        changed = _Schedule(allocation, stack, now).run()
        if not changed:
            break
        allocation = replace(allocation, claims=tuple(changed.get(claim.job, claim) for claim in allocation.claims))
    return allocation


def rank(claim: Claim, now: float) -> int:
    """Return a claim's class: its priority, one higher for each day that it has waited, at most high."""
    if claim.reserved or claim.waits is None:
        waited = claim.waited_s if now - claim.reserved_at < KEPT_CLASS_S else 0.0
    else:
        waited = max(0.0, now - claim.waits)
    return min(HIGH, claim.priority + int(waited // DAY_S)) if claim.priority < HIGH else claim.priority


def order(allocation: Allocation, stack: StackState, now: float) -> list[Claim]:
    """Return the claims that wait, first the one that is served first if nothing changes meanwhile."""
    return list(_Schedule(allocation, stack, now).charged())


def reasons(allocation: Allocation, stack: StackState, now: float) -> dict[str, str]:
    """Return the waiting jobs in the order of their turns, and what keeps each waiting beside the jobs before it."""
    schedule_ = _Schedule(allocation, stack, now)
    return {claim.job: schedule_.why(claim) for claim in schedule_.charged()}


def why(allocation: Allocation, stack: StackState, claim: Claim, now: float) -> str:
    """Return what keeps a claim waiting beside the jobs before it; "" if only they do."""
    return _Schedule(allocation, stack, now).why(claim)


class _Schedule:
    """One run over all claims. ``changed``: the claims that it changed, by job."""

    def __init__(self, allocation: Allocation, stack: StackState, now: float) -> None:
        self.stack, self.now = stack, now
        self.changed: dict[str, Claim] = {}
        self.running = {claim.job: claim for claim in allocation.claims if claim.reserved}
        self.waiting = [claim for claim in allocation.claims if claim.waiting]
        self.granted = Counter(grant.job for grant in allocation.grants)
        self.ranks = {claim.job: rank(claim, now) for claim in allocation.claims}
        self.share = {team: stack.team(team).share for team in {claim.team for claim in allocation.claims}}
        teams = {one.team: one for one in use.current(allocation, stack, now)}
        month = {team: one.month_usd for team, one in teams.items()}
        self.over = {
            team.name: f"team {team.name} has spent its max_usd_per_month of ${team.max_usd_month:g}"
            for team in stack.teams
            if team.max_usd_month is not None and month.get(team.name, 0.0) >= team.max_usd_month
        }
        self.empty = Room(stack, self.over)
        self.room = of_running(allocation, stack, self.over)
        self.spent: dict[str, float] = defaultdict(float, {team: one.usd for team, one in teams.items()})
        self.have: Counter[str] = Counter()
        self.in_gap: dict[str, list[Claim]] = defaultdict(list)
        self.steps = 0  # of charges, so that turns follow them
        for claim in self.running.values():
            self.have[claim.team] += claim.reserved
            self.in_gap[claim.gap].append(claim)
            self.charge(claim, claim.reserved, max(0.0, now - claim.reserved_at))
        # Claims that do not fit; the room beside each, if it soon will, else None.
        self.heads: list[tuple[Claim, Room | None]] = []
        self.moved: set[str] = set()  # jobs that gained or lost machines in this run
        self._open: dict[float, dict[tuple[int, str], list[Claim]]] = {}
        self._fits_alone: dict[Shape, bool] = {}
        self.failed: dict[Shape, int] = {}  # the fewest machines that could not be had, by what else matters for that

    def charge(self, claim: Claim, count: int, age_s: float = 0.0) -> None:
        """Charge the team for machines that were just reserved: less and less while their cost is real."""
        self.spent[claim.team] += self._ahead(claim, count, age_s)
        self.steps += 1

    def _ahead(self, claim: Claim, count: int, age_s: float = 0.0) -> float:
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
        if self._leaves(claim):
            return "it saves, and gives its machines back first"
        return self.room.limit(claim, claim.min) or self._hopeless(claim)

    def _leaves(self, claim: Claim) -> bool:
        """Whether machines that the job gave up to others are still there."""
        return bool(claim.whom) and self.granted[claim.job] > claim.reserved

    def _hopeless(self, claim: Claim) -> str:
        """Return why the claim would not get its machines even if no other job had any; "" if it would."""
        if over := self.over.get(claim.team):
            return over
        if not self._possible(claim):
            return f"the job wants {claim.min} machines, more than the limits of its pools, its team or the stack allow"
        if self._never_returns(claim):
            return f"team {claim.team} has its share, and a job that would lose work cannot borrow from other teams"
        return ""

    def _possible(self, claim: Claim) -> bool:
        shape = claim.team, claim.min, claim.pools, claim.on_demand
        if shape not in self._fits_alone:
            self._fits_alone[shape] = self.empty.fits(claim, claim.min)
        return self._fits_alone[shape]

    def _never_returns(self, claim: Claim) -> bool:
        """Whether this claim would borrow machines that it could not give back when their owner asks for them."""
        if claim.stop is not Stop.NEVER:
            return False
        same = [other for other in self.running.values() if other.team == claim.team and other.stop is Stop.NEVER]
        return sum(other.reserved for other in same) + claim.min > self.stack.nominal(claim.team)

    # -- one run

    def run(self) -> dict[str, Claim]:
        """Return the claims that change."""
        self._over_budget()
        for claim in self.turns():
            if not self._leaves(claim) and not self._hopeless(claim):
                self._serve(claim)
        if not self.heads:
            self._grow()
        return self.changed

    def _serve(self, claim: Claim) -> None:
        head, beside = next(((head, room) for head, room in self.heads if self._meet(claim, head)), (None, None))
        if head is not None and not (beside.fits(claim, claim.min) if beside else self._may_fill_gap(claim)):
            return
        gap = head.job if head is not None and beside is None else ""
        if self.room.fits(claim, claim.min):
            count = self.room.most(claim, claim.min, claim.max)
            self._reserve(claim, beside.most(claim, claim.min, count) if beside else count, gap)
        elif not self._reclaim(claim, gap):
            if head is None and not self.room.limit(claim, claim.min):
                self.heads.append((claim, self._soon(claim)))
            return
        if beside is not None:
            beside.place(claim, self.running[claim.job].reserved)

    def _meet(self, one: Claim, other: Claim) -> bool:
        """Whether two claims may want the same room."""
        if not one.pools or not other.pools or self.stack.max_machines or self.stack.max_usd_hour:
            return True
        return not set(one.pools).isdisjoint(other.pools)

    def _may_fill_gap(self, claim: Claim) -> bool:
        return claim.stop is not Stop.NEVER and reclaim.recalls_left(claim, self.now)

    def _soon(self, head: Claim) -> Room | None:
        """Return the room beside the head, if it fits within an hour at the latest: others must not delay it.

        None: it waits for the end of a job, which may take long.
        """
        room = self.room.copy()
        for claim in self.running.values():
            if reclaim.ending(claim, self.now):
                room.free(claim.job, claim.reserved)
        taken = reclaim.collected(
            room, head, self._victims(head, self.now + reclaim.EARLY_S), self._excess, enough=False
        )
        if not taken.fits:
            return None
        taken.room.place(head, head.min)
        return taken.room

    def _reserve(self, claim: Claim, count: int, gap: str) -> None:
        waited = self.now - claim.waits if claim.waits is not None else 0.0
        for filler in self.in_gap.pop(claim.job, ()):  # the head has its machines: there is no gap any more
            if filler.job in self.running:
                self._set(replace(self.running[filler.job], gap=""))
        self._set(
            replace(
                claim,
                reserved=count,
                reserved_at=self.now,
                waits=None,
                waited_s=max(0.0, waited),
                started=None,
                dry_since=None,
                gap=gap,
                whom="",
            )
        )
        self.moved.add(claim.job)
        self.have[claim.team] += count
        self.room.place(claim, count)
        self.charge(claim, count)

    def _set(self, claim: Claim) -> None:
        self.changed[claim.job] = claim
        if claim.reserved:
            self.running[claim.job] = claim
        else:
            self.running.pop(claim.job, None)

    # -- reclaim

    def _reclaim(self, claim: Claim, gap: str) -> bool:
        """Take machines from others for this claim, all that it lacks or none. Returns whether it has them now."""
        own = claim.job if claim.job in self.in_gap else ""
        shape = self.ranks[claim.job], claim.team, claim.pools, claim.on_demand, claim.barred, own
        if self.failed.get(shape, claim.min + 1) <= claim.min:
            return False
        taken = reclaim.needed(self.room, claim, self._victims(claim, self.now), self._excess)
        if taken is None:
            self.failed[shape] = claim.min
            return False
        self.failed.clear()
        self.room = taken.room
        for victim in taken.victims.values():
            self._take(victim, claim)
        self._reserve(claim, claim.min, gap)
        return True

    def _take(self, victim: Recallable, claim: Claim) -> None:
        old, left = self.running[victim.job], victim.left
        self.moved.add(old.job)
        self.have[old.team] -= old.reserved - left
        self.charge(old, left - old.reserved, max(0.0, self.now - old.reserved_at))
        if victim.way == LAPSES:
            waits = old.reserved_at - old.waited_s
            self._set(replace(old, reserved=0, waits=waits, lapsed=self.now, gap="", whom=claim.job))
            return
        same = self.ranks[old.job] == self.ranks[claim.job]
        self._set(
            replace(
                old,
                reserved=left,
                waits=None if left else self.now,
                recalls=(*(at for at in old.recalls if self.now - at < DAY_S), self.now),
                barred=(*old.barred, claim.job)[-BARRED:] if same else old.barred,
                gap=old.gap if left else "",
                whom=claim.job,
            )
        )

    def _victims(self, claim: Claim, at: float) -> list[Recallable]:
        """Return the jobs that may give up machines for this claim at ``at``, in the order in which they do."""
        mine, excess = self.ranks[claim.job], self._excess
        after = (self.spent[claim.team] + self._ahead(claim, claim.min)) / self.share[claim.team]
        found: dict[str, tuple[Claim, bool]] = {}
        for (theirs, team), claims in self._takeable(at).items():
            fair = theirs == mine and team != claim.team and after <= self.spent[team] / self.share[team]
            if theirs < mine or (fair and excess[team] > 0):
                found |= {each.job: (each, fair) for each in claims if not fair or each.job not in claim.barred}
        for each in self.in_gap.get(claim.job, ()):
            if self.ranks[each.job] <= mine and reclaim.takeable(each, self.now, at):
                found[each.job] = each, False
        found |= {each.job: (each, False) for each in self._dry}
        return sorted(
            way
            for job, (each, fair) in found.items()
            if job not in self.moved
            for way in self._ways(each, claim.job, fair, excess)
        )

    def _ways(self, victim: Claim, job: str, fair: bool, excess: Mapping[str, float]) -> Iterator[Recallable]:
        beside, within = victim.gap != job, excess[victim.team] <= 0
        what = victim.job, victim, fair
        if reclaim.dry(victim, self.now):
            yield Recallable(LAPSES, self.ranks[victim.job], beside, within, 0.0, 0, *what)
            return
        key = self.ranks[victim.job], beside, within, reclaim.loss(victim, self.now)
        if victim.min < victim.reserved:
            yield Recallable(SHRINKS, *key, victim.min, *what)
        yield Recallable(PAUSES, *key, 0, *what)

    @property
    def _excess(self) -> dict[str, float]:
        """How many machines each team has beyond its entitlement."""
        return {team: self.have[team] - self._entitled.get(team, 0.0) - EPSILON for team in self.share}

    @cached_property
    def _entitled(self) -> dict[str, float]:
        waiting = [claim for claim in self.waiting if not self._hopeless(claim)]
        demand = [(self.ranks[claim.job], claim.team, claim.max) for claim in (*self.running.values(), *waiting)]
        return use.entitled(self.stack.size, demand, self.stack)

    @cached_property
    def _dry(self) -> list[Claim]:
        return [claim for claim in self.running.values() if reclaim.dry(claim, self.now)]

    def _takeable(self, at: float) -> dict[tuple[int, str], list[Claim]]:
        """Return the jobs from which machines may be taken at ``at``, by class and team."""
        if at not in self._open:
            found: dict[tuple[int, str], list[Claim]] = defaultdict(list)
            for claim in self.running.values():
                if reclaim.takeable(claim, self.now, at) and not reclaim.dry(claim, self.now):
                    found[self.ranks[claim.job], claim.team].append(claim)
            self._open[at] = found
        return self._open[at]

    # -- what else changes a reservation

    def _over_budget(self) -> None:
        """Take the machines of teams that have spent their money of this month."""
        for claim in list(self.running.values()):
            if claim.team in self.over:
                self.room.free(claim.job, claim.reserved)
                self.have[claim.team] -= claim.reserved
                self._set(replace(claim, reserved=0, waits=self.now, gap="", whom=""))

    def _grow(self) -> None:
        """Give elastic jobs more machines, since no job waits for them."""
        for claim in sorted(self.running.values(), key=lambda claim: (-self.ranks[claim.job], claim.since, claim.job)):
            calm = not claim.recalls or self.now - claim.recalls[-1] >= reclaim.PROTECTED_S
            if not calm or self._leaves(claim) or claim.job in self.moved:
                continue
            if more := self.room.most(claim, 0, claim.max - claim.reserved):
                self._set(replace(claim, reserved=claim.reserved + more, reserved_at=self.now, whom=""))
                self.room.place(claim, more)
