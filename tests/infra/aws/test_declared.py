"""What the program declares on AWS, read as a reviewer would: the network, machines, disks, triggers, destruction."""

from __future__ import annotations

import base64
import dataclasses
import ipaddress
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pulumi
import pytest
from msgspec.structs import replace

from bench.service import idle
from infra import boot
from infra.aws import alerts
from infra.settings.read import from_config
from spotkeeper.contract import codec
from spotkeeper.contract.cloud import CreateDisk, InsertVm
from spotkeeper.contract.stack import Model, StackState
from spotkeeper.local.deploy.config import read_config
from spotkeeper.reconcile.clouds.ec2 import schema
from spotkeeper.reconcile.clouds.ec2.actions import DEVICE
from spotkeeper.reconcile.service import aws_lambda
from tests.contract.stack_rules import check_stack
from tests.infra import golden
from tests.infra.aws import terraform as aws_terraform
from tests.infra.aws.cloud import WITHOUT_URLS, AwsCloud, identity
from tests.infra.aws.judge import judge, operation, pascal
from tests.infra.conftest import STACKS, Declared, Program, run_program
from tests.infra.declaration import DRAIN, Declaration, before, of, one
from tests.infra.policies import broken
from tests.infra.test_idle import costs

pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated in favor of:DeprecationWarning")  # as AWS's library loads
NAME = "example-aws"
KEY = "arn:aws:kms:us-east-1:123456789012:key/1234abcd-12ab-34cd-56ef-1234567890ab"
PERSON = "arn:aws:iam::123456789012:user/kim"

TEMPLATE = "aws:ec2/launchTemplate:LaunchTemplate"
INSTANCE = "aws:ec2/instance:Instance"
GROUP = "aws:ec2/placementGroup:PlacementGroup"
SUBNET = "aws:ec2/subnet:Subnet"
FUNCTION = "aws:lambda/function:Function::function"
PERMISSION = "aws:lambda/permission:Permission"
TICK = "aws:scheduler/schedule:Schedule::tick"
TARGET = "aws:cloudwatch/eventTarget:EventTarget"
ALARM = "aws:cloudwatch/metricAlarm:MetricAlarm"
ROUTES = [f"{TARGET}::{key}" for key in ("interruption", "rebalance", "state")]


@pytest.fixture(scope="module")
def config() -> dict[str, str]:
    return read_config(STACKS / f"Pulumi.{NAME}.yaml")


@pytest.fixture(scope="module")
def example(config: dict[str, str]) -> Program:
    return declare(config)


def declare(config: dict[str, str]) -> Program:
    return run_program(NAME, config, AwsCloud())


def test_every_value_and_option_is_as_reviewed(
    example: Declaration, joined: Declaration, config: dict[str, str]
) -> None:
    """Changed on purpose? ``python -m tests.infra.golden``, then review the difference."""
    assert golden.text(example) == golden.golden("aws")
    assert golden.difference(example, joined) == golden.golden("aws-joined")
    assert golden.difference(example, declare(with_shells(config))) == golden.golden("aws-shells")


@pytest.fixture(scope="module")
def state(example: Declaration) -> StackState:
    return codec.decode(one(example, "aws:s3/bucketObjectv2:BucketObjectv2", "pools")["content"], StackState)


@pytest.fixture(scope="module")
def joined(config: dict[str, str]) -> Declaration:
    return declare(in_another_network(config))


def in_another_network(config: dict[str, str]) -> dict[str, str]:
    """The same stack in a network that another stack made, where ticks are rarer and nobody is told of anything."""
    changed = {
        "spotkeeper:bucket": '{"on_destroy": "retain"}',
        "spotkeeper:network": '{"from_stack": "organization/net/prod", "addresses": ["100.64.0.0/10"]}',
        "spotkeeper:service_linked_role": "true",
        "spotkeeper:kms_key": KEY,
        "spotkeeper:reconcile": json.dumps({**json.loads(config["spotkeeper:reconcile"]), "tick_minutes": 2}),
        "spotkeeper:submitters": json.dumps([PERSON]),
        "aws:profile": "acme",
    }
    dropped = ("spotkeeper:alerts", "spotkeeper:budget", "spotkeeper:job_identity", "spotkeeper:secrets")
    return {k: v for k, v in {**config, **changed}.items() if k not in dropped}


def with_shells(config: dict[str, str]) -> dict[str, str]:
    """The same stack with shells, public addresses, images by parameter, another stack's secret, and one alarm."""
    pools = json.loads(config["spotkeeper:pools"])
    pools[2] |= {"image": "resolve:ssm:/aws/service/ubuntu:7", "machine": {"type": "p4d.24xlarge"}}
    changed = {
        "spotkeeper:ssh": json.dumps([PERSON]),
        "spotkeeper:network": '{"public_ip": true}',
        "spotkeeper:image": "resolve:ssm:/acme/train:3",
        "spotkeeper:pools": json.dumps(pools),
        "spotkeeper:secrets": '["huggingface", "arn:aws:secretsmanager:us-east-1:123456789012:secret:wandb"]',
        "spotkeeper:alerts": '{"email": "ml-infra@acme.dev", "about": ["holds"]}',
    }
    return config | changed


@pytest.mark.parametrize("stack", ["dev", "prod"])
@pytest.mark.parametrize("name", ["example", "joined"])
def test_no_declared_resource_breaks_a_policy_rule(name: str, stack: str, request: pytest.FixtureRequest) -> None:
    assert broken(request.getfixturevalue(name), stack) == []


