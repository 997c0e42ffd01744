"""The policy rules' checks of AWS resources. A check yields violations; :data:`CHECKS` lists them by rule."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from infra.policy.resource import (
    DeclaredResource,
    PolicyStatement,
    Told,
    at,
    bucket_stays,
    disk_stays,
    each,
    on,
    statements,
)

TEMPLATE = "aws:ec2/launchTemplate:LaunchTemplate"
INSTANCE = "aws:ec2/instance:Instance"
VOLUME = "aws:ebs/volume:Volume"
BUCKET = "aws:s3/bucket:Bucket"
LIFECYCLE = (
    "aws:s3/bucketLifecycleConfiguration:BucketLifecycleConfiguration",
    "aws:s3/bucketLifecycleConfigurationV2:BucketLifecycleConfigurationV2",
)
PUBLIC_BLOCK = "aws:s3/bucketPublicAccessBlock:BucketPublicAccessBlock"
ROLE = "aws:iam/role:Role"
ROLE_POLICY = "aws:iam/rolePolicy:RolePolicy"
POLICIES = (ROLE_POLICY, "aws:iam/policy:Policy", "aws:iam/userPolicy:UserPolicy")
PERMISSION = "aws:lambda/permission:Permission"
TAGGED = (
    TEMPLATE,
    INSTANCE,
    VOLUME,
    BUCKET,
    ROLE,
    "aws:ec2/vpc:Vpc",
    "aws:ec2/subnet:Subnet",
    "aws:ec2/securityGroup:SecurityGroup",
    "aws:ec2/placementGroup:PlacementGroup",
    "aws:lambda/function:Function",
    "aws:cloudwatch/logGroup:LogGroup",
    "aws:sqs/queue:Queue",
)
# Resources that a launched machine creates; the provider's default tags do not reach them.
LAUNCHED = ("instance", "volume", "network-interface")
_BLOCKS = ("blockPublicAcls", "blockPublicPolicy", "ignorePublicAcls", "restrictPublicBuckets")
# Actions without resource-level permissions: AWS accepts only "*" as their resource.
_RESOURCELESS = re.compile(
    r"(\w+:(Describe|List|Get\w*Scores|GetCallerIdentity)\w*|cloudwatch:PutMetricData|ssmmessages:\w+|xray:Put\w+)\Z"
)


def no_public_address(resource: DeclaredResource) -> Iterator[str]:
    if on(resource.at("associatePublicIpAddress")):
        yield "associatePublicIpAddress: want false"
    for index, card in enumerate(resource.each("networkInterfaces")):
        if on(at(card, "associatePublicIpAddress")):
            yield f'networkInterfaces[{index}].associatePublicIpAddress: want "false"'


def no_public_subnet(resource: DeclaredResource) -> Iterator[str]:
    if on(resource.at("mapPublicIpOnLaunch")):
        yield "mapPublicIpOnLaunch: want false: every machine in this subnet would have a public address"


def no_address(resource: DeclaredResource) -> Iterator[str]:
    yield "this resource reserves a public address, which is billed: remove it"


def no_nat(resource: DeclaredResource) -> Iterator[str]:
    yield "a NAT gateway bills by the hour and by the gigabyte: use IPv6, and a gateway endpoint for S3"


def no_open_port(resource: DeclaredResource) -> Iterator[str]:
    ranges = [*resource.each("cidrIpv4"), *resource.each("cidrIpv6")]
    for rule in resource.each("ingress"):
        ranges += [*each(at(rule, "cidrBlocks")), *each(at(rule, "ipv6CidrBlocks"))]
    if resource.type.endswith(":SecurityGroupRule") and resource.at("type") == "ingress":
        ranges += [*resource.each("cidrBlocks"), *resource.each("ipv6CidrBlocks")]
    for source in ranges:
        if str(source) in ("0.0.0.0/0", "::/0"):
            yield f"admits {source}: name narrower ranges"


def imds(resource: DeclaredResource) -> Iterator[str]:
    if (
        resource.type == INSTANCE
        and resource.at("launchTemplate") is not None
        and resource.at("metadataOptions") is None
    ):
        return  # the launch template sets the options
    if resource.at("metadataOptions.httpTokens") != "required":
        yield 'metadataOptions.httpTokens: want "required" (IMDSv2), so that forged requests (SSRF) get no credentials'
    hops = resource.at("metadataOptions.httpPutResponseHopLimit")
    if isinstance(hops, int | float) and hops > 1:
        yield f"metadataOptions.httpPutResponseHopLimit: {hops:g}: want 1, or containers get credentials"


def machines_end(resource: DeclaredResource) -> Iterator[str]:
    """Check that a shutdown ends a machine (unless it is static), and that spot requests are one-time."""
    market, end = resource.at("instanceMarketOptions"), resource.at("instanceInitiatedShutdownBehavior")
    if end != "terminate" and (market is not None or not re.search(r"-static(-|\Z)", str(resource.at("name")))):
        yield "instanceInitiatedShutdownBehavior: want terminate: the disks of a stopped machine would continue to bill"
    if market is None:
        return
    for field, want in (("spotInstanceType", "one-time"), ("instanceInterruptionBehavior", "terminate")):
        if (found := at(market, f"spotOptions.{field}")) != want:
            yield f"instanceMarketOptions.spotOptions.{field}: {found}: want {want}"


def no_price_cap(resource: DeclaredResource) -> Iterator[str]:
    if resource.at("instanceMarketOptions.spotOptions.maxPrice") is not None:
        path = "instanceMarketOptions.spotOptions.maxPrice"
        yield f"{path}: leave it out: spot never costs more than on-demand, and a lower cap only adds preemptions"


def no_standing_request(resource: DeclaredResource) -> Iterator[str]:
    yield "this resource launches machines that reconcile does not know: remove it"


def encrypted_template(resource: DeclaredResource) -> Iterator[str]:
    for index, mapping in enumerate(resource.each("blockDeviceMappings")):
        if at(mapping, "ebs") is not None and not on(at(mapping, "ebs.encrypted")):
            yield f"blockDeviceMappings[{index}].ebs.encrypted: want true"


def encrypted_instance(resource: DeclaredResource) -> Iterator[str]:
    if resource.at("rootBlockDevice") is not None and not on(resource.at("rootBlockDevice.encrypted")):
        yield "rootBlockDevice.encrypted: want true"
    for index, disk in enumerate(resource.each("ebsBlockDevices")):
        if not on(at(disk, "encrypted")):
            yield f"ebsBlockDevices[{index}].encrypted: want true"


def encrypted_volume(resource: DeclaredResource) -> Iterator[str]:
    if not on(resource.at("encrypted")):
        yield "encrypted: want true"


def pinned(resource: DeclaredResource) -> Iterator[str]:
    image = str(resource.at("imageId") or resource.at("ami") or "")
    if re.match(r"resolve:ssm:[^:]+(:[^:]*\D[^:]*)?\Z", image):  # without a version, or with a label
        yield f"{image} is a parameter whose value may change: add its version number"


def narrow(resource: DeclaredResource) -> Iterator[str]:
    for statement in statements(resource.at("policy")):
        if statement.allows:
            yield from _too_much(statement)


def _too_much(statement: PolicyStatement) -> Iterator[str]:
    for action in statement.actions:
        if "*" in action:
            yield f"allows {action}: name each action"
    bounded = [action for action in statement.actions if "*" not in action and not _RESOURCELESS.match(action)]
    if "*" in statement.resources and bounded:
        yield f"allows {', '.join(bounded)} on all resources: name the resources"
    if "iam:PassRole" in statement.actions and at(statement.conditions, "StringEquals.iam:PassedToService") is None:
        yield "allows iam:PassRole to any service: want a condition on iam:PassedToService"


def trusted(resource: DeclaredResource) -> Iterator[str]:
    for statement in statements(resource.at("assumeRolePolicy")):
        if statement.allows and "*" in statement.principals:
            yield "anybody may assume this role: name the principals"


def closed_bucket(resource: DeclaredResource) -> Iterator[str]:
    for statement in statements(resource.at("policy")):
        if statement.allows and "*" in statement.principals:
            yield "admits anybody: name the principals"


def named_caller(resource: DeclaredResource) -> Iterator[str]:
    if resource.at("principal") == "*":
        yield "lets anybody call the function: name the callers"


def url_asks(resource: DeclaredResource) -> Iterator[str]:
    if resource.at("authorizationType") != "AWS_IAM":
        yield "authorizationType: want AWS_IAM: the function itself does not authenticate callers"


def no_key(resource: DeclaredResource) -> Iterator[str]:
    yield "use a role instead: Pulumi's state would store the key, and the key could outlive the stack"


def block_is_whole(resource: DeclaredResource) -> Iterator[str]:
    for field in _BLOCKS:
        if not on(resource.at(field)):
            yield f"{field}: want true"


def tagged(resource: DeclaredResource) -> Iterator[str]:
    if at(resource.inputs, "tags.sk-stack") is None:
        yield "the tag sk-stack is missing, by which the drain and cost reports find resources"


def tags_what_it_makes(resource: DeclaredResource) -> Iterator[str]:
    kinds = {
        at(one, "resourceType") for one in resource.each("tagSpecifications") if at(one, "tags.sk-stack") is not None
    }
    for kind in LAUNCHED:
        if kind not in kinds:
            yield f"tagSpecifications: want the tag sk-stack for {kind}, which does not get the template's own tags"


def logs_end(resource: DeclaredResource) -> Iterator[str]:
    if not resource.at("retentionInDays"):
        yield "retentionInDays is missing: logs would be kept and billed forever"


# --- the whole stack ---------------------------------------------------------------------


def buckets_are_blocked(every: Sequence[DeclaredResource]) -> Told:
    yield from _without(every, (PUBLIC_BLOCK,), "has no BucketPublicAccessBlock")


def buckets_are_tidied(every: Sequence[DeclaredResource]) -> Told:
    told = "has no lifecycle rule that deletes unfinished uploads, whose parts would bill forever"
    yield from _without(every, LIFECYCLE, told)


def _without(every: Sequence[DeclaredResource], types: tuple[str, ...], told: str) -> Told:
    """Yield each bucket that no resource of ``types`` names, with the message ``told``.

    Before `up` the bucket's name in such a resource can be unknown. So if the stack has at least as many of these
    resources as buckets, no bucket is yielded.
    """
    buckets = [resource for resource in every if resource.type == BUCKET]
    if len(buckets) > sum(resource.type in types for resource in every):
        named = {str(resource.at("bucket")) for resource in every if resource.type in types}
        yield from ((resource, told) for resource in buckets if str(resource.at("bucket")) not in named)


def schedule_only_invokes(every: Sequence[DeclaredResource]) -> Told:
    """Check that a schedule's role may only invoke the function and send undelivered events to a queue."""
    clocks = {
        str(resource.at("name"))
        for resource in every
        if resource.type == ROLE
        for statement in statements(resource.at("assumeRolePolicy"))
        if "Service:scheduler.amazonaws.com" in statement.principals
    }
    for resource in every:
        if resource.type == ROLE_POLICY and str(resource.at("role")) in clocks:
            for statement in statements(resource.at("policy")):
                for action in statement.actions:
                    if statement.allows and action not in ("lambda:InvokeFunction", "sqs:SendMessage"):
                        yield resource, f"the schedule's role may {action}, but should only invoke the function"


