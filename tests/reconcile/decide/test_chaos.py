"""Random storms: everything goes wrong at once, for a while; then nothing does, and the job must end clean.

SAFETY is checked by ``World`` after every second (one member per node and generation, one writer per disk,
no live machine deleted, no stale commit trained on, no grant doubled). LIVENESS: when the faults stop, the
job ends as it should and nothing is left. Seeds make every story repeatable.
"""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from spotkeeper.contract.cloud import VmStatus
from spotkeeper.contract.job import Checkpoint, MachineGroup, RequestKind, Retry
from spotkeeper.contract.record import Outcome, Phase, SlotState
from spotkeeper.contract.stack import Model, ReservedCapacity
from tests.reconcile.world import ZONES, World, stack
from tests.sizes import size

FAULTS_S = 900


class Storm:
    """Draws faults from the world's seed."""

    def __init__(self, world: World) -> None:
        self.world, self.random = world, world.random

    def blow(self, seconds: int) -> None:
        for _ in range(seconds):
            if self.random.random() < 0.05:
                self.random.choice(self.KINDS)(self)
            self.world.step()

    def calm(self) -> None:
        world = self.world
        world.capacity.clear()
        world.blind.clear()
        world.permanent = ""
        world.stockout_lists = False
        world.lost_answers = world.crash_rate = world.stall_rate = 0.0
        world.crashing = 0
        for machine in world.machines.values():
            if machine.vm.model is Model.STATIC and machine.agent:
                machine.agent.hung = False

    def victim(self) -> int | None:
        nodes = [
            index
            for index, node in enumerate(self.world.record().nodes)
            if node.cur and node.cur.state is not SlotState.INTENT and node.cur.uid in self.world.machines
        ]
        dynamic = [index for index in nodes if self.world.member(index).vm.job]
        return self.random.choice(dynamic) if dynamic else None

    def kill(self) -> None:
        if (node := self.victim()) is not None:
            self.world.preempt(node)

    def notice(self) -> None:
        if (node := self.victim()) is not None:
            self.world.preempt(node, notice_s=self.random.choice((15, 30, 120)))

    def reprieve(self) -> None:
        for machine in self.world.dynamic():
            running = machine.status is VmStatus.RUNNING and machine.agent is not None
            if running and machine.agent.notice and machine.dies_at:
                self.world.reprieve(machine)
                return

    def reboot(self) -> None:
        if (node := self.victim()) is not None:
            self.world.reboot(node)

    def hang(self) -> None:
        if (node := self.victim()) is not None and (agent := self.world.member(node).agent):
            agent.hung = True

    def kill_any(self) -> None:
        if machines := self.world.dynamic():
            self.world._remove(self.random.choice(machines))

    def blind(self) -> None:
        zone = self.random.choice(ZONES)
        self.world.blind ^= {zone}

    def drought(self) -> None:
        self.world.stockout_lists = self.random.random() < 0.5
        self.world.capacity[self.random.choice(ZONES), Model.SPOT] = self.random.choice((0, 1, 99))

    def user_crash(self) -> None:
        self.world.crashing = 1

    def request(self) -> None:
        kind = self.random.choice(
            (RequestKind.SWAP, RequestKind.MOVE, RequestKind.PAUSE, RequestKind.RESUME, RequestKind.RESUME)
        )
        self.world.request(
            kind, zone=self.random.choice(ZONES), node=self.random.randrange(len(self.world.record().nodes))
        )

    def permanent(self) -> None:
        self.world.permanent = "" if self.world.permanent else "forbidden"

    KINDS = (
        kill,
        kill,
        notice,
        notice,
        reprieve,
        reboot,
        hang,
        kill_any,
        blind,
        drought,
        drought,
        user_crash,
        request,
        request,
    )


def survive(world: World) -> None:
    world.run(5)
    world.submit()
    storm = Storm(world)
    storm.blow(FAULTS_S)
    storm.calm()
    world.request(RequestKind.RESUME)
    world.steps = max([0, *(agent.step_no for agent in world.agents())]) + 30
    world.until(lambda: world.record().phase is Phase.DONE, 6000)
    assert world.record().outcome is Outcome.SUCCEEDED, world.record().reason
    world.run(150)
    assert world.dynamic() == []
    assert [key for key, drive in world.drives.items() if drive.disk.job] == []
    assert world.shots == {}
    assert world.memory.allocation[0].grants == ()
    assert len(world.started) >= 1


@pytest.mark.parametrize("seed", range(size(6, 12)))
def test_a_gang_survives_random_faults(seed: int) -> None:
    survive(World(nodes=3, seed=seed, scratch_gb=seed % 2, retry=Retry(crashes=1000)))


@pytest.mark.parametrize("seed", range(size(6, 12)))
def test_sharded_state_survives_random_faults(seed: int) -> None:
    survive(World(nodes=2, seed=seed, checkpoint=Checkpoint(replicated=False), retry=Retry(crashes=1000)))


@pytest.mark.parametrize("seed", range(size(4, 8)))
def test_static_and_spot_together_survive_random_faults(seed: int) -> None:
    survive(World(nodes=3, seed=seed, the_stack=stack(static=1), retry=Retry(crashes=1000)))


@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize("seed", range(size(2, 4)))
def test_a_mix_of_machines_survives_random_faults(seed: int, spread: bool) -> None:
    """The pools share one zone; ``World.check`` compares machines and nodes."""
    base = stack().pools[0]
    pools = replace(base, name="l4", zones=ZONES[:2]), replace(base, name="t4", zones=ZONES[1:], max_machines=3)
    mix = (MachineGroup("l4", 2), MachineGroup("t4", 1))
    the_stack = replace(stack(), pools=(*pools, replace(base, name="other")))
    survive(World(the_stack=the_stack, machines=mix, seed=seed, spread=spread, retry=Retry(crashes=1000)))


@pytest.mark.parametrize("seed", range(size(2, 4)))
def test_reserved_and_spot_together_survive_random_faults(seed: int) -> None:
    """The second reservation is smaller than the stack file says, and the first one ends during the storm."""
    pool, *others = stack().pools
    ours = (ReservedCapacity("res", "z-a", 2, ends=1_000_000.0 + 2 * FAULTS_S), ReservedCapacity("few", "z-b", 2))
    the_stack = replace(stack(), pools=(replace(pool, reservations=ours), *others))
    world = World(nodes=3, seed=seed, the_stack=the_stack, retry=Retry(crashes=1000))
    world.capacity["z-b", Model.RESERVED] = 1
    survive(world)
    assert {"res"} <= {call.reservation for call in world.inserts()}


@pytest.mark.parametrize("seed", range(size(8, 16)))
def test_rounds_that_die_or_stall_anywhere_do_no_harm(seed: int) -> None:
    """A round may die before or after any effect, or sleep for a minute there and then make its late call."""
    world = World(nodes=2, seed=seed, lost_answers=0.1, retry=Retry(crashes=1000))
    world.crash_rate, world.stall_rate = 0.03, 0.08
    survive(world)
