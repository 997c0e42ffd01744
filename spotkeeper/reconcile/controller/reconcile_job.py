"""Runs one round of one job: carries out the steps of ``steps.py`` against the bucket and the cloud.

This module decides nothing, not even the order of the reads. Every write is conditional, so two rounds at the same time
do no harm. They only cost more than one round, which the lease avoids.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from dataclasses import replace as changed
from enum import Enum
from functools import partial
from uuid import uuid4

from msgspec.structs import replace

from spotkeeper.clock import Now
from spotkeeper.contract.allocation import Allocation
from spotkeeper.contract.cloud import Action, Cloud, InsertVm, Listing, Result, ResultKind
from spotkeeper.contract.facts import Fact, Kind
from spotkeeper.contract.job import JobRequest, JobSpec
from spotkeeper.contract.record import Phase, Record, TrialProgress
from spotkeeper.contract.stack import StackState
from spotkeeper.contract.sweep import SweepState, Trial
from spotkeeper.reconcile.controller import alarm, bursts, cleanup
from spotkeeper.reconcile.controller.home import check_home, is_settled
from spotkeeper.reconcile.controller.lease import Every, Lease
from spotkeeper.reconcile.controller.ledger import LedgerWriter
from spotkeeper.reconcile.controller.steps import READS, Pass, ReadStep, Todo
from spotkeeper.reconcile.decide import Decision, Snapshot, Times
from spotkeeper.reconcile.decide.gang import rungs
from spotkeeper.reconcile.decide.queue import claim
from spotkeeper.reconcile.select import market
from spotkeeper.reconcile.store import clock_skew
from spotkeeper.reconcile.store.documents import CorruptError, OfferHistory, Versioned
from spotkeeper.reconcile.store.objects import AGAIN_S, NEVER, Deadline
from spotkeeper.reconcile.store.store import Store, swap_allocation

log = logging.getLogger("spotkeeper.reconcile")

PASSES = 8
AGAIN = 4  # how often a round without passes left, or with new facts, starts over under one lease
PARALLEL = 16
CALL_DEADLINE_S = 20.0  # real seconds for one call
# Replaces an unreadable allocation; the snapshot is then marked ``blind``.
UNKNOWN = Versioned(Allocation(), "")
OWNER_WAITS, OWNER_WAIT_S = 10, 1.0  # how often, and how long (real), a request waits to tell whose job it is
SETTLE_S = 1.1  # GCS allows one write per second to an object; after this time, late reports are visible


class Ended(str, Enum):
    """How a round ended."""

    QUIET = "quiet"  # nothing left to do for now
    BUSY = "busy"  # another round, or a new home's first tick, covers what this one was started for
    LOST = "lost"  # another writer was first; its round continues
    UNFINISHED = "unfinished"  # no passes are left: the next round continues
    ABSENT = "absent"  # no record, or no stack
    UNREADABLE = "unreadable"  # a document of the job or of the stack is unreadable: nothing was decided


@dataclass(frozen=True)
class RoundResult:
    """What a round did. ``facts``: the facts it has read. ``due``: when the next round is due without new reports."""

    ended: Ended
    record: Record | None = None
    rounds: int = 0
    passes: int = 0
    writes: int = 0
    calls: int = 0
    due: float | None = None
    facts: frozenset[Fact] = frozenset()
    published: bool = False  # a new generation
    woken: frozenset[str] = frozenset()  # other jobs that need a round, since machines were reserved or freed for them


@dataclass
class RoundOptions:
    """How to run a round. ``times``: the protocol's time limits; None: the defaults, scaled as the clock is.

    ``settle_s``: how long a round waits for the rest of a burst of reports. ``parallel``: the most calls to the cloud,
    and the most rounds of a tick, at the same time.
    """

    times: Times | None = None
    settle_s: float = SETTLE_S  # real seconds
    call_deadline_s: float = CALL_DEADLINE_S
    sleep: Callable[[float], None] = time.sleep
    writer: LedgerWriter = field(default_factory=LedgerWriter)
    parallel: int = PARALLEL
    deadline: Deadline = NEVER  # the deadline of the request that runs the round
    user: str = ""  # who asked for the round, as the function verified; "": nobody
    region: str = ""  # this function's own; "": unknown, as with a stack in one region
    every: Every | None = None  # how the lease is renewed during a round; None: not at all, and it lasts longer


@dataclass(frozen=True)
class Prefetched:
    """A job's record, and a listing that a tick made after it had read the records of all jobs (rule 3)."""

    record: Versioned[Record]
    listing: Listing
    market: tuple[OfferHistory, ...] = ()


