"""A wrong stack file is refused before anything is declared, with what is wrong, where, and what to do."""

from __future__ import annotations

import ast
import contextlib
import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from infra import catalog
from infra import settings as package
from infra.gcp.function import environment
from infra.settings import aws, checks, gcp, model
from infra.settings import pool as pool_model
from infra.settings import read as reading
from infra.settings.model import Settings
from infra.settings.pool import Machine
from infra.settings.read import from_config, parse
from spotkeeper.contract.parse.problem import SpecError
from spotkeeper.contract.stack import Fallback, StackState, TeamState
from spotkeeper.local.deploy.config import read_config
from tests.infra.conftest import ROOT, STACKS
from tests.infra.settings import reference, stackfiles


def read(changes: dict[str, Any] | None = None, stack: str = "dev", project: str = "acme-train") -> Settings:
    return stackfiles.read("gcp", changes, stack, project)


def pool(**changes: Any) -> dict[str, Any]:
    return {f"pools.1.{key.replace('__', '.')}": value for key, value in changes.items()}


def test_all_problems_are_reported_at_once() -> None:
    with pytest.raises(SpecError) as caught:
        read({**pool(max_on_demand=9, disk__type="ssd"), "alerts.email": "x"})
    assert len(caught.value.problems) == 3


def test_a_wrong_type_hides_no_other_problem() -> None:
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
        ("dev", "", "gcp:project: missing: set the project's id"),
        ("dev", "acme", 'gcp:project: "acme": is not a project id'),
        ("production", "acme-train", 'bucket.on_destroy: "delete": a destroy of production would delete data'),
    ],
)
def test_stack_and_project_names_are_checked(stack: str, project: str, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        read(stack=stack, project=project)
    assert str(caught.value).startswith(message)


def test_a_production_stack_must_keep_data_or_allow_its_loss() -> None:
    kept = {"bucket.on_destroy": "protect", "pools.0.disk.on_destroy": "retain"}
    assert read(kept, stack="prod-eu").bucket.on_destroy == "protect"
    assert read({"allow_data_loss": True}, stack="prod-eu").allow_data_loss


def test_omitted_zones_default_to_the_regions() -> None:
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


@pytest.mark.parametrize("name", ["local", "example-gcp", "example-aws"])
def test_the_checkouts_stack_files_are_valid(name: str) -> None:
    endpoint = "http://127.0.0.1:9" if name == "local" else None
    settings = from_config(read_config(STACKS / f"Pulumi.{name}.yaml", endpoint), "demo")
    assert [pool.kind for pool in settings.pools][:2] == ["static", "spot"]
    assert bool(settings.project) is (name != "example-aws")


def test_teams_reach_the_function_as_they_are_written() -> None:
    settings = from_config(read_config(STACKS / "Pulumi.example-gcp.yaml"), "demo")
    assert model.stack_state(settings, ()).teams == (
        TeamState("vision", ("kim@acme.dev",), share=2.0, high=("kim@acme.dev",)),
        TeamState("speech", ("lee@acme.dev",), max_usd_month=2000.0),
    )


def test_members_on_the_one_machine_cloud_are_its_users() -> None:
    config = read_config(STACKS / "Pulumi.local.yaml", "http://127.0.0.1:9")
    teams = {"vision": {"members": ["ann", "bo"]}, "default": {"share": 0.5, "high": ["di"]}}
    settings = from_config({**config, "spotkeeper:teams": json.dumps(teams)}, "local")
    assert environment(settings, "clock@local")["SPOTKEEPER_INVOKERS"] == "clock@local,ann,bo,di"
    with pytest.raises(SpecError, match=r'teams.vision.members\[0\]: "ann,eve": want the name of a user'):
        from_config({**config, "spotkeeper:teams": '{"vision": {"members": ["ann,eve"]}}'}, "local")


def test_only_so_many_teams_are_allowed() -> None:
    people = ["kim@acme.dev"]
    with pytest.raises(SpecError, match="teams: has 101 entries, at most 100 are allowed"):
        read({"submitters": ["user:kim@acme.dev"], "teams": {f"t{n}": {"members": people} for n in range(101)}})


def test_on_aws_a_request_may_last_as_long_as_lambda_allows() -> None:
    changes = {"reconcile.timeout_s": 900, "reconcile.tick_minutes": 5, "alerts.missed_minutes": 10}
    assert stackfiles.read("aws", changes).reconcile.timeout_s == aws.LONGEST_S


@pytest.mark.parametrize("who", ["arn:aws:iam::123456789012:role/vision", "arn:aws:iam::123456789012:user/lee"])
def test_on_aws_an_invoker_or_a_submitter_is_a_member(who: str) -> None:
    changes = {
        "reconcile.invokers": ["arn:aws:iam::123456789012:role/vision"],
        "submitters": ["arn:aws:iam::123456789012:user/lee"],
        "teams": {"vision": {"members": [who]}},
    }
    assert stackfiles.read("aws", changes).teams["vision"].members == (who,)


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
def test_a_file_that_is_not_a_stack_file_is_reported_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "Pulumi.dev.yaml"
    file.write_text(text)
    with pytest.raises(SpecError) as caught:
        read_config(file)
    assert message in str(caught.value)


def test_a_missing_stack_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"Pulumi\.dev\.yaml: no such file"):
        read_config(tmp_path / "Pulumi.dev.yaml")


