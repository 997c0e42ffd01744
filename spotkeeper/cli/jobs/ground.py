"""What a forecast is based on: a stack (running, declared in a file, or recorded), and the reports of earlier jobs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from spotkeeper.client import find_target
from spotkeeper.client.errors import CliError
from spotkeeper.client.lookup import earlier, starts_of
from spotkeeper.contract.job import JobSpec
from spotkeeper.contract.market import Network, Prices
from spotkeeper.contract.parse.jobfile import read_job
from spotkeeper.contract.stack import PoolState, Price, StackState
from spotkeeper.reconcile.store.documents import CorruptError
from spotkeeper.reconcile.store.store import Store
from spotkeeper.report.forecast.compare import GangShape, Networks, measured
from spotkeeper.report.money.money import attempts

if TYPE_CHECKING:
    from infra.settings.model import Settings

H100_USD = 11.061  # on-demand price of an hour of a3-highgpu-1g in us-central1, the machine of the shipped recording
H100_SPOT = 0.23  # its spot price there, as a share of the on-demand price
NO_STACK = (
    f"no stack is named, so this uses zones and prices (${H100_USD:.2f}/h on-demand, spot {100 * H100_SPOT:.0f} % of "
    "that) of the shipped recording (a3-highgpu-1g, October 2025)"
)


@dataclass
class Ground:
    """The stack that a forecast is for, and its history as far as it is known.

    ``named``: whether the user named a stack, so that the job file is checked against it. ``said``: assumptions, a line
    each. ``scale``: the speed of the stack's clock, as a multiple of real time.
    """

    stack: StackState
    store: Store | None = None
    prices: dict[str, Prices] = field(default_factory=dict)
    now: float = 0.0
    said: list[str] = field(default_factory=list)
    named: bool = True
    scale: float = 1.0

    @cached_property
    def starts(self) -> Callable[[JobSpec], float]:
        """A function that returns how many seconds a start of a job takes."""
        return starts_of(self.store, self.stack, self.now, self.scale)

    @cached_property
    def networks(self) -> tuple[Network, ...]:
        """The network speeds that jobs of the stack measured between their machines."""
        return () if self.store is None else self.store.read_networks()

    @cached_property
    def ran(self) -> Callable[[str], Ran | None]:
        return cache(partial(ran, self.store, self.stack))

    def job(self, file: Path) -> JobSpec:
        """Read a job file and check it against the stack; SpecError with all its problems."""
        stack = self.stack if self.named else None
        return read_job(file, stack, self.now, self.starts)


def ground(stack: str | None, stack_file: Path | None) -> Ground:
    """Return the stack for a forecast.

    With ``stack_file``, this is the stack that the file declares; without, the running stack with its history. If no
    stack runs and the user has named none, it is a stack made from the shipped recording.

    Raises:
        SpecError, CliError: the named stack is invalid or missing.
    """
    if stack_file is not None:
        return of_settings(stack_file, stack)
    try:
        target = find_target(stack)
    except CliError:
        if stack is not None or os.environ.get("SPOTKEEPER_BUCKET") or os.environ.get("SPOTKEEPER_STACK"):
            raise
        return Ground(recorded_stack(), now=time.time(), said=[NO_STACK], named=False)
    store = target.store()
    state = target.state(store)
    held = store.read_prices(tuple(pool.name for pool in state.pools if pool.kind == "spot"))
    prices = {name: one.value for name, one in held.items()}
    return Ground(state, store, prices, target.clock.now(), scale=target.clock.scale)


def of_settings(stack_file: Path, stack: str | None) -> Ground:
    """Return the stack that a file declares, with prices from the file and the price list. The stack need not run."""
    from spotkeeper.cli.stacks.stackfile import read_stack_file

    return declared(read_stack_file(stack_file, stack, "spotkeeper forecast JOB.YAML --stack-file FILE").settings)


def declared(settings: Settings) -> Ground:
    """Return a stack as its settings declare it."""
    from infra.settings.model import pool_state, stack_state

    state = stack_state(settings, tuple(pool_state(settings, pool) for pool in settings.pools))
    return Ground(state, now=time.time(), said=["prices: those of the stack file and the price list, not today's"])


def recorded_stack() -> StackState:
    """Return a stack with the machine type, zones and prices of the shipped recording."""
    zones = ("us-central1-a", "us-central1-b", "us-central1-c")
    price = Price(H100_USD, round(H100_USD * H100_SPOT, 3))
    pool = PoolState(
        name="recorded",
        kind="spot",
        machine_type="a3-highgpu-1g",
        zones=zones,
        nproc=1,
        max_machines=10_000,
        max_on_demand=10_000,
        disk_gb=100,
        disk_type="pd-ssd",
        prices=dict.fromkeys(zones, price),
    )
    return StackState("none", "gcp", "", "us-central1", "", (pool,))


# -- what earlier jobs reported


class Ran(Struct, frozen=True):
    """The step time that an earlier job reported.

    ``step_s``: real seconds. ``total_steps``: 0 if not reported. ``shape``: None if unknown.
    """

    job: str
    step_s: float
    total_steps: int
    shape: GangShape | None


def ran(store: Store | None, stack: StackState, name: str) -> Ran | None:
    """Return the step time that the newest job of a name reported; None without such a job or report.

    Raises:
        StoreError: the bucket failed.
    """
    if store is None or (job := earlier(store, name)) is None:
        return None
    progress = store.read_progress(job)
    if progress is None or not progress.step_s:
        return None
    return Ran(job, progress.step_s, progress.total_steps or 0, _shape(store, job, stack))


def shape_of(spec: JobSpec, pool: PoolState, networks: Networks) -> GangShape:
    """Return the machines of a job in this pool, at its largest size."""
    return GangShape(pool.machine_type, spec.size().max, spec.nproc or pool.nproc, measured(pool, networks))


def _shape(store: Store, job: str, stack: StackState) -> GangShape | None:
    """The machines of a job, from its job file and the pool of the machine that joined last; None if unknown."""
    try:
        held = store.read_record(job)
        spec = store.read_spec(job, held.value.spec_key() if held is not None else "")
    except CorruptError:
        return None
    joined = [one for one in attempts(store.list_ledger(job)) if one.admitted is not None]
    last = max(joined, key=lambda one: one.admitted or 0.0, default=None)
    pool = next((pool for pool in stack.pools if last is not None and pool.name == last.pool), None)
    return shape_of(spec, pool, store.read_networks()) if spec is not None and pool is not None else None
