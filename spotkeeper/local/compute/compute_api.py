"""Compute Engine's REST API: routes single and batched requests to the parts of the cloud.

This module routes, parses bodies and writes Google's envelopes; it has no state. An unsupported method gets 501.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from email import message_from_bytes
from email.message import Message
from typing import NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

import msgspec

from spotkeeper.local.access.auth import Principal
from spotkeeper.local.access.rights import Rights
from spotkeeper.local.compute import validate
from spotkeeper.local.compute.catalog_api import CatalogApi
from spotkeeper.local.compute.operations import KIND as OPERATIONS
from spotkeeper.local.compute.operations import OpDoc
from spotkeeper.local.compute.query import ListAnswers, apply_mask, parse_mask
from spotkeeper.local.compute.stored import COLLECTIONS
from spotkeeper.local.core import catalog, errors
from spotkeeper.local.core import schema as w
from spotkeeper.local.core.errors import ApiError
from spotkeeper.local.core.rest import (
    NAME,
    REGION,
    ZONE,
    ApiCall,
    Handler,
    Ref,
    Route,
    decode,
    parse_body,
    parse_ref,
    to_json,
)
from spotkeeper.local.core.schema import JsonObject, JsonValue
from spotkeeper.local.core.vm import KIND as INSTANCES
from spotkeeper.local.server.wiring import CloudParts

BOUNDARY = "batch_spotkeeper_local"
DISKS, SNAPSHOTS = "disks", "snapshots"
Items = Callable[[str], Iterable[msgspec.Struct]]
"""Returns the resources whose paths have a prefix."""
Start = Callable[..., OpDoc]
"""Starts an operation on a resource. Arguments: its reference, the request's body if it has one, and the requestId."""


class _Batched(NamedTuple):
    """One request of a batch. ``name``: its Content-ID, which the answer repeats."""

    method: str
    path: str
    query: dict[str, str]
    body: bytes
    name: str


def _batched(part: Message) -> _Batched:
    """Read a part of a batch; ApiError (400) if it is not an HTTP request."""
    payload = part.get_payload(decode=True)
    head, _, body = (payload if isinstance(payload, bytes) else b"").replace(b"\r\n", b"\n").partition(b"\n\n")
    try:
        method, url = head.split(b"\n", 1)[0].decode().split(" ")[:2]
        target = urlsplit(url)
    except ValueError:  # not UTF-8, a word is missing, or no URL
        raise ApiError(400, "badRequest", "A part of the batch is not an HTTP request.") from None
    path = unquote(target.path).partition("/compute/")[2].partition("/")[2]
    name = str(part.get("Content-ID", "<0>")).strip("<>")
    return _Batched(method, path, dict(parse_qsl(target.query)), body, name)


