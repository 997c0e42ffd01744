"""A whole small world under virtual time: a cloud, agents that answer like the real ones, and the shipped rounds.

Time moves in steps of one second. Nothing here sleeps, nothing is random but what a test's seed draws, and
after every step the safety properties of the protocol are checked (``World.check``).
"""

from __future__ import annotations

import contextlib
import random
import uuid
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from msgspec.structs import replace

from spotkeeper.contract import names
from spotkeeper.contract.cloud import (
    Action,
    AttachDisk,
    CreateDisk,
    CreateSnapshot,
    DeleteDisk,
    DeleteSnapshot,
    DeleteVm,
    DetachDisk,
    Disk,
    DiskSnapshot,
    InsertVm,
    Listing,
    Result,
    ResultKind,
    Vm,
    VmStatus,
)
from spotkeeper.contract.facts import BucketCopy, Kind, Rung
from spotkeeper.contract.generation import DocState, FactIn, FetchOrder, Generation, JobRun, Progress, Role, Sync
from spotkeeper.contract.job import JobRequest, JobSpec, RequestKind
from spotkeeper.contract.ledger import Entry, Event
from spotkeeper.contract.market import PriceRun
from spotkeeper.contract.record import Node, Record
from spotkeeper.contract.stack import Model, PoolState, Price, StackState, StaticMachine
from spotkeeper.reconcile.controller.document import Speaker, reply
from spotkeeper.reconcile.controller.intake import accept
from spotkeeper.reconcile.controller.reconcile_job import RoundOptions, run_round
from spotkeeper.reconcile.controller.tick import tick
from spotkeeper.reconcile.decide import Times
from spotkeeper.reconcile.store.documents import CorruptError
from spotkeeper.reconcile.store.store import Store
from tests.reconcile.memory import MemoryStore

ZONES = ("z-a", "z-b", "z-c")
STACK = "t"
JOB = "abcd2345"
Commit = tuple[int, int]


def stack(max_machines: int = 20, max_on_demand: int = 20, static: int = 0) -> StackState:
    prices = {zone: Price(on_demand=1.0, spot=0.30 + 0.01 * n) for n, zone in enumerate(ZONES)}
    pools = [PoolState("pool", "spot", "m", ZONES, 1, max_machines, max_on_demand, 10, "pd", prices)]
    if static:
        machines = tuple(StaticMachine(names.static_machine_name(STACK, "fix", n), "z-a") for n in range(static))
        pools.append(PoolState("fix", "static", "m", ("z-a",), 1, static, 0, 10, "pd", prices, machines=machines))
    return StackState(STACK, "gcp", "p", "z", "b", tuple(pools), boot_deadline_s=240)


TORN: list[Commit] = []  # what a snapshot holds that was taken of a disk while it was written


class CrashError(BaseException):
    """The function dies here."""


@dataclass
class Machine:
    vm: Vm
    born: float
    status: VmStatus = VmStatus.PENDING
    dies_at: float | None = None  # a preemption with notice, or the end of STOPPING
    doomed: bool = False  # a stockout: listed for seconds, then taken away
    boot: str = ""
    agent: Agent | None = None
    up_at: float = 0.0


@dataclass
class Drive:
    disk: Disk
    ready_at: float
    held: dict[str, list[Commit]] = field(default_factory=dict)  # commits by job
    user: str | None = None  # uid
    broken: bool = False  # no machine can mount it, and every write fails
    damaged: dict[str, list[Commit]] = field(default_factory=dict)  # commits that were whole once, by job

    def damage(self, job: str) -> Commit:
        """The newest checkpoint of a job rots."""
        commit = max(self.held[job])
        self.held[job].remove(commit)
        self.damaged.setdefault(job, []).append(commit)
        return commit


