"""Receives the Pulumi program's registrations through Pulumi's monitor interface, and passes them to the runner."""

from __future__ import annotations

import threading
from typing import Any, Protocol

import pulumi
from pulumi.output import Unknown
from pulumi.runtime import rpc
from pulumi.runtime.mocks import MockCallArgs, MockMonitor, MockResourceArgs, Mocks

from spotkeeper.local.deploy.result import DeployError
from spotkeeper.local.deploy.state import StateEntry

SECRET = "4dabf18193072939515e22adb298388d"  # noqa: S105 - the key by which Pulumi marks wrapped values
STACK_REFERENCE = "pulumi:pulumi:StackReference"


class Registrar(Protocol):
    """The part of the runner that the monitor uses.

    ``shown``: the resources declared so far, in a run that only lists them; None in a deployment or its preview.
    """

    @property
    def shown(self) -> list[StateEntry] | None: ...

    def declare(self, entry: StateEntry) -> tuple[str, dict[str, Any]]: ...


class Monitor(MockMonitor):
    """Receives registrations of resources from several threads, each as soon as its inputs are known."""

    def __init__(self, run: Registrar) -> None:
        super().__init__(_Cloud(self))
        self._run = run
        self._request = threading.local()

    def RegisterResource(self, request: Any) -> Any:  # noqa: N802 - Pulumi's name
        self._request.now = request
        return super().RegisterResource(request)  # type: ignore[no-untyped-call]

    def read(self, stack: str) -> tuple[str | None, dict[str, Any]]:
        """Return a reference to another stack, without its outputs, which only Pulumi's engine can read.

        Raises:
            DeployError: this is not a run that only lists resources.
        """
        if self._run.shown is None:
            raise DeployError(f"{stack}: only Pulumi's own engine can read the outputs of another stack")
        return stack, {"name": stack}

    def make(self) -> tuple[str | None, dict[str, Any]]:
        """Make the resource that this thread is registering; return its id (None: it has none) and outputs."""
        request = self._request.now
        inputs = plain(rpc.deserialize_properties(request.object), masked=self._run.shown is not None)
        inputs.pop("__provider", None)
        entry = StateEntry(
            urn=self.make_urn(request.parent, request.type, request.name),
            type=request.type,
            name=request.name,
            inputs=inputs,
            parent=request.parent.rsplit("::", 1)[-1],
            protect=bool(request.protect),
            retain=bool(request.retainOnDelete),
            ignore=tuple(request.ignoreChanges),
            custom=bool(request.custom),
        )
        id_, outputs = self._run.declare(entry)
        return id_ or None, outputs


class _Cloud(Mocks):
    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor

    def call(self, args: MockCallArgs) -> tuple[dict[str, Any], None]:
        raise DeployError(f"the program calls {args.token}, but the in-process runner supports no provider functions")

    def new_resource(self, args: MockResourceArgs) -> tuple[str | None, dict[str, Any]]:
        if args.typ == STACK_REFERENCE:
            return self._monitor.read(str(args.inputs["name"]))
        return self._monitor.make()


def plain(value: Any, masked: bool = False) -> Any:  # noqa: PLR0911 - one per kind
    """Convert a value from Pulumi's wire format to plain JSON: a whole float to an integer, a file to its path.

    Secrets are returned in clear. ``masked``: replace secrets and unknown values by placeholders, for output.
    """
    match value:
        case {"value": inner} if SECRET in value:
            return "[secret]" if masked else plain(inner)
        case dict():
            return {key: plain(item, masked) for key, item in value.items() if item is not None}
        case list():
            return [plain(item, masked) for item in value]
        case float() if value.is_integer():
            return int(value)
        case pulumi.FileAsset():
            return str(value.path)
        case Unknown() if masked:
            return "(known after up)"
    return value
