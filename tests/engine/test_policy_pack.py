"""The policy pack under Pulumi's own engine: it lets the local stack through, and stops one that breaks a rule.

Needs the ``pulumi`` command, and the pack's own environment:
python -m venv infra/policy/venv && infra/policy/venv/bin/pip install -r infra/policy/requirements.txt
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pulumi.automation import CommandError
from pulumi.automation.events import PolicyEvent

from spotkeeper.local.deploy.config import ENDPOINT, addresses, stack_config
from tests.engine.conftest import needs_pulumi
from tests.engine.standin.engine import Told
from tests.engine.standin.project import Project
from tests.infra.cloud import Cloud, serve
from tests.infra.conftest import ROOT, STACKS

PACK = ROOT / "infra/policy"
pytestmark = [
    needs_pulumi,
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


def project(config: Path, cloud: Cloud, folder: Path) -> Project:
    environment = {ENDPOINT: cloud.endpoint, "SPOTKEEPER_COMPUTE_ENDPOINT": addresses(cloud.endpoint)["compute"]}
    made = Project(
        folder, "gcp", stack_config(config, cloud.endpoint), environment,
        name="local", plugin="spotkeeper.local.deploy.provider",
    )  # fmt: skip
    return made.write()


def broken(told: Told) -> list[PolicyEvent]:
    return [each.policy_event for each in told.events if each.policy_event]


def test_a_valid_stack_passes_the_policy_pack(cloud: Cloud, tmp_path: Path) -> None:
    told = project(LOCAL, cloud, tmp_path).preview(policy_packs=[str(PACK)])
    asked = [pack for each in told.events if each.summary_event for pack in each.summary_event.policy_packs]
    assert [pack.partition("|")[0] for pack in asked] == ["spotkeeper"]
    assert broken(told) == []
    assert "can't run policy" not in told.said


def test_a_broken_rule_stops_up_and_names_the_resource(cloud: Cloud, tmp_path: Path) -> None:
    config = tmp_path / "Pulumi.local.yaml"
    config.write_text(LOCAL.read_text() + "  spotkeeper:network: {public_ip: true}\n")
    told = Told()
    with pytest.raises(CommandError):
        project(config, cloud, tmp_path / "run").preview(told, policy_packs=[str(PACK)])
    spot = next(each for each in broken(told) if each.resource_urn.endswith("::local-burst-spot"))
    assert (spot.policy_name, spot.enforcement_level) == ("no-public-address", "mandatory")
    assert "networkInterfaces[0] has a public address: leave accessConfigs out" in spot.message
    assert cloud.changing() == []
