"""A job that waits because its `max_price` is below what spot costs says so, in `status` and in its events."""

from __future__ import annotations

import pytest

from spotkeeper.contract.ledger import Event
from spotkeeper.contract.market import PriceRun
from spotkeeper.contract.stack import Model
from spotkeeper.reconcile.decide.draft import Draft
from spotkeeper.reconcile.decide.provisioning import pending
from tests.reconcile.decide.test_guards import calm
from tests.reconcile.world import ZONES, World, stack

WHY = "waiting: max_price is $0.1, and the cheapest spot machine in the pools of the job costs $0.30 an hour"


@pytest.mark.parametrize("policy", ["spot", "balanced", "shuffle"])
def test_the_reason_names_both_prices(policy: str) -> None:
    world = World(policy=policy, max_price=0.1, the_stack=stack(max_on_demand=0))
    world.submit()
    world.run(60)
    assert world.record().reason == WHY
    assert [entry.detail for entry in world.events(Event.REFUSED)] == [WHY]


def test_max_price_compares_with_the_clouds_price() -> None:
    world = World(policy="spot", max_price=0.35)
    world.prices["pool"] = tuple(PriceRun(0.0, 0.9, zone) for zone in ZONES)
    world.submit()
    world.run(60)
    assert world.record().reason.endswith("costs $0.90 an hour")
    world.prices["pool"] = tuple(PriceRun(0.0, 0.2, zone) for zone in ZONES)
    world.until(world.training, 2 * 3600)


def test_on_demand_is_bought_whatever_spot_costs() -> None:
    world = World(max_price=0.1)
    world.submit()
    world.until(world.training, 300)
    assert world.record().reason == ""


def test_a_node_that_has_a_machine_waits_for_nothing() -> None:
    draft = Draft(*calm(2))
    assert pending.nothing(draft, 0, {Model.SPOT}) is False and draft.whole() == draft.before


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ({}, "waiting for capacity in z-a"),
        ({"max_on_demand": 1}, "waiting for capacity in z-a"),  # one more may be bought
        ({"max_on_demand": 0}, "waiting for spot capacity in z-a: the job's max_on_demand of 0 is reached"),
        ({"max_on_demand": 0, "policy": "on-demand"}, "waiting: the job's max_on_demand of 0 is reached"),
        ({"max_on_demand": 0, "policy": "spot"}, "waiting for capacity in z-a"),
    ],
)
def test_max_on_demand_is_named_only_if_it_is_reached(spec: dict[str, object], reason: str) -> None:
    assert pending._no_offers(Draft(*calm(2, **spec)), 0, capped=False) == reason
