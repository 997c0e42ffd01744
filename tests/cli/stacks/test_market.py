"""``spotkeeper market``: all spot pools or one, as tables and as JSON."""

from __future__ import annotations

import json

import pytest

from spotkeeper.client.errors import Exit
from spotkeeper.contract.ledger import Event
from spotkeeper.contract.market import HOUR_S, Observation, PriceRun, Prices
from spotkeeper.contract.stack import Model
from spotkeeper.reconcile.store.store import Store
from tests.cli.conftest import Cli

A = "us-central1-a"


@pytest.fixture
def seen(store: Store, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("SPOTKEEPER_CLOCK", f"9000000000:{100 * HOUR_S}:1e-9")  # the clock stands still at hour 100
    lost = (
        Observation("j-n0-a1", Event.ADMITTED, 90.0 * HOUR_S, A, Model.SPOT),
        Observation("j-n0-a1", Event.LOSS, 95.0 * HOUR_S, A, Model.SPOT, "loss"),
    )
    for one in lost:
        assert store.add_observations("workers", int(one.at // HOUR_S), (one,))
    assert store.cas_prices(Prices("workers", 99 * HOUR_S, 99 * HOUR_S, (PriceRun(0.0, 0.75, A),)), "")
    return store


def test_the_market_as_tables_and_as_json(cli: Cli, seen: Store) -> None:
    text = cli("market", "--days", "1").out
    assert "workers" in text and "gpus" in text and "$0.75" in text
    found = json.loads(cli("market", "--json").out)
    zone = next(one for one in found["zones"] if one["zone"] == A and one["pool"] == "workers")
    assert (zone["interruptions"], zone["served"], zone["hours"]) == (1, 1, 5.0)
    assert sum(zone["interrupted"]) == 1 and len(zone["prices"]) == len(zone["available"])


def test_one_pool(cli: Cli, seen: Store) -> None:
    found = json.loads(cli("market", "gpus", "--json").out)
    assert {one["pool"] for one in found["zones"]} == {"gpus"}
    done = cli("market", "always")
    assert (done.code, done.out) == (Exit.MISSING, "") and "its spot pools: workers, gpus" in done.err
