"""The in-process runner: it makes what the program declares, once, and takes all of it away again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from rich.console import Console

from spotkeeper.local import deploy
from spotkeeper.local.core.catalog import ZONES
from spotkeeper.local.deploy import DeployError, DeployEvent, DeployOp
from spotkeeper.local.deploy.config import zones_for
from spotkeeper.local.deploy.result import Printer, summary, type_words
from spotkeeper.local.deploy.state import DeployState, StateEntry
from spotkeeper.local.deploy.table import (
    KINDS,
    ProviderDefaults,
    UnknownTypeError,
    compare,
    computed,
    kind_of,
    physical_name,
)
from tests.infra.cloud import Cloud, serve
from tests.infra.conftest import STACKS, Declared

LOCAL = STACKS / "Pulumi.local.yaml"
DISK = "gcp:compute/disk:Disk"
TEMPLATE = "gcp:compute/regionInstanceTemplate:RegionInstanceTemplate"


@pytest.fixture
def cloud(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    monkeypatch.setattr("infra.drain.gcp._PAUSE_LOCAL_S", 0.01)
    with serve() as cloud:
        yield cloud


def up(cloud: Cloud, folder: Path, config: Path = LOCAL, seen: list[DeployEvent] | None = None) -> deploy.DeployResult:
    tell = seen.append if seen is not None else lambda _: None
    return deploy.up("local", config, cloud, folder, tell, engine="in-process")


def destroy(cloud: Cloud, folder: Path, seen: list[DeployEvent] | None = None) -> deploy.DeployResult:
    tell = seen.append if seen is not None else lambda _: None
    return deploy.destroy("local", LOCAL, cloud, folder, tell, engine="in-process")


def changed(tmp_path: Path, old: str, new: str) -> Path:
    """The local stack file with one text replaced."""
    text = LOCAL.read_text()
    assert old in text
    path = tmp_path / "Pulumi.local.yaml"
    path.write_text(text.replace(old, new))
    return path


def test_up_creates_a_second_up_changes_nothing_and_destroy_deletes_all(cloud: Cloud, tmp_path: Path) -> None:
    first = up(cloud, tmp_path)
    assert first.engine == "in-process" and set(first.changes) == {DeployOp.CREATE}
    assert first.outputs["staticMachines"] == ["sk-local-floor-s0"]
    assert first.outputs["reconcileUrl"] == "http://127.0.0.1:9999/function", "what the cloud says, not a guess"
    made = len(cloud.changing())
    second = up(cloud, tmp_path)
    assert second.empty and second.changes[DeployOp.SAME] == first.changes[DeployOp.CREATE]
    assert len(cloud.changing()) == made, "not one call that changes anything"
    assert second.outputs == first.outputs
    destroy(cloud, tmp_path)
    assert cloud.bearers == {"Bearer of-the-operator"}, "the runner's calls and the drain's"
    assert cloud.things == {}


def test_every_declared_resource_is_created(cloud: Cloud, tmp_path: Path, local: dict[str, Declared]) -> None:
    result = up(cloud, tmp_path)
    assert sorted(f"{made.type}::{made.name}" for made in result.resources) == sorted(local)
    custom = [key for key in local if not key.startswith("spotkeeper:") and "dynamic" not in key]
    assert len(cloud.things) == len(custom), "each in the cloud, and nothing besides (Compute bodies are judged there)"


def test_a_preview_shows_ups_changes_and_makes_none(cloud: Cloud, tmp_path: Path) -> None:
    foreseen = deploy.preview("local", LOCAL, cloud, tmp_path, engine="in-process")
    assert cloud.changing() == [] and not list(tmp_path.iterdir())
    assert up(cloud, tmp_path).changes == foreseen.changes
    assert deploy.preview("local", LOCAL, cloud, tmp_path, engine="in-process").empty


def test_destroy_drains_first_and_deletes_in_reverse_order(cloud: Cloud, tmp_path: Path) -> None:
    up(cloud, tmp_path)
    seen: list[DeployEvent] = []
    destroy(cloud, tmp_path, seen)
    order = [event.name for event in seen if event.done and not event.type.startswith("spotkeeper:")]
    assert {"tick", "pubsub-gives-up", "push"} == set(order[:3]) and order[3] == "drain"
    assert order.index("function") < order.index("account-fn")
    assert order.index("sk-local-floor-s0") < order.index("sk-local-floor-s0-data")
    assert order.index("subnetwork") < len(order) - 1 - order[::-1].index("network")


def test_a_destroy_drains_before_it_removes_what_a_later_up_added(cloud: Cloud, tmp_path: Path) -> None:
    up(cloud, tmp_path)
    up(cloud, tmp_path, changed(tmp_path, "name: burst", "name: blast"))
    seen: list[DeployEvent] = []
    destroy(cloud, tmp_path, seen)
    order = [event.name for event in seen if event.done]
    assert order.index("push") < order.index("drain") < order.index("sk-local-blast-a")
    assert order.index("drain") < order.index("local-blast-spot")


def test_destroying_nothing_is_no_error(cloud: Cloud, tmp_path: Path) -> None:
    assert destroy(cloud, tmp_path).empty and cloud.calls == []


def test_resizing_a_pool_updates_one_object(cloud: Cloud, tmp_path: Path) -> None:
    up(cloud, tmp_path)
    result = up(cloud, tmp_path, changed(tmp_path, "size: 8", "size: 16"))
    assert {op: n for op, n in result.changes.items() if op is not DeployOp.SAME} == {DeployOp.UPDATE: 1}
    state = msgspec.json.decode(cloud.things["/storage/v1/b/sk-local-local/o/stack/pools.json"])
    assert state["pools"][1]["max_machines"] == 16


def test_a_new_image_creates_templates_before_deleting_the_old(cloud: Cloud, tmp_path: Path) -> None:
    up(cloud, tmp_path)
    old = [path for path in cloud.things if "/instanceTemplates/" in path]
    seen: list[DeployEvent] = []
    up(cloud, tmp_path, changed(tmp_path, "v20261110", "v20261117"), seen)
    new = [path for path in cloud.things if "/instanceTemplates/" in path]
    assert len(old) == len(new) == 2 and not set(old) & set(new)
    steps = [(event.op, event.name) for event in seen if event.done and event.op is not DeployOp.SAME]
    published = steps.index((DeployOp.UPDATE, "pools"))
    assert (
        steps.index((DeployOp.REPLACE, "local-burst-spot"))
        < published
        < steps.index((DeployOp.DELETE, "local-burst-spot"))
    )
    assert "sk-local-floor-s0" not in {name for _, name in steps}, "the floor keeps what it booted from"


def test_a_static_machine_takes_new_metadata_in_place(cloud: Cloud, tmp_path: Path) -> None:
    up(cloud, tmp_path)
    node = "/compute/v1/projects/local/zones/us-central1-a/instances/sk-local-floor-s0"
    before = len(cloud.changing())
    up(
        cloud,
        tmp_path,
        changed(tmp_path, "spotkeeper:limits:", "spotkeeper:agent: {interpreter: python3.11}\n  spotkeeper:limits:"),
    )
    mine = [call for call in cloud.changing()[before:] if "/instances/" in call[1]]
    assert mine == [("POST", f"{node}/setMetadata")]
    assert any("PYTHON=python3.11" in item["value"] for item in cloud.things[node]["metadata"]["items"])


def test_undeclared_resources_are_deleted(cloud: Cloud, tmp_path: Path) -> None:
    up(cloud, tmp_path)
    result = up(cloud, tmp_path, changed(tmp_path, "      placement: {max_distance: 2}\n", ""))
    assert result.changes[DeployOp.DELETE] == 3
    assert not [path for path in cloud.things if "resourcePolicies" in path]


def test_a_failed_up_names_the_resource_and_can_continue(cloud: Cloud, tmp_path: Path) -> None:
    cloud.refuse["zones/us-central1-a/instances"] = 403
    seen: list[DeployEvent] = []
    with pytest.raises(DeployError, match=r"gcp:compute/instance:Instance sk-local-floor-s0: .*refused"):
        up(cloud, tmp_path, seen=seen)
    assert [event.name for event in seen if event.error] == ["sk-local-floor-s0"]
    cloud.refuse.clear()
    made = len(cloud.things)
    assert made > 10
    result = up(cloud, tmp_path)
    assert result.changes[DeployOp.SAME] > 10 and result.changes[DeployOp.CREATE] >= 1
    destroy(cloud, tmp_path)
    assert cloud.things == {}


def test_a_run_killed_before_recording_leaves_nothing_behind(cloud: Cloud, tmp_path: Path) -> None:
    up(cloud, tmp_path)
    path = tmp_path / "in-process.json"
    state = msgspec.json.decode(path.read_bytes())
    for entry in state["entries"]:
        if entry["type"] == DISK or entry["name"] == "sk-local-floor-s0":
            entry["pending"] = True
    path.write_bytes(msgspec.json.encode(state))
    again = up(cloud, tmp_path)
    assert again.changes[DeployOp.CREATE] == 2, "what was only noted is removed and made again"
    destroy(cloud, tmp_path)
    assert cloud.things == {}


def test_protected_data_stops_a_destroy_before_it_begins(cloud: Cloud, tmp_path: Path) -> None:
    config = changed(
        tmp_path,
        "disk: {size_gb: 20}\n    - name: burst",
        "disk: {size_gb: 20, on_destroy: protect}\n    - name: burst",
    )
    up(cloud, tmp_path, config)
    before = dict(cloud.things)
    with pytest.raises(DeployError, match="protected: sk-local-floor-s0-data"):
        destroy(cloud, tmp_path)
    assert cloud.things == before


def test_retained_data_survives_a_destroy(cloud: Cloud, tmp_path: Path) -> None:
    config = changed(
        tmp_path, "disk: {size_gb: 20}\n    - name: burst", "disk: {size_gb: 20, on_destroy: retain}\n    - name: burst"
    )
    result = up(cloud, tmp_path, config)
    assert result.outputs["keptDisks"] == ["sk-local-floor-s0-data"]
    destroy(cloud, tmp_path)
    assert [path.rsplit("/", 1)[1] for path in cloud.things] == ["sk-local-floor-s0-data"]


def test_a_wrong_stack_file_changes_nothing(cloud: Cloud, tmp_path: Path) -> None:
    with pytest.raises(DeployError, match=r"pools\[1\].kind: \"spto\": not one of spot, static"):
        up(cloud, tmp_path, changed(tmp_path, "kind: spot", "kind: spto"))
    assert cloud.changing() == []


def test_a_state_of_another_stack_is_refused(cloud: Cloud, tmp_path: Path) -> None:
    up(cloud, tmp_path)
    with pytest.raises(DeployError, match="belongs to the stack 'local', not to 'other'"):
        deploy.destroy("other", LOCAL, cloud, tmp_path, engine="in-process")


def test_an_unreachable_cloud_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DeployError, match=r"the one-machine cloud at http://127.0.0.1:1 does not answer"):
        nobody = SimpleNamespace(endpoint="http://127.0.0.1:1", token="")
        deploy.up("local", LOCAL, nobody, tmp_path, engine="in-process")


# --- the table ---------------------------------------------------------------------------


def test_writing_the_state_does_not_recreate_a_removed_folder(tmp_path: Path) -> None:
    """After Ctrl-C the cloud's folder goes, while a registration may still be on its way in a thread."""
    folder = tmp_path / "cloud" / "deploy"
    with pytest.raises(FileNotFoundError):
        DeployState(folder / "state.json", "local", "p", "r").put(StateEntry("urn:1", DISK, "one"))
    assert not folder.parent.exists()


