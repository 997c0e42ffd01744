"""The policy pack's rules, each with something right and what breaks it; and the pack that runs them.

That no example stack breaks one is in `gcp/test_declared.py` and `aws/test_declared.py`, where the stacks are.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from infra.policy import aws, gcp
from infra.policy.resource import DeclaredResource
from infra.policy.rules import ADVICE, RULES, WHY
from tests.infra.policies import violations

PACK = Path(__file__).resolve().parents[2] / "infra/policy"
GCP_TEMPLATE: dict[str, Any] = {
    "scheduling": {
        "provisioningModel": "SPOT", "preemptible": True, "automaticRestart": False,
        "onHostMaintenance": "TERMINATE", "instanceTerminationAction": "DELETE", "maxRunDuration": {"seconds": 86400},
    },
    "networkInterfaces": [{"subnetwork": "s"}],
    "serviceAccount": {"email": "sk-dev-vm@acme.iam.gserviceaccount.com"},
    "shieldedInstanceConfig": {"enableVtpm": True, "enableIntegrityMonitoring": True},
    "disks": [{"boot": True, "sourceImage": "projects/acme/global/images/train-1"}],
    "labels": {"sk-stack": "dev"},
}  # fmt: skip
GCP_BUCKET: dict[str, Any] = {
    "uniformBucketLevelAccess": True, "publicAccessPrevention": "enforced", "forceDestroy": False,
    "lifecycleRules": [{"action": {"type": "AbortIncompleteMultipartUpload"}, "condition": {"age": 1}}],
    "labels": {"sk-stack": "dev"},
}  # fmt: skip
AWS_TEMPLATE: dict[str, Any] = {
    "name": "sk-dev-burst-spot", "imageId": "ami-1",
    "metadataOptions": {"httpTokens": "required", "httpPutResponseHopLimit": 1},
    "instanceInitiatedShutdownBehavior": "terminate",
    "instanceMarketOptions": {
        "marketType": "spot",
        "spotOptions": {"spotInstanceType": "one-time", "instanceInterruptionBehavior": "terminate"},
    },
    "blockDeviceMappings": [{"deviceName": "/dev/sda1", "ebs": {"encrypted": "true"}}],
    "tagSpecifications": [
        {"resourceType": kind, "tags": {"sk-stack": "dev"}} for kind in ("instance", "volume", "network-interface")
    ],
    "tags": {"sk-stack": "dev"},
}  # fmt: skip
AWS_BUCKET = {"bucket": "b", "forceDestroy": False, "tags": {"sk-stack": "dev"}}
AWS_BLOCK = {
    "bucket": "b", "blockPublicAcls": True, "blockPublicPolicy": True,
    "ignorePublicAcls": True, "restrictPublicBuckets": True,
}  # fmt: skip
LABELS = {"sk-stack": "dev"}
SPOT, OPEN = "scheduling.provisioningModel", "0.0.0.0/0"


def put(inputs: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A copy with changes, whose keys are paths. None removes."""
    out: dict[str, Any] = json.loads(json.dumps(inputs))
    for path, value in changes.items():
        *parents, last = [int(word) if word.isdigit() else word for word in path.split(".")]
        at: Any = out
        for word in parents:
            at = at[word] if isinstance(word, int) else at.setdefault(word, {})
        if value is None:
            at.pop(last, None)
        else:
            at[last] = value
    return out


def policy(action: str | list[str], resource: str | list[str], **more: Any) -> dict[str, Any]:
    one = {"Effect": "Allow", "Action": action, "Resource": resource, **more}
    return {"role": "r", "policy": json.dumps({"Version": "2012-10-17", "Statement": [one]})}


def trust(principal: Any) -> dict[str, Any]:
    one = {"Effect": "Allow", "Action": "sts:AssumeRole", "Principal": principal}
    return {"name": "r", "assumeRolePolicy": json.dumps({"Statement": one}), "tags": LABELS}


