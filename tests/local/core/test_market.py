"""The replayed market is deterministic and equals the recording."""

from __future__ import annotations

import json

import pytest

from spotkeeper.local.core.market import FOLDER, Market, Series

ZONES = ("us-central1-a", "us-central1-b", "us-central1-c")
NAME = "gcp-2025-10-h100"


def market(seed: int = 0, per_zone: int = 4, zones: tuple[str, ...] = ZONES) -> Market:
    return Market.load(NAME, zones, epoch=1000.0, seed=seed, per_zone=per_zone)


def recorded(zone: str) -> list[int]:
    data = json.loads((FOLDER / f"{NAME}.json").read_text())
    runs = next(item["capacity"] for item in data["zones"] if item["zone"] == zone)
    return [value for value, count in runs for _ in range(count)]


def test_it_replays_the_recording_sample_by_sample_from_where_the_seed_begins() -> None:
    replay = market(per_zone=16)
    series = recorded("us-central1-b")
    shown = [replay.capacity("us-central1-b", 1000.0 + 600.0 * i + 1.0) for i in range(200)]
    assert shown == [series[(replay.offset + i) % len(series)] for i in range(200)]


def test_another_seed_begins_elsewhere_and_the_same_seed_does_not() -> None:
    assert market(7).offset == market(7).offset
    assert len({market(seed).offset for seed in range(5)}) > 1


@pytest.mark.parametrize("seed", range(20))
def test_a_calm_start_is_calm_in_all_zones(seed: int) -> None:
    calm = Market.load(NAME, ZONES, epoch=0.0, seed=seed, per_zone=16, calm_s=3600.0)
    assert all(calm.capacity(zone, float(now)) >= 8 for zone in ZONES for now in range(0, 3601, 60))


def test_an_impossible_calm_is_refused() -> None:
    with pytest.raises(ValueError, match="never all have capacity for half of 16 VMs for 9000000 s"):
        Market.load(NAME, ZONES, epoch=0.0, seed=0, per_zone=16, calm_s=9e6)


def test_a_recorded_capacity_of_16_is_scaled_down() -> None:
    few = market(per_zone=4)
    whole = market(per_zone=16)
    for sample in range(300):
        now = 1000.0 + 600.0 * sample
        assert few.capacity("us-central1-b", now) == whole.capacity("us-central1-b", now) // 4


def test_capacity_is_constant_until_next_change_and_then_some_zone_differs() -> None:
    replay = market(per_zone=16)
    now = 1000.0
    for _ in range(100):
        then = replay.next_change(now)
        assert then > now
        before = [replay.capacity(zone, now) for zone in ZONES]
        assert [replay.capacity(zone, then - 0.001) for zone in ZONES] == before
        assert [replay.capacity(zone, then) for zone in ZONES] != before
        now = then


def test_zones_the_recording_lacks_take_another_zones_series_in_order() -> None:
    replay = market(zones=("us-central1-b", "mars-1-a", "mars-1-b"))
    assert replay.price("mars-1-a", 1000.0) == 0.8471  # asia-south2-b, the first unmatched zone


def test_the_mean_price_weighs_by_time() -> None:
    series = Series.of([(0.2, 2), (0.4, 2)])
    replay = Market({"z": series}, {"z": series}, 600.0, 16, 4, 0.0, 0)
    assert replay.mean_price("z", 0.0, 2400.0) == pytest.approx(0.3)
    assert replay.mean_price("z", 600.0, 1800.0) == pytest.approx(0.3)
    assert replay.mean_price("z", 0.0, 1800.0) == pytest.approx((0.2 * 2 + 0.4) / 3)


def test_an_unknown_recording_is_an_error_that_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match=NAME):
        Market.load("nasdaq", ZONES, epoch=0.0, seed=0, per_zone=4)