def test_keys_without_namespace_get_the_projects_and_dates_stay_texts(tmp_path: Path) -> None:
    file = tmp_path / "Pulumi.dev.yaml"
    file.write_text("config:\n  region: us-east1\n  spotkeeper:labels: {since: 2026-01-01}\n")
    config = read_config(file)
    assert config["spotkeeper:region"] == "us-east1"
    assert config["spotkeeper:labels"] == '{"since": "2026-01-01"}'


def test_a_misspelt_namespace_is_reported() -> None:
    with pytest.raises(SpecError, match=r"spotkeper:limits: unknown key \(did you mean spotkeeper:limits\?\)"):
        from_config({"spotkeper:limits": "{}"}, "dev")


def test_a_namespace_ends_at_the_first_colon() -> None:
    """A limit below a namespace that nobody reads would have no effect."""
    with pytest.raises(SpecError, match=r'\["limits:max_spend_per_day"\]: unknown key'):
        from_config({"spotkeeper:limits:max_spend_per_day": "1"}, "dev")


@pytest.mark.parametrize("written", ["gpc:project", "gcp:projct", "gcp:Project"])
def test_a_misspelt_project_is_reported(written: str) -> None:
    config = {"spotkeeper:cloud": "gcp", written: "acme-train"}
    with pytest.raises(SpecError, match=rf"{written}: unknown key \(did you mean gcp:project\?\)"):
        from_config(config, "dev")


@pytest.mark.parametrize("key", ["gcp:zone", "google-native:project", "aws:profile"])
def test_other_providers_keys_are_ignored(key: str) -> None:
    with pytest.raises(SpecError) as caught:
        from_config({"spotkeeper:cloud": "gcp", "gcp:project": "acme-train", key: "x"}, "dev")
    assert key not in str(caught.value)


EMPTY = {
    "region": "region: missing, want a region's name, or `regions` with a list of names",
    "image": "image: missing, want a text",
    "limits": "limits: empty, want a mapping with lease_minutes, boot_deadline_s, max_run_hours, machines, ...",
    "budget": "budget: empty, want a mapping with monthly, billing_account, currency, alert_at, or leave it out",
}


@pytest.mark.parametrize("key", EMPTY)
def test_a_key_without_a_value_is_reported_from_engine_and_file(key: str, tmp_path: Path) -> None:
    """The engine hands over "" for it, whatever the key is."""
    file = tmp_path / "Pulumi.dev.yaml"
    file.write_text(f"config:\n  spotkeeper:{key}:\n")
    assert read_config(file)[f"spotkeeper:{key}"] == ""
    with pytest.raises(SpecError) as caught:
        from_config(read_config(file), "dev")
    assert EMPTY[key] in str(caught.value).splitlines()


def test_an_empty_list_of_regions_is_one_problem() -> None:
    with pytest.raises(SpecError) as caught:
        from_config({"spotkeeper:regions": ""}, "dev")
    told = [line for line in str(caught.value).splitlines() if line.startswith("region")]
    assert told == ["regions: empty, want a list of texts"]


CAPS = ("pools.1.placement", "pools.1.max_on_demand", "limits.usd_per_hour", "limits.machines")


@pytest.mark.parametrize("path", CAPS)
def test_an_empty_limit_is_an_error(path: str) -> None:
    plain = stackfiles.plain("gcp", {path: "here"})
    *parents, last = path.split(".")
    at: Any = plain
    for word in parents:
        at = at[int(word) if word.isdigit() else word]
    at[last] = None
    with pytest.raises(SpecError, match=rf"{last}: empty, want .*, or leave it out\Z"):
        parse(plain, stack="dev", project="acme-train")


