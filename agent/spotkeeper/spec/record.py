"""The job's record: the one document of decisions, and the only one that is compare-and-swapped.

Nothing here mirrors the cloud. A slot's INTENT says what was decided, ADMITTED and
MEMBER say what was accepted; whether a VM runs is read from a listing, every time.
Counters (``top``, ``disk_top``, ``gen``, ``ver``) only rise.
"""

from __future__ import annotations

from enum import Enum
from typing import Annotated

from msgspec import Meta, Struct

from spotkeeper.spec.ledger import Entry
from spotkeeper.spec.model import Model

LOOK = "look"  # the cause of an attempt: a machine beside what trains, to see whether what it is of is to be had

# Times that a round stamps by its own clock, virtual unix seconds: if that was ahead, they are believed for no more
# than now, or for no later than they were planned (``reconcile/skew.py``). All other times are plain floats.
Past = Annotated[float, Meta(extra={"clock": "past"})]
Until = Annotated[float, Meta(extra={"clock": "until"})]


class Phase(str, Enum):
    """The life of a job.

    ====== ==================================== =============================
    state  meaning                              leaves to
    ====== ==================================== =============================
    RUN    reconcile keeps its ranks filled     HOLD, END
    HOLD   machines given up, disks kept        RUN (asked or healed), END (asked, or its time is up)
    END    outcome known, things being deleted  DONE when all zones are clean
    DONE   nothing is left; this is a tombstone -
    ====== ==================================== =============================
    """

    RUN = "run"
    HOLD = "hold"
    END = "end"
    DONE = "done"


class Outcome(str, Enum):
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Hold(str, Enum):
    """Why a job holds, and what ends the hold.

    ======== ============================================== ===================================
    reason   meaning                                        left by
    ======== ============================================== ===================================
    PAUSE    somebody asked for it                          resume
    CLOUD    the cloud refuses what no other offer mends,   resume, or by itself: it tries again
             or no machine to be had holds a checkpoint     rarely
    CAPACITY a part of a gang is to be had, and not the     resume, or by itself: it tries again,
             rest                                           ever more seldom
    FAILURE  the job's own code: exit 93, or the crash      resume, with a fresh crash budget; it
             budget is used up                              ends after ``hold_days``
    SPEND    it has spent its ``max_usd``                   resume, which allows as much again;
                                                            it ends after ``hold_days``
    ======== ============================================== ===================================

    Each resume may bring other files: a mended script, another ``max_usd``.
    """

    PAUSE = "pause"
    CLOUD = "cloud"
    CAPACITY = "capacity"
    FAILURE = "failure"
    SPEND = "spend"


class SlotState(str, Enum):
    """INTENT (decided, the VM may not exist) -> ADMITTED (said hello, is listed) -> MEMBER (in the generation)."""

    INTENT = "intent"
    ADMITTED = "admitted"
    MEMBER = "member"


class Slot(Struct, frozen=True, omit_defaults=True, gc=False):
    """One attempt of a rank: zone, model and pool are fixed here, before any call."""

    attempt: int
    state: SlotState
    pool: str
    zone: str
    model: Model
    since: Past  # when it came into this state
    node: str | None = None  # the static node's name, where the model is static
    uid: str | None = None  # the cloud's unique instance id, from ADMITTED on
    boot: str | None = None
    address: str | None = None
    cause: str | None = None  # why this attempt was asked for: "start", "notice", "loss", "swap to spot", ...
    notice: float | None = None  # deadline of a standing notice; taken from facts, cleared by a reprieve
    cut: bool = False  # that deadline is our guess: the machine was found stopping, and nobody had said so
    ends: float | None = None  # its longest run (maxRunDuration) is over then: noted when that comes near
    disk: bool = False  # its disk was attached when the newest generation began: it writes checkpoints
    holds: bool = False  # and the newest commit of that moment was on it
    sick: int = 0  # crashes that left a sign of broken hardware on this machine
    past: tuple[str, ...] = ()  # boots of this machine that were admitted before; their hellos count no more


