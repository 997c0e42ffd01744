"""The view model of a job: what a person wants to see, as plain values.

``watch``, ``status``, ``report`` and the demo render it; tests compare it. It is made
from documents alone (record, progress, ledger, stack), never from a listing of the
cloud, so that looking at a job costs five reads of the bucket.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

from msgspec import Struct

from spotkeeper.report.events import EventLine, describe, event_lines
from spotkeeper.report.held import HoldView, hold_view
from spotkeeper.report.money import NO_PRICES, PricesByPool, first_of_each, money
from spotkeeper.report.preemptions import Preemptions, preemptions
from spotkeeper.report.recovery import Recovery, recoveries
from spotkeeper.spec.generation import Progress
from spotkeeper.spec.ledger import Entry, Event
from spotkeeper.spec.model import Model
from spotkeeper.spec.record import Outcome, Phase, Rank, Record, Slot, SlotState
from spotkeeper.spec.stack import StackState

QUIET_S = 180.0  # virtual: a step is told within a minute, and the first one of a generation takes its time
BOUT = "a bout of on-demand"  # how the selection calls it
QUIET_STEPS = 3  # and a step may take longer than the others


class NodeState(str, Enum):
    """BOOTING -> (READY | STANDBY) -> TRAINING <-> SAVING; NOTICE is TRAINING with a clock that runs out.

    ======== ==========================================================
    state    meaning
    ======== ==========================================================
    BOOTING  decided; not heard of yet
    READY    admitted, waits for the next generation
    STANDBY  a replacement that is ready while the old machine trains
    TRAINING in the running generation
    SAVING   told to save and stop
    NOTICE   in the generation, its machine will be taken away
    WAITING  the rank has no machine
    ======== ==========================================================
    """

    BOOTING = "booting"
    READY = "ready"
    STANDBY = "standby"
    TRAINING = "training"
    SAVING = "saving"
    NOTICE = "notice"
    WAITING = "waiting"


class NodeView(Struct, frozen=True):
    """One machine of one rank (a rank with a replacement has two)."""

    rank: int
    state: NodeState
    master: bool = False
    attempt: int = 0
    pool: str = ""
    zone: str = ""
    model: Model | None = None
    node: str | None = None  # a static node's name
    age_s: float | None = None  # since its intent (virtual)
    left_s: float | None = None  # until a notice runs out, or its longest run
    lag: str = ""  # "1.6x the median": how slow its machine is, where it holds the others up
    reason: str = ""  # why this model and zone; of a static node, which nobody chose, none


UNTOUCHED_S = 600.0  # virtual; a tick comes each minute, and the first one does something


class MoneyView(Struct, frozen=True):
    """USD. ``on_demand_only``: the same machine-hours at on-demand prices; ``saved`` is of these.

    ``saved_percent`` is null until the job has trained for ten minutes, or ended. ``undisturbed``: another run, on
    on-demand machines that nothing ever interrupts, for the time in which this one trained.
    """

    spent: float
    on_demand_only: float
    saved: float
    saved_percent: float | None
    undisturbed: float = 0.0


class RecoveryView(Struct, frozen=True):
    """``recovery.Recovery``, as it is shown."""

    cause: str
    announced: bool
    ranks: tuple[int, ...]
    gen: int
    stopped_s: float
    seconds: float | None = None
    boot_s: float | None = None
    replacement: Model | None = None
    zone: str | None = None
    notice_s: float | None = None
    save_s: float | None = None
    start_s: float | None = None
    steps_again: int | None = None
    began: float = 0.0  # virtual unix seconds

    @classmethod
    def of(cls, one: Recovery) -> RecoveryView:
        return cls(
            cause=one.cause,
            announced=one.announced,
            ranks=one.ranks,
            gen=one.gen,
            stopped_s=one.stopped_s,
            seconds=one.seconds,
            boot_s=one.boot_s,
            replacement=one.replacement,
            zone=one.zone,
            notice_s=one.notice_s,
            save_s=one.save_s,
            start_s=one.start_s,
            steps_again=one.steps_again,
            began=one.began,
        )


class Site(Struct, frozen=True):
    """Where the stack is. ``scale``: how many times faster than real its clock runs."""

    scale: float = 1.0
    local: bool = False  # the one-machine cloud


CLOUD = Site()


class OutputView(Struct, frozen=True):
    """What ``spotkeeper download`` has of a job that ended well."""

    files: int
    bytes: int


class JobView(Struct, frozen=True):
    """Everything `status`, `watch` and the demo show of a job. Times are virtual seconds, but for ``samples_per_s``."""

    job: str
    name: str
    phase: Phase
    gen: int
    elapsed_s: float
    nodes: tuple[NodeView, ...]
    money: MoneyView
    outcome: Outcome | None = None
    reason: str = ""
    hold: HoldView | None = None
    stopping: bool = False
    step: int | None = None
    total_steps: int | None = None
    loss: float | None = None
    samples_per_s: float | None = None  # of real time, while it trains
    no_new_step_s: float | None = None  # it trains, and has told of no new step for so long: longer than it should
    commit_step: int | None = None
    preemptions: Preemptions = Preemptions()
    crashes: int = 0
    events: tuple[EventLine, ...] = ()
    recoveries: tuple[RecoveryView, ...] = ()
    crash_log: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()  # why its last generation that failed did, where ``crash_log`` does not show it
    output: OutputView | None = None  # filled for `status JOB`
    uploading_s: float | None = None  # for so long a machine has been bringing what it left to the bucket
    size: int = 0  # how many ranks are to have a machine
    warnings: tuple[str, ...] = ()  # that still hold, of the newest generation, while the job is not over
    disks_kept: str = ""  # how many disks of a job that is over still bill, and which
    deadline_in_s: float | None = None  # from now, or from its end; None: it has none, or nobody asked for it
    left_s: float | None = None  # of its training, by its steps and their measured time
    site: Site = CLOUD

    def over(self) -> bool:
        """Whether the outcome is known (deletions may still go on)."""
        return self.phase in (Phase.END, Phase.DONE)

    def late(self) -> bool:
        """Whether its deadline is past, or comes before its training can be done."""
        return self.deadline_in_s is not None and self.deadline_in_s < (self.left_s or 0.0)

    def stands(self) -> bool:
        """Whether nothing but its end comes of it by itself: it is over, or it failed and waits for a person."""
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
    """The view of one job at ``now`` (virtual unix seconds). ``resuming``: a wish to resume is not taken in yet."""
    entries = first_of_each(ledger)
    ended = next((entry.at for entry in entries if entry.event is Event.END), None)
    until = now if ended is None else ended
    costs = money(entries, stack, now, prices)
    trains = record.phase is Phase.RUN and record.gen > 0 and not record.stop
    current = trains and progress is not None and progress.gen == record.gen
    return JobView(
        job=record.job,
        name=record.name,
        phase=record.phase,
        gen=record.gen,
        elapsed_s=max(0.0, until - record.created),
        nodes=tuple(_nodes(record, entries, now)),
        money=MoneyView(costs.spent, costs.on_demand_only, costs.saved, costs.saved_percent, costs.undisturbed),
        outcome=record.outcome,
        reason=record.reason,
        hold=hold_view(record, entries, stack, now, resuming),
        stopping=record.stop,
        step=progress.step if progress else None,
        total_steps=progress.total_steps if progress else None,
        uploading_s=_uploading(record, progress),
        loss=progress.loss if progress else None,
        samples_per_s=progress.samples_per_s if progress and current else None,
        no_new_step_s=_no_new_step(record, progress, now, site) if trains else None,
        commit_step=progress.commit_step if progress else None,
        preemptions=preemptions(entries),
        crashes=record.budget.crashes,
        events=event_lines(entries, record.created, stack.stack if stack else "", record.job),
        recoveries=tuple(RecoveryView.of(one) for one in recoveries(entries, now)),
        crash_log=crash_log,
        size=record.wanted(),
        warnings=() if ended is not None else (*_untouched(record, now), *_warnings(entries, record.gen)),
        disks_kept=next((entry.detail.removeprefix("but ") for entry in entries if entry.event is Event.DONE), ""),
        site=site,
        left_s=None if ended is not None else _left_to_train(progress, site),
    )


def _left_to_train(progress: Progress | None, site: Site) -> float | None:
    if progress is None or not progress.total_steps or progress.step_s is None:
        return None
    return max(0, progress.total_steps - progress.step) * progress.step_s * site.scale


def _no_new_step(record: Record, progress: Progress | None, now: float, site: Site) -> float | None:
    """Virtual seconds, where they are more than the reports (one a minute) and the usual step explain."""
    told = progress if progress is not None and progress.gen == record.gen else None
    age = now - max(record.gen_since, told.at if told is not None else 0.0)
    step_s = (told.step_s if told is not None else None) or 0.0
    return age if age > QUIET_S + QUIET_STEPS * step_s * site.scale else None


_UNTIL = {Event.FULL: Event.SAVED, Event.UNSAVED: Event.SAVED, Event.LAG: Event.KEEPS_UP}  # what takes it back
_OVER = frozenset(_UNTIL.values())


def _untouched(record: Record, now: float) -> Iterable[str]:
    """Of a job that no round has done anything for: whoever waits for it must look elsewhere."""
    if record.ver == 0 and record.phase is Phase.RUN and now - record.created > UNTOUCHED_S:
        waits = f"{(now - record.created) / 60.0:.0f} min"
        yield (
            f"the function has done nothing for it since it was submitted, {waits} ago: it does not run, has nothing to"
            " offer, or cannot read the job's file (its log says which; so does spotkeeper reconcile --once)"
        )


def _warnings(entries: tuple[Entry, ...], gen: int) -> Iterable[str]:
    return map(describe, _standing(entries, gen))


def _standing(entries: tuple[Entry, ...], gen: int) -> list[Entry]:
    """What a person should see without reading the events: ranks that save less than they might, or hold the others
    up, until they do so no more; and machines with a flaw.

    Another rank's commit says nothing of this one's disk: only the rank itself can take its warning back.
    """
    found: list[Entry] = []
    for entry in entries:
        if entry.gen != gen:
            continue
        if entry.event in _OVER:
            same = (entry.rank, entry.attempt, entry.event)
            found = [each for each in found if (each.rank, each.attempt, _UNTIL.get(each.event)) != same]
        elif entry.event in _UNTIL or entry.event is Event.AMISS:
            found.append(entry)
    return found


def _uploading(record: Record, progress: Progress | None) -> float | None:
    """Real seconds: of the newest generation, while the job is not over."""
    now = progress is not None and progress.gen == record.gen and record.outcome is None
    return progress.uploading_s if now and progress is not None else None


def last_crash(ledger: Iterable[Entry]) -> Entry | None:
    """The newest crash, or the hold or end that a rank brought about: whose log a person wants to see."""
    crash: Entry | None = None
    for entry in first_of_each(ledger):
        if entry.event is Event.CRASH or (entry.event in (Event.HOLD, Event.END) and entry.rank is not None):
            crash = entry
    return crash


def _nodes(record: Record, entries: tuple[Entry, ...], now: float) -> Iterable[NodeView]:
    asked = {(e.rank, e.attempt): e for e in reversed(entries) if e.event is Event.INTENT}
    slow = {(e.rank, e.attempt): e.detail for e in _standing(entries, record.gen) if e.event is Event.LAG}
    for number, rank in enumerate(record.ranks):
        if rank.cur is None and record.phase is Phase.RUN and number in record.filled():
            yield NodeView(number, NodeState.WAITING)
        for slot in (rank.cur, rank.next):
            if slot is None:
                continue
            intent = asked.get((number, slot.attempt))
            yield NodeView(
                rank=number,
                state=_state(record, number, rank, slot),
                master=bool(record.members) and record.members[0] == number and slot is rank.cur,
                attempt=slot.attempt,
                pool=slot.pool,
                zone=slot.zone,
                model=slot.model,
                node=slot.node,
                age_s=max(0.0, now - (slot.since if intent is None else intent.at)),
                left_s=_left(slot, now),
                lag=slow.get((number, slot.attempt), ""),
                reason="" if intent is None or slot.node else reason_of(intent, entries),
            )


def reason_of(intent: Entry, entries: Iterable[Entry]) -> str:
    """What the choice was made for; where it was a bout of on-demand, also what brought that about, and its end."""
    bouts = [entry for entry in entries if entry.event is Event.BOUT and entry.at <= intent.at]
    if intent.model is Model.ON_DEMAND and bouts and bouts[-1].detail and BOUT in intent.detail:
        return f"{BOUT}: {bouts[-1].detail}"
    return intent.detail


def _left(slot: Slot, now: float) -> float | None:
    """Until its notice runs out, or its longest run."""
    goes = [at for at in (slot.notice, slot.ends) if at is not None]
    return max(0.0, min(goes) - now) if goes else None


def _state(record: Record, number: int, rank: Rank, slot: Slot) -> NodeState:
    if slot.state is SlotState.INTENT:
        return NodeState.BOOTING
    if slot is rank.next:
        return NodeState.STANDBY
    if slot.state is SlotState.ADMITTED or number not in record.members:
        return NodeState.READY
    if record.stop:
        return NodeState.SAVING
    return NodeState.NOTICE if slot.notice is not None else NodeState.TRAINING
