"""Stacks of one project whose names begin alike are refused: on Google Cloud rights go by what names begin with."""

from __future__ import annotations

from pathlib import Path

import pulumi
import pytest

from infra import naming
from infra.gcp.identity import machines_of
from infra.settings.model import Settings
from infra.settings.read import clashes, from_config
from spotkeeper.contract.names import POOL_NAME, STACK_NAME, vm_name
from spotkeeper.local.access.iam import holds
from spotkeeper.local.deploy.config import read_config
from tests.infra.conftest import STACKS, run_program

GCP = STACKS / "Pulumi.example-gcp.yaml"


def stack(name: str, file: Path = GCP) -> Settings:
    return from_config(read_config(file), name)


def folder_with(folder: Path, name: str, text: str | None = None) -> Path:
    (folder / f"Pulumi.{name}.yaml").write_text(GCP.read_text() if text is None else text)
    return folder


@pytest.mark.parametrize(("here", "there"), [("a", "a-b"), ("a-b", "a"), ("dev", "dev-2-x")])
def test_stack_names_with_a_common_prefix_are_refused_in_both_files(tmp_path: Path, here: str, there: str) -> None:
    short, long = sorted((here, there), key=len)
    theirs = f"projects/acme-train/zones/us-central1-a/instances/{vm_name(long, 'abcdefgh', 0, 1)}"
    assert holds(machines_of(short), theirs), "this is why"
    (told,) = clashes(stack(here), folder_with(tmp_path, there))
    said = str(told)
    assert said.startswith(f'gcp:project: "acme-train": is also the project of the stack {there} (Pulumi.{there}.yaml)')
    assert f"{short}'s rights to sk-{short}-* would include the machines of {long}. Give one of these" in said


@pytest.mark.parametrize("there", ["a", "ab", "b-a", "b"])
def test_distinct_stack_names_are_accepted(tmp_path: Path, there: str) -> None:
    assert clashes(stack("a"), folder_with(tmp_path, there)) == ()


def test_other_projects_and_unreadable_files_are_ignored(tmp_path: Path) -> None:
    folder_with(tmp_path, "a-b", GCP.read_text().replace("acme-train", "acme-test"))
    folder_with(tmp_path, "a-c", "config: [")
    assert clashes(stack("a"), tmp_path) == ()


def test_on_aws_name_prefixes_do_not_matter(tmp_path: Path) -> None:
    aws = STACKS / "Pulumi.example-aws.yaml"
    assert clashes(stack("a", aws), folder_with(tmp_path, "a-b", aws.read_text())) == ()


def test_on_aws_template_names_of_two_stacks_never_collide() -> None:
    """Launch templates and placement groups are known to the account by name."""
    assert naming.launch_template("a", "b-c", "spot") != naming.launch_template("a-b", "c", "spot")
    assert naming.placement_group("a", "b-c", "us-east-1a") != naming.placement_group("a-b", "c", "us-east-1a")
    assert not STACK_NAME.match("a_b") and not POOL_NAME.match("a_b"), "the sign between the two is in neither"


def test_the_program_declares_nothing_for_clashing_stacks() -> None:
    config = read_config(STACKS / "Pulumi.local.yaml", endpoint="http://127.0.0.1:9")
    with pytest.raises(pulumi.RunError, match=r"^Pulumi.local-b.yaml:\ngcp:project: .* of the stack local \("):
        run_program("local-b", config)
