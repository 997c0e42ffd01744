"""The tick: all unfinished jobs, one listing of the cloud, then whatever no record knows.

For losses a record must be read before the listing, for orphans after it (rule 3). So the records of
known jobs are read first, the cloud is listed once, and jobs that only a machine's label names are looked
up afterwards. A job without a record gets a create-only END record, and its ordinary end deletes it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from uuid import NAMESPACE_OID, uuid5

from msgspec import Struct

from spotkeeper.reconcile import alarm, market
from spotkeeper.reconcile.round import Ended, Now, Options, RoundResult, Snapshot, bury, run_round
from spotkeeper.reconcile.store_api import CorruptError, Held, Store, StoreError
from spotkeeper.spec.cloud import Cloud, Listing
from spotkeeper.spec.record import Alloc, Outcome, Phase, Rank, Record

log = logging.getLogger("spotkeeper.reconcile")


class TickResult(Struct, frozen=True):
    jobs: int = 0
    orphans: tuple[str, ...] = ()  # jobs that had things but no record
    failed: tuple[str, ...] = ()  # jobs whose round raised; the next tick tries again
    rounds: tuple[RoundResult, ...] = ()


def tick(store: Store, cloud: Cloud, clock: Now, options: Options | None = None) -> TickResult:
    """Rounds of all jobs that may have something to do, from one listing, then the sweep.

    Jobs: those in ``active/``, those with a grant, and those that a listed machine or disk names.
    """
    options = options or Options()
    stack = store.read_stack()
    if stack is None:
        return TickResult()
    alloc = alarm.readable_alloc(store)
    active = store.active_jobs()
    known = sorted({*active, *(grant.job for grant in (alloc.value.grants if alloc else ()))})
    failed: list[str] = []
    before = {job: _read(store, job, failed) for job in known}
    known_offers = market.look(store, cloud, stack, clock.now())
    listing = cloud.list(stack.stack)
    labelled = sorted(_labelled(listing) - set(known))
    results: list[RoundResult] = []
    orphans = tuple(_orphans(store, clock, listing, [job for job in [*known, *labelled] if job not in failed], failed))
    for job in [*known, *labelled]:
        if job in failed:
            continue
        held = before.get(job)
        late = job in orphans or (held is None and job not in labelled)
        # read before the listing, or list again
        fresh = Snapshot(held, listing, known_offers) if held is not None and not late else None
        try:
            results.append(run_round(store, cloud, job, clock, _no_wait(options), fresh))
        except StoreError as error:
            log.warning("round of %s: %s", job, error)
            failed.append(job)
        except Exception:  # of a record that is well-formed and absurd: it stops its own job alone
            log.exception("ALARM: the round of %s failed; its record and machines are left as they are", job)
            failed.append(job)
        else:
            failed += [job] if results[-1].ended is Ended.UNREADABLE else []
    _retire(store, clock, active, before)
    return TickResult(len(known) + len(labelled), orphans, tuple(failed), tuple(results))


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
    return Options(
        times=options.times,
        settle_s=0.0,
        call_deadline_s=options.call_deadline_s,
        sleep=options.sleep,
        writer=options.writer,
        parallel=options.parallel,
    )


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
            log.warning("job %s has machines, disks or grants but no record: ending it", job)
            store.set_active(job)
            out.append(job)
    return out


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
        reason="its record was missing",
        ranks=tuple(ranks),
        keep_disks=True,
    )


def _retire(store: Store, clock: Now, active: Iterable[str], before: Mapping[str, Held[Record] | None]) -> None:
    """Active jobs that were DONE when the tick began: a round died between their record and their burial."""
    for job in active:
        held = before.get(job)
        if held is not None and held.value.phase is Phase.DONE:
            bury(store, held.value, clock.now())


__all__ = ["TickResult", "tick"]
