"""Who may do what: a role for the function, the machines and the schedule, and what jobs' own role is given.

The rights are data (:func:`function_rights` and its neighbours give statements), so that a
test can read them as a reviewer does. Names are known before things are, so policies wait
for nothing but the network's ids. What reconcile may end, move or delete must bear the
stack's tag *and* a job's: what Pulumi declared bears no job's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import pulumi
import pulumi_aws as aws
from spotkeeper.spec.names import LABEL_JOB, LABEL_STACK

from infra import naming
from infra.aws.network import Network
from infra.settings import Settings

NODE, FUNCTION, CLOCK = "vm", "fn", "ck"
PARTITION = "aws"
Conditions = Mapping[str, Mapping[str, str | Sequence[str]]]

# Describe actions know neither resources nor tags.
LOOK: tuple[str, ...] = (
    "ec2:DescribeAvailabilityZones",
    "ec2:DescribeInstances",
    "ec2:DescribeSnapshots",
    "ec2:DescribeSpotPriceHistory",
    "ec2:DescribeVolumes",
    "ec2:GetSpotPlacementScores",
)
# Where the function's documents are (spotkeeper.reconcile.paths). Not among them: what machines run as root.
STATE: tuple[str, ...] = (
    *("active/*", "jobs/*", "market/*", "names/*", "quarantine/*", "stack/alloc", "static/*", "tomb/*"),
)
DECLARED: tuple[str, ...] = ("stack/*",)  # read: what Pulumi and the drain write
# A job's id has eight characters. To IAM `*` is also a slash: `jobs/*/logs/*` would be `jobs/<job>/facts/x/logs/y` too.
NODE_READS: tuple[str, ...] = ("boot/*", "bundles/*", "jobs/????????/source/*")
NODE_WRITES: tuple[str, ...] = ("jobs/????????/ckpt/*", "jobs/????????/logs/*", "jobs/????????/out/*")
READ_WRITE: tuple[str, ...] = ("s3:AbortMultipartUpload", "s3:DeleteObject", "s3:GetObject", "s3:PutObject")


@dataclass(frozen=True)
class Statement:
    """One statement of a policy. ``principals``: by kind (``Service``, ``AWS``), in policies of resources only."""

    sid: str
    actions: Sequence[str]
    resources: Sequence[str] = ()
    conditions: Conditions = field(default_factory=dict)
    principals: Mapping[str, str] | None = None
    effect: str = "Allow"

    def plain(self) -> dict[str, object]:
        out: dict[str, object] = {"Sid": self.sid, "Effect": self.effect, "Action": list(self.actions)}
        if self.principals is not None:
            out["Principal"] = "*" if self.principals == {"AWS": "*"} else dict(self.principals)
        if self.resources:
            out["Resource"] = list(self.resources)
        if self.conditions:
            out["Condition"] = {test: dict(keys) for test, keys in self.conditions.items()}
        return out


def document(statements: Sequence[Statement]) -> str:
    """A policy as IAM reads it."""
    return json.dumps({"Version": "2012-10-17", "Statement": [each.plain() for each in statements]})


@dataclass(frozen=True)
class Arns:
    """The stack's things, by the names that they will have."""

    settings: Settings

    def role(self, key: str) -> str:
        return f"arn:{PARTITION}:iam::{self.settings.account}:role/{naming.account(self.settings.stack, key)}"

    def profile(self) -> str:
        name = naming.account(self.settings.stack, NODE)
        return f"arn:{PARTITION}:iam::{self.settings.account}:instance-profile/{name}"

    def function(self) -> str:
        return self._of("lambda", f"function:{naming.stack(self.settings.stack)}")

    def log_group(self) -> str:
        return self._of("logs", f"log-group:{log_group(self.settings.stack)}:*")

    def dead_letters(self) -> str:
        return self._of("sqs", dead_letters(self.settings.stack))

    def ec2(self, kind: str, which: str = "*") -> str:
        """Images and snapshots belong to no account in an ARN."""
        if kind in ("image", "snapshot"):
            return f"arn:{PARTITION}:ec2:{self.settings.region}::{kind}/{which}"
        return self._of("ec2", f"{kind}/{which}")

    def secret(self, name: str) -> tuple[str, ...]:
        """AWS adds six characters to a secret's name. Nobody can tell from an ARN whether they are there already."""
        if not name.startswith("arn:"):
            return (self._of("secretsmanager", f"secret:{name}-??????"),)
        return (name, f"{name}-??????")

    def parameter(self, name: str) -> str:
        """Of Systems Manager; those below ``/aws/`` are AWS's own, and everybody's."""
        account = "" if name.startswith("/aws/") else self.settings.account
        return f"arn:{PARTITION}:ssm:{self.settings.region}:{account}:parameter/{name.removeprefix('/')}"

    def bucket(self) -> str:
        return f"arn:{PARTITION}:s3:::{self.settings.bucket_name()}"

    def objects(self, *patterns: str) -> tuple[str, ...]:
        return tuple(f"{self.bucket()}/{pattern}" for pattern in patterns)

    def _of(self, service: str, rest: str) -> str:
        return f"arn:{PARTITION}:{service}:{self.settings.region}:{self.settings.account}:{rest}"


