"""A gang goes to another region by its checkpoint's copy in the bucket where that is cheaper than its disks' copies."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from spotkeeper.contract.cloud import Action, CreateSnapshot, Result, ResultKind
from spotkeeper.contract.job import Checkpoint, Mirror, RequestKind
from spotkeeper.contract.ledger import Event
from spotkeeper.contract.record import MoveTime, Phase
from spotkeeper.contract.stack import Model, StackState
from spotkeeper.reconcile.decide.gang import bucket_move
from tests.reconcile.decide.gang.test_regions import ABROAD, HOME, both, dry, zones
from tests.reconcile.world import JOB, World

OFTEN = Checkpoint(mirror=Mirror(every_min=1.0))
USD_GB = 0.02


def priced(bucket: tuple[str, ...] = (HOME, ABROAD)) -> StackState:
    """Between the regions 2 cents a GB; the bucket is in both, unless told."""
    egress = {HOME: {ABROAD: USD_GB}, ABROAD: {HOME: USD_GB}}
    return replace(both(), egress=egress, bucket_regions=bucket)


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest waits take minutes."""
    monkeypatch.setattr(bucket_move, "UPLOAD_S", 120.0)
    monkeypatch.setattr(bucket_move, "AWAY_S", 600.0)


def begun(stack: StackState | None = None, disk_gb: float = 50.0, **spec: object) -> World:
    """A gang of two that trains at home, whose last checkpoint but a few has a copy in the bucket."""
    world = World(2, the_stack=stack or priced(), regions=(HOME, ABROAD), **{"checkpoint": OFTEN} | spec)
    world.disk_gb, world.copy_bytes = disk_gb, 3 * 10**9
    world.submit()
    wanted = 1 if world.spec.checkpoint.mirror is not None else 0
    world.until(lambda: world.training() and world.newest is not None and len(world.record().mirror) >= wanted, 400)
    assert world.record().zone == "z-a"
    return world


def asked(world: World, zone: str = "y-b") -> None:
    world.request(RequestKind.MOVE, zone=zone)


def goes(world: World, zone: str) -> None:
    asked(world, zone)
    world.until(lambda: world.record().zone == zone and world.training() and world.record().move is None)


def moves(world: World) -> list[str]:
    return [entry.cause or "" for entry in world.events(Event.MOVE)]


def disks(world: World) -> set[tuple[str, str]]:
    return {(drive.disk.name, zone) for (_, zone), drive in world.drives.items() if drive.disk.job}


def copies(world: World) -> set[tuple[int, int]]:
    """The disks that were copied: (node, number of the copy)."""
    return {(action.node, action.copy) for _, action, _ in world.made if isinstance(action, CreateSnapshot)}


def no_step_lost(world: World) -> None:
    assert sum(entry.again or 0 for entry in world.events(Event.GENERATION)) == 0


def test_a_gang_goes_abroad_and_back_by_the_bucket_where_disks_cost_egress() -> None:
    world = begun()
    for zone in ("y-b", "z-a"):
        left = world.newest
        goes(world, zone)
        assert world.training() and zones(world) == {zone}
        at = world.started[-1][1]
        assert at is not None and left is not None and at >= left
        no_step_lost(world)
        world.run(180)
        assert {where for _, where in disks(world)} == {zone} and len(disks(world)) == 2, "the old disks are deleted"
    assert copies(world) == set() and moves(world) == ["asked", "move"] * 2
    assert world.events(Event.EGRESS) == [], "the bucket is in both regions"
    (took,) = world.record().move_times
    assert took.bucket and 0 < took.s < 300


@pytest.mark.parametrize("seed", range(3))
def test_a_function_that_is_killed_again_and_again_loses_no_step(seed: int) -> None:
    """Before or after a write or a call."""
    world = begun()
    world.random.seed(seed)
    world.crash_rate, world.stall_rate = 0.05, 0.1
    for zone in ("y-b", "z-a"):
        goes(world, zone)
    no_step_lost(world)
    world.crash_rate = world.stall_rate = 0.0
    world.run(180)
    assert {where for _, where in disks(world)} == {"z-a"} and len(disks(world)) == len(world.dynamic()) == 2


