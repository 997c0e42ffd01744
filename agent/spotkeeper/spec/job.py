"""The job file a researcher writes, and what a user may ask of a running job."""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Literal

from msgspec import Meta, Struct


class Nodes(Struct, frozen=True, forbid_unknown_fields=True):
    """How many machines. ``min < max`` lets the job go on smaller and grow again."""

    min: Annotated[int, Meta(ge=1, le=10_000)]
    max: Annotated[int, Meta(ge=1, le=10_000)]


class Checkpoint(Struct, frozen=True, forbid_unknown_fields=True):
    replicated: bool = True  # DDP: every node holds a full copy. False: sharded (FSDP)
    interval_s: Annotated[float, Meta(gt=0)] | None = None  # None: from measured stall and losses
    keep: Annotated[int, Meta(ge=2, le=100)] = 2


class Retry(Struct, frozen=True, forbid_unknown_fields=True):
    """The crash budget: failures of the user's own code. Preemptions never count."""

    crashes: Annotated[int, Meta(ge=0, le=1000)] = 3


class JobSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """``job.yaml``; also ``jobs/<job>/spec.json``."""

    name: str
    command: Annotated[tuple[str, ...], Meta(min_length=1)]
    nodes: int | Nodes = 1
    pools: tuple[str, ...] = ()  # () means every pool of the stack
    source: str | None = None  # a folder, relative to the job file
    python: str = "python3"
    nproc: Annotated[int, Meta(ge=1, le=64)] | None = None  # None: what the pool says
    env: dict[str, str] = {}
    secrets: dict[str, str] = {}  # variable -> name of the secret, never a value
    checkpoint: Checkpoint = Checkpoint()
    retry: Retry = Retry()
    policy: Literal["balanced", "spot", "on-demand", "shuffle"] = "balanced"
    deadline: str | None = None
    static: Literal["use", "never"] = "use"  # whether to take the stack's static nodes
    spread: bool = False  # ranks may be in different zones
    launcher: Literal["zygote", "exec"] = "zygote"
    grace_s: Annotated[float, Meta(ge=1, le=600)] = 25.0
    keep_disks: bool = False
    max_on_demand: Annotated[int, Meta(ge=0)] | None = None
    seed: int = 0
    source_sha256: str | None = None  # filled in by submit

    def size(self) -> Nodes:
        return Nodes(self.nodes, self.nodes) if isinstance(self.nodes, int) else self.nodes


class AskKind(str, Enum):
    CANCEL = "cancel"
    PAUSE = "pause"
    RESUME = "resume"
    RESIZE = "resize"
    MOVE = "move"  # zone
    SWAP = "swap"  # rank: replace it with a fresh machine


class Ask(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """``jobs/<job>/ask/<id>``: only reconcile writes the record; users ask."""

    id: str
    kind: AskKind
    at: float
    by: str = ""
    nodes: int | None = None
    zone: str | None = None
    rank: int | None = None
