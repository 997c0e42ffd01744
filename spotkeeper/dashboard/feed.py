"""Reads what the open pages show, in rounds, and updates the pages after each round.

A job whose page is open is read every 2 s, a job whose row is on a screen every 10 s, the other jobs of the list once a
minute, and a job that has ended only every ten minutes. Nothing is read while no page is visible. A job's ledger is
listed again only after its record has changed, or after ten minutes; sooner while an entry is due that comes without a
new record: the end of a dropped machine, or a generation's first step.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

from spotkeeper.client import lookup, market
from spotkeeper.client.errors import CliError
from spotkeeper.client.reads import Meter, metered_store
from spotkeeper.client.target import Target
from spotkeeper.contract.allocation import Allocation
from spotkeeper.contract.ledger import Entry, Event
from spotkeeper.contract.market import Observation, Prices
from spotkeeper.contract.record import Phase, Record
from spotkeeper.contract.stack import StackState
from spotkeeper.dashboard.curves import CurvesReader, JobCurves, Sample, history
from spotkeeper.reconcile.store.documents import CorruptError
from spotkeeper.reconcile.store.objects import StoreError
from spotkeeper.report.job.view import CLOUD, JobView, Site
from spotkeeper.report.money.money import awaits_end
from spotkeeper.report.queue import Queue

OPEN_S, ROW_S, OTHER_S = 2.0, 10.0, 60.0  # real; from one read of a job to the next
LEDGER_S = 600.0  # real; a listing costs as much as a dozen reads, and most entries come with a new record
MARKET_S = 600.0  # real; what happened to machines in 90 days is many objects
SAMPLES = 240  # of the loss and the throughput, for the small charts of the list
READS = 16
HISTORIES = 4  # read at once: two objects each, of up to 9 MB
BATCH = 32  # jobs of a round: the first rows of many jobs are shown before the last ones are read

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Viewer:
    """One open page. ``show`` is called in the server's loop after each round of reads.

    ``job``: the job whose page this is; ``rows``: the unfinished jobs whose rows are on the screen; ``charts``: all
    jobs whose rows are there, for their small charts' history; ``lists``: whether the page lists jobs; ``ended``:
    whether the list has ended jobs too; ``market``: whether the page shows what happened to the pools' machines in the
    last 90 days.
    """

    show: Callable[[], None]
    hidden: bool = False
    job: str | None = None
    rows: frozenset[str] = frozenset()
    charts: frozenset[str] = frozenset()
    ended: bool = False
    lists: bool = True
    market: bool = False


@dataclass
class KnownJob:
    """A job as last read.

    ``ledger``: the ledger's entries, then those in the record's ``outbox``, which may not be in the ledger yet.
    ``samples``: one for each step that a read found, after those of the ``history`` in the bucket, if it was read.
    """

    record: Record
    token: str
    view: JobView
    ledger: tuple[Entry, ...]
    deadline: float | None
    read_at: float
    listed_at: float
    samples: deque[Sample] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    history: bool = False

    @property
    def settled(self) -> bool:
        return self.record.phase is Phase.DONE


class JobFeed:
    """The jobs and the stack of one bucket, as last read."""

    def __init__(self, target: Target, clock: Callable[[], float] = time.monotonic) -> None:
        self.target, self.meter = target, Meter()
        self.store = metered_store(target.bucket, self.meter)
        self.jobs: dict[str, KnownJob] = {}
        self.unreadable: dict[str, str] = {}  # job -> why
        self.stack: StackState | None = None
        self.allocation = Allocation()
        self.queue: Queue | None = None  # None: nothing was read yet
        self.prices: dict[str, Prices] = {}
        self.sweeps: tuple[str, ...] = ()  # names of all searches
        self.site: Site = CLOUD
        self._stops: list[Callable[[], None]] = []  # of reads that can take long
        self._over = False
        self.observed: dict[str, tuple[Observation, ...]] = {}  # by pool, of 90 days
        self.trouble = ""  # why the last round failed
        self._clock = clock
        self._viewers: list[Viewer] = []
        self._curves = CurvesReader(self.store, clock)
        self._wake = asyncio.Event()
        self._slow_at = self._list_at = self._ended_at = self._market_at = float("-inf")
        self._behind = False  # more jobs are due than a round reads
        self._ids: tuple[str, ...] = ()
        self._ended: tuple[str, ...] = ()

    def now(self) -> float:
        """The stack's time, virtual unix seconds."""
        return self.target.clock.now()

    # -- the server's end

    @contextmanager
    def stoppable(self, stop: Callable[[], None]) -> Iterator[None]:
        """Call ``stop`` if the server ends during the block, or has ended: a thread that reads keeps the process."""
        self._stops.append(stop)
        try:
            if self._over:
                stop()
            yield
        finally:
            self._stops.remove(stop)

    def end(self) -> None:
        """Stop the reads that can take long; signal handlers may call it."""
        self._over = True
        for stop in tuple(self._stops):
            stop()

    # -- viewers

    def add(self, viewer: Viewer) -> None:
        self._viewers.append(viewer)
        self.wake()

    def remove(self, viewer: Viewer) -> None:
        if viewer in self._viewers:
            self._viewers.remove(viewer)
            self._curves.keep({one.job for one in self._viewers})

    def wake(self) -> None:
        """Begin the next round now: a page has opened, or shows something else."""
        self._wake.set()

    def looking(self) -> list[Viewer]:
        return [viewer for viewer in self._viewers if not viewer.hidden]

    async def run(self) -> None:
        """Read for as long as the server runs."""
        while True:
            if not self.looking():
                self._wake.clear()
                await self._wake.wait()
            self._wake.clear()
            await asyncio.to_thread(self.round)
            for viewer in self.looking():
                try:
                    viewer.show()
                except Exception:  # one page's fault must not stop the others
                    log.exception("a page could not be updated")
            if self._behind or self._without_history():
                continue
            pause = OPEN_S if any(viewer.job for viewer in self.looking()) else ROW_S
            try:
                await asyncio.wait_for(self._wake.wait(), pause if not self.trouble else ROW_S)
            except TimeoutError:
                continue

    # -- reads

    def round(self) -> None:
        """Read all that is due. Blocks; errors of the bucket end up in :attr:`trouble`."""
        try:
            self._round(self._clock())
            self.trouble = ""
        except (CliError, StoreError) as error:
            self.trouble, self._behind = str(error), False
        except Exception as error:  # the next round may succeed
            log.exception("the bucket could not be read")
            self.trouble, self._behind = f"unexpected: {type(error).__name__}", False

    def _round(self, at: float) -> None:
        viewers = self.looking()
        if at - self._slow_at >= OTHER_S or self.stack is None:
            self._read_stack()
            self._slow_at = at
        if any(viewer.market for viewer in viewers) and at - self._market_at >= MARKET_S and self.stack is not None:
            self.observed = market.observations(self.store, self.stack, self.now())
            self._market_at = at
        if any(viewer.lists for viewer in viewers) and at - self._list_at >= ROW_S:
            self._ids = self.store.active_jobs()
            self._list_at = at
        if any(viewer.ended for viewer in viewers) and at - self._ended_at >= OTHER_S:
            self._ended = tuple(
                path.removeprefix(lookup.TOMBS) for path in self.store.newest(lookup.TOMBS, lookup.MOST_ENDED)
            )
            self._ended_at = at
        due = self._due(viewers, at)
        self._behind = len(due) > BATCH
        with ThreadPoolExecutor(READS) as pool:
            list(pool.map(lambda job: self._read(job, at), due[:BATCH]))
        with ThreadPoolExecutor(HISTORIES) as pool:
            list(pool.map(self._read_history, self._without_history()[:BATCH]))

    def _read_stack(self) -> None:
        self.stack = self.target.state(self.store)
        self.site = lookup.site_of(self.store, self.stack, self.target)
        self.prices = lookup.prices_of(self.store, self.stack)
        self.allocation = self.store.read_allocation().value
        self.queue = self._read_queue(self.stack)
        self.sweeps = self.store.list_sweeps()

    def _read_queue(self, stack: StackState) -> Queue:
        queue = Queue(self.allocation, stack, self.now())
        open_ = [viewer.job for viewer in self._viewers if viewer.job]
        lookup.name_jobs(self.store, queue, open_, {job: state.record.name for job, state in self.jobs.items()})
        return queue

    def _due(self, viewers: Iterable[Viewer], at: float) -> list[str]:
        every: dict[str, float] = {}
        unsettled = [job for job, state in self.jobs.items() if not state.settled]  # perhaps active no more
        for viewer in viewers:
            listed = (*self._ids, *unsettled, *(self._ended if viewer.ended else ()))
            wanted = [(job, OTHER_S) for job in listed] * viewer.lists
            wanted += [(job, ROW_S) for job in viewer.rows]
            wanted += [(viewer.job, OPEN_S)] if viewer.job else []
            for job, pause in wanted:
                every[job] = min(pause, every.get(job, pause))
        known = {job: state for job, state in self.jobs.items() if job in every}
        slack = OPEN_S / 4  # a round begins a little early or late
        return [
            job
            for job, pause in sorted(every.items(), key=lambda item: item[1])
            if (state := known.get(job)) is None
            or (at - state.read_at >= pause - slack and not (state.settled and at - state.read_at < OTHER_S * 10))
        ]

    def _read(self, job: str, at: float) -> None:
        try:
            self._read_job(job, at)
            self.unreadable.pop(job, None)
        except CorruptError as error:
            self.unreadable[job] = f"{error}; try: {error.remedy}"
        except (CliError, StoreError):
            raise
        except Exception as error:  # what one job has written must not stop the others
            log.exception("job %s could not be shown", job)
            self.unreadable[job] = f"unexpected: {type(error).__name__}"

    def _read_job(self, job: str, at: float) -> None:
        read = self.store.read_record(job)
        if read is None:
            self.jobs.pop(job, None)
            return
        record, old = read.value, self.jobs.get(job)
        if self.queue is not None:
            self.queue.names[job] = record.name
        same = old is not None and old.token == read.token and at - old.listed_at < self._ledger_s(old)
        ledger = old.ledger if same and old is not None else lookup.ledger_of(self.store, record)
        same_file = old is not None and old.record.spec_key() == record.spec_key()
        deadline = old.deadline if same_file and old is not None else lookup.deadline_of(self.store, record)
        view = lookup.view_of(
            self.store, record, self.stack, self.now(), self.site, deadline, ledger, self.prices, self.queue
        )
        listed_at = old.listed_at if same and old is not None else at
        state = KnownJob(record, read.token, view, ledger, deadline, at, listed_at)
        if old is not None:
            state.samples, state.history = old.samples, old.history
        if view.step is not None and (not state.samples or state.samples[-1][0] != view.step):
            while state.samples and state.samples[-1][0] >= view.step:  # lost steps, which are trained again
                state.samples.pop()
            state.samples.append((view.step, view.loss, view.samples_per_s))
        self.jobs[job] = state

    def _without_history(self) -> list[KnownJob]:
        """The jobs whose small charts are on a screen and lack what they showed before."""
        shown = {job for viewer in self.looking() for job in viewer.charts}
        return [state for job, state in self.jobs.items() if job in shown and not state.history]

    def _read_history(self, state: KnownJob) -> None:
        state.history = True  # also if it cannot be read: only small charts lack it
        progress = self.store.read_progress(state.record.job)
        if progress is None:
            return
        found = history(self.store, state.record.job, progress)
        later = [one for one in state.samples if not found or one[0] > found[-1][0]]
        state.samples = deque([*found, *later], maxlen=SAMPLES)

    def _ledger_s(self, old: KnownJob) -> float:
        """Return for how many seconds a listing of a job's ledger is good while its record does not change."""
        if awaits_end(old.record, old.ledger):
            return ROW_S
        record = old.record
        starts = record.phase is Phase.RUN and record.gen > 0 and self.now() - record.gen_since < LEDGER_S
        if starts and not any(entry.event is Event.FIRST and entry.gen == record.gen for entry in old.ledger):
            return ROW_S
        return LEDGER_S

    async def curves(self, job: str) -> JobCurves:
        """Return the curves of a job's metrics; all pages of the job share them.

        Raises:
            StoreError: the bucket could not be read.
        """
        state = self.jobs.get(job)
        found = await self._curves.read(job, trains=state is None or state.record.phase is Phase.RUN)
        self._curves.keep({one.job for one in self._viewers})  # the page may be gone by now
        return found

    def find(self, word: str) -> str:
        """Return the id of the job with this id or name; "" if there is none. Blocks."""
        if word in self.jobs:
            return word
        try:
            return lookup.find_job(self.store, word).job
        except (CliError, StoreError):
            return ""
