"""The in-process driver: runs the project's own Pulumi program and makes the resources that it declares.

It replaces Pulumi's engine: the unmodified program registers its resources with a monitor, which makes each as soon as
its inputs are known. ``table.py`` describes resource types, ``state.py`` records resources. It never changes a real
cloud.
"""

from __future__ import annotations

import asyncio
import logging
import os
import runpy
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from spotkeeper.local.deploy import table
from spotkeeper.local.deploy.api import ResourceClient
from spotkeeper.local.deploy.config import ROOT, TOKEN, addresses, read_config
from spotkeeper.local.deploy.result import (
    DeployedResource,
    DeployError,
    DeployEvent,
    DeployOp,
    DeployResult,
    Endpoint,
    OnEvent,
)
from spotkeeper.local.deploy.state import DeployState, StateEntry
from spotkeeper.local.deploy.table import Json, ProviderDefaults

if TYPE_CHECKING:
    from pulumi.dynamic import ResourceProvider

PROGRAM = ROOT / "infra" / "__main__.py"
_STATE = "in-process.json"


def up(stack: str, config_file: Path, cloud: Endpoint, folder: Path, on_event: OnEvent) -> DeployResult:
    """See :func:`spotkeeper.local.deploy.up`."""
    config = read_config(config_file, cloud.endpoint)
    folder.mkdir(parents=True, exist_ok=True)  # nothing else creates the folder: a thread that outlives Ctrl-C must not
    run = _run(stack, config, cloud, folder, on_event, dry=False)
    run.forget_unfinished()
    try:
        outputs = run.program(stack, config)
    finally:
        run.put_in_order()
    run.remove_undeclared()
    run.state.export(outputs)
    return run.result(outputs)


def preview(stack: str, config_file: Path, cloud: Endpoint, folder: Path, on_event: OnEvent) -> DeployResult:
    """See :func:`spotkeeper.local.deploy.preview`."""
    config = read_config(config_file, cloud.endpoint)
    run = _run(stack, config, cloud, folder, on_event, dry=True)
    run.program(stack, config)
    run.remove_undeclared()
    return run.result({})


def _run(stack: str, config: dict[str, str], cloud: Endpoint, folder: Path, on_event: OnEvent, dry: bool) -> DeployRun:
    path, defaults = folder / _STATE, _defaults(config)
    state = DeployState.load(path) or DeployState(path, stack, defaults.project, defaults.region)
    return DeployRun(state, ResourceClient(cloud.endpoint.rstrip("/"), cloud.token), defaults, on_event, dry)


def _defaults(config: dict[str, str]) -> ProviderDefaults:
    from infra.settings.read import home_region

    return ProviderDefaults(config.get("gcp:project", ""), home_region(config))


def declared(stack: str, config: dict[str, str]) -> tuple[StateEntry, ...]:
    """Return the resources that the program declares, in order, also for a stack of a real cloud.

    It calls no cloud and records nothing. Inputs are as ``pulumi preview`` shows them: secrets are masked, and values
    that only a cloud knows have a placeholder.

    Raises:
        DeployError: the program failed.
    """
    defaults = _defaults(config)
    state = DeployState(Path(os.devnull), stack, defaults.project, defaults.region)
    run = DeployRun(state, ResourceClient(""), defaults, lambda _: None, dry=True, shown=[])
    run.program(stack, config)
    return tuple(run.shown or ())


def destroy(stack: str, config_file: Path, cloud: Endpoint, folder: Path, on_event: OnEvent) -> DeployResult:
    """See :func:`spotkeeper.local.deploy.destroy`. The state contains all settings, so ``config_file`` is not read."""
    state = DeployState.load(folder / _STATE)
    if state is None:
        return DeployResult("in-process", {}, (), {})
    if state.stack != stack:
        raise DeployError(f"{folder / _STATE} belongs to the stack {state.stack!r}, not to {stack!r}")
    if guarded := [entry.name for entry in state.entries() if entry.protect]:
        remedy = "Set their `on_destroy: delete` in the stack file and deploy it before the destroy"
        raise DeployError(f"these resources are protected: {', '.join(guarded)}. {remedy}")
    defaults = ProviderDefaults(state.project, state.region)
    run = DeployRun(state, ResourceClient(cloud.endpoint.rstrip("/"), cloud.token), defaults, on_event, dry=False)
    run.forget_unfinished()
    with _environment(run.api):
        for entry in reversed(state.entries()):
            run.remove(entry)
    state.remove()
    return run.result({})


