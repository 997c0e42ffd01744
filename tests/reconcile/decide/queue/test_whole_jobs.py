"""Whole jobs at random under one queue: sizes, priorities, lost machines, killed functions; all end."""

from __future__ import annotations

import random

import pytest
from msgspec.structs import replace

from spotkeeper.contract.job import JobSpec, Nodes
from spotkeeper.contract.ledger import Event
from spotkeeper.contract.record import Outcome, Phase
from spotkeeper.contract.stack import Model
from tests.reconcile.world import ZONES, World, stack
from tests.sizes import size

MACHINES = 4
HOUR = 3600.0
SEEDS = size(4, 60)


class Crowd(World):
    """Jobs of several sizes and priorities; each keeps the spec with which it was submitted."""

    def spec_of(self, random_: random.Random) -> JobSpec:
        least = random_.randint(1, 3)
        nodes: int | Nodes = Nodes(least, random_.randint(least, MACHINES)) if random_.random() < 0.4 else least
        return replace(self.spec, nodes=nodes, priority=random_.choice(("low", "normal")))


@pytest.mark.parametrize("seed", range(SEEDS))
def test_all_jobs_end_and_only_losses_repeat_steps(seed: int) -> None:
    dice = random.Random(seed)  # noqa: S311
    world = Crowd(the_stack=stack(max_machines=MACHINES), seed=seed, steps=dice.randint(500, 4000))
    jobs = [f"job{seed % 10}{letter}{letter}22"[:8].replace("0", "z").replace("1", "y") for letter in "abcdef"]
    losses = seed % 2
    if seed % 3 == 1:  # the market is shorter than the limit
        world.spec = replace(world.spec, policy="spot")
        world.capacity |= {(zone, Model.SPOT): int(zone == "z-a") * 3 for zone in ZONES}
    world.crash_rate = 0.01 * (seed % 3 == 2)
    for job in jobs:
        world.spec = world.spec_of(dice)
        world.submit(job)
        world.run(dice.choice((10, 300, 1500)))
        if losses and (members := [m for m in world.dynamic() if m.agent is not None and m.agent.gen]):
            world._remove(dice.choice(members))
    end = world.t + 40 * HOUR
    while not all(world.record(job).phase is Phase.DONE for job in jobs):
        assert world.t < end, [(job, world.record(job).phase, world.record(job).reason) for job in jobs]
        world.step()
        assert len(world.memory.allocation[0].grants) <= MACHINES
        assert sum(claim.reserved for claim in world.memory.allocation[0].claims) <= MACHINES
    assert {world.record(job).outcome for job in jobs} == {Outcome.SUCCEEDED}
    if not losses and not world.crash_rate:
        again = [entry.again for job in jobs for entry in world.events(Event.GENERATION, job=job)]
        assert not any(again), "a recall repeats no step"
