"""A stack in two regions of AWS: what is declared in each, who may do what there, and that nothing at home changes."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from msgspec.structs import replace

from bench.service import idle
from infra.aws.rights import document, function_rights
from infra.catalog import zones_of
from infra.settings.aws import MOST_REGIONS
from infra.settings.model import Settings
from infra.settings.read import from_config
from spotkeeper.contract import codec
from spotkeeper.contract.stack import Model, StackState
from spotkeeper.local.deploy.config import read_config
from tests.contract.stack_rules import check_stack
from tests.infra.aws.cloud import AwsCloud
from tests.infra.aws.judge import Ask, allowed
from tests.infra.conftest import STACKS, Program, run_program
from tests.infra.declaration import DRAIN, REGIONS, before, of, one
from tests.infra.policies import broken
from tests.reconcile.clouds.ec2 import iam

pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated in favor of:DeprecationWarning")
NAME, HOME, ABROAD = "example-aws", "us-east-1", "us-west-2"
PERSON = "arn:aws:iam::123456789012:role/ml"
IMAGE = "ami-0fffffffffffffff1"
POOLS = "aws:s3/bucketObjectv2:BucketObjectv2::pools"
TEMPLATE = "aws:ec2/launchTemplate:LaunchTemplate"
RULE, TARGET = "aws:cloudwatch/eventRule:EventRule", "aws:cloudwatch/eventTarget:EventTarget"
RIGHTS = "aws:iam/rolePolicy:RolePolicy::rights-fn"


def key_of(region: str) -> str:
    return f"arn:aws:kms:{region}:123456789012:key/1234abcd-12ab-34cd-56ef-1234567890ab"


def config(*regions: str, **more: Any) -> dict[str, str]:
    """The example with these regions, keys and shells; the second pool is in each zone, the third one at home."""
    found = read_config(STACKS / f"Pulumi.{NAME}.yaml")
    pools = json.loads(found["spotkeeper:pools"])
    pools[2] |= {"zones": ["us-east-1b", *(f"{region}b" for region in regions[1:])]}
    given = {
        "zones": ["us-east-1a", "us-east-1b", *(f"{region}b" for region in regions[1:])],
        "regions": list(regions),
        "images": dict.fromkeys(regions[1:], IMAGE),
        "kms_key": key_of(HOME),
        "kms_keys": {region: key_of(region) for region in regions[1:]},
        "ssh": [PERSON],
        "pools": pools,
        **more,
    }
    texts = {
        f"spotkeeper:{key}": value if isinstance(value, str) else json.dumps(value) for key, value in given.items()
    }
    return {**found, "spotkeeper:region": "", **texts}


def declare(*regions: str, **more: Any) -> Program:
    return run_program(NAME, config(*regions, **more), AwsCloud())


@pytest.fixture(scope="module")
def home() -> Program:
    return declare(HOME)


@pytest.fixture(scope="module")
def both() -> Program:
    return declare(HOME, ABROAD)


@pytest.fixture(scope="module")
def settings() -> Settings:
    return from_config(config(HOME, ABROAD), NAME)


@pytest.fixture(scope="module")
def state(both: Program) -> StackState:
    return check_stack(codec.decode(both[POOLS].properties["content"], StackState))


STATIC = {"aws:ec2/instance:Instance", "aws:ec2/volumeAttachment:VolumeAttachment", "aws:ebs/volume:Volume"}


def test_another_region_adds_resources_and_changes_none_at_home(home: Program, both: Program) -> None:
    """Changed are the document that the function reads, what refuses and drains regions, and rights."""
    changed = {key for key, found in home.items() if both[key].properties != found.properties}
    rights = {f"aws:iam/rolePolicy:RolePolicy::rights-{key}" for key in ("fn", "sh", "vm-ssh")}
    assert changed == {POOLS, REGIONS, DRAIN, *rights}
    added = [both[key] for key in both if key not in home]
    elsewhere = [each for each in added if each.properties.get("region") != ABROAD]
    assert {each.key for each in elsewhere} == {
        "aws:iam/role:Role::role-ev",
        "aws:iam/rolePolicy:RolePolicy::rights-ev",
    }
    named = {each.type for each in home.values() if each.type.startswith("aws:") and "region" in each.properties}
    assert named == STATIC, "the provider keeps a region that is left out later: these may change theirs"
    assert {each.properties["region"] for type_ in STATIC for each in of(home, type_)} == {HOME}
    assert broken(both, "dev") == []


def test_all_that_a_machine_needs_is_in_its_region(both: Program) -> None:
    abroad = Counter(each.type.rsplit(":", 1)[1] for each in both.values() if each.properties.get("region") == ABROAD)
    assert abroad == {
        **{"Vpc": 1, "RouteTable": 1, "Route": 1, "EgressOnlyInternetGateway": 1, "VpcEndpoint": 1},
        **{"Subnet": 1, "RouteTableAssociation": 1, "SecurityGroup": 1, "SecurityGroupIngressRule": 1},
        **{"SecurityGroupEgressRule": 3, "LaunchTemplate": 3, "PlacementGroup": 2, "Grant": 1},
        **{"EventRule": 3, "EventTarget": 3, "LogGroup": 1, "Document": 1},
    }
    near, far = one(both, TEMPLATE, f"sk-{NAME}_burst-spot"), one(both, TEMPLATE, f"sk-{NAME}_burst-spot-{ABROAD}")
    differs = {key for key in {*near, *far} if near.get(key) != far.get(key)}
    assert differs == {"region", "imageId", "vpcSecurityGroupIds", "blockDeviceMappings", "tagSpecifications"}
    assert far["imageId"] == IMAGE
    assert far["blockDeviceMappings"][0]["ebs"]["kmsKeyId"] == key_of(ABROAD)
    assert one(both, "aws:kms/grant:Grant", f"spot-disks-{ABROAD}")["keyId"] == key_of(ABROAD)


def test_a_static_machine_abroad_has_its_template_disk_and_group_there() -> None:
    pools = json.loads(read_config(STACKS / f"Pulumi.{NAME}.yaml")["spotkeeper:pools"])[:1]
    pools[0] |= {"zones": [f"{ABROAD}b"], "placement": {}}
    found = declare(HOME, ABROAD, pools=pools)
    kinds = ("Instance", "LaunchTemplate", "PlacementGroup", "Volume", "VolumeAttachment")
    named = {each.type.rsplit(":", 1)[1]: each.properties for each in found.values()}
    assert {kind: named[kind]["region"] for kind in kinds} == dict.fromkeys(kinds, ABROAD)
    assert named["LaunchTemplate"]["imageId"] == IMAGE and named["Volume"]["kmsKeyId"] == key_of(ABROAD)
    assert named["Instance"]["tags"]["sk-storage"] == f"https://s3.dualstack.{HOME}.amazonaws.com"


def test_a_public_network_has_a_way_out_in_each_region() -> None:
    pools = json.loads(read_config(STACKS / f"Pulumi.{NAME}.yaml")["spotkeeper:pools"])[:1]
    network = {"cidr": "10.40.0.0/16", "public_ip": True}
    found = declare(HOME, ABROAD, pools=pools, network=network)
    ways = ("aws:ec2/internetGateway:InternetGateway", "aws:ec2/route:Route")
    regions = {each.name: each.properties.get("region") for kind in ways for each in of(found, kind)}
    assert regions == {
        **dict.fromkeys(("gateway", "out-4", "out-6"), None),
        **dict.fromkeys((f"gateway-{ABROAD}", f"out-4-{ABROAD}", f"out-6-{ABROAD}"), ABROAD),
    }


def test_machines_abroad_reach_the_bucket_by_ipv6_and_the_function_by_its_url(both: Program, state: StackState) -> None:
    """S3's gateway endpoint serves only buckets of its own region, and there is no way out by IPv4."""

    def tags(template: str) -> dict[str, str]:
        (found,) = [
            each for each in one(both, TEMPLATE, template)["tagSpecifications"] if each["resourceType"] == "instance"
        ]
        return dict(found["tags"])

    near, far = tags(f"sk-{NAME}_burst-spot"), tags(f"sk-{NAME}_burst-spot-{ABROAD}")
    assert far == {**near, "sk-storage": f"https://s3.dualstack.{HOME}.amazonaws.com"}
    assert ".lambda-url.us-east-1.on.aws" in far["sk-function"]
    burst = state.pool("burst")
    assert burst is not None and burst.abroad[ABROAD].tags == {"sk-storage": far["sk-storage"]}


