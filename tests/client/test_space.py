"""Drawing the values of trials: by seed, independent of other parameters, even; against PyTorch's own Sobol points."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spotkeeper.client.space import BITS, grid, sobol, value_at, values_of
from spotkeeper.contract.sweep import Params
from spotkeeper.contract.sweepfile import Dimension, SweepFile

OF_SGD = Dimension(uniform=(0.0, 1.0), when={"o": "sgd"})
SPACE = {
    "lr": Dimension(loguniform=(1e-5, 1e-1)),
    "o": Dimension(choice=("adam", "sgd")),
    "momentum": OF_SGD,
    "layers": Dimension(integers=(1, 4)),
}


def file(sampler: str = "random", space: dict[str, Dimension] = SPACE) -> SweepFile:
    fields: dict[str, Any] = {"sampler": sampler}
    return SweepFile("s", "", space, "loss", "min", **fields)


@pytest.mark.parametrize("sampler", ["random", "sobol"])
@given(seed=st.integers(0, 2**32 - 1), drawn=st.integers(0, 40), count=st.integers(1, 20))
@settings(max_examples=30, deadline=None)
def test_the_sequence_goes_on_where_it_stopped(sampler: str, seed: int, drawn: int, count: int) -> None:
    whole = values_of(file(sampler), seed, 0, drawn + count)
    assert values_of(file(sampler), seed, drawn, count) == whole[drawn:]
    assert whole != values_of(file(sampler), seed + 1, 0, drawn + count)


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=20, deadline=None)
def test_a_further_parameter_moves_no_other_of_random(seed: int) -> None:
    def less(values: tuple[Params, ...]) -> list[Params]:
        return [{name: value for name, value in one.items() if name != "a"} for one in values]

    more = file(space={"a": Dimension(uniform=(0.0, 1.0)), **SPACE})
    assert less(values_of(more, seed, 0, 8)) == list(values_of(file(), seed, 0, 8))


@pytest.mark.parametrize("sampler", ["random", "sobol"])
def test_values_are_in_range_and_conditions_hold(sampler: str) -> None:
    found = values_of(file(sampler), 3, 0, 200)
    for values in found:
        assert 1e-5 <= float(values["lr"]) <= 1e-1 and values["layers"] in (1, 2, 3, 4)
        assert ("momentum" in values) == (values["o"] == "sgd")
        assert list(values) == [name for name in SPACE if name in values]
    assert {values["layers"] for values in found} == {1, 2, 3, 4}
    assert {values["o"] for values in found} == {"adam", "sgd"}
    below = sum(float(values["lr"]) < 1e-3 for values in found)
    assert 80 <= below <= 120, "half of the logarithms"


def test_a_parameter_that_goes_takes_others_with_it() -> None:
    space = {
        "c": Dimension(choice=(1,), when={"b": 1}),
        "b": Dimension(choice=(1,), when={"a": True}),
        "a": Dimension(choice=(True, 1)),
    }
    assert grid(space) == ({"c": 1, "b": 1, "a": True}, {"a": 1}), "true is not 1"


def test_a_grid_has_every_combination_once() -> None:
    found = grid(
        {
            "o": Dimension(choice=("adam", "sgd")),
            "momentum": Dimension(uniform=(0.0, 1.0), points=3, when={"o": "sgd"}),
            "layers": Dimension(integers=(1, 9), points=3),
            "lr": Dimension(loguniform=(1e-4, 1e-2), points=3),
        }
    )
    pairs = {(one["o"], one.get("momentum"), one["layers"], one["lr"]) for one in found}
    optimizers = [("adam", None), ("sgd", 0.0), ("sgd", 0.5), ("sgd", 1.0)]
    assert pairs == {(*one, layers, lr) for one in optimizers for layers in (1, 5, 9) for lr in (1e-4, 1e-3, 1e-2)}
    assert len(found) == len(pairs) == 36


@pytest.mark.parametrize(
    ("dimension", "low", "high"),
    [
        (Dimension(integers=(-2, 2)), -2, 2),
        (Dimension(uniform=(0.1, 0.3)), 0.1, 0.3),
        (Dimension(loguniform=(1e-7, 3e-3)), 1e-7, 3e-3),
        (Dimension(choice=("a", "b", "c")), "a", "c"),
    ],
)
def test_the_ends_of_a_range(dimension: Dimension, low: object, high: object) -> None:
    last = math.nextafter(1.0, 0.0)
    assert value_at(dimension, 0.0) == low and value_at(dimension, last) == high


# -- Sobol


def test_without_a_scramble_the_points_are_pytorchs() -> None:
    theirs = torch.quasirandom.SobolEngine(21, scramble=False).draw(1024, dtype=torch.float64).tolist()
    assert [[sobol(index, at) for at in range(21)] for index in range(1024)] == theirs


@pytest.mark.parametrize("seed", ["0/lr", "1/lr", "7/momentum"])
@pytest.mark.parametrize("dimension", [0, 1, 5, 20])
def test_each_coordinate_falls_once_into_each_of_2_to_the_m_parts(seed: str, dimension: int) -> None:
    for parts in (2, 16, 256):
        for begin in (0, parts, 3 * parts):
            found = [sobol(index, dimension, seed) for index in range(begin, begin + parts)]
            assert sorted(int(value * parts) for value in found) == list(range(parts))


def test_scrambled_points_are_even_in_two_dimensions() -> None:
    """Of 256 points one is in each of 16 x 16 squares; random points leave about 94 of them empty."""
    found = {(int(16 * sobol(at, 0, "0/a")), int(16 * sobol(at, 1, "0/b"))) for at in range(256)}
    assert len(found) == 256


def test_scrambles_differ_by_seed_and_fill_every_bit() -> None:
    first = [[int(sobol(at, 3, f"{seed}/x") * 2**BITS) for at in range(64)] for seed in range(3)]
    assert first[0] != first[1] != first[2]
    assert all(any(value >> bit & 1 for value in first[0]) for bit in range(BITS))
