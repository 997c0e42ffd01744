"""The transition system of one story: rounds that stall or die between any two of the shipped steps, in a world
of clouds, agents, faults and wishes.

A state is four small numbers (world, rounds, faults left, wishes left); everything behind a number is interned,
and what can happen to a world, or what a round can do in it, is worked out once. A round that has read
everything is known by what it will do (its pass, see ``spotkeeper.reconcile.passes``), not by what it saw: two
rounds with the same future are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, NamedTuple

from spotkeeper.reconcile import passes
from spotkeeper.reconcile.decide import Seen
from spotkeeper.reconcile.passes import Pass, Read, Todo
from spotkeeper.reconcile.store_api import Held
from spotkeeper.reconcile.sweep import _orphans
from spotkeeper.spec.cloud import Action, Class, CreateDisk, InsertVm, Listing, Result
from spotkeeper.spec.job import Ask, AskKind, Checkpoint, JobSpec, Retry
from spotkeeper.spec.record import Alloc, Phase, Rank, Record, SlotState
from spotkeeper.spec.stack import PoolState, Price, StackState, StaticNode

from tests.model import agents, rules
from tests.model import sky as clouds
from tests.model.values import (
    BOOT_S,
    JOBS,
    NODE,
    NOW,
    POOL,
    STACK,
    STATIC_POOL,
    UIDS,
    Interner,
    Life,
    Moment,
    N,
    Papers,
    Sky,
    World,
    clock,
    hello,
    listing,
    live_slots,
    plain,
    plain_alloc,
    progress,
    slot_of,
    times,
)

FAULTS = frozenset(
    {"killed", "noticed", "hangs", "reboots", "refused", "forgotten", "blind", "crashes"}
    | {moment.name for moment in (Moment.PAST, Moment.BOOT, Moment.SILENT, Moment.ROLL, Moment.DISK)}
)
WISHES = frozenset({"swap", "move", "pause", "cancel", "finish"})
NONE: frozenset[str] = frozenset()
WRITES = 12  # of one round, without a call in between
# What a look finds overdue is not what the same round asks for anew.
_ONCE = (Moment.BOOT, Moment.ROLL, Moment.SILENT, Moment.DRY, Moment.THAWED)


class Story(NamedTuple):
    """Bounds of one search. ``split``: a round may stall between any two reads, not only after the record."""

    name: str
    cloud: str = "gce"
    jobs: int = 1
    ranks: int = 1
    zones: tuple[str, ...] = ("a", "b")
    rounds: int = 2
    replicated: bool = True
    static: bool = False
    cap: int = 3
    faults: int = 2
    wishes: int = 1
    deaths: int = 0  # rounds that end in the middle; any may stall for ever besides, which is a death too
    kinds: frozenset[str] = FAULTS
    asks: frozenset[str] = WISHES
    split: bool = True
    spread: bool = False
    lost_records: bool = False
    cas: bool = True  # False: the store's compare-and-swap is taken away (a mutant's story)
    states: int = 0  # stop there; 0: to the end


class Ref(NamedTuple):
    """What a pass is made from, by number."""

    job: int
    record: int
    papers: int
    alloc: int
    listing: int
    moment: Moment
    first: bool = True
    node: N | None = None
    results: tuple[Result, ...] = ()


class Round(NamedTuple):
    """A round under way. ``kind``: read, write, grant, call, tidy; ``data`` is what it carries."""

    kind: str
    job: int
    data: tuple[Any, ...]


class Step(NamedTuple):
    say: str
    world: int
    round: int  # what became of the round that moved; 0: it is over
    fault: int = 0
    wish: int = 0
    why: str = ""


Unpacked = tuple[int, tuple[int, ...], int, int, int]  # world, rounds, faults, wishes and deaths left


class Machine:
    """One story's transition system."""

    def __init__(self, story: Story) -> None:
        self.story = story
        self.ec2 = story.cloud == "ec2"
        self.records: Interner[Record | None] = Interner()
        self.papers: Interner[Papers] = Interner()
        self.allocs: Interner[Alloc] = Interner()
        self.skies: Interner[Sky] = Interner()
        self.listings: Interner[Listing] = Interner()
        self.worlds: Interner[tuple[tuple[int, ...], tuple[int, ...], int, int]] = Interner()
        self.rounds: Interner[Round | None] = Interner()
        self.rounds(None)  # number 0: no round
        self.stack = _stack(story)
        self.spec = _spec(story)
        self._future: dict[Ref, int] = {}
        self._depth = 0  # passes of one round that write, each planned within the one before it
        self._looks: dict[tuple[int, frozenset[str]], int] = {}
        self._env: dict[tuple[int, bool, bool], list[Step]] = {}
        self._moves: dict[tuple[int, int, bool], list[Step]] = {}
        self._stales: dict[tuple[int, int, int], list[int]] = {}
        self.zones = frozenset(story.zones)

    # -- states

    def start(self) -> Unpacked:
        records = tuple(
            Record(JOBS[j], UIDS[j], f"j{j}", "", NOW, ranks=(Rank(),) * self.story.ranks)
            for j in range(self.story.jobs)
        )
        sky = Sky(node=N() if self.story.static else None)
        world = World(records, (Papers(),) * self.story.jobs, Alloc(), sky)
        story = self.story
        return (self.intern(world), (0,) * story.rounds, story.faults, story.wishes, story.deaths)

    def intern(self, world: World) -> int:
        return self.worlds(
            (
                tuple(self.records(r) for r in world.records),
                tuple(self.papers(p) for p in world.papers),
                self.allocs(world.alloc),
                self.skies(world.sky),
            )
        )

    def world(self, number: int) -> World:
        records, papers, alloc, sky = self.worlds[number]
        return World(
            tuple(self.records[r] for r in records),
            tuple(self.papers[p] for p in papers),
            self.allocs[alloc],
            self.skies[sky],
        )

    def moves(self, state: Unpacked) -> Iterator[tuple[str, Unpacked, str]]:
        """(what happens, the next state, the property it breaks or '')."""
        world, rounds, faults, wishes, deaths = state
        for step in self.env(world, faults > 0, wishes > 0):
            for after in self._after(rounds, world, step.world):
                yield step.say, (step.world, after, faults - step.fault, wishes - step.wish, deaths), step.why
        before = -1
        for index, number in enumerate(rounds):
            if number == before:
                continue  # rounds are alike
            before = number
            others = (*rounds[:index], *rounds[index + 1 :])
            if deaths and number and self.rounds.values[number].kind != "read":  # type: ignore[union-attr]
                yield "a round dies", (world, tuple(sorted((0, *others))), faults, wishes, deaths - 1), ""
            for step in self.round_moves(number, world, faults > 0):
                for after in self._after(others, world, step.world):
                    left = tuple(sorted((step.round, *after)))
                    yield step.say, (step.world, left, faults - step.fault, wishes, deaths), step.why

    def _after(self, rounds: tuple[int, ...], before: int, after: int) -> Iterator[tuple[int, ...]]:
        """The other rounds when the world has changed: each may just have read what is now old.

        A read is worth telling only where it is stale: as long as what a round read last is unchanged, it could
        as well read it later. So a round is not there until it has seen something that has changed since. A
        write whose record is no more the one it read is lost: it is over.
        """
        if before == after or self.worlds[before][:3] == self.worlds[after][:3]:
            yield rounds
            return
        options = [self.stale(number, before, after) for number in rounds]
        if all(len(each) == 1 for each in options):
            yield tuple(each[0] for each in options)
        else:
            yield from sorted({tuple(sorted(each)) for each in product(*options)})

    def stale(self, number: int, before: int, after: int) -> list[int]:
        """What may have become of a round meanwhile."""
        return self._read_before(number, before, after)

    def _read_before(self, number: int, before: int, after: int) -> list[int]:
        old, new = self.worlds[before], self.worlds[after]
        at = self.rounds[number]
        if self.story.cas and at is not None and at.kind == "write" and at.data[0] != new[0][at.job]:
            return [0]
        out = [number]
        if at is not None and at.kind != "read":
            return out
        for job in range(self.story.jobs) if at is None else (at.job,):
            got = () if at is None else at.data
            for read in passes.READS[len(got) : -1]:
                got = (*got, self._value(read, job, before))
                if self._value(read, job, after) != got[-1] and (self.story.split or read is passes.READS[0]):
                    if old[0][job] and self.records[old[0][job]] is None:
                        break
                    out.append(self.rounds(Round("read", job, got)))
        return out

    def _value(self, read: Read, job: int, world: int) -> object:
        """What a read gives."""
        records, papers, alloc, sky = self.worlds[world]
        if read is Read.RECORD:
            return records[job]
        if read is Read.FACTS:
            return papers[job]
        if read is Read.ALLOC:
            return (alloc, self.skies[sky].node) if self.story.static else (alloc, None)
        return (self._look(world, self.zones), Moment.FRESH)

    # -- what happens without a round

    def env(self, number: int, faults: bool, wishes: bool) -> list[Step]:
        key = (number, faults, wishes)
        found = self._env.get(key)
        if found is None:
            found = self._env[key] = list(self._environment(number, faults, wishes))
        return found

    def _environment(self, number: int, faults: bool, wishes: bool) -> Iterator[Step]:
        world = self.world(number)
        kinds = self.story.kinds if faults else NONE
        asks = self.story.asks if wishes else NONE
        for done in clouds.drift(world.sky, self.ec2, kinds):
            yield Step(done.say, self.intern(world._replace(sky=done.sky)), 0, done.fault, 0, done.why)
        for job, said in self._speech(world, kinds, asks):
            yield Step(said.say, self._said(world, job, said), 0, said.fault, said.wish, said.why)
        for job, record in enumerate(world.records):
            if record is not None:
                yield from self._wishes(world, job, record, asks)
                if faults and self.story.lost_records and record.phase is Phase.RUN and record.gen:
                    gone = world._replace(records=_with(world.records, job, None))
                    yield Step(f"the record of job {job} is deleted by hand", self.intern(gone), 0, 1)

    def _speech(self, world: World, kinds: frozenset[str], asks: frozenset[str]) -> Iterator[tuple[int, agents.Said]]:
        for v in world.sky.vms:
            record = world.records[v.job]
            if record is not None and (self.ec2 or v.life is not Life.COMING):
                for said in agents.steps(world.sky, v, record, world.papers[v.job], self.stack, kinds, asks):
                    yield v.job, said
        yield from agents.node_steps(world.sky, world.records, world.papers, world.alloc, self.stack)
        for job, record in enumerate(world.records):
            if record is not None and (done := agents.commit(world.sky, record, world.papers[job], job)):
                yield job, done

    def _said(self, world: World, job: int, said: agents.Said) -> int:
        return self.intern(world._replace(sky=said.sky, papers=_with(world.papers, job, said.papers)))

    def _wishes(self, world: World, job: int, record: Record, asks: frozenset[str]) -> Iterator[Step]:
        papers = world.papers[job]
        known = {*record.asks_done, *(ask.id for ask in papers.asks)}
        possible = {
            "swap": Ask("s", AskKind.SWAP, NOW, rank=0),
            "move": Ask("m", AskKind.MOVE, NOW, zone=self.story.zones[-1]),
            "pause": Ask("p", AskKind.PAUSE, NOW),
            "cancel": Ask("c", AskKind.CANCEL, NOW),
        }
        for kind, ask in possible.items():
            if kind in asks and ask.id not in known:
                yield Step(f"somebody asks: {kind}", self._asked(world, job, ask), 0, 0, 1)
        if "m" in record.asks_done and record.move is not None and "n" not in known:
            yield Step("somebody takes the move back", self._asked(world, job, Ask("n", AskKind.MOVE, NOW)), 0)
        if "p" in record.asks_done and "r" not in known:
            yield Step("somebody asks: resume", self._asked(world, job, Ask("r", AskKind.RESUME, NOW)), 0)

    def _asked(self, world: World, job: int, ask: Ask) -> int:
        papers = world.papers[job]
        return self.intern(world._replace(papers=_with(world.papers, job, papers._replace(asks=(*papers.asks, ask)))))

    # -- what a round does

    def round_moves(self, number: int, world: int, faults: bool) -> list[Step]:
        key = (number, world, faults)
        found = self._moves.get(key)
        if found is None:
            found = self._moves[key] = [self._born(step) for step in self._round(number, world, faults)]
        return found

    def _born(self, step: Step) -> Step:
        """A round whose record was old when it decided can write nothing any more: it is over."""
        at = self.rounds[step.round]
        lost = at is not None and at.kind == "write" and at.data[0] != self.worlds[step.world][0][at.job]
        return step._replace(round=0) if lost and self.story.cas else step

    def _round(self, number: int, world: int, faults: bool) -> Iterator[Step]:
        at = self.rounds[number]
        if at is None:
            for job in range(self.story.jobs):
                yield from self._read(Round("read", job, ()), world, faults)
                yield from self._sweep(job, world)
            return
        steps: dict[str, Callable[[Round, int, bool], Iterator[Step]]] = {
            "read": self._read,
            "write": self._write,
            "grant": self._grant,
            "call": self._call,
            "tidy": self._tidy,
            "orphan": self._orphan,
        }
        yield from steps[at.kind](at, world, faults)

    def _read(self, at: Round, number: int, faults: bool) -> Iterator[Step]:
        """The rest of the shipped ``READS``, and what the round makes of it."""
        got = dict(zip(passes.READS, at.data, strict=False))
        for read in passes.READS[len(at.data) :]:
            got[read] = self._value(read, at.job, number)
        record: int = got[Read.RECORD]
        if self.records[record] is None:
            return
        alloc, node = got[Read.ALLOC]
        looked = passes.READS.index(Read.LISTING) < len(at.data)
        seen: set[int] = set()
        for say, fault, moment, answered in self._views(number, at, faults):
            look = got[Read.LISTING][0] if looked else self._look(number, answered)
            ref = Ref(at.job, record, got[Read.FACTS], alloc, look, moment, True, self._idle(record, node))
            after = self.future(ref)
            if after and after not in seen:  # a fault that changes nothing is no other story
                seen.add(after)
                stale = (
                    f", having read {', '.join(r.value for r in passes.READS[: len(at.data)])} earlier"
                    if at.data
                    else ""
                )
                tidies = next(self._tidy(found, number, faults)) if (found := self._is_tidy(after)) else None
                world, then = (number, after) if tidies is None else (tidies.world, 0)
                does = "" if tidies is None else ", and tidies what is over"
                yield Step(f"a round of job {at.job} looks{say}{stale}{does}", world, then, fault)

    def _is_tidy(self, number: int) -> Round | None:
        found = self.rounds[number]
        return found if found is not None and found.kind == "tidy" else None

    def _idle(self, record: int, node: N | None) -> N | None:
        """The node as the round read it: it looks for idle nodes only where a rank is vacant."""
        found = self.records[record]
        vacant = found is not None and any(rank.cur is None for rank in found.ranks)
        return N(boot=node.boot) if node is not None and vacant else None

    def _views(self, number: int, at: Round, faults: bool) -> Iterator[tuple[str, int, Moment, frozenset[str]]]:
        """How a look may come out: (say, cost, which deadlines have passed, which zones answered)."""
        now = self._now(number, at.job)
        yield "", 0, now, self.zones
        for moment in self._natural(number, at.job):
            yield f" {moment.value}", 0, moment, self.zones
        if not faults:
            return
        for moment in Moment:
            if moment.name in self.story.kinds:
                yield f" {moment.value}", 1, moment, self.zones
        if "blind" in self.story.kinds:
            for zone in self.story.zones:
                yield f"; zone {zone} does not answer", 1, now, self.zones - {zone}
            if len(self.zones) > 1:
                yield "; no zone answers", 1, now, NONE

    def _now(self, number: int, job: int) -> Moment:
        """How late it is for the machine under notice that is nearest to its end."""
        world = self.world(number)
        late = max((v.noticed for v in world.sky.vms if v.job == job and slot_of(world.records[job], v)), default=0)
        return {2: Moment.URGENT, 3: Moment.PAST}.get(late, Moment.FRESH)

    def _natural(self, number: int, job: int) -> Iterator[Moment]:
        """Deadlines that pass without anything being wrong: those of what is under way."""
        world = self.world(number)
        record = world.records[job]
        if record is None:
            return
        mine = [(v, slot) for v in world.sky.vms if v.job == job and (slot := slot_of(record, v)) is not None]
        if record.dry_since is not None:
            yield Moment.DRY
        if any(rank.refused for rank in record.ranks):
            yield Moment.THAWED
        if record.phase is Phase.HOLD and record.hold_until is not None:
            yield Moment.PAST
        if _waits_to_free(record, world.sky):
            yield Moment.FREE
        hung = [slot for v, slot in mine if v.hung]
        if world.sky.node is not None and world.sky.node.hung:
            hung += [s for i in range(len(record.ranks)) for s in live_slots(record, i) if s.node]
        if any(slot.state is SlotState.INTENT for slot in hung):
            yield Moment.BOOT
        if any(slot.state is SlotState.MEMBER for slot in hung):
            yield Moment.SILENT if record.roll is None else Moment.ROLL

    def _look(self, number: int, answered: frozenset[str]) -> int:
        key = (self.worlds[number][3], answered)
        found = self._looks.get(key)
        if found is None:
            home = self.story.zones[0]
            found = self._looks[key] = self.listings(listing(self.skies[key[0]], answered, self.ec2, home))
        return found

    # -- passes

    def make(self, ref: Ref) -> Pass:
        record = self.records[ref.record]
        assert record is not None
        papers = self.papers[ref.papers]
        seen = Seen(
            stack=self.stack,
            spec=self.spec if record.phase in (Phase.RUN, Phase.HOLD) else None,
            listing=self.listings[ref.listing],
            now=clock(ref.moment),
            facts=tuple(sorted(papers.facts, key=lambda f: f.key())),
            asks=papers.asks if record.phase in (Phase.RUN, Phase.HOLD) else (),
            results=ref.results,
            alloc=self.allocs[ref.alloc],
            hellos=hello(ref.node, self.story.zones[0]),
            progress=progress(papers.newest),
            save_s=1.0,
            grants_first=ref.first,
            times=times(ref.moment),
        )
        return Pass(record, seen)

    def future(self, ref: Ref) -> int:
        """The round that holds this, by what it will do; 0 where that is nothing."""
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
                return self.rounds(Round("write", ref.job, (ref.record, after, 0, None, why)))
            moment = Moment.FRESH if ref.moment in _ONCE else ref.moment
            then = ref._replace(record=after, first=True, moment=moment)
            wrote = at.wrote(decision.record)
            late = then if wrote.wants_hellos and self.story.static else None
            done = 0 if late else self.future(then)
            return self.rounds(Round("write", ref.job, (ref.record, after, done, late, why)))
        if at.todo is Todo.GRANT:
            assert decision.grants is not None
            alloc = self.allocs(plain_alloc(decision.grants))
            why = rules.released(at, decision.grants)
            return self.rounds(Round("grant", ref.job, (ref.alloc, alloc, ref, why)))
        if at.todo is Todo.REST:
            return self._tidies(ref, at)
        tidy = 0  # whoever looks next tidies: what is over stays over, so a stale tidying is no other story
        keep = ref if any(isinstance(a, InsertVm | CreateDisk) for a in at.calls) else None
        return self.rounds(Round("call", ref.job, (ref.record, at.calls, (), keep, tidy)))

    def _tidies(self, ref: Ref, at: Pass) -> int:
        stale, asks = frozenset(at.decision.stale), frozenset(ask.id for ask in at.asks_over)
        return self.rounds(Round("tidy", ref.job, (stale, asks))) if stale or asks else 0

    def _write(self, at: Round, number: int, faults: bool) -> Iterator[Step]:
        before, after, done, late, why = at.data
        world = self.world(number)
        old, new = self.records[before], self.records[after]
        assert old is not None and new is not None
        if world.records[at.job] != old and self.story.cas:
            return  # lost; by then it is over
        wrong = why or rules.written(world, at.job, world.records[at.job] or old, new)
        written = self.intern(self._forgets(world._replace(records=_with(world.records, at.job, new)), at.job))
        if late is not None:
            done = self.future(late._replace(node=self._idle(after, world.sky.node)))
        yield Step(f"the round writes the record of job {at.job}: {rules.change(old, new)}", written, done, why=wrong)

    def _forgets(self, world: World, job: int) -> World:
        """Failed operations of attempts that nobody asks for any more are not looked up again."""
        record = world.records[job]
        assert record is not None
        live = {(i, s.attempt) for i, r in enumerate(record.ranks) for s in (r.cur, r.next) if s is not None}
        ops = frozenset(o for o in world.sky.ops if isinstance(o.action, InsertVm) and _live(o.action, job, live))
        return world if ops == world.sky.ops else world._replace(sky=world.sky._replace(ops=ops))

    def _grant(self, at: Round, number: int, faults: bool) -> Iterator[Step]:
        before, after, ref, why = at.data
        records, papers, alloc, sky = self.worlds[number]
        if alloc != before and self.story.cas:
            lost = self.future(ref._replace(alloc=alloc, first=False))
            yield Step("the round loses the race for grants, and looks at what is there", number, lost)
            return
        wrong = why or rules.granted(self.world(number), self.allocs[after], self.stack)
        done = self.future(ref._replace(alloc=after, first=True))
        say = f"the round writes grants: {rules.grants(self.allocs[after])}"
        yield Step(say, self.worlds((records, papers, after, sky)), done, why=wrong)

    def _call(self, at: Round, number: int, faults: bool) -> Iterator[Step]:
        _, todo, results, _, _ = at.data
        world = self.world(number)
        kinds = self.story.kinds if faults else NONE
        for index, action in enumerate(todo):
            rest = (*todo[:index], *todo[index + 1 :])
            wrong = rules.called(world, at.job, action)
            for done in clouds.perform(world.sky, action, self.ec2, kinds):
                after = self.intern(world._replace(sky=done.sky))
                got = results if done.kind is Class.ACCEPTED else (*results, Result(action, done.kind))
                on = self._after_call(at, rest, got)
                why = wrong or done.why or rules.swept(world, done.sky, at.job, action)
                yield Step(f"the round {done.say}", after, on, done.fault, 0, why)

    def _after_call(self, at: Round, rest: tuple[Action, ...], results: tuple[Result, ...]) -> int:
        record, _, _, ref, tidy = at.data
        if rest:
            return self.rounds(Round("call", at.job, (record, rest, results, ref, tidy)))
        if not results or ref is None:
            return int(tidy)
        made = {result.action for result in results}
        calls = self.make(ref).calls
        every = tuple(Result(action, Class.ACCEPTED) for action in calls if action not in made)
        return self.future(ref._replace(results=(*ref.results, *every, *results)))

    def _tidy(self, at: Round, number: int, faults: bool) -> Iterator[Step]:
        stale, asks = at.data
        world = self.world(number)
        papers = world.papers[at.job]
        kept = tuple(ask for ask in papers.asks if ask.id not in asks)
        left = papers._replace(facts=papers.facts - stale, asks=kept)
        after = self.intern(world._replace(papers=_with(world.papers, at.job, left)))
        yield Step("the round tidies what is over", after, 0)

    # -- the sweep: evidence first, then the record

    def _sweep(self, job: int, number: int) -> Iterator[Step]:
        if self.story.lost_records:
            yield from self._orphan(Round("orphan", job, ()), number, False)

    def _orphan(self, at: Round, number: int, faults: bool) -> Iterator[Step]:
        """The listing first; then the shipped sweep reads the grants and the record, and ends what has none."""
        world = self.world(number)
        if not at.data:
            if world.records[at.job] is None:
                look = self._look(number, self.zones)
                yield Step("the sweep lists the cloud", number, self.rounds(Round("orphan", at.job, (look,))))
            return
        desk = _Desk(world, at.job)
        _orphans(desk, _Clock(), self.listings[at.data[0]], [JOBS[at.job]], [])  # type: ignore[arg-type]
        if desk.written is not None:
            ended = world._replace(records=_with(world.records, at.job, plain(desk.written, None, NOW)))
            why = "S5: the sweep ends a job that has a record" if world.records[at.job] is not None else ""
            yield Step(f"the sweep ends job {at.job}, which has no record", self.intern(ended), 0, why=why)


