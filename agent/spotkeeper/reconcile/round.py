"""One round of one job: carry out the steps of ``passes`` against the store and the cloud.

It decides nothing, not even the order of its reads. The lease only saves money; every write is conditional,
so two rounds at once are merely wasteful.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from dataclasses import replace as changed
from enum import Enum
from typing import Protocol
from uuid import uuid4

from msgspec.structs import replace

from spotkeeper.reconcile import alarm, market, mirrors, paths, skew
from spotkeeper.reconcile.deadline import AGAIN_S, NEVER, Deadline
from spotkeeper.reconcile.decide import Decision, Seen, Times
from spotkeeper.reconcile.lease import Every, Lease
from spotkeeper.reconcile.ledger import Writer
from spotkeeper.reconcile.passes import READS, Pass, Read, Todo
from spotkeeper.reconcile.store_api import CorruptError, Held, OfferSeen, Store, StoreError
from spotkeeper.spec.cloud import Action, Class, Cloud, InsertVm, Listing, Result
from spotkeeper.spec.facts import Fact
from spotkeeper.spec.generation import Progress
from spotkeeper.spec.job import Ask, JobSpec
from spotkeeper.spec.names import JOB_NAME
from spotkeeper.spec.record import Alloc, Outcome, Phase, Record
from spotkeeper.spec.stack import StackState

log = logging.getLogger("spotkeeper.reconcile")

PASSES = 8
AGAIN = 4  # times that a round out of passes, or with new facts, starts over under one lease
BURST = 8  # new facts while a round ran that are the middle of a burst; small gangs never wait
BURST_WAITS = 4
PARALLEL = 16
CALL_DEADLINE_S = 20.0  # real seconds for one call
UNKNOWN = Held(Alloc(), "")  # in the place of an allocation that cannot be read; decide() is told that it is blind
SETTLE_S = 1.1  # GCS takes one write a second to an object: after it, late reports are seen


class Now(Protocol):
    """What a round needs of a clock (``spotkeeper.clock.Clock`` is one)."""

    @property
    def scale(self) -> float: ...

    def now(self) -> float: ...


class Ended(str, Enum):
    """How a round ended."""

    QUIET = "quiet"  # nothing is left to do for now
    BUSY = "busy"  # another round holds the lease, and will see what this one came for
    LOST = "lost"  # another writer was first; its round goes on
    UNFINISHED = "unfinished"  # out of passes: the next round goes on
    ABSENT = "absent"  # no record, or no stack
    UNREADABLE = "unreadable"  # a document of the job, or of the stack, makes no sense: nothing was decided


@dataclass(frozen=True)
class RoundResult:
    """What a round did. ``facts``: those it covered. ``due``: when time alone makes another one worthwhile."""

    ended: Ended
    record: Record | None = None
    rounds: int = 0
    passes: int = 0
    writes: int = 0
    calls: int = 0
    due: float | None = None
    facts: frozenset[Fact] = frozenset()
    published: bool = False  # a new generation


@dataclass
class Options:
    """What a deployment may set. ``times`` None: the defaults, for the clock's scale."""

    times: Times | None = None
    settle_s: float = SETTLE_S  # real seconds
    call_deadline_s: float = CALL_DEADLINE_S
    sleep: Callable[[float], None] = time.sleep
    writer: Writer = field(default_factory=Writer)
    parallel: int = PARALLEL
    deadline: Deadline = NEVER  # of the request that a round is made for
    every: Every | None = None  # how a round's lease is renewed while it runs; None: it is not, and lasts longer


@dataclass(frozen=True)
class Snapshot:
    """A record, and a look at the cloud taken after it was read (rule 3)."""

    held: Held[Record]
    listing: Listing
    market: tuple[OfferSeen, ...] = ()


def run_round(
    store: Store, cloud: Cloud, job: str, clock: Now, options: Options | None = None, snapshot: Snapshot | None = None
) -> RoundResult:
    """Reconcile one job under its lease.

    Reports that arrive while it runs are covered before it returns: the facts are listed again under the
    lease, and once more after it was given back and ``settle_s`` has passed. A reporter that finds the
    lease taken may therefore go (BUSY), and 10 or 10,000 reports at once cost two rounds. Where reports never
    end, the round does, in the time of its request: what it leaves is due, and whoever asks next begins with it.

    ``snapshot``: of the tick, which lists the cloud once for all jobs.

    A document that makes no sense ends the round with an alarm (UNREADABLE): a round that cannot see
    decides nothing and deletes nothing.

    Raises:
        StoreError: the bucket does not answer. Nothing is half done: the next round repeats.
    """
    try:
        return _leased(store, cloud, job, clock, options or Options(), snapshot)
    except CorruptError as error:
        alarm.unreadable(store, error, job)
        return RoundResult(Ended.UNREADABLE, rounds=1)


