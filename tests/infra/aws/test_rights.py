"""Who may do what on AWS: policies as data, asked the questions that a reviewer, and an intruder, would ask."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping

import pytest
from msgspec.structs import replace

from infra.aws.rights import (
    READ_RIGHTS,
    clock_rights,
    document,
    function_rights,
    job_rights,
    machine_rights,
    submitter_rights,
    trust,
    trust_submitters,
)
from infra.aws.storage import bucket_rules
from infra.settings.model import Settings
from infra.settings.pool import Reservation
from infra.settings.read import from_config
from spotkeeper.contract.facts import Fact, Kind
from spotkeeper.local.deploy.config import read_config
from spotkeeper.reconcile.store import paths
from tests.infra.aws.judge import Ask, allowed, denied
from tests.infra.conftest import STACKS
from tests.reconcile.clouds.ec2 import iam

pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated in favor of:DeprecationWarning")
STACK = "example-aws"
EC2 = "arn:aws:ec2:us-east-1:123456789012"
BUCKET = f"arn:aws:s3:::sk-123456789012-{STACK}"
QUEUE = f"arn:aws:sqs:us-east-1:123456789012:sk-{STACK}-dead"
CALL = f"arn:aws:lambda:us-east-1:123456789012:function:sk-{STACK}"
SUBNETS, GROUPS = {"us-east-1a": "subnet-0aa", "us-east-1b": "subnet-0bb"}, {"us-east-1": "sg-0cc"}
OURS = {"aws:ResourceTag/sk-stack": STACK, "aws:ResourceTag/sk-job": "abcd2345"}
PULUMIS = {"aws:ResourceTag/sk-stack": STACK}
MARKED = {"aws:RequestTag/sk-stack": STACK, "aws:RequestTag/sk-job": "abcd2345"}
LAUNCH = MARKED | {
    "ec2:InstanceType": "g5.12xlarge",
    "ec2:InstanceProfile": f"arn:aws:iam::123456789012:instance-profile/sk-{STACK}-vm",
    "ec2:MetadataHttpTokens": "required",
    "ec2:LaunchTemplate": f"{EC2}:launch-template/lt-0123456789abcdef0",
}


@pytest.fixture(scope="module")
def settings() -> Settings:
    return from_config(read_config(STACKS / f"Pulumi.{STACK}.yaml"), STACK)


@pytest.fixture(scope="module")
def function(settings: Settings) -> str:
    return document(function_rights(settings, SUBNETS, GROUPS))


@pytest.fixture(scope="module")
def node(settings: Settings) -> str:
    return document(machine_rights(settings))


def may(policy: str, action: str, resource: str, context: Mapping[str, str] | None = None) -> bool:
    return allowed(policy, Ask(action, resource, context or {}))


def actions_of(policy: str) -> set[str]:
    return {action for each in json.loads(policy)["Statement"] for action in each["Action"]}


# --- the function --------------------------------------------------------------------------


def test_the_functions_rights_equal_its_adapters_calls(function: str) -> None:
    own = {action for action in actions_of(function) if action.partition(":")[0] in ("ec2", "iam")}
    assert own == set(iam.ACTIONS)
    assert set(READ_RIGHTS) == set(iam.READS)
    services = {action.partition(":")[0] for action in actions_of(function)}
    assert services == {"ec2", "iam", "logs", "s3", "secretsmanager", "sqs", "ssm"}
    assert not any("*" in action for action in actions_of(function))


@pytest.mark.parametrize(
    ("resource", "context"),
    [
        (f"{EC2}:instance/*", LAUNCH),
        (f"{EC2}:volume/*", MARKED | {"ec2:Encrypted": "true"}),
        (f"{EC2}:network-interface/*", MARKED),
        (f"{EC2}:spot-instances-request/*", MARKED),
        (f"{EC2}:launch-template/lt-0123456789abcdef0", PULUMIS),
        ("arn:aws:ec2:us-east-1::image/ami-0123", {"ec2:IsLaunchTemplateResource": "true"}),
        (f"{EC2}:subnet/subnet-0bb", {}),
        ("arn:aws:ec2:us-east-1:999999999999:subnet/subnet-0bb", {}),  # which another account shares
        (f"{EC2}:security-group/sg-0cc", {}),
        (f"{EC2}:placement-group/sk-{STACK}-burst-1a", PULUMIS),
    ],
)
def test_a_launch_needs_each_statement(function: str, resource: str, context: dict[str, str]) -> None:
    """EC2 asks IAM for every thing that a launch touches."""
    assert may(function, "ec2:RunInstances", resource, context)


@pytest.mark.parametrize(
    ("resource", "context"),
    [
        pytest.param(f"{EC2}:instance/*", {**LAUNCH, "aws:RequestTag/sk-stack": "prod"}, id="another stack's mark"),
        pytest.param(f"{EC2}:instance/*", {k: v for k, v in LAUNCH.items() if "sk-job" not in k}, id="no job"),
        pytest.param(f"{EC2}:instance/*", {**LAUNCH, "ec2:InstanceType": "p5.48xlarge"}, id="a type of no pool"),
        pytest.param(f"{EC2}:instance/*", {**LAUNCH, "ec2:InstanceProfile": "arn:aws:iam::1:instance-profile/admin"},
                     id="another identity"),
        pytest.param(f"{EC2}:instance/*", {**LAUNCH, "ec2:MetadataHttpTokens": "optional"}, id="version 1"),
        pytest.param(f"{EC2}:instance/*", {k: v for k, v in LAUNCH.items() if "Template" not in k}, id="no template"),
        pytest.param(f"{EC2}:volume/*", MARKED | {"ec2:Encrypted": "false"}, id="a bare disk"),
        pytest.param(f"{EC2}:launch-template/lt-0999", {"aws:ResourceTag/sk-stack": "prod"}, id="another's template"),
        pytest.param(f"{EC2}:launch-template/lt-0999", {}, id="a template of nobody"),
        pytest.param("arn:aws:ec2:us-east-1::image/ami-0666", {"ec2:IsLaunchTemplateResource": "false"},
                     id="another image"),
        pytest.param(f"{EC2}:subnet/subnet-0public", {}, id="another subnet"),
        pytest.param(f"{EC2}:security-group/sg-0open", {}, id="another group"),
        pytest.param(f"{EC2}:key-pair/mine", {}, id="a key to log in"),
        pytest.param(f"{EC2}:placement-group/sk-prod-burst-1a", {"aws:ResourceTag/sk-stack": "prod"},
                     id="another's group"),
        pytest.param(f"{EC2}:placement-group/sk-{STACK}-b-burst-1a", {"aws:ResourceTag/sk-stack": f"{STACK}-b"},
                     id="the group of a stack whose name begins as ours"),
    ],
)  # fmt: skip
def test_a_launch_of_anything_else_is_refused(function: str, resource: str, context: dict[str, str]) -> None:
    assert not may(function, "ec2:RunInstances", resource, context)


ENDS = [
    *(("ec2:TerminateInstances", f"{EC2}:instance/i-0123"), ("ec2:DeleteVolume", f"{EC2}:volume/vol-0123")),
    *(("ec2:DetachVolume", f"{EC2}:volume/vol-0123"), ("ec2:AttachVolume", f"{EC2}:instance/i-0123")),
    ("ec2:DeleteSnapshot", "arn:aws:ec2:us-east-1::snapshot/snap-0123"),
]


@pytest.mark.parametrize(("action", "resource"), ENDS)
def test_the_function_may_delete_only_dynamic_resources(function: str, action: str, resource: str) -> None:
    assert may(function, action, resource, OURS)
    assert not may(function, action, resource, PULUMIS), "a static machine, or its disk"
    assert not may(function, action, resource, {**OURS, "aws:ResourceTag/sk-stack": "prod"})
    assert not may(function, action, resource)


def test_disks_must_be_encrypted_and_tagged(function: str) -> None:
    make, volume, snapshot = "ec2:CreateVolume", f"{EC2}:volume/*", "arn:aws:ec2:us-east-1::snapshot/snap-0123"
    assert may(function, make, volume, MARKED | {"ec2:Encrypted": "true"})
    assert not may(function, make, volume, MARKED | {"ec2:Encrypted": "false"})
    assert not may(function, make, volume, {"ec2:Encrypted": "true"})
    assert may(function, make, snapshot, OURS) and not may(function, make, snapshot), "another's data"
    assert may(function, "ec2:CreateSnapshot", f"{EC2}:volume/vol-0123", OURS)
    assert not may(function, "ec2:CreateSnapshot", f"{EC2}:volume/vol-0123", PULUMIS)


def test_tags_can_be_set_only_at_creation(function: str) -> None:
    """Whoever could mark another's machine could then end it."""
    tag, machine = "ec2:CreateTags", f"{EC2}:instance/i-0123"
    for made_by in ("RunInstances", "CreateVolume", "CreateSnapshot"):
        assert may(function, tag, machine, MARKED | {"ec2:CreateAction": made_by})
    assert not may(function, tag, machine, MARKED)
    assert not may(function, tag, machine, {"aws:RequestTag/sk-stack": "prod", "ec2:CreateAction": "RunInstances"})


