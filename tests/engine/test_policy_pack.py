"""The policy pack under Pulumi's own engine: it lets the local stack through, and stops one that breaks a rule.

Needs the ``pulumi`` command, and the pack's own environment:
python -m venv infra/policy/venv && infra/policy/venv/bin/pip install -r infra/policy/requirements.txt
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from spotkeeper.local.deploy.engine import Engine

from tests.infra.cloud import Cloud, serve
from tests.infra.conftest import ROOT, STACKS

PACK = ROOT / "infra/policy"
pytestmark = [
    pytest.mark.skipif(
        not (shutil.which("pulumi") and shutil.which("pulumi-language-python")),
        reason="the pulumi command (with its Python host) is not on PATH",
    ),
    pytest.mark.skipif(
        not (PACK / "venv").exists(),
        reason="the pack has no environment: python -m venv infra/policy/venv, and pip install -r its requirements.txt",
    ),
]
LOCAL = STACKS / "Pulumi.local.yaml"


@pytest.fixture
def cloud() -> Iterator[Cloud]:
    with serve() as cloud:
        yield cloud


def preview(config: Path, cloud: Cloud, folder: Path) -> subprocess.CompletedProcess[str]:
    engine = Engine("local", cloud.endpoint, folder, lambda event: None)
    engine.select(config)
    command = engine._command("preview", "--policy-pack", str(PACK))
    environment = engine._environment()
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)


def test_a_stack_that_breaks_no_rule_is_let_through_and_nothing_is_said_of_what_is_not_known_yet(
    cloud: Cloud, tmp_path: Path
) -> None:
    done = preview(LOCAL, cloud, tmp_path)
    assert done.returncode == 0, done.stdout
    assert "spotkeeper@v" in done.stdout
    assert "[mandatory]" not in done.stdout and "can't run policy" not in done.stdout


def test_a_rule_that_is_broken_stops_it_and_says_where(cloud: Cloud, tmp_path: Path) -> None:
    config = tmp_path / "Pulumi.local.yaml"
    config.write_text(LOCAL.read_text() + "  spotkeeper:network: {public_ip: true}\n")
    done = preview(config, cloud, tmp_path / "run")
    assert done.returncode != 0
    assert "no-public-address  (gcp:compute:RegionInstanceTemplate: local-burst-spot)" in done.stdout
    assert "networkInterfaces[0] has a public address: leave accessConfigs out" in done.stdout
    assert cloud.changing() == []
