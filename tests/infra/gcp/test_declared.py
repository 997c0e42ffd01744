"""What the program declares, read as a reviewer would: names, rights, scheduling, order of destruction."""

from __future__ import annotations

import base64
import json
import re

import pytest

from infra.gcp.function import environment
from infra.gcp.identity import CHANGE_RIGHTS, READ_RIGHTS
from infra.gcp.pools import scheduling
from spotkeeper.contract import codec
from spotkeeper.contract.stack import StackState
from spotkeeper.local.access.iam import holds
from spotkeeper.local.deploy.config import read_config
from spotkeeper.reconcile.clouds.base import Addresses
from spotkeeper.reconcile.store import paths
from tests.contract.stack_rules import check_stack
from tests.infra import golden
from tests.infra.conftest import STACKS, Program, run_program
from tests.infra.declaration import DRAIN, Declaration, before, of, one
from tests.infra.policies import broken
from tests.infra.settings import stackfiles
from tests.scale.burst import CONCURRENCY, INSTANCES

INSTANCE = "gcp:compute/instance:Instance"
TEMPLATE = "gcp:compute/regionInstanceTemplate:RegionInstanceTemplate"
FUNCTION = "gcp:cloudfunctionsv2/function:Function::function"
TICK = "gcp:cloudscheduler/job:Job::tick"
PUSH = "gcp:pubsub/subscription:Subscription::push"


def test_every_value_and_option_is_as_reviewed(local: Declaration, example: Declaration, shared: Declaration) -> None:
    """Changed on purpose? ``python -m tests.infra.golden``, then review the difference."""
    assert golden.text(local) == golden.golden("local")
    assert golden.text(example) == golden.golden("gcp")
    assert golden.difference(example, shared) == golden.golden("gcp-shared")


@pytest.mark.parametrize("stack", ["dev", "prod"])
@pytest.mark.parametrize("name", ["local", "example", "shared"])
def test_no_declared_resource_breaks_a_policy_rule(name: str, stack: str, request: pytest.FixtureRequest) -> None:
    """Production's rules as well, where the stack file is one of production; the local one is nobody's."""
    declared: Declaration = request.getfixturevalue(name)
    assert (broken(declared, stack) == []) == ((name, stack) != ("local", "prod"))


# --- whom jobs are ----------------------------------------------------------------------


def test_machines_may_get_tokens_only_of_the_jobs_account(example: Declaration) -> None:
    account = "trainer@acme-train.iam.gserviceaccount.com"
    binding = one(example, "gcp:serviceaccount/iAMMember:IAMMember", "node-acts-as-jobs")
    assert binding["serviceAccountId"] == f"projects/acme-train/serviceAccounts/{account}"
    role = one(example, "gcp:projects/iAMCustomRole:IAMCustomRole", "role-tokens")
    assert binding["role"] == f"projects/acme-train/roles/{role['roleId']}" and role["project"] == "acme-train"
    assert set(role["permissions"]) == {"iam.serviceAccounts.getAccessToken", "iam.serviceAccounts.getOpenIdToken"}
    assert binding["member"].startswith("serviceAccount:sk-demo-vm@")
    machines = of(example, TEMPLATE) + of(example, INSTANCE)
    assert machines and all(found.properties["metadata"]["sk-job-identity"] == account for found in machines)


def test_without_job_identity_jobs_have_no_identity(local: Declaration) -> None:
    assert "gcp:serviceaccount/iAMMember:IAMMember::node-acts-as-jobs" not in local
    for found in of(local, TEMPLATE) + of(local, INSTANCE):
        assert "sk-job-identity" not in found.properties["metadata"]


# --- order -----------------------------------------------------------------------------


