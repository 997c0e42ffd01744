"""Resuming a job with other files: a mended script, another cap.

Written in this order: the source and the job file, each under its hash, then the ask that names the job file.
Before the ask nothing has changed, and only the round that takes it in puts the new file in force.
"""

from __future__ import annotations

import msgspec

from spotkeeper.cli import jobs
from spotkeeper.cli.errors import CliError, Exit
from spotkeeper.cli.pack import Source
from spotkeeper.cli.submit import differences
from spotkeeper.reconcile import paths
from spotkeeper.reconcile.decide.files import refusal
from spotkeeper.reconcile.store_api import Store
from spotkeeper.report.held import mend
from spotkeeper.spec.job import Ask, AskKind, JobSpec, deadline_at, spec_sha256
from spotkeeper.spec.record import Phase, Record
from spotkeeper.spec.stack import StackState


def resume_with(
    store: Store,
    record: Record,
    spec: JobSpec,
    source: Source | None,
    stack: StackState | None,
    now: float,
    by: str,
    *,
    go_back: bool = False,
) -> tuple[Ask, list[str]]:
    """Ask to go on with a checked job file; the ask, and the names of the fields that differ (none: a plain resume).

    Raises:
        CliError: the job is over or does not hold, or its disks do not fit this job file.
        StoreError: the bucket.
    """
    full = msgspec.structs.replace(spec, source_sha256=source.sha256 if source else None)
    _check(store, record, full, stack, now)
    changed = differences(store.read_spec(record.job, record.spec_key()), full)
    if not changed:
        return jobs.ask(store, record, AskKind.RESUME, now, by, go_back=go_back), []
    digest = spec_sha256(full)
    if source is not None:
        store.put(paths.source(record.job, source.sha256), source.tar)
    store.put_spec(record.job, full, digest)
    return jobs.ask(store, record, AskKind.RESUME, now, by, spec_sha256=digest, go_back=go_back), changed


def _check(store: Store, record: Record, spec: JobSpec, stack: StackState | None, now: float) -> None:
    """What the next round would refuse, told at once."""
    jobs.refuse_over(record)
    who = f"{record.name} ({record.job})"
    if record.phase is Phase.RUN:
        if record.pause:
            raise CliError(f"{who} does not hold yet: {record.pause}", Exit.REFUSED, "wait until `status` says so")
        remedy = f"spotkeeper pause {record.name}, then {mend(record.name)}"
        raise CliError(f"{who} runs, and only a job that holds takes other files", Exit.REFUSED, remedy)
    old = store.read_spec(record.job, record.spec_key())
    if old is not None and (why := refusal(old, spec, stack)):
        raise CliError(f"{who} cannot go on with this job file: {why}", Exit.REFUSED)
    new = spec.deadline if old is None or spec.deadline != old.deadline else None
    if new is not None and deadline_at(new, record.created) <= now:  # one that it has missed already may stand
        raise CliError(
            f"{who}: deadline: {new} counts from its submission, and is past", Exit.USAGE, "a later one, or none"
        )