# (rule, type, inputs, changes that break it, stack, protected, what is said)
Case = tuple[str, str, Mapping[str, Any], Mapping[str, Any], str, str]
CASES: list[Case] = [
    ("no-public-address", gcp.TEMPLATES[0], GCP_TEMPLATE, {"networkInterfaces.0.accessConfigs": [{}]}, "dev",
     "networkInterfaces[0] has a public address"),
    ("no-public-address", gcp.TEMPLATES[0], GCP_TEMPLATE, {"networkInterfaces.0.ipv6AccessConfigs": [{}]}, "dev",
     "networkInterfaces[0] has a public address"),
    ("no-public-address", "gcp:compute/address:Address", {"addressType": "INTERNAL"}, {"addressType": None}, "dev",
     "this resource reserves a public address"),
    ("no-open-port", gcp.FIREWALL, {"direction": "INGRESS", "allows": [{"protocol": "tcp"}], "sourceTags": ["a"]},
     {"sourceRanges": ["10.0.0.0/8", OPEN]}, "dev", "admits 0.0.0.0/0"),
    ("machines-end", gcp.TEMPLATES[0], GCP_TEMPLATE, {"scheduling.automaticRestart": True}, "dev",
     "scheduling.automaticRestart: want false"),
    ("machines-end", gcp.TEMPLATES[0], GCP_TEMPLATE, {SPOT: "STANDARD", "scheduling.automaticRestart": None}, "dev",
     "scheduling.automaticRestart: want false"),
    ("machines-end", gcp.TEMPLATES[1], GCP_TEMPLATE, {"scheduling.instanceTerminationAction": "STOP"}, "dev",
     "scheduling.instanceTerminationAction is STOP, want DELETE"),
    ("machines-end", gcp.TEMPLATES[0], GCP_TEMPLATE, {"scheduling.preemptible": False}, "dev",
     "scheduling.preemptible is False, want True"),
    ("machines-end", gcp.TEMPLATES[0], GCP_TEMPLATE, {"scheduling.onHostMaintenance": "MIGRATE"}, "dev",
     "scheduling.onHostMaintenance is MIGRATE, want TERMINATE"),
    ("runs-end", gcp.TEMPLATES[0], GCP_TEMPLATE, {"scheduling.maxRunDuration": None}, "prod-eu",
     "scheduling.maxRunDuration: missing: set limits.max_run_hours"),
    ("own-identity", gcp.INSTANCE, GCP_TEMPLATE, {"serviceAccount": None}, "dev", "serviceAccount: want the"),
    ("own-identity", gcp.TEMPLATES[0], GCP_TEMPLATE,
     {"serviceAccount.email": "1-compute@developer.gserviceaccount.com"}, "dev", "serviceAccount: want the"),
    ("shielded", gcp.INSTANCE, GCP_TEMPLATE, {"shieldedInstanceConfig.enableVtpm": False}, "dev",
     "shieldedInstanceConfig.enableVtpm: want true"),
    ("pinned-image", gcp.TEMPLATES[0], GCP_TEMPLATE,
     {"disks.0.sourceImage": "projects/acme/global/images/family/train"}, "dev", "projects/acme/global/images/family"),
    ("pinned-image", gcp.INSTANCE,
     {**GCP_TEMPLATE, "disks": None, "bootDisk": {"initializeParams": {"image": "projects/a/global/images/i"}}},
     {"bootDisk.initializeParams.image": "projects/a/global/images/family/f"}, "dev",
     "projects/a/global/images/family"),
    ("least-privilege", gcp.BINDINGS[0], {"role": "roles/logging.logWriter", "member": "serviceAccount:a"},
     {"role": "roles/editor"}, "dev", "roles/editor grants too much"),
    ("least-privilege", gcp.BINDINGS[0], {"role": "roles/logging.logWriter", "member": "serviceAccount:a"},
     {"role": "roles/compute.instanceAdmin"}, "dev", "roles/compute.instanceAdmin grants too much"),
    ("least-privilege", "gcp:cloudrunv2/serviceIamMember:ServiceIamMember",
     {"role": "roles/run.invoker", "member": "serviceAccount:a"}, {"member": "allUsers"}, "dev", "allUsers is public"),
    ("least-privilege", "gcp:storage/bucketIAMBinding:BucketIAMBinding",
     {"role": "roles/storage.objectUser", "members": ["serviceAccount:a"]},
     {"members": ["serviceAccount:a", "allAuthenticatedUsers"]}, "dev", "allAuthenticatedUsers is public"),
    ("least-privilege", gcp.CUSTOM_ROLE, {"permissions": ["compute.instances.create"]},
     {"permissions": ["compute.instances.*"]}, "dev", "compute.instances.*: name each permission"),
    ("least-privilege", gcp.CUSTOM_ROLE, {"permissions": ["compute.instances.create"]},
     {"permissions": ["resourcemanager.projects.setIamPolicy"]}, "dev",
     "resourcemanager.projects.setIamPolicy: its holder"),
    ("private-bucket", gcp.BUCKET, GCP_BUCKET, {"publicAccessPrevention": "inherited"}, "dev",
     "publicAccessPrevention: want enforced"),
    ("private-bucket", gcp.BUCKET, GCP_BUCKET, {"uniformBucketLevelAccess": None}, "dev",
     "uniformBucketLevelAccess: want true"),
    ("tidy-bucket", gcp.BUCKET, GCP_BUCKET, {"lifecycleRules": []}, "dev", "lifecycleRules is missing"),
    ("bucket-stays", gcp.BUCKET, GCP_BUCKET, {"forceDestroy": True}, "prod", "forceDestroy: a destroy"),
    ("labelled", "gcp:pubsub/topic:Topic", {"labels": LABELS}, {"labels": {"team": "ml"}}, "dev", "the label sk-stack"),
    ("labelled", gcp.INSTANCE, GCP_TEMPLATE, {"labels": None}, "dev", "the label sk-stack is missing"),
    # AWS
    ("no-public-address", aws.TEMPLATE, AWS_TEMPLATE,
     {"networkInterfaces": [{"associatePublicIpAddress": "false"}, {"associatePublicIpAddress": "true"}]}, "dev",
     "networkInterfaces[1].associatePublicIpAddress"),
    ("no-public-address", "aws:ec2/subnet:Subnet", {"tags": LABELS}, {"mapPublicIpOnLaunch": True}, "dev",
     "mapPublicIpOnLaunch: want false"),
    ("no-open-port", "aws:vpc/securityGroupIngressRule:SecurityGroupIngressRule", {"referencedSecurityGroupId": "sg"},
     {"cidrIpv4": OPEN}, "dev", "admits 0.0.0.0/0"),
    ("no-open-port", "aws:ec2/securityGroup:SecurityGroup", {"tags": LABELS},
     {"ingress": [{"ipv6CidrBlocks": ["::/0"]}]}, "dev", "admits ::/0"),
    ("no-open-port", "aws:ec2/securityGroupRule:SecurityGroupRule", {"type": "ingress", "cidrBlocks": ["10.0.0.0/8"]},
     {"cidrBlocks": [OPEN]}, "dev", "admits 0.0.0.0/0"),
    ("imds-v2", aws.TEMPLATE, AWS_TEMPLATE, {"metadataOptions.httpTokens": "optional"}, "dev",
     'metadataOptions.httpTokens: want "required"'),
    ("imds-v2", aws.TEMPLATE, AWS_TEMPLATE, {"metadataOptions": None}, "dev",
     'metadataOptions.httpTokens: want "required"'),
    ("imds-v2", aws.TEMPLATE, AWS_TEMPLATE, {"metadataOptions.httpPutResponseHopLimit": 2.0}, "dev",
     "metadataOptions.httpPutResponseHopLimit: 2: want 1"),
    ("imds-v2", aws.INSTANCE, {"launchTemplate": {"id": "lt"}, "tags": LABELS}, {"launchTemplate": None}, "dev",
     'metadataOptions.httpTokens: want "required"'),
    ("machines-end", aws.TEMPLATE, AWS_TEMPLATE, {"instanceInitiatedShutdownBehavior": "stop"}, "dev",
     "instanceInitiatedShutdownBehavior: want terminate"),
    ("machines-end", aws.TEMPLATE,
     put(AWS_TEMPLATE, {"name": "sk-dev-floor-static", "instanceMarketOptions": None,
                        "instanceInitiatedShutdownBehavior": "stop"}),
     {"name": "sk-dev-burst-od"}, "dev", "instanceInitiatedShutdownBehavior: want terminate"),
    ("machines-end", aws.TEMPLATE, AWS_TEMPLATE,
     {"instanceMarketOptions.spotOptions.spotInstanceType": "persistent"}, "dev",
     "instanceMarketOptions.spotOptions.spotInstanceType: persistent: want one-time"),
    ("machines-end", aws.TEMPLATE, AWS_TEMPLATE,
     {"instanceMarketOptions.spotOptions.instanceInterruptionBehavior": "stop"}, "dev",
     "instanceMarketOptions.spotOptions.instanceInterruptionBehavior: stop: want terminate"),
    ("no-price-cap", aws.TEMPLATE, AWS_TEMPLATE, {"instanceMarketOptions.spotOptions.maxPrice": "1.5"}, "dev",
     "instanceMarketOptions.spotOptions.maxPrice: leave it out"),
    ("encrypted-disks", aws.TEMPLATE, AWS_TEMPLATE, {"blockDeviceMappings.0.ebs.encrypted": "false"}, "dev",
     "blockDeviceMappings[0].ebs.encrypted: want true"),
    ("encrypted-disks", aws.VOLUME, {"encrypted": True, "tags": LABELS}, {"encrypted": None}, "dev",
     "encrypted: want true"),
    ("encrypted-disks", aws.INSTANCE, {"launchTemplate": {"id": "lt"}, "tags": LABELS},
     {"rootBlockDevice": {"volumeSize": 50}}, "dev", "rootBlockDevice.encrypted: want true"),
    ("encrypted-disks", aws.INSTANCE, {"launchTemplate": {"id": "lt"}, "tags": LABELS},
     {"ebsBlockDevices": [{"encrypted": False}]}, "dev", "ebsBlockDevices[0].encrypted: want true"),
    ("pinned-image", aws.TEMPLATE, AWS_TEMPLATE, {"imageId": "resolve:ssm:/acme/train"}, "dev",
     "resolve:ssm:/acme/train is a parameter"),
    ("least-privilege", aws.ROLE_POLICY, policy("ec2:RunInstances", "arn:aws:ec2:*:1:subnet/s"),
     policy(["ec2:*"], "arn:aws:ec2:*:1:subnet/s"), "dev", "allows ec2:*: name each action"),
    ("least-privilege", aws.ROLE_POLICY, policy(["ec2:DescribeInstances", "ec2:GetSpotPlacementScores"], "*"),
     policy(["ec2:DescribeInstances", "ec2:TerminateInstances"], ["*"]), "dev",
     "allows ec2:TerminateInstances on all resources"),
    ("least-privilege", aws.ROLE_POLICY,
     policy("iam:PassRole", "arn:r", Condition={"StringEquals": {"iam:PassedToService": "ec2.amazonaws.com"}}),
     policy("iam:PassRole", "arn:r"), "dev", "allows iam:PassRole to any service"),
    ("least-privilege", aws.ROLE, trust({"Service": "ec2.amazonaws.com"}), trust({"AWS": "*"}), "dev",
     "anybody may assume this role"),
    ("least-privilege", aws.PERMISSION, {"principal": "events.amazonaws.com"}, {"principal": "*"}, "dev",
     "lets anybody call the function"),
    ("least-privilege", "aws:lambda/functionUrl:FunctionUrl", {"authorizationType": "AWS_IAM"},
     {"authorizationType": "NONE"}, "dev", "authorizationType: want AWS_IAM"),
    ("private-bucket", "aws:s3/bucketPolicy:BucketPolicy",
     {"policy": json.dumps({"Statement": [{"Effect": "Deny", "Principal": "*", "Action": "s3:*"}]})},
     {"policy": json.dumps({"Statement": [{"Effect": "Allow", "Principal": "*", "Action": "s3:GetObject"}]})}, "dev",
     "admits anybody"),
    ("private-bucket", aws.PUBLIC_BLOCK, AWS_BLOCK, {"restrictPublicBuckets": False}, "dev",
     "restrictPublicBuckets: want true"),
    ("labelled", aws.VOLUME, {"encrypted": True, "tags": LABELS}, {"tags": {}}, "dev", "the tag sk-stack is missing"),
    ("labelled", aws.TEMPLATE, AWS_TEMPLATE, {"tagSpecifications.1.tags": {}}, "dev",
     "tagSpecifications: want the tag sk-stack for volume"),
    ("logs-end", "aws:cloudwatch/logGroup:LogGroup", {"retentionInDays": 30.0, "tags": LABELS},
     {"retentionInDays": None}, "dev", "retentionInDays is missing"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("rule", "kind", "right", "changes", "stack", "told"),
    CASES,
    ids=[f"{case[0]}-{case[1].rsplit(':', 1)[1]}-{'.'.join(case[3])}"[:90] for case in CASES],
)
def test_a_rule_reports_only_violations(
    rule: str, kind: str, right: Mapping[str, Any], changes: Mapping[str, Any], stack: str, told: str
) -> None:
    assert list(violations([DeclaredResource(kind, "it", right, stack)])) == []
    (found,) = violations([DeclaredResource(kind, "it", put(right, changes), stack)])
    assert (found.rule, found.resource) == (rule, f"{kind}::it")
    assert found.message.startswith(told)


@pytest.mark.parametrize(
    ("rule", "kind"),
    [
        ("no-nat", "gcp:compute/routerNat:RouterNat"),
        ("no-nat", "aws:ec2/natGateway:NatGateway"),
        ("no-public-address", "aws:ec2/eip:Eip"),
        ("no-keys", "gcp:serviceaccount/key:Key"),
        ("no-keys", "gcp:storage/hmacKey:HmacKey"),
        ("no-keys", "aws:iam/accessKey:AccessKey"),
        ("no-keys", "aws:iam/user:User"),
        ("machines-end", "aws:ec2/spotInstanceRequest:SpotInstanceRequest"),
        ("machines-end", "aws:ec2/spotFleetRequest:SpotFleetRequest"),
        ("machines-end", "aws:ec2/fleet:Fleet"),
    ],
)
def test_forbidden_resource_types_are_reported(rule: str, kind: str) -> None:
    assert [found.rule for found in violations([DeclaredResource(kind, "it", {}, "dev")])] == [rule]


@pytest.mark.parametrize("kind", [*gcp.DISKS, aws.VOLUME])
@pytest.mark.parametrize(
    ("stack", "protect", "retain", "well"),
    [
        ("dev", False, False, True),
        ("prod", True, False, True),
        ("prod", False, True, True),
        ("prod", False, False, False),
        ("prod", False, None, False),  # Pulumi does not say: hence only advice
    ],
)
def test_production_disks_must_be_kept(kind: str, stack: str, protect: bool, retain: bool | None, well: bool) -> None:
    inputs = {"labels": LABELS, "tags": LABELS, "encrypted": True}
    found = [one.rule for one in violations([DeclaredResource(kind, "d", inputs, stack, protect, retain)])]
    assert found == ([] if well else ["disks-stay"])
    assert "disks-stay" in ADVICE


def test_outside_production_these_rules_do_not_apply() -> None:
    endless = put(GCP_TEMPLATE, {"scheduling.maxRunDuration": None})
    assert list(violations([DeclaredResource(gcp.TEMPLATES[0], "t", endless, "dev")])) == []
    assert list(violations([DeclaredResource(gcp.BUCKET, "b", put(GCP_BUCKET, {"forceDestroy": True}), "dev")])) == []


# --- over all of a stack -----------------------------------------------------------------


def stack_of(*parts: tuple[str, str, Mapping[str, Any]]) -> Iterator[str]:
    for found in violations(DeclaredResource(kind, name, inputs, "dev") for kind, name, inputs in parts):
        yield f"{found.rule} {found.resource.rsplit('::', 1)[1]}"


def test_an_s3_bucket_needs_a_public_access_block_and_lifecycle_rules() -> None:
    bucket = (aws.BUCKET, "bucket", AWS_BUCKET)
    block = (aws.PUBLIC_BLOCK, "block", AWS_BLOCK)
    lifecycle = (aws.LIFECYCLE[0], "lifecycle", {"bucket": "b", "rules": []})
    assert list(stack_of(bucket, block, lifecycle)) == []
    assert list(stack_of(bucket)) == ["private-bucket bucket", "tidy-bucket bucket"]
    other = (aws.BUCKET, "other", {**AWS_BUCKET, "bucket": "c"})
    assert list(stack_of(bucket, other, block, lifecycle)) == ["private-bucket other", "tidy-bucket other"]


def test_google_clouds_schedule_may_only_invoke() -> None:
    clock = {"httpTarget": {"oidcToken": {"serviceAccountEmail": "ck@acme"}}}
    job = (gcp.SCHEDULE, "tick", clock)
    member = {"member": "serviceAccount:ck@acme"}
    invokes = (gcp.BINDINGS[5], "call", {"role": "roles/run.invoker", **member})
    more = (gcp.BINDINGS[0], "more", {"role": "roles/logging.logWriter", **member})
    other = (gcp.BINDINGS[0], "other", {"role": "roles/logging.logWriter", "member": "serviceAccount:fn@acme"})
    assert list(stack_of(job, invokes, other)) == []
    assert list(stack_of(job, invokes, more, other)) == ["schedule-only-invokes more"]


def test_awss_schedule_may_only_invoke_and_send_to_its_queue() -> None:
    role = (aws.ROLE, "clock", trust({"Service": "scheduler.amazonaws.com"}))
    assert list(stack_of(role, (aws.ROLE_POLICY, "p", policy(["lambda:InvokeFunction"], "arn:f")))) == []
    wider = policy(["lambda:InvokeFunction", "s3:GetObject"], "arn:f")
    assert list(stack_of(role, (aws.ROLE_POLICY, "p", wider))) == ["schedule-only-invokes p"]
    assert (
        list(stack_of((aws.ROLE, "fn", trust({"Service": "lambda.amazonaws.com"})), (aws.ROLE_POLICY, "p", wider)))
        == []
    )


class LaterError(Exception):
    """As Pulumi's own: the value is known after `up`."""


class Later(dict[str, Any]):
    """Inputs of which some are not known yet."""

    def get(self, key: str, default: Any = None) -> Any:
        if key == "role":
            raise LaterError(key)
        return super().get(key, default)


def test_an_unknown_value_skips_only_its_check() -> None:
    (rule,) = (rule for rule in RULES if rule.name == "least-privilege")
    seen = DeclaredResource(gcp.BINDINGS[0], "it", Later(role="?", member="allUsers"), "dev")
    assert list(rule.of_one(seen, LaterError)) == ["allUsers is public: name the members"]
    with pytest.raises(LaterError):
        list(rule.of_one(seen))


# --- the pack ----------------------------------------------------------------------------


def test_every_rule_has_a_check_and_every_check_a_rule() -> None:
    named = {name for name, *_ in (*gcp.CHECKS, *aws.CHECKS, *gcp.STACK_CHECKS, *aws.STACK_CHECKS)}
    assert named == set(WHY) == {rule.name for rule in RULES}
    assert all(rule.parts or rule.over_all for rule in RULES)
    assert set(WHY) > ADVICE


def test_rules_import_the_standard_library_alone() -> None:
    """The pack's environment has nothing of this project's."""
    for file in sorted(PACK.glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            allowed = {"infra.policy", *(("pulumi_policy",) if file.name == "__main__.py" else ())}
            for name in names:
                known = name.split(".")[0] in sys.stdlib_module_names or any(
                    name == each or name.startswith(f"{each}.") for each in allowed
                )
                assert known, f"{file.name}: {name}"


def test_the_pack_is_what_pulumi_expects_and_names_no_address() -> None:
    project = yaml.safe_load((PACK / "PulumiPolicy.yaml").read_text())
    assert project["runtime"]["name"] == "python"
    requirements = (PACK / "requirements.txt").read_text()
    assert "pulumi-policy" in requirements and "://" not in requirements and "index" not in requirements
