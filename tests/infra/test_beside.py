"""Stacks of one project whose names begin alike are refused: on Google Cloud rights go by what names begin with."""

from __future__ import annotations

from pathlib import Path

import pulumi
import pytest
from spotkeeper.local.deploy.config import read_config
from spotkeeper.spec.names import vm_name

from infra.gcp.identity import machines_of
from infra.settings import Settings, beside, from_config
from tests.infra.conftest import STACKS, run_program
from tests.infra.declaration import holds

GCP = STACKS / "Pulumi.example-gcp.yaml"


def stack(name: str, file: Path = GCP) -> Settings:
    return from_config(read_config(file), name)


def folder_with(folder: Path, name: str, text: str | None = None) -> Path:
    (folder / f"Pulumi.{name}.yaml").write_text(GCP.read_text() if text is None else text)
    return folder


@pytest.mark.parametrize(("here", "there"), [("a", "a-b"), ("a-b", "a"), ("dev", "dev-2-x")])
def test_names_that_rights_do_not_tell_apart_are_refused_from_either_side(
    tmp_path: Path, here: str, there: str
) -> None:
    short, long = sorted((here, there), key=len)
    theirs = f"projects/acme-train/zones/us-central1-a/instances/{vm_name(long, 'abcdefgh', 0, 1)}"
    assert holds(machines_of(short), theirs), "this is why"
    (told,) = beside.clashes(stack(here), folder_with(tmp_path, there))
    said = str(told)
    assert said.startswith(f'gcp:project: "acme-train": is that of the stack {there} (Pulumi.{there}.yaml) too')
    assert f"those of {short}, over sk-{short}-*, would reach the machines of {long}. Give one of the two" in said


@pytest.mark.parametrize("there", ["a", "ab", "b-a", "b"])
def test_names_that_rights_tell_apart_are_not(tmp_path: Path, there: str) -> None:
    assert beside.clashes(stack("a"), folder_with(tmp_path, there)) == ()


def test_another_project_is_another_place_and_a_file_that_is_none_says_nothing(tmp_path: Path) -> None:
    folder_with(tmp_path, "a-b", GCP.read_text().replace("acme-train", "acme-test"))
    folder_with(tmp_path, "a-c", "config: [")
    assert beside.clashes(stack("a"), tmp_path) == ()


def test_on_aws_rights_go_by_tags(tmp_path: Path) -> None:
    aws = STACKS / "Pulumi.example-aws.yaml"
    assert beside.clashes(stack("a", aws), folder_with(tmp_path, "a-b", aws.read_text())) == ()


def test_the_program_declares_nothing_of_such_a_stack() -> None:
    config = read_config(STACKS / "Pulumi.local.yaml", endpoint="http://127.0.0.1:9")
    with pytest.raises(pulumi.RunError, match=r"^Pulumi.local-b.yaml:\ngcp:project: .* of the stack local \("):
        run_program("local-b", config)
