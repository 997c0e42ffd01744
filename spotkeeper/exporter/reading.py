"""Reads a stack's documents at a bounded pace: one list of unfinished jobs, and two conditional reads for each job.

A job's ledger is listed only after its record or generation has changed, while the end of a deleted machine is due, or
every ten minutes, since a list costs as much as twelve reads. A job is dropped an hour after all its machines are
deleted. Agents write once a minute how busy their machines are, and the exporter reads these reports as often.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Container, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from msgspec import Struct
from msgspec.structs import replace

from spotkeeper.client import lookup
from spotkeeper.client.reads import Meter, Spending, metered_store
from spotkeeper.client.target import Target
from spotkeeper.contract.allocation import Claim
from spotkeeper.contract.generation import Progress
from spotkeeper.contract.ledger import Entry, Event
from spotkeeper.contract.market import Prices
from spotkeeper.contract.record import Hold, Phase, Record
from spotkeeper.contract.stack import StackState
from spotkeeper.contract.usage import BYTES, HostUsage, NodeUsage, object_name, read_usage
from spotkeeper.reconcile.store.documents import CorruptError
from spotkeeper.report.job.view import JobView, Site, job_view
from spotkeeper.report.money.money import awaits_end
from spotkeeper.report.queue import Queue, TeamView
from spotkeeper.report.stack import StackView, stack_view, usd_per_hour

LEDGER_S = 600.0  # real; entries that no round writes (a shell, a full disk) appear within this time
LEAVES_S = 3600.0  # virtual; a job stays this long after its end
MOST_JOBS = 1000  # the newest; this many jobs give about 40,000 time series
MOST_ENDED = 64  # ended jobs that are read at the start
USAGE_S = 55.0  # real; agents write once a minute
MOST_NODES = 1000  # whose use is read, over all jobs
FRESH_S = 300.0  # virtual; an older report is of a machine that has gone
FRESH_REAL_S = 50.0  # real; at least this, since agents write at most every 10 s


class JobReading(Struct, frozen=True):
    record: Record
    progress: Progress | None
    ledger: tuple[Entry, ...]  # with entries that only the record has so far
    view: JobView
    usd_hour: float  # what its dynamic machines cost now
    usage: tuple[tuple[int, HostUsage], ...] = ()  # how busy the machines of some nodes are
    queued: bool = False  # whether it has no machines because it waits in the queue


class StackReading(Struct, frozen=True):
    """A stack at ``now``, virtual unix seconds. ``left_out``: number of jobs beyond the newest ``MOST_JOBS``.

    ``recalls``: how often this process has seen the queue take machines from a job, since a day before its start.
    ``at``: the real time at which the read ended, unix seconds; ``took_s``: the read's duration, real seconds.
    """

    now: float
    stack: StackState
    view: StackView
    jobs: tuple[JobReading, ...]
    unreadable: int
    left_out: int
    prices: dict[str, Prices]
    site: Site
    spending: Spending
    claims: tuple[Claim, ...]
    teams: tuple[TeamView, ...]
    recalls: int
    took_s: float  # real
    at: float  # real unix seconds


@dataclass
class _Known:
    """A job's ledger as last listed. ``of``: the record's version and the generation's start at that time."""

    of: object
    listed_at: float
    ledger: tuple[Entry, ...]


