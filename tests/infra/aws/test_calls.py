"""Every call of the function on EC2, each thing that it touches asked of the policy that the program declares.

The stand-in of EC2 authorizes as EC2 does (Service Authorization Reference, "Actions, resources, and condition keys for
Amazon EC2"): a launch asks for its machine, disks, cards, image, template, subnet, groups and role, each by itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from spotkeeper.contract import codec, names
from spotkeeper.contract.cloud import (
    Action,
    AttachDisk,
    CreateDisk,
    CreateSnapshot,
    DeleteDisk,
    DeleteSnapshot,
    DeleteVm,
    DetachDisk,
    InsertVm,
    ResultKind,
)
from spotkeeper.contract.stack import Model, StackState
from spotkeeper.local.deploy.config import read_config
from spotkeeper.reconcile.clouds.ec2.cloud import open_ec2
from tests.infra.aws.cloud import ACCOUNT, REGION, AwsCloud
from tests.infra.aws.judge import Ask, allowed
from tests.infra.aws.test_declared import GROUP, NAME, TEMPLATE, data, identity
from tests.infra.conftest import STACKS, run_program
from tests.infra.declaration import Declaration, of, one
from tests.reconcile.clouds.ec2.region import JOB, UID, Region, region
from tests.reconcile.clouds.ec2.standin.protocol import Ec2Error, Params
from tests.reconcile.clouds.ec2.standin.site import Site
from tests.reconcile.clouds.ec2.standin.things import Template
from tests.reconcile.clouds.ec2.standin.verbs import Ec2Service

pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated in favor of:DeprecationWarning")
SHARED_BY = "999999999999"  # the account whose subnets these are: a shared network's bear its owner's
EC2 = f"arn:aws:ec2:{REGION}:{ACCOUNT}"
Tags = Mapping[str, str]


def arn(kind: str, which: str = "*") -> str:
    account = {"image": "", "snapshot": "", "subnet": SHARED_BY}.get(kind, ACCOUNT)
    return f"arn:aws:ec2:{REGION}:{account}:{kind}/{which}"


def requested(tags: Tags) -> dict[str, str]:
    return {f"aws:RequestTag/{key}": value for key, value in tags.items()}


def borne(tags: Tags) -> dict[str, str]:
    return {f"aws:ResourceTag/{key}": value for key, value in tags.items()}


def told(params: Params, kind: str) -> dict[str, str]:
    tags = [one["Tags"] for one in params.get("TagSpecifications", ()) if one["ResourceType"] == kind]
    return {tag["Key"]: tag["Value"] for each in tags for tag in each}


def launch(params: Params, site: Site) -> Iterator[Ask]:
    """All that a launch from a template touches."""
    named = params["LaunchTemplate"]
    found = site.templates[named["LaunchTemplateId"]].versions[named["Version"]]
    spot = "InstanceMarketOptions" in found
    ours = borne({"sk-stack": NAME})
    machine = {
        "ec2:InstanceType": found["InstanceType"],
        "ec2:InstanceProfile": found["IamInstanceProfile"]["Arn"],
        "ec2:MetadataHttpTokens": found["MetadataOptions"]["HttpTokens"],
        "ec2:LaunchTemplate": arn("launch-template", named["LaunchTemplateId"]),
    }
    around = {"instance": machine, "volume": {"ec2:Encrypted": "true"}, "network-interface": {}}
    for kind, context in (around | ({"spot-instances-request": {}} if spot else {})).items():
        marks = requested(told(found, kind) | told(params, kind))
        yield Ask("ec2:RunInstances", arn(kind), {**marks, **context})
        yield Ask("ec2:CreateTags", arn(kind), {**marks, "ec2:CreateAction": "RunInstances"})
    yield Ask("ec2:RunInstances", arn("launch-template", named["LaunchTemplateId"]), ours)
    yield Ask("ec2:RunInstances", arn("image", found["ImageId"]), {"ec2:IsLaunchTemplateResource": "true"})
    cards = params.get("NetworkInterfaces") or [
        {"SubnetId": params.get("SubnetId"), "Groups": found.get("SecurityGroupIds")}
    ]
    for card in cards:
        yield Ask("ec2:RunInstances", arn("subnet", card["SubnetId"]))
        yield from (Ask("ec2:RunInstances", arn("security-group", group)) for group in card["Groups"])
    if group := params["Placement"].get("GroupName"):
        yield Ask("ec2:RunInstances", arn("placement-group", group), ours)
    role = f"arn:aws:iam::{ACCOUNT}:role/sk-{NAME}-vm"
    yield Ask("iam:PassRole", role, {"iam:PassedToService": "ec2.amazonaws.com"})


def asks(name: str, params: Params, site: Site) -> Iterator[Ask]:
    """What EC2 asks IAM before it does something."""
    action = f"ec2:{name}"
    if name.startswith(("Describe", "Get")):
        yield Ask(action, "*")
    elif name == "RunInstances":
        yield from launch(params, site)
    elif name in ("CreateVolume", "CreateSnapshot"):
        kind = name.removeprefix("Create").lower()
        marks = requested(told(params, kind))
        encrypted = {"ec2:Encrypted": str(params.get("Encrypted", False)).lower()} if kind == "volume" else {}
        yield Ask(action, arn(kind), {**marks, **encrypted})
        yield Ask("ec2:CreateTags", arn(kind), {**marks, "ec2:CreateAction": name})
    touched: list[tuple[str, str, Mapping[str, Any]]] = [
        *(("instance", uid, site.instances) for uid in params.get("InstanceIds", [params.get("InstanceId")])),
        ("volume", params.get("VolumeId", ""), site.volumes),
        ("snapshot", params.get("SnapshotId", ""), site.snapshots),
    ]
    for kind, uid, there in touched if not name.startswith(("Describe", "Get")) else ():
        if uid in there:
            yield Ask(action, arn(kind, uid), borne(there[uid].tags))


class Authorizing(Ec2Service):
    """``policy``: the function's role's."""

    policy = ""

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self._verbs = {name: self._authorized(name, verb) for name, verb in self._verbs.items()}

    def _authorized(self, name: str, verb: Callable[[Params], Params]) -> Callable[[Params], Params]:
        def call(params: Params) -> Params:
            for ask in asks(name, params, self.site):
                if not allowed(self.policy, ask):
                    raise Ec2Error("UnauthorizedOperation", f"{ask.action} on {ask.resource}: {dict(ask.context)}", 403)
            return verb(params)

        return call


@pytest.fixture(scope="module")
def declared() -> Declaration:
    return run_program(NAME, read_config(STACKS / f"Pulumi.{NAME}.yaml"), AwsCloud())


@pytest.fixture
def here(declared: Declaration, monkeypatch: pytest.MonkeyPatch) -> Iterator[Region]:
    """A region in which lies what the program declares."""
    state = codec.decode(one(declared, "aws:s3/bucketObjectv2:BucketObjectv2", "pools")["content"], StackState)
    monkeypatch.setattr(Authorizing, "policy", one(declared, "aws:iam/rolePolicy:RolePolicy", "rights-fn")["policy"])
    with region(monkeypatch, state, service=Authorizing) as found:
        found.site.zones = {f"us-east-1{zone}": f"use1-az{at}" for at, zone in enumerate("abc")}
        found.site.subnets = {uid: zone for pool in state.pools for zone, uid in pool.subnets.items()}
        found.site.groups = {str(group.properties["name"]) for group in of(declared, GROUP)}
        for template in of(declared, TEMPLATE):
            uid = identity(TEMPLATE, template.name)
            found.site.templates[uid] = Template(uid, {"7": data(template)}, default="7")
        found.ec2 = open_ec2(state, found.engine, found.endpoint)  # type: ignore[arg-type]
        yield found


def done(here: Region, action: Action) -> None:
    result = here.do(action)
    assert result.kind is ResultKind.ACCEPTED, (action, result.detail)
    here.engine.run(here.engine.t + 61.0)


@pytest.mark.parametrize(
    ("pool", "model", "zone"),
    [
        ("burst", Model.SPOT, "us-east-1a"),
        ("burst", Model.ON_DEMAND, "us-east-1c"),
        ("fabric", Model.SPOT, "us-east-1b"),
    ],
)
def test_all_calls_of_the_adapter_are_within_the_functions_rights(
    here: Region, pool: str, model: Model, zone: str
) -> None:
    done(here, InsertVm(JOB, UID, 0, 1, pool, zone, model))
    done(here, CreateDisk(JOB, UID, 0, 1, pool, zone))
    (machine,) = here.ec2.list(NAME).vms
    disk, copy = names.disk_name(NAME, JOB, 0, 1), names.disk_name(NAME, JOB, 0, 2)
    done(here, AttachDisk(disk, machine.name, machine.uid, zone))
    done(here, DetachDisk(disk, machine.name, machine.uid, zone))
    done(here, CreateSnapshot(JOB, UID, 0, 1, zone, 2))
    done(here, CreateDisk(JOB, UID, 0, 2, pool, zone, copy))
    for action in (DeleteSnapshot(copy), DeleteDisk(disk, zone), DeleteDisk(copy, zone),
                   DeleteVm(machine.name, machine.uid, zone)):  # fmt: skip
        done(here, action)
    here.ec2.price_history(pool, 5)
    here.ec2.chances(pool, 5)
    assert here.site.refused["UnauthorizedOperation"] == 0
    assert not here.site.volumes and not here.site.snapshots


def test_the_same_simulation_refuses_forbidden_calls(here: Region, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the test above would prove nothing: without any one statement, something of it is refused."""
    whole = json.loads(Authorizing.policy)
    needed = {"LaunchMachines", "WithEncryptedDisks", "WithCardsAndRequests", "FromOurTemplatesInOurGroups",
              "OfTheirImages", "InOurNetwork", "AsOurMachines", "MarkWhatIsMade"}  # fmt: skip
    assert needed <= {each["Sid"] for each in whole["Statement"]}
    for sid in sorted(needed):
        less = {**whole, "Statement": [each for each in whole["Statement"] if each["Sid"] != sid]}
        monkeypatch.setattr(Authorizing, "policy", json.dumps(less))
        result = here.do(InsertVm(JOB, UID, 0, 1, "burst", "us-east-1a", Model.SPOT))
        assert result.kind is ResultKind.PERMANENT and "UnauthorizedOperation" in result.detail, sid
        here.engine.run(here.engine.t + 5.0)
