"""What a job file is checked against."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from spotkeeper.spec.job import JobSpec
from spotkeeper.spec.stack import PoolState, StackState
from spotkeeper.spec.start import START_S


def taken(_: JobSpec) -> float:
    """Where nobody measured any."""
    return START_S


def pools_of(spec: JobSpec, stack: StackState) -> tuple[PoolState, ...]:
    """Where a job's machines may come from."""
    wanted = [pool for pool in stack.pools if not spec.pools or pool.name in spec.pools]
    return tuple(pool for pool in wanted if pool.kind == "spot" or spec.static == "use")


@dataclass(frozen=True)
class JobContext:
    """What a job is checked against. None: not known here, so not checked."""

    spec: JobSpec
    stack: StackState | None = None
    folder: Path | None = None  # the job file's
    now: float | None = None  # unix seconds
    starts: Callable[[JobSpec], float] = taken  # how long a start of it takes, seconds

    def pools(self) -> tuple[PoolState, ...]:
        """The pools of the stack that the job may use."""
        return () if self.stack is None else pools_of(self.spec, self.stack)
