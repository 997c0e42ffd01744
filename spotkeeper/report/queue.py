"""The queue of a stack as plain values: jobs that wait, jobs that have machines, teams. Pure.

It is made from the allocation alone; jobs' names come from their records. An expected start is what the scheduler
itself would decide at the expected ends of the jobs that run, so it is unknown where those are.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from functools import cached_property
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from spotkeeper.contract.allocation import Allocation, Claim
from spotkeeper.contract.job import PRIORITIES
from spotkeeper.contract.months import next_month
from spotkeeper.contract.stack import StackState
from spotkeeper.reconcile.decide.queue import order, reclaim, scheduler, use
from spotkeeper.reconcile.decide.queue.room import of_running, unclaimed
from spotkeeper.report.job.waiting import TURNS, WaitingView, protected_word

SHOWN = 20  # jobs that wait, and as many that run, unless all are wanted
FORESEEN = 40  # waiting jobs whose start is computed: the first ones
STEPS, WORK = 48, 20_000  # most moments of that computation, and most grants that it goes through in all
OVERDUE_S = 60.0  # a job that should have ended by now is expected to end so soon
NAMED = 3  # protected jobs that a reason names
EPSILON = 1e-6


class ReservedView(Struct, frozen=True):
    """A job for which machines are reserved. Times are virtual seconds.

    Attributes:
        machines: how many it may have. ``granted``: how many it has, or is about to get or to give up.
        gap: name of the waiting job in front of which it runs; that job may take the machines back. "": none.
        whom: name of the job for which its last machines were taken; "": none.
        borrows_from: teams that have less than their entitlement, while its own team has more.
        recalls: how often machines were taken from it within the last day.
        protected: why nothing is taken from it now: ``just started``; "": nothing protects it. ``protected_s``: for how
            long; None: to its end, or as long as the first waiting job takes none from it (``waiting.TURNS``).
        spared_for: name of the first waiting job, if that one would get machines of this one but for the protection.
        ends_in_s: until it is expected to end; None: unknown, also if that has passed: estimates are brought up to date
            only while other jobs wait.
    """

    job: str
    name: str
    team: str
    priority: str
    raised: int
    machines: int
    granted: int
    gap: str = ""
    whom: str = ""
    borrows_from: tuple[str, ...] = ()
    recalls: int = 0
    protected: str = ""
    protected_s: float | None = None
    spared_for: str = ""
    ends_in_s: float | None = None


class TeamView(Struct, frozen=True):
    """A team's part of the stack.

    Attributes:
        machines: reserved for its jobs. ``entitled``: its part of all machines by shares and priorities, given what
            the other teams want. ``borrows_from``: teams with less than their entitlement, if it has more than its own.
        use_usd: what its machines have cost at list prices; this sum halves every 24 hours.
        month_usd: the same of this calendar month (UTC), not halved.
    """

    name: str
    share: float
    machines: int
    entitled: float
    waiting: int
    use_usd: float
    month_usd: float
    borrows_from: tuple[str, ...] = ()
    max_machines: int | None = None
    max_usd_hour: float | None = None
    max_usd_month: float | None = None


class QueueView(Struct, frozen=True):
    """The queue. ``machines``: how many the stack allows at once.

    ``waiting`` and ``running`` may have only the first of ``all_waiting`` and ``all_running`` jobs.
    """

    machines: int
    all_waiting: int
    all_running: int
    waiting: tuple[WaitingView, ...]
    running: tuple[ReservedView, ...]
    teams: tuple[TeamView, ...]


class Queue:
    """The queue of a stack at ``now``, virtual unix seconds."""

    def __init__(self, allocation: Allocation, stack: StackState, now: float) -> None:
        self.names: dict[str, str] = {}  # of jobs; a job without a name here is shown by its id
        self.allocation, self._stack, self._now = allocation, stack, now
        self._claims = {claim.job: claim for claim in (*unclaimed(allocation), *allocation.claims)}
        self._granted = Counter(grant.job for grant in allocation.grants)

    # -- jobs

    def mentioned(self, jobs: Collection[str]) -> set[str]:
        """Return these jobs, and those that are named where they are shown."""
        named = {self._head}
        if self._head in jobs:
            named |= {claim.job for claim in self._spared}
        for claim in (self._claims[job] for job in jobs if job in self._claims):
            named |= {claim.job, claim.gap, claim.whom, *self._leaving.get(claim.job, ())}
        return named - {""}

    def shown(self, team: str | None = None, most: int | None = SHOWN) -> list[str]:
        """Return the first ``most`` jobs that wait and that run, of one team or of all; None: every job."""
        return [claim.job for part in (self._waiting, self._running) for claim in _of(part, team)[:most]]

    def waiting(self, job: str) -> WaitingView | None:
        """Return the job's place; None if it does not wait."""
        claim = self._claims.get(job)
        if claim is None or (job not in self._places and job not in self._leaving):
            return None
        since = self._now - claim.waits if claim.waits is not None else self._now - claim.reserved_at + claim.waited_s
        starts = self._starts.get(job)
        return WaitingView(
            **self._about(claim),
            position=self._places.get(job, 0),
            machines=claim.min,
            max_machines=claim.max,
            waited_s=max(0.0, since),
            reason=self._reason(claim),
            starts_in_s=None if starts is None else starts - self._now,
        )

    @cached_property
    def _reasons(self) -> dict[str, str]:
        return order.reasons(self.allocation, self._stack, self._now)

    @cached_property
    def _places(self) -> dict[str, int]:
        return {job: at for at, job in enumerate(self._reasons, 1)}

    @cached_property
    def _head(self) -> str:
        """The first job that waits only because machines are short; "": none."""
        return next((job for job, why in self._reasons.items() if not why), "")

    @cached_property
    def _waiting(self) -> list[Claim]:
        return [self._claims[job] for job in (*self._leaving, *self._reasons)]

    @cached_property
    def _running(self) -> list[Claim]:
        found = [claim for claim in self._claims.values() if claim.reserved and claim.job not in self._leaving]
        return sorted(found, key=lambda claim: (claim.reserved_at, claim.job))

    @cached_property
    def _leaving(self) -> dict[str, tuple[str, ...]]:
        """Jobs whose reserved machines have yet to leave other jobs -> those jobs."""
        found: dict[str, tuple[str, ...]] = defaultdict(tuple)
        for claim in self._claims.values():
            to = self._claims.get(claim.whom)
            if to is not None and self._granted[claim.job] > claim.reserved and to.reserved > self._granted[to.job]:
                found[to.job] += (claim.job,)
        return dict(found)

    @cached_property
    def _spared(self) -> list[Claim]:
        """Jobs whose machines the first waiting job would get but for their protection."""
        head = self._claims.get(self._head)
        return [] if head is None else scheduler.spared(self.allocation, self._stack, self._now, head)

    def _name(self, job: str) -> str:
        return self.names.get(job, job)

    def _about(self, claim: Claim) -> dict[str, Any]:
        raised = order.rank(claim, self._now) - claim.priority
        about = {"job": claim.job, "name": self._name(claim.job), "team": claim.team}
        return {**about, "priority": PRIORITIES[claim.priority], "raised": raised}

    def _reason(self, claim: Claim) -> str:
        if leaving := self._leaving.get(claim.job):
            whose = ", ".join(map(self._name, leaving))
            return f"takes the room of {whose}, whose machines leave"
        parts = [self._reasons[claim.job]]
        if not parts[0] and claim.lapsed and self._now < claim.lapsed + reclaim.LAPSE_S:
            parts = ["no machine was to be had for it, so other jobs come first for a while"]
        elif not parts[0]:
            parts = self._lacking(claim) if claim.job == self._head else [f"behind {self._name(self._head)}"]
        if claim.whom:
            parts.append(f"its machines went to {self._name(claim.whom)}")
        return "; ".join(parts)

    def _lacking(self, claim: Claim) -> list[str]:
        free = of_running(self.allocation, self._stack, now=self._now).most(claim, 0, claim.min)
        if free == claim.min:
            return ["its machines are free: the next tick reserves them"]
        needs = f"needs {claim.min} machine{'' if claim.min == 1 else 's'}"
        parts = [f"{needs}, {free or 'none'} {'are' if free > 1 else 'is'} free"]
        for victim in self._spared[:NAMED]:
            why, left_s = self._protection(victim)
            parts.append(f"{self._name(victim.job)} is {protected_word(why, left_s)}")
        more = len(self._spared) - NAMED
        return [*parts, f"so {'is' if more == 1 else 'are'} {more} more"] if more > 0 else parts

    def _protection(self, claim: Claim) -> tuple[str, float | None]:
        """Return why nothing is taken from a job, and for how long, None: to its end; ``""`` if it is not protected."""
        head = self._claims.get(self._head)
        if head is not None and scheduler.turns(claim, head, self._now):
            return TURNS, None
        last = max(reclaim.shields(claim, self._now))
        if last.until <= self._now:
            return "", None
        return last.why, last.until - self._now if math.isfinite(last.until) else None

    # -- expected starts

    @cached_property
    def _starts(self) -> dict[str, float]:
        """When waiting jobs are expected to get machines, if nothing else is submitted; absent: unknown."""
        first = set(list(self._reasons)[:FORESEEN])
        kept = tuple(claim for claim in self.allocation.claims if not claim.waiting or claim.job in first)
        world, at = replace(self.allocation, claims=kept), self._now
        found: dict[str, float] = {}
        for _ in range(min(STEPS, 1 + WORK // (1 + len(world.grants)))):
            world = scheduler.schedule(world, self._stack, at)
            served = [claim.job for claim in world.claims if claim.reserved and claim.job in first]
            found = dict.fromkeys(served, at) | found
            # While the end of a running job is unknown, the day on which a job rises is only the latest start.
            rises = all(claim.ends is not None for claim in world.claims if claim.reserved)
            moments = [moment for claim in world.claims for moment in _moments(claim, at, rises)]
            if rises and any(claim.waiting and self._stack.team(claim.team).max_usd_month for claim in world.claims):
                moments.append(next_month(at))
            due = min(moments, default=None)
            if due is None or first <= set(found):
                break
            at = due
            world = self._without_ended(world, at)
        return found

    def _without_ended(self, world: Allocation, at: float) -> Allocation:
        ended = {claim.job for claim in world.claims if claim.reserved and claim.ends is not None and claim.ends <= at}
        gone = [grant for grant in world.grants if grant.job in ended]
        return replace(
            world,
            claims=tuple(claim for claim in world.claims if claim.job not in ended),
            grants=tuple(grant for grant in world.grants if grant.job not in ended),
            use=use.folded(world, gone, self._stack, at),
        )

    # -- the whole

    def view(self, team: str | None = None, most: int | None = SHOWN) -> QueueView:
        """Return what :meth:`shown` names, and the teams."""
        waiting, running = _of(self._waiting, team), _of(self._running, team)
        return QueueView(
            machines=self._stack.size,
            all_waiting=len(waiting),
            all_running=len(running),
            waiting=tuple(view for claim in waiting[:most] if (view := self.waiting(claim.job)) is not None),
            running=tuple(self._reserved(claim) for claim in running[:most]),
            teams=tuple(one for one in self.teams if team in (None, one.name)),
        )

    def _reserved(self, claim: Claim) -> ReservedView:
        protected, left_s = self._protection(claim)
        return ReservedView(
            **self._about(claim),
            machines=claim.reserved,
            granted=self._granted[claim.job],
            gap=claim.gap and self._name(claim.gap),
            whom=claim.whom and self._name(claim.whom),
            borrows_from=next((one.borrows_from for one in self.teams if one.name == claim.team), ()),
            recalls=sum(self._now - at < reclaim.DAY_S for at in claim.recalls),
            protected=protected,
            protected_s=left_s,
            spared_for=self._name(self._head) if claim in self._spared else "",
            ends_in_s=claim.ends - self._now if claim.ends is not None and claim.ends > self._now else None,
        )

    @cached_property
    def teams(self) -> tuple[TeamView, ...]:
        """Every team of the stack file, and every other one that has jobs or has had machines; by name."""
        stack, claims = self._stack, self._claims.values()
        demand = [(order.rank(claim, self._now), claim.team, claim.max) for claim in claims if claim.max]
        entitled = defaultdict(float, use.entitled(stack.size, demand, stack))
        used = {one.team: one for one in use.current(self.allocation, stack, self._now)}
        have, waiting = Counter[str](), Counter(claim.team for claim in claims if claim.waiting)
        for claim in claims:
            have[claim.team] += claim.reserved
        names = sorted({*(team.name for team in stack.teams), *used, *(claim.team for claim in claims)})
        short = tuple(name for name in names if have[name] < entitled[name] - EPSILON)
        found = []
        for team in map(stack.team, names):
            found.append(
                TeamView(
                    name=team.name,
                    share=team.share,
                    machines=have[team.name],
                    entitled=entitled[team.name],
                    waiting=waiting[team.name],
                    use_usd=used[team.name].usd if team.name in used else 0.0,
                    month_usd=used[team.name].month_usd if team.name in used else 0.0,
                    borrows_from=short if have[team.name] > entitled[team.name] + EPSILON else (),
                    max_machines=team.max_machines,
                    max_usd_hour=team.max_usd_hour,
                    max_usd_month=team.max_usd_month,
                )
            )
        return tuple(found)


def _of(claims: list[Claim], team: str | None) -> list[Claim]:
    return [claim for claim in claims if team in (None, claim.team)]


def _moments(claim: Claim, now: float, rises: bool) -> Iterator[float]:
    """Yield the next moments at which this claim changes by itself: its end, its protection's end, a higher class.

    ``rises``: whether to yield the moment of a higher class.
    """
    if rises and claim.waits is not None and order.rank(claim, now) < order.HIGH:
        yield claim.waits + reclaim.DAY_S * (1 + max(0.0, now - claim.waits) // reclaim.DAY_S)
    if not claim.reserved:
        return
    if claim.ends is not None:
        yield claim.ends if claim.ends > now else now + OVERDUE_S
    until = max(reclaim.shields(claim, now)).until
    if now < until < math.inf:
        yield until
