"""What Google Cloud's part of the program makes of the fields that not every stack has: networks, cards, alarms."""

from __future__ import annotations

import ipaddress
import json
from typing import Any

import pulumi
import pytest

from infra.gcp.network import free_ranges, project_of, subnet_of
from infra.gcp.pools import group
from spotkeeper.local.deploy import runner
from spotkeeper.local.deploy.config import read_config
from spotkeeper.local.deploy.monitor import STACK_REFERENCE
from tests.infra import golden
from tests.infra.conftest import STACKS, run_program
from tests.infra.declaration import Declaration
from tests.infra.settings.stackfiles import read

NETWORK, SUBNETWORK = "gcp:compute/network:Network", "gcp:compute/subnetwork:Subnetwork"
FIREWALL, TEMPLATE = "gcp:compute/firewall:Firewall", "gcp:compute/regionInstanceTemplate:RegionInstanceTemplate"
POLICY, ALERT = "gcp:compute/resourcePolicy:ResourcePolicy", "gcp:monitoring/alertPolicy:AlertPolicy"
MEMBER = "gcp:compute/subnetworkIAMMember:SubnetworkIAMMember"
ZONES = ("us-central1-a", "us-central1-b")


def of(declared: Declaration, type_: str) -> dict[str, dict[str, Any]]:
    return {found.name: found.properties for found in declared.values() if found.type == type_}


def pool(name: str, type_: str, **more: Any) -> dict[str, Any]:
    machine = {"type": type_, **more.pop("machine", {})}
    price = {zone: {"on-demand": 90.0, "spot": 36.0} for zone in more.get("zones", ZONES)}
    return {
        "name": name,
        "kind": "spot",
        "size": 4,
        "machine": machine,
        "disk": {"size_gb": 100},
        "prices": price,
        **more,
    }


def stack(**spotkeeper: Any) -> Declaration:
    given = {f"spotkeeper:{key}": value for key, value in {"zones": list(ZONES), **spotkeeper}.items()}
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in given.items()}
    return run_program("demo", {**read_config(STACKS / "Pulumi.example-gcp.yaml"), **texts})


# --- a network that exists ---------------------------------------------------------------


def test_an_existing_network_gets_only_firewall_rules(shared: Declaration) -> None:
    assert not of(shared, NETWORK) and not of(shared, SUBNETWORK)
    walls = of(shared, FIREWALL)
    assert set(walls) == {"inside", "ssh-iap"}
    for wall in walls.values():
        assert wall["network"] == "projects/acme-net/global/networks/shared"
        assert wall["project"] == "acme-net", "a shared network's rules are of its own project"
        assert wall["targetTags"] == ["sk-demo"]
    for template in of(shared, TEMPLATE).values():
        (card,) = template["networkInterfaces"]
        assert card["subnetwork"] == "projects/acme-net/regions/us-central1/subnetworks/train"


def test_the_function_may_use_only_the_named_shared_subnetwork(shared: Declaration) -> None:
    (member,) = of(shared, MEMBER).values()
    assert (member["project"], member["region"], member["subnetwork"]) == ("acme-net", "us-central1", "train")
    assert member["role"] == "roles/compute.networkUser" and member["member"].startswith("serviceAccount:sk-demo-fn@")


def test_another_stacks_outputs_name_the_network() -> None:
    declared = stack(network={"from_stack": "organization/net/prod"})
    other = declared[f"{STACK_REFERENCE}::network-of"]
    assert (other.properties["name"], other.parent) == ("organization/net/prod", "network")
    assert not of(declared, NETWORK)
    wall = of(declared, FIREWALL)["inside"]
    assert (wall["network"], wall["project"]) == ("projects/acme-net/global/networks/shared", "acme-net")
    (card,) = next(iter(of(declared, TEMPLATE).values()))["networkInterfaces"]
    assert card["subnetwork"] == "projects/acme-net/regions/us-central1/subnetworks/train"


def test_a_stack_without_a_subnet_in_the_region_is_named() -> None:
    with pytest.raises(pulumi.RunError, match="organization/net/prod has no subnet in us-east1, only in us-central1"):
        subnet_of({"us-central1": "x"}, "us-east1", "organization/net/prod")