class _Clock:
    scale = 1.0

    def now(self) -> float:
        return NOW


class _Desk:
    """As much of a store as the sweep asks of it."""

    def __init__(self, world: World, job: int) -> None:
        self.world, self.job = world, job
        self.written: Record | None = None

    def read_alloc(self) -> Held[Alloc]:
        return Held(self.world.alloc, "")

    def read_record(self, job: str) -> Held[Record] | None:
        found = self.world.records[self.job]
        return None if found is None else Held(found, "")

    def create_record(self, record: Record) -> bool:
        if self.world.records[self.job] is not None:
            return False
        self.written = record
        return True

    def cas_record(self, record: Record, token: str) -> str:
        self.written = record
        return token

    def set_active(self, job: str) -> None:
        """Every job gets its rounds here."""


def _with(things: tuple[Any, ...], index: int, thing: object) -> tuple[Any, ...]:
    return (*things[:index], thing, *things[index + 1 :])


def _live(action: InsertVm, job: int, live: set[tuple[int, int]]) -> bool:
    return action.job != JOBS[job] or (action.rank, action.attempt) in live


def _waits_to_free(record: Record, sky: Sky) -> bool:
    """A superseded machine that holds the disk, and may be given a moment to unmount."""
    return any(rank.cur is not None and rank.cur.cause in ("notice", "swap") for rank in record.ranks) and any(
        d.user for d in sky.disks
    )


def _stack(story: Story) -> StackState:
    prices = {zone: Price(on_demand=1.0, spot=0.3 + 0.01 * i) for i, zone in enumerate(story.zones)}
    pools = [PoolState(POOL, "spot", "m", story.zones, 1, story.cap, 0, 1, "pd", prices)]
    if story.static:
        home = story.zones[0]
        node = StaticNode(NODE, home)
        pools.append(PoolState(STATIC_POOL, "static", "m", (home,), 1, 1, 0, 1, "pd", prices, nodes=(node,)))
    return StackState(STACK, "gcp", "p", "r", "b", tuple(pools), boot_deadline_s=BOOT_S)


def _spec(story: Story) -> JobSpec:
    return JobSpec(
        "j",
        ("x",),
        story.ranks,
        policy="spot",
        checkpoint=Checkpoint(replicated=story.replicated),
        retry=Retry(crashes=1),
        spread=story.spread,
    )
