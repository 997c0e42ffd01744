"""A stack in process: the control plane, two instances of the function, agents, and the promises that are checked.

Everything that decides is shipped code; ``World`` moves time, starts invocations and breaks things. ``check``
holds after every second, ``settle`` at the end: without faults the job trains again, ends, and nothing is left.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import msgspec
from msgspec.structs import replace

from spotkeeper.contract import names
from spotkeeper.contract.allocation import Allocation, Grant
from spotkeeper.contract.generation import Sync, SyncReply
from spotkeeper.contract.job import JobRequest, JobSpec, RequestKind, Retry
from spotkeeper.contract.market import HOUR_S, MarketPast
from spotkeeper.contract.record import Node, Phase, Record, SlotState
from spotkeeper.contract.stack import PoolState, Price, StackState
from spotkeeper.local.core.vm import Ending
from spotkeeper.reconcile.clouds.base import LOOPBACK, Addresses
from spotkeeper.reconcile.clouds.gce.cloud import Gce
from spotkeeper.reconcile.clouds.http_client import Answer
from spotkeeper.reconcile.controller.document import reply
from spotkeeper.reconcile.controller.intake import accept
from spotkeeper.reconcile.controller.reconcile_job import RoundOptions, run_round
from spotkeeper.reconcile.controller.tick import tick
from spotkeeper.reconcile.decide import Times
from spotkeeper.reconcile.store import paths
from spotkeeper.reconcile.store.objects import StoreError
from spotkeeper.reconcile.store.store import Store
from tests.properties.actors import UNDISTURBED, Actor, Plan, current, hook
from tests.properties.bucket import Bucket
from tests.properties.guests import Guest
from tests.properties.plane import PROJECT, REGION, ZONES, Line, Plane, Still, Time, adapter_api

STACK = "demo"
BOOT_S, NEVER = 20.0, 1e9
NODE_MAIL = f"sk-{STACK}-vm@{PROJECT}.iam.gserviceaccount.com"
JOBS = ("abcd2345", "wxyz6789")
TICK_S = 60.0
SETTLE_S = 4 * 3600.0
FUNCTION_SKEWS = (0.0, 10.0, -10.0)
AGENT_SKEWS = (0.0, 300.0, -300.0)
SCHEDULING = {
    "spot": {
        "provisioningModel": "SPOT",
        "preemptible": True,
        "automaticRestart": False,
        "onHostMaintenance": "TERMINATE",
        "instanceTerminationAction": "DELETE",
        "preemptionNoticeDuration": {"seconds": "120"},
    },
    "on-demand": {"provisioningModel": "STANDARD", "automaticRestart": False, "onHostMaintenance": "TERMINATE"},
}


def template(model: str) -> dict[str, Any]:
    return {
        "machineType": "e2-standard-4",
        "disks": [{"boot": True, "autoDelete": True, "initializeParams": {"diskSizeGb": "10"}}],
        "networkInterfaces": [
            {"network": "global/networks/default", "accessConfigs": [{"type": "ONE_TO_ONE_NAT", "name": "external"}]}
        ],
        "serviceAccounts": [{"email": NODE_MAIL, "scopes": ["https://www.googleapis.com/auth/cloud-platform"]}],
        "metadata": {"items": [{"key": "startup-script", "value": "sleep 1000"}]},
        "tags": {"items": [f"sk-{STACK}"]},
        "scheduling": SCHEDULING[model],
    }


@dataclass(frozen=True)
class Instance:
    """One process of the function: its own clock, cloud client and memory of what it wrote."""

    clock: Still
    cloud: Gce
    options: RoundOptions


class World:
    """``World(seed)``, then ``submit``, ``advance``, the breaking verbs, ``settle``."""

    def __init__(self, seed: int = 0, cap: int = 5, **spec: Any) -> None:
        self.random = random.Random(seed)  # noqa: S311 - a story to be told again
        self.cap = cap
        self.time = Time()
        self.plane = Plane(self.time)
        self.plane.host.on_power = self._power
        self.bucket = Bucket(watch=self._written)
        self.store = Store(self.bucket)
        self.line = Line(self.plane, on_call=self._called)
        self.stack = self._declare()
        self.bucket.create("stack/pools.json", msgspec.json.encode(self.stack))
        past = MarketPast("p", int(self.now // HOUR_S) - 1, boots_s=(2 * BOOT_S,) * 20)  # so that a boot may be slow
        self.bucket.create(paths.market_past("p"), msgspec.json.encode(past))
        self.instances = [self._instance(skew) for skew in FUNCTION_SKEWS]
        fields = {"retry": Retry(crashes=1000)} | spec
        self.spec = JobSpec("job", ("train.py",), 2, **fields)
        self.jobs: list[str] = []
        self.guests: dict[int, Guest] = {}
        self.actors: list[Actor] = []
        self.next_tick = self.now
        self.function_down = False
        self.crashing = 0  # node + 1 whose process fails next
        self.finishing = False
        self.stuck = 0  # of the next machines, those that never come up
        self.lost_answers = 0  # of the function to agents
        self.records: dict[str, Record] = {}
        self.grants: tuple[Grant, ...] = ()
        self.began_as: dict[tuple[str, int, int], tuple[str, str]] = {}
        self.commits: dict[str, tuple[int, int]] = {}  # by disk
        self.newest: dict[str, tuple[int, int]] = {}  # by job
        self.late: set[str] = set()  # machines whose insert outlived its intent, or whose grant a stale list gave back
        self.delayed: set[str] = set()  # inserted by a process that had frozen: another may have listed before
        self.launches: dict[tuple[str, int], list[float]] = defaultdict(list)
        self._known: set[str] = set()

    def close(self) -> None:
        for actor in self.actors:
            actor.kill()
        self.plane.close()

    def _declare(self) -> StackState:
        prices = {zone: Price(on_demand=1.0, spot=0.30 + 0.01 * n) for n, zone in enumerate(ZONES)}
        self.account = self.plane.declare_identities(STACK, public_ip=True)
        links = {model: self.plane.declare(f"sk-{STACK}-p-{model}", template(model)) for model in SCHEDULING}
        pool = PoolState("p", "spot", "e2-standard-4", ZONES, 1, self.cap, 2, 10, "pd-balanced", prices, links)
        return StackState(STACK, "gcp", PROJECT, REGION, "b", (pool,), boot_deadline_s=240)

    def _instance(self, skew: float) -> Instance:
        clock = Still(time=self.time, skew=skew)
        options = RoundOptions(sleep=lambda _: hook("sleep"), parallel=1)
        return Instance(
            clock, Gce(self.stack, adapter_api(self.line, self.account), clock, Addresses(LOOPBACK)), options
        )

    # -- time

    @property
    def now(self) -> float:
        return self.time.now

    def advance(self, seconds: int) -> None:
        for _ in range(seconds):
            self.plane.advance(self.now + 1.0)
            for guest in list(self.guests.values()):
                guest.step()
            if self.now >= self.next_tick and not self.function_down:
                self.next_tick = self.now + TICK_S
                self.tick()
            self.check()

    def turn(self) -> None:
        """A step of the machine: who has been frozen long enough goes on."""
        for actor in list(self.actors):
            actor.left -= 1
            if actor.left <= 0:
                self._go(actor)

    # -- the function

    def tick(self, plan: Plan = UNDISTURBED, instance: int = 0) -> None:
        at = self.instances[instance]
        self._start("tick", lambda: tick(self.store, at.cloud, at.clock, at.options), plan)

    def round(self, job: str, plan: Plan = UNDISTURBED, instance: int = 0) -> None:
        at = self.instances[instance]
        self._start(f"round of {job}", lambda: run_round(self.store, at.cloud, job, at.clock, at.options), plan)

    def event(self, index: int, keep: bool, plan: Plan = UNDISTURBED) -> None:
        """Deliver one of the events that wait, in any order; ``keep``: it will come again."""
        if not self.plane.events:
            return
        index %= len(self.plane.events)
        name = self.plane.events[index] if keep else self.plane.events.pop(index)
        owned = names.parse_vm_name(name)
        if owned is not None:
            self.round(owned.job, plan)

    def call_function(self, guest: Guest, sync: Sync, hear: Callable[[SyncReply | None], None]) -> None:
        """An agent's request. Now and then its invocation is the one that freezes or dies."""
        if self.function_down:
            hear(None)
            return
        at = self.random.choice(self.instances)

        def work() -> None:
            answer = self._sync(at, guest, sync)
            lost = self.lost_answers > 0
            self.lost_answers -= lost
            hear(None if lost else answer)

        self._start(f"sync of {guest.who.name}", work, self._plan_of_sync())

    def _plan_of_sync(self) -> Plan:
        if self.sync_faults and self.random.random() < 0.03:
            if self.random.random() < 0.5:
                return Plan(die_at=self.random.randrange(1, 60))
            return Plan(freeze_at=self.random.randrange(1, 60), thaw_after=self.random.randrange(1, 30))
        return UNDISTURBED

    sync_faults = False

    def _sync(self, at: Instance, guest: Guest, sync: Sync) -> SyncReply:
        """As the function's HTTP interface does it after authentication."""
        store, now = self.store, at.clock.now
        stack = store.read_stack()
        assert stack is not None
        said = accept(store, stack, guest.who, sync, now())
        due = store.read_due(said.job) if said.job else None
        if said.job and (said.new or (due is not None and due <= now())):
            run_round(store, at.cloud, said.job, at.clock, at.options)
            said = accept(store, stack, guest.who, Sync(sync.boot, sync.ver, sync.job), now())
        spec = store.read_spec(said.job, said.record.spec_key()) if said.job and said.record else None
        return reply(said.record, spec, stack, guest.who, sync, said.grant)

    def _start(self, name: str, work: Callable[[], object], plan: Plan) -> None:
        def invoked() -> None:
            try:
                work()
            except StoreError:
                return  # the HTTP interface answers 503; the caller tries again

        actor = Actor(name, invoked, plan)
        self.actors.append(actor)
        self._go(actor)

    def _go(self, actor: Actor) -> None:
        if actor.go():
            self.actors.remove(actor)

    # -- users

    def submit(self, job: str) -> None:
        record = Record(
            job=job,
            uid=f"{int.from_bytes(job.encode(), 'big'):032x}",
            name=f"job-{job}",
            spec_sha256="",
            created=self.now,
            nodes=(Node(),) * self.spec.size().max,
            nonce="submitted",
        )
        self.jobs.append(job)
        self.store.put_spec(job, self.spec)
        self.store.set_active(job)
        assert self.store.create_record(record)

    def request(self, job: str, kind: RequestKind, **more: Any) -> None:
        self.store.put_request(
            job, JobRequest(id=f"{self.random.getrandbits(40):010x}", kind=kind, at=self.now, **more)
        )

    def prices(self, factor: float) -> None:
        pool = self.stack.pools[0]
        prices = {zone: Price(1.0, round(0.3 * factor + 0.01 * n, 3)) for n, zone in enumerate(ZONES)}
        self.stack = replace(self.stack, pools=(replace(pool, prices=prices),))
        self.bucket.put("stack/pools.json", msgspec.json.encode(self.stack))

    # -- machines

    def _power(self, vm_id: int, what: str) -> None:
        guest = self.guests.get(vm_id)
        if what == "on":
            vm = self.plane.vm(vm_id)
            assert vm is not None
            boot = f"{self.random.getrandbits(48):012x}"
            up = self.now + (NEVER if self.stuck else BOOT_S)
            self.stuck = max(0, self.stuck - 1)
            self.guests[vm_id] = Guest(self, vm, boot, up, self.random.choice(AGENT_SKEWS))
        elif what == "button" and guest is not None:
            guest.button()
        elif what == "cut":
            self.guests.pop(vm_id, None)

    def power_off(self, guest: Guest) -> None:
        self.guests.pop(guest.vm_id, None)
        self.plane.host.off(guest.vm_id)

    def reboot(self, guest: Guest) -> None:
        """A warm reboot: the machine never left RUNNING; another boot id."""
        vm = self.plane.vm(guest.vm_id)
        if vm is not None and vm.wire.status == "RUNNING":
            self._power(guest.vm_id, "on")

    def whole(self, guest: Guest) -> bool:
        assert guest.launched is not None
        peers = {(g.who.uid, g.boot) for g in self.guests.values() if g.alive and g.gen == guest.gen and not g.hung}
        return all((member.uid, member.boot) in peers for member in guest.launched.members)

    def commit(self, guest: Guest) -> None:
        """A complete checkpoint: on every disk that a member of the generation writes to."""
        if guest.launched is None or guest.job is None or not guest.alive:
            return
        commit = (guest.gen, guest.step_no)
        writers = {member.uid for member in guest.launched.members if member.disk}
        if guest.mounted is not None and guest.who.uid in writers:
            self.commits[guest.mounted] = commit
            self.newest[guest.job] = max(commit, self.newest.get(guest.job, commit))

    # -- promises

    def record(self, job: str) -> Record:
        return self.records[job]

    def began(self, guest: Guest) -> None:
        """A guest starts to train: at most one member per node and generation, for ever."""
        assert guest.job is not None
        key, me = (guest.job, guest.node, guest.gen), (guest.who.uid, guest.boot)
        assert self.began_as.setdefault(key, me) == me, f"two members of {key}: {me} and {self.began_as[key]}"

    def _written(self, key: str, data: bytes) -> None:
        if key.endswith("/rec"):
            record = msgspec.json.decode(data, type=Record)
            self._rises(self.records.get(record.job), record)
            self._keeps(self.records.get(record.job), record)
            self.records[record.job] = record
        elif key == "stack/allocation":
            allocation = msgspec.json.decode(data, type=Allocation)
            self._granted(allocation)
            self.grants = allocation.grants

    def _rises(self, old: Record | None, new: Record) -> None:
        """Counters only rise, a job that ended stays ended."""
        if old is None:
            return
        assert new.ver == old.ver + 1, f"version {old.ver} -> {new.ver}"
        assert new.gen in (old.gen, old.gen + 1), f"generation {old.gen} -> {new.gen}"
        for index, (before, after) in enumerate(zip(old.nodes, new.nodes, strict=True)):
            assert after.top >= before.top, f"node {index}: attempt {before.top} -> {after.top}"
            assert after.disk_top >= before.disk_top, f"node {index}: disk {before.disk_top} -> {after.disk_top}"
        order = {Phase.RUN: 0, Phase.HOLD: 0, Phase.END: 1, Phase.DONE: 2}
        assert order[new.phase] >= order[old.phase], f"phase {old.phase} -> {new.phase}"

    def _keeps(self, old: Record | None, new: Record) -> None:
        """No member is given up without a fact (gone, under notice, rebooted, suspected) or a replacement reason."""
        if old is None or new.phase is not Phase.RUN or old.pause or old.move or self.line.served_stale:
            return
        for index, (before, after) in enumerate(zip(old.nodes, new.nodes, strict=True)):
            slot = before.cur
            if (
                slot is None
                or slot.state is not SlotState.MEMBER
                or before.replace_reason
                or slot.notice is not None
                or old.roll
            ):
                continue
            if after.cur is None or after.cur.attempt != slot.attempt:
                vm, guest = self.plane.vm(int(slot.uid or 0)), self.guests.get(int(slot.uid or 0))
                going = vm is None or vm.wire.status != "RUNNING" or vm.ending is not Ending.NONE
                well = guest is not None and not guest.hung and guest.boot == slot.boot
                assert going or not well, f"healthy member {slot.attempt} of node {index} is given up: {after}"

    def _granted(self, allocation: Allocation) -> None:
        keys = [(grant.job, grant.node, grant.attempt) for grant in allocation.grants]
        assert len(set(keys)) == len(keys), "one attempt has two grants"
        assert len(allocation.grants) <= self.cap, f"{len(allocation.grants)} grants, the cap is {self.cap}"
        on_demand = [grant for grant in allocation.grants if grant.resource.endswith("/on-demand")]
        assert len(on_demand) <= self.stack.pools[0].max_on_demand
        listed = {vm.name for vm in self.plane.vms()}
        for grant in self.grants:
            name = names.vm_name(STACK, grant.job, grant.node, grant.attempt)
            if grant not in allocation.grants and name in listed:
                unseen = name in self.late or name in self.delayed
                assert self.line.served_stale or unseen, f"the grant of {name} is released while it runs"
                self.late.add(name)

    def _called(self, method: str, path: str, answer: Answer) -> None:
        """Every call that changes machines, as it reaches the cloud."""
        if path.endswith("/createSnapshot") and answer.status == 200:
            self._copied()
        if "/instances" not in path or answer.status != 200 or method == "GET":
            return
        if method == "POST" and path.endswith("/instances"):
            self._inserted(answer)
        elif method == "DELETE":
            self._deleted(int(msgspec.json.decode(answer.body)["targetId"]))

    def _copied(self) -> None:
        """A snapshot holds what its disk held; it is named after the disk that is made from it."""
        for shot in self.plane.snapshots():
            source = self.commits.get(shot.source_disk.rpartition("/")[2])
            if shot.name not in self.commits and source is not None:
                self.commits[shot.name] = source

    def _inserted(self, answer: Answer) -> None:
        operation = msgspec.json.decode(answer.body)
        name = urlsplit(operation["targetLink"]).path.rpartition("/")[2]
        if operation["id"] in self._known:
            return
        self._known.add(operation["id"])
        owned = names.parse_vm_name(name)
        assert owned is not None, f"a machine of nobody: {name}"
        node = self.records[owned.job].nodes[owned.node]
        if not any(slot is not None and slot.attempt == owned.number for slot in (node.cur, node.next)):
            self.late.add(name)
        if (actor := current()) is not None and actor.was_frozen:
            self.delayed.add(name)
        granted = [(grant.job, grant.node, grant.attempt) for grant in self.grants]
        assert name in self.late or (owned.job, owned.node, owned.number) in granted, f"{name} has no grant"
        made = self.launches[owned.job, owned.node]
        made.append(self.now)
        recent = sum(1 for at in made if self.now - at < 3600.0)
        assert recent <= 2 * Times().launches_node, (
            f"{recent} machines of node {owned.node} within an hour"
        )  # two windows

    def _deleted(self, vm_id: int) -> None:
        """No live machine is ever deleted, by whomever and however late."""
        vm = self.plane.vm(vm_id)
        owned = names.parse_vm_name(vm.name) if vm is not None else None
        if vm is None or owned is None:
            return
        node = self.records[owned.job].nodes[owned.node]
        for slot in (node.cur, node.next):
            live = slot is not None and slot.attempt == owned.number and slot.zone == vm.zone
            assert not (live and slot is not None and slot.uid in (None, str(vm_id))), f"{vm.name} is live and deleted"

    def check(self) -> None:
        mounted = [guest.mounted for guest in self.guests.values() if guest.mounted is not None]
        assert len(set(mounted)) == len(mounted), f"two writers of a disk: {mounted}"
        alive = [(g.job, g.node, g.gen) for g in self.guests.values() if g.alive and not g.hung]
        assert len(set(alive)) == len(alive), f"two members: {alive}"
        going = (Ending.DELETE, Ending.PREEMPT, Ending.GUEST)
        owned = [vm.name for vm in self.plane.vms() if vm.name not in self.late and vm.ending not in going]
        assert len(owned) <= self.cap, f"{len(owned)} machines, the cap is {self.cap}: {owned}"

    # -- the end of the story

    def calm(self) -> None:
        """Cause no further faults; frozen actors continue to their end."""
        self.line.lost = self.line.throttled = self.line.stale = 0
        self.line.down = self.function_down = self.sync_faults = False
        self.bucket.weather.lost = self.bucket.weather.throttled = 0
        self.bucket.weather.down = False
        self.crashing = self.lost_answers = self.stuck = 0
        for zone in ZONES:
            self.plane.partition(zone, False)
            self.plane.capacity(zone, 99)
            self.plane.capacity(zone, 99, spot=False)
        for guest in self.guests.values():
            guest.hung = False

    def thaw(self, share: float = 1.0) -> None:
        """Frozen invocations go on to their ends."""
        for actor in [actor for actor in self.actors if self.random.random() < share]:
            while actor in self.actors:
                self._go(actor)

    def training(self, job: str) -> bool:
        record = self.record(job)
        if record.phase is not Phase.RUN or record.stop or not record.gen:
            return False
        members = all(node.cur is not None and node.cur.state is SlotState.MEMBER for node in record.nodes)
        alive = {g.node for g in self.guests.values() if g.job == job and g.alive and g.gen == record.gen}
        return members and len(alive) == len(record.nodes)

    def until(self, what: Callable[[], bool], say: str) -> None:
        end = self.now + SETTLE_S
        while not what():
            assert self.now < end, f"{say}: not within {SETTLE_S:.0f} s; {self.records}"
            self.advance(5)

    def settle(self) -> None:
        """Convergence: the jobs train again, one after the other where the cap is low; each ends, and nothing is left.

        Half of the frozen invocations thaw only when all is over: their calls are the last that reach the cloud.
        """
        self.calm()
        self.thaw(0.5)
        self.advance(1)  # asks are taken in by their time, and this one is the last
        for job in self.jobs:
            self.request(job, RequestKind.RESUME)
        while waiting := [job for job in self.jobs if not self.record(job).over]:
            self.until(lambda waiting=waiting: any(map(self.trains_or_ended, waiting)), "training")  # type: ignore[misc]
            for job in waiting:
                if self.training(job):
                    self.request(job, RequestKind.CANCEL)
                    self.until(lambda job=job: self.record(job).phase is Phase.DONE, "the end")  # type: ignore[misc]
        self.until(lambda: all(self.record(job).phase is Phase.DONE for job in self.jobs), "the end")
        self.thaw()
        self.until(self.clean, "nothing left")
        self.advance(150)
        assert self.clean(), "something came back"

    def trains_or_ended(self, job: str) -> bool:
        return self.training(job) or self.record(job).over

    def clean(self) -> bool:
        return not (self.plane.vms() or self.plane.disks() or self.plane.snapshots() or self.grants)
