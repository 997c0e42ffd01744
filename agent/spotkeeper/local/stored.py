"""Resources that a program declares and this cloud only keeps: networks, subnetworks, firewalls, policies, templates.

Kept, validated by name, reference and known field, refused for deletion while something uses them: what
makes a program wrong in the cloud makes it wrong here. Their packets and groups have no effect.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from msgspec import Struct

from spotkeeper.local import errors, validate
from spotkeeper.local.operations import OpDoc, Operations
from spotkeeper.local.paths import Ref, parse, timestamp
from spotkeeper.local.policies import Policies
from spotkeeper.local.wire import (
    BodyError,
    Instance,
    InstanceProperties,
    JsonObject,
    JsonValue,
    TemplateBody,
    to_json,
    without_nulls,
)
from spotkeeper.local.wire import parse as parse_body
from spotkeeper.local.world import World


@dataclass(frozen=True)
class Collection:
    """``fields``: what a body may hold; ``refs``: fields that must name an existing thing of that kind."""

    kind: str
    wire: str
    scopes: tuple[str, ...]
    fields: frozenset[str]
    refs: dict[str, str] = field(default_factory=dict)


_COMMON = {"name", "description", "kind"}
COLLECTIONS = {
    item.kind: item
    for item in (
        Collection(
            "networks",
            "compute#network",
            ("global",),
            frozenset(
                _COMMON
                | {"autoCreateSubnetworks", "mtu", "routingConfig", "networkFirewallPolicyEnforcementOrder"}
                | {"enableUlaInternalIpv6"}
            ),
        ),
        Collection(
            "subnetworks",
            "compute#subnetwork",
            ("regions",),
            frozenset(
                _COMMON
                | {"ipCidrRange", "network", "privateIpGoogleAccess", "region", "stackType", "purpose", "role"}
                | {"secondaryIpRanges", "logConfig", "enableFlowLogs", "ipv6AccessType", "privateIpv6GoogleAccess"}
                | {"allowSubnetCidrRoutesOverlap"}
            ),
            {"network": "networks"},
        ),
        Collection(
            "firewalls",
            "compute#firewall",
            ("global",),
            frozenset(
                _COMMON
                | {"network", "allowed", "denied", "direction", "priority", "sourceRanges", "destinationRanges"}
                | {
                    "sourceTags",
                    "targetTags",
                    "sourceServiceAccounts",
                    "targetServiceAccounts",
                    "disabled",
                    "logConfig",
                }
            ),
            {"network": "networks"},
        ),
        Collection(
            "resourcePolicies",
            "compute#resourcePolicy",
            ("regions",),
            frozenset(_COMMON | {"groupPlacementPolicy", "region"}),
        ),
        Collection("instanceTemplates", "compute#instanceTemplate", ("global", "regions"), frozenset()),
    )
}


class Stored(Struct, frozen=True):
    path: str
    id: int
    created: str
    body: JsonObject


class Storeroom:
    def __init__(self, world: World, operations: Operations, policies: Policies) -> None:
        self._world = world
        self._operations = operations
        self._policies = policies
        operations.register("insert", lambda _: world.timing.quick_s, lambda _: None)
        operations.register("delete", lambda _: world.timing.quick_s, self._finish_delete)

    def seed(self, project: str) -> None:
        """Every project has a default network with a subnetwork in each region."""
        path = f"projects/{project}/global/networks/default"
        if self._world.state.get("networks", path, Stored) is not None:
            return
        network = Ref(project, "global", "networks", "default")
        self._put(network, {"name": "default", "autoCreateSubnetworks": True, "mtu": 1460})
        for number, region in enumerate(self._world.config.regions()):
            subnet = Ref(project, f"regions/{region}", "subnetworks", "default")
            link = self._world.self_link(network.path)
            self._put(subnet, {"name": "default", "network": link, "ipCidrRange": f"10.{128 + number}.0.0/20"})

    def find(self, ref: Ref) -> Stored | None:
        return self._world.state.get(ref.kind, ref.path, Stored)

    def get(self, ref: Ref) -> Stored:
        """By name or numeric id.

        Raises:
            ApiError: 404.
        """
        found = self.find(ref)
        if found is None and ref.name.isdigit():
            found = next((item for item in self.list(ref) if item.id == int(ref.name)), None)
        if found is None:
            raise errors.not_found(ref.path)
        return found

    def list(self, ref: Ref) -> list[Stored]:
        """All of the ref's kind and scope; its name does not matter."""
        return self._world.state.all(ref.kind, Stored, ref.folder())

    def insert(self, collection: Collection, ref: Ref, body: JsonValue, request_id: str | None) -> OpDoc:
        clean = self._template(body) if collection.kind == "instanceTemplates" else self._plain(collection, ref, body)
        if self.find(ref) is not None:
            raise errors.already_exists(ref.path)
        stored = self._put(ref, clean)
        return self._operations.start("insert", ref, stored.id, request_id)

    def _put(self, ref: Ref, body: JsonObject) -> Stored:
        stored = Stored(ref.path, self._world.new_id(), timestamp(self._world.now()), body)
        self._world.state.put(ref.kind, ref.path, stored)
        return stored

    def _plain(self, collection: Collection, ref: Ref, body: JsonValue) -> JsonObject:
        clean = without_nulls(body)
        if not isinstance(clean, dict):
            raise errors.invalid("body", body, "Expected an object.")
        unknown = sorted(set(clean) - collection.fields)
        if unknown:
            raise errors.not_built(f"{collection.kind} field '{unknown[0]}'")
        for name, kind in collection.refs.items():
            link = clean.get(name)
            if not isinstance(link, str):
                raise errors.required(f"resource.{name}")
            target = parse(link, ref.project)
            if target is None or target.kind != kind or self.find(target) is None:
                raise errors.invalid(f"resource.{name}", link, "The referenced resource cannot be found.")
            clean[name] = self._world.self_link(target.path)
        if isinstance(routing := clean.get("routingConfig"), dict):
            routing.pop(
                "deleteBgpAlwaysCompareMed", None
            )  # what Terraform's provider asks for, in no schema of Google's
        if "region" in collection.fields:
            clean["region"] = self._world.self_link(f"projects/{ref.project}/{ref.scope}")
        return clean

    def _template(self, body: JsonValue) -> JsonObject:
        template = parse_body(body, TemplateBody)
        if template.properties is None:
            raise errors.required("resource.properties")
        validate.properties(template.properties, in_template=True)
        validate.scheduling(template.properties.scheduling, bool(template.properties.guest_accelerators))
        clean = to_json(template)
        clean["properties"] = to_json(template.properties)
        return clean

    def template(self, ref: Ref) -> InstanceProperties:
        """What a template holds.

        Raises:
            ApiError: 404.
        """
        return parse_body(self.get(ref).body["properties"], InstanceProperties)

    def delete(self, ref: Ref, request_id: str | None) -> OpDoc:
        stored = self.get(ref)
        found = parse(stored.path, ref.project) or ref
        user = next(self._users(found), None)
        if user is not None:
            raise errors.in_use(found.path, user)
        return self._operations.start("delete", found, stored.id, request_id)

    def _finish_delete(self, op: OpDoc) -> None:
        ref = parse(op.target, "")
        if ref is None:
            raise errors.failed_not_found(op.target)
        self._world.state.delete(ref.kind, ref.path)
        self._policies.forget(ref.path)

    def _users(self, ref: Ref) -> Iterator[str]:
        """Paths of what would break."""
        link = self._world.self_link(ref.path)
        if ref.kind == "networks":
            for kind in ("subnetworks", "firewalls"):
                for item in self._world.state.all(kind, Stored, f"projects/{ref.project}/"):
                    if item.body.get("network") == link:
                        yield item.path
        if ref.kind in ("networks", "subnetworks", "resourcePolicies"):
            for path, instance in self._instances(ref.project):
                nets = instance.network_interfaces or []
                links = [*(net.network for net in nets), *(net.subnetwork for net in nets)]
                if link in links or link in (instance.resource_policies or []):
                    yield path

    def _instances(self, project: str) -> Iterator[tuple[str, Instance]]:
        class Doc(Struct):
            path: str
            wire: Instance

        for doc in self._world.state.all("instances", Doc, f"projects/{project}/"):
            yield doc.path, doc.wire

    def view(self, stored: Stored, collection: Collection) -> JsonObject:
        """As the API shows it."""
        ref = parse(stored.path, "")
        assert ref is not None
        shown: JsonObject = {
            **stored.body,
            "kind": collection.wire,
            "id": str(stored.id),
            "name": ref.name,
            "creationTimestamp": stored.created,
            "selfLink": self._world.self_link(stored.path),
        }
        if ref.scope.startswith("regions/"):
            shown["region"] = self._world.self_link(f"projects/{ref.project}/{ref.scope}")
        if collection.kind == "networks":
            links = [
                self._world.self_link(item.path)
                for item in self._world.state.all("subnetworks", Stored, f"projects/{ref.project}/")
                if item.body.get("network") == shown["selfLink"]
            ]
            shown |= {"subnetworks": list(links)} if links else {}
            shown.setdefault("routingConfig", {"routingMode": "REGIONAL"})
        if collection.kind == "resourcePolicies":
            shown["status"] = "READY"
        return shown


__all__ = ["COLLECTIONS", "BodyError", "Collection", "Stored", "Storeroom"]
