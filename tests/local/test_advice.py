"""``advice.capacityHistory``: Google's shapes, its refusals, and the recorded market's figures."""

from __future__ import annotations

from datetime import datetime
from itertools import pairwise
from typing import Any

import pytest
from spotkeeper.local.cloud import LocalCloud

from tests.local.client import Api, RefusedError

PATH = "regions/us-central1/advice/capacityHistory"


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


def test_a_day_has_one_preemption_rate_of_a_region_or_of_a_zone(api: Api, cloud: LocalCloud) -> None:
    for location in (None, "regions/us-central1", "zones/us-central1-b", "projects/local/zones/us-central1-b"):
        days = api.post(PATH, question("g2-standard-4", "PREEMPTION", location=location))["preemptionHistory"]
        assert len(days) <= 30
        assert all(0.0 <= day["preemptionRate"] <= 1.0 for day in days)
        spans = [(at(day["interval"]["startTime"]), at(day["interval"]["endTime"])) for day in days]
        assert all(end - start == 86400.0 for start, end in spans)
        assert all(one[1] == two[0] for one, two in pairwise(spans))
        assert all(end <= cloud.clock.now() for _, end in spans)


def test_what_google_has_no_history_of_is_refused_and_never_zero(api: Api) -> None:
    for machine in ("n1-standard-8", "n2-custom-4-8192"):
        with refused(400, "badRequest"):
            api.post(PATH, question(machine))
    with refused(404, "notFound"):
        api.post(PATH, question("z9-mega-1"))
    with refused(404, "notFound"):
        api.post("regions/mars-1/advice/capacityHistory", question())


def test_a_question_without_sense_is_a_400(api: Api) -> None:
    with refused(400, "required"):
        api.post(PATH, {"instanceProperties": {"machineType": "g2-standard-4"}, "types": ["PRICE"]})
    with refused(400, "invalid"):
        api.post(PATH, question(scheduling={"provisioningModel": "STANDARD"}))
    with refused(400, "required"):
        api.post(PATH, question() | {"types": []})
    with refused(400, "invalid"):  # prices are a region's
        api.post(PATH, question("g2-standard-4", "PRICE", location="zones/us-central1-a"))
    with refused(400, "invalid"):
        api.post(PATH, question("g2-standard-4", "PREEMPTION", location="zones/us-east1-b"))


def test_what_is_not_built_says_so(api: Api) -> None:
    with refused(501, "notImplemented"):
        api.post(PATH, question(guestAccelerators=[{"acceleratorType": "nvidia-l4", "acceleratorCount": 1}]))
    with refused(501, "notImplemented"):
        api.post("regions/us-central1/advice/capacity", {})