def test_resources_of_machines_outlive_the_drain(local: Declaration) -> None:
    stands_on = before(local, DRAIN)
    assert {FUNCTION, "gcp:compute/network:Network::network", "gcp:compute/subnetwork:Subnetwork::subnetwork",
            "gcp:compute/firewall:Firewall::inside", "gcp:storage/bucket:Bucket::bucket",
            "gcp:storage/bucketObject:BucketObject::pools"} <= stands_on  # fmt: skip
    assert {found.key for found in of(local, "gcp:compute/resourcePolicy:ResourcePolicy")} <= stands_on
    assert {found.key for found in of(local, TEMPLATE)} <= stands_on


@pytest.mark.parametrize("trigger", [TICK, PUSH])
def test_triggers_are_deleted_before_the_drain(local: Declaration, trigger: str) -> None:
    assert DRAIN in before(local, trigger)


def test_machines_are_made_after_all_that_they_need_to_boot(local: Declaration) -> None:
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


def test_a_spot_pools_two_templates_differ_only_in_scheduling(local: Declaration) -> None:
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


def test_without_a_longest_run_templates_name_no_end() -> None:
    """Compute Engine accepts a termination action of an on-demand machine only with a limit."""
    pool = stackfiles.read("gcp").pools[1]
    for model in ("spot", "on-demand"):
        found = scheduling(pool, model, None)
        assert found.max_run_duration is None
        assert found.instance_termination_action == ("DELETE" if model == "spot" else None)


def test_templates_have_names_and_no_data_disk(local: Declaration) -> None:
    for template in of(local, TEMPLATE):
        assert "name" not in template.properties, "a fixed name cannot be replaced while it is in use"
        assert [disk.get("boot") for disk in template.properties["disks"]] == [True]
        assert template.properties["disks"][0]["autoDelete"] is True


def test_the_static_machine_trains_on_its_own_retained_disk(local: Declaration) -> None:
    node = one(local, INSTANCE, "sk-local-floor-s0")
    disk = one(local, "gcp:compute/disk:Disk", "sk-local-floor-s0-data")
    assert node["zone"] == disk["zone"] == "us-central1-a"
    assert [d["deviceName"] for d in node["attachedDisks"]] == ["sk-data"]
    assert node["attachedDisks"][0]["source"].endswith("/disks/sk-local-floor-s0-data")
    assert node["scheduling"]["provisioningModel"] == "STANDARD"
    assert node["scheduling"]["automaticRestart"] is True


def test_on_destroy_protects_or_retains_data(example: Declaration) -> None:
    disk = example["gcp:compute/disk:Disk::sk-demo-floor-s0-data"]
    bucket = example["gcp:storage/bucket:Bucket::bucket"]
    assert disk.protect and bucket.protect
    assert bucket.properties["forceDestroy"] is False
    others = [d for d in example.values() if d.protect or d.retain]
    assert {d.key for d in others} == {disk.key, bucket.key}


@pytest.mark.parametrize("stack", ["local", "example"])
def test_every_labelable_resource_has_the_stacks_label(stack: str, request: pytest.FixtureRequest) -> None:
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


def test_machines_reach_google_privately_without_a_nat(local: Declaration, example: Declaration) -> None:
    for declared in (local, example):
        (subnetwork,) = of(declared, "gcp:compute/subnetwork:Subnetwork")
        assert subnetwork.properties["privateIpGoogleAccess"] is True, "else no machine ever says hello"
        assert not [found for found in declared.values() if "outer" in found.type], "a router with its NAT"


def test_shells_need_the_stack_files_permission_and_the_proxy(example: Declaration) -> None:
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


def test_static_machines_of_a_pool_with_a_placement_are_in_its_group() -> None:
    config = read_config(STACKS / "Pulumi.local.yaml", endpoint="http://127.0.0.1:9")
    pools = json.loads(config["spotkeeper:pools"])
    (fixed,) = (pool for pool in pools if pool["kind"] == "static")
    fixed |= {"placement": {}, "zones": ["us-central1-a"]}
    made = run_program("local", {**config, "spotkeeper:pools": json.dumps(pools)})
    machines = of(made, "gcp:compute/instance:Instance")
    (policy,) = (one for one in of(made, "gcp:compute/resourcePolicy:ResourcePolicy") if fixed["name"] in one.name)
    assert machines and all(policy.name in str(machine.properties["resourcePolicies"]) for machine in machines)


