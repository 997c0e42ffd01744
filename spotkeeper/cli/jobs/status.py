"""``status``: all jobs or one job, once. ``watch``: a job live, or event by event. ``events``: a job's events."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from msgspec.structs import replace

from spotkeeper.cli.output import emit, emit_line, note, result_console, say
from spotkeeper.cli.stack import note_upkeep
from spotkeeper.client import find_target, lookup
from spotkeeper.client.errors import CliError, Exit
from spotkeeper.client.metrics import MetricsReader
from spotkeeper.client.sweep_status import trial_part_of, trials_among
from spotkeeper.client.target import Target
from spotkeeper.contract.record import Hold, Outcome, Phase, Record
from spotkeeper.contract.stack import StackState
from spotkeeper.reconcile.store.documents import CorruptError
from spotkeeper.reconcile.store.objects import StoreError
from spotkeeper.reconcile.store.store import Store
from spotkeeper.report.job.events import EventLine
from spotkeeper.report.job.metrics import SHOWN, MetricView, joined, metric_views
from spotkeeper.report.job.view import JobView

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

    from spotkeeper.report.queue import Queue

EVERY_S = 1.0  # real
LIST_S = 10.0  # real; of the list of jobs
EVENTS = 8
METRICS_S = 15.0  # real; metrics are uploaded once a minute
GENERATIONS = 16  # newest generations whose metrics are shown


# -- status


def run(job: str | None, stack: str | None, *, finished: bool, as_json: bool, words: str = "") -> None:
    """Print one job; without ``job``, all unfinished jobs that match ``words``.

    Args:
        finished: list finished jobs as well.
        words: see :func:`~spotkeeper.report.job.lines.matches`.
    """
    from spotkeeper.cli.jobs.download import summary
    from spotkeeper.report.text import render

    if job is not None and words:
        raise CliError("--filter is for the list of jobs", Exit.USAGE, "spotkeeper status --filter WORDS")
    target = find_target(stack)
    note_upkeep(target.local)
    store = target.store()
    state = _readable_state(target, store)
    if job is not None:
        now, site = target.clock.now(), lookup.site_of(store, state, target)
        record = lookup.find_job(store, job)
        view = lookup.view_of(
            store, record, state, now, site, lookup.deadline_of(store, record), queue=_queue(store, state, now, record)
        )
        warnings = (*view.warnings, *lookup.ungranted_of(store, state, record))
        metrics, search = Sparklines(store, record.job).read(), trial_part_of(store, record)
        view = replace(view, output=summary(store, record), metrics=metrics, warnings=warnings, search=search)
        emit(view, as_json, render.status(view))
        return
    listed = _listed(target, store, state, finished=finished, words=words)
    if listed.no_tick:
        note(listed.no_tick)
    for one in listed.unreadable:
        note(f"{one.job}: unreadable, so not reconciled: {one.unreadable}\n  try: {one.remedy}")
    text = f"no job in {target.stack} matches {words}" if words else _nothing(target)
    table = _table(listed) if listed.views else "" if listed.unreadable else text
    emit([*listed.views, *listed.unreadable], as_json, table)


def _table(listed: _Listed) -> RenderableType:
    """The list of jobs; the trials of a search are one line below it."""
    from rich.console import Group
    from rich.text import Text

    from spotkeeper.report.text import render
    from spotkeeper.report.text.sweep import search_line

    jobs = [view for view in listed.views if view.job not in listed.searches]
    lines = [
        Text(search_line(name, (view for view in listed.views if listed.searches.get(view.job) == name)))
        for name in sorted(set(listed.searches.values()))
    ]
    return Group(*([render.job_table(jobs)] if jobs else []), *lines)


def _nothing(target: Target) -> str:
    return f"no unfinished job in {target.stack} (finished ones: spotkeeper status --all)"


@dataclass(frozen=True)
class _Listed:
    views: tuple[JobView, ...]
    unreadable: tuple[lookup.Unreadable, ...]
    no_tick: str
    searches: dict[str, str]  # trials that are shown by their search alone: job -> search


def _listed(target: Target, store: Store, state: StackState | None, *, finished: bool, words: str) -> _Listed:
    from spotkeeper.report.job.lines import matches

    found = lookup.all_jobs(store, finished)
    now, site = target.clock.now(), lookup.site_of(store, state, target)
    queue = _queue(store, state, now, *found.records)
    with ThreadPoolExecutor(lookup.READS) as pool:  # each view takes several requests to the bucket
        read = partial(lookup.view_of, store, stack=state, now=now, site=site, queue=queue)
        views = tuple(view for view in pool.map(read, found.records) if matches(view, words))
    searches = {} if words else trials_among(store, found.records)
    return _Listed(views, found.unreadable, site.no_tick, searches)


def _queue(store: Store, state: StackState | None, now: float, *records: Record) -> Queue | None:
    names = {record.job: record.name for record in records if lookup.may_wait(record)}
    return lookup.queue_of(store, state, now, names)


def watch_list(stack: str | None, *, finished: bool, words: str) -> None:
    """Show the list of jobs until Ctrl-C, read again every ``LIST_S``; CliError without a terminal."""
    from rich.live import Live
    from rich.text import Text

    from spotkeeper.client.reads import Meter, metered_store

    if not sys.stdout.isatty():
        raise CliError("--watch needs a terminal", Exit.USAGE, "spotkeeper status --json")
    target = find_target(stack)
    store = metered_store(target.bucket, Meter())
    state = target.state(store)
    with Live(console=result_console(), auto_refresh=False, screen=True) as screen:
        while True:
            listed = _listed(target, store, state, finished=finished, words=words)
            table = _table(listed) if listed.views else Text(_nothing(target))
            screen.update(table, refresh=True)
            time.sleep(LIST_S)


class Sparklines:
    """Curves of up to :data:`SHOWN` metrics, read at most every :data:`METRICS_S` seconds."""

    def __init__(self, store: Store, job: str) -> None:
        self._reader = MetricsReader(store, job, GENERATIONS, SHOWN)
        self._views: tuple[MetricView, ...] = ()
        self._due = 0.0  # monotonic

    def read(self) -> tuple[MetricView, ...]:
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + METRICS_S
            with contextlib.suppress(StoreError):  # the job can make its own metrics unreadable, but not its status
                self._views = metric_views(joined(self._reader.read()), SHOWN)
        return self._views


def _readable_state(target: Target, store: Store) -> StackState | None:
    """Return the stack's document, None if it is unreadable; print a note if it or the allocation is unreadable."""
    state = None
    try:
        state = target.state(store)
    except CorruptError as error:
        note(f"{error}\n  no job is reconciled; running jobs continue\n  try: {error.remedy}")
    try:
        store.read_allocation()
    except CorruptError as error:
        note(f"{error}\n  no machine is created or deleted; running jobs continue\n  try: {error.remedy}")
    return state


