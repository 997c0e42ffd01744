"""Checks an agent's reports and stores them as facts. A fact's node and attempt come from the record, not the request.

The caller has verified the speaker's identity; this module checks what that machine may report about itself. A machine
that is not admitted may only report HELLO. A superseded machine may only report FREED: it has unmounted its data disk
and will not use it again. No machine may report about a generation that does not exist yet. Invalid reports go to
quarantine and no decision reads them.
"""

from __future__ import annotations

import re

from msgspec import Struct
from msgspec.structs import replace

from spotkeeper.contract import names
from spotkeeper.contract.allocation import Grant
from spotkeeper.contract.facts import PREFLIGHT_CHECKS, Fact, Failure, Hung, Kind, Sign, StacksAnswer
from spotkeeper.contract.generation import MAX_OLD_JOBS, FactIn, Progress, Sync
from spotkeeper.contract.ledger import Entry, Event
from spotkeeper.contract.market import Network
from spotkeeper.contract.notification import Outgoing
from spotkeeper.contract.record import Phase, Record, SlotState
from spotkeeper.contract.stack import StackState
from spotkeeper.reconcile.controller.document import Speaker, SpeakerPlace, is_static, place
from spotkeeper.reconcile.notifications.message import first_checkpoint
from spotkeeper.reconcile.store.documents import CorruptError, StaticHello
from spotkeeper.reconcile.store.objects import StoreError
from spotkeeper.reconcile.store.store import Store

MAX_FACTS = 32  # most facts of one sync; a correct agent sends a few
MAX_SAVE_S = 3600.0  # real seconds; stop deadlines depend on reported times, and no machine may postpone them for ever
# What a job reports of itself is bounded: with a step of 1e308 s, the work that is left would be infinite, and each
# round of the job would fail. Then nothing limits it.
MAX_STEP_S = 1e6  # real seconds
MOST_STEPS = 10**12
COMMITS = (Kind.DAMAGED, Kind.UNMIRRORED)
TRANSFERS = (Kind.MIRRORED, Kind.FETCHED)
SHAPES: dict[Kind, str] = {  # what the values of these facts look like; other values are free
    **dict.fromkeys((Kind.NOTICE, Kind.REPRIEVE, Kind.HERE, Kind.FREED, Kind.ATTACHED), r"\d{1,12}"),
    **dict.fromkeys((Kind.FULL, Kind.SAVED, Kind.UNLOOPED, Kind.KEEPS_UP), r"\d{1,12}"),
    **dict.fromkeys(COMMITS, r"\d+-\d+"),
    **dict.fromkeys(TRANSFERS, r"\d+-\d+(-\d{1,12})?"),
    Kind.NO_DISK: r"\d{1,12}-[a-z]+",
    Kind.LAGS: r"\d{1,3}-[1-9]\d{2,5}",  # which time, and its percentage of the median (above 100)
    Kind.RUNG: r"\d{1,13}-([0-9a-f]{16}|none)",
    Kind.EXIT: r"-?\d{1,5}|\d{6}",
    Kind.HARDWARE_FAULT: "|".join(sign.value for sign in Sign),
    Kind.PREFLIGHT_FAILED: "|".join(PREFLIGHT_CHECKS),
}
INSTANT_S = 0.001  # time between two facts of one sync in the ledger, which keeps their order
SAVING = {
    Kind.FULL: Event.FULL,
    Kind.UNSAVED: Event.UNSAVED,
    Kind.SAVED: Event.SAVED,
    Kind.UNLOOPED: Event.UNLOOPED,
    Kind.DAMAGED: Event.DAMAGED,
    Kind.PREFLIGHT_FAILED: Event.PREFLIGHT_FAILED,
    Kind.LAGS: Event.LAG,
    Kind.KEEPS_UP: Event.KEEPS_UP,
}
WHY = {
    "write-failed": "its disk refused the write",
    "saver-lost": "no saver process answered",
    "no-memory": "the machine has no memory left for a copy of the training state: see the job's log",
} | PREFLIGHT_CHECKS


class Accepted(Struct, frozen=True):
    """The result of a sync. ``new``: the sync brought a fact that perhaps no round has read, so a round is due.

    The function first stores a fact and then starts a round that reads it; it can die before the round. The agent then
    gets no answer and sends its report again with ``again`` set, so this fact counts as new although it is stored.
    ``announced``: a notification was stored, which this request should send.
    """

    job: str | None = None
    record: Record | None = None
    grant: Grant | None = None
    new: bool = False
    announced: bool = False


