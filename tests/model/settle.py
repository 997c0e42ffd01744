"""Convergence (L1, L2, L6): from any world, with no more faults and fair rounds, all ends well. Memoised by world.

Rounds that were under way are dead; machines under notice go at their deadline; every job gets a round, the
sweep runs, every agent moves; and when nothing moves any more but all is not well, time passes.
"""

from __future__ import annotations

from collections.abc import Iterator

from spotkeeper.contract.record import Hold, Phase, Record
from tests.model import agents
from tests.model import sky as clouds
from tests.model.ground import Ref, Round
from tests.model.machine import Machine
from tests.model.rounds import NONE
from tests.model.values import JOBS, WORSE, Life, Moment, N, World, other_reports

STEPS = 100  # shipped code needs at most 24
PASSES = 24
# In this order, one at a time, while things are not well: what a patient clock would bring.
LATER = (
    Moment.THAWED,
    Moment.FREE,
    Moment.PAST,
    Moment.SLOW,
    Moment.BOOT,
    Moment.DISK,
    Moment.SILENT,
    Moment.ROLL,
    Moment.DRY,
    Moment.LAST,
)


class Settler:
    """Remembers the worlds from which all ends well."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.good: set[int] = set()

    def why_not(self, number: int) -> str:
        """'' where all ends well; else what is wrong in the end, or on the way."""
        path: list[int] = []
        seen: set[int] = set()
        for _ in range(STEPS):
            if number in self.good:
                break
            path.append(number)
            seen.add(number)
            after, why = self._fair(number, Moment.FRESH)
            if why:
                return f"while all is calm: {why}"
            if after == number:
                wrong = self.unwell(number)
                if not wrong:
                    break
                after, why = self._later(number, seen)
                if why:
                    return f"while all is calm: {why}"
                if after == number:
                    return wrong
            number = after
        else:
            return f"L6: does not come to rest: {self.unwell(number)}"
        self.good.update(path)
        return ""

    def _later(self, number: int, seen: set[int]) -> tuple[int, str]:
        for moment in LATER:
            if moment in (Moment.SILENT, Moment.ROLL) and not self._silent(number):
                continue
            after, why = self._fair(number, moment)
            if after not in seen or why:
                return after, why
        return number, ""

    def _silent(self, number: int) -> bool:
        world = self.machine.world(number)
        machine = world.sky.machine
        rolled = any(record is not None and record.roll is not None for record in world.records)
        hung = any(v.hung for v in world.sky.vms) or (machine is not None and (machine.hung or not machine.up))
        return rolled or hung

    def _fair(self, number: int, moment: Moment) -> tuple[int, str]:
        number = self.machine.intern(self.machine.ordered(self.machine.world(number)))
        for job in range(self.machine.story.jobs):
            number, why = self._round(number, job, moment)
            if why:
                return number, why
        return self._others(number)

    def _round(self, number: int, job: int, moment: Moment) -> tuple[int, str]:
        machine = self.machine
        records, papers, allocation, sky = machine.worlds[number]
        if machine.records[records[job]] is None:
            return self._orphan(number, job)
        look = machine._look(number, machine.zones)
        held = machine._idle(machine.skies[sky].machine)
        at = machine.future(Ref(job, records[job], papers[job], allocation, look, moment, True, held))
        for _ in range(PASSES):
            if not at:
                return number, ""
            found = machine.rounds[at]
            assert found is not None
            step = machine.round_moves(at, number)[0]
            if step.why:
                return number, step.why
            number, at = step.world, step.round
        return number, ""  # out of passes: the next round goes on

    def _orphan(self, number: int, job: int) -> tuple[int, str]:
        look = Round("orphan", job, (self.machine._look(number, self.machine.zones),))
        for step in self.machine._orphan(look, number, NONE):
            return step.world, step.why
        return number, ""

    def _others(self, number: int) -> tuple[int, str]:
        """The cloud moves on, and every agent does what it would."""
        machine = self.machine
        world = machine.world(number)
        for v in sorted(world.sky.vms):
            world = world._replace(sky=self._moved(world.sky, v))
        if world.sky.machine is not None and (not world.sky.machine.up or world.sky.machine.hung):
            static = world.sky.machine
            fresh = static._replace(up=True, hung=False, boot=static.boot + 1, alive=False, gen=0)
            world = world._replace(sky=world.sky._replace(machine=fresh))
        for v in sorted(world.sky.vms):
            world, why = self._obeys(world, v.uid)
            if why:
                return number, why
        for _ in range(4):
            steps = list(machine._speech(world._replace(sky=world.sky._replace(vms=frozenset())), NONE, NONE))
            mine = [(job, said) for job, said in steps if "static" in said.say]
            if not mine:
                break
            job, said = mine[0]
            if said.why:
                return number, said.why
            papers = tuple(said.papers if j == job else p for j, p in enumerate(world.papers))
            world = world._replace(sky=world.sky._replace(machine=said.sky.machine), papers=papers)
        for job, record in enumerate(world.records):
            done = agents.commit(world.sky, record, world.papers[job], job) if record is not None else None
            if done is not None:
                papers = tuple(done.papers if j == job else p for j, p in enumerate(world.papers))
                world = world._replace(sky=done.sky, papers=papers)
        for job, papers in enumerate(world.papers):
            if papers.sweep is not None and papers.sweep.trial(0).values and not papers.sweep.trial(1).values:
                told = other_reports(papers, WORSE)
                world = world._replace(papers=tuple(told if j == job else p for j, p in enumerate(world.papers)))
        return machine.intern(world), ""

    def _moved(self, sky: clouds.Sky, v: clouds.V) -> clouds.Sky:
        if v.life is Life.COMING:
            return clouds.put(sky, v, life=Life.RUNNING)
        if v.life is Life.STOPPING:
            return clouds.gone(sky, v, self.machine.ec2)
        if v.life is Life.DEAD:
            return sky._replace(vms=sky.vms - {v})
        return clouds.put(sky, v, life=Life.STOPPING) if v.noticed else sky

    def _obeys(self, world: World, uid: str) -> tuple[World, str]:
        """An agent does all it would, but for powering off: rounds must collect a machine that cannot obey."""
        for _ in range(6):
            v = world.sky.vm(uid)
            if v is None or (record := world.records[v.job]) is None or v.life is Life.COMING:
                break
            said = next(
                (
                    said
                    for said in self._would(world, v, record)
                    if "powers off" not in said.say and "finished" not in said.say
                ),
                None,
            )
            if said is None:
                break
            if said.why:
                return world, said.why
            papers = tuple(said.papers if j == v.job else p for j, p in enumerate(world.papers))
            world = world._replace(sky=said.sky, papers=papers)
        return world, ""

    def _would(self, world: World, v: clouds.V, record: Record) -> Iterator[agents.Said]:
        stack, papers = self.machine.stack, world.papers[v.job]
        story = self.machine.story
        return agents.steps(world.sky, v, record, papers, stack, NONE, NONE, self.machine.blinds, story.mirror)

    # -- what "well" means

    def unwell(self, number: int) -> str:
        world = self.machine.world(number)
        for job, record in enumerate(world.records):
            why = "L6: a job without a record has things" if record is None and _things(world, job) else ""
            why = why or (self._job(world, job, record) if record is not None else "")
            if why:
                return why
        return ""

    def _job(self, world: World, job: int, record: Record) -> str:
        if record.over:
            left = _things(world, job, disks=not record.keep_disks)
            return (
                ""
                if record.phase is Phase.DONE and not left
                else f"L2: ended ({record.phase.value}), but {left or 'not done'}"
            )
        if record.phase is Phase.HOLD:
            left = _things(world, job, disks=False)
            return (
                ""
                if (record.hold is Hold.PAUSE or self._recalled(world, job, record)) and not left
                else f"L5: on hold ({record.hold}), with {left or 'nothing'}"
            )
        return self._runs(world, job, record)

    def _runs(self, world: World, job: int, record: Record) -> str:  # noqa: PLR0911
        if world.sky.dead and record.zone == world.sky.dead:
            return ""  # its disks had arrived there: it waits for the region
        found = agents.gang(world.sky, record, job)
        mine = {v.uid for v in world.sky.vms if v.job == job}
        if not found or not mine <= {one.uid for one in found}:
            if self._waits_for_room(world, job, record) or (self.machine.story.cap == 0 and not mine):
                return ""
            return f"L1: not all train: generation {record.gen}, stop {record.stop}, machines {sorted(mine)}"
        if any(not isinstance(one, N) and one.hung for one in found):
            return "L1: a machine hangs, and nobody replaces it"
        if world.papers[job].newest != record.gen:
            return "L1: they train, but nobody can write a checkpoint"
        if record.asked_zone is not None and not world.sky.dead:
            return "L5: a requested move neither begins nor ends"
        numbers = {(i, node.disk) for i, node in enumerate(record.nodes)}
        if any((d.node, d.number) not in numbers for d in world.sky.disks if d.job == job):
            return "L6: a disk is left over"
        if any(p.job == job for p in world.sky.snaps):
            return "L6: a snapshot is left over"
        live = {(i, s.attempt) for i, node in enumerate(record.nodes) for s in (node.cur, node.next) if s}
        held = {(g.node, g.attempt) for g in world.allocation.grants if g.job == JOBS[job]}
        # A grant of a machine in a silent region stays.
        return (
            ""
            if live == held or (world.sky.dead and live < held)
            else f"S8: grants {sorted(held)} of attempts {sorted(live)}"
        )

    def _recalled(self, world: World, job: int, record: Record) -> bool:
        """Whether the job gave its machines to one that is still there."""
        other = world.records[1 - job] if self.machine.story.recall else None
        return record.hold is Hold.QUEUE and other is not None and not other.over

    def _waits_for_room(self, world: World, job: int, record: Record) -> bool:
        """Another job has all that the stack may have; this one holds nothing that it does not use."""
        if self.machine.story.jobs == 1 or (self.machine.story.recall and job == 1):
            return False
        others = sum(g.job != JOBS[job] for g in world.allocation.grants)
        room = self.machine.story.cap + (1 if self.machine.story.static else 0)
        live = sum(slot is not None for node in record.nodes for slot in (node.cur, node.next))
        held = sum(g.job == JOBS[job] for g in world.allocation.grants)
        lent, machine = agents.grant_of(world.allocation), world.sky.machine
        if record.reason.startswith("waiting for static machine") and lent is not None and lent.job != JOBS[job]:
            # Its newest checkpoint is there and nowhere else, and another job works there: it waits, and says so.
            alone = machine is not None and machine.commits[job] == world.papers[job].newest
            return alone and not live and not held and not any(v.job == job for v in world.sky.vms)
        vms = sum(v.job == job for v in world.sky.vms)
        return others + len(record.nodes) > room and live == held and vms <= held


def _things(world: World, job: int, disks: bool = True) -> str:
    vms = [v.uid for v in world.sky.vms if v.job == job]
    kept = [d.name for d in world.sky.disks if d.job == job] if disks else []
    held = [g.attempt for g in world.allocation.grants if g.job == JOBS[job]]
    return " ".join(str(each) for each in (vms, kept, held) if each)
