"""``advice``: spot capacity, prices and preemption rates of the recorded market, in Compute Engine's format.

``capacityHistory``: prices of a region, at most a year back; daily preemption rates of a region or a zone, at most 30.
Custom types and N1 have none; the price of an N1 excludes its accelerators.

``capacity``: one score for all machines of a request, from 0 to 1, and an uptime of an hour or ten minutes. Here the
score is the share of the last day in which the zone had capacity for that many machines. The uptime is an hour if the
zone mostly still had that capacity an hour later. Both are a record, not a forecast. Several zones as one shape, other
models than spot, accelerators, local disks and ``calendarMode`` are not supported (501).

Source: https://cloud.google.com/compute/docs/reference/rest/v1/advice
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta, timezone

from msgspec import Struct

from spotkeeper.local.core import catalog, errors
from spotkeeper.local.core.errors import ApiError
from spotkeeper.local.core.rest import timestamp
from spotkeeper.local.core.schema import JsonObject, JsonValue
from spotkeeper.local.core.world import World

YEAR_S, DAY_S = 365 * 86_400.0, 86_400.0
DAYS = 30
PACIFIC = timezone(timedelta(hours=-8))  # where days of the preemption history begin, without daylight saving time
MAX_SIZE, MAX_TYPES = 1000, 5  # machines and machine types of a request
LONG_S, SHORT_S = 3600.0, 600.0  # the two uptimes that Google reports


class SpotScheduling(Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    provisioning_model: str | None = None


class HistoryProperties(Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    machine_type: str | None = None
    scheduling: SpotScheduling = SpotScheduling()
    guest_accelerators: list[JsonValue] = []  # parts of Google's schema, not built here
    disks: list[JsonValue] = []


class Location(Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    location: str | None = None


class HistoryRequest(Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    instance_properties: HistoryProperties = HistoryProperties()
    location_policy: Location = Location()
    types: tuple[str, ...] = ()


class CapacityProperties(Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    scheduling: SpotScheduling = SpotScheduling()


class InstanceSelection(Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    machine_types: tuple[str, ...] = ()
    guest_accelerators: list[JsonValue] = []  # parts of Google's schema, not built here
    disks: list[JsonValue] = []
    rank: str | None = None


class FlexibilityPolicy(Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    instance_selections: dict[str, InstanceSelection] = {}


class ZoneLink(Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    zone: str = ""


class DistributionPolicy(Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    target_shape: str | None = None
    zones: tuple[ZoneLink, ...] = ()


class CapacityRequest(Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    instance_properties: CapacityProperties = CapacityProperties()
    instance_flexibility_policy: FlexibilityPolicy = FlexibilityPolicy()
    distribution_policy: DistributionPolicy = DistributionPolicy()
    size: int | None = None


def history(world: World, project: str, region: str, body: HistoryRequest) -> JsonObject:
    """Answer a ``capacityHistory`` request.

    Raises:
        ApiError: 400 for an invalid request, 404 for an unknown machine type, 501 for a shape that is not built.
    """
    machine = _history_machine(project, region, body.instance_properties)
    place = _place(world, region, body.location_policy.location)
    types = _types(body.types)
    if "PRICE" in types and place != region:
        raise errors.invalid("locationPolicy.location", place, "Price history is of a region, not of a zone.")
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
        raise errors.not_built("capacity history of machines with added accelerators or local disks")
    if "custom" in name or name.startswith("n1-"):
        raise ApiError(400, "badRequest", f"Capacity history is not supported for machine type '{name}'.")
    return _sold(project, region, name)


def _sold(project: str, region: str, name: str) -> catalog.MachineType:
    found = catalog.machine_type(name)
    if found is None:
        raise errors.not_found(f"projects/{project}/regions/{region}/machineTypes/{name}")
    return found


def _place(world: World, region: str, location: str | None) -> str:
    """The name of the region or of one of its zones."""
    if not location:
        return region
    kind, _, name = location.rstrip("/").rpartition("/")
    known = [region] if kind.endswith("regions") else world.config.zones if kind.endswith("zones") else ()
    if name not in known or (name != region and catalog.region_of(name) != region):
        raise errors.invalid("locationPolicy.location", location, f"Want regions/{region} or a zone of it.")
    return name


def _types(types: tuple[str, ...]) -> tuple[str, ...]:
    if not types:
        raise errors.required("types")
    for kind in types:
        if kind not in ("PREEMPTION", "PRICE"):
            raise errors.invalid("types", kind, "Want PREEMPTION or PRICE.")
    return types


def _prices(world: World, machine: catalog.MachineType, zone: str) -> Iterator[JsonValue]:
    """Yield the prices of the last year, the newest last; its interval has no end yet."""
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
    """The last whole days before ``now``, oldest first."""
    today = datetime.fromtimestamp(now, PACIFIC).replace(hour=0, minute=0, second=0, microsecond=0)
    for back in range(DAYS, 0, -1):
        yield (today - timedelta(days=back)).timestamp(), (today - timedelta(days=back - 1)).timestamp()


def _money(usd: float) -> JsonValue:
    """Convert USD to ``google.type.Money``: whole units as a string of digits, the rest in 10^-9."""
    nanos = round(usd * 1e9)
    return {"currencyCode": "USD", "units": str(nanos // 10**9), "nanos": nanos % 10**9}


def capacity(world: World, project: str, region: str, body: CapacityRequest) -> JsonObject:
    """Answer a ``capacity`` request: one recommendation, the best of the named zones (default: all of the region).

    Raises:
        ApiError: 400 for an invalid request, 404 for an unknown machine type, 501 for a shape that is not built.
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
    """Return obtainability and uptime (seconds) from the zone's last day; None if that day was not recorded."""
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
        raise errors.not_built(f"capacity advice for {model} machines")
    selections = tuple(body.instance_flexibility_policy.instance_selections.values())
    types = tuple(name for one in selections for name in one.machine_types)
    if not types:
        raise errors.required("instanceFlexibilityPolicy.instanceSelections")
    if len(types) > MAX_TYPES:
        raise ApiError(400, "badRequest", f"At most {MAX_TYPES} machine types.")
    if len(types) > 1 or any(one.guest_accelerators or one.disks for one in selections):
        raise errors.not_built("capacity advice for several machine types, accelerators or local disks")
    return _sold(project, region, types[0]).name


def _zones(world: World, region: str, wanted: DistributionPolicy) -> list[str]:
    if wanted.target_shape not in (None, "ANY", "ANY_SINGLE_ZONE", "BALANCED"):
        raise errors.invalid("distributionPolicy.targetShape", wanted.target_shape, "Want a documented shape.")
    if wanted.target_shape != "ANY_SINGLE_ZONE":
        raise errors.not_built("capacity advice over several zones")
    known = [zone for zone in world.config.zones if catalog.region_of(zone) == region]
    named = [one.zone.rpartition("/")[2] for one in wanted.zones] or known
    for zone in named:
        if zone not in known:
            raise errors.invalid("distributionPolicy.zones[].zone", zone, f"Want a zone of {region}.")
    return named
