"""``queue``: jobs that wait for machines, jobs that have them, and teams."""

from __future__ import annotations

from spotkeeper.cli.output import emit, note
from spotkeeper.client import find_target, lookup
from spotkeeper.client.errors import CliError, Exit
from spotkeeper.client.target import silence
from spotkeeper.contract.parse.problem import nearest


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
