"""Pulumi's own engine and the in-process runner give the same cloud. Needs the ``pulumi`` command."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spotkeeper.local import deploy
from spotkeeper.local.deploy import DeployError, DeployEvent, DeployOp, choose
from tests.engine.conftest import needs_pulumi
from tests.infra.cloud import Cloud, serve
from tests.infra.conftest import STACKS

pytestmark = needs_pulumi
LOCAL = STACKS / "Pulumi.local.yaml"


@pytest.fixture
def cloud() -> Iterator[Cloud]:
    with serve() as cloud:
        yield cloud


def up(cloud: Cloud, folder: Path, engine: deploy.Engine, config: Path = LOCAL) -> deploy.DeployResult:
    return deploy.up("local", config, cloud, folder, engine=engine)


def same_names(things: dict[str, Any]) -> dict[str, Any]:
    return {path: things[path] for path in sorted(things) if not path.endswith("/stack/drain")}


def test_both_drivers_make_the_same_resources(cloud: Cloud, tmp_path: Path) -> None:
    ours = up(cloud, tmp_path / "in-process", "in-process")
    by_runner = same_names(cloud.things)
    deploy.destroy("local", LOCAL, cloud, tmp_path / "in-process", engine="in-process")
    assert cloud.things == {}
    theirs = up(cloud, tmp_path / "pulumi", "pulumi")
    assert same_names(cloud.things) == by_runner
    assert dict(theirs.outputs) == dict(ours.outputs)
    assert theirs.changes == ours.changes
    assert {(r.type, r.name, r.id) for r in theirs.resources} == {(r.type, r.name, r.id) for r in ours.resources}


def test_a_second_up_is_empty_and_destroy_leaves_nothing(cloud: Cloud, tmp_path: Path) -> None:
    foreseen = deploy.preview("local", LOCAL, cloud, tmp_path, engine="pulumi")
    assert cloud.changing() == []
    first = up(cloud, tmp_path, "pulumi")
    assert first.changes == foreseen.changes and set(first.changes) == {DeployOp.CREATE}
    made = len(cloud.changing())
    assert up(cloud, tmp_path, "pulumi").empty
    assert len(cloud.changing()) == made
    seen: list[DeployEvent] = []
    deploy.destroy("local", LOCAL, cloud, tmp_path, seen.append, engine="pulumi")
    assert cloud.things == {}
    order = [event.name for event in seen if event.done and not event.type.startswith("spotkeeper:")]
    assert max(order.index("tick"), order.index("push")) < order.index("drain") < order.index("function")


def test_a_new_image_replaces_templates_before_it_deletes_them(cloud: Cloud, tmp_path: Path) -> None:
    up(cloud, tmp_path, "pulumi")
    old = {path for path in cloud.things if "/instanceTemplates/" in path}
    config = tmp_path / "Pulumi.local.yaml"
    config.write_text(LOCAL.read_text().replace("v20261110", "v20261117"))
    before = len(cloud.calls)
    up(cloud, tmp_path, "pulumi", config)
    new = {path for path in cloud.things if "/instanceTemplates/" in path}
    assert len(new) == 2 and not old & new
    calls = [call for call in cloud.calls[before:] if "/instanceTemplates" in call[1]]
    assert [method for method, _ in calls if method != "GET"] == ["POST", "POST", "DELETE", "DELETE"]
    deploy.destroy("local", config, cloud, tmp_path, engine="pulumi")
    assert cloud.things == {}


def test_a_refused_resource_is_reported_and_up_can_continue(cloud: Cloud, tmp_path: Path) -> None:
    cloud.refuse["zones/us-central1-a/instances"] = 403
    with pytest.raises(DeployError, match="refused: zones/us-central1-a/instances") as caught:
        up(cloud, tmp_path, "pulumi")
    assert 'File "' not in str(caught.value), "the cloud's words, not where in the provider they were heard"
    cloud.refuse.clear()
    assert up(cloud, tmp_path, "pulumi").changes[DeployOp.CREATE] >= 1
    deploy.destroy("local", LOCAL, cloud, tmp_path, engine="pulumi")
    assert cloud.things == {}


def test_only_a_running_engines_lock_blocks(cloud: Cloud, tmp_path: Path) -> None:
    before = {path.name: path.read_bytes() for path in STACKS.iterdir()}
    up(cloud, tmp_path, "pulumi")
    locks = tmp_path / "state" / ".pulumi" / "locks" / "organization" / "spotkeeper" / "local"
    locks.mkdir(parents=True, exist_ok=True)
    lock = {"username": "me", "hostname": "here", "timestamp": "2026-11-21T00:00:00Z"}
    (locks / "8e5f.json").write_text(json.dumps({**lock, "pid": os.getpid()}))
    with pytest.raises(DeployError, match="locked"):
        deploy.destroy("local", LOCAL, cloud, tmp_path, engine="pulumi")
    gone = subprocess.Popen(["true"])
    gone.wait()
    (locks / "8e5f.json").write_text(json.dumps({**lock, "pid": gone.pid}))
    deploy.destroy("local", LOCAL, cloud, tmp_path, engine="pulumi")
    assert cloud.things == {}
    after = {path.name: path.read_bytes() for path in STACKS.iterdir()}
    assert after == before, "the engine writes into stack files, and deletes them with a stack: not the checkout's"


def test_a_wrong_stack_files_problems_are_shown(cloud: Cloud, tmp_path: Path) -> None:
    config = tmp_path / "Pulumi.local.yaml"
    config.write_text(LOCAL.read_text().replace("kind: spot", "kind: spto"))
    with pytest.raises(DeployError, match=r'pools\[1\].kind: "spto": not one of spot, static'):
        up(cloud, tmp_path, "pulumi", config)
    assert cloud.changing() == []


def test_the_real_engine_is_used_if_installed() -> None:
    assert choose("auto") == "pulumi"
    assert choose("in-process") == "in-process"