# -- watch


def watch_job(job: str, stack: str | None, *, verbose: bool, as_json: bool) -> None:
    """Follow a job; CliError if it fails, is cancelled or goes on hold."""
    store, record, read = _followed(job, stack)
    sparklines = Sparklines(store, record.job)
    code = watch(lambda: replace(read(), metrics=sparklines.read()), as_json, verbose=verbose)
    if code is not Exit.OK:
        raise _failed(store, record, code)
    if not as_json:
        _note_output(store, record)


def _followed(word: str, stack: str | None) -> tuple[Store, Record, Callable[[], JobView]]:
    """Return the job with this name or id, and what reads its view anew."""
    target = find_target(stack)
    store = target.store()
    state = target.state(store)
    record = lookup.find_job(store, word)
    deadline = lookup.deadline_of(store, record)

    def read() -> JobView:
        newest, now = lookup.record_of(store, record.job), target.clock.now()
        site = lookup.site_of(store, state, target)
        view = lookup.view_of(store, newest, state, now, site, deadline, queue=_queue(store, state, now, newest))
        return replace(view, search=trial_part_of(store, newest))

    return store, record, read


def events(job: str, stack: str | None, *, follow: bool, verbose: bool, as_json: bool) -> None:
    """Print a job's events, oldest first; with ``follow`` also new ones, until the job ends or waits for a person."""
    from spotkeeper.report.job.lines import event_line
    from spotkeeper.report.money.account_text import clock

    _, record, read = _followed(job, stack)
    printed: set[str] = set()
    while True:
        view = read()
        for line in _unprinted(view, printed):
            text = f"{clock(record.created + line.at)}  {event_line(line, verbose=verbose)}"
            emit_line(line) if as_json else say(text)
        if not follow or view.stands():
            return
        time.sleep(EVERY_S)


def _unprinted(view: JobView, printed: set[str]) -> Iterator[EventLine]:
    """Yield the events whose ids are not in ``printed``, and put them there."""
    for line in view.events:
        if line.id not in printed:
            printed.add(line.id)
            yield line


