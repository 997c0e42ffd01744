"""``spotkeeper report``: the account of a job, or the totals of a stack, as tables, JSON or CSV."""

from __future__ import annotations

from spotkeeper.cli import jobs
from spotkeeper.cli.errors import CliError, Exit
from spotkeeper.cli.output import emit, note
from spotkeeper.cli.target import Target, find_target
from spotkeeper.reconcile.store_api import Store
from spotkeeper.report.account import Account, account
from spotkeeper.report.totals import totals
from spotkeeper.report.view import JobView
from spotkeeper.spec.record import Record
from spotkeeper.spec.stack import StackState


def report(job: str | None, stack: str | None, *, every: bool, as_csv: bool, as_json: bool) -> None:
    """
    Raises:
        CliError: neither a job nor all of them; both forms of output; no such job or stack.
    """
    if (job is None) is not every:
        raise CliError(
            "name one job, or --all of them", Exit.USAGE, "spotkeeper report JOB, or spotkeeper report --all"
        )
    if as_csv and as_json:
        raise CliError("--csv or --json: one of them", Exit.USAGE)
    target = find_target(stack)
    store = target.store()
    state = target.state(store)
    if job is None:
        _every(target, store, state, as_csv=as_csv, as_json=as_json)
        return
    view, found = account_of(target, store, jobs.find_job(store, job), state)
    if as_csv or as_json:
        from spotkeeper.report.account_text import attempts_csv

        emit(found, as_json, "" if as_json else attempts_csv(found))
        return
    from spotkeeper.report import account_text

    emit(found, False, account_text.report(view, found))


def account_of(target: Target, store: Store, record: Record, state: StackState | None) -> tuple[JobView, Account]:
    now = target.clock.now()
    view = jobs.view_of(store, record, state, now, target.site(), jobs.deadline_of(store, record))
    ledger = (*store.list_ledger(record.job), *record.outbox)
    return view, account(view, ledger, now, jobs.prices_of(store, state))


def _every(target: Target, store: Store, state: StackState, *, as_csv: bool, as_json: bool) -> None:
    found = jobs.all_jobs(store, finished=True)
    for one in found.unreadable:
        note(f"{one.job}: unreadable, and left out: {one.unreadable}\n  try: {one.remedy}")
    accounts = [account_of(target, store, record, state)[1] for record in found.records]
    sums = totals(accounts, target.clock.now())
    if as_json:
        emit(sums, True, "")
        return
    from spotkeeper.report import account_text

    if as_csv:
        emit(sums, False, account_text.totals_csv(sums))
    elif not accounts:
        print(f"no job was ever submitted to {target.stack}")
    else:
        emit(sums, False, account_text.summary(sums))
