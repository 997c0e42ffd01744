"""A job's record: the single document of its decisions, written by compare-and-swap.

The record copies no state of the cloud: INTENT says that a machine was decided, ADMITTED and MEMBER that it was
accepted, and only a listing tells whether it runs. Counters (``top``, ``disk_top``, ``gen``, ``ver``) only increase.
"""

from __future__ import annotations

from enum import Enum
from typing import Annotated

from msgspec import Meta, Struct

from spotkeeper.contract.job import MOST_NODES
from spotkeeper.contract.ledger import Entry
from spotkeeper.contract.stack import Model, within
from spotkeeper.contract.sweep import Trial

BACKUP = "backup"  # the cause of an attempt: a second machine beside one that boots slowly
PROBE = "probe"  # the cause of an attempt: a machine beside one that trains, to learn whether an offer has capacity
NO_SPOT_YET = "no spot yet"  # the beginning of the cause of a fallback that continues the one before it

# Times that a round takes from its own clock, virtual unix seconds. If that clock was ahead, a later round sets a
# ``Past`` time to now and moves an ``Until`` time by the same amount (``reconcile/store/clock_skew.py``). Other times
# are floats.
Past = Annotated[float, Meta(extra={"clock": "past"})]
Until = Annotated[float, Meta(extra={"clock": "until"})]


class Phase(str, Enum):
    """The life of a job.

    ====== ==================================== =============================
    state  meaning                              leaves to
    ====== ==================================== =============================
    RUN    reconcile gives each node a machine  HOLD, END
    HOLD   machines deleted, disks kept         RUN (a resume or a retry), END (a cancel, or ``hold_ends`` is past)
    END    outcome known, resources deleted     DONE when all zones are clean
    DONE   nothing left but this record         -
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
    STOPPED = "stopped"  # a trial of a search that others have beaten, or whose search has spent its money


class Hold(str, Enum):
    """Why a job is on hold, and what ends the hold.

    ======== ============================================== ===================================
    reason   meaning                                        left by
    ======== ============================================== ===================================
    PAUSE    a user paused it                               resume
    CLOUD    the cloud refuses every offer, or no available resume, or a rare retry
             machine has the checkpoint
    CAPACITY only some of a gang's machines are available   resume, or a retry at growing intervals
    FAILURE  the job's own code: exit 93, or the crash      resume, with a new crash budget; the job
             budget is used up                              ends after ``hold_days``
    SPEND    the job has spent its ``max_usd``              resume, which allows the same amount again;
                                                            the job ends after ``hold_days``
    MAX_WAIT `policy: spot`: the market has had no machines resume, which begins the wait again; the
             for it for ``max_wait``                        job ends after ``hold_days``
    QUEUE    its machines went to another job               a reservation, by the queue
    RUNG     a trial of a search waits for the others       the last report of the rung
    ======== ============================================== ===================================

    Each resume can bring other files: a corrected script, another ``max_usd``.
    """

    PAUSE = "pause"
    CLOUD = "cloud"
    CAPACITY = "capacity"
    FAILURE = "failure"
    SPEND = "spend"
    MAX_WAIT = "max_wait"
    QUEUE = "queue"
    RUNG = "rung"

    @property
    def passes(self) -> bool:
        """Whether the hold ends once other jobs have done something: no person needs to resume the job."""
        return self in (Hold.QUEUE, Hold.RUNG)


class SlotState(str, Enum):
    """How far an attempt's machine has come; the states follow each other in this order.

    INTENT: decided, perhaps not made yet. ADMITTED: the cloud lists it, and it said hello. MEMBER: in the generation.
    """

    INTENT = "intent"
    ADMITTED = "admitted"
    MEMBER = "member"


class Slot(Struct, frozen=True, omit_defaults=True, gc=False):
    """What the record says of an attempt. Its zone, model and pool are fixed before any call to the cloud."""

    attempt: int
    state: SlotState
    pool: str
    zone: str
    model: Model
    since: Past  # since when it is in this state
    machine: str | None = None  # the static machine's name; None: a machine of a pool
    uid: str | None = None  # the cloud's unique instance id, from ADMITTED on
    boot: str | None = None
    address: str | None = None
    cause: str | None = None  # why this attempt was requested: "start", "notice", "loss", "swap to spot", ...
    notice: float | None = None  # deadline of the notice in force, from facts; None after a reprieve
    cut: bool = False  # the machine was found stopping without a notice, so the deadline in ``notice`` is a guess
    ends: float | None = None  # when its maxRunDuration or its reserved capacity ends; set shortly before
    disk: bool = False  # its disk was attached when the newest generation began, so it writes checkpoints
    has_newest: bool = False  # its disk had the newest commit when the newest generation began
    hardware_faults: int = 0  # number of crashes with a sign of broken hardware on this machine
    past: tuple[str, ...] = ()  # earlier admitted boots of this machine: their hellos no longer count
    reservation: str | None = None  # the name of the reserved capacity that the machine uses


class Node(Struct, frozen=True, omit_defaults=True, gc=False):
    """A node's machines: ``cur`` trains or will train; ``next`` gets the node's disk only when it becomes ``cur``."""

    top: int = 0  # the highest attempt number used
    disk: int = 0  # number of the node's current disk
    disk_top: int = 0  # the highest disk number used
    cur: Slot | None = None
    next: Slot | None = None
    # Why to replace `cur`: "spot" (back to spot or to an idle static machine), "on-demand" (spot costs more), "user",
    # "straggler"
    replace_reason: str | None = None
    copy: int | None = None  # number of the disk to which a zone move copies the node's data
    warm: int | None = None  # number of the newest warm copy of its disk (``decide/checkpoint/warm.py``)
    warms: int = 0  # numbers that warm copies have used since the node's disk was new
    refused: tuple[str, ...] = ()  # offers ("pool/zone/model") refused since the node needed a machine
    refused_at: Past = 0.0  # time of the newest refusal; all of them expire `cold_s` later
    quota: str = ""  # the cloud's message, if the newest refusal was for the account's quota
    bad: int = 0  # consecutive machines that could not mount the node's disk
    zone: str | None = None  # where the node's disk is or will be
    cause: str = "start"  # why `cur` is vacant: the cause of the next intent
    vacant_since: Past = 0.0
    launches: int = 0  # machines requested since ``Limits.hour``, without refused requests
    machine: str | None = None  # the static machine whose disk has its checkpoints; None: the node's own disk has them
    wrote: int = 0  # the last generation in which it wrote checkpoints to that disk
    newest_generation: int = 0  # the last generation that began with the newest commit on that disk

    @property
    def probing(self) -> bool:
        """Whether ``next`` is a probe (it only tests whether its offer has capacity) and not a replacement."""
        return self.next is not None and self.next.cause == PROBE

    def keeps(self, generation: int) -> bool:
        """Whether its checkpoint disk has this generation's newest commit, which is the job's newest.

        It was written there, or was there when a later generation began.
        """
        return self.wrote == generation or self.newest_generation > generation


class LeftDisk(Struct, frozen=True, array_like=True):
    """A node's disk in the zone that its gang has left, with what ``Node`` says of it."""

    disk: int
    machine: str | None
    wrote: int
    newest_generation: int


