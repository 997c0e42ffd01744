"""A stand-in for the `gcp` or `aws` provider plugin, stricter than the cloud on what the SDK's types can tell.

It keeps what was made in a file, writes down every change in order, refuses what no shape knows, and replaces what the
real provider would (``rules``). Four files of its folder are the test's hands: ``fail`` names a resource whose
creation fails, ``hang`` one whose creation is told of and never ends, ``gone`` one that somebody deleted behind
Pulumi's back, ``stuck`` a type of which nothing can be deleted.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from fcntl import LOCK_EX, flock
from pathlib import Path
from typing import Any

import grpc
import pulumi
from pulumi.provider.experimental import provider as p
from pulumi.provider.experimental.property_value import PropertyValue
from pulumi.provider.experimental.server import main as serve
from pulumi.runtime.proto.engine_pb2 import INFO, LogRequest
from pulumi.runtime.proto.engine_pb2_grpc import EngineStub

from spotkeeper.local.deploy import table
from spotkeeper.local.deploy.provider import GIVEN, to_plain, type_of
from tests.engine.standin import rules, shapes
from tests.infra.aws.cloud import ARNS, MORE, REGION, identity

Json = dict[str, Any]
FOLDER = "STANDIN_FOLDER"


class Memory:
    """What there is, and what was done; each call is written at once. Two providers of a stack are two processes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.shapes: Json = json.loads((folder / "shapes.json").read_text())

    def there(self) -> Json:
        path = self.folder / "cloud.json"
        return json.loads(path.read_text()) if path.exists() else {}

    @contextmanager
    def changing(self) -> Iterator[Json]:
        """What there is, for one process at a time; its changes are kept unless something is raised."""
        with (self.folder / "lock").open("w") as lock:
            flock(lock, LOCK_EX)
            things = self.there()
            yield things
            part = self.folder / "cloud.part"
            part.write_text(json.dumps(things))
            part.replace(self.folder / "cloud.json")

    def note(self, what: str, type_: str, name: str) -> None:
        with (self.folder / "log.jsonl").open("a") as log:
            log.write(json.dumps([what, type_, name]) + "\n")

    def named(self, hand: str) -> str:
        path = self.folder / hand
        return path.read_text().strip() if path.exists() else ""


class StandIn(p.Provider):
    def __init__(self, memory: Memory, engine: EngineStub) -> None:
        self._memory = memory
        self._engine = engine
        self._region = ""

    async def check_config(self, request: p.CheckRequest) -> p.CheckResponse:
        return p.CheckResponse(inputs=request.new_inputs)

    async def diff_config(self, request: p.DiffRequest) -> p.DiffResponse:
        return p.DiffResponse(changes=False)

    async def configure(self, request: p.ConfigureRequest) -> p.ConfigureResponse:
        self._region = str(to_plain(request.args).get("region", ""))
        return p.ConfigureResponse(supports_preview=True)

    async def check(self, request: p.CheckRequest) -> p.CheckResponse:
        """Files become their paths, archives hashes of what they hold."""
        type_, plain = type_of(request), to_plain(request.new_inputs)
        if type_ not in self._memory.shapes:
            raise ValueError(f"{type_}: this provider has no such resource")
        wrong = shapes.problems(self._memory.shapes[type_], plain)
        failures = [p.CheckFailure(each.partition(":")[0], each) for each in wrong]
        given = ((key, each.value) for key, each in request.new_inputs.items())
        read = {key: _read(file) for key, file in given if isinstance(file, pulumi.FileAsset | pulumi.FileArchive)}
        return p.CheckResponse(inputs={**request.new_inputs, **read}, failures=failures)

    async def diff(self, request: p.DiffRequest) -> p.DiffResponse:
        new, state = to_plain(request.new_inputs), to_plain(request.old_state)
        given = set(filter(None, str(state.get(GIVEN, "")).split(",")))
        old = {key: state[key] for key in given if key in state}
        known = {key for key in request.new_inputs if key in new} | given
        if self._place(type_of(request), new, state):  # AWS's: what was computed is as good as what is given
            old["region"], new["region"] = state["region"], self._place(type_of(request), new, state)
        changed = sorted(key for key in known - {rules.BY_CONTENT} if old.get(key) != new.get(key))
        replaced = rules.replaces(type_of(request), old, new, changed)
        return p.DiffResponse(
            changes=bool(changed),
            diffs=changed,
            replaces=replaced,
            delete_before_replace=bool(replaced) and rules.delete_first(new, changed),
        )

    async def create(self, request: p.CreateRequest) -> p.CreateResponse:
        if request.preview:
            return p.CreateResponse(resource_id="", properties=request.properties)
        type_, inputs = type_of(request), to_plain(request.properties)
        self._memory.note("begin", type_, request.name)
        if request.name == self._memory.named("fail"):
            raise RuntimeError(f"{request.name}: 503 the cloud cannot do it now")
        if request.name == self._memory.named("hang"):
            self._engine.Log(LogRequest(severity=INFO, urn=request.urn, message=f"{request.name}: 102 at it"))
            await asyncio.Event().wait()
        placed = self._place(type_, inputs, {})
        id_, outputs = computed(type_, request.name, inputs, placed)
        wanted = {**inputs, "region": placed} if placed else inputs
        state = {**inputs, **outputs, GIVEN: ",".join(sorted(inputs))}
        with self._memory.changing() as things:
            taken = [each for each in things.values() if each["type"] == type_ and _same_name(each["state"], wanted)]
            if taken and "Member" not in type_:
                raise RuntimeError(f"{type_} {request.name}: 409 already exists")
            things[_key(request, id_, state)] = {"type": type_, "name": request.name, "state": state}
        self._memory.note("create", type_, request.name)
        return p.CreateResponse(resource_id=id_, properties=_wired(request.properties, state))

    async def read(self, request: p.ReadRequest) -> p.ReadResponse:
        """As it stands in the cloud. What somebody deleted is gone."""
        found = self._memory.there().get(_key(request, request.resource_id, to_plain(request.properties)))
        if found is None or request.name == self._memory.named("gone"):
            return p.ReadResponse(resource_id="")
        return p.ReadResponse(request.resource_id, _wired(request.properties, found["state"]), request.inputs)

    async def update(self, request: p.UpdateRequest) -> p.UpdateResponse:
        if request.preview:
            return p.UpdateResponse(properties=request.news)
        type_, inputs = type_of(request), to_plain(request.news)
        old = to_plain(request.olds)
        _, outputs = computed(type_, request.name, inputs, self._place(type_, inputs, old))
        state = {**inputs, **outputs, GIVEN: ",".join(sorted(inputs))}
        with self._memory.changing() as things:
            things[_key(request, request.resource_id, old)]["state"] = state
        self._memory.note("update", type_, request.name)
        return p.UpdateResponse(properties=_wired(request.news, state))

    async def delete(self, request: p.DeleteRequest) -> None:
        if type_of(request) == self._memory.named("stuck"):
            raise RuntimeError(f"{request.name}: 503 the cloud cannot do it now")
        with self._memory.changing() as things:
            things.pop(_key(request, request.resource_id, to_plain(request.properties)), None)
        self._memory.note("delete", type_of(request), request.name)

    def _place(self, type_: str, inputs: Json, state: Json) -> str:
        """The region of a resource on AWS, "" if it has none. Optional and computed: what is no longer given stays."""
        if type_.startswith("gcp:") or "region" not in self._memory.shapes[type_]["fields"]:
            return ""
        return str(inputs.get("region") or state.get("region") or self._region)


