"""The job file that a user writes, and the requests that a user can make of an unfinished job."""

from __future__ import annotations

import hashlib
import math
import re
from datetime import datetime
from enum import Enum
from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, Struct

from spotkeeper.contract.notification import NotifyEvent
from spotkeeper.contract.stack import PoolState, StackState, TeamState, region_of
from spotkeeper.contract.sweep import Params, Trial

HOLD_DAYS = 14.0
MOST_NODES = 10_000
PARAMS = "SPOTKEEPER_PARAMS"  # variable of a job's processes with the job file's ``params``, as JSON
PRIORITIES = ("low", "normal", "high")  # a claim has the index
# Assumed duration of a start until one is measured: the machine's boot, its data disk, Python and torch, the first
# batch. No boot times by cloud or machine type are published. Starts of training jobs on new machines are reported as
# "typically over 10 minutes", and comparisons of policies assume 4 to 20 minutes, most often 12. If the value is too
# long, jobs wait less for spot; if it is too short, they miss deadlines.
START_S = 600.0


def _about(text: str) -> Meta:
    """Return a field's description, which editors (JSON Schema) and messages show."""
    return Meta(description=text)


def _filled(text: str) -> Meta:
    """Return the description of a list that a user leaves out or fills; programs write an empty one."""
    return Meta(description=text, extra_json_schema={"minItems": 1})


def _unoffered(text: str) -> Meta:
    """Return the description of a field that users do not write, and that messages and editors do not offer."""
    return Meta(description=text, extra={"offered": False})


class Nodes(Struct, frozen=True, forbid_unknown_fields=True):
    """Number of machines. With ``min < max`` the job shrinks when machines are missing, and later grows again."""

    min: Annotated[int, Meta(ge=1, le=MOST_NODES, description="minimum number of machines")]
    max: Annotated[int, Meta(ge=1, le=MOST_NODES, description="maximum number of machines")]


class MachineGroup(Struct, frozen=True, forbid_unknown_fields=True):
    """Nodes of a job whose machines all come from one pool."""

    pool: Annotated[str, Meta(max_length=24, description="pool that these nodes get their machines from")]
    nodes: Annotated[int, Meta(ge=1, le=MOST_NODES, description="number of these nodes")]


class Mirror(Struct, frozen=True, forbid_unknown_fields=True):
    """Copies of committed checkpoints in the stack's bucket, used when no disk has the checkpoint."""

    every_min: Annotated[float, Meta(ge=1, le=10_000, description="minutes between copies of checkpoints")] = 60.0
    mb_s: Annotated[float, Meta(gt=0, description="largest upload rate, megabytes per second")] = 50.0
    keep: Annotated[int, Meta(ge=1, le=10, description="complete copies of checkpoints kept in the bucket")] = 2


class Checkpoint(Struct, frozen=True, forbid_unknown_fields=True):
    """How checkpoints are saved, how often, and how many are kept."""

    replicated: Annotated[bool, _about("true (DDP): each node has the whole state; false (FSDP): only a part")] = True
    interval_s: Annotated[float, Meta(gt=0, description="seconds between saves; unset: automatic")] | None = None
    keep: Annotated[int, Meta(ge=2, le=100, description="complete checkpoints kept on each disk")] = 2
    snapshots: Annotated[bool, _about("false: saves copy at once, and a loss costs the steps since the last one")] = (
        True
    )
    overhead_percent: Annotated[float, Meta(ge=0.01, le=100, description="most that images may cost, percent")] = 1.0
    peers: Annotated[
        int, Meta(ge=0, le=1, description="1: with sharded state, a neighbour's memory keeps each machine's part")
    ] = 0
    peers_mb_s: Annotated[
        float, Meta(ge=1, le=100_000, description="most that a machine sends to its neighbour, megabytes per second")
    ] = 250.0
    mirror: Annotated[Mirror, _about("copies of checkpoints in the stack's bucket; unset: none")] | None = None


class Logs(Struct, frozen=True, forbid_unknown_fields=True):
    """The job's complete log in the stack's bucket."""

    keep_mb: Annotated[
        int, Meta(ge=1, le=10_000_000, description="MB kept of all nodes together, compressed; the oldest are deleted")
    ] = 1024


class Retry(Struct, frozen=True, forbid_unknown_fields=True):
    """The crash budget, which failures of the user's code use up. Preemptions never count."""

    crashes: Annotated[int, Meta(ge=0, le=1000, description="crashes after which the job goes on; one more: hold")] = 3


