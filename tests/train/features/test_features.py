"""Whatever people train with: a run that was stopped ends with the bits of one left alone (all: ``make features``)."""

from __future__ import annotations

import pytest

from tests.train.features import gangs
from tests.train.features.gangs import Outcome, Told
from tests.train.features.trainings import FEATURES, STEPS

WORLD = 3
SLICE = (
    "ddp, static graph",
    "ddp, several optimizers and schedulers",
    "ddp, fp16 with GradScaler",
    "ddp, iterable data with a state",
    "fsdp, EMA",
)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    return gangs.run(WORLD, SLICE, tmp_path_factory.mktemp("features"))[0]


@pytest.mark.parametrize("name", SLICE)
def test_a_stopped_run_equals_an_undisturbed_one(outcomes: dict[str, Outcome], name: str) -> None:
    assert outcomes[name].fault() == ""


def test_the_quick_slice_is_part_of_the_matrix() -> None:
    assert set(SLICE) < set(FEATURES)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"resumed": [Told(4, STEPS, "b")]}, "ranks [0] end with other bits"),
        ({"resumed": [Told(0, STEPS, "a")]}, "resumed at [0]"),
        ({"stopped": [Told(0, STEPS, "a")]}, "was not stopped"),
        ({"alone": [Told(error="ValueError: no")]}, "ValueError: no"),
    ],
)
def test_the_matrix_finds_faults(change: dict[str, list[Told]], fault: str) -> None:
    good = {
        "alone": [Told(0, STEPS, "a")],
        "stopped": [Told(0, 4)],
        "resumed": [Told(4, STEPS, "a")],
    }
    assert Outcome(**good).fault() == ""
    assert fault in Outcome(**(good | change)).fault()
