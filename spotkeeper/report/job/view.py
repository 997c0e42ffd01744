"""The view of a job as plain values, for ``watch``, ``status``, ``report`` and the demo.

It is made from documents alone (record, progress, ledger, stack) and never from a listing of the cloud, so that
viewing a job costs five reads of the bucket.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

from msgspec import Struct

from spotkeeper.contract.generation import Progress
from spotkeeper.contract.ledger import Entry, Event
from spotkeeper.contract.names import vm_name
from spotkeeper.contract.record import Hold, Node, Outcome, Phase, Record, Slot, SlotState
from spotkeeper.contract.stack import Model, StackState
from spotkeeper.report.job.events import EventLine, describe, event_lines
from spotkeeper.report.job.hold import HoldView, hold_view
from spotkeeper.report.job.metrics import MetricView
from spotkeeper.report.job.recovery import Preemptions, Recovery, preemptions, recoveries
from spotkeeper.report.job.waiting import TrialPart, WaitingView
from spotkeeper.report.job.worktime import trained_usd
from spotkeeper.report.money.money import NO_PRICES, Money, PricesByPool, first_of_each, money

QUIET_S = 180.0  # virtual: steps are reported within a minute, and a generation's first step takes longer
QUIET_STEPS = 3  # how many times the usual duration of a step
UNTOUCHED_S = 600.0  # virtual; a tick comes each minute, and the first one changes something
FALLBACK = "on-demand fallback"  # the selection's reason during a fallback


class NodeState(str, Enum):
    """The state of a node's machine: BOOTING -> (READY | STANDBY) -> TRAINING -> SAVING -> STOPPED.

    ======== ==========================================================
    state    meaning
    ======== ==========================================================
    BOOTING  requested, and not heard from yet
    READY    admitted, waits for the next generation
    STANDBY  a replacement that is ready while the old machine trains
    TRAINING in the running generation
    SAVING   told to save and stop
    STOPPED  has stopped, and waits until every node has a machine, or until the job is on hold
    NOTICE   in the generation, with a preemption notice
    WAITING  the node has no machine
    ======== ==========================================================
    """

    BOOTING = "booting"
    READY = "ready"
    STANDBY = "standby"
    TRAINING = "training"
    SAVING = "saving"
    STOPPED = "stopped"
    NOTICE = "notice"
    WAITING = "waiting"


class NodeView(Struct, frozen=True):
    """One machine of a node. A node with a replacement has two machines."""

    node: int
    state: NodeState
    master: bool = False
    attempt: int = 0
    pool: str = ""
    zone: str = ""
    model: Model | None = None
    machine: str | None = None  # a static machine's name
    vm: str = ""  # the machine's name in the cloud
    age_s: float | None = None  # since its intent (virtual)
    left_s: float | None = None  # until its notice's deadline, or its planned end
    lag: str = ""  # "1.6x the median": how slow it is, if it delays the others
    reason: str = ""  # why this model and zone; "" for a static machine


def several_pools(nodes: tuple[NodeView, ...]) -> bool:
    """Whether the machines are of several pools, so that views name each one's."""
    return len({node.pool for node in nodes if node.pool}) > 1


class Site(Struct, frozen=True):
    """The stack's clock and whether its ticks succeed. ``scale``: the clock's speed, as a multiple of real time.

    ``no_tick``: "no tick succeeded for 12 minutes: ..."; "" while ticks succeed.
    """

    scale: float = 1.0
    local: bool = False  # the one-machine cloud
    no_tick: str = ""


CLOUD = Site()


class OutputView(Struct, frozen=True):
    """The size of a succeeded job's output, for ``spotkeeper download``."""

    files: int
    bytes: int


