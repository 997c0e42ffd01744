"""What a month of a stack costs while no job runs: a price for every resource that it declares.

List prices of us-central1 and us-east-1 (2026), without any free tier: an account may have more than one stack.
The ticks' reads and writes are counted, by sixty ticks of the real code over a bucket that counts; how long the
function works for one is assumed (``TICK_S``), and generously. A type without a price is an error, so that a resource
that is added is thought of.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

MINUTES = 43_800  # of a month
TICK_S = 0.6  # the function's time for an idle tick: a list of machines, and the reads counted below
LOG_KB = 0.5  # lines of a tick
KEPT_GB = 0.05  # bundles, function sources and ledgers in the bucket
IMAGES_GB = 0.4  # of the function, the newest two
Bill = Callable[[dict[str, Any], "Ticks"], float]


@dataclass(frozen=True)
class Ticks:
    """Of one tick, on average: requests that write or list (class A), and that read (class B)."""

    lists_and_writes: float
    reads: float

    @property
    def count(self) -> float:
        return MINUTES


def _nothing(_: dict[str, Any], __: Ticks) -> float:
    """Costs nothing by itself: rights, rules, and what bills by a use that an idle stack does not make."""
    return 0.0


def _each(usd_month: float) -> Bill:
    return lambda properties, ticks: usd_month


def _bucket(usd_a: float, usd_b: float, usd_gb: float) -> Bill:
    """Prices of 1,000 requests of either class, and of a GB-month."""
    return lambda _, t: KEPT_GB * usd_gb + t.count * (t.lists_and_writes * usd_a + t.reads * usd_b) / 1000


def _cloud_function(properties: dict[str, Any], ticks: Ticks) -> float:
    """Run's prices: a vCPU-second, a GiB-second, a million requests."""
    service = properties["serviceConfig"]
    gib = float(str(service["availableMemory"]).removesuffix("M")) / 1024
    busy_s = ticks.count * TICK_S
    return busy_s * (float(service["availableCpu"]) * 0.000024 + gib * 0.0000025) + ticks.count * 0.40e-6


def _lambda(properties: dict[str, Any], ticks: Ticks) -> float:
    gb = float(properties["memorySize"]) / 1024
    return ticks.count * (TICK_S * gb * 0.0000166667 + 0.20e-6)


def _static(_: dict[str, Any], __: Ticks) -> float:
    raise LookupError("an idle stack has no static nodes")


def _endpoint(properties: dict[str, Any], _: Ticks) -> float:
    """A gateway's is free; an interface's bills by the hour and zone."""
    if properties.get("vpcEndpointType", "Gateway") == "Gateway":
        return 0.0
    return 0.01 * 730 * max(1, len(properties.get("subnetIds", ())))


def _metric_alarm(properties: dict[str, Any], _: Ticks) -> float:
    """Ten cents for each metric that it looks at."""
    return 0.10 * max(1, sum("metric" in query for query in properties.get("metricQueries", ())))


PRICES: dict[str, Bill] = {
    "gcp:storage/bucket:Bucket": _bucket(0.005, 0.0004, 0.020),
    "gcp:cloudfunctionsv2/function:Function": _cloud_function,
    "gcp:cloudscheduler/job:Job": _each(0.10),
    "gcp:artifactregistry/repository:Repository": _each(IMAGES_GB * 0.10),
    "gcp:monitoring/alertPolicy:AlertPolicy": lambda p, _: 0.10 * len(p["conditions"]),
    "gcp:logging/projectSink:ProjectSink": lambda _, t: t.count * LOG_KB / 2**20 * 0.50,  # the function's own lines
    "aws:s3/bucket:Bucket": _bucket(0.005, 0.0004, 0.023),
    "aws:lambda/function:Function": _lambda,
    "aws:scheduler/schedule:Schedule": lambda _, t: t.count * 1.00e-6,
    "aws:cloudwatch/metricAlarm:MetricAlarm": _metric_alarm,
    "aws:cloudwatch/logMetricFilter:LogMetricFilter": _each(0.0),  # its metric bills when something happens
    "aws:cloudwatch/logGroup:LogGroup": lambda _, t: t.count * LOG_KB / 2**20 * 0.53,
    "aws:ec2/vpcEndpoint:VpcEndpoint": _endpoint,
    "aws:budgets/budget:Budget": _each(0.0),  # those without actions are free
    **dict.fromkeys(
        (
            "gcp:compute/instance:Instance", "gcp:compute/disk:Disk",
            "aws:ec2/instance:Instance", "aws:ebs/volume:Volume",
        ),
        _static,
    ),
}  # fmt: skip
FREE = frozenset({
    "gcp:billing/budget:Budget", "gcp:cloudrunv2/serviceIamMember:ServiceIamMember", "gcp:compute/firewall:Firewall",
    "gcp:compute/network:Network", "gcp:compute/regionInstanceTemplate:RegionInstanceTemplate",
    "gcp:compute/resourcePolicy:ResourcePolicy", "gcp:compute/subnetwork:Subnetwork",
    "gcp:monitoring/notificationChannel:NotificationChannel", "gcp:projects/iAMCustomRole:IAMCustomRole",
    "gcp:projects/iAMMember:IAMMember", "gcp:projects/serviceIdentity:ServiceIdentity",
    "gcp:pubsub/subscription:Subscription", "gcp:pubsub/subscriptionIAMMember:SubscriptionIAMMember",
    "gcp:pubsub/topic:Topic", "gcp:pubsub/topicIAMMember:TopicIAMMember", "gcp:serviceaccount/account:Account",
    "gcp:serviceaccount/iAMMember:IAMMember", "gcp:storage/bucketIAMMember:BucketIAMMember",
    "gcp:storage/bucketObject:BucketObject",
    "aws:cloudwatch/eventRule:EventRule", "aws:cloudwatch/eventTarget:EventTarget",
    "aws:ec2/egressOnlyInternetGateway:EgressOnlyInternetGateway", "aws:ec2/launchTemplate:LaunchTemplate",
    "aws:ec2/placementGroup:PlacementGroup", "aws:ec2/route:Route", "aws:ec2/routeTable:RouteTable",
    "aws:ec2/routeTableAssociation:RouteTableAssociation", "aws:ec2/securityGroup:SecurityGroup",
    "aws:ec2/subnet:Subnet", "aws:ec2/vpc:Vpc", "aws:iam/instanceProfile:InstanceProfile", "aws:iam/role:Role",
    "aws:iam/rolePolicy:RolePolicy", "aws:lambda/functionEventInvokeConfig:FunctionEventInvokeConfig",
    "aws:lambda/functionUrl:FunctionUrl", "aws:lambda/permission:Permission",
    "aws:s3/bucketLifecycleConfiguration:BucketLifecycleConfiguration", "aws:s3/bucketObjectv2:BucketObjectv2",
    "aws:s3/bucketOwnershipControls:BucketOwnershipControls", "aws:s3/bucketPolicy:BucketPolicy",
    "aws:s3/bucketPublicAccessBlock:BucketPublicAccessBlock", "aws:sns/topic:Topic",
    "aws:sns/topicSubscription:TopicSubscription", "aws:sqs/queue:Queue", "aws:sqs/queuePolicy:QueuePolicy",
    "aws:vpc/securityGroupEgressRule:SecurityGroupEgressRule",
    "aws:vpc/securityGroupIngressRule:SecurityGroupIngressRule",
})  # fmt: skip


