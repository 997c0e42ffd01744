"""The tick: rounds of all unfinished jobs from one listing of the cloud, then the sweep for orphans.

To prove a loss, the record must be read before the listing; to prove an orphan, after the listing (rule 3). So a tick
first reads the records of known jobs, then lists the cloud once. Labels of listed machines and disks can name more
jobs; their records are read last. A job without a record gets a create-only END record; a round deletes its machines.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace as changed
from typing import TypeVar
from uuid import NAMESPACE_OID, uuid4, uuid5
from zlib import crc32

from msgspec import Struct
from msgspec.structs import replace

from spotkeeper.clock import Now
from spotkeeper.contract.allocation import Allocation
from spotkeeper.contract.cloud import Cloud, Listing, disks_kept
from spotkeeper.contract.record import Node, Outcome, Phase, Record
from spotkeeper.contract.stack import StackState
from spotkeeper.contract.sweep import SweepState
from spotkeeper.reconcile.controller import alarm
from spotkeeper.reconcile.controller.cleanup import bury, withdraw
from spotkeeper.reconcile.controller.home import check_home, settle
from spotkeeper.reconcile.controller.lease import Lease
from spotkeeper.reconcile.controller.reconcile_job import Ended, Prefetched, RoundOptions, RoundResult, run_round
from spotkeeper.reconcile.decide.gang import rungs
from spotkeeper.reconcile.decide.queue.scheduler import schedule
from spotkeeper.reconcile.decide.snapshot import Times
from spotkeeper.reconcile.select import market
from spotkeeper.reconcile.store import paths
from spotkeeper.reconcile.store.clock_skew import believed_claims
from spotkeeper.reconcile.store.documents import CorruptError, Versioned
from spotkeeper.reconcile.store.objects import BEGIN_S, StoreError
from spotkeeper.reconcile.store.store import Store, swap_allocation

T = TypeVar("T")
TICK_EVERY_S = 60.0
GIVEN_UP_S = 86_400.0  # virtual; a submission takes minutes, and a second submit can finish it
STRIDE = 7919  # jobs by which the order rotates at each tick
ROUNDS_AT_ONCE = 8
RESTS = 30  # a job that waits in the queue has a round of its own in one of so many ticks

log = logging.getLogger("spotkeeper.reconcile")


class TickResult(Struct, frozen=True):
    jobs: int = 0
    orphans: tuple[str, ...] = ()  # jobs with machines, disks or grants but no record
    failed: tuple[str, ...] = ()  # jobs whose round raised; the next tick tries again
    rounds: tuple[RoundResult, ...] = ()
    late: tuple[str, ...] = ()  # jobs for which this tick had no time
    trouble: str = ""  # why the tick failed: it could do nothing for any job


def tick(store: Store, cloud: Cloud, clock: Now, options: RoundOptions | None = None) -> TickResult:
    """Run a round of every job that has a marker in ``active/``, a grant, or a listed machine or disk; then the sweep.

    The tick ends within the deadline of ``options``, however slow bucket and cloud are. Rounds that it has no time to
    begin are left to the next tick, which begins with another job. The next tick also repeats interrupted rounds, which
    count as failed.
    """
    options = changed(options or RoundOptions(), settle_s=0.0)  # reports that arrive late start other rounds
    store = store.until(options.deadline)
    stack = store.read_stack()
    if stack is None:
        return TickResult()
    check_home(stack, options.region)
    allocation = alarm.readable_allocation(store)
    if allocation is not None and stack.regions and allocation.value.home != stack.region:
        if why := settle(store, cloud, stack, allocation, clock.now()):
            return TickResult(trouble=why)
        allocation = alarm.readable_allocation(store)
    active = store.active_jobs()
    allocation = _scheduled(store, stack, allocation, clock.now())
    granted = {grant.job for grant in (allocation.value.grants if allocation else ())}
    resting = _resting(allocation, granted, clock.now())
    searches = _searches(store, allocation)
    at_rungs = _at_rungs(searches, allocation, granted, clock.now())
    known = sorted({*active, *granted, *_claimed(allocation)} - resting - at_rungs)
    failed: dict[str, str] = {}  # job -> why, or "" if a document of the job is unreadable
    new = _new(store, set(known) - granted - _claimed(allocation), options)
    before = dict(zip(known, _at_once(lambda job: _read(store, job, failed), known, options), strict=True))
    known_offers = market.read(store, cloud, stack, clock.now())
    listing = cloud.list(stack.stack)
    labelled = sorted(_labelled(listing) - set(known) - resting)
    orphans = tuple(_orphans(store, clock, listing, [job for job in [*known, *labelled] if job not in failed], failed))
    late: list[str] = []

    def one(job: str) -> RoundResult | None:
        if options.deadline.left() < BEGIN_S:
            late.append(job)
            return None
        read = before.get(job)
        # Only a record read before the listing may be used with it; otherwise the round lists again.
        usable = read is not None and job not in orphans and job not in new
        fresh = Prefetched(read, listing, known_offers) if read is not None and usable else None
        return _round(store, cloud, job, clock, options, fresh, failed)

    blank = {job for job in known if before[job] is None} - set(orphans)  # running or abandoned submissions
    _withdraw(store, clock, sorted(blank & set(active) - set(failed)))
    _drop_claims(store, blank - set(active) - granted - set(failed))
    jobs = [job for job in [*known, *labelled] if job not in blank and job not in failed]
    jobs += sorted(at_rungs.intersection(_report_lost(store, searches, set(active) - blank, failed)))
    jobs = _turns(jobs, clock.now())
    found = dict(zip(jobs, _at_once(one, jobs, options), strict=True))
    results = [result for result in found.values() if result is not None]
    if again := _await_others(store, found, clock, options):
        before |= dict.fromkeys(again)  # what was read before the wait is too old
        results += [result for result in _at_once(one, again, options) if result is not None]
    if late:
        log.warning("%d of %d jobs wait for the next tick: this tick has no time left", len(late), len(jobs))
    _retire(store, clock, active, before, failed)
    trouble = _trouble(stack, listing, jobs, failed)
    return TickResult(len(known) + len(labelled), orphans, tuple(failed), tuple(results), tuple(late), trouble)


def _scheduled(
    store: Store, stack: StackState, read: Versioned[Allocation] | None, now: float
) -> Versioned[Allocation] | None:
    """Give and take reservations as time demands; rounds do the same when they change the allocation."""
    if read is None:
        return None
    new = schedule(believed_claims(read.value, now), stack, now)
    return read if new is read.value else _swap(store, read, new)


def _swap(store: Store, read: Versioned[Allocation], new: Allocation) -> Versioned[Allocation]:
    """Write the allocation, unless another writer was first: then return what that one wrote."""
    return swap_allocation(store, new.changed((), ()), read.token) or store.read_allocation()


def _claimed(allocation: Versioned[Allocation] | None) -> set[str]:
    return {claim.job for claim in allocation.value.claims} if allocation is not None else set()


def _new(store: Store, jobs: set[str], options: RoundOptions) -> set[str]:
    """Return which of these jobs had no round yet: what is read of their records now is what a submitter wrote."""
    some = sorted(jobs)
    return {job for job, begun in zip(some, _at_once(store.has_begun, some, options), strict=True) if not begun}


def _resting(allocation: Versioned[Allocation] | None, granted: set[str], now: float) -> set[str]:
    """Return the jobs that only wait in the queue: they cost no read, except in one of ``RESTS`` ticks."""
    if allocation is None:
        return set()
    turn = int(now // TICK_EVERY_S) % RESTS
    waiting = {claim.job for claim in allocation.value.claims if claim.waiting} - granted
    return {job for job in waiting if crc32(job.encode()) % RESTS != turn}


def _searches(store: Store, allocation: Versioned[Allocation] | None) -> list[Versioned[SweepState]]:
    """Read the states of the searches with trials that wait at a rung, but for those that cannot be read."""
    found = []
    for name in sorted({claim.sweep for claim in allocation.value.claims if claim.rests} if allocation else ()):
        try:
            state = alarm.readable_sweep(store, name)
        except StoreError as error:  # only this search's trials then have their rounds, and these fail
            log.warning("state of search %s: %s", name, error)
            continue
        found += [state] if state is not None else []
    return found


def _at_rungs(
    searches: Iterable[Versioned[SweepState]],
    allocation: Versioned[Allocation] | None,
    granted: set[str],
    now: float,
) -> set[str]:
    """Return the trials that only wait for others of their search: they cost no read, except in one of ``RESTS`` ticks.

    One that still has a disk is found by the listing.
    """
    turn = int(now // TICK_EVERY_S) % RESTS
    waiting = {job for read in searches for job in rungs.resting(read.value)} - granted
    claims = allocation.value.claims if allocation is not None else ()
    jobs = {claim.job for claim in claims if claim.rests and claim.job in waiting}
    return {job for job in jobs if crc32(job.encode()) % RESTS != turn}


def _report_lost(
    store: Store, searches: Iterable[Versioned[SweepState]], there: set[str], failed: dict[str, str]
) -> list[str]:
    """Report that trials are over whose record a person deleted: they never do. Return jobs whose rounds then decide.

    ``there``: active jobs with a record.
    """
    found: list[str] = []
    for read in searches:
        state = read.value
        for one in state.trials:
            if one.job and not one.over and one.job not in there:
                record = _read(store, one.job, failed)
                if one.job not in failed and (record is None or record.value.phase is Phase.DONE):
                    log.warning("trial %d of search %s: its job %s has no record", one.number, state.sweep, one.job)
                    state = state.told(replace(one, over=True, held=False))
                    others = (trial.job for trial in state.trials if trial.first == one.first and not trial.over)
                    found += list(others)[:1]
        if state is not read.value:
            store.cas_sweep(replace(state, nonce=uuid4().hex), read.token)
    return found


def _drop_claims(store: Store, gone: set[str]) -> None:
    """Remove claims of jobs that have no record, no marker and no grant: a person deleted them."""
    if not gone:
        return
    read = store.read_allocation()
    claims = tuple(claim for claim in read.value.claims if claim.job not in gone)
    if len(claims) < len(read.value.claims):
        _swap(store, read, replace(read.value, claims=claims))


def _await_others(
    store: Store, found: Mapping[str, RoundResult | None], clock: Now, options: RoundOptions
) -> list[str]:
    """Wait, if this tick has the time, for what would else wait for the next tick; return the jobs that need a round.

    These are jobs whose lease a round has that may have been killed, until the lease expires; and one-machine jobs with
    a roll call, until its end. In a gang the polls of the other members start the next round. If a job's only machine
    is silent, no poll does.
    """
    times, now = options.times or Times().scaled(clock.scale), clock.now()
    results = [one for one in found.values() if one is not None]
    lone = [one.record for one in results if one.record is not None and len(one.record.members) == 1]
    wait_s = {job.job: job.roll.since + times.lone_roll_s + 1.0 - now for job in lone if job.roll is not None}
    busy = [job for job, one in found.items() if one is not None and one.ended is Ended.BUSY]
    wait_s |= {job: Lease(store, job, clock, options.every).ttl_s for job in busy}
    most_s = min(TICK_EVERY_S, (options.deadline.left() - BEGIN_S) * clock.scale)
    again = {job: pause for job, pause in wait_s.items() if 0 < pause < most_s}
    if again:
        options.sleep(max(again.values()) / clock.scale)
    return sorted(again)


def _trouble(stack: StackState, listing: Listing, jobs: list[str], failed: Mapping[str, str]) -> str:
    """Return why a completed tick did nothing: no zone answered, or every job's round was interrupted; or ""."""
    if not listing.answered and stack.zones():
        return "no zone of the cloud answered in time"
    reasons = [reason for reason in failed.values() if reason]
    if reasons and set(jobs) <= failed.keys():
        return f"the round of every job was interrupted: {reasons[-1]}"
    return ""


