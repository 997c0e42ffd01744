"""``advice.capacityHistory``: what spot machines cost and how often they were taken, as the market was recorded.

As Compute Engine has it: prices are a region's, at most a year back; preemption rates a day each, at most 30,
of a region or one zone. It has no history of custom types and none of N1, whose price says nothing of the
accelerators it may carry. ``capacity`` is in ``capacity.py``; ``calendarMode`` is not built (501).

Source: https://cloud.google.com/compute/docs/reference/rest/v1/advice/capacityHistory
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta, timezone

from msgspec import Struct

from spotkeeper.local import catalog, errors
from spotkeeper.local.errors import ApiError
from spotkeeper.local.paths import timestamp
from spotkeeper.local.wire import JsonObject, JsonValue
from spotkeeper.local.world import World

YEAR_S = 365 * 86400.0
DAYS = 30
PACIFIC = timezone(timedelta(hours=-8))  # where days of the preemption history begin (summer time left out)


class Scheduling(Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    provisioning_model: str | None = None


class Properties(Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    machine_type: str | None = None
    scheduling: Scheduling = Scheduling()
    guest_accelerators: list[JsonValue] = []  # known to Google, not built here
    disks: list[JsonValue] = []


class Location(Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    location: str | None = None


class HistoryRequest(Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    instance_properties: Properties = Properties()
    location_policy: Location = Location()
    types: tuple[str, ...] = ()


class Advice:
    def __init__(self, world: World) -> None:
        self._world = world

    def history(self, project: str, region: str, body: HistoryRequest) -> JsonObject:
        """The answer.

        Raises:
            ApiError: 400 for what is no such question, 404 for a machine type that is not sold.
        """
        machine = self._machine(project, region, body.instance_properties)
        place = self._place(project, region, body.location_policy.location)
        types = _types(body.types)
        if "PRICE" in types and place != region:
            raise errors.invalid("locationPolicy.location", place, "Price history is of a region, not of a zone.")
        kind = "regions" if place == region else "zones"
        out: JsonObject = {
            "location": self._world.self_link(f"projects/{project}/{kind}/{place}"),
            "machineType": machine.name,
        }
        zones = [zone for zone in self._world.config.zones if place in (zone, catalog.region_of(zone))]
        if "PRICE" in types:
            out["priceHistory"] = list(self._prices(machine, zones[0]))
        if "PREEMPTION" in types:
            out["preemptionHistory"] = list(self._preemptions(zones))
        return out

    def _machine(self, project: str, region: str, properties: Properties) -> catalog.MachineType:
        name = properties.machine_type
        if not name:
            raise errors.required("instanceProperties.machineType")
        model = properties.scheduling.provisioning_model
        if model != "SPOT":
            field = "instanceProperties.scheduling.provisioningModel"
            raise errors.invalid(field, model, "Must be SPOT.") if model else errors.required(field)
        if properties.guest_accelerators or properties.disks:
            raise errors.not_built("capacity history of machines with accelerators or local disks of their own")
        if "custom" in name or name.startswith("n1-"):
            raise ApiError(400, "badRequest", f"Capacity history is not supported for machine type '{name}'.")
        found = catalog.machine_type(name)
        if found is None:
            raise errors.not_found(f"projects/{project}/regions/{region}/machineTypes/{name}")
        return found

    def _place(self, project: str, region: str, location: str | None) -> str:
        """A region or one of its zones, by name."""
        if not location:
            return region
        kind, _, name = location.rstrip("/").rpartition("/")
        known = [region] if kind.endswith("regions") else self._world.config.zones if kind.endswith("zones") else ()
        if name not in known or (name != region and catalog.region_of(name) != region):
            raise errors.invalid("locationPolicy.location", location, f"Want regions/{region} or a zone of it.")
        return name

    def _prices(self, machine: catalog.MachineType, zone: str) -> Iterator[JsonValue]:
        """The newest one last; its interval has no end yet."""
        now = self._world.now()
        for start, end, share in self._world.market.price_runs(zone, now - YEAR_S, now):
            interval: JsonObject = {"startTime": timestamp(start)}
            if end < now:
                interval["endTime"] = timestamp(end)
            yield {"interval": interval, "listPrice": _money(machine.price * share)}

    def _preemptions(self, zones: list[str]) -> Iterator[JsonValue]:
        for start, end in _days(self._world.now()):
            rates = [self._world.market.preempted(zone, start, end) for zone in zones]
            known = [rate for rate in rates if rate is not None]
            if known:
                interval: JsonValue = {"startTime": timestamp(start), "endTime": timestamp(end)}
                yield {"interval": interval, "preemptionRate": sum(known) / len(known)}


def _types(types: tuple[str, ...]) -> tuple[str, ...]:
    if not types:
        raise errors.required("types")
    for kind in types:
        if kind not in ("PREEMPTION", "PRICE"):
            raise errors.invalid("types", kind, "Want PREEMPTION or PRICE.")
    return types


def _days(now: float) -> Iterator[tuple[float, float]]:
    """The whole days before this moment, the oldest first."""
    today = datetime.fromtimestamp(now, PACIFIC).replace(hour=0, minute=0, second=0, microsecond=0)
    for back in range(DAYS, 0, -1):
        yield (today - timedelta(days=back)).timestamp(), (today - timedelta(days=back - 1)).timestamp()


def _money(usd: float) -> JsonValue:
    """``google.type.Money``: whole units as digits in a string, the rest in 10^-9."""
    nanos = round(usd * 1e9)
    return {"currencyCode": "USD", "units": str(nanos // 10**9), "nanos": nanos % 10**9}
