"""The real gcloud works with this cloud: it creates, lists, attaches, detaches, deletes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from spotkeeper.local.access import auth
from spotkeeper.local.lifecycle.cloud import LocalCloud

pytestmark = pytest.mark.skipif(shutil.which("gcloud") is None, reason="gcloud is not installed")
ZONE = "--zone=us-central1-a"


@pytest.fixture(scope="module")
def gcloud(cloud: LocalCloud, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("gcloud")
    env = os.environ | {
        "CLOUDSDK_API_ENDPOINT_OVERRIDES_COMPUTE": f"{cloud.compute_endpoint}/",
        "CLOUDSDK_AUTH_ACCESS_TOKEN_FILE": str(cloud.folder / auth.OPERATOR_FILE),
        "CLOUDSDK_CONFIG": str(folder),
        "CLOUDSDK_CORE_PROJECT": "local",
        "CLOUDSDK_CORE_DISABLE_PROMPTS": "1",
        "CLOUDSDK_CORE_DISABLE_USAGE_REPORTING": "1",
        "CLOUDSDK_COMPONENT_MANAGER_DISABLE_UPDATE_CHECK": "1",
    }

    def run(*words: str, fails: bool = False) -> str:
        done = subprocess.run(
            ["gcloud", "compute", *words], env=env, capture_output=True, text=True, timeout=120, check=False
        )
        assert (done.returncode != 0) is fails, done.stderr
        return done.stderr if fails else done.stdout

    return run


@pytest.mark.matrix
def test_a_vm_and_its_disk_from_begin_to_end(gcloud: Any, cloud: LocalCloud) -> None:
    gcloud("disks", "create", "gc-disk", "--size=10GB", ZONE)
    image = ("--image=debian-12", "--image-project=debian-cloud")
    spot = ("--provisioning-model=SPOT", "--instance-termination-action=DELETE", "--labels=sk-stack=gc")
    identity = ("--no-service-account", "--no-scopes")
    gcloud("instances", "create", "gc-vm", ZONE, "--machine-type=e2-standard-4", *image, *spot, *identity)
    for name in ("gc-vm", "gc-disk"):
        assert name in {thing.name for thing in (*cloud.status().vms, *cloud.status().disks)}

    listed = json.loads(gcloud("instances", "list", "--filter=labels.sk-stack=gc", "--format=json(name,status)"))
    assert listed == [{"name": "gc-vm", "status": "RUNNING"}]
    assert json.loads(gcloud("instances", "list", "--filter=labels.sk-stack=other", "--format=json(name)")) == []

    gcloud("instances", "attach-disk", "gc-vm", "--disk=gc-disk", "--device-name=sk-data", ZONE)
    devices = gcloud("instances", "describe", "gc-vm", ZONE, "--format=value(disks[].deviceName)")
    assert devices.strip() == "persistent-disk-0;sk-data"
    assert "already being used" in gcloud("disks", "delete", "gc-disk", ZONE, fails=True)
    gcloud("instances", "detach-disk", "gc-vm", "--disk=gc-disk", ZONE)

    gcloud("instances", "delete", "gc-vm", ZONE)
    gcloud("disks", "delete", "gc-disk", ZONE)
    assert not cloud.left_over()


def test_a_stockout_reads_like_googles(gcloud: Any, cloud: LocalCloud) -> None:
    cloud.set_capacity("us-central1-a", 0)
    said = gcloud(
        *("instances", "create", "gc-none", ZONE, "--machine-type=e2-standard-4", "--provisioning-model=SPOT"),
        *("--image=debian-12", "--image-project=debian-cloud", "--no-service-account", "--no-scopes"),
        fails=True,
    )
    assert "does not have enough resources available" in " ".join(said.split())
