"""A third judge: what is declared on AWS, as Terraform's provider of AWS would be asked for it, where it is installed.

It is the provider that Pulumi's is made from, and checks what no schema says: documents that must be JSON, ARNs,
names, arguments that exclude one another. Nothing is fetched: without the command, and the provider in one of the
folders where Terraform looks for copies, nothing is judged.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from tests.infra.conftest import Declared

PLACES = ("~/.terraform.d/plugins", "~/.local/share/terraform/plugins", "/usr/local/share/terraform/plugins",
          "/usr/share/terraform/plugins")  # fmt: skip
PROVIDER = "registry.terraform.io/hashicorp/aws"
# Pulumi's names of types whose name in Terraform does not follow from it.
TYPES = {
    "aws:cloudwatch/eventRule:EventRule": "aws_cloudwatch_event_rule",
    "aws:cloudwatch/eventTarget:EventTarget": "aws_cloudwatch_event_target",
    "aws:cloudwatch/logGroup:LogGroup": "aws_cloudwatch_log_group",
    "aws:cloudwatch/logMetricFilter:LogMetricFilter": "aws_cloudwatch_log_metric_filter",
    "aws:cloudwatch/metricAlarm:MetricAlarm": "aws_cloudwatch_metric_alarm",
    "aws:ebs/volume:Volume": "aws_ebs_volume",
    "aws:s3/bucketObjectv2:BucketObjectv2": "aws_s3_object",
    "aws:vpc/securityGroupEgressRule:SecurityGroupEgressRule": "aws_vpc_security_group_egress_rule",
    "aws:vpc/securityGroupIngressRule:SecurityGroupIngressRule": "aws_vpc_security_group_ingress_rule",
}
NAMES = {
    ("aws_cloudwatch_metric_alarm", "name"): "alarm_name",
    ("aws_lambda_function", "name"): "function_name",
    ("aws_lambda_permission", "function"): "function_name",
    ("aws_sns_topic_subscription", "topic"): "topic_arn",
}
# What the installed provider is too old for: Pulumi's own types have it.
NEWER = {("aws_lambda_permission", "invoked_via_function_url")}


@cache
def mirror() -> Path | None:
    """A folder with a copy of the provider."""
    named = [os.environ.get("TF_PLUGIN_CACHE_DIR", ""), *PLACES, *map(str, Path("/opt").glob("*"))]
    found = (Path(each).expanduser() for each in named if each)
    return next((each for each in found if (each / PROVIDER).is_dir()), None)


def installed() -> bool:
    return shutil.which("terraform") is not None and mirror() is not None


def judge(declared: Iterable[Declared], folder: Path) -> list[str]:
    """What the provider has against it, one line a complaint."""
    (folder / "main.tf.json").write_text(
        json.dumps({"terraform": {"required_providers": {"aws": {"source": PROVIDER}}}})
    )
    terraform(folder, "init", "-input=false", "-backend=false", f"-plugin-dir={mirror()}")
    known = json.loads(terraform(folder, "providers", "schema", "-json"))["provider_schemas"][PROVIDER]
    resources: dict[str, dict[str, Any]] = {}
    for each in declared:
        kind = type_name(each.type, known["resource_schemas"])
        block = known["resource_schemas"][kind]["block"]
        resources.setdefault(kind, {})[f"x-{each.name}"] = translated(each.properties, block, kind)
    (folder / "main.tf.json").write_text(
        json.dumps({"terraform": {"required_providers": {"aws": {"source": PROVIDER}}}, "resource": resources})
    )
    report = json.loads(terraform(folder, "validate", "-json", check=False))
    return [f"{said.get('address', '')}: {said['summary']}: {said['detail']}" for said in report["diagnostics"]]


def terraform(folder: Path, *words: str, check: bool = True) -> str:
    environment = {**os.environ, "TF_CLI_CONFIG_FILE": os.devnull, "CHECKPOINT_DISABLE": "1"}
    done = subprocess.run(
        ["terraform", *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert not check or done.returncode == 0, done.stderr
    return done.stdout


def type_name(type_: str, known: Mapping[str, object]) -> str:
    if type_ in TYPES:
        return TYPES[type_]
    module, name = type_.split(":")[1].split("/")
    for candidate in (f"aws_{snake(name)}", f"aws_{module}_{snake(name)}"):
        if candidate in known:
            return candidate
    raise AssertionError(f"{type_}: what does Terraform call it? add it to TYPES")


def translated(inputs: Mapping[str, Any], block: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Inputs in Terraform's words. A name that the provider does not know goes as it is, and is complained of."""
    attributes, blocks = block.get("attributes", {}), block.get("block_types", {})
    out: dict[str, Any] = {}
    for key, value in inputs.items():
        name = NAMES.get((path, key)) or one_of(snake(key), {*attributes, *blocks})
        if (path, name) in NEWER:
            continue
        if name in blocks:
            inner = blocks[name]["block"]
            out[name] = [translated(each, inner, path) for each in (value if isinstance(value, list) else [value])]
        else:
            out[name] = literal(value)
    return out


def literal(value: Any) -> Any:
    """A text as it is: Terraform reads ``${...}`` and ``%{...}`` as its own."""
    match value:
        case str():
            return re.sub(r"([$%])\{", r"\1\1{", value)
        case list():
            return [literal(each) for each in value]
        case dict():
            return {key: literal(each) for key, each in value.items()}
    return value


def one_of(name: str, known: Iterable[str]) -> str:
    """Pulumi says lists in the plural where Terraform repeats a block."""
    names = set(known)
    singular = re.sub(r"ies$", "y", name) if name.endswith("ies") else name.removesuffix("s")
    return next((each for each in (name, singular) if each in names), name)


def snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])([A-Z])", r"_\1", name).lower()
