"""A VM of this cloud, and the table of all VMs."""

from __future__ import annotations

from enum import Enum
from typing import Protocol

import msgspec
from msgspec import Struct

from spotkeeper.local.core import errors
from spotkeeper.local.core.rest import Ref, last
from spotkeeper.local.core.schema import Instance, Scheduling
from spotkeeper.local.core.world import World

KIND = "instances"
RESERVATIONS = "reservations"


class Ending(str, Enum):
    """The reason why a VM stops.

    DELETE frees the VM's name and disks. PREEMPT and EXPIRE do so too if the VM's termination action is DELETE.
    """

    NONE = ""
    PREEMPT = "preempt"
    EXPIRE = "expire"  # maxRunDuration
    DELETE = "delete"
    STOP = "stop"
    GUEST = "guest"  # the guest powered off
    CRASH = "crash"  # the host failed, without automatic restart
    STOCKOUT = "stockout"


class LocalVm(Struct, frozen=True):
    """A VM. ``wire`` is the instance that the API shows; the other fields are internal."""

    path: str
    project: str
    zone: str
    wire: Instance
    address: str
    accepted: bool = False  # the VM counts against the zone's capacity
    boots: int = 0
    pid: int = 0
    started: int = 0
    preempted: bool = False
    notice_until: float | None = None
    maintenance: str = "NONE"
    maintenance_at: float = 0.0  # announced time of maintenance; 0: none
    ending: Ending = Ending.NONE
    ops: tuple[str, ...] = ()  # operations that end when the VM is off or deleted
    insert_op: str = ""

    @property
    def name(self) -> str:
        return self.wire.name

    @property
    def id(self) -> int:
        return self.wire.id

    @property
    def machine(self) -> str:
        """The machine type's name."""
        return last(self.wire.machine_type or "")

    @property
    def spot(self) -> bool:
        return self.scheduling.spot

    @property
    def reservation(self) -> Ref | None:
        """The reservation that it uses; None: none."""
        name = self.wire.reservation_affinity.reservation if self.wire.reservation_affinity is not None else None
        return Ref(self.project, f"zones/{self.zone}", RESERVATIONS, name) if name is not None else None

    @property
    def scheduling(self) -> Scheduling:
        return self.wire.scheduling or Scheduling()

    @property
    def deletes_itself(self) -> bool:
        return self.scheduling.instance_termination_action == "DELETE"

    @property
    def ref(self) -> Ref:
        return Ref(self.project, f"zones/{self.zone}", KIND, self.name)


class Quota(Struct, frozen=True):
    instances: int


class Sites(Protocol):
    """Opens and closes the VMs' metadata servers."""

    def open(self, path: str, address: str) -> None: ...
    def close(self, path: str) -> None: ...
    def changed(self, path: str) -> None: ...


class VmTable:
    """The table of all VMs, stored in the database. It tells ``sites``, the metadata servers, of every change."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.sites: Sites

    def find(self, path: str) -> LocalVm | None:
        return self._world.state.get(KIND, path, LocalVm)

    def list(self, prefix: str = "projects/") -> list[LocalVm]:
        return self._world.state.all(KIND, LocalVm, prefix)

    def get(self, ref: Ref) -> LocalVm:
        """Find a VM by name or numeric id; ApiError 404 if it does not exist."""
        found = self.find(ref.path)
        if found is None and ref.name.isdecimal():
            found = next((vm for vm in self.list(ref.folder()) if str(vm.id) == ref.name), None)
        if found is None:
            raise errors.not_found(ref.path)
        return found

    def find_by_name(self, name: str) -> LocalVm | None:
        """Find a VM in any zone by name or id."""
        return next((vm for vm in self.list() if name in (vm.name, str(vm.id))), None)

    def add(self, vm: LocalVm) -> None:
        self._world.state.put(KIND, vm.path, vm)
        self._world.state.after(lambda: self.sites.open(vm.path, vm.address))

    def put(self, vm: LocalVm, **changes: object) -> LocalVm:
        changed = msgspec.structs.replace(vm, **changes)
        self._world.state.put(KIND, vm.path, changed)
        self._world.state.after(lambda: self.sites.changed(vm.path))
        return changed

    def show(self, vm: LocalVm, status: str, **changes: object) -> LocalVm:
        """Change the status and fields of the instance that the API shows."""
        return self.put(vm, wire=msgspec.structs.replace(vm.wire, status=status, **changes))

    def remove(self, vm: LocalVm) -> None:
        self._world.state.delete(KIND, vm.path)
        self._world.state.after(lambda: self.sites.close(vm.path))