class Hang(Struct, frozen=True, forbid_unknown_fields=True):
    """When a job counts as hung. A hung job logs its workers' stack traces and restarts; this counts as a crash."""

    factor: Annotated[
        float, Meta(ge=2, le=1e6, description="a step counts as hung after this many times its usual time")
    ] = 30.0
    floor_min: Annotated[float, Meta(ge=1, le=1e6, description="minutes before a step can count as hung")] = 10.0
    idle_min: Annotated[
        float,
        Meta(
            ge=1, le=1e6, description="outside the training loop: minutes without CPU use before a job counts as hung"
        ),
    ] = 60.0


class JobSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """``job.yaml``; stored as ``jobs/<job>/spec.json``, or ``spec-<sha256>.json`` if a resume brought another job file.

    ``spotkeeper.contract.parse.check`` has the rules that concern several fields.
    """

    name: Annotated[str, _about("a-z, 0-9 and -, at most 40 characters; unique among unfinished jobs")]
    command: Annotated[tuple[str, ...], Meta(min_length=1, description="script and its arguments as a list; no shell")]
    nodes: Annotated[int, Meta(ge=1, le=MOST_NODES, description="number of machines, or {min, max}")] | Nodes = 1
    pools: Annotated[tuple[str, ...], _about("pools to take machines from; empty: every pool of the stack")] = ()
    machines: Annotated[
        tuple[MachineGroup, ...], _filled("a mix of machines, [{pool: l4, nodes: 2}, ...], in place of nodes and pools")
    ] = ()
    regions: Annotated[
        tuple[str, ...], _filled("regions of the stack to take machines from; unset: the stack's home region")
    ] = ()
    data_gb: Annotated[
        float,
        Meta(ge=0, le=1e6, description="GB that the job reads each time it comes to another region than its data"),
    ] = 0.0
    data_region: Annotated[str, _about("region of the stack in which that data lies; unset: the home region")] = ""
    source: Annotated[str | None, _about("folder sent to the machines, relative to the job file")] = None
    python: Annotated[str, _about("interpreter on the machines, with torch installed")] = "python3"
    requirements: Annotated[
        str | None, _about("requirements.txt or uv.lock in `source`, installed once on the node's disk; unset: none")
    ] = None
    image: Annotated[
        str | None, _about("container image, REGISTRY/REPOSITORY@sha256:DIGEST, with Python and torch; unset: none")
    ] = None
    nproc: Annotated[int, Meta(ge=1, le=64, description="processes per machine; unset: the pool's value")] | None = None
    scratch_gb: Annotated[
        int,
        Meta(ge=0, le=32_768, description="GB of a scratch folder (SPOTKEEPER_SCRATCH) on each node's disk; 0: none"),
    ] = 0
    env: Annotated[dict[str, str], _about("variables of the job's processes; no secrets")] = {}
    params: Annotated[Params, _about("name -> value: the script reads them by spotkeeper.params(), or as {name}")] = {}
    secrets: Annotated[dict[str, str], _about("variable -> gcp-secret://... or aws-secret://...")] = {}
    checkpoint: Checkpoint = Checkpoint()
    retry: Retry = Retry()
    logs: Annotated[Logs, _about("the job's complete log in the stack's bucket")] = Logs()
    hang: Annotated[Hang | Literal["off"], _about("when the job counts as hung; off: never")] = Hang()
    policy: Annotated[
        Literal["balanced", "spot", "on-demand", "shuffle"], _about("which machines to request, and when")
    ] = "balanced"
    priority: Annotated[
        Literal["low", "normal", "high"], _about("place in the queue when machines are short; high: if your team may")
    ] = "normal"
    team: Annotated[str, _about("one of your teams in the stack file; unset: the first that lists you")] = ""
    deadline: Annotated[str | None, _about("a time (2026-12-24T18:00Z) or a span from submission (6h, 90m, 2d)")] = None
    work: Annotated[
        str | None, _about("40h, 90m, 2d: training time without interruptions; unset: estimated from the first steps")
    ] = None
    max_wait: Annotated[
        str | None,
        _about("30m, 6h: longest wait for spot, then on-demand; with policy spot, a hold; unset: the policy decides"),
    ] = None
    max_price: Annotated[float, Meta(gt=0, description="highest spot price to pay, USD per machine-hour")] | None = None
    static: Annotated[Literal["use", "never"], _about("whether to take the stack's static machines")] = "use"
    stragglers: Annotated[
        Literal["report", "replace"], _about("machines that slow the others down: report them, or also replace them")
    ] = "report"
    spread: Annotated[bool, _about("whether machines may be in different zones")] = False
    launcher: Annotated[Literal["zygote", "exec"], _about("zygote: torch preloaded; exec: plain torchrun")] = "zygote"
    stop: Annotated[
        Literal["library", "signal"],
        _about("how the script is told to save and stop; signal: by SIGTERM, for scripts without the library"),
    ] = "library"
    warm: Annotated[
        tuple[str, ...], _about("modules that each machine imports once, before training starts: [transformers]")
    ] = ()
    grace_s: Annotated[float, Meta(ge=1, le=600, description="seconds between SIGTERM and SIGKILL")] = 25.0
    keep_disks: Annotated[bool, _about("keep the nodes' disks after the job ends")] = False
    hold_days: Annotated[
        float, Meta(ge=0, le=365, description="days that a failed job keeps its disks for `resume`; 0: none")
    ] = HOLD_DAYS
    max_on_demand: Annotated[int, Meta(ge=0, description="maximum number of on-demand machines")] | None = None
    max_usd: (
        Annotated[float, Meta(gt=0, description="the job goes on hold after spending this much on machines")] | None
    ) = None
    notify: Annotated[
        dict[str, tuple[NotifyEvent, ...]],
        _about("name of a channel -> this job's events that it gets, in place of those that the stack file lists"),
    ] = {}
    seed: Annotated[int, Meta(ge=0, lt=2**32, description="seed of the sample order and of random numbers")] = 0
    source_sha256: Annotated[str | None, _unoffered("filled in by submit")] = None
    trial: Annotated[Trial | None, _unoffered("filled in by sweep: the job is a trial of a search")] = None

    def __post_init__(self) -> None:
        """Bound the nodes of a mix like those of other jobs. With a larger claim, nobody could read the allocation.

        Raises:
            ValueError: the mix has more nodes than a job may have.
        """
        if (count := sum(group.nodes for group in self.machines)) > MOST_NODES:
            raise ValueError(f"machines: {count:,} nodes in all, and a job may have {MOST_NODES:,}")

    def size(self) -> Nodes:
        if self.machines:
            count = sum(group.nodes for group in self.machines)
            return Nodes(count, count)
        return Nodes(self.nodes, self.nodes) if isinstance(self.nodes, int) else self.nodes

    def more_disk_gb(self) -> int:
        """Return by how many GB a node's disk is larger than its pool's: the scratch folder, and 2 % for the index."""
        return math.ceil(1.02 * self.scratch_gb)

    def pool_names(self) -> tuple[str, ...]:
        """Return the names of the pools from which the job takes machines; (): every pool of the stack."""
        return tuple(group.pool for group in self.machines) or self.pools

    def pool_of(self, node: int) -> str:
        """Return the only pool from which a node of a mix may have its machine; "": any pool of the job."""
        for group in self.machines:
            if node < group.nodes:
                return group.pool
            node -= group.nodes
        return ""

    def most_of(self, pool: str) -> int:
        """Return how many nodes can have a machine of this pool."""
        return next((group.nodes for group in self.machines if group.pool == pool), self.size().max)


