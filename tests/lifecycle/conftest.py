"""One stage for all modules of a process: a cloud with the stack; after each module it must be empty."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lifecycle.stage import Stage


class Shared:
    """The stage of this process; None before the first module, and after one that left something behind."""

    stage: Stage | None = None

    def tear_down(self) -> None:
        if self.stage is not None:
            stage, self.stage = self.stage, None
            stage.tear_down()


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all processes of this session."""
    own = tmp_path_factory.getbasetemp()
    return (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "alone"


@pytest.fixture(scope="session")
def shared() -> Iterator[Shared]:
    made = Shared()
    yield made
    made.tear_down()


@pytest.fixture(scope="module")
def stage(shared: Shared, tmp_path_factory: pytest.TempPathFactory, alone: Path) -> Iterator[Stage]:
    """The cloud with all its capacity. A module that leaves something ends it, and the next one gets another."""
    if shared.stage is None:
        shared.stage = Stage.set_up(tmp_path_factory.mktemp("stage"), alone)
    else:
        shared.stage.fill()
    yield shared.stage
    try:
        shared.stage.until(f"the cloud to be as before: {shared.stage.quiet}", shared.stage.is_quiet)
    except AssertionError:
        shared.tear_down()
        raise
