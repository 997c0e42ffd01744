"""A job's record: the one document of its decisions, compare-and-swapped.

Nothing here copies the cloud's state. A slot's INTENT says what was decided, ADMITTED and MEMBER what was accepted;
only a listing tells whether a VM runs. Counters (``top``, ``disk_top``, ``gen``, ``ver``) only rise.
"""

from __future__ import annotations

from enum import Enum
from typing import Annotated

from msgspec import Meta, Struct

from spotkeeper.contract.ledger import Entry
from spotkeeper.contract.stack import Model

BACKUP = "backup"  # the cause of an attempt: a second machine beside one that boots slowly
PROBE = "probe"  # the cause of an attempt: a machine beside one that trains, to learn whether an offer has capacity

# Times that a round stamps by its own clock, virtual unix seconds. If that was ahead, a past time counts as now, and a
# planned one stays as far away as it was (``reconcile/store/clock_skew.py``). Others are plain floats.
Past = Annotated[float, Meta(extra={"clock": "past"})]
Until = Annotated[float, Meta(extra={"clock": "until"})]


class Phase(str, Enum):
    """The life of a job.

    ====== ==================================== =============================
    state  meaning                              leaves to
    ====== ==================================== =============================
    RUN    reconcile keeps its nodes filled     HOLD, END
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
    CLOUD    the cloud refuses what no other offer avoids,  resume, or by itself: it tries again
             or no machine to be had holds a checkpoint     rarely
    CAPACITY a part of a gang is to be had, and not the     resume, or by itself: it tries again,
             rest                                           ever more seldom
    FAILURE  the job's own code: exit 93, or the crash      resume, with a fresh crash budget; it
             budget is used up                              ends after ``hold_days``
    SPEND    it has spent its ``max_usd``                   resume, which allows as much again;
                                                            it ends after ``hold_days``
    ======== ============================================== ===================================

    Each resume may bring other files: a corrected script, another ``max_usd``.
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
    """One attempt of a node: zone, model and pool are fixed here, before any call."""

    attempt: int
    state: SlotState
    pool: str
    zone: str
    model: Model
    since: Past  # when it came into this state
    machine: str | None = None  # the static machine's name, where the model is static
    uid: str | None = None  # the cloud's unique instance id, from ADMITTED on
    boot: str | None = None
    address: str | None = None
    cause: str | None = None  # why this attempt was requested: "start", "notice", "loss", "swap to spot", ...
    notice: float | None = None  # deadline of a standing notice; taken from facts, cleared by a reprieve
    cut: bool = False  # that deadline is a guess: the machine was found stopping without a notice
    ends: float | None = None  # when its longest run (maxRunDuration) ends: noted shortly before
    disk: bool = False  # its disk was attached when the newest generation began: it writes checkpoints
    has_newest: bool = False  # and the newest commit of that time was on it
    hardware_faults: int = 0  # crashes that left a sign of broken hardware on this machine
    past: tuple[str, ...] = ()  # boots of this machine that were admitted before; their hellos no longer count


class Node(Struct, frozen=True, omit_defaults=True, gc=False):
    """``cur`` trains (or will); ``next`` stands by without the node's disk."""

    top: int = 0
    disk: int = 0  # number of the disk that is the node's now
    disk_top: int = 0
    cur: Slot | None = None
    next: Slot | None = None
    # For a swap: "spot" (return to it, or to an idle node), "on-demand" (spot costs more), "user", "straggler"
    replace_reason: str | None = None
    copy: int | None = None  # number of the disk that a zone move is filling
    refused: tuple[str, ...] = ()  # offers ("pool/zone/model") refused since the current need arose
    refused_at: Past = 0.0  # when the newest of them was refused; they count until they have cooled down
    quota: str = ""  # what the cloud said, if the newest of them was refused for the account's quota
    bad: int = 0  # machines in a row that could not mount the node's disk
    zone: str | None = None  # where the node's disk is or will be
    cause: str = "start"  # why cur is vacant, for the next intent
    vacant_since: Past = 0.0
    launches: int = 0  # machines asked for since ``Limits.hour``, less those that were refused
    machine: str | None = None  # the static machine that has its checkpoints; None: its own disk has them
    wrote: int = 0  # the newest generation in which it wrote checkpoints there
    newest_generation: int = 0  # the newest generation at whose beginning the newest commit was there

    @property
    def probing(self) -> bool:
        """Whether ``next`` is a probe, which learns whether its offer has capacity, and no successor."""
        return self.next is not None and self.next.cause == PROBE


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
    """Separate counts: a preemption never consumes the crash budget."""

    crashes: int = 0
    preemptions: int = 0
    loss_times: tuple[Past, ...] = ()  # of the last losses, newest last (bounded), for select()
    crashed_gen: int = -1  # the newest generation whose crash was counted
    short_lives: int = 0  # consecutive spot machines whose life was shorter than a restart is worth


