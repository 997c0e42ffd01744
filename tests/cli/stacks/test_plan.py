"""`spotkeeper plan`: what the program declares for one's own stack file, without engine, login or network."""

from __future__ import annotations

import itertools
import json
import socket
from pathlib import Path

import pytest

from spotkeeper.cli.stacks import render as planning
from spotkeeper.cli.stacks.render import Planned, lines, plan
from spotkeeper.cli.stacks.stackfile import CHECKOUT
from spotkeeper.local.deploy.config import read_config
from tests.cli.conftest import Cli
from tests.infra.conftest import STACKS, run_program

EXAMPLE = STACKS / "Pulumi.example-gcp.yaml"


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Planned, ...]:
    """Of a stack file outside of the checkout, on a machine without a network."""
    file = tmp_path_factory.mktemp("mine") / "Pulumi.demo.yaml"
    file.write_text(EXAMPLE.read_text())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", lambda *_: pytest.fail("asks the network"))
        return plan(file, None)


def by_name(planned: tuple[Planned, ...], kind: str, name: str) -> Planned:
    (found,) = [one for one in planned if one.type == kind and one.name == name]
    return found


def test_a_plan_shows_every_declared_resource_below_its_component(planned: tuple[Planned, ...]) -> None:
    declared = run_program("demo", read_config(EXAMPLE))
    assert sorted(f"{one.type}::{one.name}" for one in planned) == sorted(declared)
    parts = [one for one in planned if one.type.startswith("spotkeeper:")]
    assert planned[0] is parts[0]
    for before, one in itertools.pairwise(planned):
        assert one in parts or one.parent in (before.name, before.parent)
    protected = {one.name for one in planned if one.protect}
    assert protected == {one.name for one in declared.values() if one.protect} == {"bucket", "sk-demo-floor-s0-data"}


def test_secrets_are_masked_and_computed_values_marked_unknown(planned: tuple[Planned, ...]) -> None:
    network = by_name(planned, "gcp:compute/subnetwork:Subnetwork", "subnetwork").inputs
    assert network["network"] == "(known after up)" and network["ipCidrRange"] == "10.40.0.0/16"
    pools = by_name(planned, "gcp:storage/bucketObject:BucketObject", "pools").inputs  # the SDK marks contents secret
    assert (pools["name"], pools["content"]) == ("stack/pools.json", "[secret]")


def test_text_has_one_line_per_input_and_json_has_all(
    planned: tuple[Planned, ...], cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "plan", lambda *_: planned)
    monkeypatch.setattr(planning, "used", lambda _: ("pool burst uses 4 reserved",))
    told = cli("plan").out.splitlines()
    assert told == [*lines(planned), "pool burst uses 4 reserved"]
    assert told[0] == "network (spotkeeper:gcp:Network)"
    assert "  + gcp:compute:Disk  sk-demo-floor-s0-data [protect]" in told
    assert all(len(line) < 200 for line in told)
    count = sum(not one.type.startswith("spotkeeper:") for one in planned)
    assert told[-2].startswith(f"{count} resources; no cloud was called")
    whole = json.loads(cli("plan", "--json").out)
    scripts = [one["inputs"]["metadata"]["startup-script"] for one in whole if "metadata" in one.get("inputs", ())]
    assert scripts and all(script.startswith("#!") and len(script) > 1000 for script in scripts)


def test_a_plan_names_the_reserved_capacity_that_the_stack_uses(tmp_path: Path) -> None:
    file = tmp_path / "Pulumi.mine.yaml"
    ours = "      max_on_demand: 2\n      reservations: [{name: res, zone: us-central1-a, count: 4}]\n"
    file.write_text(EXAMPLE.read_text().replace("      max_on_demand: 2\n", ours, 1))
    told = list(planning.used(str(file)))
    assert told == ["pool burst uses 4 reserved in us-central1-a as res, paid for already: first"]


def test_an_invalid_stack_file_has_line_path_value_and_remedy(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "Pulumi.mine.yaml"
    text = EXAMPLE.read_text().replace("kind: spot", "kind: spto").replace("region: us-central1", "region: us-centrall")
    file.write_text(text)
    done = cli("plan", file)
    assert (done.code, done.out) == (2, "")
    line = 1 + next(n for n, line in enumerate(text.splitlines()) if "spto" in line)
    assert f'error: 2 problems:\n  Pulumi.mine.yaml:{line}: pools[1].kind: "spto": not one of' in done.err
    assert "did you mean spot?" in done.err
    done = cli("plan", tmp_path / "Pulumi.nobody.yaml")
    assert done.code == 2 and "no such file" in done.err


def test_a_stack_file_here_takes_precedence_over_the_checkouts(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (CHECKOUT / "infra" / "stacks" / "Pulumi.example-gcp.yaml").read_text()
    (tmp_path / "Pulumi.mine.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    assert cli("check", "mine").out.startswith("mine: valid (gcp, us-central1), but ")
    assert "no stack other" in cli("check", "other").err
