"""Orders the claims of all jobs, reserves machines for them and takes machines from others. Pure.

``schedule`` computes the next claims from the last ones. Its order: first the higher class, then the team that has used
less of its share, then the older job. A job's class is its priority, one higher for each 24 h that it has waited.

* **Gangs start whole**: a claim gets ``min`` machines or none, and more, up to ``max``, if there is room.
* **The gap**: the first claim that does not fit is the head. Jobs behind it run in the room that it cannot use yet,
  if they lose nothing when it takes the room back.
* **Reclaim**: if a claim does not fit, machines are taken from jobs of a lower class, from teams beyond their
  entitlement that have used more than the claim's team will have, and from jobs in its gap. Elastic jobs shrink first;
  then the cheapest loss. Nothing is taken unless it makes the claim fit, and nothing that is not needed.
* **Protection**: nothing is taken within 15 minutes of a job's start, more than twice an hour or six times a day, from
  a job that would lose work, or by a job from one that took machines from it before.
* A reservation that finds no machine for 15 minutes lapses if another job waits.

Machines are reserved for the claim at the moment when others are told to give them up, in one write. So nobody else
can take the room, and none is lost if this process dies.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from msgspec.structs import replace

from spotkeeper.contract.allocation import Allocation, Claim, Stop
from spotkeeper.contract.stack import StackState
from spotkeeper.reconcile.decide.queue import use
from spotkeeper.reconcile.decide.queue.room import Room, of_running

HOUR_S, DAY_S = 3600.0, 86_400.0
HIGH = 2
PROTECTED_S = 900.0  # after a job's start nothing is taken from it
EARLY_S = 3600.0  # nor from a job that has not started to train, or has no commit, for so long
KEPT_CLASS_S = 2 * HOUR_S  # a job keeps the class that it had reached by waiting
CHARGED_S = 2 * HOUR_S  # this much of a job's use is charged to its team as soon as it starts
HOURLY, DAILY = 2, 6  # most recalls of a job within an hour and a day
ENDING_S = 600.0  # a job that ends so soon is left alone
LAPSE_S = 900.0  # a reservation that finds no machine for so long is given to others


def schedule(allocation: Allocation, stack: StackState, now: float) -> Allocation:
    """Return the allocation with its claims as they should be now; the same object if none changes."""
    schedule_ = _Schedule(allocation, stack, now)
    schedule_.run()
    changed = schedule_.changed
    if not changed:
        return allocation
    return replace(allocation, claims=tuple(changed.get(claim.job, claim) for claim in allocation.claims))


def rank(claim: Claim, now: float) -> int:
    """Return a claim's class: its priority, one higher for each day that it has waited, at most high."""
    if claim.waiting:
        waited = max(0.0, now - (claim.waits or now))
    else:
        waited = claim.waited_s if now - claim.reserved_at < KEPT_CLASS_S else 0.0
    return min(HIGH, claim.priority + int(waited // DAY_S)) if claim.priority < HIGH else claim.priority


def order(allocation: Allocation, stack: StackState, now: float) -> list[Claim]:
    """Return the claims that wait, first the one that is served first if nothing changes meanwhile."""
    return list(_Schedule(allocation, stack, now).turns())


def reasons(allocation: Allocation, stack: StackState, now: float) -> dict[str, str]:
    """Return the waiting jobs in the order of their turns, and what keeps each waiting beside the jobs before it."""
    schedule_ = _Schedule(allocation, stack, now)
    return {claim.job: schedule_.why(claim) for claim in schedule_.turns()}


def why(allocation: Allocation, stack: StackState, claim: Claim, now: float) -> str:
    """Return what keeps a claim waiting beside the jobs before it; "" if only they do."""
    return _Schedule(allocation, stack, now).why(claim)


@dataclass
class _Schedule:
    allocation: Allocation
    stack: StackState
    now: float
    changed: dict[str, Claim] = field(default_factory=dict)

    def __post_init__(self) -> None:
        claims = self.allocation.claims
        self.running = {claim.job: claim for claim in claims if claim.reserved}
        self.waiting = [claim for claim in claims if claim.waiting]
        self.spent: dict[str, float] = defaultdict(float, use.decayed(self.allocation, self.stack, self.now))
        self.share = {claim.team: self.stack.team(claim.team).share for claim in claims}
        self.taken = {claim.gap for claim in self.running.values()} - {""}
        self.failed: set[tuple[object, ...]] = set()  # claims that did not fit, by what matters for that
        month = use.of_month(self.allocation, self.stack, self.now)
        self.over = {
            team.name: f"team {team.name} has spent its max_usd_per_month of ${team.max_usd_month:g}"
            for team in self.stack.teams
            if team.max_usd_month is not None and month.get(team.name, 0.0) >= team.max_usd_month
        }
        self.empty = Room(self.stack, self.over)
        self.room = of_running(self.allocation, self.stack, self.over)
        for claim in self.running.values():
            self.spent[claim.team] += self._ahead(claim, claim.reserved, max(0.0, self.now - claim.reserved_at))

    # -- the order

    def turns(self) -> Iterator[Claim]:
        """Yield the waiting claims in the order of their turns; a team's use counts what this run reserved for it."""
        lines: dict[int, dict[str, list[Claim]]] = defaultdict(lambda: defaultdict(list))
        for claim in sorted(self.waiting, key=lambda claim: (claim.since, claim.job), reverse=True):
            lines[self._line(claim)][claim.team].append(claim)
        for line in sorted(lines, reverse=True):
            teams = lines[line]
            while teams:
                team = min(teams, key=lambda team: (self.spent[team] / self.share[team], teams[team][-1].since, team))
                yield teams[team].pop()
                if not teams[team]:
                    del teams[team]

    def _line(self, claim: Claim) -> int:
        """Return the claim's class; a claim that could not use its reservation comes after all others for a while."""
        return -1 if self.now < claim.lapsed + LAPSE_S and claim.lapsed else rank(claim, self.now)

    def why(self, claim: Claim) -> str:
        """Return what keeps this claim waiting beside the jobs before it; "" if only they do."""
        if limit := self.room.limit(claim, claim.min):
            return limit
        if not self.empty.fits(claim, claim.min):
            return f"the job wants {claim.min} machines, more than the limits of its pools, its team or the stack allow"
        if self._never_returns(claim):
            return f"team {claim.team} has its share, and a job that would lose work cannot borrow from other teams"
        return ""

    # -- one run

    def run(self) -> None:
        self._over_budget()
        if not self.waiting:
            self._grow()
            return
        self._lapse()
        head: Claim | None = None
        for claim in self.turns():
            if self._shape(claim) in self.failed or self._barred(claim):
                continue
            if head is not None and not self._may_fill_gap(claim):
                continue
            if self.room.fits(claim, claim.min):
                self._reserve(claim, self.room.most(claim, claim.min, claim.max), head)
                continue
            if not self._reclaim(claim):
                self.failed.add(self._shape(claim))
                head = head or claim
        if head is None:
            self._grow()

    def _shape(self, claim: Claim) -> tuple[object, ...]:
        line = rank(claim, self.now)
        gap = claim.job if claim.job in self.taken else ""
        return line, claim.team, claim.min, claim.pools, claim.on_demand, claim.barred, gap

    def _barred(self, claim: Claim) -> bool:
        """Whether no other job has to move for this claim: it is beyond a limit, or larger than the whole stack."""
        return bool(self.why(claim))

    def _never_returns(self, claim: Claim) -> bool:
        """Whether this claim would borrow machines that it could not give back when their owner asks for them."""
        if claim.stop is not Stop.NEVER or len(self.share) < 2:
            return False
        kept = sum(other.reserved for other in self._of(claim.team) if other.stop is Stop.NEVER)
        return kept + claim.min > self.stack.nominal(claim.team)

    def _of(self, team: str) -> list[Claim]:
        return [claim for claim in self.running.values() if claim.team == team]

    def _may_fill_gap(self, claim: Claim) -> bool:
        return claim.stop is not Stop.NEVER and self._recalls_left(claim)

    def _recalls_left(self, claim: Claim) -> bool:
        recent = [at for at in claim.recalls if self.now - at < HOUR_S]
        today = [at for at in claim.recalls if self.now - at < DAY_S]
        return len(recent) < HOURLY and len(today) < DAILY

    def _reserve(self, claim: Claim, count: int, head: Claim | None = None) -> None:
        waited = self.now - claim.waits if claim.waits is not None else 0.0
        self._set(
            replace(
                claim,
                reserved=count,
                reserved_at=self.now,
                waits=None,
                waited_s=max(0.0, waited),
                started=None,
                dry_since=None,
                gap=head.job if head is not None else "",
                whom="",
            )
        )
        self.room.place(claim, count)
        self.spent[claim.team] += self._ahead(claim, count, 0.0)

    def _set(self, claim: Claim) -> None:
        self.changed[claim.job] = claim
        self.failed.clear()
        if claim.reserved:
            self.running[claim.job] = claim
        else:
            self.running.pop(claim.job, None)

    def _ahead(self, claim: Claim, count: int, age_s: float) -> float:
        """Return what is charged for machines that were just reserved, USD: less and less while their cost is real."""
        return count * (self.room.usd(claim) or 1.0) * max(0.0, CHARGED_S - age_s) / HOUR_S

    # -- reclaim

    def _reclaim(self, claim: Claim) -> bool:
        """Take machines from others for this claim, all that it lacks or none. Returns whether it has them now."""
        victims = sorted(self._victims(claim), key=lambda found: found[:-2])
        room = self.room.copy()
        picked: list[tuple[Claim, int]] = []
        for *_, victim, left in victims:
            if any(other.job == victim.job for other, _ in picked):  # it shrinks first; now it is paused
                picked = [each for each in picked if each[0].job != victim.job]
                room.release(victim.job)
            else:
                room.release(victim.job, victim.reserved - left)
            picked.append((victim, left))
            if room.fits(claim, claim.min):
                break
        else:
            return False
        for each in sorted(picked, key=lambda each: -_loss(each[0], self.now)):  # the dearest first
            without = self._room_after([other for other in picked if other is not each])
            if without.fits(claim, claim.min):
                picked.remove(each)
        for victim, left in picked:
            self._recall(victim, left, claim)
        self._reserve(claim, claim.min)
        return True

    def _room_after(self, picked: list[tuple[Claim, int]]) -> Room:
        room = self.room.copy()
        for victim, left in picked:
            room.release(victim.job, victim.reserved - left)
        return room

    def _recall(self, victim: Claim, left: int, claim: Claim) -> None:
        self.room.release(victim.job, victim.reserved - left)
        same = rank(victim, self.now) == rank(claim, self.now)
        barred = (*victim.barred, claim.job)[-HIGH * DAILY :] if same and victim.gap != claim.job else victim.barred
        recent = tuple(at for at in victim.recalls if self.now - at < DAY_S)
        self._set(
            replace(
                victim,
                reserved=left,
                waits=None if left else self.now,
                recalls=(*recent, self.now),
                barred=barred,
                gap=victim.gap if left else "",
                whom=claim.job,
            )
        )

    def _victims(self, claim: Claim) -> Iterator[tuple[bool, bool, int, bool, float, str, Claim, int]]:
        """Yield the jobs that may give up machines for this claim, with a sort key, and how many they would keep."""
        mine = rank(claim, self.now)
        after = (self.spent[claim.team] + self._ahead(claim, claim.min, 0.0)) / self.share[claim.team]
        entitled = self._entitled
        have: Counter[str] = Counter()
        for other in self.running.values():
            have[other.team] += other.reserved
        for victim in self.running.values():
            theirs, gap = rank(victim, self.now), victim.gap == claim.job
            over = have[victim.team] > entitled[victim.team] + 1e-6
            fair = theirs == mine and victim.team != claim.team and over and victim.job not in claim.barred
            fair = fair and after <= self.spent[victim.team] / self.share[victim.team]
            if not (gap or theirs < mine or fair) or not self._takeable(victim):
                continue
            key = (theirs, not over, _loss(victim, self.now), victim.job)
            if victim.min < victim.reserved:
                yield False, not gap, *key, victim, victim.min
            yield True, not gap, *key, victim, 0

    @property
    def _entitled(self) -> dict[str, float]:
        if not hasattr(self, "_entitlement"):
            claims = [*self.running.values(), *self.waiting]
            demand = [(rank(claim, self.now), claim.team, claim.max) for claim in claims]
            self._entitlement = use.entitled(self.room.size, demand, self.stack)
        return self._entitlement

    def _takeable(self, victim: Claim) -> bool:
        if victim.job in self.changed or victim.stop is Stop.NEVER or not self._recalls_left(victim):
            return False
        if victim.ends is not None and victim.ends - self.now < ENDING_S:
            return False
        if victim.started is None or victim.stop is Stop.EARLY:
            return self.now - victim.reserved_at >= EARLY_S
        return self.now - max(victim.started, victim.reserved_at) >= PROTECTED_S

    # -- what else changes a reservation

    def _lapse(self) -> None:
        """Give up reservations for which the market has had no machine for a while."""
        for claim in list(self.running.values()):
            since = claim.dry_since
            if since is not None and claim.started is None and self.now - max(since, claim.reserved_at) >= LAPSE_S:
                self.room.release(claim.job)
                waits = claim.reserved_at - claim.waited_s
                self._set(replace(claim, reserved=0, waits=waits, lapsed=self.now, gap=""))

    def _over_budget(self) -> None:
        """Take the machines of teams that have spent their money of this month."""
        for claim in list(self.running.values()):
            if claim.team in self.over:
                self.room.release(claim.job)
                self._set(replace(claim, reserved=0, waits=self.now, gap="", whom=""))

    def _grow(self) -> None:
        """Give elastic jobs more machines, since no job waits for them."""
        for claim in sorted(self.running.values(), key=lambda claim: (-rank(claim, self.now), claim.since, claim.job)):
            more = self.room.most(claim, 0, claim.max - claim.reserved)
            calm = not claim.recalls or self.now - claim.recalls[-1] >= PROTECTED_S
            if more and calm and claim.job not in self.changed:
                self._set(replace(claim, reserved=claim.reserved + more, reserved_at=self.now, whom=""))
                self.room.place(claim, more)


def _loss(victim: Claim, now: float) -> float:
    """Return what taking this job's machines costs, machine-seconds; each recall of the last day counts once more."""
    return victim.cost_s * (1 + sum(now - at < DAY_S for at in victim.recalls))
