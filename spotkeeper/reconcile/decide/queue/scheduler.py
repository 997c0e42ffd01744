"""Reserves machines for the claims of all jobs, and takes machines from others for them. Pure.

``schedule`` computes the next claims from the last ones, in the order of ``order.py``.

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
* A reservation that finds no machine for 15 minutes goes to the next job that fits with it. Before, a job may take
  over machines that run, by the rules of reclaim (``takeover.py``).

Machines are reserved for the claim at the moment when others are told to give them up, in one write. So nobody else
can take the room, and none is lost if this process dies. Nobody starves: after at most 48 h a job is of the highest
class, and its team's use halves every day; so it comes first among jobs that may take machines from all lower ones.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from functools import cached_property

from msgspec.structs import replace

from spotkeeper.contract.allocation import Allocation, Claim, Stop
from spotkeeper.contract.stack import StackState
from spotkeeper.reconcile.decide.queue import order, reclaim, takeover, use
from spotkeeper.reconcile.decide.queue.order import Order, Shape
from spotkeeper.reconcile.decide.queue.reclaim import DAY_S, LAPSES, PAUSES, SHRINKS, Recallable
from spotkeeper.reconcile.decide.queue.room import Room, granted_by

EPSILON = 1e-6
BARRED = 12  # jobs that a job remembers for having taken its machines
MOST_RUNS = 100  # a job gains or loses machines at most three times in one schedule


def schedule(allocation: Allocation, stack: StackState, now: float) -> Allocation:
    """Return the allocation with its claims as they should be now; the same object if none changes."""
    for _ in range(MOST_RUNS):  # a job that gave up its reservation may be entitled to another one
        changed = _Schedule(allocation, stack, now).run()
        if not changed:
            break
        allocation = replace(allocation, claims=tuple(changed.get(claim.job, claim) for claim in allocation.claims))
    return allocation


def spared(allocation: Allocation, stack: StackState, now: float, claim: Claim) -> list[Claim]:
    """Return the jobs whose machines a waiting claim would get but for their protection, or its bars."""
    world = _Unprotected(allocation, stack, now)
    taken = reclaim.needed(world.room, claim, world.victims(claim, now, world.excess), world.excess)
    victims = [] if taken is None else [victim.claim for victim in taken.victims.values()]
    return [victim for victim in victims if not reclaim.takeable(victim, now, now) or turns(victim, claim, now)]


def turns(victim: Claim, claim: Claim, now: float) -> bool:
    """Whether this victim keeps its machines since it has taken the claim's: two jobs never take turns."""
    same = order.rank(victim, now) == order.rank(claim, now)
    return same and victim.job in claim.barred and victim.gap != claim.job