def test_the_function_finds_what_each_zone_has(state: StackState, home: Program) -> None:
    assert (state.region, state.regions) == (HOME, (HOME, ABROAD))
    burst, fabric = state.pool("burst"), state.pool("fabric")
    assert burst is not None and fabric is not None
    assert (
        set(burst.templates)
        == set(burst.template_versions)
        == {*("spot", "on-demand", f"{ABROAD}/spot", f"{ABROAD}/on-demand")}
    )
    assert len({state.template("burst", Model.SPOT, zone) for zone in ("us-east-1a", "us-west-2b")}) == 2
    assert state.template("burst", Model.SPOT, "us-east-1a") == state.template("burst", Model.SPOT, "us-east-1b")
    assert set(burst.subnets) == set(burst.zones) == set(burst.placement)
    assert (burst.disk_key_in(HOME), burst.disk_key_in(ABROAD)) == (key_of(HOME), key_of(ABROAD))
    assert len({*fabric.security_groups, *fabric.abroad[ABROAD].security_groups}) == 2
    alone = codec.decode(home[POOLS].properties["content"], StackState)
    assert alone.regions == () and all(pool.abroad == {} for pool in alone.pools)


def test_events_abroad_go_to_the_bus_at_home_by_a_role_that_can_do_nothing_else(both: Program) -> None:
    for key in ("interruption", "rebalance", "state"):
        near, far = one(both, RULE, key), one(both, RULE, f"{key}-{ABROAD}")
        assert {name for name in far if near.get(name) != far[name]} == {"region"}
        assert one(both, TARGET, f"{key}-{ABROAD}")["arn"] == f"arn:aws:events:{HOME}:123456789012:event-bus/default"
        assert one(both, TARGET, f"{key}-{ABROAD}")["roleArn"].endswith(f":role/sk-{NAME}-ev")
    (trusted,) = json.loads(one(both, "aws:iam/role:Role", "role-ev")["assumeRolePolicy"])["Statement"]
    assert trusted["Principal"] == {"Service": "events.amazonaws.com"}
    assert trusted["Condition"] == {"StringEquals": {"aws:SourceAccount": "123456789012"}}
    (may,) = json.loads(one(both, "aws:iam/rolePolicy:RolePolicy", "rights-ev")["policy"])["Statement"]
    assert (may["Action"], may["Resource"]) == (
        ["events:PutEvents"], [f"arn:aws:events:{HOME}:123456789012:event-bus/default"]
    )  # fmt: skip


