"""``trace``: the parts of a job's recoveries as a waterfall, or as JSON."""

from __future__ import annotations

from spotkeeper.cli.output import emit
from spotkeeper.client import find_target, lookup
from spotkeeper.report.job.trace import job_trace


def run(job: str, stack: str | None, *, every: bool, as_json: bool) -> None:
    """Print the newest recovery of a job, or with ``every`` all of them. JSON always contains all."""
    from spotkeeper.report.text.waterfall import waterfalls

    target = find_target(stack)
    store = target.store()
    state = target.state(store)
    record = lookup.find_job(store, job)
    now = target.clock.now()
    ledger = (*store.list_ledger(record.job), *record.outbox)
    trace = job_trace(record.job, record.name, ledger, now, state.stack, target.clock.scale)
    emit(trace, as_json, waterfalls(trace, trace.recoveries if every else trace.recoveries[-1:], now))