def accept(store: Store, stack: StackState, who: Speaker, sync: Sync, now: float) -> Accepted:
    """Store the facts that this machine may report. Reads the record, and for a static machine the allocation."""
    owned = names.parse_vm_name(who.name)
    if owned is None:
        return _static(store, stack, who, sync, now)
    read = store.read_record(owned.job) if owned.stack == stack.stack else None
    if read is None:
        return Accepted()
    record = read.value
    where = place(record, stack, who)
    new = _take(store, record, where, who, sync, now)
    announced = _progress(store, stack, record, where, sync, now)
    return Accepted(owned.job, record, None, new, announced)


def silent(stack: StackState, who: Speaker, sync: Sync) -> str | None:
    """Return the job of a VM whose sync reports and requests nothing; None for any other sync."""
    owned = names.parse_vm_name(who.name)
    if sync.facts or sync.progress is not None or sync.old_jobs or owned is None or owned.stack != stack.stack:
        return None
    return owned.job


def ended(store: Store, stack: StackState, who: Speaker, old_jobs: tuple[str, ...]) -> tuple[str, ...]:
    """Return the given jobs whose files a static machine must delete.

    Files are deleted only if the job's record is in phase DONE, which is final, and does not say ``keep_disks``. They
    stay if the record is unreadable or missing, since a person could have deleted it by hand.
    """
    if not is_static(stack, who):
        return ()
    return tuple(job for job in old_jobs[:MAX_OLD_JOBS] if _is_over(store, job))


def _is_over(store: Store, job: str) -> bool:
    try:
        read = store.read_record(job)
    except StoreError:
        return False
    return read is not None and read.value.phase is Phase.DONE and not read.value.keep_disks


def _static(store: Store, stack: StackState, who: Speaker, sync: Sync, now: float) -> Accepted:
    if not is_static(stack, who):
        return Accepted()
    grants = _grants(store, who)
    if not grants:
        new = store.put_static_hello(StaticHello(who.name, who.uid, sync.boot, who.zone, now))
        return Accepted(new=new or sync.again)
    grant = grants[0]
    read = store.read_record(grant.job)
    if read is None:
        return Accepted(grant.job, None, grant, _dropped(store, grant, who, sync))
    record = read.value
    where = place(record, stack, who, grant)
    new = _take(store, record, where, who, _with_hello(where, sync), now)
    new = _dropped(store, grant, who, sync) or new
    announced = _progress(store, stack, record, where, sync, now)
    return Accepted(grant.job, record, grant, new, announced)


def _grants(store: Store, who: Speaker) -> list[Grant]:
    """Return this static machine's grants.

    If the allocation is unreadable, the grant is made up from an active job's record in which a node has this machine.

    Raises:
        CorruptError: the allocation is unreadable and no record names the machine, so its grant is unknown.
    """
    try:
        return [grant for grant in store.read_allocation().value.grants if grant.machine == who.name]
    except CorruptError:
        for job in store.active_jobs():
            read = store.read_record(job) if store.has_begun(job) else None  # until then it is its submitter's
            for index, node in enumerate(read.value.nodes if read else ()):
                if node.cur is not None and node.cur.machine == who.name:
                    return [Grant(job, index, node.cur.attempt, f"machine:{who.name}", node.cur.since)]
        raise


def _with_hello(where: SpeakerPlace | None, sync: Sync) -> Sync:
    """Add a HELLO to the sync of a static machine that has a grant, while its present boot is not admitted.

    Any sync shows that the machine is up, and the grant says for which attempt, so the agent need not say HELLO.
    """
    expected = where is not None and where.slot is not None and where.slot.boot != sync.boot
    if not expected or any(fact.kind in (Kind.HELLO, Kind.DROPPED) for fact in sync.facts):
        return sync
    return replace(sync, facts=(*sync.facts, FactIn(Kind.HELLO)))


def _dropped(store: Store, grant: Grant, who: Speaker, sync: Sync) -> bool:
    """Store a DROPPED report, which releases the grant, even if the job is over. Returns whether the report is new."""
    for fact in sync.facts:
        if fact.kind is Kind.DROPPED and fact.attempt in (None, grant.attempt):
            word = Fact(who.uid, sync.boot, grant.node, grant.attempt, 0, Kind.DROPPED, "0")
            return Fact.parse(word.key()) is not None and (store.put_fact(grant.job, word) or sync.again)
    return False


def _take(store: Store, record: Record, where: SpeakerPlace | None, who: Speaker, sync: Sync, now: float) -> bool:
    if record.phase is Phase.DONE:  # no round reads the job's folder any more
        return False
    new = False
    for place_in, said in enumerate(sync.facts[:MAX_FACTS]):
        fact = _fact(record, where, who, sync.boot, said)
        if fact is None:
            continue
        if Fact.parse(fact.key()) != fact or not _sensible(record, fact):
            store.quarantine(f"{record.job} {who.name} {fact.key()[:200]}")
            continue
        if fact.kind is Kind.HELLO:
            _forget_boots(store, record, where, fact)
        if record.phase is Phase.END:
            store.set_active(record.job)  # if the job is DONE and buried by now, a tick deletes this fact
        stored = store.put_fact(record.job, fact)
        if stored and fact.kind in SAVING:
            store.append_ledger(record.job, _saving(fact, now + place_in * INSTANT_S))
        if stored and (event := _part_of_a_recovery(record, fact)) is not None:
            store.append_ledger(record.job, _timed(event, fact, now))
        new = stored or new or sync.again
    return new