# --- order -----------------------------------------------------------------------------


def test_resources_of_machines_outlive_the_drain(example: Declaration) -> None:
    stands_on = before(example, DRAIN)
    kinds = (":Subnet", ":SecurityGroup", ":PlacementGroup", ":LaunchTemplate", ":Route", ":RouteTableAssociation",
             ":VpcEndpoint", ":EgressOnlyInternetGateway", ":InstanceProfile", ":Instance", ":VolumeAttachment",
             ":RolePolicy")  # fmt: skip
    needed = {found.key for found in example.values() if found.type.endswith(kinds)}
    assert len(needed) > 20
    assert needed | {FUNCTION, "aws:s3/bucketObjectv2:BucketObjectv2::pools"} <= stands_on


@pytest.mark.parametrize("trigger", [TICK, *ROUTES])
def test_triggers_are_deleted_before_the_drain(example: Declaration, trigger: str) -> None:
    assert DRAIN in before(example, trigger)


def test_the_drain_keeps_its_urn(example: Declaration) -> None:
    assert "spotkeeper:aws:Drained::drained" in example and example[DRAIN].parent == "drained"


def test_machines_are_made_after_all_that_they_need_to_boot(example: Declaration) -> None:
    for machine in [*of(example, INSTANCE), *of(example, TEMPLATE)]:
        needed = before(example, machine.key)
        assert {f"aws:s3/bucketObjectv2:BucketObjectv2::{name}" for name in ("bundle", "boot")} <= needed
        assert "aws:iam/rolePolicy:RolePolicy::rights-vm" in needed


def test_pools_json_is_written_after_the_rights(example: Declaration) -> None:
    assert "aws:iam/rolePolicy:RolePolicy::rights-fn" in before(example, "aws:s3/bucketObjectv2:BucketObjectv2::pools")


def test_the_drain_uses_the_programs_login(joined: Declaration, example: Declaration) -> None:
    assert joined[DRAIN].properties["profile"] == one(joined, "pulumi:providers:aws", "aws")["profile"] == "acme"
    assert example[DRAIN].properties["profile"] == ""


@pytest.mark.parametrize("place", WITHOUT_URLS)
def test_regions_without_function_urls_are_refused(config: dict[str, str], place: str) -> None:
    """AWS would refuse it in the middle of an `up`."""
    moved = {key: value.replace("us-east-1", place) for key, value in config.items()}
    with pytest.raises(pulumi.RunError, match=f'region: "{place}": has no Lambda function URLs'):
        run_program(NAME, moved, AwsCloud())


def test_the_stack_files_account_and_region_override_the_shell(example: Declaration) -> None:
    """The provider refuses to work with another account's credentials."""
    told = one(example, "pulumi:providers:aws", "aws")
    assert (told["region"], json.loads(told["allowedAccountIds"])) == ("us-east-1", ["123456789012"])
    at_home = {found.provider for found in example.values() if found.type.startswith("aws:")}
    assert at_home == {"aws"}, "none by the default provider"


# --- the network -------------------------------------------------------------------------


def test_each_zone_has_its_own_ipv4_and_ipv6_subnet(example: Declaration) -> None:
    subnets = sorted(of(example, SUBNET), key=lambda found: found.name)
    assert [found.properties["availabilityZone"] for found in subnets] == [f"us-east-1{zone}" for zone in "abc"]
    for family, whole in (("cidrBlock", "10.40.0.0/16"), ("ipv6CidrBlock", "2600:1f18:aa:bb00::/56")):
        ranges = [ipaddress.ip_network(found.properties[family]) for found in subnets]
        assert all(each.subnet_of(ipaddress.ip_network(whole)) for each in ranges)  # type: ignore[arg-type]
        assert not any(a.overlaps(b) for a in ranges for b in ranges if a is not b)  # type: ignore[arg-type]
    assert all(found.properties["assignIpv6AddressOnCreation"] for found in subnets)


def test_a_new_zone_changes_no_other_subnet(config: dict[str, str], example: Declaration) -> None:
    from infra.settings.aws import subnet_range

    mine = {found.properties["availabilityZone"]: found.properties["cidrBlock"] for found in of(example, SUBNET)}
    assert {zone: subnet_range("10.40.0.0/16", zone) for zone in mine} == mine
    assert subnet_range("10.40.0.0/24", "us-east-1f") == "10.40.0.160/27"


def test_the_network_has_no_hourly_price(example: Declaration) -> None:
    (out,) = of(example, "aws:ec2/route:Route")
    assert out.properties["destinationIpv6CidrBlock"] == "::/0" and "egressOnlyGatewayId" in out.properties
    (endpoint,) = of(example, "aws:ec2/vpcEndpoint:VpcEndpoint")
    assert (endpoint.properties["vpcEndpointType"], endpoint.properties["serviceName"]) == (
        *("Gateway", "com.amazonaws.us-east-1.s3"),
    )
    assert not any("NatGateway" in found.type or ":Eip" in found.type for found in example.values())


def test_the_security_group_admits_only_its_own_machines(example: Declaration) -> None:
    comes = of(example, "aws:vpc/securityGroupIngressRule:SecurityGroupIngressRule")
    goes = of(example, "aws:vpc/securityGroupEgressRule:SecurityGroupEgressRule")
    group = identity("aws:ec2/securityGroup:SecurityGroup", "inside")
    (inside,) = comes
    assert inside.properties["referencedSecurityGroupId"] == inside.properties["securityGroupId"] == group
    assert [rule.properties["ipProtocol"] for rule in (*comes, *goes)] == ["-1"] * 4
    assert group in [rule.properties.get("referencedSecurityGroupId") for rule in goes], "EFA asks for it by itself"
    assert not any("cidrIpv4" in rule.properties or "cidrIpv6" in rule.properties for rule in comes)


