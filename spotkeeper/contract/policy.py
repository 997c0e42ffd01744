"""The selection protocol, version 1, between a policy and its judge: one JSON object per line.

Hours everywhere, money in on-demand hours of the gang. Only ``hello`` and ``tick`` get an answer. A policy knows
its own progress, what runs, prices, what its own launches and probes came to, and how each zone looked once an
hour in the 48 h before the job: never the future, never a zone that it did not ask for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from msgspec import Struct

PROTOCOL = 1
KEEP = "keep"
ON_DEMAND = "od"
SPOT = "spot:"


class Terms(Struct, frozen=True):
    """What a job is, and what things cost it. ``deadline_h`` None: none, and a waiting hour costs ``delay_price``."""

    work_h: float
    deadline_h: float | None
    horizon_h: float  # the deadline; without one, when on-demand is forced
    restart_h: float  # billed start-up of every launch
    move_h: float  # more of it in another zone
    move_price: float  # and to be paid in another region
    attempt_h: float  # more of it for each refused attempt
    probe_h: float  # spot that a successful probe is billed
    delay_price: float
    tick_h: float
    on_demand_price: float = 1.0


class PolicyZone(Struct, frozen=True):
    """A zone, and ``[hours before the start, up?]`` of it, oldest first."""

    id: str
    region: str
    history: tuple[tuple[float, int | bool], ...] = ()


class PolicyHello(Struct, frozen=True, tag_field="type", tag="hello"):
    protocol: int = PROTOCOL


class Start(Struct, frozen=True, tag_field="type", tag="start"):
    case: str
    home: str
    job: Terms
    zones: tuple[PolicyZone, ...]


class On(Struct, frozen=True):
    """What runs. ``pending_h`` of its start-up are still to come."""

    kind: Literal["spot", "od"]
    zone: str
    age_h: float
    pending_h: float


class Tick(Struct, frozen=True, tag_field="type", tag="tick"):
    """The state at a tick's beginning; ``home`` is the zone that has the checkpoint."""

    tick: int
    now_h: float
    done_h: float
    left_h: float
    time_left_h: float | None
    event: Literal["start", "tick", "preempted"]
    on: On | None
    home: str
    spot_price: Mapping[str, float | None]  # None: not known
    tried: dict[str, bool] = {}
    probed: dict[str, bool] = {}
    preemptions: int = 0
    cost: float = 0.0


class End(Struct, frozen=True, tag_field="type", tag="end"):
    cost: float = 0.0
    finish_h: float = 0.0
    missed: bool = False
    preemptions: int = 0


class Bye(Struct, frozen=True, tag_field="type", tag="bye"):
    pass


class Ready(Struct, frozen=True, tag_field="type", tag="ready"):
    name: str


class PolicyAnswer(Struct, frozen=True, rename={"attempts": "try"}):
    """``attempts`` in order: the first that works runs until the next tick; what is left out is stopped."""

    attempts: tuple[str, ...] = ()
    probe: tuple[str, ...] = ()


Message = PolicyHello | Start | Tick | End | Bye
