"""Spot capacity: applies the recorded market and an operator's overrides.

A zone has capacity for a number of spot VMs. An insert beyond this number is a stockout; if capacity falls below the
number of running VMs, this module preempts randomly drawn ones. On-demand capacity is unlimited unless overridden.
"""

from __future__ import annotations

import logging
import random

import msgspec
from msgspec import Struct

from spotkeeper.local.core.vm import LocalVm, VmTable
from spotkeeper.local.core.world import World
from spotkeeper.local.spot_market.power import Power

log = logging.getLogger("spotkeeper.local")
KIND = "overrides"


class Override(Struct, frozen=True):
    """An operator's settings for a zone.

    ``spot``, ``on_demand``: its capacity in VMs; None: the market's (spot), or no limit (on-demand).
    """

    zone: str
    spot: int | None = None
    on_demand: int | None = None
    partitioned: bool = False  # the zone's API does not answer


class Spot:
    def __init__(self, world: World, machines: VmTable, power: Power) -> None:
        self._world = world
        self._machines = machines
        self._power = power
        self._random = random.Random(world.config.seed)  # noqa: S311 - a replay, not a secret
        world.handlers["market"] = self._step

    def begin(self) -> None:
        """Set the timer for the market's next change, if it is not set yet."""
        if not self._world.state.has_timer("market", ""):
            self._world.at(self._world.market.next_change(self._world.now()), "market", "")

    def override(self, zone: str) -> Override:
        return self._world.state.get(KIND, zone, Override) or Override(zone)

    def limit(self, zone: str, spot: bool) -> int | None:
        """The zone's capacity now; None: no limit."""
        override = self.override(zone)
        if not spot:
            return override.on_demand
        return override.spot if override.spot is not None else self._world.market.capacity(zone, self._world.now())

    def running(self, zone: str, spot: bool) -> list[LocalVm]:
        """Return the VMs that use capacity: all that start or run, except those with a notice or in a reservation."""
        states = ("PROVISIONING", "STAGING", "RUNNING", "REPAIRING")
        here = (vm for vm in self._machines.list() if vm.zone == zone and vm.spot is spot and vm.reservation is None)
        return [vm for vm in here if vm.accepted and not vm.preempted and vm.wire.status in states]

    def has_capacity(self, vm: LocalVm) -> bool:
        limit = self.limit(vm.zone, vm.spot)
        return limit is None or len(self.running(vm.zone, vm.spot)) < limit

    def set_capacity(self, zone: str, nodes: int | None, *, spot: bool = True, reclaim: bool = True) -> None:
        """Override the zone's capacity; None ends the override. ``reclaim``: preempt VMs in excess, with notice."""
        change = {"spot": nodes} if spot else {"on_demand": nodes}
        self._world.state.put(KIND, zone, msgspec.structs.replace(self.override(zone), **change))
        if reclaim and spot:
            self.reclaim(zone)

    def set_partition(self, zone: str, partitioned: bool) -> None:
        changed = msgspec.structs.replace(self.override(zone), partitioned=partitioned)
        self._world.state.put(KIND, zone, changed)

    def reclaim(self, zone: str) -> None:
        limit = self.limit(zone, spot=True)
        running = self.running(zone, spot=True)
        excess = len(running) - limit if limit is not None else 0
        for vm in self._random.sample(running, excess) if excess > 0 else ():
            log.info("zone %s has capacity for %s spot VMs: %s is preempted", zone, limit, vm.name)
            self._power.preempt(vm)

    def _step(self, _: str) -> None:
        for zone in self._world.config.zones:
            self.reclaim(zone)
        self.begin()
