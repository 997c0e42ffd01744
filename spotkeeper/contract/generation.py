"""The generation document, and what an agent and the function exchange.

One endpoint serves agents: ``POST /v1/sync``. The identity token tells which machine it is, the record which node; the
body only has facts about the machine itself.
"""

from __future__ import annotations

from enum import Enum
from typing import Annotated

from msgspec import Meta, Struct

from spotkeeper.contract.facts import Kind

Count = Annotated[int, Meta(ge=0, le=2**53)]  # above that, readers of JSON disagree about a number
Amount = Annotated[float, Meta(ge=0)]
BootId = Annotated[str, Meta(pattern="^[-a-z0-9]{1,64}$")]
JobId = Annotated[str, Meta(pattern="^[a-z0-9]{8}$")]
MAX_OLD_JOBS = 32  # jobs asked about in one sync


class DocState(str, Enum):
    """RUN train in this generation; SAVE_STOP save, stop, wait; ROLL_CALL as RUN, and answer; DONE stop for good."""

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
    disk: bool = True  # False: its disk is not attached yet, so it writes no checkpoint


class Generation(Struct, frozen=True, omit_defaults=True):
    """A pure view of the record. An agent acts only on a higher ``ver``."""

    job: str
    uid: str
    ver: int
    gen: int
    state: DocState
    members: tuple[Member, ...]
    master: str
    port: int
    run_id: str
    deadline: float | None = None  # of a save_stop, virtual unix seconds
    replicated: bool = True
    mean_life_s: float | None = None  # observed mean time between losses of the job, for the save interval
    stacks: bool = False  # of a roll call: write all workers' stacks and report where they are


class Role(str, Enum):
    """What a machine is by the record."""

    MEMBER = "member"  # in the document
    STANDBY = "standby"  # admitted or expected, not in the document: warm up, wait
    SUPERSEDED = "superseded"  # stop, unmount, say freed, power off (a static machine: say dropped, go idle)
    IDLE = "idle"  # a static machine without a job
    UNKNOWN = "unknown"  # not (yet) in any record: sync again


class MirrorRun(Struct, frozen=True, omit_defaults=True):
    """How committed checkpoints are copied to the bucket. ``every_s`` is virtual, ``bytes_s`` real."""

    every_s: float
    bytes_s: float


class HangRun(Struct, frozen=True, omit_defaults=True):
    """When a job counts as hung (``job.Hang``). Times are virtual."""

    factor: float
    floor_s: float
    idle_s: float


class JobRun(Struct, frozen=True, omit_defaults=True):
    """What a node needs to run the job; the same for all nodes and generations of a spec."""

    name: str
    command: tuple[str, ...]  # script and arguments; argv, never a shell line
    source_sha256: str | None  # object jobs/<job>/source/<sha256>, a tar
    env: dict[str, str] = {}
    python: str = "python3"
    requirements: str = ""  # a file of the source that says what environment the job wants; "": none of its own
    nproc: int = 1
    launcher: str = "zygote"  # or "exec"
    warm: tuple[str, ...] = ()  # what the zygote imports beside torch
    stop: str = "library"  # or "signal": it saves by itself on SIGTERM, within grace_s
    grace_s: float = 25.0
    interval_s: float | None = None  # None: set from measured stall and observed losses
    keep: int = 2
    seed: int = 0
    max_world: int | None = None  # processes of the job at its largest, where it may change its size
    mirror: MirrorRun | None = None  # None: nothing is copied
    secrets: dict[str, str] = {}  # variable -> where its value is; the machine reads it, as the job's identity
    hang: HangRun | None = None  # None: no job counts as hung


class FactIn(Struct, frozen=True, forbid_unknown_fields=True):
    kind: Kind
    gen: Count = 0
    value: str = "0"
    attempt: Count | None = None  # a static machine dropping an older attempt names it


class Progress(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """``jobs/<job>/progress``, from the lowest member, once a minute."""

    gen: Count
    step: Count
    at: Amount  # virtual unix seconds; as stored: when this step was first reported, or the upload last
    samples_per_s: Amount | None = None
    step_s: Amount | None = None  # median, real seconds
    loss: float | None = None
    commit_gen: Count | None = None
    commit_step: Count | None = None
    save_s: Amount | None = None  # measured time from save to durable, real seconds
    total_steps: Count | None = None
    uploading_s: Amount | None = None  # the job has succeeded and has been uploading its output for so long
    gbit_s: Amount | None = None  # bandwidth between the gang's machines, measured once at its first start
    begin_s: Amount | None = None  # as stored: from a generation to its first step, the last that made one, virtual


class Sync(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """What an agent sends. ``ver``: the document version it has (0: none).

    Defaults are left out, so a function that does not know a newer field yet accepts the rest.
    """

    boot: BootId
    ver: Count = 0
    job: JobId | None = None  # the job it works for by its own state; a hint that is checked
    facts: tuple[FactIn, ...] = ()
    progress: Progress | None = None
    pending: bool = False  # it waits for an answer to its report, and syncs often
    old_jobs: Annotated[tuple[JobId, ...], Meta(max_length=MAX_OLD_JOBS)] = ()  # on a static machine's disk
    again: bool = False  # its last report got no answer: the function may have died before acting on it


class FetchOrder(Struct, frozen=True, omit_defaults=True):
    """Download this copy of a checkpoint to the disk. ``source``: the node whose copy it is."""

    commit: str
    source: int


class SyncReply(Struct, frozen=True, omit_defaults=True):
    role: Role
    job: str | None = None
    node: int | None = None
    attempt: int | None = None
    disk: int | None = None  # number of the node's disk, where one is to be mounted
    doc: Generation | None = None  # None: nothing newer than `ver`
    run: JobRun | None = None  # with every doc, and for a standby
    lease_minutes: int = 120
    bundle: str = ""  # sha256 of the agents' bundle, "" if unknown
    over: bool = False  # the job has ended and its disks go: a static machine deletes what it has of it
    ended: tuple[str, ...] = ()  # of those in ``old_jobs``: the same
    mirrored: str | None = None  # the newest copy of a checkpoint in the bucket, where the job has copies made
    mirrored_at: float | None = None  # since when it is there, virtual unix seconds
    fetch: FetchOrder | None = None  # what this machine must download before it trains