def run_round(
    store: Store,
    cloud: Cloud,
    job: str,
    clock: Now,
    options: RoundOptions | None = None,
    prefetched: Prefetched | None = None,
) -> RoundResult:
    """Reconcile one job under its lease.

    Reports that arrive meanwhile are handled before it returns: it lists the facts again under the lease, and once more
    ``settle_s`` after releasing the lease. So a request that finds the lease taken can return at once (BUSY), and 10 or
    10,000 simultaneous reports cost two rounds. If reports never stop, it returns shortly before the deadline of its
    request, and the next request handles the rest. Only the first request of a user waits: it tells whose job it is.

    An unreadable document ends the round with an alarm (UNREADABLE), without decisions or deletions.

    Args:
        prefetched: what a tick has read already.

    Raises:
        StoreError: the bucket does not answer. The next round does what is left.
    """
    try:
        return _leased(store, cloud, job, clock, options or RoundOptions(), prefetched)
    except CorruptError as error:
        alarm.unreadable(store, error, job)
        return RoundResult(Ended.UNREADABLE, rounds=1)


def _leased(
    store: Store, cloud: Cloud, job: str, clock: Now, options: RoundOptions, prefetched: Prefetched | None
) -> RoundResult:
    rounds, woken = 0, frozenset[str]()
    store = store.until(options.deadline)
    while True:
        lease = Lease(store, job, clock, options.every)
        if not _took(lease, store, job, options):
            ended = Ended.ABSENT if lease.absent else Ended.BUSY
            return RoundResult(ended, rounds=rounds, woken=woken)
        with lease.renewed():
            result = _covered(store, cloud, job, clock, options, prefetched)
            lease.due = result.due
        prefetched = None
        rounds += result.rounds
        woken |= result.woken
        result = changed(result, rounds=rounds, woken=woken)
        if result.ended is not Ended.QUIET:
            return result
        if result.writes and not result.published:  # a generation that was just published must not wait
            options.sleep(options.settle_s)
        if options.deadline.left() < AGAIN_S or rounds > PASSES:
            bursts.hand_on(store, job, clock, options.every, result.facts)
            return result
        if set(store.list_facts(job)) <= result.facts:
            return result


def _took(lease: Lease, store: Store, job: str, options: RoundOptions) -> bool:
    """Take the lease. While the job has no owner, a user's request waits for it: no other round knows the user."""
    for _ in range(OWNER_WAITS):
        if lease.take() or lease.absent:
            return not lease.absent
        read = store.read_record(job) if options.user else None
        if read is None or read.value.owner or read.value.over or options.deadline.left() < AGAIN_S:
            break
        options.sleep(OWNER_WAIT_S)
    return False


def _covered(
    store: Store, cloud: Cloud, job: str, clock: Now, options: RoundOptions, prefetched: Prefetched | None
) -> RoundResult:
    """Run rounds under one lease, until nothing is left to do and no new fact has arrived."""
    total = RoundResult(Ended.ABSENT)
    for _ in range(AGAIN):
        result = Round(store, cloud, job, clock, options).run(prefetched)
        total = changed(
            result,
            rounds=total.rounds + 1,
            passes=total.passes + result.passes,
            writes=total.writes + result.writes,
            calls=total.calls + result.calls,
            published=total.published or result.published,
            woken=total.woken | result.woken,
        )
        prefetched = None
        if result.ended is Ended.UNFINISHED and options.deadline.left() >= AGAIN_S:
            continue
        if result.ended is not Ended.QUIET:
            break
        to_come = bursts.to_come(result.record)
        if not to_come and not result.writes:
            break  # it took no time: the list after the lease's release finds what arrived
        if to_come:  # a large gang reports machine by machine: without a pause each report would cost a round
            options.sleep(options.settle_s)
        known = set(store.list_facts(job))
        if known <= result.facts or options.deadline.left() < AGAIN_S:
            break
        new = len(known - result.facts)
        if new < bursts.BURST and to_come >= bursts.BURST:
            options.sleep(bursts.GATHER_S)  # a burst ends by itself; a trickle would cost a round for each machine
        else:
            settle = partial(options.sleep, options.settle_s)
            bursts.let_in(store, job, len(known), new, settle, options.deadline)
    return total


