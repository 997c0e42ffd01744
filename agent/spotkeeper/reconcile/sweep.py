"""The tick: all unfinished jobs, one listing of the cloud, then whatever no record knows.

For losses a record must be read before the listing, for orphans after it (rule 3). So the records of
known jobs are read first, the cloud is listed once, and jobs that only a machine's label names are looked
up afterwards. A job without a record gets a create-only END record, and its ordinary end deletes it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace as changed
from typing import TypeVar
from uuid import NAMESPACE_OID, uuid5

from msgspec import Struct

from spotkeeper.reconcile import alarm, market, paths
from spotkeeper.reconcile.deadline import BEGIN_S
from spotkeeper.reconcile.round import Ended, Now, Options, RoundResult, Snapshot, bury, run_round, withdraw
from spotkeeper.reconcile.store_api import CorruptError, Held, Store, StoreError
from spotkeeper.spec.cloud import Cloud, Listing, disks_kept
from spotkeeper.spec.record import Alloc, Outcome, Phase, Rank, Record

T = TypeVar("T")
TICK_EVERY_S = 60.0
GIVEN_UP_S = 86_400.0  # virtual; a submission takes minutes, and may be finished later by submitting again
STRIDE = 7919  # jobs by which the turns move on at each tick
ROUNDS_AT_ONCE = 8

log = logging.getLogger("spotkeeper.reconcile")


class TickResult(Struct, frozen=True):
    jobs: int = 0
    orphans: tuple[str, ...] = ()  # jobs that had things but no record
    failed: tuple[str, ...] = ()  # jobs whose round raised; the next tick tries again
    rounds: tuple[RoundResult, ...] = ()
    late: tuple[str, ...] = ()  # jobs that this tick had no time for


def tick(store: Store, cloud: Cloud, clock: Now, options: Options | None = None) -> TickResult:
    """Rounds of all jobs that may have something to do, from one listing, then the sweep.

    Ends within the deadline of ``options``, whatever the bucket and the cloud take: rounds that it has no time to
    begin are the next tick's, in another order; one that is cut short ends as failed, and the next repeats it.

    Jobs: those in ``active/``, those with a grant, and those that a listed machine or disk names.
    """
    options = _no_wait(options or Options())
    store = store.until(options.deadline)
    stack = store.read_stack()
    if stack is None:
        return TickResult()
    alloc = alarm.readable_alloc(store)
    active = store.active_jobs()
    known = sorted({*active, *(grant.job for grant in (alloc.value.grants if alloc else ()))})
    failed: list[str] = []
    before = dict(zip(known, _at_once(lambda job: _read(store, job, failed), known, options), strict=True))
    known_offers = market.look(store, cloud, stack, clock.now())
    listing = cloud.list(stack.stack)
    labelled = sorted(_labelled(listing) - set(known))
    orphans = tuple(_orphans(store, clock, listing, [job for job in [*known, *labelled] if job not in failed], failed))
    late: list[str] = []

    def one(job: str) -> RoundResult | None:
        if options.deadline.left() < BEGIN_S:
            late.append(job)
            return None
        held = before.get(job)
        # read before the listing, or list again
        fresh = Snapshot(held, listing, known_offers) if held is not None and job not in orphans else None
        return _round(store, cloud, job, clock, options, fresh, failed)

    blank = {job for job in known if before[job] is None} - set(orphans)  # being submitted, or given up
    _withdraw(store, clock, sorted(blank & set(active) - set(failed)))
    jobs = _turns([job for job in [*known, *labelled] if job not in blank and job not in failed], clock.now())
    results = [result for result in _at_once(one, jobs, options) if result is not None]
    if late:
        log.warning("%d of %d jobs wait for the next tick: this one has no time left", len(late), len(jobs))
    _retire(store, clock, active, before, failed)
    return TickResult(len(known) + len(labelled), orphans, tuple(failed), tuple(results), tuple(late))


def _round(
    store: Store, cloud: Cloud, job: str, clock: Now, options: Options, fresh: Snapshot | None, failed: list[str]
) -> RoundResult | None:
    """One job's, which stops nobody else's."""
    try:
        result = run_round(store, cloud, job, clock, options, fresh)
    except StoreError as error:
        log.warning("round of %s: %s", job, error)
        failed.append(job)
        return None
    except Exception:  # of a record that is well-formed and absurd: it stops its own job alone
        log.exception("ALARM: the round of %s failed; its record and machines are left as they are", job)
        failed.append(job)
        return None
    failed += [job] if result.ended is Ended.UNREADABLE else []
    return result


def _turns(jobs: list[str], now: float) -> list[str]:
    """Another job is first in every tick: where there is no time for all, none waits for ever."""
    if not jobs:
        return jobs
    first = int(now // TICK_EVERY_S) * STRIDE % len(jobs)
    return [*jobs[first:], *jobs[:first]]


def _at_once(work: Callable[[str], T], jobs: list[str], options: Options) -> list[T]:
    """A few at a time: a round mostly waits for the bucket."""
    if options.parallel == 1 or len(jobs) < 2:
        return [work(job) for job in jobs]
    with ThreadPoolExecutor(min(ROUNDS_AT_ONCE, options.parallel, len(jobs))) as pool:
        return list(pool.map(work, jobs))


def _read(store: Store, job: str, failed: list[str]) -> Held[Record] | None:
    """A record that makes no sense (or does not come) must not stop the jobs beside it: it is told and left alone."""
    try:
        return store.read_record(job)
    except CorruptError as error:
        alarm.unreadable(store, error, job)
        failed.append(job)
        return None
    except StoreError as error:
        log.warning("record of %s: %s", job, error)
        failed.append(job)
        return None


def _no_wait(options: Options) -> Options:
    """A tick serves many jobs: reports that come in meanwhile start rounds of their own."""
    return changed(options, settle_s=0.0)


def _labelled(listing: Listing) -> set[str]:
    jobs = {vm.job for vm in listing.vms} | {disk.job for disk in listing.disks} | {s.job for s in listing.snapshots}
    return jobs - {""}


def _orphans(store: Store, clock: Now, listing: Listing, jobs: list[str], failed: list[str]) -> list[str]:
    """Jobs with machines, disks or grants but no record: the evidence was read first, now the record."""
    out: list[str] = []
    try:
        alloc = store.read_alloc().value
    except CorruptError:  # told by the tick: without the grants nobody knows the highest attempt
        return out
    for job in jobs:
        if _read(store, job, failed) is not None or job in failed:
            continue
        record = _end_record(job, listing, alloc, clock.now())
        if record is not None and store.create_record(record):
            _tell(job, listing)
            store.set_active(job)
            out.append(job)
    return out


def _tell(job: str, listing: Listing) -> None:
    """Once a job: its record's creation is. Only a person can say what its disks are worth."""
    disks = disks_kept(f"{disk.name} ({disk.zone})" for disk in listing.disks if disk.job == job)
    log.error(
        "ALARM: job %s has machines, disks or grants but no record: it is ended, its machines go; %s",
        job,
        disks or "no disk of it is known",
        extra={"job": job, "event": "orphan"},
    )