class World:
    """``World(nodes=3)``, then ``run(seconds)`` or ``until(condition)``."""

    copies = True  # False: no upload comes through
    copy_bytes = 0  # of each copy of a checkpoint

    def __init__(
        self,
        nodes: int = 1,
        *,
        the_stack: StackState | None = None,
        seed: int = 0,
        boot_s: float = 20.0,
        steps: int = 10_000_000,
        times: Times | None = None,
        lost_answers: float = 0.0,
        store: Store | None = None,
        **spec: object,
    ) -> None:
        self.t = 1_000_000.0
        self.scale, self.ahead = 1.0, 0.0  # of the functions' clocks
        self.random = random.Random(seed)  # noqa: S311  a seed, so that a story can be told again
        self.stack = the_stack or stack()
        self.memory = MemoryStore(self.stack)
        self.store: Store = store or self.memory
        self.options = RoundOptions(settle_s=0.0, sleep=lambda _: None, times=times, parallel=1)
        self.boot_s, self.steps, self.lost_answers = boot_s, steps, lost_answers
        self.machines: dict[str, Machine] = {}  # by uid
        self.drives: dict[tuple[str, str], Drive] = {}  # by (name, zone)
        self.shots: dict[str, tuple[DiskSnapshot, float, list[Commit]]] = {}
        self.keys: dict[str, str] = {}  # idempotency key -> uid
        self.capacity: dict[tuple[str, Model], int] = {}
        self.sold_out: set[tuple[str, str]] = set()  # pools without capacity, as (pool, zone)
        self.stockout_lists = False  # a stockout lists the machine for seconds first
        self.blind: set[str] = set()
        self.clumsy: set[str] = set()  # machines that can mount nothing
        self.permanent: str = ""
        self.unreserved: set[str] = set()  # names of reserved capacity that its owner has given up
        self.quota: str = ""  # every insert is refused for it
        self.prices: dict[str, tuple[PriceRun, ...]] = {}
        self.price_questions = 0
        self.shot_s = 5.0  # until a snapshot is ready
        self.diff_s: float | None = None  # the same, if the disk has an older snapshot; None: as long
        self.bases: dict[str, list[str]] = defaultdict(list)  # snapshots by disk
        self.disk_gb = 0.0  # on each disk, as agents and snapshots tell it; 0: they do not
        self.max_run_s: float | None = None  # the cloud ends a machine of a job that is so old
        self.shots_stay = False  # deletions of snapshots fail
        self.ops: list[Result] = []
        self.made: list[tuple[float, Action, Result]] = []
        self.started: list[tuple[int, Commit | None]] = []  # what each generation was restored from
        self.newests: dict[str, Commit] = {}
        self.buckets: dict[str, list[Commit]] = defaultdict(list)  # copies of checkpoints that are complete, by job
        self.through_bucket: list[tuple[str, str]] = []  # copies that went "up" or "down", with the machine's zone
        self.rotten: set[Commit] = set()  # of them, those of which no fetch succeeds
        self.fetch_s = 5.0
        self.step_s: float | None = None  # as agents report it
        self.saves = True  # False: a script that never saves
        self.may_fail = False  # whether the rounds of a tick may fail, as those of unreadable records do
        self.loop_steps: int | None = None  # where its loop ends; what comes after it goes on for ever
        self.value: Callable[[str, int], float | None] = lambda job, step: None  # of a trial's metric
        self.crashing = 0  # the next generations whose node 0 exits with 1
        self.signs: dict[int, str] = {}  # of broken hardware, by node, that a crash leaves
        self.next_tick = self.t
        self.crash_rate = self.stall_rate = 0.0  # of calls and compare-and-swaps, before or after they happen
        self.depth = 0
        self.memory.on_write = self.fate
        self.spec = JobSpec(name="job", command=("train.py",), nodes=nodes, **spec)  # type: ignore[arg-type]
        for pool in self.stack.pools:
            for machine in pool.machines:
                self._static(machine, pool.name)

    # -- time and the function

    def now(self) -> float:
        """By the clock of whichever function runs; agents and the cloud have ``t``."""
        return self.t + self.ahead

    def submit(self, job: str = JOB, spec: JobSpec | None = None) -> None:
        spec = spec or self.spec
        record = Record(
            job=job,
            uid=str(uuid.UUID(int=zlib_int(job))),
            name=f"job-{job}",
            spec_sha256="",
            created=self.t,
            nodes=(Node(),) * spec.size().max,
            keep_disks=spec.keep_disks,
            nonce="submitted",
        )
        self.store.put_spec(job, spec)
        self.store.set_active(job)
        assert self.store.create_record(record)
        if spec.trial is not None:
            self.store.create_trial(spec.trial.sweep, spec.trial.number, job)
        self.round(job)

    def run(self, seconds: float) -> None:
        end = self.t + seconds
        while self.t < end:
            self.step()

    def until(self, condition: object, limit_s: float = 1200.0) -> None:
        end = self.t + limit_s
        while not condition():  # type: ignore[operator]
            assert self.t < end, f"not within {limit_s:.0f} s: {[*map(self.record, self.store.active_jobs())]}"
            self.step()

    def step(self) -> None:
        self.t += 1.0
        self._cloud_moves()
        for machine in list(self.machines.values()):
            if machine.agent is not None and machine.status in (VmStatus.RUNNING, VmStatus.STOPPING):
                machine.agent.step()
        self._train()
        if self.t >= self.next_tick:
            self.next_tick = self.t + 60.0
            with contextlib.suppress(CrashError):
                done = tick(self.store, self, self, self.options)
                assert self.may_fail or not done.failed, done.failed
        self.check()

    def round(self, job: str = JOB) -> None:
        with contextlib.suppress(CrashError):
            run_round(self.store, self, job, self, self.options)

    # -- what tests look at

    @property
    def newest(self) -> Commit | None:
        return self.newests.get(JOB)

    @property
    def bucket(self) -> list[Commit]:
        return self.buckets[JOB]

    def record(self, job: str = JOB) -> Record:
        held = self.store.read_record(job)
        assert held is not None
        return held.value

    def training(self, job: str = JOB) -> bool:
        """Every node is a member of the newest generation, and all of its agents train in it."""
        record = self.record(job)
        agents = [a for a in self.agents(job) if a.gen == record.gen and a.alive]
        return record.gen > 0 and not record.stop and len(agents) == len(record.members) > 0

    def agents(self, job: str = JOB) -> list[Agent]:
        return [m.agent for m in self.machines.values() if m.agent is not None and m.agent.job == job]

    def member(self, node: int, job: str = JOB) -> Machine:
        cur = self.record(job).nodes[node].cur
        assert cur is not None and cur.uid is not None
        return self.machines[cur.uid]

    def dynamic(self) -> list[Machine]:
        return [m for m in self.machines.values() if m.vm.job]

    def events(self, *kinds: Event, job: str = JOB) -> list[Entry]:
        return [entry for entry in self.store.list_ledger(job) if not kinds or entry.event in kinds]

    def inserts(self) -> list[InsertVm]:
        return list(dict.fromkeys(a for _, a, _ in self.made if isinstance(a, InsertVm)))

    # -- what happens to machines

    def preempt(self, node: int, notice_s: float | None = None) -> Machine:
        machine = self.member(node)
        if notice_s is None:
            self._remove(machine)
        else:
            machine.dies_at = self.t + notice_s
            if machine.agent:
                machine.agent.notice = machine.dies_at
        return machine

    def reprieve(self, machine: Machine) -> None:
        assert machine.agent and machine.agent.notice
        machine.dies_at, machine.agent.reprieved = None, machine.agent.notice

    def reboot(self, node: int) -> None:
        machine = self.member(node)
        machine.boot = self._id()
        machine.agent = None
        machine.up_at = self.t + self.boot_s
        machine.status = VmStatus.RUNNING

    def request(self, kind: RequestKind, **more: object) -> None:
        request = JobRequest(id=self._id(), kind=kind, at=self.t, by="user", **more)  # type: ignore[arg-type]
        self.store.put_request(JOB, request)
        self.round()

    def _remove(self, machine: Machine) -> None:
        self.machines.pop(machine.vm.uid, None)
        for drive in self.drives.values():
            if drive.user == machine.vm.uid:
                drive.user = None

    def _id(self) -> str:
        return f"{self.random.getrandbits(48):012x}"

    def _static(self, machine: StaticMachine, pool: str) -> None:
        uid = self._id()
        vm = Vm(
            machine.name,
            uid,
            machine.zone,
            VmStatus.RUNNING,
            pool,
            "",
            0,
            0,
            f"10.1.0.{len(self.machines)}",
            (),
            Model.STATIC,
        )
        running = Machine(vm, self.t, VmStatus.RUNNING, boot=self._id(), up_at=self.t + 3)
        self.machines[uid] = running
        self.drives[machine.name, machine.zone] = Drive(Disk(machine.name, machine.zone, "", 0, 0), self.t, user=uid)

    def _cloud_moves(self) -> None:
        for machine in list(self.machines.values()):
            ends = self._ends(machine)
            if ends is not None and self.t >= ends and machine.status is VmStatus.RUNNING:
                machine.status, machine.dies_at = VmStatus.STOPPING, self.t + 5
            if machine.dies_at is not None and self.t >= machine.dies_at:
                self._remove(machine)
            elif machine.doomed and self.t >= machine.born + 4:
                self._remove(machine)
                action = self._inserted(machine)
                self.ops.append(Result(action, ResultKind.CAPACITY, "ZONE_RESOURCE_POOL_EXHAUSTED", self.t))
            elif machine.status is VmStatus.PENDING and not machine.doomed and self.t >= machine.born + 5:
                machine.status = VmStatus.RUNNING
            if machine.agent is None and machine.status is VmStatus.RUNNING and self.t >= machine.up_at:
                machine.agent = Agent(self, machine)

    def _inserted(self, machine: Machine) -> InsertVm:
        vm = machine.vm
        for _, action, _ in self.made:
            if isinstance(action, InsertVm) and (action.job, action.node, action.attempt) == (
                vm.job,
                vm.node,
                vm.attempt,
            ):
                return action
        raise AssertionError(vm)

    # -- the Cloud protocol

    def list(self, name: str) -> Listing:
        assert name == self.stack.stack
        vms = tuple(self._vm(m) for m in self.machines.values() if m.vm.zone not in self.blind)
        disks = tuple(
            self._disk(key) for key, drive in self.drives.items() if drive.disk.job and key[1] not in self.blind
        )
        gb = self.disk_gb
        shots = tuple(
            replace(s, ready=self.t >= at, gb=gb, regions=dict.fromkeys(s.regions, self.t >= at))
            for s, at, _ in self.shots.values()
        )
        every = frozenset((*ZONES, *self.stack.zones(), *(disk.zone for disk in disks)))
        return Listing(vms, disks, shots, every - self.blind, tuple(self.ops))

    def _vm(self, machine: Machine) -> Vm:
        vm = machine.vm
        held = tuple(d.disk.name for d in self.drives.values() if d.user == vm.uid and d.disk.job)
        return replace(vm, status=machine.status, disks=held, created=machine.born, ends=self._ends(machine))

    def _ends(self, machine: Machine) -> float | None:
        return machine.born + self.max_run_s if self.max_run_s is not None and machine.vm.job else None

    def _disk(self, key: tuple[str, str]) -> Disk:
        drive = self.drives[key]
        disk = drive.disk
        users = (self.machines[drive.user].vm.name,) if drive.user else ()
        return Disk(disk.name, disk.zone, disk.job, disk.node, disk.number, users, self.t >= drive.ready_at)

    def fate(self) -> None:
        """What may befall a round between two of its effects: it dies, or it sleeps while the world moves on."""
        if self.crash_rate and self.random.random() < self.crash_rate:
            raise CrashError
        if self.stall_rate and self.depth == 0 and self.random.random() < self.stall_rate:
            self.depth += 1
            self.memory.leases.clear()  # it lost its lease, so others go on
            for _ in range(self.random.randrange(1, 60)):
                self.step()
            self.depth -= 1

    def price_history(self, pool: str, deadline_s: float) -> tuple[PriceRun, ...] | None:
        self.price_questions += 1
        return self.prices.get(pool)

    def perform(self, action: Action, deadline_s: float) -> Result:
        self.fate()
        kind, detail = self._perform(action)
        if self.lost_answers and self.random.random() < self.lost_answers:
            kind, detail = ResultKind.AMBIGUOUS, "the answer was lost"
        result = Result(action, kind, detail, self.now())
        self.made.append((self.t, action, result))
        self.fate()
        return result

    def _perform(self, action: Action) -> tuple[ResultKind, str]:
        match action:
            case InsertVm() | DeleteVm() | CreateDisk() | CreateSnapshot():
                make: Callable[..., tuple[ResultKind, str]] = {
                    InsertVm: self._insert,
                    DeleteVm: self._delete,
                    CreateDisk: self._create_disk,
                    CreateSnapshot: self._create_snapshot,
                }[type(action)]
                return make(action)
            case AttachDisk():
                drive, machine = self.drives.get((action.disk, action.zone)), self.machines.get(action.vm_uid)
                if drive is None or machine is None or drive.user not in (None, action.vm_uid):
                    return ResultKind.IN_USE, "in use"
                drive.user = action.vm_uid
            case DetachDisk():
                drive = self.drives.get((action.disk, action.zone))
                if drive is not None and drive.user == action.vm_uid:
                    drive.user = None
            case DeleteDisk():
                drive = self.drives.get((action.disk, action.zone))
                if drive is not None and drive.user is not None:
                    return ResultKind.IN_USE, "in use"
                self.drives.pop((action.disk, action.zone), None)
            case DeleteSnapshot():
                if not self.shots_stay:
                    self.shots.pop(action.name, None)
        return ResultKind.ACCEPTED, ""

    def _insert(self, action: InsertVm) -> tuple[ResultKind, str]:
        if self.permanent:
            return ResultKind.PERMANENT, self.permanent
        if self.quota:
            return ResultKind.QUOTA, self.quota
        if action.reservation in self.unreserved:
            return ResultKind.PERMANENT, "no such reservation"
        key = names.idempotency_key(action.job, action.uid, "insert", action.node, action.attempt, action.zone)
        if key in self.keys:
            return (
                (ResultKind.ACCEPTED, "")
                if self.keys[key] in self.machines
                else (ResultKind.DEAD_KEY, "its machine is gone")
            )
        used = sum(1 for m in self.dynamic() if m.vm.zone == action.zone and m.vm.model is action.model)
        empty = used >= self.capacity.get((action.zone, action.model), 1000)
        empty |= (action.pool, action.zone) in self.sold_out
        if empty and not self.stockout_lists:
            return ResultKind.CAPACITY, "ZONE_RESOURCE_POOL_EXHAUSTED"
        name, uid = names.vm_name(STACK, action.job, action.node, action.attempt), self._id()
        self.keys[key] = uid
        address = f"10.0.{len(self.keys) // 250}.{len(self.keys) % 250 + 1}"
        vm = Vm(
            name,
            uid,
            action.zone,
            VmStatus.PENDING,
            action.pool,
            action.job,
            action.node,
            action.attempt,
            address,
            (),
            action.model,
            reservation=action.reservation,
        )
        self.machines[uid] = Machine(vm, self.t, boot=self._id(), doomed=empty, up_at=self.t + self.boot_s)
        return ResultKind.ACCEPTED, ""

    def _delete(self, action: DeleteVm) -> tuple[ResultKind, str]:
        machine = self.machines.get(action.uid)
        if machine is None:
            return ResultKind.ACCEPTED, ""
        record = self.record(machine.vm.job)
        live = [s.uid for r in record.nodes for s in (r.cur, r.next) if s is not None]
        assert machine.vm.uid not in live, f"a live machine is deleted: {action}"
        machine.status, machine.dies_at = VmStatus.STOPPING, self.t + 5
        return ResultKind.ACCEPTED, ""

    def _create_disk(self, action: CreateDisk) -> tuple[ResultKind, str]:
        name = names.disk_name(STACK, action.job, action.node, action.number)
        key = names.idempotency_key(action.job, action.uid, "disk", action.node, action.number, action.zone)
        if (name, action.zone) not in self.drives:
            if key in self.keys:
                return ResultKind.DEAD_KEY, "the disk is gone"
            if action.snapshot and action.snapshot not in self.shots:
                return ResultKind.PERMANENT, "no such snapshot"
            self.keys[key] = name
            assert not action.snapshot or self.shots[action.snapshot][2] is not TORN, "of a disk that was written"
            commits = list(self.shots[action.snapshot][2]) if action.snapshot else []
            disk = Disk(name, action.zone, action.job, action.node, action.number)
            self.drives[name, action.zone] = Drive(disk, self.t + 2, {action.job: commits})
        return ResultKind.ACCEPTED, ""

    def _create_snapshot(self, action: CreateSnapshot) -> tuple[ResultKind, str]:
        name = names.disk_name(STACK, action.job, action.node, action.number)
        drive = self.drives.get((name, action.zone))
        if drive is None:  # a slow round asks for it after the move: Google's 404
            return ResultKind.PERMANENT, "no such disk"
        warm = drive.user is not None
        assert not warm or action.region, "a snapshot of an attached disk is stale"
        copy = names.disk_name(STACK, action.job, action.node, action.copy)
        stored = {action.region: False} if action.region else {}
        shot = DiskSnapshot(copy, action.job, action.node, action.copy, False, 0.0, stored)
        base = any(self.t >= self.shots[known][1] for known in self.bases[name] if known in self.shots)
        took = self.diff_s if base and self.diff_s is not None else self.shot_s
        held = TORN if warm else list(drive.held.get(action.job, []))
        self.bases[name].append(copy)
        self.shots.setdefault(copy, (shot, self.t + took, held))
        return ResultKind.ACCEPTED, ""

    # -- training: a gang moves only together

    def _train(self) -> None:
        by_job: dict[tuple[str, int], list[Agent]] = {}
        for machine in self.machines.values():
            agent = machine.agent
            if agent is not None and agent.job and agent.gen and agent.alive:
                by_job.setdefault((agent.job, agent.gen), []).append(agent)
        for agents in by_job.values():
            agents[0].gang_step(agents)

    # -- safety

    def check(self) -> None:
        """One member per node and generation, one writer per disk, caps kept; each machine is of its node's pool."""
        for vm in (machine.vm for machine in self.dynamic() if machine.vm.job == JOB):
            assert self.spec.pool_of(vm.node) in ("", vm.pool), f"node {vm.node} has a machine of {vm.pool}"
        seen: set[tuple[str, int, int]] = set()
        for agent in (m.agent for m in self.machines.values() if m.agent):
            if agent.gen and agent.alive and agent.job:
                key = (agent.job, agent.node, agent.gen)
                assert key not in seen, f"two members of {key}"
                seen.add(key)
        try:
            grants = self.store.read_allocation().value.grants
        except CorruptError:
            return
        assert len({(g.job, g.node, g.attempt) for g in grants}) == len(grants)
        for pool in self.stack.pools:
            for one in pool.reservations:
                used = sum((g.pool, g.reservation) == (pool.name, one.key) for g in grants)
                assert used <= one.count, f"{used} machines of {one.name}, which has {one.count}"
        nodes = [g.resource for g in grants if g.resource.startswith("machine:")]
        assert len(set(nodes)) == len(nodes), "a static machine is granted twice"


