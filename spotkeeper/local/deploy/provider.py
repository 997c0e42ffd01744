"""A replacement for the `gcp` provider plugin, with which Pulumi's real engine deploys to a one-machine cloud.

The engine starts it as ``pulumi-resource-gcp``, a two-line script that ``engine.py`` writes and puts on PATH. It makes
the same calls to the cloud as the in-process runner, by ``table.py`` and ``api.py``.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping
from importlib import metadata
from typing import Any

import pulumi
from pulumi.provider.experimental import provider as p
from pulumi.provider.experimental.property_value import Computed, PropertyValue
from pulumi.provider.experimental.server import main as serve

from spotkeeper.local.deploy import table
from spotkeeper.local.deploy.api import ResourceClient
from spotkeeper.local.deploy.config import ENDPOINT, TOKEN
from spotkeeper.local.deploy.monitor import plain
from spotkeeper.local.deploy.table import Json, ProviderDefaults

GIVEN = "__given"  # state key: names of the declared inputs, because the engine does not pass old inputs to `diff`


class StandIn(p.Provider):
    """Answers every call of the engine according to the table."""

    def __init__(self, api: ResourceClient) -> None:
        self._api = api
        self._defaults = ProviderDefaults("", "")

    async def check_config(self, request: p.CheckRequest) -> p.CheckResponse:
        return p.CheckResponse(inputs=request.new_inputs)

    async def diff_config(self, request: p.DiffRequest) -> p.DiffResponse:
        """Report no change, whatever the provider's new settings are: its resources are in the same cloud as before."""
        return p.DiffResponse(changes=False)

    async def configure(self, request: p.ConfigureRequest) -> p.ConfigureResponse:
        given = to_plain(request.args)
        self._defaults = ProviderDefaults(str(given.get("project", "")), str(given.get("region", "")))
        return p.ConfigureResponse(supports_preview=True)

    async def check(self, request: p.CheckRequest) -> p.CheckResponse:
        """Replace each file asset by the file's path: of an asset, the engine's state would contain only the hash."""
        table.kind_of(type_of(request))
        files = {key: v for key, v in request.new_inputs.items() if isinstance(v.value, pulumi.FileAsset)}
        paths = from_plain(to_plain(files))
        return p.CheckResponse(inputs={**request.new_inputs, **paths})

    async def diff(self, request: p.DiffRequest) -> p.DiffResponse:
        """Compare declared inputs only; the state also holds computed outputs."""
        new, state = to_plain(request.new_inputs), to_plain(request.old_state)
        given = str(state.get(GIVEN, "")).split(",")
        old = {key: state[key] for key in given if key in state}
        change = table.compare(type_of(request), old, new)
        return p.DiffResponse(
            changes=bool(change),
            diffs=list(change.keys),
            replaces=list(change.replaces),
            delete_before_replace=change.delete_first,
        )

    async def create(self, request: p.CreateRequest) -> p.CreateResponse:
        inputs = to_plain(request.properties)
        if request.preview:
            return p.CreateResponse(resource_id="", properties=request.properties)
        id_, outputs = table.computed(type_of(request), request.name, inputs, self._defaults)
        it = table.target(type_of(request), request.name, inputs, self._defaults)
        outputs |= await asyncio.to_thread(self._api.create, it)
        return p.CreateResponse(resource_id=id_, properties=_state(request.properties, outputs))

    async def update(self, request: p.UpdateRequest) -> p.UpdateResponse:
        new, old = to_plain(request.news), to_plain(request.olds)
        _, outputs = table.computed(type_of(request), request.name, new, self._defaults)
        if not request.preview:
            keys = tuple(key for key in new if new[key] != old.get(key))
            it = table.target(type_of(request), request.name, new, self._defaults)
            outputs |= await asyncio.to_thread(self._api.update, it, keys)
        return p.UpdateResponse(properties=_state(request.news, outputs))

    async def delete(self, request: p.DeleteRequest) -> None:
        state = to_plain(request.properties)
        await asyncio.to_thread(self._api.delete, table.target(type_of(request), request.name, state, self._defaults))


def type_of(request: p.CheckRequest | p.DiffRequest | p.CreateRequest | p.UpdateRequest | p.DeleteRequest) -> str:
    """The resource's own type, without the types of its parent components."""
    return request.type.rsplit("$", 1)[-1]


def _state(inputs: Mapping[str, PropertyValue], outputs: Json) -> dict[str, PropertyValue]:
    given = {GIVEN: ",".join(sorted(inputs))}
    return {**inputs, **from_plain(outputs), **from_plain(given)}


def to_plain(values: Mapping[str, PropertyValue]) -> Json:
    """Convert to JSON, without unknown values."""
    out = {key: _plain(value) for key, value in values.items()}
    return {key: plain(value) for key, value in out.items() if value is not None}


def _plain(value: PropertyValue) -> Any:
    inner = value.value
    if isinstance(inner, Computed):
        return None
    if isinstance(inner, Mapping):
        return to_plain(inner)
    if isinstance(inner, (list, tuple)):
        return [_plain(item) for item in inner]
    return inner


def from_plain(values: Mapping[str, Any]) -> dict[str, PropertyValue]:
    """Convert each value, of any type, to a string and wrap it for the engine."""
    return {key: PropertyValue(str(value)) for key, value in values.items()}


def main() -> None:
    serve(
        sys.argv[1:],
        metadata.version("pulumi-gcp"),
        StandIn(ResourceClient(os.environ[ENDPOINT], os.environ.get(TOKEN, ""))),
    )


if __name__ == "__main__":
    main()