def test_no_machine_has_a_public_address(example: Declaration) -> None:
    assert not any(found.properties["mapPublicIpOnLaunch"] for found in of(example, SUBNET))
    assert not of(example, "aws:ec2/internetGateway:InternetGateway")


def test_public_ip_gives_machines_addresses_and_a_way_out(config: dict[str, str]) -> None:
    pools = json.dumps([pool for pool in json.loads(config["spotkeeper:pools"]) if "efa" not in pool["machine"]])
    network = '{"cidr": "10.40.0.0/16", "public_ip": true}'
    public = declare({**config, "spotkeeper:pools": pools, "spotkeeper:network": network})
    assert all(found.properties["mapPublicIpOnLaunch"] for found in of(public, SUBNET))
    ways = {found.name: found.properties for found in of(public, "aws:ec2/route:Route")}
    table = identity("aws:ec2/routeTable:RouteTable", "routes")
    assert ways == {
        "out-4": {"routeTableId": table, "destinationCidrBlock": "0.0.0.0/0", "gatewayId": "gateway"},
        "out-6": {"routeTableId": table, "destinationIpv6CidrBlock": "::/0", "egressOnlyGatewayId": "egress"},
    }
    gateway = one(public, "aws:ec2/internetGateway:InternetGateway", "gateway")
    assert gateway["vpcId"] == identity("aws:ec2/vpc:Vpc", "vpc")
    assert "aws:ec2/route:Route::out-4" in before(public, DRAIN), "machines need it until the end"


def test_a_network_that_exists_is_used_as_it_is(joined: Declaration) -> None:
    made = {"Vpc", "Subnet", "RouteTable", "Route", "VpcEndpoint", "EgressOnlyInternetGateway"}
    assert not made & {found.type.rsplit(":", 1)[1] for found in joined.values()}
    (group,) = of(joined, "aws:ec2/securityGroup:SecurityGroup")
    assert group.properties["vpcId"] == "vpc-0aaaaaaaa"
    state = codec.decode(one(joined, "aws:s3/bucketObjectv2:BucketObjectv2", "pools")["content"], StackState)
    burst = state.pool("burst")
    assert burst is not None and burst.subnets == {f"us-east-1{zone}": f"subnet-0{zone * 8}" for zone in "abc"}


# --- machines ------------------------------------------------------------------------------


def data(template: Declared) -> dict[str, Any]:
    """A launch template's inputs as ``LaunchTemplateData``."""
    renamed = {"name": "", "tags": "", "updateDefaultVersion": "", "vpcSecurityGroupIds": "SecurityGroupIds",
               "securityGroups": "Groups"}  # fmt: skip
    shape = operation("ec2", "CreateLaunchTemplate").members["LaunchTemplateData"]
    inputs = dict(template.properties)
    specs = inputs.pop("tagSpecifications")
    found: dict[str, Any] = pascal(inputs, renamed, shape)
    found["TagSpecifications"] = [
        {"ResourceType": each["resourceType"], "Tags": [{"Key": k, "Value": v} for k, v in each["tags"].items()]}
        for each in specs
    ]
    return found


def tags_of(found: Mapping[str, Any], kind: str) -> dict[str, str]:
    (tags,) = [each["Tags"] for each in found["TagSpecifications"] if each["ResourceType"] == kind]
    return {tag["Key"]: tag["Value"] for tag in tags}


def test_every_template_is_valid_for_ec2(example: Declaration) -> None:
    templates = of(example, TEMPLATE)
    assert len(templates) == 4
    for template in templates:
        request = {"LaunchTemplateName": template.name, "LaunchTemplateData": data(template)}
        assert judge("ec2", "CreateLaunchTemplate", request) == [], template.name
    spoilt = data(templates[0]) | {"InstanceInitiatedShutdownBehavior": "terminat"}
    assert judge("ec2", "CreateLaunchTemplate", {"LaunchTemplateName": "x", "LaunchTemplateData": spoilt})


def test_a_pools_templates_differ_only_in_market_options(example: Declaration) -> None:
    spot, other = (data(example[f"{TEMPLATE}::sk-{NAME}_burst-{end}"]) for end in ("spot", "od"))
    assert spot.pop("InstanceMarketOptions") == {
        "MarketType": "spot",
        "SpotOptions": {"SpotInstanceType": "one-time", "InstanceInterruptionBehavior": "terminate"},
    }
    assert tags_of(spot, "spot-instances-request")
    spot["TagSpecifications"] = [s for s in spot["TagSpecifications"] if s["ResourceType"] != "spot-instances-request"]
    assert spot == other


def test_a_pool_without_on_demand_has_no_template_for_it(example: Declaration) -> None:
    assert sorted(found.name.removeprefix(f"sk-{NAME}_") for found in of(example, TEMPLATE)) == [
        *("burst-od", "burst-spot", "fabric-spot", "floor-static")
    ]


def test_only_dynamic_machines_terminate_at_shutdown(example: Declaration) -> None:
    ends = {found.name.rsplit("-", 1)[1]: found.properties["instanceInitiatedShutdownBehavior"]
            for found in of(example, TEMPLATE)}  # fmt: skip
    assert ends == {"spot": "terminate", "od": "terminate", "static": "stop"}