CHECKS = (
    ("no-public-address", (TEMPLATE, INSTANCE), no_public_address),
    ("no-public-address", ("aws:ec2/subnet:Subnet",), no_public_subnet),
    ("no-public-address", ("aws:ec2/eip:Eip",), no_address),
    ("no-nat", ("aws:ec2/natGateway:NatGateway",), no_nat),
    (
        "no-open-port",
        (
            "aws:ec2/securityGroup:SecurityGroup",
            "aws:ec2/securityGroupRule:SecurityGroupRule",
            "aws:vpc/securityGroupIngressRule:SecurityGroupIngressRule",
        ),
        no_open_port,
    ),
    ("imds-v2", (TEMPLATE, INSTANCE), imds),
    ("machines-end", (TEMPLATE,), machines_end),
    ("no-price-cap", (TEMPLATE,), no_price_cap),
    ("machines-end", ("aws:ec2/spotInstanceRequest:SpotInstanceRequest",), no_standing_request),
    ("machines-end", ("aws:ec2/spotFleetRequest:SpotFleetRequest", "aws:ec2/fleet:Fleet"), no_standing_request),
    ("encrypted-disks", (TEMPLATE,), encrypted_template),
    ("encrypted-disks", (INSTANCE,), encrypted_instance),
    ("encrypted-disks", (VOLUME,), encrypted_volume),
    ("pinned-image", (TEMPLATE, INSTANCE), pinned),
    ("least-privilege", POLICIES, narrow),
    ("least-privilege", (ROLE,), trusted),
    ("least-privilege", (PERMISSION,), named_caller),
    ("least-privilege", ("aws:lambda/functionUrl:FunctionUrl",), url_asks),
    ("no-keys", ("aws:iam/accessKey:AccessKey", "aws:iam/user:User"), no_key),
    ("private-bucket", ("aws:s3/bucketPolicy:BucketPolicy",), closed_bucket),
    ("private-bucket", (PUBLIC_BLOCK,), block_is_whole),
    ("bucket-stays", (BUCKET,), bucket_stays),
    ("disks-stay", (VOLUME,), disk_stays),
    ("labelled", TAGGED, tagged),
    ("labelled", (TEMPLATE,), tags_what_it_makes),
    ("logs-end", ("aws:cloudwatch/logGroup:LogGroup",), logs_end),
)
STACK_CHECKS = (
    ("private-bucket", buckets_are_blocked),
    ("tidy-bucket", buckets_are_tidied),
    ("schedule-only-invokes", schedule_only_invokes),
)