class _Schedule(Order):
    """One run over all claims. ``changed``: the claims that it changed, by job."""

    def __init__(self, allocation: Allocation, stack: StackState, now: float) -> None:
        super().__init__(allocation, stack, now)
        self.changed: dict[str, Claim] = {}
        # Claims that do not fit; the room beside each, if it soon will, else None.
        self.heads: list[tuple[Claim, Room | None]] = []
        self.moved: set[str] = set()  # jobs that gained or lost machines in this run
        self._open: dict[float, dict[tuple[int, str], list[Claim]]] = {}
        self.failed: dict[Shape, int] = {}  # the fewest machines that could not be had, by what else matters for that

    # -- one run

    def run(self) -> dict[str, Claim]:
        """Return the claims that change."""
        self._over_budget()
        self._over_limits()
        self._take_over()
        for claim in self.turns():
            if not self.leaves(claim) and not self.taker(claim) and not self.hopeless(claim):
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
            room, head, self.victims(head, self.now + reclaim.EARLY_S, self.excess), self.excess, enough=False
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
                ending=None,
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
        shape = (
            self.ranks[claim.job],
            claim.team,
            claim.pools,
            claim.mix,
            claim.on_demand,
            claim.barred,
            claim.sweep,
            own,
        )
        if self.failed.get(shape, claim.min + 1) <= claim.min:
            return False
        taken = reclaim.needed(self.room, claim, self.victims(claim, self.now, self.excess), self.excess)
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

    def _take_over(self) -> None:
        """Take machines for jobs that the cloud refuses machines; see ``takeover.py``."""
        short = [claim for claim in self.running.values() if takeover.lacks(claim, self.now)]
        for claim in sorted(short, key=lambda claim: (-self.ranks[claim.job], claim.since, claim.job)):
            excess = self._excess_granted()
            victims = [one for one in self.victims(claim, self.now, excess) if self._frees(one, claim)]
            needed = takeover.Freed(takeover.lacks(claim, self.now))
            taken = reclaim.needed(needed, claim, victims, excess)
            if taken is None or claim.job in self.moved:
                continue
            for victim in (*taken.victims.values(), *self._rivals(claim)):
                self.room.free(victim.job, victim.claim.reserved - victim.left)
                self._take(victim, claim)
            self._set(replace(claim, took=self.now))

    def _excess_granted(self) -> dict[str, float]:
        """Return how many machines each team has beyond its part of those that run: the cloud gives no more."""
        claims = self.running.values()
        real: Counter[str] = Counter()
        for claim in claims:
            real[claim.team] += self.granted[claim.job]
        demand = [(self.ranks[claim.job], claim.team, claim.max) for claim in claims]
        entitled = use.entitled(real.total(), demand, self.stack)
        return {team: real[team] - entitled.get(team, 0.0) - EPSILON for team in self.share}

    def _frees(self, victim: Recallable, claim: Claim) -> bool:
        return victim.way != LAPSES and takeover.leaves(victim.claim, self._granted_by[victim.job], claim)

    def _rivals(self, claim: Claim) -> list[Recallable]:
        """Return jobs of lower classes that look for machines where this one does, and have none."""
        return [
            Recallable(LAPSES, self.ranks[one.job], True, True, 0.0, 0, one.job, one, fair=False)
            for one in self.running.values()
            if self.ranks[one.job] < self.ranks[claim.job] and one.dry_since is not None
            if not self.granted[one.job] and one.job not in self.moved and takeover.meet(one, claim)
        ]

    @cached_property
    def _granted_by(self) -> Mapping[str, Counter[str]]:
        return granted_by(self.allocation, self.stack)

    def victims(self, claim: Claim, at: float, excess: Mapping[str, float]) -> list[Recallable]:
        """Return the jobs that may give up machines for this claim at ``at``, in the order in which they do."""
        mine = self.ranks[claim.job]
        ahead = 0.0 if claim.reserved else self.ahead(claim, claim.min)
        after = (self.spent[claim.team] + ahead) / self.share[claim.team]
        found: dict[str, tuple[Claim, bool]] = {}
        for (theirs, team), claims in self._takeable(at).items():
            fair = theirs == mine and team != claim.team and after <= self.spent[team] / self.share[team]
            if theirs < mine or (fair and excess[team] > 0):
                found |= {each.job: (each, fair) for each in claims if not fair or not self.barred(claim, each)}
        for each in self.in_gap.get(claim.job, ()):
            if self.ranks[each.job] <= mine and self.takeable(each, at):
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
    def excess(self) -> dict[str, float]:
        """How many machines each team has beyond its entitlement."""
        return {team: self.have[team] - self._entitled.get(team, 0.0) - EPSILON for team in self.share}

    @cached_property
    def _entitled(self) -> dict[str, float]:
        waiting = [claim for claim in self.waiting if not self.hopeless(claim)]
        demand = [(self.ranks[claim.job], claim.team, claim.max) for claim in (*self.running.values(), *waiting)]
        return use.entitled(self.stack.size, demand, self.stack)

    @cached_property
    def _dry(self) -> list[Claim]:
        return [claim for claim in self.running.values() if reclaim.dry(claim, self.now)]

    def takeable(self, claim: Claim, at: float) -> bool:
        return reclaim.takeable(claim, self.now, at)

    def barred(self, claim: Claim, victim: Claim) -> bool:
        return victim.job in claim.barred

    def _takeable(self, at: float) -> dict[tuple[int, str], list[Claim]]:
        """Return the jobs from which machines may be taken at ``at``, by class and team."""
        if at not in self._open:
            found: dict[tuple[int, str], list[Claim]] = defaultdict(list)
            for claim in self.running.values():
                if self.takeable(claim, at) and not reclaim.dry(claim, self.now):
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

    def _over_limits(self) -> None:
        """Let jobs without a machine wait again where limits are exceeded: lowered, or reserved capacity has ended.

        No machine is granted beyond the limits. While such a job has its reservation, it takes machines from nobody.
        """
        without = [claim for claim in self.running.values() if not self.granted[claim.job]]
        for claim in sorted(without, key=lambda claim: (self.ranks[claim.job], -claim.since, claim.job)):
            if self.now - claim.reserved_at >= reclaim.LAPSE_S and self.room.over(claim.job):
                self.room.free(claim.job, claim.reserved)
                self.have[claim.team] -= claim.reserved
                waits = max(0.0, claim.reserved_at - claim.waited_s)
                self._set(replace(claim, reserved=0, waits=waits, gap="", whom=""))

    def _grow(self) -> None:
        """Give elastic jobs more machines, since no job waits for them."""
        for claim in sorted(self.running.values(), key=lambda claim: (-self.ranks[claim.job], claim.since, claim.job)):
            calm = not claim.recalls or self.now - claim.recalls[-1] >= reclaim.PROTECTED_S
            if not calm or self.leaves(claim) or claim.job in self.moved or self.taker(claim):
                continue
            if more := self.room.most(claim, 0, claim.max - claim.reserved):
                self._set(replace(claim, reserved=claim.reserved + more, reserved_at=self.now, whom=""))
                self.room.place(claim, more)


class _Unprotected(_Schedule):
    """What could be taken if no job were protected."""

    def takeable(self, claim: Claim, at: float) -> bool:
        return True

    def barred(self, claim: Claim, victim: Claim) -> bool:
        return False
