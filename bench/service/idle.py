"""The monthly cost of a stack without a job, from the example stacks' declared resources and the calls of a tick.

Static machines and their disks are excluded, since ``spotkeeper review`` shows them. An unknown resource type is an
error, so that nobody adds a gateway with an hourly price unnoticed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from msgspec import Struct

from infra.settings.model import Settings
from spotkeeper.cli.stacks.render import plan
from spotkeeper.cli.stacks.stackfile import CHECKOUT, read_stack_file
from spotkeeper.contract.stack import RENEWED_S

GOAL_USD = 3.0
MONTH_MINUTES = 43_800.0
TICK_S = 0.5  # a warm call of the function without work (bench: function)
LISTS = 1  # listings per tick: active/; with channels one more, of notifications/
READS, READS_A_POOL = 4, 4  # per tick: pools, allocation twice, note of ticks; per pool its market
NOTE_MINUTES = RENEWED_S / 60.0  # minutes between writes of the note of successful ticks
LOG_GB_A_TICK = 600e-9  # the platform's own lines about a call

# USD per month of what a stack on AWS has in each other region: a copy of each image, taken as 20 GB, and maybe a key.
IMAGE_USD, KEY_USD = 20 * 0.05, 1.00
# USD per month of a metric that counts lines of the function's log. CloudWatch charges by the hour in which a metric
# got a value (https://aws.amazon.com/cloudwatch/pricing/): without a job only that of ticks gets any.
FILTER, METRIC_USD = "aws:cloudwatch/logMetricFilter:LogMetricFilter", 0.30
# USD per month of an unused resource.
PRICED: dict[str, float] = {
    "gcp:cloudscheduler/job:Job": 0.10,
    "gcp:monitoring/alertPolicy:AlertPolicy": 0.10,  # a condition
    "gcp:artifactregistry/repository:Repository": 0.05,  # the function's image, half a GB
    "aws:cloudwatch/metricAlarm:MetricAlarm": 0.10,
}
BOUGHT = frozenset(
    {"gcp:compute/instance:Instance", "gcp:compute/disk:Disk", "aws:ec2/instance:Instance", "aws:ebs/volume:Volume"}
)
FREE_GCP = (
    "artifactregistry/repositoryIamMember:RepositoryIamMember", "billing/budget:Budget",
    "cloudfunctionsv2/function:Function", "cloudrunv2/serviceIamMember:ServiceIamMember",
    "compute/firewall:Firewall", "compute/network:Network", "compute/regionInstanceTemplate:RegionInstanceTemplate",
    "compute/resourcePolicy:ResourcePolicy", "compute/subnetwork:Subnetwork", "logging/metric:Metric",
    "logging/projectSink:ProjectSink",
    "monitoring/notificationChannel:NotificationChannel", "projects/iAMCustomRole:IAMCustomRole",
    "projects/iAMMember:IAMMember", "projects/serviceIdentity:ServiceIdentity", "pubsub/subscription:Subscription",
    "pubsub/subscriptionIAMMember:SubscriptionIAMMember", "pubsub/topic:Topic",
    "pubsub/topicIAMMember:TopicIAMMember", "secretmanager/secretIamMember:SecretIamMember",
    "serviceaccount/account:Account", "serviceaccount/iAMMember:IAMMember", "storage/bucket:Bucket",
    "storage/bucketIAMMember:BucketIAMMember", "storage/bucketObject:BucketObject",
)  # fmt: skip
FREE_AWS = (
    "budgets/budget:Budget", "cloudwatch/eventRule:EventRule", "cloudwatch/eventTarget:EventTarget",
    "cloudwatch/logGroup:LogGroup", "cloudwatch/logMetricFilter:LogMetricFilter",
    "ec2/egressOnlyInternetGateway:EgressOnlyInternetGateway",
    "ec2/internetGateway:InternetGateway", "ec2/launchTemplate:LaunchTemplate", "ec2/placementGroup:PlacementGroup",
    "ec2/route:Route", "ec2/routeTable:RouteTable", "ec2/routeTableAssociation:RouteTableAssociation",
    "ec2/securityGroup:SecurityGroup", "ec2/subnet:Subnet", "ec2/volumeAttachment:VolumeAttachment",
    "ec2/vpc:Vpc", "ec2/vpcEndpoint:VpcEndpoint",  # a gateway endpoint; one with interfaces would bill by the hour
    "iam/instanceProfile:InstanceProfile", "iam/role:Role", "iam/rolePolicy:RolePolicy",
    "iam/serviceLinkedRole:ServiceLinkedRole", "kms/grant:Grant", "lambda/function:Function",
    "lambda/functionEventInvokeConfig:FunctionEventInvokeConfig", "lambda/functionUrl:FunctionUrl",
    "lambda/permission:Permission", "s3/bucket:Bucket",
    "s3/bucketLifecycleConfiguration:BucketLifecycleConfiguration",
    "s3/bucketOwnershipControls:BucketOwnershipControls", "s3/bucketPolicy:BucketPolicy",
    "s3/bucketPublicAccessBlock:BucketPublicAccessBlock", "s3/bucketVersioning:BucketVersioning",
    "s3/bucketObjectv2:BucketObjectv2", "scheduler/schedule:Schedule", "sns/topic:Topic",
    "sns/topicSubscription:TopicSubscription", "sqs/queue:Queue", "sqs/queuePolicy:QueuePolicy",
    "ssm/document:Document",
    "vpc/securityGroupEgressRule:SecurityGroupEgressRule", "vpc/securityGroupIngressRule:SecurityGroupIngressRule",
)  # fmt: skip
FREE = frozenset({f"gcp:{each}" for each in FREE_GCP} | {f"aws:{each}" for each in FREE_AWS})


class Calls(Struct, frozen=True):
    """One cloud's prices, in USD, for the calls that a tick makes."""

    schedule: float  # per call by the schedule
    request: float  # per call of the function
    second: float  # of the function's running time, without memory
    gb_second: float
    listing: float  # per listing of the bucket
    read: float
    write: float
    log_gb: float


