"""Compute Engine's REST, as far as it is built: from an HTTP request to the parts that know, and back.

Routing, bodies and Google's envelopes live here; no state and no decision does (``lists``: filters and pages).
Everything that is not listed in ``_routes`` is a 501.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

from spotkeeper.local import catalog, errors, masks, validate
from spotkeeper.local import wire as w
from spotkeeper.local.advice import HistoryRequest
from spotkeeper.local.call import NAME, REGION, ZONE, Answer, Call, Handler, Route, decode
from spotkeeper.local.capacity import CapacityRequest, capacity
from spotkeeper.local.cloudparts import Parts
from spotkeeper.local.errors import ApiError
from spotkeeper.local.lists import Lists
from spotkeeper.local.masks import MaskError
from spotkeeper.local.operations import KIND as OPERATIONS
from spotkeeper.local.operations import OpDoc
from spotkeeper.local.paths import Ref, parse
from spotkeeper.local.places import Places
from spotkeeper.local.stored import COLLECTIONS
from spotkeeper.local.tokens import Principal
from spotkeeper.local.vm import KIND as INSTANCES
from spotkeeper.local.wire import BodyError, JsonObject, JsonValue, to_json


class ComputeApi:
    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._world = parts.world
        self._lists = Lists(parts.world, lambda zone: parts.spot.override(zone).partitioned)
        self._places = Places(parts.world, self._lists)
        self._table = [
            (method, re.compile(rf"projects/(?P<project>[^/]+){pattern}\Z"), handler)
            for method, pattern, handler in self._routes()
        ]

    def answer(
        self, method: str, path: str, query: Mapping[str, str], body: bytes, principal: Principal | None
    ) -> Answer:
        """One request in one transaction. ``path`` begins at ``projects/``."""
        try:
            if principal is not None and principal.vm:
                raise errors.forbidden(f"Required permission for '{method} {path}' is not held by {principal.email}")
            handler, call = self._find(method, path, query, decode(body))
            mask = masks.parse(query["fields"]) if query.get("fields") else {}
            self._check_place(call)
            with self._world.state.transaction():
                self._parts.storeroom.seed(call.at["project"])
                return Answer(200, masks.apply(mask, handler(call)) or {})
        except MaskError as bad:
            wrapped = ApiError(400, "invalidParameter", str(bad))
            return Answer(wrapped.code, wrapped.body())  # type: ignore[arg-type]
        except ApiError as error:
            return Answer(error.code, error.body())  # type: ignore[arg-type]
        except BodyError as bad:
            wrapped = errors.not_built(str(bad)) if bad.known else ApiError(400, "badRequest", str(bad))
            return Answer(wrapped.code, wrapped.body())  # type: ignore[arg-type]

    def _find(self, method: str, path: str, query: Mapping[str, str], body: JsonValue) -> tuple[Handler, Call]:
        for verb, pattern, handler in self._table:
            found = pattern.match(path) if verb == method else None
            if found:
                return handler, Call(method, path, self._spelt(found.groupdict()), query, body)
        raise errors.not_built(f"{method} {path}")

    def _spelt(self, at: dict[str, str]) -> dict[str, str]:
        """A project's number is another name of it."""
        known = at["project"] != str(catalog.PROJECT_NUMBER)
        return at if known else at | {"project": self._world.config.project}

    def _check_place(self, call: Call) -> None:
        project = call.at["project"]
        zone, region = call.at.get("zone"), call.at.get("region")
        if zone is not None and zone not in self._world.config.zones:
            raise errors.not_found(f"projects/{project}/zones/{zone}")
        if region is not None and region not in self._world.config.regions():
            raise errors.not_found(f"projects/{project}/regions/{region}")
        if zone is not None and self._parts.spot.override(zone).partitioned:
            raise errors.zone_down(zone)

    def _routes(self) -> Iterable[Route]:
        yield from self._places.routes()
        yield "POST", f"{REGION}/advice/capacityHistory", self._capacity_history
        yield "POST", f"{REGION}/advice/capacity", self._capacity
        yield from self._instance_routes()
        yield from self._disk_routes()
        for scope in (ZONE, REGION, "/global"):
            yield "GET", f"{scope}/operations", self._list_operations
            yield "GET", f"{scope}/operations/{NAME}", self._get_operation
            yield "POST", f"{scope}/operations/{NAME}/wait", self._get_operation  # the server waited already
        for collection in COLLECTIONS.values():
            for scope in collection.scopes:
                base = {"global": "/global", "regions": REGION}[scope] + f"/(?P<kind>{collection.kind})"
                yield "POST", base, self._insert_stored
                yield "GET", base, self._list_stored
                yield "GET", f"{base}/{NAME}", self._get_stored
                yield "DELETE", f"{base}/{NAME}", self._delete_stored
        subnetwork = f"{REGION}/(?P<kind>subnetworks)/{NAME}"
        yield "GET", f"{subnetwork}/getIamPolicy", self._get_policy
        yield "POST", f"{subnetwork}/setIamPolicy", self._set_policy

    def _instance_routes(self) -> Iterable[Route]:
        base, one = f"{ZONE}/instances", f"{ZONE}/instances/{NAME}"
        parts = self._parts
        yield "POST", base, self._insert_instance
        yield "GET", base, self._list_instances
        yield "GET", "/aggregated/instances", self._aggregate_instances
        yield "GET", one, lambda call: to_json(parts.machines.get(call.ref(INSTANCES)).wire)
        yield "DELETE", one, self._on_instance("deleteInstance", parts.instances.delete)
        yield "POST", f"{one}/stop", self._on_instance("stop", parts.instances.stop)
        yield "POST", f"{one}/start", self._on_instance("start", parts.instances.start)
        yield "POST", f"{one}/simulateMaintenanceEvent", self._on_instance("simulateMaintenanceEvent", parts.simulate)
        yield "POST", f"{one}/attachDisk", self._attach
        yield "POST", f"{one}/detachDisk", self._detach
        yield "POST", f"{one}/setLabels", self._set_labels
        yield "POST", f"{one}/setMetadata", self._set_metadata
        yield "GET", f"{one}/serialPort", self._serial

    def _disk_routes(self) -> Iterable[Route]:
        disks = self._parts.disks
        base, one = f"{ZONE}/disks", f"{ZONE}/disks/{NAME}"
        yield "POST", base, self._insert_disk
        yield "GET", base, self._list_disks
        yield "GET", "/aggregated/disks", self._aggregate_disks
        yield "GET", one, lambda call: to_json(disks.get(call.ref("disks")))
        yield "DELETE", one, self._delete_disk
        yield "POST", f"{one}/createSnapshot", self._create_snapshot
        yield "POST", f"{one}/setLabels", self._label_disk
        yield "GET", "/global/snapshots", self._list_snapshots
        yield "GET", f"/global/snapshots/{NAME}", lambda call: to_json(disks.find_snapshot(call.ref("snapshots")))
        yield "DELETE", f"/global/snapshots/{NAME}", self._delete_snapshot

    # Operations

    def _once(self, call: Call, verb: str, target: Ref, start: Callable[[], OpDoc]) -> JsonObject:
        """The requestId's earlier operation, or a new one."""
        seen = self._parts.operations.replay(target.project, call.request_id, target.path, verb)
        return to_json((seen or start()).operation)

    def _get_operation(self, call: Call) -> JsonObject:
        ref = call.ref(OPERATIONS)
        found = self._parts.operations.get(ref.path)
        if found is None and ref.name.isdigit():
            docs = self._parts.operations.list(ref.folder())
            found = next((doc for doc in docs if doc.operation.id == int(ref.name)), None)
        if found is None:
            raise errors.not_found(ref.path)
        return to_json(found.operation)

    def _list_operations(self, call: Call) -> JsonObject:
        docs = self._parts.operations.list(call.ref(OPERATIONS).folder())
        return self._lists.listed(call, "compute#operationList", (to_json(doc.operation) for doc in docs))

    # Instances

    def _insert_instance(self, call: Call) -> JsonObject:
        body = call.parsed(w.InstanceBody)
        ref = call.ref(INSTANCES, validate.name(body.name))
        link = call.query.get("sourceInstanceTemplate")
        template = parse(link, ref.project) if link else None
        if link and (template is None or template.kind != "instanceTemplates"):
            raise errors.invalid("sourceInstanceTemplate", link, "The URL is malformed.")

        def start() -> OpDoc:
            return self._parts.instances.insert(ref, body, template, call.request_id)

        return self._once(call, "insertInstance", ref, start)

    def _on_instance(self, verb: str, start: Callable[[Ref, str | None], OpDoc]) -> Handler:
        """A verb without a body; a replay is by the target that was named, so a name must resolve first."""

        def handle(call: Call) -> JsonObject:
            ref = call.ref(INSTANCES)
            seen = self._seen(call, ref, verb)
            if seen is not None:
                return to_json(seen.operation)
            return self._once(call, verb, self._parts.machines.get(ref).ref, lambda: start(ref, call.request_id))

        return handle

    def _seen(self, call: Call, ref: Ref, verb: str) -> OpDoc | None:
        """A replay after the VM is gone: by name the target is known, by id it is not any more."""
        try:
            target = self._parts.machines.get(ref).ref
        except ApiError:
            target = ref
        return self._parts.operations.replay(ref.project, call.request_id, target.path, verb)

    def _attach(self, call: Call) -> JsonObject:
        body = call.parsed(w.AttachedDisk)
        if call.query.get("forceAttach", "").lower() == "true":
            raise errors.invalid("forceAttach", "true", "Only regional disks can be force-attached.")
        handler = self._on_instance("attachDisk", lambda ref, rid: self._parts.attachments.attach(ref, body, rid))
        return handler(call)

    def _detach(self, call: Call) -> JsonObject:
        device = call.query.get("deviceName")
        return self._on_instance("detachDisk", lambda ref, rid: self._parts.attachments.detach(ref, device, rid))(call)

    def _set_labels(self, call: Call) -> JsonObject:
        body = call.parsed(w.SetLabels)
        return self._on_instance("setLabels", lambda ref, rid: self._parts.instances.set_labels(ref, body, rid))(call)

    def _set_metadata(self, call: Call) -> JsonObject:
        body = call.parsed(w.SetMetadata)
        handler = self._on_instance("setMetadata", lambda r, rid: self._parts.instances.set_metadata(r, body, rid))
        return handler(call)

    def _serial(self, call: Call) -> JsonObject:
        vm = self._parts.machines.get(call.ref(INSTANCES))
        path = self._parts.host.serial(vm.name, vm.id)
        data = path.read_bytes() if path.exists() else b""
        start = int(call.query.get("start") or 0)
        return {
            "kind": "compute#serialPortOutput",
            "contents": data[start:].decode(errors="replace"),
            "start": str(start),
            "next": str(len(data)),
            "selfLink": self._world.self_link(f"{vm.path}/serialPort"),
        }

    def _list_instances(self, call: Call) -> JsonObject:
        vms = self._parts.machines.list(call.ref(INSTANCES).folder())
        return self._lists.listed(call, "compute#instanceList", (to_json(vm.wire) for vm in vms))

    def _aggregate_instances(self, call: Call) -> JsonObject:
        vms = self._parts.machines.list(f"projects/{call.at['project']}/zones/")
        items = [(vm.zone, to_json(vm.wire)) for vm in vms]
        return self._lists.aggregated(call, "compute#instanceAggregatedList", "instances", items)

    # Disks and snapshots

    def _insert_disk(self, call: Call) -> JsonObject:
        body = call.parsed(w.DiskBody)
        ref = call.ref("disks", validate.name(body.name))
        return self._once(call, "insertDisk", ref, lambda: self._parts.disks.insert(ref, body, call.request_id))

    def _delete_disk(self, call: Call) -> JsonObject:
        ref = call.ref("disks")
        return self._once(call, "deleteDisk", ref, lambda: self._parts.disks.delete(ref, call.request_id))

    def _label_disk(self, call: Call) -> JsonObject:
        body, ref = call.parsed(w.SetLabels), call.ref("disks")
        return self._once(call, "setLabels", ref, lambda: self._parts.disks.set_labels(ref, body, call.request_id))

    def _list_disks(self, call: Call) -> JsonObject:
        disks = self._parts.disks.list(call.ref("disks").folder())
        return self._lists.listed(call, "compute#diskList", map(to_json, disks))

    def _aggregate_disks(self, call: Call) -> JsonObject:
        disks = self._parts.disks.list(f"projects/{call.at['project']}/zones/")
        items = [(disk.zone.rsplit("/", 1)[-1], to_json(disk)) for disk in disks]
        return self._lists.aggregated(call, "compute#diskAggregatedList", "disks", items)

    def _create_snapshot(self, call: Call) -> JsonObject:
        body, ref = call.parsed(w.SnapshotBody), call.ref("disks")

        def start() -> OpDoc:
            return self._parts.disks.create_snapshot(ref, body, call.request_id)

        return self._once(call, "createSnapshot", ref, start)

    def _list_snapshots(self, call: Call) -> JsonObject:
        found = self._parts.disks.snapshots(call.ref("snapshots").folder())
        return self._lists.listed(call, "compute#snapshotList", map(to_json, found))

    def _delete_snapshot(self, call: Call) -> JsonObject:
        ref = call.ref("snapshots")
        return self._once(call, "deleteSnapshot", ref, lambda: self._parts.disks.delete_snapshot(ref, call.request_id))

    # What is only kept

    def _insert_stored(self, call: Call) -> JsonObject:
        collection = COLLECTIONS[call.at["kind"]]
        name = call.body.get("name") if isinstance(call.body, dict) else None
        ref = call.ref(collection.kind, validate.name(name if isinstance(name, str) else None))

        def start() -> OpDoc:
            return self._parts.storeroom.insert(collection, ref, call.body, call.request_id)

        return self._once(call, "insert", ref, start)

    def _get_stored(self, call: Call) -> JsonObject:
        collection = COLLECTIONS[call.at["kind"]]
        return self._parts.storeroom.view(self._parts.storeroom.get(call.ref(collection.kind)), collection)

    def _list_stored(self, call: Call) -> JsonObject:
        collection = COLLECTIONS[call.at["kind"]]
        room = self._parts.storeroom
        items = (room.view(stored, collection) for stored in room.list(call.ref(collection.kind, "-")))
        return self._lists.listed(call, f"{collection.wire}List", items)

    def _delete_stored(self, call: Call) -> JsonObject:
        ref = call.ref(call.at["kind"])
        return self._once(call, "delete", ref, lambda: self._parts.storeroom.delete(ref, call.request_id))

    def _get_policy(self, call: Call) -> JsonObject:
        return self._parts.policies.get(self._parts.storeroom.get(call.ref(call.at["kind"])).path)

    def _set_policy(self, call: Call) -> JsonObject:
        path = self._parts.storeroom.get(call.ref(call.at["kind"])).path
        return self._parts.policies.put(path, call.parsed(w.SetPolicy).policy)

    def _capacity(self, call: Call) -> JsonObject:
        return capacity(self._world, call.at["project"], call.at["region"], call.parsed(CapacityRequest))

    def _capacity_history(self, call: Call) -> JsonObject:
        return self._parts.advice.history(call.at["project"], call.at["region"], call.parsed(HistoryRequest))
