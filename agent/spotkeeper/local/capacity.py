"""``advice.capacity``: whether spot machines are to be had in a zone, as its last day was recorded. It foresees none.

As Compute Engine has it: one score for all that a question names, from 0 to 1, and an uptime of an hour or of ten
minutes. Here: the share of the last day in which the zone carried so many machines, and whether it mostly still did
an hour later. Other shapes than one zone's, other models than spot, accelerators and local disks are not built (501).

Source: https://cloud.google.com/compute/docs/reference/rest/v1/advice/capacity
"""

from __future__ import annotations

from msgspec import Struct

from spotkeeper.local import catalog, errors
from spotkeeper.local.advice import Scheduling
from spotkeeper.local.errors import ApiError
from spotkeeper.local.wire import JsonObject, JsonValue
from spotkeeper.local.world import World

DAY_S = 86_400.0
MOST, TYPES = 1000, 5  # machines and machine types of a question
LONG_S, SHORT_S = 3600.0, 600.0  # the uptimes that Google tells


class Properties(Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    scheduling: Scheduling = Scheduling()


class Selection(Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    machine_types: tuple[str, ...] = ()
    guest_accelerators: list[JsonValue] = []  # known to Google, not built here
    disks: list[JsonValue] = []
    rank: str | None = None


class Flexibility(Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    instance_selections: dict[str, Selection] = {}


class ZoneOf(Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    zone: str = ""


class Distribution(Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    target_shape: str | None = None
    zones: tuple[ZoneOf, ...] = ()


class CapacityRequest(Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    instance_properties: Properties = Properties()
    instance_flexibility_policy: Flexibility = Flexibility()
    distribution_policy: Distribution = Distribution()
    size: int | None = None


def capacity(world: World, project: str, region: str, body: CapacityRequest) -> JsonObject:
    """The answer: one recommendation, the best of the zones that were named (all of the region's, where none is).

    Raises:
        ApiError: 400 for what is no such question, 404 for a machine type that is not sold, 501 for what is not built.
    """
    size, machine = _size(body.size), _machine(project, region, body)
    zones = _zones(world, region, body.distribution_policy)
    known = [(*scores, zone) for zone in zones if (scores := _scores(world, zone, size)) is not None]
    if not known:
        return {"recommendations": []}
    share, uptime, zone = max(known)
    shard: JsonObject = {"zone": zone, "machineType": machine, "instanceCount": size, "provisioningModel": "SPOT"}
    told: JsonObject = {"obtainability": round(share, 1), "estimatedUptime": f"{uptime:.0f}s"}
    return {"recommendations": [{"scores": told, "shards": [shard]}]}


def _scores(world: World, zone: str, size: int) -> tuple[float, float] | None:
    """Of the zone's last day; None where nothing of it was recorded."""
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
    if not 1 <= size <= MOST:
        raise errors.invalid("size", str(size), f"Must be 1 to {MOST}.")
    return size


def _machine(project: str, region: str, body: CapacityRequest) -> str:
    model = body.instance_properties.scheduling.provisioning_model
    if model is None:
        raise errors.required("instanceProperties.scheduling.provisioningModel")
    if model != "SPOT":
        raise errors.not_built(f"capacity advice for {model} machines")
    selections = tuple(body.instance_flexibility_policy.instance_selections.values())
    types = tuple(name for one in selections for name in one.machine_types)
    if not types:
        raise errors.required("instanceFlexibilityPolicy.instanceSelections")
    if len(types) > TYPES:
        raise ApiError(400, "badRequest", f"At most {TYPES} machine types.")
    if len(types) > 1 or any(one.guest_accelerators or one.disks for one in selections):
        raise errors.not_built("capacity advice for several machine types, accelerators or local disks")
    if catalog.machine_type(types[0]) is None:
        raise errors.not_found(f"projects/{project}/regions/{region}/machineTypes/{types[0]}")
    return types[0]


def _zones(world: World, region: str, wanted: Distribution) -> list[str]:
    if wanted.target_shape not in (None, "ANY", "ANY_SINGLE_ZONE", "BALANCED"):
        raise errors.invalid("distributionPolicy.targetShape", wanted.target_shape, "Want a shape that is documented.")
    if wanted.target_shape != "ANY_SINGLE_ZONE":
        raise errors.not_built("capacity advice over several zones")
    known = [zone for zone in world.config.zones if catalog.region_of(zone) == region]
    named = [one.zone.rpartition("/")[2] for one in wanted.zones] or known
    for zone in named:
        if zone not in known:
            raise errors.invalid("distributionPolicy.zones[].zone", zone, f"Want a zone of {region}.")
    return named
