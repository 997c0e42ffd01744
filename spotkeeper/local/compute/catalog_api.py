"""The read-only part of Compute Engine: zones, regions, machine and disk types, images, the project, advice.

The methods of ``advice`` answer with the spot capacity, prices and preemption rates of the recorded market.

``capacityHistory``: the prices of a region in the last year; the daily preemption rates of a region or a zone in the
last 30 days. Custom machine types and N1 have no history (400).

``capacity``: the chance (0 to 1) to get all machines of a request, and their expected uptime, an hour or ten minutes.
The chance is the share of the last day in which the zone had capacity for all of them. The uptime is an hour if, for at
least half of the moments with capacity, the zone also had capacity an hour later, otherwise ten minutes.
Distributions over several zones, machines other than spot, accelerators, local disks and ``calendarMode`` get 501.

Source of ``advice``: https://cloud.google.com/compute/docs/reference/rest/v1/advice
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from datetime import datetime, timedelta, timezone

from msgspec import field

from spotkeeper.local.compute.query import ListAnswers
from spotkeeper.local.core import catalog, errors
from spotkeeper.local.core.errors import ApiError
from spotkeeper.local.core.rest import NAME, REGION, ZONE, ApiCall, Route, parse_body, timestamp
from spotkeeper.local.core.schema import JsonObject, JsonValue, RequestPart
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
        yield "POST", f"{REGION}/advice/capacityHistory", self._capacity_history
        yield "POST", f"{REGION}/advice/capacity", self._capacity

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
        """Show an image. Any name exists. Images are empty here, since a VM runs the laptop's own programs."""
        name = call.at["name"]
        path = f"projects/{call.at['project']}/global/images/{name}"
        return self._base("compute#image", path, name) | {"status": "READY", "diskSizeGb": "10", "family": name}

    def _project(self, call: ApiCall) -> JsonObject:
        name = self._world.config.project
        return self._base("compute#project", f"projects/{name}", name) | {
            "defaultServiceAccount": catalog.DEFAULT_SERVICE_ACCOUNT,
            "commonInstanceMetadata": {"kind": "compute#metadata"},
        }

    def _capacity(self, call: ApiCall) -> JsonObject:
        body = parse_body(call.body, CapacityRequest)
        return capacity(self._world, call.at["project"], call.at["region"], body)

    def _capacity_history(self, call: ApiCall) -> JsonObject:
        body = parse_body(call.body, HistoryRequest)
        return history(self._world, call.at["project"], call.at["region"], body)


# -- advice

YEAR_S, DAY_S = 365 * 86_400.0, 86_400.0
DAYS = 30
PACIFIC = timezone(timedelta(hours=-8))  # where days of the preemption history begin, without daylight saving time
MAX_SIZE, MAX_TYPES = 1000, 5  # machines and machine types of a request
LONG_S, SHORT_S = 3600.0, 600.0  # the two uptimes that Google reports


class SpotScheduling(RequestPart, frozen=True):
    provisioning_model: str | None = None


class HistoryProperties(RequestPart, frozen=True):
    machine_type: str | None = None
    scheduling: SpotScheduling = SpotScheduling()
    guest_accelerators: tuple[JsonValue, ...] = ()  # parts of Google's schema, not built here
    disks: tuple[JsonValue, ...] = ()


class Location(RequestPart, frozen=True):
    location: str | None = None


class HistoryRequest(RequestPart, frozen=True):
    instance_properties: HistoryProperties = HistoryProperties()
    location_policy: Location = Location()
    types: tuple[str, ...] = ()


class CapacityProperties(RequestPart, frozen=True):
    scheduling: SpotScheduling = SpotScheduling()


class InstanceSelection(RequestPart, frozen=True):
    machine_types: tuple[str, ...] = ()
    guest_accelerators: tuple[JsonValue, ...] = ()  # parts of Google's schema, not built here
    disks: tuple[JsonValue, ...] = ()
    rank: str | None = None


class FlexibilityPolicy(RequestPart, frozen=True):
    instance_selections: dict[str, InstanceSelection] = field(default_factory=dict)


class ZoneLink(RequestPart, frozen=True):
    zone: str = ""


