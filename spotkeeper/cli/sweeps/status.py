"""``sweep status``: a search's trials, once or until Ctrl-C; without a name, all searches."""

from __future__ import annotations

import contextlib
import sys
import time

from msgspec import Struct

from spotkeeper.cli.output import emit, note, result_console
from spotkeeper.cli.stack import note_upkeep
from spotkeeper.client import find_target, lookup
from spotkeeper.client.errors import CliError, Exit
from spotkeeper.client.sweep_status import find_sweep, read_view
from spotkeeper.client.target import Target, silence
from spotkeeper.contract.stack import StackState
from spotkeeper.reconcile.store.documents import CorruptError
from spotkeeper.reconcile.store.store import Store
from spotkeeper.report.sweep import SweepView

EVERY_S = 10.0  # real


class Shown(Struct, frozen=True):
    """What to show, and how. ``every``: all trials, not only the best ones."""

    every: bool = False
    as_csv: bool = False
    live: bool = False
    as_json: bool = False


def run(name: str | None, stack: str | None, shown: Shown) -> None:
    """Print a search, or the names of all.

    Raises:
        CliError: no such search; or options that exclude each other.
        StoreError: the bucket failed.
    """
    if shown.as_csv + shown.as_json + shown.live > 1:
        raise CliError("--csv, --json and --watch exclude each other", Exit.USAGE)
    target = find_target(stack)
    store = target.store()
    state: StackState | None = None
    with contextlib.suppress(CorruptError):
        state = target.state(store)
    if name is None:
        names = store.list_sweeps()
        emit(names, shown.as_json, "\n".join(names) or f"the stack {target.stack} has no searches")
        return
    if shown.live:
        _watch(target, name, every=shown.every)
    note_upkeep(target.local)
    view = _read(target, store, state, name)
    if late := silence(store, state, target):
        note(late)
    from spotkeeper.report.text import sweep as words

    text = words.trials_csv(view) if shown.as_csv else words.status(view, None if shown.every else words.SHOWN)
    emit(view, shown.as_json, text)


def _read(target: Target, store: Store, state: StackState | None, name: str) -> SweepView:
    site = lookup.site_of(store, state, target)
    return read_view(store, find_sweep(store, name), state, target.clock.now(), site)


def _watch(target: Target, name: str, *, every: bool) -> None:
    """Show a search until Ctrl-C, read again every ``EVERY_S``; CliError without a terminal."""
    from rich.live import Live

    from spotkeeper.client.reads import Meter, metered_store
    from spotkeeper.report.text import sweep as words

    if not sys.stdout.isatty():
        raise CliError("--watch needs a terminal", Exit.USAGE, f"spotkeeper sweep status {name} --json")
    store = metered_store(target.bucket, Meter())
    state = target.state(store)
    most = None if every else words.SHOWN
    with Live(console=result_console(), auto_refresh=False, screen=True) as screen:
        while True:
            screen.update(words.status(_read(target, store, state, name), most), refresh=True)
            time.sleep(EVERY_S)