# --- the function and what calls it ------------------------------------------------------


def test_the_functions_environment(local: Declaration) -> None:
    service = one(local, "gcp:cloudfunctionsv2/function:Function", "function")["serviceConfig"]
    assert service["environmentVariables"] == {
        "SPOTKEEPER_STACK": "local",
        "SPOTKEEPER_BUCKET": "gs://sk-local-local",
        "SPOTKEEPER_REGION": "us-central1",
        "SPOTKEEPER_AUDIENCE": "https://us-central1-local.cloudfunctions.net/sk-local",
        "SPOTKEEPER_INVOKERS": "sk-local-ck@spotkeeper-test.iam.gserviceaccount.com",
        "SPOTKEEPER_COMPUTE_ENDPOINT": "http://127.0.0.1:9/compute/v1",
        "SPOTKEEPER_JWKS": "http://127.0.0.1:9/local/v1/jwks",
        "THREADS": str(CONCURRENCY),
    }


def test_a_stack_may_name_who_issues_its_tokens() -> None:
    config = read_config(STACKS / "Pulumi.local.yaml", endpoint="http://127.0.0.1:9")
    ends = json.loads(config["spotkeeper:endpoints"]) | {"issuer": "https://issuer.test"}
    named = run_program("local", {**config, "spotkeeper:endpoints": json.dumps(ends)})
    service = one(named, "gcp:cloudfunctionsv2/function:Function", "function")["serviceConfig"]
    assert service["environmentVariables"]["SPOTKEEPER_ISSUER"] == "https://issuer.test"


def test_the_functions_concurrency_equals_that_of_the_burst_tests(local: Declaration) -> None:
    service = one(local, "gcp:cloudfunctionsv2/function:Function", "function")["serviceConfig"]
    assert (service["maxInstanceCount"], service["maxInstanceRequestConcurrency"]) == (INSTANCES, CONCURRENCY)
    assert service["availableCpu"] == "1", "the platform takes no concurrency with less"


def test_a_real_stack_sets_no_endpoints(example: Declaration) -> None:
    service = one(example, "gcp:cloudfunctionsv2/function:Function", "function")["serviceConfig"]
    assert sorted(service["environmentVariables"]) == [
        *("SPOTKEEPER_AUDIENCE", "SPOTKEEPER_BUCKET", "SPOTKEEPER_CHANNELS", "SPOTKEEPER_INVOKERS"),
        *("SPOTKEEPER_REGION", "SPOTKEEPER_STACK", "THREADS"),
    ]
    assert service["environmentVariables"]["SPOTKEEPER_INVOKERS"].endswith(",kim@acme.dev,lee@acme.dev")


def test_on_the_one_machine_cloud_team_members_may_call_the_function_too() -> None:
    changes = {"submitters": ["user:lee@acme.dev"], "teams": {"vision": {"members": ["ann", "eve"], "high": ["eve"]}}}
    there = environment(stackfiles.read("gcp", changes | {"endpoints.compute": "http://127.0.0.1:1"}), "tick@acme.dev")
    assert there["SPOTKEEPER_INVOKERS"] == "tick@acme.dev,lee@acme.dev,ann,eve"


def test_the_function_gets_the_stack_files_address_ranges() -> None:
    """A machine of any other address is never taken in, and bills until its boot deadline."""
    network = {"vpc": "projects/acme-net/global/networks/shared", "addresses": ["100.64.0.0/10", "10.0.0.0/8"],
               "subnets": {"us-east1": "projects/acme-net/regions/us-east1/subnetworks/train"}}  # fmt: skip
    told = environment(stackfiles.read("gcp", {"network": network}), "clock@acme.dev")
    assert told["SPOTKEEPER_ADDRESSES"] == "100.64.0.0/10,10.0.0.0/8"
    assert Addresses(told["SPOTKEEPER_ADDRESSES"]).holds("100.64.7.7")


