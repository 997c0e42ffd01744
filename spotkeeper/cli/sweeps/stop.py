"""``sweep stop``: cancels the unfinished trials of a search, and marks it as stopped."""

from __future__ import annotations

import shlex
from concurrent.futures import ThreadPoolExecutor

from msgspec import Struct
from msgspec.structs import replace

from spotkeeper.cli.output import agree, emit, note, progress
from spotkeeper.cli.stack import note_upkeep, open_stack, unheard
from spotkeeper.client import lookup
from spotkeeper.client.sweep_status import Sweep, find_sweep, trial_records
from spotkeeper.client.target import notify, whoami
from spotkeeper.contract.job import RequestKind
from spotkeeper.contract.record import Record
from spotkeeper.contract.sweepfile import SweepStop
from spotkeeper.reconcile.store.store import Store
from spotkeeper.report.text.words import count

AT_ONCE = 8


class Stopped(Struct, frozen=True):
    """What was requested. ``cancelled``: the numbers of the trials -> their jobs."""

    sweep: str
    cancelled: dict[str, str]


def run(name: str, stack: str | None, *, yes: bool, as_json: bool) -> None:
    """Mark the search as stopped, and request that each unfinished trial is cancelled.

    Raises:
        CliError: no such search; or the user does not agree.
        StoreError: the bucket failed.
    """
    target, store = open_stack(stack)
    sweep = find_sweep(store, name)
    records, missing = _unfinished(store, sweep), len(sweep.missing())
    if records and not yes:
        consequence = (
            f"{name}: this ends {count(len(records), 'trial')} and deletes their machines, disks and checkpoints"
        )
        agree(consequence, "Stop it?", f"spotkeeper sweep stop {shlex.quote(name)} --yes")
    if records or missing:  # before the trials are listed: what is submitted later finds the mark
        store.create_stop(name, SweepStop(sweep.count(), target.clock.now(), whoami()))
        records = _unfinished(store, find_sweep(store, name))
    heard = [True]

    def cancel(record: Record) -> None:
        request = lookup.new_request(RequestKind.CANCEL, target.clock.now(), whoami())
        store.put_request(record.job, request)
        if heard[0]:  # after the first failure the others would only wait for the same one
            heard[0] = notify(target, store, record.job)

    with (
        progress(f"cancelling {count(len(records), 'trial')}", len(records)) as advance,
        ThreadPoolExecutor(AT_ONCE) as pool,
    ):
        for _ in pool.map(cancel, records.values()):
            advance()
    note_upkeep(target.local)
    if records and not heard[0]:
        note(unheard(target, "cancels the trials"))
    if missing:
        note(f"{name}: {count(missing, 'trial')} not submitted yet: these are not submitted any more")
    text = (
        f"{name}: requested to cancel {count(len(records), 'trial')}" if records else f"{name}: no trial is unfinished"
    )
    emit(Stopped(name, {str(at): record.job for at, record in records.items()}), as_json, text)


def _unfinished(store: Store, sweep: Sweep) -> dict[int, Record]:
    """Return the records of unfinished trials, by number; also of one whose submission was cut off after its job."""
    every = {at: sweep.spec.job_id(at, 0) for cohort in sweep.cohorts for at in cohort.numbers()}
    known = replace(sweep, jobs=every | sweep.jobs)
    return {at: record for at, record in trial_records(store, known, known.jobs).items() if not record.over}
