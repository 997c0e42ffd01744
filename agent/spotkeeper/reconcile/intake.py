"""What an agent says, turned into stored facts. Rank and attempt come from the record, never from a body.

The caller has verified who speaks; this module checks what that machine may say about itself: a machine
that is not admitted may only say hello, a superseded one only that it let go, and nobody speaks of a
generation that does not exist yet. What makes no sense goes to quarantine, never into a decision.
"""

from __future__ import annotations

import re

from msgspec import Struct
from msgspec.structs import replace

from spotkeeper.reconcile.alloc import node_of
from spotkeeper.reconcile.decide.seen import parse_commit
from spotkeeper.reconcile.document import Place, Speaker, place
from spotkeeper.reconcile.store_api import CorruptError, StaticHello, Store, StoreError
from spotkeeper.spec import names
from spotkeeper.spec.facts import AMISS, Fact, Kind
from spotkeeper.spec.failure import Failure
from spotkeeper.spec.generation import MAX_KEPT, FactIn, Progress, Sync
from spotkeeper.spec.hang import Answer, Hung
from spotkeeper.spec.ledger import Entry, Event
from spotkeeper.spec.record import Grant, Phase, Record, SlotState
from spotkeeper.spec.sick import parse as parse_sign
from spotkeeper.spec.stack import StackState

MAX_FACTS = 32  # of one sync; an honest agent has a handful
MAX_SAVE_S = 3600.0  # real; deadlines of stops are made from it, and one machine must not put them off for ever
NUMBERS = (Kind.NOTICE, Kind.REPRIEVE, Kind.HERE, Kind.FREED, Kind.ATTACHED, Kind.FULL, Kind.SAVED, Kind.KEEPS_UP)
COMMITS = (Kind.DAMAGED, Kind.MIRRORED, Kind.FETCHED, Kind.UNMIRRORED)
LAG = re.compile(r"\d{1,3}-[1-9]\d{2,5}")  # which time, and percent of the median: it is above that
DIGITS = 12  # of a number
INSTANT_S = 0.001  # between two facts of one sync in the ledger: it keeps their order
SAVING = {
    Kind.FULL: Event.FULL,
    Kind.UNSAVED: Event.UNSAVED,
    Kind.SAVED: Event.SAVED,
    Kind.DAMAGED: Event.DAMAGED,
    Kind.AMISS: Event.AMISS,
    Kind.LAGS: Event.LAG,
    Kind.KEEPS_UP: Event.KEEPS_UP,
}
WHY = {"write-failed": "its disk refused the write", "saver-lost": "no saver process answered"} | AMISS


class Accepted(Struct, frozen=True):
    """What became of a sync. ``new``: a fact that nobody knew, or may have looked at: a round is worthwhile.

    A fact is stored before its round begins. Where the function dies between the two nobody is due to look, so an
    agent that had no answer says that it speaks ``again``, and what it says then is new once more.
    """

    job: str | None = None
    record: Record | None = None
    grant: Grant | None = None
    new: bool = False


def accept(store: Store, stack: StackState, who: Speaker, sync: Sync, now: float) -> Accepted:
    """Store what this machine may say. Reads the record (and, for a static node, the allocation) afresh."""
    owned = names.parse_vm_name(who.name)
    if owned is None:
        return _static(store, stack, who, sync, now)
    held = store.read_record(owned.job) if owned.stack == stack.stack else None
    if held is None:
        return Accepted()
    record = held.value
    where = place(record, stack, who)
    new = _take(store, record, where, who, sync, now)
    _progress(store, record, where, sync, now)
    return Accepted(owned.job, record, None, new)


def ended(store: Store, stack: StackState, who: Speaker, kept: tuple[str, ...]) -> tuple[str, ...]:
    """Of these jobs, those whose files a static node shall delete. The answer destroys, so it wants proof.

    That is a record which says DONE (no record goes back from there) and nothing of disks that stay. A record that
    cannot be read now proves nothing; nor does one that is not there: whoever deletes a record keeps the disks.
    """
    if not _is_static(stack, who):
        return ()
    return tuple(job for job in kept[:MAX_KEPT] if _is_over(store, job))


def _is_over(store: Store, job: str) -> bool:
    try:
        held = store.read_record(job)
    except StoreError:
        return False
    return held is not None and held.value.phase is Phase.DONE and not held.value.keep_disks


def _is_static(stack: StackState, who: Speaker) -> bool:
    return any(node.name == who.name for pool in stack.pools for node in pool.nodes)


