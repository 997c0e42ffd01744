"""One stack under virtual time: clock, cloud, bucket, the shipped function, and the agents of its machines.

``World(...)``, then ``submit``, then ``run(seconds)`` or ``until(condition)``. Ticks in which nothing can have
changed are skipped (and one in some hundreds is made all the same, to see that it does nothing). Violations of
safety are kept in ``violations`` with their moment; what a run cost is in ``meter``.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field

from spotkeeper.contract.generation import Generation, Role
from spotkeeper.contract.job import JobRequest, JobSpec, Nodes, RequestKind
from spotkeeper.contract.ledger import Entry, Event
from spotkeeper.contract.notification import Notification
from spotkeeper.contract.record import Node, Phase, Record, SlotState
from spotkeeper.contract.stack import Model, PoolState, Price, StackState
from spotkeeper.reconcile.decide import Times
from tests.sim.agent import Agent
from tests.sim.checks import Checks
from tests.sim.cloud import Cloud, Commit, Delays, Machine
from tests.sim.engine import START, Engine
from tests.sim.function import Function
from tests.sim.gang import SAVE_S, Gang
from tests.sim.meter import Meter
from tests.sim.store import SimStore

STACK, POOL = "sim", "pool"
TICK_S = 60.0
SILENCE_S = 30.0  # without an answer: a roll call may find a machine missing that is well
CHECKED = 100  # one in so many skipped ticks is made all the same
PLENTY = 1_000_000
ZONES = ("z-a", "z-b", "z-c")


def small_stack(nodes: int, zones: tuple[str, ...] = ZONES, on_demand: int = 0) -> StackState:
    """One pool with room for every node twice (a replacement boots while the old machine goes)."""
    prices = {zone: Price(on_demand=1.0, spot=0.30 + 0.01 * n) for n, zone in enumerate(zones)}
    pool = PoolState(POOL, "spot", "m", zones, 1, 2 * nodes + 2, on_demand, 10, "pd", prices)
    return StackState(STACK, "gcp", "p", "r", "b", (pool,), node_identity="nodes@sim", boot_deadline_s=480)


@dataclass
class Job:
    """One training run and what the world knows of it."""

    id: str
    spec: JobSpec
    world: World
    steps: int
    step_s: float
    interval_s: float
    agents: list[Agent] = field(default_factory=list)
    gangs: dict[int, Gang] = field(default_factory=dict)
    committed: Commit | None = None  # the newest durable commit
    may_forget: bool = False  # the newest commit may be out of reach (a disk was destroyed)
    crashes_left: int = 0
    crash_after_s: float = 20.0
    reached: int = 0  # the step at which training last stopped
    lost: list[tuple[str, int]] = field(default_factory=list)  # how it stopped, steps that were done again
    how: str = ""

    @property
    def training(self) -> bool:
        gang = max(self.gangs.values(), key=lambda g: g.gen, default=None)
        return gang is not None and gang.began is not None and not gang.over

    def gang(self) -> Gang | None:
        return self.gangs[max(self.gangs)] if self.gangs else None

    def finish(self) -> None:
        """It has done enough."""
        gang = self.gang()
        if gang is not None:
            gang.finish()

    def training_again(self, gang: Gang) -> None:
        if self.how:
            again = max(0, self.reached - gang.first)
            self.lost.append((self.how, again))
            if again * self.step_s > self.interval_s + SAVE_S + 2 * self.step_s:
                self.world.violate("promise", f"{again} steps are done again after the gang {self.how}")
        self.world.meter.trains(self.id, gang.size)
        self.world.version += 1

    def stopped(self, reached: int, how: str) -> None:
        self.reached, self.how = reached, how
        self.world.meter.stands(self.id, how)


class World:
    """The parts of the simulation and their connections: which part wakes which."""

    def __init__(
        self,
        *,
        stack: StackState,
        seed: int = 0,
        delays: Delays | None = None,
        capacity: Callable[[str, Model, float], int] | None = None,
        times: Times | None = None,
        settle_s: float = 1.1,
        events: bool = True,
        hang_share: float = 0.0,
        look_s: float = 0.0,
    ) -> None:
        """
        Args:
            capacity: machines that a zone carries of a model at a time; None: as many as are wanted.
            settle_s: a round's own wait before its last look at the facts.
            events: whether the provider tells of what it takes away.
            hang_share: of the machines that vanish, those whose peers hang instead of failing.
            look_s: how long a look at the cloud takes; what comes in meanwhile finds a round under way.
        """
        self.random = random.Random(seed)  # noqa: S311  a seed, so that a story can be told again
        self.engine, self.stack = Engine(), stack
        self.meter = Meter(self.engine)
        self.meter.settle = self._settle
        self.checks = Checks(self)
        self.violations: list[str] = []
        self.received: list[tuple[str, Notification]] = []  # (channel, what it was sent)
        self.received_at: list[float] = []  # when it was sent each of them
        self.version = 0  # of everything that a round can see
        self.store = SimStore(stack, self)
        self.cloud = _kind(stack)(self, random.Random(seed + 1), delays or Delays())  # noqa: S311
        self.look_s = look_s
        self.beats = False  # whether leases are short and renewed, as the function ships them; otherwise they last 75 s
        self.settle_s, self.events, self.hang_share = settle_s, events, hang_share
        self.function = Function(self, random.Random(seed + 2))  # noqa: S311
        self.times = times or Times(fallback=stack.fallback)
        self.jobs: dict[str, Job] = {}
        self.skipped = self.ticks = 0
        self.skip = True
        self._capacity = capacity
        self._quiet: tuple[int, float] | None = None  # version at which a tick found nothing, and until when
        self._dues: dict[str, float] = {}
        self.refused: dict[tuple[str | None, Model | None], float] = {}  # when, newest, by offer
        self._tick_at = START + TICK_S
        self.engine.at(self._tick_at, self._tick)

    # -- what a story does

    def submit(
        self,
        job: str,
        *,
        nodes: int | dict[str, int] = 1,
        steps: int = PLENTY,
        step_s: float = 1.0,
        interval_s: float = 60.0,
        **more: object,
    ) -> Job:
        """As the command line: spec, name, marker, record; then a notification."""
        size = Nodes(**nodes) if isinstance(nodes, dict) else nodes
        spec = JobSpec(name=f"job-{job}", command=("train.py",), nodes=size, **more)  # type: ignore[arg-type]
        self.jobs[job] = found = Job(job, spec, self, steps, step_s, interval_s)
        record = Record(
            job=job,
            uid=str(uuid.uuid5(uuid.NAMESPACE_OID, job)),
            name=spec.name,
            spec_sha256="",
            created=self.engine.t,
            nodes=(Node(),) * spec.size().max,
            keep_disks=spec.keep_disks,
            nonce="submitted",
        )
        self.store.put_spec(job, spec)
        self.store.put_name(spec.name, job)
        self.store.set_active(job)
        self.store.create_record(record)
        self.function.notify(job)
        return found

    def request(self, job: str, kind: RequestKind, **more: object) -> None:
        request = JobRequest(id=f"{self.random.getrandbits(48):012x}", kind=kind, at=self.engine.t, by="user", **more)  # type: ignore[arg-type]
        self.store.put_request(job, request)
        self.version += 1  # where the notification is lost, the next tick has news
        self.function.notify(job)

    def run(self, seconds: float) -> None:
        self.engine.run(self.engine.t + seconds)

    def until(self, condition: Callable[[], bool], limit_s: float = 3600.0) -> bool:
        """Whether it came true in time."""
        end = self.engine.t + limit_s
        while not condition():
            if not self.engine.step(end):
                self.engine.run(end)
                return condition()
        return True

    def record(self, job: str) -> Record:
        held = self.store.read_record(job)
        assert held is not None
        return held.value

    def member(self, job: str, node: int) -> Machine | None:
        """The machine that the record has for a node, where it is there."""
        cur = self.record(job).nodes[node].cur
        return self.cloud.machines.get(cur.uid or "") if cur is not None else None

    def preempt(self, machine: Machine, notice_s: float) -> None:
        """The provider's event comes some seconds later, where events come at all."""
        if machine.agent is not None and machine.agent.node >= 0:
            self.meter.sign(machine.vm.job)
        self.cloud.preempt(machine, notice_s)
        if self.events and notice_s <= 0:
            self.engine.after(self.random.uniform(1.0, 5.0), lambda: self.function.notify(machine.vm.job))

    def left_over(self) -> list[str]:
        """What should not be there when every job has ended."""
        out = [f"machine {machine.vm.name}" for machine in self.cloud.machines.values()]
        out += [f"disk {drive.disk.name} in {drive.disk.zone}" for drive in self.cloud.drives.values()]
        out += [f"snapshot {name}" for name in self.cloud.shots]
        out += [f"grant {g.job} r{g.node} a{g.attempt}" for g in self.store.read_allocation().value.grants]
        out += [f"active/{job}" for job in self.store.active_jobs()]
        out += [f"request {job}" for job in self.jobs if self.store.list_requests(job)]
        out += [f"fact {fact.key()} of {job}" for job in self.jobs for fact in self.store.list_facts(job)]
        out += [f"name {job.spec.name}" for job in self.jobs.values() if self.store.read_name(job.spec.name)]
        phases = {job: self.record(job).phase for job in self.jobs}
        out += [f"job {job} is {phase.value}" for job, phase in phases.items() if phase is not Phase.DONE]
        return out

    def violate(self, rule: str, what: str) -> None:
        self.violations.append(f"{self.engine.t - START:.1f} s: {rule}: {what}")

    # -- what ties the parts

    def capacity(self, zone: str, model: Model) -> int:
        return PLENTY if self._capacity is None else self._capacity(zone, model, self.engine.t)

    def agent_up(self, machine: Machine) -> None:
        machine.agent = Agent(self, machine)

    def gang(self, job: Job, doc: Generation) -> Gang:
        if doc.gen not in job.gangs:
            for old in [gen for gen in job.gangs if gen < doc.gen - 2]:
                del job.gangs[old]
            job.gangs[doc.gen] = Gang(self, job, doc)
        return job.gangs[doc.gen]

    def record_written(self, old: Record | None, new: Record) -> None:
        self.version += 1
        self.checks.record(old, new)
        if new.job in self.jobs:
            for agent in self.jobs[new.job].agents:
                agent.wake()

    def admitted(self, job: str, uid: str) -> bool:
        nodes = self.record(job).nodes
        return any(
            slot is not None and slot.uid == uid and slot.state is not SlotState.INTENT
            for node in nodes
            for slot in (node.cur, node.next)
        )

    def shrinks(self, new: Record, index: int) -> bool:
        """Whether the node is one that a resize has parked."""
        return index not in new.filled()

    def unheard(self, agent: Agent) -> bool:
        """Whether it cannot be blamed for a silence: it has asked for half a minute, and nobody has answered."""
        now = self.engine.t
        return self.function.down or now - self.function.up_since < SILENCE_S or now - (agent.trying or now) > SILENCE_S

    def _settle(self, job: str) -> None:
        for agent in self.jobs[job].agents:
            agent.settle()

    def entry(self, entry: Entry) -> None:
        if entry.event is Event.REFUSED:
            self.meter.dry = True
            self.refused[entry.zone, entry.model] = entry.at

    def due(self, job: str, due: float | None) -> None:
        """Time alone makes a round worthwhile then (or a lease runs out): the first agent that waits asks."""
        if due is None or job not in self.jobs or self._dues.get(job) == due:
            return
        self._dues[job] = due

        def comes() -> None:
            able = [a for a in self.jobs[job].agents if a.alive and not a.hung]
            waiting = [agent for agent in able if agent.waits and agent.role is not Role.UNKNOWN]
            if self._dues.get(job) == due and waiting:
                min(waiting, key=lambda agent: agent.phase).wake()

        self.engine.at(max(due, self.engine.t), comes)

    def report(self, job: str) -> None:
        found = self.jobs.get(job)
        gang = found.gang() if found is not None else None
        if gang is not None and not gang.over and (progress := gang.progress()) is not None:
            self.store.put_progress(job, progress)

    # -- the schedule

    def _tick(self) -> None:
        self._tick_at += TICK_S
        self.engine.at(self._tick_at, self._tick)
        if self.skip and self._nothing_new():
            self.skipped += 1
            if self.skipped % CHECKED:
                return
            before, events, look_s, self.look_s = self._effects(), self.engine.events, self.look_s, 0.0
            self.function.tick()
            self.look_s = look_s
            alone = self.engine.events == events  # a function that froze let others go on, with effects of their own
            if alone and self._effects() != before:
                self.violate("simulator", "a tick was skipped that had something to do")
            return
        self.ticks += 1
        before, version = self._effects(), self.version  # what came while the tick looked, it may not have seen
        busy = self._busy()  # a lease that ran out meanwhile kept it from looking all the same
        answered = self.function.tick()
        quiet = answered and self._effects() == before and not busy and not self._busy()
        self._quiet = (version, self._wake()) if quiet else None

    def _effects(self) -> int:
        counts = self.function.counts
        return counts["cas_record"] + counts["cas_allocation"] + counts["perform"] + counts["create_record"]

    def _busy(self) -> bool:
        """A round holds its lease, or died with it: the tick has seen nothing."""
        return any(holder and until > self.engine.t for holder, until, _ in self.store.leases.values())

    def _nothing_new(self) -> bool:
        return self._quiet is not None and self._quiet[0] == self.version and self.engine.t < self._quiet[1]

    def _wake(self) -> float:
        """The first moment at which time alone may change a decision; too early does no harm."""
        now = self.engine.t
        at = [refused + self.times.cold_s for refused in self.refused.values()]
        for job, found in self.jobs.items():
            record = self.record(job)
            at += _timers(record, self.times, self.stack)
            if record.phase is Phase.END or (record.phase is Phase.RUN and not found.training):
                return now  # something is awaited: every tick looks
            if any(slot.state is SlotState.INTENT for node in record.nodes for slot in (node.cur, node.next) if slot):
                return now  # a boot may turn out to be slow
            models = {slot.model for node in record.nodes for slot in (node.cur, node.next) if slot}
            if Model.ON_DEMAND in models:
                return now  # a price that is asked for by the hour, or a refusal forgotten, may bring it back to spot
            if Model.RESERVED in models:
                return now  # its reserved capacity may end
        return min((moment for moment in at if moment >= now), default=float("inf"))


def _kind(stack: StackState) -> type[Cloud]:
    """Compute Engine, or EC2, which is heavier: the shipped adapter speaks to it through botocore."""
    if stack.cloud == "gcp":
        return Cloud
    from tests.sim.ec2 import Ec2Cloud

    return Ec2Cloud


def _timers(record: Record, times: Times, stack: StackState) -> list[float]:
    out = [
        record.fallback_until,
        record.gen_since + times.settle_s,
        record.roll_at + times.silence(len(record.members)),
    ]
    if record.hold_until is not None:
        out.append(record.hold_until)
    for node in record.nodes:
        out.append(node.refused_at + times.cold_s)
        for slot in (node.cur, node.next):
            if slot is not None:
                out += [slot.since + stack.boot_deadline_s, slot.since + times.free_s]
                if slot.notice is not None:
                    out += [slot.notice, slot.notice + times.margin_s, slot.notice + times.stop_s]
    return out