JUNK: tuple[Any, ...] = ([], {}, 0, -1, "x", 1e308, "\ud800", [None], {"": 1}, "::/0", 10**30, {"us-east1-b": {}})


@pytest.mark.parametrize("cloud", ["gcp", "aws"])
def test_any_wrong_value_is_reported_without_a_traceback(cloud: str) -> None:
    """Each field, and each mapping around fields, with some of what a slip of the hand can make of it."""
    paths = {path[:end] for path, *_ in reference.rows() for end in (*_dots(path), len(path))}
    for number, path in enumerate(sorted(paths)):
        for junk in (JUNK[number % len(JUNK)], JUNK[(number + 5) % len(JUNK)]):
            with contextlib.suppress(SpecError):  # some of it is right somewhere
                stackfiles.read(cloud, {path.replace("pools[]", "pools.1"): junk})


def _dots(path: str) -> list[int]:
    return [at for at, letter in enumerate(path) if letter == "."]


# --- both clouds -------------------------------------------------------------------------


def test_omitted_values_get_the_clouds_defaults() -> None:
    on_gcp = stackfiles.read("gcp", {"limits.max_run_hours": 24, "pools.1.placement": {}})
    on_aws = stackfiles.read("aws", {"pools.1.placement": {}})
    for settings, disk, strategy in ((on_gcp, "pd-balanced", "compact"), (on_aws, "gp3", "cluster")):
        static, spot = settings.pools
        assert (static.disk.type, static.boot_disk.type, spot.disk.type, spot.boot_disk.type) == (disk,) * 4
        assert spot.placement is not None and spot.placement.strategy == strategy
        assert static.image == spot.image == settings.image
        assert settings.network.cidr == model.OWN_RANGE
    assert on_gcp.endpoints.compute == "https://compute.googleapis.com/compute/v1"
    assert on_aws.endpoints.compute == "https://ec2.us-east-1.amazonaws.com"
    assert (on_gcp.bucket_name(), on_aws.bucket_name()) == ("sk-acme-train-dev", "sk-123456789012-dev")
    assert (on_gcp.pools[1].max_run_s(), on_gcp.pools[0].max_run_s()) == (86400, None), "static machines are always on"


def test_a_pool_may_override_the_stacks_values() -> None:
    image = "projects/acme-images/global/images/gpu-1"
    changes = {"limits.max_run_hours": 24, "pools.1.max_run_hours": 6, "pools.1.image": image}
    static, spot = stackfiles.read("gcp", changes).pools
    assert (spot.max_run_s(), spot.image) == (6 * 3600, image)
    assert static.image != image


def test_a_machine_may_run_for_exactly_two_boot_deadlines() -> None:
    for key in ("limits.max_run_hours", "pools.1.max_run_hours"):
        _, spot = stackfiles.read("gcp", {"limits.boot_deadline_s": 900, key: 0.5}).pools
        assert spot.max_run_s() == 1800, key


def test_an_existing_network_gets_no_range() -> None:
    for network in (
        {"from_stack": "acme/net/prod"},
        {
            "vpc": "projects/acme-net/global/networks/shared",
            "subnets": {"us-east1": "projects/acme-net/regions/us-east1/subnetworks/train"},
        },
    ):
        settings = stackfiles.read("gcp", {"network": network})
        assert settings.network.exists() and settings.network.cidr == ""


@pytest.mark.parametrize("cloud", ["gcp", "aws"])
def test_the_providers_region_must_equal_the_stacks(cloud: str) -> None:
    """A provider's own region would be where it makes what names none."""
    plain = {f"spotkeeper:{key}": value for key, value in stackfiles.plain(cloud).items()}
    config = {key: value if isinstance(value, str) else json.dumps(value) for key, value in plain.items()}
    config |= {"gcp:project": "acme-train", f"{cloud}:region": config["spotkeeper:region"]}
    assert from_config(config, "dev").cloud == cloud
    with pytest.raises(SpecError, match=rf'{cloud}:region: "elsewhere": differs from spotkeeper:region: leave it out'):
        from_config({**config, f"{cloud}:region": "elsewhere"}, "dev")


