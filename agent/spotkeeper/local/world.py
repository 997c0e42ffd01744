"""What every part of the control plane shares: settings, clock, memory, market, and the timer loop.

The world knows nothing of VMs or disks; those register handlers for their kinds of timers here.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from msgspec import Struct

from spotkeeper.clock import Clock
from spotkeeper.local import catalog
from spotkeeper.local.catalog import Timing
from spotkeeper.local.market import Market
from spotkeeper.local.state import State, Timer

log = logging.getLogger("spotkeeper.local")

# A virtual day can hang on one real second: never sleep so long that a suspended laptop is noticed late.
MAX_SLEEP_S = 30.0
RETRY_S = 5.0


class Config(Struct, frozen=True):
    """``cloud.json`` in the cloud's folder: written once by ``up``, read by everything else."""

    uid: str  # marks every process of this cloud
    port: int  # the control plane's, on 127.0.0.1; the metadata servers', on the VMs' own addresses
    clock: str  # SPOTKEEPER_CLOCK
    market: str = "gcp-2025-10-h100"
    zones: tuple[str, ...] = catalog.ZONES
    seed: int = 0
    per_zone: int = 4
    calm_s: float = 0.0  # virtual; for so long from its start the market itself takes nothing away
    project: str = catalog.PROJECT
    timing: Timing = Timing()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def compute_endpoint(self) -> str:
        return f"{self.endpoint}/compute/v1"

    def regions(self) -> tuple[str, ...]:
        return tuple(sorted({catalog.region_of(zone) for zone in self.zones}))


Handler = Callable[[str], None]


@dataclass
class World:
    """One per control plane. ``folder`` holds everything the cloud ever writes."""

    folder: Path
    config: Config
    clock: Clock
    state: State
    market: Market
    handlers: dict[str, Handler] = field(default_factory=dict)
    rearm: Callable[[], None] = lambda: None

    @property
    def timing(self) -> Timing:
        return self.config.timing

    def now(self) -> float:
        return self.clock.now()

    def at(self, due: float, kind: str, arg: str) -> None:
        """A timer in the current transaction; ``kind`` must have a handler when it fires."""
        self.state.at(due, kind, arg)
        self.state.after(self.rearm)

    def soon(self, delay_s: float, kind: str, arg: str) -> None:
        self.at(self.now() + delay_s, kind, arg)

    def new_id(self) -> int:
        """A 64-bit id as Google's: unique, never reused, no order."""
        return (1 << 60) | secrets.randbits(60)

    def self_link(self, path: str) -> str:
        return f"{self.config.compute_endpoint}/{path}"


class TimerLoop:
    """Runs due timers, one transaction each; sleeps exactly until the next. No polling."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._wake = asyncio.Event()
        world.rearm = self._wake.set

    async def run(self) -> None:
        while True:
            self._wake.clear()
            delay = self._run_due()
            try:
                await asyncio.wait_for(self._wake.wait(), delay)
            except TimeoutError:
                continue

    def _run_due(self) -> float:
        """Run what is due; real seconds until the next."""
        world = self._world
        while True:
            timer = world.state.first_timer()
            if timer is None:
                return MAX_SLEEP_S
            wait_s = world.clock.real_s(timer.due - world.now())
            if wait_s > 0:
                return min(wait_s, MAX_SLEEP_S)
            self._fire(timer)

    def _fire(self, timer: Timer) -> None:
        world = self._world
        try:
            with world.state.transaction():
                world.state.drop_timer(timer)
                world.handlers[timer.kind](timer.arg)
        except OSError:
            # A full disk or a missing folder may pass: the same step again later, nothing of it was kept.
            log.exception("timer %s %s failed, again in %.0f virtual seconds", timer.kind, timer.arg, RETRY_S)
            with world.state.transaction():
                world.state.drop_timer(timer)
                world.state.at(world.now() + RETRY_S, timer.kind, timer.arg)
        except Exception:
            log.exception("timer %s %s failed for good: a bug of the one-machine cloud", timer.kind, timer.arg)
            with world.state.transaction():
                world.state.drop_timer(timer)
