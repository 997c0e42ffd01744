"""A function whose clock had jumped ahead: when the others' clocks are right again, nothing waits for that time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import pytest
from msgspec import Meta, inspect
from msgspec.structs import asdict, replace

from spotkeeper.contract.allocation import Allocation
from spotkeeper.contract.job import RequestKind
from spotkeeper.contract.ledger import Entry, Event
from spotkeeper.contract.record import (
    Budget,
    Hold,
    Limits,
    Move,
    Moved,
    Node,
    Phase,
    Record,
    Roll,
    Slot,
    SlotState,
    ZoneProbe,
)
from spotkeeper.contract.stack import Model
from spotkeeper.reconcile.controller.lease import Lease
from spotkeeper.reconcile.decide import Times
from spotkeeper.reconcile.store.clock_skew import SKEW_S, believed
from tests.reconcile.controller.test_round import fatal, holding, trained
from tests.reconcile.memory import MemoryStore
from tests.reconcile.world import JOB, World, stack

NOW = 1_000_000.0
HOUR_S, DAY_S = 3600.0, 86_400.0


def written(at: float, until: float, hold_ends: float) -> Record:
    """All that a round stamps with its own time is ``at``; what it plans is ``until``."""
    slot = Slot(1, SlotState.MEMBER, "pool", "z-a", Model.SPOT, since=at, notice=until, ends=until)
    node = Node(cur=slot, next=slot, refused=("pool/z-b/spot",), refused_at=at, vacant_since=at)
    return Record(
        job=JOB,
        uid="",
        name="job",
        spec_sha256="",
        created=1.0,
        gen_since=at,
        stop_since=at,
        stop_deadline=until,
        roll=Roll(1, at, "silence"),
        move=Move("z-b", at),
        nodes=(node, Node()),
        budget=Budget(loss_times=(1.0, at)),
        fallback_until=until,
        hold=Hold.CLOUD,
        hold_until=until,
        hold_ends=hold_ends,
        roll_at=at,
        busy_at=at,
        hold_late=at,
        dry_since=at,
        short_since=at,
        limits=Limits(hour=at, unexplained_since=at, closed_until=until, spent_at=at, swaps=(1.0, at)),
        probes=(ZoneProbe("z-b", at, 1), ZoneProbe("z-c", 1.0, 2)),
        moved=Moved(at, 90.0),
    )


def test_future_times_count_as_now_and_plans_keep_their_distance(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ahead = 5 * HOUR_S
    corrected = believed(written(NOW + ahead, NOW + ahead + 90.0, hold_ends=NOW + 9e5), NOW)
    expected = written(NOW, NOW + 90.0, hold_ends=NOW + 9e5)
    slot = replace(expected.nodes[0].cur, notice=NOW + ahead + 90.0, ends=NOW + ahead + 90.0)  # type: ignore[type-var]
    expected = replace(expected, nodes=(replace(expected.nodes[0], cur=slot, next=slot), Node()))
    assert asdict(corrected) == asdict(expected)
    assert caplog.messages == [f"job {JOB}: a function's clock was 18000 s ahead; its times after now count as now"]
    assert believed(corrected, NOW) is corrected


NO_STAMP = {
    *("Record.created", "Record.hold_ends", "Slot.notice", "Slot.ends", "Mirrored.at"),
    *(
        "Limits.spent",
        "Limits.usd_hour",
        "Limits.forgiven",
        "MoveTime.s",
        "Moved.s",
        "Moved.gb",
        "Owed.gb",
        "Warm.usd",
        "Record.market_wait_s",
    ),  # money, and spans
    *("Trial.max_usd", "TrialProgress.values", "TrialProgress.final"),  # money, and a search's metric
}


NO_STAMP_OF_CLAIMS = {
    *("Grant.since", "Claim.since"),  # nothing waits for them
    *("Claim.waited_s", "Claim.cost_s", "Claim.usd", "TeamUse.usd", "TeamUse.month_usd", "TeamUse.last_usd"),
}


@pytest.mark.parametrize(("document", "plain"), [(Record, NO_STAMP), (Allocation, NO_STAMP_OF_CLAIMS)])
def test_every_number_of_a_document_is_classified_as_time_or_not(document: type, plain: set[str]) -> None:
    """A new one is written down here, or as `Past` or `Until`."""
    assert set(plain_floats(inspect.type_info(document))) == plain


def plain_floats(want: inspect.Type, name: str = "") -> Iterator[str]:
    match want:
        case inspect.FloatType():
            yield name
        case inspect.UnionType():
            for option in want.types:
                yield from plain_floats(option, name)
        case inspect.VarTupleType():
            yield from plain_floats(want.item_type, name)
        case inspect.StructType() if want.cls is not Entry:  # the ledger's: nothing waits for one
            for field in want.fields:
                yield from plain_floats(field.type, f"{want.cls.__name__}.{field.name}")


class Described(Record, frozen=True, kw_only=True):
    """A record with a field whose type has a description, and is no time."""

    count: Annotated[int, Meta(description="how many")] = 0


def test_an_annotated_number_that_is_no_time_stays() -> None:
    fields = asdict(written(NOW + HOUR_S, NOW + HOUR_S, hold_ends=NOW))
    corrected = believed(Described(**fields, count=3_000_000), NOW)
    assert isinstance(corrected, Described) and (corrected.count, corrected.gen_since) == (3_000_000, NOW)


def test_clocks_that_differ_by_seconds_are_believed(caplog: pytest.LogCaptureFixture) -> None:
    record = written(NOW + SKEW_S, NOW + 9e5, hold_ends=NOW)
    assert believed(record, NOW) is record
    assert not caplog.messages


def test_a_past_plan_is_not_postponed() -> None:
    record = replace(written(NOW - 50.0, NOW + 30.0, NOW), roll_at=NOW + HOUR_S)
    corrected = believed(record, NOW)
    assert (corrected.fallback_until, corrected.hold_until, corrected.gen_since) == (NOW, NOW, NOW - 50.0)


def test_a_lease_far_in_the_future_is_free() -> None:
    store, world = MemoryStore(), World()
    assert store.create_record(written(NOW, NOW, NOW))
    world.ahead = HOUR_S
    assert Lease(store, JOB, world, None).take()
    world.ahead = 0.0
    assert Lease(store, JOB, world, None).take()


@pytest.mark.parametrize("ahead", [600.0, 3 * HOUR_S, 50 * HOUR_S])
@pytest.mark.parametrize("refuses", ["z-a", "all"])
def test_a_refusal_from_a_clock_ahead_expires_in_time(ahead: float, refuses: str) -> None:
    world = World(nodes=2, pools=("pool",), policy="spot")
    zones = ("z-a",) if refuses == "z-a" else ("z-a", "z-b", "z-c")
    for zone in zones:
        world.capacity[zone, Model.SPOT] = 0
    world.ahead = ahead
    world.submit()
    world.run(30)
    world.ahead = 0.0
    assert world.events(Event.REFUSED)
    world.capacity.clear()
    world.until(world.training, 1200)


@pytest.mark.parametrize("ahead", [300.0, 2 * HOUR_S, 50 * HOUR_S])
@pytest.mark.parametrize("begins", range(5, 150, 12))
def test_a_clock_that_jumps_for_five_seconds_stops_no_job(ahead: float, begins: int) -> None:
    """A machine is lost meanwhile; without the jump this takes 250 s."""
    world = World(nodes=2, steps=150)
    world.submit()
    for second in range(200):
        world.ahead = ahead if begins <= second < begins + 5 else 0.0
        if second == 100 and world.training():
            world.preempt(1)
        world.step()
    world.until(lambda: world.record().phase is Phase.DONE, 900)


@pytest.mark.parametrize("ahead", [2 * HOUR_S, 50 * HOUR_S])
def test_a_job_whose_start_a_clock_ahead_dated_gives_its_machine_up_in_time(ahead: float) -> None:
    """Protection counts from a job's start; a job of higher priority waits for 15 minutes of it, and a save."""
    world = World(the_stack=stack(max_machines=1))
    world.spec = replace(world.spec, priority="low")
    world.ahead = ahead
    world.submit()
    world.until(world.training)
    world.run(120)
    world.ahead = 0.0
    world.spec = replace(world.spec, priority="normal")
    world.submit("wxyz2345")
    world.until(lambda: world.training("wxyz2345"), 1800)


