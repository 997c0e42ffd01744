"""A recorder in place of Pulumi's engine: what the program declares, as plain data."""

from __future__ import annotations

import json
import logging
import re
import runpy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pulumi
import pytest
from google.protobuf.json_format import MessageToDict
from pulumi.runtime import rpc
from pulumi.runtime.mocks import MockCallArgs, MockMonitor, MockResourceArgs, Mocks
from pulumi.runtime.settings import ROOT as ROOT_RESOURCE

from spotkeeper.local.deploy.config import read_config
from spotkeeper.local.deploy.monitor import STACK_REFERENCE, plain
from spotkeeper.local.deploy.table import ProviderDefaults, computed
from tests.infra import cloud as google

ROOT = Path(__file__).resolve().parents[2]
DEFAULTS = ProviderDefaults("spotkeeper-test", "us-central1")
STACKS = ROOT / "infra" / "stacks"
"""What the tests below read; ``properties`` hold Pulumi's camelCase names, whole numbers as ints."""


@dataclass(frozen=True)
class Declared:
    type: str
    name: str
    properties: dict[str, Any]
    depends_on: tuple[str, ...]  # "type::name" of everything it waits for, children's parents included
    parent: str
    protect: bool
    retain: bool
    ignores: tuple[str, ...] = ()  # inputs that may change in the program without a change in the cloud
    provider: str = ""  # the name of the one that it says; "": the default
    options: dict[str, Any] = field(default_factory=dict)  # all of them, by the engine's names

    @property
    def key(self) -> str:
        return f"{self.type}::{self.name}"


class Program(dict[str, Declared]):
    """Everything that a program declared, by ``type::name``, in order; and the stack's ``outputs``."""

    outputs: dict[str, Any]


OTHER_STACK = {
    "vpc": "projects/acme-net/global/networks/shared",
    "subnets": {"us-central1": "projects/acme-net/regions/us-central1/subnetworks/train"},
}
"""What any other stack tells of itself."""


class Cloud(Mocks):
    """Answers as the provider would: computed outputs from the one table."""

    def call(self, args: MockCallArgs) -> tuple[dict[str, Any], None]:
        raise AssertionError(f"the program asks a cloud: {args.token}")

    def new_resource(self, args: MockResourceArgs) -> tuple[str | None, dict[str, Any]]:
        if args.typ == STACK_REFERENCE:
            return args.name, {"name": args.inputs["name"], "outputs": OTHER_STACK}
        if not args.custom:
            return "", dict(args.inputs)
        id_, outputs = computed(args.typ, args.name, plain(args.inputs), DEFAULTS)
        return id_, {**args.inputs, **outputs}


class Recorder(MockMonitor):
    def __init__(self, cloud: Mocks) -> None:
        super().__init__(cloud)
        self.declared: list[Declared] = []

    def RegisterResource(self, request: Any) -> Any:  # noqa: N802 - Pulumi's name
        reply = super().RegisterResource(request)
        if request.type != "pulumi:pulumi:Stack":
            assert reply.urn not in {found.key for found in self.declared}, f"declared twice: {reply.urn}"
            self.declared.append(
                Declared(
                    request.type,
                    request.name,
                    plain(rpc.deserialize_properties(request.object)),
                    tuple(sorted(key_of(urn) for urn in request.dependencies)),
                    request.parent.rsplit("::", 1)[-1],
                    bool(request.protect),
                    bool(request.retainOnDelete),
                    tuple(request.ignoreChanges),
                    request.provider.split("::")[-2] if request.provider else "",
                    _options(request),
                )
            )
        return reply

    def ReadResource(self, request: Any) -> Any:  # noqa: N802 - Pulumi's name
        """Another stack is not declared, only read."""
        parent, inputs = request.parent.rsplit("::", 1)[-1], plain(rpc.deserialize_properties(request.properties))
        read = Declared(request.type, request.name, inputs, (), parent, False, False, options=_options(request))
        self.declared.append(read)
        return super().ReadResource(request)