def test_only_the_images_parameter_may_be_read(settings: Settings) -> None:
    """EC2 resolves it with the launching role's permissions: without them no machine of the stack starts."""
    burst, *others = settings.dynamic()
    pools = (replace(burst, image="resolve:ssm:/acme/train:7"), *others)
    policy = document(function_rights(replace(settings, pools=pools), SUBNETS, GROUPS))
    ssm = "arn:aws:ssm:us-east-1:123456789012:parameter"
    for action in ("ssm:GetParameter", "ssm:GetParameters"):
        assert may(policy, action, f"{ssm}/acme/train")
        assert not may(policy, action, f"{ssm}/acme/password")
    public = replace(settings, pools=(replace(burst, image="resolve:ssm:/aws/service/debian/12:3"), *others))
    theirs = "arn:aws:ssm:us-east-1::parameter/aws/service/debian/12"
    assert may(document(function_rights(public, SUBNETS, GROUPS)), "ssm:GetParameters", theirs)


def test_a_launch_may_use_only_the_reserved_capacity_of_the_stack_file(settings: Settings, function: str) -> None:
    burst, *others = settings.dynamic()
    ours = Reservation("cr-0123456789abcdef0", burst.zones[0], 4)
    pools = (replace(burst, reservations=(ours,)), *others)
    before, after = (function_rights(each, SUBNETS, GROUPS) for each in (settings, replace(settings, pools=pools)))
    (more,) = (one for one in after if one not in before)
    arn = "arn:aws:ec2:us-east-1:*:capacity-reservation"
    assert more.plain() == {
        "Sid": "InReservedCapacity",
        "Effect": "Allow",
        "Action": ["ec2:RunInstances"],
        "Resource": [f"{arn}/{ours.name}"],
    }
    assert not may(function, "ec2:RunInstances", f"{EC2}:capacity-reservation/{ours.name}")


