"""Stores resources that do nothing here: networks, subnetworks, firewalls, policies, templates, reservations.

Names, references and fields are checked, and a resource in use cannot be deleted, so that a program that would fail in
the real cloud fails here too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from msgspec import Struct

from spotkeeper.local.access.iam import Policies
from spotkeeper.local.compute import validate
from spotkeeper.local.compute.operations import OpDoc, Operations
from spotkeeper.local.core import errors
from spotkeeper.local.core.rest import Ref, parse_body, parse_ref, timestamp, to_json, without_nulls
from spotkeeper.local.core.schema import InstanceProperties, JsonObject, JsonValue, TemplateBody
from spotkeeper.local.core.vm import KIND as INSTANCES
from spotkeeper.local.core.vm import RESERVATIONS, LocalVm
from spotkeeper.local.core.world import World


@dataclass(frozen=True)
class Collection:
    """A REST collection. ``fields``: allowed fields of a body; ``refs``: field with a link -> kind of its target."""

    kind: str
    wire: str
    scopes: tuple[str, ...]
    fields: frozenset[str]
    refs: dict[str, str] = field(default_factory=dict)


def _fields(names: str) -> frozenset[str]:
    return frozenset({"name", "description", "kind", *names.split()})


COLLECTIONS = {
    item.kind: item
    for item in (
        Collection(
            "networks", "compute#network", ("global",),
            _fields(
                "autoCreateSubnetworks mtu routingConfig networkFirewallPolicyEnforcementOrder enableUlaInternalIpv6"
            ),
        ),
        Collection(
            "subnetworks", "compute#subnetwork", ("regions",),
            _fields(
                "ipCidrRange network privateIpGoogleAccess region stackType purpose role secondaryIpRanges logConfig"
                " enableFlowLogs ipv6AccessType privateIpv6GoogleAccess allowSubnetCidrRoutesOverlap"
            ),
            {"network": "networks"},
        ),
        Collection(
            "firewalls", "compute#firewall", ("global",),
            _fields(
                "network allowed denied direction priority sourceRanges destinationRanges sourceTags targetTags"
                " sourceServiceAccounts targetServiceAccounts disabled logConfig"
            ),
            {"network": "networks"},
        ),
        Collection(
            "resourcePolicies", "compute#resourcePolicy", ("regions",), _fields("groupPlacementPolicy region")
        ),
        Collection(
            RESERVATIONS, "compute#reservation", ("zones",),
            _fields("specificReservation specificReservationRequired zone"),
        ),
        Collection("instanceTemplates", "compute#instanceTemplate", ("global", "regions"), frozenset()),
    )
}  # fmt: skip


class StoredResource(Struct, frozen=True):
    path: str
    id: int
    created: str
    body: JsonObject


class StoredResources:
    def __init__(self, world: World, operations: Operations, policies: Policies) -> None:
        self._world = world
        self._operations = operations
        self._policies = policies
        operations.register("insert", lambda _: world.timing.quick_s, lambda _: None)
        operations.register("delete", lambda _: world.timing.quick_s, self._finish_delete)

    def seed(self, project: str) -> None:
        """Create a project's default network with a subnetwork in each region."""
        path = f"projects/{project}/global/networks/default"
        if self._world.state.get("networks", path, StoredResource) is not None:
            return
        network = Ref(project, "global", "networks", "default")
        self._put(network, {"name": "default", "autoCreateSubnetworks": True, "mtu": 1460})
        for number, region in enumerate(self._world.config.regions()):
            subnet = Ref(project, f"regions/{region}", "subnetworks", "default")
            link = self._world.self_link(network.path)
            self._put(subnet, {"name": "default", "network": link, "ipCidrRange": f"10.{128 + number}.0.0/20"})

    def find(self, ref: Ref) -> StoredResource | None:
        return self._world.state.get(ref.kind, ref.path, StoredResource)

    def get(self, ref: Ref) -> StoredResource:
        """Find a resource by name or numeric id; ApiError 404 if it does not exist."""
        found = self.find(ref)
        if found is None and ref.name.isdecimal():
            found = next((item for item in self.list(ref) if str(item.id) == ref.name), None)
        if found is None:
            raise errors.not_found(ref.path)
        return found

    def list(self, ref: Ref) -> list[StoredResource]:
        """Return all resources of the kind and scope of ``ref``; its name is ignored."""
        return self._world.state.all(ref.kind, StoredResource, ref.folder())

    def every(self, kind: str) -> Iterator[StoredResource]:
        """Yield all resources of a kind, of all projects and scopes."""
        yield from self._world.state.all(kind, StoredResource, "projects/")

    def insert(self, ref: Ref, body: JsonValue, request_id: str | None) -> OpDoc:
        clean = self._template(body) if ref.kind == "instanceTemplates" else self._plain(ref, body)
        if self.find(ref) is not None:
            raise errors.already_exists(ref.path)
        stored = self._put(ref, clean)
        return self._operations.start("insert", ref, stored.id, request_id)

    def _put(self, ref: Ref, body: JsonObject) -> StoredResource:
        stored = StoredResource(ref.path, self._world.new_id(), timestamp(self._world.now()), body)
        self._world.state.put(ref.kind, ref.path, stored)
        return stored

    def _plain(self, ref: Ref, body: JsonValue) -> JsonObject:
        collection = COLLECTIONS[ref.kind]
        clean = without_nulls(body)
        if not isinstance(clean, dict):
            raise errors.invalid("body", body, "Expected an object.")
        unknown = sorted(set(clean) - collection.fields)
        if unknown:
            raise errors.not_built(f"the {collection.kind} field '{unknown[0]}' is not supported")
        for name, kind in collection.refs.items():
            link = clean.get(name)
            if not isinstance(link, str):
                raise errors.required(f"resource.{name}")
            target = parse_ref(link, ref.project)
            if target is None or target.kind != kind or self.find(target) is None:
                raise errors.invalid(f"resource.{name}", link, "The referenced resource cannot be found.")
            clean[name] = self._world.self_link(target.path)
        if isinstance(routing := clean.get("routingConfig"), dict):
            routing.pop("deleteBgpAlwaysCompareMed", None)  # Terraform's provider sends it; Google's schema lacks it
        if ref.kind == RESERVATIONS and clean.get("specificReservationRequired") is not True:
            raise errors.not_built("only reservations with specificReservationRequired are supported")
        if "zone" in collection.fields:
            clean["zone"] = self._world.self_link(f"projects/{ref.project}/{ref.scope}")
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
        """Return a template's properties; ApiError 404 if the template does not exist."""
        return parse_body(self.get(ref).body["properties"], InstanceProperties)

    def delete(self, ref: Ref, request_id: str | None) -> OpDoc:
        stored = self.get(ref)
        found = parse_ref(stored.path, ref.project) or ref
        user = next(self._users(found), None)
        if user is not None:
            raise errors.in_use(found.path, user)
        return self._operations.start("delete", found, stored.id, request_id)

    def _finish_delete(self, op: OpDoc) -> None:
        ref = parse_ref(op.target, "")
        if ref is None:
            raise errors.failed_not_found(op.target)
        self._world.state.delete(ref.kind, ref.path)
        self._policies.forget(ref.path)

    def _users(self, ref: Ref) -> Iterator[str]:
        link = self._world.self_link(ref.path)
        if ref.kind == "networks":
            for kind in ("subnetworks", "firewalls"):
                yield from (item.path for item in self._in_network(kind, ref.project, link))
        if ref.kind in ("networks", "subnetworks", "resourcePolicies"):
            for vm in self._world.state.all(INSTANCES, LocalVm, f"projects/{ref.project}/"):
                nets = vm.wire.network_interfaces or []
                links = [*(net.network for net in nets), *(net.subnetwork for net in nets)]
                if link in links or link in (vm.wire.resource_policies or []):
                    yield vm.path

        if ref.kind == RESERVATIONS:
            vms = self._world.state.all(INSTANCES, LocalVm, f"projects/{ref.project}/")
            yield from (vm.path for vm in vms if vm.reservation == ref)

    def _in_network(self, kind: str, project: str, link: str) -> Iterator[StoredResource]:
        items = self._world.state.all(kind, StoredResource, f"projects/{project}/")
        return (item for item in items if item.body.get("network") == link)

    def view(self, stored: StoredResource) -> JsonObject:
        """The resource as the API shows it."""
        ref = parse_ref(stored.path, "")
        assert ref is not None
        shown: JsonObject = {
            **stored.body,
            "kind": COLLECTIONS[ref.kind].wire,
            "id": str(stored.id),
            "name": ref.name,
            "creationTimestamp": stored.created,
            "selfLink": self._world.self_link(stored.path),
        }
        if ref.scope.startswith("regions/"):
            shown["region"] = self._world.self_link(f"projects/{ref.project}/{ref.scope}")
        if ref.kind == "networks":
            found = self._in_network("subnetworks", ref.project, self._world.self_link(stored.path))
            links: list[JsonValue] = [self._world.self_link(item.path) for item in found]
            shown |= {"subnetworks": links} if links else {}
            shown.setdefault("routingConfig", {"routingMode": "REGIONAL"})
        if ref.kind in ("resourcePolicies", RESERVATIONS):
            shown["status"] = "READY"
        return shown