class UnknownError(Exception):
    """A rule read a field that is invalid in the job file."""


class PartialJob(JobSpec, frozen=True):
    """A job file with invalid fields: they are ``UNSET``, and reading one raises :class:`UnknownError`."""

    def __post_init__(self) -> None:
        """Leave ``machines`` as it is: it may be unknown."""

    def __getattribute__(self, name: str) -> object:
        value: object = super().__getattribute__(name)
        if value is UNSET:
            raise UnknownError(name)
        return value


def spec_sha256(spec: JobSpec) -> str:
    """Return the hash of a job's content: of all fields, with the source's hash in place of its path."""
    body = msgspec.json.encode(msgspec.structs.replace(spec, source=None), order="sorted")
    return hashlib.sha256(body).hexdigest()


def spec_json(spec: JobSpec) -> bytes:
    """Encode a job file for the bucket, without fields that have their default.

    A function older than the submitting command can then read every job that uses no new field.
    """
    return msgspec.json.encode(_said(spec))


def _said(value: object) -> object:
    if not isinstance(value, Struct):
        return value
    fields = [(field, getattr(value, field.name)) for field in msgspec.structs.fields(value)]
    return {field.encode_name: _said(is_) for field, is_ in fields if is_ != _default(field)}


def _default(field: msgspec.structs.FieldInfo) -> object:
    return field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()


_SPAN = re.compile(r"(\d+(?:\.\d+)?)\s*([mhd])\Z")
_SPAN_S = {"m": 60.0, "h": 3600.0, "d": 86400.0}
LONGEST_S = 10 * 365 * 86400.0


def span_s(text: str) -> float:
    """Return a length of time (``6h``, ``90m``, ``2d``) in seconds.

    Raises:
        ValueError: the text has another form, or is longer than ten years.
    """
    span = _SPAN.match(text.strip())
    if span is None:
        raise ValueError("want a length of time, such as 90m, 6h or 2d")
    if (length := float(span[1]) * _SPAN_S[span[2]]) > LONGEST_S:
        raise ValueError("is more than ten years")
    return length


