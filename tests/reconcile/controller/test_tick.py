"""A tick waits for the answer to the roll call of a one-machine job, which no other member's poll would judge."""

from __future__ import annotations

import pytest

from spotkeeper.contract.ledger import Event
from spotkeeper.reconcile.controller.tick import TICK_EVERY_S, tick
from spotkeeper.reconcile.store.objects import BEGIN_S, Deadline
from tests.reconcile.world import World


class Silent:
    """A job whose machines are listed and say nothing; ticks by hand, each a minute after the last."""

    def __init__(self, nodes: int, left_s: float = 50.0) -> None:
        self.world = world = World(nodes=nodes)
        self.waits: list[float] = []
        self.left_s = left_s
        world.submit()
        world.until(world.training, 400)
        for agent in world.agents():
            agent.hung = True
        world.next_tick = float("inf")
        world.options.sleep = self.sleep

    def sleep(self, seconds: float) -> None:
        if seconds:
            self.waits.append(seconds)
            self.world.run(seconds)

    def tick(self) -> list[Event]:
        """Run a tick; return what it wrote of a roll call or a loss."""
        world, before = self.world, len(self.world.events())
        began = world.t
        world.options.deadline = Deadline(self.left_s, world.now)
        self.rounds = tick(world.store, world, world, world.options).rounds
        told = [entry.event for entry in world.events()[before:]]
        world.t = began + TICK_EVERY_S
        return [event for event in told if event in (Event.ROLL, Event.LOSS)]

    def until_called(self) -> list[Event]:
        for _ in range(5):
            if told := self.tick():
                return told
        raise AssertionError("no roll call")


def test_the_tick_that_calls_a_lone_machine_also_finds_that_it_is_lost() -> None:
    job = Silent(1)
    assert job.until_called() == [Event.ROLL, Event.LOSS]
    assert job.waits == [31.0]
    assert [len(done.record.members) for done in job.rounds if done.record] == [1, 1], "both rounds are of the result"


@pytest.mark.parametrize(("spare_s", "waits"), [(0.0, []), (0.5, [31.0])])
def test_a_tick_waits_only_if_time_is_left_for_a_round_after_it(spare_s: float, waits: list[float]) -> None:
    job = Silent(1, BEGIN_S + 31.0 + spare_s)
    told = job.until_called()
    assert (told, job.waits) == ([Event.ROLL, Event.LOSS][: 1 + len(waits)], waits)


def test_a_lone_machine_that_answers_meanwhile_is_not_lost() -> None:
    job = Silent(1)

    def sleep(seconds: float) -> None:
        for agent in job.world.agents():
            agent.hung = False
        job.sleep(seconds)

    job.world.options.sleep = sleep
    assert job.until_called() == [Event.ROLL]
    assert job.waits
    assert job.world.record().roll is None


@pytest.mark.parametrize(("nodes", "left_s"), [(2, 50.0), (1, 40.0)], ids=["a gang's polls do it", "no time left"])
def test_otherwise_a_tick_does_not_wait(nodes: int, left_s: float) -> None:
    job = Silent(nodes, left_s)
    assert job.until_called() == [Event.ROLL]
    assert job.waits == []
    if nodes == 1:
        assert job.tick() == [Event.LOSS], "the next one finds it"


def test_a_ticks_rounds_do_not_wait_for_late_reports() -> None:
    """Each report starts a round of its own; a wait would delay the other jobs of the tick."""
    world, naps = World(nodes=1), list[float]()
    world.submit()
    world.until(world.training, 400)
    world._remove(world.member(0))
    world.options.settle_s, world.options.sleep = 1.1, naps.append
    (done,) = tick(world.store, world, world, world.options).rounds
    assert done.writes > 0 and not any(naps)
    assert world.options.settle_s == 1.1, "the rounds of reports wait"
