"""Compute Engine's REST, as far as it is built: from an HTTP request to the parts that know, and back.

Routing, bodies, filters, pages and Google's envelopes live here; no state and no decision does.
Everything that is not listed in ``_routes`` is a 501.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from spotkeeper.local import catalog, errors, masks
from spotkeeper.local import wire as w
from spotkeeper.local.advice import HistoryRequest
from spotkeeper.local.cloudparts import Parts
from spotkeeper.local.errors import ApiError
from spotkeeper.local.filters import Filter, FilterError
from spotkeeper.local.instances import KIND as INSTANCES
from spotkeeper.local.masks import MaskError
from spotkeeper.local.operations import KIND as OPERATIONS
from spotkeeper.local.operations import OpDoc
from spotkeeper.local.paths import Ref, parse
from spotkeeper.local.stored import COLLECTIONS
from spotkeeper.local.tokens import Principal
from spotkeeper.local.wire import BodyError, JsonObject, JsonValue, to_json

MAX_RESULTS = 500
T = TypeVar("T")


NEWEST = "creationTimestamp desc"


@dataclass(frozen=True)
class Call:
    """One request, taken apart. ``at``: the named parts of the path."""

    method: str
    path: str
    at: Mapping[str, str]
    query: Mapping[str, str]
    body: JsonValue

    @property
    def scope(self) -> str:
        """``zones/z``, ``regions/r`` or ``global``."""
        if "zone" in self.at:
            return f"zones/{self.at['zone']}"
        return f"regions/{self.at['region']}" if "region" in self.at else "global"

    def ref(self, kind: str, name: str = "") -> Ref:
        return Ref(self.at["project"], self.scope, kind, name or self.at.get("name", ""))

    @property
    def request_id(self) -> str | None:
        return self.query.get("requestId") or None

    def parsed(self, kind: type[T]) -> T:
        """
        Raises:
            ApiError: 400 for a body that is none of this kind, 501 for a field that is not built.
        """
        try:
            return w.parse(self.body, kind)
        except BodyError as bad:
            if bad.known is not None:
                raise errors.not_built(str(bad)) from None
            raise ApiError(400, "badRequest", str(bad)) from None


class Answer(NamedTuple):
    status: int
    body: JsonObject


Handler = Callable[[Call], JsonObject]
_ZONE = "/zones/(?P<zone>[^/]+)"
_REGION = "/regions/(?P<region>[^/]+)"
_NAME = "(?P<name>[^/]+)"


class ComputeApi:
    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._world = parts.world
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
            handler, call = self._find(method, path, query, _decode(body))
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
                return handler, Call(method, path, found.groupdict(), query, body)
        raise errors.not_built(f"{method} {path}")

    def _check_place(self, call: Call) -> None:
        project = call.at["project"]
        zone, region = call.at.get("zone"), call.at.get("region")
        if zone is not None and zone not in self._world.config.zones:
            raise errors.not_found(f"projects/{project}/zones/{zone}")
        if region is not None and region not in self._world.config.regions():
            raise errors.not_found(f"projects/{project}/regions/{region}")
        if zone is not None and self._parts.spot.override(zone).partitioned:
            raise errors.zone_down(zone)

    def _routes(self) -> Iterable[tuple[str, str, Handler]]:
        yield "GET", "", self._project
        yield from self._place_routes()
        yield from self._instance_routes()
        yield from self._disk_routes()
        for scope in (_ZONE, _REGION, "/global"):
            yield "GET", f"{scope}/operations", self._list_operations
            yield "GET", f"{scope}/operations/{_NAME}", self._get_operation
            yield "POST", f"{scope}/operations/{_NAME}/wait", self._get_operation  # the server waited already
        for collection in COLLECTIONS.values():
            for scope in collection.scopes:
                base = {"global": "/global", "regions": _REGION}[scope] + f"/(?P<kind>{collection.kind})"
                yield "POST", base, self._insert_stored
                yield "GET", base, self._list_stored
                yield "GET", f"{base}/{_NAME}", self._get_stored
                yield "DELETE", f"{base}/{_NAME}", self._delete_stored

    def _place_routes(self) -> Iterable[tuple[str, str, Handler]]:
        yield "GET", "/zones", lambda call: self._listed(call, "compute#zoneList", map(self._zone, self._zones()))
        yield "GET", f"/zones/{_NAME}", lambda call: self._one(self._zone, self._zones(), call)
        yield (
            "GET",
            "/regions",
            lambda call: self._listed(call, "compute#regionList", map(self._region, self._regions())),
        )
        yield "GET", f"/regions/{_NAME}", lambda call: self._one(self._region, self._regions(), call)
        yield "GET", f"{_ZONE}/machineTypes", self._list_machine_types
        yield "GET", f"{_ZONE}/machineTypes/{_NAME}", self._get_machine_type
        yield "GET", f"{_ZONE}/diskTypes/{_NAME}", self._get_disk_type
        yield "GET", f"/global/images/(?:family/)?{_NAME}", self._image
        yield "POST", f"{_REGION}/advice/capacityHistory", self._capacity_history

    def _instance_routes(self) -> Iterable[tuple[str, str, Handler]]:
        base, one = f"{_ZONE}/instances", f"{_ZONE}/instances/{_NAME}"
        parts = self._parts
        yield "POST", base, self._insert_instance
        yield "GET", base, self._list_instances
        yield "GET", "/aggregated/instances", self._aggregate_instances
        yield "GET", one, lambda call: to_json(parts.instances.get(call.ref(INSTANCES)).wire)
        yield "DELETE", one, self._on_instance("deleteInstance", parts.instances.delete)
        yield "POST", f"{one}/stop", self._on_instance("stop", parts.instances.stop)
        yield "POST", f"{one}/start", self._on_instance("start", parts.instances.start)
        yield "POST", f"{one}/simulateMaintenanceEvent", self._on_instance("simulateMaintenanceEvent", parts.simulate)
        yield "POST", f"{one}/attachDisk", self._attach
        yield "POST", f"{one}/detachDisk", self._detach
        yield "POST", f"{one}/setLabels", self._set_labels
        yield "POST", f"{one}/setMetadata", self._set_metadata
        yield "GET", f"{one}/serialPort", self._serial

    def _disk_routes(self) -> Iterable[tuple[str, str, Handler]]:
        disks = self._parts.disks
        base, one = f"{_ZONE}/disks", f"{_ZONE}/disks/{_NAME}"
        yield "POST", base, self._insert_disk
        yield "GET", base, self._list_disks
        yield "GET", "/aggregated/disks", self._aggregate_disks
        yield "GET", one, lambda call: to_json(disks.get(call.ref("disks")))
        yield "DELETE", one, self._delete_disk
        yield "POST", f"{one}/createSnapshot", self._create_snapshot
        yield "POST", f"{one}/setLabels", self._label_disk
        yield "GET", "/global/snapshots", self._list_snapshots
        yield "GET", f"/global/snapshots/{_NAME}", lambda call: to_json(disks.find_snapshot(call.ref("snapshots")))
        yield "DELETE", f"/global/snapshots/{_NAME}", self._delete_snapshot

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
        return self._listed(call, "compute#operationList", (to_json(doc.operation) for doc in docs))

    # Instances

    def _insert_instance(self, call: Call) -> JsonObject:
        body = call.parsed(w.InstanceBody)
        ref = call.ref(INSTANCES, self._named(body.name))
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
            return self._once(call, verb, self._parts.instances.get(ref).ref, lambda: start(ref, call.request_id))

        return handle

    def _seen(self, call: Call, ref: Ref, verb: str) -> OpDoc | None:
        """A replay after the VM is gone: by name the target is known, by id it is not any more."""
        try:
            target = self._parts.instances.get(ref).ref
        except ApiError:
            target = ref
        return self._parts.operations.replay(ref.project, call.request_id, target.path, verb)

    def _attach(self, call: Call) -> JsonObject:
        body = call.parsed(w.AttachedDisk)
        if call.query.get("forceAttach", "").lower() == "true":
            raise errors.invalid("forceAttach", "true", "Only regional disks can be force-attached.")
        handler = self._on_instance("attachDisk", lambda ref, rid: self._parts.instances.attach(ref, body, rid))
        return handler(call)

    def _detach(self, call: Call) -> JsonObject:
        device = call.query.get("deviceName")
        return self._on_instance("detachDisk", lambda ref, rid: self._parts.instances.detach(ref, device, rid))(call)

    def _set_labels(self, call: Call) -> JsonObject:
        body = call.parsed(w.SetLabels)
        return self._on_instance("setLabels", lambda ref, rid: self._parts.instances.set_labels(ref, body, rid))(call)

    def _set_metadata(self, call: Call) -> JsonObject:
        body = call.parsed(w.SetMetadata)
        handler = self._on_instance("setMetadata", lambda r, rid: self._parts.instances.set_metadata(r, body, rid))
        return handler(call)

    def _serial(self, call: Call) -> JsonObject:
        vm = self._parts.instances.get(call.ref(INSTANCES))
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
        vms = self._parts.instances.list(call.ref(INSTANCES).folder())
        return self._listed(call, "compute#instanceList", (to_json(vm.wire) for vm in vms))

    def _aggregate_instances(self, call: Call) -> JsonObject:
        vms = self._parts.instances.list(f"projects/{call.at['project']}/zones/")
        items = [(vm.zone, to_json(vm.wire)) for vm in vms]
        return self._aggregated(call, "compute#instanceAggregatedList", "instances", items)

    # Disks and snapshots

    def _insert_disk(self, call: Call) -> JsonObject:
        body = call.parsed(w.DiskBody)
        ref = call.ref("disks", self._named(body.name))
        return self._once(call, "insertDisk", ref, lambda: self._parts.disks.insert(ref, body, call.request_id))

    def _delete_disk(self, call: Call) -> JsonObject:
        ref = call.ref("disks")
        return self._once(call, "deleteDisk", ref, lambda: self._parts.disks.delete(ref, call.request_id))

    def _label_disk(self, call: Call) -> JsonObject:
        body, ref = call.parsed(w.SetLabels), call.ref("disks")
        return self._once(call, "setLabels", ref, lambda: self._parts.disks.set_labels(ref, body, call.request_id))

    def _list_disks(self, call: Call) -> JsonObject:
        disks = self._parts.disks.list(call.ref("disks").folder())
        return self._listed(call, "compute#diskList", map(to_json, disks))

    def _aggregate_disks(self, call: Call) -> JsonObject:
        disks = self._parts.disks.list(f"projects/{call.at['project']}/zones/")
        items = [(disk.zone.rsplit("/", 1)[-1], to_json(disk)) for disk in disks]
        return self._aggregated(call, "compute#diskAggregatedList", "disks", items)

    def _create_snapshot(self, call: Call) -> JsonObject:
        body, ref = call.parsed(w.SnapshotBody), call.ref("disks")

        def start() -> OpDoc:
            return self._parts.disks.create_snapshot(ref, body, call.request_id)

        return self._once(call, "createSnapshot", ref, start)

    def _list_snapshots(self, call: Call) -> JsonObject:
        found = self._parts.disks.snapshots(call.ref("snapshots").folder())
        return self._listed(call, "compute#snapshotList", map(to_json, found))

    def _delete_snapshot(self, call: Call) -> JsonObject:
        ref = call.ref("snapshots")
        return self._once(call, "deleteSnapshot", ref, lambda: self._parts.disks.delete_snapshot(ref, call.request_id))

    # What is only kept

    def _insert_stored(self, call: Call) -> JsonObject:
        collection = COLLECTIONS[call.at["kind"]]
        name = call.body.get("name") if isinstance(call.body, dict) else None
        ref = call.ref(collection.kind, self._named(name if isinstance(name, str) else None))

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
        return self._listed(call, f"{collection.wire}List", items)

    def _delete_stored(self, call: Call) -> JsonObject:
        ref = call.ref(call.at["kind"])
        return self._once(call, "delete", ref, lambda: self._parts.storeroom.delete(ref, call.request_id))

    # What the place offers

    def _zones(self) -> tuple[str, ...]:
        return self._world.config.zones

    def _regions(self) -> tuple[str, ...]:
        return self._world.config.regions()

    def _one(self, view: Callable[[str], JsonObject], known: tuple[str, ...], call: Call) -> JsonObject:
        if call.at["name"] not in known:
            raise errors.not_found(call.path)
        return view(call.at["name"])

    def _base(self, kind: str, path: str, name: str) -> JsonObject:
        return {
            "kind": kind,
            "id": str(int.from_bytes(name.encode()[-7:], "big")),
            "name": name,
            "creationTimestamp": "2020-01-01T00:00:00.000+00:00",
            "selfLink": self._world.self_link(path),
        }

    def _zone(self, name: str) -> JsonObject:
        project = f"projects/{self._world.config.project}"
        region = self._world.self_link(f"{project}/regions/{catalog.region_of(name)}")
        return self._base("compute#zone", f"{project}/zones/{name}", name) | {"status": "UP", "region": region}

    def _region(self, name: str) -> JsonObject:
        project = f"projects/{self._world.config.project}"
        zones = [z for z in self._zones() if catalog.region_of(z) == name]
        links: JsonValue = [self._world.self_link(f"{project}/zones/{zone}") for zone in zones]
        return self._base("compute#region", f"{project}/regions/{name}", name) | {"status": "UP", "zones": links}

    def _machine_type(self, call: Call, machine: catalog.MachineType) -> JsonObject:
        path = f"projects/{call.at['project']}/zones/{call.at['zone']}/machineTypes/{machine.name}"
        found = self._base("compute#machineType", path, machine.name) | {
            "guestCpus": machine.cpus,
            "memoryMb": machine.memory_mb,
            "zone": call.at["zone"],
            "maximumPersistentDisks": 128,
            "maximumPersistentDisksSizeGb": "263168",
            "isSharedCpu": False,
        }
        if machine.accelerator:
            extra = {"guestAcceleratorType": machine.accelerator, "guestAcceleratorCount": machine.accelerators}
            found["accelerators"] = [extra]  # type: ignore[list-item]
        return found

    def _list_machine_types(self, call: Call) -> JsonObject:
        items = (self._machine_type(call, machine) for machine in catalog.MACHINE_TYPES)
        return self._listed(call, "compute#machineTypeList", items)

    def _get_machine_type(self, call: Call) -> JsonObject:
        machine = catalog.machine_type(call.at["name"])
        if machine is None:
            raise errors.not_found(call.path)
        return self._machine_type(call, machine)

    def _get_disk_type(self, call: Call) -> JsonObject:
        if call.at["name"] not in catalog.DISK_TYPES:
            raise errors.not_found(call.path)
        zone = self._world.self_link(f"projects/{call.at['project']}/zones/{call.at['zone']}")
        return self._base("compute#diskType", call.path, call.at["name"]) | {"zone": zone, "defaultDiskSizeGb": "10"}

    def _image(self, call: Call) -> JsonObject:
        """Images hold nothing here: a VM runs this machine's own programs."""
        name = call.at["name"]
        path = f"projects/{call.at['project']}/global/images/{name}"
        return self._base("compute#image", path, name) | {"status": "READY", "diskSizeGb": "10", "family": name}

    def _project(self, call: Call) -> JsonObject:
        name = self._world.config.project
        return self._base("compute#project", f"projects/{name}", name) | {
            "defaultServiceAccount": catalog.DEFAULT_SERVICE_ACCOUNT,
            "commonInstanceMetadata": {"kind": "compute#metadata"},
        }

    def _capacity_history(self, call: Call) -> JsonObject:
        return self._parts.advice.history(call.at["project"], call.at["region"], call.parsed(HistoryRequest))

    # Lists

    def _named(self, name: str | None) -> str:
        from spotkeeper.local import validate

        return validate.name(name)

    def _page(self, call: Call, items: Iterable[JsonObject]) -> tuple[list[JsonObject], str | None]:
        """Filtered and cut; the token of the next page where there is one."""
        order = call.query.get("orderBy") or "name"
        if order not in ("name", NEWEST):
            raise errors.not_built(f"orderBy={order}")
        try:
            wanted = Filter.parse(call.query["filter"]) if call.query.get("filter") else None
        except FilterError as bad:
            raise ApiError(400, "invalid", str(bad)) from None
        found = [item for item in items if wanted is None or wanted.matches(item)]
        start, size = _token(call.query.get("pageToken")), _size(call.query.get("maxResults"))
        if order == NEWEST:
            found.sort(key=_age, reverse=True)
            after, key = [item for item in found if not start or _age(item) < start], _age
        else:
            after, key = [item for item in found if not start or str(item["selfLink"]) > start], _link
        more = len(after) > size
        return after[:size], _to_token(key(after[size - 1])) if more else None

    def _listed(self, call: Call, kind: str, items: Iterable[JsonObject]) -> JsonObject:
        page, token = self._page(call, sorted(items, key=lambda item: str(item["selfLink"])))
        out: JsonObject = {"kind": kind, "id": call.path, "selfLink": self._world.self_link(call.path)}
        if page:
            out["items"] = list(page)
        if token:
            out["nextPageToken"] = token
        return out

    def _aggregated(self, call: Call, kind: str, field: str, items: list[tuple[str, JsonObject]]) -> JsonObject:
        """By zone. A zone that does not answer says so in its warning, and is no empty zone."""
        down = [zone for zone in self._zones() if self._parts.spot.override(zone).partitioned]
        ordered = sorted((item for zone, item in items if zone not in down), key=lambda item: str(item["selfLink"]))
        page, token = self._page(call, ordered)
        scopes: JsonObject = {}
        for zone in self._zones():
            here: list[JsonValue] = [item for item in page if str(item["zone"]).rsplit("/", 1)[-1] == zone]
            scopes[f"zones/{zone}"] = {field: here} if here else {"warning": _warning(zone, zone in down)}
        out: JsonObject = {
            "kind": kind,
            "id": call.path,
            "items": scopes,
            "selfLink": self._world.self_link(call.path),
        }
        if down:
            out["unreachables"] = [f"zones/{zone}" for zone in down]
            out["warning"] = _warning(down[0], unreachable=True)
        if token:
            out["nextPageToken"] = token
        return out