class Limits(Struct, frozen=True, omit_defaults=True):
    """What the limits on spending and launches remember (``reconcile/decide/job/limits.py``)."""

    hour: Past = 0.0  # since when launches are counted
    unexplained: int = 0  # nodes that vanished, not by preemption, since ``unexplained_since``
    unexplained_since: Past = 0.0
    closed_until: Until = 0.0  # the breaker: no replacement before
    spent: float = 0.0  # USD until ``spent_at``, as estimated
    spent_at: Past = 0.0
    usd_hour: float | None = None  # what its machines cost since then, an hour
    forgiven: float = 0.0  # what had been spent when a user resumed it at its limit
    swaps: tuple[Past, ...] = ()  # when stragglers were swapped within the last hour


class ZoneProbe(Struct, frozen=True, array_like=True):
    """When a zone was probed, and with how many machines."""

    zone: str
    at: Past
    machines: int


class Moved(Struct, frozen=True, array_like=True):
    """A completed move: when, and how many seconds it took."""

    at: Past
    s: float


class Mirrored(Struct, frozen=True):
    """A complete copy of a checkpoint in the bucket (``contract.uploads``)."""

    commit: str  # "<gen>-<step>"
    node: int  # whose part was complete last; of replicated state, the one that has it
    at: float  # when the function heard of it, virtual unix seconds


class Fetch(Struct, frozen=True):
    """The copy that these nodes' machines must download before the next generation begins."""

    commit: str
    source: int | None  # as in ``Mirrored.node``; None: each node its own part
    nodes: tuple[int, ...]


class Record(Struct, frozen=True, omit_defaults=True):
    """A job's record, ``jobs/<job>/rec``."""

    job: str
    uid: str
    name: str
    spec_sha256: str  # of the job file in force (``job.spec_sha256``)
    created: float
    ver: int = 0
    nonce: str = ""  # of the last writer: it shows that a write without an answer has won
    phase: Phase = Phase.RUN
    outcome: Outcome | None = None
    reason: str = ""  # why it holds, or how it ended, for people
    gen: int = 0  # 0: no generation yet
    gen_since: Past = 0.0
    stop: bool = False  # members must save and stop; stays set while any node waits
    stop_since: Past = 0.0
    stop_deadline: Until | None = None
    roll: Roll | None = None
    move: Move | None = None
    zone: str | None = None  # the gang's zone, unless `spread`
    machine_type: str = ""  # of its last generation's dynamic machines, most of them, where the stack has several
    nodes: tuple[Node, ...] = ()
    members: tuple[int, ...] = ()  # node numbers in the generation's order; members[0] is the master
    port_base: int = 20000
    budget: Budget = Budget()
    fallback_until: Until = 0.0  # on-demand until then, if above now
    requests_done: tuple[str, ...] = ()  # ids of requests already taken in (bounded)
    keep_disks: bool = False
    hold: Hold | None = None  # why it holds, while it does
    hold_ends: float | None = None  # when this hold ends the job and its disks; None: never
    hold_late: Past | None = None  # when a round found that time passed; its clock may have been ahead
    pause: str = ""  # why it will hold as soon as its members have saved and stopped
    hold_until: Until | None = None  # when a hold that ends by itself tries again; None: until a user resumes
    hold_count: int = 0  # in a row, without a generation in between
    roll_at: Past = 0.0  # when the last roll call was closed
    busy_at: Past = 0.0  # when the last one for a hang found a node that is only slow
    dry_since: Past | None = None  # since when the gang's zone has had no offer
    short_since: Past | None = None  # since when some of its machines wait for others without capacity
    limits: Limits = Limits()
    spec_replaced: bool = False  # a resume brought another job file, stored under `spec_sha256`
    given_up: str = ""  # the newest commit when a user chose to continue without it, as "<gen>-<step>"
    mirror: tuple[Mirrored, ...] = ()  # what may be fetched from the bucket, newest first
    mirror_top: str = ""  # the newest copy that was ever in ``mirror``: a deleted one does not come back
    told: str = ""  # the newest checkpoint that a machine had on its disk, where copies are made: reports do not last
    fetch: Fetch | None = None  # while a generation waits for it
    probes: tuple[ZoneProbe, ...] = ()  # in other zones, the last of each kind
    moved: Moved | None = None  # to the gang's zone, the last time
    size: int | None = None  # how many nodes a resize asked for
    parked: tuple[int, ...] = ()  # those that are not; (): the highest
    outbox: tuple[Entry, ...] = ()  # ledger entries of the change that made this version; written before the next

    def spec_key(self) -> str:
        """Return the key of the job file in force: a hash, or "" for the submitted file."""
        return self.spec_sha256 if self.spec_replaced else ""

    def go_back(self) -> str:
        """Return the command with which a user continues without the newest checkpoint."""
        return f"spotkeeper resume {self.name} --go-back"

    def wanted(self) -> int:
        """Return how many nodes get a machine. The others are parked: without machine, with their counters."""
        return len(self.nodes) if self.size is None else min(self.size, len(self.nodes))

    def filled(self, count: int | None = None) -> tuple[int, ...]:
        """Return the nodes that get a machine. ``count``: the number of all nodes, if this record has none yet."""
        every = range(len(self.nodes) if count is None else count)
        if self.parked or self.size is None:
            return tuple(index for index in every if index not in self.parked)
        return tuple(every[: self.size])
