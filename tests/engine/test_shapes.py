"""Whatever the program declares, on both clouds, is what the SDKs' own types take; and the stand-ins' rules know it."""

from __future__ import annotations

import pytest

from spotkeeper.local.deploy.config import read_config
from spotkeeper.report.review import preview
from tests.engine.standin.rules import REPLACES
from tests.engine.standin.shapes import UNKNOWN, problems, shape_of
from tests.infra.aws.cloud import AwsCloud
from tests.infra.conftest import STACKS, Declared, run_program

pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated in favor of:DeprecationWarning")


@pytest.fixture(scope="module")
def declared() -> list[Declared]:
    found: list[Declared] = []
    for name, cloud in (("example-gcp", None), ("example-aws", AwsCloud())):
        found += run_program(name, read_config(STACKS / f"Pulumi.{name}.yaml"), cloud).values()
    return [each for each in found if each.type.startswith(("gcp:", "aws:"))]


def test_every_argument_exists_in_the_sdk(declared: list[Declared]) -> None:
    shapes = {type_: shape_of(type_) for type_ in {each.type for each in declared}}
    wrong = [f"{each.key}: {said}" for each in declared for said in problems(shapes[each.type], each.properties)]
    assert wrong == []


def test_policy_rules_name_only_declared_types(declared: list[Declared]) -> None:
    assert set(REPLACES) == {each.type for each in declared}


def test_policy_rules_read_existing_inputs(declared: list[Declared]) -> None:
    unknown = {
        f"{type_}: {name}"
        for type_, names in REPLACES.items()
        for name in names - {"*"} - shape_of(type_)["fields"].keys()
    }
    assert unknown == set()


def test_unknown_arguments_are_refused() -> None:
    disk = shape_of("gcp:compute/disk:Disk")
    good = {"zone": "us-central1-a", "size": 20, "labels": {"a": "b"}, "diskEncryptionKey": {"rawKey": "x"}}
    assert problems(disk, good) == []
    assert problems(disk, {**good, "sizeGb": 20}) == ["sizeGb: unknown"]
    assert problems(disk, {**good, "size": "20GB"}) == ["size: want int, not '20GB'"]
    assert problems(disk, {**good, "labels": ["a"]}) == ["labels: want a map"]
    assert problems(disk, {**good, "diskEncryptionKey": {"raw_key": "x"}}) == ["diskEncryptionKey.raw_key: unknown"]
    template = shape_of("gcp:compute/regionInstanceTemplate:RegionInstanceTemplate")
    assert problems(template, {"machineType": "n2", "disks": [{"boot": 1}], "scheduling": {"premptible": True}}) == [
        "disks[0].boot: want bool, not 1",
        "scheduling.premptible: unknown",
    ]
    assert problems(template, {"machineType": "n2"}) == ["disks: missing"]


def test_unknown_values_count_as_present() -> None:
    """The SDK hands the engine's word for it on as any text, also in the place of a map, or of what must be there."""
    function = shape_of("gcp:cloudfunctionsv2/function:Function")
    given = {"location": "us-central1", "serviceConfig": {"environmentVariables": UNKNOWN}}
    assert problems(function, given) == []
    disk = {"source": UNKNOWN}
    node = {"machineType": "n2", "zone": "a", "bootDisk": {}, "networkInterfaces": UNKNOWN, "attachedDisks": [disk]}
    assert problems(shape_of("gcp:compute/instance:Instance"), node) == []
    assert problems(shape_of("gcp:compute/instance:Instance"), {**node, "attachedDisks": [{}]}) == [
        "attachedDisks[0].source: missing"
    ]
    assert preview.UNKNOWN == UNKNOWN
