"""Whatever people train with: a run that was stopped or killed ends with the bits of one left alone.

``make features`` has all.
"""

from __future__ import annotations

import pytest

from tests.train.features import gangs
from tests.train.features.gangs import Outcome, Told
from tests.train.features.trainings import FEATURES, STEPS

WORLD = 3
SLICE = (
    "ddp, iterable data with a state",
    "fsdp, EMA",
    "ddp, WGAN with its clamp",
    "ddp, SAM through .data",
    "ddp, MoCo's momentum encoder and queue",
)
KILLS = 3  # the last ones of the slice are also killed


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    return gangs.run(WORLD, SLICE, tmp_path_factory.mktemp("features"), SLICE[-KILLS:])[0]


@pytest.mark.parametrize("name", SLICE)
def test_a_stopped_and_a_killed_run_equal_an_undisturbed_one(outcomes: dict[str, Outcome], name: str) -> None:
    assert outcomes[name].fault() == ""


def test_the_quick_slice_is_part_of_the_matrix() -> None:
    assert set(SLICE) < set(FEATURES)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"resumed": [Told(4, STEPS, "b")]}, "ranks [0] end with other bits after they were stopped"),
        ({"restored": [Told(6, STEPS, "b", source="memory")]}, "ranks [0] end with other bits after they were killed"),
        ({"restored": [Told(5, STEPS, "a", source="memory")]}, "restored from memory at [5]"),
        ({"restored": [Told(6, STEPS, "a", source="disk")]}, "restored from disk at [6]"),
        ({"killed": [Told(0, 7, source="saves")], "restored": [Told(0, STEPS, "a")]}, "restored from  at [0]"),
        ({"resumed": [Told(0, STEPS, "a")]}, "resumed at [0]"),
        ({"stopped": [Told(0, STEPS, "a")]}, "was not stopped"),
        ({"alone": [Told(error="ValueError: no")]}, "ValueError: no"),
    ],
)
def test_the_matrix_finds_faults(change: dict[str, list[Told]], fault: str) -> None:
    good = {
        "alone": [Told(0, STEPS, "a")],
        "stopped": [Told(0, 4)],
        "resumed": [Told(4, STEPS, "a", source="disk")],
        "killed": [Told(0, 7, source="images")],
        "restored": [Told(6, STEPS, "a", source="memory")],
    }
    assert Outcome(**good).fault() == ""
    assert fault in Outcome(**(good | change)).fault()