def _end_record(job: str, listing: Listing, alloc: Alloc, now: float) -> Record | None:
    """``{END, top = the highest attempt seen}``; its disks are kept, for nobody can say what is on them."""
    vms = [vm for vm in listing.vms if vm.job == job]
    disks = [disk for disk in listing.disks if disk.job == job]
    grants = [grant for grant in alloc.grants if grant.job == job]
    if not vms and not disks and not grants and not any(s.job == job for s in listing.snapshots):
        return None
    attempts = [(vm.rank, vm.attempt) for vm in vms] + [(grant.rank, grant.attempt) for grant in grants]
    numbers = [(disk.rank, disk.number) for disk in disks]
    count = 1 + max([rank for rank, _ in attempts + numbers], default=0)
    ranks = [
        Rank(
            top=max((number for rank, number in attempts if rank == index), default=0),
            disk_top=max((number for rank, number in numbers if rank == index), default=0),
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
        reason="its record was missing: its machines go, its disks are kept",
        ranks=tuple(ranks),
        keep_disks=True,
    )


def _withdraw(store: Store, clock: Now, jobs: Iterable[str]) -> None:
    """Submissions that began a day ago and never came to a record: their shell is gone, and left its files here."""
    for job in jobs:
        since = store.active_since(job)
        if since is None or clock.now() - since < GIVEN_UP_S or len(store.list(paths.ledger(job))) > 1:
            continue  # with a history it has run: somebody has deleted its record
        try:
            spec = store.read_spec(job)
        except CorruptError:
            spec = None
        name = spec.name if spec is not None else job
        if withdraw(store, job, name, clock.now(), "it was never submitted whole"):
            log.warning("job %s: its submission was given up a day ago; its files are deleted", job)


def _retire(
    store: Store, clock: Now, active: Iterable[str], before: Mapping[str, Held[Record] | None], failed: list[str]
) -> None:
    """Active jobs that were DONE when the tick began: a round died between their record and their burial."""
    for job in active:
        held = before.get(job)
        if held is not None and held.value.phase is Phase.DONE:
            try:
                bury(store, held.value, clock.now())
            except StoreError as error:
                log.warning("burial of %s: %s", job, error)
                failed.append(job)


__all__ = ["TickResult", "tick"]