def test_the_tick_is_authenticated_and_never_retried(local: Declaration) -> None:
    tick = local[TICK].properties
    url = one(local, "gcp:cloudfunctionsv2/function:Function", "function")
    target = tick["httpTarget"]
    assert tick["schedule"] == "* * * * *"
    assert tick["retryConfig"] == {"retryCount": 0}
    assert target["uri"].endswith(f"/{url['name']}/v1/tick")
    assert target["oidcToken"]["audience"] == target["uri"].removesuffix("/v1/tick")
    assert base64.b64decode(target["body"]) == b"{}"


def test_preemptions_are_routed_by_sink_topic_and_push(local: Declaration) -> None:
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
    assert (burst.max_machines, burst.max_on_demand, floor.max_on_demand) == (8, 2, 0)
    assert [(node.name, node.zone) for node in floor.machines] == [("sk-local-floor-s0", "us-central1-a")]
    assert state.node_identity.startswith("sk-local-vm@")
    assert state.function_url and len(state.bundle_sha256) == 64
    assert state.max_run_s == 24 * 3600


def test_the_stacks_outputs_name_what_was_declared(local: Program) -> None:
    state = codec.decode(one(local, "gcp:storage/bucketObject:BucketObject", "pools")["content"], StackState)
    assert local.outputs == {
        "bucket": state.bucket,
        "reconcileUrl": state.function_url,
        "bundle": state.bundle_sha256,
        "pools": ["floor", "burst"],
        "staticMachines": ["sk-local-floor-s0"],
        "keptDisks": [],
    }


# --- rights ------------------------------------------------------------------------------

MEMBERS = {"vm": "sk-local-vm@", "fn": "sk-local-fn@", "ck": "sk-local-ck@", "bd": "sk-local-bd@"}


def without_life(role: str) -> str:
    """The id of a custom role without what tells two lives of a stack apart."""
    return re.sub(r"_\d{8}\Z", "", role)


def rights(declared: Declaration) -> dict[str, set[tuple[str, str]]]:
    """Who holds which role, and on what."""
    out: dict[str, set[tuple[str, str]]] = {who: set() for who in MEMBERS}
    for found in declared.values():
        member = str(found.properties.get("member", ""))
        for who, prefix in MEMBERS.items():
            if member.startswith(f"serviceAccount:{prefix}"):
                role = without_life(str(found.properties["role"]).rsplit("/", 1)[1])
                out[who].add((role, found.type.rsplit(":", 1)[1]))
    return out