@pytest.mark.parametrize(
    ("stack", "disk_gb", "checkpoint"),
    [
        (replace(priced(), egress={}), 50.0, OFTEN),  # neither costs anything, and neither was measured
        (priced(), 50.0, Checkpoint()),
        (priced((HOME,)), 1.0, OFTEN),  # less than the checkpoint's 3 GB, of which the download costs egress
    ],
)
def test_the_disks_go_as_snapshots_where_the_bucket_is_not_cheaper(
    stack: StackState, disk_gb: float, checkpoint: Checkpoint
) -> None:
    world = begun(stack, disk_gb, checkpoint=checkpoint)
    asked(world)
    world.until(lambda: world.record().zone == "y-b" and world.training())
    assert len(copies(world)) == 2
    (took,) = world.record().move_times
    assert not took.bucket


@pytest.mark.parametrize(("bucket_s", "disks_s", "by_bucket"), [(60.0, 600.0, True), (600.0, 60.0, False)])
def test_once_both_ways_were_measured_the_faster_one_wins_at_equal_prices(
    bucket_s: float, disks_s: float, by_bucket: bool
) -> None:
    world = begun(replace(priced(), egress={}))
    read, both_ways = (
        world.store.read_record(JOB),
        (MoveTime(bucket=True, s=bucket_s), MoveTime(bucket=False, s=disks_s)),
    )
    assert read is not None
    assert world.store.cas_record(replace(read.value, ver=read.value.ver + 1, move_times=both_ways), read.token)
    asked(world)
    world.until(lambda: world.record().move is not None)
    assert world.record().move is not None and world.record().move.bucket is by_bucket


def _no_copy(world: World) -> None:
    world.copies = False


def _one_lost(world: World) -> None:
    world.copies = False
    world.preempt(1)


def _one_lost_before_it_saves(world: World) -> None:
    """The other one's newest checkpoint is copied, but may not be the newest there is."""
    world.preempt(1)


@pytest.mark.parametrize(("fault", "after_s"), [(_no_copy, 120.0), (_one_lost, 0.0), (_one_lost_before_it_saves, 0.0)])
def test_if_the_copy_does_not_get_complete_the_disks_are_copied(fault: Callable[[World], None], after_s: float) -> None:
    world = begun()
    asked(world)
    world.until(lambda: world.record().move is not None)
    left, since = world.newest, world.t
    fault(world)
    world.until(lambda: world.record().zone == "y-b" and world.training(), 3600)
    assert after_s <= world.t - since < after_s + 120
    assert moves(world) == ["asked", "snapshots", "move"] and len(copies(world)) == 2
    assert left is not None and world.started[-1][1] is not None and world.started[-1][1] >= left
    assert [one.s < 60 for one in world.record().move_times if not one.bucket] == [True], "from then on"
    slow = MoveTime(bucket=True, s=bucket_move.UPLOAD_S) in world.record().move_times
    assert slow == (after_s > 0), "the next move takes the disks if the bucket was slow, not if a machine was lost"


def arrives(world: World) -> None:
    """The copy is complete, and the gang has blank disks abroad; home's are still there."""
    asked(world)
    world.until(lambda: world.record().move is not None and bool(world.record().move.origin))


def _rotten(world: World) -> None:
    world.rotten |= set(world.buckets[world.record().job])


def _silent(world: World) -> None:
    world.blind |= {"y-b", "y-c"}


def _sold_out(world: World) -> None:
    dry(world, ABROAD)
    for node in (0, 1):
        world.preempt(node)


def _no_byte(world: World) -> None:
    world.fetch_s = 1e9


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (_rotten, "the checkpoint's copy in the bucket cannot be had"),
        (_silent, "y-b has not answered for 2 min"),
        (_sold_out, "y-b has no capacity"),
        (_no_byte, "the gang did not train there within 10 min"),
    ],
)
def test_a_move_that_fails_abroad_ends_at_home_on_the_old_disks(fault: Callable[[World], None], told: str) -> None:
    world = begun(replace(priced(), warm_usd=20.0))
    world.until(lambda: all(node.warms for node in world.record().nodes))
    before, gen = [node.disk for node in world.record().nodes], world.record().gen
    world.fetch_s = 30.0
    arrives(world)
    left = world.newest
    fault(world)
    world.until(lambda: world.record().move is None, 4000)
    assert moves(world)[-1] == "refused" and world.events(Event.MOVE)[-1].detail == told
    world.until(lambda: world.training() and world.record().gen > gen, 1200)
    assert zones(world) == {"z-a"} and [node.disk for node in world.record().nodes] == before
    assert world.started[-1][1] == left
    no_step_lost(world)
    assert {node.disk_top - node.disk - node.warms for node in world.record().nodes} == {1}, "one move failed"
    world.blind.clear()
    world.run(120)
    assert {where for _, where in disks(world)} == {"z-a"} and len(world.dynamic()) == 2


