"""``advice.capacity`` and ``capacityHistory``: Google's shapes, its refusals, and the recorded market's figures."""

from __future__ import annotations

from datetime import datetime
from itertools import pairwise
from typing import Any

import pytest

from spotkeeper.contract.stack import PoolState, StackState
from spotkeeper.local.lifecycle.cloud import LocalCloud
from spotkeeper.reconcile.clouds.gce.cloud import open_gce
from tests.local.client import Api, RefusedError

PATH = "regions/us-central1/advice/capacityHistory"
ZONES = ("us-central1-a", "us-central1-b", "us-central1-c")


@pytest.fixture(scope="module")
def api(cloud: LocalCloud) -> Api:
    """Calls beta, which answers for spot machines; v1 documents the same form."""
    return Api(cloud.compute_endpoint.removesuffix("v1") + "beta", token=cloud.token)


def test_v1_has_no_advice_on_spot_machines(cloud: LocalCloud) -> None:
    for path, body in ((PATH, question()), (CAPACITY, wanted())):
        with refused(400, "badRequest"):
            Api.of(cloud).post(path, body)


def question(machine: str = "g2-standard-4", *types: str, location: str | None = None, **more: Any) -> dict[str, Any]:
    properties = {"machineType": machine, "scheduling": {"provisioningModel": "SPOT"}} | more
    body: dict[str, Any] = {"instanceProperties": properties, "types": list(types or ("PRICE",))}
    return body | ({"locationPolicy": {"location": location}} if location else {})


def refused(code: int, reason: str) -> Any:
    return pytest.raises(RefusedError, match=rf"^{code} {reason}")


def usd(money: dict[str, Any]) -> float:
    assert money["currencyCode"] == "USD"
    return int(money["units"]) + money["nanos"] / 1e9