def test_another_home_moves_the_function_with_its_triggers_and_alarms_and_nothing_else(both: Program) -> None:
    """Networks, templates' regions, disks, bucket and drain stay. The function's rights follow it."""
    moved = declare(HOME, ABROAD, home=ABROAD)
    went, came = both.keys() - moved.keys(), moved.keys() - both.keys()
    assert came == {f"{key}-{ABROAD}" for key in went}, "made anew before the old ones are deleted"
    assert not any("region" in both[key].properties for key in went)
    assert {moved[key].properties["region"] for key in came} == {ABROAD}
    assert {key.split("::")[0].rsplit(":", 1)[1] for key in went} == {
        *("Function", "FunctionUrl", "FunctionEventInvokeConfig", "Permission", "LogGroup", "Queue", "QueuePolicy"),
        *("Schedule", "Topic", "TopicSubscription", "MetricAlarm", "LogMetricFilter"),
    }
    changed = {key for key in both.keys() & moved.keys() if moved[key].properties != both[key].properties}
    assert all(moved[key].properties.get("region") == both[key].properties.get("region") for key in changed)
    stay = {key.split("::")[0].rsplit(":", 1)[1] for key in changed}
    assert stay <= {"BucketObjectv2", "EventTarget", "RolePolicy", "Instance", "LaunchTemplate"}, stay
    function = one(moved, "aws:lambda/function:Function", f"function-{ABROAD}")
    assert "s3Bucket" not in function and function["code"], "Lambda reads code from buckets of its own region only"
    assert function["environment"]["variables"]["SPOTKEEPER_BUCKET_REGION"] == HOME
    for key in ("interruption", "rebalance", "state"):
        back, here = one(moved, TARGET, key), one(moved, TARGET, f"{key}-{ABROAD}")
        assert back["arn"] == f"arn:aws:events:{ABROAD}:123456789012:event-bus/default" and "region" not in back
        assert "event-bus" not in here["arn"] and here["region"] == ABROAD
        lost = before(moved, f"{TARGET}::{key}")
        assert f"aws:scheduler/schedule:Schedule::tick-{ABROAD}" in lost, "a region that is lost cannot stop the rest"
    for role in ("fn", "ck", "vm", "ev"):
        policy = one(moved, "aws:iam/rolePolicy:RolePolicy", f"rights-{role}")["policy"]
        assert not any(f":{service}:{HOME}:" in policy for service in ("logs", "lambda", "sqs", "events")), role
    after = check_stack(codec.decode(moved[POOLS].properties["content"], StackState))
    assert (after.region, after.regions, after.bucket_regions) == (ABROAD, (HOME, ABROAD), (HOME,))
    assert after.template("burst", Model.SPOT, "us-east-1b") != after.template("burst", Model.SPOT, "us-west-2b")


