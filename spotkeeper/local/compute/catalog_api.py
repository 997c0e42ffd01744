"""The read-only part of Compute Engine: zones, regions, machine and disk types, images, the project."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from spotkeeper.local.compute.query import ListAnswers
from spotkeeper.local.core import catalog, errors
from spotkeeper.local.core.rest import NAME, ZONE, ApiCall, Route
from spotkeeper.local.core.schema import JsonObject, JsonValue
from spotkeeper.local.core.world import World


class CatalogApi:
    def __init__(self, world: World, lists: ListAnswers) -> None:
        self._world = world
        self._lists = lists

    def routes(self) -> Iterable[Route]:
        yield "GET", "", self._project
        yield "GET", "/zones", self._list_zones
        yield "GET", f"/zones/{NAME}", lambda call: self._one(self._zone, self._zones(), call)
        yield "GET", "/regions", self._list_regions
        yield "GET", f"/regions/{NAME}", lambda call: self._one(self._region, self._regions(), call)
        yield "GET", f"{ZONE}/machineTypes", self._list_machine_types
        yield "GET", f"{ZONE}/machineTypes/{NAME}", self._get_machine_type
        yield "GET", f"{ZONE}/diskTypes/{NAME}", self._get_disk_type
        yield "GET", f"/global/images/(?:family/)?{NAME}", self._image

    def _zones(self) -> tuple[str, ...]:
        return self._world.config.zones

    def _regions(self) -> tuple[str, ...]:
        return self._world.config.regions()

    def _list_zones(self, call: ApiCall) -> JsonObject:
        return self._lists.listed(call, "compute#zoneList", map(self._zone, self._zones()))

    def _list_regions(self, call: ApiCall) -> JsonObject:
        return self._lists.listed(call, "compute#regionList", map(self._region, self._regions()))

    def _one(self, view: Callable[[str], JsonObject], known: tuple[str, ...], call: ApiCall) -> JsonObject:
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

    def _machine_type(self, call: ApiCall, machine: catalog.MachineType) -> JsonObject:
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

    def _list_machine_types(self, call: ApiCall) -> JsonObject:
        items = (self._machine_type(call, machine) for machine in catalog.MACHINE_TYPES)
        return self._lists.listed(call, "compute#machineTypeList", items)

    def _get_machine_type(self, call: ApiCall) -> JsonObject:
        machine = catalog.machine_type(call.at["name"])
        if machine is None:
            raise errors.not_found(call.path)
        return self._machine_type(call, machine)

    def _get_disk_type(self, call: ApiCall) -> JsonObject:
        if call.at["name"] not in catalog.DISK_TYPES:
            raise errors.not_found(call.path)
        zone = self._world.self_link(f"projects/{call.at['project']}/zones/{call.at['zone']}")
        return self._base("compute#diskType", call.path, call.at["name"]) | {"zone": zone, "defaultDiskSizeGb": "10"}

    def _image(self, call: ApiCall) -> JsonObject:
        """Show an image. Every name exists and is empty: a VM runs this machine's own programs."""
        name = call.at["name"]
        path = f"projects/{call.at['project']}/global/images/{name}"
        return self._base("compute#image", path, name) | {"status": "READY", "diskSizeGb": "10", "family": name}

    def _project(self, call: ApiCall) -> JsonObject:
        name = self._world.config.project
        return self._base("compute#project", f"projects/{name}", name) | {
            "defaultServiceAccount": catalog.DEFAULT_SERVICE_ACCOUNT,
            "commonInstanceMetadata": {"kind": "compute#metadata"},
        }
