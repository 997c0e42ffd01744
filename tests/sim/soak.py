"""A job on a recorded market for days, with everything going wrong at once; then calm, and nothing may be left.

One run is one seed: it draws the zones and where the recording begins, who is preempted and with what warning, the
synthetic stockouts, and every fault of machines, cloud, bucket and function. ``run`` gives plain numbers, so that
runs can be made side by side; ``bench/soak.py`` makes many of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from spotkeeper.contract.cloud import VmStatus
from spotkeeper.contract.job import Checkpoint, RequestKind, Retry
from spotkeeper.contract.record import Phase
from spotkeeper.contract.stack import Model
from spotkeeper.local.core.market import Market
from tests.sim.cloud import Machine
from tests.sim.engine import START
from tests.sim.meter import Recovery
from tests.sim.world import Job, World, small_stack

MARKET = "gcp-2025-10-h100"
RECORDED = (
    "asia-southeast1-c",
    "europe-west1-c",
    "us-central1-a",
    "us-central1-b",
    "us-central1-c",
    "us-east4-a",
    "us-east4-b",
    "us-west1-a",
    "us-west1-b",
)
DAY_S = 86_400.0
SPARE = 1.5  # machines a zone carries in a good hour, for each node
NOTICES_S = (120.0, 120.0, 120.0, 30.0, 30.0, 0.0, 0.0, -1.0)  # 0: ACPI alone; below: gone without a word
CALM_S = 3600.0
CLEAN_S = 1200.0
MOVE_S = 900.0
ENDINGS = 10  # tries to end by itself
JOB = "abcd2345"


@dataclass(frozen=True)
class Run:
    """What one seed came to."""

    seed: int
    nodes: int
    days: float
    violations: tuple[str, ...]
    left_over: tuple[str, ...]
    recoveries: tuple[Recovery, ...]
    launches: int
    refusals: int
    duplicates: int
    generations: int
    ticks: int
    skipped: int
    events: int
    kills: int
    trained: float  # share of the time in which all trained
    faults: dict[str, int] = field(default_factory=dict)


def run(seed: int, nodes: int, days: float) -> Run:
    """One job of so many nodes for so long (virtual)."""
    storm = Storm(seed, nodes)
    world, job = storm.world, storm.job
    storm.blow(days * DAY_S)
    trained = world.meter.useful()
    storm.calm()
    storm.finish()
    world.until(lambda: not world.left_over(), CLEAN_S)
    return Run(
        seed,
        nodes,
        (world.engine.t - START) / DAY_S,
        tuple(world.violations),
        tuple(world.left_over()),
        tuple(world.meter.recoveries),
        world.cloud.launches,
        world.cloud.refusals,
        world.cloud.duplicates,
        world.record(job.id).gen,
        world.ticks,
        world.skipped,
        world.engine.events,
        world.function.kills,
        trained / (days * DAY_S * nodes),
        storm.faults,
    )


class Storm:
    """The faults of one run, each with its mean time between two (seconds for a whole gang)."""

    def __init__(self, seed: int, nodes: int) -> None:
        self.random = Random(seed * 1_000_003 + nodes)  # noqa: S311  a seed, so that a story can be told again
        zones = tuple(sorted(self.random.sample(RECORDED, 3)))
        self.market = Market.load(MARKET, zones, epoch=START, seed=seed, per_zone=int(nodes * SPARE) + 1)
        self.zones = zones
        self.world = world = World(
            stack=small_stack(nodes, zones, on_demand=nodes),
            seed=self.random.getrandbits(40),
            capacity=self._capacity,
            events=self.random.random() < 0.8,
            hang_share=0.15,
            look_s=0.4,
        )
        world.meter.counts = world.function.counts
        self._front(nodes)
        self.faults: dict[str, int] = {}
        self.over = False
        replicated = nodes == 1 or self.random.random() < 0.75
        self.least = max(1, nodes // 2) if replicated and self.random.random() < 0.3 else nodes
        self.job: Job = world.submit(
            JOB,
            nodes={"min": self.least, "max": nodes},
            interval_s=self.random.choice((120.0, 300.0, 600.0)),
            checkpoint=Checkpoint(replicated=replicated),
            retry=Retry(crashes=1000),
        )
        world.engine.at(self.market.next_change(world.engine.t), self._market)
        for fault, mean_s in self._means(nodes).items():
            self._arm(fault, mean_s)

    def _front(self, nodes: int) -> None:
        """What calls and requests suffer all the time."""
        function, trouble = self.world.function, self.world.cloud.trouble
        share = 0.002 / nodes**0.5  # of effects, of which many nodes need many more
        function.lost, function.kill_rate, function.store_rate, function.stall_rate = 0.01, share, share, share / 4
        trouble.lost, trouble.throttled, trouble.stuck = 0.02, 0.02, 0.02

    def _capacity(self, zone: str, model: Model, now: float) -> int:
        return self.market.capacity(zone, now) if model is Model.SPOT else 1_000_000

    def _means(self, nodes: int) -> dict[Callable[[], None], float]:
        machine = 20 * DAY_S / nodes + 0.25 * DAY_S  # a machine's own troubles come more often to many
        return {
            self._dies: machine,
            self._hangs: 3 * machine,
            self._reboots: 3 * machine,
            self._reprieve: DAY_S,
            self._stockout: DAY_S,
            self._crash: 2 * DAY_S,
            self._blind: DAY_S,
            self._down: 2 * DAY_S,
            self._again: 0.25 * DAY_S,
            self._ask: 2 * DAY_S,
        }

    def _arm(self, fault: Callable[[], None], mean_s: float) -> None:
        def comes() -> None:
            if not self.over:
                fault()
                self._arm(fault, mean_s)

        self.world.engine.after(self.random.expovariate(1 / mean_s), comes)

    def blow(self, seconds: float) -> None:
        self.world.run(seconds)

    def calm(self) -> None:
        """No fault from here on; what hangs is found."""
        self.over = True
        world = self.world
        function, trouble = world.function, world.cloud.trouble
        function.lost = function.kill_rate = function.stall_rate = function.store_rate = 0.0
        trouble.lost = trouble.throttled = trouble.stuck = 0.0
        trouble.blind.clear()
        function.down = False
        world.cloud.limits.clear()
        world.cloud.changed()

    def finish(self) -> None:
        """Half of the jobs end by themselves, if they come to train once more; the others are cancelled."""
        world, job = self.world, self.job
        if world.record(job.id).phase is Phase.HOLD:
            world.request(job.id, RequestKind.RESUME)
        for _ in range(ENDINGS if self.random.random() < 0.5 else 0):
            if world.until(lambda: job.training, CALM_S):
                job.finish()  # nothing happens to one that is just stopping
            world.run(30.0)
            if world.record(job.id).phase is not Phase.RUN:
                return
        world.request(job.id, RequestKind.CANCEL)

    # -- the market

    def _market(self) -> None:
        """Each zone keeps what it carries; the others go."""
        world = self.world
        for zone in self.zones:
            held = [
                m
                for m in world.cloud.of(JOB)
                if m.there and m.notice is None and m.vm.zone == zone and m.vm.model is Model.SPOT
            ]
            excess = len(held) - world.cloud.limit(zone, Model.SPOT)
            for machine in self.random.sample(held, excess) if excess > 0 else ():
                self._preempt(machine)
        world.engine.at(self.market.next_change(world.engine.t), self._market)

    def _preempt(self, machine: Machine) -> None:
        self._count("preempted")
        self.world.preempt(machine, self.random.choice(NOTICES_S))

    # -- faults

    def _count(self, what: str) -> None:
        self.faults[what] = self.faults.get(what, 0) + 1

    def _running(self) -> list[Machine]:
        return [m for m in self.world.cloud.of(JOB) if m.vm.status is VmStatus.RUNNING and m.agent is not None]

    def _one(self, what: str) -> Machine | None:
        running = self._running()
        if not running:
            return None
        self._count(what)
        return self.random.choice(running)

    def _dies(self) -> None:
        if (machine := self._one("died")) is not None:
            self.world.preempt(machine, -1.0)

    def _hangs(self) -> None:
        machine = self._one("hung")
        if machine is not None and machine.agent is not None:
            machine.agent.hang()

    def _reboots(self) -> None:
        if (machine := self._one("rebooted")) is not None:
            self.world.cloud.reboot(machine)

    def _reprieve(self) -> None:
        """A notice, and the word back half a minute later."""
        machine = self._one("reprieved")
        if machine is None or machine.notice is not None:
            return
        self.world.preempt(machine, 120.0)
        self.world.engine.after(self.random.uniform(5.0, 90.0), lambda: self.world.cloud.reprieve(machine))

    def _stockout(self) -> None:
        """A zone sells nothing for a while, though what runs there runs on."""
        self._count("stockout")
        zone, cloud = self.random.choice(self.zones), self.world.cloud
        cloud.limits[zone, Model.SPOT] = cloud.used(zone, Model.SPOT)

        def over() -> None:
            cloud.limits.pop((zone, Model.SPOT), None)

        self.world.engine.after(self.random.uniform(600.0, 7200.0), over)

    def _crash(self) -> None:
        gang = self.job.gang()
        if gang is not None:
            self._count("user crash")
            gang.user_crash()

    def _blind(self) -> None:
        """A zone says nothing."""
        self._count("blind")
        cloud, zone, lasts_s = self.world.cloud, self.random.choice(self.zones), self.random.uniform(60.0, 1800.0)
        self._excuse(lasts_s)
        cloud.trouble.blind.add(zone)
        cloud.changed()

        def over() -> None:
            cloud.trouble.blind.discard(zone)
            cloud.changed()

        self.world.engine.after(lasts_s, over)

    def _down(self) -> None:
        """The function answers nobody, for less than the agents' lease."""
        self._count("down")
        function = self.world.function
        function.down, lasts_s = True, self.random.uniform(30.0, 3600.0)
        self._excuse(lasts_s)

        def over() -> None:
            function.down, function.up_since = False, self.world.engine.t

        self.world.engine.after(lasts_s, over)

    def _again(self) -> None:
        """An event comes twice, and late."""
        self.world.function.notify(JOB)
        self.world.function.notify(JOB)

    def _ask(self) -> None:
        self._count("asked")
        kind = self.random.choice((RequestKind.SWAP, RequestKind.MOVE, RequestKind.PAUSE, RequestKind.RESIZE))
        nodes = len(self.world.record(JOB).nodes)
        nodes = self.random.randint(self.least, nodes)
        self.world.request(
            JOB, kind, zone=self.random.choice(self.zones), node=self.random.randrange(nodes), nodes=nodes
        )
        if kind is RequestKind.MOVE:  # it is copied to another zone because somebody wants it
            self._excuse(MOVE_S)
        if kind is RequestKind.PAUSE:
            lasts_s = self.random.uniform(120.0, 3600.0)
            self._excuse(lasts_s)
            self.world.engine.after(lasts_s, lambda: self.world.request(JOB, RequestKind.RESUME))

    def _excuse(self, lasts_s: float) -> None:
        """Standing still is nobody's fault until then."""
        meter = self.world.meter
        meter.excused_until = max(meter.excused_until, self.world.engine.t + lasts_s)