def _failed(store: Store, record: Record, code: Exit) -> CliError:
    held = store.read_record(record.job)
    why = held.value.hold if held is not None and held.value.phase is Phase.HOLD else None
    who, remedy = f"{record.name} ({record.job})", f"spotkeeper resume {record.name}"
    if why is Hold.SPEND:
        return CliError(f"{who} has spent its max_usd and is on hold", code, f"{remedy} (to spend max_usd once more)")
    if why is Hold.MAX_WAIT:
        return CliError(f"{who} got no spot machines within max_wait and is on hold", code, f"{remedy} (to wait again)")
    if why is not None:
        return CliError(f"{who} failed and is on hold", code, f"spotkeeper logs {record.job}, then {remedy} [JOB.YAML]")
    if held is not None and held.value.outcome is Outcome.CANCELLED:
        return CliError(f"{who} was cancelled", code)
    if held is not None and held.value.outcome is Outcome.STOPPED:
        return CliError(f"{who} was stopped by its search: {held.value.reason}", code)
    return CliError(f"{who} did not succeed", code, f"spotkeeper logs {record.job}")


def _note_output(store: Store, record: Record) -> None:
    from spotkeeper.cli.jobs.download import summary
    from spotkeeper.report.job.lines import output_line

    if (held := store.read_record(record.job)) and (output := summary(store, held.value)):
        note(output_line(output, record.name))


def watch(
    read: Callable[[], JobView], as_json: bool, wait: Callable[[float], None] = time.sleep, *, verbose: bool = False
) -> Exit:
    """Show the job until it ends, or is on hold and waits for a person; Ctrl-C leaves it running.

    Returns:
        OK if the job succeeded; FAILED if it failed, is on hold, or was cancelled.
    """
    plain = as_json or not sys.stdout.isatty()
    try:
        view = _lines(read, as_json, wait, verbose) if plain else _live(read, wait, verbose)
    except KeyboardInterrupt:
        note("the job keeps running; spotkeeper watch follows it again")
        raise
    return Exit.OK if view.outcome is Outcome.SUCCEEDED else Exit.FAILED


def _live(read: Callable[[], JobView], wait: Callable[[float], None], verbose: bool) -> JobView:
    """Show the live view on the alternate screen, so that a resize or a key leaves nothing in the scrollback.

    At the end, also after a Ctrl-C, the last view is printed to the scrollback once.
    """
    from rich.live import Live

    from spotkeeper.report.text.render import crash_log, live

    out = result_console()
    view = read()
    try:
        if not view.stands():
            with Live(Fitted(view, verbose), console=out, auto_refresh=False, screen=True) as screen:
                while not view.stands():
                    wait(EVERY_S)
                    view = read()
                    screen.update(Fitted(view, verbose), refresh=True)
    finally:
        out.print(live(view, verbose=verbose))
    if view.crash_log:
        out.print(crash_log(view), crop=False)
    return view


@dataclass(frozen=True)
class Fitted:
    """The live view with as many of its last events as fit on the screen."""

    view: JobView
    verbose: bool = False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from spotkeeper.report.text.render import live

        own = options.reset_height()  # a panel would fill the given height
        for rows in range(EVENTS, 0, -1):
            panel = live(self.view, rows, verbose=self.verbose)
            if len(console.render_lines(panel, own)) <= options.max_height or rows == 1:
                yield from console.render(panel, own)
                return


def _lines(read: Callable[[], JobView], as_json: bool, wait: Callable[[float], None], verbose: bool) -> JobView:
    from spotkeeper.report.job.lines import event_line, headline, hold_lines, kept_lines, money_line, queue_lines, title

    printed: set[str] = set()
    silent, place = False, ""
    while True:
        view = read()
        if view.site.no_tick and not silent and not as_json:
            say(view.site.no_tick)
        silent = bool(view.site.no_tick)
        if view.queue is not None and place != title(view) and not as_json:
            place = title(view)
            say("\n".join([place, *queue_lines(view)]))
        for line in _unprinted(view, printed):
            emit_line(line) if as_json else say(event_line(line, verbose=verbose))
        if view.stands():
            break
        wait(EVERY_S)
    if as_json:
        emit_line(view)
        return view
    say("\n".join([headline(view), money_line(view), *view.crash_log, *hold_lines(view), *kept_lines(view)]))
    return view
