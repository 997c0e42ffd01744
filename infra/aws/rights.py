"""IAM policy statements with the rights of function, machines, schedule, submitters, jobs and shell users.

They are data, so that tests and reviewers read what AWS gets. Most ARNs consist of names that are known in advance, so
a policy can be declared before the resources that it names; only the network's ids must exist first. The function has
the right to end, attach or delete only resources with the stack's tag *and* a job's tag; resources that Pulumi declares
have no job's tag.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from infra import naming
from infra.boot import SHELL_USER
from infra.settings.model import Settings
from spotkeeper.contract.names import LABEL_JOB, LABEL_STACK, session_document
from spotkeeper.contract.notification import AWS_PARAMETER, AWS_SECRET, secret_of
from spotkeeper.contract.stack import region_of

MACHINE, FUNCTION, CLOCK, SUBMITTER, FORWARD = "vm", "fn", "ck", "sb", "ev"
PARTITION = "aws"
Conditions = Mapping[str, Mapping[str, str | Sequence[str]]]

# Describe actions accept neither resources nor conditions on tags.
READ_RIGHTS: tuple[str, ...] = (
    "ec2:DescribeAvailabilityZones",
    "ec2:DescribeInstances",
    "ec2:DescribeSnapshots",
    "ec2:DescribeSpotPriceHistory",
    "ec2:DescribeVolumes",
    "ec2:GetSpotPlacementScores",
)
# The function's documents (spotkeeper.reconcile.store.paths). Programs that machines run as root are not among them.
STATE: tuple[str, ...] = (
    *("active/*", "jobs/*", "market/*", "names/*", "notifications/*", "quarantine/*"),
    *("stack/allocation", "stack/tick", "static/*", "sweeps/*", "tomb/*"),
)
DECLARED: tuple[str, ...] = ("stack/*",)  # read-only; Pulumi and the drain write it
# A job's id has eight characters. IAM's `*` matches slashes: `jobs/*/logs/*` would match `jobs/<job>/facts/x/logs/y`.
MACHINE_READS: tuple[str, ...] = ("boot/*", "bundles/*", "jobs/????????/source/*")
MACHINE_WRITES: tuple[str, ...] = ("jobs/????????/ckpt/*", "jobs/????????/logs/*", "jobs/????????/out/*")
# Objects that a submitter may create: a job's documents and requests, a search's, but not its state; studies; no
# facts, ledger entries or ``stack/`` objects.
_SPEC_SHA = "?" * 64
SUBMITTED: tuple[str, ...] = (
    *("active/????????", "names/*", "jobs/????????/rec", "jobs/????????/spec.json"),
    *(f"jobs/????????/spec-{_SPEC_SHA}.json", "jobs/????????/requests/*"),
    *("sweeps/*/cohorts/*", "sweeps/*/spec.json", "sweeps/*/stops/*", "sweeps/*/trials/*", "studies/*"),
)
SOURCES: tuple[str, ...] = ("jobs/????????/source/*", "sweeps/*/source/*")
# Rights on a customer key that EC2 uses for the caller of a launch and for the account's role for spot machines.
KEY_USES: tuple[str, ...] = (
    *("Decrypt", "DescribeKey", "Encrypt", "GenerateDataKey", "GenerateDataKeyWithoutPlaintext"),
    *("ReEncryptFrom", "ReEncryptTo"),
)
READ_WRITE: tuple[str, ...] = ("s3:AbortMultipartUpload", "s3:DeleteObject", "s3:GetObject", "s3:PutObject")

# This condition requires the header with which S3 refuses to replace an existing object.
# https://docs.aws.amazon.com/AmazonS3/latest/userguide/conditional-writes-enforce.html
NEW_OBJECT: Conditions = {"Null": {"s3:if-none-match": "false"}}


@dataclass(frozen=True)
class Statement:
    """A statement of an IAM policy. ``principals`` (by kind: ``Service``, ``AWS``) is set only in resource policies."""

    sid: str
    actions: Sequence[str]
    resources: Sequence[str] = ()
    conditions: Conditions = field(default_factory=dict)
    principals: Mapping[str, str | Sequence[str]] | None = None
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
    """Return a policy document as JSON."""
    return json.dumps({"Version": "2012-10-17", "Statement": [each.plain() for each in statements]})


@dataclass(frozen=True)
class Arns:
    """The ARNs of the stack's resources, derived from their fixed names."""

    settings: Settings

    def role(self, key: str) -> str:
        return f"arn:{PARTITION}:iam::{self.settings.account}:role/{naming.account(self.settings.stack, key)}"

    def profile(self) -> str:
        name = naming.account(self.settings.stack, MACHINE)
        return f"arn:{PARTITION}:iam::{self.settings.account}:instance-profile/{name}"

    def function(self) -> str:
        return self._at_home("lambda", f"function:{naming.stack(self.settings.stack)}")

    def log_group(self) -> str:
        return self._at_home("logs", f"log-group:{log_group(self.settings.stack)}:*")

    def dead_letters(self) -> str:
        return self._at_home("sqs", dead_letters(self.settings.stack))

    def ec2(self, kind: str, which: str = "*", region: str = "") -> str:
        """Return an ARN pattern of EC2 resources of a kind.

        ``region``: "" means the stack's region or, if it has several, any. A role's policies have not enough characters
        for an ARN in each region, so ``_elsewhere`` denies calls in other regions. ARNs of images and snapshots contain
        no account id. Another account may share subnets and reserved capacity, so for these the pattern matches any
        account.
        """
        accounts = {"image": "", "snapshot": "", "subnet": "*", "capacity-reservation": "*"}
        place = region or (self.settings.region if len(self.settings.regions) == 1 else "*")
        return f"arn:{PARTITION}:ec2:{place}:{accounts.get(kind, self.settings.account)}:{kind}/{which}"

    def secret(self, name: str) -> tuple[str, ...]:
        """Return ARN patterns of a secret. AWS appends six characters to its name; an ARN in ``name`` may omit them."""
        if not name.startswith("arn:"):
            return (self._of("secretsmanager", f"secret:{name}-??????"),)
        return (name, f"{name}-??????")

    def parameter(self, name: str, region: str) -> str:
        """Return a Systems Manager parameter's ARN. ARNs of AWS's own (``/aws/...``) contain no account."""
        account = "" if name.startswith("/aws/") else self.settings.account
        return f"arn:{PARTITION}:ssm:{region}:{account}:parameter/{name.removeprefix('/')}"

    def bus(self) -> str:
        """Return the ARN of the home region's event bus for events of AWS."""
        return self._at_home("events", "event-bus/default")

    def bucket(self) -> str:
        return f"arn:{PARTITION}:s3:::{self.settings.bucket_name()}"

    def objects(self, *patterns: str) -> tuple[str, ...]:
        return tuple(f"{self.bucket()}/{pattern}" for pattern in patterns)

    def of_each(self, service: str, rest: str) -> tuple[str, ...]:
        """Return the ARNs of a resource that has the same name in each region of the stack."""
        return tuple(
            f"arn:{PARTITION}:{service}:{region}:{self.settings.account}:{rest}" for region in self.settings.regions
        )

    def _at_home(self, service: str, rest: str) -> str:
        return f"arn:{PARTITION}:{service}:{self.settings.home_region()}:{self.settings.account}:{rest}"

    def _of(self, service: str, rest: str) -> str:
        return f"arn:{PARTITION}:{service}:{self.settings.region}:{self.settings.account}:{rest}"


