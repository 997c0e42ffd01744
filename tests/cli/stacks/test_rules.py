"""`spotkeeper review` asks the rules of `infra/policy`: what they find is in the comment, and the guard refuses it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from spotkeeper.cli.stacks import review as rules
from spotkeeper.client.errors import CliError, Exit
from spotkeeper.report.review.preview import UNKNOWN
from spotkeeper.report.review.review import LABEL
from tests.cli.conftest import Cli
from tests.infra.conftest import STACKS
from tests.infra.test_policy import AWS_BLOCK, AWS_BUCKET, GCP_BUCKET, GCP_TEMPLATE

TEMPLATE, BUCKET = "gcp:compute/regionInstanceTemplate:RegionInstanceTemplate", "gcp:storage/bucket:Bucket"
PUBLIC = {**GCP_TEMPLATE, "networkInterfaces": [{"accessConfigs": [{}]}]}
TOLD = "networkInterfaces[0] has a public address: leave accessConfigs out"


def step(op: str, kind: str, name: str, inputs: dict[str, Any], **state: Any) -> dict[str, Any]:
    side = "oldState" if op == "delete" else "newState"
    state = {side: {"type": kind, "inputs": inputs, **state}}
    return {"op": op, "urn": f"urn:pulumi:dev::spotkeeper::{kind}::{name}", **state}


def preview(*steps: dict[str, Any], same: int | None = None) -> bytes:
    """``same``: of the summary, where the preview does not tell of all of them."""
    count = sum(each["op"] == "same" for each in steps) if same is None else same
    return json.dumps({"config": {}, "steps": steps, "changeSummary": {"same": count, "create": 1}}).encode()


def found(text: bytes, stack: str = "dev", config: Path = Path("/nonexistent")) -> list[tuple[str, str, bool]]:
    return [(one.rule, one.name, one.stops) for one in rules.broken_rules(text, stack, config)]


def test_rules_check_resources_that_remain() -> None:
    for op in ("create", "update", "create-replacement", "same"):
        assert found(preview(step(op, TEMPLATE, "burst", PUBLIC))) == [("no-public-address", "burst", True)], op
    assert found(preview(step("delete", TEMPLATE, "burst", PUBLIC))) == []
    assert found(preview(step("create", TEMPLATE, "burst", GCP_TEMPLATE))) == []


def test_the_name_decides_production_and_retained_counts_as_kept() -> None:
    disk = step("create", "gcp:compute/disk:Disk", "data", {"labels": {"sk-stack": "prod"}})
    assert found(preview(disk), "prod") == [("disks-stay", "data", False)] and found(preview(disk), "dev") == []
    kept = step("create", "gcp:compute/disk:Disk", "data", {"labels": {"sk-stack": "prod"}}, retainOnDelete=True)
    assert found(preview(kept), "prod") == [], "the engine's JSON says what it does not tell a policy"


@pytest.mark.parametrize(
    "inputs",
    [
        {**GCP_TEMPLATE, "networkInterfaces": UNKNOWN},
        {**GCP_TEMPLATE, "networkInterfaces": [UNKNOWN]},
        {**GCP_TEMPLATE, "networkInterfaces": [{"accessConfigs": UNKNOWN}]},
        {**GCP_TEMPLATE, "serviceAccount": {"email": UNKNOWN}},
        {**GCP_TEMPLATE, "labels": UNKNOWN},
    ],
)
def test_unknown_values_break_no_rule(inputs: dict[str, Any]) -> None:
    assert found(preview(step("create", TEMPLATE, "burst", inputs))) == []


def test_a_secret_document_breaks_no_rule() -> None:
    assert found(preview(step("create", "aws:iam/rolePolicy:RolePolicy", "x", {"policy": "[secret]"}))) == []


def test_rules_over_the_whole_stack_need_a_complete_preview() -> None:
    """A bucket whose block does not change would have none, if what does not change is left out."""
    bucket = step("create", "aws:s3/bucket:Bucket", "bucket", AWS_BUCKET)
    block = step("same", "aws:s3/bucketPublicAccessBlock:BucketPublicAccessBlock", "block", AWS_BLOCK)
    rest = step("same", "aws:s3/bucketLifecycleConfiguration:BucketLifecycleConfiguration", "rest", {"bucket": "b"})
    assert found(preview(bucket, same=2)) == []
    assert found(preview(bucket, block, rest)) == []
    assert found(preview(bucket, rest)) == [("private-bucket", "bucket", True)]


def test_the_packs_configuration_turns_a_rule_off(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    bad = preview(
        step("create", TEMPLATE, "burst", PUBLIC),
        step("create", BUCKET, "bucket", {**GCP_BUCKET, "forceDestroy": True, "lifecycleRules": []}),
    )

    def told(config: object) -> set[tuple[str, bool]]:
        file.write_text(json.dumps(config))
        return {(rule, stops) for rule, _, stops in found(bad, "prod", file)}

    usual = {("no-public-address", True), ("bucket-stays", True), ("tidy-bucket", True)}
    assert told({}) == usual
    assert told({"no-public-address": "disabled"}) == usual - {("no-public-address", True)}
    assert told({"tidy-bucket": {"enforcementLevel": "advisory"}}) == {*usual, ("tidy-bucket", False)} - {
        ("tidy-bucket", True)
    }
    assert told({"all": "disabled", "bucket-stays": "mandatory"}) == {("bucket-stays", True)}


def test_the_stack_wide_half_of_a_rule_has_its_own_name(tmp_path: Path) -> None:
    file, bucket = tmp_path / "config.json", step("create", "aws:s3/bucket:Bucket", "bucket", AWS_BUCKET)
    file.write_text(json.dumps({"private-bucket-together": "disabled", "tidy-bucket": "disabled"}))
    assert found(preview(bucket), config=file) == []
    file.write_text(json.dumps({"private-bucket": "disabled", "tidy-bucket": "disabled"}))
    assert found(preview(bucket), config=file) == []


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ('{"no-public-adress": "disabled"}', "no-public-adress: no such rule (did you mean no-public-address?)"),
        ('{"no-nat": "off"}', "config.json of infra/policy: Invalid enum value 'off'"),
        ("no-nat: disabled", "config.json of infra/policy: JSON is malformed"),
        ("", "config.json of infra/policy: Input data was truncated"),
    ],
)
def test_an_invalid_configuration_of_rules_is_an_error(config: str, told: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(config)
    with pytest.raises(CliError) as caught:
        found(preview(), config=file)
    assert told in str(caught.value) and caught.value.remedy


def test_the_shipped_configuration_turns_nothing_off() -> None:
    assert json.loads(rules.CONFIG.read_text()) == {}


def test_the_comment_has_every_reason_and_the_guard_refuses(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, config = tmp_path / "preview.json", tmp_path / "config.json"
    file.write_bytes(preview(step("create", TEMPLATE, "burst`](x)", PUBLIC), step("update", BUCKET, "b", GCP_BUCKET)))
    words = ("review", "--preview", file, "--stack-file", STACKS / "Pulumi.example-gcp.yaml", "--stack", "example-gcp")
    done = cli(*words)
    assert done.code == Exit.REFUSED and "rules are broken: no-public-address" in done.err
    assert f"- `no-public-address`: `compute.RegionInstanceTemplate` `burst'](x)`: `{TOLD}`" in done.out
    assert cli(*words, "--allow-data-loss").code == Exit.REFUSED, f"{LABEL} lets data go, and no rule"
    assert json.loads(cli(*words, "--json").out)["verdict"] == "broken"
    config.write_text(json.dumps({"no-public-address": "advisory"}))
    monkeypatch.setattr(rules.broken_rules, "__defaults__", (config,))
    advised = cli(*words)
    assert advised.code == Exit.OK and "Advice:" in advised.out and TOLD in advised.out