def _options(request: Any) -> dict[str, Any]:
    """Everything of a registration that is neither an input nor the SDK's own."""
    found: dict[str, Any] = MessageToDict(request)
    own = {"type", "name", "object", "properties", "custom", "dependencies", "propertyDependencies", "hooks"}
    kept = {name: value for name, value in found.items() if name not in own and not SDKS_OWN.match(name)}
    return kept | {name: key_of(kept[name]) for name in ("parent", "provider") if name in kept and "::" in kept[name]}


SDKS_OWN = re.compile(r"accept|packageRef|version|additionalSecretOutputs|supports|source|stackTrace")


def key_of(urn: str) -> str:
    kind, name = urn.split("::")[-2:]
    return f"{kind.rsplit('$', 1)[-1]}::{name}"


Declare = Callable[..., dict[str, Declared]]


def run_program(stack: str, config: Mapping[str, str], cloud: Mocks | None = None) -> Program:
    """Run ``infra/__main__.py`` for a stack."""
    recorder = Recorder(cloud or Cloud())
    ROOT_RESOURCE.set(None)  # or the second program of a process has the first one's stack for a parent
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # a failed run leaves futures that nobody reads
    pulumi.runtime.set_mocks(recorder.mocks, project="spotkeeper", stack=stack, preview=False, monitor=recorder)
    pulumi.runtime.set_all_config(dict(config))
    pulumi.runtime.test(lambda: (runpy.run_path(str(ROOT / "infra" / "__main__.py")), None)[1])()
    program = Program({found.key: found for found in recorder.declared})
    program.outputs = _outputs()
    return program


def _outputs() -> dict[str, Any]:
    """What the last program exported."""
    found: dict[str, Any] = {}
    root = ROOT_RESOURCE.get()
    assert root is not None
    pulumi.runtime.test(lambda: pulumi.Output.all(**root.outputs).apply(found.update))()
    return found


def declare_local() -> Program:
    """The stack ``local``, as the one-machine cloud would get it."""
    return run_program("local", read_config(STACKS / "Pulumi.local.yaml", endpoint="http://127.0.0.1:9"))


def declare_example() -> dict[str, Declared]:
    """The example for a real project."""
    return run_program("demo", read_config(STACKS / "Pulumi.example-gcp.yaml"))


local = pytest.fixture(scope="session", name="local")(declare_local)
example = pytest.fixture(scope="session", name="example")(declare_example)


def declare_shared() -> dict[str, Declared]:
    """A stack in another project's network, whose jobs read secrets, whose ticks are rare, which adds accelerators to
    machines, and two of whose users may open shells, one of them a submitter."""
    config = read_config(STACKS / "Pulumi.example-gcp.yaml")
    changed: dict[str, Any] = {
        "network": OTHER_STACK,
        "secrets": ["wandb", "projects/acme-vault/secrets/hub", "projects/acme-vault/secrets/wandb"],
        "ssh": ["user:kim@acme.dev", "user:lee@acme.dev"],
    }
    added = {"type": "n1-standard-8", "accelerator": {"type": "nvidia-tesla-t4", "count": 2}}
    pool = {"name": "t4", "kind": "spot", "size": 2, "zones": ["us-central1-b"], "machine": added}
    changed["pools"] = [*json.loads(config["spotkeeper:pools"]), {**pool, "disk": {"size_gb": 100}}]
    rare = {"reconcile": {"tick_minutes": 60}, "limits": {"lease_minutes": 180}, "alerts": {"missed_minutes": 120}}
    for name, values in rare.items():
        changed[name] = json.loads(config.get(f"spotkeeper:{name}", "{}")) | values
    return run_program("demo", config | {f"spotkeeper:{name}": json.dumps(value) for name, value in changed.items()})


shared = pytest.fixture(scope="session", name="shared")(declare_shared)


@pytest.fixture
def custom(local: dict[str, Declared]) -> Iterator[list[Declared]]:
    yield [found for found in local.values() if ":" in found.type and not found.type.startswith("spotkeeper:")]


@pytest.fixture
def cloud() -> Iterator[google.Cloud]:
    """Stands for Google's, with the bucket of the stack ``dev``."""
    with google.serve() as found:
        found.things[f"{google.BUCKET}/stack/pools.json"] = json.dumps({"stack": "dev"})
        yield found
