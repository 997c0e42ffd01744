"""Bills as the provider would: VMs from RUNNING to off, by the second, spot at the market's price; and egress.

On-demand prices come from the catalogue; the recorded market has spot prices as shares of on-demand prices. A spot VM
that is preempted in its first minute is free, as on Google Cloud.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from spotkeeper.local.core import catalog
from spotkeeper.local.core.world import World

KIND, TRANSFERS = "bills", "transfers"
FREE_S = 60.0


class Line(Struct, frozen=True):
    """A line of the bill: one run of one VM. ``end`` is None while it runs; times are virtual unix seconds."""

    vm: str
    vm_id: int
    zone: str
    machine: str
    spot: bool
    start: float
    end: float | None = None
    preempted: bool = False
    reserved: bool = False  # in a reservation, which is paid for without a VM, too: not on this bill


class Transfer(Struct, frozen=True):
    """A disk that was made of another region's snapshot, or a snapshot of another region's disk."""

    path: str
    bytes: int


class Bill(Struct, frozen=True):
    """The bill of a cloud, USD. ``on_demand_only``: the price of the same machine-hours on demand.

    ``egress``: transfers between regions, a part of ``spent``.
    """

    spent: float
    on_demand_only: float
    node_hours: float
    spot_hours: float
    egress: float = 0.0


class Billing:
    def __init__(self, world: World) -> None:
        self._world = world

    def begin(self, line: Line) -> None:
        self._world.state.put(KIND, f"{line.vm_id}/{line.start:020.3f}", line)

    def end(self, vm_id: int, preempted: bool) -> None:
        """Close this VM's open line."""
        for line in self._world.state.all(KIND, Line, f"{vm_id}/"):
            if line.end is None:
                closed = msgspec.structs.replace(line, end=self._world.now(), preempted=preempted)
                self._world.state.put(KIND, f"{vm_id}/{line.start:020.3f}", closed)

    def lines(self) -> list[Line]:
        return self._world.state.all(KIND, Line)

    def bill(self) -> Bill:
        now = self._world.now()
        spent = only = hours = spot_hours = 0.0
        for line in self.lines():
            end = line.end if line.end is not None else now
            if line.spot and line.preempted and end - line.start < FREE_S:
                continue
            duration = (end - line.start) / 3600.0
            full = 0.0 if line.reserved else self.on_demand(line.machine) * duration
            share = self._world.market.mean_price(line.zone, line.start, end) if line.spot else 1.0
            spent, only, hours = spent + full * share, only + full, hours + duration
            spot_hours += duration if line.spot else 0.0
        moved = sum(one.bytes for one in self._world.state.all(TRANSFERS, Transfer)) / 1e9 * catalog.EGRESS_USD_GB
        return Bill(spent + moved, only, hours, spot_hours, moved)

    def on_demand(self, machine: str) -> float:
        """The on-demand price of a machine type, USD per hour."""
        found = catalog.machine_type(machine)
        return found.price if found else 0.0

    def price(self, machine: str, zone: str, spot: bool) -> float:
        """The current price of a VM, USD per hour."""
        share = self._world.market.price(zone, self._world.now()) if spot else 1.0
        return self.on_demand(machine) * share