def test_an_unsupported_type_is_an_error() -> None:
    with pytest.raises(UnknownTypeError, match="gcp:sql/database:Database: the one-machine cloud has no such resource"):
        kind_of("gcp:sql/database:Database")


def test_the_table_has_every_type_that_is_declared(
    local: dict[str, Declared], example: dict[str, Declared], shared: dict[str, Declared]
) -> None:
    types = {found.type for found in [*local.values(), *example.values(), *shared.values()]}
    assert {type_ for type_ in types if type_.startswith(("gcp:", "pulumi:providers:"))} == set(KINDS)


def test_template_names_are_derived_from_their_content() -> None:
    one = physical_name(TEMPLATE, "dev-burst-spot", {"machineType": "a"})
    assert one == physical_name(TEMPLATE, "dev-burst-spot", {"machineType": "a"})
    assert one != physical_name(TEMPLATE, "dev-burst-spot", {"machineType": "b"})
    assert one.startswith("dev-burst-spot-") and len(one) == len("dev-burst-spot-") + 7


def test_changes_that_replace_and_changes_that_update() -> None:
    disk = {"name": "d", "zone": "z", "size": 10, "labels": {}}
    assert not compare(DISK, disk, dict(disk))
    assert compare(DISK, disk, {**disk, "labels": {"a": "b"}}).replaces == ()
    moved = compare(DISK, disk, {**disk, "zone": "y"})
    assert moved.replaces == ("zone",) and moved.delete_first
    assert not compare(TEMPLATE, {"machineType": "a"}, {"machineType": "b"}).delete_first