class Move(Struct, frozen=True, omit_defaults=True):
    """A move of the whole gang to another zone, with copies of its disks or from a copy in the bucket."""

    zone: str
    since: Past
    dry: bool = False  # the gang's own zone had no capacity
    silent_since: Past | None = None  # since when that zone does not answer, while the gang's own zone does
    bucket: bool = False  # the checkpoint goes by its copy in the bucket; False: by snapshots of the disks
    origin: str = ""  # by the bucket, once the copy is complete: the zone that the gang has left; "": not yet
    left: tuple[LeftDisk, ...] = ()  # the nodes' disks there, until the gang trains in the new zone


class ZoneRequest(Struct, frozen=True, array_like=True):
    """A move that a user requested; it begins once a machine for each node stands there."""

    zone: str  # or a region: any of its zones
    since: Past

    def covers(self, zone: str) -> bool:
        return within(zone, self.zone)


class Roll(Struct, frozen=True):
    """A roll call: every member must answer version ``ver`` of the generation document."""

    ver: int
    since: Past
    cause: str  # "exit", "stall", "silence", "hang"
    exits: bool = False  # a process of the generation had ended: if all members answer, its end counts as a crash


class Budget(Struct, frozen=True, omit_defaults=True):
    """Counts of crashes and of preemptions; a preemption never uses the crash budget."""

    crashes: int = 0
    preemptions: int = 0
    loss_times: tuple[Past, ...] = ()  # times of the last losses, newest last, at most 32, for select()
    crashed_gen: int = -1  # the newest generation whose crash was counted
    short_lives: int = 0  # consecutive spot machines that lived too short to be worth a restart