class StackReader:
    """Reads one stack again and again. :meth:`read` must not run twice at the same time."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._meter = Meter()
        self._store = metered_store(target.bucket, self._meter)
        self._known: dict[str, _Known] = {}
        self._done: dict[str, JobReading] = {}  # jobs that will not change
        self._jobs: set[str] | None = None  # None: nothing was read yet
        self._usage: dict[tuple[str, int], NodeUsage] = {}  # by job and node
        self._usage_at = float("-inf")
        self._recalls: set[tuple[str, float]] = set()  # those that claims name now: a job, and when
        self._recalled = 0
        self._lock = threading.Lock()

    def read(self) -> StackReading:
        """Read the stack. Raises CliError or StoreError."""
        began, now, store = time.monotonic(), self._target.clock.now(), self._store
        stack = self._target.state(store)
        site = lookup.site_of(store, stack, self._target)
        prices = lookup.prices_of(store, stack)
        active = store.active_jobs()
        if self._jobs is None:
            self._jobs = {path.removeprefix(lookup.TOMBS) for path in store.newest(lookup.TOMBS, MOST_ENDED)}
        self._jobs |= set(active)
        with ThreadPoolExecutor(lookup.READS) as pool:
            found = list(pool.map(lambda job: self._job(job, now, stack, prices, site), sorted(self._jobs)))
        jobs = [one for one in found if isinstance(one, JobReading)]
        self._forget(jobs, active, now)
        jobs = [one for one in jobs if one.record.job in self._jobs]
        newest = sorted(jobs, key=lambda one: (one.record.created, one.record.job))[-MOST_JOBS:]
        self._read_usage(newest, now)
        known = [(one.view, one.ledger) for one in jobs if not one.view.over()]
        queue = self._queue(stack, now)
        waiting = {claim.job for claim in queue.allocation.claims if claim.waiting}
        return StackReading(
            now=now,
            stack=stack,
            view=stack_view(stack, queue.allocation, known, now, prices),
            jobs=tuple(self._with_usage(replace(one, queued=_queued(one.record, waiting))) for one in newest),
            unreadable=sum(isinstance(one, CorruptError) for one in found),
            left_out=len(jobs) - len(newest),
            prices=prices,
            site=site,
            spending=self._meter.hour(),
            claims=queue.allocation.claims,
            teams=queue.teams,
            recalls=self._recalled,
            took_s=time.monotonic() - began,
            at=time.time(),
        )

    def _read_usage(self, jobs: Iterable[JobReading], now: float) -> None:
        at = time.monotonic()
        if at - self._usage_at < USAGE_S:
            return
        self._usage_at = at
        members = [(one.record.job, node) for one in jobs for node in one.record.members if not one.view.over()]
        wanted = members[:MOST_NODES]
        with ThreadPoolExecutor(lookup.READS) as pool:
            found = pool.map(lambda key: self._store.part(object_name(*key), 0, BYTES + 1), wanted)
            told = {key: read_usage(data) for key, data in zip(wanted, found, strict=True) if data is not None}
        fresh_s = max(FRESH_S, FRESH_REAL_S * self._target.clock.scale)
        self._usage = {key: one for key, one in told.items() if one is not None and now - one.at < fresh_s}

    def _with_usage(self, one: JobReading) -> JobReading:
        job, nodes = one.record.job, one.record.members
        return replace(
            one, usage=tuple((node, self._usage[job, node].host) for node in nodes if (job, node) in self._usage)
        )

    def _queue(self, stack: StackState, now: float) -> Queue:
        allocation = lookup.allocation_of(self._store)
        if allocation.nonce:  # it was written, and is readable
            found = {(claim.job, at) for claim in allocation.claims for at in claim.recalls}
            self._recalled += len(found - self._recalls)
            self._recalls = found
        return Queue(allocation, stack, now)

    def _job(
        self, job: str, now: float, stack: StackState, prices: dict[str, Prices], site: Site
    ) -> JobReading | CorruptError | None:
        with self._lock:
            done = self._done.get(job)
        if done is not None:
            return done
        try:
            read = self._store.read_record(job)
        except CorruptError as error:
            return error
        if read is None:
            return None
        record, progress = read.value, lookup.progress_of(self._store, job)
        began = None if progress is None else (progress.gen, progress.begin_s)
        ledger = (*self._ledger(record, (read.token, began)), *record.outbox)
        view = job_view(record, progress, ledger, stack, now, prices=prices, site=site)
        reading = JobReading(record, progress, ledger, view, usd_per_hour(ledger, now, prices))
        if record.phase is Phase.DONE and any(entry.event is Event.DONE for entry in ledger):
            with self._lock:
                self._done[job] = reading
        return reading

    def _ledger(self, record: Record, of: object) -> tuple[Entry, ...]:
        with self._lock:
            known = self._known.get(record.job)
        at = time.monotonic()
        if (
            known is None
            or known.of != of
            or at - known.listed_at >= LEDGER_S
            or awaits_end(record, (*known.ledger, *record.outbox))
        ):
            known = _Known(of, at, self._store.list_ledger(record.job))
            with self._lock:
                self._known[record.job] = known
        return known.ledger

    def _forget(self, jobs: Iterable[JobReading], active: Iterable[str], now: float) -> None:
        """Drop jobs that were deleted, and those whose last machine was deleted an hour ago."""
        assert self._jobs is not None
        stay = {one.record.job for one in jobs if not (one.record.phase is Phase.DONE and _over(one, now))}
        self._jobs &= stay | set(active)
        for kept in (self._known, self._done):
            for job in set(kept) - self._jobs:
                del kept[job]


def _queued(record: Record, waiting: Container[str]) -> bool:
    if record.phase is Phase.HOLD:
        return record.hold is Hold.QUEUE
    return record.phase is Phase.RUN and record.job in waiting and all(node.cur is None for node in record.nodes)


def _over(one: JobReading, now: float) -> bool:
    ends = (entry.at for entry in one.ledger if entry.event in (Event.END, Event.DONE))
    return now - max(ends, default=one.record.created) >= LEAVES_S  # a withdrawn submission has no ledger
