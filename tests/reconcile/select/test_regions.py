"""Offers of several regions: those that the job allows, and at equal prices those at home first."""

from __future__ import annotations

import dataclasses
import random

import pytest
from msgspec.structs import replace

from spotkeeper.contract.job import JobSpec
from spotkeeper.contract.stack import Model, Price
from spotkeeper.reconcile.select.offers import MoveCost, Need, Runs, Selection, select
from spotkeeper.reconcile.select.rule import Work
from tests.contract.samples import STACK, pool

HOME, ABROAD = "us-central1", "asia-east1"
NEAR, FAR = "us-central1-a", "asia-east1-b"
NEED = Need(now=0.0, on_demand_left=9)


def offered(regions: tuple[str, ...], *zones: str, abroad: float = 1.0) -> list[tuple[str, Model]]:
    prices = {NEAR: Price(on_demand=3.0, spot=1.0), FAR: Price(on_demand=3.0 * abroad, spot=1.0 * abroad)}
    stack = replace(STACK, regions=(HOME, ABROAD), pools=(pool("wide", zones=zones or (NEAR, FAR), prices=prices),))
    spec = replace(JobSpec("first", ("/opt/train.py",)), regions=regions)
    return [(choice.offer.zone, choice.offer.model) for choice in select(spec, stack, NEED).choices]


def test_a_job_is_offered_zones_of_its_regions_only() -> None:
    assert {zone for zone, _ in offered(())} == {NEAR}
    assert {zone for zone, _ in offered((ABROAD,))} == {FAR}
    assert {zone for zone, _ in offered((HOME, ABROAD))} == {NEAR, FAR}


def test_at_equal_prices_home_comes_first() -> None:
    """Whatever the names of the regions."""
    both = [(NEAR, Model.SPOT), (FAR, Model.SPOT), (NEAR, Model.ON_DEMAND), (FAR, Model.ON_DEMAND)]
    assert offered((ABROAD, HOME)) == both


def test_a_cheaper_region_comes_first() -> None:
    both = [(FAR, Model.SPOT), (NEAR, Model.SPOT), (FAR, Model.ON_DEMAND), (NEAR, Model.ON_DEMAND)]
    assert offered((HOME, ABROAD), abroad=0.9) == both


# -- never above the cheapest on-demand of the job's regions, egress included

BOTH = JobSpec("first", ("/opt/train.py",), regions=(HOME, ABROAD))
LEFT_H = 10.0


def asked(near: Price, far: Price, usd: float, rest: Need = NEED) -> Selection:
    """Offers to a job that pays ``usd`` to come abroad, with ten hours of work left."""
    stack = replace(
        STACK, regions=(HOME, ABROAD), pools=(pool("wide", prices={NEAR: near, FAR: far}, zones=(NEAR, FAR)),)
    )
    moves, work = {FAR: MoveCost(0.0, usd)}, Work(LEFT_H, None)
    return select(BOTH, stack, dataclasses.replace(rest, move_costs=moves, work=work))


def order(near: Price, far: Price, usd: float) -> list[tuple[str, Model]]:
    return [(choice.offer.zone, choice.offer.model) for choice in asked(near, far, usd).choices]


@pytest.mark.parametrize(("usd", "first"), [(0.0, FAR), (4.9, FAR), (5.1, NEAR), (100.0, NEAR)])
def test_on_demand_is_compared_with_the_egress_of_coming_there(usd: float, first: str) -> None:
    """Half a dollar an hour less, for ten hours."""
    found = order(Price(on_demand=3.0), Price(on_demand=2.5), usd)
    assert next(zone for zone, model in found if model is Model.ON_DEMAND) == first


@pytest.mark.parametrize(("usd", "comes"), [(1.0, True), (20.1, False)])
def test_spot_abroad_comes_before_on_demand_only_if_it_costs_less_with_its_egress(usd: float, comes: bool) -> None:
    """It saves two dollars an hour, for as long as it may last."""
    found = order(Price(on_demand=3.0), Price(on_demand=3.0, spot=1.0), usd)
    assert (found.index((FAR, Model.SPOT)) < found.index((NEAR, Model.ON_DEMAND))) is comes


def test_spot_above_another_regions_on_demand_comes_after_that() -> None:
    found = order(Price(on_demand=3.0, spot=2.6), Price(on_demand=2.0), 5.0)
    assert found == [(FAR, Model.ON_DEMAND), (NEAR, Model.SPOT), (NEAR, Model.ON_DEMAND)]


def test_no_offer_before_the_cheapest_on_demand_costs_more_than_it_with_egress() -> None:
    rng = random.Random(7)  # noqa: S311 - a draw that can be repeated
    for _ in range(300):
        near, far = (Price(on_demand=rng.uniform(1.0, 3.0), spot=rng.uniform(0.2, 3.2)) for _ in range(2))
        usd = rng.choice((0.0, rng.uniform(0.0, 40.0)))
        whole = {NEAR: 0.0, FAR: usd / LEFT_H}
        offers = [choice.offer for choice in asked(near, far, usd).choices]
        found = [(offer, offer.price + whole[offer.zone]) for offer in offers]
        least = min(near.on_demand, far.on_demand + whole[FAR])
        first = next(number for number, (offer, _) in enumerate(found) if offer.model is Model.ON_DEMAND)
        assert found[first][1] == pytest.approx(least), (near, far, usd)
        assert all(price < least for _, price in found[:first]), (near, far, usd)


def test_a_gang_on_spot_leaves_for_a_region_where_on_demand_costs_less_than_its_spot() -> None:
    runs = Runs(Model.SPOT, f"wide/{NEAR}/spot", 7200.0)
    near, on = Price(on_demand=3.0, spot=2.5), dataclasses.replace(NEED, runs=runs)
    assert asked(near, Price(on_demand=2.0), 4.9, on).leaves
    assert not asked(near, Price(on_demand=2.0), 5.1, on).leaves
