"""Random stories of gangs that move between regions by the bucket, or back, while all else goes wrong.

``World`` checks safety after every second. In the end nothing may be left, and the job must succeed.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from spotkeeper.contract.job import Checkpoint, Mirror, Nodes, RequestKind, Retry
from spotkeeper.contract.record import Outcome, Phase
from spotkeeper.contract.stack import Model
from tests.reconcile.decide.gang.test_bucket_move import ABROAD, HOME, priced
from tests.reconcile.decide.test_chaos import Storm
from tests.reconcile.world import World
from tests.sizes import size

ZONES = ("z-a", "y-b", "y-c")
FAULTS_S = 700
# They broke: a resize dropped the only node with the newest checkpoint; a silent member's disk counted as blank.
BROKE = (3, 389)


class Moves(Storm):
    """Draws a story from the world's seed."""

    def __init__(self, seed: int) -> None:
        world = World(the_stack=priced(), seed=seed, regions=(HOME, ABROAD), retry=Retry(crashes=1000))
        super().__init__(world)
        draw = self.random
        elastic = draw.random() < 0.4
        shape = {"nodes": Nodes(1, 3) if elastic else 2}
        checkpoint = Checkpoint(mirror=Mirror(every_min=1.0), replicated=elastic or draw.random() < 0.6)
        world.spec = replace(world.spec, checkpoint=checkpoint, **shape)
        stack = draw.choice((priced(), priced((HOME,)), replace(priced(), warm_usd=draw.choice((20.0, 3000.0)))))
        if draw.random() < 0.3:  # no room for the gang twice
            stack = replace(stack, pools=(replace(stack.pools[0], max_machines=3),))
        world.stack = world.memory.stack = stack
        world.disk_gb, world.copy_bytes = 50.0, 3 * 10**9

    def blow(self, seconds: int) -> None:
        rate = self.random.choice((0.01, 0.03, 0.05))
        for _ in range(seconds):
            if self.random.random() < rate:
                self.random.choice(KINDS)(self)
            self.world.step()

    def calm(self) -> None:
        super().calm()
        self.world.copies, self.world.fetch_s = True, 5.0

    def move(self) -> None:
        self.world.request(RequestKind.MOVE, zone=self.random.choice((*ZONES, HOME, ABROAD)))

    def cancel(self) -> None:
        self.world.request(RequestKind.MOVE)

    def steer(self) -> None:
        kinds = (RequestKind.PAUSE, RequestKind.RESUME, RequestKind.RESUME, RequestKind.RESIZE, RequestKind.SWAP)
        nodes = self.random.choice((1, 2, 3))
        node = self.random.randrange(len(self.world.record().nodes))
        self.world.request(self.random.choice(kinds), nodes=nodes, node=node)

    def silence(self) -> None:
        region = self.random.choice((HOME, ABROAD))
        self.world.blind ^= {zone for zone in ZONES if zone.startswith(region)}

    def run_dry(self) -> None:
        self.world.stockout_lists = self.random.random() < 0.5
        self.world.capacity[self.random.choice(ZONES), Model.SPOT] = self.random.choice((0, 1, 99))

    def refuse_copies(self) -> None:
        self.world.copies = not self.world.copies

    def rot(self) -> None:
        self.world.rotten |= set(self.world.bucket)

    def slow_down(self) -> None:
        self.world.fetch_s = self.random.choice((5.0, 60.0))


ONCE: tuple[Callable[[Moves], None], ...] = (
    *(Moves.kill, Moves.reprieve, Moves.reboot, Moves.hang, Moves.kill_any, Moves.user_crash),
    *(Moves.cancel, Moves.silence, Moves.run_dry, Moves.rot, Moves.slow_down),
)
KINDS = (*ONCE, *2 * (Moves.notice, Moves.refuse_copies), *5 * (Moves.move, Moves.steer))


@pytest.mark.parametrize("seed", size(BROKE, range(400)))
def test_a_gang_that_moves_by_the_bucket_survives_random_faults(seed: int) -> None:
    story = Moves(seed)
    world = story.world
    world.submit()
    world.until(lambda: world.training() and world.newest is not None and bool(world.record().mirror), 600)
    if story.random.random() < 0.5:
        world.crash_rate, world.stall_rate = 0.03, 0.1
    world.lost_answers = story.random.choice((0.0, 0.0, 0.05))
    story.blow(FAULTS_S)
    story.calm()
    world.steps = max([0, *(agent.step_no for agent in world.agents())]) + 30
    for _ in range(3):  # a hold may have been decided just before
        world.request(RequestKind.RESUME)
        world.until(lambda: world.record().phase in (Phase.DONE, Phase.HOLD), 6000)
    assert world.record().outcome is Outcome.SUCCEEDED, world.record().reason
    world.run(200)
    assert world.dynamic() == [] and [key for key, drive in world.drives.items() if drive.disk.job] == []
    assert world.shots == {} and world.memory.allocation[0].grants == ()