def test_metadata_needs_version_2_and_shows_tags(example: Declaration) -> None:
    for template in of(example, TEMPLATE):
        assert template.properties["metadataOptions"] == {
            "httpEndpoint": "enabled",
            "httpTokens": "required",
            "httpPutResponseHopLimit": 1,
            "instanceMetadataTags": "enabled",
        }


def test_boot_disks_are_encrypted_and_deleted_with_the_machine(example: Declaration) -> None:
    for template in of(example, TEMPLATE):
        (root,) = template.properties["blockDeviceMappings"]
        assert root["deviceName"] == "/dev/sda1", "another would be an empty disk beside the root"
        assert root["ebs"] | {"volumeSize": 0} == {
            "volumeSize": 0, "volumeType": "gp3", "encrypted": "true", "deleteOnTermination": "true",
        }  # fmt: skip


def test_a_customer_key_encrypts_every_disk_and_the_spot_role_may_use_it(
    joined: Declaration, example: Declaration
) -> None:
    for template in of(joined, TEMPLATE):
        assert template.properties["blockDeviceMappings"][0]["ebs"]["kmsKeyId"] == KEY
    assert all(volume.properties["kmsKeyId"] == KEY for volume in of(joined, "aws:ebs/volume:Volume"))
    state = codec.decode(one(joined, "aws:s3/bucketObjectv2:BucketObjectv2", "pools")["content"], StackState)
    burst = state.pool("burst")
    assert burst is not None and burst.disk_key == KEY
    (grant,) = of(joined, "aws:kms/grant:Grant")
    role = "arn:aws:iam::123456789012:role/aws-service-role/spot.amazonaws.com/AWSServiceRoleForEC2Spot"
    assert (grant.properties["keyId"], grant.properties["granteePrincipal"]) == (KEY, role)
    request = {"KeyId": KEY, "GranteePrincipal": role, "Operations": grant.properties["operations"]}
    assert judge("kms", "CreateGrant", request) == []
    assert "aws:iam/serviceLinkedRole:ServiceLinkedRole::spot" in before(joined, grant.key), (
        "it is lent to who is there"
    )
    assert grant.key in before(joined, of(joined, TEMPLATE)[0].key)
    assert not of(example, "aws:kms/grant:Grant")


def test_a_machines_tags_have_the_agents_settings(example: Declaration) -> None:
    from spotkeeper_agent.core import settings as agent

    for template in of(example, TEMPLATE):
        found = data(template)
        told = tags_of(found, "instance")
        efa = told["sk-pool"] == "fabric"  # four adapters a machine, in the example
        assert told.pop("sk-fabric", "") == ("efa" if efa else "")
        assert sorted(told) == [
            *(
                "sk-boot",
                "sk-bucket",
                "sk-bundle",
                "sk-function",
                "sk-job-identity",
                "sk-notice-s",
                "sk-pool",
                "sk-stack",
            ),
            "team",
        ]
        assert told["sk-function"] == "https://abcdefghij.lambda-url.us-east-1.on.aws"
        assert told["sk-bucket"] == f"sk-123456789012-{NAME}" and agent.notice_s(told["sk-notice-s"]) == 120
        assert all(len(key) <= 128 and len(value) <= 256 and " " not in key for key, value in told.items())
        for kind in ("volume", "network-interface"):
            assert tags_of(found, kind) == {name: told[name] for name in ("team", "sk-stack", "sk-pool")}


def test_user_data_is_boots_and_within_the_limit(example: Declaration, config: dict[str, str]) -> None:
    scripts = boot.render(from_config(config, NAME))
    for template in of(example, TEMPLATE):
        kind = "static" if template.name.endswith("static") else "spot"
        text = base64.b64decode(template.properties["userData"])
        assert text.decode() == scripts.user_data[kind]
        assert len(text) <= 16 * 1024
    stored = one(example, "aws:s3/bucketObjectv2:BucketObjectv2", "boot")
    assert (stored["key"], stored["content"]) == (f"boot/{scripts.sha256}.sh", scripts.startup)


def test_a_template_names_security_groups_unless_it_has_efa(example: Declaration) -> None:
    group = identity("aws:ec2/securityGroup:SecurityGroup", "inside")
    for template in of(example, TEMPLATE):
        assert "networkInterfaces" not in template.properties, "EC2 takes no subnet of a launch beside them"
        assert template.properties.get("vpcSecurityGroupIds") == (None if "fabric" in template.name else [group])


def test_one_cluster_group_for_each_zone_and_none_in_a_template(example: Declaration) -> None:
    groups = of(example, GROUP)
    assert sorted(found.name for found in groups) == [
        *(f"sk-{NAME}_burst-1{zone}" for zone in "abc"), f"sk-{NAME}_fabric-1b",
    ]  # fmt: skip
    assert {found.properties["strategy"] for found in groups} == {"cluster"}
    assert all("placement" not in found.properties for found in of(example, TEMPLATE))


# --- static machines ----------------------------------------------------------------------------


def test_a_new_image_or_user_data_does_not_stop_a_static_machine(example: Declaration) -> None:
    (node,) = of(example, INSTANCE)
    assert node.ignores == ("launchTemplate",)
    assert sorted(node.properties) == ["instanceType", "launchTemplate", "region", "subnetId", "tags"]
    template = node.properties["launchTemplate"]
    assert template == {"id": identity(TEMPLATE, f"sk-{NAME}_floor-static"), "version": "$Default"}
    assert all(found.properties["updateDefaultVersion"] for found in of(example, TEMPLATE)), (
        "made anew, it is as it is now"
    )