class DistributionPolicy(RequestPart, frozen=True):
    target_shape: str | None = None
    zones: tuple[ZoneLink, ...] = ()


class CapacityRequest(RequestPart, frozen=True):
    instance_properties: CapacityProperties = CapacityProperties()
    instance_flexibility_policy: FlexibilityPolicy = FlexibilityPolicy()
    distribution_policy: DistributionPolicy = DistributionPolicy()
    size: int | None = None


def history(world: World, project: str, region: str, body: HistoryRequest) -> JsonObject:
    """Answer a ``capacityHistory`` request.

    Raises:
        ApiError: 400 for an invalid request, 404 for an unknown machine type, 501 for an unsupported shape.
    """
    machine = _history_machine(project, region, body.instance_properties)
    place = _place(world, region, body.location_policy.location)
    types = _types(body.types)
    if "PRICE" in types and place != region:
        raise errors.invalid("locationPolicy.location", place, "A zone has no PRICE history; ask for its region.")
    kind = "regions" if place == region else "zones"
    location = world.self_link(f"projects/{project}/{kind}/{place}")
    out: JsonObject = {"location": location, "machineType": machine.name}
    zones = [zone for zone in world.config.zones if place in (zone, catalog.region_of(zone))]
    if "PRICE" in types:
        out["priceHistory"] = list(_prices(world, machine, zones[0]))
    if "PREEMPTION" in types:
        out["preemptionHistory"] = list(_preemptions(world, zones))
    return out


def _history_machine(project: str, region: str, properties: HistoryProperties) -> catalog.MachineType:
    name = properties.machine_type
    if not name:
        raise errors.required("instanceProperties.machineType")
    model = properties.scheduling.provisioning_model
    if model != "SPOT":
        field = "instanceProperties.scheduling.provisioningModel"
        raise errors.invalid(field, model, "Must be SPOT.") if model else errors.required(field)
    if properties.guest_accelerators or properties.disks:
        raise errors.not_built("there is no capacity history for added accelerators or local disks")
    if "custom" in name or name.startswith("n1-"):
        raise ApiError(400, "badRequest", f"Capacity history is not supported for machine type '{name}'.")
    return _sold(project, region, name)


def _sold(project: str, region: str, name: str) -> catalog.MachineType:
    found = catalog.machine_type(name)
    if found is None:
        raise errors.not_found(f"projects/{project}/regions/{region}/machineTypes/{name}")
    return found


def _place(world: World, region: str, location: str | None) -> str:
    """Return the region's name; if ``location`` is the path of a zone in this region, the zone's name."""
    if not location:
        return region
    kind, _, name = location.rstrip("/").rpartition("/")
    known = [region] if kind.endswith("regions") else world.config.zones if kind.endswith("zones") else ()
    if name not in known or (name != region and catalog.region_of(name) != region):
        raise errors.invalid("locationPolicy.location", location, f"Must be regions/{region} or a zone of this region.")
    return name


def _types(types: tuple[str, ...]) -> tuple[str, ...]:
    if not types:
        raise errors.required("types")
    for kind in types:
        if kind not in ("PREEMPTION", "PRICE"):
            raise errors.invalid("types", kind, "Must be PREEMPTION or PRICE.")
    return types


def _prices(world: World, machine: catalog.MachineType, zone: str) -> Iterator[JsonValue]:
    """Yield the prices of the last year, the newest last. The interval of the newest price has no end yet."""
    now = world.now()
    for start, end, share in world.market.price_runs(zone, now - YEAR_S, now):
        interval: JsonObject = {"startTime": timestamp(start)}
        if end < now:
            interval["endTime"] = timestamp(end)
        yield {"interval": interval, "listPrice": _money(machine.price * share)}


def _preemptions(world: World, zones: list[str]) -> Iterator[JsonValue]:
    for start, end in _days(world.now()):
        rates = [world.market.preempted(zone, start, end) for zone in zones]
        known = [rate for rate in rates if rate is not None]
        if known:
            interval: JsonValue = {"startTime": timestamp(start), "endTime": timestamp(end)}
            yield {"interval": interval, "preemptionRate": sum(known) / len(known)}


