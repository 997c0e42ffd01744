"""The money fuse: a machine that its function has forgotten stops paying for itself.

The lease is renewed by every answer of the function. A shorter outage stops no
training; at the lease's end the job is saved and the machine powered off.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Lease:
    """``heard``: virtual time of the last answer (at first: of the agent's start)."""

    heard: float
    minutes: int = 120

    def renew(self, now: float, minutes: int) -> None:
        self.heard = now
        self.minutes = minutes

    def over(self, now: float) -> bool:
        return now - self.heard >= self.minutes * 60