class JobView(Struct, frozen=True):
    """A job as `status`, `watch` and the demo show it. Times are virtual seconds, except ``samples_per_s``."""

    job: str
    name: str
    phase: Phase
    gen: int
    elapsed_s: float
    nodes: tuple[NodeView, ...]
    money: Money
    user: str = ""  # who submitted the job; "": unknown
    outcome: Outcome | None = None
    reason: str = ""
    hold: HoldView | None = None
    queue: WaitingView | None = None  # its place in the queue, if it waits there; ``reason`` is then this one's
    search: TrialPart | None = None  # only for `status JOB`, `watch` and `report`: the search of which it is a trial
    stopping: bool = False
    step: int | None = None
    total_steps: int | None = None
    loss: float | None = None
    samples_per_s: float | None = None  # of real time, while it trains
    no_new_step_s: float | None = None  # since the last step, if longer than usual
    commit_step: int | None = None
    image_steps: int | None = None  # steps between images of the state, while it trains
    image_share: float | None = None  # share of the training time that these cost
    preemptions: Preemptions = Preemptions()
    crashes: int = 0
    events: tuple[EventLine, ...] = ()
    recoveries: tuple[Recovery, ...] = ()
    crash_log: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()  # why the last failed generation failed, if ``crash_log`` does not show it
    output: OutputView | None = None  # only for `status JOB`
    metrics: tuple[MetricView, ...] = ()  # only for `status JOB` and `watch`
    uploading_s: float | None = None  # since a machine began to upload its output
    size: int = 0  # number of nodes with a machine, once complete
    warnings: tuple[str, ...] = ()  # warnings of the newest generation that still apply
    disks_kept: str = ""  # the disks of an ended job that are still billed
    deadline_in_s: float | None = None  # from now, or from the job's end; None: no deadline, or job file not read
    left_s: float | None = None  # training time left, from the remaining steps and their measured time
    trained_usd: float = 0.0  # only of a search's trial: what its machines cost while they trained steps that are kept
    site: Site = CLOUD

    def over(self) -> bool:
        """Whether the job's outcome is known (deletions may continue)."""
        return self.phase in (Phase.END, Phase.DONE)

    def queued(self) -> bool:
        """Whether the job has no machines because it waits in the queue; it goes on by itself."""
        if self.hold is not None:
            return self.hold.kind is Hold.QUEUE
        waits = self.queue is not None and self.queue.position > 0
        return waits and not self.over() and all(node.model is None for node in self.nodes)

    def late(self) -> bool:
        """Whether the job's deadline has passed, or will pass before its training ends."""
        return self.deadline_in_s is not None and self.deadline_in_s < (self.left_s or 0.0)

    def stands(self) -> bool:
        """Whether the job is over, or on hold until a user resumes it (and no resume is requested yet)."""
        waits = self.hold is not None and self.hold.ends_in_s is not None and not self.hold.resuming
        return self.over() or waits


