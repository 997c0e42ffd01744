"""The ledger: one small object per event, ``jobs/<job>/ledger/<time>.<id>``."""

from __future__ import annotations

from enum import Enum

from msgspec import Struct

from spotkeeper.contract.stack import Model


class Event(str, Enum):
    SUBMITTED = "submitted"
    INTENT = "intent"  # an attempt was decided: zone, model, pool, price, cause
    ADMITTED = "admitted"  # the machine is listed and its agent said hello
    REFUSED = "refused"  # the cloud had no capacity (or quota)
    GENERATION = "generation"  # `gen` was published
    FIRST = "first"  # the processes of `gen` reported their first step
    CHECKPOINT = "checkpoint"  # the job's first checkpoint is durable
    STOP = "stop"  # members were told to save and stop
    STOPPED = "stopped"  # the job's processes on the lowest member have ended after a STOP
    MOUNTED = "mounted"  # a replacement has mounted its node's disk
    NOTICE = "notice"
    REPRIEVE = "reprieve"
    ENDING = "ending"  # a machine's maxRunDuration ends soon: a planned end, not a preemption
    LOSS = "loss"  # a node's machine is gone
    PROMOTED = "promoted"  # a node's replacement (`next`) became its machine (`cur`)
    GONE = "gone"  # a replaced machine is no longer listed: billing ends
    CRASH = "crash"
    ROLL = "roll"
    FALLBACK = "fallback"  # on-demand for a limited time, with the reason
    MOVE = "move"
    EGRESS = "egress"  # a disk or the job's data went to another region, which the cloud bills
    FULL = "full"  # a node's disk had no space for a checkpoint: training goes on, the older one stays
    UNSAVED = "unsaved"  # a save failed for another reason: training goes on, and the next save tries again
    DAMAGED = "damaged"  # a complete checkpoint on a node's disk was damaged
    MIRRORED = "mirrored"  # a copy of a checkpoint is complete in the bucket
    UNMIRRORED = "unmirrored"  # a copy in the bucket is damaged or gone
    FETCH = "fetch"  # no disk has the checkpoint to continue from: it is downloaded from the bucket
    PREFLIGHT_FAILED = "preflight-failed"  # preflight found an error on a machine at boot; training goes on
    SAVED = "saved"  # a later save of that node succeeded
    UNLOOPED = "unlooped"  # the script succeeded and saved nothing: it called attach() but ran no loop
    LAG = "lag"  # a node's machine slows the others down: its own step time is far above the median node's
    KEEPS_UP = "keepsup"  # the machine no longer lags
    LIMIT = "limit"  # a limit on spending or launches is reached: no machine is requested for now
    RUNG = "rung"  # a trial of a search has reached the step at which the search compares its trials
    HOLD = "hold"
    RESUME = "resume"
    SHELL = "shell"  # a person opened a shell on a machine
    REQUEST = "request"
    UNDELIVERED = "undelivered"  # a notification could not be sent for hours; the cause names the channel
    END = "end"
    DONE = "done"


# If a stop's cause begins with one of these, nothing was saved: the steps since the last checkpoint are repeated.
SURPRISES = ("loss", "crash", "silence", "stall", "exit", "reboot", "disk", "host")


class Entry(Struct, frozen=True, omit_defaults=True):
    """One event. Readers use the first entry of each ``id``, since reconcile can write a GONE again after a crash."""

    at: float  # virtual unix seconds
    id: str  # deterministic per event, so that a repeated round writes it once
    event: Event
    gen: int = 0
    node: int | None = None
    attempt: int | None = None
    pool: str | None = None
    zone: str | None = None
    model: Model | None = None
    price: float | None = None  # USD per hour
    on_demand: float | None = None  # of INTENT: the same machine's on-demand list price, USD per hour
    cause: str | None = None
    detail: str = ""
    started: float | None = None  # when the cloud created the machine (billing begins); None: unknown
    step: int | None = None  # of GENERATION: the step at which it continues
    again: int | None = None  # of GENERATION: steps done before the stop that are repeated; None: unknown
    step_s: float | None = None  # of GENERATION: the usual time of a step, virtual seconds
    save_s: float | None = None  # of GENERATION: last measured duration of a save, virtual seconds
    restore_s: float | None = None  # of FIRST: from the meeting of all ranks until the state was loaded, real seconds
    restored_bytes: int | None = None  # of FIRST: size of the loaded checkpoint
    first_s: float | None = None  # of FIRST: from then to the end of the first step, real seconds
    holds: int = 0  # of GENERATION: holds since the last generation
    by: str = ""  # of SUBMITTED and SHELL: the user
    gb: float | None = None  # of EGRESS: what was transferred
    usd: float | None = None  # of EGRESS: what that costs
    ended: float | None = None  # of GONE: when the machine ended (billing ends); None: unknown
