"""The in-process driver: runs the project's own Pulumi program and makes what it declares.

It stands where Pulumi's engine stands: the unmodified program registers its resources
with a monitor, which makes them at once, in the order in which their inputs become known.
What it knows of resources is ``table.py``; what it has made is ``state.py``. It never asks
a question, and never touches a real cloud.
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
from typing import Any, Protocol

from msgspec.structs import replace

from spotkeeper.local.deploy import table
from spotkeeper.local.deploy.api import Api
from spotkeeper.local.deploy.config import ROOT, addresses, read_config
from spotkeeper.local.deploy.result import DeployError, DeployResult, Event, Op, Resource
from spotkeeper.local.deploy.state import Entry, State
from spotkeeper.local.deploy.table import Json, Place

PROGRAM = ROOT / "infra" / "__main__.py"
_STATE = "in-process.json"
OnEvent = Callable[[Event], None]


def up(stack: str, config_file: Path, endpoint: str, folder: Path, on_event: OnEvent) -> DeployResult:
    """See :func:`spotkeeper.local.deploy.up`."""
    config = read_config(config_file, endpoint)
    place = Place(config.get("gcp:project", ""), config.get("spotkeeper:region", ""))
    path = folder / _STATE
    state = State.load(path) or State(path, stack, place.project, place.region)
    run = Run(state, Api(endpoint.rstrip("/")), place, on_event, dry=False)
    run.forget_unfinished()
    try:
        outputs = run.program(stack, config)
    finally:
        run.put_in_order()
    run.remove_undeclared()
    state.export(outputs)
    return run.result(outputs)


def preview(stack: str, config_file: Path, endpoint: str, folder: Path, on_event: OnEvent) -> DeployResult:
    """See :func:`spotkeeper.local.deploy.preview`."""
    config = read_config(config_file, endpoint)
    place = Place(config.get("gcp:project", ""), config.get("spotkeeper:region", ""))
    state = State.load(folder / _STATE) or State(folder / _STATE, stack, place.project, place.region)
    run = Run(state, Api(endpoint.rstrip("/")), place, on_event, dry=True)
    run.program(stack, config)
    run.remove_undeclared()
    return run.result({})


def declared(stack: str, config: dict[str, str]) -> tuple[Entry, ...]:
    """What the program declares for a stack of a real cloud too, in its order: no cloud is asked, nothing is noted.

    Inputs as ``pulumi preview`` would show them: secrets masked, what only a cloud can tell left open (``monitor``).

    Raises:
        DeployError: the program failed.
    """
    place = Place(config.get("gcp:project", ""), config.get("spotkeeper:region", ""))
    state = State(Path(os.devnull), stack, place.project, place.region)
    run = Run(state, Api(""), place, lambda _: None, dry=True, shown=[])
    run.program(stack, config)
    return tuple(run.shown or ())


def destroy(stack: str, endpoint: str, folder: Path, on_event: OnEvent) -> DeployResult:
    """See :func:`spotkeeper.local.deploy.destroy`."""
    state = State.load(folder / _STATE)
    if state is None:
        return DeployResult("in-process", {}, (), {})
    if state.stack != stack:
        raise DeployError(f"{folder / _STATE} is of the stack {state.stack!r}, not of {stack!r}")
    if guarded := [entry.name for entry in state.entries() if entry.protect]:
        raise DeployError(f"protected: {', '.join(guarded)}. Set on_destroy and run up before this")
    place = Place(state.project, state.region)
    run = Run(state, Api(endpoint.rstrip("/")), place, on_event, dry=False)
    run.forget_unfinished()
    with _environment(endpoint):
        for entry in reversed(state.entries()):
            run.remove(entry)
    state.remove()
    return run.result({})


@dataclass
class Run:
    """One pass over the program, or over the state."""

    state: State
    api: Api
    place: Place
    on_event: OnEvent
    dry: bool
    shown: list[Entry] | None = None  # where only what is declared counts: here, for people
    declared: dict[str, str] = field(default_factory=dict)  # URN -> type, each after what it depends on
    replaced: list[Entry] = field(default_factory=list)  # old halves, deleted once nothing refers to them
    changes: Counter[Op] = field(default_factory=Counter)
    _told: threading.Lock = field(default_factory=threading.Lock)

    def program(self, stack: str, config: dict[str, str]) -> dict[str, Any]:
        """Run it to its end; its exports.

        Raises:
            DeployError: the stack file is wrong, or a resource could not be made.
        """
        # A thread of its own: Pulumi keeps its world in the thread's context and event loop.
        with _environment(self.api.endpoint), ThreadPoolExecutor(1) as thread:
            return thread.submit(_execute, self, stack, config).result()

    def declare(self, entry: Entry) -> tuple[str, Json]:
        """Make, change or leave alone one resource; its id and all its outputs."""
        self.declared[entry.urn] = entry.type
        if self.shown is not None:
            self.shown.append(entry)
        if not entry.custom:
            old = self.state.get(entry.urn)
            self._step(Op.SAME if old else Op.CREATE, entry, lambda: None)
            self._keep(entry)
            return "", entry.inputs
        old = self.state.get(entry.urn)
        if old is None:
            return self._create(Op.CREATE, entry)
        kept = {key: old.inputs[key] for key in entry.ignore if key in old.inputs}
        entry = replace(entry, inputs={**entry.inputs, **kept})
        change = compare(entry, old)
        if not change:
            self._step(Op.SAME, entry, lambda: None)
            self._keep(replace(entry, id=old.id, outputs=old.outputs))
            return old.id, {**entry.inputs, **old.outputs}
        if not change.replaces:
            return self._update(entry, old, change.keys)
        if change.delete_first:
            self._step(Op.DELETE, old, lambda: self._drop(old))
        else:
            self.replaced.append(old)
        return self._create(Op.REPLACE, entry)

    def put_in_order(self) -> None:
        """Each after what it depends on, so that a destroy, which goes backwards, meets the drain first: what an
        earlier program left, or this one added, is removed when no machine can use it any more."""
        urns = list(self.declared)
        drain = next((at for at, type_ in enumerate(self.declared.values()) if type_ == table.DRAIN), len(urns))
        self.state.arrange(urns[:drain], urns[drain:])

    def remove_undeclared(self) -> None:
        """What the program no longer says goes, last made first; then the old halves of replacements."""
        gone = [entry for entry in self.state.entries() if entry.urn not in self.declared]
        for entry in reversed(gone):
            self.remove(entry)
        for old in reversed(self.replaced):
            self._step(Op.DELETE, old, lambda old=old: self._drop(old))  # type: ignore[misc]

    def remove(self, entry: Entry) -> None:
        if not entry.retain:
            self._step(Op.DELETE, entry, lambda: self._drop(entry))
        if not self.dry:
            self.state.drop(entry.urn)

    def forget_unfinished(self) -> None:
        """Remove what a killed run may have made without having noted it."""
        for entry in self.state.entries():
            if entry.pending:
                self._drop(entry)
                self.state.drop(entry.urn)

    def result(self, outputs: dict[str, Any]) -> DeployResult:
        resources = tuple(Resource(entry.type, entry.name, entry.id) for entry in self.state.entries())
        return DeployResult("in-process", outputs, resources, dict(self.changes))

    # --- steps ---------------------------------------------------------------------------

    def _create(self, op: Op, entry: Entry) -> tuple[str, Json]:
        if self.shown is not None:  # of any cloud, this one's table or not
            return "", entry.inputs
        id_, outputs = table.computed(entry.type, entry.name, entry.inputs, self.place)
        if self.dry:
            self._step(op, entry, lambda: self._provided(entry, None) if table.dynamic(entry.type) else None)
            return "", entry.inputs
        if op is Op.CREATE:
            self.state.put(replace(entry, pending=True))
        learned: Json = {}
        self._step(op, entry, lambda: learned.update(self._make(entry)))
        outputs |= learned
        self.state.move_last(replace(entry, id=id_, outputs=outputs))
        return id_, {**entry.inputs, **outputs}

    def _update(self, entry: Entry, old: Entry, keys: tuple[str, ...]) -> tuple[str, Json]:
        learned: Json = {}
        if table.dynamic(entry.type):
            self._step(Op.UPDATE, entry, lambda: learned.update(self._provided(entry, old)))
        elif not self.dry:
            it = table.target(entry.type, entry.name, entry.inputs, self.place)
            self._step(Op.UPDATE, entry, lambda: learned.update(self.api.update(it, keys)))
        else:
            self._step(Op.UPDATE, entry, lambda: None)
        outputs = {**old.outputs, **learned}
        self._keep(replace(entry, id=old.id, outputs=outputs))
        return old.id, {**entry.inputs, **outputs}

    def _make(self, entry: Entry) -> Json:
        if table.dynamic(entry.type):
            return self._provided(entry, None)
        return self.api.create(table.target(entry.type, entry.name, entry.inputs, self.place))

    def _provided(self, entry: Entry, old: Entry | None) -> Json:
        """Made or changed by the program's own provider; what it computes. A dry run checks only.

        Raises:
            DeployError: the provider finds something wrong, before anything is changed.
        """
        own = provider(entry.type)
        before = {**old.inputs, **old.outputs} if old else {}
        if failures := own.check(before, dict(entry.inputs)).failures:
            raise DeployError("; ".join(str(failure.reason) for failure in failures))
        if self.dry:
            return {}
        made = own.update(old.id, before, dict(entry.inputs)) if old else own.create(dict(entry.inputs))
        return {key: value for key, value in (made.outs or {}).items() if key not in entry.inputs}

    def _drop(self, entry: Entry) -> None:
        if not entry.custom or self.dry:
            return
        if table.dynamic(entry.type):
            provider(entry.type).delete(entry.id, {**entry.inputs, **entry.outputs})
            return
        self.api.delete(table.target(entry.type, entry.name, entry.inputs, self.place))

    def _keep(self, entry: Entry) -> None:
        if not self.dry:
            self.state.put(entry)

    def _step(self, op: Op, entry: Entry, act: Callable[[], object]) -> None:
        """Do it and tell of it; only what takes time is told twice."""
        began = time.monotonic()
        if op is not Op.SAME:
            self._tell(Event(op, entry.type, entry.name, entry.parent, done=False))
        try:
            act()
        except Exception as error:
            self._tell(Event(op, entry.type, entry.name, entry.parent, True, time.monotonic() - began, str(error)))
            raise DeployError(f"{entry.type} {entry.name}: {error}") from error
        self.changes[op] += 1
        self._tell(Event(op, entry.type, entry.name, entry.parent, True, time.monotonic() - began))

    def _tell(self, event: Event) -> None:
        with self._told:
            self.on_event(event)


def compare(entry: Entry, old: Entry) -> table.Change:
    if table.dynamic(entry.type):
        keys = tuple(key for key in entry.inputs if entry.inputs[key] != old.inputs.get(key))
        return table.Change(keys, (), delete_first=False)
    return table.compare(entry.type, old.inputs, entry.inputs)


class _Outputs(Protocol):
    outs: Json | None


class _Checked(Protocol):
    failures: list[Any]


class _Provider(Protocol):
    def check(self, _olds: Json, news: Json) -> _Checked: ...
    def create(self, props: Json) -> _Outputs: ...
    def update(self, _id: str, _olds: Json, _news: Json) -> _Outputs: ...
    def delete(self, _id: str, _props: Json) -> None: ...


def provider(type_: str) -> _Provider:
    """The program's own provider of a dynamic type."""
    made: _Provider
    if type_ == table.DRAIN:
        from infra.drain import DrainProvider

        made = DrainProvider()
    elif type_ == table.PLACES:
        from infra.places import PlacesProvider

        made = PlacesProvider()
    else:
        from infra.jobs import JobProvider

        made = JobProvider()
    return made