def _round(
    store: Store,
    cloud: Cloud,
    job: str,
    clock: Now,
    options: RoundOptions,
    fresh: Prefetched | None,
    failed: dict[str, str],
) -> RoundResult | None:
    """Run one job's round. Its failure does not stop the others."""
    try:
        result = run_round(store, cloud, job, clock, options, fresh)
    except StoreError as error:
        log.warning("round of %s: %s", job, error)
        failed[job] = str(error)
        return None
    except Exception as error:  # a well-formed but absurd record stops only its own job
        log.exception("ALARM: the round of job %s failed; the job's record and machines are left as they are", job)
        failed[job] = f"{type(error).__name__}: {error}"
        return None
    if result.ended is Ended.UNREADABLE:
        failed[job] = ""
    return result


def _turns(jobs: list[str], now: float) -> list[str]:
    """Rotate the jobs, so that every tick begins with another job and none waits for ever if time is short."""
    if not jobs:
        return jobs
    first = int(now // TICK_EVERY_S) * STRIDE % len(jobs)
    return [*jobs[first:], *jobs[:first]]


def _at_once(work: Callable[[str], T], jobs: list[str], options: RoundOptions) -> list[T]:
    """Run ``work`` for several jobs at the same time, since a round mostly waits for the bucket."""
    if options.parallel == 1 or len(jobs) < 2:
        return [work(job) for job in jobs]
    with ThreadPoolExecutor(min(ROUNDS_AT_ONCE, options.parallel, len(jobs))) as pool:
        return list(pool.map(work, jobs))


def _read(store: Store, job: str, failed: dict[str, str]) -> Versioned[Record] | None:
    """Read a record. If that fails, log it, add the job to ``failed`` and return None, so that other jobs continue."""
    try:
        return store.read_record(job)
    except CorruptError as error:
        alarm.unreadable(store, error, job)
        failed[job] = ""
        return None
    except StoreError as error:
        log.warning("record of %s: %s", job, error)
        failed[job] = str(error)
        return None


def _labelled(listing: Listing) -> set[str]:
    jobs = {vm.job for vm in listing.vms} | {disk.job for disk in listing.disks} | {s.job for s in listing.snapshots}
    return jobs - {""}


def _orphans(store: Store, clock: Now, listing: Listing, jobs: list[str], failed: dict[str, str]) -> list[str]:
    """End jobs that have machines, disks or grants but no record, and return them (rule 3: the record is read last)."""
    out: list[str] = []
    try:
        allocation = store.read_allocation().value
    except CorruptError:  # the tick has reported it; without grants the highest attempt is unknown
        return out
    for job in jobs:
        if _read(store, job, failed) is not None or job in failed:
            continue
        record = _end_record(job, listing, allocation, clock.now())
        if record is not None and store.create_record(record):
            _tell(job, listing)
            store.set_active(job)
            out.append(job)
    return out


def _tell(job: str, listing: Listing) -> None:
    disks = disks_kept(f"{disk.name} ({disk.zone})" for disk in listing.disks if disk.job == job)
    log.error(
        "ALARM: job %s has machines, disks or grants but no record: Spotkeeper ends it and deletes its machines; %s",
        job,
        disks or "no disk of the job is known",
        extra={"job": job, "event": "orphan"},
    )


def _end_record(job: str, listing: Listing, allocation: Allocation, now: float) -> Record | None:
    """Return an END record whose ``top`` is the highest attempt seen; it keeps the disks, whose content is unknown."""
    vms = [vm for vm in listing.vms if vm.job == job]
    disks = [disk for disk in listing.disks if disk.job == job]
    grants = [grant for grant in allocation.grants if grant.job == job]
    if not vms and not disks and not grants and not any(s.job == job for s in listing.snapshots):
        return None
    attempts = [(vm.node, vm.attempt) for vm in vms] + [(grant.node, grant.attempt) for grant in grants]
    numbers = [(disk.node, disk.number) for disk in disks]
    count = 1 + max([node for node, _ in attempts + numbers], default=0)
    nodes = [
        Node(
            top=max((number for node, number in attempts if node == index), default=0),
            disk_top=max((number for node, number in numbers if node == index), default=0),
        )
        for index in range(count)
    ]
    uid = str(uuid5(NAMESPACE_OID, f"spotkeeper/{job}"))
    return Record(
        job=job,
        uid=uid,
        name=job,
        spec_sha256="",
        created=now,
        nonce=uid,
        phase=Phase.END,
        outcome=Outcome.CANCELLED,
        reason="the job's record was missing: its machines are deleted, its disks are kept",
        nodes=tuple(nodes),
        keep_disks=True,
    )


def _withdraw(store: Store, clock: Now, jobs: Iterable[str]) -> None:
    """End submissions that have no record a day after they began: each was interrupted and not repeated."""
    for job in jobs:
        since = store.active_since(job)
        if since is None or clock.now() - since < GIVEN_UP_S or store.list(paths.ledger(job)):
            continue  # with a ledger the job has run: a person deleted its record
        try:
            spec = store.read_spec(job)
        except CorruptError:
            spec = None
        name = spec.name if spec is not None else job
        if end := withdraw(store, job, name, clock.now(), "its submission was never completed"):
            bury(store, end, clock.now())
            log.warning(
                "job %s: its submission began more than a day ago and was never completed; its files are deleted", job
            )


def _retire(
    store: Store,
    clock: Now,
    active: Iterable[str],
    before: Mapping[str, Versioned[Record] | None],
    failed: dict[str, str],
) -> None:
    """Clean up after jobs that were DONE when the tick began but are still in ``active/``.

    The round that ended such a job, or an earlier tick, did not finish the cleanup.
    """
    for job in active:
        read = before.get(job)
        if read is not None and read.value.phase is Phase.DONE:
            try:
                bury(store, read.value, clock.now())
            except StoreError as error:
                log.warning("cleanup of ended job %s failed: %s", job, error)
                failed[job] = str(error)
