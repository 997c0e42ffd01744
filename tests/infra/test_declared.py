"""What the program declares, read as a reviewer would: names, rights, scheduling, order of destruction."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
from spotkeeper.reconcile import paths
from spotkeeper.spec import codec
from spotkeeper.spec.check_stack import check_stack
from spotkeeper.spec.stack import StackState

from infra.gcp.identity import CHANGE, LOOK
from tests.infra.declaration import DRAIN, Declaration, before, holds, of, one
from tests.infra.policies import broken
from tests.scale.burst import CONCURRENCY, INSTANCES

GOLDEN = Path(__file__).with_name("local.golden")

INSTANCE = "gcp:compute/instance:Instance"
TEMPLATE = "gcp:compute/regionInstanceTemplate:RegionInstanceTemplate"
FUNCTION = "gcp:cloudfunctionsv2/function:Function::function"
TICK = "gcp:cloudscheduler/job:Job::tick"
PUSH = "gcp:pubsub/subscription:Subscription::push"


def test_the_local_stack_is_this_list(local: Declaration) -> None:
    """Changed on purpose? Write the new list with: python -m tests.infra.golden"""
    assert GOLDEN.read_text().split("\n")[:-1] == sorted(local)


@pytest.mark.parametrize("stack", ["dev", "prod"])
@pytest.mark.parametrize("name", ["local", "example", "shared"])
def test_nothing_breaks_a_rule_of_the_policy_pack(name: str, stack: str, request: pytest.FixtureRequest) -> None:
    """Production's rules as well, where the stack file is one of production; the local one is nobody's."""
    declared: Declaration = request.getfixturevalue(name)
    assert (broken(declared, stack) == []) == ((name, stack) != ("local", "prod"))


# --- whom jobs are ----------------------------------------------------------------------


def test_machines_may_ask_for_tokens_of_the_jobs_account_and_of_no_other(example: Declaration) -> None:
    account = "trainer@acme-train.iam.gserviceaccount.com"
    binding = one(example, "gcp:serviceaccount/iAMMember:IAMMember", "node-acts-as-jobs")
    assert binding["serviceAccountId"] == f"projects/acme-train/serviceAccounts/{account}"
    assert binding["role"] == "roles/iam.serviceAccountTokenCreator"
    assert binding["member"].startswith("serviceAccount:sk-demo-vm@")
    machines = of(example, TEMPLATE) + of(example, INSTANCE)
    assert machines and all(found.properties["metadata"]["sk-job-identity"] == account for found in machines)


def test_jobs_of_a_stack_that_names_nobody_are_nobody(local: Declaration) -> None:
    assert "gcp:serviceaccount/iAMMember:IAMMember::node-acts-as-jobs" not in local
    for found in of(local, TEMPLATE) + of(local, INSTANCE):
        assert "sk-job-identity" not in found.properties["metadata"]


# --- order -----------------------------------------------------------------------------


def test_whatever_a_machine_stands_on_outlives_the_drain(local: Declaration) -> None:
    stands_on = before(local, DRAIN)
    assert {FUNCTION, "gcp:compute/network:Network::network", "gcp:compute/subnetwork:Subnetwork::subnetwork",
            "gcp:compute/firewall:Firewall::inside", "gcp:storage/bucket:Bucket::bucket",
            "gcp:storage/bucketObject:BucketObject::pools"} <= stands_on  # fmt: skip
    assert {found.key for found in of(local, "gcp:compute/resourcePolicy:ResourcePolicy")} <= stands_on
    assert {found.key for found in of(local, TEMPLATE)} <= stands_on


@pytest.mark.parametrize("trigger", [TICK, PUSH])
def test_what_could_refill_the_stack_goes_before_the_drain(local: Declaration, trigger: str) -> None:
    assert DRAIN in before(local, trigger)


def test_machines_are_made_when_they_can_boot(local: Declaration) -> None:
    for machine in [*of(local, INSTANCE), *of(local, TEMPLATE)]:
        needed = before(local, machine.key)
        assert "gcp:storage/bucketObject:BucketObject::bundle" in needed
        assert "gcp:storage/bucketIAMMember:BucketIAMMember::node-bundles" in needed
        assert "gcp:cloudrunv2/serviceIamMember:ServiceIamMember::call-node" in needed


def test_the_function_is_built_after_its_rights(local: Declaration) -> None:
    needed = before(local, FUNCTION)
    assert {found.key for found in of(local, "gcp:projects/iAMMember:IAMMember")} <= needed
    assert "gcp:storage/bucketIAMMember:BucketIAMMember::function-state" in needed


# --- machines ----------------------------------------------------------------------------


def test_a_spot_pool_has_two_templates_that_differ_in_scheduling_only(local: Declaration) -> None:
    spot = one(local, TEMPLATE, "local-burst-spot")
    on_demand = one(local, TEMPLATE, "local-burst-od")
    assert spot["scheduling"] == {
        "provisioningModel": "SPOT",
        "preemptible": True,
        "automaticRestart": False,
        "onHostMaintenance": "TERMINATE",
        "instanceTerminationAction": "DELETE",
        "maxRunDuration": {"seconds": 24 * 3600},
        "preemptionNoticeDuration": {"seconds": 120},
    }
    assert on_demand["scheduling"] == {
        "provisioningModel": "STANDARD",
        "automaticRestart": False,
        "onHostMaintenance": "TERMINATE",
        "instanceTerminationAction": "DELETE",
        "maxRunDuration": {"seconds": 24 * 3600},
    }
    assert {**spot, "scheduling": None} == {**on_demand, "scheduling": None}


def test_templates_name_themselves_and_hold_no_data_disk(local: Declaration) -> None:
    for template in of(local, TEMPLATE):
        assert "name" not in template.properties, "a fixed name cannot be replaced while it is in use"
        assert [disk.get("boot") for disk in template.properties["disks"]] == [True]
        assert template.properties["disks"][0]["autoDelete"] is True


def test_the_static_node_trains_on_its_own_retained_disk(local: Declaration) -> None:
    node = one(local, INSTANCE, "sk-local-floor-s0")
    disk = one(local, "gcp:compute/disk:Disk", "sk-local-floor-s0-data")
    assert node["zone"] == disk["zone"] == "us-central1-a"
    assert [d["deviceName"] for d in node["attachedDisks"]] == ["sk-data"]
    assert node["attachedDisks"][0]["source"].endswith("/disks/sk-local-floor-s0-data")
    assert node["scheduling"]["provisioningModel"] == "STANDARD"
    assert node["scheduling"]["automaticRestart"] is True


def test_protected_and_kept_data(example: Declaration) -> None:
    disk = example["gcp:compute/disk:Disk::sk-demo-floor-s0-data"]
    bucket = example["gcp:storage/bucket:Bucket::bucket"]
    assert disk.protect and bucket.protect
    assert bucket.properties["forceDestroy"] is False
    others = [d for d in example.values() if d.protect or d.retain]
    assert {d.key for d in others} == {disk.key, bucket.key}


@pytest.mark.parametrize("stack", ["local", "example"])
def test_everything_that_can_carry_labels_says_whose_it_is(stack: str, request: pytest.FixtureRequest) -> None:
    declared: Declaration = request.getfixturevalue(stack)
    name = {"local": "local", "example": "demo"}[stack]
    labelled = [d for d in declared.values() if "labels" in d.properties and "monitoring" not in d.type]
    assert {d.type.rsplit(":", 1)[1] for d in labelled} == {
        *("Bucket", "Disk", "Function", "Instance", "RegionInstanceTemplate", "Repository", "Subscription", "Topic")
    }
    for found in labelled:
        assert found.properties["labels"]["sk-stack"] == name, found.key
        if found.type in (INSTANCE, TEMPLATE) or "disk:Disk" in found.type:
            assert found.properties["labels"]["sk-pool"] in ("floor", "burst"), found.key


def test_metadata_holds_the_stacks_constants_only(local: Declaration) -> None:
    for machine in [*of(local, INSTANCE), *of(local, TEMPLATE)]:
        metadata = machine.properties["metadata"]
        assert sorted(metadata) == [
            *("enable-oslogin", "shutdown-script", "sk-bucket", "sk-bundle", "sk-function", "sk-notice-s"),
            *("sk-stack", "sk-storage", "startup-script"),
        ]
        assert metadata["sk-stack"] == "local"
        assert metadata["sk-storage"] == "http://127.0.0.1:9"
        assert len(metadata["sk-bundle"]) == 64


def test_no_machine_has_a_public_address(local: Declaration) -> None:
    for machine in [*of(local, INSTANCE), *of(local, TEMPLATE)]:
        assert all(not card.get("accessConfigs") for card in machine.properties["networkInterfaces"])
    for wall in of(local, "gcp:compute/firewall:Firewall"):
        assert wall.properties["sourceTags"] == wall.properties["targetTags"] == ["sk-local"]
        assert "sourceRanges" not in wall.properties


def test_machines_without_a_public_address_reach_google_and_nothing_bills_for_that(
    local: Declaration, example: Declaration
) -> None:
    for declared in (local, example):
        (subnetwork,) = of(declared, "gcp:compute/subnetwork:Subnetwork")
        assert subnetwork.properties["privateIpGoogleAccess"] is True, "else no machine ever says hello"
        assert not [found for found in declared.values() if "outer" in found.type], "a router with its NAT"


def test_people_log_in_where_the_stack_file_says_so_and_through_googles_proxy_only(example: Declaration) -> None:
    outer = [
        wall.properties for wall in of(example, "gcp:compute/firewall:Firewall") if "sourceRanges" in wall.properties
    ]
    (ssh,) = outer
    assert ssh["sourceRanges"] == ["35.235.240.0/20"]
    assert ssh["allows"] == [{"protocol": "tcp", "ports": ["22"]}]
    assert ssh["targetTags"] == one(example, "gcp:compute/firewall:Firewall", "inside")["targetTags"]


def test_one_placement_policy_for_each_zone(local: Declaration) -> None:
    policies = of(local, "gcp:compute/resourcePolicy:ResourcePolicy")
    assert [p.name for p in sorted(policies, key=lambda p: p.name)] == [f"sk-local-burst-{z}" for z in "abc"]
    assert all(p.properties["groupPlacementPolicy"]["collocation"] == "COLLOCATED" for p in policies)
    assert all("resourcePolicies" not in t.properties for t in of(local, TEMPLATE)), "it would tie the pool to a zone"


# --- the function and what calls it ------------------------------------------------------


def test_the_functions_environment(local: Declaration) -> None:
    service = one(local, "gcp:cloudfunctionsv2/function:Function", "function")["serviceConfig"]
    assert service["environmentVariables"] == {
        "SPOTKEEPER_STACK": "local",
        "SPOTKEEPER_BUCKET": "gs://sk-local-local",
        "SPOTKEEPER_AUDIENCE": "https://us-central1-local.cloudfunctions.net/sk-local",
        "SPOTKEEPER_INVOKERS": "sk-local-ck@spotkeeper-test.iam.gserviceaccount.com",
        "SPOTKEEPER_COMPUTE_ENDPOINT": "http://127.0.0.1:9/compute/v1",
        "SPOTKEEPER_JWKS": "http://127.0.0.1:9/local/v1/jwks",
        "THREADS": str(CONCURRENCY),
    }


def test_the_function_takes_as_many_reports_at_once_as_its_bursts_are_tested_with(local: Declaration) -> None:
    service = one(local, "gcp:cloudfunctionsv2/function:Function", "function")["serviceConfig"]
    assert (service["maxInstanceCount"], service["maxInstanceRequestConcurrency"]) == (INSTANCES, CONCURRENCY)
    assert service["availableCpu"] == "1", "the platform takes no concurrency with less"


def test_a_real_stack_leaves_googles_addresses_to_the_function(example: Declaration) -> None:
    service = one(example, "gcp:cloudfunctionsv2/function:Function", "function")["serviceConfig"]
    assert sorted(service["environmentVariables"]) == [
        *("SPOTKEEPER_AUDIENCE", "SPOTKEEPER_BUCKET", "SPOTKEEPER_INVOKERS", "SPOTKEEPER_STACK", "THREADS")
    ]
    assert service["environmentVariables"]["SPOTKEEPER_INVOKERS"].endswith(",kim@acme.dev")


def test_the_tick_says_who_it_is_and_never_retries(local: Declaration) -> None:
    tick = local[TICK].properties
    url = one(local, "gcp:cloudfunctionsv2/function:Function", "function")
    target = tick["httpTarget"]
    assert tick["schedule"] == "* * * * *"
    assert tick["retryConfig"] == {"retryCount": 0}
    assert target["uri"].endswith(f"/{url['name']}/v1/tick")
    assert target["oidcToken"]["audience"] == target["uri"].removesuffix("/v1/tick")
    assert base64.b64decode(target["body"]) == b"{}"


def test_the_preemption_route_is_joined(local: Declaration) -> None:
    topic = one(local, "gcp:pubsub/topic:Topic", "preempted")
    sink = one(local, "gcp:logging/projectSink:ProjectSink", "preempted")
    publisher = one(local, "gcp:pubsub/topicIAMMember:TopicIAMMember", "sink-publishes")
    push = local[PUSH].properties
    assert sink["destination"].startswith("pubsub.googleapis.com/") and sink["destination"].endswith(topic["name"])
    assert 'methodName="compute.instances.preempted"' in sink["filter"]
    assert '"/instances/sk-local-"' in sink["filter"]
    assert publisher["topic"] == push["topic"] == topic["name"]
    assert publisher["role"] == "roles/pubsub.publisher"
    assert push["pushConfig"]["pushEndpoint"].endswith("/v1/event")
    assert push["pushConfig"]["oidcToken"]["serviceAccountEmail"].startswith("sk-local-ck@")


def test_pools_json_is_what_the_function_reads(local: Declaration) -> None:
    text = one(local, "gcp:storage/bucketObject:BucketObject", "pools")
    assert text["name"] == "stack/pools.json"
    state = check_stack(codec.decode(text["content"], StackState))
    burst = state.pool("burst")
    floor = state.pool("floor")
    assert burst is not None and floor is not None
    assert sorted(burst.templates) == ["on-demand", "spot"] and "local-burst-spot" in burst.templates["spot"]
    assert sorted(burst.placement) == list(burst.zones) == [f"us-central1-{zone}" for zone in "abc"]
    assert (burst.max_nodes, burst.max_on_demand, floor.max_on_demand) == (8, 2, 0)
    assert [(node.name, node.zone) for node in floor.nodes] == [("sk-local-floor-s0", "us-central1-a")]
    assert state.node_identity.startswith("sk-local-vm@")
    assert state.function_url and len(state.bundle_sha256) == 64
    assert state.max_run_s == 24 * 3600


# --- rights ------------------------------------------------------------------------------

MEMBERS = {"vm": "sk-local-vm@", "fn": "sk-local-fn@", "ck": "sk-local-ck@", "bd": "sk-local-bd@"}


def rights(declared: Declaration) -> dict[str, set[tuple[str, str]]]:
    """Who holds which role, and on what."""
    out: dict[str, set[tuple[str, str]]] = {who: set() for who in MEMBERS}
    for found in declared.values():
        member = str(found.properties.get("member", ""))
        for who, prefix in MEMBERS.items():
            if member.startswith(f"serviceAccount:{prefix}"):
                role = str(found.properties["role"]).rsplit("/", 1)[1]
                out[who].add((role, found.type.rsplit(":", 1)[1]))
    return out


def test_the_rights_of_every_account_are_these_and_no_more(local: Declaration) -> None:
    assert rights(local) == {
        "vm": {
            ("run.invoker", "ServiceIamMember"),
            ("storage.objectViewer", "BucketIAMMember"),
            ("storage.objectUser", "BucketIAMMember"),
            ("logging.logWriter", "IAMMember"),
        },
        "fn": {
            ("sk_local_look", "IAMMember"),
            ("sk_local_change", "IAMMember"),
            ("logging.logWriter", "IAMMember"),
            ("iam.serviceAccountUser", "IAMMember"),
            ("storage.objectUser", "BucketIAMMember"),
            ("storage.objectViewer", "BucketIAMMember"),
        },
        "ck": {("run.invoker", "ServiceIamMember")},
        # It runs what packages bring, and can write to no bucket.
        "bd": {
            ("artifactregistry.writer", "IAMMember"),
            ("logging.logWriter", "IAMMember"),
            ("storage.objectViewer", "IAMMember"),
        },
    }


def test_the_function_changes_only_machines_of_its_stack(local: Declaration) -> None:
    may = one(local, "gcp:projects/iAMMember:IAMMember", "fn-change")["condition"]["expression"]
    zone, rank = "projects/local/zones/us-central1-a", "sk-local-abcdefgh-r0007"
    for name in (f"{zone}/instances/{rank}-a3", f"{zone}/disks/{rank}-a3", f"{zone}/disks/{rank}-d0"):
        assert holds(may, name)
    assert holds(may, f"projects/local/global/snapshots/{rank}-d1")
    for name in ("instances/sk-local-floor-s0", "disks/sk-local-floor-s0-data", "disks/sk-local-floor-s0"):
        assert not holds(may, f"{zone}/{name}"), "what Pulumi declared stays, with its data"
    for name in ("instances/sk-prod-abcdefgh-r0007-a3", "instances/mine", "networks/sk-local-abcdefgh-r0007-a3"):
        assert not holds(may, f"{zone}/{name}")
    assert not set(LOOK) & set(CHANGE)
    assert all(not name.endswith((".delete", ".create")) for name in LOOK)
    assert not any("*" in name or name.startswith(("iam.", "resourcemanager.")) for name in (*LOOK, *CHANGE))


def test_the_function_may_ask_what_spot_machines_cost_and_whether_they_are_to_be_had(local: Declaration) -> None:
    """Methods of a region and not of a machine, so the role whose condition names machines cannot hold them."""
    look = one(local, "gcp:projects/iAMCustomRole:IAMCustomRole", "role-look")
    assert {"compute.advice.capacity", "compute.advice.capacityHistory"} <= set(look["permissions"])
    assert "condition" not in one(local, "gcp:projects/iAMMember:IAMMember", "fn-look")


def test_only_the_nodes_identity_may_be_handed_out(local: Declaration) -> None:
    users = [d for d in local.values() if d.properties.get("role") == "roles/iam.serviceAccountUser"]
    assert [d.properties["serviceAccountId"].rsplit("/", 1)[1].partition("@")[0] for d in users] == ["sk-local-vm"]


def test_the_function_writes_nothing_that_a_machine_runs_or_that_people_declare(local: Declaration) -> None:
    """It says which bundle agents become: one that it could write as well would be anybody's code on every machine."""
    objects = "projects/_/buckets/sk-local-local/objects"
    member = "gcp:storage/bucketIAMMember:BucketIAMMember"
    writes, reads = (one(local, member, f"function-{key}")["condition"]["expression"] for key in ("state", "stack"))
    refused = [part.removeprefix('!resource.name.startsWith("').removesuffix('")') for part in writes.split(" && ")]
    assert f'resource.name.startsWith("{objects}/stack/")' == reads

    def may(path: str) -> bool:
        return not any(f"{objects}/{path}".startswith(each) for each in refused)

    sha, job = "a" * 64, "abcd2345"
    for path in (paths.bundle(sha), f"function/{sha}.zip", paths.STACK, paths.DRAIN):
        assert not may(path), path
    for path in (paths.ALLOC, paths.record(job), paths.active(job), paths.tomb(job), paths.prices("burst"), ""):
        assert may(path), path