def job_view(
    record: Record,
    progress: Progress | None,
    ledger: Iterable[Entry],
    stack: StackState | None,
    now: float,
    crash_log: tuple[str, ...] = (),
    resuming: bool = False,
    prices: PricesByPool = NO_PRICES,
    site: Site = CLOUD,
) -> JobView:
    """Return the view of one job at ``now`` (virtual unix seconds). ``resuming``: a resume is requested."""
    entries = first_of_each(ledger)
    ended = next((entry.at for entry in entries if entry.event is Event.END), None)
    until = now if ended is None else ended
    trains = record.phase is Phase.RUN and record.gen > 0 and not record.stop
    current = trains and progress is not None and progress.gen == record.gen
    lasting = tuple(describe(entry) for entry in entries if entry.event is Event.UNLOOPED)  # true after the end as well
    left_s = progress.left_s if progress is not None else None
    reason = _reason(record)
    if reason and ended is None and site.no_tick:
        reason += " (as of the last tick that succeeded)"
    return JobView(
        job=record.job,
        name=record.name,
        phase=record.phase,
        gen=record.gen,
        elapsed_s=max(0.0, until - record.created),
        nodes=tuple(_nodes(record, entries, now, stack.stack if stack else "")),
        money=money(entries, stack, now, prices),
        user=next((entry.by for entry in entries if entry.event is Event.SUBMITTED and entry.by), ""),
        outcome=record.outcome,
        reason=reason,
        hold=hold_view(record, entries, stack, now, resuming),
        stopping=record.stop,
        step=progress.step if progress else None,
        total_steps=progress.total_steps if progress else None,
        uploading_s=_uploading(record, progress),
        loss=progress.loss if progress else None,
        samples_per_s=progress.samples_per_s if progress and current else None,
        no_new_step_s=_no_new_step(record, progress, now, site) if trains else None,
        commit_step=progress.commit_step if progress else None,
        image_steps=progress.image_steps if progress and current else None,
        image_share=progress.image_share if progress and current else None,
        preemptions=preemptions(entries),
        crashes=sum(entry.event is Event.CRASH for entry in entries),
        events=event_lines(entries, record.created, stack.stack if stack else "", record.job),
        recoveries=recoveries(entries, now),
        crash_log=crash_log,
        size=record.wanted(),
        warnings=lasting if ended is not None else tuple(_warnings(record, entries, now, site)),
        disks_kept=next((entry.detail.removeprefix("but ") for entry in entries if entry.event is Event.DONE), ""),
        site=site,
        left_s=None if ended is not None or left_s is None else left_s * site.scale,
        trained_usd=trained_usd(entries, now, prices) if record.trial is not None else 0.0,
    )


def _reason(record: Record) -> str:
    """Return the record's reason, unless a node waited for it and every node has a machine by now."""
    waits = any(record.nodes[index].cur is None for index in record.filled())
    if record.asked_zone is not None and not record.stop and record.phase is Phase.RUN:
        return f"moves to {record.asked_zone.zone} once each node has a machine there"
    return "" if record.phase is Phase.RUN and record.fetch is None and not waits else record.reason


def _no_new_step(record: Record, progress: Progress | None, now: float, site: Site) -> float | None:
    """Virtual seconds since the last reported step; None if that is not unusually long.

    It is unusually long if it exceeds QUIET_S (slow reports, a first step) plus the usual time of QUIET_STEPS steps.
    """
    told = progress if progress is not None and progress.gen == record.gen else None
    age = now - max(record.gen_since, told.at if told is not None else 0.0)
    step_s = (told.step_s if told is not None else None) or 0.0
    return age if age > QUIET_S + QUIET_STEPS * step_s * site.scale else None


_UNTIL = {
    Event.FULL: Event.SAVED,
    Event.UNSAVED: Event.SAVED,
    Event.LAG: Event.KEEPS_UP,
}  # warning -> the event that ends it
_OVER = frozenset(_UNTIL.values())


def _untouched(record: Record, now: float) -> Iterable[str]:
    """A warning about a job that no round has ever changed."""
    if record.ver == 0 and record.phase is Phase.RUN and now - record.created > UNTOUCHED_S:
        waits = f"{(now - record.created) / 60.0:.0f} min"
        yield (
            f"the function has done nothing for this job since its submission {waits} ago: it does not run, has no"
            " machine to offer, or cannot read the job file (see its log, or run spotkeeper reconcile --once)"
        )


def _warnings(record: Record, entries: tuple[Entry, ...], now: float, site: Site) -> Iterable[str]:
    if site.no_tick:
        yield site.no_tick
    yield from _untouched(record, now)
    yield from map(describe, _standing(entries, record.gen))
    undelivered = {entry.cause: entry for entry in entries if entry.event is Event.UNDELIVERED}
    yield from map(describe, undelivered.values())  # the newest of each channel


def _standing(entries: tuple[Entry, ...], gen: int) -> list[Entry]:
    """The warning events that still apply: a node cannot save, a node delays the others, a health check failed.

    Only an event of the same node ends a warning: another node's commit says nothing about this node's disk.
    """
    found: list[Entry] = []
    for entry in entries:
        if entry.gen != gen:
            continue
        if entry.event in _OVER:
            same = (entry.node, entry.attempt, entry.event)
            found = [each for each in found if (each.node, each.attempt, _UNTIL.get(each.event)) != same]
        elif entry.event in _UNTIL or entry.event is Event.PREFLIGHT_FAILED:
            found.append(entry)
    return found


