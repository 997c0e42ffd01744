"""A wrong stack file is refused before anything is declared, with what is wrong, where, and what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from spotkeeper.local.deploy.config import read_config
from spotkeeper.spec.parse import SpecError

from infra.settings import Settings, from_config
from tests.infra import stackfiles
from tests.infra.conftest import STACKS


def read(changes: dict[str, Any] | None = None, stack: str = "dev", project: str = "acme-train") -> Settings:
    return stackfiles.read("gcp", changes, stack, project)


def pool(**changes: Any) -> dict[str, Any]:
    return {f"pools.1.{key.replace('__', '.')}": value for key, value in changes.items()}


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