def log_group(stack: str) -> str:
    """Where Lambda writes of itself, by the function's name."""
    return f"/aws/lambda/{naming.stack(stack)}"


def dead_letters(stack: str) -> str:
    return f"{naming.stack(stack)}-dead"


# --- rights ------------------------------------------------------------------------------


def function_rights(settings: Settings, subnets: Sequence[str], group: str) -> tuple[Statement, ...]:
    """All that the function may do; ``subnets``, ``group``: ids of the network that its machines may join."""
    launching = _launching(settings, subnets, group) if settings.dynamic() else ()
    return (*launching, *_keeping(settings), *_remembering(settings))


def _launching(settings: Settings, subnets: Sequence[str], group: str) -> tuple[Statement, ...]:
    """Machines of the stack's types, from its templates and with its identity, marked as its own."""
    arns, stack, run = Arns(settings), settings.stack, ("ec2:RunInstances",)
    marked: Conditions = {"StringEquals": {f"aws:RequestTag/{LABEL_STACK}": stack}}
    around = (arns.ec2("network-interface"), arns.ec2("spot-instances-request"))
    ours: Conditions = {"StringEquals": {f"aws:ResourceTag/{LABEL_STACK}": stack}}
    declared = (arns.ec2("launch-template"), arns.ec2("placement-group"))
    places = [*(arns.ec2("subnet", subnet) for subnet in subnets), arns.ec2("security-group", group)]
    machines_only: Conditions = {"StringEquals": {"iam:PassedToService": "ec2.amazonaws.com"}}
    # EC2 looks an image up by the rights of whoever launches it; which of the two actions, it has changed.
    looked_up = tuple(arns.parameter(name) for name in _parameters(settings))
    images = (Statement("LookUpImages", ("ssm:GetParameter", "ssm:GetParameters"), looked_up),) if looked_up else ()
    return (
        *images,
        Statement("LaunchMachines", run, (arns.ec2("instance"),), _machine(settings)),
        Statement("WithEncryptedDisks", run, (arns.ec2("volume"),), {**marked, "Bool": {"ec2:Encrypted": "true"}}),
        Statement("WithCardsAndRequests", run, around, marked),
        Statement("FromOurTemplatesInOurGroups", run, declared, ours),
        Statement("OfTheirImages", run, (arns.ec2("image"),), {"Bool": {"ec2:IsLaunchTemplateResource": "true"}}),
        Statement("InOurNetwork", run, places),
        Statement("AsOurMachines", ("iam:PassRole",), (arns.role(NODE),), machines_only),
    )


def _parameters(settings: Settings) -> list[str]:
    """That say which images machines boot: ``resolve:ssm:<name>:<version>``."""
    images = {pool.image for pool in settings.dynamic() if pool.image.startswith("resolve:ssm:")}
    return sorted({image.split(":")[2] for image in images})


def _machine(settings: Settings) -> Conditions:
    """What must be said of a machine that is launched, by the request or by its template."""
    arns = Arns(settings)
    return {
        "StringEquals": {
            f"aws:RequestTag/{LABEL_STACK}": settings.stack,
            "ec2:InstanceType": sorted({pool.machine.type for pool in settings.dynamic()}),
            "ec2:MetadataHttpTokens": "required",
        },
        "ArnLike": {"ec2:LaunchTemplate": arns.ec2("launch-template")},
        "ArnEquals": {"ec2:InstanceProfile": arns.profile()},
        "Null": {f"aws:RequestTag/{LABEL_JOB}": "false"},
    }


