"""Stores declared resources outside Compute Engine; some types have an effect.

A POST of ``{name, properties}`` to ``/local/v1/resources/{type}`` creates a resource; GET, PUT and DELETE have the path
``/local/v1/resources/{type}/{name}``. Types with an effect: ``cloudfunctionsv2:function`` (a process),
``cloudscheduler:job`` (ticks), ``logging:projectSink`` with ``pubsub:topic`` and ``pubsub:subscription`` (preemption
events), ``storage:bucket``, accounts and custom roles.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec
from msgspec import Struct

from spotkeeper.contract import codec
from spotkeeper.local.core import errors
from spotkeeper.local.core.errors import ApiError
from spotkeeper.local.core.schema import JsonObject
from spotkeeper.local.core.world import World

T = TypeVar("T", bound=Struct)
KIND = "resources"
FUNCTION = "cloudfunctionsv2:function"
JOB = "cloudscheduler:job"
TOPIC = "pubsub:topic"
SUBSCRIPTION = "pubsub:subscription"
SINK = "logging:projectSink"
BUCKET = "storage:bucket"
ONLY_KEPT = frozenset(
    {
        TOPIC,
        "pubsub:topicIAMMember",
        "pubsub:subscriptionIAMMember",
        "projects:serviceIdentity",
        "artifactregistry:repository",
        "secretmanager:secretIamMember",
        "compute:subnetworkIAMMember",
        "storage:bucketIAMMember",
        "serviceaccount:iAMMember",
        "projects:iAMMember",
        "cloudrunv2:serviceIamMember",
        "monitoring:notificationChannel",
        "monitoring:alertPolicy",
        "billing:budget",
        "providers:",  # the program's own provider
    }
)


class Resource(Struct, frozen=True):
    """A declared resource with its computed outputs."""

    type: str
    name: str
    properties: JsonObject
    outputs: dict[str, str] = {}
    declared_at: float = 0.0  # virtual unix seconds


class Declaration(Struct, frozen=True, forbid_unknown_fields=True):
    """The body of a POST or PUT. ``properties``: keyed by Pulumi's property names."""

    name: str
    properties: JsonObject = {}


class Effect:
    """Implements a resource type; this base class does nothing. Methods run in the request's transaction."""

    def check(self, name: str, properties: JsonObject) -> None:
        """Raise ApiError for properties that this cloud does not support."""

    def apply(self, resource: Resource) -> dict[str, str]:
        """Create or change the resource, and return its computed outputs."""
        return {}

    def remove(self, resource: Resource) -> None:
        """Remove the resource."""


class Resources:
    def __init__(self, world: World) -> None:
        self._world = world
        self._effects: dict[str, Effect] = {}
        self.version = 0  # changes when any resource changes

    def register(self, type_: str, effect: Effect) -> None:
        self._effects[type_] = effect

    def get(self, type_: str, name: str) -> Resource | None:
        return self._world.state.get(KIND, f"{type_}/{name}", Resource)

    def list(self, type_: str = "") -> list[Resource]:
        return self._world.state.all(KIND, Resource, f"{type_}/" if type_ else "")

    def names(self) -> dict[str, tuple[str, ...]]:
        found: dict[str, tuple[str, ...]] = {}
        for resource in self.list():
            found[resource.type] = (*found.get(resource.type, ()), resource.name)
        return found

    def create(self, type_: str, declared: Declaration) -> Resource:
        """Create a resource; ApiError 409 for a taken name, 501 for an unsupported type."""
        if type_ not in self._effects and type_ not in ONLY_KEPT:
            raise errors.not_built(f"resources of type {type_} are not supported")
        if self.get(type_, declared.name) is not None:
            raise errors.already_exists(f"{type_}/{declared.name}")
        return self._apply(type_, declared)

    def update(self, type_: str, declared: Declaration) -> Resource:
        self.need(type_, declared.name)
        return self._apply(type_, declared)

    def need(self, type_: str, name: str) -> Resource:
        """Find a resource; ApiError 404 if it does not exist."""
        found = self.get(type_, name)
        if found is None:
            raise errors.not_found(f"{type_}/{name}")
        return found

    def delete(self, type_: str, name: str) -> None:
        resource = self.need(type_, name)
        self.version += 1
        effect = self._effects.get(type_)
        if effect is not None:
            effect.remove(resource)
        self._world.state.delete(KIND, f"{type_}/{name}")

    def _apply(self, type_: str, declared: Declaration) -> Resource:
        self.version += 1
        effect = self._effects.get(type_)
        resource = Resource(type_, declared.name, declared.properties, declared_at=self._world.now())
        if effect is not None:
            effect.check(declared.name, declared.properties)
            resource = msgspec.structs.replace(resource, outputs=effect.apply(resource))
        self._world.state.put(KIND, f"{type_}/{declared.name}", resource)
        return resource


def section(type_: type[T], properties: JsonObject, name: str) -> T:
    """Convert a resource's properties to a struct; keys that the struct lacks are ignored.

    Args:
        name: the resource's name, for the error.

    Raises:
        ApiError: 400 with the path of the invalid value.
    """
    try:
        return codec.convert(properties, type_, strict=False)
    except msgspec.ValidationError as error:
        raise ApiError(400, "invalid", f"{name}: {error}") from None
