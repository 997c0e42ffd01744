"""No disk of a static machine is replaced by an empty one: told in a preview, before anything is touched."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from infra.shared import DiskGuardProvider, disks
from spotkeeper.local import deploy
from spotkeeper.local.deploy import DeployError
from tests.infra.cloud import Cloud, serve
from tests.infra.conftest import STACKS
from tests.infra.settings import stackfiles

DISK = "sk-dev-floor-s0-data"


def news(cloud: str = "gcp", **changes: Any) -> dict[str, Any]:
    """What a stack file with changes (``pools__0__size``) declares."""
    settings = stackfiles.read(cloud, {key.replace("__", "."): value for key, value in changes.items()})
    return {"stack": "dev", "disks": disks(settings), "allow_data_loss": settings.allow_data_loss}


def refused(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """As the engine asks: numbers of a state are floats."""
    floats = {name: {**disk, "size_gb": float(disk["size_gb"])} for name, disk in before.get("disks", {}).items()}
    olds = {**before, "disks": floats} if before else {}
    return [str(failure.reason) for failure in DiskGuardProvider().check(olds, after).failures]


ZONES = {"gcp": ("us-east1-b", "us-east1-c"), "aws": ("us-east-1a", "us-east-1b")}


@pytest.mark.parametrize("cloud", ZONES)
def test_a_disk_that_would_move_or_shrink_is_refused_with_the_remedy(cloud: str) -> None:
    old, new = ZONES[cloud]
    before = news(cloud, pools__0__zones=[old])
    (told,) = refused(before, news(cloud, pools__0__zones=[new]))
    assert f"{DISK} is in {old} and cannot move to {new}" in told and "Declare a pool with another name" in told
    size = before["disks"][DISK]["size_gb"]
    (told,) = refused(before, news(cloud, pools__0__zones=[old], pools__0__disk__size_gb=size - 1))
    assert f"{DISK} has {size} GB and cannot shrink to {size - 1}" in told
    assert refused(before, news(cloud, pools__0__zones=[old], pools__0__disk__size_gb=size + 1)) == []


def test_only_on_google_cloud_another_disk_type_replaces_the_disk() -> None:
    kind = news()["disks"][DISK]["type"]
    assert kind != "pd-standard"
    (told,) = refused(news(), news(pools__0__disk__type="pd-standard"))
    assert f"{DISK} is a {kind} and cannot become a pd-standard" in told
    assert refused(news("aws"), news("aws", pools__0__disk__type="gp2")) == []


def test_a_second_zone_would_move_existing_machines() -> None:
    """The zones of a pool are taken in turn."""
    first, second = ZONES["gcp"]
    before = news(pools__0__zones=[first], pools__0__size=3)
    after = news(pools__0__zones=[first, second], pools__0__size=3)
    assert [told.partition(" ")[0] for told in refused(before, after)] == ["sk-dev-floor-s1-data"]


def test_allow_data_loss_permits_a_replacement() -> None:
    first, second = ZONES["gcp"]
    moved = news(pools__0__zones=[second], allow_data_loss=True)
    assert refused(news(pools__0__zones=[first]), moved) == []


def test_added_or_removed_machines_are_no_move() -> None:
    assert refused({}, news()) == [], "the first up, and the first with this resource"
    assert refused(news(pools__0__size=2), news(pools__0__size=1)) == []
    assert refused(news(pools__0__size=1), news(pools__0__size=2)) == []
    provider = DiskGuardProvider()
    assert not provider.diff("", news(), news()).changes and provider.diff("", news(), news(pools__0__size=3)).changes


@pytest.fixture
def cloud() -> Iterator[Cloud]:
    with serve() as cloud:
        yield cloud


def test_preview_and_up_refuse_before_anything_is_touched(cloud: Cloud, tmp_path: Path) -> None:
    config, file = yaml.safe_load((STACKS / "Pulumi.local.yaml").read_text()), tmp_path / "Pulumi.local.yaml"
    file.write_text(yaml.safe_dump(config))
    deploy.up("local", file, cloud, tmp_path, engine="in-process")
    made = len(cloud.changing())
    config["config"]["spotkeeper:pools"][0]["zones"] = ["us-central1-b"]
    file.write_text(yaml.safe_dump(config))
    for go in (deploy.preview, deploy.up):
        with pytest.raises(DeployError, match="sk-local-floor-s0-data is in us-central1-a and cannot move"):
            go("local", file, cloud, tmp_path, engine="in-process")
    touched = [path for _, path in cloud.changing()[made:] if "/disks" in path or "/instances" in path]
    assert touched == []
    config["config"]["spotkeeper:allow_data_loss"] = True
    file.write_text(yaml.safe_dump(config))
    deploy.up("local", file, cloud, tmp_path, engine="in-process")
    assert any("us-central1-b/disks" in path for path in cloud.things)
