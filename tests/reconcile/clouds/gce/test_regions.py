"""A stack in two regions of Compute Engine: one that is silent is unknown, and keeps nothing from the other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from spotkeeper.clock import Clock
from spotkeeper.contract.cloud import InsertVm, ResultKind
from spotkeeper.contract.market import Prices
from spotkeeper.contract.stack import Model
from spotkeeper.reconcile.clouds.gce.cloud import Gce, open_gce
from tests.reconcile.clouds.gce.compute import JOB, STACK, UID, A, Asked, B, Google, refusal, serve
from tests.reconcile.clouds.gce.test_advice import CAPACITY, HISTORY, advised
from tests.reconcile.clouds.gce.test_gce import instance, scopes

HOME, ABROAD, C = "us-x1", "eu-y1", "eu-y1-c"
LINK = "https://www.googleapis.com/compute/v1/projects/p/regions/{}/instanceTemplates/{}"
POOL = replace(
    STACK.pools[0],
    zones=(A, B, C),
    templates={"spot": LINK.format(HOME, "near"), f"{ABROAD}/spot": LINK.format(ABROAD, "far")},
)
BOTH = replace(STACK, regions=(HOME, ABROAD), pools=(POOL,))


@pytest.fixture
def google() -> Iterator[Google]:
    with serve() as found:
        yield found


@pytest.fixture
def gce(google: Google) -> Gce:
    return open_gce(BOTH, Clock(), google.endpoint)


def test_one_list_covers_the_zones_of_all_regions(google: Google, gce: Gce) -> None:
    google.script["instances.aggregatedList"] = scopes("instances", us_x1_a=[instance()])
    listing = gce.list("demo")
    assert listing.answered == {A, B, C} and len(listing.vms) == 1


@pytest.mark.parametrize("scope", [f"projects/p/regions/{ABROAD}", f"projects/p/zones/{C}", f"regions/{ABROAD}"])
def test_a_silent_region_is_unknown_and_the_other_is_not(google: Google, gce: Gce, scope: str) -> None:
    page = scopes("instances", us_x1_a=[instance()]) | {"unreachables": [scope], "warning": {"code": "UNREACHABLE"}}
    google.script["instances.aggregatedList"] = page
    listing = gce.list("demo")
    assert listing.answered == {A, B} and len(listing.vms) == 1


def test_each_zone_of_a_failing_region_has_its_own_error(
    google: Google, gce: Gce, caplog: pytest.LogCaptureFixture
) -> None:
    google.script["disks.aggregatedList"] = refusal(503, "backendError")
    google.script["disks.list"] = lambda asked: (
        refusal(500, "internalError") if asked.params["zone"] == C else {"items": []}
    )
    assert gce.list("demo").answered == {A, B}
    assert [text for text in caplog.messages if "zone " in text and "disks" in text] == [
        f"zone {C}: listing its disks failed: HTTP 500 internalError no"
    ]


@pytest.mark.parametrize(("zone", "template"), [(A, (HOME, "near")), (C, (ABROAD, "far"))])
def test_a_machine_is_made_from_its_regions_template(
    google: Google, gce: Gce, zone: str, template: tuple[str, str]
) -> None:
    action = InsertVm(JOB, UID, 0, 1, "gpu", zone, Model.SPOT)
    assert gce.perform(action, 60).kind is ResultKind.ACCEPTED
    (asked,) = google.of("instances.insert")
    assert asked.params["zone"] == zone
    assert asked.query["sourceInstanceTemplate"].endswith("regions/{}/instanceTemplates/{}".format(*template))


def test_without_its_regions_template_nothing_is_made_from_another(google: Google, gce: Gce) -> None:
    action = InsertVm(JOB, UID, 0, 1, "gpu", C, Model.ON_DEMAND)
    result = gce.perform(action, 60)
    assert (result.kind, result.detail) == (ResultKind.PERMANENT, f"pool 'gpu' has no on-demand template for {C}")
    assert not google.of("instances.insert")


def of_region(answers: dict[str, Any]) -> Any:
    return lambda asked: answers[asked.params["region"]]


def priced(usd: int) -> dict[str, Any]:
    record = {
        "interval": {"startTime": "2026-11-01T08:00:00Z"},
        "listPrice": {"currencyCode": "USD", "units": str(usd)},
    }
    return {"priceHistory": [record]}


def test_each_zone_has_its_regions_price(google: Google, gce: Gce) -> None:
    google.script[HISTORY] = of_region({HOME: priced(3), ABROAD: priced(2)})
    runs = gce.price_history("gpu", 60.0)
    assert runs is not None
    prices = Prices("gpu", 0.0, 0.0, runs)
    assert {zone: prices.at(runs[0].start, zone) for zone in POOL.zones} == {A: 3.0, B: 3.0, C: 2.0}


def test_a_region_that_tells_no_price_has_an_unknown_one(google: Google, gce: Gce) -> None:
    google.script[HISTORY] = of_region({HOME: priced(3), ABROAD: refusal(403, "forbidden")})
    runs = gce.price_history("gpu", 60.0)
    assert runs is not None and {run.zone for run in runs} == {A, B}
    google.script[HISTORY] = refusal(403, "forbidden")
    assert gce.price_history("gpu", 60.0) is None


def test_a_zone_is_asked_about_in_its_region(google: Google, gce: Gce) -> None:
    def answer(asked: Asked) -> dict[str, Any]:
        (named,) = asked.body["distributionPolicy"]["zones"]
        zone = named["zone"].removeprefix("zones/")
        assert asked.params["region"] == zone.rpartition("-")[0]
        return advised(zone, 0.5)

    google.script |= {CAPACITY: answer, HISTORY: {}}
    told = gce.chances("gpu", 60.0)
    assert told is not None and set(told.by_zone) == {A, B, C}
