"""What a job saved stays as it was reckoned, whatever becomes of the stack's pools and prices afterwards."""

from __future__ import annotations

from msgspec.structs import replace

from spotkeeper.contract.stack import Price
from spotkeeper.report.money.money import money
from tests.reconcile.controller.test_round import trained
from tests.reconcile.world import World


def test_removing_or_repricing_a_pool_changes_no_savings() -> None:
    world = trained(World(nodes=2))
    world.run(3600)
    ledger = world.events()
    before = money(ledger, world.stack, world.t)
    assert before.on_demand_only > 2 * before.spent > 0
    (pool,) = world.stack.pools
    dearer = replace(pool, prices=dict.fromkeys(pool.zones, Price(on_demand=9.0, spot=3.0)))
    for pools in ((), (dearer,)):
        assert money(ledger, replace(world.stack, pools=pools), world.t) == before
    assert money(ledger, None, world.t) == before
