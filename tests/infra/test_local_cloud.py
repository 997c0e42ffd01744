"""The program on a real one-machine cloud: machines boot, the function answers, and all of it goes again."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

from spotkeeper.local import deploy
from spotkeeper.local.lifecycle.cloud import LocalCloud
from tests.infra.conftest import STACKS

CONFIG = STACKS / "Pulumi.local.yaml"
WAIT_S = 60.0  # real; a machine boots in a second on an idle computer


@pytest.fixture
def cloud(tmp_path: Path) -> Iterator[LocalCloud]:
    cloud = LocalCloud.up(tmp_path / "cloud", scale=120.0)
    try:
        yield cloud
    finally:
        left = cloud.down(purge=True)
        assert not left, left


def hello(cloud: LocalCloud, node: str) -> bool:
    """Whether the node's agent said hello: its serial output shows that it is idle."""
    return any('"now": "idle"' in log.read_text() for log in (cloud.folder / "serial").glob(f"{node}-*.log"))


def test_a_stack_comes_up_and_is_destroyed_without_remains(cloud: LocalCloud, tmp_path: Path) -> None:
    result = deploy.up("local", CONFIG, cloud, tmp_path / "deploy", engine="in-process")
    url = str(result.outputs["reconcileUrl"])
    deadline = time.monotonic() + WAIT_S
    while not hello(cloud, "sk-local-floor-s0"):
        assert time.monotonic() < deadline, "the static machine's agent did not reach the function"
        time.sleep(0.1)
    assert requests.get(f"{url}/v1/health", timeout=10).json() == {"ok": True}
    assert deploy.up("local", CONFIG, cloud, tmp_path / "deploy", engine="in-process").empty
    deploy.destroy("local", CONFIG, cloud, tmp_path / "deploy", engine="in-process")
    status = cloud.status()
    assert (status.vms, status.disks, status.functions) == ((), (), ())