def test_the_first_of_several_regions_is_home() -> None:
    """The engine hands over an empty `region` beside them."""
    flat = {f"spotkeeper:{key}": value for key, value in stackfiles.plain("gcp").items()}
    config = {key: value if isinstance(value, str) else json.dumps(value) for key, value in flat.items()}
    config |= {"gcp:project": "acme-train", "spotkeeper:region": "", "spotkeeper:regions": '["us-east1", "us-west1"]'}
    settings = from_config({**config, "gcp:region": "us-east1"}, "dev")
    assert (settings.region, settings.regions) == ("us-east1", ("us-east1", "us-west1"))
    assert [settings.regions_of(pool) for pool in settings.pools] == [("us-east1",), ("us-east1", "us-west1")]
    with pytest.raises(SpecError, match=r'gcp:region: "us-west1": differs from spotkeeper:region: leave it out'):
        from_config({**config, "gcp:region": "us-west1"}, "dev")


def test_text_values_are_not_parsed_as_json() -> None:
    """An account's number, as Pulumi hands it over, is a text like any other."""
    plain = {f"spotkeeper:{key}": value for key, value in stackfiles.plain("aws").items()}
    config = {key: value if isinstance(value, str) else json.dumps(value) for key, value in plain.items()}
    assert from_config(config, "dev").account == "123456789012"


# --- the model, and what is made from it -------------------------------------------------


def structs() -> list[type[msgspec.Struct]]:
    found = [one for module in (model, pool_model) for one in vars(module).values()]
    mine = [one for one in found if isinstance(one, type) and issubclass(one, msgspec.Struct)]
    return list(dict.fromkeys(one for one in mine if one.__module__.startswith(package.__name__)))


def attributes(cloud: str) -> set[str]:
    """Every attribute that the cloud's program reads of anything."""
    files = [
        *(ROOT / "infra").glob("*.py"),
        *(ROOT / "infra" / cloud).glob("*.py"),
        *(ROOT / "infra/drain").glob("*.py"),
    ]
    files += [Path(module.__file__ or "") for module in (checks, reading, model, pool_model)]
    nodes = (node for file in files for node in ast.walk(ast.parse(file.read_text())))
    return {node.attr for node in nodes if isinstance(node, ast.Attribute)}


@pytest.mark.parametrize(
    ("cloud", "refused"),
    [("gcp", gcp.OF_AWS | gcp.POOL_OF_AWS), ("aws", aws.OF_GCP | aws.POOL_OF_GCP)],
)
def test_every_field_is_used_or_refused_on_each_cloud(cloud: str, refused: dict[str, Any]) -> None:
    """A field that nobody reads would be a promise that nobody keeps."""
    read = attributes(cloud)
    silent = {name for struct in structs() for name in struct.__struct_fields__ if name not in read}
    assert silent <= {path.rsplit(".", 1)[-1] for path in refused}


@pytest.mark.parametrize(
    ("other", "refused"), [("aws", gcp.OF_AWS | gcp.POOL_OF_AWS), ("gcp", aws.OF_GCP | aws.POOL_OF_GCP)]
)
def test_fields_of_the_other_cloud_are_refused_with_a_reason(other: str, refused: dict[str, Any]) -> None:
    words = {path.removeprefix("pools[]."): words for path, _, _, words in reference.rows()}
    for path in refused:
        of_it = [text for name, text in words.items() if name == path or name.startswith(f"{path}.")]
        assert of_it and all(text.startswith(f"{other}: ") for text in of_it), path


def test_slow_booting_types_get_a_longer_boot_deadline() -> None:
    assert stackfiles.read("gcp").boot_deadline_s() == 480
    assert stackfiles.read("aws").boot_deadline_s() == 900, "its burst is of p4d.24xlarge"
    assert stackfiles.read("aws", {"limits.boot_deadline_s": 300}).boot_deadline_s() == 300
    assert stackfiles.read("aws", {"pools.1.machine": {"type": "g5.xlarge"}}).boot_deadline_s() == 480
    slow = [kind for kind in ("p5.48xlarge", "p6-b300.48xlarge", "trn1.32xlarge", "g6.xlarge", "n1-standard-8")
            if Machine(kind).boots_slowly()]  # fmt: skip
    assert slow == ["p5.48xlarge", "p6-b300.48xlarge", "trn1.32xlarge"]


