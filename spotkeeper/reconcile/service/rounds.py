"""Rounds of one process of the function: one at a time for each job, each within the deadline of its request.

Syncs that report nothing are answered from documents that this process read a moment ago (:class:`Fresh`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Generic, TypeVar

from msgspec import Struct

from spotkeeper.reconcile.service.request_body import Refusal, RequestRefusedError
from spotkeeper.reconcile.service.runtime import Deadlined, Runtime, SettingsError
from spotkeeper.reconcile.store.objects import AGAIN_S, REQUEST_S, Deadline

if TYPE_CHECKING:
    from spotkeeper.contract.record import Record
    from spotkeeper.contract.stack import StackState
    from spotkeeper.reconcile.controller.reconcile_job import RoundResult
    from spotkeeper.reconcile.store.documents import Versioned
    from spotkeeper.reconcile.store.store import Store

T = TypeVar("T")
TICK = ""  # the flight of a tick; no job has this id
# Virtual seconds, the shortest pause of a waiting agent (agent/spotkeeper_agent/core/sync.py): the agent gets a change
# at the latest with its second poll.
AGE_S = 0.5
JOBS_KEPT = 256
WOKEN = 4  # most other jobs that one request runs a round of
ANSWER_S = 1.0  # real seconds that an agent's answer waits for notifications

log = logging.getLogger("spotkeeper.reconcile")


class Ticked(Struct, frozen=True):
    jobs: int
    failed: int = 0
    busy: bool = False  # a round of the job was already running in this process


@dataclass
class Visit:
    """The context of one request.

    Attributes:
        deadline: the request's deadline.
        note: fields of the request's log line.
        urgent: whether an agent waits for the answer.
        ticked: whether the request is a tick, which also sends the notifications that killed processes left.
    """

    deadline: Deadline
    note: dict[str, object] = field(default_factory=dict)
    urgent: bool = False
    ticked: bool = False


class Fresh(Generic[T]):
    """A cache of one document per job, for half a second (``AGE_S``). Thread-safe."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._read: dict[str, tuple[float, T]] = {}

    def get(self, job: str, read: Callable[[], T], usable: Callable[[T], bool]) -> T:
        """Return the cached document if it is young enough and ``usable``; otherwise ``read`` it."""
        now = self._now()
        with self._lock:
            found = self._read.get(job)
        if found is not None and 0.0 <= now - found[0] < AGE_S and usable(found[1]):
            return found[1]
        value = read()
        self.keep(job, value, now)
        return value

    def keep(self, job: str, value: T, at: float) -> None:
        """Cache a document; ``at`` is the time when its read began."""
        with self._lock:
            if len(self._read) >= JOBS_KEPT:
                self._read.clear()
            self._read[job] = at, value

    def forget(self, job: str | None = None) -> None:
        """Drop the job's document, or all documents if ``job`` is None, after this process may have changed them."""
        with self._lock:
            if job is None:
                self._read.clear()
            else:
                self._read.pop(job, None)


