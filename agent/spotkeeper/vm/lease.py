"""The money fuses: a machine that its function has forgotten, or never knew, stops paying for itself.

The lease is renewed by every answer of the function. A shorter outage stops no
training; at the lease's end the job is saved and the machine powered off. Both count steady
seconds: a machine whose wall clock is set right after its boot has not been alone for years.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass
class Lease:
    """``heard``: steady virtual time of the last answer (at first: of the agent's start)."""

    heard: float
    minutes: int = 120

    def renew(self, now: float, minutes: int) -> None:
        self.heard = now
        self.minutes = minutes

    def over(self, now: float) -> bool:
        return now - self.heard >= self.minutes * 60


BOOT_S = 900.0  # virtual; the function gives a boot 8 minutes, so by then it has asked for another machine
WORK_S = 60.0  # real seconds of a boot's own work, where the clock runs faster than that


@dataclass
class BootWatch:
    """A dynamic machine that nobody has taken in since its agent started is money without work.

    The same limit is set by a timer of the startup script, for an agent that never starts; ``known`` is the
    file that disarms it. It lies in ``/run``, so every boot is watched anew.
    """

    started: float  # steady virtual seconds
    scale: float
    mark: Path
    known: bool = False

    def disarm(self) -> None:
        if not self.known:
            self.known = True
            self.mark.touch()

    def over(self, now: float) -> bool:
        return not self.known and now - self.started >= BOOT_S + WORK_S * max(0.0, self.scale - 1.0)
