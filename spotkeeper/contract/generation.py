"""The generation document, and the messages between an agent and the function.

Agents use one endpoint, ``POST /v1/sync``. The identity token identifies the machine, and the record assigns it a node;
the body only contains facts about the machine itself.
"""

from __future__ import annotations

from enum import Enum
from typing import Annotated

from msgspec import Meta, Struct

from spotkeeper.contract.facts import Kind

Count = Annotated[int, Meta(ge=0, le=2**53)]  # JSON parsers disagree about larger integers
Amount = Annotated[float, Meta(ge=0)]
BootId = Annotated[str, Meta(pattern="^[-a-z0-9]{1,64}$")]
JobId = Annotated[str, Meta(pattern="^[a-z0-9]{8}$")]
MAX_OLD_JOBS = 32  # number of jobs that one sync may ask about


class DocState(str, Enum):
    """The order to the members.

    RUN: train in this generation. SAVE_STOP: save, stop and wait. ROLL_CALL: train, and answer the roll call. DONE:
    stop; the job has ended.
    """

    RUN = "run"
    SAVE_STOP = "save_stop"
    ROLL_CALL = "roll_call"
    DONE = "done"


class Member(Struct, frozen=True, omit_defaults=True):
    node: int
    attempt: int
    uid: str
    boot: str
    address: str
    nproc: int
    disk: bool = True  # False: the member's disk is not attached yet, so it writes no checkpoints


class Generation(Struct, frozen=True, omit_defaults=True):
    """The generation document, derived from the record. Agents ignore it if its ``ver`` is not higher than before."""

    job: str
    uid: str
    ver: int
    gen: int
    state: DocState
    members: tuple[Member, ...]
    master: str
    port: int
    run_id: str
    deadline: float | None = None  # with SAVE_STOP, virtual unix seconds
    replicated: bool = True
    mean_life_s: float | None = None  # observed mean time between losses of the job, for the save interval
    upload: bool = False  # with SAVE_STOP: copy the newest checkpoint to the bucket, since a move waits for the copy
    stacks: bool = False  # with ROLL_CALL: log all workers' stack traces and report their states


class Role(str, Enum):
    """A machine's role according to the record."""

    MEMBER = "member"  # in the generation
    STANDBY = "standby"  # admitted or expected, not in the generation: warm up, wait
    SUPERSEDED = "superseded"  # replaced: stop, unmount, report FREED, power off (static: report DROPPED, go idle)
    IDLE = "idle"  # a static machine without a job
    UNKNOWN = "unknown"  # in no record, perhaps because the record is not written yet: sync again


class MirrorRun(Struct, frozen=True, omit_defaults=True):
    """How checkpoints are copied to the bucket.

    ``every_s``: virtual seconds between copies. ``bytes_s``: the most that a machine uploads per real second.
    """

    every_s: float
    bytes_s: float


class HangRun(Struct, frozen=True, omit_defaults=True):
    """When a job counts as hung (``job.Hang``). Times are virtual seconds."""

    factor: float
    floor_s: float
    idle_s: float


class JobRun(Struct, frozen=True, omit_defaults=True):
    """What a node needs to run the job; the same for all nodes and generations of a job file."""

    name: str
    command: tuple[str, ...]  # script and its arguments; no shell
    source_sha256: str | None  # object jobs/<job>/source/<sha256>, a tar
    env: dict[str, str] = {}
    python: str = "python3"
    requirements: str = ""  # requirements file in the source; "": none
    image: str = ""  # container image, by its digest; "": none
    nproc: int = 1
    launcher: str = "zygote"  # or "exec"
    warm: tuple[str, ...] = ()  # modules that the zygote imports besides torch
    stop: str = "library"  # or "signal": the script saves on SIGTERM, within grace_s
    grace_s: float = 25.0
    interval_s: float | None = None  # None: chosen from the measured stall and observed losses
    keep: int = 2
    snapshots: bool = False  # saves copy optimizers' tensors during training; savers keep images between saves
    overhead_percent: float = 1.0  # largest share of the training time that images may cost
    peers_mb_s: float | None = None  # megabytes per second that a machine sends for a copy in a neighbour's memory
    seed: int = 0
    max_world: int | None = None  # the job's largest world size, if it is elastic or a mix of machines
    mirror: MirrorRun | None = None  # None: no copies
    secrets: dict[str, str] = {}  # variable -> reference; the machine reads the value with the job's identity
    hang: HangRun | None = None  # None: the job never counts as hung
    until: int | None = None  # step after which a trial of a search saves and stops; None: never
    metric: str = ""  # by which a search compares its trials; "": the job is no trial
    scratch_gb: int = 0  # size of the scratch folder on the node's disk; 0: none
    log_bytes: int | None = None  # that a node's log may take in the bucket; None: from an older function, no limit