class Round:
    """The state of one round: what was read, and the results of its calls."""

    def __init__(self, store: Store, cloud: Cloud, job: str, clock: Now, options: RoundOptions) -> None:
        self.store, self.cloud, self.job, self.clock, self.options = store, cloud, job, clock, options
        self.times = options.times or Times().scaled(clock.scale)
        self.passes = self.writes = self.calls = 0
        self.published = False
        self.woken: frozenset[str] = frozenset()
        self.record: Versioned[Record] | None = None
        self.facts: tuple[Fact, ...] = ()
        self.allocation: Versioned[Allocation] = UNKNOWN
        self.sweep: Versioned[SweepState] | None = None
        self.snapshot: Snapshot | None = None

    def run(self, prefetched: Prefetched | None = None) -> RoundResult:
        """Read in the order of ``READS``, then make passes. With ``prefetched`` the order is ``TICK_READS``."""
        stack = self.store.read_stack()
        if stack is not None:
            check_home(stack, self.options.region)
        for read in READS:
            if stack is None or not self._read(read, stack, prefetched):
                return RoundResult(Ended.ABSENT)
        assert self.record is not None
        assert self.snapshot is not None
        if not is_settled(self.snapshot.stack, self.snapshot.allocation):
            return RoundResult(Ended.BUSY)  # the tick that takes over runs a round
        return self._passes(self.record, self.allocation, self.snapshot)

    def _read(self, read: ReadStep, stack: StackState, prefetched: Prefetched | None) -> bool:
        """Make one read. Returns whether the job has a record; otherwise the round ends."""
        if read is ReadStep.RECORD:
            self.record = self.store.read_record(self.job) if prefetched is None else prefetched.record
            if self.record is not None:
                self.options.writer.flush(self.store, self.record.value, stack)
        elif read is ReadStep.FACTS:
            self.facts = self.store.list_facts(self.job)
        elif read is ReadStep.ALLOCATION and self.record is not None:
            allocation = alarm.readable_allocation(self.store)
            self.allocation = allocation or UNKNOWN
            known = (
                market.read(self.store, self.cloud, stack, self.clock.now())
                if prefetched is None
                else prefetched.market
            )
            self.snapshot = changed(self._look(stack, self.facts, allocation, self.record.value), market=known)
        elif self.snapshot is not None:
            listing = self.cloud.list(stack.stack) if prefetched is None else prefetched.listing
            known = market.refused(self.snapshot.market, listing.results)
            self.snapshot = changed(self.snapshot, listing=listing, market=known, now=self.clock.now())
        return self.record is not None

    def _look(
        self, stack: StackState, facts: tuple[Fact, ...], allocation: Versioned[Allocation] | None, record: Record
    ) -> Snapshot:
        progress = self.store.read_progress(self.job)
        spec = self.store.read_spec(self.job, record.spec_key()) if not record.over else None
        trial = record.trial.of if record.trial is not None else spec.trial if spec is not None else None
        self.sweep = None if trial is None else alarm.readable_sweep(self.store, trial.sweep)
        requests = self.store.list_requests(self.job) if not record.over else ()
        return Snapshot(
            stack=stack,
            spec=spec,
            listing=Listing((), ()),
            now=self.clock.now(),
            facts=facts,
            requests=requests,
            files=self._files(record, requests),
            allocation=(allocation or UNKNOWN).value,
            blind=allocation is None,
            hellos=self.store.list_static_hellos() if any(pool.machines for pool in stack.pools) else (),
            progress=progress,
            sweep=None if self.sweep is None else self.sweep.value,
            listed=trial is None or self._listed(trial),
            save_s=None if progress is None or progress.save_s is None else progress.save_s * self.clock.scale,
            step_s=progress.step_s * self.clock.scale if progress is not None and progress.step_s else None,
            left_s=None if progress is None or progress.left_s is None else progress.left_s * self.clock.scale,
            begin_s=None if progress is None else progress.begin_s,
            user=self.options.user,
            draining=self.store.draining(),
            times=self.times if self.options.times else replace(self.times, fallback=stack.fallback),
        )

    def _listed(self, trial: Trial) -> bool:
        """Whether the search names this job as its trial: any job file may say so. Once it reports, nothing is read."""
        known = self.sweep.value.trial(trial.number).job if self.sweep is not None else ""
        return (known or self.store.read_trial(trial.sweep, trial.number)) == self.job

    def _files(self, record: Record, requests: tuple[JobRequest, ...]) -> dict[str, JobSpec]:
        """Read the job files that requests name, by hash. An unreadable file is left out, so its request is refused."""
        out: dict[str, JobSpec] = {}
        for request in requests:
            if request.spec_sha256 is not None and request.id not in record.requests_done:
                try:
                    spec = self.store.read_spec(self.job, request.spec_sha256)
                except CorruptError as error:
                    log.warning("a resume is refused: %s", error)
                    continue
                out |= {request.spec_sha256: spec} if spec is not None else {}
        return out

    def _passes(self, read: Versioned[Record], allocation: Versioned[Allocation], snapshot: Snapshot) -> RoundResult:
        at = Pass(read.value, snapshot)
        corrected = clock_skew.believed(read.value, snapshot.now)
        if corrected is not read.value:
            written = self._write(read, Decision(record=replace(corrected, ver=corrected.ver + 1, outbox=())))
            if written is None:
                return self._result(Ended.LOST, at, self.clock.now() + self.times.soon_s)
            read = written
            at = Pass(read.value, snapshot)
        for _ in range(PASSES):
            self.passes += 1
            if at.todo is Todo.WRITE:
                token = self._write(read, at.decision)
                if token is None:
                    return self._result(Ended.LOST, at, self.clock.now() + self.times.soon_s)
                read = token
                at = at.wrote(read.value)
            elif at.todo is Todo.REPORT and at.record.trial is not None:
                self.sweep = self._report(at.record.trial, at.decision)
                at = at.reported(self.sweep.value)
            elif at.todo is Todo.GRANT:
                swapped = self._grants(allocation, at.decision)
                allocation = swapped or self.store.read_allocation()
                at = at.granted(allocation.value, won=swapped is not None)
            elif at.todo is Todo.CALL:
                results = self._call(at.calls)
                at = at.called(results, market.refused(at.snapshot.market, results))
            else:
                self._tidy(at)
                return self._result(Ended.QUIET, at, at.decision.due)
        return self._result(Ended.UNFINISHED, at, self.clock.now() + self.times.soon_s)

    def _write(self, read: Versioned[Record], decision: Decision) -> Versioned[Record] | None:
        """Write the record. Before, copy the outbox of the present version to the ledger, so that no entry is lost."""
        assert self.snapshot is not None
        stack = self.snapshot.stack
        self.options.writer.flush(self.store, read.value, stack)
        assert decision.record is not None
        record = replace(decision.record, nonce=uuid4().hex)
        token = self.store.cas_record(record, read.token)
        if token is None:
            return None
        self.writes += 1
        self.published = self.published or record.gen > read.value.gen
        self.options.writer.flush(self.store, record, stack)
        if record.phase is Phase.DONE:
            cleanup.bury(self.store, record, self.clock.now())
        return Versioned(record, token)

    def _grants(self, allocation: Versioned[Allocation], decision: Decision) -> Versioned[Allocation] | None:
        assert decision.grants is not None
        if self.record is not None and self.record.value.phase is Phase.DONE:
            # Ticks may come only because of the job's last grant, but its DROPPED fact must still be deleted
            # (``bury``).
            self.store.set_active(self.job)
        self.options.writer.write(self.store, self.job, decision.noted)
        written = swap_allocation(self.store, decision.grants, allocation.token)
        if written is None:
            return None  # another job's write was first: read and decide again
        self.writes += 1
        self.woken |= claim.woken(allocation.value, written.value) - {self.job}
        return written

    def _report(self, trial: TrialProgress, decision: Decision) -> Versioned[SweepState]:
        """Write the trial's report, unless another trial's was first; return the search's state as it is now."""
        assert self.sweep is not None
        assert decision.sweep is not None
        wanted = replace(decision.sweep, nonce=uuid4().hex)
        token = self.store.cas_sweep(wanted, self.sweep.token)
        if token is None:
            return self.store.read_sweep(trial.of.sweep)
        self.writes += 1
        self.woken |= rungs.woken(self.sweep.value, wanted, trial.of) - {self.job}
        return Versioned(wanted, token)

    def _call(self, todo: tuple[Action, ...]) -> tuple[Result, ...]:
        if any(isinstance(action, InsertVm) for action in todo) and self.store.draining():
            # The drain began after this round did; a drain waits two seconds for such inserts.
            now, inserts = self.clock.now(), [action for action in todo if isinstance(action, InsertVm)]
            put_off = tuple(
                Result(action, ResultKind.THROTTLED, "postponed: the stack is drained", now) for action in inserts
            )
            return put_off + self._made(tuple(action for action in todo if not isinstance(action, InsertVm)))
        return self._made(todo)

    def _made(self, todo: tuple[Action, ...]) -> tuple[Result, ...]:
        self.calls += len(todo)
        if not todo:
            return ()
        if self.options.parallel == 1 or len(todo) == 1:  # a thread would cost more than it saves
            return tuple(map(self._perform, todo))
        with ThreadPoolExecutor(max_workers=min(self.options.parallel, len(todo))) as pool:
            return tuple(pool.map(self._perform, todo))

    def _perform(self, action: Action) -> Result:
        return self.cloud.perform(action, self.options.call_deadline_s)

    def _tidy(self, at: Pass) -> None:
        for request in at.requests_over:
            self.store.delete_request(self.job, request.id)
        copies = any(fact.kind in (Kind.MIRRORED, Kind.UNMIRRORED) for fact in at.decision.stale)
        if copies and not cleanup.sweep_copies(self.store, at.record):
            return  # copies are left: the facts stay, so that the next round continues
        if at.decision.stale:
            self.store.delete_facts(self.job, at.decision.stale)

    def _result(self, ended: Ended, at: Pass, due: float | None) -> RoundResult:
        facts = frozenset(at.snapshot.facts)
        done = self.passes, self.writes, self.calls
        return RoundResult(ended, at.record, 1, *done, due, facts, self.published, self.woken)
