"""What machines cost, as the provider would bill them: from RUNNING to off, by the second, spot at the market's price.

Sources: on-demand prices of the catalogue; spot prices, shares of those, from the recorded market.
A spot VM taken in its first minute is free, as Google has it.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from spotkeeper.local import catalog
from spotkeeper.local.world import World

KIND = "bills"
FREE_S = 60.0


class Line(Struct, frozen=True):
    """One stretch of one VM being on. ``end`` is None while it runs; times are virtual."""

    vm: str
    vm_id: int
    zone: str
    machine: str
    spot: bool
    start: float
    end: float | None = None
    preempted: bool = False


class Bill(Struct, frozen=True):
    """USD; ``on_demand_only``: what the same node-hours would have cost on demand."""

    spent: float
    on_demand_only: float
    node_hours: float
    spot_hours: float


class Billing:
    def __init__(self, world: World) -> None:
        self._world = world

    def begin(self, line: Line) -> None:
        self._world.state.put(KIND, f"{line.vm_id}/{line.start:020.3f}", line)

    def end(self, vm_id: int, preempted: bool) -> None:
        """Close what is open of this VM."""
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
            full = self.on_demand(line.machine) * duration
            share = self._world.market.mean_price(line.zone, line.start, end) if line.spot else 1.0
            spent, only, hours = spent + full * share, only + full, hours + duration
            spot_hours += duration if line.spot else 0.0
        return Bill(spent, only, hours, spot_hours)

    def on_demand(self, machine: str) -> float:
        """USD per hour."""
        found = catalog.machine_type(machine)
        return found.price if found else 0.0

    def price(self, machine: str, zone: str, spot: bool) -> float:
        """USD per hour, now."""
        share = self._world.market.price(zone, self._world.now()) if spot else 1.0
        return self.on_demand(machine) * share