def _static(store: Store, stack: StackState, who: Speaker, sync: Sync, now: float) -> Accepted:
    """A static node: granted to a job, or idle. It answers for one grant at a time."""
    if not _is_static(stack, who):
        return Accepted()
    grants = _grants(store, who)
    if not grants:
        new = store.put_static_hello(StaticHello(who.name, who.uid, sync.boot, who.zone, now))
        return Accepted(new=new or sync.again)
    grant = grants[0]
    held = store.read_record(grant.job)
    if held is None:
        return Accepted(grant.job, None, grant, _dropped(store, grant, who, sync))
    record = held.value
    where = place(record, stack, who, grant)
    new = _take(store, record, where, who, _with_hello(where, sync), now)
    new = _dropped(store, grant, who, sync) or new
    _progress(store, record, where, sync, now)
    return Accepted(grant.job, record, grant, new)


def _grants(store: Store, who: Speaker) -> list[Grant]:
    """This node's grants. Where the allocation makes no sense, what a record says of the node: it holds its grants.

    Raises:
        CorruptError: neither says anything, so the node may still be somebody's.
    """
    try:
        return [grant for grant in store.read_alloc().value.grants if node_of(grant) == who.name]
    except CorruptError:
        for job in store.active_jobs():
            held = store.read_record(job)
            for index, rank in enumerate(held.value.ranks if held else ()):
                if rank.cur is not None and rank.cur.node == who.name:
                    return [Grant(job, index, rank.cur.attempt, f"node:{who.name}", rank.cur.since)]
        raise


def _with_hello(where: Place | None, sync: Sync) -> Sync:
    """A granted node that speaks at all is there for this very attempt: the grant is its alone until it drops it."""
    expected = where is not None and where.slot is not None and where.slot.boot != sync.boot
    if not expected or any(fact.kind in (Kind.HELLO, Kind.DROPPED) for fact in sync.facts):
        return sync
    return replace(sync, facts=(*sync.facts, FactIn(Kind.HELLO)))


def _dropped(store: Store, grant: Grant, who: Speaker, sync: Sync) -> bool:
    """Its word for this attempt releases the grant, whatever became of the record."""
    for fact in sync.facts:
        if fact.kind is Kind.DROPPED and fact.attempt in (None, grant.attempt):
            word = Fact(who.uid, sync.boot, grant.rank, grant.attempt, 0, Kind.DROPPED, "0")
            return Fact.parse(word.key()) is not None and (store.put_fact(grant.job, word) or sync.again)
    return False


def _take(store: Store, record: Record, where: Place | None, who: Speaker, sync: Sync, now: float) -> bool:
    if record.phase is Phase.DONE:  # nobody looks into its folder any more
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
            store.set_active(record.job)  # it may be DONE and buried by now; what is left here is a tick's then
        stored = store.put_fact(record.job, fact)
        if stored and fact.kind in SAVING:
            store.append_ledger(record.job, _saving(fact, now + place_in * INSTANT_S))
        new = stored or new or sync.again
    return new


def _saving(fact: Fact, now: float) -> Entry:
    """Of a save that failed, works again, or holds no more; of a slow machine. No round writes it: told once each."""
    event = SAVING[fact.kind]
    word = fact.value if fact.kind is Kind.DAMAGED else fact.value.rstrip("-0123456789")
    return Entry(
        at=now,
        id=f"{event.value}.r{fact.rank}.a{fact.attempt}.g{fact.gen}.{fact.value}",
        event=event,
        gen=fact.gen,
        rank=fact.rank,
        attempt=fact.attempt,
        detail=times(fact.value) if fact.kind is Kind.LAGS else WHY.get(word, word),
    )


def times(value: str) -> str:
    """``0-163`` -> ``1.6x the median``."""
    return f"{int(value.partition('-')[2]) / 100:.1f}x the median"


def _fact(record: Record, where: Place | None, who: Speaker, boot: str, said: FactIn) -> Fact | None:
    """The fact as it may be stored, or None where this machine may not say it."""
    if where is None or said.kind is Kind.DROPPED:  # a static node's word for its grant: see _dropped
        return None
    fact = Fact(who.uid, boot, where.rank, where.attempt, said.gen, said.kind, said.value)
    slot = where.slot
    if slot is None:
        return fact if said.kind is Kind.FREED else None
    if slot.state is SlotState.INTENT or slot.boot != boot:
        return fact if said.kind is Kind.HELLO and boot not in slot.past else None
    return fact