def test_a_release_changes_a_static_machines_tags(example: Declaration) -> None:
    (node,) = of(example, INSTANCE)
    tags = node.properties["tags"]
    told = tags_of(data(example[f"{TEMPLATE}::sk-{NAME}_floor-static"]), "instance")
    assert tags == {**told, "Name": f"sk-{NAME}-floor-s0"}
    assert "sk-job" not in tags, "what bears a job's tag, reconcile and the drain may end"


def test_a_static_machines_disk_is_retained_and_never_force_detached(example: Declaration) -> None:
    volume = example[f"aws:ebs/volume:Volume::sk-{NAME}-floor-s0-data"]
    assert volume.protect and volume.properties["encrypted"] is True
    (attached,) = of(example, "aws:ec2/volumeAttachment:VolumeAttachment")
    assert attached.properties["stopInstanceBeforeDetaching"] is True
    assert attached.properties["deviceName"] == DEVICE, "as reconcile attaches a node's: the agent looks for it so"
    inputs = {"availabilityZone": "", "size": 0, "type": "", "encrypted": True, "tags": {}} | volume.properties
    request = pascal(inputs, {"type": "VolumeType", "tags": "", "region": ""}, operation("ec2", "CreateVolume"))
    assert judge("ec2", "CreateVolume", request) == []


def test_a_static_machine_with_efa_has_an_interface_per_card(config: dict[str, str]) -> None:
    shape = {"kind": "static", "size": 2, "machine": {"type": "p4d.24xlarge", "efa": 4}, "disk": {"size_gb": 500}}
    apart = {**shape, "name": "apart", "zones": ["us-east-1a", "us-east-1b"]}
    near = {**shape, "name": "near", "zones": ["us-east-1c"], "placement": {}}
    declared = run_program(NAME, {**config, "spotkeeper:pools": json.dumps([apart, near])}, AwsCloud())
    for pool, zone in (("apart", "a"), ("apart", "b"), ("near", "c")):
        found = data(declared[f"{TEMPLATE}::sk-{NAME}_{pool}-static-us-east-1{zone}"])
        assert judge("ec2", "CreateLaunchTemplate", {"LaunchTemplateName": "xxx", "LaunchTemplateData": found}) == []
        cards = found["NetworkInterfaces"]
        assert [(c["NetworkCardIndex"], c["DeviceIndex"], c["InterfaceType"]) for c in cards] == [
            *((0, 0, "interface"), (0, 1, "efa-only"), (1, 0, "efa-only"), (2, 0, "efa-only"), (3, 0, "efa-only"))
        ]
        assert {card["SubnetId"] for card in cards} == {identity(SUBNET, f"subnet-us-east-1{zone}")}
        assert "SecurityGroupIds" not in found
    nodes = {found.name.removeprefix(f"sk-{NAME}-"): found.properties for found in of(declared, INSTANCE)}
    assert {name: node.get("placementGroup") for name, node in nodes.items()} == {
        "apart-s0": None, "apart-s1": None, "near-s0": f"sk-{NAME}_near-1c", "near-s1": f"sk-{NAME}_near-1c",
    }  # fmt: skip
    assert not any("subnetId" in node for node in nodes.values()), "EC2 takes none beside the template's interfaces"


# --- what reconcile reads ------------------------------------------------------------------


def test_pools_json_is_what_the_function_reads(state: StackState) -> None:
    check_stack(state)
    burst, floor = state.pool("burst"), state.pool("floor")
    assert burst is not None and floor is not None
    assert (state.cloud, state.project, state.region) == ("aws", "123456789012", "us-east-1")
    assert state.node_identity == f"arn:aws:iam::123456789012:role/sk-{NAME}-vm"
    assert burst.template_versions == {"spot": "7", "on-demand": "7"}
    assert (burst.disk_iops, burst.disk_mbps, burst.disk_type) == (6000, 500, "gp3")
    assert [node.name for node in floor.machines] == [f"sk-{NAME}-floor-s0"] and not floor.templates


@pytest.mark.parametrize(("pool", "model"), [("burst", Model.SPOT), ("burst", Model.ON_DEMAND), ("fabric", Model.SPOT)])
def test_the_adapters_launch_is_valid_for_ec2(example: Declaration, state: StackState, pool: str, model: Model) -> None:
    found = state.pool(pool)
    assert found is not None
    zone = found.zones[0]
    asked = InsertVm("abcd2345", "11111111-2222-4333-8444-555555555555", 0, 1, pool, zone, model)
    request = schema.launch(state, found, asked)
    assert judge("ec2", "RunInstances", request) == []
    template = example[f"{TEMPLATE}::sk-{NAME}_{pool}-{'spot' if model is Model.SPOT else 'od'}"]
    assert request["LaunchTemplate"] == {"LaunchTemplateId": identity(TEMPLATE, template.name), "Version": "7"}
    # EC2 refuses a subnet or groups beside interfaces, and the template's count as the launch's.
    whole = {**data(template), **request}
    assert ("NetworkInterfaces" in whole) != ("SubnetId" in whole and "SecurityGroupIds" in whole)
    assert ("NetworkInterfaces" in whole) == (pool == "fabric")
    told = {tag["Key"]: tag["Value"] for tag in request["TagSpecifications"][0]["Tags"]}  # type: ignore[index]
    assert tags_of(data(template), "instance").items() <= told.items(), "whatever EC2 does to merge them"