class Rank(Struct, frozen=True, omit_defaults=True, gc=False):
    """``cur`` trains (or will); ``next`` stands by without the rank's disk."""

    top: int = 0
    disk: int = 0  # number of the disk that is the rank's now
    disk_top: int = 0
    cur: Slot | None = None
    next: Slot | None = None
    # For a swap: "spot" (return to it, or to an idle node), "on-demand" (spot costs more), "user", "straggler"
    wish: str | None = None
    copy: int | None = None  # number of the disk that a zone move is filling
    refused: tuple[str, ...] = ()  # offers ("pool/zone/model") refused since the current need arose
    refused_at: Past = 0.0  # when the newest of them was refused; they count until they are cold no more
    bad: int = 0  # machines in a row that could not mount the rank's disk
    zone: str | None = None  # where the rank's disk is or will be
    cause: str = "start"  # why cur is vacant, for the next intent
    vacant_since: Past = 0.0
    launches: int = 0  # machines asked for since ``Fuses.hour``, less those that were refused
    node: str | None = None  # the static node that has its checkpoints; None: its own disk has them
    wrote: int = 0  # the newest generation in which it wrote checkpoints there
    held: int = 0  # the newest generation at whose beginning the newest commit was there

    @property
    def looks(self) -> bool:
        """Whether ``next`` is no successor, but a machine that looks whether spot is to be had where it is."""
        return self.next is not None and self.next.cause == LOOK


class Move(Struct, frozen=True):
    """The whole gang moves to another zone with copies of its disks."""

    zone: str
    since: Past


class Roll(Struct, frozen=True):
    """A roll call: every member must answer this version of the document."""

    ver: int
    since: Past
    cause: str  # "exit", "stall", "silence", "hang"
    exits: bool = False  # a process of the generation had ended: answered by all, it counts as a crash


class Budget(Struct, frozen=True, omit_defaults=True):
    """Two budgets: a preemption never consumes the crash budget."""

    crashes: int = 0
    preemptions: int = 0
    loss_times: tuple[Past, ...] = ()  # of the last losses, newest last (bounded), for select()
    crashed_gen: int = -1  # the newest generation whose crash was counted
    short_lives: int = 0  # spot machines in a row that lived shorter than a restart is worth


class Fuses(Struct, frozen=True, omit_defaults=True):
    """What the money fuses remember (``reconcile/decide/fuses.py``)."""

    hour: Past = 0.0  # since when launches are counted
    doubts: int = 0  # ranks that vanished, not by preemption, since ``doubted``
    doubted: Past = 0.0
    closed_until: Until = 0.0  # the breaker: no replacement before
    spent: float = 0.0  # USD until ``spent_at``, as estimated
    spent_at: Past = 0.0
    usd_hour: float | None = None  # what its machines cost since then, an hour
    forgiven: float = 0.0  # what had been spent when somebody resumed it at its cap
    swaps: tuple[Past, ...] = ()  # when stragglers were swapped within the last hour


class Look(Struct, frozen=True, array_like=True):
    """When so many machines were sent to a zone to see whether spot is there."""

    zone: str
    at: Past
    machines: int


class Moved(Struct, frozen=True, array_like=True):
    """A move that has come to its end: when, and how many seconds the gang was under way."""

    at: Past
    s: float


class Mirrored(Struct, frozen=True):
    """A complete copy of a checkpoint in the bucket (``spec.mirror``)."""

    commit: str  # "<gen>-<step>"
    rank: int  # whose part was complete last; of replicated state, the one that has it
    at: float  # when the function heard of it, virtual unix seconds


class Fetch(Struct, frozen=True):
    """Which copy these ranks' machines shall bring onto their disks before the next generation begins."""

    commit: str
    source: int | None  # as in ``Mirrored.rank``; None: each its own part
    ranks: tuple[int, ...]


