"""The stack's caps, over all pools: how many machines, and what they may cost together."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from spotkeeper.contract.allocation import Grant, Tally
from spotkeeper.contract.cloud import Offer
from spotkeeper.contract.record import Node, Record, Slot, SlotState
from spotkeeper.contract.stack import Model, PoolState, Price, StackState
from tests.reconcile.world import JOB, World, stack

SECOND = "wxyz2345"


def two_pools(**caps: object) -> StackState:
    """``pool`` costs 1.0 on-demand and at most 0.5 spot; ``other`` half of it; static ones count for neither cap."""
    plain = stack(static=1)
    spot = next(pool for pool in plain.pools if pool.kind == "spot")
    dear = {zone: Price(on_demand=1.0, spot=0.5 - 0.1 * n) for n, zone in enumerate(spot.zones)}
    cheap = {zone: Price(on_demand=0.5, spot=0.2) for zone in spot.zones}
    pools = (replace(spot, name="pool", prices=dear), replace(spot, name="other", prices=cheap), plain.pools[-1])
    return replace(plain, pools=pools, **caps)


def offer(pool: str, model: Model = Model.SPOT) -> Offer:
    return Offer(pool=pool, zone="z-a", model=model, price=0.1)


def granted(*resources: str) -> Tally:
    return Tally(Grant(job="abcd2345", node=n, attempt=1, resource=name) for n, name in enumerate(resources))


@pytest.mark.parametrize(
    ("cap", "room"), [(None, True), (2, False), (3, True)], ids=["no cap", "at the cap", "below the cap"]
)
def test_machines_of_all_pools_count_together_and_static_machines_do_not(cap: int | None, room: bool) -> None:
    held = granted("slot:pool", "slot:other/on-demand", "machine:floor-0")
    assert held.fits(two_pools(max_machines=cap), offer("pool")) is room


@pytest.mark.parametrize(
    ("cap", "pool", "model", "room"),
    [
        (1.5, "pool", Model.SPOT, True),  # 0.5 + 0.5 are held, and 0.5 more make 1.5
        (1.49, "pool", Model.SPOT, False),
        (1.49, "other", Model.SPOT, True),
        (1.49, "other", Model.ON_DEMAND, False),
        (2.0, "pool", Model.ON_DEMAND, True),
    ],
)
def test_a_machine_counts_at_its_pools_highest_price(cap: float, pool: str, model: Model, room: bool) -> None:
    held = granted("slot:pool", "slot:other/on-demand", "machine:floor-0")
    assert held.fits(two_pools(max_usd_hour=cap), offer(pool, model)) is room


def test_an_exact_fit_is_not_refused_by_rounding() -> None:
    spot = {zone: Price(on_demand=3.0, spot=1.2) for zone in stack().pools[0].zones}
    pools: tuple[PoolState, ...] = (replace(stack().pools[0], prices=spot),)
    name = pools[0].name
    held = granted(f"slot:{name}", f"slot:{name}")
    assert held.fits(replace(stack(), pools=pools, max_usd_hour=3.6), offer(name))


def test_a_second_job_waits_for_the_stacks_cap_and_says_so() -> None:
    world = World(nodes=2, the_stack=replace(stack(), max_machines=3))
    world.submit()
    world.until(world.training)
    world.submit(SECOND)
    world.run(60)
    assert not world.training(SECOND)
    assert "waiting in the queue" in world.record(SECOND).reason
    assert len(world.dynamic()) <= 3


def test_a_forged_record_gets_no_machines_beyond_the_caps() -> None:
    """Whoever submits creates the record, with whatever is in it; grants are the function's alone."""
    world = World(nodes=5, the_stack=stack(max_machines=1, max_on_demand=0), policy="spot")
    claimed = Slot(1, SlotState.INTENT, "pool", "z-a", Model.SPOT, world.t)
    record = Record(
        job=JOB,
        uid="00000000-0000-0000-0000-000000000001",
        name="job",
        spec_sha256="",
        created=world.t,
        ver=7,
        nodes=tuple(Node(top=1, cur=claimed) for _ in range(5)),
        nonce="forged",
    )
    world.store.put_spec(JOB, world.spec)
    world.store.set_active(JOB)
    assert world.store.create_record(record)
    world.run(60)
    assert world.inserts() == []
    for _ in range(600):
        world.step()
        assert len(world.dynamic()) <= 1