class Flights:
    """Runs one round per job at a time in this process; a request that comes meanwhile leaves its work to that round.

    The bucket's lease does the same between processes, but costs a read and two writes.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._again: dict[str, bool] = {}

    def run(
        self, key: str, work: Callable[[], T], covered: Callable[[T], bool], tired: Callable[[], bool] = lambda: False
    ) -> T | None:
        """Do the work, or return None if another request is doing it already.

        A request that gets None perhaps stored its report too late for the work under way to read it. So the work is
        then done again, unless ``covered(result)`` says that it has read every report. Once ``tired()`` is true, the
        work is not done again, and the caller must leave the rest to another round.
        """
        with self._lock:
            if key in self._again:
                self._again[key] = True
                return None
            self._again[key] = False
        try:
            done = work()
            while self._called_again(key):
                if tired():
                    with self._lock:
                        del self._again[key]
                    return done
                if not covered(done):
                    done = work()
            return done
        except BaseException:  # without an error, the last check has removed the key
            with self._lock:
                del self._again[key]
            raise

    def _called_again(self, key: str) -> bool:
        """Return whether :meth:`run` has returned None to another request for this key since the last check.

        If it has not, remove the key in the same step, so that the next request for this key does the work itself.
        """
        with self._lock:
            again = self._again[key]
            if again:
                self._again[key] = False
            else:
                del self._again[key]
            return again


class Rounds:
    """Rounds and ticks of one process, for the HTTP and the Lambda entry point."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.flights = Flights()
        self.records: Fresh[Versioned[Record] | None] = Fresh(runtime.clock.now)
        self.dues: Fresh[float | None] = Fresh(runtime.clock.now)

    def visit(self) -> Visit:
        return Visit(Deadline(REQUEST_S, self.runtime.monotonic))

    def store(self, visit: Visit) -> Store:
        return self.runtime.store.until(visit.deadline)

    def run_round(self, stack: StackState, job: str, visit: Visit, user: str = "") -> RoundResult | None:
        """Run a round of the job, then of the jobs for which it reserved or freed machines.

        Returns None if another request in this process is already running one: that round handles this request too.
        ``user``: who asked for it, as verified.
        """
        done = self._run_round(stack, job, visit, user)
        woken = [] if done is None else sorted(done.woken)
        for other in woken[:WOKEN]:  # the next tick sees to the others
            if visit.deadline.left() < AGAIN_S:
                break
            self._run_round(stack, other, Visit(visit.deadline), "")
        return done

    def _run_round(self, stack: StackState, job: str, visit: Visit, user: str) -> RoundResult | None:
        from spotkeeper.reconcile.controller import bursts, reconcile_job

        runtime, store, deadline = self.runtime, self.store(visit), visit.deadline
        cloud = Deadlined(runtime.cloud(stack), runtime.clock, deadline)
        options = replace(runtime.options(), deadline=deadline, user=user)
        tired = False

        def work() -> RoundResult:
            return reconcile_job.run_round(store, cloud, job, runtime.clock, options)

        def covered(done: RoundResult) -> bool:
            # Another process has the lease: asking for the lease again is cheaper than listing facts.
            return done.ended is not reconcile_job.Ended.BUSY and set(store.list_facts(job)) <= done.facts

        def out_of_time() -> bool:
            nonlocal tired
            tired = deadline.left() < AGAIN_S
            return tired

        done = self.flights.run(job, work, covered, out_of_time)
        if done is not None:
            self.records.forget(job)
            self.dues.forget(job)
        if tired and done is not None:
            bursts.hand_on(store, job, runtime.clock, options.every, done.facts)
        visit.note["job"] = job
        visit.note["ended"] = done.ended.value if done is not None else "busy"
        if done is not None:
            visit.note.update(rounds=done.rounds, passes=done.passes, writes=done.writes, calls=done.calls)
        return done

    def run_tick(self, visit: Visit, *, strict: bool = False) -> Ticked:
        """Run a tick. One that finds nothing to do succeeds.

        Args:
            strict: raise an error if the tick's work failed for every job, so that the schedule counts it as failed.

        Raises:
            RequestRefusedError: the bucket has no ``stack/pools.json``; or (strict) no zone of the cloud answered, or
                the round of every job was interrupted.
        """
        from spotkeeper.reconcile.controller.alarm import note_tick
        from spotkeeper.reconcile.controller.home import AwayError

        store = self.store(visit)
        visit.ticked = True
        try:
            self.stack(visit)
            done = self.flights.run(TICK, lambda: self.runtime.tick(visit.deadline), lambda _: True)
        except AwayError:  # the note is that of the function at home
            raise
        except Exception as error:
            note_tick(store, self.runtime.clock.now(), str(error) or type(error).__name__)
            raise
        if done is None:
            return Ticked(0, busy=True)
        self.records.forget()
        self.dues.forget()
        note_tick(store, self.runtime.clock.now(), done.trouble, jobs=done.jobs, failed=len(done.failed))
        if strict and done.trouble:
            raise RequestRefusedError(Refusal.UNAVAILABLE, done.trouble)
        return Ticked(done.jobs, len(done.failed))

    def announce(self, visit: Visit) -> None:
        """Send the notifications that this request stored; after a tick, all that wait. Never raises.

        Rounds have written and released their leases by now. If an agent waits for the answer to its request, this
        method waits for the sending for a second at most. A thread continues the sending, and the next tick sends what
        is left.
        """
        if not self.runtime.take_announced() and not visit.ticked:
            return
        try:
            stack = self.stack(visit)
            if not stack.channels:
                return
            self._deliver(stack, visit)
        except Exception:  # the request's own work is done and stays valid
            log.exception("notifications wait for the next tick")

    def _deliver(self, stack: StackState, visit: Visit) -> None:
        from spotkeeper.reconcile.notifications.deliver import Delivery, deliver_quietly

        options = self.runtime.options()
        delivery = Delivery(
            self.store(visit),
            stack,
            self.runtime.clock,
            self.runtime.send,
            options.sleep,
            visit.deadline,
            options.parallel,
            waits=visit.ticked,
        )
        if options.parallel == 1:
            deliver_quietly(delivery)
            return
        # A thread, because the system's resolver has no time limit.
        thread = threading.Thread(target=deliver_quietly, args=(delivery,), name="notifications", daemon=True)
        thread.start()
        thread.join(ANSWER_S if visit.urgent else max(0.0, visit.deadline.left()))

    def stack(self, visit: Visit) -> StackState:
        stack = self.runtime.stack(self.store(visit))
        if stack is None:
            raise RequestRefusedError(Refusal.UNAVAILABLE, "no stack/pools.json in the bucket")
        if stack.stack != self.runtime.settings.stack:
            raise SettingsError(f"the bucket belongs to stack {stack.stack!r}, not to the stack in SPOTKEEPER_STACK")
        return stack