def test_a_destroy_drains_all_regions_before_it_deletes_what_machines_abroad_need(both: Program) -> None:
    assert both[DRAIN].properties["regions"] == [HOME, ABROAD]
    after = {key for key, found in both.items() if found.type in (RULE, TARGET)}
    abroad = {key for key, found in both.items() if found.properties.get("region") == ABROAD} - after
    assert abroad <= before(both, DRAIN)


def test_another_region_costs_an_image_and_a_key_while_idle(home: Program, both: Program, settings: Settings) -> None:
    one_region, two = (
        idle.total(idle.idle(made, Counter(each.type for each in found.values())))
        for made, found in ((from_config(config(HOME), NAME), home), (settings, both))
    )
    assert two - one_region == pytest.approx(idle.IMAGE_USD + idle.KEY_USD)
    assert two - idle.KEY_USD <= idle.GOAL_USD, "without a customer key"


NETWORK = {
    "vpc": "vpc-0aaaaaaaa",
    "vpcs": {ABROAD: "vpc-0bbbbbbbb"},
    "subnets": {"us-east-1a": "subnet-0aaaaaaaa", "us-east-1b": "subnet-0bbbbbbbb", "us-west-2b": "subnet-0dddddddd"},
}


@pytest.mark.parametrize("network", [NETWORK, {"from_stack": "organization/net/prod"}], ids=["named", "of a stack"])
def test_an_existing_network_has_one_vpc_in_each_region(network: dict[str, Any]) -> None:
    joined = declare(HOME, ABROAD, network=network)
    groups = [each.properties for each in of(joined, "aws:ec2/securityGroup:SecurityGroup")]
    assert {each.get("region"): each["vpcId"] for each in groups} == {None: "vpc-0aaaaaaaa", ABROAD: "vpc-0bbbbbbbb"}
    assert not of(joined, "aws:ec2/vpc:Vpc")
    burst = codec.decode(joined[POOLS].properties["content"], StackState).pool("burst")
    assert burst is not None and burst.subnets["us-west-2b"] == "subnet-0dddddddd"


# --- rights --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def function(settings: Settings) -> str:
    subnets = {"us-east-1a": "subnet-0aa", "us-west-2b": "subnet-0cc"}
    return document(function_rights(settings, subnets, {HOME: "sg-0aa", ABROAD: "sg-0cc"}))


STACK_TAG, JOB_TAG = "sk-stack", "sk-job"
MARKED = {f"aws:RequestTag/{STACK_TAG}": NAME, f"aws:RequestTag/{JOB_TAG}": "abcd2345"}
OURS = {f"aws:ResourceTag/{STACK_TAG}": NAME, f"aws:ResourceTag/{JOB_TAG}": "abcd2345"}


def may(policy: str, action: str, resource: str, region: str, context: dict[str, str] | None = None) -> bool:
    return allowed(policy, Ask(action, resource, {"aws:RequestedRegion": region, **(context or {})}))


