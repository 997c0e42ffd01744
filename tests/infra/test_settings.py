"""A wrong stack file is refused before anything is declared, with what is wrong, where, and what to do."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from spotkeeper.local.deploy.config import read_config
from spotkeeper.spec.parse import SpecError

from infra.settings import Settings, from_config, parse
from tests.infra.conftest import STACKS

GOOD: dict[str, Any] = {
    "cloud": "gcp",
    "region": "us-east1",
    "image": "projects/acme-images/global/images/train-2026-11-03",
    "pools": [
        {
            "name": "floor", "kind": "static", "size": 1, "zones": ["us-east1-b"],
            "machine": {"type": "g2-standard-12"}, "disk": {"size_gb": 200},
        },
        {
            "name": "burst", "kind": "spot", "size": 8, "max_on_demand": 2,
            "machine": {"type": "a2-highgpu-1g"}, "disk": {"size_gb": 100},
        },
    ],
}  # fmt: skip


def read(changes: dict[str, Any] | None = None, stack: str = "dev", project: str = "acme-train") -> Settings:
    """GOOD with changes, whose keys are paths: ``pools.1.size``. None as a value removes the key."""
    plain = copy.deepcopy(GOOD)
    for path, value in (changes or {}).items():
        *parents, last = [int(word) if word.isdigit() else word for word in path.split(".")]
        at: Any = plain
        for word in parents:
            at = at[word] if isinstance(word, int) else at.setdefault(word, {})
        if value is None:
            del at[last]
        else:
            at[last] = value
    return parse(plain, stack=stack, project=project)


def pool(**changes: Any) -> dict[str, Any]:
    return {f"pools.1.{key.replace('__', '.')}": value for key, value in changes.items()}


WRONG: list[tuple[dict[str, Any], str]] = [
    # unknown keys, wrong types, wrong words
    ({"regoin": "us-east1", "region": None}, "regoin: unknown key (did you mean region?)"),
    (pool(szie=3), "pools[1].szie: unknown key (did you mean size?)"),
    (pool(machine__typ="a2-highgpu-1g"), "pools[1].machine.typ: unknown key (did you mean type?)"),
    (pool(disk__sizeGb=100), "pools[1].disk.sizeGb: unknown key (did you mean size_gb?)"),
    ({"limits.lease_minuts": 5}, "limits.lease_minuts: unknown key (did you mean lease_minutes?)"),
    ({"cloud": "gpc"}, 'cloud: "gpc": not one of aws, gcp (did you mean gcp?)'),
    ({"cloud": "azure"}, 'cloud: "azure": not one of aws, gcp'),
    (pool(kind="spott"), 'pools[1].kind: "spott": not one of spot, static (did you mean spot?)'),
    (pool(size="8"), 'pools[1].size: "8": want a whole number, without quotes'),
    (pool(size=0), "pools[1].size: 0: must be at least 1"),
    (pool(size=2.5), "pools[1].size: 2.5: want a whole number"),
    (pool(size=True), "pools[1].size: true: want a whole number"),
    (pool(disk__size_gb=-5), "pools[1].disk.size_gb: -5: must be at least 10"),
    (pool(disk__size_gb=100_000), "pools[1].disk.size_gb: 100000: must be at most 65536"),
    (pool(disk=None), "pools[1].disk: missing, want a mapping with size_gb, type, iops, mb_s"),
    (pool(zones="us-east1-b"), 'pools[1].zones: "us-east1-b": want a list of texts'),
    ({"pools": []}, "pools: []: too short, want a list of mappings with at least 1"),
    ({"image": 3}, "image: 3: want a text: put it in quotes"),
    (pool(notice_s=121), "pools[1].notice_s: 121: must be at most 120"),
    ({"limits.max_run_hours": 0}, "limits.max_run_hours: 0: must be more than 0"),
    ({"stack": "prod"}, "stack: is not set here"),
    ({"project": "acme"}, "project: is not set here (did you mean gcp:project?)"),
    # regions, zones
    ({"region": "us-eest1"}, 'region: "us-eest1": is not a region in infra/catalog.py (did you mean us-'),
    ({"zones": ["us-east1-a"]}, "zones[0]: us-east1-a is not a zone of us-east1 (did you mean us-east1-"),
    ({"zones": ["us-east1-b", "us-east1-b"]}, 'zones[1]: "us-east1-b": is named twice'),
    (
        pool(zones=["us-east1-b", "us-east1-c", "us-east1-z"]),
        "pools[1].zones[2]: us-east1-z is not a zone of us-east1 (did you mean us-east1-",
    ),
    (
        {"zones": ["us-east1-b", "us-east1-c"], **pool(zones=["us-east1-d"])},
        "pools[1].zones[0]: us-east1-d is not in the stack's zones (did you mean us-east1-",
    ),
    (pool(zones=["us-east1-c", "us-east1-c"]), 'pools[1].zones[1]: "us-east1-c": is named twice'),
    # names
    (pool(name="Burst"), 'pools[1].name: "Burst": want a letter, then letters, digits and -, at most 24'),
    (pool(name="x" * 25), "pools[1].name:"),
    (pool(name="floor"), 'pools[1].name: "floor": another pool has this name'),
    ({"bucket.name": "My_Bucket!"}, 'bucket.name: "My_Bucket!": is no bucket name'),
    ({"labels.sk-owner": "me"}, 'labels.sk-owner: "me": sk-... labels are Spotkeeper\'s own'),
    ({"labels.Team": "ml"}, "labels.Team: a label's key is lower-case letters"),
    ({"labels.team": "ML Infra"}, 'labels.team: "ML Infra": a label\'s value is lower-case letters'),
    # images, machines, disks, prices
    (
        {"image": "projects/acme-images/global/images/family/train"},
        'image: "projects/acme-images/global/images/family/train": names a family, which moves: name one image',
    ),
    ({"image": "train-2026"}, 'image: "train-2026": want projects/<project>/global/images/<name>'),
    (pool(machine__type="A2"), 'pools[1].machine.type: "A2": is no machine type'),
    (
        pool(machine__type="a2-highgpu-3g"),
        'pools[1].machine.type: "a2-highgpu-3g": is not in infra/catalog.py: another type, or its prices by zone (prices) (did you mean a2-',
    ),
    (
        pool(machine__accelerator={"type": "nvidia-l4"}),
        "pools[1].machine.accelerator: a2-highgpu-1g brings its own (1 x nvidia-tesla-a100): leave it out",
    ),
    (
        pool(machine={"type": "n2-standard-8", "accelerator": {"type": "nvidia-tesla-t4"}}),
        'pools[1].machine.accelerator: "n2-standard-8": only n1 machines take added accelerators',
    ),
    (
        pool(machine={"type": "n1-standard-8", "accelerator": {"type": "nvidia-t4"}}),
        'pools[1].machine.accelerator.type: "nvidia-t4": is not in infra/catalog.py (did you mean nvidia-tesla-t4?)',
    ),
    (pool(disk__type="pd-balancd"), 'pools[1].disk.type: "pd-balancd": is no disk type (did you mean pd-balanced?)'),
    (pool(boot_disk={"type": "ssd"}), 'pools[1].boot_disk.type: "ssd": is no disk type'),
    (pool(disk__type="hyperdisk-ml"), 'pools[1].disk.type: "hyperdisk-ml": is for reading many times'),
    (
        pool(prices={"us-east1-b": {"on-demand": 1.0, "spot": 2.0}}),
        "pools[1].prices.us-east1-b.spot: 2.0: is above the on-demand price",
    ),
    (pool(prices={"us-east1-b": {"on-demand": 1.0}}), "pools[1].prices.us-east1-b.spot: missing, a spot pool needs it"),
    (
        pool(prices={"us-west1-b": {"on-demand": 1.0, "spot": 0.5}}),
        "pools[1].prices.us-west1-b: is not a zone of this pool (did you mean us-east1-b?)",
    ),
    # combinations
    (pool(max_on_demand=9), "pools[1].max_on_demand: 9: is above size (8)"),
    (pool(disk__on_destroy="retain"), 'pools[1].disk.on_destroy: "retain": only a static pool\'s disk can stay'),
    ({"pools.0.max_on_demand": 1}, "pools[0].max_on_demand: 1: only a spot pool has it"),
    ({"pools.0.notice_s": 30}, "pools[0].notice_s: 30: only a spot pool has it"),
    (
        {"pools.0.zones": ["us-east1-b", "us-east1-c"]},
        'pools[0].zones: ["us-east1-b", "us-east1-c"]: has more zones than the pool has nodes (1)',
    ),
    ({"network.cidr": "10.0.0.0/33"}, 'network.cidr: "10.0.0.0/33": is no address range'),
    ({"network.cidr": "8.8.8.0/24"}, 'network.cidr: "8.8.8.0/24": want a private IPv4 range'),
    (
        {"network.cidr": "127.0.0.0/8"},
        'network.cidr: "127.0.0.0/8": want a private IPv4 range, within one of 10.0.0.0/8',
    ),
    ({"network.cidr": "169.254.0.0/16"}, 'network.cidr: "169.254.0.0/16": want a private IPv4 range'),
    ({"labels": {f"l{i}": "x" for i in range(57)}}, "labels: are 57: a resource has 64 labels at most"),
    ({"network.cidr": "10.0.0.0/29"}, 'network.cidr: "10.0.0.0/29": has too few addresses for 9 nodes'),
    (
        {"reconcile.tick_minutes": 5, "limits.lease_minutes": 10},
        "limits.lease_minutes: 10: is below 15: 3 ticks (reconcile.tick_minutes) must fit",
    ),
    ({"limits.max_run_hours": 0.1}, "limits.max_run_hours: 0.1: is less than two boot deadlines"),
    ({"reconcile.timeout_s": 600}, "reconcile.timeout_s: 600: is longer than five ticks"),
    (
        {"reconcile.invokers": ["usr:me@acme.dev"]},
        'reconcile.invokers[0]: "usr:me@acme.dev": want <kind>:<address>, kind one of user, serviceAccount '
        "(did you mean user?)",
    ),
    (
        {"reconcile.invokers": ["user:me@acme.dev", "group:ml@acme.dev"]},
        'reconcile.invokers[1]: "group:ml@acme.dev": a token does not tell its caller\'s group: '
        "name each user or service account",
    ),
    (
        {"reconcile.invokers": ["domain:acme.dev"]},
        'reconcile.invokers[0]: "domain:acme.dev": a token does not tell its caller\'s domain: '
        "name each user or service account",
    ),
    ({"reconcile.invokers": ["user:me"]}, 'reconcile.invokers[0]: "user:me": has no e-mail address behind the colon'),
    ({"job_identity": "trainer"}, 'job_identity: "trainer": want <name>@<project>.iam.gserviceaccount.com'),
    (
        {"job_identity": "12345-compute@developer.gserviceaccount.com"},
        'job_identity: "12345-compute@developer.gserviceaccount.com": want <name>@<project>.iam.gserviceaccount.com',
    ),
    (
        {"job_identity": "sk-dev-vm@acme-train.iam.gserviceaccount.com"},
        'job_identity: "sk-dev-vm@acme-train.iam.gserviceaccount.com": is an account of Spotkeeper\'s own',
    ),
    ({"alerts.email": "nobody"}, 'alerts.email: "nobody": is no e-mail address'),
    ({"endpoints.compute": "localhost:80"}, 'endpoints.compute: "localhost:80": want an address, http(s)://...'),
    ({"budget": {"monthly": 100}}, "budget.billing_account: missing, want the billing account"),
    ({"agent.python": "3.9"}, 'agent.python: "3.9": not one of 3.10, 3.11, 3.12, 3.13'),
]


@pytest.mark.parametrize(("changes", "message"), WRONG, ids=lambda value: value[:60] if isinstance(value, str) else "")
def test_a_wrong_stack_file_says_what_where_and_what_to_do(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as caught:
        read(changes)
    assert any(str(found).startswith(message) for found in caught.value.problems), str(caught.value)


def test_all_problems_come_at_once() -> None:
    with pytest.raises(SpecError) as caught:
        read({**pool(max_on_demand=9, disk__type="ssd"), "alerts.email": "x"})
    assert len(caught.value.problems) == 3


def test_a_field_of_a_wrong_type_hides_no_combination_that_cannot_work() -> None:
    """Nor is anything said that follows only from its absence: nobody knows what it would have been."""
    first = pool(max_on_demand=9) | {"pools.0.size": "two", "limits.lease_minutes": "long", "alerts.email": "x"}
    with pytest.raises(SpecError) as caught:
        read({**first, "bucket": {"on_destroy": 3}, "image": 7, "fallbak": {}}, stack="production")
    assert sorted(found.path for found in caught.value.problems) == [
        "alerts.email",
        "bucket.on_destroy",
        "fallbak",
        "image",
        "limits.lease_minutes",
        "pools[0].size",
        "pools[1].max_on_demand",
    ]


@pytest.mark.parametrize(
    ("stack", "project", "message"),
    [
        ("Dev", "acme-train", 'stack: "Dev": want a letter'),
        ("s" * 25, "acme-train", "stack:"),
        ("dev", "", "gcp:project: missing, want the project's id"),
        ("dev", "acme", 'gcp:project: "acme": is no project id'),
        ("production", "acme-train", 'bucket.on_destroy: "delete": a destroy of production would lose data'),
    ],
)
def test_stack_and_project_are_checked_too(stack: str, project: str, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        read(stack=stack, project=project)
    assert str(caught.value).startswith(message)


def test_a_production_stack_needs_its_data_kept_or_a_clear_word() -> None:
    kept = {"bucket.on_destroy": "protect", "pools.0.disk.on_destroy": "retain"}
    assert read(kept, stack="prod-eu").bucket.on_destroy == "protect"
    assert read({"allow_data_loss": True}, stack="prod-eu").allow_data_loss


def test_zones_that_are_left_out_are_those_of_the_region() -> None:
    settings = read()
    assert settings.zones == ("us-east1-b", "us-east1-c", "us-east1-d")
    assert settings.pools[1].zones == settings.zones
    assert settings.pools[0].zones == ("us-east1-b",)


def test_processes_per_node_follow_the_accelerators() -> None:
    assert read(pool(machine__type="a2-highgpu-8g")).pools[1].machine.processes() == 8
    assert read(pool(machine__type="n2-standard-8")).pools[1].machine.processes() == 1
    assert read(pool(machine__nproc=3)).pools[1].machine.processes() == 3
    added = {"type": "n1-standard-8", "accelerator": {"type": "nvidia-tesla-t4", "count": 4}}
    assert read(pool(machine=added)).pools[1].machine.processes() == 4


def test_added_accelerators_are_in_the_price() -> None:
    added = {"type": "n1-standard-8", "accelerator": {"type": "nvidia-tesla-t4", "count": 2}}
    price = read(pool(machine=added)).pools[1].price("us-east1-b")
    assert price is not None and price.on_demand == pytest.approx(0.380 + 2 * 0.350)


@pytest.mark.parametrize("name", ["local", "example-gcp"])
def test_the_stack_files_of_the_checkout_are_right(name: str) -> None:
    endpoint = "http://127.0.0.1:9" if name == "local" else None
    settings = from_config(read_config(STACKS / f"Pulumi.{name}.yaml", endpoint), "demo")
    assert [pool.kind for pool in settings.pools] == ["static", "spot"]


def test_the_example_stack_puts_one_kind_of_gpu_into_a_gang() -> None:
    """A job takes nodes of every pool unless it names some."""
    settings = from_config(read_config(STACKS / "Pulumi.example-gcp.yaml"), "demo")
    assert len({pool.machine.type for pool in settings.pools}) == 1


TOP = "config:\n  gcp:project: local\n  spotkeeper:cloud: gcp\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "Pulumi.dev.yaml: empty, want a mapping with config"),
        ("config: hello\n", 'Pulumi.dev.yaml:1: config: "hello": want a mapping of names to'),
        ("config:\n\tgcp:project: local\n", "Pulumi.dev.yaml:2: a tab cannot indent YAML: use spaces"),
        (TOP + "  gcp:project: other\n", 'Pulumi.dev.yaml:4: config["gcp:project"]: given twice (first in line 2)'),
        (TOP + "  cloud: gcp\n", "Pulumi.dev.yaml: spotkeeper:cloud: given twice, with and without its namespace"),
    ],
)
def test_a_file_that_is_no_stack_file_is_said_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "Pulumi.dev.yaml"
    file.write_text(text)
    with pytest.raises(SpecError) as caught:
        read_config(file)
    assert message in str(caught.value)


def test_a_stack_file_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"Pulumi\.dev\.yaml: no such file"):
        read_config(tmp_path / "Pulumi.dev.yaml")


def test_a_key_without_namespace_is_the_projects_and_a_date_is_a_text(tmp_path: Path) -> None:
    file = tmp_path / "Pulumi.dev.yaml"
    file.write_text("config:\n  region: us-east1\n  spotkeeper:labels: {since: 2026-01-01}\n")
    config = read_config(file)
    assert config["spotkeeper:region"] == "us-east1"
    assert config["spotkeeper:labels"] == '{"since": "2026-01-01"}'


def test_a_misspelt_namespace_is_told() -> None:
    with pytest.raises(SpecError, match=r"spotkeper:limits: unknown key \(did you mean spotkeeper:limits\?\)"):
        from_config({"spotkeper:limits": "{}"}, "dev")
