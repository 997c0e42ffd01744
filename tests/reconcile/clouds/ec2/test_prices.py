"""EC2's prices are a zone's; Compute Engine's are the region's. Both are kept and read by the same code."""

from __future__ import annotations

import time
from typing import Any

import pytest

from spotkeeper.contract.market import HOUR_S, Chances, Guess, PriceRun, Prices
from spotkeeper.reconcile.clouds.ec2 import api, cloud
from spotkeeper.reconcile.clouds.ec2.api import Api
from spotkeeper.reconcile.clouds.ec2.cloud import open_ec2
from spotkeeper.reconcile.clouds.rate_limit import Paced, TokenBucket
from spotkeeper.reconcile.select import market
from spotkeeper.reconcile.select.market import ASK_S, _merged, offers_seen, read
from tests.module_time import replace_time
from tests.reconcile.clouds.ec2.region import POOL, STACK, A, B, region
from tests.reconcile.clouds.ec2.standin.server import session
from tests.reconcile.world import World

NOW = 1_000_000.0


def test_prices_are_by_zone_and_missing_ones_unknown() -> None:
    prices = Prices(
        "gpu", NOW, NOW, (PriceRun(NOW - 60, 0.2, A), PriceRun(NOW - 50, 0.4, B), PriceRun(NOW - 40, 0.25, A))
    )
    assert {seen.zone: seen.price for seen in offers_seen((POOL,), {"gpu": prices}, {}, NOW)} == {A: 0.25, B: 0.4}
    one = Prices("gpu", NOW, NOW, (PriceRun(NOW - 60, 0.2, A),))
    assert {seen.zone: seen.price for seen in offers_seen((POOL,), {"gpu": one}, {}, NOW)} == {A: 0.2}
    everywhere = Prices("gpu", NOW, NOW, (PriceRun(NOW - 60, 0.3),))
    assert {seen.price for seen in offers_seen((POOL,), {"gpu": everywhere}, {}, NOW)} == {0.3}


def test_a_machine_costs_its_zones_price() -> None:
    prices = Prices("gpu", NOW, NOW, (PriceRun(0.0, 0.2, A), PriceRun(0.0, 0.4, B), PriceRun(HOUR_S, 0.6, A)))
    assert prices.mean(0.0, 2 * HOUR_S, 9.0, A) == 0.4
    assert prices.mean(0.0, 2 * HOUR_S, 9.0, B) == 0.4
    assert prices.mean(0.0, 2 * HOUR_S, 9.0, "elsewhere") == 9.0


def test_a_zones_new_price_keeps_the_other_zones() -> None:
    old = (PriceRun(100.0, 0.2, A), PriceRun(200.0, 0.4, B), PriceRun(900.0, 0.3, A))
    told = (PriceRun(150.0, 0.25, A), PriceRun(800.0, 0.5, B))
    assert _merged(old, told) == (PriceRun(100.0, 0.2, A), PriceRun(150.0, 0.25, A), PriceRun(200.0, 0.4, B), told[1])


class Guessing(World):
    """A cloud that tells no prices, and guesses."""

    answers: Chances | None = None

    def chances(self, pool: str, deadline_s: float) -> Chances | None:
        assert deadline_s <= ASK_S
        return self.answers


def test_estimates_are_kept_a_day_and_requested_hourly() -> None:
    world = Guessing()
    pool = world.stack.pools[0]
    zone = pool.zones[0]

    def seen(now: float) -> dict[str, Guess]:
        offers = read(world.store, Paced(world, TokenBucket()), world.stack, now)
        return {offer.zone: offer.guess for offer in offers if offer.guess is not None}

    world.answers = Chances(world.t, {zone: Guess(0.7)})
    assert seen(world.t) == {zone: Guess(0.7)}, "the other zones are unknown"
    world.answers = None
    assert seen(world.t + 2 * HOUR_S) == {zone: Guess(0.7)}, "no answer takes nothing back"
    assert seen(world.t + 30 * HOUR_S) == {}, "until it is too old"
    world.answers = Chances(world.t + 31 * HOUR_S, {zone: Guess(0.1)})
    assert seen(world.t + 31.5 * HOUR_S) == {zone: Guess(0.1)}
    assert world.store.read_prices((pool.name,))[pool.name].value.told == 0.0, "prices are as unknown as before"


def test_a_cold_function_gets_prices_with_its_first_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """To import botocore takes a cold function longer than all questions may; the next are asked an hour later."""
    late, real = [0.0], time.monotonic
    replace_time(monkeypatch, market, api, cloud, monotonic=lambda: real() + late[0])

    def slow(_: Api) -> Any:
        late[0] += 2 * ASK_S
        return session()

    with region(monkeypatch) as here:
        here.site.market.prices = [(A, here.engine.t - 60, "0.25")]
        monkeypatch.setattr(Api, "_session", slow)
        cold = open_ec2(STACK, here.engine, here.endpoint)  # type: ignore[arg-type]
        offers = read(World().store, cold, STACK, here.engine.t)
    assert {offer.zone: offer.price for offer in offers} == {A: 0.25}