class Limits(Struct, frozen=True, omit_defaults=True):
    """State of the limits on spending and launches (``reconcile/decide/job/limits.py``)."""

    hour: Past = 0.0  # start of the hour in which launches are counted
    unexplained: int = 0  # machines that vanished without a preemption since ``unexplained_since``
    unexplained_since: Past = 0.0
    closed_until: Until = 0.0  # set by the circuit breaker: no replacement before this time
    spent: float = 0.0  # estimated cost until ``spent_at``, USD
    spent_at: Past = 0.0
    usd_hour: float | None = None  # cost of its machines since then, USD per hour
    forgiven: float = 0.0  # ``spent`` when a user resumed the job at its ``max_usd``: the limit counts from that sum
    swaps: tuple[Past, ...] = ()  # when stragglers were swapped within the last hour


class ZoneProbe(Struct, frozen=True, array_like=True):
    """When a zone was probed, and with how many machines."""

    zone: str
    at: Past
    machines: int


class Moved(Struct, frozen=True, array_like=True):
    """A completed zone move: when it ended and how many seconds it took."""

    at: Past
    s: float
    gb: float = 0.0  # of the largest copy of a disk; 0: unknown


class MoveTime(Struct, frozen=True, array_like=True):
    """How long the last move to another region took that went by the bucket, or by snapshots, seconds."""

    bucket: bool
    s: float


class Warm(Struct, frozen=True):
    """The newest warm copies of a gang's disks."""

    region: str  # where they are stored
    at: Past
    commit: str  # the newest checkpoint at that time, "<gen>-<step>"
    usd: float | None = None  # what they transferred; None: they are not complete


class Owed(Struct, frozen=True, array_like=True):
    """A copy of a node's disk that has perhaps gone to another region: the ledger lacks it until the cloud lists it."""

    node: int
    number: int  # of the disk made of the copy, or of the warm copy
    source: str  # region
    target: str  # region
    since: Past  # when nothing asked for it any more
    gb: float  # its estimated size, used if the cloud tells none
    warm: bool = False


class Mirrored(Struct, frozen=True):
    """A complete copy of a checkpoint in the bucket (``contract.uploads``)."""

    commit: str  # "<gen>-<step>"
    node: int  # sharded: the node whose part was complete last; replicated: the node that uploaded it
    at: float  # when the function received the report, virtual unix seconds
    bytes: int = 0  # of all its files, and of all nodes' parts


class Fetch(Struct, frozen=True):
    """A checkpoint's copy in the bucket, which the machines of ``nodes`` must download before the next generation."""

    commit: str
    source: int | None  # the node whose copy to download; None: each node downloads its own part
    nodes: tuple[int, ...]


class TrialProgress(Struct, frozen=True, omit_defaults=True):
    """How far a trial of a search has come (``decide/gang/rungs.py``)."""

    of: Trial
    rung: int = 0  # rungs after which it has continued
    values: tuple[float | None, ...] = ()  # its metric at each rung that it has reached
    reached_at: Past = 0.0  # when it reached the last of them
    final: float | None = None  # its metric when it had trained to its end

    @property
    def until(self) -> int | None:
        """The step at which it stops and waits; None: it trains to its end."""
        return self.of.rungs[self.rung] if self.rung < len(self.of.rungs) else None

    @property
    def reached(self) -> bool:
        return len(self.values) > self.rung


