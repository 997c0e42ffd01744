"""The program through Google's own provider, as far as Compute Engine and Cloud Storage go, against the one-machine
cloud: a first up, a second one without a change, a refresh without one, changes in place and by replacement, and a
destroy that leaves nothing.

What a stand-in for a provider cannot tell, its own code does: which fields it sends, which it fills in, and whether
what it reads back is what was declared. The program is whole; its other resources are the strict stand-in's.

Needs the ``pulumi`` command with its Python host, and the plugin on PATH or in Pulumi's cache: ``pulumi plugin install
resource gcp``. The stand-ins that the other tests put on PATH are scripts, and are not taken for it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pulumi.automation import CommandError, OpType

from spotkeeper.local.access.auth import Principal, Tokens
from spotkeeper.local.compute.stored import StoredResource
from spotkeeper.local.core.catalog import Timing
from spotkeeper.local.core.world import Database
from spotkeeper.local.deploy.config import TOKEN
from spotkeeper.local.lifecycle.cloud import LocalCloud
from tests.engine.conftest import needs_pulumi
from tests.engine.standin.both import GOOGLES, THEIRS
from tests.engine.standin.project import Project, checkout
from tests.engine.standin.rules import REPLACES
from tests.engine.standin.witness import Witness, watch
from tests.engine.test_stacks import small
from tests.local.client import Api

PLUGIN = "pulumi-resource-gcp"
NODE = "zones/us-central1-a/instances/sk-demo-floor-s0"


def installed() -> Path | None:
    """Google's own provider, on PATH or the newest in the cache."""
    home = Path(os.environ.get("PULUMI_HOME") or Path.home() / ".pulumi")
    cached = sorted(home.glob(f"plugins/resource-gcp-v*/{PLUGIN}"), key=_version, reverse=True)
    on_path = [Path(folder) / PLUGIN for folder in os.environ["PATH"].split(os.pathsep)]
    return next((path for path in (*on_path, *cached) if os.access(path, os.X_OK) and not _is_script(path)), None)


def _version(path: Path) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", path.parent.name))


def _is_script(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2) == b"#!"


pytestmark = [
    pytest.mark.matrix,
    pytest.mark.timeout(3600),
    pytest.mark.filterwarnings("ignore:.*deprecated in favor of:DeprecationWarning"),
    needs_pulumi,
    pytest.mark.skipif(
        installed() is None,
        reason=f"Google's provider ({PLUGIN}) is not on PATH or in Pulumi's cache: pulumi plugin install resource gcp",
    ),
]


@dataclass(frozen=True)
class Stack:
    project: Project
    cloud: LocalCloud
    witness: Witness


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The example for Google Cloud, with nothing protected, on a cloud of its own project."""
    folder = tmp_path_factory.mktemp("real")
    cloud = LocalCloud.up(folder / "cloud", scale=100, project="acme-train", timing=Timing(accept_s=0.1))
    try:
        with watch(cloud.endpoint) as witness:
            needed = tuple(type_ for type_ in REPLACES if type_.startswith("gcp:"))
            environment = {GOOGLES: str(installed()), TOKEN: cloud.token}  # the drain's
            program = checkout(folder / "checkout")
            project = Project(
                folder / "stack", "gcp", config(cloud, witness), environment, program,
                needed=needed, plugin="tests.engine.standin.both",
            )  # fmt: skip
            yield Stack(project.write(), cloud, witness)
    finally:
        cloud.down(purge=True)
    assert cloud.left_over().processes == 0


def config(cloud: LocalCloud, witness: Witness) -> dict[str, Any]:
    given = small("example-gcp")
    pools = given["spotkeeper:pools"]
    pools[0]["disk"] = {**pools[0]["disk"], "on_destroy": "delete"}
    operator = Principal("operator@acme-train.iam.gserviceaccount.com")
    token, _ = Tokens(cloud.folder).access(operator, cloud.clock.now() + 1e9)
    return {
        **given,
        "spotkeeper:bucket": {"on_destroy": "delete"},
        "spotkeeper:endpoints": {"compute": cloud.compute_endpoint, "storage": cloud.endpoint},
        "gcp:accessToken": token,
        "gcp:computeCustomEndpoint": f"{witness.endpoint}/compute/beta/",
        "gcp:storageCustomEndpoint": f"{witness.endpoint}/storage/v1/",
    }


def left(cloud: LocalCloud) -> dict[str, int]:
    """What a destroy should have removed, by the cloud's own books. Every project has a network to begin with."""
    kinds = ("instances", "disks", "snapshots", "instanceTemplates", "resourcePolicies", "firewalls", "policies")
    with closing(Database(cloud.folder / "state.sqlite")) as state:
        counted = {kind: state.count(kind) for kind in (*kinds, "resources")}
        for kind in ("networks", "subnetworks"):
            counted[kind] = sum(not stored.path.endswith("/default") for stored in state.all(kind, StoredResource))
    return {kind: count for kind, count in counted.items() if count}


def test_the_program_goes_up_stays_unchanged_and_is_destroyed(stack: Stack) -> None:
    project, witness = stack.project, stack.witness
    theirs = {step.name for step in project.up().changed() if step.type.startswith(THEIRS)}
    assert {"network", "subnetwork", "bucket", "pools", "demo-burst-spot", "sk-demo-floor-s0"} <= theirs
    assert stack.cloud.status().vms[0].status == "RUNNING"

    assert project.up(expect_no_changes=True).changed() == []
    seen = len(witness.changes())
    project.refresh(expect_no_changes=True)
    assert witness.changes()[seen:] == []

    pools = [{**pool, "size": 12} if pool["kind"] == "spot" else pool for pool in project.config["spotkeeper:pools"]]
    project = project.with_(pools=pools)
    assert [(step.op, step.name) for step in project.up().changed()] == [(OpType.UPDATE, "pools")]

    api = Api.of(stack.cloud, project="acme-train")
    node, seen = api.get(NODE)["id"], len(witness.changes())
    project = project.with_(labels={"team": "vision"})
    done = project.up().changed()
    assert {step.name for step in done if step.op is OpType.CREATE_REPLACEMENT} == {"demo-burst-spot", "demo-burst-od"}
    templates = [method for method, path in witness.changes()[seen:] if "/instanceTemplates" in path]
    assert templates == ["POST", "POST", "DELETE", "DELETE"], "no moment without a template"
    labelled = api.get(NODE)
    assert (labelled["id"], labelled["labels"]["team"]) == (node, "vision"), "the same machine, in place"
    assert project.up(expect_no_changes=True).changed() == []

    api.ok(api.delete("global/firewalls/sk-demo-ssh-iap"))  # by somebody: the check is not deaf
    with pytest.raises(CommandError, match="no changes were expected"):
        project.drift()

    project.destroy()
    assert left(stack.cloud) == {}
    assert witness.wrong == []