def log_group(stack: str) -> str:
    """Return the name of the function's log group, which Lambda derives from the function's name."""
    return f"/aws/lambda/{naming.stack(stack)}"


def dead_letters(stack: str) -> str:
    return f"{naming.stack(stack)}-dead"


# --- rights ------------------------------------------------------------------------------


def function_rights(settings: Settings, subnets: Mapping[str, str], groups: Mapping[str, str]) -> tuple[Statement, ...]:
    """Return the function's rights. ``subnets``: zone -> subnet's id; ``groups``: region -> security group's id."""
    launching = _launching(settings, subnets, groups) if settings.dynamic() else ()
    return (
        *launching,
        *_keeping(settings),
        *_encrypting(settings),
        *_elsewhere(settings),
        *_remembering(settings),
        *_announcing(settings),
    )


def _announcing(settings: Settings) -> tuple[Statement, ...]:
    """Return the rights to read each secret and parameter that contains a notification channel's address."""
    arns = Arns(settings)
    secrets = [arn for arn in (secret_of(each.address, AWS_SECRET) for each in settings.channels) if arn]
    named = tuple(dict.fromkeys(pattern for arn in secrets for pattern in arns.secret(arn)))
    found = (secret_of(each.address, AWS_PARAMETER) for each in settings.channels)
    parameters = tuple(dict.fromkeys(arn for arn in found if arn))
    return (
        *((Statement("ReadChannels", ("secretsmanager:GetSecretValue",), named),) if named else ()),
        *((Statement("ReadChannelParameters", ("ssm:GetParameter",), parameters),) if parameters else ()),
    )