@contextmanager
def _environment(endpoint: str) -> Iterator[None]:
    """The drain reads where Compute answers from the environment: it may have moved since ``up``."""
    name = "SPOTKEEPER_COMPUTE_ENDPOINT"
    before = os.environ.get(name)
    os.environ[name] = addresses(endpoint)["compute"]
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _end(loop: asyncio.AbstractEventLoop) -> None:
    """After a failure other registrations are still under way: let them end, so that the state knows of them."""
    pending = asyncio.all_tasks(loop)
    for task in pending:
        task.cancel()
    loop.run_until_complete(asyncio.gather(*pending, return_exceptions=True))
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()
    asyncio.set_event_loop(None)


class _Workers(ThreadPoolExecutor):
    """Threads for registrations. Pulumi wants an event loop in each and closes none of them."""

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


def _execute(run: Run, stack: str, config: dict[str, str]) -> dict[str, Any]:
    """In a fresh thread: the program against our monitor."""
    import pulumi
    from pulumi.runtime.settings import SETTINGS, get_root_resource
    from pulumi.runtime.stack import run_pulumi_func

    from spotkeeper.local.deploy.monitor import Monitor

    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    loop.set_default_executor(_Workers())
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # after a failure, futures that nobody reads
    monitor = Monitor(run)
    try:
        pulumi.runtime.set_mocks(monitor.mocks, project="spotkeeper", stack=stack, preview=run.dry, monitor=monitor)
        pulumi.runtime.set_all_config(dict(config))
        SETTINGS.rpc_manager.clear()  # what a failed run of this process left behind
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