def test_every_accounts_rights_equal_the_golden_list(local: Declaration) -> None:
    assert rights(local) == {
        "vm": {
            ("run.invoker", "ServiceIamMember"),
            ("storage.objectViewer", "BucketIAMMember"),
            ("storage.objectUser", "BucketIAMMember"),
            ("logging.logWriter", "IAMMember"),
        },
        "fn": {
            ("sk_local_read", "IAMMember"),
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


def test_the_function_may_change_only_its_stacks_machines(local: Declaration) -> None:
    may = one(local, "gcp:projects/iAMMember:IAMMember", "fn-change")["condition"]["expression"]
    zone, node = "projects/local/zones/us-central1-a", "sk-local-abcdefgh-n0007"
    for name in (f"{zone}/instances/{node}-a3", f"{zone}/disks/{node}-a3", f"{zone}/disks/{node}-d0"):
        assert holds(may, name)
    assert holds(may, f"projects/local/global/snapshots/{node}-d1")
    for name in ("instances/sk-local-floor-s0", "disks/sk-local-floor-s0-data", "disks/sk-local-us-north-s0-data"):
        assert not holds(may, f"{zone}/{name}"), "what Pulumi declared stays, with its data"
    for name in ("instances/sk-prod-abcdefgh-n0007-a3", "instances/mine", "networks/sk-local-abcdefgh-n0007-a3"):
        assert not holds(may, f"{zone}/{name}")
    assert not set(READ_RIGHTS) & set(CHANGE_RIGHTS)
    assert all(not name.endswith((".delete", ".create")) for name in READ_RIGHTS)
    rights = (*READ_RIGHTS, *CHANGE_RIGHTS)
    assert not any("*" in right or right.startswith(("iam.", "resourcemanager.")) for right in rights)


def test_the_function_may_read_spot_advice(local: Declaration) -> None:
    """Methods of a region and not of a machine, so the role whose condition names machines cannot hold them."""
    read = one(local, "gcp:projects/iAMCustomRole:IAMCustomRole", "role-read")
    assert {"compute.advice.capacity", "compute.advice.capacityHistory"} <= set(read["permissions"])
    assert "condition" not in one(local, "gcp:projects/iAMMember:IAMMember", "fn-read")


def test_a_rebuilt_stack_gets_new_role_ids(local: Declaration) -> None:
    """The id of a deleted one stays taken for up to 37 days: a destroy and an up again would fail by it."""
    for role in of(local, "gcp:projects/iAMCustomRole:IAMCustomRole"):
        assert role.properties["roleId"] != without_life(role.properties["roleId"])
        assert "gcp:serviceaccount/account:Account::account-fn" in role.depends_on, "whose number Google gives once"


def test_public_ip_gives_machines_public_addresses(local: Declaration) -> None:
    """An insert with a public address asks for a right on its subnetwork; without it every launch is refused."""
    wanted = "compute.subnetworks.useExternalIp"
    config = read_config(STACKS / "Pulumi.local.yaml", endpoint="http://127.0.0.1:9")
    public = run_program("local", {**config, "spotkeeper:network": '{"public_ip": true}'})
    for declared, granted in ((local, False), (public, True)):
        read = one(declared, "gcp:projects/iAMCustomRole:IAMCustomRole", "role-read")
        assert (wanted in read["permissions"]) is granted


def test_pubsub_may_get_the_clock_accounts_tokens_before_it_pushes(local: Declaration) -> None:
    binding = one(local, "gcp:serviceaccount/iAMMember:IAMMember", "pubsub-is-clock")
    assert binding["role"] == "roles/iam.serviceAccountTokenCreator"
    assert binding["serviceAccountId"].rsplit("/", 1)[1].startswith("sk-local-ck@")
    assert "gcp-sa-pubsub" in binding["member"]
    assert "gcp:serviceaccount/iAMMember:IAMMember::pubsub-is-clock" in before(local, PUSH)


def test_the_function_is_built_after_its_rights_have_propagated(local: Declaration, example: Declaration) -> None:
    settled = "pulumi-python:dynamic/spotkeeper:Settled::settled"
    for declared, seconds in ((local, 0), (example, 120)):
        assert declared[settled].properties["seconds"] == seconds
        assert settled in declared[FUNCTION].depends_on
        ours = {d.key for d in of(declared, "gcp:projects/iAMMember:IAMMember") if d.parent == "identity"}
        assert ours and ours <= before(declared, settled)


def test_the_budget_call_names_a_billing_project(example: Declaration) -> None:
    """With a person's credentials the Budget API answers 403 without a project of the call's own."""
    budget = example["gcp:billing/budget:Budget::budget"]
    provider = one(example, "pulumi:providers:gcp", budget.provider)
    assert provider["billingProject"] == "acme-train" and provider["userProjectOverride"] in (True, "true")
    others = {d.provider for d in example.values() if d.type.startswith("gcp:") and d is not budget}
    assert others == {""}, "everything else goes by the default one"


def test_only_the_machines_account_may_be_used(local: Declaration) -> None:
    users = [d for d in local.values() if d.properties.get("role") == "roles/iam.serviceAccountUser"]
    assert [d.properties["serviceAccountId"].rsplit("/", 1)[1].partition("@")[0] for d in users] == ["sk-local-vm"]


def test_the_function_cannot_write_programs_or_declared_documents(local: Declaration) -> None:
    """It says which bundle agents become: one that it could write as well would be anybody's code on every machine."""
    objects = "projects/_/buckets/sk-local-local/objects"
    member = "gcp:storage/bucketIAMMember:BucketIAMMember"
    writes, reads = (one(local, member, f"function-{key}")["condition"]["expression"] for key in ("state", "stack"))
    assert f'resource.name.startsWith("{objects}/stack/")' == reads

    def may(path: str) -> bool:
        return holds(writes, f"{objects}/{path}")

    sha, job = "a" * 64, "abcd2345"
    for path in (paths.bundle(sha), f"function/{sha}.zip", paths.STACK, paths.DRAIN):
        assert not may(path), path
    for path in (paths.ALLOCATION, paths.record(job), paths.active(job), paths.tomb(job), paths.prices("burst"), ""):
        assert may(path), path


def test_submitters_cannot_write_programs(example: Declaration) -> None:
    """``stack/pools.json`` names the bundle that agents run as root: who writes it owns every machine."""
    who, objects = "user:lee@acme.dev", "projects/_/buckets/sk-acme-train-demo/objects"
    held = [found.properties for found in example.values() if found.properties.get("member") == who]
    assert {(each["role"], "condition" in each) for each in held} == {
        ("roles/run.invoker", False), ("roles/storage.objectViewer", False), ("roles/storage.objectCreator", True),
        ("roles/storage.objectUser", True),
    }  # fmt: skip

    def may(role: str, path: str, bucket: str = objects) -> bool:
        given = [each["condition"]["expression"] for each in held if each["role"] == f"roles/storage.{role}"]
        return any(holds(condition, f"{bucket}/{path}") for condition in given)

    sha, job = "a" * 64, "abcd2345"
    made = (paths.active(job), paths.record(job), paths.source(job, sha), paths.spec(job), paths.spec(job, sha))
    for path in (*made, paths.request(job, "1")):
        assert may("objectCreator", path) and not may("objectUser", path), path
    assert may("objectUser", paths.name("demo")), "the name of an ended job is used again"
    theirs = (paths.STACK, paths.ALLOCATION, paths.DRAIN, paths.bundle(sha), f"function/{sha}.zip", paths.tomb(job))
    of_jobs = (paths.lease(job), paths.progress(job), f"{paths.facts(job)}x", f"{paths.ledger(job)}spec")
    for path in (*theirs, *of_jobs, f"{paths.ledger(job)}x", paths.log(job, 0, 1), f"{paths.copies(job)}1-2/x"):
        assert not may("objectCreator", path) and not may("objectUser", path), path
    assert not may("objectCreator", paths.record(job), "projects/_/buckets/other/objects")


def test_machines_may_write_only_logs_checkpoints_and_outputs(local: Declaration) -> None:
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


def test_only_invokers_may_call(local: Declaration) -> None:
    assert "allUsers" not in json.dumps([d.properties for d in local.values()], default=str)
    assert "allAuthenticatedUsers" not in json.dumps([d.properties for d in local.values()], default=str)


def test_a_stack_without_alerts_and_budget_has_no_empty_group(local: Declaration, example: Declaration) -> None:
    assert not of(local, "spotkeeper:gcp:Alerts") and of(example, "spotkeeper:gcp:Alerts")


def test_alerts_reach_the_configured_address(example: Declaration) -> None:
    metric = one(example, "gcp:logging/metric:Metric", "ticks")
    assert 'service_name="sk-demo" AND jsonPayload.event="tick"' in metric["filter"]
    policy = one(example, "gcp:monitoring/alertPolicy:AlertPolicy", "silence")
    condition = policy["conditions"][0]["conditionPrometheusQueryLanguage"]
    assert f"user_{metric['name']}{{" in condition["query"] and condition["duration"] == "300s"
    assert condition["disableMetricValidation"], "there is no such metric before the first tick"
    budget = one(example, "gcp:billing/budget:Budget", "budget")
    assert [rule["thresholdPercent"] for rule in budget["thresholdRules"]] == [0.5, 0.9, 1]