def test_where_all_pools_are_static_no_machine_may_be_launched(settings: Settings) -> None:
    policy = document(function_rights(replace(settings, pools=settings.static()), SUBNETS, GROUPS))
    assert not {"ec2:RunInstances", "iam:PassRole"} & actions_of(policy)


def test_only_the_machines_role_may_be_passed_and_only_to_ec2(function: str) -> None:
    role = "arn:aws:iam::123456789012:role/sk-example-aws"
    assert may(function, "iam:PassRole", f"{role}-vm", {"iam:PassedToService": "ec2.amazonaws.com"})
    assert not may(function, "iam:PassRole", f"{role}-vm", {"iam:PassedToService": "lambda.amazonaws.com"})
    assert not may(function, "iam:PassRole", f"{role}-fn", {"iam:PassedToService": "ec2.amazonaws.com"})


OTHERS = (
    "batch",
    "bundle",
    "by_function",
    "copy_of",
    "segment",
    "study",
)  # Pulumi's, submitters', and no path of an object


def written() -> dict[str, str]:
    """A path of every kind that the function knows of (``reconcile/paths``), by the name of what makes it."""
    values = {"sha256": "a" * 64, "what": Fact("uid", "boot", 0, 1, 1, Kind.HELLO)}
    by_type = {"str": "abcd2345", "int": 1, "float": 1.0}
    out = {"ALLOCATION": paths.ALLOCATION}
    for name, make in inspect.getmembers(paths, inspect.isfunction):
        if make.__module__ == paths.__name__ and not name.startswith("_") and name not in OTHERS:
            asked = inspect.signature(make).parameters.values()
            given = {each.name: values.get(each.name, by_type.get(str(each.annotation))) for each in asked}
            out[name] = make(**given)
    return out


def test_the_function_may_write_every_document_that_it_knows(function: str) -> None:
    found = written()
    assert len(found) > 25
    for name, path in found.items():
        key = f"{path}x" if path.endswith("/") else path
        for action in ("s3:GetObject", "s3:PutObject", "s3:DeleteObject"):
            assert may(function, action, f"{BUCKET}/{key}"), (name, key)
    assert may(function, "s3:ListBucket", BUCKET)
    assert not may(function, "s3:GetObject", "arn:aws:s3:::another/stack/allocation")


