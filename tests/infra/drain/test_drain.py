"""The drain empties a stack of what reconcile made, touches nothing else, and refuses a foreign stack."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import dill
import pytest

from infra.drain import Drain, DrainProvider, opened
from infra.drain.emptying import DrainError, empty
from infra.drain.gcp import Api
from infra.gcp.function import drain_args
from tests.infra.cloud import BUCKET, Cloud, props_of

ZONES = ("us-central1-a", "us-central1-b")
BASE = "/compute/v1/projects/local"


@pytest.fixture
def props(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr("infra.drain.gcp._PAUSE_LOCAL_S", 0.01)
    return props_of(cloud, *ZONES)


def machine(cloud: Cloud, kind: str, name: str, zone: str = ZONES[0], **labels: str) -> str:
    place = "global" if kind == "snapshots" else f"zones/{zone}"
    path = f"{BASE}/{place}/{kind}/{name}"
    cloud.things[path] = {"name": name, "labels": {key.replace("_", "-"): value for key, value in labels.items()}}
    return path


def test_destroy_empties_the_stack_and_nothing_else(cloud: Cloud, props: dict[str, Any]) -> None:
    for kind, name, zone in (
        ("instances", "sk-dev-abcdefgh-n0000-a1", ZONES[0]),
        ("instances", "sk-dev-abcdefgh-n0001-a1", ZONES[1]),
        ("disks", "sk-dev-abcdefgh-n0000-d1", ZONES[0]),
        ("snapshots", "sk-dev-abcdefgh-n0000-d1", ""),
    ):
        machine(cloud, kind, name, zone, sk_stack="dev", sk_job="abcdefgh")
    kept = {
        machine(cloud, "instances", "sk-dev-floor-s0", sk_stack="dev", sk_pool="floor"),
        machine(cloud, "disks", "sk-dev-floor-s0-data", sk_stack="dev", sk_pool="floor"),
        machine(cloud, "instances", "sk-dev2-abcdefgh-n0000-a1", sk_stack="dev2", sk_job="abcdefgh"),
        machine(cloud, "instances", "somebody-elses", owner="ops"),
    }
    DrainProvider().delete("drain/dev", props)
    assert {path for path in cloud.things if path.startswith(BASE)} == kept
    assert f"{BUCKET}/stack/drain" in cloud.things


def test_the_drain_stops_inserts_before_it_lists(cloud: Cloud, props: dict[str, Any]) -> None:
    machine(cloud, "instances", "sk-dev-abcdefgh-n0000-a1", sk_stack="dev", sk_job="abcdefgh")
    DrainProvider().delete("drain/dev", props)
    paths = [path for _, path in cloud.calls]
    assert paths.index("/upload/storage/v1/b/sk-local-dev/o") < paths.index(f"{BASE}/zones/{ZONES[0]}/instances")


def test_a_late_machine_is_found_by_the_second_listing(cloud: Cloud, props: dict[str, Any]) -> None:
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        if not pauses:
            machine(cloud, "instances", "sk-dev-abcdefgh-n0000-a2", ZONES[1], sk_stack="dev", sk_job="abcdefgh")
        pauses.append(seconds)

    empty(opened(props), pause=pause)
    assert not [path for path in cloud.things if "/instances/" in path]
    assert len(pauses) >= 2, "clean twice in a row, counted from the late one"


def test_a_zone_that_left_the_stack_is_emptied_too(cloud: Cloud, props: dict[str, Any]) -> None:
    """A job that held when its zone was taken out of a pool kept its disks there."""
    machine(cloud, "disks", "sk-dev-abcdefgh-n0000-d0", "europe-west4-c", sk_stack="dev", sk_job="abcdefgh")
    machine(cloud, "instances", "sk-dev-abcdefgh-n0000-a1", "europe-west4-b", sk_stack="dev", sk_job="abcdefgh")
    kept = machine(cloud, "disks", "another", "europe-west4-c", sk_stack="dev2", sk_job="abcdefgh")
    DrainProvider().delete("drain/dev", props)
    assert [path for path in cloud.things if path.startswith(BASE)] == [kept]


def test_a_used_disk_waits_for_its_machine(cloud: Cloud, props: dict[str, Any]) -> None:
    disk = machine(cloud, "disks", "sk-dev-abcdefgh-n0000-d1", sk_stack="dev", sk_job="abcdefgh")
    held = cloud.things[disk]
    held["users"] = ["a machine"]

    def pause(_: float) -> None:
        if held.pop("users", None):
            assert disk in cloud.things, "not deleted while a machine may write to it"

    empty(opened(props), pause=pause)
    assert disk not in cloud.things


def test_a_foreign_stack_is_refused(cloud: Cloud, props: dict[str, Any]) -> None:
    theirs = machine(cloud, "instances", "sk-dev-abcdefgh-n0000-a1", sk_stack="dev", sk_job="abcdefgh")
    cloud.things[f"{BUCKET}/stack/pools.json"] = json.dumps({"stack": "prod"})
    with pytest.raises(DrainError, match="belongs to the stack 'prod', not to 'dev': nothing was deleted"):
        DrainProvider().delete("drain/dev", props)
    with pytest.raises(DrainError, match="drain/prod belongs to another stack than dev"):
        DrainProvider().delete("drain/prod", props)
    assert theirs in cloud.things and f"{BUCKET}/stack/drain" not in cloud.things


def test_a_stack_that_never_was_is_empty_already(cloud: Cloud, props: dict[str, Any]) -> None:
    del cloud.things[f"{BUCKET}/stack/pools.json"]
    DrainProvider().delete("drain/dev", props)


def test_undeletable_resources_are_named(cloud: Cloud, props: dict[str, Any]) -> None:
    machine(cloud, "instances", "sk-dev-abcdefgh-n0000-a1", sk_stack="dev", sk_job="abcdefgh")
    cloud.refuse["sk-dev-abcdefgh-n0000-a1"] = 403
    with pytest.raises(DrainError, match=r"403 .*refused"):
        DrainProvider().delete("drain/dev", props)
    cloud.refuse.clear()
    disk = machine(cloud, "disks", "sk-dev-abcdefgh-n0000-d1", sk_stack="dev", sk_job="abcdefgh")
    cloud.things[disk]["users"] = ["a machine that stays"]
    clock = iter(range(0, 100_000, 1000))
    with pytest.raises(DrainError, match="these are left: sk-dev-abcdefgh-n0000-d1"):
        empty(opened(props), pause=lambda _: None, now=lambda: next(clock))


def test_a_stack_that_is_built_again_may_insert_again(cloud: Cloud, props: dict[str, Any]) -> None:
    cloud.things[f"{BUCKET}/stack/drain"] = "{}"
    assert DrainProvider().create(props).id == "drain/dev"
    assert f"{BUCKET}/stack/drain" not in cloud.things
    DrainProvider().create(props)  # the usual case: there is none


def test_a_change_never_replaces_the_drain(props: dict[str, Any]) -> None:
    """Half of a replacement would be a delete, which drains a live stack."""
    changed = DrainProvider().diff("drain/dev", props, {**props, "zones": list(ZONES[:1])})
    assert changed.changes and not changed.replaces
    assert not DrainProvider().diff("drain/dev", props, {**props, "__provider": "another"}).changes


def test_the_state_refers_to_the_providers_code() -> None:
    pickled = dill.dumps(DrainProvider(), recurse=True)
    assert len(pickled) < 100 and b"infra.drain" in pickled


def test_the_environment_overrides_a_local_clouds_address(
    props: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPOTKEEPER_COMPUTE_ENDPOINT", "http://127.0.0.1:1/compute/v1/")
    assert opened(props).compute == "http://127.0.0.1:1/compute/v1"
    monkeypatch.setattr("infra.drain.gcp.access_token", lambda _: "t")
    google = "https://compute.googleapis.com/compute/v1"
    assert opened({**props, "compute": google}).compute == google, "a real stack is not looked for in a local cloud"


def test_no_message_contains_the_token() -> None:
    assert "secret" not in repr(Api("secret"))


def test_properties_without_a_cloud_mean_google_cloud(cloud: Cloud, props: dict[str, Any]) -> None:
    assert "cloud" not in props
    gone = machine(cloud, "disks", "sk-dev-abcdefgh-n0000-d0", sk_stack="dev", sk_job="abcdefgh")
    DrainProvider().delete("drain/dev", props)
    assert gone not in cloud.things
    made_with_more = {**props, "cloud": "gcp"}
    assert not DrainProvider().diff("drain/dev", props, made_with_more).replaces


def test_a_busy_cloud_is_retried(cloud: Cloud, props: dict[str, Any]) -> None:
    """Throttled, or a disk of which a snapshot is being made: no reason to leave a stack half destroyed."""
    name = "sk-dev-abcdefgh-n0000-d0"
    disk = machine(cloud, "disks", name, sk_stack="dev", sk_job="abcdefgh")
    looks: list[float] = []

    def pause(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 2:
            cloud.refuse.clear()

    cloud.refuse[name] = 503
    assert empty(opened(props), pause=pause) == {"disk": 1}
    assert disk not in cloud.things and len(looks) == 4, "refused twice, deleted, then two clean looks"


def test_the_drain_reports_its_counts(cloud: Cloud, props: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    for node in range(2):
        machine(cloud, "instances", f"sk-dev-abcdefgh-n000{node}-a1", sk_stack="dev", sk_job="abcdefgh")
    machine(cloud, "disks", "sk-dev-abcdefgh-n0000-d1", sk_stack="dev", sk_job="abcdefgh")
    DrainProvider().delete("drain/dev", props)
    assert capsys.readouterr().err == "drain of dev: deleted 1 disk, 2 machines\n"
    DrainProvider().delete("drain/dev", props)
    assert capsys.readouterr().err == "drain of dev: deleted nothing, since nothing was left\n"


def test_the_arguments_are_the_properties_that_the_provider_reads(props: dict[str, Any]) -> None:
    ends = SimpleNamespace(compute="", storage="")
    settings = SimpleNamespace(stack="dev", project="p", region="r", zones=("a",), endpoints=ends)
    made = drain_args(settings, SimpleNamespace(bucket=SimpleNamespace(name="b")))
    assert {*made} == {*props, "cloud"}
    assert Drain._resource_type_name == "dynamic:Resource"