def _saving(fact: Fact, now: float) -> Entry:
    """Return the ledger entry for a report that no round logs: failed saves, damaged checkpoints, slow machines."""
    event = SAVING[fact.kind]
    word = fact.value if fact.kind is Kind.DAMAGED else fact.value.rstrip("-0123456789")
    return Entry(
        at=now,
        id=f"{event.value}.r{fact.node}.a{fact.attempt}.g{fact.gen}.{fact.value}",
        event=event,
        gen=fact.gen,
        node=fact.node,
        attempt=fact.attempt,
        detail=times(fact.value) if fact.kind is Kind.LAGS else WHY.get(word, word),
    )


def _part_of_a_recovery(record: Record, fact: Fact) -> Event | None:
    """Return the ledger event for a fact whose time shows how long a part of a recovery took; None for any other fact.

    The end of processes is noted for the lowest member only, and a mounted disk only for a node's second and later
    machines. So a start or stop of 10,000 nodes adds at most one entry.
    """
    if fact.kind is Kind.ATTACHED and record.gen and fact.attempt > 1:
        return Event.MOUNTED
    if fact.kind not in (Kind.RELEASED, Kind.EXIT) or not record.stop or fact.gen != record.gen:
        return None
    slots = ((index, record.nodes[index].cur) for index in record.members if index < len(record.nodes))
    lowest = min((index for index, slot in slots if slot and slot.state is SlotState.MEMBER), default=None)
    return Event.STOPPED if fact.node == lowest else None


def _timed(event: Event, fact: Fact, now: float) -> Entry:
    key = f"r{fact.node}.a{fact.attempt}.g{fact.gen}.{fact.value}"
    return Entry(at=now, id=f"{event.value}.{key}", event=event, gen=fact.gen, node=fact.node, attempt=fact.attempt)


def times(value: str) -> str:
    """Format the value of LAGS for the ledger: ``0-163`` becomes ``1.6x the median``.

    The first number tells the machine's lags apart; the second is the machine's step time in percent of the median of
    all nodes.
    """
    return f"{int(value.partition('-')[2]) / 100:.1f}x the median"


def _fact(record: Record, where: SpeakerPlace | None, who: Speaker, boot: str, said: FactIn) -> Fact | None:
    if where is None or said.kind is Kind.DROPPED:  # DROPPED is stored by _dropped
        return None
    fact = Fact(who.uid, boot, where.node, where.attempt, said.gen, said.kind, said.value)
    slot = where.slot
    if slot is None:
        return fact if said.kind is Kind.FREED else None
    if slot.state is SlotState.INTENT or slot.boot != boot:
        return fact if said.kind is Kind.HELLO and boot not in slot.past else None
    return fact


def _sensible(record: Record, fact: Fact) -> bool:
    shape = SHAPES.get(fact.kind)
    if fact.gen > record.gen or (shape is not None and not re.fullmatch(shape, fact.value)):
        return False
    if fact.kind is Kind.HERE:  # an answer to a future roll call would count for all before it
        return int(fact.value) <= record.ver
    if fact.kind is Kind.STACKS:
        answer = StacksAnswer.parse(fact.value)
        return answer is not None and answer.ver <= record.ver
    if fact.kind in (*COMMITS, *TRANSFERS):
        return int(fact.value.partition("-")[0]) <= record.gen
    return {Kind.FAILED: Failure.parse, Kind.HUNG: Hung.parse}.get(fact.kind, bool)(fact.value) is not None


def _forget_boots(store: Store, record: Record, where: SpeakerPlace | None, fact: Fact) -> None:
    """When a restarted machine says hello, delete its unrecorded earlier hellos, so that only the newest counts."""
    if where is None or where.slot is None or where.slot.boot == fact.boot:
        return
    older = tuple(
        f
        for f in store.facts_of(record.job, fact.uid)
        if (f.uid, f.node, f.attempt, f.kind) == (fact.uid, fact.node, fact.attempt, Kind.HELLO)
        and f.boot not in (fact.boot, where.slot.boot)
    )
    if older:
        store.delete_facts(record.job, older)