def bill(cloud: str) -> Counter[str]:
    """USD a month of what the cloud's example declares, by kind of resource.

    Raises:
        LookupError: a resource of which nobody has said what it costs.
    """
    ticks = counted()
    out: Counter[str] = Counter()
    for declared in stack(cloud):
        price = PRICES.get(declared.type) or (_nothing if declared.type in FREE else None)
        if price is None:
            raise LookupError(f"{declared.type}: say in {Path(__file__).name} what it costs a month while nothing runs")
        out[declared.type.rsplit(":", 1)[-1]] += price(declared.properties, ticks)
    return out


@cache
def stack(cloud: str) -> tuple[Any, ...]:
    """What the example of a cloud declares, but for its static pools."""
    import json

    from spotkeeper.local.deploy.config import read_config

    from tests.infra.aws_cloud import AwsCloud
    from tests.infra.conftest import STACKS, run_program

    config = read_config(STACKS / f"Pulumi.example-{cloud}.yaml")
    pools = [pool for pool in json.loads(config["spotkeeper:pools"]) if pool["kind"] == "spot"]
    declared = run_program(
        "demo", {**config, "spotkeeper:pools": json.dumps(pools)}, AwsCloud() if cloud == "aws" else None
    )
    return tuple(each for each in declared.values() if each.type.startswith(("gcp:", "aws:")))


# --- what a tick asks of the bucket ------------------------------------------------------------


class _Counting:
    """``Objects`` that counts requests, one for each object and each list."""

    def __init__(self, behind: Any) -> None:
        self._behind = behind
        self.asked: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._behind, name)
        if name == "until":
            return lambda deadline: self

        def counted(*args: Any, **kwargs: Any) -> Any:
            many = name.endswith("_many") and len(args[0])
            reads = name in ("get", "get_many", "part", "refresh")
            self.asked["reads" if reads else "others"] += many or 1
            return call(*args, **kwargs)

        return counted


class _NoMachines:
    """A cloud in which nothing of this stack is, and that says nothing of prices."""

    def list(self, stack: str) -> Any:
        from spotkeeper.spec.cloud import Listing

        return Listing((), (), (), frozenset({"us-central1-a"}))

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


@cache
def counted() -> Ticks:
    """Averages over an hour of ticks, from which what happens every few minutes gets its share."""
    import msgspec
    from spotkeeper.reconcile.objects_sqlite import SqliteObjects
    from spotkeeper.reconcile.store import ObjectStore
    from spotkeeper.reconcile.sweep import tick
    from spotkeeper.spec.stack import PoolState, Price, StackState

    pool = PoolState("burst", "spot", "m", ("us-central1-a",), 8, 16, 2, 100, "pd", {"us-central1-a": Price(1.0, 0.3)})
    state = StackState("demo", "gcp", "p", "us-central1", "b", (pool,))

    @dataclass
    class Clock:
        t: float = 1_800_000_000.0

        def now(self) -> float:
            return self.t

    with tempfile.TemporaryDirectory() as folder:
        objects = _Counting(SqliteObjects(Path(folder) / "bucket.sqlite"))
        store, clock = ObjectStore(objects), Clock()
        store.put("stack/pools.json", msgspec.json.encode(state))
        objects.asked.clear()
        for _ in range(60):
            tick(store, _NoMachines(), clock)  # type: ignore[arg-type]
            clock.t += 60
    return Ticks(objects.asked["others"] / 60, objects.asked["reads"] / 60)
