"""Fixtures of the agent's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.vm.fakes import Fake, Machine, fake_cloud


@pytest.fixture
def fake() -> Iterator[Fake]:
    with fake_cloud() as cloud:
        yield cloud


@pytest.fixture
def machine(fake: Fake, tmp_path: Path) -> Iterator[Callable[..., Machine]]:
    """Makes machines; all that is left of them goes at the end."""
    made: list[Machine] = []

    def make(**fields: Any) -> Machine:
        number = len(made)
        new = Machine(fake, tmp_path / f"vm{number}", **fields)
        made.append(new)
        return new

    yield make
    for one in made:
        one.end()
        if one.agent is not None:
            print(one.root, one.log())  # pytest shows it where the test failed