def _sensible(record: Record, fact: Fact) -> bool:  # noqa: PLR0911 - a line for each kind
    if fact.gen > record.gen:
        return False
    if fact.kind in NUMBERS:
        if not (fact.value.isdigit() and len(fact.value) <= DIGITS):
            return False
        # An answer to a roll call that was not called yet would answer all that ever will be.
        return fact.kind is not Kind.HERE or int(fact.value) <= record.ver
    if fact.kind is Kind.NO_DISK:
        number, _, word = fact.value.partition("-")
        return number.isdigit() and len(number) <= DIGITS and word.isalpha()
    if fact.kind is Kind.SICK:
        return parse_sign(fact.value) is not None
    if fact.kind is Kind.LAGS:
        return LAG.fullmatch(fact.value) is not None
    if fact.kind is Kind.FAILED:
        return Failure.parse(fact.value) is not None
    if fact.kind is Kind.HUNG:
        return Hung.parse(fact.value) is not None
    if fact.kind is Kind.STACKS:
        answer = Answer.parse(fact.value)
        return answer is not None and answer.ver <= record.ver
    if fact.kind is Kind.AMISS:
        return fact.value in AMISS
    if fact.kind is Kind.EXIT:
        return fact.value.lstrip("-").isdigit() and len(fact.value) <= 6
    commit = parse_commit(fact.value)
    return fact.kind not in COMMITS or (commit is not None and commit[0] <= record.gen)


def _forget_boots(store: Store, record: Record, where: Place | None, fact: Fact) -> None:
    """The newest boot's hello counts: hellos are not ordered by themselves, their arrival is."""
    if where is None or where.slot is None or where.slot.boot == fact.boot:
        return
    older = tuple(
        f
        for f in store.facts_of(record.job, fact.uid)
        if (f.uid, f.rank, f.attempt, f.kind) == (fact.uid, fact.rank, fact.attempt, Kind.HELLO)
        and f.boot not in (fact.boot, where.slot.boot)
    )
    if older:
        store.delete_facts(record.job, older)


def _progress(store: Store, record: Record, where: Place | None, sync: Sync, now: float) -> None:
    """Only a member of the newest generation reports the job's progress.

    The time is the function's, and that of the first report of a step: so a gang that stands still (one of
    it never came up) grows silent, although its lowest member goes on reporting. One that uploads its output
    does not: its agent gives up by itself where the bucket takes nothing.
    """
    progress = sync.progress
    if progress is None or where is None or where.slot is None or not where.cur or progress.gen != record.gen:
        return
    if where.slot.state is not SlotState.MEMBER or where.slot.boot != sync.boot:
        return
    try:
        before = store.read_progress(record.job)
    except CorruptError:
        before = None  # this report writes it anew
    told = _stored(progress, before, now)
    begins = _stepped(told) and not (before is not None and before.gen == told.gen and _stepped(before))
    if begins:
        told = replace(told, begin_s=max(0.0, now - record.gen_since))
    store.put_progress(record.job, told)
    if begins:
        first = Entry(at=now, id=f"{Event.FIRST.value}.g{told.gen}", event=Event.FIRST, gen=told.gen, step=told.step)
        store.append_ledger(record.job, first)


def _stored(progress: Progress, before: Progress | None, now: float) -> Progress:
    """A report as it is kept, after ``before``."""
    commit = progress if progress.commit_gen is not None or before is None else before  # of an older generation
    still = before is not None and (before.gen, before.step) == (progress.gen, progress.step)
    still = still and progress.uploading_s is None
    return Progress(
        gen=progress.gen,
        step=progress.step,
        at=before.at if still and before is not None else now,
        samples_per_s=progress.samples_per_s,
        step_s=progress.step_s,
        loss=progress.loss,
        commit_gen=commit.commit_gen,
        commit_step=commit.commit_step,
        save_s=None if progress.save_s is None else min(progress.save_s, MAX_SAVE_S),
        total_steps=progress.total_steps,
        uploading_s=progress.uploading_s,
        begin_s=None if before is None else before.begin_s,
    )


def _stepped(progress: Progress) -> bool:
    """Whether its generation has done a step: beyond the checkpoint it went on from, where nothing else tells."""
    own = progress.commit_gen == progress.gen or progress.step_s is not None
    return own or progress.step > (progress.commit_step or 0)
