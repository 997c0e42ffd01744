"""``report``: the account of a job, or the totals of a stack, as tables, JSON or CSV; a job's page as an HTML file."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from spotkeeper.cli.output import emit, note, say
from spotkeeper.client import find_target, lookup
from spotkeeper.client.errors import CliError, Exit
from spotkeeper.client.sweep_status import trial_part_of
from spotkeeper.client.target import Target
from spotkeeper.contract.record import Record
from spotkeeper.contract.stack import StackState
from spotkeeper.reconcile.store.store import Store
from spotkeeper.report.job.view import JobView
from spotkeeper.report.money.account import Account, account, totals


def run(
    job: str | None, stack: str | None, *, every: bool, as_csv: bool, as_json: bool, html: Path | None = None
) -> None:
    """Print the account of a job or the totals of the stack. ``html``: write the job's page to this file instead.

    Raises:
        CliError: both or neither of a job and ``--all``; both CSV and JSON; no such job or stack; ``html`` without a
            job, or it cannot be written.
    """
    if (job is None) is not every:
        raise CliError("name one job, or pass --all", Exit.USAGE, "spotkeeper report JOB, or spotkeeper report --all")
    if as_csv and as_json:
        raise CliError("--csv and --json exclude each other", Exit.USAGE)
    target = find_target(stack)
    store = target.store()
    state = target.state(store)
    if job is None:
        if html is not None:
            raise CliError("--html needs one job", Exit.USAGE, "spotkeeper report JOB --html FILE")
        _all(target, store, state, as_csv=as_csv, as_json=as_json)
        return
    record = lookup.find_job(store, job)
    if html is not None:
        write(target, store, record, state, html)
        return
    view, found = account_of(target, store, record, state, search=True)
    from spotkeeper.report.money import account_text

    emit(found, as_json, account_text.attempts_csv(found) if as_csv else account_text.report(view, found))


def account_of(
    target: Target, store: Store, record: Record, state: StackState | None, *, search: bool = False
) -> tuple[JobView, Account]:
    """Return a job's view and account. ``search``: whether the view names the search of which the job is a trial."""
    now = target.clock.now()
    view = lookup.view_of(store, record, state, now, target.site(), lookup.deadline_of(store, record))
    if search:
        view = replace(view, search=trial_part_of(store, record))
    ledger = (*store.list_ledger(record.job), *record.outbox)
    return view, account(view, ledger, now, lookup.prices_of(store, state))


def write(target: Target, store: Store, record: Record, state: StackState, file: Path) -> None:
    from spotkeeper.client.metrics import MetricsReader
    from spotkeeper.report.html.page import job_file
    from spotkeeper.report.job.metrics import joined

    now, ledger, prices = target.clock.now(), lookup.ledger_of(store, record), lookup.prices_of(store, state)
    deadline = lookup.deadline_of(store, record)
    view = lookup.view_of(store, record, state, now, target.site(), deadline, ledger, prices)
    found = account(view, ledger, now, prices)
    metrics = joined(MetricsReader(store, record.job).read())
    text = job_file(view, found, ledger, state, now, prices, lookup.job_yaml(store, record), metrics)
    try:
        file.write_text(text, "utf-8")
    except OSError as error:
        raise CliError(f"{file}: {error.strerror}", Exit.FAILED) from None
    say(f"{record.name} ({record.job}): wrote {file}")


def _all(target: Target, store: Store, state: StackState, *, as_csv: bool, as_json: bool) -> None:
    found = lookup.all_jobs(store, finished=True)
    for one in found.unreadable:
        note(f"{one.job}: unreadable, so left out: {one.unreadable}\n  try: {one.remedy}")
    accounts = [account_of(target, store, record, state)[1] for record in found.records]
    sums = totals(accounts, target.clock.now())
    from spotkeeper.report.money import account_text

    if as_csv:
        emit(sums, False, account_text.totals_csv(sums))
    elif as_json or accounts:
        emit(sums, as_json, account_text.summary(sums))
    else:
        say(f"the stack {target.stack} has had no jobs")