def test_the_adapters_volume_is_valid_for_ec2(state: StackState) -> None:
    found = state.pool("burst")
    assert found is not None
    asked = CreateDisk("abcd2345", "11111111-2222-4333-8444-555555555555", 0, 1, "burst", found.zones[0])
    assert judge("ec2", "CreateVolume", schema.volume(state, found, asked, None)) == []
    assert judge("ec2", "CreateVolume", schema.volume(state, replace(found, disk_type="gp4"), asked, None))


# --- the function and what calls it -----------------------------------------------------------


def test_the_function_is_valid_for_lambda(example: Declaration) -> None:
    inputs = dict(example[FUNCTION].properties)
    assert inputs.pop("s3Key").startswith("function/") and inputs.pop("s3Bucket")
    shape = operation("lambda", "CreateFunction")
    renamed = {"name": "FunctionName", "tags": ""}
    request = pascal(inputs, renamed, shape) | {"Code": {"S3Bucket": "bucket", "S3Key": "key"}}
    assert judge("lambda", "CreateFunction", request) == []
    module, _, name = request["Handler"].rpartition(".")
    assert module == aws_lambda.__name__ and callable(getattr(aws_lambda, name))
    assert request["FunctionName"] == f"sk-{NAME}", "policies and the log group are named after it"


def test_the_functions_environment(example: Declaration) -> None:
    assert example[FUNCTION].properties["environment"]["variables"] == {
        "SPOTKEEPER_STACK": NAME,
        "SPOTKEEPER_BUCKET": f"s3://sk-123456789012-{NAME}",
        "SPOTKEEPER_INVOKERS": "arn:aws:iam::123456789012:role/operators",
        "SPOTKEEPER_CHANNELS": json.dumps(
            {
                "ml-team": "aws-secret://arn:aws:secretsmanager:us-east-1:123456789012:secret:slack-ml-team",
                "ops": "aws-parameter://arn:aws:ssm:us-east-1:123456789012:parameter/spotkeeper/teams-ops",
            },
            separators=(",", ":"),
        ),
    }


def test_the_function_gets_the_stack_files_address_ranges(joined: Declaration) -> None:
    """A machine of any other address is never taken in, and bills until its boot deadline."""
    told = joined[FUNCTION].properties["environment"]["variables"]
    assert told["SPOTKEEPER_ADDRESSES"] == "100.64.0.0/10"


def test_submitters_assume_a_role_that_the_function_accepts(joined: Declaration, example: Declaration) -> None:
    role = one(joined, "aws:iam/role:Role", "role-sb")
    (trusted,) = json.loads(role["assumeRolePolicy"])["Statement"]
    assert (role["name"], trusted["Principal"]) == (f"sk-{NAME}-sb", {"AWS": [PERSON]})
    assert trusted["Condition"] == {"StringEquals": {"sts:RoleSessionName": "${aws:username}"}}, "none takes a name"
    told = joined[FUNCTION].properties["environment"]["variables"]
    assert told["SPOTKEEPER_SUBMITTERS"] == PERSON
    callers = joined[FUNCTION].properties["environment"]["variables"]["SPOTKEEPER_INVOKERS"].split(",")
    assert callers == ["arn:aws:iam::123456789012:role/operators", f"arn:aws:iam::123456789012:role/sk-{NAME}-sb"]
    assert "aws:iam/role:Role::role-sb" not in example, "nobody is named there"


def test_each_caller_of_the_url_has_both_rights(example: Declaration) -> None:
    """Machines by their role's own policy (``test_rights_aws``): Lambda may not know a role yet that was just made."""
    assert one(example, "aws:lambda/functionUrl:FunctionUrl", "url")["authorizationType"] == "AWS_IAM"
    by_url, call = (one(example, PERMISSION, f"{kind}-person-0") for kind in ("url", "call"))
    assert (by_url["action"], by_url["functionUrlAuthType"]) == ("lambda:InvokeFunctionUrl", "AWS_IAM")
    assert (call["action"], call["invokedViaFunctionUrl"]) == ("lambda:InvokeFunction", True)
    assert by_url["principal"] == call["principal"] == "arn:aws:iam::123456789012:role/operators"


def test_no_other_principal_may_call(example: Declaration) -> None:
    others = [found.properties for found in of(example, PERMISSION) if found.name.startswith("event-")]
    assert len(of(example, PERMISSION)) == len(others) + 2
    for found in others:
        assert found["principal"] == "events.amazonaws.com" and f":rule/sk-{NAME}-" in found["sourceArn"]


def test_the_tick_comes_every_few_minutes_and_is_not_retried(example: Declaration, joined: Declaration) -> None:
    tick = example[TICK].properties
    request = pascal(tick, {"roleArn": "RoleArn"}, operation("scheduler", "CreateSchedule"))
    assert judge("scheduler", "CreateSchedule", request) == []
    assert (tick["scheduleExpression"], tick["target"]["retryPolicy"]["maximumRetryAttempts"]) == ("rate(1 minute)", 0)
    assert joined[TICK].properties["scheduleExpression"] == "rate(2 minutes)", "EventBridge refuses the other number"
    assert json.loads(tick["target"]["input"]) == {"source": aws_lambda.TICK}
    invoke = one(example, "aws:lambda/functionEventInvokeConfig:FunctionEventInvokeConfig", "no-retries")
    assert invoke["maximumRetryAttempts"] == 0, "Lambda itself would try twice more"
    request = pascal(invoke, {}, operation("lambda", "PutFunctionEventInvokeConfig"))
    assert judge("lambda", "PutFunctionEventInvokeConfig", request) == []


