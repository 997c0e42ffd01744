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
        if self.stack is None:
            return ()
        wanted = [p for p in self.stack.pools if not self.spec.pools or p.name in self.spec.pools]
        return tuple(p for p in wanted if p.kind == "spot" or self.spec.static == "use")
