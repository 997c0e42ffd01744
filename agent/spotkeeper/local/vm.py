"""What a VM is here, and the list of them all."""

from __future__ import annotations

from enum import Enum
from typing import Protocol

import msgspec
from msgspec import Struct

from spotkeeper.local import errors
from spotkeeper.local.paths import Ref
from spotkeeper.local.wire import Instance, Scheduling
from spotkeeper.local.world import World

KIND = "instances"


class Ending(str, Enum):
    """Why a VM stops. DELETE and a PREEMPT or EXPIRE whose termination action says so free the name and the disks."""

    NONE = ""
    PREEMPT = "preempt"
    EXPIRE = "expire"  # maxRunDuration
    DELETE = "delete"
    STOP = "stop"
    GUEST = "guest"  # it powered itself off
    CRASH = "crash"  # the host is gone and nothing restarts it
    STOCKOUT = "stockout"


class Vm(Struct, frozen=True):
    """``wire`` is what the API shows; the rest is how this machine plays it."""

    path: str
    project: str
    zone: str
    wire: Instance
    address: str
    machine: str
    accepted: bool = False  # capacity is taken
    boots: int = 0
    pid: int = 0
    started: int = 0
    preempted: bool = False
    notice_until: float | None = None
    maintenance: str = "NONE"
    maintenance_at: float = 0.0  # when it is announced for; 0: nothing is
    ending: Ending = Ending.NONE
    ops: tuple[str, ...] = ()  # operations that end when the VM is off or gone
    insert_op: str = ""

    @property
    def name(self) -> str:
        return self.wire.name

    @property
    def id(self) -> int:
        return self.wire.id

    @property
    def spot(self) -> bool:
        return self.scheduling.spot

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
    """The VMs' metadata addresses."""

    def open(self, path: str, address: str) -> None: ...
    def close(self, path: str) -> None: ...
    def changed(self, path: str) -> None: ...


class Machines:
    """All VMs, as the state has them. ``sites`` is told of every change."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.sites: Sites

    def find(self, path: str) -> Vm | None:
        return self._world.state.get(KIND, path, Vm)

    def list(self, prefix: str = "projects/") -> list[Vm]:
        return self._world.state.all(KIND, Vm, prefix)

    def get(self, ref: Ref) -> Vm:
        """By name or numeric id.

        Raises:
            ApiError: 404.
        """
        found = self.find(ref.path)
        if found is None and ref.name.isdigit():
            found = next((vm for vm in self.list(ref.folder()) if vm.id == int(ref.name)), None)
        if found is None:
            raise errors.not_found(ref.path)
        return found

    def find_by_name(self, name: str) -> Vm | None:
        """Across zones, by name or id: what people type."""
        return next((vm for vm in self.list() if name in (vm.name, str(vm.id))), None)

    def add(self, vm: Vm) -> None:
        self._world.state.put(KIND, vm.path, vm)
        self._world.state.after(lambda: self.sites.open(vm.path, vm.address))

    def put(self, vm: Vm, **changes: object) -> Vm:
        changed = msgspec.structs.replace(vm, **changes)
        self._world.state.put(KIND, vm.path, changed)
        self._world.state.after(lambda: self.sites.changed(vm.path))
        return changed

    def show(self, vm: Vm, status: str, **changes: object) -> Vm:
        """``changes``: of what the API shows."""
        return self.put(vm, wire=msgspec.structs.replace(vm.wire, status=status, **changes))

    def remove(self, vm: Vm) -> None:
        self._world.state.delete(KIND, vm.path)
        self._world.state.after(lambda: self.sites.close(vm.path))
