"""What a program declares beside machines: kept as declared, and made real where the demo needs it.

``POST /local/v1/resources/{type}`` with ``{name, properties}``; PUT, GET and DELETE with the name. Real effect:
``cloudfunctionsv2:function`` (a process), ``cloudscheduler:job`` (ticks), ``logging:projectSink`` with
``pubsub:topic`` and ``pubsub:subscription`` (preemption events), ``storage:bucket``. The others are only kept.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

import msgspec
from msgspec import Struct

from spotkeeper.local import errors
from spotkeeper.local.errors import ApiError
from spotkeeper.local.wire import JsonObject
from spotkeeper.local.world import World
from spotkeeper.spec import codec

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
        "serviceaccount:account",
        "serviceaccount:iAMMember",
        "projects:iAMCustomRole",
        "projects:iAMMember",
        "cloudrunv2:serviceIamMember",
        "monitoring:notificationChannel",
        "monitoring:alertPolicy",
        "billing:budget",
    }
)


class Resource(Struct, frozen=True):
    type: str
    name: str
    properties: JsonObject
    outputs: dict[str, str] = {}


class Declared(Struct, frozen=True, forbid_unknown_fields=True):
    """The body of a POST or PUT; properties by Pulumi's names."""

    name: str
    properties: JsonObject = {}


class Effect(Protocol):
    """What a type does besides being kept. All inside the request's transaction."""

    def check(self, name: str, properties: JsonObject) -> None:
        """Raises ApiError for what this cloud cannot play."""

    def apply(self, resource: Resource) -> dict[str, str]:
        """Create or change; computed outputs."""

    def remove(self, resource: Resource) -> None: ...


class Resources:
    def __init__(self, world: World) -> None:
        self._world = world
        self._effects: dict[str, Effect] = {}

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

    def create(self, type_: str, declared: Declared) -> Resource:
        """
        Raises:
            ApiError: 409 for a name that is taken, 501 for a type this cloud does not know.
        """
        self._known(type_)
        if self.get(type_, declared.name) is not None:
            raise errors.already_exists(f"{type_}/{declared.name}")
        return self._apply(type_, declared)

    def update(self, type_: str, declared: Declared) -> Resource:
        self.need(type_, declared.name)
        return self._apply(type_, declared)

    def need(self, type_: str, name: str) -> Resource:
        """
        Raises:
            ApiError: 404.
        """
        found = self.get(type_, name)
        if found is None:
            raise errors.not_found(f"{type_}/{name}")
        return found

    def delete(self, type_: str, name: str) -> None:
        resource = self.need(type_, name)
        effect = self._effects.get(type_)
        if effect is not None:
            effect.remove(resource)
        self._world.state.delete(KIND, f"{type_}/{name}")

    def _known(self, type_: str) -> None:
        if type_ not in self._effects and type_ not in ONLY_KEPT:
            raise errors.not_built(f"resource type {type_}")

    def _apply(self, type_: str, declared: Declared) -> Resource:
        effect = self._effects.get(type_)
        resource = Resource(type_, declared.name, declared.properties)
        if effect is not None:
            effect.check(declared.name, declared.properties)
            resource = msgspec.structs.replace(resource, outputs=effect.apply(resource))
        self._world.state.put(KIND, f"{type_}/{declared.name}", resource)
        return resource


def section(type_: type[T], properties: JsonObject, field: str) -> T:
    """A part of the properties as a struct; unknown keys are the provider's business.

    Raises:
        ApiError: 400 with the path of what is wrong.
    """
    try:
        return codec.convert(properties, type_, strict=False)
    except msgspec.ValidationError as error:
        raise ApiError(400, "invalid", f"{field}: {error}") from None