CALLS = {
    "gcp": Calls(0.0, 0.40e-6, 24.0e-6, 2.5e-6, 5.0e-6, 0.4e-6, 5.0e-6, 0.0),  # 50 GB of logs a month are free
    "aws": Calls(1.0e-6, 0.20e-6, 0.0, 16.7e-6, 5.0e-6, 0.4e-6, 5.0e-6, 0.50),
}


class Line(Struct, frozen=True):
    """A line of the estimate; ``usd`` is per month."""

    what: str
    usd: float


class UnpricedError(Exception):
    """A resource type without a price."""


def idle(settings: Settings, types: Mapping[str, int]) -> tuple[Line, ...]:
    """Return the cost lines of a month without a job; ``types`` counts the declared resources by type.

    Raises:
        UnpricedError: a resource type has no price.
    """
    there = [Line(_words(type_, count), PRICED[type_] * count) for type_, count in _billing(types)]
    ticks = MONTH_MINUTES / settings.reconcile.tick_minutes
    calls, memory_gb = CALLS[settings.cloud], settings.reconcile.memory_mb / 1024
    reads = READS + READS_A_POOL * len(settings.pools)
    lists = LISTS + bool(settings.channels)
    return (
        *there,
        *_metrics(settings, types),
        *_abroad(settings),
        Line(f"{ticks:,.0f} ticks", ticks * (calls.schedule + calls.request)),
        Line(f"the function, {TICK_S:g} s each", ticks * TICK_S * (calls.second + memory_gb * calls.gb_second)),
        Line(f"the bucket, {lists} listings, {reads} reads each", ticks * (lists * calls.listing + reads * calls.read)),
        Line("the note of its ticks", min(ticks, MONTH_MINUTES / NOTE_MINUTES) * calls.write),
        Line("the function's log", ticks * LOG_GB_A_TICK * calls.log_gb),
    )


def _metrics(settings: Settings, types: Mapping[str, int]) -> Iterable[Line]:
    if types.get(FILTER) and "ticks" in settings.alerts.about:
        yield Line("the metric of ticks", METRIC_USD)


def _abroad(settings: Settings) -> Iterable[Line]:
    images = {image for pool in settings.pools for image in pool.images.values() if image.startswith("ami-")}
    if images:
        yield Line(f"{len(images)} images in other regions", IMAGE_USD * len(images))
    if settings.kms_keys:
        yield Line(f"{len(settings.kms_keys)} keys in other regions", KEY_USD * len(settings.kms_keys))


def total(lines: Iterable[Line]) -> float:
    return sum(line.usd for line in lines)


def _billing(types: Mapping[str, int]) -> Iterable[tuple[str, int]]:
    ours = ("spotkeeper:", "pulumi-python:dynamic", "pulumi:")
    known = {type_: count for type_, count in types.items() if not type_.startswith(ours)}
    if unknown := sorted(known.keys() - PRICED.keys() - FREE - BOUGHT):
        raise UnpricedError(f"resource types without a price: add them to {__name__}: {', '.join(unknown)}")
    return sorted((type_, count) for type_, count in known.items() if type_ in PRICED)


def _words(type_: str, count: int) -> str:
    return f"{count} {type_.rpartition(':')[2]}"


def figures() -> list[dict[str, object]]:
    return [figure(cloud) for cloud in ("gcp", "aws")]


def figure(cloud: str) -> dict[str, object]:
    file = CHECKOUT / "infra" / "stacks" / f"Pulumi.example-{cloud}.yaml"
    declared = Counter(one.type for one in plan(file, None))
    lines = idle(read_stack_file(file, None, "").settings, declared)
    usd = round(total(lines), 2)
    return {
        "name": f"idle.{cloud}_usd_month",
        "value": usd,
        "unit": "USD",
        "goal": f"<= {GOAL_USD:g}",
        "holds": usd <= GOAL_USD,
        "against": "; ".join(f"{line.what} {line.usd:.2f}" for line in lines) + "; static machines bill beside it",
    }


if __name__ == "__main__":
    for each in figures():
        print(f"{each['name']} {each['value']}  ({each['against']})")