def test_the_function_cannot_write_programs_or_declared_documents(function: str) -> None:
    sha = "a" * 64
    for key in (paths.bundle(sha), f"boot/{sha}.sh", f"function/{sha}.zip"):
        assert not may(function, "s3:PutObject", f"{BUCKET}/{key}"), "it would be root on every machine"
    for key in (paths.batch("lr", 0), paths.segment("lr", 0)):
        assert not may(function, "s3:PutObject", f"{BUCKET}/{key}"), "submitters' programs alone write a study"
    for key in (paths.STACK, paths.DRAIN):
        assert may(function, "s3:GetObject", f"{BUCKET}/{key}") and not may(function, "s3:PutObject", f"{BUCKET}/{key}")


# --- machines ------------------------------------------------------------------------------


def test_a_machine_may_read_its_programs_and_write_its_jobs_results(node: str) -> None:
    job, sha = "abcd2345", "a" * 64
    for key in (paths.bundle(sha), f"boot/{sha}.sh", paths.source(job, sha)):
        assert may(node, "s3:GetObject", f"{BUCKET}/{key}") and not may(node, "s3:PutObject", f"{BUCKET}/{key}")
    for key in (paths.log(job, 0, 1), paths.output_file(job, 0, "a/b"), f"{paths.copies(job)}1-10/x"):
        for action in ("s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload"):
            assert may(node, action, f"{BUCKET}/{key}"), key
    for key in (
        paths.record(job),
        paths.ALLOCATION,
        paths.STACK,
        paths.spec(job),
        paths.progress(job),
        paths.facts(job) + "x",
        paths.batch("lr", 0),
        paths.segment("lr", 0),
    ):
        assert not may(node, "s3:PutObject", f"{BUCKET}/{key}") and not may(node, "s3:GetObject", f"{BUCKET}/{key}")


def test_a_machine_cannot_write_a_jobs_documents(node: str) -> None:
    """A fact below ``logs/`` would count as another node's report if only the last part of its name were read."""
    for folder in (paths.facts("abcd2345"), paths.requests("abcd2345"), paths.ledger("abcd2345")):
        for mine in ("logs", "ckpt", "out", "source"):
            for action in ("s3:GetObject", "s3:PutObject", "s3:DeleteObject"):
                assert not may(node, action, f"{BUCKET}/{folder}x/{mine}/1"), (folder, mine)


def test_a_machine_may_list_only_what_tells_missing_objects(node: str) -> None:
    """S3 asks for the right to list before it says 404; of a read there is no prefix to compare."""
    assert may(node, "s3:ListBucket", BUCKET)
    assert may(node, "s3:ListBucket", BUCKET, {"s3:prefix": "jobs/abcd2345/ckpt/"})
    assert not may(node, "s3:ListBucket", BUCKET, {"s3:prefix": ""})
    assert not may(node, "s3:ListBucket", BUCKET, {"s3:prefix": "stack/"})


def test_a_machine_can_call_the_function_only_through_its_url(node: str) -> None:
    """Invoked directly, a request would say of itself who sent it (``reconcile/service/aws_lambda``)."""
    assert may(node, "lambda:InvokeFunctionUrl", CALL, {"lambda:FunctionUrlAuthType": "AWS_IAM"})
    assert may(node, "lambda:InvokeFunction", CALL, {"lambda:InvokedViaFunctionUrl": "true"})
    assert not may(node, "lambda:InvokeFunction", CALL)
    assert not may(node, "lambda:InvokeFunction", CALL, {"lambda:InvokedViaFunctionUrl": "false"})


def test_a_machine_has_no_rights_over_machines(node: str) -> None:
    assert {action.partition(":")[0] for action in actions_of(node)} == {"lambda", "s3", "sts"}
    assert not any("*" in action for action in actions_of(node))


def test_machines_may_assume_only_the_jobs_role(settings: Settings, node: str) -> None:
    assert may(node, "sts:AssumeRole", "arn:aws:iam::123456789012:role/trainer")
    assert not may(node, "sts:AssumeRole", "arn:aws:iam::123456789012:role/admin")
    nobody = document(machine_rights(replace(settings, job_identity="")))
    assert "sts:AssumeRole" not in actions_of(nobody)


