"""The selection protocol, version 1, between a policy and the simulator that judges it: one JSON object per line.

A tick is one step of the simulator's time. Times are hours; the unit of money is what an hour of the whole gang costs
on-demand. Only ``hello`` and ``tick`` get an answer. A policy sees the job's progress, its machines, prices, the
results of its own launches and probes, and each zone's hourly availability in the 48 h before the job, but not the
future or the state of a zone that it did not try.
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
    """A job's work, deadline and costs. Without a deadline (None), an hour's delay costs ``delay_price``."""

    work_h: float
    deadline_h: float | None
    horizon_h: float  # the deadline; in a job without a deadline, the time at which on-demand is forced
    restart_h: float  # billed start-up of every launch
    move_h: float  # additional start-up in another zone
    move_price: float  # additional cost in another region
    attempt_h: float  # additional start-up per refused attempt
    probe_h: float  # spot time billed for a successful probe
    delay_price: float
    tick_h: float
    on_demand_price: float = 1.0


class PolicyZone(Struct, frozen=True):
    """A zone; ``history`` lists ``[hours before the start, whether spot was available]``, oldest first."""

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
    """The current launch. ``pending_h``: hours until its machines run; 0 once they do."""

    kind: Literal["spot", "od"]
    zone: str
    age_h: float
    pending_h: float


class Tick(Struct, frozen=True, tag_field="type", tag="tick"):
    """The state at the beginning of a tick. ``home``: the zone that has the checkpoint."""

    tick: int
    now_h: float
    done_h: float
    left_h: float
    time_left_h: float | None
    event: Literal["start", "tick", "preempted"]
    on: On | None
    home: str
    spot_price: Mapping[str, float | None]  # None: unknown
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
    """An answer to a tick: ``attempts`` are tried in order until one starts; all other launches are stopped."""

    attempts: tuple[str, ...] = ()
    probe: tuple[str, ...] = ()


Message = PolicyHello | Start | Tick | End | Bye
