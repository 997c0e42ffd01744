"""The ledger: one small object per event, ``jobs/<job>/ledger/<time>.<id>``."""

from __future__ import annotations

from enum import Enum

from msgspec import Struct

from spotkeeper.contract.stack import Model


class Event(str, Enum):
    SUBMITTED = "submitted"
    INTENT = "intent"  # an attempt was decided: zone, model, pool, price, cause
    ADMITTED = "admitted"  # its agent said hello and it is listed
    REFUSED = "refused"  # the cloud had no capacity (or quota)
    GENERATION = "generation"  # `gen` was published
    FIRST = "first"  # the processes of `gen` are in their loop: their first report has come
    STOP = "stop"  # members were told to save and stop
    NOTICE = "notice"
    REPRIEVE = "reprieve"
    ENDING = "ending"  # a machine's longest run (maxRunDuration) ends before long: planned, and no preemption
    LOSS = "loss"  # a node's machine is gone
    PROMOTED = "promoted"  # next became cur
    GONE = "gone"  # a superseded attempt is gone from the listing: billing ends
    CRASH = "crash"
    ROLL = "roll"
    FALLBACK = "fallback"  # on-demand for a limited time, with the reason
    MOVE = "move"
    FULL = "full"  # a node's disk had no room for a checkpoint: training goes on, the older one stays
    UNSAVED = "unsaved"  # a checkpoint could not be saved for another reason: the same, and the next save tries again
    DAMAGED = "damaged"  # a checkpoint on a node's disk that was whole is so no more
    MIRRORED = "mirrored"  # a copy of a checkpoint is complete in the bucket
    UNMIRRORED = "unmirrored"  # a copy in the bucket cannot be had: it is damaged, or gone
    FETCH = "fetch"  # no disk has what the job goes on from: it is fetched from the bucket
    PREFLIGHT_FAILED = "preflight-failed"  # preflight found an error on a machine at boot; training goes on
    SAVED = "saved"  # a later save of that node succeeded
    UNLOOPED = "unlooped"  # the job's script ended well and saved nothing: it called attach() and never looped
    LAG = "lag"  # a node's machine holds the others up: its own time of a step is far above the middle one's
    KEEPS_UP = "keepsup"  # it does no more
    LIMIT = "limit"  # a limit on spending or launches is reached: no machine is requested until it allows one
    HOLD = "hold"
    RESUME = "resume"
    SHELL = "shell"  # a person opened a shell on a machine
    REQUEST = "request"
    END = "end"
    DONE = "done"


# How causes begin that nobody announced: what was not saved by then is trained again.
SURPRISES = ("loss", "crash", "silence", "stall", "exit", "reboot", "disk", "host")


class Entry(Struct, frozen=True, omit_defaults=True):
    """One event. Readers take the first entry of an ``id``, since a crash may write a second GONE later."""

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
    on_demand: float | None = None  # of INTENT: what the same machine cost on-demand by the stack's list, USD per hour
    cause: str | None = None
    detail: str = ""
    started: float | None = None  # when the cloud created the machine (billing begins), where a listing told
    step: int | None = None  # of GENERATION: the one it goes on from
    again: int | None = None  # of GENERATION: steps before the stop that are done again, as far as it is known
    step_s: float | None = None  # of GENERATION: the usual time of a step, virtual seconds
    save_s: float | None = None  # of GENERATION: what a save takes, as it was measured last, virtual seconds
    by: str = ""  # of SUBMITTED and SHELL: who did
    ended: float | None = None  # of GONE: when the machine was off (billing ends), where the cloud told