def test_ec2_events_reach_the_function_or_the_dead_letter_queue(example: Declaration) -> None:
    rules = {found.name: json.loads(found.properties["eventPattern"])
             for found in of(example, "aws:cloudwatch/eventRule:EventRule")}  # fmt: skip
    assert {name: rule["detail-type"] for name, rule in rules.items()} == {
        "interruption": ["EC2 Spot Instance Interruption Warning"],
        "rebalance": ["EC2 Instance Rebalance Recommendation"],
        "state": ["EC2 Instance State-change Notification"],
    }
    assert all(rule["source"] == ["aws.ec2"] and rule["account"] == ["123456789012"] for rule in rules.values())
    assert rules["state"]["detail"] == {"state": ["shutting-down", "stopping", "stopped", "terminated"]}
    queue = f"arn:aws:sqs:us-east-1:123456789012:sk-{NAME}-dead"
    for route in of(example, TARGET):
        inputs = {key: value for key, value in route.properties.items() if key != "rule"}
        request = pascal(inputs | {"id": "x"}, {}, operation("events", "PutTargets").members["Targets"].member)
        assert judge("events", "PutTargets", {"Rule": route.name, "Targets": [request]}) == []
        assert route.properties["deadLetterConfig"] == {"arn": queue}
        assert f"{PERMISSION}::event-{route.name}" in before(example, route.key)


def test_the_functions_log_is_deleted_with_the_stack(example: Declaration) -> None:
    (logs,) = of(example, "aws:cloudwatch/logGroup:LogGroup")
    assert logs.properties["name"] == f"/aws/lambda/sk-{NAME}" and logs.properties["retentionInDays"] == 30
    assert logs.key in before(example, FUNCTION), "or Lambda makes one that nobody removes"


# --- the bucket ------------------------------------------------------------------------------


def test_the_bucket_is_private_and_deletes_unfinished_uploads(example: Declaration) -> None:
    closed = one(example, "aws:s3/bucketPublicAccessBlock:BucketPublicAccessBlock", "closed")
    assert sum(value is True for value in closed.values()) == 4
    owner = one(example, "aws:s3/bucketOwnershipControls:BucketOwnershipControls", "owner")
    assert owner["rule"] == {"objectOwnership": "BucketOwnerEnforced"}, "no access lists"
    lifecycle = one(example, "aws:s3/bucketLifecycleConfiguration:BucketLifecycleConfiguration", "lifecycle")
    rules = pascal(lifecycle["rules"], {"id": "ID"}, operation(
        "s3", "PutBucketLifecycleConfiguration").members["LifecycleConfiguration"].members["Rules"])  # fmt: skip
    request = {"Bucket": "b", "LifecycleConfiguration": {"Rules": rules}}
    assert judge("s3", "PutBucketLifecycleConfiguration", request) == []
    assert rules[0]["AbortIncompleteMultipartUpload"] == {"DaysAfterInitiation": 1}


def test_on_destroy_keeps_the_bucket(example: Declaration) -> None:
    bucket = example["aws:s3/bucket:Bucket::bucket"]
    assert bucket.protect and bucket.properties["forceDestroy"] is False


def test_a_retained_bucket_stays_private(joined: Declaration, example: Declaration) -> None:
    kinds = ("PublicAccessBlock", "OwnershipControls", "Policy", "LifecycleConfiguration")
    for kind in ("", *kinds):
        (kept,) = [found for found in joined.values() if found.type.endswith(f":Bucket{kind}")]
        assert kept.retain and not kept.protect, kept.key
        (other,) = [found for found in example.values() if found.type.endswith(f":Bucket{kind}")]
        assert not other.retain, other.key


# --- who is told -----------------------------------------------------------------------------


def test_every_configured_alert_sends_mail(example: Declaration) -> None:
    alarms = of(example, ALARM)
    assert sorted(found.name for found in alarms) == ["holds", "orphans", "silence", "spend"]
    for alarm in alarms:
        inputs = dict(alarm.properties)
        renamed = {"name": "AlarmName", "okActions": "OKActions", "tags": ""}
        request = pascal(inputs, renamed, operation("cloudwatch", "PutMetricAlarm"))
        assert judge("cloudwatch", "PutMetricAlarm", request) == [], alarm.name
        assert alarm.properties["alarmActions"] == [f"arn:aws:sns:us-east-1:123456789012:sk-{NAME}-alerts"]
    assert one(example, ALARM, "silence")["treatMissingData"] == "breaching"
    assert one(example, ALARM, "silence")["evaluationPeriods"] == 5
    assert one(example, ALARM, "silence")["namespace"] == "Spotkeeper", "Lambda's own counts agents' reports too"


def test_alarms_match_lines_that_the_function_writes(example: Declaration) -> None:
    from spotkeeper.contract.ledger import Event
    from spotkeeper.reconcile.service import logging_json as logs

    filters = {found.name: found.properties for found in of(example, "aws:cloudwatch/logMetricFilter:LogMetricFilter")}
    looked_for = {name: found["pattern"] for name, found in filters.items()}
    assert "event" in logs.FIELDS
    assert looked_for == {
        "ticks": f'{{ $.event = "{alerts.TICK}" }}',
        "holds": f'{{ ($.event = "{Event.HOLD.value}") && ($.reason != "pause") }}',
        "spend": f'{{ $.event = "{Event.LIMIT.value}" }}',
        "orphans": '{ $.event = "orphan" }',
    }
    for name, found in filters.items():
        told = "silence" if name == "ticks" else name
        assert one(example, ALARM, told)["metricName"] == found["metricTransformation"]["name"]


