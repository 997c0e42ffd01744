"""Limits on spending and launches against real rounds: what stops spending when something of ours goes wrong."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from spotkeeper.contract.job import RequestKind
from spotkeeper.contract.ledger import Event
from spotkeeper.contract.record import Hold, Outcome, Phase
from spotkeeper.contract.stack import Model
from spotkeeper.reconcile.decide import Times
from tests.properties.actors import MAKES, Plan, no_threads
from tests.properties.world import JOBS
from tests.properties.world import World as Machine
from tests.reconcile.world import ZONES, World
from tests.sizes import size

HOUR = 3600.0
NEVER = 1e9


def within_an_hour(world: World, node: int | None = None) -> int:
    """The most machines that were really made within one hour (for one node)."""
    made: dict[tuple[int, int], float] = {}
    for at, action, _ in world.made:
        if hasattr(action, "attempt") and node in (None, action.node):
            made.setdefault((action.node, action.attempt), at)
    times = sorted(made.values())
    return max((sum(1 for other in times if at <= other < at + HOUR) for at in times), default=0)


def limits(world: World) -> list[str]:
    return [entry.detail for entry in world.events(Event.LIMIT)]


# -- launches


def test_a_nodes_launches_per_hour_are_limited() -> None:
    world = World(nodes=1, boot_s=NEVER)
    world.submit()
    world.run(HOUR - 10)
    assert within_an_hour(world) == Times().launches_node
    assert limits(world) == ["waiting: node 0 was given 12 machines within an hour, which is the limit"]
    assert "12 machines" in world.record().reason, "the user is told"
    assert not world.dynamic(), "nor does one run on"
    world.boot_s = 20.0
    world.until(world.training, 600)
    assert world.record().reason == ""


def test_a_jobs_launches_per_hour_are_limited() -> None:
    world = World(nodes=4, boot_s=NEVER)
    world.submit()
    world.run(HOUR - 10)
    limit = Times().launches_node + 4 * Times().launches_job
    assert within_an_hour(world) == limit < 4 * Times().launches_node
    assert f"waiting: the job was given {limit} machines within an hour, which is the limit" in limits(world)


def test_waiting_for_capacity_reaches_no_limit() -> None:
    world = World(nodes=1, policy="spot")
    for zone in ZONES:
        world.capacity[zone, Model.SPOT] = 0
    world.submit()
    world.run(2 * HOUR)
    assert world.record().nodes[0].top > 2 * Times().launches_node, "it kept asking"
    assert limits(world) == []
    world.capacity.clear()
    world.until(world.training, 400)


def test_a_volatile_market_reaches_no_limit() -> None:
    """A loss every ten minutes, without notice: preemptions are what we are for."""
    world = World(nodes=2)
    world.submit()
    for _ in range(6):
        world.until(world.training)
        world.run(500)
        world.preempt(0)
    world.until(world.training)
    assert limits(world) == []


# -- the breaker


def test_many_simultaneously_silent_machines_get_more_time() -> None:
    world = World(nodes=5)
    world.submit()
    world.until(world.training)
    hung = [world.member(node).agent for node in (0, 2, 4)]
    for agent in hung:
        agent.hung = True
    world.until(lambda: limits(world), 600)
    assert limits(world) == ["3 of 5 nodes do not answer the roll call"]
    before = world.record().nodes
    world.run(Times().breaker_s - 20)
    assert [node.cur.attempt for node in world.record().nodes] == [node.cur.attempt for node in before]
    for agent in hung:
        agent.hung = False
    world.run(60)
    assert world.events(Event.LOSS) == [] and world.training(), "they were heard again: nothing is lost"


def test_machines_that_stay_silent_are_replaced() -> None:
    world = World(nodes=3)
    world.submit()
    world.until(world.training)
    for node in (0, 1):
        world.member(node).agent.hung = True
    world.until(lambda: len(world.events(Event.LOSS)) == 2, 900)
    tripped, lost = world.events(Event.LIMIT)[0].at, world.events(Event.LOSS)[0].at
    assert tripped + Times().breaker_s <= lost <= tripped + Times().breaker_s + 65
    world.until(world.training, 600)


def test_a_single_silent_machine_is_replaced_at_once() -> None:
    world = World(nodes=5)
    world.submit()
    world.until(world.training)
    world.member(0).agent.hung = True
    world.until(lambda: world.events(Event.LOSS), 600)
    world.until(world.training, 600)
    assert limits(world) == []


def test_a_gang_that_is_preempted_as_a_whole_is_replaced_at_once() -> None:
    world = World(nodes=4)
    world.submit()
    world.until(world.training)
    for node in range(4):
        world.preempt(node)
    since = world.t
    world.until(lambda: world.training() and world.record().gen > 1, 240)
    assert world.t - since < 60 + 60 + Times().breaker_s, "a tick, a boot, and no pause"
    assert limits(world) == []


def test_on_demand_machines_that_vanish_together_pause_replacements() -> None:
    world = World(nodes=3, policy="on-demand")
    world.submit()
    world.until(world.training)
    since = world.t
    for node in range(3):
        world.preempt(node)
    world.until(lambda: limits(world), 120)
    assert "2 of 3 nodes vanished at once without preemption" in limits(world)
    world.until(lambda: len(world.inserts()) > 3, 400)
    assert world.t - since >= Times().breaker_s
    world.until(world.training, 400)


# -- the spend cap


def spent(world: World, prices: float) -> float:
    return sum((world.t - m.born) / HOUR * prices for m in world.dynamic())


def test_a_job_that_has_spent_its_max_usd_saves_stops_and_holds_with_its_disks() -> None:
    world = World(nodes=2, max_usd=0.5, hold_days=1)
    world.submit()
    world.until(world.training)
    world.until(lambda: world.record().stop, 2 * HOUR)
    price = 0.30 if world.record().zone == "z-a" else 0.32
    assert spent(world, price) <= 0.5 + 2 * price * 60 / HOUR, "the cap and a tick"
    world.until(lambda: world.record().phase is Phase.HOLD, 300)
    assert world.record().hold is Hold.SPEND and "$0.50" in world.record().reason
    world.run(120)
    assert world.dynamic() == [] and len([d for d in world.drives.values() if d.disk.job]) == 2
    before = world.newest
    world.request(RequestKind.RESUME)
    world.until(world.training, 300)
    assert world.started[-1][1] == before, "nothing was lost"
    since = world.t
    world.until(lambda: world.record().phase is Phase.HOLD, 2 * HOUR)
    assert world.t - since > 0.4 / (2 * price) * HOUR, "as much again"


def test_a_spending_hold_ends_after_hold_days() -> None:
    world = World(nodes=1, max_usd=0.05, hold_days=0.1)
    world.submit()
    world.until(lambda: world.record().phase is Phase.HOLD, HOUR)
    world.until(lambda: world.record().phase is Phase.DONE, 0.1 * 86400 + Times().sure_s + 300)
    assert world.record().outcome is Outcome.FAILED and "no resume in time" in world.record().reason
    assert world.drives == {} and world.memory.allocation[0].grants == ()


# -- the stack's cap, through the allocation document


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    no_threads(monkeypatch)
    made = Machine(cap=3)
    yield made
    made.close()


@pytest.mark.parametrize(
    "stop", ["replace stack/allocation", "replaced stack/allocation", f"replace jobs/{JOBS[0]}/rec", MAKES]
)
def test_two_rounds_that_race_for_the_last_machine_do_not_both_get_one(machine: Machine, stop: str) -> None:
    """Two jobs of two nodes and a cap of three; the first job's round stops between two calls, others go on."""
    machine.submit(JOBS[0])
    machine.submit(JOBS[1])
    machine.function_down = True
    first = "create" if "allocation" in stop else MAKES
    machine.round(JOBS[0], Plan(freeze_on=stop if "rec" in stop else first, thaw_after=1000))
    assert machine.actors, "it stopped on its way"
    for instance in (1, 2, 0):
        machine.round(JOBS[1], instance=instance)
    machine.thaw()
    machine.function_down = False
    machine.advance(300)
    assert len(machine.grants) == 2
    assert len(machine.plane.vms()) == 2
    assert sum(map(machine.training, JOBS)) == 1, "one job trains, the other has no machine that waits for a second"
    machine.settle()


def test_rounds_that_race_over_a_hundred_stops_keep_the_cap(machine: Machine) -> None:
    """Wherever the first round stops, the cap holds at every moment (``World.check`` looks)."""
    for at in range(1, 100, size(9, 3)):
        world = Machine(cap=3)
        world.submit(JOBS[0])
        world.submit(JOBS[1])
        world.round(JOBS[0], Plan(freeze_at=at, thaw_after=1000))
        world.round(JOBS[1], instance=1)
        world.advance(3)
        world.thaw()
        world.advance(30)
        assert len(world.grants) == 2
        world.close()