def test_a_networks_project_is_read_from_its_link() -> None:
    assert project_of("projects/net/global/networks/shared", "ours") == "net"
    assert project_of("https://www.googleapis.com/compute/v1/projects/net/global/networks/n", "ours") == "net"
    assert project_of("sk-demo", "ours") == "ours"


def test_jobs_read_the_secrets_that_the_stack_names_and_machines_read_none(shared: Declaration) -> None:
    members = of(shared, "gcp:secretmanager/secretIamMember:SecretIamMember")
    found = {name: member for name, member in members.items() if "jobs-read" in name}
    assert {member["secretId"] for member in found.values()} == {
        "projects/acme-train/secrets/wandb",
        "projects/acme-vault/secrets/hub",
        "projects/acme-vault/secrets/wandb",  # of the same name as the first, which no two resources may have
    }
    assert {member["member"] for member in found.values()} == {
        "serviceAccount:trainer@acme-train.iam.gserviceaccount.com"
    }


def test_the_function_reads_the_secrets_with_addresses_of_channels_and_no_others(shared: Declaration) -> None:
    members = of(shared, "gcp:secretmanager/secretIamMember:SecretIamMember")
    (found,) = [member for name, member in members.items() if "jobs-read" not in name]
    assert found["secretId"] == "projects/acme-train/secrets/slack-ml-team"
    assert found["role"] == "roles/secretmanager.secretAccessor"
    assert found["member"].startswith("serviceAccount:sk-demo-fn@")


def test_a_plan_shows_another_stacks_outputs_as_unknown() -> None:
    """Without the engine: `spotkeeper plan`. What is made by it, on a cloud in one machine, refuses."""
    config = read_config(STACKS / "Pulumi.example-gcp.yaml")
    config["spotkeeper:network"] = json.dumps({"from_stack": "organization/net/prod"})
    wall, _ = [entry for entry in runner.declared("demo", config) if entry.type == FIREWALL]
    assert wall.inputs["network"] == "(known after up)"


# --- cards -------------------------------------------------------------------------------


def declare_cards(*more: dict[str, Any]) -> Declaration:
    """Declare pools with cards of several kinds, ``more`` pools, and one alarm."""
    return stack(
        network={"cidr": "172.16.0.0/16"},
        alerts={"email": "ml-infra@acme.dev", "about": ["holds"]},
        pools=[
            pool("ultra", "a3-ultragpu-8g", machine={"gpu_direct": "rdma"}, zones=[ZONES[0]]),
            pool("cpu", "c3-standard-8", machine={"nic": "gvnic"}, placement={"strategy": "spread"}),
            pool("plain", "n2-standard-8", machine={"nic": "virtio"}, placement={"strategy": "compact"}),
            *more,
        ],
    )


@pytest.fixture(scope="module")
def direct() -> Declaration:
    return declare_cards(
        pool("a3", "a3-highgpu-8g", machine={"gpu_direct": "tcpx"}),
        pool("mega", "a3-megagpu-8g", machine={"gpu_direct": "tcpxo"}),
        pool("as-it-is", "g2-standard-8"),
    )


def test_every_value_of_the_cards_is_as_reviewed(example: Declaration) -> None:
    """Changed on purpose? ``python -m tests.infra.golden``, then review the difference."""
    assert golden.difference(example, declare_cards()) == golden.golden("gcp-cards")


def cards(declared: Declaration, pool: str) -> list[tuple[str, str | None]]:
    """(the subnetwork's name, the card's type) of a pool's spot machines."""
    (found,) = [each for name, each in of(declared, TEMPLATE).items() if name == f"demo-{pool}-spot"]
    return [(card["subnetwork"].rsplit("/", 1)[-1], card.get("nicType")) for card in found["networkInterfaces"]]


def test_each_gpudirect_variant_has_its_cards(direct: Declaration) -> None:
    plain = [(f"sk-demo-card{index}", "GVNIC") for index in range(8)]
    assert cards(direct, "a3") == [("sk-demo", "GVNIC"), *plain[:4]]
    assert cards(direct, "mega") == [("sk-demo", "GVNIC"), *plain]
    rdma = [(f"sk-demo-rdma-a{index}", "MRDMA") for index in range(8)]
    assert cards(direct, "ultra") == [("sk-demo", "GVNIC"), plain[0], *rdma]
    fabrics = {name.split("-")[1]: each["metadata"].get("sk-fabric") for name, each in of(direct, TEMPLATE).items()}
    assert fabrics == {"a3": "tcpx", "mega": "tcpxo", "ultra": "rdma", "cpu": None, "plain": None, "as": None}


