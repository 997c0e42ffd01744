"""A cloud under virtual time behind ``contract.cloud.Cloud``: asynchronous, short of machines, and forgetful of
nothing.

As Compute Engine: names are zonal, an idempotency key is remembered after its machine is gone, an insert may be
accepted, listed for seconds and fail as an operation, deletion takes its time and holds the disk meanwhile, an
attached disk is a mutex. It judges what it is asked (S2, S3, S7, S10) and tells ``World.violate``; it decides nothing.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import takewhile
from random import Random
from typing import TYPE_CHECKING

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
    MachineTimes,
    Result,
    ResultKind,
    Vm,
    VmStatus,
)
from spotkeeper.contract.market import PriceRun
from spotkeeper.contract.stack import Model, region_of

if TYPE_CHECKING:
    from spotkeeper.contract import cloud as spec_cloud
    from tests.sim.agent import Agent
    from tests.sim.world import World

Commit = tuple[int, int]  # generation, step
OPERATIONS = 100  # failed operations that a listing tells, newest last
REMEMBERED_S = 3600.0  # and for how long
DISK_GB, DIFFERENCE_GB = 37.0, 3.0
VERSIONS = 4  # of the listing, for a stale view


@dataclass
class Drive:
    """A disk. ``user``: uid of the machine that has it. ``newest``: what is committed on it."""

    disk: Disk
    user: str | None = None
    newest: Commit | None = None
    gb: float = DISK_GB  # what is on it
    bases: set[str] = field(default_factory=set)  # its snapshots


@dataclass
class Machine:
    vm: Vm
    key: str
    boot: str
    agent: Agent | None = None
    notice: float | None = None
    admitted: bool = False
    fate: str = ""  # what took it away before it was admitted: "stockout", "market"
    billed_from: float | None = None

    @property
    def uid(self) -> str:
        return self.vm.uid

    @property
    def there(self) -> bool:
        return self.vm.status in (VmStatus.PENDING, VmStatus.RUNNING)


@dataclass(frozen=True)
class Billed:
    """One machine's time from RUNNING to gone, as the provider's bill has it. Virtual unix seconds."""

    vm: Vm
    start: float
    end: float


@dataclass(frozen=True)
class Shot:
    """A snapshot. ``region``: where it is stored. ``torn``: its disk was being written."""

    told: DiskSnapshot
    newest: Commit | None
    region: str
    torn: bool


@dataclass(frozen=True)
class Transferred:
    """What went from one region to another, as the bill has it."""

    source: str
    target: str
    gb: float


@dataclass
class Delays:
    """Seconds, least and most, drawn evenly: an insert's way to RUNNING, the system's boot, and so on."""

    start_s: tuple[float, float] = (8.0, 25.0)
    boot_s: tuple[float, float] = (25.0, 70.0)  # RUNNING to hello: image, bundle, imports, a warm launcher
    gone_s: tuple[float, float] = (4.0, 30.0)
    disk_s: tuple[float, float] = (1.0, 4.0)
    attach_s: tuple[float, float] = (1.0, 4.0)
    shot_s: tuple[float, float] = (10.0, 60.0)
    stockout_s: tuple[float, float] = (2.0, 8.0)


@dataclass
class Trouble:
    """What the cloud's front does to calls: shares of them, and zones that say nothing."""

    lost: float = 0.0  # carried out, unanswered
    throttled: float = 0.0  # refused for the moment
    stuck: float = 0.0  # machines that run and never come up
    listed_stockouts: float = 0.5  # of the stockouts: accepted first, gone seconds later
    blind: set[str] = field(default_factory=set)