class FactIn(Struct, frozen=True, forbid_unknown_fields=True):
    kind: Kind
    gen: Count = 0
    value: str = "0"
    attempt: Count | None = None  # with DROPPED: the older attempt that a static machine dropped


class Progress(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """``jobs/<job>/progress``: the report of the member with the lowest node, sent once or twice a minute."""

    gen: Count
    step: Count
    at: Amount  # virtual unix seconds; the function stores when this step was first, or the upload last, reported
    samples_per_s: Amount | None = None
    step_s: Amount | None = None  # median, real seconds
    loss: float | None = None
    commit_gen: Count | None = None
    commit_step: Count | None = None
    save_s: Amount | None = None  # measured time from save to durable, real seconds
    total_steps: Count | None = None
    uploading_s: Amount | None = None  # the job succeeded, and its output has been uploading for this long
    gbit_s: Amount | None = None  # bandwidth between the gang's machines, measured once at its first start
    commit_at: Amount | None = None  # set by the function: when the commit was first reported, virtual unix seconds
    begin_s: Amount | None = None  # set by the function: from a generation's start to its first step, virtual seconds
    restore_s: Amount | None = None  # from the meeting of all ranks until the state was loaded, real seconds
    restored_bytes: Count | None = None  # size of the loaded checkpoint
    first_s: Amount | None = None  # from then to the end of the generation's first step, real seconds
    disk_bytes: Count | None = None  # used on the disk of the reporting machine
    image_steps: Count | None = None  # steps between images of the state
    image_share: Amount | None = None  # share of the training time that images cost

    @property
    def left_s(self) -> float | None:
        """The time for the remaining steps, real seconds; None if their number or time is unknown."""
        if not self.total_steps or self.step_s is None:
            return None
        return max(0, self.total_steps - self.step) * self.step_s


class Sync(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """An agent's request. ``ver``: the newest document version that the agent has; 0: none.

    Fields with their default are omitted, so an older function that does not know a new field accepts the request.
    """

    boot: BootId
    ver: Count = 0
    job: JobId | None = None  # the job in the agent's local state; the function checks it against the record
    facts: tuple[FactIn, ...] = ()
    progress: Progress | None = None
    pending: bool = False  # the agent waits for the result of its report, so it syncs often
    old_jobs: Annotated[tuple[JobId, ...], Meta(max_length=MAX_OLD_JOBS)] = ()  # have files on a static machine's disk
    again: bool = False  # the agent's last report got no answer: the function may have failed before it acted on that


class FetchOrder(Struct, frozen=True, omit_defaults=True):
    """An order to download a copy of a checkpoint to the disk. ``source``: the node that uploaded the copy."""

    commit: str
    source: int


class SyncReply(Struct, frozen=True, omit_defaults=True):
    role: Role
    job: str | None = None
    node: int | None = None
    attempt: int | None = None
    disk: int | None = None  # number of the disk to mount; None: none
    doc: Generation | None = None  # None: no newer document than `ver`
    run: JobRun | None = None  # present with every `doc`, and for STANDBY
    lease_minutes: int = 120
    bundle: str = ""  # sha256 of the agent's bundle; "": unknown
    over: bool = False  # the job ended and its disks are deleted: a static machine deletes the job's files
    moves: bool = False  # with SUPERSEDED: the disk is copied to another zone, so delete its scratch folder before
    ended: tuple[str, ...] = ()  # jobs in `old_jobs` whose files a static machine must delete
    mirrored: str | None = None  # the newest copy of a checkpoint in the bucket; None: none
    mirrored_at: float | None = None  # when that copy was complete, virtual unix seconds
    fetch: FetchOrder | None = None  # the copy to download before training