def test_a_network_card_type_is_set_only_if_configured(direct: Declaration) -> None:
    assert cards(direct, "cpu") == [("sk-demo", "GVNIC")]
    assert cards(direct, "plain") == [("sk-demo", "VIRTIO_NET")]
    assert cards(direct, "as-it-is") == [("sk-demo", None)]


def test_gpu_networks_use_jumbo_frames_and_rdma_profiles(direct: Declaration) -> None:
    networks = of(direct, NETWORK)
    assert {name: each.get("mtu") for name, each in networks.items()} == {
        "network": None, "rdma-us-central1-a": 8896, **{f"card-{index}": 8244 for index in range(8)},
    }  # fmt: skip
    assert not any(each["autoCreateSubnetworks"] for each in networks.values()), "each has only its own ranges"
    assert networks["rdma-us-central1-a"]["networkProfile"].endswith("/networkProfiles/us-central1-a-vpc-roce")
    walled = {wall["network"].rsplit("/", 1)[-1] for wall in of(direct, FIREWALL).values()}
    assert walled == {"sk-demo", *(f"sk-demo-card{index}" for index in range(8))}, "RDMA's takes no firewall rules"


def test_a_machines_subnetworks_do_not_overlap(direct: Declaration) -> None:
    ranges = [ipaddress.ip_network(each["ipCidrRange"]) for each in of(direct, SUBNETWORK).values()]
    assert len(ranges) == 1 + 8 + 8
    assert not any(one.overlaps(other) for at, one in enumerate(ranges) for other in ranges[:at])


def test_gpu_networks_fit_beside_a_large_network() -> None:
    found = [each for each, _ in zip(free_ranges("172.16.0.0/12"), range(20), strict=False)]
    assert len(set(found)) == 20 and found[0] == "10.0.0.0/16"


def test_only_the_first_card_may_have_a_public_address() -> None:
    declared = stack(network={"public_ip": True}, pools=[pool("a3", "a3-highgpu-8g", machine={"gpu_direct": "tcpx"})])
    (template, _) = of(declared, TEMPLATE).values()
    assert [bool(card.get("accessConfigs")) for card in template["networkInterfaces"]] == [True] + [False] * 4


# --- placement, disks, scheduling -----------------------------------------------------------


def test_placement_is_compact_or_spread(direct: Declaration) -> None:
    groups = {name: policy["groupPlacementPolicy"] for name, policy in of(direct, POLICY).items()}
    assert groups["sk-demo-cpu-a"] == {"availabilityDomainCount": 4}
    assert groups["sk-demo-plain-b"] == {"collocation": "COLLOCATED"}
    maintenance = {
        name: template["scheduling"]["onHostMaintenance"]
        for name, template in of(direct, TEMPLATE).items()
        if name.endswith("-od")
    }
    assert maintenance["demo-plain-od"] == "TERMINATE", "it would lose its place"
    assert maintenance["demo-cpu-od"] == "MIGRATE"


@pytest.mark.parametrize(
    ("size", "placement", "policy"),
    [
        (4, {"strategy": "spread"}, (4, None, None)),
        (8, {"strategy": "spread"}, (8, None, None)),
        (9, {"strategy": "spread"}, (8, None, None)),
        (4, {"strategy": "compact"}, (None, "COLLOCATED", None)),
        (4, {"strategy": "compact", "max_distance": 2}, (None, "COLLOCATED", 2)),
    ],
)
def test_the_policy_of_a_placement(
    size: int, placement: dict[str, Any], policy: tuple[int | None, str | None, int | None]
) -> None:
    """Domains are as many as machines, and at most 8; no group has a fixed number of machines."""
    pools = read("gcp", {"pools.1.size": size, "pools.1.placement": placement}).pools
    found = group(pools[1])
    assert (found.availability_domain_count, found.collocation, found.max_distance) == policy
    assert found.vm_count is None