def test_machines_write_logs_checkpoints_and_outputs_only(local: Declaration) -> None:
    access = of(local, "gcp:storage/bucketIAMMember:BucketIAMMember")
    of_nodes = {d.name: d.properties for d in access if d.name.startswith("node-")}
    assert {name: p["role"].rsplit(".", 1)[1] for name, p in of_nodes.items()} == {
        "node-bundles": "objectViewer",
        "node-source": "objectViewer",
        "node-logs": "objectUser",
        "node-ckpt": "objectUser",
        "node-out": "objectUser",
    }
    for name, properties in of_nodes.items():
        assert f"/{name.removeprefix('node-')}/" in properties["condition"]["expression"]


def test_nobody_outside_may_call(local: Declaration) -> None:
    assert "allUsers" not in json.dumps([d.properties for d in local.values()], default=str)
    assert "allAuthenticatedUsers" not in json.dumps([d.properties for d in local.values()], default=str)


def test_a_real_stack_tells_somebody(example: Declaration) -> None:
    policy = one(example, "gcp:monitoring/alertPolicy:AlertPolicy", "silence")
    assert 'service_name = "sk-demo"' in policy["conditions"][0]["conditionAbsent"]["filter"]
    budget = one(example, "gcp:billing/budget:Budget", "budget")
    assert [rule["thresholdPercent"] for rule in budget["thresholdRules"]] == [0.5, 0.9, 1]
