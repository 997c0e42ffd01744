"""Reservations: VMs set aside for inserts that name their reservation (``reservationAffinity``).

This cloud has only reservations that must be named (``specificReservationRequired``), so no other VM uses one up.
"""

from __future__ import annotations

from collections.abc import Iterator

from spotkeeper.local.compute.stored import StoredResource, StoredResources
from spotkeeper.local.core import errors
from spotkeeper.local.core.rest import Ref, last, parse_ref
from spotkeeper.local.core.schema import InstanceProperties
from spotkeeper.local.core.views import ReservationView
from spotkeeper.local.core.vm import RESERVATIONS, LocalVm, VmTable

_STATES = ("PROVISIONING", "STAGING", "RUNNING", "REPAIRING")


class Reservations:
    def __init__(self, stored: StoredResources, machines: VmTable) -> None:
        self._stored = stored
        self._machines = machines

    def check(self, ref: Ref, properties: InstanceProperties) -> None:
        """Refuse (ApiError 400) an insert that names a missing reservation, or one for other VMs."""
        affinity = properties.reservation_affinity
        if affinity is None or affinity.reservation is None:
            return
        at = "resource.reservationAffinity"
        if properties.scheduling is not None and properties.scheduling.spot:
            raise errors.invalid(at, affinity.reservation, "Spot VMs cannot consume reservations.")
        stored = self._stored.find(Ref(ref.project, ref.scope, RESERVATIONS, affinity.reservation))
        if stored is None:
            raise errors.invalid(at, affinity.reservation, "Specified reservations do not exist.")
        if _machine_type(stored) != (properties.machine_type or "").rsplit("/", 1)[-1]:
            raise errors.invalid(at, affinity.reservation, "The VM does not match the properties of the reservation.")

    def has_room(self, vm: LocalVm) -> bool:
        """Whether the VM's reservation has a VM left for it."""
        stored = None if vm.reservation is None else self._stored.find(vm.reservation)
        return stored is not None and self._used(vm.reservation) < _count(stored)

    def _used(self, ref: Ref | None) -> int:
        found = [one for one in self._machines.list() if one.accepted and one.reservation == ref]
        return sum(one.wire.status in _STATES for one in found)

    def views(self) -> Iterator[ReservationView]:
        for stored in self._stored.every(RESERVATIONS):
            ref = parse_ref(stored.path, "")
            if ref is not None:
                machine, zone = str(_machine_type(stored)), last(ref.scope)
                yield ReservationView(ref.name, zone, machine, self._used(ref), _count(stored))


def _specific(stored: StoredResource) -> dict[str, object]:
    found = stored.body.get("specificReservation")
    return dict(found) if isinstance(found, dict) else {}


def _count(stored: StoredResource) -> int:
    return int(str(_specific(stored).get("count", 0)))


def _machine_type(stored: StoredResource) -> object:
    properties = _specific(stored).get("instanceProperties")
    return properties.get("machineType") if isinstance(properties, dict) else None
