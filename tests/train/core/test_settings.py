"""What the library reads from the environment."""

from __future__ import annotations

import pytest

from spotkeeper.train.core.settings import RunSettings

SHARE = "SPOTKEEPER_OVERHEAD_PERCENT"


@pytest.mark.parametrize(("text", "share"), [("", 0.01), ("0.01", 0.0001), ("2.5", 0.025), ("100", 1.0)])
def test_the_share_that_images_may_cost_is_read_in_percent(text: str, share: float) -> None:
    assert RunSettings.from_env({SHARE: text}).overhead == pytest.approx(share)


@pytest.mark.parametrize("text", ["inf", "nan", "1e-300", "0.009", "100.1", "0", "-1", "one"])
def test_a_share_that_the_job_file_refuses_is_refused_here_too(text: str) -> None:
    """With a share of 1e-320 the interval between images would be a division by zero, with inf none at all."""
    with pytest.raises(ValueError, match=rf"{SHARE}='{text}': want a"):
        RunSettings.from_env({SHARE: text})


@pytest.mark.parametrize("name", ["SPOTKEEPER_KEEP", "SPOTKEEPER_INTERVAL_S", "SPOTKEEPER_PEERS_MB_S"])
def test_numbers_are_finite(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}='inf': want a finite number"):
        RunSettings.from_env({name: "inf", "SPOTKEEPER_SNAPSHOTS": "1"})


def test_without_snapshots_no_neighbour_keeps_a_copy() -> None:
    """Its copy is one of a snapshot."""
    peers = {"SPOTKEEPER_PEERS_MB_S": "80"}
    assert RunSettings.from_env(peers).peers_mb_s is None
    assert RunSettings.from_env(peers | {"SPOTKEEPER_SNAPSHOTS": "1"}).peers_mb_s == 80.0
