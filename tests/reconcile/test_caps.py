"""The stack's caps, over all pools: how many machines, and what they may cost together."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from spotkeeper.reconcile.alloc import Tally
from spotkeeper.spec.cloud import Offer
from spotkeeper.spec.model import Model
from spotkeeper.spec.record import Grant
from spotkeeper.spec.stack import PoolState, Price, StackState

from tests.reconcile.world import World, stack

SECOND = "wxyz2345"


def two_pools(**caps: object) -> StackState:
    """``pool`` costs 1.0 on-demand and at most 0.5 spot; ``other`` half of it; static nodes count for neither cap."""
    plain = stack(static=1)
    spot = next(pool for pool in plain.pools if pool.kind == "spot")
    dear = {zone: Price(on_demand=1.0, spot=0.5 - 0.1 * n) for n, zone in enumerate(spot.zones)}
    cheap = {zone: Price(on_demand=0.5, spot=0.2) for zone in spot.zones}
    pools = (replace(spot, name="pool", prices=dear), replace(spot, name="other", prices=cheap), plain.pools[-1])
    return replace(plain, pools=pools, **caps)


def offer(pool: str, model: Model = Model.SPOT) -> Offer:
    return Offer(pool=pool, zone="z-a", model=model, price=0.1)


def granted(*resources: str) -> Tally:
    return Tally(Grant(job="abcd2345", rank=n, attempt=1, resource=name) for n, name in enumerate(resources))


@pytest.mark.parametrize(
    ("cap", "room"), [(None, True), (2, False), (3, True)], ids=["no cap", "at the cap", "below the cap"]
)
def test_machines_of_all_pools_count_together_and_static_nodes_do_not(cap: int | None, room: bool) -> None:
    held = granted("slot:pool", "slot:other/on-demand", "node:floor-0")
    assert held.room(two_pools(max_machines=cap), offer("pool")) is room


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
def test_a_machine_counts_with_what_its_pool_costs_at_most(cap: float, pool: str, model: Model, room: bool) -> None:
    held = granted("slot:pool", "slot:other/on-demand", "node:floor-0")
    assert held.room(two_pools(max_usd_hour=cap), offer(pool, model)) is room


def test_what_fits_exactly_is_not_refused_for_a_rounding() -> None:
    spot = {zone: Price(on_demand=3.0, spot=1.2) for zone in stack().pools[0].zones}
    pools: tuple[PoolState, ...] = (replace(stack().pools[0], prices=spot),)
    name = pools[0].name
    held = granted(f"slot:{name}", f"slot:{name}")
    assert held.room(replace(stack(), pools=pools, max_usd_hour=3.6), offer(name))


def test_a_second_job_waits_for_the_stacks_cap_and_says_so() -> None:
    world = World(nodes=2, the_stack=replace(stack(), max_machines=3))
    world.submit()
    world.until(world.training)
    world.submit(SECOND)
    world.run(60)
    assert not world.training(SECOND)
    assert "caps" in world.record(SECOND).reason
    assert len(world.dynamic()) <= 3