def _leased(
    store: Store, cloud: Cloud, job: str, clock: Now, options: Options, snapshot: Snapshot | None
) -> RoundResult:
    rounds = 0
    store = store.until(options.deadline)
    while True:
        lease = Lease(store, job, clock, options.every)
        if not lease.take():
            return RoundResult(Ended.BUSY, rounds=rounds)
        with lease.held():
            result = _covered(store, cloud, job, clock, options, snapshot)
            lease.due = result.due
        snapshot = None
        rounds += result.rounds
        result = changed(result, rounds=rounds)
        if result.ended is not Ended.QUIET:
            return result
        if result.writes and not result.published:  # a gang that has just been put together waits for nobody
            options.sleep(options.settle_s)
        if options.deadline.left() < AGAIN_S or rounds > PASSES:
            hand_on(store, job, clock, options, result.facts)
            return result
        if set(store.list_facts(job)) <= result.facts:
            return result


def hand_on(store: Store, job: str, clock: Now, options: Options, covered: frozenset[Fact]) -> None:
    """Nobody here has time for reports that came in at last: a round of theirs is due at once, for who asks next.

    Where somebody has the lease, he looks for them when he gives it back. ``store``: the request's own, with its end.
    """
    try:
        if set(store.list_facts(job)) <= covered:
            return
        lease = Lease(store, job, clock, options.every)
        if lease.take():
            with lease.held():
                lease.due = clock.now()
    except StoreError as error:  # what was done stands
        log.warning("reports of %s may wait for the next tick: %s", job, error)


def _covered(
    store: Store, cloud: Cloud, job: str, clock: Now, options: Options, snapshot: Snapshot | None
) -> RoundResult:
    """Passes, until nothing is left to do and no fact came in while they ran."""
    total = RoundResult(Ended.ABSENT)
    for _ in range(AGAIN):
        result = Round(store, cloud, job, clock, options).run(snapshot)
        total = RoundResult(
            result.ended,
            result.record,
            total.rounds + 1,
            total.passes + result.passes,
            total.writes + result.writes,
            total.calls + result.calls,
            result.due,
            result.facts,
            total.published or result.published,
        )
        snapshot = None
        if result.ended is Ended.UNFINISHED and options.deadline.left() >= AGAIN_S:
            continue
        if result.ended is not Ended.QUIET:
            break
        known = set(store.list_facts(job))
        if known <= result.facts or options.deadline.left() < AGAIN_S:
            break
        _let_in(store, job, len(known), len(known - result.facts), options)
    return total


def _let_in(store: Store, job: str, known: int, new: int, options: Options) -> None:
    """A burst is under way: wait for its end, or every few hundred reports would have a round of their own."""
    for _ in range(BURST_WAITS):
        if new < BURST or options.deadline.left() < AGAIN_S:
            return
        options.sleep(options.settle_s)
        now = len(store.list_facts(job))
        new, known = now - known, now