def computed(type_: str, name: str, inputs: Json, region: str) -> tuple[str, Json]:
    """Id and outputs, as each cloud would give them. ``region``: on AWS, where it is."""
    if type_.startswith("gcp:"):
        return table.computed(type_, name, inputs, table.ProviderDefaults("spotkeeper-test", "us-central1"))
    called = str(inputs.get("name") or inputs.get("bucket") or inputs.get("key") or name)
    outputs: Json = {"name": called, **MORE.get(type_, {})}
    if type_ in ARNS:
        outputs["arn"] = ARNS[type_].format(called)
    if region:
        there = {key: value.replace(REGION, region) for key, value in outputs.items() if isinstance(value, str)}
        outputs |= {**there, "region": region}
    return identity(type_, name), {key: value for key, value in outputs.items() if key not in inputs}


def _key(request: Any, id_: str, state: Json) -> str:
    """The same name in two places is two things."""
    return "|".join([request.urn, id_, *(str(state[key]) for key in ("region", "location") if key in state)])


def _read(file: pulumi.FileAsset | pulumi.FileArchive) -> PropertyValue:
    if isinstance(file, pulumi.FileAsset):
        return PropertyValue(str(file.path))
    return PropertyValue(hashlib.sha256(Path(file.path).read_bytes()).hexdigest())


def _same_name(state: Json, inputs: Json) -> bool:
    """Whether a name that the program chose is taken: in the same place, of the same role."""
    names = [key for key in ("name", "bucket", "key", "repositoryId", "accountId", "roleId") if key in inputs]
    same = all(state.get(key) == inputs[key] for key in [*names, "zone", "location", "role"] if key in inputs)
    return bool(names) and same and state.get("region") == inputs.get("region")


def _value(value: Any) -> PropertyValue:
    if isinstance(value, dict):
        return PropertyValue({key: _value(inner) for key, inner in value.items()})
    if isinstance(value, list):
        return PropertyValue([_value(inner) for inner in value])
    return PropertyValue(float(value) if isinstance(value, int) and not isinstance(value, bool) else value)


def _wired(properties: dict[str, PropertyValue], state: Json) -> dict[str, PropertyValue]:
    """Declared values as they came (secrets stay secrets); the rest, and what has changed since, from the cloud."""
    now = to_plain(properties)
    kept = {key: value for key, value in properties.items() if key in state and now.get(key) == state[key]}
    return {**{key: _value(value) for key, value in state.items()}, **kept}


def main() -> None:
    engine = EngineStub(grpc.insecure_channel(sys.argv[1]))
    serve(sys.argv[1:], "99.0.0", StandIn(Memory(Path(os.environ[FOLDER])), engine))


if __name__ == "__main__":
    main()