def zlib_int(text: str) -> int:
    return int.from_bytes(text.encode(), "big")


class Agent:
    """What the agent on one boot of one machine does, as the function sees it."""

    def __init__(self, world: World, machine: Machine) -> None:
        self.world, self.machine, self.boot = world, machine, machine.boot
        self.role = Role.UNKNOWN
        self.run: JobRun | None = None  # what the newest generation runs
        self.job: str | None = None
        self.node = self.attempt = -1
        self.ver = self.gen = self.step_no = 0
        self.doc: Generation | None = None
        self.launched: Generation | None = None
        self.alive = False  # its processes of `gen` run
        self.hung = False
        self.clumsy = self.machine.vm.uid in world.clumsy
        self.notice: float | None = None
        self.reprieved: float | None = None
        self.disk: int | None = None
        self.mounted: Drive | None = None
        self.outbox: list[FactIn] = [FactIn(Kind.HELLO)]
        self.saving_until: float | None = None
        self.commit: Commit | None = None
        self.off = False
        self.polled = 0.0
        self.said: set[tuple[Kind, int, str]] = set()
        self.mirrored_at: float | None = None
        self.fetches: tuple[Commit, float] | None = None  # a copy, and when it is there

    def step(self) -> None:
        if self.off or self.hung:
            return
        world = self.world
        if self.notice and self.job:
            self.say(Kind.NOTICE, value=f"{self.notice:.0f}")
        if self.reprieved:
            self.say(Kind.REPRIEVE, value=f"{self.reprieved:.0f}")
            self.notice = self.reprieved = None
        self._mount()
        self._fetch()
        self._copy_stopped()
        steady = self.role is Role.MEMBER and self.alive and not self.outbox and self.notice is None
        if world.t - self.polled >= (5.0 if steady and self.doc and self.doc.state is DocState.RUN else 1.0):
            self.sync()

    def say(self, kind: Kind, gen: int = 0, value: str = "0") -> None:
        if (kind, gen, value) not in self.said:
            self.said.add((kind, gen, value))
            self.outbox.append(FactIn(kind, gen, value))

    def sync(self) -> None:
        """As the HTTP handler: take in, a round if something is new or due, answer."""
        world, store = self.world, self.world.store
        self.polled = world.t
        who = Speaker(self.machine.vm.uid, self.machine.vm.name, self.machine.vm.zone)
        body = Sync(self.boot, self.ver, self.job, tuple(self.outbox), self._progress())
        try:
            took = accept(store, world.stack, who, body, world.now())
        except CorruptError:  # the HTTP interface answers 503: asked again later, and what runs goes on
            return
        due = store.read_due(took.job) if took.job else None
        if took.job and (took.new or (due is not None and world.now() >= due)):
            with contextlib.suppress(CrashError):
                run_round(store, world, took.job, world, world.options)
        record = store.read_record(took.job) if took.job else None
        spec = store.read_spec(record.value.job, record.value.spec_key()) if record else None
        answer = reply(record.value if record else None, spec, world.stack, who, body, took.grant)
        if answer.role is not Role.UNKNOWN:
            self.outbox.clear()
        self._obey(answer)

    def _progress(self) -> Progress | None:
        if not self.alive or self.doc is None or self.doc.members[0].uid != self.machine.vm.uid:
            return None
        commit, world = self.commit, self.world
        return Progress(
            gen=self.gen,
            step=self.step_no,
            at=0.0,
            commit_gen=commit[0] if commit else None,
            commit_step=commit[1] if commit else None,
            save_s=2.0,
            total_steps=world.loop_steps,
            step_s=world.step_s,
            disk_bytes=int(world.disk_gb * 1e9) or None,
        )

    def _obey(self, answer: object) -> None:
        role = answer.role  # type: ignore[attr-defined]
        self.role = role
        self.run = answer.run or self.run  # type: ignore[attr-defined]
        if role is Role.SUPERSEDED:
            self._leave(answer)
            return
        if role in (Role.IDLE, Role.UNKNOWN):
            if role is Role.UNKNOWN or self.machine.vm.job == "":
                self.outbox[:] = [FactIn(Kind.HELLO)]
            return
        self.job, self.node, self.attempt = answer.job, answer.node, answer.attempt  # type: ignore[attr-defined]
        self.disk = answer.disk  # type: ignore[attr-defined]
        self._order(answer.fetch, answer.mirrored_at)  # type: ignore[attr-defined]
        doc: Generation | None = answer.doc  # type: ignore[attr-defined]
        if doc is None or doc.ver <= self.ver:
            return
        self.ver, self.doc = doc.ver, doc
        if role is not Role.MEMBER:
            self.alive = False
            return
        me = next((m for m in doc.members if m.uid == self.machine.vm.uid and m.boot == self.boot), None)
        if doc.state in (DocState.RUN, DocState.ROLL_CALL) and me is not None and doc.gen > self.gen:
            self.gen, self.alive, self.commit, self.saving_until = doc.gen, True, None, None
            self.step_no = -1  # restored when all of the gang are there
            self.launched = doc  # later documents of this generation may list fewer
        if doc.state is DocState.ROLL_CALL:
            self.say(Kind.HERE, doc.gen, str(doc.ver))
        if doc.state is DocState.SAVE_STOP and not self.alive and self.gen == doc.gen:
            self.say(Kind.RELEASED, doc.gen, str(max(0, self.step_no)))

    def _leave(self, answer: object) -> None:
        self.alive = False
        if self.machine.vm.job == "":
            self.outbox[:] = [FactIn(Kind.DROPPED, 0, "0", answer.attempt)]  # type: ignore[attr-defined]
            self.job, self.gen, self.ver, self.doc, self.mounted = None, 0, 0, None, None
            self.said.clear()
            return
        if self.mounted is not None:
            self.mounted = None
            self.say(Kind.FREED, 0, str(self.disk or 0))
            return
        if not self.outbox:
            self.off = True
            self.machine.status = VmStatus.STOPPING
            self.machine.dies_at = self.world.t + 3

    def _mount(self) -> None:
        if self.role is Role.SUPERSEDED or self.job is None:
            return
        if self.mounted is None:
            for drive in self.world.drives.values():
                if drive.user == self.machine.vm.uid:
                    number = drive.disk.number
                    if drive.broken or self.clumsy:
                        told = FactIn(Kind.NO_DISK, 0, f"{number}-mount")
                        self.outbox += [] if told in self.outbox else [told]
                        continue
                    self.mounted = drive
                    self.say(Kind.ATTACHED, 0, str(number))
                    if drive.held.get(self.job):
                        gen, step = max(drive.held[self.job])
                        self.say(Kind.CHECKPOINT, 0, f"{gen}-{step}")
                    for gen, step in drive.damaged.get(self.job, []):
                        self.say(Kind.DAMAGED, 0, f"{gen}-{step}")

    def _order(self, order: FetchOrder | None, mirrored_at: float | None) -> None:
        self.mirrored_at = mirrored_at
        if order is None or self.alive:
            self.fetches = None
            return
        gen, _, step = order.commit.partition("-")
        if self.fetches is None or self.fetches[0] != (int(gen), int(step)):
            self.fetches = (int(gen), int(step)), self.world.t + self.world.fetch_s

    def _fetch(self) -> None:
        if self.fetches is None or self.mounted is None or self.world.t < self.fetches[1]:
            return
        commit, text = self.fetches[0], "{}-{}".format(*self.fetches[0])
        if commit in self.world.rotten or commit not in self.world.buckets[self.job or ""]:
            self.say(Kind.UNMIRRORED, 0, text)
            return
        told = str(BucketCopy(text, self.world.copy_bytes))
        if (Kind.FETCHED, 0, told) in self.said:
            return
        held = self.mounted.held.setdefault(self.job or "", [])
        held += [] if commit in held else [commit]
        self.say(Kind.FETCHED, 0, told)
        self.world.through_bucket.append(("down", self.machine.vm.zone))
        self.say(Kind.CHECKPOINT, 0, text)

    def _copy(self, agents: list[Agent]) -> None:
        """The lowest node with a disk copies what it has just saved, once in each stretch of time."""
        every = None if self.run is None or self.run.mirror is None else self.run.mirror.every_s
        writers = [agent for agent in agents if agent.mounted is not None and agent.writes()]
        lowest = min(writers, key=lambda agent: agent.node)
        if every is None or lowest is not self or self.commit is None or not self.world.copies:
            return
        if self.mirrored_at is None or self.world.t // every > self.mirrored_at // every:
            bucket = self.world.buckets[self.job or ""]
            if self.commit not in bucket:
                bucket.append(self.commit)
                self.world.through_bucket.append(("up", self.machine.vm.zone))
            told = BucketCopy("{}-{}".format(*self.commit), self.world.copy_bytes)
            self.say(Kind.MIRRORED, self.gen, str(told))

    def gang_step(self, agents: list[Agent]) -> None:
        """Called once for all living agents of a generation: restore, step, save, stop."""
        world = self.world
        assert self.launched is not None
        whole = len(agents) == len(self.launched.members)
        if whole and any(agent.step_no < 0 for agent in agents):
            self._restore(agents)
            return
        for agent in agents:
            agent._maybe_stop(agents, whole)
        if not whole or not all(a.alive for a in agents):
            return
        if world.crashing and self.step_no > 3:
            world.crashing -= 1
            for agent in agents:
                agent.alive = False
                agent._say_held(agent.gen)
                if sign := world.signs.get(agent.node):
                    agent.say(Kind.HARDWARE_FAULT, agent.gen, sign)
                agent.say(Kind.EXIT, agent.gen, "1")
            return
        if self.step_no == world.loop_steps:
            return
        until = self.run.until if self.run is not None else None
        if until is not None and self.step_no >= until:
            self._reach(agents)
            return
        for agent in agents:
            agent.step_no += 1
        if world.saves and (self.step_no % 10 == 0 or self.step_no == world.loop_steps):
            self._commit(agents)
        if self.step_no >= world.steps:
            for agent in agents:
                agent.alive = False
                agent._say_rung(agents)
                agent.say(Kind.EXIT, agent.gen, "0")

    def _reach(self, agents: list[Agent]) -> None:
        """A trial's step at which its search compares: save, report, stop, and copy the checkpoint."""
        if self.commit != (self.gen, self.step_no) and self.step_no not in {s for _, s in self._held()}:
            self._commit(agents)
        for agent in agents:
            agent.alive = False
            agent._say_held(agent.gen)
            agent._say_rung(agents)
            agent.say(Kind.RELEASED, agent.gen, str(agent.step_no))

    def _say_rung(self, agents: list[Agent]) -> None:
        if self.run is not None and self.run.metric:
            lowest = self is min(agents, key=lambda agent: agent.node)
            value = self.world.value(self.job or "", self.step_no) if lowest else None
            self.say(Kind.RUNG, self.gen, str(Rung(self.step_no, value)))

    def _held(self) -> list[Commit]:
        return [] if self.mounted is None else self.mounted.held.get(self.job or "", [])

    def _copy_stopped(self) -> None:
        """Once its processes have ended at a rung or for a move, the lowest node copies the newest checkpoint."""
        doc, run = self.doc, self.run
        if doc is None or doc.gen != self.gen or self.alive or run is None or run.mirror is None or not self._held():
            return
        at_rung = doc.state in (DocState.RUN, DocState.ROLL_CALL) and run.until is not None
        if (at_rung or doc.upload) and self.machine.vm.uid == doc.members[0].uid and self.world.copies:
            newest, bucket = max(self._held()), self.world.buckets[self.job or ""]
            if newest not in bucket:
                bucket.append(newest)
                self.world.through_bucket.append(("up", self.machine.vm.zone))
            self.say(Kind.MIRRORED, self.gen, str(BucketCopy("{}-{}".format(*newest), self.world.copy_bytes)))

    def _restore(self, agents: list[Agent]) -> None:
        """The newest commit on a disk that a member writes to; the promise is that there is no newer one."""
        world = self.world
        assert self.job is not None
        for agent in agents:
            agent._mount()  # a member with a disk mounts it before it starts the job
        if any(agent.mounted is None and agent.writes() for agent in agents):
            return
        ours = [agent.mounted for agent in agents if agent.mounted and agent.writes()]
        every = [
            drive for drive in world.drives.values() if drive.disk.job == self.job
        ]  # a static machine's is its own
        found = max((commit for drive in ours for commit in drive.held.get(self.job, [])), default=None)
        newest = max((commit for drive in ours + every for commit in drive.held.get(self.job, [])), default=None)
        asked_for = world.record(self.job).given_up
        assert found == newest or asked_for, f"generation {self.gen} starts from {found}, the newest is {newest}"
        world.started.append((self.gen, found))
        for agent in agents:
            agent.step_no = found[1] if found else 0

    def writes(self) -> bool:
        assert self.launched is not None
        return any(m.uid == self.machine.vm.uid and m.disk for m in self.launched.members)

    def _commit(self, agents: list[Agent]) -> None:
        writers = [a for a in agents if a.mounted is not None and a.writes()]
        assert writers, "nobody can write a checkpoint"
        for agent in agents:
            agent.commit = (self.gen, self.step_no)
        for agent in writers:
            assert agent.mounted and agent.mounted.user == agent.machine.vm.uid, "writes to a disk it does not hold"
            if not agent.mounted.broken:
                agent.mounted.held.setdefault(self.job or "", []).append((self.gen, self.step_no))
        self.world.newests[self.job or ""] = (self.gen, self.step_no)
        for agent in agents:
            agent._copy(agents)

    def _maybe_stop(self, agents: list[Agent], whole: bool) -> None:
        """SAVE_STOP: a save takes two seconds and needs the whole gang; then, or at the deadline, released."""
        doc, now = self.doc, self.world.t
        if doc is None or doc.state is not DocState.SAVE_STOP or doc.gen != self.gen or self.hung:
            return
        late = doc.deadline is not None and now >= doc.deadline
        everyone = all(a.doc and a.doc.state is DocState.SAVE_STOP for a in agents)
        if whole and everyone and not late:
            if self.saving_until is None:
                self.saving_until = now + 2
            if now < self.saving_until:
                return
            if self.world.saves and self.commit != (self.gen, self.step_no):
                for agent in agents:
                    agent.saving_until = now
                self._commit(agents)
        elif not late:
            return
        self.alive = False
        self._say_held(doc.gen)
        self.say(Kind.RELEASED, doc.gen, str(max(0, self.step_no)))

    def _say_held(self, gen: int) -> None:
        if self.mounted is not None and self.mounted.held.get(self.job or ""):
            self.say(Kind.CHECKPOINT, gen, "{}-{}".format(*max(self.mounted.held[self.job or ""])))