def _keeping(settings: Settings) -> tuple[Statement, ...]:
    """Disks and snapshots of ranks, and the end of what bears a job's tag."""
    arns, stack = Arns(settings), settings.stack
    asked: Conditions = {
        "StringEquals": {f"aws:RequestTag/{LABEL_STACK}": stack},
        "Null": {f"aws:RequestTag/{LABEL_JOB}": "false"},
    }
    owned: Conditions = {
        "StringEquals": {f"aws:ResourceTag/{LABEL_STACK}": stack},
        "Null": {f"aws:ResourceTag/{LABEL_JOB}": "false"},
    }
    makes = ["CreateSnapshot", "CreateVolume", "RunInstances"]
    kinds = ("instance", "network-interface", "snapshot", "spot-instances-request", "volume")
    return (
        Statement("Look", LOOK, ("*",)),
        Statement(
            "MakeDisks", ("ec2:CreateVolume",), (arns.ec2("volume"),), {**asked, "Bool": {"ec2:Encrypted": "true"}}
        ),
        Statement("FillDisks", ("ec2:CreateVolume",), (arns.ec2("snapshot"),), owned),
        Statement("MakeSnapshots", ("ec2:CreateSnapshot",), (arns.ec2("snapshot"),), asked),
        Statement("OfDisks", ("ec2:CreateSnapshot",), (arns.ec2("volume"),), owned),
        Statement(
            "MoveAndEnd",
            (
                "ec2:AttachVolume",
                "ec2:DeleteSnapshot",
                "ec2:DeleteVolume",
                "ec2:DetachVolume",
                "ec2:TerminateInstances",
            ),
            (arns.ec2("instance"), arns.ec2("snapshot"), arns.ec2("volume")),
            owned,
        ),
        Statement(
            "MarkWhatIsMade",
            ("ec2:CreateTags",),
            tuple(arns.ec2(kind) for kind in kinds),
            {"StringEquals": {"ec2:CreateAction": makes, f"aws:RequestTag/{LABEL_STACK}": stack}},
        ),
    )


def _remembering(settings: Settings) -> tuple[Statement, ...]:
    """Its documents, its log, and where an event goes that it could not take."""
    arns = Arns(settings)
    return (
        Statement("ListDocuments", ("s3:ListBucket",), (arns.bucket(),)),
        Statement("ReadStack", ("s3:GetObject",), arns.objects(*DECLARED)),
        Statement("KeepDocuments", READ_WRITE, arns.objects(*STATE)),
        Statement("WriteLogs", ("logs:CreateLogStream", "logs:PutLogEvents"), (arns.log_group(),)),
        Statement("PutAsideEvents", ("sqs:SendMessage",), (arns.dead_letters(),)),
    )


def node_rights(settings: Settings) -> tuple[Statement, ...]:
    """A machine reads what it runs, writes what its job leaves, and reports; in EC2 it may do nothing."""
    arns = Arns(settings)
    prefixes = sorted({pattern.partition("/")[0] for pattern in NODE_READS + NODE_WRITES})
    rights = (
        Statement("ReadPrograms", ("s3:GetObject",), arns.objects(*NODE_READS)),
        Statement("WriteResults", READ_WRITE, arns.objects(*NODE_WRITES)),
        # Without it S3 answers 403 for what is not there. A read has no prefix, a list has one, if only an empty one.
        Statement(
            "TellWhatIsMissing",
            ("s3:ListBucket",),
            (arns.bucket(),),
            {"StringLikeIfExists": {"s3:prefix": [f"{prefix}/*" for prefix in prefixes]}},
        ),
        Statement(
            "Report",
            ("lambda:InvokeFunctionUrl",),
            (arns.function(),),
            {"StringEquals": {"lambda:FunctionUrlAuthType": "AWS_IAM"}},
        ),
        # Invoked otherwise, the request would say of itself who sent it.
        Statement(
            "ReportThroughTheUrlOnly",
            ("lambda:InvokeFunction",),
            (arns.function(),),
            {"Bool": {"lambda:InvokedViaFunctionUrl": "true"}},
        ),
    )
    if not settings.job_identity:
        return rights
    return (*rights, Statement("LendJobsTheirRole", ("sts:AssumeRole",), (settings.job_identity,)))


