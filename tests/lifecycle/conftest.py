"""One stage per test module: a cloud with the stack in it, destroyed at the end and then checked to be empty."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.lifecycle.stage import Stage


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    made = Stage.set_up(tmp_path_factory.mktemp("stage"))
    left = None
    try:
        yield made
    finally:
        left = made.tear_down()
    assert not left, f"left over after destroy: {left}"