def test_a_user_calls_a_gang_back_that_has_left() -> None:
    world = begun()
    before, gen = [node.disk for node in world.record().nodes], world.record().gen
    world.fetch_s = 60.0
    arrives(world)
    asked(world, "y-c")
    world.run(5)
    assert "already moving to y-b" in (world.events(Event.REQUEST)[-1].detail or "")
    asked(world, "z-a")
    world.until(lambda: world.training() and world.record().gen > gen)
    assert moves(world) == ["asked", "cancelled"] and [node.disk for node in world.record().nodes] == before


def test_a_job_on_hold_on_its_way_keeps_both_disks_and_arrives_after_a_resume() -> None:
    world = begun()
    world.fetch_s = 60.0
    arrives(world)
    world.request(RequestKind.PAUSE)
    world.until(lambda: world.record().phase is Phase.HOLD)
    world.run(bucket_move.AWAY_S + 100)
    assert {where for _, where in disks(world)} >= {"z-a"}
    world.request(RequestKind.RESUME)
    world.until(lambda: world.training() and world.record().move is None)
    assert zones(world) == {"y-b"}
    (took,) = world.record().move_times
    assert took.s < 200, "without the time on hold"
    no_step_lost(world)


def test_without_machines_there_first_they_follow_once_the_copy_is_complete() -> None:
    stack = priced()
    world = begun(replace(stack, pools=(replace(stack.pools[0], max_machines=3),)))
    asked(world)
    world.until(lambda: world.record().zone == "y-b" and world.training())
    assert copies(world) == set() and moves(world) == ["asked", "move"]


def test_a_gang_that_lost_all_machines_goes_by_its_disks() -> None:
    """What they hold may be newer than any copy."""
    world = begun()
    world.capacity["z-a", Model.SPOT] = 0
    for node in (0, 1):
        world.preempt(node)
    world.until(lambda: world.record().zone == "y-b" and world.training())
    assert len(copies(world)) == 2


def test_an_upload_from_abroad_and_a_download_are_charged_once() -> None:
    world = begun(priced((HOME,)))
    for zone in ("y-b", "z-a"):
        goes(world, zone)
    paid = [(entry.detail, entry.gb) for entry in world.events(Event.EGRESS)]
    gb = world.copy_bytes / 1e9
    assert ("y -> z", pytest.approx(gb)) in paid and paid.count(("z -> y", pytest.approx(gb))) == 1
    assert copies(world) == set()


@pytest.mark.parametrize("how", ["cancelled", "lost"])
def test_a_download_for_nothing_is_charged_once_as_well(how: str) -> None:
    """One machine has the copy when the move is cancelled, or when that machine is lost."""
    world = begun(priced((HOME,)), checkpoint=Checkpoint(replicated=False, mirror=Mirror(every_min=1.0)))
    arrives(world)
    world.until(lambda: world.record().fetch is not None)
    agent = world.member(1).agent
    assert agent is not None
    agent.hung = True
    world.until(lambda: ("down", "y-b") in world.through_bucket)
    world.run(5)
    if how == "cancelled":
        asked(world, "z-a")
    else:
        world.preempt(0)
    world.until(lambda: bool(world.events(Event.EGRESS)), 120)
    assert [(entry.cause, entry.detail) for entry in world.events(Event.EGRESS)] == [("bucket", "z -> y")]
    asked(world, "z-a")
    world.until(lambda: world.record().zone == "z-a" and world.training())
    assert len(world.events(Event.EGRESS)) == world.through_bucket.count(("down", "y-b"))


def test_a_slow_round_asks_for_a_copy_of_a_disk_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It stood still before its call while others ended the move: the cloud refuses, and nothing comes of it."""
    world = begun(checkpoint=Checkpoint())
    world.stack = replace(world.stack, egress={})
    slow, shipped = list[Result](), world.perform

    def perform(action: Action, deadline_s: float) -> Result:
        if isinstance(action, CreateSnapshot) and not slow:
            slow.append(Result(action, ResultKind.AMBIGUOUS, "", world.t))
            world.memory.leases.clear()
            world.until(lambda: world.record().zone == "y-b" and {zone for _, zone in disks(world)} == {"y-b"})
            slow[0] = shipped(action, deadline_s)
            return slow[0]
        return shipped(action, deadline_s)

    monkeypatch.setattr(world, "perform", perform)
    goes(world, "y-b")
    assert [(told.kind, told.detail) for told in slow] == [(ResultKind.PERMANENT, "no such disk")]
    world.run(120)
    assert moves(world) == ["asked", "move"] and world.shots == {} and len(disks(world)) == 2
    no_step_lost(world)