class Round:
    """The state of one round: what was read, and what its calls came to."""

    def __init__(self, store: Store, cloud: Cloud, job: str, clock: Now, options: Options) -> None:
        self.store, self.cloud, self.job, self.clock, self.options = store, cloud, job, clock, options
        self.times = options.times or Times().scaled(clock.scale)
        self.passes = self.writes = self.calls = 0
        self.published = False
        self.held: Held[Record] | None = None
        self.facts: tuple[Fact, ...] = ()
        self.alloc: Held[Alloc] = UNKNOWN
        self.seen: Seen | None = None

    def run(self, snapshot: Snapshot | None = None) -> RoundResult:
        """Read in the order of ``READS``, then make passes. With a tick's snapshot it is that of ``TICK_READS``."""
        stack = self.store.read_stack()
        for read in READS:
            if stack is None or not self._read(read, stack, snapshot):
                return RoundResult(Ended.ABSENT)
        assert self.held is not None
        assert self.seen is not None
        return self._passes(self.held, self.alloc, self.seen)

    def _read(self, read: Read, stack: StackState, snapshot: Snapshot | None) -> bool:
        """One read; whether there is a record to go on with."""
        if read is Read.RECORD:
            self.held = self.store.read_record(self.job) if snapshot is None else snapshot.held
            if self.held is not None:
                self.options.writer.flush(self.store, self.held.value)
        elif read is Read.FACTS:
            self.facts = self.store.list_facts(self.job)
        elif read is Read.ALLOC and self.held is not None:
            alloc = alarm.readable_alloc(self.store)
            self.alloc = alloc or UNKNOWN
            known = (
                market.look(self.store, self.cloud, stack, self.clock.now()) if snapshot is None else snapshot.market
            )
            self.seen = seen_with(self._look(stack, self.facts, alloc, self.held.value), market=known)
        elif self.seen is not None:
            listing = self.cloud.list(stack.stack) if snapshot is None else snapshot.listing
            known = market.refused(self.seen.market, listing.results)
            self.seen = seen_with(self.seen, listing=listing, market=known, now=self.clock.now())
        return self.held is not None

    def _look(self, stack: StackState, facts: tuple[Fact, ...], alloc: Held[Alloc] | None, record: Record) -> Seen:
        progress = self.store.read_progress(self.job)
        asks = self.store.list_asks(self.job) if record.phase in (Phase.RUN, Phase.HOLD) else ()
        return Seen(
            stack=stack,
            spec=self._spec(record),
            listing=Listing((), ()),
            now=self.clock.now(),
            facts=facts,
            asks=asks,
            files=self._files(record, asks),
            alloc=(alloc or UNKNOWN).value,
            blind=alloc is None,
            hellos=self.store.list_static_hellos() if any(pool.nodes for pool in stack.pools) else (),
            progress=progress,
            save_s=_save_s(progress, self.clock.scale),
            step_s=progress.step_s * self.clock.scale if progress is not None and progress.step_s else None,
            left_s=_left_s(progress, self.clock.scale),
            begin_s=None if progress is None else progress.begin_s,
            draining=self.store.draining(),
            times=self.times if self.options.times else self.times.under(stack.fallback),
        )

    def _spec(self, record: Record) -> JobSpec | None:
        return self.store.read_spec(self.job, record.spec_key()) if record.phase in (Phase.RUN, Phase.HOLD) else None

    def _files(self, record: Record, asks: tuple[Ask, ...]) -> dict[str, JobSpec]:
        """Job files that asks bring. One that makes no sense is none: its ask is refused, and the job is as before."""
        out: dict[str, JobSpec] = {}
        for ask in asks:
            if ask.spec_sha256 is not None and ask.id not in record.asks_done:
                try:
                    spec = self.store.read_spec(self.job, ask.spec_sha256)
                except CorruptError as error:
                    log.warning("a resume is refused: %s", error)
                    continue
                out |= {ask.spec_sha256: spec} if spec is not None else {}
        return out

    def _passes(self, held: Held[Record], alloc: Held[Alloc], seen: Seen) -> RoundResult:
        at = Pass(held.value, seen)
        mended = skew.believed(held.value, seen.now)
        if mended is not held.value:
            written = self._write(held, Decision(record=replace(mended, ver=mended.ver + 1, outbox=())))
            if written is None:
                return self._result(Ended.LOST, at, self.clock.now() + self.times.soon_s)
            held = written
            at = Pass(held.value, seen)
        for _ in range(PASSES):
            self.passes += 1
            if at.todo is Todo.WRITE:
                token = self._write(held, at.decision)
                if token is None:
                    return self._result(Ended.LOST, at, self.clock.now() + self.times.soon_s)
                held = token
                at = at.wrote(held.value)
            elif at.todo is Todo.GRANT:
                swapped = self._grants(alloc, at.decision)
                alloc = swapped or self.store.read_alloc()
                at = at.granted(alloc.value, won=swapped is not None)
            elif at.todo is Todo.CALL:
                results = self._call(at.calls)
                at = at.called(results, market.refused(at.seen.market, results))
            else:
                self._tidy(at)
                return self._result(Ended.QUIET, at, at.decision.due)
        return self._result(Ended.UNFINISHED, at, self.clock.now() + self.times.soon_s)

    def _write(self, held: Held[Record], decision: Decision) -> Held[Record] | None:
        """The outbox of the version being replaced is copied out first: nothing of the ledger is ever lost."""
        self.options.writer.flush(self.store, held.value)
        assert decision.record is not None
        record = replace(decision.record, nonce=uuid4().hex)
        token = self.store.cas_record(record, held.token)
        if token is None:
            return None
        self.writes += 1
        self.published = self.published or record.gen > held.value.gen
        self.options.writer.flush(self.store, record)
        if record.phase is Phase.DONE:
            bury(self.store, record, self.clock.now())
        return Held(record, token)

    def _grants(self, alloc: Held[Alloc], decision: Decision) -> Held[Alloc] | None:
        assert decision.grants is not None
        if self.held is not None and self.held.value.phase is Phase.DONE:
            # Its last grant may be all that brings ticks here; its word for it is still to be deleted (``bury``).
            self.store.set_active(self.job)
        self.options.writer.write(self.store, self.job, decision.noted)
        wanted = replace(decision.grants, nonce=uuid4().hex)
        token = self.store.cas_alloc(wanted, alloc.token)
        if token is None:
            return None  # another job was first: look again, decide again
        self.writes += 1
        return Held(wanted, token)

    def _call(self, todo: tuple[Action, ...]) -> tuple[Result, ...]:
        if any(isinstance(action, InsertVm) for action in todo) and self.store.draining():
            # The stack is being emptied since this round began; whoever empties it waits two seconds for inserts.
            now, inserts = self.clock.now(), [action for action in todo if isinstance(action, InsertVm)]
            put_off = tuple(Result(action, Class.THROTTLED, "put off: the stack is drained", now) for action in inserts)
            return put_off + self._made(tuple(action for action in todo if not isinstance(action, InsertVm)))
        return self._made(todo)

    def _made(self, todo: tuple[Action, ...]) -> tuple[Result, ...]:
        self.calls += len(todo)
        if not todo:
            return ()
        if self.options.parallel == 1 or len(todo) == 1:  # a thread costs more than it brings
            return tuple(map(self._perform, todo))
        with ThreadPoolExecutor(max_workers=min(self.options.parallel, len(todo))) as pool:
            return tuple(pool.map(self._perform, todo))

    def _perform(self, action: Action) -> Result:
        return self.cloud.perform(action, self.options.call_deadline_s)

    def _tidy(self, at: Pass) -> None:
        """Asks that were taken in and facts of attempts that are over."""
        for ask in at.asks_over:
            self.store.delete_ask(self.job, ask.id)
        if mirrors.told(at.decision.stale) and not mirrors.sweep(self.store, at.record):
            return  # there is more of it: while the word for it is there, the next round goes on
        if at.decision.stale:
            self.store.delete_facts(self.job, at.decision.stale)

    def _result(self, ended: Ended, at: Pass, due: float | None) -> RoundResult:
        facts = frozenset(at.seen.facts)
        return RoundResult(ended, at.record, 1, self.passes, self.writes, self.calls, due, facts, self.published)


