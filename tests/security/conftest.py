"""One site for all cases."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.security.site import Site


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    made = Site()
    yield made
    made.close()
