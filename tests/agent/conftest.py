"""Fixtures of the agent's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.agent.fakes import Fake, Machine, fake_cloud

if TYPE_CHECKING:
    from tests.agent.systemd.stage import Stage


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    from tests.agent.systemd.stage import staged  # it renders what Pulumi deploys: few of these tests need that

    with staged(tmp_path_factory.mktemp("systemd")) as one:
        yield one


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
