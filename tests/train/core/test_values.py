"""Generators, dicts, lists and dataclasses as parts: a run that is stopped draws and counts as one left alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import spotkeeper
from spotkeeper.train.agent_link.control import AgentRequest
from spotkeeper.train.core.errors import PartError
from spotkeeper.train.core.parts import Attached


@dataclass
class Best:
    loss: float = 9.0
    at: int = 0
    last: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Frozen:
    at: int = 0


def _bits(kind: Any) -> Callable[[], Any]:
    return lambda: numpy.random.Generator(kind(5))


def _count(part: dict[str, Any]) -> Any:
    part["seen"] += 1
    part["by"][part["seen"]] = numpy.float64(part["seen"] / 3)
    part["sum"] += 1.5
    return part["seen"], dict(part["by"]), part["sum"].item()


def _better(part: Best) -> Any:
    part.loss, part.at = part.loss * 0.9, part.at + 1
    part.last = [*part.last[-2:], part.loss]
    return part.loss, part.at, part.last


MAKE: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "torch": (lambda: torch.Generator().manual_seed(5), lambda part: torch.rand(2, generator=part).tolist()),
    "python": (lambda: random.Random(5), lambda part: (part.random(), part.gauss(0, 1))),  # noqa: S311
    "PCG64": (_bits(numpy.random.PCG64), lambda part: part.normal()),
    "Philox": (_bits(numpy.random.Philox), lambda part: part.normal()),
    "MT19937": (_bits(numpy.random.MT19937), lambda part: part.normal()),
    "SFC64": (_bits(numpy.random.SFC64), lambda part: part.normal()),
    "RandomState": (lambda: numpy.random.RandomState(5), lambda part: part.normal()),
    "dict": (lambda: {"seen": 0, "by": {}, "sum": torch.zeros(1)}, _count),
    "list": (lambda: [], lambda part: (part.append(len(part)), list(part))[1]),
    "dataclass": (Best, _better),
}


def _life(folder: Path, kind: str, stop: int) -> list[Any]:
    make, use = MAKE[kind]
    model, part, seen = nn.Linear(2, 1), make(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = spotkeeper.attach(model, optimizer, part=part, checkpoint_dir=folder)
    for _ in run.steps(range(10)):
        seen.append(use(part))
        optimizer.step()
        if run.steps_done == stop:
            run._control.request(AgentRequest.SAVE_STOP)
    return seen


@pytest.mark.parametrize("kind", MAKE)
def test_attached_values_continue(tmp_path: Path, kind: str) -> None:
    whole = _life(tmp_path / "whole", kind, stop=0)
    for stop in (3, 7):
        with pytest.raises(SystemExit):
            _life(tmp_path / "stopped", kind, stop)
    rest = _life(tmp_path / "stopped", kind, stop=0)
    assert rest == whole[7:]
    assert whole[0] != whole[1]


@pytest.mark.parametrize("kind", ["torch", "python", "PCG64", "MT19937", "RandomState"])
def test_another_number_of_ranks_reseeds_generators(kind: str) -> None:
    make, use = MAKE[kind]
    streams = []
    for where in ((1, 0), (1, 1), (1, 1)):
        parts = Attached.of(None, None, None, {"first": make(), "second": make()})
        parts.reseed(*where)
        streams.append(
            [use(each._generator if hasattr(each, "_generator") else _owner(each)) for each in parts.own.values()]
        )
    assert streams[0] != streams[1] == streams[2]
    assert streams[0][0] != streams[0][1]


def _owner(own: Any) -> Any:
    return numpy.random.Generator(own._bits) if hasattr(own, "_bits") else own._state


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"best": object()}, r"attach\(part=\): part\['best'\] is a object, but only numbers, strings,"),
        ([1, {2}], r"attach\(part=\): part\[1\] is a set"),
        ({(1, 2): 3}, r"attach\(part=\): part is a dict"),
        (Best(last=[SimpleNamespace()]), r"attach\(part=\): part.last\[0\] is a SimpleNamespace"),  # type: ignore[list-item]
        (Frozen(), r"attach\(part=\): the dataclass Frozen is frozen"),
        (
            Best,
            r"attach\(part=\): type has no state_dict\(\) and load_state_dict\(\), and is neither a random generator",
        ),
        (7, r"attach\(part=\): int has no state_dict\(\)"),
    ],
)
def test_unsaveable_values_are_named(part: Any, message: str) -> None:
    with pytest.raises(PartError, match=message):
        Attached.of(None, None, None, {"part": part})
