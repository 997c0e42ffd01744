"""Offers of several regions: those that the job allows, and at equal prices those at home first."""

from __future__ import annotations

from msgspec.structs import replace

from spotkeeper.contract.job import JobSpec
from spotkeeper.contract.stack import Model, Price
from spotkeeper.reconcile.select.offers import Need, select
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