def test_a_static_disk_has_the_configured_performance() -> None:
    floor = pool("floor", "c3-standard-8", kind="static", size=1, zones=[ZONES[0]])
    floor["disk"] = {"size_gb": 100, "type": "hyperdisk-balanced", "iops": 6000, "mb_s": 400, "on_destroy": "retain"}
    declared = stack(pools=[floor])
    (disk,) = of(declared, "gcp:compute/disk:Disk").values()
    assert (disk["provisionedIops"], disk["provisionedThroughput"]) == (6000, 400)
    assert [each.retain for each in declared.values() if each.name == "sk-demo-floor-s0-data"] == [True]


def test_a_static_machine_keeps_its_image(shared: Declaration) -> None:
    """The provider would replace the machine for another image, or another label of its boot disk."""
    (node,) = [each for each in shared.values() if each.type == "gcp:compute/instance:Instance"]
    assert node.ignores == ("bootDisk",)


def test_a_pool_with_notice_0_sets_no_notice() -> None:
    declared = stack(pools=[pool("quick", "g2-standard-8", notice_s=0, max_run_hours=2)])
    template = of(declared, TEMPLATE)["demo-quick-spot"]
    assert "preemptionNoticeDuration" not in template["scheduling"]
    assert template["scheduling"]["instanceTerminationAction"] == "DELETE"
    assert template["scheduling"]["maxRunDuration"] == {"seconds": 7200}
    assert template["metadata"]["sk-notice-s"] == "0"
    assert template["shieldedInstanceConfig"] == {"enableVtpm": True, "enableIntegrityMonitoring": True}


# --- who is told ---------------------------------------------------------------------------


def test_alarms_match_the_functions_log_lines(shared: Declaration) -> None:
    alarms = of(shared, ALERT)
    assert set(alarms) == {"silence", "errors", "dead-letters", "holds", "spend", "orphans"}
    lines = {
        name: alarm["conditions"][0]["conditionMatchedLog"]["filter"].rpartition(' AND jsonPayload.event="')[2]
        for name, alarm in alarms.items()
        if name in ("spend", "orphans")
    }
    assert lines == {"spend": 'limit"', "orphans": 'orphan"'}
    held = alarms["holds"]["conditions"][0]["conditionMatchedLog"]["filter"]
    assert 'jsonPayload.event="hold" AND NOT jsonPayload.reason="pause"' in held, "who pauses a job knows of it"
    for alarm in alarms.values():
        of_log = "conditionMatchedLog" in alarm["conditions"][0]
        assert ("notificationRateLimit" in alarm["alertStrategy"]) == of_log, "wanted there, and only there"
        assert alarm["notificationChannels"]


def test_about_limits_the_alarms() -> None:
    declared = stack(alerts={"email": "ml-infra@acme.dev", "about": ["holds"]})
    assert set(of(declared, ALERT)) == {"holds"}
    assert not of(stack(alerts={}), ALERT)


def test_budget_mails_go_to_the_alarms_address(shared: Declaration) -> None:
    (budget,) = of(shared, "gcp:billing/budget:Budget").values()
    assert budget["allUpdatesRule"]["monitoringNotificationChannels"]
    assert budget["budgetFilter"]["labels"] == {"sk-stack": "demo"}


def test_undeliverable_events_are_kept(shared: Declaration) -> None:
    subscriptions = of(shared, "gcp:pubsub/subscription:Subscription")
    push, dead = subscriptions["push"], subscriptions["dead"]
    assert push["deadLetterPolicy"]["maxDeliveryAttempts"] == 5
    assert push["deadLetterPolicy"]["deadLetterTopic"].endswith("/sk-demo-dead") and dead["topic"] == "sk-demo-dead"
    assert "pushConfig" not in dead
    (buries,) = [
        member["member"]
        for name, member in of(shared, "gcp:pubsub/topicIAMMember:TopicIAMMember").items()
        if name == "pubsub-buries"
    ]
    (gives_up,) = of(shared, "gcp:pubsub/subscriptionIAMMember:SubscriptionIAMMember").values()
    assert buries == gives_up["member"] and "gcp-sa-pubsub" in buries


def test_the_functions_images_are_deleted_with_the_stack(shared: Declaration) -> None:
    (images,) = of(shared, "gcp:artifactregistry/repository:Repository").values()
    (function,) = of(shared, "gcp:cloudfunctionsv2/function:Function").values()
    assert function["buildConfig"]["dockerRepository"].endswith("/repositories/sk-demo")
    assert {policy["action"] for policy in images["cleanupPolicies"]} == {"DELETE", "KEEP"}
