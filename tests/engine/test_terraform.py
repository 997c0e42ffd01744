"""What is declared on AWS, in the words of Terraform's AWS provider, which Pulumi's is made from.

Needs ``terraform``, and the provider ``hashicorp/aws`` in ``TF_PLUGIN_CACHE_DIR`` or ``~/.terraform.d/plugins``:
nothing is fetched, planned or applied, only names are held against the provider's own schema. It has not been run with
a provider yet; a name that it finds wrong may be one for ``RENAMED``.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from spotkeeper.local.deploy.config import read_config
from tests.infra.aws.cloud import AwsCloud
from tests.infra.conftest import STACKS, Declared, run_program

pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated in favor of:DeprecationWarning")
PLAIN = ("ec2",)  # modules whose name is no part of their resources' names
TYPES = {"aws:s3/bucketObjectv2:BucketObjectv2": "aws_s3_object"}
# Inputs that Pulumi calls otherwise than Terraform does.
RENAMED = {
    ("aws_budgets_budget", "cost_filters"): "cost_filter",
    ("aws_cloudwatch_metric_alarm", "name"): "alarm_name",
    ("aws_lambda_function", "name"): "function_name",
    ("aws_lambda_permission", "function"): "function_name",
    ("aws_sns_topic_subscription", "topic"): "topic_arn",
}


def type_of(pulumi: str) -> str:
    _, module, name = pulumi.split(":")
    folder = module.partition("/")[0]
    return TYPES.get(pulumi) or "_".join(["aws", *([] if folder in PLAIN else [folder]), snake(name)])


def snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])([A-Z])", r"_\1", name).lower()


def words(type_: str, key: str) -> set[str]:
    """What an input may be called: a list of blocks is plural in Pulumi, and singular in Terraform."""
    name = RENAMED.get((type_, snake(key)), snake(key))
    return {name, name.removesuffix("s"), re.sub(r"ies\Z", "y", name)}


@pytest.fixture(scope="module")
def declared() -> list[Declared]:
    found = run_program("example-aws", read_config(STACKS / "Pulumi.example-aws.yaml"), AwsCloud())
    return [each for each in found.values() if each.type.startswith("aws:")]


@pytest.fixture(scope="module")
def schema(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    if not shutil.which("terraform"):
        pytest.skip("terraform is not on PATH: https://developer.hashicorp.com/terraform/install")
    plugins = Path(os.environ.get("TF_PLUGIN_CACHE_DIR") or Path.home() / ".terraform.d" / "plugins")
    if not list(plugins.glob("*/hashicorp/aws")):
        pytest.skip(
            f"no provider hashicorp/aws in {plugins}: terraform providers mirror, elsewhere, fills such a folder"
        )
    folder = tmp_path_factory.mktemp("terraform")
    (folder / "main.tf").write_text(
        'terraform {\n  required_providers {\n    aws = { source = "hashicorp/aws" }\n  }\n}\n'
    )
    init = ["terraform", "init", "-input=false", f"-plugin-dir={plugins}"]
    subprocess.run(init, cwd=folder, capture_output=True, timeout=120, check=True)
    told = subprocess.run(
        ["terraform", "providers", "schema", "-json"], cwd=folder, capture_output=True, timeout=300, check=True
    )
    (provider,) = json.loads(told.stdout)["provider_schemas"].values()
    return dict(provider["resource_schemas"])


def test_every_resource_and_input_exists_in_the_provider(declared: list[Declared], schema: dict[str, Any]) -> None:
    wrong = []
    for each in declared:
        type_ = type_of(each.type)
        block = schema.get(type_, {}).get("block")
        if block is None:
            wrong.append(f"{each.key}: no {type_}")
            continue
        known = {*block.get("attributes", {}), *block.get("block_types", {})}
        wrong += [f"{each.key}: no {type_}.{snake(key)}" for key in each.properties if not words(type_, key) & known]
    assert wrong == []


def test_types_are_translated() -> None:
    """Without terraform: what the table of the other test stands on."""
    assert type_of("aws:ec2/launchTemplate:LaunchTemplate") == "aws_launch_template"
    assert type_of("aws:ebs/volume:Volume") == "aws_ebs_volume"
    assert type_of("aws:vpc/securityGroupEgressRule:SecurityGroupEgressRule") == "aws_vpc_security_group_egress_rule"
    assert type_of("aws:s3/bucketObjectv2:BucketObjectv2") == "aws_s3_object"
    assert words("aws_launch_template", "blockDeviceMappings") >= {"block_device_mappings"}
    assert "rule" in words("aws_s3_bucket_lifecycle_configuration", "rules")