class Record(Struct, frozen=True, omit_defaults=True):
    """A job's record, ``jobs/<job>/rec``."""

    job: str
    uid: str
    name: str
    spec_sha256: str  # of the job file in force (``job.spec_sha256``)
    created: float
    ver: int = 0
    nonce: str = ""  # of the last write: after a lost answer, it shows whether the write succeeded
    phase: Phase = Phase.RUN
    outcome: Outcome | None = None
    reason: str = ""  # why the job waits, is on hold or ended, for users
    gen: int = 0  # 0: no generation yet
    gen_since: Past = 0.0
    stop: bool = False  # members must save and stop; stays set while any node waits for a machine
    stop_since: Past = 0.0
    stop_deadline: Until | None = None
    roll: Roll | None = None
    move: Move | None = None
    asked_zone: ZoneRequest | None = None  # a user's move that has not begun
    zone: str | None = None  # the gang's zone; None with `spread`
    machine_type: str = ""  # of most dynamic machines in the last generation, if the stack has several types
    # Submitters create records. Claims and grants of more nodes would make the stack's allocation unreadable.
    nodes: Annotated[tuple[Node, ...], Meta(max_length=MOST_NODES)] = ()
    members: tuple[int, ...] = ()  # node numbers in the generation's order; members[0] is the master
    port_base: int = 20000
    budget: Budget = Budget()
    fallback_until: Until = 0.0  # end of the on-demand fallback; past: none
    fell_back: bool = False  # since the first of its fallbacks in a row, until it trains without on-demand machines
    requests_done: tuple[str, ...] = ()  # ids of the last 64 handled requests
    keep_disks: bool = False
    hold: Hold | None = None  # why the job is on hold; None: it is not on hold
    hold_ends: float | None = None  # when the job ends if it is still on hold, and its disks are deleted; None: never
    hold_late: Past | None = None  # when a round first found ``hold_ends`` past; clocks may err: a second confirms it
    owner: str = ""  # who submitted it, as the function verified; "": nobody has proved it
    pause: str = ""  # why the job goes on hold once its members have saved and stopped; "": it does not
    recalled: bool = False  # whether it pauses because the queue takes its machines
    hold_until: Until | None = None  # when a hold retries by itself; None: it waits for a resume
    hold_count: int = 0  # consecutive holds without a generation in between
    roll_at: Past = 0.0  # when the last roll call ended
    busy_at: Past = 0.0  # when the last roll call for a hang found a node that is only slow
    dry_since: Past | None = None  # since when the gang's zone has no offer
    market_since: Past | None = None  # since when it lacks a machine because the market has none; counts only ...
    market_wait_s: float = 0.0  # ... for `max_wait` under `policy: spot`, after this earlier time of the same wait
    short_since: Past | None = None  # since when some of the gang's machines wait for the rest
    limits: Limits = Limits()
    spec_replaced: bool = False  # a resume brought another job file, stored under `spec_sha256`
    given_up: str = ""  # the newest commit when the job continued without it, as "<gen>-<step>"; "": never
    mirror: tuple[Mirrored, ...] = ()  # complete copies in the bucket, newest first
    mirror_top: str = ""  # the newest copy ever listed in ``mirror``: late reports do not add deleted ones again
    told: str = ""  # if checkpoints are copied: the newest one reported from a disk, kept because facts are deleted
    fetch: Fetch | None = None  # the copy that a generation waits for
    probes: tuple[ZoneProbe, ...] = ()  # the last probes of other zones
    warm: Warm | None = None
    moved: Moved | None = None  # the last move to the gang's zone
    move_times: tuple[MoveTime, ...] = ()  # at most one for each way to another region
    owed: tuple[Owed, ...] = ()
    asked: int | None = None  # number of nodes that a user wants since the last resize; None: all
    size: int | None = None  # number of nodes since the last resize, by a user or by the queue; None: all
    parked: tuple[int, ...] = ()  # nodes without a machine after a resize; (): the highest-numbered ones
    trial: TrialProgress | None = None  # None: the job is no trial of a search
    outbox: tuple[Entry, ...] = ()  # ledger entries of this version's change, written before the next change

    @property
    def over(self) -> bool:
        """Whether the job's outcome is known; it needs no machines any more."""
        return self.phase in (Phase.END, Phase.DONE)

    @property
    def leaving(self) -> bool:
        """Whether a move has not brought the gang's checkpoint to the new zone yet, so that no node gets a machine."""
        return self.move is not None and not self.move.origin

    def zones(self) -> set[str]:
        """Return the zones of the gang and its disks, and those that a move leads to and has left."""
        moves = (self.move.zone, self.move.origin) if self.move is not None else ()
        return {zone for zone in (self.zone, *moves, *(node.zone for node in self.nodes)) if zone}

    def spec_key(self) -> str:
        """Return the key of the current job file: the file's hash if a resume brought it, else ""."""
        return self.spec_sha256 if self.spec_replaced else ""

    def go_back(self) -> str:
        """Return the command with which a user continues without the newest checkpoint."""
        return f"spotkeeper resume {self.name} --go-back"

    def wanted(self) -> int:
        """Return the number of nodes that get a machine. The others are parked: only their counters are kept."""
        return len(self.nodes) if self.size is None else min(self.size, len(self.nodes))

    def filled(self, count: int | None = None) -> tuple[int, ...]:
        """Return which of the nodes 0 to ``count`` - 1 get a machine; ``count`` None: which of ``nodes``."""
        every = range(len(self.nodes) if count is None else count)
        if self.parked:
            return tuple(index for index in every if index not in self.parked)
        return tuple(every[: self.size])