def _encrypting(settings: Settings) -> tuple[Statement, ...]:
    """Return the rights to use each region's key through EC2: without them EC2 ends a machine that it has launched."""
    keys = tuple(key for region in settings.regions if (key := settings.kms_key_in(region)))
    if not keys:
        return ()
    services = [f"ec2.{region}.amazonaws.com" for region in settings.regions]  # a key works in its own region only
    by_ec2: dict[str, str | Sequence[str]] = {"kms:ViaService": services if len(services) > 1 else services[0]}
    uses = tuple(f"kms:{action}" for action in KEY_USES)
    to_aws: Conditions = {"StringEquals": by_ec2, "Bool": {"kms:GrantIsForAWSResource": "true"}}
    return (
        Statement("EncryptDisks", uses, keys, {"StringEquals": by_ec2}),
        Statement("LendDisksTheKey", ("kms:CreateGrant",), keys, to_aws),
    )


def _elsewhere(settings: Settings) -> tuple[Statement, ...]:
    """Return what keeps a stack with several regions to these: rights of EC2 that name no region are not for others."""
    if len(settings.regions) == 1:
        return ()
    others: Conditions = {"StringNotEquals": {"aws:RequestedRegion": list(settings.regions)}}
    return (Statement("InNoOtherRegion", ("ec2:*",), ("*",), others, effect="Deny"),)


def _launching(settings: Settings, subnets: Mapping[str, str], groups: Mapping[str, str]) -> tuple[Statement, ...]:
    """Return the rights to launch machines: of the stack's types, from its templates, with its role and tags."""
    arns, stack, run = Arns(settings), settings.stack, ("ec2:RunInstances",)
    marked: Conditions = {"StringEquals": {f"aws:RequestTag/{LABEL_STACK}": stack}}
    around = (arns.ec2("network-interface"), arns.ec2("spot-instances-request"))
    ours: Conditions = {"StringEquals": {f"aws:ResourceTag/{LABEL_STACK}": stack}}
    declared = (arns.ec2("launch-template"), arns.ec2("placement-group"))
    places = [arns.ec2("subnet", subnet, region_of(zone)) for zone, subnet in subnets.items()]
    places += [arns.ec2("security-group", group, region) for region, group in groups.items()]
    # Without this statement a launch can use no reservation that it names; with it, only these.
    reserved = [
        arns.ec2("capacity-reservation", one.name, region_of(one.zone))
        for pool in settings.pools
        for one in pool.reservations
    ]
    machines_only: Conditions = {"StringEquals": {"iam:PassedToService": "ec2.amazonaws.com"}}
    # EC2 looks up an image with the caller's rights; AWS has changed which of the two actions that needs.
    looked_up = tuple(arns.parameter(name, region) for region, name in _parameters(settings))
    images = (Statement("LookUpImages", ("ssm:GetParameter", "ssm:GetParameters"), looked_up),) if looked_up else ()
    return (
        *images,
        Statement("LaunchMachines", run, (arns.ec2("instance"),), _machine(settings)),
        Statement("WithEncryptedDisks", run, (arns.ec2("volume"),), {**marked, "Bool": {"ec2:Encrypted": "true"}}),
        Statement("WithCardsAndRequests", run, around, marked),
        Statement("FromOurTemplatesInOurGroups", run, declared, ours),
        Statement("OfTheirImages", run, (arns.ec2("image"),), {"Bool": {"ec2:IsLaunchTemplateResource": "true"}}),
        Statement("InOurNetwork", run, places),
        *((Statement("InReservedCapacity", run, reserved),) if reserved else ()),
        Statement("AsOurMachines", ("iam:PassRole",), (arns.role(MACHINE),), machines_only),
    )


