"""``max_wait`` under ``policy: spot``: the job goes on hold after that time without machines in the market."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from spotkeeper.contract.job import RequestKind
from spotkeeper.contract.ledger import Event
from spotkeeper.contract.record import Hold, Limits, Move, Phase, SlotState
from spotkeeper.contract.stack import Model
from spotkeeper.reconcile.decide.draft import DAY_S, Draft
from spotkeeper.reconcile.decide.provisioning import pending
from spotkeeper.reconcile.decide.snapshot import Times
from tests.reconcile.decide.test_decide import NOW
from tests.reconcile.decide.test_guards import Case, calm, on_cur, on_node, on_record
from tests.reconcile.world import ZONES, World, stack

SECOND = "wxyz2345"
MIN_S = 60.0


def dry(world: World, have: int = 0) -> World:
    for zone in ZONES:
        world.capacity[zone, Model.SPOT] = have
    return world


def held(world: World) -> bool:
    return world.record().phase is Phase.HOLD and world.record().hold is Hold.MAX_WAIT


def test_a_job_that_buys_only_spot_is_held_after_max_wait() -> None:
    world = dry(World(nodes=1, policy="spot", max_wait="30m"))
    world.submit()
    world.run(29 * MIN_S)
    assert world.record().phase is Phase.RUN
    world.until(lambda: held(world), 2 * MIN_S)
    record = world.record()
    assert record.reason.startswith("waiting for capacity in ")
    assert record.reason.endswith(
        "; it did not get its spot machines within max_wait (30m), and `policy: spot` buys no others"
    )
    assert (record.hold_until, record.hold_ends) == (None, pytest.approx(world.t + 14 * DAY_S, abs=60))
    world.run(60 * MIN_S)
    assert held(world), "it does not retry by itself"


def test_a_resume_waits_that_long_again() -> None:
    world = dry(World(nodes=1, policy="spot", max_wait="10m"))
    world.submit()
    world.until(lambda: held(world), 11 * MIN_S)
    world.request(RequestKind.RESUME)
    world.run(9 * MIN_S)
    assert world.record().phase is Phase.RUN
    world.until(lambda: held(world), 2 * MIN_S)


def test_training_does_not_count_and_the_checkpoint_is_kept() -> None:
    world = World(nodes=1, policy="spot", max_wait="20m")
    world.submit()
    world.until(world.training, 300)
    world.run(40 * MIN_S)
    assert world.training()
    newest = world.newest
    dry(world).preempt(0)
    world.run(19 * MIN_S)
    assert world.record().phase is Phase.RUN
    world.until(lambda: held(world), 3 * MIN_S)
    world.capacity.clear()
    world.request(RequestKind.RESUME)
    world.until(world.training, 600)
    assert newest is not None and world.started[-1][1] is not None and world.started[-1][1] >= newest


def test_the_queue_does_not_count() -> None:
    world = World(nodes=1, policy="spot", max_wait="10m", the_stack=replace(stack(), max_machines=1), steps=100_000)
    world.submit()
    world.until(world.training, 300)
    world.submit(SECOND)
    world.run(30 * MIN_S)
    assert [entry.cause for entry in world.store.list_ledger(SECOND) if entry.event is Event.HOLD] in ([], ["queue"])
    assert world.record(SECOND).market_since is None


def test_the_tries_of_a_gang_that_gets_only_some_machines_belong_to_one_wait() -> None:
    world = dry(World(nodes=3, policy="spot", max_wait="25m"), 2)
    world.submit()
    world.until(lambda: world.record().hold is Hold.CAPACITY, 15 * MIN_S)
    world.until(lambda: held(world), 20 * MIN_S)
    assert 25 * MIN_S <= world.t - world.record().created <= 26 * MIN_S
    world.run(60)
    assert world.dynamic() == []


@pytest.mark.parametrize(("minutes", "moves"), [(5, False), (7, True)])
def test_a_gang_that_leaves_its_zone_is_held_in_time(minutes: int, moves: bool) -> None:
    world = World(nodes=3, policy="spot", max_wait=f"{minutes}m")
    world.submit()
    world.until(world.training, 300)
    world.run(10 * MIN_S)
    newest = world.newest
    dry(world, 2).preempt(0)
    world.until(lambda: world.record().market_since is not None, 2 * MIN_S)
    since = world.t
    world.until(lambda: held(world), 10 * MIN_S)
    assert world.t - since == minutes * MIN_S
    assert (world.record().move is not None) is moves, "it begins no move with which it cannot wait"
    world.capacity.clear()
    world.request(RequestKind.RESUME)
    world.until(world.training, 3 * MIN_S)
    assert (world.record().zone, world.started[-1][1]) == ("z-b" if moves else "z-a", newest)


@pytest.mark.parametrize("more", [{"policy": "balanced", "max_wait": "10m"}, {"policy": "spot"}], ids=str)
def test_other_jobs_are_not_held(more: dict[str, object]) -> None:
    world = dry(World(nodes=1, the_stack=stack(max_on_demand=0), **more))  # type: ignore[arg-type]
    world.submit()
    world.run(40 * MIN_S)
    assert world.record().phase is Phase.RUN and world.record().market_since is None


# -- each bound and each obstacle alone


def waiting(*, before_s: float = 0.0, since: float | None = None, **more: object) -> Case:
    """A job between generations with ``max_wait: 30m`` and no machine for its second node."""
    case = on_node(1, cur=None)(*calm(2, policy="spot", max_wait="30m"))
    return on_record(**{"stop": True, "market_since": since, "market_wait_s": before_s, **more})(*case)


@pytest.mark.parametrize(
    ("case", "hold"),
    [
        (waiting(since=NOW - 1799), None),
        (waiting(since=NOW - 1800), Hold.MAX_WAIT),
        (waiting(since=NOW - 60, before_s=1739), None),
        (waiting(since=NOW - 60, before_s=1740), Hold.MAX_WAIT),
        (waiting(before_s=1800), Hold.MAX_WAIT),
        (waiting(), None),
        (waiting(since=NOW - 1800, stop=False), None),  # it trains on the other node
        (waiting(since=NOW - 1799, move=Move("z-b", NOW)), None),
        (waiting(since=NOW - 1800, move=Move("z-b", NOW)), Hold.MAX_WAIT),
        (waiting(before_s=1800, move=Move("z-b", NOW)), None),  # it had machines when a user moved it
        (on_node(1, next=calm(2)[0].nodes[1].cur)(*waiting(since=NOW - 1800, move=Move("z-b", NOW))), None),
    ],
)
def test_the_bound(case: Case, hold: Hold | None) -> None:
    draft = Draft(*case)
    draft.sold_out = draft.record.move is None
    pending.limit_wait(draft)
    assert draft.record.hold is hold


def booting(case: Case) -> Case:
    return on_cur(1, state=SlotState.INTENT)(*on_node(1, cur=calm(2)[0].nodes[1].cur)(*case))


def launched_out(case: Case) -> Case:
    return on_record(limits=Limits(hour=NOW))(*on_node(1, launches=Times().launches_node)(*case))


@pytest.mark.parametrize(
    ("case", "since", "waited_s"),
    [
        (waiting(since=NOW - 60, before_s=5), None, 65.0),  # vacant, and nothing was requested: queue or caps
        (on_node(1, cur=calm(2)[0].nodes[1].cur)(*waiting(since=NOW - 60)), None, 60.0),  # all machines are there
        (booting(waiting(since=NOW - 60)), NOW - 60, 0.0),  # the cloud may still refuse it
        (waiting(since=NOW - 60, move=Move("z-b", NOW)), NOW - 60, 0.0),  # it looks for machines elsewhere
        (launched_out(waiting(since=NOW - 60)), NOW - 60, 0.0),
        (launched_out(waiting()), None, 0.0),
    ],
)
def test_the_clock_stops_while_the_market_is_not_the_obstacle(case: Case, since: float | None, waited_s: float) -> None:
    draft = Draft(*case)
    pending.limit_wait(draft)
    assert (draft.record.market_since, draft.record.market_wait_s) == (since, waited_s)