@dataclass
class DeployRun:
    """One run of the program, or one deletion of all recorded resources."""

    state: DeployState
    api: ResourceClient
    defaults: ProviderDefaults
    on_event: OnEvent
    dry: bool
    shown: list[StateEntry] | None = None  # not None: the run collects resources and makes none
    declared: dict[str, str] = field(default_factory=dict)  # URN -> type; a resource comes after its dependencies
    replaced: list[StateEntry] = field(default_factory=list)  # old resources, deleted after their replacements
    changes: Counter[DeployOp] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def program(self, stack: str, config: dict[str, str]) -> dict[str, Any]:
        """Run the program to its end, and return its exports; DeployError if a resource could not be made."""
        # It runs in a thread of its own, because Pulumi keeps its state in the thread's context and event loop.
        with _environment(self.api), ThreadPoolExecutor(1) as thread:
            return thread.submit(_execute, self, stack, config).result()

    def declare(self, entry: StateEntry) -> tuple[str, Json]:
        """Create, update or keep one resource, and return its id and all its outputs."""
        self.declared[entry.urn] = entry.type
        if self.shown is not None:
            self.shown.append(entry)
        if not entry.custom:
            old = self.state.get(entry.urn)
            self._step(DeployOp.SAME if old else DeployOp.CREATE, entry, lambda: None)
            self._keep(entry)
            return "", entry.inputs
        old = self.state.get(entry.urn)
        if old is None:
            return self._create(DeployOp.CREATE, entry)
        kept = {key: old.inputs[key] for key in entry.ignore if key in old.inputs}
        entry = replace(entry, inputs={**entry.inputs, **kept})
        change = compare(entry, old)
        if not change:
            self._step(DeployOp.SAME, entry, lambda: None)
            self._keep(replace(entry, id=old.id, outputs=old.outputs))
            return old.id, {**entry.inputs, **old.outputs}
        if not change.replaces:
            return self._update(entry, old, change.keys)
        if change.delete_first:
            self._step(DeployOp.DELETE, old, lambda: self._drop(old))
        else:
            self.replaced.append(old)
        return self._create(DeployOp.REPLACE, entry)

    def put_in_order(self) -> None:
        """Sort the state by dependency, with the drain last.

        A destroy goes backwards, so it begins with the drain; after the drain no machine uses the other resources.
        """
        urns = list(self.declared)
        drain = next((at for at, type_ in enumerate(self.declared.values()) if type_ == table.DRAIN), len(urns))
        self.state.arrange(urns[:drain], urns[drain:])

    def remove_undeclared(self) -> None:
        """Delete resources that the program no longer declares, then old versions of replaced ones; newest first."""
        gone = [entry for entry in self.state.entries() if entry.urn not in self.declared]
        for entry in reversed(gone):
            self.remove(entry)
        for old in reversed(self.replaced):
            self._step(DeployOp.DELETE, old, lambda old=old: self._drop(old))  # type: ignore[misc]

    def remove(self, entry: StateEntry) -> None:
        if not entry.retain:
            self._step(DeployOp.DELETE, entry, lambda: self._drop(entry))
        if not self.dry:
            self.state.drop(entry.urn)

    def forget_unfinished(self) -> None:
        """Delete each resource whose creation a killed run recorded as begun but not as done, since it may exist."""
        for entry in self.state.entries():
            if entry.pending:
                self._drop(entry)
                self.state.drop(entry.urn)

    def result(self, outputs: dict[str, Any]) -> DeployResult:
        resources = tuple(DeployedResource(entry.type, entry.name, entry.id) for entry in self.state.entries())
        return DeployResult("in-process", outputs, resources, dict(self.changes))

    # Steps

    def _create(self, op: DeployOp, entry: StateEntry) -> tuple[str, Json]:
        if self.shown is not None:  # a plan has types of any cloud, even without an entry in the table
            return "", entry.inputs
        id_, outputs = table.computed(entry.type, entry.name, entry.inputs, self.defaults)
        if self.dry:
            self._step(op, entry, lambda: self._provided(entry, None) if table.dynamic(entry.type) else None)
            return "", entry.inputs
        if op is DeployOp.CREATE:
            self.state.put(replace(entry, pending=True))
        learned: Json = {}
        self._step(op, entry, lambda: learned.update(self._make(entry)))
        outputs |= learned
        self.state.move_last(replace(entry, id=id_, outputs=outputs))
        return id_, {**entry.inputs, **outputs}

    def _update(self, entry: StateEntry, old: StateEntry, keys: tuple[str, ...]) -> tuple[str, Json]:
        learned: Json = {}
        if table.dynamic(entry.type):
            self._step(DeployOp.UPDATE, entry, lambda: learned.update(self._provided(entry, old)))
        elif not self.dry:
            it = table.target(entry.type, entry.name, entry.inputs, self.defaults)
            self._step(DeployOp.UPDATE, entry, lambda: learned.update(self.api.update(it, keys)))
        else:
            self._step(DeployOp.UPDATE, entry, lambda: None)
        outputs = {**old.outputs, **learned}
        self._keep(replace(entry, id=old.id, outputs=outputs))
        return old.id, {**entry.inputs, **outputs}

    def _make(self, entry: StateEntry) -> Json:
        if table.dynamic(entry.type):
            return self._provided(entry, None)
        return self.api.create(table.target(entry.type, entry.name, entry.inputs, self.defaults))

    def _provided(self, entry: StateEntry, old: StateEntry | None) -> Json:
        """Create or update by the program's dynamic provider; return computed outputs. A dry run only checks inputs."""
        own = provider(entry.type)
        before = {**old.inputs, **old.outputs} if old else {}
        if failures := own.check(before, dict(entry.inputs)).failures:
            raise DeployError("; ".join(str(failure.reason) for failure in failures))
        if self.dry:
            return {}
        made = own.update(old.id, before, dict(entry.inputs)) if old else own.create(dict(entry.inputs))
        return {key: value for key, value in (made.outs or {}).items() if key not in entry.inputs}

    def _drop(self, entry: StateEntry) -> None:
        if not entry.custom or self.dry:
            return
        if table.dynamic(entry.type):
            provider(entry.type).delete(entry.id, {**entry.inputs, **entry.outputs})
            return
        self.api.delete(table.target(entry.type, entry.name, entry.inputs, self.defaults))

    def _keep(self, entry: StateEntry) -> None:
        if not self.dry:
            self.state.put(entry)

    def _step(self, op: DeployOp, entry: StateEntry, act: Callable[[], object]) -> None:
        """Do one step and report its start and end; for an unchanged resource, only the end."""
        began = time.monotonic()
        if op is not DeployOp.SAME:
            self._report(DeployEvent(op, entry.type, entry.name, entry.parent, done=False))
        try:
            act()
        except Exception as error:
            self._report(
                DeployEvent(op, entry.type, entry.name, entry.parent, True, time.monotonic() - began, str(error))
            )
            raise DeployError(f"{entry.type} {entry.name}: {error}") from error
        self.changes[op] += 1
        self._report(DeployEvent(op, entry.type, entry.name, entry.parent, True, time.monotonic() - began))

    def _report(self, event: DeployEvent) -> None:
        with self._lock:
            self.on_event(event)