class Record(Struct, frozen=True, omit_defaults=True):
    """``jobs/<job>/rec``."""

    job: str
    uid: str
    name: str
    spec_sha256: str  # of the job file in force (``job.spec_sha256``)
    created: float
    ver: int = 0
    nonce: str = ""  # of the last writer: a lost answer to our own write is a win
    phase: Phase = Phase.RUN
    outcome: Outcome | None = None
    reason: str = ""  # why it holds, or how it ended, for people
    gen: int = 0  # 0: no generation yet
    gen_since: Past = 0.0
    stop: bool = False  # members must save and stop; stays set while any rank waits
    stop_since: Past = 0.0
    stop_deadline: Until | None = None
    roll: Roll | None = None
    move: Move | None = None
    zone: str | None = None  # the gang's zone, unless `spread`
    ranks: tuple[Rank, ...] = ()
    members: tuple[int, ...] = ()  # rank numbers in the generation's order; members[0] is the master
    port_base: int = 20000
    budget: Budget = Budget()
    bout_until: Until = 0.0  # on-demand until then, if above now
    asks_done: tuple[str, ...] = ()  # ids of asks already taken in (bounded)
    keep_disks: bool = False
    hold: Hold | None = None  # why it holds, while it does
    hold_ends: float | None = None  # when this hold ends the job and its disks; None: never
    pause: str = ""  # why it shall hold as soon as its members have saved and stopped
    hold_until: Until | None = None  # a hold that heals by itself tries again then; None: until somebody asks
    holds: int = 0  # in a row, without a generation in between
    roll_at: Past = 0.0  # when the last roll call was closed
    busy_at: Past = 0.0  # when the last one for a hang found a rank that only takes long
    dry_since: Past | None = None  # since when the gang's zone has offered nothing
    short_since: Past | None = None  # since when some of its machines wait for others that are not to be had
    fuses: Fuses = Fuses()
    mended: bool = False  # a resume brought other files: the job file is the one stored by `spec_sha256`
    given_up: str = ""  # the newest commit when somebody chose to go on without it, as "<gen>-<step>"
    mirror: tuple[Mirrored, ...] = ()  # what may be fetched from the bucket, newest first
    mirror_top: str = ""  # the newest copy that was ever in ``mirror``: one that is gone does not come back
    told: str = ""  # the newest checkpoint that a machine had on its disk, where copies are made: reports do not last
    fetch: Fetch | None = None  # while a generation waits for it
    looked: tuple[Look, ...] = ()  # in other zones, the last of each kind
    moved: Moved | None = None  # to the gang's zone, the last time
    size: int | None = None  # how many ranks are wanted since somebody resized the job
    parked: tuple[int, ...] = ()  # those that are not; (): the highest
    outbox: tuple[Entry, ...] = ()  # ledger entries of the change that made this version; written before the next

    def spec_key(self) -> str:
        """Which of the job's stored files is in force: a hash, or "" for the one as submitted."""
        return self.spec_sha256 if self.mended else ""

    def go_back(self) -> str:
        """The command that goes on without the newest checkpoint, where that cannot be had."""
        return f"spotkeeper resume {self.name} --go-back"

    def wanted(self) -> int:
        """How many ranks are to be filled. The others are parked: no machine, their counters kept."""
        return len(self.ranks) if self.size is None else min(self.size, len(self.ranks))

    def filled(self, count: int | None = None) -> tuple[int, ...]:
        """The ranks that are to have a machine. ``count``: of all ranks, where this record does not hold them."""
        every = range(len(self.ranks) if count is None else count)
        if self.parked or self.size is None:
            return tuple(index for index in every if index not in self.parked)
        return tuple(every[: self.size])


class Grant(Struct, frozen=True, omit_defaults=True, gc=False):
    """An entry of ``stack/alloc``: this attempt may have this machine.

    ``resource`` is ``slot:<pool>`` for a spot machine under the pool's cap,
    ``slot:<pool>/on-demand`` for an on-demand one (it counts under both of the pool's
    caps), or ``node:<name>`` for one static node.
    """

    job: str
    rank: int
    attempt: int
    resource: str
    since: float = 0.0


class Alloc(Struct, frozen=True, omit_defaults=True):
    """``stack/alloc``: who may have what, for the whole stack; compare-and-swapped."""

    ver: int = 0
    nonce: str = ""
    grants: tuple[Grant, ...] = ()