def bury(store: Store, record: Record, at: float) -> None:
    """A job that is DONE gives up its name, asks, facts, source and copies of checkpoints, which nobody will run again.

    The copies stay where its disks do. Its marker last: who dies halfway leaves it to a tick.
    """
    store.put_tomb(record.job, at)
    for path in store.list(paths.sources(record.job)):
        store.delete(path)
    if not record.ranks:  # it was never submitted whole (``withdraw``): nobody will want its job file
        store.delete(paths.spec(record.job))
    if JOB_NAME.match(record.name):  # where nobody knows it, an id stands for it, and may begin with a digit
        store.delete_name(record.name, record.job)
    for ask in store.list_asks(record.job):
        store.delete_ask(record.job, ask.id)
    store.delete_facts(record.job, _said_in_vain(store, record.job))
    if record.keep_disks or mirrors.clear(store, record.job):
        store.clear_active(record.job)


def withdraw(store: Store, job: str, name: str, at: float, why: str) -> bool:
    """End a submission that came to no record: nothing ever ran. False: its record came first after all.

    The record of its end is create-only, as the submission's own. Its files go, with its name and its marker.
    """
    nonce = uuid4().hex
    end = Record(job, str(uuid4()), name, "", at, nonce=nonce, phase=Phase.DONE, outcome=Outcome.CANCELLED, reason=why)
    if not store.create_record(end):
        return False
    bury(store, end, at)
    return True


def _said_in_vain(store: Store, job: str) -> tuple[Fact, ...]:
    """Facts of a job that is DONE; not those of a static node that still holds its grant, which its word gives back."""
    facts = store.list_facts(job)
    grants = store.read_alloc().value.grants if facts else ()
    held = {(grant.rank, grant.attempt) for grant in grants if grant.job == job}
    return tuple(fact for fact in facts if (fact.rank, fact.attempt) not in held)


def seen_with(seen: Seen, **changes: object) -> Seen:
    return Seen(**{**seen.__dict__, **changes})


def _left_s(progress: Progress | None, scale: float) -> float | None:
    """What its steps tell is left; None: it has told neither how many there are nor how long one takes."""
    if progress is None or not progress.total_steps or progress.step_s is None:
        return None
    return max(0, progress.total_steps - progress.step) * progress.step_s * scale


def _save_s(progress: Progress | None, scale: float) -> float | None:
    """Measured in real seconds; deadlines are virtual."""
    return None if progress is None or progress.save_s is None else progress.save_s * scale
