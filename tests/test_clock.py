"""The clock, and times as clouds write them."""

from __future__ import annotations

import pytest

from spotkeeper.clock import Clock, from_rfc3339

AT = 1789719720.0


@pytest.mark.parametrize(
    "text",
    [
        "2026-09-18T08:22:00Z",
        "2026-09-18T08:22:00.123456789Z",  # as IAM says it
        "2026-09-18T08:22:00+00:00",
        "2026-09-18T01:22:00.5-07:00",  # as Compute Engine says it
    ],
)
def test_times_of_all_clouds_are_read(text: str) -> None:
    assert from_rfc3339(text) == AT


@pytest.mark.parametrize("text", ["", "soon", "2026-09-18", "2026-09-18T08:22:00", "2026-13-18T08:22:00Z"])
def test_invalid_times_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        from_rfc3339(text)


def test_a_scaled_clock_round_trips_through_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(1000.0, 5000.0, 60.0)
    monkeypatch.setenv("SPOTKEEPER_CLOCK", clock.to_env())
    assert Clock.from_env() == clock
    assert clock.real_s(120.0) == 2.0


@pytest.mark.parametrize("text", ["1:2", "1:2:x", "1:2:0", "1:2:-3"])
def test_an_invalid_clock_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("SPOTKEEPER_CLOCK", text)
    with pytest.raises(ValueError, match="SPOTKEEPER_CLOCK"):
        Clock.from_env()