def _uploading(record: Record, progress: Progress | None) -> float | None:
    """Real seconds since the newest generation began to upload its output, while the job is not over."""
    now = progress is not None and progress.gen == record.gen and record.outcome is None
    return progress.uploading_s if now and progress is not None else None


def last_crash(ledger: Iterable[Entry]) -> Entry | None:
    """The entry of the newest crash, or of the newest hold or end that a node caused; this node's log explains it."""
    crash: Entry | None = None
    for entry in first_of_each(ledger):
        if entry.event is Event.CRASH or (entry.event in (Event.HOLD, Event.END) and entry.node is not None):
            crash = entry
    return crash


def _nodes(record: Record, entries: tuple[Entry, ...], now: float, stack: str) -> Iterable[NodeView]:
    asked = {(e.node, e.attempt): e for e in reversed(entries) if e.event is Event.INTENT}
    slow = {(e.node, e.attempt): e.detail for e in _standing(entries, record.gen) if e.event is Event.LAG}
    halted = _halted(record, entries, now)
    for number, node in enumerate(record.nodes):
        if node.cur is None and record.phase is Phase.RUN and number in record.filled():
            yield NodeView(number, NodeState.WAITING)
        for slot in (node.cur, node.next):
            if slot is None:
                continue
            intent = asked.get((number, slot.attempt))
            yield NodeView(
                node=number,
                state=_state(record, number, node, slot, halted),
                master=bool(record.members) and record.members[0] == number and slot is node.cur,
                attempt=slot.attempt,
                pool=slot.pool,
                zone=slot.zone,
                model=slot.model,
                machine=slot.machine,
                vm=slot.machine or (vm_name(stack, record.job, number, slot.attempt) if stack else ""),
                age_s=max(0.0, now - (slot.since if intent is None else intent.at)),
                left_s=_left(slot, now),
                lag=slow.get((number, slot.attempt), ""),
                reason="" if intent is None or slot.machine else reason_of(intent, entries),
            )


def reason_of(intent: Entry, entries: Iterable[Entry]) -> str:
    """Why the machine was chosen; during an on-demand fallback, the fallback's cause and end."""
    bouts = [entry for entry in entries if entry.event is Event.FALLBACK and entry.at <= intent.at]
    if intent.model is Model.ON_DEMAND and bouts and bouts[-1].detail and FALLBACK in intent.detail:
        return f"{FALLBACK}: {bouts[-1].detail}"
    return intent.detail


def _left(slot: Slot, now: float) -> float | None:
    """Virtual seconds until the machine goes; None: no such time is known.

    It goes at the deadline of its notice or at its planned end, whichever is first.
    """
    goes = [at for at in (slot.notice, slot.ends) if at is not None]
    return max(0.0, min(goes) - now) if goes else None


def _halted(record: Record, entries: Iterable[Entry], now: float) -> bool:
    """Whether the members of a stopping job have stopped: the lowest one reported it, or the stop's deadline passed."""
    if record.stop_deadline is None or now >= record.stop_deadline:
        return True
    since = record.stop_since
    return any(one.event is Event.STOPPED and one.gen == record.gen and one.at >= since for one in entries)


def _state(record: Record, number: int, node: Node, slot: Slot, halted: bool) -> NodeState:
    if slot.state is SlotState.INTENT:
        return NodeState.BOOTING
    if slot is node.next:
        return NodeState.STANDBY
    if slot.state is SlotState.ADMITTED or number not in record.members:
        return NodeState.READY
    if record.stop:
        return NodeState.STOPPED if halted else NodeState.SAVING
    return NodeState.NOTICE if slot.notice is not None else NodeState.TRAINING