@pytest.mark.parametrize("region", [HOME, ABROAD])
def test_the_function_may_do_in_each_region_what_it_may_at_home(function: str, region: str) -> None:
    ec2 = f"arn:aws:ec2:{region}"
    launch = MARKED | {
        "ec2:InstanceType": "g5.12xlarge",
        "ec2:InstanceProfile": f"arn:aws:iam::123456789012:instance-profile/sk-{NAME}-vm",
        "ec2:MetadataHttpTokens": "required",
        "ec2:LaunchTemplate": f"{ec2}:123456789012:launch-template/lt-0123456789abcdef0",
    }
    assert may(function, "ec2:RunInstances", f"{ec2}:123456789012:instance/*", region, launch)
    assert may(
        function, "ec2:CreateVolume", f"{ec2}:123456789012:volume/*", region, {**MARKED, "ec2:Encrypted": "true"}
    )
    assert may(function, "ec2:TerminateInstances", f"{ec2}:123456789012:instance/i-0123", region, OURS)
    assert not may(function, "ec2:TerminateInstances", f"{ec2}:123456789012:instance/i-0123", region)
    key = {"kms:ViaService": f"ec2.{region}.amazonaws.com"}
    assert may(function, "kms:GenerateDataKey", key_of(region), region, key)


def test_the_functions_rights_equal_its_adapters_calls(function: str) -> None:
    statements = [each for each in json.loads(function)["Statement"] if each["Effect"] == "Allow"]
    own = {action for each in statements for action in each["Action"] if action.partition(":")[0] in ("ec2", "iam")}
    assert own == {*iam.ACTIONS, *iam.COPIES}


def test_the_function_may_copy_only_its_own_snapshots(function: str, home: Program) -> None:
    there, copy = f"arn:aws:ec2:{HOME}::snapshot/snap-0123", f"arn:aws:ec2:{ABROAD}::snapshot/*"
    assert may(function, "ec2:CopySnapshot", there, HOME, OURS)
    assert may(function, "ec2:CopySnapshot", copy, ABROAD, MARKED)
    assert not may(function, "ec2:CopySnapshot", there, HOME), "another's data"
    assert not may(function, "ec2:CopySnapshot", copy, ABROAD), "a copy that no drain would find"
    made = {**MARKED, "ec2:CreateAction": "CopySnapshot"}
    assert may(function, "ec2:CreateTags", f"arn:aws:ec2:{ABROAD}::snapshot/snap-0123", ABROAD, made)
    assert "CopySnapshot" not in home[RIGHTS].properties["policy"]


def test_the_function_may_measure_only_its_own_warm_copies(function: str, settings: Settings) -> None:
    """And only where there are any."""
    action, snapshot = "ebs:ListChangedBlocks", f"arn:aws:ec2:{HOME}::snapshot/snap-0123"
    assert not may(function, action, snapshot, HOME, OURS)
    paid = replace(settings, limits=replace(settings.limits, warm_copies_usd=20.0))
    warm = document(function_rights(paid, {"us-east-1a": "subnet-0aa"}, {HOME: "sg-0aa", ABROAD: "sg-0cc"}))
    assert may(warm, action, snapshot, HOME, OURS)
    assert not may(warm, action, snapshot, HOME), "another's data"
    assert not may(warm, "ebs:GetSnapshotBlock", snapshot, HOME, OURS)


def test_the_function_may_do_nothing_in_another_region_or_network(function: str) -> None:
    other = "arn:aws:ec2:eu-west-1"
    assert not may(function, "ec2:TerminateInstances", f"{other}:123456789012:instance/i-0123", "eu-west-1", OURS)
    assert not may(function, "ec2:DescribeInstances", "*", "eu-west-1")
    assert may(function, "ec2:DescribeInstances", "*", ABROAD)
    run, place = "ec2:RunInstances", f"arn:aws:ec2:{ABROAD}:123456789012"
    assert may(function, run, f"{place}:subnet/subnet-0cc".replace("::", ":"), ABROAD)
    assert not may(function, run, f"{place}:subnet/subnet-0aa", ABROAD), "that id is of the home region"
    assert not may(function, run, f"{place}:security-group/sg-0aa", ABROAD)


def test_rights_in_the_most_regions_are_within_awss_limit() -> None:
    """In all their zones, with a key in each. A role's inline policies may have 10,240 characters."""
    regions = ("us-east-1", "us-west-2", "us-east-2", "eu-west-1", "eu-central-1", "eu-north-1")[:MOST_REGIONS]
    many = from_config(config(*regions), NAME)
    subnets = {zone: f"subnet-{index:017x}" for region in regions for index, zone in enumerate(zones_of(region))}
    assert len(document(function_rights(many, subnets, dict.fromkeys(regions, "sg-0123456789abcdef0")))) <= 10_240
