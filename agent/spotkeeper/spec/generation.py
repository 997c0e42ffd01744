"""The generation document, and the words between an agent and the function.

One endpoint serves agents: ``POST /v1/sync``. Who speaks is read from the identity
token, which rank that is from the record; the body only carries facts about itself.
"""

from __future__ import annotations

from enum import Enum
from typing import Annotated

from msgspec import Meta, Struct

from spotkeeper.spec.facts import Kind

Count = Annotated[int, Meta(ge=0, le=2**53)]  # beyond it, readers of JSON disagree about what a number is
Amount = Annotated[float, Meta(ge=0)]
BootId = Annotated[str, Meta(pattern="^[-a-z0-9]{1,64}$")]
JobId = Annotated[str, Meta(pattern="^[a-z0-9]{8}$")]
MAX_KEPT = 32  # jobs asked about in one sync


class DocState(str, Enum):
    """RUN train in this generation; SAVE_STOP save, stop, wait; ROLL_CALL as RUN, and answer; DONE stop for good."""

    RUN = "run"
    SAVE_STOP = "save_stop"
    ROLL_CALL = "roll_call"
    DONE = "done"


class Member(Struct, frozen=True, omit_defaults=True):
    rank: int
    attempt: int
    uid: str
    boot: str
    address: str
    nproc: int
    disk: bool = True  # False: its disk is not attached yet, so it writes no checkpoint


class Generation(Struct, frozen=True, omit_defaults=True):
    """A pure view of the record. Agents act only on a higher ``ver``."""

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
    stacks: bool = False  # of a roll call: have all workers' stacks written, and say where they are


class Role(str, Enum):
    """What the function thinks the speaking machine is."""

    MEMBER = "member"  # in the document
    STANDBY = "standby"  # admitted or expected, not in the document: warm up, wait
    SUPERSEDED = "superseded"  # stop, unmount, say freed, power off (a static node: say dropped, go idle)
    IDLE = "idle"  # a static node without a job
    UNKNOWN = "unknown"  # not (yet) in any record: ask again


class MirrorRun(Struct, frozen=True, omit_defaults=True):
    """How committed checkpoints are copied to the bucket. ``every_s`` is virtual, ``bytes_s`` real."""

    every_s: float
    bytes_s: float


class HangRun(Struct, frozen=True, omit_defaults=True):
    """When a job is taken for hung (``job.Hang``). Times are virtual."""

    factor: float
    floor_s: float
    idle_s: float


class JobRun(Struct, frozen=True, omit_defaults=True):
    """What a node must know to run the job; the same for all nodes and generations of a spec."""

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
    hang: HangRun | None = None  # None: no job is taken for hung


class FactIn(Struct, frozen=True, forbid_unknown_fields=True):
    kind: Kind
    gen: Count = 0
    value: str = "0"
    attempt: Count | None = None  # a static node dropping an older attempt names it


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
    uploading_s: Amount | None = None  # the job has ended well, and its output has been on its way for so long
    begin_s: Amount | None = None  # as stored: from a generation to its first step, the last that made one, virtual


class Sync(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """What an agent sends. ``ver``: the document version it has (0: none).

    What says nothing is left out, so that a function which does not know a newer field yet takes the rest.
    """

    boot: BootId
    ver: Count = 0
    job: JobId | None = None  # the job it believes it works for; a hint, checked
    facts: tuple[FactIn, ...] = ()
    progress: Progress | None = None
    pending: bool = False  # it waits for an answer to what it said, and asks often
    kept: Annotated[tuple[JobId, ...], Meta(max_length=MAX_KEPT)] = ()  # whose files a static node has; asked seldom
    again: bool = False  # what it said last was not answered: whoever heard it may have died before acting on it


class FetchOrder(Struct, frozen=True, omit_defaults=True):
    """Bring this copy of a checkpoint onto the disk. ``source``: the rank whose copy it is."""

    commit: str
    source: int


class SyncReply(Struct, frozen=True, omit_defaults=True):
    role: Role
    job: str | None = None
    rank: int | None = None
    attempt: int | None = None
    disk: int | None = None  # number of the rank's disk, where one is to be mounted
    doc: Generation | None = None  # None: nothing newer than `ver`
    run: JobRun | None = None  # with every doc, and for a standby
    lease_minutes: int = 120
    bundle: str = ""  # sha256 of what the stack's agents run, "" where it is not known
    over: bool = False  # the job has ended and its disks go: a static node deletes what it has of it
    ended: tuple[str, ...] = ()  # of those in ``kept``: the same
    mirrored: str | None = None  # the newest copy of a checkpoint in the bucket, where the job has copies made
    mirrored_at: float | None = None  # since when it is there, virtual unix seconds
    fetch: FetchOrder | None = None  # what this machine shall bring onto its disk before it trains