def _progress(
    store: Store, stack: StackState, record: Record, where: SpeakerPlace | None, sync: Sync, now: float
) -> bool:
    """Store progress that a member of the newest generation reports. Returns whether a notification was stored.

    ``Progress.at`` is the function's time when this step was first reported; later reports of the same step keep it. So
    a gang that makes no step counts as silent, although its lowest member still sends reports. A gang that uploads its
    output never counts as silent. If the bucket accepts nothing, the agent itself ends the upload.
    """
    progress = sync.progress
    if progress is None or where is None or where.slot is None or not where.cur or progress.gen != record.gen:
        return False
    if where.slot.state is not SlotState.MEMBER or where.slot.boot != sync.boot:
        return False
    try:
        before = store.read_progress(record.job)
    except CorruptError:
        before = None  # this report replaces it
    told = _stored(progress, before, now)
    begins = _stepped(told) and not (before is not None and before.gen == told.gen and _stepped(before))
    if begins:
        told = replace(told, begin_s=max(0.0, now - record.gen_since))
    if told.gbit_s and (before is None or told.gbit_s != before.gbit_s):
        _network(store, record, told.gbit_s, now)  # before the report is stored: a stored one is not read again
    announced = told.commit_gen is not None and (before is None or before.commit_gen is None)
    if announced:  # as above
        announced = _first_checkpoint(store, stack, record, told, now)
    store.put_progress(record.job, told)
    if begins:
        first = Entry(at=now, id=f"{Event.FIRST.value}.g{told.gen}", event=Event.FIRST, gen=told.gen, step=told.step)
        took = {"restore_s": told.restore_s, "restored_bytes": told.restored_bytes, "first_s": told.first_s}
        store.append_ledger(record.job, replace(first, **took))
    return announced


def _first_checkpoint(store: Store, stack: StackState, record: Record, told: Progress, now: float) -> bool:
    """Log the job's first checkpoint and announce it; return whether the stack has channels for the announcement.

    If the function dies before it stores the progress, the next report repeats both, with a later time but the same
    ids, by which readers of the ledger and receivers of notifications recognise the repetition.
    """
    event = Event.CHECKPOINT
    entry = Entry(at=now, id=f"{event.value}.first", event=event, gen=told.commit_gen or 0, step=told.commit_step)
    if stack.channels:
        store.put_notification(Outgoing(first_checkpoint(entry, record, stack)))
    store.append_ledger(record.job, entry)
    return bool(stack.channels)


def _network(store: Store, record: Record, gbit_s: float, now: float) -> None:
    """Store the bandwidth that a gang measured, Gbit/s, if all its machines have the same type and zone."""
    stack = store.read_stack()
    types = {} if stack is None else {pool.name: pool.machine_type for pool in stack.pools}
    slots = (record.nodes[index].cur for index in record.members)
    found = {(types.get(slot.pool), slot.zone) for slot in slots if slot is not None}
    (machine_type, zone), *others = found or {(None, "")}
    if machine_type is not None and not others:
        store.put_network(Network(machine_type, zone, gbit_s, now))


def _stored(progress: Progress, before: Progress | None, now: float) -> Progress:
    """Return what to store for the report ``progress``: values that it lacks come from the stored report, ``before``.

    ``at`` is ``now``, or ``before.at`` if both reports are of the same step and nothing is being uploaded.
    """
    commit = progress if progress.commit_gen is not None or before is None else before  # of an older generation
    newer = before is None or (before.commit_gen, before.commit_step) != (commit.commit_gen, commit.commit_step)
    committed_at = (now if commit.commit_gen is not None else None) if newer or before is None else before.commit_at
    still = before is not None and (before.gen, before.step) == (progress.gen, progress.step)
    still = still and progress.uploading_s is None
    return replace(
        progress,
        at=before.at if still and before is not None else now,
        commit_gen=commit.commit_gen,
        commit_step=commit.commit_step,
        commit_at=committed_at,
        save_s=None if progress.save_s is None else min(progress.save_s, MAX_SAVE_S),
        step_s=None if progress.step_s is None else min(progress.step_s, MAX_STEP_S),
        total_steps=None if progress.total_steps is None else min(progress.total_steps, MOST_STEPS),
        gbit_s=progress.gbit_s or (before.gbit_s if before is not None else None),
        begin_s=None if before is None else before.begin_s,
    )


def _stepped(progress: Progress) -> bool:
    """Whether the generation of this report has made a step.

    It has if it made a commit or measured the time of a step, its first one included. A report that does not say what
    was restored, as of a script without the library, is of a step if it is past the last commit. Others may begin past
    it: at an image in memory.
    """
    if progress.commit_gen == progress.gen or progress.step_s is not None or progress.first_s is not None:
        return True
    told = progress.restore_s is not None or progress.restored_bytes is not None
    return not told and progress.step > (progress.commit_step or 0)