def test_the_budget_counts_resources_with_the_stacks_tag(example: Declaration) -> None:
    budget = one(example, "aws:budgets/budget:Budget", "budget")
    assert budget["costFilters"] == [{"name": "TagKeyValue", "values": [f"user:sk-stack${NAME}"]}]
    assert [each["threshold"] for each in budget["notifications"]] == [50, 90, 100]
    assert all(each["subscriberEmailAddresses"] == ["ml-infra@acme.dev"] for each in budget["notifications"])


def test_an_idle_stack_costs_less_than_three_dollars(example: Declaration) -> None:
    costs("aws", example)


def test_every_declarable_resource_has_a_price(joined: Declaration, config: dict[str, str]) -> None:
    assert idle.total(idle.idle(from_config(config, NAME), Counter(found.type for found in joined.values()))) < 3.0


def test_alerts_budget_and_the_accounts_role_are_opt_in(joined: Declaration, example: Declaration) -> None:
    kinds = {found.type.rsplit(":", 1)[1] for found in joined.values()}
    assert not kinds & {"MetricAlarm", "LogMetricFilter", "Topic", "TopicSubscription", "Budget", "Alerts"}
    (role,) = of(joined, "aws:iam/serviceLinkedRole:ServiceLinkedRole")
    assert role.properties["awsServiceName"] == "spot.amazonaws.com"
    assert role.retain, "it is the account's: other stacks launch spot machines by it"
    assert not of(example, "aws:iam/serviceLinkedRole:ServiceLinkedRole")


# --- names ----------------------------------------------------------------------------------


def test_every_taggable_resource_has_the_stacks_tag(example: Declaration) -> None:
    bare = {"BucketObjectv2"}  # the bucket's are enough, and each object's would be written with it
    for found in example.values():
        tags = found.properties.get("tags")
        if found.type.startswith("aws:") and found.type.rsplit(":", 1)[1] not in bare and tags is not None:
            assert tags["sk-stack"] == NAME and tags["team"] == "ml-infra" and tags["Name"], found.key
            assert len(tags) <= 50
    assert sum("tags" in found.properties for found in example.values()) > 35


def test_no_prices_are_capped_and_no_secret_is_written(example: Declaration) -> None:
    everything = json.dumps([found.properties for found in example.values()], default=str)
    assert "maxPrice" not in everything and "AKIA" not in everything


# --- what people are shown -------------------------------------------------------------------


def test_the_stacks_outputs_name_what_was_declared(example: Program, state: StackState) -> None:
    function = "https://abcdefghij.lambda-url.us-east-1.on.aws"
    assert example.outputs == {
        "bucket": "sk-123456789012-example-aws",
        "reconcileUrl": function,
        "bundle": state.bundle_sha256,
        "pools": ["floor", "burst", "fabric"],
        "staticMachines": ["sk-example-aws-floor-s0"],
        "keptDisks": ["sk-example-aws-floor-s0-data"],
    }
    assert (state.bucket, state.function_url) == (example.outputs["bucket"], function)


def test_plan_needs_neither_engine_nor_cloud(example: Declaration) -> None:
    from spotkeeper.cli.stacks.render import plan

    planned = plan(STACKS / f"Pulumi.{NAME}.yaml", None)
    assert {f"{one.type}::{one.name}" for one in planned} == set(example)
    parts = [one.name for one in planned if one.type.startswith("spotkeeper:")]
    assert sorted(parts) == sorted(f.name for f in example.values() if f.type.startswith("spotkeeper:aws:"))
    url = next(one for one in planned if one.name == f"sk-{NAME}_burst-spot").inputs["tagSpecifications"]
    assert "(known after up)" in json.dumps(url), "what only AWS can tell is left open"


# --- the provider's own word -------------------------------------------------------------------

needs_provider = pytest.mark.skipif(
    not aws_terraform.installed(), reason="terraform, or a copy of its provider of AWS, is not installed"
)


@needs_provider
@pytest.mark.matrix  # make engine
def test_the_provider_accepts_every_declared_resource(
    example: Declaration, joined: Declaration, tmp_path: Path
) -> None:
    """And complains of what is spoilt, so that its silence means something."""
    role = example["aws:iam/rolePolicy:RolePolicy::rights-vm"]
    bucket = example["aws:s3/bucketLifecycleConfiguration:BucketLifecycleConfiguration::lifecycle"]
    spoilt = [
        dataclasses.replace(role, name="spoilt", properties={**role.properties, "policy": "{"}),
        dataclasses.replace(
            example[ROUTES[0]], name="spoilt", properties={**example[ROUTES[0]].properties, "arn": "x"}
        ),
        dataclasses.replace(bucket, name="spoilt", properties={**bucket.properties, "bucket": "B" * 99}),
    ]
    others = of(joined, "aws:iam/serviceLinkedRole:ServiceLinkedRole")
    asked = [found for found in [*example.values(), *others] if found.type.startswith("aws:")]
    assert len({found.type for found in asked}) > 35
    said = aws_terraform.judge([*asked, *spoilt], tmp_path)
    assert {line.partition(":")[0].rpartition(".")[2] for line in said} == {"x-spoilt"}, said
    assert len({line.partition(":")[0] for line in said}) == len(spoilt), said