def failed(days: float) -> World:
    """A job that holds since its code failed, with its checkpoint on its disk."""
    world = trained(World(nodes=1, hold_days=days))
    fatal(world, 0)
    holding(world)
    world.run(120)
    assert world.record().hold is Hold.FAILURE and len(world.drives) == 1
    return world


@pytest.mark.parametrize("ahead", [2 * DAY_S, 400 * DAY_S])
@pytest.mark.parametrize("every", [1, 2], ids=["all functions", "one of two functions"])
def test_a_clock_ahead_ends_no_hold_and_deletes_no_disk(ahead: float, every: int) -> None:
    world = failed(days=1.0)
    newest, ends = world.newest, world.record().hold_ends
    for tick in range(50):
        world.ahead = ahead if tick % every == 0 else 0.0
        world.run(60)
    world.ahead = 0.0
    world.run(120)
    record = world.record()
    assert (record.phase, record.hold_ends, record.hold_late) == (Phase.HOLD, ends, None)
    world.request(RequestKind.RESUME)
    world.until(world.training, 600)
    assert world.started[-1][1] == newest


def test_a_hold_whose_time_is_over_ends_with_its_disks() -> None:
    world = failed(days=0.05)
    world.until(lambda: world.record().phase is Phase.DONE, 0.05 * DAY_S + Times().sure_s + 600)
    assert not world.drives