def test_jobs_may_read_only_the_named_secrets(settings: Settings) -> None:
    policy = document(job_rights(settings))
    secret = "arn:aws:secretsmanager:us-east-1:123456789012:secret:"  # noqa: S105
    assert may(policy, "secretsmanager:GetSecretValue", f"{secret}huggingface-Ab12Cd")
    assert not may(policy, "secretsmanager:GetSecretValue", f"{secret}payroll-Ab12Cd")
    by_arn = document(job_rights(replace(settings, secrets=(f"{secret}x-Ab12Cd", f"{secret}hub-token"))))
    for whole in ("x-Ab12Cd", "hub-token-Ab12Cd"):  # a name may end as if AWS's six characters were there
        assert may(by_arn, "secretsmanager:GetSecretValue", f"{secret}{whole}")
    assert not may(by_arn, "secretsmanager:GetSecretValue", f"{secret}hub-tokens-Ab12Cd")


def test_the_function_reads_the_addresses_of_channels_and_no_other_secret(settings: Settings, function: str) -> None:
    secret, parameter = "arn:aws:secretsmanager:us-east-1:123456789012:secret:", "arn:aws:ssm:us-east-1:123456789012:"
    assert may(function, "secretsmanager:GetSecretValue", f"{secret}slack-ml-team-Ab12Cd")
    assert may(function, "ssm:GetParameter", f"{parameter}parameter/spotkeeper/teams-ops")
    assert not may(function, "secretsmanager:GetSecretValue", f"{secret}huggingface-Ab12Cd")
    assert not may(function, "ssm:GetParameter", f"{parameter}parameter/spotkeeper/teams-ops-2")
    none = document(function_rights(replace(settings, channels=()), SUBNETS, GROUPS))
    assert not {action for action in actions_of(none) if action.startswith(("secretsmanager:", "ssm:"))}


def test_a_submitter_cannot_write_programs_or_declared_documents(settings: Settings) -> None:
    policy, job, sha = document(submitter_rights(settings)), "abcd2345", "a" * 64
    new, name, source = {"s3:if-none-match": "*"}, paths.name("vit"), paths.source(job, sha)
    made = (
        paths.spec(job),
        paths.spec(job, sha),
        paths.record(job),
        paths.request(job, "1"),
        paths.active(job),
        paths.batch("lr", 0),
        paths.segment("lr", 0),
        name,
        source,
    )
    for key in made:
        assert may(policy, "s3:GetObject", f"{BUCKET}/{key}") and may(policy, "s3:PutObject", f"{BUCKET}/{key}", new), (
            key
        )
        assert may(policy, "s3:PutObject", f"{BUCKET}/{key}") == (key == source), "a source goes up in parts"
        assert may(policy, "s3:DeleteObject", f"{BUCKET}/{key}") == (key == name), key
    for key in (paths.lease(job), paths.progress(job), f"{paths.facts(job)}x", f"{paths.ledger(job)}1",
                paths.log(job, 0, 1), f"{paths.copies(job)}1-2/x", paths.STACK, paths.ALLOCATION, paths.DRAIN,
                paths.bundle(sha), f"boot/{sha}.sh", paths.prices("burst"),
                paths.static_hello("sk-a-floor-s0", "b"), paths.tomb(job), paths.quarantine(sha), "new"):  # fmt: skip
        assert not may(policy, "s3:PutObject", f"{BUCKET}/{key}", new), key
        assert not may(policy, "s3:DeleteObject", f"{BUCKET}/{key}"), key
        assert may(policy, "s3:GetObject", f"{BUCKET}/{key}"), "status, report and logs read all of it"
    assert may(policy, "s3:ListBucket", BUCKET) and not may(policy, "s3:ListBucket", "arn:aws:s3:::another")
    assert may(policy, "lambda:InvokeFunctionUrl", CALL, {"lambda:FunctionUrlAuthType": "AWS_IAM"})
    assert may(policy, "lambda:InvokeFunction", CALL, {"lambda:InvokedViaFunctionUrl": "true"})
    assert not may(policy, "lambda:InvokeFunction", CALL), "invoked directly, a request would say who sent it"
    assert {action.partition(":")[0] for action in actions_of(policy)} == {"lambda", "s3"}