def compare(entry: StateEntry, old: StateEntry) -> table.InputChange:
    if table.dynamic(entry.type):
        keys = tuple(key for key in entry.inputs if entry.inputs[key] != old.inputs.get(key))
        return table.InputChange(keys, (), delete_first=False)
    return table.compare(entry.type, old.inputs, entry.inputs)


def provider(type_: str) -> ResourceProvider:
    """Return the program's own provider of a dynamic type."""
    if type_ == table.DRAIN:
        from infra.drain import DrainProvider

        return DrainProvider()
    if type_ == table.REGIONS:
        from infra.drain import RegionsProvider

        return RegionsProvider()
    if type_ == table.PLACES:
        from infra.shared import DiskGuardProvider

        return DiskGuardProvider()
    if type_ == table.SETTLED:
        from infra.shared import SettledProvider

        return SettledProvider()
    from infra.jobs import JobProvider

    return JobProvider()


@contextmanager
def _environment(api: ResourceClient) -> Iterator[None]:
    """Set the variables from which the drain reads the token and Compute's URL, for the ``with`` block only."""
    given = {"SPOTKEEPER_COMPUTE_ENDPOINT": addresses(api.endpoint)["compute"], TOKEN: api.token}
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _end(loop: asyncio.AbstractEventLoop) -> None:
    """Close the event loop. After a failure, first wait for running registrations, so that the state records them."""
    pending = asyncio.all_tasks(loop)
    for task in pending:
        task.cancel()
    loop.run_until_complete(asyncio.gather(*pending, return_exceptions=True))
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()
    asyncio.set_event_loop(None)


class _Workers(ThreadPoolExecutor):
    """Threads for registrations. Pulumi needs an event loop in each; ``shutdown`` closes the loops."""

    def __init__(self) -> None:
        self._loops: list[asyncio.AbstractEventLoop] = []
        super().__init__(max_workers=16, initializer=self._begin)

    def _begin(self) -> None:
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        self._loops.append(loop)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        super().shutdown(wait, cancel_futures=cancel_futures)
        for loop in self._loops:
            loop.close()


def _execute(run: DeployRun, stack: str, config: dict[str, str]) -> dict[str, Any]:
    """Run the program in a new thread, with the runner's monitor instead of Pulumi's."""
    import pulumi
    from pulumi.runtime.settings import SETTINGS, get_root_resource
    from pulumi.runtime.stack import run_pulumi_func

    from spotkeeper.local.deploy.monitor import Monitor

    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    loop.set_default_executor(_Workers())
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # unread futures after a failure
    monitor = Monitor(run)
    try:
        pulumi.runtime.set_mocks(monitor.mocks, project="spotkeeper", stack=stack, preview=run.dry, monitor=monitor)
        pulumi.runtime.set_all_config(dict(config))
        SETTINGS.rpc_manager.clear()  # pending calls that a failed run of this process left
        SETTINGS.outputs.clear()
        loop.run_until_complete(run_pulumi_func(lambda: (runpy.run_path(str(PROGRAM)), None)[1]))
        root = get_root_resource()
        exports = dict(getattr(root, "outputs", {}))
        return {
            name: loop.run_until_complete(pulumi.Output.from_input(value).future()) for name, value in exports.items()
        }
    except pulumi.RunError as error:
        raise DeployError(str(error)) from None
    finally:
        _end(loop)