class Cloud:
    """``capacity(zone, model)``: how many machines the zone carries now."""

    def __init__(self, world: World, random: Random, delays: Delays) -> None:
        self.world, self.random, self.delays = world, random, delays
        self.trouble = Trouble()
        self.machines: dict[str, Machine] = {}  # by uid
        self.bill: list[Billed] = []  # of machines that are gone
        self.drives: dict[tuple[str, str], Drive] = {}  # by (name, zone)
        self.shots: dict[str, Shot] = {}
        self.transfers: list[Transferred] = []
        self.keys: dict[str, str] = {}  # idempotency key -> uid of the machine
        self.failed: deque[Result] = deque(maxlen=OPERATIONS)
        self.launches = self.refusals = self.duplicates = self.calls = 0
        self.limits: dict[tuple[str, Model], int] = {}  # overrides of the market
        self.versions: deque[Listing] = deque(maxlen=VERSIONS)
        self.looks = 0
        self.stale_at = -1  # this look shows a listing
        self.stale_by = 0  # so many versions old
        self.changes = 0
        self._listing: Listing | None = None

    def process(self) -> spec_cloud.Cloud:
        """The cloud as one process of the function has it; Compute Engine's adapter would remember nothing."""
        return self

    # -- what is there

    def list(self, stack: str) -> Listing:
        """Cached until something changes; a stale view serves an earlier one."""
        self.looks += 1
        if self.looks == self.stale_at and self.versions:
            return self.versions[-min(self.stale_by, len(self.versions))]
        if self._listing is None:
            self._listing = self._look()
        return self._listing

    def changed(self) -> None:
        if self._listing is not None:
            self.versions.append(self._listing)
        self._listing = None
        self.world.version += 1

    def _look(self) -> Listing:
        blind = self.trouble.blind
        held: dict[str, list[str]] = {}
        for drive in self.drives.values():
            if drive.user is not None:
                held.setdefault(drive.user, []).append(drive.disk.name)
        vms = tuple(
            replace(m.vm, disks=tuple(held.get(m.uid, ()))) for m in self.machines.values() if m.vm.zone not in blind
        )
        disks = tuple(
            replace(d.disk, users=(self.machines[d.user].vm.name,)) if d.user else d.disk
            for d in self.drives.values()
            if d.disk.zone not in blind
        )
        since = self.world.engine.t - REMEMBERED_S
        failed = tuple(result for result in self.failed if result.at >= since)
        shots = tuple(shot.told for shot in self.shots.values())
        answered = frozenset(self.world.stack.zones()) - blind
        newest = takewhile(lambda one: one.end >= since, reversed(self.bill))
        ran = tuple(MachineTimes(one.vm.name, one.vm.zone, one.start, one.end) for one in newest)
        return Listing(vms, disks, shots, answered, failed, tuple(one for one in ran if one.zone in answered))

    def of(self, job: str) -> list[Machine]:
        return [machine for machine in self.machines.values() if machine.vm.job == job]

    def used(self, zone: str, model: Model) -> int:
        """Machines that hold capacity: one that stops, or has its notice, has lost its claim."""
        return sum(
            m.there and m.notice is None and m.vm.zone == zone and m.vm.model is model for m in self.machines.values()
        )

    def limit(self, zone: str, model: Model) -> int:
        return self.limits.get((zone, model), self.world.capacity(zone, model))

    def price_history(self, pool: str, deadline_s: float) -> tuple[PriceRun, ...] | None:
        """It tells no prices: the stack file's hold."""
        return None

    # -- calls

    def perform(self, action: Action, deadline_s: float) -> Result:
        self.calls += 1
        now, trouble = self.world.engine.t, self.trouble
        if trouble.throttled and self.random.random() < trouble.throttled:
            return Result(action, ResultKind.THROTTLED, "rateLimitExceeded", now)
        kind, detail = self._do(action)
        if trouble.lost and self.random.random() < trouble.lost:
            return Result(action, ResultKind.AMBIGUOUS, "the answer was lost", now)
        return Result(action, kind, detail, now)

    def _do(self, action: Action) -> tuple[ResultKind, str]:
        doing: dict[type, Callable[..., tuple[ResultKind, str]]] = {
            InsertVm: self._insert,
            DeleteVm: self._delete,
            CreateDisk: self._create_disk,
            AttachDisk: self._attach,
            DetachDisk: self._detach,
            DeleteDisk: self._delete_disk,
            CreateSnapshot: self._snapshot,
            DeleteSnapshot: self._delete_snapshot,
        }
        return doing[type(action)](action)

    def _draw(self, span: tuple[float, float]) -> float:
        return self.random.uniform(*span)

    def _insert(self, action: InsertVm) -> tuple[ResultKind, str]:
        self.world.checks.insert(action)
        key = names.idempotency_key(action.job, action.uid, "insert", action.node, action.attempt, action.zone)
        if key in self.keys:
            known = self.keys[key] in self.machines
            return (ResultKind.ACCEPTED, "is there already") if known else (ResultKind.DEAD_KEY, "its machine is gone")
        empty = self.used(action.zone, action.model) >= self.limit(action.zone, action.model)
        if empty:
            self.refusals += 1
            if self.random.random() >= self.trouble.listed_stockouts:
                return ResultKind.CAPACITY, "ZONE_RESOURCE_POOL_EXHAUSTED"
        self._launch(action, key, doomed=empty)
        return ResultKind.ACCEPTED, ""

    def _launch(self, action: InsertVm, key: str, *, doomed: bool) -> None:
        world, engine = self.world, self.world.engine
        number = len(self.keys)
        uid = f"{1000 + number}"
        self.keys[key] = uid
        vm = Vm(
            name=names.vm_name(world.stack.stack, action.job, action.node, action.attempt),
            uid=uid,
            zone=action.zone,
            status=VmStatus.PENDING,
            pool=action.pool,
            job=action.job,
            node=action.node,
            attempt=action.attempt,
            address=f"10.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}",
            model=action.model,
            created=engine.t,
        )
        machine = Machine(vm, key, self._id())
        self.machines[uid] = machine
        self.changed()
        if doomed:
            engine.after(self._draw(self.delays.stockout_s), lambda: self._stockout(machine, action))
            return
        self.launches += 1
        world.meter.launched = True
        engine.after(self._draw(self.delays.start_s), lambda: self._running(machine))

    def _stockout(self, machine: Machine, action: InsertVm) -> None:
        machine.fate = "stockout"
        self.failed.append(Result(action, ResultKind.CAPACITY, "ZONE_RESOURCE_POOL_EXHAUSTED", self.world.engine.t))
        self.remove(machine)

    def _running(self, machine: Machine) -> None:
        if machine.uid not in self.machines or machine.vm.status is not VmStatus.PENDING:
            return
        machine.vm = replace(machine.vm, status=VmStatus.RUNNING, created=self.world.engine.t)
        machine.billed_from = self.world.engine.t
        self.world.meter.machines(+1)
        self.changed()
        if not self.trouble.stuck or self.random.random() >= self.trouble.stuck:
            self._boot(machine, self._draw(self.delays.boot_s))

    def _boot(self, machine: Machine, seconds: float) -> None:
        boot = machine.boot

        def up() -> None:
            if machine.uid in self.machines and machine.vm.status is VmStatus.RUNNING and machine.boot == boot:
                self.world.agent_up(machine)

        self.world.engine.after(seconds, up)

    def _delete(self, action: DeleteVm) -> tuple[ResultKind, str]:
        machine = self.machines.get(action.uid)
        if machine is None:
            return ResultKind.ACCEPTED, "is gone"
        self.world.checks.delete(machine)
        self.stopping(machine, self._draw(self.delays.gone_s))
        return ResultKind.ACCEPTED, ""

    def _create_disk(self, action: CreateDisk) -> tuple[ResultKind, str]:
        name = names.disk_name(self.world.stack.stack, action.job, action.node, action.number)
        if (name, action.zone) in self.drives:
            return ResultKind.ACCEPTED, "is there already"
        newest = None
        if action.snapshot is not None:
            if action.snapshot not in self.shots:
                return ResultKind.PERMANENT, "no such snapshot"
            shot = self.shots[action.snapshot]
            newest = shot.newest
            if shot.torn:
                self.world.violate("S2", f"{name} is made of a snapshot of a disk that was written")
            self._transferred(shot.region, region_of(action.zone), shot.told.gb)
        disk = Disk(name, action.zone, action.job, action.node, action.number, (), False)
        drive = Drive(disk, None, newest)
        self.drives[name, action.zone] = drive

        def ready() -> None:
            drive.disk = replace(drive.disk, ready=True)
            self.changed()

        self.world.engine.after(self._draw(self.delays.disk_s), ready)
        self.changed()
        return ResultKind.ACCEPTED, ""

    def _attach(self, action: AttachDisk) -> tuple[ResultKind, str]:
        """Taken at once (the mutex), there some seconds later."""
        drive, machine = self.drives.get((action.disk, action.zone)), self.machines.get(action.vm_uid)
        if drive is None or machine is None or machine.vm.status is not VmStatus.RUNNING or not drive.disk.ready:
            return ResultKind.IN_USE, "not there, or not ready"
        if drive.user == machine.uid:
            return ResultKind.ACCEPTED, "is attached already"
        if drive.user is not None:
            return ResultKind.IN_USE, "RESOURCE_IN_USE_BY_ANOTHER_RESOURCE"
        drive.user = machine.uid
        self.changed()

        def arrived() -> None:
            if drive.user == machine.uid and machine.agent is not None:
                machine.agent.disk_there()

        self.world.engine.after(self._draw(self.delays.attach_s), arrived)
        return ResultKind.ACCEPTED, ""

    def _detach(self, action: DetachDisk) -> tuple[ResultKind, str]:
        drive = self.drives.get((action.disk, action.zone))
        if drive is not None and drive.user == action.vm_uid:
            self.world.checks.detach(drive)
            drive.user = None
            self.changed()
        return ResultKind.ACCEPTED, ""

    def _delete_disk(self, action: DeleteDisk) -> tuple[ResultKind, str]:
        drive = self.drives.get((action.disk, action.zone))
        if drive is None:
            return ResultKind.ACCEPTED, "is gone"
        if drive.user is not None:
            return ResultKind.IN_USE, "RESOURCE_IN_USE_BY_ANOTHER_RESOURCE"
        self.world.checks.delete_disk(drive)
        del self.drives[action.disk, action.zone]
        self.changed()
        return ResultKind.ACCEPTED, ""

    def _snapshot(self, action: CreateSnapshot) -> tuple[ResultKind, str]:
        stack = self.world.stack.stack
        drive = self.drives.get((names.disk_name(stack, action.job, action.node, action.number), action.zone))
        name = names.disk_name(stack, action.job, action.node, action.copy)
        if drive is None:
            return ResultKind.PERMANENT, "no such disk"
        if name in self.shots:
            return ResultKind.ACCEPTED, "is there already"
        if drive.user is not None and not action.region:
            self.world.violate("S2", f"a snapshot of {drive.disk.name} while {drive.user} holds it: stale at once")
        region = action.region or region_of(action.zone)
        base = any(one in self.shots and self.shots[one].told.in_region(region) for one in drive.bases)
        gb = DIFFERENCE_GB if base else drive.gb
        told = DiskSnapshot(name, action.job, action.node, action.copy, False, gb, {region: False})
        self.shots[name] = Shot(told, drive.newest, region, drive.user is not None)
        drive.bases.add(name)
        self._transferred(region_of(action.zone), region, gb)

        def ready() -> None:
            if name in self.shots:
                now = replace(told, ready=True, regions={region: True})
                self.shots[name] = dataclasses.replace(self.shots[name], told=now)
                self.changed()

        self.world.engine.after(self._draw(self.delays.shot_s), ready)
        self.changed()
        return ResultKind.ACCEPTED, ""

    def _transferred(self, source: str, target: str, gb: float) -> None:
        if source != target:
            self.transfers.append(Transferred(source, target, gb))

    def _delete_snapshot(self, action: DeleteSnapshot) -> tuple[ResultKind, str]:
        if self.shots.pop(action.name, None) is not None:
            self.changed()
        return ResultKind.ACCEPTED, ""

    # -- what happens to machines

    def preempt(self, machine: Machine, notice_s: float) -> None:
        """``notice_s`` 0: ACPI and 30 s, as of old; below 0: gone without a word."""
        if not machine.there or machine.notice is not None:
            return
        machine.fate = machine.fate or "market"
        if notice_s < 0 or machine.vm.status is VmStatus.PENDING:
            self.remove(machine)
            return
        deadline = self.world.engine.t + notice_s
        if notice_s > 0:
            machine.notice = deadline
            if machine.agent is not None:
                machine.agent.noticed(deadline)

        def over() -> None:
            if machine.uid in self.machines and machine.there and (machine.notice == deadline or notice_s == 0):
                self.stopping(machine, 30.0)

        self.world.engine.at(deadline, over)

    def reprieve(self, machine: Machine) -> None:
        deadline, machine.notice, machine.fate = machine.notice, None, ""
        if deadline is not None and machine.agent is not None:
            machine.agent.reprieved(deadline)

    def reboot(self, machine: Machine) -> None:
        machine.boot = self._id()
        if machine.agent is not None:
            machine.agent.die()
            machine.agent = None
        self._boot(machine, self._draw(self.delays.boot_s))

    def stopping(self, machine: Machine, seconds: float) -> None:
        """It goes down, and holds its disk until it is gone."""
        if machine.vm.status is VmStatus.STOPPING or machine.uid not in self.machines:
            return
        if machine.vm.status is VmStatus.PENDING:
            self.remove(machine)
            return
        machine.vm = replace(machine.vm, status=VmStatus.STOPPING)
        self.changed()
        if machine.agent is not None:
            machine.agent.going_down(self.world.engine.t + seconds)
        self.world.engine.after(seconds, lambda: self.remove(machine))

    def remove(self, machine: Machine) -> None:
        if self.machines.pop(machine.uid, None) is None:
            return
        if machine.agent is not None:
            machine.agent.die()
            machine.agent = None
        if machine.billed_from is not None:
            self.world.meter.machines(-1)
            self.bill.append(Billed(machine.vm, machine.billed_from, self.world.engine.t))
        if not machine.admitted and not machine.fate and machine.billed_from is not None:
            self.duplicates += self.world.checks.never_needed(machine)
        for drive in self.drives.values():
            if drive.user == machine.uid:
                drive.user = None
        self.changed()

    def _id(self) -> str:
        return f"{self.random.getrandbits(48):012x}"
