"""The queue in every order of its steps: the real ``schedule`` and allocation, around jobs that only count.

Two reconcilers read the allocation, compute what a tick or a round of a job would write, may stall for as long as they
like, and write by compare-and-swap. A job is absent, waiting, running, saving or gone, as its claim and its grants say.
A step of time is the protection of a new job. Checked in every state: grants within caps and reservations, gangs whole,
no reservation lost or doubled, and no machine taken from a protected job. From every state on, once all goes well, each
job that ends at all must end within ``SOON`` steps: nobody starves, also not beside jobs that never end.

``python -m tests.model.queue NUMBER`` searches one world to its end.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from msgspec.structs import replace

from spotkeeper.contract.allocation import Allocation, Claim, Grant, Stop, Tally, resource
from spotkeeper.contract.cloud import Offer
from spotkeeper.contract.stack import Model, PoolState, Price, ReservedCapacity, StackState, TeamState
from spotkeeper.reconcile.decide.queue import reclaim, use
from spotkeeper.reconcile.decide.queue.room import reserved_elsewhere
from spotkeeper.reconcile.decide.queue.scheduler import schedule

STEP_S, BEGIN_S = 900.0, 1_800_000_000.0
ENDLESS = 10_000
SOON = 24  # steps: an hour of protection for each of three jobs one after the other, and their work
TICK = -1


class Job(NamedTuple):
    """``work``: steps of training. ``since``: when it was submitted, in steps."""

    team: str
    priority: int
    least: int
    most: int
    work: int
    since: int = 0


class Reserved(NamedTuple):
    """Reserved capacity that can be used from step ``starts`` to before step ``ends``."""

    count: int
    starts: int = 0
    ends: int = 10_000


class Story(NamedTuple):
    name: str
    cap: int
    jobs: tuple[Job, ...]
    steps: int = 3  # of time in which reconcilers may stall
    reconcilers: int = 2
    most: int | None = None  # machines of team a
    reserved: Reserved | None = None
    usd: float | None = None  # what all other machines may cost an hour; each costs 1
    cas: bool = True


class State(NamedTuple):
    at: int
    allocation: Allocation
    done: tuple[int, ...]  # steps that each job has trained
    pending: tuple[tuple[Allocation, Allocation], ...] = ()  # what was read, and what will be written


STORIES = (
    Story("a higher class takes machines, two reconcilers", 2, (Job("a", 0, 2, 2, ENDLESS), Job("b", 2, 2, 2, 1, 1))),
    Story(
        "three priorities",
        2,
        (Job("a", 0, 2, 2, ENDLESS), Job("a", 1, 1, 1, 2, 1), Job("b", 2, 2, 2, 1, 2)),
        reconcilers=1,
    ),
    Story(
        "a team beyond its entitlement gives machines back",
        4,
        (Job("b", 1, 2, 2, ENDLESS), Job("b", 1, 2, 2, ENDLESS), Job("a", 1, 2, 2, 2, 1)),
        reconcilers=1,
    ),
    Story(
        "elastic jobs shrink and grow",
        4,
        (Job("a", 0, 1, 4, ENDLESS), Job("b", 1, 2, 2, 1, 1), Job("b", 2, 1, 1, 1, 2)),
        reconcilers=1,
    ),
    Story(
        "a small job runs in the gap of a gang",
        3,
        (Job("b", 2, 2, 2, 6), Job("a", 1, 3, 3, 1, 1), Job("b", 1, 1, 1, 3, 1)),
        reconcilers=1,
        steps=4,
    ),
    Story(
        "a team at its own limit",
        3,
        (Job("a", 0, 2, 2, ENDLESS), Job("a", 2, 2, 2, 1, 1), Job("b", 1, 1, 1, 1)),
        reconcilers=1,
        most=2,
    ),
    Story(
        "reserved capacity that begins later, and money for one machine more",
        4,
        (Job("a", 1, 3, 3, 1), Job("b", 1, 1, 2, 2, 1)),
        reserved=Reserved(2, starts=2),
        usd=1.0,
    ),
    Story(
        "reserved capacity that ends while a job runs in it",
        4,
        (Job("a", 0, 1, 3, ENDLESS), Job("b", 2, 2, 2, 1, 1)),
        reserved=Reserved(2, ends=2),
        usd=2.0,
        reconcilers=1,
    ),
)


class World:
    def __init__(self, story: Story) -> None:
        self.story = story
        price = {"z": Price(on_demand=1.0, spot=1.0)}
        kept = () if story.reserved is None else (self._reservation(story.reserved),)
        pool = PoolState("p", "spot", "m", ("z",), 1, story.cap, 0, 10, "d", price, reservations=kept)
        teams = (TeamState("a", max_machines=story.most), TeamState("b"))
        self.stack = StackState("s", "gcp", "p", "r", "b", (pool,), teams=teams, max_usd_hour=story.usd)
        self.schedule = cache(lambda allocation, at: schedule(allocation, self.stack, BEGIN_S + at * STEP_S))
        self.ends: dict[State, int] = {}

    def _reservation(self, reserved: Reserved) -> ReservedCapacity:
        starts, ends = (BEGIN_S + step * STEP_S for step in (reserved.starts, reserved.ends))
        return ReservedCapacity("res", "z", reserved.count, starts, ends)

    # -- steps

    def moves(self, state: State) -> Iterator[tuple[str, State]]:
        """Yield everything that can happen next."""
        for read, new in state.pending:
            rest = tuple(one for one in state.pending if one != (read, new))
            free = not self.story.cas or state.allocation == read
            yield "a write", state._replace(allocation=new if free else state.allocation, pending=rest)
        if len(state.pending) < self.story.reconcilers:
            for who in (TICK, *range(len(self.story.jobs))):
                new = self.decided(who, state)
                if new != state.allocation and (state.allocation, new) not in state.pending:
                    yield f"{who} reads", state._replace(pending=(*state.pending, (state.allocation, new)))
        if state.at < self.story.steps:
            yield "time passes", self.later(state)

    def later(self, state: State) -> State:
        done = tuple(
            count + (self.trains(state.allocation, number) and count < job.work)
            for number, (job, count) in enumerate(zip(self.story.jobs, state.done, strict=True))
        )
        return state._replace(at=state.at + 1, done=done)

    def trains(self, allocation: Allocation, number: int) -> bool:
        claim = allocation.claim(f"j{number}")
        return claim is not None and 0 < claim.reserved == self.granted(allocation, claim.job)

    def granted(self, allocation: Allocation, job: str) -> int:
        return sum(grant.job == job for grant in allocation.grants)

    def decided(self, who: int, state: State) -> Allocation:
        """Return what a tick, or a round of this job, writes."""
        new = state.allocation if who == TICK else self._round(who, state)
        return self.schedule(new, state.at)

    def _round(self, number: int, state: State) -> Allocation:
        allocation, job, now = state.allocation, self.story.jobs[number], BEGIN_S + state.at * STEP_S
        claim = allocation.claim(f"j{number}")
        ended = state.done[number] >= job.work
        if claim is None and not ended and state.at >= job.since:
            new = Claim(f"j{number}", job.least, job.most, now, job.team, job.priority, waits=now)
            return replace(allocation, claims=(*allocation.claims, new))
        if claim is None:
            return allocation
        have = self.granted(allocation, claim.job)
        keeps = 0 if ended else claim.reserved
        if have > keeps or ended:
            own = [grant for grant in allocation.grants if grant.job == claim.job]
            left = tuple(grant for grant in allocation.grants if grant.job != claim.job) + tuple(own[:keeps])
            claims = tuple(one for one in allocation.claims if one != claim or not ended)
            used = use.folded(allocation, own[keeps:], self.stack, now)
            return replace(allocation, grants=left, claims=claims, use=used)
        if have < keeps:
            return self._grant(allocation, claim, have, now)
        known = replace(
            claim,
            started=claim.started if claim.started is not None or not keeps else now,
            stop=Stop.SAVED if state.done[number] else claim.stop,
        )
        return replace(allocation, claims=tuple(known if one == claim else one for one in allocation.claims))

    def _grant(self, allocation: Allocation, claim: Claim, have: int, now: float) -> Allocation:
        tally = Tally(allocation.grants, reserved_elsewhere(allocation, self.stack, claim.job, now))
        new: tuple[Grant, ...] = ()
        prepaid = [one for one in self.stack.pools[0].reservations if one.usable(now)]
        offers = [Offer("p", "z", Model.RESERVED, 0.0, reservation=one.name) for one in prepaid]
        for node in range(have, claim.reserved):
            every = (*offers, Offer("p", "z", Model.SPOT, 1.0))
            offer = next((offer for offer in every if tally.fits(self.stack, offer)), None)
            if offer is not None:
                new += (Grant(claim.job, node, 1, resource(offer), now),)
                tally.add(new[-1])
        return replace(allocation, grants=(*allocation.grants, *new))

    # -- what must hold

    def broken(self, before: State, after: State) -> str:
        """Return what a step broke; "" if nothing."""
        claims = after.allocation.claims
        ours = sum(claim.reserved for claim in claims if claim.team == "a")
        rules = {
            "more grants than the cap": len(after.allocation.grants) <= self.story.cap,
            "a claim is doubled": len({claim.job for claim in claims}) == len(claims),
            "more reservations than the cap": sum(claim.reserved for claim in claims) <= self.story.cap,
            "more reservations than the team's limit": self.story.most is None or ours <= self.story.most,
            "half a gang": all(not one.reserved or one.min <= one.reserved <= one.max for one in claims),
            "a claim neither waits nor runs": all((one.waits is None) is (one.reserved > 0) for one in claims),
        }
        wrong = next((rule for rule, holds in rules.items() if not holds), "")
        wrong = wrong or self._wrongly_paid(before.allocation, after.allocation, after.at)
        return wrong or self._wrongly_taken(before, after.allocation, after.at)

    def _wrongly_paid(self, before: Allocation, after: Allocation, at: int) -> str:
        """Return how grants and reservations break the limits of reserved capacity and money; "" if they do not.

        A write computed up to ``steps`` ago counts from then, so what may be reserved is the most of any step so far.
        """
        kept, usd = self.story.reserved or Reserved(0), self.story.usd
        inside = [grant for grant in after.grants if grant.reservation is not None]
        if len(inside) > kept.count:
            return "more machines than reserved capacity has"
        if inside and at < kept.starts:
            return "a machine is in reserved capacity that has not begun"
        if usd is None:
            return ""
        if len(after.grants) - len(inside) > usd:
            return "more machines than the money allows"
        rises = sum(claim.reserved for claim in after.claims) > sum(claim.reserved for claim in before.claims)
        open_ = any(kept.starts <= step < kept.ends for step in range(at + 1))
        most = usd + (kept.count if open_ else 0)
        too_many = rises and sum(claim.reserved for claim in after.claims) > most
        return "more reservations than the money and reserved capacity allow" if too_many else ""

    def _wrongly_taken(self, before: State, after: Allocation, at: int) -> str:
        for claim in before.allocation.claims:
            new, number = after.claim(claim.job), int(claim.job[1:])
            old = replace(claim, stop=Stop.SAVED if before.done[number] else claim.stop)  # as its round finds now
            if new is None and self.story.jobs[number].work == ENDLESS:
                return "a claim is lost"
            withdrawn = new is not None and not new.whom and not self.granted(before.allocation, claim.job)
            if new is not None and new.reserved < old.reserved and not withdrawn:
                # A write computed up to ``steps`` ago counts from then.
                if not any(reclaim.takeable(old, BEGIN_S + t * STEP_S, BEGIN_S + t * STEP_S) for t in range(at + 1)):
                    return "machines are taken from a protected job"
                taker = after.claim(new.whom)
                if taker is None or not taker.reserved:
                    return "machines are taken in vain"
        return ""

    def slow(self, state: State) -> str:
        """Return which job does not end soon, once every round and tick succeeds; "" if all do."""
        way = [state._replace(pending=())]
        while way[-1] not in self.ends and len(way) <= SOON + 1:
            way.append(self.calm(way[-1]))
            if self.over(way[-1]):
                self.ends[way[-1]] = 0
        if way[-1] not in self.ends:
            return f"after {SOON} steps: {[(one.job, one.reserved) for one in way[-1].allocation.claims]}"
        for steps, one in enumerate(reversed(way)):
            self.ends[one] = self.ends[way[-1]] + steps
        return "" if self.ends[way[0]] <= SOON else f"it takes {self.ends[way[0]]} steps"

    def calm(self, state: State) -> State:
        """One step of time in which a tick and three rounds of each job succeed."""
        for who in (TICK, *range(len(self.story.jobs))) * 3:
            state = state._replace(allocation=self.decided(who, state))
        return self.later(state)

    def over(self, state: State) -> bool:
        return all(
            count >= job.work for job, count in zip(self.story.jobs, state.done, strict=True) if job.work < ENDLESS
        )


class Found(NamedTuple):
    why: str
    states: int


def search(story: Story, states: int = 0) -> Found:
    """Go through every state of the story, breadth first; ``states``: stop after so many, 0: at the end."""
    world = World(story)
    start = State(0, Allocation(), (0,) * len(story.jobs))
    seen, layer = {start}, [start]
    while layer and (not states or len(seen) < states):
        coming = []
        for state in layer:
            for say, after in world.moves(state):
                if after in seen:
                    continue
                if why := world.broken(state, after) or ("" if after.pending else world.slow(after)):
                    return Found(f"{why} ({say}, step {after.at})", len(seen))
                seen.add(after)
                coming.append(after)
        layer = coming
    return Found("", len(seen))


def main(number: int) -> int:
    found = search(STORIES[number])
    sys.stdout.write(f"{found.states:,} states, {found.why or 'nothing broken'}\n")
    return int(found.why != "")


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