def test_a_customer_key_may_be_used_only_through_ec2(settings: Settings) -> None:
    key = "arn:aws:kms:us-east-1:123456789012:key/1234abcd-12ab-34cd-56ef-1234567890ab"
    policy = document(function_rights(replace(settings, kms_key=key), SUBNETS, GROUPS))
    by_ec2 = {"kms:ViaService": "ec2.us-east-1.amazonaws.com"}
    for action in ("Decrypt", "DescribeKey", "GenerateDataKeyWithoutPlaintext", "ReEncryptFrom", "ReEncryptTo"):
        assert may(policy, f"kms:{action}", key, by_ec2)
        assert not may(policy, f"kms:{action}", key) and not may(policy, f"kms:{action}", f"{key}0", by_ec2)
    grant = {**by_ec2, "kms:GrantIsForAWSResource": "true"}
    assert may(policy, "kms:CreateGrant", key, grant) and not may(policy, "kms:CreateGrant", key, by_ec2)


# --- schedule, trust, bucket ------------------------------------------------------------------


def test_the_schedule_may_invoke_the_function(settings: Settings) -> None:
    policy = document(clock_rights(settings))
    assert actions_of(policy) == {"lambda:InvokeFunction", "sqs:SendMessage"}
    assert may(policy, "lambda:InvokeFunction", CALL) and may(policy, "sqs:SendMessage", QUEUE)
    assert not may(policy, "lambda:InvokeFunction", f"{CALL}-another")


def test_each_role_trusts_one_service() -> None:
    """The name of a machine's session is its id for as long as nobody but EC2 begins such a session."""
    for service in ("ec2", "lambda"):
        assert json.loads(document([trust(service)]))["Statement"] == [
            {
                "Sid": "Be",
                "Effect": "Allow",
                "Action": ["sts:AssumeRole"],
                "Principal": {"Service": f"{service}.amazonaws.com"},
            }
        ]
    clock = json.loads(document([trust("scheduler", "123456789012")]))["Statement"][0]
    assert clock["Condition"] == {"StringEquals": {"aws:SourceAccount": "123456789012"}}


def test_the_bucket_denies_plain_http_and_unconditional_record_writes(settings: Settings) -> None:
    rules = document(bucket_rules(settings))
    tls = {"aws:SecureTransport": "true"}
    record = f"{BUCKET}/{paths.record('abcd2345')}"
    assert denied(rules, Ask("s3:GetObject", f"{BUCKET}/stack/allocation", {"aws:SecureTransport": "false"}))
    assert not denied(rules, Ask("s3:GetObject", f"{BUCKET}/stack/allocation", tls))
    for key in (record, f"{BUCKET}/{paths.ALLOCATION}"):
        assert denied(rules, Ask("s3:PutObject", key, tls))
        assert not denied(rules, Ask("s3:PutObject", key, {**tls, "s3:if-match": "etag"}))
        assert not denied(rules, Ask("s3:PutObject", key, {**tls, "s3:if-none-match": "*"}))
    for mine in (paths.progress("abcd2345"), paths.output_file("abcd2345", 0, "rec")):
        assert not denied(rules, Ask("s3:PutObject", f"{BUCKET}/{mine}", tls)), "no document of that kind"


def test_policies_are_within_awss_size_limits(settings: Settings) -> None:
    """Of 50 pools in 6 zones. A role's inline policies may have 10,240 characters together, a bucket's 20,480."""
    burst = next(pool for pool in settings.dynamic() if pool.name == "burst")
    kinds = [replace(burst.machine, type=f"m7i-flex.{size}xlarge") for size in range(50)]
    many = replace(settings, pools=tuple(replace(burst, name=f"p{i}", machine=kind) for i, kind in enumerate(kinds)))
    subnets = {f"us-east-1{letter}": f"subnet-{i:017x}" for i, letter in enumerate("abcdef")}
    assert len(document(function_rights(many, subnets, {"us-east-1": "sg-0123456789abcdef0"}))) <= 10_240
    assert len(document(machine_rights(settings))) <= 10_240
    assert len(document(bucket_rules(settings))) <= 20_480


def test_a_submitter_can_take_no_others_name() -> None:
    """The function knows submitters by their sessions' names in the role that all of them assume."""
    users = [f"arn:aws:iam::123456789012:user/{name}" for name in ("kim", "team/lee")]
    trusted = trust_submitters([users[0], "arn:aws:iam::123456789012:role/path/vision", users[1]])
    found = [(one.principals, one.conditions["StringEquals"]) for one in trusted]
    assert found == [
        ({"AWS": users}, {"sts:RoleSessionName": "${aws:username}"}),
        ({"AWS": ["arn:aws:iam::123456789012:role/path/vision"]}, {"sts:RoleSessionName": "vision"}),
    ]
    assert [one.sid for one in trusted] == ["Be0", "Be1"] and trust_submitters([]) == ()
