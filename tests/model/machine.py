"""The transition system of one story: rounds, and a world of clouds, agents, faults and requests.

A state is a few small numbers (world, rounds, what is left of faults and requests); everything behind a number is
interned, and what can happen to a world, or what a round can do in it, is worked out once (``ground``).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from spotkeeper.contract.job import JobRequest, RequestKind
from spotkeeper.contract.record import Phase, Record
from spotkeeper.reconcile.controller import steps as passes
from spotkeeper.reconcile.controller.steps import ReadStep
from spotkeeper.reconcile.decide.queue.scheduler import schedule
from tests.model import agents
from tests.model import sky as clouds
from tests.model.ground import Round, Step, Unpacked, may_be_blind
from tests.model.left import may_forget
from tests.model.rounds import NONE, Rounds
from tests.model.story import Story
from tests.model.values import BETTER, NOW, WORSE, Life, World, changed, other_reports, plain_allocation


class Machine(Rounds):
    """One story's transition system."""

    def __init__(self, story: Story) -> None:
        super().__init__(story)
        self._env: dict[tuple[int, str, str], list[Step]] = {}
        self._bound: dict[tuple[tuple[int, ...], int], bool] = {}

    def turned(self, story: Story) -> Machine:
        """The same machine for a story that differs in its faults and requests only."""
        same = {"name": "", "faults": 0, "requests": 0, "kinds": NONE, "request_kinds": NONE, "pair": (), "states": 0}
        assert story._replace(**same) == self.story._replace(**same)
        if (may_forget(story), may_be_blind(story)) != (self.forgets, self.blinds):
            self.forgets, self.blinds = may_forget(story), may_be_blind(story)
            self.relearn()
            self._env.clear()
        self.story = story
        self._bound.clear()
        return self

    # -- a step of a whole state, slowly; ``search`` takes the same ones by columns

    def moves(self, state: Unpacked) -> Iterator[tuple[str, Unpacked, str]]:
        """(what happens, the next state, the property it breaks or '')."""
        world, rounds, faults, requests, deaths = state
        for step in self.env(world, faults, requests):
            for after in self._after(rounds, world, step.world):
                yield step.say, (step.world, after, faults - step.fault, requests - step.request, deaths), step.why
        before = -1
        for index, number in enumerate(rounds):
            if number == before:
                continue  # rounds are alike
            before = number
            others = (*rounds[:index], *rounds[index + 1 :])
            if deaths and number and self.rounds.values[number].kind not in ("read", "tick"):  # type: ignore[union-attr]
                yield "a round dies", (world, tuple(sorted((0, *others))), faults, requests, deaths - 1), ""
            for step in self.acts(number, world, faults):
                for after in self._after(others, world, step.world):
                    left = tuple(sorted((step.round, *after)))
                    yield step.say, (step.world, left, faults - step.fault, requests, deaths), step.why

    def acts(self, number: int, world: int, faults: int) -> list[Step]:
        """What a round may do with so much of the faults left, within the bound on numbers."""
        steps = list(self.round_moves(number, world))
        for kind, cost in self.story.may(faults):
            steps += [step._replace(fault=cost) for step in self.round_moves(number, world, kind)]
        return [step for step in steps if self._within(step.world)]

    def _within(self, world: int) -> bool:
        records, _, allocation, _ = self.worlds[world]
        key = (records, allocation)
        found = self._bound.get(key)
        if found is None:
            found = self._bound[key] = self._highest(records, allocation) <= self.story.numbers
        return found

    def _highest(self, records: tuple[int, ...], allocation: int) -> int:
        """Of the numbers of attempts."""
        tops = [node.top for number in records if (record := self.records[number]) for node in record.nodes]
        return max([*tops, *(grant.attempt for grant in self.allocations[allocation].grants)], default=0)

    def _after(self, rounds: tuple[int, ...], before: int, after: int) -> Iterator[tuple[int, ...]]:
        """The other rounds when the world has changed: each may just have read what is now old.

        A read is worth telling only where it is stale: as long as what a round read last is unchanged, it could
        as well read it later. So a round is not there until it has seen something that has changed since. A
        write whose record is no more the one it read is lost: it is over.
        """
        if before == after or (self.worlds[before][:3] == self.worlds[after][:3] and not self.story.ticks):
            yield rounds
            return
        options = [self.stale(number, before, after) for number in rounds]
        if all(len(each) == 1 for each in options):
            yield tuple(each[0] for each in options)
        else:
            yield from sorted({tuple(sorted(each)) for each in product(*options)})

    def stale(self, number: int, before: int, after: int) -> list[int]:
        """What may have become of a round meanwhile."""
        at = self.rounds[number]
        if at is not None and at.kind not in ("read", "tick"):
            return [self.left(number, after)]
        out = [number]
        for job in range(self.story.jobs) if at is None else (at.job,):
            for kind, order in self._orders(at):
                out += self._early(Round(kind, job, () if at is None else at.data), order, before, after)
        return list(dict.fromkeys(out))

    def _orders(self, at: Round | None) -> list[tuple[str, tuple[ReadStep, ...]]]:
        """Return the orders in which a round may continue to read; after the record alone, both are possible."""
        orders = [("read", passes.READS)] if at is None or at.kind == "read" else []
        first = at is None or at.kind == "tick" or len(at.data) == 1
        return [*orders, ("tick", passes.TICK_READS)] if self.story.ticks and first else orders

    def _early(self, at: Round, order: tuple[ReadStep, ...], before: int, after: int) -> Iterator[int]:
        """The round when it has read, the moment before, something that has changed now."""
        got = at.data
        for read in order[len(got) : -1]:
            got = (*got, self._value(read, at.job, before, got))
            if self._value(read, at.job, after, got) != got[-1] and (self.story.split or read is order[0]):
                if (record := self.worlds[before][0][at.job]) and self.records[record] is None:
                    break
                yield self.rounds(Round(at.kind if len(got) > 1 else "read", at.job, got))

    def env(self, world: int, faults: int, requests: int) -> list[Step]:
        """What may happen with so much of the faults and requests left."""
        steps = list(self._happens(world, "", ""))
        for kind, cost in self.story.may(faults):
            steps += [step._replace(fault=cost) for step in self._happens(world, kind, "")]
        for request in self.story.wanted(requests):
            steps += self._happens(world, "", request)
        return steps

    def _happens(self, world: int, kind: str, request: str) -> list[Step]:
        """By itself (no kind, no request), or as this fault, or as this request, alone."""
        key = (world, kind, request)
        found = self._env.get(key)
        if found is None:
            every = self._environment(world, frozenset({kind}) - {""}, frozenset({request}) - {""})
            found = self._env[key] = [s for s in every if (s.fault > 0, s.request > 0) == (kind != "", request != "")]
        return found

    def _environment(self, number: int, kinds: frozenset[str], request_kinds: frozenset[str]) -> Iterator[Step]:
        world = self.world(number)
        for done in clouds.drift(world.sky, self.ec2, kinds):
            yield Step(done.say, self.intern(world._replace(sky=done.sky)), 0, done.fault, 0, done.why)
        if (ordered := self.ordered(world)) != world:
            yield Step("a tick orders the queue", self.intern(ordered), 0)
        for job, said in self._speech(world, kinds, request_kinds):
            yield Step(said.say, self._said(world, job, said), 0, said.fault, said.request, said.why)
        for job, record in enumerate(world.records):
            if record is not None:
                yield from self._requests(world, job, record, request_kinds)
                yield from self._wiped(world, job, record, kinds)
                yield from self._compared(world, job)
                if "dead" in kinds:
                    yield from self._lost(world, record)
                if "gone" in kinds and self.story.lost_records and record.phase is Phase.RUN and record.gen:
                    gone = world._replace(records=changed(world.records, job, None))
                    yield Step(f"the record of job {job} is deleted by hand", self.intern(gone), 0, 1)

    def ordered(self, world: World) -> World:
        """The world after a tick has given and taken reservations, as ``tick`` does in one compare-and-swap."""
        if self.story.jobs == 1:
            return world
        return world._replace(allocation=plain_allocation(schedule(world.allocation, self.stack, NOW)))

    def _wiped(self, world: World, job: int, record: Record, kinds: frozenset[str]) -> Iterator[Step]:
        """A disk that nobody holds is destroyed, where the bucket has a copy of something that was on it."""
        for disk in world.sky.disks if "wiped" in kinds and record.mirror else ():
            if disk.job == job and not disk.user:
                sky = world.sky._replace(disks=world.sky.disks - {disk})
                yield Step(f"disk {disk.name} is destroyed", self.intern(world._replace(sky=sky)), 0, 1)

    def _lost(self, world: World, record: Record) -> Iterator[Step]:
        """The other region is lost, with all that is there, before the job has trained there."""
        (home, other), sky = self.story.zones, world.sky
        if not sky.dead and home in (record.zone, record.move and record.move.origin):
            vms, disks = (
                frozenset(v for v in sky.vms if v.zone == home),
                frozenset(d for d in sky.disks if d.zone == home),
            )
            gone = world._replace(sky=sky._replace(vms=vms, disks=disks, dead=other))
            yield Step("the other region is lost", self.intern(gone), 0, 1)

    def _compared(self, world: World, job: int) -> Iterator[Step]:
        """The other trial of the search reports its rung, and is better or worse."""
        papers = world.papers[job]
        if papers.sweep is not None and not papers.sweep.trial(1).values:
            for say, value in (("better", BETTER), ("worse", WORSE)):
                told = world._replace(papers=changed(world.papers, job, other_reports(papers, value)))
                yield Step(f"the other trial reports, and is {say}", self.intern(told), 0)

    def _speech(
        self, world: World, kinds: frozenset[str], request_kinds: frozenset[str]
    ) -> Iterator[tuple[int, agents.Said]]:
        for v in world.sky.vms:
            record = world.records[v.job]
            if record is not None and (self.ec2 or v.life is not Life.COMING):
                papers, copies = world.papers[v.job], self.story.mirror
                for said in agents.steps(
                    world.sky, v, record, papers, self.stack, kinds, request_kinds, self.blinds, copies
                ):
                    yield v.job, said
        yield from agents.node_steps(world.sky, world.records, world.papers, world.allocation, self.stack)
        for job, record in enumerate(world.records):
            if record is not None and (done := agents.commit(world.sky, record, world.papers[job], job)):
                yield job, done

    def _said(self, world: World, job: int, said: agents.Said) -> int:
        return self.intern(world._replace(sky=said.sky, papers=changed(world.papers, job, said.papers)))

    def _requests(self, world: World, job: int, record: Record, request_kinds: frozenset[str]) -> Iterator[Step]:
        papers = world.papers[job]
        known = {*record.requests_done, *(request.id for request in papers.requests)}
        possible = {
            "swap": JobRequest("s", RequestKind.SWAP, NOW, node=0),
            "move": JobRequest("m", RequestKind.MOVE, NOW, zone=self.story.zones[-1]),
            "pause": JobRequest("p", RequestKind.PAUSE, NOW),
            "cancel": JobRequest("c", RequestKind.CANCEL, NOW),
            "resize": JobRequest("z", RequestKind.RESIZE, NOW, nodes=self.story.least),
        }
        for kind, request in possible.items():
            if kind in request_kinds and request.id not in known:
                yield Step(f"a user requests: {kind}", self._asked(world, job, request), 0, 0, 1)
        moves = record.move is not None or record.asked_zone is not None
        if "m" in record.requests_done and moves and "n" not in known:
            yield Step(
                "somebody takes the move back", self._asked(world, job, JobRequest("n", RequestKind.MOVE, NOW)), 0
            )
        if "p" in record.requests_done and "r" not in known:
            yield Step("a user requests: resume", self._asked(world, job, JobRequest("r", RequestKind.RESUME, NOW)), 0)
        if "z" in record.requests_done and "pause" in self.story.request_kinds and "p" not in known:
            yield Step("somebody pauses the smaller job", self._asked(world, job, possible["pause"]), 0)
        if "z" in record.requests_done and "pause" not in self.story.request_kinds and "y" not in known:
            whole = JobRequest("y", RequestKind.RESIZE, NOW, nodes=self.story.nodes)
            yield Step("a user requests all nodes again", self._asked(world, job, whole), 0)

    def _asked(self, world: World, job: int, request: JobRequest) -> int:
        papers = world.papers[job]
        return self.intern(
            world._replace(papers=changed(world.papers, job, papers._replace(requests=(*papers.requests, request))))
        )