def clock_rights(settings: Settings) -> tuple[Statement, ...]:
    arns = Arns(settings)
    return (
        Statement("Tick", ("lambda:InvokeFunction",), (arns.function(),)),
        Statement("PutAsideTicks", ("sqs:SendMessage",), (arns.dead_letters(),)),
    )


def job_rights(settings: Settings) -> tuple[Statement, ...]:
    """What the role that jobs have is given beside what its owner gave it: the secrets that the stack file names."""
    arns = Arns(settings)
    named = tuple(arn for name in settings.secrets for arn in arns.secret(name))
    return (Statement("ReadSecrets", ("secretsmanager:GetSecretValue",), named),) if named else ()


def trust(service: str, account: str = "") -> Statement:
    """Who may be a role: one service, where ``account`` is given on behalf of that account only.

    A machine's session is named after the machine only while nobody but EC2 may begin one.
    """
    conditions: Conditions = {"StringEquals": {"aws:SourceAccount": account}} if account else {}
    return Statement("Be", ("sts:AssumeRole",), (), conditions, {"Service": f"{service}.amazonaws.com"})


# --- the roles ---------------------------------------------------------------------------


@dataclass(frozen=True)
class IdentityArgs:
    settings: Settings
    network: Network


class Identity(pulumi.ComponentResource):
    """``node``, ``function``, ``clock``: the roles; ``profile``: the machines'. ``bindings``: their rights."""

    def __init__(self, name: str, args: IdentityArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("spotkeeper:aws:Identity", name, None, opts)
        settings, network = args.settings, args.network
        self._settings = settings
        self._child = pulumi.ResourceOptions(parent=self)
        self.node = self._role(NODE, "Spotkeeper machines", trust("ec2"))
        self.function = self._role(FUNCTION, "Spotkeeper reconcile function", trust("lambda"))
        self.clock = self._role(CLOCK, "Spotkeeper schedule", trust("scheduler", settings.account))
        self.profile = aws.iam.InstanceProfile(
            "machines", name=naming.account(settings.stack, NODE), role=self.node.name,
            tags=self._tags(naming.account(settings.stack, NODE)), opts=self._child,
        )  # fmt: skip
        made = pulumi.Output.all(list(network.subnets.values()), network.group)
        self.bindings: list[pulumi.Resource] = [
            self._bind(FUNCTION, self.function.name, made.apply(_with(settings))),
            self._bind(NODE, self.node.name, document(node_rights(settings))),
            self._bind(CLOCK, self.clock.name, document(clock_rights(settings))),
        ]
        if rights := job_rights(settings):
            role = settings.job_identity.rsplit("/", 1)[1]
            self.bindings.append(self._bind("job", role, document(rights)))
        if settings.service_linked_role:
            self.bindings.append(
                aws.iam.ServiceLinkedRole("spot", aws_service_name="spot.amazonaws.com", opts=self._child)
            )
        self.register_outputs({})

    def _role(self, key: str, what: str, who: Statement) -> aws.iam.Role:
        called = naming.account(self._settings.stack, key)
        return aws.iam.Role(
            f"role-{key}",
            name=called,
            description=f"{what} ({self._settings.stack})",
            assume_role_policy=document([who]),
            tags=self._tags(called),
            opts=self._child,
        )

    def _bind(self, key: str, role: pulumi.Input[str], policy: pulumi.Input[str]) -> aws.iam.RolePolicy:
        called = naming.account(self._settings.stack, key)
        return aws.iam.RolePolicy(f"rights-{key}", name=called, role=role, policy=policy, opts=self._child)

    def _tags(self, name: str) -> dict[str, str]:
        return naming.tags(self._settings.labels, self._settings.stack, name)


def _with(settings: Settings) -> Callable[[Sequence[object]], str]:
    def policy(made: Sequence[object]) -> str:
        subnets, group = made
        assert isinstance(subnets, Sequence)
        return document(function_rights(settings, [str(each) for each in subnets], str(group)))

    return policy
