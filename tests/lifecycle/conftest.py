"""One stage per test module: a cloud with the stack; after its end it must be empty."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lifecycle.stage import Stage


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all processes of this session."""
    own = tmp_path_factory.getbasetemp()
    return (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "alone"


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory, alone: Path) -> Iterator[Stage]:
    made = Stage.set_up(tmp_path_factory.mktemp("stage"), alone)
    left = None
    try:
        yield made
    finally:
        left = made.tear_down()
    assert not left, f"left over after destroy: {left}"