class ComputeApi:
    def __init__(self, parts: CloudParts) -> None:
        self._parts = parts
        self._world = parts.world
        self._lists = ListAnswers(parts.world, lambda zone: parts.spot.override(zone).partitioned)
        self._catalog = CatalogApi(parts.world, self._lists)
        self._rights = Rights(self._merged, self._accounts)
        self._table = [
            (method, re.compile(rf"projects/(?P<project>[^/]+){pattern}\Z"), handler)
            for method, pattern, handler in self._routes()
        ]

    def answer(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        body: bytes,
        principal: Principal | None,
        version: str = "v1",
    ) -> tuple[int, JsonObject]:
        """Answer one request in one transaction; return status and body.

        Args:
            path: from ``projects/`` on.
            version: ``v1`` or ``beta``.
        """
        try:
            if principal is not None and principal.vm:
                raise errors.forbidden(f"Required permission for '{method} {path}' is not held by {principal.email}")
            handler, call = self._find(method, path, query, decode(body))
            if version != "beta" and "/advice/" in path:  # v1 refuses these methods, though documented
                raise ApiError(400, "badRequest", "provisioningModel: SPOT is not supported in this version.")
            mask = parse_mask(query["fields"]) if query.get("fields") else {}
            self._check_scope(call)
            with self._world.state.transaction():
                self._parts.stored.seed(call.at["project"])
                if principal is not None and self._parts.iam.knows(principal.email):
                    self._parts.iam.check(principal.email, self._rights.of(call))
                return 200, apply_mask(mask, handler(call)) or {}
        except ApiError as error:
            return error.code, error.body()

    def batch(self, content_type: str, body: bytes, principal: Principal | None) -> tuple[bytes, str]:
        """Answer a batch, several requests in one multipart body as gcloud sends them; return body and content type.

        Raises:
            ApiError: 400 if the body is not multipart/mixed with HTTP requests.
        """
        message = message_from_bytes(b"Content-Type: " + content_type.encode() + b"\r\n\r\n" + body)
        if not message.is_multipart():
            raise ApiError(400, "badRequest", "Expected a multipart/mixed body of HTTP requests.")
        parts = message.get_payload()
        assert isinstance(parts, list)
        calls = [_batched(part) for part in parts if isinstance(part, Message)]  # all, before the first one acts
        out = b"".join(self._answered(call, principal) for call in calls)
        return out + f"--{BOUNDARY}--\r\n".encode(), f"multipart/mixed; boundary={BOUNDARY}"

    def _answered(self, call: _Batched, principal: Principal | None) -> bytes:
        status, answered = self.answer(call.method, call.path, call.query, call.body, principal)
        content = msgspec.json.encode(answered)
        lines = [
            f"--{BOUNDARY}",
            "Content-Type: application/http",
            f"Content-ID: <response-{call.name}>",
            "",
            f"HTTP/1.1 {status} {'OK' if status == 200 else 'Error'}",
            "Content-Type: application/json; charset=UTF-8",
            f"Content-Length: {len(content)}",
            "",
        ]
        return "\r\n".join(lines).encode() + b"\r\n" + content + b"\r\n"

    def _find(self, method: str, path: str, query: Mapping[str, str], body: JsonValue) -> tuple[Handler, ApiCall]:
        for verb, pattern, handler in self._table:
            found = pattern.match(path) if verb == method else None
            if found:
                at = found.groupdict()
                if at["project"] == str(catalog.PROJECT_NUMBER):  # the project's number, its other name
                    at["project"] = self._world.config.project
                return handler, ApiCall(method, path, at, query, body)
        raise errors.not_built(f"{method} {path} is not supported")

    def _merged(self, call: ApiCall) -> w.InstanceProperties:
        return self._parts.builder.merged(parse_body(call.body, w.InstanceBody), self._template(call))

    def _template(self, call: ApiCall) -> Ref | None:
        link = call.query.get("sourceInstanceTemplate")
        template = parse_ref(link, call.at["project"]) if link else None
        if link and (template is None or template.kind != "instanceTemplates"):
            raise errors.invalid("sourceInstanceTemplate", link, "The URL is malformed.")
        if template is not None and template.place not in ("global", catalog.region_of(call.at["zone"])):
            raise errors.invalid("sourceInstanceTemplate", link, "The template is in another region.")
        return template

    def _accounts(self, machine: Ref) -> list[str]:
        return [account.email for account in self._parts.machines.get(machine).wire.service_accounts or ()]

    def _check_scope(self, call: ApiCall) -> None:
        project = call.at["project"]
        zone, region = call.at.get("zone"), call.at.get("region")
        if zone is not None and zone not in self._world.config.zones:
            raise errors.not_found(f"projects/{project}/zones/{zone}")
        if region is not None and region not in self._world.config.regions():
            raise errors.not_found(f"projects/{project}/regions/{region}")
        if zone is not None and self._parts.spot.override(zone).partitioned:
            raise errors.zone_down(zone)

    def _routes(self) -> Iterable[Route]:
        yield from self._catalog.routes()
        yield from self._instance_routes()
        yield from self._disk_routes()
        operations: Items = lambda prefix: (doc.operation for doc in self._parts.operations.list(prefix))  # noqa: E731
        for scope in (ZONE, REGION, "/global"):
            yield "GET", f"{scope}/operations", self._listed(OPERATIONS, "compute#operationList", operations)
            yield "GET", f"{scope}/operations/{NAME}", self._get_operation
            yield "POST", f"{scope}/operations/{NAME}/wait", self._get_operation  # the server waits before this call
        yield from self._stored_routes()

    def _instance_routes(self) -> Iterable[Route]:
        base, one = f"{ZONE}/instances", f"{ZONE}/instances/{NAME}"
        instances, verb = self._parts.instances, self._on_instance
        yield "POST", base, self._insert_instance
        yield "GET", base, self._listed(INSTANCES, "compute#instanceList", self._wires)
        aggregated = self._aggregated(INSTANCES, "compute#instanceAggregatedList", self._wires)
        yield "GET", "/aggregated/instances", aggregated
        yield "GET", one, lambda call: to_json(self._parts.machines.get(call.ref(INSTANCES)).wire)
        yield "DELETE", one, verb("deleteInstance", instances.delete)
        yield "POST", f"{one}/stop", verb("stop", instances.stop)
        yield "POST", f"{one}/start", verb("start", instances.start)
        yield "POST", f"{one}/simulateMaintenanceEvent", verb("simulateMaintenanceEvent", instances.simulate)
        yield "POST", f"{one}/attachDisk", self._attach
        yield "POST", f"{one}/detachDisk", self._detach
        yield "POST", f"{one}/setLabels", verb("setLabels", instances.set_labels, w.SetLabels)
        yield "POST", f"{one}/setMetadata", verb("setMetadata", instances.set_metadata, w.SetMetadata)
        yield "GET", f"{one}/serialPort", self._serial

    def _disk_routes(self) -> Iterable[Route]:
        disks, once = self._parts.disks, self._once
        base, one, snapshot = f"{ZONE}/disks", f"{ZONE}/disks/{NAME}", f"/global/snapshots/{NAME}"
        yield "POST", base, self._insert_disk
        yield "GET", base, self._listed(DISKS, "compute#diskList", disks.list)
        yield "GET", "/aggregated/disks", self._aggregated(DISKS, "compute#diskAggregatedList", disks.list)
        yield "GET", one, lambda call: to_json(disks.get(call.ref(DISKS)))
        yield "DELETE", one, lambda call: once(call, "deleteDisk", call.ref(DISKS), disks.delete)
        yield "POST", f"{one}/createSnapshot", self._on_disk("createSnapshot", disks.create_snapshot, w.SnapshotBody)
        yield "POST", f"{one}/setLabels", self._on_disk("setLabels", disks.set_labels, w.SetLabels)
        yield "GET", "/global/snapshots", self._listed(SNAPSHOTS, "compute#snapshotList", disks.snapshots)
        yield "GET", snapshot, lambda call: to_json(disks.get_snapshot(call.ref(SNAPSHOTS)))
        yield "DELETE", snapshot, lambda call: once(call, "deleteSnapshot", call.ref(SNAPSHOTS), disks.delete_snapshot)

    def _stored_routes(self) -> Iterable[Route]:
        stored = self._parts.stored
        for collection in COLLECTIONS.values():
            for scope in collection.scopes:
                base = {"global": "/global", "regions": REGION, "zones": ZONE}[scope] + f"/(?P<kind>{collection.kind})"
                yield "POST", base, self._insert_stored
                yield "GET", base, self._list_stored
                yield "GET", f"{base}/{NAME}", lambda call: stored.view(stored.get(call.ref(call.at["kind"])))
                yield "DELETE", f"{base}/{NAME}", self._delete_stored
        subnetwork = f"{REGION}/(?P<kind>subnetworks)/{NAME}"
        yield "GET", f"{subnetwork}/getIamPolicy", self._get_policy
        yield "POST", f"{subnetwork}/setIamPolicy", self._set_policy

    # Operations and lists

    def _listed(self, kind: str, wire: str, items: Items) -> Handler:
        return lambda call: self._lists.listed(call, wire, map(to_json, items(call.ref(kind).folder())))

    def _aggregated(self, kind: str, wire: str, items: Items) -> Handler:
        def handle(call: ApiCall) -> JsonObject:
            found = items(f"projects/{call.at['project']}/zones/")
            return self._lists.aggregated(call, wire, kind, map(to_json, found))

        return handle

    def _wires(self, prefix: str) -> Iterable[w.Instance]:
        return (vm.wire for vm in self._parts.machines.list(prefix))

    def _once(self, call: ApiCall, verb: str, ref: Ref, start: Start, *body: object) -> JsonObject:
        """Return the operation that this requestId has already started, or start a new one."""
        earlier = self._parts.operations.replay(ref.project, call.request_id, ref.path, verb)
        return to_json((earlier or start(ref, *body, call.request_id)).operation)

    def _get_operation(self, call: ApiCall) -> JsonObject:
        ref = call.ref(OPERATIONS)
        found = self._parts.operations.get(ref.path)
        if found is None and ref.name.isdecimal():
            docs = self._parts.operations.list(ref.folder())
            found = next((doc for doc in docs if str(doc.operation.id) == ref.name), None)
        if found is None:
            raise errors.not_found(ref.path)
        return to_json(found.operation)

    # Instances

    def _insert_instance(self, call: ApiCall) -> JsonObject:
        body = parse_body(call.body, w.InstanceBody)
        ref = call.ref(INSTANCES, validate.name(body.name))
        return self._once(call, "insertInstance", ref, self._parts.instances.insert, body, self._template(call))

    def _on_instance(self, verb: str, start: Start, kind: type | None = None) -> Handler:
        def handle(call: ApiCall) -> JsonObject:
            return self._once_on_instance(call, verb, start, *(() if kind is None else (parse_body(call.body, kind),)))

        return handle

    def _once_on_instance(self, call: ApiCall, verb: str, start: Start, *body: object) -> JsonObject:
        """Start one operation per requestId, even if a repeated call names the VM by id instead of by name."""
        ref = call.ref(INSTANCES)
        try:
            target = self._parts.machines.get(ref).ref
        except ApiError:  # no such VM now: a repeated call must name it as the first call did
            target = ref
        return self._once(call, verb, target, start, *body)

    def _attach(self, call: ApiCall) -> JsonObject:
        body = parse_body(call.body, w.AttachedDisk)
        if call.query.get("forceAttach", "").lower() == "true":
            raise errors.invalid("forceAttach", "true", "Only regional disks can be force-attached.")
        return self._once_on_instance(call, "attachDisk", self._parts.attachments.attach, body)

    def _detach(self, call: ApiCall) -> JsonObject:
        detach = self._parts.attachments.detach
        return self._once_on_instance(call, "detachDisk", detach, call.query.get("deviceName"))

    def _serial(self, call: ApiCall) -> JsonObject:
        vm = self._parts.machines.get(call.ref(INSTANCES))
        path = self._parts.host.serial(vm.name, vm.id)
        data = path.read_bytes() if path.exists() else b""
        at = call.query.get("start") or "0"
        if not (at.isdecimal() and len(at) < 20):
            raise errors.invalid("start", at, "Must be a whole number.")
        start = int(at)
        return {
            "kind": "compute#serialPortOutput",
            "contents": data[start:].decode(errors="replace"),
            "start": str(start),
            "next": str(len(data)),
            "selfLink": self._world.self_link(f"{vm.path}/serialPort"),
        }

    # Disks and snapshots

    def _insert_disk(self, call: ApiCall) -> JsonObject:
        body = parse_body(call.body, w.DiskBody)
        return self._once(call, "insertDisk", call.ref(DISKS, validate.name(body.name)), self._parts.disks.insert, body)

    def _on_disk(self, verb: str, start: Start, kind: type) -> Handler:
        return lambda call: self._once(call, verb, call.ref(DISKS), start, parse_body(call.body, kind))

    # Stored resources

    def _insert_stored(self, call: ApiCall) -> JsonObject:
        name = call.body.get("name") if isinstance(call.body, dict) else None
        ref = call.ref(call.at["kind"], validate.name(name if isinstance(name, str) else None))
        return self._once(call, "insert", ref, self._parts.stored.insert, call.body)

    def _list_stored(self, call: ApiCall) -> JsonObject:
        stored, kind = self._parts.stored, call.at["kind"]
        return self._lists.listed(
            call, f"{COLLECTIONS[kind].wire}List", map(stored.view, stored.list(call.ref(kind, "-")))
        )

    def _delete_stored(self, call: ApiCall) -> JsonObject:
        return self._once(call, "delete", call.ref(call.at["kind"]), self._parts.stored.delete)

    def _get_policy(self, call: ApiCall) -> JsonObject:
        return self._parts.policies.get(self._parts.stored.get(call.ref(call.at["kind"])).path)

    def _set_policy(self, call: ApiCall) -> JsonObject:
        path = self._parts.stored.get(call.ref(call.at["kind"])).path
        return self._parts.policies.put(path, parse_body(call.body, w.SetPolicy).policy)
