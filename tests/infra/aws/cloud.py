"""AWS's provider in place of itself: what it would compute of each resource that the program declares on AWS."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from pulumi.runtime.mocks import MockCallArgs, MockResourceArgs, Mocks

from spotkeeper.local.deploy.monitor import plain

ACCOUNT, REGION = "123456789012", "us-east-1"
# Type -> what its ids begin with. A type that is missing has its name for an id.
IDS = {
    "aws:ebs/volume:Volume": "vol",
    "aws:ec2/instance:Instance": "i",
    "aws:ec2/launchTemplate:LaunchTemplate": "lt",
    "aws:ec2/routeTable:RouteTable": "rtb",
    "aws:ec2/securityGroup:SecurityGroup": "sg",
    "aws:ec2/subnet:Subnet": "subnet",
    "aws:ec2/vpc:Vpc": "vpc",
}
# Type -> ARN; ``{}`` is the thing's name in AWS.
ARNS = {
    "aws:cloudwatch/eventRule:EventRule": f"arn:aws:events:{REGION}:{ACCOUNT}:rule/{{}}",
    "aws:cloudwatch/logGroup:LogGroup": f"arn:aws:logs:{REGION}:{ACCOUNT}:log-group:{{}}",
    "aws:iam/instanceProfile:InstanceProfile": f"arn:aws:iam::{ACCOUNT}:instance-profile/{{}}",
    "aws:iam/role:Role": f"arn:aws:iam::{ACCOUNT}:role/{{}}",
    "aws:lambda/function:Function": f"arn:aws:lambda:{REGION}:{ACCOUNT}:function:{{}}",
    "aws:s3/bucket:Bucket": "arn:aws:s3:::{}",
    "aws:sns/topic:Topic": f"arn:aws:sns:{REGION}:{ACCOUNT}:{{}}",
    "aws:sqs/queue:Queue": f"arn:aws:sqs:{REGION}:{ACCOUNT}:{{}}",
}
MORE: Mapping[str, Mapping[str, object]] = {
    "aws:ec2/launchTemplate:LaunchTemplate": {"latestVersion": 7},
    "aws:ec2/vpc:Vpc": {"ipv6CidrBlock": "2600:1f18:aa:bb00::/56"},
    "aws:lambda/functionUrl:FunctionUrl": {"functionUrl": "https://abcdefghij.lambda-url.us-east-1.on.aws/"},
    "aws:sqs/queue:Queue": {"url": "https://sqs.us-east-1.amazonaws.com/123456789012/dead"},
    "pulumi:pulumi:StackReference": {
        "outputs": {
            "vpc": "vpc-0aaaaaaaa",
            "vpcs": {"us-west-2": "vpc-0bbbbbbbb"},
            "subnets": {f"{REGION}{zone}": f"subnet-0{zone * 8}" for zone in "abc"}
            | {"us-west-2b": "subnet-0dddddddd"},
        }
    },
}


# Lambda guide, "Creating and managing Lambda function URLs".
WITHOUT_URLS = (
    "ap-south-2",
    "ap-southeast-4",
    "ca-west-1",
    "eu-central-2",
    "eu-south-2",
    "il-central-1",
    "me-central-1",
)


class AwsCloud(Mocks):
    """Refuses what AWS refuses of a role that it has just made, and in regions that lack something."""

    def __init__(self) -> None:
        self._region = ""
        self._fresh: set[str] = set()  # ARNs of the roles that this very `up` makes

    def call(self, args: MockCallArgs) -> tuple[dict[str, Any], None]:
        raise AssertionError(f"the program asks a cloud: {args.token}")

    def new_resource(self, args: MockResourceArgs) -> tuple[str | None, dict[str, Any]]:
        if args.custom is False:  # a stack that is only referred to has none
            return "", dict(args.inputs)
        inputs = plain(args.inputs)
        if args.typ == "pulumi:providers:aws":
            self._region = str(inputs["region"])
        if args.typ == "aws:lambda/functionUrl:FunctionUrl" and self._region in WITHOUT_URLS:
            raise AssertionError(f"{args.name}: AccessDeniedException: Unable to determine service/operation name")
        if inputs.get("principal") in self._fresh:  # other services learn of a new role within seconds, or minutes
            raise AssertionError(
                f"{args.typ} {args.name}: InvalidParameterValueException: The provided principal was invalid"
            )
        name = str(inputs.get("name") or inputs.get("bucket") or inputs.get("key") or args.name)
        made: dict[str, Any] = {"name": name, **MORE.get(args.typ, {})}
        if args.typ in ARNS:
            made["arn"] = ARNS[args.typ].format(name)
        if args.typ == "aws:iam/role:Role":
            self._fresh.add(str(made["arn"]))
        given = {key: value for key, value in args.inputs.items() if value is not None}
        return identity(args.typ, args.name), {**made, **given}


def identity(type_: str, name: str) -> str:
    prefix = IDS.get(type_)
    return f"{prefix}-0{hashlib.sha256(name.encode()).hexdigest()[:16]}" if prefix else name
