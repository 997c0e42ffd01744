"""Answers and requests of ``/local/v1``, shared by the server, the command and the demo."""

from __future__ import annotations

from msgspec import Struct

from spotkeeper.local.spot_market.bill import Bill, Line


class VmView(Struct, frozen=True):
    """A VM as ``status`` shows it. ``notice_until``: the virtual time at which its preemption notice ends."""

    name: str
    id: str
    zone: str
    model: str  # "spot" | "on-demand" | "reserved"
    machine: str
    status: str
    address: str
    labels: dict[str, str]
    created: str
    price: float  # USD per hour, now
    preempted: bool = False
    notice_until: float | None = None
    pid: int = 0
    root: str = ""
    serial: str = ""


class DiskView(Struct, frozen=True):
    name: str
    zone: str
    size_gb: int
    status: str
    users: tuple[str, ...]
    labels: dict[str, str]


class ZoneView(Struct, frozen=True):
    """A zone as ``status`` shows it. ``capacity``: for spot VMs, now; ``overridden``: the operator set the capacity."""

    zone: str
    capacity: int | None
    running: int
    on_demand_running: int
    overridden: bool
    partitioned: bool
    spot_price_share: float  # of the on-demand price


class ReservationView(Struct, frozen=True):
    """A reservation as ``status`` shows it: for ``count`` VMs of a machine type, of which ``used`` run."""

    name: str
    zone: str
    machine: str
    used: int
    count: int


class FunctionView(Struct, frozen=True):
    name: str
    url: str
    pid: int
    restarts: int
    log: str


class Status(Struct, frozen=True):
    now: float
    scale: float
    endpoint: str
    vms: tuple[VmView, ...]
    disks: tuple[DiskView, ...]
    zones: tuple[ZoneView, ...]
    functions: tuple[FunctionView, ...]
    bill: Bill
    resources: dict[str, tuple[str, ...]] = {}
    reservations: tuple[ReservationView, ...] = ()


class BillView(Struct, frozen=True):
    bill: Bill
    lines: tuple[Line, ...]


class Preempt(Struct, frozen=True, forbid_unknown_fields=True):
    notice: bool = True


class Maintenance(Struct, frozen=True, forbid_unknown_fields=True):
    event: str = "NONE"  # | TERMINATE_ON_HOST_MAINTENANCE | MIGRATE_ON_HOST_MAINTENANCE
    in_s: float | None = None  # virtual seconds from now to the announced window


class SetCapacity(Struct, frozen=True, forbid_unknown_fields=True):
    """A request that a zone has capacity for ``nodes`` VMs of the provisioning model ``model``.

    If ``nodes`` is None, the capacity is no longer set: for spot it follows the market, for on-demand it is unlimited.
    """

    zone: str
    nodes: int | None = None
    model: str = "spot"
    reclaim: bool = True


class SetPartition(Struct, frozen=True, forbid_unknown_fields=True):
    zone: str
    partitioned: bool = True


class SetQuota(Struct, frozen=True, forbid_unknown_fields=True):
    zone: str
    instances: int