def deadline_at(text: str, submitted: float) -> float:
    """Return a deadline (``6h``, ``90m``, ``2d``, or a time with its zone) in unix seconds, as ``submitted`` is.

    Raises:
        ValueError: the text has another form, is a time without a zone, or is a span longer than ten years.
    """
    span = _SPAN.match(text.strip())
    if span:
        if (length := float(span[1]) * _SPAN_S[span[2]]) > LONGEST_S:
            raise ValueError("is more than ten years away: for no deadline, leave the field out")
        return submitted + length
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError:
        raise ValueError("want a span (90m, 6h, 2d) or a time with its zone (2026-12-24T18:00Z)") from None
    if moment.tzinfo is None:
        said = text.strip().replace(" ", "T")
        raise ValueError(f"a time needs its time zone ({said if 'T' in said else said + 'T00:00'}Z for UTC)")
    return moment.timestamp()


def start_s(boot_s: float | None, begin_s: float | None, save_s: float) -> float:
    """Return how long a start takes, from the request for a machine to the next step, virtual seconds.

    Args:
        boot_s: measured time from the request to the hello in this pool; None: no machine has booted yet.
        begin_s: measured time from a generation's start to its first step, of the job's newest generation that made a
            step; None: none has made one yet.
        save_s: duration of the save before machines are changed.
    """
    if boot_s is None or begin_s is None:
        return max(START_S, (boot_s or 0.0) + (begin_s or 0.0) + save_s)
    return boot_s + begin_s + save_s


def named_pools(spec: JobSpec, stack: StackState) -> tuple[PoolState, ...]:
    """Return the pools that a job names, or all; if the stack has several regions, only with zones in the job's.

    A pool without such a zone is left out, unless the job is a mix, which needs each of its pools.
    """
    names = spec.pool_names()
    named = tuple(pool for pool in stack.pools if not names or pool.name in names)
    if not stack.regions:
        return named
    regions = spec.regions or (stack.region,)
    zones = {zone for pool in named for zone in pool.zones if region_of(zone) in regions}
    return tuple(found for pool in named if (found := pool.only(zones)).zones or spec.machines)


def pools_of(spec: JobSpec, stack: StackState) -> tuple[PoolState, ...]:
    """Return the pools from which a job may take machines; of a mix in one zone, only with the zones that all have."""
    found = tuple(pool for pool in named_pools(spec, stack) if pool.kind == "spot" or spec.static == "use")
    if not spec.machines or spec.spread:
        return found
    zones = [zone for zone in stack.zones() if all(zone in pool.zones for pool in found)]
    return tuple(pool.only(zones) for pool in found)


def allowed(spec: JobSpec, stack: StackState, owner: str) -> tuple[TeamState, str]:
    """Return the team and the priority with which a job of this owner waits; ``owner`` "": unknown."""
    team = stack.team_of(owner, spec.team)
    may = owner and (team.high is None or owner in team.high)
    return team, spec.priority if may or spec.priority != "high" else "normal"


def ungranted(spec: JobSpec, stack: StackState, owner: str) -> tuple[str, ...]:
    """Return what the job does not get of its ``team`` and ``priority``, one line each."""
    team, priority = allowed(spec, stack, owner)
    other, lower = spec.team not in ("", team.name), priority != spec.priority
    if not owner and (other or lower):
        unknown = "the function does not know yet whose job it is"
        return (f"{unknown}: it counts for team {team.name}, with priority {priority}",)
    told = [f"team: {spec.team}: {owner} is no member, so the job counts for team {team.name}"] if other else []
    told += [f"priority: high: team {team.name} does not allow it to {owner}, so the job has normal"] if lower else []
    return tuple(told)


class RequestKind(str, Enum):
    CANCEL = "cancel"
    PAUSE = "pause"
    RESUME = "resume"
    RESIZE = "resize"
    MOVE = "move"  # move the gang to a zone
    SWAP = "swap"  # replace a node's machine with a new one


class JobRequest(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """``jobs/<job>/requests/<id>``: a user's request, which the next round carries out or refuses."""

    id: Annotated[str, Meta(pattern=r"^[-a-z0-9]{1,64}\Z")]  # the object's name: one with another cannot be deleted
    kind: RequestKind
    at: float
    by: str = ""
    nodes: int | None = None
    drop: tuple[int, ...] = ()  # of RESIZE: the nodes that lose their machines; (): those whose loss costs least
    zone: str | None = None
    node: int | None = None
    spec_sha256: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")] | None = None  # of RESUME: the new job file
    go_back: bool = False  # of RESUME: continue without the newest checkpoint if no available machine has it
