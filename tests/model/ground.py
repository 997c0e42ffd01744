"""A story's values by number: equal worlds, and rounds that will do the same, are the same number.

What no decision can tell apart is made alike here (``tidied``, ``heard``). A round that has read everything is
known by what it will do (its pass, see ``spotkeeper.reconcile.controller.steps``), not by what it saw.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from msgspec.structs import replace

from spotkeeper.contract.allocation import Allocation
from spotkeeper.contract.cloud import CreateDisk, CreateSnapshot, InsertVm, Listing, Result, ResultKind
from spotkeeper.contract.facts import Fact, Kind
from spotkeeper.contract.job import Checkpoint, JobSpec, Mirror, Nodes, Retry
from spotkeeper.contract.record import Node, Record
from spotkeeper.contract.stack import Model, PoolState, Price, StackState, StaticMachine
from spotkeeper.contract.sweep import SweepState
from spotkeeper.reconcile.controller.steps import Pass, Todo
from spotkeeper.reconcile.decide import Draft, Snapshot, calls
from spotkeeper.reconcile.decide.checkpoint import mirrors
from spotkeeper.reconcile.store.documents import OfferHistory
from tests.model import rules
from tests.model.story import Story
from tests.model.values import (
    BOOT_S,
    JOBS,
    NODE,
    NOW,
    POOL,
    STACK,
    STATIC_POOL,
    TRIAL,
    UIDS,
    USUAL_BOOT_S,
    Interner,
    Life,
    Moment,
    N,
    Papers,
    Sky,
    V,
    World,
    clock,
    hello,
    listing,
    live_slots,
    plain,
    plain_allocation,
    plain_sweep,
    progress,
    slot_of,
    times,
)

TOLL = 1e6  # USD per GB
WRITES = 24  # of one round, with those after the worst answers to its calls
# What a look finds overdue is not what the same round asks for anew.
_ONCE = (Moment.SLOW, Moment.BOOT, Moment.ROLL, Moment.SILENT, Moment.DRY, Moment.THAWED)
COPIES = (Kind.MIRRORED, Kind.UNMIRRORED)
LAST_WORDS = (Kind.FREED, Kind.RELEASED, Kind.DROPPED, *COPIES)  # of an attempt that is over, and still listened to


class Ref(NamedTuple):
    """What a pass is made from, by number."""

    job: int
    record: int
    papers: int
    allocation: int
    listing: int
    moment: Moment
    first: bool = True
    machine: N | None = None
    results: tuple[Result, ...] = ()


Then = tuple[tuple[ResultKind, int], ...]  # what a round does after each answer to its one insert


class Round(NamedTuple):
    """A round under way. ``kind``: read, tick (reads in a tick's order), write, grant, call, report, tidy, orphan."""

    kind: str
    job: int
    data: tuple[Any, ...]


class Step(NamedTuple):
    say: str
    world: int
    round: int  # what became of the round that moved; 0: it is over
    fault: int = 0
    request: int = 0
    why: str = ""


Unpacked = tuple[int, tuple[int, ...], int, int, int]  # world, rounds, faults, requests and deaths left


class Ground:
    """Worlds, looks and futures by number."""

    def __init__(self, story: Story) -> None:
        self.story = story
        self.ec2 = story.cloud == "ec2"
        self.zones = frozenset(story.zones)
        self.stack, self.market = _stack(story), _market(story)
        self.spec = _spec(story)
        self.low = replace(self.spec, priority="low")
        self.records: Interner[Record | None] = Interner()
        self.papers: Interner[Papers] = Interner()
        self.allocations: Interner[Allocation] = Interner()
        self.skies: Interner[Sky] = Interner()
        self.listings: Interner[Listing] = Interner()
        self.worlds: Interner[tuple[tuple[int, ...], tuple[int, ...], int, int]] = Interner()
        self.rounds: Interner[Round | None] = Interner()
        self.rounds(None)  # number 0: no round
        self._future: dict[Ref, int] = {}
        self._depth = 0  # passes of one round that write, each planned within the one before it
        self._looks: dict[tuple[int, frozenset[str]], int] = {}
        self._tidied: dict[tuple[int, int, int, int, int], int] = {}
        self._calm: dict[tuple[tuple[int, ...], int], int] = {}
        self._heard: dict[tuple[int, int], int] = {}
        self._listened: dict[tuple[int, int], int] = {}
        self.blinds = may_be_blind(story)

    # -- worlds

    def start(self) -> Unpacked:
        """A job that was just submitted."""
        records = tuple(
            Record(JOBS[j], UIDS[j], f"j{j}", "", NOW, nodes=(Node(),) * self.story.nodes)
            for j in range(self.story.jobs)
        )
        sky = Sky(machine=N() if self.story.static else None)
        papers = Papers(sweep=SweepState(TRIAL.sweep) if self.story.trial else None)
        world = World(records, (papers,) * self.story.jobs, Allocation(), sky)
        story = self.story
        return (self.intern(world), (0,) * story.rounds, story.budget, story.requests, story.deaths)

    def intern(self, world: World) -> int:
        return self.place(
            tuple(self.records(r) for r in world.records),
            tuple(self.papers(p) for p in world.papers),
            self.allocations(world.allocation),
            self.skies(world.sky),
        )

    def place(self, records: tuple[int, ...], papers: tuple[int, ...], allocation: int, sky: int) -> int:
        """A world's number; what nobody can tell any more is forgotten at once."""
        sky = self._calmed(records, sky)
        left = tuple(self._tidied_of(j, records[j], each, allocation, sky) for j, each in enumerate(papers))
        return self.worlds((records, left, allocation, sky))

    def _calmed(self, records: tuple[int, ...], sky: int) -> int:
        """Machines that are no attempt's any more are alike in all that only an agent of the job would care about."""
        key = (records, sky)
        found = self._calm.get(key)
        if found is None:
            old = self.skies[sky]
            of = [self.records[number] for number in records]
            vms = frozenset(v if of[v.job] is None or slot_of(of[v.job], v) else _over(v) for v in old.vms)
            found = self._calm[key] = sky if vms == old.vms else self.skies(old._replace(vms=vms))
        return found

    def _tidied_of(self, job: int, record: int, papers: int, allocation: int, sky: int) -> int:
        key = (job, record, papers, allocation, sky)
        found = self._tidied.get(key)
        if found is None:
            found = self._tidied[key] = self._tidies_now(*key)
        return found

    def _tidies_now(self, job: int, record: int, papers: int, allocation: int, sky: int) -> int:
        """Without facts that the shipped tidying drops, or that decide nothing (``heard``).

        A round whose record is older may listen to them; it may as well have read them the moment before.
        """
        if self.records[record] is None or not self.papers[papers].facts:
            return papers
        ref = Ref(job, record, papers, allocation, self._look_at(sky, self.zones), Moment.FRESH)
        at = self.make(ref)
        there = {v.uid for v in self.skies[sky].vms}
        draft = Draft(at.record, at.snapshot)
        over = {fact for fact in calls.stale(draft) if fact.uid not in there}
        over -= {fact for fact in over if fact.kind in COPIES} - set(mirrors.stale(draft))  # written down first
        heard = self.papers[self.heard(record, papers)]
        left = self.papers(heard._replace(facts=heard.facts - over))
        if left != papers:
            assert same(at, self.make(ref._replace(papers=left))), "a fact that is forgotten decides something"
        return left

    def world(self, number: int) -> World:
        records, papers, allocation, sky = self.worlds[number]
        return World(
            tuple(self.records[r] for r in records),
            tuple(self.papers[p] for p in papers),
            self.allocations[allocation],
            self.skies[sky],
        )

    def _look(self, number: int, answered: frozenset[str]) -> int:
        return self._look_at(self.worlds[number][3], answered)

    def _look_at(self, sky: int, answered: frozenset[str]) -> int:
        key = (sky, answered)
        found = self._looks.get(key)
        if found is None:
            home = self.story.zones[0]
            answered = answered - {self.skies[sky].dead}
            found = self._looks[key] = self.listings(listing(self.skies[sky], answered, self.ec2, home))
        return found

    @staticmethod
    def _idle(machine: N | None) -> N | None:
        """The node as the round read it."""
        return None if machine is None else N(boot=machine.boot)

    def heard(self, record: int, papers: int) -> int:
        """Papers without what a decision on this record does not listen to.

        Words of machines that are neither of its live attempts nor about to let something go. What such a
        machine said of its disk is never newer than the progress that is read with it.
        """
        key = (record, papers)
        found = self._heard.get(key)
        if found is None:
            old, of = self.papers[papers], self.records[record]
            if of is None:
                return papers
            live = {(i, slot.attempt) for i in range(len(of.nodes)) for slot in live_slots(of, i)}
            facts = lasting(f for f in old.facts if (f.node, f.attempt) in live or f.kind in LAST_WORDS)
            found = self._heard[key] = self.papers(old._replace(facts=facts))
        return found

    def listened(self, record: int, papers: int) -> int:
        """What a round that holds this record makes of papers: less than what a world must keep (``matters``).

        Agents remember by their facts what they have said, so a world has them all; a round that has read them,
        and all it may still write, depends on these alone.
        """
        key = (record, papers)
        found = self._listened.get(key)
        if found is None:
            old, of = self.papers[self.heard(record, papers)], self.records[record]
            if of is None:
                return papers
            facts = frozenset(matters(of, old.facts, self.blinds))
            found = self._listened[key] = self.papers(old._replace(facts=facts))
        return found

    # -- passes

    def make(self, ref: Ref) -> Pass:
        record = self.records[ref.record]
        assert record is not None
        papers = self.papers[ref.papers]
        snapshot = Snapshot(
            stack=self.stack,
            spec=(self.low if self.story.recall and ref.job == 0 else self.spec) if not record.over else None,
            listing=self.listings[ref.listing],
            now=clock(ref.moment),
            facts=tuple(sorted(papers.facts, key=lambda f: f.key())),
            requests=papers.requests if not record.over else (),
            results=ref.results,
            allocation=self.allocations[ref.allocation],
            hellos=hello(ref.machine, self.story.zones[0]),
            progress=progress(papers.newest),
            sweep=papers.sweep,
            market=self.market,
            save_s=1.0,
            grants_first=ref.first,
            times=times(ref.moment),
        )
        return Pass(record, snapshot)

    def future(self, ref: Ref) -> int:
        """The round that holds this, by what it will do; 0 where that is nothing."""
        ref = ref._replace(papers=self.listened(ref.record, ref.papers))
        found = self._future.get(ref)
        if found is None:
            found = self._future[ref] = self._plan(ref)
        return found

    def _plan(self, ref: Ref) -> int:
        self._depth += 1
        try:
            return self._planned(ref, self.make(ref))
        finally:
            self._depth -= 1

    def _planned(self, ref: Ref, at: Pass) -> int:
        decision = at.decision
        if at.todo is Todo.WRITE:
            assert decision.record is not None
            after = self.records(plain(decision.record, at.record, clock(ref.moment)))
            why = rules.judged(at, self.records[after])
            if after == ref.record or self._depth > WRITES:  # nothing changed but moments; or something always does
                why = "L6: writes the record for nothing" if after == ref.record else "L6: writes without end"
                return self.rounds(Round("write", ref.job, (ref.record, after, 0, why)))
            moment = Moment.FRESH if ref.moment in _ONCE else ref.moment
            then = ref._replace(record=after, first=True, moment=moment)
            return self.rounds(Round("write", ref.job, (ref.record, after, self.future(then), why)))
        if at.todo is Todo.GRANT:
            assert decision.grants is not None
            allocation = self.allocations(plain_allocation(decision.grants))
            why = rules.released(at, decision.grants)
            return self.rounds(Round("grant", ref.job, (ref.allocation, allocation, ref, why)))
        if at.todo is Todo.REST:
            return self._tidies(ref, at)
        if at.todo is Todo.REPORT:
            assert decision.sweep is not None
            return self.rounds(Round("report", ref.job, (at.snapshot.sweep, plain_sweep(decision.sweep), ref)))
        tidy = 0  # whoever looks next tidies: what is over stays over, so a stale tidying is no other story
        keep = self._answers(ref, at)
        return self.rounds(Round("call", ref.job, (ref.record if keep else -1, at.calls, (), keep, tidy)))

    def _answers(self, ref: Ref, at: Pass) -> Then | Ref | None:
        """What is kept of a round for its calls' answers: what it does after each. Inserts and copies are refused.

        With more than one of them (in a gang) there are many answers; then it is known by what it saw.
        """
        copies = (CreateSnapshot, CreateDisk) if "uncopied" in self.story.kinds else ()
        answered = [action for action in at.calls if isinstance(action, (InsertVm, *copies))]
        if len(answered) != 1:
            return ref if answered else None
        kinds = (ResultKind.DEAD_KEY, ResultKind.CAPACITY) if self.ec2 else (ResultKind.DEAD_KEY,)
        kinds = kinds if isinstance(answered[0], InsertVm) else (ResultKind.PERMANENT,)
        return tuple((kind, self.answered(ref, at, (Result(answered[0], kind),))) for kind in kinds)

    def answered(self, ref: Ref, at: Pass, results: tuple[Result, ...]) -> int:
        """The round when all its calls are made; those without a result were accepted."""
        made = {result.action for result in results}
        every = tuple(Result(action, ResultKind.ACCEPTED) for action in at.calls if action not in made)
        return self.future(ref._replace(results=(*ref.results, *every, *results)))

    def _tidies(self, ref: Ref, at: Pass) -> int:
        stale = frozenset(at.decision.stale)
        return self.rounds(Round("tidy", ref.job, (stale,))) if stale else 0


def _market(story: Story) -> tuple[OfferHistory, ...]:
    if Moment.SLOW.name in story.kinds:
        return (OfferHistory(POOL, story.zones[0], Model.SPOT, boot_s=USUAL_BOOT_S, slow_boot_s=USUAL_BOOT_S),)
    if not story.dear:
        return ()
    return tuple(OfferHistory(POOL, zone, Model.SPOT, price=0.3 if i else 0.9) for i, zone in enumerate(story.zones))


def _stack(story: Story) -> StackState:
    prices = {zone: Price(on_demand=1.0, spot=0.3 + 0.01 * i) for i, zone in enumerate(story.zones)}
    pools = [PoolState(POOL, "spot", "m", story.zones, 1, story.cap, 0, 1, "pd", prices)]
    if story.static:
        home = story.zones[0]
        machine = StaticMachine(NODE, home)
        pools.append(PoolState(STATIC_POOL, "static", "m", (home,), 1, 1, 0, 1, "pd", prices, machines=(machine,)))
    regions, home = (story.zones, story.zones[0]) if story.regions else ((), "r")
    egress = {here: {there: TOLL for there in regions if there != here} for here in regions}
    return StackState(
        STACK,
        "gcp",
        "p",
        home,
        "b",
        tuple(pools),
        boot_deadline_s=BOOT_S,
        regions=regions,
        egress=egress if story.toll else {},
        bucket_regions=regions if story.mirror else (),
    )


def _spec(story: Story) -> JobSpec:
    return JobSpec(
        "j",
        ("x",),
        Nodes(story.least, story.nodes) if story.least else story.nodes,
        policy="spot",
        checkpoint=Checkpoint(replicated=story.replicated, mirror=Mirror(keep=1) if story.mirror else None),
        retry=Retry(crashes=1),
        trial=TRIAL if story.trial else None,
        spread=story.spread,
        regions=story.zones if story.regions else (),
    )


def may_be_blind(story: Story) -> bool:
    """Whether a zone may not answer."""
    return not {"blind", "dead"}.isdisjoint({*story.kinds, *story.pair})


def matters(record: Record, facts: frozenset[Fact], blind: bool) -> Iterator[Fact]:
    """Those that a round holding this record, or one that it makes of it, may still decide by.

    A hello of the boot that was admitted, or of one before it, brings nobody in; a live attempt's words about
    generations before the record's own end nothing; that a disk is attached is listed, unless its zone is silent; that
    it is blank counts where there is a copy of what it had.
    """
    slots = [(index, slot) for index in range(len(record.nodes)) for slot in live_slots(record, index)]
    boots = {(i, slot.attempt, boot) for i, slot in slots if slot.boot for boot in (slot.boot, *slot.past)}
    live = {(i, slot.attempt) for i, slot in slots}
    for fact in facts:
        match fact.kind:
            case Kind.HELLO:
                over = (fact.node, fact.attempt, fact.boot) in boots
            case Kind.RELEASED | Kind.EXIT | Kind.RUNG:
                over = fact.gen < record.gen and (fact.node, fact.attempt) in live
            case Kind.HUNG | Kind.STACKS | Kind.FAILED:
                over = fact.gen < record.gen
            case Kind.ATTACHED:
                over = not blind and not record.mirror
            case _:
                over = False
        if not over:
            yield fact


def lasting(facts: Iterable[Fact]) -> frozenset[Fact]:
    """Without notices that were withdrawn, and of what is on a machine's disk the newest only."""
    every = frozenset(facts)
    spared = {_told(f) for f in every if f.kind is Kind.REPRIEVE}
    newest: dict[tuple[str, str, int], int] = {}
    for f in every:
        if f.kind is Kind.CHECKPOINT:
            newest[_told(f)[:3]] = max(newest.get(_told(f)[:3], 0), _commit(f))
    return frozenset(
        f
        for f in every
        if not (f.kind in (Kind.NOTICE, Kind.REPRIEVE) and _told(f) in spared)
        and not (f.kind is Kind.CHECKPOINT and _commit(f) < newest[_told(f)[:3]])
    )


def _told(fact: Fact) -> tuple[str, str, int, str]:
    return fact.uid, fact.boot, fact.attempt, fact.value


def _commit(fact: Fact) -> int:
    return int(fact.value.partition("-")[0])


def _over(v: V) -> V:
    """A machine that is no attempt's: it may write until it is gone, say that it lets go, and power off."""
    if v.life < Life.STOPPING:
        return v._replace(noticed=min(v.noticed, 1))
    told = v._replace(noticed=0, planned=False, hung=False, boot=0)
    return told if v.alive else told._replace(gen=0, writes=False)


def same(one: Pass, other: Pass) -> bool:
    """Whether two passes do the same, but for the tidying."""
    a, b = one.decision, other.decision
    return (a.record, a.grants, a.actions) == (b.record, b.grants, b.actions)