def _warning(zone: str, unreachable: bool) -> JsonObject:
    scope: JsonValue = [{"key": "scope", "value": f"zones/{zone}"}]
    if unreachable:
        return {"code": "UNREACHABLE", "message": f"The scope 'zones/{zone}' is not reachable.", "data": scope}
    message = f"There are no results for scope 'zones/{zone}' on this page."
    return {"code": "NO_RESULTS_ON_PAGE", "message": message, "data": scope}


def _size(text: str | None) -> int:
    if not text:
        return MAX_RESULTS
    if not text.isdigit() or not 1 <= int(text) <= MAX_RESULTS:
        raise errors.invalid("maxResults", text, f"Must be between 1 and {MAX_RESULTS}.")
    return int(text)


def _to_token(link: str) -> str:
    return base64.urlsafe_b64encode(link.encode()).decode()


def _link(item: JsonObject) -> str:
    return str(item["selfLink"])


def _age(item: JsonObject) -> str:
    """Orders by birth; our timestamps are all of one zone, so their text orders as they do."""
    return f"{item.get('creationTimestamp') or item.get('insertTime') or ''} {item['selfLink']}"


def _token(text: str | None) -> str:
    if not text:
        return ""
    try:
        return base64.urlsafe_b64decode(text).decode()
    except ValueError:
        raise errors.invalid("pageToken", text, "The page token is malformed.") from None


def _decode(body: bytes) -> JsonValue:
    if not body.strip():
        return {}
    try:
        value: JsonValue = json.loads(body)
    except ValueError as error:
        raise ApiError(400, "parseError", f"Invalid JSON payload received. {error}") from None
    return value


__all__ = ["Answer", "Call", "ComputeApi"]
