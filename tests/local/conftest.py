"""One cloud per test module: fast clock, ample capacity, and a check that it leaves nothing behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from spotkeeper.local.core.catalog import Timing
from spotkeeper.local.lifecycle.cloud import LocalCloud
from tests.local.client import Api

ZONES = ("us-central1-a", "us-central1-b", "us-central1-c")


@pytest.fixture(scope="module")
def cloud(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCloud]:
    folder: Path = tmp_path_factory.mktemp("cloud")
    found = LocalCloud.up(folder, scale=100, timing=Timing(accept_s=5.0))  # 50 ms: two calls fit in before one begins
    for zone in ZONES:
        found.set_capacity(zone, 4)
    yield found
    found.down(purge=True)
    assert found.left_over().processes == 0


@pytest.fixture(scope="module")
def api(cloud: LocalCloud) -> Api:
    return Api.of(cloud)