def _days(now: float) -> Iterator[tuple[float, float]]:
    today = datetime.fromtimestamp(now, PACIFIC).replace(hour=0, minute=0, second=0, microsecond=0)
    for back in range(DAYS, 0, -1):
        yield (today - timedelta(days=back)).timestamp(), (today - timedelta(days=back - 1)).timestamp()


def _money(usd: float) -> JsonValue:
    """Convert USD to ``google.type.Money``: whole units as a string of digits, the rest in 10^-9."""
    nanos = round(usd * 1e9)
    return {"currencyCode": "USD", "units": str(nanos // 10**9), "nanos": nanos % 10**9}


def capacity(world: World, project: str, region: str, body: CapacityRequest) -> JsonObject:
    """Answer a ``capacity`` request: one recommendation, the best of the named zones (default: all zones).

    Raises:
        ApiError: 400 for an invalid request, 404 for an unknown machine type, 501 for an unsupported shape.
    """
    size, machine = _size(body.size), _capacity_machine(project, region, body)
    zones = _zones(world, region, body.distribution_policy)
    known = [(*found, zone) for zone in zones if (found := _scores(world, zone, size)) is not None]
    if not known:
        return {"recommendations": []}
    share, uptime, zone = max(known)
    shard: JsonObject = {"zone": zone, "machineType": machine, "instanceCount": size, "provisioningModel": "SPOT"}
    scores: JsonObject = {"obtainability": round(share, 1), "estimatedUptime": f"{uptime:.0f}s"}
    return {"recommendations": [{"scores": scores, "shards": [shard]}]}


def _scores(world: World, zone: str, size: int) -> tuple[float, float] | None:
    """Return chance (0 to 1) and uptime (seconds) from a zone's last day; None if the day was not recorded."""
    now = world.now()
    carried = world.market.carried(zone, now - DAY_S, now, size)
    if not carried:
        return None
    ahead = max(1, round(LONG_S / world.market.gap_s))
    later = [two for one, two in zip(carried, carried[ahead:], strict=False) if one]
    return sum(carried) / len(carried), LONG_S if later and 2 * sum(later) >= len(later) else SHORT_S


def _size(size: int | None) -> int:
    if size is None:
        raise errors.required("size")
    if not 1 <= size <= MAX_SIZE:
        raise errors.invalid("size", str(size), f"Must be 1 to {MAX_SIZE}.")
    return size


def _capacity_machine(project: str, region: str, body: CapacityRequest) -> str:
    model = body.instance_properties.scheduling.provisioning_model
    if model is None:
        raise errors.required("instanceProperties.scheduling.provisioningModel")
    if model != "SPOT":
        raise errors.not_built(f"there is no capacity advice for {model} machines")
    selections = tuple(body.instance_flexibility_policy.instance_selections.values())
    types = tuple(name for one in selections for name in one.machine_types)
    if not types:
        raise errors.required("instanceFlexibilityPolicy.instanceSelections")
    if len(types) > MAX_TYPES:
        raise ApiError(400, "badRequest", f"At most {MAX_TYPES} machine types.")
    if len(types) > 1 or any(one.guest_accelerators or one.disks for one in selections):
        raise errors.not_built("capacity advice is for one machine type without accelerators or local disks")
    return _sold(project, region, types[0]).name


def _zones(world: World, region: str, wanted: DistributionPolicy) -> list[str]:
    if wanted.target_shape not in (None, "ANY", "ANY_SINGLE_ZONE", "BALANCED"):
        raise errors.invalid("distributionPolicy.targetShape", wanted.target_shape, "Want a documented shape.")
    if wanted.target_shape != "ANY_SINGLE_ZONE":
        raise errors.not_built("capacity advice is only for targetShape ANY_SINGLE_ZONE")
    known = [zone for zone in world.config.zones if catalog.region_of(zone) == region]
    named = [one.zone.rpartition("/")[2] for one in wanted.zones] or known
    for zone in named:
        if zone not in known:
            raise errors.invalid("distributionPolicy.zones[].zone", zone, f"Want a zone of {region}.")
    return named
