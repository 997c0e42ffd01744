"""What transfers between regions cost: estimated for the choice of machines, and logged once they have happened."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from spotkeeper.contract.generation import Progress
from spotkeeper.contract.job import Checkpoint, Mirror, RequestKind
from spotkeeper.contract.ledger import Event
from spotkeeper.contract.record import Mirrored, Moved
from spotkeeper.contract.stack import Model, Price, StackState, region_of
from spotkeeper.reconcile.decide.draft import Draft
from spotkeeper.reconcile.decide.job import transfer
from spotkeeper.reconcile.decide.job.progress import move_costs
from spotkeeper.report.money.money import money
from tests.reconcile.decide.test_decide import NOW
from tests.reconcile.decide.test_guards import Change, calm, changed, on_cur, on_node, on_record, on_snapshot, on_spec
from tests.reconcile.world import JOB, World, stack

HOME, ABROAD = "z", "y"
ZONES = ("z-a", "z-b", "y-a")
USD_GB = 0.05


def both(spot_abroad: float = 0.3) -> StackState:
    """A stack with two zones at home and one abroad."""
    found = stack()
    prices = {zone: Price(on_demand=1.0, spot=0.6) for zone in ZONES[:2]} | {ZONES[2]: Price(1.0, spot_abroad)}
    pool = replace(found.pools[0], zones=ZONES, prices=prices, disk_gb=200)
    there = {HOME: {ABROAD: USD_GB}, ABROAD: {HOME: USD_GB}}
    return replace(found, region=HOME, regions=(HOME, ABROAD), pools=(pool,), egress=there)


def draft(*changes: Change) -> Draft:
    return changed(calm(2), on_snapshot(stack=both()), *changes)


def usd(made: Draft) -> dict[str, float]:
    return {zone: round(cost.usd, 6) for zone, cost in move_costs(made).items()}


MEASURED = on_record(moved=Moved(NOW - 9e3, 60.0, 12.0))
REPORTED = on_snapshot(progress=Progress(1, 1, 0.0, disk_bytes=40 * 10**9))


@pytest.mark.parametrize(
    ("changes", "gb"),
    [((), 200.0), ((REPORTED,), 40.0), ((MEASURED,), 12.0), ((REPORTED, MEASURED), 12.0)],
    ids=["the whole disk", "what the machine reports", "what the last move copied", "measured before reported"],
)
def test_a_disk_that_goes_abroad_costs_its_egress_for_each_machine(changes: tuple[Change, ...], gb: float) -> None:
    assert usd(draft(*changes)) == {"z-b": 0.0, "y-a": pytest.approx(gb * USD_GB)}


def test_data_is_read_anew_in_a_region_that_has_none() -> None:
    data = on_spec(data_gb=100.0, regions=(HOME, ABROAD))
    copied = 200.0 * USD_GB
    assert usd(draft(data)) == {"z-b": 0.0, "y-a": copied + 100.0 * USD_GB / 2}, "two machines read it together"
    assert usd(draft(on_spec(data_gb=100.0, data_region=ABROAD))) == {"z-b": 0.0, "y-a": copied}
    begins = on_record(gen=0)
    assert usd(draft(data, begins)) == {"y-a": 100.0 * USD_GB / 2}, "a job that has not begun has nothing else to move"
    assert usd(draft(begins)) == {}


def test_machines_in_several_regions_bring_the_data_once_to_each() -> None:
    """The first of them there pays; one that follows comes for nothing."""
    spread = on_spec(data_gb=100.0, regions=(HOME, ABROAD), spread=True)
    begins = on_record(gen=0, zone=None, members=())
    assert usd(draft(spread, begins, on_cur(0, zone="z-a"), on_node(1, cur=None))) == {"y-a": 100.0 * USD_GB}
    assert usd(draft(spread, begins, on_cur(0, zone="y-a"), on_node(1, cur=None))) == {}
    assert usd(draft(spread, on_record(zone=None))) == {}, "its nodes stay where their disks are"


def test_data_of_machines_in_several_regions_is_charged_once_for_each_region() -> None:
    world = World(3, the_stack=both(), regions=(HOME, ABROAD), spread=True, data_gb=4.0, data_region=HOME)
    for zone, machines in (("z-a", 1), ("z-b", 0), ("y-a", 2)):
        world.capacity[zone, Model.SPOT] = machines
        world.capacity[zone, Model.ON_DEMAND] = 0
    world.submit()
    world.until(world.training, 900)
    (one,) = world.events(Event.EGRESS)
    assert (one.cause, one.detail, one.gb, one.usd) == ("data", "z -> y", 4.0, pytest.approx(4.0 * USD_GB))


@pytest.mark.parametrize(("bucket", "usd"), [((), 3.0), ((HOME,), 3.0), ((ABROAD,), 3.0), ((HOME, ABROAD), 0.0)])
def test_a_copy_goes_into_the_bucket_or_out_of_it_for_egress(bucket: tuple[str, ...], usd: float) -> None:
    """Whichever of the two is in another region; the stack's first region has the bucket if it says nothing."""
    mirrored = on_record(mirror=(Mirrored("1-1", 0, NOW, bytes=3 * 10**9),))
    where = on_snapshot(stack=replace(both(), bucket_regions=bucket))
    way = transfer.by_bucket(draft(where, on_spec(checkpoint=Checkpoint(mirror=Mirror())), mirrored), "y-a")
    assert way is not None and way.usd == pytest.approx(usd * USD_GB)


