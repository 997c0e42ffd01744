"""What Compute Engine says of its spot machines: questions as Google documents them, and no word is unknown."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from spotkeeper.clock import Clock
from spotkeeper.contract.cloud import Listing
from spotkeeper.contract.market import HOUR_S, Chances, Guess, PriceRun
from spotkeeper.reconcile.clouds.gce.advice import capacity_question, kept, obtainable, preemptions_question, price_runs
from spotkeeper.reconcile.clouds.gce.cloud import open_gce
from spotkeeper.reconcile.select import market
from tests import discovery
from tests.module_time import replace_time
from tests.reconcile.clouds.gce.compute import STACK, A, Asked, B, Google, Raw, refusal, serve
from tests.reconcile.clouds.gce.test_gce import silent_server
from tests.reconcile.memory import MemoryStore

CAPACITY, HISTORY = "advice.capacity", "advice.capacityHistory"
POOL = STACK.pools[0]


def advised(zone: str, obtainability: float | None = None, uptime: str | None = None) -> dict[str, object]:
    scores = {"obtainability": obtainability, "estimatedUptime": uptime}
    shard = {"zone": zone, "machineType": POOL.machine_type, "instanceCount": 8, "provisioningModel": "SPOT"}
    told = {word: value for word, value in scores.items() if value is not None}
    return {"recommendations": [{"scores": told, "shards": [shard]}]}


def days(*rates: float) -> dict[str, object]:
    spans = [
        {"startTime": f"2026-11-{at:02}T08:00:00Z", "endTime": f"2026-11-{at + 1:02}T08:00:00Z"} for at in range(1, 20)
    ]
    return {
        "preemptionHistory": [{"interval": at, "preemptionRate": rate} for at, rate in zip(spans, rates, strict=False)]
    }


def of_zone(answers: dict[str, object]) -> Callable[[Asked], object]:
    """By the one zone that a question is about."""

    def answer(asked: Asked) -> object:
        named = asked.body.get("locationPolicy", {}).get("location")
        named = named or asked.body["distributionPolicy"]["zones"][0]["zone"]
        return answers.get(named.removeprefix("zones/"), {})

    return answer


def guesses(capacity: object, history: object, machine: str = POOL.machine_type) -> tuple[Chances | None, Google]:
    stack = replace(STACK, pools=(replace(POOL, machine_type=machine),))
    with serve() as google:
        google.script |= {CAPACITY: capacity, HISTORY: history}
        return open_gce(stack, Clock(), google.endpoint).chances("gpu", 60.0), google


def test_each_zone_has_its_own_valid_advice_request() -> None:
    discovery.validate_request(f"compute.{CAPACITY}", capacity_question(POOL, A))
    discovery.validate_request(f"compute.{HISTORY}", preemptions_question(POOL.machine_type, A))
    capacity = of_zone({A: advised(A, 0.8, "3600s"), B: advised(B, 0.3, "600s")})
    told, google = guesses(capacity, of_zone({B: days(0.5, 0.25)}))
    assert told is not None and told.at > 0
    assert told.by_zone == {A: Guess(0.8, 1.0), B: Guess(0.3, pytest.approx(1 / 6), 0.625)}
    asked = google.of(CAPACITY)
    assert {one.body["distributionPolicy"]["zones"][0]["zone"] for one in asked} == {f"zones/{A}", f"zones/{B}"}
    assert {one.body["size"] for one in asked} == {POOL.max_machines}
    assert all(one.body["instanceProperties"]["scheduling"] == {"provisioningModel": "SPOT"} for one in asked)
    assert (len(google.of(CAPACITY)), len(google.of(HISTORY))) == (2, 2)


def only_in(beta: bool, answer: object) -> Callable[[Asked], object]:
    """Answers one version; the other one does not know the provisioning model."""
    return lambda asked: answer if asked.beta is beta else refusal(400, "badRequest", "SPOT is not supported")


@pytest.mark.parametrize("beta", [True, False])
def test_advice_is_requested_from_the_version_that_answers(beta: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    stack = replace(STACK, pools=(replace(POOL, zones=(A,)),))
    with serve() as google:
        google.script |= {CAPACITY: only_in(beta, advised(A, 0.8, "3600s")), HISTORY: only_in(beta, days(0.5))}
        cloud = open_gce(stack, Clock(), google.endpoint)
        for _ in range(2):
            told = cloud.chances("gpu", 5.0)
            assert told is not None and told.by_zone == {A: Guess(0.8, 1.0, 0.5)}
            said = [record.getMessage() for record in caplog.records if "answers" in record.getMessage()]
            version = "beta" if beta else "v1"
            assert sorted(said) == [f"advice.{method}: {version} answers" for method in ("capacity", "capacityHistory")]
    versions = [asked.beta for asked in google.of(CAPACITY)]
    assert versions == ([True, True] if beta else [True, False, False]), "the other one is asked once"


@pytest.mark.parametrize(("nanos", "usd"), [("478720000", 2.47872), (478720000, 2.47872), ("a lot", None), (-1, None)])
def test_nanos_may_be_a_number_or_a_text(nanos: object, usd: float | None) -> None:
    price = {"currencyCode": "USD", "units": "2", "nanos": nanos}
    body = {"priceHistory": [{"interval": {"startTime": "2026-11-01T00:00:00Z"}, "listPrice": price}]}
    runs = price_runs(json.dumps(body).encode())
    assert [run.usd for run in runs or ()] == ([pytest.approx(usd)] if usd else [])


def test_a_permission_error_is_not_retried_in_another_version() -> None:
    told, google = guesses(refusal(403, "forbidden"), refusal(403, "forbidden"))
    assert told is None and all(asked.beta for asked in google.asked)


def test_advice_is_requested_for_at_most_a_thousand_machines() -> None:
    assert capacity_question(replace(POOL, max_machines=9000), A)["size"] == 1000
    assert capacity_question(replace(POOL, max_machines=0), A)["size"] == 1


@pytest.mark.parametrize(
    "script",
    [
        *(refusal(status, reason) for status, reason in ((400, "badRequest"), (403, "forbidden"), (404, "notFound"))),
        *(Raw(status, b"<html>") for status in (404, 429, 500, 501, 503)),
        *(Raw(200, body) for body in (b"", b"[]", b'{"recommendations": 3}', b'{"preemptionHistory": {}}', b"\xff")),
        {},
    ],
    ids=repr,
)
def test_invalid_estimates_are_unknown(script: object) -> None:
    assert guesses(script, script)[0] is None


@pytest.mark.parametrize(
    "body",
    [
        b'{"recommendations": [{}]}',
        b'{"recommendations": [{"scores": {}}]}',
        b'{"recommendations": [{"scores": {"obtainability": 1.5}}]}',
        b'{"recommendations": [{"scores": {"obtainability": -0.1, "estimatedUptime": "0s"}}]}',
        b'{"recommendations": [{"scores": {"estimatedUptime": "an hour"}}]}',
        b'{"recommendations": [{"scores": {"obtainability": 0.9}, "shards": [{"zone": "us-x1-b"}]}]}',
        b'{"recommendations": [{"scores": {"obtainability": "0.9"}}]}',
    ],
)
def test_invalid_scores_and_those_of_other_zones_are_unknown(body: bytes) -> None:
    assert obtainable(body, A) is None


def test_scores_are_shares_and_zones_may_be_urls() -> None:
    scores = b'{"obtainability": 0, "estimatedUptime": "7200s"}'
    said = b'{"recommendations": [{"scores": ' + scores + b', "shards": [{"zone": "%s"}]}]}'
    for zone in (
        "us-x1-a",
        "projects/p/zones/us-x1-a",
        "https://www.googleapis.com/compute/v1/projects/p/zones/us-x1-a",
    ):
        assert obtainable(said % zone.encode(), A) == Guess(0.0, 1.0), "a zero that is said is one"


def test_the_newest_week_counts_without_invalid_days() -> None:
    import msgspec

    old_and_new = msgspec.json.encode(days(1.0, 1.0, 1.0, *[0.2] * 7))
    assert kept(old_and_new) == Guess(kept=pytest.approx(0.8))
    day = b'{"interval": {"startTime": "2026-11-01T08:00:00Z"}, "preemptionRate": 7}'
    odd = b'{"preemptionHistory": [{"preemptionRate": 0.5}, ' + day + b"]}"
    assert kept(odd) is None


@pytest.mark.parametrize("machine", ["n1-standard-8", "n2-custom-4-8192"])
def test_types_without_history_are_not_requested(machine: str) -> None:
    told, google = guesses({}, {}, machine)
    assert told is None and google.asked == []


@pytest.mark.parametrize("drip", [True, False])
def test_a_silent_cloud_is_abandoned_at_the_deadline(drip: bool) -> None:
    with silent_server(drip) as endpoint:
        assert open_gce(STACK, Clock(), endpoint).chances("gpu", 0.2) is None


def test_without_time_nothing_is_requested() -> None:
    with serve() as google:
        assert open_gce(STACK, Clock(), google.endpoint).chances("gpu", 0.0) is None
        assert google.asked == []


@pytest.mark.parametrize(
    "script", [refusal(403, "forbidden"), refusal(404, "notFound"), refusal(429, "rateLimitExceeded"), {}]
)
def test_advice_is_requested_hourly_even_after_failures(script: object) -> None:
    store = MemoryStore()
    with serve() as google:
        google.script |= {CAPACITY: script, HISTORY: script}
        cloud = open_gce(STACK, Clock(), google.endpoint)
        for minute in range(59):
            assert market.read(store, cloud, STACK, 1e6 + 60.0 * minute) == ()
        versions = 2 if isinstance(script, dict) and script.get("_status") == 404 else 1
        assert len(google.asked) == versions * (1 + 2 * len(POOL.zones))
        market.read(store, cloud, STACK, 1e6 + HOUR_S)
        assert len(google.asked) == 2 * versions * (1 + 2 * len(POOL.zones))


class Slow:
    """A cloud whose answers take their time, of a clock that only it moves."""

    def __init__(self, takes_s: float) -> None:
        self.now, self.takes_s = 0.0, takes_s
        self.asked: list[tuple[str, str, float]] = []

    def monotonic(self) -> float:
        return self.now

    def list(self, stack: str) -> Listing:
        return Listing((), ())

    def perform(self, action: object, deadline_s: float) -> object:
        raise AssertionError

    def price_history(self, pool: str, deadline_s: float) -> tuple[PriceRun, ...] | None:
        self._answer("prices", pool, deadline_s)
        return None

    def chances(self, pool: str, deadline_s: float) -> Chances | None:
        self._answer("chances", pool, deadline_s)
        return None

    def _answer(self, what: str, pool: str, deadline_s: float) -> None:
        self.asked.append((what, pool, deadline_s))
        self.now += min(self.takes_s, deadline_s)


def test_all_advice_requests_share_one_deadline_and_take_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, cloud = MemoryStore(), Slow(1.5)
    pools = tuple(replace(POOL, name=name) for name in ("one", "two"))
    monkeypatch.setattr(market, "ASKERS", 1)
    replace_time(monkeypatch, market, monotonic=cloud.monotonic)
    market._prices(store, cloud, pools, 1e6)  # type: ignore[arg-type]
    assert cloud.asked == [("prices", "one", 2.0), ("chances", "one", 0.5)]
    assert cloud.now <= market.ASK_S
    market._prices(store, cloud, pools, 1e6 + 60.0)  # type: ignore[arg-type]
    assert [pool for _, pool, _ in cloud.asked[2:]] == ["two", "two"]
