"""What editors are given: each field with its words, each shipped file fits, and what is misspelt does not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
import yaml

from spotkeeper.cli.stacks import stackfile
from spotkeeper.contract.job import JobSpec
from spotkeeper.contract.parse.problem import SpecError
from spotkeeper.contract.parse.typed import convert
from tests.cli.conftest import Cli
from tests.contract.samples import STACK
from tests.infra.settings import stackfiles
from tests.infra.settings.test_wrong import FOLDER, LEADS_TO

ROOT = Path(__file__).resolve().parents[3]
STACKS = sorted((ROOT / "infra/stacks").glob("Pulumi.*.yaml"))
JOBS = sorted((ROOT / "examples").glob("*/job.yaml"))
# In these parts of the lists, what is wrong is a key's name or a value's kind: an editor underlines it.
BY_KIND = ("# unknown keys: the nearest name, what there is, or why there is none", "# kinds of values")


@pytest.fixture(scope="module")
def stack() -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(json.loads(stackfile.schema_of("stack")))


@pytest.fixture(scope="module")
def job() -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(json.loads(stackfile.schema_of("job")))


def wrong(cloud: str) -> Iterator[tuple[str, bool]]:
    """(changes, whether their kind is wrong)."""
    by_kind = False
    for line in (FOLDER / f"{cloud}.txt").read_text().splitlines():
        if line.startswith("#"):
            by_kind = line in BY_KIND
        elif line:
            yield line.partition(LEADS_TO)[0], by_kind


def written(plain: dict[str, Any]) -> dict[str, Any]:
    """Settings as a stack file says them."""
    project = {"gcp:project": "acme-train"} if plain.get("cloud") != "aws" else {}
    return {"config": project | {f"spotkeeper:{key}": value for key, value in plain.items()}}


@pytest.mark.parametrize("file", STACKS, ids=lambda file: file.name)
def test_the_shipped_stack_files_fit_the_schema(stack: jsonschema.Draft202012Validator, file: Path) -> None:
    stack.validate(yaml.safe_load(file.read_text()))


@pytest.mark.parametrize("file", JOBS, ids=lambda file: file.parent.name)
def test_the_shipped_job_files_fit_the_schema(job: jsonschema.Draft202012Validator, file: Path) -> None:
    job.validate(yaml.safe_load(file.read_text()))


def test_the_shipped_search_fits_the_schema() -> None:
    sweep = jsonschema.Draft202012Validator(stackfile.sweep_schema())
    sweep.validate(yaml.safe_load((ROOT / "examples/search/sweep.yaml").read_text().replace("1e-", "1.0e-")))


@pytest.mark.parametrize("cloud", ["gcp", "aws"])
def test_unknown_keys_and_wrong_types_violate_the_schema(stack: jsonschema.Draft202012Validator, cloud: str) -> None:
    assert stack.is_valid(written(stackfiles.plain(cloud)))
    for line, by_kind in wrong(cloud):
        changes = {key: value for key, value in yaml.safe_load("{" + line + "}").items() if not key.startswith("$")}
        if by_kind:
            assert not stack.is_valid(written(stackfiles.plain(cloud, changes))), line


@pytest.mark.parametrize("path", ["pools.1.placement", "limits.usd_per_hour", "bucket.name", "budget", "limits"])
def test_an_empty_value_of_a_stack_file_violates_the_schema(stack: jsonschema.Draft202012Validator, path: str) -> None:
    plain = stackfiles.plain("gcp", {"limits.machines": 4, "bucket.on_destroy": "retain", path: "here"})
    *parents, last = path.split(".")
    at: Any = plain
    for word in parents:
        at = at[int(word) if word.isdigit() else word]
    del at[last]
    assert stack.is_valid(written(plain)) or last == "limits"
    at[last] = None
    assert not stack.is_valid(written(plain))


@pytest.mark.parametrize("field", ["max_usd", "deadline", "checkpoint", "max_on_demand"])
def test_an_empty_value_of_a_job_file_violates_the_schema(job: jsonschema.Draft202012Validator, field: str) -> None:
    fields = {"name": "first", "command": ["train.py"]}
    assert job.is_valid(fields) and not job.is_valid({**fields, field: None})
    assert not job.is_valid({**fields, "checkpoint": {"mirror": None}})


def test_a_search_may_have_its_job_inline_without_a_name() -> None:
    sweep = jsonschema.Draft202012Validator(stackfile.sweep_schema())
    fields = {"name": "lr", "space": {"lr": {"int": [1, 2]}}, "metric": "loss", "goal": "min", "trials": 3}
    assert sweep.is_valid({**fields, "job": "job.yaml"}) and sweep.is_valid({**fields, "job": {"command": ["a.py"]}})
    assert not sweep.is_valid({**fields, "job": {"comand": ["a.py"]}})
    assert not sweep.is_valid({**fields, "job": "job.yaml", "space": {"lr": {"integer": [1, 2]}}})
    assert not sweep.is_valid({**fields, "job": "job.yaml", "max_usd": None})


def test_each_cloud_requires_its_account(stack: jsonschema.Draft202012Validator) -> None:
    for cloud, key in (("gcp", "gcp:project"), ("aws", "spotkeeper:account")):
        document = written(stackfiles.plain(cloud))
        del document["config"][key]
        assert key in next(stack.iter_errors(document)).message


@pytest.mark.parametrize(
    "made",
    [stackfile.stack_schema(), stackfile.job_schema(), stackfile.sweep_schema()],
    ids=["stack", "job", "sweep"],
)
def test_every_field_has_a_description(made: dict[str, Any]) -> None:
    parts = [made, made.get("properties", {}).get("config", {}), *made["$defs"].values()]
    silent = [
        name for part in parts for name, field in part.get("properties", {}).items() if "description" not in field
    ]
    assert silent == []


def test_an_editor_can_complete_regions_machines_and_values() -> None:
    made = stackfile.stack_schema()
    region = made["properties"]["config"]["properties"]["spotkeeper:region"]  # type: ignore[index]
    assert {"us-central1", "us-east-1"} <= set(region["anyOf"][0]["enum"])
    machine = made["$defs"]["Machine"]["properties"]["type"]  # type: ignore[index]
    assert {"a2-highgpu-1g", "p4d.24xlarge"} <= set(machine["anyOf"][0]["enum"])
    disk = made["$defs"]["DataDisk"]["properties"]["on_destroy"]  # type: ignore[index]
    assert (disk["enum"], disk["default"]) == (["delete", "protect", "retain"], "delete")


@pytest.mark.parametrize("document", ["job", "sweep", "stack", "state"])
def test_schema_prints_a_schema(cli: Cli, document: str) -> None:
    jsonschema.Draft202012Validator.check_schema(json.loads(cli("schema", document).out))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("", ""),
        ("kind: spot", "kind: spto"),
        ("spotkeeper:zones", "spotkeeper:zone"),
        ("gcp:project", "gcp:projekt"),
        ("{lease_minutes: 120", "{lease_minute: 120"),
    ],
)
def test_the_stack_schema_has_only_user_written_fields(cli: Cli, old: str, new: str) -> None:
    """The stack files that come with it fit, and what `spotkeeper plan` would refuse by its type does not."""
    valid = jsonschema.Draft202012Validator(json.loads(cli("schema", "stack").out))
    for name in ("example-gcp", "local"):
        file = (ROOT / "infra" / "stacks" / f"Pulumi.{name}.yaml").read_text()
        assert old in file
        assert valid.is_valid(yaml.safe_load(file.replace(old, new) if old else file)) == (not old)


PLAIN_JOBS = [
    ({"name": "a", "command": ["t.py"]}, True),
    ({"name": "a", "command": ["t.py"], "nodes": {"min": 1, "max": 3}, "deadline": "6h"}, True),
    ({"name": "a", "command": []}, False),
    ({"name": "a", "command": ["t.py"], "nodes": 0}, False),
    ({"name": "a", "command": ["t.py"], "polic": "spot"}, False),
    ({"name": "a", "command": ["t.py"], "policy": "cheap"}, False),
    ({"name": "a", "command": ["t.py"], "env": {"A": 1}}, False),
    ({"command": ["t.py"]}, False),
]


@pytest.mark.parametrize(("plain", "good"), PLAIN_JOBS)
def test_schema_and_parser_agree(plain: dict[str, object], good: bool) -> None:
    valid = jsonschema.Draft202012Validator(stackfile.job_schema()).is_valid(plain)
    try:
        convert(plain, JobSpec)
        parsed = True
    except SpecError:
        parsed = False
    assert (valid, parsed) == (good, good)


def test_the_stack_document_fits_its_schema() -> None:
    validator = jsonschema.Draft202012Validator(stackfile.state_schema())
    body = msgspec.json.decode(msgspec.json.encode(STACK))
    assert validator.is_valid(body)
    assert not validator.is_valid({**body, "cloud": "azure"})


def test_every_field_of_a_job_is_explained_or_plain() -> None:
    """Editors show descriptions; what has none must be self-evident by its type."""
    properties = stackfile.job_schema()["$defs"]["JobSpec"]["properties"]  # type: ignore[index]
    silent = {name for name, body in properties.items() if "description" not in str(body)}
    assert silent <= {"nodes", "checkpoint", "retry", "seed"}
