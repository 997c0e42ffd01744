"""Which inputs the real providers cannot change in place, by resource type: a change of one replaces the resource.

From the providers' own schemas (what Terraform calls ForceNew), for the types that the program declares and no
others: a type that is not here is an error, so that a new one is looked up and not guessed. ``ALL``: nothing of it
can be changed. Replacement is create-before-delete where the provider names the thing itself, and the other way
round where the program gave it a name that cannot exist twice.
"""

from __future__ import annotations

ALL = frozenset({"*"})


def inputs(*names: str) -> frozenset[str]:
    return frozenset(names)


_MEMBER = ALL  # of any policy
REPLACES: dict[str, frozenset[str]] = {
    "gcp:artifactregistry/repository:Repository": inputs("repositoryId", "location", "format", "mode", "project"),
    "gcp:billing/budget:Budget": inputs("billingAccount"),
    "gcp:cloudfunctionsv2/function:Function": inputs("name", "location", "project"),
    "gcp:cloudrunv2/serviceIamMember:ServiceIamMember": _MEMBER,
    "gcp:cloudscheduler/job:Job": inputs("name", "region", "project"),
    # `size` too, when it shrinks: see `smaller` below
    "gcp:compute/disk:Disk": inputs("name", "zone", "type", "image", "snapshot", "project"),
    "gcp:compute/firewall:Firewall": inputs("name", "network", "direction", "project"),
    "gcp:compute/instance:Instance": inputs(
        "name", "zone", "bootDisk", "guestAccelerators", "networkInterfaces", "metadataStartupScript", "project"
    ),
    "gcp:compute/network:Network": inputs("name", "autoCreateSubnetworks", "networkProfile", "project"),
    "gcp:compute/regionInstanceTemplate:RegionInstanceTemplate": ALL,
    "gcp:compute/resourcePolicy:ResourcePolicy": inputs("name", "region", "groupPlacementPolicy", "project"),
    "gcp:compute/subnetwork:Subnetwork": inputs("name", "network", "region", "purpose", "project"),
    "gcp:logging/metric:Metric": inputs("name", "project"),
    "gcp:logging/projectSink:ProjectSink": inputs("name", "uniqueWriterIdentity", "project"),
    "gcp:monitoring/alertPolicy:AlertPolicy": inputs("project"),
    "gcp:monitoring/notificationChannel:NotificationChannel": inputs("type", "project"),
    "gcp:projects/iAMCustomRole:IAMCustomRole": inputs("roleId", "project"),
    "gcp:projects/iAMMember:IAMMember": _MEMBER,
    "gcp:projects/serviceIdentity:ServiceIdentity": ALL,
    "gcp:pubsub/subscription:Subscription": inputs("name", "topic", "filter", "enableMessageOrdering", "project"),
    "gcp:pubsub/subscriptionIAMMember:SubscriptionIAMMember": _MEMBER,
    "gcp:pubsub/topic:Topic": inputs("name", "project"),
    "gcp:pubsub/topicIAMMember:TopicIAMMember": _MEMBER,
    "gcp:secretmanager/secretIamMember:SecretIamMember": _MEMBER,
    "gcp:serviceaccount/account:Account": inputs("accountId", "project"),
    "gcp:serviceaccount/iAMMember:IAMMember": _MEMBER,
    "gcp:storage/bucket:Bucket": inputs("name", "location", "project"),
    "gcp:storage/bucketIAMMember:BucketIAMMember": _MEMBER,
    "gcp:storage/bucketObject:BucketObject": inputs("bucket", "name", "source", "contentType"),
    "aws:budgets/budget:Budget": inputs("name"),
    "aws:cloudwatch/eventRule:EventRule": inputs("name"),
    "aws:cloudwatch/eventTarget:EventTarget": inputs("rule", "targetId"),
    "aws:cloudwatch/logGroup:LogGroup": inputs("name"),
    "aws:cloudwatch/logMetricFilter:LogMetricFilter": inputs("name", "logGroupName"),
    "aws:cloudwatch/metricAlarm:MetricAlarm": inputs("name"),
    "aws:ebs/volume:Volume": inputs("availabilityZone", "encrypted", "kmsKeyId", "snapshotId"),
    "aws:ec2/egressOnlyInternetGateway:EgressOnlyInternetGateway": inputs("vpcId"),
    "aws:ec2/instance:Instance": inputs("subnetId", "availabilityZone", "ami", "placementGroup"),
    "aws:ec2/launchTemplate:LaunchTemplate": inputs("name"),  # what else changes is a new version of it
    "aws:ec2/placementGroup:PlacementGroup": inputs("name", "strategy"),
    "aws:ec2/route:Route": inputs("routeTableId", "destinationIpv6CidrBlock"),
    "aws:ec2/routeTable:RouteTable": inputs("vpcId"),
    "aws:ec2/routeTableAssociation:RouteTableAssociation": inputs("subnetId"),
    "aws:ec2/securityGroup:SecurityGroup": inputs("name", "description", "vpcId"),
    "aws:ec2/subnet:Subnet": inputs("vpcId", "availabilityZone", "cidrBlock"),
    "aws:ec2/volumeAttachment:VolumeAttachment": inputs("deviceName", "instanceId", "volumeId"),
    "aws:ec2/vpc:Vpc": inputs("cidrBlock"),
    "aws:ec2/vpcEndpoint:VpcEndpoint": inputs("vpcId", "serviceName", "vpcEndpointType"),
    "aws:iam/instanceProfile:InstanceProfile": inputs("name"),
    "aws:iam/role:Role": inputs("name"),
    "aws:iam/rolePolicy:RolePolicy": inputs("name", "role"),
    "aws:lambda/function:Function": inputs("name"),
    "aws:lambda/functionEventInvokeConfig:FunctionEventInvokeConfig": inputs("functionName"),
    "aws:lambda/functionUrl:FunctionUrl": inputs("functionName"),
    "aws:lambda/permission:Permission": ALL,
    "aws:s3/bucket:Bucket": inputs("bucket"),
    "aws:s3/bucketLifecycleConfiguration:BucketLifecycleConfiguration": inputs("bucket"),
    "aws:s3/bucketObjectv2:BucketObjectv2": inputs("bucket", "key"),
    "aws:s3/bucketOwnershipControls:BucketOwnershipControls": inputs("bucket"),
    "aws:s3/bucketPolicy:BucketPolicy": inputs("bucket"),
    "aws:s3/bucketPublicAccessBlock:BucketPublicAccessBlock": inputs("bucket"),
    "aws:scheduler/schedule:Schedule": inputs("name"),
    "aws:sns/topic:Topic": inputs("name"),
    "aws:sns/topicSubscription:TopicSubscription": inputs("topic", "protocol", "endpoint"),
    "aws:sqs/queue:Queue": inputs("name"),
    "aws:sqs/queuePolicy:QueuePolicy": inputs("queueUrl"),
    "aws:vpc/securityGroupEgressRule:SecurityGroupEgressRule": inputs("securityGroupId"),
    "aws:vpc/securityGroupIngressRule:SecurityGroupIngressRule": inputs("securityGroupId"),
}
# A file is known to the engine by its content: the path to it is none of the provider's business.
BY_CONTENT = "source"
_PLACE = inputs("region")  # of each resource of AWS that has one, whatever its schema says (upstream's interceptors)
_GROWS = {"gcp:compute/disk:Disk": "size", "aws:ebs/volume:Volume": "size"}
_NAMES = ("name", "bucket", "key", "repositoryId", "accountId", "roleId")


def replaces(type_: str, old: dict[str, object], new: dict[str, object], changed: list[str]) -> list[str]:
    """Those of the changed inputs that replace the resource.

    Raises:
        KeyError: a type that nobody has looked up.
    """
    fixed = REPLACES[type_] | (_PLACE if type_.startswith("aws:") else frozenset())
    found = [key for key in changed if fixed >= ALL or key in fixed]
    grows = _GROWS.get(type_)
    if grows in changed and float(str(new.get(grows, 0))) < float(str(old.get(grows, 0))):
        found.append(str(grows))
    return found


def delete_first(new: dict[str, object], changed: list[str]) -> bool:
    """A name that the program chose, and that stays, cannot be had twice."""
    return any(key in new and key not in changed for key in _NAMES)