def test_an_unknown_price_counts_as_none() -> None:
    assert set(usd(draft(on_snapshot(stack=replace(both(), egress={})))).values()) == {0.0}


def begun(**spec: object) -> World:
    """A gang of two that trains at home, and could have cheaper spot abroad from now on."""
    world = World(2, the_stack=both(), regions=(HOME, ABROAD), **spec)
    world.disk_gb = 10.0
    world.capacity["y-a", Model.SPOT] = 0
    world.submit()
    world.until(lambda: world.training() and world.newest is not None)
    assert region_of(world.record().zone or "") == HOME
    world.capacity["y-a", Model.SPOT] = 100
    return world


@pytest.mark.parametrize(("data_gb", "moves"), [(30.0, True), (60.0, False)])
def test_a_gang_goes_abroad_for_cheaper_spot_only_if_that_pays_with_its_egress(data_gb: float, moves: bool) -> None:
    """Spot at 0.3 less an hour, for each machine, against the egress of its disk and of its half of the data."""
    world = begun(work="100h", data_gb=data_gb)
    world.run(3 * 3600)
    assert (world.record().zone == "y-a") is moves
    assert bool(world.events(Event.EGRESS)) is moves


def test_what_went_abroad_is_in_the_ledger_and_in_the_cost() -> None:
    world = begun(work="100h", data_gb=4.0)
    before = world.record().limits.spent
    world.until(lambda: world.record().zone == "y-a", 3 * 3600)
    found = world.events(Event.EGRESS)
    assert [(entry.node, entry.cause, entry.gb, entry.usd, entry.detail) for entry in found] == [
        (None, "data", 4.0, 4.0 * USD_GB, "z -> y"),
        (0, "checkpoint", 10.0, 10.0 * USD_GB, "z -> y"),
        (1, "checkpoint", 10.0, 10.0 * USD_GB, "z -> y"),
    ]
    moved = world.record().moved
    assert moved is not None and moved.gb == 10.0
    ledger = world.store.list_ledger(JOB)
    told, machines = (money(of, world.stack, world.t) for of in (ledger, [e for e in ledger if e not in found]))
    assert told.egress == pytest.approx(24.0 * USD_GB)
    assert told.spent == pytest.approx(machines.spent + told.egress)
    assert told.saved == pytest.approx(machines.saved - told.egress)
    assert world.record().limits.spent - before >= told.egress


def test_a_move_within_a_region_transfers_nothing_and_measures_the_disks() -> None:
    world = begun()
    world.request(RequestKind.MOVE, zone="z-b" if world.record().zone == "z-a" else "z-a")
    world.until(lambda: world.record().moved is not None)
    assert world.events(Event.EGRESS) == []
    moved = world.record().moved
    assert moved is not None and moved.gb == 10.0


def test_copies_of_a_move_that_is_cancelled_are_billed_and_told() -> None:
    """Also by a job that ends in the middle."""
    for end in (RequestKind.MOVE, RequestKind.CANCEL):
        world = begun(data_gb=4.0)
        world.request(RequestKind.MOVE, zone="y-a")
        world.until(lambda world=world: any(zone == "y-a" for _, zone in world.drives))  # type: ignore[misc]
        world.request(end)
        world.until(lambda world=world: world.record().move is None)  # type: ignore[misc]
        assert {(entry.cause, entry.usd) for entry in world.events(Event.EGRESS)} == {("checkpoint", 10.0 * USD_GB)}


def test_copies_in_the_bucket_are_billed_to_a_gang_abroad() -> None:
    """Uploads and downloads, each once; at home, and where the bucket is in both regions, they cost nothing.

    The gang comes abroad by the bucket.
    """
    for regions, price in (((), USD_GB), ((HOME,), USD_GB), ((HOME, ABROAD), 0.0)):
        world = begun(checkpoint=Checkpoint(mirror=Mirror(every_min=1.0)))
        world.stack = world.memory.stack = replace(world.stack, bucket_regions=regions)
        world.copy_bytes = 3 * 10**9
        world.run(200)
        assert [entry for entry in world.events(Event.EGRESS) if entry.cause == "bucket"] == []
        world.request(RequestKind.MOVE, zone="y-a")
        world.until(lambda world=world: world.training() and world.record().zone == "y-a", 600)  # type: ignore[misc]
        world.run(200)
        world.copies = False
        for key in [key for key, drive in world.drives.items() if drive.disk.job]:
            del world.drives[key]
        for node in (0, 1):
            world.preempt(node)
        gen = world.record().gen
        world.until(lambda world=world, gen=gen: world.training() and world.record().gen > gen, 1800)  # type: ignore[misc]
        world.run(60)
        abroad = [way for way, zone in world.through_bucket if zone == "y-a"]
        assert abroad.count("up") >= 2 and abroad.count("down") == 2
        told = [entry for entry in world.events(Event.EGRESS) if entry.cause == "bucket"]
        assert sum(entry.usd or 0.0 for entry in told) == pytest.approx(3.0 * price * len(abroad))
        ways = [entry.detail for entry in told]
        assert not price or (ways.count("y -> z"), ways.count("z -> y")) == (abroad.count("up"), abroad.count("down"))
