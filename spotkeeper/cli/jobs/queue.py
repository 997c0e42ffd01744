"""``queue``: jobs that wait for machines, jobs that have them, and teams; and a job's place while a command waits."""

from __future__ import annotations

import time
from collections.abc import Callable

from spotkeeper.cli.output import emit, note
from spotkeeper.client import find_target, lookup
from spotkeeper.client.errors import CliError, Exit
from spotkeeper.client.target import Target, silence
from spotkeeper.contract.parse.problem import nearest
from spotkeeper.reconcile.store.store import Store
from spotkeeper.report.job.waiting import place_line, waiting_line


def run(stack: str | None, team: str | None, *, every: bool, as_json: bool) -> None:
    """Print the queue, or the part of one team; ``every``: all jobs, not only the first ones.

    Raises:
        CliError: no such stack or team.
        StoreError: the bucket failed, or the allocation is unreadable.
    """
    from spotkeeper.report.queue import SHOWN, Queue
    from spotkeeper.report.text.queue import queue as tables

    target = find_target(stack)
    store = target.store()
    state = target.state(store)
    found = Queue(store.read_allocation().value, state, target.clock.now())
    names = [one.name for one in found.teams]
    if team is not None and team not in names:
        near = nearest(team, names)
        hint = f" (did you mean {near}?)" if near else ""
        raise CliError(f"{team}: no such team{hint}", Exit.MISSING, f"its teams: {', '.join(names) or 'none'}")
    most = None if every else SHOWN
    lookup.name_jobs(store, found, found.shown(team, most), {})
    if late := silence(store, state, target):
        note(late)
    view = found.view(team, most)
    emit(view, as_json, tables(view))


def told_once(
    target: Target, store: Store, job: str, sleep: Callable[[float], None] = time.sleep
) -> Callable[[float], None]:
    """Return a ``sleep`` for who waits for a job: it also says once why the job waits, if that is in the queue."""
    told = False

    def wait(seconds: float) -> None:
        nonlocal told
        record = lookup.record_of(store, job)
        if not told and lookup.may_wait(record):
            stack, names = store.read_stack(), {job: record.name}
            queue = lookup.queue_of(store, stack, target.clock.now(), names)
            if queue is not None and (view := queue.waiting(job)) is not None:
                note(f"{record.name} ({job}): {place_line(view)}\n{waiting_line(view)}")
                told = True
        sleep(seconds)

    return wait
