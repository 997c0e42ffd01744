"""One site for all cases, and the count that closes the run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.security.site import Site


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    made = Site()
    yield made
    made.close()
