"""Where static nodes' disks are, how large and of which kind: a resource that refuses what would make one anew.

A disk does not move, shrink or change its kind; a provider that is told to makes an empty one in its place. Under
``on_destroy: protect`` the engine refuses that; under ``delete`` and ``retain`` nobody would, and a node would go on
with nothing on its disk. The disks wait for this resource, so that it refuses before any of them is touched, in a
preview already.

The provider stands in an importable module, as the drain's does, and for the same reason. It may not ask a cloud.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pulumi
from pulumi.dynamic import CheckFailure, CheckResult, CreateResult, DiffResult, Resource, ResourceProvider, UpdateResult

from infra import naming
from infra.settings import Settings

_OUT = (
    "an empty disk would take its place. Give the pool another name, and take the one of this name out when its data is"
    " copied; if the data may be lost: allow_data_loss: true"
)


class Places(Resource, module="spotkeeper", name="Places"):  # Pulumi's names for a type
    """Declares what the disks of a stack's static nodes are; see the module."""

    def __init__(self, settings: Settings, opts: pulumi.ResourceOptions) -> None:
        properties = {"stack": settings.stack, "disks": disks(settings), "allow_data_loss": settings.allow_data_loss}
        super().__init__(PlacesProvider(), "places", properties, opts)


def disks(settings: Settings) -> dict[str, dict[str, Any]]:
    """What must stay as it is of each disk, by its name. EC2 changes a volume's kind where it is."""
    return {
        naming.node_disk(settings.stack, pool.name, index): {
            "zone": pool.node_zone(index),
            "type": pool.disk.type if settings.cloud == "gcp" else "",
            "size_gb": pool.disk.size_gb,
        }
        for pool in settings.static()
        for index in range(pool.size)
    }


class PlacesProvider(ResourceProvider):
    """Makes nothing: remembers, and refuses. Never replaced."""

    serialize_as_secret_always = False

    def check(self, _olds: dict[str, Any], news: dict[str, Any]) -> CheckResult:
        told = () if news["allow_data_loss"] else lost(_olds.get("disks") or {}, news["disks"])
        return CheckResult(news, [CheckFailure("disks", one) for one in told])

    def create(self, props: dict[str, Any]) -> CreateResult:
        return CreateResult(f"places/{props['stack']}", dict(props))

    def diff(self, _id: str, _olds: dict[str, Any], _news: dict[str, Any]) -> DiffResult:
        changes = any(_olds.get(name) != _news[name] for name in ("disks", "allow_data_loss"))
        return DiffResult(changes=changes, replaces=[], stables=[], delete_before_replace=False)

    def update(self, _id: str, _olds: dict[str, Any], _news: dict[str, Any]) -> UpdateResult:
        return UpdateResult(dict(_news))


def lost(before: Mapping[str, Mapping[str, Any]], after: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Disks that would be made anew. One that leaves is deleted, as ``on_destroy`` says, and grows where it is."""
    for name, new in after.items():
        old = before.get(name)
        if old is None:
            continue
        if old["zone"] != new["zone"]:
            yield f"{name} is in {old['zone']} and does not move to {new['zone']}: {_OUT}"
        elif old["type"] != new["type"]:
            yield f"{name} is a {old['type']} and does not become a {new['type']}: {_OUT}"
        elif old["size_gb"] > new["size_gb"]:
            yield f"{name} has {old['size_gb']:g} GB and does not shrink to {new['size_gb']:g}: {_OUT}"