def at(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def test_the_price_is_what_the_cloud_bills(api: Api, cloud: LocalCloud) -> None:
    found = api.post(PATH, question())
    assert found["machineType"] == "g2-standard-4"
    assert found["location"].endswith("/projects/local/regions/us-central1")
    assert "preemptionHistory" not in found
    newest = found["priceHistory"][-1]
    assert usd(newest["listPrice"]) == pytest.approx(0.23 * 0.707)
    assert at(newest["interval"]["startTime"]) <= cloud.clock.now()
    assert "endTime" not in newest["interval"]


def test_preemption_rates_are_daily_by_region_or_zone(api: Api, cloud: LocalCloud) -> None:
    for location in (None, "regions/us-central1", "zones/us-central1-b", "projects/local/zones/us-central1-b"):
        days = api.post(PATH, question("g2-standard-4", "PREEMPTION", location=location))["preemptionHistory"]
        assert len(days) <= 30
        assert all(0.0 <= day["preemptionRate"] <= 1.0 for day in days)
        spans = [(at(day["interval"]["startTime"]), at(day["interval"]["endTime"])) for day in days]
        assert all(end - start == 86400.0 for start, end in spans)
        assert all(one[1] == two[0] for one, two in pairwise(spans))
        assert all(end <= cloud.clock.now() for _, end in spans)


def test_types_without_history_are_refused(api: Api) -> None:
    for machine in ("n1-standard-8", "n2-custom-4-8192"):
        with refused(400, "badRequest"):
            api.post(PATH, question(machine))
    with refused(404, "notFound"):
        api.post(PATH, question("z9-mega-1"))
    with refused(404, "notFound"):
        api.post("regions/mars-1/advice/capacityHistory", question())


def test_an_invalid_history_request_gets_400(api: Api) -> None:
    with refused(400, "required"):
        api.post(PATH, {"instanceProperties": {"machineType": "g2-standard-4"}, "types": ["PRICE"]})
    with refused(400, "invalid"):
        api.post(PATH, question(scheduling={"provisioningModel": "STANDARD"}))
    with refused(400, "required"):
        api.post(PATH, question() | {"types": []})
    with refused(400, "invalid"):  # prices are per region
        api.post(PATH, question("g2-standard-4", "PRICE", location="zones/us-central1-a"))
    with refused(400, "invalid"):
        api.post(PATH, question("g2-standard-4", "PREEMPTION", location="zones/us-east1-b"))


def test_unsupported_requests_get_501(api: Api) -> None:
    with refused(501, "notImplemented"):
        api.post(PATH, question(guestAccelerators=[{"acceleratorType": "nvidia-l4", "acceleratorCount": 1}]))
    with refused(501, "notImplemented"):
        api.post("regions/us-central1/advice/calendarMode", {})


# -- capacity


CAPACITY = "regions/us-central1/advice/capacity"


def wanted(zone: str = "us-central1-a", size: int = 4, machine: str = "g2-standard-4", **more: Any) -> dict[str, Any]:
    return {
        "instanceProperties": {"scheduling": {"provisioningModel": "SPOT"}},
        "instanceFlexibilityPolicy": {"instanceSelections": {"pool": {"machineTypes": [machine]}}},
        "distributionPolicy": {"targetShape": "ANY_SINGLE_ZONE", "zones": [{"zone": f"zones/{zone}"}]},
        "size": size,
    } | more


def test_smaller_requests_have_higher_scores(api: Api) -> None:
    for zone in ("us-central1-a", "us-central1-b", "us-central1-c"):
        had = []
        for size in (1, 4, 1000):
            (found,) = api.post(CAPACITY, wanted(zone, size))["recommendations"]
            assert found["scores"]["estimatedUptime"] in ("3600s", "600s")
            assert [(shard["zone"], shard["instanceCount"]) for shard in found["shards"]] == [(zone, size)]
            had.append(found["scores"]["obtainability"])
        assert had == sorted(had, reverse=True) and 0.0 <= had[1] <= 1.0 and had[2] == 0.0


def test_the_best_of_several_zones_is_recommended(api: Api) -> None:
    every = [api.post(CAPACITY, wanted(zone, 2))["recommendations"][0]["scores"] for zone in ZONES]
    shape = {"targetShape": "ANY_SINGLE_ZONE", "zones": [{"zone": f"zones/{zone}"} for zone in ZONES]}
    (found,) = api.post(CAPACITY, wanted(size=2, distributionPolicy=shape))["recommendations"]
    assert found["scores"]["obtainability"] == max(scores["obtainability"] for scores in every)


def test_an_invalid_capacity_request_is_refused(api: Api) -> None:
    for size in (0, 1001):
        with refused(400, "invalid"):
            api.post(CAPACITY, wanted(size=size))
    with refused(400, "required"):
        api.post(CAPACITY, {key: value for key, value in wanted().items() if key != "size"})
    with refused(400, "required"):
        api.post(CAPACITY, wanted(instanceFlexibilityPolicy={}))
    with refused(400, "required"):
        api.post(CAPACITY, wanted(instanceProperties={}))
    with refused(400, "invalid"):
        api.post(CAPACITY, wanted("us-east1-b"))
    with refused(404, "notFound"):
        api.post(CAPACITY, wanted(machine="z9-mega-1"))
    with refused(501, "notImplemented"):
        api.post(CAPACITY, wanted(distributionPolicy={"targetShape": "BALANCED"}))
    with refused(501, "notImplemented"):
        api.post(CAPACITY, wanted(instanceProperties={"scheduling": {"provisioningModel": "STANDARD"}}))


def test_the_function_reads_the_clouds_advice(cloud: LocalCloud) -> None:
    """The adapter reads prices and scores from the same recording."""
    pool = PoolState("gpu", "spot", "g2-standard-4", ZONES, 1, 2, 0, 50, "pd-balanced", {})
    stack = StackState("demo", "gcp", "local", "us-central1", "b", (pool,))
    there = open_gce(stack, cloud.clock, cloud.compute_endpoint, cloud.token)
    told = there.chances("gpu", 30.0)
    assert told is not None and set(told.by_zone) == set(ZONES)
    assert abs(told.at - cloud.clock.now()) < 3600.0, "stamped by the stack's own clock"
    assert all(None not in (guess.had, guess.lasts, guess.kept) for guess in told.by_zone.values())
    assert there.price_history("gpu", 30.0)
