"""A stack in two regions: what is declared in each, and that nothing of the home region changes."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from bench.service import idle
from infra.settings.gcp import subnet_ranges
from spotkeeper.cli.stacks.stackfile import read_stack_file
from spotkeeper.contract import codec
from spotkeeper.contract.stack import Model, StackState
from spotkeeper.local.deploy.config import read_config
from tests.contract.stack_rules import check_stack
from tests.infra.conftest import STACKS, Program, run_program
from tests.infra.declaration import DRAIN, REGIONS, Declaration, before, of, one
from tests.infra.gcp.test_networks import MEMBER, SUBNETWORK, TEMPLATE
from tests.infra.policies import broken
from tests.infra.settings import stackfiles

ABROAD = "us-east1"
NETWORK = {
    "vpc": "projects/acme-net/global/networks/shared",
    "subnets": {
        "us-central1": "projects/acme-net/regions/us-central1/subnetworks/train",
        "us-east1": "projects/acme-net/regions/us-east1/subnetworks/east",
    },
}
POOLS = "gcp:storage/bucketObject:BucketObject::pools"


def declare(stack: str, name: str, *regions: str, **more: Any) -> Program:
    """Declare a stack of ``infra/stacks`` with these regions, and the second pool in each of their zones."""
    config = read_config(STACKS / f"Pulumi.{stack}.yaml", "http://127.0.0.1:9" if stack == "local" else None)
    zones = ["us-central1-a", "us-central1-b", *(f"{region}-b" for region in regions[1:])]
    pools = json.loads(config["spotkeeper:pools"])
    pools[1] = {key: value for key, value in pools[1].items() if key not in ("zones", "prices")}
    given = {"zones": zones, "pools": pools, "regions": list(regions), **more}
    texts = {f"spotkeeper:{key}": v if isinstance(v, str) else json.dumps(v) for key, v in given.items()}
    return run_program(name, {**config, "spotkeeper:region": "", **texts})


@pytest.fixture(scope="module")
def home() -> Program:
    return declare("local", "local", "us-central1")


@pytest.fixture(scope="module")
def both() -> Program:
    return declare("local", "local", "us-central1", ABROAD)


def test_another_region_adds_resources_and_changes_none(home: Program, both: Program) -> None:
    """Only the lists of zones change: in the document that the function reads, and in what refuses and drains."""
    changed = {key for key, found in home.items() if both.get(key) != found}
    assert changed == {POOLS, REGIONS, DRAIN}
    assert {key: value for key, value in both[DRAIN].properties.items() if key != "zones"} == {
        key: value for key, value in home[DRAIN].properties.items() if key != "zones"
    }
    added = [both[key] for key in both if key not in home]
    assert {(found.type.rsplit(":", 1)[1], found.properties["region"]) for found in added} == {
        *(("Subnetwork", ABROAD), ("RegionInstanceTemplate", ABROAD), ("ResourcePolicy", ABROAD)),
    }
    assert len(added) == 4, "a subnetwork, two templates, and the policy of a zone"


def test_another_home_moves_the_function_and_its_schedule_and_nothing_else(both: Program) -> None:
    """Networks, disks, bucket and drain stay; templates tell machines the new address."""
    moved = declare("local", "local", "us-central1", ABROAD, home=ABROAD)
    went, came = both.keys() - moved.keys(), moved.keys() - both.keys()
    assert came == {f"{key}-{ABROAD}" for key in went}, "made anew before the old ones are deleted"
    assert {key.split("::")[0].rsplit(":", 1)[1] for key in went} == {
        *("Function", "Repository", "Job", "ServiceIamMember"),
    }
    assert {moved[key].properties.get("location") or moved[key].properties["region"] for key in came} == {ABROAD}
    changed = {key for key in both.keys() & moved.keys() if moved[key].properties != both[key].properties}
    assert {key.split("::")[0].rsplit(":", 1)[1] for key in changed} == {
        *("BucketObject", "RegionInstanceTemplate", "Instance", "Subscription"),
    }
    (function,) = (moved[key] for key in came if moved[key].type.endswith(":Function"))
    variables = function.properties["serviceConfig"]["environmentVariables"]
    assert (function.properties["location"], variables["SPOTKEEPER_REGION"]) == (ABROAD, ABROAD)
    state = check_stack(codec.decode(moved[POOLS].properties["content"], StackState))
    assert (state.region, state.regions) == (ABROAD, ("us-central1", ABROAD))
    assert "/regions/us-central1/" in state.template("burst", Model.SPOT, "us-central1-b")


def test_another_region_costs_nothing_while_idle(home: Program, both: Program) -> None:
    settings = read_stack_file(STACKS / "Pulumi.example-gcp.yaml", None, "").settings
    one_region, two = (idle.idle(settings, Counter(each.type for each in found.values())) for found in (home, both))
    assert idle.total(one_region) == idle.total(two) > 0


def test_each_region_has_its_subnetwork_with_private_access(both: Program) -> None:
    found = {each.properties["region"]: each.properties for each in of(both, SUBNETWORK)}
    assert {region: each["ipCidrRange"] for region, each in found.items()} == {
        "us-central1": "10.40.0.0/16",
        ABROAD: "10.82.0.0/16",
    }
    assert all(each["privateIpGoogleAccess"] for each in found.values()), "else no machine there ever says hello"
    assert len({each["network"] for each in found.values()}) == 1, "machines of one job reach each other"


def test_a_regions_templates_put_machines_into_its_subnetwork(both: Program) -> None:
    for template in of(both, TEMPLATE):
        region = template.properties["region"]
        (card,) = template.properties["networkInterfaces"]
        assert f"/regions/{region}/subnetworks/" in card["subnetwork"]
    east = one(both, TEMPLATE, f"local-burst-spot-{ABROAD}")
    west = one(both, TEMPLATE, "local-burst-spot")
    differs = {key for key in west if east[key] != west[key]}
    assert differs == {"region", "networkInterfaces"}


def test_the_function_finds_the_template_of_each_zone(both: Program, home: Program) -> None:
    state = check_stack(codec.decode(both[POOLS].properties["content"], StackState))
    assert (state.region, state.regions) == ("us-central1", ("us-central1", ABROAD))
    for model in (Model.SPOT, Model.ON_DEMAND):
        assert "/regions/us-central1/" in state.template("burst", model, "us-central1-b")
        assert f"/regions/{ABROAD}/" in state.template("burst", model, "us-east1-b")
    burst = state.pool("burst")
    assert burst is not None and f"/regions/{ABROAD}/" in burst.placement["us-east1-b"]
    alone = codec.decode(home[POOLS].properties["content"], StackState)
    assert alone.regions == () and alone.template("burst", Model.SPOT, "us-east1-b") == alone.template(
        "burst", Model.SPOT, "us-central1-a"
    )


def test_a_destroy_drains_before_it_deletes_what_machines_abroad_need(both: Program) -> None:
    abroad = {key for key, found in both.items() if found.properties.get("region") == ABROAD}
    assert abroad and abroad <= before(both, DRAIN)
    assert "us-east1-b" in both[DRAIN].properties["zones"]


def test_rights_in_a_shared_network_are_on_each_subnetwork_alone() -> None:
    shared = declare("example-gcp", "demo", "us-central1", ABROAD, network=NETWORK)
    members = {each.name: each.properties for each in of(shared, MEMBER)}
    assert {name: (each["region"], each["subnetwork"], each["project"]) for name, each in members.items()} == {
        "function-uses-subnetwork": ("us-central1", "train", "acme-net"),
        "function-uses-subnetwork-us-east1": (ABROAD, "east", "acme-net"),
    }
    assert {each["role"] for each in members.values()} == {"roles/compute.networkUser"}
    assert broken(shared, "dev") == []


def test_rights_are_those_of_one_region(home: Program, both: Program) -> None:
    def rights(declared: Declaration) -> set[str]:
        return {key for key in declared if "IAM" in key or "iam" in key}

    assert rights(home) == rights(both)
    assert broken(both, "dev") == []


def test_a_regions_range_is_the_same_whatever_regions_the_stack_has() -> None:
    def ranges(*regions: str) -> dict[str, str]:
        return subnet_ranges(stackfiles.read("gcp", {"region": None, "regions": list(regions)}))

    three = ranges("us-east1", "europe-west4", "us-central1")
    assert three == ranges("us-east1", "us-central1") | ranges("us-east1", "europe-west4")
    assert len(set(three.values())) == 3 and three["us-east1"] == "10.40.0.0/16"