def test_the_function_gets_each_setting_of_the_stack_file() -> None:
    changes = {
        "bucket": {"name": "acme-bucket"},
        "limits": {"lease_minutes": 90, "boot_deadline_s": 300, "max_run_hours": 12, "machines": 4, "usd_per_hour": 9},
        "fallback": {
            "losses": 7,
            "window_minutes": 30,
            "short_life_minutes": 5,
            "short_lives": 2,
            "on_demand_minutes": 15,
        },
        "reconcile": {"tick_minutes": 2},
        "job_identity": "trainer@acme-train.iam.gserviceaccount.com",
        "ssh": ["user:kim@acme.dev"],
    }
    expected = StackState(
        stack="dev",
        cloud="gcp",
        project="acme-train",
        region="us-east1",
        bucket="acme-bucket",
        pools=(),
        lease_minutes=90,
        boot_deadline_s=300,
        fallback=Fallback(losses=7, window_s=1800, short_life_s=300, short_lives=2, on_demand_s=900),
        max_run_s=43200,
        job_identity="trainer@acme-train.iam.gserviceaccount.com",
        max_machines=4,
        max_usd_hour=9.0,
        tick_minutes=2,
        ssh=True,
    )
    assert model.stack_state(stackfiles.read("gcp", changes), ()) == expected
    bare = StackState("dev", "aws", "123456789012", "us-east-1", "sk-123456789012-dev", (), boot_deadline_s=900)
    assert model.stack_state(stackfiles.read("aws"), ()) == bare


def test_the_stack_file_page_lists_every_field() -> None:
    """Changed a field? `python -m tests.infra.settings.reference` writes the table anew."""
    assert reference.written(reference.PAGE.read_text()) == reference.table()


def test_pulumi_yaml_lists_every_key() -> None:
    """Pulumi takes what is not in it, but shows no description of it, and `pulumi config set` no type."""
    project = yaml.safe_load((ROOT / "Pulumi.yaml").read_text())["config"]
    fields = {field.encode_name: field for field in msgspec.inspect.type_info(Settings).fields}
    assert project.keys() == fields.keys() - {"stack", "project"}
    required = {name for name in fields if fields[name].required and name not in ("stack", "project")}
    assert {key for key, known in project.items() if "must be set" in known.get("description", "")} == required
    assert all(project[key]["default"] == type(project[key]["default"])() for key in required)


@pytest.mark.parametrize("key", ["cloud", "region", "image", "pools"])
def test_a_misspelt_required_key_names_the_right_one(key: str) -> None:
    """The engine hands over its empty default beside it."""
    flat = read_config(ROOT / "infra/stacks/Pulumi.example-gcp.yaml")
    empty = "[]" if key == "pools" else ""
    with pytest.raises(SpecError) as caught:
        from_config({**flat, f"spotkeeper:{key}": empty, f"spotkeeper:{key}x": flat[f"spotkeeper:{key}"]}, "demo")
    assert [f"{found.path}: {found.message}" for found in caught.value.problems] == [f"{key}x: unknown key"]
    with pytest.raises(SpecError, match=f"{key}: missing, want "):
        from_config({**flat, f"spotkeeper:{key}": empty}, "demo")


def test_no_refused_key_is_a_valid_field() -> None:
    apart = (pool_model.Accelerator, pool_model.Reservation)  # `count` and `zone` are right there
    ours = {name for struct in structs() if struct not in apart for name in struct.__struct_fields__}
    assert not checks.ELSEWHERE.keys() & ours


def test_settings_import_neither_pulumi_nor_a_cloud() -> None:
    program = "import sys, infra.settings.read; print(sorted({m.split('.')[0] for m in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = set(ast.literal_eval(done.stdout))
    assert "infra" in loaded
    assert not loaded & {"pulumi", "pulumi_gcp", "pulumi_aws", "boto3", "obstore", "requests", "torch", "jinja2"}


@pytest.mark.parametrize("kind", ["a4-highgpu-8g", "a3-ultragpu-8g", "n4-standard-8", "c4-standard-8"])
def test_machines_with_only_hyperdisk_get_hyperdisk(kind: str) -> None:
    prices = {"us-east1-b": {"on-demand": 9.0, "spot": 3.0}}
    made = read(pool(machine={"type": kind}, zones=["us-east1-b"], prices=prices)).pools[1]
    assert {made.disk.type, made.boot_disk.type} == {"hyperdisk-balanced"}
    other = read(pool(machine={"type": "c3-standard-8"})).pools[1]
    assert {other.disk.type, other.boot_disk.type} == {"pd-balanced"}