def test_accounts_are_identified_by_their_email() -> None:
    defaults = ProviderDefaults("spotkeeper-test", "us-central1")
    id_, outputs = computed("gcp:serviceaccount/account:Account", "account-vm", {"accountId": "sk-dev-vm"}, defaults)
    assert outputs["email"] == "sk-dev-vm@spotkeeper-test.iam.gserviceaccount.com"
    assert outputs["member"] == f"serviceAccount:{outputs['email']}" and id_.endswith(outputs["email"])


# --- what the user sees --------------------------------------------------------------------


def test_events_are_printed_as_pulumi_prints_them(cloud: Cloud, tmp_path: Path) -> None:
    console = Console(record=True, width=120, quiet=False, file=(tmp_path / "out").open("w"))
    result = deploy.up("local", LOCAL, cloud, tmp_path, Printer(console), engine="in-process")
    summary(result, console)
    text = console.export_text()
    assert " +  gcp:compute:Instance" in text and "sk-local-floor-s0" in text
    assert f"Resources: {result.changes[DeployOp.CREATE]} created" in text
    assert "bucket" in text and "sk-local-local" in text
    assert type_words("pulumi-python:dynamic:Resource") == "pulumi-python:dynamic:Resource"


def test_a_cloud_has_the_zones_of_its_stack_file(tmp_path: Path) -> None:
    file, text = tmp_path / "Pulumi.local.yaml", LOCAL.read_text()
    both = text.replace("region: us-central1", "regions: [us-central1, us-east1]")
    file.write_text(both.replace("-c]", "-c, us-east1-b]"))
    assert zones_for(file) == (*ZONES, "us-east1-b")
    file.write_text(text.replace("us-central1-c]", "us-east9-b]"))
    assert zones_for(file) == zones_for(LOCAL) == ZONES, "`up` reports what is wrong"
