"""What a round does: the shipped reads and passes, one step at a time. It may stall or die between any two."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from spotkeeper.contract.cloud import Action, InsertVm, Result, ResultKind
from spotkeeper.contract.record import Phase, Record, SlotState
from spotkeeper.reconcile.controller import steps as passes
from spotkeeper.reconcile.controller.steps import ReadStep
from spotkeeper.reconcile.controller.tick import _orphans
from tests.model import orphans, rules
from tests.model import sky as clouds
from tests.model.ground import Ref, Round, Step
from tests.model.left import Left
from tests.model.story import Story
from tests.model.values import JOBS, NOW, Moment, Sky, World, changed, live_slots, plain, slot_of

NONE: frozenset[str] = frozenset()
View = tuple[str, int, Moment, frozenset[str]]  # what to say, its cost, which deadlines passed, who answered


class Rounds(Left):
    """The steps of rounds, in worlds by number."""

    def __init__(self, story: Story) -> None:
        super().__init__(story)
        self._moves: dict[tuple[int, int, str], list[Step]] = {}
        self._when: dict[tuple[int, int, int], tuple[Moment, ...]] = {}

    def relearn(self) -> None:
        super().relearn()
        self._moves.clear()

    def round_moves(self, number: int, world: int, kind: str = "") -> list[Step]:
        """What a round may do in a world: as things are, or by this one kind of fault."""
        key = (number, world, kind)
        found = self._moves.get(key)
        if found is None:
            every = self._round(number, world, frozenset({kind}) if kind else NONE)
            found = self._moves[key] = [self._born(step) for step in every if (step.fault > 0) == (kind != "")]
        return found

    def _round(self, number: int, world: int, kinds: frozenset[str]) -> Iterator[Step]:
        at = self.rounds[number]
        if at is None:
            for job in range(self.story.jobs):
                yield from self._read(Round("read", job, ()), world, kinds)
                yield from self._sweep(job, world)
            return
        steps: dict[str, Callable[[Round, int, bool], Iterator[Step]]] = {
            "read": self._read,
            "tick": self._read,
            "write": self._write,
            "grant": self._grant,
            "call": self._call,
            "report": self._report,
            "tidy": self._tidy,
            "orphan": self._orphan,
        }
        yield from steps[at.kind](at, world, kinds)

    def _value(self, read: ReadStep, job: int, world: int, got: tuple[Any, ...] = ()) -> object:
        """What a read gives a round that has ``got`` what it read before."""
        records, papers, allocation, sky = self.worlds[world]
        if read is ReadStep.RECORD:
            return records[job]
        if read is ReadStep.FACTS:
            at = passes.READS.index(ReadStep.RECORD)
            return self.listened(got[at], papers[job]) if at < len(got) else papers[job]
        if read is ReadStep.ALLOCATION:
            return (allocation, self.skies[sky].machine) if self.story.static else (allocation, None)
        return (self._look(world, self.zones), Moment.FRESH)

    def _read(self, at: Round, number: int, kinds: frozenset[str]) -> Iterator[Step]:
        """The rest of the shipped ``READS``, and what the round makes of it."""
        order = passes.TICK_READS if at.kind == "tick" else passes.READS
        got = dict(zip(order, at.data, strict=False))
        looked = ReadStep.LISTING in got
        for read in order[len(at.data) :]:
            got[read] = self._value(read, at.job, number, tuple(got.values()))
        record: int = got[ReadStep.RECORD]
        if self.records[record] is None:
            return
        allocation, machine = got[ReadStep.ALLOCATION]
        seen: set[int] = set()
        for say, fault, moment, answered in self._views(number, at, kinds):
            look = got[ReadStep.LISTING][0] if looked else self._look(number, answered)
            ref = Ref(at.job, record, got[ReadStep.FACTS], allocation, look, moment, True, self._idle(machine))
            after = self.future(ref)
            if after in seen:  # a fault that changes nothing is no other story
                continue
            seen.add(after)
            read = ", ".join(r.value for r in order[: len(at.data)])
            probing = f"a round of job {at.job} looks{say}{f', having read {read} earlier' if read else ''}"
            found = self.rounds[after]
            if found is not None and found.kind != "tidy":
                yield Step(probing, number, after, fault)
            elif (tidied := self._tidied_by(at.job, number, record, found)) != number:
                yield Step(f"{probing}, and tidies what is over", tidied, 0, fault)

    def _tidied_by(self, job: int, number: int, record: int, found: Round | None) -> int:
        """The world when a round that rests has thrown away facts, and requests that its record has taken in."""
        stale = found.data[0] if found is not None else NONE
        world, of = self.world(number), self.records[record]
        assert of is not None
        papers = world.papers[job]
        requests = tuple(
            request for request in papers.requests if request.id not in of.requests_done or of.phase in rules.OVER
        )
        left = papers._replace(facts=papers.facts - stale, requests=requests)
        return number if left == papers else self.intern(world._replace(papers=changed(world.papers, job, left)))

    def _views(
        self, number: int, at: Round, kinds: frozenset[str]
    ) -> Iterator[tuple[str, int, Moment, frozenset[str]]]:
        """How a look may come out: (say, cost, which deadlines have passed, which zones answered)."""
        now, *natural = self._times(number, at.job)
        yield "", 0, now, self.zones
        for moment in natural:
            yield f" {moment.value}", 0, moment, self.zones
        for moment in Moment:
            if moment.name in kinds:
                yield f" {moment.value}", 1, moment, self.zones
        if "blind" in kinds:
            for zone in self.story.zones:
                yield f"; zone {zone} does not answer", 1, now, self.zones - {zone}
            if len(self.zones) > 1:
                yield "; no zone answers", 1, now, NONE

    def _times(self, number: int, job: int) -> tuple[Moment, ...]:
        """How late it is, and the deadlines that may have passed although nothing is wrong."""
        records, _, _, sky = self.worlds[number]
        key = (job, records[job], sky)
        found = self._when.get(key)
        if found is None:
            world = self.world(number)
            late = max((v.noticed for v in world.sky.vms if v.job == job and slot_of(world.records[job], v)), default=0)
            now = Moment.PAST if late == 2 else Moment.FRESH
            found = self._when[key] = (now, *(each for each in self._natural(world, job) if each is not now))
        return found

    def _natural(self, world: World, job: int) -> Iterator[Moment]:
        """Deadlines that pass without anything being wrong: those of what is under way.

        Whether a notice's deadline is near is no part of a world: nobody but a look can tell, and clocks differ.
        """
        record = world.records[job]
        if record is None:
            return
        mine = [(v, slot) for v in world.sky.vms if v.job == job and (slot := slot_of(record, v)) is not None]
        if max((v.noticed for v, _ in mine), default=0) == 1:
            yield Moment.URGENT
        if record.dry_since is not None:
            yield Moment.DRY
        if record.move is not None and (
            record.move.silent_since is not None or (record.leaving and record.move.bucket)
        ):
            yield Moment.PAST
        if any(node.refused for node in record.nodes):
            yield Moment.THAWED
        copying = record.phase is Phase.RUN and record.trial is not None and record.trial.reached
        if copying or (record.phase is Phase.HOLD and record.hold_until is not None):
            yield Moment.PAST
        if _waits_to_free(record, world.sky):
            yield Moment.FREE
        hung = [slot for v, slot in mine if v.hung]
        if world.sky.machine is not None and world.sky.machine.hung:
            hung += [s for i in range(len(record.nodes)) for s in live_slots(record, i) if s.machine]
        if any(slot.state is SlotState.INTENT for slot in hung):
            yield Moment.BOOT
        if any(slot.state is SlotState.MEMBER for slot in hung):
            yield Moment.SILENT if record.roll is None else Moment.ROLL

    def _write(self, at: Round, number: int, kinds: frozenset[str]) -> Iterator[Step]:
        before, after, done, why = at.data
        world = self.world(number)
        old, new = self.records[before], self.records[after]
        assert old is not None and new is not None
        if world.records[at.job] != old and self.story.cas:
            return  # lost; by then it is over
        wrong = why or rules.written(world, at.job, world.records[at.job] or old, new)
        written = self.intern(self._forgets(world._replace(records=changed(world.records, at.job, new)), at.job))
        yield Step(f"the round writes the record of job {at.job}: {rules.change(old, new)}", written, done, why=wrong)

    def _forgets(self, world: World, job: int) -> World:
        """Failed operations of attempts that nobody asks for any more are not looked up again."""
        record = world.records[job]
        assert record is not None
        live = {(i, s.attempt) for i, r in enumerate(record.nodes) for s in (r.cur, r.next) if s is not None}
        ops = frozenset(o for o in world.sky.ops if isinstance(o.action, InsertVm) and _live(o.action, job, live))
        return world if ops == world.sky.ops else world._replace(sky=world.sky._replace(ops=ops))

    def _grant(self, at: Round, number: int, kinds: frozenset[str]) -> Iterator[Step]:
        before, after, ref, why = at.data
        records, papers, allocation, sky = self.worlds[number]
        if ref is not None and allocation != before and self.story.cas:
            lost = self.future(ref._replace(allocation=allocation, first=False))
            yield Step("the round loses the race for grants, and looks at what is there", number, lost)
            return
        wrong = why or rules.granted(self.world(number), self.allocations[after], self.stack)
        done = 0 if ref is None else self.future(ref._replace(allocation=after, first=True))
        say = f"the round writes grants: {rules.grants(self.allocations[after])}"
        yield Step(say, self.place(records, papers, after, sky), done, why=wrong)

    def _call(self, at: Round, number: int, kinds: frozenset[str]) -> Iterator[Step]:
        _, todo, results, _, _ = at.data
        world = self.world(number)
        for index, action in enumerate(todo):
            rest = (*todo[:index], *todo[index + 1 :])
            wrong = rules.called(world, at.job, action)
            for done in clouds.perform(world.sky, action, self.ec2, kinds):
                after = self.intern(world._replace(sky=done.sky))
                got = results if done.kind is ResultKind.ACCEPTED else (*results, Result(action, done.kind))
                on = self._after_call(at, rest, got)
                why = wrong or done.why or rules.swept(world, done.sky, at.job, action)
                yield Step(f"the round {done.say}", after, on, done.fault, 0, why)

    def _after_call(self, at: Round, rest: tuple[Action, ...], results: tuple[Result, ...]) -> int:
        record, _, _, keep, tidy = at.data
        if rest:
            return self.rounds(Round("call", at.job, (record, rest, results, keep, tidy)))
        if not results or keep is None:
            return int(tidy)
        if isinstance(keep, Ref):
            return self.answered(keep, self.make(keep), results)
        return next(number for kind, number in keep if kind is results[0].kind)

    def _report(self, at: Round, number: int, kinds: frozenset[str]) -> Iterator[Step]:
        """A compare-and-swap of the search's state: the next pass reads what is there then, even if it is lost."""
        before, after, ref = at.data
        world = self.world(number)
        won = world.papers[at.job].sweep == before
        told = world.papers[at.job]._replace(sweep=after if won else world.papers[at.job].sweep)
        then = self.future(ref._replace(papers=self.papers(self.papers[ref.papers]._replace(sweep=told.sweep))))
        on = self.intern(world._replace(papers=changed(world.papers, at.job, told)))
        yield Step("the round reports to the search" + ("" if won else ", too late: it looks again"), on, then)

    def _tidy(self, at: Round, number: int, kinds: frozenset[str]) -> Iterator[Step]:
        record, *_ = self.worlds[number]
        yield Step("the round tidies what is over", self._tidied_by(at.job, number, record[at.job], at), 0)

    def _sweep(self, job: int, number: int) -> Iterator[Step]:
        if self.story.lost_records:
            yield from self._orphan(Round("orphan", job, ()), number, NONE)

    def _orphan(self, at: Round, number: int, kinds: frozenset[str]) -> Iterator[Step]:
        """The listing first; then the shipped sweep reads the grants and the record, and ends what has none."""
        world = self.world(number)
        if not at.data:
            if world.records[at.job] is None:
                look = self._look(number, self.zones)
                yield Step("the sweep lists the cloud", number, self.rounds(Round("orphan", at.job, (look,))))
            return
        desk = orphans.Desk(world, at.job)
        _orphans(desk, orphans.Clock(), self.listings[at.data[0]], [JOBS[at.job]], [])  # type: ignore[arg-type]
        if desk.written is not None:
            ended = world._replace(records=changed(world.records, at.job, plain(desk.written, None, NOW)))
            why = "S5: the sweep ends a job that has a record" if world.records[at.job] is not None else ""
            yield Step(f"the sweep ends job {at.job}, which has no record", self.intern(ended), 0, why=why)


def _live(action: InsertVm, job: int, live: set[tuple[int, int]]) -> bool:
    return action.job != JOBS[job] or (action.node, action.attempt) in live


def _waits_to_free(record: Record, sky: Sky) -> bool:
    """A superseded machine that holds the disk, and may be given a moment to unmount."""
    return any(node.cur is not None and node.cur.cause in ("notice", "swap") for node in record.nodes) and any(
        d.user for d in sky.disks
    )