def test_a_capacity_block_ends_when_ec2_begins_to_end_its_machines() -> None:
    """A pool whose only on-demand machines are reserved ones has their template, too."""
    ours = {"name": "cr-0123456789abcdef0", "zone": "us-east-1a", "count": 4}
    times = {"starts": "2026-12-01T11:30:00Z", "ends": "2026-12-08T12:30:00+01:00"}
    changed = {"pools.1.reservations": [ours | times | {"block": True}], "pools.1.max_on_demand": 0}
    (_, pool) = (made := stackfiles.read("aws", changed)).pools
    (block,) = model.pool_state(made, pool).reservations
    start = datetime(2026, 12, 1, 11, 30, tzinfo=UTC).timestamp()
    assert (block.starts, block.ends, block.block) == (start, start + 7 * 86_400.0 - 1800.0, True)
    assert (model.models(pool), model.models(made.pools[1])) == (("spot", "on-demand"),) * 2
    lasting = stackfiles.read("aws", {"pools.1.reservations": [ours | times]}).pools[1]
    (plain,) = (one.state() for one in lasting.reservations)
    assert plain.ends == start + 7 * 86_400.0


def test_literal_addresses_of_channels_must_fit_into_the_functions_environment() -> None:
    channels = [{"name": f"c{n}", "kind": "webhook", "address": f"https://a.test/{'x' * 1000}"} for n in range(3)]
    with pytest.raises(SpecError, match="at most 2500 fit: put long ones into the secret store"):
        stackfiles.read("gcp", {"channels": channels})
    assert len(stackfiles.read("gcp", {"channels": channels[:2]}).addresses()) <= 2500


def test_channels_have_public_addresses_but_on_the_one_machine_cloud() -> None:
    channels = {"channels": [{"name": "here", "kind": "webhook", "address": "https://127.0.0.1:8443/x"}]}
    with pytest.raises(SpecError, match="is not a public address"):
        stackfiles.read("gcp", channels)
    stackfiles.read("gcp", channels | {"endpoints.compute": "http://127.0.0.1:8080"})


def test_more_reservations_than_fit_into_the_functions_policy_are_refused() -> None:
    ours = [{"name": f"cr-{n:017x}", "zone": "us-east-1a", "count": 1} for n in range(31)]
    assert len(stackfiles.read("aws", {"pools.1.reservations": ours[:30]}).pools[1].reservations) == 30
    with pytest.raises(SpecError, match="has room for 30, in all pools"):
        stackfiles.read("aws", {"pools.1.reservations": ours})


@pytest.mark.parametrize(
    ("source", "target", "usd"),
    [
        ("us-central1", "us-east1", 0.02),
        ("us-central1", "northamerica-northeast1", 0.02),
        ("europe-west4", "europe-north1", 0.02),
        ("us-central1", "europe-west4", 0.05),
        ("asia-east1", "us-west1", 0.08),
        ("us-west1", "southamerica-east1", 0.14),
        ("us-east-1", "us-west-2", 0.02),
        ("us-east-1", "ap-southeast-2", 0.02),  # EC2 charges by the source
        ("ap-southeast-2", "us-east-1", 0.098),
        ("ap-northeast-1", "us-east-1", 0.09),
    ],
)
def test_egress_has_a_list_price_between_each_two_regions_of_a_cloud(source: str, target: str, usd: float) -> None:
    assert catalog.egress_usd_gb(source, target) == usd


def test_the_function_reads_the_price_of_each_way_between_a_stacks_regions() -> None:
    flat = {f"spotkeeper:{key}": value for key, value in stackfiles.plain("gcp").items()}
    config = {key: value if isinstance(value, str) else json.dumps(value) for key, value in flat.items()}
    regions = '["us-east1", "europe-west4"]'
    config |= {"gcp:project": "acme-train", "spotkeeper:region": "", "spotkeeper:regions": regions}
    state = model.stack_state(from_config(config, "dev"), ())
    assert state.egress == {"us-east1": {"europe-west4": 0.05}, "europe-west4": {"us-east1": 0.05}}
    assert state.bucket_regions == ("us-east1",)
    for location, inside in (("NAM4", ("us-east1",)), ("europe-west4", ("europe-west4",)), ("US", ("us-east1",))):
        found = model.stack_state(
            from_config({**config, "spotkeeper:bucket": f'{{"location": "{location}"}}'}, "dev"), ()
        )
        assert found.bucket_regions == inside
    assert model.stack_state(stackfiles.read("gcp", {}), ()).egress == {}
