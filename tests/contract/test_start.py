"""What a start is taken for, and what takes its place."""

from __future__ import annotations

import pytest

from spotkeeper.contract.job import START_S, start_s


@pytest.mark.parametrize(
    ("boot_s", "begin_s", "save_s", "seconds"),
    [
        (None, None, 20.0, START_S),
        (60.0, None, 20.0, START_S),  # other jobs' machines: what this one does after its boot nobody knows
        (None, 30.0, 20.0, START_S),
        (60.0, 30.0, 20.0, 110.0),
        (900.0, None, 20.0, 920.0),  # it cannot be less than what is known of it
        (60.0, 1800.0, 20.0, 1880.0),
    ],
)
def test_the_duration_of_a_start(boot_s: float | None, begin_s: float | None, save_s: float, seconds: float) -> None:
    assert start_s(boot_s, begin_s, save_s) == seconds