def _parameters(settings: Settings) -> list[tuple[str, str]]:
    """Return (region, name) of the parameters by which images are given, as ``resolve:ssm:<name>:<version>``."""
    images = {
        (region, settings.image_in(region, pool)) for pool in settings.dynamic() for region in settings.regions_of(pool)
    }
    return sorted({(region, image.split(":")[2]) for region, image in images if image.startswith("resolve:ssm:")})


def _machine(settings: Settings) -> Conditions:
    """Return the conditions that a launch request or its template must meet."""
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
    """Return the rights to make nodes' disks and snapshots, and to end or delete resources with a job's tag."""
    arns, stack = Arns(settings), settings.stack
    asked: Conditions = {
        "StringEquals": {f"aws:RequestTag/{LABEL_STACK}": stack},
        "Null": {f"aws:RequestTag/{LABEL_JOB}": "false"},
    }
    owned: Conditions = {
        "StringEquals": {f"aws:ResourceTag/{LABEL_STACK}": stack},
        "Null": {f"aws:ResourceTag/{LABEL_JOB}": "false"},
    }
    moves = len(settings.regions) > 1  # EC2 has snapshots by region, so disks go to another one as copies of theirs
    makes = [*(("CopySnapshot",) if moves else ()), "CreateSnapshot", "CreateVolume", "RunInstances"]
    copying = (
        Statement("CopySnapshots", ("ec2:CopySnapshot",), (arns.ec2("snapshot"),), asked),
        Statement("OfSnapshots", ("ec2:CopySnapshot",), (arns.ec2("snapshot"),), owned),
    )
    measuring = Statement("MeasureCopies", ("ebs:ListChangedBlocks",), (arns.ec2("snapshot"),), owned)
    kinds = ("instance", "network-interface", "snapshot", "spot-instances-request", "volume")
    return (
        Statement("Read", READ_RIGHTS, ("*",)),
        Statement(
            "MakeDisks", ("ec2:CreateVolume",), (arns.ec2("volume"),), {**asked, "Bool": {"ec2:Encrypted": "true"}}
        ),
        Statement("FillDisks", ("ec2:CreateVolume",), (arns.ec2("snapshot"),), owned),
        Statement("MakeSnapshots", ("ec2:CreateSnapshot",), (arns.ec2("snapshot"),), asked),
        Statement("OfDisks", ("ec2:CreateSnapshot",), (arns.ec2("volume"),), owned),
        *(copying if moves else ()),
        *((measuring,) if settings.limits.warm_copies_usd is not None else ()),
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
    """Return the rights to the function's documents, its log, and the queue of failed events."""
    arns = Arns(settings)
    return (
        Statement("ListDocuments", ("s3:ListBucket",), (arns.bucket(),)),
        Statement("ReadStack", ("s3:GetObject",), arns.objects(*DECLARED)),
        Statement("KeepDocuments", READ_WRITE, arns.objects(*STATE)),
        Statement("WriteLogs", ("logs:CreateLogStream", "logs:PutLogEvents"), (arns.log_group(),)),
        Statement("PutAsideEvents", ("sqs:SendMessage",), (arns.dead_letters(),)),
    )


def machine_rights(settings: Settings) -> tuple[Statement, ...]:
    """Return a machine's rights: read programs and sources, write all jobs' results, call the function.

    With ``job_identity`` a machine may also act as that role. No machine may call EC2.
    """
    arns = Arns(settings)
    prefixes = sorted({pattern.partition("/")[0] for pattern in MACHINE_READS + MACHINE_WRITES})
    rights = (
        *_calling(arns),
        Statement("ReadPrograms", ("s3:GetObject",), arns.objects(*MACHINE_READS)),
        Statement("WriteResults", READ_WRITE, arns.objects(*MACHINE_WRITES)),
        # Without ListBucket S3 answers 403 for a missing object. A list call has a prefix, maybe ""; a read has none.
        Statement(
            "TellWhatIsMissing",
            ("s3:ListBucket",),
            (arns.bucket(),),
            {"StringLikeIfExists": {"s3:prefix": [f"{prefix}/*" for prefix in prefixes]}},
        ),
    )
    if not settings.job_identity:
        return rights
    return (*rights, Statement("LendJobsTheirRole", ("sts:AssumeRole",), (settings.job_identity,)))


def _calling(arns: Arns) -> tuple[Statement, ...]:
    """Return the two rights that a call of the function's URL needs."""
    signed: Conditions = {"StringEquals": {"lambda:FunctionUrlAuthType": "AWS_IAM"}}
    # A direct invocation could name any caller in the event that it sends.
    through: Conditions = {"Bool": {"lambda:InvokedViaFunctionUrl": "true"}}
    return (
        Statement("CallTheUrl", ("lambda:InvokeFunctionUrl",), (arns.function(),), signed),
        Statement("ThroughTheUrlOnly", ("lambda:InvokeFunction",), (arns.function(),), through),
    )


def submitter_rights(settings: Settings) -> tuple[Statement, ...]:
    """Return a submitter's rights: read the bucket, create jobs' documents, requests and studies, call the function.

    Submitters can overwrite a source: it is uploaded in parts, and a right to upload parts cannot have the condition
    that the object is new. So agents verify a source by its hash. Submitters can delete names, so that a new job can
    take an ended job's name.
    """
    arns = Arns(settings)
    return (
        *_calling(arns),
        Statement("ListJobs", ("s3:ListBucket",), (arns.bucket(),)),
        Statement("ReadJobs", ("s3:GetObject",), arns.objects("*")),
        Statement("CreateJobs", ("s3:PutObject",), arns.objects(*SUBMITTED), NEW_OBJECT),
        Statement("SendSources", ("s3:AbortMultipartUpload", "s3:PutObject"), arns.objects(*SOURCES)),
        Statement("FreeNames", ("s3:DeleteObject",), arns.objects("names/*")),
    )


def clock_rights(settings: Settings) -> tuple[Statement, ...]:
    arns = Arns(settings)
    return (
        Statement("Tick", ("lambda:InvokeFunction",), (arns.function(),)),
        Statement("PutAsideTicks", ("sqs:SendMessage",), (arns.dead_letters(),)),
    )


def forward_rights(settings: Settings) -> tuple[Statement, ...]:
    return (Statement("Forward", ("events:PutEvents",), (Arns(settings).bus(),)),)


def job_rights(settings: Settings) -> tuple[Statement, ...]:
    """Return the rights that the stack adds to the jobs' role: read the secrets that the stack file lists."""
    arns = Arns(settings)
    named = tuple(arn for name in settings.secrets for arn in arns.secret(name))
    return (Statement("ReadSecrets", ("secretsmanager:GetSecretValue",), named),) if named else ()


def trust(service: str, account: str = "") -> Statement:
    """Return the statement with which a role trusts a service; with ``account``, only on behalf of that account.

    The machines' role must trust EC2 alone. EC2 assumes it with a session name by which the function identifies the
    machine; any other principal could choose another machine's session name.
    """
    conditions: Conditions = {"StringEquals": {"aws:SourceAccount": account}} if account else {}
    return Statement("Be", ("sts:AssumeRole",), (), conditions, {"Service": f"{service}.amazonaws.com"})


def trust_people(arns: Sequence[str]) -> Statement:
    """Return the statement with which a role trusts the users and roles that have these ARNs."""
    return Statement("Be", ("sts:AssumeRole",), (), {}, {"AWS": list(arns)})


def trust_submitters(arns: Sequence[str]) -> tuple[Statement, ...]:
    """Return the statements with which the submitters' role trusts each of them, in a session of its own name only.

    The function knows a submitter by the session's name: without the condition, one could take another's. A user's name
    is a variable of IAM; no variable has a role's.
    """
    users = [arn for arn in arns if ":user/" in arn]
    found = [(users, "${aws:username}")] if users else []
    found += [([arn], session_of(arn)) for arn in arns if arn not in users]
    return tuple(
        Statement(f"Be{index}", ("sts:AssumeRole",), (), {"StringEquals": {"sts:RoleSessionName": name}}, {"AWS": who})
        for index, (who, name) in enumerate(found)
    )


def session_of(arn: str) -> str:
    """Return the name of a submitter's session: that of the user or role."""
    return arn.rpartition("/")[2]


# --- shells ------------------------------------------------------------------------------


SHELL = "sh"
SESSION_LOG_DAYS = 90
IDLE_MIN, LONGEST_MIN = "20", "720"  # minutes until an idle session ends, and until any session ends
CHANNELS = ("CreateControlChannel", "CreateDataChannel", "OpenControlChannel", "OpenDataChannel")


def session_log(stack: str) -> str:
    return f"/spotkeeper/{naming.stack(stack)}/sessions"


def session(stack: str) -> str:
    """Return the session document: a session runs a command with ``sh``, or a login shell if none is given."""
    command = {"type": "String", "default": "cd; exec bash -l", "description": "The command that the session runs."}
    inputs = {
        "runAsEnabled": True,
        "runAsDefaultUser": SHELL_USER,
        "cloudWatchLogGroupName": session_log(stack),
        "cloudWatchEncryptionEnabled": False,  # log groups are encrypted anyway; this demands a customer key
        "cloudWatchStreamingEnabled": True,
        "idleSessionTimeout": IDLE_MIN,
        "maxSessionDuration": LONGEST_MIN,
    }
    content = {
        "schemaVersion": "1.0",
        "description": f"Spotkeeper {stack}: a shell on one of its machines",
        "sessionType": "InteractiveCommands",
        "parameters": {"command": command},
        "inputs": inputs,
        "properties": {"linux": {"commands": "{{ command }}", "runAsElevated": False}},
    }
    return json.dumps(content)


def shell_rights(settings: Settings) -> tuple[Statement, ...]:
    """Return a shell user's rights: start sessions on the stack's machines, read the bucket, add ledger entries."""
    arns = Arns(settings)
    # Each statement that allows the start of a session names the document: the account's default one would give root.
    checked: Conditions = {"BoolIfExists": {"ssm:SessionDocumentAccessCheck": "true"}}
    of_stack: Conditions = {**checked, "StringEquals": {f"ssm:resourceTag/{LABEL_STACK}": settings.stack}}
    start, own = ("ssm:StartSession",), arns.of_each("ssm", "session/${aws:userid}-*")
    documents = arns.of_each("ssm", f"document/{session_document(settings.stack)}")
    return (
        Statement("OnOurMachines", start, (arns.ec2("instance"),), of_stack),
        Statement("WithOurDocument", start, documents, checked),
        Statement("OwnSessions", ("ssm:ResumeSession", "ssm:TerminateSession", "ssmmessages:OpenDataChannel"), own),
        Statement("ListJobs", ("s3:ListBucket",), (arns.bucket(),)),
        Statement("ReadJobs", ("s3:GetObject",), arns.objects("*")),
        # Entries are created and never replaced. By their names, readers believe only that a shell was opened.
        Statement("LogStarts", ("s3:PutObject",), arns.objects("jobs/????????/ledger/*.shell-*"), NEW_OBJECT),
    )


def shell_machine_rights(settings: Settings) -> tuple[Statement, ...]:
    """Return the rights of Session Manager's agent on a machine: sessions, but no Systems Manager commands."""
    arns = Arns(settings)
    groups = arns.of_each("logs", f"log-group:{session_log(settings.stack)}")
    return (
        Statement("BeManaged", ("ssm:UpdateInstanceInformation",), (arns.ec2("instance"),)),
        Statement("CarrySessions", tuple(f"ssmmessages:{each}" for each in CHANNELS), ("*",)),
        Statement("FindSessionLogs", ("logs:DescribeLogGroups",), ("*",)),
        Statement(
            "LogSessions",
            ("logs:CreateLogStream", "logs:DescribeLogStreams", "logs:PutLogEvents"),
            tuple(arn for group in groups for arn in (group, f"{group}:*")),
        ),
    )
